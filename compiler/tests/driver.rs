//! The driver as a process: exit codes, lines, signals, and that nothing is left behind.

use assert_cmd::cargo::cargo_bin;
use rcompile_codegen::isa::{FOREIGN, Isa};
use rcompile_runtime::abi::{PAYLOAD_MAGIC, PayloadHeader};
use std::mem::offset_of;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The cache of these tests, not the user's.
const CACHE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/../rcompile-tests");

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

fn rcompile(args: &[&str]) -> Command {
    let mut command = Command::new(cargo_bin("rcompile"));
    command.args(args).env("XDG_CACHE_HOME", CACHE);
    command
}

/// `rcompile build` of a tiny model into `dir/out`.
fn build(dir: &Path, more: &[&str]) -> Command {
    let mut command = rcompile(&["build", "--no-tokenizer", "--buckets", "1,8", "--cpu", "x86-64-v3", "--model"]);
    command.arg(golden("llama-gqa-tied")).arg("-o").arg(dir.join("out")).args(more);
    command
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("an exit code")
}

/// stderr as lines, the first of which must be the error.
fn error(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    let errors = text.lines().filter(|l| l.starts_with("error[")).count();
    assert_eq!(errors, 1, "{text}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn build_report_inspect_and_identical_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let out = build(dir.path(), &["--json", "--verify-each", "--no-cache"]).output().unwrap();
    assert_eq!(code(&out), 0, "{out:?}");
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let len = std::fs::metadata(dir.path().join("out")).unwrap().len();
    assert_eq!(report["file_bytes"], len);
    let stages: Vec<_> = report["stages"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(stages, ["open", "trace", "passes", "plan", "codegen", "link", "pack", "finish"]);
    for key in ["code_bytes", "weight_bytes", "arena_bytes", "kv_bytes_per_token"] {
        assert!(report[key].as_u64().unwrap() > 0, "{key}");
    }
    assert_eq!(names(dir.path()), ["out"]);

    let inspected = rcompile(&["inspect", "--json"]).arg(dir.path().join("out")).output().unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&inspected.stdout).unwrap();
    assert_eq!(manifest["cpu"], "x86-64-v3");
    assert_eq!(manifest["weight_bytes"], report["weight_bytes"]);
    assert!(manifest["inputs"].as_array().unwrap().iter().any(|i| i["name"] == "config.json"));
    // The same as the executable says itself, on any machine.
    let info = Command::new(dir.path().join("out")).args(["info", "--json"]).output().unwrap();
    assert_eq!(manifest, serde_json::from_slice::<serde_json::Value>(&info.stdout).unwrap());

    let other = tempfile::tempdir().unwrap();
    assert_eq!(code(&build(other.path(), &["--jobs", "1", "--quiet", "--no-cache"]).output().unwrap()), 0);
    assert!(std::fs::read(dir.path().join("out")).unwrap() == std::fs::read(other.path().join("out")).unwrap());
}

#[test]
fn split_weights_and_everything_emitted() {
    let dir = tempfile::tempdir().unwrap();
    let emit = ["--weights", "split", "--emit", "exe,graph,program,llvm-ir,asm,obj", "--save-temps", "--quiet"];
    let dump = dir.path().join("dump");
    let out = build(dir.path(), &emit).arg("--dump-dir").arg(&dump).output().unwrap();
    assert_eq!(code(&out), 0, "{out:?}");
    assert!(out.stdout.is_empty() && out.stderr.is_empty());
    let expected = ["dump", "out", "out.graph", "out.ll", "out.objects", "out.program", "out.s", "out.temps", "out.weights"];
    assert_eq!(names(dir.path()), expected);
    let graph = std::fs::read_to_string(dir.path().join("out.graph")).unwrap();
    assert!(graph.contains("rms_norm") && graph.contains("call"), "{graph}");
    assert!(std::fs::read_to_string(dir.path().join("out.program")).unwrap().contains("program @step.8"));
    let dumped = names(&dump.join("step.8"));
    assert!(dumped.contains(&"00-trace.graph".to_string()) && dumped.iter().any(|n| n.ends_with("-outline-layers.graph")), "{dumped:?}");
    // What was linked can be linked again.
    let temps = dir.path().join("out.temps");
    let linked = Command::new("sh").arg("command").current_dir(&temps).output().unwrap();
    assert!(linked.status.success() && names(&temps).contains(&"linked".to_string()), "{linked:?}");
}

#[test]
fn stopping_early_prints_and_writes_nothing() {
    for (at, word) in [("trace", "mean"), ("fuse-rms-norm", "rms_norm"), ("plan", "program @step.1"), ("open", "vocab_size")] {
        let dir = tempfile::tempdir().unwrap();
        let out = build(dir.path(), &["--quiet", "--stop-after", at]).output().unwrap();
        assert_eq!(code(&out), 0, "{out:?}");
        assert!(String::from_utf8_lossy(&out.stdout).contains(word), "{at}");
        assert!(names(dir.path()).is_empty());
        // With --json the report has it, and stdout nothing else.
        let out = build(dir.path(), &["--json", "--stop-after", at]).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(report["text"].as_str().unwrap().contains(word) && report["model"].is_string(), "{at}");
    }
    let dir = tempfile::tempdir().unwrap();
    let out = build(dir.path(), &["--dry-run"]).output().unwrap();
    assert_eq!((code(&out), names(dir.path()).len()), (0, 0), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stderr).contains("  arena "), "{out:?}");
    // What is emitted and what stopping prints is the same text, once.
    let graph = |more: &[&str]| build(dir.path(), &[&["--quiet", "--stop-after", "passes"], more].concat()).output().unwrap().stdout;
    assert_eq!(graph(&["--emit", "graph=-"]), graph(&[]));
    assert_eq!(graph(&["--emit", "graph", "--dry-run"]), graph(&[]));
    let traced = |more: &[&str]| build(dir.path(), &[&["--quiet", "--stop-after", "trace"], more].concat()).output().unwrap().stdout;
    assert!(traced(&[]) == traced(&["--emit", "graph=-"]) && traced(&[]) != graph(&[]));
    let out = build(dir.path(), &["--quiet", "--stop-after", "plan", "--passes", "-merge-matmuls,-fuse-rope"]).output().unwrap();
    assert_eq!(code(&out), 0, "{out:?}");
}

