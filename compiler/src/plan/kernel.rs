//! A kernel under construction: operands, expressions, known ranges of variables, and the stages that reductions add.
//!
//! Index arithmetic is simplified with the ranges of variables, so that `(head * 64 + d) / 64` becomes `head` and the address of an inner
//! loop stays affine; without that codegen would fall back to one scalar address per lane.

use rcompile_codegen::program::{BinaryOp, Expr, ExprId, Exprs, Operand, OperandId, Place, ReduceOp, ScalarId, Stage, StageKind, VarId};
use rcompile_graph::ValueId;
use std::collections::HashMap;
use std::ops::Range;

/// See the module's doc.
#[derive(Default)]
pub struct KernelBuilder {
    /// Memory operands.
    pub operands: Vec<Operand>,
    /// Expressions.
    pub exprs: Exprs,
    /// Reductions so far; they run before the stage under construction.
    pub stages: Vec<Stage>,
    /// Inclusive range of each variable.
    ranges: Vec<(i64, i64)>,
    /// Outer variables: the only ones that a reduction may depend on.
    outer: Vec<VarId>,
    /// The inner variable of the stage under construction: splits are in terms of it.
    pub inner: Option<VarId>,
    scalars: u32,
    /// Reductions that exist: (value, which, leading indices) -> result.
    pub reduced: HashMap<(ValueId, u32, Vec<ExprId>), ExprId>,
    /// Values at indices that were lowered already, for the current inner range.
    pub memo: HashMap<(ValueId, Vec<ExprId>), ExprId>,
    /// Matmul epilogues: values that are accumulators.
    pub acc: HashMap<ValueId, u32>,
    /// False in matmul epilogues: no place for reductions.
    pub may_reduce: bool,
}

