//! The benchmark of `rcompile`: `./x bench`, described in `docs/benchmarks.md`.
//!
//! ```text
//! make-model --> model directories --rcompile build--> executables   figures: time, memory, sizes of the builds
//!                                                           |
//! rounds:  limits of the machine, bench, generate, info <---+        figures: rates and share of the limit, start, memory
//!                          |
//!                          +--> table on stdout, DIR/report.md, DIR/samples.json, and the marked part of --write FILE
//! ```
//! Everything is measured from outside, in the processes that a user would start. What is compared is measured in the same
//! round, since machines drift; a figure is the median over the rounds, with minimum and maximum beside it. A goal that is
//! missed is marked, but is no failure: timed tests fail on busy machines.

mod bandwidth;
mod compiler;
mod limits;
mod machine;
mod measure;
mod peers;
mod process;
mod record;
mod rows;
mod start;
mod stats;
mod work;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use measure::Bench;
use stats::Section;

/// What a run is asked for.
#[derive(Parser)]
#[command(name = "bench", about = "Benchmark of rcompile on models of real shapes", args_conflicts_with_subcommands = true)]
#[command(args_override_self = true)]
struct Args {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    options: Options,
}

#[derive(Subcommand)]
enum Part {
    /// Only measure the limits of the machine, as JSON lines
    Limits {
        /// Numbers of threads
        #[arg(long, value_delimiter = ',', default_value = "1,2")]
        threads: Vec<usize>,
        /// Read this file too, mapped; an executable with its weights, for instance
        #[arg(long, value_name = "PATH")]
        file: Option<PathBuf>,
        /// Only the peaks of instructions
        #[arg(long)]
        peaks: bool,
        /// Only reads, for about a second, for every line `THREADS FILE` on stdin
        #[arg(long)]
        turns: bool,
    },
}

/// Options of a whole run.
#[derive(clap::Args)]
pub struct Options {
    /// The compiler; default: beside this program
    #[arg(long, value_name = "PATH")]
    rcompile: Option<PathBuf>,
    /// Where models and executables are made and kept (30 GB for all topics)
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    dir: PathBuf,
    /// Rounds; every figure is the median over them. 0 only writes the report of the record that is there
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Times that the engines of a round take turns at a rate; nine turns in all are enough for a claim
    #[arg(long, default_value_t = 3)]
    turns: usize,
    /// One round of one turn, with shorter texts
    #[arg(long)]
    quick: bool,
    /// Use executables of an earlier run
    #[arg(long)]
    reuse: bool,
    /// Add rounds to the record of an earlier run, so that a long benchmark can be made in pieces
    #[arg(long)]
    add: bool,
    /// Only these topics [default: all but those that take long: quantised, long, avx2]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Topic>,
    /// Of the topics with rates only work whose name contains this text; can be repeated
    #[arg(long = "match", value_name = "TEXT")]
    matches: Vec<String>,
    /// Measure other engines in the same rounds; how to make the directory: docs/benchmarks.md
    #[arg(long, value_name = "DIR", value_parser = |dir: &str| std::path::absolute(dir))]
    peers: Option<PathBuf>,
    /// Of the other engines only this one; can be repeated
    #[arg(long = "engine", value_name = "NAME")]
    engines: Vec<String>,
    /// Write the report between the marks in this file too (docs/report-*.md)
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// A remark for the report, such as what else ran on the machine
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
}

/// Parts of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Topic {
    /// Time and memory of the compiler, size of the executable
    Build,
    /// Prompts of 512 and 128 tokens, bf16 and f32
    Prefill,
    /// Single tokens after 128 and 512, bf16 and f32
    Decode,
    /// Single tokens of 4 and 32 sequences
    Batch,
    /// int8 and int4 weights: prompts, single tokens, 4 and 32 sequences
    Quantised,
    /// Prompts of 2048 and 8192, decode after 8192, attention alone
    Long,
    /// The same for a CPU without AVX-512
    Avx2,
    /// BERT base, 1 and 8 texts of 128 tokens
    Bert,
    /// GPT-2 (124 million weights), prompt of 128 and decode
    Gpt2,
    /// Time to the first token, resident memory
    Start,
    /// Time of rows within a bucket, and of large against small buckets
    Rows,
    /// Code and compile time against the number of layers
    Depth,
}

impl Topic {
    const ALL: [Self; 12] = [
        Self::Build,
        Self::Prefill,
        Self::Decode,
        Self::Batch,
        Self::Quantised,
        Self::Long,
        Self::Avx2,
        Self::Bert,
        Self::Gpt2,
        Self::Start,
        Self::Rows,
        Self::Depth,
    ];

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Rounds that are enough where one takes minutes.
    fn rounds_max(self) -> usize {
        match self {
            Self::Long => 1,
            Self::Build | Self::Depth => 3,
            _ => usize::MAX,
        }
    }

