//! Topics whose figures are rates: prefill, decode, many sequences, long contexts, AVX2, BERT, GPT-2.
//!
//! ```text
//! one round of a topic, for each number of threads:
//!   limits | work 1: turn, turn, turn | work 2: turn, turn, turn | .. | limits
//! one turn:  rcompile, peer, peer        the next: peer, peer, rcompile; ours between two measurements of its limit
//! work that may be bounded by reading:   reads, rcompile, reads, peer, reads; again if the reads differ
//! ```
//! Every turn is a round of the record, so that what is compared lies seconds apart. Ours is a new process each time; those of other
//! engines, which take longer to load, stay from turn to turn and wait. All are pinned to the same cores; who goes first changes from turn
//! to turn. The larger of the two measurements of a limit counts: what disturbed the other was no limit.

use std::path::Path;
use std::time::Instant;

use rcompile_runtime::cost::{Load, RegionInfo};
use serde::Deserialize;
use serde_json::Value;

use crate::limits;
use crate::measure::{Bench, Outcome, Rate, find, of_threads, rate, rates};
use crate::peers::{self, OURS};
use crate::process::{Turns, args};
use crate::record::{Record, Round};
use crate::stats::{Goal, Samples, Section, number};
use crate::{Options, Topic};

/// What is measured in one go of `bench`, and what it is compared with.
struct Work {
    topic: Topic,
    name: &'static str,
    /// See [`crate::measure::EXECUTABLES`].
    executable: &'static str,
    test: Test,
    threads: Threads,
    bound: Bound,
    /// Goal of the share of the bound, in percent.
    goal: Option<f64>,
}

#[derive(Clone, Copy)]
struct Test {
    prompt: usize,
    generate: usize,
    depth: usize,
    batch: usize,
    /// With `--copy-weights`: ours alone, the file's pages do not matter.
    copied: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Threads {
    One,
    All,
}

/// What bounds a work.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bound {
    /// Multiply-adds.
    Peak,
    /// Bytes of weights and KV cache.
    Read,
    /// Whichever of the two takes longer on this machine: many sequences have plenty of multiply-adds for vectors, few for tiles.
    Nearer,
}

use Bound::{Nearer, Peak, Read};
use Threads::{All, One};

const fn prefill(prompt: usize) -> Test {
    Test { prompt, generate: 0, depth: 0, batch: 1, copied: false }
}

const fn decode(depth: usize) -> Test {
    Test { prompt: 0, generate: 12, depth, batch: 1, copied: false }
}

const fn batch(batch: usize) -> Test {
    Test { prompt: 0, generate: 8, depth: 16, batch, copied: false }
}

const fn copied(test: Test) -> Test {
    Test { copied: true, ..test }
}

const fn texts(batch: usize) -> Test {
    Test { prompt: 128, generate: 0, depth: 0, batch, copied: false }
}

const fn work(
    topic: Topic,
    name: &'static str,
    executable: &'static str,
    test: Test,
    threads: Threads,
    bound: Bound,
    goal: Option<f64>,
) -> Work {
    Work { topic, name, executable, test, threads, bound, goal }
}

