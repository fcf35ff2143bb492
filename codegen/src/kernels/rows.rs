//! Functions of rows: some rows times some panels of a weight. There a matmul spends its time, and LLVM most of its own.
//!
//! In: a [`Product`] (what rows and panels look like) and the [`RowWork`] that a function does on it. Out: one function, a unit of
//! compilation of its own ([`Part`](super::part::Part)). It leaves the sums of a panel in a tile in memory and calls the matmul's epilogue,
//! whose address it is given, so that it depends neither on where operands lie nor on what becomes of the sums: all matmuls whose panels
//! and rows look alike share it, of any bucket and any part of a layer.
//!
//! ```text
//! stream<m>: for p panels side by side { tile = microkernel over all k;  epilogue(tile) }
//!            limited by memory; way by way, and p = 1, where streams are fewer or registers do not hold all ways
//! block<m>:  for each panel { tile = microkernel over a block of k, from tile;  epilogue(tile) at the last }
//!            limited by arithmetic; way by way where registers do not hold all
//! widen<m>:  block<m> of the first block of rows where weights are widened: it keeps the widened weights for the others
//! tiles<n>:  block<m> of up to n (1 or 2) times 16 rows by tiles (AMX) and a panel of one way, the number of rows a value; nibbles were
//!            taken apart (apart)
//! alone<n>:  a single block of rows by tiles, over all k as stream<m>; takes nibbles apart, or makes them bf16, itself
//! apart:     takes nibbles of a block of k apart, for tiles<n>
//! ```
//!
//! The accumulators go through a small tile in memory to the epilogue, so that the epilogue is generated once per kernel and not once
//! per row count: a register tile of 24 vectors costs some 30 cycles there, against `12 k` in the loop.
//!
//! In files: `check` (what may be asked for), `by_registers` and `by_tiles`; here what both have in common.

mod by_registers;
mod by_tiles;
mod check;

use super::arguments::{Arguments, arguments};
use super::microkernel::Start;
use super::product::Product;
use super::{KernelArgs, int_mmla, mmla};
use crate::isa::Isa;
use crate::llvm::builder::{Cmp, Fb, Ty, Value};
use crate::program::Reading;

impl Product {
    /// Bytes in which `m` rows are packed for matrix instructions; 0 where none are.
    pub fn packed_bytes(&self, m: u32) -> u64 {
        (mmla::packed_bytes(self, m) + int_mmla::packed_bytes(self, m)).next_multiple_of(128)
    }
    /// What there is about this that the planner must not ask for on this target; `name`: of whom.
    pub(super) fn problems(&self, isa: &Isa, name: &str) -> Vec<String> {
        check::problems(self, isa, name)
    }
}

/// One function of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowFunction {
    /// Rows and panels.
    pub product: Product,
    /// What it does.
    pub work: RowWork,
}

/// What a function of rows does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowWork {
    /// Few rows go over all k, weights come from memory.
    Stream {
        /// Rows.
        m: u32,
        /// How weights are read.
        reading: Reading,
    },
    /// A block of rows goes over a block of k, weights come from a cache.
    Block {
        /// Rows.
        m: u32,
        /// What it reads.
        weights: Weights,
        /// Blocks of k.
        k_blocks: KBlocks,
    },
    /// The same by tiles.
    Tiles {
        /// Tiles of rows.
        row_tiles: u32,
        /// Nibbles were taken apart: bytes of a panel of one way then.
        widened: Option<u64>,
        /// Blocks of k.
        k_blocks: KBlocks,
    },
    /// A single block of rows goes over all k by tiles, weights come from memory.
    Alone {
        /// Tiles of rows.
        row_tiles: u32,
    },
    /// Nibbles are taken apart for tiles.
    Apart {
        /// Bytes of a panel of one way that was taken apart.
        panel_bytes: u64,
    },
}

/// What a block of rows reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Weights as stored.
    Stored,
    /// Weights as stored, which it widens for the blocks of rows after it.
    Widen {
        /// Bytes of a widened panel of one way.
        panel_bytes: u64,
    },
    /// Widened weights.
    Widened {
        /// Bytes of a panel of one way.
        panel_bytes: u64,
    },
}

/// How many blocks of k a block of rows has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KBlocks {
    /// All k in one.
    One,
    /// Several, between which sums wait in tiles of the caller's.
    Several,
    /// The same, and what waits for the next block of rows is asked for, since other panels come in between.
    SeveralTurns,
}

