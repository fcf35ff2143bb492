//! The register tile of a matmul: all k of `m` rows times a few vectors of columns, accumulators in registers from the first to the last.
//!
//! In: [`Microkernel`], a [`Walk`] (rows, panels side by side, vectors of each), addresses of the rows and of the panels. Out: the loop
//! over k, ended by stores of the accumulators to a small tile in L1 (`f32[way][row][column]`), from which the epilogue reads.
//!
//! Weights are prefetched `tile.prefetch` bytes ahead. From a page on (weights that stream from memory), instances with fewer than four
//! streams spread the prefetch over the four pages of the next 16 KB.

use crate::isa::Isa;
use crate::llvm::builder::{Elem, Fb, Ty, Value};
use crate::program::{Compute, DType, Matmul};

/// Do `m` rows times `vectors` of accumulators, `held` weights, a broadcast and a mask fit the register file? Beyond this bound LLVM
/// spills inside the loop.
pub(super) fn tile_fits(isa: &Isa, m: u32, vectors: u32, held: u32) -> bool {
    m * vectors + held + 2 <= isa.registers
}

/// Bytes of a page of memory: hardware prefetchers follow a stream inside one.
const PAGE: u32 = 4096;
/// Pages of a prefetch window, see [`window_line`].
const WINDOW_PAGES: u32 = 4;

/// Byte offset of the `line`-th line to prefetch of a stream that is walked alone: the pages of a window (of the next one, for the
/// caller) in turns. A single linear stream is limited by the few requests of the L1 or by one page of hardware prefetch; four pages at
/// once keep as many requests under way as four streams do (on Sapphire Rapids 8 rows stream at 1.1 times a plain read instead of 0.7).
fn window_line<'c>(fb: &Fb<'_, 'c>, line: Value<'c>) -> Value<'c> {
    let pages = i64::from(WINDOW_PAGES);
    let lines = i64::from(PAGE) / 64;
    let page = fb.and(line, fb.int(pages - 1));
    let inside = fb.and(fb.lshr(line, WINDOW_PAGES.trailing_zeros()), fb.int(lines - 1));
    let window = fb.and(line, fb.int(-(pages * lines)));
    fb.add(fb.mul_int(window, 64), fb.add(fb.mul_int(page, i64::from(PAGE)), fb.mul_int(inside, 64)))
}

/// How one instance walks panels: `panels` side by side, `vectors` of each (from the panel's column `piece * vectors * lanes` on).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Walk {
    /// Rows.
    pub m: u32,
    /// Panels side by side.
    pub panels: u32,
    /// Vectors of each panel (of each way).
    pub vectors: u32,
    /// Passes over the panels to cover all their vectors.
    pub pieces: u32,
}

impl Walk {
    /// The walk of `m` rows with up to `most` panels side by side.
    pub fn choose(isa: &Isa, kernel: &Matmul, m: u32, most: u32) -> Walk {
        let per_panel = kernel.panels.nr / isa.lanes;
        let ways = kernel.panels.ways;
        // Weights of a single row are memory operands, unless they have to be widened.
        let widens = kernel.panels.k_pack == 2 && kernel.compute == Compute::F32;
        let fits = |vectors: u32| tile_fits(isa, m, vectors, if widens { vectors } else { vectors.min(m) });
        let mut vectors = per_panel;
        while vectors > 1 && !fits(vectors * ways) {
            vectors /= 2;
        }
        let mut panels = 1;
        if vectors == per_panel {
            let side_by_side = |p: u32| p * m * vectors * ways <= kernel.tile.accumulators && fits(p * vectors * ways);
            while panels < most && side_by_side(panels + 1) {
                panels += 1;
            }
        }
        Walk { m, panels, vectors, pieces: per_panel / vectors }
    }
}

/// The generator of register tiles of one kernel.
pub(super) struct Microkernel<'a> {
    /// The kernel.
    pub kernel: &'a Matmul,
    /// Weights as stored.
    pub dtype: DType,
}

