//! Tiles (AMX): the matrix unit's registers, what blocks of rows ask for meanwhile, and matmuls of bf16 rows and weights, 16 rows x 16
//! columns x 32 k per instruction.
//!
//! In: as [`super::microkernel`], with rows and weights of bf16, these in panels of pairs (`[k/2][nr][2]`: 16 columns of 32 k are 16 rows
//! of a tile, 64 bytes each). Out: the loop over k of up to [`ROWS`] rows and a panel, and that of few rows by FMA.
//!
//! TDPBF16PS adds to a sum what it makes of 32 k: products of even k and of odd k in a chain of FMA from zero each, and the two together.
//! Few rows do the same by FMA, so that they have the same bits (but for numbers below 2^-126, which tiles take for zero, and which no sum
//! that matters notices). They wait for memory either way.
//!
//! Registers: four tiles of sums (two of rows, two of columns), and the two rows' and two columns' that they are made of: each is used
//! twice. The number of rows is a value: the unit takes as long as there are rows, whatever k and columns.
//!
//! Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1 chapter 18 (tile configuration), volume 2 (TDPBF16PS,
//! TILELOADD). The order of additions was compared with the instruction's results (docs/machines/granite-rapids.md): 2.3 million sums, all
//! the same.

use super::microkernel::{AHEAD_SHIFT, At, Feed, L1, Microkernel, PAGE, Start, WINDOW_BYTES, WINDOW_PAGES, Walk, window_round};
use super::widening::Widening;
use crate::isa::BF16_TILE_K;
use crate::llvm::builder::{Cmp, Elem, Fb, Ty, Value};
use crate::program::{Compute, DType};
use rcompile_runtime::abi::PROBE_MULTIPLY_ADDS;
use std::ops::Range;

/// Rows of a tile, and columns.
pub(super) const SIDE: u32 = 16;
/// Most rows of a block: two tiles.
pub(super) const ROWS: u32 = 2 * SIDE;
/// Bytes of a row of a tile.
pub(super) const ROW: u32 = 64;
/// k of a step of bf16.
const BF16_K: u32 = BF16_TILE_K;
const _: () = assert!(BF16_K * 2 == ROW && ROWS == crate::program::TILE_ROWS);
/// Instructions behind a product of tiles, and behind a load, see [`step`]. (Six and two do most of it, four behind a product nothing.)
const BEHIND_PRODUCT: u32 = 8;
const BEHIND_LOAD: u32 = 4;
/// Bytes of a configuration of the tile registers.
const CONFIG: usize = 64;

/// Tile register of the sums of rows `i` and columns `j`.
pub(super) fn sums(i: u32, j: u32) -> u32 {
    2 * i + j
}
/// Of rows `i`.
pub(super) fn rows(i: u32) -> u32 {
    4 + i
}
/// Of columns `j`.
pub(super) fn columns(j: u32) -> u32 {
    6 + j
}

/// Shapes of the registers for `m` rows, of which a step has `row_bytes` bytes.
fn config(m: u32, row_bytes: u32) -> [u8; CONFIG] {
    let mut bytes = [0; CONFIG];
    bytes[0] = 1;
    let mut shape = |register: u32, rows: u32, row_bytes: u32| {
        bytes[16 + 2 * register as usize] = row_bytes as u8;
        bytes[48 + register as usize] = rows as u8;
    };
    for i in 0..m.div_ceil(SIDE) {
        let m = SIDE.min(m - i * SIDE);
        shape(rows(i), m, row_bytes);
        (0..2).for_each(|j| shape(sums(i, j), m, ROW));
    }
    (0..2).for_each(|j| shape(columns(j), row_bytes / 4, ROW));
    bytes
}

/// The shapes that the registers have: a change takes as long as some forty instructions on tiles, and most blocks of rows have as many
/// rows as the one before.
pub(super) struct Shapes<'c> {
    /// Configurations by the number of rows.
    table: Value<'c>,
    /// Address of the number of rows that the registers are shaped for; 0: none.
    rows: Value<'c>,
}

