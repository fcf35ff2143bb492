//! Online softmax of a block's scores: maxima of all pairs, then weights and their sums.
//!
//! In: scores in scratch. Out: the functions `maxima`, which the kernel has, and `softmax`, which few and many pairs call.

use super::*;

impl<'c> Generator<'_, 'c> {
    /// The function with [`MaximaArgs`]: of the block's rows, pairs `first` and following, scales scores `begin .. end` (multiples of the
    /// lanes) and makes those minus infinity that the row does not see; updates their maxima, sets `alpha`. Scores between a row's bounds,
    /// all of them, are not compared with them.
    ///
    /// All rows' maxima come before any row's exponentials: a maximum ends in a chain of shuffles, which other rows' work hides.
    pub(super) fn maxima(&self) -> Function<'c> {
        MaximaArgs::define(self.mb, &format!("{}.maxima", self.name), |fb, args| {
            let MaximaArgs { call, scratch, scales, key_begin, kv_head, first, pairs, begin, end } = args;
            let k = self.kernel;
            let (kernel_pairs, at) = (&self.pairs, self.pairs.at());
            let lanes = fb.lanes();
            let vector = Ty::vec(Elem::F32, lanes);
            let scope = Call::new(fb, self.program, call).scope(&[], &k.exprs);
            let group = fb.int(self.group);
            let point = |key: Value<'c>, score: Value<'c>| Point {
                var: Some(k.key_var),
                first: key,
                divisor: lanes.into(),
                lanes,
                active: lanes,
                acc: vec![],
                score: Some(score),
            };
            let alpha_at = fb.offset_const(scratch, at.alpha);
            let nothing = fb.f32s(f32::NEG_INFINITY, lanes);
            fb.for_(fb.int(0), pairs, 1, |i| {
                let pair = fb.add(first, i);
                let mut scope = scope.clone();
                let bounds = kernel_pairs.of_pair(fb, scratch, at.bounds, pair);
                let max_at = kernel_pairs.of_pair(fb, scratch, at.max, pair);
                scope.set(k.query_var, fb.load(Ty::I64, fb.offset_const(bounds, 16), 8));
                scope.set(k.head_var, fb.add(fb.mul(kv_head, group), fb.rem(pair, group)));
                let outside = Eval::new(fb, &scope, point(key_begin, fb.zero(vector)));
                let roots: Vec<_> = std::iter::once(k.score).chain(k.mask).collect();
                outside.hoist(&roots);
                let row = fb.offset(fb.offset_const(scratch, at.scores), fb.mul_int(i, BLOCK * 4));
                let old = fb.load(Ty::F32, max_at, 4);
                // `inside`: which keys of a vector are inside the bounds; None: all.
                let step = |column: Value<'c>, max: Value<'c>, inside: Option<Value<'c>>| {
                    let at = fb.index(row, column, 4);
                    let score = kernel_pairs.scaled(fb, fb.load(vector, at, lanes * 4), scales, column);
                    let eval = outside.at(point(fb.add(key_begin, column), score));
                    let score = eval.float(k.score);
                    let seen = match (inside, k.mask.map(|mask| eval.cond(mask))) {
                        (Some(inside), Some(mask)) => Some(fb.and(inside, mask)),
                        (inside, mask) => inside.or(mask),
                    };
                    let score = seen.map_or(score, |seen| fb.select(seen, score, nothing));
                    fb.store(score, at, lanes * 4);
                    fb.max(score, max)
                };
                let first_max = fb.splat(old, lanes);
                let [lower, upper] = [0, 8].map(|at| fb.sub(fb.load(Ty::I64, fb.offset_const(bounds, at), 8), key_begin));
                let bounded = || {
                    let [lower, upper] = [lower, upper].map(|bound| fb.splat(fb.trunc(bound, Elem::I32), lanes));
                    fb.loop_(begin, end, lanes.into(), &[first_max], |column, max| {
                        let columns = fb.add(fb.splat(fb.trunc(column, Elem::I32), lanes), fb.iota(Elem::I32, lanes));
                        let inside = fb.and(fb.cmp(Cmp::Le, lower, columns), fb.cmp(Cmp::Lt, columns, upper));
                        vec![step(column, max[0], Some(inside))]
                    })
                };
                // Most blocks lie between the bounds, whole.
                let whole = fb.and(fb.cmp(Cmp::Le, lower, begin), fb.cmp(Cmp::Le, end, upper));
                let within = || {
                    fb.loop_unrolled(begin, end, lanes.into(), kernel_pairs.vectors_of_group(lanes), &[first_max], |column, max| {
                        vec![step(column, max[0], None)]
                    })
                };
                let max = fb.if_else(whole, within, bounded);
                let new = fb.reduce(max[0], |a, b| fb.max(a, b));
                fb.store(fb.sub(old, new), fb.index(alpha_at, i, 4), 4);
                fb.store(new, max_at, 4);
            });
            // Whole vectors: the place of the last ones is there.
            fb.for_(fb.int(0), pairs, lanes.into(), |i| {
                let at = fb.index(alpha_at, i, 4);
                fb.store(weight(fb, fb.load(vector, at, lanes * 4)), at, lanes * 4);
            });
        })
    }
}

impl Pairs {
    /// `values * scales[column ..]` where the cache has scales.
    fn scaled<'c>(&self, fb: &Fb<'_, 'c>, values: Value<'c>, scales: Value<'c>, column: Value<'c>) -> Value<'c> {
        match self.has_scales {
            true => fb.mul(values, fb.load(values.ty(), fb.index(scales, column, 4), fb.lanes() * 4)),
            false => values,
        }
    }

    /// [`PairWork::Softmax`].
    pub(super) fn softmax<'c>(&self, fb: &Fb<'_, 'c>, args: SoftmaxArgs<'c>, factor: DType) {
        let SoftmaxArgs { scratch, scales, first, pairs, begin, end } = args;
        let scales = fb.offset_const(scales, KvPage::V_SCALES);
        let lanes = fb.lanes();
        let vector = Ty::vec(Elem::F32, lanes);
        fb.for_(fb.int(0), pairs, 1, |i| {
            let pair = fb.add(first, i);
            let row = fb.offset(fb.offset_const(scratch, self.at().scores), fb.mul_int(i, BLOCK * 4));
            let sum_at = self.of_pair(fb, scratch, self.at().sum, pair);
            let max = fb.load_broadcast(DType::F32, lanes, self.of_pair(fb, scratch, self.at().max, pair));
            let alpha = fb.load_broadcast(DType::F32, lanes, fb.index(fb.offset_const(scratch, self.at().alpha), i, 4));
            let sum = fb.mul(fb.load(vector, sum_at, lanes * 4), alpha);
            let sum = fb.loop_unrolled(begin, end, lanes.into(), self.vectors_of_group(lanes), &[sum], |column, sum| {
                let at = fb.index(row, column, 4);
                let p = weight(fb, fb.sub(fb.load(vector, at, lanes * 4), max));
                // bf16 lies before what is still to be read.
                self.store_factors(fb, factor, self.scaled(fb, p, scales, column), fb.index(row, column, factor.size()));
                vec![fb.add(sum[0], p)]
            });
            fb.store(sum[0], sum_at, lanes * 4);
        });
    }
}

/// `exp(x)` for `x <= 0`, but zero where it is nothing beside the 1 of the maximum.
pub(super) fn weight<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    math::exp_of_negative(fb, fb.max(fb.f32s(math::EXP_END, x.lanes()), x))
}
