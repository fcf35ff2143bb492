//! What belongs to a process and not to a library: signals, age, memory in use. Only the command line and the entry use it.

use std::ffi::{CString, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Instant;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Moments of this process.
#[derive(Clone, Copy, Debug)]
pub struct Started {
    entered: Instant,
    /// Seconds from the start of the process to the entry.
    before: f64,
}

impl Started {
    /// The command line has just been entered.
    pub fn now() -> Self {
        let since_start = start_ticks().map(|ticks| {
            let per_second = rustix::param::clock_ticks_per_second().max(1) as f64;
            clock_seconds(libc::CLOCK_BOOTTIME) - ticks as f64 / per_second
        });
        let cpu = clock_seconds(libc::CLOCK_PROCESS_CPUTIME_ID);
        Self { entered: Instant::now(), before: since_start.map_or(0.0, |gap| before_entry(gap, cpu)) }
    }

    /// Milliseconds since the process was started. The kernel states the start in steps of 10 ms, rounded down; without
    /// `/proc` the time counts from the entry of the command line.
    pub fn age_ms(&self) -> f64 {
        (self.before + self.entered.elapsed().as_secs_f64()) * 1e3
    }
}

/// What counts of the seconds between the kernel's start of the process and the entry, of which it spent `cpu` computing. A script that
/// waits and then calls `exec` is the same process, and clocks of another time namespace tell nothing: both show as time without work.
fn before_entry(gap: f64, cpu: f64) -> f64 {
    if (0.0..=0.05 + 2.0 * cpu).contains(&gap) { gap } else { 0.0 }
}

fn start_ticks() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the name in parentheses and may contain anything; the start time is field 22.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn clock_seconds(clock: libc::clockid_t) -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is valid for writing; both clocks that are asked for always exist on Linux.
    unsafe { libc::clock_gettime(clock, &mut now) };
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// Resident memory of this process in bytes, 0 where `/proc` is missing.
pub fn resident_bytes() -> u64 {
    std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|s| s.split_whitespace().nth(1)?.parse::<u64>().ok())
        .map_or(0, |pages| pages * rustix::param::page_size() as u64)
}

/// Opens `/dev/null` for those of stdin, stdout and stderr that are closed: the next file would get their number, and what is meant for
/// them.
pub fn open_standard() {
    for fd in 0..=2 {
        // SAFETY: asks about a number, and opens the lowest one that is free, which is this one.
        unsafe {
            if libc::fcntl(fd, libc::F_GETFD) < 0 {
                libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
            }
        }
    }
}

/// The file that a signal removes before it ends the process, or null.
static DRAFT: AtomicPtr<c_char> = AtomicPtr::new(null_mut());

/// From now on a signal that ends the process removes this file first, instead of the one named before.
pub fn remove_at_signal(path: Option<CString>) {
    // A handler may read the old name at any later moment, so that it is never freed: one small string per file that is written.
    DRAFT.store(path.map_or(null_mut(), CString::into_raw), Ordering::SeqCst);
}

/// Removes the file that was named last, if any; allowed in signal handlers.
pub fn remove_draft() {
    let draft = DRAFT.load(Ordering::SeqCst);
    if !draft.is_null() {
        // SAFETY: a string that is never freed.
        unsafe { libc::unlink(draft) };
    }
}

/// Ends the process at once; allowed in signal handlers.
pub fn leave_with(code: c_int) -> ! {
    remove_draft();
    // SAFETY: takes any number.
    unsafe { libc::_exit(code) }
}

extern "C" fn leave(signal: c_int) {
    leave_with(128 + signal)
}

extern "C" fn clean(signal: c_int) {
    remove_draft();
    // SAFETY: both are allowed in signal handlers. The signal waits until this one returns, and then does what it does by default.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// A page of a mapped file is not there any more: the executable's, or that of its weights.
extern "C" fn unreadable(_: c_int) {
    const WHAT: &str = "error[E3-executable]: its file, or that of its weights, cannot be read any more: it was cut, or its disk failed\n";
    // SAFETY: allowed in signal handlers.
    unsafe { libc::write(2, WHAT.as_ptr().cast(), WHAT.len()) };
    leave_with(3)
}

/// Ctrl-C, termination and a terminal that is closed end the process with 128 + signal, unless who started it has them ignored (`nohup`, a
/// script's `trap ''`). The other signals that end a process from outside, at a limit of time or by a bug, still do. A closed pipe and a
/// file beyond `ulimit -f` are errors of `write`, not signals; a mapped page that is not in its file any more is exit 3.
///
/// No handler runs at SIGKILL, at the two signals that the C library keeps for itself (32 and 33), and where the stack has no room for it.
pub fn set_signals() {
    use libc::{SIGABRT, SIGALRM, SIGBUS, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGSEGV, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXCPU};
    use libc::{SIGFPE, SIGILL, SIGIO, SIGPWR, SIGSTKFLT, SIGSYS, SIGTRAP};
    let real_time: Vec<c_int> = (libc::SIGRTMIN()..=libc::SIGRTMAX()).collect();
    let handlers: [(extern "C" fn(c_int), &[c_int]); 5] = [
        (leave, &[SIGHUP, SIGINT, SIGTERM]),
        (clean, &[SIGQUIT, SIGALRM, SIGUSR1, SIGUSR2, SIGXCPU, SIGVTALRM, SIGPROF, SIGIO, SIGPWR, SIGSTKFLT]),
        (clean, &[SIGABRT, SIGSEGV, SIGILL, SIGFPE, SIGTRAP, SIGSYS]),
        (clean, &real_time),
        (unreadable, &[SIGBUS]),
    ];
    for (handler, signals) in handlers {
        for &signal in signals {
            if !is_ignored(signal) {
                // SAFETY: the handlers do only what handlers may do.
                unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
            }
        }
    }
    for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
        // SAFETY: ignoring a signal has no preconditions.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Whether a signal is ignored; also one that nobody can ask about.
fn is_ignored(signal: c_int) -> bool {
    let mut now = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: changes nothing and writes what there is to `now`, which is read where that succeeded.
    unsafe { libc::sigaction(signal, null(), now.as_mut_ptr()) < 0 || now.assume_init().sa_sigaction == libc::SIG_IGN }
}

/// Lets the stack of the process's main thread grow to so many bytes; those of other threads are as large as they were made. Error: how
/// many it may have where its limit cannot be raised. (The kernel asks for the limit whenever the stack grows, and keeps 128 MB free below
/// it, whatever the limit was at the start.)
pub fn enlarge_stack(bytes: u64) -> Result<(), u64> {
    let given = getrlimit(Resource::Stack);
    let Some(current) = given.current.filter(|current| *current < bytes) else { return Ok(()) };
    let enough = Rlimit { current: Some(bytes), maximum: given.maximum.map(|maximum| maximum.max(bytes)) };
    setrlimit(Resource::Stack, enough).map_err(|_| current)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_an_age_and_a_size() {
        let started = Started::now();
        let first = started.age_ms();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(started.age_ms() >= first + 15.0);
        assert!(start_ticks().is_some_and(|t| t > 0));
        assert!(resident_bytes() > 1 << 20);
    }

    #[test]
    fn time_without_work_is_not_the_start() {
        assert_eq!([before_entry(0.012, 0.001), before_entry(0.3, 0.2)], [0.012, 0.3]);
        assert_eq!([before_entry(2.0, 0.003), before_entry(-5.0, 0.001), before_entry(1e6, 0.001)], [0.0; 3]);
    }
}
