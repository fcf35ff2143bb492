//! Attention of many (row, head) pairs by tiles (AMX), and the order of additions in which few pairs follow them.
//!
//! In: as [`super`], a cache of bf16 whose heads are whole steps of 32 d. Out: `pack`, which lays a block of keys out as tiles want it, and
//! `tiles`, which computes up to 32 pairs with it:
//!
//! ```text
//! K  [256 / 32][head_dim / 2][32 keys][2]      from [256 / 16][head_dim][16]: two d of a key side by side
//! V  [head_dim / 32][256 / 2][32 columns][2]   from [256][head_dim]: two keys of a column side by side; zeros where there is no key
//!
//! tiles:  s = q K^T;  maxima and softmax of all pairs (as ever);  acc = acc * alpha + p V      both products in 32 pairs x 32 keys, or columns, by 32
//! ```
//! Scores are chains over d, outputs over keys, of what TDPBF16PS makes of 32 (see [`super::super::tiles`]); the 32 keys begin at multiples
//! of 32 of the block. Few pairs do the same by FMA, on the cache as it is.

use super::super::tiles;
use super::products::pairs_of_halves;
use super::{BLOCK, Generator, KERNEL_PARAMS, STEPS};
use crate::isa::BF16_TILE_K;
use crate::llvm::builder::{Cmp, Elem, Fb, Function, Ty, Value, Visibility};
use crate::program::{Attention, DType};

/// Pairs at once: two tiles.
pub(super) const PAIRS: u32 = tiles::ROWS;
/// Pairs from which tiles are taken: more than two register tiles of few pairs. (A single row by tiles reads its cache at 0.8 of the rate;
/// numbers between were not tried.)
pub(super) const LEAST_PAIRS: u32 = 13;
/// Keys of a step, and d; and columns of a product.
const STEP: i64 = BF16_TILE_K as i64;
/// Bytes of a row of a packed block: 32 keys or columns, of two each.
const ROW_BYTES: u64 = 2 * STEP as u64 * 2;

/// Bytes of a packed block, and of its K.
pub(super) fn packed_bytes(kernel: &Attention) -> (u64, u64) {
    let k = BLOCK as u64 * u64::from(kernel.head_dim) * DType::Bf16.size();
    (2 * k, k)
}

/// Functions of many pairs.
pub(super) struct Tiles<'c> {
    /// `pack(to, keys, count)`
    pub pack: Function<'c>,
    /// `tiles(.., scratch, block, scales, key_begin, kv_head, first, pairs)`
    pub tiles: Function<'c>,
}

