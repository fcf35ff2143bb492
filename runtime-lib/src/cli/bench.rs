//! `bench` and `profile`: how fast, and where the time goes.

use std::time::Instant;

use serde::Serialize;
use serde_json::json;

use super::args::{BenchArgs, ProfileArgs, TableForm};
use super::error::Failure;
use super::{Cx, print, print_json};
use crate::abi::Manifest;
use crate::decode::Decoder;
use crate::encode::Encoder;
use crate::process::resident_bytes;
use crate::sample::Random;
use crate::step::{Profile, Program, Session};

/// Default length of a prompt, where the context is not shorter.
const PROMPT: usize = 512;
/// Default number of tokens that `bench` generates, likewise.
const GENERATED: usize = 128;
/// Default number of tokens that `profile` generates, likewise.
const PROFILED: usize = 32;

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
    gb_per_s: f64,
    gflop_per_s: f64,
    rss_bytes: u64,
    /// Latency of one pass over all texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    avg_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    samples_ms: Option<Vec<f64>>,
}

/// What a test does per repetition, for rates.
struct Work {
    tokens: usize,
    steps: usize,
    rows: usize,
    logit_rows: usize,
}

pub(super) fn bench(cx: &Cx, args: &BenchArgs) -> Result<(), Failure> {
    let encoder = cx.manifest().task == "embed";
    let mut results = Results::new(cx.manifest(), args.output);
    let threads: Vec<Option<usize>> = match &args.threads[..] {
        [] => vec![None],
        list => list.iter().copied().map(Some).collect(),
    };
    let only = |list: &[usize]| !list.is_empty() && list.iter().all(|&n| n == 0);
    if only(&args.n_prompt) && (encoder || only(&args.n_gen)) {
        return Err(Failure::usage("-p and -n: nothing to measure: all lengths are 0"));
    }
    for threads in threads {
        let entry = if encoder { "encode" } else { "step" };
        let session = cx.session(entry, threads, args.pin)?;
        if encoder {
            bench_encoder(cx, args, session, &mut results)?;
        } else {
            bench_decoder(cx, args, session, &mut results)?;
        }
    }
    results.finish()
}

/// The lengths that were asked for, otherwise the default, shortened to `room`.
fn lengths(asked: &[usize], default: usize, room: usize) -> Vec<usize> {
    match asked {
        [] => vec![default.min(room).max(1)],
        asked => asked.to_vec(),
    }
}

