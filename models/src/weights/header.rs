//! The header of a safetensors file: eight bytes of length, a JSON object, and behind it the data.
//!
//! In: an open file. Out: its tensors in the order of their data ([`read`]). The header must describe the data exactly: no overlap, no
//! hole, nothing behind it. Every size is computed with checked arithmetic and compared with the file before memory is asked for. What this
//! module accepts, the `safetensors` crate accepts too; duplicate names, hostile names and a rank above [`RANK_MAX`] are refused here in
//! addition.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use safetensors::Dtype;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::TensorInfo;
use crate::dir::File;
use crate::error::{Error, Kind, cut};

/// Largest rank of a tensor.
const RANK_MAX: usize = 8;
/// Largest header, as the format says.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Most tensors in a checkpoint.
pub(super) const TENSORS_MAX: usize = 1_000_000;
/// Longest name of a tensor in bytes.
const NAME_BYTES_MAX: usize = 1024;
/// Headers above this are not parsed a second time by the `safetensors` crate, to bound memory.
const SECOND_OPINION_BYTES_MAX: usize = 16 << 20;

/// Reads and checks the header of one safetensors file; the tensors, of which there may be `most`, come in the order of their data.
pub(super) fn read(file: &File, file_index: usize, most: usize) -> Result<Vec<TensorInfo>, Error> {
    let size = file.size();
    let malformed =
        |place: &str, what: &str, expected: String, found: String| Error::new(Kind::Malformed, file.name(), place, what, expected, found);
    let mut head = [0u8; 64];
    let head = &mut head[..size.min(64) as usize];
    file.read_at(head, 0)?;
    let foreign = foreign_format(head);
    let Some(length) = head.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)) else {
        return Err(malformed("header", "header too small", "at least 8 bytes".into(), format!("{size} bytes")));
    };
    if length > size - 8 {
        if let Some((found, help)) = foreign {
            let e = malformed("header", "not safetensors", "a safetensors file".into(), found.into());
            return Err(if help.is_empty() { e } else { e.help(help) });
        }
        let found = format!("a header of {length} bytes in a file of {size} bytes");
        return Err(malformed("header", "is longer than the file", "a header within the file".into(), found));
    }
    if length > HEADER_BYTES_MAX {
        let (expected, found) = (format!("at most {HEADER_BYTES_MAX} bytes"), format!("{length} bytes"));
        return Err(Error::new(Kind::Limit, file.name(), "header", "is too large", expected, found));
    }
    let mut header = vec![0; length as usize];
    file.read_at(&mut header, 8)?;
    let text = std::str::from_utf8(&header).map_err(|e| {
        let at = e.valid_up_to();
        let found = format!("byte 0x{:02x}", header[at]);
        malformed(&format!("header byte {}", 8 + at), "is not UTF-8", "UTF-8 text".into(), found)
    })?;
    let data_bytes = size - 8 - length;
    let mut tensors = parse_header(file.name(), text, most)?;
    for tensor in &mut tensors {
        tensor.file_index = file_index;
    }
    check_layout(file.name(), &mut tensors, data_bytes, 8 + length)?;
    if text.len() <= SECOND_OPINION_BYTES_MAX
        && let Err(e) = serde_json::from_str::<safetensors::tensor::Metadata>(text)
    {
        return Err(malformed("header", "is refused by the safetensors crate", "a valid header".into(), e.to_string()));
    }
    Ok(tensors)
}

/// What a file is that carries another format's first bytes, with a hint.
fn foreign_format(head: &[u8]) -> Option<(&'static str, &'static str)> {
    let lower = head.to_ascii_lowercase();
    if head.starts_with(b"version https://git-lfs") {
        Some(("a Git LFS pointer", "run `git lfs pull` in the repository of the model"))
    } else if head.starts_with(b"PK\x03\x04") {
        Some(("a zip archive, as torch.save writes", "save the model with safe_serialization"))
    } else if head.starts_with(b"\x80") {
        Some(("a pickle", "save the model with safe_serialization"))
    } else if head.starts_with(b"GGUF") {
        Some(("a GGUF file", "give the original checkpoint"))
    } else if lower.starts_with(b"<!doctype") || lower.starts_with(b"<html") || lower.starts_with(b"<?xml") {
        Some(("a web page", "download the file itself"))
    } else {
        None
    }
}

