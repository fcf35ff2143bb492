//! The loop over groups of a register tile of int8 records with codes: the sums of each group, then the f32 chain.
//!
//! In: as [`super::microkernel`], and how rows meet codes ([`GroupRows`]): row by row by dots ([`super::int_dot`], which says what sums
//! are and how they are scaled), or two by two by matrix instructions ([`super::int_mmla`]). Out: the tile, as
//! [`Microkernel::emit`] leaves it.
//!
//! ```text
//! for each group {
//!   for each span { sums = starts;  for each step { prefetch;  sums += codes . codes } }
//!   acc += sums * scales of the columns * scales of the rows
//! }
//! ```
//! A group is one span, unless products wait in words of 16 bits for the end of a shorter one.

use super::int_dot::{Records, WORDS_K, integers, unpacked_group};
use super::int_mmla::PackedRows;
use super::microkernel::{At, Feed, Keep, Microkernel, Start, Walk};
use crate::llvm::builder::{Elem, Fb, Ty, Value};
use crate::program::{Compute, Quantise};

/// What the sums of a group's columns are multiplied with, a vector for each vector of columns.
pub(super) struct Factors<'c> {
    /// Scales.
    pub scales: Vec<Value<'c>>,
    /// Zero points, where columns have their own.
    pub zeros: Option<Vec<Value<'c>>>,
    /// `-3 * 2^22 * scale`, where one FMA, `(3 * 2^22 + s32) * scale + minus_origin`, scales a sum.
    pub minus_origin: Option<Vec<Value<'c>>>,
}

/// Sums of a group, and the factors of its columns where these have some.
pub(super) type GroupSums<'c> = (Vec<Value<'c>>, Option<Factors<'c>>);

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

/// One step of the loop over a group, the same for all of a register tile.
pub(super) struct GroupStep<'t> {
    /// The generator.
    pub kernel: &'t Microkernel,
    /// Rows and panels.
    pub walk: Walk,
    /// k of a group.
    pub group: u32,
    /// k of a step.
    pub k: u32,
    /// Byte offsets of the vectors of columns.
    pub vectors: Vec<u64>,
}