impl<'c> Generator<'_, 'c> {
    /// `pack(to, keys, count)`: the first `count` keys of a block, and what fills the last step.
    pub(super) fn pack(&self) -> Function<'c> {
        let name = format!("{}.pack", self.name);
        self.mb.define(&name, &[Ty::PTR, Ty::PTR, Ty::I64], None, Visibility::InternalNoInline, |fb, args| {
            let [to, from, count] = *args else { unreachable!() };
            let head_dim = u64::from(self.kernel.head_dim);
            let lanes = self.lanes;
            let halves = Ty::vec(Elem::Bf16, 2 * lanes);
            let steps = fb.lshr(fb.add_int(count, STEP - 1), STEP.trailing_zeros());
            // A register of each group of 16 keys: two d of all of them.
            let group_bytes = head_dim * u64::from(lanes) * 2;
            fb.for_(fb.int(0), steps, 1, |step| {
                let (from, to) = (fb.index(from, step, 2 * group_bytes), fb.index(to, step, head_dim / 2 * ROW_BYTES));
                fb.for_(fb.int(0), fb.int(head_dim as i64 / 2), 1, |pair| {
                    for group in 0..2 {
                        let at = fb.offset_const(fb.index(from, pair, 64), group * group_bytes);
                        let both = pairs_of_halves(fb, fb.load(halves, at, 64));
                        fb.store(both, fb.offset_const(fb.index(to, pair, ROW_BYTES), group * 64), 64);
                    }
                });
            });
            let (from, to) = (fb.offset_const(from, self.kernel.v_offset), fb.offset_const(to, packed_bytes(self.kernel).1));
            fb.for_(fb.int(0), fb.mul_int(steps, STEP / 2), 1, |pair| {
                let key = fb.mul_int(pair, 2);
                for piece in 0..head_dim / STEP as u64 {
                    let row = |next: i64| {
                        let key = fb.add_int(key, next);
                        let at = fb.offset_const(fb.index(from, key, head_dim * 2), piece * STEP as u64 * 2);
                        fb.select(fb.cmp(Cmp::Lt, key, count), fb.load(halves, at, 2), fb.zero(halves))
                    };
                    let (even, odd) = (row(0), row(1));
                    let to = fb.offset_const(fb.index(to, pair, ROW_BYTES), piece * (BLOCK as u64 / 2) * ROW_BYTES);
                    for half in 0..2 {
                        let order: Vec<u32> = (half * lanes..(half + 1) * lanes).flat_map(|i| [i, 2 * lanes + i]).collect();
                        fb.store(fb.shuffle(even, odd, &order), fb.offset_const(to, u64::from(half) * 64), 64);
                    }
                }
            });
        })
    }

    /// `tiles(.., scratch, block, scales, key_begin, kv_head, first, pairs)`: a packed block of keys for the pairs `first` and following,
    /// for which tile registers have their shapes.
    pub(super) fn tiles(&self, maxima: &Function<'c>, softmax: &Function<'c>) -> Function<'c> {
        let params = [&KERNEL_PARAMS[..], &[Ty::PTR, Ty::PTR, Ty::PTR, Ty::I64, Ty::I64, Ty::I64, Ty::I64]].concat();
        self.mb.define(&format!("{}.tiles", self.name), &params, None, Visibility::InternalNoInline, |fb, args| {
            let (args, rest) = args.split_at(KERNEL_PARAMS.len());
            let [scratch, block, scales, key_begin, kv_head, first, pairs] = *rest else { unreachable!() };
            let head_dim = self.kernel.head_dim;
            let bounds = fb.offset_const(scratch, self.at.bounds);
            let seen = fb.loop_(fb.int(0), pairs, 1, &[fb.int(i64::MAX), fb.int(0)], |pair, seen| {
                let bounds = fb.offset(bounds, fb.mul_int(fb.add(first, pair), 32));
                let bound = |i: u64| fb.load(Ty::I64, fb.offset_const(bounds, i * 8), 8);
                vec![fb.min(seen[0], bound(0)), fb.max(seen[1], bound(1))]
            });
            let shift = STEP.trailing_zeros();
            let begin = fb.lshr(fb.max(fb.sub(seen[0], key_begin), fb.int(0)), shift);
            let end = fb.min(fb.sub(seen[1], key_begin), fb.int(BLOCK));
            // Nothing is seen where the end is before the block.
            let end = fb.lshr(fb.max(fb.add_int(end, STEP - 1), fb.int(0)), shift);
            fb.if_(fb.cmp(Cmp::Lt, begin, end), || {
                let is_one = fb.cmp(Cmp::Le, pairs, fb.int(tiles::SIDE.into()));
                let by_rows = |multiply: &dyn Fn(u32)| fb.either(is_one, || multiply(1), || multiply(2));
                let scores = fb.offset_const(scratch, self.at.scores);
                let (row, score_row) = (self.at.width as u32 * 4, BLOCK as u32 * 4);
                let q = self.pair_row(fb, scratch, self.at.q, first);
                by_rows(&|row_tiles| {
                    fb.for_(begin, end, 1, |step| {
                        let keys = fb.index(block, step, u64::from(head_dim / 2) * ROW_BYTES);
                        let out = fb.index(scores, step, STEP as u64 * 4);
                        tiles::multiply(fb, row_tiles, (q, row), keys, fb.int(i64::from(head_dim) / STEP), (out, score_row), false);
                    });
                });
                let keys = [begin, end].map(|step| fb.mul_int(step, STEP));
                fb.call(maxima, &[args, &[scratch, scales, key_begin, kv_head, first, pairs, keys[0], keys[1]]].concat());
                fb.call(softmax, &[scratch, scales, first, pairs, keys[0], keys[1]]);
                let acc = self.pair_row(fb, scratch, self.at.acc, first);
                fb.for_(fb.int(0), pairs, 1, |pair| {
                    let at = fb.index(fb.offset_const(scratch, self.at.alpha), pair, 4);
                    let alpha = fb.load_broadcast(DType::F32, self.lanes, at);
                    let acc = fb.index(acc, pair, row.into());
                    for column in (0..u64::from(head_dim)).step_by(self.lanes as usize) {
                        let at = fb.offset_const(acc, column * 4);
                        fb.store(fb.mul(fb.load(Ty::vec(Elem::F32, self.lanes), at, 64), alpha), at, 64);
                    }
                });
                let weights = fb.index(scores, keys[0], DType::Bf16.size());
                let values = fb.offset_const(fb.index(block, keys[0], ROW_BYTES / 2), packed_bytes(self.kernel).1);
                by_rows(&|row_tiles| {
                    fb.for_(fb.int(0), fb.int(i64::from(head_dim) / STEP), 1, |piece| {
                        let values = fb.index(values, piece, BLOCK as u64 / 2 * ROW_BYTES);
                        let out = fb.index(acc, piece, STEP as u64 * 4);
                        tiles::multiply(fb, row_tiles, (weights, score_row), values, fb.sub(end, begin), (out, row), true);
                    });
                });
            });
        })
    }

    /// What elements `begin .. end` add to `before` in the order of the tiles, by `step(i, sums)`: of 32 the even ones in a chain from
    /// zero, then the odd ones in another.
    pub(super) fn in_order_of_tiles(
        &self,
        fb: &Fb<'_, 'c>,
        (begin, end): (Value<'c>, Value<'c>),
        before: &[Value<'c>],
        step: impl Fn(Value<'c>, &[Value<'c>]) -> Vec<Value<'c>>,
    ) -> Vec<Value<'c>> {
        let zeros = vec![fb.zero(Ty::vec(Elem::F32, self.lanes)); before.len()];
        // A number that LLVM does not see: it would unroll the loops and spill.
        let length = fb.stack(8, 8);
        fb.store(fb.int(STEP), length, 8);
        let length = fb.load_again(Ty::I64, length, 8);
        fb.loop_(fb.and(begin, fb.int(-STEP)), end, STEP, before, |at, sums| {
            let (first, last) = (fb.max(at, begin), fb.min(fb.add(at, length), end));
            let [even, odd] = [0, 1].map(|parity| {
                let other = fb.and(fb.xor(first, fb.int(parity)), fb.int(1));
                fb.loop_unrolled(fb.add(first, other), last, 2, STEPS, &zeros, &step)
            });
            let both = even.into_iter().zip(odd).map(|(even, odd)| fb.add(even, odd));
            sums.iter().zip(both).map(|(sum, both)| fb.add(*sum, both)).collect()
        })
    }
}
