//! What the machine can do at most: bytes read per second from memory, and multiply-adds per second.
//!
//! The limits run in processes of their own (`bench limits`): memory that this process touches must not count as resident memory of the
//! executables.
//!
//! Peak: independent chains of one instruction on registers only. Threads are pinned to different physical cores and stamp begin
//! and end themselves. Bandwidth: see `bandwidth`.
//!
//! Beside them the time that a cache line takes from one core to another and back: a virtual machine's cores lie beside each other at one
//! moment and far apart at the next, where each reads through its own path but hands over lines several times slower.

use std::arch::x86_64::*;
use std::error::Error;
use std::hint::black_box;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;

use serde_json::json;

use crate::bandwidth::{Memory, PATTERNS, Pattern, part_bytes};
use crate::machine::{self, pin_to};

/// Measures the limits with each number of threads, and prints one JSON line per limit.
///
/// ```text
/// {"limit":"read anonymous","threads":2,"best":"4 streams, prefetch 4 KB","value":49.1,"all":{"1 stream":45.0,..}}
/// {"limit":"read file","threads":2,"best":"8 streams, prefetch L2 8 KB","value":48.7,"all":{..}}
/// {"limit":"avx512-fma","threads":1,"value":140.2}
/// {"limit":"round trip","threads":2,"value":78.0}
/// ```
/// `all` is what was measured as long as `value`. `value` is in GB/s for reading, in ns for the round trip of a line between the first two
/// cores, in GFLOP/s for the others. `file` is the mapped file; without one only anonymous memory is read.
pub fn run(threads: &[usize], file: Option<&Path>, peaks_alone: bool) -> Result<(), Box<dyn Error>> {
    let cores = machine::physical_cores();
    let counts: Vec<usize> = threads.iter().copied().filter(|&t| has_limits() && t <= cores.len()).collect();
    if !peaks_alone {
        let anonymous = Memory::anonymous()?;
        for &count in &counts {
            read_limit(ANONYMOUS, &anonymous, &cores[..count], Long);
        }
        if let Some(mapped) = file.map(mapped).transpose()?.flatten() {
            for &count in &counts {
                read_limit(FILE, &mapped, &cores[..count], Long);
            }
        }
    }
    for count in counts {
        if let Some(ns) = round_trip(count) {
            println!("{}", json!({"limit": ROUND_TRIP, "threads": count, "value": ns}));
        }
        for peak in PEAKS.iter().filter(|p| (p.is_present)()) {
            let flop = PEAK_ROUNDS as f64 * peak.flop_per_round * count as f64;
            let best = (0..3).map(|_| flop / together(&cores[..count], |_| peak_loop(peak)) / 1e9).fold(0.0, f64::max);
            println!("{}", json!({"limit": peak.name, "threads": count, "value": best}));
        }
    }
    Ok(())
}

/// For every line `THREADS FILE` on stdin the limits of reading, shortly, and an empty line.
///
/// The memory stays in between: freed, a virtual machine gives it back to its host two seconds later, and whoever reads then is disturbed.
pub fn turns() -> Result<(), Box<dyn Error>> {
    let cores = machine::physical_cores();
    let anonymous = Memory::anonymous()?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let (count, path) = line.split_once(' ').ok_or("expected THREADS FILE")?;
        let count: usize = count.parse()?;
        if has_limits() && count <= cores.len() {
            read_limit(ANONYMOUS, &anonymous, &cores[..count], Short);
            if let Some(mapped) = mapped(Path::new(path))? {
                read_limit(FILE, &mapped, &cores[..count], Short);
            }
        }
        println!();
    }
    Ok(())
}

/// Names of the limits of reading.
const ANONYMOUS: &str = "read anonymous";
pub const FILE: &str = "read file";
/// Name of what [`round_trip`] measures.
pub const ROUND_TRIP: &str = "round trip";

fn mapped(path: &Path) -> Result<Option<Memory>, Box<dyn Error>> {
    Ok(Memory::file(path).map_err(|e| format!("{}: {e}", path.display()))?)
}

/// The loops need these instructions.
fn has_limits() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// How long to measure what can be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Length {
    /// Every pattern twice over all of the memory: one disturbance does not decide.
    Long,
    /// Every pattern once over the next quarter, some milliseconds, then the best two of them [`LASTING`] times over all of it: a third of
    /// a second at 36 GB/s, since what a virtual machine reads may change within seconds. Only what these two reach in all their time
    /// counts: the best of seventeen glances lies above any rate that lasts.
    Short,
}

