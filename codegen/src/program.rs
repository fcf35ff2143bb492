//! The program: what one bucket of one entry executes. Codegen's only input; it names no model.
//!
//! A program is a list of parallel REGIONS with barriers between them, some inside a loop over layers. A region is one
//! fused kernel: a packed matmul, an attention over the KV cache, or a general loop nest. All decisions (tiles, layouts,
//! offsets, order, barriers) are stored here as data by `compiler/src/plan`; codegen only obeys.
//!
//! Element addresses are integer expressions ([`Expr`]) over loop variables and row tables, so layouts, gathers, slices and
//! cache pages are index maps and not kernels of their own.

use std::fmt;
use std::ops::Range;

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
    pub fn size(self) -> u64 {
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

/// How a tensor lies in the weights area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Row-major, no padding.
    Plain,
    /// Blocked for matmul, see [`Panels`].
    Panels(Panels),
}

/// How the elements of panels are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Coding {
    /// In the weight's type.
    Elements,
    /// `P[panel]{ [k / k_pack][nr][k_pack] codes, [nr] f32 scales }`, K padded to whole groups. The weight's type is `i8` (the codes
    /// themselves) or `u8` (codes + 128), as the CPU's dot product wants them.
    Int8 {
        /// k per scale of the quantised left operand: 32, 64, 128 or 256.
        group: u32,
    },
    /// `P[panel][k / group]{ [group / 4][nr][4] codes, [nr] f16 scales, zeros }`, codes in the types of `Int8`. Zeros, where there are any,
    /// are `[nr]` f16 zero points (as the codes are stored): an element is `(code - zero) * scale`. Not for matrix instructions, see
    /// [`Coding::fits_mmla`].
    Int8Groups {
        /// k per scale, of weights and of the quantised left operand: 32, 64 or 128.
        group: u32,
        /// Are there zero points?
        zeros: bool,
    },
    /// `P[panel][k / group]{ [group / k_pack][nr][k_pack / 2 bytes] codes, [nr] f16 scales, zeros }`: byte i of a column holds k = i in its
    /// low and k = k_pack / 2 + i in its high half. Codes + 8, or codes 0 to 15 with zero points as above. The weight's type is `u8`.
    /// Scales by 32 without zero points have five significant bits (see `quant` of the graph crate).
    Int4 {
        /// k per scale, of weights and of the quantised left operand: 32, 64 or 128.
        group: u32,
        /// Are there zero points?
        zeros: bool,
    },
}

impl Coding {
    /// What weights of this coding are called in reports and files: the elements' type, else bits and group, `z` for zero points. One scale
    /// per column has no group (that of the left operand follows from K).
    pub fn name(self, dtype: DType) -> String {
        let zeros = if self.has_zeros() { "z" } else { "" };
        match self {
            Coding::Elements => dtype.name().into(),
            Coding::Int8 { .. } => "int8".into(),
            Coding::Int8Groups { group, .. } => format!("int8g{group}{zeros}"),
            Coding::Int4 { group, .. } => format!("int4g{group}{zeros}"),
        }
    }
    /// k per group, if coded.
    pub fn group(self) -> Option<u32> {
        match self {
            Coding::Elements => None,
            Coding::Int8 { group } | Coding::Int8Groups { group, .. } | Coding::Int4 { group, .. } => Some(group),
        }
    }
    /// Do scales lie behind the codes of each group (else behind those of a panel)?
    pub fn has_group_scales(self) -> bool {
        matches!(self, Coding::Int8Groups { .. } | Coding::Int4 { .. })
    }
    /// Do zero points lie behind the scales?
    pub fn has_zeros(self) -> bool {
        matches!(self, Coding::Int8Groups { zeros: true, .. } | Coding::Int4 { zeros: true, .. })
    }
    /// What is added to a code before it is stored in a weight of type `dtype`.
    pub fn offset(self, dtype: DType) -> i32 {
        match self {
            Coding::Elements => 0,
            Coding::Int8 { .. } | Coding::Int8Groups { .. } if dtype == DType::I8 => 0,
            Coding::Int8 { .. } | Coding::Int8Groups { .. } => 128,
            Coding::Int4 { zeros: true, .. } => 0,
            Coding::Int4 { .. } => 8,
        }
    }
    /// Factor of the sum of a record's codes that its start word subtracts: the offset of every stored code, or 1 where columns have zero
    /// points of their own, by which the kernel multiplies that sum.
    pub fn bias_factor(self, dtype: DType) -> i32 {
        if self.has_zeros() { 1 } else { self.offset(dtype) }
    }
    /// Is a code a byte?
    pub fn has_bytes(self) -> bool {
        matches!(self, Coding::Int8 { .. } | Coding::Int8Groups { .. })
    }
    /// Are there kernels with matrix instructions ([`Compute::Int8Mmla`])?
    pub fn fits_mmla(self) -> bool {
        matches!(self, Coding::Int8 { .. } | Coding::Int4 { zeros: false, .. })
    }
    /// Consecutive k of one column that lie together, as `compute` reads them: four bytes of codes, for matrix instructions eight.
    pub fn k_pack(self, compute: Compute) -> Option<u32> {
        let bytes = if compute == Compute::Int8Mmla { 8 } else { 4 };
        match self {
            Coding::Elements => None,
            Coding::Int8 { .. } | Coding::Int8Groups { .. } => Some(bytes),
            Coding::Int4 { .. } => Some(2 * bytes),
        }
    }
}

