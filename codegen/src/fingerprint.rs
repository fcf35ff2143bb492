//! What generated code depends on beside a unit's key: this crate's sources, the ABI, the versions of packages and tools, LLVM.
//!
//! A compiler that was rebuilt from other sources has another [`text`], whatever its version number says; one that was rebuilt from the
//! same sources has the same, so that objects can be shared by all programs that have this crate inside.

use crate::llvm::object;

/// Everything in `src`, `abi.rs` and `Cargo.lock` (listed by `build.rs`).
const SOURCES: &[&[u8]] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// Hash of the sources and their lengths.
#[allow(long_running_const_eval, reason = "some hundred kB of sources")]
const SOURCES_HASH: u128 = hash(SOURCES);

/// Names the code generator and its LLVM: two that differ may generate different code from the same unit. One line.
pub fn text() -> String {
    format!("codegen {SOURCES_HASH:032x} LLVM {} {}", object::version(), env!("RCOMPILE_RUSTC"))
}

/// FNV-1a of 128 bits, which can be computed while compiling.
#[allow(long_running_const_eval, reason = "some hundred kB of sources")]
const fn hash(files: &[&[u8]]) -> u128 {
    const PRIME: u128 = 0x0100_0000_0000_0000_0000_013b;
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let mut file = 0;
    while file < files.len() {
        let bytes = files[file];
        hash = (hash ^ bytes.len() as u128).wrapping_mul(PRIME);
        let mut i = 0;
        while i < bytes.len() {
            hash = (hash ^ bytes[i] as u128).wrapping_mul(PRIME);
            i += 1;
        }
        file += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources() {
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
        assert_ne!(hash(&[b"ab"]), hash(&[b"ac"]));
        // This file is among them, as it is now.
        let this = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/src/fingerprint.rs")).unwrap();
        assert!(SOURCES.contains(&&this[..]));
        assert!(SOURCES.len() > 10 && text().contains("LLVM 19."));
    }
}
