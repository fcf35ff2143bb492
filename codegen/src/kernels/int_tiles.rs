//! Blocks of rows of a matmul of int8 records with int8 or int4 codes by tiles (AMX): 16 rows x 16 columns x 64 k per instruction.
//!
//! In: as [`super::int_dot`], whose panels and records these are, records beginning with a cache line
//! ([`Compute::record`](crate::program::Compute::record)); nibbles are taken apart: for several blocks of rows beforehand, as `int_dot`
//! keeps them ([`Microkernel::take_apart`]), their codes alone by a single one, a group before it is multiplied. Out: the loop over groups
//! of up to [`ROWS`](super::tiles::ROWS) rows and a panel.
//!
//! ```text
//! for each group of k {
//!   sums = 0
//!   for each product of a step of 64 k { sums += rows . columns;  scale some rows of the group before;  take some of the next apart }
//!   store the sums
//! }
//! ```
//! Tiles of sums cannot be scaled, so that they go through memory, as the f32 sums do, which stay in the tile of [`Microkernel::emit`], in
//! L1. A product keeps the matrix unit busy for 16 cycles, in which vectors can do a few rows; it would wait for all of them between two
//! groups (docs/machines/emerald-rapids.md). Integer sums are exact, and the f32 chain is that of `int_dot`: the same bits.
//!
//! Nibbles by 32 need no scaling ([`Compute::CodesInBf16Tiles`]): values with their scales go through the loops of bf16 ([`super::tiles`]),
//! which have the same sums, because those of a group are exact there too. Several blocks of rows read values that were made for all of
//! them ([`super::widening`]); a single one makes them itself, a group before it is multiplied.
//!
//! [`Compute::CodesInBf16Tiles`]: crate::program::Compute::CodesInBf16Tiles
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (TDPBSUD).

use super::groups::{Factors, RowFactors, add_scaled};
use super::int_dot::integers;
use super::microkernel::{Keep, Microkernel, Start, Walk};
use super::product::Product;
use super::tiles::{Ahead, ROW, SIDE, TileAt, pieces_behind};
use super::widening::Widening;
use crate::llvm::builder::{Cmp, Elem, Fb, Ty, Value};
use crate::program::{Coding, DType, Quantise};
use std::ops::Range;

/// k, and bytes of a row, of a step in groups of `group`.
pub(super) fn step_k(group: u32) -> u32 {
    group.min(ROW)
}

/// Bytes of a row of a product's tiles.
pub(super) fn row_bytes(product: &Product) -> u32 {
    match product.compute.tiles() {
        Some(DType::I8) => product.panels.coding.group().map_or(ROW, step_k),
        _ => ROW,
    }
}

impl Microkernel {
    /// A panel's columns, all at once.
    pub(super) fn all_columns(&self, lanes: u32) -> Walk {
        Walk { m: 1, panels: 1, ways: 1, vectors: self.product.panels.nr / lanes, passes: 1 }
    }

