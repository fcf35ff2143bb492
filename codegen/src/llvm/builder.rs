//! The vector builder: a small typed layer over LLVM's instruction builder, in which every kernel generator is written.
//!
//! [`ModuleBuilder`] holds one LLVM module; [`ModuleBuilder::define`] hands out an [`Fb`] (function builder) for one function. All
//! values are [`Value`] handles: a scalar (`lanes == 1`) or a fixed vector of one [`Elem`] type, or a pointer. Operations check types at
//! once and panic on a mismatch: a badly typed kernel is our bug, never the user's.
//!
//! No fast-math flags anywhere: `a * b + c` is fused only by [`Fb::fma`], sums keep their order. Integers wrap.
//! Methods take `&self`, so that closures of loops can use the builder that they are nested in.

mod arithmetic;
mod calls;
mod control;
mod conversions;
mod instructions;
mod memory;
mod vectors;

pub use self::arithmetic::Cmp;
pub use self::instructions::Codes;

use crate::isa::Isa;
use crate::program::DType;
use inkwell::AddressSpace;
use inkwell::attributes::{Attribute, AttributeLoc};
use inkwell::basic_block::BasicBlock;
use inkwell::builder::Builder;
use inkwell::context::Context;
use inkwell::module::{Linkage, Module};
use inkwell::types::{BasicType, BasicTypeEnum, FunctionType};
use inkwell::values::{BasicValueEnum, FunctionValue, IntValue, UnnamedAddress};

/// Element types of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Elem {
    I1,
    I8,
    I16,
    I32,
    I64,
    F16,
    Bf16,
    F32,
    Ptr,
}

impl Elem {
    /// Bits of one element (pointers: 64).
    pub fn bits(self) -> u32 {
        match self {
            Elem::I1 => 1,
            Elem::I8 => 8,
            Elem::I16 | Elem::F16 | Elem::Bf16 => 16,
            Elem::I32 | Elem::F32 => 32,
            Elem::I64 | Elem::Ptr => 64,
        }
    }
    /// Is it a floating-point type?
    pub fn is_float(self) -> bool {
        matches!(self, Elem::F16 | Elem::Bf16 | Elem::F32)
    }
}

/// Type of a value: `lanes == 1` is a scalar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ty {
    /// Element.
    pub elem: Elem,
    /// Number of elements.
    pub lanes: u32,
}

#[allow(missing_docs)]
impl Ty {
    pub const I1: Ty = Ty::scalar(Elem::I1);
    pub const I32: Ty = Ty::scalar(Elem::I32);
    pub const I64: Ty = Ty::scalar(Elem::I64);
    pub const F32: Ty = Ty::scalar(Elem::F32);
    pub const PTR: Ty = Ty::scalar(Elem::Ptr);

    /// One element.
    pub const fn scalar(elem: Elem) -> Ty {
        Ty { elem, lanes: 1 }
    }
    /// A vector (a scalar when `lanes` is 1).
    pub const fn vec(elem: Elem, lanes: u32) -> Ty {
        Ty { elem, lanes }
    }
    /// Same number of lanes, other element.
    pub const fn with(self, elem: Elem) -> Ty {
        Ty { elem, lanes: self.lanes }
    }
    /// Bits in all.
    pub fn bits(self) -> u32 {
        self.elem.bits() * self.lanes
    }
}

/// Handle of an SSA value.
#[derive(Clone, Copy, Debug)]
pub struct Value<'c> {
    raw: BasicValueEnum<'c>,
    ty: Ty,
}

impl Value<'_> {
    /// Its type.
    pub fn ty(&self) -> Ty {
        self.ty
    }
    /// Number of lanes (1: scalar).
    pub fn lanes(&self) -> u32 {
        self.ty.lanes
    }
    /// The value of an integer constant.
    pub fn as_const_int(&self) -> Option<i64> {
        match self.raw {
            BasicValueEnum::IntValue(v) => v.get_sign_extended_constant(),
            _ => None,
        }
    }
}

/// Handle of a function of the module.
#[derive(Clone, Debug)]
pub struct Function<'c> {
    raw: FunctionValue<'c>,
    params: Vec<Ty>,
    ret: Option<Ty>,
}

/// Who sees a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    /// Other objects of the executable.
    Export,
    /// The same; never inlined where this module calls it, either.
    ExportNoInline,
    /// This module only, never inlined (one copy of large code that is called from several places).
    InternalNoInline,
}

