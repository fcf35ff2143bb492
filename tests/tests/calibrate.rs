//! `--calibrate`: what it gains on text that it has not seen, executables against the interpreter of the same codes, bytes, refusals.

use rcompile::calibrate::CalibrationText;
use rcompile::compare::{Comparison, compare};
use rcompile::options::{Command as Verb, Parsed, parse};
use rcompile::passes::quantise::Quantisation;
use rcompile_graph::{DType, Group};
use rcompile_models::dir::InputFile;
use rcompile_tests::reference::kept;
use rcompile_tests::{Exe, Reference, assets, build, difference, golden, ids, model_dir, rcompile, tol, wide};
use safetensors::SafeTensors;
use safetensors::tensor::serialize_to_file;
use serde_json::Value;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const FULL: &str = "--buckets 1,64 --compute f32 --dtype f32 --kv-dtype f32";

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo")
}

fn stories() -> Option<PathBuf> {
    assets("models/stories260k-llama")
}

/// Two texts of a story-teller's, `bytes` long each, that have no story in common.
fn tinystories(bytes: usize) -> (PathBuf, PathBuf) {
    let dir = model_dir(&format!("tinystories-{bytes}"), |dir| {
        let all = std::fs::read_to_string(assets("texts").expect("texts").join("tinystories-a.txt")).expect("text");
        for (name, begin) in [("calibrate", 0), ("held-out", 150_000)] {
            let (begin, end) = (all.floor_char_boundary(begin), all.floor_char_boundary(begin + bytes));
            std::fs::write(dir.join(name), &all[begin..end]).expect("text");
        }
    });
    (dir.join("calibrate"), dir.join("held-out"))
}

fn temp() -> TempDir {
    tempfile::tempdir().expect("temporary directory")
}

/// Mean divergence of `b` from `a` on a text, of an encoder what the cosines of vectors of its lines lack to 1.
fn divergence(a: &Exe, b: &Exe, text: &Path) -> f64 {
    let mut args: Vec<OsString> = ["rcompile", "compare", "--quiet"].map(Into::into).to_vec();
    args.extend([a.path().into(), b.path().into(), "-f".into(), text.into()]);
    let Ok(Parsed::Run(Verb::Compare(options))) = parse(args) else { panic!("not a comparison") };
    match compare(&options).unwrap_or_else(|e| panic!("{e}")) {
        Comparison::NextTokens(found) => found.kld_mean,
        Comparison::Embeddings(found) => 1.0 - found.cosine_mean,
    }
}

/// Divergence on held-out text: rounded to nearest, and calibrated, in the columns' order and in that of their inputs.
fn gain(model: &Path, text: &Path, held_out: &Path, options: &str) -> (f64, [f64; 2]) {
    let full = build(model, FULL);
    let nearest = build(model, &format!("--buckets 1,64 --kv-dtype f32 {options}"));
    let calibrated = |order: &str| build(model, &format!("--buckets 1,64 --kv-dtype f32 {options} --calibrate {}{order}", text.display()));
    let [nearest, calibrated, ordered] = [nearest, calibrated(""), calibrated(" --act-order")].map(|exe| divergence(&full, &exe, held_out));
    println!("{} {options}: nearest {nearest:.6}, calibrated {calibrated:.6}, act-order {ordered:.6}", model.display());
    assert_ne!(calibrated, ordered);
    (nearest, [calibrated, ordered])
}

fn int4() -> Quantisation {
    Quantisation { body: Some(DType::Q4(Group::G32)), head: Some(DType::Q8(Group::Row)), ..Quantisation::default() }
}

