//! One step of a register tile: a few k of all its rows times all its vectors of columns, by FMA or by dots of bf16.
//!
//! In: addresses ([`StepAt`]). Out: the accumulators, by row, then vector.

use super::{Keep, Microkernel, Multiply, Walk, tile_fits};
use crate::llvm::builder::{Elem, Fb, Ty, Value};
use crate::program::{Coding, Compute, DType};

/// Addresses of one step.
pub(super) struct StepAt<'c> {
    /// Rows.
    pub a: Value<'c>,
    /// Weights.
    pub w: Value<'c>,
    /// Scales of its group.
    pub scales: Value<'c>,
    /// Where widened weights go.
    pub keep: Option<Keep<'c>>,
}

/// A step's operands.
struct Step<'s, 'm, 'c> {
    fb: &'s Fb<'m, 'c>,
    micro: &'s Microkernel,
    walk: Walk,
    at: StepAt<'c>,
    /// Byte offsets of the vectors of columns.
    vectors: &'s [u64],
    /// k of the step.
    ks: u32,
    /// All k of each row, where they come from lanes.
    in_lanes: Vec<Value<'c>>,
    /// Of each vector of columns, where groups have them.
    zeros: Option<Vec<Value<'c>>>,
    scales: Option<Vec<Value<'c>>>,
}

impl Microkernel {
    /// One step of `ks` k (`step_k`, or what is left at the end), weights at `vectors` of `at.w`.
    pub(super) fn step<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        walk: Walk,
        at: StepAt<'c>,
        vectors: &[u64],
        acc: &[Value<'c>],
        ks: u32,
    ) -> Vec<Value<'c>> {
        Step::new(fb, self, walk, at, vectors, ks).multiply_add(acc)
    }
}

impl<'s, 'm, 'c> Step<'s, 'm, 'c> {
    fn new(fb: &'s Fb<'m, 'c>, micro: &'s Microkernel, walk: Walk, at: StepAt<'c>, vectors: &'s [u64], ks: u32) -> Self {
        let mut step = Step { fb, micro, walk, at, vectors, ks, in_lanes: vec![], zeros: None, scales: None };
        if micro.multiply == Multiply::Lane && ks == fb.lanes() {
            let a = micro.product.a;
            step.in_lanes = (0..walk.m).map(|r| fb.load_f32(a, fb.lanes(), step.row_at(r, 0), a.size() as u32)).collect();
        }
        step.zeros = micro.coding.has_zeros().then(|| micro.zeros(fb, walk, step.at.scales));
        step.scales = micro.coding.has_group_scales().then(|| micro.scales(fb, walk, step.at.scales));
        step
    }

