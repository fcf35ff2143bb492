//! What the functions of a unit of attention share.
//!
//! In: [`Attention`]. Out: where things are in a thread's scratch ([`Scratch`]), and in a block of keys ([`Cache`]).

use super::*;

/// K and V of a page and KV head, as a block reads them: K at the start, V behind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cache {
    pub dtype: DType,
    /// Bytes.
    pub v_offset: u64,
}

impl Cache {
    pub fn widened(kernel: &Attention) -> Cache {
        Cache { dtype: DType::F32, v_offset: BLOCK as u64 * u64::from(kernel.head_dim) * 4 }
    }
}

/// Byte offsets in a thread's scratch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scratch {
    /// `q: f32[pairs][width]`, or bf16 at the same places of rows
    pub q: u64,
    /// `acc: f32[pairs][width]`
    pub acc: u64,
    /// `sum: f32[pairs][16]`, a chain per lane
    pub sum: u64,
    /// `max: f32[pairs]`
    pub max: u64,
    /// `bounds: i64[pairs][4]`: first key, end of keys, the query's place, unused
    pub bounds: u64,
    /// `scores: f32[most_pairs][256]`; weights, which take their place, may be bf16
    pub scores: u64,
    /// `alpha: f32[most_pairs]`, up to a multiple of the lanes
    pub alpha: u64,
    /// A widened block of keys, see [`Cache`], or a packed one
    pub cache: u64,
    /// Elements per pair in `q` and `acc`.
    pub width: u64,
    /// In all, a multiple of 128.
    pub bytes: u64,
}

impl Scratch {
    pub fn new(kernel: &Attention) -> Scratch {
        let pairs = u64::from(kernel.tile_rows) * u64::from(kernel.heads / kernel.kv_heads);
        let width = u64::from(kernel.head_dim).next_multiple_of(16);
        let mut end = 0;
        let mut take = |bytes: u64| {
            let begin = end;
            end += bytes.next_multiple_of(64);
            begin
        };
        let q = take(pairs * width * 4);
        let acc = take(pairs * width * 4);
        let sum = take(pairs * 64);
        let max = take(pairs * 4);
        let bounds = take(pairs * 32);
        let (most_pairs, block_bytes) = match kernel.compute {
            _ if !has_many(kernel) => (MAX_PAIRS, 0),
            Compute::Bf16Tiles => (tiles::PAIRS, tiles::packed_bytes(kernel).0),
            _ => (MAX_PAIRS, 2 * Cache::widened(kernel).v_offset),
        };
        let scores = take(u64::from(most_pairs) * BLOCK as u64 * 4);
        let alpha = take(u64::from(most_pairs).next_multiple_of(16) * 4);
        let cache = take(block_bytes);
        Scratch { q, acc, sum, max, bounds, scores, alpha, cache, width, bytes: end.next_multiple_of(128) }
    }
}
