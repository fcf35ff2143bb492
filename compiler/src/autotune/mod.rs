//! `--autotune fast`: tries a few tiles of the matmuls on this machine and keeps those that are faster.
//!
//! ```text
//! plan (heuristic) -> variants of each matmul's tile -> per variant: plan, compile, link a trial executable
//!   -> rounds: every trial executable runs `bench` on every bucket, in turns, the planner's choice twice
//!   -> per bucket the best variant, if it gains more than the planner's choice differs from itself -> Tuning
//! ```
//! A trial executable is the real one with two differences: it stops after some layers, as many as it takes for their weights to come from
//! memory and not from a cache, and its weights are random numbers (codes are zeros) in one sparse file that all trials share. So a tile is
//! measured where it will be used: between the norms, attention and barriers of real layers. What runs is bounded by `BUDGET`; rates are
//! compared within a round, because the machine's speed changes from minute to minute.

mod trial;
mod variants;

use crate::error::Error;
use crate::link::guard::WorkDir;
use crate::link::payload::Unsealed;
use crate::plan::{Planned, Plans};
use crate::report::{AutotuneReport, Progress, TunedBucket};
use crate::tuning::{self, MatmulKey, Tuning};
use rcompile_codegen::isa::{HOST_TRIPLE, Isa};
use rcompile_codegen::program::MatmulTile;
use rcompile_runtime::cpu;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Longest time of all runs together; what runs then is ended and does not count.
const BUDGET: Duration = Duration::from_secs(60);
/// After so many tenths of it no more trial executables are made.
const MAKING_TENTHS: u32 = 5;
/// Rounds below which nothing is decided, and beyond which more say little.
const ROUNDS: std::ops::RangeInclusive<usize> = 3..=9;
/// A variant has to be faster than the heuristic by this factor, by twice as much as the heuristic differs from itself, and in two of
/// three rounds.
const GAIN_MIN: f64 = 1.01;
/// Most variants of a tile, and so trial executables.
pub const TRIALS_MAX: u64 = 6;

/// Plans all buckets with these tiles.
pub type Plan<'a> = dyn Fn(Option<&Tuning>) -> Result<Plans, Error> + 'a;
/// Compiles and links plans in a work directory; weights are beside the executable and not packed.
pub type Link<'a> = dyn Fn(&WorkDir, &Plans) -> Result<Unsealed, Error> + 'a;

/// What autotuning needs of the build that it is part of.
pub struct Cx<'a> {
    /// Target.
    pub isa: &'a Isa,
    /// Positions per sequence.
    pub ctx_size: u32,
    /// The planner.
    pub plan: &'a Plan<'a>,
    /// Code generator and linker.
    pub link: &'a Link<'a>,
    /// Where trials are made.
    pub work: &'a WorkDir,
}

/// Refuses a CPU that this machine is not.
pub fn check(isa: &Isa) -> Result<(), Error> {
    check_on(&Isa::native()?, isa)
}

fn check_on(native: &Isa, isa: &Isa) -> Result<(), Error> {
    let missing: Vec<&str> = isa.features.difference(&native.features).map(String::as_str).collect();
    // Which choices are fast depends on caches and on how lines are fetched, and so on the CPU's table row.
    let alike = isa.is_level() || (isa.streams, isa.l2_bytes) == (native.streams, native.l2_bytes);
    if isa.triple == HOST_TRIPLE && missing.is_empty() && alike {
        return Ok(());
    }
    let what = match isa.triple == HOST_TRIPLE {
        true if missing.is_empty() => format!("measures this machine, expected {} or a level, found {}", native.name, isa.name),
        true => format!("runs what it compiles, expected a CPU that this machine is, found {}; missing {}", isa.name, missing.join(",")),
        false => format!("runs what it compiles, expected {HOST_TRIPLE}, found {}", isa.triple),
    };
    let help = "run --autotune fast --tuning FILE on such a machine, and build with --tuning FILE here";
    Err(Error::Unsupported { place: "--autotune fast".into(), what, help: Some(help.into()) })
}

