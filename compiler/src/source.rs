//! What a build reads and decides first: the model, the CPU, types and sizes, and the files that options name.

use crate::calibrate::CalibrationText;
use crate::error::{Error, warning};
use crate::options::{Build, TaskChoice};
use crate::passes::MatmulInputs;
use crate::settings::Settings;
use crate::tuning::Tuning;
use rcompile_codegen::isa::Isa;
use rcompile_graph::DType;
use rcompile_models::dir::InputFile;
use rcompile_models::weights::graph_type;
use rcompile_models::{Model, OpenOptions, TokenizerUse, arch};
use rcompile_runtime::abi::Task;
use rcompile_runtime::memory;
use std::sync::Arc;

/// What a build reads and decides before its first graph; tiles that it measures itself are added later.
pub(crate) struct Source {
    /// The model directory.
    pub model: Arc<Model>,
    /// The CPU.
    pub isa: Isa,
    /// Types, slots, context.
    pub settings: Settings,
    /// The text of `--calibrate`.
    pub text: Option<CalibrationText>,
    /// Tiles that were measured, and the file that holds them.
    pub tuning: Option<(Tuning, InputFile)>,
}

impl Source {
    /// What may not be meant in what was asked for.
    pub fn remarks(&self) -> Vec<String> {
        let Source { model, settings, .. } = self;
        let mut remarks = Vec::new();
        let (positions, trained) = (settings.ctx_size, model.facts().max_positions);
        if positions as usize > trained {
            let what =
                format!("{positions} positions are beyond what the model was trained for, {trained}; later positions may be nonsense");
            remarks.push(warning("context", "--ctx-size", &what));
        }
        let narrowed = settings.inputs == MatmulInputs::Bf16;
        if let Some(stored) = settings.weight_dtype.filter(|stored| narrowed && *stored != DType::BF16) {
            let what = "weights of matrix products that are no codes are stored in bf16";
            remarks.push(warning("dtype", "--compute bf16", &format!("{what}; --dtype {} is for the others", stored.name())));
        }
        if let Some((tensor, _)) = settings.quantisation.kept.iter().find(|(tensor, dtype)| narrowed && is_narrowed(tensor, **dtype, model))
        {
            let what = format!("what --keep says of {tensor} is stored in bf16 if it is a weight of matrix products");
            remarks.push(warning("dtype", "--compute bf16", &what));
        }
        if let (Some(_), Some(_)) = (model.scheme, settings.quantisation.body) {
            let count = model.weights.coded_count();
            let what = format!("{count} matrices of the checkpoint are codes already and stay as they are");
            remarks.push(warning("quantize", "--quantize", &what));
        }
        remarks
    }
}

/// The model of `--model`. Errors: whatever can be wrong with the directory, and another `--task` than the model's (6).
pub(crate) fn open(o: &Build) -> Result<Model, Error> {
    let tokenizer = if o.no_tokenizer { TokenizerUse::Unread } else { TokenizerUse::Required };
    let options = OpenOptions { ctx_size: o.ctx_size.map(|n| n as usize), strict: o.strict, tokenizer, within: Some(memory::within) };
    let model = rcompile_models::open(&o.model, &options)?;
    let wanted = match o.task {
        TaskChoice::Generate => arch::Task::Generate,
        TaskChoice::Embed => arch::Task::Embed,
        _ => model.arch.task,
    };
    if wanted != model.arch.task {
        return Err(Error::Unsupported {
            place: "--task".into(),
            what: format!("does not fit {}, expected {}, found {}", model.arch.class_names[0], task_of(model.arch.task), task_of(wanted)),
            help: Some("leave --task out".into()),
        });
    }
    Ok(model)
}

/// Is this a matrix that would be of another type than bf16?
fn is_narrowed(tensor: &str, kept: Option<DType>, model: &Model) -> bool {
    let tensor = model.weights.get(tensor).filter(|t| t.shape.len() == 2);
    tensor.is_some_and(|t| kept.or_else(|| graph_type(t.dtype)) != Some(DType::BF16))
}

/// What an executable of a model for this task does.
pub(crate) fn task_of(task: arch::Task) -> Task {
    match task {
        arch::Task::Generate => Task::Generate,
        arch::Task::Embed => Task::Embed,
    }
}
