//! Graph passes: one file each, registered with one line in `pipeline.rs`.
//!
//! In: a verified module. Out: an equivalent one (equal under the interpreter up to the rounding that a pass documents).

use crate::error::Error;
use rcompile_graph::Module;
use std::fmt;

pub mod canonicalise;
pub mod compute_dtype;
pub mod cse;
pub mod dce;
pub mod dead_logit_rows;
pub mod fold_const;
pub mod fuse_layer_norm;
pub mod fuse_rms_norm;
pub mod fuse_rope;
pub mod merge_matmuls;
pub mod outline_layers;
pub mod quantise;
pub mod rewrite;

/// What a pass may ask and where it explains itself.
#[derive(Debug, Default)]
pub struct PassCx {
    /// What the inputs of matmuls become.
    pub inputs: MatmulInputs,
    /// Weights that become codes.
    pub quantisation: quantise::Quantisation,
    /// What became of the weights of matrix products, once that pass has run.
    pub products: Option<quantise::Products>,
    /// Refusals and applications, for `--explain`: `pass: place: reason`.
    pub notes: Vec<String>,
    /// Name of the pass that runs, for [`PassCx::note`].
    pub pass: &'static str,
}

/// What the inputs of matmuls become (`--compute`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatmulInputs {
    /// f32: weights are widened, also codes.
    #[default]
    F32,
    /// bf16, also weights that are wider; those that are codes are widened.
    Bf16,
    /// Groups of int8 codes where weights are codes, else f32.
    Int8 {
        /// But bf16 where weights are bf16, as the CPU multiplies those fastest.
        bf16_rows: bool,
    },
}

impl MatmulInputs {
    /// As `--compute` names it.
    pub fn name(self) -> &'static str {
        match self {
            MatmulInputs::F32 => "f32",
            MatmulInputs::Bf16 => "bf16",
            MatmulInputs::Int8 { .. } => "int8",
        }
    }
}

impl PassCx {
    /// What the running pass did at a place (the origin of a node, the name of a parameter), or why it did not.
    pub fn note(&mut self, place: &str, what: impl fmt::Display) {
        self.notes.push(format!("{}: {place}: {what}", self.pass));
    }
}

/// Holds a graph to the rules of the IR behind a stage or pass: what breaks them is a bug of ours (70).
pub(crate) fn verify(after: &str, module: &Module) -> Result<(), Error> {
    rcompile_graph::verify(module).map_err(|e| Error::bug_in(format_args!("graph after {after}"), "breaks a rule of the IR", e))
}

/// A broken invariant of ours (never the user's fault), found by a pass.
#[derive(Debug)]
pub struct Broken(
    /// `place: the rule that is broken`.
    pub String,
);

/// The same with the pass's name.
#[derive(Debug, thiserror::Error)]
#[error("pass {pass}: {what}")]
pub struct PassError {
    /// Name of the pass.
    pub pass: &'static str,
    /// What went wrong.
    pub what: String,
}

impl From<PassError> for Error {
    fn from(error: PassError) -> Error {
        Error::bug(format_args!("pass {}", error.pass), error.what)
    }
}

/// A pass: true when it changed the module.
pub type PassFn = fn(&mut Module, &mut PassCx) -> Result<bool, Broken>;

/// A pass that a build runs.
#[derive(Clone, Copy, Debug)]
pub struct ChosenPass {
    /// The pass.
    pub pass: Pass,
    /// Its place among all passes, from 1, whichever run: its dumps have one name in every build.
    pub number: usize,
}

/// A registered pass.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Name, also of its dump and timer.
    pub name: &'static str,
    function: PassFn,
    /// Lowest optimisation level (0..=3) at which it runs.
    pub level: u8,
    /// Set for passes that change results: `--passes -NAME` is refused, and this names the option to use instead.
    pub instead: Option<&'static str>,
    /// It serves whole steps only: not where each layer is cut out by itself and all rows are wanted, as calibration does.
    pub of_steps: bool,
}

impl Pass {
    /// A pass that runs from an optimisation level on.
    pub const fn new(name: &'static str, function: PassFn, level: u8) -> Pass {
        Pass { name, function, level, instead: None, of_steps: false }
    }
    /// It changes results; the option to use instead of leaving it out.
    pub const fn decides(self, instead: &'static str) -> Pass {
        Pass { instead: Some(instead), ..self }
    }
    /// It serves whole steps only.
    pub const fn of_steps(self) -> Pass {
        Pass { of_steps: true, ..self }
    }
    /// Runs it. Out: did it change the module?
    pub fn run(&self, module: &mut Module, cx: &mut PassCx) -> Result<bool, PassError> {
        cx.pass = self.name;
        (self.function)(module, cx).map_err(|Broken(what)| PassError { pass: self.name, what })
    }
}
