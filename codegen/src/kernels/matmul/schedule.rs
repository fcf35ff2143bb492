//! How a kernel goes over its rows and panels: what follows from its decisions and the CPU, computed in one place.
//!
//! In: a [`Matmul`] and an [`Isa`]. Out: [`Schedule`]: which way which number of rows goes, blocks of panels and of k that several blocks
//! of rows pass over, what they keep in scratch meanwhile, for which numbers of rows there are functions, and which functions of rows that
//! makes.

use super::*;
use crate::program::FewRows;

/// A kernel's schedule.
pub struct Schedule<'a> {
    pub(super) isa: &'a Isa,
    pub(super) program: &'a Program,
    pub(super) kernel: &'a Matmul,
    /// Rows and panels.
    pub(super) product: Product,
    /// How several blocks of rows pass over the weights; `None` in kernels of few rows.
    pub(super) blocks: Option<Blocks>,
    /// The ways, each with the numbers of rows that go it, fewest first: all that there can be.
    pub(super) ways: Vec<(RangeInclusive<u32>, Way)>,
    /// The numbers of rows that the kernel has functions for.
    pub row_counts: RowCounts,
}

impl<'a> Schedule<'a> {
    /// That of a kernel of the program.
    pub fn new(isa: &'a Isa, program: &'a Program, kernel: &'a Matmul) -> Schedule<'a> {
        let product = Product::new(program, kernel);
        let blocks = Blocks::new(isa, program, kernel, &product);
        let ways = ways(program, kernel, blocks.as_ref());
        let row_counts = RowCounts::new(program, kernel, &ways);
        Schedule { isa, program, kernel, product, blocks, ways, row_counts }
    }

    /// The functions of rows that the kernel calls.
    pub fn parts(&self) -> Vec<Part> {
        let mut all = vec![];
        Functions::new(self, |part| all.push(part));
        all
    }

    /// Bytes that the kernel uses at the END of each thread's private area (`ctx.private_stride` minus this): the planner adds the largest
    /// of all kernels to what it places there itself.
    pub fn private_bytes(&self) -> u64 {
        self.packed_at() + self.packed_bytes()
    }

    /// Where packed rows lie in them: behind the blocks' scratch.
    pub(super) fn packed_at(&self) -> u64 {
        self.blocks.as_ref().map_or(0, |blocks| blocks.bytes)
    }

    /// Bytes of packed rows; 0 where the product wants none.
    pub(super) fn packed_bytes(&self) -> u64 {
        self.product.packed_bytes(self.kernel.tile.mr)
    }

    /// What the planner must not ask for, by lines that name the kernel.
    pub(super) fn check(&self, name: &str) -> Result<(), Error> {
        let mut problems = self.product.problems(self.isa, name);
        let (needed, has) = (self.private_bytes(), self.program.private_bytes);
        // The planner's own rows are below it.
        let rows_end = self.kernel.private_rows_end(self.program);
        if has < rows_end + needed {
            problems.push(format!("{name}: needs {needed} bytes of private scratch behind {rows_end} of rows, has {has}"));
        }
        if problems.is_empty() { Ok(()) } else { Err(Error::Program(problems)) }
    }

    /// Panels that a single row walks side by side, on most CPUs.
    pub(super) fn side_by_side(&self) -> u32 {
        let panels = &self.kernel.panels;
        let streams = self.kernel.tile.fetch.reading(1, panels.panels() * panels.ways).streams;
        Walk::stream(self.isa, &Microkernel::stored(self.isa, &self.product, 1), 1, streams, panels.panels()).panels
    }
}

/// A way over a step's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// One block of rows, for which all k of a panel go by at once.
    Few,
    /// A few such blocks, one after the other for each block of panels.
    FewBlocks,
    /// A single block of rows by tiles.
    Alone,
    /// Passes of many blocks of rows, which go over blocks of k.
    Passes,
}

/// The ways of a kernel, from few rows to many, each with its numbers of rows: all that there can be.
fn ways(program: &Program, kernel: &Matmul, blocks: Option<&Blocks>) -> Vec<(RangeInclusive<u32>, Way)> {
    let (least, most) = (program.least(kernel.rows), program.capacity(kernel.rows));
    let few = kernel.tile.mr;
    let streamed = few * blocks.filter(|blocks| blocks.widen).map_or(1, |_| streamed_blocks(kernel));
    let alone = if kernel.compute.by_tiles() { streamed.max(tiles::ROWS) } else { streamed };
    let ends = [(few, Way::Few), (streamed, Way::FewBlocks), (alone, Way::Alone), (u32::MAX, Way::Passes)];
    let mut from = least;
    let mut ways = vec![];
    for (end, way) in ends {
        let end = end.min(most);
        if from <= end {
            ways.push((from..=end, way));
            from = end + 1;
        }
    }
    ways
}

