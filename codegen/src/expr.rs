//! Evaluation of [`Exprs`] for some neighbours of one variable at a time.
//!
//! A [`Scope`] has what a kernel resolves once (operand addresses, per-layer constants) and the values of outer variables and scalars. An
//! [`Eval`] evaluates expressions at a [`Point`]: `lanes` neighbours of the point's variable, of which the first `active` exist.
//!
//! Sub-expressions that do not depend on the point are evaluated once as scalars. Integers that do are kept as `base + constant per
//! lane` for as long as that can be shown (sums, products with constants, `/` and `%` where the lanes of one vector stay within one
//! quotient, which follows from what is known to divide `base`), so that an index with stride 1 becomes a vector access, equal offsets a
//! broadcast, and only the rest per-lane scalar accesses. Lanes beyond `active` touch no memory.

mod facts;

pub use self::facts::{Type, below, children, loads_by_row_and_col, types, variables};

use self::facts::free_vars;
use crate::llvm::builder::{Cmp, Elem, Fb, Ty, Value, storage};
use crate::math;
use crate::program::{BinaryOp, CmpOp, DType, Expr, ExprId, Exprs, Operand, OperandId, ReduceOp, ScalarId, Store, UnaryOp, VarId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Greatest common divisor.
pub(crate) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// What a kernel resolves once for its expressions, and the scalars that they may use.
#[derive(Clone)]
pub struct Scope<'a, 'c> {
    /// The expressions.
    pub exprs: &'a Exprs,
    /// Memory operands.
    pub operands: &'a [Operand],
    /// Their base addresses.
    pub bases: Vec<Value<'c>>,
    /// `ctx.pages_per_slot` (i64).
    pub pages_per_slot: Value<'c>,
    /// Variables outside the point (i64) and a number that divides each (1: nothing known, 0: is zero).
    pub vars: HashMap<VarId, (Value<'c>, u64)>,
    /// Results of reductions (f32).
    pub scalars: HashMap<ScalarId, Value<'c>>,
}

impl<'c> Scope<'_, 'c> {
    /// Sets an outer variable of which nothing else is known.
    pub fn set(&mut self, var: VarId, value: Value<'c>) {
        self.vars.insert(var, (value, 1));
    }
}

/// Where expressions are evaluated: `lanes` neighbours from `first` on.
#[derive(Clone)]
pub struct Point<'c> {
    /// The variable that differs by lane (none: everything is uniform, `lanes` is 1).
    pub var: Option<VarId>,
    /// Its value in lane 0 (i64).
    pub first: Value<'c>,
    /// A number that divides `first` (0: `first` is zero).
    pub divisor: u64,
    /// Lanes.
    pub lanes: u32,
    /// Lanes that exist: `1 ..= lanes`.
    pub active: u32,
    /// Values of `Expr::Acc` by way (f32 vectors).
    pub acc: Vec<Value<'c>>,
    /// Value of `Expr::Score` (f32 vector).
    pub score: Option<Value<'c>>,
}

