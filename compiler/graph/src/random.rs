//! Random well-typed modules with inputs and weights for them, for round trips of the text form and differential tests of passes
//! and kernels. Everything follows from one seed. (In tests, or with the feature `random`.)
//!
//! Values stay moderate: products have a squashed factor, weights are scaled by their width, and functions with poles get arguments away
//! from them; so two correct executors agree within the usual tolerances.

use crate::build::Builder;
use crate::infer::infer;
use crate::ops::{AttnExpr, Binary, Compare, Op, Pool, Reduce, Unary};
use crate::tensor::Tensor;
use crate::types::{DType, Dim, FuncId, Function, Module, Node, ParamId, Recipe, State, Type, ValueId};

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// In `0..n` (0 for n = 0).
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }
    /// True once in n times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
    /// In -1..1.
    pub fn signed(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
    /// One of these.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// What a random module may contain.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// About how many nodes.
    pub nodes: usize,
    /// KV caches, `sdpa`, `rope`, pooling. Adds the inputs `slot`, `kv_index` and `position`.
    pub attention: bool,
    /// A shared function and calls of it.
    pub calls: bool,
    /// Names that need quotes.
    pub odd_names: bool,
}

const ODD_NAMES: [&str; 8] = ["a b", "\"", "\\", "line\nbreak", "π\u{200d}", "7", "@%//", "\u{202e}\0\t'"];

struct Generator<'r> {
    rng: &'r mut Rng,
    b: Builder,
    options: Options,
    rows: Dim,
    values: Vec<ValueId>,
}

/// A random module that verifies.
pub fn module(rng: &mut Rng, options: &Options) -> Module {
    let mut b = Builder::new("main");
    let bound = 4 + rng.below(13) as u64;
    let rows = b.symbol(if options.odd_names && rng.one_in(2) { "rows \"T\"" } else { "T" }, bound);
    if options.attention {
        b.symbol("S", bound);
    }
    let mut g = Generator { rng, b, options: *options, rows, values: Vec::new() };
    g.inputs();
    g.callee();
    for _ in 0..100 * options.nodes.max(1) {
        if g.b.module().main().nodes.len() >= options.nodes {
            break;
        }
        let scope = g.name("layers.0");
        g.b.scope_begin(&scope);
        let made = g.step();
        g.b.scope_end();
        if let Some(v) = made
            && g.b.ty(v).dtype != DType::State
        {
            g.values.push(v);
        }
    }
    let mut outputs = vec![g.values[g.values.len() - 1]];
    for _ in 0..g.rng.below(3) {
        outputs.push(g.rng.pick(&g.values));
    }
    g.b.finish(outputs)
}