#[test]
fn wrong_use_is_one_line_and_a_code() {
    let dir = tempfile::tempdir().unwrap();
    let run = |c: i32, word: &str, mut command: Command| {
        let out = command.output().unwrap();
        assert_eq!(code(&out), c, "{out:?}");
        let text = error(&out);
        assert!(text.contains(word), "expected {word} in {text}");
        assert_eq!(names(dir.path()).len(), 0, "{text}");
    };
    run(2, "no verb", rcompile(&[]));
    run(2, "--bogus", build(dir.path(), &["--bogus"]));
    run(2, "no such pass", build(dir.path(), &["--passes", "+nope"]));
    run(2, "no such stage", build(dir.path(), &["--stop-after", "nope"]));
    run(2, "does not run that pass", build(dir.path(), &["-O0", "--stop-after", "cse"]));
    for (at, kind, stage) in
        [("open", "graph", "passes"), ("trace", "graph,asm", "codegen"), ("cse", "program", "plan"), ("plan", "obj", "codegen")]
    {
        run(2, &format!("is made by the stage {stage}"), build(dir.path(), &["--stop-after", at, "--emit", kind]));
    }
    run(2, "--dump-dir", build(dir.path(), &["--dry-run", "--dump-dir", "dump"]));
    run(2, "obj=DIR", rcompile(&["build", "--model", "/nowhere", "--emit", "obj"]));
    run(2, "no text for stdout", build(dir.path(), &["--emit", "obj=-"]));
    run(6, "--task rerank", build(dir.path(), &["--task", "rerank"]));
    run(3, "nowhere", rcompile(&["build", "--model", "/nowhere", "-o", "/tmp/never"]));
    run(6, "nope", build(dir.path(), &["--cpu-features", "+nope"]));
    run(6, "need all of avx512bw", build(dir.path(), &["--cpu-features", "+avx512vnni"]));
    run(2, "--calibrate", build(dir.path(), &["--quantize", "int8", "--calibrate", "x"]));
    run(6, "CPU 'x86-64-v3' is not known for aarch64", build(dir.path(), &["--target", "aarch64-unknown-linux-gnu"]));
    run(6, "--target x86_64-unknown-linux-gnu has it", build(dir.path(), &["--target", "aarch64-unknown-linux-gnu"]));
    let model = golden("llama-gqa-tied");
    let foreign = ["inspect", model.to_str().unwrap(), "--target", FOREIGN.0, "--cpu", "nope"];
    run(6, &format!("CPU 'nope' is not known for {}; known: {}", FOREIGN.0, Isa::known_cpus(FOREIGN.0)[0]), rcompile(&foreign));
    run(6, "riscv64", build(dir.path(), &["--target", "riscv64gc-unknown-linux-gnu"]));
    run(8, "/nowhere", build(Path::new("/nowhere"), &[]));
    run(8, "cc", {
        let mut command = build(dir.path(), &["--quiet"]);
        command.env("PATH", "/nowhere").env_remove("CC");
        command
    });
    run(8, "false", {
        let mut command = build(dir.path(), &["--quiet"]);
        command.env("CC", "/bin/false");
        command
    });
    run(4, "neither", rcompile(&["inspect", "/bin/ls"]));
    let model = golden("llama-gqa-tied");
    let of_arm = ["inspect", "--scaling", model.to_str().unwrap(), "--target", "aarch64-unknown-linux-gnu", "--cpu", "apple-m1"];
    run(6, "no data for CPU 'apple-m1'", rcompile(&of_arm));
    std::fs::create_dir(dir.path().join("out")).unwrap();
    let out = build(dir.path(), &[]).output().unwrap();
    assert_eq!(code(&out), 8);
    assert!(error(&out).contains("directory"));
}

