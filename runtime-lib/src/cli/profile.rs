//! `profile`: where the time goes, operation by operation, next to what the machine can do.
//!
//! In: prompts and some generated tokens, of one sequence or several side by side (an encoder: texts), run once to warm up and once
//! measured. Out: a table per phase, or JSON, and with `--trace` every lap of every thread as a Chrome trace (load it in `chrome://tracing`
//! or ui.perfetto.dev).
//!
//! The limits are measured in the same process before and after: the rate at which these threads read these weights, and the peaks of
//! the instructions that the kernels use, by probes that were generated for the same CPU (`codegen/src/kernels/probe.rs`). An
//! operation's bound is the larger of its bytes of weights and KV cache over the read rate and its operations over the peak.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use clap::ArgMatches;
use serde::Serialize;
use serde_json::{Value, json};

use super::Cx;
use super::args::ProfileArgs;
use super::bench::{Ids, PROMPT, asked, check_batch, default_length, refuse_nothing};
use super::error::{Failure, warn};
use super::output::{self, OutputFile};
use super::streams::{print, print_json};
use crate::abi::{PROBE_MULTIPLY_ADDS, PROBE_READ_BYTES, Probe, Task};
use crate::cost::{Arithmetic, RegionKind, Work};
use crate::decode::Decoder;
use crate::encode::Encoder;
use crate::profile::{Doing, Profile};
use crate::step::Session;

/// Default number of tokens to generate, where the context is not shorter.
const GENERATED: usize = 32;
/// Laps per thread and bucket that a trace keeps.
const TRACE_EVENTS: usize = 1 << 18;
/// Shortest time that a probe is repeated for, after a first run that is not counted.
const PROBE_SECONDS: f64 = 0.04;
/// Most bytes that a reading probe reads at once.
const PROBE_READ_MAX: usize = 1 << 31;
/// Rows of a compute probe: some 5 ms.
const PROBE_ROWS: u32 = 500;

pub(super) fn profile(cx: &Cx, args: &ProfileArgs, flags: &ArgMatches) -> Result<(), Failure> {
    let manifest = cx.manifest();
    let encodes = manifest.task == Task::Embed;
    refuse_nothing(encodes, args.n_prompt.as_slice(), args.n_gen.as_slice())?;
    if encodes && asked(flags, "n_gen", args.n_gen.as_slice()) {
        return Err(Failure::usage("-n: an encoder does not generate"));
    }
    let trace_file = args.trace.as_ref().map(|path| OutputFile::create(path, &cx.payload.files())).transpose()?;
    let events = if trace_file.is_some() { TRACE_EVENTS } else { 0 };
    let measured = if encodes { encoding(cx, args, events)? } else { decoding(cx, args, events)? };
    if let (Some(file), Some(path)) = (trace_file, &args.trace) {
        write_trace(&measured.phases, file, path)?;
    }
    let report = measured.report();
    if args.json {
        return print_json(&report);
    }
    print(&report.text())
}

/// What ran, and what the machine could do meanwhile.
#[derive(Default)]
struct Measured {
    phases: Vec<(Phase, Profile)>,
    limits: Limits,
}

impl Measured {
    fn report(self) -> Report {
        let Measured { mut phases, limits } = self;
        let threads = phases.first().map_or(1, |p| p.1.threads());
        phases.iter_mut().for_each(|(phase, _)| phase.set_limits(&limits));
        Report { threads, limits, phases: phases.into_iter().map(|p| p.0).collect() }
    }
}

/// Texts of an encoder. The first pass, which touches weights for the first time, is not profiled.
fn encoding(cx: &Cx, args: &ProfileArgs, events: usize) -> Result<Measured, Failure> {
    let mut measured = Measured::default();
    let mut ids = Ids::new(cx.manifest().vocab_size);
    let mut encoder = Encoder::new(cx.session(&args.machine)?);
    let length = args.n_prompt.unwrap_or_else(|| default_length(PROMPT, encoder.text_limit()));
    encoder.check_lengths([length])?;
    let texts: Vec<Vec<u32>> = (0..args.batch).map(|_| ids.take(length)).collect();
    encoder.encode(&texts, |_, _| ())?;
    measured.limits.measure(encoder.session());
    encoder.start_profile(events);
    let begin = Instant::now();
    encoder.encode(&texts, |_, _| ())?;
    taken("encode", length * args.batch, begin, || encoder.take_profile(), &mut measured.phases)?;
    measured.limits.measure(encoder.session());
    Ok(measured)
}

