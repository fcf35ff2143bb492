//! The tokenizer: everything that can be wrong with `tokenizer.json` is found here, at build.
//!
//! In: `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`. Out: the bytes of `tokenizer.json` as they
//! are, and facts about it ([`Tokenizer`]). The `tokenizers` crate does the work at run time; it panics or runs forever on
//! some inputs that are valid JSON, so this module first checks what the crate takes on trust (ids, merges, patterns,
//! templates, charsmaps), then lets the crate load the file and probes it, with panics caught.
//!
//! An id must belong to one token, and ids are dense: a hole or an id beyond the number of tokens is malformed.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use crate::dir::ModelDir;
use crate::error::{Error, Kind, Warning, cut};
use crate::generation::SETTINGS_BYTES_MAX;
use crate::guard;
use crate::json;

/// The file of the tokenizer.
pub const FILE: &str = "tokenizer.json";
/// Its largest size.
pub const FILE_BYTES_MAX: u64 = 128 << 20;
const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
/// Deepest nesting of sequences of normalizers and the like.
const DEPTH_MAX: usize = 8;
/// How much longer normalizers may make a text.
const GROWTH_MAX: usize = 4096;
/// Longest fixed padding, truncation stride and the like.
const LENGTH_MAX: u64 = 1 << 24;
/// Longest regular expression in bytes.
const PATTERN_BYTES_MAX: usize = 1 << 16;
/// A probe that takes longer is refused; sound tokenizers take milliseconds.
const PROBE_TIME_MAX: Duration = Duration::from_secs(2);

/// A checked tokenizer.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    /// The bytes of `tokenizer.json`.
    pub json: Vec<u8>,
    /// What it says about itself.
    pub facts: TokenizerFacts,
}

/// What other stages and the runtime want to know about a tokenizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerFacts {
    /// `BPE`, `Unigram`, `WordPiece` or `WordLevel`.
    pub model: String,
    /// Number of ids, added tokens included.
    pub size: usize,
    /// `bos_token`, `eos_token` and so on with their texts, as chat templates see them.
    pub special_tokens: BTreeMap<String, String>,
    /// `model_max_length` where it is a sensible number.
    pub model_max_length: Option<usize>,
}

/// Reads and checks the tokenizer; `rows` is the number of token embeddings. `None` where the directory has none.
pub fn read(dir: &ModelDir, rows: usize, warnings: &mut Vec<Warning>) -> Result<Option<Tokenizer>, Error> {
    let Some(json) = dir.read_if_present(FILE, FILE_BYTES_MAX)? else { return Ok(None) };
    let root = json::parse_object(FILE, &json)?;
    let vocabulary = check_root(&root)?;
    if vocabulary.size > rows {
        let (expected, found) = (format!("at most {rows} ids, one per row of the token embedding"), vocabulary.size);
        return Err(Error::new(Kind::Disagree, FILE, "vocabulary", "is larger than the embedding", expected, found));
    }
    let added: Vec<(String, u32)> = vocabulary.added.iter().map(|(text, id)| (text.to_string(), *id)).collect();
    let (model, size) = (vocabulary.model.to_string(), vocabulary.size);
    drop(vocabulary);
    // Two parsed copies at once would double the memory.
    drop(root);
    let mut facts = TokenizerFacts { model, size, ..TokenizerFacts::default() };
    let around = read_settings(dir, &mut facts)?;
    let loaded = guard::catch(|| tokenizers::Tokenizer::from_bytes(&json));
    let mut tokenizer = match loaded {
        Ok(Ok(tokenizer)) => tokenizer,
        Ok(Err(e)) => return Err(crate_refuses(&e.to_string())),
        Err(panic) => return Err(crate_refuses(&panic)),
    };
    for (text, id) in &added {
        if tokenizer.token_to_id(text) != Some(*id) {
            let found = tokenizer.token_to_id(text).map_or("none".to_string(), |id| id.to_string());
            return Err(Error::new(Kind::Disagree, FILE, text, "gets another id than stated", id, found));
        }
    }
    let ids_of_empty_text = probe(&mut tokenizer, size)?;
    let id_of = |token: &str| facts.special_tokens.get(token).and_then(|text| tokenizer.token_to_id(text));
    for &(key, token, wanted) in &around {
        let Some(id) = id_of(token) else { continue };
        // One token may be both: then it is there as often as one is wanted.
        let expected = around.iter().filter(|(_, token, wanted)| *wanted && id_of(token) == Some(id)).count();
        let found = ids_of_empty_text.iter().filter(|other| **other == id).count();
        if if wanted { found < expected } else { found > expected } {
            let does = if wanted { "puts none around a text" } else { "puts one around every text" };
            warnings.push(Warning::new(CONFIG, key, format!("is {wanted}, but {FILE} {does}, which is what counts")));
        }
    }
    Ok(Some(Tokenizer { json, facts }))
}

