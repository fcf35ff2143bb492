//! Text to token ids and back: the tokenizer in a compact form that loads in a few milliseconds.
//!
//! In: `tokenizer.json` at build ([`compact`]), the compact bytes at start ([`Text::load`]). Out: ids, text, and text piece by
//! piece while ids arrive ([`Stream`]).
//!
//! Normaliser, pre-tokeniser, post-processor, decoder and added tokens are those of the `tokenizers` crate. What makes
//! `tokenizer.json` slow is its BPE model: hundreds of thousands of strings to parse and two large hash maps to fill. The
//! compact form stores them ready for use, hash tables included, and `FlatBpe` searches them where they lie, in the
//! executable's read-only pages. Other models (Unigram, WordPiece, WordLevel) stay JSON, because they are small.
//!
//! ```text
//! magic[8]  kind: u8  truncate_left: u8  0: u16  json_len: u32  json   (kind 0: all of tokenizer.json; 1: all but vocab, merges)
//! kind 1:   tokens, token_count, text_len, token_slots, merges, merge_slots: u32
//!           text_end: u32[tokens]        end of each token's text, bit 31 set where no token has this id
//!           token_slot: u32[token_slots] id + 1, open addressing by the token's text, 0 is free
//!           merge: (left, right, new): u32[3][merges], in rank order
//!           merge_slot: u32[merge_slots] rank + 1, open addressing by (left, right), 0 is free
//!           text: u8[text_len]
//! ```

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::tokenizer::{
    AddedToken, DecoderWrapper, Encoding, Model, ModelWrapper, NormalizerWrapper, PostProcessor, PostProcessorWrapper, PreTokenizerWrapper,
    Token, TokenizerImpl, TruncationDirection,
};

const MAGIC: [u8; 8] = *b"RCTOKEN\x01";
const HEADER_BYTES: usize = 16;
const KIND_JSON: u8 = 0;
const KIND_FLAT_BPE: u8 = 1;
/// Ids above this are refused, so that no file can ask for a huge table.
const MAX_TOKEN_ID: u64 = 1 << 24;
const HOLE: u32 = 1 << 31;
/// A character never has more than four bytes; more pending tokens than this are not the start of one.
const MAX_PENDING_TOKENS: usize = 8;
/// Ids of a vocabulary among which [`Text::special_around`] looks for one that is a word.
const LEADING_TRIES: u32 = 1024;

/// What can be wrong with a tokenizer or a text.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The bytes are not a tokenizer.
    #[error("{0}")]
    Malformed(String),
    /// Two parts of the tokenizer contradict each other.
    #[error("{0}")]
    Disagree(String),
    /// A tokenizer, but of a kind that is not supported.
    #[error("{0}")]
    Unsupported(String),
    /// The tokenizer failed on this input.
    #[error("{0}")]
    Failed(String),
}

impl TextError {
    /// Exit code as in the table of the command line.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Malformed(_) => 4,
            Self::Disagree(_) => 5,
            Self::Unsupported(_) => 6,
            Self::Failed(_) => 7,
        }
    }
}

fn malformed(what: impl std::fmt::Display) -> TextError {
    TextError::Malformed(what.to_string())
}

