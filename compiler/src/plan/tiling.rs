//! Tile choices: heuristics as data, one function per kernel kind.

use crate::tuning::{MatmulKey, Tuning};
use rcompile_codegen::isa::{Busy, Isa, Streams};
use rcompile_codegen::program::{BusyRows, Compute, DType, Fetch, FewRows, MatmulTile, Panels, SHORT_GROUP};
use rcompile_runtime::abi::CpuKind;

/// Part of L2 for weights: the block, as the loops read it, over which the rows of a pass go, and the next one, as it is stored, which is
/// prefetched meanwhile. More would push rows and results out (2 MB, K = 768: 93 % of the FMA peak, 80 % with 1.5 MB of weights; 1 MB, K =
/// 2048, AVX2: 89 %, 85 % with 0.5 MB).
const L2_WEIGHTS: u64 = 4;
/// Part of L2 for rows (of a block of k) beside them: the rows of a pass. More rows take several passes over the weights, which are
/// prefetched, instead of coming from further away themselves (2 MB, 1024 rows, K = 768: 92 instead of 88 % of the FMA peak).
const L2_ROWS: u64 = 4;
/// Rows of a pass at least, where a block of k is long: each pass widens the weights anew.
const PASS_ROWS: u32 = 128;
/// Rows of a pass of tiles of bf16: with twice as many as of int8, weights come from memory half as often. A block of 512 k of them takes a
/// quarter of L2; sums that wait between turns take much of the rest. (docs/machines/granite-rapids.md)
const TILES_PASS_ROWS: u32 = 512;
/// Of int8. (Granite Rapids, prompt of 512, 1B shape: 512 rows 0.95 as fast.)
const TILES_PASS_ROWS_INT8: u32 = 256;
/// Bytes of L1 for the block of k of a panel that tiles go through; rows pass beside it. (docs/machines/sapphire-rapids.md)
const L1_WEIGHTS: u32 = 32 << 10;
/// Elements of a tile's rows in a block of k: as f32 they fill an L1 of 48 KB, through which they pass with each panel (there six rows of
/// AVX2 with 2048 k are 2 % faster than with 1024, twelve rows of AVX-512 3 % slower).
const TILE_ELEMENTS: u32 = 12 << 10;
/// Bytes of L2 per k of a block, so that two panels side by side, widened, leave room for rows.
const L2_PER_K: u64 = 1024;
/// Inner dimension of a block at least: tiles are loaded and stored once per block.
const K_BLOCK_LEAST: u32 = 512;
/// Inner dimension of a block of int8 codes.
const K_BLOCK_CODES: u32 = 2048;
/// Rows of a block where nibbles by 32 are taken apart beside the dots: both sums of each row, integer and f32, stay in registers. (Zen 5,
/// share of VPDPBUSD of 512 rows, 2048 k: 86 %, seven rows 83, eight 83; of nibbles taken apart once 84 and 81, but then the 1B shape reads
/// a prompt of 512 0.93 to 0.98 times as fast with six. By 128 eight rows are at 91 % either way.)
const SHORT_BLOCK_ROWS: u32 = 6;
/// Rows of nibbles by 64 and 128 that are left to vectors where tiles multiply bytes: with more the dots take longer than the weights' way
/// from memory. (Emerald Rapids, 1B shape by 128, 8, 6 and 5 sequences by tiles: 1.15, 1.09 and 0.94 times as fast; 8 and 6 of int8, which
/// memory bounds, 1.00 and 1.01. By 64, and with zero points, not measured.)
const ROWS_BESIDE_TILES: u32 = 5;
/// Panels that a pass goes over together at most.
const MOST_PANELS: u64 = 64;
/// Bytes of a cache line.
const LINE: u64 = 64;
/// Vector instructions that take a line of nibbles apart.
const TAKE_APART: u32 = 3;

/// A matmul that a tile is chosen for.
#[derive(Clone, Copy)]
pub struct MatmulWork<'a> {
    /// CPU.
    pub isa: &'a Isa,
    /// Most rows.
    pub rows: u64,
    /// Panels of the weight.
    pub panels: &'a Panels,
    /// What they store.
    pub dtype: DType,
    /// Arithmetic.
    pub compute: Compute,
}

