use super::payload::{Blobs, Content};
use super::*;
use crate::pack::Sink;
use object::Object;
use rcompile_codegen::isa::HOST_TRIPLE;
use rcompile_models::Kind;
use rcompile_runtime::abi::{ABI_VERSION, PayloadHeader};
use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

/// A runtime that prints header fields, a byte of the payload at a 64-bit offset, and what a step returns through `ctx`.
const RUNTIME: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct entry { unsigned bucket, entry; void (*run)(const void *, unsigned, unsigned); };
int rc_main(int argc, char **argv, const unsigned char *p, const struct entry *steps) {
    unsigned long word[9];
    memcpy(word, p + 16, sizeof word);
    printf("%.7s %d %lu %lu", p, (int)((unsigned long)p % (2 << 20)), word[0], word[1]);
    if (argc > 1) printf(" %d", p[strtoul(argv[1], 0, 0)]);
    for (; steps->run; steps++) { int x = 0; steps->run(&x, 0, 0); printf(" %u:%d", steps->bucket, x); }
    printf("\n");
    return 0;
}
"#;

struct Built {
    dir: tempfile::TempDir,
    work: Option<WorkDir>,
    tools: Tools,
}

impl Built {
    fn new() -> Built {
        let dir = tempfile::tempdir().unwrap();
        let work = WorkDir::create(&dir.path().join("out")).unwrap();
        Built { dir, work: Some(work), tools: tools::find(HOST_TRIPLE).unwrap() }
    }
    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }
    fn object(&self, name: &str, source: &str) -> Vec<u8> {
        let (c, o) = (self.dir.path().join(format!("{name}.c")), self.dir.path().join(format!("{name}.o")));
        std::fs::write(&c, source).unwrap();
        assert!(Command::new(&self.tools.driver).args(["-O1", "-fPIE", "-c"]).arg(&c).arg("-o").arg(&o).status().unwrap().success());
        let bytes = std::fs::read(&o).unwrap();
        std::fs::remove_file(c).unwrap();
        std::fs::remove_file(o).unwrap();
        bytes
    }
    fn archive(&self) -> Vec<u8> {
        let o = self.dir.path().join("runtime.o");
        std::fs::write(&o, self.object("r", RUNTIME)).unwrap();
        let a = self.dir.path().join("runtime.a");
        assert!(Command::new("ar").arg("rcD").arg(&a).arg(&o).status().unwrap().success());
        let bytes = std::fs::read(&a).unwrap();
        std::fs::remove_file(o).unwrap();
        std::fs::remove_file(a).unwrap();
        bytes
    }
    fn link(&self, tools: &Tools) -> Result<Linked, Error> {
        let unit = |n: u32| {
            (format!("unit{n}"), self.object("unit", &format!("void rc_step_{n}(int *x, unsigned t, unsigned n) {{ *x = {n}; }}")))
        };
        let step = |n| Step { bucket: n, entry: 0, symbol: format!("rc_step_{n}") };
        let inputs = Inputs { steps: &[step(1), step(8)], objects: &[unit(1), unit(8)], archive: &self.archive() };
        link(self.work.as_ref().unwrap(), tools, inputs)
    }
    fn build(&self, tools: &Tools, weights: &[u8], embedded: bool) -> Result<(), Error> {
        let linked = self.link(tools)?;
        let work = self.work.as_ref().unwrap();
        let mut blobs = Blobs::default();
        blobs.add(b"a");
        assert_eq!(blobs.add(b"blob").offset, 64);
        let content = Content { manifest: b"{\"name\":\"test\"}", blobs: &blobs, weights_len: weights.len() as u64, embedded };
        let mut exe = payload::append(work, linked, content)?;
        let Sink { file, base, .. } = exe.sink();
        file.write_all_at(weights, base).unwrap();
        assert!(exe.seal(*blake3::hash(weights).as_bytes())?);
        exe.publish(work, &self.out()).map(|warning| assert_eq!(warning, None))
    }
    fn run(&self, exe: &Path, args: &[&str]) -> String {
        let out = output(Command::new(exe).args(args));
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).unwrap()
    }
    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> =
            std::fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Runs what this process has just written: a child that a test beside started meanwhile has it open for writing until it is a program of
