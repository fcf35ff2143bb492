//! The register tile of a matmul of int8 records with int8 or int4 codes ([`Compute::takes_codes`](crate::program::Compute)): the loop over
//! groups, and its step with dots. With matrix instructions the step is [`super::int_mmla`]'s, and rows below are packed pairs of rows.
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

use super::int_mmla::{Rows, block_scales};
use super::microkernel::{At, Feed, Keep, LANE_ROWS, Microkernel, Start, Walk, tile_fits};
use super::{int_mmla, mmla};
use crate::isa::Isa;
use crate::llvm::builder::{Codes, Elem, Fb, Ty, Value};
use crate::program::{Compute, DType, Panels, Quantise};

/// k over which products of nibbles and codes are summed in words of 16 bits: eight times two of at most 15 * 127.
const WORDS_K: u32 = 32;
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
fn unpacked_group(isa: &Isa, panels: &Panels, group: u32) -> u64 {
    let factors = if panels.coding.has_zeros() || scales_by_fma(isa, group) { 2 } else { 1 };
    u64::from(panels.nr) * (u64::from(group) + factors * DType::F32.size())
}

/// Bytes of `k` unpacked nibbles of a panel.
pub(super) fn unpacked_bytes(isa: &Isa, panels: &Panels, k: u32) -> u64 {
    panels.coding.group().map_or(0, |group| u64::from(k.div_ceil(group)) * unpacked_group(isa, panels, group))
}

/// What the sums of a group's columns are multiplied with, a vector for each vector of columns.
pub(super) struct Factors<'c> {
    /// Scales.
    pub scales: Vec<Value<'c>>,
    /// Zero points, where columns have their own.
    pub zeros: Option<Vec<Value<'c>>>,
    /// `-3 * 2^22 * scale`, where one FMA, `(3 * 2^22 + s32) * scale + minus_origin`, scales a sum.
    pub minus_origin: Option<Vec<Value<'c>>>,
}

/// What a record says of a row's group behind its codes, in all lanes.
pub(super) struct RowFactors<'c> {
    /// Its scale, or the origin of its sums (see [`Quantise`]).
    pub scale: Value<'c>,
    /// The word of its start, where columns have zero points.
    pub bias: Option<Value<'c>>,
}

