//! Values of `config.json` that are wrong, contradict one another or are not supported.

use crate::toy::VOCAB;
use crate::variants::{bert, gpt2, mistral};
use crate::{Accepted, Case};
use serde_json::{Value, json};

/// Refused by the value of a field.
pub const CONFIG: &[Case] = &[
    ("torch_dtype_unknown", 6, &["torch_dtype", "float7"], |t| t.config("torch_dtype", json!("float7"))),
    ("arch_unknown", 6, &["FooForCausalLM", "LlamaForCausalLM"], |t| t.config("architectures", json!(["FooForCausalLM"]))),
    ("arch_missing", 6, &["architectures", "model_type"], |t| {
        t.config("architectures", Value::Null);
        t.config("model_type", Value::Null);
    }),
    ("arch_conflict", 5, &["LlamaForCausalLM", "mistral"], |t| t.config("model_type", json!("mistral"))),
    ("hidden_zero", 4, &["hidden_size", "must be ≥ 1"], |t| t.config("hidden_size", json!(0))),
    ("heads_zero", 4, &["num_attention_heads"], |t| t.config("num_attention_heads", json!(0))),
    ("head_dim_2050", 7, &["head_dim", "at most 2048", "found 2050"], |t| t.config("head_dim", json!(2050))),
    ("kv_heads_zero", 4, &["num_key_value_heads"], |t| t.config("num_key_value_heads", json!(0))),
    ("layers_zero", 4, &["num_hidden_layers"], |t| t.config("num_hidden_layers", json!(0))),
    ("heads_not_dividing_hidden", 5, &["hidden_size = 65", "num_attention_heads = 4"], |t| t.config("hidden_size", json!(65))),
    ("kv_not_dividing_heads", 5, &["num_attention_heads = 4", "num_key_value_heads = 3"], |t| {
        t.config("num_key_value_heads", json!(3));
    }),
    ("kv_gt_heads", 5, &["num_attention_heads = 4", "num_key_value_heads = 8"], |t| t.config("num_key_value_heads", json!(8))),
    ("negative_int", 4, &["vocab_size"], |t| t.config("vocab_size", json!(-1))),
    ("float_for_int", 4, &["num_hidden_layers", "2.5"], |t| t.config("num_hidden_layers", json!(2.5))),
    ("string_for_int", 4, &["num_hidden_layers", "\"2\""], |t| t.config("num_hidden_layers", json!("2"))),
    ("int_2_63", 4, &["hidden_size"], |t| t.config("hidden_size", json!(1u64 << 63))),
    ("int_2_64", 4, &["hidden_size"], |t| {
        let text = String::from_utf8(t.get("config.json")).unwrap();
        t.put("config.json", text.replace("\"hidden_size\":64", "\"hidden_size\":18446744073709551616"));
    }),
    ("layers_1e9", 7, &["num_hidden_layers"], |t| t.config("num_hidden_layers", json!(1_000_000_000))),
    ("layers_1025", 7, &["num_hidden_layers", "at most 1024", "1025"], |t| t.config("num_hidden_layers", json!(1025))),
    // As many as there may be: what is missing then are their tensors.
    ("layers_1024", 5, &["model.layers.2.", "9198 in all"], |t| t.config("num_hidden_layers", json!(1024))),
    ("size_beyond_32_bits", 7, &["vocab_size", "at most 16777216", "4294967296"], |t| t.config("vocab_size", json!(1u64 << 32))),
    ("extent_above_2_24", 7, &["vocab_size", "at most 16777216", "16777217"], |t| t.config("vocab_size", json!((1 << 24) + 1))),
    ("extent_of_2_24", 5, &["model.embed_tokens.weight", "[16777216, 64]"], |t| t.config("vocab_size", json!(1 << 24))),
    ("size_product_overflow", 7, &["vocab_size", "hidden_size"], |t| {
        t.config("vocab_size", json!(1u64 << 40));
        t.config("hidden_size", json!(1u64 << 40));
    }),
    ("rope_scaling_unknown", 6, &["foo", "llama3"], |t| t.config("rope_scaling", json!({"type": "foo"}))),
    ("rope_type_missing", 4, &["rope_scaling.rope_type", "is missing"], |t| t.config("rope_scaling", json!({"factor": 4}))),
    ("longrope_without_type", 4, &["rope_scaling.rope_type", "is missing"], |t| {
        t.config("rope_scaling", json!({"long_factor": [1], "short_factor": [1]}));
    }),
    ("rope_by_layer", 6, &["rope_parameters.full_attention", "the same parameters for all layers"], |t| {
        t.config("rope_parameters", json!({"full_attention": {"rope_type": "default", "rope_theta": 500}}));
        t.config("layer_types", json!(["full_attention", "full_attention"]));
    }),
    ("rope_factor_missing", 4, &["rope_scaling.factor"], |t| t.config("rope_scaling", json!({"type": "linear"}))),
    ("rope_factor_zero", 4, &["rope_scaling.factor"], |t| t.config("rope_scaling", json!({"type": "linear", "factor": 0}))),
    ("rope_factor_negative", 4, &["rope_scaling.factor"], |t| t.config("rope_scaling", json!({"type": "yarn", "factor": -1}))),
    ("rope_factor_subnormal", 4, &["rope_scaling.factor", "frequencies"], |t| {
        t.config("rope_scaling", json!({"type": "linear", "factor": 1e-45}));
    }),
    ("rope_factor_1e30", 4, &["rope_scaling.factor", "frequencies"], |t| {
        t.config("rope_scaling", json!({"type": "dynamic", "factor": 1e30}));
    }),
    ("rope_parameters_1e30", 4, &["rope_parameters.factor", "frequencies"], |t| {
        t.config("rope_parameters", json!({"rope_type": "dynamic", "factor": 1e30}));
    }),
    ("rope_theta_subnormal", 4, &["rope_theta", "frequencies"], |t| t.config("rope_theta", json!(1e-45))),
    ("rope_attention_factor_1e38", 4, &["rope_scaling.attention_factor", "found 1e38"], |t| {
        t.config("rope_scaling", json!({"type": "yarn", "factor": 2, "attention_factor": 1e38}));
    }),
    ("rope_mscale_over_zero", 4, &["rope_scaling.mscale_all_dim"], |t| {
        // 0.1 * -10 * ln(e) + 1 = 0
        let scaling = json!({"type": "yarn", "factor": std::f64::consts::E, "mscale": 1, "mscale_all_dim": -10});
        t.config("rope_scaling", scaling);
    }),
    ("rope_of_odd_heads", 6, &["head_dim", "3 of head_dim 3", "an even number"], |t| t.config("head_dim", json!(3))),
    // Heads of two and of 2048 may be: what disagrees then are the tensors.
    ("rope_of_two_elements", 5, &["q_proj.weight", "[8, 64]"], |t| t.config("head_dim", json!(2))),
    ("head_dim_2048", 5, &["q_proj.weight", "[8192, 64]"], |t| t.config("head_dim", json!(2048))),
    ("dynamic_rope_of_two_elements", 6, &["head_dim", "at least 4 rotated elements", "found 2"], |t| {
        t.config("head_dim", json!(2));
        t.config("rope_scaling", json!({"type": "dynamic", "factor": 2}));
    }),
    ("dynamic_rope_of_four_elements", 5, &["q_proj.weight", "[16, 64]"], |t| {
        t.config("head_dim", json!(4));
        t.config("rope_scaling", json!({"type": "dynamic", "factor": 2}));
    }),
    ("rope_of_half_a_head", 6, &["partial_rotary_factor", "1.0 for this architecture", "found 0.5"], |t| {
        t.config("partial_rotary_factor", json!(0.5));
    }),
    ("rope_theta_zero", 4, &["rope_theta"], |t| t.config("rope_theta", json!(0))),
    ("rms_eps_negative", 4, &["rms_norm_eps"], |t| t.config("rms_norm_eps", json!(-1e-6))),
    ("hidden_act_unknown", 6, &["foo"], |t| t.config("hidden_act", json!("foo"))),
    ("torch_dtype_unknown", 6, &["float7"], |t| t.config("torch_dtype", json!("float7"))),
    ("max_position_1e12", 7, &["max_position_embeddings"], |t| {
        t.config("max_position_embeddings", json!(1_000_000_000_000u64));
    }),
    ("sliding_window_zero", 4, &["sliding_window"], |t| mistral(t, json!(0))),
    ("sliding_window_negative", 4, &["sliding_window"], |t| mistral(t, json!(-1))),
    ("quant_method_unknown", 6, &["foo", "quant_method"], |t| t.config("quantization_config", json!({"quant_method": "foo"}))),
    ("gptq_3_bits", 6, &["bits", "3", "4 or 8"], |t| t.config("quantization_config", json!({"quant_method": "gptq", "bits": 3}))),
    ("gptq_marlin", 6, &["checkpoint_format", "marlin"], |t| {
        t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}));
    }),
    ("gptq_dynamic", 6, &["dynamic", "+:"], |t| {
        t.config("quantization_config", json!({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}));
    }),
    ("gptq_bits_missing", 4, &["bits", "is missing"], |t| t.config("quantization_config", json!({"quant_method": "gptq"}))),
    ("awq_of_two_versions", 6, &["version", "gemv"], |t| {
        t.config("quantization_config", json!({"quant_method": "awq", "bits": 4, "format": "gemm", "version": "gemv"}));
    }),
    ("awq_of_another_library", 6, &["backend", "llm-awq"], |t| {
        t.config("quantization_config", json!({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}));
    }),
    ("awq_gemv", 6, &["version", "gemv"], |t| {
        t.config("quantization_config", json!({"quant_method": "awq", "bits": 4, "version": "gemv"}));
    }),
    ("bitsandbytes", 6, &["bitsandbytes", "quant_method"], |t| {
        t.config("quantization_config", json!({"quant_method": "bitsandbytes", "load_in_4bit": true}));
    }),
    ("compressed", 6, &["compressed-tensors"], |t| t.config("compression_config", json!({"quant_method": "compressed-tensors"}))),
    ("moe_topk_gt_experts", 5, &["num_experts_per_tok = 9", "num_local_experts = 8"], |t| {
        t.config("num_local_experts", json!(8));
        t.config("num_experts_per_tok", json!(9));
    }),
    ("moe", 6, &["num_local_experts"], |t| t.config("num_local_experts", json!(8))),
    ("settings_of_a_layer", 6, &["per_layer_config"], |t| t.config("per_layer_config", json!({"1": {"rms_norm_eps": 1e-3}}))),
    ("special_id_ge_vocab", 5, &["eos_token_id", "64"], |t| t.config("eos_token_id", json!(VOCAB))),
    ("sentence_encoder_that_generates", 6, &["modules.json", "sentence encoder", "BertModel", "LlamaForCausalLM"], |t| {
        t.json("modules.json", &json!([{"type": "sentence_transformers.models.Transformer", "path": ""}]));
    }),
    ("reranker", 6, &["modules.json", "no pooling"], |t| {
        bert(t);
        t.json("modules.json", &json!([{"type": "sentence_transformers.models.Transformer", "path": ""}]));
    }),
    ("special_id_in_generation_config", 5, &["generation_config.json", "eos_token_id", "64"], |t| {
        t.json("generation_config.json", &json!({"eos_token_id": [1, VOCAB]}));
    }),
    ("encoder_decoder", 6, &["is_encoder_decoder"], |t| t.config("is_encoder_decoder", json!(true))),
    ("encoder_with_cross_attention", 6, &["add_cross_attention"], |t| {
        bert(t);
        t.config("add_cross_attention", json!(true));
    }),
    ("not_causal", 6, &["is_causal", "later tokens", "found false"], |t| t.config("is_causal", json!(false))),
    ("not_causal_by_null", 6, &["is_causal", "later tokens", "found null"], |t| t.config("is_causal", json!(null))),
    ("not_causal_gpt2", 6, &["is_causal", "later tokens"], |t| {
        gpt2(t, |_| {});
        t.config("is_causal", json!(false));
    }),
    ("causal_of_wrong_type", 4, &["is_causal", "true or false"], |t| t.config("is_causal", json!("no"))),
];

/// Controls beside them.
pub const CONFIG_ACCEPTED: &[Accepted] = &[
    ("gpt2", "", |t| gpt2(t, |_| {})),
    ("causal", "", |t| t.config("is_causal", json!(true))),
    ("rope_parameter_unknown", "rope_scaling.attn_factor: is no RoPE parameter that the reference reads", |t| {
        t.config("rope_scaling", json!({"rope_type": "default", "attn_factor": 0.878}));
    }),
    ("no_settings_of_layers", "", |t| t.config("per_layer_config", json!({}))),
    ("encoder_that_says_so", "", |t| {
        bert(t);
        t.config("is_causal", json!(false));
    }),
];