/// Checks `tokenizer.json` and returns the compact form that [`Text::load`] reads.
///
/// Truncation and padding are left out: the caller decides about length ([`Text::encode`]). Of truncation only the direction
/// is kept.
pub fn compact(tokenizer_json: &[u8]) -> Result<Vec<u8>, TextError> {
    let mut root: Value = serde_json::from_slice(tokenizer_json).map_err(malformed)?;
    check_kinds(&root)?;
    let object = root.as_object_mut().ok_or_else(|| malformed("expected object"))?;
    let truncation = object.remove("truncation");
    object.remove("padding");
    let truncate_left = truncation.as_ref().is_some_and(|t| t["direction"] == "Left");

    let is_bpe = object.get("model").is_some_and(|model| model["type"] == "BPE" || (model["type"].is_null() && model["merges"].is_array()));
    let flat = if is_bpe {
        let model = object["model"].as_object_mut().ok_or_else(|| malformed("model: expected object"))?;
        let vocab = model.remove("vocab").ok_or_else(|| malformed("model.vocab: missing"))?;
        let merges = model.remove("merges").ok_or_else(|| malformed("model.merges: missing"))?;
        let settings = BpeSettings::deserialize(&object["model"]).map_err(|e| malformed(format!("model: {e}")))?;
        if settings.dropout.is_some_and(|p| p != 0.0) {
            return Err(TextError::Unsupported("model.dropout: random tokenisation, expected null, found a probability".into()));
        }
        let added: BTreeSet<u32> = added_ids(object.get("added_tokens"))?.into_iter().map(|(id, _)| id).collect();
        flat_tables(&vocab, &merges, &settings, &added)?
    } else {
        if let Some(model) = object.get("model") {
            check_ids(model)?;
        }
        Vec::new()
    };
    let added = added_ids(object.get("added_tokens"))?;

    let json = serde_json::to_vec(&root).map_err(malformed)?;
    let json_len = u32::try_from(json.len()).map_err(|_| malformed("tokenizer.json is too large"))?;
    let mut out = Vec::with_capacity(HEADER_BYTES + json.len() + flat.len());
    out.extend_from_slice(&MAGIC);
    out.push(if is_bpe { KIND_FLAT_BPE } else { KIND_JSON });
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

/// Refuses unknown component types by name, which the crate reports only as "no variant matched".
fn check_kinds(root: &Value) -> Result<(), TextError> {
    const MODELS: &[&str] = &["BPE", "WordPiece", "WordLevel", "Unigram"];
    const NORMALIZERS: &[&str] = &[
        "BertNormalizer",
        "Strip",
        "StripAccents",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Sequence",
        "Lowercase",
        "Nmt",
        "Precompiled",
        "Replace",
        "Prepend",
        "ByteLevel",
    ];
    const PRE_TOKENIZERS: &[&str] = &[
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Metaspace",
        "Whitespace",
        "Sequence",
        "Split",
        "Punctuation",
        "WhitespaceSplit",
        "Digits",
        "UnicodeScripts",
        "FixedLength",
    ];
    const POST_PROCESSORS: &[&str] = &["RobertaProcessing", "BertProcessing", "ByteLevel", "TemplateProcessing", "Sequence"];
    const DECODERS: &[&str] =
        &["BPEDecoder", "ByteLevel", "WordPiece", "Metaspace", "CTC", "Sequence", "Replace", "Fuse", "Strip", "ByteFallback"];
    let check = |field: &str, known: &[&str]| match root[field]["type"].as_str() {
        Some(kind) if !known.contains(&kind) => {
            Err(TextError::Unsupported(format!("{field}.type: expected one of {}, found {kind:?}", known.join(", "))))
        }
        _ => Ok(()),
    };
    check("model", MODELS)?;
    check("normalizer", NORMALIZERS)?;
    check("pre_tokenizer", PRE_TOKENIZERS)?;
    check("post_processor", POST_PROCESSORS)?;
    check("decoder", DECODERS)
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

/// The settings of a BPE model, as in `tokenizer.json`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BpeSettings {
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(deserialize_with = "null_is_false")]
    fuse_unk: bool,
    #[serde(deserialize_with = "null_is_false")]
    byte_fallback: bool,
    #[serde(deserialize_with = "null_is_false")]
    ignore_merges: bool,
}

fn null_is_false<'de, D: serde::Deserializer<'de>>(d: D) -> Result<bool, D::Error> {
    Ok(Option::<bool>::deserialize(d)?.unwrap_or(false))
}

