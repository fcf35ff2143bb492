//! The register tile of a matmul: a range of k of `m` rows times a few vectors of columns, accumulators in registers all the way.
//!
//! In: [`Microkernel`] (what the weights look like), a [`Walk`] (rows, panels side by side, vectors of each), addresses of the rows and of
//! the panels. Out: the loop over k, ended by stores of the accumulators to a tile in memory (`f32[way][row][column]`), from which the
//! epilogue reads, or the next range of k.
//!
//! A row's values reach the weights in one of these ways ([`Multiply`]): broadcast from memory one k at a time, from the lanes of a
//! register that holds several k, or as pairs of rows for matrix instructions ([`super::mmla`]). Codes have a loop over groups
//! ([`super::groups`]), and where blocks of rows take tiles few rows follow their order of additions ([`super::tiles`]).
//!
//! Weights come from memory in one of two ways ([`Feed`]). With few rows each weight is used once, and the loop has to keep as many
//! requests under way as the core allows: several streams side by side, each brought to L1 and to L2 so many bytes ahead ([`Reading`]),
//! across the end of a panel to the panel that the stream will walk next; a single one to L1 past L2, where the CPU wants that. Instances
//! with fewer than four streams spread the far prefetch over the four pages of the next 16 KB. With many rows the weights of this loop are
//! in L2 already, and each block of rows brings a part of the next block of weights there.

use super::product::Product;
use super::{int_mmla, mmla};
use crate::isa::{BF16_TILE_K, Distances, Isa};
use crate::llvm::builder::{Cmp, Elem, Fb, Ty, Value};
use crate::program::{Coding, Compute, DType, FewRows, Reading};

/// Do `m` rows times `vectors` of accumulators, `held` weights, a broadcast and a mask fit the register file? Beyond this bound LLVM
/// spills inside the loop.
pub(super) fn tile_fits(isa: &Isa, m: u32, vectors: u32, held: u32) -> bool {
    m * vectors + held + 2 <= isa.registers
}

/// Locality argument of a prefetch into L2.
pub(super) const L2: u32 = 2;
/// Locality argument of a prefetch into L1.
pub(super) const L1: u32 = 3;
/// Locality argument of a prefetch into L1 of what no other cache shall keep.
const L1_PAST_L2: u32 = 0;
/// 32-bit words of a cache line.
pub(super) const LINE_WORDS: u32 = 16;
/// Bytes of a page of memory: hardware prefetchers follow a stream inside one.
pub(super) const PAGE: u32 = 4096;
/// Pages of a prefetch window, see [`window_line`].
pub(super) const WINDOW_PAGES: u32 = 4;
/// Bytes of it.
pub(super) const WINDOW_BYTES: u64 = (WINDOW_PAGES * PAGE) as u64;

/// Byte offset of the `line`-th line to prefetch of a stream that is walked alone: the pages of a window (of the next one, for the
/// caller) in turns. A single linear stream is limited by the few requests of the L1 or by one page of hardware prefetch; four pages at
/// once keep as many requests under way as four streams do (on Sapphire Rapids 8 rows stream at 1.1 times a plain read instead of 0.7).
fn window_line<'c>(fb: &Fb<'_, 'c>, line: Value<'c>) -> Value<'c> {
    let round = fb.lshr(line, WINDOW_PAGES.trailing_zeros());
    let page = fb.and(line, fb.int(i64::from(WINDOW_PAGES) - 1));
    fb.add(window_round(fb, round), fb.mul_int(page, PAGE.into()))
}

/// The same of the first of the `round`-th lines of the pages of a window, which are a page apart.
pub(super) fn window_round<'c>(fb: &Fb<'_, 'c>, round: Value<'c>) -> Value<'c> {
    let lines = i64::from(PAGE) / 64;
    let window = fb.and(round, fb.int(-lines));
    let inside = fb.and(round, fb.int(lines - 1));
    fb.add(fb.mul_int(window, WINDOW_BYTES as i64 / lines), fb.mul_int(inside, 64))
}