/// Prompts and answers of a decoder. The first touch of weights and caches is not profiled.
fn decoding(cx: &Cx, args: &ProfileArgs, events: usize) -> Result<Measured, Failure> {
    let mut measured = Measured::default();
    let mut ids = Ids::new(cx.manifest().vocab_size);
    let mut decoder = Decoder::new(cx.session(&args.machine)?);
    check_batch(&decoder, args.batch)?;
    let (n_prompt, n_gen) = lengths(args.n_prompt, args.n_gen, decoder.session().program().ctx_size());
    decoder.check_room(n_prompt.saturating_add(n_gen))?;
    let prompts: Vec<Vec<u32>> = (0..args.batch).map(|_| ids.take(n_prompt)).collect();
    let answers: Vec<Vec<(usize, u32)>> = (0..n_gen).map(|_| ids.take(args.batch).into_iter().enumerate().collect()).collect();
    for (slot, prompt) in prompts.iter().enumerate() {
        decoder.feed(slot, prompt)?;
    }
    if let Some(first) = answers.first() {
        decoder.advance(first, |_, _| ())?;
    }
    for slot in 0..args.batch {
        decoder.truncate(slot, 0);
    }
    measured.limits.measure(decoder.session());
    if n_prompt > 0 {
        decoder.session().start_profile(events);
        let begin = Instant::now();
        for (slot, prompt) in prompts.iter().enumerate() {
            decoder.feed(slot, prompt)?;
        }
        taken("prefill", n_prompt * args.batch, begin, || decoder.session().take_profile(), &mut measured.phases)?;
    }
    if n_gen > 0 {
        decoder.session().start_profile(events);
        let begin = Instant::now();
        for tokens in &answers {
            decoder.advance(tokens, |_, _| ())?;
        }
        taken("decode", n_gen * args.batch, begin, || decoder.session().take_profile(), &mut measured.phases)?;
    }
    measured.limits.measure(decoder.session());
    Ok(measured)
}

/// Writes what ran to `file`, whose path is `path`.
fn write_trace(phases: &[(Phase, Profile)], file: OutputFile, path: &Path) -> Result<(), Failure> {
    let mut file = BufWriter::new(file);
    let written = trace(phases, &mut file).and_then(|()| file.into_inner().map_err(|e| e.into_error()));
    written.and_then(OutputFile::finish).map_err(|e| output::failed(path, e))?;
    let dropped: u64 = phases.iter().map(|p| p.1.dropped()).sum();
    if dropped > 0 {
        warn("trace", format!("{dropped} laps found no room, expected at most {TRACE_EVENTS} per thread and bucket"));
    }
    Ok(())
}

/// Lengths of prompt and answer. What was asked for stays; a default is shortened to what the other leaves of the context.
fn lengths(n_prompt: Option<usize>, n_gen: Option<usize>, ctx_size: usize) -> (usize, usize) {
    let n_gen = n_gen.unwrap_or_else(|| GENERATED.min(ctx_size.saturating_sub(n_prompt.unwrap_or(ctx_size / 2))));
    let n_prompt = n_prompt.unwrap_or_else(|| default_length(PROMPT, ctx_size.saturating_sub(n_gen)));
    (n_prompt, n_gen)
}

/// Ends a phase that began at `begin`.
fn taken(
    name: &'static str,
    tokens: usize,
    begin: Instant,
    profile: impl FnOnce() -> Option<Profile>,
    phases: &mut Vec<(Phase, Profile)>,
) -> Result<(), Failure> {
    let ms = begin.elapsed().as_secs_f64() * 1e3;
    let profile = profile().ok_or_else(|| Failure::bug("the profile was not taken"))?;
    phases.push((Phase::new(name, tokens, ms, &profile), profile));
    Ok(())
}

#[derive(Debug, Serialize)]
struct Report {
    threads: usize,
    limits: Limits,
    phases: Vec<Phase>,
}

/// What these threads can do at most; none where the executable has no probe or no weights to read.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Limits {
    read_gb_per_s: Option<f64>,
    f32_gflop_per_s: Option<f64>,
    bf16_dot_gflop_per_s: Option<f64>,
    int8_dot_gflop_per_s: Option<f64>,
}