impl<'c> Shapes<'c> {
    /// None yet, for rows of which a step has `row_bytes` bytes.
    pub fn new(fb: &Fb<'_, 'c>, row_bytes: u32) -> Self {
        let bytes: Vec<u8> = (0..=ROWS).flat_map(|m| config(m, row_bytes)).collect();
        let words: Vec<i64> = bytes.chunks(8).map(|word| i64::from_le_bytes(word.try_into().expect("eight bytes"))).collect();
        let rows = fb.stack(8, 8);
        fb.store(fb.int(0), rows, 8);
        Shapes { table: fb.module().const_table("tiles", &words), rows }
    }
    /// Shapes them for `m` rows.
    pub fn set(&self, fb: &Fb<'_, 'c>, m: Value<'c>) {
        let differ = fb.cmp(Cmp::Ne, m, fb.load(Ty::I64, self.rows, 8));
        fb.if_(differ, || {
            fb.tile_config(fb.index(self.table, m, CONFIG as u64));
            fb.store(m, self.rows, 8);
        });
    }
}

/// Where a product of tiles finds things.
#[derive(Clone, Copy)]
pub(super) struct TileAt<'c> {
    /// Rows (of codes whose values are taken: these).
    pub a: Value<'c>,
    /// The panel.
    pub w: Value<'c>,
    /// Its sums.
    pub tile: Value<'c>,
}

/// What a block of rows asks for while it goes through a panel: lines as they lie, into L2, since they are wanted much later, or rounds, a
/// line of each page of a window (see [`window_round`]), into L1, as soon as possible. Of a round only the first address is computed: with
/// that of each line, asking took more instructions than all else between the products of 32 rows (docs/machines/sapphire-rapids.md).
#[derive(Clone, Copy)]
pub(super) struct Ahead<'c> {
    /// Address of the first one.
    at: Value<'c>,
    /// Those before, in `2^-`[`AHEAD_SHIFT`].
    before: Value<'c>,
    /// How many at a time, likewise.
    each: Value<'c>,
    /// What these are.
    unit: Unit,
}

/// What is asked for at once.
#[derive(Clone, Copy)]
enum Unit {
    /// A line, into this cache.
    Line(u32),
    /// A round of a window, into L1.
    Round,
}

impl<'c> Ahead<'c> {
    /// `bytes` bytes from `at` on, into `cache`, in so many steps of [`Microkernel::tile_step`] of so many tiles of rows.
    pub fn lines(fb: &Fb<'_, 'c>, at: Value<'c>, bytes: Value<'c>, cache: u32, steps: (Value<'c>, u32)) -> Self {
        Ahead { at, before: fb.int(0), each: Ahead::part(fb, bytes, 64, steps), unit: Unit::Line(cache) }
    }
    /// Of what is read from `start` on in one stream, the `bytes` bytes a window behind those at `offset`, for as many steps.
    pub fn in_windows(fb: &Fb<'_, 'c>, (start, offset): (Value<'c>, Value<'c>), bytes: Value<'c>, steps: (Value<'c>, u32)) -> Self {
        const ROUND_BYTES: u64 = 64 * WINDOW_PAGES as u64;
        let before = fb.mul_int(offset, (1 << AHEAD_SHIFT) / ROUND_BYTES as i64);
        // (At least all, so that a round which two panels share is not left out.)
        let each = fb.add_int(Ahead::part(fb, bytes, ROUND_BYTES, steps), 1);
        Ahead { at: fb.offset_const(start, WINDOW_BYTES), before, each, unit: Unit::Round }
    }
    /// Units of `unit` bytes at a time, in `2^-`[`AHEAD_SHIFT`].
    fn part(fb: &Fb<'_, 'c>, bytes: Value<'c>, unit: u64, (steps, row_tiles): (Value<'c>, u32)) -> Value<'c> {
        let times = fb.mul_int(fb.max(steps, fb.int(1)), row_tiles.into());
        fb.div(fb.mul_int(bytes, (1 << AHEAD_SHIFT) / unit as i64), times)
    }
    /// Asks for those of time `i`.
    fn ask(&self, fb: &Fb<'_, 'c>, i: Value<'c>) {
        let [first, end] = [i, fb.add_int(i, 1)].map(|i| fb.lshr(fb.add(fb.mul(i, self.each), self.before), AHEAD_SHIFT));
        fb.for_(first, end, 1, |n| match self.unit {
            Unit::Line(cache) => fb.prefetch(fb.index(self.at, n, 64), cache),
            Unit::Round => {
                let first = fb.offset(self.at, window_round(fb, n));
                (0..WINDOW_PAGES).for_each(|page| fb.prefetch(fb.offset_const(first, u64::from(page * PAGE)), L1));
            }
        });
    }
}

