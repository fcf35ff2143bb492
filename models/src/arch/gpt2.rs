//! GPT-2: learned positions, LayerNorm with bias, one fused `c_attn`, weights stored `[in, out]` (Conv1D).
//!
//! Checkpoints with a head prefix every name but the head's by `transformer.`; bare ones do not.
//! Source: HF `modeling_gpt2.py`.

use super::{ArchEntry, Architecture, Facts, Naming, Role, Task, TensorSpec};
use crate::config::{self, ConfigReader, LAYERS_MAX, SIZE_MAX};
use crate::error::{Error, Kind};
use crate::json;
use crate::trace::Trace;
use rcompile_graph::build::Built;
use rcompile_graph::{AttnExpr, TypeError, Unary, ValueId};

/// A GPT-2 decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    facts: Facts,
    /// Width of the feed-forward block.
    pub intermediate: usize,
    /// Added under the root of every LayerNorm.
    pub eps: f64,
    /// Function of the feed-forward block.
    pub act: Unary,
    /// Per layer: scores `q . k` are multiplied by this.
    pub attention_scales: Vec<f64>,
}

/// The registry's line.
pub const GPT2: ArchEntry = ArchEntry {
    class_names: &["GPT2LMHeadModel"],
    model_types: &["gpt2"],
    task: Task::Generate,
    naming: Naming::Prefixed("transformer."),
    load,
};

const EMBEDDING: &str = "transformer.wte.weight";
const HEAD: &str = "lm_head.weight";

impl Architecture for Gpt2Config {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let (hidden, width) = (self.facts.hidden_size, self.intermediate);
        let mut specs = vec![
            TensorSpec::required(EMBEDDING, &[self.facts.vocab_size, hidden]),
            TensorSpec::required("transformer.wpe.weight", &[self.facts.max_positions, hidden]),
        ];
        for layer in 0..self.facts.layers {
            let mut pair = |name: &str, shape: &[usize]| {
                let name = format!("transformer.h.{layer}.{name}");
                let role = if shape.len() == 2 { Role::Conv1d } else { Role::Other };
                specs.push(TensorSpec { role, ..TensorSpec::required(format!("{name}.weight"), shape) });
                specs.push(TensorSpec::required(format!("{name}.bias"), &shape[shape.len() - 1..]));
            };
            pair("ln_1", &[hidden]);
            pair("attn.c_attn", &[hidden, 3 * hidden]);
            pair("attn.c_proj", &[hidden, hidden]);
            pair("ln_2", &[hidden]);
            pair("mlp.c_fc", &[hidden, width]);
            pair("mlp.c_proj", &[width, hidden]);
        }
        specs.push(TensorSpec::required("transformer.ln_f.weight", &[hidden]));
        specs.push(TensorSpec::required("transformer.ln_f.bias", &[hidden]));
        specs.push(TensorSpec::head(HEAD, &[self.facts.vocab_size, hidden], self.facts.tied_head));
        specs
    }

    fn trace(&self, cx: &mut Trace<'_>) -> Result<Vec<ValueId>, TypeError> {
        let tokens = cx.embedding(EMBEDDING, self.facts.vocab_size, self.facts.hidden_size, cx.token)?;
        let positions = cx.embedding("transformer.wpe.weight", self.facts.max_positions, self.facts.hidden_size, cx.position)?;
        let x = cx.b.add(tokens, positions)?;
        let x = cx.layers(self.facts.layers, x, |cx, layer, x| self.layer(cx, layer, x))?;
        let x = cx.layer_norm(x, "transformer.ln_f", self.facts.hidden_size, self.eps)?;
        let logits = cx.matmul(x, self.facts.read_for(HEAD), self.facts.hidden_size, self.facts.vocab_size)?;
        Ok(vec![cx.b.embedding(logits, cx.logit_row)?])
    }
}

impl Gpt2Config {
    /// One block: `x: [T, hidden] -> [T, hidden]`. Source: HF `GPT2Block.forward`.
    fn layer(&self, cx: &mut Trace<'_>, layer: usize, x: ValueId) -> Built {
        let path = format!("transformer.h.{layer}");
        let hidden = self.facts.hidden_size;
        let normed = cx.layer_norm(x, &format!("{path}.ln_1"), hidden, self.eps)?;
        let qkv = cx.conv1d(normed, &format!("{path}.attn.c_attn"), hidden, 3 * hidden)?;
        let mut part = |i: usize| {
            let rows = cx.b.slice(qkv, 1, i * hidden, (i + 1) * hidden)?;
            cx.split_heads(rows, self.facts.heads, self.facts.head_dim)
        };
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let state = cx.kv_state(layer, self.facts.heads, self.facts.head_dim, true);
        let kv = cx.b.kv_append(state, k, v, cx.slot, cx.kv_index)?;
        let score = AttnExpr::scaled(self.attention_scales[layer]);
        let out = cx.b.sdpa(state, q, kv, cx.slot, cx.kv_index, score, AttnExpr::causal())?;
        let out = cx.join_heads(out, self.facts.heads, self.facts.head_dim)?;
        let out = cx.conv1d(out, &format!("{path}.attn.c_proj"), hidden, hidden)?;
        let x = cx.b.add(x, out)?;
        let normed = cx.layer_norm(x, &format!("{path}.ln_2"), hidden, self.eps)?;
        let inner = cx.conv1d(normed, &format!("{path}.mlp.c_fc"), hidden, self.intermediate)?;
        let inner = cx.b.unary(self.act, inner)?;
        let out = cx.conv1d(inner, &format!("{path}.mlp.c_proj"), self.intermediate, hidden)?;
        cx.b.add(x, out)
    }
}