impl Limits {
    /// Keeps the best of this and earlier measurements.
    fn measure(&mut self, session: &mut Session) {
        let best = |into: &mut Option<f64>, rate: Option<f64>| *into = rate.into_iter().chain(*into).reduce(f64::max);
        let flop = 2.0 * PROBE_MULTIPLY_ADDS as f64 * f64::from(session.threads());
        let blocks = (session.program().weight_bytes().min(PROBE_READ_MAX) as u64 / PROBE_READ_BYTES) as u32;
        for probe in Probe::ALL {
            match probe {
                Probe::Read1 | Probe::Read4 => {
                    let rate = rate(session, probe, blocks, PROBE_READ_BYTES as f64);
                    best(&mut self.read_gb_per_s, rate);
                }
                Probe::F32 => best(&mut self.f32_gflop_per_s, rate(session, probe, PROBE_ROWS, flop)),
                Probe::Bf16Dot => best(&mut self.bf16_dot_gflop_per_s, rate(session, probe, PROBE_ROWS, flop)),
                Probe::Int8Dot => best(&mut self.int8_dot_gflop_per_s, rate(session, probe, PROBE_ROWS, flop)),
            }
        }
    }

    fn peak(&self, arithmetic: Arithmetic) -> Option<f64> {
        match arithmetic {
            Arithmetic::F32 => self.f32_gflop_per_s,
            Arithmetic::Bf16Dot => self.bf16_dot_gflop_per_s,
            Arithmetic::Int8Dot => self.int8_dot_gflop_per_s,
        }
    }

    /// Shortest time in ns for this work; none if a limit that matters is not known.
    fn bound_ns(&self, work: &Work, arithmetic: Arithmetic) -> Option<f64> {
        let part = |amount: u64, limit: Option<f64>| if amount == 0 { Some(0.0) } else { limit.map(|l| amount as f64 / l) };
        Some(part(work.memory_bytes(), self.read_gb_per_s)?.max(part(work.flop, self.peak(arithmetic))?))
    }
}

/// Best rate of a probe, in 1e9 per second.
fn rate(session: &mut Session, probe: Probe, rows: u32, per_row: f64) -> Option<f64> {
    if rows == 0 || !session.probe(probe, rows) {
        return None;
    }
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    while begin.elapsed().as_secs_f64() < PROBE_SECONDS {
        let run = Instant::now();
        session.probe(probe, rows);
        best = best.min(run.elapsed().as_secs_f64());
    }
    Some(f64::from(rows) * per_row / best / 1e9)
}

/// Prompts, answers, or an encoder's texts.
#[derive(Debug, Serialize)]
struct Phase {
    phase: &'static str,
    tokens: usize,
    steps: u64,
    /// The whole phase, on a clock of its own.
    ms: f64,
    tokens_per_s: f64,
    gb_per_s: f64,
    gflop_per_s: f64,
    /// Sum of the operations' bounds over the time.
    of_limit: Option<f64>,
    ops: Vec<Op>,
}

/// Regions of one name in all buckets of a phase.
#[derive(Debug, Serialize)]
struct Op {
    op: String,
    /// None for what is no region: threads starting, the time between steps, and that of a thread for which no text is left.
    kind: Option<RegionKind>,
    arithmetic: Option<Arithmetic>,
    calls: u64,
    /// Work and wait, mean over the threads: operations add up to the phase.
    ms: f64,
    /// The part of it that is waiting for other threads.
    wait_ms: f64,
    /// Part of the phase.
    share: f64,
    #[serde(flatten)]
    work: Work,
    /// Weights and KV cache.
    gb_per_s: f64,
    gflop_per_s: f64,
    /// Bound over time.
    of_limit: Option<f64>,
}

impl Op {
    fn new(op: String, kind: Option<RegionKind>, arithmetic: Option<Arithmetic>) -> Self {
        Self {
            op,
            kind,
            arithmetic,
            calls: 0,
            ms: 0.0,
            wait_ms: 0.0,
            share: 0.0,
            work: Work::default(),
            gb_per_s: 0.0,
            gflop_per_s: 0.0,
            of_limit: None,
        }
    }
}

