//! What a region of a program has to move and to compute, as linear forms in what a step holds.
//!
//! In: [`Load`]s, counted by the runtime while steps run or assumed by `rcompile inspect --scaling`. Out: bytes and floating-point
//! operations. The planner fills the forms in from the program (`compiler/src/plan/cost.rs`), the manifest carries them in
//! [`RegionInfo`], and `bench`, `profile` and `inspect --scaling` evaluate them: there is no second place where work is counted.

use serde::{Deserialize, Serialize};

/// What steps hold. Loads of several steps add up, and so do the amounts that follow from them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Steps.
    pub steps: u64,
    /// Steps in which a row wants logits: the others read no head.
    pub logit_steps: u64,
    /// Rows.
    pub rows: u64,
    /// Rows that want logits.
    pub logit_rows: u64,
    /// Runs: sequences or texts in a step.
    pub runs: u64,
    /// Attention tiles.
    pub tiles: u64,
    /// Positions that each row sees, summed over the rows.
    pub row_positions: u64,
    /// Positions that some row of a run sees, summed over the runs: what has to be read of the KV cache.
    pub run_positions: u64,
}

impl std::ops::AddAssign for Load {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.logit_steps += other.logit_steps;
        self.rows += other.rows;
        self.logit_rows += other.logit_rows;
        self.runs += other.runs;
        self.tiles += other.tiles;
        self.row_positions += other.row_positions;
        self.run_positions += other.run_positions;
    }
}

/// An amount (bytes, operations, units of work) of one call of a region: a coefficient for each field of [`Load`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Linear {
    #[serde(skip_serializing_if = "is_zero")]
    pub per_step: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub per_logit_step: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub per_row: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub per_logit_row: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub per_run: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub per_tile: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub per_row_position: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub per_run_position: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Linear {
    /// The same amount in every step.
    pub fn per_step(amount: u64) -> Self {
        Self { per_step: amount, ..Self::default() }
    }

    /// The amount for a load. (Who made a manifest may have written anything into it: sums end at the largest number.)
    pub fn at(&self, load: &Load) -> u64 {
        let terms = [
            (self.per_step, load.steps),
            (self.per_logit_step, load.logit_steps),
            (self.per_row, load.rows),
            (self.per_logit_row, load.logit_rows),
            (self.per_run, load.runs),
            (self.per_tile, load.tiles),
            (self.per_row_position, load.row_positions),
            (self.per_run_position, load.run_positions),
        ];
        terms.iter().fold(0, |sum: u64, (each, count)| sum.saturating_add(each.saturating_mul(*count)))
    }
}

impl std::ops::AddAssign for Linear {
    fn add_assign(&mut self, other: Self) {
        self.per_step = self.per_step.saturating_add(other.per_step);
        self.per_logit_step = self.per_logit_step.saturating_add(other.per_logit_step);
        self.per_row = self.per_row.saturating_add(other.per_row);
        self.per_logit_row = self.per_logit_row.saturating_add(other.per_logit_row);
        self.per_run = self.per_run.saturating_add(other.per_run);
        self.per_tile = self.per_tile.saturating_add(other.per_tile);
        self.per_row_position = self.per_row_position.saturating_add(other.per_row_position);
        self.per_run_position = self.per_run_position.saturating_add(other.per_run_position);
    }
}

/// How many rows of a matmul pass over its weights together. Threads share out all units of all passes: more passes make smaller shares,
/// and every one of them reads the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passes {
    /// Most rows of a pass; 0: all.
    pub most: u32,
    /// Least rows of a pass that is there for the threads' sake.
    pub least: u32,
}

/// More passes must make the largest share smaller by more than one part of so many.
pub const PASSES_GAIN: u64 = 16;

impl Passes {
    /// The numbers of passes that `rows` rows can come in: as few as hold them, and twice, four times, ... as many, fewest first.
    pub fn numbers(self, rows: u32) -> impl Iterator<Item = u32> {
        let fewest = self.fewest(rows);
        let more = std::iter::successors(Some(fewest), |number| number.checked_mul(2));
        more.take_while(move |number| *number == fewest || u64::from(*number) * u64::from(self.least) <= rows.into())
    }