/// Up to so many blocks of rows read weights as they are stored, where more of them widen the weights: that pays when at least two more
/// blocks read what the first one stores. (Measured on Zen 4 with int4 by 32: 9 sequences 0.86 of the tokens/s widened, 16 0.92; three and
/// four blocks are as fast either way.)
const STREAMED_BLOCKS: u32 = 2;
/// The same where a single block of rows by tiles takes nibbles apart as it goes (measured on Emerald Rapids with int4 by 128: 12 sequences
/// 1.48 times as fast by tiles; on Granite Rapids, nibbles by 32 made bf16: 9 sequences 0.98, 12 1.11).
const STREAMED_BLOCKS_TILES: u32 = 1;
/// The same where tiles spend most of their time on scaling the sums of short groups: nibbles by 32 with zero points. (Measured on Granite
/// Rapids without zero points, before a single block of rows took nibbles apart itself: 24 sequences 0.91 of the tokens/s by tiles, 32
/// 1.05; not measured since.)
const STREAMED_BLOCKS_SHORT: u32 = 3;

/// How several blocks of rows pass over the weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    /// Units (groups, or panels of a single group) per block.
    pub units: u32,
    /// k per block.
    pub k: u32,
    /// Blocks of k.
    pub count: u32,
    /// Blocks of k in a turn of tiles, see [`by_tiles`].
    pub turn: u32,
    /// Weights are widened to f32 first, `f32[panel][way][k][nr]` at the start of the scratch (nibbles for integer dots: taken apart).
    pub widen: bool,
    /// Bytes of a widened panel of one way.
    pub widened_panel: u64,
    /// Offset in the scratch of the sums that are kept between blocks of k: `f32[row][panel][way][nr]`, in tiles of a row block (rows of a
    /// pass by tiles: of that).
    pub kept_sums: u64,
    /// Bytes of them per row.
    pub kept_row: u64,
    /// Scratch in all, a multiple of 128.
    pub bytes: u64,
}

impl Blocks {
    /// Those of a kernel; none where all rows that there can be are few.
    fn new(isa: &Isa, program: &Program, kernel: &Matmul, product: &Product) -> Option<Blocks> {
        let rows = program.capacity(kernel.rows);
        if rows <= kernel.tile.mr {
            return None;
        }
        let panels = &kernel.panels;
        let (units, unit_panels) = kernel.units();
        let block_units = (kernel.tile.n_block / unit_panels).clamp(1, units);
        let takes_apart = match kernel.compute.few_rows() {
            FewRows::F32 => product.weight != DType::F32,
            FewRows::Bf16Dot | FewRows::Bf16Mmla | FewRows::Bf16Halves => false,
            FewRows::Int8Dot | FewRows::Int8Mmla => panels.coding.has_nibbles(),
        };
        // Tiles want bytes, or bf16.
        let widen = takes_apart && (kernel.compute.by_tiles() || kernel.tile.widen && rows > STREAMED_BLOCKS * kernel.tile.mr);
        // What is left of a K that is no multiple of a step has instructions of its own after the loop: then there is one block.
        let micro = Microkernel::cached(isa, product, kernel.tile.block_mr);
        let (depth, unit) = (product.depth(), micro.k_unit());
        let step = if panels.coding == Coding::Elements { unit } else { micro.step_k };
        let whole = kernel.tile.k_block == 0 || !depth.is_multiple_of(step);
        let count = if whole { 1 } else { depth.div_ceil(kernel.tile.k_block) };
        let k = depth.div_ceil(count).next_multiple_of(unit.max(2));
        let count = depth.div_ceil(k);
        let turn = if kernel.compute.by_tiles() { by_tiles::turn(isa, program, kernel, k) } else { count };
        let all_panels = block_units * unit_panels;
        // Panels (of one way) of which weights are widened, and of which sums are kept, at a time; tiles keep all sums where they come back
        // to a panel.
        let (block_units, widened_panels, kept_panels) = match (kernel.compute.by_tiles(), turn < count) {
            (false, _) => (block_units, all_panels * panels.ways, all_panels),
            (true, true) => (block_units, 1, all_panels),
            (true, false) => (1, 1, 1),
        };
        // A single block of rows by tiles keeps nothing in scratch.
        if kernel.compute.by_tiles() && rows <= tiles::ROWS {
            return Some(Blocks { units: block_units, k, count, turn, widen, widened_panel: 0, kept_sums: 0, kept_row: 0, bytes: 0 });
        }
        let pass_rows = if kernel.compute.by_tiles() { by_tiles::pass_rows(program, kernel) } else { rows };
        let widened_panel = match kernel.compute {
            Compute::CodesInBf16Tiles => u64::from(k * panels.nr) * DType::Bf16.size(),
            compute if compute.takes_codes() => int_dot::unpacked_bytes(isa, panels, k),
            _ => u64::from(k * panels.nr) * 4,
        };
        let kept_sums = if widen { widened_panel * u64::from(widened_panels) } else { 0 };
        let kept_row = if kernel.compute.by_tiles() || count > 1 { u64::from(kept_panels * panels.ways * panels.nr) * 4 } else { 0 };
        let bytes = (kept_sums + kept_row * u64::from(pass_rows)).next_multiple_of(128);
        Some(Blocks { units: block_units, k, count, turn, widen, widened_panel, kept_sums, kept_row, bytes })
    }
}

