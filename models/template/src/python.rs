//! What Python and Jinja do otherwise than the engine, or in addition: the test `sequence`, the filters `int`, `float` and `wordcount`, and
//! some methods of strings.
//!
//! In: values and arguments of a template. Out: what Jinja2 3.1 makes of them.

use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Environment, Error, filters};

/// Adds the test and the filters.
pub(crate) fn add(env: &mut Environment<'_>) {
    // What has a length and items.
    env.add_test("sequence", |value: &Value| {
        use ValueKind::{Bytes, Map, Seq, String, Undefined};
        matches!(value.kind(), Bytes | Map | Seq | String | Undefined)
    });
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("wordcount", |text: &str| {
        let not_in_words = |c: char| !c.is_alphanumeric() && c != '_';
        text.split(not_in_words).filter(|word| !word.is_empty()).count()
    });
}

/// A method of strings that the engine lacks, or that takes more arguments; `None` for any other.
pub(crate) fn method(value: &Value, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let text = value.as_str()?;
    match method {
        "split" => Some(split_arguments(args).and_then(|(separator, most)| filters::split(value, separator.map(Into::into), most))),
        "rsplit" => Some(split_arguments(args).map(|(separator, most)| rsplit(text, separator.as_deref(), most))),
        "partition" => Some(from_args(args).map(|(separator,)| partition(text, separator, false))),
        "rpartition" => Some(from_args(args).map(|(separator,)| partition(text, separator, true))),
        _ => None,
    }
}

/// `sep=None, maxsplit=-1`, by place or by name.
fn split_arguments(args: &[Value]) -> Result<(Option<String>, Option<i64>), Error> {
    let (separator, most, named): (Option<String>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = if separator.is_some() { separator } else { named.get("sep")? };
    let most = if most.is_some() { most } else { named.get("maxsplit")? };
    named.assert_all_used()?;
    Ok((separator, most))
}

/// Parts of a text, split from its end at most so often (negative: everywhere); without a separator at runs of white space.
fn rsplit(text: &str, separator: Option<&str>, most: Option<i64>) -> Value {
    let most = most.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match separator {
        Some(separator) => text.rsplitn(most.saturating_add(1), separator).collect(),
        None => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_end());
            while !rest.is_empty() {
                let begin = match rest.rfind(char::is_whitespace) {
                    Some(at) if parts.len() < most => at + rest[at..].chars().next().map_or(0, char::len_utf8),
                    _ => 0,
                };
                parts.push(&rest[begin..]);
                rest = rest[..begin].trim_end();
            }
            parts
        }
    };
    parts.reverse();
    parts.into_iter().map(Value::from).collect()
}

/// What stands before a separator, the separator and what stands behind it; at its last place if `from_end`.
fn partition(text: &str, separator: &str, from_end: bool) -> Value {
    let found = if from_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match found {
        Some((before, behind)) => [before, separator, behind],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Value::from_object(Tuple::from(parts.map(Value::from)))
}

/// `int(default=0, base=10)`: what is no number is the default.
fn int(value: &Value, default: Option<Value>, base: Option<u32>, named: Kwargs) -> Result<Value, Error> {
    let default = if default.is_some() { default } else { named.get("default")? };
    let base = if base.is_some() { base } else { named.get("base")? };
    named.assert_all_used()?;
    let whole = |number: f64| number.is_finite().then(|| Value::from(number as i128));
    let found = match value.as_str().map(digits) {
        Some(digits) => whole_number(&digits, base.unwrap_or(10)).map(Value::from).or_else(|| whole(digits.parse().ok()?)),
        None if value.is_integer() => Some(value.clone()),
        None => number(value).and_then(whole),
    };
    Ok(found.or(default).unwrap_or(Value::from(0)))
}

/// `float(default=0.0)`: what is no number is the default.
fn float(value: &Value, default: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let default = if default.is_some() { default } else { named.get("default")? };
    named.assert_all_used()?;
    let found = value.as_str().map_or_else(|| number(value), |text| digits(text).parse().ok());
    Ok(found.map(Value::from).or(default).unwrap_or(Value::from(0.0)))
}

/// The value of a number or a truth value.
fn number(value: &Value) -> Option<f64> {
    let is_number = matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    value.clone().try_into().ok().filter(|_| is_number).or_else(|| is_number.then(|| f64::from(u8::from(value.is_true()))))
}

/// Text as numbers are read from it: without space around it and underscores between digits.
fn digits(text: &str) -> String {
    text.trim().replace('_', "")
}

/// A whole number to a base, with or without the base's prefix.
fn whole_number(text: &str, base: u32) -> Option<i128> {
    let (sign, digits) = text.strip_prefix('-').map_or((1, text.strip_prefix('+').unwrap_or(text)), |digits| (-1, digits));
    let prefixes: &[&str] = match base {
        2 => &["0b", "0B"],
        8 => &["0o", "0O"],
        16 => &["0x", "0X"],
        10 => &[],
        _ => return None,
    };
    let digits = prefixes.iter().find_map(|prefix| digits.strip_prefix(prefix)).unwrap_or(digits);
    let plain = digits.starts_with(|c: char| c.is_ascii_alphanumeric());
    i128::from_str_radix(digits, base).ok().filter(|_| plain).map(|number| sign * number)
}
