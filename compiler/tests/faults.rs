//! `rcompile build` where the machine fails it: killed, a full disk, loss of power, directories that cannot be written, odd environments.
//!
//! In: a sound tiny model, and a fault made from outside: a signal, a library in front of libc, permissions, the environment; strace, for
//! what a loss of power would meet. Out: an output with the bytes of an undisturbed build, or the one that was there; one line that says
//! why, its exit code, and nothing left behind.

mod common;

use assert_cmd::cargo::cargo_bin;
use common::strace;
use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime};

/// The cache of these tests, not the user's.
const CACHE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/../rcompile-tests");

/// The executable of an undisturbed build, after which the cache is warm.
static SOUND: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    succeeded(&build(&out).output().unwrap());
    fs::read(out).unwrap()
});

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama-gqa-tied")
}

/// `rcompile build` of a model.
fn build_model(model: &Path, out: &Path) -> Command {
    let mut command = Command::new(cargo_bin("rcompile"));
    // Settings of the person who runs the tests.
    std::env::vars().filter(|(k, _)| k.starts_with("RCOMPILE_")).for_each(|(k, _)| _ = command.env_remove(k));
    command.args(["build", "--cpu", "x86-64-v3", "--model"]).arg(model).arg("-o").arg(out).env("XDG_CACHE_HOME", CACHE);
    command
}

/// `rcompile build` of the tiny model.
fn build(out: &Path) -> Command {
    let mut command = build_model(&golden(), out);
    command.args(["--no-tokenizer", "--buckets", "1,8", "--quiet"]);
    command
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The warnings of a build that succeeds.
fn succeeded(output: &Output) -> Vec<String> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    stderr.lines().filter(|line| line.starts_with("warning[")).map(String::from).collect()
}

/// The line of a build that fails with this exit code, and says nothing else but help.
fn refused(output: &Output, exit: i32) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(exit), "{stderr}");
    let (errors, others): (Vec<&str>, Vec<&str>) = stderr.lines().partition(|line| line.starts_with(&format!("error[E{exit}-")));
    assert!(errors.len() == 1 && others.iter().all(|line| line.starts_with("help: ")), "{stderr}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    errors[0].into()
}

/// Starts a command whose stdout is open in every program that it starts too: who has read it to its end has waited for them all.
fn start_with_family(command: &Command) -> Child {
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$0\" \"$@\" 9>&1"]).arg(command.get_program()).args(command.get_args()).env("XDG_CACHE_HOME", CACHE);
    shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Moments are spread over the time that a build takes. The linker of a build that is killed goes on until it is done.