use Length::{Long, Short};

/// Times that a pattern reads all of the memory without a pause.
const LASTING: usize = 3;

fn read_limit(name: &str, memory: &Memory, cores: &[usize], length: Length) {
    let rate = |pattern: Pattern, bytes: &[u8], times: usize| {
        let seconds = together(cores, |thread| (0..times).for_each(|_| pattern.read_part(bytes, thread, cores.len())));
        (times * part_bytes(bytes, cores.len()) * cores.len()) as f64 / seconds / 1e9
    };
    let rates = match length {
        Long => best_first(PATTERNS.map(|p| (p, (0..2).map(|_| rate(p, memory.bytes(), 1)).fold(0.0, f64::max))).into()),
        Short => {
            let glances = (0..).zip(PATTERNS).map(|(i, p)| (p, rate(p, memory.quarter(i), 1))).collect();
            lasting(glances, |p| rate(p, memory.bytes(), LASTING))
        }
    };
    let all: serde_json::Map<_, _> = rates.iter().map(|(pattern, value)| (pattern.name(), json!(value))).collect();
    println!("{}", json!({"limit": name, "threads": cores.len(), "best": rates[0].0.name(), "value": rates[0].1, "all": all}));
}

fn best_first<P>(mut rates: Vec<(P, f64)>) -> Vec<(P, f64)> {
    rates.sort_by(|a, b| b.1.total_cmp(&a.1));
    rates
}

/// What the two that were best at a glance reach when they are measured longer, best first.
fn lasting<P: Copy>(glances: Vec<(P, f64)>, measure: impl Fn(P) -> f64) -> Vec<(P, f64)> {
    best_first(best_first(glances).into_iter().take(2).map(|(pattern, _)| (pattern, measure(pattern))).collect())
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

// --- Round trip

/// Trips of one measurement: a millisecond or two.
const TRIPS: u32 = 4000;

/// Nanoseconds that a cache line takes from the first core to the second and back, if so many threads have two: the least of three
/// measurements, since a core that is taken away for a moment only makes it longer. It touches no other memory, so that this process may
/// measure it.
pub fn round_trip(threads: usize) -> Option<f64> {
    let cores = machine::physical_cores();
    let pair = cores.get(..2).filter(|_| threads > 1)?;
    Some((0..3).map(|_| trips(pair)).fold(f64::INFINITY, f64::min))
}

/// Nanoseconds per round trip. One core makes the number odd, the other even again.
fn trips(pair: &[usize]) -> f64 {
    let line = Line(AtomicU32::new(0));
    let seconds = together(pair, |thread| {
        for trip in 0..TRIPS {
            let mine = 2 * trip + thread as u32;
            while line.0.load(Acquire) != mine {
                std::hint::spin_loop();
            }
            line.0.store(mine + 1, Release);
        }
    });
    seconds * 1e9 / f64::from(TRIPS)
}

/// Alone on its cache line, and on the one that is fetched with it.
#[repr(align(128))]
struct Line(AtomicU32);

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

const PEAKS: [Peak; 7] = [
    Peak {
        name: "avx2-fma",
        is_present: || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
        run: fma_avx2,
        flop_per_round: 12.0 * 16.0,
    },
    Peak { name: "avx512-fma", is_present: || is_x86_feature_detected!("avx512f"), run: fma_avx512, flop_per_round: 16.0 * 32.0 },
    Peak { name: "vdpbf16ps", is_present: || is_x86_feature_detected!("avx512bf16"), run: dot_bf16, flop_per_round: 16.0 * 64.0 },
    Peak { name: "vpmaddubsw", is_present: || is_x86_feature_detected!("avx2"), run: dot_nibbles, flop_per_round: 12.0 * 64.0 },
    Peak { name: "vpdpbusd", is_present: || is_x86_feature_detected!("avx512vnni"), run: dot_int8, flop_per_round: 16.0 * 128.0 },
    Peak { name: "tdpbf16ps", is_present: || has_tiles("amx-bf16"), run: tiles_of_bf16, flop_per_round: 2.0 * 16.0 * 16.0 * 32.0 },
    Peak { name: "tdpbsud", is_present: || has_tiles("amx-int8"), run: tiles_of_int8, flop_per_round: 2.0 * 16.0 * 16.0 * 64.0 },
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

/// Products of bytes in pairs and their sums in words: the fewest instructions without a dot. Each product depends on a sum, or it would
/// leave the loop.
///
/// # Safety
/// The CPU has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn dot_nibbles(rounds: usize) {
    let a = black_box(_mm256_setzero_si256());
    let mut sums = black_box([_mm256_setzero_si256(); 12]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(a, *sum));
        }
    }
    black_box(sums);
}

