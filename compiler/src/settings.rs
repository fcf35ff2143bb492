//! What options, model and CPU decide together: types of weights, arithmetic and cache, sizes of the cache.
//!
//! In: `rcompile build`'s options, the opened model, the CPU. Out: [`Settings`], or the error for options that do not fit the other two.

use crate::error::Error;
use crate::options::{Build, ComputeType, Keep};
use crate::passes::MatmulInputs;
use crate::passes::quantise::{Products, Quantisation};
use crate::scaling;
use rcompile_codegen::isa::Isa;
use rcompile_graph::{DType, Group};
use rcompile_models::Model;
use rcompile_models::arch::Task;
use rcompile_models::quantised::Scheme;
use rcompile_models::weights::{Stored, graph_type};
use std::collections::BTreeMap;

/// Default slots of an encoder: texts side by side in a step.
const ENCODER_SLOTS: u32 = 16;
/// Default bound of `--ctx-size`.
const DEFAULT_CTX_SIZE: usize = 4096;
/// Largest `--ctx-size`: rotary tables hold a row per position.
const MAX_CTX_SIZE: u32 = 1 << 22;

/// What follows from options, model and CPU together.
pub(crate) struct Settings {
    pub(crate) inputs: MatmulInputs,
    pub(crate) kv_dtype: DType,
    pub(crate) weight_dtype: Option<DType>,
    pub(crate) quantisation: Quantisation,
    /// What the weights are: the checkpoint's codes and what is made of the others.
    pub(crate) quantisation_name: String,
    pub(crate) ctx_size: u32,
    pub(crate) slots: u32,
    /// Cores that the work is split for, as the executable describes itself.
    pub(crate) cores: u32,
}

impl Settings {
    /// As `--kv-dtype` names it.
    pub(crate) fn kv_name(&self) -> &'static str {
        if self.kv_dtype.is_quantised() { "int8" } else { self.kv_dtype.name() }
    }

    pub(crate) fn new(o: &Build, model: &Model, isa: &Isa) -> Result<Settings, Error> {
        let weight_dtype = o.dtype.of_graph();
        let stored = weight_dtype.unwrap_or_else(|| main_type(model));
        let quantisation = Quantisation { kept: kept(&o.quantize.keep, model)?, ..o.quantize.plan() };
        let has_int8 = isa.int8_dot(isa.lanes).is_some();
        let has_codes = quantisation.is_any() || model.scheme.is_some();
        let int8 = MatmulInputs::Int8 { bf16_rows: isa.bf16_inputs_fast() };
        let inputs = match o.compute {
            // Integer dots where weights are codes. bf16 weights where the CPU's bf16 dot beats f32 FMA, else f32; the same for all
            // buckets.
            ComputeType::Auto if has_codes && has_int8 => int8,
            ComputeType::Auto if stored == DType::BF16 && isa.bf16_inputs_fast() => MatmulInputs::Bf16,
            ComputeType::Int8 if !has_codes => {
                return Err(Error::Usage {
                    what: "--compute int8 without quantised weights, expected --quantize, found none".into(),
                    help: Some("--quantize int8 or --quantize int4".into()),
                });
            }
            ComputeType::Int8 if has_int8 => int8,
            ComputeType::Int8 => {
                return Err(Error::Unsupported {
                    place: "--compute int8".into(),
                    what: format!("needs an integer dot product on full vectors, which {} has not", isa.name),
                    help: Some("--compute auto".into()),
                });
            }
            ComputeType::Bf16 => MatmulInputs::Bf16,
            ComputeType::Auto | ComputeType::F32 => MatmulInputs::F32,
        };
        let kv_dtype = match o.kv_dtype {
            ComputeType::Auto => match inputs {
                MatmulInputs::F32 => DType::F32,
                MatmulInputs::Bf16 => DType::BF16,
                // Integer arithmetic says nothing about the cache: as for the checkpoint's own type.
                MatmulInputs::Int8 { .. } if stored == DType::F32 => DType::F32,
                MatmulInputs::Int8 { .. } => DType::BF16,
            },
            ComputeType::Bf16 => DType::BF16,
            // A scale for each key and each value of a head.
            ComputeType::Int8 => DType::Q8(Group::Row),
            ComputeType::F32 => DType::F32,
        };
        let ctx_size = match o.ctx_size {
            Some(n) => n,
            None => model.facts().max_positions.min(DEFAULT_CTX_SIZE) as u32,
        };
        if ctx_size > MAX_CTX_SIZE {
            let what = format!("too many positions, expected at most {MAX_CTX_SIZE}, found {ctx_size}");
            return Err(Error::Limit { place: "--ctx-size".into(), what });
        }
        let slots = o.parallel.unwrap_or(if model.arch.task == Task::Embed { ENCODER_SLOTS } else { 1 });
        let cells = u64::from(ctx_size) * u64::from(slots);
        if cells > 1 << 31 {
            return Err(Error::Limit {
                place: "--ctx-size, --parallel".into(),
                what: format!("too many positions, expected at most {}, found {cells}", 1u64 << 31),
            });
        }
        // A CPU that is named stands for its largest machine, so that hosts do not differ in what they build for it.
        let cores = o.cores.unwrap_or_else(|| match o.cpu.as_str() {
            "native" => std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
            _ => scaling::cores(&isa.name),
        });
        let quantisation_name = name_of(model.scheme, &quantisation);
        Ok(Settings { inputs, kv_dtype, weight_dtype, quantisation, quantisation_name, ctx_size, slots, cores })
    }

    /// Names what was made of a model's products, now that it is known.
    pub(crate) fn name_quantisation(&mut self, model: &Model, products: &Products) {
        self.quantisation_name = name_of(model.scheme, &self.quantisation.made(products));
    }
}