/// Panels of `nr` output columns: `P[panel][k / k_pack][nr][k_pack]`, K padded with zeros to a multiple of `k_pack`; or codes and scales,
/// see [`Coding`].
///
/// Columns come in `groups` of `group_cols`; each group is padded with zero columns to a multiple of `nr`, so that a head
/// never straddles panels (ungrouped: one group of all columns). With `ways == 2` two matrices of the same shape alternate panel
/// by panel (gate panel, up panel, ...).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Panels {
    /// Columns per panel.
    pub nr: u32,
    /// Consecutive k of one column that lie together (bf16: 2, for matrix instructions 4; codes: [`Coding::k_pack`]; else 1).
    pub k_pack: u32,
    /// Inner dimension.
    pub k: u32,
    /// Number of groups.
    pub groups: u32,
    /// Real columns per group.
    pub group_cols: u32,
    /// 1 or 2 interleaved matrices.
    pub ways: u32,
    /// Elements, or codes and scales.
    pub coding: Coding,
}

impl Panels {
    /// Columns of a group with padding.
    pub fn padded_group(&self) -> u32 {
        self.group_cols.div_ceil(self.nr) * self.nr
    }
    /// Panels of one group and one way.
    pub fn panels_per_group(&self) -> u32 {
        self.group_cols.div_ceil(self.nr)
    }
    /// Panels of one way.
    pub fn panels(&self) -> u32 {
        self.groups * self.panels_per_group()
    }
    /// Columns with padding of one way: width of the output.
    pub fn padded_cols(&self) -> u32 {
        self.groups * self.padded_group()
    }
    /// K with padding.
    pub fn padded_k(&self) -> u32 {
        self.k.next_multiple_of(self.coding.group().unwrap_or(self.k_pack))
    }
    /// Bytes of a panel before `k`, which is a multiple of the group (of `k_pack` for elements); `dtype` is the weight's.
    pub fn bytes_before(&self, k: u32, dtype: DType) -> u64 {
        match self.coding {
            Coding::Elements => u64::from(k) * u64::from(self.nr) * dtype.size(),
            Coding::Int8 { .. } => u64::from(k) * u64::from(self.nr),
            Coding::Int8Groups { group, .. } | Coding::Int4 { group, .. } => u64::from(k / group) * self.group_bytes(),
        }
    }
    /// Bytes of a group's codes of all columns.
    pub fn code_bytes(&self) -> u64 {
        let codes = u64::from(self.coding.group().unwrap_or(0)) * u64::from(self.nr);
        if self.coding.has_bytes() { codes } else { codes / 2 }
    }
    /// Bytes of a group with its scales and zero points, where each has them.
    pub fn group_bytes(&self) -> u64 {
        let factors = if self.coding.has_zeros() { 2 } else { 1 };
        self.code_bytes() + u64::from(self.nr) * factors * DType::F16.size()
    }
    /// Bytes of one panel of one way.
    pub fn panel_bytes(&self, dtype: DType) -> u64 {
        let scales = if matches!(self.coding, Coding::Int8 { .. }) { u64::from(self.nr) * DType::F32.size() } else { 0 };
        self.bytes_before(self.padded_k(), dtype) + scales
    }
    /// Bytes in all.
    pub fn bytes(&self, dtype: DType) -> u64 {
        self.panel_bytes(dtype) * u64::from(self.panels()) * u64::from(self.ways)
    }
    /// True when there is nothing.
    pub fn is_empty(&self) -> bool {
        u64::from(self.padded_k()) * u64::from(self.nr) * u64::from(self.panels()) * u64::from(self.ways) == 0
    }
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
    /// All memory that a kernel names, that of its nests included.
    pub fn operands(&self) -> Vec<&Operand> {
        match self {
            Kernel::Loops(nest) => nest.operands.iter().collect(),
            Kernel::Matmul(m) => {
                let mut list = vec![&m.a];
                list.extend(&m.operands);
                list.extend(m.nests().flat_map(|n| &n.operands));
                list.extend(m.quantise.iter().flat_map(|q| [&q.x, &q.out]));
                list
            }
            Kernel::Attention(a) => vec![&a.q, &a.out],
            Kernel::Quantise(q) => vec![&q.x, &q.out],
        }
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

/// Expressions of one kernel, hash-consed, operands before users.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exprs {
    nodes: Vec<Expr>,
}

/// A scalar expression: i64, f32 or bool. The vector generator evaluates it for 16 (8) neighbours of the inner variable.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expr {
    /// i64 constant.
    Int(i64),
    /// f32 constant.
    Float(f32),
    /// Loop variable (i64).
    Var(VarId),
    /// Result of an earlier reduction (f32), the same for all inner iterations.
    Scalar(ScalarId),
    /// `ctx.pages_per_slot` (i64).
    PagesPerSlot,
    /// Matmul epilogue: accumulator of this row and column, way 0 or 1 (f32).
    Acc(u32),
    /// Attention: the raw score q . k of this (query, key) (f32).
    Score,
    /// Element of an operand, widened to f32 (float types) or i64 (integer types). `index` counts elements.
    Load(OperandId, ExprId),
    /// Function of one f32 (or `IntToFloat` of an i64).
    Unary(UnaryOp, ExprId),
    /// Function of two of the same type. Div and Rem of integers are of non-negative numbers.
    Binary(BinaryOp, ExprId, ExprId),
    /// Comparison -> bool.
    Cmp(CmpOp, ExprId, ExprId),
    /// `cond ? a : b`; both sides are evaluated.
    Select(ExprId, ExprId, ExprId),
    /// Rounded to the type and widened again.
    Round(DType, ExprId),
    /// Sequential reduction over `var in begin..end` of `body` (f32): a loop inside the expression.
    Fold {
        /// Sum or maximum.
        op: ReduceOp,
        /// Bound variable.
        var: VarId,
        /// First value (i64, uniform).
        begin: ExprId,
        /// End (i64, uniform).
        end: ExprId,
        /// Reduced expression.
        body: ExprId,
    },
}