/// A bucket and the matmuls that are tuned with it.
struct Bucket {
    rows: u32,
    /// Each with its variants, the planner's choice first.
    matmuls: Vec<(MatmulKey, Vec<MatmulTile>)>,
    /// By round: tokens per second of each variant, and of the planner's choice once more.
    rates: Vec<Vec<f64>>,
}

/// Measures. Out: a tile for every matmul, the heuristic's where nothing was better.
pub fn run(cx: &Cx<'_>, progress: &mut Progress) -> Result<(Tuning, AutotuneReport), Error> {
    let start = Instant::now();
    let stage = progress.stage("autotune", BUDGET.as_secs(), false);
    let mut shown = 0;
    let mut tick = |text: String| {
        let now = start.elapsed().as_secs().min(BUDGET.as_secs());
        stage.message(text);
        stage.advance(now - shown);
        shown = now;
    };
    let mut buckets = buckets(&(cx.plan)(None)?.buckets);
    let count = buckets.iter().flat_map(|b| &b.matmuls).map(|(_, variants)| variants.len()).max().unwrap_or(1);

    debug_assert!(count as u64 <= TRIALS_MAX, "{count} variants");
    let mut trials: Vec<PathBuf> = Vec::new();
    for index in 0..count {
        if index > 1 && start.elapsed() * 10 > BUDGET * MAKING_TENTHS {
            break;
        }
        tick(format!("making variant {} of {count}", index + 1));
        let tuning = tuning(&buckets, |_| index);
        trials.push(trial::make(cx, index, &tuning, trials.first())?);
    }
    // A causal prompt of as many tokens as a bucket has rows is one step of that bucket.
    let mut lengths: Vec<u32> = buckets.iter().map(|b| b.rows).filter(|&rows| rows <= cx.ctx_size).collect();
    let measuring = Instant::now();
    let left = || BUDGET.saturating_sub(measuring.elapsed());
    tick("the planner's choice".into());
    let mut seconds = Vec::new();
    for rows in &lengths {
        let begin = Instant::now();
        if trial::run(&trials[0], &[*rows], cx.work, left())?.is_none() {
            break;
        }
        seconds.push(begin.elapsed().as_secs_f64());
    }
    // Every trial has a turn, and the planner's choice another one half a round later, as far from the first as the variants are.
    let again = trials.len();
    let mut turns: Vec<usize> = (0..again).collect();
    turns.insert(again.div_ceil(2), again);
    lengths = affordable(&lengths, &seconds, turns.len(), left());
    let mut rounds = 0;
    'rounds: while rounds < *ROUNDS.end() && !lengths.is_empty() {
        if rounds >= *ROUNDS.start() && measuring.elapsed() * (rounds as u32 + 1) / rounds as u32 > BUDGET {
            break;
        }
        let mut measured = vec![vec![0.0; turns.len()]; lengths.len()];
        for number in 0..turns.len() {
            // Another order in each round: what runs first after something else has no advantage.
            let turn = turns[(number + rounds) % turns.len()];
            let variant = if turn == again { 0 } else { turn };
            tick(format!("round {}, variant {} of {}", rounds + 1, variant + 1, trials.len()));
            let Some(rates) = trial::run(&trials[variant], &lengths, cx.work, left())? else { break 'rounds };
            for (bucket, rate) in measured.iter_mut().zip(rates) {
                bucket[turn] = rate;
            }
        }
        let measurable = buckets.iter_mut().filter(|b| lengths.contains(&b.rows));
        measurable.zip(measured).for_each(|(b, rates)| b.rates.push(rates));
        rounds += 1;
    }
    let choices: Vec<TunedBucket> = buckets.iter().map(|b| choose(b.rows, &b.rates)).collect();
    let tuning = tuning(&buckets, |bucket| choices[bucket].variant);
    let report = AutotuneReport {
        seconds: start.elapsed().as_secs_f64(),
        variants: trials.len(),
        rounds,
        tuning: serde_json::from_str(&tuning.text(cx.isa)?).map_err(|e| Error::bug("autotune", e))?,
        buckets: choices,
    };
    let kept = if rounds < *ROUNDS.start() { ", too few to choose by: the planner's tiles are kept" } else { "" };
    let gains: Vec<String> = report.buckets.iter().map(|b| format!("{} rows {:+.1} %", b.rows, (b.gain - 1.0) * 100.0)).collect();
    stage.finish(&format!("{} variants in {rounds} rounds{kept}: {}", trials.len(), gains.join(", ")));
    Ok((tuning, report))
}

