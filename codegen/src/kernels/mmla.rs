//! The register tile of a matmul with BFMMLA: blocks of 2 rows x 2 columns x 4 k per instruction.
//!
//! In: as [`super::microkernel`], with weights in panels of `k_pack` 4 (`[k/4][nr][4]`: a register holds 2 columns x 4 k) and rows of
//! bf16. Out: one step of its loop, and what the loop reads and leaves.
//!
//! ```text
//! pack:           k of m rows -> P[k/4][pair of rows][2][4] in the thread's scratch; an odd last row stands beside itself
//! blocks_of_rows: accumulators [row][vector of columns] -> [pair of rows][pair of columns], rows_of_blocks: back
//! step:           for pair of rows { a = P; for pair of columns { acc = bfmmla(acc, a, w) } }
//! ```
//! One output element is one chain over k: BFMMLA adds the products of k 0, 1 and then those of k 2, 3 to it, whatever the other rows and
//! columns of the block are (Arm ARM, `BFMatMulAdd`). A single row uses the same instruction and so gets the same bits as a row of many;
//! BFDOT on this layout would make two chains per element. Rounding (to odd, no denormals) is the instruction's: other CPUs agree by
//! tolerance and not by bits.
//!
//! Reading rows as they lie would cost a vector instruction beside every two loads of `a`, a fifth of the peak on Neoverse V1; packed
//! once per block of rows and of k they are one load. Packing costs a thread about as much as one panel does.

use super::microkernel::tile_fits;
use super::product::Product;
use crate::isa::Isa;
use crate::llvm::builder::{Elem, Fb, Ty, Value};
use crate::program::Compute;

/// k of a row or column in one register.
pub(super) const K: u32 = 4;
/// k that [`pack`] reads at once.
pub(super) const PACK_K: u32 = 2 * K;
/// Bytes of a register.
pub(super) const REGISTER: u64 = 16;

/// Bytes of `m` packed rows; 0 where a product wants none.
pub(super) fn packed_bytes(product: &Product, m: u32) -> u64 {
    match product.compute {
        Compute::Bf16Mmla => u64::from(product.panels.padded_k() / K) * step_bytes(m),
        _ => 0,
    }
}

/// Bytes of packed rows per step: a register per pair.
pub(super) fn step_bytes(m: u32) -> u64 {
    u64::from(m.div_ceil(2)) * REGISTER
}

/// Do `m` rows times `vectors` of four columns fit the register file? Weights of more than one pair of rows wait in two registers per
/// vector.
pub(super) fn fits(isa: &Isa, m: u32, vectors: u32) -> bool {
    tile_fits(isa, m.next_multiple_of(2), vectors, if m > 2 { 2 * vectors } else { vectors })
}

/// Packs `k` k of the `m` rows at `a` to `to`. `k` is a multiple of [`PACK_K`] where K is one, and else all of K.
pub(super) fn pack<'c>(fb: &Fb<'_, 'c>, product: &Product, m: u32, a: Value<'c>, k: Value<'c>, to: Value<'c>) {
    let step_bytes = step_bytes(m);
    // Up to eight k of each row: halves go to two steps.
    let some = |a: Value<'c>, to: Value<'c>, k: u32| {
        let load = |row: u32| {
            let at = fb.offset_const(a, u64::from(row) * u64::from(product.a_stride) * 2);
            let ty = Ty::vec(Elem::I16, PACK_K);
            let words = if k == PACK_K {
                fb.load(ty, at, 2)
            } else {
                let mask: Vec<i64> = (0..PACK_K).map(|i| (i < k).into()).collect();
                fb.load_masked(ty, at, fb.int_vec(Elem::I1, &mask), 2)
            };
            fb.bitcast(words, Ty::vec(Elem::I64, 2))
        };
        for pair in 0..m.div_ceil(2) {
            let (even, odd) = (load(2 * pair), load((2 * pair + 1).min(m - 1)));
            for half in 0..k.div_ceil(K) {
                let at = fb.offset_const(to, u64::from(half) * step_bytes + u64::from(pair) * REGISTER);
                fb.store(fb.shuffle(even, odd, &[half, 2 + half]), at, REGISTER as u32);
            }
        }
    };
    let left = product.panels.k % PACK_K;
    let to_at = |k: Value<'c>| fb.offset(to, fb.mul_int(k, (step_bytes / u64::from(K)) as i64));
    let whole = fb.sub(k, fb.int(left.into()));
    fb.for_(fb.int(0), whole, PACK_K.into(), |k| some(fb.index(a, k, 2), to_at(k), PACK_K));
    if left > 0 {
        some(fb.index(a, whole, 2), to_at(whole), left);
    }
}

/// Accumulators of rows (`n` vectors of four columns each) as blocks: of every two rows and every vector its first and its last two
/// columns.
pub(super) fn blocks_of_rows<'c>(fb: &Fb<'_, 'c>, m: u32, rows: &[Value<'c>]) -> Vec<Value<'c>> {
    let n = rows.len() / m as usize;
    let mut blocks = vec![];
    for even in (0..m as usize).step_by(2) {
        let odd = (even + 1).min(m as usize - 1);
        blocks.extend((0..n).flat_map(|c| exchange_halves(fb, rows[even * n + c], rows[odd * n + c])));
    }
    blocks
}

/// Back again.
pub(super) fn rows_of_blocks<'c>(fb: &Fb<'_, 'c>, m: u32, blocks: &[Value<'c>]) -> Vec<Value<'c>> {
    let n = blocks.len() / m.next_multiple_of(2) as usize;
    let mut rows = vec![];
    for pair in blocks.chunks(2 * n) {
        let both: Vec<_> = pair.chunks(2).map(|block| exchange_halves(fb, block[0], block[1])).collect();
        rows.extend((0..2).flat_map(|row| both.iter().map(move |vectors| vectors[row])));
    }
    rows.truncate(m as usize * n);
    rows
}

/// The lower halves of two registers, and the upper ones.
pub(super) fn exchange_halves<'c>(fb: &Fb<'_, 'c>, a: Value<'c>, b: Value<'c>) -> [Value<'c>; 2] {
    [fb.shuffle(a, b, &[0, 1, 4, 5]), fb.shuffle(a, b, &[2, 3, 6, 7])]
}

/// Four k: packed rows at `a`, weights at `vectors` (of four columns, two registers each) of `w`.
pub(super) fn step<'c>(fb: &Fb<'_, 'c>, m: u32, a: Value<'c>, w: Value<'c>, vectors: &[u64], acc: &[Value<'c>]) -> Vec<Value<'c>> {
    assert_eq!(fb.lanes(), K, "registers of 128 bits");
    let load = |base: Value<'c>, at: u64| fb.load(Ty::vec(Elem::Bf16, 8), fb.offset_const(base, at), REGISTER as u32);
    let weights: Vec<_> = vectors.iter().flat_map(|v| [load(w, *v), load(w, v + REGISTER)]).collect();
    let pairs = acc.chunks(weights.len()).zip(0..m.div_ceil(2));
    pairs
        .flat_map(|(acc, pair)| {
            let rows = load(a, u64::from(pair) * REGISTER);
            acc.iter().zip(&weights).map(|(acc, weight)| fb.bfmmla(*acc, rows, *weight)).collect::<Vec<_>>()
        })
        .collect()
}
