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
    ("gptq_qweight_shape", 5, &["down_proj.qweight: holds the codes", "[64, 96]", "[32, 96]"], |t| {
        gptq(t, |list| {
            for part in codes_of("model.layers.1.mlp.down_proj", 32, 96) {
                let end = part.name.rsplit_once('.').unwrap().1.to_string();
                *of_gptq(list, &end) = part;
            }
        });
    }),
    ("gptq_no_outputs", 5, &["down_proj.qweight", "rows and columns", ", 0]"], |t| {
        let layer = "model.layers.1.mlp.down_proj";
        gptq(t, |list| {
            *of_gptq(list, "qweight") = ToyTensor::zeros(&format!("{layer}.qweight"), "I32", 4, &[1 << 40, 0]);
            *of_gptq(list, "qzeros") = ToyTensor::zeros(&format!("{layer}.qzeros"), "I32", 4, &[1 << 38, 0]);
            *of_gptq(list, "scales") = ToyTensor::zeros(&format!("{layer}.scales"), "F16", 2, &[1 << 38, 0]);
            list.retain(|x| x.name != format!("{layer}.g_idx"));
        });
    }),
    ("gptq_no_inputs", 5, &["down_proj.qweight", "rows and columns", "[0, "], |t| {
        gptq(t, |list| *of_gptq(list, "qweight") = ToyTensor::zeros("model.layers.1.mlp.down_proj.qweight", "I32", 4, &[0, 64]));
    }),
    ("gptq_qweight_type", 6, &["down_proj.qweight", "I64", "I32"], |t| {
        gptq(t, |list| *of_gptq(list, "qweight") = ToyTensor::zeros("model.layers.1.mlp.down_proj.qweight", "I64", 8, &[12, 64]));
    }),
    ("gptq_scales_type", 6, &["down_proj.scales", "F32", "F16 or BF16"], |t| {
        gptq(t, |list| *of_gptq(list, "scales") = ToyTensor::zeros("model.layers.1.mlp.down_proj.scales", "F32", 4, &[3, 64]));
    }),
    ("gptq_scales_that_are_no_halves", 5, &["down_proj.scales", "scale of group 0, output 0 has no exact value", "F16"], |t| {
        gptq(t, |list| bf16_scales(list, 1e-9));
    }),
    ("gptq_zeros_type", 6, &["down_proj.qzeros", "F32", "I32"], |t| {
        gptq(t, |list| *of_gptq(list, "qzeros") = ToyTensor::zeros("model.layers.1.mlp.down_proj.qzeros", "F32", 4, &[3, 8]));
    }),
    ("gptq_outputs_of_no_whole_word", 5, &["down_proj.qweight", "a multiple of 8 outputs", "found 60"], |t| {
        gptq(t, |list| {
            let layer = "model.layers.1.mlp.down_proj";
            *of_gptq(list, "qweight") = ToyTensor::zeros(&format!("{layer}.qweight"), "I32", 4, &[12, 60]);
            *of_gptq(list, "qzeros") = ToyTensor::zeros(&format!("{layer}.qzeros"), "I32", 4, &[3, 7]);
            *of_gptq(list, "scales") = ToyTensor::zeros(&format!("{layer}.scales"), "F16", 2, &[3, 60]);
        });
    }),
    ("gptq_g_idx_type", 6, &["down_proj.g_idx", "F32", "I32"], |t| gptq(t, |list| of_gptq(list, "g_idx").dtype = "F32")),
    ("gptq_g_idx_shape", 5, &["down_proj.g_idx", "[96]", "[64]"], |t| {
        gptq(t, |list| *of_gptq(list, "g_idx") = ToyTensor::zeros("model.layers.1.mlp.down_proj.g_idx", "I32", 4, &[64]));
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
    ("gptq_group_of_another_size", 5, &["down_proj.qzeros", "wrong shape", "[1, 8]", "[3, 8]"], |t| {
        gptq(t, |_| {});
        t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true}));
    }),
    // Groups of 64: as many as 8 bits would have by 32.
    ("gptq_groups_of_twice_the_size", 5, &["down_proj.qzeros", "wrong shape", "[3, 8]", "[2, 8]"], |t| {
        gptq(t, |list| {
            list.retain(|x| !x.name.contains("0.mlp.down_proj."));
            let layer = "model.layers.0.mlp.down_proj";
            let [qweight, ..] = codes_of(layer, 64, 96);
            let [_, qzeros, scales] = codes_of(layer, 64, 64);
            list.extend([qweight, qzeros, scales]);
        });
    }),
    ("awq_group_does_not_divide", 5, &["down_proj.qweight", "group_size, 64", "96 inputs"], |t| {
        gptq(t, |list| list.iter_mut().find(|x| x.name.ends_with("0.mlp.down_proj.qweight")).unwrap().shape = vec![96, 8]);
        t.config("quantization_config", json!({"quant_method": "awq", "bits": 4, "group_size": 64}));
    }),
    ("gptq_layer_of_8_bits", 6, &["down_proj.qweight", "codes of other bits", "expected 4 bits", "found 8 bits"], |t| {
        gptq(t, |list| {
            list.retain(|x| !x.name.contains("0.mlp.down_proj."));
            let layer = "model.layers.0.mlp.down_proj";
            let mut parts = codes_of(layer, 64, 96);
            parts[0] = ToyTensor::zeros(&format!("{layer}.qweight"), "I32", 4, &[96 / 4, 64]);
            parts[1] = ToyTensor::zeros(&format!("{layer}.qzeros"), "I32", 4, &[96 / 32, 64 / 4]);
            list.extend(parts);
        });
    }),
    ("gptq_index_of_zeros_in_order", 5, &["down_proj.g_idx", "unequal size"], |t| {
        gptq(t, |list| zero_indices(list));
        let desc_act = json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true, "desc_act": true});
        t.config("quantization_config", desc_act);
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
    ("gptq_index_of_zeros", "", |t| gptq(t, |list| zero_indices(list))),
    ("gptq_biases_of_no_layer", "is ignored (1 in all)", |t| {
        gptq(t, |list| list.push(ToyTensor::zeros("model.layers.0.self_attn.q_proj.bias", "F16", 2, &[64])));
    }),
    ("gptq_scales_of_bf16", "", |t| gptq(t, |list| bf16_scales(list, 0.75))),
    ("gptq_head", "", |t| gptq(t, |list| code(list, "lm_head", VOCAB, 64))),
    ("gptq_of_no_layer", "model.bogus.qweight", |t| gptq(t, |list| list.extend(codes_of("model.bogus", 64, 64)))),
];

/// The last layer's scales in bf16, all of this value.
fn bf16_scales(list: &mut [ToyTensor], scale: f32) {
    let scales = of_gptq(list, "scales");
    scales.dtype = "BF16";
    scales.data.chunks_exact_mut(2).for_each(|s| s.copy_from_slice(&scale.to_le_bytes()[2..]));
}

/// An index that has all inputs in the first group.
fn zero_indices(list: &mut [ToyTensor]) {
    list.iter_mut().filter(|x| x.name.ends_with(".g_idx")).for_each(|x| x.data.fill(0));
}
