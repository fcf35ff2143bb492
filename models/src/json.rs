//! JSON of strangers, strictly: UTF-8, no duplicate keys, no `NaN`, numbers in range, bounded depth and number of values,
//! nothing after the value.
//!
//! In: the bytes of a file. Out: a [`serde_json::Value`], or an error that gives line and column and, where the reader
//! was inside an object, the path of the field. `serde_json` does the parsing and stops at 128 levels; this module adds
//! the refusal of duplicate keys (parsers disagree on which one wins) and the path.

use std::cell::{Cell, RefCell};
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{Error, Kind};

/// Most values in a file: twice what the largest tokenizers have. A number of two bytes takes 72 and more once it is parsed.
const VALUES_MAX: usize = 4 << 20;

/// Parses `bytes`, the whole content of `file`.
pub fn parse(file: &str, bytes: &[u8]) -> Result<Value, Error> {
    let text = utf8(file, bytes)?;
    let (path, values) = (RefCell::new(Vec::new()), Cell::new(0));
    let mut parser = serde_json::Deserializer::from_str(text);
    let value = Strict { path: &path, values: &values }.deserialize(&mut parser).and_then(|value| parser.end().map(|()| value));
    value.map_err(|e| {
        let place = place_of(&path.borrow(), e.line(), e.column());
        if values.get() > VALUES_MAX {
            return Error::new(Kind::Limit, file, place, "has too many values", format!("at most {VALUES_MAX}"), "more");
        }
        let what = e.to_string();
        // serde_json repeats the position at the end of its message; we have it in `place`.
        let what = what.split(" at line ").next().unwrap_or(&what).to_string();
        let expected = if what.starts_with("duplicate key") { "every key once" } else { "valid JSON" };
        let found = excerpt(text, e.line(), e.column());
        Error::new(Kind::Malformed, file, place, what, expected, found)
    })
}

/// Parses `bytes` and requires an object on top.
pub fn parse_object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, Error> {
    match parse(file, bytes)? {
        Value::Object(map) => Ok(map),
        other => Err(Error::new(Kind::Malformed, file, "1:1", "wrong type", "object", kind_of(&other))),
    }
}

/// `bytes` as text; the error names the first byte that is not UTF-8. A byte-order mark is refused as JSON does.
pub fn utf8<'a>(file: &str, bytes: &'a [u8]) -> Result<&'a str, Error> {
    std::str::from_utf8(bytes).map_err(|e| {
        let at = e.valid_up_to();
        let found = bytes.get(at).map_or("the end".to_string(), |b| format!("byte 0x{b:02x}"));
        Error::new(Kind::Malformed, file, format!("byte {at}"), "is not UTF-8", "UTF-8 text", found)
    })
}

/// The JSON type of `value` in words.
pub fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A short text of `value` for messages: scalars in full (cut later), containers by their type.
pub fn show(value: &Value) -> String {
    match value {
        Value::Array(items) if items.len() > 8 => format!("an array of {}", items.len()),
        Value::Object(_) => "an object".to_string(),
        other => other.to_string(),
    }
}

/// `line:column`, with the path of the field in front where there is one.
fn place_of(path: &[Segment], line: usize, column: usize) -> String {
    let mut place = String::new();
    for segment in path {
        match segment {
            Segment::Key(key) if place.is_empty() => place.push_str(key),
            Segment::Key(key) => {
                place.push('.');
                place.push_str(key);
            }
            Segment::Index(index) => place.push_str(&format!("[{index}]")),
        }
        if place.len() > 64 {
            place.push_str("...");
            break;
        }
    }
    if place.is_empty() { format!("{line}:{column}") } else { format!("{place} at {line}:{column}") }
}

/// A few characters of the text at the position, for the `found` part.
fn excerpt(text: &str, line: usize, column: usize) -> String {
    let Some(line) = text.split('\n').nth(line.saturating_sub(1)) else { return "the end of the file".to_string() };
    let start = line.floor_char_boundary(column.saturating_sub(1));
    match line[start..].trim_end() {
        "" => "the end of the line or file".to_string(),
        rest => format!("`{}`", &rest[..rest.floor_char_boundary(24)]),
    }
}

enum Segment {
    Key(String),
    Index(usize),
}

/// Builds a `Value`; pushes the path on the way down and pops it only on success, so that it stays after an error.
#[derive(Clone, Copy)]
struct Strict<'a> {
    path: &'a RefCell<Vec<Segment>>,
    /// Values so far.
    values: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.values.set(self.values.get() + 1);
        if self.values.get() > VALUES_MAX {
            return Err(D::Error::custom("too many values"));
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_string()))
    }

    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(Value::String(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        loop {
            self.path.borrow_mut().push(Segment::Index(items.len()));
            match seq.next_element_seed(self)? {
                Some(item) => items.push(item),
                None => break,
            }
            self.path.borrow_mut().pop();
        }
        self.path.borrow_mut().pop();
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            self.path.borrow_mut().push(Segment::Key(key.clone()));
            if map.contains_key(&key) {
                return Err(A::Error::custom("duplicate key"));
            }
            let value = access.next_value_seed(self)?;
            self.path.borrow_mut().pop();
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> String {
        parse("config.json", text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn accepts_what_json_is() {
        let text = r#" {"a": [1, -2, 3.5, "x\u0041", null, true, {}], "": {"b": []}} "#;
        assert_eq!(parse("config.json", text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap());
    }

    #[test]
    fn refusals_name_field_and_position() {
        for (text, parts) in [
            ("", &["1:0"][..]),
            (r#"{"a": 1"#, &["1:7"]),
            ("{\"a\": 1}\nxyz", &["2:1", "trailing"]),
            (r#"{"a": {"b": 1, "b": 2}}"#, &["a.b at 1:", "duplicate key"]),
            (r#"{"rope_theta": NaN}"#, &["rope_theta at 1:"]),
            (r#"{"a": [0, 1e400]}"#, &["a[1] at 1:", "out of range"]),
        ] {
            let line = line(text);
            assert!(line.starts_with("error[E4-config-json]: config.json: "), "{line}");
            for part in parts {
                assert!(line.contains(part), "{line} should contain {part}");
            }
        }
        let e = parse("config.json", b"{\"a\": \"\xff\"}").unwrap_err();
        assert!(e.to_string().contains("byte 7"), "{e}");
    }

    #[test]
    fn values_are_counted() {
        let list = |numbers: usize| format!("[{}0]", "1,".repeat(numbers - 1));
        let Value::Array(items) = parse("tokenizer.json", list(VALUES_MAX - 1).as_bytes()).unwrap() else { panic!("a list") };
        assert_eq!(items.len(), VALUES_MAX - 1);
        drop(items);
        let e = parse("tokenizer.json", list(VALUES_MAX).as_bytes()).unwrap_err();
        assert!(e.exit_code() == 7 && e.to_string().contains("has too many values, expected at most 4194304"), "{e}");
    }

    #[test]
    fn depth_is_bounded() {
        assert!(line(&"[".repeat(100_000)).contains("recursion limit"));
        assert!(line(&"{\"a\":".repeat(100_000)).contains("recursion limit"));
    }
}
