//! Speed of matmul and attention kernels on this machine, next to its FMA peak and read rate in the same minute.
//!
//! `cargo run --release -p rcompile-codegen --example kernel_speed [-- CPU [FILTER]]`. One thread. The peak and each kernel take turns;
//! `WEIGHTS=int4g32` takes only these weights; `ROUNDS` is their number (short kernels in many rounds are compared best where the clock
//! moves); `MR`, `BLOCKMR`, `STREAMS`, `BLOCK`, `KBLOCK`, `MBLOCK`, `WIDEN`, `FAR`, `NEAR`, `PASTL2` (1: yes), `BUSY` (rows from which
//! lines go to L1 alone, as far ahead as a line of the output says; models: `tiling.rs`), `PAD` and `ROWS`, and `K` and `N` with it (`gemv`: `K` or `N` alone,
//! too, `N` large enough for weights that no cache holds; `gemm`: `LAYERS` of weights in turns, so that no cache holds them), are for
//! trials (attention: `ROWS`, `KEYS`, `TILE` rows of a tile, and `WAY=tiles`, only what computes so). Integer dots are measured against the
//! dot instruction's own peak (where one takes several instructions, four times the FMA peak); shares are of the best rounds (a shared
//! machine has bad ones), and of the median round in brackets; of rounds by tiles the medians of fast and of slow ones follow. "clock": how
//! fast a chain of multiplications ran right behind the kernel, beside one right behind the peak. Dense FMAs may lower the clock (Emerald
//! Rapids: 2.74 GHz, 2.97 with dots): a kernel at 95 % of their rate may be at 88 % of their rate per cycle.
//! `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` puts weights and caches into large pages, as models have them.

#[path = "../tests/kernel_harness/mod.rs"]
mod kernel_harness;

use kernel_harness::{Area, Loaded, Rng, Step};
use rcompile_codegen::isa::{Distances, HOST_TRIPLE, Int8Dot, Isa};
use rcompile_codegen::kernels::{attention, matmul};
use rcompile_codegen::llvm::builder::{Codes, Elem, Ty, Visibility};
use rcompile_codegen::program::*;
use rcompile_runtime::abi::Tile;

const ROUNDS: u32 = 15;

