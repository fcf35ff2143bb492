//! `rcompile inspect --scaling`: what a program can reach on 1, 2, 16, 64 and 96 cores, as far as a socket of the CPU has as many, computed
//! from its regions and a table row for the CPU.
//!
//! In: the cost of each region (`plan/cost.rs`, from a manifest or from a plan) and a [`Machine`]. Out: a note, as text or JSON. Nothing
//! is run, and nothing here is measured on the machine in question: it is a bound with its assumptions beside it.
//!
//! Per region and number of cores, the time of a call is the largest of
//! - memory: bytes of weights and KV cache over what the cores at work can read together (a core alone reads less than the socket),
//! - arithmetic: operations over peak,
//!
//! both not shorter than for the core with the largest share: work is shared out in whole units (panels, groups of columns, tiles
//! times KV heads), so that 64 units on 48 cores take as long as on 32. Where rows are many, those of several passes of rows are
//! ([`Passes`](rcompile_runtime::cost::Passes)). Added to it: what every core computes for itself (prologues), and
//! the barrier. Caches are not modelled: a model that fits them does better, and values between regions cost nothing.

use crate::error::Error;
use crate::report;
use rcompile_message::size;
use rcompile_runtime::cost::{Arithmetic, Load, RegionInfo};
use serde::Serialize;
use std::fmt::Write;

/// Numbers of cores of the note.
const CORES: [u32; 5] = [1, 2, 16, 64, 96];
/// Context of the decode row, where the executable has as much.
const CONTEXT: u64 = 512;
/// Nanoseconds of a barrier per doubling of the cores. Two cores exchange a cache line in 75 to 165 ns (Zen 5, measured); trees of
/// such exchanges stay within the budget of 1 us at 96 cores.
const BARRIER_NS: f64 = 150.0;

/// A CPU as it can be rented. Bandwidth is memory channels times transfers; clocks are those under load on all cores.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Machine {
    /// Names of `--cpu`.
    #[serde(skip)]
    cpus: &'static [&'static str],
    /// Instance type, CPU, memory.
    name: &'static str,
    /// Cores of a socket.
    cores: u32,
    /// Clock.
    ghz: f64,
    /// Peak read rate of a socket.
    socket_gb_per_s: f64,
    /// What one core reads alone.
    core_gb_per_s: f64,
    /// Floating-point operations per cycle and core with the widest vectors: f32 multiply-add, bf16 dot, int8 dot.
    flop_per_cycle: [f64; 3],
}

