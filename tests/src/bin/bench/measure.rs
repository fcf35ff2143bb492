//! What is made and measured, in which order, and how figures follow from it.

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::process::{self, Run, args};
use crate::stats::{Goal, Samples, Section};
use crate::{Options, Topic, machine};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// The eight token ids of the first-token measurement, and a text of as many at most (seven), so that both take bucket 8.
const TOKENS: &str = "1,2,3,4,5,6,7,8";
const TEXT: &str = "Once upon a";

/// Numbers of layers of the depth measurement.
const DEPTHS: [usize; 3] = [4, 16, 64];

/// Programs, directories and what was seen so far.
pub struct Bench<'o> {
    options: &'o Options,
    rcompile: PathBuf,
    make_model: PathBuf,
    /// This program, for its part that measures limits.
    bench: PathBuf,
    /// Numbers of threads: one, and all cores.
    threads: Vec<usize>,
    /// Every command in the order of its first use.
    commands: Vec<String>,
    problems: Vec<String>,
}

/// Samples of a figure by its key.
#[derive(Default)]
struct Log(BTreeMap<String, Samples>);

impl Log {
    fn push(&mut self, key: impl Into<String>, value: f64) {
        self.0.entry(key.into()).or_default().push(value);
    }

    /// The samples of a key; none if nothing was measured under it.
    fn get(&self, key: &str) -> Samples {
        self.0.get(key).cloned().unwrap_or_default()
    }

    /// `100 * a / b`, round by round.
    fn percent(&self, a: &str, b: &str) -> Samples {
        self.ratio(a, b).map(|share| 100.0 * share)
    }

    fn ratio(&self, a: &str, b: &str) -> Samples {
        self.get(a).with(&self.get(b), |a, b| a / b)
    }
}

impl<'o> Bench<'o> {
    pub fn new(options: &'o Options) -> Outcome<Self> {
        let bench = std::env::current_exe()?;
        let beside = |name: &str| bench.with_file_name(name);
        let rcompile = options.rcompile.clone().unwrap_or_else(|| beside("rcompile"));
        let make_model = beside("make-model");
        for program in [&rcompile, &make_model] {
            if !program.is_file() {
                return Err(format!("{}: not there; ./x bench builds it", program.display()).into());
            }
        }
        fs::create_dir_all(options.dir.join("models"))?;
        let mut threads = vec![1, machine::physical_cores().len()];
        threads.dedup();
        Ok(Self { options, rcompile, make_model, bench, threads, commands: Vec::new(), problems: Vec::new() })
    }

    pub fn rounds(&self) -> usize {
        if self.options.quick { 1 } else { self.options.rounds.max(1) }
    }

    pub fn commands(&self) -> &[String] {
        &self.commands
    }

