//! `--calibrate FILE`: codes of the weights of layers and head by GPTQ, from what they see when the model reads a text.
//!
//! ```text
//! text -> chunks of tokens                                                      (text)
//! trace, passes (f32, weights of layers and head are codes to come) -> cuts     (cuts)
//! per cut: plan, compile and load for this machine                              (host)
//!   hidden states -> inputs X of linear layers -> H = X^T X -> R R^T = H        (hessian; blocks: products by compiled code)
//!     weights, R -> codes, which the next cuts and the pack stage read          (gptq, codes)
//!   hidden states -> those that enter the next layer
//! ```
//! A layer's inputs are taken with all weights before them rounded already, those of the same layer included; only a table that is the head
//! too, whose codes come last, is looked up as it is in the checkpoint. One Hessian exists at a time; the hidden states of the text stay in
//! memory. The model runs with f32 activations, whatever the executable will compute with.
//!
//! The codes depend on model, text, `--quantize` and the level that the code is compiled for (vector widths decide in which order norms and
//! softmax are summed), which the executable names; not on target, threads or buckets.

mod blocks;
mod codes;
mod cuts;
mod gptq;
mod hessian;
mod host;
mod text;

pub use codes::{Calibrated, Codes};
pub use text::CalibrationText;

use crate::cache::Cache;
use crate::error::Error;
use crate::link::guard::WorkDir;
use crate::pack::{self, Sink, Tensors};
use crate::passes::quantise::{Choice, Quantisation};
use crate::passes::{self, Pass, PassCx};
use crate::plan::{PackJob, Planned, WeightTable};
use crate::report::{Progress, StageBar};
use blocks::Product;
use cuts::{Cut, HIDDEN};
use gptq::{BAND, Gptq};
use hessian::{DAMP, DAMP_TABLE, Hessian};
use host::HostCompiler;
use rayon::prelude::*;
use rcompile_codegen::host::{HostStep, HostWeights, Scratch};
use rcompile_codegen::program::{self, Layout};
use rcompile_graph::{DType, Dim, Module, Node, Op, Param, Recipe};
use rcompile_message::size;
use rcompile_models::trace::{TraceOptions, trace};
use rcompile_models::{Kind, Model};
use rcompile_runtime::memory::SharedRoom;
use std::collections::{BTreeMap, HashMap, HashSet, btree_map::Entry};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Most chunks whose inputs of a linear layer are held at once.
const BATCH: usize = 16;

/// What calibration needs of the build that it is part of.
pub struct Cx<'a> {
    /// The model.
    pub model: &'a Model,
    /// All passes, in order.
    pub passes: &'a [Pass],
    /// What is wanted.
    pub quantisation: &'a Quantisation,
    /// Columns with the largest inputs first.
    pub act_order: bool,
    /// For compiled code.
    pub cache: &'a Cache,
    /// For objects and codes.
    pub work: &'a WorkDir,
}

/// What came out.
#[derive(Debug)]
pub struct Calibration {
    /// The codes.
    pub codes: Codes,
    /// For `info`.
    pub note: String,
}

/// Refuses models that cannot be calibrated.
pub fn check(model: &Model) -> Result<(), Error> {
    let Some(scheme) = model.scheme else { return Ok(()) };
    let what = format!("chooses codes, and the layers of this checkpoint are codes already: {}", scheme.name());
    Err(Error::Unsupported { place: "--calibrate".into(), what, help: Some("leave it out".into()) })
}

/// A planned cut.
struct Planning {
    cut: Cut,
    planned: Planned,
    weights: WeightTable,
    /// About what it takes, in multiply-adds.
    cost: u64,
}

/// A tensor whose codes are wanted.
struct Wanted {
    dtype: DType,
    floats: Recipe,
    rows: u64,
    width: usize,
    /// It is a table too, of which rows are looked up.
    is_table: bool,
}

