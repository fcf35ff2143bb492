//! The vector builder: a small typed layer over LLVM's instruction builder, in which every kernel generator is written.
//!
//! [`ModuleBuilder`] holds one LLVM module; [`ModuleBuilder::define`] hands out an [`Fb`] (function builder) for one function. All
//! values are [`Value`] handles: a scalar (`lanes == 1`) or a fixed vector of one [`Elem`] type, or a pointer. Operations check types at
//! once and panic on a mismatch: a badly typed kernel is our bug, never the user's.
//!
//! No fast-math flags anywhere: `a * b + c` is fused only by [`Fb::fma`], sums keep their order. Integers wrap.
//! Methods take `&self`, so that closures of loops can use the builder that they are nested in.

use crate::isa::{Arch, Int8Dot, Isa};
use crate::program::DType;
use inkwell::attributes::{Attribute, AttributeLoc};
use inkwell::basic_block::BasicBlock;
use inkwell::builder::Builder;
use inkwell::context::Context;
use inkwell::module::{Linkage, Module};
use inkwell::types::{BasicType, BasicTypeEnum, FunctionType};
use inkwell::values::{
    BasicMetadataValueEnum, BasicValue, BasicValueEnum, FunctionValue, InstructionOpcode, IntValue, PointerValue, UnnamedAddress,
    VectorValue,
};
use inkwell::{AddressSpace, AtomicOrdering, AtomicRMWBinOp, FloatPredicate, IntPredicate};

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

/// Comparisons: signed for integers, ordered for floats except [`Cmp::Ne`] (true for NaN), as in Rust.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Cmp {
    Lt,
    Le,
    Gt,
    Ge,
    Eq,
    Ne,
}

