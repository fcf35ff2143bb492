//! x86-64 CPUs: levels v3 and v4, Zen, Intel servers.

use super::{Arch, Busy, Int8Dot, Isa, Near, Stream, Streams};
use crate::error::Error;
use crate::llvm::object;
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
/// Features that code may come to use; of a host's features only these count.
const KNOWN: &[&[&str]] = &[V3, V4, VNNI, INTEL, AMX];

/// A row: name, extra features on top of level v3, whether the bf16 dot is faster than FMA, second cache, how weights stream.
struct Row {
    name: &'static str,
    features: &'static [&'static [&'static str]],
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

/// AVX-512 for any CPU, and CPUs that were not measured: several streams, several rows far ahead. Intel wants a single row's lines nearer than 8 KB and several rows' not (below); AVX-512 on Zen 5, one
/// thread, one row, medians, six streams with 8 KB into L2 and 1 KB into L1, and these: bf16 77 and 91 % of a plain read, f32 87 and 92, int8 77 and 88, int4 by 32 65 and 81 (L1 alone as for Zen 5 99 to 104 %: not
/// measured on Intel). Four rows are at 70 to 77 % there, and would be at 85 to 99 % as Zen 5 has them.
const GENERIC: Streams = Streams {
    row: Stream { side_by_side: 4, l2: 2048, l1: 2048 },
    bytes: None,
    nibbles: None,
    rows: Stream { side_by_side: 6, l2: 8192, l1: 2048 },
    busy: None,
    near: None,
};
/// Measured on Emerald Rapids, weights that no cache holds. One row, share of a plain read with 8 and 2 KB into L2: int8 102 and 104 %, bf16 97 and 104 (8 KB in two runs) and 104 %, int4 by 32 99 and 100 %, f32 103
/// and 105 % (AVX2: int8 99 and 105 %, bf16 107 both, int4 93 and 97 %). Several rows want them far ahead (int4, 4 rows: 2 KB 73 %, 8 KB 92 %) and 3 KB into L1 (2 KB: int8, 4 rows, 97 and 98 %, 8 rows
/// 95 and 96 %; bf16 92.2 and 92.5, 84.3 and 85.6 %; int4 alike).
/// Two rows, which walk three streams or more, are like one: measured on Granite Rapids alone (1B shape, two sequences, tokens/s with 8 KB and 3, with 2 KB and 1: bf16 23.7 and 27.3, int8 51.8 and 56.2, int4 by 32 87 and 91, in slower minutes 1.06, 1.09 and 1.01 times; four,
/// in one stream or two: 45.5 and 42.1, 90 and 89, 157 and 134).
const INTEL_STREAMS: Streams = Streams {
    row: Stream { side_by_side: 6, l2: 2048, l1: 1024 },
    bytes: None,
    nibbles: None,
    rows: Stream { side_by_side: 6, l2: 8192, l1: 3072 },
    busy: None,
    near: Some(Near { streams: 3, l2: 2048, l1: 1024 }),
};
/// Measured on Zen 4, whose first cache has few places for lines that are on their way, and whose second follows one stream best. One thread, large pages,
/// share of a plain read: one row of bf16 94 % (six streams, 8 KB into L2), 97 % (1 KB), 103 % (one stream, 1 KB); int8 90, 90, 96 %, int4 84, 86, 103 % (2 KB:
/// 99 %); four rows of bf16 79 % (8 KB), 98 % (1 KB).
/// Lines that wait in L2 for a busy core come late to it (GB/s with 1 KB into L2 and with 3 KB into L1: bf16, f32 and int8 25 to 27 and 23 to 25 with six rows, 14 to 21 and 25 to 27 with
/// seven, 12 to 18 and 22 to 25 with eight; int4 by 32 24 and 23 with two, 15 and 23 with four).
const NEAR: Streams = Streams {
    row: Stream { side_by_side: 1, l2: 1024, l1: 0 },
    bytes: None,
    nibbles: None,
    rows: Stream { side_by_side: 6, l2: 1024, l1: 0 },
    busy: Some(Busy { instructions: 7, l1: 3072 }),
    near: None,
};

/// Measured on Zen 3: several streams, each near. One thread, share of a plain read, medians (six streams and 8 KB; four and 1 KB): one row of bf16 90 and 113 %, int8 80 and 109 %, int4 by 32
/// 84 and 97 %; four rows, 8 KB into L2 with 2 KB into L1, and L1 alone 2 or 4 KB ahead (both alike): bf16 67 and 83 %, int8 66 and 76 to 77 %, int4 46 and 56 to 58 %.
const NEAR_STREAMS: Streams = Streams { row: Stream { side_by_side: 4, l2: 1024, l1: 0 }, ..NEAR };

/// Measured on Zen 5, where prefetches 4 KB and more ahead into the second cache cost (bf16, int4 by 32). One thread, large pages, share of a plain read (39 to 50 GB/s), medians. One
/// row of bf16 85 % in six streams with 8 KB into L2 and 1 KB into L1, 100 % in four with 1 KB into L1 alone (f32 101, int8 90 to 95 %); int4 by 32 74 % so, 93 to 97 % in one stream with
/// 8 to 10 KB into L1 (by 128 75 to 80 and 93 to 98 %, bf16 97; int8 94 to 97, but 0.97 to 0.99 times the tokens/s of four). Several rows like that: two bf16 96, int8 96, int4 90 %, four 95, 95 and 91 %, eight 91 % (bf16).
const ZEN5: Streams = Streams {
    row: Stream { side_by_side: 4, l2: 0, l1: 1024 },
    bytes: None,
    nibbles: Some(Stream { side_by_side: 1, l2: 0, l1: 8192 }),
    rows: Stream { side_by_side: 1, l2: 0, l1: 8192 },
    busy: None,
    near: None,
};
/// AVX2 measured on Zen 5 too (what is built for Zen 3 itself wants its lines in L2; there this was not measured). Share of a plain read as above, with 1 KB into L2 and with 2 KB into L1, four
/// streams: one row of bf16 85 and 88 to 95 %, f32 94 and 99 to 104 %, int8 68 to 76 and 85 to 88 %, int4 by 32 38 to 54 and 47 to 52 %; one stream with 8 KB into L1: int8 98 %, int4 at least 97 %.
/// Several rows in six streams, 1 KB into L2 or where they are busy 3 KB into L1, as Zen 3 has them, and in that one stream: two rows of f32 83 and 96 to 98 %, int8 81 to 87 and 99 to 105 %, int4 by 32
/// 70 and 85 %, but bf16 86 to 89 and 81 to 85 %; four of bf16 54 to 58 and 70 to 73 %, f32 86 and 94 %, int8 and int4 alike.
const PORTABLE: Streams = Streams { row: Stream { side_by_side: 4, l2: 0, l1: 2048 }, bytes: ZEN5.nibbles, ..ZEN5 };

const ROWS: &[Row] = &[
    Row { name: "x86-64-v3", features: &[], bf16_fast: false, beside: false, l2: GENERIC_L2, streams: PORTABLE },
    Row { name: "x86-64-v4", features: &[V4], bf16_fast: false, beside: false, l2: GENERIC_L2, streams: GENERIC },
    Row { name: "haswell", features: &[], bf16_fast: false, beside: false, l2: 256, streams: INTEL_STREAMS },
    Row { name: "alderlake", features: &[&["avxvnni"]], bf16_fast: false, beside: false, l2: 1280, streams: INTEL_STREAMS },
    Row { name: "znver2", features: &[], bf16_fast: false, beside: false, l2: 512, streams: NEAR_STREAMS },
    Row { name: "znver3", features: &[], bf16_fast: false, beside: false, l2: 512, streams: NEAR_STREAMS },
    Row { name: "znver4", features: &[V4, VNNI, &["avx512bf16"]], bf16_fast: true, beside: false, l2: 1024, streams: NEAR },
    Row { name: "znver5", features: &[V4, VNNI, &["avx512bf16", "avxvnni"]], bf16_fast: true, beside: true, l2: 1024, streams: ZEN5 },
    Row { name: "skylake-avx512", features: &[V4], bf16_fast: false, beside: false, l2: 1024, streams: INTEL_STREAMS },
    Row { name: "icelake-server", features: &[V4, VNNI], bf16_fast: false, beside: false, l2: 1280, streams: INTEL_STREAMS },
    Row { name: "sapphirerapids", features: &[V4, VNNI, INTEL, AMX], bf16_fast: false, beside: false, l2: 2048, streams: INTEL_STREAMS },
    Row { name: "emeraldrapids", features: &[V4, VNNI, INTEL, AMX], bf16_fast: false, beside: false, l2: 2048, streams: INTEL_STREAMS },
    Row { name: "graniterapids", features: &[V4, VNNI, INTEL, AMX], bf16_fast: false, beside: false, l2: 2048, streams: INTEL_STREAMS },
];

pub(super) fn names() -> Vec<&'static str> {
    ROWS.iter().map(|r| r.name).collect()
}

/// Row of a name. Hypervisors may call a CPU by another's, and LLVM may not know a new one: with all that Intel's servers have it is like the last of those, whether its tiles may be
/// used or not.
fn row_of(name: &str, features: &BTreeSet<String>) -> Option<&'static Row> {
    let like_intel = INTEL.iter().all(|f| features.contains(*f)) && !name.starts_with("znver");
    ROWS.iter().find(|r| r.name == name).or_else(|| ROWS.iter().rev().find(|r| like_intel && r.features.contains(&INTEL)))
}

