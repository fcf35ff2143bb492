//! What an executable is, as JSON.
//!
//! In: its manifest and the header of its payload. Out: what `info --json` prints, and `rcompile inspect OUT --json`, which runs nothing.

use crate::abi::{Manifest, PayloadHeader};
use serde::Serialize;

/// The manifest, and beside its keys what follows from it or is not known before the executable is linked. Sizes in bytes.
#[derive(Serialize)]
pub struct About<'m> {
    #[serde(flatten)]
    manifest: &'m Manifest,
    kv_bytes: u64,
    arena_bytes: u64,
    file_bytes: u64,
    code_bytes: u64,
    weights_embedded: bool,
    weights_blake3: String,
}

impl<'m> About<'m> {
    /// Of an executable with this manifest and this header.
    pub fn new(manifest: &'m Manifest, header: &PayloadHeader) -> Self {
        About {
            kv_bytes: manifest.state.bytes,
            arena_bytes: arena_bytes(manifest),
            file_bytes: header.file_len,
            code_bytes: header.code_bytes(),
            weights_embedded: header.weights_embedded != 0,
            weights_blake3: hex(&header.weights_hash),
            manifest,
        }
    }
}

/// Bytes of the largest bucket's arena.
pub fn arena_bytes(manifest: &Manifest) -> u64 {
    let buckets = manifest.entries.iter().flat_map(|e| &e.buckets);
    buckets.map(|b| b.arena_bytes).max().unwrap_or(0)
}

/// Bytes in hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
