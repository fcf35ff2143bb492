//! x86-64 CPUs: levels v3 and v4, Zen, Intel servers.

use super::family::{Cpu, Family, cpu};
use super::{Arch, Busy, Distances, Int8Dot, Isa, Near, Stream, Streams};
use crate::error::Error;
use rcompile_runtime::abi::CpuKind;
use std::collections::BTreeSet;

/// x86-64-v3 without what vector kernels never use.
const V3: &[&str] =
    &["avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"];
/// On top of v3.
const V4: &[&str] = &["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"];
/// On top of v4: what Ice Lake, Sapphire Rapids and Zen 4 share.
const VNNI: &[&str] = &["avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vnni", "avx512vpopcntdq", "avx512bitalg"];
/// On top of that: Sapphire Rapids and its successors.
const INTEL: &[&str] = &["avx512bf16", "avx512fp16", "avxvnni"];
/// Their matrix unit.
const AMX: &[&str] = &["amx-tile", "amx-int8", "amx-bf16"];

/// x86-64.
pub(super) const FAMILY: Family = Family {
    arch: Arch::X86_64,
    lowest: "x86-64-v3",
    base: V3,
    needed: &["avx2", "fma", "f16c"],
    known: &[V3, V4, VNNI, INTEL, AMX],
    cpus: || ROWS.iter().map(|row| &row.cpu).collect(),
};

/// A row: the CPU, whether the bf16 dot is faster than FMA, second cache, how weights stream.
struct Row {
    cpu: Cpu,
    /// [`Isa::bf16_dot_fast`], where there is one.
    bf16_fast: bool,
    /// [`Isa::nibbles_beside_dots`].
    beside: bool,
    /// KiB per core.
    l2: u64,
    streams: Streams,
}

/// L2 of CPUs that are not named.
const GENERIC_L2: u64 = 1024;

// How weights stream, by CPU. What was measured, and how, is on the pages of the machines (docs/machines, "Streams"); distances are bytes.

/// AVX-512 for any CPU, and CPUs that were not measured: several streams, a single row's lines 1 KB ahead into L2 (2 KB into both caches
/// cost Zen 4 12 to 22 %), several rows' far ahead.
const GENERIC: Streams = Streams {
    row: NEAR_STREAMS.row,
    bytes: None,
    nibbles: None,
    rows: Stream { side_by_side: 6, ahead: Distances { l2: 8192, l1: 2048 } },
    busy: None,
    near: None,
    lone_past_l2: false,
};
/// Measured on Emerald Rapids: a single row wants its lines 2 KB ahead in L2, several rows 8 KB ahead and 3 KB in L1. Two rows, which walk
/// three streams or more, are like one (measured on Granite Rapids).
const INTEL_STREAMS: Streams = Streams {
    row: Stream { side_by_side: 6, ahead: Distances { l2: 2048, l1: 1024 } },
    bytes: None,
    nibbles: None,
    rows: Stream { side_by_side: 6, ahead: Distances { l2: 8192, l1: 3072 } },
    busy: None,
    near: Some(Near { streams: 3, ahead: Distances { l2: 2048, l1: 1024 } }),
    lone_past_l2: false,
};

/// Measured on Zen 4, whose first cache has few places for lines that are on their way, and whose second follows one stream best: 1 KB
/// ahead into L2. Lines that wait in L2 for a core that is busy come late: those go to L1 alone, 3 KB ahead.
const NEAR: Streams = Streams {
    row: Stream { side_by_side: 1, ahead: Distances { l2: 1024, l1: 0 } },
    bytes: None,
    nibbles: None,
    rows: Stream { side_by_side: 6, ahead: Distances { l2: 1024, l1: 0 } },
    busy: Some(Busy { instructions: 7, l1: 3072 }),
    near: None,
    lone_past_l2: false,
};

/// Measured on Zen 3: four streams of a single row, each near.
const NEAR_STREAMS: Streams = Streams { row: Stream { side_by_side: 4, ahead: Distances { l2: 1024, l1: 0 } }, ..NEAR };

/// Measured on Zen 5, where prefetches into L2 cost: into L1 alone, 1 KB ahead in four streams of a single row, in one stream of nibbles
/// and of several rows 8 KB ahead, past L2; 4 KB where there is less to compute with a line.
const ZEN5: Streams = Streams {
    row: Stream { side_by_side: 4, ahead: Distances { l2: 0, l1: 1024 } },
    bytes: None,
    nibbles: Some(Stream { side_by_side: 1, ahead: Distances { l2: 0, l1: 8192 } }),
    rows: Stream { side_by_side: 1, ahead: Distances { l2: 0, l1: 4096 } },
    busy: Some(Busy { instructions: 5, l1: 8192 }),
    near: None,
    lone_past_l2: true,
};
/// AVX2 for any CPU: a single row as on Zen 3, which Zen 4 wants too (2 KB ahead into L1 cost it a sixth), codes and several rows in one
/// stream 8 KB ahead, as several rows on Zen 5.
const PORTABLE: Streams = Streams {
    row: NEAR_STREAMS.row,
    bytes: ZEN5.nibbles,
    rows: Stream { side_by_side: 1, ahead: Distances { l2: 0, l1: 8192 } },
    busy: None,
    lone_past_l2: false,
    ..ZEN5
};