impl MatmulWork<'_> {
    /// The tile, and how weights are read on some of the CPUs that code for a level runs on: as `--tuning` says, else by the heuristic.
    pub fn tile(&self, tuning: Option<&Tuning>) -> (MatmulTile, Vec<(CpuKind, Fetch)>) {
        let key = MatmulKey::new(self.rows, self.panels, self.dtype, self.compute);
        self.choose(tuning.and_then(|t| t.matmul(&key)))
    }

    /// The same of a tile that was tuned, or not. Another way of reading than the heuristic's was measured, and holds on all CPUs.
    fn choose(&self, tuned: Option<MatmulTile>) -> (MatmulTile, Vec<(CpuKind, Fetch)>) {
        let heuristic = self.heuristic();
        let tile = tuned.unwrap_or(heuristic);
        if tile.fetch != heuristic.fetch {
            return (tile, vec![]);
        }
        let by_cpu = self.isa.streams_by_cpu.iter().map(|(kind, streams)| (*kind, self.fetch(*streams)));
        (tile, by_cpu.filter(|(_, fetch)| *fetch != tile.fetch).collect())
    }

    fn heuristic(&self) -> MatmulTile {
        let &MatmulWork { isa, rows, panels, dtype, compute } = self;
        let nibbles = panels.coding.has_nibbles();
        let beside = nibbles && compute == Compute::Int8Dot && isa.nibbles_beside_dots;
        let widen = compute == Compute::F32 && dtype != DType::F32 || compute.takes_codes() && nibbles && !beside;
        let most_k = match compute.tiles() {
            Some(held) => L1_WEIGHTS / (panels.nr * held.size() as u32),
            None if compute.takes_codes() => K_BLOCK_CODES,
            None => (TILE_ELEMENTS / isa.rows(compute)).min((isa.l2_bytes / L2_PER_K) as u32).max(K_BLOCK_LEAST),
        };
        let k_blocks = panels.k.div_ceil(most_k);
        let k_block = panels.k.div_ceil(k_blocks).next_multiple_of(panels.coding.group().unwrap_or(2));
        // (Nibbles by 32 are not among these. With zero points, vectors take up to three blocks of `mr` rows anyway; without, tiles
        // multiply them as bf16, and making them bf16 takes as long for few rows as for many.)
        let long_nibbles = compute == Compute::Int8Tiles && nibbles && panels.coding.group() != Some(SHORT_GROUP);
        let by_vectors = if long_nibbles { ROWS_BESIDE_TILES } else { isa.rows(compute) };
        let mr = by_vectors.min(rows as u32);
        let block_mr = if beside && panels.coding.group() == Some(SHORT_GROUP) { SHORT_BLOCK_ROWS.min(mr) } else { mr };
        // As the loops over registers read them: nibbles that were taken apart one to a byte.
        let read = match (compute.takes_codes() && !beside, widen) {
            (true, _) => u64::from(k_block * panels.nr),
            (false, true) => u64::from(k_block * panels.nr) * DType::F32.size(),
            (false, false) => panels.bytes_before(k_block, dtype),
        };
        let panel = (read + panels.bytes_before(k_block, dtype)) * u64::from(panels.ways);
        let (m_block, n_block) = self.pass(k_block, panel);
        MatmulTile { mr, block_mr, k_block, m_block, n_block, widen, fetch: self.fetch(isa.streams) }
    }

    /// How few rows read their weights where they stream so.
    fn fetch(&self, streams: Streams) -> Fetch {
        let stream = streams.of(self.rows, self.panels.coding);
        let busy = |busy: Busy| BusyRows { rows: self.busy_rows(busy.instructions), l1: busy.l1 };
        Fetch {
            streams: stream.side_by_side,
            ahead: stream.ahead,
            past_l2: streams.lone_past_l2,
            busy: streams.busy.map(busy),
            near: streams.near.filter(|_| self.rows > 1),
        }
    }

    /// Rows of a pass, and panels that it goes over together, whose block of `k_block` k takes `panel` bytes each.
    fn pass(&self, k_block: u32, panel: u64) -> (u32, u32) {
        let &MatmulWork { isa, panels, compute, .. } = self;
        if let Some(held) = compute.tiles() {
            // As many panels as have sums that fill L2, of int8 half of it: the sums wait between turns of k. (They are read in the order
            // in which they lie, and prefetched.)
            let (rows, bytes) = match held {
                DType::I8 => (TILES_PASS_ROWS_INT8, isa.l2_bytes / 2),
                _ => (TILES_PASS_ROWS, isa.l2_bytes),
            };
            return (rows, panels_of(bytes, u64::from(rows * panels.nr * panels.ways) * DType::F32.size()));
        }
        let element = match compute.few_rows() {
            FewRows::F32 => 4,
            FewRows::Bf16Dot | FewRows::Bf16Mmla | FewRows::Bf16Halves => 2,
            FewRows::Int8Dot | FewRows::Int8Mmla => 1,
        };
        let rows = isa.l2_bytes / L2_ROWS / (u64::from(k_block) * element);
        ((rows as u32).max(PASS_ROWS), panels_of(isa.l2_bytes / L2_WEIGHTS, panel))
    }

    /// Rows that take at least so many vector instructions over a line of weights; a single row is not asked.
    fn busy_rows(&self, instructions: u32) -> u32 {
        let &MatmulWork { isa, panels, dtype, compute, .. } = self;
        let nibbles = panels.coding.has_nibbles();
        let elements = if nibbles { 2 * LINE } else { LINE / dtype.size() };
        let per_lane = match compute.few_rows() {
            FewRows::F32 => 1,
            FewRows::Bf16Dot | FewRows::Bf16Mmla | FewRows::Bf16Halves => 2,
            FewRows::Int8Dot | FewRows::Int8Mmla => 4,
        };
        let per_row = (elements as u32 / (isa.lanes * per_lane)).max(1);
        let apart = if nibbles { TAKE_APART } else { 0 };
        instructions.saturating_sub(apart).div_ceil(per_row).max(2)
    }
}

