//! The registry of architectures: which `config.json` belongs to which code.
//!
//! Each architecture is a file: a configuration (its [`Facts`], and what it has besides), read and checked by `load`, and the
//! list of tensors that its checkpoint must hold. Supporting another one is a new file and a new line in [`REGISTRY`].

pub mod bert;
pub mod decoder;
pub mod gpt2;

use crate::config::{ConfigReader, RopeConfig};
use crate::error::{Error, Kind};
use crate::trace::Trace;
use rcompile_graph::{TypeError, ValueId};

/// What an executable of this architecture does; it decides the verbs. (The manifest has a type of its own, `rcompile_runtime::abi::Task`:
/// this crate knows nothing of executables, and what they hold is a format.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Continues a text: `generate`, `chat`, `logits`, `perplexity`.
    Generate,
    /// Maps a text to a vector: `embed`.
    Embed,
}

/// One supported architecture (a class of the reference library).
pub struct ArchEntry {
    /// Values of `architectures[0]`.
    pub class_names: &'static [&'static str],
    /// Values of `model_type`.
    pub model_types: &'static [&'static str],
    /// What it is for.
    pub task: Task,
    /// How tensor names of checkpoints become the canonical ones.
    pub naming: Naming,
    /// Reads and checks `config.json`.
    pub load: fn(&ConfigReader<'_>) -> Result<Box<dyn Architecture>, Error>,
}

/// Checkpoints of a bare model and of a model with a head differ by a prefix; both are common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// Canonical names start with this prefix (heads excepted); it is added where a checkpoint has none.
    Prefixed(&'static str),
    /// Canonical names have no prefix; this one is removed where a checkpoint has it.
    Bare(&'static str),
}

/// Every architecture that can be compiled.
pub static REGISTRY: &[ArchEntry] =
    &[decoder::LLAMA, decoder::MISTRAL, decoder::QWEN2, decoder::QWEN3, decoder::GRANITE, decoder::PHI3, gpt2::GPT2, bert::BERT];

/// A model that was read from a `config.json` and is consistent in itself.
pub trait Architecture: std::fmt::Debug + Send + Sync {
    /// Sizes and switches that other parts of the compiler ask for.
    fn facts(&self) -> &Facts;

    /// The tensors that a checkpoint must or may hold, by canonical name.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// The forward computation: builds the graph and returns its outputs ([`crate::trace::trace`] says which). Layers go through
    /// [`Trace::layers`], so that passes take equal ones together.
    fn trace(&self, cx: &mut Trace<'_>) -> Result<Vec<ValueId>, TypeError>;

    /// Whether a tensor outside [`Architecture::tensors`] is known and of no use (a buffer, the head of another task).
    fn ignores(&self, name: &str) -> bool {
        is_known_buffer(name)
    }
}

/// Sizes and switches of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Rows of the token embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// Whether the head reads the token embedding.
    pub tied_head: bool,
    /// Whether a position sees only itself and earlier ones.
    pub causal: bool,
    /// Rotary embedding; `None` where positions are learned.
    pub rope: Option<RopeConfig>,
    /// Canonical name of the token embedding `[vocab_size, hidden_size]`.
    pub embedding: &'static str,
    /// Canonical name of the head `[vocab_size, hidden_size]`, used unless `tied_head`.
    pub head: Option<&'static str>,
}

impl Facts {
    /// Canonical name of the tensor that is read for `name`: of a head that is tied the embedding's.
    pub fn read_for<'n>(&self, name: &'n str) -> &'n str {
        if self.tied_head && self.head == Some(name) { self.embedding } else { name }
    }
}

/// A tensor that an architecture asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Canonical name.
    pub name: String,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// Whether the checkpoint may lack it.
    pub optional: bool,
    /// What is done with it.
    pub role: Role,
}

/// What the forward computation does with a tensor, as far as it matters to how it may be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Matrix `[out, in]` of a linear layer, read by [`Trace::matmul`] alone: it may be codes.
    Linear,
    /// Matrix `[in, out]` of a `Conv1D`.
    Conv1d,
    /// Anything else: embeddings, norms, biases.
    Other,
}