fn name_of(scheme: Option<Scheme>, quantisation: &Quantisation) -> String {
    match (scheme, quantisation.body, quantisation.head) {
        (None, ..) => quantisation.name(),
        (Some(scheme), None, None) => scheme.name(),
        (Some(scheme), None, Some(_)) => format!("{}{}", scheme.name(), quantisation.name().trim_start_matches("none")),
        (Some(scheme), ..) => format!("{}, others {}", scheme.name(), quantisation.name()),
    }
}

/// `--keep` by the graph's names of tensors, of which patterns name the checkpoint's; of several that name one, the first counts.
fn kept(patterns: &[Keep], model: &Model) -> Result<BTreeMap<String, Option<DType>>, Error> {
    let mut kept = BTreeMap::new();
    for keep in patterns {
        let named = model.weights.iter().filter(|t| keep.names(&t.stored_name));
        if let (Some(part), Some(_)) = (named.clone().find(|t| model.weights.is_part(t)), keep.dtype) {
            let (pattern, name) = (rcompile_message::escape(&keep.pattern), rcompile_message::escape(&part.stored_name));
            let what = format!("--keep {pattern}: expected tensors of floats, found {name}, which are codes and stay as they are");
            return Err(Error::Usage { what, help: None });
        }
        if named.clone().next().is_none() {
            let pattern = rcompile_message::escape(&keep.pattern);
            return Err(Error::Usage {
                what: format!(
                    "--keep {pattern}: expected the name of a tensor of the checkpoint, or a pattern of names, found none that it matches"
                ),
                help: Some("a pattern stands for the whole name: '*.down_proj.weight'".into()),
            });
        }
        named.for_each(|t| _ = kept.entry(model.facts().read_for(&t.name).to_string()).or_insert(keep.dtype));
    }
    Ok(kept)
}

/// The float type of most elements that the model reads; codes are not counted.
fn main_type(model: &Model) -> DType {
    let elements = |dtype| {
        let of_type = model.stored().filter_map(|stored| match stored {
            Stored::Plain(tensor) if graph_type(tensor.dtype) == Some(dtype) => Some(tensor.elements()),
            _ => None,
        });
        of_type.sum::<u64>()
    };
    [DType::F32, DType::F16, DType::BF16].into_iter().max_by_key(|&d| elements(d)).unwrap_or(DType::F32)
}
