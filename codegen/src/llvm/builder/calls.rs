//! Calls of functions and of LLVM intrinsics.

use super::{Fb, Function, Ty, Value, ok};
use inkwell::attributes::AttributeLoc;
use inkwell::values::{BasicMetadataValueEnum, BasicValue};

impl<'c> Fb<'_, 'c> {
    /// Call of a function of this module or a declared one.
    pub fn call(&self, function: &Function<'c>, args: &[Value<'c>]) -> Option<Value<'c>> {
        let types: Vec<_> = args.iter().map(|a| a.ty).collect();
        assert_eq!(types, function.params, "arguments of {:?}", function.raw.get_name());
        let args: Vec<BasicMetadataValueEnum> = args.iter().map(|a| a.raw.into()).collect();
        let site = ok(self.builder.build_call(function.raw, &args, ""));
        function.ret.map(|ty| self.value(site.try_as_basic_value().expect_basic("call with a result"), ty))
    }
    /// Address of a function, for [`Fb::call_at`].
    pub fn address(&self, function: &Function<'c>) -> Value<'c> {
        self.value(function.raw.as_global_value().as_pointer_value().into(), Ty::PTR)
    }
    /// Call of the function at this address; it has these parameters, and no result.
    pub fn call_at(&self, address: Value<'c>, params: &[Ty], args: &[Value<'c>]) {
        let types: Vec<_> = args.iter().map(|a| a.ty).collect();
        assert_eq!(types, params, "arguments of a function by its address");
        let args: Vec<BasicMetadataValueEnum> = args.iter().map(|a| a.raw.into()).collect();
        let ty = self.mb.function_type(&types, None);
        let site = ok(self.builder.build_indirect_call(ty, address.raw.into_pointer_value(), &args, ""));
        site.add_attribute(AttributeLoc::Function, self.mb.enum_attribute("nounwind"));
    }
    /// Call of an LLVM intrinsic by its full (mangled) name, for example `llvm.x86.avx512bf16.dpbf16ps.512`.
    pub fn intrinsic(&self, name: &str, ret: Ty, args: &[Value<'c>]) -> Value<'c> {
        let params: Vec<_> = args.iter().map(|a| a.ty).collect();
        self.call(&self.mb.declare(name, &params, Some(ret)), args).expect("a result")
    }
    /// Intrinsic without a result.
    pub fn intrinsic_void(&self, name: &str, args: &[Value<'c>]) {
        let params: Vec<_> = args.iter().map(|a| a.ty).collect();
        self.call(&self.mb.declare(name, &params, None), args);
    }
    /// Return.
    pub fn ret(&self, value: Option<Value<'c>>) {
        let raw = value.map(|v| v.raw);
        ok(self.builder.build_return(raw.as_ref().map(|v| v as &dyn BasicValue<'c>)));
    }
}
