//! Packed matmul: `out[row, col] = epilogue(sum_k a[row, k] * w[col, k])`, from one row (a matrix-vector product) to a full bucket.
//!
//! In: [`Matmul`] (all blocking decisions). Out: one function per kernel and, private to the module, one function per row count of a
//! tile and one epilogue.
//!
//! ```text
//! kernel:    prologue for all rows; then
//!   up to mr rows:   for pieces of panels of the thread's share, and of others' at its end (`share_out`) { stream.m; group nests }
//!   a few times mr (`streamed_rows`), where more rows widen weights: the same for blocks of panels, by each block of rows in turn
//!   up to 32 by tiles (AMX), see `by_tiles`: as up to mr rows, with `aloneN`
//!   more:            for the thread's shares of panels: for pass of rows { for block of panels { for block of k { for block of m rows { block.m; group nests } } } }
//! stream.m:  for p panels side by side { tile = microkernel over all k;  epilogue(tile) }              limited by memory; p = 1: way by way where streams are fewer or registers do not hold all ways
//! block.m:   for each panel { tile = microkernel over a block of k, from tile;  epilogue(tile) at the last }    limited by arithmetic; way by way where registers do not hold all
//! widen.m:   block.m of the first block of rows where weights are widened: it keeps the widened weights for the others
//! tilesN:    block.m of up to N (1 or 2) times 16 rows by tiles (AMX), the number of rows a value; nibbles were taken apart for all of them (apart); in another order, see `by_tiles`
//! aloneN:    a single block of rows by tiles, over all k as `stream.m`; takes nibbles apart, or makes them bf16, itself
//! epilogue:  for row, for vector of columns { evaluate expressions, store }
//! ahead:     asks for what the epilogue will read by row and column (residuals), in block.m before the last block of k
//! ```
//!
//! Every output element is one chain of `fma` (or of the bf16 dot) over k in storage order, in every row count, walk, blocking and thread
//! count: results have the same bits everywhere. Few rows get their independent chains from panels side by side, never from k; blocks of k
//! go on with the accumulators of the block before. Row blocks are balanced (33 rows at `block_mr` 12: 11, 11, 11), and an exact instance
//! exists for each row count that there can be ([`RowCounts`]): no padding rows. A bucket gets more rows than the one before holds, so that
//! a large one needs neither few rows nor small blocks.
//!
//! The accumulators go through a small tile in memory to the epilogue, so that the epilogue is generated once per kernel and not once
//! per row count: a register tile of 24 vectors costs some 30 cycles there, against `12 k` in the loop.
//!
//! In files: `check` (what may be asked for), `blocks` (what a pass goes over), `by_registers` and `by_tiles` (the loops of a pass and its
//! functions), `epilogue`; here the kernel itself, who does what, and addresses.
//!
//! Sources: Goto & van de Geijn 2008 and BLIS (Van Zee & van de Geijn 2015) for the loop structure; tile shapes and prefetch
//! distances were measured with `examples/kernel_speed.rs`.

mod blocks;
mod by_registers;
mod by_tiles;
mod check;
mod epilogue;

pub use self::blocks::RowCounts;

