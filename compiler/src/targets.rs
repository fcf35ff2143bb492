//! What can be compiled for: triples with their runtime archives, and CPUs.

use crate::error::Error;
use crate::link::tools;
use crate::report;
use rcompile_codegen::isa::{HOST_TRIPLE, Isa};
use serde::Serialize;

/// Triples with the runtime archives inside this program (made by `build.rs`); empty: could not be built where rcompile was.
const RUNTIMES: [(&str, &[u8]); 2] = [
    ("x86_64-unknown-linux-gnu", include_bytes!(concat!(env!("OUT_DIR"), "/runtime-x86_64-unknown-linux-gnu.a"))),
    ("aarch64-unknown-linux-gnu", include_bytes!(concat!(env!("OUT_DIR"), "/runtime-aarch64-unknown-linux-gnu.a"))),
];

/// The runtime archive of a triple.
pub fn runtime(triple: &str) -> Option<&'static [u8]> {
    RUNTIMES.iter().find(|(t, bytes)| *t == triple && !bytes.is_empty()).map(|(_, bytes)| *bytes)
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
    let arch = if triple.starts_with("aarch64") { "arm64" } else { "amd64" };
    format!(
        "Debian: dpkg --add-architecture {arch} && apt-get update && apt-get install rustc-web libstd-rust-web-dev:{arch} {}; elsewhere: \
         rustup target add {triple} and {}; then build rcompile again (./x install --cross does it)",
        tools::cross_packages(triple),
        tools::cross_packages(triple),
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
    RUNTIMES
        .into_iter()
        .map(|(triple, _)| {
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
