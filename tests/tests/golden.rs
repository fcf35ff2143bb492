//! Golden models: executables and the interpreter against transformers, and planted faults that both must notice.
//!
//! See `tests/golden/README.md` for what each model is for. Executables are built with several bucket sets, whose results must
//! be the same bits.

use rcompile_graph::DType;
use rcompile_tests::tol::{self, Gate};
use rcompile_tests::{Difference, Exe, Reference, argmax, build, difference, faults, golden, ids, numbers, read_json, reference_json};
use serde_json::Value;
use std::path::Path;

const F32: &str = "--no-tokenizer --compute f32";
const BF16: &str = "--no-tokenizer --compute bf16";

/// One test per model and kind of check, so that they run side by side and fail one by one.
macro_rules! golden {
    ($($name:ident: $dir:literal,)*) => { $(
        mod $name {
            #[test]
            fn interpreter_agrees() { super::interpreter_agrees($dir) }
            #[test]
            fn executables_agree() { super::executables_agree($dir) }
            #[test]
            fn bf16_agrees() { super::bf16_agrees($dir) }
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

/// One prompt with what transformers computes.
struct Case {
    tokens: Vec<u32>,
    all_top1: Vec<u32>,
    logits: Vec<f64>,
    greedy: Vec<u32>,
}

/// The prompts of a decoder, the longest last.
fn cases(dir: &Path) -> Vec<Case> {
    let list: Vec<Case> = reference_json(dir)["cases"].as_array().unwrap().iter().map(case).collect();
    assert!(list.len() == 3 && list.is_sorted_by_key(|c| c.tokens.len()));
    list
}

fn case(case: &Value) -> Case {
    // What is compared was drawn with clear winners.
    assert!(case["smallest_top1_top2_margin"].as_f64().unwrap() > tol::GREEDY_MARGIN);
    let greedy = ids(&case["greedy_ids"]);
    assert_eq!(greedy.len(), 24);
    Case { tokens: ids(&case["input_ids"]), all_top1: ids(&case["all_top1"]), logits: numbers(&case["logits"]), greedy }
}

fn wide(row: &[f32]) -> Vec<f64> {
    row.iter().map(|x| f64::from(*x)).collect()
}

#[track_caller]
fn check(what: &str, gate: Gate, found: &[f64], expected: &[f64]) -> Difference {
    let d = difference(found, expected);
    assert!(gate.holds(&d), "{what}: {d}, expected {gate:?}");
    d
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

fn executables_agree(name: &str) {
    let dir = golden(name);
    let wide_buckets = build(&dir, &format!("{F32} --buckets 1,8,64"));
    let one = build(&dir, &format!("{F32} --buckets 1"));
    for case in cases(&dir) {
        let what = format!("{name}, {} tokens", case.tokens.len());
        let logits = wide_buckets.logits(&case.tokens, &[]);
        let d = check(&what, tol::F32, &wide(&logits), &case.logits);
        println!("{what}: {d}");
        assert_eq!(wide_buckets.greedy(&case.tokens, 24, &[]), case.greedy, "{what}");
        for (i, expected) in case.all_top1.iter().enumerate() {
            let row = wide(&wide_buckets.logits(&case.tokens[..=i], &[]));
            assert_eq!(argmax(&row), *expected, "{what}, position {i}");
        }
        assert_eq!(bits(&one.logits(&case.tokens, &[])), bits(&logits), "{what}: bucket 1 and bucket 64");
        assert_eq!(one.greedy(&case.tokens, 24, &[]), case.greedy, "{what}, bucket 1");
    }
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}

fn bf16_agrees(name: &str) {
    let dir = golden(name);
    let exe = build(&dir, &format!("{BF16} --buckets 1,64"));
    let rounded = Reference::open(&dir, DType::BF16);
    let exact = Reference::open(&dir, DType::F32);
    for case in cases(&dir) {
        let what = format!("{name}, {} tokens", case.tokens.len());
        let found = wide(&exe.logits(&case.tokens, &[]));
        let same_rounding = check(&what, tol::BF16, &found, &rounded.runner().logits(&case.tokens));
        let f32 = check(&what, tol::BF16_TO_F32, &found, &case.logits);
        println!("{what}: to the interpreter {same_rounding}; to f32 {f32}");
        greedy_within_top5(&what, &exe, &exact, &case);
    }
}

/// At the first token that differs, each side's choice is among the five best of f32.
fn greedy_within_top5(what: &str, exe: &Exe, exact: &Reference, case: &Case) {
    let found = exe.greedy(&case.tokens, 24, &[]);
    let Some(at) = (0..24).find(|i| found[*i] != case.greedy[*i]) else { return };
    let logits = exact.runner().logits(&[&case.tokens, &found[..at]].concat());
    let better = logits.iter().filter(|x| **x > logits[found[at] as usize]).count();
    assert!(better < 5, "{what}: greedy token {at} is {}, {better} are better", found[at]);
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

const VECTORS: [&str; 6] = ["mean", "cls", "max", "mean_normalised", "cls_normalised", "max_normalised"];

/// Places of [`VECTORS`] among the eight pooled vectors (`last` is between; the reference has none of it).
const PLACES: [usize; 6] = [0, 1, 2, 4, 5, 6];

/// A vector is no distribution: its divergence is not asked for.
const POOLED: Gate = Gate { kld: f64::INFINITY, ..tol::F32 };

mod bert {
    use super::*;

    /// Texts of one segment only: executables take no segments.
    fn plain_cases(reference: &Value) -> Vec<&Value> {
        let all = reference["cases"].as_array().unwrap();
        assert_eq!(all.len(), 4);
        all.iter().filter(|c| ids(&c["token_type_ids"]).iter().all(|s| *s == 0)).collect()
    }

    fn embed(exe: &Exe, tokens: &[u32], pooling: &str, normalize: bool) -> Vec<f64> {
        let (list, normalize) = (rcompile_tests::joined(tokens), normalize.to_string());
        let report = exe.json(["embed", "--tokens", &list, "--pooling", pooling, "--normalize", &normalize]);
        numbers(&report["embeddings"][0])
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
    fn executables_agree() {
        let dir = golden("bert");
        let exes = ["--buckets 64", "--buckets 8,64"].map(|buckets| build(&dir, &format!("{F32} {buckets}")));
        let reference = reference_json(&dir);
        let interpreter = Reference::open(&dir, DType::F32);
        for case in plain_cases(&reference) {
            let tokens = ids(&case["input_ids"]);
            let expected = interpreter.runner().pooled(&tokens, &vec![0; tokens.len()]);
            for normalize in [false, true] {
                for (i, pooling) in ["mean", "cls", "max", "last"].into_iter().enumerate() {
                    let key = format!("{pooling}{}", if normalize { "_normalised" } else { "" });
                    let [a, b] = [0, 1].map(|i: usize| embed(&exes[i], &tokens, pooling, normalize));
                    assert_eq!(a, b, "{key}: the same bits for every bucket set");
                    if pooling != "last" {
                        let d = check(&key, POOLED, &a, &numbers(&case[&key]));
                        println!("{} tokens, {key}: {d}", tokens.len());
                    }
                    check(&key, POOLED, &a, &expected[i + if normalize { 4 } else { 0 }]);
                }
            }
            // Without options: as modules.json says.
            let list = rcompile_tests::joined(&tokens);
            let default = numbers(&exes[0].json(["embed", "--tokens", &list])["embeddings"][0]);
            assert_eq!(default, embed(&exes[0], &tokens, "mean", true));
        }
    }

    #[test]
    fn bf16_agrees() {
        let dir = golden("bert");
        let exe = build(&dir, &format!("{BF16} --buckets 8,64"));
        let reference = reference_json(&dir);
        for case in plain_cases(&reference) {
            let tokens = ids(&case["input_ids"]);
            let found = embed(&exe, &tokens, "mean", true);
            let d = check("bf16", tol::EMBEDDING_BF16, &found, &numbers(&case["mean_normalised"]));
            println!("{} tokens: {d}", tokens.len());
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
