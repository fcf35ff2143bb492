//! The tensors of a checkpoint: `model.safetensors`, or shards with `model.safetensors.index.json`.
//!
//! In: the open directory. Out: a [`WeightIndex`]: every tensor's type, shape and place, and reading by `pread`. Opening reads headers
//! (`header`), inputs of columns where those are not in order, scales of codes and, of symmetric ones, zero points, and a head that has to
//! be the embedding; what else is read is looked through for NaN and infinity ([`first_nonfinite`]) by those who read it.
//!
//! Matrices that are stored as codes ([`crate::quantised`]) are seen here under the names and shapes that the architecture asks for.
//!
//! Where both layouts are present, the single file wins, as in the reference library, with a warning.

mod header;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use safetensors::Dtype;

use crate::arch::{Architecture, Facts, Naming, Role, TensorSpec};
use crate::dir::{self, File, ModelDir};
use crate::error::{Error, Kind, Warning, cut, escape};
use crate::json;
use crate::quantised::{self, CodedIndex, CodedMatrix, Scheme};
use rcompile_graph::DType;

/// The single-file layout.
pub const SINGLE: &str = "model.safetensors";
/// The index of the sharded layout.
pub const INDEX: &str = "model.safetensors.index.json";
/// Largest index file.
pub const INDEX_BYTES_MAX: u64 = 32 << 20;
/// Most shards.
pub const SHARDS_MAX: usize = 1024;

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Canonical name; see [`Naming`].
    pub name: Arc<str>,
    /// The name in the file.
    pub stored_name: Arc<str>,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Index into [`WeightIndex::files`].
    pub file_index: usize,
    /// First byte in that file.
    pub begin: u64,
    /// Size in bytes.
    pub size_bytes: u64,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        // The product was checked when the header was read.
        self.shape.iter().map(|d| *d as u64).product()
    }
}

/// All tensors of a checkpoint.
#[derive(Debug)]
pub struct WeightIndex {
    files: Vec<File>,
    tensors: BTreeMap<Arc<str>, TensorInfo>,
    codes: CodedIndex,
}

