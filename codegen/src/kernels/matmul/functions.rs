//! Which functions of rows a kernel calls.
//!
//! In: a [`Schedule`]. Out: [`Functions`]: what the caller makes of each, a list or declarations in a module.

use super::super::rows::{KBlocks, RowFunction, RowWork, Weights};
use super::*;
use crate::program::Fetch;
use rcompile_runtime::abi::CpuKind;

/// Functions of a kernel.
pub(super) struct Functions<F> {
    /// For all k of a panel at once: [`Way::Few`], [`Way::FewBlocks`].
    pub stream: Instances<PerCpu<F>>,
    /// For a single block of rows, of one tile of rows, and of two, or only of one of these: [`Way::Alone`].
    pub alone: Vec<F>,
    /// For blocks of rows: [`Way::Passes`].
    pub blocked: Option<BlockFunctions<F>>,
}

/// Functions of a block of rows.
pub(super) enum BlockFunctions<F> {
    /// Sums in vector registers.
    Registers {
        /// For each number of rows.
        rows: Instances<F>,
        /// For the first block of rows, where it widens the weights for the others.
        first: Option<Instances<F>>,
    },
    /// Sums in tiles, see [`by_tiles`].
    Tiles(Several<F>),
}

/// A function, and others in its place on some CPUs.
pub(super) struct PerCpu<F> {
    /// On all others.
    pub other: F,
    /// On these.
    pub by_cpu: Vec<(CpuKind, F)>,
}

/// A function for each number of rows of a register tile that there is.
pub(super) struct Instances<F> {
    /// Rows of the first one.
    pub least: u32,
    /// Functions.
    pub functions: Vec<F>,
}

/// Functions of several blocks of rows by tiles.
pub(super) struct Several<F> {
    /// For a block of one tile of rows, and of two, or only of two.
    pub rows: Vec<F>,
    /// Takes nibbles apart for them.
    pub apart: Option<F>,
}

impl<F> Instances<F> {
    fn new(rows: &RangeInclusive<u32>, function: impl FnMut(u32) -> F) -> Self {
        Instances { least: *rows.start(), functions: rows.clone().map(function).collect() }
    }
}

impl<F> Functions<F> {
    /// What `each` makes of those of a kernel.
    pub fn new(schedule: &Schedule<'_>, mut each: impl FnMut(Part) -> F) -> Self {
        let (program, kernel, product) = (schedule.program, schedule.kernel, schedule.product);
        let (blocks, counts) = (&schedule.blocks, &schedule.row_counts);
        let mut function = |work| each(Part::Rows(RowFunction { product, work }));
        let streams = kernel.panels.panels() * kernel.panels.ways;
        let stream = Instances::new(&counts.stream, |m| {
            let reading = |fetch: Fetch| fetch.reading(m, streams);
            let other = reading(kernel.tile.fetch);
            let differ = kernel.fetch_by_cpu.iter().map(|(kind, fetch)| (*kind, reading(*fetch))).filter(|(_, reading)| *reading != other);
            let mut function = |reading| function(RowWork::Stream { m, reading });
            PerCpu { other: function(other), by_cpu: differ.map(|(kind, reading)| (kind, function(reading))).collect() }
        });
        let has_passes = schedule.ways.iter().any(|(_, way)| *way == Way::Passes);
        let blocked = blocks.as_ref().filter(|_| has_passes).map(|blocks| {
            let k_blocks = match blocks.count {
                1 => KBlocks::One,
                _ if kernel.compute.by_tiles() && by_tiles::asks_for_sums(program, kernel, blocks) => KBlocks::SeveralTurns,
                _ => KBlocks::Several,
            };
            let panel_bytes = blocks.widened_panel;
            if kernel.compute.by_tiles() {
                let widened = blocks.widen.then_some(panel_bytes);
                return BlockFunctions::Tiles(Several {
                    rows: counts.several.clone().map(|row_tiles| function(RowWork::Tiles { row_tiles, widened, k_blocks })).collect(),
                    apart: blocks.widen.then(|| function(RowWork::Apart { panel_bytes })),
                });
            }
            let weights = if blocks.widen { Weights::Widened { panel_bytes } } else { Weights::Stored };
            let widen = Weights::Widen { panel_bytes };
            BlockFunctions::Registers {
                rows: Instances::new(&counts.block, |m| function(RowWork::Block { m, weights, k_blocks })),
                first: blocks.widen.then(|| Instances::new(&counts.first, |m| function(RowWork::Block { m, weights: widen, k_blocks }))),
            }
        });
        let alone = counts.alone.clone().map(|row_tiles| function(RowWork::Alone { row_tiles })).collect();
        Functions { stream, alone, blocked }
    }
}
