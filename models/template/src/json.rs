//! JSON as values of the engine, and values as the JSON that Python's `json.dumps` writes.

use crate::bounds::{LimitReached, OUTPUT_BYTES_MAX, check_size};
use minijinja::ErrorKind;
use minijinja::value::{Kwargs, Value, ValueKind};
use serde_json::Value as Json;
use std::fmt::Write as _;

/// Most spaces by which each level may be indented.
const INDENT_MAX: u64 = 1000;

/// JSON as a value of the engine; the order of keys is kept.
pub(crate) fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => Value::from(n),
            (None, Some(n)) => Value::from(n),
            (None, None) => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(s) => Value::from(s.as_str()),
        Json::Array(items) => items.iter().map(from_json).collect(),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(key, value)| (key.as_str(), from_json(value)))),
    }
}

/// `json.dumps(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(crate) fn to_json_filter(value: &Value, kwargs: Kwargs) -> Result<Value, minijinja::Error> {
    let given = |name| kwargs.get::<Option<Value>>(name).map(|value| value.filter(|v| !v.is_none() && !v.is_undefined()));
    let indent = given("indent")?.map(|value| indent_text(&value)).transpose()?;
    let separators = given("separators")?.map(|value| separator_texts(&value)).transpose()?;
    let [item, key] = separators.unwrap_or_else(|| [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_string));
    let style = JsonStyle {
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        item,
        key,
        indent,
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(Value::from(out))
}

/// What each level is indented by: a text, or as many spaces; a truth value is a number, and a negative one is none.
fn indent_text(value: &Value) -> Result<String, minijinja::Error> {
    let count = match value.kind() {
        ValueKind::String => return Ok(value.as_str().unwrap_or_default().to_string()),
        ValueKind::Bool => i128::from(value.is_true()),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).unwrap_or(i128::MAX),
        _ => return Err(no_style("indent is a whole number or a text")),
    };
    let count = u64::try_from(count.max(0)).unwrap_or(u64::MAX);
    check_size("the indent of JSON", count, INDENT_MAX)?;
    Ok(" ".repeat(count as usize))
}

/// What stands behind an item and behind a key.
fn separator_texts(value: &Value) -> Result<[String; 2], minijinja::Error> {
    let texts = match value.kind() {
        ValueKind::Seq => value.try_iter()?.map(|text| text.as_str().map(str::to_string)).collect::<Option<Vec<_>>>(),
        _ => None,
    };
    let texts = texts.and_then(|texts| <[String; 2]>::try_from(texts).ok());
    texts.ok_or_else(|| no_style("separators are two texts"))
}

fn no_style(message: &'static str) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, message)
}

struct JsonStyle {
    ascii: bool,
    sort: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

impl JsonStyle {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), minijinja::Error> {
        if out.len() > OUTPUT_BYTES_MAX || depth > 200 {
            let e = minijinja::Error::new(ErrorKind::InvalidOperation, "the JSON text is too long or too deep");
            return Err(e.with_source(LimitReached));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&python_float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_list(out, '[', ']', depth, items.len(), |out, i| self.write(out, &items[i], depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.write_list(out, '{', '}', depth, keys.len(), |out, i| {
                    match keys[i].kind() {
                        ValueKind::String => self.write(out, &keys[i], depth)?,
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                            out.push('"');
                            self.write(out, &keys[i], depth)?;
                            out.push('"');
                        }
                        other => return Err(not_json(other)),
                    }
                    out.push_str(&self.key);
                    self.write(out, &value.get_item(&keys[i])?, depth + 1)
                })?;
            }
            other => return Err(not_json(other)),
        }
        Ok(())
    }

    fn write_list(
        &self,
        out: &mut String,
        open: char,
        close: char,
        depth: usize,
        count: usize,
        mut write_item: impl FnMut(&mut String, usize) -> Result<(), minijinja::Error>,
    ) -> Result<(), minijinja::Error> {
        let new_line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        out.push(open);
        for i in 0..count {
            if i > 0 {
                out.push_str(&self.item);
            }
            new_line(out, depth + 1);
            write_item(out, i)?;
        }
        if count > 0 {
            new_line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn not_json(kind: ValueKind) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::BadSerialization, format!("{kind} is not JSON serializable"))
}

/// `repr` of a Python float: shortest digits, exponent below 1e-4 and from 1e16 on.
fn python_float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_string();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity".to_string() } else { "-Infinity".to_string() };
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = x.to_string();
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}