impl Generator<'_> {
    /// A name, sometimes one that needs quotes.
    fn name(&mut self, plain: &str) -> String {
        if self.options.odd_names && self.rng.one_in(4) {
            format!("{}{}", self.rng.pick(&ODD_NAMES), self.rng.below(10))
        } else {
            plain.to_string()
        }
    }
    fn width(&mut self) -> Dim {
        let widths: [usize; 5] = [1, 3, 4, 8, 12];
        Dim::from(self.rng.pick(&widths))
    }
    fn input(&mut self, name: &str, ty: Type) -> ValueId {
        let unique = format!("{}{}", self.name(name), self.b.module().main().inputs.len());
        let name = if matches!(name, "slot" | "kv_index" | "position") { name.to_string() } else { unique };
        let scoped = self.rng.one_in(4);
        if scoped {
            self.b.scope_begin("inputs");
        }
        let id = self.b.input(&name, ty);
        if scoped {
            self.b.scope_end();
        }
        id
    }
    fn inputs(&mut self) {
        for i in 0..1 + self.rng.below(3) {
            let shape = [self.rows, self.width()];
            let dtype = self.rng.pick(&[DType::F32, DType::F32, DType::BF16, DType::F16]);
            let id = self.input("x", Type::new(if i == 0 { DType::F32 } else { dtype }, shape));
            self.values.push(id);
        }
        if self.options.attention {
            for name in ["slot", "kv_index", "position"] {
                let id = self.input(name, Type::new(DType::I32, [self.rows]));
                self.values.push(id);
            }
        }
    }
    /// A weight of this type with a random recipe that fits.
    fn weight(&mut self, dtype: DType, shape: &[Dim]) -> ValueId {
        let count = self.b.module().params.len();
        let same: Vec<usize> = (0..count).filter(|i| self.b.module().params[*i].ty == Type::new(dtype, shape.iter().copied())).collect();
        if !same.is_empty() && self.rng.one_in(3) {
            let param = self.b.module().params[self.rng.pick(&same)].clone();
            return self.b.param(&param.name, param.ty, param.recipe);
        }
        let name = format!("{}.{count}", self.name("weight"));
        let source = |name: String| Recipe::Source { tensor: name };
        let mut recipe = match (self.rng.below(5), shape.first().and_then(|d| d.constant())) {
            (0, _) if shape.len() == 2 => Recipe::Transpose(Box::new(source(self.name("t")))),
            (1, Some(rows)) if rows > 1 => {
                let cut = |n| Recipe::Slice { of: Box::new(source("part".into())), start: 2, end: 2 + n };
                Recipe::Concat(vec![cut(1), cut(rows - 1)])
            }
            (2, Some(rows)) => Recipe::Slice { of: Box::new(source(self.name("s"))), start: 1, end: rows + 1 },
            _ => source(name.clone()),
        };
        if self.rng.one_in(3) {
            recipe = Recipe::Convert { of: Box::new(recipe), dtype };
        }
        self.b.param(&name, Type::new(dtype, shape.iter().copied()), recipe)
    }
    /// A function with one weight: `x + silu(rms_norm(x, w))`.
    fn callee(&mut self) {
        if !self.options.calls {
            return;
        }
        let width = self.width();
        let w = Type::new(DType::F32, [width]);
        self.weight(DType::F32, &[width]);
        let formal = self.b.module().params.iter().position(|p| p.ty == w).map(|i| ParamId(i as u32));
        let Some(formal) = formal else { return };
        let x = Type::new(DType::F32, [self.rows, width]);
        let node = |op, inputs: &[u32], ty: &Type, origin: &str| Node {
            op,
            inputs: inputs.iter().map(|i| ValueId(*i)).collect(),
            ty: ty.clone(),
            origin: origin.into(),
        };
        let function = Function {
            name: self.name("layer") + ".f",
            inputs: vec![ValueId(0)],
            input_names: vec!["x".into()],
            nodes: vec![
                node(Op::Input { index: 0 }, &[], &x, ""),
                node(Op::Param(formal), &[], &w, ""),
                node(Op::RmsNorm { eps: 1e-6 }, &[0, 1], &x, "norm"),
                node(Op::Unary(Unary::Silu), &[2], &x, "mlp"),
                node(Op::Binary(Binary::Add), &[0, 3], &x, ""),
            ],
            outputs: vec![ValueId(4)],
            params: vec![formal],
            states: vec![],
        };
        self.b.function(function);
    }
    fn any(&mut self) -> ValueId {
        self.rng.pick(&self.values)
    }
    fn float(&mut self) -> ValueId {
        let floats: Vec<ValueId> = self.values.iter().copied().filter(|v| self.b.ty(*v).dtype.is_float()).collect();
        self.rng.pick(&floats)
    }
    /// A `[rows, n]` float.
    fn matrix(&mut self) -> (ValueId, Dim) {
        let matrices: Vec<ValueId> = self.values.iter().copied().filter(|v| self.is_matrix(*v)).collect();
        let x = self.rng.pick(&matrices);
        (x, self.b.ty(x).shape[1])
    }
    fn is_matrix(&self, v: ValueId) -> bool {
        let ty = self.b.ty(v);
        ty.dtype.is_float() && matches!(ty.shape[..], [r, Dim::Const(_)] if r == self.rows)
    }
    /// Another operand for `x`: a value that fits, a weight or a constant.
    fn partner(&mut self, x: ValueId) -> Option<ValueId> {
        let ty = self.b.ty(x).clone();
        for _ in 0..6 {
            let v = self.any();
            if infer(self.b.module(), &Op::Compare(Compare::Lt), &[&ty, self.b.ty(v)], None).is_ok() {
                return Some(v);
            }
        }
        match ty.shape.last() {
            Some(Dim::Const(n)) if ty.dtype.is_float() && self.rng.one_in(2) => Some(self.weight(ty.dtype, &[Dim::Const(*n)])),
            _ => {
                let constant = if ty.dtype.is_float() { self.rng.signed() } else { 1.0 };
                self.b.op(Op::Const(constant), &[], Some(Type::new(ty.dtype, []))).ok()
            }
        }
    }
    fn is_bool(&self, v: ValueId) -> bool {
        self.b.ty(v).dtype == DType::Bool
    }
    /// Makes one or a few nodes; `None` where nothing fits.
    fn step(&mut self) -> Option<ValueId> {
        let choices = 18 + if self.options.attention { 4 } else { 0 };
        match self.rng.below(choices) {
            0 | 1 => self.unary(),
            2 => {
                let (a, op) = (self.any(), self.rng.pick(&[Binary::Add, Binary::Sub, Binary::Minimum, Binary::Maximum]));
                let op = if self.is_bool(a) { self.rng.pick(&[Binary::And, Binary::Or]) } else { op };
                let c = self.partner(a)?;
                let (a, c) = if self.rng.one_in(2) { (a, c) } else { (c, a) };
                self.b.binary(op, a, c).ok()
            }
            3 => {
                let a = self.float();
                let c = self.partner(a)?;
                let squash = self.rng.pick(&[Unary::Tanh, Unary::Sigmoid]);
                let c = self.b.unary(squash, c).ok()?;
                self.b.mul(a, c).ok()
            }
            4 => {
                let (a, c) = (self.float(), self.float());
                // A divisor of at least 1.
                let positive = self.b.unary(Unary::Abs, c).ok()?;
                let one = self.b.op(Op::Const(1.0), &[], Some(Type::new(self.b.ty(c).dtype, []))).ok()?;
                let divisor = self.b.add(positive, one).ok()?;
                self.b.binary(Binary::Div, a, divisor).ok()
            }
            5 => {
                let a = self.any();
                let c = self.partner(a)?;
                let op = self.rng.pick(&Compare::ALL);
                self.b.compare(op, a, c).ok()
            }
            6 => {
                let a = self.any();
                let (c, op) = (self.partner(a)?, self.rng.pick(&Compare::ALL));
                let cond = self.b.compare(op, a, c).ok()?;
                self.b.op(Op::Where, &[cond, c, a], None).ok()
            }
            7 => {
                let x = self.float();
                let to = self.rng.pick(&[DType::F32, DType::F16, DType::BF16]);
                self.b.convert(x, to).ok()
            }
            8 => self.reshape(),
            9 => {
                let x = self.any();
                let mut perm: Vec<u32> = (0..self.b.ty(x).rank() as u32).collect();
                for i in (1..perm.len()).rev() {
                    perm.swap(i, self.rng.below(i + 1));
                }
                self.b.op(Op::Permute { perm }, &[x], None).ok()
            }
            10 => {
                let x = self.any();
                let axis = self.rng.below(self.b.ty(x).rank());
                let Some(Dim::Const(n)) = self.b.ty(x).shape.get(axis).copied() else { return None };
                let start = self.rng.below(n as usize);
                let end = start + 1 + self.rng.below(n as usize - start);
                self.b.slice(x, axis as u32, start, end).ok()
            }
            11 => {
                let x = self.any();
                let axis = self.rng.below(self.b.ty(x).rank()) as u32;
                let mut parts = vec![x];
                for _ in 0..8 {
                    let v = self.any();
                    parts.push(v);
                    let types: Vec<&Type> = parts.iter().map(|p| self.b.ty(*p)).collect();
                    if infer(self.b.module(), &Op::Cat { axis }, &types, None).is_err() || parts.len() > 3 {
                        parts.pop();
                    }
                }
                self.b.cat(&parts, axis).ok()
            }
            12 => {
                let x = self.any();
                let mut ty = self.b.ty(x).clone();
                for d in ty.shape.iter_mut().filter(|d| **d == Dim::Const(1)) {
                    *d = if self.rng.one_in(2) { self.rows } else { Dim::Const(3) };
                }
                if ty.rank() < 4 && self.rng.one_in(2) {
                    ty.shape.insert(0, Dim::Const(2));
                }
                if ty.shape.iter().filter(|d| d.constant().is_none()).count() > 1 {
                    return None;
                }
                self.b.op(Op::Expand, &[x], Some(ty)).ok()
            }
            13 => {
                let (x, k) = self.matrix();
                let n = self.width();
                let dtype = self.rng.pick(&[DType::F32, DType::F32, DType::BF16, DType::F16]);
                if self.rng.one_in(3) {
                    let w = self.weight(dtype, &[k, n]);
                    return self.b.op(Op::Mm { rhs_t: false }, &[x, w], None).ok();
                }
                let w = self.weight(dtype, &[n, k]);
                self.b.linear(x, w).ok()
            }
            14 => {
                let x = self.float();
                let axis = self.rng.below(self.b.ty(x).rank()) as u32;
                let op = self.rng.pick(&[Reduce::Sum, Reduce::Mean, Reduce::Amax]);
                self.b.reduce(op, x, axis).ok()
            }
            15 => {
                let x = self.float();
                self.b.op(Op::Softmax, &[x], None).ok()
            }
            16 => {
                let (x, d) = self.matrix();
                let w = self.weight(DType::F32, &[d]);
                if self.rng.one_in(2) {
                    return self.b.op(Op::RmsNorm { eps: 1e-5 }, &[x, w], None).ok();
                }
                let bias = self.weight(DType::F32, &[d]);
                self.b.op(Op::LayerNorm { eps: 1e-3 }, &[x, w, bias], None).ok()
            }
            17 if self.options.calls => self.call(),
            18 | 19 => self.attention(),
            20 => {
                let (x, slot) = (self.matrix().0, self.b.module().main().input("slot")?);
                let pool = self.rng.pick(&[Pool::Mean, Pool::Cls, Pool::Max, Pool::Last]);
                self.b.pool(pool, x, slot).ok()
            }
            21 => {
                let (ids, width) = (self.b.module().main().input("position")?, self.width());
                let table = self.weight(DType::BF16, &[Dim::Const(64), width]);
                self.b.embedding(table, ids).ok()
            }
            _ => None,
        }
    }
    fn unary(&mut self) -> Option<ValueId> {
        let x = self.any();
        if self.is_bool(x) {
            return self.b.unary(Unary::Not, x).ok();
        }
        let x = self.float();
        let op = self.rng.pick(&Unary::ALL);
        let x = match op {
            Unary::Not => return None,
            // Away from poles and overflow.
            Unary::Exp => self.b.unary(Unary::Tanh, x).ok()?,
            Unary::Log | Unary::Rsqrt | Unary::Sqrt => {
                let positive = self.b.unary(Unary::Abs, x).ok()?;
                let one = self.b.op(Op::Const(1.0), &[], Some(Type::new(self.b.ty(x).dtype, []))).ok()?;
                self.b.add(positive, one).ok()?
            }
            _ => x,
        };
        self.b.unary(op, x).ok()
    }
    /// Splits or joins the last axes.
    fn reshape(&mut self) -> Option<ValueId> {
        let x = self.any();
        let mut shape = self.b.ty(x).shape.clone();
        let last = shape.pop()?.constant()?;
        match shape.last().copied() {
            Some(Dim::Const(before)) if self.rng.one_in(2) => *shape.last_mut()? = Dim::Const(before * last),
            _ if shape.len() < 4 => {
                let divisors: Vec<u64> = (1..=last).filter(|d| last % d == 0).collect();
                let d = if divisors.is_empty() { 1 } else { self.rng.pick(&divisors) };
                shape.extend([Dim::Const(last / d), Dim::Const(d)]);
            }
            _ => return None,
        }
        if shape.iter().filter(|d| d.constant().is_none()).count() > 1 {
            return None;
        }
        self.b.reshape(x, &shape).ok()
    }
    fn call(&mut self) -> Option<ValueId> {
        let func = FuncId(1);
        let f = self.b.module().functions.get(func.index())?.clone();
        let want = f.ty(f.inputs[0]).clone();
        let width = want.shape[1];
        let (x, k) = self.matrix();
        let x = if *self.b.ty(x) == want {
            x
        } else {
            let w = self.weight(DType::F32, &[width, k]);
            self.b.linear(x, w).ok()?
        };
        let w = self.weight(DType::F32, &[width]);
        let Op::Param(w) = self.b.module().main().node(w).op else { return None };
        self.b.op(Op::Call { func, params: vec![w], states: vec![] }, &[x], None).ok()
    }
    /// Projections, partial rope, cache and attention over it.
    fn attention(&mut self) -> Option<ValueId> {
        let find = |g: &Self, name: &str| g.b.module().main().input(name);
        let (slot, kv_index, position) = (find(self, "slot")?, find(self, "kv_index")?, find(self, "position")?);
        let (x, k) = self.matrix();
        let (kv_heads, group, d) = (1 + self.rng.below(2), 1 + self.rng.below(3), 4usize);
        let project = |g: &mut Self, heads: usize| {
            let w = g.weight(DType::F32, &[Dim::from(heads * d), k]);
            let y = g.b.linear(x, w).ok()?;
            g.b.reshape(y, &[g.rows, Dim::from(heads), Dim::from(d)]).ok()
        };
        let (mut q, mut key, value) = (project(self, kv_heads * group)?, project(self, kv_heads)?, project(self, kv_heads)?);
        if self.rng.one_in(2) {
            let half = 1 + self.rng.below(2);
            let mut tables = Vec::new();
            for sin in [false, true] {
                let recipe =
                    Recipe::Rope { sin, inv_freq: [1.0, 0.01][..half].to_vec(), scale: self.rng.pick(&[1.0, 1.25]), positions: 64 };
                let name = format!("rope.{}.{half}", if sin { "sin" } else { "cos" });
                let table = self.b.param(&name, Type::new(DType::F32, [Dim::Const(64), Dim::from(half)]), recipe);
                tables.push(self.b.embedding(table, position).ok()?);
            }
            q = self.b.op(Op::Rope, &[q, tables[0], tables[1]], None).ok()?;
            key = self.b.op(Op::Rope, &[key, tables[0], tables[1]], None).ok()?;
        }
        let name = format!("{}.{}", self.name("kv"), self.b.module().states.len());
        let state = State {
            name,
            kv_heads: kv_heads as u64,
            head_dim: d as u64,
            dtype: self.rng.pick(&[DType::F32, DType::BF16, DType::F16]),
            persistent: self.rng.one_in(2),
        };
        let state = self.b.state(state);
        let token = self.b.kv_append(state, key, value, slot, kv_index).ok()?;
        let mask = match self.rng.below(3) {
            0 => AttnExpr::True,
            1 => AttnExpr::causal(),
            _ => AttnExpr::causal_window(3),
        };
        let out = self.b.sdpa(state, q, token, slot, kv_index, AttnExpr::scaled(0.5), mask).ok()?;
        self.b.reshape(out, &[self.rows, Dim::from(kv_heads * group * d)]).ok()
    }
}

