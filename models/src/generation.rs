//! When generation ends and how it samples.
//!
//! In: `generation_config.json`, or `config.json` where there is none. Out: [`Generation`], its ids within the vocabulary, and warnings about
//! settings that are not followed.

use serde_json::Value;

use crate::arch::Task;
use crate::config::{ConfigReader, SIZE_MAX};
use crate::dir::ModelDir;
use crate::error::{Error, Kind, Warning};
use crate::json;

/// Largest JSON file of settings.
pub const SETTINGS_BYTES_MAX: u64 = 4 << 20;
const GENERATION: &str = "generation_config.json";
/// Most ids that end a generation.
const EOS_MAX: usize = 1024;

/// Ids that matter to generation, and the model's own sampling defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// Ids that end a generation; empty where the model names none.
    pub eos: Vec<u32>,
    /// The id that begins a text.
    pub bos: Option<u32>,
    /// Whether the model asks for sampling instead of the likeliest token.
    pub do_sample: bool,
    /// Divides the logits.
    pub temperature: Option<f64>,
    /// Keeps the likeliest; 0 keeps all.
    pub top_k: Option<usize>,
    /// Keeps the smallest set with this probability.
    pub top_p: Option<f64>,
    /// Keeps what has at least this share of the likeliest.
    pub min_p: Option<f64>,
    /// Divides or multiplies the logits of tokens that were seen.
    pub repetition_penalty: Option<f64>,
}

/// Reads `generation_config.json`, or what `config` says of generation where there is no such file; ids from `config` also where the file
/// does not say. Settings that change what is generated and are not followed are warned of, one by one. An encoder generates nothing: of it
/// ids are read alone.
pub fn read_generation(
    dir: &ModelDir,
    config: &ConfigReader<'_>,
    (task, vocab_size): (Task, usize),
    warnings: &mut Vec<Warning>,
) -> Result<Generation, Error> {
    let bytes = dir.read_if_present(GENERATION, SETTINGS_BYTES_MAX)?;
    let map = bytes.map(|bytes| json::parse_object(GENERATION, &bytes)).transpose()?;
    let file = map.as_ref().map(|map| ConfigReader::new(GENERATION, map));
    let settings = file.as_ref().unwrap_or(config);
    let first = |key: &str| -> Result<Vec<u32>, Error> {
        // Both are checked, also where only one is used.
        let (a, b) = (ids(settings, key, vocab_size)?, ids(config, key, vocab_size)?);
        Ok(a.or(b).unwrap_or_default())
    };
    let (eos, bos) = (first("eos_token_id")?, first("bos_token_id")?.first().copied());
    if task == Task::Embed {
        return Ok(Generation { eos, bos, ..Generation::default() });
    }
    let do_sample = settings.bool_or("do_sample", false)?;
    for setting in NOT_FOLLOWED.iter().filter(|setting| setting.is_active(settings, do_sample)) {
        warnings.push(Warning::new(settings.file(), setting.key, "changes what the reference generates; it is not supported, and ignored"));
    }
    let share = |key: &str| -> Result<Option<f64>, Error> {
        match settings.f64_opt(key)? {
            Some(x) if !(0.0..=1.0).contains(&x) => Err(settings.malformed(key, "is out of range", "0 <= x <= 1", x)),
            x => Ok(x),
        }
    };
    let temperature = settings.f64_opt("temperature")?;
    // 0 is greedy; what only becomes 0 in f32 is something else.
    let fits = |x: f64| x == 0.0 || x as f32 > 0.0 && (x as f32).is_finite();
    if let Some(x) = temperature.filter(|x| !fits(*x)) {
        return Err(settings.malformed("temperature", "is out of range", "a number >= 0 that fits f32", x));
    }
    let repetition_penalty = settings.f64_opt("repetition_penalty")?;
    if repetition_penalty.is_some() {
        settings.positive("repetition_penalty")?;
    }
    Ok(Generation {
        eos,
        bos,
        do_sample,
        temperature,
        top_k: settings.usize_opt("top_k", 0..=SIZE_MAX)?,
        top_p: share("top_p")?,
        min_p: share("min_p")?,
        repetition_penalty,
    })
}

/// A setting of the reference's generation that executables do not follow.
struct Setting {
    key: &'static str,
    when: When,
}

/// When a setting changes what is generated.
enum When {
    /// Where there is any: a list or an object with something in it, an id, a switch that is on.
    Given,
    /// A number above this one.
    Above(f64),
    /// Any other number than this one.
    Not(f64),
    /// With sampling alone, a number between these.
    Sampled(f64, f64),
}

