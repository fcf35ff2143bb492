//! Matmuls over packed panels, with epilogue and group nests.

use super::{Compute, Exprs, Extent, LoopNest, Operand, Panels, Program, Quantise, Store, VarId, WeightId};
use crate::isa::{Distances, Near};
use rcompile_runtime::abi::CpuKind;
use rcompile_runtime::cost::Passes;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Rows that go through a matmul's panels once by tiles, as few rows do by vectors: nothing is blocked.
pub const TILE_ROWS: u32 = 32;

/// Tile of a matmul. Its fields, and those below, are names in tuning files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulTile {
    /// Most rows per register tile.
    pub mr: u32,
    /// With several blocks of rows: most rows of a block, at most `mr`.
    pub block_mr: u32,
    /// With several blocks of rows (by tiles more than [`TILE_ROWS`]): k per block, even, 0 for all. The f32 accumulators are kept in
    /// scratch between blocks (same bits).
    pub k_block: u32,
    /// With several blocks of rows: most rows per pass over the weights, 0 for all (see [`Passes`]). Rows of a pass stay in L2.
    pub m_block: u32,
    /// With several blocks of rows: panels per block, which stay in L2 while all rows of a pass meet them.
    pub n_block: u32,
    /// With several blocks of rows: weights of a block are widened to f32 in scratch once, and not once per block of rows (nibbles for
    /// integer dots: taken apart to bytes). Up to `2 * mr` rows read them as they are stored all the same. Without meaning for f32 weights
    /// and for tiles, which always want nibbles taken apart.
    pub widen: bool,
    /// How few rows read weights.
    pub fetch: Fetch,
}

/// How few rows, which go through all k of a panel at once, read weights that stream from memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fetch {
    /// Most panels (times ways) that an instance walks side by side: each is a stream from memory.
    pub streams: u32,
    /// Prefetch distances.
    pub ahead: Distances,
    /// What walks of a single stream ask into L1 passes L2 by (PREFETCHNTA).
    pub past_l2: bool,
    /// Instances of so many rows that arithmetic takes longer over a line than memory does.
    #[serde(deserialize_with = "Option::deserialize")]
    pub busy: Option<BusyRows>,
    /// Walks of several streams, where those want other distances. Busy rows are not affected.
    #[serde(deserialize_with = "Option::deserialize")]
    pub near: Option<Near>,
}

/// How instances that arithmetic bounds prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BusyRows {
    /// Least rows.
    pub rows: u32,
    /// Distance into L1, and into no other cache.
    pub l1: u32,
}

impl Fetch {
    /// How `m` rows read weights that stream from memory: in `most` streams at most, panels times ways.
    pub fn reading(&self, m: u32, most: u32) -> Reading {
        let streams = self.streams.min(most);
        let (ahead, near) = match self.busy(m) {
            Some(busy) => (Distances { l2: 0, l1: busy.l1 }, None),
            None => (self.ahead, self.near.filter(|near| near.streams <= streams)),
        };
        Reading { streams, ahead, past_l2: self.past_l2, near }
    }
    /// How an instance of `m` rows prefetches if arithmetic bounds it, also where weights come from memory.
    pub fn busy(&self, m: u32) -> Option<BusyRows> {
        self.busy.filter(|busy| m >= busy.rows)
    }
}

/// How some rows read weights that stream from memory: what [`Fetch`] says for their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Most streams side by side: panels times ways.
    pub streams: u32,
    /// Prefetch distances.
    pub ahead: Distances,
    /// What a single stream asks into L1 passes L2 by.
    pub past_l2: bool,
    /// Distances of walks of many streams.
    pub near: Option<Near>,
}

impl Reading {
    /// Prefetch distances of a walk of `streams` streams.
    pub fn distances(&self, streams: u32) -> Distances {
        self.near.filter(|near| streams >= near.streams).map_or(self.ahead, |near| near.ahead)
    }
}

