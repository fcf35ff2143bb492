//! The tokenizer: everything that can be wrong with `tokenizer.json` is found here, at build.
//!
//! In: `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`. Out: the bytes of `tokenizer.json` as they
//! are, and facts about it ([`Tokenizer`]). The `tokenizers` crate does the work at run time; it panics or runs forever on
//! some inputs that are valid JSON, so this module first checks what the crate takes on trust (ids, merges, patterns,
//! templates, charsmaps), then lets the crate load the file and probes it, with panics caught.
//!
//! An id must belong to one token, and ids are dense: a hole or an id beyond the number of tokens is malformed.

mod charsmap;
mod components;
mod patterns;
mod vocabulary;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use self::components::{check_lengths, check_stages};
use self::patterns::probe_texts;
use self::vocabulary::Vocabulary;
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
/// Longest fixed padding, truncation stride and the like.
const LENGTH_MAX: u64 = 1 << 24;
/// Most bytes that the text of a probe may become; the crate keeps more than a hundred for each.
const PROBE_BYTES_MAX: usize = 256 << 10;
/// A file whose patterns, texts of the probe and ids take longer together is refused; sound ones take milliseconds.
const PROBE_TIME_MAX: Duration = Duration::from_secs(6);

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
    let Checked { vocabulary, budget } = check_root(&root)?;
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
    let ids_of_empty_text = probe(&mut tokenizer, size, budget)?;
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

/// A parsed file in which nothing is wrong by itself.
struct Checked<'a> {
    vocabulary: Vocabulary<'a>,
    budget: Budget,
}

/// What is left for probing a tokenizer.
#[derive(Clone, Copy)]
struct Budget {
    time: Duration,
    /// Longest text.
    text_bytes: usize,
}

/// Checks the parsed file; see the module doc.
fn check_root(root: &Map<String, Value>) -> Result<Checked<'_>, Error> {
    let model = match root.get("model") {
        Some(Value::Object(model)) => model,
        other => return Err(malformed("model", "is missing", "an object", other.map_or("nothing", json::kind_of))),
    };
    let vocabulary = vocabulary::read(root, model)?;
    vocabulary::check_model(model, &vocabulary)?;
    let (time, growth) = check_stages(root, &vocabulary, PROBE_TIME_MAX)?;
    check_lengths(root, &vocabulary)?;
    Ok(Checked { vocabulary, budget: Budget { time, text_bytes: PROBE_BYTES_MAX / growth } })
}

/// Encodes [`probe_texts`] and decodes all ids within the budget; returns the ids of the empty text.
fn probe(tokenizer: &mut tokenizers::Tokenizer, size: usize, budget: Budget) -> Result<Vec<u32>, Error> {
    // Padding and cutting are the runtime's business, never the file's.
    tokenizer.with_padding(None);
    let _ = tokenizer.with_truncation(None);
    let too_slow = |what: &str| {
        let expected = format!("at most {} s", PROBE_TIME_MAX.as_secs());
        Error::new(Kind::Limit, FILE, "pre_tokenizer", format!("takes too long for {what}"), expected, "more")
    };
    let start = Instant::now();
    for (what, text) in probe_texts(budget.text_bytes) {
        match guard::catch(|| tokenizer.encode(text.as_str(), true).map(drop)) {
            Err(panic) => return Err(crate_panics(&format!("encoding {what}"), &panic)),
            // An unknown character can be an error of the tokenizer; at run time it is one too.
            Ok(Ok(()) | Err(_)) if start.elapsed() <= budget.time => {}
            Ok(_) => return Err(too_slow(what)),
        }
    }
    let all: Vec<u32> = (0..size as u32).collect();
    for ids in all.chunks(1).chain(all.chunks(1000)).chain([&[][..]]) {
        if let Err(panic) = guard::catch(|| tokenizer.decode(ids, false).map(drop)) {
            return Err(crate_panics("decoding", &panic));
        }
        if start.elapsed() > budget.time {
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

    #[test]
    fn patterns_texts_and_ids_share_their_time() {
        let json = serde_json::json!({
            "model": { "type": "WordLevel", "vocab": { "a": 0, "[UNK]": 1 }, "unk_token": "[UNK]" },
            "pre_tokenizer": { "type": "Split", "pattern": { "Regex": "a+" }, "behavior": "Isolated", "invert": false },
        });
        let root = json.as_object().unwrap();
        let Checked { vocabulary, budget } = check_root(root).unwrap_or_else(|e| panic!("{e}"));
        assert!(vocabulary.size == 2 && budget.time < PROBE_TIME_MAX && budget.text_bytes == PROBE_BYTES_MAX);
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        probe(&mut tokenizer, 2, budget).unwrap();
        // No time is left for the texts, or enough for them and not for so many ids.
        for (size, time) in [(2, Duration::ZERO), (8 << 20, Duration::from_millis(100))] {
            let e = probe(&mut tokenizer, size, Budget { time, ..budget }).unwrap_err();
            assert!(e.exit_code() == 7 && e.to_string().contains("takes too long"), "{size}: {e}");
        }
    }
}