/// its own.
fn output(command: &mut Command) -> std::process::Output {
    loop {
        match command.output() {
            Err(e) if e.kind() == std::io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            done => return done.unwrap(),
        }
    }
}

fn both_linkers() -> Vec<Tools> {
    let found = tools::find(HOST_TRIPLE).unwrap();
    let plain = Tools { lld: None, ..found.clone() };
    if found.lld.is_some() { vec![found, plain] } else { vec![plain] }
}

#[test]
fn stub_names_every_step() {
    let step = |n| Step { bucket: n, entry: 0, symbol: format!("rc_step_step_{n}") };
    let text = fill_stub(&[step(1), step(8)]);
    assert!(text.contains("\nextern void rc_step_step_8(const void *, unsigned, unsigned);\n"), "{text}");
    assert!(text.contains("\n    { 1, 0, rc_step_step_1 },\n    { 8, 0, rc_step_step_8 },\n"), "{text}");
}

#[test]
fn executable_runs_and_survives_strip() {
    for tools in both_linkers() {
        let b = Built::new();
        let mut weights = vec![7; (2 << 20) + 5];
        *weights.last_mut().unwrap() = 42;
        b.build(&tools, &weights, true).unwrap();
        let len = std::fs::metadata(b.out()).unwrap().len();
        assert_eq!(std::fs::metadata(b.out()).unwrap().permissions().mode() & 0o777, 0o755);
        // The payload follows the code at 2 MB; its weights follow header, manifest and blobs at 2 MB again.
        let last = (2 << 20) + weights.len() as u64 - 1;
        assert_eq!(len, (2 << 20) + last + 1, "{tools:?}");
        let expected = format!("RCPAYLD 0 {len} {} 42 1:1 8:8\n", 2 << 20);
        assert_eq!(b.run(&b.out(), &[&last.to_string()]), expected, "{tools:?}");
        let linked = std::fs::read(b.out()).unwrap();
        let has = |name| object::File::parse(&*linked).unwrap().section_by_name(name).is_some();
        assert!(has(".relr.dyn"), "{tools:?}: addresses are not packed");
        // glibc takes memory behind the symbol `_end` to read this variable, before `main`.
        let tuned = output(Command::new(b.out()).env("GLIBC_TUNABLES", "glibc.malloc.check=0"));
        assert!(tuned.status.success(), "{tools:?} {tuned:?}");
        for strip in ["strip", "llvm-strip-19"] {
            let Some(strip) = tools::in_path(strip.as_ref()) else { continue };
            let stripped = b.dir.path().join("stripped");
            assert!(Command::new(&strip).arg("-o").arg(&stripped).arg(b.out()).status().unwrap().success());
            assert!(std::fs::metadata(&stripped).unwrap().len() >= last);
            assert_eq!(b.run(&stripped, &[&last.to_string()]), expected, "{strip:?} {tools:?}");
        }
        let read = payload::identity(&b.out()).unwrap().unwrap();
        assert_eq!((read.manifest, read.len, read.needed), (b"{\"name\":\"test\"}".to_vec(), len, len));
    }
}