const WORKS: &[Work] = &[
    work(Topic::Prefill, "bf16 prefill 512", "llama-1b", prefill(512), All, Peak, Some(88.0)),
    work(Topic::Prefill, "bf16 prefill 128", "llama-1b", prefill(128), All, Peak, Some(85.0)),
    work(Topic::Prefill, "bf16 prefill, 1 thread, 512", "llama-1b", prefill(512), One, Peak, Some(88.0)),
    work(Topic::Prefill, "f32 prefill 512", "llama-1b-f32", prefill(512), All, Peak, Some(88.0)),
    work(Topic::Prefill, "f32 prefill 128", "llama-1b-f32", prefill(128), All, Peak, Some(88.0)),
    work(Topic::Decode, "bf16 decode at 128", "llama-1b", decode(128), All, Read, Some(97.0)),
    work(Topic::Decode, "bf16 decode at 512", "llama-1b", decode(512), All, Read, Some(97.0)),
    work(Topic::Decode, "bf16 decode, 1 thread, at 128", "llama-1b", decode(128), One, Read, Some(97.0)),
    work(Topic::Decode, "f32 decode at 128", "llama-1b-f32", decode(128), All, Read, Some(97.0)),
    work(Topic::Decode, "bf16 decode at 128, weights copied", "llama-1b", copied(decode(128)), All, Read, Some(97.0)),
    work(Topic::Decode, "bf16 decode at 512, weights copied", "llama-1b", copied(decode(512)), All, Read, Some(97.0)),
    work(Topic::Decode, "f32 decode at 128, weights copied", "llama-1b-f32", copied(decode(128)), All, Read, Some(97.0)),
    work(Topic::Batch, "bf16 decode of 4 sequences", "llama-1b-parallel", batch(4), All, Read, Some(97.0)),
    work(Topic::Batch, "bf16 decode of 4 sequences, weights copied", "llama-1b-parallel", copied(batch(4)), All, Read, Some(97.0)),
    work(Topic::Batch, "bf16 decode of 32 sequences", "llama-1b-parallel", batch(32), All, Nearer, Some(75.0)),
    work(Topic::Quantised, "int8 decode at 128", "llama-1b-int8", decode(128), All, Read, Some(95.0)),
    work(Topic::Quantised, "int4 decode at 128", "llama-1b-int4", decode(128), All, Read, Some(95.0)),
    work(Topic::Quantised, "int4 decode at 128, int8 head", "llama-1b-int4-int8-head", decode(128), All, Read, Some(95.0)),
    work(Topic::Quantised, "int4 by 64 decode at 128, int8 head", "llama-1b-int4-64", decode(128), All, Read, Some(95.0)),
    work(Topic::Quantised, "int4 by 128 decode at 128, int8 head", "llama-1b-int4-128", decode(128), All, Read, Some(95.0)),
    work(Topic::Quantised, "int8 decode at 128, weights copied", "llama-1b-int8", copied(decode(128)), All, Read, Some(95.0)),
    work(Topic::Quantised, "int4 decode at 128, weights copied", "llama-1b-int4", copied(decode(128)), All, Read, Some(95.0)),
    work(Topic::Quantised, "int8 prefill 512", "llama-1b-int8", prefill(512), All, Peak, Some(75.0)),
    work(Topic::Quantised, "int4 prefill 512", "llama-1b-int4", prefill(512), All, Peak, Some(65.0)),
    work(Topic::Quantised, "int4 by 128 prefill 512, int8 head", "llama-1b-int4-128", prefill(512), All, Peak, Some(70.0)),
    work(Topic::Quantised, "int8 decode of 4 sequences", "llama-1b-int8-parallel", batch(4), All, Read, Some(95.0)),
    work(Topic::Quantised, "int8 decode of 32 sequences", "llama-1b-int8-parallel", batch(32), All, Nearer, Some(65.0)),
    work(Topic::Quantised, "int4 decode of 4 sequences", "llama-1b-int4-parallel", batch(4), All, Read, Some(95.0)),
    work(Topic::Quantised, "int4 decode of 32 sequences", "llama-1b-int4-parallel", batch(32), All, Nearer, Some(65.0)),
    work(Topic::Long, "bf16 prefill 2048", "llama-1b-long", prefill(2048), All, Peak, None),
    work(Topic::Long, "bf16 decode at 8192", "llama-1b-long", decode(8192), All, Read, Some(90.0)),
    work(Topic::Long, "bf16 decode at 8192, weights copied", "llama-1b-long", copied(decode(8192)), All, Read, Some(90.0)),
    work(Topic::Long, "bf16 prefill 8192, 4 layers", "llama-1b-4-layers", prefill(8192), All, Peak, None),
    work(Topic::Avx2, "AVX2 bf16 prefill 512", "llama-1b-avx2", prefill(512), All, Peak, Some(85.0)),
    work(Topic::Avx2, "AVX2 bf16 decode at 128", "llama-1b-avx2", decode(128), All, Read, Some(95.0)),
    work(Topic::Avx2, "AVX2 bf16 decode at 128, weights copied", "llama-1b-avx2", copied(decode(128)), All, Read, Some(95.0)),
    work(Topic::Avx2, "AVX2 f32 prefill 512", "llama-1b-avx2-f32", prefill(512), All, Peak, Some(85.0)),
    work(Topic::Avx2, "AVX2 f32 decode at 128", "llama-1b-avx2-f32", decode(128), All, Read, Some(95.0)),
    work(Topic::Avx2, "AVX2 f32 decode at 128, weights copied", "llama-1b-avx2-f32", copied(decode(128)), All, Read, Some(95.0)),
    work(Topic::Bert, "BERT f32 1x128", "bert-base", texts(1), All, Peak, Some(88.0)),
    work(Topic::Bert, "BERT f32 8x128", "bert-base", texts(8), All, Peak, Some(90.0)),
    work(Topic::Bert, "BERT bf16 1x128", "bert-base-bf16", texts(1), All, Peak, Some(88.0)),
    work(Topic::Bert, "BERT bf16 8x128", "bert-base-bf16", texts(8), All, Peak, Some(90.0)),
    work(Topic::Bert, "BERT f32, 1 thread, 1x128", "bert-base", texts(1), One, Peak, Some(88.0)),
    work(Topic::Gpt2, "GPT-2 f32 prefill 128", "gpt2", prefill(128), All, Peak, Some(85.0)),
    work(Topic::Gpt2, "GPT-2 f32 decode at 128", "gpt2", decode(128), All, Read, Some(93.0)),
    work(Topic::Gpt2, "GPT-2 bf16 prefill 128", "gpt2-bf16", prefill(128), All, Peak, Some(85.0)),
    work(Topic::Gpt2, "GPT-2 bf16 decode at 128", "gpt2-bf16", decode(128), All, Read, Some(93.0)),
];

/// Attention alone: 512 rows behind many keys, minus 512 rows behind none.
struct Attention {
    name: &'static str,
    executable: &'static str,
    goal: f64,
}

const ATTENTION: [Attention; 3] = [
    Attention { name: "attention, head size 64, bf16 weights", executable: "llama-1b-4-layers", goal: 60.0 },
    Attention { name: "attention, head size 128, bf16 weights", executable: "llama-1b-4-layers-d128", goal: 70.0 },
    Attention { name: "attention, head size 64, f32 weights", executable: "llama-1b-4-layers-f32", goal: 70.0 },
];
const ATTENTION_ROWS: usize = 512;
const ATTENTION_KEYS: usize = 7680;

impl Test {
    fn flags(self, repetitions: usize) -> Vec<String> {
        let mut flags = vec!["-p".into(), self.prompt.to_string()];
        flags.extend(["-n".into(), self.generate.to_string()]);
        for (flag, value, default) in [("-d", self.depth, 0), ("-b", self.batch, 1)] {
            if value != default {
                flags.extend([flag.into(), value.to_string()]);
            }
        }
        flags.extend(["-r".into(), repetitions.to_string()]);
        if self.copied {
            flags.push("--copy-weights".into());
        }
        flags
    }
}

impl Work {
    /// Repetitions within a process: a short test is the median of several.
    fn repetitions(&self) -> usize {
        match self.topic {
            Topic::Bert | Topic::Gpt2 => 5,
            _ => 1,
        }
    }

    fn threads(&self, bench: &Bench) -> usize {
        match self.threads {
            One => 1,
            All => bench.most_threads(),
        }
    }

    fn key(&self, engine: &str) -> String {
        format!("{} | {engine}", self.name)
    }

