//! Why a template does not compile or does not render.
//!
//! In: errors of the engine, some with a mark of ours. Out: [`TemplateError`].

use crate::bounds::{LimitReached, OUTPUT_BYTES_MAX};
use minijinja::ErrorKind;
use std::fmt;

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
    /// The machine has no memory or thread for it.
    Machine,
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
        match self.line {
            0 => write!(f, "chat template: {}", self.message),
            line => write!(f, "chat template, line {line}: {}", self.message),
        }
    }
}

impl std::error::Error for TemplateError {}

/// Marks an error of `raise_exception` on its way through the engine.
#[derive(Debug)]
pub(crate) struct Raised(pub String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// What went wrong, in our words.
pub(crate) fn template_error(e: &minijinja::Error) -> TemplateError {
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
