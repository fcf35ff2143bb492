//! Dots of int8 records with int8 or int4 codes ([`Compute::takes_codes`](crate::program::Compute)): a step of the loop over groups
//! ([`super::groups`]), what its sums stand for, and how they are scaled. With matrix instructions the step is [`super::int_mmla`]'s, and
//! rows below are packed pairs of rows.
//!
//! ```text
//! for each group of k { s32 = start of the row;  for each step { s32 += codes . codes };  f32 += (s32 * scale of the column) * scale of the row }
//! ```
//! The sums over a group are exact, the f32 chain runs over groups: the same bits for any number of rows, panels side by side or blocks of
//! k. Where columns have zero points of their own, the start stands for minus the sum of the row's codes, and `s32 + zero * that`, exact in
//! f32 too, takes the place of s32. Every element has two accumulators. Where they fit, and up to half of the largest tile's rows, both are
//! counted to be in registers; else LLVM may spill the f32 ones, once a group: the loop over a group is the same, and more rows per read of
//! the weights hide the latency of the dots.
//!
//! Nibbles are taken apart in registers. That costs a fifth of the dots of 8 rows, unless it has pipes of its own
//! ([`Isa::nibbles_beside_dots`]), so with many blocks of rows the first one keeps what it took apart for the others
//! ([`Microkernel::kept`]), with scales as f32: `[k / group]{ [group / 4][nr][4] codes, [nr] f32 scales, zeros }` (matrix instructions:
//! `[group / 8][nr][8]`). Where there are no zeros, their place has the `3 * 2^22 * scale` of below, where that is wanted.
//!
//! Signed codes of the rows meet unsigned ones of the weights (code + 128 or + 8), as `VPDPBUSD` wants it, or signed ones (the code itself,
//! or code + 8) for `SDOT`; the start in the record makes up for the offset. Both add four products to 32 bits without saturation. Where
//! x86 has no such instruction, three do it, from signed bytes or nibbles ([`Int8Dot::Pairs`](crate::isa::Int8Dot)): the same bits.
//! Products of nibbles are small enough that 32 k of them are summed in words of 16 bits, by two instructions, before the third and the
//! addition make 32 bits of them.
//!
//! Four codes of a row reach all lanes by a broadcast from memory or, where that costs a vector instruction and the dot can take them from
//! a lane ([`Isa::lane_fma`]), from a register that holds sixteen.
//!
//! Sums start at the bits of 3 * 2^22 ([`Quantise::INTEGERS`]) and are f32 `3 * 2^22 + s32` at the end, exactly, because a sum has at most
//! 128 * 127 * 256 < 2^22, or 255 * 127 * 128 where unsigned codes wait for their zero points. `s32 * scale` is then a subtraction and a
//! product or, where an FMA may overwrite a factor ([`Isa::fma_into_factor`]), one FMA, `(3 * 2^22 + s32) * scale - 3 * 2^22 * scale`: the
//! same bits, because a scale has eleven bits and the last product is exact.
//!
//! In groups of 32 the scale of a row is a power of two, and sums start at the bits of `3 * 2^22 * scale`: integers added to them count
//! multiples of the scale. So one subtraction gives `s32 * scale of the row`, and one FMA by the scale of the column adds it. (There is a
//! sum for every eight dots, and where FMA shares their pipes a second multiplication would take a tenth of them.) With nibbles, whose
//! scales have five bits, `s32 * scale * scale` is exact, which tiles of bf16 count on.

use super::groups::{Factors, GroupRows, GroupStep, GroupSums, RowFactors, add_rows};
use super::microkernel::{Feed, Keep, LANE_ROWS, Microkernel, Walk, tile_fits};
use crate::isa::Isa;
use crate::llvm::builder::{Codes, Elem, Fb, Ty, Value};
use crate::program::{DType, Panels, Quantise};

/// k over which products of nibbles and codes are summed in words of 16 bits: eight times two of at most 15 * 127.
pub(super) const WORDS_K: u32 = 32;
const _: () = assert!(WORDS_K / 4 * 2 * 15 * 127 <= i16::MAX as u32);

/// [`Quantise::INTEGERS`] in all lanes.
pub(super) fn integers<'c>(fb: &Fb<'_, 'c>) -> Value<'c> {
    fb.f32s(Quantise::INTEGERS, fb.lanes())
}

/// Does an FMA scale sums, and take off what they have too much, where columns have no zero points?
fn scales_by_fma(isa: &Isa, group: u32) -> bool {
    isa.fma_into_factor && !Quantise::has_powers_of_two(group)
}

