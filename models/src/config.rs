//! Typed, checked access to `config.json` and its like, and the parts that several architectures share.
//!
//! [`ConfigReader`] wraps one JSON object and names the field in every error.
//! `null` counts as absent, as it does in the reference library, but for the few keys that it takes for false then
//! ([`ConfigReader::bool_where_null_is_false`]).
//!
//! `config.json` comes in two forms, both common: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and
//! transformers 5 (`rope_parameters`, `dtype`, `layer_types`). [`rope()`], [`check_dtype`] and [`layer_types`] read either.

use std::fmt;
use std::ops::RangeInclusive;

use rcompile_graph::Unary;
use serde_json::{Map, Value};

use crate::error::{Error, Kind};
use crate::json;

/// Largest value of any size in a config; products are checked by [`ConfigReader::product`].
pub const SIZE_MAX: usize = 1 << 48;
/// Largest number of layers: some times that of any model, and few enough that planning each by itself takes seconds.
pub const LAYERS_MAX: usize = 1 << 10;
/// Largest number of positions, unless the user gives a context size.
pub const POSITIONS_MAX: usize = 1 << 30;
/// Largest extent of one tensor: programs count columns in 32 bits, also those of three merged tensors with each head's padded to a panel.
pub const EXTENT_MAX: usize = 1 << 24;
/// Most elements of a head of attention.
pub const HEAD_DIM_MAX: usize = 2048;
/// Largest number of elements of one tensor.
pub const ELEMENTS_MAX: usize = 1 << 46;

/// One JSON object of one file, read field by field.
pub struct ConfigReader<'a> {
    file: &'a str,
    prefix: String,
    map: &'a Map<String, Value>,
    ctx_size: Option<usize>,
}

