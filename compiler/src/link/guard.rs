//! Nothing is left behind: the work directory, its lock, other temporary files, child processes, and what signals do to them.
//!
//! All files of a build lie in one directory beside the output, named `.rcompile-`, some letters and `.tmp` (so that the last step is a
//! rename within one file system); a text beside it is written under a name that begins with `.rcompile-emit`, and renamed. Both are
//! removed when the build ends in any way but SIGKILL, a crash or loss of power. What is left then is swept by the next build beside it: a
//! living build holds a lock on its directory, a dead one does not, and a text that took an hour to write is of a dead one.

use crate::error::{Error, warning};
use crate::report;
use crate::threads;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXCPU, SIGXFSZ};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tempfile::NamedTempFile;

const PREFIX: &str = ".rcompile-";
const SUFFIX: &str = ".tmp";
const TEXT_PREFIX: &str = ".rcompile-emit";

/// A work directory without a lock that is younger than this may be one that is being made.
const STALE_AFTER: Duration = Duration::from_secs(10);
/// A text that is written for longer than this is left of a build that was killed.
const STALE_TEXT_AFTER: Duration = Duration::from_secs(3600);
/// Times to look for the lock of what is to be removed, a millisecond apart.
const CLEAN_UP_TRIES: u32 = 100;
/// Renames of another build take less.
const TURN_MAX: Duration = Duration::from_secs(5);

/// What a signal has to clean up.
#[derive(Default)]
struct Alive {
    paths: Vec<PathBuf>,
    children: Vec<u32>,
}

static ALIVE: Mutex<Alive> = Mutex::new(Alive { paths: Vec::new(), children: Vec::new() });

fn alive() -> MutexGuard<'static, Alive> {
    ALIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Signals that end a process from outside: by its user, a scheduler, a limit of time.
const ENDING: [i32; 10] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGALRM, SIGUSR1, SIGUSR2, SIGXCPU, SIGVTALRM, SIGPROF];

/// From now on signals that end a process from outside kill children, remove temporary files, print one line and end the process with 128 +
/// signal; a file beyond the size limit is an error of the write and no signal.
pub fn handle_signals() -> Result<(), Error> {
    let failed = |e: std::io::Error| Error::Limit { place: "signal handler".into(), what: format!("cannot be made: {e}") };
    // A handler that does nothing: unlike an ignored signal it is the default again in the programs that we start.
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map_err(failed)?;
    // `nohup rcompile ..` outlives its terminal, and a script's `trap ''` is for its children.
    let handled = ENDING.into_iter().filter(|s| !is_ignored(*s));
    let mut signals = signal_hook::iterator::Signals::new(handled).map_err(failed)?;
    threads::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // The lock is never released: no file is renamed and no child started from here on.
            let alive = alive();
            remove_all(&alive);
            let error = Error::Interrupted(signal);
            report::say(&error.to_string());
            end(error.exit_code());
        }
    })?;
    Ok(())
}