    /// Takes the nibbles of `groups` groups of the panel at `w` apart, and keeps them with their scales at `to` (see `int_dot`), or as
    /// bf16.
    pub(super) fn take_apart<'c>(&self, fb: &Fb<'_, 'c>, w: Value<'c>, groups: Value<'c>, to: Value<'c>, kept: &Microkernel) {
        let (group, nr) = (self.coding.group().expect("codes"), u64::from(self.product.panels.nr));
        let (bytes, codes) = self.group_bytes(fb.isa());
        if kept.coding == Coding::Elements {
            let kept_bytes = u64::from(group) * nr * kept.dtype.size();
            return fb.for_(fb.int(0), groups, 1, |i| Widening::new(fb, self, fb.index(w, i, bytes), fb.index(to, i, kept_bytes)).all(fb));
        }
        let walk = self.all_columns(fb.lanes());
        let (kept_bytes, kept_codes) = kept.group_bytes(fb.isa());
        fb.for_(fb.int(0), groups, 1, |i| {
            let (w, to) = (fb.index(w, i, bytes), fb.index(to, i, kept_bytes));
            fb.for_(fb.int(0), fb.int((group / self.k_pack).into()), 1, |pack| self.take_apart_pack(fb, walk, w, pack, to));
            let factors = self.factors(fb, walk, fb.offset_const(w, codes));
            self.keep_factors(fb, walk, Keep { to, scales: fb.offset_const(to, kept_codes), stream: 0 }, &factors);
        });
    }

    /// Takes word `pack` of each column of the group at `w` apart, and keeps the codes in the group at `to`.
    fn take_apart_pack<'c>(&self, fb: &Fb<'_, 'c>, walk: Walk, w: Value<'c>, pack: Value<'c>, to: Value<'c>) {
        let nr = u64::from(self.product.panels.nr);
        let keep = Keep { to: fb.index(to, pack, nr * 8), scales: to, stream: 0 };
        self.codes(fb, walk, (fb.index(w, pack, nr * 4), Some(keep)), &self.vectors(walk, fb.lanes()));
    }

    /// `groups` groups of `m` rows (in `row_tiles` tiles) at `at.a` and the panel at `at.w`, one code to a byte: leaves the f32 sums in the
    /// tile, as [`Microkernel::emit`] does. `nibbles`: the panel is one of these, each group of which is taken apart while tiles multiply
    /// the one before.
    pub(super) fn emit_tiles<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        (m, row_tiles, groups): (Value<'c>, u32, Value<'c>),
        at: TileAt<'c>,
        start: Start<'c>,
        ahead: &[Ahead<'c>],
        nibbles: Option<&Microkernel>,
    ) {
        let of = Groups::new(fb, self, nibbles, row_tiles, at);
        match start {
            Start::Zero => of.clear(m),
            Start::Tile { keep } => fb.if_(fb.cmp(Cmp::Eq, keep, fb.i32(0)), || of.clear(m)),
        }
        let (nr, stride) = (self.product.panels.nr, self.product.a_stride);
        let last = fb.add_int(groups, -1);
        let (steps, packs) = (of.group / step_k(of.group), of.group / of.stored.k_pack);
        let (of_step, of_group) = (row_tiles * (nr / SIDE), steps * row_tiles * (nr / SIDE));
        assert!(of_group.is_power_of_two(), "products of a group");
        of.take_apart(fb.int(0), fb.int(0), 0..packs);
        fb.for_(fb.int(0), groups, 1, |i| {
            let (before, next) = (fb.max(fb.add_int(i, -1), fb.int(0)), fb.add_int(i, 1));
            let to_scale = fb.select(fb.cmp(Cmp::Gt, i, fb.int(0)), m, fb.int(0));
            let factors = of.factors(before);
            // What is done behind product `n` of a group, beside it.
            let behind = |n: u32| {
                // (Behind the last group: that one once more.)
                of.take_apart(fb.min(next, last), next, pieces_behind(n, of_group, packs));
                let rows_before = |n: u32| fb.lshr(fb.mul_int(to_scale, n.into()), of_group.trailing_zeros());
                of.scale(before, factors.as_ref(), rows_before(n), rows_before(n + 1));
            };
            let (a, w) = (of.rows(i), of.codes(i));
            self.each_sum(fb, row_tiles, at.tile, |sums, _| fb.tile_zero(sums));
            for step in 0..steps {
                let k = step * step_k(of.group);
                let number = fb.add_int(fb.mul_int(i, steps.into()), step.into());
                let (a, w) = (fb.offset_const(a, k.into()), fb.offset_const(w, u64::from(k * nr)));
                let dot = |sums, rows, columns| fb.tile_dot_int8(sums, rows, columns);
                self.tile_step(fb, (row_tiles, number), (a, stride), w, ahead, (dot, Some(&|n| behind(step * of_step + n))));
            }
            self.each_sum(fb, row_tiles, of.sums, |sums, at| fb.tile_store(sums, at, of.row_bytes as u32));
        });
        of.scale(last, of.factors(last).as_ref(), fb.int(0), m);
    }
}

/// The groups of a block of rows and a panel: where they are, and what vectors do to them.
struct Groups<'a, 'm, 'c> {
    fb: &'a Fb<'m, 'c>,
    /// As codes are multiplied, and as they are stored.
    micro: &'a Microkernel,
    stored: &'a Microkernel,
    at: TileAt<'c>,
    /// k of a group.
    group: u32,
    walk: Walk,
    /// Bytes of a row of sums.
    row_bytes: u64,
    /// Integer sums of a group, which are scaled when those of the next one are stored.
    sums: Value<'c>,
    /// Codes of two groups whose nibbles are taken apart, in turns.
    apart: Option<Value<'c>>,
}