/// By what either linker makes, before anything of the C library runs: cut anywhere behind what checks it, or with a bit flipped anywhere
/// in what is loaded.
#[test]
fn a_cut_or_changed_file_says_so() {
    for tools in both_linkers() {
        let b = Built::new();
        let linked = b.link(&tools).unwrap();
        let (loaded, start) = (linked.image.loaded.clone(), linked.image.loaded[1].end as usize);
        drop(linked);
        b.build(&tools, &[7; 100], true).unwrap();
        let built = std::fs::read(b.out()).unwrap();
        let changed = b.dir.path().join("changed");
        let says = |bytes: &[u8], expected: &str| {
            std::fs::write(&changed, bytes).unwrap();
            std::fs::set_permissions(&changed, std::fs::Permissions::from_mode(0o755)).unwrap();
            let out = output(&mut Command::new(&changed));
            let error = String::from_utf8(out.stderr).unwrap();
            assert!(out.status.code() == Some(9) && error.starts_with(expected), "{:?} {error} {tools:?}", out.status);
        };
        let code_and_data = loaded.last().unwrap().end as usize;
        for len in (start..code_and_data).step_by(code_and_data / 40).chain([code_and_data, built.len() / 2, built.len() - 1]) {
            let expected = format!("error[E9-executable]: changed: truncated, expected {} bytes, found {len}\nhelp: ", built.len());
            says(&built[..len], &expected);
        }
        // All but the headers' own segment, whose notes the kernel reads, and the check itself.
        for range in &loaded[2..] {
            let mut bytes = built.clone();
            for at in (range.start as usize..range.end as usize).step_by((range.end - range.start) as usize / 9 + 1) {
                bytes[at] ^= 1;
                says(&bytes, "error[E9-executable]: changed: code, constants or variables: hash differs\nhelp: ");
                bytes[at] ^= 1;
            }
        }
    }
}

/// C0 and C1 controls, DEL and what is no UTF-8 are replaced byte by byte; other letters stay as they are.
#[test]
fn a_name_that_would_control_a_terminal() {
    let b = Built::new();
    b.build(&b.tools, &[7; 100], true).unwrap();
    let mut built = std::fs::read(b.out()).unwrap();
    built.pop();
    for (name, shown) in [
        (&b"a\x1b[2J\x7fb"[..], "a?[2J?b"),
        ("\u{80}\u{9b}2J\u{9f}\u{a0}".as_bytes(), "????2J??\u{a0}"),
        ("\u{fc}\u{7ff}\u{800}\u{41b}\u{65e5}\u{fffd}\u{1f600}".as_bytes(), "\u{fc}\u{7ff}\u{800}\u{41b}\u{65e5}\u{fffd}\u{1f600}"),
        (b"\x9b2J \xc3 \xe6\x97 \xe0\x82\x9b \xf0\x82\x82\x9b \xff\xc3", "?2J ? ?? ??? ???? ??"),
    ] {
        let path = b.dir.path().join(OsStr::from_bytes(name));
        std::fs::write(&path, &built).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let out = output(&mut Command::new(&path));
        let error = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(9), "{:?} {error}", out.status);
        let expected = format!("error[E9-executable]: {shown}: truncated, expected {} bytes, found {}\n", built.len() + 1, built.len());
        assert!(error.starts_with(&expected), "{name:?}: {error:?}");
    }
}

#[test]
fn split_weights_and_no_traces() {
    let mut b = Built::new();
    b.build(&b.tools, b"weights", false).unwrap();
    b.work = None;
    assert_eq!(b.names(), ["out", "out.weights"]);
    let file = [&b"weights"[..], blake3::hash(b"weights").as_bytes()].concat();
    assert_eq!(std::fs::read(b.dir.path().join("out.weights")).unwrap(), file);
    assert!(b.run(&b.out(), &[]).starts_with("RCPAYLD 0 "));
}

#[test]
fn two_builds_are_identical() {
    let make = || {
        let b = Built::new();
        b.build(&b.tools, &[3; 100], true).unwrap();
        std::fs::read(b.out()).unwrap()
    };
    assert!(make() == make());
}

