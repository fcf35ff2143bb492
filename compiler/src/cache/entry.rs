//! One file of the cache: a header that says what it is, then the payload at [`PAYLOAD_AT`].
//!
//! ```text
//! 0      magic, version      8 + 8
//! 16     payload length      8
//! 24     key                 32
//! 56     BLAKE3 of payload   32
//! 88     length of the description  8
//! 96     description (JSON)  ..
//! 4064   BLAKE3 of 0..4064   32
//! 4096   payload
//! ```
//! The payload starts at a block of the file system, so that it can be shared with a copy instead of being copied where the file system
//! knows how.

use serde::{Deserialize, Serialize};

/// Bytes before the payload.
pub const PAYLOAD_AT: u64 = 4096;
const MAGIC: [u8; 8] = *b"RCCACHE\0";
const VERSION: u64 = 1;
const DESCRIPTION_AT: usize = 96;
const CHECK_AT: usize = PAYLOAD_AT as usize - 32;

/// Name of an entry: BLAKE3 of all that its payload depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub [u8; 32]);

impl Key {
    /// File name.
    pub fn name(&self) -> String {
        blake3::Hash::from(self.0).to_hex().to_string()
    }
}

/// What an entry is, for people and for what comes out beside the payload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Symbol of an object, name of a model.
    pub what: String,
    /// Version of rcompile that made it.
    pub version: String,
    /// Weights: BLAKE3 of names and hashes of the files that they were packed from.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub source: String,
    /// Weights: the first element that is not finite, tensor and index (`--allow-nonfinite`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nonfinite: Option<(String, u64)>,
}

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Its entry.
    pub key: Key,
    /// Bytes of payload.
    pub len: u64,
    /// BLAKE3 of the payload.
    pub hash: [u8; 32],
    /// What it is.
    pub description: Description,
}

impl Header {
    /// The first [`PAYLOAD_AT`] bytes of a file. None: the description is too long.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let description = serde_json::to_vec(&self.description).ok()?;
        let mut bytes = vec![0; PAYLOAD_AT as usize];
        let end = DESCRIPTION_AT + description.len();
        if end > CHECK_AT {
            return None;
        }
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..56].copy_from_slice(&self.key.0);
        bytes[56..88].copy_from_slice(&self.hash);
        bytes[88..96].copy_from_slice(&(description.len() as u64).to_le_bytes());
        bytes[DESCRIPTION_AT..end].copy_from_slice(&description);
        let check = blake3::hash(&bytes[..CHECK_AT]);
        bytes[CHECK_AT..].copy_from_slice(check.as_bytes());
        Some(bytes)
    }

    /// The header at the start of `bytes`, where it is whole.
    pub fn decode(bytes: &[u8]) -> Option<Header> {
        let bytes = bytes.get(..PAYLOAD_AT as usize)?;
        if blake3::hash(&bytes[..CHECK_AT]).as_bytes()[..] != bytes[CHECK_AT..] {
            return None;
        }
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[..8] != MAGIC || word(8) != VERSION {
            return None;
        }
        let description = bytes[DESCRIPTION_AT..CHECK_AT].get(..usize::try_from(word(88)).ok()?)?;
        Some(Header {
            key: Key(std::array::from_fn(|i| bytes[24 + i])),
            len: word(16),
            hash: std::array::from_fn(|i| bytes[56 + i]),
            description: serde_json::from_slice(description).ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_byte_is_noticed() {
        let description =
            Description { what: "rc_step_1".into(), version: "0".into(), source: "ab".into(), nonfinite: Some(("w".into(), 3)) };
        let header = Header { key: Key([7; 32]), len: 11, hash: [9; 32], description };
        let bytes = header.encode().unwrap();
        assert_eq!(Header::decode(&bytes), Some(header.clone()));
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_eq!(Header::decode(&other), None, "byte {at}");
        }
        assert_eq!(Header::decode(&bytes[..4095]), None);
        // Whole, but of another kind of file or of another version.
        for at in [0, 7, 8, 15] {
            let mut other = bytes.clone();
            other[at] ^= 1;
            let check = blake3::hash(&other[..CHECK_AT]);
            other[CHECK_AT..].copy_from_slice(check.as_bytes());
            assert_eq!(Header::decode(&other), None, "byte {at}");
        }
        let long = Description { what: "x".repeat(5000), ..header.description.clone() };
        assert_eq!(Header { description: long, ..header }.encode(), None);
    }
}
