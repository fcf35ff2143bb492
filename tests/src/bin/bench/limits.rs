//! What the machine can do at most: bytes read per second from memory, and multiply-adds per second.
//!
//! The limits run in a process of their own (`bench limits`), which the benchmark starts once per round: memory that this
//! process touches must not count as resident memory of the executables, and large pages are found anew in every round.
//!
//! Bandwidth: every thread xors its own part of a buffer of more than 1 GB, in several patterns (streams side by side, with and
//! without prefetch); the best pattern of a round is the limit, since a program could read that way. Peak: independent chains of
//! one instruction on registers only. Threads are pinned to different physical cores and stamp begin and end themselves.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::arch::x86_64::*;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use serde_json::{Value, json};

use crate::machine::{self, pin_to};

/// Bytes of the buffer that is read: far beyond any L3 cache.
const BUFFER_BYTES: usize = 1280 << 20;
const BUFFER_ALIGN: usize = 2 << 20;
/// Prefetched addresses may lie this far behind a part.
const PREFETCH_AHEAD: usize = 4096;

/// Measures all limits once with 1 thread and with `threads`, and prints one JSON line per limit.
///
/// ```text
/// {"limit":"read","threads":2,"best":"4 streams, prefetch","value":49.1,"all":{"1 stream":45.0,..}}
/// {"limit":"avx512-fma","threads":1,"value":140.2}
/// ```
/// `value` is in GB/s for `read`, in GFLOP/s for the others.
pub fn run(threads: &[usize]) {
    if !is_x86_feature_detected!("avx2") || !is_x86_feature_detected!("fma") {
        return;
    }
    let cores = machine::physical_cores();
    let buffer = Buffer::new();
    for &count in threads.iter().filter(|&&t| t <= cores.len()) {
        let mut all = serde_json::Map::new();
        let mut best = ("", 0.0);
        // Twice each pattern: one disturbance does not decide.
        for (name, pattern) in PATTERNS.iter().chain(&PATTERNS) {
            let seconds = read_seconds(&buffer, *pattern, &cores[..count]);
            let rate = BUFFER_BYTES as f64 / seconds / 1e9;
            if rate > best.1 {
                best = (name, rate);
            }
            let seen = all.get(*name).and_then(Value::as_f64).unwrap_or(0.0);
            all.insert((*name).into(), json!(rate.max(seen)));
        }
        println!("{}", json!({"limit": "read", "threads": count, "best": best.0, "value": best.1, "all": all}));
    }
    drop(buffer);
    for &count in threads.iter().filter(|&&t| t <= cores.len()) {
        for peak in PEAKS.iter().filter(|p| (p.is_present)()) {
            let flop = PEAK_ROUNDS as f64 * peak.flop_per_round * count as f64;
            let best = (0..3).map(|_| flop / together(&cores[..count], |_| peak_loop(peak)) / 1e9).fold(0.0, f64::max);
            println!("{}", json!({"limit": peak.name, "threads": count, "value": best}));
        }
    }
}

/// Runs `work(thread)` on every core at the same time; seconds from the first begin to the last end.
fn together(cores: &[usize], work: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(cores.len());
    let stamps: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let spawn = |(thread, &core): (usize, &usize)| {
            let (barrier, work) = (&barrier, &work);
            scope.spawn(move || {
                pin_to(core);
                barrier.wait();
                let begin = Instant::now();
                work(thread);
                (begin, Instant::now())
            })
        };
        let running: Vec<_> = cores.iter().enumerate().map(spawn).collect();
        running.into_iter().map(|t| t.join().expect("the loops do not panic")).collect()
    });
    let begin = stamps.iter().map(|s| s.0).min().expect("at least one thread");
    let end = stamps.iter().map(|s| s.1).max().expect("at least one thread");
    (end - begin).as_secs_f64()
}

// --- Bandwidth

/// Memory in large pages where the system gives them, written once.
struct Buffer(*mut u8);

