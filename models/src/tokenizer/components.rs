//! Normalizers, pre-tokenizers, post-processors and decoders: what the `tokenizers` crate takes on trust of them.

use std::time::Duration;

use serde_json::{Map, Value};

use super::charsmap::check_charsmap;
use super::patterns::{Patterns, can_be_empty};
use super::vocabulary::Vocabulary;
use super::{FILE, LENGTH_MAX, malformed};
use crate::error::{Error, Kind, cut};
use crate::json;

/// Deepest nesting of sequences of normalizers and the like.
const DEPTH_MAX: usize = 8;
/// Most parts of a stage's sequences together.
const PARTS_MAX: usize = 64;
/// How much longer normalizers may make a text. (ALBERT's, NFKD and a charsmap: 594 times.)
const GROWTH_MAX: usize = 4096;

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

/// Checks all stages of the parsed file, whose patterns may take `time_max` in all. Returns what is left of it, and how much longer than a
/// text what becomes of it may be.
pub(super) fn check_stages(root: &Map<String, Value>, vocabulary: &Vocabulary<'_>, time_max: Duration) -> Result<(Duration, usize), Error> {
    let mut spent = Spent { growth: 1, parts: 0, patterns: Patterns::new(time_max) };
    for (stage, known, list) in STAGES {
        if let Some(part) = root.get(*stage).filter(|v| !v.is_null()) {
            let component = Component { stage, known, list, vocabulary };
            spent.parts = 0;
            component.check(stage, part, 0, &mut spent)?;
        }
    }
    Ok((spent.patterns.time_left, spent.growth))
}

/// What the parts that were checked so far may cost together.
struct Spent {
    /// How much longer texts may have become.
    growth: usize,
    /// Parts of sequences of this stage.
    parts: usize,
    patterns: Patterns,
}

impl Spent {
    /// Replacements multiply; their product is how much longer a text can get.
    fn grow(&mut self, place: &str, times: usize) -> Result<(), Error> {
        self.growth = self.growth.saturating_mul(times.max(1));
        if self.growth > GROWTH_MAX {
            let (expected, found) = (format!("texts that grow at most {GROWTH_MAX} times"), format!("{} times", self.growth));
            return Err(Error::new(Kind::Limit, FILE, place, "makes texts too long", expected, found));
        }
        Ok(())
    }
}

/// One stage of a tokenizer while it is checked.
struct Component<'a> {
    stage: &'a str,
    known: &'a [&'a str],
    list: &'a str,
    vocabulary: &'a Vocabulary<'a>,
}

impl Component<'_> {
    /// Checks `part` and, in a sequence, its parts.
    fn check(&self, place: &str, part: &Value, depth: usize, spent: &mut Spent) -> Result<(), Error> {
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
        let length = |key: &str| fields.get(key).and_then(Value::as_str).map_or(1, str::len);
        match (self.stage, kind) {
            (_, "Sequence") => {
                if depth == DEPTH_MAX {
                    return Err(malformed(place, "is nested too deeply", &format!("at most {DEPTH_MAX} levels"), "more"));
                }
                let Some(Value::Array(parts)) = fields.get(self.list) else {
                    return Err(malformed(&at(self.list), "is missing", "a list", "nothing"));
                };
                for (index, part) in parts.iter().enumerate() {
                    let place = format!("{place}.{}[{index}]", self.list);
                    spent.parts += 1;
                    if spent.parts > PARTS_MAX {
                        let (what, expected) = ("is one part too many", format!("at most {PARTS_MAX} in all"));
                        return Err(Error::new(Kind::Limit, FILE, place, what, expected, "more"));
                    }
                    self.check(&place, part, depth + 1, spent)?;
                }
            }
            ("normalizer", "Precompiled") => {
                let place = at("precompiled_charsmap");
                let longest = check_charsmap(&place, fields.get("precompiled_charsmap"))?;
                spent.grow(&place, longest)?;
            }
            (_, "Replace") => {
                let pattern = fields.get("pattern");
                spent.patterns.check(&at("pattern"), pattern)?;
                // Between any two characters there is room for one more match of nothing.
                spent.grow(&at("content"), length("content") + usize::from(can_be_empty(pattern)))?;
            }
            ("normalizer", "Prepend") => spent.grow(&at("prepend"), length("prepend"))?,
            // Half of the bytes become characters of two bytes.
            ("normalizer" | "pre_tokenizer", "ByteLevel") => spent.grow(place, 2)?,
            // U+FDFA becomes 18 characters.
            ("normalizer", "NFKC" | "NFKD") => spent.grow(place, 18)?,
            ("pre_tokenizer", "Split") => spent.patterns.check(&at("pattern"), fields.get("pattern"))?,
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

    /// The text must be in the template, once, and nothing of a second text; every special token of it must be described, and described as
    /// the vocabulary has it.
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
        let pieces = fields.get("single").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let texts: Vec<&Value> = pieces.iter().filter_map(|piece| piece.get("Sequence")?.get("id")).collect();
        if texts != ["A"] {
            let found = texts.iter().map(|id| json::show(id)).collect::<Vec<_>>().join(", ");
            return Err(malformed(&format!("{place}.single"), "does not hold the text once", "one Sequence A", format!("`{found}`")));
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

/// Truncation and padding that the crate would panic on or that ask for absurd lengths.
pub(super) fn check_lengths(root: &Map<String, Value>, vocabulary: &Vocabulary<'_>) -> Result<(), Error> {
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
