//! The kernel's own function: which way it goes over its rows, and how the threads of a step share its panels.
//!
//! In: a [`Schedule`], the functions that are called. Out: `kernel(ctx, thread, threads, layer)`.
//!
//! The ways, from few rows to many ([`Way`]): [`Body::few`], [`Body::few_blocks`], [`Body::alone`] (by tiles), [`Body::passes`].

use super::*;

/// Pieces of what threads share out are at least the so-many-th part of what a row walks side by side: at the end fewer streams cost less
/// than a core that waits, and of whole walks narrow matmuls have too few.
const PIECES_OF_WALK: u32 = 4;

/// The last part, one of so many, of a thread's share of passes can be done by others. Rows of a pass are in L2 meanwhile, or come there
/// anew for each block of panels anyway, so that small pieces cost little: prompts of 512 spent 6 to 11 % of their time waiting for the
/// slower one of two cores, and now 2 to 4 % (docs/machines/emerald-rapids.md).
const OPEN_PART: i64 = 4;
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

    /// The units of all passes of rows, which threads share out pass by pass: unit `i` of them is `i % units` of pass `i / units`.
    fn all_passes(&self) {
        let (call, fb, Schedule { program, kernel, .. }) = (self.call, self.call.fb, self.generator.schedule);
        let blocks = self.blocks();
        let (units, unit_panels) = kernel.units();
        let least = match (kernel.compute.by_tiles(), blocks.turn < blocks.count) {
            (false, _) => blocks.units,
            (true, true) => LEAST_OF_TURNS.div_ceil(kernel.panels.ways * unit_panels),
            (true, false) => 1,
        };
        let passes = self.number_of_passes();
        let apart = || self.shares(passes);
        let most_units = units.saturating_mul(kernel.passes().most_passes(program.capacity(kernel.rows)));
        if !two_have_two_pieces(most_units, least) {
            return apart();
        }
        let offer = call.offer(fb.mul_int(passes, units.into()), fb.int(least.into()), (fb.int(1), OPEN_PART));
        let shared = || offer.work(call, |begin, end| self.units_of_passes(passes, begin, end));
        fb.either(offer.is_shared, shared, apart);
    }

    /// [`Passes::number`](rcompile_runtime::cost::Passes::number) for the step's rows and threads.
    fn number_of_passes(&self) -> Value<'c> {
        let (fb, Schedule { program, kernel, .. }) = (self.call.fb, self.generator.schedule);
        let (limits, capacity, units) = (kernel.passes(), program.capacity(kernel.rows), kernel.units().0);
        let div_ceil = |a: Value<'c>, b: Value<'c>| fb.div(fb.add(a, fb.add_int(b, -1)), b);
        let several = limits.most != 0 && capacity > limits.most;
        let fewest = if several { div_ceil(self.rows, fb.int(limits.most.into())) } else { fb.int(1) };
        let largest =
            |number: Value<'c>| fb.mul(div_ceil(fb.mul_int(number, units.into()), self.call.threads), div_ceil(self.rows, number));
        let (mut best, mut share) = (fewest, largest(fewest));
        let most_factor = limits.most_passes(if several { limits.most } else { capacity });
        for factor in (1..=most_factor.ilog2()).map(|doublings| 1 << doublings) {
            let number = fb.mul_int(fewest, factor);
            let fits = fb.cmp(Cmp::Le, fb.mul_int(number, limits.least.into()), self.rows);
            let candidate = largest(number);
            let gain = PASSES_GAIN as i64;
            let smaller = fb.cmp(Cmp::Lt, fb.mul_int(candidate, gain), fb.mul_int(share, gain - 1));
            let better = fb.and(fits, smaller);
            (best, share) = (fb.select(better, number, best), fb.select(better, candidate, share));
        }
        best
    }

    /// Units `begin .. end` of all passes.
    fn units_of_passes(&self, passes: Value<'c>, begin: Value<'c>, end: Value<'c>) {
        let fb = self.call.fb;
        let units = fb.int(self.generator.schedule.kernel.units().0.into());
        let [first, last] = [begin, fb.add(end, fb.add_int(units, -1))].map(|unit| fb.div(unit, units));
        fb.for_(first, last, 1, |number| {
            let before = fb.mul(number, units);
            let begin = fb.max(fb.sub(begin, before), fb.int(0));
            let end = fb.min(fb.sub(end, before), units);
            self.one_pass(number, passes, begin, end);
        });
    }

    /// Pass `number` of `passes`, which have equal sizes as `RowCounts` counts them, over these units.
    fn one_pass(&self, number: Value<'c>, passes: Value<'c>, begin: Value<'c>, end: Value<'c>) {
        let (fb, call) = (self.call.fb, self.call.args);
        let row_at = |number: Value<'c>| fb.div(fb.mul(self.rows, number), passes);
        let row = row_at(number);
        let rows = fb.sub(row_at(fb.add_int(number, 1)), row);
        PassArgs { call, row, rows, begin, end }.call(fb, self.pass.expect("more rows than few"));
    }

    /// The thread's units where nothing is offered: its share of each run of groups with the same nests in all passes, where every thread
    /// gets some of each, else its share of all. Heads whose keys go to the cache take longest, and lie together.
    fn shares(&self, passes: Value<'c>) {
        let (call, fb, kernel) = (self.call, self.call.fb, self.generator.schedule.kernel);
        let (units, _) = kernel.units();
        let of_all = || {
            let (begin, end) = call.share(fb.mul_int(passes, units.into()));
            self.units_of_passes(passes, begin, end);
        };
        let groups = kernel.group_nests.iter().flat_map(|nest| [nest.groups.start, nest.groups.end]);
        let cuts: Vec<u32> = groups.chain([0, units]).collect::<BTreeSet<_>>().into_iter().collect();
        if cuts.len() == 2 {
            return of_all();
        }
        let least = cuts.windows(2).map(|run| run[1] - run[0]).min().unwrap_or(units);
        let table: Vec<i64> = cuts.iter().map(|cut| (*cut).into()).collect();
        let table = fb.module().const_table("runs", &table);
        let cut = |n: Value<'c>| fb.load(Ty::I64, fb.index(table, n, 8), 8);
        let of_runs = || {
            fb.for_(fb.int(0), fb.int(cuts.len() as i64 - 1), 1, |run| {
                let first = cut(run);
                let (begin, end) = call.share(fb.sub(cut(fb.add_int(run, 1)), first));
                let (begin, end) = (fb.add(first, begin), fb.add(first, end));
                fb.for_(fb.int(0), passes, 1, |number| self.one_pass(number, passes, begin, end));
            });
        };
        fb.either(fb.cmp(Cmp::Le, call.threads, fb.int(least.into())), of_runs, of_all);
    }
}
