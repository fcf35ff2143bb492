//! The operations: one closed enum, named after ATen core IR. Each variant documents shapes, types and rounding; unless it
//! says otherwise the result has the element type of the first operand, sums are accumulated exactly enough (the interpreter uses f64)
//! and the result is rounded once to its declared type. NaN propagates.

use crate::types::{FuncId, ParamId, StateId};

/// One-operand elementwise functions on floats (`Not` on bool), result type = operand type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Unary {
    Neg,
    Abs,
    Exp,
    Log,
    Sqrt,
    /// `1 / sqrt(x)`
    Rsqrt,
    Tanh,
    Erf,
    Sigmoid,
    /// `x * sigmoid(x)`
    Silu,
    /// `max(x, 0)`
    Relu,
    /// `x * 0.5 * (1 + erf(x / sqrt 2))`
    Gelu,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    GeluTanh,
    Not,
}

/// Two-operand elementwise functions with numpy broadcasting (constant dimensions of 1 and missing leading ones stretch; symbols
/// match themselves only). Both operands have one type; `And`/`Or` on bool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Minimum,
    Maximum,
    And,
    Or,
}

/// Comparisons with broadcasting; result bool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Compare {
    Lt,
    Le,
    Gt,
    Ge,
    Eq,
    Ne,
}

/// Reductions over one axis, keeping it with extent 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Reduce {
    Sum,
    Mean,
    Amax,
}

/// Pooling of the rows of each run (maximal group of consecutive rows with one slot).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Pool {
    Mean,
    /// First row.
    Cls,
    Max,
    Last,
}

impl Pool {
    /// All, in the order in which an encoder writes their vectors.
    pub const ALL: [Pool; 4] = [Pool::Mean, Pool::Cls, Pool::Max, Pool::Last];
}

/// Variables of attention expressions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttnVar {
    /// Raw dot product of query and key (score expressions only).
    Score,
    /// Query head.
    Head,
    /// Place of the query: its `kv_index`.
    Query,
    /// Place of the key.
    Key,
}

/// Score and mask expressions of [`Op::Sdpa`]: `score * 0.125`, `key <= query & key > query - 4096`.
#[derive(Clone, Debug, PartialEq)]
pub enum AttnExpr {
    /// Variable.
    Var(AttnVar),
    /// Constant.
    Const(f64),
    /// `tanh(x)`, `-x`, ... (`Neg`, `Abs`, `Exp`, `Tanh`, `Not` only).
    Unary(Unary, Box<AttnExpr>),
    /// Arithmetic or logic.
    Binary(Binary, Box<AttnExpr>, Box<AttnExpr>),
    /// Comparison.
    Compare(Compare, Box<AttnExpr>, Box<AttnExpr>),
    /// `true`: every key that exists.
    True,
}

