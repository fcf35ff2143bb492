//! Quantised element types: what a value becomes when it is converted to one of them. The interpreter, the pack stage and (for
//! activations, in generated code) the kernel `quantise` all follow this definition, so that their codes are the same integers.
//!
//! ```text
//! q8, q8g64, ..   codes -127 ..= 127, scale f32 = max|x| / 127;   code = nearest(x * (127 / max|x|))
//! q8g32           the same with a power of two as scale, the least that is not below max|x| / 127 and at most 2^104;   code = nearest(x * (1 / scale))
//! q4g32, ..       codes   -8 ..=   7, scale f16 of five significant bits, near m / -8, m the element of largest magnitude (the first of equals): of the
//!                 nearest and four on either side the one with the least sum of squared errors (the nearest, then the first of equals);
//!                 code = nearest(x * (1 / scale)) within -8 ..= 7
//! ```
//! Groups of 32 are short enough that scaling their sums costs as much as the products. With these scales `code * scale` has no more than
//! eight significant bits in either operand, and a sum of 32 products no more than 24: a matmul may put the scales into the products, which
//! bf16 holds, and has the same bits. Which scales are tried is worth more than their bits (docs/quantisation.md).
//!
//! All of it in f32, ties to even. A group shares one scale: a whole row (`q8`) or 32, 64 or 128 consecutive elements of it (`q8g256`, of
//! the inputs of matmuls: 256), the last group of a row may be shorter. A group below [`TINY`] is all zero. The value of an element is
//! `code * scale`, exactly.
//!
//! Weights of a checkpoint that is quantised already keep its codes, scales and zero points:
//!
//! ```text
//! q8g32, ..  codes -128 ..= 127         scale f16   value = code * scale
//! q4g64, ..  codes   -8 ..=   7         scale f16   value = code * scale
//! z8g32, ..  codes -128 ..= 127         scale f16   value = (code - zero) * scale,  zero -128 ..= 127
//! z4g32, ..  codes    0 ..=  15         scale f16   value = (code - zero) * scale,  zero    0 ..=  15
//! ```
//!
//! Source of the four-bit rule (the sign of the scale spends all sixteen codes): Q4_0 of llama.cpp.

use crate::tensor::{Tensor, round};
use crate::types::DType;

/// Magnitude below which a group is zero: the reciprocal of a smaller one would overflow.
pub const TINY: f32 = 1e-30;

/// Significant bits of the scales of four-bit codes: with the three of a code, those of bf16.
pub const SCALE_BITS: u32 = 5;
/// Scales of so many bits that are tried on either side of the nearest.
const SCALES_BESIDE: i32 = 4;

/// `x` with [`SCALE_BITS`] significant bits, ties away from zero, and then so many values of this kind on, as f16 has it.
fn short_scale(x: f32, on: i32) -> f32 {
    const DROPPED: u32 = f32::MANTISSA_DIGITS - SCALE_BITS;
    // A NaN of many bits would be rounded to zero.
    if x.is_nan() {
        return x;
    }
    let nearest = (x.to_bits() + (1 << (DROPPED - 1))) & !((1 << DROPPED) - 1);
    round(DType::F16, f64::from(f32::from_bits(nearest.wrapping_add_signed(on << DROPPED)))) as f32
}

/// 3 * 2^22: f32 around it are the integers, and around a multiple by a power of two the multiples of that.
const INTEGERS: f32 = 12_582_912.0;

/// The least power of two that is not below `x`, which is positive; not a number where `x` is none, or above 2^104: sums are counted from
/// [`INTEGERS`] times it on.
fn power_of_two(x: f32) -> f32 {
    const MANTISSA: u32 = (1 << (f32::MANTISSA_DIGITS - 1)) - 1;
    let power = f32::from_bits((x.to_bits() + MANTISSA) & f32::INFINITY.to_bits());
    power + (x + power * INTEGERS) * 0.0
}

/// Consecutive elements of a row that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Group {
    /// The whole row.
    Row,
    G32,
    G64,
    G128,
    /// Of inputs of matmuls, not of weights.
    G256,
}

impl Group {
    /// Elements of a group in rows of `width`.
    pub fn len(self, width: usize) -> usize {
        match self {
            Group::Row => width,
            Group::G32 => 32,
            Group::G64 => 64,
            Group::G128 => 128,
            Group::G256 => 256,
        }
    }
    /// The group of this many elements, as weights have them.
    pub fn of(elements: u32) -> Option<Group> {
        match elements {
            32 => Some(Group::G32),
            64 => Some(Group::G64),
            128 => Some(Group::G128),
            _ => None,
        }
    }
}

