//! The driver on model directories that are wrong in one way each, and every kind of output that can be asked for.
//!
//! Beside `driver.rs` (whole builds, signals, what is left behind) and `bad_models.rs` (the acceptance list of the front end): here what
//! lies behind the front end, and the command line, with exit code, one line and nothing left.

use assert_cmd::cargo::cargo_bin;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

fn rcompile() -> Command {
    let mut command = Command::new(cargo_bin("rcompile"));
    // Settings of the person who runs the tests.
    std::env::vars().filter(|(k, _)| k.starts_with("RCOMPILE_ARG_")).for_each(|(k, _)| _ = command.env_remove(k));
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/../rcompile-tests"));
    command
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("directory");
    let mut names: Vec<String> = entries.map(|e| e.expect("entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A copy of a golden model (or a change of it) and a place for output, in one temporary directory.
struct Case {
    dir: tempfile::TempDir,
}

impl Case {
    fn new(name: &str) -> Case {
        let dir = tempfile::tempdir().expect("temporary directory");
        std::fs::create_dir(dir.path().join("out")).expect("out");
        std::fs::create_dir(dir.path().join("model")).expect("model");
        for entry in std::fs::read_dir(golden(name)).expect("golden model") {
            let entry = entry.expect("entry");
            if entry.path().is_file() {
                std::fs::copy(entry.path(), dir.path().join("model").join(entry.file_name())).expect("copy");
            }
        }
        Case { dir }
    }
    fn model(&self) -> PathBuf {
        self.dir.path().join("model")
    }
    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }
    fn build(&self, args: &[&str]) -> Output {
        let mut command = rcompile();
        command.args(["build", "--buckets", "1,8", "--cpu", "x86-64-v3", "--model"]).arg(self.model());
        command.arg("-o").arg(self.out().join("exe")).args(args);
        command.output().expect("rcompile runs")
    }
    fn config(&self, change: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.model().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("config")).expect("JSON");
        change(config.as_object_mut().expect("object"));
        std::fs::write(path, config.to_string()).expect("config");
    }
    /// Changes the header of the weights; data stay where they are.
    fn header(&self, change: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.model().join("model.safetensors");
        let bytes = std::fs::read(&path).expect("weights");
        let len = u64::from_le_bytes(bytes[..8].try_into().expect("length")) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + len]).expect("header");
        change(header.as_object_mut().expect("object"));
        let mut text = header.to_string();
        while !text.len().is_multiple_of(8) {
            text.push(' ');
        }
        let data = &bytes[8 + len..];
        let all = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), data].concat();
        std::fs::write(path, all).expect("weights");
    }
}

/// Exit code, exactly one error line that names the words, and nothing in the output directory.
fn refused(case: &Case, output: &Output, code: i32, words: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{words:?}: {stderr}");
    let errors: Vec<&str> = stderr.lines().filter(|l| l.starts_with("error[")).collect();
    assert_eq!(errors.len(), 1, "{words:?}: {stderr}");
    assert!(errors[0].len() <= 500 && !stderr.contains("panicked") && !stderr.contains("RUST_BACKTRACE"), "{stderr}");
    assert!(errors[0].starts_with(&format!("error[E{code}-")), "{stderr}");
    for word in words {
        assert!(errors[0].contains(word), "'{word}' is not in {stderr}");
    }
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(names(&case.out()), [""; 0], "{words:?}");
}

const NO_TOKENIZER: &[&str] = &["--no-tokenizer", "--quiet"];

