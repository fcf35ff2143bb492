//! One configuration for the Llama-like decoders: RMS norm, rotary positions, grouped queries, gated feed-forward.
//!
//! What sets the families apart is data in [`DecoderConfig`]: biases, norms of queries and keys, fused projections,
//! windows per layer, partial rotation, and Granite's multipliers. Tensor names are those of `LlamaForCausalLM`; Phi-3
//! has `qkv_proj` and `gate_up_proj` instead of their parts.
//!
//! Sources: HF `modeling_{llama,mistral,qwen2,qwen3,granite,phi3}.py` and the configuration classes' defaults.

use super::{ArchEntry, Architecture, Facts, Naming, Task, TensorSpec};
use crate::config::{self, ConfigReader, LAYERS_MAX, RopeConfig, RopeKind, SIZE_MAX};
use crate::error::{Error, Kind};
use crate::rope;
use crate::trace::Trace;
use rcompile_graph::build::Built;
use rcompile_graph::{AttnExpr, Binary, DType, Dim, Recipe, Type, TypeError, Unary, ValueId};

/// A Llama-like decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    facts: Facts,
    /// Width of the feed-forward block.
    pub intermediate: usize,
    /// Added under the root of every RMS norm.
    pub eps: f64,
    /// Function on the gate.
    pub act: Unary,
    /// Whether q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub o_bias: bool,
    /// Whether gate, up and down projections have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys pass an RMS norm per head, before rotation.
    pub qk_norm: bool,
    /// One tensor `qkv_proj` `[(heads + 2 kv_heads) head_dim, hidden]`, q rows, then k, then v, and one `gate_up_proj`
    /// `[2 intermediate, hidden]`, gate rows, then up.
    pub fused_projections: bool,
    /// Per layer: how many positions attention sees, itself included; `None` for all.
    pub windows: Vec<Option<usize>>,
    /// Token embeddings are multiplied by this.
    pub embedding_multiplier: f64,
    /// Scores `q . k` are multiplied by this (`head_dim^-0.5` unless the config says otherwise).
    pub attention_multiplier: f64,
    /// What attention and feed-forward add to the residual stream is multiplied by this.
    pub residual_multiplier: f64,
    /// Logits are divided by this.
    pub logits_scaling: f64,
}

impl DecoderConfig {
    /// Rows of the fused q, k, v projection.
    pub fn qkv_rows(&self) -> usize {
        (self.facts.heads + 2 * self.facts.kv_heads) * self.facts.head_dim
    }

    /// How many elements of each head are rotated.
    pub fn rotary_dim(&self) -> usize {
        rope::rotary_dim(self.rope(), self.facts.head_dim)
    }

    /// Rotary positions.
    pub fn rope(&self) -> &RopeConfig {
        self.facts.rope.as_ref().expect("decoders rotate")
    }
}

