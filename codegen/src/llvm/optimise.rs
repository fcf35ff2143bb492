//! LLVM's middle-end pipeline: what generators leave to LLVM, and no more.
//!
//! Generators write vectors, register tiles and rotated loops themselves: most of `default<O3>`, about half of LLVM's time, finds nothing
//! to do. Left are addresses (common subexpressions, constants taken out of them, invariant ones moved out of loops), small helpers to
//! inline, scalar tails, and the steps of short loops.

use crate::error::Error;
use inkwell::module::Module;
use inkwell::passes::PassBuilderOptions;
use inkwell::targets::TargetMachine;

/// Pass by pass; `LEVEL` is that of `-O`. Without `reassociate` one row of int8 runs 2 % more instructions; docs/machines/zen3.md, "LLVM's
/// passes".
const PIPELINE: &str = "cgscc(inline),globaldce,function(\
    sroa,early-cse<memssa>,simplifycfg,instcombine<no-verify-fixpoint>,reassociate,\
    loop-mssa(licm),gvn,instcombine<no-verify-fixpoint>,loop(indvars,loop-deletion),\
    slp-vectorizer,vector-combine,loop-unroll<LEVEL>,instcombine<no-verify-fixpoint>,\
    dse,adce,simplifycfg<hoist-common-insts;sink-common-insts;no-keep-loops>)";

/// Runs the pipeline on a verified module; level 0 leaves it as it is.
pub(super) fn run(module: &Module<'_>, machine: &TargetMachine, level: u8) -> Result<(), Error> {
    if level == 0 {
        return Ok(());
    }
    let passes = PIPELINE.replace("LEVEL", &format!("O{}", level.min(3)));
    module.run_passes(&passes, machine, PassBuilderOptions::create()).map_err(|e| Error::internal("LLVM passes", e.to_string()))
}