/// What one core reads alone was measured on Zen 5 (37 to 41 GB/s) and Emerald Rapids (17 to 18, on a virtual machine); Emerald and Granite
/// Rapids have Sapphire Rapids' entry, and this rate. 15 (Ice Lake), 20 (Graviton2) and 25 (others) are assumed. Operations per cycle:
/// vendors' optimisation guides; Zen 5 and Sapphire Rapids (whose bf16 dot runs at half of its multiply-add) measured with the probes of
/// `OUT profile`.
const MACHINES: &[Machine] = &[
    Machine {
        cpus: &["znver5"],
        name: "m8a (Zen 5, 12 x DDR5-6400)",
        cores: 96,
        ghz: 3.5,
        socket_gb_per_s: 614.4,
        core_gb_per_s: 39.0,
        flop_per_cycle: [64.0, 128.0, 256.0],
    },
    Machine {
        cpus: &["znver4", "x86-64-v4"],
        name: "c7a (Zen 4, 12 x DDR5-4800)",
        cores: 96,
        ghz: 3.0,
        socket_gb_per_s: 460.8,
        core_gb_per_s: 25.0,
        flop_per_cycle: [32.0, 64.0, 128.0],
    },
    Machine {
        cpus: &["sapphirerapids", "emeraldrapids", "graniterapids"],
        name: "c7i (Sapphire Rapids, 8 x DDR5-4800)",
        cores: 48,
        ghz: 2.6,
        socket_gb_per_s: 307.2,
        core_gb_per_s: 17.5,
        flop_per_cycle: [64.0, 32.0, 256.0],
    },
    Machine {
        cpus: &["icelake-server", "skylake-avx512"],
        name: "c6i (Ice Lake, 8 x DDR4-3200)",
        cores: 32,
        ghz: 2.9,
        socket_gb_per_s: 204.8,
        core_gb_per_s: 15.0,
        flop_per_cycle: [64.0, 64.0, 256.0],
    },
    Machine {
        cpus: &["x86-64-v3", "znver3", "znver2", "haswell", "alderlake"],
        name: "c6a (Zen 3, 8 x DDR4-3200)",
        cores: 48,
        ghz: 2.9,
        socket_gb_per_s: 204.8,
        core_gb_per_s: 25.0,
        flop_per_cycle: [32.0, 32.0, 64.0],
    },
    Machine {
        cpus: &["neoverse-n1", "generic"],
        name: "c6g (Graviton2, 8 x DDR4-3200)",
        cores: 64,
        ghz: 2.5,
        socket_gb_per_s: 204.8,
        core_gb_per_s: 20.0,
        flop_per_cycle: [16.0, 16.0, 64.0],
    },
    Machine {
        cpus: &["neoverse-v1"],
        name: "c7g (Graviton3, 8 x DDR5-4800)",
        cores: 64,
        ghz: 2.6,
        socket_gb_per_s: 307.2,
        core_gb_per_s: 25.0,
        flop_per_cycle: [32.0, 128.0, 256.0],
    },
    Machine {
        cpus: &["neoverse-v2"],
        name: "c8g (Graviton4, 12 x DDR5-5600)",
        cores: 96,
        ghz: 2.8,
        socket_gb_per_s: 537.6,
        core_gb_per_s: 25.0,
        flop_per_cycle: [32.0, 128.0, 256.0],
    },
];

/// Cores of the largest machine with CPUs of which no more is known: Graviton1; Cobalt 100 and Yitian 710; AmpereOne; M1 Ultra and M2 Ultra.
const ONLY_CORES: [(&str, u32); 5] = [("cortex-a72", 16), ("neoverse-n2", 128), ("ampere1", 192), ("apple-m1", 20), ("apple-m2", 24)];

/// Of tiles of bf16: 16 x 16 x 32 multiply-adds in 16 cycles (measured on Granite Rapids).
const TILES_BF16: f64 = 1024.0;

/// Cores of a socket of the largest machine with the CPU that `--cpu` names, or one like it.
pub fn cores(cpu: &str) -> u32 {
    let only = || ONLY_CORES.iter().find(|(name, _)| *name == cpu).map(|(_, cores)| *cores);
    MACHINES.iter().find(|m| m.cpus.contains(&cpu)).map(|m| m.cores).or_else(only).expect("cores of every CPU that can be named")
}

impl Machine {
    /// The row for a CPU; code without 512-bit vectors reaches half of a CPU that has them, int8 dots of three instructions twice its f32,
    /// dots on Arm half of its matrix instructions.
    fn of(cpu: &str, features: &[String], bandwidth: Option<f64>) -> Option<Machine> {
        let mut machine = *MACHINES.iter().find(|m| m.cpus.contains(&cpu))?;
        let has = |feature: &str| features.iter().any(|f| f == feature);
        if has("avx2") && !has("avx512f") && machine.flop_per_cycle[0] > 32.0 {
            machine.flop_per_cycle = machine.flop_per_cycle.map(|f| f / 2.0);
        }
        // Several instructions instead of one, two (nibbles) to four: taken as twice the rate of f32 for both.
        if has("avx2") && !has("avx512vnni") && !has("avxvnni") {
            let [f32_rate, _, int8_rate] = &mut machine.flop_per_cycle;
            *int8_rate = int8_rate.min(2.0 * *f32_rate);
        }
        if has("neon") {
            let [f32_rate, bf16_rate, int8_rate] = &mut machine.flop_per_cycle;
            if !has("bf16") {
                *bf16_rate = *f32_rate;
            }
            if !has("i8mm") {
                *int8_rate = int8_rate.min(4.0 * *f32_rate);
            }
        }
        for (feature, arithmetic, rate) in [("amx-bf16", 1, TILES_BF16), ("amx-int8", 2, 2.0 * TILES_BF16)] {
            if has(feature) {
                machine.flop_per_cycle[arithmetic] = rate;
            }
        }
        if let Some(bandwidth) = bandwidth {
            machine.socket_gb_per_s = bandwidth;
            machine.core_gb_per_s = machine.core_gb_per_s.min(bandwidth);
        }
        Some(machine)
    }

