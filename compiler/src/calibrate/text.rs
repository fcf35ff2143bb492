//! The text of `--calibrate`: read, checked, and cut into chunks of tokens.

use crate::error::Error;
use crate::input;
use crate::stages;
use rcompile_models::dir::{InputFile, sha256_hex};
use rcompile_models::{Error as ModelError, Kind, Model};
use rcompile_runtime::text::{Text, TextError};
use std::path::Path;

/// Most chunks of a text; a longer text gives as many, spread evenly over it.
pub const CHUNKS: usize = 128;
/// Tokens of a chunk, or as many as the model has positions, or lets a text have.
pub const CHUNK_TOKENS: usize = 512;
/// The flag, and the text's name among the inputs of an executable, wherever it lay.
const INPUT_NAME: &str = "--calibrate";
/// What the flag takes.
const HELP: &str = "--calibrate takes a text like those that the model will read and write, in UTF-8";
/// Larger files are refused: a small part of them would be used.
const BYTES_MAX: u64 = 64 << 20;

/// A text that was read.
#[derive(Clone, Debug)]
pub struct CalibrationText {
    /// Token ids in chunks of equal length, each beginning with those that the tokenizer puts in front of a text; for a model that sees
    /// whole texts each ends with those behind a text too.
    pub chunks: Vec<Vec<u32>>,
    /// For the manifest.
    pub input: InputFile,
}

impl CalibrationText {
    /// Reads a file. Errors: missing or no file (3), empty, not UTF-8 or shorter than a chunk (4), too large (7).
    pub fn read(path: &Path, model: &Model) -> Result<CalibrationText, Error> {
        let name = path.display().to_string();
        let refuse = |kind, what: &str, expected: &str, found: &str| {
            let e = ModelError::new(kind, name.as_str(), "file", what, expected, found);
            Err(input::wrong(e.help(HELP)))
        };
        let bytes = input::read(INPUT_NAME, path, BYTES_MAX, HELP)?;
        let input = InputFile { name: INPUT_NAME.into(), bytes: bytes.len() as u64, sha256: sha256_hex(&bytes) };
        match String::from_utf8(bytes) {
            Ok(text) if text.trim().is_empty() => refuse(Kind::Malformed, "is empty", "a text", "no words"),
            Ok(text) => Ok(CalibrationText { chunks: chunks(&name, &text, model)?, input }),
            Err(e) => refuse(Kind::Malformed, "is not UTF-8", "a text", &format!("other bytes at {}", e.utf8_error().valid_up_to())),
        }
    }
}

/// Cuts the text of file `name`.
fn chunks(name: &str, text: &str, model: &Model) -> Result<Vec<Vec<u32>>, Error> {
    let Some(bytes) = stages::compact_tokenizer(model)? else {
        return Err(Error::Usage { what: "--calibrate without a tokenizer, expected tokenizer.json, found none".into(), help: None });
    };
    let failed = |e: TextError| {
        let e = ModelError::new(stages::kind(&e), name, "file", "cannot be tokenised", "a text that the tokenizer knows", e);
        input::wrong(e.help(HELP))
    };
    let tokenizer = Text::load(&bytes).map_err(failed)?;
    let (leading, mut trailing) = tokenizer.special_around().map_err(failed)?;
    // What continues a text has seen few that end.
    if model.facts().causal {
        trailing.clear();
    }
    let ids = tokenizer.encode(text, false).map_err(failed)?;
    let vocab = model.facts().vocab_size as u32;
    let length = CHUNK_TOKENS.min(model.facts().max_positions).min(model.text_limit().unwrap_or(usize::MAX));
    let Some(room) = length.checked_sub(leading.len() + trailing.len()).filter(|r| *r > 0) else {
        return Err(Error::usage("build", format!("--calibrate: {length} positions hold no text")));
    };
    let whole = ids.len() / room;
    if whole == 0 {
        let expected = format!("at least {room} tokens, one chunk");
        let e = ModelError::new(Kind::Malformed, name, "file", "is too short", expected, format!("{} tokens", ids.len()));
        return Err(input::wrong(e.help(format!("{CHUNKS} chunks or more, {} tokens, are best", CHUNKS * room))));
    }
    if let Some(id) = ids.iter().find(|id| **id >= vocab) {
        return Err(Error::bug("calibrate tokens", format_args!("id {id} of {vocab}")));
    }
    let count = whole.min(CHUNKS);
    let chunk = |i: usize| {
        let at = i * whole / count * room;
        [&leading[..], &ids[at..at + room], &trailing[..]].concat()
    };
    Ok((0..count).map(chunk).collect())
}