    /// Key of a limit that was measured beside it.
    fn limit(&self, of: &str) -> String {
        format!("limit {of} beside {}", self.name)
    }
}

fn is_wanted(options: &Options, name: &str) -> bool {
    options.matches.is_empty() || options.matches.iter().any(|part| name.contains(part))
}

/// One round of a topic.
pub fn measure(bench: &mut Bench, topic: Topic) -> Outcome<()> {
    let works: Vec<&Work> = WORKS.iter().filter(|w| w.topic == topic && is_wanted(bench.options, w.name)).collect();
    let attention: Vec<&Attention> = match topic {
        Topic::Long => ATTENTION.iter().filter(|a| is_wanted(bench.options, a.name)).collect(),
        _ => Vec::new(),
    };
    for threads in bench.threads.clone() {
        let works: Vec<&Work> = works.iter().copied().filter(|w| w.threads(bench) == threads).collect();
        let all = threads == bench.most_threads();
        let attention = if all { &attention[..] } else { &[] };
        let outside = all && topic == Topic::Decode && is_wanted(bench.options, OUTSIDE);
        let names = works.iter().map(|w| w.executable).chain(attention.iter().map(|a| a.executable));
        let names: Vec<_> = names.chain(outside.then_some("llama-1b")).collect();
        let paths = names.into_iter().map(|name| bench.executable(name)).collect::<Outcome<Vec<_>>>()?;
        let Some(file) = paths.first() else { continue };
        let (begin, (busy, own)) = (Instant::now(), bench.processor_seconds());
        let before = [bench.reads(threads, file)?, bench.peaks(threads)?].concat();
        for work in works {
            run(bench, work, threads)?;
        }
        bench.begin(topic);
        for attention in attention {
            run_attention(bench, attention, threads)?;
        }
        if outside {
            from_outside(bench, threads)?;
        }
        let after = [bench.reads(threads, file)?, bench.peaks(threads)?].concat();
        for (name, value) in larger(before, after) {
            bench.record.push(format!("limit {name} {threads}"), value);
        }
        if let Some(ns) = limits::round_trip(threads) {
            bench.record.push(round_trip_key(threads), ns);
        }
        let (busy_after, own_after) = bench.processor_seconds();
        let others = (busy_after - busy) - (own_after - own);
        bench.record.push(format!("others {threads}"), (others / begin.elapsed().as_secs_f64()).max(0.0));
    }
    Ok(())
}

fn round_trip_key(threads: usize) -> String {
    format!("limit {} {threads}", limits::ROUND_TRIP)
}

/// Of two measurements of the same limits the larger of each.
fn larger(before: Vec<(String, f64)>, after: Vec<(String, f64)>) -> Vec<(String, f64)> {
    before.into_iter().zip(after).map(|((name, before), (_, after))| (name, before.max(after))).collect()
}

/// Another engine whose process waits for its next turn; none where it failed.
struct Peer {
    engine: peers::Engine,
    process: Option<Turns>,
}

impl Peer {
    /// One sample; an engine that fails is a problem of the report, and has no more turns.
    fn turn(&mut self, bench: &mut Bench, work: &Work) -> Option<Rate> {
        let answer: Outcome<Rate> = self.process.as_mut()?.turn("").map_err(Into::into).and_then(|answer| {
            // Libraries may print, too.
            rate(answer.lines().find(|line| line.starts_with('{')).ok_or("no line of JSON")?)
        });
        match answer {
            Ok(rate) => Some(rate),
            Err(error) => {
                self.process = None;
                bench.problem(format!("{}, {}: {error}", work.name, self.engine.name));
                None
            }
        }
    }
}

/// The turns of a round: in each one sample of every engine.
fn run(bench: &mut Bench, work: &Work, threads: usize) -> Outcome<()> {
    let found = find(work.executable);
    let mut flags = work.test.flags(work.repetitions());
    flags.extend(["-t".into(), threads.to_string()]);
    let engines = found.peer_model.filter(|_| !work.test.copied).map_or(Vec::new(), |model| peers::engines(bench, model));
    let mut peers = Vec::new();
    for engine in engines {
        // Drivers take a length only where there is one.
        let mut words: Vec<&str> = flags.iter().map(String::as_str).collect();
        words.drain(if work.test.prompt == 0 { 0..2 } else { 2..4 });
        words.push("--turns");
        let process = bench.staying(engine.name, &engine.program, &engine.words(&words), threads)?;
        let mut peer = Peer { engine, process: Some(process) };
        // Loads the model: nobody else is measured meanwhile, and this answer does not count.
        peer.turn(bench, work);
        peers.push(peer);
    }
    for _ in 0..bench.turns() {
        bench.begin(work.topic);
        let engines = 1 + peers.len();
        for place in 0..engines {
            // The first is our own; the order changes from turn to turn.
            match (place + bench.record.rounds.len()) % engines {
                0 => ours(bench, work, threads, &flags)?,
                other => theirs(bench, work, threads, &mut peers[other - 1])?,
            }
        }
    }
    if !peers.is_empty() {
        drop(peers);
        bench.settle();
    }
    Ok(())
}

