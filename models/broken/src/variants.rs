//! Other models in place of the toy.

use crate::toy::{Toy, ToyTensor, VOCAB};
use serde_json::{Value, json};

/// A GPT-2 of one layer in place of the toy, its tensors changed.
pub fn gpt2(t: &Toy, change: impl FnOnce(&mut Vec<ToyTensor>)) {
    let (n, zeros) = (64, |name: &str, shape: &[usize]| ToyTensor::zeros(&format!("transformer.{name}"), "F16", 2, shape));
    t.json(
        "config.json",
        &json!({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": n, "n_layer": 1, "n_head": 4, "n_inner": 96,
            "vocab_size": VOCAB, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}),
    );
    let mut list = vec![zeros("wte.weight", &[VOCAB, n]), zeros("wpe.weight", &[32, n])];
    for (name, shape) in [
        ("h.0.ln_1", &[n][..]),
        ("h.0.attn.c_attn", &[n, 3 * n]),
        ("h.0.attn.c_proj", &[n, n]),
        ("h.0.ln_2", &[n]),
        ("h.0.mlp.c_fc", &[n, 96]),
        ("h.0.mlp.c_proj", &[96, n]),
        ("ln_f", &[n]),
    ] {
        list.extend([zeros(&format!("{name}.weight"), shape), zeros(&format!("{name}.bias"), &shape[shape.len() - 1..])]);
    }
    change(&mut list);
    t.weights("model.safetensors", &list);
}

/// A BERT of one layer in place of the toy.
pub fn bert(t: &Toy) {
    let (n, zeros) = (64, |name: &str, shape: &[usize]| ToyTensor::zeros(name, "F16", 2, shape));
    t.json(
        "config.json",
        &json!({"architectures": ["BertModel"], "model_type": "bert", "hidden_size": n, "num_hidden_layers": 1, "num_attention_heads": 4,
            "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": 32, "type_vocab_size": 2}),
    );
    let mut list = Vec::new();
    for (name, rows) in [("word", VOCAB), ("position", 32), ("token_type", 2)] {
        list.push(zeros(&format!("embeddings.{name}_embeddings.weight"), &[rows, n]));
    }
    for (name, shape) in [
        ("embeddings.LayerNorm", &[n][..]),
        ("encoder.layer.0.attention.self.query", &[n, n]),
        ("encoder.layer.0.attention.self.key", &[n, n]),
        ("encoder.layer.0.attention.self.value", &[n, n]),
        ("encoder.layer.0.attention.output.dense", &[n, n]),
        ("encoder.layer.0.attention.output.LayerNorm", &[n]),
        ("encoder.layer.0.intermediate.dense", &[96, n]),
        ("encoder.layer.0.output.dense", &[n, 96]),
        ("encoder.layer.0.output.LayerNorm", &[n]),
    ] {
        list.extend([zeros(&format!("{name}.weight"), shape), zeros(&format!("{name}.bias"), &shape[..1])]);
    }
    t.weights("model.safetensors", &list);
}

/// Parts of a layer of `k` inputs and `n` outputs as symmetric GPTQ codes by 32: zero points of 8 (stored less one), scales of one.
pub fn codes_of(layer: &str, n: usize, k: usize) -> [ToyTensor; 3] {
    let mut parts = [
        ToyTensor::zeros(&format!("{layer}.qweight"), "I32", 4, &[k / 8, n]),
        ToyTensor::zeros(&format!("{layer}.qzeros"), "I32", 4, &[k / 32, n / 8]),
        ToyTensor::zeros(&format!("{layer}.scales"), "F16", 2, &[k / 32, n]),
    ];
    parts[1].data.fill(0x77);
    parts[2].data.chunks_exact_mut(2).for_each(|scale| scale.copy_from_slice(&0x3c00u16.to_le_bytes()));
    parts
}

/// The tensor `layer.weight` of `list` as GPTQ codes of these outputs and inputs.
pub fn code(list: &mut Vec<ToyTensor>, layer: &str, n: usize, k: usize) {
    list.retain(|t| t.name != format!("{layer}.weight"));
    list.extend(codes_of(layer, n, k));
}

/// The toy with its layers as GPTQ codes by 32, changed.
pub fn gptq(t: &Toy, change: impl FnOnce(&mut Vec<ToyTensor>)) {
    t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true}));
    t.edit_weights(|list| {
        let mut coded = Vec::new();
        for tensor in std::mem::take(list) {
            let Some(layer) = tensor.name.strip_suffix("_proj.weight").map(|l| format!("{l}_proj")) else {
                coded.push(tensor);
                continue;
            };
            let (n, k) = (tensor.shape[0], tensor.shape[1]);
            let mut g_idx = ToyTensor::zeros(&format!("{layer}.g_idx"), "I32", 4, &[k]);
            for (i, group) in g_idx.data.chunks_exact_mut(4).enumerate() {
                group.copy_from_slice(&(i as u32 / 32).to_le_bytes());
            }
            coded.extend(codes_of(&layer, n, k));
            coded.push(g_idx);
        }
        *list = coded;
        change(list);
    });
}

/// The part `qweight`, `qzeros`, `scales` or `g_idx` of the last layer of all.
pub fn of_gptq<'a>(list: &'a mut [ToyTensor], part: &str) -> &'a mut ToyTensor {
    let name = format!("model.layers.1.mlp.down_proj.{part}");
    list.iter_mut().find(|t| t.name == name).unwrap()
}

/// The toy as a Mistral with this window.
pub fn mistral(t: &Toy, window: Value) {
    t.config("architectures", json!(["MistralForCausalLM"]));
    t.config("model_type", json!("mistral"));
    t.config("sliding_window", window);
}
