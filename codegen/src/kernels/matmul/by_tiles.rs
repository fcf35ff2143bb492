//! Blocks of rows of a matmul by tiles (AMX): how a pass of rows goes over the weights.
//!
//! In: a [`Matmul`] whose compute is [`by_tiles`](crate::program::Compute::by_tiles), as [`super`]. Out: the loops of a pass, and the
//! functions that they call for up to 16 or 32 rows.
//!
//! ```text
//! for block of panels { for turn of k { for two panels { for block of k { apart;  for block of 32 rows { tilesN: products, the epilogue at the last k } } } }  group nests }
//! ```
//! Tiles are so fast that lines which come from L2 bound them. A block of k of two panels stays in L1 while all rows of the pass go by,
//! whose lines are loaded as not used again soon (TILELOADDT1), or they would push it out; each is used for both panels. Or it is as long
//! as a turn and comes from L2, and sums need not be loaded and stored between blocks: which is better depends on the CPU
//! ([`Streams::tile_k`](crate::isa::Streams)). The rows of a turn stay in L2, so that a long K has several turns, between which the sums of
//! all panels wait in the scratch. Weights of the next block come to L2 meanwhile, some lines by each block of rows.
//!
//! A single block of rows has nothing to share and waits for memory: it goes through panel after panel as few rows do, and asks for the lines
//! of several pages in turns. Asked for in one stream, they come at two thirds of the rate of a plain read.
//!
//! ```text
//! for panel of a piece { for way { aloneN: for group of k { (nibbles apart;)  products };  epilogue } }  group nests
//! ```
//!
//! Measured on Granite Rapids (docs/machines/granite-rapids.md); a single block, and long ones, on Emerald Rapids
//! (docs/machines/emerald-rapids.md).

use super::*;

/// Panels (of all ways) that rows go through side by side. (Prompt of 512, bf16, against one panel with blocks of twice the k: 1.07.)
const PANELS: u32 = 2;
/// Shapes of a kernel's registers.
pub(super) fn shapes<'c>(fb: &Fb<'_, 'c>, kernel: &Matmul) -> tiles::Shapes<'c> {
    tiles::Shapes::new(fb, int_tiles::row_bytes(kernel))
}

/// Functions of several blocks of rows.
pub(super) struct Several<'c> {
    /// For a block of one tile of rows, and of two, or only of two.
    pub rows: Vec<Function<'c>>,
    /// Takes nibbles apart for them.
    pub apart: Option<Function<'c>>,
}

/// Calls `then` for the function of `rows` rows, where there are some of one tile, and of two.
pub(super) fn of_rows<'c>(fb: &Fb<'_, 'c>, rows: Value<'c>, functions: &[Function<'c>], then: impl Fn(&Function<'c>)) {
    match functions {
        [one] => then(one),
        [one, two] => {
            let is_one = fb.cmp(Cmp::Le, rows, fb.int(tiles::SIDE.into()));
            fb.either(is_one, || then(one), || then(two));
        }
        _ => unreachable!("a block has one or two tiles of rows, and a function"),
    }
}

/// Panels side by side of a kernel; `None`: not by tiles.
pub(super) fn panels(kernel: &Matmul) -> Option<u32> {
    kernel.compute.by_tiles().then(|| PANELS.div_ceil(kernel.panels.ways))
}

/// Most rows of a pass.
pub(super) fn pass_rows(program: &Program, kernel: &Matmul) -> u32 {
    let capacity = program.capacity(kernel.rows);
    if kernel.tile.m_block == 0 { capacity } else { capacity.min(kernel.tile.m_block) }
}

/// Blocks of `k` k in a turn: the rows of a pass take half of L2 at most.
pub(super) fn turn(isa: &Isa, program: &Program, kernel: &Matmul, k: u32) -> u32 {
    let row_bytes = match kernel.panels.coding.group() {
        Some(group) if kernel.compute.takes_codes() => k / group * kernel.compute.record(group),
        _ => k * DType::Bf16.size() as u32,
    };
    let bytes = u64::from(pass_rows(program, kernel)) * u64::from(row_bytes);
    ((isa.l2_bytes / 2 / bytes) as u32).max(1)
}

