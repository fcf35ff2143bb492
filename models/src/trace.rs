//! Tracing: an architecture's forward code, run with symbolic tensors over a [`Builder`], becomes the graph of one bucket.
//!
//! In: an architecture, its checkpoint's index and [`TraceOptions`]. Out: a module whose entry runs over a table of rows
//! (`token, slot, position, kv_index, segment, logit_row`).

use crate::arch::{Architecture, Task};
use crate::weights::WeightIndex;
use rcompile_graph::build::Built;
use rcompile_graph::{Binary, Builder, DType, Dim, Module, Pool, Recipe, Reduce, State, StateId, Type, TypeError, Unary, ValueId};

/// What a bucket is traced for.
#[derive(Clone, Debug)]
pub struct TraceOptions {
    /// Capacity in rows, the bound of `T`.
    pub bucket: u64,
    /// Bound of the rows that want logits, `L`.
    pub logit_rows: u64,
    /// Bound of the runs in a step, `S`.
    pub runs: u64,
    /// Positions per sequence: rows of the rotary tables.
    pub ctx_size: u64,
    /// Type of the KV cache.
    pub kv_dtype: DType,
    /// `--dtype`: matrices are stored in this type instead of the checkpoint's.
    pub weight_dtype: Option<DType>,
    /// Canonical names of tensors that keep the checkpoint's type all the same.
    pub as_stored: Vec<String>,
}

/// Everything forward code needs: the builder, the row tables, the weights.
pub struct Trace<'a> {
    /// The graph under construction.
    pub b: Builder,
    /// What the bucket is traced for.
    pub options: &'a TraceOptions,
    /// Rows.
    pub t: Dim,
    /// `i32[T]` tables.
    pub token: ValueId,
    /// KV slot of each row.
    pub slot: ValueId,
    /// Position for RoPE or the position embedding.
    pub position: ValueId,
    /// Place in the slot.
    pub kv_index: ValueId,
    /// Token type (encoders).
    pub segment: ValueId,
    /// `i32[L]`: rows that want logits (decoders).
    pub logit_row: ValueId,
    weights: &'a WeightIndex,
}