/// Kills children and removes temporary files of a process that is about to end.
pub fn clean_up() {
    // This thread may hold the lock itself.
    for _ in 0..CLEAN_UP_TRIES {
        if let Ok(alive) = ALIVE.try_lock() {
            return remove_all(&alive);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn remove_all(alive: &Alive) {
    alive.children.iter().for_each(|&child| kill_group(child));
    for path in &alive.paths {
        // A thread may be writing a file into it at this moment.
        for _ in 0..10 {
            if std::fs::remove_dir_all(path).or_else(|_| std::fs::remove_file(path)).is_ok() || !path.exists() {
                break;
            }
        }
    }
}

/// Ends the process without destructors: those of LLVM's globals would pull them from under threads that generate code. Waits for nobody,
/// so not for stdout either, which `report::print` flushes and may hold while nobody reads it.
pub fn end(code: i32) -> ! {
    signal_hook::low_level::exit(code)
}

/// Does this process ignore the signal, as whoever started it asked for?
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

fn kill_group(child: u32) {
    if let Some(pid) = i32::try_from(child).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

/// The work directory of one build.
#[derive(Debug)]
pub struct WorkDir {
    path: PathBuf,
    _lock: File,
}

impl WorkDir {
    /// A new work directory beside `output`; stale ones there are removed.
    pub fn create(output: &Path) -> Result<WorkDir, Error> {
        let parent = parent(output);
        sweep(parent);
        let mut alive = alive();
        let dir = tempfile::Builder::new().prefix(PREFIX).suffix(SUFFIX).tempdir_in(parent);
        let path = dir.map_err(|e| Error::output(parent, "creating a work directory", &plain(&e)))?.keep();
        alive.paths.push(path.clone());
        let opened = File::open(&path);
        if let Ok(dir) = &opened {
            // On file systems without locks `sweep` gets none either, and removes nothing.
            let _ = rustix::fs::flock(dir, FlockOperation::NonBlockingLockExclusive);
        }
        match opened {
            Ok(lock) => Ok(WorkDir { path, _lock: lock }),
            Err(e) => {
                let _ = std::fs::remove_dir_all(&path);
                Err(Error::output(&path, "opening", &e))
            }
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file into it.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, Error> {
        let path = self.path.join(name);
        std::fs::write(&path, bytes).map_err(|e| Error::output(&path, "writing", &e))?;
        Ok(path)
    }

    /// Removes a file from it, if it is there.
    pub fn remove(&self, name: &str) {
        let _ = std::fs::remove_file(self.path.join(name));
    }

    /// Moves finished files to their places, all or (short of a fault between two renames) none, also when a signal arrives or another
    /// build beside this one does the same meanwhile. Gives what has to be warned of: that a loss of power may still undo it.
    pub fn publish(&self, moves: &[(&Path, &Path)]) -> Result<Option<String>, Error> {
        let _turn = self.path.parent().filter(|_| moves.len() > 1).and_then(take_turn);
        let _hold = alive();
        for (from, to) in moves {
            std::fs::rename(from, to).map_err(|e| Error::output(to, "renaming the finished file", &e))?;
        }
        let Some(parent) = self.path.parent() else { return Ok(None) };
        let synced = File::open(parent).and_then(|dir| dir.sync_all());
        Ok(synced.err().map(|e| warning("output", &parent.display().to_string(), &format!("syncing the directory failed: {e}"))))
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        let mut alive = alive();
        let _ = std::fs::remove_dir_all(&self.path);
        alive.paths.retain(|p| *p != self.path);
    }
}

/// Two builds that give files the same names do so one after the other: the lock of their directory. Whoever else holds it, for longer than
/// renames take, is not waited for, and where there are no locks two pairs of files may mix.
fn take_turn(dir: &Path) -> Option<File> {
    let dir = File::open(dir).ok()?;
    let begin = Instant::now();
    while begin.elapsed() < TURN_MAX {
        match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(5)),
            _ => break,
        }
    }
    Some(dir)
}

/// Directory that a file lies in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file in the making, which a signal removes.
#[derive(Debug)]
pub struct Draft {
    file: Option<NamedTempFile>,
    name: PathBuf,
}

impl Draft {
    /// A new file in a directory, with this prefix and these permissions (less the umask).
    pub fn create(dir: &Path, prefix: &str, mode: u32) -> std::io::Result<Draft> {
        let mut alive = alive();
        let mut builder = tempfile::Builder::new();
        let file = builder.prefix(prefix).permissions(PermissionsExt::from_mode(mode)).tempfile_in(dir).map_err(|e| plain(&e))?;
        let name = file.path().to_path_buf();
        alive.paths.push(name.clone());
        Ok(Draft { file: Some(file), name })
    }

    /// To write to.
    pub fn file(&mut self) -> &mut File {
        self.file.as_mut().expect("not moved yet").as_file_mut()
    }

    /// Gives it its name, in the place of a file that is there.
    pub fn publish(mut self, path: &Path) -> std::io::Result<()> {
        let _hold = alive();
        let file = self.file.take().expect("not moved yet");
        file.persist(path).map(drop).map_err(|e| e.error)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let mut alive = alive();
        drop(self.file.take());
        alive.paths.retain(|p| *p != self.name);
    }
}

/// Writes a file whole or not at all, in the place of one that is there.
pub fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    // As the umask says, unless there is a file whose permissions it gets.
    let mut draft = Draft::create(parent(path), TEXT_PREFIX, 0o666)?;
    draft.file().write_all(bytes)?;
    if let Ok(there) = std::fs::metadata(path) {
        draft.file().set_permissions(there.permissions())?;
    }
    draft.publish(path)
}

/// Removes work directories whose build is gone, and the drafts of its texts.
fn sweep(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let name = name.to_string_lossy();
        let Ok(meta) = entry.metadata() else { continue };
        let age = meta.modified().ok().and_then(|t| SystemTime::now().duration_since(t).ok());
        let older = |than: Duration| age.is_some_and(|age| age >= than);
        if name.starts_with(TEXT_PREFIX) && meta.is_file() && older(STALE_TEXT_AFTER) {
            let _ = std::fs::remove_file(path);
        } else if name.starts_with(PREFIX)
            && name.ends_with(SUFFIX)
            && meta.is_dir()
            && older(STALE_AFTER)
            && let Ok(dir) = File::open(&path)
            && rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

/// The error without the random name that `tempfile` adds.
fn plain(error: &std::io::Error) -> std::io::Error {
    let inner = error.get_ref().and_then(|e| e.source()).and_then(|e| e.downcast_ref::<std::io::Error>());
    inner.and_then(std::io::Error::raw_os_error).map_or_else(|| error.kind().into(), std::io::Error::from_raw_os_error)
}

/// What a child said.
#[derive(Debug)]
pub struct Finished {
    /// How it ended; None: killed after the timeout.
    pub status: Option<ExitStatus>,
    /// Its stdout and stderr.
    pub text: String,
}

/// Runs a program of the toolchain in `dir` (a work directory) with a timeout, in a process group of its own, without stdin.
pub fn run(command: &mut Command, dir: &Path, timeout: Duration) -> std::io::Result<Finished> {
    let log_path = dir.join("log");
    let log = File::create(&log_path)?;
    command.current_dir(dir).env("LC_ALL", "C").stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut running = start(command)?;
    let (begin, mut pause) = (Instant::now(), Duration::from_millis(1));
    let status = loop {
        if let Some(status) = running.child.try_wait()? {
            break Some(status);
        }
        if begin.elapsed() > timeout {
            break None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    };
    drop(running);
    let text = String::from_utf8_lossy(&std::fs::read(&log_path)?).into_owned();
    Ok(Finished { status, text })
}

/// A program that runs, in a process group of its own. A signal that ends this process kills it, and so does dropping it.
#[derive(Debug)]
pub struct Running {
    child: Child,
}

/// Starts a program.
pub fn start(command: &mut Command) -> std::io::Result<Running> {
    command.process_group(0);
    let mut alive = alive();
    let child = command.spawn()?;
    alive.children.push(child.id());
    Ok(Running { child })
}

impl Running {
    /// Its stderr, if that is a pipe and was not taken before.
    pub fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.child.stderr.take()
    }

    /// Waits for its end.
    pub fn wait(mut self) -> std::io::Result<ExitStatus> {
        self.child.wait()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            kill_group(self.child.id());
            let _ = self.child.wait();
        }
        alive().children.retain(|&c| c != self.child.id());
    }
}