/// Runs the model over a text and rounds layer by layer.
pub fn run(cx: &Cx<'_>, text: &CalibrationText, progress: &mut Progress) -> Result<Calibration, Error> {
    let bar = progress.stage("calibrate", 100, false);
    let chunks = &text.chunks;
    let (length, rows) = (chunks[0].len(), chunks.iter().map(Vec::len).sum::<usize>());
    let mut host = HostCompiler::new(cx.cache, cx.work)?;
    let (module, wanted) = traced(cx, length)?;
    let mut plannings = Vec::new();
    for cut in cuts::cuts(&module, rows as u64)? {
        plannings.push(planning(&host, cut, length, rows, &wanted)?);
    }
    let mut done = Done { bar: &bar, total: plannings.iter().map(|p| p.cost).sum(), so_far: 0, shown: 0 };
    let mut forward = Forward::new(chunks, &plannings)?;
    let mut codes = Codes::create(cx.work.path())?;
    let mut products: BTreeMap<usize, Product> = BTreeMap::new();
    for planning in &plannings {
        let step = forward.prepare(&mut host, planning, &codes.over(&cx.model.weights))?;
        let tensors = planning.cut.tensors.iter().map(|name| (name, &wanted[name])).collect::<Vec<_>>();
        let Some((_, first)) = tensors.first() else {
            forward.advance(&step)?;
            done.add(planning.cost);
            continue;
        };
        let width = first.width;
        bar.message(tensors.iter().map(|t| t.0.as_str()).collect::<Vec<_>>().join(", "));
        let product = match products.entry(blocks::side_of(width)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let product = Product::new(&mut host, *new.key())?;
                new.insert(product)
            }
        };
        let mut hessian = Hessian::new(product, width);
        let share = planning.cost / forward.batches() as u64;
        forward.inputs(&step, width, |inputs| {
            done.add(share);
            hessian.add(inputs)
        })?;
        let order = cx.act_order.then(|| hessian.by_size());
        if let Some(order) = &order {
            hessian = hessian.ordered(order);
        }
        let is_table = tensors.iter().any(|t| t.1.is_table);
        let Some(factor) = hessian.factor(if is_table { DAMP_TABLE } else { DAMP })? else { return Err(not_finite(text, &tensors)) };
        let gptq = Gptq::new(&factor, order.as_deref());
        for (name, wanted) in tensors {
            codes.add(name, wanted.dtype, wanted.rows, width);
            round(&gptq, &codes, name, wanted, &cx.model.weights)?;
        }
        done.add(planning.cost - share * forward.batches() as u64);
    }
    let level = host.isa.name.clone();
    bar.finish(&format!("{} tensors, {} chunks of {length} tokens, code for {level}", wanted.len(), chunks.len()));
    let order = if cx.act_order { " in act-order" } else { "" };
    let note = format!(
        "calibrated with {} chunks of {length} tokens{order} and code for {level}; another level may give other codes",
        chunks.len()
    );
    Ok(Calibration { codes, note })
}

fn not_finite(text: &CalibrationText, tensors: &[(&String, &Wanted)]) -> Error {
    let tensor = tensors.first().map_or("", |t| t.0.as_str());
    let e = rcompile_models::Error::new(
        Kind::Disagree,
        "--calibrate",
        tensor,
        "its inputs are not finite",
        "finite numbers",
        format!("an infinity or NaN on {}", text.input.name),
    );
    e.help("leave --calibrate out: codes are rounded to nearest").into()
}

/// Shows progress in percent of the cost.
struct Done<'a, 'p> {
    bar: &'a StageBar<'p>,
    total: u64,
    so_far: u64,
    shown: u64,
}

impl Done<'_, '_> {
    fn add(&mut self, cost: u64) {
        self.so_far += cost;
        let now = (self.so_far as u128 * 100 / u128::from(self.total.max(1))) as u64;
        if now > self.shown {
            self.bar.advance(now - self.shown);
            self.shown = now;
        }
    }
}

/// The model as calibration runs it, and the tensors of codes that it names.
fn traced(cx: &Cx<'_>, length: usize) -> Result<(Module, HashMap<String, Wanted>), Error> {
    let model = cx.model;
    let options = TraceOptions {
        bucket: length as u64,
        logit_rows: 1,
        runs: 1,
        ctx_size: length as u64,
        kv_dtype: DType::F32,
        weight_dtype: None,
        as_stored: vec![],
    };
    let mut module = trace(&*model.net, model.arch.task, &model.weights, &options).map_err(|e| Error::bug("calibrate trace", e))?;
    let quantisation = Quantisation { choice: Choice::Calibrating, ..cx.quantisation.clone() };
    let mut pass_cx = PassCx { quantisation, ..PassCx::default() };
    let mut found = HashMap::new();
    // All rows are wanted in all layers, and each layer is cut out by itself.
    for pass in cx.passes.iter().filter(|p| !p.of_steps) {
        let quantised = pass_cx.products.is_some();
        if pass.run(&mut module, &mut pass_cx)? {
            passes::verify(pass.name, &module)?;
        }
        if pass_cx.products.is_some() && !quantised {
            found = wanted(&module);
        }
    }
    Ok((module, found))
}

