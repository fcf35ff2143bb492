//! Checkpoints of GPTQ codes whose parts are missing or do not fit one another.

use crate::toy::{ToyTensor, VOCAB};
use crate::variants::{code, codes_of, gpt2, gptq, of_gptq};
use crate::{Accepted, Case};
use serde_json::json;

/// Refused by the tensors of the codes and `quantization_config`.
pub const CODES: &[Case] = &[
    ("gptq_no_config", 5, &["q_proj.weight", "is missing"], |t| {
        gptq(t, |_| {});
        t.config("quantization_config", json!(null));
    }),
    ("gptq_no_codes", 5, &["quantization_config"], |t| {
        t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 32}));
    }),
    ("gptq_no_zeros", 5, &["down_proj.qzeros", "is missing"], |t| {
        gptq(t, |list| list.retain(|x| x.name != "model.layers.1.mlp.down_proj.qzeros"));
    }),
    ("gptq_no_scales", 5, &["down_proj.scales", "is missing"], |t| {
        gptq(t, |list| list.retain(|x| x.name != "model.layers.1.mlp.down_proj.scales"));
    }),
    ("gptq_end_twice", 5, &["down_proj.qweight.qzeros", "is missing"], |t| {
        gptq(t, |list| list.push(ToyTensor::zeros("model.layers.1.mlp.down_proj.qweight.qweight", "I32", 4, &[12, 64])));
    }),
    ("gptq_zeros_shape", 5, &["down_proj.qzeros", "[3, 8]", "[3, 9]"], |t| {
        gptq(t, |list| *of_gptq(list, "qzeros") = ToyTensor::zeros("model.layers.1.mlp.down_proj.qzeros", "I32", 4, &[3, 9]));
    }),
    ("gptq_scales_shape", 5, &["down_proj.scales", "[3, 64]", "[1, 64]"], |t| {
        gptq(t, |list| *of_gptq(list, "scales") = ToyTensor::zeros("model.layers.1.mlp.down_proj.scales", "F16", 2, &[1, 64]));
    }),
    ("gptq_qweight_shape", 5, &["down_proj.weight", "[64, 96]", "[32, 96]"], |t| {
        gptq(t, |list| {
            for (part, dtype, size, shape) in [("qweight", "I32", 4, [12, 32]), ("qzeros", "I32", 4, [3, 4]), ("scales", "F16", 2, [3, 32])]
            {
                *of_gptq(list, part) = ToyTensor::zeros(&format!("model.layers.1.mlp.down_proj.{part}"), dtype, size, &shape);
            }
        });
    }),
    ("gptq_qweight_type", 6, &["down_proj.qweight", "I64", "I32"], |t| {
        gptq(t, |list| *of_gptq(list, "qweight") = ToyTensor::zeros("model.layers.1.mlp.down_proj.qweight", "I64", 8, &[12, 64]));
    }),
    ("gptq_scales_type", 6, &["down_proj.scales", "F32", "F16 or BF16"], |t| {
        gptq(t, |list| *of_gptq(list, "scales") = ToyTensor::zeros("model.layers.1.mlp.down_proj.scales", "F32", 4, &[3, 64]));
    }),
    ("gptq_g_idx_range", 4, &["down_proj.g_idx[5]", "below 3", "found 3"], |t| {
        gptq(t, |list| of_gptq(list, "g_idx").data[20] = 3);
    }),
    ("gptq_g_idx_negative", 4, &["down_proj.g_idx[0]", "found -1"], |t| {
        gptq(t, |list| of_gptq(list, "g_idx").data[..4].fill(0xff));
    }),
    ("gptq_g_idx_unequal", 5, &["down_proj.g_idx", "unequal", "32 inputs of group 0"], |t| {
        gptq(t, |list| of_gptq(list, "g_idx").data[0] = 1);
    }),
    ("gptq_group_does_not_divide", 5, &["down_proj.qweight", "group_size, 128", "96 inputs"], |t| {
        gptq(t, |_| {});
        t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true}));
    }),
    ("gptq_group_100", 5, &["down_proj.qweight", "group_size, 100", "96 inputs"], |t| {
        gptq(t, |_| {});
        t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 100, "sym": true}));
    }),
    ("gptq_group_48", 6, &["down_proj.qweight", "group_size", "multiple of 32", "found 48"], |t| {
        gptq(t, |_| {});
        t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 48, "sym": true}));
    }),
    ("gptq_and_floats", 5, &["down_proj.weight", "is there twice"], |t| {
        gptq(t, |list| list.push(ToyTensor::zeros("model.layers.1.mlp.down_proj.weight", "F16", 2, &[64, 96])));
    }),
    ("gptq_embedding", 6, &["model.embed_tokens.qweight", "no linear layer"], |t| {
        gptq(t, |list| code(list, "model.embed_tokens", VOCAB, 64));
    }),
    ("gptq_norm", 6, &["model.norm.qweight", "no linear layer"], |t| gptq(t, |list| code(list, "model.norm", 64, 64))),
    ("gptq_tied_head", 5, &["lm_head.qweight", "tie_word_embeddings"], |t| {
        gptq(t, |list| code(list, "lm_head", VOCAB, 64));
        t.config("tie_word_embeddings", json!(true));
    }),
    ("gptq_conv1d", 6, &["h.0.attn.c_proj.qweight", "codes of Conv1D layers are not supported"], |t| {
        gpt2(t, |list| code(list, "transformer.h.0.attn.c_proj", 64, 64));
        t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true}));
    }),
    ("gptq_gpt2", 6, &["h.0.", "qweight", "codes of Conv1D layers are not supported"], |t| {
        gpt2(t, |list| {
            for (layer, n, k) in [("attn.c_attn", 192, 64), ("attn.c_proj", 64, 64), ("mlp.c_fc", 96, 64), ("mlp.c_proj", 64, 96)] {
                code(list, &format!("transformer.h.0.{layer}"), n, k);
            }
        });
        t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true}));
    }),
];

/// Controls beside them.
pub const CODES_ACCEPTED: &[Accepted] = &[
    ("gptq", "", |t| gptq(t, |_| {})),
    ("gptq_without_g_idx", "", |t| gptq(t, |list| list.retain(|x| !x.name.ends_with("g_idx")))),
    ("gptq_biases_of_no_layer", "is ignored (1 in all)", |t| {
        gptq(t, |list| list.push(ToyTensor::zeros("model.layers.0.self_attn.q_proj.bias", "F16", 2, &[64])));
    }),
    ("gptq_head", "", |t| gptq(t, |list| code(list, "lm_head", VOCAB, 64))),
    ("gptq_of_no_layer", "model.bogus.qweight", |t| gptq(t, |list| list.extend(codes_of("model.bogus", 64, 64)))),
];