fn ours(bench: &mut Bench, work: &Work, threads: usize, flags: &[String]) -> Outcome<()> {
    let out = bench.executable(work.executable)?;
    let info = bench.info(&out)?;
    let mut words = args(["bench"]);
    words.extend(flags.iter().map(Into::into));
    words.extend(args(["-o", "jsonl"]));
    let sample = |bench: &mut Bench| {
        let run = bench.pinned(&out, &words, threads);
        if work.test.copied {
            bench.settle();
        }
        run
    };
    let peaks = |bench: &mut Bench| if work.bound == Read { Ok(Vec::new()) } else { bench.peaks(threads) };
    let before = peaks(bench)?;
    let (run, reads) = match work.bound {
        Peak => (sample(bench)?, None),
        Read | Nearer => between_reads(bench, threads, &out, sample)?,
    };
    let mut beside = larger(before, peaks(bench)?);
    beside.extend(reads.into_iter().flat_map(|r| [("read".into(), r.best), (limits::FILE.into(), r.file)]));
    let rate = rates(&run)?.pop().ok_or("bench printed no test")?;
    let all_rows = flop_of_all_rows(&info, work.test)?;
    let key = work.key(OURS);
    let record = &mut bench.record;
    record.facts.insert(format!("peak of {}", work.executable), peak_of(&info).into());
    record.facts.insert(format!("types of {}", work.executable), types_of(&info));
    for (name, value) in beside {
        record.push(work.limit(&name), value);
    }
    if let Some(ns) = limits::round_trip(threads) {
        record.push(work.limit(limits::ROUND_TRIP), ns);
    }
    record.push(format!("{key} GFLOP/s"), rate.gflop_per_s);
    if let Some(flop) = all_rows {
        record.push(format!("{key} GFLOP/s of all rows"), rate.tokens_per_s / work.test.prompt as f64 * flop / 1e9);
    }
    record.push(format!("{key} GB/s"), rate.gb_per_s);
    // Bytes of weights and KV cache per token of all sequences, by which the rate of another engine becomes bytes per second.
    record.push(format!("{key} bytes per token"), rate.gb_per_s * 1e9 / rate.tokens_per_s);
    record.push(format!("{key} rss"), run.rss_bytes_max as f64);
    seen(bench, work, OURS, &key, rate.tokens_per_s);
    Ok(())
}

/// A virtual machine may read twice as fast as a few seconds ago. A sample counts where the limits before and after it are the same up to
/// this share, and it is compared with them; so many tries.
const STEADY: f64 = 0.1;
const TRIES: usize = 4;

/// GB/s that can be read.
#[derive(Clone, Copy)]
struct Reads {
    /// By the best pattern, of anonymous memory or of the file.
    best: f64,
    /// Of the executable's file.
    file: f64,
}

/// Whether two rates of reading are those of one state of the machine.
fn agree(a: f64, b: f64) -> bool {
    (a - b).abs() <= STEADY * a.max(b)
}

/// A sample between two measurements of what can be read, and the larger one; none where they never agree.
fn between_reads<T>(
    bench: &mut Bench,
    threads: usize,
    out: &Path,
    sample: impl FnMut(&mut Bench) -> Outcome<T>,
) -> Outcome<(T, Option<Reads>)> {
    let reads = |bench: &mut Bench| -> Outcome<Reads> {
        let limits = bench.reads(threads, out)?;
        let file = limits.iter().find(|l| l.0 == limits::FILE).map_or(f64::NAN, |l| l.1);
        Ok(Reads { best: limits.iter().map(|l| l.1).fold(0.0, f64::max), file })
    };
    let (seen, reads) = steady(bench, reads, |before, after| agree(before.best, after.best), sample)?;
    Ok((seen, reads.map(|[before, after]| Reads { best: before.best.max(after.best), file: before.file.max(after.file) })))
}

/// Samples until what is measured before and after agrees; the last sample where it never does.
fn steady<C, M, T>(
    cx: &mut C,
    mut measure: impl FnMut(&mut C) -> Outcome<M>,
    agree: impl Fn(&M, &M) -> bool,
    mut sample: impl FnMut(&mut C) -> Outcome<T>,
) -> Outcome<(T, Option<[M; 2]>)> {
    let mut before = measure(cx)?;
    let mut attempt = 1;
    loop {
        let seen = sample(cx)?;
        let after = measure(cx)?;
        if agree(&before, &after) {
            return Ok((seen, Some([before, after])));
        }
        if attempt == TRIES {
            return Ok((seen, None));
        }
        (before, attempt) = (after, attempt + 1);
    }
}

/// One sample of another engine.
fn theirs(bench: &mut Bench, work: &Work, threads: usize, peer: &mut Peer) -> Outcome<()> {
    let (answer, reads) = match work.bound {
        Peak => (peer.turn(bench, work), None),
        Read | Nearer => {
            let out = bench.executable(work.executable)?;
            between_reads(bench, threads, &out, |bench| Ok(peer.turn(bench, work)))?
        }
    };
    let Some(rate) = answer else { return Ok(()) };
    let name = peer.engine.name;
    let key = work.key(name);
    if let Some(reads) = reads {
        bench.record.push(reads_beside(&key), reads.best);
    }
    if let Some(version) = rate.engine {
        bench.record.facts.insert(format!("engine {name}"), version);
    }
    bench.record.push(format!("{key} rss"), rate.rss_bytes);
    seen(bench, work, name, &key, rate.tokens_per_s);
    Ok(())
}

fn seen(bench: &mut Bench, work: &Work, engine: &str, key: &str, tokens_per_s: f64) {
    eprintln!("bench: {}, {engine}: {tokens_per_s:.1} tokens/s", work.name);
    bench.record.push(key, tokens_per_s);
}

fn run_attention(bench: &mut Bench, attention: &Attention, threads: usize) -> Outcome<()> {
    let out = bench.executable(attention.executable)?;
    let info = bench.info(&out)?;
    bench.record.facts.insert(format!("peak of {}", attention.executable), peak_of(&info).into());
    let mut seconds = Vec::new();
    for depth in [0, ATTENTION_KEYS] {
        let test = Test { prompt: ATTENTION_ROWS, generate: 0, depth, batch: 1, copied: false };
        let mut words = args(["bench"]);
        words.extend(test.flags(if depth == 0 { 5 } else { 3 }).iter().map(Into::into));
        words.extend(args(["-t", &threads.to_string(), "-o", "jsonl"]));
        let rate = rates(&bench.pinned(&out, &words, threads)?)?.pop().ok_or("bench printed no test")?;
        seconds.push(ATTENTION_ROWS as f64 / rate.tokens_per_s);
    }
    let flop = 4.0 * find(attention.executable).attention_width as f64 * (ATTENTION_ROWS * ATTENTION_KEYS) as f64;
    let rate = flop / (seconds[1] - seconds[0]) / 1e9;
    eprintln!("bench: {}: {rate:.1} GFLOP/s", attention.name);
    bench.record.push(format!("{} | {OURS} GFLOP/s", attention.name), rate);
    Ok(())
}

