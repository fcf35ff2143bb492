//! Which tiles are tried: a few steps away from the planner's choice, the most promising first.

use crate::tuning::MatmulKey;
use rcompile_codegen::isa::Distances;
use rcompile_codegen::program::{BusyRows, Fetch, MatmulTile, TILE_ROWS};

/// The planner's tile, then others; none twice. Those that read weights in other ways are a few steps from the way in which the planner has
/// this CPU read them.
pub(super) fn of(key: &MatmulKey, planned: MatmulTile, here: Fetch) -> Vec<MatmulTile> {
    let t = planned;
    let fewer_rows = t.mr * 2 / 3;
    // Blocks of rows by tiles have a size of their own: there it is how many rows take instructions on vectors.
    let fewer_on_vectors = MatmulTile { mr: fewer_rows, block_mr: fewer_rows.min(t.block_mr), ..t };
    let others = if key.rows <= u64::from(t.mr) {
        // Weights are read once and stream from memory: how far ahead, and how many streams.
        let f = here;
        let half_the_streams = Fetch { streams: (f.streams / 2).max(1), ..f };
        let fetches = match f.busy(key.rows as u32) {
            Some(busy) => {
                let at = |l1| Fetch { busy: Some(BusyRows { l1, ..busy }), ..f };
                vec![at(busy.l1 * 2), Fetch { busy: None, ..f }, half_the_streams, at((busy.l1 / 2).next_multiple_of(64))]
            }
            None => {
                let Distances { l2, l1 } = f.ahead;
                let at = |l2, l1| Fetch { ahead: Distances { l2, l1 }, ..f };
                let near_l2 = Fetch { streams: if key.rows == 1 { 1 } else { f.streams }, ..at(1024, 0) };
                vec![at(l2 * 2, l1), near_l2, half_the_streams, at(l2, l1 * 2), at(l2 / 2, l1)]
            }
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
    let mut list = vec![planned];
    for tile in others {
        // As planned, this CPU would read so anyway.
        if !list.contains(&tile) && tile != (MatmulTile { fetch: here, ..planned }) {
            list.push(tile);
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_codegen::isa::Near;
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
            ahead: Distances { l2: 8192, l1: 3072 },
            past_l2: false,
            busy: None,
            near: Some(Near { streams: 3, ahead: Distances { l2: 2048, l1: 1024 } }),
        },
    };

    /// Where this CPU reads in a way of its own, the planner's choice stays what it is on others, and all steps are from that way.
    #[test]
    fn steps_are_from_what_this_cpu_does() {
        let key = MatmulKey { rows: 1, weights: "bf16".into(), compute: Compute::F32, k: 2048, n: 2048, ways: 1 };
        let here = Fetch { streams: 4, ahead: Distances { l2: 0, l1: 2048 }, near: None, ..HEURISTIC.fetch };
        let variants = of(&key, HEURISTIC, here);
        assert_eq!(variants[0], HEURISTIC);
        let read = variants[1..].iter().map(|tile| (tile.fetch.streams, tile.fetch.ahead.l2, tile.fetch.ahead.l1));
        assert_eq!(read.collect::<Vec<_>>(), [(1, 1024, 0), (2, 0, 2048), (4, 0, 4096)]);
        // Blocks of many rows are read as before.
        let many = of(&MatmulKey { rows: 64, ..key }, HEURISTIC, here);
        assert!(many.len() > 2 && many.iter().all(|tile| tile.fetch == HEURISTIC.fetch), "{many:?}");
    }

    /// What is tried makes a difference: a single block of rows by tiles has no blocks.
    #[test]
    fn a_single_block_of_rows_by_tiles() {
        for (weights, compute) in [("bf16", Compute::Bf16Tiles), ("int4g128", Compute::Int8Tiles)] {
            let of_rows = |rows| {
                let key = MatmulKey { rows, weights: weights.into(), compute, k: 2048, n: 2048, ways: 1 };
                of(&key, HEURISTIC, HEURISTIC.fetch)
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