fn crate_refuses(why: &str) -> Error {
    Error::new(Kind::Malformed, FILE, "file", "is refused by the tokenizers crate", "a valid tokenizer", cut(why, 100))
}

fn malformed(place: &str, what: &str, expected: &str, found: impl std::fmt::Display) -> Error {
    Error::new(Kind::Malformed, FILE, place, what, expected, found)
}

/// The tokens of a tokenizer by text and by id.
struct Vocabulary<'a> {
    model: &'a str,
    size: usize,
    ids: HashMap<&'a str, u32>,
    added: Vec<(&'a str, u32)>,
    longest_chars: usize,
}

/// Checks the parsed file; see the module doc.
fn check_root(root: &Map<String, Value>) -> Result<Vocabulary<'_>, Error> {
    let model = match root.get("model") {
        Some(Value::Object(model)) => model,
        other => return Err(malformed("model", "is missing", "an object", other.map_or("nothing", json::kind_of))),
    };
    let vocabulary = read_vocabulary(root, model)?;
    check_model(model, &vocabulary)?;
    let mut growth = 1;
    for (stage, known, list) in STAGES {
        if let Some(part) = root.get(*stage).filter(|v| !v.is_null()) {
            let component = Component { stage, known, list, vocabulary: &vocabulary };
            component.check(stage, part, 0, &mut growth)?;
        }
    }
    check_lengths(root, &vocabulary)?;
    Ok(vocabulary)
}

/// The stages of a tokenizer: their field, the types that the crate knows, and where a sequence lists its parts.
const STAGES: &[(&str, &[&str], &str)] = &[
    (
        "normalizer",
        &[
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
        ],
        "normalizers",
    ),
    (
        "pre_tokenizer",
        &[
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
        ],
        "pretokenizers",
    ),
    ("post_processor", &["RobertaProcessing", "BertProcessing", "ByteLevel", "TemplateProcessing", "Sequence"], "processors"),
    (
        "decoder",
        &["BPEDecoder", "ByteLevel", "WordPiece", "Metaspace", "CTC", "Sequence", "Replace", "Fuse", "Strip", "ByteFallback"],
        "decoders",
    ),
];

/// Collects all tokens and checks that ids are unique and dense.
fn read_vocabulary<'a>(root: &'a Map<String, Value>, model: &'a Map<String, Value>) -> Result<Vocabulary<'a>, Error> {
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
fn check_model(model: &Map<String, Value>, vocabulary: &Vocabulary<'_>) -> Result<(), Error> {
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

/// One stage of a tokenizer while it is checked.
struct Component<'a> {
    stage: &'a str,
    known: &'a [&'a str],
    list: &'a str,
    vocabulary: &'a Vocabulary<'a>,
}