/// What the weights of an int8 dot are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Bytes as `Isa::code_type` says.
    Bytes,
    /// 0 to 15, one to a byte.
    Nibbles,
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
    /// This module only; LLVM may inline it.
    Internal,
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
        let linkage = (visibility != Visibility::Export).then_some(Linkage::Internal);
        let raw = self.module.add_function(name, self.function_type(params, ret), linkage);
        let isa = &self.isa;
        for (key, value) in isa.function_attributes() {
            raw.add_attribute(AttributeLoc::Function, self.context.create_string_attribute(key, &value));
        }
        raw.add_attribute(AttributeLoc::Function, self.enum_attribute("nounwind"));
        if visibility == Visibility::InternalNoInline {
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

    // ---- constants -------------------------------------------------------------------------------------------------------

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

    // ---- vectors ---------------------------------------------------------------------------------------------------------

    /// The scalar in all lanes; a vector of that many lanes stays as it is.
    pub fn splat(&self, scalar: Value<'c>, lanes: u32) -> Value<'c> {
        if scalar.ty.lanes == lanes {
            return scalar;
        }
        assert_eq!(scalar.ty.lanes, 1, "splat of a vector");
        let ty = Ty::vec(scalar.ty.elem, lanes);
        let poison = self.mb.basic_type(ty).into_vector_type().get_poison();
        let zero = self.mb.context.i32_type().const_zero();
        let one = ok(self.builder.build_insert_element(poison, scalar.raw, zero, ""));
        let mask = self.mb.context.i32_type().vec_type(lanes).const_zero();
        let mb_poison = self.mb.basic_type(ty).into_vector_type().get_poison();
        self.value(self.shuffle_raw(one, mb_poison, mask), ty)
    }
    fn shuffle_raw(&self, a: VectorValue<'c>, b: VectorValue<'c>, mask: VectorValue<'c>) -> BasicValueEnum<'c> {
        ok(self.builder.build_shuffle_vector(a, b, mask, "")).into()
    }
    /// Lanes of `a ++ b` by constant numbers.
    pub fn shuffle(&self, a: Value<'c>, b: Value<'c>, lanes: &[u32]) -> Value<'c> {
        assert_eq!(a.ty, b.ty, "shuffle");
        assert!(a.ty.lanes > 1 && lanes.len() > 1, "shuffle of scalars");
        let mask = self.int_vec(Elem::I32, &lanes.iter().map(|&l| l.into()).collect::<Vec<_>>());
        let raw = self.shuffle_raw(a.raw.into_vector_value(), b.raw.into_vector_value(), mask.raw.into_vector_value());
        self.value(raw, Ty::vec(a.ty.elem, lanes.len() as u32))
    }
    /// One lane.
    pub fn extract(&self, vector: Value<'c>, lane: u32) -> Value<'c> {
        if vector.ty.lanes == 1 {
            return vector;
        }
        let index = self.mb.context.i32_type().const_int(lane.into(), false);
        let raw = ok(self.builder.build_extract_element(vector.raw.into_vector_value(), index, ""));
        self.value(raw, Ty::scalar(vector.ty.elem))
    }
    /// Replaces one lane.
    pub fn insert(&self, vector: Value<'c>, lane: u32, scalar: Value<'c>) -> Value<'c> {
        assert_eq!(scalar.ty, Ty::scalar(vector.ty.elem), "insert");
        if vector.ty.lanes == 1 {
            return scalar;
        }
        let index = self.mb.context.i32_type().const_int(lane.into(), false);
        let raw = ok(self.builder.build_insert_element(vector.raw.into_vector_value(), scalar.raw, index, ""));
        self.value(raw.into(), vector.ty)
    }
    /// A vector of scalars.
    pub fn gather_lanes(&self, scalars: &[Value<'c>]) -> Value<'c> {
        let ty = Ty::vec(scalars[0].ty.elem, scalars.len() as u32);
        let mut v = self.zero(ty);
        for (i, &s) in scalars.iter().enumerate() {
            v = self.insert(v, i as u32, s);
        }
        v
    }
    /// Half of a vector: lanes `0..n/2` or `n/2..n`.
    pub fn half(&self, vector: Value<'c>, high: bool) -> Value<'c> {
        let n = vector.ty.lanes / 2;
        let first = if high { n } else { 0 };
        if n == 1 {
            return self.extract(vector, first);
        }
        self.shuffle(vector, vector, &(first..first + n).collect::<Vec<_>>())
    }
    /// Horizontal reduction in a fixed tree order: halves against halves until one lane is left.
    pub fn reduce(&self, vector: Value<'c>, op: impl Fn(Value<'c>, Value<'c>) -> Value<'c>) -> Value<'c> {
        assert!(vector.ty.lanes.is_power_of_two());
        let mut v = vector;
        while v.ty.lanes > 1 {
            v = op(self.half(v, false), self.half(v, true));
        }
        v
    }

    // ---- arithmetic ------------------------------------------------------------------------------------------------------

    fn binop(&self, op: InstructionOpcode, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        assert_eq!(a.ty, b.ty, "{op:?}");
        self.value(ok(self.builder.build_binop(op, a.raw, b.raw, "")), a.ty)
    }
    fn int_or_float(&self, int: InstructionOpcode, float: InstructionOpcode, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        assert!(a.ty.elem != Elem::Ptr, "arithmetic on pointers");
        self.binop(if a.ty.elem.is_float() { float } else { int }, a, b)
    }
    /// `a + b`, integer or float.
    pub fn add(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.int_or_float(InstructionOpcode::Add, InstructionOpcode::FAdd, a, b)
    }
    /// `a - b`.
    pub fn sub(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.int_or_float(InstructionOpcode::Sub, InstructionOpcode::FSub, a, b)
    }
    /// `a * b`.
    pub fn mul(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.int_or_float(InstructionOpcode::Mul, InstructionOpcode::FMul, a, b)
    }
    /// `a / b`; integers: unsigned.
    pub fn div(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.int_or_float(InstructionOpcode::UDiv, InstructionOpcode::FDiv, a, b)
    }
    /// `a % b` of unsigned integers.
    pub fn rem(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        assert!(!a.ty.elem.is_float());
        self.binop(InstructionOpcode::URem, a, b)
    }
    /// i64 `a + constant`.
    pub fn add_int(&self, a: Value<'c>, constant: i64) -> Value<'c> {
        self.add(a, self.int(constant))
    }
    /// i64 `a * constant`.
    pub fn mul_int(&self, a: Value<'c>, constant: i64) -> Value<'c> {
        self.mul(a, self.int(constant))
    }
    /// Bitwise and (i1: logical).
    pub fn and(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.binop(InstructionOpcode::And, a, b)
    }
    /// Bitwise or.
    pub fn or(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.binop(InstructionOpcode::Or, a, b)
    }
    /// Bitwise exclusive or.
    pub fn xor(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.binop(InstructionOpcode::Xor, a, b)
    }
    /// Logical not of i1.
    pub fn not(&self, a: Value<'c>) -> Value<'c> {
        assert_eq!(a.ty.elem, Elem::I1);
        self.xor(a, self.splat(self.bool(true), a.ty.lanes))
    }
    /// Shift left by a constant.
    pub fn shl(&self, a: Value<'c>, bits: u32) -> Value<'c> {
        self.binop(InstructionOpcode::Shl, a, self.splat(self.int_of(a.ty.elem, bits.into()), a.ty.lanes))
    }
    /// Logical shift right by a constant.
    pub fn lshr(&self, a: Value<'c>, bits: u32) -> Value<'c> {
        self.binop(InstructionOpcode::LShr, a, self.splat(self.int_of(a.ty.elem, bits.into()), a.ty.lanes))
    }
    /// Arithmetic shift right by a constant.
    pub fn ashr(&self, a: Value<'c>, bits: u32) -> Value<'c> {
        self.binop(InstructionOpcode::AShr, a, self.splat(self.int_of(a.ty.elem, bits.into()), a.ty.lanes))
    }
    /// Comparison -> i1 lanes.
    pub fn cmp(&self, op: Cmp, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        assert_eq!(a.ty, b.ty, "cmp");
        let ty = a.ty.with(Elem::I1);
        let raw: BasicValueEnum = if a.ty.elem.is_float() {
            let p = match op {
                Cmp::Lt => FloatPredicate::OLT,
                Cmp::Le => FloatPredicate::OLE,
                Cmp::Gt => FloatPredicate::OGT,
                Cmp::Ge => FloatPredicate::OGE,
                Cmp::Eq => FloatPredicate::OEQ,
                Cmp::Ne => FloatPredicate::UNE,
            };
            match (a.raw, b.raw) {
                (BasicValueEnum::VectorValue(x), BasicValueEnum::VectorValue(y)) => {
                    ok(self.builder.build_float_compare(p, x, y, "")).into()
                }
                _ => ok(self.builder.build_float_compare(p, a.raw.into_float_value(), b.raw.into_float_value(), "")).into(),
            }
        } else {
            let p = match op {
                Cmp::Lt => IntPredicate::SLT,
                Cmp::Le => IntPredicate::SLE,
                Cmp::Gt => IntPredicate::SGT,
                Cmp::Ge => IntPredicate::SGE,
                Cmp::Eq => IntPredicate::EQ,
                Cmp::Ne => IntPredicate::NE,
            };
            match (a.raw, b.raw) {
                (BasicValueEnum::VectorValue(x), BasicValueEnum::VectorValue(y)) => ok(self.builder.build_int_compare(p, x, y, "")).into(),
                _ => ok(self.builder.build_int_compare(p, a.raw.into_int_value(), b.raw.into_int_value(), "")).into(),
            }
        };
        self.value(raw, ty)
    }
    /// Is the pointer null?
    pub fn is_null(&self, pointer: Value<'c>) -> Value<'c> {
        self.value(ok(self.builder.build_is_null(pointer.raw.into_pointer_value(), "")).into(), Ty::I1)
    }
    /// `condition ? a : b`, per lane when the condition is a vector.
    pub fn select(&self, condition: Value<'c>, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        assert_eq!(a.ty, b.ty, "select");
        assert_eq!(condition.ty.elem, Elem::I1);
        assert!(condition.ty.lanes == 1 || condition.ty.lanes == a.ty.lanes, "select");
        let raw = match condition.raw {
            BasicValueEnum::VectorValue(c) => ok(self.builder.build_select(c, a.raw, b.raw, "")),
            c => ok(self.builder.build_select(c.into_int_value(), a.raw, b.raw, "")),
        };
        self.value(raw, a.ty)
    }
    /// Smaller one. Floats: one instruction on x86, `b` when either is NaN; see [`Fb::minimum`].
    pub fn min(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.select(self.cmp(Cmp::Lt, a, b), a, b)
    }
    /// Larger one. Floats: one instruction on x86, `b` when either is NaN; see [`Fb::maximum`].
    pub fn max(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.select(self.cmp(Cmp::Gt, a, b), a, b)
    }
    /// Smaller one; NaN when either is NaN.
    pub fn minimum(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        let nan = self.cmp(Cmp::Ne, a, a);
        self.select(nan, a, self.min(a, b))
    }
    /// Larger one; NaN when either is NaN.
    pub fn maximum(&self, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        let nan = self.cmp(Cmp::Ne, a, a);
        self.select(nan, a, self.max(a, b))
    }
    /// `a * b + c` with one rounding.
    pub fn fma(&self, a: Value<'c>, b: Value<'c>, c: Value<'c>) -> Value<'c> {
        assert!(a.ty == b.ty && b.ty == c.ty && a.ty.elem == Elem::F32, "fma");
        self.intrinsic(&format!("llvm.fma.{}", mangle(a.ty)), a.ty, &[a, b, c])
    }
    /// Correctly rounded root.
    pub fn sqrt(&self, a: Value<'c>) -> Value<'c> {
        self.intrinsic(&format!("llvm.sqrt.{}", mangle(a.ty)), a.ty, &[a])
    }
    /// `|a|`.
    pub fn abs(&self, a: Value<'c>) -> Value<'c> {
        self.intrinsic(&format!("llvm.fabs.{}", mangle(a.ty)), a.ty, &[a])
    }
    /// `magnitude` with the sign of `sign`.
    pub fn copysign(&self, magnitude: Value<'c>, sign: Value<'c>) -> Value<'c> {
        self.intrinsic(&format!("llvm.copysign.{}", mangle(sign.ty)), sign.ty, &[magnitude, sign])
    }
    /// Nearest integer, ties to even, as f32.
    pub fn round_even(&self, a: Value<'c>) -> Value<'c> {
        self.intrinsic(&format!("llvm.roundeven.{}", mangle(a.ty)), a.ty, &[a])
    }
    /// `-a` (float).
    pub fn neg(&self, a: Value<'c>) -> Value<'c> {
        let raw: BasicValueEnum = match a.raw {
            BasicValueEnum::VectorValue(v) => ok(self.builder.build_float_neg(v, "")).into(),
            v => ok(self.builder.build_float_neg(v.into_float_value(), "")).into(),
        };
        self.value(raw, a.ty)
    }

    // ---- conversions -----------------------------------------------------------------------------------------------------

    fn cast(&self, op: InstructionOpcode, a: Value<'c>, to: Elem) -> Value<'c> {
        let ty = a.ty.with(to);
        self.value(ok(self.builder.build_cast(op, a.raw, self.mb.basic_type(ty), "")), ty)
    }
    /// Same bits as another type of the same size.
    pub fn bitcast(&self, a: Value<'c>, to: Ty) -> Value<'c> {
        assert_eq!(a.ty.bits(), to.bits(), "bitcast");
        self.value(ok(self.builder.build_bit_cast(a.raw, self.mb.basic_type(to), "")), to)
    }
    /// Wider integer, zero-extended.
    pub fn zext(&self, a: Value<'c>, to: Elem) -> Value<'c> {
        if a.ty.elem == to { a } else { self.cast(InstructionOpcode::ZExt, a, to) }
    }
    /// Wider integer, sign-extended.
    pub fn sext(&self, a: Value<'c>, to: Elem) -> Value<'c> {
        if a.ty.elem == to { a } else { self.cast(InstructionOpcode::SExt, a, to) }
    }
    /// Narrower integer.
    pub fn trunc(&self, a: Value<'c>, to: Elem) -> Value<'c> {
        if a.ty.elem == to { a } else { self.cast(InstructionOpcode::Trunc, a, to) }
    }
    /// Signed integer -> f32.
    pub fn int_to_float(&self, a: Value<'c>) -> Value<'c> {
        self.cast(InstructionOpcode::SIToFP, a, Elem::F32)
    }
    /// f32 -> i32, toward zero; out of range is poison.
    pub fn float_to_i32(&self, a: Value<'c>) -> Value<'c> {
        self.cast(InstructionOpcode::FPToSI, a, Elem::I32)
    }
    /// Stored element bits -> f32, exactly: `F32` as is, `F16`, `Bf16` (given as the raw i16 or the type itself), `I8`.
    pub fn widen(&self, dtype: DType, a: Value<'c>) -> Value<'c> {
        match dtype {
            DType::F32 => a,
            DType::F16 => {
                let h = if a.ty.elem == Elem::F16 { a } else { self.bitcast(a, a.ty.with(Elem::F16)) };
                self.cast(InstructionOpcode::FPExt, h, Elem::F32)
            }
            DType::Bf16 => {
                let bits = self.bitcast(a, a.ty.with(Elem::I16));
                let wide = self.shl(self.zext(bits, Elem::I32), 16);
                self.bitcast(wide, a.ty.with(Elem::F32))
            }
            DType::I8 => self.int_to_float(self.sext(a, Elem::I32)),
            _ => panic!("widen of {dtype}"),
        }
    }
    /// f32 -> storage bits: `F32` as is, `F16` as `half`, `Bf16` as i16; nearest even, NaN stays NaN. `I8`: the nearest integer, even of
    /// two; any bits for what is not within -128 ..= 127.
    pub fn narrow(&self, dtype: DType, a: Value<'c>) -> Value<'c> {
        assert_eq!(a.ty.elem, Elem::F32);
        match dtype {
            DType::F32 => a,
            DType::F16 => self.cast(InstructionOpcode::FPTrunc, a, Elem::F16),
            DType::Bf16 if self.isa().bf16_rounds_by_truncation() => {
                self.bitcast(self.cast(InstructionOpcode::FPTrunc, a, Elem::Bf16), a.ty.with(Elem::I16))
            }
            DType::Bf16 => match self.isa().bf16_round_intrinsic(a.ty.lanes) {
                Some(name) => {
                    let narrow = self.intrinsic(name, a.ty.with(Elem::Bf16), &[a]);
                    self.bitcast(narrow, a.ty.with(Elem::I16))
                }
                // One path per target, so that a lone element gets the same bits as one inside a vector.
                None if a.ty.lanes == 1 && self.isa().bf16_round_intrinsic(8).is_some() => {
                    self.extract(self.narrow(dtype, self.splat(a, 8)), 0)
                }
                None => self.bf16_round_by_integers(a),
            },
            DType::I8 => self.trunc(self.float_to_i32(self.round_even(a)), Elem::I8),
            _ => panic!("narrow to {dtype}"),
        }
    }
    fn bf16_round_by_integers(&self, a: Value<'c>) -> Value<'c> {
        let lanes = a.ty.lanes;
        let all = |v: i64| self.splat(self.int_of(Elem::I32, v), lanes);
        let bits = self.bitcast(a, a.ty.with(Elem::I32));
        let odd = self.and(self.lshr(bits, 16), all(1));
        let rounded = self.lshr(self.add(self.add(bits, all(0x7fff)), odd), 16);
        let quiet = self.or(self.lshr(bits, 16), all(0x40));
        let nan = self.cmp(Cmp::Ne, a, a);
        self.trunc(self.select(nan, quiet, rounded), Elem::I16)
    }
    /// Rounded to the type and widened again.
    pub fn round(&self, dtype: DType, a: Value<'c>) -> Value<'c> {
        if dtype == DType::F32 { a } else { self.widen(dtype, self.narrow(dtype, a)) }
    }

    // ---- memory ----------------------------------------------------------------------------------------------------------

    /// `pointer + bytes` (i64).
    pub fn offset(&self, pointer: Value<'c>, bytes: Value<'c>) -> Value<'c> {
        self.index(pointer, bytes, 1)
    }
    /// `pointer + bytes`.
    pub fn offset_const(&self, pointer: Value<'c>, bytes: u64) -> Value<'c> {
        if bytes == 0 { pointer } else { self.offset(pointer, self.int(bytes as i64)) }
    }
    /// Address of element `index` (i64) of elements of `size` bytes.
    pub fn index(&self, pointer: Value<'c>, index: Value<'c>, size: u64) -> Value<'c> {
        assert_eq!((pointer.ty, index.ty), (Ty::PTR, Ty::I64), "index");
        let (elem, index) = match size {
            1 => (Elem::I8, index),
            2 => (Elem::I16, index),
            4 => (Elem::I32, index),
            8 => (Elem::I64, index),
            _ => (Elem::I8, self.mul_int(index, size as i64)),
        };
        let raw = self.gep(elem, pointer.raw.into_pointer_value(), index.raw.into_int_value());
        self.value(raw.into(), Ty::PTR)
    }
    fn gep(&self, elem: Elem, pointer: PointerValue<'c>, index: IntValue<'c>) -> PointerValue<'c> {
        let ty = self.mb.basic_type(Ty::scalar(elem));
        // SAFETY: LLVM only builds an address computation; inkwell marks it unsafe because a wrong index is undefined behaviour
        // of the generated program. The planner's verifier keeps indices inside their operands.
        ok(unsafe { self.builder.build_gep(ty, pointer, &[index], "") })
    }
    /// Memory of a fixed size that lives until the function returns (an `alloca` in its entry block, wherever this is called).
    pub fn stack(&self, bytes: u64, align: u32) -> Value<'c> {
        let c = self.mb.context;
        let entry = self.function.get_first_basic_block().expect("entry");
        let at_entry = c.create_builder();
        match entry.get_first_instruction() {
            Some(first) => at_entry.position_before(&first),
            None => at_entry.position_at_end(entry),
        }
        let size = u32::try_from(bytes).expect("stack memory is small");
        let slot = ok(at_entry.build_alloca(c.i8_type().array_type(size), ""));
        ok(slot.as_instruction_value().expect("alloca").set_alignment(align));
        self.value(slot.into(), Ty::PTR)
    }
    /// Load of any type; `align` in bytes.
    pub fn load(&self, ty: Ty, pointer: Value<'c>, align: u32) -> Value<'c> {
        let raw = ok(self.builder.build_load(self.mb.basic_type(ty), pointer.raw.into_pointer_value(), ""));
        ok(raw.as_instruction_value().expect("load").set_alignment(align));
        self.value(raw, ty)
    }
    /// As [`Fb::load`], but never merged with another load of the same address (volatile): reads again what would otherwise wait in a
    /// register.
    pub fn load_again(&self, ty: Ty, pointer: Value<'c>, align: u32) -> Value<'c> {
        let value = self.load(ty, pointer, align);
        ok(value.raw.as_instruction_value().expect("load").set_volatile(true));
        value
    }
    /// Store of any type.
    pub fn store(&self, value: Value<'c>, pointer: Value<'c>, align: u32) {
        let store = ok(self.builder.build_store(pointer.raw.into_pointer_value(), value.raw));
        ok(store.set_alignment(align));
    }
    /// Load of the lanes whose mask bit is set; the others are zero and not touched in memory.
    pub fn load_masked(&self, ty: Ty, pointer: Value<'c>, mask: Value<'c>, align: u32) -> Value<'c> {
        assert_eq!(mask.ty, ty.with(Elem::I1), "load_masked");
        let name = format!("llvm.masked.load.{}.p0", mangle(ty));
        self.intrinsic(&name, ty, &[pointer, self.i32(align as i32), mask, self.zero(ty)])
    }
    /// Store of the lanes whose mask bit is set.
    pub fn store_masked(&self, value: Value<'c>, pointer: Value<'c>, mask: Value<'c>, align: u32) {
        assert_eq!(mask.ty, value.ty.with(Elem::I1), "store_masked");
        let name = format!("llvm.masked.store.{}.p0", mangle(value.ty));
        self.intrinsic_void(&name, &[value, pointer, self.i32(align as i32), mask]);
    }
    /// `lanes` neighbours of a stored float type, widened to f32.
    pub fn load_f32(&self, dtype: DType, lanes: u32, pointer: Value<'c>, align: u32) -> Value<'c> {
        self.widen(dtype, self.load(Ty::vec(storage(dtype), lanes), pointer, align))
    }
    /// As [`Fb::load_f32`], masked.
    pub fn load_f32_masked(&self, dtype: DType, pointer: Value<'c>, mask: Value<'c>, align: u32) -> Value<'c> {
        self.widen(dtype, self.load_masked(mask.ty.with(storage(dtype)), pointer, mask, align))
    }
    /// `lanes` neighbours of a stored integer type, widened to i64.
    pub fn load_i64(&self, dtype: DType, lanes: u32, pointer: Value<'c>, align: u32) -> Value<'c> {
        let v = self.load(Ty::vec(storage(dtype), lanes), pointer, align);
        if dtype == DType::U8 { self.zext(v, Elem::I64) } else { self.sext(v, Elem::I64) }
    }
    /// One stored float, widened, in all lanes.
    pub fn load_broadcast(&self, dtype: DType, lanes: u32, pointer: Value<'c>) -> Value<'c> {
        self.splat(self.load_f32(dtype, 1, pointer, dtype.size() as u32), lanes)
    }
    /// `[lanes][2]` bf16 (one vector register, as words): the even and the odd elements as f32, even = low half. Both are exact.
    pub fn split_bf16_pair(&self, words: Value<'c>) -> (Value<'c>, Value<'c>) {
        let f32s = words.ty.with(Elem::F32);
        let high = self.splat(self.int_of(Elem::I32, 0xffff_0000), words.ty.lanes);
        (self.bitcast(self.shl(words, 16), f32s), self.bitcast(self.and(words, high), f32s))
    }
    /// Stores f32 lanes rounded to a float type.
    pub fn store_f32(&self, dtype: DType, value: Value<'c>, pointer: Value<'c>, align: u32) {
        self.store(self.narrow(dtype, value), pointer, align);
    }
    /// As [`Fb::store_f32`], masked.
    pub fn store_f32_masked(&self, dtype: DType, value: Value<'c>, pointer: Value<'c>, mask: Value<'c>, align: u32) {
        self.store_masked(self.narrow(dtype, value), pointer, mask, align);
    }
    /// Load of an i64 that other threads change. Orders no other access.
    pub fn load_shared(&self, pointer: Value<'c>) -> Value<'c> {
        let value = self.load(Ty::I64, pointer, 8);
        ok(value.raw.as_instruction_value().expect("load").set_atomic_ordering(AtomicOrdering::Monotonic));
        value
    }
    /// Store of an i64 that other threads read or change. Orders no other access.
    pub fn store_shared(&self, value: Value<'c>, pointer: Value<'c>) {
        let store = ok(self.builder.build_store(pointer.raw.into_pointer_value(), value.raw));
        ok(store.set_alignment(8));
        ok(store.set_atomic_ordering(AtomicOrdering::Monotonic));
    }
    /// Adds to an i64 that other threads add to as well, and returns what it was. Orders no other access.
    pub fn fetch_add(&self, pointer: Value<'c>, value: Value<'c>) -> Value<'c> {
        let (at, value) = (pointer.raw.into_pointer_value(), value.raw.into_int_value());
        let old = ok(self.builder.build_atomicrmw(AtomicRMWBinOp::Add, at, value, AtomicOrdering::Monotonic));
        self.value(old.into(), Ty::I64)
    }
    /// Hint to read soon. `locality` 3: L1, 2: L2, 1: L3, 0: streaming.
    pub fn prefetch(&self, pointer: Value<'c>, locality: u32) {
        let args = [pointer, self.i32(0), self.i32(locality as i32), self.i32(1)];
        self.intrinsic_void("llvm.prefetch.p0", &args);
    }

    // ---- calls -----------------------------------------------------------------------------------------------------------

    /// Call of a function of this module or a declared one.
    pub fn call(&self, function: &Function<'c>, args: &[Value<'c>]) -> Option<Value<'c>> {
        let types: Vec<_> = args.iter().map(|a| a.ty).collect();
        assert_eq!(types, function.params, "arguments of {:?}", function.raw.get_name());
        let args: Vec<BasicMetadataValueEnum> = args.iter().map(|a| a.raw.into()).collect();
        let site = ok(self.builder.build_call(function.raw, &args, ""));
        function.ret.map(|ty| self.value(site.try_as_basic_value().expect_basic("call with a result"), ty))
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
    /// bf16 dot: `acc[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1]` per f32 lane, `a` and `b` as words of two bf16 (`<lanes x i32>`), by
    /// the target's instruction (which flushes denormals). Panics where the target has none, see `Isa::bf16_dot`.
    pub fn dot_bf16(&self, acc: Value<'c>, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        let lanes = acc.ty.lanes;
        let name = self.isa().bf16_dot_intrinsic(lanes).expect("no bf16 dot on this target");
        let pairs = Ty::vec(Elem::Bf16, 2 * lanes);
        self.intrinsic(name, acc.ty, &[acc, self.bitcast(a, pairs), self.bitcast(b, pairs)])
    }
    /// int8 dot: `acc[i] + sum of weights[4i + j] * rows[4i + j]` per i32 lane, exact, both as words of four codes. Rows are signed (-127
    /// to 127), weights nibbles (one to a byte) or bytes as `Isa::code_type` says. Panics where the target has no `Isa::int8_dot`.
    pub fn dot_int8(&self, acc: Value<'c>, weights: Value<'c>, rows: Value<'c>, weights_are: Codes) -> Value<'c> {
        let lanes = acc.ty.lanes;
        let codes = |words: Value<'c>| self.bitcast(words, Ty::vec(Elem::I8, 4 * lanes));
        match self.isa().int8_dot(lanes).expect("no int8 dot on this target") {
            Int8Dot::Instruction(name) => match self.isa().arch {
                Arch::X86_64 => self.intrinsic(name, acc.ty, &[acc, weights, rows]),
                Arch::Aarch64 => self.intrinsic(name, acc.ty, &[acc, codes(weights), codes(rows)]),
            },
            Int8Dot::Pairs { bytes, words, sign } => {
                let (weights, rows) = (codes(weights), codes(rows));
                let (unsigned, signed) = match weights_are {
                    Codes::Nibbles => (weights, rows),
                    Codes::Bytes => (self.magnitude(weights), self.with_sign_of(rows, weights, sign)),
                };
                let products = self.intrinsic(bytes, Ty::vec(Elem::I16, 2 * lanes), &[unsigned, signed]);
                self.add_words_by(acc, products, words)
            }
        }
    }
    /// The first of the three instructions ([`Int8Dot::Pairs`]) alone: to sums in words, two for each i32 lane of `weights` (nibbles) and
    /// `rows` (signed bytes), which must not overflow.
    pub fn dot_nibbles(&self, sums: Value<'c>, weights: Value<'c>, rows: Value<'c>) -> Value<'c> {
        let Some(Int8Dot::Pairs { bytes, .. }) = self.isa().int8_dot(weights.ty.lanes) else { unreachable!("dots in pairs") };
        let [weights, rows] = [weights, rows].map(|words| self.bitcast(words, Ty::vec(Elem::I8, 4 * words.ty.lanes)));
        self.add(sums, self.intrinsic(bytes, sums.ty, &[weights, rows]))
    }
    /// The other two: both words of a lane to its sum.
    pub fn add_words(&self, sums: Value<'c>, words: Value<'c>) -> Value<'c> {
        let Some(Int8Dot::Pairs { words: name, .. }) = self.isa().int8_dot(sums.ty.lanes) else { unreachable!("dots in pairs") };
        self.add_words_by(sums, words, name)
    }
    fn add_words_by(&self, sums: Value<'c>, words: Value<'c>, intrinsic: &str) -> Value<'c> {
        let ones = self.splat(self.int_of(Elem::I16, 1), words.ty.lanes);
        self.add(sums, self.intrinsic(intrinsic, sums.ty, &[words, ones]))
    }
    /// `|a|` of signed bytes, as unsigned ones.
    fn magnitude(&self, a: Value<'c>) -> Value<'c> {
        let minimum_is_poison = self.value(self.mb.context.bool_type().const_zero().into(), Ty::I1);
        self.intrinsic(&format!("llvm.abs.{}", mangle(a.ty)), a.ty, &[a, minimum_is_poison])
    }
    /// Signed bytes `a`, negated where `b` is negative (and anything where it is zero).
    fn with_sign_of(&self, a: Value<'c>, b: Value<'c>, intrinsic: Option<&str>) -> Value<'c> {
        match intrinsic {
            Some(name) => self.intrinsic(name, a.ty, &[a, b]),
            None => {
                let zero = self.zero(a.ty);
                self.select(self.cmp(Cmp::Lt, b, zero), self.sub(zero, a), a)
            }
        }
    }
    /// int8 matrix product of signed codes: `acc: i32[2 rows][2 columns]` plus `a: [2 rows][8 k]` times `b: [2 columns][8 k]` (Arm only).
    pub fn smmla(&self, acc: Value<'c>, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.intrinsic("llvm.aarch64.neon.smmla.v4i32.v16i8", acc.ty, &[acc, a, b])
    }
    /// bf16 matrix product: `acc: [2 rows][2 columns]` plus `a: [2 rows][4 k]` times `b: [2 columns][4 k]` (Arm only).
    pub fn bfmmla(&self, acc: Value<'c>, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.intrinsic("llvm.aarch64.neon.bfmmla", acc.ty, &[acc, a, b])
    }
    /// Gives the tile registers the shapes of the 64 bytes at `config`, and zeros (AMX only, like all `tile_` functions; registers are
    /// numbers up to 7).
    pub fn tile_config(&self, config: Value<'c>) {
        self.intrinsic_void("llvm.x86.ldtilecfg", &[config]);
    }
    /// Gives them up, so that the system need not save them.
    pub fn tile_release(&self) {
        self.intrinsic_void("llvm.x86.tilerelease", &[]);
    }
    /// Zeros.
    pub fn tile_zero(&self, tile: u32) {
        self.intrinsic_void("llvm.x86.tilezero", &[self.tile(tile)]);
    }
    /// Loads a tile, a row each `stride` bytes.
    pub fn tile_load(&self, tile: u32, at: Value<'c>, stride: u32) {
        self.intrinsic_void("llvm.x86.tileloadd64", &[self.tile(tile), at, self.int(stride.into())]);
    }
    /// The same of lines that are not used again soon.
    pub fn tile_load_once(&self, tile: u32, at: Value<'c>, stride: u32) {
        self.intrinsic_void("llvm.x86.tileloaddt164", &[self.tile(tile), at, self.int(stride.into())]);
    }
    /// Stores one.
    pub fn tile_store(&self, tile: u32, at: Value<'c>, stride: u32) {
        self.intrinsic_void("llvm.x86.tilestored64", &[self.tile(tile), at, self.int(stride.into())]);
    }
    /// `sums[row][column] += sum of rows[row][k] * weights[k / 4][column][k % 4]`: exact sums of products of signed and unsigned bytes.
    pub fn tile_dot_int8(&self, sums: u32, rows: u32, weights: u32) {
        self.intrinsic_void("llvm.x86.tdpbsud", &[self.tile(sums), self.tile(rows), self.tile(weights)]);
    }
    /// `sums[row][column] += ` products of bf16 `rows[row][k]` and `weights[k / 2][column][k % 2]`: those of even k and of odd ones, each a
    /// chain of FMA from zero, together.
    pub fn tile_dot_bf16(&self, sums: u32, rows: u32, weights: u32) {
        self.intrinsic_void("llvm.x86.tdpbf16ps", &[self.tile(sums), self.tile(rows), self.tile(weights)]);
    }
    fn tile(&self, number: u32) -> Value<'c> {
        assert!(number < 8, "tile register {number}");
        self.int_of(Elem::I8, number.into())
    }
    /// Return.
    pub fn ret(&self, value: Option<Value<'c>>) {
        let raw = value.map(|v| v.raw);
        ok(self.builder.build_return(raw.as_ref().map(|v| v as &dyn BasicValue<'c>)));
    }

    // ---- control flow ----------------------------------------------------------------------------------------------------

    /// `for i in (begin..end).step_by(step)` (i64, `step > 0`) with carried values: `body(i, carried)` returns the next ones (same
    /// types). The result is what the last iteration returned, or `carried` when there was none.
    pub fn loop_(
        &self,
        begin: Value<'c>,
        end: Value<'c>,
        step: i64,
        carried: &[Value<'c>],
        body: impl FnOnce(Value<'c>, &[Value<'c>]) -> Vec<Value<'c>>,
    ) -> Vec<Value<'c>> {
        assert!(step > 0 && begin.ty == Ty::I64 && end.ty == Ty::I64, "loop bounds");
        let c = self.mb.context;
        let before = self.block();
        let head = c.append_basic_block(self.function, "loop");
        let exit = c.append_basic_block(self.function, "loop_end");
        let any = self.cmp(Cmp::Lt, begin, end);
        self.branch(any, head, exit);
        self.builder.position_at_end(head);
        let i_phi = ok(self.builder.build_phi(c.i64_type(), "i"));
        i_phi.add_incoming(&[(&begin.raw, before)]);
        let phis: Vec<_> = carried.iter().map(|v| ok(self.builder.build_phi(self.mb.basic_type(v.ty), ""))).collect();
        let inside: Vec<_> = phis.iter().zip(carried).map(|(p, v)| self.value(p.as_basic_value(), v.ty)).collect();
        let i = self.value(i_phi.as_basic_value(), Ty::I64);
        let next = body(i, &inside);
        assert_eq!(next.len(), carried.len(), "carried values");
        let latch = self.block();
        let step = c.i64_type().const_int(step as u64, false);
        let i_next = ok(self.builder.build_int_nsw_add(i.raw.into_int_value(), step, ""));
        let more = ok(self.builder.build_int_compare(IntPredicate::SLT, i_next, end.raw.into_int_value(), ""));
        ok(self.builder.build_conditional_branch(more, head, exit));
        i_phi.add_incoming(&[(&i_next, latch)]);
        self.builder.position_at_end(exit);
        let mut results = vec![];
        for ((phi, first), last) in phis.iter().zip(carried).zip(&next) {
            assert_eq!(first.ty, last.ty, "carried type");
            phi.add_incoming(&[(&first.raw, before), (&last.raw, latch)]);
            let out = ok(self.builder.build_phi(self.mb.basic_type(first.ty), ""));
            out.add_incoming(&[(&first.raw, before), (&last.raw, latch)]);
            results.push(self.value(out.as_basic_value(), first.ty));
        }
        results
    }

    /// [`Fb::loop_`] with `unroll` steps in an iteration, and a second loop for what is left. `unroll * step` is a power of two, `begin <=
    /// end`.
    pub fn loop_unrolled(
        &self,
        begin: Value<'c>,
        end: Value<'c>,
        step: i64,
        unroll: i64,
        carried: &[Value<'c>],
        body: impl Fn(Value<'c>, &[Value<'c>]) -> Vec<Value<'c>>,
    ) -> Vec<Value<'c>> {
        let long = unroll * step;
        assert!(long.count_ones() == 1, "steps of a loop");
        let whole = self.add(begin, self.and(self.sub(end, begin), self.int(-long)));
        let carried = self.loop_(begin, whole, long, carried, |i, carried| {
            (0..unroll).fold(carried.to_vec(), |carried, n| body(self.add_int(i, n * step), &carried))
        });
        self.loop_(whole, end, step, &carried, body)
    }
    /// [`Fb::loop_`] without carried values.
    pub fn for_(&self, begin: Value<'c>, end: Value<'c>, step: i64, body: impl FnOnce(Value<'c>)) {
        self.loop_(begin, end, step, &[], |i, _| {
            body(i);
            vec![]
        });
    }
    /// `do { carried = body(carried) } while more`, where `body` returns `more` first.
    pub fn repeat(&self, carried: &[Value<'c>], body: impl FnOnce(&[Value<'c>]) -> (Value<'c>, Vec<Value<'c>>)) {
        let before = self.block();
        let [head, exit] = ["repeat", "repeat_end"].map(|n| self.mb.context.append_basic_block(self.function, n));
        ok(self.builder.build_unconditional_branch(head));
        self.builder.position_at_end(head);
        let phis: Vec<_> = carried.iter().map(|v| ok(self.builder.build_phi(self.mb.basic_type(v.ty), ""))).collect();
        let inside: Vec<_> = phis.iter().zip(carried).map(|(p, v)| self.value(p.as_basic_value(), v.ty)).collect();
        let (more, next) = body(&inside);
        assert_eq!(next.len(), carried.len(), "carried values");
        let latch = self.block();
        self.branch(more, head, exit);
        for ((phi, first), last) in phis.iter().zip(carried).zip(&next) {
            phi.add_incoming(&[(&first.raw, before), (&last.raw, latch)]);
        }
        self.builder.position_at_end(exit);
    }
    fn branch(&self, condition: Value<'c>, then: BasicBlock<'c>, other: BasicBlock<'c>) {
        ok(self.builder.build_conditional_branch(condition.raw.into_int_value(), then, other));
    }
    /// `if condition { then() } else { other() }`; both sides return values of the same types, which are merged.
    pub fn if_else(
        &self,
        condition: Value<'c>,
        then: impl FnOnce() -> Vec<Value<'c>>,
        other: impl FnOnce() -> Vec<Value<'c>>,
    ) -> Vec<Value<'c>> {
        let c = self.mb.context;
        let [yes, no, join] = ["then", "else", "join"].map(|n| c.append_basic_block(self.function, n));
        self.branch(condition, yes, no);
        self.builder.position_at_end(yes);
        let a = then();
        let yes_end = self.block();
        ok(self.builder.build_unconditional_branch(join));
        self.builder.position_at_end(no);
        let b = other();
        let no_end = self.block();
        ok(self.builder.build_unconditional_branch(join));
        self.builder.position_at_end(join);
        assert_eq!(a.len(), b.len(), "results of if");
        let merge = |(a, b): (&Value<'c>, &Value<'c>)| {
            assert_eq!(a.ty, b.ty, "results of if");
            let phi = ok(self.builder.build_phi(self.mb.basic_type(a.ty), ""));
            phi.add_incoming(&[(&a.raw, yes_end), (&b.raw, no_end)]);
            self.value(phi.as_basic_value(), a.ty)
        };
        a.iter().zip(&b).map(merge).collect()
    }
    /// `if condition { then() }`.
    pub fn if_(&self, condition: Value<'c>, then: impl FnOnce()) {
        self.if_else(
            condition,
            || {
                then();
                vec![]
            },
            Vec::new,
        );
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