fn flat_tables(vocab: &Value, merges: &Value, settings: &BpeSettings, added: &BTreeSet<u32>) -> Result<Vec<u8>, TextError> {
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
    let merges = merge_triples(merges, &by_text, settings)?;

    let token_slots = slots_for(vocab.len());
    let mut token_slot = vec![0u32; token_slots];
    for (text, id) in vocab.keys().map(|text| (text.as_str(), by_text[text.as_str()])) {
        let mut slot = hash_text(text) as usize & (token_slots - 1);
        while token_slot[slot] != 0 {
            slot = (slot + 1) & (token_slots - 1);
        }
        token_slot[slot] = id + 1;
    }
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

    let mut out = Vec::new();
    let mut put = |value: u32| out.extend_from_slice(&value.to_le_bytes());
    let text_len: usize = by_id.iter().flatten().map(|t| t.len()).sum();
    if text_len >= HOLE as usize {
        return Err(malformed("model.vocab: more than 2 GB of text"));
    }
    for value in [by_id.len(), vocab.len(), text_len, token_slots, merges.len(), merge_slots] {
        put(value as u32);
    }
    let mut end = 0u32;
    for token in &by_id {
        match token {
            Some(text) => {
                end += text.len() as u32;
                put(end);
            }
            None => put(end | HOLE),
        }
    }
    token_slot.iter().for_each(|&v| put(v));
    merges.iter().flatten().for_each(|&v| put(v));
    merge_slot.iter().for_each(|&v| put(v));
    for text in by_id.iter().flatten() {
        out.extend_from_slice(text.as_bytes());
    }
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

/// A power of two with at most half of the slots in use.
fn slots_for(entries: usize) -> usize {
    (entries * 2).max(2).next_power_of_two()
}

fn hash_text(text: &str) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for &byte in text.as_bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    hash ^ (hash >> 29)
}

fn hash_pair(left: u32, right: u32) -> u64 {
    let hash = (u64::from(left) << 32 | u64::from(right)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ (hash >> 32)
}

/// Little-endian u32 table inside the compact form.
#[derive(Clone, Copy)]
struct Table<'a>(&'a [u8]);

impl Table<'_> {
    fn get(&self, index: usize) -> Option<u32> {
        let bytes = self.0.get(index * 4..index * 4 + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    }
}

/// A BPE model that is searched where it lies.
///
/// Gives exactly the tokens of the crate's `BPE` without dropout: merges are applied in the order of (rank, position).
struct FlatBpe<'a> {
    settings: BpeSettings,
    token_count: usize,
    token_slots: usize,
    merge_slots: usize,
    text_end: Table<'a>,
    token_slot: Table<'a>,
    merge: Table<'a>,
    merge_slot: Table<'a>,
    text: &'a [u8],
    /// Ids of `<0x00>` to `<0xFF>` for byte fallback.
    byte_tokens: Vec<Option<u32>>,
}

#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    len: usize,
    prev: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

impl<'a> FlatBpe<'a> {
    fn load(bytes: &'a [u8], settings: BpeSettings) -> Option<Self> {
        let head = Table(bytes.get(..24)?);
        let field = |i| head.get(i).map(|v| v as usize);
        let (tokens, token_count, text_len) = (field(0)?, field(1)?, field(2)?);
        let (token_slots, merges, merge_slots) = (field(3)?, field(4)?, field(5)?);
        if !token_slots.is_power_of_two() || !merge_slots.is_power_of_two() {
            return None;
        }
        let mut rest = bytes.get(24..)?;
        let mut take = |len: usize| {
            let (head, tail) = rest.split_at_checked(len)?;
            rest = tail;
            Some(head)
        };
        let mut model = Self {
            settings,
            token_count,
            token_slots,
            merge_slots,
            text_end: Table(take(tokens * 4)?),
            token_slot: Table(take(token_slots * 4)?),
            merge: Table(take(merges * 12)?),
            merge_slot: Table(take(merge_slots * 4)?),
            text: take(text_len)?,
            byte_tokens: Vec::new(),
        };
        if model.settings.byte_fallback {
            model.byte_tokens = (0..=255u8).map(|b| model.id(&format!("<{b:#04X}>"))).collect();
        }
        Some(model)
    }