    /// GFLOP/s of one core.
    fn core_gflop_per_s(&self, arithmetic: Arithmetic) -> f64 {
        let per_cycle = match arithmetic {
            Arithmetic::F32 => self.flop_per_cycle[0],
            Arithmetic::Bf16Dot => self.flop_per_cycle[1],
            Arithmetic::Int8Dot => self.flop_per_cycle[2],
        };
        per_cycle * self.ghz
    }

    /// What `cores` cores read together.
    fn gb_per_s(&self, cores: u64) -> f64 {
        (self.core_gb_per_s * cores as f64).min(self.socket_gb_per_s)
    }
}

/// What the note is about.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Name of the model.
    pub name: String,
    /// An encoder: whole texts, no cache.
    pub encoder: bool,
    /// `--cpu`, resolved.
    pub cpu: String,
    /// Features that the code uses.
    pub features: Vec<String>,
    /// Positions per sequence.
    pub ctx_size: u32,
    /// Rows of the bucket, rows of an attention tile, regions; ascending.
    pub buckets: Vec<(u32, u32, Vec<RegionInfo>)>,
}

#[derive(Debug, Serialize)]
struct Note {
    model: String,
    cpu: String,
    machine: Machine,
    /// The bandwidth is the user's.
    given_bandwidth: bool,
    barrier_ns_per_doubling: f64,
    phases: Vec<Phase>,
}

/// One kind of step.
#[derive(Debug, Serialize)]
struct Phase {
    phase: &'static str,
    rows: u64,
    context: u64,
    memory_bytes: u64,
    flop: u64,
    barriers: u64,
    cores: Vec<Total>,
    regions: Vec<Region>,
}

/// A step on some cores.
#[derive(Debug, Serialize)]
struct Total {
    cores: u32,
    ms: f64,
    tokens_per_s: f64,
    /// Times faster than on one core.
    speedup: f64,
    /// Parts of `ms`: regions that memory bounds, that arithmetic bounds, what uneven shares add, prologues, barriers.
    memory_ms: f64,
    arithmetic_ms: f64,
    imbalance_ms: f64,
    private_ms: f64,
    barrier_ms: f64,
}

#[derive(Debug, Serialize)]
struct Region {
    name: String,
    calls: u64,
    units: u64,
    /// Of one call.
    memory_bytes: u64,
    flop: u64,
    /// One call with its barrier, for each number of cores.
    us: Vec<f64>,
}

/// Time of one call.
#[derive(Clone, Copy, Debug, Default)]
struct Call {
    memory_us: f64,
    arithmetic_us: f64,
    imbalance_us: f64,
    private_us: f64,
    barrier_us: f64,
}

/// How a region's work is shared out.
struct Shares {
    /// Cores with work.
    active: u64,
    /// Part of the work that the core with most of it has.
    largest: f64,
}

impl Shares {
    fn new(region: &RegionInfo, load: &Load, units: u64, cores: u32) -> Shares {
        let threads = u64::from(cores);
        let even = Shares { active: units.min(threads), largest: units.div_ceil(threads) as f64 / units as f64 };
        let (Some(passes), Ok(rows), Ok(units)) = (region.passes, u32::try_from(load.rows), u32::try_from(units)) else { return even };
        let rows = rows.max(1);
        let number = passes.number(rows, units, cores);
        let all = f64::from(units) * f64::from(rows);
        Shares {
            active: (u64::from(number) * u64::from(units)).min(threads),
            largest: passes.largest_share(number, rows, units, cores) as f64 / all,
        }
    }
}

