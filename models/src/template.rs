//! Chat templates: compiling and rendering them as the reference library does, within bounds.
//!
//! In: the Jinja source of a model (untrusted) and a conversation as JSON. Out: the prompt text. The same file is
//! compiled into the crate that checks models and into the runtime, so it depends on no other module of either.
//!
//! Like the reference: `trim_blocks` and `lstrip_blocks`, loop controls, Python's methods on strings and maps,
//! `raise_exception`, `strftime_now`, `tojson` in the style of `json.dumps`, and `{% generation %}` as a plain block.
//! Unlike it, there is no way to other files and no attribute that starts with two underscores, fuel bounds the work,
//! and the length of the text is bounded, as is what the numbers make that filters and formats are given. Not bounded is
//! the memory of intermediate strings that a hostile template multiplies otherwise, by `+`, `replace` or `join` (`*` stops
//! at the engine's own 100 MB); that needs a limit on the process.
//!
//! Sources: transformers `chat_template_utils.py`; Jinja2's template documentation; Python's `json` and `strftime`.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, ErrorKind, State, filters};
use serde_json::Value as Json;

/// Instructions that one rendering may execute.
pub const FUEL: u64 = 10_000_000;
/// Longest text that a rendering may produce, in bytes.
pub const OUTPUT_BYTES_MAX: usize = 16 << 20;
/// Longest template, in bytes.
pub const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Longest `range`.
const RANGE_MAX: i64 = 100_000;

/// Why a template cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemplateErrorKind {
    /// The source is no template, or names something that does not exist.
    Syntax,
    /// The template itself refused the conversation by `raise_exception`.
    Raised,
    /// Fuel, output or another bound was reached.
    Limit,
    /// An operation failed on these messages.
    Render,
}

/// A template that does not compile or does not render.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateError {
    /// What kind of failure.
    pub kind: TemplateErrorKind,
    /// Line in the source, from 1; 0 where unknown.
    pub line: usize,
    /// What happened; for `Raised` the template's own words.
    pub message: String,
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chat template, line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for TemplateError {}

/// A point in time for `strftime_now`, in the reader's time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DateTime {
    /// Year of the Gregorian calendar.
    pub year: i32,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    /// 0 to 23.
    pub hour: u32,
    /// 0 to 59.
    pub minute: u32,
    /// 0 to 60.
    pub second: u32,
}

/// What a template is rendered with.
pub struct TemplateInput<'a> {
    /// A list of objects with `role` and `content`.
    pub messages: Json,
    /// A list of tool schemas.
    pub tools: Option<Json>,
    /// Whether the text ends with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// `bos_token`, `eos_token` and so on with their texts.
    pub special_tokens: &'a BTreeMap<String, String>,
    /// An object with further variables, such as `enable_thinking`.
    pub extra: Option<Json>,
    /// The time that `strftime_now` shows; UTC of the clock where absent.
    pub now: Option<DateTime>,
}

/// A compiled chat template.
pub struct Template {
    environment: Environment<'static>,
}

const NAME: &str = "chat";

impl Template {
    /// Compiles `source`.
    pub fn new(source: &str) -> Result<Template, TemplateError> {
        if source.len() > SOURCE_BYTES_MAX {
            let message = format!("the template has {} bytes, at most {SOURCE_BYTES_MAX} are allowed", source.len());
            return Err(TemplateError { kind: TemplateErrorKind::Limit, line: 0, message });
        }
        let source = prepare(source)?;
        let mut environment = environment();
        environment.add_template_owned(NAME, source).map_err(|e| template_error(&e))?;
        Ok(Template { environment })
    }

    /// The text of a conversation.
    pub fn render(&self, input: &TemplateInput<'_>) -> Result<String, TemplateError> {
        let now = input.now.unwrap_or_else(utc_now);
        let mut context: Vec<(String, Value)> = vec![
            ("messages".into(), from_json(&alias_reasoning(&input.messages))),
            ("tools".into(), input.tools.as_ref().map_or(Value::from(()), from_json)),
            ("documents".into(), Value::from(())),
            ("add_generation_prompt".into(), Value::from(input.add_generation_prompt)),
            ("strftime_now".into(), Value::from_function(move |format: &str| strftime(now, format))),
        ];
        context.extend(input.special_tokens.iter().map(|(name, text)| (name.clone(), Value::from(text.as_str()))));
        if let Some(Json::Object(extra)) = &input.extra {
            context.extend(extra.iter().map(|(name, value)| (name.clone(), from_json(value))));
        }
        let template = self.environment.get_template(NAME).map_err(|e| template_error(&e))?;
        let mut out = Capped { bytes: Vec::new() };
        template.render_captured_to(Value::from_pairs(context), &mut out).map_err(|e| template_error(&e))?;
        String::from_utf8(out.bytes).map_err(|e| TemplateError { kind: TemplateErrorKind::Render, line: 0, message: e.to_string() })
    }
}

