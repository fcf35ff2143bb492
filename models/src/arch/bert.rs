//! BERT as an encoder: learned positions and segments, LayerNorm after each block, attention in both directions.
//!
//! Canonical names have no prefix; `bert.` is removed where a checkpoint has it, and the old `gamma` and `beta` become
//! `weight` and `bias`. Pooler and heads are ignored: sentence vectors come from the last hidden states.
//! Source: HF `modeling_bert.py`.

use super::{ArchEntry, Architecture, Facts, Naming, Task, TensorSpec, is_known_buffer};
use crate::config::{self, ConfigReader, LAYERS_MAX, SIZE_MAX};
use crate::error::Error;
use crate::trace::Trace;
use rcompile_graph::build::Built;
use rcompile_graph::{AttnExpr, TypeError, Unary, ValueId};

/// A BERT encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    facts: Facts,
    /// Width of the feed-forward block.
    pub intermediate: usize,
    /// Rows of the segment embedding.
    pub segments: usize,
    /// Added under the root of every LayerNorm.
    pub eps: f64,
    /// Function of the feed-forward block.
    pub act: Unary,
}

/// The registry's line.
pub const BERT: ArchEntry =
    ArchEntry { class_names: &["BertModel"], model_types: &["bert"], task: Task::Embed, naming: Naming::Bare("bert."), load };

const EMBEDDING: &str = "embeddings.word_embeddings.weight";

impl Architecture for BertConfig {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let (hidden, width) = (self.facts.hidden_size, self.intermediate);
        let mut specs = vec![
            TensorSpec::required(EMBEDDING, &[self.facts.vocab_size, hidden]),
            TensorSpec::required("embeddings.position_embeddings.weight", &[self.facts.max_positions, hidden]),
            TensorSpec::required("embeddings.token_type_embeddings.weight", &[self.segments, hidden]),
        ];
        let mut pair = |name: String, shape: &[usize]| {
            let weight = if shape.len() == 2 { TensorSpec::linear } else { TensorSpec::required };
            specs.push(weight(format!("{name}.weight"), shape));
            specs.push(TensorSpec::required(format!("{name}.bias"), &shape[..1]));
        };
        pair("embeddings.LayerNorm".to_string(), &[hidden]);
        for layer in 0..self.facts.layers {
            for (name, shape) in [
                ("attention.self.query", &[hidden, hidden][..]),
                ("attention.self.key", &[hidden, hidden]),
                ("attention.self.value", &[hidden, hidden]),
                ("attention.output.dense", &[hidden, hidden]),
                ("attention.output.LayerNorm", &[hidden]),
                ("intermediate.dense", &[width, hidden]),
                ("output.dense", &[hidden, width]),
                ("output.LayerNorm", &[hidden]),
            ] {
                pair(format!("encoder.layer.{layer}.{name}"), shape);
            }
        }
        specs
    }

    fn trace(&self, cx: &mut Trace<'_>) -> Result<Vec<ValueId>, TypeError> {
        let tokens = cx.embedding(EMBEDDING, self.facts.vocab_size, self.facts.hidden_size, cx.token)?;
        let segments = cx.embedding("embeddings.token_type_embeddings.weight", self.segments, self.facts.hidden_size, cx.segment)?;
        let positions =
            cx.embedding("embeddings.position_embeddings.weight", self.facts.max_positions, self.facts.hidden_size, cx.position)?;
        let x = cx.b.add(tokens, segments)?;
        let x = cx.b.add(x, positions)?;
        let x = cx.layer_norm(x, "embeddings.LayerNorm", self.facts.hidden_size, self.eps)?;
        let x = cx.layers(self.facts.layers, x, |cx, layer, x| self.layer(cx, layer, x))?;
        cx.pooled(x)
    }

    fn ignores(&self, name: &str) -> bool {
        name.starts_with("pooler.") || name.starts_with("cls.") || is_known_buffer(name)
    }
}

