//! Golden models: executables and the interpreter against transformers, and planted faults that both must notice.
//!
//! See `tests/golden/README.md` for what each model is for. Executables are built with several bucket sets, whose results must
//! be the same bits.

use rcompile_graph::DType;
use rcompile_tests::checks::{self, PLACES, POOLED, VECTORS, cases, check};
use rcompile_tests::{Machine, Reference, argmax, build, difference, faults, golden, ids, numbers, read_json, reference_json, tol};
use std::path::Path;

/// One test per model and kind of check, so that they run side by side and fail one by one.
macro_rules! golden {
    ($($name:ident: $dir:literal,)*) => { $(
        mod $name {
            use super::*;
            #[test]
            fn interpreter_agrees() { super::interpreter_agrees($dir) }
            #[test]
            fn executables_agree() { checks::decoder(&Machine::host(), $dir) }
            #[test]
            fn bf16_agrees() { checks::decoder_bf16(&Machine::host(), $dir) }
            #[test]
            fn faults_are_noticed() { super::faults_are_noticed($dir) }
        } )*
        #[test]
        fn every_model_is_tested() {
            let mut found: Vec<String> = std::fs::read_dir(golden("")).unwrap().flatten().filter(|f| f.path().is_dir())
                .map(|f| f.file_name().into_string().unwrap()).collect();
            found.sort();
            let mut expected = vec![$($dir),*, "bert"];
            expected.sort_unstable();
            assert_eq!(found, expected);
        }
    }
}

golden! {
    gpt2_gelu: "gpt2-gelu",
    gpt2_gelu_new: "gpt2-gelu-new",
    granite: "granite",
    llama_dynamic: "llama-dynamic",
    llama_gqa_tied: "llama-gqa-tied",
    llama_linear: "llama-linear",
    llama_llama3_bias: "llama-llama3-bias",
    llama_yarn: "llama-yarn",
    mistral_window: "mistral-window",
    phi3_partial: "phi3-partial",
    phi3_window: "phi3-window",
    qwen2: "qwen2",
    qwen2_window: "qwen2-window",
    qwen3: "qwen3",
    qwen3_gqa: "qwen3-gqa",
}

/// bf16 inputs where the CPU has no bf16 dot: values are rounded all the same, the attention's output too.
#[test]
fn bf16_without_a_dot() {
    let dir = golden("llama-linear");
    let reference = Reference::open(&dir, DType::BF16);
    // Not every host has AVX-512.
    for cpu in ["x86-64-v3", "x86-64-v4"].into_iter().filter(|cpu| Machine::runs(cpu)) {
        let exe = build(&dir, &format!("--no-tokenizer --compute bf16 --cpu {cpu} --buckets 1,64"));
        for case in cases(&dir) {
            let found: Vec<f64> = exe.logits(&case.tokens, &[]).into_iter().map(f64::from).collect();
            check(&format!("llama-linear, {cpu}"), tol::BF16, &found, &reference.runner().logits(&case.tokens));
        }
    }
}

fn interpreter_agrees(name: &str) {
    let dir = golden(name);
    let reference = Reference::open(&dir, DType::F32);
    for case in cases(&dir) {
        let mut runner = reference.runner();
        let rows = runner.feed(&case.tokens);
        let last = rows.last().unwrap();
        let d = check(name, tol::F32, last, &case.logits);
        println!("{name}, {} tokens: {d}", case.tokens.len());
        assert_eq!(rows.iter().map(|r| argmax(r)).collect::<Vec<_>>(), case.all_top1, "{name}");
        assert_eq!(runner.greedy(last, 24).0, case.greedy, "{name}");
        // A prompt in pieces is the same prompt.
        let mut pieces = reference.runner();
        let in_pieces: Vec<Vec<f64>> = case.tokens.chunks(5).flat_map(|piece| pieces.feed(piece)).collect();
        assert_eq!(in_pieces, rows, "{name}");
    }
}