impl Call {
    fn new(region: &RegionInfo, load: &Load, machine: &Machine, cores: u32) -> Call {
        let units = region.units.at(load).max(1);
        let shares = Shares::new(region, load, units, cores);
        let bytes = region.weight_bytes.at(load).saturating_add(region.kv_bytes.at(load)) as f64;
        let flop = region.flop.at(load) as f64;
        let core_peak = machine.core_gflop_per_s(region.arithmetic);
        let even = (bytes / machine.gb_per_s(u64::from(cores)) / 1e3, flop / (core_peak * f64::from(cores)) / 1e3);
        let memory = (bytes / machine.gb_per_s(shares.active)).max(bytes * shares.largest / machine.core_gb_per_s) / 1e3;
        let arithmetic = flop * shares.largest / core_peak / 1e3;
        let private = if cores > 1 { region.private_bytes.at(load) as f64 / machine.core_gb_per_s / 1e3 } else { 0.0 };
        let (memory_us, arithmetic_us) = if even.0 >= even.1 { (even.0, 0.0) } else { (0.0, even.1) };
        Call {
            memory_us,
            arithmetic_us,
            imbalance_us: memory.max(arithmetic) - even.0.max(even.1),
            private_us: private,
            barrier_us: if region.barrier { BARRIER_NS * f64::from(cores).log2() / 1e3 } else { 0.0 },
        }
    }

    fn us(&self) -> f64 {
        self.memory_us + self.arithmetic_us + self.imbalance_us + self.private_us + self.barrier_us
    }
}

impl Phase {
    fn new(
        phase: &'static str,
        regions: &[RegionInfo],
        rows: u64,
        context: u64,
        load: impl Fn(Option<u32>) -> Load,
        machine: &Machine,
    ) -> Phase {
        let counts: Vec<u32> = CORES.into_iter().filter(|c| *c <= machine.cores).collect();
        let mut out = Phase { phase, rows, context, memory_bytes: 0, flop: 0, barriers: 0, cores: vec![], regions: vec![] };
        let mut sums = vec![Call::default(); counts.len()];
        for region in regions {
            let load = load(region.window);
            let work = region.work(&load);
            out.memory_bytes = out.memory_bytes.saturating_add(work.memory_bytes());
            out.flop = out.flop.saturating_add(work.flop);
            out.barriers += if region.barrier { region.calls() } else { 0 };
            let calls: Vec<Call> = counts.iter().map(|c| Call::new(region, &load, machine, *c)).collect();
            for (sum, call) in sums.iter_mut().zip(&calls) {
                let times = region.calls() as f64;
                sum.memory_us += call.memory_us * times;
                sum.arithmetic_us += call.arithmetic_us * times;
                sum.imbalance_us += call.imbalance_us * times;
                sum.private_us += call.private_us * times;
                sum.barrier_us += call.barrier_us * times;
            }
            out.regions.push(Region {
                name: region.name.clone(),
                calls: region.calls(),
                units: region.units.at(&load),
                memory_bytes: work.memory_bytes() / region.calls(),
                flop: work.flop / region.calls(),
                us: calls.iter().map(Call::us).collect(),
            });
        }
        let first = sums.first().map_or(0.0, Call::us);
        let total = |(cores, sum): (&u32, &Call)| Total {
            cores: *cores,
            ms: sum.us() / 1e3,
            tokens_per_s: rows as f64 / sum.us() * 1e6,
            speedup: first / sum.us(),
            memory_ms: sum.memory_us / 1e3,
            arithmetic_ms: sum.arithmetic_us / 1e3,
            imbalance_ms: sum.imbalance_us / 1e3,
            private_ms: sum.private_us / 1e3,
            barrier_ms: sum.barrier_us / 1e3,
        };
        out.cores = counts.iter().zip(&sums).map(total).collect();
        out
    }
}

