//! Lowering of graph values to scalar expressions: "element `idx` of value `v`", pulled through views and elementwise ops down to what lies
//! in memory. This is where vertical fusion happens: whatever is not given a buffer is computed where it is used.
//!
//! In: a [`Frame`] (function with the homes of its stored values) and a [`KernelBuilder`]. Out: an expression, or what has to be done
//! first: split the inner range (a concatenation or a rotation changes its formula there) or store a value (a reduction inside something
//! that varies).

use super::PlanError;
use super::frame::{Frame, fixed, linear};
use super::kernel::KernelBuilder;
use super::panels::{coded, panel_index};
use super::weights::Weights;
use rcompile_codegen::program::{BinaryOp, CmpOp, Coding, DType, Expr, ExprId, Layout, Place, ReduceOp, Table, UnaryOp};
use rcompile_graph as g;
use rcompile_graph::{Binary, Compare, Dim, Op, OpClass, ParamId, Pool, Reduce, Unary, ValueId};
use std::ops::Range;

/// Why an expression cannot be made yet.
#[derive(Debug)]
pub enum Stop {
    /// The inner range must be cut at this value of the inner variable.
    Split(i64),
    /// This value must be stored first.
    Store(ValueId),
    /// There is no plan.
    Failed(PlanError),
}

impl Stop {
    /// Has no kernel: a noun for the user.
    pub fn unsupported(what: impl Into<String>) -> Stop {
        Stop::Failed(PlanError::Unsupported(what.into()))
    }
}

impl From<PlanError> for Stop {
    fn from(error: PlanError) -> Stop {
        Stop::Failed(error)
    }
}

/// Result of lowering.
pub type Lowered = Result<ExprId, Stop>;

/// Expressions of a kernel from values of a function, and the weights that these read.
pub struct Lowering<'l, 'm, 'w> {
    /// The function, and where its stored values lie.
    pub frame: &'l Frame<'m>,
    /// The kernel.
    pub k: &'l mut KernelBuilder,
    /// The program's weights.
    pub weights: &'l mut Weights<'w>,
}