/// Tensors of codes that the quantise pass has named, with the weights that they replace.
fn wanted(module: &Module) -> HashMap<String, Wanted> {
    let mut found = HashMap::new();
    let f = module.main();
    let table = |n: &Node| match f.node(*n.inputs.first()?).op {
        Op::Param(p) if n.op == Op::Embedding => Some(&*module.params[p.index()].name),
        _ => None,
    };
    let tables: HashSet<&str> = f.nodes.iter().filter_map(table).collect();
    let params: HashMap<&str, &Param> = module.params.iter().map(|p| (&*p.name, p)).collect();
    for param in &module.params {
        let dtype = param.ty.dtype;
        let is_given = dtype.is_quantised() && matches!(&param.recipe, Recipe::Source { tensor } if *tensor == param.name);
        let name = param.name.strip_suffix(&format!(".{dtype}")).filter(|_| is_given);
        let of = name.and_then(|name| params.get(name));
        if let (Some(of), [Dim::Const(rows), Dim::Const(width)]) = (of, &param.ty.shape[..]) {
            let floats = Recipe::Convert { of: Box::new(of.recipe.clone()), dtype: DType::F32 };
            found.insert(
                param.name.clone(),
                Wanted { dtype, floats, rows: *rows, width: *width as usize, is_table: tables.contains(&*of.name) },
            );
        }
    }
    found
}

/// Plans a cut and says what it costs.
fn planning(host: &HostCompiler<'_>, cut: Cut, length: usize, rows: usize, wanted: &HashMap<String, Wanted>) -> Result<Planning, Error> {
    let mut weights = WeightTable::default();
    // The hidden states come first, so that all cuts have them in one place.
    if let Some(hidden) = cut.module.params.iter().find(|p| p.name == HIDDEN) {
        let shape: Vec<u64> = hidden.ty.shape.iter().filter_map(|d| d.constant()).collect();
        weights.place(HIDDEN, &hidden.recipe, (DType::F32, program::DType::F32), &shape, Layout::Plain);
    }
    let planned = host.plan(&cut.module, length as u32, &mut weights)?;
    let matmuls = weights.jobs.iter().filter(|j| j.layout != Layout::Plain);
    let mut cost = matmuls.map(|j| j.shape.iter().product::<u64>()).sum::<u64>() * rows as u64;
    for (i, w) in cut.tensors.iter().filter_map(|name| wanted.get(name)).enumerate() {
        let k = w.width as u64;
        cost += w.rows * k * k / 2 + if i == 0 { k * k * rows as u64 / 2 + k * k * k / 6 } else { 0 };
    }
    Ok(Planning { cut, planned, weights, cost: cost.max(1) })
}

/// Memory for weights and hidden states, for which there is room.
struct Counted {
    memory: HostWeights,
    _room: SharedRoom,
}

impl Counted {
    fn new(bytes: u64) -> Result<Counted, Error> {
        let limit = |found: String| {
            let what = format!("no memory for hidden states and a layer, expected {} more, found {found}", size(bytes));
            Error::Limit { place: "--calibrate".into(), what }
        };
        let room = SharedRoom::take(bytes).ok_or_else(|| limit("less than that below the control group's limit".into()))?;
        Ok(Counted { memory: HostWeights::new(bytes).map_err(|e| limit(e.to_string()))?, _room: room })
    }
}

/// The model's way through the text: hidden states, and the weights of the cut at hand behind them.
struct Forward<'c> {
    chunks: &'c [Vec<u32>],
    /// Elements of a hidden state.
    width: usize,
    area: Counted,
    /// The first cut's weights, and tokens in place of hidden states.
    first: Option<Counted>,
    /// Chunks that are worked on at once.
    batch: usize,
}

