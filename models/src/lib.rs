//! Opens a model directory: untrusted bytes in, a checked [`Model`] out.
//!
//! ```text
//! DIR -> dir (safe opening) -> json -> config -> arch (which model, which tensors)
//!                           -> weights (safetensors headers, never all bytes) -> tensors of arch present and right
//!                           -> tokenizer, template, generation, pooling
//! ```
//! Everything that can be wrong with a model directory is found here and told in one line ([`Error`]); later stages
//! rely on it. Nothing in the directory is executed, nothing outside it is read, sizes are compared with the files
//! before memory is asked for, and foreign parsers run with panics caught. Whether weights are finite is asked while
//! they are packed ([`weights::first_nonfinite`]), since only then they are read; of codes scales are looked at here.
//!
//! Architectures ([`arch`]) describe models: a configuration, the tensors they need, and the forward computation.

pub mod arch;
pub mod config;
pub mod dir;
pub mod error;
pub mod generation;
mod guard;
pub mod json;
pub mod pooling;
pub mod quantised;
pub mod rope;
pub mod tokenizer;
pub mod trace;
pub mod weights;

use std::path::Path;

use serde_json::{Map, Value};

use arch::{ArchEntry, Architecture, Facts, Task};
use config::{ConfigReader, HEAD_DIM_MAX, RopeKind};
use dir::{InputFile, ModelDir};
pub use error::{Error, Kind, Warning};
use generation::{Generation, SETTINGS_BYTES_MAX};
use pooling::Pooling;
use quantised::Scheme;
use rcompile_template::{NaiveDate, OUTPUT_BYTES_MAX, Template, TemplateError, TemplateErrorKind, TemplateInput};
use tokenizer::Tokenizer;
use weights::{Stored, WeightIndex};

const CONFIG: &str = "config.json";
/// Says what an adapter beside a model's weights is for.
const ADAPTER: &str = "adapter_config.json";
/// What a template may take for a conversation of a few words: several times what those of known models do, at most 10 thousand steps.
const PROBE_FUEL: u64 = 50_000;
/// Memory that rendering a template may take there, its stack (a third of it) included.
const TEMPLATE_MEMORY_BYTES: u64 = 192 << 20;
/// Memory that a tokenizer may take to be loaded and tried, and what it may take in addition for each byte of its file.
const TOKENIZER_MEMORY_BYTES: u64 = 160 << 20;
const TOKENIZER_MEMORY_PER_BYTE: u64 = 32;

/// What the user asked for, as far as it matters to opening.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// `--ctx-size`: positions per sequence.
    pub ctx_size: Option<usize>,
    /// `--strict`: tensors that the architecture does not know are an error.
    pub strict: bool,
    /// What is made of `tokenizer.json`.
    pub tokenizer: TokenizerUse,
    /// Bounds the memory of those parts in which foreign code decides how much it takes.
    pub within: Option<Within>,
}

/// Runs a part of opening; the process takes at most about as many bytes of memory more meanwhile, or ends with the line of a refusal. Only
/// a process that does nothing else can hold itself to that.
pub type Within = fn(bytes: u64, refusal: &str, part: &mut dyn FnMut());

/// What is made of the tokenizer and the chat template of a model directory. A model without takes token ids only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenizerUse {
    /// A model without `tokenizer.json` is refused.
    #[default]
    Required,
    /// Read where it is there.
    Optional,
    /// Left alone, whatever it is.
    Unread,
}

/// A model directory in which everything fits together.
pub struct Model {
    /// The open directory.
    pub dir: ModelDir,
    /// The directory's own name.
    pub name: String,
    /// The registry's line.
    pub arch: &'static ArchEntry,
    /// The configured architecture.
    pub net: Box<dyn Architecture>,
    /// The checkpoint's tensors by canonical name.
    pub weights: WeightIndex,
    /// How the checkpoint's linear layers are quantised, where they are.
    pub scheme: Option<Scheme>,
    /// The tokenizer, where there is one.
    pub tokenizer: Option<Tokenizer>,
    /// Source of the chat template; it compiles and renders.
    pub chat_template: Option<String>,
    /// Special ids and sampling defaults.
    pub generation: Generation,
    /// The last steps of a sentence encoder.
    pub pooling: Option<Pooling>,
    /// To be printed, at most one line of each kind of thing.
    pub warnings: Vec<Warning>,
}