    /// Accumulators after the step.
    fn multiply_add(&self, acc: &[Value<'c>]) -> Vec<Value<'c>> {
        let mut acc = acc.to_vec();
        let (m, n) = (self.walk.m, self.vectors.len());
        // Multiply-adds per accumulator.
        let macs = if self.takes_dots() { 1 } else { self.ks };
        if self.walk.holds_rows(self.micro) {
            let rows: Vec<Vec<_>> = (0..m).map(|r| (0..macs).map(|k| self.row(r, k)).collect()).collect();
            for c in 0..n {
                for k in 0..macs {
                    let w = self.weight(c, k, false);
                    self.keep(c, k, w);
                    rows.iter().enumerate().for_each(|(r, x)| acc[r * n + c] = self.product(x[k as usize], w, acc[r * n + c]));
                }
            }
            return acc;
        }
        // The odd halves' words are read again where they would not find registers beside the even halves.
        let again = !tile_fits(self.fb.isa(), m, n as u32, self.micro.held_lanes(m) + 2 * n as u32);
        for k in 0..macs {
            let columns: Vec<_> = (0..n).map(|c| self.weight(c, k, k % 2 == 1 && again)).collect();
            columns.iter().enumerate().for_each(|(c, &value)| self.keep(c, k, value));
            for r in 0..m {
                let x = self.row(r, k);
                let sums = &mut acc[r as usize * n..][..n];
                sums.iter_mut().zip(&columns).for_each(|(sum, &w)| *sum = self.product(x, w, *sum));
            }
        }
        acc
    }

    /// Do products take pairs of bf16?
    fn takes_dots(&self) -> bool {
        self.micro.product.compute == Compute::Bf16Dot
    }

    /// `sum + x w`.
    fn product(&self, x: Value<'c>, w: Value<'c>, sum: Value<'c>) -> Value<'c> {
        if self.takes_dots() { self.fb.dot_bf16(sum, x, w) } else { self.fb.fma(x, w, sum) }
    }

    fn row_at(&self, r: u32, k: u32) -> Value<'c> {
        let product = &self.micro.product;
        self.fb.offset_const(self.at.a, (u64::from(r) * u64::from(product.a_stride) + u64::from(k)) * product.a.size())
    }

    /// What a multiply-add takes of row `r` from k `k` on, in all lanes.
    fn row(&self, r: u32, k: u32) -> Value<'c> {
        let (fb, lanes) = (self.fb, self.fb.lanes());
        match (self.takes_dots(), self.in_lanes.get(r as usize)) {
            (false, Some(&values)) => fb.shuffle(values, values, &vec![k; lanes as usize]),
            (false, None) => fb.load_broadcast(self.micro.product.a, lanes, self.row_at(r, k)),
            (true, _) if self.ks == self.micro.k_pack => fb.splat(fb.load(Ty::I32, self.row_at(r, k), 2), lanes),
            // The last k of an odd K: `a` ends there, and the weight's partner is zero padding.
            (true, _) => fb.splat(fb.zext(fb.load(Ty::scalar(Elem::I16), self.row_at(r, k), 2), Elem::I32), lanes),
        }
    }

    /// Bytes that the beginning of a vector of columns is a multiple of.
    fn align(&self) -> u32 {
        self.micro.vector_bytes(self.fb.lanes()).min(64) as u32
    }

    /// 32 bits of each column; `again`: whether they were loaded before or not.
    fn words(&self, at: Value<'c>, again: bool) -> Value<'c> {
        let ty = Ty::vec(Elem::I32, self.fb.lanes());
        if again { self.fb.load_again(ty, at, self.align()) } else { self.fb.load(ty, at, self.align()) }
    }

    /// Scale of vector `c` of columns, and its shift: minus the zero point times the scale.
    fn factors(&self, c: usize) -> Option<(Value<'c>, Value<'c>)> {
        let (fb, micro) = (self.fb, self.micro);
        let scale = self.scales.as_ref()?[c];
        let minus_zero = match &self.zeros {
            Some(zeros) => fb.neg(zeros[c]),
            None => fb.f32s(-micro.coding.offset(micro.dtype) as f32, fb.lanes()),
        };
        Some((scale, fb.mul(minus_zero, scale)))
    }

    /// Weights of vector `c` of columns at k `k` of the step, as products take them.
    fn weight(&self, c: usize, k: u32, again: bool) -> Value<'c> {
        let (fb, micro) = (self.fb, self.micro);
        if micro.coding != Coding::Elements {
            return self.decode(self.words(fb.offset_const(self.at.w, self.vectors[c]), false), k, self.factors(c));
        }
        let pack = u64::from(k / micro.k_pack * micro.product.panels.nr * micro.k_pack) * micro.dtype.size();
        let at = fb.offset_const(self.at.w, self.vectors[c] + pack);
        match micro.k_pack {
            2 if self.takes_dots() => self.words(at, false),
            2 => {
                let (even, odd) = fb.split_bf16_pair(self.words(at, again));
                if k.is_multiple_of(2) { even } else { odd }
            }
            _ => fb.load_f32(micro.dtype, fb.lanes(), at, self.align()),
        }
    }

    /// Code `k` of each column's four bytes as f32, or, with factors, the element. Exact: 9 + 11 bits.
    fn decode(&self, words: Value<'c>, k: u32, factors: Option<(Value<'c>, Value<'c>)>) -> Value<'c> {
        let (fb, micro) = (self.fb, self.micro);
        let all = |v: i64| fb.splat(fb.int_of(Elem::I32, v), fb.lanes());
        let code = if micro.dtype == DType::I8 {
            fb.ashr(fb.shl(words, 24 - 8 * k), 24)
        } else {
            let (shift, mask) = if micro.k_pack == 8 { (8 * (k % 4) + 4 * (k / 4), 0xf) } else { (8 * k, 0xff) };
            fb.and(fb.lshr(words, shift), all(mask))
        };
        let code = fb.int_to_float(code);
        match (factors, micro.coding.offset(micro.dtype)) {
            (Some((scale, shift)), _) => fb.fma(code, scale, shift),
            (None, 0) => code,
            (None, offset) => fb.add(code, fb.f32s(-offset as f32, fb.lanes())),
        }
    }

    /// Stores a widened weight where that is asked for.
    fn keep(&self, c: usize, k: u32, value: Value<'c>) {
        if let Some(keep) = self.at.keep {
            let (fb, walk) = (self.fb, self.walk);
            let (stream, vector) = (c as u32 / walk.vectors, c as u32 % walk.vectors);
            let at = (k * self.micro.product.panels.nr + vector * fb.lanes()) * 4;
            fb.store(value, fb.offset_const(keep.to, u64::from(stream) * keep.stream + u64::from(at)), fb.lanes() * 4);
        }
    }
}
