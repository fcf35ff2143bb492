//! Checkpoints whose linear layers are codes already: GPTQ and AWQ (`quantization_config` of `config.json`).
//!
//! In: the config and the checkpoint's tensors. Out: for each quantised layer `X` a matrix `X.weight` of a quantised type of the graph,
//! made of its parts. Codes, scales and zero points are taken as they are; an element is exactly `(code - zero) * scale`.
//!
//! ```text
//! gptq, bits 4 or 8   X.qweight I32 [k * bits / 32, n]   word w of a column holds k = w * 32 / bits + i in bits i * bits ..
//!                     X.qzeros  I32 [groups, n * bits / 32]   likewise along n; minus one in checkpoint_format "gptq"
//!                     X.scales  F16 or BF16 [groups, n]   groups = k / group_size, rounded up: the last one may be short
//!                     X.g_idx   I32 [k]   group of each k; without it k / group_size
//! awq gemm, bits 4    X.qweight I32 [k, n / 8]   column 0, 2, 4, 6, 1, 3, 5, 7 of eight in bits 0 .., 4 .., 8 ..
//!                     X.qzeros  I32 [groups, n / 8], in the same order; X.scales F16 or BF16 [groups, n]
//! ```
//! Which layers are quantised is seen from the tensors: those with a `qweight`. Groups of other sizes than the graph's are stored as
//! several of its groups with the same scale. A scale in BF16 has to be a value of F16; a symmetric checkpoint (GPTQ's `sym`, AWQ without
//! `zero_point`) must have the middle of the codes for every zero point. Both are looked at for all layers of the model when the directory
//! is opened; codes are not read before they are wanted.
//!
//! With `desc_act` the `k` of a group are not neighbours. The matrix then has its columns in the order of their groups, and
//! [`CodedMatrix::order`] names the table by which the trace takes the layer's inputs in the same order. Layers of one module with equal orders
//! (q, k and v; gate and up) share a table.
//!
//! Sources: AutoGPTQ `QuantLinear.pack` and `convert_gptq_v1_to_v2_format`, GPTQModel `TorchQuantLinear` and
//! `convert_gptq_v1_to_v2_format_module`; AutoAWQ `WQLinear_GEMM.from_linear`; transformers `GPTQConfig` and `AwqConfig`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use rcompile_graph::quant;
use rcompile_graph::{DType, Group};
use safetensors::Dtype;
use serde_json::Value;

use crate::config::{ConfigReader, SIZE_MAX};
use crate::error::{Error, Kind};
use crate::json;
use crate::weights::{TensorInfo, WeightIndex};

/// Nibble of an AWQ word that holds column `i` of eight.
const AWQ_NIBBLES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
/// Ends of the names of a layer's parts.
const PARTS: [&str; 4] = [".qweight", ".qzeros", ".scales", ".g_idx"];

/// What `quantization_config` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    /// Layout of the parts.
    pub method: Method,
    /// Bits of a code.
    pub bits: u32,
    /// `k` per scale; `None` for all of a row.
    pub group_size: Option<usize>,
    /// Whether all zero points are the middle of the codes.
    pub symmetric: bool,
    /// Whether groups are of inputs that are no neighbours (`desc_act`). Without it an index of zeros alone stands for none.
    pub desc_act: bool,
}

/// How a checkpoint writes codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// GPTQ.
    Gptq {
        /// Whether zero points are stored minus one (`checkpoint_format` "gptq", not "gptq_v2").
        zeros_minus_one: bool,
    },
    /// AWQ, version gemm.
    Awq,
}

impl Scheme {
    /// As `info` names it: `gptq int4 by 128`, `awq int4 by 64`, `gptq int8 by row`.
    pub fn name(&self) -> String {
        let method = if self.method == Method::Awq { "awq" } else { "gptq" };
        let group = self.group_size.map_or("row".to_string(), |n| n.to_string());
        format!("{method} int{} by {group}{}", self.bits, if self.symmetric { "" } else { " with zeros" })
    }

