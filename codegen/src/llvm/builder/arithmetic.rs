//! Arithmetic, comparisons, minima and maxima, FMA and roots.

use super::{Elem, Fb, Ty, Value, mangle, ok};
use inkwell::values::{BasicValueEnum, InstructionOpcode};
use inkwell::{FloatPredicate, IntPredicate};

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

impl<'c> Fb<'_, 'c> {
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
}
