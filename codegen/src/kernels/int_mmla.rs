//! The register tile of a matmul of int8 records with SMMLA: blocks of 2 rows x 2 columns x 8 k per instruction.
//!
//! In: as [`super::groups`], which has the loop, with weights in panels of eight k (`[k/8][nr][8]`: a register holds 2 columns
//! x 8 k) and records packed by pairs of rows. Out: the packed records, one step of the loop, and what its sums stand for.
//!
//! ```text
//! pack: groups of m rows -> per group { [group/8][pair of rows][2][8] codes, [pair] scales, [pair] starts } in the thread's scratch
//! step: for pair of rows { a = P; for pair of columns { sum = smmla(sum, a, w) } }
//! ```
//! Scales (by 32: origins of sums, see [`Quantise`]) and starts are written as a block needs them, `[even, even,
//! odd, odd]`; an odd last row stands beside itself. Sums stay blocks until the last group, where every two become vectors of columns
//! (`mmla`): scaling costs nothing more than with SDOT. Those of a single row become a vector at the end of every group, which is half as
//! many f32 sums.
//!
//! A single row takes the same instruction. SDOT would want as many of them (16 products either way, two registers per pair of columns and
//! k), and a pairwise addition where this wants a shuffle. Integer sums are exact, and the f32 chain is that of `int_dot`: the same bits
//! for any number of rows.

use super::groups::{Factors, GroupRows, GroupStep, GroupSums, RowFactors, add_rows};
use super::microkernel::{Keep, Microkernel, Walk, tile_fits};
use super::mmla::{REGISTER, blocks_of_rows, exchange_halves, rows_of_blocks, step_bytes};
use super::product::Product;
use crate::isa::Isa;
use crate::llvm::builder::{Elem, Fb, Ty, Value};
use crate::program::{Compute, Quantise};

/// k of a row or column in one register.
const K: u32 = 8;

/// Bytes of a group of `m` packed rows: codes, and two blocks per pair.
pub(super) fn group_bytes(m: u32, group: u32) -> u64 {
    u64::from(m.div_ceil(2)) * (u64::from(2 * group) + 2 * REGISTER)
}

/// The same for `k` k.
pub(super) fn codes_bytes(m: u32, k: u32) -> u64 {
    u64::from(k / K) * step_bytes(m)
}

/// Bytes of `m` packed rows; 0 where a product wants none.
pub(super) fn packed_bytes(product: &Product, m: u32) -> u64 {
    match (product.compute, product.panels.coding.group()) {
        (Compute::Int8Mmla, Some(group)) => u64::from(product.panels.padded_k() / group) * group_bytes(m, group),
        _ => 0,
    }
}

/// Do `m` rows times `vectors` of four columns fit the register file?
pub(super) fn fits(isa: &Isa, micro: &Microkernel, m: u32, vectors: u32) -> bool {
    let sums = m.div_ceil(2) * 2 * vectors;
    let floats = match m {
        _ if micro.sums_spill(isa, m) => 0,
        1 => vectors,
        _ => sums,
    };
    // Weights of a single pair of rows are loaded as they are used. Nibbles: the mask that takes them.
    let weights = if m > 2 { 2 * vectors } else { 2 };
    tile_fits(isa, 1, sums + floats, weights + u32::from(micro.has_nibbles()))
}