    /// Codes in 32 bits.
    fn pack(&self) -> usize {
        32 / self.bits as usize
    }

    /// The type of a matrix of `width` columns; `None` if its groups are no whole groups of the graph.
    fn dtype(&self, width: usize) -> Option<DType> {
        let size = self.group_size.filter(|size| *size < width);
        if size.is_some_and(|size| size % 32 != 0) {
            return None;
        }
        let whole = |group: &Group| size.is_none_or(|size| size % group.len(width) == 0);
        let group = [Group::G128, Group::G64, Group::G32].into_iter().find(whole)?;
        Some(match (self.bits, self.symmetric) {
            // Scales of q4g32 are short, those of checkpoints are what they are.
            (4, true) if group == Group::G32 => DType::Z4(group),
            (4, true) => DType::Q4(group),
            (4, false) => DType::Z4(group),
            (_, true) => DType::Q8(group),
            (_, false) => DType::Z8(group),
        })
    }
}

/// What helps where codes are not supported.
pub(crate) const ORIGINAL: &str = "give the model's original checkpoint and choose --quantize int8 or int4";

/// Reads `quantization_config`; `None` where the checkpoint has none. What is not supported is refused by name.
pub fn read_scheme(config: &ConfigReader<'_>) -> Result<Option<Scheme>, Error> {
    let supported = "gptq or awq codes, or weights in F32, F16 or BF16";
    if let Some(section) = config.section("compression_config")? {
        let method = section.str_or("quant_method", "no quant_method")?;
        return Err(section.unsupported("quant_method", method, supported).help(ORIGINAL));
    }
    let Some(c) = config.section("quantization_config")? else { return Ok(None) };
    let refused = |key: &str, found: &str, wanted: &str| Err(c.unsupported(key, found, wanted).help(ORIGINAL));
    let method = c.str_or("quant_method", "no quant_method")?;
    if !["gptq", "awq"].contains(&method) {
        return refused("quant_method", method, supported);
    }
    let awq = method == "awq";
    let bits = c.usize("bits", 1..=32)?;
    if bits != 4 && (awq || bits != 8) {
        return refused("bits", &bits.to_string(), if awq { "4 bits" } else { "4 or 8 bits" });
    }
    let group_size = match c.value("group_size") {
        Some(value) if value.as_i64() == Some(-1) => None,
        _ => Some(c.usize_or("group_size", 1..=SIZE_MAX, 128)?),
    };
    match c.str_opt("pack_dtype")? {
        None | Some("int32") => {}
        Some(other) => return refused("pack_dtype", other, "int32"),
    }
    if awq {
        // Each library has a name of its own for it.
        for key in ["checkpoint_format", "format", "version"] {
            if let Some(other) = c.str_opt(key)?.filter(|format| !format.eq_ignore_ascii_case("gemm")) {
                return refused(key, other, "gemm");
            }
        }
        if let Some(other) = c.str_opt("backend")?.filter(|backend| backend.eq_ignore_ascii_case("llm-awq")) {
            return refused("backend", other, "autoawq");
        }
        let symmetric = !c.bool_or("zero_point", true)?;
        return Ok(Some(Scheme { method: Method::Awq, bits: 4, group_size, symmetric, desc_act: false }));
    }
    let key = ["checkpoint_format", "format", "version"].into_iter().find(|key| c.value(key).is_some());
    let format = key.map_or(Ok(None), |key| c.str_opt(key))?.map(str::to_lowercase);
    let place = key.unwrap_or("checkpoint_format");
    c.refuse_if_true("is_marlin_format").map_err(|e| e.help(ORIGINAL))?;
    let zeros_minus_one = match format.as_deref() {
        None | Some("gptq") => true,
        Some("gptq_v2") => false,
        Some(other) => return refused(place, other, "gptq or gptq_v2"),
    };
    let method = Method::Gptq { zeros_minus_one };
    let (symmetric, desc_act) = (c.bool_or("sym", true)?, c.bool_or("desc_act", false)?);
    // Rules that leave layers out show in the tensors, and how codes were found does not matter.
    let same = |(key, value): (&str, &Value)| match key {
        "bits" => value.as_u64() == Some(bits as u64),
        "group_size" => value.as_i64() == Some(group_size.map_or(-1, |size| size as i64)),
        "sym" => value.as_bool() == Some(symmetric),
        "checkpoint_format" | "format" => value.as_str() == Some(format.as_deref().unwrap_or("gptq")),
        "quant_method" | "pack_dtype" => value.as_str() == Some(if key == "pack_dtype" { "int32" } else { "gptq" }),
        _ => true,
    };
    let changes = |settings: &Value| settings.as_object().is_some_and(|s| !s.iter().all(|(key, value)| same((key, value))));
    if let Some(Value::Object(rules)) = c.value("dynamic")
        && let Some((rule, _)) = rules.iter().find(|(rule, settings)| !rule.starts_with("-:") && changes(settings))
    {
        return refused("dynamic", rule, "the same bits and group size for all layers");
    }
    Ok(Some(Scheme { method, bits: bits as u32, group_size, symmetric, desc_act }))
}

