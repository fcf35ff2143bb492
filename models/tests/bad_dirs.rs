//! Broken model directories: each is refused with the right exit code and one line that names the culprit.
//!
//! The names are those of the acceptance list. Every case starts from the same sound toy and breaks one thing. Cases
//! that need all weight bytes (NaN, overflow) belong to packing; those about change while reading are beside `dir.rs`.

mod common;
#[path = "common/toy.rs"]
mod toy;

use std::path::Path;
use std::time::{Duration, Instant};

use rcompile_models::{OpenOptions, TokenizerUse, Warning, open};
use serde_json::{Value, json};
use toy::{INDEX, Toy, ToyTensor, VOCAB};

/// Name, exit code, what the line must contain, and how the toy is broken.
type Case = (&'static str, i32, &'static [&'static str], fn(&Toy));

/// Name, what the only warning must contain (empty: no warning), and how the toy is changed.
type Accepted = (&'static str, &'static str, fn(&Toy));

/// Opens a toy that was broken by `break_it`, in a directory with a name that needs care.
fn outcome(break_it: fn(&Toy), options: &OpenOptions) -> Result<Vec<Warning>, (i32, String)> {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("a möd el");
    let toy = Toy::write(&path);
    break_it(&toy);
    let start = Instant::now();
    let result = open(&path, options).map(|m| m.warnings).map_err(|e| (e.exit_code(), e.to_string()));
    assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
    result
}

fn refuse(cases: &[Case]) {
    let mut failures = Vec::new();
    for (name, exit, parts, break_it) in cases {
        match outcome(*break_it, &OpenOptions::default()) {
            Ok(warnings) => failures.push(format!("{name}: accepted, {warnings:?}")),
            Err((found, line)) => {
                let code = line.strip_prefix(&format!("error[E{exit}-")).is_some();
                let tidy = line.len() <= 500 && !line.chars().any(char::is_control) && !line.contains("panicked");
                let complete = line.contains(", expected ") && line.contains(", found ");
                let missing: Vec<_> = parts.iter().filter(|p| !line.contains(**p)).collect();
                if found != *exit || !code || !tidy || !complete || !missing.is_empty() {
                    failures.push(format!("{name}: exit {found}, lacks {missing:?}: {line}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

fn accept(cases: &[Accepted]) {
    let mut failures = Vec::new();
    for (name, part, break_it) in cases {
        match outcome(*break_it, &OpenOptions::default()) {
            Ok(warnings) if part.is_empty() && warnings.is_empty() => {}
            Ok(warnings) if warnings.len() == 1 && !part.is_empty() && warnings[0].to_string().contains(part) => {}
            other => failures.push(format!("{name}: {other:?}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn the_toy_is_sound() {
    accept(&[("toy", "", |_| {})]);
}

#[test]
fn directory_and_files() {
    let temp = tempfile::tempdir().unwrap();
    let e = open(&temp.path().join("none"), &OpenOptions::default()).err().unwrap();
    assert!(e.exit_code() == 3 && e.to_string().contains("none"), "dir_missing: {e}");
    std::fs::write(temp.path().join("f"), "").unwrap();
    let e = open(&temp.path().join("f"), &OpenOptions::default()).err().unwrap();
    assert!(e.exit_code() == 3 && e.to_string().contains("not a directory"), "dir_is_file: {e}");
    let e = open(temp.path(), &OpenOptions::default()).err().unwrap();
    assert!(e.exit_code() == 3 && e.to_string().contains("config.json"), "dir_empty: {e}");

    refuse(&[
        ("config_missing", 3, &["config.json"], |t| t.remove("config.json")),
        ("config_is_dir", 3, &["config.json", "not a regular file"], |t| {
            t.remove("config.json");
            std::fs::create_dir(t.file("config.json")).unwrap();
        }),
        ("config_is_fifo", 3, &["config.json", "not a regular file"], |t| fifo(t, "config.json")),
        ("weights_are_fifo", 3, &["model.safetensors", "not a regular file"], |t| fifo(t, "model.safetensors")),
        ("symlink_cycle", 3, &["model.safetensors", "ELOOP"], |t| {
            t.link("a", "model.safetensors");
            t.link("b", "a");
            t.link("a", "b");
        }),
        ("symlink_escape", 3, &["chat_template.jinja", "points outside"], |t| {
            std::fs::write(t.path.join("../secret"), "hunter2").unwrap();
            t.link("../secret", "chat_template.jinja");
        }),
        ("symlink_absolute", 3, &["config.json", "points outside"], |t| t.link("/etc/hostname", "config.json")),
        ("tok_missing", 3, &["tokenizer.json"], |t| t.remove("tokenizer.json")),
        ("weights_missing", 3, &["model.safetensors"], |t| t.remove("model.safetensors")),
    ]);
}

fn fifo(t: &Toy, name: &str) {
    t.remove(name);
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, t.file(name), rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

#[test]
fn unreadable_config() {
    let temp = tempfile::tempdir().unwrap();
    let toy = Toy::write(temp.path());
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(toy.file("config.json"), std::fs::Permissions::from_mode(0o000)).unwrap();
    if std::fs::File::open(toy.file("config.json")).is_ok() {
        // The superuser reads everything; there is nothing to see then.
        return;
    }
    let e = open(temp.path(), &OpenOptions::default()).err().unwrap();
    assert!(e.exit_code() == 3 && e.to_string().contains("EACCES"), "config_unreadable: {e}");
}

#[test]
fn config_bytes() {
    refuse(&[
        ("config_0_bytes", 4, &["config.json"], |t| t.put("config.json", "")),
        ("config_truncated", 4, &["config.json: ", "1:10"], |t| {
            let bytes = t.get("config.json");
            t.put("config.json", &bytes[..100]);
        }),
        ("config_trailing_garbage", 4, &["trailing", "1:"], |t| {
            let bytes = t.get("config.json");
            t.put("config.json", [&bytes, &b"xyz"[..]].concat());
        }),
        ("config_bad_utf8", 4, &["byte 0"], |t| t.put("config.json", b"\xff\xfe{\0}\0")),
        ("config_top_level_array", 4, &["expected object"], |t| t.put("config.json", "[]")),
        ("config_nested_1e5", 4, &["config.json"], |t| t.put("config.json", "[".repeat(100_000))),
        ("config_duplicate_key", 4, &["hidden_size", "duplicate key"], |t| {
            t.put("config.json", r#"{"hidden_size": 64, "hidden_size": 128}"#);
        }),
        ("config_100MB", 7, &["config.json", "too large"], |t| {
            std::fs::File::create(t.file("config.json")).unwrap().set_len(100 << 20).unwrap();
        }),
        ("config_nan_literal", 4, &["rope_theta"], |t| t.put("config.json", r#"{"rope_theta": NaN}"#)),
        ("config_1e400", 4, &["rms_norm_eps"], |t| t.put("config.json", r#"{"rms_norm_eps": 1e400}"#)),
    ]);
}

#[test]
fn config_values() {
    refuse(&[
        ("torch_dtype_unknown", 6, &["torch_dtype", "float7"], |t| t.config("torch_dtype", json!("float7"))),
        ("arch_unknown", 6, &["FooForCausalLM", "LlamaForCausalLM"], |t| t.config("architectures", json!(["FooForCausalLM"]))),
        ("arch_missing", 6, &["architectures", "model_type"], |t| {
            t.config("architectures", Value::Null);
            t.config("model_type", Value::Null);
        }),
        ("arch_conflict", 5, &["LlamaForCausalLM", "mistral"], |t| t.config("model_type", json!("mistral"))),
        ("hidden_zero", 4, &["hidden_size", "must be ≥ 1"], |t| t.config("hidden_size", json!(0))),
        ("heads_zero", 4, &["num_attention_heads"], |t| t.config("num_attention_heads", json!(0))),
        ("kv_heads_zero", 4, &["num_key_value_heads"], |t| t.config("num_key_value_heads", json!(0))),
        ("layers_zero", 4, &["num_hidden_layers"], |t| t.config("num_hidden_layers", json!(0))),
        ("heads_not_dividing_hidden", 5, &["hidden_size = 65", "num_attention_heads = 4"], |t| t.config("hidden_size", json!(65))),
        ("kv_not_dividing_heads", 5, &["num_attention_heads = 4", "num_key_value_heads = 3"], |t| {
            t.config("num_key_value_heads", json!(3));
        }),
        ("kv_gt_heads", 5, &["num_attention_heads = 4", "num_key_value_heads = 8"], |t| t.config("num_key_value_heads", json!(8))),
        ("negative_int", 4, &["vocab_size"], |t| t.config("vocab_size", json!(-1))),
        ("float_for_int", 4, &["num_hidden_layers", "2.5"], |t| t.config("num_hidden_layers", json!(2.5))),
        ("string_for_int", 4, &["num_hidden_layers", "\"2\""], |t| t.config("num_hidden_layers", json!("2"))),
        ("int_2_63", 4, &["hidden_size"], |t| t.config("hidden_size", json!(1u64 << 63))),
        ("int_2_64", 4, &["hidden_size"], |t| {
            let text = String::from_utf8(t.get("config.json")).unwrap();
            t.put("config.json", text.replace("\"hidden_size\":64", "\"hidden_size\":18446744073709551616"));
        }),
        ("layers_1e9", 7, &["num_hidden_layers"], |t| t.config("num_hidden_layers", json!(1_000_000_000))),
        ("layers_1025", 7, &["num_hidden_layers", "at most 1024", "1025"], |t| t.config("num_hidden_layers", json!(1025))),
        // As many as there may be: what is missing then are their tensors.
        ("layers_1024", 5, &["model.layers.2.", "9198 in all"], |t| t.config("num_hidden_layers", json!(1024))),
        ("size_beyond_32_bits", 7, &["vocab_size", "at most 16777216", "4294967296"], |t| t.config("vocab_size", json!(1u64 << 32))),
        ("extent_above_2_24", 7, &["vocab_size", "at most 16777216", "16777217"], |t| t.config("vocab_size", json!((1 << 24) + 1))),
        ("extent_of_2_24", 5, &["model.embed_tokens.weight", "[16777216, 64]"], |t| t.config("vocab_size", json!(1 << 24))),
        ("size_product_overflow", 7, &["vocab_size", "hidden_size"], |t| {
            t.config("vocab_size", json!(1u64 << 40));
            t.config("hidden_size", json!(1u64 << 40));
        }),
        ("rope_scaling_unknown", 6, &["foo", "llama3"], |t| t.config("rope_scaling", json!({"type": "foo"}))),
        ("rope_factor_missing", 4, &["rope_scaling.factor"], |t| t.config("rope_scaling", json!({"type": "linear"}))),
        ("rope_factor_zero", 4, &["rope_scaling.factor"], |t| t.config("rope_scaling", json!({"type": "linear", "factor": 0}))),
        ("rope_factor_negative", 4, &["rope_scaling.factor"], |t| t.config("rope_scaling", json!({"type": "yarn", "factor": -1}))),
        ("rope_factor_subnormal", 4, &["rope_scaling.factor", "frequencies"], |t| {
            t.config("rope_scaling", json!({"type": "linear", "factor": 1e-45}));
        }),
        ("rope_factor_1e30", 4, &["rope_scaling.factor", "frequencies"], |t| {
            t.config("rope_scaling", json!({"type": "dynamic", "factor": 1e30}));
        }),
        ("rope_parameters_1e30", 4, &["rope_parameters.full_attention.factor", "frequencies"], |t| {
            t.config("rope_parameters", json!({"full_attention": {"rope_type": "dynamic", "factor": 1e30}}));
            t.config("layer_types", json!(["full_attention", "full_attention"]));
        }),
        ("rope_theta_subnormal", 4, &["rope_theta", "frequencies"], |t| t.config("rope_theta", json!(1e-45))),
        ("rope_attention_factor_1e38", 4, &["rope_scaling.attention_factor", "found 1e38"], |t| {
            t.config("rope_scaling", json!({"type": "yarn", "factor": 2, "attention_factor": 1e38}));
        }),
        ("rope_mscale_over_zero", 4, &["rope_scaling.mscale_all_dim"], |t| {
            // 0.1 * -10 * ln(e) + 1 = 0
            let scaling = json!({"type": "yarn", "factor": std::f64::consts::E, "mscale": 1, "mscale_all_dim": -10});
            t.config("rope_scaling", scaling);
        }),
        ("rope_theta_zero", 4, &["rope_theta"], |t| t.config("rope_theta", json!(0))),
        ("rms_eps_negative", 4, &["rms_norm_eps"], |t| t.config("rms_norm_eps", json!(-1e-6))),
        ("hidden_act_unknown", 6, &["foo"], |t| t.config("hidden_act", json!("foo"))),
        ("torch_dtype_unknown", 6, &["float7"], |t| t.config("torch_dtype", json!("float7"))),
        ("max_position_1e12", 7, &["max_position_embeddings"], |t| {
            t.config("max_position_embeddings", json!(1_000_000_000_000u64));
        }),
        ("sliding_window_zero", 4, &["sliding_window"], |t| mistral(t, json!(0))),
        ("sliding_window_negative", 4, &["sliding_window"], |t| mistral(t, json!(-1))),
        ("quant_method_unknown", 6, &["foo", "quant_method"], |t| t.config("quantization_config", json!({"quant_method": "foo"}))),
        ("gptq_3_bits", 6, &["bits", "3", "4 or 8"], |t| t.config("quantization_config", json!({"quant_method": "gptq", "bits": 3}))),
        ("gptq_marlin", 6, &["checkpoint_format", "marlin"], |t| {
            t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}));
        }),
        ("gptq_dynamic", 6, &["dynamic", "+:"], |t| {
            t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}));
        }),
        ("gptq_bits_missing", 4, &["bits", "is missing"], |t| t.config("quantization_config", json!({"quant_method": "gptq"}))),
        ("awq_gemv", 6, &["version", "gemv"], |t| {
            t.config("quantization_config", json!({"quant_method": "awq", "bits": 4, "version": "gemv"}));
        }),
        ("awq_without_zeros", 6, &["zero_point"], |t| {
            t.config("quantization_config", json!({"quant_method": "awq", "bits": 4, "zero_point": false}));
        }),
        ("bitsandbytes", 6, &["bitsandbytes", "quant_method"], |t| {
            t.config("quantization_config", json!({"quant_method": "bitsandbytes", "load_in_4bit": true}));
        }),
        ("compressed", 6, &["compressed-tensors"], |t| t.config("compression_config", json!({"quant_method": "compressed-tensors"}))),
        ("moe_topk_gt_experts", 5, &["num_experts_per_tok = 9", "num_local_experts = 8"], |t| {
            t.config("num_local_experts", json!(8));
            t.config("num_experts_per_tok", json!(9));
        }),
        ("moe", 6, &["num_local_experts"], |t| t.config("num_local_experts", json!(8))),
        ("special_id_ge_vocab", 5, &["eos_token_id", "64"], |t| t.config("eos_token_id", json!(VOCAB))),
        ("special_id_in_generation_config", 5, &["generation_config.json", "eos_token_id", "64"], |t| {
            t.json("generation_config.json", &json!({"eos_token_id": [1, VOCAB]}));
        }),
        ("encoder_decoder", 6, &["is_encoder_decoder"], |t| t.config("is_encoder_decoder", json!(true))),
        ("not_causal", 6, &["is_causal", "later tokens", "found false"], |t| t.config("is_causal", json!(false))),
        ("not_causal_gpt2", 6, &["is_causal", "later tokens"], |t| {
            gpt2(t, |_| {});
            t.config("is_causal", json!(false));
        }),
        ("causal_of_wrong_type", 4, &["is_causal", "true or false"], |t| t.config("is_causal", json!("no"))),
    ]);
    accept(&[
        ("gpt2", "", |t| gpt2(t, |_| {})),
        ("causal", "", |t| t.config("is_causal", json!(true))),
        ("encoder_that_says_so", "", |t| {
            bert(t);
            t.config("is_causal", json!(false));
        }),
    ]);
    let huge = |t: &Toy| t.config("max_position_embeddings", json!(1_000_000_000_000u64));
    let options = OpenOptions { ctx_size: Some(64), ..OpenOptions::default() };
    assert_eq!(outcome(huge, &options), Ok(vec![]), "max_position_1e12 with --ctx-size");
    let dynamic = |t: &Toy| t.config("rope_scaling", json!({"type": "dynamic", "factor": 2}));
    let options = OpenOptions { ctx_size: Some(129), ..OpenOptions::default() };
    assert_eq!(outcome(dynamic, &options).unwrap_err().0, 6, "dynamic RoPE beyond the trained length");
}

/// A GPT-2 of one layer in place of the toy, its tensors changed.
fn gpt2(t: &Toy, change: impl FnOnce(&mut Vec<ToyTensor>)) {
    let (n, zeros) = (64, |name: &str, shape: &[usize]| ToyTensor::zeros(&format!("transformer.{name}"), "F16", 2, shape));
    t.json(
        "config.json",
        &json!({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": n, "n_layer": 1, "n_head": 4, "n_inner": 96,
            "vocab_size": VOCAB, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}),
    );
    let mut list = vec![zeros("wte.weight", &[VOCAB, n]), zeros("wpe.weight", &[32, n])];
    for (name, shape) in [
        ("h.0.ln_1", &[n][..]),
        ("h.0.attn.c_attn", &[n, 3 * n]),
        ("h.0.attn.c_proj", &[n, n]),
        ("h.0.ln_2", &[n]),
        ("h.0.mlp.c_fc", &[n, 96]),
        ("h.0.mlp.c_proj", &[96, n]),
        ("ln_f", &[n]),
    ] {
        list.extend([zeros(&format!("{name}.weight"), shape), zeros(&format!("{name}.bias"), &shape[shape.len() - 1..])]);
    }
    change(&mut list);
    t.weights("model.safetensors", &list);
}

/// A BERT of one layer in place of the toy.
fn bert(t: &Toy) {
    let (n, zeros) = (64, |name: &str, shape: &[usize]| ToyTensor::zeros(name, "F16", 2, shape));
    t.json(
        "config.json",
        &json!({"architectures": ["BertModel"], "model_type": "bert", "hidden_size": n, "num_hidden_layers": 1, "num_attention_heads": 4,
            "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": 32, "type_vocab_size": 2}),
    );
    let mut list = Vec::new();
    for (name, rows) in [("word", VOCAB), ("position", 32), ("token_type", 2)] {
        list.push(zeros(&format!("embeddings.{name}_embeddings.weight"), &[rows, n]));
    }
    for (name, shape) in [
        ("embeddings.LayerNorm", &[n][..]),
        ("encoder.layer.0.attention.self.query", &[n, n]),
        ("encoder.layer.0.attention.self.key", &[n, n]),
        ("encoder.layer.0.attention.self.value", &[n, n]),
        ("encoder.layer.0.attention.output.dense", &[n, n]),
        ("encoder.layer.0.attention.output.LayerNorm", &[n]),
        ("encoder.layer.0.intermediate.dense", &[96, n]),
        ("encoder.layer.0.output.dense", &[n, 96]),
        ("encoder.layer.0.output.LayerNorm", &[n]),
    ] {
        list.extend([zeros(&format!("{name}.weight"), shape), zeros(&format!("{name}.bias"), &shape[..1])]);
    }
    t.weights("model.safetensors", &list);
}

/// Parts of a layer of `k` inputs and `n` outputs as GPTQ codes by 32.
fn codes_of(layer: &str, n: usize, k: usize) -> [ToyTensor; 3] {
    [
        ToyTensor::zeros(&format!("{layer}.qweight"), "I32", 4, &[k / 8, n]),
        ToyTensor::zeros(&format!("{layer}.qzeros"), "I32", 4, &[k / 32, n / 8]),
        ToyTensor::zeros(&format!("{layer}.scales"), "F16", 2, &[k / 32, n]),
    ]
}

/// The tensor `layer.weight` of `list` as GPTQ codes of these outputs and inputs.
fn code(list: &mut Vec<ToyTensor>, layer: &str, n: usize, k: usize) {
    list.retain(|t| t.name != format!("{layer}.weight"));
    list.extend(codes_of(layer, n, k));
}

/// The toy with its layers as GPTQ codes by 32, changed.
fn gptq(t: &Toy, change: impl FnOnce(&mut Vec<ToyTensor>)) {
    t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true}));
    t.edit_weights(|list| {
        let mut coded = Vec::new();
        for tensor in std::mem::take(list) {
            let Some(layer) = tensor.name.strip_suffix("_proj.weight").map(|l| format!("{l}_proj")) else {
                coded.push(tensor);
                continue;
            };
            let (n, k) = (tensor.shape[0], tensor.shape[1]);
            let mut g_idx = ToyTensor::zeros(&format!("{layer}.g_idx"), "I32", 4, &[k]);
            for (i, group) in g_idx.data.chunks_exact_mut(4).enumerate() {
                group.copy_from_slice(&(i as u32 / 32).to_le_bytes());
            }
            coded.extend(codes_of(&layer, n, k));
            coded.push(g_idx);
        }
        *list = coded;
        change(list);
    });
}

fn of_gptq<'a>(list: &'a mut [ToyTensor], part: &str) -> &'a mut ToyTensor {
    let name = format!("model.layers.1.mlp.down_proj.{part}");
    list.iter_mut().find(|t| t.name == name).unwrap()
}

/// Scales are read with the codes, long after the directory was opened.
#[test]
fn scales_of_codes() {
    for (bits, parts) in [(0u16, ["scale of group 2, output 63 is zero", "found 0"]), (0x7e00, ["is not finite", "found NaN"])] {
        let temp = tempfile::tempdir().unwrap();
        let toy = Toy::write(temp.path());
        gptq(&toy, |list| {
            let scales = &mut of_gptq(list, "scales").data;
            scales.chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&0x3c00u16.to_le_bytes()));
            let last = scales.len() - 2;
            scales[last..].copy_from_slice(&bits.to_le_bytes());
        });
        toy.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": false}));
        let model = open(temp.path(), &OpenOptions::default()).unwrap();
        let coded = model.weights.coded("model.layers.1.mlp.down_proj.weight").unwrap();
        assert!(coded.rows(&model.weights, 0..63).is_ok());
        let e = coded.rows(&model.weights, 0..64).unwrap_err();
        assert_eq!(e.exit_code(), 4, "{e}");
        let line = e.to_string();
        assert!(parts.iter().all(|part| line.contains(part)) && line.contains("down_proj.scales"), "{line}");
        assert!(!line.contains("--allow-nonfinite"), "{line}");
    }
}

#[test]
fn codes() {
    accept(&[
        ("gptq", "", |t| gptq(t, |_| {})),
        ("gptq_without_g_idx", "", |t| gptq(t, |list| list.retain(|x| !x.name.ends_with("g_idx")))),
        ("gptq_biases_of_no_layer", "is ignored (1 in all)", |t| {
            gptq(t, |list| list.push(ToyTensor::zeros("model.layers.0.self_attn.q_proj.bias", "F16", 2, &[64])));
        }),
        ("gptq_head", "", |t| gptq(t, |list| code(list, "lm_head", VOCAB, 64))),
        ("gptq_of_no_layer", "model.bogus.qweight", |t| gptq(t, |list| list.extend(codes_of("model.bogus", 64, 64)))),
    ]);
    refuse(&[
        ("gptq_no_config", 5, &["q_proj.weight", "is missing"], |t| {
            gptq(t, |_| {});
            t.config("quantization_config", json!(null));
        }),
        ("gptq_no_codes", 5, &["quantization_config"], |t| {
            t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 32}));
        }),
        ("gptq_no_zeros", 5, &["down_proj.qzeros", "is missing"], |t| {
            gptq(t, |list| list.retain(|x| x.name != "model.layers.1.mlp.down_proj.qzeros"));
        }),
        ("gptq_no_scales", 5, &["down_proj.scales", "is missing"], |t| {
            gptq(t, |list| list.retain(|x| x.name != "model.layers.1.mlp.down_proj.scales"));
        }),
        ("gptq_end_twice", 5, &["down_proj.qweight.qzeros", "is missing"], |t| {
            gptq(t, |list| list.push(ToyTensor::zeros("model.layers.1.mlp.down_proj.qweight.qweight", "I32", 4, &[12, 64])));
        }),
        ("gptq_zeros_shape", 5, &["down_proj.qzeros", "[3, 8]", "[3, 9]"], |t| {
            gptq(t, |list| *of_gptq(list, "qzeros") = ToyTensor::zeros("model.layers.1.mlp.down_proj.qzeros", "I32", 4, &[3, 9]));
        }),
        ("gptq_scales_shape", 5, &["down_proj.scales", "[3, 64]", "[1, 64]"], |t| {
            gptq(t, |list| *of_gptq(list, "scales") = ToyTensor::zeros("model.layers.1.mlp.down_proj.scales", "F16", 2, &[1, 64]));
        }),
        ("gptq_qweight_shape", 5, &["down_proj.weight", "[64, 96]", "[32, 96]"], |t| {
            gptq(t, |list| {
                for (part, dtype, size, shape) in
                    [("qweight", "I32", 4, [12, 32]), ("qzeros", "I32", 4, [3, 4]), ("scales", "F16", 2, [3, 32])]
                {
                    *of_gptq(list, part) = ToyTensor::zeros(&format!("model.layers.1.mlp.down_proj.{part}"), dtype, size, &shape);
                }
            });
        }),
        ("gptq_qweight_type", 6, &["down_proj.qweight", "I64", "I32"], |t| {
            gptq(t, |list| *of_gptq(list, "qweight") = ToyTensor::zeros("model.layers.1.mlp.down_proj.qweight", "I64", 8, &[12, 64]));
        }),
        ("gptq_scales_type", 6, &["down_proj.scales", "F32", "F16 or BF16"], |t| {
            gptq(t, |list| *of_gptq(list, "scales") = ToyTensor::zeros("model.layers.1.mlp.down_proj.scales", "F32", 4, &[3, 64]));
        }),
        ("gptq_g_idx_range", 4, &["down_proj.g_idx[5]", "below 3", "found 3"], |t| {
            gptq(t, |list| of_gptq(list, "g_idx").data[20] = 3);
        }),
        ("gptq_g_idx_negative", 4, &["down_proj.g_idx[0]", "found -1"], |t| {
            gptq(t, |list| of_gptq(list, "g_idx").data[..4].fill(0xff));
        }),
        ("gptq_g_idx_unequal", 5, &["down_proj.g_idx", "unequal", "32 inputs of group 0"], |t| {
            gptq(t, |list| of_gptq(list, "g_idx").data[0] = 1);
        }),
        ("gptq_group_does_not_divide", 5, &["down_proj.qweight", "group_size, 128", "96 inputs"], |t| {
            gptq(t, |_| {});
            t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true}));
        }),
        ("gptq_group_100", 5, &["down_proj.qweight", "group_size, 100", "96 inputs"], |t| {
            gptq(t, |_| {});
            t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 100, "sym": true}));
        }),
        ("gptq_group_48", 6, &["down_proj.qweight", "group_size", "multiple of 32", "found 48"], |t| {
            gptq(t, |_| {});
            t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 48, "sym": true}));
        }),
        ("gptq_and_floats", 5, &["down_proj.weight", "is there twice"], |t| {
            gptq(t, |list| list.push(ToyTensor::zeros("model.layers.1.mlp.down_proj.weight", "F16", 2, &[64, 96])));
        }),
        ("gptq_embedding", 6, &["model.embed_tokens.qweight", "no linear layer"], |t| {
            gptq(t, |list| code(list, "model.embed_tokens", VOCAB, 64));
        }),
        ("gptq_norm", 6, &["model.norm.qweight", "no linear layer"], |t| gptq(t, |list| code(list, "model.norm", 64, 64))),
        ("gptq_tied_head", 5, &["lm_head.qweight", "tie_word_embeddings"], |t| {
            gptq(t, |list| code(list, "lm_head", VOCAB, 64));
            t.config("tie_word_embeddings", json!(true));
        }),
        ("gptq_conv1d", 6, &["h.0.attn.c_proj.qweight", "codes of Conv1D layers are not supported"], |t| {
            gpt2(t, |list| code(list, "transformer.h.0.attn.c_proj", 64, 64));
            t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true}));
        }),
        ("gptq_gpt2", 6, &["h.0.", "qweight", "codes of Conv1D layers are not supported"], |t| {
            gpt2(t, |list| {
                for (layer, n, k) in [("attn.c_attn", 192, 64), ("attn.c_proj", 64, 64), ("mlp.c_fc", 96, 64), ("mlp.c_proj", 64, 96)] {
                    code(list, &format!("transformer.h.0.{layer}"), n, k);
                }
            });
            t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true}));
        }),
    ]);
}