/// `x` to the nearest integer, ties to even; exact for `|x| <= 2^22`.
fn nearest(x: f32) -> f32 {
    (x + INTEGERS) - INTEGERS
}

/// How the elements of a group become codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// What a code is multiplied by.
    pub scale: f32,
    inverse: f32,
    least: f32,
    most: f32,
}

impl Step {
    /// The step of a group of this type with elements `x`.
    pub fn of(dtype: DType, x: &[f32]) -> Step {
        // The magnitudes' bits order like integers, which needs no branches; NaN is above all.
        let largest = x.iter().fold(0u32, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
        let magnitude = f32::from_bits(largest);
        let four = matches!(dtype, DType::Q4(_));
        let (least, most) = if four { (-8.0, 7.0) } else { (-127.0, 127.0) };
        if magnitude < TINY {
            return Step { scale: 0.0, inverse: 0.0, least, most };
        }
        if four {
            let at = x.iter().position(|v| v.to_bits() & 0x7fff_ffff == largest).unwrap_or(0);
            let step = |on: i32| {
                let scale = short_scale(x[at] / -8.0, on);
                Step { scale, inverse: if scale == 0.0 { 0.0 } else { 1.0 / scale }, least, most }
            };
            let mut best = (step(0), step(0).error(x));
            for step in (-SCALES_BESIDE..=SCALES_BESIDE).map(step) {
                let error = step.error(x);
                if error < best.1 {
                    best = (step, error);
                }
            }
            best.0
        } else if dtype == DType::Q8(Group::G32) {
            let scale = power_of_two(magnitude / 127.0);
            Step { scale, inverse: 1.0 / scale, least, most }
        } else {
            Step { scale: magnitude / 127.0, inverse: 127.0 / magnitude, least, most }
        }
    }
    /// Sum of the squared errors of a group, every eighth in a sum of its own.
    fn error(&self, x: &[f32]) -> f32 {
        let mut sums = [0.0f32; 8];
        for x in x.chunks(8) {
            for (sum, x) in sums.iter_mut().zip(x) {
                let error = nearest((x * self.inverse).clamp(self.least, self.most)) * self.scale - x;
                *sum += error * error;
            }
        }
        sums.iter().sum()
    }
    /// The code of an element; one outside of the group's range gets the nearest that there is.
    pub fn code(&self, x: f32) -> i8 {
        nearest((x * self.inverse).clamp(self.least, self.most)) as i8
    }
}

/// Codes and scale of one group; `codes` has the length of `x`. `dtype` is one of the quantised types.
pub fn quantise_group(dtype: DType, x: &[f32], codes: &mut [i8]) -> f32 {
    let step = Step::of(dtype, x);
    codes.iter_mut().zip(x).for_each(|(c, v)| *c = step.code(*v));
    step.scale
}

/// The group of a quantised type.
pub fn group_of(dtype: DType) -> Option<Group> {
    match dtype {
        DType::Q8(group) | DType::Q4(group) | DType::Z8(group) | DType::Z4(group) => Some(group),
        _ => None,
    }
}

/// The type that rows of `k` elements are converted to for integer arithmetic with this weight: the weight's own groups, or where it has
/// one scale per row groups of 256 if `k` is a multiple of that, else of 128.
pub fn row_type(weight: DType, k: u64) -> Option<DType> {
    match weight {
        DType::Q8(Group::Row) if k.is_multiple_of(256) => Some(DType::Q8(Group::G256)),
        DType::Q8(Group::Row) => Some(DType::Q8(Group::G128)),
        DType::Q8(group) | DType::Q4(group) | DType::Z8(group) | DType::Z4(group) => Some(DType::Q8(group)),
        _ => None,
    }
}

/// Rows of a quantised matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct CodedRows {
    /// One of the quantised types.
    pub dtype: DType,
    /// Elements of a row.
    pub width: usize,
    /// `[rows][width]`.
    pub codes: Vec<i8>,
    /// `[rows][groups]`.
    pub scales: Vec<f32>,
    /// Zero points, `[rows][groups]`; empty where the type has none.
    pub zeros: Vec<i16>,
}