/// f32 functions. `Exp`, `Tanh`, `Erf`, `Gelu` are polynomials of our own; their errors stand at the functions of [`math`](crate::math).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum UnaryOp {
    Neg,
    Abs,
    Exp,
    Tanh,
    Erf,
    /// x (1 + erf(x / sqrt 2)) / 2
    Gelu,
    /// 1 / (1 + exp(-x))
    Sigmoid,
    Sqrt,
    /// 1 / sqrt(x), correctly rounded root then division.
    Rsqrt,
    IntToFloat,
    Not,
}

/// Two-operand functions. `Add Sub Mul Div Rem Min Max` work on i64 and f32; `And Or` on bool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum BinaryOp {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
}

/// Comparisons: of f32 ordered, except `Ne`, which is true of what is no number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum CmpOp {
    Lt,
    Le,
    Gt,
    Ge,
    Eq,
    Ne,
}

/// Reductions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ReduceOp {
    Sum,
    Max,
}

impl Exprs {
    /// Adds a node or returns the equal one that exists.
    pub fn add(&mut self, expr: Expr) -> ExprId {
        // Kernels have at most some hundred nodes; a scan keeps the order deterministic without hashing floats.
        let same = |a: &Expr| match (a, &expr) {
            (Expr::Float(x), Expr::Float(y)) => x.to_bits() == y.to_bits(),
            _ => *a == expr,
        };
        if let Some(i) = self.nodes.iter().position(same) {
            return ExprId(i as u32);
        }
        self.nodes.push(expr);
        ExprId(self.nodes.len() as u32 - 1)
    }
    /// The node.
    pub fn get(&self, id: ExprId) -> Expr {
        self.nodes[id.index()]
    }
    /// All nodes in order.
    pub fn nodes(&self) -> &[Expr] {
        &self.nodes
    }
    /// i64 constant.
    pub fn int(&mut self, value: i64) -> ExprId {
        self.add(Expr::Int(value))
    }
    /// f32 constant.
    pub fn float(&mut self, value: f32) -> ExprId {
        self.add(Expr::Float(value))
    }
    /// Binary node with folding of integer constants and of `+ 0`, `* 1`, `* 0`, `/ 1`, `% 1`.
    pub fn binary(&mut self, op: BinaryOp, a: ExprId, b: ExprId) -> ExprId {
        use BinaryOp::*;
        if let (Expr::Int(x), Expr::Int(y)) = (self.get(a), self.get(b)) {
            let value = match op {
                Add => Some(x + y),
                Sub => Some(x - y),
                Mul => Some(x * y),
                Div if y != 0 => Some(x / y),
                Rem if y != 0 => Some(x % y),
                Min => Some(x.min(y)),
                Max => Some(x.max(y)),
                _ => None,
            };
            if let Some(value) = value {
                return self.int(value);
            }
        }
        match (op, self.get(a), self.get(b)) {
            (Add, Expr::Int(0), _) => b,
            (Add | Sub, _, Expr::Int(0)) => a,
            (Mul, Expr::Int(1), _) => b,
            (Mul | Div, _, Expr::Int(1)) => a,
            (Mul, Expr::Int(0), _) | (Rem, _, Expr::Int(1)) => self.int(0),
            (Mul, _, Expr::Int(0)) => self.int(0),
            _ => self.add(Expr::Binary(op, a, b)),
        }
    }
}