impl Component<'_> {
    /// Checks `part` and, in a sequence, its parts. `growth` is how much longer texts may have become.
    fn check(&self, place: &str, part: &Value, depth: usize, growth: &mut usize) -> Result<(), Error> {
        let Value::Object(fields) = part else {
            return Err(malformed(place, "has the wrong type", "an object", json::kind_of(part)));
        };
        let at = |key: &str| format!("{place}.{key}");
        let kind = match fields.get("type") {
            Some(Value::String(kind)) if self.known.contains(&kind.as_str()) => kind.as_str(),
            Some(other) => {
                let expected = format!("one of {}", self.known.join(", "));
                let what = "is not supported";
                return Err(Error::new(Kind::Unsupported, FILE, at("type"), what, expected, json::show(other)));
            }
            None => return Err(malformed(&at("type"), "is missing", "a name", "nothing")),
        };
        match (self.stage, kind) {
            (_, "Sequence") => {
                if depth == DEPTH_MAX {
                    return Err(malformed(place, "is nested too deeply", &format!("at most {DEPTH_MAX} levels"), "more"));
                }
                let Some(Value::Array(parts)) = fields.get(self.list) else {
                    return Err(malformed(&at(self.list), "is missing", "a list", "nothing"));
                };
                for (index, part) in parts.iter().enumerate() {
                    self.check(&format!("{place}.{}[{index}]", self.list), part, depth + 1, growth)?;
                }
            }
            ("normalizer", "Precompiled") => check_charsmap(&at("precompiled_charsmap"), fields.get("precompiled_charsmap"))?,
            (_, "Replace") => {
                check_pattern(&at("pattern"), fields.get("pattern"))?;
                self.grow(&at("content"), fields.get("content"), growth)?;
            }
            ("normalizer", "Prepend") => self.grow(&at("prepend"), fields.get("prepend"), growth)?,
            ("pre_tokenizer", "Split") => check_pattern(&at("pattern"), fields.get("pattern"))?,
            ("pre_tokenizer", "FixedLength") if fields.get("length").is_some_and(|n| n.as_u64() == Some(0)) => {
                return Err(malformed(&at("length"), "is out of range", "an integer >= 1", 0));
            }
            ("decoder", "Strip") => self.check_strip(place, fields)?,
            ("post_processor", "TemplateProcessing") => self.check_template(place, fields)?,
            ("post_processor", "BertProcessing" | "RobertaProcessing") => {
                for key in ["sep", "cls"] {
                    let pair = fields.get(key);
                    let text = pair.and_then(|p| p.get(0)).and_then(Value::as_str);
                    let id = pair.and_then(|p| p.get(1)).and_then(Value::as_u64);
                    let (Some(text), Some(id)) = (text, id) else {
                        return Err(malformed(&at(key), "is malformed", "[token, id]", pair.map_or("nothing".into(), json::show)));
                    };
                    self.check_token(&at(key), text, id)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Replacements multiply; their product is how much longer a text can get.
    fn grow(&self, place: &str, content: Option<&Value>, growth: &mut usize) -> Result<(), Error> {
        let length = content.and_then(Value::as_str).map_or(1, |text| text.len().max(1));
        *growth = growth.saturating_mul(length);
        if *growth > GROWTH_MAX {
            let expected = format!("texts that grow at most {GROWTH_MAX} times");
            return Err(Error::new(Kind::Limit, FILE, place, "makes texts too long", expected, format!("{growth} times")));
        }
        Ok(())
    }

    /// The crate's decoder panics on a token that is made of the stripped character alone and is shorter than the cut.
    fn check_strip(&self, place: &str, fields: &Map<String, Value>) -> Result<(), Error> {
        let longest = self.vocabulary.longest_chars as u64;
        let get = |key: &str| {
            let value = fields.get(key).and_then(Value::as_u64);
            let expected = format!("0 to {longest}, the longest token");
            let found = fields.get(key).map_or("nothing".to_string(), json::show);
            value.filter(|n| *n <= longest).ok_or_else(|| malformed(&format!("{place}.{key}"), "is out of range", &expected, found))
        };
        let (_, stop) = (get("start")?, get("stop")?);
        if stop > 0 {
            let place = format!("{place}.stop");
            return Err(Error::new(Kind::Unsupported, FILE, place, "is not supported", "0, as other tokenizers have", stop));
        }
        Ok(())
    }

    /// Every special token of the template must be described, and described as the vocabulary has it.
    fn check_template(&self, place: &str, fields: &Map<String, Value>) -> Result<(), Error> {
        let none = Map::new();
        let described = fields.get("special_tokens").and_then(Value::as_object).unwrap_or(&none);
        for key in ["single", "pair"] {
            for piece in fields.get(key).and_then(Value::as_array).into_iter().flatten() {
                let Some(special) = piece.get("SpecialToken") else { continue };
                let id = special.get("id").and_then(Value::as_str).unwrap_or_default();
                if !described.contains_key(id) {
                    let what = format!("is used by {place}.{key} and not described");
                    let found = described.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                    return Err(malformed(&format!("`{id}`"), &what, "an entry in special_tokens", format!("`{found}`")));
                }
            }
        }
        for (name, entry) in described {
            let place = format!("{place}.special_tokens.{}", cut(name, 30));
            let ids = entry.get("ids").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            let tokens = entry.get("tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            if ids.len() != tokens.len() {
                return Err(malformed(&place, "has lists of different length", "as many ids as tokens", ids.len()));
            }
            for (id, text) in ids.iter().zip(tokens) {
                let (Some(id), Some(text)) = (id.as_u64(), text.as_str()) else {
                    return Err(malformed(&place, "is malformed", "ids and texts", json::show(id)));
                };
                self.check_token(&place, text, id)?;
            }
        }
        Ok(())
    }

    fn check_token(&self, place: &str, text: &str, id: u64) -> Result<(), Error> {
        match self.vocabulary.ids.get(text) {
            Some(known) if u64::from(*known) == id => Ok(()),
            Some(known) => Err(malformed(place, "gives a token another id", &format!("{known} for `{}`", cut(text, 30)), id)),
            None => Err(malformed(place, "names an absent token", "a token of the vocabulary", format!("`{}`", cut(text, 60)))),
        }
    }
}

/// A pattern compiles and does not ask for exponential time.
fn check_pattern(place: &str, pattern: Option<&Value>) -> Result<(), Error> {
    let Some(regex) = pattern.and_then(|p| p.get("Regex")) else { return Ok(()) };
    let Some(regex) = regex.as_str() else {
        return Err(malformed(place, "has the wrong type", "a regular expression", json::show(regex)));
    };
    let shown = format!("`{}`", cut(regex, 90));
    if regex.len() > PATTERN_BYTES_MAX {
        let expected = format!("at most {PATTERN_BYTES_MAX} bytes");
        return Err(Error::new(Kind::Limit, FILE, place, "is too long", expected, format!("{} bytes", regex.len())));
    }
    if nested_repetition(regex) {
        let what = "may take exponential time";
        return Err(Error::new(Kind::Limit, FILE, place, what, "no repetition of a repetition", shown));
    }
    // The crate compiles it with this engine, too, and takes a search that is given up for the end of the text.
    let Ok(Some(compiled)) = guard::catch(|| fancy_regex::Regex::new(regex).ok()) else {
        return Err(malformed(place, "is no valid regular expression", "a pattern that compiles", shown));
    };
    for (what, text) in probe_texts() {
        let start = Instant::now();
        let searched = guard::catch(|| {
            compiled.find_iter(&text).try_for_each(|found| match found {
                Err(_) => Err("takes too many steps"),
                Ok(_) if start.elapsed() > PROBE_TIME_MAX => Err("takes too long"),
                Ok(_) => Ok(()),
            })
        });
        if let Err(why) = searched.unwrap_or(Err("panics")) {
            let expected = "a search that ends soon";
            return Err(Error::new(Kind::Limit, FILE, place, format!("{why} for {what}"), expected, shown));
        }
    }
    Ok(())
}

/// What tends to break tokenizers, in growing lengths, so that even exponential time is noticed before it matters.
fn probe_texts() -> impl Iterator<Item = (&'static str, String)> {
    let units: [(&str, &str); 7] = [
        ("letters", "a"),
        ("spaces", " "),
        ("digits", "1"),
        ("line breaks", "\n"),
        ("marks", "!'"),
        ("words", "don't stop \u{e4}\u{f6} \u{4f60}\u{597d} \u{1f600}\u{200d} "),
        ("spaces before a letter", "  \t a"),
    ];
    let lengths = [16usize, 256, 2048, 16_384];
    units.into_iter().flat_map(move |(what, unit)| lengths.map(|length| (what, unit.repeat(length.div_ceil(unit.len())))))
}

/// Whether a group that is repeated without bound consists of nothing but an unbounded repetition, as in `(a+)+`, or has
/// such an alternative: then one text can be split in exponentially many ways.
fn nested_repetition(pattern: &str) -> bool {
    #[derive(Clone, Copy, Default)]
    struct Branch {
        unbounded: bool,
        other: bool,
    }
    struct Group {
        branch: Branch,
        bad: bool,
    }
    let chars: Vec<char> = pattern.chars().collect();
    let fresh = || Group { branch: Branch::default(), bad: false };
    let mut stack = vec![fresh()];
    let mut i = 0;
    while i < chars.len() {
        // One atom; `closed` is the group that it was, if any.
        let mut closed = None;
        match chars[i] {
            '\\' => {
                i += 1;
                if matches!(chars.get(i), Some('p' | 'P')) && chars.get(i + 1) == Some(&'{') {
                    while i < chars.len() && chars[i] != '}' {
                        i += 1;
                    }
                }
            }
            '[' => {
                let mut depth = 0;
                while i < chars.len() {
                    match chars[i] {
                        '\\' => i += 1,
                        '[' => depth += 1,
                        ']' => depth -= 1,
                        _ => {}
                    }
                    if depth == 0 {
                        break;
                    }
                    i += 1;
                }
            }
            '(' => {
                stack.push(fresh());
                i += 1;
                if chars.get(i) == Some(&'?') {
                    // `(?:`, `(?i:`, `(?=`, `(?<name>` and the like.
                    while i < chars.len() && !matches!(chars[i], ':' | '=' | '!' | '>' | ')') {
                        i += 1;
                    }
                    i += usize::from(chars.get(i) != Some(&')'));
                }
                continue;
            }
            '|' => {
                if let Some(group) = stack.last_mut() {
                    group.bad |= group.branch.unbounded && !group.branch.other;
                    group.branch = Branch::default();
                }
                i += 1;
                continue;
            }
            ')' if stack.len() > 1 => closed = stack.pop(),
            _ => {}
        }
        i += 1;
        // The repetition behind the atom.
        let (mut unbounded, mut optional) = (false, false);
        match chars.get(i) {
            Some('*') => (unbounded, optional) = (true, true),
            Some('+') => unbounded = true,
            Some('?') => optional = true,
            Some('{') => {
                let end = chars[i..].iter().position(|c| *c == '}').map_or(chars.len(), |n| i + n);
                let bounds: String = chars[i + 1..end].iter().collect();
                unbounded = bounds.ends_with(',');
                optional = bounds.starts_with('0');
                i = end;
            }
            _ => i = i.wrapping_sub(1),
        }
        i = i.wrapping_add(1);
        // A possessive or lazy mark changes nothing here.
        if (unbounded || optional) && matches!(chars.get(i), Some('?' | '+')) {
            i += 1;
        }
        let inner_bad = closed.is_some_and(|g| g.bad || (g.branch.unbounded && !g.branch.other));
        if inner_bad && unbounded {
            return true;
        }
        if let Some(group) = stack.last_mut() {
            if unbounded || inner_bad {
                group.branch.unbounded = true;
            } else if !optional {
                group.branch.other = true;
            }
        }
    }
    false
}

/// The binary table of SentencePiece normalizers: no byte sequence may lead out of its arrays.
///
/// Layout: trie size in bytes (u32), the trie as u32 units of a double array, then texts that end with NUL. The crate
/// indexes both without a check, so every state that can be reached from the root is visited here.
fn check_charsmap(place: &str, value: Option<&Value>) -> Result<(), Error> {
    let wrong = |found: &str| malformed(place, "is no valid charsmap", "a SentencePiece table in base64", found);
    let text = value.and_then(Value::as_str).ok_or_else(|| wrong("no string"))?;
    let bytes = base64(text).ok_or_else(|| wrong("invalid base64"))?;
    let (size, rest) = bytes.split_first_chunk::<4>().ok_or_else(|| wrong("less than 4 bytes"))?;
    let size = u32::from_le_bytes(*size) as usize / 4 * 4;
    if size == 0 || size > rest.len() {
        return Err(wrong("a trie longer than the table"));
    }
    let (trie, texts) = rest.split_at(size);
    let texts = std::str::from_utf8(texts).map_err(|_| wrong("texts that are not UTF-8"))?;
    let units: Vec<usize> = trie.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize).collect();
    let offset = |unit: usize| (unit >> 10) << ((unit & (1 << 9)) >> 6);
    let mut seen = vec![false; units.len()];
    let mut todo = vec![offset(units[0])];
    while let Some(base) = todo.pop() {
        for byte in 1..=255usize {
            let position = base ^ byte;
            let unit = *units.get(position).ok_or_else(|| wrong("a trie that leads out of itself"))?;
            if unit & ((1 << 31) | 0xff) != byte {
                continue;
            }
            let next = position ^ offset(unit);
            if (unit >> 8) & 1 == 1 {
                let leaf = *units.get(next).ok_or_else(|| wrong("a trie that leads out of itself"))?;
                if !texts.is_char_boundary(leaf & ((1 << 31) - 1)) {
                    return Err(wrong("a text outside of the table"));
                }
            }
            if !std::mem::replace(&mut seen[position], true) {
                todo.push(next);
            }
        }
    }
    Ok(())
}

/// Standard base64 with padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let body = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - body.len() > 2 {
        return None;
    }
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for c in body.bytes() {
        let digit = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(out)
}

/// Truncation and padding that the crate would panic on or that ask for absurd lengths.
fn check_lengths(root: &Map<String, Value>, vocabulary: &Vocabulary<'_>) -> Result<(), Error> {
    let number = |section: &Value, place: &str, key: &str| -> Result<Option<u64>, Error> {
        match section.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(n) if n <= LENGTH_MAX => Ok(Some(n)),
                _ => Err(malformed(&format!("{place}.{key}"), "is out of range", "a sensible length", json::show(value))),
            },
        }
    };
    if let Some(truncation) = root.get("truncation").filter(|v| !v.is_null()) {
        let max_length = number(truncation, "truncation", "max_length")?.unwrap_or(512);
        let stride = number(truncation, "truncation", "stride")?.unwrap_or(0);
        if stride >= max_length {
            let expected = format!("less than max_length {max_length}");
            return Err(malformed("truncation.stride", "is out of range", &expected, stride));
        }
    }
    if let Some(padding) = root.get("padding").filter(|v| !v.is_null()) {
        number(padding, "padding", "pad_to_multiple_of")?;
        if let Some(strategy) = padding.get("strategy") {
            number(strategy, "padding.strategy", "Fixed")?;
        }
        if let Some(id) = number(padding, "padding", "pad_id")?.filter(|id| *id >= vocabulary.size as u64) {
            let expected = format!("an id below {}", vocabulary.size);
            let what = "is outside of the vocabulary";
            return Err(Error::new(Kind::Disagree, FILE, "padding.pad_id", what, expected, id));
        }
    }
    Ok(())
}