fn mistral(t: &Toy, window: Value) {
    t.config("architectures", json!(["MistralForCausalLM"]));
    t.config("model_type", json!("mistral"));
    t.config("sliding_window", window);
}

#[test]
fn safetensors_bytes() {
    refuse(&[
        ("st_0_bytes", 4, &["header too small"], |t| t.put("model.safetensors", "")),
        ("st_7_bytes", 4, &["header too small"], |t| t.put("model.safetensors", "1234567")),
        ("st_header_gt_file", 4, &["1000", "18 bytes"], |t| {
            t.put("model.safetensors", [&1000u64.to_le_bytes()[..], b"0123456789"].concat());
        }),
        ("st_header_u64max", 4, &["18446744073709551615"], |t| t.put("model.safetensors", [0xff; 64])),
        ("st_header_bad_utf8", 4, &["byte 9"], |t| t.put("model.safetensors", b"\x02\0\0\0\0\0\0\0{\xff")),
        ("st_header_bad_json", 4, &["byte 8"], |t| t.put("model.safetensors", b"\x01\0\0\0\0\0\0\0{")),
        ("st_is_lfs_pointer", 4, &["Git LFS"], |t| t.put("model.safetensors", "version https://git-lfs.github.com/spec/v1\n")),
        ("st_is_pickle", 4, &["not safetensors"], |t| t.put("model.safetensors", b"\x80\x02}q\x00(X\x03\x00\x00")),
        ("st_is_zip", 4, &["not safetensors"], |t| t.put("model.safetensors", b"PK\x03\x04\x00\x00\x08\x08\x00\x00")),
        ("st_is_gguf", 4, &["not safetensors"], |t| t.put("model.safetensors", b"GGUF\x03\x00\x00\x00\x00\x00")),
        ("st_is_html", 4, &["not safetensors"], |t| t.put("model.safetensors", "<html><body>404</body></html>")),
        ("st_truncated_1", 4, &["lm_head.weight", "expected a file of", "found"], |t| cut(t, 1)),
        ("st_truncated_half", 4, &["expected a file of", "found"], |t| cut(t, t.get("model.safetensors").len() / 2)),
        ("st_trailing_bytes", 4, &["expected", "found"], |t| {
            let bytes = t.get("model.safetensors");
            t.put("model.safetensors", [&bytes, &b"PK\x05\x06"[..]].concat());
        }),
        ("st_negative_dim", 4, &["model.norm.weight", "-1"], |t| {
            t.edit_header(|h| {
                h.replace(
                    "\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[64]",
                    "\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[-1]",
                )
            });
        }),
        ("st_duplicate_name", 4, &["model.norm.weight", "duplicate"], |t| {
            t.edit_header(|h| h.replacen('{', "{\"model.norm.weight\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},", 1));
        }),
        ("st_dtype_unknown", 6, &["model.norm.weight", "F8_FOO"], |t| {
            t.edit_header(|h| h.replace("\"model.norm.weight\":{\"dtype\":\"BF16\"", "\"model.norm.weight\":{\"dtype\":\"F8_FOO\""));
        }),
        ("st_name_ansi", 4, &["\\u{1b}[31m"], |t| t.edit_weights(|w| w[0].name = "\u{1b}[31mred".into())),
        ("st_name_path", 4, &["../../x"], |t| t.edit_weights(|w| w[0].name = "../../x".into())),
        ("st_name_1MiB", 4, &["nnn..."], |t| t.edit_weights(|w| w[0].name = "n".repeat(1 << 20))),
    ]);
}

