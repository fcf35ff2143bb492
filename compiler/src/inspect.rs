//! `rcompile inspect DIR|OUT`: what is inside a model directory or an executable, without building or running anything.
//!
//! `--scaling` plans a directory, or takes an executable's manifest, and bounds the speed over cores (`scaling.rs`).
//!
//! A directory is planned as a build with default options would (`--cpu` of `--target`): that is where its memory comes from. One that
//! would be refused gives the same error, with the same exit code, as a build.

use crate::error::Error;
use crate::input::missing;
use crate::link::payload::{self, Identity};
use crate::options::{self, Inspect};
use crate::pipeline;
use crate::report::{self, Report};
use crate::scaling::{self, Subject};
use crate::source::task_of;
use rcompile_message::{escape, size};
use rcompile_models::{Kind, Model, OpenOptions, TokenizerUse};
use rcompile_runtime::abi::{Manifest, Task};
use rcompile_runtime::about::About;
use rcompile_runtime::memory;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;

/// The verb.
pub fn run(options: &Inspect) -> Result<(), Error> {
    if options.path.is_file() {
        let read = payload::identity(&options.path).map_err(|e| missing(&options.path, "executable", &e))?;
        return match read {
            Some(Identity { len, needed, .. }) if len < needed => {
                let path = options.path.display().to_string();
                let (expected, found) = (format!("at least {needed} bytes"), len.to_string());
                Err(rcompile_models::Error::new(Kind::Malformed, path, "file", "is a truncated executable", expected, found).into())
            }
            Some(identity) => executable(options, &identity),
            None => Err(not_ours(
                options,
                Kind::Malformed,
                "is neither a model directory nor an executable of rcompile, or one that was cut short",
            )),
        };
    }
    if options.scaling { directory_scaling(options) } else { directory(options) }
}

/// Plans the model as `rcompile build` would with default options, and writes nothing.
fn plan(options: &Inspect) -> Result<Report, Error> {
    let mut args: Vec<OsString> = ["rcompile", "build", "--quiet", "--no-tokenizer", "--no-cache", "--dry-run"].map(Into::into).to_vec();
    // A value of its own may look like a flag.
    let mut give = |flag: &str, value: &OsStr| {
        let mut arg = OsString::from(flag);
        arg.push(value);
        args.push(arg);
    };
    give("--model=", options.path.as_os_str());
    for (flag, value) in [("--target=", &options.target), ("--cpu=", &options.cpu)] {
        value.iter().for_each(|value| give(flag, value.as_ref()));
    }
    let options::Parsed::Run(options::Command::Build(build)) = options::parse(args)? else {
        return Err(Error::bug("inspect", "not a build"));
    };
    pipeline::run(&build)
}

fn directory_scaling(options: &Inspect) -> Result<(), Error> {
    let planned = plan(options)?;
    let subject = Subject {
        name: planned.model,
        encoder: planned.buckets.first().is_some_and(|b| b.entry == Task::Embed.entry()),
        features: planned.features,
        cpu: planned.cpu,
        ctx_size: planned.ctx_size,
        buckets: planned.buckets.into_iter().map(|b| (b.rows, b.tile_rows, b.costs)).collect(),
    };
    scaling::print(&subject, options.bandwidth, options.json)
}

fn executable_scaling(options: &Inspect, m: &Manifest) -> Result<(), Error> {
    let entry = m.entries.first();
    let subject = Subject {
        name: m.name.clone(),
        encoder: m.task == Task::Embed,
        cpu: m.cpu.clone(),
        features: m.features.clone(),
        ctx_size: m.ctx_size,
        buckets: entry.map_or(vec![], |e| e.buckets.iter().map(|b| (b.rows, b.tile_rows, b.regions.clone())).collect()),
    };
    scaling::print(&subject, options.bandwidth, options.json)
}

fn not_ours(options: &Inspect, kind: Kind, what: &str) -> Error {
    let path = options.path.display().to_string();
    rcompile_models::Error::new(kind, path, "file", what, "DIR or OUT", "another file").into()
}

fn executable(options: &Inspect, identity: &Identity) -> Result<(), Error> {
    let m = identity.manifest().map_err(|(kind, what)| not_ours(options, kind, what))?;
    if !identity.is_intact() {
        return Err(not_ours(options, Kind::Malformed, "is an executable whose header is damaged"));
    }
    if options.cpu.is_some() || options.target.is_some() {
        let what = "inspect: --cpu and --target are for model directories, an executable has its own".into();
        return Err(Error::Usage { what, help: None });
    }
    if options.scaling {
        return executable_scaling(options, &m);
    }
    if options.json {
        return report::print_json(&About::new(&m, &identity.header));
    }
    let mut out = String::new();
    let _ = writeln!(out, "{}: {}, {} parameters, task {}", m.name, m.architecture, m.parameters, m.task);
    let _ = writeln!(out, "  built by   rcompile {} for {} ({})", m.rcompile_version, m.cpu, m.target);
    let _ = writeln!(out, "  features   {}", m.features.join(" "));
    let _ = writeln!(out, "  types      stored {}, matmul inputs {}, KV cache {}", m.dtype, m.compute, m.kv_dtype);
    if m.quantization != "none" {
        let _ = writeln!(out, "  codes      {}", m.quantization);
    }
    let _ =
        writeln!(out, "  context    {} positions, {} slots, {} of KV cache per token", m.ctx_size, m.slots, size(m.state.bytes_per_token));
    let _ = writeln!(out, "  sizes      file {}, weights {}, state {}", size(identity.len), size(m.weight_bytes), size(m.state.bytes));
    for entry in &m.entries {
        for b in &entry.buckets {
            let arena = size(b.arena_bytes);
            let _ = writeln!(
                out,
                "  {:<10} {} rows, {} regions, {} barriers per layer, arena {arena}",
                entry.name,
                b.rows,
                b.regions.len(),
                b.barriers_per_layer
            );
        }
    }
    for input in &m.inputs {
        let _ = writeln!(out, "  {}  {} {}", input.sha256, input.name, size(input.bytes));
    }
    report::print(&report::quoted(&out))
}

