//! The programs that are measured: models and executables are made when a topic needs them, started, and watched.

use std::error::Error;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::process::{self, Run, Turns, args};
use crate::record::Record;
use crate::stats::{Samples, Section};
use crate::{Options, Topic, compiler, machine, rows, start, work};

pub type Outcome<T> = Result<T, Box<dyn Error>>;

const TASKSET: &str = "taskset";

/// An executable that topics measure.
pub struct Executable {
    pub name: &'static str,
    /// Name of the model's directory, and how `make-model` makes it.
    model: (&'static str, &'static [&'static str]),
    /// Flags of `rcompile build`.
    flags: &'static [&'static str],
    /// Layers times the width of all query heads: what attention computes per row and key, over 4.
    pub attention_width: usize,
    /// What other engines run in its place, as `tests/peers/convert.py` is told to name it.
    pub peer_model: Option<&'static str>,
}

const LLAMA: (&str, &[&str]) = ("llama-1b", &["llama-1b"]);
/// A quarter of the layers, where a long context takes minutes otherwise.
const LLAMA_4: (&str, &[&str]) = ("llama-1b-4-layers", &["llama-1b", "--layers", "4"]);
const LLAMA_4_WIDE: (&str, &[&str]) = ("llama-1b-4-layers-d128", &["llama-1b", "--layers", "4", "--heads", "16", "--kv-heads", "4"]);
const BERT: (&str, &[&str]) = ("bert-base", &["bert-base"]);
const GPT2: (&str, &[&str]) = ("gpt2", &["gpt2"]);
/// Room for one text and for eight in one step.
const BERT_BUCKETS: &str = "128,1024";

const fn executable(
    name: &'static str,
    model: (&'static str, &'static [&'static str]),
    flags: &'static [&'static str],
    attention_width: usize,
    peer_model: Option<&'static str>,
) -> Executable {
    Executable { name, model, flags, attention_width, peer_model }
}

pub const EXECUTABLES: &[Executable] = &[
    executable("llama-1b", LLAMA, &[], 16 * 2048, Some("llama-1b-bf16")),
    executable("llama-1b-f32", LLAMA, &["--dtype", "f32"], 16 * 2048, Some("llama-1b-f32")),
    executable("llama-1b-parallel", LLAMA, &["--parallel", "32", "--ctx-size", "512"], 16 * 2048, Some("llama-1b-bf16")),
    executable("llama-1b-long", LLAMA, &["--ctx-size", "9216"], 16 * 2048, None),
    executable("llama-1b-4-layers", LLAMA_4, &["--ctx-size", "9216"], 4 * 2048, None),
    executable("llama-1b-4-layers-f32", LLAMA_4, &["--ctx-size", "9216", "--dtype", "f32"], 4 * 2048, None),
    executable("llama-1b-4-layers-d128", LLAMA_4_WIDE, &["--ctx-size", "9216"], 4 * 2048, None),
    executable("llama-1b-avx2", LLAMA, &["--cpu", "x86-64-v3"], 16 * 2048, None),
    executable("llama-1b-avx2-f32", LLAMA, &["--cpu", "x86-64-v3", "--dtype", "f32"], 16 * 2048, None),
    executable("llama-1b-int8", LLAMA, &["--quantize", "int8"], 16 * 2048, Some("llama-1b-int8")),
    executable("llama-1b-int4", LLAMA, &["--quantize", "int4", "--quantize-head", "int4"], 16 * 2048, Some("llama-1b-int4")),
    executable("llama-1b-int4-int8-head", LLAMA, &["--quantize", "int4"], 16 * 2048, None),
    executable("llama-1b-int4-64", LLAMA, &["--quantize", "int4", "--group-size", "64"], 16 * 2048, None),
    executable("llama-1b-int4-128", LLAMA, &["--quantize", "int4", "--group-size", "128"], 16 * 2048, None),
    executable(
        "llama-1b-int8-parallel",
        LLAMA,
        &["--quantize", "int8", "--parallel", "32", "--ctx-size", "512"],
        16 * 2048,
        Some("llama-1b-int8"),
    ),
    executable(
        "llama-1b-int4-parallel",
        LLAMA,
        &["--quantize", "int4", "--quantize-head", "int4", "--parallel", "32", "--ctx-size", "512"],
        16 * 2048,
        Some("llama-1b-int4"),
    ),
    executable("bert-base", BERT, &["--buckets", BERT_BUCKETS], 12 * 768, Some("bert-base-f32")),
    executable("bert-base-bf16", BERT, &["--buckets", BERT_BUCKETS, "--dtype", "bf16"], 12 * 768, Some("bert-base-bf16")),
    executable("gpt2", GPT2, &[], 12 * 768, Some("gpt2-f32")),
    executable("gpt2-bf16", GPT2, &["--dtype", "bf16"], 12 * 768, Some("gpt2-bf16")),
    executable("llama-1b-bucket-1", LLAMA, &["--buckets", "1"], 16 * 2048, None),
    executable("l3", ("l3", &["l3"]), &["--buckets", "64"], 4 * 512, None),
];

/// Programs, directories and what was seen so far.
pub struct Bench<'o> {
    pub options: &'o Options,
    rcompile: PathBuf,
    make_model: PathBuf,
    /// This program, for its part that measures limits.
    bench: PathBuf,
    /// Numbers of threads: one, and all cores.
    pub threads: Vec<usize>,
    pub record: Record,
    date: String,
    commit: String,
    /// Measures reads; started with the first.
    reader: Option<Turns>,
    /// Executables that were built in this run.
    built: Vec<&'static str>,
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
        let record = if options.add { Record::load(&options.dir.join(crate::RECORD))? } else { Record::default() };
        let (date, commit) = (machine::date(), machine::commit());
        Ok(Self { options, rcompile, make_model, bench, threads, record, date, commit, reader: None, built: Vec::new() })
    }

