//! Machines that executables are built for and run on: this one, and Arm CPUs under qemu's user emulation.

use crate::exe::{self, Exe};
use rcompile_codegen::isa::Isa;
use rcompile_codegen::program::{Compute, DType};
use std::path::{Path, PathBuf};

/// The other target.
const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// How the calling thread computes with floats, without the flags that say what happened: rounding, and whether numbers near zero become
/// zero.
pub fn float_control() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        let mut mxcsr = 0u32;
        // SAFETY: writes the four bytes at the address.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack, preserves_flags)) };
        u64::from(mxcsr & !0x3f)
    }
    #[cfg(target_arch = "aarch64")]
    {
        let fpcr: u64;
        // SAFETY: reads a register.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) fpcr, options(nomem, nostack, preserves_flags)) };
        fpcr
    }
}

/// Where an executable runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// `--cpu` for the aarch64 target; `None`: this machine.
    cpu: Option<String>,
    /// qemu's `-cpu`.
    emulated: String,
    /// A plugin of qemu, see [`crate::instructions`].
    plugin: Option<PathBuf>,
}

impl Machine {
    /// This machine.
    pub fn host() -> Machine {
        Machine { cpu: None, emulated: String::new(), plugin: None }
    }

    /// Buckets for prompts of any length: under emulation, where most time goes into builds, the largest takes few rows, too.
    pub fn buckets(&self) -> &'static str {
        if self.cpu.is_some() { "1,64" } else { "1,8,64" }
    }

    /// Can this machine run what is built for `cpu` of its own kind?
    pub fn runs(cpu: &str) -> bool {
        let native = Isa::native().expect("a CPU that is built for");
        Isa::lookup(&native.triple, cpu, &[]).is_ok_and(|isa| isa.runs_on(&native))
    }

    /// Executables for `cpu` on qemu's `emulated`; `None` with a message where cross tools are missing, which on CI is a failure.
    pub fn arm(cpu: &str, emulated: &str) -> Option<Machine> {
        let target = rcompile::targets::list().into_iter().find(|t| t.triple == AARCH64).expect("the target is known");
        let missing = target.missing.or_else(|| qemu().is_none().then(|| "apt-get install qemu-user".to_string()));
        if let Some(missing) = missing {
            assert!(std::env::var_os("CI").is_none(), "no executables for aarch64 here, and on CI nothing is skipped: {missing}");
            eprintln!("skipped: no executables for aarch64 here: {missing}");
            return None;
        }
        Some(Machine { cpu: Some(cpu.into()), emulated: emulated.into(), plugin: None })
    }

    /// The same with a plugin of qemu, whose lines come out on stderr.
    pub(crate) fn with_plugin(self, library: &Path) -> Machine {
        Machine { plugin: Some(library.into()), ..self }
    }

    /// The executable of a model directory with these options of `rcompile build`, see [`exe::build`].
    pub fn build(&self, model: &Path, options: &str) -> Exe {
        exe::build_on(self, model, options)
    }

    /// Does attention over a bf16 cache of heads of `head_dim` round queries and weights?
    pub fn rounds_attention(&self, head_dim: u32) -> bool {
        let isa = match &self.cpu {
            Some(cpu) => Isa::lookup(AARCH64, cpu, &[]),
            None => Isa::native(),
        };
        isa.expect("a CPU that is built for").attention(DType::Bf16, head_dim) != Compute::F32
    }

    /// Options that choose the target.
    pub(crate) fn build_options(&self) -> String {
        self.cpu.as_ref().map_or(String::new(), |cpu| format!(" --target {AARCH64} --cpu {cpu}"))
    }

    /// Program and arguments before the executable.
    pub(crate) fn emulator(&self) -> Vec<String> {
        match (&self.cpu, qemu()) {
            (Some(_), Some(qemu)) => {
                let mut words = vec![qemu, "-cpu".into(), self.emulated.clone()];
                if let Some(library) = &self.plugin {
                    words.extend(["-d".into(), "plugin".into(), "-plugin".into(), library.display().to_string()]);
                }
                words
            }
            _ => vec![],
        }
    }

    /// Of `count` similar checks the first one to do: all of them here, the last three under emulation, where each start takes time.
    pub fn first_of(&self, count: usize) -> usize {
        if self.cpu.is_some() { count.saturating_sub(3) } else { 0 }
    }
}

pub(crate) fn qemu() -> Option<String> {
    let names = ["qemu-aarch64", "qemu-aarch64-static"];
    names.iter().find_map(|name| rcompile::link::tools::in_path(name.as_ref())).map(|path| path.display().to_string())
}