/// A store of one value per inner iteration; rounded to the operand's type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Store {
    /// Where.
    pub operand: OperandId,
    /// Element index (i64).
    pub index: ExprId,
    /// f32 value.
    pub value: ExprId,
}

/// A general fused loop nest: `for outer[0] { for outer[1] { ... stages in order } }`.
///
/// The product of the outer extents is shared out to threads in contiguous pieces (row-major order). Each stage runs over its own
/// inner variable, vectorised; a reduction's result is a scalar for the later stages of the same outer iteration.
#[derive(Clone, Debug, PartialEq)]
pub struct LoopNest {
    /// Outer variables, outermost first.
    pub outer: Vec<(VarId, Extent)>,
    /// Memory operands.
    pub operands: Vec<Operand>,
    /// Expressions.
    pub exprs: Exprs,
    /// Executed in order.
    pub stages: Vec<Stage>,
}

/// One inner loop.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// Inner variable.
    pub var: VarId,
    /// Its range (constants: only outer extents and folds are dynamic).
    pub range: Range<u32>,
    /// What it does.
    pub kind: StageKind,
}

/// What an inner loop does.
#[derive(Clone, Debug, PartialEq)]
pub enum StageKind {
    /// Horizontal reduction, in one fixed order that depends only on the vector width and the range.
    Reduce {
        /// Sum or maximum.
        op: ReduceOp,
        /// f32 value per iteration.
        value: ExprId,
        /// Result.
        into: ScalarId,
    },
    /// One or several stores per iteration.
    Store(Vec<Store>),
}

/// Rows that go through a matmul's panels once by tiles, as few rows do by vectors: nothing is blocked.
pub const TILE_ROWS: u32 = 32;

