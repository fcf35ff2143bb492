//! What must be accepted, some of it with one warning.

use crate::Accepted;
use crate::files::fifo;
use crate::toy::ToyTensor;
use crate::weights::replace;
use serde_json::json;

/// Unusual and sound.
pub const ACCEPTED: &[Accepted] = &[
    ("toy", "", |_| {}),
    // What a text becomes is bounded, and texts of the probe are shorter then.
    ("tok_replace_4000", "", |t| crate::tokenizer::grow(t, 4000)),
    ("extra_tensor", "model.bogus.weight", crate::extra_tensor),
    ("tok_bos_that_is_added", "add_bos_token: is false, but tokenizer.json puts one around every text", |t| {
        t.json("tokenizer_config.json", &json!({"bos_token": "<s>", "add_bos_token": false, "add_eos_token": false}));
    }),
    ("tok_eos_that_is_not_added", "add_eos_token: is true, but tokenizer.json puts none around a text", |t| {
        t.json("tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true, "add_eos_token": true}));
    }),
    ("tok_one_token_as_bos_and_eos", "", |t| {
        t.json("tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": "<s>", "add_bos_token": true, "add_eos_token": false}));
    }),
    ("st_leading_whitespace", "", |t| t.edit_header(|h| format!("   {h}  "))),
    ("st_zero_size_tensor", "model.empty", |t| {
        t.edit_weights(|w| w.insert(3, ToyTensor::zeros("model.empty", "F32", 4, &[0, 7])));
    }),
    ("st_scalar", "model.scalar", |t| t.edit_weights(|w| w.push(ToyTensor::zeros("model.scalar", "F32", 4, &[])))),
    ("tied_embeddings", "", |t| {
        t.config("tie_word_embeddings", json!(true));
        t.edit_weights(|w| w.retain(|t| t.name != "lm_head.weight"));
    }),
    ("tied_embeddings_stored_as_head", "", |t| {
        t.config("tie_word_embeddings", json!(true));
        t.edit_weights(|w| {
            w.last_mut().unwrap().data = w[0].data.clone();
            w.remove(0);
        });
    }),
    ("tied_embeddings_stored_twice", "", |t| {
        t.config("tie_word_embeddings", json!(true));
        t.edit_weights(|w| w.last_mut().unwrap().data = w[0].data.clone());
    }),
    ("mixed_dtypes", "", |t| replace(t, "model.norm.weight", "F32", 4)),
    ("unknown_config_keys", "", |t| t.config("some_future_switch", json!({"a": [1]}))),
    ("no_chat_template", "", |t| t.remove("chat_template.jinja")),
    ("known_buffers", "", |t| {
        let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
        // More elements than all weights have, whose type counts alone.
        t.edit_weights(|w| w.push(ToyTensor::zeros(name, "F32", 4, &[1 << 17])));
    }),
    ("large_extra_tensor", "model.bogus.weight", |t| {
        t.edit_weights(|w| w.push(ToyTensor::zeros("model.bogus.weight", "F32", 4, &[1 << 17])));
    }),
    ("adapter_beside_the_model", "is of an adapter, which is not applied", |t| {
        t.json("adapter_config.json", &json!({"peft_type": "LORA"}));
    }),
    ("auto_map_poison_py", "auto_map", |t| {
        t.config("auto_map", json!({"AutoModel": "modeling_x.Model"}));
        // Reading it would block forever.
        t.put("modeling_x.py", "");
        fifo(t, "modeling_x.py");
    }),
    ("no_prefix", "", |t| {
        t.edit_weights(|w| w.iter_mut().for_each(|t| t.name = t.name.trim_start_matches("model.").to_string()));
    }),
    ("hardlinked_shards", "", |t| {
        t.shard();
        std::fs::hard_link(t.file("a.safetensors"), t.path.join("../elsewhere")).unwrap();
    }),
    ("transformers_5_config", "", |t| {
        t.edit("config.json", |config| {
            let map = config.as_object_mut().unwrap();
            ["rope_theta", "rope_scaling", "torch_dtype"].iter().for_each(|key| drop(map.remove(*key)));
        });
        t.config("dtype", json!("bfloat16"));
        t.config("rope_parameters", json!({"rope_type": "default", "rope_theta": 10000.0}));
        t.config("layer_types", json!(["full_attention", "full_attention"]));
    }),
    ("template_that_raises", "", |t| t.put("chat_template.jinja", "{{ raise_exception('never') }}")),
    ("generation_setting_not_followed", "no_repeat_ngram_size: changes what the reference generates", |t| {
        let settings = json!({"suppress_tokens": [], "no_repeat_ngram_size": 2, "num_beams": 1, "typical_p": 0.9, "max_length": 9});
        t.json("generation_config.json", &settings);
    }),
    ("generation_settings_of_config", "num_beams: changes what the reference generates", |t| {
        std::fs::remove_file(t.file("generation_config.json")).ok();
        t.config("num_beams", json!(4));
        t.config("typical_p", json!(1.0));
    }),
    ("pad_token_id -1", "", |t| t.config("pad_token_id", json!(-1))),
];
