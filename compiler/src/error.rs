//! The one error type of the driver. It decides the line that the user sees and the exit code.
//!
//! ```text
//! error[E8-output]: /data/chat: cannot be created, expected a writable directory, found permission denied
//! help: choose another place with -o
//! ```
//! Three kinds are kept apart: the user's input (2 to 7), the machine (8), and our own mistakes (70).

use rcompile_message::{LINE_MAX, cut, escape};
use std::fmt;
use std::path::Path;

/// Why `rcompile` stops.
#[derive(Debug)]
pub enum Error {
    /// The command line. Exit code 2.
    Usage {
        /// What is wrong.
        what: String,
        /// How to write it.
        help: Option<String>,
    },
    /// The model directory is refused. Exit code 3 to 7.
    Model(rcompile_models::Error),
    /// Known and well-formed, but not something that this version does. Exit code 6.
    Unsupported {
        /// Flag, field or verb.
        place: String,
        /// What, expected, found.
        what: String,
        /// What would work.
        help: Option<String>,
    },
    /// Too large. Exit code 7.
    Limit {
        /// What is too large.
        place: String,
        /// What, expected, found.
        what: String,
    },
    /// A file that we write, or one that is not what we wrote. Exit code 8.
    Output {
        /// The file.
        path: String,
        /// What, expected, found.
        what: String,
        /// What would work.
        help: Option<String>,
    },
    /// A program that we start. Exit code 8.
    Toolchain {
        /// The program.
        program: String,
        /// What it did, with its last line.
        what: String,
        /// Which package brings it.
        help: Option<String>,
    },
    /// An executable of ours that a verb runs, or a file that it is given to work on.
    Run {
        /// Exit code: 3 to 7, or the executable's own.
        code: i32,
        /// What the code in brackets ends with.
        topic: String,
        /// The file.
        path: String,
        /// What, expected, found; or what the executable says.
        what: String,
        /// What would work.
        help: Option<String>,
    },
    /// A signal that ends a process arrived. Exit code 128 + signal.
    Interrupted(i32),
    /// A broken invariant of ours. Exit code 70.
    Bug {
        /// Stage or pass.
        place: String,
        /// What does not hold.
        what: String,
        /// Lines that say more of it, for us.
        detail: String,
    },
}

/// Bytes of what a line says of its place.
const PLACE_MAX: usize = 160;

/// The line of something worth saying that does not stop a build: `warning[W-topic]: place: what`, of at most [`LINE_MAX`] bytes.
pub fn warning(topic: &str, place: &str, what: &str) -> String {
    cut(&format!("warning[W-{topic}]: {}: {what}", cut(place, PLACE_MAX)), LINE_MAX)
}

impl Error {
    /// An output error from an operation on `path`.
    pub fn output(path: &Path, doing: &str, error: &std::io::Error) -> Error {
        let help = match error.kind() {
            std::io::ErrorKind::StorageFull => Some("free space on that file system, or choose another place".to_string()),
            std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => Some("choose a writable place".to_string()),
            _ => None,
        };
        Error::Output { path: path.display().to_string(), what: format!("{doing} failed: {error}"), help }
    }

    /// Something that must not happen, whatever the input.
    pub fn bug(place: impl fmt::Display, what: impl fmt::Display) -> Error {
        Error::Bug { place: place.to_string(), what: what.to_string(), detail: String::new() }
    }

    /// The same, with lines that say more of it.
    pub fn bug_in(place: impl fmt::Display, what: impl fmt::Display, detail: impl fmt::Display) -> Error {
        Error::Bug { place: place.to_string(), what: what.to_string(), detail: detail.to_string() }
    }

    /// The system gives us no thread.
    pub fn threads(error: impl fmt::Display) -> Error {
        Error::Limit { place: "threads".into(), what: format!("cannot be made: {error}") }
    }

    /// A usage error of a verb.
    pub fn usage(verb: &str, what: impl fmt::Display) -> Error {
        Error::Usage { what: what.to_string(), help: Some(format!("rcompile {verb} --help")) }
    }