fn cut(t: &Toy, bytes: usize) {
    let all = t.get("model.safetensors");
    t.put("model.safetensors", &all[..all.len() - bytes]);
}

#[test]
fn tensors_and_config_disagree() {
    refuse(&[
        ("missing_tensor", 5, &["model.layers.1.self_attn.q_proj.weight", "1 in all"], |t| {
            t.edit_weights(|w| w.retain(|t| t.name != "model.layers.1.self_attn.q_proj.weight"));
        }),
        ("missing_layer", 5, &["model.layers.2.", "9 in all"], |t| t.config("num_hidden_layers", json!(3))),
        ("shape_mismatch", 5, &["model.embed_tokens.weight", "[64, 64]", "[64, 63]"], |t| {
            t.edit_weights(|w| w[0] = ToyTensor::zeros("model.embed_tokens.weight", "BF16", 2, &[64, 63]));
        }),
        ("tensor_transposed", 5, &["gate_proj.weight", "transposed", "[96, 64]", "[64, 96]"], |t| {
            t.edit_weights(|w| w.iter_mut().filter(|t| t.name.ends_with("gate_proj.weight")).for_each(|t| t.shape.reverse()));
        }),
        ("weight_dtype_integer", 6, &["model.norm.weight", "I64"], |t| replace(t, "model.norm.weight", "I64", 8)),
        ("weight_dtype_bool", 6, &["model.norm.weight", "BOOL"], |t| replace(t, "model.norm.weight", "BOOL", 1)),
        ("lm_head_missing_untied", 5, &["lm_head.weight"], |t| t.edit_weights(|w| w.retain(|t| t.name != "lm_head.weight"))),
        ("lm_head_differs_though_tied", 5, &["lm_head.weight", "tie_word_embeddings"], |t| {
            t.config("tie_word_embeddings", json!(true));
        }),
    ]);
    let extra = |t: &Toy| t.edit_weights(|w| w.push(ToyTensor::zeros("model.bogus.weight", "F32", 4, &[3])));
    accept(&[("extra_tensor", "model.bogus.weight", extra)]);
    let strict = OpenOptions { strict: true, ..OpenOptions::default() };
    let (exit, line) = outcome(extra, &strict).unwrap_err();
    assert!(exit == 5 && line.contains("model.bogus.weight"), "extra_tensor --strict: {line}");
}