fn directory(options: &Inspect) -> Result<(), Error> {
    let how = OpenOptions { tokenizer: TokenizerUse::Optional, within: Some(memory::within), ..OpenOptions::default() };
    let model = rcompile_models::open(&options.path, &how)?;
    let planned = plan(options)?;
    if options.json {
        return report::print_json(&directory_json(&model, &planned));
    }
    let text = directory_text(&model, &planned);
    model.warnings.iter().for_each(|w| report::say(&w.to_string()));
    report::print(&text)
}

fn directory_json(model: &Model, planned: &Report) -> Value {
    let f = model.facts();
    let warnings: Vec<String> = model.warnings.iter().map(|w| w.to_string()).collect();
    let tensors: Vec<Value> = model
        .weights
        .iter()
        .map(|t| json!({ "name": &*t.stored_name, "dtype": t.dtype.to_string(), "shape": t.shape, "file": model.weights.file_of(t), "bytes": t.size_bytes }))
        .collect();
    json!({
        "name": model.name,
        "architecture": model.arch.class_names[0],
        "task": task_of(model.arch.task),
        "parameters": model.parameters(),
        "weight_bytes": model.weights.size_bytes(),
        "bytes_by_type": types(model),
        "vocab_size": f.vocab_size,
        "hidden_size": f.hidden_size,
        "layers": f.layers,
        "heads": f.heads,
        "kv_heads": f.kv_heads,
        "head_dim": f.head_dim,
        "max_positions": f.max_positions,
        "kv_elements_per_token": kv_elements_per_token(model),
        "tied_head": f.tied_head,
        "quantization": model.scheme.map(|s| s.name()),
        "memory": {
            "cpu": planned.cpu,
            "ctx_size": planned.ctx_size,
            "weight_bytes": planned.weight_bytes,
            "kv_bytes_per_token": planned.kv_bytes_per_token,
            "kv_bytes": planned.kv_bytes,
            "slots": planned.slots,
            "arena_bytes": planned.arena_bytes,
            "private_bytes_per_thread": private_bytes_per_thread(planned),
        },
        "tokenizer": model.tokenizer.as_ref().map(|t| json!({ "model": t.facts.model, "size": t.facts.size })),
        "chat_template": model.chat_template.is_some(),
        "warnings": warnings,
        "tensors": tensors,
    })
}

fn directory_text(model: &Model, planned: &Report) -> String {
    let f = model.facts();
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{}: {}, {} parameters, task {}",
        escape(&model.name),
        model.arch.class_names[0],
        model.parameters(),
        task_of(model.arch.task)
    );
    let _ = writeln!(
        out,
        "  layers     {}, width {}, {} heads of {}, {} for keys and values",
        f.layers, f.hidden_size, f.heads, f.head_dim, f.kv_heads
    );
    let head = match (f.head, f.tied_head) {
        (None, _) => "",
        (Some(_), true) => ", head tied to the embedding",
        (Some(_), false) => ", head of its own",
    };
    let _ = writeln!(out, "  vocabulary {}{head}", f.vocab_size);
    let kept = kv_elements_per_token(model).map_or_else(String::new, |n| format!(", {n} KV elements per token"));
    let _ = writeln!(out, "  context    {} positions{kept}", f.max_positions);
    if let Some(scheme) = model.scheme {
        let _ = writeln!(out, "  codes      {}, {} matrices", scheme.name(), model.weights.coded_count());
    }
    for (dtype, bytes) in &types(model) {
        let _ = writeln!(out, "  weights    {dtype} {}", size(*bytes));
    }
    let _ = writeln!(
        out,
        "  memory     weights {}, KV cache {} for {} positions in {} slots, arena {}, {} per thread; built for {}",
        size(planned.weight_bytes),
        size(planned.kv_bytes),
        planned.ctx_size,
        planned.slots,
        size(planned.arena_bytes),
        size(private_bytes_per_thread(planned)),
        planned.cpu
    );
    let _ = writeln!(out, "  files      {} with {} tensors", model.weights.files().len(), model.weights.iter().count());
    match &model.tokenizer {
        Some(t) => _ = writeln!(out, "  tokenizer  {}, {} tokens", t.facts.model, t.facts.size),
        None => _ = writeln!(out, "  tokenizer  none"),
    }
    let _ = writeln!(out, "  template   {}", if model.chat_template.is_some() { "present" } else { "none" });
    out += if model.tokenizer.is_some() { "  can be compiled\n" } else { "  can be compiled with --no-tokenizer\n" };
    out
}

/// Of models that keep keys and values from one step to the next.
fn kv_elements_per_token(model: &Model) -> Option<usize> {
    let f = model.facts();
    f.causal.then_some(2 * f.layers * f.kv_heads * f.head_dim)
}

fn private_bytes_per_thread(planned: &Report) -> u64 {
    planned.buckets.iter().map(|b| b.private_bytes).max().unwrap_or(0)
}

fn types(model: &Model) -> BTreeMap<String, u64> {
    let mut types = BTreeMap::new();
    model.weights.iter().for_each(|t| *types.entry(t.dtype.to_string()).or_insert(0) += t.size_bytes);
    types
}