/// Code for a level on CPUs that want their weights otherwise. On Zen 5 it is measured apart from code for that: a single row of elements 1 KB
/// ahead reads a tenth less, and bytes in four streams, whose dots take three instructions, a tenth (docs/machines/zen5.md).
const LEVEL_STREAMS: &[(CpuKind, Streams)] =
    &[(CpuKind::Zen5, Streams { row: Stream { side_by_side: 4, ahead: Distances { l2: 0, l1: 2048 } }, lone_past_l2: true, ..PORTABLE })];

const ROWS: &[Row] = &[
    Row { cpu: cpu("x86-64-v3", &[]), bf16_fast: false, beside: false, l2: GENERIC_L2, streams: PORTABLE },
    Row { cpu: cpu("x86-64-v4", &[V4]), bf16_fast: false, beside: false, l2: GENERIC_L2, streams: GENERIC },
    Row { cpu: cpu("haswell", &[]), bf16_fast: false, beside: false, l2: 256, streams: INTEL_STREAMS },
    Row { cpu: cpu("alderlake", &[&["avxvnni"]]), bf16_fast: false, beside: false, l2: 1280, streams: INTEL_STREAMS },
    Row { cpu: cpu("znver2", &[]), bf16_fast: false, beside: false, l2: 512, streams: NEAR_STREAMS },
    Row { cpu: cpu("znver3", &[]), bf16_fast: false, beside: false, l2: 512, streams: NEAR_STREAMS },
    Row { cpu: cpu("znver4", &[V4, VNNI, &["avx512bf16"]]), bf16_fast: true, beside: false, l2: 1024, streams: NEAR },
    Row { cpu: cpu("znver5", &[V4, VNNI, &["avx512bf16", "avxvnni"]]), bf16_fast: true, beside: true, l2: 1024, streams: ZEN5 },
    Row { cpu: cpu("skylake-avx512", &[V4]), bf16_fast: false, beside: false, l2: 1024, streams: INTEL_STREAMS },
    Row { cpu: cpu("icelake-server", &[V4, VNNI]), bf16_fast: false, beside: false, l2: 1280, streams: INTEL_STREAMS },
    Row { cpu: cpu("sapphirerapids", &[V4, VNNI, INTEL, AMX]), bf16_fast: false, beside: false, l2: 2048, streams: INTEL_STREAMS },
    Row { cpu: cpu("emeraldrapids", &[V4, VNNI, INTEL, AMX]), bf16_fast: false, beside: false, l2: 2048, streams: INTEL_STREAMS },
    Row { cpu: cpu("graniterapids", &[V4, VNNI, INTEL, AMX]), bf16_fast: false, beside: false, l2: 2048, streams: INTEL_STREAMS },
];

/// Row of a name. A hypervisor may give a CPU another's name, and LLVM may not know a new one: a CPU with all features of its maker's
/// servers counts as the last of these, whether or not Intel's tiles may be used.
fn row_of(name: &str, features: &BTreeSet<String>) -> Option<&'static Row> {
    let (last, has) = if name.starts_with("znver") { ("znver5", VNNI) } else { ("graniterapids", INTEL) };
    let is_server = has.iter().all(|f| features.contains(*f));
    ROWS.iter().find(|r| r.cpu.name == name).or_else(|| ROWS.iter().find(|r| is_server && r.cpu.name == last))
}

/// Whose schedule code with tiles has. That of a CPU without them may have LLVM (19.1) schedule once more behind register allocation, as for
/// AMD's: that renames registers whose next use it sees, and of tiles it sees none, since instructions name them outright.
fn tuned_with_tiles(row: &Row) -> &'static str {
    if row.cpu.features.contains(&AMX) { row.cpu.name } else { "graniterapids" }
}

