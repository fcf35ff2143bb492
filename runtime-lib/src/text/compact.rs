//! The compact form of a tokenizer, made at build.
//!
//! In: `tokenizer.json`. Out: the bytes that [`Text::load`] reads, after it was asked to:
//!
//! ```text
//! magic[8]  kind: u8  truncate_left: u8  0: u16  json_len: u32  json   (kind 0: all of tokenizer.json; others: all but vocab, merges)
//! vocabulary: ids, count, text_len, slots: u32
//!           text_end: u32[ids]           end of each token's text, bit 31 set where no token has this id
//!           slot: u32[slots]             id + 1, open addressing by the token's text, 0 is free
//!           text: u8[text_len]
//! kind 1 (BPE): vocabulary
//!           merges, merge_slots: u32
//!           merge: (left, right, new): u32[3][merges], in rank order
//!           merge_slot: u32[merge_slots] rank + 1, open addressing by (left, right), 0 is free
//! kind 3 (WordPiece): vocabulary
//! kind 2 (Unigram):   pieces, sorted, text_len: u32, worst: f64 (the lowest score)
//!           score: f64[pieces]
//!           text_end: u32[pieces]        end of each piece's text
//!           sorted: u32[sorted]          ids in order of their texts, of one text the last
//!           text: u8[text_len]
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Deserialize;
use serde_json::Value;

use super::flat_bpe::{BpeSettings, hash_pair};
use super::flat_unigram::UnigramSettings;
use super::vocabulary::{HOLE, hash_text, slots_for};
use super::{Text, TextError, malformed, settings};

pub(super) const MAGIC: [u8; 8] = *b"RCTOKEN\x02";
pub(super) const HEADER_BYTES: usize = 16;
pub(super) const KIND_JSON: u8 = 0;
pub(super) const KIND_FLAT_BPE: u8 = 1;
pub(super) const KIND_FLAT_UNIGRAM: u8 = 2;
pub(super) const KIND_FLAT_WORDPIECE: u8 = 3;
/// Ids above this are refused, so that no file can ask for a huge table.
const MAX_TOKEN_ID: u64 = 1 << 24;

/// Checks `tokenizer.json` and returns the compact form that [`Text::load`] reads. Kinds of models, normalizers and the like are checked
/// where model directories are opened.
///
/// Truncation and padding are left out: the caller decides about length ([`Text::encode`]). Of truncation only the direction
/// is kept.
pub fn compact(tokenizer_json: &[u8]) -> Result<Vec<u8>, TextError> {
    let mut root: Value = serde_json::from_slice(tokenizer_json).map_err(malformed)?;
    let object = root.as_object_mut().ok_or_else(|| malformed("expected object"))?;
    let truncation = object.remove("truncation");
    object.remove("padding");
    let truncate_left = truncation.as_ref().is_some_and(|t| t["direction"] == "Left");

    let added = added_ids(object.get("added_tokens"))?;
    let (kind, flat) = match object.get_mut("model") {
        Some(model) => flat_model(model, &added)?,
        None => (KIND_JSON, vec![]),
    };

    let json = serde_json::to_vec(&root).map_err(malformed)?;
    let json_len = u32::try_from(json.len()).map_err(|_| malformed("tokenizer.json is too large"))?;
    let mut out = Vec::with_capacity(HEADER_BYTES + json.len() + flat.len());
    out.extend_from_slice(&MAGIC);
    out.push(kind);
    out.push(truncate_left.into());
    out.extend_from_slice(&[0; 2]);
    out.extend_from_slice(&json_len.to_le_bytes());
    out.extend_from_slice(&json);
    out.extend_from_slice(&flat);

    // The crate's constructors may panic on hostile values; here that is an answer, in an executable it would be a crash.
    let loaded = std::panic::catch_unwind(|| {
        let text = Text::load(&out)?;
        for (id, content) in &added {
            match text.token_to_id(content) {
                Some(found) if found == *id => {}
                found => {
                    return Err(TextError::Disagree(format!(
                        "added_tokens: {content:?}: expected id {id}, found {}",
                        found.map_or("none".into(), |id| id.to_string())
                    )));
                }
            }
        }
        text.encode("", true)?;
        match text.encode("a", true) {
            // An unknown character can be an error of the tokenizer; at run time it is one too.
            Ok(_) | Err(TextError::Failed(_)) => Ok(()),
            Err(e) => Err(e),
        }
    });
    match loaded {
        Ok(result) => result?,
        Err(_) => return Err(malformed("the tokenizer's parts do not fit together")),
    }
    Ok(out)
}

