//! Executables under test: built once, run often.
//!
//! [`build`] keeps what it built in `<target>/rcompile-tests/<test binary>-<its hash>/`, under a key of model directory and arguments, so
//! that tests of one binary share executables and a second run of the same binary builds nothing. The compiler is part of the test binary:
//! another compiler is another hash. Directories of binaries that do not run now are removed, since all of them would be 4 GB. Objects go
//! through the compile cache in `<target>/rcompile-tests/rcompile`, which all test binaries share: its keys hold the sources of the code
//! generator, so that what was removed is soon built again.

use crate::Machine;
use crate::machine::qemu;
use rcompile::options::{Command as Verb, Parsed, parse};
use rcompile::report::Report;
use rcompile::{Error, pipeline};
use serde_json::Value;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// A run that takes longer than this hangs.
const RUN_MAX: Duration = Duration::from_secs(300);
/// The same on an emulated CPU, where a trained model's perplexity takes minutes.
const EMULATED_RUN_MAX: Duration = Duration::from_secs(1800);
/// What a directory of executables is known by; a test binary holds it while it runs.
const LOCK: &str = "lock";
/// Longest time for which a fresh executable may be busy.
const BUSY_MAX: std::time::Duration = std::time::Duration::from_secs(10);

/// `rcompile build --quiet ARGS`, in this process, with the tests' compile cache where ARGS do not speak of one.
pub fn rcompile(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<Report, Error> {
    let mut all: Vec<OsString> = ["rcompile", "build", "--quiet"].map(Into::into).to_vec();
    all.extend(args.into_iter().map(|a| a.as_ref().to_os_string()));
    if !all.iter().any(|a| a == "--no-cache" || a == "--cache-dir") {
        all.extend(["--cache-dir".into(), cache().with_file_name("rcompile").into_os_string()]);
    }
    match parse(all)? {
        Parsed::Run(Verb::Build(options)) => pipeline::run(&options),
        other => panic!("not a build: {other:?}"),
    }
}

/// The executable of a model directory with these options of `rcompile build` (words separated by spaces).
pub fn build(model: &Path, options: &str) -> Exe {
    Machine::host().build(model, options)
}

/// The same, for and on a machine.
pub(crate) fn build_on(machine: &Machine, model: &Path, options: &str) -> Exe {
    type Slot = Arc<OnceLock<Exe>>;
    static BUILT: Mutex<Option<HashMap<PathBuf, Slot>>> = Mutex::new(None);
    let model = model.canonicalize().unwrap_or_else(|e| panic!("{}: {e}", model.display()));
    let options = format!("{options}{}", machine.build_options());
    let path = cache().join(format!("{}-{}", name_of(&model), key(&model, &options)));
    let slot = {
        let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
        built.get_or_insert_default().entry(path.clone()).or_default().clone()
    };
    slot.get_or_init(|| {
        if !path.is_file() {
            let mut args: Vec<&OsStr> = options.split_whitespace().map(OsStr::new).collect();
            args.extend([OsStr::new("--model"), model.as_os_str(), OsStr::new("-o"), path.as_os_str()]);
            rcompile(args).unwrap_or_else(|e| panic!("{} {options}: {e}", model.display()));
        }
        Exe { path, emulator: vec![] }
    })
    .clone()
    .on(machine)
}

/// A model directory that a test writes itself: `write` runs once per test binary, and the path stays the same, so that
/// executables built from it are found again.
pub fn model_dir(name: &str, write: impl FnOnce(&Path)) -> PathBuf {
    let models = cache().join("models");
    let dir = models.join(name);
    if !dir.is_dir() {
        std::fs::create_dir_all(&models).unwrap_or_else(|e| panic!("{}: {e}", models.display()));
        let temp = tempfile::tempdir_in(&models).expect("temporary directory");
        write(temp.path());
        // Another test may have been faster: then the rename fails, as its directory is not empty.
        if std::fs::rename(temp.path(), &dir).is_ok() {
            let _ = temp.keep();
        }
    }
    dir
}

/// An executable made by `rcompile`.
#[derive(Clone, Debug)]
pub struct Exe {
    path: PathBuf,
    /// What runs it, with arguments; empty: this machine itself.
    emulator: Vec<String>,
}

/// What a run left.
#[derive(Debug)]
pub struct Ran {
    /// Exit code; `None` after a signal.
    pub code: Option<i32>,
    /// Data.
    pub stdout: String,
    /// Messages.
    pub stderr: String,
}

impl Exe {
    /// An executable that is there already.
    pub fn at(path: PathBuf) -> Exe {
        Exe { path, emulator: vec![] }
    }

    /// The same executable on another machine.
    pub fn on(mut self, machine: &Machine) -> Exe {
        self.emulator = machine.emulator();
        self
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs a verb with an empty environment in the root directory.
    pub fn run<A: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Ran {
        self.run_with(args, "")
    }

    /// The same with text on stdin.
    pub fn run_with<A: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = A>, stdin: &str) -> Ran {
        let mut words = self.emulator.iter().map(OsStr::new).chain([self.path.as_os_str()]);
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).args(args).env_clear().current_dir("/");
        let output = output(&mut command, stdin.as_bytes());
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap_or_else(|e| panic!("{command:?}: {e}"));
        Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Runs a verb that must succeed and returns what it prints.
    pub fn text<A: AsRef<OsStr> + Clone>(&self, args: impl IntoIterator<Item = A>) -> String {
        self.text_with(args, "")
    }

    /// The same with text on stdin.
    pub fn text_with<A: AsRef<OsStr> + Clone>(&self, args: impl IntoIterator<Item = A>, stdin: &str) -> String {
        let args: Vec<A> = args.into_iter().collect();
        let ran = self.run_with(&args, stdin);
        let shown = || args.iter().map(|a| a.as_ref().to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
        assert_eq!(ran.code, Some(0), "{} {}\n{}", self.path.display(), shown(), ran.stderr);
        ran.stdout
    }

    /// Runs a verb with `--json`.
    pub fn json<A: AsRef<OsStr> + Clone>(&self, args: impl IntoIterator<Item = A>) -> Value {
        self.json_with(args, "")
    }

    /// The same with text on stdin.
    pub fn json_with<A: AsRef<OsStr> + Clone>(&self, args: impl IntoIterator<Item = A>, stdin: &str) -> Value {
        let args = args.into_iter().map(|a| a.as_ref().to_os_string()).chain(["--json".into()]);
        let text = self.text_with(args, stdin);
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}: {text:?}", self.path.display()))
    }

    /// Logits after `tokens`, all of them, by id. f32 values, exactly as computed.
    pub fn logits(&self, tokens: &[u32], options: &[&str]) -> Vec<f32> {
        let list = crate::joined(tokens);
        let args = ["logits", "--tokens", &list, "--top", "1000000"].into_iter().chain(options.iter().copied());
        let report = self.json(args);
        let top = report["top"].as_array().expect("top");
        let mut logits = vec![f32::NAN; top.len()];
        let mut last = f64::INFINITY;
        for pair in top {
            let (id, logit) = (pair[0].as_u64().expect("id"), pair[1].as_f64().expect("a finite logit"));
            assert!(logit <= last, "the highest come first");
            last = logit;
            // Shortest decimal digits of an f32: through f64 and back gives the same bits.
            logits[id as usize] = logit as f32;
        }
        assert!(logits.iter().all(|x| !x.is_nan()), "every id once");
        logits
    }

    /// Greedy tokens after `tokens`, not stopping at an end of text.
    pub fn greedy(&self, tokens: &[u32], count: usize, options: &[&str]) -> Vec<u32> {
        let (list, count) = (crate::joined(tokens), count.to_string());
        let args = ["generate", "--tokens", &list, "-n", &count, "--temp", "0", "--ignore-eos"];
        let report = self.json(args.into_iter().chain(options.iter().copied()));
        assert_eq!(crate::ids(&report["prompt_tokens"]), tokens);
        crate::ids(&report["tokens"])
    }
}

/// Runs a command to its end, which must come within five minutes, or thirty under emulation.
pub fn output(command: &mut Command, stdin: &[u8]) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = spawn(command);
    let pid = child.id();
    let mut input = child.stdin.take().expect("piped");
    let stdin = stdin.to_vec();
    let feeder = std::thread::spawn(move || {
        // A verb that does not read its stdin closes it: not an error.
        let _ = input.write_all(&stdin);
    });
    let (done, finished) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn(move || done.send(child.wait_with_output()));
    let start = Instant::now();
    let is_emulated = qemu().is_some_and(|qemu| command.get_program() == OsStr::new(&qemu));
    let result = finished.recv_timeout(if is_emulated { EMULATED_RUN_MAX } else { RUN_MAX }).unwrap_or_else(|_| {
        let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
        panic!("{command:?}: still running after {:?}", start.elapsed())
    });
    waiter.join().expect("waiter").ok();
    feeder.join().expect("feeder");
    result.unwrap_or_else(|e| panic!("{command:?}: {e}"))
}