    /// Wrong output that was seen on the way.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    pub fn run(&mut self) -> Outcome<Vec<Section>> {
        let options = self.options;
        let mut sections = Vec::new();
        if options.wants(Topic::Build) || options.wants(Topic::Speed) || options.wants(Topic::Start) || options.wants(Topic::Rows) {
            sections.extend(self.large()?);
        }
        if options.wants(Topic::Depth) {
            sections.push(self.depth()?);
        }
        Ok(sections)
    }

    /// Everything about the 1B shape, with the small shape of the rows measurement beside it.
    fn large(&mut self) -> Outcome<Vec<Section>> {
        let options = self.options;
        let model = self.model("llama-1b", &["llama-1b"])?;
        let out = options.dir.join("llama-1b");
        let mut sections = Vec::new();
        let mut log = Log::default();

        if !(options.reuse && out.is_file()) {
            let builds = if options.wants(Topic::Build) { self.rounds().min(3) } else { 1 };
            let mut report = Value::Null;
            for _ in 0..builds {
                report = self.build(&model, &out, &[], "build", &mut log)?;
            }
            if options.wants(Topic::Build) {
                sections.push(build_section(&log, &report, &model, &out)?);
            }
        }
        let info: Value = serde_json::from_str(&self.start(&out, &args(["info", "--json"]))?.stdout)?;
        let peak = peak_of(&info);

        let rows = options.wants(Topic::Rows);
        let (l3, single) = (options.dir.join("l3"), options.dir.join("llama-1b-bucket-1"));
        if rows {
            let small = self.model("l3", &["l3"])?;
            self.build_unless_kept(&small, &l3, &["--buckets", "64"])?;
            self.build_unless_kept(&model, &single, &["--buckets", "1"])?;
        }

        for round in 1..=self.rounds() {
            eprintln!("bench: round {round} of {}", self.rounds());
            for threads in self.threads.clone() {
                if options.wants(Topic::Speed) {
                    self.speed(&out, threads, &mut log)?;
                }
                if rows {
                    self.rates(&l3, "l3", &["-p", "33,64", "-n", "0", "-r", "9"], threads, &mut log)?;
                    self.rates(&out, "1b-rows", &["-p", "33,64", "-n", "0", "-r", "3"], threads, &mut log)?;
                }
            }
            if options.wants(Topic::Start) {
                self.starts(&out, &mut log)?;
            }
            // At bucket 1 a prompt of 512 is 512 steps: once is enough, the ratio is far from its goal.
            if rows && round == 1 {
                let prompt = if options.quick { "64" } else { "512" };
                let threads = self.most_threads();
                self.rates(&single, "1b-bucket-1", &["-p", prompt, "-n", "0", "-r", "1"], threads, &mut log)?;
                self.rates(&out, "1b-bucket-512", &["-p", "512", "-n", "0", "-r", "1"], threads, &mut log)?;
            }
        }

        if options.wants(Topic::Speed) {
            sections.push(self.limits_section(&log));
            sections.push(self.speed_section(&log, peak));
        }
        if options.wants(Topic::Start) {
            sections.push(start_section(&log));
            sections.push(memory_section(&log, &info));
        }
        if rows {
            sections.push(self.rows_section(&log));
        }
        Ok(sections)
    }

    fn most_threads(&self) -> usize {
        *self.threads.last().expect("there is at least one")
    }

    // --- Making

    /// The directory of a model, which is made unless an earlier run did.
    fn model(&mut self, name: &str, words: &[&str]) -> Outcome<PathBuf> {
        let dir = self.options.dir.join("models").join(name);
        let args = |dir: &Path| -> Vec<OsString> { words.iter().map(OsString::from).chain(["-o".into(), dir.into()]).collect() };
        self.note(&self.make_model.clone(), &args(&dir));
        if !dir.is_dir() {
            eprintln!("bench: making {}", dir.display());
            // Made under another name first, so that a model that is there is whole.
            let part = dir.with_extension("part");
            process::run(&self.make_model, &args(&part), &self.options.dir.join("stderr.log"), false)?;
            fs::rename(&part, &dir)?;
        }
        Ok(dir)
    }

    fn build_unless_kept(&mut self, model: &Path, out: &Path, flags: &[&str]) -> Outcome<()> {
        if !(self.options.reuse && out.is_file()) {
            self.build(model, out, flags, "other", &mut Log::default())?;
        }
        Ok(())
    }

    /// Builds an executable; logs time, memory and the times of the stages under `key`; returns the report of the compiler.
    fn build(&mut self, model: &Path, out: &Path, flags: &[&str], key: &str, log: &mut Log) -> Outcome<Value> {
        // The goal is for files in the page cache.
        io::copy(&mut File::open(model.join("model.safetensors"))?, &mut io::sink())?;
        let mut args = args(["build", "--json", "--quiet"]);
        args.extend(["--model".into(), model.into(), "-o".into(), out.into()]);
        args.extend(flags.iter().map(OsString::from));
        let program = self.rcompile.clone();
        let run = self.watched(&program, &args, true)?;
        log.push(format!("{key} s"), run.wall_ms / 1e3);
        log.push(format!("{key} cpu"), run.cpu_ms / 1e3);
        log.push(format!("{key} rss"), run.rss_bytes_max as f64 / 1e9);
        log.push(format!("{key} tree"), run.tree_rss_bytes_max as f64 / 1e9);
        let report: Value = serde_json::from_str(&run.stdout)?;
        for stage in report["stages"].as_array().into_iter().flatten() {
            let name = stage["name"].as_str().unwrap_or_default();
            log.push(format!("{key} stage {name}"), float(&stage["ms"]) / 1e3);
        }
        log.push(format!("{key} code"), float(&report["code_bytes"]));
        eprintln!("bench: {} built in {:.1} s", out.display(), run.wall_ms / 1e3);
        Ok(report)
    }

    // --- Measuring

    fn start(&mut self, program: &Path, args: &[OsString]) -> Outcome<Run> {
        self.watched(program, args, false)
    }

    fn watched(&mut self, program: &Path, args: &[OsString], tree: bool) -> Outcome<Run> {
        self.note(program, args);
        Ok(process::run(program, args, &self.options.dir.join("stderr.log"), tree)?)
    }

    /// Keeps a command for the report, as typed in the directory of the benchmark.
    fn note(&mut self, program: &Path, args: &[OsString]) {
        let dir = format!("{}/", self.options.dir.display());
        let name = program.file_name().unwrap_or_default();
        let typed = if program.starts_with(&self.options.dir) { Path::new(".").join(name) } else { name.into() };
        let command = process::shown(&typed, args).replace(&dir, "");
        if !self.commands.contains(&command) {
            self.commands.push(command);
        }
    }

    /// Limits of the machine with so many threads, by name.
    fn limits(&mut self, threads: usize) -> Outcome<Vec<(String, f64)>> {
        let bench = self.bench.clone();
        let run = self.start(&bench, &args(["limits", "--threads", &threads.to_string()]))?;
        let limit = |line: &str| -> Outcome<_> {
            let limit: Value = serde_json::from_str(line)?;
            Ok((limit["limit"].as_str().unwrap_or_default().to_owned(), float(&limit["value"])))
        };
        run.stdout.lines().map(limit).collect()
    }

    /// Prefill and decode between two measurements of the limits, of which the larger counts: what disturbed one of them was
    /// no limit.
    fn speed(&mut self, out: &Path, threads: usize, log: &mut Log) -> Outcome<()> {
        let n_gen = if self.options.quick { "16" } else { "64" };
        let before = self.limits(threads)?;
        self.rates(out, "1b", &["-p", "512,128", "-n", n_gen, "-r", "1"], threads, log)?;
        let after = self.limits(threads)?;
        for ((name, before), (_, after)) in before.into_iter().zip(after) {
            log.push(format!("limit {name} {threads}"), before.max(after));
        }
        Ok(())
    }

    /// Runs `OUT bench` and logs for each test, under `KEY TEST THREADS`, tokens per second (with several repetitions their
    /// median), bytes and flops per second.
    fn rates(&mut self, out: &Path, key: &str, flags: &[&str], threads: usize, log: &mut Log) -> Outcome<()> {
        let mut words = args(["bench"]);
        words.extend(flags.iter().map(OsString::from));
        words.extend(args(["-t", &threads.to_string(), "-o", "jsonl"]));
        let run = self.start(out, &words)?;
        log.push(format!("{key} rss"), run.rss_bytes_max as f64);
        for line in run.stdout.lines() {
            let row: Value = serde_json::from_str(line)?;
            let mut rates = Samples::default();
            row["samples_ts"].as_array().into_iter().flatten().for_each(|v| rates.push(float(v)));
            let test = row["test"].as_str().unwrap_or_default();
            eprintln!("bench: {key}, {threads} threads, {test}: {:.1} tokens/s", rates.median());
            log.push(format!("{key} {test} {threads}"), rates.median());
            log.push(format!("{key} {test} {threads} GB/s"), float(&row["gb_per_s"]));
            log.push(format!("{key} {test} {threads} GFLOP/s"), float(&row["gflop_per_s"]));
        }
        Ok(())
    }

    /// Time of `info`, and to the first token from ids and from text; the tokens must be the same every time.
    fn starts(&mut self, out: &Path, log: &mut Log) -> Outcome<()> {
        let mut answers: BTreeMap<String, String> = BTreeMap::new();
        for _ in 0..3 {
            let info = self.start(out, &args(["info"]))?;
            log.push("info", info.wall_ms);
            let ids = self.start(out, &args(["generate", "--tokens", TOKENS, "-n", "1"]))?;
            log.push("ids", ids.first_output_ms);
            log.push("ids end", ids.wall_ms);
            log.push("ids rss", ids.rss_bytes_max as f64);
            let text = self.start(out, &args(["generate", "-p", TEXT, "-n", "1"]))?;
            log.push("text", text.first_output_ms);
            for (input, answer) in [(TOKENS, ids.stdout), (TEXT, text.stdout)] {
                let first = answers.entry(input.into()).or_insert_with(|| answer.clone());
                if *first != answer {
                    self.problems.push(format!("greedy output for {input:?} changed from {first:?} to {answer:?}"));
                }
            }
        }
        let longer = |threads: usize| args(["generate", "--tokens", TOKENS, "-n", "8", "--json", "-t", &threads.to_string()]);
        let mut of_first = None;
        for threads in self.threads.clone() {
            let answer: Value = serde_json::from_str(&self.start(out, &longer(threads))?.stdout)?;
            let tokens = answer["tokens"].clone();
            match &of_first {
                None => of_first = Some(tokens),
                Some(first) if *first != tokens => {
                    self.problems.push(format!("{threads} threads give the tokens {tokens}, one gives {first}"));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Models of one shape with different numbers of layers.
    fn depth(&mut self) -> Outcome<Section> {
        let mut log = Log::default();
        for _ in 0..self.rounds() {
            for layers in DEPTHS {
                let name = format!("toy-{layers}");
                let model = self.model(&name, &["toy", "--layers", &layers.to_string()])?;
                self.build(&model, &self.options.dir.join(&name), &[], &name, &mut log)?;
            }
        }
        let note = "One shape (`make-model toy`) with default options; spread is (largest - smallest) / smallest, round by round.";
        let mut section = Section::new("Depth is free: 4, 16 and 64 layers", note);
        let spread = |what: &str| {
            let all = DEPTHS.map(|layers| log.get(&format!("toy-{layers} {what}")));
            let largest = all[1..].iter().fold(all[0].clone(), |a, b| a.with(b, f64::max));
            let smallest = all[1..].iter().fold(all[0].clone(), |a, b| a.with(b, f64::min));
            largest.with(&smallest, |largest, smallest| 100.0 * (largest - smallest) / smallest)
        };
        for layers in DEPTHS {
            section.add(format!("code, {layers} layers"), "bytes", log.get(&format!("toy-{layers} code")));
        }
        section.add_goal("spread of code bytes", "%", spread("code"), Goal::AtMost(5.0));
        for layers in DEPTHS {
            section.add(format!("codegen, {layers} layers"), "s", log.get(&format!("toy-{layers} stage codegen")));
        }
        section.add_goal("spread of codegen time", "%", spread("stage codegen"), Goal::AtMost(20.0));
        // Less disturbed by what else runs; it has the packing of the weights in it, too.
        for layers in DEPTHS {
            section.add(format!("processor time of the build, {layers} layers"), "s", log.get(&format!("toy-{layers} cpu")));
        }
        Ok(section)
    }

    // --- Figures

    fn limits_section(&self, log: &Log) -> Section {
        let note = "Read: the best of five access patterns over 1.3 GB. Peaks: the instruction alone, on registers. \
                    The larger of one measurement before and one after the executable.";
        let mut section = Section::new("Limits of this machine, measured in the same rounds", note);
        for threads in &self.threads {
            section.add(format!("memory read, {}", of_threads(*threads)), "GB/s", log.get(&format!("limit read {threads}")));
            for (name, shown) in [("avx2-fma", "AVX2 FMA"), ("avx512-fma", "AVX-512 FMA"), ("vdpbf16ps", "VDPBF16PS")] {
                let samples = log.get(&format!("limit {name} {threads}"));
                section.add(format!("{shown}, {}", of_threads(*threads)), "GFLOP/s", samples);
            }
        }
        section
    }

    fn speed_section(&self, log: &Log, peak: &str) -> Section {
        let decode = if self.options.quick { "tg16" } else { "tg64" };
        let note = format!(
            "Matmul inputs are computed with {peak}. Decode: bytes of weights per token over the read bandwidth of the same round. \
             Prefill: flops of the matmuls, without attention, over the peak of the instruction in the same round."
        );
        let mut section = Section::new("Speed of llama-1b in bf16", note);
        for &threads in &self.threads {
            let of = of_threads(threads);
            let last = threads == self.most_threads();
            for test in ["pp512", "pp128"] {
                let name = format!("prefill {}", &test[2..]);
                let key = format!("1b {test} {threads}");
                section.add(format!("{name}, {of}"), "tokens/s", log.get(&key));
                section.add(format!("{name}, {of}"), "GFLOP/s", log.get(&format!("{key} GFLOP/s")));
                let share = log.percent(&format!("{key} GFLOP/s"), &format!("limit {peak} {threads}"));
                let name = format!("{name}, {of}, share of the peak");
                match last && test == "pp512" {
                    true => section.add_goal(name, "%", share, Goal::AtLeast(50.0)),
                    false => section.add(name, "%", share),
                }
            }
            let key = format!("1b {decode} {threads}");
            section.add(format!("decode, {of}"), "tokens/s", log.get(&key));
            section.add(format!("decode, {of}"), "GB/s", log.get(&format!("{key} GB/s")));
            let share = log.percent(&format!("{key} GB/s"), &format!("limit read {threads}"));
            let name = format!("decode, {of}, share of the read bandwidth");
            match last {
                true => section.add_goal(name, "%", share, Goal::AtLeast(70.0)),
                false => section.add(name, "%", share),
            }
        }
        section
    }

    fn rows_section(&self, log: &Log) -> Section {
        let note = "33 rows against 64 rows in a bucket of 64: ratio of times, each the median of the repetitions of one process. \
                    `l3` has weights of 20 MB. A prompt of 512 with `--buckets 1` against the default buckets: ratio of the rates.";
        let mut section = Section::new("Rows cost what they are: buckets", note);
        for &threads in &self.threads {
            for (key, shape, goal) in [("l3", "l3", 0.60), ("1b-rows", "llama-1b", 0.70)] {
                let rates = (format!("{key} pp64 {threads}"), format!("{key} pp33 {threads}"));
                // time = rows / rate
                let ratio = log.ratio(&rates.0, &rates.1).map(|rate| rate * 33.0 / 64.0);
                let name = format!("time of 33 rows / time of 64 rows, {shape}, {}", of_threads(threads));
                section.add_goal(name, "-", ratio, Goal::AtMost(goal));
            }
        }
        let threads = self.most_threads();
        let (small, prompt) = match self.options.quick {
            true => (format!("1b-bucket-1 pp64 {threads}"), 64),
            false => (format!("1b-bucket-1 pp512 {threads}"), 512),
        };
        let large = format!("1b-bucket-512 pp512 {threads}");
        section.add(format!("prefill {prompt}, --buckets 1, {}", of_threads(threads)), "tokens/s", log.get(&small));
        section.add(format!("prefill 512, default buckets, {}", of_threads(threads)), "tokens/s", log.get(&large));
        section.add_goal("prefill, default buckets / --buckets 1", "-", log.ratio(&large, &small), Goal::AtLeast(4.0));
        section
    }
}

fn build_section(log: &Log, report: &Value, model: &Path, out: &Path) -> Outcome<Section> {
    let checkpoint = tensor_bytes(&model.join("model.safetensors"))? as f64;
    let weights = float(&report["weight_bytes"]);
    let note = "`rcompile build` with default options (buckets 1, 8, 64, 512), model files in the page cache. Memory of one process: \
                as the kernel counts it; of all: sum over the process and its children, polled every 10 ms.";
    let mut section = Section::new("Build of llama-1b in bf16", note);
    section.add_goal("build", "s", log.get("build s"), Goal::AtMost(60.0));
    for stage in report["stages"].as_array().into_iter().flatten() {
        let name = stage["name"].as_str().unwrap_or_default();
        section.add(format!("stage {name}"), "s", log.get(&format!("build stage {name}")));
    }
    section.add("processor time", "s", log.get("build cpu"));
    section.add_goal("peak memory, largest process", "GB", log.get("build rss"), Goal::AtMost(1.5));
    section.add_goal("peak memory, all processes", "GB", log.get("build tree"), Goal::AtMost(1.5));
    section.add("checkpoint", "bytes", checkpoint);
    section.add_goal("packed weights / checkpoint", "-", weights / checkpoint, Goal::AtMost(1.01));
    let rest = (fs::metadata(out)?.len() as f64 - weights) / 1e6;
    section.add_goal("executable without packed weights", "MB", rest, Goal::AtMost(20.0));
    section.add("generated code", "bytes", log.get("build code"));
    Ok(section)
}

fn start_section(log: &Log) -> Section {
    let note = format!(
        "From outside, with a warm page cache: from before the start of the process to its end (`info`) or to the first byte of \
         output (8 token ids; the text {TEXT:?})."
    );
    let mut section = Section::new("Start of llama-1b", note);
    section.add_goal("info", "ms", log.get("info"), Goal::AtMost(20.0));
    section.add_goal("first token, 8 token ids", "ms", log.get("ids"), Goal::AtMost(300.0));
    section.add("first token, 8 token ids, to the end of the process", "ms", log.get("ids end"));
    section.add("first token, text", "ms", log.get("text"));
    let more = log.get("text").with(&log.get("ids"), |text, ids| text - ids);
    section.add_goal("first token, text more than ids", "ms", more, Goal::AtMost(100.0));
    section
}

fn memory_section(log: &Log, info: &Value) -> Section {
    let note = "Peak resident memory of whole processes as the kernel counts it; pages of the file that were touched count.";
    let mut section = Section::new("Memory of llama-1b", note);
    let parts = [("file", "file_bytes"), ("KV cache", "kv_bytes"), ("arena", "arena_bytes")];
    for (name, key) in parts {
        section.add(name, "MB", float(&info[key]) / 1e6);
    }
    let sum: f64 = parts.iter().map(|(_, key)| float(&info[*key])).sum();
    for (key, name) in [("ids rss", "generate, 8 + 1 tokens"), ("1b rss", "bench, prompts of 512")] {
        let rss = log.get(key);
        section.add(format!("resident, {name}"), "MB", rss.map(|bytes| bytes / 1e6));
        section.add_goal(format!("resident / (file + KV + arena), {name}"), "-", rss.map(|bytes| bytes / sum), Goal::AtMost(1.05));
    }
    section
}

/// The instruction whose peak bounds the matmuls of an executable, by the name that [`crate::limits`] gives it.
fn peak_of(info: &Value) -> &'static str {
    let has = |feature: &str| info["features"].as_array().is_some_and(|all| all.iter().any(|f| f == feature));
    match info["compute"].as_str() {
        Some("bf16") => "vdpbf16ps",
        _ if has("avx512f") => "avx512-fma",
        _ => "avx2-fma",
    }
}

/// Bytes of all tensors of a safetensors file: everything behind its header.
fn tensor_bytes(path: &Path) -> Outcome<u64> {
    let mut length = [0; 8];
    io::Read::read_exact(&mut File::open(path)?, &mut length)?;
    Ok(fs::metadata(path)?.len() - 8 - u64::from_le_bytes(length))
}

fn of_threads(threads: usize) -> String {
    if threads == 1 { "1 thread".into() } else { format!("{threads} threads") }
}

/// A number of a report; NaN where it is missing, which the table shows.
fn float(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_instruction_follows_from_what_info_says() {
        let info = |compute: &str, features: &[&str]| json!({"compute": compute, "features": features});
        assert_eq!(peak_of(&info("bf16", &["avx512f"])), "vdpbf16ps");
        assert_eq!(peak_of(&info("f32", &["avx2", "avx512f"])), "avx512-fma");
        assert_eq!(peak_of(&info("f32", &["avx2", "fma"])), "avx2-fma");
    }
}