fn replace(t: &Toy, name: &str, dtype: &'static str, width: usize) {
    t.edit_weights(|list| {
        let old = list.iter_mut().find(|t| t.name == name).unwrap();
        *old = ToyTensor::zeros(name, dtype, width, &old.shape);
    });
}

#[test]
fn shards_and_index() {
    refuse(&[
        ("shard_missing", 3, &["b.safetensors"], |t| {
            t.shard();
            t.remove("b.safetensors");
        }),
        ("index_bad_json", 4, &["index.json", "weight_map"], |t| edit_index(t, |index| index["weight_map"] = json!([1]))),
        ("index_cut", 4, &["index.json"], |t| {
            t.shard();
            t.put(INDEX, "{\"weight_map\"");
        }),
        ("index_dotdot", 3, &["weight_map.model.norm.weight"], |t| {
            std::fs::write(t.path.join("../x.safetensors"), "x").unwrap();
            map_norm(t, json!("../x.safetensors"));
        }),
        ("index_absolute", 3, &["weight_map.model.norm.weight"], |t| map_norm(t, json!("/etc/passwd"))),
        ("index_name_slash", 3, &["weight_map.model.norm.weight"], |t| map_norm(t, json!("a/b"))),
        ("index_name_nul", 3, &["weight_map.model.norm.weight"], |t| map_norm(t, json!("a\0b"))),
        ("index_name_empty", 3, &["weight_map.model.norm.weight"], |t| map_norm(t, json!(""))),
        ("index_name_dot", 3, &["weight_map.model.norm.weight"], |t| map_norm(t, json!("."))),
        ("index_name_number", 4, &["weight_map.model.norm.weight"], |t| map_norm(t, json!(1))),
        ("index_wrong_shard", 5, &["model.norm.weight", "a.safetensors", "b.safetensors"], |t| map_norm(t, json!("a.safetensors"))),
        ("index_tensor_nowhere", 5, &["model.bogus"], |t| {
            edit_index(t, |index| index["weight_map"]["model.bogus"] = json!("a.safetensors"));
        }),
        ("index_tensor_twice", 5, &["model.embed_tokens.weight", "a.safetensors", "b.safetensors"], |t| {
            t.shard();
            let list = toy::tensors();
            t.weights("b.safetensors", &[&list[9..], &list[..1]].concat());
        }),
        ("tensors_of_all_shards", 7, &["b.safetensors", "too many tensors", "at most 1000000 tensors in all"], |t| {
            let in_a = t.shard()["weight_map"].as_object().unwrap().values().filter(|shard| *shard == "a.safetensors").count();
            let entry = |i: usize| format!("\"{i}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}");
            let header = format!("{{{}}}", (0..1_000_001 - in_a).map(entry).collect::<Vec<_>>().join(","));
            t.raw_weights("b.safetensors", &header, &[]);
        }),
        ("index_1e6_shards", 7, &["index.json"], |t| {
            t.shard();
            let map: serde_json::Map<String, Value> =
                (0..1_000_000).map(|i| (format!("t{i}"), format!("s{i}.safetensors").into())).collect();
            t.json(INDEX, &json!({"weight_map": map}));
        }),
    ]);
    accept(&[
        ("sharded", "", |t| drop(t.shard())),
        ("index_total_size_wrong", "total_size", |t| edit_index(t, |index| index["metadata"]["total_size"] = json!(1))),
        ("index_and_single", "model.safetensors is present", |t| {
            t.shard();
            t.weights("model.safetensors", &toy::tensors());
        }),
    ]);
}

