//! Which functions of rows a kernel calls.
//!
//! In: a [`Matmul`] and its blocks. Out: [`Functions`], of [`RowFunction`]s first, and of what they are in a module then.

use super::super::rows::{KBlocks, Product, RowFunction, Weights, Work};
use super::*;

/// Functions of a kernel.
pub(super) struct Functions<F> {
    /// For all k of a panel at once.
    pub stream: Instances<F>,
    /// For blocks of rows.
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
    Tiles {
        /// Where there can be more than one block of rows.
        several: Option<Several<F>>,
        /// Where there can be a single one, of one tile of rows, or of two.
        alone: Vec<F>,
    },
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
    fn new(rows: &RangeInclusive<u32>, function: impl Fn(u32) -> F) -> Self {
        Instances { least: *rows.start(), functions: rows.clone().map(function).collect() }
    }
    fn map<G>(&self, each: &mut impl FnMut(&F) -> G) -> Instances<G> {
        Instances { least: self.least, functions: self.functions.iter().map(each).collect() }
    }
}

impl Functions<RowFunction> {
    /// Those of a kernel.
    pub fn new(program: &Program, kernel: &Matmul, blocks: Option<&Blocks>) -> Self {
        let product = Product::new(program, kernel);
        let function = |work| RowFunction { product, work };
        let counts = RowCounts::new(program, kernel, blocks);
        let streams = kernel.panels.panels() * kernel.panels.ways;
        let stream = Instances::new(&counts.stream, |m| function(Work::Stream { m, reading: kernel.tile.reading(m, streams) }));
        let blocked = blocks.map(|blocks| {
            let k_blocks = if blocks.count == 1 { KBlocks::One } else { KBlocks::Several };
            let panel_bytes = blocks.widened_panel;
            let read = if blocks.widen { Weights::Widened { panel_bytes } } else { Weights::Stored };
            if kernel.compute.by_tiles() {
                let tiles = |row_tiles| function(Work::Tiles { row_tiles, weights: read, k_blocks });
                return BlockFunctions::Tiles {
                    several: (!counts.several.is_empty()).then(|| Several {
                        rows: counts.several.clone().map(tiles).collect(),
                        apart: blocks.widen.then(|| function(Work::Apart { panel_bytes })),
                    }),
                    alone: counts.alone.clone().map(|row_tiles| function(Work::Alone { row_tiles })).collect(),
                };
            }
            let block = |weights| move |m| function(Work::Block { m, weights, k_blocks });
            BlockFunctions::Registers {
                rows: Instances::new(&counts.block, block(read)),
                first: blocks.widen.then(|| Instances::new(&counts.first, block(Weights::Widen { panel_bytes }))),
            }
        });
        Functions { stream, blocked }
    }
}

impl<F> Functions<F> {
    /// The same of what `each` makes of them, in this order.
    pub fn map<G>(&self, mut each: impl FnMut(&F) -> G) -> Functions<G> {
        let each = &mut each;
        let stream = self.stream.map(each);
        let blocked = self.blocked.as_ref().map(|blocked| match blocked {
            BlockFunctions::Registers { rows, first } => {
                BlockFunctions::Registers { rows: rows.map(each), first: first.as_ref().map(|first| first.map(each)) }
            }
            BlockFunctions::Tiles { several, alone } => BlockFunctions::Tiles {
                several: several.as_ref().map(|several| Several {
                    rows: several.rows.iter().map(&mut *each).collect(),
                    apart: several.apart.as_ref().map(&mut *each),
                }),
                alone: alone.iter().map(each).collect(),
            },
        });
        Functions { stream, blocked }
    }
}