/// Name of the comparison of `bench` with `generate`, the tokens of it, and how far `bench` before and after may lie apart.
const OUTSIDE: &str = "generate from outside";
const OUTSIDE_TOKENS: usize = 128;
const OUTSIDE_STEADY: f64 = 0.04;

/// The decode rate of `generate`, timed from outside, against what `bench` says before and after it.
fn from_outside(bench: &mut Bench, threads: usize) -> Outcome<()> {
    let out = bench.executable("llama-1b")?;
    let threads_flag = threads.to_string();
    let pinned = |bench: &mut Bench, words: &[&str]| bench.pinned(&out, &words.iter().map(Into::into).collect::<Vec<_>>(), threads);
    let wall = |bench: &mut Bench, n: usize| -> Outcome<f64> {
        let n = n.to_string();
        let words = ["generate", "--tokens", "1,2,3,4,5,6,7,8", "-n", &n, "--ignore-eos", "-t", &threads_flag];
        Ok(pinned(bench, &words)?.wall_ms / 1e3)
    };
    let steps = OUTSIDE_TOKENS - 1;
    let inside = |bench: &mut Bench| -> Outcome<f64> {
        let n = steps.to_string();
        let words = ["bench", "-p", "0", "-n", &n, "-d", "8", "-r", "1", "-t", &threads_flag, "-o", "jsonl"];
        Ok(rates(&pinned(bench, &words)?)?.pop().ok_or("bench printed no test")?.tokens_per_s)
    };
    // The first token comes from the prompt: so many steps lie between.
    let outside = |bench: &mut Bench| Ok(steps as f64 / (wall(bench, OUTSIDE_TOKENS)? - wall(bench, 1)?));
    let alike = |before: &f64, after: &f64| (before - after).abs() <= OUTSIDE_STEADY * before.max(*after);
    let (outside, inside) = steady(bench, inside, alike, outside)?;
    if let Some([before, after]) = inside {
        eprintln!("bench: generate from outside {outside:.2} tokens/s, bench {before:.2} and {after:.2}");
        bench.record.push("outside generate", outside);
        bench.record.push("outside bench", (before + after) / 2.0);
    }
    Ok(())
}

// --- Figures

/// Names of the limits, as `bench limits` prints them and as the report shows them.
const PEAKS: [(&str, &str); 7] = [
    ("avx2-fma", "AVX2 FMA"),
    ("avx512-fma", "AVX-512 FMA"),
    ("vdpbf16ps", "VDPBF16PS"),
    ("vpmaddubsw", "AVX2 VPMADDUBSW and VPADDW"),
    ("vpdpbusd", "VPDPBUSD"),
    ("tdpbf16ps", "TDPBF16PS"),
    ("tdpbsud", "TDPBSUD"),
];

pub fn limits_section(bench: &Bench) -> Section {
    let note = "Read: the best of seventeen access patterns, over 1.3 GB of anonymous memory in large pages and over the mapped \
                executable (up to 2.5 GB of the page cache, large pages asked for). Peaks: the instruction alone, on registers. Of \
                each the larger of one measurement before and one after a topic's round; works are compared with limits measured beside each turn. \
                Round trip: a cache line to the other core and back, behind a topic's round and behind each sample: the shorter, the nearer the cores.";
    let mut section = Section::new("Limits of this machine, measured in the same rounds", note);
    for &threads in &bench.threads {
        let of = of_threads(threads);
        for (key, shown) in [("read anonymous", "anonymous memory"), ("read file", "mapped file")] {
            section.add(format!("read, {shown}, {of}"), "GB/s", bench.record.get(&format!("limit {key} {threads}")));
        }
        for (name, shown) in PEAKS {
            section.add(format!("{shown}, {of}"), "GFLOP/s", bench.record.get(&format!("limit {name} {threads}")));
        }
        section.add(format!("a line's round trip between two cores, {of}"), "ns", bench.record.get(&round_trip_key(threads)));
        section.add(format!("processor time of other processes, {of}"), "cores", bench.record.get(&format!("others {threads}")));
    }
    section
}

/// The share of its bound that a work reached, in percent.
fn share(bench: &Bench, work: &Work) -> Samples {
    let record = &bench.record;
    match work.bound {
        Peak => record.per_round(|round| share_of_peak(record, work, round)),
        Read => record.per_round(|round| share_of_best(record, work, round)),
        Nearer => record.per_round(|round| share_of_nearer(record, work, round)),
    }
}

/// Over the peak of the instruction that the executable uses.
fn share_of_peak(record: &Record, work: &Work, round: &Round) -> Option<f64> {
    let peak = record.facts.get(&format!("peak of {}", work.executable))?;
    Some(100.0 * round.median(&format!("{} GFLOP/s", work.key(OURS)))? / round.median(&work.limit(peak))?)
}

/// The bound that needs more of the time needs the larger share of it.
fn share_of_nearer(record: &Record, work: &Work, round: &Round) -> Option<f64> {
    Some(share_of_peak(record, work, round)?.max(share_of_best(record, work, round)?))
}

/// Decode: over the best of the read patterns and of the rates of all engines in that round that could read as fast.
fn share_of_best(record: &Record, work: &Work, round: &Round) -> Option<f64> {
    let key = work.key(OURS);
    let (ours, limit) = (round.median(&format!("{key} GB/s"))?, round.median(&work.limit("read"))?);
    let bytes = round.median(&format!("{key} bytes per token"))?;
    let engines = peers_of(record, work);
    let alike = engines.iter().filter(|(_, engine)| could_read_alike(round, work, engine));
    let implied = alike.filter_map(|(_, engine)| round.median(engine)).map(|rate| rate * bytes / 1e9);
    Some(100.0 * ours / implied.fold(limit.max(ours), f64::max))
}

