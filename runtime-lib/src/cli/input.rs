//! What a verb works on: a text, a file or token ids, as one of its flags says.

use clap::ArgMatches;

use super::args::{InputArgs, TextArgs, only_one, token_list};
use super::error::Failure;
use super::streams::read_text;

/// What a verb works on.
pub(super) enum Input {
    /// `-p`
    Prompt(String),
    /// `-f`
    File(String),
    /// `--tokens`
    Tokens(Vec<u32>),
}

/// The input that the flags name; `file` is what the verb calls a file.
pub(super) fn input(args: &InputArgs, flags: &ArgMatches, file: &str) -> Result<Input, Failure> {
    match only_one(flags, &["prompt", "file", "tokens"])? {
        Some("prompt") => Ok(Input::Prompt(args.text.prompt.clone().unwrap_or_default())),
        Some("file") => Ok(Input::File(read_text(args.text.file.as_deref())?)),
        Some(_) => Ok(Input::Tokens(token_list(args.tokens.as_deref().unwrap_or(""))?)),
        None => Err(none(&format!("-p TEXT, -f {file}, --tokens 1,2,3"))),
    }
}

/// The same where ids are no input.
pub(super) fn text(args: &TextArgs, flags: &ArgMatches) -> Result<String, Failure> {
    match only_one(flags, &["prompt", "file"])? {
        Some("prompt") => Ok(args.prompt.clone().unwrap_or_default()),
        Some(_) => read_text(args.file.as_deref()),
        None => Err(none("-p TEXT, -f FILE")),
    }
}

fn none(flags: &str) -> Failure {
    Failure::usage("no input").help(format!("give one of {flags}"))
}
