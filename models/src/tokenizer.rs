//! The tokenizer: everything that can be wrong with `tokenizer.json` is found here, at build.
//!
//! In: `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`. Out: the bytes of `tokenizer.json` as they are, but for the
//! tokens around a text where the reference's class decides about those, and facts about it ([`Tokenizer`]). The `tokenizers` crate does
//! the work at run time; it panics or runs forever on some inputs that are valid JSON, so this module first checks what the crate takes on
//! trust (ids, merges, patterns, templates, charsmaps), then lets the crate load the file and probes it, with panics caught.
//!
//! An id must belong to one token, and ids are dense: a hole or an id beyond the number of tokens is malformed.

mod charsmap;
mod components;
mod oniguruma;
mod patterns;
mod vocabulary;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value, json};

use self::components::{check_lengths, check_stages};
use self::patterns::{computed, probe_texts};
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
    /// The bytes of `tokenizer.json`, with another template where the reference's class makes one.
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
    /// The normalizer makes texts lower case.
    pub lowercases: bool,
}

/// Reads and checks the tokenizer; `rows` is the number of token embeddings. `None` where the directory has none.
pub fn read(dir: &ModelDir, rows: usize, warnings: &mut Vec<Warning>) -> Result<Option<Tokenizer>, Error> {
    let Some(json) = dir.read_if_present(FILE, FILE_BYTES_MAX)? else { return Ok(None) };
    let mut root = json::parse_object(FILE, &json)?;
    let Checked { vocabulary, budget } = check_root(&root)?;
    if vocabulary.size > rows {
        let (expected, found) = (format!("at most {rows} ids, one per row of the token embedding"), vocabulary.size);
        return Err(Error::new(Kind::Disagree, FILE, "vocabulary", "is larger than the embedding", expected, found));
    }
    let added: Vec<(String, u32)> = vocabulary.added.iter().map(|(text, id)| (text.to_string(), *id)).collect();
    let (model, size) = (vocabulary.model.to_string(), vocabulary.size);
    let lowercases = root.get("normalizer").is_some_and(lowers_case);
    drop(vocabulary);
    let json =
        if oniguruma::translate_all(&mut root) { serde_json::to_vec(&root).map_err(|e| crate_refuses(&e.to_string()))? } else { json };
    // Two parsed copies at once would double the memory.
    drop(root);
    let mut facts = TokenizerFacts { model, size, lowercases, ..TokenizerFacts::default() };
    let around = read_settings(dir, &mut facts)?;
    let mut tokenizer = load(&json)?;
    for (text, id) in &added {
        if tokenizer.token_to_id(text) != Some(*id) {
            let found = tokenizer.token_to_id(text).map_or("none".to_string(), |id| id.to_string());
            return Err(Error::new(Kind::Disagree, FILE, text, "gets another id than stated", id, found));
        }
    }
    for (name, text) in &facts.special_tokens {
        if tokenizer.token_to_id(text).is_some() && added.iter().all(|(added, _)| added != text) {
            let what = format!("`{}` is no added token of {FILE}: within a text it is taken apart", cut(text, 40));
            warnings.push(Warning::new(CONFIG, name, what));
        }
    }
    let ids_of_empty_text = probe(&mut tokenizer, size, budget)?;
    let id_of = |token: &str| facts.special_tokens.get(token).and_then(|text| tokenizer.token_to_id(text));
    let is_other = |&&Switch { token, wanted, .. }: &&Switch| {
        let Some(id) = id_of(token) else { return false };
        // One token may be both: then it is there as often as one is wanted.
        let expected = around.switches.iter().filter(|other| other.wanted && id_of(other.token) == Some(id)).count();
        let found = ids_of_empty_text.iter().filter(|other| **other == id).count();
        if wanted { found < expected } else { found > expected }
    };
    let others: Vec<&Switch> = around.switches.iter().filter(is_other).collect();
    if around.counts && !others.is_empty() {
        let wanted = around.switches.iter().filter(|switch| switch.wanted).map(|switch| switch.token);
        let wanted: Vec<_> = wanted.filter_map(|token| Some((token, facts.special_tokens.get(token)?, id_of(token)?))).collect();
        // One at a time, as above.
        drop(tokenizer);
        let json = with_special_tokens(&json, &wanted)?;
        probe(&mut load(&json)?, size, budget)?;
        return Ok(Some(Tokenizer { json, facts }));
    }
    for &Switch { key, wanted, .. } in others {
        let does = if wanted { "puts none around a text" } else { "puts one around every text" };
        warnings.push(Warning::new(CONFIG, key, format!("is {wanted}, but {FILE} {does}, which is what counts")));
    }
    Ok(Some(Tokenizer { json, facts }))
}