#[test]
fn killed_at_any_moment() {
    let moments = if std::env::var_os("RCOMPILE_TEST_ALL").is_some() { 200 } else { 20 };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let sound = Some(&SOUND[..]);
    let start = Instant::now();
    succeeded(&start_with_family(&build(&out)).wait_with_output().unwrap());
    let (mut time, mut killed) = (start.elapsed(), 0);
    for moment in 1..=moments {
        _ = fs::remove_file(&out);
        let old = (moment % 2 == 0).then_some(&b"old"[..]);
        old.into_iter().for_each(|old| fs::write(&out, old).unwrap());
        let start = Instant::now();
        let mut child = start_with_family(&build(&out));
        while start.elapsed() < time * moment / moments {
            if child.try_wait().unwrap().is_some() {
                // What ran beside the first build has ended.
                time = start.elapsed();
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        let status = child.wait_with_output().unwrap().status;
        let was_killed = status.signal() == Some(9);
        killed += u32::from(was_killed);
        let found = fs::read(&out).ok();
        let is_right = found.as_deref() == sound || was_killed && found.as_deref() == old;
        assert!(is_right, "{moment} of {moments} in {time:?}: {status}, {:?} bytes", found.map(|bytes| bytes.len()));
    }
    assert!(killed > moments / 4, "{killed} of {moments} builds had not ended: the test shows little");
    let left = names(dir.path()).into_iter().filter(|name| name != "out");
    // Not younger than a directory that may be in the making.
    let an_hour_ago = SystemTime::now() - Duration::from_secs(3600);
    left.for_each(|name| File::open(dir.path().join(name)).unwrap().set_modified(an_hour_ago).unwrap());
    succeeded(&build(&out).output().unwrap());
    assert!(fs::read(&out).ok().as_deref() == sound);
    assert_eq!(names(dir.path()), ["out"]);
}

/// A library in front of libc: it lists the calls that change files, one a line, and the one of number `FAULT_AT` fails as on a full disk.
const FULL_DISK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int count, fail_at, list;

__attribute__((constructor)) static void begin(void) {
    unsetenv("LD_PRELOAD"); // Programs that the process starts do not fail.
    fail_at = atoi(getenv("FAULT_AT"));
    list = open(getenv("FAULT_LIST"), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

static int fails(const char *call, int file, const char *path) {
    char link[32], name[4096] = "";
    struct stat meta;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (!path && (fstat(file, &meta) || !(S_ISREG(meta.st_mode) || S_ISDIR(meta.st_mode)) || readlink(link, name, sizeof name - 1) < 0))
        return 0;
    int number = __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
    dprintf(list, "%s %s\n", call, path ? path : name);
    errno = ENOSPC;
    return number == fail_at;
}

#define WRAP(type, call, file, path, parameters, arguments)                   \
    type call parameters {                                                    \
        type(*next) parameters = (type(*) parameters)dlsym(RTLD_NEXT, #call); \
        return fails(#call, file, path) ? -1 : next arguments;                \
    }
WRAP(ssize_t, write, file, 0, (int file, const void *bytes, size_t size), (file, bytes, size))
WRAP(ssize_t, pwrite64, file, 0, (int file, const void *bytes, size_t size, off64_t at), (file, bytes, size, at))
WRAP(int, ftruncate64, file, 0, (int file, off64_t size), (file, size))
WRAP(int, fallocate64, file, 0, (int file, int mode, off64_t at, off64_t size), (file, mode, at, size))
WRAP(int, fsync, file, 0, (int file), (file))
WRAP(int, fdatasync, file, 0, (int file), (file))
WRAP(int, rename, -1, to, (const char *from, const char *to), (from, to))

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = flags & O_CREAT ? va_arg(rest, int) : 0;
    va_end(rest);
    int (*next)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    return flags & O_CREAT && fails("open64", -1, path) ? -1 : next(path, flags, mode);
}
"#;

/// [`FULL_DISK`], compiled.
struct FullDisk {
    dir: tempfile::TempDir,
}

impl FullDisk {
    fn new() -> FullDisk {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("full_disk.c"), FULL_DISK).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o", "full_disk.so", "full_disk.c", "-ldl"]);
        let compiled = cc.current_dir(dir.path()).output().unwrap();
        assert!(compiled.status.success(), "{compiled:?}");
        FullDisk { dir }
    }
    /// Runs a build whose call number `fail_at`, from 1, fails; gives all calls.
    fn run(&self, build: &mut Command, fail_at: usize) -> (Output, Vec<String>) {
        let list = self.dir.path().join("list");
        build.env("LD_PRELOAD", self.dir.path().join("full_disk.so")).env("FAULT_AT", fail_at.to_string()).env("FAULT_LIST", &list);
        let output = build.output().unwrap();
        (output, fs::read_to_string(list).unwrap().lines().map(String::from).collect())
    }
}

/// Ten calls among all, and the last ones, each of which has a line of its own in the driver, up to the rename.
#[test]
fn a_full_disk() {
    let (disk, dir) = (FullDisk::new(), tempfile::tempdir().unwrap());
    let out = dir.path().join("out");
    let sound = &*SOUND;
    let (output, calls) = disk.run(&mut build(&out), 0);
    succeeded(&output);
    let rename = 1 + calls.iter().position(|call| call.starts_with("rename ")).expect("a rename to the output's name");
    let sizing = 1 + calls.iter().position(|call| call.starts_with("ftruncate64 ")).expect("the executable gets its length");
    for nth in (0..10).map(|i| 1 + i * (rename - 1) / 9).chain([sizing]).chain(rename - 5..rename).collect::<BTreeSet<_>>() {
        fs::write(&out, "old").unwrap();
        let (output, calls) = disk.run(&mut build(&out), nth);
        let call = calls.get(nth - 1).map(String::as_str).expect("the call that fails");
        println!("{nth} of {rename}: {call}");
        if call.contains("/rcompile-tests/") {
            succeeded(&output);
            assert!(fs::read(&out).unwrap() == *sound);
        } else {
            let line = refused(&output, 8);
            assert!(line.contains("No space left on device"), "{line}");
            assert_eq!(fs::read(&out).unwrap(), b"old");
        }
        assert_eq!(names(dir.path()), ["out"]);
    }
}

/// Behind the rename there is an output, which a loss of power could undo: a warning.
#[test]
fn a_directory_that_cannot_be_synced() {
    let (disk, dir) = (FullDisk::new(), tempfile::tempdir().unwrap());
    let out = dir.path().join("out");
    // Both runs have the same calls where the cache is warm.
    let sound = &*SOUND;
    let build = |out: &Path| {
        let mut command = build_model(&golden(), out);
        command.args(["--no-tokenizer", "--buckets", "1,8"]);
        command
    };
    let (_, calls) = disk.run(&mut build(&out), 0);
    let last = calls.iter().rposition(|call| call.starts_with("fsync ")).expect("the directory is synced");
    assert!(calls[..last].iter().any(|call| call.starts_with("rename ")), "{calls:?}");
    fs::write(&out, "old").unwrap();
    let (output, _) = disk.run(&mut build(&out), last + 1);
    let warnings = succeeded(&output);
    assert!(warnings.len() == 1 && warnings[0].starts_with("warning[W-output]: ") && warnings[0].contains("syncing"), "{warnings:?}");
    assert!(fs::read(&out).unwrap() == *sound);
}

/// Where only the cache is on a full disk, the build goes on, and says so.
#[test]
fn a_full_disk_under_the_cache() {
    let (disk, dir) = (FullDisk::new(), tempfile::tempdir().unwrap());
    // As the calls have it.
    let path = dir.path().canonicalize().unwrap();
    let [out, cache] = ["out", "cache"].map(|name| path.join(name));
    let run = |fail_at: usize| {
        _ = fs::remove_file(&out);
        _ = fs::remove_dir_all(&cache);
        let mut command = build_model(&golden(), &out);
        command.args(["--no-tokenizer", "--buckets", "1", "--cache-dir"]).arg(&cache);
        let (output, calls) = disk.run(&mut command, fail_at);
        assert_eq!(names(&path), ["cache", "out"]);
        (succeeded(&output), calls, fs::read(&out).unwrap())
    };
    let (warnings, calls, sound) = run(0);
    assert!(warnings.is_empty(), "{warnings:?}");
    let in_cache: Vec<usize> = (1..).zip(&calls).filter(|(_, call)| call.contains(cache.to_str().unwrap())).map(|(nth, _)| nth).collect();
    // The tag of such directories, then two files to try it, then the entries.
    for nth in [in_cache[1], in_cache[5], in_cache[in_cache.len() - 1]] {
        let (warnings, calls, bytes) = run(nth);
        println!("{nth} of {}: {}", calls.len(), calls[nth - 1]);
        assert!(warnings.len() == 1 && warnings[0].starts_with("warning[W-cache]: "), "{warnings:?}");
        assert!(warnings[0].contains("No space left on device"), "{warnings:?}");
        assert!(bytes == sound);
        let objects = cache.join("objects");
        let unfinished = objects.exists().then(|| names(&objects)).into_iter().flatten().find(|name| name.starts_with('.'));
        assert_eq!(unfinished, None);
    }
}

/// A call of a process, as strace saw it.
struct Call<'a> {
    pid: &'a str,
    name: &'a str,
    arguments: &'a str,
    /// Lines of strace; other calls of other threads may lie between them.
    begin: usize,
    end: usize,
    succeeded: bool,
}

/// The calls in what strace writes: `pid name(arguments) = result`, in two parts where a call of another thread comes between.
fn parse_calls(trace: &str) -> Vec<Call<'_>> {
    let mut calls: Vec<Call> = Vec::new();
    for (line, text) in trace.lines().enumerate() {
        let Some((pid, text)) = text.split_once(' ') else { continue };
        let (text, succeeded) = (text.trim_start(), !text.contains(") = -1"));
        if text.starts_with("<... ") {
            let begun = calls.iter_mut().rfind(|call| call.pid == pid).expect("a call that was begun");
            (begun.end, begun.succeeded) = (line, succeeded);
        } else if let Some((name, arguments)) = text.split_once('(') {
            calls.push(Call { pid, name, arguments, begin: line, end: line, succeeded });
        }
    }
    calls
}

/// Whenever the power is lost, what has the output's name is on the disk whole: its bytes are there before the name is, and the name is
/// when the build has ended.
#[test]
fn a_loss_of_power() {
    if !strace() {
        eprintln!("skipped: without strace nobody sees the order of calls");
        return;
    }
    for outputs in [&["out"][..], &["out.weights", "out"]] {
        let dir = tempfile::tempdir().unwrap();
        // As strace shows it.
        let path = dir.path().canonicalize().unwrap();
        let mut build = build(&path.join("out"));
        build.args(["--weights", if outputs.len() > 1 { "split" } else { "embed" }]);
        let mut traced = Command::new("strace");
        let changing = "trace=write,writev,pwrite64,pwritev,ftruncate,fallocate,copy_file_range,fsync,fdatasync,rename,renameat,renameat2";
        traced.args(["-f", "-y", "-s", "0", "-e", changing, "-o"]).arg(path.join("trace"));
        traced.arg(build.get_program()).args(build.get_args()).env("XDG_CACHE_HOME", CACHE);
        succeeded(&traced.output().unwrap());
        let trace = fs::read_to_string(path.join("trace")).unwrap();
        let calls = parse_calls(&trace);
        let syncs = |path: &str| {
            let file = format!("<{path}>");
            calls.iter().filter(move |c| ["fsync", "fdatasync"].contains(&c.name) && c.succeeded && c.arguments.contains(&file))
        };
        for output in outputs {
            let to = path.join(output).display().to_string();
            let renames: Vec<_> =
                calls.iter().filter(|c| c.name.starts_with("rename") && c.arguments.split('"').nth(3) == Some(&to)).collect();
            let [rename] = renames[..] else { panic!("{} renames to {to}", renames.len()) };
            let from = rename.arguments.split('"').nth(1).expect("two names");
            let changes = calls.iter().filter(|c| !c.name.contains("sync") && c.arguments.contains(&format!("<{from}>")));
            let changed = changes.map(|c| c.end).max().expect("something is written");
            assert!(syncs(from).any(|sync| changed < sync.begin && sync.end < rename.begin), "{output} is not synced whole");
            assert!(syncs(path.to_str().unwrap()).any(|sync| rename.end < sync.begin), "the name {output} is not synced");
        }
    }
}

/// Somebody whom permissions bind: for root nothing is read-only.
fn bound_by_permissions(command: &mut Command) -> &mut Command {
    if rustix::process::geteuid().is_root() { command.uid(65534).gid(65534) } else { command }
}

/// What permissions take away from a build: first its cache, then its output, then its input.
#[test]
fn directories_that_may_not_be_used() {
    let dir = tempfile::tempdir().unwrap();
    let [exe, model, out, closed] = ["rcompile", "llama-gqa-tied", "out", "closed"].map(|name| dir.path().join(name));
    let allow = |path: &Path, mode: u32| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    allow(dir.path(), 0o755);
    for (path, mode) in [(&model, 0o755), (&out, 0o777), (&closed, 0o755)] {
        fs::create_dir(path).unwrap();
        allow(path, mode);
    }
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(golden().join(name), model.join(name)).unwrap();
    }
    // The target directory may be root's alone.
    fs::hard_link(cargo_bin("rcompile"), &exe).or_else(|_| fs::copy(cargo_bin("rcompile"), &exe).map(drop)).unwrap();
    fs::write(closed.join("exe"), "old").unwrap();
    allow(&closed, 0o555);
    let run = |out: &Path, more: &[&str]| {
        let mut command = Command::new(&exe);
        command.args(build_model(&model, out).get_args()).args(["--no-tokenizer", "--buckets", "1,8"]).args(more);
        bound_by_permissions(&mut command).output().unwrap()
    };

    let warnings = succeeded(&run(&out.join("exe"), &["--cache-dir", closed.to_str().unwrap()]));
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].starts_with("warning[W-cache]: ") && warnings[0].contains("Permission denied"), "{warnings:?}");
    assert!(fs::read(out.join("exe")).unwrap() == *SOUND);

    let line = refused(&run(&closed.join("exe"), &["--quiet", "--no-cache"]), 8);
    assert!(line.contains(closed.to_str().unwrap()) && line.contains("Permission denied"), "{line}");
    assert_eq!(fs::read(closed.join("exe")).unwrap(), b"old");
    assert_eq!(names(&closed), ["exe"]);
    // So that it can be removed.
    allow(&closed, 0o755);

    allow(&model.join("config.json"), 0o000);
    let line = refused(&run(&out.join("exe"), &["--quiet", "--no-cache"]), 3);
    assert!(line.contains("config.json") && line.contains("EACCES"), "{line}");
    assert_eq!(names(&out), ["exe"]);
}

