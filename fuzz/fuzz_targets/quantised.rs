//! Fed: a scheme (GPTQ in both versions or AWQ, bits, groups), sizes, and the bytes of a layer's `qweight`, `qzeros`, `scales` and `g_idx`. Oracle: no
//! panic, refusals are one line; what is accepted has the values that a plain reading of the format gives, all rows at once or some.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use rcompile_fuzz::{check_error, scratch, start};
use rcompile_models::dir::ModelDir;
use rcompile_models::quantised::{Method, Scheme};
use rcompile_models::weights::{Stored, WeightIndex};
use serde_json::json;

static DIR: LazyLock<std::path::PathBuf> = LazyLock::new(scratch);

/// A layer as its fields and bytes say.
struct Layer {
    scheme: Scheme,
    inputs: usize,
    outputs: usize,
    group: usize,
    words: Vec<u32>,
    zeros: Vec<u32>,
    scales: Vec<u16>,
    bf16_scales: bool,
    g_idx: Option<Vec<u32>>,
}

fuzz_target!(init: start(seeds()), |data: &[u8]| {
    let Some((&[flags, sizes, rows, lie], bytes)) = data.split_first_chunk() else { return };
    let mut layer = layer(flags, sizes, bytes);
    write(&mut layer, lie);
    let dir = ModelDir::open(&DIR).unwrap();
    let mut weights = WeightIndex::open(&dir, &mut Vec::new()).unwrap();
    if let Err(e) = weights.gather_codes(layer.scheme) {
        return check_error(&e);
    }
    let coded = weights.coded("a.b.weight").unwrap();
    assert_eq!(coded.shape, [layer.outputs, layer.inputs]);
    let all = match coded.rows(&weights, 0..layer.outputs as u64) {
        Ok(rows) => rows.values(),
        Err(e) => return check_error(&e),
    };
    // Input of each column.
    let order = coded.order.as_ref().map(|name| match weights.find(name) {
        Some(Stored::Order(order)) => order,
        other => panic!("{other:?}"),
    });
    for row in 0..layer.outputs {
        for column in 0..layer.inputs {
            let input = order.map_or(column, |order| order[column] as usize);
            assert_eq!(all[row * layer.inputs + column], layer.value(row, input), "{row}, {input}");
        }
    }
    let first = usize::from(rows & 15) % layer.outputs;
    let end = first + usize::from(rows >> 4) % (layer.outputs - first + 1);
    let some = coded.rows(&weights, first as u64..end as u64).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(some.values(), all[first * layer.inputs..end * layer.inputs]);
});

fn layer(flags: u8, sizes: u8, bytes: &[u8]) -> Layer {
    let method = [Method::Gptq { zeros_minus_one: true }, Method::Gptq { zeros_minus_one: false }, Method::Awq][usize::from(flags & 3) % 3];
    let bits = if flags & 4 > 0 && method != Method::Awq { 8 } else { 4 };
    let (symmetric, desc_act) = (flags & 8 > 0, flags & 32 > 0);
    let inputs: usize = [32, 64, 96, 128, 256, 40, 384, 8][usize::from(sizes & 7)];
    let outputs: usize = [8, 16, 4, 0][usize::from(sizes >> 3 & 3)];
    let group_size = [None, Some(32), Some(64), Some(128), Some(8), Some(inputs), Some(96), Some(0)][usize::from(sizes >> 5)];
    let group = group_size.unwrap_or(inputs).clamp(1, inputs);
    let groups = inputs.div_ceil(group);
    let mut at = bytes.iter().copied().chain(std::iter::repeat(0));
    let mut take = |n: usize| -> Vec<u32> { (0..n).map(|_| u32::from_le_bytes(std::array::from_fn(|_| at.next().unwrap_or(0)))).collect() };
    let scales = take(groups * outputs).iter().map(|w| (*w as u16) ^ 0x3c00).collect();
    let zeros = take(groups * outputs * bits / 32);
    let middle = (0..32 / bits).fold(0u32, |word, i| word | (1 << (bits - 1)) << (i * bits));
    let one = (0..32 / bits).fold(0u32, |word, i| word | 1 << (i * bits));
    let middle = if method == (Method::Gptq { zeros_minus_one: true }) { middle.wrapping_sub(one) } else { middle };
    // Mostly what a symmetric checkpoint holds.
    let zeros = zeros.into_iter().map(|word| if symmetric && word % 64 > 0 { middle } else { word }).collect();
    let words = take(inputs * outputs * bits / 32);
    let g_idx = (flags & 16 > 0).then(|| {
        let mut index: Vec<u32> = (0..inputs as u32).map(|i| i / group as u32).collect();
        for (i, swap) in take(inputs).into_iter().enumerate() {
            match swap {
                u32::MAX => index[i] = swap,
                _ => index.swap(i, swap as usize % inputs),
            }
        }
        index
    });
    let g_idx = g_idx.map(|index| if flags & 64 > 0 { vec![0; inputs] } else { index });
    let scheme = Scheme { method, bits: bits as u32, group_size, symmetric, desc_act };
    Layer { scheme, inputs, outputs, group, words, zeros, scales, bf16_scales: false, g_idx }
}

