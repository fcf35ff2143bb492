//! How an instance of rows walks panels: how many side by side, and how many vectors of each at a time.
//!
//! In: a [`Microkernel`] and a number of rows. Out: the [`Walk`] that fits the register file.

use super::{Microkernel, Multiply};
use crate::isa::Isa;

/// How one instance walks panels: `panels` side by side, `vectors` of each (from the panel's column `pass * vectors * lanes` on).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) struct Walk {
    /// Rows.
    pub m: u32,
    /// Panels side by side.
    pub panels: u32,
    /// Ways of each, side by side too: all, or one after the other.
    pub ways: u32,
    /// Vectors of each panel (of each way).
    pub vectors: u32,
    /// Passes over the panels to cover all their vectors.
    pub passes: u32,
}

impl Walk {
    /// `m` rows over weights from memory, in up to `streams` streams, with up to `most` panels side by side.
    pub(in crate::kernels) fn stream(isa: &Isa, micro: &Microkernel, m: u32, streams: u32, most: u32) -> Walk {
        let together = Walk::panel(isa, micro, m, micro.product.panels.ways.min(streams));
        // Passes would read every second line only, twice: one way after the other, then.
        let walk = if together.passes > 1 { Walk::panel(isa, micro, m, 1) } else { together };
        let side_by_side = |p: u32| p * walk.ways <= streams && micro.fits(isa, m, p * walk.vectors * walk.ways);
        let mut panels = 1;
        if walk.passes == 1 && walk.ways == micro.product.panels.ways {
            while panels < most && side_by_side(panels + 1) {
                panels += 1;
            }
        }
        Walk { panels, ..walk }
    }

    /// `m` rows over one panel from a cache. In several passes each block of rows would go through every second line of it, and then the
    /// others, which is slower from L2 (docs/machines/emerald-rapids.md): one way after the other, then.
    pub(in crate::kernels) fn block(isa: &Isa, micro: &Microkernel, m: u32) -> Walk {
        let together = Walk::panel(isa, micro, m, micro.product.panels.ways);
        if together.passes > 1 { Walk::panel(isa, micro, m, 1) } else { together }
    }

    fn panel(isa: &Isa, micro: &Microkernel, m: u32, ways: u32) -> Walk {
        let per_panel = micro.product.panels.nr / isa.lanes;
        let mut vectors = per_panel;
        while vectors > 1 && !micro.fits(isa, m, vectors * ways) {
            vectors /= 2;
        }
        Walk { m, panels: 1, ways, vectors, passes: per_panel / vectors }
    }

    /// Does a step hold its rows in registers and go through the weights, or the other way round?
    pub(super) fn holds_rows(&self, micro: &Microkernel) -> bool {
        let vectors = self.panels * self.vectors * self.ways;
        micro.multiply == Multiply::Broadcast && micro.held_rows(self.m) < micro.held_weights(self.m, vectors)
    }
}
