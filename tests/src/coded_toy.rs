//! Toys whose linear layers are codes, in the layouts of GPTQ and AWQ checkpoints, and their twins in floats.
//!
//! Written from the published layouts alone and by other means than the reader: codes are put one by one into words. Both directories of a
//! pair hold the same numbers: an element of the twin (f32) is `(code - zero) * scale`, exactly.

use crate::toy::{Toy, uniform, write_model};
use half::{bf16, f16};
use rcompile_models::quantised::Method;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;

/// A layout of codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
    /// GPTQ (either version) or AWQ.
    pub method: Method,
    /// 4 or 8.
    pub bits: u32,
    /// `None`: -1.
    pub group_size: Option<usize>,
    /// All zero points in the middle.
    pub symmetric: bool,
    /// Groups of inputs that are no neighbours.
    pub desc_act: bool,
    /// Scales in BF16, not F16.
    pub bf16_scales: bool,
    /// A head of its own, as codes too.
    pub head: bool,
}

impl Layout {
    /// GPTQ's first version, four bits by 128.
    pub const GPTQ: Layout = Layout {
        method: Method::Gptq { zeros_minus_one: true },
        bits: 4,
        group_size: Some(128),
        symmetric: true,
        desc_act: false,
        bf16_scales: false,
        head: false,
    };

    /// For directories and messages.
    pub fn name(&self) -> String {
        let method = match self.method {
            Method::Gptq { zeros_minus_one: true } => "gptq",
            Method::Gptq { .. } => "gptq2",
            Method::Awq => "awq",
        };
        let group = self.group_size.map_or("row".to_string(), |n| n.to_string());
        let zeros = if self.symmetric { "" } else { "-zeros" };
        let rest = [(self.desc_act, "-order"), (self.bf16_scales, "-bf16"), (self.head, "-head")];
        let rest: String = rest.iter().filter(|(has, _)| *has).map(|(_, name)| *name).collect();
        format!("{method}-int{}-{group}{zeros}{rest}", self.bits)
    }

    /// `quantization_config`.
    pub fn config(&self) -> Value {
        let group_size = self.group_size.map_or(-1, |n| n as i64);
        match self.method {
            Method::Awq => json!({
                "quant_method": "awq", "bits": self.bits, "group_size": group_size, "zero_point": !self.symmetric, "version": "gemm",
                "modules_to_not_convert": null}),
            Method::Gptq { zeros_minus_one } => json!({
                "quant_method": "gptq", "bits": self.bits, "group_size": group_size, "sym": self.symmetric, "desc_act": self.desc_act,
                "checkpoint_format": if zeros_minus_one { "gptq" } else { "gptq_v2" }}),
        }
    }

    /// The toy with its layers as codes in `dir`, or, as `twin`, as floats. Layers in `floats` (parts of names) are floats in both.
    pub fn write(&self, toy: &Toy, floats: &[&str], dir: &Path, twin: bool) {
        let mut config = toy.config();
        if !twin {
            config["quantization_config"] = self.config();
        }
        let mut all = toy.tensors();
        if self.head {
            config["tie_word_embeddings"] = Value::from(false);
            all.push(("lm_head.weight".into(), vec![toy.vocab, toy.hidden], vec![]));
        }
        let mut tensors = Vec::new();
        for (number, (name, shape, values)) in all.into_iter().enumerate() {
            let is_coded = |layer: &&str| layer.ends_with("_proj") || self.head && *layer == "lm_head";
            let layer = name.strip_suffix(".weight").filter(is_coded).filter(|_| !floats.iter().any(|part| name.contains(part)));
            let Some(layer) = layer.map(str::to_string) else {
                let bytes = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
                tensors.push((name, Dtype::BF16, shape, bytes));
                continue;
            };
            let matrix = Matrix::draw(self, &layer, number as u64, shape[0], shape[1]);
            if twin {
                let bytes = matrix.values().iter().flat_map(|x| x.to_le_bytes()).collect();
                tensors.push((name, Dtype::F32, shape, bytes));
            } else {
                tensors.extend(matrix.parts(self, &layer));
            }
        }
        write_model(dir, &config, &tensors);
    }
}

/// A drawn matrix.
struct Matrix {
    outputs: usize,
    inputs: usize,
    /// `[outputs][inputs]`.
    codes: Vec<u32>,
    /// `[outputs][groups]`.
    zeros: Vec<u32>,
    scales: Vec<f16>,
    /// Of each input.
    group_of: Vec<usize>,
    groups: usize,
}

