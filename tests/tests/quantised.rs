//! Quantised weights: executables against the interpreter of the same quantised graph, bits, and what the rounding costs.

use half::bf16;
use rcompile::passes::quantise::Quantisation;
use rcompile::passes::{MatmulInputs, PassCx};
use rcompile_codegen::isa::Isa;
use rcompile_graph::{DType, Group};
use rcompile_tests::checks::{bits, cases, check};
use rcompile_tests::reference::{inputs_of, kept};
use rcompile_tests::toy::{Toy, write_model};
use rcompile_tests::{Exe, Machine, Reference, assets, build, difference, golden, has_int8_dot, model_dir, tol, wide};
use safetensors::Dtype;
use serde_json::Value;
use std::path::Path;

const BASE: &str = "--no-tokenizer --kv-dtype f32";

fn int8() -> Quantisation {
    Quantisation { body: Some(DType::Q8(Group::Row)), head: Some(DType::Q8(Group::Row)), ..Quantisation::default() }
}

fn int4(group: Group) -> Quantisation {
    Quantisation { body: Some(DType::Q4(group)), ..int8() }
}

/// The longest prompt: logits within the gate of the interpreter's, the same bits with one row per step, one thread and two.
fn agrees(dir: &Path, options: &str, quantisation: &Quantisation, compute: DType) {
    agrees_on(&Machine::host(), dir, options, quantisation, compute);
}

fn agrees_on(machine: &Machine, dir: &Path, options: &str, quantisation: &Quantisation, compute: DType) {
    let cx = PassCx { inputs: inputs_of(compute), quantisation: quantisation.clone(), ..PassCx::default() };
    agrees_with(machine, dir, options, cx);
}

/// Out: the executable.
fn agrees_with(machine: &Machine, dir: &Path, options: &str, cx: PassCx) -> Exe {
    let gate = if matches!(cx.inputs, MatmulInputs::Int8 { .. }) { tol::INT8 } else { tol::F32 };
    // One model's large bucket gets no few rows, the others' all.
    let buckets = if dir.ends_with("llama-gqa-tied") { "1,8,64" } else { "1,64" };
    let exe = machine.build(dir, &format!("{BASE} {options} --buckets {buckets}"));
    let reference = Reference::of_passes(dir, DType::F32, cx);
    let case = cases(dir).pop().unwrap();
    let what = format!("{} {options}", dir.display());
    let found = exe.logits(&case.tokens, &["-t", "1"]);
    let d = check(&what, gate, &wide(&found), &reference.runner().logits(&case.tokens));
    println!("{what}: {d}; to f32 {}", difference(&wide(&found), &case.logits));
    assert_eq!(bits(&exe.logits(&case.tokens, &["-t", "2"])), bits(&found), "{what}: two threads");
    let one = machine.build(dir, &format!("{BASE} {options} --buckets 1"));
    assert_eq!(bits(&one.logits(&case.tokens, &[])), bits(&found), "{what}: bucket 1");
    exe
}

/// Integer matrix instructions under qemu: `neoverse-v1` with SVE of 256 bits, `neoverse-v2` with SVE of 128.
fn smmla(name: &str) {
    for (cpu, emulated) in [("neoverse-v1", "max,sve256=on"), ("neoverse-v2", "max,sve128=on")] {
        // One model for both, the others for V1 (V2: `./x test --all`).
        if cpu != "neoverse-v1" && name != "llama-gqa-tied" && std::env::var_os("RCOMPILE_TEST_ALL").is_none() {
            continue;
        }
        let Some(machine) = Machine::arm(cpu, emulated) else { return };
        agrees_on(&machine, &golden(name), "--quantize int8", &int8(), DType::I8);
        agrees_on(&machine, &golden(name), "--quantize int4 --group-size 64", &int4(Group::G64), DType::I8);
    }
}

macro_rules! golden {
    ($($name:ident: $dir:literal,)*) => { $(
        mod $name {
            use super::*;
            /// Codes expanded to f32: inner dimensions of golden models are no multiples of a group.
            #[test]
            fn codes_as_f32() {
                agrees(&golden($dir), "--quantize int8 --compute f32", &int8(), DType::F32);
                agrees(&golden($dir), "--quantize int4 --compute f32", &int4(Group::G32), DType::F32);
            }
            #[test]
            fn integer_dots() {
                if !has_int8_dot() {
                    return eprintln!("skipped: no integer dots on this CPU");
                }
                agrees(&golden($dir), "--quantize int8 --compute int8", &int8(), DType::I8);
                agrees(&golden($dir), "--quantize int4 --group-size 64 --compute int8", &int4(Group::G64), DType::I8);
            }
            #[test]
            fn integer_matrices_of_arm() {
                smmla($dir);
            }
        } )*
    }
}

