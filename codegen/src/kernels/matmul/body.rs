//! The kernel's own function: which way it goes over its rows, and how the threads of a step share its panels.
//!
//! In: a [`Schedule`], the functions that are called. Out: `kernel(ctx, thread, threads, layer)`.
//!
//! The ways, from few rows to many ([`Way`]): [`Body::few`], [`Body::few_blocks`], [`Body::alone`] (by tiles), [`Body::passes`].

use super::*;

/// Pieces of what threads share out are at least the so-many-th part of what a row walks side by side: at the end fewer streams cost less
/// than a core that waits, and of whole walks narrow matmuls have too few.
const PIECES_OF_WALK: u32 = 4;

/// Of so many passes of rows and more, the last one can be done by others; of fewer a part of it, so that it is a quarter of a share. In
/// one pass, whose rows are in L2 meanwhile, or come there anew for each block of panels anyway, small pieces cost little: prompts of 512
/// spent 6 to 11 % of their time waiting for the slower one of two cores, and now 2 to 4 % (docs/machines/emerald-rapids.md).
const OPEN_PASSES: i64 = 4;
/// Least panels (of one way) of a piece of a pass by tiles in several turns, in each of which the rows come to L2 anew.
const LEAST_OF_TURNS: u32 = 4;

impl<'c> Generator<'_, 'c> {
    /// `kernel(ctx, thread, threads, layer)`.
    pub(super) fn kernel(&self, functions: &Functions<Function<'c>>) -> Function<'c> {
        let helpers = Helpers { epilogue: self.epilogue(), ahead: self.ahead(), nests: self.nests() };
        let pass = self.pass_function(functions, &helpers);
        let Schedule { program, kernel, .. } = *self.schedule;
        define_kernel(self.mb, program, self.name, |call| {
            let fb = call.fb;
            let rows = call.extent(kernel.rows);
            if let Some(nest) = &kernel.prologue {
                let scope = loops::bind(call, nest);
                fb.for_(fb.int(0), rows, 1, |row| loops::body(fb, nest, &mut scope.clone(), &[row]));
            }
            if let Some(quantise) = &kernel.quantise {
                quantise::all_rows(call, quantise);
            }
            let at = self.addresses(call, &helpers);
            Body { generator: self, call, helpers: &helpers, functions, pass: pass.as_ref(), at, rows }.emit();
        })
    }
}

/// The function of a kernel behind its prologue.
struct Body<'b, 'a, 'm, 'c> {
    generator: &'b Generator<'a, 'c>,
    call: &'b Call<'b, 'm, 'c>,
    helpers: &'b Helpers<'c>,
    functions: &'b Functions<Function<'c>>,
    /// A pass of rows; none where there are only few.
    pass: Option<&'b Function<'c>>,
    at: Addresses<'c>,
    /// All rows of the step.
    rows: Value<'c>,
}