/// One run of `rows` rows that ends at position `end`, in one step.
fn load(rows: u64, end: u64, tile_rows: u64, encoder: bool, window: Option<u32>) -> Load {
    let window = window.map_or(u64::MAX, u64::from);
    let seen = |row: u64| if encoder { end } else { end - rows + row + 1 };
    Load {
        steps: 1,
        logit_steps: 1,
        rows,
        logit_rows: 1,
        runs: 1,
        tiles: rows.div_ceil(tile_rows),
        row_positions: (0..rows).map(|row| seen(row).min(window)).sum(),
        run_positions: end.min(window.saturating_add(rows - 1)),
    }
}

/// Prints the note.
pub fn print(subject: &Subject, bandwidth: Option<f64>, json: bool) -> Result<(), Error> {
    let Some(machine) = Machine::of(&subject.cpu, &subject.features, bandwidth) else {
        let known = MACHINES.iter().flat_map(|m| m.cpus).copied().collect::<Vec<_>>().join(", ");
        return Err(Error::Unsupported {
            place: "inspect --scaling".into(),
            what: format!("no data for CPU '{}', expected one of {known}", subject.cpu),
            help: Some("name one with --cpu (for a model directory)".into()),
        });
    };
    let note = note(subject, machine, bandwidth.is_some());
    if json { report::print_json(&note) } else { report::print(&report::quoted(&note.text())) }
}

fn note(subject: &Subject, machine: Machine, given_bandwidth: bool) -> Note {
    let ctx_size = u64::from(subject.ctx_size);
    let phase = |name, bucket: Option<&(u32, u32, Vec<RegionInfo>)>, rows: u64, context: u64| {
        let (_, tile_rows, regions) = bucket?;
        let load = |window| load(rows, context, (*tile_rows).into(), subject.encoder, window);
        Some(Phase::new(name, regions, rows, context, load, &machine))
    };
    let largest = subject.buckets.last();
    let rows = largest.map_or(1, |b| u64::from(b.0).min(CONTEXT).min(ctx_size));
    let phases = if subject.encoder {
        vec![phase("encode", largest, rows, rows)]
    } else {
        vec![phase("decode", subject.buckets.first(), 1, CONTEXT.min(ctx_size)), phase("prefill", largest, rows, rows)]
    };
    Note {
        model: subject.name.clone(),
        cpu: subject.cpu.clone(),
        machine,
        given_bandwidth,
        barrier_ns_per_doubling: BARRIER_NS,
        phases: phases.into_iter().flatten().collect(),
    }
}