/// Encodes [`probe_texts`] and decodes all ids; returns the ids of the empty text.
fn probe(tokenizer: &mut tokenizers::Tokenizer, size: usize) -> Result<Vec<u32>, Error> {
    // Padding and cutting are the runtime's business, never the file's.
    tokenizer.with_padding(None);
    let _ = tokenizer.with_truncation(None);
    let too_slow = |what: &str| {
        let expected = format!("at most {} s", PROBE_TIME_MAX.as_secs());
        Error::new(Kind::Limit, FILE, "pre_tokenizer", format!("takes too long for {what}"), expected, "more")
    };
    for (what, text) in probe_texts() {
        let start = Instant::now();
        match guard::catch(|| tokenizer.encode(text.as_str(), true).map(drop)) {
            Err(panic) => return Err(crate_panics(&format!("encoding {what}"), &panic)),
            // An unknown character can be an error of the tokenizer; at run time it is one too.
            Ok(Ok(()) | Err(_)) if start.elapsed() <= PROBE_TIME_MAX => {}
            Ok(_) => return Err(too_slow(what)),
        }
    }
    let all: Vec<u32> = (0..size as u32).collect();
    let start = Instant::now();
    for ids in all.chunks(1).chain(all.chunks(1000)).chain([&[][..]]) {
        if let Err(panic) = guard::catch(|| tokenizer.decode(ids, false).map(drop)) {
            return Err(crate_panics("decoding", &panic));
        }
        if start.elapsed() > 4 * PROBE_TIME_MAX {
            return Err(too_slow("decoding"));
        }
    }
    let empty = guard::catch(|| tokenizer.encode("", true));
    Ok(empty.ok().and_then(Result::ok).map(|e| e.get_ids().to_vec()).unwrap_or_default())
}