/// Where the header of an executable's payload lies: behind the code, which holds the magic too.
fn header_at(bytes: &[u8]) -> usize {
    bytes.windows(PAYLOAD_MAGIC.len()).rposition(|w| w == PAYLOAD_MAGIC).expect("a payload")
}

/// An executable names where its bits depend on how many rows are computed together.
#[test]
fn the_exception_of_tiles_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let notes = |more: &[&str]| {
        let out = rcompile(&["build", "--no-tokenizer", "--buckets", "1,64", "--compute", "bf16", "--quiet", "--model"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model"))
            .arg("-o")
            .arg(dir.path().join("out"))
            .args(more)
            .output()
            .unwrap();
        assert_eq!(code(&out), 0, "{out:?}");
        let out = rcompile(&["inspect", "--json"]).arg(dir.path().join("out")).output().unwrap();
        serde_json::from_slice::<serde_json::Value>(&out.stdout).unwrap()["notes"].clone()
    };
    let named = serde_json::json!(["tiles of AMX take bf16 numbers below 2^-126 for zero"]);
    assert_eq!(notes(&["--cpu", "sapphirerapids"]), named);
    assert_eq!(notes(&["--cpu", "sapphirerapids", "--cpu-features=-amx-tile"]), serde_json::json!([]));
}

/// Another version's manifest has other fields: a fine executable, but nothing that this one can read.
#[test]
fn executables_of_another_version() {
    let dir = tempfile::tempdir().unwrap();
    let exe = dir.path().join("out");
    assert_eq!(code(&build(dir.path(), &["--quiet"]).output().unwrap()), 0);
    let mut bytes = std::fs::read(&exe).unwrap();
    let at = header_at(&bytes);
    let mut header = PayloadHeader::from_bytes(bytes[at..].first_chunk().unwrap());
    let manifest = at + header.manifest_offset as usize..at + (header.manifest_offset + header.manifest_len) as usize;
    let text = String::from_utf8(bytes[manifest.clone()].to_vec()).unwrap();
    let other = text.replacen("\"architecture\"", "\"architektur_\"", 1);
    assert!(text != other && text.len() == other.len());
    bytes[manifest].copy_from_slice(other.as_bytes());
    header.manifest_hash = *blake3::hash(other.as_bytes()).as_bytes();
    *bytes[at..].first_chunk_mut().unwrap() = *header.as_bytes();
    std::fs::write(&exe, bytes).unwrap();
    let path = exe.to_str().unwrap();
    for verb in [&["inspect", path][..], &["compare", path, path, "-f", "Cargo.toml"]] {
        let out = rcompile(verb).output().unwrap();
        assert_eq!(code(&out), 6, "{verb:?}");
        assert!(error(&out).contains("is an executable of another version of rcompile"), "{out:?}");
    }
}

/// Headers of another layout, and damaged ones.
#[test]
fn headers_that_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let exe = dir.path().join("out");
    assert_eq!(code(&build(dir.path(), &["--quiet"]).output().unwrap()), 0);
    let built = std::fs::read(&exe).unwrap();
    let at = header_at(&built);
    let inspect = |byte: usize| {
        let mut bytes = built.clone();
        bytes[at + byte] ^= 1;
        std::fs::write(&exe, bytes).unwrap();
        rcompile(&["inspect", "--json"]).arg(&exe).output().unwrap()
    };
    for (byte, expected, what) in [
        (offset_of!(PayloadHeader, abi_version), 6, "is an executable of another version of rcompile"),
        (offset_of!(PayloadHeader, code_end), 4, "is an executable whose header is damaged"),
    ] {
        let out = inspect(byte);
        assert!(code(&out) == expected && error(&out).contains(what) && out.stdout.is_empty(), "{out:?}");
    }
}