/// Every family is cut into its stages, and on the tokens that it was calibrated on it is nearer to what it was.
#[test]
fn families() {
    for name in ["gpt2-gelu", "granite", "llama-gqa-tied", "phi3-partial", "qwen2-window", "qwen3-gqa"] {
        let dir = golden(name);
        let exact = Reference::open(&dir, DType::F32);
        let vocab = exact.model().facts().vocab_size as u64;
        let mut state = 7u64;
        let mut token = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % vocab) as u32
        };
        let chunks: Vec<Vec<u32>> = (0..8).map(|_| (0..48).map(|_| token()).collect()).collect();
        let input = InputFile { name: "tokens".into(), bytes: 0, sha256: String::new() };
        let text = CalibrationText { chunks, input };
        let logits =
            |reference: &Reference| -> Vec<Vec<f64>> { text.chunks.iter().flat_map(|chunk| reference.runner().feed(chunk)).collect() };
        let wanted = logits(&exact);
        let nearest = Reference::quantised(&dir, DType::F32, DType::F32, &int4());
        let calibrated = Reference::calibrated(&dir, DType::F32, DType::F32, &int4(), &text);
        let [nearest, calibrated] = [nearest, calibrated]
            .map(|reference| logits(&reference).iter().zip(&wanted).map(|(f, w)| difference(f, w).kld).sum::<f64>() / wanted.len() as f64);
        println!("{name}: nearest {nearest:.6}, calibrated {calibrated:.6}");
        assert!(calibrated < nearest, "{name}: {calibrated} and {nearest}");
    }
}

/// The gate: a fifth lower at int4 on the bundled model, on stories that it was not calibrated on.
#[test]
fn demo_model() {
    let (model, text, held_out) = (demo().join("model"), demo().join("calibrate.txt"), demo().join("held_out.txt"));
    let (nearest, calibrated) = gain(&model, &text, &held_out, "--quantize int4");
    // 0.58 of it.
    assert!(calibrated.iter().all(|c| *c < 0.65 * nearest), "{calibrated:?} and {nearest}");
}

#[test]
fn real_models() {
    let Some(llama) = stories() else { return };
    let (text, held_out) = tinystories(60_000);
    // 0.69 to 0.72, and 0.62 to 0.68 of it.
    for (options, share) in
        [("--quantize int4", 0.8), ("--quantize int4 --group-size 64 --compute f32", 0.8), ("--quantize int8 --compute f32", 0.75)]
    {
        let (nearest, calibrated) = gain(&llama, &text, &held_out, options);
        assert!(calibrated.iter().all(|c| *c < share * nearest), "{options}: {calibrated:?} and {nearest}");
    }
}

/// Heads are calibrated too: one that is the embedding's table, and one of its own, which has only its inputs to suit. What is asked for is
/// out of reach for heads rounded to nearest behind calibrated layers (0.0934 in order and 0.0885 in act-order, 0.0903 and 0.0853 of one of
/// its own; all rounded to nearest: 0.1215 and 0.1184).
#[test]
fn heads() {
    let Some(tied) = stories() else { return };
    let untied = model_dir("stories-untied", |dir| {
        for file in std::fs::read_dir(&tied).expect("model").flatten().filter(|f| f.path().is_file()) {
            std::fs::write(dir.join(file.file_name()), std::fs::read(file.path()).expect("file")).expect("copy");
        }
        let file = std::fs::read(tied.join("model.safetensors")).expect("weights");
        let tensors = SafeTensors::deserialize(&file).expect("safetensors");
        let table = tensors.tensor("model.embed_tokens.weight").expect("table");
        let all = tensors.tensors().into_iter().chain([("lm_head.weight".into(), table)]);
        serialize_to_file(all, None, &dir.join("model.safetensors")).expect("weights");
        let config = std::fs::read_to_string(tied.join("config.json")).expect("config");
        let mut config: Value = serde_json::from_str(&config).expect("JSON");
        assert_eq!(config["tie_word_embeddings"].take(), true);
        config["tie_word_embeddings"] = false.into();
        std::fs::write(dir.join("config.json"), config.to_string()).expect("config");
    });
    let (text, held_out) = tinystories(60_000);
    for (model, most) in [(&tied, [0.0911, 0.0862]), (&untied, [0.0864, 0.0828])] {
        let (nearest, calibrated) = gain(model, &text, &held_out, "--quantize int4 --quantize-head int4 --compute f32");
        let reached = calibrated.iter().zip(most).all(|(c, most)| *c < most && *c < 0.75 * nearest);
        assert!(reached, "{}: {calibrated:?} and {nearest}", model.display());
    }
}

