//! Shards and their index.

use crate::toy::{self, INDEX, Toy};
use crate::{Accepted, Case};
use serde_json::{Value, json};

/// Refused by the index or what it leads to.
pub const SHARDS: &[Case] = &[
    ("shard_missing", 3, &["b.safetensors"], |t| {
        t.shard();
        t.remove("b.safetensors");
    }),
    ("index_bad_json", 4, &["index.json", "weight_map"], |t| edit_index(t, |index| index["weight_map"] = json!([1]))),
    ("index_cut", 4, &["index.json"], |t| {
        t.shard();
        t.put(INDEX, "{\"weight_map\"");
    }),
    ("index_dotdot", 3, &["weight_map.model.norm.weight"], |t| {
        std::fs::write(t.path.join("../x.safetensors"), "x").unwrap();
        map_norm(t, json!("../x.safetensors"));
    }),
    ("index_absolute", 3, &["weight_map.model.norm.weight"], |t| map_norm(t, json!("/etc/passwd"))),
    ("index_name_slash", 3, &["weight_map.model.norm.weight"], |t| map_norm(t, json!("a/b"))),
    ("index_name_nul", 3, &["weight_map.model.norm.weight"], |t| map_norm(t, json!("a\0b"))),
    ("index_name_empty", 3, &["weight_map.model.norm.weight"], |t| map_norm(t, json!(""))),
    ("index_name_dot", 3, &["weight_map.model.norm.weight"], |t| map_norm(t, json!("."))),
    ("index_name_number", 4, &["weight_map.model.norm.weight"], |t| map_norm(t, json!(1))),
    ("index_wrong_shard", 5, &["model.norm.weight", "a.safetensors", "b.safetensors"], |t| map_norm(t, json!("a.safetensors"))),
    ("index_tensor_nowhere", 5, &["model.bogus"], |t| {
        edit_index(t, |index| index["weight_map"]["model.bogus"] = json!("a.safetensors"));
    }),
    ("index_tensor_twice", 5, &["model.embed_tokens.weight", "a.safetensors", "b.safetensors"], |t| {
        t.shard();
        let list = toy::tensors();
        t.weights("b.safetensors", &[&list[9..], &list[..1]].concat());
    }),
    ("tensors_of_all_shards", 7, &["b.safetensors", "too many tensors", "at most 1000000 tensors in all"], |t| {
        let in_a = t.shard()["weight_map"].as_object().unwrap().values().filter(|shard| *shard == "a.safetensors").count();
        let entry = |i: usize| format!("\"{i}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}");
        t.raw_weights("b.safetensors", &object_of(1_000_001 - in_a, entry), &[]);
    }),
    ("index_1e6_shards", 7, &["index.json"], |t| {
        t.shard();
        let map = object_of(1_000_000, |i| format!("\"t{i}\":\"s{i}.safetensors\""));
        t.put(INDEX, format!("{{\"weight_map\":{map}}}"));
    }),
];

/// Controls beside them.
pub const SHARDS_ACCEPTED: &[Accepted] = &[
    ("sharded", "", |t| drop(t.shard())),
    ("index_total_size_wrong", "total_size", |t| edit_index(t, |index| index["metadata"]["total_size"] = json!(1))),
    ("index_and_single", "model.safetensors is present", |t| {
        t.shard();
        t.weights("model.safetensors", &toy::tensors());
    }),
];

fn edit_index(t: &Toy, change: fn(&mut Value)) {
    let mut index = t.shard();
    change(&mut index);
    t.json(INDEX, &index);
}

fn map_norm(t: &Toy, shard: Value) {
    let mut index = t.shard();
    index["weight_map"]["model.norm.weight"] = shard;
    t.json(INDEX, &index);
}

/// A JSON object of this many entries, written piece by piece: whoever looks at the memory of a process that the test starts sees the
/// test's too.
fn object_of(entries: usize, entry: impl Fn(usize) -> String) -> String {
    let mut text = String::from("{");
    for i in 0..entries {
        text.push_str(&entry(i));
        text.push(if i + 1 == entries { '}' } else { ',' });
    }
    text
}
