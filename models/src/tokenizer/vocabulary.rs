//! The tokens of a tokenizer: every id belongs to one token, and there is no hole; merges join tokens that exist.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::{FILE, malformed};
use crate::error::{Error, Kind, cut};
use crate::json;

/// Longest word that a WordPiece model may take apart; known ones have 100.
const WORD_CHARS_MAX: u64 = 1000;

/// The tokens of a tokenizer by text and by id.
pub(super) struct Vocabulary<'a> {
    pub(super) model: &'a str,
    pub(super) size: usize,
    pub(super) ids: HashMap<&'a str, u32>,
    pub(super) added: Vec<(&'a str, u32)>,
    pub(super) longest_chars: usize,
}

/// Collects all tokens and checks that ids are unique and dense.
pub(super) fn read<'a>(root: &'a Map<String, Value>, model: &'a Map<String, Value>) -> Result<Vocabulary<'a>, Error> {
    let kind = kind(model)?;
    let (listed, added) = (listed(model, kind)?, added(root)?);
    let mut table = Table::new(listed.len() + added.len());
    listed.iter().try_for_each(|(text, id)| table.list(text, *id))?;
    added.iter().try_for_each(|(text, id)| table.add(text, *id))?;
    let size = table.dense_size()?;
    let ids = table.ids;
    let longest_chars = ids.keys().map(|text| text.chars().count()).max().unwrap_or(0);
    let added = added.into_iter().map(|(text, _)| (text, ids[text])).collect();
    Ok(Vocabulary { model: kind, size, ids, added, longest_chars })
}

/// Which kind of model it is.
fn kind(model: &Map<String, Value>) -> Result<&str, Error> {
    let kinds = ["BPE", "WordPiece", "WordLevel", "Unigram"];
    match model.get("type") {
        Some(Value::String(kind)) if kinds.contains(&kind.as_str()) => Ok(kind),
        Some(other) => {
            let expected = format!("one of {}", kinds.join(", "));
            Err(Error::new(Kind::Unsupported, FILE, "model.type", "is not supported", expected, json::show(other)))
        }
        // Files from before the field: the crate tries the kinds in this order.
        None if model.contains_key("merges") => Ok("BPE"),
        None if model.get("vocab").is_some_and(Value::is_array) => Ok("Unigram"),
        None if model.contains_key("continuing_subword_prefix") => Ok("WordPiece"),
        None => Ok("WordLevel"),
    }
}

/// Tokens of the model with their ids, as listed.
fn listed<'a>(model: &'a Map<String, Value>, kind: &str) -> Result<Vec<(&'a str, u64)>, Error> {
    match model.get("vocab") {
        Some(Value::Object(map)) if kind != "Unigram" => map
            .iter()
            .map(|(text, id)| match id.as_u64() {
                Some(id) => Ok((text.as_str(), id)),
                None => Err(malformed(text, "has no id", "an integer >= 0", json::show(id))),
            })
            .collect(),
        Some(Value::Array(pieces)) if kind == "Unigram" => pieces
            .iter()
            .enumerate()
            .map(|(id, piece)| match (piece.get(0).and_then(Value::as_str), piece.get(1).and_then(Value::as_f64)) {
                (Some(text), Some(_)) => Ok((text, id as u64)),
                _ => Err(malformed(&format!("model.vocab[{id}]"), "is malformed", "[text, score]", json::show(piece))),
            })
            .collect(),
        other => {
            let expected = if kind == "Unigram" { "a list" } else { "an object" };
            Err(malformed("model.vocab", "is missing", expected, other.map_or("nothing", json::kind_of)))
        }
    }
}

/// Added tokens with their ids, as listed.
fn added(root: &Map<String, Value>) -> Result<Vec<(&str, u64)>, Error> {
    let list = match root.get("added_tokens") {
        None | Some(Value::Null) => &[],
        Some(Value::Array(list)) => list.as_slice(),
        Some(other) => return Err(malformed("added_tokens", "has the wrong type", "a list", json::kind_of(other))),
    };
    list.iter()
        .enumerate()
        .map(|(index, token)| match (token.get("content").and_then(Value::as_str), token.get("id").and_then(Value::as_u64)) {
            (Some(text), Some(id)) => Ok((text, id)),
            _ => {
                let place = format!("added_tokens[{index}]");
                Err(malformed(&place, "is malformed", "an object with id and content", json::show(token)))
            }
        })
        .collect()
}

/// Ids by text and texts by id, as they are filled.
struct Table<'a> {
    ids: HashMap<&'a str, u32>,
    /// As long as there are tokens: no id can be larger, so that no table is larger than the file.
    text_of: Vec<Option<&'a str>>,
}