/// `rows` times [`PROBE_MULTIPLY_ADDS`] on registers, `multiply_adds` by each `dot(sums, rows, columns)`: what the unit can do with numbers
/// (bf16 from 1 to 2). Registers that were never loaded take no part: their products are fast even while those of numbers take 40 cycles,
/// presumably beside another thread of the same core (docs/machines/emerald-rapids.md).
pub(super) fn probe<'c>(fb: &Fb<'_, 'c>, rows_to_do: Value<'c>, multiply_adds: u64, dot: impl Fn(u32, u32, u32)) {
    const SUMS: u64 = 4;
    let count = PROBE_MULTIPLY_ADDS / (SUMS * multiply_adds);
    assert_eq!(count * SUMS * multiply_adds, PROBE_MULTIPLY_ADDS, "a whole number of iterations");
    Shapes::new(fb, ROW).set(fb, fb.int(ROWS.into()));
    let numbers: Vec<i64> = (0..i64::from(SIDE * ROW / 8)).map(|i| 0x3f80_3f80_3f80_3f80 + i * 0x0001_0001_0001_0001).collect();
    let numbers = fb.module().const_table("numbers", &numbers);
    (0..2).flat_map(|i| [rows(i), columns(i)]).for_each(|register| fb.tile_load(register, numbers, ROW));
    fb.for_(fb.int(0), fb.mul_int(rows_to_do, count as i64), 1, |_| {
        for (i, j) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            dot(sums(i, j), rows(i), columns(j));
            fb.nops(BEHIND_PRODUCT);
        }
    });
    fb.tile_release();
}

/// Which side of a product is not used again soon: it comes past L1, where the other one, and sums, shall stay.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Once {
    Rows,
    Columns,
}

/// A step: `row_tiles` tiles of rows at `a`, `stride` bytes each, times `tile_columns` tiles of columns at `w`, by `dot(sums, rows,
/// columns)`; `behind(n)` comes behind product `n`, some instructions in any case.
///
/// A core that another thread uses too, presumably, takes two to three times as long for products of tiles, and loads, that come one right
/// behind the other. A few instructions between them, whatever these are, undo most of that, and cost nothing while tiles are fast
/// (docs/machines/sapphire-rapids.md). All loads come first for the same reason.
fn step<'c>(
    fb: &Fb<'_, 'c>,
    (row_tiles, tile_columns, once): (u32, u32, Once),
    (a, stride): (Value<'c>, u32),
    w: Value<'c>,
    dot: impl Fn(u32, u32, u32),
    behind: &dyn Fn(u32),
) {
    let load = |side: Once, register: u32, at: Value<'c>, stride: u32| {
        match once == side {
            true => fb.tile_load_once(register, at, stride),
            false => fb.tile_load(register, at, stride),
        }
        fb.nops(BEHIND_LOAD);
    };
    (0..row_tiles).for_each(|i| load(Once::Rows, rows(i), fb.offset_const(a, u64::from(i * SIDE) * u64::from(stride)), stride));
    (0..tile_columns).for_each(|j| load(Once::Columns, columns(j), fb.offset_const(w, u64::from(j * ROW)), tile_columns * ROW));
    for i in 0..row_tiles {
        for j in 0..tile_columns {
            dot(sums(i, j), rows(i), columns(j));
            behind(i * tile_columns + j);
        }
    }
}

/// Which of so many pieces of other work come behind product `number` of `products`, so that all are done behind the last one.
pub(super) fn pieces_behind(number: u32, products: u32, pieces: u32) -> Range<u32> {
    number * pieces / products..(number + 1) * pieces / products
}