#[test]
fn what_the_disk_changed_is_noticed() {
    let b = Built::new();
    let linked = b.link(&b.tools).unwrap();
    let work = b.work.as_ref().unwrap();
    let content = Content { manifest: b"{}", blobs: &Blobs::default(), weights_len: 3, embedded: true };
    let mut exe = payload::append(work, linked, content).unwrap();
    // Nothing was packed, so the area is zero and its hash another one.
    assert!(!exe.seal(*blake3::hash(b"abc").as_bytes()).unwrap());
    let e = exe.differs("weights");
    assert_eq!(e.exit_code(), 8);
    assert!(e.to_string().contains("weights re-read"), "{e}");
    exe.set_manifest(b"[]").unwrap();
    assert!(exe.set_manifest(b"[ ]").is_err());
    exe.sink().file.write_all_at(b"abc", exe.sink().base).unwrap();
    assert!(exe.seal(*blake3::hash(b"abc").as_bytes()).unwrap());
    exe.clear_weights().unwrap();
    assert!(exe.seal(*blake3::hash(&[0; 3]).as_bytes()).unwrap());
    assert!(!b.out().exists());
}

#[test]
fn a_part_of_a_file_has_the_hash_of_its_bytes() {
    let mut file = tempfile::tempfile().unwrap();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
    std::io::Write::write_all(&mut file, &bytes).unwrap();
    let piece = 512 << 10;
    for (base, len) in [(0, 0), (3, 1), (0, piece), (5, piece + 1), (64, 2 * piece), (1, 2 * piece + 1025), (7, 2_999_993)] {
        let expected = *blake3::hash(&bytes[base..base + len]).as_bytes();
        assert_eq!(payload::hash_range(&file, base as u64, len as u64).unwrap(), expected, "{base} {len}");
    }
}

#[test]
fn failing_linkers() {
    let b = Built::new();
    let missing = Tools { driver: "/nonexistent/cc".into(), lld: None, ..b.tools.clone() };
    let e = b.link(&missing).unwrap_err();
    assert_eq!(e.exit_code(), 8);
    assert!(e.to_string().contains("/nonexistent/cc") && e.help().unwrap().contains("apt-get"), "{e}");
    let silent = Tools { driver: "/bin/true".into(), lld: None, ..b.tools.clone() };
    let e = b.link(&silent).unwrap_err();
    assert!(e.exit_code() == 8 && e.to_string().contains("/bin/true: linking failed: it ended well and wrote nothing"), "{e}");
    let inputs = Inputs { steps: &[Step { bucket: 1, entry: 0, symbol: "rc_step_missing".into() }], objects: &[], archive: &b.archive() };
    let e = link(b.work.as_ref().unwrap(), &b.tools, inputs).unwrap_err();
    assert_eq!(e.exit_code(), 8);
    assert!(e.to_string().contains("linking failed") && e.to_string().contains("rc_step_missing"), "{e}");
    // A C library whose start does not read packed relocations.
    let old = tempfile::tempdir().unwrap();
    for features in ["#define __GLIBC_PREREQ(major, minor) ((major) == 2 && (minor) < 36)\n", "\n"] {
        std::fs::write(old.path().join("features.h"), features).unwrap();
        let tools = Tools { driver_args: vec![format!("-I{}", old.path().display())], ..b.tools.clone() };
        let e = b.link(&tools).unwrap_err();
        assert!(e.exit_code() == 8 && e.to_string().contains("a static executable needs glibc"), "{e}");
    }
    let e = WorkDir::create(Path::new("/nonexistent/dir/out")).unwrap_err();
    assert_eq!(e.exit_code(), 8);
}

/// Two builds that give the same names to pairs of files take turns; a single file needs none, and nobody waits for ever.
#[test]
fn pairs_of_files_get_their_names_in_turn() {
    let dir = tempfile::tempdir().unwrap();
    let work = WorkDir::create(&dir.path().join("out")).unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| work.write(name, name.as_bytes()).unwrap());
    let out = |name: &str| dir.path().join(name);
    let other = std::fs::File::open(dir.path()).unwrap();
    rustix::fs::flock(&other, rustix::fs::FlockOperation::LockExclusive).unwrap();
    work.publish(&[(&c, &out("c"))]).unwrap();
    let begin = std::time::Instant::now();
    let pause = std::time::Duration::from_millis(200);
    let ready = std::thread::spawn(move || {
        std::thread::sleep(pause);
        drop(other);
    });
    work.publish(&[(&a, &out("a")), (&b, &out("b"))]).unwrap();
    assert!(begin.elapsed() >= pause, "did not wait: {:?}", begin.elapsed());
    ready.join().unwrap();
    drop(work);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
