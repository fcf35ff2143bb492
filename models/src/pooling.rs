//! How the vectors of a text's tokens become the vector of a sentence encoder.
//!
//! In: `modules.json` with `1_Pooling/config.json`, `sentence_bert_config.json` and `config_sentence_transformers.json`. Out: [`Pooling`],
//! checked against the model's width.

use rcompile_graph::Pool;
use serde_json::Value;

use crate::config::{ConfigReader, SIZE_MAX};
use crate::dir::{self, ModelDir};
use crate::error::{Error, Kind};
use crate::generation::SETTINGS_BYTES_MAX;
use crate::json;
use crate::tokenizer::{self, TokenizerFacts};

/// The file that says which steps a sentence encoder has.
pub const MODULES: &str = "modules.json";
const PROMPTS: &str = "config_sentence_transformers.json";
const TEXTS: &str = "sentence_bert_config.json";

/// A sentence encoder's last steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pooling {
    /// How tokens become one vector.
    pub mode: Pool,
    /// Whether the vector is scaled to length 1.
    pub normalize: bool,
    /// Tokens of a text that are used, special ones included; longer texts are cut.
    pub max_tokens: Option<usize>,
    /// Texts are to be in lower case: the tokenizer must make them so.
    pub lowercase: bool,
}

/// Reads `modules.json` and what it names; `None` where the model is no sentence encoder.
pub fn read_pooling(dir: &ModelDir, hidden_size: usize) -> Result<Option<Pooling>, Error> {
    let Some(bytes) = dir.read_if_present(MODULES, SETTINGS_BYTES_MAX)? else { return Ok(None) };
    let malformed =
        |place: &str, what: &str, expected: &str, found: String| Err(Error::new(Kind::Malformed, MODULES, place, what, expected, found));
    let top = json::parse(MODULES, &bytes)?;
    let Value::Array(modules) = &top else {
        return malformed("1:1", "wrong type", "a list of modules", json::kind_of(&top).to_string());
    };
    let (mut mode, mut normalize) = (None, false);
    for (index, module) in modules.iter().enumerate() {
        let text = |key: &str| module.get(key).and_then(Value::as_str);
        let Some(kind) = text("type") else {
            return malformed(&format!("[{index}].type"), "is missing", "the name of a module", json::show(module));
        };
        let path = text("path").unwrap_or_default();
        if !path.is_empty() && !dir::is_plain_name(path) {
            let (place, expected) = (format!("[{index}].path"), "a folder in the model directory");
            return Err(Error::new(Kind::Missing, MODULES, place, "points outside", expected, format!("`{path}`")));
        }
        match kind.rsplit('.').next().unwrap_or(kind) {
            "Transformer" if index == 0 && path.is_empty() => {}
            "Pooling" if mode.is_none() => mode = Some(read_mode(dir, path, hidden_size)?),
            "Normalize" if mode.is_some() => normalize = true,
            _ => {
                let expected = "Transformer, then Pooling, then Normalize";
                let (place, what) = (format!("[{index}].type"), "is not supported");
                return Err(Error::new(Kind::Unsupported, MODULES, place, what, expected, kind));
            }
        }
    }
    let Some(mode) = mode else {
        // As rerankers are saved, which say one number of two texts.
        let (what, expected) = ("has no pooling, which is not supported", "Transformer, then Pooling, then Normalize");
        return Err(Error::new(Kind::Unsupported, MODULES, "type", what, expected, "no Pooling"));
    };
    let settings = dir.read_if_present(TEXTS, SETTINGS_BYTES_MAX)?;
    let map = settings.map(|bytes| json::parse_object(TEXTS, &bytes)).transpose()?.unwrap_or_default();
    let reader = ConfigReader::new(TEXTS, &map);
    let lowercase = reader.bool_or("do_lower_case", false)?;
    let max_tokens = reader.usize_opt("max_seq_length", 1..=SIZE_MAX)?;
    refuse_default_prompt(dir)?;
    Ok(Some(Pooling { mode, normalize, max_tokens, lowercase }))
}

/// Refuses a tokenizer that leaves the case of texts which are to be in lower case. (The reference lowers it before the tokenizer does, by
/// whole words: a sigma at a word's end is another letter then.)
pub fn check_case(pooling: &Pooling, tokenizer: &TokenizerFacts) -> Result<(), Error> {
    if !pooling.lowercase || tokenizer.lowercases {
        return Ok(());
    }
    let (place, expected) = ("do_lower_case", format!("false, or a normalizer of {} that lowers the case", tokenizer::FILE));
    Err(Error::new(Kind::Unsupported, TEXTS, place, "is not supported", expected, true))
}