/// Filters, functions, methods and bounds that every chat template sees.
pub fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    // The delimiters are the defaults, which cannot contradict each other.
    env.set_syntax(syntax.unwrap_or_default());
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(100);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(|state, value, method, args| {
        if let ("format", Some(text)) = (method, value.as_str()) {
            check_size("a format", widths(replacement_fields(text)), OUTPUT_BYTES_MAX as u64)?;
        }
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
    });
    // These make as much as their numbers say.
    let sized = [
        ("batch", Value::from_function(filters::batch), check_count as Check),
        ("format", Value::from_function(filters::format), check_format),
        ("indent", Value::from_function(filters::indent), check_indent),
        ("slice", Value::from_function(filters::slice), check_count),
    ];
    for (name, filter, check) in sized {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args: Vec<Value> = args.0.into_iter().map(ValueOrKwargs::into_value).collect();
            check(&args)?;
            filter.call(state, &args)
        });
    }
    env.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    env.add_function("range", range);
    env.add_filter("tojson", to_json_filter);
    env
}

/// Marks an error of `raise_exception` on its way through the engine.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Marks an error about a bound.
#[derive(Debug)]
struct LimitReached;

impl fmt::Display for LimitReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a limit was reached")
    }
}

impl std::error::Error for LimitReached {}

fn template_error(e: &minijinja::Error) -> TemplateError {
    let line = e.line().unwrap_or(0);
    let mut message = e.detail().map_or_else(|| e.kind().to_string(), |detail| format!("{}: {detail}", e.kind()));
    let mut kind = match e.kind() {
        ErrorKind::SyntaxError
        | ErrorKind::UndefinedError
        | ErrorKind::UnknownFunction
        | ErrorKind::UnknownFilter
        | ErrorKind::UnknownTest
        | ErrorKind::UnknownMethod
        | ErrorKind::TemplateNotFound => TemplateErrorKind::Syntax,
        ErrorKind::OutOfFuel | ErrorKind::WriteFailure => TemplateErrorKind::Limit,
        _ => TemplateErrorKind::Render,
    };
    if e.kind() == ErrorKind::WriteFailure {
        message = format!("the text is longer than {OUTPUT_BYTES_MAX} bytes");
    }
    if e.detail().is_some_and(|d| d.starts_with("repeated ") && d.ends_with(" is too large")) {
        kind = TemplateErrorKind::Limit;
    }
    let mut source = std::error::Error::source(e);
    while let Some(inner) = source {
        if let Some(raised) = inner.downcast_ref::<Raised>() {
            (kind, message) = (TemplateErrorKind::Raised, raised.0.clone());
        } else if inner.is::<LimitReached>() {
            kind = TemplateErrorKind::Limit;
        }
        source = inner.source();
    }
    TemplateError { kind, line, message }
}

/// Looks at a filter's value and arguments before it runs.
type Check = fn(&[Value]) -> Result<(), minijinja::Error>;

fn check_size(what: &str, size: u64, most: u64) -> Result<(), minijinja::Error> {
    if size <= most {
        return Ok(());
    }
    let message = format!("{what} would have a size of {size}, at most {most} is allowed");
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message).with_source(LimitReached))
}

/// `batch` and `slice`: lists of as many elements.
fn check_count(args: &[Value]) -> Result<(), minijinja::Error> {
    check_size("a list", number(args, 1, "count").unwrap_or(0), RANGE_MAX as u64)
}

