//! Scalar expressions of a kernel: addresses, values, masks.
//!
//! Evaluated for the neighbours of a variable by [`crate::expr`].

use super::{DType, ExprId, OperandId, ScalarId, VarId};

/// Expressions of one kernel, hash-consed, operands before users.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exprs {
    nodes: Vec<Expr>,
}

/// A scalar expression: i64, f32 or bool. The vector generator evaluates it for a vector of neighbours of the inner variable.
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

/// f32 functions. `Exp`, `Tanh`, `Erf`, `Gelu`, `GeluTanh` and `Sigmoid` are polynomials of our own; their errors stand at the functions of
/// [`math`](crate::math). `Gelu` and `GeluTanh` right below a [`Expr::Round`] to bf16 are as exact as that wants.
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
    /// The same with tanh, see [`math::gelu_tanh`](crate::math::gelu_tanh)
    GeluTanh,
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
