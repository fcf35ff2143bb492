//! What can be compiled for: all that the driver knows of each architecture, and the verb that lists them with their CPUs.

use crate::error::Error;
use crate::link::tools;
use crate::report;
use object::elf::{EM_AARCH64, EM_X86_64, Machine};
use rcompile_codegen::isa::{FOREIGN, HOST_TRIPLE, Isa};
use serde::Serialize;

/// An architecture, as the driver deals with it.
#[derive(Debug)]
pub struct Platform {
    /// Its triple.
    pub triple: &'static str,
    /// The runtime archive inside this program (made by `build.rs`); empty: could not be built where rcompile was.
    runtime: &'static [u8],
    /// Machine of its ELF files.
    pub machine: Machine,
    /// The C compiler's option that marks where jumps may go.
    pub protection: &'static str,
    /// Debian's name of it.
    debian: &'static str,
    /// Debian's and Ubuntu's packages with a C compiler and library for it, on another architecture.
    pub cross_packages: &'static str,
    /// The program that runs its executables on another architecture.
    pub emulator: &'static str,
}

/// All of them.
const PLATFORMS: [Platform; 2] = [
    Platform {
        triple: "x86_64-unknown-linux-gnu",
        runtime: include_bytes!(concat!(env!("OUT_DIR"), "/runtime-x86_64-unknown-linux-gnu.a")),
        machine: EM_X86_64,
        protection: "-fcf-protection=full",
        debian: "amd64",
        cross_packages: "gcc-x86-64-linux-gnu libc6-dev-amd64-cross",
        emulator: "qemu-x86_64",
    },
    Platform {
        triple: "aarch64-unknown-linux-gnu",
        runtime: include_bytes!(concat!(env!("OUT_DIR"), "/runtime-aarch64-unknown-linux-gnu.a")),
        machine: EM_AARCH64,
        protection: "-mbranch-protection=standard",
        debian: "arm64",
        cross_packages: "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
        emulator: "qemu-aarch64",
    },
];

/// The platform of a triple that [`Isa::lookup`] knows.
pub fn platform(triple: &str) -> &'static Platform {
    PLATFORMS.iter().find(|p| p.triple == triple).expect("each triple of the ISA tables has a platform")
}

/// The platform of the other architecture.
pub fn foreign() -> &'static Platform {
    platform(FOREIGN.0)
}

/// The runtime archive of a triple.
pub fn runtime(triple: &str) -> Option<&'static [u8]> {
    PLATFORMS.iter().find(|p| p.triple == triple && !p.runtime.is_empty()).map(|p| p.runtime)
}

/// The same, or the error that says how to get it.
pub fn require_runtime(triple: &str) -> Result<&'static [u8], Error> {
    runtime(triple).ok_or_else(|| Error::Toolchain {
        program: "runtime".into(),
        what: format!("expected an archive for {triple} inside rcompile, found none: it could not be built where rcompile was"),
        help: Some(install_runtime(triple)),
    })
}

/// How to get the runtime of another architecture: rcompile is built again after this.
fn install_runtime(triple: &str) -> String {
    let Platform { debian, cross_packages, .. } = platform(triple);
    format!(
        "Debian: dpkg --add-architecture {debian} && apt-get update && apt-get install rustc-web libstd-rust-web-dev:{debian} \
         {cross_packages}; elsewhere: rustup target add {triple} and {cross_packages}; then build rcompile again (./x install --cross does \
         it)"
    )
}

/// One line of the list.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    /// Name.
    pub triple: &'static str,
    /// This machine's.
    pub host: bool,
    cpus: Vec<&'static str>,
    /// What `native` means here.
    native: Option<String>,
    runtime: bool,
    linker: Option<String>,
    /// How to get what is missing.
    pub missing: Option<String>,
}

/// All triples with what is there.
pub fn list() -> Vec<Target> {
    let native = Isa::native().ok().map(|isa| format!("{} ({})", isa.name, isa.feature_string()));
    PLATFORMS
        .iter()
        .map(|&Platform { triple, .. }| {
            let host = triple == HOST_TRIPLE;
            let runtime = runtime(triple).is_some();
            let linker = tools::find(triple).ok().map(|t| t.driver.display().to_string());
            let missing = match (runtime, &linker) {
                (false, _) => Some(install_runtime(triple)),
                (true, None) => Some(tools::install_cc(triple)),
                _ => None,
            };
            let native = if host { native.clone() } else { None };
            Target { triple, host, cpus: Isa::known_cpus(triple), native, runtime, linker, missing }
        })
        .collect()
}

/// `rcompile targets`.
pub fn run(json: bool) -> Result<(), Error> {
    let list = list();
    if json {
        return report::print_json(&list);
    }
    let mut out = String::new();
    for t in &list {
        out += &format!("{}{}\n", t.triple, if t.host { " (this machine)" } else { "" });
        let yes = |b: bool| if b { "present" } else { "missing" };
        out += &format!("  runtime  {}\n  linker   {}\n", yes(t.runtime), t.linker.as_deref().unwrap_or("missing"));
        if let Some(native) = &t.native {
            out += &format!("  native   {native}\n");
        }
        if !t.cpus.is_empty() {
            out += &format!("  cpus     {}\n", t.cpus.join(" "));
        }
        if let Some(missing) = &t.missing {
            out += &format!("  help     {missing}\n");
        }
    }
    report::print(&out)
}
