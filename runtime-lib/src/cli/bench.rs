//! `bench`: how fast.
//!
//! Work is counted by the cost model while the first repetition, which warms up, runs: rates need no second account of what a test does.

use std::time::Instant;

use clap::ArgMatches;
use rcompile_message::escape;
use serde::Serialize;

use super::Cx;
use super::args::{BenchArgs, MachineArgs, TableForm, on_command_line};
use super::error::Failure;
use super::streams::{print, print_json};
use crate::abi::{Manifest, Task};
use crate::cost::Work;
use crate::decode::Decoder;
use crate::encode::Encoder;
use crate::process::resident_bytes;
use crate::profile::Profile;
use crate::sample::Random;
use crate::step::Session;

/// Default length of a prompt, where the context is not shorter.
pub(super) const PROMPT: usize = 512;
/// Default number of tokens that `bench` generates, likewise.
const GENERATED: usize = 128;

/// One test with its measurements.
#[derive(Clone, Debug, Serialize)]
struct Measured {
    test: String,
    batch: usize,
    threads: usize,
    dtype: String,
    /// Tokens per second.
    avg_ts: f64,
    stddev_ts: f64,
    samples_ts: Vec<f64>,
    /// Bytes of weights that one step reads.
    weight_bytes: u64,
    /// Weights and KV cache.
    gb_per_s: f64,
    gflop_per_s: f64,
    rss_bytes: u64,
    /// Latency of one pass over all texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    avg_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    samples_ms: Option<Vec<f64>>,
}

pub(super) fn bench(cx: &Cx, args: &BenchArgs, flags: &ArgMatches) -> Result<(), Failure> {
    let encoder = cx.manifest().task == Task::Embed;
    let mut results = Results::new(cx.manifest(), args.output);
    let threads: Vec<Option<usize>> = match &args.threads[..] {
        [] => vec![None],
        list => list.iter().copied().map(Some).collect(),
    };
    refuse_nothing(encoder, &args.n_prompt, &args.n_gen)?;
    if encoder && (asked(flags, "depth", &args.depth) || asked(flags, "n_gen", &args.n_gen)) {
        return Err(Failure::usage("-d and -n: an encoder neither continues nor generates"));
    }
    for threads in threads {
        let session = cx.session(&MachineArgs { threads, place: args.place.clone() })?;
        if encoder {
            bench_encoder(cx, args, session, &mut results)?;
        } else {
            bench_decoder(cx, args, session, &mut results)?;
        }
    }
    results.finish()
}

/// Refuses lengths that were asked for and are all 0; an encoder has prompts only.
pub(super) fn refuse_nothing(encoder: bool, n_prompt: &[usize], n_gen: &[usize]) -> Result<(), Failure> {
    let only_zeros = |list: &[usize]| !list.is_empty() && list.iter().all(|&n| n == 0);
    if only_zeros(n_prompt) && (encoder || only_zeros(n_gen)) {
        return Err(Failure::usage("-p and -n: nothing to measure: all lengths are 0"));
    }
    Ok(())
}

/// Whether a flag of lengths asks for something. A variable that is set for another executable does not.
pub(super) fn asked(flags: &ArgMatches, flag: &str, lengths: &[usize]) -> bool {
    lengths.iter().any(|&n| n > 0) && on_command_line(flags, flag)
}

/// A length that was not asked for, shortened to `room`.
pub(super) fn default_length(default: usize, room: usize) -> usize {
    default.min(room).max(1)
}

/// The lengths that were asked for, otherwise the default.
fn lengths(asked: &[usize], default: usize, room: usize) -> Vec<usize> {
    match asked {
        [] => vec![default_length(default, room)],
        asked => asked.to_vec(),
    }
}

fn bench_decoder(cx: &Cx, args: &BenchArgs, session: Session<'static>, results: &mut Results) -> Result<(), Failure> {
    let manifest = cx.manifest();
    let threads = session.threads() as usize;
    let mut decoder = Decoder::new(session);
    let mut ids = Ids::new(manifest.vocab_size);
    let ctx_size = decoder.session().program().ctx_size();
    let tests = |depth: usize| {
        let room = ctx_size.saturating_sub(depth);
        tests(&lengths(&args.n_prompt, PROMPT, room), &lengths(&args.n_gen, GENERATED, room))
    };
    // All before the first test: none is measured in vain.
    for &batch in &args.batch {
        check_batch(&decoder, batch)?;
    }
    for &depth in &args.depth {
        for (_, count) in tests(depth) {
            decoder.check_room(depth.saturating_add(count))?;
        }
    }
    for &batch in &args.batch {
        for &depth in &args.depth {
            for (kind, count) in tests(depth) {
                let name = test_name(kind, count, depth);
                for slot in 0..batch {
                    decoder.truncate(slot, 0);
                    if depth > 0 {
                        decoder.feed(slot, &ids.take(depth))?;
                    }
                }
                let mut seconds = Vec::new();
                let mut work = None;
                for repetition in 0..=args.repetitions {
                    for slot in 0..batch {
                        decoder.truncate(slot, depth);
                    }
                    if repetition == 0 {
                        decoder.session().start_profile(0);
                    }
                    let tokens = ids.take(count * batch);
                    let mut next = vec![(0, 0); batch];
                    let begin = Instant::now();
                    match kind {
                        Kind::Prompt => {
                            for (slot, part) in tokens.chunks(count).enumerate() {
                                decoder.feed(slot, part)?;
                            }
                        }
                        Kind::Generate => {
                            for step in tokens.chunks(batch) {
                                for (slot, &token) in step.iter().enumerate() {
                                    next[slot] = (slot, token);
                                }
                                decoder.advance(&next, |_, _| ())?;
                            }
                        }
                    }
                    match decoder.session().take_profile() {
                        Some(profile) => work = Some(TestWork::of(&profile, count * batch)),
                        None => seconds.push(begin.elapsed().as_secs_f64()),
                    }
                }
                results.add(measured(manifest, name, batch, threads, &work.unwrap_or_default(), seconds, false))?;
            }
        }
    }
    Ok(())
}