/// `out = a w`, or `out + a w` where it `adds`: `row_tiles` tiles of rows of bf16 at `a`, 32 columns of pairs of k at `w` (`[k /
/// 2][32][2]`), `steps` times 32 k; `a` and `out` with the bytes of their rows. Columns come past L1: attention uses them once for 32
/// pairs, and scores shall stay there.
pub(super) fn multiply<'c>(
    fb: &Fb<'_, 'c>,
    row_tiles: u32,
    (a, stride): (Value<'c>, u32),
    w: Value<'c>,
    steps: Value<'c>,
    (out, out_stride): (Value<'c>, u32),
    adds: bool,
) {
    const COLUMNS: u32 = 2;
    let each_sum = |each: &dyn Fn(u32, Value<'c>)| {
        for (i, j) in (0..row_tiles).flat_map(|i| (0..COLUMNS).map(move |j| (i, j))) {
            each(sums(i, j), fb.offset_const(out, u64::from(i * SIDE * out_stride + j * ROW)));
        }
    };
    each_sum(&|sums, at| if adds { fb.tile_load(sums, at, out_stride) } else { fb.tile_zero(sums) });
    fb.for_(fb.int(0), steps, 1, |i| {
        let (a, w) = (fb.index(a, i, ROW.into()), fb.index(w, i, u64::from(BF16_K / 2 * COLUMNS * ROW)));
        step(fb, (row_tiles, COLUMNS, Once::Columns), (a, stride), w, |sums, rows, columns| fb.tile_dot_bf16(sums, rows, columns), &|_| {
            fb.nops(BEHIND_PRODUCT)
        });
    });
    each_sum(&|sums, at| fb.tile_store(sums, at, out_stride));
}

impl Microkernel {
    /// Step `number`: `row_tiles` tiles of rows at `a`, `stride` bytes each, times a panel's columns at `w`, by `dot(sums, rows, columns)`,
    /// `behind(n)`, if there is such work, behind product `n`. What comes next is asked for a few lines at a time: those that wait for
    /// memory hold the few places that lines for the tiles want too.
    pub(super) fn tile_step<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        (row_tiles, number): (u32, Value<'c>),
        (a, stride): (Value<'c>, u32),
        w: Value<'c>,
        ahead: &[Ahead<'c>],
        (dot, behind): (impl Fn(u32, u32, u32), Option<&dyn Fn(u32)>),
    ) {
        let tile_columns = self.product.panels.nr / SIDE;
        let behind = |product: u32| {
            match behind {
                Some(behind) => behind(product),
                None => fb.nops(BEHIND_PRODUCT),
            }
            if (product + 1).is_multiple_of(tile_columns) {
                let time = fb.add_int(fb.mul_int(number, row_tiles.into()), (product / tile_columns).into());
                ahead.iter().for_each(|ahead| ahead.ask(fb, time));
            }
        };
        step(fb, (row_tiles, tile_columns, Once::Rows), (a, stride), w, dot, &behind);
    }
    /// `each(register, address)` of the sums, where rows have `nr` elements of four bytes from `at` on.
    pub(super) fn each_sum<'c>(&self, fb: &Fb<'_, 'c>, row_tiles: u32, at: Value<'c>, each: impl Fn(u32, Value<'c>)) {
        let tile_columns = self.product.panels.nr / SIDE;
        for (i, j) in (0..row_tiles).flat_map(|i| (0..tile_columns).map(move |j| (i, j))) {
            each(sums(i, j), fb.offset_const(at, u64::from(i * SIDE * self.product.panels.nr * 4 + j * ROW)));
        }
    }

    /// `steps` times 32 k of up to `row_tiles` tiles of rows of bf16 at `at.a` (of codes: their values) and the panel at `at.w`: leaves
    /// the sums in the tile, as [`Microkernel::emit`] does. `nibbles`: the panel is one of these, each group of which is made bf16 while
    /// tiles multiply the one before, a few vectors behind each product: as a whole between the products of two groups it takes a third
    /// longer (docs/machines/emerald-rapids.md), and several groups at a time longer still (docs/machines/granite-rapids.md).
    pub(super) fn emit_bf16_tiles<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        (row_tiles, steps): (u32, Value<'c>),
        at: TileAt<'c>,
        start: Start<'c>,
        ahead: &[Ahead<'c>],
        nibbles: Option<&Microkernel>,
    ) {
        let (nr, size) = (self.product.panels.nr, DType::Bf16.size() as u32);
        let row_bytes = nr * 4;
        let stride = match self.product.compute {
            Compute::CodesInBf16Tiles => self.product.a_stride,
            _ => self.product.a_stride * size,
        };
        let clear = || self.each_sum(fb, row_tiles, at.tile, |sums, _| fb.tile_zero(sums));
        match start {
            Start::Zero => clear(),
            Start::Tile { keep } => {
                let load = || self.each_sum(fb, row_tiles, at.tile, |sums, at| fb.tile_load(sums, at, row_bytes));
                fb.either(fb.cmp(Cmp::Eq, keep, fb.i32(0)), clear, load);
            }
        }
        let step_bytes = u64::from(BF16_K * nr * size);
        let step_at = |i: Value<'c>, w: Value<'c>, behind: Option<&dyn Fn(u32)>| {
            let a = fb.index(at.a, i, ROW.into());
            let dot = |sums, rows, columns| fb.tile_dot_bf16(sums, rows, columns);
            self.tile_step(fb, (row_tiles, i), (a, stride), w, ahead, (dot, behind));
        };
        match nibbles {
            None => fb.for_(fb.int(0), steps, 1, |i| step_at(i, fb.index(at.w, i, step_bytes), None)),
            Some(nibbles) => {
                // Two buffers in turns.
                let buffers = fb.stack(2 * step_bytes, 64);
                let buffer = |i: Value<'c>| fb.index(buffers, fb.and(i, fb.int(1)), step_bytes);
                let group_bytes = nibbles.group_bytes(fb.isa()).0;
                Widening::new(fb, nibbles, at.w, buffer(fb.int(0))).all(fb);
                fb.for_(fb.int(0), steps, 1, |i| {
                    // (Behind the last group: that one once more.)
                    let next = fb.add_int(i, 1);
                    let w = fb.index(at.w, fb.min(next, fb.add_int(steps, -1)), group_bytes);
                    let widening = Widening::new(fb, nibbles, w, buffer(next));
                    let products = row_tiles * (nr / SIDE);
                    let make = |product| pieces_behind(product, products, widening.pieces()).for_each(|piece| widening.piece(fb, piece));
                    step_at(i, buffer(i), Some(&make));
                });
            }
        }
        self.each_sum(fb, row_tiles, at.tile, |sums, at| fb.tile_store(sums, at, row_bytes));
    }

    /// `steps` times 32 k of few rows, from zero: as [`Microkernel::emit`], in the order of the tiles.
    pub(super) fn emit_in_order_of_tiles<'c>(&self, fb: &Fb<'_, 'c>, walk: Walk, at: At<'c>, steps: Value<'c>, feed: Feed<'c>) {
        let Feed::Stream(reading) = feed else { unreachable!("blocks of rows go by tiles") };
        let (product, lanes, nr) = (&self.product, fb.lanes(), self.product.panels.nr);
        let (streams, vectors) = (self.streams(walk), self.vectors(walk, lanes));
        let pack_bytes = u64::from(nr) * self.column_bytes();
        let words = Ty::vec(Elem::I32, lanes);
        let zeros = |count: usize| vec![fb.zero(words.with(Elem::F32)); count];
        let count = walk.m as usize * vectors.len();
        // A trip count that LLVM does not see: it would unroll the loop and spill.
        let packs = fb.stack(8, 8);
        fb.store(fb.int(i64::from(BF16_K / self.k_pack)), packs, 8);
        let packs = fb.load_again(Ty::I64, packs, 8);
        let sums = fb.loop_(fb.int(0), steps, 1, &zeros(count), |i, sums| {
            let a = fb.index(at.a, i, ROW.into());
            let here = fb.mul_int(i, i64::from(BF16_K / self.k_pack) * pack_bytes as i64);
            // Sums of even k, and of odd ones.
            let halves = fb.loop_(fb.int(0), packs, 1, &zeros(2 * count), |pack, halves| {
                let mut halves = halves.to_vec();
                let here = fb.add(here, fb.mul_int(pack, pack_bytes as i64));
                self.prefetch_streams(fb, walk, (&streams, reading), at.panel, here, (pack_bytes, 1));
                let (a, w) = (fb.index(a, pack, 4), fb.offset(at.w, here));
                let row = |r: u32| fb.splat(fb.load(Ty::I32, fb.offset_const(a, u64::from(r) * u64::from(product.a_stride) * 2), 4), lanes);
                let rows: Vec<_> = (0..walk.m).map(|r| fb.split_bf16_pair(row(r))).collect();
                for (c, vector) in vectors.iter().enumerate() {
                    let weights = fb.split_bf16_pair(fb.load(words, fb.offset_const(w, *vector), lanes * 4));
                    for (r, row) in rows.iter().enumerate() {
                        let e = 2 * (r * vectors.len() + c);
                        halves[e] = fb.fma(row.0, weights.0, halves[e]);
                        halves[e + 1] = fb.fma(row.1, weights.1, halves[e + 1]);
                    }
                }
                halves
            });
            sums.iter().zip(halves.chunks(2)).map(|(sum, both)| fb.add(*sum, fb.add(both[0], both[1]))).collect()
        });
        for (value, offset) in sums.into_iter().zip(self.tile_offsets(walk, lanes)) {
            fb.store(value, fb.offset_const(at.tile, offset), lanes * 4);
        }
    }
}
