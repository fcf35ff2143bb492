//! Vectors: lanes in and out, shuffles, reductions.

use super::{Elem, Fb, Ty, Value, ok};
use inkwell::values::{BasicValueEnum, VectorValue};

impl<'c> Fb<'_, 'c> {
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
}
