//! Coded rows of a matrix to panels of int8 or int4 codes with scales; see [`Coding`] for the bytes and `quant` of the graph crate for the codes.

use super::panels::{panel_rows, rows};
use half::f16;
use rcompile_codegen::program::{Coding, DType as Stored, Panels};
use rcompile_graph::quant::Coded;
use rcompile_graph::{DType, Group};
use std::ops::Range;

/// The graph's type of a coding.
pub(super) fn dtype(coding: Coding) -> Option<DType> {
    match coding {
        Coding::Elements => None,
        Coding::Int8 { .. } => Some(DType::Q8(Group::Row)),
        Coding::Int4 { group } => Group::of(group).map(DType::Q4),
    }
}

/// Fills the panels (stored as `stored`) of one way in `out`, which holds `panels` of all ways and is zero so far. `matrix` holds exactly the
/// [`rows`], `k` elements each.
pub(super) fn fill(p: &Panels, stored: Stored, way: u32, panels: &Range<u64>, matrix: &Coded, out: &mut [u8]) {
    let (k, nr, padded) = (p.k as usize, p.nr as usize, p.padded_k() as usize);
    let panel_bytes = p.panel_bytes(stored) as usize;
    let offset = p.coding.offset(stored);
    let (groups, group) = (matrix.groups(), p.coding.group().map_or(k, |g| g as usize));
    let first = rows(p, 0, panels).start;
    let mut codes = vec![0i8; padded];
    for (i, panel) in panels.clone().enumerate() {
        let at = (i * p.ways as usize + way as usize) * panel_bytes;
        let out = &mut out[at..at + panel_bytes];
        let real = panel_rows(p, panel);
        for c in 0..nr {
            // Padding is zero: the code that the offset takes to 0, times a scale of 0.
            codes.fill(0);
            let row = real.start + c as u64;
            let scales = if row < real.end {
                let row = (row - first) as usize;
                codes[..k].copy_from_slice(&matrix.codes[row * k..][..k]);
                &matrix.scales[row * groups..][..groups]
            } else {
                &[]
            };
            match p.coding {
                Coding::Int4 { .. } => four_bits(scales, &codes, (c, nr, group, p.k_pack as usize), out),
                _ => {
                    let scale = scales.first().copied().unwrap_or(0.0);
                    let pack = p.k_pack as usize;
                    for (number, codes) in codes.chunks_exact(pack).enumerate() {
                        let out = &mut out[(number * nr + c) * pack..][..pack];
                        out.iter_mut().zip(codes).for_each(|(byte, code)| *byte = (i32::from(*code) + offset) as u8);
                    }
                    out[padded * nr + c * 4..][..4].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
    }
}

/// Column `c` of `nr`: nibbles, `k_pack` of them together, and scales, group by group.
fn four_bits(scales: &[f32], codes: &[i8], (c, nr, group, k_pack): (usize, usize, usize, usize), out: &mut [u8]) {
    let bytes = nr * (group / 2 + 2);
    for (number, codes) in codes.chunks(group).enumerate() {
        let out = &mut out[number * bytes..][..bytes];
        for (word, codes) in codes.chunks_exact(k_pack).enumerate() {
            let (low, high) = codes.split_at(k_pack / 2);
            let out = &mut out[(word * nr + c) * low.len()..][..low.len()];
            let nibble = |code: i8| (code + 8) as u8;
            out.iter_mut().zip(low.iter().zip(high)).for_each(|(byte, (low, high))| *byte = nibble(*low) | nibble(*high) << 4);
        }
        // Rounded to f16 already.
        let scale = scales.get(number).copied().unwrap_or(0.0);
        out[group / 2 * nr + c * 2..][..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    }
}
