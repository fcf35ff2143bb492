//! Quantised element types: what a value becomes when it is converted to one of them. The interpreter, the pack stage and (for
//! activations, in generated code) the kernel `quantise` all follow this definition, so that their codes are the same integers.
//!
//! ```text
//! q8, q8g32, ..   codes -127 ..= 127, scale f32 = max|x| / 127;   code = nearest(x * (127 / max|x|))
//! q4g32, ..       codes   -8 ..=   7, scale f16 = m / -8, m the element of largest magnitude (the first of equals);
//!                 code = nearest(x * (1 / scale)) within -8 ..= 7
//! ```
//! All of it in f32, ties to even. A group shares one scale: a whole row (`q8`) or 32, 64 or 128 consecutive elements of it (`q8g256`, of the
//! inputs of matmuls: 256), the last group of a row may be shorter. A group below [`TINY`] is all zero. The value of an element is `code * scale`, exactly.
//!
//! Weights of a checkpoint that is quantised already keep its codes, scales and zero points:
//!
//! ```text
//! q8g32, ..  codes -128 ..= 127         scale f16   value = code * scale
//! q4g32, ..  codes   -8 ..=   7         scale f16   value = code * scale
//! z8g32, ..  codes -128 ..= 127         scale f16   value = (code - zero) * scale,  zero -128 ..= 127
//! z4g32, ..  codes    0 ..=  15         scale f16   value = (code - zero) * scale,  zero    0 ..=  15
//! ```
//!
//! Source of the four-bit rule (the sign of the scale spends all sixteen codes): Q4_0 of llama.cpp.

use crate::tensor::{Tensor, round};
use crate::types::DType;

/// Magnitude below which a group is zero: the reciprocal of a smaller one would overflow.
pub const TINY: f32 = 1e-30;

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
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT) - SHIFT
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
            let scale = round(DType::F16, f64::from(x[at] / -8.0)) as f32;
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            Step { scale, inverse, least, most }
        } else {
            Step { scale: magnitude / 127.0, inverse: 127.0 / magnitude, least, most }
        }
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

/// Rows of a quantised matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Coded {
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

impl Coded {
    /// Rows of `width` floats rounded to nearest.
    pub fn quantise(dtype: DType, x: &[f32], width: usize) -> Coded {
        let width = width.max(1);
        let group = group_of(dtype).map_or(width, |g| g.len(width));
        let mut codes = vec![0; x.len()];
        let rows = x.chunks(width).zip(codes.chunks_mut(width));
        let groups = rows.flat_map(|(x, codes)| x.chunks(group).zip(codes.chunks_mut(group)));
        let scales = groups.map(|(x, codes)| quantise_group(dtype, x, codes)).collect();
        Coded { dtype, width, codes, scales, zeros: vec![] }
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
    Coded::quantise(dtype, &floats, x.shape.last().copied().unwrap_or(1)).values()
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
            let group = group_of(dtype).unwrap().len(100);
            for (x, y) in x.data.chunks(100).flat_map(|r| r.chunks(group)).zip(y.chunks(100).flat_map(|r| r.chunks(group))) {
                let largest = x.iter().fold(0.0f64, |m, v| m.max(v.abs()));
                // Four bits: the side opposite the largest element ends at 7 of 8 steps.
                let step = if matches!(dtype, DType::Q4(_)) { largest / 8.0 * 2.0 } else { largest / 127.0 };
                for (x, y) in x.iter().zip(y) {
                    assert!((x - y).abs() <= step * 0.5001, "{dtype}: {x} became {y}, step {step}");
                }
            }
        }
    }

    #[test]
    fn the_largest_element_of_four_bits_is_code_minus_eight() {
        let mut codes = [0; 4];
        let scale = quantise_group(DType::Q4(Group::G32), &[1.0, -4.0, 3.9, 0.2], &mut codes);
        assert_eq!((scale, codes), (0.5, [2, -8, 7, 0]));
    }

    #[test]
    fn zero_groups_stay_zero_and_nan_is_kept() {
        let mut codes = [1; 2];
        assert_eq!(quantise_group(DType::Q8(Group::Row), &[0.0, -1e-31], &mut codes), 0.0);
        assert_eq!(codes, [0, 0]);
        let y = quantise(DType::Q8(Group::Row), &Tensor::new(DType::F32, &[1, 2], [1.0, f64::NAN]));
        assert!(y.iter().all(|v| v.is_nan()));
    }
}