/// The model's kind, and its tables, which are taken from it.
fn flat_model(model: &mut Value, added: &[(u32, String)]) -> Result<(u8, Vec<u8>), TextError> {
    let kind = match &model["type"] {
        Value::String(name) if name == "BPE" => KIND_FLAT_BPE,
        Value::String(name) if name == "Unigram" => KIND_FLAT_UNIGRAM,
        Value::String(name) if name == "WordPiece" => KIND_FLAT_WORDPIECE,
        Value::Null if model["merges"].is_array() => KIND_FLAT_BPE,
        Value::Null if model["vocab"].is_array() => KIND_FLAT_UNIGRAM,
        _ => KIND_JSON,
    };
    if kind == KIND_JSON {
        check_ids(model)?;
        return Ok((kind, vec![]));
    }
    let mut take = |key: &str| {
        let fields = model.as_object_mut().ok_or_else(|| malformed("model: expected object"))?;
        fields.remove(key).ok_or_else(|| malformed(format!("model.{key}: missing")))
    };
    let vocab = take("vocab")?;
    let added: BTreeSet<u32> = added.iter().map(|(id, _)| *id).collect();
    let flat = match kind {
        KIND_FLAT_BPE => {
            let merges = take("merges")?;
            let settings: BpeSettings = settings(model)?;
            if settings.dropout.is_some_and(|p| p != 0.0) {
                return Err(TextError::Unsupported("model.dropout: random tokenisation, expected null, found a probability".into()));
            }
            bpe_tables(&vocab, &merges, &settings, &added)?
        }
        KIND_FLAT_UNIGRAM => unigram_tables(&vocab, &settings(model)?)?,
        _ => vocabulary(&vocab, &added)?.0,
    };
    Ok((kind, flat))
}

fn added_ids(added: Option<&Value>) -> Result<Vec<(u32, String)>, TextError> {
    #[derive(Deserialize)]
    struct Added {
        id: u32,
        content: String,
    }
    let Some(added) = added.filter(|v| !v.is_null()) else {
        return Ok(Vec::new());
    };
    let list = Vec::<Added>::deserialize(added).map_err(|e| malformed(format!("added_tokens: {e}")))?;
    let mut seen: HashMap<u32, &str> = HashMap::new();
    for token in &list {
        check_id(&token.content, token.id.into())?;
        if let Some(other) = seen.insert(token.id, &token.content)
            && other != token.content
        {
            return Err(TextError::Disagree(format!("added_tokens: id {} belongs to {other:?} and to {:?}", token.id, token.content)));
        }
    }
    Ok(list.into_iter().map(|t| (t.id, t.content)).collect())
}

fn check_id(token: &str, id: u64) -> Result<u32, TextError> {
    if id > MAX_TOKEN_ID {
        return Err(malformed(format!("model.vocab: {token:?}: expected an id up to {MAX_TOKEN_ID}, found {id}")));
    }
    Ok(id as u32)
}

/// Checks ids of a model that stays JSON.
fn check_ids(model: &Value) -> Result<(), TextError> {
    if let Some(vocab) = model["vocab"].as_object() {
        let mut seen: HashMap<u32, &str> = HashMap::with_capacity(vocab.len());
        for (token, id) in vocab {
            let id = vocab_id(token, id)?;
            if let Some(other) = seen.insert(id, token) {
                return Err(malformed(format!("model.vocab: id {id} belongs to {other:?} and to {token:?}")));
            }
        }
    }
    Ok(())
}

fn vocab_id(token: &str, id: &Value) -> Result<u32, TextError> {
    let number = id.as_u64().ok_or_else(|| malformed(format!("model.vocab: {token:?}: expected an id, found {id}")))?;
    check_id(token, number)
}

/// The tables of a vocabulary, and its ids by text.
fn vocabulary<'v>(vocab: &'v Value, added: &BTreeSet<u32>) -> Result<(Vec<u8>, HashMap<&'v str, u32>), TextError> {
    let vocab = vocab.as_object().ok_or_else(|| malformed("model.vocab: expected object"))?;
    let mut by_text: HashMap<&str, u32> = HashMap::with_capacity(vocab.len());
    let mut by_id: Vec<Option<&str>> = Vec::new();
    for (token, id) in vocab {
        let id = vocab_id(token, id)?;
        if by_id.len() <= id as usize {
            by_id.resize(id as usize + 1, None);
        }
        if let Some(other) = by_id[id as usize].replace(token) {
            return Err(malformed(format!("model.vocab: id {id} belongs to {other:?} and to {token:?}")));
        }
        by_text.insert(token, id);
    }
    if let Some(hole) = by_id.iter().zip(0u32..).find_map(|(token, id)| (token.is_none() && !added.contains(&id)).then_some(id)) {
        return Err(malformed(format!("model.vocab: id {hole} belongs to no token")));
    }
    let slots = slots_for(vocab.len());
    let mut slot_ids = vec![0u32; slots];
    for (text, id) in vocab.keys().map(|text| (text.as_str(), by_text[text.as_str()])) {
        let mut slot = hash_text(text) as usize & (slots - 1);
        while slot_ids[slot] != 0 {
            slot = (slot + 1) & (slots - 1);
        }
        slot_ids[slot] = id + 1;
    }
    let text_len: usize = by_id.iter().flatten().map(|t| t.len()).sum();
    if text_len >= HOLE as usize {
        return Err(malformed("model.vocab: more than 2 GB of text"));
    }
    let mut out = Vec::new();
    put(&mut out, [by_id.len(), vocab.len(), text_len, slots].map(|value| value as u32));
    let mut end = 0u32;
    let ends = by_id.iter().map(|token| {
        end += token.map_or(0, |text| text.len() as u32);
        if token.is_some() { end } else { end | HOLE }
    });
    put(&mut out, ends);
    put(&mut out, slot_ids);
    by_id.iter().flatten().for_each(|text| out.extend_from_slice(text.as_bytes()));
    Ok((out, by_text))
}