impl BertConfig {
    /// One layer: `x: [T, hidden] -> [T, hidden]`. Source: HF `BertLayer.forward`.
    fn layer(&self, cx: &mut Trace<'_>, layer: usize, x: ValueId) -> Built {
        let path = format!("encoder.layer.{layer}");
        let hidden = self.facts.hidden_size;
        let mut project = |name: &str| {
            let y = cx.linear(x, &format!("{path}.attention.self.{name}"), hidden, hidden, true)?;
            cx.split_heads(y, self.facts.heads, self.facts.head_dim)
        };
        let (q, k, v) = (project("query")?, project("key")?, project("value")?);
        let state = cx.kv_state(layer, self.facts.heads, self.facts.head_dim, false);
        let kv = cx.b.kv_append(state, k, v, cx.slot, cx.kv_index)?;
        let score = AttnExpr::scaled(libm::pow(self.facts.head_dim as f64, -0.5));
        let out = cx.b.sdpa(state, q, kv, cx.slot, cx.kv_index, score, AttnExpr::True)?;
        let out = cx.join_heads(out, self.facts.heads, self.facts.head_dim)?;
        let out = cx.linear(out, &format!("{path}.attention.output.dense"), hidden, hidden, true)?;
        let sum = cx.b.add(x, out)?;
        let x = cx.layer_norm(sum, &format!("{path}.attention.output.LayerNorm"), hidden, self.eps)?;
        let inner = cx.linear(x, &format!("{path}.intermediate.dense"), hidden, self.intermediate, true)?;
        let inner = cx.b.unary(self.act, inner)?;
        let out = cx.linear(inner, &format!("{path}.output.dense"), self.intermediate, hidden, true)?;
        let sum = cx.b.add(x, out)?;
        cx.layer_norm(sum, &format!("{path}.output.LayerNorm"), hidden, self.eps)
    }
}

fn load(c: &ConfigReader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let hidden = c.usize("hidden_size", 1..=SIZE_MAX)?;
    let layers = c.usize("num_hidden_layers", 1..=LAYERS_MAX)?;
    let heads = c.usize("num_attention_heads", 1..=SIZE_MAX)?;
    let vocab = c.usize("vocab_size", 1..=SIZE_MAX)?;
    let intermediate = c.usize("intermediate_size", 1..=SIZE_MAX)?;
    let positions = c.positions("max_position_embeddings", 512)?;
    let segments = c.usize_or("type_vocab_size", 1..=SIZE_MAX, 2)?;
    if !hidden.is_multiple_of(heads) {
        let fields = (("hidden_size", hidden), ("num_attention_heads", heads));
        return Err(c.disagree(fields.0, fields.1, "do not divide", "a multiple"));
    }
    c.product(("vocab_size", vocab), ("hidden_size", hidden))?;
    c.product(("hidden_size", hidden), ("hidden_size", hidden))?;
    c.product(("hidden_size", hidden), ("intermediate_size", intermediate))?;
    c.product(("max_position_embeddings", positions), ("hidden_size", hidden))?;
    c.product(("type_vocab_size", segments), ("hidden_size", hidden))?;
    c.refuse_if_true("is_decoder")?;
    c.refuse_if_true("add_cross_attention")?;
    let kind = c.str_or("position_embedding_type", "absolute")?;
    if kind != "absolute" {
        return Err(c.unsupported("position_embedding_type", kind, "absolute"));
    }
    let facts = Facts {
        vocab_size: vocab,
        hidden_size: hidden,
        layers,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        max_positions: positions,
        tied_head: false,
        causal: false,
        rope: None,
        embedding: EMBEDDING,
        head: None,
    };
    Ok(Box::new(BertConfig {
        intermediate,
        segments,
        eps: c.positive_or("layer_norm_eps", 1e-12)?,
        act: config::activation(c, "hidden_act", "gelu")?,
        facts,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reads_and_refuses() {
        let base = json!({"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 17,
            "intermediate_size": 20});
        let read = |key: &str, value: serde_json::Value| {
            let mut config = base.clone();
            config[key] = value;
            load(&ConfigReader::new("config.json", config.as_object().unwrap()))
        };
        let plain = read("model_type", json!("bert")).unwrap();
        assert_eq!(plain.tensors().len(), 3 + 2 + 16);
        assert!(plain.ignores("pooler.dense.weight") && !plain.ignores("encoder.layer.7.output.dense.bias"));
        assert_eq!(read("position_embedding_type", json!("relative_key")).err().unwrap().exit_code(), 6);
        assert_eq!(read("is_decoder", json!(true)).err().unwrap().exit_code(), 6);
        assert_eq!(read("hidden_size", json!(13)).err().unwrap().exit_code(), 5);
    }
}
