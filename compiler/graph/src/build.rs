//! Building nodes: every node's type is computed and checked when it is made, so a badly typed graph cannot exist quietly.
//!
//! [`infer`] is the type rule of every op, shared by the builder, the parser and the verifier. [`Builder`] is what architecture code
//! uses: it keeps the scope (HF module path) and offers one method per op.

use std::collections::HashMap;

use crate::ops::{AttnExpr, Binary, Compare, Op, Pool, Reduce, Unary};
use crate::types::{DType, Dim, FuncId, Function, Module, Node, Param, ParamId, Recipe, State, StateId, Symbol, SymbolId, Type, ValueId};

/// A badly typed node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {what}")]
pub struct TypeError {
    /// Name of the op.
    pub op: String,
    /// What does not fit.
    pub what: String,
}

fn error<T>(op: &str, what: impl Into<String>) -> Result<T, TypeError> {
    Err(TypeError { op: op.to_string(), what: what.into() })
}

/// Shape as text for messages: `[T, 64]`.
pub fn shape_text(module: &Module, shape: &[Dim]) -> String {
    let dims: Vec<String> = shape
        .iter()
        .map(|d| match d {
            Dim::Const(n) => n.to_string(),
            Dim::Sym(s) => module.symbols.get(s.index()).map_or_else(|| format!("?{}", s.0), |s| s.name.clone()),
        })
        .collect();
    format!("[{}]", dims.join(", "))
}

/// Numpy broadcasting of two shapes.
pub fn broadcast(a: &[Dim], b: &[Dim]) -> Option<Vec<Dim>> {
    let rank = a.len().max(b.len());
    let at = |s: &[Dim], i: usize| if i + s.len() >= rank { s[i + s.len() - rank] } else { Dim::Const(1) };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Some(x),
            (Dim::Const(1), y) => Some(y),
            (x, Dim::Const(1)) => Some(x),
            _ => None,
        })
        .collect()
}

/// Product of the constant dimensions and the multiset of symbols: what a reshape keeps.
fn volume(shape: &[Dim]) -> Option<(u64, Vec<SymbolId>)> {
    let mut product = 1u64;
    let mut symbols = Vec::new();
    for d in shape {
        match d {
            Dim::Const(n) => product = product.checked_mul(*n)?,
            Dim::Sym(s) => symbols.push(*s),
        }
    }
    symbols.sort();
    Some((product, symbols))
}

