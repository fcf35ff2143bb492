//! How many bytes per second the cores can read from memory.
//!
//! Every thread xors its own part of more than 1 GB, in several patterns (streams side by side, prefetch near or far, into the
//! first or the second cache); the best pattern is the limit, since a program could read that way. Two kinds of memory: anonymous
//! in large pages, and a mapped file from the page cache, as the weights of an executable are.

use std::arch::x86_64::*;
use std::fs::File;
use std::hint::black_box;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::null_mut;

/// Bytes that one pattern reads: far beyond any L3 cache.
const ANONYMOUS_BYTES: usize = 1280 << 20;
/// Of a file at most so many bytes are read: the weights of a 1B model in bf16.
const FILE_BYTES_MAX: usize = 2400 << 20;
/// Alignment of a mapping, as executables align their weights.
const LARGE_PAGE: usize = 2 << 20;

/// Readable memory that is mapped as a whole.
pub struct Memory {
    start: *const u8,
    len: usize,
}

// SAFETY: the memory is written only in `anonymous`; afterwards threads only read it.
unsafe impl Sync for Memory {}

impl Memory {
    /// Anonymous memory, in large pages where the system gives them, written once.
    pub fn anonymous() -> io::Result<Self> {
        let memory = Self::map(ANONYMOUS_BYTES, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_ANONYMOUS, -1)?;
        // SAFETY: the range was just mapped for writing; writing it gives every page memory of its own.
        unsafe { memory.start.cast_mut().write_bytes(1, memory.len) };
        Ok(memory)
    }