fn main() {
    let isa = match std::env::args().nth(1).filter(|a| a != "native") {
        Some(cpu) => Isa::lookup(HOST_TRIPLE, &cpu, &[]).expect("known CPU"),
        None => Isa::native().expect("supported host"),
    };
    println!("{}: {} lanes, bf16 dot {}", isa.name, isa.lanes, isa.bf16_dot);
    let peak = Peak::new(&isa);
    let elements = |dtype, compute| (dtype, compute, Coding::Elements);
    let mut types: Vec<_> = [DType::F32, DType::F16, DType::Bf16].map(|dtype| elements(dtype, Compute::F32)).into();
    if isa.bf16_dot {
        types.push(elements(DType::Bf16, Compute::Bf16Dot));
    }
    if isa.bf16_tiles {
        types.push(elements(DType::Bf16, Compute::Bf16Tiles));
    }
    let made = [32, 64, 128].map(|group| Coding::Int4 { group, zeros: false });
    let given = [Coding::Int4 { group: 128, zeros: true }, Coding::Int8Groups { group: 128, zeros: true }];
    for coding in [Coding::Int8 { group: 256 }].into_iter().chain(made).chain(given) {
        let dtype = if coding.has_bytes() { isa.code_type() } else { DType::U8 };
        if isa.int8_dot(isa.lanes).is_some() {
            types.push((dtype, Compute::Int8Dot, coding));
            if isa.int8_tiles {
                types.push((dtype, Compute::Int8Tiles, coding));
            }
            if isa.matmul_of_codes(coding) == Compute::CodesInBf16Tiles {
                types.push((dtype, Compute::CodesInBf16Tiles, coding));
            }
        }
        types.push((dtype, Compute::F32, coding));
    }
    // `WEIGHTS=int4`: these only.
    let only = std::env::var("WEIGHTS").unwrap_or_default();
    types.retain(|t| only.is_empty() || t.2.name(t.0).contains(&only));
    let filter = std::env::args().nth(2).unwrap_or_default();
    let wanted = |part: &str| filter.is_empty() || part.contains(&filter);
    for &weights in types.iter().filter(|_| wanted("gemm")) {
        let shapes = [(12, 2048, 32), (33, 2048, 512), (128, 2048, 2048), (512, 2048, 2048), (512, 576, 1536), (128, 8192, 1024)];
        let shape = (env("ROWS", 0), env("K", 0), env("N", 0));
        for (rows, k, n) in if shape.1 > 0 { vec![shape] } else { shapes.into() } {
            for prefetch in [1024, 4096] {
                Matmuls { prefetch, ..Matmuls::new(&isa, weights, rows, k, n) }.compute_bound(&peak);
            }
        }
    }
    let distances = match std::env::var("FAR") {
        Ok(_) => vec![env("FAR", 0)],
        Err(_) => vec![1024, 2048, 4096, 8192],
    };
    for &weights in types.iter().filter(|_| wanted("gemv")) {
        for rows in [1, 2, 3, 4, 6, 8, 12].into_iter().filter(|r| env("ROWS", *r) == *r) {
            for &prefetch in &distances {
                let n = env("N", if weights.0 == DType::F32 { 32_768 } else { 65_536 });
                Matmuls { prefetch, ..Matmuls::new(&isa, weights, rows, env("K", 2048), n) }.memory_bound(&peak);
            }
        }
    }
    let mut caches: Vec<_> = [DType::F32, DType::Bf16, DType::I8].map(|kv| (kv, Compute::F32)).into();
    if isa.bf16_dot {
        caches.push((DType::Bf16, Compute::Bf16Dot));
    }
    if isa.bf16_tiles {
        caches.push((DType::Bf16, Compute::Bf16Tiles));
    }
    // `WAY=tiles`: this arithmetic only.
    let only = std::env::var("WAY").unwrap_or_default();
    for (kv, compute) in caches.into_iter().filter(|cache| wanted("attention") && way(cache.1).contains(&only)) {
        for (heads, kv_heads, head_dim, rows, keys, tile_rows) in [
            (32, 8, 64, 128, 512, 16),
            (12, 12, 64, 128, 512, 16),
            (9, 3, 64, 128, 512, 16),
            (8, 8, 80, 64, 512, 16),
            (32, 8, 64, 1, 4096, 1),
            (32, 8, 128, 1, 4096, 1),
        ] {
            let (rows, keys, tile_rows) = (env("ROWS", rows), env("KEYS", keys), env("TILE", tile_rows));
            if compute == Compute::Bf16Tiles && head_dim % 32 != 0 {
                continue;
            }
            attend(&isa, &peak, kv, compute, heads, kv_heads, head_dim, rows, keys, tile_rows);
        }
    }
}

unsafe extern "C" {
    fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
    fn madvise(start: *mut u8, len: usize, advice: i32) -> i32;
}

/// Moves weights to large pages, where executables keep theirs if the system has some to give.
fn ask_for_large_pages(weights: &mut Area) {
    const MADV_COLLAPSE: i32 = 25;
    const LARGE: usize = 2 << 20;
    let (start, len) = (weights.ptr(), weights.bytes().len());
    let begin = start.align_offset(LARGE);
    if begin + LARGE <= len {
        // SAFETY: the range lies inside the area, whose bytes stay what they are; a refusal does not matter.
        unsafe { madvise(start.add(begin), (len - begin) / LARGE * LARGE, MADV_COLLAPSE) };
    }
}