/// Arithmetic of a matmul; accumulation is f32 in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// Weights widened to f32, one FMA chain over k per output element.
    F32,
    /// bf16 pairs: one chain of VDPBF16PS over k / 2 per output element.
    Bf16Dot,
    /// bf16 in blocks of 4 k: one chain of BFMMLA over k / 4 per output element.
    Bf16Mmla,
    /// int8 codes of both operands: exact i32 sums over groups of k, scaled and added in f32, one chain over groups per output element. The
    /// left operand is the records of [`Quantise`].
    Int8Dot,
    /// The same values, with matrix instructions: codes in blocks of 8 k of two rows and two columns (SMMLA).
    Int8Mmla,
    /// The same values, of more than a few rows by tiles of 16 rows, 16 columns and 64 k (AMX); panels are those of [`Compute::Int8Dot`].
    Int8Tiles,
    /// The same values of int4 codes by 32, of more than a few rows by tiles of bf16, which hold code times scale of both operands exactly,
    /// and so are sums over a group: no group is scaled. Panels are those of [`Compute::Int8Dot`].
    CodesInBf16Tiles,
    /// bf16 by tiles of 16 rows, 16 columns and 32 k (AMX): one chain over k / 32 per output element, of what TDPBF16PS makes of 32 k.
    /// Panels are those of [`Compute::Bf16Dot`].
    Bf16Tiles,
}

/// k of the groups whose values, and sums of products, floats hold exactly (see `quant` of the graph crate).
pub const SHORT_GROUP: u32 = 32;

impl Compute {
    /// All of them.
    pub const ALL: [Compute; 8] = [
        Compute::F32,
        Compute::Bf16Dot,
        Compute::Bf16Mmla,
        Compute::Int8Dot,
        Compute::Int8Mmla,
        Compute::Int8Tiles,
        Compute::CodesInBf16Tiles,
        Compute::Bf16Tiles,
    ];

    /// Name in text forms, symbols and tuning files.
    pub fn name(self) -> &'static str {
        match self {
            Compute::F32 => "f32",
            Compute::Bf16Dot => "bf16_dot",
            Compute::Bf16Mmla => "bf16_mmla",
            Compute::Int8Dot => "int8_dot",
            Compute::Int8Mmla => "int8_mmla",
            Compute::Int8Tiles => "int8_tiles",
            Compute::CodesInBf16Tiles => "codes_in_bf16_tiles",
            Compute::Bf16Tiles => "bf16_tiles",
        }
    }
    /// Are both operands codes, the left one in records?
    pub fn takes_codes(self) -> bool {
        matches!(self, Compute::Int8Dot | Compute::Int8Mmla | Compute::Int8Tiles | Compute::CodesInBf16Tiles)
    }
    /// Do blocks of rows take tiles?
    pub fn by_tiles(self) -> bool {
        matches!(self, Compute::Int8Tiles | Compute::CodesInBf16Tiles | Compute::Bf16Tiles)
    }
    /// Do few rows take integer dots for it ([`Isa::int8_dot`](crate::isa::Isa::int8_dot))?
    pub fn dots_codes(self) -> bool {
        matches!(self, Compute::Int8Dot | Compute::Int8Tiles | Compute::CodesInBf16Tiles)
    }
    /// Bytes of a record (see [`Quantise`]) for it: tiles want rows that begin with a cache line (they read others at a quarter of the
    /// rate).
    pub fn record(self, group: u32) -> u32 {
        let bytes = group + 8;
        match self {
            Compute::CodesInBf16Tiles => Quantise::VALUES + group * DType::Bf16.size() as u32,
            _ if self.by_tiles() => bytes.next_multiple_of(64),
            _ => bytes,
        }
    }
    /// Does it want the values of its rows' codes behind them?
    pub fn wants_values(self) -> bool {
        self == Compute::CodesInBf16Tiles
    }
    /// Bytes of the records of a row of `k` codes.
    pub fn row_bytes(self, k: u32, group: u32) -> u32 {
        k.div_ceil(group) * self.record(group)
    }
    /// Elements from row to row of records: whole cache lines; for tiles, whose rows are read at once, an odd number of them, so that they
    /// lie in different sets of L1.
    pub fn record_stride(self, k: u32, group: u32) -> u32 {
        let lines = self.row_bytes(k, group).div_ceil(64);
        64 * if self.by_tiles() { lines | 1 } else { lines }
    }
}