impl Architecture for DecoderConfig {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let (hidden, width) = (self.facts.hidden_size, self.intermediate);
        let (q, kv) = (self.facts.heads * self.facts.head_dim, self.facts.kv_heads * self.facts.head_dim);
        let mut specs = vec![TensorSpec::required(EMBEDDING, &[self.facts.vocab_size, hidden])];
        for layer in 0..self.facts.layers {
            let mut linear = |name: &str, out: usize, input: usize, bias: bool| {
                let name = format!("model.layers.{layer}.{name}");
                specs.push(TensorSpec::linear(format!("{name}.weight"), &[out, input]));
                if bias {
                    specs.push(TensorSpec::required(format!("{name}.bias"), &[out]));
                }
            };
            if self.fused_projections {
                linear("self_attn.qkv_proj", self.qkv_rows(), hidden, self.qkv_bias);
            } else {
                linear("self_attn.q_proj", q, hidden, self.qkv_bias);
                linear("self_attn.k_proj", kv, hidden, self.qkv_bias);
                linear("self_attn.v_proj", kv, hidden, self.qkv_bias);
            }
            linear("self_attn.o_proj", hidden, q, self.o_bias);
            if self.fused_projections {
                linear("mlp.gate_up_proj", 2 * width, hidden, self.mlp_bias);
            } else {
                linear("mlp.gate_proj", width, hidden, self.mlp_bias);
                linear("mlp.up_proj", width, hidden, self.mlp_bias);
            }
            linear("mlp.down_proj", hidden, width, self.mlp_bias);
            let mut norm = |name: &str, width: usize| {
                specs.push(TensorSpec::required(format!("model.layers.{layer}.{name}.weight"), &[width]));
            };
            norm("input_layernorm", hidden);
            norm("post_attention_layernorm", hidden);
            if self.qk_norm {
                norm("self_attn.q_norm", self.facts.head_dim);
                norm("self_attn.k_norm", self.facts.head_dim);
            }
        }
        specs.push(TensorSpec::required("model.norm.weight", &[hidden]));
        specs.push(TensorSpec::head(HEAD, &[self.facts.vocab_size, hidden], self.facts.tied_head));
        specs
    }

    fn trace(&self, cx: &mut Trace<'_>) -> Result<Vec<ValueId>, TypeError> {
        let half = self.rotary_dim() / 2;
        let (cos, sin) = self.rotary_rows(cx, half)?;
        let x = cx.embedding(EMBEDDING, self.facts.vocab_size, self.facts.hidden_size, cx.token)?;
        let x = cx.b.scale(x, self.embedding_multiplier)?;
        let x = cx.layers(self.facts.layers, x, |cx, layer, x| self.layer(cx, layer, x, (cos, sin, half)))?;
        let x = cx.rms_norm(x, "model.norm", self.facts.hidden_size, self.eps)?;
        let logits = cx.matmul(x, self.facts.read_for(HEAD), self.facts.hidden_size, self.facts.vocab_size)?;
        let logits = if self.logits_scaling == 1.0 {
            logits
        } else {
            let scaling = cx.b.constant(self.logits_scaling);
            cx.b.binary(Binary::Div, logits, scaling)?
        };
        Ok(vec![cx.b.embedding(logits, cx.logit_row)?])
    }
}

impl DecoderConfig {
    /// Rows of the rotary tables for the step's positions: `cos, sin: f32[T, half]`.
    fn rotary_rows(&self, cx: &mut Trace<'_>, half: usize) -> Result<(ValueId, ValueId), TypeError> {
        let (inv_freq, scale) = rope::inv_freq(self.rope(), self.facts.head_dim, self.facts.max_positions);
        let positions = cx.options.ctx_size;
        let mut rows = |name: &str, sin: bool| {
            let ty = Type::new(DType::F32, [Dim::Const(positions), half.into()]);
            let table = cx.b.param(name, ty, Recipe::Rope { sin, inv_freq: inv_freq.clone(), scale, positions });
            cx.b.embedding(table, cx.position)
        };
        Ok((rows("rope.cos", false)?, rows("rope.sin", true)?))
    }

    /// One decoder layer: `x: [T, hidden] -> [T, hidden]`. Source: HF `LlamaDecoderLayer.forward`.
    fn layer(&self, cx: &mut Trace<'_>, layer: usize, x: ValueId, rotary: (ValueId, ValueId, usize)) -> Built {
        let path = format!("model.layers.{layer}");
        let normed = cx.rms_norm(x, &format!("{path}.input_layernorm"), self.facts.hidden_size, self.eps)?;
        let attention = self.attention(cx, layer, normed, rotary)?;
        let attention = cx.b.scale(attention, self.residual_multiplier)?;
        let x = cx.b.add(x, attention)?;
        let normed = cx.rms_norm(x, &format!("{path}.post_attention_layernorm"), self.facts.hidden_size, self.eps)?;
        let mlp = self.mlp(cx, &format!("{path}.mlp"), normed)?;
        let mlp = cx.b.scale(mlp, self.residual_multiplier)?;
        cx.b.add(x, mlp)
    }

