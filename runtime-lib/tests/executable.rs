//! A whole executable around the runtime archive, with steps written in C: the start checks, the verbs, the exit codes.
//!
//! The model counts: after token `t` comes `t + 1`, modulo 11. The tokenizer calls the tokens `a` to `k`.
#![cfg(all(feature = "exe", target_arch = "x86_64", target_os = "linux"))]

use std::ffi::CString;
use std::fs;
use std::io::{BufRead, Read, Write};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rcompile_runtime::abi::*;
use rcompile_runtime::cost::{Arithmetic, Linear, RegionInfo, RegionKind};
use rcompile_runtime::text::compact;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use twox_hash::XxHash64;

#[path = "../../tests/src/control_group.rs"]
mod control_group;

const PT_LOAD: u32 = 1;
const VOCAB: u32 = 11;
const WEIGHTS: usize = 3 << 20;

const STEPS: &str = r#"
#include <stdint.h>
const char rc_constant[] = "rc_test_constant";
char rc_variable[] = "rc_test_variable";
#define FIELD(type, at) (*(type *)((const char *)ctx + (at)))
void rc_barrier(const void *, unsigned, unsigned);
void rc_profile(const void *, unsigned, unsigned);
static void step(const void *ctx, unsigned thread, unsigned threads) {
    volatile char scratch[400 << 10]; // as kernels have
    for (unsigned i = sizeof scratch; i > 0; i -= 4096) scratch[i - 1] = 0;
    const int32_t *token = FIELD(const int32_t *, TOKEN), *logit_row = FIELD(const int32_t *, LOGIT_ROW);
    float *out = FIELD(float *, OUTPUT);
    const unsigned char *weights = FIELD(const unsigned char *, WEIGHTS);
    const unsigned char last = weights[WEIGHTS_LEN - 1];
    for (unsigned i = thread; i < FIELD(uint32_t, LOGIT_ROWS); i += threads)
        for (int id = 0; id < 11; id++)
            out[i * 16 + id] = last == 255 && id == 10 ? __builtin_nanf("") : last - (float)((id - token[logit_row[i]] - 1 + 11) % 11);
    if (FIELD(void *, PROFILE)) rc_profile(ctx, thread, 0);
    rc_barrier(ctx, thread, threads);
}
void rc_step_step_1(const void *ctx, unsigned thread, unsigned threads) { step(ctx, thread, threads); }
void rc_step_step_8(const void *ctx, unsigned thread, unsigned threads) { step(ctx, thread, threads); }
void rc_step_encode_8(const void *ctx, unsigned thread, unsigned threads) {
    const int32_t *token = FIELD(const int32_t *, TOKEN), *begin = FIELD(const int32_t *, RUN_BEGIN);
    float *out = FIELD(float *, OUTPUT);
    for (unsigned run = thread; run < FIELD(uint32_t, RUNS); run += threads)
        for (int vector = 0; vector < 8; vector++) {
            float *v = out + (run * 8 + vector) * 16;
            v[0] = vector; v[1] = begin[run + 1] - begin[run]; v[2] = token[begin[run]];
        }
    rc_barrier(ctx, thread, threads);
}
"#;

struct Exe {
    path: PathBuf,
}

impl Drop for Exe {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.path.parent().unwrap());
    }
}

impl Exe {
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.path);
        command.args(args);
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).stdin(Stdio::null()).output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(args)).unwrap()
    }

    /// Runs, expects this exit code and exactly one error line, and returns it.
    fn fails(&self, args: &[&str], code: i32) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        let errors: Vec<&str> = stderr.lines().filter(|l| !l.starts_with("help: ")).collect();
        assert_eq!(errors.len(), 1, "{stderr}");
        assert!(errors[0].starts_with(&format!("error[E{code}-")), "{stderr}");
        stderr
    }
}

/// The archive that cargo built for this test, or the one that the environment names (to test a release build).
fn archive() -> PathBuf {
    if let Some(path) = std::env::var_os("RCOMPILE_RUNTIME_ARCHIVE") {
        return path.into();
    }
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let archives = [deps.clone(), deps.parent().unwrap().to_owned()].into_iter().flat_map(|d| fs::read_dir(d).unwrap().flatten());
    let is_archive = |p: &PathBuf| {
        p.file_name().unwrap().to_string_lossy().starts_with("librcompile_runtime") && p.extension().is_some_and(|e| e == "a")
    };
    let mut archives: Vec<_> = archives.map(|e| e.path()).filter(is_archive).collect();
    archives.sort_by_key(|p| fs::metadata(p).unwrap().modified().unwrap());
    // Another crate's tests may have built a newer one without what runs inside executables.
    let has_main = |p: &PathBuf| fs::read(p).unwrap().windows(7).any(|symbol| symbol == b"rc_main");
    archives.into_iter().rev().find(has_main).expect("cargo builds the static library with the tests")
}

fn tokenizer(pre_tokenizer: &str) -> Vec<u8> {
    let vocab: Vec<String> = ('a'..='k').zip(0..).map(|(c, id)| format!("{:?}:{id}", c.to_string())).collect();
    compact(
        format!(
            r#"{{"added_tokens":[],"normalizer":null,"pre_tokenizer":{pre_tokenizer},"post_processor":null,"decoder":{{"type":"Fuse"}},
            "model":{{"type":"BPE","vocab":{{{}}},"merges":[]}}}}"#,
            vocab.join(",")
        )
        .as_bytes(),
    )
    .unwrap()
}

fn manifest(task: Task, text: Option<TextInfo>) -> Manifest {
    let bucket = |rows: u32| BucketInfo {
        rows,
        logit_rows: rows.min(4),
        tile_rows: 4,
        arena_bytes: 4096,
        private_bytes: 128,
        regions: vec![RegionInfo {
            name: "count".into(),
            kind: RegionKind::Loops,
            arithmetic: Arithmetic::F32,
            layers: None,
            window: None,
            barrier: true,
            units: Linear::per_step(1),
            passes: None,
            weight_bytes: Linear::per_step(WEIGHTS as u64),
            kv_bytes: Linear { per_run_position: 1000, ..Linear::default() },
            activation_bytes: Linear::default(),
            private_bytes: Linear::default(),
            flop: Linear { per_row: 1, ..Linear::default() },
        }],
        barriers_per_layer: 1,
    };
    let (name, output, buckets) = match task {
        Task::Embed => ("encode", OutputKind::Pooled, vec![bucket(8)]),
        Task::Generate => ("step", OutputKind::Logits, vec![bucket(1), bucket(8)]),
    };
    Manifest {
        rcompile_version: "9.9.9".into(),
        name: "counter".into(),
        architecture: "CounterForCausalLM".into(),
        task,
        target: "x86_64-unknown-linux-gnu".into(),
        cpu: "x86-64".into(),
        features: vec!["sse2".into()],
        cores: 2,
        ctx_size: 40,
        slots: 2,
        dtype: "bf16".into(),
        compute: "f32".into(),
        kv_dtype: "f32".into(),
        quantization: "none".into(),
        vocab_size: VOCAB,
        hidden_size: 3,
        parameters: 1,
        entries: vec![EntryInfo { name: name.into(), buckets, output_stride: 16, output }],
        state: StateInfo { bytes: 4096, bytes_per_token: 1, pages_per_slot: 1, persistent: true },
        weight_bytes: WEIGHTS as u64,
        inputs: vec![InputFile { name: "config.json".into(), bytes: 2, sha256: "00".into() }],
        text,
        generation: GenerationInfo { bos_token_id: Some(9), eos_token_ids: vec![10], ..GenerationInfo::default() },
        pooling: Some(PoolingInfo { mode: Pooling::Mean, normalize: true }),
        notes: Vec::new(),
    }
}

/// How an executable differs from the usual one.
#[derive(Default)]
struct Variant {
    /// [`Task::Embed`] instead of [`Task::Generate`].
    embeds: bool,
    no_text: bool,
    split: bool,
    computes_nan: bool,
    feature: Option<&'static str>,
    hidden_size: Option<u32>,
    no_slots: bool,
    /// Name of the one input file.
    input: Option<&'static str>,
    template: Option<&'static str>,
    pre_tokenizer: Option<&'static str>,
    repetition_penalty: Option<f32>,
}

/// Compiles and links stub, steps and archive for a task; every test fills the same file anew.
fn linked(task: Task) -> &'static [u8] {
    static DECODER: OnceLock<Vec<u8>> = OnceLock::new();
    static ENCODER: OnceLock<Vec<u8>> = OnceLock::new();
    let (cell, steps): (_, &[(&str, u32)]) = match task {
        Task::Embed => (&ENCODER, &[("encode", 8)]),
        Task::Generate => (&DECODER, &[("step", 1), ("step", 8)]),
    };
    cell.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("rc-link-{task}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let declarations: String =
            steps.iter().map(|(e, b)| format!("extern void rc_step_{e}_{b}(const void *, unsigned, unsigned);\n")).collect();
        let table: String = steps.iter().map(|(e, b)| format!("    {{ {b}, 0, rc_step_{e}_{b} }},\n")).collect();
        // The places in the comment on top are documentation; those below it count.
        let (head, body) = include_str!("../../templates/stub.c").split_once("*/").unwrap();
        let body = body.replace("@DECLARATIONS@", &declarations).replace("@TABLE@", &table);
        fs::write(folder.join("stub.c"), format!("{head}*/{body}")).unwrap();
        fs::write(folder.join("start.c"), include_str!("../../templates/start.c")).unwrap();
        fs::write(folder.join("payload.ld"), include_str!("../../templates/payload.ld")).unwrap();
        fs::write(folder.join("steps.c"), STEPS).unwrap();
        let path = folder.join("linked");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-fPIE", "-static-pie", "-ffreestanding", "-fno-stack-protector", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&path);
        for (name, value) in [
            ("TOKEN", field::TOKEN),
            ("LOGIT_ROW", field::LOGIT_ROW),
            ("LOGIT_ROWS", field::LOGIT_ROWS),
            ("OUTPUT", field::OUTPUT),
            ("WEIGHTS", field::WEIGHTS),
            ("RUNS", field::RUNS),
            ("RUN_BEGIN", field::RUN_BEGIN),
            ("PROFILE", field::PROFILE),
            ("WEIGHTS_LEN", WEIGHTS as u64),
            ("CHECKSUM_AT", offset_of!(PayloadHeader, image_checksum) as u64),
        ] {
            cc.arg(format!("-D{name}={value}"));
        }
        cc.args(["start.c", "stub.c", "steps.c"].map(|file| folder.join(file))).arg(archive()).arg("-T").arg(folder.join("payload.ld"));
        cc.args(["-Wl,-e,rc_start", "-Wl,--wrap=_end", "-Wl,-z,separate-code", "-lm"]);
        let output = cc.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let bytes = fs::read(&path).unwrap();
        fs::remove_dir_all(folder).unwrap();
        bytes
    })
}