    pub fn rounds(&self) -> usize {
        if self.options.quick { 1 } else { self.options.rounds }
    }

    /// Measures what was asked for; nothing with `--rounds 0`, which only writes the report of an earlier run.
    pub fn run(&mut self) -> Outcome<()> {
        for round in 1..=self.rounds() {
            eprintln!("bench: round {round} of {}", self.rounds());
            for topic in Topic::ALL.into_iter().filter(|&t| self.options.wants(t)) {
                if round > topic.rounds_max() {
                    continue;
                }
                if topic.about().is_none() {
                    self.begin(topic);
                }
                match topic {
                    Topic::Build => compiler::build(self)?,
                    Topic::Depth => compiler::depth(self)?,
                    Topic::Start => start::measure(self)?,
                    Topic::Rows => rows::measure(self)?,
                    topic => work::measure(self, topic)?,
                }
                self.record.save(&self.options.dir.join(crate::RECORD))?;
            }
        }
        Ok(())
    }

    /// Values that follow belong together. Topics with rates begin a round for each of their turns.
    pub fn begin(&mut self, topic: Topic) {
        self.record.begin(&topic.name(), self.date.clone(), self.commit.clone());
    }

    pub fn turns(&self) -> usize {
        if self.options.quick { 1 } else { self.options.turns }
    }

    pub fn sections(&self) -> Vec<Section> {
        let mut sections = vec![work::limits_section(self)];
        sections.extend(Topic::ALL.into_iter().flat_map(|topic| work::section(self, topic)));
        sections.extend(start::sections(self));
        sections.extend(compiler::sections(self));
        sections.push(rows::section(self));
        sections.retain(|s| s.figures.iter().any(|f| !f.samples.is_empty()));
        sections
    }

    pub fn most_threads(&self) -> usize {
        *self.threads.last().expect("there is at least one")
    }

    /// Cores for so many threads, as `taskset -c` takes them.
    pub fn cores(&self, threads: usize) -> String {
        let cores: Vec<String> = machine::physical_cores().iter().take(threads).map(ToString::to_string).collect();
        cores.join(",")
    }

    // --- Making

