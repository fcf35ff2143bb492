//! Packed matmul: `out[row, col] = epilogue(sum_k a[row, k] * w[col, k])`, from one row (a matrix-vector product) to a full bucket.
//!
//! In: [`Matmul`] (all blocking decisions). Out: one function per kernel and, private to the module, `pass`, `epilogue`, `ahead` and `nests`;
//! and which functions of rows it calls ([`parts`]), which are units of their own ([`super::rows`]).
//!
//! ```text
//! kernel:    prologue for all rows; then
//!   up to mr rows:   for pieces of panels of the thread's share, and of others' at its end (`share_out`) { stream<m>; group nests }
//!   a few times mr (`streamed_rows`), where more rows widen weights: the same for blocks of panels, by each block of rows in turn
//!   up to 32 by tiles (AMX), see `by_tiles`: as up to mr rows, with alone<n>
//!   more:            for pass of rows, for the thread's share of panels { pass }, and of the last pass for pieces of others' shares
//! pass:      for block of panels { for block of k { for block of m rows { block<m>; group nests } } }
//! epilogue:  for row, for vector of columns { evaluate expressions, store }
//! ahead:     asks for what the epilogue will read by row and column (residuals), before a block of rows meets its last block of k
//! nests:     the group nests on some rows and groups
//! ```
//!
//! Every output element is one chain of `fma` (or of the bf16 dot) over k in storage order, in every row count, walk, blocking and thread
//! count: results have the same bits everywhere. Few rows get their independent chains from panels side by side, never from k; blocks of k
//! go on with the accumulators of the block before. Row blocks are balanced (33 rows at `block_mr` 12: 11, 11, 11), and an exact instance
//! exists for each row count that there can be ([`RowCounts`]): no padding rows. A bucket gets more rows than the one before holds, so that
//! a large one needs neither few rows nor small blocks.
//!
//! In files: `blocks` (what a pass goes over), `functions` (what is called), `by_registers` and `by_tiles` (the loops of a pass),
//! `epilogue`; here the kernel itself, who does what, and addresses.
//!
//! Sources: Goto & van de Geijn 2008 and BLIS (Van Zee & van de Geijn 2015) for the loop structure; tile shapes and prefetch
//! distances were measured with `examples/kernel_speed.rs`.

mod blocks;
mod by_registers;
mod by_tiles;
mod epilogue;
mod functions;

pub use self::blocks::RowCounts;

use self::blocks::Blocks;
use self::functions::{BlockFunctions, Functions, Instances, Several};
use super::microkernel::{L2, LINE_WORDS, Microkernel, Walk};
use super::part::Part;
use super::product::Product;
use super::rows::{Block, Caller, Span, TileBlock, ahead_params, epilogue_params};
use super::share::two_have_two_pieces;
use super::{Call, KERNEL_PARAMS, define_kernel, int_dot, int_tiles, loops, quantise, tiles};
use crate::error::Error;
use crate::expr::{Eval, Point, loads_by_row_and_col};
use crate::isa::Isa;
use crate::llvm::builder::{Cmp, Elem, Fb, Function, ModuleBuilder, Ty, Value, Visibility};
use crate::program::{Coding, Compute, DType, Matmul, Place, Program, SHORT_GROUP};
use rcompile_runtime::abi::field;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// Adds the kernel `name(ptr ctx, i32 thread, i32 threads, i32 layer)` to the module; it calls its parts by `symbol`.
pub fn define<'c>(
    mb: &ModuleBuilder<'c>,
    program: &Program,
    name: &str,
    kernel: &Matmul,
    symbol: impl Fn(&Part) -> String,
) -> Result<Function<'c>, Error> {
    check(mb.isa(), program, name, kernel)?;
    let blocks = Blocks::new(mb.isa(), program, kernel);
    let generator = Generator { mb, program, kernel, name, product: Product::new(program, kernel) };
    let functions = Functions::new(program, kernel, blocks.as_ref(), |part| part.declare(mb, &symbol(&part)));
    Ok(generator.kernel(blocks.as_ref(), &functions))
}

