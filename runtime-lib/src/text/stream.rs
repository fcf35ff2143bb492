//! Text piece by piece while ids arrive.
//!
//! In: ids, one by one. Out: the text that became certain ([`Stream`]).

use super::{Text, TextError};

/// A character never has more than four bytes; more pending tokens than this are not the start of one.
const MAX_PENDING_TOKENS: usize = 8;

/// Turns ids that arrive one by one into text, piece by piece, and never gives half a character.
///
/// The last printed tokens stay as context, because decoders look at their neighbours (leading spaces, byte fallback).
#[derive(Default)]
pub struct Stream {
    /// `ids[..context]` are printed, the others wait.
    pub(super) ids: Vec<u32>,
    context: usize,
    /// Text of `ids[..context]`.
    printed: String,
    keep_special: bool,
}

impl Stream {
    /// A stream that also gives the text of special tokens when `keep_special`.
    pub fn new(keep_special: bool) -> Self {
        Self { keep_special, ..Self::default() }
    }

    /// Takes the next id; gives the text that became certain, often empty.
    pub fn push(&mut self, text: &Text, id: u32) -> Result<String, TextError> {
        // A run of them would be decoded again and again.
        if text.leaves_out(id, !self.keep_special) {
            return Ok(String::new());
        }
        self.ids.push(id);
        let whole = text.decode(&self.ids, !self.keep_special)?;
        let unfinished = whole.ends_with('\u{fffd}') && self.ids.len() - self.context <= MAX_PENDING_TOKENS;
        let new = rest_after(&whole, &self.printed);
        if unfinished || new.is_empty() {
            return Ok(String::new());
        }
        let new = new.to_owned();
        self.ids.drain(..self.context);
        self.context = self.ids.len();
        self.printed = text.decode(&self.ids, !self.keep_special)?;
        Ok(new)
    }

    /// The text of ids that still wait; bytes that never became a character are U+FFFD.
    pub fn finish(&mut self, text: &Text) -> Result<String, TextError> {
        let whole = text.decode(&self.ids, !self.keep_special)?;
        let new = match whole.starts_with(&self.printed) {
            true => rest_after(&whole, &self.printed).to_owned(),
            // A run of bytes with a cut end is no text as a whole, not even what was printed of it.
            false => text.decode(&self.ids[self.context..], !self.keep_special)?,
        };
        *self = Self::new(self.keep_special);
        Ok(new)
    }
}

fn rest_after<'t>(whole: &'t str, printed: &str) -> &'t str {
    let common: usize = whole.chars().zip(printed.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    &whole[common..]
}
