//! The text of `--calibrate`: read, checked, and cut into chunks of tokens.

use crate::error::Error;
use crate::input;
use crate::tokenizer;
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
/// Of longer texts each chunk is tokenised by itself: a tokenizer takes some hundred bytes for each byte of a text.
const WHOLE_BYTES: usize = 1 << 20;
/// Unless that gives few chunks, as where words are very long, and the text is not longer than this; or none, and it is this much of it.
const WHOLE_BYTES_MAX: usize = 8 << 20;
/// How far into a part a word may reach that begins before it.
const WORD_BYTES: usize = 256;

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
    let Some(bytes) = tokenizer::compact(model)? else {
        return Err(Error::Usage { what: "--calibrate without a tokenizer, expected tokenizer.json, found none".into(), help: None });
    };
    let failed = |e: TextError| {
        let e = ModelError::new(tokenizer::kind(&e), name, "file", "cannot be tokenised", "a text that the tokenizer knows", e);
        input::wrong(e.help(HELP))
    };
    let tokenizer = Text::load(&bytes).map_err(failed)?;
    let (leading, mut trailing) = tokenizer.special_around().map_err(failed)?;
    // What continues a text has seen few that end.
    if model.facts().causal {
        trailing.clear();
    }
    let vocab = model.facts().vocab_size as u32;
    let length = CHUNK_TOKENS.min(model.facts().max_positions).min(model.text_limit().unwrap_or(usize::MAX));
    let Some(room) = length.checked_sub(leading.len() + trailing.len()).filter(|r| *r > 0) else {
        return Err(Error::usage("build", format!("--calibrate: {length} positions hold no text")));
    };
    let mut bodies = match text.len() > WHOLE_BYTES {
        true => of_parts(&tokenizer, text, room).map_err(failed)?,
        false => vec![],
    };
    if bodies.is_empty() || bodies.len() < CHUNKS / 2 && text.len() <= WHOLE_BYTES_MAX {
        let text = &text[..text.floor_char_boundary(WHOLE_BYTES_MAX)];
        let ids = tokenizer.encode(text, false).map_err(failed)?;
        let whole = ids.len() / room;
        if whole == 0 {
            let expected = format!("at least {room} tokens, one chunk");
            let e = ModelError::new(Kind::Malformed, name, "file", "is too short", expected, format!("{} tokens", ids.len()));
            return Err(input::wrong(e.help(format!("{CHUNKS} chunks or more, {} tokens, are best", CHUNKS * room))));
        }
        let count = whole.min(CHUNKS);
        let body = |i: usize| ids[i * whole / count * room..][..room].to_vec();
        bodies = (0..count).map(body).collect();
    }
    if let Some(id) = bodies.iter().flatten().find(|id| **id >= vocab) {
        return Err(Error::bug("calibrate tokens", format_args!("id {id} of {vocab}")));
    }
    Ok(bodies.into_iter().map(|body| [&leading[..], &body, &trailing[..]].concat()).collect())
}

/// The first `room` tokens of each of [`CHUNKS`] parts of equal length, from the first white space on where one is near; none of parts that
/// have fewer.
fn of_parts(tokenizer: &Text, text: &str, room: usize) -> Result<Vec<Vec<u32>>, TextError> {
    // At first; tokens of most texts have about four bytes.
    let bytes_at_first = 16 * room;
    let cut = |i: usize| text.floor_char_boundary((text.len() as u64 * i as u64 / CHUNKS as u64) as usize);
    let mut chunks = vec![];
    for i in 0..CHUNKS {
        let part = &text[cut(i)..cut(i + 1)];
        let begin = part[..part.floor_char_boundary(WORD_BYTES)].find(char::is_whitespace).filter(|_| i > 0);
        let part = &part[begin.unwrap_or(0)..];
        let mut bytes = bytes_at_first;
        loop {
            let piece = &part[..part.floor_char_boundary(bytes)];
            let mut ids = tokenizer.encode(piece, false)?;
            // One more, since a word may have been cut at the end.
            if ids.len() >= room + usize::from(piece.len() < part.len()) {
                ids.truncate(room);
                chunks.push(ids);
                break;
            }
            if piece.len() == part.len() {
                break;
            }
            bytes *= 4;
        }
    }
    Ok(chunks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_models::OpenOptions;

    #[test]
    fn a_long_text_is_tokenised_in_parts() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
        let model = rcompile_models::open(&demo.join("model"), &OpenOptions::default()).unwrap();
        let bytes = tokenizer::compact(&model).unwrap().unwrap();
        let tokenizer = Text::load(&bytes).unwrap();
        let text = std::fs::read_to_string(demo.join("held_out.txt")).unwrap().repeat(30);
        assert!(text.len() > WHOLE_BYTES);
        let part = text.len() / CHUNKS;
        for room in [8, 64, part / 8] {
            let chunks = of_parts(&tokenizer, &text, room).unwrap();
            assert_eq!(chunks.len(), CHUNKS);
            for (i, ids) in chunks.iter().enumerate() {
                // Where the part begins, or behind the word that does.
                let near = &text[text.floor_char_boundary(i * part)..text.floor_char_boundary((i + 1) * part + WORD_BYTES)];
                assert!(ids.len() == room && near.contains(&tokenizer.decode(ids, false).unwrap()), "{i}: {room}");
            }
        }
        // No part has as many tokens as bytes.
        assert!(of_parts(&tokenizer, &text, part).unwrap().is_empty());
        // As a build sees it.
        let all = chunks("held_out", &text, &model).unwrap();
        assert_eq!((all.len(), all[0].len()), (CHUNKS, CHUNK_TOKENS.min(model.facts().max_positions)));
        let whole = tokenizer.encode(&text[..4096], false).unwrap();
        assert!(all[0].windows(64).any(|ids| *ids == whole[..64]), "the text's beginning");
    }
}
