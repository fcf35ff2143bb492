//! Other engines on the same models: which there are, and how they are started.
//!
//! ```text
//! --peers DIR:  DIR/llamacpp/bin/python   DIR/models/llama-1b-bf16.gguf       --> tests/peers/drive_llamacpp.py
//!               DIR/openvino/bin/python   DIR/models/llama-1b-bf16-openvino   --> tests/peers/drive_openvino.py
//! ```
//! `docs/benchmarks.md` says how the directory is made. Drivers take the flags of our `bench` verb, draw the same token ids, and print
//! the same JSON line, again for every line on stdin with `--turns`. What is not there is left out.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::measure::Bench;
use crate::record::Record;

/// The name of our own executables among the engines.
pub const OURS: &str = "rcompile";

/// Where the drivers are.
pub const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers");

/// Another engine with a model of its own form.
pub struct Engine {
    pub name: &'static str,
    pub program: PathBuf,
    driver: Vec<OsString>,
}

impl Engine {
    /// The driver with its model, and these flags.
    pub fn words(&self, flags: &[&str]) -> Vec<OsString> {
        self.driver.iter().cloned().chain(flags.iter().map(OsString::from)).collect()
    }
}

/// The engines that have a model of this name, `SHAPE-TYPE`.
pub fn engines(bench: &Bench, model: &str) -> Vec<Engine> {
    let Some(dir) = &bench.options.peers else { return Vec::new() };
    let precision = if model.ends_with("bf16") {
        "bf16"
    } else if model.ends_with("f32") {
        "f32"
    } else {
        // Codes: what the engine thinks best.
        "default"
    };
    let mut engines = vec![
        engine("OpenVINO", dir, "openvino", &format!("{model}-openvino"), precision),
        engine("llama.cpp", dir, "llamacpp", &format!("{model}.gguf"), precision),
    ];
    if precision == "bf16" {
        // Not every CPU is faster with bf16 products than with f32: the better of both is what stands against us.
        engines.push(engine("OpenVINO, f32 arithmetic", dir, "openvino", &format!("{model}-openvino"), "f32"));
    }
    let wanted = |engine: &Engine| bench.options.engines.is_empty() || bench.options.engines.iter().any(|name| name == engine.name);
    engines.into_iter().flatten().filter(wanted).collect()
}

fn engine(name: &'static str, dir: &Path, tool: &str, model: &str, precision: &str) -> Option<Engine> {
    let program = dir.join(tool).join("bin/python");
    let model = dir.join("models").join(model);
    if !program.exists() || !model.exists() {
        return None;
    }
    let script = format!("{SCRIPTS}/drive_{tool}.py");
    let driver = vec![script.into(), "--model".into(), model.into(), "--precision".into(), precision.into()];
    Some(Engine { name, program, driver })
}

/// Peers that were measured under `KEY | ENGINE`: engine and key.
pub fn of(record: &Record, key: &str) -> Vec<(String, String)> {
    let prefix = format!("{key} | ");
    let found = record.keys(&prefix).map(|k| (k[prefix.len()..].to_owned(), k.to_owned()));
    found.filter(|(engine, _)| engine != OURS).collect()
}

/// Rounds that a claim of being ahead needs, and in how many of nine one has to be ahead.
const ROUNDS_MIN: usize = 9;

/// What paired rounds say: `ratios` are ours over theirs, larger is better.
pub fn verdict(ratios: &[f64]) -> String {
    let (rounds, ahead) = (ratios.len(), ratios.iter().filter(|&&r| r > 1.0).count());
    let median = ratios.iter().copied().collect::<crate::stats::Samples>().median();
    // Ahead in at least 8 of 9, and as clearly where there are more rounds.
    let clear = |wins: usize| wins * 9 >= rounds * 8;
    let word = match () {
        () if rounds == 0 => return String::new(),
        () if median > 1.0 && clear(ahead) && rounds >= ROUNDS_MIN => "AHEAD",
        () if median < 1.0 && clear(rounds - ahead) && rounds >= ROUNDS_MIN => "BEHIND",
        () if rounds >= ROUNDS_MIN => "undecided",
        () => "too few rounds for a claim",
    };
    format!("ahead in {ahead} of {rounds}: {word}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_needs_nine_rounds_and_eight_of_them() {
        let wins = |won: usize, lost: usize| verdict(&[vec![1.1; won], vec![0.9; lost]].concat());
        assert_eq!(wins(8, 1), "ahead in 8 of 9: AHEAD");
        assert_eq!(wins(7, 2), "ahead in 7 of 9: undecided");
        assert_eq!(wins(1, 8), "ahead in 1 of 9: BEHIND");
        assert_eq!(wins(8, 0), "ahead in 8 of 8: too few rounds for a claim");
        assert_eq!(wins(0, 2), "ahead in 0 of 2: too few rounds for a claim");
        assert_eq!(wins(0, 0), "");
    }
}
