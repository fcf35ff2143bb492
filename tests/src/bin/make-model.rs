//! Makes a model directory of a real shape with random weights, for benchmarks: speed and size do not depend on the values.
//!
//! ```text
//! make-model llama-1b -o DIR   ->   DIR/{config.json, generation_config.json, model.safetensors,
//!                                        tokenizer.json, tokenizer_config.json}
//! ```
//! The same arguments give the same bytes on every machine. Weights are streamed: memory stays at some MB for any size. Each
//! weight is the sum of four random bytes, which is close to a normal distribution, scaled to the standard deviation 0.02;
//! norms lie around one. A random weight has 1021 possible values, so that a draw is one look into a table of stored values.
//! The tokenizer has the true vocabulary size; its tokens are synthetic: all bytes, then all pairs, then triples until full.

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use half::{bf16, f16};
use serde_json::{Map, Value, json};

/// Standard deviation of weights and biases, as in `initializer_range` of most configurations.
const DEVIATION: f64 = 0.02;

/// Make a model directory of a real shape with random weights.
#[derive(Parser)]
struct Args {
    /// Shape to make
    shape: Shape,
    /// Directory to write
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Type of the stored weights [default: bf16, as llama-1b is published; f32 for bert-base and gpt2]
    #[arg(long)]
    dtype: Option<Dtype>,
    /// Seed of the weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Layers, instead of the shape's own number
    #[arg(long)]
    layers: Option<usize>,
    /// Width of the hidden state, instead of the shape's own
    #[arg(long)]
    hidden: Option<usize>,
    /// Width between the two halves of the MLP, instead of the shape's own
    #[arg(long)]
    intermediate: Option<usize>,
    /// Query heads, instead of the shape's own number
    #[arg(long)]
    heads: Option<usize>,
    /// Key and value heads of a Llama shape
    #[arg(long)]
    kv_heads: Option<usize>,
    /// Size of the vocabulary, instead of the shape's own
    #[arg(long)]
    vocab: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Shape {
    /// Llama 3.2 1B: hidden 2048, 16 layers, 32 heads over 8, vocabulary 128256, tied head
    #[value(name = "llama-1b")]
    Llama1b,
    /// BERT base: a sentence encoder of hidden 768 and 12 layers
    BertBase,
    /// GPT-2 (124 million weights)
    Gpt2,
    /// A small Llama, to change its number of layers
    Toy,
    /// A Llama whose weights (20 MB in bf16) fit the L3 cache
    L3,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Name in `config.json` and name in the header of safetensors.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::F32 => ("float32", "F32"),
            Self::F16 => ("float16", "F16"),
            Self::Bf16 => ("bfloat16", "BF16"),
        }
    }
}

/// How wide and deep a model is.
struct Dims {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    vocab: usize,
    positions: usize,
}