impl CodedRows {
    /// Rows of `width` floats rounded to nearest.
    pub fn quantise(dtype: DType, x: &[f32], width: usize) -> CodedRows {
        let width = width.max(1);
        let group = group_of(dtype).map_or(width, |g| g.len(width));
        let mut codes = vec![0; x.len()];
        let rows = x.chunks(width).zip(codes.chunks_mut(width));
        let groups = rows.flat_map(|(x, codes)| x.chunks(group).zip(codes.chunks_mut(group)));
        let scales = groups.map(|(x, codes)| quantise_group(dtype, x, codes)).collect();
        CodedRows { dtype, width, codes, scales, zeros: vec![] }
    }
    /// Elements of a group; the last one of a row may be shorter.
    pub fn group(&self) -> usize {
        group_of(self.dtype).map_or(self.width, |g| g.len(self.width)).max(1)
    }
    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.width.div_ceil(self.group())
    }
    /// Scales that the type cannot hold: of finite elements too large for it.
    pub fn overflows(&self) -> u64 {
        self.scales.iter().filter(|s| s.is_infinite()).count() as u64
    }
    /// What the elements stand for, exactly.
    pub fn values(&self) -> Vec<f64> {
        let (group, groups) = (self.group(), self.groups());
        let mut out = Vec::with_capacity(self.codes.len());
        for (row, codes) in self.codes.chunks(self.width.max(1)).enumerate() {
            for (codes, at) in codes.chunks(group).zip(row * groups..) {
                let zero = self.zeros.get(at).map_or(0.0, |z| f64::from(*z));
                out.extend(codes.iter().map(|c| (f64::from(*c) - zero) * f64::from(self.scales[at])));
            }
        }
        out
    }
}

