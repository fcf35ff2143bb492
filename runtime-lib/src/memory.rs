//! What happens when there is no memory: one line and exit 7, as for other limits, instead of an abort that leaves a draft behind.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Cursor, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::process::remove_draft;

#[global_allocator]
static ALLOCATOR: OrLeave = OrLeave;

/// Whether this process is an executable of ours. In others that link this crate, allocations fail as everywhere.
static LEAVES: AtomicBool = AtomicBool::new(false);

/// From now on an allocation that fails ends the process.
pub fn leave_without_memory() {
    LEAVES.store(true, Ordering::Relaxed);
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
    if at.is_null() && LEAVES.load(Ordering::Relaxed) {
        leave(size);
    }
    at
}

#[cold]
fn leave(size: usize) -> ! {
    remove_draft();
    let mut line = [0; 200];
    let mut text = Cursor::new(&mut line[..]);
    // No more than fits is written.
    let _ = write!(text, "error[E7-memory]: {size} more bytes: no memory left\nhelp: use a smaller input, or raise the limit of memory\n");
    let len = text.position() as usize;
    // SAFETY: `len` bytes of `line` are initialised. No code of the process runs after this.
    unsafe {
        libc::write(2, line.as_ptr().cast(), len);
        libc::_exit(7)
    }
}