/// CPU time of this thread: what others do on the core in between does not count.
fn seconds(f: impl FnOnce()) -> f64 {
    const THREAD_CPU: i32 = 3;
    let now = || {
        let mut time = [0i64; 2];
        // SAFETY: `time` has the layout of a 64-bit `timespec`.
        unsafe { clock_gettime(THREAD_CPU, &mut time) };
        time[0] as f64 + 1e-9 * time[1] as f64
    };
    let start = now();
    f();
    now() - start
}

/// A number from the environment, for trials.
fn env(name: &str, default: u32) -> u32 {
    std::env::var(name).map_or(default, |v| v.parse().expect("a number"))
}

/// Rates of interleaved rounds: the kernel's and the reference's.
#[derive(Default)]
struct Rounds(Vec<(f64, f64)>);

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Rates of rounds while tiles are fast, and while they are slow; where a kernel has any.
struct TileRounds<'a> {
    peak: Option<&'a Peak>,
    fast: Vec<f64>,
    slow: Vec<f64>,
}

impl<'a> TileRounds<'a> {
    fn new(peak: &'a Peak, by_tiles: bool) -> Self {
        TileRounds { peak: by_tiles.then_some(peak), fast: vec![], slow: vec![] }
    }
    /// Runs a round, which says its rate, and keeps that where tiles are as fast behind it as before.
    fn round(&mut self, run: impl FnOnce() -> f64) -> f64 {
        let are_slow = || self.peak.and_then(Peak::tile_cycles).map(|cycles| cycles > SLOW_TILES);
        let before = are_slow();
        let rate = run();
        match (before, are_slow()) {
            (Some(true), Some(true)) => self.slow.push(rate / 1e9),
            (Some(false), Some(false)) => self.fast.push(rate / 1e9),
            _ => {}
        }
        rate
    }
    fn print(self) {
        if self.peak.is_some() {
            let [fast, slow] = [self.fast, self.slow].map(|rates| match rates.len() {
                0 => "none".to_owned(),
                count => format!("{:.1} ({count})", median(rates)),
            });
            println!("    GFLOP/s, median (number) of rounds while tiles are fast: {fast}, while they are slow: {slow}");
        }
    }
}

impl Rounds {
    fn best(&self) -> (f64, f64) {
        self.0.iter().fold((0.0, 0.0), |a, b| (f64::max(a.0, b.0), f64::max(a.1, b.1)))
    }
    fn share(&self) -> String {
        let shares = self.0.iter().map(|r| 100.0 * r.0 / r.1).collect();
        let (rate, reference) = self.best();
        format!("{:5.1} % [{:5.1} %]", 100.0 * rate / reference, median(shares))
    }
}

/// What the core does at best.
struct Peak {
    fma: Loaded,
    /// Integer dots, where they are an instruction.
    dot: Option<Loaded>,
    /// Products of tiles, where it has some.
    tiles: Option<Loaded>,
    /// Multiplications one after the other.
    chain: Loaded,
    read: Loaded,
    lanes: f64,
}

const PEAK_STEPS: u32 = 1 << 18;
const PEAK_CHAINS: usize = 12;
/// Tens of multiplications: some 20 microseconds, before the clock has changed again.
const CLOCK_STEPS: i64 = 2000;
/// Cycles of each of them.
const MULTIPLY_CYCLES: i64 = 3;
/// Four products of tiles each: some ten microseconds.
const TILE_STEPS: i64 = 500;
/// Cycles of a product of tiles above which they are slow, since somebody else uses the core, too, presumably: 16, then 38 and more.
const SLOW_TILES: f64 = 21.0;

