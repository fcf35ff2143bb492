//! Graph passes: one file each, registered with one line in `pipeline.rs`.
//!
//! In: a verified module. Out: an equivalent one (equal under the interpreter up to the rounding that a pass documents).

use rcompile_graph::{DType, Module};

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
    /// Type that matmul inputs are converted to: `F32`, `BF16`, or `I8` for groups of int8 codes where the weight is quantised, else f32.
    pub compute: Option<DType>,
    /// Beside codes (`I8`): do rows become bf16 where weights are bf16, as the CPU multiplies them fastest?
    pub bf16_rows: bool,
    /// Weights that become codes.
    pub quantisation: quantise::Quantisation,
    /// What became of the weights of matrix products, once that pass has run.
    pub products: Option<quantise::Products>,
    /// Refusals and applications, for `--explain`: `pass: origin: reason`.
    pub notes: Vec<String>,
}

/// A broken invariant of ours (never the user's fault).
#[derive(Debug, thiserror::Error)]
#[error("pass {pass}: {what}")]
pub struct PassError {
    /// Name of the pass.
    pub pass: &'static str,
    /// What went wrong.
    pub what: String,
}

/// A pass: true when it changed the module.
pub type PassFn = fn(&mut Module, &mut PassCx) -> Result<bool, PassError>;

/// A registered pass.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Name, the same as its file, dump and timer.
    pub name: &'static str,
    /// The function.
    pub run: PassFn,
    /// Lowest optimisation level (0..=3) at which it runs.
    pub level: u8,
}