/// A matrix that is stored as codes: `[outputs, inputs]`.
#[derive(Clone, Debug, PartialEq)]
pub struct CodedMatrix {
    /// `[outputs, inputs]`.
    pub shape: [usize; 2],
    /// Its type in the graph.
    pub dtype: DType,
    /// Name of the table (`I32 [inputs]`) of the inputs in the order of the columns, where it is not the natural one.
    pub order: Option<String>,
    scheme: Scheme,
    qweight: TensorInfo,
    qzeros: TensorInfo,
    scales: TensorInfo,
    /// Place of each input among the columns, where there is an order.
    place: Option<Vec<u32>>,
}

/// All matrices of a checkpoint that are stored as codes.
#[derive(Debug, Default)]
pub struct CodedIndex {
    /// By canonical name, `X.weight`.
    pub matrices: BTreeMap<String, CodedMatrix>,
    /// Input of each column, by the name that [`CodedMatrix::order`] gives.
    pub orders: BTreeMap<String, Vec<u32>>,
    /// Canonical names of all parts.
    pub parts: BTreeSet<String>,
}

/// Finds the parts of every quantised layer and checks that they fit each other. Errors: parts that are missing or disagree, orders that are
/// none.
pub fn gather(weights: &WeightIndex, scheme: Scheme) -> Result<CodedIndex, Error> {
    let mut index = CodedIndex::default();
    // Names of orders, by module and order.
    let mut names: HashMap<(&str, Vec<u32>), String> = HashMap::new();
    for (layer, qweight) in weights.iter().filter_map(|t| Some((t.name.strip_suffix(".qweight")?, t))) {
        let (mut coded, order) = join(weights, scheme, layer, qweight)?;
        if let Some(order) = order {
            let module = layer.rsplit_once('.').map_or("", |(module, _)| module);
            coded.order = Some(names.entry((module, order)).or_insert_with(|| format!("{layer}.order")).clone());
        }
        index.parts.extend(PARTS.iter().map(|part| format!("{layer}{part}")));
        index.matrices.insert(format!("{layer}.weight"), coded);
    }
    index.orders = names.into_iter().map(|((_, order), name)| (name, order)).collect();
    if index.matrices.is_empty() {
        let place = "quantization_config";
        return Err(Error::new(Kind::Disagree, "config.json", place, "names codes", "tensors X.qweight", "no such tensor"));
    }
    Ok(index)
}