/// The tensors of a header in the order of its text; positions are still relative to the data.
fn parse_header(file: &str, text: &str, most: usize) -> Result<Vec<TensorInfo>, Error> {
    // Counting first keeps a header of millions of tensors from becoming millions of objects.
    let current = RefCell::new(String::new());
    let in_tensor = |e: serde_json::Error| {
        let at = byte_offset(text, e.line(), e.column());
        let name = current.borrow();
        let place = if name.is_empty() { format!("header byte {}", 8 + at) } else { cut(&name, 70) };
        let what = e.to_string();
        let what = what.split(" at line ").next().unwrap_or(&what);
        let expected = if what.contains("duplicate") { "every name once" } else { "a valid header" };
        Error::new(Kind::Malformed, file, place, what, expected, format!("header byte {}", 8 + at))
    };
    let mut parser = serde_json::Deserializer::from_str(text);
    let number = CountKeys.deserialize(&mut parser).and_then(|n| parser.end().map(|()| n)).map_err(in_tensor);
    // A malformed entry is better described by the second pass.
    if matches!(number, Ok(n) if n > most) {
        let expected = format!("at most {TENSORS_MAX} tensors in all");
        return Err(Error::new(Kind::Limit, file, "header", "describes too many tensors", expected, "more"));
    }
    let mut parser = serde_json::Deserializer::from_str(text);
    let entries = HeaderSeed { current: &current }.deserialize(&mut parser);
    let entries = entries.map_err(in_tensor)?;
    current.borrow_mut().clear();
    parser.end().map_err(in_tensor)?;
    entries.into_iter().map(|entry| entry.check(file)).collect()
}

/// Sorts by position and requires that the tensors cover the data exactly.
fn check_layout(file: &str, tensors: &mut [TensorInfo], data_bytes: u64, data_begin: u64) -> Result<(), Error> {
    let malformed =
        |place: &str, what: &str, expected: String, found: String| Error::new(Kind::Malformed, file, place, what, expected, found);
    // Empty tensors before the one that starts at the same place.
    tensors.sort_by_key(|t| (t.begin, t.begin + t.size_bytes));
    let mut covered = 0;
    for tensor in tensors.iter_mut() {
        let (begin, end) = (tensor.begin, tensor.begin + tensor.size_bytes);
        let what = if begin < covered { "overlaps another tensor" } else { "leaves a hole before it" };
        if begin != covered {
            return Err(malformed(&tensor.name, what, format!("a start at {covered}"), format!("{begin}")));
        }
        if end > data_bytes {
            let expected = format!("a file of at least {} bytes", u128::from(end) + u128::from(data_begin));
            let found = format!("{} bytes", data_begin + data_bytes);
            return Err(malformed(&tensor.name, "ends behind the end of the file", expected, found));
        }
        covered = end;
        tensor.begin += data_begin;
    }
    if covered != data_bytes {
        let (expected, found) = (data_begin + covered, data_begin + data_bytes);
        return Err(malformed("data", "has bytes behind the last tensor", format!("{expected} bytes"), format!("{found} bytes")));
    }
    Ok(())
}

/// Offset in `text` of a position that serde_json reports.
fn byte_offset(text: &str, line: usize, column: usize) -> usize {
    let before: usize = text.split('\n').take(line.saturating_sub(1)).map(|l| l.len() + 1).sum();
    (before + column.saturating_sub(1)).min(text.len())
}

/// Number of keys of the top object.
struct CountKeys;

impl<'de> DeserializeSeed<'de> for CountKeys {
    type Value = usize;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<usize, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for CountKeys {
    type Value = usize;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<usize, A::Error> {
        let mut number = 0;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            number += 1;
        }
        Ok(number)
    }
}

/// A text of the header: where it has no escapes a piece of it, so that a million of them take no memory.
struct Piece<'de>(Cow<'de, str>);