impl KernelBuilder {
    /// For loop nests, which have stages for reductions.
    pub fn with_reductions() -> KernelBuilder {
        KernelBuilder { may_reduce: true, ..KernelBuilder::default() }
    }
    /// New variable with its inclusive range.
    pub fn var(&mut self, range: (i64, i64)) -> VarId {
        self.ranges.push(range);
        VarId(self.ranges.len() as u32 - 1)
    }
    /// New outer variable.
    pub fn outer_var(&mut self, range: (i64, i64)) -> VarId {
        let var = self.var(range);
        self.outer.push(var);
        var
    }
    /// Narrows the range of the inner variable; forgets what was lowered for another range.
    pub fn set_inner(&mut self, var: VarId, range: &Range<u32>) {
        self.inner = Some(var);
        self.ranges[var.index()] = (i64::from(range.start), i64::from(range.end) - 1);
        self.memo.clear();
    }
    /// Makes what belongs to a stage of its own in the middle of another: the other's inner variable, and what was lowered for its range,
    /// are there again afterwards, also where nothing came of it.
    pub fn within_stage<T>(&mut self, make: impl FnOnce(&mut KernelBuilder) -> T) -> T {
        let (inner, memo) = (self.inner, std::mem::take(&mut self.memo));
        let made = make(self);
        (self.inner, self.memo) = (inner, memo);
        made
    }
    /// Variable as expression.
    pub fn var_expr(&mut self, var: VarId) -> ExprId {
        self.exprs.add(Expr::Var(var))
    }
    /// The operand, added if new.
    pub fn operand(&mut self, operand: Operand) -> OperandId {
        if let Some(i) = self.operands.iter().position(|o| *o == operand) {
            return OperandId(i as u32);
        }
        self.operands.push(operand);
        OperandId(self.operands.len() as u32 - 1)
    }
    /// Element of an operand.
    pub fn load(&mut self, place: Place, dtype: rcompile_codegen::program::DType, index: ExprId) -> ExprId {
        let operand = self.operand(Operand { place, dtype });
        self.exprs.add(Expr::Load(operand, index))
    }
    /// i64 constant.
    pub fn int(&mut self, value: i64) -> ExprId {
        self.exprs.int(value)
    }
    /// Binary node, folded.
    pub fn binary(&mut self, op: BinaryOp, a: ExprId, b: ExprId) -> ExprId {
        self.exprs.binary(op, a, b)
    }
    /// `a + b`
    pub fn add(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.binary(BinaryOp::Add, a, b)
    }
    /// `a * constant`, distributed over sums so that terms stay visible.
    pub fn mul_int(&mut self, a: ExprId, factor: i64) -> ExprId {
        if let Expr::Binary(BinaryOp::Add, x, y) = self.exprs.get(a) {
            let (x, y) = (self.mul_int(x, factor), self.mul_int(y, factor));
            return self.add(x, y);
        }
        if let Expr::Binary(BinaryOp::Mul, x, c) = self.exprs.get(a)
            && let Expr::Int(c) = self.exprs.get(c)
        {
            let f = self.int(c * factor);
            return self.binary(BinaryOp::Mul, x, f);
        }
        let f = self.int(factor);
        self.binary(BinaryOp::Mul, a, f)
    }
    /// Inclusive bounds of an integer expression, if known.
    pub fn bounds(&self, e: ExprId) -> Option<(i64, i64)> {
        match self.exprs.get(e) {
            Expr::Int(v) => Some((v, v)),
            Expr::Var(v) => Some(self.ranges[v.index()]),
            Expr::Binary(op, a, b) => {
                let ((al, ah), (bl, bh)) = (self.bounds(a)?, self.bounds(b)?);
                match op {
                    BinaryOp::Add => Some((al + bl, ah + bh)),
                    BinaryOp::Sub => Some((al - bh, ah - bl)),
                    BinaryOp::Mul if al >= 0 && bl >= 0 => Some((al * bl, ah * bh)),
                    BinaryOp::Div if al >= 0 && bl > 0 => Some((al / bh, ah / bl)),
                    BinaryOp::Rem if al >= 0 && bl > 0 => Some((0, ah.min(bh - 1))),
                    BinaryOp::Min => Some((al.min(bl), ah.min(bh))),
                    BinaryOp::Max => Some((al.max(bl), ah.max(bh))),
                    _ => None,
                }
            }
            _ => None,
        }
    }
    /// Splits `e` into terms divisible by `n` (divided) and the rest.
    fn split_terms(&mut self, e: ExprId, n: i64, quotient: &mut Vec<ExprId>, rest: &mut Vec<ExprId>) {
        match self.exprs.get(e) {
            Expr::Binary(BinaryOp::Add, a, b) => {
                self.split_terms(a, n, quotient, rest);
                self.split_terms(b, n, quotient, rest);
            }
            Expr::Int(v) => {
                let (q, r) = (self.int(v.div_euclid(n)), self.int(v.rem_euclid(n)));
                quotient.push(q);
                rest.push(r);
            }
            Expr::Binary(BinaryOp::Mul, x, c) => match self.exprs.get(c) {
                Expr::Int(c) if c % n == 0 => {
                    let q = self.mul_int(x, c / n);
                    quotient.push(q);
                }
                _ => rest.push(e),
            },
            _ => rest.push(e),
        }
    }
    /// `(e / n, e % n)` for `e >= 0`.
    pub fn div_rem(&mut self, e: ExprId, n: i64) -> (ExprId, ExprId) {
        if n == 1 {
            let zero = self.int(0);
            return (e, zero);
        }
        let (mut quotient, mut rest) = (Vec::new(), Vec::new());
        self.split_terms(e, n, &mut quotient, &mut rest);
        let zero = self.int(0);
        let q = quotient.into_iter().fold(zero, |s, t| self.add(s, t));
        let r = rest.into_iter().fold(zero, |s, t| self.add(s, t));
        match self.bounds(r) {
            Some((low, high)) if low >= 0 && high < n => (q, r),
            _ => {
                let n = self.int(n);
                let carry = self.binary(BinaryOp::Div, r, n);
                let rem = self.binary(BinaryOp::Rem, r, n);
                (self.add(q, carry), rem)
            }
        }
    }
    /// Offset `c` if `e` is `inner + c`.
    pub fn inner_offset(&self, e: ExprId) -> Option<i64> {
        let is_inner = |e: ExprId| matches!(self.exprs.get(e), Expr::Var(v) if Some(v) == self.inner);
        match self.exprs.get(e) {
            _ if is_inner(e) => Some(0),
            Expr::Binary(BinaryOp::Add, a, b) => match (self.exprs.get(a), self.exprs.get(b)) {
                (_, Expr::Int(c)) if is_inner(a) => Some(c),
                (Expr::Int(c), _) if is_inner(b) => Some(c),
                _ => None,
            },
            _ => None,
        }
    }
    /// True if the expression depends on outer variables only.
    pub fn is_outer(&self, e: ExprId) -> bool {
        match self.exprs.get(e) {
            Expr::Var(v) => self.outer.contains(&v),
            Expr::Load(_, index) => self.is_outer(index),
            Expr::Unary(_, a) | Expr::Round(_, a) => self.is_outer(a),
            Expr::Binary(_, a, b) | Expr::Cmp(_, a, b) => self.is_outer(a) && self.is_outer(b),
            Expr::Select(a, b, c) => self.is_outer(a) && self.is_outer(b) && self.is_outer(c),
            Expr::Fold { .. } | Expr::Acc(_) | Expr::Score => false,
            Expr::Int(_) | Expr::Float(_) | Expr::Scalar(_) | Expr::PagesPerSlot => true,
        }
    }
    /// Adds a reduction stage over `range` of `var`.
    pub fn reduce(&mut self, op: ReduceOp, var: VarId, range: Range<u32>, value: ExprId) -> ExprId {
        let into = ScalarId(self.scalars);
        self.scalars += 1;
        self.stages.push(Stage { var, range, kind: StageKind::Reduce { op, value, into } });
        self.exprs.add(Expr::Scalar(into))
    }
}