/// What a name of the graph stands for in a checkpoint.
#[derive(Clone, Copy, Debug)]
pub enum Stored<'a> {
    /// A tensor as it is.
    Plain(&'a TensorInfo),
    /// A matrix that is stored as codes.
    Codes(&'a CodedMatrix),
    /// The inputs of coded columns in order; see [`CodedMatrix::order`].
    Order(&'a [u32]),
}

/// The graph's name of a checkpoint's element type, where it has one.
pub fn graph_type(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// The first NaN or infinity among elements of a float type: its index and value.
pub fn first_nonfinite(dtype: DType, bytes: &[u8]) -> Option<(u64, f32)> {
    // A whole block is looked at without branches first; blocks with a hit are searched.
    fn search<const N: usize>(bytes: &[u8], hit: impl Fn([u8; N]) -> bool, value: impl Fn([u8; N]) -> f32) -> Option<(u64, f32)> {
        let elements = bytes.as_chunks::<N>().0;
        let block = elements.chunks(4096).position(|c| c.iter().fold(false, |any, e| any | hit(*e)))?;
        let at = block * 4096 + elements[block * 4096..].iter().position(|e| hit(*e))?;
        Some((at as u64, value(elements[at])))
    }
    // All bits of the exponent set.
    match dtype {
        DType::F32 => search(bytes, |e| u32::from_le_bytes(e) & 0x7f80_0000 == 0x7f80_0000, f32::from_le_bytes),
        DType::F16 => search(bytes, |e| u16::from_le_bytes(e) & 0x7c00 == 0x7c00, |e| half::f16::from_le_bytes(e).to_f32()),
        DType::BF16 => search(bytes, |e| u16::from_le_bytes(e) & 0x7f80 == 0x7f80, |e| half::bf16::from_le_bytes(e).to_f32()),
        _ => None,
    }
}

/// The error of an element that is not finite.
pub fn not_finite(file: &str, place: String, value: f32) -> Error {
    let found = if value.is_nan() { "NaN" } else { "infinity" };
    Error::new(Kind::Malformed, file, place, "is not finite", "a finite number", found)
}

impl WeightIndex {
    /// Opens the weights in `dir` and checks their headers.
    pub fn open(dir: &ModelDir, warnings: &mut Vec<Warning>) -> Result<WeightIndex, Error> {
        let index = dir.open_if_present(INDEX)?;
        if let Some(file) = dir.open_if_present(SINGLE)? {
            if index.is_some() {
                warnings.push(Warning::new(INDEX, "file", format!("is not read, as {SINGLE} is present too")));
            }
            let mut weights = WeightIndex::empty();
            for tensor in header::read(&file, 0, header::TENSORS_MAX)? {
                weights.tensors.insert(tensor.name.clone(), tensor);
            }
            weights.files.push(file);
            return Ok(weights);
        }
        let Some(index) = index else {
            let e = Error::new(Kind::Missing, SINGLE, "file", "is missing", format!("{SINGLE} or {INDEX}"), "neither");
            return Err(match help_in_place_of_weights(dir) {
                Some(help) => e.help(help),
                None => e,
            });
        };
        open_sharded(dir, &index, warnings)
    }

    fn empty() -> WeightIndex {
        WeightIndex { files: Vec::new(), tensors: BTreeMap::new(), codes: CodedIndex::default() }
    }

    /// Joins the parts of matrices that are stored as codes. To be called when names are canonical.
    pub fn gather_codes(&mut self, scheme: Scheme) -> Result<(), Error> {
        self.codes = quantised::gather(self, scheme)?;
        Ok(())
    }

    /// The files, in the order that [`TensorInfo::file_index`] counts.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// The tensor with this canonical name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The matrix of this canonical name, if it is stored as codes.
    pub fn coded(&self, name: &str) -> Option<&CodedMatrix> {
        self.codes.matrices.get(name)
    }

    /// How many matrices are stored as codes.
    pub fn coded_count(&self) -> usize {
        self.codes.matrices.len()
    }

    /// Is this tensor a part of a matrix of codes?
    pub fn is_part(&self, tensor: &TensorInfo) -> bool {
        self.codes.parts.contains(&*tensor.name)
    }

    /// What a name of the graph stands for. Names of matrices and orders are made up here, and hide a tensor that has them by chance.
    pub fn find(&self, name: &str) -> Option<Stored<'_>> {
        let codes = || self.coded(name).map(Stored::Codes);
        let order = || self.codes.orders.get(name).map(|order| Stored::Order(order));
        codes().or_else(order).or_else(|| self.get(name).map(Stored::Plain))
    }

    /// Type in the graph of a tensor, a coded matrix or an order; `None` for other types and names.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        match self.find(name)? {
            Stored::Codes(coded) => Some(coded.dtype),
            Stored::Order(_) => Some(DType::I32),
            Stored::Plain(tensor) => graph_type(tensor.dtype),
        }
    }

    /// Extents of the same.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        Some(match self.find(name)? {
            Stored::Codes(coded) => coded.shape.to_vec(),
            Stored::Order(order) => vec![order.len()],
            Stored::Plain(tensor) => tensor.shape.clone(),
        })
    }

    /// File and name, in the checkpoint, of what a name of the graph stands for; of codes those of the first part.
    pub fn place_of<'a>(&'a self, name: &'a str) -> (&'a str, &'a str) {
        match self.find(name) {
            Some(Stored::Plain(tensor)) => (self.file_of(tensor), &tensor.stored_name),
            Some(Stored::Codes(coded)) => (self.file_of(coded.qweight()), &coded.qweight().stored_name),
            Some(Stored::Order(_)) | None => (self.files.first().map_or(SINGLE, File::name), name),
        }
    }

    /// All tensors, in the order of their canonical names.
    pub fn iter(&self) -> impl Iterator<Item = &TensorInfo> + Clone {
        self.tensors.values()
    }

    /// Number of bytes of all tensors together.
    pub fn size_bytes(&self) -> u64 {
        self.iter().map(|t| t.size_bytes).sum()
    }

    /// Name of the file that holds `tensor`, for messages.
    pub fn file_of(&self, tensor: &TensorInfo) -> &str {
        self.files[tensor.file_index].name()
    }

    /// Fills `buffer` with the tensor's bytes from `byte_offset`; usable from several threads at once.
    /// Panics if that is not within the tensor.
    pub fn read_into(&self, tensor: &TensorInfo, byte_offset: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let end = byte_offset.checked_add(buffer.len() as u64);
        assert!(end.is_some_and(|end| end <= tensor.size_bytes), "read outside of {}", tensor.name);
        self.files[tensor.file_index].read_at(buffer, tensor.begin + byte_offset)
    }

    /// All bytes of `tensor`.
    pub fn read(&self, tensor: &TensorInfo) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; tensor.size_bytes as usize];
        self.read_into(tensor, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Fails if any of the files is not what it was when it was opened. To be called when all was read.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        self.files.iter().try_for_each(File::check_unchanged)
    }

    /// An error about `tensor` for later stages: its file, its stored name, and what is wrong.
    pub fn error(&self, tensor: &TensorInfo, kind: Kind, what: &str, expected: &str, found: &str) -> Error {
        Error::new(kind, self.file_of(tensor), &*tensor.stored_name, what, expected, found)
    }

    /// The first NaN or infinity in `bytes`, a part of `tensor` that starts at element `first`, as an error naming it.
    pub fn check_finite(&self, tensor: &TensorInfo, first: u64, bytes: &[u8]) -> Result<(), Error> {
        let Some((index, value)) = graph_type(tensor.dtype).and_then(|dtype| first_nonfinite(dtype, bytes)) else { return Ok(()) };
        let place = format!("{}[{}]", tensor.stored_name, first + index);
        Err(not_finite(self.file_of(tensor), place, value))
    }

    /// Gives every tensor its canonical name.
    pub fn canonicalise(&mut self, naming: Naming) -> Result<(), Error> {
        let has = |prefix: &str| self.tensors.keys().any(|name| name.starts_with(prefix));
        let rename: Box<dyn Fn(&str) -> String> = match naming {
            Naming::Prefixed(prefix) if has(prefix) => return Ok(()),
            Naming::Prefixed(prefix) => Box::new(move |name| match name.starts_with("lm_head.") {
                true => name.to_string(),
                false => format!("{prefix}{name}"),
            }),
            Naming::Bare(prefix) => Box::new(move |name| {
                let bare = name.strip_prefix(prefix).unwrap_or(name);
                // Conversions from the first TensorFlow checkpoints kept these names.
                match (bare.strip_suffix("LayerNorm.gamma"), bare.strip_suffix("LayerNorm.beta")) {
                    (Some(stem), _) => format!("{stem}LayerNorm.weight"),
                    (_, Some(stem)) => format!("{stem}LayerNorm.bias"),
                    _ => bare.to_string(),
                }
            }),
        };
        let mut renamed = BTreeMap::new();
        for (_, mut tensor) in std::mem::take(&mut self.tensors) {
            tensor.name = rename(&tensor.stored_name).into();
            if let Some(other) = renamed.insert(tensor.name.clone(), tensor.clone()) {
                let found = format!("{} and {}", other.stored_name, tensor.stored_name);
                let file = self.files[tensor.file_index].name();
                let what = "has two tensors under two spellings";
                return Err(Error::new(Kind::Disagree, file, &*tensor.name, what, "one", found));
            }
        }
        self.tensors = renamed;
        Ok(())
    }

    /// Gives the matrix of a tied checkpoint the embedding's name where it is stored under the head's alone: of names that share memory,
    /// `safetensors.torch.save_model` keeps the alphabet's first, and `lm_head` comes before `model` and `transformer`.
    pub fn name_tied(&mut self, facts: &Facts) {
        let (true, Some(head), None) = (facts.tied_head, facts.head, self.get(facts.embedding)) else { return };
        if let Some(mut tensor) = self.tensors.remove(head) {
            tensor.name = facts.embedding.into();
            self.tensors.insert(tensor.name.clone(), tensor);
        }
    }

    /// Compares the checkpoint with what `arch` asks for.
    pub fn check(&self, arch: &dyn Architecture, strict: bool, warnings: &mut Vec<Warning>) -> Result<(), Error> {
        let specs = arch.tensors();
        let main = self.files.first().map_or(SINGLE, File::name);
        let missing: Vec<&TensorSpec> = specs.iter().filter(|s| !s.optional && self.shape(&s.name).is_none()).collect();
        if let Some(first) = missing.first() {
            let what = format!("is missing ({} in all)", missing.len());
            let expected = format!("one of shape {:?} among {}", first.shape, count(specs.iter().filter(|s| !s.optional).count()));
            let e = Error::new(Kind::Disagree, main, &first.name, what, expected, count(self.tensors.len()));
            let untied_head = arch.facts().head == Some(first.name.as_str());
            if self.get(&first.name.replace(".weight", ".qweight")).is_some() {
                let help = "it is stored as codes, but config.json has no quantization_config (AutoGPTQ keeps it in quantize_config.json, without \
                            \"quant_method\": \"gptq\")";
                return Err(e.help(help));
            }
            return Err(if untied_head { e.help("set tie_word_embeddings if the head is the token embedding") } else { e });
        }
        self.check_codes(&specs)?;
        for spec in &specs {
            let Some(shape) = self.shape(&spec.name) else { continue };
            if shape != spec.shape {
                let mirrored = shape.len() == 2 && shape.iter().rev().eq(&spec.shape);
                let what = match (self.coded(&spec.name), mirrored) {
                    (None, true) => "is transposed",
                    (None, false) => "has the wrong shape",
                    (Some(_), true) => "holds the codes of a transposed matrix",
                    (Some(_), false) => "holds the codes of a matrix of the wrong shape",
                };
                let (expected, found) = (format!("{:?}", spec.shape), format!("{shape:?}"));
                let (file, place) = self.place_of(&spec.name);
                return Err(Error::new(Kind::Disagree, file, place, what, expected, found));
            }
            let Some(tensor) = self.get(&spec.name) else { continue };
            if let Some(coded) = self.coded(&spec.name) {
                let (expected, found) = ("floats or codes", format!("both, codes of {}", coded.dtype));
                return Err(self.error(tensor, Kind::Disagree, "is there twice", expected, &found));
            }
            if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                let found = tensor.dtype.to_string();
                return Err(self.error(tensor, Kind::Unsupported, "has a type that is not supported", "F32, F16 or BF16", &found));
            }
        }
        if let (true, Some(head)) = (arch.facts().tied_head, arch.facts().head) {
            self.check_tied(arch.facts().embedding, head)?;
        }
        let known: BTreeSet<&str> = specs.iter().map(|s| s.name.as_str()).collect();
        let of_codes = |t: &TensorInfo| {
            let matrix = t.name.rsplit_once('.').map(|(layer, _)| format!("{layer}.weight"));
            self.is_part(t) && matrix.is_some_and(|m| known.contains(m.as_str()))
        };
        let is_extra = |t: &&TensorInfo| !known.contains(&*t.name) && !of_codes(t) && !arch.ignores(&t.name);
        let extra: Vec<&TensorInfo> = self.iter().filter(is_extra).collect();
        if let Some(first) = extra.first() {
            if strict {
                let found = count(extra.len());
                return Err(self.error(first, Kind::Disagree, "is not part of this architecture", "no extra tensors", &found));
            }
            let what = format!("is not part of this architecture and is ignored ({} in all)", extra.len());
            warnings.push(Warning::new(self.file_of(first), &*first.stored_name, what));
        }
        Ok(())
    }

    /// Only matrices of linear layers may be codes: other uses would read them as if they were floats, and in the order of their columns.
    fn check_codes(&self, specs: &[TensorSpec]) -> Result<(), Error> {
        for spec in specs {
            let Some(coded) = self.coded(&spec.name) else { continue };
            let what = match spec.role {
                Role::Linear => {
                    coded.check(self)?;
                    continue;
                }
                Role::Conv1d => "codes of Conv1D layers are not supported",
                Role::Other => "codes of a tensor that is no linear layer are not supported",
            };
            let found = format!("codes of {}", coded.dtype);
            return Err(self.error(coded.qweight(), Kind::Unsupported, what, "F32, F16 or BF16", &found).help(quantised::ORIGINAL));
        }
        Ok(())
    }

    /// A tied checkpoint may store the head again, but then it must be the same; otherwise nobody knows which is meant.
    fn check_tied(&self, embedding: &str, head: &str) -> Result<(), Error> {
        if let Some(coded) = self.coded(head) {
            let what = "is a head of its own although tie_word_embeddings is true";
            let found = format!("codes of {}", coded.dtype);
            return Err(self.error(coded.qweight(), Kind::Disagree, what, "no head, or the token embedding again", &found));
        }
        let (Some(a), Some(b)) = (self.get(embedding), self.get(head)) else { return Ok(()) };
        let differ = || {
            let what = "differs from the token embedding although tie_word_embeddings is true";
            self.error(b, Kind::Disagree, what, &format!("the bytes of {}", a.stored_name), "other bytes")
        };
        if a.dtype != b.dtype || a.size_bytes != b.size_bytes {
            return Err(differ());
        }
        let (mut of_a, mut of_b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        let mut offset = 0;
        while offset < a.size_bytes {
            let size = of_a.len().min((a.size_bytes - offset) as usize);
            self.read_into(a, offset, &mut of_a[..size])?;
            self.read_into(b, offset, &mut of_b[..size])?;
            if of_a[..size] != of_b[..size] {
                return Err(differ());
            }
            offset += size as u64;
        }
        Ok(())
    }
}

