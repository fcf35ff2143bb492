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
//! Here: what a microkernel is, and its loop. `walk`: how panels are walked; `step`: rows times columns; `prefetch`: what is asked for.

mod prefetch;
mod step;
mod walk;

pub(super) use self::prefetch::{AHEAD_SHIFT, Feed, L1, L2, LINE_WORDS, PAGE, WINDOW_BYTES, WINDOW_PAGES, window_round};
use self::step::StepAt;
pub(super) use self::walk::Walk;
use super::product::Product;
use super::{int_mmla, mmla};
use crate::isa::{BF16_TILE_K, Isa};
use crate::llvm::builder::{Elem, Fb, Ty, Value};
use crate::program::{Coding, Compute, DType, FewRows};

/// Do `m` rows times `vectors` of accumulators, `held` weights, a broadcast and a mask fit the register file? Beyond this bound LLVM
/// spills inside the loop.
pub(super) fn tile_fits(isa: &Isa, m: u32, vectors: u32, held: u32) -> bool {
    m * vectors + held + 2 <= isa.registers
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
}