golden! {
    gpt2_gelu: "gpt2-gelu",
    granite: "granite",
    llama_gqa_tied: "llama-gqa-tied",
    llama_llama3_bias: "llama-llama3-bias",
    mistral_window: "mistral-window",
    phi3_partial: "phi3-partial",
    qwen2: "qwen2",
    qwen3_gqa: "qwen3-gqa",
}

#[test]
fn avx2() {
    agrees(&golden("llama-gqa-tied"), "--cpu x86-64-v3 --quantize int4 --compute f32", &int4(Group::G32), DType::F32);
    agrees(&golden("llama-gqa-tied"), "--cpu x86-64-v3 --quantize int4 --group-size 64", &int4(Group::G64), DType::I8);
    agrees(&golden("gpt2-gelu"), "--cpu x86-64-v3 --quantize int8 --compute f32", &int8(), DType::F32);
    agrees(&golden("gpt2-gelu"), "--cpu x86-64-v3 --quantize int8", &int8(), DType::I8);
}

#[test]
fn kept_tensors_and_an_int4_head() {
    let kept = kept(&golden("llama-gqa-tied"), &[("*.down_proj.weight", None), ("*q_proj*", Some(DType::BF16))]);
    let quantisation = Quantisation { kept, head: Some(DType::Q4(Group::G32)), ..int4(Group::G32) };
    let options = "--quantize int4 --quantize-head int4 --keep *.down_proj.weight=auto --keep *q_proj*=bf16 --compute f32";
    agrees(&golden("llama-gqa-tied"), options, &quantisation, DType::F32);
}

/// Matrices that stay bf16 beside codes: rows of bf16 where the CPU multiplies those fastest, of f32 where it does not.
#[test]
fn bf16_beside_codes() {
    let native = Isa::native().expect("supported host");
    let mut machines = vec![];
    if has_int8_dot() {
        machines.push((Machine::host(), "", native.bf16_inputs_fast()));
        machines.push((Machine::host(), "--cpu x86-64-v3 ", false));
    }
    machines.extend(Machine::arm("neoverse-v1", "max,sve256=on").map(|arm| (arm, "", true)));
    for (machine, cpu, bf16_rows) in machines {
        let kept = kept(&golden("llama-gqa-tied"), &[("*.down_proj.weight", None)]);
        let half = Quantisation { kept, ..int8() };
        let head = Quantisation { body: None, ..int8() };
        for (options, quantisation) in [("--quantize int8 --keep *.down_proj.weight=auto", half), ("--quantize-head int8", head)] {
            let cx = PassCx { inputs: MatmulInputs::Int8 { bf16_rows }, quantisation, ..PassCx::default() };
            let exe = agrees_with(&machine, &golden("llama-gqa-tied"), &format!("{cpu}{options}"), cx);
            let info = exe.json(["info"]).to_string();
            assert_eq!(info.contains("\"arithmetic\":\"bf16_dot\""), bf16_rows, "{cpu}{options}: {info}");
        }
    }
}

/// A planted fault of the smallest kind, another group size, is far outside of the gate.
#[test]
fn another_group_size_is_noticed() {
    let dir = golden("llama-gqa-tied");
    let exe = build(&dir, &format!("{BASE} --buckets 1,64 --quantize int4 --group-size 32 --compute f32"));
    let reference = Reference::quantised(&dir, DType::F32, DType::F32, &int4(Group::G64));
    let case = cases(&dir).pop().unwrap();
    let d = difference(&wide(&exe.logits(&case.tokens, &[])), &reference.runner().logits(&case.tokens));
    assert!(!tol::F32.holds(&d) && !tol::INT8.holds(&d), "{d}");
}

/// Divergence from f32 of a trained model: that of the same codes in the interpreter within 3 %, and small for int8.
#[test]
fn cost_of_rounding_on_a_trained_model() {
    let Some(dir) = assets("models/stories260k-llama") else { return };
    let exact = Reference::open(&dir, DType::F32);
    let text = "Once upon a time there was a little dog named Max. Max liked to run in the park with his friend Lily. One day";
    let build = |options: &str| build(&dir, &format!("--kv-dtype f32 --buckets 1,64 {options}"));
    let mut list =
        vec![("--quantize int8 --compute f32", int8(), DType::F32), ("--quantize int4 --compute f32", int4(Group::G32), DType::F32)];
    if has_int8_dot() {
        list.push(("--quantize int8", int8(), DType::I8));
        list.push(("--quantize int4 --group-size 64", int4(Group::G64), DType::I8));
    }
    let tokens: Vec<u32> = rcompile_tests::ids(&tokenize(&build(list[0].0), text));
    assert!(tokens.len() > 30);
    let wanted = exact.runner().feed(&tokens);
    let mean = |found: &[Vec<f64>]| found.iter().zip(&wanted).map(|(f, w)| difference(f, w).kld).sum::<f64>() / wanted.len() as f64;
    for (options, quantisation, compute) in list {
        let exe = build(options);
        let found: Vec<Vec<f64>> = (1..=tokens.len()).map(|n| wide(&exe.logits(&tokens[..n], &[]))).collect();
        let expected = Reference::quantised(&dir, compute, DType::F32, &quantisation).runner().feed(&tokens);
        let (found, expected) = (mean(&found), mean(&expected));
        println!("{options}: divergence {found:.6}, interpreter {expected:.6}");
        assert!((found - expected).abs() <= 0.03 * expected, "{options}: {found} and {expected}");
        assert!(quantisation.body != Some(DType::Q8(Group::Row)) || found <= 0.003, "{options}: {found}");
    }
}

