//! Rows of a matrix to panels `[panel][k / k_pack][nr][k_pack]`; see [`Panels`].

use crate::error::Error;
use rcompile_codegen::program::{DType, Panels};
use std::ops::Range;

/// Rows of the matrix that the real columns of `panels` (of one way) are: always consecutive.
pub(super) fn rows(p: &Panels, way: u32, panels: &Range<u64>) -> Range<u64> {
    let way_begin = u64::from(way) * u64::from(p.groups) * u64::from(p.group_cols);
    let begin = panel_rows(p, panels.start).start;
    let end = panel_rows(p, panels.end - 1).end;
    way_begin + begin..way_begin + end
}

/// Rows of one panel within its way.
pub(super) fn panel_rows(p: &Panels, panel: u64) -> Range<u64> {
    let per_group = u64::from(p.panels_per_group());
    let (group, index) = (panel / per_group, panel % per_group);
    let begin = index * u64::from(p.nr);
    let end = (begin + u64::from(p.nr)).min(u64::from(p.group_cols));
    let group_begin = group * u64::from(p.group_cols);
    group_begin + begin..group_begin + end
}

/// Fills the panels (of `dtype`) of one way in `out`, which holds `panels` of all ways and is zero so far. `block` holds exactly the
/// [`rows`].
pub(super) fn fill(p: &Panels, dtype: DType, way: u32, panels: &Range<u64>, block: &[u8], out: &mut [u8]) -> Result<(), Error> {
    let element = dtype.size() as usize;
    let one: fn(&[u8], usize, usize, &mut [u8]) = match element * p.k_pack as usize {
        1 => panel::<1>,
        2 => panel::<2>,
        4 => panel::<4>,
        8 => panel::<8>,
        16 => panel::<16>,
        other => return Err(Error::bug("pack panels", format!("{other} bytes per column and step"))),
    };
    let row_bytes = p.k as usize * element;
    let [panel_bytes, filled] = [p.panel_bytes(dtype), p.filled_bytes(dtype)].map(|bytes| bytes as usize);
    let first = panel_rows(p, panels.start).start;
    for (i, panel) in panels.clone().enumerate() {
        let rows = panel_rows(p, panel);
        let src = &block[(rows.start - first) as usize * row_bytes..(rows.end - first) as usize * row_bytes];
        let at = (i * p.ways as usize + way as usize) * panel_bytes;
        one(src, row_bytes, p.nr as usize, &mut out[at..at + filled]);
    }
    Ok(())
}

/// One panel: unit `u` (of `N` bytes: `k_pack` elements) of row `r` goes to `u * nr + r`. Units are taken a cache line at a time.
fn panel<const N: usize>(src: &[u8], row_bytes: usize, nr: usize, dst: &mut [u8]) {
    let step = 64 / N;
    let dst = dst.as_chunks_mut::<N>().0;
    for (block, dst) in dst.chunks_mut(step * nr).enumerate() {
        for (r, row) in src.chunks_exact(row_bytes).enumerate() {
            let row = &row[(block * step * N).min(row_bytes)..row_bytes.min((block + 1) * step * N)];
            let (units, tail) = row.as_chunks::<N>();
            for (unit, column) in units.iter().zip(dst.chunks_exact_mut(nr)) {
                column[r] = *unit;
            }
            if !tail.is_empty() {
                // The last step of an inner dimension that is no multiple of k_pack: the rest stays zero.
                dst[units.len() * nr + r][..tail.len()].copy_from_slice(tail);
            }
        }
    }
}
