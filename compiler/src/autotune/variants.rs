//! Which tiles are tried: a few steps away from the heuristic, the most promising first.

use crate::tuning::MatmulKey;
use rcompile_codegen::program::{Fetch, MatmulTile, TILE_ROWS};

/// The heuristic's tile, then others; none twice.
pub(super) fn of(key: &MatmulKey, heuristic: MatmulTile) -> Vec<MatmulTile> {
    let t = heuristic;
    let fewer_rows = t.mr * 2 / 3;
    // Blocks of rows by tiles have a size of their own: there it is how many rows take instructions on vectors.
    let fewer_on_vectors = MatmulTile { mr: fewer_rows, block_mr: fewer_rows.min(t.block_mr), ..t };
    let others = if key.rows <= u64::from(t.mr) {
        // Weights are read once and stream from memory: how far ahead, and how many streams.
        let f = t.fetch;
        let fetches = match f.is_busy(key.rows as u32) {
            true => vec![
                Fetch { busy_l1: f.busy_l1 * 2, ..f },
                Fetch { busy_rows: 0, ..f },
                Fetch { streams: (f.streams / 2).max(1), ..f },
                Fetch { busy_l1: (f.busy_l1 / 2).next_multiple_of(64), ..f },
            ],
            false => vec![
                Fetch { l2: f.l2 * 2, ..f },
                Fetch { l2: 1024, l1: 0, streams: if key.rows == 1 { 1 } else { f.streams }, ..f },
                Fetch { streams: (f.streams / 2).max(1), ..f },
                Fetch { l1: f.l1 * 2, ..f },
                Fetch { l2: f.l2 / 2, ..f },
            ],
        };
        fetches.into_iter().map(|fetch| MatmulTile { fetch, ..t }).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_codegen::program::Compute;

    const HEURISTIC: MatmulTile = MatmulTile {
        mr: 4,
        block_mr: 4,
        k_block: 256,
        m_block: 256,
        n_block: 8,
        widen: false,
        fetch: Fetch {
            streams: 6,
            l2: 8192,
            l1: 3072,
            past_l2: false,
            busy_rows: 0,
            busy_l1: 0,
            near_streams: 3,
            near_l2: 2048,
            near_l1: 1024,
        },
    };

    /// What is tried makes a difference: a single block of rows by tiles has no blocks.
    #[test]
    fn a_single_block_of_rows_by_tiles() {
        for (weights, compute) in [("bf16", Compute::Bf16Tiles), ("int4g128", Compute::Int8Tiles)] {
            let of_rows = |rows| {
                let key = MatmulKey { rows, weights: weights.into(), compute, k: 2048, n: 2048, ways: 1 };
                of(&key, HEURISTIC)
            };
            let fewer = MatmulTile { mr: 2, block_mr: 2, ..HEURISTIC };
            for rows in [8, 32] {
                assert_eq!(of_rows(rows), [HEURISTIC, fewer], "{rows} rows of {weights}");
            }
            assert!(of_rows(4).iter().any(|tile| tile.fetch != HEURISTIC.fetch));
            assert!(of_rows(33).iter().any(|tile| tile.n_block != HEURISTIC.n_block));
        }
    }
}