impl Peak {
    fn new(isa: &Isa) -> Peak {
        let params = [Ty::PTR, Ty::I32, Ty::I32, Ty::I32];
        let chains = |dots: bool| {
            Loaded::build(isa, |mb, name| {
                mb.define(name, &params, None, Visibility::Export, |fb, args| {
                    let one = fb.load_broadcast(DType::F32, fb.lanes(), args[0]);
                    let ints = Ty::vec(Elem::I32, fb.lanes());
                    let codes = fb.bitcast(one, ints);
                    let first: Vec<_> = (0..PEAK_CHAINS).map(|i| fb.add(one, fb.f32s(i as f32, fb.lanes()))).collect();
                    let first: Vec<_> = first.iter().map(|&v| if dots { fb.bitcast(v, ints) } else { v }).collect();
                    let step = |a| if dots { fb.dot_int8(a, codes, codes, Codes::Bytes) } else { fb.fma(a, one, one) };
                    let end = fb.loop_(fb.int(0), fb.int(PEAK_STEPS.into()), 1, &first, |_, acc| acc.iter().map(|&a| step(a)).collect());
                    let sum = end[1..].iter().fold(end[0], |a, &b| fb.xor(fb.bitcast(a, ints), fb.bitcast(b, ints)));
                    fb.store(sum, fb.offset_const(args[0], 64), 4);
                });
                Ok(())
            })
        };
        let fma = chains(false);
        let dot = matches!(isa.int8_dot(isa.lanes), Some(Int8Dot::Instruction(_))).then(|| chains(true));
        let tiles = isa.bf16_tiles.then(|| {
            Loaded::build(isa, |mb, name| {
                mb.define(name, &params, None, Visibility::Export, |fb, args| {
                    fb.tile_config(args[0]);
                    // (Registers that nobody has loaded take no part.)
                    (4..8).for_each(|register| fb.tile_load(register, fb.offset_const(args[0], 64), 64));
                    fb.for_(fb.int(0), fb.int(TILE_STEPS), 1, |_| {
                        (0..4).for_each(|sums| fb.tile_dot_bf16(sums, 4 + sums / 2, 6 + sums % 2));
                    });
                    fb.tile_release();
                });
                Ok(())
            })
        });
        let chain = Loaded::build(isa, |mb, name| {
            mb.define(name, &params, None, Visibility::Export, |fb, args| {
                let first = fb.zext(args[1], Elem::I64);
                let end = fb.loop_(fb.int(0), fb.int(CLOCK_STEPS), 1, &[first], |_, x| vec![(0..10).fold(x[0], |x, _| fb.mul(x, x))]);
                fb.store(end[0], fb.offset_const(args[0], 64), 4);
            });
            Ok(())
        });
        // read(p, megabytes)
        let read = Loaded::build(isa, |mb, name| {
            mb.define(name, &params, None, Visibility::Export, |fb, args| {
                let words = Ty::vec(Elem::I32, fb.lanes());
                let size = i64::from(fb.lanes()) * 4;
                let bytes = fb.mul_int(fb.zext(args[1], Elem::I64), 1 << 20);
                let first = vec![fb.zero(words); 8];
                let end = fb.loop_(fb.int(0), bytes, 8 * size, &first, |i, acc| {
                    let at = |n: usize| fb.offset_const(fb.offset(args[0], i), n as u64 * size as u64);
                    acc.iter().enumerate().map(|(n, &a)| fb.xor(a, fb.load(words, at(n), 64))).collect()
                });
                let sum = end[1..].iter().fold(end[0], |a, &b| fb.xor(a, b));
                fb.store(sum, args[0], 4);
            });
            Ok(())
        });
        Peak { fma, dot, tiles, chain, read, lanes: isa.lanes.into() }
    }
    fn time(&self, function: &Loaded) -> f64 {
        let memory = [1e-9f32; 64];
        // SAFETY: the function reads one f32 and writes a vector at 64 bytes.
        seconds(|| unsafe { (function.function())(memory.as_ptr().cast(), 3, 0, 0) })
    }
    fn flops_of(&self, chains: &Loaded) -> f64 {
        f64::from(PEAK_STEPS) * PEAK_CHAINS as f64 * 2.0 * self.lanes / self.time(chains)
    }
    /// FLOP/s.
    fn flops(&self) -> f64 {
        self.flops_of(&self.fma)
    }
    /// The same of integer dots, of which each does four multiply-adds per lane.
    fn dots(&self) -> f64 {
        4.0 * self.dot.as_ref().map_or_else(|| self.flops(), |dot| self.flops_of(dot))
    }
    /// Cycles that a product of tiles takes right now, where there are tiles.
    fn tile_cycles(&self) -> Option<f64> {
        // Palette 1, every register 16 rows of 64 bytes; then rows and columns.
        let mut config = [0x3f_u8; 64 + 1024];
        config[..64].fill(0);
        config[0] = 1;
        (0..8).for_each(|register| (config[16 + 2 * register], config[48 + register]) = (64, 16));
        let tiles = self.tiles.as_ref()?;
        // SAFETY: the function reads these bytes and writes nothing.
        let t = seconds(|| unsafe { (tiles.function())(config.as_ptr().cast(), 3, 0, 0) });
        let cycle = 1.0 / self.clock() / (CLOCK_STEPS * 10 * MULTIPLY_CYCLES) as f64;
        Some(t / (TILE_STEPS * 4) as f64 / cycle)
    }
    /// Chains per second, right now: a measure of the clock.
    fn clock(&self) -> f64 {
        1.0 / self.time(&self.chain)
    }
    /// Bytes per second of a plain linear read.
    fn read(&self, step: &mut Step) -> f64 {
        let megabytes = step.weights.bytes().len() >> 20;
        let p = step.weights.ptr();
        // SAFETY: the area is that long; the first vector is overwritten, which the benchmark does not mind.
        let t = seconds(|| unsafe { (self.read.function())(p.cast(), megabytes as u32, 0, 0) });
        (megabytes << 20) as f64 / t
    }
}