/// For which numbers of rows a kernel needs functions. Rows come in blocks of equal size, so that large buckets have no small ones: those
/// of `Body::passes` and `Generator::blocks_of_rows`, counted here for every number of rows. Public for tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowCounts {
    /// Of rows that go through all k of a panel at once (`stream`); none where it is empty.
    pub stream: RangeInclusive<u32>,
    /// Of blocks of rows by registers.
    pub block: RangeInclusive<u32>,
    /// Of the first of them, which is none of the smaller ones.
    pub first: RangeInclusive<u32>,
    /// Tiles of rows of a single block by tiles.
    pub alone: RangeInclusive<u32>,
    /// Tiles of rows of several of them.
    pub several: RangeInclusive<u32>,
}

impl RowCounts {
    fn new(program: &Program, kernel: &Matmul, ways: &[(RangeInclusive<u32>, Way)]) -> RowCounts {
        let tile = &kernel.tile;
        let capacity = program.capacity(kernel.rows);
        let rows_of = |way: Way| ways.iter().find(|(_, w)| *w == way).map_or(NONE, |(rows, _)| rows.clone());
        // The smallest block of at most `block` rows, of `size(rows, blocks)`: the last of several, or the first.
        type Size = fn(u32, u32) -> u32;
        const LAST: Size = |rows, blocks| rows / blocks;
        const FIRST: Size = |rows, blocks| rows.div_ceil(blocks);
        let smallest = |rows: RangeInclusive<u32>, block: u32, size: Size| rows.map(|rows| size(rows, rows.div_ceil(block))).min();
        // The same where they come in passes, which are about equal too.
        let smallest_of_passes = |block: u32, size: Size| {
            let pass = |rows: u32| {
                let sizes = kernel.passes().numbers(rows).map(move |number| rows / number..=rows.div_ceil(number));
                sizes.filter_map(|rows| smallest(rows, block, size)).min()
            };
            rows_of(Way::Passes).filter_map(pass).min()
        };
        let from = |least: Option<u32>, most: u32| least.map_or(NONE, |least| least..=most);
        let streamed = [Way::Few, Way::FewBlocks].into_iter().filter_map(|way| smallest(rows_of(way), tile.mr, LAST)).min();
        let stream = from(streamed, tile.mr.min(capacity));
        if !kernel.compute.by_tiles() {
            let [block, first] = [LAST, FIRST].map(|size| from(smallest_of_passes(tile.block_mr, size), tile.block_mr));
            return RowCounts { stream, block, first, alone: NONE, several: NONE };
        }
        let alone = rows_of(Way::Alone);
        let alone = if alone.is_empty() { NONE } else { row_tiles(*alone.start())..=row_tiles(*alone.end()) };
        let several = smallest_of_passes(tiles::ROWS, LAST);
        RowCounts { stream, block: NONE, first: NONE, alone, several: from(several.map(row_tiles), row_tiles(tiles::ROWS)) }
    }
}

/// No numbers.
#[expect(clippy::reversed_empty_ranges, reason = "that is what is meant")]
const NONE: RangeInclusive<u32> = 1..=0;

/// Tiles that hold `rows` rows.
fn row_tiles(rows: u32) -> u32 {
    rows.div_ceil(tiles::SIDE)
}

/// [`STREAMED_BLOCKS`] of a kernel.
fn streamed_blocks(kernel: &Matmul) -> u32 {
    match (kernel.compute, kernel.panels.coding.group()) {
        (Compute::Int8Tiles, Some(SHORT_GROUP)) => STREAMED_BLOCKS_SHORT,
        (Compute::Int8Tiles | Compute::CodesInBf16Tiles, _) => STREAMED_BLOCKS_TILES,
        _ => STREAMED_BLOCKS,
    }
}
