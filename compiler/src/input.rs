//! Files that a flag or an argument names, beside the model directory: read with a limit, and refused by name.

use crate::error::Error;
use rcompile_models::Error as ModelError;
use std::fmt::Display;
use std::io;
use std::path::Path;

/// A file that is refused; `topic` says what it is to us.
pub(crate) fn refused(code: i32, topic: &str, path: &Path, what: impl Display) -> Error {
    Error::Run { code, topic: topic.into(), path: path.display().to_string(), what: what.to_string(), help: None }
}

/// What is wrong inside such a file, said as of files of a model directory.
pub(crate) fn wrong(error: ModelError) -> Error {
    let (code, what) = (error.exit_code(), format!("{}: {}", error.place, error.what));
    Error::Run { code, topic: "input".into(), path: error.file, what, help: error.help }
}

/// A file that cannot be read.
pub(crate) fn missing(path: &Path, topic: &str, error: &io::Error) -> Error {
    refused(3, topic, path, format_args!("cannot be read: {error}"))
}

/// The bytes of the file that `flag` names; `help` says what it takes. Errors: missing or no file (3), more than `bytes_max` (7).
pub(crate) fn read(flag: &str, path: &Path, bytes_max: u64, help: &str) -> Result<Vec<u8>, Error> {
    let refuse = |code, what: &dyn Display| {
        let (what, help) = (format!("{flag}: {what}"), Some(help.to_owned()));
        Err(Error::Run { code, topic: "input".into(), path: path.display().to_string(), what, help })
    };
    match std::fs::metadata(path) {
        Ok(m) if !m.is_file() => return refuse(3, &"is not a regular file, expected a file, found something else"),
        Ok(m) if m.len() > bytes_max => {
            return refuse(7, &format_args!("is too large, expected at most {bytes_max} bytes, found {}", m.len()));
        }
        _ => {}
    }
    std::fs::read(path).or_else(|e| refuse(3, &format_args!("cannot be read, expected a file, found {e}")))
}