/// Ours over theirs, of rounds in which both could read as fast.
fn ratios(record: &Record, work: &Work, theirs: &str) -> Samples {
    let ours = work.key(OURS);
    record.per_round(|round| could_read_alike(round, work, theirs).then_some(round.median(&ours)? / round.median(theirs)?))
}

/// Whether the reads beside our sample and beside the one at `theirs` agree; true where reads do not matter.
fn could_read_alike(round: &Round, work: &Work, theirs: &str) -> bool {
    match work.bound {
        Peak => true,
        Read | Nearer => match (round.median(&work.limit("read")), round.median(&reads_beside(theirs))) {
            (Some(ours), Some(theirs)) => agree(ours, theirs),
            _ => false,
        },
    }
}

/// Key of the reads beside another engine's sample.
fn reads_beside(theirs: &str) -> String {
    format!("{theirs} reads")
}

pub fn section(bench: &Bench, topic: Topic) -> Option<Section> {
    let record = &bench.record;
    let (title, note) = topic.about()?;
    let mut section = Section::new(title, note);
    for work in WORKS.iter().filter(|w| w.topic == topic && record.has(&w.key(OURS))) {
        let key = work.key(OURS);
        let rate = record.get(&key);
        section.add(work.name, "tokens/s", rate.clone());
        if find(work.executable).peer_model.is_some_and(|m| m.starts_with("bert")) {
            section.add(format!("{}, time", work.name), "ms", rate.map(|rate| (work.test.prompt * work.test.batch) as f64 * 1e3 / rate));
        }
        let goal = work.goal.map(Goal::AtLeast);
        let (goal_of_peak, goal_of_reads) = match work.bound {
            Peak => (goal, None),
            Read => (None, goal),
            Nearer => {
                section.add_share(format!("{}, share of the nearer bound", work.name), share(bench, work), goal);
                (None, None)
            }
        };
        if work.bound != Read {
            let used = record.facts.get(&format!("peak of {}", work.executable)).cloned().unwrap_or_default();
            let bf16 = record.facts.get(&format!("types of {}", work.executable)).is_some_and(|t| t.starts_with("bf16"));
            for (peak, shown) in PEAKS {
                // Where the weights are bf16, its own instruction is shown too, though the other may be the faster one; beside tiles
                // the dot on vectors.
                let is_used = peak == used;
                if is_used || (bf16 && peak == "vdpbf16ps") || (used == "tdpbsud" && peak == "vpdpbusd") {
                    let samples = record.percent(&format!("{key} GFLOP/s"), &work.limit(peak));
                    let note = if is_used { "" } else { " (not used)" };
                    section.add_share(format!("{}, share of the {shown} peak{note}", work.name), samples, goal_of_peak.filter(|_| is_used));
                }
            }
            let samples = record.percent(&format!("{key} GFLOP/s of all rows"), &work.limit(&used));
            section.add_share(format!("{}, the same with all rows in the last layer", work.name), samples, None);
            section.add(format!("{}, rate", work.name), "GFLOP/s", record.get(&format!("{key} GFLOP/s")));
        }
        if work.bound != Peak {
            let samples = record.per_round(|round| share_of_best(record, work, round));
            section.add_share(format!("{}, share of the best rate of all", work.name), samples, goal_of_reads);
            let samples = record.percent(&format!("{key} GB/s"), &work.limit("read"));
            section.add_share(format!("{}, share of the best read pattern", work.name), samples, None);
            // Where a file's pages lie in memory matters on virtual machines: these are the very same pages.
            let samples = record.percent(&format!("{key} GB/s"), &work.limit("read file"));
            section.add_share(format!("{}, share of reading the same file", work.name), samples, None);
            section.add(format!("{}, rate", work.name), "GB/s", record.get(&format!("{key} GB/s")));
        }
        section.add(format!("{}, a line's round trip between two cores", work.name), "ns", record.get(&work.limit(limits::ROUND_TRIP)));
        section.add(format!("{}, resident", work.name), "MB", record.get(&format!("{key} rss")).map(|bytes| bytes / 1e6));
        for (engine, theirs) in peers_of(record, work) {
            section.add(format!("{}, {engine}", work.name), "tokens/s", record.get(&theirs));
            let ratio = ratios(record, work, &theirs);
            let verdict = peers::verdict(ratio.values());
            section.add_remark(format!("{}, rcompile / {engine}", work.name), "-", ratio, verdict);
            section.add(format!("{}, {engine}, resident", work.name), "MB", record.get(&format!("{theirs} rss")).map(|b| b / 1e6));
        }
    }
    if topic == Topic::Decode {
        let off = record.each(["outside generate", "outside bench"], |[outside, inside]| 100.0 * (outside / inside - 1.0).abs());
        section.add(format!("{OUTSIDE}, -n 128 minus -n 1"), "tokens/s", record.get("outside generate"));
        section.add_goal("difference of that to bench -n 127 -d 8", "%", off, Goal::AtMost(5.0));
    }
    if topic == Topic::Long {
        for attention in &ATTENTION {
            let key = format!("{} | {OURS} GFLOP/s", attention.name);
            let peak = record.facts.get(&format!("peak of {}", attention.executable)).cloned().unwrap_or_default();
            section.add(attention.name, "GFLOP/s", record.get(&key));
            let limit = format!("limit {peak} {}", bench.most_threads());
            section.add_goal(
                format!("{}, share of the {peak} peak", attention.name),
                "%",
                record.percent(&key, &limit),
                Goal::AtLeast(attention.goal),
            );
        }
    }
    Some(section)
}

