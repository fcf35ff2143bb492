//! Attention over the paged KV cache.

use super::{Compute, DType, ExprId, Exprs, Operand, VarId};

/// Keys that lie together in a page of K.
pub const KEY_GROUP: u32 = 16;

/// Attention of query rows over the KV cache with online softmax, in key blocks of 256 positions from 0, merged in order.
///
/// Work units are (tile, kv head); see `abi::Tile`. Keys `0 .. tile.key_end` exist; bounds and mask decide which of them a row sees.
/// K page of one kv head: `[256 / 16][head_dim][16]` ([`KEY_GROUP`]), V page: `[256][head_dim]`, element type `kv_dtype`. Of int8 codes,
/// each key and each value has a scale: `f32[256]` for K at `+ scales`, for V behind them.
/// Address of a head's K page in bytes: `state(offsets[layer]) + page * page_bytes + kv_head * head_bytes`, V at `+ v_offset`.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Queries: element `row * q_stride + head * q_head_stride + d` (f32, bf16 or f16).
    pub q: Operand,
    /// Elements per row of q.
    pub q_stride: u32,
    /// Elements per head of q.
    pub q_head_stride: u32,
    /// Output: element `row * out_stride + head * head_dim + d` (dtype f32, bf16 or f16).
    pub out: Operand,
    /// Elements per row of the output.
    pub out_stride: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads; query head h reads kv head `h / (heads / kv_heads)`.
    pub kv_heads: u32,
    /// Width of q, k and v heads.
    pub head_dim: u32,
    /// Type of the cache.
    pub kv_dtype: DType,
    /// How scores and weighted values are summed: `F32`, or over a bf16 cache `Bf16Dot` or `Bf16Tiles`, which round queries and weights to
    /// bf16.
    pub compute: Compute,
    /// Byte offset of each layer's first page in the state.
    pub state_offsets: Vec<u64>,
    /// Bytes from a page of a layer to its next one: K and V of all kv heads, and what lies between, other layers' for instance.
    pub page_bytes: u64,
    /// Bytes of a kv head within a page.
    pub head_bytes: u64,
    /// Offset of V within a head.
    pub v_offset: u64,
    /// Offset of the scales within a head; of a cache of codes (`kv_dtype` I8).
    pub scales: Option<u64>,
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
    /// A query sees keys from `lower(query)` on. i64 expression over query_var; None: from 0.
    pub key_lower: Option<ExprId>,
    /// A query sees keys below `upper(query)` (causal: query + 1). i64 expression over query_var; None: all up to `tile.key_end`.
    pub key_upper: Option<ExprId>,
    /// Bool expression that says which of those keys are seen; None: all.
    pub mask: Option<ExprId>,
}