/// Lengths that enough rounds of all trials can be run with in the time that is left, the shorter ones first, where a run with one of them
/// takes so many seconds.
fn affordable(lengths: &[u32], seconds: &[f64], trials: usize, left: Duration) -> Vec<u32> {
    let runs = (trials * ROUNDS.start()) as f64;
    let mut left = left.as_secs_f64();
    let mut fits = |(rows, seconds): (&u32, &f64)| {
        left -= seconds * runs;
        (left >= 0.0).then_some(*rows)
    };
    lengths.iter().zip(seconds).map_while(&mut fits).collect()
}

/// Matmuls by bucket; one that several buckets share belongs to the first.
fn buckets(plans: &[Planned]) -> Vec<Bucket> {
    let mut seen: Vec<MatmulKey> = Vec::new();
    let mut list = Vec::new();
    for plan in plans {
        let mut matmuls = Vec::new();
        for (key, matmul) in tuning::matmuls(&plan.program) {
            if !seen.contains(&key) {
                seen.push(key.clone());
                let variants = variants::of(&key, matmul.tile, matmul.fetch(cpu::kind()));
                matmuls.push((key, variants));
            }
        }
        list.push(Bucket { rows: plan.program.bucket, matmuls, rates: Vec::new() });
    }
    list
}

/// A variant of each bucket's matmuls, by its number; the planner's choice where there are fewer.
fn tuning(buckets: &[Bucket], variant: impl Fn(usize) -> usize) -> Tuning {
    let mut tuning = Tuning::default();
    for (i, bucket) in buckets.iter().enumerate() {
        for (key, variants) in &bucket.matmuls {
            tuning.set(key.clone(), *variants.get(variant(i)).unwrap_or(&variants[0]));
        }
    }
    tuning
}

/// The best variant of these rounds, and its rate over the heuristic's: medians of the ratios within rounds. The last rate of a round is
/// the heuristic's own once more.
fn choose(rows: u32, rates: &[Vec<f64>]) -> TunedBucket {
    let mut best = TunedBucket { rows, variant: 0, gain: 1.0, noise: 0.0 };
    let Some(again) = rates.first().and_then(|round| round.len().checked_sub(1)) else { return best };
    // So few say nothing, of noise neither.
    if rates.len() < *ROUNDS.start() {
        return best;
    }
    // Of both runs of the heuristic, since each is as likely to be the disturbed one.
    let ratios = |index: usize| {
        let of_round = |r: &Vec<f64>| (r[0] > 0.0 && r[again] > 0.0).then(|| r[index] / (r[0] * r[again]).sqrt());
        rates.iter().filter_map(of_round).collect::<Vec<_>>()
    };
    best.noise = median(rates.iter().filter(|r| r[0] > 0.0).map(|r| (r[again] / r[0] - 1.0).abs()).collect()).unwrap_or(0.0);
    let least = GAIN_MIN.max(1.0 + 2.0 * best.noise);
    for index in 1..again {
        let ratios = ratios(index);
        let (rounds, wins) = (ratios.len(), ratios.iter().filter(|r| **r > 1.0).count());
        let Some(gain) = median(ratios) else { continue };
        if rounds >= *ROUNDS.start() && !best.is_undecided() && gain >= least && gain > best.gain && 3 * wins >= 2 * rounds {
            best = TunedBucket { variant: index, gain, ..best };
        }
    }
    best
}

