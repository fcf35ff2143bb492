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

use super::microkernel::Start;
use super::product::Product;
use super::{KERNEL_PARAMS, int_mmla, mmla};
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

/// What a kernel gives all its functions of rows: its own arguments, for its epilogue, and this.
#[derive(Clone, Copy)]
pub(super) struct Caller<'c> {
    /// Arguments of [`KERNEL_PARAMS`].
    pub call: [Value<'c>; 4],
    /// Address of the epilogue.
    pub epilogue: Value<'c>,
    /// Address of what asks for the epilogue's inputs; null: there are none.
    pub ahead: Value<'c>,
    /// Where rows are packed for matrix instructions.
    pub packed: Value<'c>,
}

/// Parameters of an epilogue: `(.., tile, row, rows, column, columns)` over `tile: f32[way][rows][columns]`.
pub(super) fn epilogue_params() -> Vec<Ty> {
    [&KERNEL_PARAMS[..], &[Ty::PTR, Ty::I64, Ty::I64, Ty::I64, Ty::I64]].concat()
}

/// Parameters of what asks for an epilogue's inputs: `(.., row, rows, column)`, of these rows and the columns of a panel.
pub(super) fn ahead_params() -> Vec<Ty> {
    [&KERNEL_PARAMS[..], &[Ty::I64, Ty::I64, Ty::I64]].concat()
}

impl<'c> Caller<'c> {
    /// From the arguments of a function of rows, and those behind.
    fn of<'a>(args: &'a [Value<'c>]) -> (Caller<'c>, &'a [Value<'c>]) {
        let (call, rest) = args.split_at(KERNEL_PARAMS.len());
        let [epilogue, ahead, packed, ..] = *rest else { unreachable!() };
        (Caller { call: call.try_into().expect("four"), epilogue, ahead, packed }, &rest[3..])
    }
    /// Arguments of a function of rows: these, and its own.
    pub fn with(&self, own: &[Value<'c>]) -> Vec<Value<'c>> {
        [&self.call[..], &[self.epilogue, self.ahead, self.packed], own].concat()
    }
    /// Calls the epilogue.
    fn epilogue(&self, fb: &Fb<'_, 'c>, tile: Value<'c>, row: Value<'c>, rows: Value<'c>, column: Value<'c>, columns: Value<'c>) {
        fb.call_at(self.epilogue, &epilogue_params(), &[&self.call[..], &[tile, row, rows, column, columns]].concat());
    }
    /// Asks for what the epilogue will read, if it reads anything.
    fn ahead(&self, fb: &Fb<'_, 'c>, row: Value<'c>, rows: Value<'c>, column: Value<'c>) {
        let args = [&self.call[..], &[row, rows, column]].concat();
        fb.if_(fb.not(fb.is_null(self.ahead)), || fb.call_at(self.ahead, &ahead_params(), &args));
    }
}

/// Own arguments of `stream` and `alone`.
#[derive(Clone, Copy)]
pub(super) struct Span<'c> {
    /// Rows.
    pub a: Value<'c>,
    /// The first panel of all.
    pub w: Value<'c>,
    /// First row.
    pub row: Value<'c>,
    /// Rows.
    pub rows: Value<'c>,
    /// First panel.
    pub first: Value<'c>,
    /// Behind the last.
    pub last: Value<'c>,
}

impl<'c> Span<'c> {
    const PARAMS: [Ty; 6] = [Ty::PTR, Ty::PTR, Ty::I64, Ty::I64, Ty::I64, Ty::I64];

