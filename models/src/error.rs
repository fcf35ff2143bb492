//! The one error type of this crate, and the warnings.
//!
//! Every complaint about a model directory is one line that says where, what, what would be right and what was there:
//! ```text
//! error[E4-config-json]: config.json: hidden_size: is out of range, expected an integer >= 1, found 0
//! ```
//! The code is `E`, the exit code and the topic, which follows from the file's name, so it stays the same between
//! versions: `config-json`, `safetensors`, `safetensors-index`, `tokenizer-json`, `chat-template-jinja`, ..., and
//! `model-dir` where the directory itself is meant. Warnings are `W-` and the topic.
//!
//! File, field and tensor names come from strangers: control and direction-changing characters are escaped, long
//! names are cut, and a line never exceeds [`LINE_MAX`] bytes.

pub(crate) use rcompile_message::{LINE_MAX, cut, escape};
use std::fmt;

/// What kind of fault was found; it decides the exit code of `rcompile`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file is missing, unreadable, outside the model directory, or changed while it was read. Exit code 3.
    Missing,
    /// The bytes of one file are wrong in themselves. Exit code 4.
    Malformed,
    /// Two parts, each fine in itself, contradict each other. Exit code 5.
    Disagree,
    /// Well-formed, but not something that this version compiles. Exit code 6.
    Unsupported,
    /// Larger than a limit of time or memory allows. Exit code 7.
    Limit,
}

impl Kind {
    /// The exit code that stands for this kind on the command line.
    pub fn exit_code(self) -> i32 {
        match self {
            Kind::Missing => 3,
            Kind::Malformed => 4,
            Kind::Disagree => 5,
            Kind::Unsupported => 6,
            Kind::Limit => 7,
        }
    }
}

/// A model directory that is refused. `Display` gives the one line; `help` is printed on lines of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Which kind, and with it the exit code.
    pub kind: Kind,
    /// The file, relative to the model directory.
    pub file: String,
    /// The field, tensor, token or position in that file; `file` where the whole file is meant.
    pub place: String,
    /// What is wrong, what was expected and what was found.
    pub what: String,
    /// What the user can do about it, where we know.
    pub help: Option<String>,
}

impl Error {
    /// An error whose three parts read "`what`, expected `expected`, found `found`".
    pub fn new(
        kind: Kind,
        file: impl Into<String>,
        place: impl Into<String>,
        what: impl fmt::Display,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Error {
        let what = cut(&what.to_string(), 110);
        let expected = cut(&expected.to_string(), 150);
        let found = cut(&found.to_string(), 110);
        Error { kind, file: file.into(), place: place.into(), what: format!("{what}, expected {expected}, found {found}"), help: None }
    }

    /// The same error with a hint for the user.
    pub fn help(mut self, help: impl Into<String>) -> Error {
        self.help = Some(help.into());
        self
    }

    /// The exit code of `rcompile` for this error.
    pub fn exit_code(&self) -> i32 {
        self.kind.exit_code()
    }

    /// The stable code printed in brackets, such as `E4-config-json`.
    pub fn code(&self) -> String {
        // What is wrong with a directory is not wrong with the file that it was taken for.
        let topic = if self.place == DIRECTORY { topic("") } else { topic(&self.file) };
        format!("E{}-{topic}", self.exit_code())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (file, place, what) = (cut(&self.file, 70), cut(&self.place, 90), escape(&self.what));
        let line = format!("error[{}]: {file}: {place}: {what}", self.code());
        f.write_str(&cut(&line, LINE_MAX))
    }
}

impl std::error::Error for Error {}

/// Something worth saying that does not stop the build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The file, relative to the model directory.
    pub file: String,
    /// The field or tensor.
    pub place: String,
    /// What was seen and what happens now.
    pub what: String,
}

impl Warning {
    /// A warning about `place` in `file`.
    pub fn new(file: impl Into<String>, place: impl Into<String>, what: impl Into<String>) -> Warning {
        Warning { file: file.into(), place: place.into(), what: what.into() }
    }

    /// The stable code printed in brackets, such as `W-config-json`.
    pub fn code(&self) -> String {
        format!("W-{}", topic(&self.file))
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (file, place, what) = (cut(&self.file, 70), cut(&self.place, 90), escape(&self.what));
        let line = format!("warning[{}]: {file}: {place}: {what}", self.code());
        f.write_str(&cut(&line, LINE_MAX))
    }
}

/// Place of what is wrong with the model directory itself.
pub(crate) const DIRECTORY: &str = "directory";

/// The topic part of a code, from a closed list; file names of strangers never get into a code.
fn topic(file: &str) -> &'static str {
    let name = file.rsplit('/').next().unwrap_or(file);
    match name {
        "config.json" if file.contains('/') => "pooling-config",
        "config.json" => "config-json",
        "generation_config.json" => "generation-config",
        "tokenizer.json" => "tokenizer-json",
        "tokenizer_config.json" => "tokenizer-config",
        "special_tokens_map.json" => "special-tokens-map",
        "chat_template.jinja" => "chat-template",
        "modules.json" => "modules-json",
        "config_sentence_transformers.json" => "config-sentence-transformers",
        "sentence_bert_config.json" => "sentence-bert-config",
        _ if name.ends_with(".safetensors.index.json") => "safetensors-index",
        _ if name.ends_with(".safetensors") => "safetensors",
        _ => "model-dir",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_with_code_and_three_parts() {
        let e = Error::new(Kind::Malformed, "config.json", "hidden_size", "is out of range", "an integer >= 1", 0);
        assert_eq!(e.to_string(), "error[E4-config-json]: config.json: hidden_size: is out of range, expected an integer >= 1, found 0");
        assert_eq!(e.exit_code(), 4);
    }

    #[test]
    fn hostile_names_are_escaped_and_cut() {
        let name = format!("\u{1b}[2J\n\u{202e}{}", "\u{1b}é".repeat(500_000));
        let e = Error::new(Kind::Disagree, &name, &name, &name, &name, &name);
        let line = e.to_string();
        assert!(line.len() <= LINE_MAX, "{}", line.len());
        assert!(!line.chars().any(|c| c.is_control() || c == '\u{202e}'), "{line}");
        assert!(line.starts_with("error[E5-model-dir]: \\u{1b}[2J\\n\\u{202e}"), "{line}");
        assert!(line.contains(", expected ") && line.contains(", found "), "{line}");
    }
}
