//! Executables against recorded references, for any machine that they can be built for: golden models of each family, trained models.

use crate::tol::{self, Gate};
use crate::{Difference, Exe, Machine, Reference, argmax, assets, difference, golden, ids, numbers, reference_json, wide};
use rcompile_graph::DType;
use serde_json::Value;
use std::path::Path;

const F32: &str = "--no-tokenizer --compute f32";
const BF16: &str = "--no-tokenizer --compute bf16";

/// One prompt with what transformers computes.
pub struct Case {
    /// Prompt.
    pub tokens: Vec<u32>,
    /// Best token after each position.
    pub all_top1: Vec<u32>,
    /// Logits after the last position.
    pub logits: Vec<f64>,
    /// Greedy continuation.
    pub greedy: Vec<u32>,
}

/// The prompts of a decoder, the longest last.
pub fn cases(dir: &Path) -> Vec<Case> {
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

/// The difference, which must pass the gate.
#[track_caller]
pub fn check(what: &str, gate: Gate, found: &[f64], expected: &[f64]) -> Difference {
    let d = difference(found, expected);
    assert!(gate.holds(&d), "{what}: {d}, expected {gate:?}");
    d
}

/// A golden decoder in f32: logits, greedy tokens, the best token at every position, and the same bits with other buckets.
pub fn decoder(machine: &Machine, name: &str) {
    let dir = golden(name);
    let wide_buckets = machine.build(&dir, &format!("{F32} --buckets {}", machine.buckets()));
    let one = machine.build(&dir, &format!("{F32} --buckets 1"));
    for case in cases(&dir) {
        let what = format!("{name}, {} tokens", case.tokens.len());
        let logits = wide_buckets.logits(&case.tokens, &[]);
        let d = check(&what, tol::F32, &wide(&logits), &case.logits);
        println!("{what}: {d}");
        assert_eq!(wide_buckets.greedy(&case.tokens, 24, &[]), case.greedy, "{what}");
        for (i, expected) in case.all_top1.iter().enumerate().skip(machine.first_of(case.all_top1.len())) {
            let row = wide(&wide_buckets.logits(&case.tokens[..=i], &[]));
            assert_eq!(argmax(&row), *expected, "{what}, position {i}");
        }
        assert_eq!(bits(&one.logits(&case.tokens, &[])), bits(&logits), "{what}: bucket 1 and bucket 64");
        assert_eq!(one.greedy(&case.tokens, 24, &[]), case.greedy, "{what}, bucket 1");
    }
}

/// Bits of f32 values.
pub fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}