    /// The directory of a model, which is made unless an earlier run did.
    pub fn model(&mut self, name: &str, words: &[&str]) -> Outcome<PathBuf> {
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

    /// The path of an executable, which is built once per run; with `--reuse` one that is there is taken.
    pub fn executable(&mut self, name: &str) -> Outcome<PathBuf> {
        let found = find(name);
        let out = self.options.dir.join(found.name);
        let kept = self.options.reuse && out.is_file();
        if !kept && !self.built.contains(&found.name) {
            let model = self.model(found.model.0, found.model.1)?;
            self.build(&model, &out, found.flags)?;
            self.built.push(found.name);
        }
        Ok(out)
    }

    /// Builds an executable, watched; returns the report of the compiler, too.
    pub fn build(&mut self, model: &Path, out: &Path, flags: &[&str]) -> Outcome<(Run, Value)> {
        // The goal is for files in the page cache.
        io::copy(&mut File::open(model.join("model.safetensors"))?, &mut io::sink())?;
        let mut args = args(["build", "--json", "--quiet"]);
        args.extend(["--model".into(), model.into(), "-o".into(), out.into()]);
        args.extend(flags.iter().map(OsString::from));
        let program = self.rcompile.clone();
        let run = self.watched(&program, &args, true)?;
        let report: Value = serde_json::from_str(&run.stdout)?;
        eprintln!("bench: {} built in {:.1} s", out.display(), run.wall_ms / 1e3);
        Ok((run, report))
    }

    /// What an executable says about itself.
    pub fn info(&mut self, out: &Path) -> Outcome<Value> {
        Ok(serde_json::from_str(&self.start(out, &args(["info", "--json"]))?.stdout)?)
    }

    // --- Measuring

    pub fn start(&mut self, program: &Path, args: &[OsString]) -> Outcome<Run> {
        self.watched(program, args, false)
    }

    /// Runs a program on the cores for so many threads.
    pub fn pinned(&mut self, program: &Path, words: &[OsString], threads: usize) -> Outcome<Run> {
        self.start(Path::new(TASKSET), &self.on_cores(program, words, threads))
    }

    /// Starts a program on the cores for so many threads that stays and answers.
    pub fn staying(&mut self, name: &str, program: &Path, words: &[OsString], threads: usize) -> Outcome<Turns> {
        let (taskset, words) = (Path::new(TASKSET), self.on_cores(program, words, threads));
        self.note(taskset, &words);
        Ok(Turns::start(taskset, &words, self.options.dir.join(format!("stderr {name}.log")))?)
    }

    /// Arguments of `taskset`.
    fn on_cores(&self, program: &Path, words: &[OsString], threads: usize) -> Vec<OsString> {
        let mut all = args(["-c", &self.cores(threads)]);
        all.push(program.into());
        all.extend(words.iter().cloned());
        all
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
        let mut command = process::shown(&typed, args).replace(&dir, "");
        if let Some(peers) = &self.options.peers {
            command = command.replace(crate::peers::SCRIPTS, "tests/peers").replace(&peers.display().to_string(), "PEERS");
        }
        if !self.record.commands.contains(&command) {
            self.record.commands.push(command);
        }
    }

    /// Keeps a problem for the report, once.
    pub fn problem(&mut self, problem: String) {
        eprintln!("bench: {problem}");
        if !self.record.problems.contains(&problem) {
            self.record.problems.push(problem);
        }
    }

    /// GB/s that so many threads can read, of anonymous memory and of a mapped file, by name.
    pub fn reads(&mut self, threads: usize, file: &Path) -> Outcome<Vec<(String, f64)>> {
        if self.reader.is_none() {
            let (bench, words) = (self.bench.clone(), args(["limits", "--turns"]));
            self.note(&bench, &words);
            self.reader = Some(Turns::start(&bench, &words, self.options.dir.join("stderr limits.log"))?);
        }
        let reader = self.reader.as_mut().expect("just started");
        limits_in(&reader.turn(&format!("{threads} {}", file.display()))?)
    }

    /// Processor time of all processes of the machine, and of the benchmark's own, among which the reader stays, in seconds.
    pub fn processor_seconds(&self) -> (f64, f64) {
        let (all, own) = machine::processor_seconds();
        (all, own + self.reader.as_ref().map_or(0.0, |reader| machine::seconds_of(reader.process())))
    }

    /// GFLOP/s of instructions with so many threads, by name.
    pub fn peaks(&mut self, threads: usize) -> Outcome<Vec<(String, f64)>> {
        let bench = self.bench.clone();
        let run = self.start(&bench, &args(["limits", "--peaks", "--threads", &threads.to_string()]))?;
        limits_in(&run.stdout)
    }

    /// Waits until memory that a process has left is no longer given back to the host of a virtual machine: the kernel begins with it two
    /// seconds later, and whoever reads meanwhile reads a third less.
    pub fn settle(&self) {
        std::thread::sleep(Duration::from_secs(4));
    }
}

/// Name and value of each limit in lines of `bench limits`.
fn limits_in(lines: &str) -> Outcome<Vec<(String, f64)>> {
    let limit = |line: &str| -> Outcome<_> {
        let limit: Value = serde_json::from_str(line)?;
        Ok((limit["limit"].as_str().unwrap_or_default().to_owned(), float(&limit["value"])))
    };
    lines.lines().filter(|line| !line.is_empty()).map(limit).collect()
}

/// An executable of the table.
pub fn find(name: &str) -> &'static Executable {
    EXECUTABLES.iter().find(|e| e.name == name).expect("topics name executables of the table")
}