/// Peers of a work: engine and key of its rate.
fn peers_of(record: &Record, work: &Work) -> Vec<(String, String)> {
    let is_rate = |engine: &str| ![" rss", " reads"].iter().any(|of| engine.ends_with(of)) && !engine.starts_with(OURS);
    peers::of(record, work.name).into_iter().filter(|(engine, _)| is_rate(engine)).collect()
}

/// The table of all works in short, in Markdown: target, ours, share, peers.
pub fn summary(bench: &Bench) -> String {
    let record = &bench.record;
    let mut out =
        String::from("| work | ours, tokens/s | share of the limit, % | target, % | peers, tokens/s |\n|---|---:|---:|---|---|\n");
    for work in WORKS.iter().filter(|w| record.has(&w.key(OURS))) {
        let key = work.key(OURS);
        let share = share(bench, work).median();
        let target = work.goal.filter(|_| !share.is_nan()).map_or(String::new(), |goal| Goal::AtLeast(goal).verdict(share));
        let peers: Vec<String> = peers_of(record, work)
            .iter()
            .map(|(engine, theirs)| {
                let verdict = peers::verdict(ratios(record, work, theirs).values());
                format!("{engine} {} ({verdict})", number(record.get(theirs).median()))
            })
            .collect();
        let peers = if peers.is_empty() { "-".into() } else { peers.join("; ") };
        out += &format!("| {} | {} | {} | {target} | {peers} |\n", work.name, number(record.get(&key).median()), number(share));
    }
    out
}

/// Flops of a prompt if all of its rows went through all layers, as the goals count them: a program for one row leaves nothing out of its
/// last layer. None for other tests and where no bucket has one row. Errors: regions that are not as the manifest has them.
fn flop_of_all_rows(info: &Value, test: Test) -> Outcome<Option<f64>> {
    let buckets = info["entries"][0]["buckets"].as_array().ok_or("info has no buckets")?;
    let one_row = buckets.iter().find(|bucket| bucket["rows"] == 1);
    let (Some(one_row), 1.., 0, 1) = (one_row, test.prompt, test.generate, test.batch) else { return Ok(None) };
    let rows = test.prompt as u64;
    let load = Load { steps: 1, logit_steps: 1, rows, logit_rows: 1, row_positions: rows * (rows + 1) / 2, ..Load::default() };
    let regions = Vec::<RegionInfo>::deserialize(&one_row["regions"])?;
    Ok(Some(regions.iter().map(|region| region.work(&load).flop as f64).sum()))
}

/// `bf16 weights, f32 products, f32 cache`
fn types_of(info: &Value) -> String {
    let of = |key: &str| info[key].as_str().unwrap_or("?").to_owned();
    format!("{} weights, {} products, {} cache", of("dtype"), of("compute"), of("kv_dtype"))
}

/// Do the matmuls of the largest bucket take bf16?
fn multiplies_in_bf16(info: &Value) -> bool {
    let buckets = info["entries"][0]["buckets"].as_array().into_iter().flatten();
    let largest = buckets.max_by_key(|bucket| bucket["rows"].as_u64());
    let mut regions = largest.and_then(|bucket| bucket["regions"].as_array()).into_iter().flatten();
    regions.any(|region| region["kind"] == "matmul" && region["arithmetic"] == "bf16_dot")
}

