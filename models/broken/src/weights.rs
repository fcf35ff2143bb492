//! The bytes of `model.safetensors`, and tensors that are not those that the config asks for.

use crate::Case;
use crate::toy::{Toy, ToyTensor};
use serde_json::json;

/// Refused by the file's bytes.
pub const SAFETENSORS: &[Case] = &[
    ("st_0_bytes", 4, &["header too small"], |t| t.put("model.safetensors", "")),
    ("st_7_bytes", 4, &["header too small"], |t| t.put("model.safetensors", "1234567")),
    ("st_header_gt_file", 4, &["1000", "18 bytes"], |t| {
        t.put("model.safetensors", [&1000u64.to_le_bytes()[..], b"0123456789"].concat());
    }),
    ("st_header_u64max", 4, &["18446744073709551615"], |t| t.put("model.safetensors", [0xff; 64])),
    ("st_header_bad_utf8", 4, &["byte 9"], |t| t.put("model.safetensors", b"\x02\0\0\0\0\0\0\0{\xff")),
    ("st_header_bad_json", 4, &["byte 8"], |t| t.put("model.safetensors", b"\x01\0\0\0\0\0\0\0{")),
    ("st_is_lfs_pointer", 4, &["Git LFS"], |t| t.put("model.safetensors", "version https://git-lfs.github.com/spec/v1\n")),
    ("st_is_pickle", 4, &["not safetensors"], |t| t.put("model.safetensors", b"\x80\x02}q\x00(X\x03\x00\x00")),
    ("st_is_zip", 4, &["not safetensors"], |t| t.put("model.safetensors", b"PK\x03\x04\x00\x00\x08\x08\x00\x00")),
    ("st_is_gguf", 4, &["not safetensors"], |t| t.put("model.safetensors", b"GGUF\x03\x00\x00\x00\x00\x00")),
    ("st_is_html", 4, &["not safetensors"], |t| t.put("model.safetensors", "<html><body>404</body></html>")),
    ("st_truncated_1", 4, &["lm_head.weight", "expected a file of", "found"], |t| cut(t, 1)),
    ("st_truncated_half", 4, &["expected a file of", "found"], |t| cut(t, t.get("model.safetensors").len() / 2)),
    ("st_trailing_bytes", 4, &["expected", "found"], |t| {
        let bytes = t.get("model.safetensors");
        t.put("model.safetensors", [&bytes, &b"PK\x05\x06"[..]].concat());
    }),
    ("st_negative_dim", 4, &["model.norm.weight", "-1"], |t| {
        t.edit_header(|h| {
            h.replace(
                "\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[64]",
                "\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[-1]",
            )
        });
    }),
    ("st_duplicate_name", 4, &["model.norm.weight", "duplicate"], |t| {
        t.edit_header(|h| h.replacen('{', "{\"model.norm.weight\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},", 1));
    }),
    ("st_dtype_unknown", 6, &["model.norm.weight", "F8_FOO"], |t| {
        t.edit_header(|h| h.replace("\"model.norm.weight\":{\"dtype\":\"BF16\"", "\"model.norm.weight\":{\"dtype\":\"F8_FOO\""));
    }),
    ("st_name_ansi", 4, &["\\u{1b}[31m"], |t| t.edit_weights(|w| w[0].name = "\u{1b}[31mred".into())),
    ("st_name_path", 4, &["../../x"], |t| t.edit_weights(|w| w[0].name = "../../x".into())),
    ("st_name_1MiB", 4, &["nnn..."], |t| t.edit_weights(|w| w[0].name = "n".repeat(1 << 20))),
];

/// Refused since config and tensors disagree.
pub const TENSORS: &[Case] = &[
    ("missing_tensor", 5, &["model.layers.1.self_attn.q_proj.weight", "1 in all"], |t| {
        t.edit_weights(|w| w.retain(|t| t.name != "model.layers.1.self_attn.q_proj.weight"));
    }),
    ("missing_layer", 5, &["model.layers.2.", "9 in all"], |t| t.config("num_hidden_layers", json!(3))),
    ("shape_mismatch", 5, &["model.embed_tokens.weight", "[64, 64]", "[64, 63]"], |t| {
        t.edit_weights(|w| w[0] = ToyTensor::zeros("model.embed_tokens.weight", "BF16", 2, &[64, 63]));
    }),
    ("tensor_transposed", 5, &["gate_proj.weight", "transposed", "[96, 64]", "[64, 96]"], |t| {
        t.edit_weights(|w| w.iter_mut().filter(|t| t.name.ends_with("gate_proj.weight")).for_each(|t| t.shape.reverse()));
    }),
    ("weight_dtype_integer", 6, &["model.norm.weight", "I64"], |t| replace(t, "model.norm.weight", "I64", 8)),
    ("weight_dtype_bool", 6, &["model.norm.weight", "BOOL"], |t| replace(t, "model.norm.weight", "BOOL", 1)),
    ("lm_head_missing_untied", 5, &["lm_head.weight"], |t| t.edit_weights(|w| w.retain(|t| t.name != "lm_head.weight"))),
    ("lm_head_differs_though_tied", 5, &["lm_head.weight", "tie_word_embeddings"], |t| {
        t.config("tie_word_embeddings", json!(true));
    }),
    // The same bytes.
    ("lm_head_of_another_type_though_tied", 5, &["lm_head.weight", "tie_word_embeddings"], |t| {
        t.config("tie_word_embeddings", json!(true));
        t.edit_weights(|w| {
            let data = w.iter().find(|x| x.name == "model.embed_tokens.weight").unwrap().data.clone();
            let head = w.iter_mut().find(|x| x.name == "lm_head.weight").unwrap();
            (head.dtype, head.data) = ("F16", data);
        });
    }),
];

/// Cuts bytes off the end of the weights.
pub fn cut(t: &Toy, bytes: usize) {
    let all = t.get("model.safetensors");
    t.put("model.safetensors", &all[..all.len() - bytes]);
}

pub(crate) fn replace(t: &Toy, name: &str, dtype: &'static str, width: usize) {
    t.edit_weights(|list| {
        let old = list.iter_mut().find(|t| t.name == name).unwrap();
        *old = ToyTensor::zeros(name, dtype, width, &old.shape);
    });
}