impl Phase {
    fn new(phase: &'static str, tokens: usize, ms: f64, profile: &Profile) -> Self {
        let threads = profile.threads() as f64;
        let mean_ms = |ns: &[u64]| ns.iter().sum::<u64>() as f64 / threads / 1e6;
        let mut ops: Vec<Op> = Vec::new();
        let mut step_ns = 0;
        let mut start_ms = 0.0;
        for (bucket, _) in profile.buckets().enumerate().filter(|(b, _)| profile.load(*b).steps > 0) {
            step_ns += profile.step_ns(bucket);
            start_ms += mean_ms(&profile.start_ns(bucket));
            let mut seen: HashMap<&str, u32> = HashMap::new();
            for region in profile.regions(bucket) {
                let info = region.info;
                // A second region of one name (GPT-2 has two projections `c_proj`) stays one of its own.
                let number = seen.entry(&info.name).and_modify(|n| *n += 1).or_insert(1);
                let name = if *number == 1 { info.name.clone() } else { format!("{} #{number}", info.name) };
                let op = match ops.iter_mut().find(|op| op.op == name && op.arithmetic == Some(info.arithmetic)) {
                    Some(op) => op,
                    None => {
                        ops.push(Op::new(name, Some(info.kind), Some(info.arithmetic)));
                        let last = ops.len() - 1;
                        &mut ops[last]
                    }
                };
                let wait_ms = mean_ms(&region.wait_ns);
                op.calls += region.calls;
                op.ms += mean_ms(&region.work_ns) + wait_ms;
                op.wait_ms += wait_ms;
                op.work += region.work;
            }
        }
        let steps = profile.steps();
        let other = |name: &str, ms, wait_ms| Op { calls: steps, ms, wait_ms, ..Op::new(name.into(), None, None) };
        ops.push(other("(start)", start_ms, start_ms));
        ops.push(other("(between steps)", ms - step_ns as f64 / 1e6, 0.0));
        let per_s = |amount: u64, ms: f64| if ms > 0.0 { amount as f64 / ms / 1e6 } else { 0.0 };
        for op in &mut ops {
            op.share = op.ms / ms;
            op.gb_per_s = per_s(op.work.memory_bytes(), op.ms);
            op.gflop_per_s = per_s(op.work.flop, op.ms);
        }
        let work = profile.work();
        Self {
            phase,
            tokens,
            steps,
            ms,
            tokens_per_s: tokens as f64 / ms * 1e3,
            gb_per_s: per_s(work.memory_bytes(), ms),
            gflop_per_s: per_s(work.flop, ms),
            of_limit: None,
            ops,
        }
    }

    fn set_limits(&mut self, limits: &Limits) {
        let mut total = Some(0.0);
        for op in &mut self.ops {
            let bound = op.arithmetic.and_then(|a| limits.bound_ns(&op.work, a));
            op.of_limit = bound.filter(|b| *b > 0.0 && op.ms > 0.0).map(|b| b / 1e6 / op.ms);
            if op.arithmetic.is_some() {
                total = total.zip(bound).map(|(t, b)| t + b);
            }
        }
        self.of_limit = total.map(|t| t / 1e6 / self.ms);
    }
}