/// Value of an expression.
#[derive(Clone, Debug)]
pub enum Val<'c> {
    /// The same in all lanes: a scalar; for integers with a number that divides it.
    Uniform(Value<'c>, u64),
    /// i64 `base + offsets[lane]`, with a number that divides `base`. Offsets are not negative.
    Offsets(Value<'c>, u64, Vec<i64>),
    /// i64 per active lane.
    Each(Vec<Value<'c>>),
    /// f32 or i1 vector.
    Lanes(Value<'c>),
}

/// Evaluator at one point.
pub struct Eval<'s, 'm, 'c> {
    fb: &'s Fb<'m, 'c>,
    scope: &'s Scope<'s, 'c>,
    point: Point<'c>,
    /// See [`free_vars`].
    free: Rc<Vec<(Vec<VarId>, bool)>>,
    /// Values of nodes that dominate the current position.
    memo: RefCell<HashMap<ExprId, Val<'c>>>,
    /// Fold variables in scope.
    bound: RefCell<HashMap<VarId, Value<'c>>>,
}

impl<'s, 'm, 'c> Eval<'s, 'm, 'c> {
    /// An evaluator that emits at the builder's position.
    pub fn new(fb: &'s Fb<'m, 'c>, scope: &'s Scope<'s, 'c>, point: Point<'c>) -> Self {
        let free = Rc::new(free_vars(scope.exprs));
        Eval { fb, scope, point, free, memo: RefCell::default(), bound: RefCell::default() }
    }

    /// Depends on the point?
    fn varies(&self, id: ExprId) -> bool {
        let (free, input) = &self.free[id.index()];
        *input || self.point.var.is_some_and(|v| free.contains(&v))
    }

    /// Same kernel, another point, keeping what was evaluated with [`Eval::hoist`].
    pub fn at(&self, point: Point<'c>) -> Self {
        assert_eq!(point.var, self.point.var);
        let memo = self.memo.borrow().iter().filter(|(id, _)| !self.varies(**id)).map(|(k, v)| (*k, v.clone())).collect();
        Eval { fb: self.fb, scope: self.scope, point, free: self.free.clone(), memo: RefCell::new(memo), bound: RefCell::default() }
    }

    /// Evaluates here what does not depend on the point, below `roots`: for use before a loop over points.
    pub fn hoist(&self, roots: &[ExprId]) {
        self.hoist_where(roots, |id| self.varies(id));
    }
    fn hoist_where(&self, roots: &[ExprId], not: impl Fn(ExprId) -> bool) {
        let mut seen = vec![false; self.free.len()];
        let mut stack: Vec<ExprId> = roots.iter().rev().copied().collect();
        while let Some(id) = stack.pop() {
            if std::mem::replace(&mut seen[id.index()], true) {
                continue;
            }
            // A variable of a fold around it that is not being evaluated now has no value yet.
            let closed = self.free[id.index()]
                .0
                .iter()
                .all(|v| self.point.var == Some(*v) || self.scope.vars.contains_key(v) || self.bound.borrow().contains_key(v));
            if closed && !not(id) {
                self.eval(id);
            } else {
                stack.extend(children(&self.scope.exprs.get(id)).iter().rev());
            }
        }
    }

    /// f32 vector of `lanes`.
    pub fn float(&self, id: ExprId) -> Value<'c> {
        self.lanes(&self.eval(id))
    }
    /// i1 vector of `lanes`.
    pub fn cond(&self, id: ExprId) -> Value<'c> {
        self.lanes(&self.eval(id))
    }
    /// i64 scalar; the expression must not depend on the point.
    pub fn int(&self, id: ExprId) -> Value<'c> {
        match self.eval(id) {
            Val::Uniform(v, _) => v,
            other => panic!("expression {} is not uniform: {other:?}", id.0),
        }
    }
    /// Address of an operand's element; the index must not depend on the point, or the point has one lane.
    pub fn address(&self, operand: OperandId, index: ExprId) -> Value<'c> {
        let operand = operand.index();
        self.fb.index(self.scope.bases[operand], self.int(index), self.scope.operands[operand].dtype.size())
    }
    /// Stores values to their operands for all active lanes; everything is loaded before the first store.
    pub fn store(&self, stores: &[Store]) {
        let value = |s: &Store| match self.scope.exprs.get(s.value) {
            // The store rounds, too.
            Expr::Round(dtype, exact) if dtype == self.scope.operands[s.operand.index()].dtype => self.before_rounding(dtype, exact),
            _ => self.eval(s.value),
        };
        let evaluated: Vec<_> = stores.iter().map(|s| (s.operand, self.eval(s.index), self.lanes(&value(s)))).collect();
        for (operand, index, value) in evaluated {
            self.store_value(operand, &index, value);
        }
    }

    fn lanes(&self, val: &Val<'c>) -> Value<'c> {
        let n = self.point.lanes;
        match val {
            Val::Uniform(v, _) => self.fb.splat(*v, n),
            Val::Lanes(v) => *v,
            Val::Offsets(base, _, offsets) => self.fb.add(self.fb.splat(*base, n), self.fb.int_vec(Elem::I64, offsets)),
            Val::Each(each) => {
                let mut all = each.clone();
                all.resize(n as usize, self.fb.int(0));
                self.fb.gather_lanes(&all)
            }
        }
    }
    fn each(&self, val: &Val<'c>) -> Vec<Value<'c>> {
        let n = self.point.active as usize;
        match val {
            Val::Uniform(v, _) => vec![*v; n],
            Val::Offsets(base, _, offsets) => offsets[..n].iter().map(|&o| self.plus(*base, o)).collect(),
            Val::Each(each) => each.clone(),
            Val::Lanes(v) => (0..n as u32).map(|i| self.fb.extract(*v, i)).collect(),
        }
    }
    fn plus(&self, base: Value<'c>, offset: i64) -> Value<'c> {
        if offset == 0 { base } else { self.fb.add_int(base, offset) }
    }

    /// Value of a node.
    pub fn eval(&self, id: ExprId) -> Val<'c> {
        if let Some(v) = self.memo.borrow().get(&id) {
            return v.clone();
        }
        let val = self.compute(id);
        self.memo.borrow_mut().insert(id, val.clone());
        val
    }

    /// Value of a node for a use that rounds it to `dtype`.
    fn before_rounding(&self, dtype: DType, id: ExprId) -> Val<'c> {
        let (f, a): (fn(&Fb<'_, 'c>, Value<'c>) -> Value<'c>, _) = match (dtype, self.scope.exprs.get(id)) {
            (DType::Bf16, Expr::Unary(UnaryOp::Gelu, a)) => (math::gelu_for_bf16, a),
            (DType::Bf16, Expr::Unary(UnaryOp::GeluTanh, a)) => (math::gelu_tanh_for_bf16, a),
            _ => return self.eval(id),
        };
        match self.eval(a) {
            Val::Uniform(v, _) => Val::Uniform(f(self.fb, v), 1),
            other => Val::Lanes(f(self.fb, self.lanes(&other))),
        }
    }

    fn compute(&self, id: ExprId) -> Val<'c> {
        let fb = self.fb;
        let uniform = |v: Value<'c>| Val::Uniform(v, 1);
        match self.scope.exprs.get(id) {
            Expr::Int(v) => Val::Uniform(fb.int(v), v.unsigned_abs()),
            Expr::Float(v) => uniform(fb.f32(v)),
            Expr::Var(var) => {
                if Some(var) == self.point.var {
                    if self.point.lanes == 1 {
                        return Val::Uniform(self.point.first, self.point.divisor);
                    }
                    // Lanes that do not exist repeat the last one that does, so that no sum over them leaves the valid range.
                    let last = i64::from(self.point.active) - 1;
                    let offsets = (0..i64::from(self.point.lanes)).map(|i| i.min(last)).collect();
                    return Val::Offsets(self.point.first, self.point.divisor, offsets);
                }
                if let Some(v) = self.bound.borrow().get(&var) {
                    return uniform(*v);
                }
                let (v, divisor) = *self.scope.vars.get(&var).unwrap_or_else(|| panic!("variable {} has no value", var.0));
                Val::Uniform(v, divisor)
            }
            Expr::Scalar(s) => uniform(*self.scope.scalars.get(&s).unwrap_or_else(|| panic!("scalar {} has no value", s.0))),
            Expr::PagesPerSlot => uniform(self.scope.pages_per_slot),
            Expr::Acc(way) => Val::Lanes(self.point.acc[way as usize]),
            Expr::Score => Val::Lanes(self.point.score.expect("score outside attention")),
            Expr::Load(operand, index) => {
                let index = self.eval(index);
                self.load(operand.index(), &index)
            }
            Expr::Unary(op, a) => match self.eval(a) {
                Val::Uniform(v, _) => uniform(self.unary(op, v)),
                other => Val::Lanes(self.unary(op, self.lanes(&other))),
            },
            Expr::Round(dtype, a) => match self.before_rounding(dtype, a) {
                Val::Uniform(v, _) => uniform(fb.round(dtype, v)),
                other => Val::Lanes(fb.round(dtype, self.lanes(&other))),
            },
            Expr::Binary(op, a, b) => self.binary(op, self.eval(a), self.eval(b)),
            Expr::Cmp(op, a, b) => self.compare(op, self.eval(a), self.eval(b)),
            Expr::Select(c, a, b) => self.select(self.eval(c), self.eval(a), self.eval(b)),
            Expr::Fold { op, var, begin, end, body } => self.fold(id, op, var, begin, end, body),
        }
    }

    fn unary(&self, op: UnaryOp, v: Value<'c>) -> Value<'c> {
        let fb = self.fb;
        match op {
            UnaryOp::Neg => fb.neg(v),
            UnaryOp::Abs => fb.abs(v),
            UnaryOp::Exp => math::exp(fb, v),
            UnaryOp::Tanh => math::tanh(fb, v),
            UnaryOp::Erf => math::erf(fb, v),
            UnaryOp::Gelu => math::gelu(fb, v),
            UnaryOp::GeluTanh => math::gelu_tanh(fb, v),
            UnaryOp::Sigmoid => math::sigmoid(fb, v),
            UnaryOp::Sqrt => fb.sqrt(v),
            UnaryOp::Rsqrt => fb.div(fb.f32s(1.0, v.lanes()), fb.sqrt(v)),
            // Positions and counts fit in 32 bits; vectors of i64 convert badly before AVX-512.
            UnaryOp::IntToFloat => fb.int_to_float(fb.trunc(v, Elem::I32)),
            UnaryOp::Not => fb.not(v),
        }
    }

    fn arithmetic(&self, op: BinaryOp, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        let fb = self.fb;
        let float = a.ty().elem == Elem::F32;
        match op {
            BinaryOp::Add => fb.add(a, b),
            BinaryOp::Sub => fb.sub(a, b),
            BinaryOp::Mul => fb.mul(a, b),
            BinaryOp::Div => fb.div(a, b),
            BinaryOp::Rem => fb.rem(a, b),
            BinaryOp::Min if float => fb.minimum(a, b),
            BinaryOp::Max if float => fb.maximum(a, b),
            BinaryOp::Min => fb.min(a, b),
            BinaryOp::Max => fb.max(a, b),
            BinaryOp::And => fb.and(a, b),
            BinaryOp::Or => fb.or(a, b),
        }
    }

    fn binary(&self, op: BinaryOp, a: Val<'c>, b: Val<'c>) -> Val<'c> {
        use BinaryOp::{Add, Div, Mul, Rem, Sub};
        let fb = self.fb;
        if let (Val::Uniform(x, dx), Val::Uniform(y, dy)) = (&a, &b) {
            let divisor = match op {
                Add | Sub => gcd(*dx, *dy),
                Mul => dx.saturating_mul(*dy),
                // dy is the value itself when b is a constant, else at least a divisor of it.
                Rem => gcd(*dx, *dy),
                Div => match constant(*y) {
                    Some(c) if c > 0 && dx.is_multiple_of(c as u64) => dx / c as u64,
                    _ => 1,
                },
                _ => 1,
            };
            return Val::Uniform(self.arithmetic(op, *x, *y), divisor);
        }
        let is_int = |v: &Val| match v {
            Val::Uniform(v, _) => v.ty().elem == Elem::I64,
            Val::Offsets(..) | Val::Each(_) => true,
            Val::Lanes(_) => false,
        };
        if !is_int(&a) || !is_int(&b) {
            return Val::Lanes(self.arithmetic(op, self.lanes(&a), self.lanes(&b)));
        }
        match (op, &a, &b) {
            (Add, Val::Offsets(x, dx, ox), Val::Uniform(y, dy)) | (Add, Val::Uniform(y, dy), Val::Offsets(x, dx, ox)) => {
                return Val::Offsets(fb.add(*x, *y), gcd(*dx, *dy), ox.clone());
            }
            (Add, Val::Offsets(x, dx, ox), Val::Offsets(y, dy, oy)) => {
                let offsets = ox.iter().zip(oy).map(|(p, q)| p + q).collect();
                return Val::Offsets(fb.add(*x, *y), gcd(*dx, *dy), offsets);
            }
            (Sub, Val::Offsets(x, dx, ox), Val::Uniform(y, dy)) => {
                return Val::Offsets(fb.sub(*x, *y), gcd(*dx, *dy), ox.clone());
            }
            (Sub, _, Val::Offsets(y, dy, oy)) if matches!(a, Val::Uniform(..) | Val::Offsets(..)) => {
                let (x, dx, ox) = match &a {
                    Val::Offsets(x, dx, ox) => (*x, *dx, ox.clone()),
                    Val::Uniform(x, dx) => (*x, *dx, vec![0; oy.len()]),
                    _ => unreachable!(),
                };
                let offsets: Vec<i64> = ox.iter().zip(oy).map(|(p, q)| p - q).collect();
                let least = *offsets.iter().min().unwrap();
                let offsets = offsets.iter().map(|o| o - least).collect();
                let base = self.plus(fb.sub(x, *y), least);
                return simplify(base, gcd(gcd(dx, *dy), least.unsigned_abs()), offsets);
            }
            (Mul, Val::Offsets(x, dx, ox), Val::Uniform(y, dy)) | (Mul, Val::Uniform(y, dy), Val::Offsets(x, dx, ox)) => {
                if let Some(c) = constant(*y)
                    && c >= 0
                {
                    let offsets = ox.iter().map(|o| o * c).collect();
                    return simplify(fb.mul(*x, *y), dx.saturating_mul(*dy), offsets);
                }
            }
            (Div | Rem, Val::Offsets(x, dx, ox), Val::Uniform(y, _)) => {
                if let Some(c) = constant(*y)
                    && c > 0
                    && let Some(v) = self.div_rem(op == Div, *x, *dx, ox, c)
                {
                    return v;
                }
            }
            _ => {}
        }
        let (x, y) = (self.each(&a), self.each(&b));
        Val::Each(x.into_iter().zip(y).map(|(x, y)| self.arithmetic(op, x, y)).collect())
    }

    /// `(base + offsets) / c` or `% c` where that keeps the form.
    fn div_rem(&self, div: bool, base: Value<'c>, divisor: u64, offsets: &[i64], c: i64) -> Option<Val<'c>> {
        let fb = self.fb;
        let k = fb.int(c);
        if divisor.is_multiple_of(c as u64) {
            // base is a multiple of c (or zero).
            return Some(if div {
                simplify(fb.div(base, k), divisor / c as u64, offsets.iter().map(|o| o / c).collect())
            } else {
                simplify(fb.int(0), 0, offsets.iter().map(|o| o % c).collect())
            });
        }
        // base % c is a multiple of g: offsets below g stay within the quotient of base.
        let g = gcd(divisor, c as u64);
        if *offsets.iter().max()? >= g as i64 {
            return None;
        }
        Some(if div { Val::Uniform(fb.div(base, k), 1) } else { simplify(fb.rem(base, k), g, offsets.to_vec()) })
    }

    fn compare(&self, op: CmpOp, a: Val<'c>, b: Val<'c>) -> Val<'c> {
        let fb = self.fb;
        let cmp = match op {
            CmpOp::Lt => Cmp::Lt,
            CmpOp::Le => Cmp::Le,
            CmpOp::Gt => Cmp::Gt,
            CmpOp::Ge => Cmp::Ge,
            CmpOp::Eq => Cmp::Eq,
            CmpOp::Ne => Cmp::Ne,
        };
        match (&a, &b) {
            (Val::Uniform(x, _), Val::Uniform(y, _)) => return Val::Uniform(fb.cmp(cmp, *x, *y), 1),
            // A bound that no vector straddles: all lanes agree with lane 0.
            (Val::Offsets(x, dx, ox), Val::Uniform(y, dy)) if matches!(op, CmpOp::Lt | CmpOp::Ge) => {
                let g = gcd(*dx, *dy);
                if g == 0 || ox.iter().all(|o| *o < g as i64) {
                    return Val::Uniform(fb.cmp(cmp, *x, *y), 1);
                }
            }
            _ => {}
        }
        Val::Lanes(fb.cmp(cmp, self.lanes(&a), self.lanes(&b)))
    }

    fn select(&self, c: Val<'c>, a: Val<'c>, b: Val<'c>) -> Val<'c> {
        let fb = self.fb;
        match (&c, &a, &b) {
            (Val::Uniform(c, _), Val::Uniform(x, dx), Val::Uniform(y, dy)) => {
                return Val::Uniform(fb.select(*c, *x, *y), gcd(*dx, *dy));
            }
            (Val::Uniform(c, _), Val::Offsets(x, dx, ox), Val::Offsets(y, dy, oy)) if ox == oy => {
                return Val::Offsets(fb.select(*c, *x, *y), gcd(*dx, *dy), ox.clone());
            }
            _ => {}
        }
        let int = |v: &Val| match v {
            Val::Uniform(v, _) => v.ty().elem == Elem::I64,
            Val::Lanes(_) => false,
            _ => true,
        };
        if int(&a) {
            let (c, a, b) = (self.each(&c), self.each(&a), self.each(&b));
            return Val::Each((0..c.len()).map(|i| fb.select(c[i], a[i], b[i])).collect());
        }
        let (a, b) = (self.lanes(&a), self.lanes(&b));
        let c = match c {
            Val::Uniform(c, _) => c,
            other => self.lanes(&other),
        };
        Val::Lanes(fb.select(c, a, b))
    }

    fn fold(&self, id: ExprId, op: ReduceOp, var: VarId, begin: ExprId, end: ExprId, body: ExprId) -> Val<'c> {
        let fb = self.fb;
        let (begin, end) = (self.int(begin), self.int(end));
        // What does not change with the fold's variable belongs before its loop.
        self.hoist_where(&[body], |id| self.free[id.index()].0.contains(&var));
        let lanes = if self.varies(id) { self.point.lanes } else { 1 };
        let outside = self.memo.borrow().clone();
        let result = fb.loop_(begin, end, 1, &[fb.f32s(identity(op), lanes)], |i, sum| {
            self.bound.borrow_mut().insert(var, i);
            let value = match self.eval(body) {
                Val::Uniform(v, _) => fb.splat(v, lanes),
                other => self.lanes(&other),
            };
            vec![combine(fb, op, sum[0], value)]
        });
        self.bound.borrow_mut().remove(&var);
        *self.memo.borrow_mut() = outside;
        if lanes == 1 { Val::Uniform(result[0], 1) } else { Val::Lanes(result[0]) }
    }

    fn load(&self, operand: usize, index: &Val<'c>) -> Val<'c> {
        let fb = self.fb;
        let dtype = self.scope.operands[operand].dtype;
        let (base, size, align) = (self.scope.bases[operand], dtype.size(), dtype.size() as u32);
        let float = storage(dtype).is_float() || dtype == DType::Bf16;
        if let Val::Uniform(i, _) = index {
            let at = fb.index(base, *i, size);
            let v = if float { fb.load_f32(dtype, 1, at, align) } else { fb.load_i64(dtype, 1, at, align) };
            return Val::Uniform(v, 1);
        }
        let (lanes, active) = (self.point.lanes, self.point.active as usize);
        // Addresses of the active lanes; constant offsets from one address where possible.
        let pointers: Vec<Value<'c>> = match index {
            Val::Offsets(i, _, offsets) => {
                let first = fb.index(base, *i, size);
                if float && offsets[..active].iter().enumerate().all(|(n, o)| *o == n as i64) {
                    return Val::Lanes(if active == lanes as usize {
                        fb.load_f32(dtype, lanes, first, align)
                    } else {
                        fb.load_f32_masked(dtype, first, self.prefix(), align)
                    });
                }
                // A permutation of one vector, of which the ends are wanted: nothing outside of them is read.
                let n = i64::from(lanes);
                let has_ends = offsets.contains(&0) && offsets.contains(&(n - 1)) && offsets.iter().all(|o| *o < n);
                if float && active == lanes as usize && has_ends {
                    let v = fb.load(Ty::vec(storage(dtype), lanes), first, align);
                    let order: Vec<u32> = offsets.iter().map(|o| *o as u32).collect();
                    return Val::Lanes(fb.widen(dtype, fb.shuffle(v, v, &order)));
                }
                offsets[..active].iter().map(|&o| fb.offset_const(first, o as u64 * size)).collect()
            }
            other => self.each(other).into_iter().map(|i| fb.index(base, i, size)).collect(),
        };
        if !float {
            return Val::Each(pointers.iter().map(|&p| fb.load_i64(dtype, 1, p, align)).collect());
        }
        let elem = Ty::scalar(storage(dtype));
        let mut all: Vec<_> = pointers.iter().map(|&p| fb.load(elem, p, align)).collect();
        all.resize(lanes as usize, fb.zero(elem));
        Val::Lanes(fb.widen(dtype, fb.gather_lanes(&all)))
    }

    fn store_value(&self, operand: OperandId, index: &Val<'c>, value: Value<'c>) {
        let fb = self.fb;
        let operand = operand.index();
        let dtype = self.scope.operands[operand].dtype;
        let (base, size, align) = (self.scope.bases[operand], dtype.size(), dtype.size() as u32);
        let (lanes, active) = (self.point.lanes, self.point.active as usize);
        if let Val::Offsets(i, _, offsets) = index
            && offsets[..active].iter().enumerate().all(|(n, o)| *o == n as i64)
        {
            let at = fb.index(base, *i, size);
            if active == lanes as usize {
                fb.store_f32(dtype, value, at, align);
            } else {
                fb.store_f32_masked(dtype, value, at, self.prefix(), align);
            }
            return;
        }
        let narrow = fb.narrow(dtype, value);
        for (lane, i) in self.each(index).into_iter().enumerate() {
            fb.store(fb.extract(narrow, lane as u32), fb.index(base, i, size), align);
        }
    }

    /// Mask of the active lanes.
    pub fn prefix(&self) -> Value<'c> {
        let bits: Vec<i64> = (0..self.point.lanes).map(|i| i64::from(i < self.point.active)).collect();
        self.fb.int_vec(Elem::I1, &bits)
    }
}

/// First value of a reduction.
pub fn identity(op: ReduceOp) -> f32 {
    match op {
        ReduceOp::Sum => 0.0,
        ReduceOp::Max => f32::NEG_INFINITY,
    }
}

/// One step of a reduction; NaN stays.
pub fn combine<'c>(fb: &Fb<'_, 'c>, op: ReduceOp, a: Value<'c>, b: Value<'c>) -> Value<'c> {
    match op {
        ReduceOp::Sum => fb.add(a, b),
        ReduceOp::Max => fb.maximum(a, b),
    }
}

/// Equal offsets are no offsets.
fn simplify<'c>(base: Value<'c>, divisor: u64, offsets: Vec<i64>) -> Val<'c> {
    if offsets.iter().all(|o| *o == 0) { Val::Uniform(base, divisor) } else { Val::Offsets(base, divisor, offsets) }
}

fn constant(v: Value<'_>) -> Option<i64> {
    v.as_const_int()
}
