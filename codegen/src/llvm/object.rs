//! Target machines, object bytes and assembly text.

use crate::error::Error;
use crate::isa::{Arch, HOST_TRIPLE, Isa, arch_of};
use inkwell::OptimizationLevel;
use inkwell::module::Module;
use inkwell::targets::{CodeModel, FileType, InitializationConfig, RelocMode, Target, TargetMachine, TargetTriple};
use std::sync::Once;

/// Registers the back ends, once per process.
pub(crate) fn initialise() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let config = InitializationConfig::default();
        Target::initialize_x86(&config);
        Target::initialize_aarch64(&config);
    });
}

/// Position-independent code, small code model.
pub(super) fn machine(isa: &Isa, level: u8) -> Result<TargetMachine, Error> {
    initialise();
    let triple = TargetTriple::create(&isa.triple);
    let target = Target::from_triple(&triple).map_err(|e| Error::internal("LLVM target", e.to_string()))?;
    let level = match level {
        0 => OptimizationLevel::None,
        1 => OptimizationLevel::Less,
        2 => OptimizationLevel::Default,
        _ => OptimizationLevel::Aggressive,
    };
    target
        .create_target_machine(&triple, &isa.llvm_cpu, &isa.feature_string(), level, RelocMode::PIC, CodeModel::Small)
        .ok_or_else(|| Error::internal("LLVM target machine", isa.triple.clone()))
}

/// Object file (ELF) of a module.
pub(super) fn object(module: &Module<'_>, machine: &TargetMachine) -> Result<Vec<u8>, Error> {
    let buffer = machine.write_to_memory_buffer(module, FileType::Object).map_err(|e| Error::internal("LLVM object", e.to_string()))?;
    Ok(buffer.as_slice().to_vec())
}

/// Assembly text of a module.
pub(super) fn assembly(module: &Module<'_>, machine: &TargetMachine) -> Result<String, Error> {
    let buffer = machine.write_to_memory_buffer(module, FileType::Assembly).map_err(|e| Error::internal("LLVM assembly", e.to_string()))?;
    let text = buffer.as_slice();
    Ok(String::from_utf8_lossy(text.strip_suffix(&[0]).unwrap_or(text)).into_owned())
}

/// LLVM's name of the host's CPU, if the host is of this architecture.
pub(crate) fn host_name(arch: Arch) -> Option<String> {
    (arch_of(HOST_TRIPLE) == Some(arch)).then(|| TargetMachine::get_host_cpu_name().to_string())
}

/// Version of the LLVM that is linked or loaded: `19.1.7`.
pub(crate) fn version() -> String {
    let (major, minor, patch) = inkwell::support::get_llvm_version();
    format!("{major}.{minor}.{patch}")
}
