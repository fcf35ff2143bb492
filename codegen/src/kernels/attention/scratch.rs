//! What the functions of a unit of attention share.
//!
//! In: [`Pairs`]. Out: where things are in a thread's scratch ([`Scratch`]), and in a block of keys ([`KvPage`]).
//!
//! Functions of pairs shall not depend on how many pairs a tile of the kernel has: what there is for each pair lies together, behind what
//! there is once, and a block of keys that is made ready for many pairs behind all that.

use super::*;

/// A page of a KV head as f32.
pub(super) fn widened(head_dim: u32) -> KvPage {
    KvPage { dtype: DType::F32, head_dim }
}

/// Byte offsets in a thread's scratch; those of what there is for each pair are the first pair's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scratch {
    /// `scores: f32[most_pairs][256]`; weights, which take their place, may be bf16
    pub scores: u64,
    /// `alpha: f32[most_pairs]`, up to a multiple of the lanes
    pub alpha: u64,
    /// From pair to pair, a multiple of 64.
    pub pair_bytes: u64,
    /// `q: f32[head_dim]`, or bf16
    pub q: u64,
    /// `acc: f32[head_dim]`
    pub acc: u64,
    /// `sum: f32[16]`, a chain per lane
    pub sum: u64,
    /// `bounds: i64[3]`: first key, end of keys, the query's place
    pub bounds: u64,
    /// `max: f32`
    pub max: u64,
}

impl Scratch {
    pub fn new(pairs: &Pairs) -> Scratch {
        let most_pairs = if pairs.compute == Compute::Bf16Tiles { tiles::PAIRS } else { MAX_PAIRS };
        let row = u64::from(pairs.head_dim).next_multiple_of(16) * 4;
        let alpha = u64::from(most_pairs) * BLOCK as u64 * 4;
        let q = alpha + u64::from(most_pairs).next_multiple_of(16) * 4;
        let (acc, sum) = (q + row, q + 2 * row);
        let bounds = sum + 64;
        Scratch { scores: 0, alpha, pair_bytes: bounds + 64 - q, q, acc, sum, bounds, max: bounds + 24 }
    }
}

/// Where a kernel has a block of keys that many pairs read, and bytes in all.
pub(super) fn cache_and_bytes(kernel: &Attention, pairs: &Pairs) -> (u64, u64) {
    let at = Scratch::new(pairs);
    let cache = at.q + u64::from(kernel.tile_rows * (kernel.heads / kernel.kv_heads)) * at.pair_bytes;
    let bytes = match kernel.compute {
        _ if !has_many(kernel) => 0,
        Compute::Bf16Tiles => tiles::packed_bytes(pairs.head_dim).0,
        _ => widened(pairs.head_dim).bytes(),
    };
    (cache, (cache + bytes).next_multiple_of(128))
}
