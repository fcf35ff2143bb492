//! Packed matmul: `out[row, col] = epilogue(sum_k a[row, k] * w[col, k])`, from one row (a matrix-vector product) to a full bucket.
//!
//! In: [`Matmul`] (all blocking decisions). Out: one function per kernel and, private to the module, `pass`, `epilogue`, `ahead` and
//! `nests`; and which functions of rows it calls ([`Schedule::parts`]), which are units of their own ([`super::rows`]).
//!
//! ```text
//! kernel:    prologue for all rows; then, by their number, one of these ways (`Way`)
//!   few, up to mr:   for pieces of panels of the thread's share, and of others' at its end (`share_out`) { stream<m>; group nests }
//!   few blocks, up to a few times mr, where more rows widen weights: the same for blocks of panels, by each block of rows in turn
//!   alone, up to 32 by tiles (AMX), see `by_tiles`: as few rows, with alone<n>
//!   passes, more:    for pass of rows, for the thread's share of panels { pass }, and of the last pass for pieces of others' shares
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
//! In files: `schedule` (what a pass goes over), `functions` (what is called), `body` (the kernel itself, who does what), `by_registers`
//! and `by_tiles` (the loops of a pass), `epilogue`; here what they share: loops over blocks, addresses.
//!
//! Sources: Goto & van de Geijn 2008 and BLIS (Van Zee & van de Geijn 2015) for the loop structure; tile shapes and prefetch
//! distances were measured with `examples/kernel_speed.rs`.

mod body;
mod by_registers;
mod by_tiles;
mod epilogue;
mod functions;
mod schedule;

pub use self::schedule::{RowCounts, Schedule};

use self::functions::{BlockFunctions, Functions, Instances, Several};
use self::schedule::{Blocks, Way};
use super::arguments::{Arguments, arguments};
use super::microkernel::{L2, LINE_WORDS, Microkernel, Walk};
use super::part::Part;
use super::product::Product;
use super::rows::{AheadArgs, ApartArgs, Block, Caller, EpilogueArgs, Span, TileBlock};
use super::share::{in_equal_parts, two_have_two_pieces};
use super::{Call, KernelArgs, define_kernel, int_dot, int_tiles, loops, quantise, tiles};
use crate::error::Error;
use crate::expr::{Eval, Point, loads_by_row_and_col};
use crate::isa::Isa;
use crate::llvm::builder::{Cmp, Elem, Fb, Function, ModuleBuilder, Ty, Value};
use crate::program::{Coding, Compute, DType, Matmul, Place, Program, SHORT_GROUP};
use rcompile_runtime::abi::field;
use rcompile_runtime::cost::PASSES_GAIN;
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
    let schedule = Schedule::new(mb.isa(), program, kernel);
    schedule.check(name)?;
    let functions = Functions::new(&schedule, |part| part.declare(mb, &symbol(&part)));
    Ok(Generator { mb, name, schedule: &schedule }.kernel(&functions))
}

/// The kernel and its functions of rows, `<name>.stream4` and the like, in one module: for measurements, and tests of one kernel.
pub fn define_whole<'c>(mb: &ModuleBuilder<'c>, program: &Program, name: &str, kernel: &Matmul) -> Result<Function<'c>, Error> {
    let parts = Schedule::new(mb.isa(), program, kernel).parts();
    // Those of the same name, for some CPUs, are numbered.
    let symbol = |part: &Part| match parts.iter().filter(|p| p.name() == part.name()).position(|p| p == part) {
        Some(0) | None => format!("{name}.{}", part.name()),
        Some(number) => format!("{name}.{}.{number}", part.name()),
    };
    for part in &parts {
        part.define(mb, &symbol(part))?;
    }
    define(mb, program, name, kernel, symbol)
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

/// One kernel's generator.
struct Generator<'a, 'c> {
    mb: &'a ModuleBuilder<'c>,
    name: &'a str,
    schedule: &'a Schedule<'a>,
}

arguments! {
    /// Arguments of the group nests: rows of units.
    struct NestsArgs {
        call: [KernelArgs],
        /// First row.
        row: I64,
        /// Behind the last one.
        row_end: I64,
        /// First unit.
        first: I64,
        /// Behind the last one.
        last: I64,
    }

    /// Arguments of a pass of rows over units.
    struct PassArgs {
        call: [KernelArgs],
        /// First row.
        row: I64,
        rows: I64,
        /// First unit.
        begin: I64,
        /// Behind the last one.
        end: I64,
    }
}

/// Private functions of a kernel.
struct Helpers<'c> {
    epilogue: Function<'c>,
    ahead: Option<Function<'c>>,
    nests: Option<Function<'c>>,
}

