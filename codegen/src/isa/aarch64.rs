//! 64-bit Arm CPUs: armv8-a, Neoverse (Graviton 2 to 4 and relatives), Apple.
//!
//! All of them are NEON targets: vectors of 128 bits, 32 registers, an FMA that takes one factor from a lane. On Neoverse V1 (SVE of 256
//! bits on two pipes, NEON on four) both have the same peak; on V2 SVE is 128 bits wide.

use super::family::{Cpu, Family, cpu};
use super::{Arch, Distances, Int8Dot, Isa, Stream, Streams};
use crate::error::Error;

/// armv8-a.
const V8: &[&str] = &["fp-armv8", "neon"];
/// Armv8.2 with what matrix kernels use: Neoverse N1, Cortex-A76, Apple M1.
const V82: &[&str] = &["dotprod", "fullfp16"];
/// The matrix instructions: BFMMLA, BFDOT, BFCVTN; SMMLA, USMMLA.
const MATRIX: &[&str] = &["bf16", "i8mm"];

/// 64-bit Arm.
pub(super) const FAMILY: Family =
    Family { arch: Arch::Aarch64, lowest: "armv8-a", base: V8, needed: V8, known: &[V8, V82, MATRIX], cpus: || CPUS.iter().collect() };

const CPUS: &[Cpu] = &[
    cpu("generic", &[]),
    cpu("cortex-a72", &[]),
    cpu("neoverse-n1", &[V82]),
    cpu("neoverse-n2", &[V82, MATRIX]),
    cpu("neoverse-v1", &[V82, MATRIX]),
    cpu("neoverse-v2", &[V82, MATRIX]),
    cpu("ampere1", &[V82, MATRIX]),
    cpu("apple-m1", &[V82]),
    cpu("apple-m2", &[V82, MATRIX]),
];

pub(super) fn lookup(triple: &str, cpu: &str, feature_edits: &[String]) -> Result<Isa, Error> {
    let (name, mut features) = FAMILY.resolve(triple, cpu, feature_edits)?;
    // Few rows take the dots.
    if !features.contains("dotprod") {
        features.remove("i8mm");
    }
    if let Some(lost) = super::lost_edit(&features, feature_edits) {
        return Err(Error::Target(format!("feature edit '{lost}' alone is of no use: the kernels that have it need dotprod")));
    }
    Ok(Isa {
        arch: Arch::Aarch64,
        triple: triple.to_string(),
        llvm_cpu: "generic".into(),
        tune_cpu: name.clone(),
        name,
        lanes: 4,
        registers: 32,
        tile_rows: 8,
        code_rows: 8,
        // As on the x86-64 server that they were measured on; no Arm machine was. (N1, V1 and N2 have 1 MB of L2, which a block of weights,
        // the next one and a pass of rows fill; half of each would double what packing rows takes, see docs/graviton.md.)
        l2_bytes: 2 << 20,
        streams: Streams {
            row: Stream { side_by_side: 4, ahead: Distances { l2: 8192, l1: 1024 } },
            bytes: None,
            nibbles: None,
            rows: Stream { side_by_side: 4, ahead: Distances { l2: 8192, l1: 2048 } },
            busy: None,
            near: None,
            lone_past_l2: false,
        },
        streams_by_cpu: &[],
        lane_fma: true,
        bf16_dot: false,
        bf16_dot_fast: false,
        bf16_mmla: features.contains("bf16"),
        int8_tiles: false,
        bf16_tiles: false,
        int8_mmla: features.contains("i8mm"),
        fma_into_factor: false,
        nibbles_beside_dots: false,
        features,
    })
}

pub(super) fn int8_dot(isa: &Isa, lanes: u32) -> Option<Int8Dot> {
    (lanes == 4 && isa.has("dotprod")).then_some(Int8Dot::Instruction("llvm.aarch64.neon.sdot.v4i32.v16i8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrix_instructions_on_codes_go_with_dots() {
        let find = |cpu: &str, edits: &[&str]| {
            let edits: Vec<String> = edits.iter().map(|e| e.to_string()).collect();
            lookup("aarch64-unknown-linux-gnu", cpu, &edits)
        };
        for (cpu, edits) in [("generic", &["+i8mm"][..]), ("cortex-a72", &["+bf16", "+i8mm"]), ("neoverse-v1", &["-dotprod", "+i8mm"])] {
            let line = find(cpu, edits).unwrap_err().to_string();
            assert!(line.contains("'+i8mm' alone is of no use") && line.contains("need dotprod"), "{line}");
        }
        let without = find("neoverse-v1", &["-dotprod"]).unwrap();
        assert!(!without.has("i8mm") && !without.int8_mmla && without.bf16_mmla);
        assert!(find("generic", &["+i8mm", "+dotprod"]).unwrap().int8_mmla);
        assert!(find("generic", &["+bf16"]).unwrap().bf16_mmla);
        assert!(find("generic", &["+dotprod", "+fullfp16"]).is_ok());
    }
}