/// A test of `OUT bench -o jsonl` or of a peer's driver, which print the same fields.
pub struct Rate {
    pub test: String,
    /// The median of the repetitions, as the two below.
    pub tokens_per_s: f64,
    pub gb_per_s: f64,
    pub gflop_per_s: f64,
    /// Largest resident memory so far, in bytes.
    pub rss_bytes: f64,
    /// What a peer calls itself.
    pub engine: Option<String>,
}

/// The tests that a run of `bench` printed.
pub fn rates(run: &Run) -> Outcome<Vec<Rate>> {
    run.stdout.lines().filter(|line| line.starts_with('{')).map(rate).collect()
}

/// A test as printed; several repetitions count as their median.
pub fn rate(line: &str) -> Outcome<Rate> {
    let row: Value = serde_json::from_str(line)?;
    let samples: Samples = row["samples_ts"].as_array().into_iter().flatten().map(float).collect();
    let tokens_per_s = samples.median();
    // What is printed is of the mean time.
    let seconds_per_token = samples.values().iter().map(|rate| 1.0 / rate).sum::<f64>() / samples.values().len() as f64;
    let of_median = |field: &str| float(&row[field]) * seconds_per_token * tokens_per_s;
    Ok(Rate {
        test: row["test"].as_str().unwrap_or_default().into(),
        tokens_per_s,
        gb_per_s: of_median("gb_per_s"),
        gflop_per_s: of_median("gflop_per_s"),
        rss_bytes: float(&row["rss_bytes"]),
        engine: row["engine"].as_str().map(String::from),
    })
}

pub fn of_threads(threads: usize) -> String {
    if threads == 1 { "1 thread".into() } else { format!("{threads} threads") }
}

/// A number of a report; NaN where it is missing, which is not recorded.
pub fn float(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three repetitions of 100 tokens, of which one was slow: 1, 1 and 4 s, 300 tokens in 6 s.
    #[test]
    fn rates_are_of_the_median() {
        let rate = rate(r#"{"test": "pp100", "samples_ts": [100, 100, 25], "gb_per_s": 5, "gflop_per_s": 50, "rss_bytes": 7}"#).unwrap();
        assert_eq!((rate.tokens_per_s, rate.rss_bytes), (100.0, 7.0));
        assert!((rate.gb_per_s - 10.0).abs() < 1e-9 && (rate.gflop_per_s - 100.0).abs() < 1e-9, "{} {}", rate.gb_per_s, rate.gflop_per_s);
    }
}