/// # Safety
/// The CPU has AVX-512 VNNI.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn dot_int8(rounds: usize) {
    let (a, b) = (black_box(_mm512_setzero_si512()), black_box(_mm512_setzero_si512()));
    let mut sums = black_box([_mm512_setzero_si512(); 16]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, a, b);
        }
    }
    black_box(sums);
}

/// Has this process tiles, and this product of them?
fn has_tiles(product: &str) -> bool {
    rcompile_runtime::cpu::missing(&["amx-tile", product].map(String::from)).is_empty()
}

/// Tile registers of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig([u8; 64]);

impl TileConfig {
    const fn new() -> Self {
        let mut bytes = [0; 64];
        bytes[0] = 1;
        let mut register = 0;
        while register < 8 {
            bytes[16 + 2 * register] = 64;
            bytes[48 + register] = 16;
            register += 1;
        }
        TileConfig(bytes)
    }
}

/// What rows and columns hold meanwhile: bf16 from 1 to 2. Products of registers that nobody has loaded are fast even while those of
/// numbers, which kernels have, take 40 cycles instead of 16 (docs/machines/emerald-rapids.md).
#[repr(C, align(64))]
struct Tile([u16; 512]);

impl Tile {
    fn new() -> Self {
        Tile(std::array::from_fn(|i| 0x3f80 + i as u16 % 128))
    }
}

/// One product of tiles per round, in four registers of sums.
macro_rules! tiles {
    ($name:ident, $instruction:literal) => {
        /// # Safety
        /// The process may use tiles, and the CPU has this product.
        unsafe fn $name(rounds: usize) {
            let (config, tile) = (TileConfig::new(), Tile::new());
            // SAFETY: reads the configuration and the tile, changes tile registers (no Rust code uses them) and gives them up.
            unsafe {
                std::arch::asm!(
                    "ldtilecfg [{config}]",
                    "tileloadd tmm4, [{tile} + {row}]",
                    "tileloadd tmm5, [{tile} + {row}]",
                    "tileloadd tmm6, [{tile} + {row}]",
                    "tileloadd tmm7, [{tile} + {row}]",
                    "2:",
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    concat!($instruction, " tmm1, tmm4, tmm7"),
                    concat!($instruction, " tmm2, tmm5, tmm6"),
                    concat!($instruction, " tmm3, tmm5, tmm7"),
                    "sub {rounds}, 4",
                    "ja 2b",
                    "tilerelease",
                    config = in(reg) &config,
                    tile = in(reg) &tile,
                    row = in(reg) 64usize,
                    rounds = inout(reg) rounds => _,
                    options(nostack),
                );
            }
        }
    };
}
tiles!(tiles_of_bf16, "tdpbf16ps");
tiles!(tiles_of_int8, "tdpbsud");

#[cfg(test)]
mod tests {
    use super::*;

    /// No two cores hand a line over and back in less than 10 ns; whoever does not wait for the other is done sooner. A single thread has
    /// nobody to hand it to.
    #[test]
    fn a_line_goes_to_the_other_core_and_back() {
        assert_eq!(round_trip(1), None);
        match round_trip(2) {
            Some(ns) => assert!((10.0..1e6).contains(&ns), "{ns} ns"),
            None => assert_eq!(machine::physical_cores().len(), 1),
        }
    }

    /// A glance only chooses; the best of two is the one that reads faster for longer, and what it showed at a glance does not count.
    #[test]
    fn a_limit_is_a_rate_that_lasts() {
        let measure = |pattern| match pattern {
            "first" => 5.0,
            "second" => 7.0,
            other => panic!("{other} was not among the best two"),
        };
        assert_eq!(lasting(vec![("third", 8.0), ("second", 9.0), ("first", 10.0)], measure), [("second", 7.0), ("first", 5.0)]);
    }
}