/// The kernel and its functions of rows, `<name>.stream4` and the like, in one module: for measurements, and tests of one kernel.
pub fn define_whole<'c>(mb: &ModuleBuilder<'c>, program: &Program, name: &str, kernel: &Matmul) -> Result<Function<'c>, Error> {
    let symbol = |part: &Part| format!("{name}.{}", part.name());
    for part in parts(mb.isa(), program, kernel) {
        part.define(mb, &symbol(&part))?;
    }
    define(mb, program, name, kernel, symbol)
}

/// The functions of rows that a kernel calls.
pub fn parts(isa: &Isa, program: &Program, kernel: &Matmul) -> Vec<Part> {
    let mut all = vec![];
    Functions::new(program, kernel, Blocks::new(isa, program, kernel).as_ref(), |part| all.push(part));
    all
}

/// What the planner must not ask for.
fn check(isa: &Isa, program: &Program, name: &str, kernel: &Matmul) -> Result<(), Error> {
    let mut problems = Product::new(program, kernel).problems(isa, name);
    let needed = private_bytes(isa, program, kernel);
    if program.private_bytes < needed {
        problems.push(format!("{name}: needs {needed} bytes of private scratch, has {}", program.private_bytes));
    }
    if problems.is_empty() { Ok(()) } else { Err(Error::Program(problems)) }
}

/// Bytes that the kernel uses at the END of each thread's private area (`ctx.private_stride` minus this): the planner adds the largest
/// of all kernels to what it places there itself.
pub fn private_bytes(isa: &Isa, program: &Program, kernel: &Matmul) -> u64 {
    let blocks = Blocks::new(isa, program, kernel).map_or(0, |blocks| blocks.bytes);
    blocks + Product::new(program, kernel).packed_bytes(kernel.tile.mr)
}

/// The numbers of rows that the kernel has functions for.
pub fn row_counts(isa: &Isa, program: &Program, kernel: &Matmul) -> RowCounts {
    RowCounts::new(program, kernel, Blocks::new(isa, program, kernel).as_ref())
}

/// Pieces of what threads share out are at least the so-many-th part of what a row walks side by side: at the end fewer streams cost less
/// than a core that waits, and of whole walks narrow matmuls have too few.
const PIECES_OF_WALK: u32 = 4;

/// Of so many passes of rows and more, the last one can be done by others; of fewer a part of it, so that it is a quarter of a share. In
/// one pass, whose rows are in L2 meanwhile, or come there anew for each block of panels anyway, small pieces cost little: prompts of 512
/// spent 6 to 11 % of their time waiting for the slower one of two cores, and now 2 to 4 % (docs/machines/emerald-rapids.md).
const OPEN_PASSES: i64 = 4;
/// Least panels (of one way) of a piece of a pass by tiles in several turns, in each of which the rows come to L2 anew.
const LEAST_OF_TURNS: u32 = 4;

/// A block of rows.
struct RowBlock<'c> {
    number: Value<'c>,
    /// Blocks.
    count: Value<'c>,
    /// The first one.
    row: Value<'c>,
    rows: Value<'c>,
}

/// One kernel's generator.
struct Generator<'a, 'c> {
    mb: &'a ModuleBuilder<'c>,
    program: &'a Program,
    kernel: &'a Matmul,
    name: &'a str,
    /// Rows and panels.
    product: Product,
}

/// Private functions of a kernel.
struct Helpers<'c> {
    epilogue: Function<'c>,
    ahead: Option<Function<'c>>,
    nests: Option<Function<'c>>,
}

impl<'c> Helpers<'c> {
    /// Calls the group nests on `[row, row_end, first, last]`: these rows of these units.
    fn nests(&self, fb: &Fb<'_, 'c>, caller: &Caller<'c>, range: [Value<'c>; 4]) {
        if let Some(function) = &self.nests {
            fb.call(function, &[&caller.call[..], &range].concat());
        }
    }
}

/// What functions of a kernel find where.
#[derive(Clone, Copy)]
struct Addresses<'c> {
    caller: Caller<'c>,
    a: Value<'c>,
    w: Value<'c>,
    /// Null: nothing is needed.
    scratch: Value<'c>,
}