    /// Attention of a layer behind its norm: `x: [T, hidden] -> [T, hidden]`. Source: HF `LlamaAttention.forward`.
    fn attention(&self, cx: &mut Trace<'_>, layer: usize, x: ValueId, (cos, sin, half): (ValueId, ValueId, usize)) -> Built {
        let path = format!("model.layers.{layer}.self_attn");
        let (q_width, kv_width) = (self.facts.heads * self.facts.head_dim, self.facts.kv_heads * self.facts.head_dim);
        let (q, k, v) = if self.fused_projections {
            let qkv = cx.linear(x, &format!("{path}.qkv_proj"), self.facts.hidden_size, self.qkv_rows(), self.qkv_bias)?;
            let mut part = |start: usize, width: usize| cx.b.slice(qkv, 1, start, start + width);
            (part(0, q_width)?, part(q_width, kv_width)?, part(q_width + kv_width, kv_width)?)
        } else {
            let mut project =
                |name: &str, width: usize| cx.linear(x, &format!("{path}.{name}"), self.facts.hidden_size, width, self.qkv_bias);
            (project("q_proj", q_width)?, project("k_proj", kv_width)?, project("v_proj", kv_width)?)
        };
        let mut q = cx.split_heads(q, self.facts.heads, self.facts.head_dim)?;
        let mut k = cx.split_heads(k, self.facts.kv_heads, self.facts.head_dim)?;
        let v = cx.split_heads(v, self.facts.kv_heads, self.facts.head_dim)?;
        if self.qk_norm {
            q = cx.rms_norm(q, &format!("{path}.q_norm"), self.facts.head_dim, self.eps)?;
            k = cx.rms_norm(k, &format!("{path}.k_norm"), self.facts.head_dim, self.eps)?;
        }
        let q = cx.rope(q, cos, sin, half, self.facts.head_dim)?;
        let k = cx.rope(k, cos, sin, half, self.facts.head_dim)?;
        let state = cx.kv_state(layer, self.facts.kv_heads, self.facts.head_dim, true);
        let kv = cx.b.kv_append(state, k, v, cx.slot, cx.kv_index)?;
        let mask = match self.windows[layer] {
            Some(window) => AttnExpr::causal_window(window as u64),
            None => AttnExpr::causal(),
        };
        let score = AttnExpr::scaled(self.attention_multiplier);
        let out = cx.b.sdpa(state, q, kv, cx.slot, cx.kv_index, score, mask)?;
        let out = cx.join_heads(out, self.facts.heads, self.facts.head_dim)?;
        cx.linear(out, &format!("{path}.o_proj"), q_width, self.facts.hidden_size, self.o_bias)
    }