/// `x` (of a float type, its last axis the rows) converted to a quantised type.
pub fn quantise(dtype: DType, x: &Tensor) -> Vec<f64> {
    let floats: Vec<f32> = x.data.iter().map(|v| *v as f32).collect();
    // Not a number and infinity make the scale one: all of the group with it.
    CodedRows::quantise(dtype, &floats, x.shape.last().copied().unwrap_or(1)).values()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_times_its_scale_is_within_half_a_step() {
        let x: Vec<f64> = (0..200).map(|i| f64::from((i * 7919 % 401 - 200) as f32 / 37.0)).collect();
        let x = Tensor::new(DType::F32, &[2, 100], x);
        for dtype in DType::QUANTISED {
            let y = quantise(dtype, &x);
            assert_eq!(y.len(), x.data.len());
            let group = group_of(dtype).unwrap().len(100);
            for (x, y) in x.data.chunks(100).flat_map(|r| r.chunks(group)).zip(y.chunks(100).flat_map(|r| r.chunks(group))) {
                let largest = x.iter().fold(0.0f64, |m, v| m.max(v.abs()));
                // Four bits: the side opposite the largest element ends at 7 of 8 steps.
                let step = match dtype {
                    DType::Q4(_) => largest / 8.0 * 2.0,
                    DType::Q8(Group::G32) => f64::from(power_of_two((largest / 127.0) as f32)),
                    _ => largest / 127.0,
                };
                for (x, y) in x.iter().zip(y) {
                    assert!((x - y).abs() <= step * 0.5001, "{dtype}: {x} became {y}, step {step}");
                }
            }
        }
    }

    #[test]
    fn scales_of_four_bits_are_those_of_least_error() {
        let mut codes = [0; 4];
        // The largest element is code -8 where that is exact, and on either side.
        let scale = quantise_group(DType::Q4(Group::G64), &[1.0, -4.0, 3.5, 0.5], &mut codes);
        assert_eq!((scale, codes), (0.5, [2, -8, 7, 1]));
        let scale = quantise_group(DType::Q4(Group::G32), &[1.0, 4.0, -3.5, 0.5], &mut codes);
        assert_eq!((scale, codes), (-0.5, [-2, -8, 7, -1]));
        // 3.9 of 4 would be 3.5.
        let x = [1.0, -4.0, 3.9, 0.2];
        let scale = quantise_group(DType::Q4(Group::G32), &x, &mut codes);
        assert_eq!((scale, codes), (0.5625, [2, -7, 7, 0]));
        let error = |scale: f32, codes: [i8; 4]| x.iter().zip(codes).map(|(x, c)| (f32::from(c) * scale - x).powi(2)).sum::<f32>();
        assert!(error(scale, codes) < error(0.5, [2, -8, 7, 0]));
    }

    #[test]
    fn groups_of_32_have_values_and_sums_that_floats_hold() {
        let mut random = 1u32;
        let mut next = || {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let bits = |x: f32| if x == 0.0 { 0 } else { f32::MANTISSA_DIGITS - (x.to_bits() | 1 << 23).trailing_zeros() };
        for _ in 0..200 {
            let (a, w): (Vec<f32>, Vec<f32>) = (0..32).map(|_| (next(), next() / 16.0)).unzip();
            let (mut rows, mut weights) = ([0; 32], [0; 32]);
            let row_scale = quantise_group(DType::Q8(Group::G32), &a, &mut rows);
            let scale = quantise_group(DType::Q4(Group::G32), &w, &mut weights);
            assert!(bits(row_scale) == 1 && bits(scale) <= SCALE_BITS, "{row_scale} {scale}");
            let of_bf16 = |codes: &[i8], scale: f32| codes.iter().all(|c| bits(f32::from(*c) * scale) <= 8);
            assert!(of_bf16(&rows, row_scale) && of_bf16(&weights, scale));
            let products = rows.iter().zip(weights).map(|(r, w)| (f32::from(*r) * row_scale) * (f32::from(w) * scale));
            let exact: i32 = rows.iter().zip(weights).map(|(r, w)| i32::from(*r) * i32::from(w)).sum();
            assert_eq!(f64::from(products.sum::<f32>()), f64::from(exact) * f64::from(row_scale) * f64::from(scale));
        }
    }

    #[test]
    fn groups_of_rows() {
        for (k, group) in [(64, Group::G128), (172, Group::G128), (256, Group::G256), (384, Group::G128), (2048, Group::G256)] {
            assert_eq!(row_type(DType::Q8(Group::Row), k), Some(DType::Q8(group)), "{k}");
        }
        assert_eq!(row_type(DType::Z4(Group::G64), 256), Some(DType::Q8(Group::G64)));
        assert_eq!(row_type(DType::BF16, 256), None);
    }

    #[test]
    fn scales_of_few_bits() {
        assert_eq!(
            [1.0, 1.06, 1.03125, 1.03124, -1.97, -9.6e-4].map(|x| short_scale(x, 0)),
            [1.0, 1.0625, 1.0625, 1.0, -2.0, -31.0 / 32768.0]
        );
        assert_eq!([1.0, 1.000_000_1, 0.3, 4.0].map(power_of_two), [1.0, 2.0, 0.5, 4.0]);
        let most = 2f32.powi(104);
        assert_eq!(power_of_two(most), most);
        assert!([f32::INFINITY, f32::NAN, most * 1.01].iter().all(|x| power_of_two(*x).is_nan()));
        let mut codes = [0; 2];
        assert_eq!(quantise_group(DType::Q8(Group::G32), &[127.0, -63.4], &mut codes), 1.0);
        assert_eq!(codes, [127, -63]);
        assert_eq!(quantise_group(DType::Q8(Group::G32), &[127.1, -63.4], &mut codes), 2.0);
        assert_eq!(codes, [64, -32]);
        for bits in [0x7fc0_0000, 0x7fff_ffff, 0x7fff_e000, 0x7fff_0000, 0xffff_ffff, 0x7f80_0001] {
            assert!((-4..=4).all(|on| short_scale(f32::from_bits(bits), on).is_nan()), "{bits:x}");
            assert!(quantise_group(DType::Q4(Group::G32), &[1.0, f32::from_bits(bits)], &mut codes).is_nan(), "{bits:x}");
        }
    }

    /// Calibration asks for codes of values that earlier errors have moved out of their group's range.
    #[test]
    fn codes_end_where_their_type_does() {
        let codes = |dtype| {
            let step = Step::of(dtype, &[1.0, -1.0]);
            [-1e9, -1.5, 1.5, 1e9].map(|x| step.code(x))
        };
        for group in [Group::Row, Group::G32] {
            assert_eq!(codes(DType::Q8(group)), if group == Group::Row { [-127, -127, 127, 127] } else { [-127, -96, 96, 127] });
        }
        assert_eq!(codes(DType::Q4(Group::G64)), [7, 7, -8, -8]);
    }

    #[test]
    fn zero_points_are_of_their_group() {
        let rows = CodedRows {
            dtype: DType::Z8(Group::G32),
            width: 33,
            codes: vec![5; 66],
            scales: vec![2.0, 1.0, 0.5, 4.0],
            zeros: vec![3, -1, 0, 7],
        };
        let values = rows.values();
        assert_eq!(values.len(), 66);
        assert_eq!([0, 31, 32, 33, 65].map(|i| values[i]), [4.0, 4.0, 6.0, 2.5, -8.0]);
    }

    #[test]
    fn zero_groups_stay_zero_and_nan_is_kept() {
        // Of the last the scale is no f16.
        for (dtype, x) in [(DType::Q8(Group::Row), [0.0, -1e-31]), (DType::Q4(Group::G32), [1e-10, -1e-10])] {
            let mut codes = [1; 2];
            assert_eq!((quantise_group(dtype, &x, &mut codes), codes), (0.0, [0, 0]), "{dtype}");
        }
        for dtype in [DType::Q8(Group::G32), DType::Q8(Group::Row)] {
            let y = quantise(dtype, &Tensor::new(DType::F32, &[1, 2], [1.0, f64::NAN]));
            assert!(y.len() == 2 && y.iter().all(|v| v.is_nan()), "{dtype}: {y:?}");
        }
    }
}
