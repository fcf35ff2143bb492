//! `tokenizer.json` and what belongs to it.

use crate::Case;
use crate::toy::Toy;
use serde_json::{Value, json};

/// A normalizer that makes texts of letters so many times longer.
pub(crate) fn grow(t: &Toy, times: usize) {
    let part = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(times)});
    tok(t, |v| v["normalizer"] = part);
}

/// Refused by the tokenizer's bytes, ids, parts, or the work that it would make.
pub const TOKENIZER: &[Case] = &[
    ("tok_truncated", 4, &["tokenizer.json", "1:"], |t| {
        let bytes = t.get("tokenizer.json");
        t.put("tokenizer.json", &bytes[..bytes.len() / 2]);
    }),
    ("tok_vocab_gt_rows", 5, &["64", "70"], |t| {
        tok(t, |v| (32..70).for_each(|i| v["model"]["vocab"][format!("x{i}")] = json!(i)));
    }),
    ("tok_ids_dup", 4, &["the", "29", "th has"], |t| tok(t, |v| v["model"]["vocab"]["the"] = json!(29))),
    ("tok_ids_sparse", 4, &["an", "32"], |t| tok(t, |v| v["model"]["vocab"]["an"] = json!(32))),
    ("tok_id_4e9", 4, &["an", "4000000000"], |t| tok(t, |v| v["model"]["vocab"]["an"] = json!(4_000_000_000u64))),
    ("tok_id_negative", 4, &["an", "-1"], |t| tok(t, |v| v["model"]["vocab"]["an"] = json!(-1))),
    ("tok_merge_oov", 4, &["merges[1]", "qq"], |t| tok(t, |v| v["model"]["merges"][1] = json!(["qq", "e"]))),
    ("tok_merge_result_oov", 4, &["merges[1]", "zz"], |t| tok(t, |v| v["model"]["merges"][1] = json!(["z", "z"]))),
    ("tok_merge_three", 4, &["merges[0]"], |t| tok(t, |v| v["model"]["merges"][0] = json!("t h e"))),
    ("tok_merge_too_long", 4, &["merges[0]"], |t| {
        tok(t, |v| v["model"]["continuing_subword_prefix"] = json!("a prefix that is longer than the token"));
    }),
    ("tok_regex_invalid", 4, &["pre_tokenizer.pattern", "(["], |t| pattern(t, "([")),
    ("tok_regex_gives_up", 7, &["pre_tokenizer.pattern", "too many steps for letters"], |t| pattern(t, "(?:a|aa)+(?=b)")),
    ("tok_1e7_numbers", 7, &["tokenizer.json", "too many values"], |t| {
        t.put("tokenizer.json", format!("{{\"added_tokens\":[{}0]}}", "1,".repeat(10_000_000)));
    }),
    ("tok_regex_catastrophic", 7, &["pre_tokenizer.pattern", "(a+)+$"], |t| pattern(t, "(a+)+$")),
    ("tok_model_unknown", 6, &["model.type", "foo"], |t| tok(t, |v| v["model"]["type"] = json!("foo"))),
    ("tok_normalizer_unknown", 6, &["normalizer.type", "foo"], |t| tok(t, |v| v["normalizer"]["type"] = json!("foo"))),
    ("tok_nested_unknown", 6, &["normalizer.normalizers[0].type", "foo"], |t| {
        tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "foo"}]}));
    }),
    ("tok_nested_100", 4, &["nested too deeply"], |t| {
        let nest = |inner, _| json!({"type": "Sequence", "normalizers": [inner]});
        tok(t, |v| v["normalizer"] = (0..20).fold(json!({"type": "NFC"}), nest));
    }),
    ("tok_charsmap_bad", 4, &["normalizer.precompiled_charsmap"], |t| {
        tok(t, |v| v["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}));
    }),
    ("tok_charsmap_astray", 4, &["normalizer.precompiled_charsmap"], |t| {
        tok(t, |v| v["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}));
    }),
    ("tok_template_no_special", 4, &["`<x>`"], |t| {
        tok(t, |v| v["post_processor"]["single"][0]["SpecialToken"]["id"] = json!("<x>"));
    }),
    ("tok_template_absent_token", 4, &["`<x>`"], |t| {
        tok(t, |v| v["post_processor"]["special_tokens"]["<s>"]["tokens"] = json!(["<x>"]));
    }),
    ("tok_template_without_text", 4, &["post_processor.single", "one Sequence A"], |t| {
        tok(t, |v| drop(v["post_processor"]["single"].as_array_mut().unwrap().remove(1)));
    }),
    ("tok_template_of_two_texts", 4, &["post_processor.single", "A", "B"], |t| {
        tok(t, |v| {
            let single = v["post_processor"]["single"].as_array_mut().unwrap();
            single.push(json!({"Sequence": {"id": "B", "type_id": 0}}));
        });
    }),
    ("tok_stride_ge_max", 4, &["truncation.stride"], |t| {
        let value = json!({"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 8});
        tok(t, |v| v["truncation"] = value);
    }),
    ("tok_fixedlength_0", 4, &["pre_tokenizer.length"], |t| {
        tok(t, |v| v["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0}));
    }),
    ("tok_added_conflict", 5, &["<new>", "30"], |t| {
        tok(t, |v| {
            let mut new = v["added_tokens"][0].clone();
            (new["id"], new["content"]) = (json!(30), json!("<new>"));
            v["added_tokens"].as_array_mut().unwrap().push(new);
        });
    }),
    ("tok_added_other_id", 5, &["<s>"], |t| tok(t, |v| v["added_tokens"][1]["id"] = json!(2))),
    ("tok_strip_decoder", 4, &["decoder.start"], |t| tok(t, |v| v["decoder"]["start"] = json!(1000))),
    ("tok_strip_decoder_stop", 6, &["decoder.stop"], |t| tok(t, |v| v["decoder"]["stop"] = json!(1))),
    ("tok_replace_bomb", 7, &["normalizer"], |t| {
        let part = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(1000)});
        tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": [part, part, part]}));
    }),
    ("tok_replace_long", 7, &["normalizer", "too long", "5000 times"], |t| grow(t, 5000)),
    ("tok_bytes_of_bytes", 7, &["normalizer.normalizers[12]", "too long", "8192 times"], |t| {
        tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "ByteLevel"}); 40]}));
    }),
    ("tok_bytes_before_bytes", 7, &["pre_tokenizer.pretokenizers[6]", "too long"], |t| {
        let part = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        tok(t, |v| {
            v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "ByteLevel"}); 6]});
            v["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": vec![part; 20]});
        });
    }),
    ("tok_compatible_forms", 7, &["normalizer.normalizers[2]", "5832 times"], |t| {
        tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFKD"}); 3]}));
    }),
    ("tok_replace_nothing", 7, &["normalizer.normalizers[12]", "8192 times"], |t| {
        let part = json!({"type": "Replace", "pattern": {"Regex": "(?=x)|q*"}, "content": "a"});
        tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![part; 40]}));
    }),
    ("tok_replace_boundaries", 7, &["normalizer.normalizers[12]", "8192 times"], |t| {
        let part = json!({"type": "Replace", "pattern": {"Regex": "\\B"}, "content": "a"});
        tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![part; 40]}));
    }),
    ("tok_replace_empty_text", 7, &["normalizer.normalizers[12]", "8192 times"], |t| {
        let part = json!({"type": "Replace", "pattern": {"String": ""}, "content": "a"});
        tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![part; 40]}));
    }),
    ("tok_65_parts", 7, &["normalizer.normalizers[64]", "at most 64"], |t| {
        tok(t, |v| v["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); 70]}));
    }),
    ("tok_parts_of_parts", 7, &["pre_tokenizer.pretokenizers[", "at most 64"], |t| {
        let inner = json!({"type": "Sequence", "pretokenizers": vec![json!({"type": "WhitespaceSplit"}); 30]});
        tok(t, |v| v["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [inner, inner, inner]}));
    }),
    ("tok_pattern_of_other_engines", 6, &["pre_tokenizer", "\\p without braces"], |t| pattern(t, r"\pL+")),
    ("tok_named_class", 6, &["pre_tokenizer", "[[:cntrl:]]"], |t| pattern(t, "[[:cntrl:]]")),
    ("tok_spaces_taken_twice", 4, &["tokenizers crate fail", "beside each other"], |t| {
        tok(t, |v| {
            let mut new = v["added_tokens"][0].clone();
            new["rstrip"] = json!(true);
            v["added_tokens"][0] = new.clone();
            let next = v["model"]["vocab"].as_object().unwrap().len();
            (new["content"], new["id"], new["rstrip"], new["lstrip"]) = (json!(" "), json!(next), json!(false), json!(true));
            v["added_tokens"].as_array_mut().unwrap().push(new);
        });
    }),
    ("tok_long_words", 7, &["max_input_chars_per_word", "at most 1000"], |t| {
        tok(t, |v| {
            let vocab = v["model"]["vocab"].clone();
            let unknown = vocab.as_object().unwrap().keys().next().unwrap().clone();
            v["model"] = json!({"type": "WordPiece", "vocab": vocab, "unk_token": unknown, "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100_000});
        });
    }),
    ("tok_missing_field", 4, &["tokenizers crate"], |t| tok(t, |v| v["pre_tokenizer"]["behavior"] = Value::Null)),
    ("tok_special_wrong_type", 4, &["tokenizer_config.json", "bos_token"], |t| {
        t.json("tokenizer_config.json", &json!({"bos_token": 1}));
    }),
];

fn tok(t: &Toy, change: impl FnOnce(&mut Value)) {
    t.edit("tokenizer.json", change);
}

fn pattern(t: &Toy, regex: &str) {
    tok(t, |v| v["pre_tokenizer"]["pattern"]["Regex"] = json!(regex));
}