use self::blocks::Blocks;
use self::by_registers::Weights;
use self::check::check;
use super::microkernel::{AHEAD_SHIFT, At, Feed, Keep, L2, LINE_WORDS, Microkernel, Start, Walk};
use super::{Call, KERNEL_PARAMS, define_kernel, int_dot, int_mmla, int_tiles, loops, mmla, quantise, tiles};
use crate::error::Error;
use crate::expr::{Eval, Point, loads_by_row_and_col};
use crate::isa::{BF16_TILE_K, Isa};
use crate::llvm::builder::{Cmp, Elem, Fb, Function, ModuleBuilder, Ty, Value, Visibility};
use crate::program::{Coding, Compute, DType, Matmul, Place, Program, Quantise, SHORT_GROUP};
use rcompile_runtime::abi::field;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// Adds the kernel `name(ptr ctx, i32 thread, i32 threads, i32 layer)` to the module.
pub fn define<'c>(mb: &ModuleBuilder<'c>, program: &Program, name: &str, kernel: &Matmul) -> Result<Function<'c>, Error> {
    check(mb.isa(), program, name, kernel)?;
    let blocks = Blocks::new(mb.isa(), program, kernel);
    let generator = Generator { mb, program, kernel, name, dtype: weight_type(program, kernel) };
    let epilogue = generator.epilogue();
    let ahead = generator.ahead();
    let counts = RowCounts::new(program, kernel, blocks.as_ref());
    let stream = Instances::new(&counts.stream, |m| generator.stream(m, &epilogue));
    let blocked = blocks.map(|blocks| {
        let by_registers = |rows: &_, weights| Instances::new(rows, |m| generator.block(m, &blocks, weights, &epilogue, ahead.as_ref()));
        let functions = match (kernel.compute.by_tiles(), blocks.widen) {
            (true, widen) => BlockFunctions::Tiles {
                several: (!counts.several.is_empty()).then(|| by_tiles::Several {
                    rows: counts.several.clone().map(|row_tiles| generator.tiles(row_tiles, &blocks, &epilogue, ahead.as_ref())).collect(),
                    apart: widen.then(|| generator.take_apart(&blocks)),
                }),
                alone: counts.alone.clone().map(|row_tiles| generator.alone(row_tiles, &blocks, &epilogue, ahead.as_ref())).collect(),
            },
            (_, true) => BlockFunctions::Registers {
                rows: by_registers(&counts.block, Weights::Widened),
                first: Some(by_registers(&counts.first, Weights::Widen)),
            },
            (_, false) => BlockFunctions::Registers { rows: by_registers(&counts.block, Weights::Stored), first: None },
        };
        Blocked { blocks, functions }
    });
    Ok(generator.kernel(&Rows { stream, blocked }))
}

/// Bytes that the kernel uses at the END of each thread's private area (`ctx.private_stride` minus this): the planner adds the largest
/// of all kernels to what it places there itself.
pub fn private_bytes(isa: &Isa, program: &Program, kernel: &Matmul) -> u64 {
    block_bytes(isa, program, kernel) + (mmla::packed_bytes(kernel) + int_mmla::packed_bytes(kernel)).next_multiple_of(128)
}

/// The numbers of rows that the kernel has functions for.
pub fn row_counts(isa: &Isa, program: &Program, kernel: &Matmul) -> RowCounts {
    RowCounts::new(program, kernel, Blocks::new(isa, program, kernel).as_ref())
}

/// The part of [`Blocks`] in it, which comes first.
fn block_bytes(isa: &Isa, program: &Program, kernel: &Matmul) -> u64 {
    Blocks::new(isa, program, kernel).map_or(0, |b| b.bytes)
}

fn weight_type(program: &Program, kernel: &Matmul) -> DType {
    program.weights[kernel.weight.index()].dtype
}

/// Pieces of what threads share out are at least the so-many-th part of what a row walks side by side: at the end fewer streams cost less
/// than a core that waits, and of whole walks narrow matmuls have too few.
const PIECES_OF_WALK: u32 = 4;

/// k that the loops go through: records are padded to whole groups.
fn depth(kernel: &Matmul) -> u32 {
    if kernel.compute.takes_codes() { kernel.panels.padded_k() } else { kernel.panels.k }
}

/// Functions of a kernel.
struct Rows<'c> {
    /// For all k of a panel at once.
    stream: Instances<'c>,
    blocked: Option<Blocked<'c>>,
}

struct Blocked<'c> {
    blocks: Blocks,
    functions: BlockFunctions<'c>,
}

/// A function for each number of rows of a register tile that there is.
struct Instances<'c> {
    /// Rows of the first one.
    least: u32,
    functions: Vec<Function<'c>>,
}

