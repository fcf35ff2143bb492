//! `strftime_now`: the time as Python's `datetime.now().strftime` writes it in the C locale.

use chrono::format::{Fixed, Item, Numeric, StrftimeItems};
use chrono::{DateTime, NaiveDateTime, Utc};
use minijinja::ErrorKind;
use std::fmt::Write as _;
use std::time::SystemTime;

/// Directives that write a number, before which a flag says what it is padded with.
const NUMBERS: &str = "YyCGgmdejHIklMSUWVuws";
/// Those that write something else.
const TEXTS: &str = "aAbBhcDFpPrRTxXZzfnt%";

/// `now` by a format. A time without a zone has no name of one, and its seconds are whole.
pub(crate) fn strftime(now: NaiveDateTime, format: &str) -> Result<String, minijinja::Error> {
    let format = directives(format)?;
    let items = StrftimeItems::new(&format).map(|item| match item {
        Item::Numeric(Numeric::Nanosecond, _) => Item::Literal("000000"),
        Item::Fixed(Fixed::TimezoneName | Fixed::TimezoneOffset) => Item::Literal(""),
        item => item,
    });
    let mut out = String::new();
    write!(out, "{}", now.format_with_items(items)).map_err(|_| refused(&format))?;
    Ok(out)
}

/// The format with directives that both know and mean the same by: Python takes flags before texts too, where they change nothing, and
/// `chrono` has directives of its own.
fn directives(format: &str) -> Result<String, minijinja::Error> {
    let mut out = String::with_capacity(format.len());
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        out.push(c);
        if c != '%' {
            continue;
        }
        let mut directive = chars.next();
        let flag = directive.filter(|c| "-_0".contains(*c));
        if flag.is_some() {
            directive = chars.next();
        }
        match directive {
            Some(number) if NUMBERS.contains(number) => out.extend(flag.into_iter().chain([number])),
            Some(text) if TEXTS.contains(text) && (text != 'f' || flag.is_none()) => out.push(text),
            other => return Err(refused(&['%'].into_iter().chain(flag).chain(other).collect::<String>())),
        }
    }
    Ok(out)
}

fn refused(directive: &str) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: unknown directive {directive}"))
}

/// The clock's time in UTC.
pub(crate) fn utc_now() -> NaiveDateTime {
    DateTime::<Utc>::from(SystemTime::now()).naive_utc()
}