// SAFETY: the memory is written only in `new`; afterwards threads only read it.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn layout() -> Layout {
        Layout::from_size_align(BUFFER_BYTES + PREFETCH_AHEAD, BUFFER_ALIGN).expect("a power of two, and small enough")
    }

    fn new() -> Self {
        // SAFETY: the size is not zero.
        let start = unsafe { alloc(Self::layout()) };
        if start.is_null() {
            handle_alloc_error(Self::layout());
        }
        // SAFETY: the range was just allocated, is aligned to pages, and the advice does not change its content; large pages
        // are only asked for, so that an error does not matter.
        unsafe { libc::madvise(start.cast(), BUFFER_BYTES, libc::MADV_HUGEPAGE) };
        // SAFETY: the range was just allocated; writing it gives every page memory of its own.
        unsafe { start.write_bytes(1, Self::layout().size()) };
        Self(start)
    }

    /// Part `index` of `count` equal parts, a multiple of 64 KB.
    fn part(&self, index: usize, count: usize) -> &[u8] {
        let bytes = (BUFFER_BYTES / count) & !0xffff;
        // SAFETY: inside the allocation and written; nobody writes it any more.
        unsafe { std::slice::from_raw_parts(self.0.add(index * bytes), bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nothing borrows it any more.
        unsafe { dealloc(self.0, Self::layout()) };
    }
}

/// How a thread walks its part: in so many streams side by side, with prefetch or without.
#[derive(Clone, Copy)]
struct Pattern {
    streams: usize,
    prefetch: bool,
}

const PATTERNS: [(&str, Pattern); 5] = [
    ("1 stream", Pattern { streams: 1, prefetch: false }),
    ("1 stream, prefetch", Pattern { streams: 1, prefetch: true }),
    ("4 streams", Pattern { streams: 4, prefetch: false }),
    ("4 streams, prefetch", Pattern { streams: 4, prefetch: true }),
    ("8 streams, prefetch", Pattern { streams: 8, prefetch: true }),
];

fn read_seconds(buffer: &Buffer, pattern: Pattern, cores: &[usize]) -> f64 {
    let wide = is_x86_feature_detected!("avx512f");
    together(cores, |thread| {
        let part = buffer.part(thread, cores.len());
        // SAFETY: `run` checked AVX2, and `wide` AVX-512; the part has the alignment and length that the loops ask for.
        unsafe {
            match (pattern.streams, pattern.prefetch, wide) {
                (1, false, true) => read_avx512::<1, false>(part),
                (1, true, true) => read_avx512::<1, true>(part),
                (4, false, true) => read_avx512::<4, false>(part),
                (4, true, true) => read_avx512::<4, true>(part),
                (_, _, true) => read_avx512::<8, true>(part),
                (1, false, false) => read_avx2::<1, false>(part),
                (1, true, false) => read_avx2::<1, true>(part),
                (4, false, false) => read_avx2::<4, false>(part),
                (4, true, false) => read_avx2::<4, true>(part),
                (_, _, false) => read_avx2::<8, true>(part),
            }
        }
    })
}

/// Reads `part` in `STREAMS` streams of 256 bytes at a time.
///
/// # Safety
/// The CPU has AVX-512F; `part` is aligned to 64 bytes, and its length is a multiple of `STREAMS * 256`.
#[target_feature(enable = "avx512f")]
unsafe fn read_avx512<const STREAMS: usize, const PREFETCH: bool>(part: &[u8]) {
    let stream_bytes = part.len() / STREAMS;
    let mut sums = [_mm512_setzero_si512(); 8];
    for offset in (0..stream_bytes).step_by(256) {
        for stream in 0..STREAMS {
            // SAFETY: below the end of `part`, since `offset + 256 <= stream_bytes`.
            let from = unsafe { part.as_ptr().add(stream * stream_bytes + offset) };
            for line in 0..4 {
                if PREFETCH {
                    // A prefetch reads nothing: its address may lie anywhere.
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(PREFETCH_AHEAD + 64 * line).cast());
                }
                // SAFETY: inside the 256 bytes at `from`, and aligned as `part` is.
                let value = unsafe { _mm512_load_si512(from.add(64 * line).cast()) };
                let sum = &mut sums[(4 * stream + line) % 8];
                *sum = _mm512_xor_si512(*sum, value);
            }
        }
    }
    black_box(sums);
}

