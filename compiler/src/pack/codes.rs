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
                Coding::Int4 { .. } => four_bits(scales, &codes, (c, nr, group), out),
                _ => {
                    let scale = scales.first().copied().unwrap_or(0.0);
                    for (word, codes) in codes.as_chunks::<4>().0.iter().enumerate() {
                        out[(word * nr + c) * 4..][..4].copy_from_slice(&codes.map(|code| (i32::from(code) + offset) as u8));
                    }
                    out[padded * nr + c * 4..][..4].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
    }
}

/// Column `c` of `nr`: nibbles and scales, group by group.
fn four_bits(scales: &[f32], codes: &[i8], (c, nr, group): (usize, usize, usize), out: &mut [u8]) {
    let bytes = nr * (group / 2 + 2);
    for (number, codes) in codes.chunks(group).enumerate() {
        let out = &mut out[number * bytes..][..bytes];
        for (word, codes) in codes.as_chunks::<8>().0.iter().enumerate() {
            let codes = codes.map(|code| (code + 8) as u8);
            let both: [u8; 4] = std::array::from_fn(|i| codes[i] | codes[i + 4] << 4);
            out[(word * nr + c) * 4..][..4].copy_from_slice(&both);
        }
        // Rounded to f16 already.
        let scale = scales.get(number).copied().unwrap_or(0.0);
        out[group / 2 * nr + c * 2..][..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    }
}
