//! The graph of a model directory, run by the reference interpreter.

use crate::exe::cache as cache_dir;
use crate::machine::Machine;
use rcompile::cache::Cache;
use rcompile::calibrate::{self, CalibrationText, Codes};
use rcompile::link::guard::WorkDir;
use rcompile::options::{CacheOptions, Keep};
use rcompile::pack::Tensors;
use rcompile::passes::quantise::{self, Quantisation};
use rcompile::passes::{MatmulInputs, PassCx, compute_dtype};
use rcompile::pipeline::PASSES;
use rcompile::report::Progress;
use rcompile_graph::{DType, Interp, Module, Tensor};
use rcompile_models::trace::{TraceOptions, trace};
use rcompile_models::weights::{Stored, graph_type};
use rcompile_models::{Model, OpenOptions, TokenizerUse};
use std::collections::BTreeMap;
use std::path::Path;

/// Rows of one run at most.
const ROWS_MAX: u64 = 512;
/// Texts of one run at most.
const RUNS_MAX: u64 = 16;

/// An open model and its traced graph, before any pass but `quantise` and `compute-dtype`.
pub struct Reference {
    model: Model,
    module: Module,
    codes: Option<Codes>,
}

impl Reference {
    /// Opens and traces; `compute` as `--compute`, the KV cache has the same type.
    pub fn open(dir: &Path, compute: DType) -> Reference {
        Reference::quantised(dir, compute, compute, &Quantisation::default())
    }

    /// With quantised weights; `compute` is `I8` for integer dots.
    pub fn quantised(dir: &Path, compute: DType, kv_dtype: DType, quantisation: &Quantisation) -> Reference {
        let cx = PassCx { inputs: inputs_of(compute), quantisation: quantisation.clone(), ..PassCx::default() };
        Reference::of_passes(dir, kv_dtype, cx)
    }

    /// With all that the passes that round may ask.
    pub fn of_passes(dir: &Path, kv_dtype: DType, mut cx: PassCx) -> Reference {
        let options = OpenOptions { tokenizer: TokenizerUse::Optional, ..OpenOptions::default() };
        let model = rcompile_models::open(dir, &options).unwrap_or_else(|e| panic!("{e}"));
        let options = TraceOptions {
            bucket: ROWS_MAX,
            logit_rows: ROWS_MAX,
            runs: RUNS_MAX,
            ctx_size: model.facts().max_positions.min(4096) as u64,
            kv_dtype,
            weight_dtype: None,
            as_stored: vec![],
        };
        let mut module = trace(&*model.net, model.arch.task, &model.weights, &options).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        quantise::run(&mut module, &mut cx).unwrap_or_else(|e| panic!("{e:?}"));
        compute_dtype::run(&mut module, &mut cx).unwrap_or_else(|e| panic!("{e:?}"));
        Reference { model, module, codes: None }
    }

    /// With codes that are calibrated on a text, as `--calibrate` makes them.
    pub fn calibrated(dir: &Path, compute: DType, kv_dtype: DType, quantisation: &Quantisation, text: &CalibrationText) -> Reference {
        let quantisation = Quantisation { choice: quantise::Choice::Calibrated, ..quantisation.clone() };
        let reference = Reference::quantised(dir, compute, kv_dtype, &quantisation);
        let temp = tempfile::tempdir().expect("temporary directory");
        let work = WorkDir::create(&temp.path().join("out")).unwrap_or_else(|e| panic!("{e}"));
        // The objects of earlier test runs.
        let options = CacheOptions { cache_dir: Some(cache_dir().with_file_name("rcompile")), ..CacheOptions::default() };
        let (mut cache, _) = Cache::open(&options).unwrap_or_else(|e| panic!("{e}"));
        let (model, quantisation) = (&reference.model, &quantisation);
        let cx = calibrate::Cx { model, passes: PASSES, quantisation, act_order: false, cache: &cache, work: &work };
        let calibration = calibrate::run(&cx, text, &mut Progress::new(true)).unwrap_or_else(|e| panic!("{e}"));
        cache.commit();
        Reference { codes: Some(calibration.codes), ..reference }
    }

    /// The graph.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Runs the graph.
    pub fn runner(&self) -> Runner<'_> {
        self.runner_of(&self.module)
    }

    /// Runs the graph with the roundings of attention on a machine.
    pub fn runner_on(&self, machine: &Machine) -> Runner<'_> {
        let runner = self.runner();
        let rounds = self.module.states.iter().any(|state| machine.rounds_attention(state.head_dim as u32));
        Runner { interp: runner.interp.rounding_attention(rounds), ..runner }
    }

    /// Runs another graph with this checkpoint.
    pub fn runner_of<'m>(&'m self, module: &'m Module) -> Runner<'m> {
        let read = |name: &str| match self.codes.as_ref().and_then(|codes| given(codes, &self.model, name)) {
            Some(tensor) => Ok(tensor),
            None => read(&self.model, name),
        };
        Runner { interp: Interp::from_checkpoint(module, read), len: 0 }
    }
}

/// What the inputs of matmuls become where arithmetic has this type; `I8` is of codes, other rows stay f32.
pub fn inputs_of(compute: DType) -> MatmulInputs {
    match compute {
        DType::I8 => MatmulInputs::Int8 { bf16_rows: false },
        DType::BF16 => MatmulInputs::Bf16,
        DType::F32 => MatmulInputs::F32,
        other => panic!("no arithmetic of {other}"),
    }
}