impl Matrix {
    fn draw(layout: &Layout, layer: &str, number: u64, outputs: usize, inputs: usize) -> Matrix {
        let mut seed = 0x1234_5678_9abc_def1 ^ (number << 20);
        let mut below = |n: usize| ((uniform(&mut seed) + 1.0) * 0.5 * n as f32) as usize % n;
        let levels = 1usize << layout.bits;
        let codes = (0..outputs * inputs).map(|_| below(levels) as u32).collect();
        let size = layout.group_size.unwrap_or(inputs);
        let groups = inputs.div_ceil(size);
        // Near the middle, but every value that there is now and then.
        let mut zero = || if below(8) == 0 { below(levels) } else { levels / 2 - levels / 16 + below(levels / 8) } as u32;
        let middle = levels as u32 / 2;
        let zeros = (0..outputs * groups).map(|_| if layout.symmetric { middle } else { zero() }).collect();
        let scale = |x: f32| if layout.bf16_scales { f16::from_f32(bf16::from_f32(x).to_f32()) } else { f16::from_f32(x) };
        let scales = (0..outputs * groups).map(|_| scale((0.1 + 0.3 * below(1000) as f32 / 1000.0) / middle as f32)).collect();
        // q, k and v have one order, gate and up another, in all layers of the model.
        let modules = [&["q_proj", "k_proj", "v_proj"][..], &["gate_proj", "up_proj"], &["o_proj"], &["down_proj"], &["lm_head"]];
        let module = modules.iter().position(|m| m.iter().any(|p| layer.ends_with(p))).expect("a layer of a toy") as u64 + 1;
        let mut order: Vec<usize> = (0..inputs).collect();
        if layout.desc_act {
            let mut seed = 0x9876_5432_1234_5671 ^ (module * inputs as u64) << 16;
            for i in (1..inputs).rev() {
                order.swap(i, ((uniform(&mut seed) + 1.0) * 0.5 * (i + 1) as f32) as usize % (i + 1));
            }
        }
        let mut group_of = vec![0; inputs];
        order.iter().enumerate().for_each(|(place, input)| group_of[*input] = place / size);
        Matrix { outputs, inputs, codes, zeros, scales, group_of, groups }
    }

    /// `[outputs][inputs]` as f32.
    fn values(&self) -> Vec<f32> {
        let of = |i: usize| {
            let at = i / self.inputs * self.groups + self.group_of[i % self.inputs];
            let steps = f64::from(self.codes[i]) - f64::from(self.zeros[at]);
            let value = steps * self.scales[at].to_f64();
            assert_eq!(f64::from(value as f32), value);
            value as f32
        };
        (0..self.outputs * self.inputs).map(of).collect()
    }

    /// The tensors of a checkpoint.
    fn parts(&self, layout: &Layout, layer: &str) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
        let (bits, pack) = (layout.bits, 32 / layout.bits as usize);
        let (n, k, groups) = (self.outputs, self.inputs, self.groups);
        let awq = layout.method == Method::Awq;
        let place = |column: usize| if awq { [0, 4, 1, 5, 2, 6, 3, 7][column % 8] } else { column % pack };
        let mut qweight = vec![0u32; k * n / pack];
        for (row, input) in (0..n).flat_map(|row| (0..k).map(move |input| (row, input))) {
            let code = self.codes[row * k + input];
            let (word, shift) = match awq {
                true => (input * (n / pack) + row / pack, place(row)),
                false => (input / pack * n + row, input % pack),
            };
            qweight[word] |= code << (shift as u32 * bits);
        }
        let mut qzeros = vec![0u32; groups * n / pack];
        for (row, group) in (0..n).flat_map(|row| (0..groups).map(move |group| (row, group))) {
            qzeros[group * (n / pack) + row / pack] |= self.zeros[row * groups + group] << (place(row) as u32 * bits);
        }
        if layout.method == (Method::Gptq { zeros_minus_one: true }) {
            // As its writer does: one from every code, on whole words.
            let ones = if bits == 4 { 0x1111_1111 } else { 0x0101_0101 };
            qzeros.iter_mut().for_each(|word| *word = word.wrapping_sub(ones));
        }
        let bytes = |s: f16| if layout.bf16_scales { bf16::from_f32(s.to_f32()).to_le_bytes() } else { s.to_le_bytes() };
        let scales = (0..groups).flat_map(|g| (0..n).map(move |row| self.scales[row * groups + g])).flat_map(bytes).collect();
        let of_scales = if layout.bf16_scales { Dtype::BF16 } else { Dtype::F16 };
        let words = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
        let shape = if awq { vec![k, n / pack] } else { vec![k / pack, n] };
        let mut parts = vec![
            (format!("{layer}.qweight"), Dtype::I32, shape, words(&qweight)),
            (format!("{layer}.qzeros"), Dtype::I32, vec![groups, n / pack], words(&qzeros)),
            (format!("{layer}.scales"), of_scales, vec![groups, n], scales),
        ];
        if !awq {
            let g_idx: Vec<u32> = self.group_of.iter().map(|g| *g as u32).collect();
            parts.push((format!("{layer}.g_idx"), Dtype::I32, vec![k], words(&g_idx)));
        }
        parts
    }
}
