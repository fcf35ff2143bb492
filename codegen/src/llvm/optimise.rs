//! LLVM's middle-end pipeline.

use crate::error::Error;
use inkwell::module::Module;
use inkwell::passes::PassBuilderOptions;
use inkwell::targets::TargetMachine;

/// Runs `default<O0>` .. `default<O3>`. From O2 on these names turn LLVM's vectorisers on, whatever the options say (LLVM 19,
/// `setupOptionsForPipelineAlias`). Generators write vectors themselves and leave little to them.
pub(super) fn run(module: &Module<'_>, machine: &TargetMachine, level: u8) -> Result<(), Error> {
    let options = PassBuilderOptions::create();
    options.set_loop_interleaving(false);
    module.run_passes(&format!("default<O{}>", level.min(3)), machine, options).map_err(|e| Error::internal("LLVM passes", e.to_string()))
}
