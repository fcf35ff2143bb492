//! Conversions between element types.

use super::{Cmp, Elem, Fb, Ty, Value, ok};
use crate::program::DType;
use inkwell::values::InstructionOpcode;

impl<'c> Fb<'_, 'c> {
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
}