#[test]
fn an_old_output_stays_when_a_build_fails() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("out"), b"old").unwrap();
    let out = build(dir.path(), &["--quiet"]).env("CC", "/bin/false").output().unwrap();
    assert_eq!(code(&out), 8);
    assert_eq!(std::fs::read(dir.path().join("out")).unwrap(), b"old");
}

/// Starts a build that SIGHUP ends, also where the tests run under `nohup`.
fn spawn(build: &Command) -> Child {
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP,INT,TERM,QUIT,XCPU,USR1").arg(build.get_program()).args(build.get_args());
    command.envs(build.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Starts a build whose linker hangs, and waits until it does; gives the pid of the linker's child too.
fn hanging_build(dir: &Path, tools: &Path) -> (Child, String) {
    let cc = tools.join("hanging-cc");
    let pid = tools.join("pid");
    std::fs::write(&cc, format!("#!/bin/sh\nsleep 600 &\necho $! > {0}.new\nmv {0}.new {0}\nwait\n", pid.display())).unwrap();
    std::fs::set_permissions(&cc, std::fs::Permissions::from_mode(0o755)).unwrap();
    let child = spawn(build(dir, &["--quiet"]).env("CC", &cc));
    let start = Instant::now();
    while !pid.exists() {
        assert!(start.elapsed() < Duration::from_secs(120), "the linker was not started");
        std::thread::sleep(Duration::from_millis(10));
    }
    (child, std::fs::read_to_string(pid).unwrap().trim().to_string())
}

fn kill(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap().success());
}

/// While threads are in LLVM, whose globals the end of a process would destroy. Moments are spread over the first seconds of codegen.
#[test]
fn signals_while_code_is_generated() {
    for i in 0..24 {
        let (signal, expected) = [("INT", 130), ("TERM", 143), ("HUP", 129)][i % 3];
        let dir = tempfile::tempdir().unwrap();
        let child = spawn(&build(dir.path(), &["--quiet", "--no-cache", "--emit", "exe,program"]));
        // The last file before codegen, which takes seconds.
        let (program, start) = (dir.path().join("out.program"), Instant::now());
        while !program.exists() {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing is planned");
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(10 + 15 * i as u64));
        kill(&child, signal);
        let out = child.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(expected), "{out:?}");
        assert!(error(&out).contains(&format!("SIG{signal}")), "{out:?}");
        assert_eq!(names(dir.path()), ["out.program"]);
    }
}

/// Also where stdout is a pipe that nobody reads, so that a thread waits in a write.
#[test]
fn signals_while_stdout_is_full() {
    let mut command = rcompile(&["build", "--no-tokenizer", "--quiet", "--stop-after", "plan", "--emit", "graph=-,program=-"]);
    command.args(["--buckets", "1,2,4,8,16,32,64", "--model"]).arg(golden("llama-gqa-tied"));
    let child = spawn(&command);
    let start = Instant::now();
    while rustix::io::ioctl_fionread(child.stdout.as_ref().unwrap()).unwrap() < 64 << 10 {
        assert!(start.elapsed() < Duration::from_secs(60), "the pipe does not get full");
        std::thread::sleep(Duration::from_millis(5));
    }
    let start = Instant::now();
    kill(&child, "TERM");
    let mut child = child;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if start.elapsed() > Duration::from_secs(5) => {
                child.kill().unwrap();
                panic!("it waits for whoever reads stdout");
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    assert_eq!(status.code(), Some(143));
    let mut text = vec![];
    std::io::Read::read_to_end(&mut child.stdout.take().unwrap(), &mut text).unwrap();
    assert_eq!(text.len(), 64 << 10, "the pipe was not full: the test shows nothing");
}

/// A file beyond the limit (`ulimit -f`) is a line and a code, and no signal.
#[test]
fn files_may_be_limited() {
    let dir = tempfile::tempdir().unwrap();
    let build = build(dir.path(), &["--quiet"]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 64; exec \"$0\" \"$@\""]).arg(build.get_program()).args(build.get_args()).env("XDG_CACHE_HOME", CACHE);
    let out = shell.output().unwrap();
    assert_eq!(out.status.code(), Some(8), "{out:?}");
    assert!(error(&out).contains("too large"), "{out:?}");
    assert!(names(dir.path()).is_empty());
}

