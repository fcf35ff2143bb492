//! Attention over the paged KV cache.

use super::{Compute, DType, ExprId, Exprs, Operand, VarId};
use rcompile_runtime::abi::PAGE_POSITIONS;

/// Keys that lie together in a page of K.
pub const KEY_GROUP: u32 = 16;

/// What a page of the KV cache keeps of one KV head, for 256 positions: K `[256 / 16][head_dim][16]` ([`KEY_GROUP`]), behind it V
/// `[256][head_dim]`; of int8 codes, each key and each value has a scale: behind V `f32[256]` for K, then those for V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPage {
    /// Element type.
    pub dtype: DType,
    /// Width of a head.
    pub head_dim: u32,
}

impl KvPage {
    /// Bytes from the scales of keys to those of values.
    pub const V_SCALES: u64 = Self::POSITIONS * DType::F32.size();
    const POSITIONS: u64 = PAGE_POSITIONS as u64;

    /// Bytes of K, and from there on V.
    pub fn v_offset(self) -> u64 {
        Self::POSITIONS * u64::from(self.head_dim) * self.dtype.size()
    }
    /// Where the scales of codes are.
    pub fn scales(self) -> Option<u64> {
        (self.dtype == DType::I8).then_some(2 * self.v_offset())
    }
    /// Bytes of all.
    pub fn bytes(self) -> u64 {
        2 * self.v_offset() + if self.scales().is_some() { 2 * Self::V_SCALES } else { 0 }
    }
    /// Bytes of a position.
    pub fn bytes_per_position(self) -> u64 {
        self.bytes() / Self::POSITIONS
    }
}

/// Attention of query rows over the KV cache with online softmax, in key blocks of 256 positions from 0, merged in order.
///
/// Work units are (tile, kv head); see `abi::Tile`. Keys `0 .. tile.key_end` exist; bounds and mask decide which of them a row sees.
/// A KV head's part of a page ([`KvPage`]) is at `state(offsets[layer]) + page * page_bytes + kv_head * kv.bytes()`.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Queries: element `row * q_stride + head * q_head_stride + d` (f32, bf16 or f16).
    pub q: Operand,
    /// Elements per row of q.
    pub q_stride: u32,
    /// Elements per head of q.
    pub q_head_stride: u32,
    /// Output: element `row * out_stride + head * kv.head_dim + d` (dtype f32, bf16 or f16).
    pub out: Operand,
    /// Elements per row of the output.
    pub out_stride: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads; query head h reads kv head `h / (heads / kv_heads)`.
    pub kv_heads: u32,
    /// The cache, and the width of q, k and v heads.
    pub kv: KvPage,
    /// How scores and weighted values are summed: `F32`, or over a bf16 cache `Bf16Dot` or `Bf16Tiles`, which round queries and weights to
    /// bf16.
    pub compute: Compute,
    /// Byte offset of each layer's first page in the state.
    pub state_offsets: Vec<u64>,
    /// Bytes from a page of a layer to its next one: K and V of all kv heads, and what lies between, other layers' for instance.
    pub page_bytes: u64,
    /// Most rows in a tile.
    pub tile_rows: u32,
    /// Expressions of score and mask.
    pub exprs: Exprs,
    /// Variables of the expressions (i64).
    pub head_var: VarId,
    /// Query's place: `ctx.kv_index[row]`.
    pub query_var: VarId,
    /// Key's place.
    pub key_var: VarId,
    /// f32 expression over `Score` (scale, soft cap, bias).
    pub score: ExprId,
    /// A query sees keys from its place plus this on; None: from 0.
    pub key_lower: Option<i64>,
    /// A query sees keys below its place plus this (causal: 1); None: all up to `tile.key_end`.
    pub key_upper: Option<i64>,
    /// Bool expression that says which of those keys are seen; None: all.
    pub mask: Option<ExprId>,
}