impl Report {
    fn text(&self) -> String {
        let rate = |rate: Option<f64>, unit: &str| rate.map_or("unknown".into(), |r| format!("{r:.1} {unit}"));
        let mut out = format!(
            "threads {}; limits measured in this process: read {}, f32 {}, bf16 dot {}, int8 dot {}\n",
            self.threads,
            rate(self.limits.read_gb_per_s, "GB/s"),
            rate(self.limits.f32_gflop_per_s, "GFLOP/s"),
            rate(self.limits.bf16_dot_gflop_per_s, "GFLOP/s"),
            rate(self.limits.int8_dot_gflop_per_s, "GFLOP/s"),
        );
        for phase in &self.phases {
            let steps = if phase.steps == 1 { "step" } else { "steps" };
            out += &format!(
                "\n{}: {} tokens in {} {steps}, {:.2} ms, {:.2} tokens/s\n\n",
                phase.phase, phase.tokens, phase.steps, phase.ms, phase.tokens_per_s
            );
            out += "| op | calls | ms | share | GB/s | GFLOP/s | of limit | wait ms |\n|---|---:|---:|---:|---:|---:|---:|---:|\n";
            for op in &phase.ops {
                let [gb, gflop] = [(op.work.memory_bytes(), op.gb_per_s), (op.work.flop, op.gflop_per_s)]
                    .map(|(amount, rate)| if amount == 0 { String::new() } else { format!("{rate:.2}") });
                out += &format!(
                    "| {} | {} | {:.3} | {} | {gb} | {gflop} | {} | {:.3} |\n",
                    op.op,
                    op.calls,
                    op.ms,
                    percent(Some(op.share)),
                    percent(op.of_limit),
                    op.wait_ms
                );
            }
            out += &format!(
                "| total | | {:.3} | {} | {:.2} | {:.2} | {} | {:.3} |\n",
                phase.ops.iter().map(|o| o.ms).sum::<f64>(),
                percent(Some(phase.ops.iter().map(|o| o.share).sum())),
                phase.gb_per_s,
                phase.gflop_per_s,
                percent(phase.of_limit),
                phase.ops.iter().map(|o| o.wait_ms).sum::<f64>(),
            );
        }
        out
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or(String::new(), |s| format!("{:.1} %", s * 100.0))
}

/// Chrome's trace format: complete events in microseconds, one lane per thread. Steps hold regions and waits.
fn trace(phases: &[(Phase, Profile)], out: &mut impl Write) -> io::Result<()> {
    let threads = phases.first().map_or(0, |p| p.1.threads());
    out.write_all(br#"{"displayTimeUnit":"ms","traceEvents":["#)?;
    let mut separator = "";
    // There may be millions of events: none is kept.
    let mut event = |event: Value| {
        write!(out, "{separator}{event}")?;
        separator = ",\n";
        io::Result::Ok(())
    };
    let origin = phases.iter().flat_map(|p| p.1.spans()).map(|s| s.begin_ns).min().unwrap_or(0);
    let complete = |name: &str, thread: usize, begin_ns: u64, took_ns: u64, args: Value| {
        let (ts, dur) = ((begin_ns - origin) as f64 / 1e3, took_ns as f64 / 1e3);
        json!({"name": name, "ph": "X", "pid": 0, "tid": thread, "ts": ts, "dur": dur, "args": args})
    };
    for thread in 0..threads {
        event(json!({"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": format!("thread {thread}")}}))?;
    }
    for (phase, profile) in phases {
        let rows: Vec<u32> = profile.buckets().collect();
        let names: Vec<Vec<&str>> = (0..rows.len()).map(|b| profile.regions(b).map(|r| r.info.name.as_str()).collect()).collect();
        for thread in 0..threads {
            let mut laps: Vec<_> = (0..rows.len()).map(|b| profile.events(b, thread).peekable()).collect();
            for span in profile.spans().iter().filter(|span| span.thread.is_none_or(|t| t == thread)) {
                let args = json!({"bucket": rows[span.bucket], "rows": span.rows});
                event(complete(&format!("{} step", phase.phase), thread, span.begin_ns, span.took_ns, args))?;
                let end = span.begin_ns + span.took_ns;
                let mut calls = vec![0u32; names[span.bucket].len()];
                while let Some(lap) = laps[span.bucket].next_if(|lap| lap.begin_ns + lap.took_ns <= end) {
                    let (name, args) = match lap.doing {
                        Doing::Start => ("(start)", json!({})),
                        Doing::Wait(region) => ("(wait)", json!({"behind": names[span.bucket][region]})),
                        Doing::Region(region) => {
                            calls[region] += 1;
                            (names[span.bucket][region], json!({"call": calls[region]}))
                        }
                    };
                    event(complete(name, thread, lap.begin_ns, lap.took_ns, args))?;
                }
            }
        }
    }
    out.write_all(b"]}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::tests::decoder_session;

    fn profiled(events: usize) -> Vec<(Phase, Profile)> {
        let mut decoder = Decoder::new(decoder_session(&[1, 8], 1, 2));
        let mut phases = Vec::new();
        decoder.session().start_profile(events);
        let begin = Instant::now();
        decoder.feed(0, &[1; 20]).unwrap();
        taken("prefill", 20, begin, || decoder.session().take_profile(), &mut phases).unwrap();
        decoder.session().start_profile(events);
        let begin = Instant::now();
        for _ in 0..3 {
            decoder.feed(0, &[1]).unwrap();
        }
        taken("decode", 3, begin, || decoder.session().take_profile(), &mut phases).unwrap();
        phases
    }

    #[test]
    fn operations_add_up_to_the_phase() {
        let mut phases = profiled(0);
        let limits =
            Limits { read_gb_per_s: Some(1e-3), f32_gflop_per_s: Some(1e-3), bf16_dot_gflop_per_s: None, int8_dot_gflop_per_s: None };
        for (phase, profile) in &mut phases {
            let sum: f64 = phase.ops.iter().map(|o| o.ms).sum();
            assert!((sum / phase.ms - 1.0).abs() < 1e-9, "{phase:?}");
            assert!((phase.ops.iter().map(|o| o.share).sum::<f64>() - 1.0).abs() < 1e-9);
            assert_eq!(phase.steps, profile.steps());
            phase.set_limits(&limits);
        }
        // The fake region: 100 bytes per step, 10 per position of a run, 7 operations per position of a row.
        let prefill = &phases[0].0;
        assert_eq!((prefill.steps, prefill.ops[0].op.as_str(), prefill.ops[0].calls), (3, "write", 3));
        let work = prefill.ops[0].work;
        assert_eq!((work.weight_bytes, work.kv_bytes, work.flop), (300, 10 * (8 + 16 + 20), 7 * (1..=20).sum::<u64>()));
        // 740 bytes at 1 MB/s are 740 us, 1470 operations at 1 M/s are 1470 us.
        let bound_ms = prefill.ops[0].of_limit.unwrap() * prefill.ops[0].ms;
        assert!((bound_ms - 1.47).abs() < 1e-9, "{bound_ms}");
        let decode = &phases[1].0;
        assert_eq!((decode.steps, decode.ops[0].work.kv_bytes), (3, 10 * (21 + 22 + 23)));
        let report = Report { threads: 2, limits, phases: phases.into_iter().map(|p| p.0).collect() };
        let text = report.text();
        assert!(text.contains("| write | 3 |") && text.contains("| (start) | 3 |") && text.contains("bf16 dot unknown"), "{text}");
    }

    /// Checks a trace: every lap lies inside a step of its lane, laps follow each other, all names occur.
    fn check_trace(trace: &Value, threads: u64, names: &[&str]) {
        let events: Vec<&Value> = trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").collect();
        for thread in 0..threads {
            let lane: Vec<(&str, f64, f64)> = events
                .iter()
                .filter(|e| e["tid"] == thread)
                .map(|e| {
                    let begin = e["ts"].as_f64().unwrap();
                    (e["name"].as_str().unwrap(), begin, begin + e["dur"].as_f64().unwrap())
                })
                .collect();
            let (mut step, mut last) = ((0.0, 0.0), 0.0);
            for &(name, begin, end) in &lane {
                assert!(begin <= end + 1e-6);
                if name.ends_with(" step") {
                    assert!(begin + 1e-6 >= step.1, "steps follow each other");
                    step = (begin, end);
                } else {
                    assert!(begin + 1e-6 >= step.0 && end <= step.1 + 1e-6, "{name} {begin} {end} outside of {step:?}");
                    assert!(begin + 1e-6 >= last, "{name} begins before the lap before it has ended");
                    last = end;
                }
            }
            for name in names {
                assert!(lane.iter().any(|e| e.0 == *name), "{name} is not in lane {thread}");
            }
        }
    }

    #[test]
    fn a_trace_is_nested_and_complete() {
        let phases = profiled(100);
        let mut text = Vec::new();
        trace(&phases, &mut text).unwrap();
        let trace: Value = serde_json::from_slice(&text).unwrap();
        check_trace(&trace, 2, &["prefill step", "decode step", "write", "(wait)", "(start)"]);
        let count = |name: &str| trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["name"] == name).count();
        assert_eq!((count("prefill step"), count("write"), count("(start)")), (3 * 2, 6 * 2, 6 * 2));
        assert_eq!(phases.iter().map(|p| p.1.dropped()).sum::<u64>(), 0);
        assert!(profiled(1).iter().map(|p| p.1.dropped()).sum::<u64>() > 0);
    }

    #[test]
    fn a_default_length_leaves_room_for_the_other() {
        assert_eq!(lengths(None, None, 40), (20, 20));
        assert_eq!(lengths(Some(10), None, 40), (10, 30));
        assert_eq!(lengths(None, Some(30), 40), (10, 30));
        assert_eq!(lengths(None, None, 4096), (512, 32));
    }
}
