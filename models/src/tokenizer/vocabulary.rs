//! The tokens of a tokenizer: every id belongs to one token, and there is no hole; merges join tokens that exist.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::{FILE, malformed};
use crate::error::{Error, Kind, cut};
use crate::json;

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
    let kinds = ["BPE", "WordPiece", "WordLevel", "Unigram"];
    let kind = match model.get("type") {
        Some(Value::String(kind)) if kinds.contains(&kind.as_str()) => kind.as_str(),
        Some(other) => {
            let expected = format!("one of {}", kinds.join(", "));
            return Err(Error::new(Kind::Unsupported, FILE, "model.type", "is not supported", expected, json::show(other)));
        }
        // Files from before the field: the crate tries the kinds in this order.
        None if model.contains_key("merges") => "BPE",
        None if model.get("vocab").is_some_and(Value::is_array) => "Unigram",
        None if model.contains_key("continuing_subword_prefix") => "WordPiece",
        None => "WordLevel",
    };
    let mut tokens: Vec<(&str, u64)> = Vec::new();
    match model.get("vocab") {
        Some(Value::Object(map)) if kind != "Unigram" => {
            for (text, id) in map {
                let id = id.as_u64().ok_or_else(|| malformed(text, "has no id", "an integer >= 0", json::show(id)))?;
                tokens.push((text, id));
            }
        }
        Some(Value::Array(pieces)) if kind == "Unigram" => {
            for (id, piece) in pieces.iter().enumerate() {
                let text = piece.get(0).and_then(Value::as_str);
                let score = piece.get(1).and_then(Value::as_f64);
                let (Some(text), Some(_)) = (text, score) else {
                    return Err(malformed(&format!("model.vocab[{id}]"), "is malformed", "[text, score]", json::show(piece)));
                };
                tokens.push((text, id as u64));
            }
        }
        other => {
            let expected = if kind == "Unigram" { "a list" } else { "an object" };
            return Err(malformed("model.vocab", "is missing", expected, other.map_or("nothing", json::kind_of)));
        }
    }
    let mut added = Vec::new();
    let list = match root.get("added_tokens") {
        None | Some(Value::Null) => &[],
        Some(Value::Array(list)) => list.as_slice(),
        Some(other) => return Err(malformed("added_tokens", "has the wrong type", "a list", json::kind_of(other))),
    };
    for (index, token) in list.iter().enumerate() {
        let (text, id) = (token.get("content").and_then(Value::as_str), token.get("id").and_then(Value::as_u64));
        let (Some(text), Some(id)) = (text, id) else {
            let place = format!("added_tokens[{index}]");
            return Err(malformed(&place, "is malformed", "an object with id and content", json::show(token)));
        };
        added.push((text, id));
    }

    // No id can be as large as the number of tokens, so no table is larger than the file.
    let bound = tokens.len() + added.len();
    let mut text_of: Vec<Option<&str>> = vec![None; bound];
    let mut ids: HashMap<&str, u32> = HashMap::with_capacity(bound);
    let place = |text: &str| if text.is_empty() { "\"\"".to_string() } else { text.to_string() };
    for (text, id) in &tokens {
        let too_large = || malformed(&place(text), "has an id that leaves holes", &format!("an id below {bound}"), id);
        let slot = usize::try_from(*id).ok().and_then(|id| text_of.get_mut(id)).ok_or_else(too_large)?;
        if let Some(other) = slot {
            let found = format!("{id}, which {} has", cut(other, 40));
            return Err(malformed(&place(text), "shares its id", "an id of its own", found));
        }
        *slot = Some(text);
        if let Some(first) = ids.insert(text, *id as u32) {
            return Err(malformed(&place(text), "is listed twice", &format!("one id, as {first}"), id));
        }
    }
    for (text, id) in &added {
        let conflict = |expected: String| Error::new(Kind::Disagree, FILE, place(text), "is added with a taken id", expected, id);
        let too_large = || malformed(&place(text), "has an id that leaves holes", &format!("an id below {bound}"), id);
        let slot = usize::try_from(*id).ok().and_then(|id| text_of.get_mut(id)).ok_or_else(too_large)?;
        match (ids.get(text), *slot) {
            (Some(known), _) if u64::from(*known) != *id => return Err(conflict(format!("id {known}, as listed before"))),
            (None, Some(other)) => return Err(conflict(format!("an id that is not {}'s", cut(other, 40)))),
            _ => {}
        }
        *slot = Some(text);
        ids.insert(text, *id as u32);
    }
    let size = text_of.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
    if let Some(hole) = text_of[..size].iter().position(Option::is_none) {
        let after = text_of[hole..].iter().flatten().next().copied().unwrap_or_default();
        let found = format!("id {} after {hole} tokens", ids.get(after).copied().unwrap_or_default());
        return Err(malformed(&place(after), "follows a hole", &format!("a token with id {hole}"), found));
    }
    let longest_chars = ids.keys().map(|text| text.chars().count()).max().unwrap_or(0);
    let added = added.into_iter().map(|(text, id)| (text, id as u32)).collect();
    Ok(Vocabulary { model: kind, size, ids, added, longest_chars })
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
