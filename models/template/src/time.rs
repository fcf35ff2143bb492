//! `strftime_now`: the time as Python's `datetime.now().strftime` writes it in the C locale.

use chrono::format::{Fixed, Item, Numeric, StrftimeItems};
use chrono::{DateTime, NaiveDateTime, Utc};
use minijinja::ErrorKind;
use std::fmt::Write as _;
use std::time::SystemTime;

/// `now` by a format. A time without a zone has no name of one, and its seconds are whole.
pub(crate) fn strftime(now: NaiveDateTime, format: &str) -> Result<String, minijinja::Error> {
    let items = StrftimeItems::new(format).map(|item| match item {
        Item::Numeric(Numeric::Nanosecond, _) => Item::Literal("000000"),
        Item::Fixed(Fixed::TimezoneName | Fixed::TimezoneOffset) => Item::Literal(""),
        item => item,
    });
    let mut out = String::new();
    let unknown = |_| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: unknown directive in '{format}'"));
    write!(out, "{}", now.format_with_items(items)).map_err(unknown)?;
    Ok(out)
}

/// The clock's time in UTC.
pub(crate) fn utc_now() -> NaiveDateTime {
    DateTime::<Utc>::from(SystemTime::now()).naive_utc()
}