/// Runs `build` where a control group allows so many bytes; None where no group of version 1 can be made, or the machine swaps, so that
/// what exceeds the limit goes there.
fn within_group(bytes: u64, build: &Command) -> Option<Output> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("rcompile-driver-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let group = Path::new("/sys/fs/cgroup/memory").join(name);
    let _ = std::fs::create_dir(&group);
    let swaps = std::fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1);
    if swaps || std::fs::write(group.join("memory.limit_in_bytes"), bytes.to_string()).is_err() {
        let _ = std::fs::remove_dir(&group);
        eprintln!("skipped: no control group of version 1 can be made here");
        return None;
    }
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).args([group.as_os_str(), build.get_program()]);
    let set = build.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let out = shell.args(build.get_args()).envs(set).output().unwrap();
    std::fs::remove_dir(&group).unwrap();
    Some(out)
}

/// What a control group allows is the limit of what a build and its tools allocate.
#[test]
fn memory_is_limited_as_by_the_control_group() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = 3_u64 << 30;
    let [cc, limits] = ["cc", "limits"].map(|name| dir.path().join(name));
    std::fs::write(&cc, format!("#!/bin/sh\ncat /proc/self/limits > {}\n", limits.display())).unwrap();
    std::fs::set_permissions(&cc, std::fs::Permissions::from_mode(0o755)).unwrap();
    let Some(out) = within_group(bytes, build(dir.path(), &["--quiet"]).env("CC", &cc)) else { return };
    assert_eq!(out.status.code(), Some(8), "{out:?}");
    let limits = std::fs::read_to_string(limits).unwrap();
    let data = limits.lines().find_map(|line| line.strip_prefix("Max data size")).expect("a limit of data");
    assert_eq!(data.split_whitespace().next(), Some(bytes.to_string().as_str()), "{limits}");
}

/// The hidden states of a text lie in memory that a limit on data does not count, a control group does.
#[test]
fn what_calibration_shares_counts_for_the_control_group() {
    let dir = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    let text = dir.path().join("text");
    std::fs::write(&text, std::fs::read_to_string(demo.join("calibrate.txt")).unwrap().repeat(6)).unwrap();
    // Stacks of threads count, too.
    let mut build = rcompile(&["build", "--quiet", "--no-cache", "--jobs", "2", "--quantize", "int4", "--buckets", "1", "--model"]);
    build.arg(demo.join("model")).arg("--calibrate").arg(&text).arg("-o").arg(dir.path().join("out"));
    // The states of 128 chunks take 49 MiB.
    let Some(out) = within_group(88 << 20, &build) else { return };
    assert_eq!((code(&out), names(dir.path())), (7, vec!["text".to_string()]), "{out:?}");
    assert!(error(&out).contains("--calibrate: no memory for hidden states"), "{out:?}");
}