impl<'a, 'm, 'c> Groups<'a, 'm, 'c> {
    fn new(fb: &'a Fb<'m, 'c>, micro: &'a Microkernel, nibbles: Option<&'a Microkernel>, row_tiles: u32, at: TileAt<'c>) -> Self {
        let row_bytes = u64::from(micro.product.panels.nr) * 4;
        let sums = fb.stack(u64::from(row_tiles * SIDE) * row_bytes, 64);
        let apart = nibbles.map(|_| fb.stack(2 * micro.codes_bytes(), 64));
        let (group, walk) = (micro.coding.group().expect("codes"), micro.all_columns(fb.lanes()));
        Groups { fb, micro, stored: nibbles.unwrap_or(micro), at, group, walk, row_bytes, sums, apart }
    }
    /// Group `i` of the rows' records.
    fn rows(&self, i: Value<'c>) -> Value<'c> {
        self.fb.index(self.at.a, i, self.micro.product.compute.record(self.group).into())
    }
    /// Group `i` of the panel.
    fn stored(&self, i: Value<'c>) -> Value<'c> {
        self.fb.index(self.at.w, i, self.stored.group_bytes(self.fb.isa()).0)
    }
    /// Codes of group `i`, one to a byte.
    fn codes(&self, i: Value<'c>) -> Value<'c> {
        self.apart.map_or_else(|| self.stored(i), |buffers| self.apart(buffers, i))
    }
    fn apart(&self, buffers: Value<'c>, i: Value<'c>) -> Value<'c> {
        self.fb.index(buffers, self.fb.and(i, self.fb.int(1)), self.micro.codes_bytes())
    }
    /// Takes some packs of group `i` apart, in the place of group `place`.
    fn take_apart(&self, i: Value<'c>, place: Value<'c>, some: Range<u32>) {
        if let Some(buffers) = self.apart {
            let to = self.apart(buffers, place);
            some.for_each(|pack| {
                self.stored.take_apart_pack(self.fb, self.walk, self.stored(i), self.fb.int(pack.into()), to);
            });
        }
    }
    /// Scales of group `i` of the panel, where groups have some.
    fn factors(&self, i: Value<'c>) -> Option<Factors<'c>> {
        let at = || self.fb.offset_const(self.stored(i), self.stored.group_bytes(self.fb.isa()).1);
        self.micro.coding.has_group_scales().then(|| self.stored.factors(self.fb, self.walk, at()))
    }
    /// Bytes of the vectors of a row of sums.
    fn vectors(&self) -> impl Iterator<Item = u64> + use<> {
        let bytes = u64::from(self.fb.lanes()) * 4;
        (0..u64::from(self.walk.vectors)).map(move |v| v * bytes)
    }
    /// No sums yet of `m` rows.
    fn clear(&self, m: Value<'c>) {
        let (fb, lanes) = (self.fb, self.fb.lanes());
        fb.for_(fb.int(0), m, 1, |r| {
            let row = fb.index(self.at.tile, r, self.row_bytes);
            self.vectors().for_each(|v| fb.store(fb.zero(Ty::vec(Elem::F32, lanes)), fb.offset_const(row, v), lanes * 4));
        })
    }
    /// Adds the sums of group `i`, scaled, of rows from `first` to `end`.
    fn scale(&self, i: Value<'c>, factors: Option<&Factors<'c>>, first: Value<'c>, end: Value<'c>) {
        let (fb, lanes, group, micro) = (self.fb, self.fb.lanes(), self.group, self.micro);
        let a = self.rows(i);
        fb.for_(first, end, 1, |r| {
            let record = fb.index(a, r, micro.product.a_stride.into());
            let word = |at: u32| fb.splat(fb.load(Ty::I32, fb.offset_const(record, at.into()), 4), lanes);
            let ints = Ty::vec(Elem::I32, lanes);
            let first = micro.start_at(group).map_or_else(|| fb.bitcast(integers(fb), ints), word);
            let scale = fb.bitcast(word(Quantise::scale_at(group)), ints.with(Elem::F32));
            let row = RowFactors { scale, bias: micro.coding.has_zeros().then(|| word(Quantise::start_at(group))) };
            let [from, tile] = [self.sums, self.at.tile].map(|at| fb.index(at, r, self.row_bytes));
            for (c, v) in self.vectors().enumerate() {
                let sum = fb.add(fb.load(ints, fb.offset_const(from, v), lanes * 4), first);
                let to = fb.offset_const(tile, v);
                let acc = fb.load(Ty::vec(Elem::F32, lanes), to, lanes * 4);
                fb.store(add_scaled(fb, group, sum, factors, c, &row, acc), to, lanes * 4);
            }
        });
    }
}
