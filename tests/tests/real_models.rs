//! Trained models and published tokenizers against their recorded references (`../shared/assets`).

use rcompile_tests::toy::Toy;
use rcompile_tests::{Exe, assets, build, ids, model_dir, numbers, read_json, reference_json, tol};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Greedy text, logits and perplexity of a language model.
fn language_model(dir: &Path, exe: &Exe) {
    let reference = reference_json(dir);
    let cases = reference["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let prompt = case["prompt"].as_str().unwrap();
        let generated = exe.json(["generate", "-p", prompt, "-n", "48", "--temp", "0", "--ignore-eos"]);
        assert_eq!(ids(&generated["prompt_tokens"]), ids(&case["input_ids"]), "{prompt:?}");
        assert_eq!(ids(&generated["tokens"]), ids(&case["greedy_ids"]), "{prompt:?}");
        // The reference decodes the answer alone; a decoder that strips the first space of a text strips it there too.
        let text = generated["text"].as_str().unwrap();
        assert_eq!(text.trim_start(), case["greedy_text"].as_str().unwrap().trim_start(), "{prompt:?}");
        assert_eq!(generated["finish_reason"], "length");

        let report = exe.json(["logits", "-p", prompt, "--top", "20"]);
        assert_eq!(ids(&report["tokens"]), ids(&case["input_ids"]));
        let all = exe.logits(&ids(&case["input_ids"]), &[]);
        let mut worst = 0.0f64;
        for (id, logit) in ids(&case["top20_ids"]).into_iter().zip(numbers(&case["top20_logits"])) {
            let found = f64::from(all[id as usize]);
            worst = worst.max((found - logit).abs());
            assert!((found - logit).abs() <= tol::TOP_LOGITS_ABS, "{prompt:?}: token {id}: {found}, expected {logit}");
        }
        println!("{}: {prompt:?}: top logits differ by {worst:.1e}", dir.display());
        // The same twenty, but for those that are too close to the last one.
        let last = numbers(&case["top20_logits"])[19];
        for pair in report["top"].as_array().unwrap() {
            let expected = ids(&case["top20_ids"]).contains(&(pair[0].as_u64().unwrap() as u32));
            assert!(expected || (pair[1].as_f64().unwrap() - last).abs() <= 2.0 * tol::TOP_LOGITS_ABS, "{prompt:?}: {pair}");
        }
    }

    let expected = &reference["perplexity"];
    let name = expected["text"].as_str().unwrap();
    let text = if dir.join(name).is_file() { dir.join(name) } else { assets("texts").expect("texts").join(name) };
    let (window, chunks) = (expected["window"].to_string(), expected["windows"].to_string());
    let found = exe.json(["perplexity", "-f", text.to_str().unwrap(), "-c", &window, "--chunks", &chunks]);
    assert_eq!(found["tokens"], expected["predicted_tokens"]);
    let (found, expected) = (found["ppl"].as_f64().unwrap(), expected["ppl"].as_f64().unwrap());
    println!("{}: perplexity {found}, expected {expected}", dir.display());
    assert!((found / expected - 1.0).abs() <= tol::PERPLEXITY_REL, "perplexity {found}, expected {expected}");
}

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

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn minilm_embeddings() {
    let Some(dir) = assets("models/all-MiniLM-L6-v2-fp16") else { return };
    let exe = build(&dir, "--buckets 16,128 --compute f32");
    let reference = reference_json(&dir);
    let cases = reference["cases"].as_array().unwrap();
    let texts: Vec<&str> = cases.iter().map(|c| c["text"].as_str().unwrap()).collect();
    // All together fit into one step of the larger bucket.
    assert!(cases.iter().map(|c| ids(&c["input_ids"]).len()).sum::<usize>() <= 128 && cases.len() <= 16);
    let together = exe.json_with(["embed", "-f", "-"], &texts.join("\n"));
    assert_eq!(together["embeddings"].as_array().unwrap().len(), cases.len());
    let mut found = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        assert_eq!(ids(&exe.json(["tokenize", "-p", texts[i]])["tokens"]), ids(&case["input_ids"]), "{:?}", texts[i]);
        let alone = exe.json(["embed", "-p", texts[i]]);
        assert_eq!(alone["embeddings"][0], together["embeddings"][i], "{:?}: alone and in company", texts[i]);
        let embedding = numbers(&alone["embeddings"][0]);
        let off = 1.0 - cosine(&embedding, &numbers(&case["embedding"]));
        println!("{:?}: 1 - cosine {off:.1e}", texts[i]);
        assert!(off <= tol::EMBEDDING_COSINE, "{:?}: 1 - cosine is {off:e}", texts[i]);
        found.push(embedding);
    }
    for (i, row) in reference["cosine"].as_array().unwrap().iter().enumerate() {
        for (j, expected) in numbers(row).into_iter().enumerate() {
            assert!((cosine(&found[i], &found[j]) - expected).abs() < 2e-6, "sentences {i} and {j}");
        }
    }
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