impl Dims {
    fn of(args: &Args) -> Self {
        let dims = |layers, hidden, intermediate, heads, kv_heads, vocab, positions| Self {
            layers,
            hidden,
            intermediate,
            heads,
            kv_heads,
            vocab,
            positions,
        };
        let own = match args.shape {
            Shape::Llama1b => dims(16, 2048, 8192, 32, 8, 128_256, 131_072),
            Shape::BertBase => dims(12, 768, 3072, 12, 12, 30_522, 512),
            Shape::Gpt2 => dims(12, 768, 3072, 12, 12, 50_257, 1024),
            Shape::Toy => dims(4, 256, 768, 4, 2, 4096, 1024),
            Shape::L3 => dims(4, 512, 1024, 8, 2, 2048, 1024),
        };
        Self {
            layers: args.layers.unwrap_or(own.layers),
            hidden: args.hidden.unwrap_or(own.hidden),
            intermediate: args.intermediate.unwrap_or(own.intermediate),
            heads: args.heads.unwrap_or(own.heads),
            kv_heads: args.kv_heads.unwrap_or(own.kv_heads),
            vocab: args.vocab.unwrap_or(own.vocab),
            positions: own.positions,
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let dims = Dims::of(&args);
    if dims.layers == 0 || dims.heads == 0 || dims.kv_heads == 0 || !dims.hidden.is_multiple_of(dims.heads) {
        return Err("expected at least one layer and one head, and a hidden width that is a multiple of the heads".into());
    }
    let dtype = args.dtype.unwrap_or(match args.shape {
        Shape::BertBase | Shape::Gpt2 => Dtype::F32,
        Shape::Llama1b | Shape::Toy | Shape::L3 => Dtype::Bf16,
    });
    let model = match args.shape {
        Shape::BertBase => bert(&dims),
        Shape::Gpt2 => gpt2(&dims),
        Shape::Llama1b | Shape::Toy | Shape::L3 => llama(&dims),
    };
    if dims.vocab < model.vocabulary.smallest() {
        return Err(format!("--vocab {}: expected at least {}", dims.vocab, model.vocabulary.smallest()).into());
    }
    fs::create_dir_all(&args.output)?;
    let mut config = model.config;
    config["torch_dtype"] = json!(dtype.names().0);
    write_json(&args.output.join("config.json"), &config)?;
    if let Some(generation) = &model.generation {
        write_json(&args.output.join("generation_config.json"), generation)?;
    }
    model.vocabulary.write(&args.output, dims.vocab)?;
    write_weights(&args.output.join("model.safetensors"), &model.tensors, dtype, args.seed)?;
    let weights: u64 = model.tensors.iter().map(Tensor::count).sum();
    eprintln!("{}: {weights} weights, {} bytes", args.output.display(), weights * dtype.bytes());
    Ok(())
}

// --- Architectures: the configuration and the tensors that Hugging Face writes for them.

struct Model {
    config: Value,
    generation: Option<Value>,
    tensors: Vec<Tensor>,
    vocabulary: Vocabulary,
}

struct Tensor {
    name: String,
    shape: Vec<usize>,
    /// What the random values lie around.
    center: f64,
}

impl Tensor {
    fn count(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }
}

/// Tensors in the order of the file.
#[derive(Default)]
struct Tensors(Vec<Tensor>);

impl Tensors {
    fn matrix(&mut self, name: String, rows: usize, columns: usize) {
        self.0.push(Tensor { name, shape: vec![rows, columns], center: 0.0 });
    }

    fn bias(&mut self, name: String, width: usize) {
        self.0.push(Tensor { name, shape: vec![width], center: 0.0 });
    }

    fn norm(&mut self, name: String, width: usize) {
        self.0.push(Tensor { name, shape: vec![width], center: 1.0 });
    }

    /// `NAME.weight` and `NAME.bias` of a layer norm.
    fn layer_norm(&mut self, name: &str, width: usize) {
        self.norm(format!("{name}.weight"), width);
        self.bias(format!("{name}.bias"), width);
    }
}

fn llama(d: &Dims) -> Model {
    let head_dim = d.hidden / d.heads;
    let special = d.vocab.saturating_sub(256).max(256).min(d.vocab - 2); // Llama 3's special tokens are the last 256
    let (bos, eos) = (special, special + 1);
    let mut t = Tensors::default();
    t.matrix("model.embed_tokens.weight".into(), d.vocab, d.hidden);
    for layer in 0..d.layers {
        let at = |name: &str| format!("model.layers.{layer}.{name}.weight");
        t.norm(at("input_layernorm"), d.hidden);
        t.matrix(at("self_attn.q_proj"), d.heads * head_dim, d.hidden);
        t.matrix(at("self_attn.k_proj"), d.kv_heads * head_dim, d.hidden);
        t.matrix(at("self_attn.v_proj"), d.kv_heads * head_dim, d.hidden);
        t.matrix(at("self_attn.o_proj"), d.hidden, d.heads * head_dim);
        t.norm(at("post_attention_layernorm"), d.hidden);
        t.matrix(at("mlp.gate_proj"), d.intermediate, d.hidden);
        t.matrix(at("mlp.up_proj"), d.intermediate, d.hidden);
        t.matrix(at("mlp.down_proj"), d.hidden, d.intermediate);
    }
    t.norm("model.norm.weight".into(), d.hidden);
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d.hidden,
        "intermediate_size": d.intermediate,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv_heads,
        "head_dim": head_dim,
        "vocab_size": d.vocab,
        "max_position_embeddings": d.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": true,
        "bos_token_id": bos,
        "eos_token_id": eos,
    });
    let generation = json!({"bos_token_id": bos, "eos_token_id": eos, "do_sample": false});
    let mut names = vec!["<|begin_of_text|>".to_owned(), "<|end_of_text|>".to_owned()];
    names.extend((2..d.vocab - special).map(|i| format!("<|reserved_{i}|>")));
    Model { config, generation: Some(generation), tensors: t.0, vocabulary: Vocabulary::Bytes { special: names, bos_id: Some(bos) } }
}