    /// Exit code of the process.
    pub fn exit_code(&self) -> i32 {
        match self {
            Error::Usage { .. } => 2,
            Error::Model(e) => e.exit_code(),
            Error::Unsupported { .. } => 6,
            Error::Limit { .. } => 7,
            Error::Output { .. } | Error::Toolchain { .. } => 8,
            Error::Run { code, .. } => *code,
            Error::Interrupted(signal) => 128 + signal,
            Error::Bug { .. } => 70,
        }
    }

    /// `help:` lines.
    pub fn help(&self) -> Option<&str> {
        match self {
            Error::Model(e) => e.help.as_deref(),
            Error::Usage { help, .. }
            | Error::Unsupported { help, .. }
            | Error::Output { help, .. }
            | Error::Toolchain { help, .. }
            | Error::Run { help, .. } => help.as_deref(),
            Error::Bug { .. } => Some("this is a bug in rcompile: please report it with the command line and the model's config.json"),
            Error::Limit { .. } | Error::Interrupted(_) => None,
        }
    }

    /// The error as lines for stderr: exactly one `error[CODE]` line, what is for us alone, then help.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![self.to_string()];
        if let Error::Bug { detail, .. } = self {
            lines.extend(detail.lines().map(|l| format!("detail: {}", escape(l))));
        }
        lines.extend(self.help().into_iter().flat_map(str::lines).map(|l| format!("help: {}", escape(l))));
        lines
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joined;
        let (topic, place, what) = match self {
            Error::Model(e) => return e.fmt(f),
            Error::Usage { what, .. } => ("usage", "command line", what.as_str()),
            Error::Unsupported { place, what, .. } => ("unsupported", place.as_str(), what.as_str()),
            Error::Limit { place, what } => ("limit", place.as_str(), what.as_str()),
            Error::Output { path, what, .. } => ("output", path.as_str(), what.as_str()),
            Error::Toolchain { program, what, .. } => ("toolchain", program.as_str(), what.as_str()),
            Error::Run { topic, path, what, .. } => (topic.as_str(), path.as_str(), what.as_str()),
            Error::Interrupted(signal) => {
                let name = signal_hook::low_level::signal_name(*signal).unwrap_or("a signal");
                return write!(f, "error[E{}-signal]: interrupted by {name}", self.exit_code());
            }
            Error::Bug { place, what, .. } => {
                joined = what.lines().collect::<Vec<_>>().join("; ");
                ("internal", place.as_str(), joined.as_str())
            }
        };
        let line = format!("error[E{}-{topic}]: {}: {}", self.exit_code(), cut(place, PLACE_MAX), escape(what));
        f.write_str(&cut(&line, LINE_MAX))
    }
}

impl std::error::Error for Error {}

impl From<rcompile_models::Error> for Error {
    fn from(error: rcompile_models::Error) -> Error {
        Error::Model(error)
    }
}

impl From<rcompile_codegen::Error> for Error {
    fn from(error: rcompile_codegen::Error) -> Error {
        match error {
            rcompile_codegen::Error::Target(what) => {
                Error::Unsupported { place: "--target, --cpu".into(), what, help: Some("rcompile targets lists what is known".into()) }
            }
            other => Error::bug_in("codegen", "breaks an invariant", other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_short_line_and_the_code() {
        let long = "x\u{1b}[2J\n".repeat(1000);
        let e = Error::Output { path: long.clone(), what: long, help: Some("a\nb".into()) };
        let lines = e.lines();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].len() <= LINE_MAX && !lines[0].contains('\u{1b}') && !lines[0].contains('\n'));
        assert!(lines[0].starts_with("error[E8-output]: "));
        let long = "x\u{1b}[2J\n".repeat(1000);
        let line = warning("keep", &long, &long);
        assert!(line.len() <= LINE_MAX && !line.contains('\u{1b}') && !line.contains('\n'));
        assert!(line.starts_with("warning[W-keep]: ") && line.matches("...").count() == 2, "{line}");
        let lines = Error::bug_in("pass", "is wrong", "%1 = mm\n  ^\u{1b}").lines();
        assert_eq!(lines[..3], ["error[E70-internal]: pass: is wrong", "detail: %1 = mm", "detail:   ^\\u{1b}"]);
        assert_eq!((e.exit_code(), Error::Interrupted(2).exit_code(), Error::Interrupted(15).exit_code()), (8, 130, 143));
    }
}
