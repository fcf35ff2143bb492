//! The binary table of SentencePiece normalizers.

use serde_json::Value;

use super::malformed;
use crate::error::Error;

/// The binary table of SentencePiece normalizers: no byte sequence may lead out of its arrays.
///
/// Layout: trie size in bytes (u32), the trie as u32 units of a double array, then texts that end with NUL. The crate
/// indexes both without a check, so every state that can be reached from the root is visited here. Returns the length of the longest text.
pub(super) fn check_charsmap(place: &str, value: Option<&Value>) -> Result<usize, Error> {
    let wrong = |found: &str| malformed(place, "is no valid charsmap", "a SentencePiece table in base64", found);
    let text = value.and_then(Value::as_str).ok_or_else(|| wrong("no string"))?;
    let bytes = base64(text).ok_or_else(|| wrong("invalid base64"))?;
    let (size, rest) = bytes.split_first_chunk::<4>().ok_or_else(|| wrong("less than 4 bytes"))?;
    let size = u32::from_le_bytes(*size) as usize / 4 * 4;
    if size == 0 || size > rest.len() {
        return Err(wrong("a trie longer than the table"));
    }
    let (trie, texts) = rest.split_at(size);
    let texts = std::str::from_utf8(texts).map_err(|_| wrong("texts that are not UTF-8"))?;
    let units: Vec<usize> = trie.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize).collect();
    let offset = |unit: usize| (unit >> 10) << ((unit & (1 << 9)) >> 6);
    let mut seen = vec![false; units.len()];
    let mut todo = vec![offset(units[0])];
    while let Some(base) = todo.pop() {
        for byte in 1..=255usize {
            let position = base ^ byte;
            let unit = *units.get(position).ok_or_else(|| wrong("a trie that leads out of itself"))?;
            if unit & ((1 << 31) | 0xff) != byte {
                continue;
            }
            let next = position ^ offset(unit);
            if (unit >> 8) & 1 == 1 {
                let leaf = *units.get(next).ok_or_else(|| wrong("a trie that leads out of itself"))?;
                if !texts.is_char_boundary(leaf & ((1 << 31) - 1)) {
                    return Err(wrong("a text outside of the table"));
                }
            }
            if !std::mem::replace(&mut seen[position], true) {
                todo.push(next);
            }
        }
    }
    Ok(texts.split('\0').map(str::len).max().unwrap_or(0))
}

/// Standard base64 with padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let body = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - body.len() > 2 {
        return None;
    }
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for c in body.bytes() {
        let digit = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn base64_is_strict() {
        assert_eq!(base64("aGVsbG8=").as_deref(), Some(&b"hello"[..]));
        assert_eq!(base64("").as_deref(), Some(&b""[..]));
        for bad in ["a", "a===", "aGVsbG8", "aGV$bG8="] {
            assert_eq!(base64(bad), None, "{bad}");
        }
    }

    #[test]
    fn charsmaps_that_lead_astray() {
        // One root whose children would lie behind the end of the array.
        for bytes in [&[][..], &[0, 0, 0, 0], &[4, 0, 0, 0, 0, 0, 0, 0], &[8, 0, 0, 0, 1, 2, 3, 4]] {
            let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
            let mut text = String::new();
            for chunk in bytes.chunks(3) {
                let n = chunk.iter().fold(0u32, |n, b: &u8| (n << 8) | u32::from(*b)) << (8 * (3 - chunk.len()));
                for i in 0..4 {
                    let digit = digits[(n >> (18 - 6 * i) & 63) as usize] as char;
                    text.push(if i <= chunk.len() { digit } else { '=' });
                }
            }
            let e = check_charsmap("normalizer.precompiled_charsmap", Some(&json!(text))).unwrap_err();
            assert_eq!(e.exit_code(), 4, "{bytes:?}: {e}");
        }
    }
}