impl<'a> ConfigReader<'a> {
    /// A reader of `map`, the top object of `file`.
    pub fn new(file: &'a str, map: &'a Map<String, Value>) -> ConfigReader<'a> {
        ConfigReader { file, prefix: String::new(), map, ctx_size: None }
    }

    /// The same reader with the user's context size, which replaces the model's own maximum where that is absurd.
    pub fn with_ctx_size(mut self, ctx_size: Option<usize>) -> Self {
        self.ctx_size = ctx_size;
        self
    }

    /// The file that is read.
    pub fn file(&self) -> &str {
        self.file
    }

    /// The value of `key`; `None` where it is absent or `null`.
    pub fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Whether `key` is written at all, be it as `null`.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The object at `key` with its own reader; `None` where absent.
    pub fn section(&self, key: &str) -> Result<Option<ConfigReader<'a>>, Error> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                let prefix = format!("{}{key}.", self.prefix);
                Ok(Some(ConfigReader { file: self.file, prefix, map, ctx_size: None }))
            }
            Some(other) => Err(self.wrong_type(key, "an object", other)),
        }
    }

    /// Required integer within `range`. Below it: malformed. Above it: a limit.
    pub fn usize(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize, Error> {
        self.usize_opt(key, range)?.ok_or_else(|| self.absent(key, "an integer"))
    }

    /// Integer within `range`, or `default` where absent.
    pub fn usize_or(&self, key: &str, range: RangeInclusive<usize>, default: usize) -> Result<usize, Error> {
        Ok(self.usize_opt(key, range)?.unwrap_or(default))
    }

    /// Integer within `range`, or `None` where absent.
    pub fn usize_opt(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, Error> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let (low, high) = (*range.start(), *range.end());
        let expected = format!("an integer >= {low}");
        // 2^63 and more fit no signed integer: that is a broken file, not a large model.
        let Some(number) = value.as_u64().filter(|n| *n <= i64::MAX as u64) else {
            let out_of_range = value.as_i64().is_some() || value.as_u64().is_some();
            let what = if out_of_range { "is out of range" } else { "is not an integer" };
            let expected = if low >= 1 { format!("{expected} (must be ≥ {low})") } else { expected };
            return Err(self.malformed(key, what, expected, json::show(value)));
        };
        let number = number as usize;
        if number < low {
            return Err(self.malformed(key, format!("must be ≥ {low}"), expected, number));
        }
        if number > high {
            let expected = format!("at most {high}");
            return Err(Error::new(Kind::Limit, self.file, self.place(key), "is too large", expected, number));
        }
        Ok(Some(number))
    }

    /// Required finite number.
    pub fn f64(&self, key: &str) -> Result<f64, Error> {
        self.f64_opt(key)?.ok_or_else(|| self.absent(key, "a number"))
    }

    /// Finite number, or `default` where absent.
    pub fn f64_or(&self, key: &str, default: f64) -> Result<f64, Error> {
        Ok(self.f64_opt(key)?.unwrap_or(default))
    }

    /// Finite number, or `None` where absent.
    pub fn f64_opt(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if number.is_finite() => Ok(Some(number)),
                _ => Err(self.wrong_type(key, "a number", value)),
            },
        }
    }

    /// Number > 0, or `default` where absent.
    pub fn positive_or(&self, key: &str, default: f64) -> Result<f64, Error> {
        self.positive_check(key, self.f64_or(key, default)?)
    }

    /// Required number > 0.
    pub fn positive(&self, key: &str) -> Result<f64, Error> {
        self.positive_check(key, self.f64(key)?)
    }

    fn positive_check(&self, key: &str, number: f64) -> Result<f64, Error> {
        // The arithmetic is f32: what is zero or infinite there is as wrong as zero itself.
        if number > 0.0 && number as f32 > 0.0 && (number as f32).is_finite() {
            return Ok(number);
        }
        Err(self.malformed(key, "is out of range", "a number > 0 that fits f32", number))
    }

    /// Boolean, or `default` where absent.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool, Error> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(self.wrong_type(key, "true or false", other)),
        }
    }

    /// A switch that the reference has on where it is absent, and off where it is `null`.
    pub fn bool_where_null_is_false(&self, key: &str) -> Result<bool, Error> {
        self.bool_or(key, !self.has(key))
    }

    /// Text, or `None` where absent.
    pub fn str_opt(&self, key: &str) -> Result<Option<&'a str>, Error> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.wrong_type(key, "a string", other)),
        }
    }

    /// Text, or `default` where absent.
    pub fn str_or(&self, key: &str, default: &'a str) -> Result<&'a str, Error> {
        Ok(self.str_opt(key)?.unwrap_or(default))
    }

    /// List of texts, or `None` where absent.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, Error> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let items = value.as_array().ok_or_else(|| self.wrong_type(key, "a list of strings", value))?;
        let texts = items.iter().map(|item| item.as_str().ok_or_else(|| self.wrong_type(key, "a string", item)));
        texts.collect::<Result<_, _>>().map(Some)
    }

    /// `max_position_embeddings` or the like; see [`POSITIONS_MAX`].
    pub fn positions(&self, key: &str, default: usize) -> Result<usize, Error> {
        let high = if self.ctx_size.is_some() { SIZE_MAX } else { POSITIONS_MAX };
        let checked = self.usize_or(key, 1..=high, default);
        checked.map_err(|e| if e.kind == Kind::Limit { e.help("give --ctx-size to choose the context") } else { e })
    }

    /// The product of two sizes that are the extents of one tensor, each within [`EXTENT_MAX`], all within [`ELEMENTS_MAX`].
    pub fn product(&self, a: (&str, usize), b: (&str, usize)) -> Result<usize, Error> {
        let product = a.1.checked_mul(b.1).filter(|n| *n <= ELEMENTS_MAX).ok_or_else(|| {
            let place = format!("{} × {}", self.place(a.0), self.place(b.0));
            let found = format!("{} × {}", a.1, b.1);
            Error::new(Kind::Limit, self.file, place, "is too large", format!("at most {ELEMENTS_MAX} elements"), found)
        })?;
        if let Some((key, size)) = [a, b].into_iter().find(|(_, size)| *size > EXTENT_MAX) {
            return Err(Error::new(Kind::Limit, self.file, self.place(key), "is too large", format!("at most {EXTENT_MAX}"), size));
        }
        Ok(product)
    }

    /// `key` with the path of this section in front, as it appears in messages.
    pub fn place(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// An error about the value of `key` in itself (exit code 4).
    pub fn malformed(&self, key: &str, what: impl fmt::Display, expected: impl fmt::Display, found: impl fmt::Display) -> Error {
        Error::new(Kind::Malformed, self.file, self.place(key), what, expected, found)
    }

    /// An error about two fields that contradict each other (exit code 5).
    pub fn disagree(&self, a: (&str, usize), b: (&str, usize), what: &str, expected: impl fmt::Display) -> Error {
        let place = format!("{} and {}", self.place(a.0), self.place(b.0));
        let found = format!("{} = {}, {} = {}", a.0, a.1, b.0, b.1);
        Error::new(Kind::Disagree, self.file, place, what, expected, found)
    }

    /// An error about a value that is fine elsewhere but not here (exit code 6); `supported` lists what is.
    pub fn unsupported(&self, key: &str, found: impl fmt::Display, supported: impl fmt::Display) -> Error {
        Error::new(Kind::Unsupported, self.file, self.place(key), "is not supported", supported, found)
    }

    /// Refuses by name where a switch that changes the computation is on.
    pub fn refuse_if_true(&self, key: &str) -> Result<(), Error> {
        if self.bool_or(key, false)? { Err(self.unsupported(key, "true", "false")) } else { Ok(()) }
    }

    fn absent(&self, key: &str, expected: &str) -> Error {
        self.malformed(key, "is missing", expected, "nothing")
    }

    fn wrong_type(&self, key: &str, expected: &str, found: &Value) -> Error {
        self.malformed(key, "has the wrong type", expected, json::show(found))
    }
}