/// One LLVM module under construction.
pub struct ModuleBuilder<'c> {
    pub(super) context: &'c Context,
    pub(super) module: Module<'c>,
    isa: Isa,
}

fn ok<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|e| panic!("LLVM builder: {e}"))
}

impl<'c> ModuleBuilder<'c> {
    /// An empty module. Triple and data layout are set by [`super::module::build`].
    pub(super) fn new(context: &'c Context, name: &str, isa: &Isa) -> Self {
        ModuleBuilder { context, module: context.create_module(name), isa: isa.clone() }
    }

    /// The target.
    pub fn isa(&self) -> &Isa {
        &self.isa
    }

    fn basic_type(&self, ty: Ty) -> BasicTypeEnum<'c> {
        let c = self.context;
        macro_rules! shaped {
            ($t:expr) => {{
                let t = $t;
                if ty.lanes == 1 { t.as_basic_type_enum() } else { t.vec_type(ty.lanes).as_basic_type_enum() }
            }};
        }
        match ty.elem {
            Elem::I1 => shaped!(c.bool_type()),
            Elem::I8 => shaped!(c.i8_type()),
            Elem::I16 => shaped!(c.i16_type()),
            Elem::I32 => shaped!(c.i32_type()),
            Elem::I64 => shaped!(c.i64_type()),
            Elem::F16 => shaped!(c.f16_type()),
            Elem::Bf16 => shaped!(c.bf16_type()),
            Elem::F32 => shaped!(c.f32_type()),
            Elem::Ptr => shaped!(c.ptr_type(AddressSpace::default())),
        }
    }

    fn function_type(&self, params: &[Ty], ret: Option<Ty>) -> FunctionType<'c> {
        let params: Vec<_> = params.iter().map(|&t| self.basic_type(t).into()).collect();
        match ret {
            Some(t) => self.basic_type(t).fn_type(&params, false),
            None => self.context.void_type().fn_type(&params, false),
        }
    }

    fn enum_attribute(&self, name: &str) -> Attribute {
        self.context.create_enum_attribute(Attribute::get_named_enum_kind_id(name), 0)
    }

    /// Declares a function that another object defines (or a target intrinsic); the same name gives the same function.
    pub fn declare(&self, name: &str, params: &[Ty], ret: Option<Ty>) -> Function<'c> {
        let raw = self.module.get_function(name).unwrap_or_else(|| {
            let f = self.module.add_function(name, self.function_type(params, ret), None);
            if !name.starts_with("llvm.") {
                f.add_attribute(AttributeLoc::Function, self.enum_attribute("nounwind"));
            }
            f
        });
        Function { raw, params: params.to_vec(), ret }
    }

    /// Adds a function for the target and builds its body. `body` must end with [`Fb::ret`], or may leave out `ret(None)`.
    pub fn define(
        &self,
        name: &str,
        params: &[Ty],
        ret: Option<Ty>,
        visibility: Visibility,
        body: impl FnOnce(&Fb<'_, 'c>, &[Value<'c>]),
    ) -> Function<'c> {
        let (internal, inline) = match visibility {
            Visibility::Export => (false, true),
            Visibility::ExportNoInline => (false, false),
            Visibility::InternalNoInline => (true, false),
        };
        let linkage = internal.then_some(Linkage::Internal);
        let raw = self.module.add_function(name, self.function_type(params, ret), linkage);
        let isa = &self.isa;
        for (key, value) in isa.function_attributes() {
            raw.add_attribute(AttributeLoc::Function, self.context.create_string_attribute(key, &value));
        }
        raw.add_attribute(AttributeLoc::Function, self.enum_attribute("nounwind"));
        if !inline {
            raw.add_attribute(AttributeLoc::Function, self.enum_attribute("noinline"));
        }
        let function = Function { raw, params: params.to_vec(), ret };
        let builder = self.context.create_builder();
        builder.position_at_end(self.context.append_basic_block(raw, "entry"));
        let fb = Fb { mb: self, builder, function: raw };
        let args: Vec<_> = params.iter().enumerate().map(|(i, &ty)| Value { raw: raw.get_nth_param(i as u32).unwrap(), ty }).collect();
        body(&fb, &args);
        if fb.block().get_terminator().is_none() {
            assert!(ret.is_none(), "{name}: missing return value");
            fb.ret(None);
        }
        function
    }

    /// A private constant table of i64 (16-byte aligned); returns its address.
    pub fn const_table(&self, name: &str, values: &[i64]) -> Value<'c> {
        let ty = self.context.i64_type();
        let items: Vec<_> = values.iter().map(|&v| ty.const_int(v as u64, true)).collect();
        let global = self.module.add_global(ty.array_type(values.len() as u32), None, name);
        global.set_initializer(&ty.const_array(&items));
        global.set_constant(true);
        global.set_linkage(Linkage::Private);
        global.set_unnamed_address(UnnamedAddress::Global);
        global.set_alignment(16);
        Value { raw: global.as_pointer_value().into(), ty: Ty::PTR }
    }
}