/// Panels of `each` bytes in `bytes`.
fn panels_of(bytes: u64, each: u64) -> u32 {
    (bytes / each).clamp(1, MOST_PANELS) as u32
}

/// Elements from row to row of a buffer of `width` columns: whole cache lines, and never a multiple of 2 KB. Rows of a matmul's tile are
/// read side by side; a multiple of the L1's way would put the same column of all of them into one set.
pub fn row_stride(width: u32, dtype: DType) -> u32 {
    let line = 64 / dtype.size() as u32;
    let stride = width.next_multiple_of(line.max(32));
    let collides = (u64::from(stride) * dtype.size()).is_multiple_of(2048);
    if collides { stride + line.max(32) } else { stride }
}

/// (row, head) pairs of an attention tile where cores are many: their queries, sums and scores of a key block stay in L1 and L2.
const TILE_PAIRS: u64 = 64;
/// The same at most. Whoever reads a key block first widens it for the tile, so that more pairs are faster: of prompts of 512 (16 layers of
/// 32 heads over 8) attention takes 5 % less with 128 and 10 % less with 256.
const MOST_TILE_PAIRS: u64 = 256;
/// Units (a tile of one KV head) per core that larger tiles must leave: shares are made of whole units.
const UNITS_PER_CORE: u64 = 16;

