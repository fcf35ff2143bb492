//! The compile cache through the process: builds with it equal builds without it, whatever happens to its files.

use assert_cmd::cargo::cargo_bin;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama-gqa-tied")
}

/// A model, a cache and outputs in one temporary directory.
struct Case {
    dir: tempfile::TempDir,
}

impl Case {
    fn new() -> Case {
        let case = Case { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(case.path("model")).unwrap();
        for file in fs::read_dir(golden()).unwrap().flatten().filter(|f| f.path().is_file()) {
            fs::copy(file.path(), case.path("model").join(file.file_name())).unwrap();
        }
        case
    }
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    fn command(&self, out: &str, args: &[&str]) -> Command {
        let mut command = Command::new(cargo_bin("rcompile"));
        command.args(["build", "--no-tokenizer", "--cpu", "x86-64-v3", "--json", "--model"]).arg(self.path("model"));
        if !args.contains(&"--buckets") {
            command.args(["--buckets", "1,8"]);
        }
        command.arg("-o").arg(self.path(out)).args(args);
        if !args.contains(&"--no-cache") {
            command.arg("--cache-dir").arg(self.path("cache"));
        }
        command
    }
    /// Builds; returns the report and the executable.
    fn build(&self, out: &str, args: &[&str]) -> (Value, Vec<u8>) {
        let output = self.command(out, args).output().unwrap();
        (report(&output), fs::read(self.path(out)).unwrap())
    }
    /// Entries of the cache, sorted.
    fn entries(&self) -> Vec<PathBuf> {
        let mut list = Vec::new();
        for kind in ["objects", "weights"] {
            let folders = fs::read_dir(self.path("cache").join(kind)).into_iter().flatten().flatten();
            for folder in folders {
                list.extend(fs::read_dir(folder.path()).unwrap().flatten().map(|f| f.path()));
            }
        }
        list.sort();
        list
    }
    fn verb(&self, args: &[&str]) -> Output {
        Command::new(cargo_bin("rcompile")).arg("cache").args(args).arg("--cache-dir").arg(self.path("cache")).output().unwrap()
    }
}

fn report(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON on stdout")
}

fn counts(report: &Value) -> (u64, u64, u64) {
    let count = |name: &str| report["cache"][name].as_u64().unwrap();
    (count("hits"), count("misses"), count("llvm_compilations"))
}

/// Warnings of the cache in a report.
fn warnings(report: &Value) -> Vec<&str> {
    report["warnings"].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).filter(|w| w.contains("[W-cache]")).collect()
}

#[test]
fn the_second_build_calls_no_llvm_and_the_bytes_are_those_of_a_clean_one() {
    let case = Case::new();
    let (clean, expected) = case.build("clean", &["--no-cache"]);
    let units = clean["units"].as_u64().unwrap();
    assert_eq!(counts(&clean), (0, 0, units));
    assert_eq!(clean["cache"]["dir"], Value::Null);
    let (first, bytes) = case.build("first", &[]);
    assert_eq!(counts(&first), (0, units, units));
    assert!(bytes == expected);
    let (second, bytes) = case.build("second", &[]);
    assert_eq!(counts(&second), (units, 0, 0));
    assert!(bytes == expected);
    // Another optimisation level is another object; a larger bucket is only what it adds, where smaller ones keep their places.
    let (other, bytes) = case.build("other", &["-O1"]);
    assert_eq!(counts(&other).0, 0);
    assert!(bytes == case.build("other-clean", &["-O1", "--no-cache"]).1);
    let (more, bytes) = case.build("more", &["--buckets", "1,8,16"]);
    assert!(counts(&more).0 > 0 && counts(&more).2 > 0, "{:?}", counts(&more));
    assert!(bytes == case.build("more-clean", &["--buckets", "1,8,16", "--no-cache"]).1);
    // Texts are made by LLVM each time.
    let (texts, bytes) = case.build("texts", &["--emit", "exe,asm"]);
    assert_eq!(counts(&texts), (0, 0, units));
    assert!(bytes == expected);
}

