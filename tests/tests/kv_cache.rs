//! KV caches of int8 and bf16 (`--kv-dtype`): executables against the interpreter with the same cache, bits, bytes, and what the rounding
//! of int8 costs.

use rcompile::passes::quantise::Quantisation;
use rcompile_graph::{DType, Group};
use rcompile_tests::checks::{bits, cases, check, embed};
use rcompile_tests::tol::Gate;
use rcompile_tests::{Exe, Machine, Reference, assets, build, difference, golden, tol, wide};
use std::path::Path;

const CACHE: DType = DType::Q8(Group::Row);

fn reference(dir: &Path, compute: DType) -> Reference {
    Reference::quantised(dir, compute, CACHE, &Quantisation::default())
}

fn agrees(dir: &Path, options: &str, compute: DType) {
    agrees_with(dir, ("int8", CACHE, tol::INT8), options, compute);
}

/// The longest prompt with this cache: logits within the gate of the interpreter's, the same bits with one row per step, one thread and two.
fn agrees_with(dir: &Path, (name, cache, gate): (&str, DType, Gate), options: &str, compute: DType) {
    let options = format!("--no-tokenizer --kv-dtype {name} {options}");
    let exe = build(dir, &format!("{options} --buckets 1,64"));
    let case = cases(dir).pop().unwrap();
    let what = format!("{} {options}", dir.display());
    let found = exe.logits(&case.tokens, &["-t", "1"]);
    let reference = Reference::quantised(dir, compute, cache, &Quantisation::default());
    // What is built for another CPU has another attention.
    let mut runner = if options.contains("--cpu") { reference.runner() } else { reference.runner_on(&Machine::host()) };
    let d = check(&what, gate, &wide(&found), &runner.logits(&case.tokens));
    println!("{what}: {d}; to f32 {}", difference(&wide(&found), &case.logits));
    assert_eq!(bits(&exe.logits(&case.tokens, &["-t", "2"])), bits(&found), "{what}: two threads");
    let one = build(dir, &format!("{options} --buckets 1"));
    assert_eq!(bits(&one.logits(&case.tokens, &[])), bits(&found), "{what}: bucket 1");
}

macro_rules! golden {
    ($($name:ident: $dir:literal,)*) => { $(
        #[test]
        fn $name() {
            agrees(&golden($dir), "--compute f32", DType::F32);
        } )*
    }
}

golden! {
    gpt2_gelu: "gpt2-gelu",
    granite: "granite",
    llama_gqa_tied: "llama-gqa-tied",
    mistral_window: "mistral-window",
    phi3_partial: "phi3-partial",
    qwen2: "qwen2",
    qwen3_gqa: "qwen3-gqa",
}

#[test]
fn avx2_and_bf16() {
    agrees(&golden("llama-gqa-tied"), "--cpu x86-64-v3 --compute f32", DType::F32);
    agrees(&golden("llama-gqa-tied"), "--compute bf16", DType::BF16);
}

/// A cache of bf16 beside matmuls of f32, which by themselves have one of f32: where the CPU has dots of bf16, attention rounds queries and
/// weights, too; with AVX2 it computes in f32.
#[test]
fn bf16_beside_f32() {
    const CACHE: (&str, DType, Gate) = ("bf16", DType::BF16, tol::BF16);
    for name in ["gpt2-gelu", "llama-gqa-tied", "mistral-window", "qwen3-gqa"] {
        agrees_with(&golden(name), CACHE, "--compute f32", DType::F32);
    }
    agrees_with(&golden("llama-gqa-tied"), CACHE, "--cpu x86-64-v3 --compute f32", DType::F32);

    let dir = golden("llama-gqa-tied");
    let exe = build(&dir, "--no-tokenizer --kv-dtype bf16 --compute f32 --buckets 1,64");
    let default = build(&dir, "--no-tokenizer --compute f32 --buckets 1");
    let bytes = |exe: &Exe| exe.json(["info"])["state"]["bytes_per_token"].as_u64().unwrap();
    assert_eq!(2 * bytes(&exe), bytes(&default));
    // Rounded it is.
    let case = cases(&dir).pop().unwrap();
    let d = difference(&wide(&exe.logits(&case.tokens, &[])), &Reference::open(&dir, DType::F32).runner().logits(&case.tokens));
    assert!(!tol::F32.holds(&d), "{d}");
}

#[test]
fn encoders() {
    let dir = golden("bert");
    let exe = build(&dir, "--no-tokenizer --kv-dtype int8 --buckets 64");
    let tokens: Vec<u32> = (5..45).collect();
    let expected = reference(&dir, DType::F32).runner().pooled(&tokens, &vec![0; tokens.len()]);
    for (pooling, place) in [("mean", 0), ("cls", 1)] {
        check(pooling, tol::INT8, &embed(&exe, &tokens, pooling, false), &expected[place]);
    }
}

/// A cache of another type is far outside of the gate between the executable and its own arithmetic.
#[test]
fn the_cache_is_rounded() {
    let dir = golden("llama-gqa-tied");
    let case = cases(&dir).pop().unwrap();
    let exe = build(&dir, "--no-tokenizer --kv-dtype int8 --compute f32 --buckets 1,64");
    let found = wide(&exe.logits(&case.tokens, &[]));
    let d = difference(&found, &Reference::open(&dir, DType::F32).runner().logits(&case.tokens));
    assert!(!tol::F32.holds(&d), "{d}");
}

#[test]
fn bytes_are_those_of_codes_and_scales() {
    let dir = golden("llama-gqa-tied");
    let info = build(&dir, "--no-tokenizer --kv-dtype int8 --buckets 1").json(["info"]);
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let number = |name: &str| config[name].as_u64().unwrap();
    let head_dim = config["head_dim"].as_u64().unwrap_or_else(|| number("hidden_size") / number("num_attention_heads"));
    let bytes = number("num_hidden_layers") * 2 * number("num_key_value_heads") * (head_dim + 4);
    assert_eq!((info["kv_dtype"].as_str(), info["state"]["bytes_per_token"].as_u64()), (Some("int8"), Some(bytes)), "{info}");
}

/// Divergence from f32 of a trained model: that of the interpreter within 3 %, and small.
#[test]
fn cost_of_rounding_on_a_trained_model() {
    let Some(dir) = assets("models/stories260k-llama") else { return };
    let text = "Once upon a time there was a little dog named Max. Max liked to run in the park with his friend Lily. One day";
    let exe = build(&dir, "--kv-dtype int8 --compute f32 --buckets 1,64");
    let tokens = rcompile_tests::ids(&exe.json(["tokenize", "-p", text])["tokens"]);
    assert!(tokens.len() > 30);
    let wanted = Reference::open(&dir, DType::F32).runner().feed(&tokens);
    let mean = |found: &[Vec<f64>]| found.iter().zip(&wanted).map(|(f, w)| difference(f, w).kld).sum::<f64>() / wanted.len() as f64;
    let found: Vec<Vec<f64>> = (1..=tokens.len()).map(|n| wide(&exe.logits(&tokens[..n], &[]))).collect();
    let (found, expected) = (mean(&found), mean(&reference(&dir, DType::F32).runner().feed(&tokens)));
    println!("divergence {found:.6}, interpreter {expected:.6}");
    assert!((found - expected).abs() <= 0.03 * expected, "{found} and {expected}");
    assert!(found <= 0.003, "{found}");
}