/// Refuses a `dtype` or `torch_dtype` that is no type of floats here. What tensors have, they say themselves.
pub fn check_dtype(config: &ConfigReader<'_>) -> Result<(), Error> {
    for key in ["dtype", "torch_dtype"] {
        let Some(name) = config.str_opt(key)? else { continue };
        if !["auto", "float32", "float", "float16", "half", "bfloat16"].contains(&name.strip_prefix("torch.").unwrap_or(name)) {
            return Err(config.unsupported(key, name, "one of float32, float16, bfloat16"));
        }
    }
    Ok(())
}

/// The function between the two halves of a feed-forward block that `key` names. All spellings of GELU's tanh form compute the same.
pub fn activation(config: &ConfigReader<'_>, key: &str, default: &'static str) -> Result<Unary, Error> {
    match config.str_or(key, default)? {
        "silu" | "swish" => Ok(Unary::Silu),
        "gelu" | "gelu_python" => Ok(Unary::Gelu),
        "gelu_new" | "gelu_fast" | "gelu_accurate" | "gelu_pytorch_tanh" | "gelu_python_tanh" => Ok(Unary::GeluTanh),
        "relu" => Ok(Unary::Relu),
        other => Err(config.unsupported(key, other, "one of silu, gelu, gelu_new, gelu_pytorch_tanh, relu")),
    }
}

/// How positions turn queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the series is stretched to longer contexts.
    pub kind: RopeKind,
    /// Share of each head that is rotated, 0 < x <= 1.
    pub partial_rotary_factor: f64,
}

/// The ways to stretch RoPE that are supported; [`crate::rope::inv_freq`] has the formulas.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeKind {
    /// As in the original paper.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// Stretch.
        factor: f64,
    },
    /// NTK-aware; equal to `Default` up to the trained length, and refused beyond it.
    Dynamic {
        /// Stretch beyond the trained length.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high ones kept, a smooth step between.
    Llama3 {
        /// Stretch of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are low frequencies.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are high frequencies.
        high_freq_factor: f64,
        /// Trained length.
        original_max_position_embeddings: usize,
    },
    /// YaRN: a linear ramp between interpolation and extrapolation, and a factor on cos and sin.
    Yarn {
        /// Stretch.
        factor: f64,
        /// Rotations over the trained length above which a dimension is extrapolated.
        beta_fast: f64,
        /// Rotations over the trained length below which a dimension is interpolated.
        beta_slow: f64,
        /// Factor on cos and sin; computed from the others where absent.
        attention_factor: Option<f64>,
        /// Numerator of the computed factor.
        mscale: Option<f64>,
        /// Denominator of the computed factor.
        mscale_all_dim: Option<f64>,
        /// Trained length.
        original_max_position_embeddings: usize,
        /// Whether the ends of the ramp are rounded to whole dimensions.
        truncate: bool,
    },
}

