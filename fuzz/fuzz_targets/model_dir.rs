//! Fed: which file of which sound model directory is replaced, and its new bytes; JSON is mostly mutated as such. A new `config.json` gets
//! the tensors that it asks for, so that what lies behind the check of weights is reached. Oracle: no panic, refusals and warnings are one
//! line; what is opened has a graph that the verifier accepts.
#![no_main]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use rcompile_broken::toy;
use rcompile_fuzz::{check_error, check_line, mutate_json, repository, scratch, start, words};
use rcompile_graph::{DType, verify};
use rcompile_models::arch::{self, Role};
use rcompile_models::config::ConfigReader;
use rcompile_models::quantised::{self, Method};
use rcompile_models::trace::{TraceOptions, trace};
use rcompile_models::{OpenOptions, TokenizerUse, open};
use serde_json::{Map, Value, json};

/// Files that can be replaced. The weights' entry is their header.
const FILES: [&str; 12] = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.json",
    WEIGHTS,
    INDEX,
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Configs that ask for more tensors, or for more bytes of them, get those of the directory that they replaced.
const TENSORS_MAX: usize = 2000;
const WEIGHT_BYTES_MAX: u64 = 1 << 40;
/// Codes of more bytes have scales of zero, which are refused.
const CODED_BYTES_MAX: u64 = 1 << 20;
/// Deeper models are not traced, for the time that it takes.
const LAYERS_MAX: usize = 16;

/// A sound model: the contents of its files, with the weights' length.
struct Base {
    path: PathBuf,
    files: BTreeMap<&'static str, Vec<u8>>,
    weights_len: u64,
}

static BASES: LazyLock<Vec<Base>> = LazyLock::new(|| configs().into_iter().enumerate().map(|(i, files)| base(i, files)).collect());
static WORDS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let files = ["config", "rope", "generation", "pooling", "quantised", "tokenizer", "lib", "arch/decoder", "arch/gpt2", "arch/bert"];
    let files = files.map(|f| format!("models/src/{f}.rs"));
    words(&files.each_ref().map(String::as_str))
});

fuzz_target!(init: start(seeds()), |data: &[u8]| {
    let Some((&[file, base], bytes)) = data.split_first_chunk() else { return };
    let (name, base) = (FILES[usize::from(file) % FILES.len()], &BASES[usize::from(base) % BASES.len()]);
    base.replace(name, bytes);
    let reads_text = ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.json"].contains(&name);
    let tokenizer = if reads_text { TokenizerUse::Required } else { TokenizerUse::Unread };
    look(&base.path, &OpenOptions { ctx_size: Some(32).filter(|_| file > 127), strict: file > 63, tokenizer, within: None });
    base.restore(name);
});

fn look(path: &Path, options: &OpenOptions) {
    let model = match open(path, options) {
        Ok(model) => model,
        Err(e) => return check_error(&e),
    };
    model.warnings.iter().for_each(|w| check_line(w, "warning[W-"));
    let _ = (model.list_inputs(), model.text_limit());
    let facts = model.facts();
    if facts.layers > LAYERS_MAX {
        return;
    }
    let ctx_size = facts.max_positions.min(64) as u64;
    for weight_dtype in [None, Some(DType::BF16)] {
        let (kv_dtype, as_stored) = (DType::BF16, vec![]);
        let options = TraceOptions { bucket: 8, logit_rows: 4, runs: 4, ctx_size, kv_dtype, weight_dtype, as_stored };
        let module = trace(&*model.net, model.arch.task, &model.weights, &options).unwrap_or_else(|e| panic!("{e}"));
        verify(&module).unwrap_or_else(|e| panic!("{e}"));
    }
}