struct Matmuls {
    isa: Isa,
    dtype: DType,
    compute: Compute,
    coding: Coding,
    rows: u32,
    k: u32,
    n: u32,
    prefetch: u32,
    /// Weights per block.
    block_bytes: u64,
}

impl Matmuls {
    fn new(isa: &Isa, (dtype, compute, coding): (DType, Compute, Coding), rows: u32, k: u32, n: u32) -> Matmuls {
        Matmuls {
            isa: isa.clone(),
            dtype,
            compute,
            coding,
            rows,
            k,
            n,
            prefetch: 0,
            block_bytes: u64::from(env("BLOCK", (isa.l2_bytes / 4) as u32)),
        }
    }
    fn panels(&self) -> Panels {
        let k_pack = self.compute.k_pack(self.dtype, self.coding);
        Panels { nr: self.isa.panel_nr(), k_pack, k: self.k, groups: 1, group_cols: self.n, ways: 1, coding: self.coding }
    }
    fn build(&self) -> (Loaded, Step) {
        let panels = self.panels();
        let (a_dtype, width) = match (self.compute, self.coding.group()) {
            (compute, Some(group)) if compute.takes_codes() => (DType::U8, compute.record_stride(self.k, group)),
            (Compute::Bf16Dot | Compute::Bf16Tiles, _) => (DType::Bf16, self.k),
            _ => (DType::F32, self.k),
        };
        // As models have it: never a multiple of 2 KB.
        let whole = width.next_multiple_of(32);
        let collides = (u64::from(whole) * a_dtype.size()).is_multiple_of(2048);
        let a_stride = if a_dtype == DType::U8 { width } else { whole + env("PAD", if collides { 32 } else { 0 }) };
        let columns = panels.padded_cols();
        let a_bytes = u64::from(self.rows * a_stride) * 4;
        let buffer =
            |name: &str, dtype: DType, stride: u32, offset: u64| Buffer { name: name.into(), dtype, rows: self.rows, stride, offset };
        let mut e = Exprs::default();
        let [r, c] = [0, 1].map(|v| e.add(Expr::Var(VarId(v))));
        let stride = e.int(columns.into());
        let at = e.binary(BinaryOp::Mul, r, stride);
        let index = e.binary(BinaryOp::Add, at, c);
        let value = e.add(Expr::Acc(0));
        let nibbles = self.coding.has_nibbles();
        let widen =
            self.dtype != DType::F32 && (self.compute == Compute::F32 || self.compute.takes_codes() && nibbles) && env("WIDEN", 1) == 1;
        let most_k = match self.compute {
            Compute::Bf16Tiles | Compute::CodesInBf16Tiles => 512,
            Compute::Int8Tiles => 1024,
            compute if compute.takes_codes() => 2048,
            _ => (12 << 10) / self.isa.tile_rows,
        };
        let k_block = self.k.div_ceil(self.k.div_ceil(env("KBLOCK", most_k))).next_multiple_of(self.coding.group().unwrap_or(2));
        let panel_bytes = match (widen, self.compute) {
            (true, Compute::CodesInBf16Tiles) => u64::from(k_block * panels.nr) * DType::Bf16.size(),
            (true, compute) if compute.takes_codes() => u64::from(k_block * panels.nr),
            (true, _) => u64::from(k_block * panels.nr) * 4,
            _ => panels.bytes_before(k_block, self.dtype),
        };
        let stream = self.isa.streams.of(self.rows.into(), self.coding);
        let m_block = match self.compute {
            Compute::Bf16Tiles | Compute::CodesInBf16Tiles => 512,
            Compute::Int8Tiles => 256,
            _ => 0,
        };
        let kernel = Matmul {
            rows: Extent::Rows,
            a: Operand { place: Place::Buffer(BufferId(0)), dtype: a_dtype },
            a_stride,
            prologue: None,
            quantise: None,
            weight: WeightId(0),
            panels,
            compute: self.compute,
            tile: MatmulTile {
                mr: env("MR", self.isa.tile_rows),
                block_mr: env("BLOCKMR", env("MR", self.isa.tile_rows)),
                k_block,
                m_block: env("MBLOCK", m_block),
                n_block: (self.block_bytes / panel_bytes).max(1) as u32,
                widen,
                fetch: Fetch {
                    streams: env("STREAMS", stream.side_by_side),
                    ahead: Distances { l2: self.prefetch, l1: env("NEAR", stream.ahead.l1) },
                    past_l2: env("PASTL2", self.isa.streams.lone_past_l2.into()) > 0,
                    busy: Some(env("BUSY", 0)).filter(|rows| *rows > 0).map(|rows| BusyRows { rows, l1: self.prefetch }),
                    near: None,
                },
            },
            fetch_by_cpu: vec![],
            row: VarId(0),
            col: VarId(1),
            operands: vec![Operand { place: Place::Buffer(BufferId(1)), dtype: DType::F32 }],
            exprs: e,
            stores: vec![Store { operand: OperandId(0), index, value }],
            group_nests: vec![],
        };
        let layer_bytes = panels.bytes(self.dtype).next_multiple_of(64);
        let layers = u64::from(env("LAYERS", 1));
        let mut program = Program {
            entry: "step".into(),
            bucket: self.rows,
            least_rows: 1,
            max_logit_rows: 1,
            max_runs: 1,
            tile_rows: 1,
            buffers: vec![buffer("a", a_dtype, a_stride, 0), buffer("out", DType::F32, columns, a_bytes)],
            weights: vec![Weight {
                name: "w".into(),
                dtype: self.dtype,
                layout: Layout::Panels(panels),
                offsets: (0..layers).map(|layer| layer * layer_bytes).collect(),
            }],
            regions: vec![],
            body: vec![],
            arena_bytes: a_bytes + u64::from(self.rows * columns) * 4,
            private_bytes: 128,
        };
        program.private_bytes += matmul::Schedule::new(&self.isa, &program, &kernel).private_bytes();
        let loaded = Loaded::build(&self.isa, |mb, name| matmul::define_whole(mb, &program, name, &kernel).map(|_| ()));
        // Whole megabytes and a margin: prefetches and the read loop may pass the end.
        let bytes = ((layers * layer_bytes) as usize).next_multiple_of(1 << 20) + 8192;
        let mut step = Step::new(bytes, 0, program.arena_bytes as usize, program.private_bytes);
        step.rows = self.rows;
        let mut rng = Rng::new(1);
        for area in [&mut step.weights, &mut step.arena] {
            let len = area.bytes().len();
            // Numbers near 1 in every type, never denormal.
            area.bytes_mut().chunks_exact_mut(4).for_each(|c| c.copy_from_slice(&(0x3c00_3c00 ^ (rng.bits() & 0x00ff_00ff)).to_le_bytes()));
            assert!(len > 0);
        }
        ask_for_large_pages(&mut step.weights);
        (loaded, step)
    }
    fn label(&self) -> String {
        let how = match self.compute {
            Compute::F32 => "fma",
            Compute::Int8Tiles | Compute::Bf16Tiles => "tiles",
            Compute::CodesInBf16Tiles => "bf16 tiles",
            _ => "dot",
        };
        format!("{:>7} {how} rows {:>3} k {:>4} n {:>5}", self.coding.name(self.dtype), self.rows, self.k, self.n)
    }
    fn compute_bound(&self, peak: &Peak) {
        let (loaded, mut step) = self.build();
        let flop = 2.0 * f64::from(self.rows) * f64::from(self.k) * f64::from(self.n);
        let repeat = (8e8 / flop).ceil() as usize;
        let mut layers = (0..env("LAYERS", 1)).cycle();
        let mut rounds = Rounds::default();
        let mut clocks = vec![];
        let mut by_tiles = TileRounds::new(peak, self.compute.by_tiles());
        let peak_rate = || if self.compute.takes_codes() { peak.dots() } else { peak.flops() };
        for _ in 0..env("ROUNDS", ROUNDS) {
            let before = peak_rate();
            let clock = peak.clock();
            let rate = by_tiles.round(|| {
                let t = seconds(|| layers.by_ref().take(repeat).for_each(|layer| _ = step.run(&loaded, 1, layer)));
                clocks.push(peak.clock() / clock);
                flop * repeat as f64 / t
            });
            rounds.0.push((rate, (before + peak_rate()) / 2.0));
        }
        println!(
            "matmul {} prefetch {:>4}: {:6.1} GFLOP/s, {} of peak, clock {:4.2}",
            self.label(),
            self.prefetch,
            rounds.best().0 / 1e9,
            rounds.share(),
            median(clocks),
        );
        by_tiles.print();
    }
    fn memory_bound(&self, peak: &Peak) {
        let (loaded, mut step) = self.build();
        let bytes = self.panels().bytes_read(self.dtype) as f64;
        let mut rounds = Rounds::default();
        for _ in 0..env("ROUNDS", ROUNDS) {
            let read = peak.read(&mut step);
            let t = seconds(|| _ = step.run(&loaded, 1, 0));
            rounds.0.push((bytes / t, read.max(peak.read(&mut step))));
        }
        let (rate, share) = (rounds.best().0 / 1e9, rounds.share());
        println!("matmul {} prefetch {:>4}: {rate:5.1} GB/s, {share} of a plain read", self.label(), self.prefetch);
    }
}