/// What is in the place of an entry and no file is no entry: it is neither waited for nor kept.
#[test]
fn pipes_and_directories_are_no_entries() {
    let case = Case::new();
    let (_, expected) = case.build("out", &[]);
    let entries = case.entries();
    for path in &entries[..2] {
        fs::remove_file(path).unwrap();
    }
    assert!(Command::new("mkfifo").arg(&entries[0]).status().unwrap().success());
    fs::create_dir(&entries[1]).unwrap();
    let list = case.verb(&["list"]);
    assert!(list.status.success() && String::from_utf8_lossy(&list.stdout).matches("damaged").count() == 2, "{list:?}");
    let (report, bytes) = case.build("again", &[]);
    assert!(bytes == expected && counts(&report).2 == 2 && warnings(&report).len() == 1, "{report}");
    assert_eq!(case.entries(), entries);
    assert_eq!(counts(&case.build("third", &[]).0).2, 0);
    let tag = case.entries()[0].ancestors().nth(3).unwrap().join("CACHEDIR.TAG");
    fs::remove_file(&tag).unwrap();
    assert!(Command::new("mkfifo").arg(&tag).status().unwrap().success());
    let (report, bytes) = case.build("fourth", &[]);
    assert!(bytes == expected && warnings(&report).iter().any(|w| w.contains("CACHEDIR.TAG is no regular file")), "{report}");
}

#[test]
fn a_directory_that_is_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let case = Case::new();
    let dir = case.path("out").with_file_name(std::ffi::OsStr::from_bytes(b"c\xff"));
    for verb in ["list", "clean"] {
        let output = Command::new(cargo_bin("rcompile")).args(["cache", verb, "--json", "--cache-dir"]).arg(&dir).output().unwrap();
        assert!(report(&output)["dir"].as_str().is_some_and(|dir| dir.ends_with('\u{fffd}')), "{output:?}");
    }
}

#[test]
fn a_changed_byte_in_every_entry_is_noticed() {
    let case = Case::new();
    let (first, expected) = case.build("out", &["--cache-weights"]);
    let units = first["units"].as_u64().unwrap();
    assert_eq!(case.entries().len() as u64, units + 1);
    for at in [30, 4096, usize::MAX] {
        for entry in case.entries() {
            let mut bytes = fs::read(&entry).unwrap();
            let at = at.min(bytes.len() - 1);
            bytes[at] ^= 0x10;
            fs::write(&entry, bytes).unwrap();
        }
        let (again, bytes) = case.build("out", &["--cache-weights"]);
        assert_eq!(counts(&again), (0, units + 1, units), "byte {at}");
        assert!(bytes == expected, "byte {at}");
        assert!(warnings(&again).len() == 1 && warnings(&again)[0].contains("damaged"), "{again}");
        let (whole, bytes) = case.build("out", &["--cache-weights"]);
        assert_eq!(counts(&whole), (units + 1, 0, 0));
        assert!(bytes == expected && warnings(&whole).is_empty());
    }
    for entry in case.entries() {
        let len = fs::metadata(&entry).unwrap().len();
        fs::File::options().write(true).open(&entry).unwrap().set_len(len / 2).unwrap();
    }
    assert!(case.build("out", &["--cache-weights"]).1 == expected);
}

#[test]
fn packed_weights_are_those_of_the_checkpoint() {
    let case = Case::new();
    let (first, expected) = case.build("out", &["--cache-weights"]);
    assert_eq!(first["cache"]["weights"], "miss");
    let (second, bytes) = case.build("out", &["--cache-weights"]);
    assert_eq!(second["cache"]["weights"], "hit");
    assert!(bytes == expected);
    let (split, bytes) = case.build("split", &["--cache-weights", "--weights", "split"]);
    assert_eq!(split["cache"]["weights"], "hit");
    assert!(bytes != expected && fs::metadata(case.path("split.weights")).unwrap().len() == first["weight_bytes"].as_u64().unwrap() + 32);
    let (off, _) = case.build("out", &[]);
    assert_eq!(off["cache"]["weights"], "off");

    // Another value of one weight, in a file of the same length and time.
    let path = case.path("model").join("model.safetensors");
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    let mut weights = fs::read(&path).unwrap();
    let last = weights.len() - 4;
    weights[last] ^= 1;
    fs::write(&path, weights).unwrap();
    fs::File::open(&path).unwrap().set_modified(time).unwrap();
    let (changed, bytes) = case.build("out", &["--cache-weights"]);
    assert_eq!(changed["cache"]["weights"], "miss");
    assert!(bytes == case.build("clean", &["--no-cache"]).1 && bytes != expected);
}

#[test]
fn a_build_that_compiles_nothing_makes_no_directory() {
    let case = Case::new();
    report(&case.command("out", &["--dry-run"]).output().unwrap());
    assert!(!case.path("cache").exists());
}

