//! Topics `build` and `depth`: time and memory of the compiler, and what more layers cost it.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::measure::{Bench, Outcome, float};
use crate::process::Run;
use crate::record::Record;
use crate::stats::{Goal, Samples, Section};

/// Numbers of layers of the depth measurement.
const DEPTHS: [usize; 3] = [4, 16, 64];

/// What an earlier build has left would be measured otherwise.
const ALL_OF_IT: &[&str] = &["--no-cache"];

/// One build of the 1B shape with default options, but for the cache.
pub fn build(bench: &mut Bench) -> Outcome<()> {
    let model = bench.model("llama-1b", &["llama-1b"])?;
    let out = bench.options.dir.join("llama-1b");
    let (run, report) = bench.build(&model, &out, ALL_OF_IT)?;
    log(&mut bench.record, "build", &run, &report);
    let weights = float(&report["weight_bytes"]);
    bench.record.push("build checkpoint", tensor_bytes(&model.join("model.safetensors"))? as f64);
    bench.record.push("build weights", weights);
    bench.record.push("build rest", (fs::metadata(&out)?.len() as f64 - weights) / 1e6);
    Ok(())
}

/// Models of one shape with different numbers of layers.
pub fn depth(bench: &mut Bench) -> Outcome<()> {
    for layers in DEPTHS {
        let name = format!("toy-{layers}");
        let model = bench.model(&name, &["toy", "--layers", &layers.to_string()])?;
        let (run, report) = bench.build(&model, &bench.options.dir.join(&name), ALL_OF_IT)?;
        log(&mut bench.record, &name, &run, &report);
    }
    Ok(())
}

fn log(record: &mut Record, key: &str, run: &Run, report: &Value) {
    record.push(format!("{key} s"), run.wall_ms / 1e3);
    record.push(format!("{key} cpu"), run.cpu_ms / 1e3);
    record.push(format!("{key} rss"), run.rss_bytes_max as f64 / 1e9);
    record.push(format!("{key} tree"), run.tree_rss_bytes_max as f64 / 1e9);
    for (index, stage) in report["stages"].as_array().into_iter().flatten().enumerate() {
        let name = stage["name"].as_str().unwrap_or_default();
        record.push(format!("{key} stage {index} {name}"), float(&stage["ms"]) / 1e3);
    }
    record.push(format!("{key} code"), float(&report["code_bytes"]));
}

pub fn sections(bench: &Bench) -> Vec<Section> {
    vec![build_section(&bench.record), depth_section(&bench.record)]
}

fn build_section(record: &Record) -> Section {
    let note = "`rcompile build --no-cache` with default options (buckets 1, 8, 64, 512), model files in the page cache. Memory of one process: \
                as the kernel counts it; of all: sum over the process and its children, polled every 10 ms.";
    let mut section = Section::new("Build of llama-1b in bf16", note);
    section.add_goal("build", "s", record.get("build s"), Goal::AtMost(60.0));
    let stages = "build stage ";
    for key in record.keys(stages) {
        let name = key[stages.len()..].split_once(' ').map_or("", |(_, name)| name);
        section.add(format!("stage {name}"), "s", record.get(key));
    }
    section.add("processor time", "s", record.get("build cpu"));
    section.add_goal("peak memory, largest process", "GB", record.get("build rss"), Goal::AtMost(1.5));
    section.add_goal("peak memory, all processes", "GB", record.get("build tree"), Goal::AtMost(1.5));
    section.add("checkpoint", "bytes", record.get("build checkpoint"));
    section.add_goal("packed weights / checkpoint", "-", record.ratio("build weights", "build checkpoint"), Goal::AtMost(1.01));
    section.add_goal("executable without packed weights", "MB", record.get("build rest"), Goal::AtMost(20.0));
    section.add("generated code", "bytes", record.get("build code"));
    section
}

fn depth_section(record: &Record) -> Section {
    let note = "One shape (`make-model toy`), likewise; spread is (largest - smallest) / smallest, round by round.";
    let mut section = Section::new("Depth is free: 4, 16 and 64 layers", note);
    let codegen = DEPTHS.map(|layers| {
        let prefix = format!("toy-{layers} stage ");
        record.keys(&prefix).find(|key| key.ends_with(" codegen")).unwrap_or_default().to_owned()
    });
    let code = DEPTHS.map(|layers| format!("toy-{layers} code"));
    let spread = |keys: &[String; 3]| -> Samples {
        record.each(keys.each_ref().map(String::as_str), |values| {
            let smallest = values.into_iter().fold(f64::INFINITY, f64::min);
            let largest = values.into_iter().fold(0.0, f64::max);
            100.0 * (largest - smallest) / smallest
        })
    };
    for (layers, key) in DEPTHS.iter().zip(&code) {
        section.add(format!("code, {layers} layers"), "bytes", record.get(key));
    }
    section.add_goal("spread of code bytes", "%", spread(&code), Goal::AtMost(5.0));
    for (layers, key) in DEPTHS.iter().zip(&codegen) {
        section.add(format!("codegen, {layers} layers"), "s", record.get(key));
    }
    section.add_goal("spread of codegen time", "%", spread(&codegen), Goal::AtMost(20.0));
    // Less disturbed by what else runs; it has the packing of the weights in it, too.
    for layers in DEPTHS {
        section.add(format!("processor time of the build, {layers} layers"), "s", record.get(&format!("toy-{layers} cpu")));
    }
    section
}

/// Bytes of all tensors of a safetensors file: everything behind its header.
fn tensor_bytes(path: &Path) -> Outcome<u64> {
    let mut length = [0; 8];
    File::open(path)?.read_exact(&mut length)?;
    Ok(fs::metadata(path)?.len() - 8 - u64::from_le_bytes(length))
}