impl<'de> Deserialize<'de> for Piece<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PieceVisitor;
        impl<'de> Visitor<'de> for PieceVisitor {
            type Value = Piece<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Piece<'de>, E> {
                Ok(Piece(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Piece<'de>, E> {
                Ok(Piece(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(PieceVisitor)
    }
}

/// One tensor as the header states it.
struct RawEntry<'de> {
    name: Cow<'de, str>,
    dtype: Cow<'de, str>,
    shape: Vec<u64>,
    offsets: (u64, u64),
}

impl RawEntry<'_> {
    /// Types, sizes and names that are wrong in themselves; the layout is checked when all are known.
    fn check(self, file: &str) -> Result<TensorInfo, Error> {
        let RawEntry { name, dtype, shape, offsets } = self;
        let malformed = |what: &str, expected: String, found: String| {
            Err(Error::new(Kind::Malformed, file, if name.is_empty() { "\"\"" } else { &name }, what, expected, found))
        };
        let path_like = name.split(['/', '\\']).any(|part| part == "..");
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) || path_like {
            let expected = format!("1 to {NAME_BYTES_MAX} bytes, no control characters, no path");
            return malformed("is no tensor name", expected, format!("{} bytes", name.len()));
        }
        let Ok(kind) = Dtype::deserialize(StrDeserializer::<ValueError>::new(&dtype)) else {
            let expected = "a safetensors type such as F32, F16, BF16";
            return Err(Error::new(Kind::Unsupported, file, name, "has an unknown type", expected, dtype));
        };
        let (begin, end) = offsets;
        let Some(size_bytes) = end.checked_sub(begin) else {
            return malformed("has its offsets reversed", "begin <= end".into(), format!("[{begin}, {end}]"));
        };
        let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        let Some(bits) = elements.and_then(|n| n.checked_mul(kind.bitsize() as u64)) else {
            return malformed("is too large", "a size that fits 64 bits".into(), format!("{shape:?}"));
        };
        if bits % 8 != 0 {
            return malformed("ends within a byte", "a whole number of bytes".into(), format!("{bits} bits"));
        }
        if bits / 8 != size_bytes {
            let expected = format!("{} bytes for {shape:?} of {kind}", bits / 8);
            return malformed("has the wrong size", expected, format!("{size_bytes} bytes"));
        }
        let shape = shape.into_iter().map(|d| d as usize).collect();
        let name: Arc<str> = name.into();
        Ok(TensorInfo { stored_name: name.clone(), name, dtype: kind, shape, file_index: 0, begin, size_bytes })
    }
}

/// The top object of a header. `current` is the name of the tensor that is being read, for messages.
struct HeaderSeed<'a> {
    current: &'a RefCell<String>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Vec<RawEntry<'de>>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Vec<RawEntry<'de>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        let mut names = HashSet::new();
        while let Some(Piece(name)) = map.next_key()? {
            self.current.borrow_mut().push_str(&name);
            if !names.insert(name.clone()) {
                return Err(A::Error::custom("duplicate name"));
            }
            if name == "__metadata__" {
                map.next_value_seed(MetadataSeed { current: self.current })?;
            } else {
                entries.push(map.next_value_seed(EntrySeed { name })?);
            }
            self.current.borrow_mut().clear();
        }
        Ok(entries)
    }
}

/// `__metadata__`: texts by name, which nobody reads.
struct MetadataSeed<'a> {
    current: &'a RefCell<String>,
}

impl<'de> DeserializeSeed<'de> for MetadataSeed<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            self.current.replace(format!("__metadata__.{}", cut(&key, 60)));
            map.next_value::<String>()?;
        }
        Ok(())
    }
}

/// `{"dtype": .., "shape": [..], "data_offsets": [.., ..]}`; other keys are ignored, as the crate does.
struct EntrySeed<'de> {
    name: Cow<'de, str>,
}

