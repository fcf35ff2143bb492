//! Blocks of rows of a matmul by vector registers: how a pass of rows goes over the weights.
//!
//! In: a [`Matmul`], as [`super`]. Out: the loops of a pass, which call the functions of its blocks of rows.

use super::*;

impl<'c> Generator<'_, 'c> {
    /// Several blocks of rows by registers over the share's blocks of panels: a pass `(first row, rows)`, and functions for the first
    /// block of rows, where it widens weights, and for the others.
    pub(super) fn pass_by_registers(
        &self,
        fb: &Fb<'_, 'c>,
        share: &Share<'c>,
        blocks: &Blocks,
        (first, functions): (Option<&Instances<Function<'c>>>, &Instances<Function<'c>>),
        pass: (Value<'c>, Value<'c>),
        nests: &Nests<'_, 'c>,
    ) {
        let Schedule { kernel, product, .. } = self.schedule;
        let unit_panels = i64::from(kernel.units().1);
        self.blocks_of_units(fb, fb.int(blocks.units.into()), (share.begin, share.end), |first_unit, last_unit| {
            let [first_panel, last_panel] = [first_unit, last_unit].map(|unit| fb.mul_int(unit, unit_panels));
            let block_w = fb.offset(share.at.w, fb.mul_int(first_panel, product.panel_bytes()));
            let block_bytes = fb.mul_int(fb.sub(last_panel, first_panel), product.panel_bytes());
            fb.for_(fb.int(0), fb.int(blocks.count.into()), 1, |kb| {
                let k0 = fb.mul_int(kb, blocks.k.into());
                let k = fb.min(fb.int(blocks.k.into()), fb.sub(fb.int(product.depth().into()), k0));
                let before = self.bytes_before(fb, k0);
                let w = fb.offset(block_w, before);
                let is_last = fb.cmp(Cmp::Eq, kb, fb.int(i64::from(blocks.count) - 1));
                // What comes next is brought to L2 meanwhile, a part of it by each block of rows.
                let next = fb.int(kernel.panels.bytes_before(blocks.k, product.weight) as i64);
                let ahead = fb.select(is_last, fb.sub(block_bytes, before), next);
                let stage = self.stage(fb, kb, is_last);
                self.blocks_of_rows(fb, pass, kernel.tile.block_mr, |RowBlock { number, count, row, rows }| {
                    let ahead_part = fb.div(self.bytes_before(fb, k), count);
                    let a = fb.index(self.row_of(fb, share.at.a, row), self.a_before(fb, k0), kernel.a.dtype.size());
                    let tiles = fb.offset(share.at.scratch, fb.add_int(fb.mul_int(row, blocks.kept_row as i64), blocks.kept_sums as i64));
                    let ahead = fb.offset(w, fb.add(ahead, fb.mul(number, ahead_part)));
                    let (widened, first_row) = (share.at.scratch, row);
                    let call = |function: &Function<'c>| {
                        let (row, first, last) = (first_row, first_panel, last_panel);
                        let block = Block { a, w, widened, stage, k, tiles, row, rows, first, last, ahead, ahead_part };
                        (share.at.caller, block).call(fb, function);
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
}
