//! Random Llama models of any shape, written as a model directory.

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};
use serde_json::{Value, json};
use std::path::Path;

/// Shape of a toy. Weights are bf16, the head is tied.
#[derive(Clone, Copy, Debug)]
pub struct Toy {
    /// Rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of the feed-forward block.
    pub intermediate: usize,
    /// Layers.
    pub layers: usize,
}

impl Toy {
    /// Sizes that are no multiples of vector widths.
    pub const SMALL: Toy = Toy { vocab: 131, hidden: 60, heads: 6, kv_heads: 2, intermediate: 92, layers: 2 };

    /// Writes `config.json` and `model.safetensors`. The same toy gives the same bytes.
    pub fn write(&self, dir: &Path) {
        let bf16 = |values: &[f32]| values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect::<Vec<u8>>();
        let tensors = self.tensors().into_iter().map(|(name, shape, values)| (name, Dtype::BF16, shape, bf16(&values)));
        write_model(dir, &self.config(), &tensors.collect::<Vec<_>>());
    }

    /// `config.json`.
    pub fn config(&self) -> Value {
        let Toy { vocab, hidden, heads, kv_heads, intermediate, layers } = *self;
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": intermediate,
            "vocab_size": vocab, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": true, "torch_dtype": "bfloat16"})
    }

    /// Name, shape and values of all tensors.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, Vec<f32>)> {
        let Toy { vocab, hidden, heads, kv_heads, intermediate, layers } = *self;
        let mut seed = 0x9e37_79b9_7f4a_7c15;
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize]| {
            let norm = shape.len() == 1;
            let count = shape.iter().product::<usize>();
            let values = (0..count).map(|_| f32::from(norm) + uniform(&mut seed) * 0.4).collect();
            tensors.push((name, shape.to_vec(), values));
        };
        let (q, kv) = (hidden, hidden / heads * kv_heads);
        add("model.embed_tokens.weight".into(), &[vocab, hidden]);
        for layer in 0..layers {
            for (name, shape) in [
                ("input_layernorm", &[hidden][..]),
                ("mlp.down_proj", &[hidden, intermediate]),
                ("mlp.gate_proj", &[intermediate, hidden]),
                ("mlp.up_proj", &[intermediate, hidden]),
                ("post_attention_layernorm", &[hidden]),
                ("self_attn.k_proj", &[kv, hidden]),
                ("self_attn.o_proj", &[hidden, q]),
                ("self_attn.q_proj", &[q, hidden]),
                ("self_attn.v_proj", &[kv, hidden]),
            ] {
                add(format!("model.layers.{layer}.{name}.weight"), shape);
            }
        }
        add("model.norm.weight".into(), &[hidden]);
        tensors
    }
}

/// Writes a model of these tensors: name, type, shape, bytes.
pub fn write_model(dir: &Path, config: &Value, tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)]) {
    std::fs::create_dir_all(dir).expect("model directory");
    std::fs::write(dir.join("config.json"), config.to_string()).expect("config.json");
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).expect("bytes of the shape");
        (name.as_str(), view)
    });
    serialize_to_file(views, None, &dir.join("model.safetensors")).expect("model.safetensors");
}

/// Uniform in -1..1 (xorshift64).
pub(crate) fn uniform(seed: &mut u64) -> f32 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}