/// Packs the records of `k` k (whole groups) of the `m` rows at `a` to `to`.
pub(super) fn pack<'c>(fb: &Fb<'_, 'c>, product: &Product, m: u32, a: Value<'c>, k: Value<'c>, to: Value<'c>) {
    let group = product.panels.coding.group().expect("codes");
    let step = step_bytes(m);
    let row = |a: Value<'c>, r: u32| fb.offset_const(a, u64::from(r) * u64::from(product.a_stride));
    let pairs = || (0..m.div_ceil(2)).map(|pair| (pair, 2 * pair, (2 * pair + 1).min(m - 1)));
    fb.for_(fb.int(0), fb.lshr(k, group.trailing_zeros()), 1, |i| {
        let a = fb.index(a, i, product.compute.record(group).into());
        let to = fb.index(to, i, group_bytes(m, group));
        fb.for_(fb.int(0), fb.int(group.into()), i64::from(2 * K), |inside| {
            let (a, to) = (fb.offset(a, inside), fb.offset(to, fb.mul_int(inside, (step / u64::from(K)) as i64)));
            for (pair, even, odd) in pairs() {
                let [even, odd] = [even, odd].map(|r| fb.load(Ty::vec(Elem::I64, 2), row(a, r), 4));
                for half in 0..2 {
                    let at = fb.offset_const(to, u64::from(half) * step + u64::from(pair) * REGISTER);
                    fb.store(fb.shuffle(even, odd, &[half, 2 + half]), at, REGISTER as u32);
                }
            }
        });
        let scales = fb.offset_const(to, codes_bytes(m, group));
        for (pair, even, odd) in pairs() {
            let [even, odd] =
                [even, odd].map(|r| fb.load(Ty::vec(Elem::I32, 2), fb.offset_const(row(a, r), Quantise::scale_at(group).into()), 4));
            let at = fb.offset_const(scales, u64::from(pair) * REGISTER);
            fb.store(fb.shuffle(even, odd, &[0, 0, 2, 2]), at, REGISTER as u32);
            fb.store(fb.shuffle(even, odd, &[1, 1, 3, 3]), fb.offset_const(at, step), REGISTER as u32);
        }
    });
}

/// The packed rows of groups, two by two. The accumulators of more than one row stay blocks between groups.
pub(super) struct PackedRows<'t>(pub &'t GroupStep<'t>);

impl PackedRows<'_> {
    /// Words behind the codes of the group at `a`, of a pair: scales, or origins of its sums, and a step further first sums.
    fn block<'c>(&self, fb: &Fb<'_, 'c>, a: Value<'c>, pair: u32) -> Value<'c> {
        fb.offset_const(a, codes_bytes(self.0.walk.m, self.0.group) + u64::from(pair) * REGISTER)
    }
    fn accumulates_blocks(&self) -> bool {
        self.0.walk.m > 1
    }
}