/// Rows per attention tile of a bucket: (row, head) pairs that share reads of K and V, more of them where there are units enough for all
/// cores.
pub fn attention_rows(bucket: u64, heads_per_kv: u64, kv_heads: u64, cores: u32) -> u32 {
    let rows = |pairs: u64| (pairs / heads_per_kv.max(1)).max(1).min(bucket);
    let enough = |pairs: u64| kv_heads * bucket / rows(pairs) >= UNITS_PER_CORE * u64::from(cores);
    let mut pairs = MOST_TILE_PAIRS;
    while pairs > TILE_PAIRS && !enough(pairs) {
        pairs /= 2;
    }
    rows(pairs) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_codegen::isa::{Distances, X86_64_TRIPLE};
    use rcompile_codegen::program::Coding;

    #[test]
    fn tiles_of_attention_leave_work_for_all_cores() {
        // 32 heads over 8, 512 rows: 64, 128 and 256 units of 256, 128 and 64 pairs.
        assert_eq!([1, 2, 4, 5, 8, 9, 64].map(|cores| attention_rows(512, 4, 8, cores)), [64, 64, 64, 32, 32, 16, 16]);
        // Of few heads, and of short buckets, no more than there are.
        assert_eq!(attention_rows(512, 1, 1, 1), 64);
        assert_eq!([1, 8, 2048].map(|bucket| attention_rows(bucket, 4, 8, 2)), [1, 8, 64]);
        assert_eq!(attention_rows(512, 128, 1, 64), 1);
    }

    #[test]
    fn long_groups_of_nibbles_leave_few_rows_to_vectors() {
        let isa = Isa::lookup(X86_64_TRIPLE, "emeraldrapids", &[]).unwrap();
        let mr = |compute, rows, coding| {
            let panels = Panels { nr: isa.panel_nr(), k_pack: 4, k: 2048, groups: 1, group_cols: 2048, ways: 1, coding };
            MatmulWork { isa: &isa, rows, panels: &panels, dtype: DType::U8, compute }.heuristic().mr
        };
        let nibbles = |group, zeros| Coding::Int4 { group, zeros };
        for coding in [nibbles(64, false), nibbles(128, false), nibbles(128, true)] {
            assert_eq!([2, 8, 512].map(|rows| mr(Compute::Int8Tiles, rows, coding)), [2, 5, 5], "{coding:?}");
            assert_eq!(mr(Compute::Int8Dot, 512, coding), 8, "{coding:?}");
        }
        assert_eq!([nibbles(32, true), Coding::Int8 { group: 256 }].map(|coding| mr(Compute::Int8Tiles, 512, coding)), [8, 8]);
        assert_eq!(mr(Compute::CodesInBf16Tiles, 512, nibbles(32, false)), 8);
    }

    /// Code for a level asks Zen 5's lines nearer, and no other code tells CPUs apart.
    #[test]
    fn levels_read_as_the_cpu_likes_that_they_run_on() {
        let on = |cpu: &str, rows, coding| {
            let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).unwrap();
            let panels = Panels { nr: isa.panel_nr(), k_pack: 4, k: 2048, groups: 1, group_cols: 2048, ways: 1, coding };
            let choose = |tuned| MatmulWork { isa: &isa, rows, panels: &panels, dtype: DType::Bf16, compute: Compute::F32 }.choose(tuned);
            let (tile, on) = choose(None);
            // A tile that reads as the heuristic says leaves it to the CPU, another one does not.
            assert_eq!(choose(Some(MatmulTile { n_block: 1, ..tile })).1, on);
            assert_eq!(choose(Some(MatmulTile { fetch: Fetch { streams: 2, ..tile.fetch }, ..tile })).1, []);
            let reading = |f: &Fetch| f.reading(rows as u32, f.streams);
            on.iter().map(|(kind, f)| (*kind, f.streams, reading(f).ahead, f.past_l2)).collect::<Vec<_>>()
        };
        let int4 = Coding::Int4 { group: 32, zeros: false };
        for level in ["x86-64-v3", "x86-64-v4"] {
            let far = |l1| Distances { l2: 0, l1 };
            assert_eq!(on(level, 1, Coding::Elements), [(CpuKind::Zen5, 4, far(2048), true)]);
            assert_eq!(on(level, 1, int4), [(CpuKind::Zen5, 1, far(8192), true)]);
            assert_eq!([2, 4].map(|rows| on(level, rows, Coding::Elements)), [[(CpuKind::Zen5, 1, far(8192), true)]; 2]);
        }
        for cpu in ["znver4", "znver5", "haswell", "graniterapids"] {
            assert_eq!(on(cpu, 1, Coding::Elements), []);
        }
    }

    #[test]
    fn a_single_row_of_codes_walks_as_its_cpu_likes() {
        let walk = |cpu: &str, rows, coding| {
            let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).unwrap();
            let panels = Panels { nr: isa.panel_nr(), k_pack: 4, k: 2048, groups: 1, group_cols: 2048, ways: 1, coding };
            let tile = MatmulWork { isa: &isa, rows, panels: &panels, dtype: DType::U8, compute: Compute::Int8Dot }.heuristic();
            let Distances { l2, l1 } = tile.fetch.reading(rows as u32, tile.fetch.streams).ahead;
            (tile.fetch.streams, l2, l1)
        };
        let (bf16, int8, int4) = (Coding::Elements, Coding::Int8 { group: 256 }, Coding::Int4 { group: 32, zeros: false });
        assert_eq!([bf16, int8, int4].map(|coding| walk("znver5", 1, coding)), [(4, 0, 1024), (4, 0, 1024), (1, 0, 8192)]);
        assert_eq!([bf16, int8, int4].map(|coding| walk("x86-64-v3", 1, coding)), [(4, 1024, 0), (1, 0, 8192), (1, 0, 8192)]);
        assert_eq!(walk("znver5", 2, int4), (1, 0, 8192));
        assert_eq!(walk("znver4", 1, int4), walk("znver4", 1, bf16));
    }

    #[test]
    fn blocks_by_tiles_fit_l1() {
        let isa = Isa::lookup(X86_64_TRIPLE, "sapphirerapids", &[]).unwrap();
        let k_block = |k, compute, dtype, coding| {
            let panels = Panels { nr: isa.panel_nr(), k_pack: 2, k, groups: 1, group_cols: 2048, ways: 1, coding };
            MatmulWork { isa: &isa, rows: 512, panels: &panels, dtype, compute }.heuristic().k_block
        };
        let (int8, int4) = (Coding::Int8 { group: 256 }, Coding::Int4 { group: 32, zeros: false });
        let of = |k| {
            [
                k_block(k, Compute::Bf16Tiles, DType::Bf16, Coding::Elements),
                k_block(k, Compute::Int8Tiles, DType::I8, int8),
                k_block(k, Compute::CodesInBf16Tiles, DType::U8, int4),
            ]
        };
        assert_eq!([of(8192), of(768)], [[512, 1024, 512], [384, 768, 384]]);
    }

    #[test]
    fn nibbles_are_taken_apart_once_unless_that_costs_nothing() {
        let blocks = |cpu: &str, rows, group| {
            let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).unwrap();
            let coding = Coding::Int4 { group, zeros: false };
            let panels = Panels { nr: isa.panel_nr(), k_pack: 8, k: 2048, groups: 1, group_cols: 2048, ways: 1, coding };
            let tile = MatmulWork { isa: &isa, rows, panels: &panels, dtype: DType::U8, compute: Compute::Int8Dot }.heuristic();
            (tile.mr, tile.block_mr, tile.widen, tile.n_block)
        };
        assert_eq!([32, 128].map(|group| blocks("znver5", 512, group)), [(8, 6, false, 3), (8, 8, false, 3)]);
        assert_eq!([32, 128].map(|group| blocks("znver4", 512, group)), [(8, 8, true, 2); 2]);
        assert_eq!(blocks("znver5", 4, 32), (4, 4, false, 3));
    }

    #[test]
    fn rows_are_busy_by_their_instructions_per_line() {
        let rows = |cpu: &str, dtype, compute, coding| {
            let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).unwrap();
            let panels = Panels { nr: isa.panel_nr(), k_pack: 1, k: 2048, groups: 1, group_cols: 2048, ways: 1, coding };
            let tile = MatmulWork { isa: &isa, rows: 8, panels: &panels, dtype, compute }.heuristic();
            tile.fetch.busy.map(|busy| (busy.rows, busy.l1))
        };
        let (elements, int4) = (Coding::Elements, Coding::Int4 { group: 32, zeros: false });
        assert_eq!(rows("znver4", DType::Bf16, Compute::Bf16Dot, elements), Some((7, 3072)));
        assert_eq!(rows("znver4", DType::F32, Compute::F32, elements), Some((7, 3072)));
        assert_eq!(rows("znver4", DType::Bf16, Compute::F32, elements), Some((4, 3072)));
        assert_eq!(rows("znver4", DType::U8, Compute::Int8Dot, Coding::Int8 { group: 256 }), Some((7, 3072)));
        assert_eq!(rows("znver4", DType::U8, Compute::Int8Dot, int4), Some((2, 3072)));
        // Zen 5: four rows of elements and of bytes are not, of nibbles are.
        assert_eq!(rows("znver5", DType::Bf16, Compute::Bf16Dot, elements), Some((5, 8192)));
        assert_eq!(rows("znver5", DType::U8, Compute::Int8Dot, Coding::Int8 { group: 256 }), Some((5, 8192)));
        assert_eq!(rows("znver5", DType::U8, Compute::Int8Dot, int4), Some((2, 8192)));
        // Never where lines come from further away anyway.
        assert_eq!(rows("sapphirerapids", DType::U8, Compute::Int8Dot, int4), None);
    }
}