/// The f32 chain `acc` with a group's sums of vector `c` of columns, scaled where groups of columns have scales.
pub(super) fn add_scaled<'c>(
    fb: &Fb<'_, 'c>,
    group: u32,
    sum: Value<'c>,
    columns: Option<&Factors<'c>>,
    c: usize,
    row: &RowFactors<'c>,
    acc: Value<'c>,
) -> Value<'c> {
    let powers_of_two = Quantise::has_powers_of_two(group);
    let float = |sum: Value<'c>| fb.bitcast(sum, sum.ty().with(Elem::F32));
    let value = |sum: Value<'c>| fb.sub(float(sum), if powers_of_two { row.scale } else { integers(fb) });
    let Some(Factors { scales, zeros, minus_origin }) = columns else {
        return if powers_of_two { fb.add(acc, value(sum)) } else { fb.fma(value(sum), row.scale, acc) };
    };
    if let Some(minus_origin) = minus_origin {
        return fb.fma(fb.fma(float(sum), scales[c], minus_origin[c]), row.scale, acc);
    }
    let sum = zeros.as_ref().zip(row.bias).map_or(value(sum), |(zeros, bias)| fb.fma(zeros[c], value(bias), value(sum)));
    if powers_of_two { fb.fma(sum, scales[c], acc) } else { fb.fma(fb.mul(sum, scales[c]), row.scale, acc) }
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
    fn sums_in_words(&self, isa: &Isa) -> bool {
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
    fn group_step(&self, isa: &Isa, m: u32, feed: Feed<'_>) -> u32 {
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

    /// `groups` groups of one register tile; otherwise as [`Microkernel::emit`].
    #[expect(clippy::too_many_arguments, reason = "the operands of a loop")]
    pub(super) fn emit_groups<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        walk: Walk,
        at: At<'c>,
        groups: Value<'c>,
        start: Start<'c>,
        feed: Feed<'c>,
        keep: Option<Keep<'c>>,
    ) {
        let (product, lanes) = (&self.product, fb.lanes());
        let panels = &product.panels;
        let group = self.coding.group().expect("codes");
        let most_code = if self.coding.has_zeros() { 255 } else { 128 };
        assert!(most_code * 127 * group < 1 << 22, "sums over groups of {group} are no f32");
        let (group_bytes, code_bytes) = self.group_bytes(fb.isa());
        let step_k = self.group_step(fb.isa(), walk.m, feed);
        let steps = group / step_k;
        let packs = step_k / self.k_pack;
        let step_bytes = u64::from(panels.nr * packs) * self.column_bytes();
        let streams = self.streams(walk);
        let vectors = self.vectors(walk, lanes);
        // Matrix instructions: pairs of rows, two registers of sums per pair and vector of columns; a single row's f32 sums are a vector.
        let in_blocks = product.compute == Compute::Int8Mmla;
        let floats_in_blocks = in_blocks && walk.m > 1;
        let (rows, sums_per_row) = if in_blocks { (walk.m.div_ceil(2), 2 * vectors.len()) } else { (walk.m, vectors.len()) };
        let a_group_bytes = if in_blocks { int_mmla::group_bytes(walk.m, group) } else { product.compute.record(group).into() };
        let row_at = |a: Value<'c>, r: u32, byte: u32| fb.offset_const(a, u64::from(r) * u64::from(product.a_stride) + u64::from(byte));
        let words_of = |a: Value<'c>, r: u32, byte: u32| fb.splat(fb.load(Ty::I32, row_at(a, r, byte), 4), lanes);

        // Trip counts that LLVM does not see: it would unroll the loops, move loads of later steps up, and spill.
        let in_words = self.sums_in_words(fb.isa());
        let span_steps = if in_words { WORDS_K / step_k } else { steps };
        let hidden = |n: u32| {
            let count = fb.stack(8, 8);
            fb.store(fb.int(n.into()), count, 8);
            fb.load_again(Ty::I64, count, 8)
        };
        let span_count = hidden(span_steps);
        let spans = if steps == span_steps { fb.int(1) } else { hidden(steps / span_steps) };
        let ints = Ty::vec(Elem::I32, lanes);
        let tile: Vec<Value<'c>> = self.tile_offsets(walk, lanes).map(|offset| fb.offset_const(at.tile, offset)).collect();
        let mut first: Vec<Value<'c>> = tile.iter().map(|at| self.start(fb, start, *at)).collect();
        if floats_in_blocks {
            first = mmla::blocks_of_rows(fb, walk.m, &first);
        }
        let last = fb.loop_(fb.int(0), groups, 1, &first, |i, acc| {
            let a = fb.index(at.a, i, a_group_bytes);
            let packed = Rows { at: a, m: walk.m, group };
            let here = fb.mul_int(i, group_bytes as i64);
            let w = fb.offset(at.w, here);
            let begin = || -> Vec<Value<'c>> {
                if in_blocks {
                    return (0..rows).flat_map(|pair| vec![pair; sums_per_row]).map(|pair| packed.start(fb, pair)).collect();
                }
                let start = |r| match self.start_at(group) {
                    Some(at) => words_of(a, r, at),
                    None => fb.bitcast(integers(fb), ints),
                };
                (0..rows).map(start).flat_map(|start| vec![start; sums_per_row]).collect()
            };
            let keep = keep.map(|keep| {
                let [to, scales] = [keep.to, keep.scales].map(|at| fb.index(at, i, unpacked_group(fb.isa(), panels, group)));
                Keep { to, scales, ..keep }
            });
            // `span_steps` steps from `first` on.
            let span = |first: Value<'c>, begin: &[Value<'c>]| {
                fb.loop_(fb.int(0), span_count, 1, begin, |step, sums| {
                    let step = fb.add(first, step);
                    let mut sums = sums.to_vec();
                    let bytes = fb.mul_int(step, step_bytes as i64);
                    match feed {
                        Feed::Stream(reading) => {
                            self.prefetch_streams(fb, walk, (&streams, reading), at.panel, fb.add(here, bytes), (step_bytes, packs.into()))
                        }
                        Feed::Ahead { at, step: each, stream } => {
                            let part = fb.lshr(each, steps.trailing_zeros());
                            let number = fb.add(fb.mul_int(i, steps.into()), step);
                            let stored = if self.is_unpacked() { step_bytes / 2 } else { step_bytes };
                            self.prefetch_ahead(fb, at, fb.mul(number, part), (stream, stored));
                        }
                    }
                    let keep = keep.map(|keep| Keep { to: fb.offset(keep.to, fb.add(bytes, bytes)), ..keep });
                    if in_blocks {
                        let a = fb.offset(a, fb.mul_int(step, int_mmla::codes_bytes(walk.m, step_k) as i64));
                        self.blocks(fb, walk, &mut sums, a, (fb.offset(w, bytes), keep), &vectors);
                        return sums;
                    }
                    let a = fb.offset(a, fb.mul_int(step, step_k.into()));
                    // Of a row: sixteen codes in a register, or four in each lane.
                    let in_lanes: Vec<_> = match self.codes_in_lanes(fb.isa(), walk.m) {
                        true => (0..walk.m).map(|r| fb.load(ints, row_at(a, r, 0), 4)).collect(),
                        false => vec![],
                    };
                    for pack in 0..packs {
                        let w = fb.offset_const(fb.offset(w, bytes), u64::from(pack * panels.nr) * 4);
                        let first = pack * self.k_pack / 4;
                        let keep = keep.map(|keep| Keep { to: fb.offset_const(keep.to, u64::from(pack * panels.nr) * 8), ..keep });
                        self.dots(fb, walk, &mut sums, (w, keep), &vectors, |r, half| match in_lanes.get(r as usize) {
                            Some(&words) => fb.shuffle(words, words, &vec![first + half; lanes as usize]),
                            None => words_of(a, r, (first + half) * 4),
                        });
                    }
                    sums
                })
            };
            let sums = match in_words {
                false => span(fb.int(0), &begin()),
                true => {
                    let zeros = |elem, lanes| vec![fb.zero(Ty::vec(elem, lanes)); rows as usize * sums_per_row];
                    let sums = fb.loop_(fb.int(0), spans, 1, &zeros(Elem::I32, lanes), |number, sums| {
                        let words = span(fb.mul_int(number, span_steps.into()), &zeros(Elem::I16, 2 * lanes));
                        sums.iter().zip(words).map(|(sum, words)| fb.add_words(*sum, words)).collect()
                    });
                    begin().into_iter().zip(sums).map(|(start, sum)| fb.add(start, sum)).collect()
                }
            };
            let mut factors = self.coding.has_group_scales().then(|| {
                if let Feed::Stream(reading) = feed {
                    let scales = fb.add_int(here, code_bytes as i64);
                    self.prefetch_streams(fb, walk, (&streams, reading), at.panel, scales, (group_bytes - code_bytes, 1));
                }
                let factors = self.factors(fb, walk, fb.offset(at.scales, here));
                if let Some(keep) = keep {
                    self.keep_factors(fb, walk, keep, &factors);
                }
                factors
            });
            let sums = if in_blocks && !floats_in_blocks { mmla::rows_of_blocks(fb, walk.m, &sums) } else { sums };
            if floats_in_blocks {
                factors = factors.map(|factors| Factors { scales: block_scales(fb, &factors.scales), ..factors });
            }
            let n = sums.len() / rows as usize;
            let mut acc = acc.to_vec();
            for r in 0..rows {
                let scale = if in_blocks { packed.scale(fb, r) } else { fb.load_broadcast(DType::F32, lanes, row_at(a, r, group)) };
                let row = RowFactors { scale, bias: self.coding.has_zeros().then(|| words_of(a, r, group + 4)) };
                for c in 0..n {
                    let e = r as usize * n + c;
                    acc[e] = add_scaled(fb, group, sums[e], factors.as_ref(), c, &row, acc[e]);
                }
            }
            acc
        });
        let last = if floats_in_blocks { mmla::rows_of_blocks(fb, walk.m, &last) } else { last };
        last.into_iter().zip(&tile).for_each(|(value, at)| fb.store(value, *at, lanes * 4));
    }

    /// Byte of a record where the word is at which sums start, unless all start at [`Quantise::INTEGERS`].
    pub(super) fn start_at(&self, group: u32) -> Option<u32> {
        match self.coding.has_zeros() || self.coding.offset(self.dtype) == 0 {
            true if Quantise::has_powers_of_two(group) => Some(group),
            true => None,
            false => Some(group + 4),
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
