//! Rows of a matmul by vector registers: few rows in one go over all k, and how a pass of more goes over the weights.
//!
//! In: a [`Matmul`], as [`super`]. Out: the loops of a pass, and the functions that they call for each number of rows of a register tile.

use super::*;

/// What a block of rows reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Weights {
    /// Weights as stored.
    Stored,
    /// Weights as stored, which it widens for the blocks of rows after it.
    Widen,
    /// Widened weights.
    Widened,
}

impl<'c> Generator<'_, 'c> {
    /// Several blocks of rows by registers over the share's blocks of panels: a pass `(first row, rows)`.
    pub(super) fn pass_by_registers(
        &self,
        fb: &Fb<'_, 'c>,
        share: &Share<'c>,
        blocked: &Blocked<'c>,
        pass: (Value<'c>, Value<'c>),
        nests: &Nests<'_, 'c>,
    ) {
        let (kernel, blocks) = (self.kernel, &blocked.blocks);
        let unit_panels = i64::from(kernel.units().1);
        let BlockFunctions::Registers { rows: functions, first } = &blocked.functions else { unreachable!() };
        self.blocks_of_units(fb, fb.int(blocks.units.into()), (share.begin, share.end), |first_unit, last_unit| {
            let [first_panel, last_panel] = [first_unit, last_unit].map(|unit| fb.mul_int(unit, unit_panels));
            let block_w = fb.offset(share.w, fb.mul_int(first_panel, self.panel_bytes()));
            let block_bytes = fb.mul_int(fb.sub(last_panel, first_panel), self.panel_bytes());
            fb.for_(fb.int(0), fb.int(blocks.count.into()), 1, |kb| {
                let k0 = fb.mul_int(kb, blocks.k.into());
                let k = fb.min(fb.int(blocks.k.into()), fb.sub(fb.int(depth(kernel).into()), k0));
                let before = self.bytes_before(fb, k0);
                let w = fb.offset(block_w, before);
                let is_last = fb.cmp(Cmp::Eq, kb, fb.int(i64::from(blocks.count) - 1));
                // What comes next is brought to L2 meanwhile, a part of it by each block of rows.
                let next = fb.int(kernel.panels.bytes_before(blocks.k, self.dtype) as i64);
                let ahead = fb.select(is_last, fb.sub(block_bytes, before), next);
                let stage = self.stage(fb, kb, is_last);
                self.blocks_of_rows(fb, pass, kernel.tile.block_mr, |RowBlock { number, count, row, rows }| {
                    let ahead_part = fb.div(self.bytes_before(fb, k), count);
                    let a = fb.index(self.row_of(fb, share.a, row), self.a_before(fb, k0), kernel.a.dtype.size());
                    let tiles = fb.offset(share.scratch, fb.add_int(fb.mul_int(row, blocks.tile_row as i64), blocks.tiles as i64));
                    let ahead = fb.offset(w, fb.add(ahead, fb.mul(number, ahead_part)));
                    let call = |function: &Function<'c>| {
                        let rest = [a, w, share.scratch, stage, k, tiles, row, rows, first_panel, last_panel, ahead, ahead_part];
                        fb.call(function, &[&share.call[..], &rest].concat());
                    };
                    let others = || self.dispatch(fb, rows, functions, call);
                    match first {
                        None => others(),
                        Some(first) => {
                            let is_first = fb.cmp(Cmp::Eq, number, fb.int(0));
                            let first = || self.dispatch(fb, rows, first, call);
                            fb.either(is_first, first, others);
                        }
                    }
                    fb.if_(is_last, || nests(row, fb.add(row, rows), first_unit, last_unit));
                });
            });
        });
    }

    /// `stream.m(.., a, w, row, first_panel, last_panel)`: the `m` rows at `a`, of which `row` is the first, times these panels, with
    /// epilogue.
    pub(super) fn stream(&self, m: u32, epilogue: &Function<'c>) -> Function<'c> {
        self.define_panels(&format!("{}.stream{m}", self.name), |fb, call, [a, w, row, first, last]| {
            let panels = &self.kernel.panels;
            let micro = Microkernel::stored(fb.isa(), self.kernel, self.dtype, m);
            let k = fb.int(depth(self.kernel).into());
            let a = self.rows(fb, call, m, a, k);
            let mut walk = Walk::stream(fb.isa(), &micro, m, panels.panels());
            let tile = fb.stack(u64::from(m * walk.panels * panels.nr * panels.ways) * 4, 64);
            let mut first = first;
            loop {
                // Whole walks; what is left is walked with about half as many panels side by side.
                let count = fb.sub(last, first);
                let end = if walk.panels == 1 { last } else { fb.sub(last, fb.rem(count, fb.int(walk.panels.into()))) };
                fb.for_(first, end, walk.panels.into(), |panel| {
                    let w = fb.offset(w, fb.mul_int(panel, self.panel_bytes()));
                    let steps = micro.steps(fb, k);
                    self.pieces(&micro, walk, fb, (a, w, tile), |at, _, _| {
                        micro.emit(fb, walk, at, steps, Start::Zero, Feed::Stream, None)
                    });
                    let column = fb.mul_int(panel, panels.nr.into());
                    let columns = fb.int((walk.panels * panels.nr).into());
                    fb.call(epilogue, &[call, &[tile, row, fb.int(m.into()), column, columns]].concat());
                });
                if walk.panels == 1 {
                    break;
                }
                (first, walk) = (end, Walk::stream(fb.isa(), &micro, m, walk.panels.div_ceil(2).min(walk.panels - 1)));
            }
        })
    }

    /// `block.m(.., a, w, widened, stage, k, tiles, row, rows, first_panel, last_panel, ahead, ahead_part)`: a block of k of the `m` rows
    /// at `a` times the panels from `w` on, and the epilogue after the last block of k.
    pub(super) fn block(
        &self,
        m: u32,
        blocks: &Blocks,
        weights: Weights,
        epilogue: &Function<'c>,
        epilogue_ahead: Option<&Function<'c>>,
    ) -> Function<'c> {
        let name = format!("{}.{}{m}", self.name, if weights == Weights::Widen { "widen" } else { "block" });
        self.define_block(&name, |fb, call, block| {
            let panels = &self.kernel.panels;
            let kept = Microkernel::kept(fb.isa(), self.kernel, blocks.widened_panel, m);
            let (kept_vector, kept_codes) = (kept.vector_bytes(fb.lanes()), kept.codes_bytes());
            let (micro, w) = match weights {
                Weights::Widened => (kept, block.widened),
                _ => (Microkernel::cached(fb.isa(), self.kernel, self.dtype, m), block.w),
            };
            let walk = Walk::block(fb.isa(), &micro, m);
            let one_tile = (blocks.count == 1).then(|| fb.stack(u64::from(m * panels.nr * panels.ways) * 4, 64));
            let a = self.rows(fb, call, m, block.a, block.k);
            let steps = micro.steps(fb, block.k);
            let rounds = walk.pieces * (panels.ways / walk.ways);
            let step = fb.div(fb.mul_int(block.ahead_part, 1 << AHEAD_SHIFT), fb.mul_int(fb.max(steps, fb.int(1)), rounds.into()));
            let start = self.start(fb, blocks, &block);
            let block = Block { w, rows: fb.int(m.into()), ..block };
            self.panels_of_block(fb, call, &block, blocks, (micro.panel_bytes, one_tile), (epilogue, epilogue_ahead), |at| {
                self.pieces(&micro, walk, fb, (a, at.w, at.tile), |piece_at, way, piece| {
                    let round = fb.add(fb.mul_int(way, walk.pieces.into()), piece);
                    let part = fb.div(fb.mul(round, block.ahead_part), fb.int(rounds.into()));
                    let feed = Feed::Ahead { at: fb.offset(at.ahead, part), step, stream: panels.panel_bytes(self.dtype) };
                    let widened = (weights == Weights::Widen).then(|| {
                        let vector = fb.mul_int(piece, walk.vectors.into());
                        let widened = fb.index(at.widened, way, blocks.widened_panel);
                        let scales = fb.index(fb.offset_const(widened, kept_codes), vector, u64::from(fb.lanes()) * 4);
                        Keep { to: fb.index(widened, vector, kept_vector), scales, stream: blocks.widened_panel }
                    });
                    micro.emit(fb, walk, piece_at, steps, start, feed, widened);
                });
            });
        })
    }

    /// All pieces of a walk of `(a, w, tile)`: `body(at, way, piece)` with the piece's addresses; the way is the first of those side by
    /// side.
    fn pieces(
        &self,
        micro: &Microkernel<'_>,
        walk: Walk,
        fb: &Fb<'_, 'c>,
        (a, panel, tile): (Value<'c>, Value<'c>, Value<'c>),
        body: impl FnOnce(At<'c>, Value<'c>, Value<'c>),
    ) {
        let (codes, scale) = (micro.codes_bytes(), micro.scale_type().size());
        let panels = &self.kernel.panels;
        let way_tile = u64::from(walk.m * walk.panels * panels.nr) * 4;
        // One round where all ways are walked side by side.
        fb.for_(fb.int(0), fb.int((panels.ways / walk.ways).into()), 1, |way| {
            let [panel, tile] = [(panel, micro.panel_bytes), (tile, way_tile)].map(|(at, bytes)| fb.index(at, way, bytes));
            fb.for_(fb.int(0), fb.int(walk.pieces.into()), 1, |piece| {
                let vector = fb.mul_int(piece, walk.vectors.into());
                let w = fb.offset(panel, fb.mul_int(vector, micro.vector_bytes(fb.lanes()) as i64));
                let scales = fb.offset(fb.offset_const(panel, codes), fb.mul_int(vector, i64::from(fb.lanes()) * scale as i64));
                let tile = fb.offset(tile, fb.mul_int(vector, i64::from(fb.lanes()) * 4));
                body(At { a, panel, w, scales, tile }, way, piece);
            });
        });
    }

    /// Rows as the register tile wants them: `k` k of the `m` rows at `a`, packed in scratch for matrix instructions.
    fn rows(&self, fb: &Fb<'_, 'c>, call: &[Value<'c>], m: u32, a: Value<'c>, k: Value<'c>) -> Value<'c> {
        let pack = match self.kernel.compute {
            Compute::Bf16Mmla => mmla::pack,
            Compute::Int8Mmla => int_mmla::pack,
            Compute::F32 | Compute::Bf16Dot | Compute::Int8Dot | Compute::Int8Tiles | Compute::CodesInBf16Tiles | Compute::Bf16Tiles => {
                return a;
            }
        };
        let offset = block_bytes(self.mb.isa(), self.program, self.kernel);
        let to = fb.offset_const(self.scratch(&Call::new(fb, self.program, call)), offset);
        pack(fb, self.kernel, m, a, k, to);
        to
    }
}