pub(super) fn lookup(triple: &str, cpu: &str, feature_edits: &[String]) -> Result<Isa, Error> {
    let (name, mut features) = FAMILY.resolve(triple, cpu, feature_edits)?;
    let wide = V4.iter().all(|f| features.contains(*f));
    if !wide {
        features.retain(|f| !f.starts_with("avx512"));
    }
    // Their sums are scaled in vectors of as many columns as a tile has, and few rows take the dots.
    let tiles = wide && features.contains("avx512vnni") && features.contains("amx-tile");
    if !tiles {
        features.retain(|f| !f.starts_with("amx"));
    }
    if let Some(lost) = super::lost_edit(&features, feature_edits) {
        let needs = if wide { "avx512vnni and amx-tile" } else { &format!("all of {}", V4.join(", ")) };
        return Err(Error::Target(format!("feature edit '{lost}' alone is of no use: the kernels that have it need {needs}")));
    }
    let bf16_dot = features.contains("avx512bf16");
    let level = if wide { "x86-64-v4" } else { "x86-64-v3" };
    let row = row_of(&name, &features).or_else(|| row_of(level, &features)).expect("levels have rows");
    let nibbles_beside_dots = row.beside && wide && features.contains("avx512vnni");
    Ok(Isa {
        arch: Arch::X86_64,
        triple: triple.to_string(),
        llvm_cpu: "x86-64".into(),
        tune_cpu: if tiles { tuned_with_tiles(row) } else { &name }.to_string(),
        streams_by_cpu: if super::is_level(&name) { LEVEL_STREAMS } else { &[] },
        name,
        lanes: if wide { 16 } else { 8 },
        registers: if wide { 32 } else { 16 },
        tile_rows: if wide { 12 } else { 6 },
        // Magnitudes and ones take registers.
        code_rows: match features.contains("avxvnni") {
            _ if wide => 8,
            true => 6,
            false => 4,
        },
        l2_bytes: row.l2 << 10,
        streams: row.streams,
        lane_fma: false,
        bf16_dot,
        bf16_dot_fast: bf16_dot && row.bf16_fast,
        bf16_mmla: false,
        int8_mmla: false,
        int8_tiles: tiles && features.contains("amx-int8"),
        bf16_tiles: tiles && features.contains("amx-bf16"),
        fma_into_factor: true,
        nibbles_beside_dots,
        features,
    })
}

pub(super) fn bf16_round_intrinsic(isa: &Isa, lanes: u32) -> Option<&'static str> {
    match lanes {
        16 if isa.has("avx512bf16") => Some("llvm.x86.avx512bf16.cvtneps2bf16.512"),
        8 if isa.has("avx512bf16") => Some("llvm.x86.avx512bf16.cvtneps2bf16.256"),
        _ => None,
    }
}

pub(super) fn bf16_dot_intrinsic(isa: &Isa, lanes: u32) -> Option<&'static str> {
    match lanes {
        16 if isa.has("avx512bf16") => Some("llvm.x86.avx512bf16.dpbf16ps.512"),
        8 if isa.has("avx512bf16") => Some("llvm.x86.avx512bf16.dpbf16ps.256"),
        _ => None,
    }
}

pub(super) fn int8_dot(isa: &Isa, lanes: u32) -> Option<Int8Dot> {
    let avx2 = Int8Dot::Pairs { bytes: "llvm.x86.avx2.pmadd.ub.sw", words: "llvm.x86.avx2.pmadd.wd", sign: Some("llvm.x86.avx2.psign.b") };
    let avx512 = Int8Dot::Pairs { bytes: "llvm.x86.avx512.pmaddubs.w.512", words: "llvm.x86.avx512.pmaddw.d.512", sign: None };
    match lanes {
        16 if isa.has("avx512vnni") => Some(Int8Dot::Instruction("llvm.x86.avx512.vpdpbusd.512")),
        8 if isa.has("avx512vnni") || isa.has("avxvnni") => Some(Int8Dot::Instruction("llvm.x86.avx512.vpdpbusd.256")),
        16 if isa.has("avx512bw") => Some(avx512),
        8 => Some(avx2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_under_another_name_are_like_the_servers_whose_features_they_have() {
        let isa = |cpu: &str, edits: &[&str]| {
            let edits: Vec<_> = edits.iter().map(|e| e.to_string()).collect();
            lookup(crate::isa::HOST_TRIPLE, cpu, &edits).unwrap()
        };
        let row = |name: &str, isa: &Isa| row_of(name, &isa.features).map(|row| row.cpu.name);
        for edits in [&[][..], &["-amx-tile"]] {
            let server = isa("graniterapids", edits);
            let rows = ["rocketlake", "sapphirerapids"].map(|name| row(name, &server));
            assert_eq!(rows, [Some("graniterapids"), Some("sapphirerapids")]);
        }
        assert_eq!(row("rocketlake", &isa("icelake-server", &[])), None);
        let zen = isa("znver4", &[]);
        assert_eq!(["znver4", "znver6"].map(|name| row(name, &zen)), [Some("znver4"), Some("znver5")]);
        assert_eq!(row("znver1", &isa("znver3", &[])), None);
    }

    /// Tiles need what scales their sums and what few rows take; without them nothing asks for their permission.
    #[test]
    fn tiles_go_with_what_they_need() {
        for (edit, left) in [("-amx-tile", 0), ("-avx512vnni", 0), ("-avx512f", 0), ("-amx-bf16", 2), ("-amx-int8", 2)] {
            let isa = lookup(crate::isa::HOST_TRIPLE, "sapphirerapids", &[edit.to_string()]).unwrap();
            assert_eq!(isa.features.iter().filter(|f| f.starts_with("amx-")).count(), left, "{edit}");
            let wanted = [edit != "-amx-bf16", edit != "-amx-int8"].map(|has| has && left > 0);
            assert_eq!([isa.bf16_tiles, isa.int8_tiles], wanted, "{edit}");
        }
    }
}