    fn fewest(self, rows: u32) -> u32 {
        if self.most == 0 { 1 } else { rows.div_ceil(self.most) }
    }

    /// At most so many passes do up to `rows` rows come in.
    pub fn most_passes(self, rows: u32) -> u32 {
        self.fewest(rows).max(rows / self.least.max(1))
    }

    /// The number that `threads` threads choose for `rows` rows of `units` units each: with the smallest share for the thread that has most.
    pub fn number(self, rows: u32, units: u32, threads: u32) -> u32 {
        let largest = |number: &u32| self.largest_share(*number, rows, units, threads);
        let smaller =
            |best: u32, number: u32| if largest(&number) * PASSES_GAIN < largest(&best) * (PASSES_GAIN - 1) { number } else { best };
        self.numbers(rows).reduce(smaller).expect("the fewest")
    }

    /// Rows times units of the thread that has most, of so many passes.
    pub fn largest_share(self, number: u32, rows: u32, units: u32, threads: u32) -> u64 {
        (u64::from(number) * u64::from(units)).div_ceil(threads.into()) * u64::from(rows.div_ceil(number))
    }
}

/// Kinds of regions; rounding rows to codes counts as loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum RegionKind {
    Matmul,
    Attention,
    Loops,
}

/// The instruction that does most of a region's arithmetic: which peak bounds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arithmetic {
    /// Fused multiply-add of f32.
    F32,
    /// Dot or matrix product of bf16, accumulated in f32.
    Bf16Dot,
    /// Dot product of four int8 codes, accumulated in i32.
    Int8Dot,
}

impl Arithmetic {
    /// For tables.
    pub fn name(self) -> &'static str {
        match self {
            Arithmetic::F32 => "f32",
            Arithmetic::Bf16Dot => "bf16",
            Arithmetic::Int8Dot => "int8",
        }
    }
}

/// One region: name, kind and the cost of one call. In the layer loop there is one call per layer and step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionInfo {
    /// `layers.qkv`, ...
    pub name: String,
    /// What it is.
    pub kind: RegionKind,
    /// Its arithmetic.
    pub arithmetic: Arithmetic,
    /// Trip count of the layer loop that it is in; none outside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<u32>,
    /// Positions that a row sees at most (sliding window).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u32>,
    /// Threads meet after it.
    pub barrier: bool,
    /// Indivisible pieces of work that are shared out to threads.
    pub units: Linear,
    /// Where they are those of passes of rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes: Option<Passes>,
    /// Bytes of weights, read once.
    pub weight_bytes: Linear,
    /// Bytes of KV cache, read once per run and written once per row.
    pub kv_bytes: Linear,
    /// Bytes of values between regions (arena, tables, output), read or written once. They mostly stay in caches.
    pub activation_bytes: Linear,
    /// Bytes that every thread reads for itself, not shared out: the prologues of matmuls.
    pub private_bytes: Linear,
    /// Operations of matrix products and attention, a multiply-add counting two. Elementwise work is bytes, not operations.
    pub flop: Linear,
}

impl RegionInfo {
    /// Calls per step.
    pub fn calls(&self) -> u64 {
        u64::from(self.layers.unwrap_or(1))
    }

    /// Work of all its calls for a load.
    pub fn work(&self, load: &Load) -> Work {
        let all = |form: &Linear| form.at(load).saturating_mul(self.calls());
        Work {
            weight_bytes: all(&self.weight_bytes),
            kv_bytes: all(&self.kv_bytes),
            activation_bytes: all(&self.activation_bytes),
            flop: all(&self.flop),
        }
    }
}

/// Amounts of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct Work {
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    pub activation_bytes: u64,
    pub flop: u64,
}

