//! A copy of the mapped weights in memory of the process, for `--copy-weights`.
//!
//! In: the weights as they are mapped. Out: the same bytes in anonymous memory, in large pages where the kernel has them. Where the page
//! cache has put a file is not ours to choose, and on virtual machines it can be read up to a third slower than fresh memory. Weights are
//! resident once: pages of the mapping are let go as soon as they are copied.

use crate::abi::WEIGHTS_ALIGN;
use crate::area::{Area, MemoryUse, ResourceError, room_for};
use crate::threads::builder;
use std::sync::Mutex;

/// Bytes that a thread copies at a time: whole large pages, few enough that the mapping's pages do not add up.
const CHUNK: usize = 4 * WEIGHTS_ALIGN as usize;

/// Copies `weights` with this many threads. The copy stays until the process ends.
///
/// # Safety
/// `weights` is a mapping of a file that nobody writes to through it: its pages are let go.
pub(crate) unsafe fn copied(weights: &'static [u8], threads: usize) -> Result<&'static [u8], ResourceError> {
    room_for(MemoryUse::WeightsCopy, weights.len() as u64)?;
    let align = WEIGHTS_ALIGN as usize;
    let area = Area::new(MemoryUse::WeightsCopy, (weights.len() + align) as u64)?.leak();
    let begin = area.as_ptr().align_offset(align);
    let copy = &mut area[begin..][..weights.len()];
    let chunks = Mutex::new(copy.chunks_mut(CHUNK).zip(weights.chunks(CHUNK)));
    let next = || chunks.lock().ok().and_then(|mut chunks| chunks.next());
    let work = || {
        while let Some((to, from)) = next() {
            to.copy_from_slice(from);
            let_go(from);
        }
    };
    std::thread::scope(|scope| {
        // Where no thread can be made, those that are there copy it all.
        (1..threads).for_each(|_| _ = builder("copy").spawn_scoped(scope, work));
        work();
    });
    Ok(copy)
}

/// Drops whole pages of a mapped file from the process; they stay in the page cache.
fn let_go(mapped: &[u8]) {
    let page = rustix::param::page_size();
    let begin = (mapped.as_ptr() as usize).next_multiple_of(page);
    let end = (mapped.as_ptr() as usize + mapped.len()) / page * page;
    if end > begin {
        // SAFETY: whole pages of a mapping of a file, as the caller promises; whoever touches them again gets the file's contents.
        let _ = unsafe { rustix::mm::madvise(begin as *mut _, end - begin, rustix::mm::Advice::LinuxDontNeed) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// KiB of the mapping at `at` that are resident.
    fn resident_kib(at: *const u8) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = format!("{:x}-", at as usize);
        let mapping = maps.lines().skip_while(|line| !line.starts_with(&begin));
        let line = mapping.skip(1).find(|line| line.starts_with("Rss:")).expect("the mapping is listed");
        line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
    }

    #[test]
    fn the_same_bytes_once() {
        let bytes: Vec<u8> = (0..3 * CHUNK + 12_345).map(|i| (i % 251) as u8).collect();
        let path = std::env::temp_dir().join(format!("rc-copy-{}", std::process::id()));
        std::fs::write(&path, &bytes).unwrap();
        for threads in [1, 3] {
            let mapped = crate::payload::map_file(&path, bytes.len() as u64).unwrap();
            // SAFETY: just mapped, and nobody writes to it.
            let copy = unsafe { copied(mapped, threads) }.unwrap();
            assert_eq!(copy.as_ptr() as u64 % WEIGHTS_ALIGN, 0);
            // The last page is no whole one.
            assert!(resident_kib(mapped.as_ptr()) <= 64, "{} KiB stay", resident_kib(mapped.as_ptr()));
            assert!(copy == bytes, "{threads} threads");
            assert!(mapped == bytes, "the file's pages come back");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn less_than_a_page_is_not_let_go() {
        let bytes = vec![7; 16];
        let_go(&bytes[1..10]);
        assert_eq!(bytes, [7; 16]);
    }
}
