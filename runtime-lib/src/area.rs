//! Areas of memory, what they are for, and whether there is room for them; threads are asked for the same way.
//!
//! In: sizes. Out: zeroed memory, or the error that says what needs how much.

use std::fmt;
use std::ptr;

use crate::cgroup;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryUse {
    /// Keys and values.
    KvCache,
    /// Values between regions.
    Arena,
    /// What each thread has for itself.
    Scratch,
    /// Logits or vectors.
    Output,
    /// `--copy-weights`.
    WeightsCopy,
    /// What a step writes to for the first time.
    Step,
    /// Texts that threads do for themselves.
    ThreadAreas,
    /// What messages and templates make of a text.
    Template,
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryUse::KvCache => "KV cache",
            MemoryUse::Arena => "arena",
            MemoryUse::Scratch => "scratch",
            MemoryUse::Output => "output",
            MemoryUse::WeightsCopy => "copy of the weights",
            MemoryUse::Step => "the step",
            MemoryUse::ThreadAreas => "threads' own areas",
            MemoryUse::Template => "the chat template",
        })
    }
}

/// What the machine does not give.
#[derive(Debug, thiserror::Error)]
pub enum ResourceError {
    /// The kernel gives no such area.
    #[error("memory: {what}: needs {} MiB", bytes.div_ceil(1 << 20))]
    Memory {
        /// Which area.
        what: MemoryUse,
        /// Its size.
        bytes: u64,
    },
    /// The control group's limit leaves no room.
    #[error("memory: {what}: needs {} MiB more, the control group has {} MiB left", bytes.div_ceil(1 << 20), room >> 20)]
    Room {
        /// What needs it.
        what: MemoryUse,
        /// How much.
        bytes: u64,
        /// What is left.
        room: u64,
    },
    /// The threads could not be started.
    #[error("threads: {0}")]
    Threads(std::io::Error),
}

/// Whether the control group has room for `bytes` more.
pub(crate) fn room_for(what: MemoryUse, bytes: u64) -> Result<(), ResourceError> {
    let bytes = bytes.saturating_add(cgroup::MARGIN);
    match cgroup::memory_room() {
        Some(room) if room < bytes => Err(ResourceError::Room { what, bytes, room }),
        _ => Ok(()),
    }
}

/// Bytes of an ordinary page of most systems.
const SMALL_PAGE: usize = 4096;

/// Anonymous zeroed memory, in huge pages where the kernel has them of 2 MB, as those of ordinary pages of 4 KB are. (Behind 64 KB, on some
/// Arm systems, they are of 512 MB: a step would clear one for a few keys, and `step::growth` would not have counted it.)
pub(crate) struct Area {
    pub(crate) at: *mut u8,
    pub(crate) len: usize,
}

impl Area {
    pub(crate) fn new(what: MemoryUse, bytes: u64) -> Result<Self, ResourceError> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        let too_large = |_| ResourceError::Memory { what, bytes };
        let len = usize::try_from(bytes.max(1)).map_err(|_| ResourceError::Memory { what, bytes })?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let at =
            unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }.map_err(too_large)?;
        if rustix::param::page_size() == SMALL_PAGE {
            // SAFETY: the mapping was just made and is ours; the advice changes no contents, and refusal does no harm.
            let _ = unsafe { madvise(at, len, Advice::LinuxHugepage) };
        }
        Ok(Self { at: at.cast(), len })
    }

    /// With ordinary pages in the first `bytes`: where few of them will be touched, a huge page would be cleared for each few.
    pub(crate) fn with_small_pages(self, bytes: u64) -> Self {
        // SAFETY: a range inside a mapping of ours; the advice changes no contents, and refusal does no harm.
        let _ = unsafe { rustix::mm::madvise(self.at.cast(), self.len.min(bytes as usize), rustix::mm::Advice::LinuxNoHugepage) };
        self
    }

    /// The memory, for the rest of the process.
    pub(crate) fn leak(self) -> &'static mut [u8] {
        let area = std::mem::ManuallyDrop::new(self);
        // SAFETY: the mapping has `len` zeroed bytes, is never unmapped, and was this area's alone.
        unsafe { std::slice::from_raw_parts_mut(area.at, area.len) }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing refers to it any more. Unmapping a whole mapping cannot fail.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.len) };
    }
}

// SAFETY: an `Area` owns its mapping alone.
unsafe impl Send for Area {}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first part of an area is in ordinary pages, the rest in huge ones where there are any.
    #[test]
    fn small_pages_are_the_first() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return eprintln!("skipped: this kernel has no huge pages");
        }
        let (small, all) = (3 << 20, 16 << 20);
        let area = Area::new(MemoryUse::Arena, all).unwrap().with_small_pages(small);
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let flags = |at: usize| -> Vec<&str> {
            let mut inside = false;
            for line in smaps.lines() {
                let range = line.split(' ').next().and_then(|range| range.split_once('-'));
                if let Some([begin, end]) = range.map(|(begin, end)| [begin, end].map(|at| usize::from_str_radix(at, 16).unwrap_or(0))) {
                    inside = (begin..end).contains(&at);
                } else if let (true, Some(flags)) = (inside, line.strip_prefix("VmFlags:")) {
                    return flags.split_whitespace().collect();
                }
            }
            panic!("no mapping at {at:x}");
        };
        let begin = area.at as usize;
        for (at, flag, other) in [(0, "nh", "hg"), (small - 1, "nh", "hg"), (small, "hg", "nh"), (all - 1, "hg", "nh")] {
            let flags = flags(begin + at as usize);
            assert!(flags.contains(&flag) && !flags.contains(&other), "{at}: {flags:?}");
        }
    }
}
