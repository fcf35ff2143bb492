//! What happens when there is no memory: one line and exit 7, as for other limits, instead of an abort that leaves files behind. The
//! allocator of executables and of `rcompile`.

use crate::cgroup;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Cursor, Write};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

#[global_allocator]
static ALLOCATOR: OrLeave = OrLeave;

/// What a process that leaves does first. In processes that have none, allocations fail as everywhere.
static LAST: OnceLock<fn()> = OnceLock::new();
/// The thread that leaves, 0 as long as none does.
static LEAVER: AtomicI32 = AtomicI32::new(0);

/// The line of a process that takes more than [`within`] allows; null outside of it.
static REFUSAL: AtomicPtr<String> = AtomicPtr::new(null_mut());

/// Memory (addresses, as long as nobody writes to it) that is given back for what a process does last.
static RESERVE: AtomicPtr<u8> = AtomicPtr::new(null_mut());
const RESERVE_LAYOUT: Layout = Layout::new::<[u8; 1 << 20]>();

/// From now on an allocation that fails ends the process. `last` removes what must not be left behind; it has a little memory for that.
pub fn leave_without_memory(last: fn()) {
    if LAST.set(last).is_ok() {
        // SAFETY: the layout has a size.
        RESERVE.store(unsafe { System.alloc(RESERVE_LAYOUT) }, Ordering::Relaxed);
    }
}

/// Lets allocations of this process and its children fail where the control group would end them without a word.
pub fn keep_within_control_group() {
    let Some(limit) = cgroup::deadly_limit() else { return };
    let given = getrlimit(Resource::Data);
    let current = given.current.map_or(limit, |c| c.min(limit));
    // What cannot be limited stays as it is.
    let _ = setrlimit(Resource::Data, Rlimit { current: Some(current), ..given });
}

/// Room for memory that is mapped shared. The limit on data does not see such memory and a control group does, so that allocations may take
/// that much less as long as this lives.
#[derive(Debug)]
pub struct SharedRoom {
    bytes: u64,
}

impl SharedRoom {
    /// For so many bytes. None: they are more than the control group leaves.
    pub fn take(bytes: u64) -> Option<SharedRoom> {
        let room = SharedRoom { bytes };
        share(|sum| sum.saturating_add(bytes)).then_some(room)
    }
}

impl Drop for SharedRoom {
    fn drop(&mut self) {
        share(|sum| sum.saturating_sub(self.bytes));
    }
}

/// Changes the sum of all rooms' bytes, and the limit with it: no other thread sets one of an older sum in between.
fn share(change: impl FnOnce(u64) -> u64) -> bool {
    static SUM: Mutex<u64> = Mutex::new(0);
    let mut sum = SUM.lock().unwrap_or_else(PoisonError::into_inner);
    *sum = change(*sum);
    limit_data_beside(*sum)
}

/// Lets allocations fail where they and so many shared bytes exceed the control group's limit; false where they do already.
fn limit_data_beside(shared: u64) -> bool {
    /// Before there was any room.
    static GIVEN: OnceLock<Rlimit> = OnceLock::new();
    let Some(limit) = cgroup::deadly_limit() else { return true };
    let given = GIVEN.get_or_init(|| getrlimit(Resource::Data));
    let left = limit.saturating_sub(shared);
    if data_bytes().is_some_and(|taken| taken >= left) {
        return false;
    }
    let current = Some(given.current.map_or(left, |current| current.min(left)));
    // What cannot be limited stays as it is.
    let _ = setrlimit(Resource::Data, Rlimit { current, maximum: given.maximum });
    true
}

/// Runs `part`, in which the process may take about as many bytes more; an allocation beyond them ends it with the line `refusal`. For
/// processes that do nothing else meanwhile. There is no limit where nobody says what the process has, and in processes that go on when
/// there is no memory (without [`leave_without_memory`]).
pub fn within(bytes: u64, refusal: &str, part: &mut dyn FnMut()) {
    let _limit = Within::set(bytes, Some(refusal));
    part();
}

/// Runs `part`, in which an allocation beyond what the control group leaves ends the process with a line, as everywhere where there is no
/// memory. For processes that do nothing else meanwhile.
pub fn within_control_group<R>(part: impl FnOnce() -> R) -> R {
    let _limit = cgroup::memory_room().map(|room| Within::set(room.saturating_sub(cgroup::MARGIN), None));
    part()
}

/// A limit on the process's data as long as this lives.
struct Within {
    /// Limit and line before, if there are others now.
    before: Option<(Rlimit, *mut String)>,
}

