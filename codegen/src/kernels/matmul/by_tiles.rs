//! Blocks of rows of a matmul by tiles (AMX): how a pass of rows goes over the weights.
//!
//! In: a [`Matmul`] whose compute is [`by_tiles`](crate::program::Compute::by_tiles), as [`super`]. Out: the loops of a pass, which call
//! functions for up to 16 or 32 rows.
//!
//! ```text
//! for block of panels {
//!   for turn of k { for panel of a way { for block of k { apart;  for block of 32 rows { tiles<n>: products, epilogue at the last } } } }
//!   group nests
//! }
//! ```
//! Tiles are so fast that lines which come from L2 bound them. A block of k of a panel stays in L1 while all rows of the pass go by, whose
//! lines are loaded as not used again soon (TILELOADDT1), or they would push it out. The rows of a turn stay in L2, so that a long K has
//! several turns, between which the sums of all panels wait in the scratch. Weights of the next block come to L2 meanwhile, and to L1 the
//! sums that the next block of rows of bf16 adds to, some lines by each block of rows.
//!
//! A single block of rows has nothing to share and waits for memory: it goes through panel after panel as few rows do, and asks for the
//! lines of several pages in turns. Asked for in one stream, they come at two thirds of the rate of a plain read.
//!
//! ```text
//! for panel of a piece { for way { alone<n>: for group of k { products (beside them: nibbles of the next apart) };  epilogue } }
//! group nests
//! ```
//!
//! Measured on Sapphire Rapids (docs/machines/sapphire-rapids.md); turns and the rows of a pass on Granite Rapids
//! (docs/machines/granite-rapids.md), a single block on Emerald Rapids (docs/machines/emerald-rapids.md).

use super::*;