/// The instruction whose peak bounds the matmuls of an executable, by the name that [`crate::limits`] gives it.
fn peak_of(info: &Value) -> &'static str {
    let has = |feature: &str| info["features"].as_array().is_some_and(|all| all.iter().any(|f| f == feature));
    match info["compute"].as_str() {
        Some("bf16") if has("amx-bf16") => "tdpbf16ps",
        Some("bf16") => "vdpbf16ps",
        // Values of codes by tiles of bf16, where many rows are computed so.
        Some("int8") if has("amx-bf16") && multiplies_in_bf16(info) => "tdpbf16ps",
        Some("int8") if has("amx-int8") => "tdpbsud",
        Some("int8") if !has("avx512f") && !has("avxvnni") => "vpmaddubsw",
        Some("int8") => "vpdpbusd",
        _ if has("avx512f") => "avx512-fma",
        _ => "avx2-fma",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_runtime::cost::{Arithmetic, Linear, RegionKind};
    use serde_json::json;

    #[test]
    fn the_instruction_follows_from_what_info_says() {
        let info = |compute: &str, features: &[&str]| json!({"compute": compute, "features": features});
        assert_eq!(peak_of(&info("bf16", &["avx512f"])), "vdpbf16ps");
        assert_eq!(peak_of(&info("bf16", &["avx512f", "amx-bf16"])), "tdpbf16ps");
        assert_eq!(peak_of(&info("int8", &["avx512f", "avx512vnni"])), "vpdpbusd");
        assert_eq!(peak_of(&info("int8", &["avx512vnni", "amx-int8"])), "tdpbsud");
        // Codes by 32: one row by integer dots, many by tiles of bf16.
        let bucket = |rows: u32, arithmetic: &str| json!({"rows": rows, "regions": [{"kind": "matmul", "arithmetic": arithmetic}]});
        for (many, peak) in [("bf16_dot", "tdpbf16ps"), ("int8_dot", "tdpbsud")] {
            let mut info = info("int8", &["avx512vnni", "amx-bf16", "amx-int8"]);
            info["entries"] = json!([{"buckets": [bucket(512, many), bucket(1, "int8_dot")]}]);
            assert_eq!(peak_of(&info), peak);
        }
        assert_eq!(peak_of(&info("int8", &["avx2", "avxvnni"])), "vpdpbusd");
        assert_eq!(peak_of(&info("int8", &["avx2", "fma"])), "vpmaddubsw");
        assert_eq!(peak_of(&info("f32", &["avx2", "avx512f"])), "avx512-fma");
        assert_eq!(peak_of(&info("f32", &["avx2", "fma"])), "avx2-fma");
    }

    #[test]
    fn all_rows_of_a_prompt_go_through_the_program_for_one() {
        let region = |layers: Option<u32>, flop: Linear| RegionInfo {
            name: "a".into(),
            kind: RegionKind::Matmul,
            arithmetic: Arithmetic::F32,
            layers,
            window: None,
            barrier: true,
            units: Linear::default(),
            passes: None,
            weight_bytes: Linear::default(),
            kv_bytes: Linear::default(),
            activation_bytes: Linear::default(),
            private_bytes: Linear::default(),
            flop,
        };
        let layer = region(Some(3), Linear { per_row: 10, per_row_position: 2, ..Linear::default() });
        let head = region(None, Linear { per_logit_row: 7, ..Linear::default() });
        let one = json!({"rows": 1, "regions": [layer, head]});
        let many = json!({"rows": 64, "regions": [region(None, Linear { per_row: 1000, ..Linear::default() })]});
        let of = |buckets: Vec<&Value>, test| flop_of_all_rows(&json!({"entries": [{"buckets": buckets}]}), test);
        assert_eq!(of(vec![&many, &one], prefill(4)).unwrap(), Some(3.0 * (40.0 + 2.0 * 10.0) + 7.0));
        assert_eq!(of(vec![&many], prefill(4)).unwrap(), None, "an encoder");
        assert_eq!([decode(4), texts(8)].map(|test| of(vec![&one], test).unwrap()), [None; 2]);
        of(vec![&json!({"rows": 1, "regions": [{}]})], prefill(4)).unwrap_err();
    }

    #[test]
    fn every_work_has_its_executable_and_a_name_of_its_own() {
        let mut names: Vec<_> = WORKS.iter().map(|w| (find(w.executable), w.name).1).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), WORKS.len());
        assert!(ATTENTION.iter().all(|a| find(a.executable).peer_model.is_none()));
    }

    #[test]
    fn a_sample_is_taken_again_until_the_machine_stands_still() {
        // What the machine can read, measurement by measurement; samples count up.
        let taken = |rates: &[f64]| {
            let (mut rates, mut samples) = (rates.iter(), 0);
            let reads = |_: &mut ()| Ok(Reads { best: *rates.next().ok_or("no more")?, file: f64::NAN });
            let sample = |_: &mut ()| {
                samples += 1;
                Ok(samples)
            };
            let (sample, reads) = steady(&mut (), reads, |a, b| agree(a.best, b.best), sample).unwrap();
            (sample, reads.map(|[before, after]| before.best.max(after.best)))
        };
        assert_eq!(taken(&[34.0, 35.0]), (1, Some(35.0)));
        assert_eq!(taken(&[34.0, 60.0, 66.0]), (2, Some(66.0)), "the second pair is 9 % apart");
        assert_eq!(taken(&[34.0, 60.0, 34.0, 60.0, 60.0]), (4, Some(60.0)));
        assert_eq!(taken(&[34.0, 60.0, 34.0, 60.0, 34.0, 34.0]), (4, None), "four tries");
    }

    #[test]
    fn engines_are_compared_where_they_could_read_alike() {
        let work = &WORKS[5];
        let (ours, theirs) = (work.key(OURS), work.key("OpenVINO"));
        let mut record = Record::default();
        // Ours in one state of the machine; theirs in the same twice, then in a faster one, then in one that was not found out.
        for (rate, reads) in [(10.0, 25.0), (15.0, 26.0), (20.0, 60.0), (20.0, f64::NAN)] {
            record.begin("decode", String::new(), String::new());
            record.push(&ours, 12.0);
            record.push(format!("{ours} GB/s"), 24.0);
            record.push(format!("{ours} bytes per token"), 2e9);
            record.push(work.limit("read"), 25.0);
            record.push(&theirs, rate);
            record.push(reads_beside(&theirs), reads);
        }
        assert_eq!(record.per_round(|round| share_of_best(&record, work, round)).values(), [96.0, 80.0, 96.0, 96.0]);
        assert_eq!(ratios(&record, work, &theirs).values(), [1.2, 0.8]);
        assert_eq!(peers_of(&record, work), [("OpenVINO".to_owned(), theirs)]);
    }

    #[test]
    fn many_sequences_are_held_against_the_bound_that_takes_longer() {
        let work = WORKS.iter().find(|w| w.name == "bf16 decode of 32 sequences").unwrap();
        let key = work.key(OURS);
        let mut record = Record::default();
        record.facts.insert(format!("peak of {}", work.executable), "tdpbf16ps".into());
        // 20 GB/s of 40, and 600 GFLOP/s of vectors' 800 or of tiles' 4000.
        for peak in [800.0, 4000.0] {
            record.begin("batch", String::new(), String::new());
            record.push(format!("{key} GB/s"), 20.0);
            record.push(format!("{key} bytes per token"), 1e8);
            record.push(work.limit("read"), 40.0);
            record.push(format!("{key} GFLOP/s"), 600.0);
            record.push(work.limit("tdpbf16ps"), peak);
        }
        assert_eq!(record.per_round(|round| share_of_nearer(&record, work, round)).values(), [75.0, 50.0]);
        // Rounds without steady reads beside both do not compare.
        let (ours, theirs) = (key, work.key("OpenVINO"));
        for reads in [[None; 2], [None, Some(40.0)], [Some(40.0), None], [Some(40.0); 2]] {
            record.begin("batch", String::new(), String::new());
            record.push(&ours, 12.0);
            record.push(&theirs, 10.0);
            for (key, reads) in [work.limit("read"), reads_beside(&theirs)].into_iter().zip(reads) {
                reads.into_iter().for_each(|reads| record.push(&key, reads));
            }
        }
        assert_eq!(ratios(&record, work, &theirs).values(), [1.2]);
    }
}
