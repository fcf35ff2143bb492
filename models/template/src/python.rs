//! What Python and Jinja do otherwise than the engine, or in addition: the tests `sequence` and `iterable`, some filters, and some methods
//! of strings.
//!
//! In: values and arguments of a template. Out: what Jinja2 3.1 makes of them.

use crate::bounds::argument;
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, filters};

/// Adds the tests and the filters.
pub(crate) fn add(env: &mut Environment<'_>) {
    // What has a length and items, among it slices and ranges, which the engine calls iterable. (So it does what `items()` gives, which has
    // none.)
    env.add_test("sequence", is_sequence);
    // The engine also calls `none` so.
    env.add_test("iterable", |value: &Value| is_sequence(value) || value.kind() == ValueKind::Plain && value.try_iter().is_ok());
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("e", escape);
    env.add_filter("escape", escape);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("wordcount", |text: &str| {
        let not_in_words = |c: char| !c.is_alphanumeric() && c != '_';
        text.split(not_in_words).filter(|word| !word.is_empty()).count()
    });
}

fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Bytes, Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Bytes | Iterable | Map | Seq | String | Undefined)
}

/// A method of strings that the engine lacks, or that takes more arguments; `None` for any other.
pub(crate) fn method(value: &Value, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let text = value.as_str()?;
    match method {
        "split" => Some(split_arguments(args).and_then(|(separator, most)| match (separator, most) {
            (None, Some(0..)) => Ok(split_at_spaces(text, most)),
            (separator, most) => filters::split(value, separator.map(Into::into), most),
        })),
        "rsplit" => Some(split_arguments(args).map(|(separator, most)| rsplit(text, separator.as_deref(), most))),
        "removeprefix" => Some(from_args(args).map(|(affix,): (&str,)| Value::from(text.strip_prefix(affix).unwrap_or(text)))),
        "removesuffix" => Some(from_args(args).map(|(affix,): (&str,)| Value::from(text.strip_suffix(affix).unwrap_or(text)))),
        "partition" => Some(from_args(args).and_then(|(separator,)| partition(text, separator, false))),
        "rpartition" => Some(from_args(args).and_then(|(separator,)| partition(text, separator, true))),
        _ => None,
    }
}

/// `sep=None, maxsplit=-1`, by place or by name.
fn split_arguments(args: &[Value]) -> Result<(Option<String>, Option<i64>), Error> {
    let (separator, most, named): (Option<String>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = if separator.is_some() { separator } else { named.get("sep")? };
    let most = if most.is_some() { most } else { named.get("maxsplit")? };
    named.assert_all_used()?;
    match separator.as_deref() {
        Some("") => Err(empty_separator()),
        _ => Ok((separator, most)),
    }
}

fn empty_separator() -> Error {
    Error::new(ErrorKind::InvalidOperation, "empty separator")
}

/// `split(None, most)`: parts between runs of white space; the last is the rest of the text, if there is any.
fn split_at_spaces(text: &str, most: Option<i64>) -> Value {
    let most = most.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let (mut parts, mut rest) = (Vec::new(), text.trim_start());
    while !rest.is_empty() {
        let end = if parts.len() < most { rest.find(char::is_whitespace).unwrap_or(rest.len()) } else { rest.len() };
        parts.push(Value::from(&rest[..end]));
        rest = rest[end..].trim_start();
    }
    parts.into_iter().collect()
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
fn partition(text: &str, separator: &str, from_end: bool) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(empty_separator());
    }
    let found = if from_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match found {
        Some((before, behind)) => [before, separator, behind],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from_object(Tuple::from(parts.map(Value::from))))
}