/// `indent`: as many spaces in front of each line.
fn check_indent(args: &[Value]) -> Result<(), minijinja::Error> {
    let text = args.first().and_then(Value::as_str).unwrap_or_default();
    let lines = 1 + text.matches('\n').count() as u64;
    let spaces = number(args, 1, "width").unwrap_or(4).saturating_mul(lines);
    check_size("an indented text", spaces.saturating_add(text.len() as u64), OUTPUT_BYTES_MAX as u64)
}

/// `format`: C's widths and precisions.
fn check_format(args: &[Value]) -> Result<(), minijinja::Error> {
    let format = args.first().and_then(Value::as_str).unwrap_or_default();
    let format = format.replace("%%", "");
    let specs = format.split('%').skip(1).map(|spec| {
        let spec = if spec.starts_with('(') { spec.split_once(')').map_or("", |s| s.1) } else { spec };
        let end = spec.find(|c: char| !c.is_ascii_digit() && !"#- +.".contains(c)).unwrap_or(spec.len());
        &spec[..end]
    });
    check_size("a format", widths(specs), OUTPUT_BYTES_MAX as u64)
}

/// The part behind the colon of each `{name:spec}` of Python's `str.format`.
fn replacement_fields(format: &str) -> impl Iterator<Item = &str> {
    let fields = format.split('{').skip(1).map(|field| field.split('}').next().unwrap_or_default());
    fields.filter_map(|field| field.split_once(':').map(|f| f.1))
}

/// The sum of all numbers in format specifications.
fn widths<'s>(specs: impl Iterator<Item = &'s str>) -> u64 {
    let numbers = specs.flat_map(|spec| spec.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty()));
    numbers.map(|n| n.parse().unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
}

/// A number that a filter is given by place or by name.
fn number(args: &[Value], at: usize, name: &str) -> Option<u64> {
    let by_place = args.get(at).filter(|arg| !arg.is_kwargs()).cloned();
    let by_name = || args.last().filter(|arg| arg.is_kwargs()).and_then(|arg| arg.get_attr(name).ok());
    let value = by_place.or_else(by_name).filter(Value::is_number)?;
    // What is no size is refused by the filter itself.
    f64::try_from(value).ok().map(|n| n as u64)
}

/// Collects output up to [`OUTPUT_BYTES_MAX`].
struct Capped {
    bytes: Vec<u8>,
}

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > OUTPUT_BYTES_MAX {
            return Err(io::Error::other("the text is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Turns `{% generation %}` blocks into plain scopes, and refuses what no chat template may use: other files and names
/// with two leading underscores. Line numbers and whitespace control stay as they are.
fn prepare(source: &str) -> Result<String, TemplateError> {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let refuse = |here: &str, name: &str| TemplateError {
        kind: TemplateErrorKind::Syntax,
        line: 1 + source[..source.len() - here.len()].matches('\n').count(),
        message: format!("undefined name `{name}`"),
    };
    while let Some(start) = rest.find('{') {
        let (text, tag) = rest.split_at(start);
        let here = tag;
        out.push_str(text);
        let close = match tag.as_bytes().get(1) {
            Some(b'{') => "}}",
            Some(b'%') => "%}",
            Some(b'#') => "#}",
            _ => {
                out.push('{');
                rest = &tag[1..];
                continue;
            }
        };
        let end = tag_end(tag, close);
        let (tag, after) = tag.split_at(end);
        if close != "#}"
            && let Some(name) = dunder(tag)
        {
            return Err(refuse(here, name));
        }
        match (close, statement(tag)) {
            ("%}", Some(word @ ("include" | "import" | "from" | "extends"))) => return Err(refuse(here, word)),
            ("%}", Some("generation")) => out.push_str(&tag.replacen("generation", "with", 1)),
            ("%}", Some("endgeneration")) => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

/// Length of the tag that `tag` starts with, up to and with `close`; closing marks within quotes do not count.
fn tag_end(tag: &str, close: &str) -> usize {
    let bytes = tag.as_bytes();
    let mut quote = None;
    let mut i = 2;
    while i < bytes.len() {
        match (quote, bytes[i]) {
            (Some(_), b'\\') => i += 1,
            (Some(q), b) if b == q => quote = None,
            (None, b @ (b'"' | b'\'')) if close != "#}" => quote = Some(b),
            (None, _) if bytes[i..].starts_with(close.as_bytes()) => return i + 2,
            _ => {}
        }
        i += 1;
    }
    tag.len()
}

/// First word of a `{% ... %}` tag.
fn statement(tag: &str) -> Option<&str> {
    let body = tag.strip_prefix("{%")?.trim_start_matches(['-', '+']).trim_start();
    let end = body.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(body.len());
    Some(&body[..end])
}

/// A name in `tag` that starts with two underscores, be it in quotes: the way to an interpreter's insides.
fn dunder(tag: &str) -> Option<&str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut from = 0;
    while let Some(at) = tag[from..].find("__").map(|at| from + at) {
        let inside = tag[..at].chars().next_back().is_some_and(is_name);
        let length = tag[at..].find(|c| !is_name(c)).unwrap_or(tag.len() - at);
        let name = &tag[at..at + length];
        if !inside && name.trim_start_matches('_').starts_with(char::is_alphabetic) {
            return Some(name);
        }
        from = at + length;
    }
    None
}

/// `range` with a bound on its length that counts as a limit.
fn range(a: i64, b: Option<i64>, step: Option<i64>) -> Result<Value, minijinja::Error> {
    let (start, end) = b.map_or((0, a), |b| (a, b));
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, "range() with step 0"));
    }
    let span = if step > 0 { end.saturating_sub(start) } else { start.saturating_sub(end) };
    if span / step.saturating_abs() > RANGE_MAX {
        let message = format!("range has more than {RANGE_MAX} elements");
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message).with_source(LimitReached));
    }
    let mut items = Vec::new();
    let mut next = start;
    while if step > 0 { next < end } else { next > end } {
        items.push(Value::from(next));
        next = next.saturating_add(step);
    }
    Ok(Value::from_iter(items))
}