    fn token(&self, id: u32) -> Option<&'a str> {
        let end = self.text_end.get(id as usize)?;
        if end & HOLE != 0 {
            return None;
        }
        let begin = match id {
            0 => 0,
            _ => self.text_end.get(id as usize - 1)? & !HOLE,
        };
        std::str::from_utf8(self.text.get(begin as usize..end as usize)?).ok()
    }

    fn id(&self, token: &str) -> Option<u32> {
        let mask = self.token_slots - 1;
        let mut slot = hash_text(token) as usize & mask;
        for _ in 0..self.token_slots {
            let id = self.token_slot.get(slot)?.checked_sub(1)?;
            if self.token(id) == Some(token) {
                return Some(id);
            }
            slot = (slot + 1) & mask;
        }
        None
    }

    /// (rank, new id) of a pair.
    fn merge_of(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        let mask = self.merge_slots - 1;
        let mut slot = hash_pair(left, right) as usize & mask;
        for _ in 0..self.merge_slots {
            let rank = self.merge_slot.get(slot)?.checked_sub(1)?;
            let at = rank as usize * 3;
            if self.merge.get(at)? == left && self.merge.get(at + 1)? == right {
                return Some((rank, self.merge.get(at + 2)?));
            }
            slot = (slot + 1) & mask;
        }
        None
    }

    /// One symbol per character, before any merge.
    fn symbols(&self, word: &str) -> tokenizers::Result<Vec<Symbol>> {
        let settings = &self.settings;
        let mut symbols: Vec<Symbol> = Vec::with_capacity(word.len());
        let push = |symbols: &mut Vec<Symbol>, id, len| {
            let at = symbols.len();
            if let Some(last) = symbols.last_mut() {
                last.next = at;
            }
            let prev = at.checked_sub(1).unwrap_or(NONE);
            symbols.push(Symbol { id, len, prev, next: NONE });
        };
        let mut unknown: Option<(u32, usize)> = None;
        let mut decorated = String::new();
        let mut chars = word.char_indices().peekable();
        while let Some((begin, c)) = chars.next() {
            let len = c.len_utf8();
            let mut piece = &word[begin..begin + len];
            let prefix = settings.continuing_subword_prefix.as_deref().filter(|_| begin > 0);
            let suffix = settings.end_of_word_suffix.as_deref().filter(|_| chars.peek().is_none());
            if prefix.is_some() || suffix.is_some() {
                decorated.clear();
                decorated.push_str(prefix.unwrap_or(""));
                decorated.push_str(piece);
                decorated.push_str(suffix.unwrap_or(""));
                piece = &decorated;
            }
            if let Some(id) = self.id(piece) {
                if let Some((id, len)) = unknown.take() {
                    push(&mut symbols, id, len);
                }
                push(&mut symbols, id, len);
                continue;
            }
            let of_byte = |b: u8| self.byte_tokens.get(b as usize).copied().flatten();
            if settings.byte_fallback && piece.bytes().all(|b| of_byte(b).is_some()) {
                for id in piece.bytes().filter_map(of_byte) {
                    push(&mut symbols, id, 1);
                }
                continue;
            }
            if let Some(token) = &settings.unk_token {
                unknown = Some(match unknown {
                    Some((id, before)) if settings.fuse_unk => (id, before + len),
                    other => {
                        if let Some((id, len)) = other {
                            push(&mut symbols, id, len);
                        }
                        let id = self.id(token).ok_or_else(|| format!("unknown token {token:?} has no id"))?;
                        (id, len)
                    }
                });
            }
        }
        if let Some((id, len)) = unknown {
            push(&mut symbols, id, len);
        }
        Ok(symbols)
    }

    fn merge_all(&self, symbols: &mut Vec<Symbol>) {
        let mut queue = BinaryHeap::with_capacity(symbols.len());
        for (at, pair) in symbols.windows(2).enumerate() {
            if let Some((rank, new)) = self.merge_of(pair[0].id, pair[1].id) {
                queue.push(Reverse((rank, at, new)));
            }
        }
        while let Some(Reverse((_, at, new))) = queue.pop() {
            let left = symbols[at];
            if left.len == 0 || left.next == NONE {
                continue;
            }
            let right = symbols[left.next];
            // An entry is stale when one of its symbols has been merged since.
            if self.merge_of(left.id, right.id).is_none_or(|(_, id)| id != new) {
                continue;
            }
            symbols[left.next].len = 0;
            symbols[at] = Symbol { id: new, len: left.len + right.len, prev: left.prev, next: right.next };
            if right.next != NONE {
                symbols[right.next].prev = at;
                if let Some((rank, id)) = self.merge_of(new, symbols[right.next].id) {
                    queue.push(Reverse((rank, at, id)));
                }
            }
            if left.prev != NONE
                && let Some((rank, id)) = self.merge_of(symbols[left.prev].id, new)
            {
                queue.push(Reverse((rank, left.prev, id)));
            }
        }
        symbols.retain(|s| s.len != 0);
    }
}