impl Trace<'_> {
    /// A tensor of the checkpoint, by canonical name, of this shape; matrices in the type of `--dtype`, unless they are codes.
    pub fn weight(&mut self, name: &str, shape: &[usize]) -> ValueId {
        let stored = self.stored(name);
        let source = Recipe::Source { tensor: name.to_string() };
        let dims = shape.iter().map(|n| Dim::from(*n));
        match self.wanted_type(name) {
            Some(dtype) if dtype != stored && shape.len() > 1 && stored.is_float() => {
                self.b.param(name, Type::new(dtype, dims), Recipe::Convert { of: Box::new(source), dtype })
            }
            _ => self.b.param(name, Type::new(stored, dims), source),
        }
    }
    /// Type of a tensor in the checkpoint. Panics where the architecture did not list it, so that nobody looked whether it is there.
    fn stored(&self, name: &str) -> DType {
        self.weights.dtype(name).unwrap_or_else(|| panic!("{name}: not among the tensors that the architecture lists"))
    }
    /// Type of `--dtype` for a matrix.
    fn wanted_type(&self, name: &str) -> Option<DType> {
        self.options.weight_dtype.filter(|_| self.options.as_stored.iter().all(|kept| kept != name))
    }
    /// A weight stored `[input, output]`, read as `[output, input]`.
    pub fn weight_transposed(&mut self, name: &str, input: usize, output: usize) -> ValueId {
        let stored = self.stored(name);
        let dtype = self.wanted_type(name).unwrap_or(stored);
        let mut recipe = Recipe::Transpose(Box::new(Recipe::Source { tensor: name.to_string() }));
        if dtype != stored {
            recipe = Recipe::Convert { of: Box::new(recipe), dtype };
        }
        self.b.param(&format!("{name}.t"), Type::new(dtype, [output.into(), input.into()]), recipe)
    }
    /// A vector, widened: `f32[len]`.
    pub fn vector(&mut self, name: &str, len: usize) -> Built {
        let w = self.weight(name, &[len]);
        self.b.convert(w, DType::F32)
    }
    /// `x W^T (+ bias)`, `x: [.., input]`: `name.weight: [output, input]`, `name.bias: [output]`.
    pub fn linear(&mut self, x: ValueId, name: &str, input: usize, output: usize, bias: bool) -> Built {
        let y = self.matmul(x, &format!("{name}.weight"), input, output)?;
        self.bias(y, name, output, bias)
    }
    /// `x W^T`, `x: [.., input]`, `matrix: [output, input]`. A matrix of codes may want its inputs in another order
    /// ([`crate::quantised::CodedMatrix::order`]).
    pub fn matmul(&mut self, x: ValueId, matrix: &str, input: usize, output: usize) -> Built {
        let x = match self.weights.coded(matrix).and_then(|coded| coded.order.clone()) {
            None => x,
            Some(order) => {
                let ty = Type::new(DType::I32, [input.into()]);
                let index = self.b.param(&order, ty, Recipe::Source { tensor: order.clone() });
                self.b.index_select(x, index)?
            }
        };
        let w = self.weight(matrix, &[output, input]);
        self.b.linear(x, w)
    }
    /// `x W (+ bias)`, `x: [.., input]`: HF `Conv1D`, `name.weight: [input, output]`, `name.bias: [output]`.
    pub fn conv1d(&mut self, x: ValueId, name: &str, input: usize, output: usize) -> Built {
        let w = self.weight_transposed(&format!("{name}.weight"), input, output);
        let y = self.b.linear(x, w)?;
        self.bias(y, name, output, true)
    }
    fn bias(&mut self, y: ValueId, name: &str, output: usize, bias: bool) -> Built {
        if !bias {
            return Ok(y);
        }
        let b = self.vector(&format!("{name}.bias"), output)?;
        self.b.add(y, b)
    }
    /// `x * rsqrt(mean(x^2) + eps) * w`, as HF `LlamaRMSNorm` writes it; `x: [.., width]`.
    pub fn rms_norm(&mut self, x: ValueId, name: &str, width: usize, eps: f64) -> Built {
        let axis = self.b.ty(x).rank() as u32 - 1;
        let square = self.b.mul(x, x)?;
        let mean = self.b.reduce(Reduce::Mean, square, axis)?;
        let eps = self.b.constant(eps);
        let sum = self.b.add(mean, eps)?;
        let root = self.b.unary(Unary::Rsqrt, sum)?;
        let normed = self.b.mul(x, root)?;
        let w = self.vector(&format!("{name}.weight"), width)?;
        self.b.mul(normed, w)
    }
    /// `(x - mean) * rsqrt(var + eps) * w + b`, `x: [.., width]`.
    pub fn layer_norm(&mut self, x: ValueId, name: &str, width: usize, eps: f64) -> Built {
        let axis = self.b.ty(x).rank() as u32 - 1;
        let mean = self.b.reduce(Reduce::Mean, x, axis)?;
        let centred = self.b.sub(x, mean)?;
        let square = self.b.mul(centred, centred)?;
        let var = self.b.reduce(Reduce::Mean, square, axis)?;
        let eps = self.b.constant(eps);
        let sum = self.b.add(var, eps)?;
        let root = self.b.unary(Unary::Rsqrt, sum)?;
        let normed = self.b.mul(centred, root)?;
        let w = self.vector(&format!("{name}.weight"), width)?;
        let scaled = self.b.mul(normed, w)?;
        let bias = self.vector(&format!("{name}.bias"), width)?;
        self.b.add(scaled, bias)
    }
    /// Rotary embedding of the first `2 * half` elements of each head, as HF `apply_rotary_pos_emb`; `x: [T, h, d]`,
    /// `cos, sin: [T, half]`.
    pub fn rope(&mut self, x: ValueId, cos: ValueId, sin: ValueId, half: usize, head_dim: usize) -> Built {
        let b = &mut self.b;
        let table = [self.t, 1.into(), half.into()];
        let (c, s) = (b.reshape(cos, &table)?, b.reshape(sin, &table)?);
        let (x1, x2) = (b.slice(x, 2, 0, half)?, b.slice(x, 2, half, 2 * half)?);
        let (x1c, x2s) = (b.mul(x1, c)?, b.mul(x2, s)?);
        let (x2c, x1s) = (b.mul(x2, c)?, b.mul(x1, s)?);
        let mut parts = vec![b.sub(x1c, x2s)?, b.add(x2c, x1s)?];
        if 2 * half < head_dim {
            parts.push(b.slice(x, 2, 2 * half, head_dim)?);
        }
        b.cat(&parts, 2)
    }
    /// `x` through `count` layers, each `[T, d] -> [T, d]`. The only way to open one: passes know layers by their scopes.
    pub fn layers(&mut self, count: usize, mut x: ValueId, mut layer: impl FnMut(&mut Self, usize, ValueId) -> Built) -> Built {
        for n in 0..count {
            self.b.layer_begin(n);
            x = layer(self, n, x)?;
            self.b.scope_end();
        }
        Ok(x)
    }
    /// `[T, heads * head_dim] -> [T, heads, head_dim]`
    pub fn split_heads(&mut self, x: ValueId, heads: usize, head_dim: usize) -> Built {
        self.b.reshape(x, &[self.t, heads.into(), head_dim.into()])
    }
    /// `[T, heads, head_dim] -> [T, heads * head_dim]`
    pub fn join_heads(&mut self, x: ValueId, heads: usize, head_dim: usize) -> Built {
        self.b.reshape(x, &[self.t, (heads * head_dim).into()])
    }
    /// The KV cache of a layer: keys and values `[kv_heads, head_dim]` of each row; `persistent`: from step to step.
    pub fn kv_state(&mut self, layer: usize, kv_heads: usize, head_dim: usize, persistent: bool) -> StateId {
        let state = State {
            name: format!("layers.{layer}.kv"),
            kv_heads: kv_heads as u64,
            head_dim: head_dim as u64,
            dtype: self.options.kv_dtype,
            persistent,
        };
        self.b.state(state)
    }
    /// Rows of an embedding table `[rows, width]`, widened: `ids: i32[T]` to `f32[T, width]`.
    pub fn embedding(&mut self, name: &str, rows: usize, width: usize, ids: ValueId) -> Built {
        let table = self.weight(name, &[rows, width]);
        let x = self.b.embedding(table, ids)?;
        self.b.convert(x, DType::F32)
    }
    /// Pooled vectors of each run of `x: [T, d]`, eight of `[S, d]`: by each of [`Pool::ALL`], then the same L2-normalised
    /// (`x / max(|x|, 1e-12)`).
    pub fn pooled(&mut self, x: ValueId) -> Result<Vec<ValueId>, TypeError> {
        let mut outputs = Vec::new();
        for pool in Pool::ALL {
            outputs.push(self.b.pool(pool, x, self.slot)?);
        }
        for i in 0..Pool::ALL.len() {
            let v = outputs[i];
            let square = self.b.mul(v, v)?;
            let sum = self.b.reduce(Reduce::Sum, square, 1)?;
            let norm = self.b.unary(Unary::Sqrt, sum)?;
            let tiny = self.b.constant(1e-12);
            let norm = self.b.binary(Binary::Maximum, norm, tiny)?;
            outputs.push(self.b.binary(Binary::Div, v, norm)?);
        }
        Ok(outputs)
    }
}

/// Runs the forward code of an architecture over the tensors of `weights`.
///
/// Outputs: `logits: f32[L, vocab]` for decoders (entry `step`), the vectors of [`Trace::pooled`] for encoders (entry `encode`).
pub fn trace(arch: &dyn Architecture, task: Task, weights: &WeightIndex, options: &TraceOptions) -> Result<Module, TypeError> {
    let mut b = Builder::new(if task == Task::Generate { "step" } else { "encode" });
    let t = b.symbol("T", options.bucket);
    let l = b.symbol("L", options.logit_rows);
    b.symbol("S", options.runs);
    let mut table = |name: &str, rows: Dim| b.input(name, Type::new(DType::I32, [rows]));
    let (token, slot, position) = (table("token", t), table("slot", t), table("position", t));
    let (kv_index, segment, logit_row) = (table("kv_index", t), table("segment", t), table("logit_row", l));
    let mut cx = Trace { b, options, t, token, slot, position, kv_index, segment, logit_row, weights };
    let outputs = arch.trace(&mut cx)?;
    Ok(cx.b.finish(outputs))
}
