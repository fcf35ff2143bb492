//! The reference interpreter: slow, scalar and obvious; the judge of every pass and every kernel.
//!
//! In: a module, a function that gives the value of each parameter, named inputs. Out: the entry's outputs. Every node is evaluated
//! by its formula in f64, sums run in storage order, and the result is rounded once to the node's element type ([`crate::tensor::round`]).
//! What [`crate::ops`] leaves open is fixed here: integer arithmetic wraps, integer division truncates toward zero and refuses 0,
//! floats convert to integers with truncation and saturation, `softmax` of a row of `-inf` is NaN.
//!
//! KV states live as long as the interpreter: a persistent state keeps what earlier runs appended, another one is cleared when a run
//! starts. The interpreter never keeps counters: rows say with `slot` and `kv_index` where they read and write.

use crate::build::op_name;
use crate::ops::{AttnExpr, AttnVar, Binary, Compare, Op, Pool, Reduce, Unary};
use crate::quant;
pub use crate::tensor::Tensor;
use crate::tensor::{convert, round, round_all, wrap};
use crate::types::{DType, Dim, FuncId, Function, Module, Node, ParamId, State, StateId, Type, ValueId};
use crate::verify::{VerifyErrors, verify};
use std::collections::{HashMap, HashSet};
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

/// Keys and values of one slot, `[position, kv_head, head_dim]`.
#[derive(Clone, Debug, Default)]
struct SlotCache {
    keys: Vec<f64>,
    values: Vec<f64>,
    written: Vec<bool>,
}

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
                        op: op_name(&node.op),
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
    let wrong = || format!("is {}{:?}, declared {}{}", tensor.dtype, tensor.shape, ty.dtype, crate::build::shape_text(module, &ty.shape));
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

/// Strides of `shape` walked along `out` (numpy broadcasting: 0 where it is stretched).
fn stretched(out: &[usize], shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; out.len()];
    let mut stride = 1;
    for (axis, extent) in shape.iter().enumerate().rev() {
        strides[axis + out.len() - shape.len()] = if *extent == 1 { 0 } else { stride };
        stride *= extent;
    }
    strides
}

/// Calls `visit` for every index of `shape` in row-major order with the offsets that the strides give.
fn walk<const N: usize>(shape: &[usize], strides: [&[usize]; N], mut visit: impl FnMut([usize; N])) {
    let mut index = vec![0; shape.len()];
    let mut offset = [0; N];
    for _ in 0..shape.iter().product::<usize>() {
        visit(offset);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            for (o, s) in offset.iter_mut().zip(strides) {
                *o += s[axis];
            }
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
            for (o, s) in offset.iter_mut().zip(strides) {
                *o -= s[axis] * shape[axis];
            }
        }
    }
}

fn elementwise(a: &Tensor, b: &Tensor, shape: &[usize], mut f: impl FnMut(f64, f64) -> f64) -> Vec<f64> {
    let mut out = Vec::with_capacity(shape.iter().product());
    let strides = [&stretched(shape, &a.shape)[..], &stretched(shape, &b.shape)[..]];
    walk(shape, strides, |[i, j]| out.push(f(a.data[i], b.data[j])));
    out
}

/// Everything but states: unrounded result of an op in row-major order.
fn evaluate(op: &Op, dtype: DType, operands: &[&Tensor], shape: &[usize]) -> Result<Vec<f64>, String> {
    let first = operands.first().copied();
    let x = || first.expect("the op has an operand");
    Ok(match op {
        Op::Const(value) => vec![*value],
        Op::Unary(u) => x().data.iter().map(|v| unary(*u, *v)).collect(),
        Op::Binary(b) if dtype.is_int() => {
            let mut zero = false;
            let out = elementwise(x(), operands[1], shape, |p, q| {
                zero |= *b == Binary::Div && q == 0.0;
                wrap(dtype, binary_int(*b, p as i64, q as i64))
            });
            if zero { return Err("integer division by zero".into()) } else { out }
        }
        Op::Binary(b) => elementwise(x(), operands[1], shape, |p, q| binary(*b, p, q)),
        Op::Compare(c) => elementwise(x(), operands[1], shape, |p, q| f64::from(u8::from(compare(*c, p, q)))),
        Op::Where => {
            let (a, b) = (operands[1], operands[2]);
            let strides = [&stretched(shape, &x().shape)[..], &stretched(shape, &a.shape)[..], &stretched(shape, &b.shape)[..]];
            let mut out = Vec::with_capacity(shape.iter().product());
            walk(shape, strides, |[c, i, j]| out.push(if x().data[c] != 0.0 { a.data[i] } else { b.data[j] }));
            out
        }
        Op::Convert if dtype.is_quantised() => quant::quantise(dtype, x()),
        Op::Convert => x().data.iter().map(|v| convert(x().dtype, dtype, *v)).collect(),
        Op::Reshape => x().data.clone(),
        Op::Permute { perm } => {
            let natural = strides_of(&x().shape);
            let strides: Vec<usize> = perm.iter().map(|p| natural[*p as usize]).collect();
            gather(x(), shape, &strides, 0)
        }
        Op::Slice { axis, start, .. } => {
            let natural = strides_of(&x().shape);
            gather(x(), shape, &natural, *start as usize * natural[*axis as usize])
        }
        Op::Cat { axis } => {
            let axis = *axis as usize;
            let outer: usize = shape[..axis].iter().product();
            let mut out = Vec::with_capacity(shape.iter().product());
            for o in 0..outer {
                for t in operands {
                    let inner: usize = t.shape[axis..].iter().product();
                    out.extend_from_slice(&t.data[o * inner..(o + 1) * inner]);
                }
            }
            out
        }
        Op::Expand => gather(x(), shape, &stretched(shape, &x().shape), 0),
        Op::Embedding => {
            let rows = x().shape[0];
            let width: usize = x().shape[1..].iter().product();
            let mut out = Vec::with_capacity(shape.iter().product());
            for id in &operands[1].data {
                if *id < 0.0 || *id >= rows as f64 {
                    return Err(format!("id {id} is not in a table of {rows} rows"));
                }
                out.extend_from_slice(&x().data[*id as usize * width..][..width]);
            }
            out
        }
        Op::IndexSelect => {
            let (width, index) = (last(x()), &operands[1].data);
            if let Some(id) = index.iter().find(|i| **i < 0.0 || **i >= width as f64) {
                return Err(format!("index {id} is not in an axis of {width}"));
            }
            x().data.chunks(width).flat_map(|row| index.iter().map(|i| row[*i as usize])).collect()
        }
        Op::Mm { rhs_t } => mm(x(), operands[1], *rhs_t),
        Op::Reduce { op, axis } => reduce(*op, x(), *axis as usize),
        Op::Softmax => {
            let mut out = x().data.clone();
            out.chunks_mut(last(x())).for_each(softmax);
            out
        }
        Op::RmsNorm { eps } => {
            let (d, w) = (last(x()), &operands[1].data);
            let mut out = Vec::with_capacity(x().data.len());
            for row in x().data.chunks(d) {
                let mean = row.iter().map(|v| v * v).sum::<f64>() / d as f64;
                let factor = 1.0 / (mean + eps).sqrt();
                out.extend(row.iter().zip(w).map(|(v, w)| v * factor * w));
            }
            out
        }
        Op::LayerNorm { eps } => {
            let (d, w, b) = (last(x()), &operands[1].data, &operands[2].data);
            let mut out = Vec::with_capacity(x().data.len());
            for row in x().data.chunks(d) {
                let mean = row.iter().sum::<f64>() / d as f64;
                let variance = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / d as f64;
                let factor = 1.0 / (variance + eps).sqrt();
                out.extend(row.iter().zip(w).zip(b).map(|((v, w), b)| (v - mean) * factor * w + b));
            }
            out
        }
        Op::Rope => rope(x(), operands[1], operands[2]),
        Op::Pool(pool) => self::pool(*pool, x(), operands[1]),
        Op::Input { .. } | Op::Param(_) | Op::Call { .. } | Op::KvAppend { .. } | Op::Sdpa { .. } => {
            unreachable!("{} is evaluated by the caller", op_name(op))
        }
    })
}