impl Model {
    /// Sizes and switches of the model.
    pub fn facts(&self) -> &Facts {
        self.net.facts()
    }

    /// What the architecture reads of the checkpoint.
    pub fn stored(&self) -> impl Iterator<Item = Stored<'_>> {
        self.net.tensors().into_iter().filter_map(|spec| self.weights.find(&spec.name))
    }

    /// Number of elements of that, of codes those of the matrices.
    pub fn parameters(&self) -> u64 {
        let elements = |stored| match stored {
            Stored::Plain(tensor) => tensor.elements(),
            Stored::Codes(coded) => coded.elements(),
            Stored::Order(_) => 0,
        };
        self.stored().map(elements).sum()
    }

    /// Every file that was read, by name, as [`Model::hash_inputs`] lists them; weight files with zeros for a hash.
    pub fn list_inputs(&self) -> Vec<InputFile> {
        let zeros = |file: &dir::File| InputFile { name: file.name().to_string(), bytes: file.size(), sha256: "0".repeat(64) };
        let mut inputs = self.dir.inputs();
        inputs.extend(self.weights.files().iter().map(zeros));
        inputs.sort();
        inputs
    }

    /// Most tokens of a text that an encoder embeds, as the model's files say (sentence-transformers' settings, else the tokenizer's, and of a
    /// sentence encoder no more than it has positions); special tokens count.
    pub fn text_limit(&self) -> Option<usize> {
        let by_pooling = self.pooling.as_ref().and_then(|p| p.max_tokens);
        let by_tokenizer = self.tokenizer.as_ref().and_then(|t| t.facts.model_max_length);
        let by_positions = self.pooling.as_ref().map(|_| self.facts().max_positions);
        by_pooling.or(by_tokenizer.filter(|_| self.arch.task == Task::Embed).into_iter().chain(by_positions).min())
    }

    /// Every file that was read, with its hash, by name. Reads the weights once more, in a stream; other threads may
    /// read tensors meanwhile.
    pub fn hash_inputs(&self) -> Result<Vec<InputFile>, Error> {
        let mut inputs = self.dir.inputs();
        for file in self.weights.files() {
            let sha256 = file.sha256()?;
            inputs.push(InputFile { name: file.name().to_string(), bytes: file.size(), sha256 });
        }
        inputs.sort();
        Ok(inputs)
    }
}