impl Note {
    fn text(&self) -> String {
        let m = &self.machine;
        let mut out = String::new();
        let _ = writeln!(out, "{} for {}: bounds computed from its program, nothing is measured", self.model, self.cpu);
        let _ = writeln!(out, "  machine      {}, {} cores per socket at {} GHz", m.name, m.cores, m.ghz);
        let whose = if self.given_bandwidth { "as given" } else { "memory channels" };
        let _ = writeln!(out, "  memory       {:.1} GB/s per socket ({whose}), {} GB/s for one core", m.socket_gb_per_s, m.core_gb_per_s);
        let [f32, bf16, int8] = m.flop_per_cycle;
        let _ = writeln!(out, "  arithmetic   {f32} f32, {bf16} bf16 and {int8} int8 operations per cycle and core");
        let _ = writeln!(out, "  barriers     {} ns times log2(cores)", self.barrier_ns_per_doubling);
        for p in &self.phases {
            let bytes = size(p.memory_bytes);
            let rows = if p.rows == 1 { "1 row".into() } else { format!("{} rows", p.rows) };
            let _ = writeln!(
                out,
                "\n{} of {rows} up to position {}: {bytes} of weights and KV cache, {:.2} GFLOP, {} barriers",
                p.phase,
                p.context,
                p.flop as f64 / 1e9,
                p.barriers
            );
            let _ = writeln!(out, "  cores   tokens/s         ms  speedup   memory  arithmetic  imbalance  private  barriers (ms)");
            for t in &p.cores {
                let _ = writeln!(
                    out,
                    "  {:>5} {:>10.1} {:>10.3} {:>8.1} {:>8.3} {:>11.3} {:>10.3} {:>8.3} {:>9.3}",
                    t.cores, t.tokens_per_s, t.ms, t.speedup, t.memory_ms, t.arithmetic_ms, t.imbalance_ms, t.private_ms, t.barrier_ms
                );
            }
            let width = p.regions.iter().map(|r| r.name.len()).max().unwrap_or(0).max(6);
            let heads: String = p.cores.iter().map(|t| format!(" {:>9}", t.cores)).collect();
            let _ = writeln!(out, "\n  {:<width$} calls  units        MB     MFLOP   us per call on{heads} cores", "region");
            for r in &p.regions {
                let us: String = r.us.iter().map(|us| format!(" {us:>9.2}")).collect();
                let (mb, mflop) = (r.memory_bytes as f64 / 1e6, r.flop as f64 / 1e6);
                let _ = writeln!(out, "  {:<width$} {:>5} {:>6} {mb:>9.3} {mflop:>9.1}                 {us}", r.name, r.calls, r.units);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_codegen::isa::Isa;
    use rcompile_runtime::cost::{Linear, Passes, RegionKind};

    fn region(units: u64, weight_bytes: u64, flop_per_row: u64) -> RegionInfo {
        RegionInfo {
            name: "mm".into(),
            kind: RegionKind::Matmul,
            arithmetic: Arithmetic::F32,
            layers: Some(10),
            window: None,
            barrier: true,
            units: Linear::per_step(units),
            passes: None,
            weight_bytes: Linear::per_step(weight_bytes),
            kv_bytes: Linear::default(),
            activation_bytes: Linear::default(),
            private_bytes: Linear::default(),
            flop: Linear { per_row: flop_per_row, ..Linear::default() },
        }
    }

    const SMALL: Machine = Machine {
        cpus: &["x"],
        name: "x",
        cores: 64,
        ghz: 1.0,
        socket_gb_per_s: 100.0,
        core_gb_per_s: 10.0,
        flop_per_cycle: [10.0, 20.0, 40.0],
    };

    fn us(region: &RegionInfo, rows: u64, cores: u32) -> f64 {
        let load = load(rows, rows, 1, false, None);
        Call::new(region, &load, &SMALL, cores).us() - if cores > 1 { BARRIER_NS * f64::from(cores).log2() / 1e3 } else { 0.0 }
    }

    #[test]
    fn a_call_takes_as_long_as_its_slowest_core() {
        // 1 MB: 100 us on a core with 10 GB/s, 10 us on a socket with 100 GB/s.
        let memory = region(64, 1_000_000, 0);
        for (cores, expected) in [(1, 100.0), (2, 50.0), (16, 10.0), (64, 10.0)] {
            assert!((us(&memory, 1, cores) - expected).abs() < 1e-9, "{cores}: {}", us(&memory, 1, cores));
        }
        // 64 units on 48 cores: two for the slowest, as on 32; arithmetic shows it.
        let arithmetic = region(64, 0, 1_000_000);
        assert!((us(&arithmetic, 1, 1) - 100.0).abs() < 1e-9);
        assert!((us(&arithmetic, 1, 32) - 100.0 / 32.0).abs() < 1e-9);
        assert!((us(&arithmetic, 1, 48) - 100.0 / 32.0).abs() < 1e-9);
        // Two units keep two cores busy, whatever the others do; both bounds count, not their sum.
        let few = region(2, 1_000_000, 1_000_000);
        assert!((us(&few, 1, 16) - 50.0).abs() < 1e-9);
        assert!((us(&few, 3, 16) - 150.0).abs() < 1e-9);
        // 128 rows come in two passes, so that of 64 cores 48 have work, and not 24.
        let many = RegionInfo { passes: Some(Passes { most: 0, least: 24 }), ..region(24, 0, 1_000_000) };
        assert!((us(&many, 128, 24) - 12_800.0 / 24.0).abs() < 1e-6, "{}", us(&many, 128, 24));
        assert!((us(&many, 128, 64) - 12_800.0 / 48.0).abs() < 1e-6, "{}", us(&many, 128, 64));
    }

    #[test]
    fn parts_add_up_and_cores_beyond_the_socket_are_left_out() {
        let regions = [region(3, 1_000_000, 5_000), region(7, 0, 9_000_000)];
        let phase = Phase::new("decode", &regions, 1, 8, |w| load(1, 8, 1, false, w), &SMALL);
        assert_eq!(phase.cores.iter().map(|t| t.cores).collect::<Vec<_>>(), [1, 2, 16, 64]);
        assert_eq!((phase.memory_bytes, phase.flop, phase.barriers), (10_000_000, 90_050_000, 20));
        for total in &phase.cores {
            let parts = total.memory_ms + total.arithmetic_ms + total.imbalance_ms + total.private_ms + total.barrier_ms;
            assert!((parts - total.ms).abs() < 1e-9 && total.imbalance_ms > -1e-9, "{total:?}");
        }
        assert_eq!(phase.cores[0].barrier_ms, 0.0);
    }

    #[test]
    fn every_cpu_that_can_be_named_has_a_machine_or_at_least_cores() {
        let known: Vec<&str> = crate::targets::list().iter().flat_map(|t| Isa::known_cpus(t.triple)).collect();
        let machines: Vec<&str> = MACHINES.iter().flat_map(|m| m.cpus).copied().collect();
        for cpu in &known {
            let only = ONLY_CORES.iter().any(|(name, _)| name == cpu);
            assert!(machines.contains(cpu) != only, "{cpu}");
        }
        assert!(machines.iter().chain(ONLY_CORES.iter().map(|(name, _)| name)).all(|cpu| known.contains(cpu)));
        assert_eq!(["generic", "neoverse-n2", "znver5"].map(cores), [64, 128, 96]);
    }

    #[test]
    fn narrow_code_reaches_half_of_a_wide_cpu() {
        let features = |list: &[&str]| list.iter().map(|f| f.to_string()).collect::<Vec<_>>();
        let wide = Machine::of("znver5", &features(&["avx2", "avx512f"]), None).unwrap();
        let narrow = Machine::of("znver5", &features(&["avx2"]), Some(20.0)).unwrap();
        assert_eq!((wide.flop_per_cycle[0], narrow.flop_per_cycle[0]), (64.0, 32.0));
        let dots = Machine::of("znver5", &features(&["avx2", "avxvnni"]), None).unwrap();
        assert_eq!((narrow.flop_per_cycle[2], dots.flop_per_cycle[2]), (64.0, 128.0));
        assert_eq!((narrow.socket_gb_per_s, narrow.core_gb_per_s), (20.0, 20.0));
        let tiles = ["avx2", "avx512f", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8"];
        assert_eq!(Machine::of("sapphirerapids", &features(&tiles), None).unwrap().flop_per_cycle, [64.0, 1024.0, 2048.0]);
        assert_eq!(Machine::of("sapphirerapids", &features(&tiles[..3]), None).unwrap().flop_per_cycle, [64.0, 32.0, 256.0]);
        // Matrix instructions, dots of codes alone, and neither.
        for (has, rates) in [
            (&["neon", "dotprod", "bf16", "i8mm"][..], [32.0, 128.0, 256.0]),
            (&["neon", "dotprod", "bf16"], [32.0, 128.0, 128.0]),
            (&["neon", "dotprod"], [32.0, 32.0, 128.0]),
        ] {
            assert_eq!(Machine::of("neoverse-v1", &features(has), None).unwrap().flop_per_cycle, rates);
        }
        assert!(Machine::of("z80", &[], None).is_none());
    }
}