impl Work {
    /// Bytes that come from memory where the model is larger than the caches: weights and KV cache.
    pub fn memory_bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.kv_bytes)
    }
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.weight_bytes = self.weight_bytes.saturating_add(other.weight_bytes);
        self.kv_bytes = self.kv_bytes.saturating_add(other.kv_bytes);
        self.activation_bytes = self.activation_bytes.saturating_add(other.activation_bytes);
        self.flop = self.flop.saturating_add(other.flop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_end_at_the_largest_number() {
        let mut form = Linear { per_row: u64::MAX / 2, per_step: 3, ..Linear::default() };
        let load = Load { steps: 1, rows: 5, ..Load::default() };
        assert_eq!(form.at(&load), u64::MAX);
        form += form;
        assert_eq!((form.per_row, form.per_step), (u64::MAX - 1, 6));
        form += form;
        assert_eq!(form.per_row, u64::MAX);
    }

    #[test]
    fn every_field_adds_up() {
        let mut load = Load { steps: 3, logit_steps: 2, rows: 4, logit_rows: 5, runs: 6, tiles: 7, row_positions: 8, run_positions: 9 };
        load += load;
        assert_eq!(
            load,
            Load { steps: 6, logit_steps: 4, rows: 8, logit_rows: 10, runs: 12, tiles: 14, row_positions: 16, run_positions: 18 }
        );
        let form = |k: u64| Linear {
            per_step: 3 * k,
            per_logit_step: 2 * k,
            per_row: 4 * k,
            per_logit_row: 5 * k,
            per_run: 6 * k,
            per_tile: 7 * k,
            per_row_position: 8 * k,
            per_run_position: 9 * k,
        };
        let mut sum = form(1);
        sum += sum;
        assert_eq!(sum, form(2));
        let mut work = Work { weight_bytes: 3, kv_bytes: 4, activation_bytes: 5, flop: 6 };
        work += work;
        assert_eq!(work, Work { weight_bytes: 6, kv_bytes: 8, activation_bytes: 10, flop: 12 });
    }

    #[test]
    fn rows_come_in_as_many_passes_as_make_the_largest_share_smaller() {
        let any = Passes { most: 0, least: 24 };
        assert_eq!(any.numbers(128).collect::<Vec<_>>(), [1, 2, 4]);
        assert_eq!((any.most_passes(128), any.most_passes(20)), (5, 1));
        // 24 units: whole shares of one pass; where threads share unevenly, or are more than units, of two and four.
        for (threads, number, share) in [(1, 1, 24 * 128), (2, 1, 12 * 128), (24, 1, 128), (16, 2, 3 * 64), (64, 2, 64), (96, 4, 32)] {
            assert_eq!((any.number(128, 24, threads), any.largest_share(number, 128, 24, threads)), (number, share), "{threads} threads");
        }
        // A gain of a sixteenth and less is not worth another pass: shares of 13 units of 128 rows, or of 25 of 64.
        assert_eq!((any.number(128, 25, 2), any.number(128, 13, 2)), (1, 2));
        let several = Passes { most: 100, least: 24 };
        assert_eq!(several.numbers(301).collect::<Vec<_>>(), [4, 8]);
        assert_eq!(several.numbers(90).collect::<Vec<_>>(), [1, 2]);
        assert_eq!((several.most_passes(301), several.number(301, 24, 2), several.number(301, 1, 8)), (12, 4, 8));
        // What a damaged manifest may say.
        assert_eq!(Passes { most: 1, least: 0 }.number(u32::MAX, u32::MAX, 1), u32::MAX);
    }

    #[test]
    fn forms_are_linear_and_zeros_are_not_written() {
        let form = Linear { per_step: 1, per_row: 10, per_run_position: 100, ..Linear::default() };
        let one = Load { steps: 1, rows: 2, run_positions: 3, ..Load::default() };
        let mut two = one;
        two += one;
        assert_eq!((form.at(&one), form.at(&two)), (321, 642));
        assert_eq!(serde_json::to_string(&form).unwrap(), r#"{"per_step":1,"per_row":10,"per_run_position":100}"#);
        assert_eq!(serde_json::from_str::<Linear>(r#"{"per_row":10}"#).unwrap(), Linear { per_row: 10, ..Linear::default() });
    }
}