#[test]
fn signals_clean_up() {
    for (signal, expected) in [("INT", 130), ("TERM", 143), ("HUP", 129), ("QUIT", 131), ("XCPU", 152), ("USR1", 138)] {
        let (dir, tools) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (child, sleeper) = hanging_build(dir.path(), tools.path());
        assert_eq!(names(dir.path()).len(), 1);
        let start = Instant::now();
        kill(&child, signal);
        let out = child.wait_with_output().unwrap();
        assert!(start.elapsed() < Duration::from_secs(2));
        assert_eq!(code(&out), expected);
        error(&out);
        assert_eq!(names(dir.path()).len(), 0);
        // A killed process may still be waiting to be reaped by init.
        let state = std::fs::read_to_string(format!("/proc/{sleeper}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "the linker's child lives: {state}");
    }
}

#[test]
fn what_a_killed_build_left_is_swept_by_the_next() {
    let (dir, tools) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (mut child, sleeper) = hanging_build(dir.path(), tools.path());
    child.kill().unwrap();
    child.wait().unwrap();
    let _ = Command::new("kill").arg(&sleeper).status();
    let left = names(dir.path());
    assert_eq!(left.len(), 1);
    // Not younger than a directory that may be in the making.
    let an_hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
    std::fs::File::open(dir.path().join(&left[0])).unwrap().set_modified(an_hour_ago).unwrap();
    let out = build(dir.path(), &["--quiet"]).output().unwrap();
    assert_eq!(code(&out), 0, "{out:?}");
    assert_eq!(names(dir.path()), ["out"]);
}

/// Emulated CPUs that lack what the runtime or the kernels are compiled for say so, whatever the verb, and run what needs neither.
#[test]
fn x86_cpus_that_lack_something() {
    let works = |qemu: &&str| Command::new(qemu).arg("--version").output().is_ok_and(|o| o.status.success());
    let Some(qemu) = ["qemu-x86_64", "qemu-x86_64-static"].into_iter().find(works) else {
        assert!(std::env::var_os("CI").is_none(), "qemu-user is missing, and on CI nothing is skipped");
        return eprintln!("skipped: no qemu-x86_64");
    };
    let dir = tempfile::tempdir().unwrap();
    let out = build(dir.path(), &["--quiet"]).output().unwrap();
    assert_eq!(code(&out), 0, "{out:?}");
    let run = |cpu: &str, args: &[&str]| Command::new(qemu).args(["-cpu", cpu]).arg(dir.path().join("out")).args(args).output().unwrap();
    for (cpu, missing) in [("qemu64", "missing x86-64-v2"), ("Nehalem", "missing avx,avx2"), ("Haswell,-avx2", "missing avx2")] {
        for args in [&["--version"][..], &["--help"], &["logits", "--tokens", "1"]] {
            let out = run(cpu, args);
            assert!(code(&out) == 10 && error(&out).contains(missing) && out.stdout.is_empty(), "{cpu} {args:?}: {out:?}");
        }
        let known = cpu != "qemu64";
        assert_eq!(code(&run(cpu, &["info"])), if known { 0 } else { 10 }, "{cpu}");
    }
    assert_eq!(code(&run("Haswell", &["logits", "--tokens", "1"])), 0);
}

/// The target that this machine is not.
fn other_target() -> &'static str {
    if cfg!(target_arch = "x86_64") { "aarch64-unknown-linux-gnu" } else { "x86_64-unknown-linux-gnu" }
}

#[test]
fn cross_tools_are_asked_for_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = if other_target().starts_with("aarch64") { "neoverse-v1" } else { "x86-64-v3" };
    let mut command = rcompile(&["build", "--no-tokenizer", "--target", other_target(), "--cpu", cpu, "--model"]);
    let out = command.arg(golden("llama-gqa-tied")).arg("-o").arg(dir.path().join("out")).env("PATH", "/nowhere").output().unwrap();
    assert_eq!(code(&out), 8, "{out:?}");
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(text.contains("gcc-aarch64-linux-gnu") || text.contains("gcc-x86-64-linux-gnu"), "{text}");
    assert_eq!(names(dir.path()).len(), 0, "{text}");
}

/// A variable that names no program is what is said to be wrong.
#[test]
fn a_compiler_with_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let out = build(dir.path(), &["--quiet"]).env("CC", "cc -m64").output().unwrap();
    let said = error(&out);
    assert!(code(&out) == 8 && said.contains("cc -m64") && said.contains("without arguments") && names(dir.path()).is_empty(), "{said}");
}

/// A compiler that lacks its C library's headers, or makes objects for another machine: what is missing and how to get it.
#[test]
fn a_compiler_that_lacks_something() {
    let (dir, tools) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let cc = tools.path().join("cc");
    for arguments in ["-nostdinc", "-mno-such-option"] {
        std::fs::write(&cc, format!("#!/bin/sh\nexec cc {arguments} \"$@\"\n")).unwrap();
        std::fs::set_permissions(&cc, std::fs::Permissions::from_mode(0o755)).unwrap();
        let out = build(dir.path(), &["--quiet"]).env("CC", &cc).output().unwrap();
        let said = error(&out);
        assert!(code(&out) == 8 && said.contains("help: apt-get install") && names(dir.path()).is_empty(), "{arguments}: {said}");
    }
}