/// An operation with its attributes.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Function input number `index` of the declared type.
    Input {
        /// Place in [`crate::types::Function::inputs`].
        index: u32,
    },
    /// A weight. Inside outlined functions: the first layer's, replaced by each call.
    Param(ParamId),
    /// Scalar constant of the node's type (shape `[]`), rounded to it.
    Const(f64),
    /// Elementwise function.
    Unary(Unary),
    /// Elementwise function of two.
    Binary(Binary),
    /// Comparison -> bool.
    Compare(Compare),
    /// `where(cond: bool, a, b)` with broadcasting.
    Where,
    /// Conversion to the node's element type (floats round to nearest even; to quantised types by rows, see [`crate::quant`]).
    Convert,
    /// Same elements in row-major order, new shape (at most one symbolic dimension, kept).
    Reshape,
    /// Dimensions reordered: `out.shape[i] = in.shape[perm[i]]`.
    Permute {
        /// Permutation.
        perm: Vec<u32>,
    },
    /// `start..end` of a constant axis.
    Slice {
        /// Axis.
        axis: u32,
        /// First index.
        start: u64,
        /// End index.
        end: u64,
    },
    /// Concatenation along a constant axis.
    Cat {
        /// Axis.
        axis: u32,
    },
    /// Broadcast to the node's shape (numpy rules).
    Expand,
    /// `embedding(table: f[n, d...], ids: i32[r]) -> [r, d...]`, rows of the table, as f32 if it is quantised. ids must be `< n`.
    Embedding,
    /// `index_select(x: [.., n], index: i32[k]) -> [.., k]`: elements of the last axis in another order, `out[.., j] = x[.., index[j]]`.
    /// Indices must be `< n`.
    IndexSelect,
    /// `mm(a: [m, k], b) -> f32[m, n]`, b is `[n, k]` with `rhs_t` (weights), else `[k, n]`. Operand types may differ (floats and
    /// quantised); the sum is f32 or better over the exact products of the operands' values.
    Mm {
        /// Right operand is transposed.
        rhs_t: bool,
    },
    /// Reduction of an axis, kept with extent 1.
    Reduce {
        /// What.
        op: Reduce,
        /// Axis.
        axis: u32,
    },
    /// Softmax over the last axis.
    Softmax,
    /// `rms_norm(x: [.., d], w: [d]) -> [.., d]`: `x * rsqrt(mean(x^2) + eps) * w`. Source: HF `LlamaRMSNorm`.
    RmsNorm {
        /// Added under the root.
        eps: f64,
    },
    /// `layer_norm(x: [.., d], w: [d], b: [d])`: `(x - mean) * rsqrt(var + eps) * w + b`, biased variance.
    LayerNorm {
        /// Added under the root.
        eps: f64,
    },
    /// `rope(x: [t, h, d], cos: f32[t, r/2], sin: f32[t, r/2]) -> [t, h, d]`: the first `2 * cos.cols = r` elements of each head are
    /// rotated in pairs `(i, i + r/2)`, the rest is copied. Source: HF `apply_rotary_pos_emb` (rotate_half).
    Rope,
    /// `kv_append(k: [t, h, d], v: [t, h, d], slot: i32[t], kv_index: i32[t], order: state...) -> state`: row t's key and value are rounded
    /// to the state's type and written at `kv_index[t]` of `slot[t]`.
    KvAppend {
        /// Which cache.
        state: StateId,
    },
    /// `sdpa(q: [t, h, d], kv: state, slot: i32[t], kv_index: i32[t]) -> [t, h, d]` over the cache that `kv` names: softmax over the keys
    /// of the row's slot for which `mask` holds, of `score`, times the values. Keys exist at `0 .. n` where n is one more than the largest
    /// kv_index of the slot's rows in this step. A row that sees no key gives 0. Query head h reads kv head `h / (heads / kv_heads)`.
    /// Over a bf16 cache a kernel may round queries and weights to bf16, too, before they are multiplied (`Interp::rounding_attention`).
    Sdpa {
        /// Which cache (the same as the append's).
        state: StateId,
        /// f32 expression over `score`, `head`, `query`, `key`.
        score: AttnExpr,
        /// bool expression over `head`, `query`, `key`.
        mask: AttnExpr,
    },
    /// `pool(x: [t, d], slot: i32[t]) -> [s, d]`: one row per run.
    Pool(Pool),
    /// Call of a function with one output: its inputs are the operands, `params` and `states` replace the function's lists.
    Call {
        /// Callee.
        func: FuncId,
        /// Replacements, same types.
        params: Vec<ParamId>,
        /// Replacements, same types.
        states: Vec<StateId>,
    },
}

impl Unary {
    /// All, for parsers and tests.
    pub const ALL: [Unary; 14] = [
        Unary::Neg,
        Unary::Abs,
        Unary::Exp,
        Unary::Log,
        Unary::Sqrt,
        Unary::Rsqrt,
        Unary::Tanh,
        Unary::Erf,
        Unary::Sigmoid,
        Unary::Silu,
        Unary::Relu,
        Unary::Gelu,
        Unary::GeluTanh,
        Unary::Not,
    ];
    /// Name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Unary::Neg => "neg",
            Unary::Abs => "abs",
            Unary::Exp => "exp",
            Unary::Log => "log",
            Unary::Sqrt => "sqrt",
            Unary::Rsqrt => "rsqrt",
            Unary::Tanh => "tanh",
            Unary::Erf => "erf",
            Unary::Sigmoid => "sigmoid",
            Unary::Silu => "silu",
            Unary::Relu => "relu",
            Unary::Gelu => "gelu",
            Unary::GeluTanh => "gelu_tanh",
            Unary::Not => "not",
        }
    }
}

impl Binary {
    /// All, for parsers and tests.
    pub const ALL: [Binary; 8] =
        [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Minimum, Binary::Maximum, Binary::And, Binary::Or];
    /// Name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::Minimum => "minimum",
            Binary::Maximum => "maximum",
            Binary::And => "and",
            Binary::Or => "or",
        }
    }
}

impl Compare {
    /// All, for parsers and tests.
    pub const ALL: [Compare; 6] = [Compare::Lt, Compare::Le, Compare::Gt, Compare::Ge, Compare::Eq, Compare::Ne];
    /// Name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Compare::Lt => "lt",
            Compare::Le => "le",
            Compare::Gt => "gt",
            Compare::Ge => "ge",
            Compare::Eq => "eq",
            Compare::Ne => "ne",
        }
    }
}