fn put(out: &mut Vec<u8>, values: impl IntoIterator<Item = u32>) {
    values.into_iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
}

fn bpe_tables(vocab: &Value, merges: &Value, settings: &BpeSettings, added: &BTreeSet<u32>) -> Result<Vec<u8>, TextError> {
    let (mut out, by_text) = vocabulary(vocab, added)?;
    let merges = merge_triples(merges, &by_text, settings)?;
    let merge_slots = slots_for(merges.len());
    let mut merge_slot = vec![0u32; merge_slots];
    for (&[left, right, _], rank) in merges.iter().zip(0u32..) {
        let mut slot = hash_pair(left, right) as usize & (merge_slots - 1);
        loop {
            match merge_slot[slot] {
                0 => break,
                // The same pair twice: the later rank counts.
                taken if merges[taken as usize - 1][..2] == [left, right] => break,
                _ => slot = (slot + 1) & (merge_slots - 1),
            }
        }
        merge_slot[slot] = rank + 1;
    }
    put(&mut out, [merges.len() as u32, merge_slots as u32]);
    put(&mut out, merges.into_iter().flatten());
    put(&mut out, merge_slot);
    Ok(out)
}

fn unigram_tables(vocab: &Value, settings: &UnigramSettings) -> Result<Vec<u8>, TextError> {
    let vocab = Vec::<(String, f64)>::deserialize(vocab).map_err(|e| malformed(format!("model.vocab: {e}")))?;
    if vocab.len() as u64 > MAX_TOKEN_ID {
        return Err(malformed(format!("model.vocab: expected at most {MAX_TOKEN_ID} pieces, found {}", vocab.len())));
    }
    if let Some(id) = settings.unk_id.filter(|id| *id >= vocab.len()) {
        return Err(malformed(format!("model.unk_id: expected an id below {}, found {id}", vocab.len())));
    }
    let text_len: usize = vocab.iter().map(|(text, _)| text.len()).sum();
    if text_len >= HOLE as usize {
        return Err(malformed("model.vocab: more than 2 GB of text"));
    }
    let mut by_text: BTreeMap<&str, u32> = BTreeMap::new();
    by_text.extend(vocab.iter().map(|(text, _)| text.as_str()).zip(0u32..));
    let worst = vocab.iter().map(|(_, score)| *score).fold(f64::INFINITY, f64::min);
    let mut out = Vec::new();
    put(&mut out, [vocab.len(), by_text.len(), text_len].map(|value| value as u32));
    out.extend_from_slice(&worst.to_le_bytes());
    vocab.iter().for_each(|(_, score)| out.extend_from_slice(&score.to_le_bytes()));
    let mut end = 0u32;
    let ends = vocab.iter().map(|(text, _)| {
        end += text.len() as u32;
        end
    });
    put(&mut out, ends);
    put(&mut out, by_text.into_values());
    vocab.iter().for_each(|(text, _)| out.extend_from_slice(text.as_bytes()));
    Ok(out)
}

/// Merges as (left, right, new) ids, in rank order.
fn merge_triples(merges: &Value, by_text: &HashMap<&str, u32>, settings: &BpeSettings) -> Result<Vec<[u32; 3]>, TextError> {
    let merges = merges.as_array().ok_or_else(|| malformed("model.merges: expected array"))?;
    let prefix_len = settings.continuing_subword_prefix.as_ref().map_or(0, |p| p.len());
    let mut triples = Vec::with_capacity(merges.len());
    let mut joined = String::new();
    for (index, merge) in merges.iter().enumerate() {
        let bad = |what: &str| malformed(format!("model.merges[{index}]: {what}"));
        let (left, right) = match merge {
            Value::String(line) if line.starts_with("#version") => continue,
            Value::String(line) => {
                line.split_once(' ').filter(|(_, right)| !right.contains(' ')).ok_or_else(|| bad("expected two tokens"))?
            }
            Value::Array(pair) => match pair.as_slice() {
                [Value::String(left), Value::String(right)] => (left.as_str(), right.as_str()),
                _ => return Err(bad("expected two tokens")),
            },
            _ => return Err(bad("expected two tokens")),
        };
        let id = |token: &str| by_text.get(token).copied().ok_or_else(|| bad(&format!("token {token:?} is not in the vocabulary")));
        let tail = right.get(prefix_len..).ok_or_else(|| bad("the right token is shorter than continuing_subword_prefix"))?;
        joined.clear();
        joined.push_str(left);
        joined.push_str(tail);
        triples.push([id(left)?, id(right)?, id(&joined)?]);
    }
    Ok(triples)
}