/// RoPE parameters of a config in either form: the same for all layers.
pub fn rope(config: &ConfigReader<'_>, max_positions: usize) -> Result<RopeConfig, Error> {
    let outer_theta = config.positive_or("rope_theta", 10_000.0)?;
    let outer_partial = config.f64_or("partial_rotary_factor", 1.0)?;
    let original = config.usize_opt("original_max_position_embeddings", 1..=SIZE_MAX)?;
    let (old, new) = (config.section("rope_scaling")?, config.section("rope_parameters")?);
    // An empty one is none to the reference, where there is another.
    let old = old.filter(|old| new.is_none() || !old.map.is_empty());
    if let (Some(old), Some(new)) = (&old, &new)
        && old.map != new.map
    {
        let what = "give two different descriptions";
        let found = "both, with different content";
        return Err(Error::new(Kind::Disagree, config.file, "rope_scaling and rope_parameters", what, "one", found));
    }
    let outer = Outer { theta: outer_theta, partial: outer_partial, original, max_positions, of: config };
    let section = old.or(new);
    // Nested by type of layer: only classes that are not supported here have such parameters; the reference's others ignore them or fail.
    if let Some(section) = &section
        && let Some((layer_type, _)) = section.map.iter().find(|(_, inner)| inner.is_object())
    {
        return Err(section.unsupported(layer_type, "an object within RoPE parameters", "the same parameters for all layers"));
    }
    rope_section(section.as_ref(), &outer)
}

/// Places of RoPE parameters that no type knows. The reference leaves them out of account, too; other engines read some (`attn_factor`).
pub fn unread_rope(config: &ConfigReader<'_>) -> Result<Vec<String>, Error> {
    let known = |key: &str| ROPE_OF_ANY_TYPE.contains(&key) || ROPE_OF_A_TYPE.contains(&key);
    let mut unread = Vec::new();
    for name in ["rope_scaling", "rope_parameters"] {
        let Some(section) = config.section(name)? else { continue };
        let keys = section.map.keys().filter(|key| section.value(key).is_some() && !known(key));
        unread.extend(keys.map(|key| section.place(key)));
    }
    Ok(unread)
}

/// Where the config says `field` of its RoPE parameters, for messages.
pub fn rope_place(config: &ConfigReader<'_>, field: &str) -> String {
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(Value::Object(section)) = config.value(key) else { continue };
        // The type has an older name, too.
        let names = if field == "rope_type" { &["rope_type", "type"][..] } else { &[field] };
        if let Some(name) = names.iter().find(|name| section.contains_key(**name)) {
            return config.place(&format!("{key}.{name}"));
        }
    }
    config.place(field)
}

/// Parameters of a RoPE section that mean something to one of the types alone.
const ROPE_OF_A_TYPE: [&str; 11] = [
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "long_factor",
    "short_factor",
    "truncate",
];
/// Those of all types; `finetuned` is a note of how the model was made.
const ROPE_OF_ANY_TYPE: [&str; 6] =
    ["rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned"];

/// What a RoPE section falls back on.
struct Outer<'a, 'b> {
    theta: f64,
    partial: f64,
    original: Option<usize>,
    max_positions: usize,
    of: &'a ConfigReader<'b>,
}