/// Type of `op` applied to operands of the types `inputs`; `declared` is the declared type for ops that need one.
pub fn infer(module: &Module, op: &Op, inputs: &[&Type], declared: Option<&Type>) -> Result<Type, TypeError> {
    let name = op_name(op);
    let need = |n: usize| if inputs.len() == n { Ok(()) } else { error(name, format!("takes {n} operands, found {}", inputs.len())) };
    let declared_type = || declared.cloned().ok_or_else(|| TypeError { op: name.into(), what: "needs a declared type".into() });
    let text = |t: &Type| format!("{}{}", t.dtype, shape_text(module, &t.shape));
    let float = |t: &Type| if t.dtype.is_float() { Ok(()) } else { error(name, format!("needs a float, found {}", text(t))) };
    let rows_i32 = |t: &Type, row: Dim| {
        if t.dtype == DType::I32 && t.shape == [row] {
            Ok(())
        } else {
            error(name, format!("row table must be i32 of the row count, found {}", text(t)))
        }
    };
    match op {
        Op::Input { .. } => {
            need(0)?;
            declared_type()
        }
        Op::Param(id) => {
            need(0)?;
            match module.params.get(id.index()) {
                Some(p) => Ok(p.ty.clone()),
                None => error(name, "no such parameter"),
            }
        }
        Op::Const(_) => {
            need(0)?;
            let ty = declared_type()?;
            if ty.rank() == 0 && ty.dtype != DType::State { Ok(ty) } else { error(name, "constants are scalars") }
        }
        Op::Unary(Unary::Not) => {
            need(1)?;
            if inputs[0].dtype == DType::Bool { Ok(inputs[0].clone()) } else { error(name, "needs bool") }
        }
        Op::Unary(_) => {
            need(1)?;
            float(inputs[0])?;
            Ok(inputs[0].clone())
        }
        Op::Binary(b) => {
            need(2)?;
            let logic = matches!(b, Binary::And | Binary::Or);
            if inputs[0].dtype != inputs[1].dtype || inputs[0].dtype == DType::State || logic != (inputs[0].dtype == DType::Bool) {
                return error(name, format!("operand types {} and {}", text(inputs[0]), text(inputs[1])));
            }
            match broadcast(&inputs[0].shape, &inputs[1].shape) {
                Some(shape) => Ok(Type::new(inputs[0].dtype, shape)),
                None => error(name, format!("shapes {} and {} do not broadcast", text(inputs[0]), text(inputs[1]))),
            }
        }
        Op::Compare(_) => {
            need(2)?;
            if inputs[0].dtype != inputs[1].dtype || inputs[0].dtype == DType::State {
                return error(name, format!("operand types {} and {}", text(inputs[0]), text(inputs[1])));
            }
            match broadcast(&inputs[0].shape, &inputs[1].shape) {
                Some(shape) => Ok(Type::new(DType::Bool, shape)),
                None => error(name, format!("shapes {} and {} do not broadcast", text(inputs[0]), text(inputs[1]))),
            }
        }
        Op::Where => {
            need(3)?;
            if inputs[0].dtype != DType::Bool || inputs[1].dtype != inputs[2].dtype || inputs[1].dtype == DType::State {
                return error(name, format!("operand types {}, {}, {}", text(inputs[0]), text(inputs[1]), text(inputs[2])));
            }
            let shape = broadcast(&inputs[1].shape, &inputs[2].shape).and_then(|s| broadcast(&s, &inputs[0].shape));
            shape.map_or_else(|| error(name, "shapes do not broadcast"), |s| Ok(Type::new(inputs[1].dtype, s)))
        }
        Op::Convert => {
            need(1)?;
            let ty = declared_type()?;
            let ok = ty.shape == inputs[0].shape && ty.dtype != DType::State && inputs[0].dtype != DType::State;
            // Groups run along rows of known width.
            let ok = ok
                && !ty.dtype.has_zeros()
                && (!ty.dtype.is_quantised() || inputs[0].dtype.is_float() && ty.rank() == 2 && ty.shape[1].constant().is_some());
            if ok { Ok(ty) } else { error(name, format!("from {} to {}", text(inputs[0]), text(&ty))) }
        }
        Op::Reshape => {
            need(1)?;
            let ty = declared_type()?;
            let same = volume(&ty.shape).is_some() && volume(&ty.shape) == volume(&inputs[0].shape) && ty.dtype == inputs[0].dtype;
            if same { Ok(ty) } else { error(name, format!("from {} to {}", text(inputs[0]), text(&ty))) }
        }
        Op::Permute { perm } => {
            need(1)?;
            let mut sorted = perm.clone();
            sorted.sort_unstable();
            if sorted.iter().map(|p| *p as usize).ne(0..inputs[0].rank()) {
                return error(name, format!("{perm:?} is no permutation of the axes of {}", text(inputs[0])));
            }
            Ok(Type::new(inputs[0].dtype, perm.iter().map(|p| inputs[0].shape[*p as usize])))
        }
        Op::Slice { axis, start, end } => {
            need(1)?;
            let mut ty = inputs[0].clone();
            match ty.shape.get_mut(*axis as usize) {
                Some(Dim::Const(n)) if start < end && *end <= *n => {
                    *n = end - start;
                    Ok(ty)
                }
                _ => error(name, format!("{start}..{end} of axis {axis} of {}", text(inputs[0]))),
            }
        }
        Op::Cat { axis } => {
            let axis = *axis as usize;
            let Some(first) = inputs.first() else { return error(name, "needs an operand") };
            let mut sum = 0u64;
            for t in inputs {
                let fits = t.dtype == first.dtype
                    && t.rank() == first.rank()
                    && t.shape.iter().zip(&first.shape).enumerate().all(|(i, (a, b))| i == axis || a == b);
                match (fits, t.shape.get(axis)) {
                    (true, Some(Dim::Const(n))) if sum.checked_add(*n).is_some() => sum += n,
                    _ => return error(name, format!("axis {axis} of {} beside {}", text(t), text(first))),
                }
            }
            let mut ty = (*first).clone();
            ty.shape[axis] = Dim::Const(sum);
            Ok(ty)
        }
        Op::Expand => {
            need(1)?;
            let ty = declared_type()?;
            let ok = ty.dtype == inputs[0].dtype && broadcast(&inputs[0].shape, &ty.shape).as_deref() == Some(&ty.shape[..]);
            if ok { Ok(ty) } else { error(name, format!("from {} to {}", text(inputs[0]), text(&ty))) }
        }
        Op::Embedding => {
            need(2)?;
            if inputs[0].rank() < 1 || inputs[1].dtype != DType::I32 || inputs[1].rank() != 1 {
                return error(name, format!("table {} and ids {}", text(inputs[0]), text(inputs[1])));
            }
            let dtype = if inputs[0].dtype.is_quantised() { DType::F32 } else { inputs[0].dtype };
            Ok(Type::new(dtype, std::iter::once(inputs[1].shape[0]).chain(inputs[0].shape[1..].iter().copied())))
        }
        Op::IndexSelect => {
            need(2)?;
            let (x, index) = (inputs[0], inputs[1]);
            let fits = x.dtype != DType::State && x.rank() >= 1 && index.dtype == DType::I32 && index.rank() == 1;
            if !fits || x.shape[x.rank() - 1].constant().is_none() || index.shape[0].constant().is_none() {
                return error(name, format!("{} by {}", text(x), text(index)));
            }
            let mut ty = x.clone();
            ty.shape[x.rank() - 1] = index.shape[0];
            Ok(ty)
        }
        Op::Mm { rhs_t } => {
            need(2)?;
            for operand in inputs.iter().filter(|t| !t.dtype.is_quantised()) {
                float(operand)?;
            }
            let (a, b) = (&inputs[0].shape, &inputs[1].shape);
            if a.len() != 2 || b.len() != 2 {
                return error(name, format!("operands {} and {} must be matrices", text(inputs[0]), text(inputs[1])));
            }
            let (n, k) = if *rhs_t { (b[0], b[1]) } else { (b[1], b[0]) };
            if a[1] != k {
                return error(name, format!("inner dimensions of {} and {} differ", text(inputs[0]), text(inputs[1])));
            }
            Ok(Type::new(DType::F32, [a[0], n]))
        }
        Op::Reduce { axis, .. } => {
            need(1)?;
            float(inputs[0])?;
            let mut ty = inputs[0].clone();
            match ty.shape.get_mut(*axis as usize) {
                Some(d) => *d = Dim::Const(1),
                None => return error(name, format!("axis {axis} of {}", text(inputs[0]))),
            }
            Ok(ty)
        }
        Op::Softmax => {
            need(1)?;
            float(inputs[0])?;
            if inputs[0].rank() == 0 { error(name, "needs an axis") } else { Ok(inputs[0].clone()) }
        }
        Op::RmsNorm { .. } | Op::LayerNorm { .. } => {
            need(if matches!(op, Op::RmsNorm { .. }) { 2 } else { 3 })?;
            for t in inputs {
                float(t)?;
            }
            let last = inputs[0].shape.last().copied();
            for w in &inputs[1..] {
                if last.is_none() || w.shape != [last.unwrap()] {
                    return error(name, format!("weight {} for {}", text(w), text(inputs[0])));
                }
            }
            Ok(inputs[0].clone())
        }
        Op::Rope => {
            need(3)?;
            float(inputs[0])?;
            let ok = match (&inputs[0].shape[..], &inputs[1].shape[..]) {
                ([t, _, Dim::Const(d)], [u, Dim::Const(half)]) => t == u && *half <= *d / 2,
                _ => false,
            };
            if ok && inputs[1] == inputs[2] && inputs[1].dtype == DType::F32 {
                Ok(inputs[0].clone())
            } else {
                error(name, format!("x {}, cos {}, sin {}", text(inputs[0]), text(inputs[1]), text(inputs[2])))
            }
        }
        Op::KvAppend { state } => {
            // Further operands are tokens of earlier writes.
            if inputs.len() < 4 || inputs[4..].iter().any(|t| t.dtype != DType::State) {
                return error(name, format!("takes 4 operands and states, found {}", inputs.len()));
            }
            let Some(s) = module.states.get(state.index()) else { return error(name, "no such state") };
            let want = [Dim::Const(s.kv_heads), Dim::Const(s.head_dim)];
            for t in &inputs[..2] {
                float(t)?;
                if t.rank() != 3 || t.shape[1..] != want || t.shape[0] != inputs[0].shape[0] {
                    return error(name, format!("{} for a state of {} heads of {}", text(t), s.kv_heads, s.head_dim));
                }
            }
            rows_i32(inputs[2], inputs[0].shape[0])?;
            rows_i32(inputs[3], inputs[0].shape[0])?;
            Ok(Type::new(DType::State, []))
        }
        Op::Sdpa { state, .. } => {
            need(4)?;
            float(inputs[0])?;
            let Some(s) = module.states.get(state.index()) else { return error(name, "no such state") };
            match inputs[0].shape[..] {
                [row, Dim::Const(h), Dim::Const(d)] if h % s.kv_heads.max(1) == 0 && d == s.head_dim => {
                    rows_i32(inputs[2], row)?;
                    rows_i32(inputs[3], row)?;
                }
                _ => return error(name, format!("q {} for a state of {} heads of {}", text(inputs[0]), s.kv_heads, s.head_dim)),
            }
            if inputs[1].dtype == DType::State { Ok(inputs[0].clone()) } else { error(name, "second operand must be a state") }
        }
        Op::Pool(_) => {
            need(2)?;
            float(inputs[0])?;
            if inputs[0].rank() != 2 {
                return error(name, format!("needs a matrix, found {}", text(inputs[0])));
            }
            rows_i32(inputs[1], inputs[0].shape[0])?;
            match module.symbol("S") {
                Some(s) => Ok(Type::new(inputs[0].dtype, [Dim::Sym(s), inputs[0].shape[1]])),
                None => error(name, "needs the symbol S (runs)"),
            }
        }
        Op::Call { func, params, states } => {
            let Some(f) = module.functions.get(func.index()) else { return error(name, "no such function") };
            if f.outputs.len() != 1 || f.inputs.len() != inputs.len() || f.params.len() != params.len() || f.states.len() != states.len() {
                return error(name, format!("@{} takes other operands", f.name));
            }
            for (i, t) in inputs.iter().enumerate() {
                let Some(formal) = f.nodes.get(f.inputs[i].index()).map(|n| &n.ty) else { return error(name, "no such input") };
                if formal != *t {
                    return error(name, format!("operand {i} of @{} is {}, found {}", f.name, text(formal), text(t)));
                }
            }
            for (formal, actual) in f.params.iter().zip(params) {
                let types = (module.params.get(formal.index()).map(|p| &p.ty), module.params.get(actual.index()).map(|p| &p.ty));
                if types.0.is_none() || types.0 != types.1 {
                    return error(name, format!("parameters of @{} have other types", f.name));
                }
            }
            match f.nodes.get(f.outputs[0].index()) {
                Some(node) => Ok(node.ty.clone()),
                None => error(name, "no such output"),
            }
        }
    }
}