impl<'m, 'w> Lowering<'_, 'm, 'w> {
    /// Element `idx` of value `v`.
    pub fn at(&mut self, v: ValueId, idx: &[ExprId]) -> Lowered {
        if let Some(way) = self.k.acc.get(&v) {
            let way = *way;
            return Ok(self.k.exprs.add(Expr::Acc(way)));
        }
        let key = (v, idx.to_vec());
        if let Some(e) = self.k.memo.get(&key) {
            return Ok(*e);
        }
        let e = match self.frame.homes.get(&v) {
            Some(home) => {
                let (operand, index) = self.frame.address(self.k, &home.clone(), v, idx);
                self.k.load(operand.place, operand.dtype, index)
            }
            None => {
                let e = self.compute(v, idx)?;
                let node = self.frame.func.node(v);
                let rounds = match node.op.class() {
                    OpClass::Source => matches!(node.op, Op::Const(_)),
                    // A conversion rounds itself.
                    OpClass::Elementwise => node.op != Op::Convert,
                    class => class == OpClass::Reduction,
                };
                match node.ty.dtype {
                    g::DType::BF16 if rounds => self.k.exprs.add(Expr::Round(DType::Bf16, e)),
                    g::DType::F16 if rounds => self.k.exprs.add(Expr::Round(DType::F16, e)),
                    _ => e,
                }
            }
        };
        self.k.memo.insert(key, e);
        Ok(e)
    }

    fn compute(&mut self, v: ValueId, idx: &[ExprId]) -> Lowered {
        let node = self.frame.func.node(v);
        let input = |i: usize| node.inputs[i];
        let shape = |v: ValueId| &self.frame.func.ty(v).shape;
        match &node.op {
            Op::Input { .. } => Err(PlanError::Internal(format!("input {} is not stored", v.0)).into()),
            Op::Param(p) => self.param(*p, idx),
            Op::Const(value) if node.ty.dtype.is_float() => Ok(self.k.exprs.float(*value as f32)),
            Op::Const(value) => Ok(self.k.int(*value as i64)),
            Op::Unary(op) => {
                let x = self.at(input(0), idx)?;
                unary(self.k, *op, x)
            }
            Op::Binary(op) => {
                let a = self.broadcast(input(0), idx)?;
                let b = self.broadcast(input(1), idx)?;
                // Kernels divide addresses, which are not negative.
                let divides = *op == Binary::Div && node.ty.dtype.is_int();
                let least = |e: ExprId| self.k.bounds(e).map_or(i64::MIN, |(low, _)| low);
                if divides && (least(a) < 0 || least(b) <= 0) {
                    return Err(Stop::unsupported("division of integers that may be negative or zero"));
                }
                Ok(self.k.exprs.add(Expr::Binary(binary(*op), a, b)))
            }
            Op::Compare(op) => {
                let a = self.broadcast(input(0), idx)?;
                let b = self.broadcast(input(1), idx)?;
                Ok(self.k.exprs.add(Expr::Cmp(compare(*op), a, b)))
            }
            Op::Where => {
                let c = self.broadcast(input(0), idx)?;
                let a = self.broadcast(input(1), idx)?;
                let b = self.broadcast(input(2), idx)?;
                Ok(self.k.exprs.add(Expr::Select(c, a, b)))
            }
            Op::Convert => {
                let x = self.at(input(0), idx)?;
                convert(self.k, x, self.frame.func.ty(input(0)).dtype, node.ty.dtype)
            }
            Op::Reshape => {
                let (from, to) = (shape(input(0)), &node.ty.shape);
                let source = reshape_index(self.k, from, to, idx);
                self.at(input(0), &source)
            }
            Op::Permute { perm } => {
                let mut source = idx.to_vec();
                for (i, p) in perm.iter().enumerate() {
                    source[*p as usize] = idx[i];
                }
                self.at(input(0), &source)
            }
            Op::Slice { axis, start, .. } => {
                let mut source = idx.to_vec();
                let start = self.k.int(*start as i64);
                source[*axis as usize] = self.k.add(idx[*axis as usize], start);
                self.at(input(0), &source)
            }
            Op::Cat { axis } => self.cat(v, *axis as usize, idx),
            Op::Expand => self.broadcast(input(0), idx),
            Op::Embedding => {
                let row = self.at(input(1), &idx[..1])?;
                let mut source = vec![row];
                source.extend(&idx[1..]);
                self.at(input(0), &source)
            }
            Op::IndexSelect => {
                let mut source = idx.to_vec();
                let last = source.len() - 1;
                source[last] = self.at(input(1), &idx[last..])?;
                self.at(input(0), &source)
            }
            Op::Reduce { op, axis } => self.reduce(v, *op, *axis as usize, idx),
            Op::Softmax => self.softmax(v, idx),
            Op::RmsNorm { eps } => self.rms_norm(v, *eps, idx),
            Op::LayerNorm { eps } => self.layer_norm(v, *eps, idx),
            Op::Rope => self.rope(v, idx),
            Op::Pool(pool) => self.pool(v, *pool, idx),
            Op::Mm { .. } | Op::Sdpa { .. } | Op::Call { .. } => Err(Stop::Store(v)),
            Op::KvAppend { .. } => Err(Stop::unsupported("elements of a state")),
        }
    }

    fn softmax(&mut self, v: ValueId, idx: &[ExprId]) -> Lowered {
        let inputs = &self.frame.func.node(v).inputs;
        let last = idx.len() - 1;
        let n = width(&self.frame.func.ty(v).shape)?;
        let x = inputs[0];
        let max = self.row_reduce((v, 0), ReduceOp::Max, n, &idx[..last], |l, at| l.at(x, at))?;
        let exp = |k: &mut KernelBuilder, x: ExprId| {
            let d = k.exprs.add(Expr::Binary(BinaryOp::Sub, x, max));
            k.exprs.add(Expr::Unary(UnaryOp::Exp, d))
        };
        let sum = self.row_reduce((v, 1), ReduceOp::Sum, n, &idx[..last], |l, at| {
            let x = l.at(x, at)?;
            Ok(exp(l.k, x))
        })?;
        let x = self.at(x, idx)?;
        let e = exp(self.k, x);
        Ok(self.k.exprs.add(Expr::Binary(BinaryOp::Div, e, sum)))
    }

    fn rms_norm(&mut self, v: ValueId, eps: f64, idx: &[ExprId]) -> Lowered {
        let inputs = &self.frame.func.node(v).inputs;
        let n = width(&self.frame.func.ty(v).shape)?;
        let (lead, last) = (&idx[..idx.len() - 1], idx[idx.len() - 1]);
        let x = inputs[0];
        let sum = self.row_reduce((v, 0), ReduceOp::Sum, n, lead, |l, at| {
            let x = l.at(x, at)?;
            Ok(l.k.exprs.add(Expr::Binary(BinaryOp::Mul, x, x)))
        })?;
        let root = inverse_root(self.k, sum, n, eps);
        let x = self.at(x, idx)?;
        let w = self.at(inputs[1], &[last])?;
        let normed = self.k.exprs.add(Expr::Binary(BinaryOp::Mul, x, root));
        Ok(self.k.exprs.add(Expr::Binary(BinaryOp::Mul, normed, w)))
    }

    fn layer_norm(&mut self, v: ValueId, eps: f64, idx: &[ExprId]) -> Lowered {
        let inputs = &self.frame.func.node(v).inputs;
        let n = width(&self.frame.func.ty(v).shape)?;
        let (lead, last) = (&idx[..idx.len() - 1], idx[idx.len() - 1]);
        let x = inputs[0];
        let sum = self.row_reduce((v, 0), ReduceOp::Sum, n, lead, |l, at| l.at(x, at))?;
        let count = self.k.exprs.float(n as f32);
        let mean = self.k.exprs.add(Expr::Binary(BinaryOp::Div, sum, count));
        let centred = |k: &mut KernelBuilder, x: ExprId| k.exprs.add(Expr::Binary(BinaryOp::Sub, x, mean));
        let squares = self.row_reduce((v, 1), ReduceOp::Sum, n, lead, |l, at| {
            let x = l.at(x, at)?;
            let c = centred(l.k, x);
            Ok(l.k.exprs.add(Expr::Binary(BinaryOp::Mul, c, c)))
        })?;
        let root = inverse_root(self.k, squares, n, eps);
        let x = self.at(x, idx)?;
        let c = centred(self.k, x);
        let normed = self.k.exprs.add(Expr::Binary(BinaryOp::Mul, c, root));
        let w = self.at(inputs[1], &[last])?;
        let b = self.at(inputs[2], &[last])?;
        let scaled = self.k.exprs.add(Expr::Binary(BinaryOp::Mul, normed, w));
        Ok(self.k.exprs.add(Expr::Binary(BinaryOp::Add, scaled, b)))
    }

    fn broadcast(&mut self, v: ValueId, idx: &[ExprId]) -> Lowered {
        let shape = &self.frame.func.ty(v).shape;
        let skip = idx.len() - shape.len();
        let mut source = Vec::with_capacity(shape.len());
        for (d, i) in shape.iter().zip(&idx[skip..]) {
            source.push(if *d == Dim::Const(1) { self.k.int(0) } else { *i });
        }
        self.at(v, &source)
    }

    fn param(&mut self, p: ParamId, idx: &[ExprId]) -> Lowered {
        let ty = &self.frame.module.params[p.index()].ty;
        let layout = self.weights.lookup_layout(p);
        let dtype = self.weights.storage(ty.dtype)?;
        let weight = self.weights.get(&self.frame.params[&p], layout);
        let index = match layout {
            Layout::Plain => linear(self.k, &ty.shape, idx),
            Layout::Panels(panels) if panels.coding != Coding::Elements => {
                return Ok(coded(self.k, (weight, dtype), &panels, idx[0], idx[1]));
            }
            Layout::Panels(panels) => panel_index(self.k, &panels, dtype, idx[0], idx[1]),
        };
        Ok(self.k.load(Place::Weight(weight), dtype, index))
    }

    fn cat(&mut self, v: ValueId, axis: usize, idx: &[ExprId]) -> Lowered {
        let node = self.frame.func.node(v);
        let mut parts = Vec::new();
        let mut start = 0i64;
        for part in &node.inputs {
            let n = fixed(self.frame.func.ty(*part).shape[axis]);
            parts.push((*part, start, n));
            start += n;
        }
        let e = idx[axis];
        let at = |k: &mut KernelBuilder, start: i64| {
            let back = k.int(-start);
            k.add(e, back)
        };
        if let Some((low, high)) = self.k.bounds(e) {
            if let Some((part, start, _)) = parts.iter().find(|(_, s, n)| *s <= low && high < s + n) {
                let mut source = idx.to_vec();
                source[axis] = at(self.k, *start);
                return self.at(*part, &source);
            }
            if let Some(offset) = self.k.inner_offset(e)
                && let Some((_, start, n)) = parts.iter().find(|(_, s, n)| *s <= low && low < s + n)
            {
                return Err(Stop::Split(start + n - offset));
            }
        }
        // The index does not follow the inner variable: choose at run time, with every address inside its part.
        let mut value = None;
        for (part, start, n) in parts {
            let (zero, last) = (self.k.int(0), self.k.int(n - 1));
            let moved = at(self.k, start);
            let low = self.k.binary(BinaryOp::Max, moved, zero);
            let mut source = idx.to_vec();
            source[axis] = self.k.binary(BinaryOp::Min, low, last);
            let x = self.at(part, &source)?;
            value = Some(match value {
                None => x,
                Some(before) => {
                    let start = self.k.int(start);
                    let here = self.k.exprs.add(Expr::Cmp(CmpOp::Ge, e, start));
                    self.k.exprs.add(Expr::Select(here, x, before))
                }
            });
        }
        value.ok_or_else(|| Stop::unsupported("concatenation of nothing"))
    }

    fn rope(&mut self, v: ValueId, idx: &[ExprId]) -> Lowered {
        let node = self.frame.func.node(v);
        let half = fixed(self.frame.func.ty(node.inputs[1]).shape[1]);
        let d = idx[2];
        let side = |k: &KernelBuilder, edge: i64| match (k.bounds(d), k.inner_offset(d)) {
            (Some((_, high)), _) if high < edge => Ok(true),
            (Some((low, _)), _) if low >= edge => Ok(false),
            (_, Some(offset)) => Err(Stop::Split(edge - offset)),
            _ => Err(Stop::Store(v)),
        };
        let x = |l: &mut Self, shift: i64| {
            let shift = l.k.int(shift);
            let at = l.k.add(d, shift);
            l.at(node.inputs[0], &[idx[0], idx[1], at])
        };
        let table = |l: &mut Self, which: usize, shift: i64| {
            let shift = l.k.int(shift);
            let at = l.k.add(d, shift);
            l.at(node.inputs[which], &[idx[0], at])
        };
        if !side(self.k, 2 * half)? {
            return x(self, 0);
        }
        let first = side(self.k, half)?;
        let back = if first { 0 } else { -half };
        let (c, s) = (table(self, 1, back)?, table(self, 2, back)?);
        let (this, other) = (x(self, 0)?, x(self, if first { half } else { -half })?);
        let this = self.k.exprs.add(Expr::Binary(BinaryOp::Mul, this, c));
        let other = self.k.exprs.add(Expr::Binary(BinaryOp::Mul, other, s));
        Ok(self.k.exprs.add(Expr::Binary(if first { BinaryOp::Sub } else { BinaryOp::Add }, this, other)))
    }

    fn reduce(&mut self, v: ValueId, op: Reduce, axis: usize, idx: &[ExprId]) -> Lowered {
        let x = self.frame.func.node(v).inputs[0];
        let Dim::Const(n) = self.frame.func.ty(x).shape[axis] else {
            return Err(Stop::unsupported("reduction over rows"));
        };
        let kind = if op == Reduce::Amax { ReduceOp::Max } else { ReduceOp::Sum };
        let total = if axis + 1 == idx.len() {
            self.row_reduce((v, 0), kind, n, &idx[..axis], |l, at| l.at(x, at))?
        } else {
            let var = self.k.var((0, n as i64 - 1));
            let mut source = idx.to_vec();
            source[axis] = self.k.var_expr(var);
            let body = self.at(x, &source)?;
            let (begin, end) = (self.k.int(0), self.k.int(n as i64));
            self.k.exprs.add(Expr::Fold { op: kind, var, begin, end, body })
        };
        if op == Reduce::Mean {
            let n = self.k.exprs.float(n as f32);
            return Ok(self.k.exprs.add(Expr::Binary(BinaryOp::Div, total, n)));
        }
        Ok(total)
    }

    /// Reduction of a row of `n` elements as a stage of its own; `which` tells several of one value apart.
    pub(super) fn row_reduce(
        &mut self,
        (v, which): (ValueId, u32),
        op: ReduceOp,
        n: u64,
        lead: &[ExprId],
        element: impl Fn(&mut Lowering<'_, 'm, 'w>, &[ExprId]) -> Lowered,
    ) -> Lowered {
        if !self.k.may_reduce || !lead.iter().all(|e| self.k.is_outer(*e)) {
            return Err(Stop::Store(v));
        }
        let key = (v, which, lead.to_vec());
        if let Some(e) = self.k.reduced.get(&key) {
            return Ok(*e);
        }
        let var = self.k.var((0, n as i64 - 1));
        let mut at = lead.to_vec();
        at.push(self.k.var_expr(var));
        let mut total = None;
        let Lowering { frame, k, weights } = self;
        k.within_stage(|k| {
            in_pieces(n as u32, |range| {
                k.set_inner(var, &range);
                let value = element(&mut Lowering { frame, k, weights }, &at)?;
                let part = k.reduce(op, var, range, value);
                let join = if op == ReduceOp::Sum { BinaryOp::Add } else { BinaryOp::Max };
                total = Some(total.map_or(part, |t| k.exprs.add(Expr::Binary(join, t, part))));
                Ok(())
            })
        })?;
        let total = total.ok_or_else(|| Stop::unsupported("reduction of nothing"))?;
        self.k.reduced.insert(key, total);
        Ok(total)
    }

    fn pool(&mut self, v: ValueId, pool: Pool, idx: &[ExprId]) -> Lowered {
        let x = self.frame.func.node(v).inputs[0];
        if !self.frame.homes.contains_key(&x) {
            return Err(Stop::Store(x));
        }
        let (run, col) = (idx[0], idx[1]);
        let one = self.k.int(1);
        let next = self.k.add(run, one);
        let begin = self.k.load(Place::Table(Table::RunBegin), DType::I32, run);
        let end = self.k.load(Place::Table(Table::RunBegin), DType::I32, next);
        let fold = |l: &mut Self, op: ReduceOp| {
            let var = l.k.var((0, i64::from(i32::MAX)));
            let row = l.k.var_expr(var);
            let body = l.at(x, &[row, col])?;
            Ok(l.k.exprs.add(Expr::Fold { op, var, begin, end, body }))
        };
        match pool {
            Pool::Mean => {
                let sum = fold(self, ReduceOp::Sum)?;
                let n = self.k.exprs.add(Expr::Binary(BinaryOp::Sub, end, begin));
                let n = self.k.exprs.add(Expr::Unary(UnaryOp::IntToFloat, n));
                Ok(self.k.exprs.add(Expr::Binary(BinaryOp::Div, sum, n)))
            }
            Pool::Max => fold(self, ReduceOp::Max),
            // Runs are not empty; the clamps say so to the program's verifier.
            Pool::Cls => {
                let rows = match self.frame.func.ty(x).shape[0] {
                    Dim::Sym(s) => self.frame.module.symbols[s.index()].bound,
                    Dim::Const(n) => n,
                };
                let top = self.k.int(rows as i64 - 1);
                let first = self.k.binary(BinaryOp::Min, begin, top);
                self.at(x, &[first, col])
            }
            Pool::Last => {
                let (one, zero) = (self.k.int(1), self.k.int(0));
                let last = self.k.binary(BinaryOp::Sub, end, one);
                let last = self.k.binary(BinaryOp::Max, last, zero);
                self.at(x, &[last, col])
            }
        }
    }
}