fn gpt2(d: &Dims) -> Model {
    let mut t = Tensors::default();
    t.matrix("wte.weight".into(), d.vocab, d.hidden);
    t.matrix("wpe.weight".into(), d.positions, d.hidden);
    for layer in 0..d.layers {
        let at = |name: &str| format!("h.{layer}.{name}");
        // Conv1D stores a matrix as [in, out].
        let conv1d = |t: &mut Tensors, name: &str, inputs: usize, outputs: usize| {
            t.matrix(format!("{}.weight", at(name)), inputs, outputs);
            t.bias(format!("{}.bias", at(name)), outputs);
        };
        t.layer_norm(&at("ln_1"), d.hidden);
        conv1d(&mut t, "attn.c_attn", d.hidden, 3 * d.hidden);
        conv1d(&mut t, "attn.c_proj", d.hidden, d.hidden);
        t.layer_norm(&at("ln_2"), d.hidden);
        conv1d(&mut t, "mlp.c_fc", d.hidden, d.intermediate);
        conv1d(&mut t, "mlp.c_proj", d.intermediate, d.hidden);
    }
    t.layer_norm("ln_f", d.hidden);
    let end = d.vocab - 1;
    let config = json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": d.hidden,
        "n_inner": d.intermediate,
        "n_layer": d.layers,
        "n_head": d.heads,
        "n_positions": d.positions,
        "vocab_size": d.vocab,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": end,
        "eos_token_id": end,
    });
    let generation = json!({"bos_token_id": end, "eos_token_id": end});
    let vocabulary = Vocabulary::Bytes { special: vec!["<|endoftext|>".into()], bos_id: None };
    Model { config, generation: Some(generation), tensors: t.0, vocabulary }
}

fn bert(d: &Dims) -> Model {
    let mut t = Tensors::default();
    t.matrix("embeddings.word_embeddings.weight".into(), d.vocab, d.hidden);
    t.matrix("embeddings.position_embeddings.weight".into(), d.positions, d.hidden);
    t.matrix("embeddings.token_type_embeddings.weight".into(), 2, d.hidden);
    t.layer_norm("embeddings.LayerNorm", d.hidden);
    for layer in 0..d.layers {
        let at = |name: &str| format!("encoder.layer.{layer}.{name}");
        let linear = |t: &mut Tensors, name: &str, inputs: usize, outputs: usize| {
            t.matrix(format!("{}.weight", at(name)), outputs, inputs);
            t.bias(format!("{}.bias", at(name)), outputs);
        };
        linear(&mut t, "attention.self.query", d.hidden, d.hidden);
        linear(&mut t, "attention.self.key", d.hidden, d.hidden);
        linear(&mut t, "attention.self.value", d.hidden, d.hidden);
        linear(&mut t, "attention.output.dense", d.hidden, d.hidden);
        t.layer_norm(&at("attention.output.LayerNorm"), d.hidden);
        linear(&mut t, "intermediate.dense", d.hidden, d.intermediate);
        linear(&mut t, "output.dense", d.intermediate, d.hidden);
        t.layer_norm(&at("output.LayerNorm"), d.hidden);
    }
    t.matrix("pooler.dense.weight".into(), d.hidden, d.hidden);
    t.bias("pooler.dense.bias".into(), d.hidden);
    let config = json!({
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": d.hidden,
        "intermediate_size": d.intermediate,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "max_position_embeddings": d.positions,
        "type_vocab_size": 2,
        "vocab_size": d.vocab,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "absolute",
        "pad_token_id": 0,
    });
    Model { config, generation: None, tensors: t.0, vocabulary: Vocabulary::WordPieces }
}

// --- Weights

/// A safetensors file: the length of the header, the header, the tensors one after the other.
fn write_weights(path: &Path, tensors: &[Tensor], dtype: Dtype, seed: u64) -> io::Result<()> {
    let mut header = Map::from_iter([("__metadata__".to_owned(), json!({"format": "pt"}))]);
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.count() * dtype.bytes();
        let entry = json!({"dtype": dtype.names().1, "shape": tensor.shape, "data_offsets": [offset, end]});
        header.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut header = serde_json::to_string(&header)?;
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut random = Random::new(seed);
    for tensor in tensors {
        match dtype {
            Dtype::F32 => write_tensor(&mut file, tensor, &mut random, |v| (v as f32).to_le_bytes())?,
            Dtype::F16 => write_tensor(&mut file, tensor, &mut random, |v| f16::from_f64(v).to_le_bytes())?,
            Dtype::Bf16 => write_tensor(&mut file, tensor, &mut random, |v| bf16::from_f64(v).to_le_bytes())?,
        }
    }
    Ok(())
}