/// All of them. The most tokens and the most time (`max_new_tokens`, `max_time`) are not among them: `-n` decides.
const NOT_FOLLOWED: &[Setting] = &[
    Setting { key: "suppress_tokens", when: When::Given },
    Setting { key: "begin_suppress_tokens", when: When::Given },
    Setting { key: "bad_words_ids", when: When::Given },
    Setting { key: "force_words_ids", when: When::Given },
    Setting { key: "forced_bos_token_id", when: When::Given },
    Setting { key: "forced_eos_token_id", when: When::Given },
    Setting { key: "sequence_bias", when: When::Given },
    Setting { key: "no_repeat_ngram_size", when: When::Above(0.0) },
    Setting { key: "encoder_no_repeat_ngram_size", when: When::Above(0.0) },
    Setting { key: "encoder_repetition_penalty", when: When::Not(1.0) },
    Setting { key: "exponential_decay_length_penalty", when: When::Given },
    Setting { key: "min_length", when: When::Above(0.0) },
    Setting { key: "min_new_tokens", when: When::Above(0.0) },
    Setting { key: "num_beams", when: When::Above(1.0) },
    Setting { key: "guidance_scale", when: When::Not(1.0) },
    Setting { key: "penalty_alpha", when: When::Above(0.0) },
    Setting { key: "dola_layers", when: When::Given },
    Setting { key: "stop_strings", when: When::Given },
    Setting { key: "token_healing", when: When::Given },
    Setting { key: "watermarking_config", when: When::Given },
    Setting { key: "typical_p", when: When::Sampled(0.0, 1.0) },
    Setting { key: "epsilon_cutoff", when: When::Sampled(0.0, 1.0) },
    Setting { key: "eta_cutoff", when: When::Sampled(0.0, 1.0) },
    Setting { key: "top_h", when: When::Sampled(0.0, 1.0) },
];

impl Setting {
    fn is_active(&self, settings: &ConfigReader<'_>, do_sample: bool) -> bool {
        let Some(value) = settings.value(self.key) else { return false };
        let number = value.as_f64();
        match self.when {
            When::Given => match value {
                Value::Array(items) => !items.is_empty(),
                Value::Object(map) => !map.is_empty(),
                Value::Bool(on) => *on,
                Value::Number(_) | Value::String(_) | Value::Null => true,
            },
            When::Above(least) => number.is_some_and(|x| x > least),
            When::Not(neutral) => number.is_some_and(|x| x != neutral),
            When::Sampled(low, high) => do_sample && number.is_some_and(|x| low < x && x < high),
        }
    }
}