fn load(json: &[u8]) -> Result<tokenizers::Tokenizer, Error> {
    match guard::catch(|| tokenizers::Tokenizer::from_bytes(json)) {
        Ok(Ok(tokenizer)) => Ok(tokenizer),
        Ok(Err(e)) => Err(crate_refuses(&e.to_string())),
        Err(panic) => Err(crate_refuses(&panic)),
    }
}

/// The file with a template of texts that has these of the special tokens, each with its name, text and id, and no others.
fn with_special_tokens(json: &[u8], wanted: &[(&str, &String, u32)]) -> Result<Vec<u8>, Error> {
    let mut root = json::parse_object(FILE, json)?;
    let part = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let special = |of: &str| wanted.iter().filter(move |(token, ..)| *token == of).map(|(_, text, _)| part(text)).collect::<Vec<_>>();
    let text = |id: &str| [special("bos_token"), vec![json!({"Sequence": {"id": id, "type_id": 0}})], special("eos_token")].concat();
    let pair = [text("A"), text("B")].concat();
    let token = |text: &str, id: u32| (text.to_string(), json!({"id": text, "ids": [id], "tokens": [text]}));
    let tokens: Map<String, Value> = wanted.iter().map(|(_, text, id)| token(text, *id)).collect();
    let template = json!({"type": "TemplateProcessing", "single": text("A"), "pair": pair, "special_tokens": tokens});
    root.insert("post_processor".into(), template);
    serde_json::to_vec(&root).map_err(|e| crate_refuses(&e.to_string()))
}

/// Does a normalizer make texts lower case?
fn lowers_case(normalizer: &Value) -> bool {
    match normalizer.get("type").and_then(Value::as_str) {
        Some("Lowercase") => true,
        Some("BertNormalizer") => normalizer.get("lowercase").and_then(Value::as_bool) == Some(true),
        Some("Sequence") => normalizer.get("normalizers").and_then(Value::as_array).is_some_and(|all| all.iter().any(lowers_case)),
        _ => false,
    }
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
    let start = computed();
    for (what, text) in probe_texts(budget.text_bytes).chain(beside_each_other(tokenizer)) {
        match guard::catch(|| tokenizer.encode(text.as_str(), true).map(drop)) {
            Err(panic) => return Err(crate_panics(&format!("encoding {what}"), &panic)),
            // An unknown character can be an error of the tokenizer; at run time it is one too.
            Ok(Ok(()) | Err(_)) if computed() - start <= budget.time => {}
            Ok(_) => return Err(too_slow(what)),
        }
    }
    let all: Vec<u32> = (0..size as u32).collect();
    for ids in all.chunks(1).chain(all.chunks(1000)).chain([&[][..]]) {
        if let Err(panic) = guard::catch(|| tokenizer.decode(ids, false).map(drop)) {
            return Err(crate_panics("decoding", &panic));
        }
        if computed() - start > budget.time {
            return Err(too_slow("decoding"));
        }
    }
    let empty = guard::catch(|| tokenizer.encode("", true));
    Ok(empty.ok().and_then(Result::ok).map(|e| e.get_ids().to_vec()).unwrap_or_default())
}

/// Added tokens that take the space beside them (64 of them at most): each before and behind each other. The crate fails where two take the
/// same one.
fn beside_each_other(tokenizer: &tokenizers::Tokenizer) -> impl Iterator<Item = (&'static str, String)> + use<> {
    const MOST: usize = 64;
    let all = tokenizer.get_added_tokens_decoder();
    let mut greedy: Vec<String> = all.into_values().filter(|t| t.lstrip || t.rstrip).map(|t| t.content).collect();
    greedy.sort_unstable();
    greedy.truncate(MOST);
    let pair = |a: &String, b: &String| ("added tokens beside each other", format!("{a}  a{b}  {a} {b}{a}\u{200d}{b}"));
    let pairs: Vec<_> = greedy.iter().flat_map(|a| greedy.iter().map(move |b| pair(a, b))).collect();
    pairs.into_iter()
}