#[test]
fn missing_input() {
    let case = Case::new("llama-gqa-tied");
    let without = case.build(&["--quiet"]);
    refused(&case, &without, 3, &["tokenizer.json"]);
    assert!(String::from_utf8_lossy(&without.stderr).contains("\nhelp: build with --no-tokenizer "), "{without:?}");
    std::fs::remove_file(case.model().join("model.safetensors")).expect("remove");
    refused(&case, &case.build(NO_TOKENIZER), 3, &["model.safetensors"]);
    std::fs::remove_file(case.model().join("config.json")).expect("remove");
    refused(&case, &case.build(NO_TOKENIZER), 3, &["config.json"]);
    std::fs::remove_dir_all(case.model()).expect("remove");
    refused(&case, &case.build(NO_TOKENIZER), 3, &["model"]);
    std::fs::write(case.model(), "a file").expect("write");
    refused(&case, &case.build(NO_TOKENIZER), 3, &["not a directory"]);
    let output = rcompile().args(["compare", "no-such-a", "no-such-b", "-f", "-"]).output().expect("rcompile runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let output = rcompile().args(["compare", "no-such-a", "no-such-b", "-f"]).arg(case.model()).output().expect("rcompile runs");
    refused(&case, &output, 3, &["no-such-a"]);
}

#[test]
fn malformed_bytes() {
    let case = Case::new("llama-gqa-tied");
    let weights = case.model().join("model.safetensors");
    let whole = std::fs::read(&weights).expect("weights");
    for len in [whole.len() - 1, whole.len() / 2, 100, 7, 0] {
        std::fs::write(&weights, &whole[..len]).expect("cut");
        refused(&case, &case.build(NO_TOKENIZER), 4, &["model.safetensors"]);
    }
    std::fs::write(&weights, [&whole[..], b"tail"].concat()).expect("tail");
    refused(&case, &case.build(NO_TOKENIZER), 4, &["model.safetensors", "expected", "found"]);
    std::fs::write(&weights, &whole).expect("whole");
    let config = case.model().join("config.json");
    let text = std::fs::read(&config).expect("config");
    std::fs::write(&config, &text[..text.len() / 2]).expect("cut");
    refused(&case, &case.build(NO_TOKENIZER), 4, &["config.json"]);
}

/// A NaN is found while packing, after the linker ran: the temporary file must go.
#[test]
fn a_weight_that_is_not_a_number() {
    for (value, what) in [(0x7fc0u16, "NaN"), (0x7f80, "infinity"), (0xff80, "infinity")] {
        let case = Case::new("llama-gqa-tied");
        let (name, element) = ("model.layers.1.mlp.up_proj.weight", 4199);
        let mut begin = 0;
        case.header(|h| begin = h[name]["data_offsets"][0].as_u64().expect("offset") as usize);
        let path = case.model().join("model.safetensors");
        let mut bytes = std::fs::read(&path).expect("weights");
        let header_bytes = u64::from_le_bytes(bytes[..8].try_into().expect("length")) as usize;
        let at = 8 + header_bytes + begin + 2 * element;
        bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
        std::fs::write(&path, bytes).expect("weights");
        let place = format!("{name}[{element}]: ");
        refused(&case, &case.build(NO_TOKENIZER), 4, &["model.safetensors", &place, "is not finite", what]);
        let allowed = case.build(&["--no-tokenizer", "--allow-nonfinite"]);
        let stderr = String::from_utf8_lossy(&allowed.stderr);
        assert_eq!(allowed.status.code(), Some(0), "{stderr}");
        let warnings: Vec<&str> = stderr.lines().filter(|line| line.starts_with("warning[")).collect();
        assert!(warnings.len() == 1 && warnings[0].contains(&place), "{stderr}");
    }
}

#[test]
fn parts_that_disagree() {
    let case = Case::new("llama-gqa-tied");
    let name = "model.layers.1.self_attn.q_proj.weight";
    case.header(|h| {
        let tensor = h.remove(name).expect(name);
        h.insert("model.layers.1.self_attn.z_proj.weight".into(), tensor);
    });
    refused(&case, &case.build(NO_TOKENIZER), 5, &[name]);

    let case = Case::new("llama-gqa-tied");
    let name = "model.layers.0.mlp.gate_proj.weight";
    case.header(|h| {
        h[name]["shape"].as_array_mut().expect("shape").reverse();
    });
    refused(&case, &case.build(NO_TOKENIZER), 5, &[name, "expected", "found"]);

    let case = Case::new("llama-gqa-tied");
    case.config(|c| _ = c.insert("num_key_value_heads".into(), json!(4)));
    refused(&case, &case.build(NO_TOKENIZER), 5, &["num_key_value_heads"]);

    let case = Case::new("llama-gqa-tied");
    let vocab: Map<String, Value> = (0..300).map(|i| (format!("w{i}"), json!(i))).collect();
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}});
    std::fs::write(case.model().join("tokenizer.json"), tokenizer.to_string()).expect("tokenizer");
    refused(&case, &case.build(&["--quiet"]), 5, &["tokenizer.json", "300", "131"]);
}