fn edit_index(t: &Toy, change: fn(&mut Value)) {
    let mut index = t.shard();
    change(&mut index);
    t.json(INDEX, &index);
}

fn map_norm(t: &Toy, shard: Value) {
    let mut index = t.shard();
    index["weight_map"]["model.norm.weight"] = shard;
    t.json(INDEX, &index);
}

fn tok(t: &Toy, change: impl FnOnce(&mut Value)) {
    t.edit("tokenizer.json", change);
}

#[test]
fn tokenizers() {
    refuse(&[
        ("tok_truncated", 4, &["tokenizer.json", "1:"], |t| {
            let bytes = t.get("tokenizer.json");
            t.put("tokenizer.json", &bytes[..bytes.len() / 2]);
        }),
        ("tok_vocab_gt_rows", 5, &["64", "70"], |t| {
            tok(t, |v| (32..70).for_each(|i| v["model"]["vocab"][format!("x{i}")] = json!(i)));
        }),
        ("tok_ids_dup", 4, &["the", "29", "th has"], |t| tok(t, |v| v["model"]["vocab"]["the"] = json!(29))),
        ("tok_ids_sparse", 4, &["an", "32"], |t| tok(t, |v| v["model"]["vocab"]["an"] = json!(32))),
        ("tok_id_4e9", 4, &["an", "4000000000"], |t| tok(t, |v| v["model"]["vocab"]["an"] = json!(4_000_000_000u64))),
        ("tok_id_negative", 4, &["an", "-1"], |t| tok(t, |v| v["model"]["vocab"]["an"] = json!(-1))),
        ("tok_merge_oov", 4, &["merges[1]", "qq"], |t| tok(t, |v| v["model"]["merges"][1] = json!(["qq", "e"]))),
        ("tok_merge_result_oov", 4, &["merges[1]", "zz"], |t| tok(t, |v| v["model"]["merges"][1] = json!(["z", "z"]))),
        ("tok_merge_three", 4, &["merges[0]"], |t| tok(t, |v| v["model"]["merges"][0] = json!("t h e"))),
        ("tok_merge_too_long", 4, &["merges[0]"], |t| {
            tok(t, |v| v["model"]["continuing_subword_prefix"] = json!("a prefix that is longer than the token"));
        }),
        ("tok_regex_invalid", 4, &["pre_tokenizer.pattern", "(["], |t| pattern(t, "([")),
        ("tok_regex_gives_up", 7, &["pre_tokenizer.pattern", "too many steps for letters"], |t| pattern(t, "(?:a|aa)+(?=b)")),
        ("tok_1e7_numbers", 7, &["tokenizer.json", "too many values"], |t| {
            t.put("tokenizer.json", format!("{{\"added_tokens\":[{}0]}}", "1,".repeat(10_000_000)));
        }),
        ("tok_regex_catastrophic", 7, &["pre_tokenizer.pattern", "(a+)+$"], |t| pattern(t, "(a+)+$")),
        ("tok_model_unknown", 6, &["model.type", "foo"], |t| tok(t, |v| v["model"]["type"] = json!("foo"))),
        ("tok_normalizer_unknown", 6, &["normalizer.type", "foo"], |t| tok(t, |v| v["normalizer"]["type"] = json!("foo"))),
        ("tok_nested_unknown", 6, &["normalizer.normalizers[0].type", "foo"], |t| {
            tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "foo"}]}));
        }),
        ("tok_nested_100", 4, &["nested too deeply"], |t| {
            let nest = |inner, _| json!({"type": "Sequence", "normalizers": [inner]});
            tok(t, |v| v["normalizer"] = (0..20).fold(json!({"type": "NFC"}), nest));
        }),
        ("tok_charsmap_bad", 4, &["normalizer.precompiled_charsmap"], |t| {
            tok(t, |v| v["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}));
        }),
        ("tok_charsmap_astray", 4, &["normalizer.precompiled_charsmap"], |t| {
            tok(t, |v| v["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}));
        }),
        ("tok_template_no_special", 4, &["`<x>`"], |t| {
            tok(t, |v| v["post_processor"]["single"][0]["SpecialToken"]["id"] = json!("<x>"));
        }),
        ("tok_template_absent_token", 4, &["`<x>`"], |t| {
            tok(t, |v| v["post_processor"]["special_tokens"]["<s>"]["tokens"] = json!(["<x>"]));
        }),
        ("tok_template_without_text", 4, &["post_processor.single", "one Sequence A"], |t| {
            tok(t, |v| drop(v["post_processor"]["single"].as_array_mut().unwrap().remove(1)));
        }),
        ("tok_template_of_two_texts", 4, &["post_processor.single", "A", "B"], |t| {
            tok(t, |v| {
                let single = v["post_processor"]["single"].as_array_mut().unwrap();
                single.push(json!({"Sequence": {"id": "B", "type_id": 0}}));
            });
        }),
        ("tok_stride_ge_max", 4, &["truncation.stride"], |t| {
            let value = json!({"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 8});
            tok(t, |v| v["truncation"] = value);
        }),
        ("tok_fixedlength_0", 4, &["pre_tokenizer.length"], |t| {
            tok(t, |v| v["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0}));
        }),
        ("tok_added_conflict", 5, &["<new>", "30"], |t| {
            tok(t, |v| {
                let mut new = v["added_tokens"][0].clone();
                (new["id"], new["content"]) = (json!(30), json!("<new>"));
                v["added_tokens"].as_array_mut().unwrap().push(new);
            });
        }),
        ("tok_added_other_id", 5, &["<s>"], |t| tok(t, |v| v["added_tokens"][1]["id"] = json!(2))),
        ("tok_strip_decoder", 4, &["decoder.start"], |t| tok(t, |v| v["decoder"]["start"] = json!(1000))),
        ("tok_strip_decoder_stop", 6, &["decoder.stop"], |t| tok(t, |v| v["decoder"]["stop"] = json!(1))),
        ("tok_replace_bomb", 7, &["normalizer"], |t| {
            let part = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(1000)});
            tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": [part, part, part]}));
        }),
        ("tok_bytes_of_bytes", 7, &["normalizer.normalizers[12]", "too long", "8192 times"], |t| {
            tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "ByteLevel"}); 40]}));
        }),
        ("tok_bytes_before_bytes", 7, &["pre_tokenizer.pretokenizers[6]", "too long"], |t| {
            let part = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
            tok(t, |v| {
                v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "ByteLevel"}); 6]});
                v["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": vec![part; 20]});
            });
        }),
        ("tok_compatible_forms", 7, &["normalizer.normalizers[2]", "5832 times"], |t| {
            tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFKD"}); 3]}));
        }),
        ("tok_replace_nothing", 7, &["normalizer.normalizers[12]", "8192 times"], |t| {
            let part = json!({"type": "Replace", "pattern": {"Regex": "(?=x)|q*"}, "content": "a"});
            tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![part; 40]}));
        }),
        ("tok_replace_boundaries", 7, &["normalizer.normalizers[12]", "8192 times"], |t| {
            let part = json!({"type": "Replace", "pattern": {"Regex": "\\B"}, "content": "a"});
            tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![part; 40]}));
        }),
        ("tok_replace_empty_text", 7, &["normalizer.normalizers[12]", "8192 times"], |t| {
            let part = json!({"type": "Replace", "pattern": {"String": ""}, "content": "a"});
            tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![part; 40]}));
        }),
        ("tok_65_parts", 7, &["normalizer.normalizers[64]", "at most 64"], |t| {
            tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); 70]}));
        }),
        ("tok_parts_of_parts", 7, &["pre_tokenizer.pretokenizers[", "at most 64"], |t| {
            let inner = json!({"type": "Sequence", "pretokenizers": vec![json!({"type": "WhitespaceSplit"}); 30]});
            tok(t, |v| v["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [inner, inner, inner]}));
        }),
        ("tok_missing_field", 4, &["tokenizers crate"], |t| tok(t, |v| v["pre_tokenizer"]["behavior"] = Value::Null)),
        ("tok_special_wrong_type", 4, &["tokenizer_config.json", "bos_token"], |t| {
            t.json("tokenizer_config.json", &json!({"bos_token": 1}));
        }),
    ]);
}

