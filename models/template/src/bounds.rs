//! What bounds a rendering: fuel, the stack that goes with it, the length of its text, the sizes that numbers give to what filters make,
//! and what namespaces keep.
//!
//! In: the arguments of filters and functions, values that are assigned in namespaces. Out: an error marked [`LimitReached`] where they
//! would make too much.

use crate::python;
use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, ErrorKind, State, filters};
use std::fmt;
use std::io;

/// Steps that one rendering may take: those of known models take some hundred for a message.
pub const FUEL: u64 = 200_000;
/// Stack for each step: it can put a value into one more list, and what is done with it, be it to free it, goes down all of them.
pub(crate) const STACK_PER_STEP: usize = 1280;
/// Longest text that a rendering may produce, in bytes.
pub const OUTPUT_BYTES_MAX: usize = 16 << 20;
/// Longest template, in bytes.
pub const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Longest `range`.
const RANGE_MAX: i64 = 100_000;
/// Largest number in a format. At the next the engine panics: `%.65535e` of 1.0.
const FORMAT_NUMBER_MAX: u64 = u16::MAX as u64 - 1;
/// Deepest value that a namespace keeps or `pprint` writes, whose time grows with the square of the depth.
const DEPTH_MAX: usize = 100;
/// Parts of a value that a namespace keeps: they are counted whenever it is assigned.
const KEPT_PARTS_MAX: usize = 2000;
/// The filter for what is assigned to a name in a namespace.
pub(crate) const KEPT: &str = "kept_in_namespace";

/// Marks an error about a bound.
#[derive(Debug)]
pub(crate) struct LimitReached;

impl fmt::Display for LimitReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a limit was reached")
    }
}

impl std::error::Error for LimitReached {}

/// Adds the filters and functions that make as much as their numbers say.
pub(crate) fn add_sized(env: &mut Environment<'_>) {
    let sized = [
        ("batch", Value::from_function(filters::batch), check_count as Check),
        ("format", Value::from_function(filters::format), check_format),
        ("indent", Value::from_function(python::indent), check_indent),
        ("pprint", Value::from_function(filters::pprint), check_print),
        ("replace", Value::from_function(python::replace), check_replace),
        ("slice", Value::from_function(filters::slice), check_count),
    ];
    env.add_filter(KEPT, |value: Value| check_kept(&value).map(|()| value));
    // Jinja has no items of what changes either, and no `chain`, in which maps show what they have later.
    env.add_filter("items", |value: &Value| match is_changing(value) {
        true => Err(minijinja::Error::new(ErrorKind::InvalidOperation, "can only get items of a mapping")),
        false => filters::items(value),
    });
    env.remove_filter("chain");
    for (name, filter, check) in sized {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args: Vec<Value> = args.0.into_iter().map(ValueOrKwargs::into_value).collect();
            check(&args)?;
            filter.call(state, &args)
        });
    }
    env.add_function("range", range);
}

/// A method that makes as much as its text says, Python's `str.format`, or that maps have and what changes has not.
pub(crate) fn check_method(value: &Value, method: &str) -> Result<(), minijinja::Error> {
    match (method, value.as_str()) {
        ("format", Some(text)) => check_widths(replacement_fields(text)?),
        ("items" | "keys" | "values", None) if is_changing(value) => Err(ErrorKind::UnknownMethod.into()),
        _ => Ok(()),
    }
}

/// Looks at a filter's value and arguments before it runs.
type Check = fn(&[Value]) -> Result<(), minijinja::Error>;

/// What is larger than allowed is an error about a bound.
pub(crate) fn check_size(what: &str, size: u64, most: u64) -> Result<(), minijinja::Error> {
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

/// `replace`: a new part for each old one.
fn check_replace(args: &[Value]) -> Result<(), minijinja::Error> {
    let [text, old, new] = [0, 1, 2].map(|at| args.get(at).map(Value::to_string).unwrap_or_default());
    let size = (text.matches(&old).count() as u64).saturating_mul(new.len() as u64);
    check_size("a text with parts replaced", size.saturating_add(text.len() as u64), OUTPUT_BYTES_MAX as u64)
}

/// `indent`: as many spaces, or a text, in front of each line.
fn check_indent(args: &[Value]) -> Result<(), minijinja::Error> {
    let text = args.first().and_then(Value::as_str).unwrap_or_default();
    let lines = 1 + text.matches('\n').count() as u64;
    let given = argument(args, 1, "width").and_then(|width| width.as_str().map(|text| text.len() as u64));
    let spaces = given.or_else(|| number(args, 1, "width")).unwrap_or(4).saturating_mul(lines);
    check_size("an indented text", spaces.saturating_add(text.len() as u64), OUTPUT_BYTES_MAX as u64)
}

/// `pprint`: values that are not too deep, and not too many.
fn check_print(args: &[Value]) -> Result<(), minijinja::Error> {
    args.first().map_or(Ok(()), |value| for_each_part(value, RANGE_MAX as usize, |_| Ok(())))
}

/// A namespace keeps no namespace and no `loop`: one that is within itself would never end.
fn check_kept(value: &Value) -> Result<(), minijinja::Error> {
    for_each_part(value, KEPT_PARTS_MAX, |part| check_size("namespaces and loops in a namespace", is_changing(part).into(), 0))
}

/// What can change after it is made: a namespace, and `loop`, which knows the items before and behind. Nothing else can.
fn is_changing(value: &Value) -> bool {
    value.as_object().is_some_and(|object| ["::Namespace", "::Loop"].iter().any(|name| object.type_name().ends_with(name)))
}

/// Visits a value and what it consists of, which must not be too deep or too much.
fn for_each_part(value: &Value, parts_max: usize, visit: impl Fn(&Value) -> Result<(), minijinja::Error>) -> Result<(), minijinja::Error> {
    let mut todo = vec![(value.clone(), 0)];
    let mut seen = 0;
    while let Some((value, depth)) = todo.pop() {
        visit(&value)?;
        seen += 1;
        check_size("the depth of a value", depth, DEPTH_MAX as u64)?;
        check_size("the parts of a value", seen, parts_max as u64)?;
        let is_map = value.kind() == ValueKind::Map;
        if !is_map && !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
            continue;
        }
        for part in value.try_iter()? {
            check_size("the parts of a value", todo.len() as u64, parts_max as u64)?;
            let part = if is_map { value.get_item(&part)? } else { part };
            todo.push((part, depth + 1));
        }
    }
    Ok(())
}