/// Gives a message's reasoning all the names that templates read it by.
fn alias_reasoning(messages: &Json) -> Json {
    let Json::Array(list) = messages else { return messages.clone() };
    let aliased = list.iter().map(|message| {
        let Json::Object(map) = message else { return message.clone() };
        let names = ["reasoning_content", "thinking", "reasoning"];
        let Some(reasoning) = names.iter().find_map(|name| map.get(*name).filter(|v| !v.is_null())) else {
            return message.clone();
        };
        let mut new = serde_json::Map::new();
        new.insert("thinking".into(), reasoning.clone());
        new.extend(map.iter().map(|(k, v)| (k.clone(), v.clone())));
        new.insert("reasoning_content".into(), reasoning.clone());
        Json::Object(new)
    });
    Json::Array(aliased.collect())
}

/// JSON as a value of the engine; the order of keys is kept.
fn from_json(json: &Json) -> Value {
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
fn to_json_filter(value: &Value, kwargs: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<Value> = kwargs.get("indent")?;
    let indent = indent.filter(|v| !v.is_none() && !v.is_undefined());
    let indent = indent.map(|v| v.as_str().map_or_else(|| " ".repeat(v.as_usize().unwrap_or(0).min(64)), str::to_string));
    let separators: Option<Value> = kwargs.get("separators")?;
    let separators = separators.filter(|v| !v.is_none() && !v.is_undefined());
    let part = |index: usize, default: &str| -> String {
        let given = separators.as_ref().and_then(|s| s.get_item_by_index(index).ok());
        given.and_then(|v| v.as_str().map(str::to_string)).unwrap_or_else(|| default.to_string())
    };
    let style = JsonStyle {
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        item: part(0, if indent.is_some() { "," } else { ", " }),
        key: part(1, ": "),
        indent,
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(Value::from(out))
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

/// Python's `strftime` in the C locale.
fn strftime(t: DateTime, format: &str) -> Result<String, minijinja::Error> {
    const MONTHS: [&str; 12] =
        ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
    const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
    let month = MONTHS[(t.month.clamp(1, 12) - 1) as usize];
    let days_before = days_from_civil(t.year, t.month, t.day) - days_from_civil(t.year, 1, 1);
    // 1970-01-01 was a Thursday.
    let weekday = (days_from_civil(t.year, t.month, t.day) + 4).rem_euclid(7);
    let day = DAYS[weekday as usize];
    let hour12 = (t.hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut spec = chars.next();
        let bare = spec == Some('-');
        if bare {
            spec = chars.next();
        }
        let two = |n: u32| if bare { n.to_string() } else { format!("{n:02}") };
        match spec {
            Some('Y') => out.push_str(&t.year.to_string()),
            Some('y') => out.push_str(&two(t.year.rem_euclid(100) as u32)),
            Some('m') => out.push_str(&two(t.month)),
            Some('d') => out.push_str(&two(t.day)),
            Some('e') if bare => out.push_str(&t.day.to_string()),
            Some('e') => out.push_str(&format!("{:2}", t.day)),
            Some('H') => out.push_str(&two(t.hour)),
            Some('I') => out.push_str(&two(hour12)),
            Some('M') => out.push_str(&two(t.minute)),
            Some('S') => out.push_str(&two(t.second)),
            Some('f') => out.push_str("000000"),
            Some('p') => out.push_str(if t.hour < 12 { "AM" } else { "PM" }),
            Some('B') => out.push_str(month),
            Some('b' | 'h') => out.push_str(&month[..3]),
            Some('A') => out.push_str(day),
            Some('a') => out.push_str(&day[..3]),
            Some('w') => out.push_str(&weekday.to_string()),
            Some('u') => out.push_str(&(if weekday == 0 { 7 } else { weekday }).to_string()),
            Some('j') if bare => out.push_str(&(days_before + 1).to_string()),
            Some('j') => out.push_str(&format!("{:03}", days_before + 1)),
            Some('F') => out.push_str(&strftime(t, "%Y-%m-%d")?),
            Some('T' | 'X') => out.push_str(&strftime(t, "%H:%M:%S")?),
            Some('R') => out.push_str(&strftime(t, "%H:%M")?),
            Some('D' | 'x') => out.push_str(&strftime(t, "%m/%d/%y")?),
            Some('c') => out.push_str(&strftime(t, "%a %b %e %H:%M:%S %Y")?),
            // A time without zone, as `datetime.now()` gives.
            Some('Z' | 'z') => {}
            Some('n') => out.push('\n'),
            Some('t') => out.push('\t'),
            Some('%') => out.push('%'),
            other => {
                let shown = other.map(String::from).unwrap_or_default();
                let message = format!("strftime_now: unknown directive %{shown}");
                return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message));
            }
        }
    }
    Ok(out)
}

/// Days since 1970-01-01 of a date of the Gregorian calendar.
fn days_from_civil(year: i32, month: u32, day: u32) -> i64 {
    // Years start in March, so that the leap day is the last of the year.
    let year = i64::from(year) - i64::from(month <= 2);
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((i64::from(month) + 9) % 12) + 2) / 5 + i64::from(day) - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The clock's time in UTC.
fn utc_now() -> DateTime {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs() as i64;
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400) as u32);
    let mut year = 1970 + (days / 366) as i32;
    while days_from_civil(year + 1, 1, 1) <= days {
        year += 1;
    }
    let month = (1..=12).rev().find(|m| days_from_civil(year, *m, 1) <= days).unwrap_or(1);
    let day = (days - days_from_civil(year, month, 1)) as u32 + 1;
    DateTime { year, month, day, hour: of_day / 3600, minute: of_day / 60 % 60, second: of_day % 60 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const NOW: DateTime = DateTime { year: 2026, month: 2, day: 14, hour: 9, minute: 30, second: 0 };

    fn render(source: &str, messages: Json) -> Result<String, TemplateError> {
        let input = TemplateInput {
            messages,
            tools: None,
            add_generation_prompt: true,
            special_tokens: &BTreeMap::from([("bos_token".to_string(), "<s>".to_string())]),
            extra: Some(json!({"list": [1, 2.5, true, null, "ä\u{1}\""], "map": {"b": {}, "a": [1e-5, 1e16, 0.5]}})),
            now: Some(NOW),
        };
        Template::new(source)?.render(&input)
    }

    #[test]
    fn filters_and_functions() {
        for (source, expected) in [
            ("{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}", "<s>user"),
            ("{{ list | tojson }}", r#"[1, 2.5, true, null, "ä\u0001\""]"#),
            ("{{ list | tojson(ensure_ascii=true) }}", r#"[1, 2.5, true, null, "\u00e4\u0001\""]"#),
            ("{{ map | tojson(sort_keys=true) }}", r#"{"a": [1e-05, 1e+16, 0.5], "b": {}}"#),
            ("{{ map | tojson(separators=(',', ':')) }}", r#"{"b":{},"a":[1e-05,1e+16,0.5]}"#),
            ("{{ [1, {'k': []}] | tojson(indent=2) }}", "[\n  1,\n  {\n    \"k\": []\n  }\n]"),
            ("{{ strftime_now('%d %b %Y, %A, day %-j, %I:%M %p') }}", "14 Feb 2026, Saturday, day 45, 09:30 AM"),
            ("a\n  {% generation %}\nb{%- endgeneration -%}  c", "a\nbc"),
            ("{{ ' x '.strip() + 'a,b'.split(',')[-1] }}{{ range(3) | list }}", "xb[0, 1, 2]"),
            ("{# __class__ #}{{ 'no %} end' }}{{ tools is none }}", "no %} endTrue"),
            ("{{ 'a\nb' | indent(2) }}|{{ 'a' | indent(width=1, first=true) }}", "a\n  b| a"),
            ("{{ '%03d|%s' | format(7, 'x') }} {{ '{:>4}'.format('y') }}", "007|x    y"),
            ("{{ [1, 2, 3] | batch(2, 200000) | list }}{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3, 200000]][[1, 2], [3]]"),
            ("{{ '%s of 9999999999 %%9999999999' | format(1) }}{{ '9999999999 {}'.format(2) }}", "1 of 9999999999 %99999999999999999999 2"),
        ] {
            assert_eq!(render(source, json!([{"role": "user"}])).as_deref(), Ok(expected), "{source}");
        }
    }

    #[test]
    fn refusals_have_kind_and_line() {
        use TemplateErrorKind::*;
        for (source, kind, line) in [
            ("a\n{% if", Syntax, 2),
            ("{{ x.y.z }}", Syntax, 1),
            ("\n{{ ''.__class__ }}", Syntax, 2),
            ("{{ x['__class__'] }}", Syntax, 1),
            ("{% include '/etc/passwd' %}", Syntax, 1),
            ("{% import 'os' as os %}", Syntax, 1),
            ("{{ open('/etc/passwd') }}", Syntax, 1),
            ("{{ raise_exception('no') }}", Raised, 1),
            ("{% for i in range(1000000000000) %}{% endfor %}", Limit, 1),
            ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", Limit, 1),
            ("{{ 'a' * 1000000000 }}", Limit, 1),
            ("{{ 'ab' | indent(18446744073709551615) }}", Limit, 1),
            ("{{ 'a' | indent(width=1000000000000) }}", Limit, 1),
            ("{{ ('a\\n' * 99999) | indent(9999) }}", Limit, 1),
            ("{{ [1] | batch(1000000000000, 0) }}", Limit, 1),
            ("{{ [1] | slice(1000000000000) }}", Limit, 1),
            ("{{ '%0999999999999d' | format(1) }}", Limit, 1),
            ("{{ '%.999999999999999999999999f' | format(1.0) }}", Limit, 1),
            ("{{ '{:>999999999999}'.format('y') }}", Limit, 1),
            ("{{ ('%9999s' * 9999) | format('y') }}", Limit, 1),
            ("{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}", Limit, 0),
        ] {
            let e = render(source, json!([])).unwrap_err();
            assert_eq!((e.kind, e.line), (kind, line), "{source}: {e}");
        }
        assert_eq!(render("{{ raise_exception('my words') }}", json!([])).unwrap_err().message, "my words");
        let nested = format!("{}{}", "{% if true %}".repeat(10_000), "{% endif %}".repeat(10_000));
        assert_eq!(render(&nested, json!([])).unwrap_err().kind, Syntax);
        assert_eq!(Template::new(&" ".repeat(SOURCE_BYTES_MAX + 1)).err().unwrap().kind, Limit);
    }

    #[test]
    fn the_calendar() {
        assert_eq!(days_from_civil(1970, 1, 1), 0);
        assert_eq!(days_from_civil(2000, 3, 1) - days_from_civil(2000, 2, 28), 2);
        assert_eq!(days_from_civil(2100, 3, 1) - days_from_civil(2100, 2, 28), 1);
        let leap = DateTime { year: 2024, month: 12, day: 31, ..NOW };
        assert_eq!(strftime(leap, "%j %a %y").unwrap(), "366 Tue 24");
        assert!(utc_now().year >= 2024);
    }
}