/// Refuses more sequences side by side than there are slots.
pub(super) fn check_batch(decoder: &Decoder, batch: usize) -> Result<(), Failure> {
    let slots = decoder.slots().count();
    if batch <= slots {
        return Ok(());
    }
    let what = format!("-b {batch}: expected at most {slots} sequences, the slots of this executable");
    Err(Failure::usage(what).help(format!("build with --parallel {batch}")))
}

fn bench_encoder(cx: &Cx, args: &BenchArgs, session: Session<'static>, results: &mut Results) -> Result<(), Failure> {
    let manifest = cx.manifest();
    let threads = session.threads() as usize;
    let mut encoder = Encoder::new(session);
    let mut ids = Ids::new(manifest.vocab_size);
    let mut counts = lengths(&args.n_prompt, PROMPT, encoder.text_limit());
    counts.retain(|&n| n > 0);
    for &count in &counts {
        encoder.check_lengths([count])?;
    }
    for &batch in &args.batch {
        for &count in &counts {
            let texts: Vec<Vec<u32>> = (0..batch).map(|_| ids.take(count)).collect();
            let mut seconds = Vec::new();
            encoder.start_profile(0);
            encoder.encode(&texts, |_, _| ())?;
            let profile = encoder.take_profile();
            let work = profile.map(|p| TestWork::of(&p, count * batch)).unwrap_or_default();
            for _ in 0..args.repetitions {
                let begin = Instant::now();
                encoder.encode(&texts, |_, _| ())?;
                seconds.push(begin.elapsed().as_secs_f64());
            }
            let name = test_name(Kind::Prompt, count, 0);
            results.add(measured(manifest, name, batch, threads, &work, seconds, true))?;
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Prompt,
    Generate,
}

fn tests(prompts: &[usize], gens: &[usize]) -> Vec<(Kind, usize)> {
    let prompts = prompts.iter().map(|&n| (Kind::Prompt, n));
    let gens = gens.iter().map(|&n| (Kind::Generate, n));
    prompts.chain(gens).filter(|t| t.1 > 0).collect()
}

fn test_name(kind: Kind, count: usize, depth: usize) -> String {
    let name = match kind {
        Kind::Prompt => format!("pp{count}"),
        Kind::Generate => format!("tg{count}"),
    };
    match depth {
        0 => name,
        depth => format!("{name}@d{depth}"),
    }
}

/// What a test does per repetition.
#[derive(Clone, Copy, Debug, Default)]
struct TestWork {
    tokens: usize,
    steps: u64,
    work: Work,
}

impl TestWork {
    fn of(profile: &Profile, tokens: usize) -> Self {
        Self { tokens, steps: profile.steps(), work: profile.work() }
    }
}

fn measured(manifest: &Manifest, test: String, batch: usize, threads: usize, did: &TestWork, seconds: Vec<f64>, latency: bool) -> Measured {
    let samples_ts: Vec<f64> = seconds.iter().map(|s| did.tokens as f64 / s).collect();
    let (avg_ts, stddev_ts) = mean_and_deviation(&samples_ts);
    let (mean_seconds, _) = mean_and_deviation(&seconds);
    let samples_ms: Vec<f64> = seconds.iter().map(|s| s * 1e3).collect();
    Measured {
        test,
        batch,
        threads,
        dtype: manifest.dtype.clone(),
        avg_ts,
        stddev_ts,
        samples_ts,
        weight_bytes: did.work.weight_bytes / did.steps.max(1),
        gb_per_s: did.work.memory_bytes() as f64 / mean_seconds / 1e9,
        gflop_per_s: did.work.flop as f64 / mean_seconds / 1e9,
        rss_bytes: resident_bytes(),
        avg_ms: latency.then_some(mean_seconds * 1e3),
        samples_ms: latency.then_some(samples_ms),
    }
}

fn mean_and_deviation(samples: &[f64]) -> (f64, f64) {
    let count = samples.len() as f64;
    let mean = samples.iter().sum::<f64>() / count;
    let squares: f64 = samples.iter().map(|s| (s - mean).powi(2)).sum();
    let deviation = if samples.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 };
    (mean, deviation)
}

/// Token ids that look random and are the same every time.
pub(super) struct Ids {
    random: Random,
    vocab: u32,
}

impl Ids {
    pub(super) fn new(vocab: u32) -> Self {
        Self { random: Random::new(1), vocab }
    }

    pub(super) fn take(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| (self.random.next_u64() % u64::from(self.vocab)) as u32).collect()
    }
}