impl<'a> Table<'a> {
    fn new(tokens: usize) -> Table<'a> {
        Table { ids: HashMap::with_capacity(tokens), text_of: vec![None; tokens] }
    }
    /// A token of the model, which has an id of its own.
    fn list(&mut self, text: &'a str, id: u64) -> Result<(), Error> {
        let slot = self.slot(text, id)?;
        if let Some(other) = slot {
            let found = format!("{id}, which {} has", cut(other, 40));
            return Err(malformed(&place(text), "shares its id", "an id of its own", found));
        }
        *slot = Some(text);
        match self.ids.insert(text, id as u32) {
            Some(first) => Err(malformed(&place(text), "is listed twice", &format!("one id, as {first}"), id)),
            None => Ok(()),
        }
    }
    /// An added token, which may be listed before with the same id.
    fn add(&mut self, text: &'a str, id: u64) -> Result<(), Error> {
        let known = self.ids.get(text).copied();
        let conflict = |expected: String| Error::new(Kind::Disagree, FILE, place(text), "is added with a taken id", expected, id);
        let slot = self.slot(text, id)?;
        match (known, *slot) {
            (Some(known), _) if u64::from(known) != id => return Err(conflict(format!("id {known}, as listed before"))),
            (None, Some(other)) => return Err(conflict(format!("an id that is not {}'s", cut(other, 40)))),
            _ => *slot = Some(text),
        }
        self.ids.insert(text, id as u32);
        Ok(())
    }
    fn slot(&mut self, text: &str, id: u64) -> Result<&mut Option<&'a str>, Error> {
        let bound = self.text_of.len();
        let slot = usize::try_from(id).ok().and_then(|id| self.text_of.get_mut(id));
        slot.ok_or_else(|| malformed(&place(text), "has an id that leaves holes", &format!("an id below {bound}"), id))
    }
    /// How many tokens there are, which have the ids from 0 on.
    fn dense_size(&self) -> Result<usize, Error> {
        let size = self.text_of.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let Some(hole) = self.text_of[..size].iter().position(Option::is_none) else { return Ok(size) };
        let after = self.text_of[hole..].iter().flatten().next().copied().unwrap_or_default();
        let found = format!("id {} after {hole} tokens", self.ids.get(after).copied().unwrap_or_default());
        Err(malformed(&place(after), "follows a hole", &format!("a token with id {hole}"), found))
    }
}

/// A token's text as the place of an error.
fn place(text: &str) -> String {
    if text.is_empty() { "\"\"".to_string() } else { text.to_string() }
}

/// Merges and unknown tokens.
pub(super) fn check_model(model: &Map<String, Value>, vocabulary: &Vocabulary<'_>) -> Result<(), Error> {
    let text_at = |key: &str| model.get(key).and_then(Value::as_str);
    match vocabulary.model {
        "BPE" => {
            let prefix = text_at("continuing_subword_prefix").unwrap_or_default();
            let Some(Value::Array(merges)) = model.get("merges") else {
                let found = model.get("merges").map_or("nothing", json::kind_of);
                return Err(malformed("model.merges", "is missing", "a list", found));
            };
            for (index, merge) in merges.iter().enumerate() {
                check_merge(index, merge, prefix, vocabulary)?;
            }
            if let Some(dropout) = model.get("dropout").and_then(Value::as_f64).filter(|d| *d != 0.0) {
                let what = "makes the result random";
                return Err(Error::new(Kind::Unsupported, FILE, "model.dropout", what, "none", dropout));
            }
        }
        "WordPiece" => {
            let unknown = text_at("unk_token").unwrap_or("[UNK]");
            if !vocabulary.ids.contains_key(unknown) {
                return Err(malformed("model.unk_token", "is not in the vocabulary", "a token", format!("`{unknown}`")));
            }
            // The search for the longest piece of a word takes its length to the power of three.
            if let Some(most) = model.get("max_input_chars_per_word").and_then(Value::as_u64).filter(|most| *most > WORD_CHARS_MAX) {
                let (place, expected) = ("model.max_input_chars_per_word", format!("at most {WORD_CHARS_MAX}"));
                return Err(Error::new(Kind::Limit, FILE, place, "is too large", expected, most));
            }
        }
        _ => {}
    }
    Ok(())
}

fn check_merge(index: usize, merge: &Value, prefix: &str, vocabulary: &Vocabulary<'_>) -> Result<(), Error> {
    let place = format!("model.merges[{index}]");
    let pair = match merge {
        // Lines of the old text format may be comments.
        Value::String(line) if line.starts_with("#version") => return Ok(()),
        Value::String(line) => line.split_once(' ').filter(|(_, right)| !right.contains(' ')),
        Value::Array(pair) if pair.len() == 2 => pair[0].as_str().zip(pair[1].as_str()),
        _ => None,
    };
    let Some((left, right)) = pair else {
        return Err(malformed(&place, "is malformed", "two tokens", json::show(merge)));
    };
    let Some(stem) = right.strip_prefix(prefix) else {
        let expected = format!("a right side that starts with `{}`", cut(prefix, 20));
        return Err(malformed(&place, "does not continue a word", &expected, format!("`{}`", cut(right, 40))));
    };
    let merged = format!("{left}{stem}");
    for token in [left, right, &merged] {
        if !vocabulary.ids.contains_key(token) {
            let found = format!("`{}`", cut(token, 60));
            return Err(malformed(&place, "names a token that is not in the vocabulary", "known tokens", found));
        }
    }
    Ok(())
}