impl Base {
    fn replace(&self, name: &str, bytes: &[u8]) {
        match name {
            WEIGHTS => {
                let old = self.weights_len - self.files[WEIGHTS].len() as u64;
                write_weights(&self.path.join(WEIGHTS), bytes, old);
            }
            INDEX => {
                fs::remove_file(self.path.join(WEIGHTS)).unwrap();
                fs::write(self.path.join(INDEX), bytes).unwrap();
            }
            "config.json" => {
                fs::write(self.path.join(name), bytes).unwrap();
                if let Some((header, len)) = tensors_for(bytes, self.files.contains_key("modules.json")) {
                    write_weights(&self.path.join(WEIGHTS), &header, len);
                }
            }
            _ => fs::write(self.path.join(name), bytes).unwrap(),
        }
    }

    fn restore(&self, name: &str) {
        if [WEIGHTS, INDEX, "config.json"].contains(&name) {
            write_weights(&self.path.join(WEIGHTS), &self.files[WEIGHTS], self.weights_len - self.files[WEIGHTS].len() as u64);
        }
        match self.files.get(name) {
            Some(bytes) if name != WEIGHTS => fs::write(self.path.join(name), bytes).unwrap(),
            Some(_) => {}
            None => fs::remove_file(self.path.join(name)).unwrap(),
        }
    }
}

/// A header and what it describes: zeros that take no memory, or, of a few codes, whose scales are not zero, bytes of `0x11`.
fn write_weights(path: &Path, header: &[u8], data_bytes: u64) {
    let mut bytes = [&(header.len() as u64).to_le_bytes(), header].concat();
    if data_bytes <= CODED_BYTES_MAX && header.windows(7).any(|name| name == b"qweight") {
        bytes.resize(bytes.len() + data_bytes as usize, 0x11);
        return fs::write(path, &bytes).unwrap();
    }
    fs::write(path, &bytes).unwrap();
    fs::File::options().write(true).open(path).unwrap().set_len(bytes.len() as u64 + data_bytes).unwrap();
}

/// The header of the tensors that a config asks for, and the bytes behind it; as codes where it names a quantisation.
fn tensors_for(config: &[u8], pooled: bool) -> Option<(Vec<u8>, u64)> {
    let map: Map<String, Value> = serde_json::from_slice(config).ok()?;
    let config = ConfigReader::new("config.json", &map);
    let net = (arch::find(&config, pooled).ok()?.load)(&config).ok()?;
    let scheme = quantised::read_scheme(&config).ok()?;
    if net.facts().layers > TENSORS_MAX / 8 {
        return None;
    }
    let (mut header, mut at) = (Map::new(), 0u64);
    let mut add = |name: String, dtype: &str, width: u64, shape: &[usize]| {
        let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64))?;
        let end = elements.checked_mul(width)?.checked_add(at).filter(|n| *n <= WEIGHT_BYTES_MAX)?;
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
        at = end;
        Some(())
    };
    let tensors = net.tensors();
    for spec in tensors.iter().filter(|spec| !spec.optional).take(TENSORS_MAX) {
        match (scheme, spec.name.strip_suffix(".weight"), &spec.shape[..]) {
            (Some(scheme), Some(layer), &[n, k]) if spec.role == Role::Linear && !layer.contains("head") => {
                let pack = 32 / scheme.bits as usize;
                let groups = k / scheme.group_size.unwrap_or(k).max(1);
                let codes = if scheme.method == Method::Awq { [k, n / pack] } else { [k / pack, n] };
                add(format!("{layer}.qweight"), "I32", 4, &codes)?;
                add(format!("{layer}.qzeros"), "I32", 4, &[groups, n / pack])?;
                add(format!("{layer}.scales"), "F16", 2, &[groups, n])?;
            }
            _ => add(spec.name.clone(), "F32", 4, &spec.shape)?,
        }
    }
    Some((Value::Object(header).to_string().into_bytes(), at))
}