/// Writes an executable through another process: a child that a test beside forks meanwhile would inherit our handle of the
/// file, and a file that is open for writing cannot run.
fn place(path: &Path, bytes: &[u8]) {
    let draft = path.with_extension("draft");
    fs::write(&draft, bytes).unwrap();
    assert!(Command::new("cp").arg(&draft).arg(path).status().unwrap().success());
    fs::remove_file(draft).unwrap();
}

/// Fills an executable as the link stage does.
fn build(name: &str, variant: Variant) -> Exe {
    let folder = std::env::temp_dir().join(format!("rc-exe-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let exe = Exe { path: folder.join("counter") };
    let task = if variant.embeds { Task::Embed } else { Task::Generate };

    let (mut blobs, mut text) = (Vec::new(), None);
    if !variant.no_text {
        blobs = tokenizer(variant.pre_tokenizer.unwrap_or("null"));
        let template = variant.template.unwrap_or("{% for m in messages %}{{ m.content }}{% endfor %}").as_bytes();
        let (tokenizer, template_at) = (blobs.len() as u64, blobs.len() as u64);
        blobs.extend_from_slice(template);
        text = Some(TextInfo {
            tokenizer: Span { offset: 0, len: tokenizer },
            chat_template: Some(Span { offset: template_at, len: template.len() as u64 }),
            special_tokens: Default::default(),
            max_length: Some(6),
        });
    }
    let mut manifest = manifest(task, text);
    manifest.features.extend(variant.feature.map(String::from));
    manifest.generation.repetition_penalty = variant.repetition_penalty;
    manifest.hidden_size = variant.hidden_size.unwrap_or(manifest.hidden_size);
    if variant.no_slots {
        manifest.slots = 0;
    }
    if let Some(name) = variant.input {
        manifest.inputs[0].name = name.into();
    }
    let manifest = serde_json::to_vec(&manifest).unwrap();
    let mut weights = vec![7u8; WEIGHTS];
    weights[WEIGHTS - 1] = if variant.computes_nan { 255 } else { 3 };

    let linked = linked(task);
    let mut file = linked.to_vec();
    let offset = file.len().next_multiple_of(WEIGHTS_ALIGN as usize);
    let header_len = size_of::<PayloadHeader>();
    let blobs_at = header_len + manifest.len();
    let weights_at = (blobs_at + blobs.len()).next_multiple_of(WEIGHTS_ALIGN as usize);
    let payload_len = if variant.split { blobs_at + blobs.len() } else { weights_at + WEIGHTS };
    let word = |file: &[u8], at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    let phoff = word(&file, 32) as usize;
    let phnum = u16::from_le_bytes(file[56..58].try_into().unwrap()) as usize;
    let headers_end = phoff + phnum * 56;
    let (mut image_checksum, mut placed) = (0, false);
    for at in (0..phnum).map(|i| phoff + i * 56).filter(|&at| word(linked, at) as u32 == PT_LOAD) {
        if word(&file, at + 16) == PAYLOAD_VADDR {
            for (field, value) in [(8, offset), (32, payload_len), (40, payload_len)] {
                file[at + field..at + field + 8].copy_from_slice(&(value as u64).to_le_bytes());
            }
            placed = true;
        } else {
            let begin = word(&file, at + 8) as usize;
            image_checksum = XxHash64::oneshot(image_checksum, &linked[begin.max(headers_end)..begin + word(&file, at + 32) as usize]);
        }
    }
    assert!(placed);
    let (shoff, shnum) = (word(&file, 40) as usize, u16::from_le_bytes(file[60..62].try_into().unwrap()) as usize);
    let section = (0..shnum).map(|i| shoff + i * 64).find(|&at| word(&file, at + 16) == PAYLOAD_VADDR).unwrap();
    file[section + 24..section + 32].copy_from_slice(&(offset as u64).to_le_bytes());
    file[section + 32..section + 40].copy_from_slice(&(payload_len as u64).to_le_bytes());
    let hash = |bytes: &[u8]| *blake3::hash(bytes).as_bytes();
    let mut header = PayloadHeader {
        magic: PAYLOAD_MAGIC,
        abi_version: ABI_VERSION,
        weights_embedded: u32::from(!variant.split),
        file_len: (offset + payload_len) as u64,
        payload_offset: offset as u64,
        payload_len: payload_len as u64,
        manifest_offset: header_len as u64,
        manifest_len: manifest.len() as u64,
        blobs_offset: blobs_at as u64,
        blobs_len: blobs.len() as u64,
        weights_offset: if variant.split { 0 } else { weights_at as u64 },
        weights_len: WEIGHTS as u64,
        image_checksum,
        manifest_hash: hash(&manifest),
        blobs_hash: hash(&blobs),
        weights_hash: hash(&weights),
        code_begin: 0,
        code_end: 1000,
        header_hash: [0; 32],
    };
    header.header_hash = hash(header.as_bytes());
    file.resize(offset, 0);
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&manifest);
    file.extend_from_slice(&blobs);
    if variant.split {
        fs::write(folder.join("counter.weights"), [&weights[..], &hash(&weights)].concat()).unwrap();
    } else {
        file.resize(offset + weights_at, 0);
        file.extend_from_slice(&weights);
    }
    place(&exe.path, &file);
    fs::set_permissions(&exe.path, fs::Permissions::from_mode(0o755)).unwrap();
    exe
}

/// The line break that ends a file is none of what a user says, but one that is typed.
#[test]
fn a_file_says_what_its_line_says() {
    let template = Some("{{ 'cd' if messages[-1].content == 'cd' else 'a' }}");
    let exe = build("said", Variant { template, ..Variant::default() });
    for (text, answer) in [("cd", "e\n"), ("cd\n", "e\n"), ("cd\r\n", "e\n"), ("cd\n\n", "b\n")] {
        let file = exe.path.with_file_name("text");
        fs::write(&file, text).unwrap();
        assert_eq!(exe.ok(&["generate", "--chat", "-f", file.to_str().unwrap(), "-n", "1"]), answer, "{text:?}");
    }
    let typed = ["generate", "--chat", "-p", "cd\n", "-n", "1"];
    assert_eq!(exe.ok(&typed), "b\n");
    // Also where a variable names a file for other runs.
    let output = exe.command(&typed).env("RCOMPILE_ARG_FILE", "/nowhere").output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "b\n");
}

#[test]
fn a_decoder_answers() {
    let exe = build("decoder", Variant::default());
    assert_eq!(exe.ok(&["generate", "-p", "abc", "-n", "4"]), "defg\n");
    assert_eq!(exe.ok(&["generate", "-p", "abc", "-n", "4", "--no-stream", "-t", "3", "--pin"]), "defg\n");
    assert_eq!(exe.ok(&["generate", "-p", "abc", "-n", "4", "-t", "2", "--copy-weights"]), "defg\n");
    assert_eq!(exe.ok(&["generate", "-p", "ghi", "--stop", "k"]), "j\n");
    assert_eq!(exe.ok(&["generate", "--chat", "--system", "ab", "-p", "cd", "-n", "1"]), "e\n");

    let report = exe.json(&["generate", "--tokens", "0,1,2", "--json", "--temp", "0"]);
    assert_eq!(report["prompt_tokens"], serde_json::json!([0, 1, 2]));
    assert_eq!(report["tokens"], serde_json::json!([3, 4, 5, 6, 7, 8, 9, 10]));
    assert_eq!((&report["text"], &report["finish_reason"]), (&"defghij".into(), &"eos".into()));
    let timings = &report["timings"];
    for key in ["load_ms", "prefill_ms", "prefill_tokens_per_s", "decode_ms", "decode_tokens_per_s", "first_token_ms"] {
        assert!(timings[key].as_f64().unwrap() > 0.0, "{key}: {timings}");
    }
    assert!(timings["first_token_ms"].as_f64() >= timings["load_ms"].as_f64());
    let full = exe.json(&["generate", "--tokens", "0,1,2", "--json", "--ignore-eos", "-n", "1000"]);
    assert_eq!(full["finish_reason"], "length");
    assert_eq!(full["tokens"].as_array().unwrap().len(), 38); // 40 positions: the last token needs none

    let logits = exe.json(&["logits", "--tokens", "0,1", "--top", "3", "--json"]);
    assert_eq!(logits["top"], serde_json::json!([[2, 3.0], [3, 2.0], [4, 1.0]]));
    // A text without tokens begins with BOS, as in `generate`.
    for verb in ["logits", "generate"] {
        let report = exe.json(&[verb, "-p", "", "--json"]);
        assert!(report["tokens"] == serde_json::json!([9]) || report["prompt_tokens"] == serde_json::json!([9]), "{report}");
    }
    assert_eq!(exe.ok(&["tokenize", "-p", "cab"]), "2,0,1\n");
    assert_eq!(exe.ok(&["detokenize", "--tokens", "2,0,1"]), "cab\n");
    assert_eq!(exe.json(&["detokenize", "--tokens", "2", "--json"])["text"], "c");

    let text = exe.path.with_file_name("text");
    fs::write(&text, "abcdefghijk".repeat(5)).unwrap();
    let path = text.to_str().unwrap();
    let report = exe.json(&["perplexity", "-f", path, "-c", "10", "--chunks", "2", "--json"]);
    assert_eq!(report["tokens"], 18);
    let expected = (0..11).map(|d| (-f64::from(d)).exp()).sum::<f64>().ln();
    assert!((report["nll"].as_f64().unwrap() - expected).abs() < 1e-6, "{report}");
    assert!((report["ppl"].as_f64().unwrap() - expected.exp()).abs() < 1e-6);

    // Chat answers line by line, and says on stderr that -n cut the answers.
    let mut chat = exe.command(&["chat", "-n", "2"]);
    let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    chat.stdin.take().unwrap().write_all(b"ab\n\nf\n").unwrap();
    let mut said = String::new();
    chat.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(chat.wait().unwrap().success());
    assert_eq!(said, "cd\ngh\n");
}

/// Each token of the answer is one letter, so that texts arrive letter by letter.
#[test]
fn a_text_ends_before_what_stops_it() {
    let exe = build("stop", Variant::default());
    for (stops, n_predict, text, tokens, reason) in [
        (&["fg"][..], "20", "bcde", 6, "stop"),
        // Of two that end with one letter, the one that begins first.
        (&["h", "fgh"], "20", "bcde", 7, "stop"),
        (&["fgh", "h"], "20", "bcde", 7, "stop"),
        // What might have become one is part of the text, however that ends.
        (&["fgh"], "6", "bcdefg", 6, "length"),
        (&["ijx"], "20", "bcdefghij", 10, "eos"),
    ] {
        let stops: Vec<&str> = stops.iter().flat_map(|stop| ["--stop", stop]).collect();
        let args = [&["generate", "-p", "a", "-n", n_predict], &stops[..]].concat();
        let report = exe.json(&[&args[..], &["--json"]].concat());
        assert_eq!((&report["text"], &report["finish_reason"]), (&text.into(), &reason.into()), "{args:?}");
        assert_eq!(report["tokens"].as_array().unwrap().len(), tokens, "{args:?}");
        assert_eq!(exe.ok(&args), format!("{text}\n"));
        assert_eq!(exe.ok(&[&args[..], &["--no-stream"]].concat()), format!("{text}\n"));
        // The answer that the template is given for the next turn is the text too.
        let (code, answers, remarks) = talk(&exe, &[&["-n", n_predict], &stops[..]].concat(), b"a\na\n");
        assert_eq!((code, answers), (Some(0), format!("{text}\n{text}\n")), "{args:?}: {remarks}");
        assert_eq!(remarks.matches("the answer was cut").count(), if reason == "length" { 2 } else { 0 }, "{args:?}: {remarks}");
    }
}