impl<'de> DeserializeSeed<'de> for EntrySeed<'de> {
    type Value = RawEntry<'de>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<RawEntry<'de>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'de> {
    type Value = RawEntry<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawEntry<'de>, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(Piece(key)) = map.next_key()? {
            let repeated = match key.as_ref() {
                "dtype" => dtype.replace(map.next_value::<Piece>()?.0).is_some(),
                "shape" => shape.replace(map.next_value_seed(ShapeSeed)?).is_some(),
                "data_offsets" => offsets.replace(map.next_value::<(u64, u64)>()?).is_some(),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    false
                }
            };
            if repeated {
                return Err(A::Error::custom("duplicate field"));
            }
        }
        Ok(RawEntry {
            name: self.name,
            dtype: dtype.ok_or_else(|| A::Error::missing_field("dtype"))?,
            shape: shape.ok_or_else(|| A::Error::missing_field("shape"))?,
            offsets: offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?,
        })
    }
}

/// The extents of a tensor, refused as soon as there are more than [`RANK_MAX`].
struct ShapeSeed;

impl<'de> DeserializeSeed<'de> for ShapeSeed {
    type Value = Vec<u64>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<u64>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ShapeSeed {
    type Value = Vec<u64>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of extents >= 0")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut shape = Vec::new();
        while let Some(extent) = seq.next_element()? {
            if shape.len() == RANK_MAX {
                return Err(A::Error::custom(format!("rank is above {RANK_MAX}")));
            }
            shape.push(extent);
        }
        Ok(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::super::SINGLE;
    use super::*;
    use crate::dir::ModelDir;

    /// A file of this header and this many data bytes, opened.
    fn open_raw(bytes: &[u8]) -> Result<Vec<TensorInfo>, Error> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(SINGLE), bytes).unwrap();
        read(&ModelDir::open(dir.path()).unwrap().open_file(SINGLE).unwrap(), 0, TENSORS_MAX)
    }

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn entry(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
    }

