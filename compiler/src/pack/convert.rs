//! Conversion of element types (round to nearest even), on little-endian bytes.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rcompile_graph::DType;

/// Elements converted at a time, on the stack.
const CHUNK: usize = 512;

/// Converts `src` to `dst`; both hold the same number of elements. Returns how many finite ones became infinite, or None where the pair
/// of types is not supported.
pub(super) fn convert(from: DType, to: DType, src: &[u8], dst: &mut [u8]) -> Option<u64> {
    if !from.is_float() || !to.is_float() {
        return None;
    }
    let (from_size, to_size) = (from.size() as usize, to.size() as usize);
    debug_assert_eq!(src.len() / from_size, dst.len() / to_size);
    let mut overflows = 0;
    let mut values = [0f32; CHUNK];
    for (src, dst) in src.chunks(CHUNK * from_size).zip(dst.chunks_mut(CHUNK * to_size)) {
        let values = &mut values[..src.len() / from_size];
        widen(from, src, values);
        match to {
            DType::F32 => dst.as_chunks_mut().0.iter_mut().zip(values).for_each(|(d, v)| *d = v.to_le_bytes()),
            DType::F16 => {
                let mut half = [f16::ZERO; CHUNK];
                let half = &mut half[..values.len()];
                half.convert_from_f32_slice(values);
                dst.as_chunks_mut().0.iter_mut().zip(half.iter()).for_each(|(d, h)| *d = h.to_le_bytes());
                overflows += values.iter().zip(half).filter(|(v, h)| v.is_finite() && !h.is_finite()).count();
            }
            DType::BF16 => {
                for (d, v) in dst.as_chunks_mut().0.iter_mut().zip(values) {
                    let b = bf16::from_f32(*v);
                    overflows += usize::from(v.is_finite() && !b.is_finite());
                    *d = b.to_le_bytes();
                }
            }
            other => unreachable!("{other} is no type of floats"),
        }
    }
    Some(overflows as u64)
}

/// All elements of a float type as f32.
pub(super) fn to_f32(from: DType, src: &[u8]) -> Vec<f32> {
    let mut values = vec![0f32; src.len() / from.size() as usize];
    for (src, values) in src.chunks(CHUNK * from.size() as usize).zip(values.chunks_mut(CHUNK)) {
        widen(from, src, values);
    }
    values
}

fn widen(from: DType, src: &[u8], values: &mut [f32]) {
    match from {
        DType::F32 => values.iter_mut().zip(src.as_chunks().0).for_each(|(v, s)| *v = f32::from_le_bytes(*s)),
        DType::F16 => {
            let mut half = [f16::ZERO; CHUNK];
            let half = &mut half[..values.len()];
            half.iter_mut().zip(src.as_chunks().0).for_each(|(h, s)| *h = f16::from_le_bytes(*s));
            half.convert_to_f32_slice(values);
        }
        DType::BF16 => values.iter_mut().zip(src.as_chunks().0).for_each(|(v, s)| *v = bf16::from_le_bytes(*s).to_f32()),
        other => unreachable!("{other} is no type of floats"),
    }
}
