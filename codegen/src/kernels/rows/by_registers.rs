//! Functions of rows by vector registers: few rows over all k, and a block of rows over a block of k.

use super::super::microkernel::{AHEAD_SHIFT, At, Feed, Keep, Microkernel, Start, Walk};
use super::super::{int_mmla, mmla};
use super::{Block, Caller, KBlocks, Product, Span, Weights};
use crate::llvm::builder::{Cmp, Fb, Value};
use crate::program::{FewRows, Reading};

/// Addresses of one panel (of all ways) of a block of rows.
struct PanelAt<'c> {
    w: Value<'c>,
    widened: Value<'c>,
    tile: Value<'c>,
    ahead: Value<'c>,
}

/// How a block of rows goes through its panels.
struct Passage {
    /// Bytes of a panel of one way as it is read.
    panel_bytes: u64,
    /// Bytes of one as it was widened, or is.
    widened_panel: u64,
    /// Blocks of k.
    k_blocks: KBlocks,
    /// Most rows.
    most_rows: u32,
}

impl Product {
    /// The span's rows, which are `m`, times its panels, with epilogue.
    pub(super) fn stream<'c>(&self, fb: &Fb<'_, 'c>, (caller, span): (Caller<'c>, Span<'c>), m: u32, reading: Reading) {
        let Span { a, w, row, first, last, .. } = span;
        let panels = &self.panels;
        let micro = Microkernel::stored(fb.isa(), self, m);
        let k = fb.int(self.depth().into());
        let a = self.rows(fb, &caller, m, a, k);
        let mut walk = Walk::stream(fb.isa(), &micro, m, reading.streams, reading.streams);
        let tile = fb.stack(u64::from(m * walk.panels * panels.nr * panels.ways) * 4, 64);
        let mut first = first;
        loop {
            // Whole walks; what is left is walked with about half as many panels side by side.
            let count = fb.sub(last, first);
            let end = if walk.panels == 1 { last } else { fb.sub(last, fb.rem(count, fb.int(walk.panels.into()))) };
            fb.for_(first, end, walk.panels.into(), |panel| {
                let w = fb.offset(w, fb.mul_int(panel, self.panel_bytes()));
                let steps = micro.steps(fb, k);
                self.passes(&micro, walk, fb, (a, w, tile), |at, _, _| {
                    micro.emit(fb, walk, at, steps, Start::Zero, Feed::Stream(reading), None)
                });
                let column = fb.mul_int(panel, panels.nr.into());
                let columns = fb.int((walk.panels * panels.nr).into());
                caller.epilogue(fb, tile, row, fb.int(m.into()), column, columns);
            });
            if walk.panels == 1 {
                break;
            }
            let fewer = walk.panels.div_ceil(2).min(walk.panels - 1);
            (first, walk) = (end, Walk::stream(fb.isa(), &micro, m, reading.streams, fewer));
        }
    }

    /// A block of k of the block's `m` rows times its panels, and the epilogue after the last block of k.
    pub(super) fn block<'c>(&self, fb: &Fb<'_, 'c>, (caller, block): (Caller<'c>, Block<'c>), m: u32, weights: Weights, k_blocks: KBlocks) {
        let panels = &self.panels;
        let stored = || Microkernel::cached(fb.isa(), self, m);
        let kept = |panel_bytes| Microkernel::kept(fb.isa(), self, panel_bytes, m);
        let (micro, w, widened_panel) = match weights {
            Weights::Stored => (stored(), block.w, 0),
            Weights::Widen { panel_bytes } => (stored(), block.w, panel_bytes),
            Weights::Widened { panel_bytes } => (kept(panel_bytes), block.widened, panel_bytes),
        };
        let walk = Walk::block(fb.isa(), &micro, m);
        let a = self.rows(fb, &caller, m, block.a, block.k);
        let steps = micro.steps(fb, block.k);
        let rounds = walk.passes * (panels.ways / walk.ways);
        let step = fb.div(fb.mul_int(block.ahead_part, 1 << AHEAD_SHIFT), fb.mul_int(fb.max(steps, fb.int(1)), rounds.into()));
        let start = k_blocks.start(fb, &block);
        let block = Block { w, rows: fb.int(m.into()), ..block };
        let passage = Passage { panel_bytes: micro.panel_bytes, widened_panel, k_blocks, most_rows: m };
        self.panels_of_block(fb, &caller, &block, passage, |at| {
            self.passes(&micro, walk, fb, (a, at.w, at.tile), |pass_at, way, pass| {
                let round = fb.add(fb.mul_int(way, walk.passes.into()), pass);
                let part = fb.div(fb.mul(round, block.ahead_part), fb.int(rounds.into()));
                let feed = Feed::Ahead { at: fb.offset(at.ahead, part), step, stream: panels.panel_bytes(self.weight) };
                let widened = matches!(weights, Weights::Widen { .. }).then(|| {
                    let kept = kept(widened_panel);
                    let vector = fb.mul_int(pass, walk.vectors.into());
                    let widened = fb.index(at.widened, way, widened_panel);
                    let scales = fb.index(fb.offset_const(widened, kept.codes_bytes()), vector, u64::from(fb.lanes()) * 4);
                    Keep { to: fb.index(widened, vector, kept.vector_bytes(fb.lanes())), scales, stream: widened_panel }
                });
                micro.emit(fb, walk, pass_at, steps, start, feed, widened);
            });
        });
    }

    /// All passes of a walk of `(a, w, tile)`: `body(at, way, pass)` with the pass's addresses; the way is the first of those side by
    /// side.
    fn passes<'c>(
        &self,
        micro: &Microkernel,
        walk: Walk,
        fb: &Fb<'_, 'c>,
        (a, panel, tile): (Value<'c>, Value<'c>, Value<'c>),
        body: impl FnOnce(At<'c>, Value<'c>, Value<'c>),
    ) {
        let (codes, scale) = (micro.codes_bytes(), micro.scale_type().size());
        let panels = &self.panels;
        let way_tile = u64::from(walk.m * walk.panels * panels.nr) * 4;
        // One round where all ways are walked side by side.
        fb.for_(fb.int(0), fb.int((panels.ways / walk.ways).into()), 1, |way| {
            let [panel, tile] = [(panel, micro.panel_bytes), (tile, way_tile)].map(|(at, bytes)| fb.index(at, way, bytes));
            fb.for_(fb.int(0), fb.int(walk.passes.into()), 1, |pass| {
                let vector = fb.mul_int(pass, walk.vectors.into());
                let w = fb.offset(panel, fb.mul_int(vector, micro.vector_bytes(fb.lanes()) as i64));
                let scales = fb.offset(fb.offset_const(panel, codes), fb.mul_int(vector, i64::from(fb.lanes()) * scale as i64));
                let tile = fb.offset(tile, fb.mul_int(vector, i64::from(fb.lanes()) * 4));
                body(At { a, panel, w, scales, tile }, way, pass);
            });
        });
    }

    /// Rows as the register tile wants them: `k` k of the `m` rows at `a`, packed for matrix instructions.
    fn rows<'c>(&self, fb: &Fb<'_, 'c>, caller: &Caller<'c>, m: u32, a: Value<'c>, k: Value<'c>) -> Value<'c> {
        let pack = match self.compute.few_rows() {
            FewRows::Bf16Mmla => mmla::pack,
            FewRows::Int8Mmla => int_mmla::pack,
            FewRows::F32 | FewRows::Bf16Dot | FewRows::Bf16Halves | FewRows::Int8Dot => return a,
        };
        pack(fb, self, m, a, k, caller.packed);
        caller.packed
    }

    /// The panels of a block of rows: `multiply` leaves a panel's sums in its tile; after the last block of k comes the epilogue.
    fn panels_of_block<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        caller: &Caller<'c>,
        block: &Block<'c>,
        passage: Passage,
        multiply: impl FnOnce(PanelAt<'c>),
    ) {
        let panels = &self.panels;
        let ways = u64::from(panels.ways);
        let Block { row, rows, first, .. } = *block;
        let row_bytes = u64::from(panels.nr * panels.ways) * 4;
        let tile_bytes = fb.mul_int(rows, row_bytes as i64);
        // Where nothing is kept between blocks of k, each panel's sums lie in the same place.
        let one_tile = (passage.k_blocks == KBlocks::One).then(|| fb.stack(u64::from(passage.most_rows) * row_bytes, 64));
        fb.for_(fb.int(0), fb.sub(block.last, first), 1, |panel| {
            let tile = one_tile.unwrap_or_else(|| fb.offset(block.tiles, fb.mul(panel, tile_bytes)));
            let w = fb.offset(block.w, fb.mul_int(panel, (passage.panel_bytes * ways) as i64));
            let ahead = fb.offset(block.ahead, fb.mul_int(panel, self.panel_bytes()));
            let widened = fb.offset(block.widened, fb.mul_int(panel, (passage.widened_panel * ways) as i64));
            let column = fb.mul_int(fb.add(first, panel), panels.nr.into());
            let at_last = |then: &dyn Fn()| match one_tile {
                Some(_) => then(),
                None => fb.if_(fb.cmp(Cmp::Ge, block.stage, fb.int(2)), then),
            };
            at_last(&|| caller.ahead(fb, row, rows, column));
            multiply(PanelAt { w, widened, tile, ahead });
            at_last(&|| caller.epilogue(fb, tile, row, rows, column, fb.int(panels.nr.into())));
        });
    }
}