/// The name by which a size is given: this class's own, or that of other classes, which the reference takes as well; by both it has to be the
/// same size.
fn given_name<'n>(c: &ConfigReader<'_>, own: &'n str, other: &'n str) -> Result<&'n str, Error> {
    match (c.value(own), c.value(other)) {
        (Some(a), Some(b)) if a != b => {
            let place = format!("{own} and {other}");
            let found = format!("{own} = {}, {other} = {}", json::show(a), json::show(b));
            Err(Error::new(Kind::Disagree, c.file(), place, "are not the same", "one size", found))
        }
        (None, Some(_)) => Ok(other),
        _ => Ok(own),
    }
}

fn load(c: &ConfigReader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let (n_embd, n_layer) = (given_name(c, "n_embd", "hidden_size")?, given_name(c, "n_layer", "num_hidden_layers")?);
    let (n_head, n_positions) = (given_name(c, "n_head", "num_attention_heads")?, given_name(c, "n_positions", "max_position_embeddings")?);
    let hidden = c.usize(n_embd, 1..=SIZE_MAX)?;
    let layers = c.usize(n_layer, 1..=LAYERS_MAX)?;
    let heads = c.usize(n_head, 1..=SIZE_MAX)?;
    let vocab = c.usize("vocab_size", 1..=SIZE_MAX)?;
    let positions = c.positions(n_positions, 1024)?;
    if !hidden.is_multiple_of(heads) {
        return Err(c.disagree((n_embd, hidden), (n_head, heads), "do not divide", "a multiple"));
    }
    let head_dim = hidden / heads;
    let four = c.product((n_embd, hidden), ("4", 4))?;
    let intermediate = c.usize_or("n_inner", 1..=SIZE_MAX, four)?;
    c.product(("vocab_size", vocab), (n_embd, hidden))?;
    c.product((&format!("{n_embd} × 4"), four), (n_embd, hidden))?;
    c.product(("n_inner", intermediate), (n_embd, hidden))?;
    c.product((n_positions, positions), (n_embd, hidden))?;
    c.refuse_if_true("add_cross_attention")?;
    // `reorder_and_upcast_attn` moves the same scale to another place: in f32 the result is the same.
    c.bool_or("reorder_and_upcast_attn", false)?;
    let base = if c.bool_or("scale_attn_weights", true)? { libm::pow(head_dim as f64, -0.5) } else { 1.0 };
    let by_layer = c.bool_or("scale_attn_by_inverse_layer_idx", false)?;
    let scale = |layer: usize| if by_layer { base / (layer as f64 + 1.0) } else { base };
    let tied = c.bool_or("tie_word_embeddings", true)?;
    let facts = Facts {
        vocab_size: vocab,
        hidden_size: hidden,
        layers,
        heads,
        kv_heads: heads,
        head_dim,
        max_positions: positions,
        tied_head: tied,
        causal: true,
        rope: None,
        embedding: EMBEDDING,
        head: Some(HEAD),
    };
    Ok(Box::new(Gpt2Config {
        intermediate,
        eps: c.positive_or("layer_norm_epsilon", 1e-5)?,
        act: config::activation(c, "activation_function", "gelu_new")?,
        attention_scales: (0..layers).map(scale).collect(),
        facts,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reads_and_refuses() {
        let base = json!({"n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 17, "n_positions": 9});
        let read = |key: &str, value: serde_json::Value| {
            let mut config = base.clone();
            config[key] = value;
            load(&ConfigReader::new("config.json", config.as_object().unwrap()))
        };
        let shape = |arch: &dyn Architecture, name: &str| arch.tensors().into_iter().find(|s| s.name == name).map(|s| s.shape).unwrap();
        let plain = read("n_inner", json!(null)).unwrap();
        assert_eq!(shape(&*plain, "transformer.h.1.mlp.c_fc.weight"), [12, 48]);
        assert_eq!(shape(&*plain, "transformer.h.1.attn.c_attn.bias"), [36]);
        assert!(plain.facts().tied_head);
        assert_eq!(read("n_head", json!(5)).err().unwrap().exit_code(), 5);
        assert_eq!(read("n_head", json!(0)).err().unwrap().exit_code(), 4);
        assert!(read("num_attention_heads", json!(3)).is_ok());
        let other = json!({
            "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 17, "max_position_embeddings": 9});
        assert_eq!(load(&ConfigReader::new("config.json", other.as_object().unwrap())).unwrap().facts(), plain.facts());
        let two = read("num_hidden_layers", json!(1)).err().unwrap();
        assert_eq!((two.exit_code(), two.place.as_str()), (5, "n_layer and num_hidden_layers"), "{two}");
        assert_eq!(read("activation_function", json!("foo")).err().unwrap().exit_code(), 6);
        assert_eq!(read("add_cross_attention", json!(true)).err().unwrap().exit_code(), 6);
    }
}