/// Extent of the last axis, at least 1 so that an empty tensor has no rows.
fn last(x: &Tensor) -> usize {
    x.shape.last().copied().unwrap_or(1).max(1)
}

fn strides_of(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

fn gather(x: &Tensor, shape: &[usize], strides: &[usize], start: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(shape.iter().product());
    walk(shape, [strides], |[i]| out.push(x.data[start + i]));
    out
}

fn unary(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Exp => libm::exp(x),
        Unary::Log => libm::log(x),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Tanh => libm::tanh(x),
        Unary::Erf => libm::erf(x),
        Unary::Sigmoid => sigmoid(x),
        Unary::Silu => x * sigmoid(x),
        Unary::Relu => binary(Binary::Maximum, x, 0.0),
        Unary::Gelu => x * 0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Unary::GeluTanh => 0.5 * x * (1.0 + libm::tanh((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x))),
        Unary::Not => f64::from(u8::from(x == 0.0)),
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

fn binary(op: Binary, a: f64, b: f64) -> f64 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Minimum | Binary::Maximum if a.is_nan() || b.is_nan() => f64::NAN,
        Binary::Minimum => a.min(b),
        Binary::Maximum => a.max(b),
        Binary::And => f64::from(u8::from(a != 0.0 && b != 0.0)),
        Binary::Or => f64::from(u8::from(a != 0.0 || b != 0.0)),
    }
}

fn binary_int(op: Binary, a: i64, b: i64) -> i64 {
    match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::Div => a.wrapping_div(if b == 0 { 1 } else { b }),
        Binary::Minimum => a.min(b),
        Binary::Maximum => a.max(b),
        Binary::And => a & b,
        Binary::Or => a | b,
    }
}

fn compare(op: Compare, a: f64, b: f64) -> bool {
    match op {
        Compare::Lt => a < b,
        Compare::Le => a <= b,
        Compare::Gt => a > b,
        Compare::Ge => a >= b,
        Compare::Eq => a == b,
        Compare::Ne => a != b,
    }
}

/// In place; `-inf` everywhere gives NaN.
fn softmax(row: &mut [f64]) {
    let sum = exponentials(row);
    row.iter_mut().for_each(|v| *v /= sum);
}

/// `exp(x - max)` of each; returns their sum.
fn exponentials(row: &mut [f64]) -> f64 {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter_mut().for_each(|v| *v = libm::exp(*v - max));
    row.iter().sum()
}

/// Each element is one sum in order of k; four columns side by side only hide the latency of the adds.
fn mm(a: &Tensor, b: &Tensor, rhs_t: bool) -> Vec<f64> {
    let (m, k) = (a.shape[0], a.shape[1]);
    let n = if rhs_t { b.shape[0] } else { b.shape[1] };
    let mut out = vec![0.0; m * n];
    if k == 0 || n == 0 {
        return out;
    }
    if !rhs_t {
        for (row, out_row) in a.data.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
            for (x, b_row) in row.iter().zip(b.data.chunks_exact(n)) {
                for (o, y) in out_row.iter_mut().zip(b_row) {
                    *o += x * y;
                }
            }
        }
        return out;
    }
    let mut j = 0;
    while j + 4 <= n {
        let w = |c: usize| &b.data[(j + c) * k..(j + c + 1) * k];
        let (w0, w1, w2, w3) = (w(0), w(1), w(2), w(3));
        for (i, row) in a.data.chunks_exact(k).enumerate() {
            let mut sum = [0.0f64; 4];
            for ((((x, y0), y1), y2), y3) in row.iter().zip(w0).zip(w1).zip(w2).zip(w3) {
                sum[0] += x * y0;
                sum[1] += x * y1;
                sum[2] += x * y2;
                sum[3] += x * y3;
            }
            out[i * n + j..][..4].copy_from_slice(&sum);
        }
        j += 4;
    }
    for c in j..n {
        for (i, row) in a.data.chunks_exact(k).enumerate() {
            out[i * n + c] = dot(row, &b.data[c * k..(c + 1) * k]);
        }
    }
    out
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sum = 0.0;
    for (x, y) in a.iter().zip(b) {
        sum += x * y;
    }
    sum
}