/// Shapes of a kernel's registers.
pub(super) fn shapes<'c>(fb: &Fb<'_, 'c>, product: &Product) -> tiles::Shapes<'c> {
    tiles::Shapes::new(fb, int_tiles::row_bytes(product))
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

/// Most rows of a pass.
pub(super) fn pass_rows(program: &Program, kernel: &Matmul) -> u32 {
    let capacity = program.capacity(kernel.rows);
    if kernel.tile.m_block == 0 { capacity } else { capacity.min(kernel.tile.m_block) }
}

/// Rows of a pass up to which it waits for weights, whose lines come faster in long runs than a turn of few blocks of k has.
const ROWS_BOUND_BY_WEIGHTS: u32 = 128;

/// Does a pass have turns of few blocks of k, and ask for the sums that wait between them? Passes of int8 were slower so.
fn has_short_turns(rows: u32, kernel: &Matmul) -> bool {
    rows > ROWS_BOUND_BY_WEIGHTS && kernel.compute.tiles() != Some(DType::I8)
}

/// Blocks of `k` k in a turn: the rows of a pass take half of L2 at most, and a quarter in short turns, beside the sums that wait there
/// (docs/machines/granite-rapids.md).
pub(super) fn turn(isa: &Isa, program: &Program, kernel: &Matmul, k: u32) -> u32 {
    let row_bytes = match kernel.panels.coding.group() {
        // (Of codes whose values are taken these alone.)
        Some(group) if kernel.compute.tiles() == Some(DType::I8) => k / group * kernel.compute.record(group),
        _ => k * DType::Bf16.size() as u32,
    };
    let rows = pass_rows(program, kernel);
    let part = if has_short_turns(rows, kernel) { 4 } else { 2 };
    ((isa.l2_bytes / part / (u64::from(rows) * u64::from(row_bytes))) as u32).max(1)
}

/// Are sums that wait between turns asked for?
pub(super) fn asks_for_sums(program: &Program, kernel: &Matmul, blocks: &Blocks) -> bool {
    blocks.turn < blocks.count && has_short_turns(pass_rows(program, kernel), kernel)
}

impl<'c> Generator<'_, 'c> {
    /// Several blocks of rows by tiles over the share's blocks of panels: a pass `(first row, rows)`.
    pub(super) fn pass_by_tiles(
        &self,
        fb: &Fb<'_, 'c>,
        share: &Share<'c>,
        blocks: &Blocks,
        Several { rows: functions, apart }: &Several<Function<'c>>,
        pass: (Value<'c>, Value<'c>),
        nests: &Nests<'_, 'c>,
    ) {
        let Schedule { kernel, product, .. } = self.schedule;
        let (unit_panels, ways) = (i64::from(kernel.units().1), kernel.panels.ways);
        let depth = fb.int(product.depth().into());
        let shapes = shapes(fb, product);
        let [block_k, count, turn] = [blocks.k, blocks.count, blocks.turn].map(|n| fb.int(n.into()));
        let turns = fb.div(fb.add_int(fb.add(count, turn), -1), turn);
        let way_bytes = product.panel_bytes() / i64::from(ways);
        self.blocks_of_units(fb, fb.int(blocks.units.into()), (share.begin, share.end), |first_unit, last_unit| {
            // Panels of one way.
            let [first_panel, last_panel] = [first_unit, last_unit].map(|unit| fb.mul_int(unit, unit_panels * i64::from(ways)));
            fb.for_(fb.int(0), turns, 1, |number| {
                let begin = fb.mul(number, turn);
                let end = fb.min(fb.add(begin, turn), count);
                fb.for_(first_panel, last_panel, 1, |panel| {
                    // Where the sums of the panel are among those of a block of rows, of all ways and panels.
                    let waits = fb.cmp(Cmp::Gt, turns, fb.int(1));
                    let way = fb.rem(panel, fb.int(ways.into()));
                    let place = fb.select(waits, fb.sub(panel, first_panel), way);
                    let sums_of = |row: Value<'c>, rows: Value<'c>, place: Value<'c>| {
                        let before = fb.mul_int(fb.sub(row, pass.0), blocks.kept_row as i64);
                        let before = fb.add(before, fb.mul_int(fb.mul(place, rows), i64::from(kernel.panels.nr) * 4));
                        fb.offset_const(fb.offset(share.at.scratch, before), blocks.kept_sums)
                    };
                    fb.for_(begin, end, 1, |kb| {
                        let k0 = fb.mul(kb, block_k);
                        let k = fb.min(block_k, fb.sub(depth, k0));
                        let w = fb.offset(share.at.w, fb.add(fb.mul_int(panel, way_bytes), self.bytes_before(fb, k0)));
                        let bytes = self.bytes_before(fb, k);
                        // What comes next: the next block of k, or the first one of the panel behind this.
                        let before = self.bytes_before(fb, fb.sub(k0, fb.mul(begin, block_k)));
                        let behind = fb.sub(fb.int(way_bytes), before);
                        let next_w = fb.select(fb.cmp(Cmp::Eq, fb.add_int(kb, 1), end), behind, bytes);
                        let stage = self.stage(fb, kb, fb.cmp(Cmp::Eq, fb.add_int(kb, 1), count));
                        if let Some(apart) = apart {
                            ApartArgs { w, kept: share.at.scratch, k }.call(fb, apart);
                        }
                        self.blocks_of_rows(fb, pass, tiles::ROWS, |RowBlock { number, count, row, rows }| {
                            let part = fb.div(bytes, count);
                            let ahead = fb.offset(w, fb.add(next_w, fb.mul(number, part)));
                            let a = fb.index(self.row_of(fb, share.at.a, row), self.a_before(fb, k0), kernel.a.dtype.size());
                            let tiles = sums_of(row, rows, fb.sub(place, way));
                            // Behind the last block of rows the first one follows, with the next block of k or the next panel.
                            let is_last = fb.cmp(Cmp::Eq, fb.add_int(number, 1), count);
                            let next = fb.select(fb.cmp(Cmp::Eq, fb.add_int(kb, 1), end), fb.add_int(place, 1), place);
                            let sums_ahead = fb.select(is_last, sums_of(pass.0, rows, next), sums_of(fb.add(row, rows), rows, place));
                            let call = |function: &Function<'c>| {
                                let (widened, first, last) = (share.at.scratch, panel, fb.add_int(panel, 1));
                                let block = Block { a, w, widened, stage, k, tiles, row, rows, first, last, ahead, ahead_part: part };
                                (share.at.caller, TileBlock { block, sums_ahead }).call(fb, function);
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
}