fn rope_section(section: Option<&ConfigReader<'_>>, outer: &Outer<'_, '_>) -> Result<RopeConfig, Error> {
    let Some(s) = section else {
        let partial_rotary_factor = partial_factor(outer.of, outer.partial)?;
        return Ok(RopeConfig { theta: outer.theta, kind: RopeKind::Default, partial_rotary_factor });
    };
    // Where a field stands, for messages.
    let of = |key: &str| if s.value(key).is_some() { s } else { outer.of };
    let theta = s.positive_or("rope_theta", outer.theta)?;
    let partial_rotary_factor = partial_factor(of("partial_rotary_factor"), s.f64_or("partial_rotary_factor", outer.partial)?)?;
    let original = || -> Result<usize, Error> {
        let own = s.usize_opt("original_max_position_embeddings", 1..=SIZE_MAX)?;
        // The outer field wins: some families state the trained length there.
        Ok(outer.original.or(own).unwrap_or(outer.max_positions))
    };
    let type_key = if s.value("rope_type").is_some() { "rope_type" } else { "type" };
    // Without a type they would count for nothing.
    if s.value(type_key).is_none() && ROPE_OF_A_TYPE.iter().any(|key| s.value(key).is_some()) {
        return Err(s.absent("rope_type", "a type for these parameters"));
    }
    let kind = match s.str_or(type_key, "default")? {
        "default" => RopeKind::Default,
        "linear" => RopeKind::Linear { factor: s.positive("factor")? },
        "dynamic" => RopeKind::Dynamic { factor: s.positive("factor")? },
        "llama3" => {
            let (low, high) = (s.positive("low_freq_factor")?, s.positive("high_freq_factor")?);
            if low as f32 >= high as f32 {
                let place = format!("{} and {}", s.place("low_freq_factor"), s.place("high_freq_factor"));
                let found = format!("{low} and {high}");
                return Err(Error::new(Kind::Disagree, s.file, place, "are in the wrong order", "low < high", found));
            }
            RopeKind::Llama3 {
                factor: s.positive("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original()?,
            }
        }
        "yarn" => {
            // In Python `x or default`: zero counts as absent.
            let or = |key: &str, default: f64| -> Result<f64, Error> {
                match s.f64_opt(key)? {
                    Some(0.0) | None => Ok(default),
                    Some(_) => s.positive(key),
                }
            };
            if theta <= 1.0 {
                return Err(of("rope_theta").malformed("rope_theta", "is out of range for yarn", "a number > 1", theta));
            }
            let attention_factor = s.f64_opt("attention_factor")?;
            if attention_factor.is_some() {
                s.positive("attention_factor")?;
            }
            let original = original()?;
            // Written as null it is what the trained length was stretched by.
            let stretched = s.has("factor") && s.value("factor").is_none();
            RopeKind::Yarn {
                factor: if stretched { outer.max_positions as f64 / original as f64 } else { s.positive("factor")? },
                beta_fast: or("beta_fast", 32.0)?,
                beta_slow: or("beta_slow", 1.0)?,
                attention_factor,
                mscale: s.f64_opt("mscale")?,
                mscale_all_dim: s.f64_opt("mscale_all_dim")?,
                original_max_position_embeddings: original,
                truncate: s.bool_where_null_is_false("truncate")?,
            }
        }
        other => return Err(s.unsupported(type_key, other, "one of default, linear, dynamic, llama3, yarn")),
    };
    Ok(RopeConfig { theta, kind, partial_rotary_factor })
}

fn partial_factor(at: &ConfigReader<'_>, factor: f64) -> Result<f64, Error> {
    if factor > 0.0 && factor <= 1.0 {
        return Ok(factor);
    }
    Err(at.malformed("partial_rotary_factor", "is out of range", "0 < x <= 1", factor))
}

/// `layer_types`, checked for known names and for the number of layers; `None` where absent.
pub fn layer_types<'a>(config: &ConfigReader<'a>, layers: usize) -> Result<Option<Vec<&'a str>>, Error> {
    let Some(types) = config.strings("layer_types")? else { return Ok(None) };
    if types.len() != layers {
        let what = "do not match";
        return Err(config.disagree(("layer_types", types.len()), ("num_hidden_layers", layers), what, "one per layer"));
    }
    match types.iter().find(|t| !matches!(**t, "full_attention" | "sliding_attention")) {
        Some(other) => Err(config.unsupported("layer_types", other, "full_attention or sliding_attention")),
        None => Ok(Some(types)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with<T>(value: Value, f: impl FnOnce(&ConfigReader<'_>) -> T) -> T {
        f(&ConfigReader::new("config.json", value.as_object().unwrap()))
    }

    #[test]
    fn integers_are_integers() {
        let config = json!({"zero": 0, "neg": -1, "half": 2.5, "text": "2", "big": 1u64 << 63, "huge": 1e19, "ok": 7});
        with(config, |c| {
            for (key, exit) in [("zero", 4), ("neg", 4), ("half", 4), ("text", 4), ("big", 4), ("huge", 4), ("none", 4)] {
                let e = c.usize(key, 1..=100).unwrap_err();
                assert_eq!((e.exit_code(), e.place.as_str()), (exit, key), "{e}");
            }
            assert_eq!(c.usize("ok", 1..=100).unwrap(), 7);
            assert_eq!(c.usize("ok", 1..=6).unwrap_err().exit_code(), 7);
        });
    }

    #[test]
    fn rope_in_both_forms() {
        let v4 = json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}});
        let v5 = json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000}});
        let expected = RopeConfig { theta: 5e5, kind: RopeKind::Linear { factor: 2.0 }, partial_rotary_factor: 1.0 };
        for config in [v4, v5] {
            assert_eq!(with(config, |c| rope(c, 64)).unwrap(), expected);
        }
        for (truncate, wanted) in [(json!(true), true), (json!(false), false), (json!(null), false)] {
            let yarn = json!({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": truncate}});
            let RopeKind::Yarn { truncate, .. } = with(yarn, |c| rope(c, 64)).unwrap().kind else { panic!() };
            assert_eq!(truncate, wanted);
        }
        for betas in [json!({}), json!({"beta_fast": 0, "beta_slow": null})] {
            let mut yarn = json!({"rope_type": "yarn", "factor": 2});
            yarn.as_object_mut().unwrap().extend(betas.as_object().unwrap().clone());
            let kind = with(json!({ "rope_scaling": yarn }), |c| rope(c, 64)).unwrap().kind;
            assert!(matches!(kind, RopeKind::Yarn { beta_fast: 32.0, beta_slow: 1.0, .. }), "{kind:?}");
        }
        let both = json!({"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2}});
        assert_eq!(with(both, |c| rope(c, 64)).unwrap().kind, RopeKind::Linear { factor: 2.0 });
        let yarn = json!({"rope_scaling": {"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 16}});
        assert!(matches!(with(yarn, |c| rope(c, 64)).unwrap().kind, RopeKind::Yarn { factor: 4.0, .. }));
    }

    #[test]
    fn rope_parameters_that_nothing_reads_are_named() {
        let unread = |config: Value| with(config, unread_rope).unwrap();
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "truncate": false, "finetuned": true, "attn_factor": 0.878, "other": null});
        assert_eq!(unread(json!({ "rope_scaling": yarn })), ["rope_scaling.attn_factor"]);
        assert_eq!(unread(json!({"rope_parameters": {"rope_theta": 1e4, "extra": 1}})), ["rope_parameters.extra"]);
        assert!(unread(json!({"rope_theta": 1e4})).is_empty());
    }

    #[test]
    fn rope_refusals() {
        for (config, exit, place) in [
            (json!({"rope_scaling": {"type": "foo"}}), 6, "rope_scaling.type"),
            (json!({"rope_scaling": {"rope_type": "longrope"}}), 6, "rope_scaling.rope_type"),
            (json!({"rope_scaling": {"type": "linear"}}), 4, "rope_scaling.factor"),
            (json!({"rope_scaling": {"type": "yarn"}}), 4, "rope_scaling.factor"),
            (json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}), 6, "rope_parameters.full_attention"),
            (json!({"rope_scaling": {"type": "linear", "factor": 0}}), 4, "rope_scaling.factor"),
            (json!({"rope_scaling": {"type": "linear", "factor": -1}}), 4, "rope_scaling.factor"),
            (
                json!({"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}}),
                5,
                "rope_scaling.low_freq_factor",
            ),
            // Zero and infinity in f32.
            (json!({"rope_scaling": {"type": "linear", "factor": 1e-60}}), 4, "rope_scaling.factor"),
            (json!({"rope_scaling": {"type": "linear", "factor": 1e60}}), 4, "rope_scaling.factor"),
            (json!({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 0}}), 4, "rope_scaling.attention_factor"),
            (json!({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": -1}}), 4, "rope_scaling.attention_factor"),
            (json!({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}), 4, "rope_theta"),
            (json!({"rope_scaling": {"type": "yarn", "factor": 2, "rope_theta": 1}}), 4, "rope_scaling.rope_theta"),
            (json!({"partial_rotary_factor": 2, "rope_scaling": {"type": "linear", "factor": 2}}), 4, "partial_rotary_factor"),
            (json!({"rope_theta": 0}), 4, "rope_theta"),
            (json!({"rope_parameters": {"rope_theta": -1.0}}), 4, "rope_parameters.rope_theta"),
            (json!({"partial_rotary_factor": 0}), 4, "partial_rotary_factor"),
            (json!({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {}}), 5, "rope_scaling and"),
        ] {
            let e = with(config.clone(), |c| rope(c, 64)).unwrap_err();
            assert_eq!(e.exit_code(), exit, "{config}: {e}");
            assert!(e.place.starts_with(place), "{config}: {e}");
        }
    }
}