fn pattern(t: &Toy, regex: &str) {
    tok(t, |v| v["pre_tokenizer"]["pattern"]["Regex"] = json!(regex));
}

#[test]
fn chat_templates() {
    refuse(&[
        ("tmpl_syntax_error", 4, &["chat_template.jinja", "line 2"], |t| t.put("chat_template.jinja", "x\n{% if")),
        ("tmpl_10k_nested", 4, &["chat_template.jinja"], |t| {
            t.put("chat_template.jinja", format!("{}{}", "{% if 1 %}".repeat(10_000), "{% endif %}".repeat(10_000)));
        }),
        ("tmpl_10k_parentheses", 4, &["chat_template.jinja"], |t| {
            t.put("chat_template.jinja", format!("{{{{ {}1{} }}}}", "(".repeat(10_000), ")".repeat(10_000)));
        }),
        ("tmpl_infinite", 7, &["chat_template.jinja"], |t| {
            t.put("chat_template.jinja", "{% for i in range(1000000000000) %}x{% endfor %}");
        }),
        ("tmpl_1GB", 7, &["chat_template.jinja"], |t| {
            t.put("chat_template.jinja", "{% for i in range(10000) %}{{ 'x' * 100000 }}{% endfor %}");
        }),
        // Lists in lists, more than a stack of 8 MB can free.
        ("tmpl_deep_value", 7, &["chat_template.jinja", "50000 steps"], |t| {
            let grow = format!("{{% set x = {}x{} %}}", "[".repeat(60), "]".repeat(60));
            t.put("chat_template.jinja", format!("{{% set x = [] %}}{}", grow.repeat(1000)));
        }),
        ("tmpl_deep_value_kept", 7, &["chat_template.jinja", "the depth of a value"], |t| {
            let grow = "{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}";
            t.put("chat_template.jinja", format!("{{% set ns = namespace(x=[]) %}}{grow}"));
        }),
        ("tmpl_deep_value_printed", 7, &["chat_template.jinja", "the depth of a value"], |t| {
            let grow = "{% set x = [[[[[x]]]]] %}".repeat(30);
            t.put("chat_template.jinja", format!("{{% set x = [] %}}{grow}{{{{ x | pprint }}}}"));
        }),
        ("tmpl_endless_value", 7, &["chat_template.jinja", "namespaces in a namespace"], |t| {
            t.put("chat_template.jinja", "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}");
        }),
        ("tmpl_precision", 7, &["chat_template.jinja", "65536"], |t| t.put("chat_template.jinja", "{{ '%.65536f' | format(1) }}")),
        ("tmpl_ssti", 4, &["__class__"], |t| t.put("chat_template.jinja", "{{ ''.__class__.__mro__ }}")),
        ("tmpl_import", 4, &["import"], |t| t.put("chat_template.jinja", "{% import 'os' as os %}")),
        ("tmpl_include", 4, &["include"], |t| t.put("chat_template.jinja", "{% include '/etc/passwd' %}")),
        ("tmpl_bad_utf8", 4, &["byte 1"], |t| t.put("chat_template.jinja", b"a\xff")),
        ("tmpl_in_config", 4, &["tokenizer_config.json", "line 1"], |t| {
            t.remove("chat_template.jinja");
            t.json("tokenizer_config.json", &json!({"chat_template": [{"name": "default", "template": "{% if"}]}));
        }),
    ]);
}