/// Builder of one function, positioned at the end of a basic block.
pub struct Fb<'m, 'c> {
    mb: &'m ModuleBuilder<'c>,
    builder: Builder<'c>,
    function: FunctionValue<'c>,
}

impl<'m, 'c> Fb<'m, 'c> {
    /// The target.
    pub fn isa(&self) -> &'m Isa {
        &self.mb.isa
    }
    /// The module.
    pub fn module(&self) -> &'m ModuleBuilder<'c> {
        self.mb
    }
    /// f32 lanes of a full vector.
    pub fn lanes(&self) -> u32 {
        self.mb.isa.lanes
    }

    fn block(&self) -> BasicBlock<'c> {
        self.builder.get_insert_block().expect("positioned")
    }
    fn value(&self, raw: BasicValueEnum<'c>, ty: Ty) -> Value<'c> {
        Value { raw, ty }
    }

    /// i64 constant.
    pub fn int(&self, value: i64) -> Value<'c> {
        self.value(self.mb.context.i64_type().const_int(value as u64, true).into(), Ty::I64)
    }
    /// i32 constant.
    pub fn i32(&self, value: i32) -> Value<'c> {
        self.value(self.mb.context.i32_type().const_int(value as u64, true).into(), Ty::I32)
    }
    /// Constant of any integer type.
    pub fn int_of(&self, elem: Elem, value: i64) -> Value<'c> {
        let raw = self.mb.basic_type(Ty::scalar(elem)).into_int_type().const_int(value as u64, true);
        self.value(raw.into(), Ty::scalar(elem))
    }
    /// i1 constant.
    pub fn bool(&self, value: bool) -> Value<'c> {
        self.value(self.mb.context.bool_type().const_int(value.into(), false).into(), Ty::I1)
    }
    /// f32 constant.
    pub fn f32(&self, value: f32) -> Value<'c> {
        self.value(self.mb.context.f32_type().const_float(value.into()).into(), Ty::F32)
    }
    /// f32 constant in all lanes.
    pub fn f32s(&self, value: f32, lanes: u32) -> Value<'c> {
        self.splat(self.f32(value), lanes)
    }
    /// Zero of any type.
    pub fn zero(&self, ty: Ty) -> Value<'c> {
        self.value(self.mb.basic_type(ty).const_zero(), ty)
    }
    /// Constant vector of integers.
    pub fn int_vec(&self, elem: Elem, values: &[i64]) -> Value<'c> {
        let items: Vec<IntValue> = values.iter().map(|&v| self.int_of(elem, v).raw.into_int_value()).collect();
        if let [item] = items[..] {
            return self.value(item.into(), Ty::scalar(elem));
        }
        self.value(inkwell::types::VectorType::const_vector(&items).into(), Ty::vec(elem, items.len() as u32))
    }
    /// `[0, 1, 2, ...]`.
    pub fn iota(&self, elem: Elem, lanes: u32) -> Value<'c> {
        self.int_vec(elem, &(0..i64::from(lanes)).collect::<Vec<_>>())
    }
}

/// Element type in memory of a stored type (bf16 as its bits).
pub fn storage(dtype: DType) -> Elem {
    match dtype {
        DType::F32 => Elem::F32,
        DType::F16 => Elem::F16,
        DType::Bf16 => Elem::I16,
        DType::I32 => Elem::I32,
        DType::I8 | DType::U8 => Elem::I8,
    }
}

/// Suffix of overloaded intrinsics.
fn mangle(ty: Ty) -> String {
    let elem = match ty.elem {
        Elem::I1 => "i1",
        Elem::I8 => "i8",
        Elem::I16 => "i16",
        Elem::I32 => "i32",
        Elem::I64 => "i64",
        Elem::F16 => "f16",
        Elem::Bf16 => "bf16",
        Elem::F32 => "f32",
        Elem::Ptr => "p0",
    };
    if ty.lanes == 1 { elem.to_string() } else { format!("v{}{elem}", ty.lanes) }
}