impl<'c> GroupRows<'c> for PackedRows<'_> {
    fn group_bytes(&self) -> u64 {
        group_bytes(self.0.walk.m, self.0.group)
    }

    fn starts(&self, fb: &Fb<'_, 'c>, a: Value<'c>) -> Vec<Value<'c>> {
        let m = self.0.walk.m;
        // Loaded once more for each block: a copy of a register would take a slot of the matrix instruction.
        let start = |pair| fb.load_again(Ty::vec(Elem::I32, 4), fb.offset_const(self.block(fb, a, pair), step_bytes(m)), REGISTER as u32);
        (0..m.div_ceil(2)).flat_map(|pair| vec![pair; 2 * self.0.vectors.len()]).map(start).collect()
    }

    fn step_bytes(&self) -> u64 {
        codes_bytes(self.0.walk.m, self.0.k)
    }

    fn add_step(&self, fb: &Fb<'_, 'c>, sums: &mut [Value<'c>], a: Value<'c>, w: (Value<'c>, Option<Keep<'c>>)) {
        self.0.kernel.blocks(fb, self.0.walk, sums, a, w, &self.0.vectors);
    }

    fn add_group(&self, fb: &Fb<'_, 'c>, acc: &[Value<'c>], a: Value<'c>, (sums, columns): GroupSums<'c>) -> Vec<Value<'c>> {
        let GroupStep { walk, group, vectors, .. } = self.0;
        let scale = |pair| fb.load(Ty::vec(Elem::F32, 4), self.block(fb, a, pair), REGISTER as u32);
        let rows = (0..walk.m.div_ceil(2)).map(|pair| RowFactors { scale: scale(pair), bias: None });
        if !self.accumulates_blocks() {
            return add_rows(fb, *group, (acc, &rows_of_blocks(fb, 1, &sums)), columns.as_ref(), rows, vectors.len());
        }
        // Columns' scales as blocks want them: of every vector `[c0, c1, c0, c1]` and `[c2, c3, c2, c3]`.
        let columns = columns.map(|factors| {
            let scales = factors.scales.iter().flat_map(|s| exchange_halves(fb, *s, *s)).collect();
            Factors { scales, ..factors }
        });
        add_rows(fb, *group, (acc, &sums), columns.as_ref(), rows, 2 * vectors.len())
    }

    fn accumulators(&self, fb: &Fb<'_, 'c>, vectors: Vec<Value<'c>>) -> Vec<Value<'c>> {
        if self.accumulates_blocks() { blocks_of_rows(fb, self.0.walk.m, &vectors) } else { vectors }
    }

    fn vectors(&self, fb: &Fb<'_, 'c>, accumulators: Vec<Value<'c>>) -> Vec<Value<'c>> {
        if self.accumulates_blocks() { rows_of_blocks(fb, self.0.walk.m, &accumulators) } else { accumulators }
    }
}

impl Microkernel {
    /// One step: the packed rows at `a` times the codes at `vectors` (of four columns, two registers each) of `w`.
    pub(super) fn blocks<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        walk: Walk,
        sums: &mut [Value<'c>],
        a: Value<'c>,
        (w, keep): (Value<'c>, Option<Keep<'c>>),
        vectors: &[u64],
    ) {
        let codes = Ty::vec(Elem::I8, 16);
        let load = |at: Value<'c>, offset: u64| fb.load(codes, fb.offset_const(at, offset), REGISTER as u32);
        let registers: Vec<u64> = vectors.iter().flat_map(|v| [*v, v + REGISTER]).collect();
        let halves = if self.has_nibbles() { 2 } else { 1 };
        // Codes of a half of a register of weights, which is kept if that is asked for.
        let codes_of = |c: usize, half: u32, stored: Value<'c>| {
            let weight = match (halves, half) {
                (1, _) => stored,
                (_, 0) => fb.and(stored, fb.splat(fb.int_of(Elem::I8, 0x0f), 16)),
                _ => fb.lshr(stored, 4),
            };
            if let Some(keep) = keep {
                let (stream, number) = (c as u32 / 2 / walk.vectors, c as u32 % (2 * walk.vectors));
                let to = u64::from(half * self.product.panels.nr * K) + u64::from(stream) * keep.stream + u64::from(number) * REGISTER;
                fb.store(weight, fb.offset_const(keep.to, to), REGISTER as u32);
            }
            weight
        };
        let rows = |half: u32, pair: u32| load(a, u64::from(half) * step_bytes(walk.m) + u64::from(pair) * REGISTER);
        if walk.m <= 2 {
            let rows: Vec<_> = (0..halves).map(|half| rows(half, 0)).collect();
            for (c, at) in registers.iter().enumerate() {
                let stored = load(w, *at);
                for (half, rows) in (0..).zip(&rows) {
                    sums[c] = fb.smmla(sums[c], *rows, codes_of(c, half, stored));
                }
            }
            return;
        }
        for half in 0..halves {
            // Nibbles are read twice: those of both halves would not find registers.
            let stored = |at: u64| if half == 0 { load(w, at) } else { fb.load_again(codes, fb.offset_const(w, at), REGISTER as u32) };
            let weights: Vec<_> = registers.iter().enumerate().map(|(c, at)| codes_of(c, half, stored(*at))).collect();
            for (pair, sums) in (0..).zip(sums.chunks_mut(weights.len())) {
                let rows = rows(half, pair);
                sums.iter_mut().zip(&weights).for_each(|(sum, weight)| *sum = fb.smmla(*sum, rows, *weight));
            }
        }
    }
}
