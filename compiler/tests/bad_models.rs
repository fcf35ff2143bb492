//! Model directories that are wrong, given to `rcompile build` and looked at from outside.
//!
//! In: the cases of `rcompile-broken`, which the models crate opens in its own process. Asked of each refusal: its exit code, one line that
//! names the culprit, ten seconds, memory near that of a sound build, nothing left behind, nothing changed; and, as strace sees it, no
//! file opened outside of the model's directory but some of the system's, no socket, no program. Asked of what is accepted: an executable
//! that runs, with the bits of the sound model where its numbers are the same.

mod common;

use assert_cmd::cargo::cargo_bin;
use common::strace;
use rcompile_broken::toy::ToyTensor;
use rcompile_broken::variants::gpt2;
use rcompile_broken::{Accepted, Case, Toy, accepted, refused};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The cache of the tests that compile.
fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("rcompile-tests")
}

/// What the process may read of the system: its libraries, and what the kernel says of the process and the machine.
const SYSTEM: [&str; 7] = ["/lib/", "/lib64/", "/usr/lib", "/etc/ld.so", "/proc/", "/sys/", "/dev/"];
const MEMORY_ABOVE_SOUND_BYTES: u64 = 256 << 20;
const TIME_MAX: Duration = Duration::from_secs(10);

/// A directory with the model, and one for each other thing that a build may touch.
struct Place {
    dir: tempfile::TempDir,
}

/// What is seen of a process from outside.
struct Seen {
    status: ExitStatus,
    stderr: String,
    memory_bytes: u64,
    time: Duration,
    /// Lines of strace: `pid call(arguments) = result`.
    calls: Option<String>,
}

impl Place {
    fn new(change: fn(&Toy)) -> Place {
        let place = Place { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(place.path("out")).unwrap();
        change(&Toy::write(&place.model()));
        place
    }
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    /// A name that needs care.
    fn model(&self) -> PathBuf {
        self.path("a möd el")
    }
    fn build(&self, cache: &Path, more: &[&str]) -> Seen {
        let strace = strace();
        let log = self.path("calls");
        let mut command = Command::new(if strace { "strace".into() } else { cargo_bin("rcompile") });
        if strace {
            command.args(["-f", "-y", "-s", "4096", "-e", "trace=open,openat,openat2,socket,connect,execve,execveat", "-o"]);
            command.arg(&log).arg(cargo_bin("rcompile"));
        }
        // Settings of the person who runs the tests, and cargo's, which would have libraries looked for in many places.
        let settings = std::env::vars().map(|(k, _)| k).filter(|k| k.starts_with("RCOMPILE_") || k == "LD_LIBRARY_PATH");
        settings.for_each(|k| _ = command.env_remove(k));
        command.args(["build", "--buckets", "1,8", "--cpu", "x86-64-v3", "--model"]).arg(self.model());
        command.arg("-o").arg(self.path("out/exe")).arg("--cache-dir").arg(cache).args(more);
        command.stdin(Stdio::null()).stdout(File::create(self.path("stdout")).unwrap()).stderr(File::create(self.path("stderr")).unwrap());
        let start = Instant::now();
        let (status, memory_bytes) = wait(command.spawn().unwrap().id());
        let stderr = String::from_utf8(fs::read(self.path("stderr")).unwrap()).expect("stderr is UTF-8");
        let calls = strace.then(|| String::from_utf8_lossy(&fs::read(log).unwrap()).into_owned());
        Seen { status, stderr, memory_bytes, time: start.elapsed(), calls }
    }
}

/// Waits for a child; also gives the most memory that it or a child of its had.
fn wait(pid: u32) -> (ExitStatus, u64) {
    let mut status = 0;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: both pointers are to memory of the right type that lives through the call.
    let waited = unsafe { libc::wait4(pid.cast_signed(), &raw mut status, 0, usage.as_mut_ptr()) };
    assert!(waited >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: zeroed at first, which is valid, and filled by the call.
    let usage = unsafe { usage.assume_init() };
    (ExitStatus::from_raw(status), usage.ru_maxrss.cast_unsigned() * 1024)
}

/// Every path below `dir` with its kind, length and target.
fn listing(dir: &Path) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        let meta = path.symlink_metadata().unwrap();
        all.insert(format!("{} {:?} {} {:?}", path.display(), meta.file_type(), meta.len(), fs::read_link(&path).ok()));
        if meta.is_dir() {
            all.extend(listing(&path));
        }
    }
    all
}

/// What the calls of the process and its threads (not of the programs that it starts) must not be.
fn forbidden_calls<'a>(calls: &'a str, allowed: &[&str]) -> Vec<&'a str> {
    let pid = |line: &'a str| line.split_whitespace().next().unwrap_or_default();
    let first = pid(calls);
    let tools: BTreeSet<&str> = calls.lines().filter(|l| l.contains(" execve") && pid(l) != first).map(pid).collect();
    let apart = |path: &String| !allowed.iter().chain(&SYSTEM).any(|prefix| path.starts_with(prefix));
    let forbidden = |line: &&str| {
        let text = line.split_once(' ').map_or("", |(_, text)| text.trim_start());
        // Where a call of another thread came between, its second part says where it led to.
        if text.starts_with("<... open") {
            return found(text).is_some_and(|path| apart(&path));
        }
        match text.split_once('(') {
            Some(("open" | "openat" | "openat2", arguments)) => {
                asked(arguments).into_iter().chain(found(arguments)).any(|path| apart(&path))
            }
            Some(("socket" | "connect", _)) => true,
            _ => false,
        }
    };
    calls.lines().filter(|line| !tools.contains(pid(line))).filter(forbidden).collect()
}