/// What the loops of a pass go over.
struct Share<'c> {
    at: Addresses<'c>,
    /// Units.
    begin: Value<'c>,
    end: Value<'c>,
}

/// Group nests on rows `first .. last` of units `first .. last`.
type Nests<'n, 'c> = dyn Fn(Value<'c>, Value<'c>, Value<'c>, Value<'c>) + 'n;

impl<'c> Generator<'_, 'c> {
    /// `kernel(ctx, thread, threads, layer)`.
    fn kernel(&self, blocks: Option<&Blocks>, functions: &Functions<Function<'c>>) -> Function<'c> {
        let helpers = Helpers { epilogue: self.epilogue(), ahead: self.ahead(), nests: self.nests() };
        let pass_function = self.pass_function(blocks, functions, &helpers);
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
            let Addresses { caller, a, w, .. } = self.addresses(call, blocks, &helpers);
            let nests = |row, row_end, first, last| helpers.nests(fb, &caller, [row, row_end, first, last]);
            let (units, unit_panels) = kernel.units();
            let stream = |row: Value<'c>, count: Value<'c>, begin: Value<'c>, end: Value<'c>| {
                self.dispatch(fb, count, &functions.stream, |function| {
                    let [first, last] = [begin, end].map(|unit| fb.mul_int(unit, unit_panels.into()));
                    let span = Span { a: self.row_of(fb, a, row), w, row, rows: count, first, last };
                    fb.call(function, &caller.with(&span.args()));
                });
                nests(row, fb.add(row, count), begin, end);
            };
            let piece = self.side_by_side().div_ceil(PIECES_OF_WALK * unit_panels);
            let pieces = |body: &dyn Fn(Value<'c>, Value<'c>)| call.share_out(units, piece, body);
            let few = || pieces(&|begin, end| stream(fb.int(0), row_count, begin, end));
            let Some((blocks, functions)) = blocks.zip(functions.blocked.as_ref()) else { return few() };
            // The second half of the rows finds the block of panels in L2.
            let halves = || {
                pieces(&|begin, end| {
                    self.blocks_of_units(fb, fb.int(blocks.units.into()), (begin, end), |first, last| {
                        self.blocks_of_rows(fb, (fb.int(0), row_count), kernel.tile.mr, |block| stream(block.row, block.rows, first, last));
                    });
                });
            };
            let many = || {
                let function = pass_function.as_ref().expect("more rows than few");
                let pass = |(row, rows): (Value<'c>, Value<'c>), begin: Value<'c>, end: Value<'c>| {
                    fb.call(function, &[&caller.call[..], &[row, rows, begin, end]].concat());
                };
                self.passes(call, blocks, row_count, &pass);
            };
            // Of at least `from` rows: `then` for up to `most`, `otherwise` for more; nothing is compared where all or none are that few.
            let (least, capacity) = (self.program.least(kernel.rows), self.program.capacity(kernel.rows));
            let up_to = |from: u32, most: u32, then: &dyn Fn(), otherwise: &dyn Fn()| match (least.max(from) <= most, capacity <= most) {
                (false, _) => otherwise(),
                (true, true) => then(),
                (true, false) => fb.either(fb.cmp(Cmp::Le, row_count, fb.int(most.into())), then, otherwise),
            };
            let streamed = blocks.streamed_rows(kernel);
            let more = || match functions {
                BlockFunctions::Tiles { alone, .. } => {
                    let alone = || {
                        by_tiles::shapes(fb, &self.product).set(fb, row_count);
                        pieces(&|begin, end| {
                            let [first, last] = [begin, end].map(|unit| fb.mul_int(unit, unit_panels.into()));
                            by_tiles::of_rows(fb, row_count, alone, |function| {
                                let span = Span { a, w, row: fb.int(0), rows: row_count, first, last };
                                fb.call(function, &caller.with(&span.args()));
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

    /// `nests(.., row, row_end, first, last)`: the group nests on these rows of these units. None: there are none.
    fn nests(&self) -> Option<Function<'c>> {
        let nests = &self.kernel.group_nests;
        let params = [&KERNEL_PARAMS[..], &[Ty::I64; 4]].concat();
        let name = format!("{}.nests", self.name);
        (!nests.is_empty()).then(|| {
            self.mb.define(&name, &params, None, Visibility::InternalNoInline, |fb, args| {
                let (call, rest) = args.split_at(KERNEL_PARAMS.len());
                let [row, row_end, first, last] = *rest else { unreachable!() };
                let call = Call::new(fb, self.program, call);
                let scopes: Vec<_> = nests.iter().map(|nest| loops::bind(&call, &nest.nest)).collect();
                for (nest, scope) in nests.iter().zip(&scopes) {
                    let first = fb.max(first, fb.int(nest.groups.start.into()));
                    let last = fb.min(last, fb.int(nest.groups.end.into()));
                    fb.for_(row, row_end, 1, |row| {
                        fb.for_(first, last, 1, |group| {
                            let group = fb.sub(group, fb.int(nest.groups.start.into()));
                            loops::body(fb, &nest.nest, &mut scope.clone(), &[row, group]);
                        });
                    });
                }
            })
        })
    }

    /// `pass(.., row, rows, begin, end)`: a pass of rows over these units. None: there are only few rows.
    fn pass_function(&self, blocks: Option<&Blocks>, functions: &Functions<Function<'c>>, helpers: &Helpers<'c>) -> Option<Function<'c>> {
        let (blocks, functions) = blocks.zip(functions.blocked.as_ref())?;
        if let BlockFunctions::Tiles { several: None, .. } = functions {
            return None;
        }
        let params = [&KERNEL_PARAMS[..], &[Ty::I64; 4]].concat();
        Some(self.mb.define(&format!("{}.pass", self.name), &params, None, Visibility::InternalNoInline, |fb, args| {
            let (args, rest) = args.split_at(KERNEL_PARAMS.len());
            let [row, rows, begin, end] = *rest else { unreachable!() };
            let at = self.addresses(&Call::new(fb, self.program, args), Some(blocks), helpers);
            let nests = |row, row_end, first, last| helpers.nests(fb, &at.caller, [row, row_end, first, last]);
            let (share, pass) = (Share { at, begin, end }, (row, rows));
            match functions {
                BlockFunctions::Registers { rows, first } => {
                    self.pass_by_registers(fb, &share, blocks, (first.as_ref(), rows), pass, &nests);
                }
                BlockFunctions::Tiles { several, .. } => {
                    self.pass_by_tiles(fb, &share, blocks, several.as_ref().expect("more rows than one block"), pass, &nests);
                }
            }
        }))
    }

    /// All passes of rows over the thread's units, and the last one over what others have left of theirs: `pass((row, rows), begin, end)`.
    fn passes(
        &self,
        call: &Call<'_, '_, 'c>,
        blocks: &Blocks,
        rows: Value<'c>,
        pass: &dyn Fn((Value<'c>, Value<'c>), Value<'c>, Value<'c>),
    ) {
        let fb = call.fb;
        let (units, unit_panels) = self.kernel.units();
        let most = self.kernel.tile.m_block;
        let several = most != 0 && self.program.capacity(self.kernel.rows) > most;
        let passes = if several { fb.div(fb.add_int(rows, i64::from(most) - 1), fb.int(most.into())) } else { fb.int(1) };
        // Passes of equal size, as `RowCounts` counts them.
        let pass_at = |number: Value<'c>| {
            let begin = |number: Value<'c>| fb.div(fb.mul(rows, number), passes);
            let row = begin(number);
            (row, fb.sub(begin(fb.add_int(number, 1)), row))
        };
        let least = match (self.kernel.compute.by_tiles(), blocks.turn < blocks.count) {
            (false, _) => blocks.units,
            (true, true) => LEAST_OF_TURNS.div_ceil(self.kernel.panels.ways * unit_panels),
            (true, false) => 1,
        };
        let last = fb.add_int(passes, -1);
        let part = (fb.min(passes, fb.int(OPEN_PASSES)), OPEN_PASSES);
        let all_passes = |most: Value<'c>, begin: Value<'c>, end: Value<'c>| {
            fb.for_(fb.int(0), most, 1, |number| pass(pass_at(number), begin, end));
        };
        let apart = || self.shares(call, |begin, end| all_passes(passes, begin, end));
        if !two_have_two_pieces(units, least) {
            return apart();
        }
        let offer = call.offer(fb.int(units.into()), fb.int(least.into()), part);
        let shared = || {
            let (begin, end) = call.share(fb.int(units.into()));
            all_passes(last, begin, end);
            offer.work(call, |begin, end| pass(pass_at(last), begin, end));
        };
        fb.either(offer.is_shared, shared, apart);
    }

    /// What functions of the kernel find where.
    fn addresses(&self, call: &Call<'_, '_, 'c>, blocks: Option<&Blocks>, helpers: &Helpers<'c>) -> Addresses<'c> {
        let (fb, kernel) = (call.fb, self.kernel);
        let narrow = |v| fb.trunc(v, Elem::I32);
        let packs = self.product.packed_bytes(kernel.tile.mr) > 0;
        let null = fb.zero(Ty::PTR);
        let scratch = if packs || blocks.is_some() { self.scratch(call) } else { null };
        let caller = Caller {
            call: [call.ctx, narrow(call.thread), narrow(call.threads), narrow(call.layer)],
            epilogue: fb.address(&helpers.epilogue),
            ahead: helpers.ahead.as_ref().map_or(null, |ahead| fb.address(ahead)),
            packed: if packs { fb.offset_const(scratch, blocks.map_or(0, |blocks| blocks.bytes)) } else { null },
        };
        Addresses { caller, a: call.base(&kernel.a.place), w: call.base(&Place::Weight(kernel.weight)), scratch }
    }

    /// Panels that a single row walks side by side.
    fn side_by_side(&self) -> u32 {
        let isa = self.mb.isa();
        let panels = &self.kernel.panels;
        let streams = self.kernel.tile.reading(1, panels.panels() * panels.ways).streams;
        Walk::stream(isa, &Microkernel::stored(isa, &self.product, 1), 1, streams, panels.panels()).panels
    }

    /// The thread's units where nothing is offered, `body(begin, end)`: its share of each run of groups with the same nests, where every
    /// thread gets some of each, else its share of all. Heads whose keys go to the cache take longest, and lie together.
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
    fn dispatch(&self, fb: &Fb<'_, 'c>, rows: Value<'c>, instances: &Instances<Function<'c>>, then: impl Fn(&Function<'c>)) {
        for (m, function) in (i64::from(instances.least)..).zip(&instances.functions) {
            fb.if_(fb.cmp(Cmp::Eq, rows, fb.int(m)), || then(function));
        }
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

    /// Bytes of a panel before `k`; about that many where `k` is no beginning of a group.
    fn bytes_before(&self, fb: &Fb<'_, 'c>, k: Value<'c>) -> Value<'c> {
        let panels = &self.kernel.panels;
        match panels.coding {
            Coding::Int8Groups { group, .. } | Coding::Int4 { group, .. } => {
                fb.mul_int(fb.lshr(k, group.trailing_zeros()), panels.group_bytes() as i64)
            }
            _ => fb.mul_int(k, panels.bytes_before(1, self.product.weight) as i64),
        }
    }

    /// Elements (bytes of records, or those before their values) of a row before `k`.
    fn a_before(&self, fb: &Fb<'_, 'c>, k: Value<'c>) -> Value<'c> {
        if let Some(values) = self.product.values_at() {
            return fb.add_int(fb.mul_int(k, DType::Bf16.size() as i64), values.into());
        }
        match self.kernel.panels.coding.group() {
            Some(group) if self.kernel.compute.takes_codes() => {
                fb.mul_int(fb.lshr(k, group.trailing_zeros()), self.kernel.compute.record(group).into())
            }
            _ => k,
        }
    }
}