#[test]
fn must_be_accepted() {
    accept(&[
        ("tok_bos_that_is_added", "add_bos_token: is false, but tokenizer.json puts one around every text", |t| {
            t.json("tokenizer_config.json", &json!({"bos_token": "<s>", "add_bos_token": false, "add_eos_token": false}));
        }),
        ("tok_eos_that_is_not_added", "add_eos_token: is true, but tokenizer.json puts none around a text", |t| {
            t.json(
                "tokenizer_config.json",
                &json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true, "add_eos_token": true}),
            );
        }),
        ("tok_one_token_as_bos_and_eos", "", |t| {
            t.json(
                "tokenizer_config.json",
                &json!({"bos_token": "<s>", "eos_token": "<s>", "add_bos_token": true, "add_eos_token": false}),
            );
        }),
        ("st_leading_whitespace", "", |t| t.edit_header(|h| format!("   {h}  "))),
        ("st_zero_size_tensor", "model.empty", |t| {
            t.edit_weights(|w| w.insert(3, ToyTensor::zeros("model.empty", "F32", 4, &[0, 7])));
        }),
        ("st_scalar", "model.scalar", |t| t.edit_weights(|w| w.push(ToyTensor::zeros("model.scalar", "F32", 4, &[])))),
        ("tied_embeddings", "", |t| {
            t.config("tie_word_embeddings", json!(true));
            t.edit_weights(|w| w.retain(|t| t.name != "lm_head.weight"));
        }),
        ("tied_embeddings_stored_twice", "", |t| {
            t.config("tie_word_embeddings", json!(true));
            t.edit_weights(|w| w.last_mut().unwrap().data = w[0].data.clone());
        }),
        ("mixed_dtypes", "", |t| replace(t, "model.norm.weight", "F32", 4)),
        ("unknown_config_keys", "", |t| t.config("some_future_switch", json!({"a": [1]}))),
        ("no_chat_template", "", |t| t.remove("chat_template.jinja")),
        ("known_buffers", "", |t| {
            let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
            t.edit_weights(|w| w.push(ToyTensor::zeros(name, "F32", 4, &[8])));
        }),
        ("auto_map_poison_py", "auto_map", |t| {
            t.config("auto_map", json!({"AutoModel": "modeling_x.Model"}));
            // Reading it would block forever.
            t.put("modeling_x.py", "");
            fifo(t, "modeling_x.py");
        }),
        ("no_prefix", "", |t| {
            t.edit_weights(|w| w.iter_mut().for_each(|t| t.name = t.name.trim_start_matches("model.").to_string()));
        }),
        ("hardlinked_shards", "", |t| {
            t.shard();
            std::fs::hard_link(t.file("a.safetensors"), t.path.join("../elsewhere")).unwrap();
        }),
        ("transformers_5_config", "", |t| {
            t.edit("config.json", |config| {
                let map = config.as_object_mut().unwrap();
                ["rope_theta", "rope_scaling", "torch_dtype"].iter().for_each(|key| drop(map.remove(*key)));
            });
            t.config("dtype", json!("bfloat16"));
            t.config("rope_parameters", json!({"rope_type": "default", "rope_theta": 10000.0}));
            t.config("layer_types", json!(["full_attention", "full_attention"]));
        }),
        ("template_that_raises", "", |t| t.put("chat_template.jinja", "{{ raise_exception('never') }}")),
        ("pad_token_id -1", "", |t| t.config("pad_token_id", json!(-1))),
    ]);
    let options = OpenOptions { tokenizer: TokenizerUse::Optional, ..OpenOptions::default() };
    assert_eq!(outcome(|t| t.remove("tokenizer.json"), &options), Ok(vec![]), "token ids only");
    let options = OpenOptions { tokenizer: TokenizerUse::Unread, ..OpenOptions::default() };
    let broken = |t: &Toy| ["tokenizer.json", "chat_template.jinja"].iter().for_each(|file| t.put(file, "{% if"));
    assert_eq!(outcome(broken, &options), Ok(vec![]), "nobody reads them");
}

