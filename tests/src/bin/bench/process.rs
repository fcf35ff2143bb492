//! Starts a program and watches it from outside: time, first output, memory.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What was seen of a program that ended well.
pub struct Run {
    pub stdout: String,
    /// From before the start to the end of the process.
    pub wall_ms: f64,
    /// From before the start to the first byte on stdout; the end where nothing was printed.
    pub first_output_ms: f64,
    /// Processor time of the process and of the children that it waited for.
    pub cpu_ms: f64,
    /// Largest resident memory of the process, or of a child of it that it waited for, as the kernel counted it. Pages of
    /// mapped files count.
    pub rss_bytes_max: u64,
    /// Largest sum of the resident memory of the process and its descendants, polled every 10 ms; 0 if nobody asked for it.
    /// Memory that processes share counts once for each.
    pub tree_rss_bytes_max: u64,
}

/// The program with its arguments, as a person would type it.
pub fn shown(program: &Path, args: &[OsString]) -> String {
    let words = [program.as_os_str()].into_iter().chain(args.iter().map(OsString::as_os_str));
    let quoted = words.map(|w| w.to_string_lossy()).map(|w| if w.contains(' ') { format!("'{w}'") } else { w.into_owned() });
    quoted.collect::<Vec<_>>().join(" ")
}

pub fn args<const N: usize>(list: [&str; N]) -> Vec<OsString> {
    list.into_iter().map(OsString::from).collect()
}