/// Nothing in the environment but the way to a C compiler, 64 files at a time, and nobody at the other end of anything.
#[test]
fn a_poor_environment() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let build = build(&out);
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -n 64; exec \"$0\" \"$@\" <&- >&-"]).arg(build.get_program()).args(build.get_args());
    let output = shell.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("LANG", "C").output().unwrap();
    assert!(succeeded(&output).is_empty() && output.stderr.is_empty(), "{output:?}");
    assert!(fs::read(&out).unwrap() == *SOUND);
    assert_eq!(names(dir.path()), ["out"]);
}

/// Builds an executable that runs: the process goes on with the old file, whose weights it has mapped.
#[test]
fn an_output_that_runs() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let rebuild = |buckets: &str| {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model");
        succeeded(&build_model(&demo, &out).args(["--quiet", "--buckets", buckets]).output().unwrap());
        fs::metadata(&out).unwrap()
    };
    let start_chat = || {
        let mut chat = Command::new(&out);
        chat.args(["chat", "--temp", "0", "-n", "8"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut chat = chat.spawn().unwrap();
        let (input, output) = (chat.stdin.take().unwrap(), BufReader::new(chat.stdout.take().unwrap()));
        (chat, input, output)
    };
    let talk = |between: &dyn Fn()| {
        let (mut chat, mut input, mut output) = start_chat();
        let mut answers = String::new();
        input.write_all(b"Hello\n").unwrap();
        output.read_line(&mut answers).unwrap();
        between();
        input.write_all(b"Tell me a story\n").unwrap();
        drop(input);
        output.read_to_string(&mut answers).unwrap();
        assert!(chat.wait().unwrap().success());
        answers
    };
    let before = rebuild("1");
    let undisturbed = talk(&|| {});
    assert!(undisturbed.lines().count() >= 2, "{undisturbed}");
    let disturbed = talk(&|| {
        let after = rebuild("1,2");
        assert_ne!(before.ino(), after.ino());
    });
    assert_eq!(disturbed, undisturbed);
}
