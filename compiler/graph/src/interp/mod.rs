//! The reference interpreter: slow, scalar and obvious; the judge of every pass and every kernel.
//!
//! In: a module, a function that gives the value of each parameter, named inputs. Out: the entry's outputs. Every node is evaluated
//! by its formula in f64, sums run in storage order, and the result is rounded once to the node's element type ([`crate::tensor::round`]).
//! What [`crate::ops`] leaves open is fixed here: integer arithmetic wraps, integer division truncates toward zero and refuses 0,
//! floats convert to integers with truncation and saturation, `softmax` of a row of `-inf` is NaN.
//!
//! KV states live as long as the interpreter: a persistent state keeps what earlier runs appended, another one is cleared when a run
//! starts. The interpreter never keeps counters: rows say with `slot` and `kv_index` where they read and write.

mod attention;
mod ops;
#[cfg(test)]
mod tests;

use crate::ops::Op;
pub use crate::tensor::Tensor;
use crate::tensor::round_all;
use crate::types::{DType, Dim, FuncId, Function, Module, Node, ParamId, StateId, Type, ValueId};
use crate::verify::{VerifyErrors, verify};
use attention::{SlotCache, kv_append, sdpa};
use ops::{evaluate, runs};
use std::collections::HashMap;
use std::rc::Rc;

/// Most elements of one value: a guard against shapes that would take all memory.
const ELEMENTS_MAX: usize = 1 << 31;
/// Largest kv_index: same guard.
const KV_INDEX_MAX: i64 = 1 << 22;

/// Why a run failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InterpError {
    /// The module breaks rules of the IR.
    #[error("{0}")]
    Module(#[from] VerifyErrors),
    /// An input is missing, unknown or of another type.
    #[error("input {name:?}: {what}")]
    Input {
        /// Its name.
        name: String,
        /// What is wrong.
        what: String,
    },
    /// A parameter cannot be had or is of another type.
    #[error("parameter {name:?}: {what}")]
    Param {
        /// Its name.
        name: String,
        /// What is wrong.
        what: String,
    },
    /// A node has no value for these operands.
    #[error("@{function} %{value} = {op} (from {origin:?}): {what}")]
    Node {
        /// Function.
        function: String,
        /// Number of the value.
        value: u32,
        /// Name of the op.
        op: &'static str,
        /// HF module path.
        origin: String,
        /// What is wrong.
        what: String,
    },
}

/// Gives the value of a parameter.
pub type ParamSource<'m> = Box<dyn Fn(ParamId) -> Result<Tensor, String> + 'm>;
/// Called with every value that a run computes, in order; inside calls with the callee and once per call.
pub type Observer<'a> = dyn FnMut(&Function, ValueId, &Tensor) + 'a;

/// Interpreter of one module with its parameter cache and KV states.
pub struct Interp<'m> {
    module: &'m Module,
    source: ParamSource<'m>,
    params: Vec<Option<Rc<Tensor>>>,
    states: Vec<HashMap<i64, SlotCache>>,
    verified: bool,
    rounds_attention: bool,
}

/// What one call of a function runs with.
#[derive(Default)]
struct Frame {
    params: HashMap<ParamId, ParamId>,
    states: HashMap<StateId, StateId>,
}

impl Frame {
    fn param(&self, id: ParamId) -> ParamId {
        self.params.get(&id).copied().unwrap_or(id)
    }
    fn state(&self, id: StateId) -> StateId {
        self.states.get(&id).copied().unwrap_or(id)
    }
}

type Symbols = Vec<Option<usize>>;

