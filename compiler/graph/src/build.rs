//! [`Builder`], which architecture code makes graphs with: it keeps the scope (HF module path) and offers one method per op. Every node's
//! type is computed and checked when it is made, so a badly typed graph cannot exist quietly.

use std::collections::HashMap;

use crate::infer::{TypeError, infer};
use crate::ops::{AttnExpr, Binary, Compare, Op, Pool, Reduce, Unary};
use crate::types::{DType, Dim, FuncId, Function, Module, Node, Param, ParamId, Recipe, State, StateId, Symbol, SymbolId, Type, ValueId};

/// Scope that holds the layers' own, by number.
const LAYERS: &str = "layers";

/// The layer whose scope an origin names.
pub fn layer_of(origin: &str) -> Option<u64> {
    let mut parts = origin.split('.');
    parts.find(|part| *part == LAYERS)?;
    parts.next()?.parse().ok()
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
    /// Opens the scope of a layer: [`layer_of`] tells its nodes by their origins.
    pub fn layer_begin(&mut self, layer: usize) {
        self.scope_begin(&format!("{LAYERS}.{layer}"));
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
