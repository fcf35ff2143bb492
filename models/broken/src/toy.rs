//! A Llama of two layers and a tokenizer of a few tokens, written into a directory and then broken on purpose.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// Rows of the embedding; the tokenizer has fewer ids.
pub const VOCAB: usize = 64;
/// Width of the residual stream.
pub const HIDDEN: usize = 64;

/// One tensor to be written.
#[derive(Clone)]
pub struct ToyTensor {
    /// As in a checkpoint.
    pub name: String,
    /// As safetensors names it.
    pub dtype: &'static str,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    /// Little endian, row by row.
    pub data: Vec<u8>,
}

impl ToyTensor {
    /// A tensor of zero bytes; `width` is the size of an element.
    pub fn zeros(name: &str, dtype: &'static str, width: usize, shape: &[usize]) -> ToyTensor {
        let data = vec![0; shape.iter().product::<usize>() * width];
        ToyTensor { name: name.to_string(), dtype, shape: shape.to_vec(), data }
    }

    /// A bf16 tensor of small numbers from the generator.
    fn seeded(name: &str, shape: &[usize], seed: &mut u64) -> ToyTensor {
        let mut tensor = ToyTensor::zeros(name, "BF16", 2, shape);
        for element in tensor.data.chunks_exact_mut(2) {
            *seed ^= *seed << 13;
            *seed ^= *seed >> 7;
            *seed ^= *seed << 17;
            // Sign and low mantissa bits vary, the exponent keeps the size near 0.2.
            element.copy_from_slice(&(0x3e40u16 | (*seed as u16 & 0x803f)).to_le_bytes());
        }
        tensor
    }
}

/// `config.json` of the toy.
pub fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": VOCAB,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        "rope_scaling": null})
}

/// The tensors that the config asks for.
pub fn tensors() -> Vec<ToyTensor> {
    let mut seed = 0x9e37_79b9_7f4a_7c15;
    let mut list = Vec::new();
    let mut add = |name: String, shape: &[usize]| list.push(ToyTensor::seeded(&name, shape, &mut seed));
    add("model.embed_tokens.weight".into(), &[VOCAB, HIDDEN]);
    for layer in 0..2 {
        for (name, shape) in [
            ("input_layernorm", &[HIDDEN][..]),
            ("mlp.down_proj", &[HIDDEN, 96]),
            ("mlp.gate_proj", &[96, HIDDEN]),
            ("mlp.up_proj", &[96, HIDDEN]),
            ("post_attention_layernorm", &[HIDDEN]),
            ("self_attn.k_proj", &[32, HIDDEN]),
            ("self_attn.o_proj", &[HIDDEN, HIDDEN]),
            ("self_attn.q_proj", &[HIDDEN, HIDDEN]),
            ("self_attn.v_proj", &[32, HIDDEN]),
        ] {
            add(format!("model.layers.{layer}.{name}.weight"), shape);
        }
    }
    add("model.norm.weight".into(), &[HIDDEN]);
    add("lm_head.weight".into(), &[VOCAB, HIDDEN]);
    list
}

/// A BPE over lower-case letters with three merges.
pub fn tokenizer() -> Value {
    let mut vocab = serde_json::Map::new();
    for text in ["<unk>", "<s>", "</s>"] {
        vocab.insert(text.into(), vocab.len().into());
    }
    for letter in 'a'..='z' {
        vocab.insert(letter.into(), vocab.len().into());
    }
    for text in ["th", "the", "an"] {
        vocab.insert(text.into(), vocab.len().into());
    }
    let special = |id: usize, text: &str| json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Removed", "invert": false},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
            "merges": [["t", "h"], ["th", "e"], ["a", "n"]]}})
}

/// A directory that is being built.
pub struct Toy {
    /// Where it lies.
    pub path: PathBuf,
}

impl Toy {
    /// The complete model in `path`.
    pub fn write(path: &Path) -> Toy {
        std::fs::create_dir_all(path).unwrap();
        let toy = Toy { path: path.to_path_buf() };
        toy.json("config.json", &config());
        toy.json("tokenizer.json", &tokenizer());
        toy.json("generation_config.json", &json!({"eos_token_id": 2}));
        toy.json("tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true}));
        toy.put("chat_template.jinja", "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}");
        toy.weights("model.safetensors", &tensors());
        toy
    }

    /// The path of one of its files.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a file.
    pub fn put(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.file(name), bytes).unwrap();
    }

    /// Reads a file.
    pub fn get(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.file(name)).unwrap()
    }

    /// Removes a file that is there.
    pub fn remove(&self, name: &str) {
        std::fs::remove_file(self.file(name)).unwrap();
    }

    /// Makes `name` a symbolic link to `target`, in the place of what was there.
    pub fn link(&self, target: &str, name: &str) {
        let _ = std::fs::remove_file(self.file(name));
        std::os::unix::fs::symlink(target, self.file(name)).unwrap();
    }

    /// Writes a JSON file.
    pub fn json(&self, name: &str, value: &Value) {
        self.put(name, value.to_string());
    }

    /// Changes one JSON file in place.
    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&self.get(name)).unwrap();
        change(&mut value);
        self.json(name, &value);
    }

    /// Changes one field of `config.json`.
    pub fn config(&self, key: &str, value: Value) {
        self.edit("config.json", |config| config[key] = value);
    }

    /// Writes `tensors` as one safetensors file, densely and in this order.
    pub fn weights(&self, name: &str, tensors: &[ToyTensor]) {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for tensor in tensors {
            let begin = data.len();
            data.extend_from_slice(&tensor.data);
            let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()]});
            header.insert(tensor.name.clone(), entry);
        }
        self.raw_weights(name, &Value::Object(header).to_string(), &data);
    }

    /// Changes the tensors before they are written.
    pub fn edit_weights(&self, change: impl FnOnce(&mut Vec<ToyTensor>)) {
        let mut list = tensors();
        change(&mut list);
        self.weights("model.safetensors", &list);
    }

    /// Changes the header's text.
    pub fn edit_header(&self, change: impl FnOnce(String) -> String) {
        let bytes = self.get("model.safetensors");
        let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
        self.raw_weights("model.safetensors", &change(header), &bytes[8 + length..]);
    }

    /// The weights in two shards with an index; returns the index for further changes.
    pub fn shard(&self) -> Value {
        self.remove("model.safetensors");
        let list = tensors();
        let (a, b) = list.split_at(9);
        let mut map = serde_json::Map::new();
        for (shard, part) in [("a.safetensors", a), ("b.safetensors", b)] {
            self.weights(shard, part);
            map.extend(part.iter().map(|t| (t.name.clone(), shard.into())));
        }
        let total: usize = list.iter().map(|t| t.data.len()).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        self.json(INDEX, &index);
        index
    }

    /// Writes a file of the form of safetensors.
    pub fn raw_weights(&self, name: &str, header: &str, data: &[u8]) {
        self.put(name, [(header.len() as u64).to_le_bytes().as_slice(), header.as_bytes(), data].concat());
    }
}

/// The index of shards.
pub const INDEX: &str = "model.safetensors.index.json";