/// The model of a loaded tokenizer.
enum AnyModel<'a> {
    Flat(Box<FlatBpe<'a>>),
    Crate(Box<ModelWrapper>),
}

impl Model for AnyModel<'_> {
    type Trainer = BpeTrainer;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        let model = match self {
            Self::Flat(model) => model,
            Self::Crate(model) => return model.tokenize(sequence),
        };
        if sequence.is_empty() {
            return Ok(Vec::new());
        }
        if model.settings.ignore_merges
            && let Some(id) = model.id(sequence)
        {
            return Ok(vec![Token::new(id, sequence.to_owned(), (0, sequence.len()))]);
        }
        let mut symbols = model.symbols(sequence)?;
        model.merge_all(&mut symbols);
        let mut at = 0;
        Ok(symbols
            .iter()
            .map(|s| {
                let begin = at;
                at += s.len;
                let text = model.token(s.id).unwrap_or_default().to_owned();
                Token::new(s.id, text, (begin, at))
            })
            .collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Flat(model) => model.id(token),
            Self::Crate(model) => model.token_to_id(token),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Self::Flat(model) => model.token(id).map(str::to_owned),
            Self::Crate(model) => model.id_to_token(id),
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            Self::Flat(model) => (0..model.text_end.0.len() as u32 / 4).filter_map(|id| Some((model.token(id)?.to_owned(), id))).collect(),
            Self::Crate(model) => model.get_vocab(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            Self::Flat(model) => model.token_count,
            Self::Crate(model) => model.get_vocab_size(),
        }
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a loaded tokenizer is read-only".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

/// The parts of `tokenizer.json` that the crate reads itself.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    post_processor: Option<PostProcessorWrapper>,
    decoder: Option<DecoderWrapper>,
    model: Value,
}

type Inner<'a> = TokenizerImpl<AnyModel<'a>, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A loaded tokenizer.
pub struct Text<'a> {
    inner: Inner<'a>,
    truncate: TruncationDirection,
}

/// Ids of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Tokens that were cut off, special tokens not counted.
    pub truncated: usize,
}

