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
use super::pairs::{BlockCaller, CopyArgs, Pairs, TilesArgs};
use super::products::pairs_of_halves;
use super::{BLOCK, STEPS};
use crate::isa::BF16_TILE_K;
use crate::llvm::builder::{Cmp, Elem, Fb, Ty, Value};
use crate::program::DType;

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
pub(super) fn packed_bytes(head_dim: u32) -> (u64, u64) {
    let k = BLOCK as u64 * u64::from(head_dim) * DType::Bf16.size();
    (2 * k, k)
}

impl Pairs {
    /// [`PairWork::Pack`](super::pairs::PairWork).
    pub(super) fn pack<'c>(&self, fb: &Fb<'_, 'c>, CopyArgs { to, from, count }: CopyArgs<'c>) {
        let head_dim = u64::from(self.head_dim);
        let lanes = fb.lanes();
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
        let (from, to) = (fb.offset_const(from, self.stored.v_offset()), fb.offset_const(to, packed_bytes(self.head_dim).1));
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
    }

    /// [`PairWork::Tiles`](super::pairs::PairWork).
    pub(super) fn tiles<'c>(&self, fb: &Fb<'_, 'c>, (caller, own): (BlockCaller<'c>, TilesArgs<'c>)) {
        let TilesArgs { scratch, block, scales, key_begin, kv_head, first, pairs } = own;
        let head_dim = self.head_dim;
        let seen = fb.loop_(fb.int(0), pairs, 1, &[fb.int(i64::MAX), fb.int(0)], |pair, seen| {
            let bounds = self.of_pair(fb, scratch, self.at().bounds, fb.add(first, pair));
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
            let scores = fb.offset_const(scratch, self.at().scores);
            let (row, score_row) = (self.at().pair_bytes as u32, BLOCK as u32 * 4);
            let q = self.of_pair(fb, scratch, self.at().q, first);
            by_rows(&|row_tiles| {
                fb.for_(begin, end, 1, |step| {
                    let keys = fb.index(block, step, u64::from(head_dim / 2) * ROW_BYTES);
                    let out = fb.index(scores, step, STEP as u64 * 4);
                    tiles::multiply(fb, row_tiles, (q, row), keys, fb.int(i64::from(head_dim) / STEP), (out, score_row), false);
                });
            });
            let keys = [begin, end].map(|step| fb.mul_int(step, STEP));
            caller.weights(fb, [scratch, scales, key_begin, kv_head, first], pairs, (keys[0], keys[1]));
            let acc = self.of_pair(fb, scratch, self.at().acc, first);
            fb.for_(fb.int(0), pairs, 1, |pair| {
                let at = fb.index(fb.offset_const(scratch, self.at().alpha), pair, 4);
                let alpha = fb.load_broadcast(DType::F32, fb.lanes(), at);
                let acc = fb.index(acc, pair, row.into());
                for column in (0..u64::from(head_dim)).step_by(fb.lanes() as usize) {
                    let at = fb.offset_const(acc, column * 4);
                    fb.store(fb.mul(fb.load(Ty::vec(Elem::F32, fb.lanes()), at, 64), alpha), at, 64);
                }
            });
            let weights = fb.index(scores, keys[0], DType::Bf16.size());
            let values = fb.offset_const(fb.index(block, keys[0], ROW_BYTES / 2), packed_bytes(self.head_dim).1);
            by_rows(&|row_tiles| {
                fb.for_(fb.int(0), fb.int(i64::from(head_dim) / STEP), 1, |piece| {
                    let values = fb.index(values, piece, BLOCK as u64 / 2 * ROW_BYTES);
                    let out = fb.index(acc, piece, STEP as u64 * 4);
                    tiles::multiply(fb, row_tiles, (weights, score_row), values, fb.sub(end, begin), (out, row), true);
                });
            });
        });
    }

    /// What elements `begin .. end` add to `before` in the order of the tiles, by `step(i, sums)`: of 32 the even ones in a chain from
    /// zero, then the odd ones in another.
    pub(super) fn in_order_of_tiles<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        (begin, end): (Value<'c>, Value<'c>),
        before: &[Value<'c>],
        step: impl Fn(Value<'c>, &[Value<'c>]) -> Vec<Value<'c>>,
    ) -> Vec<Value<'c>> {
        let zeros = vec![fb.zero(Ty::vec(Elem::F32, fb.lanes())); before.len()];
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