/// Calls `make` for `0..n`, or for the pieces of it that [`Stop::Split`] asks for, in order.
pub fn in_pieces(n: u32, mut make: impl FnMut(Range<u32>) -> Result<(), Stop>) -> Result<(), Stop> {
    let (mut start, mut end) = (0, n);
    while start < n {
        match make(start..end) {
            Ok(()) => (start, end) = (end, n),
            Err(Stop::Split(edge)) if i64::from(start) < edge && edge < i64::from(end) => end = edge as u32,
            Err(Stop::Split(edge)) => return Err(PlanError::Internal(format!("no progress in splitting {start}..{end} at {edge}")).into()),
            Err(stop) => return Err(stop),
        }
    }
    Ok(())
}

/// Indices into `from` for indices into `to` of the same elements.
fn reshape_index(k: &mut KernelBuilder, from: &[Dim], to: &[Dim], idx: &[ExprId]) -> Vec<ExprId> {
    let same = from.iter().zip(to).take_while(|(a, b)| a == b).count();
    let mut rest = linear(k, &to[same..], &idx[same..]);
    let mut source = Vec::new();
    for (i, d) in from[same..].iter().enumerate().rev() {
        if i == 0 {
            source.push(rest);
        } else {
            let (outer, inner) = k.div_rem(rest, fixed(*d));
            source.push(inner);
            rest = outer;
        }
    }
    source.extend(idx[..same].iter().rev());
    source.reverse();
    source
}

