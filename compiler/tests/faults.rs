//! `rcompile build` where the machine fails it: killed, a full disk, loss of power, directories that cannot be written, odd environments.
//!
//! In: a sound tiny model, and a fault made from outside: a signal, a library in front of libc, permissions, the environment; strace, for what
//! a loss of power would meet. Out: an output with the bytes of an undisturbed build, or the one that was there; one line that says why, its
//! exit code, and nothing left behind.

use assert_cmd::cargo::cargo_bin;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
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
    for moment in 0..moments {
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
    assert!(killed > 0, "all builds had ended: the test shows nothing");
    let left = names(dir.path()).into_iter().filter(|name| name != "out");
    // Not younger than a directory that may be in the making.
    let an_hour_ago = SystemTime::now() - Duration::from_secs(3600);
    left.for_each(|name| File::open(dir.path().join(name)).unwrap().set_modified(an_hour_ago).unwrap());
    succeeded(&build(&out).output().unwrap());
    assert!(fs::read(&out).ok().as_deref() == sound);
    assert_eq!(names(dir.path()), ["out"]);
}