/// Runs `program` to its end; stderr goes to `log`, and its end becomes the error where the program fails.
pub fn run(program: &Path, args: &[OsString], log: &Path, watch_tree: bool) -> io::Result<Run> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(log)?);
    let begin = Instant::now();
    let mut child = command.spawn().map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", program.display())))?;
    let pid = child.id();
    let mut pipe = child.stdout.take().expect("stdout is piped");
    let running = AtomicBool::new(watch_tree);
    let tree = AtomicU64::new(0);
    let (stdout, first, end, usage) = std::thread::scope(|scope| -> io::Result<_> {
        scope.spawn(|| {
            while running.load(Relaxed) {
                tree.fetch_max(tree_rss_bytes(pid), Relaxed);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let read = read_to_end(&mut pipe);
        let waited = wait(pid);
        let end = Instant::now();
        running.store(false, Relaxed);
        let ((stdout, first), usage) = (read?, waited?);
        Ok((stdout, first.unwrap_or(end), end, usage))
    })?;
    if !usage.status.success() {
        return Err(io::Error::other(format!("{}: {}\n  {}", shown(program, args), usage.status, last_lines(log))));
    }
    let ms = |until: Instant| (until - begin).as_secs_f64() * 1e3;
    Ok(Run {
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        wall_ms: ms(end),
        first_output_ms: ms(first),
        cpu_ms: usage.cpu_ms,
        rss_bytes_max: usage.rss_bytes_max,
        tree_rss_bytes_max: tree.load(Relaxed),
    })
}

fn last_lines(log: &Path) -> String {
    let log = fs::read_to_string(log).unwrap_or_default();
    log.lines().rev().take(5).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n  ")
}

/// A program that stays, and answers every line on stdin with lines on stdout, the last of which is empty. Ends with this value.
pub struct Turns {
    child: Child,
    answers: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Turns {
    /// Starts `program`; stderr goes to `log`.
    pub fn start(program: &Path, args: &[OsString], log: PathBuf) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        let mut child = command.spawn().map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", program.display())))?;
        let answers = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Ok(Self { child, answers, log })
    }

    /// Its id.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Asks with this line; the end of stderr becomes the error where there is no answer.
    pub fn turn(&mut self, question: &str) -> io::Result<String> {
        let stdin = self.child.stdin.as_mut().expect("stdin is piped");
        // Whoever is gone does not answer: that is the error.
        let _ = writeln!(stdin, "{question}").and_then(|()| stdin.flush());
        let mut answer = String::new();
        while !answer.ends_with("\n\n") {
            if self.answers.read_line(&mut answer)? == 0 {
                return Err(io::Error::other(format!("no answer\n  {}", last_lines(&self.log))));
            }
        }
        Ok(answer)
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        // Where it has ended, there is nothing to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All output, and when its first byte came.
fn read_to_end(pipe: &mut impl Read) -> io::Result<(Vec<u8>, Option<Instant>)> {
    let mut out = Vec::new();
    let mut byte = [0];
    if pipe.read(&mut byte)? == 0 {
        return Ok((out, None));
    }
    let first = Instant::now();
    out.push(byte[0]);
    pipe.read_to_end(&mut out)?;
    Ok((out, Some(first)))
}

/// What the kernel says about a process that ended.
struct Usage {
    status: ExitStatus,
    cpu_ms: f64,
    rss_bytes_max: u64,
}

/// Waits for a child.
///
/// The kernel starts `ru_maxrss` from the memory of the process that called `exec`: the benchmark itself stays small.
fn wait(pid: u32) -> io::Result<Usage> {
    let mut status = 0;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    loop {
        // SAFETY: both pointers are to memory of the right type that lives through the call.
        let waited = unsafe { libc::wait4(pid.cast_signed(), &raw mut status, 0, usage.as_mut_ptr()) };
        if waited >= 0 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: zeroed at first, which is valid, and filled by the call.
    let usage = unsafe { usage.assume_init() };
    let ms = |time: libc::timeval| time.tv_sec as f64 * 1e3 + time.tv_usec as f64 / 1e3;
    Ok(Usage {
        status: ExitStatus::from_raw(status),
        cpu_ms: ms(usage.ru_utime) + ms(usage.ru_stime),
        rss_bytes_max: usage.ru_maxrss.cast_unsigned() * 1024,
    })
}

/// Resident memory of a process and its descendants, as far as they are there at this moment.
fn tree_rss_bytes(pid: u32) -> u64 {
    let read = |what: &str| fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap_or_default();
    let pages: u64 = read("statm").split_whitespace().nth(1).and_then(|v| v.parse().ok()).unwrap_or(0);
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    let below: u64 =
        children.flat_map(|list| list.split_whitespace().filter_map(|c| c.parse().ok()).map(tree_rss_bytes).collect::<Vec<_>>()).sum();
    pages * 4096 + below
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_stays_answers_line_by_line() {
        let log = std::env::temp_dir().join(format!("rcompile-bench-turns-{}.log", std::process::id()));
        let script = "while read line; do [ $line = two ] && { echo tired >&2; exit 1; }; echo $line; echo and; echo; done";
        let mut turns = Turns::start(Path::new("/bin/sh"), &args(["-c", script]), log.clone()).unwrap();
        assert_eq!(turns.turn("zero").unwrap(), "zero\nand\n\n");
        assert_eq!(turns.turn("one").unwrap(), "one\nand\n\n");
        let seconds = crate::machine::seconds_of(turns.process());
        assert!((0.0..1.0).contains(&seconds), "{seconds}");
        for _ in 0..2 {
            let gone = turns.turn("two").unwrap_err();
            assert!(gone.to_string().contains("tired"), "{gone}");
        }
        drop(turns);
        fs::remove_file(log).unwrap();
    }

    #[test]
    fn a_program_is_watched() {
        let log = std::env::temp_dir().join(format!("rcompile-bench-{}.log", std::process::id()));
        let seen = run(Path::new("/bin/sh"), &args(["-c", "echo one; sleep 0.1; echo two"]), &log, true).unwrap();
        assert_eq!(seen.stdout, "one\ntwo\n");
        assert!(seen.first_output_ms < seen.wall_ms - 50.0, "{} {}", seen.first_output_ms, seen.wall_ms);
        assert!(seen.rss_bytes_max > 100_000 && seen.tree_rss_bytes_max > 100_000);
        let failed = run(Path::new("/bin/sh"), &args(["-c", "echo no luck >&2; exit 3"]), &log, false).err().unwrap();
        assert!(failed.to_string().contains("no luck"), "{failed}");
        fs::remove_file(log).unwrap();
    }
}
