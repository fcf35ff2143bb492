//! `info` and `verify`: what the executable knows about itself, and whether it is still that.

use serde::Serialize;

use super::Cx;
use super::args::InfoArgs;
use super::error::Failure;
use super::streams::{print, print_json};
use crate::about::{About, arena_bytes, hex};
use rcompile_message::{escape, size};

pub(super) fn info(cx: &Cx, args: &InfoArgs) -> Result<(), Failure> {
    let manifest = cx.manifest();
    if args.json {
        return print_json(&About::new(manifest, cx.payload.header()));
    }
    print(&table(cx))
}

fn table(cx: &Cx) -> String {
    let m = cx.manifest();
    let header = cx.payload.header();
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Names of models and files may be anything.
        out += &format!("{name:<14}{}\n", escape(&value));
    };
    line("model", format!("{} ({})", m.name, m.architecture));
    line("task", m.task.to_string());
    line("built by", format!("rcompile {}", m.rcompile_version));
    line("target", format!("{}, {}, attention of many rows cut for {} cores", m.target, m.cpu, m.cores));
    line("features", m.features.join(","));
    line("parameters", m.parameters.to_string());
    line("types", format!("weights {}, compute {}, KV cache {}, quantisation {}", m.dtype, m.compute, m.kv_dtype, m.quantization));
    line("context", format!("{} positions, {} slots", m.ctx_size, m.slots));
    for entry in &m.entries {
        let rows: Vec<String> = entry.buckets.iter().map(|b| b.rows.to_string()).collect();
        line("entry", format!("{}, buckets {}", entry.name, rows.join(",")));
    }
    let place = if header.weights_embedded != 0 { "in this file" } else { "in the file beside" };
    line("weights", format!("{} {place}", size(m.weight_bytes)));
    line("KV cache", format!("{}, {} per position", size(m.state.bytes), size(m.state.bytes_per_token)));
    line("arena", size(arena_bytes(m)));
    line("code", format!("{}, of the runtime too", size(header.code_bytes())));
    line("file", size(header.file_len));
    if let Some(text) = &m.text {
        let template = if text.chat_template.is_some() { "with chat template" } else { "no chat template" };
        line("tokenizer", format!("{}, {template}", size(text.tokenizer.len)));
    }
    for note in &m.notes {
        line("note", note.clone());
    }
    for input in &m.inputs {
        line("input", format!("{} {} {}", input.sha256, input.name, size(input.bytes)));
    }
    out
}

pub(super) fn verify(cx: &Cx, args: &InfoArgs) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Report {
        ok: bool,
        weight_bytes: u64,
        weights_blake3: String,
    }
    let weight_bytes = cx.payload.verify_weights()?;
    let weights_blake3 = hex(&cx.payload.header().weights_hash);
    if args.json {
        return print_json(&Report { ok: true, weight_bytes, weights_blake3 });
    }
    print(&format!("ok: header, manifest, tokenizer, code, constants, variables and {} of weights are as built\n", size(weight_bytes)))
}