fn faults_are_noticed(name: &str) {
    let dir = golden(name);
    let reference = Reference::open(&dir, DType::F32);
    let case = cases(&dir).pop().unwrap();
    let list = faults::faults(reference.module());
    for fault in &list {
        let d = difference(&reference.runner_of(&fault.module).logits(&case.tokens), &case.logits);
        println!("{name}: {}: {d}", fault.name);
        assert!(!tol::F32.holds(&d), "{name}: {} is not noticed: {d}", fault.name);
    }
    expect_faults(name, &dir, &list);
}

/// Every kind of fault that the model has a place for was planted.
fn expect_faults(name: &str, dir: &Path, list: &[faults::Fault]) {
    let config = read_json(&dir.join("config.json"));
    let planted = |text: &str| list.iter().filter(|f| f.name.contains(text)).count();
    let gpt2 = config["model_type"] == "gpt2";
    let bert = config["model_type"] == "bert";
    let windowed = config["sliding_window"].is_u64() && config["use_sliding_window"] != false;
    let heads = config["num_attention_heads"].as_u64().or(config["n_head"].as_u64()).unwrap();
    let kv_heads = config["num_key_value_heads"].as_u64().unwrap_or(heads);
    let layers = config["num_hidden_layers"].as_u64().or(config["n_layer"].as_u64()).unwrap() as usize;
    assert_eq!(planted("rope"), if gpt2 || bert { 0 } else { 4 }, "{name}");
    assert_eq!(planted("window"), if windowed { 2 } else { 0 }, "{name}");
    assert_eq!(planted("kv heads swapped"), usize::from(kv_heads > 1), "{name}");
    assert_eq!(planted("positions all 0"), usize::from(gpt2 || bert || planted("rope") > 0), "{name}");
    let norms_per_layer = if config["model_type"] == "qwen3" { 4 } else { 2 };
    assert_eq!(planted("omitted"), layers * norms_per_layer + 1, "{name}");
    let stored = ["attention_bias", "mlp_bias"].iter().any(|key| config[key] == true);
    let biased = gpt2 || bert || stored || config["model_type"] == "qwen2";
    assert_eq!(planted(".bias ignored") > 0, biased, "{name}");
}

mod bert {
    use super::*;

    #[test]
    fn executables_agree() {
        checks::encoder(&Machine::host());
    }

    #[test]
    fn bf16_agrees() {
        checks::encoder_bf16(&Machine::host());
    }

    #[test]
    fn interpreter_agrees() {
        let dir = golden("bert");
        let reference = Reference::open(&dir, DType::F32);
        for case in reference_json(&dir)["cases"].as_array().unwrap() {
            let (tokens, segments) = (ids(&case["input_ids"]), ids(&case["token_type_ids"]));
            let pooled = reference.runner().pooled(&tokens, &segments);
            assert_eq!(pooled.len(), 8);
            for (key, place) in VECTORS.into_iter().zip(PLACES) {
                let d = check(key, POOLED, &pooled[place], &numbers(&case[key]));
                println!("{} tokens, {key}: {d}", tokens.len());
            }
        }
    }

    #[test]
    fn faults_are_noticed() {
        let dir = golden("bert");
        let reference = Reference::open(&dir, DType::F32);
        let recorded = reference_json(&dir);
        let list = faults::faults(reference.module());
        for fault in &list {
            // Only the fourth text has two segments.
            let case = &recorded["cases"][if fault.name.contains("segments") { 3 } else { 2 }];
            let (tokens, segments) = (ids(&case["input_ids"]), ids(&case["token_type_ids"]));
            let pooled = reference.runner_of(&fault.module).pooled(&tokens, &segments);
            let d = difference(&pooled[0], &numbers(&case["mean"]));
            println!("{}: {d}", fault.name);
            assert!(!POOLED.holds(&d), "{} is not noticed: {d}", fault.name);
        }
        assert!(list.iter().any(|f| f.name == "segments ignored"));
        expect_faults("bert", &dir, &list);
    }
}