fn crate_panics(doing: &str, panic: &str) -> Error {
    malformed("file", &format!("makes the tokenizers crate fail when {doing}"), "a valid tokenizer", cut(panic, 80))
}

/// A switch of `tokenizer_config.json`, the special token that it means, and whether that is put around a text.
type Around = (&'static str, &'static str, bool);

/// Special tokens and switches of `tokenizer_config.json` and, for what it lacks, `special_tokens_map.json`.
fn read_settings(dir: &ModelDir, facts: &mut TokenizerFacts) -> Result<Vec<Around>, Error> {
    let mut around = Vec::new();
    for file in [CONFIG, MAP] {
        let Some(bytes) = dir.read_if_present(file, SETTINGS_BYTES_MAX)? else { continue };
        let map = json::parse_object(file, &bytes)?;
        for name in ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"] {
            let text = match map.get(name) {
                None | Some(Value::Null | Value::Bool(false)) => continue,
                Some(Value::String(text)) => text,
                Some(Value::Object(token)) if token.get("content").is_some_and(Value::is_string) => {
                    token.get("content").and_then(Value::as_str).unwrap_or_default()
                }
                Some(other) => {
                    let expected = "a text or an object with content";
                    return Err(Error::new(Kind::Malformed, file, name, "has the wrong type", expected, json::show(other)));
                }
            };
            facts.special_tokens.entry(name.to_string()).or_insert_with(|| text.to_string());
        }
        if file == CONFIG {
            let flag = |key: &str| map.get(key).and_then(Value::as_bool);
            let switches = [("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")];
            around.extend(switches.into_iter().filter_map(|(key, token)| Some((key, token, flag(key)?))));
            // Where nobody knows, the library writes 1e30.
            let length = map.get("model_max_length").and_then(Value::as_u64);
            facts.model_max_length = length.filter(|n| *n <= LENGTH_MAX).map(|n| n as usize);
        }
    }
    Ok(around)
}