fn width(shape: &[Dim]) -> Result<u64, Stop> {
    shape.last().and_then(|d| d.constant()).ok_or_else(|| Stop::unsupported("normalisation over rows"))
}

/// `1 / sqrt(sum / n + eps)`
fn inverse_root(k: &mut KernelBuilder, sum: ExprId, n: u64, eps: f64) -> ExprId {
    let n = k.exprs.float(n as f32);
    let mean = k.exprs.add(Expr::Binary(BinaryOp::Div, sum, n));
    let eps = k.exprs.float(eps as f32);
    let shifted = k.exprs.add(Expr::Binary(BinaryOp::Add, mean, eps));
    k.exprs.add(Expr::Unary(UnaryOp::Rsqrt, shifted))
}

/// `x` of type `from` as `to`.
fn convert(k: &mut KernelBuilder, x: ExprId, from: g::DType, to: g::DType) -> Lowered {
    match (from, to) {
        (f, g::DType::F32) if f.is_float() => Ok(x),
        (f, g::DType::BF16) if f.is_float() => Ok(k.exprs.add(Expr::Round(DType::Bf16, x))),
        (f, g::DType::F16) if f.is_float() => Ok(k.exprs.add(Expr::Round(DType::F16, x))),
        (f, g::DType::F32) if f.is_int() => Ok(k.exprs.add(Expr::Unary(UnaryOp::IntToFloat, x))),
        // Integers are computed in 64 bits: what a narrower type would cut off is still there.
        (f, t) if f.is_int() && t.is_int() && (f == t || f.size() < t.size()) => Ok(x),
        (f, t) => Err(Stop::unsupported(format!("conversion from {f} to {t}"))),
    }
}