/// Opens and checks the model directory at `path`.
pub fn open(path: &Path, options: &OpenOptions) -> Result<Model, Error> {
    let dir = ModelDir::open(path)?;
    let mut warnings = Vec::new();
    let map = json::parse_object(CONFIG, &dir.open_file(CONFIG)?.read_all(SETTINGS_BYTES_MAX)?)?;
    let config = ConfigReader::new(CONFIG, &map).with_ctx_size(options.ctx_size);
    refuse_unsupported(&config)?;
    let scheme = quantised::read_scheme(&config)?;
    let pooled = dir.open_if_present(pooling::MODULES)?.is_some();
    let entry = arch::find(&config, pooled)?;
    config.refuse_if_true("is_encoder_decoder")?;
    config::check_dtype(&config)?;
    let net = (entry.load)(&config)?;
    let facts = net.facts();
    check_context(facts, options)?;
    check_head(&config, facts)?;
    check_causal(&config, facts)?;
    if config.value("auto_map").is_some() {
        let what = "names code in the model directory, which is never run; the built-in architecture is used";
        warnings.push(Warning::new(CONFIG, "auto_map", what));
    }
    for place in if facts.rope.is_some() { config::unread_rope(&config)? } else { Vec::new() } {
        warnings.push(Warning::new(CONFIG, place, "is no RoPE parameter that the reference reads; it is ignored"));
    }
    let generation = generation::read_generation(&dir, &config, (entry.task, facts.vocab_size), &mut warnings)?;
    let pooling = match entry.task {
        Task::Embed => pooling::read_pooling(&dir, facts.hidden_size)?,
        // It would be compiled, and say something of texts that it was not made for.
        Task::Generate if pooled => {
            let (what, expected) = ("makes a sentence encoder of a class that only generates text here", arch::encoders());
            let e = Error::new(Kind::Unsupported, pooling::MODULES, "file", what, expected, entry.class_names.join(" or "));
            return Err(e.help("without this file the model is compiled to generate text"));
        }
        Task::Generate => None,
    };

    let mut weights = WeightIndex::open(&dir, &mut warnings)?;
    if dir.open_if_present(ADAPTER)?.is_some() {
        warnings.push(Warning::new(ADAPTER, "file", "is of an adapter, which is not applied: merge it into its model and save that"));
    }
    weights.canonicalise(entry.naming)?;
    weights.name_tied(facts);
    if let Some(scheme) = scheme {
        weights.gather_codes(scheme)?;
    }
    weights.check(&*net, options.strict, &mut warnings)?;
    if let Some(rope) = &facts.rope {
        rope::check(&config, rope, facts.head_dim, facts.max_positions)?;
    }

    let reads_text = options.tokenizer != TokenizerUse::Unread;
    let file = if reads_text { dir.open_if_present(tokenizer::FILE)? } else { None };
    let tokenizer = match file {
        Some(file) => {
            let bytes = TOKENIZER_MEMORY_BYTES + TOKENIZER_MEMORY_PER_BYTE * file.size().min(tokenizer::FILE_BYTES_MAX);
            bounded(options, bytes, tokenizer::FILE, "file", || tokenizer::read(&dir, facts.vocab_size, &mut warnings))?
        }
        None => None,
    };
    if let (Some(pooling), Some(tokenizer)) = (&pooling, &tokenizer) {
        pooling::check_case(pooling, &tokenizer.facts)?;
    }
    if tokenizer.is_none() && options.tokenizer == TokenizerUse::Required {
        let place = format!("a file in {}", path.display());
        let missing = Error::new(Kind::Missing, tokenizer::FILE, "file", "is missing", place, "no such file");
        return Err(missing.help("build with --no-tokenizer for an executable of token ids alone"));
    }
    let chat_template = match entry.task {
        Task::Generate if reads_text => tokenizer::read_chat_template(&dir)?,
        _ => None,
    };
    if let Some((file, source)) = &chat_template {
        let probe = || probe_template(file, source, tokenizer.as_ref());
        bounded(options, TEMPLATE_MEMORY_BYTES, file, "chat_template", probe)?;
    }
    let name = dir.name();
    let chat_template = chat_template.map(|(_, source)| source);
    Ok(Model { dir, name, arch: entry, net, weights, scheme, tokenizer, chat_template, generation, pooling, warnings })
}

/// What `part` gives, within so much memory where the process can be held to that.
fn bounded<T>(options: &OpenOptions, bytes: u64, file: &str, place: &str, part: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let Some(within) = options.within else { return part() };
    let refusal = Error::new(Kind::Limit, file, place, "takes too much memory", format!("at most {} MiB", bytes >> 20), "more");
    let (mut part, mut result) = (Some(part), None);
    within(bytes, &refusal.to_string(), &mut || result = part.take().map(|part| part()));
    result.unwrap_or(Err(refusal))
}

/// Things that no architecture here supports, whatever its name: refused by name, inconsistent ones first.
fn refuse_unsupported(config: &ConfigReader<'_>) -> Result<(), Error> {
    if config.value("per_layer_config").and_then(Value::as_object).is_some_and(|layers| !layers.is_empty()) {
        return Err(config.unsupported("per_layer_config", "settings of single layers", "the same settings for all layers"));
    }
    let experts = ["num_local_experts", "num_experts", "n_routed_experts"];
    for key in experts {
        let count = config.usize_opt(key, 0..=config::SIZE_MAX)?.unwrap_or(0);
        let chosen = config.usize_opt("num_experts_per_tok", 0..=config::SIZE_MAX)?.unwrap_or(0);
        if count > 0 && chosen > count {
            let fields = (("num_experts_per_tok", chosen), (key, count));
            return Err(config.disagree(fields.0, fields.1, "contradict each other", "at most as many as there are"));
        }
        if count > 0 {
            return Err(config.unsupported(key, count, "a model without experts"));
        }
    }
    Ok(())
}

