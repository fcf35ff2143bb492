//! One unit: a module from the builder through verifier and pass pipeline to object bytes.

use super::builder::ModuleBuilder;
use super::{object, optimise};
use crate::error::Error;
use crate::isa::Isa;
use inkwell::context::Context;

/// What to make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Emit {
    /// Text of the optimised IR.
    pub llvm_ir: bool,
    /// Assembly text.
    pub asm: bool,
}

/// Result of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// ELF object bytes.
    pub object: Vec<u8>,
    /// Optimised LLVM IR, if asked for.
    pub llvm_ir: Option<String>,
    /// Assembly, if asked for.
    pub asm: Option<String>,
}

/// Builds, checks, optimises and emits a module. Has its own LLVM context, so that units can be compiled on several threads.
/// The same input gives the same bytes.
pub fn build(
    name: &str,
    isa: &Isa,
    opt_level: u8,
    emit: Emit,
    fill: impl FnOnce(&ModuleBuilder<'_>) -> Result<(), Error>,
) -> Result<Compiled, Error> {
    let machine = object::machine(isa, opt_level)?;
    let context = Context::create();
    let mb = ModuleBuilder::new(&context, name, isa);
    mb.module.set_triple(&machine.get_triple());
    mb.module.set_data_layout(&machine.get_target_data().get_data_layout());
    fill(&mb)?;
    mb.module.verify().map_err(|e| {
        let text = mb.module.print_to_string().to_string();
        Error::internal("LLVM verifier", format!("{name}: {e}\n{text}"))
    })?;
    optimise::run(&mb.module, &machine, opt_level)?;
    let llvm_ir = emit.llvm_ir.then(|| mb.module.print_to_string().to_string());
    let asm = if emit.asm {
        // The back end changes the module while it emits: give it a copy.
        let copy = mb.module.clone();
        Some(object::assembly(&copy, &machine)?)
    } else {
        None
    };
    Ok(Compiled { object: object::object(&mb.module, &machine)?, llvm_ir, asm })
}