/// What the compiler says is what is shown.
#[test]
fn doctor_with_a_broken_compiler() {
    let tools = tempfile::tempdir().unwrap();
    let cc = tools.path().join("cc");
    std::fs::write(&cc, "#!/bin/sh\necho 'error: out of magic' >&2\nexit 3\n").unwrap();
    std::fs::set_permissions(&cc, std::fs::Permissions::from_mode(0o755)).unwrap();
    let out = rcompile(&["doctor"]).env("CC", &cc).output().unwrap();
    assert_eq!(code(&out), 8, "{out:?}");
    assert!(error(&out).contains("out of magic"), "{out:?}");
}

#[test]
fn doctor_and_targets() {
    let out = rcompile(&["doctor", "--json"]).output().unwrap();
    assert_eq!(code(&out), 0, "{out:?}");
    let checks: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(checks.as_array().unwrap().iter().any(|c| c["name"] == "linking" && c["ok"] == true));
    // Builds do not need a temporary directory; where there is no other, that is what is missing.
    let writable = tempfile::tempdir().unwrap();
    for (dir, expected) in [(writable.path(), 0), (Path::new("/proc"), 8)] {
        let out = rcompile(&["doctor"]).env("TMPDIR", "/nonexistent").current_dir(dir).output().unwrap();
        let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        let said = text.contains("/nonexistent") && !text.contains("apt-get install gcc");
        assert!(code(&out) == expected && (expected == 0 || said), "{text}");
    }
    let out = rcompile(&["targets", "--json"]).output().unwrap();
    let targets: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(targets[0]["triple"], "x86_64-unknown-linux-gnu");
    assert_eq!(targets[0]["runtime"], true);
}

/// The executable and the weights beside it are for whom the umask says, and one that is cut is not described as if it were whole.
#[test]
fn permissions_and_a_cut_executable() {
    let dir = tempfile::tempdir().unwrap();
    let built = build(dir.path(), &["--weights", "split", "--quiet"]);
    let mut private = Command::new("sh");
    private.args(["-c", "umask 077; exec \"$0\" \"$@\""]).arg(built.get_program()).args(built.get_args()).env("XDG_CACHE_HOME", CACHE);
    assert_eq!(code(&private.output().unwrap()), 0);
    let mode = |name: &str| std::fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("out"), mode("out.weights")), (0o700, 0o600));

    let exe = dir.path().join("out");
    let inspect = || rcompile(&["inspect"]).arg(&exe).output().unwrap();
    assert_eq!(code(&inspect()), 0);
    let file = std::fs::File::options().write(true).open(&exe).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let cut = inspect();
    let said = error(&cut);
    assert!(code(&cut) == 4 && said.contains("truncated") && cut.stdout.is_empty(), "{said}");
}

/// Without memory there is one line, the exit code of a limit, and nothing left behind.
#[test]
fn no_memory_is_a_limit() {
    let run = |megabytes: u64| {
        let dir = tempfile::tempdir().unwrap();
        let built = build(dir.path(), &["--no-cache", "--quiet", "--jobs", "2"]);
        let mut limited = Command::new("sh");
        limited.args(["-c", "ulimit -c 0; ulimit -v $0; exec \"$@\"", &(megabytes << 10).to_string()]);
        let output = limited.arg(built.get_program()).args(built.get_args()).output().unwrap();
        // 127: too little to load LLVM's library. 8: too little for the linker.
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let left = names(dir.path());
        match output.status.code() {
            Some(127) => {}
            Some(0) => assert_eq!(left, ["out"]),
            Some(7 | 8) => assert!(left.is_empty() && said.starts_with("error[E"), "{megabytes} MB: {left:?} {said}"),
            other => panic!("{megabytes} MB: {other:?} {left:?} {said}"),
        }
        said.starts_with("error[E7-memory]")
    };
    assert!((320..520).step_by(20).filter(|megabytes| run(*megabytes)).count() > 0, "no limit was too low");
}