fn stale_work_directories_are_swept() {
    let dir = tempfile::tempdir().unwrap();
    let stale = dir.path().join(".rcompile-old.tmp");
    std::fs::create_dir(&stale).unwrap();
    std::fs::write(stale.join("linked"), b"x").unwrap();
    let an_hour_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    std::fs::File::open(&stale).unwrap().set_modified(an_hour_ago).unwrap();
    let [old, new] = [".rcompile-emitOld", ".rcompile-emitNew"].map(|name| dir.path().join(name));
    [&old, &new].iter().for_each(|draft| std::fs::write(draft, b"x").unwrap());
    std::fs::File::open(&old).unwrap().set_modified(an_hour_ago).unwrap();
    let alive = WorkDir::create(&dir.path().join("other")).unwrap();
    assert!(!stale.exists() && !old.exists() && new.exists());
    std::fs::remove_file(new).unwrap();
    std::fs::File::open(alive.path()).unwrap().set_modified(an_hour_ago).unwrap();
    let path = alive.path().to_path_buf();
    let second = WorkDir::create(&dir.path().join("out")).unwrap();
    assert!(path.exists());
    drop((alive, second));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_program_ends_with_its_owner() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let running = guard::start(Command::new("sleep").arg("100").stdout(writer)).unwrap();
    let start = std::time::Instant::now();
    drop(running);
    // The pipe ends when nobody can write into it any more.
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    assert!(start.elapsed().as_secs() < 50);
}

#[test]
fn manifests_that_no_build_writes_are_damaged() {
    let manifest = |from: &str, to: &str| {
        let good = r#"{"rcompile_version":"0","name":"m","architecture":"a","task":"generate","target":"t","cpu":"znver5","features":[],
            "cores":1,"ctx_size":8,"slots":1,"dtype":"f32","compute":"f32","kv_dtype":"f32","quantization":"none","vocab_size":5,
            "hidden_size":1,"parameters":1,"weight_bytes":1,"inputs":[],"text":null,"pooling":null,
            "entries":[{"name":"step","output_stride":1,"output":"logits","buckets":[{"rows":2,"logit_rows":1,"tile_rows":3,
                "arena_bytes":0,"private_bytes":0,"barriers_per_layer":1,"regions":[{"name":"r","kind":"matmul","arithmetic":"f32",
                "layers":4,"barrier":true,"units":{},"weight_bytes":{},"kv_bytes":{},"activation_bytes":{},"private_bytes":{},"flop":{}}]}]}],
            "state":{"bytes":0,"bytes_per_token":0,"pages_per_slot":1,"persistent":true},
            "generation":{"bos_token_id":null,"eos_token_ids":[],"do_sample":false,"temperature":null,"top_k":null,"top_p":null,
                "min_p":null,"repetition_penalty":null}}"#;
        assert!(good.contains(from), "{from}");
        let header = PayloadHeader { abi_version: ABI_VERSION, ..PayloadHeader::from_bytes(&[0; size_of::<PayloadHeader>()]) };
        payload::Identity { manifest: good.replacen(from, to, 1).into_bytes(), header, len: 0, needed: 0 }.manifest()
    };
    assert_eq!(manifest("", "").unwrap().entries[0].buckets[0].regions[0].layers, Some(4));
    for (name, value) in [("ctx_size", 8), ("slots", 1), ("vocab_size", 5), ("rows", 2), ("tile_rows", 3), ("layers", 4)] {
        let (kind, what) = manifest(&format!("\"{name}\":{value}"), &format!("\"{name}\":0")).unwrap_err();
        assert!(kind == Kind::Malformed && what.contains("damaged"), "{name}: {what}");
    }
    assert_eq!(manifest("\"slots\":1,", "").unwrap_err().0, Kind::Unsupported);
}