/// How attention computes.
fn way(compute: Compute) -> &'static str {
    match compute {
        Compute::Bf16Dot => "dot",
        Compute::Bf16Tiles => "tiles",
        _ => "fma",
    }
}

#[allow(clippy::too_many_arguments, reason = "a benchmark's shape")]
fn attend(
    isa: &Isa,
    peak: &Peak,
    kv: DType,
    compute: Compute,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    rows: u32,
    keys: u32,
    tile_rows: u32,
) {
    let mut e = Exprs::default();
    let (raw, scale) = (e.add(Expr::Score), e.float(0.125));
    let score = e.binary(BinaryOp::Mul, raw, scale);
    let kv = KvPage { dtype: kv, head_dim };
    let page_bytes = u64::from(kv_heads) * kv.bytes();
    let width = heads * head_dim;
    let buffer = |name: &str, offset: u64| Buffer { name: name.into(), dtype: DType::F32, rows, stride: width, offset };
    let out = u64::from(rows * width) * 4;
    let operand = |b: u32| Operand { place: Place::Buffer(BufferId(b)), dtype: DType::F32 };
    let kernel = Attention {
        q: operand(0),
        q_stride: width,
        q_head_stride: head_dim,
        out: operand(1),
        out_stride: width,
        heads,
        kv_heads,
        kv,
        compute,
        state_offsets: vec![0],
        page_bytes,
        tile_rows,
        exprs: e,
        head_var: VarId(0),
        query_var: VarId(1),
        key_var: VarId(2),
        score,
        key_lower: None,
        key_upper: Some(1),
        mask: None,
    };
    let program = Program {
        entry: "step".into(),
        bucket: rows,
        least_rows: 1,
        max_logit_rows: 1,
        max_runs: 1,
        tile_rows,
        buffers: vec![buffer("q", 0), buffer("out", out)],
        weights: vec![],
        regions: vec![],
        body: vec![],
        arena_bytes: 2 * out,
        private_bytes: 128 + attention::private_bytes(&kernel),
    };
    let loaded = Loaded::build(isa, |mb, name| attention::define_whole(mb, &program, name, &kernel).map(|_| ()));
    let pages = keys.div_ceil(256);
    let mut step = Step::new(0, (u64::from(pages) * page_bytes) as usize, program.arena_bytes as usize, program.private_bytes);
    step.rows = rows;
    step.pages_per_slot = pages;
    step.page_table = (0..pages as i32).collect();
    step.slot = vec![0; rows as usize];
    step.kv_index = (keys - rows..keys).map(|k| k as i32).collect();
    step.tiles = (0..rows)
        .step_by(tile_rows as usize)
        .map(|row| {
            let count = tile_rows.min(rows - row);
            Tile { row_begin: row as i32, row_count: count as i32, slot: 0, key_end: (keys - rows + row + count) as i32 }
        })
        .collect();
    let mut rng = Rng::new(1);
    for area in [&mut step.state, &mut step.arena] {
        area.bytes_mut().chunks_exact_mut(4).for_each(|c| c.copy_from_slice(&(0x3c00_3c00 ^ (rng.bits() & 0x80ff_80ff)).to_le_bytes()));
    }
    let seen: f64 = step.kv_index.iter().map(|&k| f64::from(k) + 1.0).sum();
    let flop = 4.0 * seen * f64::from(width);
    let bytes = 2.0 * f64::from(kv_heads) * f64::from(keys) * f64::from(head_dim) * kv.dtype.size() as f64;
    let repeat = (4e8 / flop).ceil() as usize;
    let mut rounds = Rounds::default();
    let mut by_tiles = TileRounds::new(peak, compute == Compute::Bf16Tiles);
    for _ in 0..env("ROUNDS", ROUNDS) {
        let before = peak.flops();
        let rate = by_tiles.round(|| flop * repeat as f64 / seconds(|| (0..repeat).for_each(|_| _ = step.run(&loaded, 1, 0))));
        rounds.0.push((rate, before.max(peak.flops())));
    }
    let rate = rounds.best().0;
    println!(
        "attention {:>4} {} {heads}/{kv_heads} x {head_dim}, {rows} rows at {keys} keys: {:6.1} GFLOP/s, {} of FMA peak, {:5.1} GB/s of cache",
        kv.dtype.name(),
        way(compute),
        rate / 1e9,
        rounds.share(),
        bytes * rate / flop / 1e9
    );
    by_tiles.print();
}