/// Inputs for a run over `rows` rows: floats in -1..1, one or two slots with rows from 0 on, ids and positions below 64.
pub fn inputs(rng: &mut Rng, module: &Module, rows: usize) -> Vec<(String, Tensor)> {
    let main = module.main();
    let first = if rng.one_in(2) { rows } else { 1 + rng.below(rows) };
    let mut all = Vec::new();
    for (name, id) in main.input_names.iter().zip(&main.inputs) {
        let ty = main.ty(*id);
        let shape: Vec<usize> = ty.shape.iter().map(|d| d.constant().map_or(rows, |n| n as usize)).collect();
        let count = shape.iter().product::<usize>();
        let value = |i: usize, rng: &mut Rng| match name.as_str() {
            "slot" => f64::from(u8::from(i >= first)),
            "kv_index" | "position" => (if i >= first { i - first } else { i }) as f64,
            _ if ty.dtype.is_float() => rng.signed(),
            _ => rng.below(2) as f64,
        };
        let data: Vec<f64> = (0..count).map(|i| value(i, rng)).collect();
        all.push((name.clone(), Tensor::new(ty.dtype, &shape, data)));
    }
    all
}

/// Value of a parameter: tables by their recipe, weights random, scaled by the root of their width. Depends on the seed and the id only.
pub fn param(seed: u64, module: &Module, id: ParamId) -> Tensor {
    let param = &module.params[id.index()];
    if let Recipe::Rope { .. } = param.recipe
        && let Ok(table) = crate::recipe::evaluate(&param.recipe, &|_| Err("no checkpoint".into()))
    {
        return table;
    }
    let mut rng = Rng::new(seed ^ (u64::from(id.0) + 1).wrapping_mul(0x2545_f491_4f6c_dd1d));
    let shape: Vec<usize> = param.ty.shape.iter().map(|d| d.constant().unwrap_or(1) as usize).collect();
    let scale = if shape.len() == 2 { 1.0 / (shape[1] as f64).sqrt() } else { 1.0 };
    let data: Vec<f64> = (0..shape.iter().product()).map(|_| rng.signed() * scale).collect();
    Tensor::new(param.ty.dtype, &shape, data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp::Interp;
    use std::collections::HashSet;

    #[test]
    fn random_modules_run_and_use_every_op() {
        let mut ops = HashSet::new();
        let mut finite = 0;
        for seed in 0..300 {
            let rng = &mut Rng::new(seed);
            let options = Options { nodes: 40, attention: seed % 2 == 0, calls: seed % 3 == 0, odd_names: seed % 5 == 0 };
            let module = module(rng, &options);
            let inputs = inputs(rng, &module, 3);
            let inputs: Vec<(&str, Tensor)> = inputs.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
            let mut interp = Interp::new(&module, Box::new(|id| Ok(param(seed, &module, id))));
            let mut all_finite = true;
            let mut observer = |_: &Function, _: ValueId, t: &Tensor| all_finite &= t.data.iter().all(|x| x.is_finite());
            interp.run_observed(&inputs, &mut observer).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{module}"));
            finite += usize::from(all_finite);
            ops.extend(module.functions.iter().flat_map(|f| &f.nodes).map(|n| n.op.name()));
        }
        assert!(finite >= 280, "values explode in {} modules", 300 - finite);
        let all = [
            "input",
            "param",
            "const",
            "where",
            "convert",
            "reshape",
            "permute",
            "slice",
            "cat",
            "expand",
            "embedding",
            "mm",
            "sum",
            "mean",
            "amax",
            "softmax",
            "rms_norm",
            "layer_norm",
            "rope",
            "kv_append",
            "sdpa",
            "pool_mean",
            "pool_cls",
            "pool_max",
            "pool_last",
            "call",
        ];
        let elementwise = Unary::ALL.iter().map(|u| u.name()).chain(Binary::ALL.iter().map(|b| b.name()));
        let missing: Vec<&str> = all.into_iter().chain(elementwise).chain(Compare::ALL.iter().map(|c| c.name())).collect();
        let missing: Vec<&&str> = missing.iter().filter(|n| !ops.contains(**n)).collect();
        assert!(missing.is_empty(), "never generated: {missing:?}");
    }

    #[test]
    fn a_seed_gives_one_module() {
        let options = Options { nodes: 30, attention: true, calls: true, odd_names: false };
        assert_eq!(module(&mut Rng::new(7), &options), module(&mut Rng::new(7), &options));
    }
}