/// A text that is put in front of every other one changes all vectors: a model that asks for it is not compiled without it.
fn refuse_default_prompt(dir: &ModelDir) -> Result<(), Error> {
    let Some(bytes) = dir.read_if_present(PROMPTS, SETTINGS_BYTES_MAX)? else { return Ok(()) };
    let map = json::parse_object(PROMPTS, &bytes)?;
    let c = ConfigReader::new(PROMPTS, &map);
    let key = "default_prompt_name";
    let Some(name) = c.str_opt(key)? else { return Ok(()) };
    match c.value("prompts").and_then(|prompts| prompts.get(name)) {
        Some(Value::String(prompt)) if prompt.is_empty() => Ok(()),
        Some(Value::String(_)) => {
            let help = format!("set {key} to null and put the prompt in front of your texts yourself");
            Err(c.unsupported(key, name, "a model without a prompt of its own").help(help))
        }
        _ => Err(c.malformed(key, "names no prompt", "a key of prompts", name)),
    }
}

fn read_mode(dir: &ModelDir, folder: &str, hidden_size: usize) -> Result<Pool, Error> {
    let file = if folder.is_empty() { "config.json".to_string() } else { format!("{folder}/config.json") };
    let map = json::parse_object(&file, &dir.open_file(&file)?.read_all(SETTINGS_BYTES_MAX)?)?;
    let c = ConfigReader::new(&file, &map);
    for place in ["word_embedding_dimension", "embedding_dimension"] {
        if let Some(width) = c.usize_opt(place, 1..=SIZE_MAX)?.filter(|w| *w != hidden_size) {
            let expected = format!("hidden_size {hidden_size} of config.json");
            return Err(Error::new(Kind::Disagree, &file, place, "is not the model's", expected, width));
        }
    }
    let supported = "one of cls, mean, max, lasttoken";
    let of = |name: &str, key: &str| match name {
        "mean" | "mean_tokens" => Ok(Pool::Mean),
        "cls" | "cls_token" => Ok(Pool::Cls),
        "max" | "max_tokens" => Ok(Pool::Max),
        "lasttoken" | "last" => Ok(Pool::Last),
        other => Err(c.unsupported(key, other, supported)),
    };
    let named = match c.value("pooling_mode") {
        Some(Value::Array(_)) => c.strings("pooling_mode")?.unwrap_or_default(),
        _ => c.str_opt("pooling_mode")?.into_iter().collect(),
    };
    let is_named = !named.is_empty();
    let mut chosen = Vec::new();
    for name in named {
        chosen.push((name, of(name, "pooling_mode")?));
    }
    // An older form, which the newer wins against.
    for key in map.keys().filter(|key| !is_named && key.starts_with("pooling_mode_")) {
        if c.bool_or(key, false)? {
            chosen.push((key.as_str(), of(&key["pooling_mode_".len()..], key)?));
        }
    }
    match chosen.as_slice() {
        [(_, mode)] => Ok(*mode),
        // As the reference has it.
        [] => Ok(Pool::Mean),
        several => {
            let names: Vec<&str> = several.iter().map(|(name, _)| *name).collect();
            Err(c.unsupported("pooling_mode", names.join(" and "), "a single one"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::tests::dir_with;
    use serde_json::json;

    #[test]
    fn default_prompts() {
        let modules = json!([
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        ]);
        let with = |prompts: Value| {
            let mode = json!({"pooling_mode_cls_token": true});
            let (_temp, dir) = dir_with(&[(MODULES, modules.clone()), ("1_Pooling/config.json", mode), (PROMPTS, prompts)]);
            read_pooling(&dir, 8).map_err(|e| (e.exit_code(), e.place.clone(), e.help.unwrap_or_default()))
        };
        let prompts = json!({"query": "Represent this: ", "document": ""});
        for name in [json!(null), json!("document")] {
            assert!(with(json!({"prompts": prompts, "default_prompt_name": name})).is_ok(), "{name}");
        }
        assert!(with(json!({"prompts": prompts})).is_ok() && with(json!({})).is_ok());
        let (exit, place, help) = with(json!({"prompts": prompts, "default_prompt_name": "query"})).unwrap_err();
        assert!(exit == 6 && place == "default_prompt_name" && help.contains("to null"), "{exit} {place} {help}");
        for (name, exit) in [(json!("passage"), 4), (json!(1), 4)] {
            assert_eq!(with(json!({"prompts": prompts, "default_prompt_name": name})).unwrap_err().0, exit);
        }
    }

    fn pooling(modules: Value, mode: Value) -> Result<Option<Pooling>, Error> {
        let (_temp, dir) = dir_with(&[(MODULES, modules), ("1_Pooling/config.json", mode)]);
        read_pooling(&dir, 8)
    }

    /// Texts in lower case are the tokenizer's business, which must know of it.
    #[test]
    fn texts_in_lower_case() {
        let modules = json!([
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        ]);
        for (wanted, lowercases, exit) in [(true, true, None), (true, false, Some(6)), (false, false, None), (false, true, None)] {
            let mode = json!({"pooling_mode_cls_token": true});
            let texts = json!({"max_seq_length": 512, "do_lower_case": wanted});
            let (_temp, dir) = dir_with(&[(MODULES, modules.clone()), ("1_Pooling/config.json", mode), (TEXTS, texts)]);
            let pooling = read_pooling(&dir, 8).unwrap().unwrap();
            assert_eq!((pooling.lowercase, pooling.max_tokens), (wanted, Some(512)));
            let checked = check_case(&pooling, &TokenizerFacts { lowercases, ..TokenizerFacts::default() });
            assert_eq!(checked.err().map(|e| e.exit_code()), exit, "{wanted} {lowercases}");
        }
    }

    #[test]
    fn pooling_modules() {
        let module = |kind: &str, path: &str| json!({"type": format!("sentence_transformers.models.{kind}"), "path": path});
        let (transformer, pool) = (module("Transformer", ""), module("Pooling", "1_Pooling"));
        let mean = json!({"word_embedding_dimension": 8, "pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true});
        let full = json!([transformer, pool, module("Normalize", "2_Normalize")]);
        let expected = Pooling { mode: Pool::Mean, normalize: true, max_tokens: None, lowercase: false };
        let plain = Pooling { normalize: false, ..expected.clone() };
        assert_eq!(pooling(full.clone(), mean.clone()).unwrap(), Some(expected));
        assert_eq!(pooling(json!([transformer, pool]), mean.clone()).unwrap(), Some(plain));
        for (modules, mode, exit) in [
            (json!([transformer, pool, module("Dense", "2_Dense")]), mean.clone(), 6),
            (json!([transformer, module("Pooling", "../x")]), mean.clone(), 3),
            (json!([transformer]), mean.clone(), 6),
            (json!([module("Transformer", "0_Transformer"), pool]), mean.clone(), 6),
            (json!([transformer, transformer, pool]), mean.clone(), 6),
            (json!([transformer, pool, pool]), mean.clone(), 6),
            (json!([transformer, module("Normalize", "1_Normalize"), pool]), mean.clone(), 6),
            (json!({}), mean.clone(), 4),
            (full.clone(), json!({"word_embedding_dimension": 9, "pooling_mode_mean_tokens": true}), 5),
            (full.clone(), json!({"embedding_dimension": 9}), 5),
            (full.clone(), json!({"pooling_mode": ["mean", "max"]}), 6),
            (full.clone(), json!({"pooling_mode": [1]}), 4),
            (full.clone(), json!({"pooling_mode": 1}), 4),
            (full.clone(), json!({"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}), 6),
            (full.clone(), json!({"pooling_mode_weightedmean_tokens": true}), 6),
        ] {
            assert_eq!(pooling(modules.clone(), mode.clone()).unwrap_err().exit_code(), exit, "{modules} {mode}");
        }
        for (mode, expected) in [
            (json!({}), Pool::Mean),
            (json!({"pooling_mode_mean_tokens": false}), Pool::Mean),
            (json!({"pooling_mode": "lasttoken"}), Pool::Last),
            (json!({"pooling_mode": ["max"], "embedding_dimension": 8}), Pool::Max),
            (json!({"pooling_mode": "cls", "pooling_mode_mean_tokens": true}), Pool::Cls),
        ] {
            assert_eq!(pooling(full.clone(), mode.clone()).unwrap().unwrap().mode, expected, "{mode}");
        }
    }
}