/// The id or list of ids at `key`, each below `vocab_size`.
fn ids(c: &ConfigReader<'_>, key: &str, vocab_size: usize) -> Result<Option<Vec<u32>>, Error> {
    let items = match c.value(key) {
        None => return Ok(None),
        Some(Value::Array(items)) => items.iter().collect(),
        Some(one) => vec![one],
    };
    if items.len() > EOS_MAX {
        let expected = format!("at most {EOS_MAX}");
        return Err(Error::new(Kind::Limit, c.file(), c.place(key), "has too many ids", expected, items.len()));
    }
    let id = |item: &Value| -> Result<u32, Error> {
        let Some(id) = item.as_u64() else {
            return Err(c.malformed(key, "has the wrong type", "an id or a list of ids", json::show(item)));
        };
        match u32::try_from(id).ok().filter(|id| (*id as usize) < vocab_size) {
            Some(id) => Ok(id),
            None => {
                let expected = format!("an id below vocab_size {vocab_size}");
                Err(Error::new(Kind::Disagree, c.file(), c.place(key), "is outside of the vocabulary", expected, id))
            }
        }
    };
    items.into_iter().map(id).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// A directory of these files.
    pub(crate) fn dir_with(files: &[(&str, Value)]) -> (tempfile::TempDir, ModelDir) {
        let temp = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = temp.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content.to_string()).unwrap();
        }
        let dir = ModelDir::open(temp.path()).unwrap();
        (temp, dir)
    }

    fn generation(own: Value, config: Value) -> Result<Generation, Error> {
        let (_temp, dir) = dir_with(&[(GENERATION, own)]);
        read_generation(&dir, &ConfigReader::new("config.json", config.as_object().unwrap()), (Task::Generate, 10), &mut vec![])
    }

    /// Where there is no file of its own, the config says how to generate, and only there; of an encoder nothing does.
    #[test]
    fn settings_of_the_config() {
        let config = json!({"eos_token_id": 1, "repetition_penalty": 1.5, "do_sample": true, "min_length": 3, "num_beams": 1});
        let read = |task: Task, files: &[(&str, Value)], config: &Value| {
            let ((_temp, dir), mut warnings) = (dir_with(files), vec![]);
            let config = ConfigReader::new("config.json", config.as_object().unwrap());
            let g = read_generation(&dir, &config, (task, 10), &mut warnings).unwrap();
            let warnings: Vec<String> = warnings.iter().map(|w| format!("{} {}", w.file, w.place)).collect();
            (g.eos, g.do_sample, g.repetition_penalty, warnings)
        };
        let alone = read(Task::Generate, &[], &config);
        assert_eq!(alone, (vec![1], true, Some(1.5), vec!["config.json min_length".to_string()]));
        let own = json!({"top_k": 3, "bad_words_ids": [[1]], "guidance_scale": 1.5});
        let ignored = ["bad_words_ids", "guidance_scale"].map(|key| format!("{GENERATION} {key}")).to_vec();
        assert_eq!(read(Task::Generate, &[(GENERATION, own)], &config), (vec![1], false, None, ignored));
        let odd = json!({"eos_token_id": 1, "temperature": "warm", "num_beams": 4});
        assert_eq!(read(Task::Embed, &[], &odd), (vec![1], false, None, vec![]));
    }

    /// Values as complete dumps of older configs have them change nothing.
    #[test]
    fn settings_that_change_nothing() {
        let active = |value: Value| {
            let value = value.as_object().unwrap();
            let settings = ConfigReader::new(GENERATION, value);
            let do_sample = settings.bool_or("do_sample", false).unwrap();
            NOT_FOLLOWED.iter().filter(|s| s.is_active(&settings, do_sample)).map(|s| s.key).collect::<Vec<_>>()
        };
        let dump = json!({
            "max_length": 20, "min_length": 0, "do_sample": false, "early_stopping": false, "num_beams": 1, "num_beam_groups": 1,
            "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0,
            "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": null,
            "num_return_sequences": 1, "forced_bos_token_id": null, "forced_eos_token_id": null, "remove_invalid_values": false,
            "exponential_decay_length_penalty": null, "suppress_tokens": null, "begin_suppress_tokens": null, "prefix": null,
            "sep_token_id": null, "task_specific_params": null, "token_healing": false, "sequence_bias": {}, "min_new_tokens": -1});
        assert!(active(dump).is_empty());
        assert!(active(json!({"typical_p": 0.9, "eta_cutoff": 0.1})).is_empty());
        assert_eq!(active(json!({"do_sample": true, "typical_p": 0.9, "eta_cutoff": 1.0})), ["typical_p"]);
        let on =
            json!({"forced_eos_token_id": 2, "stop_strings": "a", "token_healing": true, "sequence_bias": [[[1], 2.0]], "num_beams": 2});
        assert_eq!(active(on), ["forced_eos_token_id", "sequence_bias", "num_beams", "stop_strings", "token_healing"]);
    }

    #[test]
    fn ids_from_either_file() {
        let g = generation(json!({"eos_token_id": [2, 3]}), json!({"eos_token_id": 1, "bos_token_id": 0}));
        let g = g.unwrap();
        assert_eq!((g.eos, g.bos), (vec![2, 3], Some(0)));
        for (own, config, exit, place) in [
            (json!({}), json!({"eos_token_id": 10}), 5, "eos_token_id"),
            (json!({"eos_token_id": [1, 10]}), json!({}), 5, "eos_token_id"),
            (json!({"eos_token_id": "2"}), json!({}), 4, "eos_token_id"),
            (json!({"bos_token_id": -1}), json!({}), 4, "bos_token_id"),
            (json!({"top_p": 1.5}), json!({}), 4, "top_p"),
            (json!({"temperature": -1}), json!({}), 4, "temperature"),
            (json!({"temperature": 1e300}), json!({}), 4, "temperature"),
            (json!({"temperature": 1e-60}), json!({}), 4, "temperature"),
            (json!({"eos_token_id": vec![1; EOS_MAX + 1]}), json!({}), 7, "eos_token_id"),
            (json!({"repetition_penalty": 0}), json!({}), 4, "repetition_penalty"),
        ] {
            let e = generation(own.clone(), config).unwrap_err();
            assert_eq!((e.exit_code(), e.place.as_str()), (exit, place), "{own}: {e}");
        }
    }
}