/// What `--keep` keeps of a model, by pattern and type.
pub fn kept(dir: &Path, patterns: &[(&str, Option<DType>)]) -> BTreeMap<String, Option<DType>> {
    let options = OpenOptions { tokenizer: TokenizerUse::Unread, ..OpenOptions::default() };
    let model = rcompile_models::open(dir, &options).unwrap_or_else(|e| panic!("{e}"));
    let names = patterns.iter().flat_map(|&(pattern, dtype)| {
        let keep = Keep { pattern: pattern.into(), dtype };
        model.weights.iter().filter(move |t| keep.names(&t.stored_name)).map(move |t| (t.name.to_string(), dtype))
    });
    names.collect()
}

/// A tensor of given codes.
fn given(codes: &Codes, model: &Model, name: &str) -> Option<Tensor> {
    let codes = codes.over(&model.weights);
    let (dtype, shape) = codes.info(name).filter(|(dtype, _)| dtype.is_quantised())?;
    let rows = codes.codes(name, 0..shape[0]).unwrap_or_else(|e| panic!("{e}"));
    Some(Tensor { dtype, shape: shape.iter().map(|n| *n as usize).collect(), data: rows.values() })
}

/// A tensor of the checkpoint.
fn read(model: &Model, name: &str) -> Result<Tensor, String> {
    let weights = &model.weights;
    let info = match weights.find(name).ok_or_else(|| format!("no tensor {name:?}"))? {
        Stored::Plain(info) => info,
        Stored::Codes(coded) => {
            let rows = coded.rows(weights, 0..coded.shape[0] as u64).map_err(|e| e.to_string())?;
            return Ok(Tensor { dtype: coded.dtype, shape: coded.shape.to_vec(), data: rows.values() });
        }
        Stored::Order(order) => return Ok(Tensor::new(DType::I32, &[order.len()], order.iter().map(|i| f64::from(*i)))),
    };
    let bytes = weights.read(info).map_err(|e| e.to_string())?;
    let dtype = graph_type(info.dtype).ok_or_else(|| format!("{name:?} is {:?}", info.dtype))?;
    let half = |f: fn([u8; 2]) -> f64| bytes.as_chunks().0.iter().map(|b| f(*b)).collect::<Vec<f64>>();
    let data = match dtype {
        DType::F16 => half(|b| half::f16::from_le_bytes(b).to_f64()),
        DType::BF16 => half(|b| half::bf16::from_le_bytes(b).to_f64()),
        _ => bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
    };
    Ok(Tensor::new(dtype, &info.shape, data))
}

/// One sequence in slot 0 of the interpreter.
pub struct Runner<'m> {
    interp: Interp<'m>,
    len: usize,
}

impl Runner<'_> {
    /// Appends tokens to the sequence; returns the logits behind each of them.
    pub fn feed(&mut self, tokens: &[u32]) -> Vec<Vec<f64>> {
        let rows: Vec<usize> = (0..tokens.len()).collect();
        let outputs = self.run(tokens, &vec![0; tokens.len()], &vec![0; tokens.len()], self.len, &rows);
        self.len += tokens.len();
        let width = outputs[0].shape[1];
        outputs[0].data.chunks(width).map(<[f64]>::to_vec).collect()
    }

    /// Logits behind the last of `tokens`, which are the whole sequence.
    pub fn logits(&mut self, tokens: &[u32]) -> Vec<f64> {
        self.len = 0;
        self.feed(tokens).pop().expect("at least one token")
    }

    /// The `count` tokens that greedily follow a sequence whose last logits are `logits`, and the smallest margin of these
    /// decisions. The sequence stays as it was.
    pub fn greedy(&mut self, logits: &[f64], count: usize) -> (Vec<u32>, f64) {
        let len = self.len;
        let (mut tokens, mut smallest) = (vec![crate::argmax(logits)], crate::margin(logits));
        while tokens.len() < count {
            let next = self.feed(&tokens[tokens.len() - 1..]).remove(0);
            tokens.push(crate::argmax(&next));
            smallest = smallest.min(crate::margin(&next));
        }
        // What lies beyond `len` in the cache is not seen: keys exist up to the largest index of a step's rows.
        self.len = len;
        (tokens, smallest)
    }

    /// The eight pooled vectors of one text.
    pub fn pooled(&mut self, tokens: &[u32], segments: &[u32]) -> Vec<Vec<f64>> {
        let outputs = self.run(tokens, &vec![0; tokens.len()], segments, 0, &[0]);
        outputs.into_iter().map(|t| t.data).collect()
    }

    fn run(&mut self, tokens: &[u32], slots: &[u32], segments: &[u32], begin: usize, logit_rows: &[usize]) -> Vec<Tensor> {
        let column = |list: &mut dyn Iterator<Item = usize>| {
            let list: Vec<i32> = list.map(|x| i32::try_from(x).expect("a small number")).collect();
            Tensor::i32(&[list.len()], &list)
        };
        let place = || column(&mut (begin..begin + tokens.len()));
        let inputs = [
            ("token", column(&mut tokens.iter().map(|x| *x as usize))),
            ("slot", column(&mut slots.iter().map(|x| *x as usize))),
            ("position", place()),
            ("kv_index", place()),
            ("segment", column(&mut segments.iter().map(|x| *x as usize))),
            ("logit_row", column(&mut logit_rows.iter().copied())),
        ];
        self.interp.run(&inputs).unwrap_or_else(|e| panic!("{e}"))
    }
}