/// The chat template's source: `chat_template.jinja`, or the field of `tokenizer_config.json`, with the file it is in.
pub fn read_chat_template(dir: &ModelDir) -> Result<Option<(String, String)>, Error> {
    let file = "chat_template.jinja";
    if let Some(bytes) = dir.read_if_present(file, SETTINGS_BYTES_MAX)? {
        return Ok(Some((file.to_string(), json::utf8(file, &bytes)?.to_string())));
    }
    let Some(bytes) = dir.read_if_present(CONFIG, SETTINGS_BYTES_MAX)? else { return Ok(None) };
    let map = json::parse_object(CONFIG, &bytes)?;
    let wrong = |found: &Value| {
        let expected = "a text or a list of named texts";
        Error::new(Kind::Malformed, CONFIG, "chat_template", "has the wrong type", expected, json::show(found))
    };
    let source = match map.get("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(source)) => source,
        Some(value @ Value::Array(list)) => {
            let named = |entry: &&Value| entry.get("name").and_then(Value::as_str) == Some("default");
            let Some(entry) = list.iter().find(named) else { return Ok(None) };
            match entry.get("template") {
                Some(Value::String(source)) => source,
                _ => return Err(wrong(value)),
            }
        }
        Some(other) => return Err(wrong(other)),
    };
    Ok(Some((CONFIG.to_string(), source.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn repetitions_of_repetitions() {
        for bad in ["(a+)+$", "(?:a*)*", "((a+))+", "(a+|b)+", "(a?b*)+", "x(?:\\s+)*y", "([ab]+){2,}", "(?i:a+)+"] {
            assert!(nested_repetition(bad), "{bad}");
        }
        for good in [
            "a+",
            "(ab)+",
            "(?:\\d{3})+",
            "(?:a+b)+",
            "[(+)]+",
            "\\(a+\\)+",
            "(a+)?",
            "(a+){1,3}",
            "(a+|b)",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ] {
            assert!(!nested_repetition(good), "{good}");
        }
    }

    #[test]
    fn base64_is_strict() {
        assert_eq!(base64("aGVsbG8=").as_deref(), Some(&b"hello"[..]));
        assert_eq!(base64("").as_deref(), Some(&b""[..]));
        for bad in ["a", "a===", "aGVsbG8", "aGV$bG8="] {
            assert_eq!(base64(bad), None, "{bad}");
        }
    }

    #[test]
    fn charsmaps_that_lead_astray() {
        // One root whose children would lie behind the end of the array.
        for bytes in [&[][..], &[0, 0, 0, 0], &[4, 0, 0, 0, 0, 0, 0, 0], &[8, 0, 0, 0, 1, 2, 3, 4]] {
            let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
            let mut text = String::new();
            for chunk in bytes.chunks(3) {
                let n = chunk.iter().fold(0u32, |n, b: &u8| (n << 8) | u32::from(*b)) << (8 * (3 - chunk.len()));
                for i in 0..4 {
                    let digit = digits[(n >> (18 - 6 * i) & 63) as usize] as char;
                    text.push(if i <= chunk.len() { digit } else { '=' });
                }
            }
            let e = check_charsmap("normalizer.precompiled_charsmap", Some(&json!(text))).unwrap_err();
            assert_eq!(e.exit_code(), 4, "{bytes:?}: {e}");
        }
    }
}