/// Weights that the checkpoint holds transposed, biases, learned positions.
#[test]
fn gpt2() {
    let Some(model) = assets("models/slm4096-gpt2") else { return };
    let text = model_dir("slm4096-text", |dir| {
        let corpus = std::fs::read_to_string(model.join("corpus.txt")).expect("corpus");
        std::fs::write(dir.join("text"), corpus.repeat(1 + 20_000 / corpus.len())).expect("text");
    });
    let text = text.join("text");
    let (nearest, calibrated) = gain(&model, &text, &text, "--quantize int4 --compute f32");
    assert!(calibrated.iter().all(|c| *c < nearest), "{calibrated:?} and {nearest}");
}

/// A text between the tokens that the tokenizer puts around it, of which each sees all.
#[test]
fn sentence_encoder() {
    let Some(model) = assets("models/all-MiniLM-L6-v2-fp16") else { return };
    let dir = model_dir("wikitext", |dir| {
        let all = std::fs::read_to_string(assets("texts").expect("texts").join("wikitext2-valid-a.txt")).expect("text");
        let (text, rest) = all.split_at(all.floor_char_boundary(40_000));
        let lines: Vec<&str> =
            rest.split(" . ").map(str::trim).filter(|s| (60..150).contains(&s.len()) && !s.contains('\n')).take(100).collect();
        std::fs::write(dir.join("calibrate"), text).expect("text");
        std::fs::write(dir.join("held-out"), lines.join("\n")).expect("text");
    });
    let read = CalibrationText::read(&dir.join("calibrate"), Reference::open(&model, DType::F32).model()).unwrap_or_else(|e| panic!("{e}"));
    // As long as sentence_bert_config.json lets a text be, from [CLS] to [SEP].
    assert!(read.chunks.len() > 10 && read.chunks.iter().all(|c| (c.len(), c[0], c[255]) == (256, 101, 102)), "{:?}", read.chunks[0]);
    let (nearest, calibrated) = gain(&model, &dir.join("calibrate"), &dir.join("held-out"), "--quantize int4 --compute f32");
    assert!(calibrated.iter().all(|c| *c < 0.8 * nearest), "{calibrated:?} and {nearest}");
}

/// The executable computes with the codes that calibration made, kept tensors with their floats: the interpreter, fed with the same, says
/// the same.
#[test]
fn executables_hold_the_codes() {
    let Some(model) = stories() else { return };
    let (text, _) = tinystories(4_000);
    let exact = Reference::open(&model, DType::F32);
    let read = CalibrationText::read(&text, exact.model()).unwrap_or_else(|e| panic!("{e}"));
    let calibrated = |quantisation: &Quantisation, more: &str| {
        let options = format!("--kv-dtype f32 --buckets 1,8,64 --quantize int4 --compute f32 --calibrate {}{more}", text.display());
        let exe = build(&model, &options);
        let tokens = ids(&exe.json(["tokenize", "-p", "Once upon a time there was a dog named Max."])["tokens"]);
        let found = wide(&exe.logits(&tokens, &[]));
        let same = Reference::calibrated(&model, DType::F32, DType::F32, quantisation, &read).runner().logits(&tokens);
        let d = difference(&found, &same);
        assert!(tol::F32.holds(&d), "{more}: {d}");
        // Codes of another choice are far away.
        let nearest = Reference::quantised(&model, DType::F32, DType::F32, quantisation).runner().logits(&tokens);
        let d = difference(&found, &nearest);
        assert!(!tol::F32.holds(&d), "{more}: {d}");
        exe
    };
    let kept = kept(&model, &["*.embed_tokens.weight", "*.down_proj.*"].map(|pattern| (pattern, Some(DType::BF16))));
    calibrated(&Quantisation { kept, ..int4() }, " --keep *.embed_tokens.weight=bf16 --keep *.down_proj.*=bf16");

    let info = calibrated(&int4(), "").json(["info"]);
    assert_eq!(info["quantization"], "int4 by 32, head int8, calibrated", "{info}");
    let input = info["inputs"].as_array().expect("inputs").iter().find(|i| i["name"] == "--calibrate").expect("the text");
    assert_eq!(input["bytes"], std::fs::metadata(&text).expect("text").len());
    let notes = info["notes"].as_array().expect("notes");
    assert!(notes.iter().filter_map(Value::as_str).any(|n| n.starts_with("calibrated with ")), "{info}");
}