fn crate_panics(doing: &str, panic: &str) -> Error {
    malformed("file", &format!("makes the tokenizers crate fail when {doing}"), "a valid tokenizer", cut(panic, 80))
}

/// A switch of `tokenizer_config.json`, the special token that it means, and whether that is put around a text.
struct Switch {
    key: &'static str,
    token: &'static str,
    wanted: bool,
}

/// What `tokenizer_config.json` says of tokens around a text.
struct Around {
    switches: Vec<Switch>,
    /// The reference's class puts them there by its switches, whatever `tokenizer.json` does.
    counts: bool,
}

/// Classes of the reference that make the template of texts from switches of theirs (`update_post_processor`).
const TEMPLATE_BY_SWITCHES: [&str; 2] = ["LlamaTokenizer", "LlamaTokenizerFast"];

/// Special tokens and switches of `tokenizer_config.json` and `special_tokens_map.json`. Of special tokens the map counts first, unless the
/// config has `added_tokens_decoder`, as files of newer libraries do: then it fills gaps.
fn read_settings(dir: &ModelDir, facts: &mut TokenizerFacts) -> Result<Around, Error> {
    let read = |file| -> Result<_, Error> {
        let bytes = dir.read_if_present(file, SETTINGS_BYTES_MAX)?;
        bytes.map(|bytes| json::parse_object(file, &bytes)).transpose().map(Option::unwrap_or_default)
    };
    let (config, map) = (read(CONFIG)?, read(MAP)?);
    let mut files = [(MAP, &map), (CONFIG, &config)];
    if config.contains_key("added_tokens_decoder") {
        files.reverse();
    }
    for (file, map) in files {
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
            // (Some old files have empty texts where there is no such token.)
            if !text.is_empty() {
                facts.special_tokens.entry(name.to_string()).or_insert_with(|| text.to_string());
            }
        }
    }
    let flag = |key: &str| config.get(key).and_then(Value::as_bool);
    let switches = [("add_bos_token", "bos_token", true), ("add_eos_token", "eos_token", false)];
    let class = config.get("tokenizer_class").and_then(Value::as_str);
    let counts = class.is_some_and(|class| TEMPLATE_BY_SWITCHES.contains(&class)) && switches.iter().any(|s| flag(s.0).is_some());
    // Its class has a default for the one that is not there.
    let wanted = |key, default| flag(key).or(counts.then_some(default));
    let switches = switches.into_iter().filter_map(|(key, token, default)| Some(Switch { key, token, wanted: wanted(key, default)? }));
    // Where nobody knows, the library writes 1e30.
    let length = config.get("model_max_length").and_then(Value::as_u64);
    facts.model_max_length = length.filter(|n| *n <= LENGTH_MAX).map(|n| n as usize);
    Ok(Around { switches: switches.collect(), counts })
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

    /// Tokens around a text are what the reference's class makes of its switches, or what the file does.
    #[test]
    fn tokens_around_a_text() {
        let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        let template = json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, sequence("A")],
            "pair": [sequence("A"), sequence("B")],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        });
        let off = json!({"special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
        let added = |id: u32, text: &str| {
            let mut token = off.clone();
            (token["id"], token["content"]) = (json!(id), json!(text));
            token
        };
        let encode = |post_processor: &Value, mut config: Value| {
            let file = json!({
                "model": {"type": "WordLevel", "vocab": {"a": 0, "<s>": 1, "</s>": 2}, "unk_token": "a"},
                "added_tokens": [added(1, "<s>"), added(2, "</s>")], "post_processor": post_processor,
            });
            config["bos_token"] = json!("<s>");
            config["eos_token"] = json!({"content": "</s>"});
            let (_temp, dir) = crate::generation::tests::dir_with(&[(FILE, file), (CONFIG, config)]);
            let mut warnings = vec![];
            let read = read(&dir, 3, &mut warnings).unwrap().unwrap();
            let tokenizer = load(&read.json).unwrap();
            (tokenizer.encode("a", true).unwrap().get_ids().to_vec(), warnings.len())
        };
        let llama = "LlamaTokenizerFast";
        for (file, config, ids, warned) in [
            (&Value::Null, json!({"tokenizer_class": llama, "add_bos_token": true}), vec![1, 0], 0),
            (&Value::Null, json!({"tokenizer_class": llama, "add_eos_token": true}), vec![1, 0, 2], 0),
            (&template, json!({"tokenizer_class": llama, "add_bos_token": false}), vec![0], 0),
            (&template, json!({"tokenizer_class": llama, "add_bos_token": true, "add_eos_token": true}), vec![1, 0, 2], 0),
            (&template, json!({"tokenizer_class": llama, "add_bos_token": true, "add_eos_token": false}), vec![1, 0], 0),
            (&Value::Null, json!({"tokenizer_class": llama}), vec![0], 0),
            (&Value::Null, json!({"tokenizer_class": "GPT2Tokenizer", "add_bos_token": true}), vec![0], 1),
            (&template, json!({"add_bos_token": false}), vec![1, 0], 1),
        ] {
            assert_eq!(encode(file, config.clone()), (ids, warned), "{config}");
        }
    }

    /// A pattern is written as the engine of executables reads it, and a special token that only the config names is warned of.
    #[test]
    fn what_is_read_for_executables() {
        let file = json!({
            "model": {"type": "WordLevel", "vocab": {"a": 0, "  ": 1, "\n": 2, "?": 3, "a\n": 4, "<s>": 5}, "unk_token": "?"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "^ +"}, "behavior": "Isolated", "invert": false}]},
        });
        let (_temp, dir) = crate::generation::tests::dir_with(&[(FILE, file), (CONFIG, json!({"bos_token": "<s>", "eos_token": "</s>"}))]);
        let mut warnings = vec![];
        let read = read(&dir, 6, &mut warnings).unwrap().unwrap();
        let ids = load(&read.json).unwrap().encode("a\n  a", true).unwrap().get_ids().to_vec();
        assert_eq!(ids, [4, 1, 0]);
        let warnings: Vec<String> = warnings.iter().map(Warning::to_string).collect();
        assert!(matches!(&warnings[..], [one] if one.contains("bos_token") && one.contains("`<s>` is no added token")), "{warnings:?}");
    }

    /// Which file counts for special tokens depends on the library that wrote them.
    #[test]
    fn special_tokens_of_two_files() {
        let of = |config: Value, map: Value| {
            let (_temp, dir) = crate::generation::tests::dir_with(&[(CONFIG, config), (MAP, map)]);
            let mut facts = TokenizerFacts::default();
            read_settings(&dir, &mut facts).unwrap();
            facts.special_tokens.into_iter().map(|(name, text)| format!("{name} {text}")).collect::<Vec<_>>()
        };
        let map = json!({"bos_token": {"content": "<s>"}, "pad_token": "<pad>"});
        let old = json!({"bos_token": "", "eos_token": "</s>", "pad_token": "x"});
        assert_eq!(of(old.clone(), map.clone()), ["bos_token <s>", "eos_token </s>", "pad_token <pad>"]);
        let mut new = old;
        new["added_tokens_decoder"] = json!({});
        assert_eq!(of(new, map), ["bos_token <s>", "eos_token </s>", "pad_token x"]);
    }

    #[test]
    fn normalizers_that_lower_the_case() {
        let bert = |lowercase| serde_json::json!({"type": "BertNormalizer", "lowercase": lowercase});
        let sequence = |of: &[Value]| serde_json::json!({"type": "Sequence", "normalizers": of});
        let (lower, nfd) = (serde_json::json!({"type": "Lowercase"}), serde_json::json!({"type": "NFD"}));
        let normalizers =
            [bert(true), lower.clone(), sequence(&[nfd.clone(), lower]), bert(false), sequence(&[nfd, bert(false)]), Value::Null];
        assert_eq!(normalizers.each_ref().map(lowers_case), [true, true, true, false, false, false]);
    }

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