/// What passes and the planner ask about an operation: how it relates elements, not which function it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpClass {
    /// Values that a function starts with.
    Source,
    /// Each element by arithmetic on the elements at its place; may be fused into the kernel of an operand.
    Elementwise,
    /// Booleans and what they choose, element by element; only read where used.
    Choice,
    /// Elements as they are, at other places that are known at build time.
    View,
    /// Elements as they are, at places that are data.
    Gather,
    /// Arithmetic along an axis or over the rows of a run.
    Reduction,
    /// Has kernels of its own, into which others are fused; others are not computed again for it.
    Anchor,
}

impl Op {
    /// Name in the text form and in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Input { .. } => "input",
            Op::Param(_) => "param",
            Op::Const(_) => "const",
            Op::Unary(u) => u.name(),
            Op::Binary(b) => b.name(),
            Op::Compare(c) => c.name(),
            Op::Where => "where",
            Op::Convert => "convert",
            Op::Reshape => "reshape",
            Op::Permute { .. } => "permute",
            Op::Slice { .. } => "slice",
            Op::Cat { .. } => "cat",
            Op::Expand => "expand",
            Op::Embedding => "embedding",
            Op::IndexSelect => "index_select",
            Op::Mm { .. } => "mm",
            Op::Reduce { op: Reduce::Sum, .. } => "sum",
            Op::Reduce { op: Reduce::Mean, .. } => "mean",
            Op::Reduce { op: Reduce::Amax, .. } => "amax",
            Op::Softmax => "softmax",
            Op::RmsNorm { .. } => "rms_norm",
            Op::LayerNorm { .. } => "layer_norm",
            Op::Rope => "rope",
            Op::KvAppend { .. } => "kv_append",
            Op::Sdpa { .. } => "sdpa",
            Op::Pool(Pool::Mean) => "pool_mean",
            Op::Pool(Pool::Cls) => "pool_cls",
            Op::Pool(Pool::Max) => "pool_max",
            Op::Pool(Pool::Last) => "pool_last",
            Op::Call { .. } => "call",
        }
    }
    /// Which function a call goes to, for what walks call chains.
    pub fn callee(&self) -> Option<FuncId> {
        match self {
            Op::Call { func, .. } => Some(*func),
            _ => None,
        }
    }
    /// Its class.
    pub fn class(&self) -> OpClass {
        match self {
            Op::Input { .. } | Op::Param(_) | Op::Const(_) => OpClass::Source,
            Op::Unary(_) | Op::Binary(_) | Op::Convert => OpClass::Elementwise,
            Op::Compare(_) | Op::Where => OpClass::Choice,
            Op::Reshape | Op::Permute { .. } | Op::Slice { .. } | Op::Cat { .. } | Op::Expand => OpClass::View,
            Op::Embedding | Op::IndexSelect => OpClass::Gather,
            Op::Reduce { .. } | Op::Softmax | Op::RmsNorm { .. } | Op::LayerNorm { .. } | Op::Rope | Op::Pool(_) => OpClass::Reduction,
            Op::Mm { .. } | Op::Sdpa { .. } | Op::KvAppend { .. } | Op::Call { .. } => OpClass::Anchor,
        }
    }

    /// True for ops without effects. Their results depend on operands and attributes only, those of `Sdpa` also on earlier writes of its state.
    pub fn is_pure(&self) -> bool {
        !matches!(self, Op::KvAppend { .. } | Op::Call { .. } | Op::Input { .. })
    }
}

/// Helpers to write attention expressions in architecture code.
impl AttnExpr {
    /// `score`
    pub fn score() -> AttnExpr {
        AttnExpr::Var(AttnVar::Score)
    }
    /// `score * factor`
    pub fn scaled(factor: f64) -> AttnExpr {
        AttnExpr::Binary(Binary::Mul, Box::new(AttnExpr::score()), Box::new(AttnExpr::Const(factor)))
    }
    /// `key <= query`
    pub fn causal() -> AttnExpr {
        let key = Box::new(AttnExpr::Var(AttnVar::Key));
        AttnExpr::Compare(Compare::Le, key, Box::new(AttnExpr::Var(AttnVar::Query)))
    }
    /// `key <= query & key > query - window`
    pub fn causal_window(window: u64) -> AttnExpr {
        let query = Box::new(AttnExpr::Var(AttnVar::Query));
        let lower = AttnExpr::Binary(Binary::Sub, query, Box::new(AttnExpr::Const(window as f64)));
        let above = AttnExpr::Compare(Compare::Gt, Box::new(AttnExpr::Var(AttnVar::Key)), Box::new(lower));
        AttnExpr::Binary(Binary::And, Box::new(AttnExpr::causal()), Box::new(above))
    }
}
