//! `--autotune fast`: tries a few tiles of the matmuls on this machine and keeps those that are faster.
//!
//! ```text
//! plan (heuristic) -> variants of each matmul's tile -> per variant: plan, compile, link a trial executable
//!   -> rounds: every trial executable runs `bench` on every bucket, in turns -> per bucket the best variant -> Tuning
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
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Longest time of all runs together; what runs then is ended and does not count.
const BUDGET: Duration = Duration::from_secs(60);
/// After this part of as much time no more trial executables are made.
const MAKING_TENTHS: u32 = 5;
/// Rounds below which nothing is decided, and beyond which more say little.
const ROUNDS: std::ops::RangeInclusive<usize> = 3..=9;
/// A variant has to be faster than the heuristic by this factor, and in two of three rounds.
const GAIN_MIN: f64 = 1.01;

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
    matmuls: Vec<(MatmulKey, MatmulTile)>,
    /// By round and variant: tokens per second.
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
    let count = buckets.iter().flat_map(|b| &b.matmuls).map(|(key, tile)| variants::of(key, *tile).len()).max().unwrap_or(1);

    let mut trials: Vec<PathBuf> = Vec::new();
    for index in 0..count {
        if index > 1 && start.elapsed() * 10 > BUDGET * MAKING_TENTHS {
            break;
        }
        tick(format!("making variant {} of {count}", index + 1));
        let tuning = tuning(&buckets, |_, key, tile| variant(key, tile, index));
        trials.push(trial::make(cx, &tuning, trials.first())?);
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
    lengths = affordable(&lengths, &seconds, trials.len(), left());
    let mut rounds = 0;
    'rounds: while rounds < *ROUNDS.end() && !lengths.is_empty() {
        if rounds >= *ROUNDS.start() && measuring.elapsed() * (rounds as u32 + 1) / rounds as u32 > BUDGET {
            break;
        }
        let mut measured = vec![vec![0.0; trials.len()]; lengths.len()];
        for turn in 0..trials.len() {
            // Another order in each round: what runs first after something else has no advantage.
            let index = (turn + rounds) % trials.len();
            tick(format!("round {}, variant {} of {}", rounds + 1, index + 1, trials.len()));
            let Some(rates) = trial::run(&trials[index], &lengths, cx.work, left())? else { break 'rounds };
            for (bucket, rate) in measured.iter_mut().zip(rates) {
                bucket[index] = rate;
            }
        }
        let measurable = buckets.iter_mut().filter(|b| lengths.contains(&b.rows));
        measurable.zip(measured).for_each(|(b, rates)| b.rates.push(rates));
        rounds += 1;
    }
    let choices: Vec<(usize, f64)> = buckets.iter().map(|b| choose(&b.rates)).collect();
    let tuning = tuning(&buckets, |bucket, key, tile| variant(key, tile, choices[bucket].0));
    let report = AutotuneReport {
        seconds: start.elapsed().as_secs_f64(),
        variants: trials.len(),
        rounds,
        tuning: serde_json::from_str(&tuning.text(cx.isa)?).map_err(|e| Error::bug("autotune", e))?,
        buckets: buckets.iter().zip(&choices).map(|(b, c)| TunedBucket { rows: b.rows, variant: c.0, gain: c.1 }).collect(),
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
        for (key, tile) in tuning::matmuls(&plan.program) {
            if !seen.contains(&key) {
                seen.push(key.clone());
                matmuls.push((key, tile));
            }
        }
        list.push(Bucket { rows: plan.program.bucket, matmuls, rates: Vec::new() });
    }
    list
}

fn tuning(buckets: &[Bucket], tile: impl Fn(usize, &MatmulKey, MatmulTile) -> MatmulTile) -> Tuning {
    let mut tuning = Tuning::default();
    for (i, bucket) in buckets.iter().enumerate() {
        bucket.matmuls.iter().for_each(|(key, heuristic)| tuning.set(key.clone(), tile(i, key, *heuristic)));
    }
    tuning
}

/// Variant `index` of a tile; the heuristic where there are fewer.
fn variant(key: &MatmulKey, heuristic: MatmulTile, index: usize) -> MatmulTile {
    variants::of(key, heuristic).get(index).copied().unwrap_or(heuristic)
}

/// The best variant of these rounds, and its rate over the heuristic's: medians of the ratios within rounds.
fn choose(rates: &[Vec<f64>]) -> (usize, f64) {
    let count = rates.first().map_or(0, Vec::len);
    let mut best = (0, 1.0);
    for index in 1..count {
        let mut ratios: Vec<f64> = rates.iter().filter(|r| r[0] > 0.0).map(|r| r[index] / r[0]).collect();
        ratios.sort_by(f64::total_cmp);
        let wins = ratios.iter().filter(|r| **r > 1.0).count();
        let Some(&median) = ratios.get(ratios.len() / 2) else { continue };
        if ratios.len() >= *ROUNDS.start() && median >= GAIN_MIN && median > best.1 && 3 * wins >= 2 * ratios.len() {
            best = (index, median);
        }
    }
    best
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
        let rounds = |ratios: [[f64; 2]; 3]| -> Vec<Vec<f64>> {
            [100.0, 50.0, 80.0].iter().zip(ratios).map(|(base, r)| vec![*base, base * r[0], base * r[1]]).collect()
        };
        assert_eq!(choose(&rounds([[1.05, 1.1], [1.05, 1.1], [1.04, 1.2]])).0, 2);
        assert_eq!(choose(&rounds([[1.05, 0.9], [1.06, 0.9], [1.07, 3.0]])).0, 1);
        assert_eq!(choose(&rounds([[1.005, 0.9], [1.009, 0.9], [1.0, 0.9]])), (0, 1.0));
        assert_eq!(choose(&rounds([[1.05, 0.9], [1.06, 0.9], [1.07, 3.0]])[..2]), (0, 1.0));
        assert_eq!(choose(&[]), (0, 1.0));
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
