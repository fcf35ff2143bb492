//! Does this CPU have what the kernels were compiled for, and which [`CpuKind`] is it?
//!
//! Features are spelled as LLVM spells them. What the operating system has not switched on (AVX state in XCR0) does not count as present;
//! the permission for tiles is asked for here. A feature that cannot be asked for counts as missing: a clear refusal is better than an
//! illegal instruction.

use crate::abi::CpuKind;

/// Names in `needed` that this CPU lacks, in their order.
pub fn missing(needed: &[String]) -> Vec<&str> {
    needed.iter().map(String::as_str).filter(|name| !has(name)).collect()
}

/// The line that names both lists: `needs avx512f,avx512bf16; missing avx512bf16`.
pub fn describe(needed: &[String], missing: &[&str]) -> String {
    format!("needs {}; missing {}", needed.join(","), missing.join(","))
}

/// What to do about it.
pub fn help(missing: &[&str]) -> &'static str {
    match missing.iter().all(|name| name.starts_with("amx-")) {
        true => "the CPU has no tiles, or the system does not allow them: build again with --cpu-features -amx-tile",
        false => "build again with --cpu for this machine",
    }
}

/// Which kind of CPU this is. A hypervisor may show another one's family: then code reads as on that one, which costs speed and no bit.
#[cfg(target_arch = "x86_64")]
pub fn kind() -> CpuKind {
    use std::arch::x86_64::__cpuid;
    let maker = __cpuid(0);
    let name = [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes);
    match name.as_flattened() {
        b"AuthenticAMD" => amd(__cpuid(1).eax),
        _ => CpuKind::Other,
    }
}

/// AMD's of this CPUID.(EAX=1):EAX.
#[cfg(target_arch = "x86_64")]
fn amd(signature: u32) -> CpuKind {
    let (family, extended) = (signature >> 8 & 0xf, signature >> 20 & 0xff);
    match family + extended {
        0x1a => CpuKind::Zen5,
        _ => CpuKind::Other,
    }
}

/// Which kind of CPU this is.
#[cfg(target_arch = "aarch64")]
pub fn kind() -> CpuKind {
    CpuKind::Other
}

/// Does this CPU have it, and may this process use it?
#[cfg(target_arch = "x86_64")]
pub fn has(name: &str) -> bool {
    macro_rules! table {
        ($($llvm:literal => $rust:tt),* $(,)?) => {
            match name {
                // Part of every x86-64 CPU.
                "64bit" | "cmov" | "cx8" | "fxsr" | "mmx" | "sse" | "sse2" | "x87" => true,
                // The CPU's, and the system's permission.
                "amx-tile" => crate::tiles::permit(),
                "amx-bf16" => tile_features() & 1 << 22 != 0,
                "amx-int8" => tile_features() & 1 << 25 != 0,
                $($llvm => std::is_x86_feature_detected!($rust),)*
                _ => false,
            }
        };
    }
    table! {
        "adx" => "adx",
        "aes" => "aes",
        "avx" => "avx",
        "avx2" => "avx2",
        "avx512bf16" => "avx512bf16",
        "avx512bitalg" => "avx512bitalg",
        "avx512bw" => "avx512bw",
        "avx512cd" => "avx512cd",
        "avx512dq" => "avx512dq",
        "avx512f" => "avx512f",
        "avx512fp16" => "avx512fp16",
        "avx512ifma" => "avx512ifma",
        "avx512vbmi" => "avx512vbmi",
        "avx512vbmi2" => "avx512vbmi2",
        "avx512vl" => "avx512vl",
        "avx512vnni" => "avx512vnni",
        "avx512vp2intersect" => "avx512vp2intersect",
        "avx512vpopcntdq" => "avx512vpopcntdq",
        "avxifma" => "avxifma",
        "avxneconvert" => "avxneconvert",
        "avxvnni" => "avxvnni",
        "avxvnniint16" => "avxvnniint16",
        "avxvnniint8" => "avxvnniint8",
        "bmi" => "bmi1",
        "bmi2" => "bmi2",
        "crc32" => "sse4.2",
        "cx16" => "cmpxchg16b",
        "f16c" => "f16c",
        "fma" => "fma",
        "gfni" => "gfni",
        "lzcnt" => "lzcnt",
        "movbe" => "movbe",
        "pclmul" => "pclmulqdq",
        "popcnt" => "popcnt",
        "rdrnd" => "rdrand",
        "rdseed" => "rdseed",
        "sahf" => "sse3",
        "sha" => "sha",
        "sse3" => "sse3",
        "sse4.1" => "sse4.1",
        "sse4.2" => "sse4.2",
        "sse4a" => "sse4a",
        "ssse3" => "ssse3",
        "vaes" => "vaes",
        "vpclmulqdq" => "vpclmulqdq",
        "xsave" => "xsave",
        "xsavec" => "xsavec",
        "xsaveopt" => "xsaveopt",
        "xsaves" => "xsaves",
    }
}

