//! Tile choices: heuristics as data, one function per kernel kind.

use rcompile_codegen::isa::Isa;
use rcompile_codegen::program::{DType, MatmulTile, Panels};

/// Bytes of weight panels that stay in L2 while all rows pass over them.
const L2_BLOCK_BYTES: u64 = 1 << 20;
/// Prefetch distance of weights in bytes: never slower than none, much faster where they come from memory.
const PREFETCH_BYTES: u32 = 4096;

/// Tile of a matmul with at most `rows` rows.
pub fn matmul_tile(isa: &Isa, rows: u64, panels: &Panels, dtype: DType) -> MatmulTile {
    let panel_bytes = panels.panel_len() * dtype.size() * u64::from(panels.ways);
    MatmulTile {
        mr: isa.tile_rows.min(rows as u32),
        accumulators: isa.tile_rows * isa.tile_vectors,
        k_block: 0,
        n_block: (L2_BLOCK_BYTES / panel_bytes.max(1)).clamp(1, 64) as u32,
        prefetch: PREFETCH_BYTES,
    }
}

/// Rows per attention tile: (row, head) pairs that share reads of K and V, bounded so that their scores of a key block stay in L1/L2.
pub fn attention_rows(bucket: u64, heads_per_kv: u64) -> u32 {
    (32 / heads_per_kv.max(1)).clamp(1, 32).min(bucket) as u32
}