impl<'c> Instances<'c> {
    fn new(rows: &RangeInclusive<u32>, define: impl Fn(u32) -> Function<'c>) -> Self {
        Instances { least: *rows.start(), functions: rows.clone().map(define).collect() }
    }
}

/// Functions of a block of rows.
enum BlockFunctions<'c> {
    /// Sums in vector registers.
    Registers {
        rows: Instances<'c>,
        /// For the first block of rows, where it widens the weights for the others.
        first: Option<Instances<'c>>,
    },
    /// Sums in tiles, see [`by_tiles`].
    Tiles {
        /// Where there can be more than one block of rows.
        several: Option<by_tiles::Several<'c>>,
        /// Where there can be a single one, of one tile of rows, or of two.
        alone: Vec<Function<'c>>,
    },
}

/// A block of rows.
struct RowBlock<'c> {
    number: Value<'c>,
    /// Blocks.
    count: Value<'c>,
    /// The first one.
    row: Value<'c>,
    rows: Value<'c>,
}

/// Arguments of a block of rows beside those of its kernel.
#[derive(Clone, Copy)]
struct Block<'c> {
    /// Rows, at the block's first k.
    a: Value<'c>,
    /// The first panel as stored, there too, or as it is read.
    w: Value<'c>,
    /// The first one as widened.
    widened: Value<'c>,
    /// Its block of k is the first (bit 0), the last (bit 1).
    stage: Value<'c>,
    /// Its k.
    k: Value<'c>,
    /// Sums that are kept between blocks of k.
    tiles: Value<'c>,
    /// First row.
    row: Value<'c>,
    /// Rows.
    rows: Value<'c>,
    /// First panel.
    first: Value<'c>,
    /// Behind the last.
    last: Value<'c>,
    /// What to ask for meanwhile.
    ahead: Value<'c>,
    /// Bytes of that, of each panel of one way.
    ahead_part: Value<'c>,
}

/// Addresses of one panel (of all ways) of a block of rows.
struct PanelAt<'c> {
    w: Value<'c>,
    widened: Value<'c>,
    tile: Value<'c>,
    ahead: Value<'c>,
}

/// One kernel's generator.
struct Generator<'a, 'c> {
    mb: &'a ModuleBuilder<'c>,
    program: &'a Program,
    kernel: &'a Matmul,
    name: &'a str,
    /// Weights as stored.
    dtype: DType,
}

/// What the loops of a kernel know: its share and addresses.
struct Share<'c> {
    /// Arguments of [`KERNEL_PARAMS`].
    call: [Value<'c>; 4],
    a: Value<'c>,
    w: Value<'c>,
    scratch: Value<'c>,
    /// Units.
    begin: Value<'c>,
    end: Value<'c>,
}

/// Group nests on rows `first .. last` of units `first .. last`.
type Nests<'n, 'c> = dyn Fn(Value<'c>, Value<'c>, Value<'c>, Value<'c>) + 'n;