/// Rows of floats to int8 codes with a scale per group of k: `q8g32` .. `q8g256` of the graph (whose scales by 32 are powers of two).
///
/// A row of `out` is one record per group, each `group` codes (i8), then `scale` (f32), then `start` (f32) = [`Quantise::INTEGERS`] minus
/// `bias_factor` times the sum of the codes: what makes up for the offset, or for a zero point of one, of the weights' codes. The bits of
/// `start` are where integer sums start. Where scales are powers of two both are multiplied with the scale, and `INTEGERS * scale` takes
/// the place of `scale`: bits count its multiples from there on, so that sums which start there are scaled already. Bytes after that are
/// not written, but for the values of the codes (`code * scale`, bf16) from [`Quantise::VALUES`] on where there are any. The last group is
/// padded with zero codes.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantise {
    /// `Rows` or `LogitRows`.
    pub rows: Extent,
    /// Rows of floats: element `row * x_stride + k`.
    pub x: Operand,
    /// Elements per row of `x`.
    pub x_stride: u32,
    /// Records, of type `u8`.
    pub out: Operand,
    /// Bytes per row of `out`, a multiple of 4.
    pub out_stride: u32,
    /// Elements of a row.
    pub k: u32,
    /// Elements per group.
    pub group: u32,
    /// Arithmetic of the matmuls that read it, which says what a record holds.
    pub compute: Compute,
    /// Of the weights that the records are multiplied with, see [`Coding::bias_factor`].
    pub bias_factor: i32,
}

impl Quantise {
    /// 3 * 2^22: f32 less than 2^22 away from it are all integers, and their bits count them. A sum whose bits start here becomes f32 by a
    /// subtraction.
    pub const INTEGERS: f32 = 12_582_912.0;
    /// Bytes of a record (of a group of [`SHORT_GROUP`]) before the values of its codes: a cache line.
    pub const VALUES: u32 = 64;

    /// Bytes of a record.
    pub fn record(&self) -> u32 {
        self.compute.record(self.group)
    }
    /// Are scales of rows' groups of so many k powers of two?
    pub fn has_powers_of_two(group: u32) -> bool {
        group == SHORT_GROUP
    }
    /// Bytes of a row's records.
    pub fn row_bytes(&self) -> u32 {
        self.compute.row_bytes(self.k, self.group)
    }
}

/// Tile of a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulTile {
    /// Most rows per register tile; instances exist for 1 ..= mr.
    pub mr: u32,
    /// With several blocks of rows: most rows of a block, at most `mr`; instances exist from [`MatmulTile::least_block`] on.
    pub block_mr: u32,
    /// Most panels (times ways) that an instance walks side by side when there is one block of rows: each is a stream from memory.
    pub streams: u32,
    /// With several blocks of rows (by tiles more than [`TILE_ROWS`]): k per block, even, 0 for all. The f32 accumulators are kept in scratch between blocks (same bits).
    pub k_block: u32,
    /// With several blocks of rows: most rows per pass over the weights, 0 for all. Rows of a pass stay in L2.
    pub m_block: u32,
    /// With several blocks of rows: panels per block, which stay in L2 while all rows of a pass meet them.
    pub n_block: u32,
    /// With several blocks of rows: weights of a block are widened to f32 in scratch once, and not once per block of rows (nibbles for
    /// integer dots: taken apart to bytes). Up to `2 * mr` rows read them as they are stored all the same. Without meaning for f32 weights
    /// and for tiles, which always want nibbles taken apart.
    pub widen: bool,
    /// Prefetch distance into L2 in bytes for weights that stream from memory, 0 = none.
    pub prefetch: u32,
    /// Prefetch distance into L1 for the same, 0 = none.
    pub prefetch_l1: u32,
    /// From so many rows on arithmetic takes longer over a line than memory, 0 = never: instances of so many prefetch by `busy_l1` alone.
    pub busy_rows: u32,
    /// Their prefetch distance into L1.
    pub busy_l1: u32,
    /// Walks of at least so many streams use `near` and `near_l1` instead of `prefetch` and `prefetch_l1`, 0 = never. Busy rows are not
    /// affected.
    pub near_streams: u32,
    /// Their prefetch distance into L2.
    pub near: u32,
    /// The same for L1.
    pub near_l1: u32,
}