/// What helps where neither layout is there, but weights of other names or formats are.
fn help_in_place_of_weights(dir: &ModelDir) -> Option<String> {
    let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin"];
    if pickled.iter().any(|name| matches!(dir.open_if_present(name), Ok(Some(_)))) {
        return Some("pickled weights are not read; save the model with safe_serialization".into());
    }
    let names = std::fs::read_dir(dir.path()).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".safetensors")).collect();
    // Adapters last.
    names.sort_by_key(|name| (name.starts_with("adapter"), name.clone()));
    let first = escape(names.first()?);
    Some(match &names[..] {
        [name, ..] if name.starts_with("adapter") => format!("{first} is an adapter: merge it into its model and save that"),
        [name, ..] if name.contains("-of-") => format!("{first} is a shard: {INDEX}, which says what is in which, belongs beside it"),
        _ => format!("if {first} holds the weights, name it {SINGLE}"),
    })
}

fn count(tensors: usize) -> String {
    format!("{tensors} tensor{}", if tensors == 1 { "" } else { "s" })
}

/// Reads the index and every shard that it names.
fn open_sharded(dir: &ModelDir, index: &File, warnings: &mut Vec<Warning>) -> Result<WeightIndex, Error> {
    let malformed =
        |place: &str, what: &str, expected: &str, found: String| Error::new(Kind::Malformed, INDEX, place, what, expected, found);
    let top = json::parse_object(INDEX, &index.read_all(INDEX_BYTES_MAX)?)?;
    let map = match top.get("weight_map") {
        Some(serde_json::Value::Object(map)) => map,
        Some(other) => return Err(malformed("weight_map", "has the wrong type", "an object", json::show(other))),
        None => return Err(malformed("weight_map", "is missing", "an object", "nothing".to_string())),
    };
    let mut shard_of: BTreeMap<&str, &str> = BTreeMap::new();
    let mut shards: BTreeSet<&str> = BTreeSet::new();
    for (tensor, shard) in map {
        let place = format!("weight_map.{}", cut(tensor, 60));
        let Some(shard) = shard.as_str() else {
            return Err(malformed(&place, "has the wrong type", "a file name", json::show(shard)));
        };
        if !dir::is_plain_name(shard) {
            let expected = "a file name in the model directory";
            return Err(Error::new(Kind::Missing, INDEX, place, "points outside", expected, format!("`{shard}`")));
        }
        shards.insert(shard);
        shard_of.insert(tensor, shard);
        if shards.len() > SHARDS_MAX {
            let expected = format!("at most {SHARDS_MAX} shards");
            return Err(Error::new(Kind::Limit, INDEX, "weight_map", "names too many files", expected, "more"));
        }
    }
    let mut weights = WeightIndex::empty();
    for shard in shards {
        let file = dir.open_file(shard)?;
        for tensor in header::read(&file, weights.files.len(), header::TENSORS_MAX - weights.tensors.len())? {
            if let Some(other) = weights.tensors.get(&tensor.name) {
                let found = format!("{} and {shard}", weights.files[other.file_index].name());
                return Err(Error::new(Kind::Disagree, INDEX, &*tensor.name, "is in two shards", "one shard", found));
            }
            weights.tensors.insert(tensor.name.clone(), tensor);
        }
        weights.files.push(file);
    }
    for (name, shard) in shard_of {
        match weights.get(name) {
            None => return Err(Error::new(Kind::Disagree, INDEX, name, "is in no shard", shard, "no such tensor")),
            Some(tensor) if weights.file_of(tensor) != shard => {
                let found = weights.file_of(tensor);
                return Err(Error::new(Kind::Disagree, INDEX, name, "is in another shard", shard, found));
            }
            Some(_) => {}
        }
    }
    if let Some(unlisted) = weights.iter().find(|t| !map.contains_key(&*t.stored_name)) {
        let what = format!("is in {} but not in the index; it is read", weights.file_of(unlisted));
        warnings.push(Warning::new(INDEX, &*unlisted.stored_name, what));
    }
    // Some writers state it as a float.
    let stated = top.get("metadata").and_then(|m| m.get("total_size")).and_then(serde_json::Value::as_f64);
    if let Some(stated) = stated.filter(|stated| *stated != weights.size_bytes() as f64) {
        let what = format!("says {stated} bytes, the tensors have {}", weights.size_bytes());
        warnings.push(Warning::new(INDEX, "metadata.total_size", what));
    }
    Ok(weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_element_that_is_not_finite() {
        use half::{bf16, f16};
        fn check<const N: usize>(dtype: DType, fine: [[u8; N]; 3], bad: [[u8; N]; 3]) {
            let mut elements: Vec<[u8; N]> = fine.into_iter().cycle().take(9000).collect();
            let first = |elements: &[[u8; N]]| first_nonfinite(dtype, elements.as_flattened());
            assert_eq!(first(&elements), None, "{dtype}");
            elements[8999] = bad[0];
            for (i, at) in [8998, 4096, 0].into_iter().enumerate() {
                elements[at] = bad[i];
                let (index, value) = first(&elements).unwrap();
                assert_eq!((index, value.is_nan(), value > 0.0), (at as u64, i == 0, i == 1), "{dtype} {at}");
            }
        }
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        check(DType::F32, [f32::from_bits(1), f32::MAX, f32::MIN].map(f32::to_le_bytes), [nan, inf, -inf].map(f32::to_le_bytes));
        check(
            DType::F16,
            [f16::from_bits(1), f16::MAX, f16::MIN].map(f16::to_le_bytes),
            [nan, inf, -inf].map(|x| f16::from_f32(x).to_le_bytes()),
        );
        check(
            DType::BF16,
            [bf16::from_bits(1), bf16::MAX, bf16::MIN].map(bf16::to_le_bytes),
            [nan, inf, -inf].map(|x| bf16::from_f32(x).to_le_bytes()),
        );
        assert_eq!(first_nonfinite(DType::I32, &[0xff; 8]), None);
    }
}
