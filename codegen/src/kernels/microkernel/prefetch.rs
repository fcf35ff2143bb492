//! What is asked for while a register tile goes over its weights.
//!
//! Weights come from memory in one of two ways ([`Feed`]). With few rows each weight is used once, and the loop has to keep as many
//! requests under way as the core allows: several streams side by side, each brought to L1 and to L2 so many bytes ahead ([`Reading`]),
//! across the end of a panel to the panel that the stream will walk next; a single one to L1 past L2, where the CPU wants that. Instances
//! with fewer than four streams spread the far prefetch over the four pages of the next 16 KB. With many rows the weights of this loop are
//! in L2 already, and each block of rows brings a part of the next block of weights there.

use super::{Microkernel, Walk};
use crate::isa::Distances;
use crate::llvm::builder::{Cmp, Fb, Value};
use crate::program::{Coding, Reading};

/// Locality argument of a prefetch into L2.
pub(in crate::kernels) const L2: u32 = 2;
/// Locality argument of a prefetch into L1.
pub(in crate::kernels) const L1: u32 = 3;
/// Locality argument of a prefetch into L1 of what no other cache shall keep.
const L1_PAST_L2: u32 = 0;
/// 32-bit words of a cache line.
pub(in crate::kernels) const LINE_WORDS: u32 = 16;
/// Bytes of a page of memory: hardware prefetchers follow a stream inside one.
pub(in crate::kernels) const PAGE: u32 = 4096;
/// Pages of a prefetch window, see [`window_line`].
pub(in crate::kernels) const WINDOW_PAGES: u32 = 4;
/// Bytes of it.
pub(in crate::kernels) const WINDOW_BYTES: u64 = (WINDOW_PAGES * PAGE) as u64;

/// Byte offset of the `line`-th line to prefetch of a stream that is walked alone: the pages of a window (of the next one, for the
/// caller) in turns. A single linear stream is limited by the few requests of the L1 or by one page of hardware prefetch; four pages at
/// once keep as many requests under way as four streams do (on Sapphire Rapids 8 rows stream at 1.1 times a plain read instead of 0.7).
fn window_line<'c>(fb: &Fb<'_, 'c>, line: Value<'c>) -> Value<'c> {
    let round = fb.lshr(line, WINDOW_PAGES.trailing_zeros());
    let page = fb.and(line, fb.int(i64::from(WINDOW_PAGES) - 1));
    fb.add(window_round(fb, round), fb.mul_int(page, PAGE.into()))
}

/// The same of the first of the `round`-th lines of the pages of a window, which are a page apart.
pub(in crate::kernels) fn window_round<'c>(fb: &Fb<'_, 'c>, round: Value<'c>) -> Value<'c> {
    let lines = i64::from(PAGE) / 64;
    let window = fb.and(round, fb.int(-lines));
    let inside = fb.and(round, fb.int(lines - 1));
    fb.add(fb.mul_int(window, WINDOW_BYTES as i64 / lines), fb.mul_int(inside, 64))
}

/// Fraction bits of [`Feed::Ahead`]'s step.
pub(in crate::kernels) const AHEAD_SHIFT: u32 = 16;

/// Where the weights are, and what is prefetched.
#[derive(Clone, Copy)]
pub(in crate::kernels) enum Feed<'c> {
    /// In memory.
    Stream(Reading),
    /// In L2; the loop prefetches what comes next.
    Ahead {
        /// Address of its part.
        at: Value<'c>,
        /// Bytes per step, in `2^-`[`AHEAD_SHIFT`].
        step: Value<'c>,
        /// Bytes between the parts of two ways.
        stream: u64,
    },
}

impl Microkernel {
    /// Prefetches a part of what comes next: of all ways the lines from `done` bytes (in `2^-`[`AHEAD_SHIFT`]) behind `at` on. Two blocks
    /// of rows share the work, or more: half of the lines of a step, which is `step_bytes` long.
    pub(in crate::kernels) fn prefetch_ahead<'c>(&self, fb: &Fb<'_, 'c>, at: Value<'c>, done: Value<'c>, (stream, step_bytes): (u64, u64)) {
        let at = fb.offset(at, fb.lshr(done, AHEAD_SHIFT));
        for way in 0..u64::from(self.product.panels.ways) {
            (0..(step_bytes / 128).max(1)).for_each(|line| fb.prefetch(fb.offset_const(at, way * stream + line * 64), L2));
        }
    }

    /// Prefetches for the `step_bytes` bytes (in `packs` equal parts) at `here` of streams that start at `panel`.
    pub(in crate::kernels) fn prefetch_streams<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        walk: Walk,
        (streams, reading): (&[u64], Reading),
        panel: Value<'c>,
        here: Value<'c>,
        (step_bytes, packs): (u64, u64),
    ) {
        let Distances { l2, l1 } = reading.distances(streams.len() as u32);
        // Lines of a stream's step: those that begin in the vectors of its packs.
        let pack_bytes = step_bytes / packs;
        let pack_lines = (pack_bytes / u64::from(walk.passes)).div_ceil(64);
        let mut lines: Vec<u64> = (0..packs).flat_map(|p| (0..pack_lines).map(move |line| p * pack_bytes / 64 + line)).collect();
        lines.dedup();
        // Beyond its end a stream goes on in the next walk's panel.
        let going_on = |bytes: u32| {
            let at = fb.add_int(here, bytes.into());
            let end = self.product.panels.filled_bytes(self.product.weight);
            let past = fb.cmp(Cmp::Ge, at, fb.int(end as i64));
            let skip = streams.len() as u64 * self.panel_bytes - end;
            fb.add(at, fb.select(past, fb.int(skip as i64), fb.int(0)))
        };
        if l2 >= PAGE && (streams.len() as u32) < WINDOW_PAGES {
            // Lines of one round share an address where steps begin at whole rounds, or parts of them.
            let unit = step_bytes | self.coding.group().map_or(0, |_| self.group_bytes(fb.isa()).0);
            let together = ((1 << unit.trailing_zeros()) / 64).clamp(1, u64::from(WINDOW_PAGES));
            for line in (0..step_bytes.div_ceil(64)).step_by(together as usize) {
                let at = fb.offset(panel, window_line(fb, fb.add_int(fb.lshr(here, 6), line as i64)));
                for (page, stream) in (0..together).flat_map(|page| streams.iter().map(move |stream| (page, stream))) {
                    fb.prefetch(fb.offset_const(at, stream + WINDOW_BYTES + page * u64::from(PAGE)), L2);
                }
            }
        } else if l2 > 0 {
            let at = fb.offset(panel, going_on(l2));
            for (stream, line) in streams.iter().flat_map(|s| lines.iter().map(move |line| (s, line))) {
                fb.prefetch(fb.offset_const(at, stream + line * 64), L2);
            }
        }
        if l1 > 0 {
            let cache = if streams.len() == 1 && reading.past_l2 { L1_PAST_L2 } else { L1 };
            // Behind several panels that a single row walks side by side lies what it has read. Codes lose by the choice (measured on Zen
            // 5, the only CPU whose single rows ask into L1 alone; elsewhere L2 is asked for what comes next).
            let goes_on = walk.m == 1 && streams.len() > 1 && l2 == 0 && self.coding == Coding::Elements;
            let at = fb.offset(panel, if goes_on { going_on(l1) } else { fb.add_int(here, l1.into()) });
            for (stream, line) in streams.iter().flat_map(|s| lines.iter().map(move |line| (s, line))) {
                fb.prefetch(fb.offset_const(at, stream + line * 64), cache);
            }
        }
    }
}
