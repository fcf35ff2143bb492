//! Broken model directories: each is refused with the right exit code and one line that names the culprit.
//!
//! The cases are those of `rcompile-broken`, opened in this process; `compiler/tests/bad_models.rs` gives the same to the driver.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use rcompile_broken::variants::{gptq, of_gptq};
use rcompile_broken::{Accepted, Case, Toy, cut, extra_tensor};
use rcompile_models::{Error, Model, OpenOptions, TokenizerUse, Warning, open};
use serde_json::{Value, json};

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

    refuse(rcompile_broken::FILES);
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
    refuse(rcompile_broken::CONFIG_BYTES);
}

#[test]
fn config_values() {
    refuse(rcompile_broken::CONFIG);
    accept(rcompile_broken::CONFIG_ACCEPTED);
    let huge = |t: &Toy| t.config("max_position_embeddings", json!(1_000_000_000_000u64));
    let options = OpenOptions { ctx_size: Some(64), ..OpenOptions::default() };
    assert_eq!(outcome(huge, &options), Ok(vec![]), "max_position_1e12 with --ctx-size");
    let dynamic = |t: &Toy| t.config("rope_scaling", json!({"type": "dynamic", "factor": 2}));
    let options = OpenOptions { ctx_size: Some(129), ..OpenOptions::default() };
    assert_eq!(outcome(dynamic, &options).unwrap_err().0, 6, "dynamic RoPE beyond the trained length");
}

/// The error of a toy of GPTQ codes whose last layer has one part changed.
fn refusal_of_codes(config: Value, part: &str, change: impl FnOnce(&mut [u8])) -> Error {
    let temp = tempfile::tempdir().unwrap();
    let toy = Toy::write(temp.path());
    gptq(&toy, |list| change(&mut of_gptq(list, part).data));
    toy.config("quantization_config", config);
    open(temp.path(), &OpenOptions::default()).map(|model| model.name).unwrap_err()
}

#[test]
fn scales_of_codes() {
    for (bits, element, parts) in
        [(0u16, "", ["scale of group 2, output 63 is zero", "found 0"]), (0x7e00, "[191]", ["is not finite", "found NaN"])]
    {
        let config = json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": false});
        let e = refusal_of_codes(config, "scales", |scales| {
            let last = scales.len() - 2;
            scales[last..].copy_from_slice(&bits.to_le_bytes());
        });
        assert_eq!((e.exit_code(), e.place.clone()), (4, format!("model.layers.1.mlp.down_proj.scales{element}")), "{e}");
        let line = e.to_string();
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        assert!(!line.contains("--allow-nonfinite") && e.help.is_some(), "{line}");
    }
}

/// The way out depends on what is stored: a file may have been labelled with the other version.
#[test]
fn zero_points_that_contradict() {
    let (first, last) = ("model.layers.0.self_attn.q_proj.qzeros", "model.layers.1.mlp.down_proj.qzeros");
    for (format, stored, place, found, help) in [
        ("gptq", 0x88, last, "found 9", r#""checkpoint_format": "gptq_v2""#),
        ("gptq_v2", 0x77, first, "found 7", r#""checkpoint_format": "gptq" "#),
        ("gptq", 0x33, last, "found 4", r#""sym": false"#),
    ] {
        let config = json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true, "checkpoint_format": format});
        let e = refusal_of_codes(config, "qzeros", |zeros| zeros.fill(stored));
        assert_eq!((e.exit_code(), &*e.place), (5, place), "{e}");
        assert!(e.to_string().contains("contradicts sym") && e.to_string().contains(found), "{e}");
        assert!(e.help.as_ref().is_some_and(|h| h.contains(help)), "{:?}", e.help);
    }
}

/// Weights of other names than the ones that are read.
#[test]
fn weights_elsewhere() {
    for (name, help) in [
        ("gptq_model-4bit-128g.safetensors", "if gptq_model-4bit-128g.safetensors holds the weights, name it model.safetensors"),
        ("adapter_model.safetensors", "is an adapter"),
        ("model-00001-of-00002.safetensors", "is a shard: model.safetensors.index.json"),
        ("pytorch_model.bin", "pickled weights are not read"),
    ] {
        let temp = tempfile::tempdir().unwrap();
        Toy::write(temp.path());
        std::fs::rename(temp.path().join("model.safetensors"), temp.path().join(name)).unwrap();
        let e = open(temp.path(), &OpenOptions::default()).map(|model| model.name).unwrap_err();
        assert_eq!(e.exit_code(), 3, "{e}");
        assert!(e.help.as_ref().is_some_and(|h| h.contains(help)), "{:?}", e.help);
    }
}

#[test]
fn codes() {
    accept(rcompile_broken::CODES_ACCEPTED);
    refuse(rcompile_broken::CODES);
}

#[test]
fn safetensors_bytes() {
    refuse(rcompile_broken::SAFETENSORS);
}

#[test]
fn tensors_and_config_disagree() {
    refuse(rcompile_broken::TENSORS);
    let strict = OpenOptions { strict: true, ..OpenOptions::default() };
    let (exit, line) = outcome(extra_tensor, &strict).unwrap_err();
    assert!(exit == 5 && line.contains("model.bogus.weight"), "extra_tensor --strict: {line}");
}

#[test]
fn shards_and_index() {
    refuse(rcompile_broken::SHARDS);
    accept(rcompile_broken::SHARDS_ACCEPTED);
}

#[test]
fn tokenizers() {
    refuse(rcompile_broken::TOKENIZER);
}

#[test]
fn chat_templates() {
    refuse(rcompile_broken::TEMPLATE);
}

#[test]
fn must_be_accepted() {
    accept(rcompile_broken::ACCEPTED);
    let options = OpenOptions { tokenizer: TokenizerUse::Optional, ..OpenOptions::default() };
    assert_eq!(outcome(|t| t.remove("tokenizer.json"), &options), Ok(vec![]), "token ids only");
    let options = OpenOptions { tokenizer: TokenizerUse::Unread, ..OpenOptions::default() };
    let broken = |t: &Toy| ["tokenizer.json", "chat_template.jinja"].iter().for_each(|file| t.put(file, "{% if"));
    assert_eq!(outcome(broken, &options), Ok(vec![]), "nobody reads them");
    let astray = |t: &Toy| ["tokenizer.json", "chat_template.jinja"].iter().for_each(|file| t.link("../nowhere", file));
    assert_eq!(outcome(astray, &options), Ok(vec![]), "nobody opens them");
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

/// Of two names of one matrix, `safetensors.torch.save_model` keeps the alphabet's first, which is the head's.
#[test]
fn tied_embeddings_under_the_heads_name() {
    let temp = tempfile::tempdir().unwrap();
    let toy = Toy::write(temp.path());
    let matrix = |model: &Model| model.weights.read(model.weights.get("model.embed_tokens.weight").unwrap()).unwrap();
    let expected = matrix(&open(temp.path(), &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}")));
    toy.config("tie_word_embeddings", json!(true));
    toy.edit_weights(|w| {
        w.last_mut().unwrap().data = w[0].data.clone();
        w.remove(0);
    });
    let model = open(temp.path(), &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(matrix(&model), expected);
    assert_eq!(&*model.weights.get("model.embed_tokens.weight").unwrap().stored_name, "lm_head.weight");
    assert_eq!(model.weights.get("lm_head.weight"), None);
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
