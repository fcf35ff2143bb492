//! Trained models and published tokenizers against their recorded references (`../shared/assets`).

use rcompile_tests::checks::{language_model, sentence_embeddings};
use rcompile_tests::toy::Toy;
use rcompile_tests::{Exe, assets, build, ids, model_dir, read_json, reference_json};
use serde_json::Value;
use std::path::PathBuf;

#[test]
fn stories260k_llama() {
    let Some(dir) = assets("models/stories260k-llama") else { return };
    language_model(&dir, &build(&dir, "--buckets 1,8,64"));
}

#[test]
fn slm4096_gpt2() {
    let Some(dir) = assets("models/slm4096-gpt2") else { return };
    language_model(&dir, &build(&dir, "--buckets 1,8,64"));
}

#[test]
fn minilm_embeddings() {
    let Some(dir) = assets("models/all-MiniLM-L6-v2-fp16") else { return };
    sentence_embeddings(&dir, &build(&dir, "--buckets 16,128 --compute f32"));
}

/// The model's files say how long a text may be (256 tokens), and a text that only the executable has no room for is refused.
#[test]
fn what_the_executable_has_no_room_for_is_not_cut() {
    let Some(dir) = assets("models/all-MiniLM-L6-v2-fp16") else { return };
    let exe = build(&dir, "--buckets 8,16 --ctx-size 16");
    let embed = |words: usize| exe.run(["embed", "-p", &"a ".repeat(words)]);
    assert_eq!(embed(14).code, Some(0));
    let refused = embed(30);
    let says = &refused.stderr;
    assert!(refused.code == Some(7) && says.contains("32 tokens") && !says.contains("warning"), "{says}");
}

/// A tiny random model with a published tokenizer.
fn with_tokenizer(name: &str) -> Option<(PathBuf, Exe)> {
    let source = assets(&format!("tokenizers/{name}"))?;
    let model = model_dir(name, |dir| {
        let tokenizer = read_json(&source.join("tokenizer.json"));
        let added = tokenizer["added_tokens"].as_array().unwrap().iter().map(|t| t["id"].as_u64().unwrap() + 1).max();
        let vocab = match &tokenizer["model"]["vocab"] {
            Value::Object(map) => map.len(),
            list => list.as_array().unwrap().len(),
        };
        let vocab = vocab.max(added.unwrap_or(0) as usize);
        Toy { vocab, hidden: 8, heads: 2, kv_heads: 1, intermediate: 12, layers: 1 }.write(dir);
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            if source.join(file).is_file() {
                std::fs::copy(source.join(file), dir.join(file)).unwrap();
            }
        }
    });
    let exe = build(&model, "--buckets 1,8");
    Some((source, exe))
}

/// Every case of a tokenizer's reference: ids with and without special tokens, and both decodings.
fn tokenizer(name: &str) {
    let Some((source, exe)) = with_tokenizer(name) else { return };
    let mut wrong = Vec::new();
    let reference = reference_json(&source);
    let cases = reference["cases"].as_array().unwrap();
    assert!(cases.len() > 20);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let list = rcompile_tests::joined(&ids(&case["ids"]));
        for (key, found) in [
            ("ids", exe.json_with(["tokenize", "-f", "-"], text)["tokens"].take()),
            ("ids_no_special", exe.json_with(["tokenize", "--no-special", "-f", "-"], text)["tokens"].take()),
            ("decoded", exe.json(["detokenize", "--tokens", &list])["text"].take()),
            ("decoded_skip_special", exe.json(["detokenize", "--skip-special", "--tokens", &list])["text"].take()),
        ] {
            if found != case[key] {
                wrong.push(format!("{text:?}: {key}: {found}, expected {}", case[key]));
            }
        }
    }
    assert!(wrong.is_empty(), "{name}: {} differ:\n{}", wrong.len(), wrong.join("\n"));
}

macro_rules! tokenizers {
    ($($test:ident: $name:literal,)*) => {
        $( #[test] fn $test() { tokenizer($name) } )*

        #[test]
        fn every_tokenizer_is_tested() {
            let Some(folder) = assets("tokenizers") else { return };
            let mut found: Vec<String> =
                std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
            found.sort();
            assert_eq!(found, [$($name),*]);
        }
    }
}

tokenizers! {
    tokenizer_gpt2: "gpt2",
    tokenizer_llama3_2: "llama3.2",
    tokenizer_phi_3_mini: "phi-3-mini",
    tokenizer_qwen3: "qwen3",
    tokenizer_t5_small: "t5-small",
}

#[test]
fn chat_renders_the_template_once() {
    let Some((_, exe)) = with_tokenizer("qwen3") else { return };
    let Some(folder) = assets("chat_templates/qwen3") else { return };
    let mut tested = 0;
    for case in reference_json(&folder)["cases"].as_array().unwrap() {
        let roles: Vec<&str> = case["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
        let content = |i: usize| case["messages"][i]["content"].as_str().unwrap();
        let mut args = vec!["generate", "--chat", "-n", "1"];
        match &roles[..] {
            _ if !case["tools"].is_null() || case["add_generation_prompt"] != true => continue,
            ["user"] => args.extend(["-p", content(0)]),
            ["system", "user"] => args.extend(["--system", content(0), "-p", content(1)]),
            _ => continue,
        }
        tested += 1;
        // The template's text is tokenised as it stands: it brings its own special tokens.
        let expected = exe.json_with(["tokenize", "--no-special", "-f", "-"], case["text"].as_str().unwrap());
        let generated = exe.json(&args);
        assert_eq!(generated["prompt_tokens"], expected["tokens"], "{}", case["name"]);
        // Without --chat the text is raw.
        let raw = exe.json(["generate", "-n", "1", "-p", content(roles.len() - 1)]);
        assert_ne!(raw["prompt_tokens"], expected["tokens"]);
    }
    assert!(tested >= 2, "{tested} conversations that `generate --chat` can express");
}