fn reduce(op: Reduce, x: &Tensor, axis: usize) -> Vec<f64> {
    let outer: usize = x.shape[..axis].iter().product();
    let count = x.shape[axis];
    let inner: usize = x.shape[axis + 1..].iter().product();
    let start = if op == Reduce::Amax { f64::NEG_INFINITY } else { 0.0 };
    let mut out = vec![start; outer * inner];
    for o in 0..outer {
        let into = &mut out[o * inner..(o + 1) * inner];
        for c in 0..count {
            for (acc, v) in into.iter_mut().zip(&x.data[(o * count + c) * inner..]) {
                *acc = binary(if op == Reduce::Amax { Binary::Maximum } else { Binary::Add }, *acc, *v);
            }
        }
        if op == Reduce::Mean {
            into.iter_mut().for_each(|v| *v /= count as f64);
        }
    }
    out
}

fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Vec<f64> {
    let (heads, d, half) = (x.shape[1], x.shape[2], cos.shape[1]);
    let mut out = x.data.clone();
    for t in 0..x.shape[0] {
        let (c, s) = (&cos.data[t * half..][..half], &sin.data[t * half..][..half]);
        for h in 0..heads {
            let head = &mut out[(t * heads + h) * d..][..d];
            for i in 0..half {
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * c[i] - b * s[i];
                head[i + half] = b * c[i] + a * s[i];
            }
        }
    }
    out
}

/// Maximal groups of consecutive rows with one slot.
fn runs(slots: &[f64]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (row, slot) in slots.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if slots[run.start] == *slot => run.end = row + 1,
            _ => runs.push(row..row + 1),
        }
    }
    runs
}

fn pool(op: Pool, x: &Tensor, slot: &Tensor) -> Vec<f64> {
    let d = x.shape[1];
    let mut out = Vec::new();
    for run in runs(&slot.data) {
        let rows = &x.data[run.start * d..run.end * d];
        match op {
            Pool::Cls => out.extend_from_slice(&rows[..d]),
            Pool::Last => out.extend_from_slice(&rows[rows.len() - d..]),
            Pool::Mean | Pool::Max => {
                let part = Tensor { dtype: x.dtype, shape: vec![run.len(), d], data: rows.to_vec() };
                out.extend(reduce(if op == Pool::Mean { Reduce::Mean } else { Reduce::Amax }, &part, 0));
            }
        }
    }
    out
}

/// The place of a row in the cache; both must be small non-negative numbers.
fn place(slot: &Tensor, kv_index: &Tensor, row: usize) -> Result<(i64, usize), String> {
    let (slot, index) = (slot.data[row] as i64, kv_index.data[row] as i64);
    if slot < 0 || !(0..KV_INDEX_MAX).contains(&index) {
        return Err(format!("row {row} has slot {slot} and kv_index {index}"));
    }
    Ok((slot, index as usize))
}

fn kv_append(state: &State, cache: &mut HashMap<i64, SlotCache>, operands: &[&Tensor]) -> Result<(), String> {
    let (k, v) = (operands[0], operands[1]);
    let width = (state.kv_heads * state.head_dim) as usize;
    let mut seen = HashSet::new();
    for row in 0..k.shape[0] {
        let (slot, index) = place(operands[2], operands[3], row)?;
        if !seen.insert((slot, index)) {
            return Err(format!("two rows write kv_index {index} of slot {slot}"));
        }
        let slot = cache.entry(slot).or_default();
        if slot.written.len() <= index {
            slot.written.resize(index + 1, false);
            slot.keys.resize((index + 1) * width, f64::NAN);
            slot.values.resize((index + 1) * width, f64::NAN);
        }
        slot.written[index] = true;
        for (from, to) in [(k, &mut slot.keys), (v, &mut slot.values)] {
            let (from, to) = (&from.data[row * width..][..width], &mut to[index * width..][..width]);
            if state.dtype.is_quantised() {
                // The row of a quantised type is a head's key or value.
                let heads = Tensor::new(k.dtype, &[state.kv_heads as usize, state.head_dim as usize], from.to_vec());
                to.copy_from_slice(&quant::quantise(state.dtype, &heads));
                continue;
            }
            for (x, y) in from.iter().zip(to) {
                *y = round(state.dtype, *x);
            }
        }
    }
    Ok(())
}

/// Variables of an attention expression at one place.
#[derive(Clone, Copy)]
struct Place {
    score: f64,
    head: f64,
    query: f64,
    key: f64,
}

/// Value of an attention expression; bool as 0 and 1.
fn attention(expr: &AttnExpr, at: Place) -> f64 {
    match expr {
        AttnExpr::Var(AttnVar::Score) => at.score,
        AttnExpr::Var(AttnVar::Head) => at.head,
        AttnExpr::Var(AttnVar::Query) => at.query,
        AttnExpr::Var(AttnVar::Key) => at.key,
        AttnExpr::Const(c) => *c,
        AttnExpr::Unary(u, x) => unary(*u, attention(x, at)),
        AttnExpr::Binary(b, x, y) => binary(*b, attention(x, at), attention(y, at)),
        AttnExpr::Compare(c, x, y) => f64::from(u8::from(compare(*c, attention(x, at), attention(y, at)))),
        AttnExpr::True => 1.0,
    }
}