/// The matrix of `layer`, and the inputs of its columns in order if that is not the natural one.
fn join(weights: &WeightIndex, scheme: Scheme, layer: &str, qweight: &TensorInfo) -> Result<(CodedMatrix, Option<Vec<u32>>), Error> {
    let pack = scheme.pack();
    let part = |end: &str| {
        weights.get(&format!("{layer}.{end}")).ok_or_else(|| {
            let stored = qweight.stored_name.strip_suffix("qweight").unwrap_or_default();
            let file = weights.file_of(qweight);
            Error::new(Kind::Disagree, file, format!("{stored}{end}"), "is missing", format!("{end} beside {stored}qweight"), "nothing")
        })
    };
    let (qzeros, scales) = (part("qzeros")?, part("scales")?);
    typed(weights, qweight, &[Dtype::I32], "I32")?;
    typed(weights, qzeros, &[Dtype::I32], "I32")?;
    typed(weights, scales, &[Dtype::F16, Dtype::BF16], "F16 or BF16")?;
    let [rows, cols] = qweight.shape[..] else {
        let found = format!("{:?}", qweight.shape);
        return Err(weights.error(qweight, Kind::Disagree, "has the wrong shape", "a matrix", &found));
    };
    let [rows, cols] = if scheme.method == Method::Awq { [(rows, 1), (cols, pack)] } else { [(rows, pack), (cols, 1)] };
    let [inputs, outputs] = [rows, cols].map(|(words, codes)| words.checked_mul(codes).filter(|n| *n <= SIZE_MAX));
    let (Some(inputs), Some(outputs)) = (inputs, outputs) else {
        return Err(weights.error(qweight, Kind::Limit, "is too large", &format!("at most {SIZE_MAX} rows and columns"), "more"));
    };
    // Beside a 0 a shape may say anything.
    if inputs == 0 || outputs == 0 {
        let found = format!("{:?}", qweight.shape);
        return Err(weights.error(qweight, Kind::Disagree, "has the wrong shape", "rows and columns", &found));
    }
    let g_idx = weights.get(&format!("{layer}.g_idx")).filter(|_| scheme.method != Method::Awq);
    let size = scheme.group_size.unwrap_or(inputs);
    if size == 0 || scheme.method == Method::Awq && inputs % size != 0 {
        let (expected, found) = (format!("a multiple of group_size, {size}"), format!("{inputs} inputs"));
        return Err(weights.error(qweight, Kind::Disagree, "does not divide into groups", &expected, &found));
    }
    // Bits that differ by layer: zero points of the other size.
    let (bits, other) = (scheme.bits as usize, if scheme.bits == 4 { 8 } else { 4 });
    let zeros = |inputs: usize, bits: usize| [inputs.div_ceil(scheme.group_size.unwrap_or(inputs)), outputs * bits / 32];
    if scheme.method != Method::Awq && qzeros.shape[..] == zeros(inputs * bits / other, other) && qzeros.shape[..] != zeros(inputs, bits) {
        let (expected, found) = (format!("{} bits as in config.json", scheme.bits), format!("{other} bits"));
        return Err(weights.error(qweight, Kind::Unsupported, "has codes of other bits", &expected, &found).help(ORIGINAL));
    }
    let Some(dtype) = scheme.dtype(inputs) else {
        let e = weights.error(
            qweight,
            Kind::Unsupported,
            "has groups that are not supported",
            "group_size -1 or a multiple of 32",
            &size.to_string(),
        );
        return Err(e.help(ORIGINAL));
    };
    let groups = inputs.div_ceil(size);
    if outputs % pack != 0 {
        let (expected, found) = (format!("a multiple of {pack} outputs"), outputs.to_string());
        return Err(weights.error(qweight, Kind::Disagree, "has the wrong shape", &expected, &found));
    }
    shaped(weights, qzeros, &[groups, outputs / pack])?;
    shaped(weights, scales, &[groups, outputs])?;
    let order = g_idx.map(|g_idx| order(weights, scheme, g_idx, inputs, size)).transpose()?.flatten();
    let place = order.as_ref().map(|order| {
        let mut place = vec![0; order.len()];
        order.iter().zip(0..).for_each(|(&input, column)| place[input as usize] = column);
        place
    });
    let [qweight, qzeros, scales] = [qweight, qzeros, scales].map(TensorInfo::clone);
    Ok((CodedMatrix { shape: [outputs, inputs], dtype, order: None, scheme, qweight, qzeros, scales, place }, order))
}