/// `format`: C's widths and precisions.
fn check_format(args: &[Value]) -> Result<(), minijinja::Error> {
    check_widths(conversions(args.first().and_then(Value::as_str).unwrap_or_default())?)
}

/// The part behind the key of each `%(key)spec` of C's formats, up to its letter. `%%` is none.
fn conversions(mut format: &str) -> Result<Vec<&str>, minijinja::Error> {
    let mut specs = Vec::new();
    while let Some((_, field)) = format.split_once('%') {
        if let Some(behind) = field.strip_prefix('%') {
            format = behind;
            continue;
        }
        let spec = field.strip_prefix('(').map_or(Ok(field), |key| behind_key(key, ')'))?;
        let end = spec.find(|c: char| !c.is_ascii_digit() && !"#- +.".contains(c)).unwrap_or(spec.len());
        specs.push(&spec[..end]);
        format = &spec[end..];
    }
    Ok(specs)
}

/// The part of each `{name[key]:spec}` of Python's `str.format` behind the colon and the character that fills, which may be any. `{{` is
/// none.
fn replacement_fields(mut format: &str) -> Result<Vec<&str>, minijinja::Error> {
    let mut specs = Vec::new();
    while let Some((_, field)) = format.split_once('{') {
        if let Some(behind) = field.strip_prefix('{') {
            format = behind;
            continue;
        }
        format = behind_path(field)?;
        if let Some(spec) = format.strip_prefix(':').map(behind_fill) {
            let (spec, behind) = spec.split_at(spec.find('}').unwrap_or(spec.len()));
            specs.push(spec);
            format = behind;
        }
    }
    Ok(specs)
}

/// What follows a field's name, attributes and keys.
fn behind_path(mut field: &str) -> Result<&str, minijinja::Error> {
    loop {
        field = &field[field.find(['[', ':', '}']).unwrap_or(field.len())..];
        match field.strip_prefix('[') {
            Some(key) => field = behind_key(key, ']')?,
            None => return Ok(field),
        }
    }
}

/// What follows a field's key, which `end` ends.
fn behind_key(text: &str, end: char) -> Result<&str, minijinja::Error> {
    let (key, behind) = text.split_once(end).unwrap_or((text, ""));
    match key.is_ascii() {
        true => Ok(behind),
        // The engine panics at it.
        false => Err(minijinja::Error::new(ErrorKind::InvalidOperation, "keys in formats must be ASCII")),
    }
}

/// A format specification without the character that fills and the mark for where.
fn behind_fill(spec: &str) -> &str {
    let mut chars = spec.chars();
    match (chars.next(), chars.next()) {
        (Some(_), Some('<' | '>' | '^')) => chars.as_str(),
        _ => spec,
    }
}

/// Each number in format specifications, and their sum.
fn check_widths(specs: Vec<&str>) -> Result<(), minijinja::Error> {
    let numbers = specs.into_iter().flat_map(|spec| spec.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty()));
    let mut sum = 0u64;
    for number in numbers.map(|n| n.parse().unwrap_or(u64::MAX)) {
        check_size("a number in a format", number, FORMAT_NUMBER_MAX)?;
        sum = sum.saturating_add(number);
    }
    check_size("a format", sum, OUTPUT_BYTES_MAX as u64)
}

/// What a filter is given by place or by name.
pub(crate) fn argument(args: &[Value], at: usize, name: &str) -> Option<Value> {
    let by_place = args.get(at).filter(|arg| !arg.is_kwargs()).cloned();
    by_place.or_else(|| args.last().filter(|arg| arg.is_kwargs()).and_then(|arg| arg.get_attr(name).ok()))
}

/// A number that a filter is given by place or by name.
fn number(args: &[Value], at: usize, name: &str) -> Option<u64> {
    let value = argument(args, at, name).filter(Value::is_number)?;
    // What is no size is refused by the filter itself.
    f64::try_from(value).ok().map(|n| n as u64)
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

/// Collects output up to [`OUTPUT_BYTES_MAX`].
#[derive(Default)]
pub(crate) struct Capped {
    /// What was written.
    pub bytes: Vec<u8>,
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