/// The logits fall by one with each letter after the next one, from 3 on.
#[test]
fn what_occurred_is_chosen_less() {
    let exe = build("penalty", Variant::default());
    let continued = |args: &[&str]| exe.ok(&[&["generate", "-p", "cab", "-n", "2"], args].concat());
    assert_eq!(continued(&[]), "cd\n");
    assert_eq!(continued(&["--repeat-penalty", "1.4"]), "cd\n");
    assert_eq!(continued(&["--repeat-penalty", "1.6"]), "de\n");
    // All occur once, and then the first that is not below zero.
    let round = ["generate", "-p", "a", "-n", "11", "--ignore-eos", "--repeat-penalty", "1000"];
    assert_eq!(exe.ok(&round), "bcdefghijka\n");
    let (code, answers, _) = talk(&exe, &["-n", "1", "--repeat-penalty", "1000"], b"cab\n");
    assert_eq!((code, answers.as_str()), (Some(0), "d\n"));

    // The model may ask for it, and the flag wins.
    let last = Some("{{ messages[-1].content }}");
    let exe = build("penalised", Variant { repetition_penalty: Some(1000.0), template: last, ..Variant::default() });
    assert_eq!(exe.ok(&["generate", "-p", "cab", "-n", "2"]), "de\n");
    assert_eq!(exe.ok(&["generate", "-p", "cab", "-n", "2", "--repeat-penalty", "1"]), "cd\n");
    // What this template leaves out did not occur.
    let (code, answers, _) = talk(&exe, &["-n", "1"], b"cab\nb\n");
    assert_eq!((code, answers.as_str()), (Some(0), "d\nc\n"));
}