/// How one instance walks panels: `panels` side by side, `vectors` of each (from the panel's column `pass * vectors * lanes` on).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Walk {
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
    pub fn stream(isa: &Isa, micro: &Microkernel, m: u32, streams: u32, most: u32) -> Walk {
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
    pub fn block(isa: &Isa, micro: &Microkernel, m: u32) -> Walk {
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
    fn holds_rows(&self, micro: &Microkernel) -> bool {
        let vectors = self.panels * self.vectors * self.ways;
        micro.multiply == Multiply::Broadcast && micro.held_rows(self.m) < micro.held_weights(self.m, vectors)
    }
}

/// Rows from which factors come from lanes. With fewer, memory limits the loop, not the broadcasts; and LLVM would load the weights of all
/// k of a step at once, which do not fit the registers.
pub(super) const LANE_ROWS: u32 = 3;

/// k of a step over weights from a cache. Instructions beside the multiply-adds count where others use the core: on a Zen 3 virtual machine
/// it is as if three a cycle were left, where six rows of AVX2 want twenty for the six cycles of their multiply-adds, and steps of one k
/// five more.
const BLOCK_STEP: u32 = 4;

/// How the rows of a tile meet its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Multiply {
    /// One k of a row (or one pack of them) is loaded into all lanes.
    Broadcast,
    /// As many k of a row as there are lanes wait in a register; a multiply-add takes its factor from one of them.
    Lane,
    /// Blocks of two rows and two columns.
    Blocks,
    /// Exact integer dots over groups of k, see `groups`.
    Groups,
    /// Even and odd k apart, over 32 k, see [`super::tiles`].
    Halves,
}

/// First values of the accumulators.
#[derive(Clone, Copy)]
pub(super) enum Start<'c> {
    /// All zero.
    Zero,
    /// What the tile holds, or zero for the first range of k.
    Tile {
        /// Mask (i32) of the bits that are kept: all or none.
        keep: Value<'c>,
    },
}

/// Fraction bits of [`Feed::Ahead`]'s step.
pub(super) const AHEAD_SHIFT: u32 = 16;

/// Where the weights are, and what is prefetched.
#[derive(Clone, Copy)]
pub(super) enum Feed<'c> {
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

/// Where widened weights are kept, as `f32[k][nr]` per panel, or nibbles taken apart (see `int_dot`).
#[derive(Clone, Copy)]
pub(super) struct Keep<'c> {
    /// Address for the first vector of the pass.
    pub to: Value<'c>,
    /// Address for the scales of its columns in the first group (nibbles).
    pub scales: Value<'c>,
    /// Bytes from one panel to the next (of one way).
    pub stream: u64,
}

/// Addresses of one step.
struct StepAt<'c> {
    a: Value<'c>,
    w: Value<'c>,
    scales: Value<'c>,
    keep: Option<Keep<'c>>,
}

/// Addresses of one register tile.
#[derive(Clone, Copy)]
pub(super) struct At<'c> {
    /// Rows (packed ones for matrix instructions), from the first k on.
    pub a: Value<'c>,
    /// First panel: what is walked beside this pass is prefetched with it.
    pub panel: Value<'c>,
    /// What the pass takes of it.
    pub w: Value<'c>,
    /// Scales of the pass's columns in the first group ([`Coding::has_group_scales`]).
    pub scales: Value<'c>,
    /// The pass's part of the tile.
    pub tile: Value<'c>,
}

/// The generator of register tiles of one product.
pub(super) struct Microkernel {
    /// Rows and panels as they are stored.
    pub product: Product,
    /// Weights as they are read.
    pub dtype: DType,
    /// Elements or codes.
    pub coding: Coding,
    /// Consecutive k of one column that lie together.
    pub k_pack: u32,
    /// k of one step of the loop: a multiple of `k_pack`.
    pub step_k: u32,
    multiply: Multiply,
    /// Bytes from one panel to the next (of one way).
    pub panel_bytes: u64,
}

