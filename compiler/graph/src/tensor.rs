//! Values of the reference interpreter: a tensor of any element type held in `f64`, and the exact rounding to every element type.
//!
//! f64 holds every value of f32, f16, bf16, i32, i8, u8 and bool exactly, and i64 up to 2^53 in magnitude.

use crate::types::DType;

/// A dense row-major tensor. Invariant (kept by [`Tensor::new`]): every element is a value of `dtype`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub data: Vec<f64>,
}

impl Tensor {
    /// A tensor of these elements, each rounded to `dtype` as [`round`] does. Panics if the number of elements is not the shape's.
    pub fn new(dtype: DType, shape: &[usize], data: impl IntoIterator<Item = f64>) -> Tensor {
        let mut data: Vec<f64> = data.into_iter().collect();
        assert_eq!(data.len(), shape.iter().product::<usize>(), "elements of a tensor of shape {shape:?}");
        round_all(dtype, &mut data);
        Tensor { dtype, shape: shape.to_vec(), data }
    }
    /// f32 tensor.
    pub fn f32(shape: &[usize], data: &[f32]) -> Tensor {
        Tensor::new(DType::F32, shape, data.iter().map(|x| f64::from(*x)))
    }
    /// i32 tensor.
    pub fn i32(shape: &[usize], data: &[i32]) -> Tensor {
        Tensor::new(DType::I32, shape, data.iter().map(|x| f64::from(*x)))
    }
    /// The token of a state: no elements.
    pub fn state_token() -> Tensor {
        Tensor { dtype: DType::State, shape: Vec::new(), data: Vec::new() }
    }
    /// Elements as f32 (exact for f32, f16 and bf16).
    pub fn to_f32(&self) -> Vec<f32> {
        self.data.iter().map(|x| *x as f32).collect()
    }
}

/// Nearest value of a binary format with `precision` significant bits (ties to even), subnormals below `2^exponent_min`, infinity
/// above `max`. Rounds once. (`half::f16::from_f64` and `bf16::from_f64` are not used: half 2.7 drops the low 32 bits of the f64 before
/// it rounds, so a value just above a tie goes down.)
fn round_binary(x: f64, precision: i32, exponent_min: i32, max: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    // Scaling by a power of two is exact: the quantum is far above f64's own subnormals.
    let quantum = f64::from_bits(((exponent.max(exponent_min) - (precision - 1) + 1023) as u64) << 52);
    let rounded = (x / quantum).round_ties_even() * quantum;
    if rounded.abs() > max { f64::INFINITY.copysign(x) } else { rounded }
}

/// `x` rounded to `dtype`: floats to nearest even, integers truncated toward zero and saturated (NaN gives 0), bool `x != 0`.
pub fn round(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => round_binary(x, 11, -14, 65504.0),
        // (2 - 2^-7) * 2^127
        DType::BF16 => round_binary(x, 8, -126, f64::from(f32::from_bits(0x7f7f_0000))),
        DType::I64 => (x as i64) as f64,
        DType::I32 => f64::from(x as i32),
        DType::I8 => f64::from(x as i8),
        DType::U8 => f64::from(x as u8),
        DType::Bool => f64::from(u8::from(x != 0.0)),
        // A matter of whole groups: see `quant`.
        DType::State | DType::Q8(_) | DType::Q4(_) | DType::Z8(_) | DType::Z4(_) => x,
    }
}

/// Rounds every element.
pub fn round_all(dtype: DType, data: &mut [f64]) {
    for x in data {
        *x = round(dtype, *x);
    }
}

/// An integer result in two's complement of `dtype`'s width.
pub fn wrap(dtype: DType, x: i64) -> f64 {
    match dtype {
        DType::I32 => f64::from(x as i32),
        DType::I8 => f64::from(x as i8),
        DType::U8 => f64::from(x as u8),
        DType::Bool => f64::from(u8::from(x != 0)),
        _ => x as f64,
    }
}

/// `convert` of one value: integer to integer wraps, everything else as [`round`]. For quantised types see [`crate::quant`].
pub fn convert(from: DType, to: DType, x: f64) -> f64 {
    if to.is_int() && !from.is_float() { wrap(to, x as i64) } else { round(to, x) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_agrees_with_half_on_every_f32_exponent() {
        let mut bits = 0x1234_5678u32;
        for _ in 0..200_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            if x.is_nan() {
                continue;
            }
            assert_eq!(round(DType::F16, f64::from(x)), half::f16::from_f32(x).to_f64(), "{x:e}");
            assert_eq!(round(DType::BF16, f64::from(x)), half::bf16::from_f32(x).to_f64(), "{x:e}");
        }
    }

    #[test]
    fn every_half_is_a_fixed_point() {
        for bits in 0..=u16::MAX {
            for x in [half::f16::from_bits(bits).to_f64(), half::bf16::from_bits(bits).to_f64()] {
                let dtype = if x == half::f16::from_bits(bits).to_f64() { DType::F16 } else { DType::BF16 };
                assert!(x.is_nan() || round(dtype, x) == x, "{x:e}");
            }
        }
    }

    #[test]
    fn ties_are_judged_on_all_bits_of_f64() {
        // Just above a tie: through f32 (or with the low bits dropped) it would look like the tie and go down to even.
        let above = 1.0 + 2f64.powi(-8) + 2f64.powi(-50);
        assert_eq!(round(DType::BF16, above), 1.0 + 2f64.powi(-7));
        assert_eq!(round(DType::BF16, 1.0 + 2f64.powi(-8)), 1.0);
        assert_eq!(round(DType::F16, 1.0 + 2f64.powi(-11) + 2f64.powi(-50)), 1.0 + 2f64.powi(-10));
        assert_eq!(round(DType::F16, 65519.999), 65504.0);
        assert_eq!(round(DType::F16, 65520.0), f64::INFINITY);
        assert_eq!(round(DType::F16, 2f64.powi(-25)), 0.0);
        assert_eq!(round(DType::F16, 2f64.powi(-25) * 1.0001), 2f64.powi(-24));
        assert_eq!(round(DType::BF16, -1e39), f64::NEG_INFINITY);
        assert_eq!(round(DType::F32, f64::MIN_POSITIVE), 0.0);
    }

    #[test]
    fn integers_saturate_from_floats_and_wrap_from_integers() {
        assert_eq!(convert(DType::F32, DType::I8, 300.7), 127.0);
        assert_eq!(convert(DType::F32, DType::I32, -1.9), -1.0);
        assert_eq!(convert(DType::F32, DType::U8, f64::NAN), 0.0);
        assert_eq!(convert(DType::I32, DType::I8, 300.0), 44.0);
        assert_eq!(convert(DType::I32, DType::U8, -1.0), 255.0);
        assert_eq!(convert(DType::F32, DType::Bool, 0.5), 1.0);
        assert_eq!(convert(DType::Bool, DType::BF16, 1.0), 1.0);
    }
}
