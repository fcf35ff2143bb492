//! What belongs to a process and not to a library: signals, age, memory in use. Only the command line uses it.

use std::ffi::{CString, c_char, c_int};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Instant;

/// Moments of this process.
#[derive(Clone, Copy, Debug)]
pub struct Started {
    entered: Instant,
}

impl Started {
    /// The command line has just been entered.
    pub fn now() -> Self {
        Self { entered: Instant::now() }
    }

    /// Milliseconds since the process was started. The kernel states the start in steps of 10 ms, rounded down; without
    /// `/proc` the time counts from the entry of the command line.
    pub fn age_ms(&self) -> f64 {
        let since_entry = self.entered.elapsed().as_secs_f64() * 1e3;
        match start_ticks() {
            Some(ticks) => {
                let per_second = rustix::param::clock_ticks_per_second().max(1) as f64;
                let age = (boot_seconds() - ticks as f64 / per_second) * 1e3;
                // A clock of another time namespace is worse than none.
                if (since_entry..since_entry + 10_000.0).contains(&age) { age } else { since_entry }
            }
            None => since_entry,
        }
    }
}

fn start_ticks() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the name in parentheses and may contain anything; the start time is field 22.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn boot_seconds() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is valid for writing; this clock always exists on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut now) };
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// Resident memory of this process in bytes, 0 where `/proc` is missing.
pub fn resident_bytes() -> u64 {
    std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|s| s.split_whitespace().nth(1)?.parse::<u64>().ok())
        .map_or(0, |pages| pages * rustix::param::page_size() as u64)
}

/// The file that a signal removes before it ends the process, or null.
static DRAFT: AtomicPtr<c_char> = AtomicPtr::new(null_mut());

/// From now on a signal that ends the process removes this file first, instead of the one named before.
pub fn remove_at_signal(path: Option<CString>) {
    // A handler may read the old name at any later moment, so that it is never freed: one small string per file that is written.
    DRAFT.store(path.map_or(null_mut(), CString::into_raw), Ordering::SeqCst);
}

extern "C" fn leave(signal: c_int) {
    let draft = DRAFT.load(Ordering::SeqCst);
    // SAFETY: `unlink` and `_exit` are allowed in signal handlers; `draft` is null or a string that is never freed.
    unsafe {
        if !draft.is_null() {
            libc::unlink(draft);
        }
        libc::_exit(128 + signal)
    }
}

/// Ctrl-C, termination and a terminal that is closed end the process with 128 + signal, unless who started it has them ignored (`nohup`, a
/// script's `trap ''`). A closed pipe and a file beyond `ulimit -f` are errors of `write`, not signals.
pub fn set_signals() {
    let leave = leave as extern "C" fn(c_int) as *const () as libc::sighandler_t;
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler does only what handlers may do.
        unsafe {
            if libc::signal(signal, leave) == libc::SIG_IGN {
                libc::signal(signal, libc::SIG_IGN);
            }
        }
    }
    for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
        // SAFETY: ignoring a signal has no preconditions.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
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
}
