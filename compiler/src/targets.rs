//! What can be compiled for: triples with their runtime archives, and CPUs.

use crate::error::Error;
use crate::link::tools;
use crate::report;
use rcompile_codegen::isa::{HOST_TRIPLE, Isa};
use serde::Serialize;

/// Runtime archives inside this program, by triple (made by `build.rs`).
const RUNTIMES: &[(&str, &[u8])] =
    &[("x86_64-unknown-linux-gnu", include_bytes!(concat!(env!("OUT_DIR"), "/runtime-x86_64-unknown-linux-gnu.a")))];

/// Triples of the contract.
const TRIPLES: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

/// The runtime archive of a triple.
pub fn runtime(triple: &str) -> Option<&'static [u8]> {
    RUNTIMES.iter().find(|(t, _)| *t == triple).map(|(_, bytes)| *bytes)
}

/// One line of the list.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    triple: &'static str,
    host: bool,
    cpus: Vec<&'static str>,
    /// What `native` means here.
    native: Option<String>,
    runtime: bool,
    linker: Option<String>,
    /// How to get what is missing.
    missing: Option<String>,
}

/// All triples with what is there.
pub fn list() -> Vec<Target> {
    let linker = tools::find().ok().map(|t| t.driver.display().to_string());
    let native = Isa::native().ok().map(|isa| format!("{} ({})", isa.name, isa.feature_string()));
    TRIPLES
        .into_iter()
        .map(|triple| {
            let host = triple == HOST_TRIPLE;
            let runtime = runtime(triple).is_some();
            let linker = if host { linker.clone() } else { None };
            let missing = match (runtime, &linker) {
                (false, _) => Some("not supported yet".to_string()),
                (true, None) => Some(tools::INSTALL_CC.to_string()),
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