impl<'c> Forward<'c> {
    fn new(chunks: &'c [Vec<u32>], plannings: &[Planning]) -> Result<Forward<'c>, Error> {
        let first = &plannings[0];
        let f = first.cut.module.main();
        let width = f.ty(f.outputs[0]).shape.last().and_then(|d| d.constant()).expect("hidden states of a width") as usize;
        let most = plannings[1..].iter().map(|p| p.weights.len).max().unwrap_or(0);
        let hidden = chunks.iter().map(Vec::len).sum::<usize>() * width * 4;
        let batch = rayon::current_num_threads().min(chunks.len()).min(BATCH);
        Ok(Forward { chunks, width, area: Counted::new(most.max(hidden as u64))?, first: Some(Counted::new(first.weights.len)?), batch })
    }

    fn batches(&self) -> usize {
        self.chunks.len().div_ceil(self.batch)
    }

    /// Compiles a cut and packs its weights.
    fn prepare(&mut self, host: &mut HostCompiler<'_>, planning: &Planning, tensors: &dyn Tensors) -> Result<Arc<HostStep>, Error> {
        let table = &planning.weights;
        let tokens = match self.first {
            Some(_) => self.chunks.iter().flatten().max().map_or(0, |t| t + 1),
            None => self.chunks.iter().map(Vec::len).sum::<usize>() as u32,
        };
        let step = host.load(&planning.planned, table, tokens)?;
        let mut jobs: Vec<PackJob> = table.jobs.iter().filter(|j| j.name != HIDDEN).cloned().collect();
        let base = jobs.iter().map(|j| j.offset).min().unwrap_or(table.len);
        jobs.iter_mut().for_each(|j| j.offset -= base);
        let table = WeightTable { jobs, len: table.len - base };
        let area = self.first.as_mut().unwrap_or(&mut self.area);
        let sink = Sink { file: area.memory.file(), path: Path::new("calibration"), base };
        pack::pack(&table, tensors, sink, false, &|_| {})?;
        Ok(step)
    }

    /// Runs a cut over the text; `then` gets its outputs, `[tokens][width]` of each chunk, some chunks at a time.
    fn inputs(&self, step: &HostStep, width: usize, mut then: impl FnMut(&[Vec<f32>]) -> Result<(), Error>) -> Result<(), Error> {
        let idle: Mutex<Vec<Scratch>> = Mutex::default();
        for begin in (0..self.chunks.len()).step_by(self.batch) {
            let outputs = self.batch(step, &idle, begin, width);
            then(&outputs)?;
        }
        Ok(())
    }

    /// The outputs of a batch of chunks.
    fn batch(&self, step: &HostStep, idle: &Mutex<Vec<Scratch>>, begin: usize, width: usize) -> Vec<Vec<f32>> {
        let end = self.chunks.len().min(begin + self.batch);
        (begin..end).into_par_iter().map(|chunk| self.run(step, idle, chunk, width)).collect()
    }

    fn run(&self, step: &HostStep, idle: &Mutex<Vec<Scratch>>, chunk: usize, width: usize) -> Vec<f32> {
        let lock = || idle.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().pop();
        let mut scratch = known.unwrap_or_else(|| step.scratch());
        let length = self.chunks[chunk].len() as u32;
        let places: Vec<u32> = (chunk as u32 * length..(chunk as u32 + 1) * length).collect();
        let (area, tokens) = match &self.first {
            Some(first) => (first, &self.chunks[chunk]),
            None => (&self.area, &places),
        };
        let out = step.run(&area.memory, &mut scratch, tokens);
        let rows = out.chunks(step.output_width()).flat_map(|row| &row[..width]);
        let rows = rows.copied().collect();
        lock().push(scratch);
        rows
    }

    /// Runs a cut whose output becomes the hidden states.
    fn advance(&mut self, step: &HostStep) -> Result<(), Error> {
        let idle: Mutex<Vec<Scratch>> = Mutex::default();
        for begin in (0..self.chunks.len()).step_by(self.batch) {
            let outputs = self.batch(step, &idle, begin, self.width);
            // A chunk's states are read by its own step only.
            for (chunk, rows) in (begin..).zip(outputs) {
                self.area.memory.write(chunk * rows.len() * 4, &rows);
            }
        }
        self.first = None;
        Ok(())
    }
}

/// Rounds one tensor by bands of rows.
fn round(gptq: &Gptq<'_, '_>, codes: &Codes, name: &str, wanted: &Wanted, tensors: &dyn Tensors) -> Result<(), Error> {
    let bands: Vec<u64> = (0..wanted.rows).step_by(BAND).collect();
    bands.into_par_iter().try_for_each(|first| {
        let rows = first..wanted.rows.min(first + BAND as u64);
        let weights = pack::floats(&wanted.floats, rows, tensors)?;
        let coded = gptq.round(wanted.dtype, &weights, wanted.width)?;
        match coded.overflows() {
            0 => codes.write(name, first, &coded),
            count => {
                let tensor = name.strip_suffix(&format!(".{}", wanted.dtype)).unwrap_or(name);
                Err(pack::overflow(tensors, tensor, wanted.dtype, count))
            }
        }
    })
}

#[cfg(test)]
mod tests;