/// Value of an integer expression without loads, given the variables.
pub fn evaluate(exprs: &Exprs, e: ExprId, vars: &dyn Fn(VarId) -> i64) -> Option<i64> {
    match exprs.get(e) {
        Expr::Int(v) => Some(v),
        Expr::Var(v) => Some(vars(v)),
        Expr::Binary(op, a, b) => {
            let (a, b) = (evaluate(exprs, a, vars)?, evaluate(exprs, b, vars)?);
            match op {
                BinaryOp::Add => Some(a + b),
                BinaryOp::Sub => Some(a - b),
                BinaryOp::Mul => Some(a * b),
                BinaryOp::Div if b != 0 => Some(a / b),
                BinaryOp::Rem if b != 0 => Some(a % b),
                BinaryOp::Min => Some(a.min(b)),
                BinaryOp::Max => Some(a.max(b)),
                _ => None,
            }
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also where making another stage fails.
    #[test]
    fn a_stage_goes_on_after_another() {
        let mut k = KernelBuilder::with_reductions();
        let (var, other) = (k.var((0, 7)), k.var((0, 7)));
        k.set_inner(var, &(2..5));
        let (key, e) = ((ValueId(0), vec![]), k.var_expr(var));
        k.memo.insert(key.clone(), e);
        for expected in [Ok(()), Err(())] {
            let made = k.within_stage(|k| {
                k.set_inner(other, &(0..8));
                assert!(k.memo.is_empty());
                let x = k.var_expr(other);
                k.memo.insert((ValueId(1), vec![]), x);
                expected
            });
            assert_eq!(made, expected);
            assert_eq!((k.inner, k.bounds(e), k.memo.len(), k.memo.get(&key)), (Some(var), Some((2, 4)), 1, Some(&e)));
        }
    }

    /// `e / n` and `e % n` in pieces are those of the whole for every `e >= 0`, also where a piece is negative: a slice of a concatenation
    /// subtracts where the part begins.
    #[test]
    fn division_in_pieces() {
        for offset in [-192, -70, -64, -1, 0, 1, 64, 70] {
            let mut k = KernelBuilder::default();
            let (row, column) = (k.outer_var((4, 8)), k.outer_var((0, 63)));
            let (rows, columns) = (k.var_expr(row), k.var_expr(column));
            let (rows, offset_expr) = (k.mul_int(rows, 64), k.int(offset));
            let sum = k.add(rows, columns);
            let whole = k.add(sum, offset_expr);
            let (quotient, rest) = k.div_rem(whole, 64);
            for (r, c) in (4..=8).flat_map(|r| (0..64).map(move |c| (r, c))) {
                let value = |e| evaluate(&k.exprs, e, &|v| if v == row { r } else { c });
                let e = 64 * r + c + offset;
                assert_eq!((value(quotient), value(rest)), (Some(e / 64), Some(e % 64)), "{r} * 64 + {c} + {offset}");
            }
        }
    }
}