/// A golden decoder with matmul inputs in bf16.
pub fn decoder_bf16(machine: &Machine, name: &str) {
    let dir = golden(name);
    let exe = machine.build(&dir, &format!("{BF16} --buckets 1,64"));
    let rounded = Reference::open(&dir, DType::BF16);
    let exact = Reference::open(&dir, DType::F32);
    for case in cases(&dir) {
        let what = format!("{name}, {} tokens", case.tokens.len());
        let found = wide(&exe.logits(&case.tokens, &[]));
        let same_rounding = check(&what, tol::BF16, &found, &rounded.runner_on(machine).logits(&case.tokens));
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

/// Pooled vectors of the reference.
pub const VECTORS: [&str; 6] = ["mean", "cls", "max", "mean_normalised", "cls_normalised", "max_normalised"];

/// Places of [`VECTORS`] among the eight pooled vectors (`last` is between; the reference has none of it).
pub const PLACES: [usize; 6] = [0, 1, 2, 4, 5, 6];

/// A vector is no distribution: its divergence is not asked for.
pub const POOLED: Gate = Gate { kld: f64::INFINITY, ..tol::F32 };

/// Texts of one segment only: executables take no segments.
fn plain_cases(reference: &Value) -> Vec<&Value> {
    let all = reference["cases"].as_array().unwrap();
    assert_eq!(all.len(), 4);
    all.iter().filter(|c| ids(&c["token_type_ids"]).iter().all(|s| *s == 0)).collect()
}

/// Pooled vector of one text.
pub fn embed(exe: &Exe, tokens: &[u32], pooling: &str, normalize: bool) -> Vec<f64> {
    let (list, normalize) = (crate::joined(tokens), normalize.to_string());
    let report = exe.json(["embed", "--tokens", &list, "--pooling", pooling, "--normalize", &normalize]);
    numbers(&report["embeddings"][0])
}

/// The golden encoder in f32: every pooling, the same bits with other buckets.
pub fn encoder(machine: &Machine) {
    let dir = golden("bert");
    let exes = ["--buckets 64", "--buckets 8,64"].map(|buckets| machine.build(&dir, &format!("{F32} {buckets}")));
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
        let list = crate::joined(&tokens);
        let default = numbers(&exes[0].json(["embed", "--tokens", &list])["embeddings"][0]);
        assert_eq!(default, embed(&exes[0], &tokens, "mean", true));
    }
}

/// The golden encoder with matmul inputs in bf16.
pub fn encoder_bf16(machine: &Machine) {
    let dir = golden("bert");
    let exe = machine.build(&dir, &format!("{BF16} --buckets 8,64"));
    let reference = reference_json(&dir);
    for case in plain_cases(&reference) {
        let tokens = ids(&case["input_ids"]);
        let found = embed(&exe, &tokens, "mean", true);
        let d = check("bf16", tol::EMBEDDING_BF16, &found, &numbers(&case["mean_normalised"]));
        println!("{} tokens: {d}", tokens.len());
    }
}

/// Windows of a text that an emulated CPU reads (`./x test --all`: as many as the reference).
const EMULATED_CHUNKS: u32 = 8;

/// Greedy text, logits and perplexity of a language model.
pub fn language_model(dir: &Path, exe: &Exe) {
    answers(dir, exe);
    let (found, expected) = (perplexity(dir, exe, None), reference_json(dir)["perplexity"].clone());
    assert_eq!(found["tokens"], expected["predicted_tokens"]);
    same_perplexity(dir, &found, &expected);
}

/// The same on an emulated CPU: perplexity of some of the text, beside that of an executable for this machine.
pub fn language_model_emulated(dir: &Path, exe: &Exe, host: &Exe) {
    answers(dir, exe);
    let chunks = std::env::var_os("RCOMPILE_TEST_ALL").is_none().then_some(EMULATED_CHUNKS);
    let [found, expected] = [exe, host].map(|exe| perplexity(dir, exe, chunks));
    assert_eq!(found["tokens"], expected["tokens"]);
    same_perplexity(dir, &found, &expected);
}

/// Greedy text and logits.
fn answers(dir: &Path, exe: &Exe) {
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
}

/// What `perplexity` says of the reference's text, of its first `chunks` windows or of all that the reference has.
fn perplexity(dir: &Path, exe: &Exe, chunks: Option<u32>) -> Value {
    let reference = reference_json(dir);
    let expected = &reference["perplexity"];
    let name = expected["text"].as_str().unwrap();
    let text = if dir.join(name).is_file() { dir.join(name) } else { assets("texts").expect("texts").join(name) };
    let (window, windows) = (expected["window"].to_string(), expected["windows"].to_string());
    let chunks = chunks.map_or(windows, |n| n.to_string());
    exe.json(["perplexity", "-f", text.to_str().unwrap(), "-c", &window, "--chunks", &chunks])
}

fn same_perplexity(dir: &Path, found: &Value, expected: &Value) {
    let (found, expected) = (found["ppl"].as_f64().unwrap(), expected["ppl"].as_f64().unwrap());
    println!("{}: perplexity {found}, expected {expected}", dir.display());
    assert!((found / expected - 1.0).abs() <= tol::PERPLEXITY_REL, "perplexity {found}, expected {expected}");
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Embeddings of sentences, alone and in company, against a recorded reference.
pub fn sentence_embeddings(dir: &Path, exe: &Exe) {
    let reference = reference_json(dir);
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