    /// Title and note of the section of a topic with rates.
    fn about(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Self::Prefill => (
                "Prefill of llama-1b",
                "Tokens of a prompt in one call, logits of its last position. Shares: flops of matmuls and attention over the peak of \
                 the instruction that the executable computes with; what the last layer leaves out, since only logits need it, does not count \
                 (and is counted beside it, for comparison with engines that leave out nothing).",
            ),
            Self::Decode => (
                "Decode of llama-1b",
                "12 steps of one token each after so many tokens. Shares: bytes of weights and KV cache per second over the limit of \
                 reading; the best rate of all counts what the rates of other engines mean in bytes of the same weights, too.",
            ),
            Self::Batch => (
                "Decode of several sequences, llama-1b with `--parallel 32`",
                "8 steps, each with one token of every sequence, after 16 tokens; tokens per second of all sequences together.",
            ),
            Self::Quantised => (
                "int8 and int4 weights of llama-1b",
                "As above. int8: a scale per output channel; int4: groups of 32 and an int4 head unless the name says otherwise. Shares of \
                 prefill: of VPDPBUSD (without VNNI: VPMADDUBSW and VPADDW; with AMX: TDPBSUD), with attention in it. Peers: Q8_0 and Q4_0 (llama.cpp), int8 and int4 by 32 with an int8 head \
                 (OpenVINO).",
            ),
            Self::Long => (
                "Long contexts of llama-1b",
                "Attention alone: 512 rows behind 7680 keys minus 512 rows behind none, flops of all keys; 4 of the 16 layers where the \
                 name says so.",
            ),
            Self::Avx2 => ("Built for AVX2 only (`--cpu x86-64-v3`), llama-1b", "As above, over the peak of the 256-bit FMA."),
            Self::Bert => (
                "BERT base",
                "Texts of 128 tokens in one call, median of 5 calls in each turn; built with `--buckets 128,1024`. Peers have static \
                 shapes.",
            ),
            Self::Gpt2 => ("GPT-2 of 124 million weights", "As for llama-1b; median of 5 calls in each turn."),
            Self::Build | Self::Start | Self::Rows | Self::Depth => return None,
        })
    }
}

/// The file of all samples, in the directory of the benchmark.
pub const RECORD: &str = "samples.json";

impl Options {
    /// Is this part of the benchmark asked for?
    pub fn wants(&self, topic: Topic) -> bool {
        match self.only.is_empty() {
            true => !matches!(topic, Topic::Long | Topic::Avx2 | Topic::Quantised),
            false => self.only.contains(&topic),
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match args.part {
        Some(Part::Limits { turns: true, .. }) => limits::turns(),
        Some(Part::Limits { threads, file, peaks, .. }) => limits::run(&threads, file.as_deref(), peaks),
        None => bench(&args.options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bench(options: &Options) -> Result<(), Box<dyn Error>> {
    let mut facts = machine::facts();
    let mut bench = Bench::new(options)?;
    bench.run()?;
    let record = &bench.record;
    facts.extend(record.facts.iter().map(|(name, value)| (name.clone(), value.clone())));
    for (topic, (rounds, first, last, commits)) in record.history() {
        facts.push((format!("rounds of {topic}"), format!("{rounds}, {first} to {last}, commit {}", commits.join(", "))));
    }
    if let Some(note) = &options.note {
        facts.push(("remark".into(), note.clone()));
    }

    let sections = bench.sections();
    for (name, value) in &facts {
        println!("{name}: {value}");
    }
    for section in &sections {
        println!("\n{}", section.text().trim_end());
    }
    for problem in &record.problems {
        println!("\nPROBLEM: {problem}");
    }

    let report = report(&facts, &work::summary(&bench), &sections, &record.problems, &record.commands);
    let path = options.dir.join("report.md");
    std::fs::write(&path, &report).map_err(|e| format!("{}: {e}", path.display()))?;
    eprintln!("bench: report in {}, all samples in {RECORD} beside it", path.display());
    if let Some(file) = &options.write {
        write_between_marks(file, &report)?;
        eprintln!("bench: report written into {}", file.display());
    }
    Ok(())
}

fn report(facts: &[(String, String)], summary: &str, sections: &[Section], problems: &[String], commands: &[String]) -> String {
    let mut out = String::from("#### Machine\n\n| | |\n|---|---|\n");
    for (name, value) in facts {
        out += &format!("| {name} | {value} |\n");
    }
    out += &format!("\n#### Targets\n\n{summary}");
    for section in sections {
        out += &format!("\n{}", section.markdown());
    }
    for problem in problems {
        out += &format!("\n**Problem:** {problem}\n");
    }
    out += "\n#### Commands\nIn the order of their first use, in the directory of the benchmark (`--dir`).\n\n```sh\n";
    for command in commands {
        out += &format!("{command}\n");
    }
    out + "```\n"
}

const BEGIN: &str = "<!-- bench: begin -->\n";
const END: &str = "<!-- bench: end -->\n";

/// Replaces what stands between the two marks of a file.
fn write_between_marks(file: &Path, report: &str) -> Result<(), Box<dyn Error>> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let marks = text.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) = marks.ok_or_else(|| format!("{}: expected the lines {BEGIN:?} and {END:?}", file.display()))?;
    std::fs::write(file, format!("{before}{BEGIN}\n{report}\n{END}{after}"))?;
    Ok(())
}