impl<'c> Body<'_, '_, '_, 'c> {
    /// The way for the step's number of rows.
    fn emit(&self) {
        self.one_of(&self.generator.schedule.ways);
    }

    /// One of these ways.
    fn one_of(&self, ways: &[(RangeInclusive<u32>, Way)]) {
        let fb = self.call.fb;
        match ways {
            [] => {}
            [(_, way)] => self.go(*way),
            [(rows, way), more @ ..] => {
                let is_this = fb.cmp(Cmp::Le, self.rows, fb.int((*rows.end()).into()));
                fb.either(is_this, || self.go(*way), || self.one_of(more));
            }
        }
    }

    fn go(&self, way: Way) {
        match way {
            Way::Few => self.few(),
            Way::FewBlocks => self.few_blocks(),
            Way::Alone => self.alone(),
            Way::Passes => self.passes(),
        }
    }

    /// [`Way::Few`].
    fn few(&self) {
        self.pieces(&|begin, end| self.stream(self.call.fb.int(0), self.rows, begin, end));
    }

    /// [`Way::FewBlocks`]. The second block of rows finds the block of panels in L2.
    fn few_blocks(&self) {
        let (fb, generator) = (self.call.fb, self.generator);
        let units = fb.int(self.blocks().units.into());
        self.pieces(&|begin, end| {
            generator.blocks_of_units(fb, units, (begin, end), |first, last| {
                let mr = generator.schedule.kernel.tile.mr;
                generator.blocks_of_rows(fb, (fb.int(0), self.rows), mr, |block| self.stream(block.row, block.rows, first, last));
            });
        });
    }

    /// [`Way::Alone`].
    fn alone(&self) {
        let fb = self.call.fb;
        by_tiles::shapes(fb, &self.generator.schedule.product).set(fb, self.rows);
        self.pieces(&|begin, end| {
            let [first, last] = self.panels_of([begin, end]);
            by_tiles::of_rows(fb, self.rows, &self.functions.alone, |function| {
                let span = Span { a: self.at.a, w: self.at.w, row: fb.int(0), rows: self.rows, first, last };
                (self.at.caller, span).call(fb, function);
            });
            self.nests(fb.int(0), self.rows, begin, end);
        });
        fb.tile_release();
    }

    /// `rows` rows from `row` on, at most `mr`, with all k of these units' panels.
    fn stream(&self, row: Value<'c>, rows: Value<'c>, begin: Value<'c>, end: Value<'c>) {
        let (fb, generator) = (self.call.fb, self.generator);
        generator.dispatch(fb, rows, &self.functions.stream, |functions| {
            let [first, last] = self.panels_of([begin, end]);
            let span = Span { a: generator.row_of(fb, self.at.a, row), w: self.at.w, row, rows, first, last };
            self.call.dispatch_by_cpu(&functions.other, &functions.by_cpu, &|function| {
                (self.at.caller, span).call(fb, function);
                vec![]
            });
        });
        self.nests(row, fb.add(row, rows), begin, end);
    }

    /// The group nests on rows `row .. row_end` of these units.
    fn nests(&self, row: Value<'c>, row_end: Value<'c>, begin: Value<'c>, end: Value<'c>) {
        self.helpers.nests(self.call.fb, &self.at.caller, [row, row_end, begin, end]);
    }

    /// The first panels of units.
    fn panels_of<const N: usize>(&self, units: [Value<'c>; N]) -> [Value<'c>; N] {
        let (_, unit_panels) = self.generator.schedule.kernel.units();
        units.map(|unit| self.call.fb.mul_int(unit, unit_panels.into()))
    }

    /// `body(begin, end)` for pieces of the thread's share of the units, and of others' at its end.
    fn pieces(&self, body: &dyn Fn(Value<'c>, Value<'c>)) {
        let schedule = self.generator.schedule;
        let (units, unit_panels) = schedule.kernel.units();
        self.call.share_out(units, schedule.side_by_side().div_ceil(PIECES_OF_WALK * unit_panels), body);
    }

    /// [`Way::Passes`].
    fn passes(&self) {
        self.all_passes();
        if self.generator.schedule.kernel.compute.by_tiles() {
            self.call.fb.tile_release();
        }
    }

    /// What [`Way::FewBlocks`] and [`Way::Passes`] go over.
    fn blocks(&self) -> &Blocks {
        self.generator.schedule.blocks.as_ref().expect("more rows than few")
    }

    /// All passes of rows over the thread's units, and the last one over what others have left of theirs.
    fn all_passes(&self) {
        let (call, fb, Schedule { program, kernel, .. }) = (self.call, self.call.fb, self.generator.schedule);
        let blocks = self.blocks();
        let (units, unit_panels) = kernel.units();
        let most = kernel.tile.m_block;
        let several = most != 0 && program.capacity(kernel.rows) > most;
        let passes = if several { fb.div(fb.add_int(self.rows, i64::from(most) - 1), fb.int(most.into())) } else { fb.int(1) };
        let function = self.pass.expect("more rows than few");
        // Passes of equal size, as `RowCounts` counts them.
        let pass = |number: Value<'c>, begin: Value<'c>, end: Value<'c>| {
            let row_at = |number: Value<'c>| fb.div(fb.mul(self.rows, number), passes);
            let row = row_at(number);
            let rows = fb.sub(row_at(fb.add_int(number, 1)), row);
            PassArgs { call: call.args, row, rows, begin, end }.call(fb, function);
        };
        let least = match (kernel.compute.by_tiles(), blocks.turn < blocks.count) {
            (false, _) => blocks.units,
            (true, true) => LEAST_OF_TURNS.div_ceil(kernel.panels.ways * unit_panels),
            (true, false) => 1,
        };
        let last = fb.add_int(passes, -1);
        let part = (fb.min(passes, fb.int(OPEN_PASSES)), OPEN_PASSES);
        let all_passes = |most: Value<'c>, begin: Value<'c>, end: Value<'c>| {
            fb.for_(fb.int(0), most, 1, |number| pass(number, begin, end));
        };
        let apart = || self.shares(|begin, end| all_passes(passes, begin, end));
        if !two_have_two_pieces(units, least) {
            return apart();
        }
        let offer = call.offer(fb.int(units.into()), fb.int(least.into()), part);
        let shared = || {
            let (begin, end) = call.share(fb.int(units.into()));
            all_passes(last, begin, end);
            offer.work(call, |begin, end| pass(last, begin, end));
        };
        fb.either(offer.is_shared, shared, apart);
    }

    /// The thread's units where nothing is offered, `body(begin, end)`: its share of each run of groups with the same nests, where every
    /// thread gets some of each, else its share of all. Heads whose keys go to the cache take longest, and lie together.
    fn shares(&self, body: impl FnOnce(Value<'c>, Value<'c>)) {
        let (call, fb, kernel) = (self.call, self.call.fb, self.generator.schedule.kernel);
        let (units, _) = kernel.units();
        let groups = kernel.group_nests.iter().flat_map(|nest| [nest.groups.start, nest.groups.end]);
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
}