impl<'m> Interp<'m> {
    /// An interpreter with empty states. The first run verifies the module.
    pub fn new(module: &'m Module, params: ParamSource<'m>) -> Interp<'m> {
        let states = vec![HashMap::new(); module.states.len()];
        Interp { module, source: params, params: vec![None; module.params.len()], states, verified: false, rounds_attention: false }
    }
    /// An interpreter whose parameters are evaluated from their recipes; `tensor` reads the checkpoint.
    pub fn from_checkpoint(module: &'m Module, tensor: impl Fn(&str) -> Result<Tensor, String> + 'm) -> Interp<'m> {
        Interp::new(module, Box::new(move |id| crate::recipe::evaluate(&module.params[id.index()].recipe, &tensor)))
    }
    /// Attention over bf16 caches as by kernels that round queries, and weights before they are divided by their sum, to bf16.
    pub fn rounding_attention(self, rounds: bool) -> Interp<'m> {
        Interp { rounds_attention: rounds, ..self }
    }
    /// Forgets all keys and values.
    pub fn reset_state(&mut self) {
        self.states.iter_mut().for_each(HashMap::clear);
    }
    /// Runs the entry. Inputs by name, in any order; symbols are bound by their shapes.
    pub fn run(&mut self, inputs: &[(&str, Tensor)]) -> Result<Vec<Tensor>, InterpError> {
        self.run_observed(inputs, &mut |_, _, _| {})
    }
    /// [`Interp::run`] that shows every value to `observer`, so that a test can name the first node that differs.
    pub fn run_observed(&mut self, inputs: &[(&str, Tensor)], observer: &mut Observer<'_>) -> Result<Vec<Tensor>, InterpError> {
        let module = self.module;
        if !self.verified {
            verify(module)?;
            self.verified = true;
        }
        for (state, cache) in module.states.iter().zip(&mut self.states) {
            if !state.persistent {
                cache.clear();
            }
        }
        let main = module.main();
        let mut symbols: Symbols = vec![None; module.symbols.len()];
        let mut args = Vec::new();
        for (name, _) in inputs {
            if !main.input_names.iter().any(|n| n == name) || inputs.iter().filter(|(n, _)| n == name).count() > 1 {
                return Err(InterpError::Input { name: name.to_string(), what: "unknown or given twice".into() });
            }
        }
        for (name, id) in main.input_names.iter().zip(&main.inputs) {
            let fail = |what: String| InterpError::Input { name: name.clone(), what };
            let (_, tensor) = inputs.iter().find(|(n, _)| n == name).ok_or_else(|| fail("missing".into()))?;
            bind(module, main.ty(*id), tensor, &mut symbols).map_err(fail)?;
            args.push(Rc::new(tensor.clone()));
        }
        let outputs = self.call(module.main, args, &Frame::default(), &mut symbols, observer)?;
        Ok(outputs.into_iter().map(|t| t.as_ref().clone()).collect())
    }

    fn param(&mut self, id: ParamId) -> Result<Rc<Tensor>, InterpError> {
        if let Some(tensor) = &self.params[id.index()] {
            return Ok(tensor.clone());
        }
        let param = &self.module.params[id.index()];
        let fail = |what: String| InterpError::Param { name: param.name.clone(), what };
        let tensor = (self.source)(id).map_err(fail)?;
        bind(self.module, &param.ty, &tensor, &mut Vec::new()).map_err(fail)?;
        let tensor = Rc::new(tensor);
        self.params[id.index()] = Some(tensor.clone());
        Ok(tensor)
    }

    fn call(
        &mut self,
        func: FuncId,
        args: Vec<Rc<Tensor>>,
        frame: &Frame,
        symbols: &mut Symbols,
        observer: &mut Observer<'_>,
    ) -> Result<Vec<Rc<Tensor>>, InterpError> {
        let function = &self.module.functions[func.index()];
        let mut last_use: Vec<usize> = (0..function.nodes.len()).collect();
        for id in function.ids() {
            function.node(id).inputs.iter().for_each(|i| last_use[i.index()] = id.index());
        }
        function.outputs.iter().for_each(|o| last_use[o.index()] = usize::MAX);
        let mut values: Vec<Option<Rc<Tensor>>> = vec![None; function.nodes.len()];
        for id in function.ids() {
            let node = function.node(id);
            let operands: Vec<Rc<Tensor>> =
                node.inputs.iter().map(|i| values[i.index()].clone().expect("operands come before users")).collect();
            let value = match &node.op {
                Op::Input { index } => args[*index as usize].clone(),
                Op::Param(param) => self.param(frame.param(*param))?,
                Op::Call { func, params, states } => {
                    let callee = &self.module.functions[func.index()];
                    let inner = Frame {
                        params: callee.params.iter().copied().zip(params.iter().map(|p| frame.param(*p))).collect(),
                        states: callee.states.iter().copied().zip(states.iter().map(|s| frame.state(*s))).collect(),
                    };
                    self.call(*func, operands, &inner, symbols, observer)?.swap_remove(0)
                }
                _ => {
                    let operands: Vec<&Tensor> = operands.iter().map(|t| t.as_ref()).collect();
                    let result = self.node(node, &operands, frame, symbols).map_err(|what| InterpError::Node {
                        function: function.name.clone(),
                        value: id.0,
                        op: node.op.name(),
                        origin: node.origin.clone(),
                        what,
                    })?;
                    Rc::new(result)
                }
            };
            observer(function, id, &value);
            values[id.index()] = Some(value);
            for i in &node.inputs {
                if last_use[i.index()] == id.index() {
                    values[i.index()] = None;
                }
            }
        }
        Ok(function.outputs.iter().map(|o| values[o.index()].clone().expect("outputs are kept")).collect())
    }

    fn node(&mut self, node: &Node, operands: &[&Tensor], frame: &Frame, symbols: &mut Symbols) -> Result<Tensor, String> {
        let module = self.module;
        match &node.op {
            Op::KvAppend { state } => {
                let state = frame.state(*state);
                kv_append(&module.states[state.index()], &mut self.states[state.index()], operands)?;
                return Ok(Tensor::state_token());
            }
            Op::Pool(_) => {
                // The number of runs is only known here.
                if let Some(Dim::Sym(s)) = node.ty.shape.first() {
                    bind_symbol(module, s.index(), runs(&operands[1].data).len(), symbols)?;
                }
            }
            _ => {}
        }
        let shape = concrete(module, &node.ty, symbols)?;
        let mut data = match &node.op {
            Op::Sdpa { state, score, mask } => {
                let state = frame.state(*state);
                let declared = &module.states[state.index()];
                let rounds = self.rounds_attention && declared.dtype == DType::BF16;
                sdpa(declared, &self.states[state.index()], score, mask, operands, rounds)?
            }
            op => evaluate(op, node.ty.dtype, operands, &shape)?,
        };
        if data.len() != shape.iter().product::<usize>() {
            return Err(format!("gave {} elements for the shape {shape:?}", data.len()));
        }
        round_all(node.ty.dtype, &mut data);
        Ok(Tensor { dtype: node.ty.dtype, shape, data })
    }
}