#[test]
fn hf_cache_symlinks() {
    let temp = tempfile::tempdir().unwrap();
    let repo = temp.path().join("models--x--y");
    let snapshot = repo.join("snapshots/0123abcd");
    let toy = Toy::write(&snapshot);
    std::fs::create_dir(repo.join("blobs")).unwrap();
    for (number, entry) in std::fs::read_dir(&snapshot).unwrap().map(Result::unwrap).collect::<Vec<_>>().iter().enumerate() {
        let name = entry.file_name().into_string().unwrap();
        let blob = format!("{number:040x}");
        std::fs::rename(entry.path(), repo.join("blobs").join(&blob)).unwrap();
        toy.link(&format!("../../blobs/{blob}"), &name);
    }
    assert!(Path::new(&toy.file("config.json")).is_symlink());
    let model = open(&snapshot, &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(model.warnings, []);
    assert_eq!(model.hash_inputs().unwrap().len(), 6);
}

#[test]
fn non_finite_weights_are_found_by_element() {
    let temp = tempfile::tempdir().unwrap();
    let toy = Toy::write(temp.path());
    for (value, word) in [(0x7fc0u16, "NaN"), (0xff80, "infinity")] {
        toy.edit_weights(|w| w[0].data[10..12].copy_from_slice(&value.to_le_bytes()));
        let model = open(temp.path(), &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        let tensor = model.weights.get("model.embed_tokens.weight").unwrap();
        let bytes = model.weights.read(tensor).unwrap();
        let e = model.weights.check_finite(tensor, 0, &bytes).unwrap_err();
        assert_eq!((e.exit_code(), e.place.as_str()), (4, "model.embed_tokens.weight[5]"));
        assert!(e.to_string().contains(word), "{e}");
        assert!(model.weights.check_finite(tensor, 6, &bytes[12..]).is_ok());
    }
}

#[test]
fn weights_that_change_are_noticed() {
    let temp = tempfile::tempdir().unwrap();
    let toy = Toy::write(temp.path());
    let model = open(temp.path(), &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    model.weights.check_unchanged().unwrap();
    cut(&toy, 1000);
    let e = model.weights.check_unchanged().unwrap_err();
    assert!(e.exit_code() == 3 && e.to_string().contains("changed while reading"), "shard_changed: {e}");
    assert_eq!(model.hash_inputs().unwrap_err().exit_code(), 3);
}

/// Bytes damaged at random, in every file: whatever comes out, it is a model or one tidy line.
#[test]
fn random_damage() {
    let temp = tempfile::tempdir().unwrap();
    let mut seed = 0x2545_f491_4f6c_dd1du64;
    let mut next = |bound: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) as usize % bound
    };
    let (mut accepted, mut refused) = (0, 0);
    for round in 0..400 {
        let toy = Toy::write(temp.path());
        let files = [
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "generation_config.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ];
        let name = files[next(files.len())];
        let mut bytes = toy.get(name);
        // The interesting part of the weights is their header.
        let reach = bytes.len().min(4096);
        for _ in 0..1 + next(3) {
            let at = next(reach.min(bytes.len()).max(1));
            let piece = [&b"0"[..], b"-1", b"99999999999", b"1e999", b"\"", b"[", b"}", b"null", b"\xff", b"{{", b"%}"][next(11)];
            match next(4) {
                0 => bytes[at] = next(256) as u8,
                1 => drop(bytes.splice(at..at, piece.iter().copied())),
                2 => drop(bytes.splice(at..(at + 1 + next(8)).min(bytes.len()), piece.iter().copied())),
                _ if next(8) == 0 => bytes.truncate(at.max(1)),
                _ => drop(bytes.remove(at)),
            }
        }
        toy.put(name, &bytes);
        match open(temp.path(), &OpenOptions::default()) {
            Ok(_) => accepted += 1,
            Err(e) => {
                let line = e.to_string();
                let tidy = line.len() <= 500 && !line.chars().any(char::is_control) && line.contains(", expected ");
                assert!(tidy && (3..=7).contains(&e.exit_code()), "round {round}, {name}: {line}");
                refused += 1;
            }
        }
    }
    assert!(accepted > 20 && refused > 200, "{accepted} accepted, {refused} refused");
}