    /// The feed-forward block behind its norm: `x: [T, hidden] -> [T, hidden]`. Source: HF `LlamaMLP.forward`.
    fn mlp(&self, cx: &mut Trace<'_>, path: &str, x: ValueId) -> Built {
        let width = self.intermediate;
        let (gate, up) = if self.fused_projections {
            let both = cx.linear(x, &format!("{path}.gate_up_proj"), self.facts.hidden_size, 2 * width, self.mlp_bias)?;
            (cx.b.slice(both, 1, 0, width)?, cx.b.slice(both, 1, width, 2 * width)?)
        } else {
            let gate = cx.linear(x, &format!("{path}.gate_proj"), self.facts.hidden_size, width, self.mlp_bias)?;
            (gate, cx.linear(x, &format!("{path}.up_proj"), self.facts.hidden_size, width, self.mlp_bias)?)
        };
        let gate = cx.b.unary(self.act, gate)?;
        let inner = cx.b.mul(gate, up)?;
        cx.linear(inner, &format!("{path}.down_proj"), width, self.facts.hidden_size, self.mlp_bias)
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// How a family reads its config: the reference's defaults and what its code does with the fields.
struct Family {
    /// `num_key_value_heads` where that is absent; `None`: as many as query heads.
    kv_heads: Option<usize>,
    /// `head_dim` where that is absent; `None`: the width by the heads.
    head_dim: Option<usize>,
    /// `rms_norm_eps` where that is absent.
    eps: f64,
    /// `max_position_embeddings` where that is absent.
    max_positions: usize,
    windows: Windows,
    attention_bias: AttentionBias,
    /// Is `mlp_bias` read? Else there is none.
    reads_mlp_bias: bool,
    /// Do queries and keys pass norms?
    qk_norm: bool,
    /// Are q, k and v one tensor, and gate and up?
    fused_projections: bool,
    rope: RopeRule,
    /// Are the four multipliers read?
    reads_multipliers: bool,
}

/// Which projections of attention have biases.
enum AttentionBias {
    /// As `attention_bias` says, all four or none.
    AsConfigured,
    /// All of q, k and v, or none; the output has none.
    OfInputs(bool),
}

/// What of a config's RoPE the class follows.
enum RopeRule {
    /// All kinds, of whole heads: its plain RoPE drops `partial_rotary_factor`, and the scaled kinds fail on it.
    Scaled,
    /// The plain kind, of a part of each head: every other type name stands for LongRoPE.
    Partial,
}

/// Which fields decide the window of a layer.
enum Windows {
    /// None are read.
    Never,
    /// `sliding_window` holds for every layer; the value where the field is absent.
    Every(Option<usize>),
    /// `sliding_window` holds for the layers that `layer_types` says, without a list for every one; the value where the field is absent.
    Listed(Option<usize>),
    /// `use_sliding_window`, `sliding_window`, and `layer_types` or `max_window_layers`.
    ByLayer,
}

const FAMILY: Family = Family {
    kv_heads: None,
    head_dim: None,
    eps: 1e-6,
    max_positions: 2048,
    windows: Windows::Never,
    attention_bias: AttentionBias::AsConfigured,
    reads_mlp_bias: true,
    qk_norm: false,
    fused_projections: false,
    rope: RopeRule::Scaled,
    reads_multipliers: false,
};

/// What those have in common that have biases as their code says.
const UNCONFIGURED: Family = Family { attention_bias: AttentionBias::OfInputs(false), reads_mlp_bias: false, ..FAMILY };

const MISTRAL_FAMILY: Family = Family { kv_heads: Some(8), max_positions: 131_072, windows: Windows::Listed(Some(4096)), ..UNCONFIGURED };

const QWEN2_FAMILY: Family = Family {
    kv_heads: Some(32),
    max_positions: 32_768,
    windows: Windows::ByLayer,
    attention_bias: AttentionBias::OfInputs(true),
    ..UNCONFIGURED
};

const QWEN3_FAMILY: Family = Family {
    kv_heads: Some(32),
    head_dim: Some(128),
    max_positions: 32_768,
    windows: Windows::ByLayer,
    reads_mlp_bias: false,
    qk_norm: true,
    ..FAMILY
};

const PHI3_FAMILY: Family = Family {
    eps: 1e-5,
    max_positions: 4096,
    windows: Windows::Every(None),
    fused_projections: true,
    rope: RopeRule::Partial,
    ..UNCONFIGURED
};

const fn entry(
    class_names: &'static [&'static str],
    model_types: &'static [&'static str],
    load: fn(&ConfigReader<'_>) -> Result<Box<dyn Architecture>, Error>,
) -> ArchEntry {
    ArchEntry { class_names, model_types, task: Task::Generate, naming: Naming::Prefixed("model."), load }
}

/// Llama 1 to 3.2, SmolLM, TinyLlama and many others that use the class.
pub const LLAMA: ArchEntry = entry(&["LlamaForCausalLM"], &["llama"], |c| load(c, &FAMILY));

/// Mistral 7B: a sliding window in every layer, unless `sliding_window` is null. With `layer_types` Ministral, as the reference loads it:
/// windows where they say so.
pub const MISTRAL: ArchEntry = entry(&["MistralForCausalLM"], &["mistral"], |c| load(c, &MISTRAL_FAMILY));

/// Qwen 2 and 2.5: biases on q, k and v; windows in the upper layers where switched on.
pub const QWEN2: ArchEntry = entry(&["Qwen2ForCausalLM"], &["qwen2"], |c| load(c, &QWEN2_FAMILY));

/// Qwen 3: norms of queries and keys, a head width of its own.
pub const QWEN3: ArchEntry = entry(&["Qwen3ForCausalLM"], &["qwen3"], |c| load(c, &QWEN3_FAMILY));

/// Granite 3: Llama with four multipliers.
pub const GRANITE: ArchEntry = entry(&["GraniteForCausalLM"], &["granite"], |c| load(c, &Family { reads_multipliers: true, ..FAMILY }));

/// Phi-3: fused projections and, in some, a head that is rotated in part. LongRoPE is refused.
pub const PHI3: ArchEntry = entry(&["Phi3ForCausalLM"], &["phi3"], |c| load(c, &PHI3_FAMILY));

fn load(c: &ConfigReader<'_>, family: &Family) -> Result<Box<dyn Architecture>, Error> {
    let hidden = c.usize("hidden_size", 1..=SIZE_MAX)?;
    let layers = c.usize("num_hidden_layers", 1..=LAYERS_MAX)?;
    let heads = c.usize("num_attention_heads", 1..=SIZE_MAX)?;
    let vocab = c.usize("vocab_size", 1..=SIZE_MAX)?;
    let intermediate = c.usize("intermediate_size", 1..=SIZE_MAX)?;
    let max_positions = c.positions("max_position_embeddings", family.max_positions)?;

    let kv_key = "num_key_value_heads";
    let kv_default = if c.has(kv_key) { heads } else { family.kv_heads.unwrap_or(heads) };
    let kv_heads = c.usize_or(kv_key, 1..=SIZE_MAX, kv_default)?;
    if !heads.is_multiple_of(kv_heads) {
        let fields = (("num_attention_heads", heads), (kv_key, kv_heads));
        return Err(c.disagree(fields.0, fields.1, "do not divide", "query heads a multiple of key-value heads"));
    }
    let head_dim = match c.usize_opt("head_dim", 1..=SIZE_MAX)?.or(family.head_dim) {
        Some(width) => width,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let fields = (("hidden_size", hidden), ("num_attention_heads", heads));
            return Err(c.disagree(fields.0, fields.1, "do not divide", "a multiple, or head_dim"));
        }
    };
    c.product(("vocab_size", vocab), ("hidden_size", hidden))?;
    c.product(("hidden_size", hidden), ("intermediate_size", intermediate))?;
    let width = c.product(("num_attention_heads", heads), ("head_dim", head_dim))?;
    c.product(("num_attention_heads × head_dim", width), ("hidden_size", hidden))?;