impl Microkernel<'_> {
    /// All `k` of one register tile: reads `walk.m` rows at `a` and the panels at `w`, writes the accumulators to
    /// `tile: f32[way][m][panels * nr]`. `w` and `tile` point at the piece.
    pub fn emit<'c>(&self, fb: &Fb<'_, 'c>, walk: Walk, a: Value<'c>, w: Value<'c>, tile: Value<'c>) {
        let kernel = self.kernel;
        let lanes = fb.lanes();
        let panels = &kernel.panels;
        let a_size = kernel.a.dtype.size();
        let size = self.dtype.size();
        let pack = u64::from(panels.k_pack);
        let vector_bytes = u64::from(lanes) * pack * size;
        let step_bytes = u64::from(panels.nr) * pack * size;
        let panel_bytes = panels.panel_len() * size;
        // One stream per panel and way; vectors within it.
        let streams: Vec<u64> = (0..u64::from(walk.panels * panels.ways)).map(|s| s * panel_bytes).collect();
        let vectors: Vec<u64> = streams.iter().flat_map(|s| (0..u64::from(walk.vectors)).map(move |v| s + v * vector_bytes)).collect();
        let lines = (u64::from(walk.vectors) * vector_bytes).div_ceil(64);

        let step = |a: Value<'c>, w: Value<'c>, acc: &[Value<'c>], half: bool| -> Vec<Value<'c>> {
            let mut acc = acc.to_vec();
            let row = |r: u32, k: u64| fb.offset_const(a, (u64::from(r) * u64::from(kernel.a_stride) + k) * a_size);
            let align = vector_bytes.min(64) as u32;
            let columns: Vec<_> = vectors.iter().map(|&v| fb.offset_const(w, v)).collect();
            let n = columns.len();
            if kernel.compute == Compute::Bf16Dot {
                let words: Vec<_> = columns.iter().map(|&p| fb.load(Ty::vec(Elem::I32, lanes), p, align)).collect();
                for r in 0..walk.m {
                    // The last k of an odd K: `a` ends there, and the weight's partner is zero padding.
                    let pair = if half {
                        fb.zext(fb.load(Ty::scalar(Elem::I16), row(r, 0), 2), Elem::I32)
                    } else {
                        fb.load(Ty::I32, row(r, 0), 2)
                    };
                    let pair = fb.splat(pair, lanes);
                    for (c, &words) in words.iter().enumerate() {
                        let i = r as usize * n + c;
                        acc[i] = fb.dot_bf16(acc[i], pair, words);
                    }
                }
                return acc;
            }
            let words = |k: u32, p: Value<'c>| {
                let ty = Ty::vec(Elem::I32, lanes);
                // The odd halves' words are read again where they would not find registers beside the even halves.
                let again = k == 1 && !tile_fits(fb.isa(), walk.m, n as u32, 2 * n as u32);
                if again { fb.load_again(ty, p, align) } else { fb.load(ty, p, align) }
            };
            let half_of = |k: u32, p: Value<'c>| {
                let (even, odd) = fb.split_bf16_pair(words(k, p));
                if k == 0 { even } else { odd }
            };
            for k in 0..if half { 1 } else { pack } {
                let columns: Vec<_> = columns
                    .iter()
                    .map(|&p| if pack == 2 { half_of(k as u32, p) } else { fb.load_f32(self.dtype, lanes, p, align) })
                    .collect();
                for r in 0..walk.m {
                    let x = fb.load_broadcast(kernel.a.dtype, lanes, row(r, k));
                    for (c, &weight) in columns.iter().enumerate() {
                        let i = r as usize * n + c;
                        acc[i] = fb.fma(x, weight, acc[i]);
                    }
                }
            }
            acc
        };

        let steps = u64::from(panels.k) / pack;
        let zero = fb.zero(Ty::vec(Elem::F32, lanes));
        let zeros = vec![zero; vectors.len() * walk.m as usize];
        let panel = w;
        let few_streams = (streams.len() as u32) < WINDOW_PAGES && kernel.tile.prefetch >= PAGE;
        let mut acc = fb.loop_(fb.int(0), fb.int(steps as i64), 1, &zeros, |i, acc| {
            let a = fb.index(a, i, a_size * pack);
            let w = fb.index(w, i, step_bytes);
            if few_streams {
                for line in 0..step_bytes / 64 {
                    let at = window_line(fb, fb.add_int(fb.mul_int(i, step_bytes as i64 / 64), line as i64));
                    for stream in &streams {
                        fb.prefetch(fb.offset_const(fb.offset(panel, at), stream + u64::from(WINDOW_PAGES * PAGE)), 2);
                    }
                }
            } else if kernel.tile.prefetch > 0 {
                for stream in &streams {
                    for line in 0..lines {
                        fb.prefetch(fb.offset_const(w, stream + line * 64 + u64::from(kernel.tile.prefetch)), 3);
                    }
                }
            }
            step(a, w, acc, false)
        });
        if !u64::from(panels.k).is_multiple_of(pack) {
            acc = step(fb.offset_const(a, steps * pack * a_size), fb.offset_const(w, steps * step_bytes), &acc, true);
        }

        let width = u64::from(walk.panels * panels.nr);
        for r in 0..u64::from(walk.m) {
            for way in 0..u64::from(panels.ways) {
                for p in 0..u64::from(walk.panels) {
                    for v in 0..u64::from(walk.vectors) {
                        let column = p * u64::from(panels.nr) + v * u64::from(lanes);
                        let stream = p * u64::from(panels.ways) + way;
                        let i = r * vectors.len() as u64 + stream * u64::from(walk.vectors) + v;
                        let at = ((way * u64::from(walk.m) + r) * width + column) * 4;
                        fb.store(acc[i as usize], fb.offset_const(tile, at), lanes * 4);
                    }
                }
            }
        }
    }
}
