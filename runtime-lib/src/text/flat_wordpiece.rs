//! A WordPiece model that is searched where its tables lie.
//!
//! In: a [`Vocabulary`]. Out: the tokens of a word, exactly those of the `tokenizers` crate: the longest piece that the rest of the word
//! begins with, again and again (Wu et al., 2016); a word that does not work out so is unknown.

use serde::Deserialize;

use super::vocabulary::Vocabulary;

/// The settings of a WordPiece model, as in `tokenizer.json`.
#[derive(Debug, Deserialize)]
pub(super) struct WordPieceSettings {
    unk_token: String,
    continuing_subword_prefix: String,
    max_input_chars_per_word: usize,
}

/// A WordPiece model that is searched where it lies.
pub(super) struct FlatWordPiece<'a> {
    pub(super) settings: WordPieceSettings,
    pub(super) vocabulary: Vocabulary<'a>,
}

impl FlatWordPiece<'_> {
    /// Tokens of `word`: id and length.
    pub(super) fn tokens(&self, word: &str) -> tokenizers::Result<Vec<(u32, usize)>> {
        let is_long = word.chars().count() > self.settings.max_input_chars_per_word;
        if let Some(tokens) = (!is_long).then(|| self.pieces(word)).flatten() {
            return Ok(tokens);
        }
        let unknown = &self.settings.unk_token;
        let id = self.vocabulary.id(unknown).ok_or_else(|| format!("unknown token {unknown:?} has no id"))?;
        Ok(vec![(id, word.len())])
    }

    fn pieces(&self, word: &str) -> Option<Vec<(u32, usize)>> {
        let (mut tokens, mut begin) = (Vec::new(), 0);
        let mut inside = self.settings.continuing_subword_prefix.clone();
        let prefix = inside.len();
        while begin < word.len() {
            let rest = &word[begin..];
            let ends = rest.char_indices().map(|(at, c)| at + c.len_utf8()).rev();
            let (id, len) = ends
                .filter_map(|len| {
                    let piece = if begin == 0 {
                        &rest[..len]
                    } else {
                        inside.truncate(prefix);
                        inside.push_str(&rest[..len]);
                        &inside
                    };
                    Some((self.vocabulary.id(piece)?, len))
                })
                .next()?;
            tokens.push((id, len));
            begin += len;
        }
        Some(tokens)
    }
}