/// Checks a tensor against a declared type and binds the symbols of its shape.
fn bind(module: &Module, ty: &Type, tensor: &Tensor, symbols: &mut Symbols) -> Result<(), String> {
    let wrong = || format!("is {}{:?}, declared {}{}", tensor.dtype, tensor.shape, ty.dtype, module.shape_text(&ty.shape));
    if tensor.dtype != ty.dtype || tensor.shape.len() != ty.rank() || tensor.data.len() != tensor.shape.iter().product::<usize>() {
        return Err(wrong());
    }
    for (dim, extent) in ty.shape.iter().zip(&tensor.shape) {
        match dim {
            Dim::Const(n) if *n == *extent as u64 => {}
            Dim::Const(_) => return Err(wrong()),
            Dim::Sym(s) => bind_symbol(module, s.index(), *extent, symbols)?,
        }
    }
    Ok(())
}

fn bind_symbol(module: &Module, symbol: usize, extent: usize, symbols: &mut Symbols) -> Result<(), String> {
    let declared = &module.symbols[symbol];
    if extent < 1 || extent as u64 > declared.bound {
        return Err(format!("{} = {extent} is not in 1..={}", declared.name, declared.bound));
    }
    match symbols[symbol] {
        Some(bound) if bound != extent => Err(format!("{} is {bound} elsewhere and {extent} here", declared.name)),
        _ => {
            symbols[symbol] = Some(extent);
            Ok(())
        }
    }
}

/// The shape of a type with symbols replaced.
fn concrete(module: &Module, ty: &Type, symbols: &Symbols) -> Result<Vec<usize>, String> {
    let mut shape = Vec::with_capacity(ty.rank());
    let mut count = 1usize;
    for dim in &ty.shape {
        let extent = match dim {
            Dim::Const(n) => usize::try_from(*n).map_err(|e| e.to_string())?,
            Dim::Sym(s) => symbols[s.index()].ok_or_else(|| format!("{} is bound by no input", module.symbols[s.index()].name))?,
        };
        count = count.checked_mul(extent).filter(|n| *n <= ELEMENTS_MAX).ok_or("value is too large to interpret")?;
        shape.push(extent);
    }
    Ok(shape)
}