pub(super) fn lookup(triple: &str, cpu: &str, feature_edits: &[String]) -> Result<Isa, Error> {
    let set =
        |lists: &[&[&str]]| -> BTreeSet<String> { V3.iter().chain(lists.iter().flat_map(|l| l.iter())).map(|f| f.to_string()).collect() };
    let (name, tune, mut features, fast) = if cpu == "native" {
        let Some((host, have)) = object::host_of(Arch::X86_64) else {
            return Err(Error::Target(format!(
                "CPU 'native' is this machine's, which is none of {triple}; name one of: {}",
                names().join(", ")
            )));
        };
        let features: BTreeSet<String> =
            KNOWN.iter().flat_map(|l| l.iter()).filter(|f| have.contains(**f)).map(|f| f.to_string()).collect();
        let fast = host.starts_with("znver");
        (host.clone(), host, features, fast)
    } else {
        let row = ROWS
            .iter()
            .find(|r| r.name == cpu)
            .ok_or_else(|| Error::Target(format!("CPU '{cpu}' is not known for {triple}; known: native, {}", names().join(", "))))?;
        (row.name.to_string(), row.name.to_string(), set(row.features), row.bf16_fast)
    };
    super::edit(&mut features, feature_edits, KNOWN)?;
    for needed in ["avx2", "fma", "f16c"] {
        if !features.contains(needed) {
            return Err(Error::Target(format!("CPU '{name}' lacks {needed}; x86-64-v3 is the lowest supported level")));
        }
    }
    let wide = V4.iter().all(|f| features.contains(*f));
    if !wide {
        features.retain(|f| !f.starts_with("avx512"));
    }
    // Their sums are scaled in vectors of as many columns as a tile has, and few rows take the dots.
    let tiles = wide && features.contains("avx512vnni") && features.contains("amx-tile");
    if !tiles {
        features.retain(|f| !f.starts_with("amx"));
    }
    let bf16_dot = features.contains("avx512bf16");
    let (l2, streams, beside) = row_of(&name, &features).map_or((GENERIC_L2, GENERIC, false), |r| (r.l2, r.streams, r.beside));
    let nibbles_beside_dots = beside && wide && features.contains("avx512vnni");
    Ok(Isa {
        arch: Arch::X86_64,
        triple: triple.to_string(),
        name,
        llvm_cpu: "x86-64".into(),
        tune_cpu: tune,
        lanes: if wide { 16 } else { 8 },
        registers: if wide { 32 } else { 16 },
        // The width of the largest tile: pieces of wider panels would use every second line only, and half of L1's sets.
        panel_nr: if wide { 32 } else { 16 },
        tile_rows: if wide { 12 } else { 6 },
        // Magnitudes and ones take registers.
        code_rows: match features.contains("avxvnni") {
            _ if wide => 8,
            true => 6,
            false => 4,
        },
        tile_vectors: 2,
        l2_bytes: l2 << 10,
        streams,
        lane_fma: false,
        bf16_dot,
        bf16_dot_fast: bf16_dot && fast,
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
        let row = |name: &str, isa: &Isa| row_of(name, &isa.features).map(|row| row.name);
        for edits in [&[][..], &["-amx-tile"]] {
            let server = isa("graniterapids", edits);
            let rows = ["rocketlake", "sapphirerapids", "znver6"].map(|name| row(name, &server));
            assert_eq!(rows, [Some("graniterapids"), Some("sapphirerapids"), None]);
        }
        assert_eq!(row("rocketlake", &isa("icelake-server", &[])), None);
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
