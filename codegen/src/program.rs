//! The program: what one bucket of one entry executes. Codegen's only input; it names no model.
//!
//! A program is a list of parallel REGIONS with barriers between them, some inside a loop over layers. A region is one
//! fused kernel: a packed matmul, an attention over the KV cache, rows rounded to codes, or a general loop nest. All decisions
//! (tiles, layouts, offsets, order, barriers) are stored here as data by `compiler/src/plan`; codegen only obeys.
//!
//! Element addresses are integer expressions ([`Expr`]) over loop variables and row tables, so layouts, gathers, slices and
//! cache pages are index maps and not kernels of their own.

mod access;
mod attention;
mod compute;
mod exprs;
mod loops;
mod matmul;
mod quantise;
mod weights;

pub use self::access::{Access, Area, At};
pub use self::attention::{Attention, KEY_GROUP, KvPage};
pub use self::compute::{Compute, FewRows, SHORT_GROUP};
pub use self::exprs::{BinaryOp, CmpOp, Expr, Exprs, ReduceOp, UnaryOp};
pub use self::loops::{LoopNest, Stage, StageKind, Store};
pub use self::matmul::{BusyRows, Fetch, GroupNest, Matmul, MatmulTile, Reading, TILE_ROWS};
pub use self::quantise::Quantise;
pub use self::weights::{Coding, Layout, Panels};

use std::fmt;

/// Storage types. Arithmetic is f32 (and i64 for indices) whatever is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16; rounded to nearest even, NaN stays NaN.
    Bf16,
    /// 32-bit integer (row tables).
    I32,
    /// 8-bit integer.
    I8,
    /// 8-bit unsigned integer.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::I8 | DType::U8 => 1,
        }
    }
    /// Name in text forms and symbols.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I8 => "i8",
            DType::U8 => "u8",
        }
    }
}

macro_rules! ids { ($($(#[$m:meta])* $name:ident),* $(,)?) => { $(
    $(#[$m])*
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct $name(pub u32);
    impl $name {
        /// As an index.
        pub fn index(self) -> usize { self.0 as usize }
    } )* } }
ids! {
    /// Index into [`Program::buffers`].
    BufferId,
    /// Index into [`Program::weights`].
    WeightId,
    /// Index into [`Program::regions`].
    RegionId,
    /// Index into [`Exprs`].
    ExprId,
    /// A loop variable of one kernel (unique within its [`Exprs`]).
    VarId,
    /// The result of a [`StageKind::Reduce`] of one kernel.
    ScalarId,
    /// Index into a kernel's `operands`.
    OperandId,
}

/// One bucket of one entry.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// `step`, `encode`, ...
    pub entry: String,
    /// Capacity in rows; `ctx.rows` is at most this.
    pub bucket: u32,
    /// `ctx.rows` is at least this, 1 or more: fewer rows take a smaller bucket.
    pub least_rows: u32,
    /// Bound of `ctx.logit_rows`.
    pub max_logit_rows: u32,
    /// Bound of `ctx.runs`.
    pub max_runs: u32,
    /// Rows per attention tile.
    pub tile_rows: u32,
    /// Temporaries in the arena.
    pub buffers: Vec<Buffer>,
    /// Packed tensors.
    pub weights: Vec<Weight>,
    /// Fused kernels, in order of first execution.
    pub regions: Vec<Region>,
    /// What runs.
    pub body: Vec<Item>,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Bytes of scratch per thread (multiple of 128).
    pub private_bytes: u64,
}

/// One step of the body.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// All threads execute the region's kernel, each its share.
    Region(RegionId),
    /// All threads meet.
    Barrier,
    /// `for layer in 0..count { body }`; tables of operands are indexed by `layer`. Not nested.
    Layers {
        /// Trip count.
        count: u32,
        /// Regions and barriers.
        body: Vec<Item>,
    },
}

/// A temporary: `rows x stride` elements in the arena, 64-byte aligned.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// For the text form.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Capacity in rows.
    pub rows: u32,
    /// Elements per row, padded (multiple of 32).
    pub stride: u32,
    /// Byte offset in the arena.
    pub offset: u64,
}

impl Buffer {
    /// Bytes that it has.
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.stride) * self.dtype.size()
    }
}

/// A packed tensor or one per layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// For the text form (HF parameter path, layer number replaced by `*`).
    pub name: String,
    /// Element type as stored.
    pub dtype: DType,
    /// Layout of each.
    pub layout: Layout,
    /// Byte offset from `ctx.weights`, per layer (one entry outside layers).
    pub offsets: Vec<u64>,
}

/// A named kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    /// `layers.qkv`, `embed`, ... for text, profile and symbols.
    pub name: String,
    /// What it does.
    pub kernel: Kernel,
}

/// The kernel generators.
#[derive(Clone, Debug, PartialEq)]
pub enum Kernel {
    /// See [`LoopNest`].
    Loops(LoopNest),
    /// See [`Matmul`].
    Matmul(Box<Matmul>),
    /// See [`Attention`].
    Attention(Attention),
    /// See [`Quantise`].
    Quantise(Quantise),
}

impl Kernel {
    /// Do threads leave the ends of their shares to each other, by counters that one kernel uses at a time?
    pub fn shares_out(&self) -> bool {
        matches!(self, Kernel::Matmul(_) | Kernel::Attention(_))
    }
}

/// A memory operand of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// Where.
    pub place: Place,
    /// Element type.
    pub dtype: DType,
}

impl Operand {
    /// Bytes of a thread's private area that `rows` rows of `stride` elements take, where they are there.
    pub fn private_rows(&self, stride: u32, rows: u32) -> Option<std::ops::Range<u64>> {
        match self.place {
            Place::Private(offset) => Some(offset..offset + u64::from(rows) * u64::from(stride) * self.dtype.size()),
            _ => None,
        }
    }
}

/// Base address of an operand.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// `ctx.weights + offsets[layer]`.
    Weight(WeightId),
    /// `ctx.arena + offset`.
    Buffer(BufferId),
    /// This thread's scratch `+ offset` bytes.
    Private(u64),
    /// `ctx.state + offsets[layer]` bytes.
    State(Vec<u64>),
    /// `ctx.output` (f32).
    Output,
    /// A row table of the step context (i32).
    Table(Table),
}

/// Row tables (i32) of the step context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Table {
    Token,
    Slot,
    Position,
    KvIndex,
    Segment,
    LogitRow,
    RunBegin,
    PageTable,
}

/// Extent of an outer loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// Known at build.
    Const(u32),
    /// `ctx.rows`.
    Rows,
    /// `ctx.logit_rows`.
    LogitRows,
    /// `ctx.runs`.
    Runs,
}

impl Program {
    /// Smallest value of an extent that anything is to be done for.
    pub fn least(&self, extent: Extent) -> u32 {
        match extent {
            Extent::Const(n) => n,
            Extent::Rows => self.least_rows,
            Extent::LogitRows | Extent::Runs => 1,
        }
    }
    /// Largest value of an extent.
    pub fn capacity(&self, extent: Extent) -> u32 {
        match extent {
            Extent::Const(n) => n,
            Extent::Rows => self.bucket,
            Extent::LogitRows => self.max_logit_rows,
            Extent::Runs => self.max_runs,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