/// The reference gives a decoder whose config says so the attention of an encoder; an encoder has it anyway.
fn check_causal(config: &ConfigReader<'_>, facts: &Facts) -> Result<(), Error> {
    if !facts.causal || config.bool_where_null_is_false("is_causal")? {
        return Ok(());
    }
    let what = "lets attention look at later tokens, which is not supported";
    let found = if config.value("is_causal").is_some() { "false" } else { "null, which is false" };
    Err(Error::new(Kind::Unsupported, CONFIG, "is_causal", what, "true", found))
}

/// Kernels of attention are written out for all elements of a head.
fn check_head(config: &ConfigReader<'_>, facts: &Facts) -> Result<(), Error> {
    if facts.head_dim <= HEAD_DIM_MAX {
        return Ok(());
    }
    let place = if config.value("head_dim").is_some() { "head_dim" } else { "hidden_size" };
    let expected = format!("at most {HEAD_DIM_MAX} elements");
    Err(Error::new(Kind::Limit, CONFIG, place, "gives heads that are too large", expected, facts.head_dim))
}

/// A context beyond what the positions of the model allow is refused where the result would be wrong.
fn check_context(facts: &Facts, options: &OpenOptions) -> Result<(), Error> {
    let Some(context) = options.ctx_size.filter(|n| *n > facts.max_positions) else { return Ok(()) };
    let expected = match &facts.rope {
        None => "at most the learned positions",
        Some(rope) if matches!(rope.kind, RopeKind::Dynamic { .. }) => "at most the trained length with dynamic RoPE",
        Some(_) => return Ok(()),
    };
    let expected = format!("{expected}, {}", facts.max_positions);
    let place = "max_position_embeddings";
    Err(Error::new(Kind::Unsupported, CONFIG, place, "is below the context size asked for", expected, context))
}

/// Compiles the template and renders conversations until one renders, within its bounds.
fn probe_template(file: &str, source: &str, tokenizer: Option<&Tokenizer>) -> Result<(), Error> {
    let place = |line: usize| if line == 0 { "chat_template".to_string() } else { format!("line {line}") };
    let refuse = |e: &TemplateError| match e.kind {
        TemplateErrorKind::Limit => {
            let expected = format!("at most {PROBE_FUEL} steps and {OUTPUT_BYTES_MAX} bytes of text");
            Error::new(Kind::Limit, file, place(e.line), "takes too much to render", expected, &e.message)
        }
        TemplateErrorKind::Machine => Error::new(Kind::Limit, file, "chat_template", "cannot be tried here", "memory for it", &e.message),
        _ => Error::new(Kind::Malformed, file, place(e.line), "is no valid chat template", "a template that renders", &e.message),
    };
    let failed = |panic: String| Error::new(Kind::Malformed, file, "chat_template", "cannot be compiled", "a template", panic);
    let template = guard::catch(|| Template::with_fuel(source, PROBE_FUEL)).map_err(failed)?.map_err(|e| refuse(&e))?;
    let none = std::collections::BTreeMap::new();
    let special_tokens = tokenizer.map_or(&none, |t| &t.facts.special_tokens);
    let message = |role: &str| {
        let mut map = Map::new();
        map.insert("role".into(), role.into());
        map.insert("content".into(), "Hello there.".into());
        Value::Object(map)
    };
    let mut first_fault = None;
    let conversations = [&["user"][..], &["user", "assistant", "user"], &["system", "user"]];
    for roles in conversations {
        let input = TemplateInput {
            messages: roles.iter().map(|role| message(role)).collect(),
            tools: None,
            add_generation_prompt: true,
            special_tokens,
            extra: None,
            now: NaiveDate::from_ymd_opt(2026, 1, 1).and_then(|day| day.and_hms_opt(0, 0, 0)),
        };
        match guard::catch(|| template.render(&input)).map_err(failed)? {
            // A template may refuse a conversation, but one that stumbles over all of them is of no use.
            Ok(_) => return Ok(()),
            Err(e) if matches!(e.kind, TemplateErrorKind::Limit | TemplateErrorKind::Machine) => return Err(refuse(&e)),
            Err(e) if e.kind == TemplateErrorKind::Raised => {}
            Err(e) => first_fault = first_fault.or(Some(e)),
        }
    }
    first_fault.map_or(Ok(()), |e| Err(refuse(&e)))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_model_is_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<super::Model>();
    }
}