impl<'a> Text<'a> {
    /// Reads what [`compact`] wrote. The bytes stay in use: token texts and tables are not copied.
    pub fn load(bytes: &'a [u8]) -> Result<Self, TextError> {
        let broken = || malformed("not a compact tokenizer of this version");
        let head = bytes.get(..HEADER_BYTES).ok_or_else(broken)?;
        if head[..8] != MAGIC {
            return Err(broken());
        }
        let json_len = Table(&head[12..]).get(0).ok_or_else(broken)? as usize;
        let (json, tables) = bytes[HEADER_BYTES..].split_at_checked(json_len).ok_or_else(broken)?;
        let parts: Parts = serde_json::from_slice(json).map_err(malformed)?;
        let model = match head[8] {
            KIND_FLAT_BPE => {
                let settings = BpeSettings::deserialize(&parts.model).map_err(|e| malformed(format!("model: {e}")))?;
                AnyModel::Flat(Box::new(FlatBpe::load(tables, settings).ok_or_else(broken)?))
            }
            _ => AnyModel::Crate(Box::new(serde_json::from_value(parts.model).map_err(|e| malformed(format!("model: {e}")))?)),
        };
        let mut inner: Inner<'a> = TokenizerImpl::new(model);
        inner
            .with_normalizer(parts.normalizer)
            .with_pre_tokenizer(parts.pre_tokenizer)
            .with_post_processor(parts.post_processor)
            .with_decoder(parts.decoder);
        inner.add_tokens(&parts.added_tokens);
        let truncate = if head[9] == 1 { TruncationDirection::Left } else { TruncationDirection::Right };
        Ok(Self { inner, truncate })
    }

    /// Ids of `text`, with the tokens that the tokenizer puts around a sequence when `special`.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.inner.encode_fast(text, special).map_err(|e| TextError::Failed(format!("tokenizer: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Like [`Text::encode`] with special tokens, cut to `max_len` ids in all.
    pub fn encode_cut(&self, text: &str, max_len: usize) -> Result<Encoded, TextError> {
        let failed = |e: tokenizers::Error| TextError::Failed(format!("tokenizer: {e}"));
        let mut encoding: Encoding = self.inner.encode_fast(text, false).map_err(failed)?;
        let around = self.inner.get_post_processor().map_or(0, |p| p.added_tokens(false));
        let room = max_len.saturating_sub(around);
        let truncated = encoding.len().saturating_sub(room);
        if truncated > 0 {
            encoding.truncate(room, 0, self.truncate);
        }
        let encoding = self.inner.post_process(encoding, None, true).map_err(failed)?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), truncated })
    }

    /// Text of `ids`.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        self.inner.decode(ids, skip_special).map_err(|e| TextError::Failed(format!("tokenizer: {e}")))
    }

    /// Whether [`Text::decode`] leaves an id out: it has no token, or a special one.
    fn leaves_out(&self, id: u32, skip_special: bool) -> bool {
        let special = |token: String| self.inner.get_added_vocabulary().is_special_token(&token);
        self.inner.id_to_token(id).is_none_or(|token| skip_special && special(token))
    }

    /// The ids that the tokenizer puts in front of a text (BOS, CLS) and behind it (EOS, SEP), empty where it puts none.
    pub fn special_around(&self) -> Result<(Vec<u32>, Vec<u32>), TextError> {
        // Any text that has tokens will do. A vocabulary may lack this one, but not all of its own words.
        let words = (0..LEADING_TRIES).map(|id| self.decode(&[id], true).unwrap_or_default());
        let tokens = |text: &String| self.encode(text, false).is_ok_and(|ids| !ids.is_empty());
        let text = std::iter::once("a".to_string()).chain(words).find(tokens).unwrap_or_default();
        let with = self.encode(&text, true)?;
        let without = self.encode(&text, false)?;
        let at = (0..=with.len().saturating_sub(without.len())).find(|&at| with[at..].starts_with(&without)).unwrap_or(0);
        Ok((with[..at].to_vec(), with[at + without.len()..].to_vec()))
    }

    /// Id of a token, added tokens included.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token behind an id, as the vocabulary writes it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }
}

/// Turns ids that arrive one by one into text, piece by piece, and never gives half a character.
///
/// The last printed tokens stay as context, because decoders look at their neighbours (leading spaces, byte fallback).
#[derive(Default)]
pub struct Stream {
    /// `ids[..context]` are printed, the others wait.
    ids: Vec<u32>,
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

#[cfg(test)]
mod tests;