    let eps = c.positive_or("rms_norm_eps", family.eps)?;
    let act = config::activation(c, "hidden_act", "silu")?;
    let windows = windows(c, family, layers)?;
    let rope = config::rope(c, max_positions)?;
    check_rope(c, &rope, head_dim, family)?;

    let configured = c.bool_or("attention_bias", false)?;
    let (qkv_bias, o_bias) = match family.attention_bias {
        AttentionBias::AsConfigured => (configured, configured),
        AttentionBias::OfInputs(bias) => (bias, false),
    };
    let mlp_bias = family.reads_mlp_bias && c.bool_or("mlp_bias", false)?;
    let tied = c.bool_or("tie_word_embeddings", false)?;

    let multiplier = |key: &str, default: f64| -> Result<f64, Error> {
        if family.reads_multipliers { c.positive_or(key, default) } else { Ok(default) }
    };
    let attention_multiplier =
        if family.reads_multipliers { multiplier("attention_multiplier", 1.0)? } else { libm::pow(head_dim as f64, -0.5) };

    let facts = Facts {
        vocab_size: vocab,
        hidden_size: hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        max_positions,
        tied_head: tied,
        causal: true,
        rope: Some(rope),
        embedding: EMBEDDING,
        head: Some(HEAD),
    };
    Ok(Box::new(DecoderConfig {
        intermediate,
        eps,
        act,
        qkv_bias,
        o_bias,
        mlp_bias,
        qk_norm: family.qk_norm,
        fused_projections: family.fused_projections,
        windows,
        embedding_multiplier: multiplier("embedding_multiplier", 1.0)?,
        attention_multiplier,
        residual_multiplier: multiplier("residual_multiplier", 1.0)?,
        logits_scaling: multiplier("logits_scaling", 1.0)?,
        facts,
    }))
}

/// The window of each layer.
fn windows(c: &ConfigReader<'_>, family: &Family, layers: usize) -> Result<Vec<Option<usize>>, Error> {
    let types = config::layer_types(c, layers)?;
    let listed: Option<Vec<bool>> = types.as_ref().map(|types| types.iter().map(|t| *t == "sliding_attention").collect());
    let (window, sliding): (Option<usize>, Vec<bool>) = match family.windows {
        Windows::Never => (None, vec![false; layers]),
        Windows::Every(default) => {
            let window = if c.has("sliding_window") { window_of(c)? } else { default };
            let full = types.iter().flatten().find(|t| **t != "sliding_attention");
            if let (Some(_), Some(full)) = (window, full) {
                // The class has one window for all layers.
                return Err(c.unsupported("layer_types", full, "sliding_attention, as sliding_window is set"));
            }
            (window, vec![window.is_some(); layers])
        }
        Windows::Listed(default) => {
            let window = if c.has("sliding_window") { window_of(c)? } else { default };
            (window, listed.unwrap_or_else(|| vec![window.is_some(); layers]))
        }
        Windows::ByLayer => {
            let on = c.bool_or("use_sliding_window", false)?;
            let window = match on {
                true if c.has("sliding_window") => window_of(c)?,
                true => Some(4096),
                false => None,
            };
            let first = c.usize_or("max_window_layers", 0..=SIZE_MAX, 28)?;
            let upper = || (0..layers).map(|layer| window.is_some() && layer >= first).collect();
            (window, listed.unwrap_or_else(upper))
        }
    };
    if window.is_none() && sliding.contains(&true) {
        let (place, expected) = ("layer_types and sliding_window", "sliding_window switched on");
        let what = "contradict each other";
        let found = "sliding_attention layers without a window";
        return Err(Error::new(Kind::Disagree, c.file(), place, what, expected, found));
    }
    Ok(sliding.iter().map(|sliding| window.filter(|_| *sliding)).collect())
}

