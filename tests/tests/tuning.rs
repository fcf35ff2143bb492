//! `--autotune fast` and `--tuning FILE`: tiles are speed and nothing else, and a file says everything that a build needs to know.

use rcompile_codegen::isa::{HOST_TRIPLE, Isa};
use rcompile_tests::{Exe, golden, rcompile, read_json};
use serde_json::{Value, json};
use std::path::Path;

/// Rows 1 to 20 go through all three buckets.
const TOKENS: [u32; 20] = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19];

fn build(out: &Path, more: &[&str]) -> Result<rcompile::report::Report, rcompile::Error> {
    let model = golden("llama-gqa-tied");
    let options = ["--no-tokenizer", "--buckets", "1,8,64", "--cpu", "x86-64-v3", "--model"];
    let mut args: Vec<String> = options.iter().chain(more).map(|s| s.to_string()).collect();
    let at = options.len();
    args.insert(at, model.display().to_string());
    args.extend(["-o".into(), out.display().to_string()]);
    rcompile(args)
}

fn logits(exe: &Path) -> Vec<Vec<u32>> {
    let exe = Exe::at(exe.to_path_buf());
    let bits = |n: usize| exe.logits(&TOKENS[..n], &[]).iter().map(|x| x.to_bits()).collect();
    [1, 7, 20].into_iter().map(bits).collect()
}

/// The regions' tiles, as `--stop-after plan` prints them.
fn planned(more: &[&str]) -> Vec<String> {
    let report = build(Path::new("never"), &[more, &["--stop-after", "plan"]].concat()).unwrap();
    let lines: Vec<&str> = report.text.lines().map(str::trim).collect();
    lines.windows(2).filter(|l| l[0].starts_with("tile {")).map(|l| l.concat()).collect()
}

#[test]
fn measured_tiles_and_any_others_give_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let file = path("tuning.json");
    let tuning = ["--tuning", file.to_str().unwrap()];

    build(&path("plain"), &[]).unwrap();
    let expected = logits(&path("plain"));
    let report = build(&path("tuned"), &[&["--autotune", "fast"], &tuning[..]].concat()).unwrap();
    let measured = report.autotune.expect("a report");
    assert!(measured.rounds >= 3 && measured.variants >= 3, "{measured:?}");
    assert_eq!(measured.buckets.iter().map(|b| b.rows).collect::<Vec<_>>(), [1, 8, 64]);
    assert_eq!(measured.tuning, read_json(&file));
    assert_eq!(logits(&path("tuned")), expected);
    // The file stands for the measurement.
    build(&path("again"), &tuning).unwrap();
    assert!(std::fs::read(path("again")).unwrap() == std::fs::read(path("tuned")).unwrap());
    let info = Exe::at(path("again")).json(["info"]);
    assert!(info["inputs"].as_array().unwrap().iter().any(|i| i["name"] == "--tuning"), "{info}");
    // Nothing of the trials is left.
    let mut names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["again", "plain", "tuned", "tuning.json"]);

    // Values of each field far from those that were written.
    let written = planned(&tuning);
    let fields = |at: &str| {
        let fields = measured.tuning.pointer(&format!("/matmuls/0{at}")).and_then(Value::as_object).unwrap();
        fields.keys().filter(|field| !matches!(&field[..], "fetch" | "ahead")).map(|field| format!("{at}/{field}")).collect::<Vec<_>>()
    };
    let fields = [fields("/tile"), fields("/tile/fetch"), fields("/tile/fetch/ahead")].concat();
    let blocks = [(5, 5), (5, 3), (2, 1), (1, 1)].map(|(mr, block_mr)| (format!("blocks of {mr} and {block_mr}"), Some((mr, block_mr))));
    let fields = fields.into_iter().filter(|field| !field.ends_with("mr")).map(|field| (field, None));
    for (field, rows_of_blocks) in fields.chain(blocks) {
        let mut changed = read_json(&file);
        for matmul in changed["matmuls"].as_array_mut().unwrap() {
            let rows = matmul["rows"].as_u64().unwrap();
            if let Some((mr, block_mr)) = rows_of_blocks {
                matmul["tile"]["mr"] = rows.min(mr).into();
                matmul["tile"]["block_mr"] = rows.min(block_mr).into();
                continue;
            }
            let old = matmul.pointer(&field).unwrap().clone();
            let new = match (&old, field.rsplit('/').next().unwrap()) {
                (Value::Bool(b), _) => (!b).into(),
                (_, "m_block") => (2 * matmul["tile"]["mr"].as_u64().unwrap() + 1).into(),
                (_, "l2" | "l1") => (if old == 0 { 256 } else { 0 }).into(),
                (Value::Null, "busy") => json!({ "rows": 1, "l1": 256 }),
                (Value::Null, "near") => json!({ "streams": 1, "ahead": { "l2": 256, "l1": 64 } }),
                (_, "busy" | "near") => Value::Null,
                (_, "k_block") => (if old == 0 { 32 } else { 0 }).into(),
                _ => (if old == 1 { 2 } else { 1 }).into(),
            };
            *matmul.pointer_mut(&field).unwrap() = new;
        }
        std::fs::write(&file, changed.to_string()).unwrap();
        assert_ne!(planned(&tuning), written, "{field}: the file is not obeyed");
        build(&path("other"), &tuning).unwrap();
        assert_eq!(logits(&path("other")), expected, "{field}");
        std::fs::write(&file, measured.tuning.to_string()).unwrap();
    }
}