/// `default(default_value='', boolean=False)`: what stands for an undefined value, and with `boolean` for any that is not true.
fn default(value: &Value, args: Rest<ValueOrKwargs>) -> Value {
    let args: Vec<Value> = args.0.into_iter().map(ValueOrKwargs::into_value).collect();
    // (As an option of its own `none` would be none.)
    let given = |at, name| argument(&args, at, name).filter(|value| !value.is_undefined());
    let boolean = given(1, "boolean").is_some_and(|boolean| boolean.is_true());
    match value.is_undefined() || boolean && !value.is_true() {
        true => given(0, "default_value").unwrap_or_else(|| Value::from("")),
        false => value.clone(),
    }
}

/// `length`: an undefined value has none.
fn length(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() { Ok(Value::from(0)) } else { filters::length(value).map(Value::from) }
}

/// `replace(old, new, count=None)`.
pub(crate) fn replace(value: &Value, old: &str, new: &str, count: Option<i64>, named: Kwargs) -> Result<String, Error> {
    let count = if count.is_some() { count } else { named.get("count")? };
    named.assert_all_used()?;
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
    Ok(match count.map(usize::try_from) {
        Some(Ok(count)) => text.replacen(old, new, count),
        _ => text.replace(old, new),
    })
}

/// `indent(width=4, first=False, blank=False)`: a width may be the text that is put before lines. The lines keep their end.
pub(crate) fn indent(text: &str, width: Option<Value>, first: Option<bool>, blank: Option<bool>, named: Kwargs) -> Result<String, Error> {
    let width = if width.is_some() { width } else { named.get("width")? };
    let first = if first.is_some() { first } else { named.get("first")? };
    let blank = if blank.is_some() { blank } else { named.get("blank")? };
    named.assert_all_used()?;
    let before = match &width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_string(),
            None => " ".repeat(usize::try_from(i64::try_from(width.clone())?).unwrap_or(0)),
        },
    };
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::new();
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            out.push('\n');
        }
        let wanted = if index == 0 { first == Some(true) } else { blank == Some(true) || !line.is_empty() };
        if wanted {
            out.push_str(&before);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `escape`: the five characters as MarkupSafe writes them.
fn escape(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A name that nothing was given for is no value to convert.
fn check_defined(value: &Value) -> Result<(), Error> {
    match value.is_undefined() {
        true => Err(Error::from(ErrorKind::UndefinedError)),
        false => Ok(()),
    }
}

/// `int(default=0, base=10)`: what is no number is the default.
fn int(value: &Value, default: Option<Value>, base: Option<u32>, named: Kwargs) -> Result<Value, Error> {
    check_defined(value)?;
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
    check_defined(value)?;
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

/// Text as numbers are read from it: without space around it, and without underscores where all of them are between digits.
fn digits(text: &str) -> String {
    let text = text.trim();
    let is_digit = |c: Option<&u8>| c.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    let between = |at: usize| at > 0 && is_digit(bytes.get(at - 1)) && is_digit(bytes.get(at + 1));
    match text.match_indices('_').all(|(at, _)| between(at)) {
        true => text.replace('_', ""),
        false => text.to_string(),
    }
}

/// A whole number to a base from 2 to 36, with or without the base's prefix; base 0: as its prefix says.
fn whole_number(text: &str, base: u32) -> Option<i128> {
    let (sign, digits) = text.strip_prefix('-').map_or((1, text.strip_prefix('+').unwrap_or(text)), |digits| (-1, digits));
    let prefixed = [(2, "0b"), (2, "0B"), (8, "0o"), (8, "0O"), (16, "0x"), (16, "0X")]
        .into_iter()
        .filter(|(of, _)| base == 0 || base == *of)
        .find_map(|(of, prefix)| Some((of, digits.strip_prefix(prefix)?)));
    let (base, digits) = prefixed.unwrap_or((if base == 0 { 10 } else { base }, digits));
    if !(2..=36).contains(&base) {
        return None;
    }
    let plain = digits.starts_with(|c: char| c.is_ascii_alphanumeric());
    i128::from_str_radix(digits, base).ok().filter(|_| plain).map(|number| sign * number)
}
