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

mod limits;
mod machine;
mod measure;
mod process;
mod stats;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde_json::json;

use measure::Bench;
use stats::Section;

/// What a run is asked for.
#[derive(Parser)]
#[command(name = "bench", about = "Benchmark of rcompile on a model of the shape of Llama 3.2 1B", args_conflicts_with_subcommands = true)]
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
    },
}

/// Options of a whole run.
#[derive(clap::Args)]
pub struct Options {
    /// The compiler; default: beside this program
    #[arg(long, value_name = "PATH")]
    rcompile: Option<PathBuf>,
    /// Where models and executables are made and kept (11 GB)
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    dir: PathBuf,
    /// Rounds; every figure is the median over them
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// One round with shorter texts
    #[arg(long)]
    quick: bool,
    /// Use executables of an earlier run; their builds are not measured
    #[arg(long)]
    reuse: bool,
    /// Only these parts
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Topic>,
    /// Write the report between the marks in this file too (docs/benchmarks.md)
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// A remark for the report, such as what else ran on the machine
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
}

/// Parts of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Topic {
    /// Time and memory of the compiler, size of the executable
    Build,
    /// Prefill and decode against the limits of the machine
    Speed,
    /// Time to the first token, resident memory
    Start,
    /// Time of rows within a bucket, and of large against small buckets
    Rows,
    /// Code and compile time against the number of layers
    Depth,
}

impl Options {
    /// Is this part of the benchmark asked for?
    pub fn wants(&self, topic: Topic) -> bool {
        self.only.is_empty() || self.only.contains(&topic)
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match args.part {
        Some(Part::Limits { threads }) => {
            limits::run(&threads);
            Ok(())
        }
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
    let sections = bench.run()?;
    facts.push(("load average at the end", machine::load_average()));
    facts.push(("rounds", bench.rounds().to_string()));
    if let Some(note) = &options.note {
        facts.push(("remark", note.clone()));
    }

    for (name, value) in &facts {
        println!("{name}: {value}");
    }
    for section in &sections {
        println!("\n{}", section.text().trim_end());
    }
    for problem in bench.problems() {
        println!("\nPROBLEM: {problem}");
    }

    let report = report(&facts, &sections, bench.problems(), bench.commands());
    let path = options.dir.join("report.md");
    std::fs::write(&path, &report).map_err(|e| format!("{}: {e}", path.display()))?;
    let figures = sections.iter().flat_map(|s| s.figures.iter().map(move |f| (s, f)));
    let samples: Vec<_> =
        figures.map(|(s, f)| json!({"section": s.title, "figure": f.name, "unit": f.unit, "samples": f.samples.values()})).collect();
    let facts: serde_json::Map<_, _> = facts.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    let raw = serde_json::to_string_pretty(&json!({"machine": facts, "figures": samples}))?;
    std::fs::write(options.dir.join("samples.json"), raw)?;
    eprintln!("bench: report in {}, all samples in samples.json beside it", path.display());
    if let Some(file) = &options.write {
        write_between_marks(file, &report)?;
        eprintln!("bench: report written into {}", file.display());
    }
    Ok(())
}

fn report(facts: &[(&str, String)], sections: &[Section], problems: &[String], commands: &[String]) -> String {
    let mut out = String::from("#### Machine\n\n| | |\n|---|---|\n");
    for (name, value) in facts {
        out += &format!("| {name} | {value} |\n");
    }
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