impl<'c> Helpers<'c> {
    /// Calls the group nests on rows `row .. row_end` of units `first .. last`.
    fn nests(&self, fb: &Fb<'_, 'c>, caller: &Caller<'c>, [row, row_end, first, last]: [Value<'c>; 4]) {
        if let Some(function) = &self.nests {
            NestsArgs { call: caller.call, row, row_end, first, last }.call(fb, function);
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
    /// The function with [`NestsArgs`]: the group nests on these rows of these units. None: there are none.
    fn nests(&self) -> Option<Function<'c>> {
        let nests = &self.schedule.kernel.group_nests;
        (!nests.is_empty()).then(|| {
            NestsArgs::define(self.mb, &format!("{}.nests", self.name), |fb, NestsArgs { call, row, row_end, first, last }| {
                let call = Call::new(fb, self.schedule.program, call);
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

    /// The function with [`PassArgs`]: a pass of rows over these units. None: no number of rows goes so.
    fn pass_function(&self, functions: &Functions<Function<'c>>, helpers: &Helpers<'c>) -> Option<Function<'c>> {
        let (blocks, functions) = self.schedule.blocks.as_ref().zip(functions.blocked.as_ref())?;
        Some(PassArgs::define(self.mb, &format!("{}.pass", self.name), |fb, PassArgs { call, row, rows, begin, end }| {
            let at = self.addresses(&Call::new(fb, self.schedule.program, call), helpers);
            let nests = |row, row_end, first, last| helpers.nests(fb, &at.caller, [row, row_end, first, last]);
            let (share, pass) = (Share { at, begin, end }, (row, rows));
            match functions {
                BlockFunctions::Registers { rows, first } => {
                    self.pass_by_registers(fb, &share, blocks, (first.as_ref(), rows), pass, &nests);
                }
                BlockFunctions::Tiles(several) => self.pass_by_tiles(fb, &share, blocks, several, pass, &nests),
            }
        }))
    }

    /// What functions of the kernel find where.
    fn addresses(&self, call: &Call<'_, '_, 'c>, helpers: &Helpers<'c>) -> Addresses<'c> {
        let (fb, kernel) = (call.fb, self.schedule.kernel);
        let packs = self.schedule.packed_bytes() > 0;
        let null = fb.zero(Ty::PTR);
        let scratch = if packs || self.schedule.blocks.is_some() { self.scratch(call) } else { null };
        let caller = Caller {
            call: call.args,
            epilogue: fb.address(&helpers.epilogue),
            ahead: helpers.ahead.as_ref().map_or(null, |ahead| fb.address(ahead)),
            packed: if packs { fb.offset_const(scratch, self.schedule.packed_at()) } else { null },
        };
        Addresses { caller, a: call.base(&kernel.a.place), w: call.base(&Place::Weight(kernel.weight)), scratch }
    }

    /// This kernel's part of the thread's private area.
    fn scratch(&self, call: &Call<'_, '_, 'c>) -> Value<'c> {
        let bytes = self.schedule.private_bytes();
        call.fb.offset(call.private(), call.fb.sub(call.u64_field(field::PRIVATE_STRIDE), call.fb.int(bytes as i64)))
    }

    /// Calls `then` for the function of `rows`.
    fn dispatch<F>(&self, fb: &Fb<'_, 'c>, rows: Value<'c>, instances: &Instances<F>, then: impl Fn(&F)) {
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
        in_equal_parts(fb, rows, count, |number, row, rows| body(RowBlock { number, count, row: fb.add(first, row), rows }));
    }

    /// Address of a row of A.
    fn row_of(&self, fb: &Fb<'_, 'c>, a: Value<'c>, row: Value<'c>) -> Value<'c> {
        fb.index(a, fb.mul_int(row, self.schedule.kernel.a_stride.into()), self.schedule.kernel.a.dtype.size())
    }

    /// Bytes of a panel before `k`; about that many where `k` is no beginning of a group.
    fn bytes_before(&self, fb: &Fb<'_, 'c>, k: Value<'c>) -> Value<'c> {
        let panels = &self.schedule.kernel.panels;
        match panels.coding {
            Coding::Int8Groups { group, .. } | Coding::Int4 { group, .. } => {
                fb.mul_int(fb.lshr(k, group.trailing_zeros()), panels.group_bytes() as i64)
            }
            _ => fb.mul_int(k, panels.bytes_before(1, self.schedule.product.weight) as i64),
        }
    }

    /// Elements (bytes of records, or those before their values) of a row before `k`.
    fn a_before(&self, fb: &Fb<'_, 'c>, k: Value<'c>) -> Value<'c> {
        if let Some(values) = self.schedule.product.values_at() {
            return fb.add_int(fb.mul_int(k, DType::Bf16.size() as i64), values.into());
        }
        match self.schedule.kernel.panels.coding.group() {
            Some(group) if self.schedule.kernel.compute.takes_codes() => {
                fb.mul_int(fb.lshr(k, group.trailing_zeros()), self.schedule.kernel.compute.record(group).into())
            }
            _ => k,
        }
    }
}