/// The middle of the values, or the upper one of two.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_or_a_level_is_measured() {
        let isa = |cpu: &str| Isa::lookup("x86_64-unknown-linux-gnu", cpu, &[]).unwrap();
        let refused = |native: &str, cpu: &str| check_on(&isa(native), &isa(cpu)).err().map(|e| e.to_string());
        if !HOST_TRIPLE.starts_with("x86_64") {
            return assert!(refused("znver5", "znver5").is_some());
        }
        for cpu in ["emeraldrapids", "sapphirerapids", "x86-64-v4", "x86-64-v3"] {
            assert_eq!(refused("emeraldrapids", cpu), None, "{cpu}");
        }
        // It could run the code of both.
        for cpu in ["znver4", "haswell"] {
            assert!(refused("emeraldrapids", cpu).is_some_and(|e| e.contains("measures this machine")), "{cpu}");
        }
        assert!(refused("znver3", "znver4").is_some_and(|e| e.contains("missing avx512")));
    }

    #[test]
    fn what_takes_too_long_is_left_to_the_heuristic() {
        let lengths = |seconds| affordable(&[1, 8, 512], &[0.1, 0.2, 2.0], 6, Duration::from_secs(seconds));
        // 18 runs of each.
        assert_eq!(lengths(42), [1, 8, 512]);
        assert_eq!(lengths(41), [1, 8]);
        assert_eq!(lengths(2), [1]);
        assert!(lengths(0).is_empty());
        // What was not done in time.
        assert_eq!(affordable(&[1, 8, 512], &[0.1], 6, Duration::from_secs(60)), [1]);
    }

    #[test]
    fn only_what_is_clearly_faster_is_chosen() {
        // Absolute rates drift by a factor of two; ratios within rounds count.
        let rounds = |again: [f64; 3], ratios: [[f64; 2]; 3]| -> Vec<Vec<f64>> {
            let bases = [100.0, 50.0, 80.0].iter().zip(again);
            bases.zip(ratios).map(|((base, again), r)| vec![*base, base * r[0], base * r[1], base * again]).collect()
        };
        let chosen = |rates: &[Vec<f64>]| {
            let bucket = choose(8, rates);
            (bucket.variant, bucket.is_undecided())
        };
        let same = [1.0; 3];
        assert_eq!(chosen(&rounds(same, [[1.05, 1.1], [1.05, 1.1], [1.04, 1.2]])), (2, false));
        assert_eq!(chosen(&rounds(same, [[1.05, 0.9], [1.06, 0.9], [1.07, 3.0]])), (1, false));
        assert_eq!(chosen(&rounds(same, [[1.005, 0.9], [1.009, 0.9], [1.0, 0.9]])), (0, false));
        assert_eq!(chosen(&rounds(same, [[1.05, 0.9], [1.06, 0.9], [1.07, 3.0]])[..2]), (0, false));
        assert_eq!(chosen(&[]), (0, false));
        assert_eq!(chosen(&rounds([1.3, 0.7, 1.0], [[9.0, 0.9]; 3])[..2]), (0, false));
        // The heuristic's own tile differs from itself by 4 %: 5 or 6 % say nothing, 10 do.
        assert_eq!(chosen(&rounds([1.04, 0.96, 1.0], [[1.05, 0.9], [1.06, 0.9], [1.07, 0.9]])), (0, false));
        assert_eq!(chosen(&rounds([1.04, 0.96, 1.0], [[1.11, 0.9], [1.11, 0.9], [1.11, 0.9]])), (1, false));
        // A machine that does something else beside it.
        assert_eq!(chosen(&rounds([1.3, 0.7, 1.0], [[9.0, 0.9], [9.0, 0.9], [9.0, 0.9]])), (0, true));
        assert_eq!(choose(8, &rounds(same, [[1.05, 0.9], [1.06, 0.9], [1.07, 3.0]])).gain, 1.06);
    }

    #[test]
    fn a_cpu_that_is_not_here_is_refused() {
        let native = Isa::native().unwrap();
        assert!(check(&native).is_ok());
        let mut other = native.clone();
        other.features.insert("warp-drive".into());
        let e = check(&other).unwrap_err();
        assert_eq!(e.exit_code(), 6);
        assert!(e.to_string().contains("missing warp-drive") && e.help().is_some(), "{e}");
        other = Isa { triple: "aarch64-unknown-linux-gnu".into(), ..native };
        assert_eq!(check(&other).unwrap_err().exit_code(), 6);
    }
}