arguments! {
    /// What a kernel gives all its functions of rows: its own arguments, for its epilogue, and this.
    pub(super) struct Caller {
        call: [KernelArgs],
        /// Address of the epilogue.
        epilogue: PTR,
        /// Address of what asks for the epilogue's inputs; null: there are none.
        ahead: PTR,
        /// Where rows are packed for matrix instructions.
        packed: PTR,
    }

    /// Arguments of an epilogue, over `tile: f32[way][rows][columns]`.
    pub(super) struct EpilogueArgs {
        call: [KernelArgs],
        tile: PTR,
        /// First row.
        row: I64,
        rows: I64,
        /// First column.
        column: I64,
        columns: I64,
    }

    /// Arguments of what asks for an epilogue's inputs, of these rows and the columns of a panel.
    pub(super) struct AheadArgs {
        call: [KernelArgs],
        /// First row.
        row: I64,
        rows: I64,
        /// First column.
        column: I64,
    }

    /// Own arguments of `stream` and `alone`.
    pub(super) struct Span {
        /// Rows.
        a: PTR,
        /// The first panel of all.
        w: PTR,
        /// First row.
        row: I64,
        /// Rows.
        rows: I64,
        /// First panel.
        first: I64,
        /// Behind the last.
        last: I64,
    }

    /// Own arguments of a block of rows.
    pub(super) struct Block {
        /// Rows, at the block's first k.
        a: PTR,
        /// The first panel as stored, there too; where it is read widened, that.
        w: PTR,
        /// The first one as widened.
        widened: PTR,
        /// Its block of k is the first (bit 0), the last (bit 1).
        stage: I64,
        /// Its k.
        k: I64,
        /// Sums that are kept between blocks of k.
        tiles: PTR,
        /// First row.
        row: I64,
        /// Rows.
        rows: I64,
        /// First panel (by tiles: of one way, `panel * ways + way`).
        first: I64,
        /// Behind the last.
        last: I64,
        /// What to ask for meanwhile.
        ahead: PTR,
        /// Bytes of that, of each panel of one way.
        ahead_part: I64,
    }

    /// Own arguments of a block of rows by tiles.
    pub(super) struct TileBlock {
        /// Those of any block.
        block: [Block],
        /// The sums, of one way, that the block of rows after this adds to.
        sums_ahead: PTR,
    }

    /// Arguments of `apart`.
    pub(super) struct ApartArgs {
        /// A panel of one way, as stored.
        w: PTR,
        /// Where it lies then.
        kept: PTR,
        /// Its k.
        k: I64,
    }
}

impl<'c> Caller<'c> {
    /// Calls the epilogue.
    fn epilogue(&self, fb: &Fb<'_, 'c>, tile: Value<'c>, row: Value<'c>, rows: Value<'c>, column: Value<'c>, columns: Value<'c>) {
        EpilogueArgs { call: self.call, tile, row, rows, column, columns }.call_at(fb, self.epilogue);
    }
    /// Asks for what the epilogue will read, if it reads anything.
    fn ahead(&self, fb: &Fb<'_, 'c>, row: Value<'c>, rows: Value<'c>, column: Value<'c>) {
        let args = AheadArgs { call: self.call, row, rows, column };
        fb.if_(fb.not(fb.is_null(self.ahead)), || args.call_at(fb, self.ahead));
    }
}

impl RowFunction {
    /// What it is called in a kernel: `stream4`.
    pub fn name(&self) -> String {
        match self.work {
            RowWork::Stream { m, .. } => format!("stream{m}"),
            RowWork::Block { m, weights: Weights::Widen { .. }, .. } => format!("widen{m}"),
            RowWork::Block { m, .. } => format!("block{m}"),
            RowWork::Tiles { row_tiles, .. } => format!("tiles{row_tiles}"),
            RowWork::Alone { row_tiles } => format!("alone{row_tiles}"),
            RowWork::Apart { .. } => "apart".into(),
        }
    }

    pub(super) fn params(&self) -> Vec<Ty> {
        match self.work {
            RowWork::Stream { .. } | RowWork::Alone { .. } => <(Caller, Span)>::types(),
            RowWork::Block { .. } => <(Caller, Block)>::types(),
            RowWork::Tiles { .. } => <(Caller, TileBlock)>::types(),
            RowWork::Apart { .. } => ApartArgs::types(),
        }
    }

    /// The function's code.
    pub(super) fn emit<'c>(&self, fb: &Fb<'_, 'c>, args: &[Value<'c>]) {
        let product = &self.product;
        match self.work {
            RowWork::Stream { m, reading } => product.stream(fb, Arguments::of(args), m, reading),
            RowWork::Alone { row_tiles } => product.alone(fb, Arguments::of(args), row_tiles),
            RowWork::Block { m, weights, k_blocks } => product.block(fb, Arguments::of(args), m, weights, k_blocks),
            RowWork::Tiles { row_tiles, widened, k_blocks } => product.tiles(fb, Arguments::of(args), row_tiles, widened, k_blocks),
            RowWork::Apart { panel_bytes } => product.take_apart(fb, Arguments::of(args), panel_bytes),
        }
    }
}

impl KBlocks {
    /// First sums of a block of k.
    fn start<'c>(self, fb: &Fb<'_, 'c>, block: &Block<'c>) -> Start<'c> {
        match self {
            KBlocks::One => Start::Zero,
            KBlocks::Several | KBlocks::SeveralTurns => {
                let is_first = fb.cmp(Cmp::Ne, fb.and(block.stage, fb.int(1)), fb.int(0));
                Start::Tile { keep: fb.select(is_first, fb.i32(0), fb.i32(-1)) }
            }
        }
    }
}