impl TensorSpec {
    /// A tensor that must be there.
    pub fn required(name: impl Into<String>, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: name.into(), shape: shape.to_vec(), optional: false, role: Role::Other }
    }

    /// The matrix of a linear layer, which must be there.
    pub fn linear(name: impl Into<String>, shape: &[usize]) -> TensorSpec {
        TensorSpec { role: Role::Linear, ..TensorSpec::required(name, shape) }
    }

    /// The head, which a checkpoint may lack if it reads the token embedding.
    pub fn head(name: &str, shape: &[usize], tied: bool) -> TensorSpec {
        TensorSpec { optional: tied, ..TensorSpec::linear(name, shape) }
    }
}

/// The entry that a `config.json` asks for. With `sentence_encoder` (a `modules.json` is present) the model type alone
/// decides, since only the bare encoder is loaded then, whatever head the checkpoint was saved with.
pub fn find(config: &ConfigReader<'_>, sentence_encoder: bool) -> Result<&'static ArchEntry, Error> {
    let classes = config.strings("architectures")?.unwrap_or_default();
    let class = classes.first().copied();
    let model_type = config.str_opt("model_type")?;
    let by_class = class.map(|c| REGISTRY.iter().find(|e| e.class_names.contains(&c)));
    let by_type = model_type.map(|t| REGISTRY.iter().find(|e| e.model_types.contains(&t)));
    let unsupported = |key: &str, found: &str| Err(config.unsupported(key, found, supported()));
    match (by_class, by_type) {
        (None, None) => {
            let place = "architectures and model_type";
            let e = Error::new(Kind::Unsupported, config.file(), place, "are both missing", supported(), "neither");
            Err(e)
        }
        (Some(None), Some(Some(entry))) if sentence_encoder && entry.task == Task::Embed => Ok(entry),
        (Some(None), _) => unsupported("architectures", class.unwrap_or_default()),
        (Some(Some(entry)), None) | (None, Some(Some(entry))) => Ok(entry),
        (Some(Some(a)), Some(Some(b))) if std::ptr::eq(a, b) => Ok(a),
        (Some(Some(entry)), Some(_)) => {
            let place = "architectures and model_type";
            let expected = format!("model_type {}", entry.model_types.join(" or "));
            let found = format!("{} and {}", class.unwrap_or_default(), model_type.unwrap_or_default());
            Err(Error::new(Kind::Disagree, config.file(), place, "contradict each other", expected, found))
        }
        (None, Some(None)) => unsupported("model_type", model_type.unwrap_or_default()),
    }
}

/// The class names that can be compiled, for messages.
pub fn supported() -> String {
    one_of(|_| true)
}

/// Those of encoders.
pub fn encoders() -> String {
    one_of(|entry| entry.task == Task::Embed)
}

fn one_of(is_named: fn(&&ArchEntry) -> bool) -> String {
    let names: Vec<&str> = REGISTRY.iter().filter(is_named).flat_map(|e| e.class_names).copied().collect();
    format!("one of {}", names.join(", "))
}

/// Buffers that older library versions stored beside the weights; they are computed, never read.
pub(crate) fn is_known_buffer(name: &str) -> bool {
    [".position_ids", ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"].iter().any(|s| name.ends_with(s))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn exit_of(config: serde_json::Value, sentence_encoder: bool) -> Result<&'static str, i32> {
        let reader = ConfigReader::new("config.json", config.as_object().unwrap());
        find(&reader, sentence_encoder).map(|e| e.class_names[0]).map_err(|e| e.exit_code())
    }

    #[test]
    fn architectures_and_model_type() {
        for (config, expected) in [
            (json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}), Ok("LlamaForCausalLM")),
            (json!({"architectures": ["LlamaForCausalLM"]}), Ok("LlamaForCausalLM")),
            (json!({"model_type": "qwen3"}), Ok("Qwen3ForCausalLM")),
            (json!({"architectures": ["FooForCausalLM"], "model_type": "llama"}), Err(6)),
            (json!({"model_type": "foo"}), Err(6)),
            (json!({}), Err(6)),
            (json!({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}), Err(5)),
            (json!({"architectures": ["LlamaForCausalLM"], "model_type": "foo"}), Err(5)),
            (json!({"architectures": "LlamaForCausalLM"}), Err(4)),
            (json!({"architectures": ["BertForMaskedLM"], "model_type": "bert"}), Err(6)),
        ] {
            assert_eq!(exit_of(config.clone(), false), expected, "{config}");
        }
        let masked = json!({"architectures": ["BertForMaskedLM"], "model_type": "bert"});
        assert_eq!(exit_of(masked, true), Ok("BertModel"));
    }

    /// The architecture of a type, of 30 layers with 32 heads of 4.
    fn loaded(model_type: &str, more: &serde_json::Value) -> String {
        let mut config = json!({"model_type": model_type, "hidden_size": 128, "num_hidden_layers": 30, "num_attention_heads": 32,
            "vocab_size": 96, "intermediate_size": 96});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reader = ConfigReader::new("config.json", config.as_object().unwrap());
        let load = find(&reader, false).unwrap_or_else(|e| panic!("{e}")).load;
        format!("{:?}", load(&reader).unwrap_or_else(|e| panic!("{e}")))
    }

    /// Each class with its defaults written out.
    #[test]
    fn what_is_absent_has_the_default_of_its_class() {
        let decoder = json!({"num_key_value_heads": 32, "head_dim": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e4,
            "partial_rotary_factor": 1, "tie_word_embeddings": false});
        for (model_type, more) in [
            ("llama", json!({"max_position_embeddings": 2048, "attention_bias": false, "mlp_bias": false})),
            ("mistral", json!({"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096})),
            ("qwen2", json!({"max_position_embeddings": 32_768, "use_sliding_window": false})),
            ("qwen3", json!({"max_position_embeddings": 32_768, "head_dim": 128, "attention_bias": false})),
            ("phi3", json!({"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": null})),
            (
                "granite",
                json!({"max_position_embeddings": 2048, "embedding_multiplier": 1, "attention_multiplier": 1, "residual_multiplier": 1,
                    "logits_scaling": 1}),
            ),
        ] {
            let mut all = decoder.clone();
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            assert_eq!(loaded(model_type, &json!({})), loaded(model_type, &all), "{model_type}");
        }
        let windows = json!({"use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 28});
        assert_eq!(loaded("qwen2", &json!({"use_sliding_window": true})), loaded("qwen2", &windows));
        let gpt2 = json!({"n_positions": 1024, "n_inner": 512, "scale_attn_weights": true, "scale_attn_by_inverse_layer_idx": false,
            "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": true});
        assert_eq!(loaded("gpt2", &json!({})), loaded("gpt2", &gpt2));
        let bert = json!({"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"});
        assert_eq!(loaded("bert", &json!({})), loaded("bert", &bert));
    }

    #[test]
    fn fields_of_other_classes_are_not_read() {
        let changes = |model_type: &str, more: serde_json::Value| loaded(model_type, &json!({})) != loaded(model_type, &more);
        for key in ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"] {
            assert!(changes("granite", json!({ key: 3 })) && !changes("llama", json!({ key: 3 })), "{key}");
        }
        assert!(changes("llama", json!({"mlp_bias": true})) && !changes("mistral", json!({"mlp_bias": true})));
        assert!(changes("llama", json!({"attention_bias": true})) && !changes("qwen2", json!({"attention_bias": true})));
    }

    #[test]
    fn scales_of_gpt2() {
        for (weights, by_layer, scales) in
            [(true, false, "[0.5, 0.5]"), (true, true, "[0.5, 0.25]"), (false, false, "[1.0, 1.0]"), (false, true, "[1.0, 0.5]")]
        {
            let more = json!({"n_layer": 2, "num_hidden_layers": 2, "scale_attn_weights": weights,
                "scale_attn_by_inverse_layer_idx": by_layer});
            let text = loaded("gpt2", &more);
            assert!(text.contains(&format!("attention_scales: {scales}")), "{text}");
        }
    }

    #[test]
    fn names_are_unique() {
        let all: Vec<_> = REGISTRY.iter().flat_map(|e| e.class_names.iter().chain(e.model_types)).collect();
        let set: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(all.len(), set.len());
    }

    #[test]
    fn buffers_are_not_weights() {
        assert!(is_known_buffer("model.layers.0.self_attn.rotary_emb.inv_freq"));
        assert!(is_known_buffer("transformer.h.0.attn.bias"));
        assert!(!is_known_buffer("transformer.h.0.attn.c_attn.bias"));
    }
}