/// Prints results in the form that was asked for, row by row where the form allows.
struct Results {
    form: TableForm,
    model: String,
    all: Vec<Measured>,
}

impl Results {
    fn new(manifest: &Manifest, form: TableForm) -> Self {
        Self { form, model: escape(&manifest.name), all: Vec::new() }
    }

    fn add(&mut self, row: Measured) -> Result<(), Failure> {
        let first = self.all.is_empty();
        match self.form {
            TableForm::Md => {
                if first {
                    print(&self.markdown_head(&row))?;
                }
                print(&self.markdown(&row))?;
            }
            TableForm::Csv => {
                if first {
                    print("test,batch,threads,dtype,avg_ts,stddev_ts,avg_ms,weight_bytes,gb_per_s,gflop_per_s,rss_bytes\n")?;
                }
                print(&csv(&row))?;
            }
            TableForm::Jsonl => print_json(&row)?,
            TableForm::Json => {}
        }
        self.all.push(row);
        Ok(())
    }

    fn finish(self) -> Result<(), Failure> {
        match self.form {
            TableForm::Json => print_json(&self.all),
            _ => Ok(()),
        }
    }

    fn markdown_head(&self, row: &Measured) -> String {
        let (name, rule) = match row.avg_ms {
            Some(_) => (" ms |", "---:|"),
            None => ("", ""),
        };
        format!("| model | dtype | threads | batch | test | t/s |{name} GB/s | GFLOP/s |\n|---|---|---:|---:|---:|---:|{rule}---:|---:|\n")
    }

    fn markdown(&self, row: &Measured) -> String {
        let ms = row.avg_ms.map_or(String::new(), |ms| format!(" {ms:.3} |"));
        format!(
            "| {} | {} | {} | {} | {} | {:.2} ± {:.2} |{ms} {:.2} | {:.1} |\n",
            self.model, row.dtype, row.threads, row.batch, row.test, row.avg_ts, row.stddev_ts, row.gb_per_s, row.gflop_per_s
        )
    }
}

fn csv(row: &Measured) -> String {
    format!(
        "{},{},{},{},{},{},{},{},{},{},{}\n",
        row.test,
        row.batch,
        row.threads,
        row.dtype,
        row.avg_ts,
        row.stddev_ts,
        row.avg_ms.map_or(String::new(), |ms| ms.to_string()),
        row.weight_bytes,
        row.gb_per_s,
        row.gflop_per_s,
        row.rss_bytes
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::tests::manifest;

    #[test]
    fn rates_follow_from_the_samples() {
        let manifest = manifest(Vec::new(), 1);
        let work = Work { weight_bytes: 10_000_000_000, kv_bytes: 1_000_000_000, activation_bytes: 77, flop: 20_000_000_000 };
        let did = TestWork { tokens: 10, steps: 10, work };
        let m = measured(&manifest, "tg10".into(), 1, 2, &did, vec![1.0, 1.0], false);
        assert_eq!((m.avg_ts, m.stddev_ts, m.weight_bytes), (10.0, 0.0, 1_000_000_000));
        assert_eq!((m.gb_per_s, m.gflop_per_s), (11.0, 20.0));
        let slow = measured(&manifest, "tg10".into(), 1, 2, &did, vec![2.0, 2.0], true);
        assert_eq!((slow.avg_ts, slow.gb_per_s, slow.gflop_per_s), (5.0, 5.5, 10.0));
        assert_eq!((slow.avg_ms, slow.samples_ms), (Some(2000.0), Some(vec![2000.0; 2])));
        let value = serde_json::to_value(&m).unwrap();
        let keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            keys,
            [
                "test",
                "batch",
                "threads",
                "dtype",
                "avg_ts",
                "stddev_ts",
                "samples_ts",
                "weight_bytes",
                "gb_per_s",
                "gflop_per_s",
                "rss_bytes"
            ]
        );
        assert_eq!(mean_and_deviation(&[1.0, 3.0]), (2.0, 2f64.sqrt()));
        assert_eq!(mean_and_deviation(&[1.0, 2.0, 6.0]), (3.0, 7f64.sqrt()));
    }

    #[test]
    fn tests_have_their_known_names() {
        assert_eq!(test_name(Kind::Prompt, 512, 0), "pp512");
        assert_eq!(test_name(Kind::Generate, 128, 512), "tg128@d512");
        assert_eq!(tests(&[512, 0], &[0]), [(Kind::Prompt, 512)]);
    }
}