/// How the rows of a register tile meet a group's codes: one by one by dots ([`Records`]), or two by two by matrix instructions
/// ([`PackedRows`]). Sums and accumulators are registers by row (or pair), then by columns; `a` is where the rows' group is.
pub(super) trait GroupRows<'c> {
    /// Bytes from one group of the rows to the next.
    fn group_bytes(&self) -> u64;
    /// Bytes from one step's codes to the next's.
    fn step_bytes(&self) -> u64;
    /// First sums of a group.
    fn starts(&self, fb: &Fb<'_, 'c>, a: Value<'c>) -> Vec<Value<'c>>;
    /// Adds the products of a step, whose rows are at `a`, with the codes at `w`, which are kept if that is asked for.
    fn add_step(&self, fb: &Fb<'_, 'c>, sums: &mut [Value<'c>], a: Value<'c>, w: (Value<'c>, Option<Keep<'c>>));
    /// Accumulators with the sums of a group, scaled.
    fn add_group(&self, fb: &Fb<'_, 'c>, acc: &[Value<'c>], a: Value<'c>, sums: GroupSums<'c>) -> Vec<Value<'c>>;
    /// Accumulators of vectors of columns, row by row.
    fn accumulators(&self, _fb: &Fb<'_, 'c>, vectors: Vec<Value<'c>>) -> Vec<Value<'c>> {
        vectors
    }
    /// Back again.
    fn vectors(&self, _fb: &Fb<'_, 'c>, accumulators: Vec<Value<'c>>) -> Vec<Value<'c>> {
        accumulators
    }
}

/// Accumulators with the scaled sums of rows (or pairs), each with `row`'s factors.
pub(super) fn add_rows<'c>(
    fb: &Fb<'_, 'c>,
    group: u32,
    (acc, sums): (&[Value<'c>], &[Value<'c>]),
    columns: Option<&Factors<'c>>,
    rows: impl Iterator<Item = RowFactors<'c>>,
    per_row: usize,
) -> Vec<Value<'c>> {
    let mut added = vec![];
    for (row, (acc, sums)) in rows.zip(acc.chunks(per_row).zip(sums.chunks(per_row))) {
        added.extend(acc.iter().zip(sums).enumerate().map(|(c, (acc, sum))| add_scaled(fb, group, *sum, columns, c, &row, *acc)));
    }
    added
}

impl Microkernel {
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
        let group = self.coding.group().expect("codes");
        let most_code = if self.coding.has_zeros() { 255 } else { 128 };
        assert!(most_code * 127 * group < 1 << 22, "sums over groups of {group} are no f32");
        let step =
            GroupStep { kernel: self, walk, group, k: self.group_step(fb.isa(), walk.m, feed), vectors: self.vectors(walk, fb.lanes()) };
        let rows: &dyn GroupRows<'c> = if self.product.compute == Compute::Int8Mmla { &PackedRows(&step) } else { &Records(&step) };
        let loops = GroupLoops::new(fb, &step, rows, at, feed, keep);
        let tile: Vec<Value<'c>> = self.tile_offsets(walk, fb.lanes()).map(|offset| fb.offset_const(at.tile, offset)).collect();
        let first = rows.accumulators(fb, tile.iter().map(|at| self.start(fb, start, *at)).collect());
        let last = fb.loop_(fb.int(0), groups, 1, &first, |i, acc| loops.group(i, acc));
        rows.vectors(fb, last).into_iter().zip(&tile).for_each(|(value, at)| fb.store(value, *at, fb.lanes() * 4));
    }
}

/// One group of the loop.
#[derive(Clone, Copy)]
struct Group<'c> {
    number: Value<'c>,
    /// Address of its rows.
    a: Value<'c>,
    /// Bytes from a panel's begin to its codes.
    codes: Value<'c>,
    /// Address of those of the piece.
    w: Value<'c>,
    keep: Option<Keep<'c>>,
}

/// The loops inside of a group: over its steps and, where products wait in words of 16 bits, over spans of these.
struct GroupLoops<'t, 'f, 'c> {
    fb: &'t Fb<'f, 'c>,
    step: &'t GroupStep<'t>,
    rows: &'t dyn GroupRows<'c>,
    at: At<'c>,
    feed: Feed<'c>,
    keep: Option<Keep<'c>>,
    /// Byte offsets of the panels side by side.
    streams: Vec<u64>,
    /// Bytes of a panel's group, and of its codes.
    bytes: (u64, u64),
    /// Steps of a span, and as the loop reads them.
    span_steps: (u32, Value<'c>),
    /// Spans of a group.
    spans: Value<'c>,
}

impl<'t, 'f, 'c> GroupLoops<'t, 'f, 'c> {
    fn new(
        fb: &'t Fb<'f, 'c>,
        step: &'t GroupStep<'t>,
        rows: &'t dyn GroupRows<'c>,
        at: At<'c>,
        feed: Feed<'c>,
        keep: Option<Keep<'c>>,
    ) -> Self {
        // Trip counts that LLVM does not see: it would unroll the loops, move loads of later steps up, and spill.
        let hidden = |n: u32| {
            let count = fb.stack(8, 8);
            fb.store(fb.int(n.into()), count, 8);
            fb.load_again(Ty::I64, count, 8)
        };
        let steps = step.group / step.k;
        let span_steps = if step.kernel.sums_in_words(fb.isa()) { WORDS_K / step.k } else { steps };
        let span_count = hidden(span_steps);
        let spans = if steps == span_steps { fb.int(1) } else { hidden(steps / span_steps) };
        let (streams, bytes) = (step.kernel.streams(step.walk), step.kernel.group_bytes(fb.isa()));
        GroupLoops { fb, step, rows, at, feed, keep, streams, bytes, span_steps: (span_steps, span_count), spans }
    }

    /// The accumulators `acc` with group `i`.
    fn group(&self, i: Value<'c>, acc: &[Value<'c>]) -> Vec<Value<'c>> {
        let GroupLoops { fb, step, rows, at, .. } = self;
        let &GroupStep { kernel, walk, group, .. } = *step;
        let (group_bytes, code_bytes) = self.bytes;
        let a = fb.index(at.a, i, rows.group_bytes());
        let codes = fb.mul_int(i, group_bytes as i64);
        let w = fb.offset(at.w, codes);
        let keep = self.keep.map(|keep| {
            let bytes = unpacked_group(fb.isa(), &kernel.product.panels, group);
            let [to, scales] = [keep.to, keep.scales].map(|at| fb.index(at, i, bytes));
            Keep { to, scales, ..keep }
        });
        let sums = self.sums(Group { number: i, a, codes, w, keep });
        let factors = kernel.coding.has_group_scales().then(|| {
            if let Feed::Stream(reading) = self.feed {
                let scales = fb.add_int(codes, code_bytes as i64);
                kernel.prefetch_streams(fb, walk, (&self.streams, reading), at.panel, scales, (group_bytes - code_bytes, 1));
            }
            let factors = kernel.factors(fb, walk, fb.offset(at.scales, codes));
            if let Some(keep) = keep {
                kernel.keep_factors(fb, walk, keep, &factors);
            }
            factors
        });
        rows.add_group(fb, acc, a, (sums, factors))
    }

    /// The sums of a group.
    fn sums(&self, group: Group<'c>) -> Vec<Value<'c>> {
        let GroupLoops { fb, rows, .. } = self;
        let (span_steps, _) = self.span_steps;
        if !self.step.kernel.sums_in_words(fb.isa()) {
            return self.span(group, fb.int(0), &rows.starts(fb, group.a));
        }
        let zeros = |elem, lanes| vec![fb.zero(Ty::vec(elem, lanes)); self.step.walk.m as usize * self.step.vectors.len()];
        let sums = fb.loop_(fb.int(0), self.spans, 1, &zeros(Elem::I32, fb.lanes()), |number, sums| {
            let first = fb.mul_int(number, span_steps.into());
            let words = self.span(group, first, &zeros(Elem::I16, 2 * fb.lanes()));
            sums.iter().zip(words).map(|(sum, words)| fb.add_words(*sum, words)).collect()
        });
        rows.starts(fb, group.a).into_iter().zip(sums).map(|(start, sum)| fb.add(start, sum)).collect()
    }

    /// `sums` with the products of a span of the group, which begins with step `first`.
    fn span(&self, group: Group<'c>, first: Value<'c>, sums: &[Value<'c>]) -> Vec<Value<'c>> {
        let GroupLoops { fb, step, at, .. } = self;
        let &GroupStep { kernel, walk, k, .. } = *step;
        let packs = k / kernel.k_pack;
        let step_bytes = u64::from(kernel.product.panels.nr * packs) * kernel.column_bytes();
        fb.loop_(fb.int(0), self.span_steps.1, 1, sums, |number, sums| {
            let number = fb.add(first, number);
            let bytes = fb.mul_int(number, step_bytes as i64);
            match self.feed {
                Feed::Stream(reading) => {
                    let here = fb.add(group.codes, bytes);
                    kernel.prefetch_streams(fb, walk, (&self.streams, reading), at.panel, here, (step_bytes, packs.into()));
                }
                Feed::Ahead { at, step: each, stream } => {
                    let steps = self.step.group / k;
                    let part = fb.lshr(each, steps.trailing_zeros());
                    let done = fb.add(fb.mul_int(group.number, steps.into()), number);
                    let stored = if kernel.is_unpacked() { step_bytes / 2 } else { step_bytes };
                    kernel.prefetch_ahead(fb, at, fb.mul(done, part), (stream, stored));
                }
            }
            let keep = group.keep.map(|keep| Keep { to: fb.offset(keep.to, fb.add(bytes, bytes)), ..keep });
            let mut sums = sums.to_vec();
            let a = fb.offset(group.a, fb.mul_int(number, self.rows.step_bytes() as i64));
            self.rows.add_step(fb, &mut sums, a, (fb.offset(group.w, bytes), keep));
            sums
        })
    }
}
