//! What is inside an executable: the step functions call exactly the regions of the program text, and the runtime archive brings no kernel.
//!
//! In: the objects, the archive and the program text of a build (`--save-temps --emit exe,program`). Calls are read from the relocations
//! of the step objects, which LLVM cannot inline anything into: every kernel is an object of its own.

use object::read::archive::ArchiveFile;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionKind};
use rcompile_tests::exe::rcompile;
use rcompile_tests::golden;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What the archive may define for generated code and the entry stub (abi.rs, templates/stub.c).
const RUNTIME_SYMBOLS: [&str; 3] = ["rc_barrier", "rc_main", "rc_profile"];

/// Models of every kind of entry: tied llama layers, two kinds of layers, learned positions, an encoder.
const MODELS: [&str; 4] = ["llama-gqa-tied", "qwen2-window", "gpt2-gelu", "bert"];

struct Built {
    dir: tempfile::TempDir,
}

impl Built {
    fn new(model: &str) -> Built {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = |name: &str| dir.path().join(name).display().to_string();
        let emit = format!("exe,program={}", path("program"));
        let model = golden(model).display().to_string();
        let (out, buckets) = (path("exe"), "1,8");
        let args =
            ["--no-tokenizer", "--buckets", buckets, "--cpu", "x86-64-v3", "--save-temps", "--emit", &emit, "--model", &model, "-o", &out];
        rcompile(args).unwrap_or_else(|e| panic!("{model}: {e}"));
        Built { dir }
    }
    fn temps(&self) -> PathBuf {
        self.dir.path().join("exe.temps")
    }
    /// Symbol (the file's name) -> bytes.
    fn objects(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = std::fs::read_dir(self.temps()).expect("temps").map(|e| e.expect("entry").path());
        let objects = entries.filter(|p| p.extension().is_some_and(|e| e == "o") && stem(p).starts_with("rc_"));
        objects.map(|p| (stem(&p), std::fs::read(p).expect("object"))).collect()
    }
    /// Program texts by step symbol.
    fn programs(&self) -> BTreeMap<String, String> {
        let text = std::fs::read_to_string(self.dir.path().join("program")).expect("program text");
        let mut programs = BTreeMap::new();
        for program in text.split("program @").skip(1) {
            let (name, _) = program.split_once(' ').expect("name");
            programs.insert(format!("rc_step_{}", name.replace('.', "_")), program.to_string());
        }
        programs
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Targets of the relocations in executable sections, in order of their place; calls within the object are not among them.
fn calls(object: &[u8]) -> Vec<String> {
    let file = object::File::parse(object).expect("object");
    let mut all = Vec::new();
    for section in file.sections().filter(|s| s.kind() == SectionKind::Text) {
        let mut relocations: Vec<_> = section.relocations().collect();
        relocations.sort_by_key(|r| r.0);
        for (_, relocation) in relocations {
            let RelocationTarget::Symbol(index) = relocation.target() else { continue };
            let symbol = file.symbol_by_index(index).expect("symbol");
            if symbol.is_undefined() {
                all.push(symbol.name().expect("name").to_string());
            }
        }
    }
    all
}

/// Lines of the body: region names, `barrier`, and `layers N {` .. `}`.
fn body(program: &str) -> Vec<&str> {
    let (_, body) = program.split_once("  body {\n").expect("body");
    body.lines().map(str::trim).collect()
}

/// `r3 layers.o_proj` -> (3, "layers.o_proj")
fn regions(program: &str) -> BTreeMap<usize, &str> {
    let region = |l: &str| l.strip_prefix('r')?.split_once(' ').and_then(|(n, _)| n.parse::<usize>().ok());
    body(program).into_iter().filter_map(|l| Some((region(l)?, l.split_once(' ')?.1))).collect()
}

/// How symbols of functions begin that several kernels call.
const PARTS: [&str; 2] = ["rc_rows_", "rc_pairs_"];

fn word(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

#[test]
fn calls_of_a_step_are_the_regions_of_its_program() {
    for model in MODELS {
        let built = Built::new(model);
        let objects = built.objects();
        let programs = built.programs();
        assert_eq!(programs.len(), 2, "{model}: {:?}", programs.keys());
        let mut called = BTreeSet::new();
        for (step, program) in &programs {
            let calls = calls(objects.get(step).unwrap_or_else(|| panic!("{model}: no object {step}")));
            let kernels: BTreeSet<&String> = calls.iter().filter(|c| !["rc_barrier", "rc_profile"].contains(&c.as_str())).collect();
            let names: BTreeSet<&str> = regions(program).into_values().collect();
            for name in &names {
                let part = format!("_{}_", word(name));
                assert!(kernels.iter().any(|k| k.contains(&part)), "{model} {step}: region {name} is not called: {kernels:?}");
            }
            for kernel in &kernels {
                let of_region = names.iter().any(|n| kernel.contains(&format!("_{}_", word(n))));
                assert!(kernel.starts_with("rc_") && of_region, "{model} {step}: {kernel} is no region");
                assert!(objects.contains_key(*kernel), "{model} {step}: {kernel} is not made in this build");
            }
            assert!(kernels.len() <= regions(program).len(), "{model} {step}: {kernels:?}");
            // LLVM writes the loop over layers out where it is short, and copies what follows a test of `ctx.profile`; so calls of one
            // place in the text may be several in the code, never fewer.
            let count = calls.iter().filter(|c| *c == "rc_barrier").count();
            assert!(barriers(program) > 0 && count >= barriers(program), "{model} {step}: {count} calls of rc_barrier");
            assert!(calls.iter().any(|c| c == "rc_profile"), "{model} {step}");
            called.extend(kernels.into_iter().cloned());
        }
        // Nothing is compiled that nobody calls (probes are called through the table of steps), and kernels call nothing but helpers inside
        // their object and functions that are made once for several of them, which call nothing by name.
        let is_part = |symbol: &str| PARTS.iter().any(|part| symbol.starts_with(part));
        for (symbol, object) in objects.iter().filter(|(symbol, _)| called.contains(*symbol)).collect::<Vec<_>>() {
            for callee in calls(object) {
                assert!(is_part(&callee) && objects.contains_key(&callee), "{model}: {symbol} calls {callee}");
                called.insert(callee);
            }
        }
        for (symbol, object) in &objects {
            if symbol.starts_with("rc_probe_") || is_part(symbol) {
                assert_eq!(calls(object), [""; 0], "{model}: {symbol} calls something");
            }
            let by_table = symbol.starts_with("rc_probe_") || symbol.starts_with("rc_step_");
            assert!(by_table || called.contains(symbol), "{model}: {symbol} is never called");
        }
        assert!(called.iter().any(|symbol| is_part(symbol)), "{model}: {called:?}");
    }
}

/// Barriers in the text.
fn barriers(program: &str) -> usize {
    body(program).into_iter().filter(|l| *l == "barrier").count()
}

#[test]
fn at_most_five_barriers_per_decoder_layer_at_bucket_1() {
    let built = Built::new("llama-gqa-tied");
    let programs = built.programs();
    let lines = body(&programs["rc_step_step_1"]);
    let start = lines.iter().position(|l| l.starts_with("layers ")).expect("a loop over layers");
    let layer = lines[start..].iter().take_while(|l| **l != "}");
    let count = layer.filter(|l| **l == "barrier").count();
    assert!((1..=5).contains(&count), "{count} barriers");
}

#[test]
fn the_runtime_archive_holds_no_kernel() {
    let built = Built::new("llama-gqa-tied");
    let bytes = std::fs::read(built.temps().join("runtime.a")).expect("runtime.a");
    let archive = ArchiveFile::parse(&*bytes).expect("archive");
    let mut defined = BTreeSet::new();
    let mut wanted = BTreeSet::new();
    for member in archive.members() {
        let member = member.expect("member");
        let Ok(file) = object::File::parse(member.data(&*bytes).expect("data")) else { continue };
        for symbol in file.symbols() {
            let name = symbol.name().unwrap_or_default().to_string();
            if symbol.is_undefined() {
                _ = name.starts_with("rc_") && wanted.insert(name);
            } else if symbol.is_global() && name.starts_with("rc_") {
                defined.insert(name);
            }
        }
    }
    assert_eq!(defined.iter().map(String::as_str).collect::<Vec<_>>(), RUNTIME_SYMBOLS);
    // It finds generated code through the table that it is given, never by name.
    let missing: Vec<&String> = wanted.difference(&defined).collect();
    assert!(missing.is_empty(), "{missing:?}");
    for kernel in built.objects().keys() {
        assert!(!defined.contains(kernel));
    }
}

/// A frame of more than a page is made page by page, each of them touched: no `sub $n, %rsp` is longer.
#[test]
fn no_frame_steps_over_a_guard_page() {
    let mut frames = 0;
    for model in MODELS {
        for (name, bytes) in Built::new(model).objects() {
            let file = object::File::parse(&*bytes).expect("object");
            for section in file.sections().filter(|s| s.kind() == SectionKind::Text) {
                let code = section.data().expect("code");
                for sub in code.windows(7).filter(|w| w.starts_with(&[0x48, 0x81, 0xec])) {
                    let frame = u32::from_le_bytes(*sub.last_chunk().expect("four bytes"));
                    assert!(frame <= 4096, "{model}: {name} takes {frame} bytes of stack at once");
                    frames += 1;
                }
            }
        }
    }
    assert!(frames > 100, "{frames}: the instruction is spelled otherwise");
}

/// The same on Arm: `sub sp, sp, #1, lsl #12` is a page, and `str xzr, [sp]` behind it touches it, or, in a loop, once `cmp sp, x9` has said
/// that there are more.
#[test]
fn no_frame_steps_over_a_guard_page_on_arm() {
    let mut pages = 0;
    for cpu in ["neoverse-n1", "neoverse-v1"] {
        let dir = tempfile::tempdir().expect("temporary directory");
        let (emit, model) = (format!("obj={}", dir.path().display()), golden("bert").display().to_string());
        let target = ["--target", "aarch64-unknown-linux-gnu", "--cpu", cpu];
        rcompile([&["--no-tokenizer", "--buckets", "1,64", "--emit", &emit, "--model", &model][..], &target].concat())
            .unwrap_or_else(|e| panic!("{cpu}: {e}"));
        for entry in std::fs::read_dir(dir.path()).expect("objects") {
            let path = entry.expect("entry").path();
            let bytes = std::fs::read(&path).expect("object");
            let file = object::File::parse(&*bytes).expect("object");
            for section in file.sections().filter(|s| s.kind() == SectionKind::Text) {
                let code = section.data().expect("code").as_chunks::<4>().0;
                for pair in code.windows(2).map(|pair| [0, 1].map(|i| u32::from_le_bytes(pair[i]))) {
                    // An immediate of 12 bits, in pages.
                    if pair[0] & 0xffc0_03ff == 0xd140_03ff {
                        let (count, next) = (pair[0] >> 10 & 0xfff, pair[1]);
                        assert!(count == 1 && [0xf900_03ff, 0xeb29_63ff].contains(&next), "{cpu}: {}: {count}, {next:#x}", stem(&path));
                        pages += 1;
                    }
                }
            }
        }
    }
    assert!(pages >= 2, "{pages}: the instruction is spelled otherwise");
}

/// The generated objects define one symbol each, need nothing of a C library, and are marked for a stack that is not executable.
#[test]
fn objects_are_closed() {
    let built = Built::new("bert");
    for (name, bytes) in built.objects() {
        let file = object::File::parse(&*bytes).expect("object");
        let global: Vec<&str> = file.symbols().filter(|s| s.is_global() && s.is_definition()).filter_map(|s| s.name().ok()).collect();
        assert_eq!(global, [name.as_str()]);
        let needs: Vec<&str> =
            file.symbols().filter(|s| s.is_undefined()).filter_map(|s| s.name().ok()).filter(|n| !n.is_empty()).collect();
        assert!(needs.iter().all(|n| n.starts_with("rc_")), "{name} needs {needs:?}");
        assert!(file.section_by_name(".note.GNU-stack").is_some(), "{name}");
        assert!(file.section_by_name(".data").is_none_or(|s| s.size() == 0), "{name} has writable data");
    }
}