/// Starts a command. An executable that this process has just written may be busy for a moment: a child that another test forked
/// holds the writer's descriptor until its own exec.
fn spawn(command: &mut Command) -> std::process::Child {
    let start = Instant::now();
    loop {
        match command.spawn() {
            Ok(child) => return child,
            Err(e) if e.kind() == ErrorKind::ExecutableFileBusy && start.elapsed() < BUSY_MAX => {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            Err(e) => panic!("{command:?}: {e}"),
        }
    }
}

fn name_of(model: &Path) -> String {
    model.file_name().map_or("model".into(), |n| n.to_string_lossy().into_owned())
}

/// Hash of the model directory's path, its files' names, sizes and times, and the options.
fn key(model: &Path, options: &str) -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(model.as_os_str().as_bytes()).update(b"\0").update(options.as_bytes());
    let mut files: Vec<_> = std::fs::read_dir(model).expect("model directory").flatten().collect();
    files.sort_by_key(|f| f.file_name());
    for file in files {
        let Ok(meta) = std::fs::metadata(file.path()) else { continue };
        let changed = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        hash.update(b"\0").update(file.file_name().as_bytes());
        hash.update(&meta.len().to_le_bytes()).update(&changed.as_nanos().to_le_bytes());
    }
    hash.finalize().to_hex()[..16].to_string()
}