impl MatmulTile {
    /// Distances into L2 and L1 of an instance of `m` rows that walks `streams` streams side by side.
    pub fn distances(&self, m: u32, streams: u32) -> (u32, u32) {
        match (self.is_busy(m), self.near_streams) {
            (true, _) => (0, self.busy_l1),
            (_, near) if near > 0 && streams >= near => (self.near, self.near_l1),
            _ => (self.prefetch, self.prefetch_l1),
        }
    }
    /// Rows of the smallest block of several, which are balanced: of one row more than `mr`, or of the fewest rows that take one block
    /// more.
    pub fn least_block(&self) -> u32 {
        let blocks = (self.mr + 1).div_ceil(self.block_mr);
        ((self.mr + 1) / blocks).min((blocks * self.block_mr + 1) / (blocks + 1))
    }
    /// Is an instance of `m` rows bound by arithmetic, also where weights come from memory?
    pub fn is_busy(&self, m: u32) -> bool {
        self.busy_rows > 0 && m >= self.busy_rows
    }
}

/// `out[row, col] = epilogue(sum_k a[row, k] * w[col, k])` over packed panels.
///
/// Units of work are groups (or single panels when `groups == 1`), of which every thread has a contiguous share. Where all rows take
/// weights as they are stored (up to `mr` rows, two or three times as many where more would widen them, up to [`TILE_ROWS`] by tiles), threads do the ends of their
/// shares in pieces, which others may take; with more rows a thread walks blocks of `n_block` panels of its share, all rows of a pass over
/// each. Per output element there is one accumulator chain in order of k.
#[derive(Clone, Debug, PartialEq)]
pub struct Matmul {
    /// `Rows` or `LogitRows`.
    pub rows: Extent,
    /// Rows of `a`: element `row * a_stride + k`, or records (of codes).
    pub a: Operand,
    /// Elements per row of `a`.
    pub a_stride: u32,
    /// Computed by every thread for itself before its share, for all rows (private norm); its outer variables are `[row]`.
    pub prologue: Option<LoopNest>,
    /// Likewise, after the prologue: `a` is what it writes.
    pub quantise: Option<Quantise>,
    /// Panels of the weight.
    pub weight: WeightId,
    /// Copy of its layout.
    pub panels: Panels,
    /// Arithmetic.
    pub compute: Compute,
    /// Blocking.
    pub tile: MatmulTile,
    /// Row variable of the epilogue.
    pub row: VarId,
    /// Column variable of the epilogue: padded column of one way, `0 .. panels.padded_cols()`.
    pub col: VarId,
    /// Operands of the epilogue.
    pub operands: Vec<Operand>,
    /// Epilogue expressions over `Acc(way)`, row, col. Loads of unit stride in `col`, or uniform, are vectors; others go lane by lane.
    pub exprs: Exprs,
    /// Stores of the epilogue, evaluated in registers. Padded columns are stored too (buffers have room).
    pub stores: Vec<Store>,
    /// Run on a block of rows after all columns of a group were stored (head-wise norm, RoPE, cache append).
    pub group_nests: Vec<GroupNest>,
}

impl Matmul {
    /// Prologue and group nests.
    pub fn nests(&self) -> impl Iterator<Item = &LoopNest> {
        self.prologue.iter().chain(self.group_nests.iter().map(|g| &g.nest))
    }
}

/// A loop nest per (row, group) after the matmul of that group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupNest {
    /// Groups it applies to.
    pub groups: Range<u32>,
    /// Its outer variables are `[row, group - groups.start]`.
    pub nest: LoopNest,
}

/// Attention of query rows over the KV cache with online softmax, in key blocks of 256 positions from 0, merged in order.
///
/// Work units are (tile, kv head); see `abi::Tile`. Keys `0 .. tile.key_end` exist; bounds and mask decide which of them a row sees.
/// K page of one kv head: `[256 / 16][head_dim][16]`, V page: `[256][head_dim]`, element type `kv_dtype`. Of int8 codes, each key and each
/// value has a scale: `f32[256]` for K at `+ scales`, for V behind them.
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
    /// How scores and weighted values are summed: `F32`, or `Bf16Dot` over a bf16 cache, which rounds queries and weights to bf16.
    pub compute: Compute,
    /// Byte offset of each layer in the state.
    pub state_offsets: Vec<u64>,
    /// Bytes of a page (all kv heads, K and V).
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

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