#[test]
fn cuts_of_the_vocabulary_have_the_size_that_flags_say() {
    let exe = build("cuts", Variant::default());
    // How far behind the most probable letter the chosen ones are.
    let found = |args: &[&str]| {
        let report = exe.json(&[&["generate", "--tokens", "0", "-n", "1000", "--ignore-eos", "--json"], args].concat());
        let tokens = report["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap());
        let before = std::iter::once(0).chain(tokens.clone());
        let mut found: Vec<u64> = before.zip(tokens).map(|(before, token)| (token + 21 - before) % 11).collect();
        found.sort();
        found.dedup();
        found
    };
    // So hot that all eleven are about equally probable.
    let hot = ["--temp", "1000000"];
    assert!(found(&hot).len() > 8);
    assert_eq!(found(&[&hot[..], &["--top-k", "1"]].concat()), [0]);
    assert_eq!(found(&[&hot[..], &["--top-k", "3"]].concat()), [0, 1, 2]);
    assert_eq!(found(&[&hot[..], &["--top-p", "0.15"]].concat()), [0, 1]);
    assert_eq!(found(&[&hot[..], &["--top-p", "0.25"]].concat()), [0, 1, 2]);
    // Each is 0.61 times as probable as the one before.
    assert_eq!(found(&["--temp", "2", "--min-p", "0.5"]), [0, 1]);
    assert_eq!(found(&["--temp", "2", "--min-p", "0.3"]), [0, 1, 2]);
}

/// Talks line by line; exit code, stdout and stderr.
fn talk(exe: &Exe, args: &[&str], said: &[u8]) -> (Option<i32>, String, String) {
    let mut chat = exe.command(&[&["chat"], args].concat());
    let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    chat.stdin.take().unwrap().write_all(said).unwrap();
    let output = chat.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_text_that_the_context_cuts_says_so() {
    let exe = build("cut", Variant::default());
    let cut = exe.run(&["generate", "-p", &"a".repeat(38), "-n", "9"]);
    let remark = String::from_utf8(cut.stderr).unwrap();
    assert!(cut.status.success() && remark.starts_with("warning[W-context]: the text ends after 3 of 9 tokens: all 40 "), "{remark}");
    assert!(exe.run(&["generate", "-p", "a", "-n", "3"]).stderr.is_empty());
}

#[test]
fn a_full_context_starts_the_conversation_anew() {
    let exe = build("full", Variant::default());
    // System message and three times (message, answer) are 45 of 40 positions.
    let said = b"aaaaaaaaaab\nbbbbbbbbbbc\nccccccccccd\nd\n";
    let (code, answers, remarks) = talk(&exe, &["--system", "abcdef", "-n", "2"], said);
    assert_eq!((code, answers.as_str()), (Some(0), "cd\nde\nef\nef\n"), "{remarks}");
    let anew: Vec<&str> = remarks.lines().filter(|l| l.starts_with("warning[W-context]: ")).collect();
    assert_eq!(anew.len(), 1, "{remarks}");
    assert!(anew[0].contains("anew") && anew[0].contains("43") && anew[0].contains("40"), "{remarks}");

    // A message that does not fit alone is left out, and what was said before stays.
    let said = ["abc\n", &"a".repeat(41), "\nb\n"].concat();
    let (code, answers, remarks) = talk(&exe, &["-n", "2"], said.as_bytes());
    assert_eq!((code, answers.as_str()), (Some(0), "de\ncd\n"), "{remarks}");
    let left_out: Vec<&str> = remarks.lines().filter(|l| l.starts_with("warning[W-context]: ")).collect();
    assert!(left_out.len() == 1 && left_out[0].contains("41") && left_out[0].contains("40"), "{remarks}");
}

/// An eighth of the 40 positions is left for an answer, or what one takes at most.
#[test]
fn a_nearly_full_context_starts_the_conversation_anew() {
    let exe = build("nearly", Variant::default());
    for (most, last_that_fits) in [("9", 35), ("5", 35), ("3", 37), ("1", 39), ("0", 40)] {
        for positions in [last_that_fits, last_that_fits + 1] {
            // The first message is alone, whatever it leaves; the second has one position before it, or two with an answer.
            let before = if most == "0" { 1 } else { 2 };
            let said = format!("i\n{}i\n", "a".repeat(positions - before - 1));
            let (code, answers, remarks) = talk(&exe, &["-n", most], said.as_bytes());
            let answer = if most == "0" { "\n" } else { "j\n" };
            assert_eq!((code, answers), (Some(0), answer.repeat(2)), "{most}: {remarks}");
            let anew = remarks.contains("warning[W-context]: the conversation starts anew: ");
            assert_eq!(anew, positions > last_that_fits, "{most}, {positions}: {remarks}");
        }
    }
    let (code, answers, remarks) = talk(&exe, &["-n", "9"], format!("{}i\n", "a".repeat(39)).as_bytes());
    assert_eq!((code, answers.as_str()), (Some(0), "j\n"), "{remarks}");
    assert!(!remarks.contains("W-context"), "{remarks}");
}

/// A template has a limit of its own, which is reached long before the context is full.
#[test]
fn a_message_beyond_the_templates_limit_is_left_out() {
    let template = "{% for m in messages %}{% if m.content == 'b' %}{{ 'a' * 1000000000 }}{% endif %}{{ m.content }}{% endfor %}";
    let exe = build("limit", Variant { template: Some(template), ..Variant::default() });
    let (code, answers, remarks) = talk(&exe, &["-n", "1"], b"c\nb\ne\n");
    assert_eq!((code, answers.as_str()), (Some(0), "d\nf\n"), "{remarks}");
    assert!(remarks.contains("warning[W-context]: the message was left out: chat template, line 1: "), "{remarks}");
}

/// A pattern that gives up on a text ends nothing but that message.
#[test]
fn a_message_that_the_tokenizer_refuses_is_left_out() {
    let pre_tokenizer = r#"{"type":"Split","pattern":{"Regex":"(?:kk?)+(?=[^a-k])"},"behavior":"Isolated","invert":false}"#;
    let exe = build("refused", Variant { pre_tokenizer: Some(pre_tokenizer), ..Variant::default() });
    let said = format!("c\n{}\ne\n", "k".repeat(39));
    let (code, answers, remarks) = talk(&exe, &["-n", "1"], said.as_bytes());
    assert_eq!((code, answers.as_str()), (Some(0), "d\nf\n"), "{remarks}");
    assert!(remarks.contains("warning[W-context]: the message was left out: "), "{remarks}");
    exe.fails(&["generate", "-p", &"k".repeat(39)], 7);
}

/// Who reads may have made the pipe non-blocking for both sides.
#[test]
fn a_pipe_that_is_full_for_a_while_loses_nothing() {
    let exe = build("slow", Variant::default());
    let text = text_beside(&exe, 20_000);
    let (mut reader, writer) = std::io::pipe().unwrap();
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
    let args = ["tokenize", "-f", text.to_str().unwrap()];
    let expected = exe.ok(&args);
    let mut run = exe.command(&args).stdout(writer).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let mut found = String::new();
    reader.read_to_string(&mut found).unwrap();
    assert!(run.wait().unwrap().success() && found == expected, "{} of {} bytes", found.len(), expected.len());
}

#[test]
fn an_input_that_comes_late_is_waited_for() {
    let exe = build("late", Variant::default());
    for (args, expected) in [(&["tokenize", "-f", "-"][..], "2,0,1\n"), (&["chat", "-n", "2"], "cd\n")] {
        let (reader, mut writer) = std::io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&reader, rustix::fs::OFlags::NONBLOCK).unwrap();
        let run = exe.command(args).stdin(reader).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        for piece in if args[0] == "chat" { ["a", "b\n"] } else { ["ca", "b"] } {
            std::thread::sleep(Duration::from_millis(200));
            writer.write_all(piece.as_bytes()).unwrap();
        }
        drop(writer);
        let output = run.wait_with_output().unwrap();
        assert!(output.status.success() && output.stdout == expected.as_bytes(), "{output:?}");
    }
}

/// A file that is cut while it is mapped.
#[test]
fn weights_that_go_away_are_an_error() {
    let exe = build("gone", Variant { split: true, ..Variant::default() });
    let mut chat = exe.command(&["chat", "-n", "2"]);
    let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = chat.stdin.take().unwrap();
    input.write_all(b"ab\n").unwrap();
    let mut answer = String::new();
    std::io::BufReader::new(chat.stdout.as_mut().unwrap()).read_line(&mut answer).unwrap();
    assert_eq!(answer, "cd\n");
    fs::File::options().write(true).open(exe.path.with_file_name("counter.weights")).unwrap().set_len(0).unwrap();
    input.write_all(b"ab\n").unwrap();
    let output = chat.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{error}");
    assert!(
        error
            .ends_with("error[E3-executable]: its file, or that of its weights, cannot be read any more: it was cut, or its disk failed\n"),
        "{error}"
    );
}

#[test]
fn numbers_that_are_none_are_told_of() {
    let exe = build("nan", Variant { computes_nan: true, ..Variant::default() });
    let warned = |args: &[&str]| {
        let output = exe.command(args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8(output.stderr).unwrap().matches("warning[W-nonfinite]: the model computed NaN or infinity").count() == 1);
    };
    warned(&["generate", "-p", "abc", "-n", "4"]);
    warned(&["logits", "-p", "abc"]);
    let text = text_beside(&exe, 100);
    warned(&["perplexity", "-f", text.to_str().unwrap(), "-c", "10", "--chunks", "2"]);
}

#[test]
fn chat_takes_utf8_only() {
    let exe = build("utf8", Variant::default());
    let (code, answers, error) = talk(&exe, &["-n", "1"], b"a\nb\xff\n");
    assert_eq!((code, answers.as_str()), (Some(4), "b\n"), "{error}");
    assert!(error.contains("error[E4-input]: stdin: not UTF-8 at byte 3\n"), "{error}");
}

#[test]
fn an_error_of_the_template_is_named_once() {
    let exe = build("template", Variant { template: Some("\n{{ raise_exception('no') }}"), ..Variant::default() });
    let error = exe.fails(&["generate", "--chat", "-p", "a"], 2);
    assert!(error.starts_with("error[E2-template]: chat template, line 2: no"), "{error}");
}

#[test]
fn ids_that_do_not_exist_have_no_text() {
    let exe = build("ids", Variant::default());
    for id in ["11", "4294967295"] {
        let error = exe.fails(&["detokenize", "--tokens", &format!("0,{id}")], 2);
        assert!(error.contains(&format!("token id {id}:")) && error.contains("below 11"), "{error}");
    }
}

/// Every thread is bound to one CPU, each of another core as long as there are some; with more threads than CPUs they go round.
#[test]
fn pinned_threads_share_the_cores_evenly() {
    let exe = build("pin", Variant::default());
    let mut chat = exe.command(&["chat", "--pin", "-t", "5", "-n", "1"]);
    let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    chat.stdin.as_mut().unwrap().write_all(b"a\n").unwrap();
    let mut line = String::new();
    std::io::BufReader::new(chat.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let mut places: Vec<(String, String)> = fs::read_dir(format!("/proc/{}/task", chat.id()))
        .unwrap()
        .flatten()
        .filter_map(|task| {
            let file = |name| fs::read_to_string(task.path().join(name)).ok();
            let (name, status) = (file("comm")?, file("status")?);
            let cpus = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
            Some((name.trim().to_owned(), cpus.trim().to_owned()))
        })
        .filter(|(name, _)| name != "tokenizer") // done, but perhaps not gone
        .collect();
    drop(chat.stdin.take());
    assert!(chat.wait().unwrap().success());
    places.sort();
    let names: Vec<&str> = places.iter().map(|p| p.0.as_str()).collect();
    assert_eq!(names, ["counter", "step-1", "step-2", "step-3", "step-4"]);
    let cpus = rcompile_runtime::cpus::Cpus::detect().spread;
    for (thread, (_, place)) in places.iter().enumerate() {
        assert_eq!(*place, cpus[thread % cpus.len()].to_string(), "{places:?}");
    }
}

#[test]
fn flags_come_from_the_environment_too() {
    let exe = build("environment", Variant::default());
    let run = |args: &[&str], vars: &[(&str, &str)]| {
        let output = exe.command(args).envs(vars.iter().copied()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let vars = [("RCOMPILE_ARG_PROMPT", "ab"), ("RCOMPILE_ARG_N_PREDICT", "2"), ("RCOMPILE_ARG_NO_STREAM", "1")];
    assert_eq!(run(&["generate"], &vars), (Some(0), "cd\n".into()));
    assert_eq!(run(&["generate", "-p", "d", "-n", "1"], &vars), (Some(0), "e\n".into()));
    assert_eq!(run(&["generate", "--tokens", "4", "-n", "1"], &vars), (Some(0), "f\n".into()));
    assert_eq!(run(&["generate", "-p", "a"], &[("RCOMPILE_ARG_THREADS", "0")]).0, Some(2));
    let wrong = exe.command(&["generate", "-p", "a"]).env("RCOMPILE_ARG_TOP_K", "x").output().unwrap();
    let wrong = String::from_utf8(wrong.stderr).unwrap();
    let name = exe.path.file_name().unwrap().to_str().unwrap();
    let help = format!("\nhelp: {name} generate --help\nhelp: set in the environment: RCOMPILE_ARG_TOP_K\n");
    assert!(wrong.ends_with(&help), "{wrong}");
    // The short names too; the long one wins.
    let short = [("RCOMPILE_ARG_P", "ab"), ("RCOMPILE_ARG_N", "2")];
    assert_eq!(run(&["generate"], &short), (Some(0), "cd\n".into()));
    assert_eq!(run(&["generate"], &[short[0], short[1], ("RCOMPILE_ARG_N_PREDICT", "1")]), (Some(0), "c\n".into()));
    assert!(run(&["--help"], &[]).1.contains("RCOMPILE_ARG_N_PREDICT"));
    // A name that no verb of any task knows is told of; other verbs' are not.
    let told = |name: &str| {
        let out = exe.command(&["generate", "-p", "a", "-n", "1"]).env(name, "1").output().unwrap();
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    let warning = "warning[W-variable]: RCOMPILE_ARG_COPY_WEIGHT: no verb has such a flag\n";
    assert_eq!(told("RCOMPILE_ARG_COPY_WEIGHT"), (Some(0), warning.into()));
    assert_eq!(
        ["RCOMPILE_ARG_COPY_WEIGHTS", "RCOMPILE_ARG_NORMALIZE", "RCOMPILE_ARG_D"].map(told),
        [(); 3].map(|_| (Some(0), String::new()))
    );
    let verbs = run(&["--help"], &[]).1;
    let verbs: Vec<&str> = verbs.lines().skip_while(|l| *l != "Commands:").skip(1).map_while(|l| l.split_whitespace().next()).collect();
    assert!(verbs.len() > 7, "{verbs:?}");
    for verb in verbs {
        let help = run(&[verb, "--help"], &[]).1;
        let flags =
            help.split([' ', ',']).filter_map(|word| word.strip_prefix("--")).map(|flag| flag.trim().to_uppercase().replace('-', "_"));
        for flag in flags.filter(|flag| !matches!(&flag[..], "" | "HELP" | "VERSION")) {
            let out = exe.command(&["info"]).env(format!("RCOMPILE_ARG_{flag}"), "1").output().unwrap();
            assert_eq!((out.status.code(), String::from_utf8_lossy(&out.stderr)), (Some(0), "".into()), "{verb} --{flag}");
        }
    }
    // What is set for another verb is no mistake, and an empty one is not set.
    assert_eq!(run(&["generate", "-p", "a", "-n", "1"], &[("RCOMPILE_ARG_SYSTEM", "x")]), (Some(0), "b\n".into()));
    assert_eq!(run(&["generate", "-p", "a", "-n", "1"], &[("RCOMPILE_ARG_TOKENS", "")]), (Some(0), "b\n".into()));
    assert_eq!(run(&["generate", "-p", "a"], &[short[1], ("RCOMPILE_ARG_N_PREDICT", "")]), (Some(0), "bc\n".into()));
    assert_eq!(run(&["generate", "--tokens", "0", "-n", "1"], &[("RCOMPILE_ARG_CHAT", "1")]), (Some(0), "b\n".into()));
    assert_eq!(run(&["generate", "-p", "a", "--system", "x"], &[]).0, Some(2));
    assert_eq!(run(&["generate", "--tokens", "0", "--chat"], &[]).0, Some(2));
    let exe = build("environment-embed", Variant { embeds: true, ..Variant::default() });
    for verb in [&["bench", "-p", "4", "-r", "1"][..], &["profile", "-p", "4"]] {
        let run = |n: &[&str], value| exe.command(&[verb, n].concat()).env("RCOMPILE_ARG_N_GEN", value).output().unwrap().status.code();
        assert_eq!((run(&[], "5"), run(&["-n", "5"], "0")), (Some(0), Some(2)), "{verb:?}");
    }
}

#[test]
fn help_says_what_verbs_do_and_version_whose_it_is() {
    let exe = build("help", Variant::default());
    let help = exe.ok(&["--help"]);
    assert!(help.contains("Continue a text") && help.contains("Measure speed") && !help.contains('`'), "{help}");
    assert!(exe.ok(&["generate", "--help"]).starts_with("Continue a text"));
    let renamed = exe.path.with_file_name("renamed");
    fs::rename(&exe.path, &renamed).unwrap();
    let version = Command::new(renamed).arg("--version").output().unwrap().stdout;
    assert_eq!(String::from_utf8(version).unwrap(), "renamed counter (rcompile 9.9.9)\n");
}

#[test]
fn bench_info_profile_and_verify_report() {
    let exe = build("reports", Variant::default());
    let lines = exe.ok(&["bench", "-p", "8,3", "-n", "4", "-d", "0,2", "-b", "1,2", "-t", "1,2", "-r", "2", "-o", "jsonl"]);
    let tests: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(tests.len(), 3 * 2 * 2 * 2);
    assert_eq!((&tests[0]["test"], &tests[0]["threads"], &tests[0]["batch"]), (&"pp8".into(), &1.into(), &1.into()));
    let deep = tests.iter().find(|t| t["test"] == "tg4@d2" && t["batch"] == 2 && t["threads"] == 2).unwrap();
    // Four steps read the weights once each and, for two sequences, the cache of 3, 4, 5 and 6 positions.
    assert_eq!(deep["weight_bytes"], WEIGHTS);
    let seconds: f64 = deep["samples_ts"].as_array().unwrap().iter().map(|t| 8.0 / t.as_f64().unwrap()).sum::<f64>() / 2.0;
    let bytes = (4 * WEIGHTS + 2 * (3 + 4 + 5 + 6) * 1000) as f64;
    assert!((deep["gb_per_s"].as_f64().unwrap() * 1e9 * seconds / bytes - 1.0).abs() < 1e-6, "{deep}");
    assert!(tests.iter().all(|t| t["samples_ts"].as_array().unwrap().len() == 2 && t["rss_bytes"].as_u64() > Some(0)));
    assert_eq!(exe.json(&["bench", "-p", "4", "-n", "0", "-r", "1", "-o", "json"]).as_array().unwrap().len(), 1);
    assert_eq!(exe.ok(&["bench", "-p", "4", "-n", "2", "-r", "1"]).lines().count(), 4);
    assert_eq!(exe.ok(&["bench", "-p", "4", "-n", "2", "-r", "1", "-o", "csv"]).lines().count(), 3);
    assert!(exe.fails(&["bench", "-b", "3", "-p", "4", "-n", "1"], 2).contains("--parallel"));

    let info = exe.json(&["info", "--json"]);
    for key in [
        "target",
        "cpu",
        "features",
        "ctx_size",
        "slots",
        "dtype",
        "quantization",
        "weight_bytes",
        "kv_bytes",
        "arena_bytes",
        "inputs",
        "rcompile_version",
    ] {
        assert!(!info[key].is_null(), "{key}");
    }
    assert!(exe.ok(&["info"]).contains("CounterForCausalLM"));
    let fastest = (0..20)
        .map(|_| {
            let begin = Instant::now();
            exe.ok(&["info"]);
            begin.elapsed()
        })
        .min()
        .unwrap();
    eprintln!("info takes {fastest:?}, the executable without weights has {} bytes", linked(Task::Generate).len());
    assert!(fastest < Duration::from_millis(200), "{fastest:?}"); // of an unoptimised archive; 20 ms is tested on a release build
    assert!(exe.ok(&["verify"]).starts_with("ok"));
    assert_eq!(exe.json(&["verify", "--json"])["ok"], true);
    assert!(exe.ok(&["--version"]).contains("9.9.9"));
    let help = exe.ok(&["--help"]);
    assert!(help.contains("perplexity") && !help.contains("embed"));

    assert!(exe.ok(&["profile", "-p", "20", "-n", "3"]).contains("| count |"));
    let trace = exe.path.with_file_name("trace.json");
    exe.ok(&["profile", "-p", "20", "-n", "3", "-t", "2", "--trace", trace.to_str().unwrap()]);
    let trace: Value = serde_json::from_slice(&fs::read(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |name: &str| events.iter().filter(|e| e["name"] == name).count();
    assert_eq!((count("prefill step"), count("decode step"), count("count")), (3 * 2, 3 * 2, (3 + 3) * 2));
    let profile = exe.json(&["profile", "-p", "20", "-n", "3", "-t", "2", "--json"]);
    assert_eq!(
        (&profile["threads"], &profile["phases"][0]["phase"], &profile["phases"][1]["steps"]),
        (&2.into(), &"prefill".into(), &3.into())
    );
    assert!(profile["limits"]["f32_gflop_per_s"].is_null() && profile["phases"][0]["ops"][0]["of_limit"].is_null(), "no probes");
}

/// 40 positions are fewer than any default.
#[test]
fn measurements_fit_a_short_context() {
    let exe = build("short", Variant::default());
    let tests = |args: &[&str]| -> Vec<String> {
        let lines = exe.ok(&[&["bench", "-r", "1", "-o", "jsonl"], args].concat());
        lines.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["test"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(tests(&[]), ["pp40", "tg40"]);
    assert_eq!(tests(&["-d", "10,0", "-n", "3"]), ["pp30@d10", "tg3@d10", "pp40", "tg3"]);
    assert!(exe.fails(&["bench", "-p", "41"], 7).contains("41"));
    exe.fails(&["bench", "-d", "40"], 7);
    // Refused before anything of that size is made.
    assert!(exe.fails(&["bench", "-p", "1000000000000"], 7).contains("1000000000000"));
    assert!(exe.fails(&["profile", "-n", "1000000000000"], 7).contains("built for 40"));

    // One test that cannot run: none is measured.
    for (args, code) in [(["-p", "4,41"], 7), (["-d", "0,40"], 7), (["-b", "1,3"], 2)] {
        let none = exe.run(&[&["bench", "-r", "1"][..], &args].concat());
        assert!(none.status.code() == Some(code) && none.stdout.is_empty(), "{none:?}");
    }

    exe.ok(&["profile"]);
    exe.ok(&["profile", "-p", "40"]);
    let decode = exe.json(&["profile", "-p", "0", "-n", "3", "--json"]);
    assert_eq!((decode["phases"].as_array().unwrap().len(), &decode["phases"][0]["phase"]), (1, &"decode".into()));
    exe.ok(&["profile", "-n", "39"]);
    exe.fails(&["profile", "-p", "41"], 7);
    exe.fails(&["profile", "-n", "40"], 7);
}

/// Nanoseconds that all threads of a process have run.
fn cpu_ns(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let run =
        |task: fs::DirEntry| fs::read_to_string(task.path().join("schedstat")).unwrap().split(' ').next().unwrap().parse::<u64>().unwrap();
    tasks.map(run).sum()
}

#[test]
fn a_chat_that_waits_for_input_uses_no_cpu() {
    let exe = build("idle", Variant::default());
    let mut chat = exe.command(&["chat", "-t", "2", "-n", "3", "--temp", "0"]);
    let mut child = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdin.write_all(b"abc\n").unwrap();
    // The answer proves that the threads have run.
    let mut byte = [0];
    assert_eq!(stdout.read(&mut byte).unwrap(), 1);
    std::thread::sleep(Duration::from_millis(300));
    let before = cpu_ns(child.id());
    std::thread::sleep(Duration::from_secs(1));
    let used = Duration::from_nanos(cpu_ns(child.id()) - before);
    drop(stdin);
    child.wait().unwrap();
    assert!(before > 0 && used < Duration::from_millis(3), "{used:?}");
}

#[test]
fn an_encoder_embeds() {
    let exe = build("encoder", Variant { embeds: true, ..Variant::default() });
    let one = exe.json(&["embed", "--tokens", "4,5,6", "--json"]);
    assert_eq!(one["embeddings"], serde_json::json!([[4.0, 3.0, 4.0]]));
    let raw = exe.json(&["embed", "--tokens", "4", "--json", "--pooling", "max", "--normalize", "false"]);
    assert_eq!(raw["embeddings"], serde_json::json!([[2.0, 1.0, 4.0]]));
    // A path is bytes, not text.
    let lines = exe.path.with_file_name(std::ffi::OsStr::from_bytes(b"lines\xff"));
    fs::write(&lines, "bcd\na\ncccccccc\n").unwrap();
    let output = exe.command(&["embed", "--json", "-f"]).arg(&lines).output().unwrap();
    let many: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(many["embeddings"], serde_json::json!([[4.0, 3.0, 1.0], [4.0, 1.0, 0.0], [4.0, 6.0, 2.0]]));
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("warning[W-length]: 1 of 3 texts were cut to 6"));
    // More than are kept until they are printed, in both forms; what is wrong with one of them is said before the first is printed.
    let words = ["bcd", "a", "cc"].iter().cycle().take(2500).copied().collect::<Vec<_>>();
    fs::write(&lines, words.join("\n") + "\n").unwrap();
    let json: Value = serde_json::from_slice(&exe.command(&["embed", "--json", "-f"]).arg(&lines).output().unwrap().stdout).unwrap();
    let vectors = json["embeddings"].as_array().unwrap();
    assert_eq!((vectors.len(), &vectors[..2]), (2500, &many["embeddings"].as_array().unwrap()[..2]));
    assert!(vectors.iter().zip(vectors.iter().skip(3)).all(|(one, other)| one == other));
    let table = exe.command(&["embed", "-f"]).arg(&lines).output().unwrap().stdout;
    let numbers = |line: &str| Value::from(line.split(' ').map(|x| x.parse::<f64>().unwrap()).collect::<Vec<_>>());
    assert!(String::from_utf8(table).unwrap().lines().map(numbers).eq(vectors.iter().cloned()));
    fs::write(&lines, words.join("\n") + "\n\n").unwrap();
    let refused = exe.command(&["embed", "--json", "-f"]).arg(&lines).output().unwrap();
    assert!(refused.stdout.is_empty() && refused.status.code() == Some(2), "{refused:?}");
    assert!(String::from_utf8(refused.stderr).unwrap().contains("text 2501: no tokens"));
    assert!(exe.fails(&["embed", "--tokens", "1,1,1,1,1,1,1,1,1"], 7).contains("text 1: 9 tokens"));
    let unknown = exe.command(&["embed", "--json", "--tokens", "99"]).output().unwrap();
    assert!(unknown.status.code() == Some(2) && unknown.stdout.is_empty(), "{unknown:?}");
    fs::write(&lines, "").unwrap();
    assert_eq!(exe.command(&["embed", "--json", "-f"]).arg(&lines).output().unwrap().stdout, b"{\"embeddings\":[]}\n");
    let help = exe.ok(&["embed", "--help"]);
    assert!(help.contains("-f, --file <LINES>") && help.contains("Read one text per line, `-` is stdin"), "{help}");
    assert!(exe.fails(&["embed"], 2).contains("help: give one of -p TEXT, -f LINES, --tokens 1,2,3\n"));
    exe.fails(&["generate", "-p", "a"], 2);
    let test = exe.json(&["bench", "-p", "4", "-b", "2", "-r", "1", "-o", "jsonl"]);
    assert!(test["avg_ms"].as_f64().is_some() && test["test"] == "pp4");
    exe.ok(&["profile", "-p", "4"]);
    // Four texts that fill a step each: two threads run two each.
    let apart: Value = serde_json::from_str(&exe.ok(&["profile", "-p", "8", "-b", "4", "-t", "2", "--json"])).unwrap();
    assert_eq!((&apart["phases"][0]["steps"], &apart["phases"][0]["tokens"]), (&4.into(), &32.into()), "{apart}");
    for verb in ["bench", "profile"] {
        assert!(exe.fails(&[verb, "-n", "4"], 2).contains("an encoder "));
        assert!(exe.fails(&[verb, "-p", "0"], 2).contains("nothing to measure"));
    }
    let none = exe.run(&["bench", "-p", "4,9"]);
    assert!(none.status.code() == Some(7) && none.stdout.is_empty(), "{none:?}");
}

#[test]
fn wrong_use_has_one_line_and_its_code() {
    let exe = build("misuse", Variant { no_text: true, ..Variant::default() });
    exe.fails(&[], 2);
    exe.fails(&["frobnicate"], 2);
    exe.fails(&["generate"], 2);
    exe.fails(&["generate", "--tokens", "1", "--wat"], 2);
    exe.fails(&["generate", "--tokens", "1", "-t", "0"], 2);
    exe.fails(&["generate", "--tokens", "1,x"], 2);
    exe.fails(&["generate", "--tokens", "11"], 2);
    exe.fails(&["generate", "--tokens", "1", "--temp", "-1"], 2);
    exe.fails(&["generate", "-p", "a"], 6);
    exe.fails(&["chat"], 6);
    exe.fails(&["tokenize", "-p", "a"], 6);
    exe.fails(&["generate", "-f", "/nowhere/file"], 3);
    let long = vec!["1"; 41].join(",");
    let full = exe.fails(&["generate", "--tokens", &long], 7);
    assert!(full.contains("41") && full.contains("40"), "{full}");
    assert_eq!(exe.ok(&["generate", "--tokens", "1", "-n", "3"]), "2,3,4\n");

    let full = exe.command(&["info"]).stdout(fs::File::options().write(true).open("/dev/full").unwrap()).output().unwrap();
    assert_eq!(full.status.code(), Some(8));
    let mut closed = exe
        .command(&["generate", "--tokens", "1", "-n", "30", "--ignore-eos"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(closed.stdout.take());
    let status = closed.wait().unwrap();
    let mut stderr = String::new();
    closed.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!((status.code(), stderr.as_str()), (Some(0), ""));
}

#[test]
fn values_out_of_range_are_named_with_their_range() {
    let exe = build("range", Variant::default());
    let tokens = ["generate", "--tokens", "1"];
    for (verb, flags, expected) in [
        (&tokens[..], &["-n", "-1"][..], "expected a whole number of 0 or more"),
        (&tokens, &["-n", "-1"], "0 or more: a large one, for as many as the context holds"),
        (&["chat"], &["-n", "-1"], "a large one"),
        (&tokens, &["-n", "18446744073709551616"], "expected at most 18446744073709551615"),
        (&tokens, &["-n", "1.5"], "expected a whole number of 0 or more"),
        (&tokens, &["--temp", "-0.5"], "expected a temperature from 0 to 1000000"),
        (&tokens, &["--temp", "2e6"], "expected a temperature from 0 to 1000000"),
        (&tokens, &["--repeat-penalty", "1e-4"], "expected a number from 0.001 to 1000"),
        (&tokens, &["--top-k", "-1"], "expected a whole number of 0 or more"),
        (&tokens, &["--top-p", "-1"], "expected a number from 0 to 1"),
        (&tokens, &["-s", "-1"], "expected a whole number of 0 or more"),
        (&tokens, &["-s", "99999999999999999999"], "expected at most 18446744073709551615"),
        (&tokens, &["-t", "-1"], "expected a number of threads"),
        (&tokens, &["--stop", ""], "expected a text that is not empty"),
        (&["generate"], &["--tokens", "-1,2"], "expected token ids"),
        (&["generate"], &["--tokens", "1,,2"], "expected token ids"),
        (&["detokenize"], &["--tokens", "1,,2"], "expected token ids"),
        (&["logits"], &["--tokens", "1", "--top", "0"], "expected a whole number of 1 or more"),
        (&["logits"], &["--tokens", "1", "--top", "-1"], "expected a whole number of 1 or more"),
        (&["perplexity"], &["-f", "-", "-c", "-1"], "expected a whole number of 2 or more"),
        (&["perplexity"], &["-f", "-", "--chunks", "0"], "expected a whole number of 1 or more"),
        (&["bench"], &["-p", "0", "-n", "0"], "nothing to measure"),
        (&["profile"], &["-p", "0", "-n", "0"], "nothing to measure"),
        (&["bench"], &["-p", "-1,2"], "expected a whole number of 0 or more"),
        (&["bench"], &["-b", "0"], "expected a whole number from 1 to 65536"),
        (&["profile"], &["-b", "65537"], "expected a whole number from 1 to 65536"),
        (&["bench"], &["-r", "0"], "expected a whole number of 1 or more"),
        (&["profile"], &["-n", "-1"], "expected a whole number of 0 or more"),
    ] {
        let error = exe.fails(&[verb, flags].concat(), 2);
        assert!(error.contains(expected), "{flags:?}: {error}");
    }
}

#[test]
fn another_cpu_is_refused_before_anything_else() {
    let exe = build("cpu", Variant { feature: Some("avx1024"), ..Variant::default() });
    for args in [&["generate", "--tokens", "1"][..], &["--help"], &["--version"], &[], &["bench"]] {
        assert!(exe.fails(args, 10).contains("needs sse2,avx1024; missing avx1024"));
    }
    exe.ok(&["info"]);
    exe.ok(&["verify"]);
}

#[test]
fn a_damaged_file_is_refused() {
    let exe = build("damage", Variant::default());
    let good = fs::read(&exe.path).unwrap();
    let header_at = good.windows(8).rposition(|w| w == PAYLOAD_MAGIC).unwrap();
    // Cut in the weights, in the header, in front of it, and everywhere in code, constants and variables, from behind what checks it.
    let loaded = linked(Task::Generate).len();
    let cuts = [good.len() - 1, good.len() - WEIGHTS, header_at + 400, header_at + 10, header_at, good.len() / 2];
    for len in cuts.into_iter().chain((0x2000..loaded).step_by(loaded / 61)) {
        place(&exe.path, &good[..len]);
        let error = exe.fails(&["info"], 9);
        assert!(error.contains(&format!("counter: truncated, expected {} bytes, found {len}\n", good.len())), "{error}");
    }
    let manifest_at = header_at + size_of::<PayloadHeader>();
    let template_at = good.windows(6).rposition(|w| w == b"endfor").unwrap();
    for (at, part) in [(header_at + 40, "header"), (manifest_at + 5, "manifest"), (template_at, "blobs")] {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        place(&exe.path, &bad);
        assert!(exe.fails(&["info"], 9).contains(part));
    }
    // Everything that is loaded, in memory as in the file: a step, the C library's start, what it relocates with, constants, variables.
    place(&exe.path, &good);
    let code = ["rc_step_step_8", "_start", "__libc_start_main"].map(|symbol| symbol_offset(&exe.path, symbol).unwrap() + 1);
    let data = ["rc_test_constant", "rc_test_variable"].map(|text| good.windows(16).position(|w| w == text.as_bytes()).unwrap());
    let sections = [".relr.dyn", ".rela.dyn", ".data.rel.ro", ".got", ".init_array"];
    let sections = sections.into_iter().filter_map(|name| section_offset(&exe.path, name));
    let places: Vec<usize> = code.into_iter().chain(data).chain(sections).collect();
    assert!(places.len() >= 8, "{places:?}");
    for at in places {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        place(&exe.path, &bad);
        let error = exe.fails(&["info"], 9);
        assert!(error.contains("counter: code, constants or variables: hash differs\n"), "{at:#x} {error}");
    }
    // Weights are checked by verify alone.
    let mut bad = good.clone();
    let last = bad.len() - WEIGHTS / 2;
    bad[last] ^= 1;
    place(&exe.path, &bad);
    exe.ok(&["info"]);
    assert_eq!(exe.ok(&["generate", "--tokens", "1", "-n", "2", "--no-stream"]), "cd\n", "weights were read at start");
    assert!(exe.fails(&["verify"], 9).contains("weights"));
    // strip moves parts of the file around; the payload stays whole.
    for strip in ["strip", "llvm-strip-19"] {
        place(&exe.path, &good);
        if Command::new(strip).arg(&exe.path).status().is_ok_and(|s| s.success()) {
            assert_eq!(exe.ok(&["generate", "--tokens", "1", "-n", "2", "--no-stream"]), "cd\n", "{strip}");
            exe.ok(&["verify"]);
        }
    }
}

/// Hashes have no key: who can write an executable can write a manifest that fits them.
#[test]
fn a_manifest_that_no_build_writes_is_refused() {
    let exe = build("impossible", Variant { no_slots: true, ..Variant::default() });
    for args in [&["info"][..], &["verify"], &["generate", "--tokens", "1"], &["--help"]] {
        assert!(exe.fails(args, 9).contains("counter: manifest: no build has written it"));
    }
}

/// Without `/proc`, and started by a handle: there is no path to the file, but the kernel says which of its pages are there.
#[test]
fn a_cut_file_without_a_path_is_refused() {
    let exe = build("nowhere", Variant::default());
    let good = fs::read(&exe.path).unwrap();
    let folder = CString::new(exe.path.parent().unwrap().as_os_str().as_bytes()).unwrap();
    let run = |bytes: &[u8]| {
        place(&exe.path, bytes);
        let file = fs::File::open(&exe.path).unwrap();
        let folder = folder.clone();
        let mut command = Command::new("true");
        // SAFETY: between fork and exec only system calls are made, on what was there before.
        unsafe {
            command.pre_exec(move || {
                if libc::chroot(folder.as_ptr()) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                let args = [c"nowhere".as_ptr(), c"info".as_ptr(), std::ptr::null()];
                libc::fexecve(file.as_raw_fd(), args.as_ptr(), [std::ptr::null()].as_ptr());
                Err(std::io::Error::last_os_error())
            });
        }
        command.output()
    };
    match run(&good) {
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => return eprintln!("skipped: only root changes the root directory"),
        output => assert!(output.unwrap().status.success()),
    }
    for len in [good.len() - 2 * 4096, good.len() / 2, linked(Task::Generate).len() / 2] {
        let output = run(&good[..len]).unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(9), "{len}: {error}");
        assert!(error.contains(&format!(": truncated, expected {} bytes, found fewer\n", good.len())), "{error}");
    }
}

/// File offset of a section, if there is one.
fn section_offset(path: &Path, name: &str) -> Option<usize> {
    let output = Command::new("readelf").args(["-SW"]).arg(path).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    // [ 4] .relr.dyn RELR 0000000000000a88 000a88 000040 ...
    let mut fields = text.lines().find_map(|l| l.split_once(&format!("] {name} ")))?.1.split_whitespace().skip(2);
    usize::from_str_radix(fields.next()?, 16).ok()
}

/// File offset of a symbol in code, whose segment lies at its own address in the file.
fn symbol_offset(path: &Path, symbol: &str) -> Option<usize> {
    let output = Command::new("nm").arg(path).output().ok()?;
    let line = String::from_utf8(output.stdout).ok()?;
    let line = line.lines().find(|l| l.ends_with(&format!(" {symbol}")))?.to_owned();
    usize::from_str_radix(line.split_whitespace().next()?, 16).ok()
}

#[test]
fn weights_may_lie_beside() {
    let exe = build("split", Variant { split: true, ..Variant::default() });
    for flags in [&[][..], &["--copy-weights"]] {
        assert_eq!(exe.ok(&[&["generate", "-p", "ab", "-n", "2"], flags].concat()), "cd\n");
    }
    exe.ok(&["verify"]);
    // They are mapped once, however many sessions read them.
    let script = ["-c", "ulimit -v 400000; exec \"$0\" bench -p 0 -n 1 -r 1 -t \"$1\""];
    let many = Command::new("sh").args(script).arg(&exe.path).arg(["1"; 100].join(",")).output().unwrap();
    assert!(many.status.success(), "{many:?}");
    let weights = exe.path.with_file_name("counter.weights");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[1..]).unwrap();
    assert!(exe.fails(&["generate", "-p", "ab"], 9).contains("truncated"));
    // As long, but of another build, which its hash says at once.
    let mut other = bytes.clone();
    *other.last_mut().unwrap() ^= 1;
    fs::write(&weights, &other).unwrap();
    assert!(exe.fails(&["generate", "-p", "ab"], 9).contains("of another build"));
    fs::write(&weights, [&bytes[..], b"x"].concat()).unwrap();
    assert!(exe.fails(&["generate", "-p", "ab"], 9).contains("length"));
    // What is read is not hashed at each start, but by `verify`.
    let mut other = bytes.clone();
    other[0] ^= 1;
    fs::write(&weights, &other).unwrap();
    assert!(exe.fails(&["verify"], 9).contains("counter.weights: weights: hash differs"));
    fs::remove_file(&weights).unwrap();
    assert!(exe.fails(&["generate", "-p", "ab"], 3).contains("help: the weights file lies beside the executable"));
    exe.ok(&["info"]);
    // A pipe that nobody writes to, and a folder.
    assert!(Command::new("mkfifo").arg(&weights).status().unwrap().success());
    assert!(exe.fails(&["generate", "-p", "ab"], 3).contains("counter.weights: not a regular file"));
    fs::remove_file(&weights).unwrap();
    fs::create_dir(&weights).unwrap();
    assert!(exe.fails(&["generate", "-p", "ab"], 3).contains("counter.weights: not a regular file"));
    fs::remove_dir(&weights).unwrap();
    // There, but not to be opened.
    std::os::unix::fs::symlink(&weights, &weights).unwrap();
    let error = exe.fails(&["generate", "-p", "ab"], 3);
    assert!(error.contains("counter.weights: cannot be read: ") && !error.contains("lies beside"), "{error}");
}

#[test]
fn no_room_for_the_weights_is_no_missing_file() {
    let exe = build("room", Variant { split: true, ..Variant::default() });
    // As if it had been built with weights of 1 TiB, all of it holes.
    let mut bytes = fs::read(&exe.path).unwrap();
    let at = bytes.windows(8).rposition(|w| w == PAYLOAD_MAGIC).unwrap();
    let place_of_header = bytes[at..].first_chunk_mut().unwrap();
    let mut header = PayloadHeader { weights_len: 1 << 40, ..PayloadHeader::from_bytes(place_of_header) };
    header.header_hash = *blake3::hash(header.without_hash().as_bytes()).as_bytes();
    *place_of_header = *header.as_bytes();
    place(&exe.path, &bytes);
    let weights = fs::File::create(exe.path.with_file_name("counter.weights")).unwrap();
    weights.set_len(header.weights_len + WEIGHTS_HASH_BYTES).unwrap();
    let script = ["-c", "ulimit -v 400000; exec \"$0\" generate --tokens 1"];
    let run = Command::new("sh").args(script).arg(&exe.path).output().unwrap();
    let error = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(7), "{error}");
    assert!(
        error.starts_with("error[E7-memory]: memory: ") && error.contains("counter.weights: needs 1048577 MiB of addresses"),
        "{error}"
    );
}

/// Runs the executable with signals that end a process: what is ignored, as by `nohup` and by jobs of a shell's background, stays ignored.
fn with_default(exe: &Exe, signals: &str) -> Command {
    let mut command = Command::new("env");
    command.arg(format!("--default-signal={signals}")).arg(&exe.path);
    command
}

#[test]
fn control_c_ends_with_130() {
    let exe = build("signal", Variant::default());
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let mut chat = with_default(&exe, "INT,TERM").arg("chat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        chat.stdin.as_mut().unwrap().write_all(b"a\n").unwrap();
        let mut line = String::new();
        std::io::BufReader::new(chat.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "bcdefghij\n");
        assert!(Command::new("kill").args([signal, &chat.id().to_string()]).status().unwrap().success());
        assert_eq!(chat.wait().unwrap().code(), Some(code));
    }
}

/// Names beside the executable.
fn names(exe: &Exe) -> Vec<String> {
    let entries = fs::read_dir(exe.path.parent().unwrap()).unwrap().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A text of `windows` windows of 10 tokens beside the executable.
fn text_beside(exe: &Exe, windows: usize) -> PathBuf {
    let text = exe.path.with_file_name("text");
    fs::write(&text, "abcdefghij".repeat(windows)).unwrap();
    text
}

#[test]
fn outputs_never_replace_what_is_read() {
    let exe = build("inputs", Variant { split: true, ..Variant::default() });
    let text = text_beside(&exe, 2);
    let (weights, hard, soft) = (exe.path.with_extension("weights"), exe.path.with_file_name("hard"), exe.path.with_file_name("soft"));
    fs::hard_link(&exe.path, &hard).unwrap();
    std::os::unix::fs::symlink("text", &soft).unwrap();
    let before = [&exe.path, &weights, &text].map(|path| fs::read(path).unwrap());
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    for output in [&text, &soft, &exe.path, &hard, &weights] {
        let error = exe.fails(&["perplexity", "-f", &path(&text), "-c", "10", "--logits", &path(output)], 8);
        assert!(error.contains(&format!("{}: is an input of this run, expected another file", path(output))), "{error}");
    }
    for output in [&exe.path, &hard, &weights] {
        assert!(exe.fails(&["profile", "--trace", &path(output)], 8).contains("is an input of this run"));
    }
    // Through handles that the shell opened.
    let run = |args: &[&str], stdin: Stdio, stdout: Stdio| {
        let output = exe.command(args).stdin(stdin).stdout(stdout).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let from_stdin = ["perplexity", "-f", "-", "-c", "10", "--logits", &path(&text)];
    let (code, error) = run(&from_stdin, fs::File::open(&text).unwrap().into(), Stdio::piped());
    assert!(code == Some(8) && error.contains("is an input of this run"), "{error}");
    let report = exe.path.with_file_name("report");
    let to_stdout = ["perplexity", "-f", &path(&text), "-c", "10", "--logits", "/dev/stdout"];
    let (code, error) = run(&to_stdout, Stdio::null(), fs::File::create(&report).unwrap().into());
    assert!(code == Some(8) && error.contains("is where stdout goes"), "{error}");
    assert!(before == [&exe.path, &weights, &text].map(|path| fs::read(path).unwrap()));
    assert_eq!(names(&exe), ["counter", "counter.weights", "hard", "report", "soft", "text"]);
}

#[test]
fn logits_are_written_whole_or_not_at_all() {
    let exe = build("whole", Variant::default());
    let text = text_beside(&exe, 2);
    let logits = exe.path.with_file_name("logits");
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let args = ["perplexity", "-f", &path(&text), "-c", "10", "--logits", &path(&logits)];
    let whole = 24 + 18 * (8 + 4 * 11);
    exe.ok(&args);
    assert_eq!(fs::metadata(&logits).unwrap().len(), whole);
    // An old file stays until the new one is whole, also where `ulimit -f` (in blocks of 512 bytes) ends it.
    let limited = Command::new("sh").args(["-c", "ulimit -f 1; exec \"$0\" \"$@\""]).arg(&exe.path).args(args).output().unwrap();
    let error = String::from_utf8(limited.stderr).unwrap();
    assert!(limited.status.code() == Some(8) && error.contains("logits: File too large"), "{error}");
    assert_eq!(fs::metadata(&logits).unwrap().len(), whole);
    assert_eq!(names(&exe), ["counter", "logits", "text"]);
    // What is no file is written to.
    let piped = exe.command(&[&args[..6], &["/dev/fd/1"]].concat()).stdout(Stdio::piped()).output().unwrap();
    assert!(piped.status.success() && piped.stdout.len() as u64 > whole, "{piped:?}");
    assert_eq!(piped.stdout[..whole as usize], fs::read(&logits).unwrap());
    // So is what is open, also where it has no name any more; a link is followed, and a file keeps its permissions.
    let gone = exe.path.with_file_name("gone");
    let opened = fs::File::create_new(&gone).unwrap();
    fs::remove_file(&gone).unwrap();
    let mut reader = fs::File::open(format!("/proc/self/fd/{}", opened.as_raw_fd())).unwrap();
    let shell = ["-c", "exec \"$0\" \"$@\" 5>&0 0</dev/null"];
    let out = Command::new("sh").args(shell).arg(&exe.path).args(&args[..6]).arg("/dev/fd/5").stdin(opened).output().unwrap();
    let mut bytes = vec![];
    reader.read_to_end(&mut bytes).unwrap();
    assert!(out.status.success() && bytes == fs::read(&logits).unwrap(), "{out:?}");
    let link = exe.path.with_file_name("link");
    std::os::unix::fs::symlink("new", &link).unwrap();
    fs::set_permissions(&logits, fs::Permissions::from_mode(0o600)).unwrap();
    exe.ok(&[&args[..6], &[link.to_str().unwrap()]].concat());
    exe.ok(&args);
    assert!(fs::read_link(&link).is_ok() && fs::metadata(link.with_file_name("new")).unwrap().len() == whole);
    assert_eq!(fs::metadata(&logits).unwrap().permissions().mode() & 0o777, 0o600);
    exe.ok(&[&args[..6], &["/dev/null"]].concat());
    assert!(exe.fails(&[&args[..6], &["/nowhere/logits"]].concat(), 8).contains("/nowhere/logits: No such file"));
    assert!(exe.fails(&[&args[..6], &["/tmp/"]].concat(), 8).contains("/tmp/: Is a directory"));
}

/// A machine that loses power right behind the rename would have a name without contents.
#[test]
fn a_file_is_on_the_disk_before_it_gets_its_name() {
    let there = Command::new("strace").args(["-o", "/dev/null", "true"]).stderr(Stdio::null()).status().is_ok_and(|s| s.success());
    assert!(there || std::env::var_os("CI").is_none(), "strace is missing or may not trace, and on CI nothing is skipped");
    if !there {
        return eprintln!("skipped: no strace");
    }
    let exe = build("disk", Variant::default());
    let (text, log, logits) = (text_beside(&exe, 2), exe.path.with_file_name("log"), exe.path.with_file_name("logits"));
    let mut command = Command::new("strace");
    command.args(["-f", "-y", "-e", "trace=write,fsync,rename,renameat,renameat2", "-o"]).arg(&log).arg(&exe.path);
    let output = command.args(["perplexity", "-c", "10", "-f"]).arg(&text).arg("--logits").arg(&logits).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let log = fs::read_to_string(log).unwrap();
    // `pid call(arguments) = result`, with the path of each open file.
    let calls = log.lines().filter(|line| line.contains("/.rcompile-") && line.ends_with(|c: char| c.is_ascii_digit()));
    let mut calls: Vec<&str> = calls.filter_map(|line| line.split_whitespace().nth(1)?.split('(').next()).collect();
    calls.dedup();
    assert!(matches!(calls[..], ["write", "fsync", name] if name.starts_with("rename")), "{log}");
}

/// Until there is a third file beside executable and text.
fn wait_for_draft(exe: &Exe) {
    let begin = Instant::now();
    while names(exe).len() == 2 {
        assert!(begin.elapsed() < Duration::from_secs(60), "no output was begun");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_signal_leaves_no_part_of_a_file() {
    let exe = build("part", Variant::default());
    let text = text_beside(&exe, 2_000_000);
    let path = text.to_str().unwrap();
    let logits = exe.path.with_file_name("logits");
    for (signal, code) in [(Signal::INT, 130), (Signal::HUP, 129)] {
        let args = ["perplexity", "-f", path, "-c", "10", "--quiet", "--logits", logits.to_str().unwrap()];
        let mut run = with_default(&exe, "INT,HUP").args(args).stdout(Stdio::null()).spawn().unwrap();
        wait_for_draft(&exe);
        // It stands still while this process looks, however long that takes on a busy machine.
        let send = |signal| kill_process(Pid::from_child(&run), signal).unwrap();
        send(Signal::STOP);
        assert!(names(&exe)[0].starts_with(".rcompile-"), "{:?}", names(&exe));
        send(signal);
        send(Signal::CONT);
        assert_eq!(run.wait().unwrap().code(), Some(code));
        assert_eq!(names(&exe), ["counter", "text"]);
    }
}

/// Also by those signals that end a process as they always do.
#[test]
fn a_rare_signal_leaves_no_part_of_a_file() {
    let exe = build("rare", Variant::default());
    let text = text_beside(&exe, 200_000);
    let logits = exe.path.with_file_name("logits");
    let args = ["perplexity", "-f", text.to_str().unwrap(), "-c", "10", "--quiet", "--logits", logits.to_str().unwrap()];
    let from_outside = [libc::SIGQUIT, libc::SIGALRM, libc::SIGUSR1, libc::SIGUSR2, libc::SIGXCPU, libc::SIGVTALRM, libc::SIGPROF];
    let by_itself = [libc::SIGABRT, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];
    let others = [libc::SIGIO, libc::SIGPWR, libc::SIGSTKFLT, libc::SIGRTMIN(), libc::SIGRTMAX()];
    for signal in from_outside.into_iter().chain(by_itself).chain(others) {
        let script = ["-c", "ulimit -c 0; exec env --default-signal \"$0\" \"$@\""];
        let mut run = Command::new("sh").args(script).arg(&exe.path).args(args).stdout(Stdio::null()).spawn().unwrap();
        wait_for_draft(&exe);
        // SAFETY: a child that is not waited for yet.
        assert_eq!(unsafe { libc::kill(run.id() as i32, signal) }, 0, "{signal}");
        assert_eq!(run.wait().unwrap().signal(), Some(signal));
        assert_eq!(names(&exe), ["counter", "text"], "{signal}");
    }
}

#[test]
fn no_memory_is_an_error_and_leaves_no_part_of_a_file() {
    let exe = build("memory", Variant::default());
    let text = text_beside(&exe, 2_000_000);
    let logits = exe.path.with_file_name("logits");
    let args = ["perplexity", "-f", text.to_str().unwrap(), "-c", "10", "--quiet", "--logits", logits.to_str().unwrap()];
    let script = ["-c", "ulimit -c 0; ulimit -v 600000; exec \"$0\" \"$@\""];
    let run = Command::new("sh").args(script).arg(&exe.path).args(args).output().unwrap();
    let error = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(7), "{error}");
    assert!(error.starts_with("error[E7-memory]: ") && error.matches("error").count() == 1, "{error}");
    assert_eq!(names(&exe), ["counter", "text"]);
}

/// Reading, cutting into lines and encoding: each takes more than the group has.
#[test]
fn inputs_beyond_the_control_group_are_an_error() {
    if fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1) {
        return eprintln!("skipped: what exceeds the limit is swapped out here");
    }
    let Some(group) = control_group::ControlGroup::new(&["memory"], &[("memory.limit_in_bytes", 64 << 20)]) else { return };
    let (decoder, encoder) = (build("group", Variant::default()), build("group-embed", Variant { embeds: true, ..Variant::default() }));
    let zeros = decoder.path.with_file_name("zeros");
    fs::File::create(&zeros).unwrap().set_len(200 << 20).unwrap();
    let lines = encoder.path.with_file_name("lines");
    fs::write(&lines, vec![b'\n'; 20 << 20]).unwrap();
    let (zeros, lines) = (zeros.to_str().unwrap(), lines.to_str().unwrap());
    for (exe, args, stdin) in [
        (&decoder, &["generate", "-f", zeros][..], "/dev/null"),
        (&decoder, &["generate", "--chat", "-f", zeros], "/dev/null"),
        (&decoder, &["logits", "-f", "-"], zeros),
        (&decoder, &["perplexity", "-f", zeros], "/dev/null"),
        (&decoder, &["tokenize", "-f", "-"], zeros),
        (&decoder, &["chat"], zeros),
        (&encoder, &["embed", "-f", zeros], "/dev/null"),
        (&encoder, &["embed", "-f", lines], "/dev/null"),
        (&encoder, &["embed", "-f", "-"], lines),
    ] {
        let output = group.command(&exe.path).args(args).stdin(fs::File::open(stdin).unwrap()).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(7), "{args:?}: {error}");
        assert!(error.starts_with("error[E7-memory]: memory: the process: has none left") && error.lines().count() == 2, "{error}");
    }
    // What can be read, but not copied as often as a template does.
    fs::File::options().write(true).open(zeros).unwrap().set_len(20 << 20).unwrap();
    for (args, stdin) in [(&["generate", "--chat", "-f", zeros][..], "/dev/null"), (&["chat"], zeros)] {
        let output = group.command(&decoder.path).args(args).stdin(fs::File::open(stdin).unwrap()).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(7), "{args:?}: {error}");
        assert!(error.starts_with("error[E7-memory]: memory: the chat template: needs 168 MiB more, the control group has "), "{error}");
    }
}

#[test]
fn closed_standard_files_stay_out_of_others() {
    let exe = build("closed", Variant::default());
    let text = text_beside(&exe, 200_000);
    let logits = exe.path.with_file_name("logits");
    let args = ["perplexity", "-f", text.to_str().unwrap(), "-c", "10", "--logits", logits.to_str().unwrap()];
    let script = ["-c", "exec \"$0\" \"$@\" <&- >&- 2>&-"];
    let mut run = Command::new("sh").args(script).arg(&exe.path).args(args).spawn().unwrap();
    wait_for_draft(&exe);
    for fd in 0..=2 {
        let file = fs::read_link(format!("/proc/{}/fd/{fd}", run.id())).unwrap();
        assert_eq!(file, Path::new("/dev/null"), "{fd}");
    }
    run.kill().unwrap();
    run.wait().unwrap();
}

/// A vector that is longer than its row: a mistake of ours on every thread that works for itself.
#[test]
fn a_panic_on_any_thread_is_one_line() {
    let exe = build("panic", Variant { embeds: true, hidden_size: Some(1 << 20), ..Variant::default() });
    let lines = exe.path.with_file_name("lines");
    fs::write(&lines, "abcdef\n".repeat(8)).unwrap();
    for threads in ["1", "2", "4"] {
        let error = exe.fails(&["embed", "-t", threads, "-f", lines.to_str().unwrap()], 70);
        assert!(error.contains("E70-internal") && error.contains("please report"), "{threads}: {error}");
    }
}

#[test]
fn a_small_stack_is_made_larger_or_refused() {
    let exe = build("stack", Variant::default());
    let run = |script: &str| {
        let output = Command::new("bash").args(["-c", &format!("{script}; exec \"$0\" generate -p abc -n 2 -t 2")]).arg(&exe.path).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(run("ulimit -S -s 128"), (Some(0), "de\n".into(), String::new()));
    assert_eq!(run("ulimit -S -s hard"), (Some(0), "de\n".into(), String::new()));
    // Who may raise every limit may also raise this one.
    let mut command = exe.command(&["generate", "-p", "abc", "-n", "2"]);
    // SAFETY: between fork and exec only system calls are made.
    unsafe {
        command.pre_exec(|| {
            const CAP_SYS_RESOURCE: libc::c_ulong = 24;
            libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0);
            let limit = libc::rlimit { rlim_cur: 128 << 10, rlim_max: 128 << 10 };
            if libc::setrlimit(libc::RLIMIT_STACK, &raw const limit) == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    let output = command.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    let expected = "error[E7-stack]: stack: expected 2048 KiB, found 128 KiB\nhelp: raise its limit: ulimit -s 2048\n";
    assert_eq!((output.status.code(), error.as_str()), (Some(7), expected));
}

#[test]
fn names_cannot_move_the_cursor() {
    let exe = build("names", Variant { input: Some("a\u{1b}[2J\nb"), ..Variant::default() });
    let info = exe.ok(&["info"]);
    assert!(info.contains(r" a\u{1b}[2J\nb ") && !info.contains('\u{1b}'), "{info}");
}

/// A handler that is there for a moment would end a process that is to go on.
#[test]
fn an_ignored_signal_never_has_a_handler() {
    let there = Command::new("strace").args(["-o", "/dev/null", "true"]).stderr(Stdio::null()).status().is_ok_and(|s| s.success());
    if !there {
        return eprintln!("skipped: no strace");
    }
    let exe = build("handler", Variant::default());
    let log = exe.path.with_file_name("log");
    let script = "trap '' HUP; exec strace -e trace=rt_sigaction -o \"$1\" \"$0\" info";
    assert!(Command::new("sh").args(["-c", script]).args([&exe.path, &log]).stdout(Stdio::null()).status().unwrap().success());
    let log = fs::read_to_string(log).unwrap();
    let set = |signal: &str| log.lines().any(|line| line.starts_with(&format!("rt_sigaction({signal}, {{sa_handler=0x")));
    assert!(set("SIGALRM") && !set("SIGHUP"), "{log}");
}

#[test]
fn time_before_exec_does_not_count() {
    let exe = build("entry", Variant::default());
    let script = "sleep 1; exec \"$0\" generate --tokens 1 --json -n 1";
    let run = Command::new("sh").args(["-c", script]).arg(&exe.path).output().unwrap();
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert!(report["timings"]["load_ms"].as_f64().unwrap() < 1000.0, "{report}");
}

/// A script that ignores a signal means it for what it starts, too.
#[test]
fn signals_that_were_ignored_stay_ignored() {
    let exe = build("ignored", Variant::default());
    let mut chat = Command::new("sh")
        .args(["-c", "trap '' INT TERM HUP; exec \"$0\" chat"])
        .arg(&exe.path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (pid, mut stdin) = (chat.id().to_string(), chat.stdin.take().unwrap());
    let mut answers = std::io::BufReader::new(chat.stdout.take().unwrap());
    let mut said = |line: &[u8]| {
        stdin.write_all(line).unwrap();
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        answer
    };
    assert_eq!(said(b"a\n"), "bcdefghij\n");
    for signal in ["-INT", "-TERM", "-HUP"] {
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }
    assert_eq!(said(b"h\n"), "ij\n");
    drop(stdin);
    assert!(chat.wait().unwrap().success());
}

/// The kernel reserves the room from the first segment to the last, which `ulimit -v` counts whether it is used or not.
#[test]
fn little_address_space_is_enough() {
    let exe = build("little", Variant::default());
    let run = Command::new("sh").args(["-c", "ulimit -v 400000; exec \"$0\" info"]).arg(&exe.path).output().unwrap();
    assert!(run.status.success(), "{run:?}");
}