impl<'c> Generator<'_, 'c> {
    /// `kernel(ctx, thread, threads, layer)`.
    fn kernel(&self, rows: &Rows<'c>) -> Function<'c> {
        define_kernel(self.mb, self.program, self.name, |call| {
            let fb = call.fb;
            let kernel = self.kernel;
            let row_count = call.extent(kernel.rows);
            if let Some(nest) = &kernel.prologue {
                let scope = loops::bind(call, nest);
                fb.for_(fb.int(0), row_count, 1, |row| loops::body(fb, nest, &mut scope.clone(), &[row]));
            }
            if let Some(quantise) = &kernel.quantise {
                quantise::all_rows(call, quantise);
            }
            let narrow = |v| fb.trunc(v, Elem::I32);
            let args = [call.ctx, narrow(call.thread), narrow(call.threads), narrow(call.layer)];
            let (a, w) = (call.base(&kernel.a.place), call.base(&Place::Weight(kernel.weight)));
            let scopes: Vec<_> = kernel.group_nests.iter().map(|nest| loops::bind(call, &nest.nest)).collect();
            // Group nests on rows `row .. row_end` of units `first .. last`.
            let nests = |row: Value<'c>, row_end: Value<'c>, first: Value<'c>, last: Value<'c>| {
                for (nest, scope) in kernel.group_nests.iter().zip(&scopes) {
                    let first = fb.max(first, fb.int(nest.groups.start.into()));
                    let last = fb.min(last, fb.int(nest.groups.end.into()));
                    fb.for_(row, row_end, 1, |row| {
                        fb.for_(first, last, 1, |group| {
                            let group = fb.sub(group, fb.int(nest.groups.start.into()));
                            loops::body(fb, &nest.nest, &mut scope.clone(), &[row, group]);
                        });
                    });
                }
            };
            let (units, unit_panels) = kernel.units();
            let stream = |row: Value<'c>, count: Value<'c>, begin: Value<'c>, end: Value<'c>| {
                self.dispatch(fb, count, &rows.stream, |function| {
                    let [first, last] = [begin, end].map(|unit| fb.mul_int(unit, unit_panels.into()));
                    fb.call(function, &[&args[..], &[self.row_of(fb, a, row), w, row, first, last]].concat());
                });
                nests(row, fb.add(row, count), begin, end);
            };
            let piece = self.side_by_side().div_ceil(PIECES_OF_WALK * unit_panels);
            let pieces = |body: &dyn Fn(Value<'c>, Value<'c>)| call.share_out(units, piece, body);
            let few = || pieces(&|begin, end| stream(fb.int(0), row_count, begin, end));
            let Some(blocked) = &rows.blocked else { return few() };
            // The second half of the rows finds the block of panels in L2.
            let halves = || {
                pieces(&|begin, end| {
                    self.blocks_of_units(fb, fb.int(blocked.blocks.units.into()), (begin, end), |first, last| {
                        self.blocks_of_rows(fb, (fb.int(0), row_count), kernel.tile.mr, |block| stream(block.row, block.rows, first, last));
                    });
                });
            };
            let many = || {
                let scratch = self.scratch(call);
                self.shares(call, |begin, end| {
                    let share = Share { call: args, a, w, scratch, begin, end };
                    self.passes(fb, row_count, |pass| match &blocked.functions {
                        BlockFunctions::Registers { .. } => self.pass_by_registers(fb, &share, blocked, pass, &nests),
                        BlockFunctions::Tiles { .. } => self.pass_by_tiles(fb, &share, blocked, pass, &nests),
                    });
                });
            };
            // Of at least `from` rows: `then` for up to `most`, `otherwise` for more; nothing is compared where all or none are that few.
            let (least, capacity) = (self.program.least(kernel.rows), self.program.capacity(kernel.rows));
            let up_to = |from: u32, most: u32, then: &dyn Fn(), otherwise: &dyn Fn()| match (least.max(from) <= most, capacity <= most) {
                (false, _) => otherwise(),
                (true, true) => then(),
                (true, false) => fb.either(fb.cmp(Cmp::Le, row_count, fb.int(most.into())), then, otherwise),
            };
            let streamed = blocked.blocks.streamed_rows(kernel);
            let more = || match &blocked.functions {
                BlockFunctions::Tiles { alone, .. } => {
                    let alone = || {
                        by_tiles::shapes(fb, kernel).set(fb, row_count);
                        pieces(&|begin, end| {
                            let [first, last] = [begin, end].map(|unit| fb.mul_int(unit, unit_panels.into()));
                            by_tiles::of_rows(fb, row_count, alone, |function| {
                                fb.call(function, &[&args[..], &[a, w, row_count, first, last]].concat());
                            });
                            nests(fb.int(0), row_count, begin, end);
                        });
                    };
                    up_to(streamed + 1, tiles::ROWS, &alone, &many);
                    fb.tile_release();
                }
                BlockFunctions::Registers { .. } => many(),
            };
            up_to(1, kernel.tile.mr, &few, &|| up_to(kernel.tile.mr + 1, streamed, &halves, &more));
        })
    }

    /// Panels that a single row walks side by side.
    fn side_by_side(&self) -> u32 {
        let isa = self.mb.isa();
        Walk::stream(isa, &Microkernel::stored(isa, self.kernel, self.dtype, 1), 1, self.kernel.panels.panels()).panels
    }

    /// The thread's units, `body(begin, end)`: its share of each run of groups with the same nests, where every thread gets some of each,
    /// else its share of all. Heads whose keys go to the cache take longest, and lie together.
    fn shares(&self, call: &Call<'_, '_, 'c>, body: impl FnOnce(Value<'c>, Value<'c>)) {
        let fb = call.fb;
        let (units, _) = self.kernel.units();
        let groups = self.kernel.group_nests.iter().flat_map(|nest| [nest.groups.start, nest.groups.end]);
        let cuts: Vec<u32> = groups.chain([0, units]).collect::<BTreeSet<_>>().into_iter().collect();
        let runs = cuts.len() as i64 - 1;
        if runs == 1 {
            let (begin, end) = call.share(fb.int(units.into()));
            return body(begin, end);
        }
        let least = cuts.windows(2).map(|run| run[1] - run[0]).min().unwrap_or(units);
        let by_run = fb.cmp(Cmp::Le, call.threads, fb.int(least.into()));
        let table: Vec<i64> = cuts.iter().map(|cut| (*cut).into()).collect();
        let table = fb.module().const_table("runs", &table);
        let cut = |n: Value<'c>| fb.load(Ty::I64, fb.index(table, n, 8), 8);
        fb.for_(fb.int(0), fb.select(by_run, fb.int(runs), fb.int(1)), 1, |run| {
            let first = cut(run);
            let last = fb.select(by_run, cut(fb.add_int(run, 1)), fb.int(units.into()));
            let (begin, end) = call.share(fb.sub(last, first));
            body(fb.add(first, begin), fb.add(first, end));
        });
    }

    /// This kernel's part of the thread's private area.
    fn scratch(&self, call: &Call<'_, '_, 'c>) -> Value<'c> {
        let bytes = private_bytes(self.mb.isa(), self.program, self.kernel);
        call.fb.offset(call.private(), call.fb.sub(call.u64_field(field::PRIVATE_STRIDE), call.fb.int(bytes as i64)))
    }

    /// Calls `then` for the function of `rows`.
    fn dispatch(&self, fb: &Fb<'_, 'c>, rows: Value<'c>, instances: &Instances<'c>, then: impl Fn(&Function<'c>)) {
        for (m, function) in (i64::from(instances.least)..).zip(&instances.functions) {
            fb.if_(fb.cmp(Cmp::Eq, rows, fb.int(m)), || then(function));
        }
    }

    /// All rows in passes `(first row, rows)` of equal size, as [`RowCounts`] counts them: `body(pass)`.
    fn passes(&self, fb: &Fb<'_, 'c>, rows: Value<'c>, body: impl FnOnce((Value<'c>, Value<'c>))) {
        let most = i64::from(self.kernel.tile.m_block);
        if most == 0 || self.program.capacity(self.kernel.rows) <= self.kernel.tile.m_block {
            return body((fb.int(0), rows));
        }
        let passes = fb.div(fb.add_int(rows, most - 1), fb.int(most));
        let begin = |pass: Value<'c>| fb.div(fb.mul(rows, pass), passes);
        fb.for_(fb.int(0), passes, 1, |pass| {
            let first = begin(pass);
            body((first, fb.sub(begin(fb.add_int(pass, 1)), first)));
        });
    }

    /// [`Block::stage`] of block `kb` of k.
    fn stage(&self, fb: &Fb<'_, 'c>, kb: Value<'c>, is_last: Value<'c>) -> Value<'c> {
        let is_first = fb.cmp(Cmp::Eq, kb, fb.int(0));
        fb.or(fb.zext(is_first, Elem::I64), fb.mul_int(fb.zext(is_last, Elem::I64), 2))
    }

    /// `body(first, last)` for each of the blocks of `most` units of `begin .. end`.
    fn blocks_of_units(&self, fb: &Fb<'_, 'c>, most: Value<'c>, (begin, end): (Value<'c>, Value<'c>), body: impl Fn(Value<'c>, Value<'c>)) {
        let count = fb.div(fb.add(fb.sub(end, begin), fb.add_int(most, -1)), most);
        fb.for_(fb.int(0), count, 1, |number| {
            let first = fb.add(begin, fb.mul(number, most));
            body(first, fb.min(fb.add(first, most), end));
        });
    }

    /// `rows` rows from `first` on in blocks of equal size, at most `most`, as [`RowCounts`] counts
    /// them: no small one is left over.
    fn blocks_of_rows(&self, fb: &Fb<'_, 'c>, (first, rows): (Value<'c>, Value<'c>), most: u32, body: impl Fn(RowBlock<'c>)) {
        let most = i64::from(most);
        let count = fb.div(fb.add_int(rows, most - 1), fb.int(most));
        let (each, more) = (fb.div(rows, count), fb.rem(rows, count));
        fb.for_(fb.int(0), count, 1, |number| {
            let row = fb.add(first, fb.add(fb.mul(number, each), fb.min(number, more)));
            let rows = fb.add(each, fb.zext(fb.cmp(Cmp::Lt, number, more), Elem::I64));
            body(RowBlock { number, count, row, rows });
        });
    }

    /// Address of a row of A.
    fn row_of(&self, fb: &Fb<'_, 'c>, a: Value<'c>, row: Value<'c>) -> Value<'c> {
        fb.index(a, fb.mul_int(row, self.kernel.a_stride.into()), self.kernel.a.dtype.size())
    }

    /// Bytes of a panel with all its ways.
    fn panel_bytes(&self) -> i64 {
        (self.kernel.panels.panel_bytes(self.dtype) * u64::from(self.kernel.panels.ways)) as i64
    }

    /// Bytes of a panel before `k`; about that many where `k` is no beginning of a group.
    fn bytes_before(&self, fb: &Fb<'_, 'c>, k: Value<'c>) -> Value<'c> {
        let panels = &self.kernel.panels;
        match panels.coding {
            Coding::Int8Groups { group, .. } | Coding::Int4 { group, .. } => {
                fb.mul_int(fb.lshr(k, group.trailing_zeros()), panels.group_bytes() as i64)
            }
            _ => fb.mul_int(k, panels.bytes_before(1, self.dtype) as i64),
        }
    }

    /// Elements (bytes of records) of a row before `k`.
    fn a_before(&self, fb: &Fb<'_, 'c>, k: Value<'c>) -> Value<'c> {
        match self.kernel.panels.coding.group() {
            Some(group) if self.kernel.compute.takes_codes() => {
                fb.mul_int(fb.lshr(k, group.trailing_zeros()), self.kernel.compute.record(group).into())
            }
            _ => k,
        }
    }

    /// A function of rows that go through panels once: `(.., a, w, row or rows, first_panel, last_panel)`.
    fn define_panels(&self, name: &str, body: impl FnOnce(&Fb<'_, 'c>, &[Value<'c>], [Value<'c>; 5])) -> Function<'c> {
        let params = [&KERNEL_PARAMS[..], &[Ty::PTR, Ty::PTR, Ty::I64, Ty::I64, Ty::I64]].concat();
        self.mb.define(name, &params, None, Visibility::InternalNoInline, |fb, args| {
            let (call, own) = args.split_at(KERNEL_PARAMS.len());
            body(fb, call, own.try_into().expect("five"));
        })
    }

    /// A function of a block of rows.
    fn define_block(&self, name: &str, body: impl FnOnce(&Fb<'_, 'c>, &[Value<'c>], Block<'c>)) -> Function<'c> {
        let own = [Ty::PTR, Ty::PTR, Ty::PTR, Ty::I64, Ty::I64, Ty::PTR, Ty::I64, Ty::I64, Ty::I64, Ty::I64, Ty::PTR, Ty::I64];
        let params = [&KERNEL_PARAMS[..], &own].concat();
        self.mb.define(name, &params, None, Visibility::InternalNoInline, |fb, args| {
            let (call, rest) = args.split_at(KERNEL_PARAMS.len());
            let [a, w, widened, stage, k, tiles, row, rows, first, last, ahead, ahead_part] = *rest else { unreachable!() };
            body(fb, call, Block { a, w, widened, stage, k, tiles, row, rows, first, last, ahead, ahead_part });
        })
    }

    /// First sums of a block of k.
    fn start(&self, fb: &Fb<'_, 'c>, blocks: &Blocks, block: &Block<'c>) -> Start<'c> {
        match blocks.count {
            1 => Start::Zero,
            _ => {
                let is_first = fb.cmp(Cmp::Ne, fb.and(block.stage, fb.int(1)), fb.int(0));
                Start::Tile { keep: fb.select(is_first, fb.i32(0), fb.i32(-1)) }
            }
        }
    }

    /// The panels of a block of rows: `multiply` leaves a panel's sums in its tile; after the last block of k comes the epilogue.
    /// `(panel_bytes, one_tile)`: bytes of a panel of one way as it is read, and where the sums of each panel go in its turn when there is
    /// one block of k.
    #[expect(clippy::too_many_arguments, reason = "what a block of rows is made of")]
    fn panels_of_block(
        &self,
        fb: &Fb<'_, 'c>,
        call: &[Value<'c>],
        block: &Block<'c>,
        blocks: &Blocks,
        (panel_bytes, one_tile): (u64, Option<Value<'c>>),
        (epilogue, epilogue_ahead): (&Function<'c>, Option<&Function<'c>>),
        multiply: impl FnOnce(PanelAt<'c>),
    ) {
        let panels = &self.kernel.panels;
        let Block { row, rows, first, .. } = *block;
        let tile_bytes = fb.mul_int(rows, i64::from(panels.nr * panels.ways) * 4);
        fb.for_(fb.int(0), fb.sub(block.last, first), 1, |panel| {
            let tile = one_tile.unwrap_or_else(|| fb.offset(block.tiles, fb.mul(panel, tile_bytes)));
            let w = fb.offset(block.w, fb.mul_int(panel, (panel_bytes * u64::from(panels.ways)) as i64));
            let ahead = fb.offset(block.ahead, fb.mul_int(panel, self.panel_bytes()));
            let widened = fb.offset(block.widened, fb.mul_int(panel, (blocks.widened_panel * u64::from(panels.ways)) as i64));
            let column = fb.mul_int(fb.add(first, panel), panels.nr.into());
            let at_last = |then: &dyn Fn()| match blocks.count {
                1 => then(),
                _ => fb.if_(fb.cmp(Cmp::Ge, block.stage, fb.int(2)), then),
            };
            if let Some(function) = epilogue_ahead {
                at_last(&|| {
                    fb.call(function, &[call, &[row, rows, column]].concat());
                });
            }
            multiply(PanelAt { w, widened, tile, ahead });
            at_last(&|| {
                fb.call(epilogue, &[call, &[tile, row, rows, column, fb.int(panels.nr.into())]].concat());
            });
        });
    }
}