/// Name of an op in the text form and in messages.
pub fn op_name(op: &Op) -> &'static str {
    match op {
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

/// Result of a builder method.
pub type Built = Result<ValueId, TypeError>;

/// Builds the entry function of a new module.
#[derive(Debug, Default)]
pub struct Builder {
    module: Module,
    scope: Vec<String>,
    params: HashMap<String, ParamId>,
}

impl Builder {
    /// An empty module with an entry function of this name.
    pub fn new(entry: &str) -> Builder {
        let mut module = Module::default();
        module.functions.push(Function { name: entry.to_string(), ..Function::default() });
        Builder { module, ..Builder::default() }
    }
    /// The module so far.
    pub fn module(&self) -> &Module {
        &self.module
    }
    /// The finished module.
    pub fn finish(mut self, outputs: Vec<ValueId>) -> Module {
        self.module.main_mut().outputs = outputs;
        self.module
    }
    /// Opens a scope: nodes made until [`Builder::scope_end`] have `name` in their origin.
    pub fn scope_begin(&mut self, name: &str) {
        self.scope.push(name.to_string());
    }
    /// Closes the innermost scope.
    pub fn scope_end(&mut self) {
        self.scope.pop();
    }
    /// Adds a function that [`Op::Call`] can name.
    pub fn function(&mut self, function: Function) -> FuncId {
        self.module.functions.push(function);
        FuncId(self.module.functions.len() as u32 - 1)
    }
    /// Declares a symbol.
    pub fn symbol(&mut self, name: &str, bound: u64) -> Dim {
        self.module.symbols.push(Symbol { name: name.to_string(), bound });
        Dim::Sym(SymbolId(self.module.symbols.len() as u32 - 1))
    }
    /// Declares a function input.
    pub fn input(&mut self, name: &str, ty: Type) -> ValueId {
        let index = self.module.main().inputs.len() as u32;
        let id = self.push(Op::Input { index }, vec![], ty);
        let main = self.module.main_mut();
        main.inputs.push(id);
        main.input_names.push(name.to_string());
        id
    }
    /// Declares a KV cache.
    pub fn state(&mut self, state: State) -> StateId {
        self.module.states.push(state);
        StateId(self.module.states.len() as u32 - 1)
    }
    /// A parameter with a recipe (the same name gives the same parameter) and the node that reads it.
    pub fn param(&mut self, name: &str, ty: Type, recipe: Recipe) -> ValueId {
        let id = *self.params.entry(name.to_string()).or_insert_with(|| {
            self.module.params.push(Param { name: name.to_string(), ty, recipe });
            ParamId(self.module.params.len() as u32 - 1)
        });
        let ty = self.module.params[id.index()].ty.clone();
        self.push(Op::Param(id), vec![], ty)
    }
    /// A parameter that is a tensor of the checkpoint.
    pub fn weight(&mut self, tensor: &str, dtype: DType, shape: &[usize]) -> ValueId {
        let ty = Type::new(dtype, shape.iter().map(|n| Dim::from(*n)));
        self.param(tensor, ty, Recipe::Source { tensor: tensor.to_string() })
    }
    /// Type of a value.
    pub fn ty(&self, id: ValueId) -> &Type {
        self.module.main().ty(id)
    }
    fn push(&mut self, op: Op, inputs: Vec<ValueId>, ty: Type) -> ValueId {
        let origin = self.scope.join(".");
        let main = self.module.main_mut();
        main.nodes.push(Node { op, inputs, ty, origin });
        ValueId(main.nodes.len() as u32 - 1)
    }
    /// Any op; its type is inferred and checked.
    pub fn op(&mut self, op: Op, inputs: &[ValueId], declared: Option<Type>) -> Built {
        let types: Vec<&Type> = inputs.iter().map(|i| self.module.main().ty(*i)).collect();
        let ty = infer(&self.module, &op, &types, declared.as_ref())?;
        Ok(self.push(op, inputs.to_vec(), ty))
    }
    /// f32 scalar.
    pub fn constant(&mut self, value: f64) -> ValueId {
        self.push(Op::Const(value), vec![], Type::new(DType::F32, []))
    }
    /// Elementwise function.
    pub fn unary(&mut self, op: Unary, x: ValueId) -> Built {
        self.op(Op::Unary(op), &[x], None)
    }
    /// Elementwise function of two.
    pub fn binary(&mut self, op: Binary, a: ValueId, b: ValueId) -> Built {
        self.op(Op::Binary(op), &[a, b], None)
    }
    /// `a + b`
    pub fn add(&mut self, a: ValueId, b: ValueId) -> Built {
        self.binary(Binary::Add, a, b)
    }
    /// `a - b`
    pub fn sub(&mut self, a: ValueId, b: ValueId) -> Built {
        self.binary(Binary::Sub, a, b)
    }
    /// `a * b`
    pub fn mul(&mut self, a: ValueId, b: ValueId) -> Built {
        self.binary(Binary::Mul, a, b)
    }
    /// `x * factor`; `x` itself for 1.
    pub fn scale(&mut self, x: ValueId, factor: f64) -> Built {
        if factor == 1.0 {
            return Ok(x);
        }
        let c = self.constant(factor);
        self.mul(x, c)
    }
    /// Comparison.
    pub fn compare(&mut self, op: Compare, a: ValueId, b: ValueId) -> Built {
        self.op(Op::Compare(op), &[a, b], None)
    }
    /// To another element type; nothing where it already is.
    pub fn convert(&mut self, x: ValueId, dtype: DType) -> Built {
        if self.ty(x).dtype == dtype {
            return Ok(x);
        }
        let ty = Type::new(dtype, self.ty(x).shape.clone());
        self.op(Op::Convert, &[x], Some(ty))
    }
    /// New shape.
    pub fn reshape(&mut self, x: ValueId, shape: &[Dim]) -> Built {
        let ty = Type::new(self.ty(x).dtype, shape.iter().copied());
        self.op(Op::Reshape, &[x], Some(ty))
    }
    /// `start..end` of an axis.
    pub fn slice(&mut self, x: ValueId, axis: u32, start: usize, end: usize) -> Built {
        self.op(Op::Slice { axis, start: start as u64, end: end as u64 }, &[x], None)
    }
    /// Concatenation.
    pub fn cat(&mut self, parts: &[ValueId], axis: u32) -> Built {
        self.op(Op::Cat { axis }, parts, None)
    }
    /// Rows of a table.
    pub fn embedding(&mut self, table: ValueId, ids: ValueId) -> Built {
        self.op(Op::Embedding, &[table, ids], None)
    }
    /// Elements of the last axis by `index: i32[k]`.
    pub fn index_select(&mut self, x: ValueId, index: ValueId) -> Built {
        self.op(Op::IndexSelect, &[x, index], None)
    }
    /// `x @ w^T` with `w: [n, k]`.
    pub fn linear(&mut self, x: ValueId, w: ValueId) -> Built {
        self.op(Op::Mm { rhs_t: true }, &[x, w], None)
    }
    /// Reduction of an axis.
    pub fn reduce(&mut self, op: Reduce, x: ValueId, axis: u32) -> Built {
        self.op(Op::Reduce { op, axis }, &[x], None)
    }
    /// Write to a KV cache.
    pub fn kv_append(&mut self, state: StateId, k: ValueId, v: ValueId, slot: ValueId, kv_index: ValueId) -> Built {
        self.op(Op::KvAppend { state }, &[k, v, slot, kv_index], None)
    }
    /// Attention over a KV cache.
    #[allow(clippy::too_many_arguments)]
    pub fn sdpa(
        &mut self,
        state: StateId,
        q: ValueId,
        kv: ValueId,
        slot: ValueId,
        kv_index: ValueId,
        score: AttnExpr,
        mask: AttnExpr,
    ) -> Built {
        self.op(Op::Sdpa { state, score, mask }, &[q, kv, slot, kv_index], None)
    }
    /// One row per run.
    pub fn pool(&mut self, op: Pool, x: ValueId, slot: ValueId) -> Built {
        self.op(Op::Pool(op), &[x, slot], None)
    }
}

/// Which function a call goes to, for passes that walk call chains.
pub fn callee(op: &Op) -> Option<FuncId> {
    match op {
        Op::Call { func, .. } => Some(*func),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::parse;

    /// Two kv heads of width 4, and values of all kinds.
    const HEAD: &str = r#"module {
        symbol T<=4
        symbol S<=4
        state @kv {kv_heads=2, head_dim=4, dtype=f32}
        func @f(%one: f32, %x: f32[4], %five: f32[5], %bf: bf16[4], %i: i32[4], %bool: bool[4], %token: state, %tokens: state[4],
                %m: f32[4, 4], %wide: f32[4, 5], %mt: f32[4, T], %tm: f32[T, 4], %ii: i32[4, 4], %q8: q8[4, 4], %bm: bf16[4, 4],
                %slot: i32[T], %runs: i32[S], %float_slot: f32[T], %it: i32[T, 4], %rows: f32[2, 32], %huge: f32[4294967296, 4294967296],
                %most: f32[18446744073709551615], %q: f32[T, 4, 4], %k: f32[T, 2, 4], %ks: f32[S, 2, 4], %ki: i32[T, 2, 4],
                %q3: f32[T, 3, 4], %q5: f32[T, 4, 5], %cos: f32[T, 2], %cos3: f32[T, 3], %cos1: f32[T, 1], %cos_s: f32[S, 2],
                %cos_b: bf16[T, 2])
        { %y = "#;

    /// What is inferred for one line; where it declares no type, f32 is declared.
    fn inferred(line: &str) -> Result<String, String> {
        let line = line.replace("@kv", "{state=@kv}").replace("@see", r#"{state=@kv, score="score", mask="true"}"#);
        let declared = if line.contains(" : ") { "" } else { " : f32" };
        let module = parse(&format!("{HEAD}{line}{declared} return %y }} }}")).unwrap_or_else(|e| panic!("{line}: {e}"));
        let node = module.main().nodes.last().unwrap();
        let types: Vec<&Type> = node.inputs.iter().map(|i| module.main().ty(*i)).collect();
        infer(&module, &node.op, &types, Some(&node.ty))
            .map(|ty| format!("{}{}", ty.dtype, shape_text(&module, &ty.shape)))
            .map_err(|e| e.what)
    }

    #[test]
    fn every_op_has_a_type_and_its_number_of_operands() {
        for (line, ty) in [
            ("neg %x", "f32[4]"),
            ("not %bool", "bool[4]"),
            ("add %i, %i", "i32[4]"),
            ("and %bool, %bool", "bool[4]"),
            ("lt %x, %one", "bool[4]"),
            ("where %bool, %bf, %bf", "bf16[4]"),
            ("convert %rows : q8g32[2, 32]", "q8g32[2, 32]"),
            ("reshape %tm : f32[2, T, 2]", "f32[2, T, 2]"),
            ("permute %tm {perm=[1, 0]}", "f32[4, T]"),
            ("slice %x {axis=0, start=0, end=4}", "f32[4]"),
            ("expand %one : f32[T]", "f32[T]"),
            ("embedding %q8, %slot", "f32[T, 4]"),
            ("embedding %bm, %slot", "bf16[T, 4]"),
            ("index_select %tm, %i", "f32[T, 4]"),
            ("index_select %x, %i", "f32[4]"),
            ("mm %m, %wide", "f32[4, 5]"),
            ("mm %bm, %q8 {rhs_t}", "f32[4, 4]"),
            ("sum %m {axis=1}", "f32[4, 1]"),
            ("softmax %tm", "f32[T, 4]"),
            ("rms_norm %bm, %x {eps=1}", "bf16[4, 4]"),
            ("layer_norm %m, %x, %bf {eps=1}", "f32[4, 4]"),
            ("rope %q, %cos, %cos", "f32[T, 4, 4]"),
            ("kv_append %k, %k, %slot, %slot @kv", "state[]"),
            ("sdpa %q, %token, %slot, %slot @see", "f32[T, 4, 4]"),
            ("pool_mean %tm, %slot", "f32[S, 4]"),
        ] {
            assert_eq!(inferred(line).as_deref(), Ok(ty), "{line}");
            let operands = line.rfind('%').unwrap();
            let end = line[operands..].find(' ').map_or(line.len(), |at| operands + at);
            let error = inferred(&format!("{}, %one{}", &line[..end], &line[end..])).unwrap_err();
            assert!(error.starts_with("takes "), "{line}: {error}");
        }
        assert_eq!(inferred("kv_append %k, %k, %slot, %slot, %token, %token @kv").as_deref(), Ok("state[]"));
        let one = Type::new(DType::F32, []);
        for op in [Op::Input { index: 0 }, Op::Const(1.0), Op::Param(ParamId(0))] {
            let error = infer(&Module::default(), &op, &[&one], Some(&one)).unwrap_err();
            assert_eq!(error.what, "takes 0 operands, found 1", "{op:?}");
        }
    }

    #[test]
    fn operands_that_do_not_fit_are_refused() {
        for line in [
            "neg %i",
            "not %x",
            "const 1 : f32[4]",
            "const 1 : state",
            "add %x, %bf",
            "add %bool, %bool",
            "add %token, %token",
            "add %x, %five",
            "and %i, %i",
            "lt %x, %i",
            "lt %token, %token",
            "lt %x, %five",
            "where %x, %x, %x",
            "where %bool, %x, %bf",
            "where %bool, %token, %token",
            "where %bool, %five, %five",
            "convert %x : bf16[5]",
            "convert %x : state[4]",
            "convert %token : f32",
            "convert %rows : z8g32[2, 32]",
            "convert %ii : q8[4, 4]",
            "convert %x : q8[4]",
            "convert %mt : q8[4, T]",
            "reshape %x : f32[5]",
            "reshape %x : bf16[4]",
            "reshape %tm : f32[S, 4]",
            "reshape %huge : f32[4294967296, 4294967296, 2]",
            "permute %m {perm=[0, 0]}",
            "permute %m {perm=[0]}",
            "slice %x {axis=0, start=2, end=2}",
            "slice %x {axis=0, start=0, end=5}",
            "slice %x {axis=1, start=0, end=1}",
            "slice %tm {axis=0, start=0, end=1}",
            "cat {axis=0}",
            "cat %x, %bf {axis=0}",
            "cat %x, %m {axis=0}",
            "cat %m, %wide {axis=0}",
            "cat %tm, %tm {axis=0}",
            "cat %x {axis=1}",
            "cat %most, %most {axis=0}",
            "expand %x : bf16[4]",
            "expand %x : f32[5]",
            "expand %m : f32[4]",
            "embedding %m, %x",
            "embedding %m, %ii",
            "embedding %one, %i",
            "index_select %mt, %i",
            "index_select %m, %slot",
            "index_select %m, %x",
            "index_select %m, %ii",
            "index_select %one, %i",
            "index_select %tokens, %i",
            "mm %ii, %m",
            "mm %m, %ii",
            "mm %m, %x",
            "mm %x, %m",
            "mm %wide, %m",
            "mm %m, %wide {rhs_t}",
            "sum %i {axis=0}",
            "sum %x {axis=1}",
            "softmax %i",
            "softmax %one",
            "rms_norm %i, %x {eps=1}",
            "rms_norm %x, %i {eps=1}",
            "rms_norm %x, %five {eps=1}",
            "rms_norm %one, %x {eps=1}",
            "layer_norm %x, %x, %five {eps=1}",
            "rope %ki, %cos, %cos",
            "rope %tm, %cos, %cos",
            "rope %q, %cos3, %cos3",
            "rope %q, %cos_s, %cos_s",
            "rope %q, %cos, %cos1",
            "rope %q, %cos_b, %cos_b",
            "kv_append %k, %k, %slot @kv",
            "kv_append %k, %k, %slot, %slot, %slot @kv",
            "kv_append %q, %q, %slot, %slot @kv",
            "kv_append %k, %q, %slot, %slot @kv",
            "kv_append %k, %ks, %slot, %slot @kv",
            "kv_append %ki, %ki, %slot, %slot @kv",
            "kv_append %one, %one, %slot, %slot @kv",
            "kv_append %k, %k, %runs, %slot @kv",
            "kv_append %k, %k, %slot, %runs @kv",
            "kv_append %k, %k, %float_slot, %slot @kv",
            "sdpa %ki, %token, %slot, %slot @see",
            "sdpa %q3, %token, %slot, %slot @see",
            "sdpa %q5, %token, %slot, %slot @see",
            "sdpa %tm, %token, %slot, %slot @see",
            "sdpa %q, %token, %runs, %slot @see",
            "sdpa %q, %token, %slot, %runs @see",
            "sdpa %q, %one, %slot, %slot @see",
            "pool_mean %it, %slot",
            "pool_mean %float_slot, %slot",
            "pool_mean %tm, %runs",
        ] {
            assert!(inferred(line).is_err(), "{line}: {:?}", inferred(line));
        }
        let (matrix, table) = (Type::new(DType::F32, [Dim::Const(4); 2]), Type::new(DType::I32, [Dim::Const(4)]));
        let error = infer(&Module::default(), &Op::Pool(Pool::Mean), &[&matrix, &table], None).unwrap_err();
        assert_eq!(error.to_string(), "pool_mean: needs the symbol S (runs)");
    }
}
