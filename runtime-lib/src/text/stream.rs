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
}

impl Stream {
    /// A stream of what follows these ids, whose text is known: the first that comes keeps the space before it, say.
    pub fn behind(text: &Text, ids: &[u32]) -> Result<Stream, TextError> {
        let mut context: Vec<u32> = ids.iter().copied().rev().filter(|id| !text.leaves_out(*id)).take(MAX_PENDING_TOKENS).collect();
        context.reverse();
        Ok(Stream { context: context.len(), printed: text.decode(&context, true)?, ids: context })
    }

    /// Takes the next id; gives the text that became certain, often empty.
    pub fn push(&mut self, text: &Text, id: u32) -> Result<String, TextError> {
        // A run of them would be decoded again and again.
        if text.leaves_out(id) {
            return Ok(String::new());
        }
        self.ids.push(id);
        let new = self.waiting(text)?;
        let unfinished = new.ends_with('\u{fffd}') && self.ids.len() - self.context <= MAX_PENDING_TOKENS;
        if unfinished || new.is_empty() {
            return Ok(String::new());
        }
        self.ids.drain(..self.context);
        self.context = self.ids.len();
        self.printed = text.decode(&self.ids, true)?;
        Ok(new)
    }

    /// The text of ids that still wait; bytes that never became a character are U+FFFD.
    pub fn finish(&mut self, text: &Text) -> Result<String, TextError> {
        let new = self.waiting(text)?;
        *self = Self::default();
        Ok(new)
    }

    fn waiting(&self, text: &Text) -> Result<String, TextError> {
        let whole = text.decode(&self.ids, true)?;
        match whole.strip_prefix(&self.printed) {
            Some(new) => Ok(new.to_owned()),
            // A run of bytes with a wrong one is no text as a whole, not even what was printed of it.
            None => text.decode(&self.ids[self.context..], true),
        }
    }
}