#[test]
fn a_build_that_fails_leaves_the_cache_as_it_was() {
    let case = Case::new();
    let output = case.command("out", &[]).env("CC", "/bin/false").output().unwrap();
    assert_eq!(output.status.code(), Some(8), "{output:?}");
    assert!(case.entries().is_empty(), "{:?}", case.entries());
}

#[test]
fn a_directory_that_cannot_be_used_is_a_warning() {
    let case = Case::new();
    fs::write(case.path("cache"), b"a file").unwrap();
    let (report, bytes) = case.build("out", &[]);
    assert_eq!(warnings(&report).len(), 1, "{report}");
    assert_eq!(counts(&report).0, 0);
    assert!(bytes == case.build("clean", &["--no-cache"]).1);
    assert_eq!(fs::read(case.path("cache")).unwrap(), b"a file");
}

#[test]
fn a_cache_without_a_place_is_a_warning() {
    let case = Case::new();
    let build = |flag: &str| {
        let mut command = Command::new(cargo_bin("rcompile"));
        command.args(["build", "--buckets", "1", "--no-tokenizer", "--json", flag, "--model"]).arg(case.path("model"));
        command.arg("-o").arg(case.path("out")).env_remove("HOME").env_remove("XDG_CACHE_HOME");
        report(&command.output().unwrap())
    };
    let with = build("--cache-weights");
    let says = |report: &Value| warnings(report).iter().filter(|w| w.contains("nothing is kept")).count();
    assert_eq!((says(&with), says(&build("--quiet"))), (1, 1), "{with}");
    assert_eq!(warnings(&build("--no-cache")), [""; 0]);
}

#[test]
fn the_limit_holds() {
    let case = Case::new();
    let build = |size: &str| case.command("out", &[]).env("RCOMPILE_CACHE_SIZE", size).output().unwrap();
    report(&build("10M"));
    let bytes = |case: &Case| case.entries().iter().map(|e| fs::metadata(e).unwrap().len()).sum::<u64>();
    let all = bytes(&case);
    assert!(all > 100_000);
    case.verb(&["clean"]);
    let half = (all / 2).to_string();
    report(&build(&half));
    assert!(bytes(&case) <= all / 2 && bytes(&case) > 0, "{} of {all}", bytes(&case));
    let refused = build("much");
    assert_eq!(refused.status.code(), Some(2));
    let without = case.command("out", &["--no-cache"]).env("RCOMPILE_CACHE_SIZE", "much").output().unwrap();
    assert_eq!(without.status.code(), Some(0), "{without:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("RCOMPILE_CACHE_SIZE"), "{refused:?}");
}

#[test]
fn list_and_clean() {
    let case = Case::new();
    assert_eq!(report(&case.verb(&["list", "--json"]))["entries"].as_array().unwrap().len(), 0);
    let (built, _) = case.build("out", &["--cache-weights"]);
    let listed = report(&case.verb(&["list", "--json"]));
    let entries = listed["entries"].as_array().unwrap();
    assert_eq!(entries.len() as u64, built["units"].as_u64().unwrap() + 1);
    assert_eq!(entries.iter().filter(|e| e["kind"] == "weights").count(), 1);
    assert!(entries.iter().any(|e| e["what"].as_str().unwrap().starts_with("rc_step_step_8")), "{listed}");
    let text = String::from_utf8(case.verb(&[]).stdout).unwrap();
    assert!(text.contains("rc_matmul") && text.lines().last().unwrap().contains(" entries, "), "{text}");
    let cleaned = report(&case.verb(&["clean", "--json"]));
    assert_eq!((&cleaned["bytes_freed"], cleaned["removed"].as_u64()), (&listed["bytes"], Some(entries.len() as u64)));
    assert!(case.entries().is_empty(), "{:?}", case.entries());
}

#[test]
fn builds_at_the_same_time() {
    let case = Case::new();
    let (_, expected) = case.build("clean", &["--no-cache"]);
    let start = |out: &str| case.command(out, &["--cache-weights"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let children: Vec<_> = (0..6).map(|i| start(if i % 2 == 0 { "same" } else { "other" })).collect();
    children.into_iter().for_each(|c| _ = report(&c.wait_with_output().unwrap()));
    assert!(fs::read(case.path("same")).unwrap() == expected && fs::read(case.path("other")).unwrap() == expected);
    assert_eq!(counts(&case.build("out", &["--cache-weights"]).0).2, 0);
}