fn typed(weights: &WeightIndex, tensor: &TensorInfo, types: &[Dtype], expected: &str) -> Result<(), Error> {
    if types.contains(&tensor.dtype) {
        return Ok(());
    }
    let found = tensor.dtype.to_string();
    Err(weights.error(tensor, Kind::Unsupported, "has a type that is not supported", expected, &found))
}

fn shaped(weights: &WeightIndex, tensor: &TensorInfo, shape: &[usize]) -> Result<(), Error> {
    if tensor.shape == shape {
        return Ok(());
    }
    let (expected, found) = (format!("{shape:?}"), format!("{:?}", tensor.shape));
    Err(weights.error(tensor, Kind::Disagree, "has the wrong shape", &expected, &found))
}

/// `inputs` inputs in the order of their groups of `size`, which `g_idx` says; `None` if they are in that order.
fn order(weights: &WeightIndex, scheme: Scheme, g_idx: &TensorInfo, inputs: usize, size: usize) -> Result<Option<Vec<u32>>, Error> {
    typed(weights, g_idx, &[Dtype::I32], "I32")?;
    shaped(weights, g_idx, &[inputs])?;
    let bytes = weights.read(g_idx)?;
    let group_of: Vec<i32> = bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
    if !scheme.desc_act && group_of.iter().all(|group| *group == 0) {
        return Ok(None);
    }
    let groups = inputs.div_ceil(size);
    let mut members = vec![0; groups];
    for (input, group) in group_of.iter().enumerate() {
        match usize::try_from(*group).ok().and_then(|g| members.get_mut(g)) {
            Some(count) => *count += 1,
            None => {
                let place = format!("{}[{input}]", g_idx.stored_name);
                let (what, expected) = ("is out of range", format!("a group below {groups}"));
                return Err(Error::new(Kind::Malformed, weights.file_of(g_idx), place, what, expected, group));
            }
        }
    }
    let of_group = |group: usize| size.min(group_of.len() - group * size);
    if let Some(group) = (0..groups).find(|group| members[*group] != of_group(*group)) {
        let (expected, found) = (format!("{} inputs of group {group}", of_group(group)), members[group].to_string());
        return Err(weights.error(g_idx, Kind::Disagree, "has groups of unequal size", &expected, &found));
    }
    if group_of.is_sorted() {
        return Ok(None);
    }
    let mut order: Vec<u32> = (0..group_of.len() as u32).collect();
    // Stable: neighbours of one group stay in order.
    order.sort_by_key(|input| group_of[*input as usize]);
    Ok(Some(order))
}

impl CodedMatrix {
    /// The tensor of its codes, for messages.
    pub(crate) fn qweight(&self) -> &TensorInfo {
        &self.qweight
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape[0] as u64 * self.shape[1] as u64
    }

    /// Looks at scales and, where all are to be the middle, zero points. Errors: as [`CodedMatrix::rows`].
    pub(crate) fn check(&self, weights: &WeightIndex) -> Result<(), Error> {
        let all = 0..self.shape[0];
        if self.scheme.symmetric {
            self.zeros(weights, &all)?;
        }
        self.scales(weights, &all).map(drop)
    }

    /// Rows (outputs) of the matrix, columns in order of their groups. Errors: reading, a scale that is zero, not finite or no value of
    /// f16, a zero point beside the middle in a symmetric checkpoint.
    pub fn rows(&self, weights: &WeightIndex, rows: Range<u64>) -> Result<quant::CodedRows, Error> {
        let rows = rows.start as usize..rows.end as usize;
        let [outputs, inputs] = self.shape;
        assert!(rows.start <= rows.end && rows.end <= outputs, "rows {rows:?} of {outputs}");
        let zeros = self.zeros(weights, &rows)?;
        let scales = self.scales(weights, &rows)?;
        // Groups of the checkpoint, told apart as the graph's.
        let mut coded =
            quant::CodedRows { dtype: self.dtype, width: inputs, codes: self.codes(weights, &rows)?, scales: vec![], zeros: vec![] };
        let size = self.scheme.group_size.unwrap_or(inputs);
        let source: Vec<usize> = (0..coded.groups()).map(|g| g * coded.group() / size).collect();
        for row in 0..rows.len() {
            coded.scales.extend(source.iter().map(|group| scales[group * rows.len() + row]));
            if self.dtype.has_zeros() {
                coded.zeros.extend(source.iter().map(|group| zeros[group * rows.len() + row]));
            }
        }
        Ok(coded)
    }