/// Sums of four bytes: 0 to 1020, mean 510.
const SUMS: usize = 4 * 255 + 1;

fn write_tensor<const B: usize>(file: &mut File, tensor: &Tensor, random: &mut Random, stored: impl Fn(f64) -> [u8; B]) -> io::Result<()> {
    let deviation_of_sum = (4.0 * (256.0 * 256.0 - 1.0) / 12.0_f64).sqrt();
    let value = |sum: usize| tensor.center + (sum as f64 - 510.0) / deviation_of_sum * DEVIATION;
    let table: Vec<[u8; B]> = (0..SUMS).map(|sum| stored(value(sum))).collect();
    let table: &[[u8; B]; SUMS] = table.as_slice().try_into().expect("one entry per sum");
    let mut chunk = [[0u8; B]; 1 << 16];
    let mut left = tensor.count() as usize;
    while left > 0 {
        let part = left.min(chunk.len());
        // Both halves of a draw are used; an odd last value costs a draw of its own.
        for two in chunk[..part].chunks_mut(2) {
            let sums = random.two_sums();
            for (value, sum) in two.iter_mut().zip(sums) {
                *value = table[sum];
            }
        }
        file.write_all(chunk[..part].as_flattened())?;
        left -= part;
    }
    Ok(())
}

/// xorshift64* (Vigna 2016).
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        // The state must not be zero, and neighbouring seeds should not start alike.
        let mut random = Self((seed ^ 0x9e37_79b9_7f4a_7c15).max(1));
        for _ in 0..16 {
            random.next();
        }
        random
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Two sums of four random bytes each, below [`SUMS`].
    fn two_sums(&mut self) -> [usize; 2] {
        let bytes = self.next();
        let pairs = (bytes & 0x00ff_00ff_00ff_00ff) + ((bytes >> 8) & 0x00ff_00ff_00ff_00ff);
        let sums = (pairs & 0x0000_ffff_0000_ffff) + ((pairs >> 16) & 0x0000_ffff_0000_ffff);
        [(sums & 0xffff) as usize, (sums >> 32 & 0xffff) as usize]
    }
}

// --- Tokenizers

enum Vocabulary {
    /// Byte-level BPE with these special tokens at the end; texts begin with `bos_id` where there is one.
    Bytes { special: Vec<String>, bos_id: Option<usize> },
    /// WordPiece as in BERT: single letters and triples.
    WordPieces,
}

const BERT_SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

impl Vocabulary {
    fn smallest(&self) -> usize {
        match self {
            Self::Bytes { special, .. } => 256 + special.len(),
            Self::WordPieces => BERT_SPECIAL.len() + 2 * 26,
        }
    }

    fn write(&self, dir: &Path, size: usize) -> io::Result<()> {
        let (tokenizer, config) = match self {
            Self::Bytes { special, bos_id } => byte_bpe(size, special, *bos_id),
            Self::WordPieces => word_pieces(),
        };
        let mut out = BufWriter::new(File::create(dir.join("tokenizer.json"))?);
        // The vocabulary is large: it is written token by token behind the rest of the last field.
        out.write_all(open_object(&tokenizer.outer)?.as_bytes())?;
        out.write_all(b",\"model\":")?;
        out.write_all(open_object(&tokenizer.model)?.as_bytes())?;
        match self {
            Self::Bytes { special, .. } => {
                let letters = byte_letters();
                let plain = size - special.len();
                write_ids(&mut out, (0..plain).map(|id| byte_token(&letters, id)))?;
                write_merges(&mut out, (256..plain).map(|id| byte_merge(&letters, id)))?;
            }
            Self::WordPieces => write_ids(&mut out, word_piece_tokens().take(size))?,
        }
        out.write_all(b"}}\n")?;
        out.flush()?;
        write_json(&dir.join("tokenizer_config.json"), &config)
    }
}

/// `tokenizer.json` without the vocabulary: its fields but the model, and the fields of the model.
struct Tokenizer {
    outer: Value,
    model: Value,
}

/// The text of an object without its last brace.
fn open_object(value: &Value) -> io::Result<String> {
    let mut text = serde_json::to_string(value)?;
    text.pop();
    Ok(text)
}