/// Bytes of a group of unpacked nibbles: one to a byte, scales, and zero points or what scaled sums have too much.
pub(super) fn unpacked_group(isa: &Isa, panels: &Panels, group: u32) -> u64 {
    let factors = if panels.coding.has_zeros() || scales_by_fma(isa, group) { 2 } else { 1 };
    u64::from(panels.nr) * (u64::from(group) + factors * DType::F32.size())
}

/// Bytes of `k` unpacked nibbles of a panel.
pub(super) fn unpacked_bytes(isa: &Isa, panels: &Panels, k: u32) -> u64 {
    panels.coding.group().map_or(0, |group| u64::from(k.div_ceil(group)) * unpacked_group(isa, panels, group))
}

impl Microkernel {
    /// May the f32 sums of `m` rows leave the registers while a group is summed, as far as LLVM has to? Only then may the sums of a group
    /// fill them.
    pub(super) fn sums_spill(&self, isa: &Isa, m: u32) -> bool {
        if m > isa.rows(self.product.compute) / 2 {
            return true;
        }
        // Some rows have room for both sets of sums only if they go through a panel in pieces, and then they read it twice. (Ways go one
        // after the other.)
        let vectors = self.product.panels.nr / isa.lanes;
        let fits = |sets: u32| tile_fits(isa, m * sets, vectors, self.held(isa, m, vectors));
        m > 1 && self.product.compute.dots_codes() && !fits(2) && fits(1)
    }
    /// Are products of nibbles summed in words first? Where a dot takes three instructions, two of them wait until [`WORDS_K`].
    pub(super) fn sums_in_words(&self, isa: &Isa) -> bool {
        isa.dots_in_pairs() && !self.coding.has_bytes() && self.product.compute.dots_codes()
    }
    /// Registers of a step beside the sums.
    fn held(&self, isa: &Isa, m: u32, vectors: u32) -> u32 {
        let weights = self.held_weights(m, vectors);
        if self.codes_in_lanes(isa, m) {
            return m - 1 + weights;
        }
        if isa.dots_in_pairs() && m > 1 {
            // Ones, and magnitudes that the rows share; or products on their way, of which LLVM begins more where there are more registers.
            return weights + if self.coding.has_bytes() { 1 + vectors } else { isa.registers / 16 };
        }
        weights.min(self.held_rows(m))
    }
    /// Do the sums of `m` rows times `vectors` fit, with what a step holds?
    pub(super) fn sums_fit(&self, isa: &Isa, m: u32, vectors: u32) -> bool {
        let sets = if self.sums_spill(isa, m) { 1 } else { 2 };
        tile_fits(isa, m * sets, vectors, self.held(isa, m, vectors))
    }
    /// Do codes of `m` rows wait in registers, sixteen each?
    pub(super) fn codes_in_lanes(&self, isa: &Isa, m: u32) -> bool {
        isa.lane_fma && isa.lanes == 4 && m >= LANE_ROWS && self.product.compute.dots_codes()
    }
    /// k of a step of the loop over a group. Weights that come from a cache: more, for less of a loop. From memory one pack at a time is
    /// better, whose prefetches lie evenly among the dots. Nibbles and dots in pairs need the registers of the second pack.
    pub(super) fn group_step(&self, isa: &Isa, m: u32, feed: Feed<'_>) -> u32 {
        match feed {
            _ if self.codes_in_lanes(isa, m) => 16,
            _ if self.has_nibbles() && isa.dots_in_pairs() => self.k_pack,
            Feed::Ahead { .. } if self.product.compute.dots_codes() => 2 * self.k_pack,
            _ => self.k_pack,
        }
    }
    /// Bytes of a group, and of its codes.
    pub(super) fn group_bytes(&self, isa: &Isa) -> (u64, u64) {
        let panels = &self.product.panels;
        let group = self.coding.group().expect("codes");
        let all = if self.is_unpacked() { unpacked_group(isa, panels, group) } else { panels.bytes_before(group, self.dtype) };
        (all, self.codes_bytes())
    }

