//! Which tiles are tried: a few steps away from the heuristic, the most promising first.

use crate::tuning::MatmulKey;
use rcompile_codegen::isa::Isa;
use rcompile_codegen::program::{MatmulTile, TILE_ROWS};

/// The heuristic's tile, then others; none twice.
pub(super) fn of(isa: &Isa, key: &MatmulKey, heuristic: MatmulTile) -> Vec<MatmulTile> {
    let t = heuristic;
    let tile_rows = isa.rows(key.compute);
    let fewer_rows = tile_rows * 2 / 3;
    // Blocks of rows by tiles have a size of their own: there it is how many rows take instructions on vectors.
    let fewer_on_vectors = MatmulTile { mr: fewer_rows.min(t.mr), block_mr: fewer_rows.min(t.block_mr), ..t };
    let others = if key.rows <= u64::from(tile_rows) {
        // Weights are read once and stream from memory: how far ahead, and how many streams.
        match t.is_busy(key.rows as u32) {
            true => vec![
                MatmulTile { busy_l1: t.busy_l1 * 2, ..t },
                MatmulTile { busy_rows: 0, ..t },
                MatmulTile { streams: (t.streams / 2).max(1), ..t },
                MatmulTile { busy_l1: (t.busy_l1 / 2).next_multiple_of(64), ..t },
            ],
            false => vec![
                MatmulTile { prefetch: t.prefetch * 2, ..t },
                MatmulTile { prefetch: 1024, prefetch_l1: 0, streams: if key.rows == 1 { 1 } else { t.streams }, ..t },
                MatmulTile { streams: (t.streams / 2).max(1), ..t },
                MatmulTile { prefetch_l1: t.prefetch_l1 * 2, ..t },
                MatmulTile { prefetch: t.prefetch / 2, ..t },
            ],
        }
    } else if key.compute.by_tiles() && key.rows <= u64::from(TILE_ROWS) {
        vec![fewer_on_vectors]
    } else {
        // Weights of a block are read again by every block of rows: how large the block is, and how many rows share a read.
        vec![
            MatmulTile { n_block: (t.n_block / 2).max(1), ..t },
            MatmulTile { n_block: t.n_block * 2, ..t },
            MatmulTile { m_block: 2 * t.m_block, ..t },
            MatmulTile { k_block: (t.k_block / 2).next_multiple_of(2).min(t.k_block), ..t },
            match key.compute.by_tiles() {
                true => fewer_on_vectors,
                false => MatmulTile { block_mr: fewer_rows.min(t.block_mr), ..t },
            },
        ]
    };
    let mut list = vec![heuristic];
    for tile in others {
        if !list.contains(&tile) {
            list.push(tile);
        }
    }
    list
}