/// The path that an `open` or `openat` asks for, as strace shows its arguments: `AT_FDCWD</dir>, "name", flags`.
fn asked(arguments: &str) -> Option<String> {
    let (dir, rest) = arguments.split_once('"')?;
    let name = unescaped(rest.split_once('"')?.0);
    match in_brackets(dir) {
        Some(dir) if !name.starts_with('/') => Some(format!("{dir}/{name}")),
        _ => Some(name),
    }
}

/// The path that it led to, where it succeeded: `.. = 5</dir/name>`.
fn found(call: &str) -> Option<String> {
    let (_, result) = call.rsplit_once(") = ")?;
    in_brackets(result.strip_prefix(|c: char| c.is_ascii_digit())?)
}

fn in_brackets(text: &str) -> Option<String> {
    Some(unescaped(text.split_once('<')?.1.rsplit_once('>')?.0))
}

/// Text as strace writes it: bytes outside of ASCII in octal digits.
fn unescaped(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((&byte, tail)) = rest.split_first() {
        let digits = tail.iter().take(3).take_while(|d| (b'0'..b'8').contains(d)).count();
        rest = tail;
        if byte == b'\\' && digits > 0 {
            bytes.push(tail[..digits].iter().fold(0u8, |value, digit| value.wrapping_mul(8).wrapping_add(digit - b'0')));
            rest = &tail[digits..];
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What is wrong with a refusal.
fn look_at_refusal(&(_, exit, parts, break_it): &Case, sound_memory_bytes: u64) -> Vec<String> {
    let place = Place::new(break_it);
    let before = listing(place.dir.path());
    let cache = place.path("cache");
    let seen = place.build(&cache, &["--quiet"]);
    let mut wrong = Vec::new();
    let mut check = |holds: bool, what: String| wrong.extend((!holds).then_some(what));
    check(seen.status.code() == Some(exit), format!("ended with {}", seen.status));
    let (errors, others): (Vec<&str>, Vec<&str>) = seen.stderr.lines().partition(|line| line.starts_with("error["));
    let line = errors.first().copied().unwrap_or_default();
    check(errors.len() == 1 && others.iter().all(|line| line.starts_with("help: ")), "not one line".into());
    check(line.starts_with(&format!("error[E{exit}-")) && line.len() <= 500, format!("a line of {} bytes", line.len()));
    check(!seen.stderr.chars().any(|c| c.is_control() && c != '\n') && !seen.stderr.contains("panicked"), "untidy".into());
    let missing: Vec<_> = parts.iter().filter(|part| !line.contains(**part)).collect();
    check(missing.is_empty(), format!("does not say {missing:?}"));
    check(seen.time < TIME_MAX, format!("took {:?}", seen.time));
    let memory_max = sound_memory_bytes + MEMORY_ABOVE_SOUND_BYTES;
    check(seen.memory_bytes <= memory_max, format!("took {} MB, a sound build {} MB", seen.memory_bytes >> 20, sound_memory_bytes >> 20));
    check(fs::read(place.path("stdout")).unwrap().is_empty(), "wrote to stdout".into());
    for file in ["stdout", "stderr", "calls"] {
        _ = fs::remove_file(place.path(file));
    }
    let after = listing(place.dir.path());
    check(before == after, format!("left or changed {:?}", before.symmetric_difference(&after).collect::<Vec<_>>()));
    if let Some(calls) = &seen.calls {
        let model = place.model();
        let found = forbidden_calls(calls, &[model.to_str().unwrap(), place.path("out").to_str().unwrap(), cache.to_str().unwrap()]);
        check(found.is_empty(), format!("calls, {} in all, first {:?}", found.len(), found.first()));
        let programs = calls.lines().filter(|l| l.contains(" execve")).count();
        check(programs == 1, format!("started {programs} programs"));
    }
    if !wrong.is_empty() {
        wrong.push(seen.stderr);
    }
    wrong
}

/// Runs every case on all cores; panics with what is wrong.
fn every<C: Sync>(cases: &[&C], name: impl Fn(&C) -> &'static str + Sync, look: impl Fn(&C) -> Vec<String> + Sync) {
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(&case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let wrong = look(case);
                    if !wrong.is_empty() {
                        failures.lock().unwrap().push(format!("{}: {}", name(case), wrong.join("; ")));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

/// Accepted directories whose numbers are not those of the sound model.
const OTHER_NUMBERS: [&str; 13] = [
    "gpt2",
    "encoder_that_says_so",
    "gptq",
    "gptq_without_g_idx",
    "gptq_biases_of_no_layer",
    "gptq_head",
    "gptq_index_of_zeros",
    "gptq_of_no_layer",
    "gptq_scales_of_bf16",
    "mixed_dtypes",
    "tied_embeddings",
    "tied_embeddings_stored_as_head",
    "tied_embeddings_stored_twice",
];

/// What is wrong with what was made of an accepted directory.
fn look_at_accepted(&(name, warning, change): &Accepted, sound: &Sound) -> Vec<String> {
    let place = Place::new(change);
    let before = listing(&place.model());
    let seen = place.build(&cache(), &[]);
    let mut wrong = Vec::new();
    let mut check = |holds: bool, what: String| wrong.extend((!holds).then_some(what));
    check(seen.status.success(), format!("ended with {}", seen.status));
    let warnings: Vec<&str> = seen.stderr.lines().filter(|line| line.starts_with("warning[")).collect();
    let expected = usize::from(!warning.is_empty());
    check(warnings.len() == expected && warnings.iter().all(|w| w.contains(warning)), format!("warnings {warnings:?}, not {expected}"));
    check(before == listing(&place.model()), "changed the model's directory".into());
    check(seen.memory_bytes <= sound.memory_bytes + MEMORY_ABOVE_SOUND_BYTES, format!("took {} MB", seen.memory_bytes >> 20));
    let out = place.path("out/exe");
    let mut names = listing(&place.path("out")).into_iter();
    check(names.next().is_some_and(|n| n.starts_with(out.to_str().unwrap())) && names.next().is_none(), "left more than the output".into());
    if let Some(calls) = &seen.calls {
        let model = place.model();
        let found = forbidden_calls(calls, &[model.to_str().unwrap(), place.path("out").to_str().unwrap(), cache().to_str().unwrap()]);
        check(found.is_empty(), format!("calls, {} in all, first {:?}", found.len(), found.first()));
    }
    if wrong.is_empty() {
        let logits = run(&out, if name == "encoder_that_says_so" { "embed" } else { "logits" });
        let same = logits == sound.logits;
        wrong.extend(
            (same == OTHER_NUMBERS.contains(&name)).then(|| format!("numbers are {}: {logits}", if same { "the same" } else { "others" })),
        );
    } else {
        wrong.push(seen.stderr);
    }
    wrong
}

/// What an executable computes for some tokens.
fn run(exe: &Path, verb: &str) -> String {
    let output = Command::new(exe).args([verb, "--tokens", "1,5,9,31", "--json"]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// What the others are held against.
struct Sound {
    memory_bytes: u64,
    logits: String,
}

impl Sound {
    fn new() -> Sound {
        let place = Place::new(|_| {});
        let seen = place.build(&cache(), &[]);
        assert!(seen.status.success(), "{}", seen.stderr);
        Sound { memory_bytes: seen.memory_bytes, logits: run(&place.path("out/exe"), "logits") }
    }
}

#[test]
fn refusals_from_outside() {
    let sound = Sound::new();
    let cases: Vec<&Case> = refused().collect();
    every(&cases, |case| case.0, |case| look_at_refusal(case, sound.memory_bytes));
}

#[test]
fn accepted_from_outside() {
    let sound = Sound::new();
    let cases: Vec<&Accepted> = accepted().collect();
    every(&cases, |case| case.0, |case| look_at_accepted(case, &sound));
}

/// Code for each layer takes time without end.
#[test]
fn layers_that_all_differ() {
    for (layers, code) in [(60, 0), (200, 7)] {
        let place = Place::new(|_| {});
        let toy = Toy::write(&place.model());
        gpt2(&toy, |list| {
            let of_layer: Vec<_> = list.iter().filter(|t| t.name.contains(".h.0.")).cloned().collect();
            list.extend((1..layers).flat_map(|i| {
                of_layer.iter().cloned().map(move |t| ToyTensor { name: t.name.replace(".h.0.", &format!(".h.{i}.")), ..t })
            }));
        });
        toy.config("n_layer", layers.into());
        toy.config("scale_attn_by_inverse_layer_idx", true.into());
        let seen = place.build(&cache(), &["--dry-run"]);
        assert_eq!(seen.status.code(), Some(code), "{}", seen.stderr);
        assert!(seen.time < TIME_MAX, "{:?}", seen.time);
        assert_eq!(seen.stderr.contains("layers: layers come in more than 128 runs of equal ones"), code == 7, "{}", seen.stderr);
    }
}

/// What the model does not read has no say in the types, however large it is.
#[test]
fn what_is_not_read_chooses_no_types() {
    for unread in ["known_buffers", "large_extra_tensor"] {
        let (.., change) = accepted().find(|(name, ..)| *name == unread).unwrap();
        let place = Place::new(*change);
        let mut command = Command::new(cargo_bin("rcompile"));
        command.args(["build", "--dry-run", "--quiet", "--json", "--cpu", "znver4", "--model"]).arg(place.model());
        let output = command.output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
        assert_eq!((&report["compute"], &report["kv_dtype"]), (&"bf16".into(), &"bf16".into()), "{unread}: {report}");
    }
}