    /// Groups of a row in the checkpoint.
    fn groups(&self) -> usize {
        self.scales.shape[0]
    }

    /// What is subtracted from stored codes and zero points to give the graph's.
    fn middle(&self) -> i16 {
        if self.dtype.has_zeros() && self.scheme.bits == 4 { 0 } else { 1 << (self.scheme.bits - 1) }
    }

    /// Words `first .. end` of row `row` of an I32 matrix.
    fn words(weights: &WeightIndex, tensor: &TensorInfo, row: usize, words: Range<usize>, into: &mut Vec<u32>) -> Result<(), Error> {
        let mut bytes = vec![0; words.len() * 4];
        weights.read_into(tensor, ((row * tensor.shape[1] + words.start) * 4) as u64, &mut bytes)?;
        into.clear();
        into.extend(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)));
        Ok(())
    }

    /// `[rows][inputs]`.
    fn codes(&self, weights: &WeightIndex, rows: &Range<usize>) -> Result<Vec<i8>, Error> {
        let inputs = self.shape[1];
        let (bits, pack, middle) = (self.scheme.bits, self.scheme.pack(), self.middle());
        let mask = (1u32 << bits) - 1;
        let code = |word: u32, i: usize| (((word >> (i as u32 * bits)) & mask) as i16 - middle) as i8;
        let column = |input: usize| self.place.as_ref().map_or(input, |place| place[input] as usize);
        let mut codes = vec![0; rows.len() * inputs];
        let mut words = Vec::new();
        for packed in 0..self.qweight.shape[0] {
            match self.scheme.method {
                Method::Gptq { .. } => {
                    Self::words(weights, &self.qweight, packed, rows.clone(), &mut words)?;
                    let columns: Vec<usize> = (0..pack).map(|i| column(packed * pack + i)).collect();
                    for (word, row) in words.iter().zip(codes.chunks_exact_mut(inputs)) {
                        columns.iter().enumerate().for_each(|(i, column)| row[*column] = code(*word, i));
                    }
                }
                Method::Awq => {
                    let first = rows.start / pack;
                    Self::words(weights, &self.qweight, packed, first..rows.end.div_ceil(pack), &mut words)?;
                    for (row, codes) in rows.clone().zip(codes.chunks_exact_mut(inputs)) {
                        codes[packed] = code(words[row / pack - first], AWQ_NIBBLES[row % pack]);
                    }
                }
            }
        }
        Ok(codes)
    }

    /// `[groups][rows]`, by the checkpoint's groups.
    fn zeros(&self, weights: &WeightIndex, rows: &Range<usize>) -> Result<Vec<i16>, Error> {
        let (bits, pack) = (self.scheme.bits, self.scheme.pack());
        let mask = (1u32 << bits) - 1;
        // One in each code of a word: the packed addition undoes the packed subtraction of the writer.
        let one = (0..pack as u32).fold(0, |word, i| word | 1 << (i * bits));
        let mut zeros = Vec::with_capacity(self.groups() * rows.len());
        let mut words = Vec::new();
        let first = rows.start / pack;
        for group in 0..self.groups() {
            Self::words(weights, &self.qzeros, group, first..rows.end.div_ceil(pack), &mut words)?;
            for row in rows.clone() {
                let word = words[row / pack - first];
                let i = if self.scheme.method == Method::Awq { AWQ_NIBBLES[row % pack] } else { row % pack };
                let field = |word: u32| (word >> (i as u32 * bits)) & mask;
                let minus_one = self.scheme.method == (Method::Gptq { zeros_minus_one: true });
                let zero = if minus_one { field(word.wrapping_add(one)) } else { field(word) };
                if self.scheme.symmetric && zero != 1 << (bits - 1) {
                    return Err(self.unlike_middle(weights, (group, row), field(word), zero));
                }
                zeros.push(zero as i16 - self.middle());
            }
        }
        Ok(zeros)
    }

    /// The error of a zero point of a symmetric checkpoint, `stored` so, that is not the middle.
    fn unlike_middle(&self, weights: &WeightIndex, (group, row): (usize, usize), stored: u32, zero: u32) -> Error {
        let middle = 1u32 << (self.scheme.bits - 1);
        let (key, help) = match self.scheme.method {
            Method::Awq => ("zero_point", r#""zero_point": true reads zero points as they are"#),
            // The version that is named is the wrong one.
            Method::Gptq { zeros_minus_one: true } if stored == middle => {
                ("sym", r#""checkpoint_format": "gptq_v2" does not add one to what is stored"#)
            }
            Method::Gptq { zeros_minus_one: false } if stored + 1 == middle => {
                ("sym", r#""checkpoint_format": "gptq" adds one to what is stored"#)
            }
            Method::Gptq { .. } => ("sym", r#""sym": false reads zero points as they are"#),
        };
        let what = format!("zero point of group {group}, output {row} contradicts {key} in config.json");
        let e = weights.error(&self.qzeros, Kind::Disagree, &what, &middle.to_string(), &zero.to_string());
        e.help(format!("in quantization_config, {help}"))
    }

    /// `[groups][rows]`, by the checkpoint's groups.
    fn scales(&self, weights: &WeightIndex, rows: &Range<usize>) -> Result<Vec<f32>, Error> {
        let mut scales = Vec::with_capacity(self.groups() * rows.len());
        let mut bytes = vec![0; rows.len() * 2];
        for group in 0..self.groups() {
            let first = group * self.shape[0] + rows.start;
            weights.read_into(&self.scales, first as u64 * 2, &mut bytes)?;
            let finite = weights.check_finite(&self.scales, first as u64, &bytes);
            finite.map_err(|e| e.help("without this scale the codes of its group mean nothing: make the checkpoint anew"))?;
            for (b, row) in bytes.as_chunks().0.iter().zip(rows.clone()) {
                let scale = match self.scales.dtype {
                    Dtype::BF16 => half::bf16::from_le_bytes(*b).to_f32(),
                    _ => half::f16::from_le_bytes(*b).to_f32(),
                };
                if half::f16::from_f32(scale).to_f32() != scale {
                    let what = format!("scale of group {group}, output {row} has no exact value");
                    let e = weights.error(&self.scales, Kind::Disagree, &what, "a value of F16", &json::show(&Value::from(scale)));
                    return Err(e.help(ORIGINAL));
                }
                if scale == 0.0 {
                    let what = format!("scale of group {group}, output {row} is zero");
                    return Err(weights.error(&self.scales, Kind::Malformed, &what, "another number", "0").help(ORIGINAL));
                }
                scales.push(scale);
            }
        }
        Ok(scales)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn scheme(config: Value) -> Result<Option<Scheme>, Error> {
        read_scheme(&ConfigReader::new("config.json", config.as_object().unwrap()))
    }

    #[test]
    fn configs_that_are_read() {
        let name = |c: Value| scheme(json!({ "quantization_config": c })).unwrap().unwrap();
        let gptq = name(json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": true}));
        assert_eq!((gptq.name().as_str(), gptq.method), ("gptq int4 by 128", Method::Gptq { zeros_minus_one: true }));
        let v2 = name(json!({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": false, "checkpoint_format": "gptq_v2"}));
        assert_eq!((v2.name().as_str(), v2.method), ("gptq int8 by row with zeros", Method::Gptq { zeros_minus_one: false }));
        let skipped = json!({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*attn.*": {}}, "modules_to_not_convert": ["lm_head"]});
        assert_eq!(name(skipped).group_size, Some(128));
        let dynamic =
            json!({"+:.*down.*": {"desc_act": true, "bits": 4, "group_size": 128, "sym": true, "format": "gptq"}, "-:.*attn.*": {}});
        name(json!({"quant_method": "gptq", "bits": 4, "dynamic": dynamic}));
        let symmetric = name(json!({"quant_method": "awq", "bits": 4, "zero_point": false, "sym": true}));
        assert_eq!(symmetric.name(), "awq int4 by 128");
        let awq = name(json!({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": true, "version": "GEMM"}));
        assert_eq!((awq.name().as_str(), awq.method), ("awq int4 by 64 with zeros", Method::Awq));
        let defaults =
            Scheme { method: Method::Gptq { zeros_minus_one: true }, bits: 4, group_size: Some(128), symmetric: true, desc_act: false };
        assert_eq!(name(json!({"quant_method": "gptq", "bits": 4})), defaults);
        let defaults = Scheme { method: Method::Awq, symmetric: false, ..defaults };
        assert_eq!(name(json!({"quant_method": "awq", "bits": 4})), defaults);
        assert_eq!(name(json!({"quant_method": "awq", "bits": 4, "backend": "autoawq"})), defaults);
        assert_eq!(scheme(json!({})).unwrap(), None);
    }

    #[test]
    fn configs_that_are_not() {
        let refused = |more: Value, place: &str, found: &str| {
            let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let e = scheme(json!({ "quantization_config": config })).unwrap_err();
            assert!(
                e.exit_code() == 6 && e.place == format!("quantization_config.{place}") && e.to_string().contains(found),
                "{more}: {e}"
            );
        };
        refused(json!({"quant_method": "awq", "bits": 8}), "bits", "found 8");
        refused(json!({"bits": 2}), "bits", "found 2");
        refused(json!({"pack_dtype": "int64"}), "pack_dtype", "int64");
        refused(json!({"is_marlin_format": true}), "is_marlin_format", "true");
        // One setting that differs among others that do not.
        let same = json!({"bits": 4, "group_size": 128, "sym": true, "format": "gptq", "quant_method": "gptq", "pack_dtype": "int32"});
        let other = json!({"bits": 8, "group_size": 64, "sym": false, "format": "gptq_v2", "quant_method": "awq", "pack_dtype": "int64"});
        assert!(scheme(json!({"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {"+:": same}}})).is_ok());
        for (key, value) in other.as_object().unwrap() {
            let mut rule = same.clone();
            rule[key] = value.clone();
            refused(json!({"dynamic": {"+:down": rule}}), "dynamic", "+:down");
        }
    }

    #[test]
    fn groups_become_whole_groups_of_the_graph() {
        let dtype = |group_size, width| Scheme { method: Method::Awq, bits: 4, group_size, symmetric: true, desc_act: false }.dtype(width);
        for (group_size, width, want) in [
            (Some(32), 96, Some(DType::Z4(Group::G32))),
            (Some(64), 128, Some(DType::Q4(Group::G64))),
            (Some(128), 128, Some(DType::Q4(Group::G128))),
            (Some(256), 512, Some(DType::Q4(Group::G128))),
            (Some(96), 192, Some(DType::Z4(Group::G32))),
            (Some(96), 96, Some(DType::Q4(Group::G128))),
            (Some(128), 96, Some(DType::Q4(Group::G128))),
            (Some(128), 576, Some(DType::Q4(Group::G128))),
            (Some(192), 576, Some(DType::Q4(Group::G64))),
            (None, 40, Some(DType::Q4(Group::G128))),
            (Some(48), 96, None),
        ] {
            assert_eq!(dtype(group_size, width), want, "{group_size:?} of {width}");
        }
    }
}