fn sdpa(
    state: &State,
    cache: &HashMap<i64, SlotCache>,
    score: &AttnExpr,
    mask: &AttnExpr,
    operands: &[&Tensor],
    rounds: bool,
) -> Result<Vec<f64>, String> {
    let q = operands[0];
    let (rows, heads, d) = (q.shape[0], q.shape[1], q.shape[2]);
    let round_factors = |data: &mut [f64]| {
        if rounds {
            round_all(DType::BF16, data);
        }
    };
    let mut queries = q.data.clone();
    round_factors(&mut queries);
    let kv_heads = state.kv_heads as usize;
    let group = (heads / kv_heads.max(1)).max(1);
    let width = kv_heads * d;
    let mut key_counts: HashMap<i64, usize> = HashMap::new();
    for row in 0..rows {
        let (slot, index) = place(operands[2], operands[3], row)?;
        let count = key_counts.entry(slot).or_default();
        *count = (*count).max(index + 1);
    }
    for (slot, count) in &key_counts {
        let written = cache.get(slot).map_or(&[][..], |c| &c.written);
        if let Some(missing) = (0..*count).find(|i| !written.get(*i).is_some_and(|w| *w)) {
            return Err(format!("kv_index {missing} of slot {slot} was never written"));
        }
    }
    let mut out = vec![0.0; rows * heads * d];
    let (mut keys, mut weights) = (Vec::new(), Vec::new());
    for row in 0..rows {
        let (slot, index) = place(operands[2], operands[3], row)?;
        let cached = &cache[&slot];
        for head in 0..heads {
            let q_row = &queries[(row * heads + head) * d..][..d];
            let kv_start = head / group * d;
            keys.clear();
            weights.clear();
            for key in 0..key_counts[&slot] {
                let at = Place { score: f64::NAN, head: head as f64, query: index as f64, key: key as f64 };
                if attention(mask, at) != 0.0 {
                    let raw = dot(q_row, &cached.keys[key * width + kv_start..][..d]);
                    keys.push(key);
                    weights.push(attention(score, Place { score: raw, ..at }));
                }
            }
            let sum = exponentials(&mut weights);
            round_factors(&mut weights);
            weights.iter_mut().for_each(|w| *w /= sum);
            let out_row = &mut out[(row * heads + head) * d..][..d];
            for (key, weight) in keys.iter().zip(&weights) {
                for (o, v) in out_row.iter_mut().zip(&cached.values[key * width + kv_start..][..d]) {
                    *o += weight * v;
                }
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::parse;

    /// Runs `body` (nodes and a return) with inputs of their types; `decls` are further declarations.
    fn try_run(decls: &str, body: &str, inputs: &[(&str, Tensor)]) -> Result<Vec<Tensor>, InterpError> {
        let module = graph(decls, body, inputs);
        Interp::from_checkpoint(&module, checkpoint).run(inputs)
    }
    fn graph(decls: &str, body: &str, inputs: &[(&str, Tensor)]) -> Module {
        let types: Vec<String> = inputs.iter().map(|(n, t)| format!("%{n}: {}{:?}", t.dtype, t.shape)).collect();
        let text = format!("module {{ symbol S<=8 {decls} func @f({}) {{ {body} }} }}", types.join(", "));
        parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }
    fn checkpoint(name: &str) -> Result<Tensor, String> {
        match name {
            "w" => Ok(f32(&[2], [2.0, 3.0])),
            "v" => Ok(f32(&[2], [10.0, 100.0])),
            _ => Err("no such tensor".into()),
        }
    }
    fn f32(shape: &[usize], data: impl IntoIterator<Item = f64>) -> Tensor {
        Tensor::new(DType::F32, shape, data)
    }
    fn i32(data: &[i32]) -> Tensor {
        Tensor::i32(&[data.len()], data)
    }
    fn run(body: &str, inputs: &[(&str, Tensor)]) -> Tensor {
        try_run("", body, inputs).unwrap_or_else(|e| panic!("{e}")).swap_remove(0)
    }
    #[track_caller]
    fn near(found: &[f64], want: &[f64]) {
        assert_eq!(found.len(), want.len(), "{found:?}");
        for (f, w) in found.iter().zip(want) {
            assert!((f - w).abs() <= 1e-6 * w.abs().max(1.0) || f == w || (f.is_nan() && w.is_nan()), "{found:?} is not {want:?}");
        }
    }

    #[test]
    fn unary_ops() {
        let cases: [(&str, f64, f64); 20] = [
            ("neg", 1.5, -1.5),
            ("abs", -1.5, 1.5),
            ("exp", 1.0, std::f64::consts::E),
            ("log", 2.0, std::f64::consts::LN_2),
            ("log", 0.0, f64::NEG_INFINITY),
            ("sqrt", 2.25, 1.5),
            ("sqrt", -1.0, f64::NAN),
            ("rsqrt", 4.0, 0.5),
            ("tanh", 1.0, 0.761_594_155_955_764_9),
            ("erf", 1.0, 0.842_700_792_949_714_9),
            ("sigmoid", 0.0, 0.5),
            ("sigmoid", -100.0, 3.720_075_976e-44),
            ("silu", 1.0, 0.731_058_578_630_004_9),
            ("relu", -3.0, 0.0),
            ("relu", f64::NAN, f64::NAN),
            ("gelu", 1.0, 0.841_344_746_068_542_9),
            ("gelu", -1.0, -0.158_655_253_931_457_1),
            ("gelu_tanh", 1.0, 0.841_191_990_608_276_8),
            ("gelu_tanh", -1.0, -0.158_808_009_391_723_2),
            ("exp", 100.0, f64::INFINITY),
        ];
        for (op, x, want) in cases {
            near(&run(&format!("%y = {op} %x return %y"), &[("x", f32(&[1], [x]))]).data, &[want]);
        }
        let not = run("%y = not %x return %y", &[("x", Tensor::new(DType::Bool, &[2], [0.0, 1.0]))]);
        assert_eq!(not.data, [1.0, 0.0]);
    }

    #[test]
    fn results_are_rounded_once_to_their_type() {
        // 1 + 2^-8 is a tie in bf16; the sum in f32 would lose the last bit that decides it.
        let x = Tensor::new(DType::BF16, &[1], [1.0]);
        let y = Tensor::new(DType::BF16, &[1], [2f64.powi(-8)]);
        assert_eq!(run("%z = add %x, %y return %z", &[("x", x.clone()), ("y", y)]).data, [1.0]);
        assert_eq!(run("%z = const 0.1 : bf16 return %z", &[("x", x)]).data, [0.10009765625]);
        let x = f32(&[2], [1e-30, 3.0]);
        assert_eq!(run("%z = convert %x : f16[2] return %z", &[("x", x.clone())]).data, [0.0, 3.0]);
        assert_eq!(run("%y = neg %x %z = convert %y : u8[2] return %z", &[("x", x)]).data, [0.0, 0.0]);
    }

    #[test]
    fn binary_ops_and_comparisons() {
        let pair = |a: f64, b: f64| [("x", f32(&[1], [a])), ("y", f32(&[1], [b]))];
        let cases = [("add", 3.5), ("sub", 0.5), ("mul", 3.0), ("div", 4.0 / 3.0), ("minimum", 1.5), ("maximum", 2.0)];
        for (op, want) in cases {
            near(&run(&format!("%z = {op} %x, %y return %z"), &pair(2.0, 1.5)).data, &[want]);
        }
        assert!(run("%z = maximum %x, %y return %z", &pair(1.0, f64::NAN)).data[0].is_nan());
        let bits = |a: [f64; 4]| Tensor::new(DType::Bool, &[4], a);
        let both = [("x", bits([0.0, 0.0, 1.0, 1.0])), ("y", bits([0.0, 1.0, 0.0, 1.0]))];
        assert_eq!(run("%z = and %x, %y return %z", &both).data, [0.0, 0.0, 0.0, 1.0]);
        assert_eq!(run("%z = or %x, %y return %z", &both).data, [0.0, 1.0, 1.0, 1.0]);
        for (op, want) in [
            ("lt", [1.0, 0.0, 0.0]),
            ("le", [1.0, 1.0, 0.0]),
            ("gt", [0.0, 0.0, 1.0]),
            ("ge", [0.0, 1.0, 1.0]),
            ("eq", [0.0, 1.0, 0.0]),
            ("ne", [1.0, 0.0, 1.0]),
        ] {
            let z = run(&format!("%z = {op} %x, %y return %z"), &[("x", i32(&[1, 2, 3])), ("y", i32(&[2]))]);
            assert_eq!((z.dtype, &z.data[..]), (DType::Bool, &want[..]), "{op}");
        }
    }

    #[test]
    fn integers_wrap_and_divide_toward_zero() {
        let pair = |a: i32, b: i32| [("x", i32(&[a])), ("y", i32(&[b]))];
        assert_eq!(run("%z = add %x, %y return %z", &pair(i32::MAX, 1)).data, [f64::from(i32::MIN)]);
        assert_eq!(run("%z = mul %x, %y return %z", &pair(i32::MAX, i32::MAX)).data, [1.0]);
        assert_eq!(run("%z = div %x, %y return %z", &pair(-7, 2)).data, [-3.0]);
        assert!(try_run("", "%z = div %x, %y return %z", &pair(1, 0)).unwrap_err().to_string().contains("division by zero"));
    }

    #[test]
    fn broadcasting() {
        let (x, y) = (f32(&[2, 1, 2], [1.0, 2.0, 3.0, 4.0]), f32(&[3, 1], [10.0, 20.0, 30.0]));
        let z = run("%z = add %x, %y return %z", &[("x", x), ("y", y)]);
        assert_eq!(z.shape, [2, 3, 2]);
        assert_eq!(z.data, [11.0, 12.0, 21.0, 22.0, 31.0, 32.0, 13.0, 14.0, 23.0, 24.0, 33.0, 34.0]);
        let cond = Tensor::new(DType::Bool, &[2, 1], [1.0, 0.0]);
        let z = run("%z = where %c, %x, %y return %z", &[("c", cond), ("x", f32(&[2], [1.0, 2.0])), ("y", f32(&[], [9.0]))]);
        assert_eq!((&z.shape[..], &z.data[..]), (&[2, 2][..], &[1.0, 2.0, 9.0, 9.0][..]));
        let z = run("%z = expand %x : f32[2, 2, 3] return %z", &[("x", f32(&[2, 1], [1.0, 2.0]))]);
        assert_eq!(z.data, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    }

    #[test]
    fn movement() {
        let x = || [("x", f32(&[2, 3], (0..6).map(f64::from)))];
        assert_eq!(run("%y = reshape %x : f32[3, 2] return %y", &x()).data, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(run("%y = permute %x {perm=[1, 0]} return %y", &x()).data, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(run("%y = slice %x {axis=1, start=1, end=3} return %y", &x()).data, [1.0, 2.0, 4.0, 5.0]);
        assert_eq!(run("%y = slice %x {axis=0, start=1, end=2} return %y", &x()).data, [3.0, 4.0, 5.0]);
        let body = "%s = slice %x {axis=1, start=0, end=1} %y = cat %x, %s, %s {axis=1} return %y";
        assert_eq!(run(body, &x()).data, [0.0, 1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 5.0, 3.0, 3.0]);
        let y = run("%y = cat %x, %x {axis=0} return %y", &x());
        assert_eq!((y.shape[0], y.data[6]), (4, 0.0));
        let three = run("%a = reshape %x : f32[1, 2, 3] %y = permute %a {perm=[2, 0, 1]} return %y", &x());
        assert_eq!((&three.shape[..], &three.data[..]), (&[3, 1, 2][..], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0][..]));
    }

    #[test]
    fn embedding_reads_rows_and_checks_ids() {
        let table = || f32(&[3, 2], (0..6).map(f64::from));
        let run_ids = |ids: &[i32]| try_run("", "%y = embedding %t, %i return %y", &[("t", table()), ("i", i32(ids))]);
        assert_eq!(run_ids(&[2, 0, 2]).unwrap()[0].data, [4.0, 5.0, 0.0, 1.0, 4.0, 5.0]);
        assert!(run_ids(&[3]).unwrap_err().to_string().contains("id 3 is not in a table of 3 rows"));
        assert!(run_ids(&[-1]).is_err());
    }

    #[test]
    fn mm_both_ways_and_odd_shapes() {
        // 5 columns: four side by side and a rest.
        let a = f32(&[2, 3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let b: Vec<f64> = (0..15).map(f64::from).collect();
        let bt: Vec<f64> = (0..5).flat_map(|n| (0..3).map(move |k| f64::from(k * 5 + n))).collect();
        let want = [40.0, 46.0, 52.0, 58.0, 64.0, 85.0, 100.0, 115.0, 130.0, 145.0];
        let plain = run("%y = mm %a, %b return %y", &[("a", a.clone()), ("b", f32(&[3, 5], b))]);
        let transposed = run("%y = mm %a, %b {rhs_t} return %y", &[("a", a.clone()), ("b", Tensor::new(DType::BF16, &[5, 3], bt))]);
        assert_eq!((plain.dtype, &plain.data[..]), (DType::F32, &want[..]));
        assert_eq!(transposed.data, want);
        // The sum is exact enough to keep what f32 would lose.
        let x = f32(&[1, 3], [1e8, 1.0, -1e8]);
        assert_eq!(run("%y = mm %a, %b return %y", &[("a", x), ("b", f32(&[3, 1], [1.0; 3]))]).data, [1.0]);
    }

    #[test]
    fn reductions_and_softmax() {
        let x = || [("x", f32(&[2, 3], [1.0, 5.0, 3.0, -1.0, -2.0, -6.0]))];
        assert_eq!(run("%y = sum %x {axis=1} return %y", &x()).data, [9.0, -9.0]);
        assert_eq!(run("%y = mean %x {axis=1} return %y", &x()).data, [3.0, -3.0]);
        assert_eq!(run("%y = amax %x {axis=1} return %y", &x()).data, [5.0, -1.0]);
        let y = run("%y = sum %x {axis=0} return %y", &x());
        assert_eq!((&y.shape[..], &y.data[..]), (&[1, 3][..], &[0.0, 3.0, -3.0][..]));
        let ln2 = std::f64::consts::LN_2;
        let soft = run("%y = softmax %x return %y", &[("x", f32(&[2, 2], [0.0, ln2, 1000.0, f64::NEG_INFINITY]))]);
        near(&soft.data, &[1.0 / 3.0, 2.0 / 3.0, 1.0, 0.0]);
        assert!(run("%y = softmax %x return %y", &[("x", f32(&[1], [f64::NEG_INFINITY]))]).data[0].is_nan());
    }

    #[test]
    fn norms() {
        let x = || f32(&[1, 2], [3.0, 4.0]);
        let inputs = [("x", x()), ("w", f32(&[2], [1.0, 2.0])), ("b", f32(&[2], [0.5, 0.25]))];
        // mean of squares 12.5; with eps 12.5 the root is 5
        near(&run("%y = rms_norm %x, %w {eps=12.5} return %y", &inputs).data, &[0.6, 1.6]);
        // mean 3.5, variance 0.25; with eps 0.75 the root is 1
        near(&run("%y = layer_norm %x, %w, %b {eps=0.75} return %y", &inputs).data, &[0.0, 1.25]);
    }

    #[test]
    fn rope_turns_pairs_and_copies_the_rest() {
        // A quarter turn of the first four of six elements in row 0, none in row 1; two heads.
        let x = f32(&[2, 2, 6], (0..24).map(f64::from));
        let cos = f32(&[2, 2], [0.0, 0.0, 1.0, 1.0]);
        let sin = f32(&[2, 2], [1.0, 1.0, 0.0, 0.0]);
        let y = run("%y = rope %x, %c, %s return %y", &[("x", x.clone()), ("c", cos), ("s", sin)]);
        assert_eq!(y.data[..12], [-2.0, -3.0, 0.0, 1.0, 4.0, 5.0, -8.0, -9.0, 6.0, 7.0, 10.0, 11.0]);
        assert_eq!(y.data[12..], x.data[12..]);
    }

    #[test]
    fn pooling_binds_the_number_of_runs() {
        let inputs = [("x", f32(&[4, 1], [1.0, 5.0, 3.0, 7.0])), ("s", i32(&[0, 0, 2, 0]))];
        for (op, want) in [("mean", [3.0, 3.0, 7.0]), ("cls", [1.0, 3.0, 7.0]), ("max", [5.0, 3.0, 7.0]), ("last", [5.0, 3.0, 7.0])] {
            let y = run(&format!("%y = pool_{op} %x, %s return %y"), &inputs);
            assert_eq!((&y.shape[..], &y.data[..]), (&[3, 1][..], &want[..]), "{op}");
        }
    }

    const ATTENTION: &str =
        "%kv = kv_append %k, %v, %s, %i {state=@kv} %y = sdpa %q, %kv, %s, %i {state=@kv, score=SCORE, mask=MASK} return %y";
    fn attend(score: &str, mask: &str) -> String {
        ATTENTION.replace("SCORE", &format!("{score:?}")).replace("MASK", &format!("{mask:?}"))
    }

    #[test]
    fn index_select_reorders_the_last_axis() {
        let x = f32(&[2, 3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let y = run("%y = index_select %x, %i : f32[2, 4] return %y", &[("x", x.clone()), ("i", i32(&[2, 0, 1, 2]))]);
        assert_eq!(y.data, [3.0, 1.0, 2.0, 3.0, 6.0, 4.0, 5.0, 6.0]);
        assert!(try_run("", "%y = index_select %x, %i : f32[2, 1] return %y", &[("x", x), ("i", i32(&[3]))]).is_err());
    }

    #[test]
    fn sdpa_with_window_and_grouped_heads() {
        // 3 rows, 4 query heads over 2 kv heads of width 1; zero queries weigh all visible keys alike.
        let decl = "state @kv {kv_heads=2, head_dim=1, dtype=f32}";
        let inputs = [
            ("q", f32(&[3, 4, 1], [0.0; 12])),
            ("k", f32(&[3, 2, 1], [1.0; 6])),
            ("v", f32(&[3, 2, 1], [1.0, 10.0, 2.0, 20.0, 4.0, 40.0])),
            ("s", i32(&[0, 0, 0])),
            ("i", i32(&[0, 1, 2])),
        ];
        let y = |mask: &str| try_run(decl, &attend("score", mask), &inputs).unwrap().swap_remove(0).data;
        near(&y("key <= query & key > query - 2"), &[1.0, 1.0, 10.0, 10.0, 1.5, 1.5, 15.0, 15.0, 3.0, 3.0, 30.0, 30.0]);
        let all = 7.0 / 3.0;
        near(&y("true"), &[all, all, 10.0 * all, 10.0 * all].repeat(3));
        // Head h sees key h only; head 3 sees none and gives 0.
        near(&y("key == head"), &[1.0, 2.0, 40.0, 0.0].repeat(3));
    }

    #[test]
    fn sdpa_scores() {
        let decl = "state @kv {kv_heads=1, head_dim=2, dtype=f32}";
        let ln2 = std::f64::consts::LN_2;
        let inputs = [
            ("q", f32(&[2, 1, 2], [9.0, 9.0, 2.0 * ln2, 1.0])),
            ("k", f32(&[2, 1, 2], [0.0, 0.0, 1.0, 0.0])),
            ("v", f32(&[2, 1, 2], [3.0, 0.0, 0.0, 3.0])),
            ("s", i32(&[1, 1])),
            ("i", i32(&[0, 1])),
        ];
        let y = |score: &str| try_run(decl, &attend(score, "key <= query"), &inputs).unwrap().swap_remove(0).data;
        // Row 1 scores 0 and 2 ln 2; halved the weights are 1/3 and 2/3.
        near(&y("score * 0.5"), &[3.0, 0.0, 1.0, 2.0]);
        near(&y("minimum(score, 0)"), &[3.0, 0.0, 1.5, 1.5]);
        near(&y("score - 1e9 * key"), &[3.0, 0.0, 3.0, 0.0]);
        let e = libm::exp(libm::tanh(f64::from((2.0 * ln2) as f32) / 3.0) * 3.0);
        near(&y("tanh(score / 3) * 3"), &[3.0, 0.0, 3.0 / (1.0 + e), 3.0 * e / (1.0 + e)]);
    }

    #[test]
    fn sdpa_that_rounds_its_factors() {
        let text = attend("score", "true");
        let one = |dtype: &str, rounds: bool| {
            let inputs = [
                ("q", f32(&[2, 1, 1], [1.003; 2])),
                ("k", f32(&[2, 1, 1], [0.0, -1.0])),
                ("v", f32(&[2, 1, 1], [0.0, 1.0])),
                ("s", i32(&[0, 0])),
                ("i", i32(&[0, 1])),
            ];
            let module = graph(&format!("state @kv {{kv_heads=1, head_dim=1, dtype={dtype}}}"), &text, &inputs);
            Interp::from_checkpoint(&module, checkpoint).rounding_attention(rounds).run(&inputs).unwrap().swap_remove(0).data
        };
        // 1.003 becomes 1, exp(-1) 188 / 512; their sum is not rounded.
        let (query, e) = (f64::from(1.003_f32), libm::exp(-1.0));
        let exact = libm::exp(-query) / (1.0 + libm::exp(-query));
        near(&one("bf16", true), &[188.0 / 512.0 / (1.0 + e); 2]);
        near(&one("bf16", false), &[exact; 2]);
        near(&one("f32", true), &[exact; 2]);
    }

    #[test]
    fn slots_are_apart_and_keys_reach_to_the_largest_index_of_the_step() {
        let decl = "state @kv {kv_heads=1, head_dim=1, dtype=f32}";
        let inputs = [
            ("q", f32(&[4, 1, 1], [0.0; 4])),
            ("k", f32(&[4, 1, 1], [0.0; 4])),
            ("v", f32(&[4, 1, 1], [1.0, 2.0, 30.0, 50.0])),
            ("s", i32(&[0, 0, 7, 7])),
            ("i", i32(&[0, 1, 0, 1])),
        ];
        let y = try_run(decl, &attend("score", "true"), &inputs).unwrap();
        near(&y[0].data, &[1.5, 1.5, 40.0, 40.0]);
    }

    fn step(v: f64, slot: i32, index: i32) -> [(&'static str, Tensor); 5] {
        let one = |x: f64| f32(&[1, 1, 1], [x]);
        [("q", one(0.0)), ("k", one(0.0)), ("v", one(v)), ("s", i32(&[slot])), ("i", i32(&[index]))]
    }

    #[test]
    fn persistent_states_live_on_and_round() {
        let module = graph("state @kv {kv_heads=1, head_dim=1, dtype=bf16, persistent}", &attend("score", "true"), &step(0.0, 0, 0));
        let mut interp = Interp::from_checkpoint(&module, checkpoint);
        let mut run = |v, slot, index| interp.run(&step(v, slot, index)).map(|y| y[0].data[0]);
        // 1 + 2^-8 + 2^-20 rounds up in bf16.
        near(&[run(1.0 + 2f64.powi(-8) + 2f64.powi(-20), 0, 0).unwrap()], &[1.0078125]);
        // A tie goes to even: 3.
        near(&[run(2.9921875, 0, 1).unwrap()], &[2.00390625]);
        // Another slot; a rewind and overwrite; only keys below the step's largest index count.
        near(&[run(9.0, 1, 0).unwrap()], &[9.0]);
        near(&[run(5.0, 0, 0).unwrap()], &[5.0]);
        near(&[run(4.0, 0, 2).unwrap()], &[4.0]);
        let gap = run(4.0, 0, 4).unwrap_err().to_string();
        assert!(gap.contains("kv_index 3 of slot 0 was never written"), "{gap}");
        interp.reset_state();
        assert!(interp.run(&step(1.0, 0, 1)).unwrap_err().to_string().contains("kv_index 0 of slot 0"));
    }

    #[test]
    fn other_states_are_cleared_and_bad_places_refused() {
        let module = graph("state @kv {kv_heads=1, head_dim=1, dtype=f32}", &attend("score", "true"), &step(0.0, 0, 0));
        let mut interp = Interp::from_checkpoint(&module, checkpoint);
        interp.run(&step(1.0, 0, 0)).unwrap();
        assert!(interp.run(&step(1.0, 0, 1)).is_err());
        assert!(interp.run(&step(1.0, -1, 0)).unwrap_err().to_string().contains("slot -1"));
        let decl = "state @kv {kv_heads=1, head_dim=1, dtype=f32}";
        let mut twice = step(0.0, 0, 0);
        for (name, t) in &mut twice {
            *t = if matches!(*name, "s" | "i") { i32(&[0, 0]) } else { f32(&[2, 1, 1], [0.0, 0.0]) };
        }
        assert!(try_run(decl, &attend("score", "true"), &twice).unwrap_err().to_string().contains("two rows write"));
    }

    const CALLS: &str = r#"module {
      symbol T<=2
      param @w : f32[2] = source "w"
      param @v : f32[2] = source "v"
      state @a {kv_heads=1, head_dim=2, dtype=f32, persistent}
      state @b {kv_heads=1, head_dim=2, dtype=f32, persistent}
      func @scale(%x: f32[T, 2]) params(@w) { %1 = mul %x, @w return %1 }
      func @layer(%x: f32[T, 2], %i: i32[T]) params(@w) states(@a) {
        %2 = call @scale(%x) params(@w) : f32[T, 2]
        %3 = reshape %2 : f32[T, 1, 2]
        %z = sub %i, %i
        %4 = kv_append %3, %3, %z, %i {state=@a}
        %5 = sdpa %3, %4, %z, %i {state=@a, score="0", mask="key <= query"}
        %6 = reshape %5 : f32[T, 2]
        return %6
      }
      func @main(%x: f32[T, 2], %i: i32[T]) {
        %2 = call @layer(%x, %i) params(@w) states(@a) : f32[T, 2]   // layers.0
        %3 = call @layer(%2, %i) params(@v) states(@b) : f32[T, 2]   // layers.1
        return %2, %3
      }
      main @main
    }"#;

    #[test]
    fn calls_replace_weights_and_states_through_several_levels() {
        let module = parse(CALLS).unwrap();
        let mut interp = Interp::from_checkpoint(&module, checkpoint);
        let mut seen = Vec::new();
        let mut observer = |f: &Function, v: ValueId, _: &Tensor| seen.push(format!("{}.{}", f.name, v.0));
        let y = interp.run_observed(&[("i", i32(&[0])), ("x", f32(&[1, 2], [1.0, 1.0]))], &mut observer).unwrap();
        assert_eq!((&y[0].data[..], &y[1].data[..]), (&[2.0, 3.0][..], &[20.0, 300.0][..]));
        assert_eq!(seen[..6], ["main.0", "main.1", "layer.0", "layer.1", "scale.0", "scale.1"]);
        assert_eq!(seen.iter().filter(|s| *s == "scale.2").count(), 2);
        // Both layers kept their own keys.
        let y = interp.run(&[("i", i32(&[1])), ("x", f32(&[1, 2], [3.0, 3.0]))]).unwrap();
        assert_eq!((&y[0].data[..], &y[1].data[..]), (&[4.0, 6.0][..], &[30.0, 450.0][..]));
    }

    #[test]
    fn inputs_are_checked() {
        let module = parse(CALLS).unwrap();
        let run = |inputs: &[(&str, Tensor)]| Interp::from_checkpoint(&module, checkpoint).run(inputs).unwrap_err().to_string();
        let (x, i) = (|n: usize| ("x", f32(&[n, 2], vec![1.0; 2 * n])), |n: usize| ("i", Tensor::i32(&[n], &vec![0; n])));
        assert_eq!(run(&[x(1)]), r#"input "i": missing"#);
        assert_eq!(run(&[x(1), i(1), x(1)]), r#"input "x": unknown or given twice"#);
        assert_eq!(run(&[x(1), i(1), ("z", f32(&[], [0.0]))]), r#"input "z": unknown or given twice"#);
        assert_eq!(run(&[x(3), i(3)]), r#"input "x": T = 3 is not in 1..=2"#);
        assert_eq!(run(&[x(0), i(0)]), r#"input "x": T = 0 is not in 1..=2"#);
        assert_eq!(run(&[x(1), i(2)]), r#"input "i": T is 1 elsewhere and 2 here"#);
        assert_eq!(run(&[x(1), ("i", f32(&[1], [0.0]))]), r#"input "i": is f32[1], declared i32[T]"#);
    }

    #[test]
    fn parameters_are_checked_and_read_once() {
        let module = parse(CALLS).unwrap();
        let inputs = [("x", f32(&[1, 2], [1.0, 1.0])), ("i", i32(&[0]))];
        let error = Interp::from_checkpoint(&module, |_| Ok(f32(&[3], [0.0; 3]))).run(&inputs).unwrap_err().to_string();
        assert_eq!(error, r#"parameter "w": is f32[3], declared f32[2]"#);
        let reads = std::cell::Cell::new(0);
        let mut interp = Interp::new(
            &module,
            Box::new(|id| {
                reads.set(reads.get() + 1);
                checkpoint(&module.params[id.index()].name)
            }),
        );
        interp.run(&inputs).unwrap();
        interp.run(&inputs).unwrap();
        assert_eq!(reads.get(), 2);
    }

    #[test]
    fn broken_modules_and_nodes_are_named() {
        let module = graph("", "%y = neg %x : f32[3] return %y", &[("x", f32(&[2], [0.0; 2]))]);
        let error = Interp::from_checkpoint(&module, checkpoint).run(&[]).unwrap_err();
        assert!(matches!(error, InterpError::Module(_)) && error.to_string().contains("^ error: the op gives f32[2]"), "{error}");
        let error = try_run("", "%y = embedding %t, %i   // embed_tokens\n return %y", &[("t", f32(&[1], [0.0])), ("i", i32(&[4]))]);
        assert_eq!(error.unwrap_err().to_string(), r#"@f %2 = embedding (from "embed_tokens"): id 4 is not in a table of 1 rows"#);
    }
}
