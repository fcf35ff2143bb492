//! Trained models and published tokenizers open without complaint, and what is not supported yet is refused by name.

mod common;

use rcompile_graph::Pool;
use rcompile_models::arch::Task;
use rcompile_models::pooling::Pooling;
use rcompile_models::{OpenOptions, open};
use rcompile_template::{Template, TemplateInput};
use serde_json::json;
use std::path::Path;

#[test]
fn stories260k_llama() {
    let Some(folder) = common::assets("models/stories260k-llama") else { return };
    let model = open(&folder, &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(model.warnings, []);
    assert_eq!(model.arch.task, Task::Generate);
    let facts = model.facts();
    assert_eq!((facts.layers, facts.heads, facts.kv_heads, facts.head_dim), (5, 8, 4, 8));
    assert!(facts.tied_head && facts.causal);
    assert_eq!((model.generation.eos.as_slice(), model.generation.bos), (&[2][..], Some(1)));
    let tokenizer = model.tokenizer.as_ref().unwrap();
    assert_eq!((tokenizer.facts.size, tokenizer.facts.special_tokens["eos_token"].as_str()), (512, "</s>"));
    assert_eq!(model.parameters(), model.weights.size_bytes() / 4);

    let norm = model.weights.get("model.norm.weight").unwrap();
    let (mut part, whole) = (vec![0; 8], model.weights.read(norm).unwrap());
    model.weights.read_into(norm, 16, &mut part).unwrap();
    assert_eq!(part, whole[16..24]);
    assert!(model.weights.check_finite(norm, 0, &whole).is_ok());

    let inputs = model.hash_inputs().unwrap();
    let names: Vec<&str> = inputs.iter().map(|i| i.name.as_str()).collect();
    let expected = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names, expected);
    assert!(inputs.iter().all(|i| i.sha256.len() == 64 && i.bytes > 0));
    assert_eq!(inputs.iter().find(|i| i.name == "special_tokens_map.json").unwrap().bytes, 72);
}

#[test]
fn slm4096_gpt2() {
    let Some(folder) = common::assets("models/slm4096-gpt2") else { return };
    let model = open(&folder, &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(model.warnings, []);
    assert_eq!((model.facts().vocab_size, model.facts().max_positions), (54, 128));
    assert!(model.weights.get("transformer.h.3.mlp.c_proj.weight").is_some());
}

/// What the cache holds after an answer, with the space that it begins with, is how the next turn's conversation begins.
#[test]
fn the_bundled_models_turns_go_on() {
    let model = open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/model"), &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let template = Template::new(model.chat_template.as_ref().unwrap()).unwrap();
    let render = |messages: &[(&str, &str)]| {
        let messages = messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
        let special_tokens = &model.tokenizer.as_ref().unwrap().facts.special_tokens;
        template
            .render(&TemplateInput { messages, tools: None, add_generation_prompt: true, special_tokens, extra: None, now: None })
            .unwrap()
    };
    let (first, answer) = (("user", "Tell me a story."), " Once upon a time.");
    let held = render(&[first]) + answer + "<|eos|>";
    let next = render(&[first, ("assistant", answer), ("user", "Another.")]);
    assert!(next.starts_with(&held), "{held:?}\n{next:?}");
}

#[test]
fn minilm() {
    let Some(folder) = common::assets("models/all-MiniLM-L6-v2-fp16") else { return };
    let model = open(&folder, &OpenOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(model.warnings, []);
    assert_eq!(model.arch.task, Task::Embed);
    let expected = Pooling { mode: Pool::Mean, normalize: true, max_tokens: Some(256), lowercase: false };
    assert_eq!(model.pooling, Some(expected));
    // The ids of positions that it stores, and the pooler that nothing reads, are no parameters.
    let stored: u64 = model.weights.iter().map(|t| t.elements()).sum();
    assert_eq!((model.parameters(), stored), (22_565_376, 22_713_728));
    let facts = model.tokenizer.unwrap().facts;
    assert!(facts.special_tokens["cls_token"] == "[CLS]" && facts.lowercases);
}

/// A sentence encoder as others are published: without a limit of texts, or with texts in lower case.
#[test]
fn texts_of_minilm() {
    let Some(folder) = common::assets("models/all-MiniLM-L6-v2-fp16") else { return };
    let with = |changes: &[(&str, &str, &str)]| {
        let copy = tempfile::tempdir().unwrap();
        std::fs::create_dir(copy.path().join("1_Pooling")).unwrap();
        let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let files = files.filter(|name| folder.join(name).is_file()).chain(["1_Pooling/config.json".to_string()]);
        for name in files {
            let mut bytes = std::fs::read(folder.join(&name)).unwrap();
            for (_, from, to) in changes.iter().filter(|(file, ..)| *file == name) {
                let text = String::from_utf8(bytes).unwrap();
                assert_eq!(text.matches(from).count(), 1, "{name}: {from}");
                bytes = text.replace(from, to).into_bytes();
            }
            std::fs::write(copy.path().join(&name), bytes).unwrap();
        }
        open(copy.path(), &OpenOptions::default()).map(|model| model.text_limit()).map_err(|e| (e.exit_code(), e.place))
    };
    let texts = "sentence_bert_config.json";
    assert_eq!(with(&[]), Ok(Some(256)));
    assert_eq!(with(&[(texts, "256", "null")]), Ok(Some(512)));
    assert_eq!(with(&[(texts, "256", "null"), ("tokenizer_config.json", "_length\": 512", "_length\": 128")]), Ok(Some(128)));
    let lower = (texts, "\"do_lower_case\": false", "\"do_lower_case\": true");
    assert_eq!(with(&[lower]), Ok(Some(256)));
    let leaves = ("tokenizer.json", "\"lowercase\":true", "\"lowercase\":false");
    assert_eq!(with(&[lower, leaves]), Err((6, "do_lower_case".to_string())));
}

#[test]
fn bart_is_refused_by_name() {
    let Some(folder) = common::assets("models/bart-g2p-us") else { return };
    let e = open(&folder, &OpenOptions::default()).err().expect("BART is not supported");
    assert_eq!(e.exit_code(), 6);
    assert!(e.to_string().contains("BartForConditionalGeneration"), "{e}");
}

#[test]
fn published_tokenizers() {
    let Some(folder) = common::assets("tokenizers") else { return };
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let dir = rcompile_models::dir::ModelDir::open(&path).unwrap();
        let (start, mut warnings) = (std::time::Instant::now(), Vec::new());
        let tokenizer =
            rcompile_models::tokenizer::read(&dir, 1 << 20, &mut warnings).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let size = tokenizer.unwrap().facts.size;
        eprintln!("{}: {size} ids, {:?}, {warnings:?}", path.display(), start.elapsed());
        let e = rcompile_models::tokenizer::read(&dir, size - 1, &mut warnings).unwrap_err();
        assert_eq!(e.exit_code(), 5, "{e}");
    }
}