/// CPUID.(EAX=7,ECX=0):EDX, which lists what the tiles can do.
#[cfg(target_arch = "x86_64")]
fn tile_features() -> u32 {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    if __cpuid(0).eax < 7 { 0 } else { __cpuid_count(7, 0).edx }
}

/// Does this CPU have it, and may this process use it?
#[cfg(target_arch = "aarch64")]
pub fn has(name: &str) -> bool {
    macro_rules! table {
        ($($llvm:literal => $rust:tt),* $(,)?) => {
            match name {
                // Part of every 64-bit Arm CPU that Linux runs on.
                "v8a" | "fp-armv8" => true,
                $($llvm => std::arch::is_aarch64_feature_detected!($rust),)*
                _ => false,
            }
        };
    }
    table! {
        "neon" => "neon",
        "aes" => "aes",
        "bf16" => "bf16",
        "crc" => "crc",
        "dotprod" => "dotprod",
        "fhm" => "fhm",
        "fp16fml" => "fhm",
        "fullfp16" => "fp16",
        "i8mm" => "i8mm",
        "lse" => "lse",
        "rcpc" => "rcpc",
        "rdm" => "rdm",
        "sha2" => "sha2",
        "sha3" => "sha3",
        "sve" => "sve",
        "sve2" => "sve2",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_features_are_missing_and_named() {
        let needed: Vec<String> = ["sse2", "neon", "warp-drive"].map(String::from).to_vec();
        let missing = missing(&needed);
        assert!(missing.contains(&"warp-drive"));
        assert_eq!(missing.len(), 2);
        assert!(describe(&needed, &["warp-drive"]).ends_with("; missing warp-drive"));
        assert!(help(&["amx-tile", "amx-int8"]).contains("-amx-tile") && !help(&["amx-tile", "avx512f"]).contains("-amx-tile"));
    }

    /// Zen 2, 3, 4 and 5 (EPYC), a Granite Rapids' signature as if it were AMD's, and this CPU by what the kernel says.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn kinds_are_told_apart() {
        let kinds = [0x0083_0f10, 0x00a0_0f11, 0x00a1_0f11, 0x00b0_0f21, 0x000a_06d1].map(amd);
        assert_eq!(kinds, [CpuKind::Other, CpuKind::Other, CpuKind::Other, CpuKind::Zen5, CpuKind::Other]);
        let Ok(info) = std::fs::read_to_string("/proc/cpuinfo") else {
            return;
        };
        let of = |name: &str| info.lines().find(|l| l.starts_with(name)).and_then(|l| l.split_once(": ")).map_or("", |(_, value)| value);
        let is_zen5 = (of("vendor_id"), of("cpu family")) == ("AuthenticAMD", "26");
        assert_eq!(kind() == CpuKind::Zen5, is_zen5);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn what_the_kernel_reports_is_found() {
        let Ok(info) = std::fs::read_to_string("/proc/cpuinfo") else {
            return;
        };
        let flags: Vec<&str> = info.lines().find(|l| l.starts_with("flags")).map(|l| l.split_whitespace().collect()).unwrap_or_default();
        for (kernel, llvm) in [
            ("avx2", "avx2"),
            ("avx512f", "avx512f"),
            ("avx512_bf16", "avx512bf16"),
            ("avx512_vnni", "avx512vnni"),
            ("fma", "fma"),
            ("f16c", "f16c"),
            ("amx_tile", "amx-tile"),
            ("amx_int8", "amx-int8"),
            ("amx_bf16", "amx-bf16"),
        ] {
            assert_eq!(flags.contains(&kernel), has(llvm), "{llvm}");
        }
    }
}