#[test]
fn tiles_of_codes_are_measured_and_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let file = path("tuning.json");
    // Layers in int4, the head in int8.
    let quantised = ["--quantize", "int4", "--group-size", "32", "--tuning", file.to_str().unwrap()];

    let report = build(&path("tuned"), &[&["--autotune", "fast"], &quantised[..]].concat()).unwrap();
    let measured = report.autotune.expect("a report").tuning;
    let mut weights: Vec<&str> = measured["matmuls"].as_array().unwrap().iter().map(|m| m["weights"].as_str().unwrap()).collect();
    weights.sort();
    weights.dedup();
    assert_eq!(weights, ["int4g32", "int8"]);
    build(&path("again"), &quantised).unwrap();
    assert!(std::fs::read(path("again")).unwrap() == std::fs::read(path("tuned")).unwrap());

    // An entry is obeyed by its own codes only.
    let expected = logits(&path("tuned"));
    let before = planned(&quantised).len();
    for codes in weights {
        let mut changed = measured.clone();
        let entries = changed["matmuls"].as_array_mut().unwrap();
        entries.iter_mut().filter(|m| m["weights"] == codes).for_each(|m| m["tile"]["fetch"]["ahead"]["l2"] = 320.into());
        std::fs::write(&file, changed.to_string()).unwrap();
        let tiles = planned(&quantised);
        let moved = tiles.iter().filter(|tile| tile.contains("ahead l2 320 ")).count();
        assert!(0 < moved && moved < tiles.len() && tiles.len() == before, "{codes}: {moved} of {tiles:?}");
        build(&path("other"), &quantised).unwrap();
        assert_eq!(logits(&path("other")), expected, "{codes}");
    }

    // Entries for other codes are of no use, and that is said.
    std::fs::write(&file, measured.to_string()).unwrap();
    let warnings = |more: &[&str]| build(Path::new("never"), &[&quantised[..], &["--stop-after", "plan"], more].concat()).unwrap().warnings;
    assert!(warnings(&[]).is_empty(), "{:?}", warnings(&[]));
    let [warning] = &warnings(&["--quantize-head", "int4"])[..] else { panic!("one warning") };
    assert!(warning.contains("W-tuning") && warning.contains("weights int8, compute"), "{warning}");
}

#[test]
fn a_wrong_file_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let (file, out) = (dir.path().join("tuning.json"), dir.path().join("out"));
    let refused = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let e = build(&out, &["--tuning", file.to_str().unwrap()]).unwrap_err();
        assert!(!out.exists() && e.lines()[0].contains("tuning.json"), "{e}");
        e.exit_code()
    };
    let features = Isa::lookup(HOST_TRIPLE, "x86-64-v3", &[]).unwrap().feature_string();
    let with = |cpu: &str, features: &str| {
        format!(r#"{{"rcompile_tuning":8,"target":"x86_64-unknown-linux-gnu","cpu":"{cpu}","features":"{features}","matmuls":[]}}"#)
    };
    assert_eq!(refused("tiles"), 4);
    assert_eq!(refused(&with("znver5", &features)), 5);
    assert_eq!(refused(&with("x86-64-v3", &format!("{features},+avxvnni"))), 5);
    std::fs::write(&file, with("x86-64-v3", &features)).unwrap();
    build(&out, &["--tuning", file.to_str().unwrap()]).unwrap();
}
