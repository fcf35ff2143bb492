//! Parser of the text form ([`mod@crate::print`] has the description). Text is untrusted: any bytes give a module or an error with a place,
//! never a panic, with limits on size and nesting. A parsed module may still be wrong: [`crate::verify::verify`] judges that.
//!
//! Besides what is printed, text written by hand may: give values any names (`%h`); leave out the type of a node where it can be inferred;
//! use a parameter as an operand (`mm %x, @fc1.weight`), which makes a `param` node before the user; have comments on lines of their
//! own; leave out `main` where there is one function.

mod attention;
mod module;
#[cfg(test)]
mod tests;
mod tokens;

use crate::ops::AttnExpr;
use crate::types::Module;
use std::str::FromStr;

/// Longest text.
pub const BYTES_MAX: usize = 64 << 20;
/// Deepest nesting of an attention expression.
pub const ATTN_DEPTH_MAX: usize = 100;

/// Text that is not a module.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {what}")]
pub struct ParseError {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// What is wrong.
    pub what: String,
}

/// A place in the text, in bytes; becomes line and column in the end.
type At = usize;
type Fail = (At, String);
type Parsed<T> = Result<T, Fail>;

fn fail<T>(at: At, what: impl Into<String>) -> Parsed<T> {
    Err((at, what.into()))
}

fn number<T: FromStr>(at: At, text: &str) -> Parsed<T> {
    text.parse().map_err(|_| (at, format!("{} does not fit here", text.escape_debug())))
}

fn locate(text: &str, (at, what): Fail) -> ParseError {
    let before = &text.as_bytes()[..at.min(text.len())];
    let start = before.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
    let line = 1 + before.iter().filter(|b| **b == b'\n').count();
    ParseError { line, column: 1 + String::from_utf8_lossy(&before[start..]).chars().count(), what }
}

/// Reads a module.
pub fn parse(text: &str) -> Result<Module, ParseError> {
    if text.len() > BYTES_MAX {
        return Err(ParseError { line: 1, column: 1, what: format!("text is longer than {BYTES_MAX} bytes") });
    }
    module::parse(text).map_err(|e| locate(text, e))
}

/// Reads a module from bytes that may not even be text.
pub fn parse_bytes(bytes: &[u8]) -> Result<Module, ParseError> {
    match std::str::from_utf8(bytes) {
        Ok(text) => parse(text),
        Err(e) => {
            let valid = std::str::from_utf8(&bytes[..e.valid_up_to()]).unwrap_or_default();
            Err(locate(valid, (e.valid_up_to(), "not UTF-8".into())))
        }
    }
}

impl FromStr for Module {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<Module, ParseError> {
        parse(text)
    }
}

impl FromStr for AttnExpr {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<AttnExpr, ParseError> {
        attention::parse(text).map_err(|e| locate(text, e))
    }
}