/// `out[row, col] = epilogue(sum_k a[row, k] * w[col, k])` over packed panels.
///
/// Units of work are groups (or single panels when `groups == 1`), of which every thread has a contiguous share. Where all rows take
/// weights as they are stored (up to `mr` rows, two or three times as many where more would widen them, up to [`TILE_ROWS`] by tiles),
/// threads do the ends of their shares in pieces, which others may take. More rows come in [`Passes`], and the units of all passes are
/// what threads share out: a thread walks blocks of `n_block` panels of its share, all rows of a pass over each, and its share ends in
/// pieces. Per output element there is one accumulator chain in order of k.
#[derive(Clone, Debug, PartialEq)]
pub struct Matmul {
    /// `Rows` or `LogitRows`.
    pub rows: Extent,
    /// Rows of `a`: element `row * a_stride + k`, or records (of codes).
    pub a: Operand,
    /// Elements per row of `a`.
    pub a_stride: u32,
    /// Computed by every thread for itself before its share, for all rows (private norm); its outer variables are `[row]`.
    pub prologue: Option<LoopNest>,
    /// Likewise, after the prologue: `a` is what it writes.
    pub quantise: Option<Quantise>,
    /// Panels of the weight.
    pub weight: WeightId,
    /// Copy of its layout.
    pub panels: Panels,
    /// Arithmetic.
    pub compute: Compute,
    /// Blocking.
    pub tile: MatmulTile,
    /// In place of `tile.fetch` on some of the CPUs that code for a level runs on, each named once.
    pub fetch_by_cpu: Vec<(CpuKind, Fetch)>,
    /// Row variable of the epilogue.
    pub row: VarId,
    /// Column variable of the epilogue: padded column of one way, `0 .. panels.padded_cols()`.
    pub col: VarId,
    /// Operands of the epilogue.
    pub operands: Vec<Operand>,
    /// Epilogue expressions over `Acc(way)`, row, col. Loads of unit stride in `col`, or uniform, are vectors; others go lane by lane.
    pub exprs: Exprs,
    /// Stores of the epilogue, evaluated in registers. Padded columns are stored too (buffers have room).
    pub stores: Vec<Store>,
    /// Run on a block of rows after all columns of a group were stored (head-wise norm, RoPE, cache append).
    pub group_nests: Vec<GroupNest>,
}

impl Matmul {
    /// Units that are shared among threads, and panels per unit: groups, or panels where there is one group and nothing to do with it.
    pub fn units(&self) -> (u32, u32) {
        match self.panels.groups {
            1 if self.group_nests.is_empty() => (self.panels.panels_per_group(), 1),
            groups => (groups, self.panels.panels_per_group()),
        }
    }
    /// How many rows that are not few pass over the weights together: at least two blocks of rows, and four where the first one widens
    /// weights for the others.
    pub fn passes(&self) -> Passes {
        let block = if self.compute.by_tiles() { TILE_ROWS } else { self.tile.block_mr };
        Passes { most: self.tile.m_block, least: block * if self.tile.widen { 4 } else { 2 } }
    }
    /// How few rows read weights on a CPU.
    pub fn fetch(&self, cpu: CpuKind) -> Fetch {
        self.fetch_by_cpu.iter().find(|(kind, _)| *kind == cpu).map_or(self.tile.fetch, |(_, fetch)| *fetch)
    }
    /// End of the rows that every thread makes for itself in its private area: those of `a`, and those that become its records.
    pub fn private_rows_end(&self, program: &Program) -> u64 {
        let own = self.quantise.as_ref().map_or(0, |q| q.x.private_rows(q.x_stride, program.capacity(q.rows)).map_or(0, |rows| rows.end));
        self.a.private_rows(self.a_stride, program.capacity(self.rows)).map_or(own, |rows| rows.end.max(own))
    }
    /// Prologue and group nests.
    pub fn nests(&self) -> impl Iterator<Item = &LoopNest> {
        self.prologue.iter().chain(self.group_nests.iter().map(|g| &g.nest))
    }
}

/// A loop nest per (row, group) after the matmul of that group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupNest {
    /// Groups it applies to.
    pub groups: Range<u32>,
    /// Its outer variables are `[row, group - groups.start]`.
    pub nest: LoopNest,
}