    /// Byte of a record where the word is at which sums start, unless all start at [`Quantise::INTEGERS`].
    pub(super) fn start_at(&self, group: u32) -> Option<u32> {
        match self.coding.has_zeros() || self.coding.offset(self.dtype) == 0 {
            true if Quantise::has_powers_of_two(group) => Some(Quantise::scale_at(group)),
            true => None,
            false => Some(Quantise::start_at(group)),
        }
    }
    /// Factors of the columns of a walk in the group whose scales are at `at`.
    pub(super) fn factors<'c>(&self, fb: &Fb<'_, 'c>, walk: Walk, at: Value<'c>) -> Factors<'c> {
        let scales = self.scales(fb, walk, at);
        let has_zeros = self.coding.has_zeros();
        let by_fma = self.coding.group().is_some_and(|group| scales_by_fma(fb.isa(), group));
        let minus_origin = (by_fma && !has_zeros).then(|| match self.is_unpacked() {
            true => self.zeros(fb, walk, at),
            false => scales.iter().map(|s| fb.neg(fb.mul(*s, integers(fb)))).collect(),
        });
        Factors { scales, zeros: has_zeros.then(|| self.zeros(fb, walk, at)), minus_origin }
    }
    /// Stores them as f32.
    pub(super) fn keep_factors<'c>(&self, fb: &Fb<'_, 'c>, walk: Walk, keep: Keep<'c>, factors: &Factors<'c>) {
        let Factors { scales, zeros, minus_origin } = factors;
        for (factors, place) in [Some(scales), zeros.as_ref().or(minus_origin.as_ref())].into_iter().flatten().zip(0..) {
            let to = fb.offset_const(keep.scales, u64::from(self.product.panels.nr) * place * DType::F32.size());
            self.keep(fb, walk, Keep { to, ..keep }, factors.iter().copied());
        }
    }

    /// Stores a vector for each vector of columns.
    fn keep<'c>(&self, fb: &Fb<'_, 'c>, walk: Walk, keep: Keep<'c>, values: impl Iterator<Item = Value<'c>>) {
        for (c, value) in (0..).zip(values) {
            let (stream, vector) = (c / walk.vectors, c % walk.vectors);
            let at = u64::from(stream) * keep.stream + u64::from(vector * fb.lanes()) * 4;
            fb.store(value, fb.offset_const(keep.to, at), (fb.lanes() * 4).min(64));
        }
    }

    /// A step's codes at `vectors` of `w`, one to a byte: of bytes one register each, of nibbles two, which are kept if that is asked for.
    pub(super) fn codes<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        walk: Walk,
        (w, keep): (Value<'c>, Option<Keep<'c>>),
        vectors: &[u64],
    ) -> Vec<Vec<Value<'c>>> {
        let halves = self.k_pack / 4;
        let align = (fb.lanes() * 4).min(64);
        let codes = |at: &u64| {
            let words = fb.load(Ty::vec(Elem::I32, fb.lanes()), fb.offset_const(w, *at), align);
            if halves == 1 {
                return vec![words];
            }
            let low = fb.splat(fb.int_of(Elem::I32, 0x0f0f_0f0f), fb.lanes());
            vec![fb.and(words, low), fb.and(fb.lshr(words, 4), low)]
        };
        let columns: Vec<_> = vectors.iter().map(codes).collect();
        if let Some(keep) = keep {
            for half in 0..halves {
                let at = fb.offset_const(keep.to, u64::from(half * self.product.panels.nr) * 4);
                self.keep(fb, walk, Keep { to: at, ..keep }, columns.iter().map(|w| w[half as usize]));
            }
        }
        columns
    }

    /// One step: the codes at `vectors` of `w` times the rows' words (`row(r, half)`: four codes).
    fn dots<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        walk: Walk,
        sums: &mut [Value<'c>],
        (w, keep): (Value<'c>, Option<Keep<'c>>),
        vectors: &[u64],
        row: impl Fn(u32, u32) -> Value<'c>,
    ) {
        let n = vectors.len();
        let codes_are = if self.coding.has_bytes() { Codes::Bytes } else { Codes::Nibbles };
        let in_words = self.sums_in_words(fb.isa());
        // All columns first, also of a single row: LLVM takes their codes when it needs them. Rows first were 3 % slower in decoding.
        let columns = self.codes(fb, walk, (w, keep), vectors);
        for r in 0..walk.m {
            for half in 0..self.k_pack / 4 {
                let x = row(r, half);
                for (c, w) in columns.iter().enumerate() {
                    let e = r as usize * n + c;
                    sums[e] = match in_words {
                        true => fb.dot_nibbles(sums[e], w[half as usize], x),
                        false => fb.dot_int8(sums[e], w[half as usize], x, codes_are),
                    };
                }
            }
        }
    }

    /// The columns' scales of the group whose scales (of the piece) are at `scales`.
    pub(super) fn scales<'c>(&self, fb: &Fb<'_, 'c>, walk: Walk, scales: Value<'c>) -> Vec<Value<'c>> {
        let (lanes, dtype) = (fb.lanes(), self.scale_type());
        let bytes = u64::from(lanes) * dtype.size();
        let offsets = self.streams(walk).into_iter().flat_map(|s| (0..u64::from(walk.vectors)).map(move |v| s + v * bytes));
        offsets.map(|offset| fb.load_f32(dtype, lanes, fb.offset_const(scales, offset), (bytes as u32).min(32))).collect()
    }

    /// Their zero points, which lie behind the scales.
    pub(super) fn zeros<'c>(&self, fb: &Fb<'_, 'c>, walk: Walk, scales: Value<'c>) -> Vec<Value<'c>> {
        let behind = u64::from(self.product.panels.nr) * self.scale_type().size();
        self.scales(fb, walk, fb.offset_const(scales, behind))
    }
}