fn unary(k: &mut KernelBuilder, op: Unary, x: ExprId) -> Lowered {
    let apply = |k: &mut KernelBuilder, op: UnaryOp, x: ExprId| k.exprs.add(Expr::Unary(op, x));
    let mul = |k: &mut KernelBuilder, a: ExprId, b: ExprId| k.exprs.add(Expr::Binary(BinaryOp::Mul, a, b));
    Ok(match op {
        Unary::Neg => apply(k, UnaryOp::Neg, x),
        Unary::Abs => apply(k, UnaryOp::Abs, x),
        Unary::Exp => apply(k, UnaryOp::Exp, x),
        Unary::Sqrt => apply(k, UnaryOp::Sqrt, x),
        Unary::Rsqrt => apply(k, UnaryOp::Rsqrt, x),
        Unary::Tanh => apply(k, UnaryOp::Tanh, x),
        Unary::Erf => apply(k, UnaryOp::Erf, x),
        Unary::Sigmoid => apply(k, UnaryOp::Sigmoid, x),
        Unary::Not => apply(k, UnaryOp::Not, x),
        Unary::Log => return Err(Stop::unsupported("log")),
        Unary::Silu => {
            let s = apply(k, UnaryOp::Sigmoid, x);
            mul(k, x, s)
        }
        Unary::Relu => {
            let zero = k.exprs.float(0.0);
            k.exprs.add(Expr::Binary(BinaryOp::Max, x, zero))
        }
        Unary::Gelu => apply(k, UnaryOp::Gelu, x),
        Unary::GeluTanh => apply(k, UnaryOp::GeluTanh, x),
    })
}

/// The program's binary op.
pub fn binary(op: Binary) -> BinaryOp {
    match op {
        Binary::Add => BinaryOp::Add,
        Binary::Sub => BinaryOp::Sub,
        Binary::Mul => BinaryOp::Mul,
        Binary::Div => BinaryOp::Div,
        Binary::Minimum => BinaryOp::Min,
        Binary::Maximum => BinaryOp::Max,
        Binary::And => BinaryOp::And,
        Binary::Or => BinaryOp::Or,
    }
}

/// The program's comparison.
pub fn compare(op: Compare) -> CmpOp {
    match op {
        Compare::Lt => CmpOp::Lt,
        Compare::Le => CmpOp::Le,
        Compare::Gt => CmpOp::Gt,
        Compare::Ge => CmpOp::Ge,
        Compare::Eq => CmpOp::Eq,
        Compare::Ne => CmpOp::Ne,
    }
}