/// The directory of this test binary's executables.
pub fn cache() -> &'static Path {
    static CACHE: OnceLock<(PathBuf, File)> = OnceLock::new();
    let (path, _lock) = CACHE.get_or_init(|| {
        let this = std::env::current_exe().expect("path of the test binary");
        let bytes = std::fs::read(&this).unwrap_or_else(|e| panic!("{}: {e}", this.display()));
        let hash = blake3::hash(&bytes).to_hex()[..16].to_string();
        // target/debug/deps/bits-0123456789abcdef -> target/rcompile-tests/bits-<hash>
        let file = name_of(&this);
        let name = file.rsplit_once('-').map_or(file.as_str(), |(name, _)| name);
        let target = this.ancestors().find(|d| d.join("CACHEDIR.TAG").is_file()).or(this.parent()).expect("a target directory");
        let all = target.join("rcompile-tests");
        let own = all.join(format!("{name}-{hash}"));
        // A shared lock says that the directory is in use.
        let lock = loop {
            std::fs::create_dir_all(&own).unwrap_or_else(|e| panic!("{}: {e}", own.display()));
            let lock = match File::create(own.join(LOCK)) {
                // Another binary removed the directory meanwhile.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                lock => lock.unwrap_or_else(|e| panic!("{}: {e}", own.display())),
            };
            lock.lock_shared().expect("lock");
            // Or it removed it while this one waited for the lock.
            if own.join(LOCK).is_file() {
                break lock;
            }
        };
        for other in std::fs::read_dir(&all).into_iter().flatten().flatten() {
            let other = other.path();
            if other == own {
                continue;
            }
            // Opened, not created: what has no lock is not such a directory.
            let Ok(lock) = File::open(other.join(LOCK)) else { continue };
            if !matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) {
                let _ = std::fs::remove_dir_all(other);
            }
        }
        (own, lock)
    });
    path
}