/// Rows as they are recorded, multiplied by dots.
pub(super) struct Records<'t>(pub &'t GroupStep<'t>);

impl Records<'_> {
    fn row_at<'c>(&self, fb: &Fb<'_, 'c>, a: Value<'c>, r: u32, byte: u32) -> Value<'c> {
        fb.offset_const(a, u64::from(r) * u64::from(self.0.kernel.product.a_stride) + u64::from(byte))
    }
    /// Four bytes of a row's record in all lanes.
    fn words<'c>(&self, fb: &Fb<'_, 'c>, a: Value<'c>, r: u32, byte: u32) -> Value<'c> {
        fb.splat(fb.load(Ty::I32, self.row_at(fb, a, r, byte), 4), fb.lanes())
    }
}

impl<'c> GroupRows<'c> for Records<'_> {
    fn group_bytes(&self) -> u64 {
        self.0.kernel.product.compute.record(self.0.group).into()
    }

    fn starts(&self, fb: &Fb<'_, 'c>, a: Value<'c>) -> Vec<Value<'c>> {
        let GroupStep { kernel, walk, group, vectors, .. } = self.0;
        let start = |r| match kernel.start_at(*group) {
            Some(at) => self.words(fb, a, r, at),
            None => fb.bitcast(integers(fb), Ty::vec(Elem::I32, fb.lanes())),
        };
        (0..walk.m).map(start).flat_map(|start| vec![start; vectors.len()]).collect()
    }

    fn step_bytes(&self) -> u64 {
        self.0.k.into()
    }

    fn add_step(&self, fb: &Fb<'_, 'c>, sums: &mut [Value<'c>], a: Value<'c>, (w, keep): (Value<'c>, Option<Keep<'c>>)) {
        let GroupStep { kernel, walk, k, vectors, .. } = self.0;
        let (lanes, nr) = (fb.lanes(), kernel.product.panels.nr);
        // Of a row: sixteen codes in a register, or four in each lane.
        let in_lanes: Vec<_> = match kernel.codes_in_lanes(fb.isa(), walk.m) {
            true => (0..walk.m).map(|r| fb.load(Ty::vec(Elem::I32, lanes), self.row_at(fb, a, r, 0), 4)).collect(),
            false => vec![],
        };
        for pack in 0..k / kernel.k_pack {
            let w = fb.offset_const(w, u64::from(pack * nr) * 4);
            let first = pack * kernel.k_pack / 4;
            let keep = keep.map(|keep| Keep { to: fb.offset_const(keep.to, u64::from(pack * nr) * 8), ..keep });
            kernel.dots(fb, *walk, sums, (w, keep), vectors, |r, half| match in_lanes.get(r as usize) {
                Some(&words) => fb.shuffle(words, words, &vec![first + half; lanes as usize]),
                None => self.words(fb, a, r, (first + half) * 4),
            });
        }
    }

    fn add_group(&self, fb: &Fb<'_, 'c>, acc: &[Value<'c>], a: Value<'c>, (sums, columns): GroupSums<'c>) -> Vec<Value<'c>> {
        let GroupStep { kernel, walk, group, vectors, .. } = self.0;
        let rows = (0..walk.m).map(|r| RowFactors {
            scale: fb.load_broadcast(DType::F32, fb.lanes(), self.row_at(fb, a, r, Quantise::scale_at(*group))),
            bias: kernel.coding.has_zeros().then(|| self.words(fb, a, r, Quantise::start_at(*group))),
        });
        add_rows(fb, *group, (acc, &sums), columns.as_ref(), rows, vectors.len())
    }
}