#[test]
fn not_supported() {
    let case = Case::new("llama-gqa-tied");
    case.config(|c| {
        c.insert("architectures".into(), json!(["FooForCausalLM"]));
        c.insert("model_type".into(), json!("foo"));
    });
    let output = case.build(NO_TOKENIZER);
    refused(&case, &output, 6, &["FooForCausalLM"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("LlamaForCausalLM"), "no list of what is supported");

    let case = Case::new("llama-gqa-tied");
    case.config(|c| _ = c.insert("hidden_act".into(), json!("foo")));
    refused(&case, &case.build(NO_TOKENIZER), 6, &["hidden_act", "foo"]);

    // A model that is fine, asked for what does not exist yet.
    let case = Case::new("llama-gqa-tied");
    for (flags, name) in [
        (&["--link", "dynamic"][..], "--link"),
        (&["--task", "classify"], "--task"),
        (&["--task", "embed"], "--task"),
        (&["--cpu-features", "+sse9"], "sse9"),
    ] {
        refused(&case, &case.build(&[NO_TOKENIZER, flags].concat()), 6, &[name]);
    }
    let without_dots = ["--cpu", "cortex-a72", "--target", "aarch64-unknown-linux-gnu", "--quantize", "int8", "--compute", "int8"];
    for (flags, name) in [(&["--cpu", "pentium"][..], "pentium"), (&without_dots, "--compute int8")] {
        let mut command = rcompile();
        command.arg("build").args(flags).arg("--model").arg(case.model()).arg("-o").arg(case.out().join("exe")).args(NO_TOKENIZER);
        refused(&case, &command.output().expect("rcompile runs"), 6, &[name]);
    }
}

/// Files that a flag names are no model directory, and the flag is named.
#[test]
fn files_that_flags_name() {
    let case = Case::new("llama-gqa-tied");
    let (dir, demo) = (case.model(), Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model"));
    let dir = dir.to_string_lossy();
    for flags in [
        &["--tuning", "/nowhere/tuning.json"][..],
        &["--tuning", &dir],
        &["--quantize", "int8", "--calibrate", "/nowhere/text"],
        &["--quantize", "int8", "--calibrate", &dir],
    ] {
        let mut command = rcompile();
        command.args(["build", "--quiet", "--dry-run", "--model"]).arg(&demo).args(flags);
        let [.., flag, file] = flags else { panic!("{flags:?}") };
        refused(&case, &command.output().expect("rcompile runs"), 3, &["error[E3-input]", flag, file]);
    }
}

/// `--keep` speaks of the checkpoint's names, not of those that the graph gives them.
#[test]
fn keep_by_names_of_the_checkpoint() {
    let case = Case::new("gpt2-gelu");
    case.header(|h| {
        let names: Vec<String> = h.keys().cloned().collect();
        for name in names {
            if let (Some(bare), Some(tensor)) = (name.strip_prefix("transformer."), h.get(&name).cloned()) {
                h.insert(bare.to_string(), tensor);
                h.remove(&name);
            }
        }
    });
    let build =
        |pattern: &str| case.build(&[NO_TOKENIZER, &["--quantize", "int8", "--keep", pattern, "--stop-after", "quantise"]].concat());
    let kept = build("h.?.mlp.c_fc.weight=auto");
    let graph = String::from_utf8(kept.stdout).expect("text");
    assert_eq!(kept.status.code(), Some(0), "{}", String::from_utf8_lossy(&kept.stderr));
    assert!(graph.contains("c_proj.weight.t.q8 ") && !graph.contains("c_fc.weight.t.q8 "), "{graph}");
    refused(&case, &build("transformer.h.0.mlp.c_fc.weight=auto"), 2, &["--keep", "transformer.h.0.mlp.c_fc.weight"]);
}

/// What flags say together is done or said, and not one of them dropped.
#[test]
fn types_that_flags_contradict() {
    let case = Case::new("llama-gqa-tied");
    let dry = |flags: &[&str]| case.build(&[&["--no-tokenizer", "--dry-run"], flags].concat());
    for codes in [&["--quantize", "int4"][..], &["--quantize", "int8"], &["--quantize", "int4", "--quantize-head", "int4"]] {
        for keep in ["*=auto", "model.layers.*=auto"] {
            refused(&case, &dry(&[codes, &["--keep", keep]].concat()), 2, &["--quantize", "layers", "--keep keeps them all"]);
        }
    }
    let kept = ["--quantize", "int8", "--keep", "*=auto", "--stop-after", "fuse-rope"];
    assert_eq!(case.build(&[&["--no-tokenizer"], &kept[..]].concat()).status.code(), Some(0));
    let mut encoder = rcompile();
    encoder.args(["build", "--no-tokenizer", "--dry-run", "--quantize-head", "int8", "--model"]).arg(golden("bert"));
    refused(&case, &encoder.output().expect("rcompile runs"), 2, &["--quantize-head", "a head", "found none"]);
    assert_eq!(dry(&["--quantize-head", "int8"]).status.code(), Some(0));
    assert_eq!(dry(&["--quantize", "int4", "--keep", "model.layers.0.*=auto"]).status.code(), Some(0));
    for (flags, warning) in [
        (&["--dtype", "f16", "--compute", "bf16"][..], "W-dtype"),
        (&["--dtype", "f32", "--compute", "bf16"], "W-dtype"),
        (&["--dtype", "bf16", "--compute", "bf16"], ""),
        (&["--compute", "bf16"], ""),
        (&["--dtype", "f16"], ""),
        (&["--quantize", "int8", "--compute", "bf16", "--keep", "*.down_proj.weight=f32"], "W-dtype"),
        (&["--quantize", "int8", "--compute", "bf16", "--keep", "*.down_proj.weight=auto"], ""),
        (&["--quantize", "int8", "--compute", "bf16", "--keep", "*.down_proj.weight=bf16"], ""),
        (&["--quantize", "int8", "--compute", "f32", "--keep", "*.down_proj.weight=f16"], ""),
        (&["--quantize", "int8", "--compute", "bf16", "--keep", "*norm.weight=f32"], "W-keep"),
        (&["--quantize", "int8", "--keep", "*norm.weight=auto"], ""),
        (&["--quantize", "int8", "--keep", "model.layers.0.*=f32"], ""),
    ] {
        let output = dry(flags);
        let messages = String::from_utf8_lossy(&output.stderr).into_owned();
        let warnings = messages.lines().filter(|line| line.starts_with("warning[")).collect::<Vec<_>>();
        assert_eq!((output.status.code(), warnings.len()), (Some(0), usize::from(!warning.is_empty())), "{flags:?}: {messages}");
        let flag = if warning == "W-keep" { "--keep *norm.weight" } else { "--compute bf16" };
        assert!(warnings.iter().all(|line| line.contains(warning) && line.contains(flag)), "{messages}");
    }
}

#[test]
fn wrong_command_lines() {
    let case = Case::new("llama-gqa-tied");
    for flags in [
        &["--buckets", "0"][..],
        &["--compute", "int8"],
        &["--group-size", "32"],
        &["--keep", "lm_head=f32"],
        &["--buckets", "8-4+1"],
        &["--ctx-size", "0"],
        &["--jobs", "0"],
        &["-O4"],
        &["-Os"],
        &["--dtype", "f64"],
        &["--emit", "exe,foo"],
        &["--passes", "dce"],
        &["--model", "twice"],
        &["stray"],
    ] {
        refused(&case, &case.build(&[NO_TOKENIZER, flags].concat()), 2, &["command line"]);
    }
    let output = rcompile().args(["build", "--model"]).arg(case.model()).output().expect("rcompile runs");
    refused(&case, &output, 2, &["-o OUT"]);
    refused(&case, &case.build(&["-Os"]), 2, &["expected 0, 1, 2 or 3"]);
    // What decides the arithmetic is no pass to leave out, and the way on is named.
    for (flags, help) in [
        (&["--passes", "-quantise"][..], "help: use --quantize none"),
        (&["--passes", "-compute-dtype"], "help: use --compute f32"),
        (&["--no-such-flag"], "help: rcompile build --help"),
        (&["--emit", "graph,graph"], "help: rcompile build --help"),
    ] {
        let output = case.build(&[NO_TOKENIZER, flags].concat());
        let messages = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && messages.lines().any(|line| line == help), "{flags:?}: {messages}");
    }
    let output = rcompile().args(["build", "-o", "x"]).output().expect("rcompile runs");
    refused(&case, &output, 2, &["--model"]);
}

#[test]
fn output_that_cannot_be() {
    let case = Case::new("llama-gqa-tied");
    let build = |out: &Path, more: &[&str]| {
        let mut command = rcompile();
        command.args(["build", "--buckets", "1", "--cpu", "x86-64-v3", "--model"]).arg(case.model()).arg("-o").arg(out).args(NO_TOKENIZER);
        command.args(more).output().expect("rcompile runs")
    };
    refused(&case, &build(&case.out().join("none/exe"), &[]), 8, &["none"]);
    let before = std::fs::read(case.model().join("config.json")).expect("config");
    for more in [&[][..], &["--dry-run"]] {
        refused(&case, &build(&case.out(), more), 8, &["directory"]);
        refused(&case, &build(Path::new("/dev/null"), more), 8, &["/dev/null"]);
        refused(&case, &build(&case.model().join("config.json"), more), 8, &["input"]);
    }
    assert_eq!(std::fs::read(case.model().join("config.json")).expect("config"), before);
}

/// What can be said of outputs without the model is said before it is opened; here there is none.
#[test]
fn outputs_are_checked_first() {
    let case = Case::new("llama-gqa-tied");
    let out = case.out();
    let out = out.to_string_lossy();
    let long = format!("{out}/{}", "n".repeat(256));
    let link = case.dir.path().join("link");
    std::os::unix::fs::symlink(&*out, &link).expect("a link");
    std::os::unix::fs::symlink("/nowhere/dir", case.dir.path().join("astray")).expect("a link");
    for (flags, code, words) in [
        ("-o OUT/x --emit graph=OUT/a,graph=OUT/b", 2, ["--emit", "graph twice"]),
        ("-o OUT/x --emit graph --emit graph=OUT/b", 2, ["--emit", "graph twice"]),
        ("-o OUT/x --emit graph=OUT/same,program=OUT/same", 2, ["one place", "--emit program"]),
        ("-o OUT/x --emit graph=OUT/same,program=OUT/../out/same", 2, ["one place", "--emit program"]),
        ("-o OUT/x --emit exe,asm=OUT/x", 2, ["one place", "-o OUT"]),
        ("-o OUT/x --weights split --emit exe,asm=OUT/x.weights", 2, ["one place", "--weights split"]),
        ("-o OUT/x --emit asm=OUT/same --stop-after codegen --dump-dir OUT/same", 2, ["one place", "--dump-dir"]),
        ("-o OUT/x --dump-dir LINK/x", 2, ["one place", "--dump-dir"]),
        ("-o OUT/x --dump-dir OUT/x/d", 2, ["is a file", "--dump-dir"]),
        ("-o OUT/x --emit exe,obj=OUT/x/y", 2, ["is a file", "--emit obj"]),
        ("-o OUT/x --cache-dir OUT/x", 2, ["one place", "--cache-dir"]),
        ("-o OUT/x --cache-dir OUT/x/c", 2, ["is a file", "--cache-dir"]),
        ("--emit asm=OUT/a --cache-dir OUT/a", 2, ["one place", "--cache-dir"]),
        ("--emit obj=OUT/x/y,graph=OUT/x", 2, ["is a file", "--emit obj"]),
        ("--emit obj=/dev/stdout", 2, ["--emit exe and obj", "stdout"]),
        ("--dry-run --emit asm=/dev/stdout", 2, ["--emit asm", "--dry-run"]),
        ("--dry-run --emit graph=-,llvm-ir=-", 2, ["--emit llvm-ir", "--dry-run"]),
        ("--dry-run --emit graph,asm", 2, ["--emit asm", "--dry-run"]),
        ("-o OUT/x --dump-dir OUT/none/../x", 8, ["none/../x", "through .."]),
        ("-o OUT/x --emit asm=/nope/x", 8, ["/nope/x", "lies in no directory"]),
        ("-o OUT/x --emit obj=/dev/null/x", 8, ["/dev/null/x", "cannot be a directory"]),
        ("-o OUT/x --emit obj=ASTRAY", 8, ["astray", "cannot be a directory"]),
        ("-o OUT/x --dump-dir ASTRAY/d", 8, ["astray/d", "cannot be a directory"]),
        ("-o OUT/x --emit asm=OUT", 8, ["out", "is a directory"]),
        ("-o OUT/x --emit asm=LONG", 8, ["nnnn", "too long"]),
        ("-o OUT/x --emit obj=LONG", 8, ["nnnn", "too long"]),
        ("-o OUT/x --dump-dir LONG", 8, ["nnnn", "too long"]),
        ("-o LONG", 8, ["nnnn", "too long"]),
        ("-o OUT/x/", 8, ["out/x/", "name of a directory"]),
        ("-o -", 2, ["-o", "no text for stdout"]),
        ("-o /dev/stdout", 8, ["/dev/stdout", "no regular file"]),
        ("-o OUT/x --autotune fast --tuning /nope/t", 8, ["/nope/t", "lies in no directory"]),
    ] {
        let flags = flags.replace("OUT/", &format!("{out}/")).replace("=OUT", &format!("={out}")).replace("LONG", &long);
        let flags = flags.replace("LINK", &link.to_string_lossy()).replace("ASTRAY", &link.with_file_name("astray").to_string_lossy());
        let output = rcompile().args("build --model /nowhere --quiet --no-tokenizer".split(' ')).args(flags.split(' ')).output();
        refused(&case, &output.expect("rcompile runs"), code, &words);
    }
    // Whether there is something to replace or not.
    let old = case.dir.path().join("old");
    std::fs::write(&old, "").expect("file");
    let mut command = rcompile();
    command.args(["build", "--quiet", "--model", "/nowhere", "-o"]).arg(&old).arg("--cache-dir").arg(&old);
    refused(&case, &command.output().expect("rcompile runs"), 2, &["one place", "--cache-dir"]);
    // Also when stdout is a file, which an executable would replace.
    let file = std::fs::File::create(case.dir.path().join("stdout")).expect("file");
    let mut command = rcompile();
    let output = command.args(["build", "--quiet", "--model", "/nowhere", "-o", "/dev/stdout"]).stdout(file).output();
    refused(&case, &output.expect("rcompile runs"), 8, &["/dev/stdout", "no regular file"]);
}

/// What has the name of an executable that is not made is not opened: nobody writes to this pipe.
#[test]
fn a_pipe_is_not_waited_for() {
    let case = Case::new("llama-gqa-tied");
    let pipe = case.dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let mut command = Command::new("timeout");
    command.arg("20").arg(rcompile().get_program()).args(["build", "--no-tokenizer", "--buckets", "1", "--stop-after", "trace", "--model"]);
    let output = command.arg(case.model()).arg("-o").arg(&pipe).output().expect("rcompile runs");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Texts go where a name leads: through links, and into what is open already.
#[test]
fn texts_follow_links() {
    let case = Case::new("llama-gqa-tied");
    let graph = |to: &str| [NO_TOKENIZER, &["--emit", &format!("graph={to}")]].concat().join(" ");
    let run = |flags: &str, redirect: &str| {
        let args = format!("build --buckets 1 --cpu x86-64-v3 --model {} -o {}/exe", case.model().display(), case.out().display());
        let line = format!("cd {}; exec \"$0\" {args} {flags} {redirect}", case.dir.path().display());
        let mut command = Command::new("sh");
        command.arg("-c").arg(line).arg(rcompile().get_program()).env("XDG_CACHE_HOME", "/nowhere");
        let output = command.output().expect("sh runs");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        output
    };
    let text = |name: &str| std::fs::read_to_string(case.dir.path().join(name)).expect("a text");
    let expected = String::from_utf8(run(&graph("-"), "").stdout).expect("UTF-8");
    assert!(expected.contains("func @step"));
    std::os::unix::fs::symlink("real", case.dir.path().join("link")).expect("link");
    for _ in 0..2 {
        run(&graph("link"), "");
        assert!(case.dir.path().join("link").is_symlink());
        assert_eq!(text("real"), expected);
    }
    run(&graph("/dev/fd/3"), "3> open");
    assert_eq!(text("open"), expected);
    run(&graph("/dev/fd/1"), ">> open");
    assert_eq!(text("open"), expected.repeat(2));
}

/// An executable in the model directory is built again, and what came with it; nothing else there is replaced.
#[test]
fn outputs_in_the_model_directory() {
    let case = Case::new("llama-gqa-tied");
    let build = |out: &str, more: &[&str]| {
        let mut command = rcompile();
        command.args(["build", "--buckets", "1", "--cpu", "x86-64-v3", "--model"]).arg(case.model()).args(NO_TOKENIZER);
        command.arg("-o").arg(case.model().join(out)).args(more).output().expect("rcompile runs")
    };
    for _ in 0..2 {
        let output = build("chat", &["--weights", "split", "--emit", "exe,graph"]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
    }
    std::fs::write(case.model().join("notes"), "words").expect("notes");
    for refused_name in ["notes", "chat.graph", "chat.weights"] {
        refused(&case, &build(refused_name, &[]), 8, &[refused_name, "is a file of the model directory"]);
    }
    let emit = format!("exe,program={}", case.model().join("notes").display());
    refused(&case, &build("chat", &["--emit", &emit]), 8, &["notes", "is a file of the model directory"]);
    assert_eq!(std::fs::read_to_string(case.model().join("notes")).expect("notes"), "words");
}

/// A directory of dumps holds one build, and a pass has one number at every level.
#[test]
fn dumps_of_one_build() {
    let case = Case::new("llama-gqa-tied");
    let dump = case.dir.path().join("dump");
    let dumped = |flags: &[&str]| {
        let output = case.build(&[NO_TOKENIZER, &["--dump-dir", &dump.to_string_lossy()], flags].concat());
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        names(&dump.join("step.1"))
    };
    let all = dumped(&["--emit", "program=-"]);
    assert!(all.contains(&"99-plan.program".to_string()), "{all:?}");
    let few = dumped(&["--stop-after", "compute-dtype", "-O0"]);
    assert!(few.len() < all.len() && few.iter().all(|name| all.contains(name)), "{few:?} of {all:?}");
}

/// The later one of what `--emit` needs and `--stop-after` says.
#[test]
fn stages_behind_what_is_emitted() {
    let case = Case::new("llama-gqa-tied");
    let stages = |flags: &[&str]| {
        let output = case.build(&[&["--no-tokenizer", "--json", "--emit", "graph=-"], flags].concat());
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let stages = report["stages"].as_array().expect("stages");
        stages.last().and_then(|s| s["name"].as_str()).expect("a stage").to_string()
    };
    assert_eq!(stages(&[]), "passes");
    assert_eq!(stages(&["--stop-after", "dce-2"]), "passes");
    assert_eq!(stages(&["--stop-after", "plan"]), "plan");
    assert_eq!(stages(&["--stop-after", "codegen"]), "codegen");
    let output = case.build(&[NO_TOKENIZER, &["--dry-run", "--stop-after", "codegen"]].concat());
    refused(&case, &output, 2, &["--stop-after codegen", "--dry-run"]);
    refused(&case, &case.build(&[NO_TOKENIZER, &["--stop-after", "link"]].concat()), 2, &["no such stage or pass to stop after"]);
}

/// Whatever a build writes, it is not one of its inputs.
#[test]
fn inputs_stay() {
    let case = Case::new("llama-gqa-tied");
    let nested = case.model().join("1_Pooling");
    std::fs::create_dir(&nested).expect("directory");
    let weights = case.model().join("model.safetensors");
    let before = std::fs::read(&weights).expect("weights");
    let emits = ["graph", "program", "llvm-ir", "asm"].map(|kind| format!("{kind}={}", weights.display()));
    for emit in &emits {
        refused(&case, &case.build(&[NO_TOKENIZER, &["--emit", emit]].concat()), 8, &["model.safetensors", "input"]);
    }
    let tuning = case.dir.path().join("tuning");
    std::fs::write(&tuning, "{}").expect("tuning");
    let tuning = tuning.to_string_lossy();
    let read = case.build(&[NO_TOKENIZER, &["--tuning", &tuning, "--emit", &format!("graph={tuning}")]].concat());
    assert_ne!(read.status.code(), Some(0), "{read:?}");
    assert_eq!(std::fs::read_to_string(&*tuning).expect("tuning"), "{}");
    assert_eq!(std::fs::read(&weights).expect("weights"), before);
}

/// Nobody reads stderr: the executable is there, and that is what the exit code says.
#[test]
fn a_report_that_nobody_reads() {
    let case = Case::new("llama-gqa-tied");
    let mut command = rcompile();
    command.args(["build", "--no-tokenizer", "--buckets", "1", "--cpu", "x86-64-v3", "--model"]).arg(case.model());
    command.arg("-o").arg(case.out().join("exe")).stderr(std::fs::File::create("/dev/full").expect("/dev/full"));
    assert_eq!(command.status().expect("rcompile runs").code(), Some(0));
    assert_eq!(names(&case.out()), ["exe"]);
}

#[test]
fn a_dry_run_writes_nothing() {
    let case = Case::new("llama-gqa-tied");
    let output = case.build(&[NO_TOKENIZER, &["--dry-run", "--emit", "graph,program"]].concat());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(names(&case.out()), [""; 0]);
}

#[test]
fn every_kind_of_output() {
    let case = Case::new("llama-gqa-tied");
    let text = |output: &Output| {
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout.clone()).expect("UTF-8")
    };
    for (kind, extension, word) in
        [("graph", "graph", "func @step"), ("program", "program", "program @step.8"), ("llvm-ir", "ll", "define"), ("asm", "s", "vfmadd")]
    {
        // Beside the output, at a path, on stdout.
        let file = case.out().join(format!("exe.{extension}"));
        assert_eq!(text(&case.build(&[NO_TOKENIZER, &["--emit", kind]].concat())), "");
        let beside = std::fs::read_to_string(&file).expect("emitted text");
        assert!(beside.contains(word), "{kind}");
        assert_eq!(names(&case.out()), [format!("exe.{extension}")]);
        std::fs::remove_file(&file).expect("remove");
        let at = case.out().join("named");
        assert_eq!(text(&case.build(&[NO_TOKENIZER, &["--emit", &format!("{kind}={}", at.display())]].concat())), "");
        assert_eq!(std::fs::read_to_string(&at).expect("named"), beside);
        std::fs::remove_file(&at).expect("remove");
        let printed = text(&case.build(&[NO_TOKENIZER, &["--emit", &format!("{kind}=-")]].concat()));
        assert_eq!(printed.trim_end(), beside.trim_end(), "{kind}");
        assert_eq!(names(&case.out()), [""; 0]);
    }
    assert_eq!(text(&case.build(&[NO_TOKENIZER, &["--emit", "obj"]].concat())), "");
    let objects = names(&case.out().join("exe.objects"));
    assert!(objects.iter().any(|n| n.starts_with("rc_step_step_8")) && objects.iter().all(|n| n.starts_with("rc_")), "{objects:?}");
}

#[test]
fn explanations_and_times() {
    let case = Case::new("llama-gqa-tied");
    let output = case.build(&["--no-tokenizer", "--dry-run", "--explain", "--timings"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("merge-matmuls") && stderr.contains("matmuls in one") && stderr.contains("outline-layers"), "{stderr}");
    assert!(stderr.contains("fuse-rms-norm") && stderr.contains("passes"), "{stderr}");
    assert!(output.stdout.is_empty());
    assert_eq!(names(&case.out()), [""; 0]);

    let output = case.build(&["--no-tokenizer", "--dry-run", "--quiet", "--timings"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("passes:") && stderr.contains("total") && !stderr.contains("arena"), "{stderr}");

    let output = case.build(&["--no-tokenizer", "--dry-run", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON on stdout");
    assert!(report["weight_bytes"].as_u64().is_some_and(|n| n > 0), "{report}");
    assert_eq!(names(&case.out()), [""; 0]);

    let dump = case.dir.path().join("dump");
    let output = case.build(&[NO_TOKENIZER, &["--stop-after", "cse", "--verify-each", "--dump-dir", &dump.to_string_lossy()]].concat());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("rsqrt"), "cse comes before the norms are fused");
    for bucket in ["step.1", "step.8"] {
        let dumped = names(&dump.join(bucket));
        assert_eq!(dumped[0], "00-trace.graph");
        assert!(dumped.iter().all(|n| !n.contains("fuse") && !n.contains("plan")), "{dumped:?}");
    }
}

#[test]
fn other_verbs() {
    let case = Case::new("llama-gqa-tied");
    let run = |args: &[&str]| {
        let output = rcompile().args(args).output().expect("rcompile runs");
        assert_eq!(output.status.code(), Some(0), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let model = case.model();
    let model = model.to_string_lossy();
    let text = run(&["inspect", &model]);
    assert!(text.contains("LlamaForCausalLM") && text.ends_with("  can be compiled with --no-tokenizer\n"), "{text}");
    let inspected: Value = serde_json::from_str(&run(&["inspect", "--json", &model])).expect("JSON");
    let memory = |key: &str| inspected["memory"][key].as_u64().unwrap_or_else(|| panic!("{key} in {inspected}"));
    // A position's keys and values, of elements as the cache stores them.
    assert_eq!(memory("kv_bytes_per_token") % inspected["kv_elements_per_token"].as_u64().expect("elements"), 0, "{inspected}");
    // Whole pages of 256 positions, of one slot.
    assert!(memory("ctx_size") <= 256 && memory("slots") == 1);
    assert_eq!(memory("kv_bytes"), 256 * memory("kv_bytes_per_token"));
    let encoder = golden("bert");
    let encoder = encoder.to_string_lossy();
    let json: Value = serde_json::from_str(&run(&["inspect", "--json", &encoder])).expect("JSON");
    assert!(json["kv_elements_per_token"].is_null() && !run(&["inspect", &encoder]).contains("KV elements"), "{json}");
    assert!(memory("weight_bytes") > 0 && memory("arena_bytes") > 0 && memory("private_bytes_per_thread") > 0);
    assert!(run(&["inspect", "--cpu", "x86-64-v3", &model]).contains("built for x86-64-v3"));
    // A name that looks like a flag.
    std::fs::rename(case.model(), case.dir.path().join("-m")).expect("rename");
    let dashed = rcompile().args(["inspect", "--", "-m"]).current_dir(case.dir.path()).output().expect("rcompile runs");
    assert_eq!(dashed.status.code(), Some(0), "{dashed:?}");
    assert!(run(&["targets"]).contains("x86-64-v4"));
    assert!(run(&["doctor"]).contains("LLVM"));
    assert!(run(&["--help"]).contains("build") && run(&["build", "--help"]).contains("--buckets"));
    assert!(run(&["--version"]).contains(env!("CARGO_PKG_VERSION")));
}

/// Nothing is taken from the cache, and nothing added: what would be wrong with it does not matter.
#[test]
fn inspecting_needs_no_cache() {
    let case = Case::new("llama-gqa-tied");
    for scaling in [&[][..], &["--scaling"]] {
        let mut command = rcompile();
        command.arg("inspect").args(scaling).arg(case.model()).env("RCOMPILE_CACHE_SIZE", "much");
        let output = command.output().expect("rcompile runs");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
    }
}

/// What sizes threads of Rust makes none of ours too small.
#[test]
fn stacks_are_as_large_as_they_must_be() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let exe = dir.path().join("exe");
    let mut command = rcompile();
    command.args([
        "build",
        "--cpu",
        "x86-64-v3",
        "--buckets",
        "1",
        "--model",
        concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/model"),
    ]);
    let output = command.arg("-o").arg(&exe).env("RUST_MIN_STACK", "1000").output().expect("rcompile runs");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let output = Command::new(exe).args(["generate", "-p", "Once", "-n", "2", "-t", "2"]).env("RUST_MIN_STACK", "1000").output();
    assert_eq!(output.expect("it runs").status.code(), Some(0));
}