/// Like [`read_avx512`], with vectors of half the width.
///
/// # Safety
/// The CPU has AVX2; `part` is aligned to 64 bytes, and its length is a multiple of `STREAMS * 256`.
#[target_feature(enable = "avx2")]
unsafe fn read_avx2<const STREAMS: usize, const PREFETCH: bool>(part: &[u8]) {
    let stream_bytes = part.len() / STREAMS;
    let mut sums = [_mm256_setzero_si256(); 8];
    for offset in (0..stream_bytes).step_by(256) {
        for stream in 0..STREAMS {
            // SAFETY: below the end of `part`, since `offset + 256 <= stream_bytes`.
            let from = unsafe { part.as_ptr().add(stream * stream_bytes + offset) };
            for (half, sum) in sums.iter_mut().enumerate() {
                if PREFETCH && half % 2 == 0 {
                    // A prefetch reads nothing: its address may lie anywhere.
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(PREFETCH_AHEAD + 32 * half).cast());
                }
                // SAFETY: inside the 256 bytes at `from`, and aligned as `part` is.
                let value = unsafe { _mm256_load_si256(from.add(32 * half).cast()) };
                *sum = _mm256_xor_si256(*sum, value);
            }
        }
    }
    black_box(sums);
}

// --- Peaks

/// An instruction and a loop that does nothing else.
struct Peak {
    name: &'static str,
    is_present: fn() -> bool,
    /// Safe to call where `is_present` says so; the number is that of rounds.
    run: unsafe fn(usize),
    flop_per_round: f64,
}

/// Rounds of one measurement: about 0.1 s.
const PEAK_ROUNDS: usize = 20_000_000;

const PEAKS: [Peak; 3] = [
    Peak {
        name: "avx2-fma",
        is_present: || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
        run: fma_avx2,
        flop_per_round: 12.0 * 16.0,
    },
    Peak { name: "avx512-fma", is_present: || is_x86_feature_detected!("avx512f"), run: fma_avx512, flop_per_round: 16.0 * 32.0 },
    Peak { name: "vdpbf16ps", is_present: || is_x86_feature_detected!("avx512bf16"), run: dot_bf16, flop_per_round: 16.0 * 64.0 },
];

fn peak_loop(peak: &Peak) {
    // SAFETY: the caller kept only peaks whose instructions the CPU has.
    unsafe { (peak.run)(PEAK_ROUNDS) }
}

/// # Safety
/// The CPU has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
unsafe fn fma_avx2(rounds: usize) {
    let (a, b) = (black_box(_mm256_setzero_ps()), black_box(_mm256_setzero_ps()));
    let mut sums = black_box([_mm256_setzero_ps(); 12]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(a, b, *sum);
        }
    }
    black_box(sums);
}

/// # Safety
/// The CPU has AVX-512F.
#[target_feature(enable = "avx512f")]
unsafe fn fma_avx512(rounds: usize) {
    let (a, b) = (black_box(_mm512_setzero_ps()), black_box(_mm512_setzero_ps()));
    let mut sums = black_box([_mm512_setzero_ps(); 16]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(a, b, *sum);
        }
    }
    black_box(sums);
}

/// # Safety
/// The CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn dot_bf16(rounds: usize) {
    let a = black_box(_mm512_cvtne2ps_pbh(_mm512_setzero_ps(), _mm512_setzero_ps()));
    let b = black_box(_mm512_cvtne2ps_pbh(_mm512_setzero_ps(), _mm512_setzero_ps()));
    let mut sums = black_box([_mm512_setzero_ps(); 16]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, a, b);
        }
    }
    black_box(sums);
}
