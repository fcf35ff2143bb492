//! Functions of rows by tiles (AMX): up to 16 or 32 rows over a block of k, or alone over all k.

use super::super::microkernel::{L1, L2, Microkernel, Start};
use super::super::{int_tiles, tiles};
use super::{ApartArgs, Block, Caller, KBlocks, Product, Span, TileBlock};
use crate::llvm::builder::{Cmp, Fb, Value};
use crate::program::DType;

impl Product {
    /// A block of k of up to 16 or 32 rows times a panel of one way, the block's first, and the epilogue after the last block of k of the
    /// last way.
    pub(super) fn tiles<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        (caller, TileBlock { block, sums_ahead }): (Caller<'c>, TileBlock<'c>),
        row_tiles: u32,
        widened: Option<u64>,
        k_blocks: KBlocks,
    ) {
        let panels = &self.panels;
        let (micro, w) = match widened {
            None => (Microkernel::stored(fb.isa(), self, 1), block.w),
            Some(panel_bytes) => (Microkernel::kept(fb.isa(), self, panel_bytes, 1), block.widened),
        };
        let Block { row, rows, first, .. } = block;
        let ways = fb.int(panels.ways.into());
        let (way, column) = (fb.rem(first, ways), fb.mul_int(fb.div(first, ways), panels.nr.into()));
        let tile = fb.index(block.tiles, fb.mul(way, rows), u64::from(panels.nr) * 4);
        let (is_last_way, is_last_k) = (fb.cmp(Cmp::Eq, fb.add_int(way, 1), ways), fb.cmp(Cmp::Ge, block.stage, fb.int(2)));
        let is_last = fb.and(is_last_way, is_last_k);

        fb.if_(is_last, || caller.ahead(fb, row, rows, column));
        let steps = micro.steps(fb, block.k);
        let times = (self.tile_steps(fb, steps), row_tiles);
        let weights = tiles::Ahead::lines(fb, block.ahead, block.ahead_part, L2, times);
        let sums = || tiles::Ahead::lines(fb, sums_ahead, fb.mul_int(rows, i64::from(panels.nr) * 4), L1, times);
        let ahead = if k_blocks == KBlocks::SeveralTurns { vec![weights, sums()] } else { vec![weights] };
        self.products(fb, &micro, (rows, row_tiles, steps), (block.a, w, tile), k_blocks.start(fb, &block), &ahead, None);
        fb.if_(is_last, || caller.epilogue(fb, block.tiles, row, rows, column, fb.int(panels.nr.into())));
    }

    /// The span's rows, up to 16 or 32, all that there are, times its panels, with epilogue, as [`Product::stream`].
    pub(super) fn alone<'c>(&self, fb: &Fb<'_, 'c>, (caller, span): (Caller<'c>, Span<'c>), row_tiles: u32) {
        let Span { a, w, row, rows, first, last } = span;
        let panels = &self.panels;
        let stored = Microkernel::stored(fb.isa(), self, 1);
        // Nibbles that are taken apart lie in buffers of a group.
        let kept = self.has_nibbles().then(|| Microkernel::kept(fb.isa(), self, 0, 1));
        let (micro, nibbles) = match &kept {
            Some(kept) => (kept, Some(&stored)),
            None => (&stored, None),
        };
        let tile = fb.stack(u64::from(row_tiles * tiles::SIDE * panels.nr * panels.ways) * 4, 64);
        let steps = micro.steps(fb, fb.int(self.depth().into()));
        let a = fb.offset_const(a, self.values_at().unwrap_or(0).into());
        fb.for_(first, last, 1, |panel| {
            let column = fb.mul_int(panel, panels.nr.into());
            caller.ahead(fb, row, rows, column);
            fb.for_(fb.int(0), fb.int(panels.ways.into()), 1, |way| {
                let before = fb.add(fb.mul_int(panel, self.panel_bytes()), fb.mul_int(way, stored.panel_bytes as i64));
                let bytes = fb.int(stored.panel_bytes as i64);
                let ahead = tiles::Ahead::in_windows(fb, (w, before), bytes, (self.tile_steps(fb, steps), row_tiles));
                let way_tile = fb.index(tile, fb.mul(way, rows), u64::from(panels.nr) * 4);
                self.products(fb, micro, (rows, row_tiles, steps), (a, fb.offset(w, before), way_tile), Start::Zero, &[ahead], nibbles);
            });
            caller.epilogue(fb, tile, row, rows, column, fb.int(panels.nr.into()));
        });
    }

    /// Calls of [`Microkernel::tile_step`] in `steps` steps of the weights.
    fn tile_steps<'c>(&self, fb: &Fb<'_, 'c>, steps: Value<'c>) -> Value<'c> {
        let each = self.panels.coding.group().map_or(1, |group| group / int_tiles::step_k(group));
        fb.mul_int(steps, each.into())
    }

    /// `steps` steps of `m` rows (in `row_tiles` tiles) at `a` and the panel of one way at `w`: leaves the sums in the tile. `nibbles`: the
    /// panel is one of these, which are taken apart, or made bf16, meanwhile.
    #[expect(clippy::too_many_arguments, reason = "what a product of tiles is made of")]
    fn products<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        micro: &Microkernel,
        (m, row_tiles, steps): (Value<'c>, u32, Value<'c>),
        (a, w, tile): (Value<'c>, Value<'c>, Value<'c>),
        start: Start<'c>,
        ahead: &[tiles::Ahead<'c>],
        nibbles: Option<&Microkernel>,
    ) {
        let at = tiles::TileAt { a, w, tile };
        match self.compute.tiles() {
            Some(DType::Bf16) => micro.emit_bf16_tiles(fb, (row_tiles, steps), at, start, ahead, nibbles),
            _ => micro.emit_tiles(fb, (m, row_tiles, steps), at, start, ahead, nibbles),
        }
    }

    /// Takes the nibbles of some k of a panel of one way apart, which has `panel_bytes` bytes then.
    pub(super) fn take_apart<'c>(&self, fb: &Fb<'_, 'c>, ApartArgs { w, kept: kept_at, k }: ApartArgs<'c>, panel_bytes: u64) {
        let stored = Microkernel::stored(fb.isa(), self, 1);
        let kept = Microkernel::kept(fb.isa(), self, panel_bytes, 1);
        stored.take_apart(fb, w, stored.steps(fb, k), kept_at, &kept);
    }
}