impl Within {
    /// About so many bytes more than there are, unless less is left anyway. `refusal` is the line of what takes more.
    fn set(bytes: u64, refusal: Option<&str>) -> Within {
        if LAST.get().is_none() {
            return Within { before: None };
        }
        // Made while there is no limit yet.
        let line = refusal.map(|line| Box::new(line.to_owned()));
        let given = getrlimit(Resource::Data);
        let limit =
            data_bytes().map(|taken| taken.saturating_add(bytes)).filter(|limit| given.current.is_none_or(|current| *limit < current));
        let limited = limit.is_some_and(|limit| setrlimit(Resource::Data, Rlimit { current: Some(limit), ..given }).is_ok());
        if !limited {
            return Within { before: None };
        }
        // Never freed: another thread may be about to print it.
        let outer = REFUSAL.swap(line.map_or(null_mut(), Box::into_raw), Ordering::AcqRel);
        Within { before: Some((given, outer)) }
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        if let Some((given, outer)) = self.before.take() {
            REFUSAL.store(outer, Ordering::Release);
            let _ = setrlimit(Resource::Data, given);
        }
    }
}

/// What counts for the limit that [`within`] sets: memory that is the process's own and can be written to.
fn data_bytes() -> Option<u64> {
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").ok()?.split_whitespace().nth(5)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// The system's allocator, which ends the process where it has no memory.
struct OrLeave;

// SAFETY: all memory comes from and goes to `System`, which keeps the contract.
unsafe impl GlobalAlloc for OrLeave {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: by contract of this function.
        got(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: by contract of this function.
        got(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: by contract of this function.
        got(unsafe { System.realloc(at, layout, size) }, size)
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: by contract of this function.
        unsafe { System.dealloc(at, layout) }
    }
}

fn got(at: *mut u8, size: usize) -> *mut u8 {
    match LAST.get() {
        Some(last) if at.is_null() => leave(size, *last),
        _ => at,
    }
}

/// Ends the process as a failed allocation does, where another allocator has failed.
pub fn leave_now() -> ! {
    leave(0, LAST.get().copied().unwrap_or(|| {}))
}

#[cold]
fn leave(size: usize, last: fn()) -> ! {
    // SAFETY: takes nothing and always succeeds.
    let thread = unsafe { libc::gettid() };
    match LEAVER.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => {
            let reserve = RESERVE.swap(null_mut(), Ordering::Relaxed);
            if !reserve.is_null() {
                // SAFETY: was allocated with this layout and is not used any more.
                unsafe { System.dealloc(reserve, RESERVE_LAYOUT) };
            }
            last();
        }
        // It came to the same within `last`.
        Err(leaver) if leaver == thread => {}
        Err(_) => loop {
            // SAFETY: waits for signals; the other thread ends the process.
            unsafe { libc::pause() };
        },
    }
    let mut line = [0; 600];
    let mut text = Cursor::new(&mut line[..]);
    // SAFETY: null or a text that is never freed.
    let refusal = unsafe { REFUSAL.load(Ordering::Acquire).as_ref() };
    // No more than fits is written.
    let _ = match (refusal, size) {
        (Some(refusal), _) => writeln!(text, "{refusal}"),
        (None, 0) => writeln!(text, "error[E7-memory]: memory: the process: has none left, expected more, found none"),
        (None, size) => {
            writeln!(text, "error[E7-memory]: memory: the process: has none left, expected {} MiB more, found none", size.div_ceil(1 << 20))
        }
    };
    if refusal.is_none() {
        let _ = writeln!(text, "help: use a smaller input or fewer threads, or raise the limit of memory");
    }
    let len = text.position() as usize;
    // SAFETY: `len` bytes of `line` are initialised. No code of the process runs after this.
    unsafe {
        libc::write(2, line.as_ptr().cast(), len);
        libc::_exit(7)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inner_limit_leaves_the_outer_ones_line() {
        let _ = LAST.set(|| {});
        // SAFETY: null or a text that is never freed.
        let line = || unsafe { REFUSAL.load(Ordering::Acquire).as_ref() }.map(String::as_str);
        let mut seen = Vec::new();
        within(1 << 40, "outer", &mut || {
            seen.push(line());
            within(1 << 39, "inner", &mut || seen.push(line()));
            seen.push(line());
            // What allows more limits nothing.
            within(1 << 41, "larger", &mut || seen.push(line()));
            seen.push(line());
        });
        assert_eq!(seen, [Some("outer"), Some("inner"), Some("outer"), Some("outer"), Some("outer")]);
        assert_eq!(line(), None);
    }
}