/// `,"vocab":{TOKEN:ID,..}`
fn write_ids(out: &mut impl Write, tokens: impl Iterator<Item = String>) -> io::Result<()> {
    out.write_all(b",\"vocab\":{")?;
    for (id, token) in tokens.enumerate() {
        let comma = if id > 0 { "," } else { "" };
        write!(out, "{comma}{}:{id}", json!(token))?;
    }
    out.write_all(b"}")
}

/// `,"merges":[[A,B],..]`
fn write_merges(out: &mut impl Write, merges: impl Iterator<Item = [String; 2]>) -> io::Result<()> {
    out.write_all(b",\"merges\":[")?;
    for (rank, merge) in merges.enumerate() {
        let comma = if rank > 0 { "," } else { "" };
        write!(out, "{comma}{}", json!(merge))?;
    }
    out.write_all(b"]")
}

/// The letter that stands for each byte in byte-level BPE: itself where it prints, else one from 256 on.
fn byte_letters() -> Vec<String> {
    let mut next = 256;
    let letter = |byte: u32| {
        let prints = (33..=126).contains(&byte) || (161..=172).contains(&byte) || (174..=255).contains(&byte);
        let code = if prints {
            byte
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).expect("below the surrogates").to_string()
    };
    (0..256).map(letter).collect()
}

/// Token `id` of the synthetic byte-level vocabulary: 256 bytes, then every token so far followed by every byte.
fn byte_token(letters: &[String], id: usize) -> String {
    if id < 256 { letters[id].clone() } else { byte_merge(letters, id).concat() }
}

/// The two tokens that make token `id`, which is not a single byte.
fn byte_merge(letters: &[String], id: usize) -> [String; 2] {
    let rank = id - 256;
    [byte_token(letters, rank / 256), letters[rank % 256].clone()]
}

fn byte_bpe(size: usize, special: &[String], bos_id: Option<usize>) -> (Tokenizer, Value) {
    let plain = size - special.len();
    let added: Vec<Value> = special.iter().enumerate().map(|(i, name)| added_token(plain + i, name)).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let outer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": bos_id.map(|id| template(&[(&special[0], id)], &[])),
        "decoder": byte_level,
    });
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
    });
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": special[special.len().min(2) - 1],
    });
    (Tokenizer { outer, model }, config)
}

/// BERT's special tokens, letters, triples of letters, and as many unused tokens as anybody takes.
fn word_piece_tokens() -> impl Iterator<Item = String> {
    let letter = |i: usize| char::from(b'a' + (i % 26) as u8);
    let triple = move |i: usize| String::from_iter([letter(i / 676), letter(i / 26), letter(i)]);
    BERT_SPECIAL
        .map(String::from)
        .into_iter()
        .chain((0..26).map(move |i| letter(i).to_string()))
        .chain((0..26).map(move |i| format!("##{}", letter(i))))
        .chain((0..26 * 676).map(triple))
        .chain((0..26 * 676).map(move |i| format!("##{}", triple(i))))
        .chain((0..).map(|i| format!("[unused{i}]")))
}

fn word_pieces() -> (Tokenizer, Value) {
    let added: Vec<Value> = BERT_SPECIAL.iter().enumerate().map(|(i, name)| added_token(i, name)).collect();
    let outer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer":
            {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": template(&[("[CLS]", 2)], &[("[SEP]", 3)]),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
    });
    let model = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100});
    let config = json!({"tokenizer_class": "BertTokenizer", "do_lower_case": true, "model_max_length": 512});
    (Tokenizer { outer, model }, config)
}

fn added_token(id: usize, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
}

/// A post-processor that puts special tokens, given as name and id, before and after a text.
fn template(before: &[(&str, usize)], after: &[(&str, usize)]) -> Value {
    let around = |text: &str, segment: usize| -> Vec<Value> {
        let special = |&(name, _): &(&str, usize)| json!({"SpecialToken": {"id": name, "type_id": segment}});
        let text = json!({"Sequence": {"id": text, "type_id": segment}});
        before.iter().map(special).chain([text]).chain(after.iter().map(special)).collect()
    };
    let special = before.iter().chain(after);
    let special: Map<String, Value> =
        special.map(|&(name, id)| (name.to_owned(), json!({"id": name, "ids": [id], "tokens": [name]}))).collect();
    let pair = [around("A", 0), around("B", 1)].concat();
    json!({"type": "TemplateProcessing", "single": around("A", 0), "pair": pair, "special_tokens": special})
}

fn write_json(path: &Path, value: &Value) -> io::Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    serde_json::to_writer(&mut out, value)?;
    out.write_all(b"\n")?;
    out.flush()
}