fn tokenize(exe: &Exe, text: &str) -> Value {
    exe.json(["tokenize", "-p", text])["tokens"].clone()
}

#[test]
fn info_says_what_was_quantised() {
    for (model, options, name) in [
        ("llama-gqa-tied", "--quantize int4", "int4 by 32, head int8"),
        ("llama-gqa-tied", "--quantize int4 --keep model.embed_tokens.weight=auto", "int4 by 32, head none"),
        // An encoder has no head.
        ("bert", "--quantize int4", "int4 by 32"),
    ] {
        let exe = build(&golden(model), &format!("--no-tokenizer --buckets 1 --compute f32 {options}"));
        let info = exe.json(["info"]);
        assert_eq!((&info["quantization"], &info["compute"]), (&Value::from(name), &Value::from("f32")), "{info}");
        // Texts side by side by default.
        assert_eq!(info["slots"], if model == "bert" { 16 } else { 1 });
    }
}

/// A tied head that is stored as well: its name speaks of the embedding.
#[test]
fn a_tied_head_is_kept_by_its_name() {
    let toy = Toy { vocab: 72, hidden: 64, heads: 4, kv_heads: 2, intermediate: 96, layers: 1 };
    let dir = model_dir("tied-twice", |dir| {
        let mut tensors = toy.tensors();
        let (_, shape, table) = tensors.iter().find(|t| t.0 == "model.embed_tokens.weight").unwrap().clone();
        tensors.push(("lm_head.weight".into(), shape, table));
        let typed = |(name, shape, values): (String, Vec<usize>, Vec<f32>)| {
            (name, Dtype::F32, shape, values.iter().flat_map(|x| x.to_le_bytes()).collect())
        };
        write_model(dir, &toy.config(), &tensors.into_iter().map(typed).collect::<Vec<_>>());
    });
    for (keep, name) in [("", "int4 by 32, head int8"), ("--keep lm_head.weight=auto", "int4 by 32, head none")] {
        let exe = build(&dir, &format!("{BASE} --buckets 1 --quantize int4 --compute f32 {keep}"));
        assert_eq!(exe.json(["info"])["quantization"], name, "{keep}");
    }
}

/// Matrices of several types that are computed together: their codes are of the values that they have.
#[test]
fn merged_matrices_of_several_types() {
    let toy = Toy { vocab: 72, hidden: 64, heads: 4, kv_heads: 2, intermediate: 96, layers: 1 };
    let dir = model_dir("several-types", |dir| {
        let typed = |(name, shape, values): (String, Vec<usize>, Vec<f32>)| match name.contains("q_proj") || name.contains("up_proj") {
            true => (name, Dtype::F32, shape, values.iter().flat_map(|x| (x * 1.001).to_le_bytes()).collect()),
            false => (name, Dtype::BF16, shape, values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect()),
        };
        write_model(dir, &toy.config(), &toy.tensors().into_iter().map(typed).collect::<Vec<_>>());
    });
    let tokens = [3, 14, 15, 62, 6];
    for options in ["", "--dtype bf16"] {
        let exe = build(&dir, &format!("{BASE} --buckets 8 --quantize int8 --compute f32 {options}"));
        let reference = Reference::quantised(&dir, DType::F32, DType::F32, &int8());
        check(options, tol::F32, &wide(&exe.logits(&tokens, &[])), &reference.runner().logits(&tokens));
    }
}

/// `--dtype` is for matrices that are neither codes nor kept: those are of the checkpoint's values.
#[test]
fn codes_and_kept_tensors_beside_dtype() {
    // The checkpoint is in f16.
    let codes = "--buckets 8 --quantize int8 --keep *.down_proj.weight=auto --keep model.embed_tokens.weight=auto --compute f32";
    let logits = |options: &str| {
        let exe = build(&golden("qwen3-gqa"), &format!("{BASE} {codes} {options}"));
        bits(&exe.logits(&[3, 14, 15, 92, 6], &[]))
    };
    assert_eq!(logits("--dtype bf16"), logits(""));
}