    #[test]
    fn headers_that_are_fine() {
        let many = format!(
            "  {{\"__metadata__\":{{\"format\":\"pt\"}},{},{},{},{}}}",
            entry("b", "F32", "[2,3]", 2, 26),
            entry("a", "F16", "[]", 0, 2),
            entry("empty", "BF16", "[0,7]", 2, 2),
            entry("nibbles", "F4", "[4]", 26, 28),
        );
        let tensors = open_raw(&file(&many, 28)).unwrap();
        assert_eq!(tensors.iter().map(|t| &*t.name).collect::<Vec<_>>(), ["a", "empty", "b", "nibbles"]);
        assert_eq!(tensors[2].begin, (8 + many.len() + 2) as u64);
        assert!(open_raw(&file("{}", 0)).unwrap().is_empty());
        assert!(open_raw(&file(r#"{"__metadata__":null}"#, 0)).is_ok());
    }

    #[test]
    fn headers_that_are_wrong() {
        let one = |dtype: &str, shape: &str, begin, end| format!("{{{}}}", entry("w", dtype, shape, begin, end));
        let two = |a: (u64, u64), b: (u64, u64)| format!("{{{},{}}}", entry("v", "U8", "[4]", a.0, a.1), entry("w", "U8", "[4]", b.0, b.1));
        let big = u64::MAX / 8;
        let cases: Vec<(Vec<u8>, i32, &[&str])> = vec![
            (vec![], 4, &["header too small", "0 bytes"]),
            (vec![0; 7], 4, &["header too small", "7 bytes"]),
            (1000u64.to_le_bytes().to_vec(), 4, &["1000 bytes", "a file of 8 bytes"]),
            (u64::MAX.to_le_bytes().to_vec(), 4, &["18446744073709551615"]),
            ((1u64 << 63).to_le_bytes().to_vec(), 4, &["9223372036854775808"]),
            ([2u64.to_le_bytes().as_slice(), b"{\xff"].concat(), 4, &["header byte 9", "0xff"]),
            (file("{", 0), 4, &["header byte 8", "EOF"]),
            (file("[]", 0), 4, &["header byte 8"]),
            (file("{} x", 0), 4, &["header byte 11"]),
            (b"version https://git-lfs.github.com/spec/v1\noid".to_vec(), 4, &["not safetensors", "Git LFS"]),
            (b"PK\x03\x04\x00\x00\x08\x08".to_vec(), 4, &["not safetensors", "zip"]),
            (b"\x80\x02\x8a\x0al\xfc\x9cF".to_vec(), 4, &["not safetensors", "pickle"]),
            (b"GGUF\x03\x00\x00\x00".to_vec(), 4, &["not safetensors", "GGUF"]),
            (b"<!DOCTYPE html>".to_vec(), 4, &["not safetensors", "web page"]),
            (file(&one("U8", "[4]", 0, 4), 3), 4, &["w: ", "expected a file of at least", "found "]),
            (file(&one("U8", "[4]", 0, 4), 5), 4, &["behind the last tensor"]),
            (file(&two((0, 4), (2, 6)), 6), 4, &["w: overlaps"]),
            (file(&two((0, 4), (5, 9)), 9), 4, &["w: leaves a hole"]),
            (file(&one("U8", "[4]", 4, 0), 4), 4, &["w: has its offsets reversed"]),
            (file(&one("U8", "[8589934592,8589934592]", 0, 4), 4), 4, &["w: is too large"]),
            (file(&one("U8", "[4]", 0, 5), 5), 4, &["w: has the wrong size", "4 bytes"]),
            (file(&one("U8", "[-1,4]", 0, 4), 4), 4, &["w: ", "-1"]),
            (file(&one("U8", &format!("[{}1]", "1,".repeat(1_000_000)), 0, 1), 1), 4, &["w: rank"]),
            (file(&format!("{{{0},{0}}}", entry("w", "U8", "[1]", 0, 1)), 1), 4, &["w: duplicate name"]),
            (file(&one("F8_FOO", "[4]", 0, 4), 4), 6, &["w: ", "F8_FOO"]),
            (file(&one("F4", "[3]", 0, 1), 1), 4, &["w: ends within a byte"]),
            (file(r#"{"__metadata__":{"a":1}}"#, 0), 4, &["__metadata__.a"]),
            (file(&format!("{{{}}}", entry("\\u001b[31mx", "U8", "[1]", 0, 1)), 1), 4, &["\\u{1b}[31mx"]),
            (file(&format!("{{{}}}", entry("", "U8", "[1]", 0, 1)), 1), 4, &["\"\": is no tensor name"]),
            (file(&format!("{{{}}}", entry("../../x", "U8", "[1]", 0, 1)), 1), 4, &["../../x: is no tensor name"]),
            (file(&format!("{{{}}}", entry(&"n".repeat(1 << 20), "U8", "[1]", 0, 1)), 1), 4, &["nnn...: is no"]),
            (file(&format!("{{{}}}", entry("a\\u0000", "U8", "[1]", 0, 1)), 1), 4, &["a\\u{0}: is no"]),
            (file(&one("U8", &format!("[{big}]"), u64::MAX - big, u64::MAX), 4), 4, &["w: "]),
        ];
        for (bytes, exit, parts) in cases {
            let e = open_raw(&bytes).unwrap_err();
            let line = e.to_string();
            let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(120)]).into_owned();
            assert_eq!(e.exit_code(), exit, "{shown}: {line}");
            for part in parts {
                assert!(line.contains(part), "{shown}: {line} should contain {part}");
            }
        }
    }

    #[test]
    fn eight_huge_tensors_do_not_overflow() {
        let n = (1u64 << 61) - 1;
        let entries: Vec<String> = (0..8).map(|i| entry(&format!("t{i}"), "U8", &format!("[{n}]"), i * n, (i + 1) * n)).collect();
        let e = open_raw(&file(&format!("{{{}}}", entries.join(",")), 16)).unwrap_err();
        assert_eq!((e.exit_code(), e.place.as_str()), (4, "t0"));
    }

    #[test]
    fn too_many_tensors_are_a_limit() {
        let entries: Vec<String> = (0..TENSORS_MAX + 1).map(|i| entry(&format!("{i}"), "U8", "[0]", 0, 0)).collect();
        let header = format!("{{{}}}", entries.join(","));
        assert_eq!(open_raw(&file(&header, 0)).unwrap_err().exit_code(), 7);
    }
}
