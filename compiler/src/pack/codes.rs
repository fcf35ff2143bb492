//! Coded rows of a matrix to panels of int8 or int4 codes with scales and zero points; see
//! [`Coding`](rcompile_codegen::program::Coding) for the bytes and `quant` of the graph crate for the codes.

use super::panels::{panel_rows, rows};
use half::f16;
use rcompile_codegen::program::{DType as Stored, Panels};
use rcompile_graph::quant::CodedRows;
use std::ops::Range;

/// Fills the panels (stored as `stored`) of one way in `out`, which holds `panels` of all ways and is zero so far. `coded` holds exactly
/// the [`rows`], `k` elements each.
pub(super) fn fill(p: &Panels, stored: Stored, way: u32, panels: &Range<u64>, coded: &CodedRows, out: &mut [u8]) {
    let (k, nr, padded) = (p.k as usize, p.nr as usize, p.padded_k() as usize);
    let panel_bytes = p.panel_bytes(stored) as usize;
    let offset = p.coding.offset(stored);
    let first = rows(p, 0, panels).start;
    let (width, groups) = (p.coding.group().map_or(padded, |g| g as usize), coded.groups());
    let pack = p.k_pack as usize;
    let size = p.coding.scale_type().size() as usize;
    let mut codes = vec![0i8; padded];
    for (i, panel) in panels.clone().enumerate() {
        let at = (i * p.ways as usize + way as usize) * panel_bytes;
        let out = &mut out[at..at + panel_bytes];
        let real = panel_rows(p, panel);
        for c in 0..nr {
            // Padding columns get scale 0 and add nothing. Codes past `k` are multiplied by zero inputs.
            let row = real.start + c as u64;
            let row = (row < real.end).then(|| (row - first) as usize);
            codes.fill(0);
            if let Some(row) = row {
                codes[..k].copy_from_slice(&coded.codes[row * k..][..k]);
            }
            let scale = |group: usize| row.map_or(0.0, |row| coded.scales[row * groups + group]);
            if !p.coding.has_group_scales() {
                bytes(&codes, offset, (c, nr, pack), out);
                out[p.scales_at() as usize + c * size..][..size].copy_from_slice(&scale(0).to_le_bytes());
                continue;
            }
            let [scales, zeros] = [p.scales_at(), p.zeros_at()].map(|begin| begin as usize + c * size);
            for (number, (codes, out)) in codes.chunks(width).zip(out.chunks_mut(p.group_bytes() as usize)).enumerate() {
                let zero = row.and_then(|row| coded.zeros.get(row * groups + number)).map_or(0, |z| i32::from(*z));
                if p.coding.has_zeros() {
                    let stored = f16::from_f32((zero + offset) as f32);
                    out[zeros..][..size].copy_from_slice(&stored.to_le_bytes());
                }
                match p.coding.has_bytes() {
                    true => bytes(codes, offset, (c, nr, pack), out),
                    false => nibbles(codes, offset, (c, nr, pack), out),
                }
                // A value of f16 already.
                out[scales..][..size].copy_from_slice(&f16::from_f32(scale(number)).to_le_bytes());
            }
        }
    }
}

/// Column `c` of `nr`: a byte per code, `pack` of them together.
fn bytes(codes: &[i8], offset: i32, (c, nr, pack): (usize, usize, usize), out: &mut [u8]) {
    for (number, codes) in codes.chunks_exact(pack).enumerate() {
        let out = &mut out[(number * nr + c) * pack..][..pack];
        out.iter_mut().zip(codes).for_each(|(byte, code)| *byte = (i32::from(*code) + offset) as u8);
    }
}

/// Column `c` of `nr`: half a byte per code, `pack` codes together.
fn nibbles(codes: &[i8], offset: i32, (c, nr, pack): (usize, usize, usize), out: &mut [u8]) {
    for (number, codes) in codes.chunks_exact(pack).enumerate() {
        let (low, high) = codes.split_at(pack / 2);
        let out = &mut out[(number * nr + c) * low.len()..][..low.len()];
        let nibble = |code: i8| (i32::from(code) + offset) as u8;
        out.iter_mut().zip(low.iter().zip(high)).for_each(|(byte, (low, high))| *byte = nibble(*low) | nibble(*high) << 4);
    }
}