impl Microkernel {
    /// Weights as stored, for tiles of `m` rows.
    pub fn stored(isa: &Isa, product: &Product, m: u32) -> Self {
        let multiply = match product.compute.few_rows() {
            FewRows::Bf16Mmla => Multiply::Blocks,
            FewRows::Int8Dot | FewRows::Int8Mmla => Multiply::Groups,
            FewRows::Bf16Halves => Multiply::Halves,
            FewRows::F32 if isa.lane_fma && m >= LANE_ROWS && product.panels.coding == Coding::Elements => Multiply::Lane,
            FewRows::F32 | FewRows::Bf16Dot => Multiply::Broadcast,
        };
        let (coding, k_pack) = (product.panels.coding, product.panels.k_pack);
        let step_k = match multiply {
            Multiply::Lane => k_pack.max(isa.lanes),
            Multiply::Groups => coding.group().unwrap_or(k_pack),
            Multiply::Halves => BF16_TILE_K,
            Multiply::Broadcast | Multiply::Blocks => k_pack,
        };
        let panel_bytes = product.panels.panel_bytes(product.weight);
        Microkernel { product: *product, dtype: product.weight, coding, k_pack, step_k, multiply, panel_bytes }
    }
    /// The same for blocks of rows, which read them from a cache.
    pub fn cached(isa: &Isa, product: &Product, m: u32) -> Self {
        let micro = Self::stored(isa, product, m);
        let long = micro.multiply == Multiply::Broadcast && micro.coding == Coding::Elements && product.compute == Compute::F32;
        Microkernel { step_k: if long { micro.step_k.max(BLOCK_STEP) } else { micro.step_k }, ..micro }
    }
    /// Weights widened to `f32[k][nr]` per panel.
    pub fn widened(isa: &Isa, product: &Product, panel_bytes: u64, m: u32) -> Self {
        let multiply = if isa.lane_fma && m >= LANE_ROWS { Multiply::Lane } else { Multiply::Broadcast };
        let step_k = if multiply == Multiply::Lane { isa.lanes } else { BLOCK_STEP };
        Microkernel { product: *product, dtype: DType::F32, coding: Coding::Elements, k_pack: 1, step_k, multiply, panel_bytes }
    }
    /// Weights as an earlier block of rows kept them: widened, or nibbles taken apart with scales as f32 (see `int_dot`), or as bf16 (see
    /// `widening`).
    pub fn kept(isa: &Isa, product: &Product, panel_bytes: u64, m: u32) -> Self {
        match product.compute {
            Compute::CodesInBf16Tiles => {
                let (dtype, coding, multiply) = (DType::Bf16, Coding::Elements, Multiply::Halves);
                Microkernel { product: *product, dtype, coding, k_pack: 2, step_k: BF16_TILE_K, multiply, panel_bytes }
            }
            compute if compute.takes_codes() => {
                Microkernel { k_pack: product.panels.k_pack / 2, panel_bytes, ..Self::stored(isa, product, m) }
            }
            _ => Self::widened(isa, product, panel_bytes, m),
        }
    }
    /// Are codes two to a byte?
    pub fn has_nibbles(&self) -> bool {
        self.coding.has_nibbles() && !self.is_unpacked()
    }
    /// Are these nibbles that an earlier block of rows took apart?
    pub fn is_unpacked(&self) -> bool {
        self.coding.has_nibbles() && self.k_pack < self.product.panels.k_pack
    }
    /// Bytes of one column that lie together.
    pub fn column_bytes(&self) -> u64 {
        match self.coding {
            Coding::Elements => u64::from(self.k_pack) * self.dtype.size(),
            _ if self.has_nibbles() => u64::from(self.k_pack / 2),
            _ => self.k_pack.into(),
        }
    }
    /// Type of a column's scale, and of its zero point, in a group.
    pub fn scale_type(&self) -> DType {
        if self.is_unpacked() { DType::F32 } else { DType::F16 }
    }
    /// Bytes of a group's codes of all columns: what lies before its scales.
    pub fn codes_bytes(&self) -> u64 {
        self.coding.group().map_or(0, |group| u64::from(group / self.k_pack * self.product.panels.nr) * self.column_bytes())
    }
    /// A block of k that is not the last one is a multiple of this.
    pub fn k_unit(&self) -> u32 {
        match self.coding.group() {
            Some(group) => group,
            None if self.multiply == Multiply::Blocks => mmla::PACK_K,
            None => self.step_k,
        }
    }
    /// Steps of `k` (i64), for [`Microkernel::emit`].
    pub fn steps<'c>(&self, fb: &Fb<'_, 'c>, k: Value<'c>) -> Value<'c> {
        // Packed rows are padded with zeros, as weights are: no step is left over.
        let k = if self.multiply == Multiply::Blocks { fb.add_int(k, i64::from(self.step_k) - 1) } else { k };
        if self.step_k == 1 { k } else { fb.lshr(k, self.step_k.trailing_zeros()) }
    }
    /// Do `m` rows times `vectors` fit the register file?
    fn fits(&self, isa: &Isa, m: u32, vectors: u32) -> bool {
        match self.multiply {
            Multiply::Broadcast => tile_fits(isa, m, vectors, self.held_weights(m, vectors).min(self.held_rows(m))),
            Multiply::Groups if self.product.compute == Compute::Int8Mmla => int_mmla::fits(isa, self, m, vectors),
            Multiply::Groups => self.sums_fit(isa, m, vectors),
            Multiply::Lane => tile_fits(isa, m, vectors, self.held_lanes(m) + self.k_pack * vectors),
            Multiply::Blocks => mmla::fits(isa, m, vectors),
            // Both halves of the rows, of a weight, and the mask that takes odd ones.
            Multiply::Halves => tile_fits(isa, 2 * m, vectors, 2 * m + 2),
        }
    }
    /// Registers of rows in lanes, beside the one that every tile has for its rows.
    fn held_lanes(&self, m: u32) -> u32 {
        if self.multiply == Multiply::Lane { m - 1 } else { 0 }
    }
    /// Registers beside the accumulators when a step holds `vectors` of weights. Those of a single row are memory operands, unless they
    /// have to be widened.
    pub(super) fn held_weights(&self, m: u32, vectors: u32) -> u32 {
        match (self.coding, self.product.compute) {
            // Nibbles, and the mask that takes them.
            (Coding::Int4 { .. }, compute) if compute.dots_codes() && self.has_nibbles() => 2 * vectors + 1,
            (Coding::Int4 { .. }, compute) if compute.dots_codes() => vectors,
            // Words and what one k of them becomes; two forms of the scales.
            (Coding::Int8Groups { .. }, Compute::F32) | (Coding::Int4 { .. }, _) => 4 * vectors,
            (Coding::Int8 { .. }, Compute::F32) => 2 * vectors,
            (Coding::Elements, Compute::F32) if self.dtype != DType::F32 => vectors,
            _ if m > 1 => vectors,
            _ => 1,
        }
    }
    /// The same when a step holds its rows, and a weight.
    pub(super) fn held_rows(&self, m: u32) -> u32 {
        match (self.coding, self.product.compute) {
            (Coding::Int4 { .. }, compute) if compute.dots_codes() => 2 * m + 3,
            (Coding::Elements, Compute::F32) => m * self.k_pack + 1,
            (_, Compute::F32) => m * self.k_pack + 4,
            _ => m + 1,
        }
    }
    /// Bytes of a vector of columns with its k.
    pub fn vector_bytes(&self, lanes: u32) -> u64 {
        u64::from(lanes) * self.column_bytes()
    }
    /// Byte offsets of a walk's streams: one per panel and way.
    pub fn streams(&self, walk: Walk) -> Vec<u64> {
        (0..u64::from(walk.panels * walk.ways)).map(|s| s * self.panel_bytes).collect()
    }
    /// Byte offsets of their vectors.
    pub fn vectors(&self, walk: Walk, lanes: u32) -> Vec<u64> {
        let bytes = self.vector_bytes(lanes);
        self.streams(walk).into_iter().flat_map(|s| (0..u64::from(walk.vectors)).map(move |v| s + v * bytes)).collect()
    }

    /// `steps` times `step_k` k (and what is left of a K that is no multiple) of one register tile: reads `walk.m` rows and the panels,
    /// leaves the accumulators in `tile: f32[way][m][panels * nr]`.
    #[expect(clippy::too_many_arguments, reason = "the operands of a loop")]
    pub fn emit<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        walk: Walk,
        at: At<'c>,
        steps: Value<'c>,
        start: Start<'c>,
        feed: Feed<'c>,
        keep: Option<Keep<'c>>,
    ) {
        if self.multiply == Multiply::Groups {
            return self.emit_groups(fb, walk, at, steps, start, feed, keep);
        }
        if self.multiply == Multiply::Halves {
            return self.emit_in_order_of_tiles(fb, walk, at, steps, feed);
        }
        let At { a, panel, w, scales, tile } = at;
        let product = &self.product;
        let lanes = fb.lanes();
        let panels = &product.panels;
        let a_size = product.a.size();
        let step_k = u64::from(self.step_k);
        let step_bytes = self.step_bytes(lanes);
        let row_bytes = if self.multiply == Multiply::Blocks { mmla::step_bytes(walk.m) } else { a_size * step_k };
        let (streams, vectors) = (self.streams(walk), self.vectors(walk, lanes));
        // Byte offset of step `i`, and of its group's scales: those of a group lie behind its codes.
        let offsets = |i: Value<'c>| {
            let offset = fb.mul_int(i, step_bytes as i64);
            match self.coding {
                Coding::Int8Groups { group, .. } | Coding::Int4 { group, .. } => {
                    let group = fb.lshr(i, (group / self.k_pack).trailing_zeros());
                    let scales = fb.mul_int(group, panels.group_bytes() as i64);
                    (fb.add(offset, fb.mul_int(group, (panels.group_bytes() - panels.scales_at()) as i64)), scales)
                }
                _ => (offset, offset),
            }
        };

        let mut acc: Vec<Value<'c>> = self.tile_offsets(walk, lanes).map(|at| self.start(fb, start, fb.offset_const(tile, at))).collect();
        if self.multiply == Multiply::Blocks {
            acc = mmla::blocks_of_rows(fb, walk.m, &acc);
        }
        let keep_at = |i: Value<'c>| keep.map(|keep| Keep { to: fb.index(keep.to, i, u64::from(panels.nr) * 4 * step_k), ..keep });
        acc = fb.loop_(fb.int(0), steps, 1, &acc, |i, acc| {
            let a = fb.index(a, i, row_bytes);
            let (codes, scale) = offsets(i);
            let w = fb.offset(w, codes);
            match feed {
                Feed::Stream(reading) => {
                    let packs = u64::from(self.step_k / self.k_pack);
                    self.prefetch_streams(fb, walk, (&streams, reading), panel, codes, (step_bytes, packs));
                }
                Feed::Ahead { at, step, stream } => self.prefetch_ahead(fb, at, fb.mul(i, step), (stream, step_bytes)),
            }
            if self.multiply == Multiply::Blocks {
                return mmla::step(fb, walk.m, a, w, &vectors, acc);
            }
            let at = StepAt { a, w, scales: fb.offset(scales, scale), keep: keep_at(i) };
            self.step(fb, walk, at, &vectors, acc, self.step_k)
        });
        let left = panels.k % self.step_k;
        if self.multiply == Multiply::Blocks {
            acc = mmla::rows_of_blocks(fb, walk.m, &acc);
        } else if left > 0 {
            let (codes, scale) = offsets(steps);
            let a = fb.index(a, steps, row_bytes);
            let at = StepAt { a, w: fb.offset(w, codes), scales: fb.offset(scales, scale), keep: keep_at(steps) };
            acc = self.step(fb, walk, at, &vectors, &acc, left);
        }
        for (value, at) in acc.into_iter().zip(self.tile_offsets(walk, lanes)) {
            fb.store(value, fb.offset_const(tile, at), lanes * 4);
        }
    }

    /// Bytes of a panel's step.
    fn step_bytes(&self, lanes: u32) -> u64 {
        u64::from(self.product.panels.nr / lanes * (self.step_k / self.k_pack)) * self.vector_bytes(lanes)
    }

    /// One step of `ks` k (`step_k`, or what is left at the end), weights at `vectors` of `at.w`.
    fn step<'c>(&self, fb: &Fb<'_, 'c>, walk: Walk, at: StepAt<'c>, vectors: &[u64], acc: &[Value<'c>], ks: u32) -> Vec<Value<'c>> {
        let StepAt { a, w, scales, keep } = at;
        let (product, lanes) = (&self.product, fb.lanes());
        let mut acc = acc.to_vec();
        let n = vectors.len();
        let dot = product.compute == Compute::Bf16Dot;
        // Multiply-adds per accumulator.
        let macs = if dot { 1 } else { ks };
        let row_at = |r: u32, k: u32| fb.offset_const(a, (u64::from(r) * u64::from(product.a_stride) + u64::from(k)) * product.a.size());
        let in_lanes: Vec<_> = match self.multiply == Multiply::Lane && ks == lanes {
            true => (0..walk.m).map(|r| fb.load_f32(product.a, lanes, row_at(r, 0), product.a.size() as u32)).collect(),
            false => vec![],
        };
        let row = |r: u32, k: u32| match (dot, in_lanes.get(r as usize)) {
            (false, Some(&values)) => fb.shuffle(values, values, &vec![k; lanes as usize]),
            (false, None) => fb.load_broadcast(product.a, lanes, row_at(r, k)),
            (true, _) if ks == self.k_pack => fb.splat(fb.load(Ty::I32, row_at(r, k), 2), lanes),
            // The last k of an odd K: `a` ends there, and the weight's partner is zero padding.
            (true, _) => fb.splat(fb.zext(fb.load(Ty::scalar(Elem::I16), row_at(r, k), 2), Elem::I32), lanes),
        };
        let align = self.vector_bytes(lanes).min(64) as u32;
        // The odd halves' words are read again where they would not find registers beside the even halves.
        let again = !tile_fits(fb.isa(), walk.m, n as u32, self.held_lanes(walk.m) + 2 * n as u32);
        let words = |at: Value<'c>, again: bool| {
            let ty = Ty::vec(Elem::I32, lanes);
            if again { fb.load_again(ty, at, align) } else { fb.load(ty, at, align) }
        };
        let zeros = self.coding.has_zeros().then(|| self.zeros(fb, walk, scales));
        let scales = self.coding.has_group_scales().then(|| self.scales(fb, walk, scales));
        let factors = |c: usize| {
            let scale = scales.as_ref()?[c];
            let minus_zero = match &zeros {
                Some(zeros) => fb.neg(zeros[c]),
                None => fb.f32s(-self.coding.offset(self.dtype) as f32, lanes),
            };
            Some((scale, fb.mul(minus_zero, scale)))
        };
        let weight = |c: usize, k: u32, again: bool| {
            if self.coding != Coding::Elements {
                return self.decode(fb, words(fb.offset_const(w, vectors[c]), false), k, factors(c));
            }
            let at = fb.offset_const(w, vectors[c] + u64::from(k / self.k_pack * product.panels.nr * self.k_pack) * self.dtype.size());
            match self.k_pack {
                2 if dot => words(at, false),
                2 => {
                    let (even, odd) = fb.split_bf16_pair(words(at, again));
                    if k.is_multiple_of(2) { even } else { odd }
                }
                _ => fb.load_f32(self.dtype, lanes, at, align),
            }
        };
        let mac = |acc: &mut Value<'c>, x: Value<'c>, w: Value<'c>| *acc = if dot { fb.dot_bf16(*acc, x, w) } else { fb.fma(x, w, *acc) };
        let keep_value = |c: u32, k: u32, value: Value<'c>| {
            if let Some(keep) = keep {
                let (stream, vector) = (c / walk.vectors, c % walk.vectors);
                let at = (k * product.panels.nr + vector * lanes) * 4;
                fb.store(value, fb.offset_const(keep.to, u64::from(stream) * keep.stream + u64::from(at)), lanes * 4);
            }
        };
        if walk.holds_rows(self) {
            let rows: Vec<Vec<_>> = (0..walk.m).map(|r| (0..macs).map(|k| row(r, k)).collect()).collect();
            for c in 0..n {
                for k in 0..macs {
                    let w = weight(c, k, false);
                    keep_value(c as u32, k, w);
                    rows.iter().enumerate().for_each(|(r, x)| mac(&mut acc[r * n + c], x[k as usize], w));
                }
            }
            return acc;
        }
        for k in 0..macs {
            let columns: Vec<_> = (0..n).map(|c| weight(c, k, k % 2 == 1 && again)).collect();
            (0..).zip(&columns).for_each(|(c, &value)| keep_value(c, k, value));
            for r in 0..walk.m {
                let x = row(r, k);
                columns.iter().enumerate().for_each(|(c, &w)| mac(&mut acc[r as usize * n + c], x, w));
            }
        }
        acc
    }

    /// Code `k` of each column's four bytes as f32, or, with the column's scale and its shift (minus the zero point times the scale), the
    /// element. Exact: 9 + 11 bits.
    fn decode<'c>(&self, fb: &Fb<'_, 'c>, words: Value<'c>, k: u32, factors: Option<(Value<'c>, Value<'c>)>) -> Value<'c> {
        let all = |v: i64| fb.splat(fb.int_of(Elem::I32, v), fb.lanes());
        let code = if self.dtype == DType::I8 {
            fb.ashr(fb.shl(words, 24 - 8 * k), 24)
        } else {
            let (shift, mask) = if self.k_pack == 8 { (8 * (k % 4) + 4 * (k / 4), 0xf) } else { (8 * k, 0xff) };
            fb.and(fb.lshr(words, shift), all(mask))
        };
        let code = fb.int_to_float(code);
        match (factors, self.coding.offset(self.dtype)) {
            (Some((scale, shift)), _) => fb.fma(code, scale, shift),
            (None, 0) => code,
            (None, offset) => fb.add(code, fb.f32s(-offset as f32, fb.lanes())),
        }
    }

    /// Byte offsets in the tile, in the order of the accumulators: by row, then stream, then vector.
    pub fn tile_offsets(&self, walk: Walk, lanes: u32) -> impl Iterator<Item = u64> {
        let (nr, ways) = (self.product.panels.nr, walk.ways);
        let width = walk.panels * nr;
        (0..walk.m).flat_map(move |r| {
            (0..walk.panels * ways).flat_map(move |stream| {
                let (panel, way) = (stream / ways, stream % ways);
                (0..walk.vectors).map(move |v| u64::from((way * walk.m + r) * width + panel * nr + v * lanes) * 4)
            })
        })
    }

    pub fn start<'c>(&self, fb: &Fb<'_, 'c>, start: Start<'c>, at: Value<'c>) -> Value<'c> {
        let ty = Ty::vec(Elem::F32, fb.lanes());
        match start {
            Start::Zero => fb.zero(ty),
            Start::Tile { keep } => {
                let bits = fb.load(ty.with(Elem::I32), at, fb.lanes() * 4);
                fb.bitcast(fb.and(bits, fb.splat(keep, fb.lanes())), ty)
            }
        }
    }

    /// Prefetches a part of what comes next: of all ways the lines from `done` bytes (in `2^-`[`AHEAD_SHIFT`]) behind `at` on. Two blocks
    /// of rows share the work, or more: half of the lines of a step, which is `step_bytes` long.
    pub fn prefetch_ahead<'c>(&self, fb: &Fb<'_, 'c>, at: Value<'c>, done: Value<'c>, (stream, step_bytes): (u64, u64)) {
        let at = fb.offset(at, fb.lshr(done, AHEAD_SHIFT));
        for way in 0..u64::from(self.product.panels.ways) {
            (0..(step_bytes / 128).max(1)).for_each(|line| fb.prefetch(fb.offset_const(at, way * stream + line * 64), L2));
        }
    }

    /// Prefetches for the `step_bytes` bytes (in `packs` equal parts) at `here` of streams that start at `panel`.
    pub fn prefetch_streams<'c>(
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
            // Beyond its end a stream goes on in the next walk's panel.
            let at = fb.add_int(here, l2.into());
            let end = self.product.panels.filled_bytes(self.product.weight);
            let past = fb.cmp(Cmp::Ge, at, fb.int(end as i64));
            let skip = streams.len() as u64 * self.panel_bytes - end;
            let at = fb.offset(panel, fb.add(at, fb.select(past, fb.int(skip as i64), fb.int(0))));
            for (stream, line) in streams.iter().flat_map(|s| lines.iter().map(move |line| (s, line))) {
                fb.prefetch(fb.offset_const(at, stream + line * 64), L2);
            }
        }
        if l1 > 0 {
            let cache = if streams.len() == 1 && reading.past_l2 { L1_PAST_L2 } else { L1 };
            let at = fb.offset(panel, fb.add_int(here, l1.into()));
            for (stream, line) in streams.iter().flat_map(|s| lines.iter().map(move |line| (s, line))) {
                fb.prefetch(fb.offset_const(at, stream + line * 64), cache);
            }
        }
    }
}