impl<'c> Generator<'_, 'c> {
    /// Several blocks of rows by tiles over the share's blocks of panels: a pass `(first row, rows)`.
    pub(super) fn pass_by_tiles(
        &self,
        fb: &Fb<'_, 'c>,
        share: &Share<'c>,
        blocked: &Blocked<'c>,
        pass: (Value<'c>, Value<'c>),
        nests: &Nests<'_, 'c>,
    ) {
        let (kernel, blocks) = (self.kernel, &blocked.blocks);
        let BlockFunctions::Tiles { several: Some(Several { rows: functions, apart }), .. } = &blocked.functions else { unreachable!() };
        let unit_panels = i64::from(kernel.units().1);
        let side_by_side = i64::from(panels(kernel).expect("by tiles"));
        let depth = fb.int(depth(kernel).into());
        let shapes = shapes(fb, kernel);
        let [block_k, count, turn] = [blocks.k, blocks.count, blocks.turn].map(|n| fb.int(n.into()));
        let turns = fb.div(fb.add_int(fb.add(count, turn), -1), turn);
        self.blocks_of_units(fb, fb.int(blocks.units.into()), (share.begin, share.end), |first_unit, last_unit| {
            let [first_panel, last_panel] = [first_unit, last_unit].map(|unit| fb.mul_int(unit, unit_panels));
            fb.for_(fb.int(0), turns, 1, |number| {
                let begin = fb.mul(number, turn);
                let end = fb.min(fb.add(begin, turn), count);
                fb.for_(first_panel, last_panel, side_by_side, |panel| {
                    let panel_end = fb.min(fb.add_int(panel, side_by_side), last_panel);
                    let panel_count = fb.sub(panel_end, panel);
                    // Where the panel's sums are among those of a row.
                    let sums = fb.select(fb.cmp(Cmp::Gt, turns, fb.int(1)), fb.sub(panel, first_panel), fb.int(0));
                    fb.for_(begin, end, 1, |kb| {
                        let k0 = fb.mul(kb, block_k);
                        let k = fb.min(block_k, fb.sub(depth, k0));
                        let w = fb.offset(share.w, fb.add(fb.mul_int(panel, self.panel_bytes()), self.bytes_before(fb, k0)));
                        let bytes = self.bytes_before(fb, k);
                        // What comes next: the next block of k, or the first one of the panels behind these.
                        let before = self.bytes_before(fb, fb.sub(k0, fb.mul(begin, block_k)));
                        let behind = fb.sub(fb.mul_int(panel_count, self.panel_bytes()), before);
                        let next = fb.select(fb.cmp(Cmp::Eq, fb.add_int(kb, 1), end), behind, bytes);
                        let stage = self.stage(fb, kb, fb.cmp(Cmp::Eq, fb.add_int(kb, 1), count));
                        if let Some(apart) = apart {
                            fb.call(apart, &[w, share.scratch, k, panel_count]);
                        }
                        self.blocks_of_rows(fb, pass, tiles::ROWS, |RowBlock { number, count, row, rows }| {
                            let part = fb.div(bytes, count);
                            let ahead = fb.offset(w, fb.add(next, fb.mul(number, part)));
                            let a = fb.index(self.row_of(fb, share.a, row), self.a_before(fb, k0), kernel.a.dtype.size());
                            let sums = fb.mul_int(fb.mul(sums, rows), i64::from(kernel.panels.nr * kernel.panels.ways) * 4);
                            let row_sums = fb.mul_int(fb.sub(row, pass.0), blocks.tile_row as i64);
                            let sums = fb.offset_const(fb.offset(share.scratch, fb.add(row_sums, sums)), blocks.tiles);
                            let call = |function: &Function<'c>| {
                                let rest = [a, w, share.scratch, stage, k, sums, row, rows, panel, panel_end, ahead, part];
                                fb.call(function, &[&share.call[..], &rest].concat());
                            };
                            shapes.set(fb, rows);
                            of_rows(fb, rows, functions, call);
                        });
                    });
                });
                let is_last = fb.cmp(Cmp::Eq, fb.add_int(number, 1), turns);
                fb.if_(is_last, || nests(pass.0, fb.add(pass.0, pass.1), first_unit, last_unit));
            });
        });
    }

    /// What tiles read: weights as stored, or taken apart.
    fn read_by_tiles(&self, isa: &Isa, blocks: &Blocks) -> Microkernel<'_> {
        match blocks.widen {
            true => Microkernel::kept(isa, self.kernel, blocks.widened_panel, 1),
            false => Microkernel::stored(isa, self.kernel, self.dtype, 1),
        }
    }

    /// `tiles<row_tiles>`, as [`Generator::block`]: a block of k of up to 16 or 32 rows by tiles.
    pub(super) fn tiles(
        &self,
        row_tiles: u32,
        blocks: &Blocks,
        epilogue: &Function<'c>,
        epilogue_ahead: Option<&Function<'c>>,
    ) -> Function<'c> {
        self.define_block(&format!("{}.tiles{row_tiles}", self.name), |fb, call, block| {
            let panels = &self.kernel.panels;
            let micro = self.read_by_tiles(fb.isa(), blocks);
            let w = if blocks.widen { block.widened } else { block.w };
            let most_bytes = u64::from(row_tiles * tiles::SIDE * panels.nr * panels.ways) * 4;
            let one_tile = (blocks.count == 1).then(|| fb.stack(most_bytes, 64));
            let steps = micro.steps(fb, block.k);
            let start = self.start(fb, blocks, &block);
            let block = Block { w, ..block };
            self.panels_of_block(fb, call, &block, blocks, (micro.panel_bytes, one_tile), (epilogue, epilogue_ahead), |at| {
                fb.for_(fb.int(0), fb.int(panels.ways.into()), 1, |way| {
                    let w = fb.index(at.w, way, micro.panel_bytes);
                    let tile = fb.index(at.tile, fb.mul(way, block.rows), u64::from(panels.nr) * 4);
                    let ahead = fb.index(at.ahead, way, panels.panel_bytes(self.dtype));
                    let ahead = tiles::Ahead::new(fb, ahead, block.ahead_part, (self.tile_steps(fb, steps), row_tiles));
                    self.products(fb, &micro, (block.rows, row_tiles, steps), (block.a, w, tile), start, ahead, None);
                });
            });
        })
    }

    /// `alone<row_tiles>(.., a, w, rows, first_panel, last_panel)`: up to 16 or 32 rows by tiles, all of them, times these panels, with
    /// epilogue, as [`Generator::stream`].
    pub(super) fn alone(
        &self,
        row_tiles: u32,
        blocks: &Blocks,
        epilogue: &Function<'c>,
        epilogue_ahead: Option<&Function<'c>>,
    ) -> Function<'c> {
        self.define_panels(&format!("{}.alone{row_tiles}", self.name), |fb, call, [a, w, rows, first, last]| {
            let panels = &self.kernel.panels;
            let stored = Microkernel::stored(fb.isa(), self.kernel, self.dtype, 1);
            let micro = self.read_by_tiles(fb.isa(), blocks);
            let tile = fb.stack(u64::from(row_tiles * tiles::SIDE * panels.nr * panels.ways) * 4, 64);
            let steps = micro.steps(fb, fb.int(depth(self.kernel).into()));
            fb.for_(first, last, 1, |panel| {
                let column = fb.mul_int(panel, panels.nr.into());
                if let Some(function) = epilogue_ahead {
                    fb.call(function, &[call, &[fb.int(0), rows, column]].concat());
                }
                fb.for_(fb.int(0), fb.int(panels.ways.into()), 1, |way| {
                    let before = fb.add(fb.mul_int(panel, self.panel_bytes()), fb.mul_int(way, stored.panel_bytes as i64));
                    let bytes = fb.int(stored.panel_bytes as i64);
                    let ahead = tiles::Ahead::in_windows(fb, (w, before), bytes, (self.tile_steps(fb, steps), row_tiles));
                    let way_tile = fb.index(tile, fb.mul(way, rows), u64::from(panels.nr) * 4);
                    let nibbles = blocks.widen.then_some(&stored);
                    self.products(fb, &micro, (rows, row_tiles, steps), (a, fb.offset(w, before), way_tile), Start::Zero, ahead, nibbles);
                });
                fb.call(epilogue, &[call, &[tile, fb.int(0), rows, column, fb.int(panels.nr.into())]].concat());
            });
        })
    }

    /// Calls of [`Microkernel::tile_step`] in `steps` steps of the weights.
    fn tile_steps(&self, fb: &Fb<'_, 'c>, steps: Value<'c>) -> Value<'c> {
        let each = self.kernel.panels.coding.group().map_or(1, |group| group / int_tiles::step_k(group));
        fb.mul_int(steps, each.into())
    }

    /// `steps` steps of `m` rows (in `row_tiles` tiles) at `a` and the panel of one way at `w`: leaves the sums in the tile. `nibbles`: the
    /// panel is one of these, which are taken apart, or made bf16, meanwhile.
    #[expect(clippy::too_many_arguments, reason = "what a product of tiles is made of")]
    fn products(
        &self,
        fb: &Fb<'_, 'c>,
        micro: &Microkernel<'_>,
        (m, row_tiles, steps): (Value<'c>, u32, Value<'c>),
        (a, w, tile): (Value<'c>, Value<'c>, Value<'c>),
        start: Start<'c>,
        ahead: tiles::Ahead<'c>,
        nibbles: Option<&Microkernel<'_>>,
    ) {
        let a = fb.offset_const(a, if self.kernel.compute.wants_values() { Quantise::VALUES.into() } else { 0 });
        let at = tiles::TileAt { a, w, tile };
        match self.kernel.compute {
            Compute::Bf16Tiles | Compute::CodesInBf16Tiles => micro.emit_bf16_tiles(fb, (row_tiles, steps), at, start, ahead, nibbles),
            _ => micro.emit_tiles(fb, (m, row_tiles, steps), at, start, ahead, nibbles),
        }
    }

    /// `apart(w, kept, k, panels)`: takes the nibbles of `k` k of the panels from `w` on apart.
    pub(super) fn take_apart(&self, blocks: &Blocks) -> Function<'c> {
        let name = format!("{}.apart", self.name);
        self.mb.define(&name, &[Ty::PTR, Ty::PTR, Ty::I64, Ty::I64], None, Visibility::InternalNoInline, |fb, args| {
            let [w, kept_at, k, count] = *args else { unreachable!() };
            let stored = Microkernel::stored(fb.isa(), self.kernel, self.dtype, 1);
            let kept = Microkernel::kept(fb.isa(), self.kernel, blocks.widened_panel, 1);
            let groups = stored.steps(fb, k);
            fb.for_(fb.int(0), fb.mul_int(count, self.kernel.panels.ways.into()), 1, |panel| {
                let (w, to) = (fb.index(w, panel, stored.panel_bytes), fb.index(kept_at, panel, kept.panel_bytes));
                stored.take_apart(fb, w, groups, to, &kept);
            });
        })
    }
}