fn bench_decoder(cx: &Cx, args: &BenchArgs, session: Session<'static>, results: &mut Results) -> Result<(), Failure> {
    let manifest = cx.manifest();
    let threads = session.threads() as usize;
    let mut decoder = Decoder::new(session);
    let mut ids = Ids::new(manifest.vocab_size);
    for &batch in &args.batch {
        let slots = decoder.slots().count();
        if batch > slots {
            return Err(Failure::usage(format!("-b {batch}: expected at most {slots} sequences, the slots of this executable"))
                .help(format!("build with --parallel {batch}")));
        }
        for &depth in &args.depth {
            let room = decoder.session().program().ctx_size().saturating_sub(depth);
            for (kind, count) in tests(&lengths(&args.n_prompt, PROMPT, room), &lengths(&args.n_gen, GENERATED, room)) {
                let name = test_name(kind, count, depth);
                let max_rows = decoder.session().program().max_rows();
                let scored = decoder.session().program().max_scored_rows();
                for slot in 0..batch {
                    decoder.truncate(slot, 0);
                    if depth > 0 {
                        decoder.feed(slot, &ids.take(depth))?;
                    }
                }
                let mut seconds = Vec::new();
                // The first repetition warms up and is not counted.
                for repetition in 0..=args.repetitions {
                    for slot in 0..batch {
                        decoder.truncate(slot, depth);
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
                    if repetition > 0 {
                        seconds.push(begin.elapsed().as_secs_f64());
                    }
                }
                let tokens = count * batch;
                let work = match kind {
                    Kind::Prompt => Work { tokens, steps: count.div_ceil(max_rows) * batch, rows: tokens, logit_rows: batch },
                    Kind::Generate => Work { tokens, steps: batch.div_ceil(scored) * count, rows: tokens, logit_rows: tokens },
                };
                results.add(measured(manifest, name, batch, threads, &work, seconds, false))?;
            }
        }
    }
    Ok(())
}

fn bench_encoder(cx: &Cx, args: &BenchArgs, session: Session<'static>, results: &mut Results) -> Result<(), Failure> {
    if args.depth.iter().any(|&d| d > 0) || args.n_gen.iter().any(|&n| n > 0) {
        return Err(Failure::usage("-d and -n: an encoder neither continues nor generates"));
    }
    let manifest = cx.manifest();
    let threads = session.threads() as usize;
    let mut encoder = Encoder::new(session);
    let mut ids = Ids::new(manifest.vocab_size);
    for &batch in &args.batch {
        for count in lengths(&args.n_prompt, PROMPT, encoder.text_limit()).into_iter().filter(|&n| n > 0) {
            let texts: Vec<Vec<u32>> = (0..batch).map(|_| ids.take(count)).collect();
            let mut seconds = Vec::new();
            for repetition in 0..=args.repetitions {
                let begin = Instant::now();
                encoder.encode(&texts, |_, _, _| ())?;
                if repetition > 0 {
                    seconds.push(begin.elapsed().as_secs_f64());
                }
            }
            let program = encoder.session().program();
            let runs = program.slots().min(program.max_outputs()).max(1);
            let per_step = (program.max_rows() / count.max(1)).clamp(1, runs);
            let work = Work { tokens: count * batch, steps: batch.div_ceil(per_step), rows: count * batch, logit_rows: 0 };
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

fn measured(manifest: &Manifest, test: String, batch: usize, threads: usize, work: &Work, seconds: Vec<f64>, latency: bool) -> Measured {
    let samples_ts: Vec<f64> = seconds.iter().map(|s| work.tokens as f64 / s).collect();
    let (avg_ts, stddev_ts) = mean_and_deviation(&samples_ts);
    let (mean_seconds, _) = mean_and_deviation(&seconds);
    let flop = manifest.flop_per_row as f64 * work.rows as f64 + manifest.flop_per_logit_row as f64 * work.logit_rows as f64;
    let samples_ms: Vec<f64> = seconds.iter().map(|s| s * 1e3).collect();
    Measured {
        test,
        batch,
        threads,
        dtype: manifest.dtype.clone(),
        avg_ts,
        stddev_ts,
        samples_ts,
        weight_bytes: manifest.weight_bytes_per_token,
        gb_per_s: manifest.weight_bytes_per_token as f64 * work.steps as f64 / mean_seconds / 1e9,
        gflop_per_s: flop / mean_seconds / 1e9,
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
struct Ids {
    random: Random,
    vocab: u32,
}

impl Ids {
    fn new(vocab: u32) -> Self {
        Self { random: Random::new(1), vocab: vocab.max(1) }
    }

    fn take(&mut self, count: usize) -> Vec<u32> {
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
        Self { form, model: manifest.name.clone(), all: Vec::new() }
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

/// Events per thread and bucket that a trace keeps.
const TRACE_EVENTS: usize = 100_000;

pub(super) fn profile(cx: &Cx, args: &ProfileArgs) -> Result<(), Failure> {
    let manifest = cx.manifest();
    let mut ids = Ids::new(manifest.vocab_size);
    let events = if args.trace.is_some() { TRACE_EVENTS } else { 0 };
    let (profile, names) = if manifest.task == "embed" {
        let mut encoder = Encoder::new(cx.session_with("encode", &args.threads)?);
        let text = ids.take(args.n_prompt.unwrap_or(PROMPT.min(encoder.text_limit())).max(1));
        encoder.encode(&[&text], |_, _, _| ())?;
        encoder.session().start_profile(events);
        encoder.encode(&[&text], |_, _, _| ())?;
        taken(encoder.session())
    } else {
        let mut decoder = Decoder::new(cx.session_with("step", &args.threads)?);
        let (n_prompt, n_gen) = profiled(args.n_prompt, args.n_gen, decoder.session().program().ctx_size());
        let prompt = ids.take(n_prompt);
        decoder.feed(0, &prompt)?; // warms up: first touch of weights and caches is not profiled
        decoder.truncate(0, 0);
        decoder.session().start_profile(events);
        decoder.feed(0, &prompt)?;
        for token in ids.take(n_gen) {
            decoder.feed(0, &[token])?;
        }
        taken(decoder.session())
    };
    let Some(profile) = profile else {
        return Err(Failure::new(70, "bug", "the profile was not taken"));
    };
    if let Some(path) = &args.trace {
        let failed = |e: std::io::Error| Failure::new(8, "output", format!("{path}: {e}"));
        std::fs::write(path, trace(&profile, &names)).map_err(failed)?;
    }
    let rows = region_rows(&profile, &names);
    if args.json {
        return print_json(&rows);
    }
    print(&region_table(&rows))
}

/// Lengths of prompt and answer. What was asked for stays; a default is shortened to what the other leaves of the context.
fn profiled(n_prompt: Option<usize>, n_gen: Option<usize>, ctx_size: usize) -> (usize, usize) {
    let n_gen = n_gen.unwrap_or_else(|| PROFILED.min(ctx_size.saturating_sub(n_prompt.unwrap_or(ctx_size / 2))));
    let n_prompt = n_prompt.unwrap_or_else(|| PROMPT.min(ctx_size.saturating_sub(n_gen)));
    (n_prompt.max(1), n_gen)
}

/// Buckets with the names of their regions.
type RegionNames = Vec<(u32, Vec<String>)>;

fn taken(session: &mut Session) -> (Option<Profile>, RegionNames) {
    let profile = session.take_profile();
    let program: &Program = session.program();
    let names = program.buckets().map(|b| (b.rows, b.regions.clone())).collect();
    (profile, names)
}

#[derive(Debug, Serialize)]
struct RegionRow {
    bucket: u32,
    steps: u64,
    region: String,
    /// Mean over the threads.
    ms: f64,
    /// The slowest thread.
    max_ms: f64,
    /// Part of the bucket's time.
    share: f64,
}

fn region_rows(profile: &Profile, names: &RegionNames) -> Vec<RegionRow> {
    let threads = profile.threads();
    let mut rows = Vec::new();
    for (index, (bucket, regions)) in names.iter().enumerate() {
        let steps = profile.steps(index);
        if steps == 0 {
            continue;
        }
        let waited = (0..threads).map(|t| profile.waited(index, t)).collect();
        let mut times: Vec<(String, Vec<u64>)> = regions
            .iter()
            .enumerate()
            .map(|(region, name)| {
                let of = |t| profile.regions(index, t)[region];
                (name.clone(), (0..threads).map(of).collect())
            })
            .collect();
        times.push(("(barriers)".into(), waited));
        let total: u64 = times.iter().flat_map(|t| &t.1).sum();
        for (region, ns) in times {
            let sum: u64 = ns.iter().sum();
            rows.push(RegionRow {
                bucket: *bucket,
                steps,
                region,
                ms: sum as f64 / threads as f64 / 1e6,
                max_ms: ns.iter().max().copied().unwrap_or(0) as f64 / 1e6,
                share: sum as f64 / total.max(1) as f64,
            });
        }
    }
    rows
}

fn region_table(rows: &[RegionRow]) -> String {
    let mut out = String::from("| bucket | steps | region | ms | slowest thread ms | share |\n|---:|---:|---|---:|---:|---:|\n");
    for row in rows {
        out += &format!(
            "| {} | {} | {} | {:.3} | {:.3} | {:.1} % |\n",
            row.bucket,
            row.steps,
            row.region,
            row.ms,
            row.max_ms,
            row.share * 100.0
        );
    }
    out
}

/// Chrome's trace format: complete events in microseconds, one row per thread.
fn trace(profile: &Profile, names: &RegionNames) -> String {
    let mut events = Vec::new();
    let all = |index| (0..profile.threads()).flat_map(move |t| profile.events(index, t));
    let origin = (0..names.len()).flat_map(all).map(|e| e.begin_ns).min();
    let origin = origin.unwrap_or(0);
    for (index, (bucket, regions)) in names.iter().enumerate() {
        for thread in 0..profile.threads() {
            for event in profile.events(index, thread) {
                events.push(json!({
                    "name": regions.get(event.region),
                    "ph": "X",
                    "pid": 0,
                    "tid": thread,
                    "ts": (event.begin_ns - origin) as f64 / 1e3,
                    "dur": event.took_ns as f64 / 1e3,
                    "args": {"bucket": bucket},
                }));
            }
        }
    }
    json!({"traceEvents": events}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::tests::{decoder_session, manifest};

    #[test]
    fn rates_follow_from_the_samples() {
        let mut manifest = manifest(Vec::new(), 1);
        manifest.weight_bytes_per_token = 1_000_000_000;
        manifest.flop_per_row = 2_000_000_000;
        let work = Work { tokens: 10, steps: 10, rows: 10, logit_rows: 10 };
        let m = measured(&manifest, "tg10".into(), 1, 2, &work, vec![1.0, 1.0], false);
        assert_eq!((m.avg_ts, m.stddev_ts), (10.0, 0.0));
        assert_eq!((m.gb_per_s, m.gflop_per_s), (10.0, 20.0));
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
        let (mean, deviation) = mean_and_deviation(&[1.0, 3.0]);
        assert_eq!((mean, deviation), (2.0, 2f64.sqrt()));
    }

    #[test]
    fn tests_have_their_known_names() {
        assert_eq!(test_name(Kind::Prompt, 512, 0), "pp512");
        assert_eq!(test_name(Kind::Generate, 128, 512), "tg128@d512");
        assert_eq!(tests(&[512, 0], &[0]), [(Kind::Prompt, 512)]);
    }

    #[test]
    fn a_trace_is_json_and_shares_add_up() {
        let mut decoder = Decoder::new(decoder_session(&[1, 8], 1, 2));
        decoder.session().start_profile(10);
        decoder.feed(0, &[1; 20]).unwrap();
        let (profile, names) = taken(decoder.session());
        let profile = profile.unwrap();
        let rows = region_rows(&profile, &names);
        let share: f64 = rows.iter().filter(|r| r.bucket == 8).map(|r| r.share).sum();
        assert!((share - 1.0).abs() < 1e-9, "{rows:?}");
        assert!(region_table(&rows).contains("(barriers)"));
        let trace: serde_json::Value = serde_json::from_str(&trace(&profile, &names)).unwrap();
        assert!(trace["traceEvents"].as_array().unwrap().len() >= 6);
    }
}