/// The small models of the tests, one per family and way of RoPE, and two of codes.
fn configs() -> Vec<BTreeMap<&'static str, Vec<u8>>> {
    let golden = [
        "llama-gqa-tied",
        "llama-dynamic",
        "llama-linear",
        "llama-llama3-bias",
        "llama-yarn",
        "mistral-window",
        "qwen2",
        "qwen2-window",
        "qwen3",
        "granite",
        "phi3-partial",
        "gpt2-gelu",
        "bert",
    ];
    let mut bases: Vec<BTreeMap<&'static str, Vec<u8>>> = Vec::new();
    for name in golden {
        let path = repository("tests/golden").join(name);
        bases.push(FILES.iter().filter(|f| **f != WEIGHTS).filter_map(|f| Some((*f, fs::read(path.join(f)).ok()?))).collect());
    }
    for codes in [
        // (Zero points of 0x11 are none of symmetric codes.)
        json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": false, "desc_act": false}),
        json!({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": true}),
    ] {
        let mut config = toy::config();
        config["quantization_config"] = codes;
        bases.push([("config.json", config.to_string().into_bytes())].into());
    }
    for files in &mut bases {
        files.insert("tokenizer.json", toy::tokenizer().to_string().into_bytes());
        files.insert(
            "tokenizer_config.json",
            json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true}).to_string().into_bytes(),
        );
        files.insert("chat_template.jinja", b"{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}".to_vec());
    }
    bases
}

fn base(index: usize, mut files: BTreeMap<&'static str, Vec<u8>>) -> Base {
    let path = scratch().join(index.to_string());
    fs::create_dir_all(path.join("1_Pooling")).unwrap();
    let (header, data) = tensors_for(&files["config.json"], files.contains_key("modules.json")).unwrap();
    for (name, bytes) in &files {
        fs::write(path.join(name), bytes).unwrap();
    }
    // A shard for an index to name.
    for name in [WEIGHTS, "a.safetensors"] {
        write_weights(&path.join(name), &header, data);
    }
    let weights_len = header.len() as u64 + data;
    files.insert(WEIGHTS, header);
    let base = Base { path, files, weights_len };
    look(&base.path, &OpenOptions::default());
    open(&base.path, &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    base
}

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let is_template = data.first().is_some_and(|f| FILES[usize::from(*f) % FILES.len()].ends_with(".jinja"));
    if size <= 2 || max_size <= 2 || is_template || seed.is_multiple_of(32) {
        return fuzzer_mutate(data, size, max_size);
    }
    2 + mutate_json(&mut data[2..], size - 2, max_size - 2, seed, &WORDS)
});

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (i, base) in BASES.iter().enumerate() {
        for (file, name) in FILES.iter().enumerate() {
            if let Some(bytes) = base.files.get(name)
                && (i == 0 || ["config.json", WEIGHTS].contains(name) || base.files.contains_key("modules.json"))
            {
                seeds.push([&[file as u8, i as u8], bytes.as_slice()].concat());
            }
        }
    }
    let names: Map<String, Value> = serde_json::from_slice(&BASES[0].files[WEIGHTS]).unwrap();
    let map: Map<String, Value> = names.keys().map(|name| (name.clone(), "a.safetensors".into())).collect();
    let index = json!({"metadata": {"total_size": BASES[0].weights_len}, "weight_map": map}).to_string();
    let number = |name| FILES.iter().position(|f| *f == name).unwrap_or_default() as u8;
    seeds.push([&[number(INDEX), 0], index.as_bytes()].concat());
    for (name, value) in [
        ("generation_config.json", json!({"eos_token_id": [1, 2], "temperature": 0.5, "top_k": 4, "do_sample": true})),
        ("special_tokens_map.json", json!({"bos_token": {"content": "<s>"}, "pad_token": "</s>"})),
        ("sentence_bert_config.json", json!({"max_seq_length": 16, "do_lower_case": false})),
        (
            "config_sentence_transformers.json",
            json!({"prompts": {"query": ""}, "default_prompt_name": null, "similarity_fn_name": "cosine"}),
        ),
    ] {
        seeds.push([&[number(name), 12], value.to_string().as_bytes()].concat());
    }
    seeds
}
