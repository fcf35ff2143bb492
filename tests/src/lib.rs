//! The harness of the workspace's tests: builds executables, runs them, compares what they say.
//!
//! ```text
//! model directory --exe::build--> Exe --json, text, run--> what the executable says  \
//!                 --Reference (graph interpreter)--------> what the graph means       > compare, within tol
//! reference.json -----------------------------------------> what transformers computes /
//! ```
//! The compiler runs inside the test process, through its library: there is no second build of it, and a test of a debug
//! build tests the debug build. Executables are cached ([`exe`]). Models come from three places: `tests/golden` (random, of
//! every family), `../shared/assets` (trained; [`assets`] skips where they are missing, which on CI is a failure), and
//! [`toy`] (random, of any shape; [`coded_toy`]: with the layers as codes).

pub mod checks;
pub mod coded_toy;
pub mod compare;
pub mod control_group;
pub mod exe;
pub mod faults;
pub mod instructions;
pub mod machine;
pub mod reference;
pub mod steps;
pub mod text;
pub mod tol;
pub mod toy;

pub use compare::{Difference, difference};
pub use exe::{Exe, build, model_dir, rcompile};
pub use machine::{Machine, float_control};
pub use reference::Reference;

use serde_json::Value;
use std::path::{Path, PathBuf};

/// A folder of the shared assets; `None` with a message where it is missing, which on CI is a failure.
pub fn assets(folder: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/assets").join(folder);
    if let Ok(path) = path.canonicalize() {
        return Some(path);
    }
    assert!(std::env::var_os("CI").is_none(), "{} is missing, and on CI nothing is skipped", path.display());
    eprintln!("skipped: {} is missing", path.display());
    None
}

/// The directory of a golden model.
pub fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

/// `reference.json` of a model or tokenizer directory.
pub fn reference_json(dir: &Path) -> Value {
    read_json(&dir.join("reference.json"))
}

/// A JSON file.
pub fn read_json(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A JSON list of token ids.
pub fn ids(list: &Value) -> Vec<u32> {
    let id = |v: &Value| u32::try_from(v.as_u64().expect("a token id")).expect("a token id");
    list.as_array().expect("a list of token ids").iter().map(id).collect()
}

/// A JSON list of numbers.
pub fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().expect("a list of numbers").iter().map(|v| v.as_f64().expect("a number")).collect()
}

/// Ids as `--tokens` takes them.
pub fn joined(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// An executable's numbers as the interpreter's.
pub fn wide(row: &[f32]) -> Vec<f64> {
    row.iter().map(|x| f64::from(*x)).collect()
}

/// Does this machine have integer dots?
pub fn has_int8_dot() -> bool {
    let isa = rcompile_codegen::isa::Isa::native().expect("a host of the tests");
    isa.int8_dot(isa.lanes).is_some()
}

/// Index of the largest element, the first of several.
pub fn argmax(row: &[f64]) -> u32 {
    let best = row.iter().enumerate().fold(0, |best, (i, x)| if *x > row[best] { i } else { best });
    best as u32
}

/// By how much the largest element wins over the second.
pub fn margin(row: &[f64]) -> f64 {
    let best = argmax(row) as usize;
    let second = row.iter().enumerate().filter(|(i, _)| *i != best).fold(f64::NEG_INFINITY, |m, (_, x)| m.max(*x));
    row[best] - second
}