/// The bytes of a small executable of these codes.
fn bytes(model: &Path, text: &Path, out: &Path, options: &str) -> Vec<u8> {
    let mut args: Vec<OsString> = vec!["--model".into(), model.into(), "-o".into(), out.into()];
    args.extend(["--buckets", "8", "--quantize", "int4", "--calibrate"].map(Into::into));
    args.push(text.into());
    args.extend(options.split_whitespace().map(Into::into));
    rcompile(args).unwrap_or_else(|e| panic!("{options}: {e}"));
    std::fs::read(out).expect("executable")
}

/// Neither threads nor the cache change a byte; another text does.
#[test]
fn the_same_bytes_again() {
    let Some(model) = stories() else { return };
    let dir = temp();
    let (text, other) = tinystories(3_000);
    let cache = dir.path().join("cache");
    let made = |name: &str, text: &Path, options: &str| bytes(&model, text, &dir.path().join(name), options);
    let kept = format!("--cache-weights --cache-dir {}", cache.display());
    let first = made("a", &text, "--jobs 1 --no-cache");
    assert!(made("b", &text, "--jobs 3 --no-cache") == first);
    assert!(made("c", &text, &kept) == first);
    assert!(made("d", &text, &kept) == first);
    let changed = made("e", &other, &kept);
    assert!(changed != first && made("f", &other, "--no-cache") == changed);
}

/// Codes depend on more of a model than its weights: the cache does not take packed weights of other codes.
#[test]
fn packed_weights_are_those_of_the_codes() {
    let Some(model) = stories() else { return };
    let dir = temp();
    let (text, _) = tinystories(3_000);
    let changed = dir.path().join("stories");
    std::fs::create_dir(&changed).expect("directory");
    for file in std::fs::read_dir(&model).expect("model").flatten().filter(|f| f.path().is_file()) {
        std::fs::copy(file.path(), changed.join(file.file_name())).expect("copy");
    }
    let config = changed.join("config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&config).expect("config")).expect("JSON");
    let made = |name: &str, options: &str| bytes(&changed, &text, &dir.path().join(name), options);
    let kept = format!("--cache-weights --cache-dir {}", dir.path().join("cache").display());
    let first = made("a", &kept);
    std::fs::remove_file(&config).expect("config");
    json["rms_norm_eps"] = 0.5.into();
    std::fs::write(&config, json.to_string()).expect("config");
    let found = made("b", &kept);
    assert!(found == made("c", "--no-cache"), "not the bytes of a build without a cache");
    assert!(found != first);
}

#[test]
fn refusals() {
    let Some(model) = stories() else { return };
    let dir = temp();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).expect("text");
        path
    };
    let short = file("short", b"Once upon a time there was a dog.");
    let cases = [
        (file("empty", b""), 4, "is empty"),
        (file("blank", b" \n\t\n"), 4, "is empty"),
        (short.clone(), 4, "is too short, expected at least 511 tokens, one chunk, found "),
        (file("latin1", b"Once upon a time in caf\xe9s"), 4, "is not UTF-8, expected a text, found other bytes at 23"),
        (dir.path().join("none"), 3, "cannot be read"),
        (dir.path().to_path_buf(), 3, "is not a regular file"),
    ];
    let out = dir.path().join("out");
    let refused = |model: &Path, text: &Path, options: &[&str]| {
        let mut args: Vec<OsString> =
            vec!["--model".into(), model.into(), "-o".into(), out.clone().into(), "--calibrate".into(), text.into()];
        args.extend(options.iter().map(Into::into));
        let e = rcompile(args).expect_err("an error");
        assert!(!out.exists());
        e
    };
    for (path, code, words) in cases {
        let e = refused(&model, &path, &["--quantize", "int4"]);
        let lines = e.lines();
        assert_eq!(e.exit_code(), code, "{e}");
        assert!(lines[0].starts_with(&format!("error[E{code}-input]: ")), "{lines:?}");
        assert!(lines[0].contains(words) && lines.len() == 2 && lines[1].starts_with("help: "), "{lines:?}");
    }
    let e = refused(&model, &short, &[]);
    assert_eq!(e.exit_code(), 2);
    assert!(e.lines().join("\n").contains("help: --quantize int4 --calibrate FILE"), "{e}");
}