    fn of(args: &[Value<'c>]) -> Span<'c> {
        let [a, w, row, rows, first, last] = *args else { unreachable!() };
        Span { a, w, row, rows, first, last }
    }
    /// As arguments.
    pub fn args(&self) -> [Value<'c>; 6] {
        let Span { a, w, row, rows, first, last } = *self;
        [a, w, row, rows, first, last]
    }
}

/// Own arguments of a block of rows.
#[derive(Clone, Copy)]
pub(super) struct Block<'c> {
    /// Rows, at the block's first k.
    pub a: Value<'c>,
    /// The first panel as stored, there too; where it is read widened, that.
    pub w: Value<'c>,
    /// The first one as widened.
    pub widened: Value<'c>,
    /// Its block of k is the first (bit 0), the last (bit 1).
    pub stage: Value<'c>,
    /// Its k.
    pub k: Value<'c>,
    /// Sums that are kept between blocks of k.
    pub tiles: Value<'c>,
    /// First row.
    pub row: Value<'c>,
    /// Rows.
    pub rows: Value<'c>,
    /// First panel (by tiles: of one way, `panel * ways + way`).
    pub first: Value<'c>,
    /// Behind the last.
    pub last: Value<'c>,
    /// What to ask for meanwhile.
    pub ahead: Value<'c>,
    /// Bytes of that, of each panel of one way.
    pub ahead_part: Value<'c>,
}

impl<'c> Block<'c> {
    const PARAMS: [Ty; 12] = [Ty::PTR, Ty::PTR, Ty::PTR, Ty::I64, Ty::I64, Ty::PTR, Ty::I64, Ty::I64, Ty::I64, Ty::I64, Ty::PTR, Ty::I64];

    fn of(args: &[Value<'c>]) -> Block<'c> {
        let [a, w, widened, stage, k, tiles, row, rows, first, last, ahead, ahead_part] = *args else { unreachable!() };
        Block { a, w, widened, stage, k, tiles, row, rows, first, last, ahead, ahead_part }
    }
    /// As arguments.
    pub fn args(&self) -> [Value<'c>; 12] {
        let Block { a, w, widened, stage, k, tiles, row, rows, first, last, ahead, ahead_part } = *self;
        [a, w, widened, stage, k, tiles, row, rows, first, last, ahead, ahead_part]
    }
}

/// Own arguments of a block of rows by tiles.
#[derive(Clone, Copy)]
pub(super) struct TileBlock<'c> {
    /// Those of any block.
    pub block: Block<'c>,
    /// The sums, of one way, that the block of rows after this adds to.
    pub sums_ahead: Value<'c>,
}

impl<'c> TileBlock<'c> {
    fn params() -> Vec<Ty> {
        [&Block::PARAMS[..], &[Ty::PTR]].concat()
    }
    fn of(args: &[Value<'c>]) -> TileBlock<'c> {
        let (block, rest) = args.split_at(Block::PARAMS.len());
        let [sums_ahead] = *rest else { unreachable!() };
        TileBlock { block: Block::of(block), sums_ahead }
    }
    /// As arguments.
    pub fn args(&self) -> Vec<Value<'c>> {
        [&self.block.args()[..], &[self.sums_ahead]].concat()
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
        let own: &[Ty] = match self.work {
            RowWork::Stream { .. } | RowWork::Alone { .. } => &Span::PARAMS,
            RowWork::Block { .. } => &Block::PARAMS,
            RowWork::Tiles { .. } => &TileBlock::params(),
            RowWork::Apart { .. } => return vec![Ty::PTR, Ty::PTR, Ty::I64],
        };
        [&KERNEL_PARAMS[..], &[Ty::PTR; 3], own].concat()
    }

    /// The function's code.
    pub(super) fn emit<'c>(&self, fb: &Fb<'_, 'c>, args: &[Value<'c>]) {
        let product = &self.product;
        let caller = || Caller::of(args);
        match self.work {
            RowWork::Stream { m, reading } => {
                let (caller, own) = caller();
                product.stream(fb, &caller, Span::of(own), m, reading);
            }
            RowWork::Alone { row_tiles } => {
                let (caller, own) = caller();
                product.alone(fb, &caller, Span::of(own), row_tiles);
            }
            RowWork::Block { m, weights, k_blocks } => {
                let (caller, own) = caller();
                product.block(fb, &caller, Block::of(own), m, weights, k_blocks);
            }
            RowWork::Tiles { row_tiles, widened, k_blocks } => {
                let (caller, own) = caller();
                product.tiles(fb, &caller, TileBlock::of(own), row_tiles, widened, k_blocks);
            }
            RowWork::Apart { panel_bytes } => {
                let [w, kept, k] = *args else { unreachable!() };
                product.take_apart(fb, (w, kept), k, panel_bytes);
            }
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