    /// The front of a file, every page touched once; none if it is too small to say something about memory.
    pub fn file(path: &Path) -> io::Result<Option<Self>> {
        let file = File::open(path)?;
        let len = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX).min(FILE_BYTES_MAX);
        if len < ANONYMOUS_BYTES / 4 {
            return Ok(None);
        }
        let memory = Self::map(len, libc::PROT_READ, 0, file.as_raw_fd())?;
        black_box(memory.bytes().iter().step_by(4096).fold(0, |sum: u8, byte| sum.wrapping_add(*byte)));
        Ok(Some(memory))
    }

    fn map(len: usize, protection: i32, flags: i32, file: i32) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | flags;
        // SAFETY: reserves address space where the kernel likes.
        let room = unsafe { libc::mmap(null_mut(), len + LARGE_PAGE, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
        if room == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = (room as usize).next_multiple_of(LARGE_PAGE) as *mut libc::c_void;
        // SAFETY: the range lies in the reservation, which nothing else uses.
        let start = unsafe { libc::mmap(at, len, protection, flags | libc::MAP_FIXED, file, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a mapping of ours; large pages are only asked for, so that a refusal does not matter. What of the reservation lies around
        // the mapping is given back.
        unsafe {
            libc::madvise(start, len, libc::MADV_HUGEPAGE);
            let (front, end) = (at as usize - room as usize, len.next_multiple_of(4096));
            if front > 0 {
                libc::munmap(room, front);
            }
            libc::munmap(at.byte_add(end), len + LARGE_PAGE - front - end);
        };
        Ok(Self { start: start.cast(), len })
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped and readable until `drop`; a benchmark's file is not truncated meanwhile.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// One quarter. Between two readings of it the others are read, so that no cache smaller than those keeps it.
    pub fn quarter(&self, index: usize) -> &[u8] {
        part(self.bytes(), index % 4, 4)
    }
}

/// Bytes of one of `count` equal parts, a multiple of 64 KB: of 16 streams of 4 KB.
pub fn part_bytes(memory: &[u8], count: usize) -> usize {
    (memory.len() / count) & !0xffff
}

/// Part `index` of `count` equal parts.
fn part(memory: &[u8], index: usize, count: usize) -> &[u8] {
    let bytes = part_bytes(memory, count);
    &memory[index * bytes..][..bytes]
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nothing borrows it any more.
        unsafe { libc::munmap(self.start.cast_mut().cast(), self.len) };
    }
}

/// How a thread walks its part.
#[derive(Clone, Copy)]
pub struct Pattern {
    /// Addresses that advance side by side, 256 bytes at a time each.
    streams: usize,
    prefetch: Prefetch,
}

#[derive(Clone, Copy)]
enum Prefetch {
    /// Only what the CPU does by itself.
    None,
    /// Into the first cache, so many bytes ahead.
    First(usize),
    /// Into the second cache.
    Second(usize),
    /// Into the first cache, past the others where the CPU can do that.
    Once(usize),
}

use Prefetch::{First, None as Never, Once, Second};

/// Of 50 that were tried on Emerald Rapids, 13 on Zen 5 and 24 on Zen 4 (1 to 16 streams, 0.5 to 16 KB), those that were best at some
/// time; which one it is depends on the machine, the pages and the minute.
pub const PATTERNS: [Pattern; 17] = [
    Pattern { streams: 1, prefetch: Never },
    Pattern { streams: 1, prefetch: First(2 << 10) },
    Pattern { streams: 1, prefetch: First(4 << 10) },
    Pattern { streams: 1, prefetch: Once(4 << 10) },
    Pattern { streams: 2, prefetch: First(2 << 10) },
    Pattern { streams: 2, prefetch: Once(1 << 10) },
    Pattern { streams: 2, prefetch: Second(8 << 10) },
    Pattern { streams: 4, prefetch: Never },
    Pattern { streams: 4, prefetch: First(1 << 10) },
    Pattern { streams: 4, prefetch: First(4 << 10) },
    Pattern { streams: 4, prefetch: Once(1 << 10) },
    Pattern { streams: 4, prefetch: Second(8 << 10) },
    Pattern { streams: 4, prefetch: Second(16 << 10) },
    Pattern { streams: 8, prefetch: First(2 << 10) },
    Pattern { streams: 8, prefetch: First(4 << 10) },
    Pattern { streams: 8, prefetch: Second(8 << 10) },
    Pattern { streams: 16, prefetch: First(4 << 10) },
];

impl Pattern {
    /// Reads part `index` of `count` of memory that is aligned to 64 KB, as all of [`Memory`] and its quarters are.
    pub fn read_part(self, memory: &[u8], index: usize, count: usize) {
        assert_eq!(memory.as_ptr() as usize % 0x10000, 0);
        // SAFETY: so is every part then; limits are only measured on CPUs with AVX2.
        unsafe { self.read(part(memory, index, count)) };
    }

    pub fn name(self) -> String {
        let streams = if self.streams == 1 { "1 stream".into() } else { format!("{} streams", self.streams) };
        match self.prefetch {
            Never => streams,
            First(ahead) => format!("{streams}, prefetch {} KB", ahead >> 10),
            Second(ahead) => format!("{streams}, prefetch L2 {} KB", ahead >> 10),
            Once(ahead) => format!("{streams}, prefetch once {} KB", ahead >> 10),
        }
    }

    /// # Safety
    /// The CPU has AVX2; `part` is aligned to 32 bytes, and its length is a multiple of `streams * 256`.
    unsafe fn read(self, part: &[u8]) {
        // SAFETY: as the caller promises.
        unsafe {
            match self.streams {
                1 => self.read_streams::<1>(part),
                2 => self.read_streams::<2>(part),
                4 => self.read_streams::<4>(part),
                8 => self.read_streams::<8>(part),
                _ => self.read_streams::<16>(part),
            }
        }
    }

    /// # Safety
    /// As for [`Pattern::read`].
    unsafe fn read_streams<const STREAMS: usize>(self, part: &[u8]) {
        // SAFETY: as the caller promises.
        unsafe {
            match self.prefetch {
                Never => read::<STREAMS, false, _MM_HINT_T0>(part, 0),
                First(ahead) => read::<STREAMS, true, _MM_HINT_T0>(part, ahead),
                Second(ahead) => read::<STREAMS, true, _MM_HINT_T1>(part, ahead),
                Once(ahead) => read::<STREAMS, true, _MM_HINT_NTA>(part, ahead),
            }
        }
    }
}

/// Reads `part` in `STREAMS` streams, each 256 bytes at a time, with prefetches so many bytes ahead. Wider vectors read no faster:
/// the misses are what is waited for.
///
/// # Safety
/// As for [`Pattern::read`].
#[target_feature(enable = "avx2")]
unsafe fn read<const STREAMS: usize, const PREFETCH: bool, const HINT: i32>(part: &[u8], ahead: usize) {
    let stream_bytes = part.len() / STREAMS;
    let mut sums = [_mm256_setzero_si256(); 8];
    for offset in (0..stream_bytes).step_by(256) {
        for stream in 0..STREAMS {
            // SAFETY: below the end of `part`, since `offset + 256 <= stream_bytes`.
            let from = unsafe { part.as_ptr().add(stream * stream_bytes + offset) };
            for (half, sum) in sums.iter_mut().enumerate() {
                if PREFETCH && half % 2 == 0 {
                    // A prefetch reads nothing: its address may lie anywhere.
                    _mm_prefetch::<HINT>(from.wrapping_add(ahead + 32 * half).cast());
                }
                // SAFETY: inside the 256 bytes at `from`, and aligned as `part` is.
                let value = unsafe { _mm256_load_si256(from.add(32 * half).cast()) };
                *sum = _mm256_xor_si256(*sum, value);
            }
        }
    }
    black_box(sums);
}