fn window_of(c: &ConfigReader<'_>) -> Result<Option<usize>, Error> {
    c.usize_opt("sliding_window", 1..=SIZE_MAX)
}

fn check_rope(c: &ConfigReader<'_>, rope: &RopeConfig, head_dim: usize, family: &Family) -> Result<(), Error> {
    let refuse = |field: &str, found: String, expected: &str| {
        let place = config::rope_place(c, field);
        Err(Error::new(Kind::Unsupported, c.file(), place, "is not supported", expected, found))
    };
    let width = rope::rotary_dim(rope, head_dim);
    if width < 2 || !width.is_multiple_of(2) {
        let field = if rope.partial_rotary_factor == 1.0 { "head_dim" } else { "partial_rotary_factor" };
        return refuse(field, format!("{width} of head_dim {head_dim}"), "an even number of rotated elements");
    }
    match family.rope {
        RopeRule::Partial if rope.kind != RopeKind::Default => return refuse("rope_type", "scaled RoPE in Phi-3".into(), "none"),
        RopeRule::Scaled if rope.partial_rotary_factor != 1.0 => {
            return refuse("partial_rotary_factor", rope.partial_rotary_factor.to_string(), "1.0 for this architecture");
        }
        RopeRule::Partial | RopeRule::Scaled => {}
    }
    if matches!(rope.kind, RopeKind::Dynamic { .. }) && width < 4 {
        return Err(c.unsupported("head_dim", head_dim, "at least 4 rotated elements with dynamic RoPE"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn base(more: Value) -> Value {
        let mut config = json!({
            "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 31, "intermediate_size": 40, "max_position_embeddings": 64});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    }

    fn read(entry: &ArchEntry, more: Value) -> Result<Box<dyn Architecture>, Error> {
        let config = base(more);
        (entry.load)(&ConfigReader::new("config.json", config.as_object().unwrap()))
    }

    fn names(arch: &dyn Architecture) -> Vec<String> {
        arch.tensors().into_iter().filter(|s| !s.optional).map(|s| s.name).collect()
    }

    #[test]
    fn families_ask_for_their_tensors() {
        let has =
            |entry: &ArchEntry, more: Value, name: &str| names(&*read(entry, more).unwrap()).contains(&format!("model.layers.2.{name}"));
        assert!(!has(&LLAMA, json!({}), "self_attn.q_proj.bias"));
        assert!(has(&LLAMA, json!({"attention_bias": true}), "self_attn.o_proj.bias"));
        assert!(has(&LLAMA, json!({"mlp_bias": true}), "mlp.down_proj.bias"));
        assert!(!has(&MISTRAL, json!({"attention_bias": true}), "self_attn.q_proj.bias"));
        assert!(has(&QWEN2, json!({}), "self_attn.v_proj.bias"));
        assert!(!has(&QWEN2, json!({}), "self_attn.o_proj.bias"));
        assert!(has(&QWEN3, json!({}), "self_attn.k_norm.weight"));
        assert!(has(&PHI3, json!({}), "mlp.gate_up_proj.weight"));
        assert!(!has(&PHI3, json!({}), "self_attn.q_proj.weight"));
        assert!(names(&*read(&LLAMA, json!({})).unwrap()).contains(&"lm_head.weight".to_string()));
        let tied = read(&LLAMA, json!({"tie_word_embeddings": true})).unwrap();
        assert!(!names(&*tied).contains(&"lm_head.weight".to_string()));
        // Qwen 3's own head width, not hidden / heads.
        assert_eq!(read(&QWEN3, json!({})).unwrap().facts().head_dim, 128);
    }

    fn windows_of(family: &Family, more: Value) -> Vec<Option<usize>> {
        let config = base(more);
        let reader = ConfigReader::new("config.json", config.as_object().unwrap());
        windows(&reader, family, 3).unwrap()
    }

    #[test]
    fn windows_follow_the_family() {
        assert_eq!(windows_of(&MISTRAL_FAMILY, json!({})), vec![Some(4096); 3]);
        assert_eq!(windows_of(&MISTRAL_FAMILY, json!({"sliding_window": null})), vec![None; 3]);
        assert_eq!(windows_of(&MISTRAL_FAMILY, json!({"sliding_window": 5})), vec![Some(5); 3]);
        let types = ["full_attention", "sliding_attention", "full_attention"];
        assert_eq!(windows_of(&MISTRAL_FAMILY, json!({"sliding_window": 5, "layer_types": types})), vec![None, Some(5), None]);
        assert_eq!(windows_of(&QWEN2_FAMILY, json!({"sliding_window": 5})), vec![None; 3]);
        let on = json!({"use_sliding_window": true, "sliding_window": 5, "max_window_layers": 1});
        assert_eq!(windows_of(&QWEN2_FAMILY, on), vec![None, Some(5), Some(5)]);
        let types = ["sliding_attention", "full_attention", "sliding_attention"];
        let on = json!({"use_sliding_window": true, "sliding_window": 5, "layer_types": types});
        assert_eq!(windows_of(&QWEN2_FAMILY, on), vec![Some(5), None, Some(5)]);
    }

    #[test]
    fn refusals_name_the_field() {
        for (entry, more, exit, place) in [
            (&LLAMA, json!({"hidden_size": 0}), 4, "hidden_size"),
            (&LLAMA, json!({"num_attention_heads": 0}), 4, "num_attention_heads"),
            (&LLAMA, json!({"num_hidden_layers": 1_000_000_000}), 7, "num_hidden_layers"),
            (&LLAMA, json!({"hidden_size": 65}), 5, "hidden_size and num_attention_heads"),
            (&LLAMA, json!({"num_key_value_heads": 3}), 5, "num_attention_heads and num_key_value_heads"),
            (&LLAMA, json!({"num_key_value_heads": 8}), 5, "num_attention_heads and num_key_value_heads"),
            (&LLAMA, json!({"vocab_size": 1u64 << 40, "hidden_size": 1u64 << 40}), 7, "vocab_size × hidden_size"),
            (&LLAMA, json!({"max_position_embeddings": 1_000_000_000_000u64}), 7, "max_position_embeddings"),
            (&LLAMA, json!({"rms_norm_eps": -1e-6}), 4, "rms_norm_eps"),
            (&LLAMA, json!({"hidden_act": "foo"}), 6, "hidden_act"),
            (&LLAMA, json!({"head_dim": 5}), 6, "head_dim"),
            (&MISTRAL, json!({"sliding_window": 0}), 4, "sliding_window"),
            (&MISTRAL, json!({"sliding_window": -1}), 4, "sliding_window"),
            (&MISTRAL, json!({"sliding_window": null, "layer_types": vec!["sliding_attention"; 3]}), 5, "layer_types and sliding_window"),
            (&PHI3, json!({"sliding_window": 5, "layer_types": vec!["full_attention"; 3]}), 6, "layer_types"),
            (&QWEN2, json!({"layer_types": ["full_attention"]}), 5, "layer_types and num_hidden_layers"),
            (&QWEN2, json!({"layer_types": vec!["sliding_attention"; 3]}), 5, "layer_types and sliding_window"),
            (&PHI3, json!({"rope_scaling": {"type": "yarn", "factor": 2}}), 6, "rope_scaling.type"),
            (&PHI3, json!({"rope_parameters": {"rope_type": "linear", "factor": 2}}), 6, "rope_parameters.rope_type"),
            (&PHI3, json!({"head_dim": 10, "rope_parameters": {"partial_rotary_factor": 0.3}}), 6, "rope_parameters.partial_rotary_factor"),
            (&LLAMA, json!({"partial_rotary_factor": 0.5}), 6, "partial_rotary_factor"),
        ] {
            let e = read(entry, more.clone()).err().unwrap_or_else(|| panic!("accepted {more}"));
            assert_eq!((e.exit_code(), e.place.as_str()), (exit, place), "{more}: {e}");
        }
    }

    #[test]
    fn a_context_size_overrules_an_absurd_maximum() {
        let config = base(json!({"max_position_embeddings": 1_000_000_000_000u64}));
        let reader = ConfigReader::new("config.json", config.as_object().unwrap()).with_ctx_size(Some(64));
        assert!((LLAMA.load)(&reader).is_ok());
    }
}