impl Layer {
    /// `(code - zero) * scale`, as the writers of the formats define it.
    fn value(&self, row: usize, input: usize) -> f64 {
        let bits = self.scheme.bits;
        let pack = 32 / bits as usize;
        // Without `desc_act` zeros alone are no index.
        let counts = |g: &&Vec<u32>| self.scheme.method != Method::Awq && (self.scheme.desc_act || g.iter().any(|group| *group != 0));
        let group = self.g_idx.as_ref().filter(counts).map_or(input / self.group, |g| g[input] as usize);
        let mask = (1u64 << bits) - 1;
        let field = |word: u32, i: usize| (u64::from(word) >> (i * bits as usize)) & mask;
        let awq = [0, 4, 1, 5, 2, 6, 3, 7];
        let code = match self.scheme.method {
            Method::Awq => field(self.words[(input * self.outputs + row) / pack], awq[row % pack]),
            Method::Gptq { .. } => field(self.words[input / pack * self.outputs + row], input % pack),
        };
        let word = self.zeros[(group * self.outputs + row) / pack];
        let zero = match self.scheme.method {
            Method::Awq => field(word, awq[row % pack]),
            Method::Gptq { zeros_minus_one: false } => field(word, row % pack),
            // The writer subtracted from all fields at once, so a field may have borrowed from the next.
            Method::Gptq { .. } => field(word.wrapping_add((0..pack).fold(0, |w, i| w | 1 << (i * bits as usize))), row % pack),
        };
        let scale = self.scales[group * self.outputs + row];
        let scale = if self.bf16_scales { f64::from(f32::from_bits(u32::from(scale) << 16)) } else { half(scale) };
        (code as f64 - zero as f64) * scale
    }
}

/// The value of an f16.
fn half(bits: u16) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let size = match exponent {
        0 => mantissa * 2f64.powi(-24),
        _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}

/// The layer as a file; `lie` leaves out a part, or states another shape or type of one.
fn write(layer: &mut Layer, lie: u8) {
    let (k, n, pack) = (layer.inputs, layer.outputs, 32 / layer.scheme.bits as usize);
    let groups = layer.inputs.div_ceil(layer.group);
    let u32s = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    let shape = if layer.scheme.method == Method::Awq { [k, n / pack] } else { [k / pack, n] };
    let mut parts = vec![
        ("qweight", "I32", shape.to_vec(), u32s(&layer.words)),
        ("qzeros", "I32", vec![groups, n / pack], u32s(&layer.zeros)),
        ("scales", "F16", vec![groups, n], layer.scales.iter().flat_map(|w| w.to_le_bytes()).collect()),
    ];
    if let Some(g_idx) = &layer.g_idx {
        parts.push(("g_idx", "I32", vec![k], u32s(g_idx)));
    }
    let chosen = usize::from(lie & 3) % parts.len();
    match lie >> 2 {
        1 => {
            let lost = parts.remove(chosen).0;
            layer.g_idx = layer.g_idx.take().filter(|_| lost != "g_idx");
        }
        2 => parts[chosen].2.reverse(),
        3 if parts[chosen].1 == "F16" => {
            parts[chosen].1 = "BF16";
            layer.bf16_scales = true;
        }
        3 => parts[chosen].1 = "F32",
        4 => parts[chosen].2.insert(0, 1),
        _ => {}
    }
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in parts {
        // Sizes that do not divide leave words behind; the file itself is sound.
        let size = shape.iter().product::<usize>() * if dtype.ends_with("F16") { 2 } else { 4 };
        let begin = data.len();
        data.extend(bytes.into_iter().chain(std::iter::repeat(0)).take(size));
        header.insert(format!("a.b.{name}"), json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = serde_json::Value::Object(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
    std::fs::write(DIR.join("model.safetensors"), bytes).unwrap();
}

/// One of each scheme and group.
fn seeds() -> Vec<Vec<u8>> {
    let bytes: Vec<u8> = (0..4096u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & 0x83).collect();
    let flags = [0, 1, 2, 4, 5, 8, 9, 10, 12, 16, 17, 24, 48, 80];
    flags.into_iter().flat_map(|f| [0x04u8, 0x24, 0x41, 0x69].map(|sizes| [&[f, sizes, 0x31, 0][..], &bytes].concat())).collect()
}
