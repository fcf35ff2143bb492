//! The command line of `rcompile`: clap types, and their values checked.
//!
//! In: arguments. Out: [`Command`]. Flags that belong to the contract but whose feature does not exist yet are known
//! here and refused by name with exit code 6, never accepted in silence.

use crate::error::Error;
use crate::passes::quantise::{Choice, Quantisation};
use clap::{Args, Parser, Subcommand, ValueEnum};
use rcompile_codegen::isa::FOREIGN;
use rcompile_graph::{DType, Group};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Buckets beyond this many rows are refused: the arena grows with them.
const MAX_BUCKET: u32 = 1 << 16;
/// More buckets than this are refused: each has code of its own.
const MAX_BUCKETS: usize = 64;

/// The end of `--help`.
const EXIT_CODES: &str = "Exit codes: 0 ok, 2 usage, 3 input missing or outside the model directory, 4 malformed bytes, 5 parts disagree,
6 well-formed but unsupported, 7 a limit, 8 output or toolchain, 70 internal bug, 129, 130 and 143 signals.";

/// Compiles a Hugging Face model directory into one standalone executable.
#[derive(Debug, Parser)]
#[command(name = "rcompile", version, about, max_term_width = 120, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compile a model directory into an executable
    Build(Box<Build>),
    /// Show what is inside a model directory or an executable
    Inspect(Inspect),
    /// Compare what two executables make of a text: divergence, same best token, perplexity
    Compare(Compare),
    /// Show or clean the compile cache
    Cache(CacheVerb),
    /// List triples and CPUs, and which runtimes and linkers are present
    Targets(Listing),
    /// Check that everything needed is installed
    Doctor(Listing),
}

/// `rcompile targets`, `rcompile doctor`.
#[derive(Debug, Args)]
pub struct Listing {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `rcompile inspect`.
#[derive(Debug, Args)]
pub struct Inspect {
    /// Model directory or executable
    #[arg(value_name = "DIR|OUT")]
    pub path: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Bound the speed on 1 to 96 cores, as many as a socket has, from the program: bytes, operations and barriers, region by region
    #[arg(long)]
    pub scaling: bool,
    /// --scaling: read bandwidth of the socket [default: the table's for the CPU]
    #[arg(long, value_name = "GB/s", value_parser = parse_bandwidth, requires = "scaling")]
    pub bandwidth: Option<f64>,
    /// Of a directory: CPU to plan for [default: as `build`]
    #[arg(long, value_name = "NAME")]
    pub cpu: Option<String>,
    /// Of a directory: triple to plan for [default: the host's]
    #[arg(long, value_name = "TRIPLE")]
    pub target: Option<String>,
}

/// `rcompile compare`.
#[derive(Debug, Args)]
pub struct Compare {
    /// Executable that is the reference
    pub a: PathBuf,
    /// Executable that is measured against it
    pub b: PathBuf,
    /// Text that both read; of embedding models each line is a text
    #[arg(short = 'f', long = "file", value_name = "TEXT")]
    pub text: PathBuf,
    /// Tokens per window, as `OUT perplexity -c` [default: the shorter context, at most 512]
    #[arg(short = 'c', long, value_name = "WINDOW", value_parser = clap::value_parser!(u32).range(2..))]
    pub window: Option<u32>,
    /// Most windows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunks: Option<u32>,
    /// Threads of each executable [default: its own]
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// No progress; the result and errors only
    #[arg(long)]
    pub quiet: bool,
}

/// `rcompile cache`.
#[derive(Debug, Args)]
pub struct CacheVerb {
    /// What to do with it
    #[arg(value_enum, default_value_t = CacheAction::List)]
    pub action: CacheAction,
    /// Directory of the cache [default: $XDG_CACHE_HOME/rcompile or ~/.cache/rcompile]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `rcompile cache ACTION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CacheAction {
    /// Print what is kept, most recently used first
    List,
    /// Remove everything
    Clean,
}

/// The cache of a build.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Cache")]
pub struct CacheOptions {
    /// Keep generated objects in this directory [default: $XDG_CACHE_HOME/rcompile or ~/.cache/rcompile]
    #[arg(long, value_name = "DIR", conflicts_with = "no_cache")]
    pub cache_dir: Option<PathBuf>,
    /// Compile everything, keep nothing
    #[arg(long)]
    pub no_cache: bool,
    /// Keep the packed weights too, which are as large as the executable
    #[arg(long, conflicts_with = "no_cache")]
    pub cache_weights: bool,
}

/// Groups of `rcompile build --help`.
mod heading {
    pub const SHAPES: &str = "Shapes";
    pub const TYPES: &str = "Types";
    pub const TARGET: &str = "Target";
    pub const SPEED: &str = "Optimisation";
    pub const STAGES: &str = "Stages";
    pub const PLACE: &str = "Executable";
    pub const CHECKS: &str = "Checks";
}

/// `rcompile build`.
#[derive(Clone, Debug, Args)]
pub struct Build {
    /// Hugging Face model directory
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Executable to write
    #[arg(short, long = "output", value_name = "OUT")]
    pub output: Option<PathBuf>,
    /// Threads that compile and pack [default: all CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub jobs: Option<u32>,
    /// Print the report as JSON on stdout
    #[arg(long)]
    pub json: bool,
    /// No progress, no report; errors and what is asked for only
    #[arg(long)]
    pub quiet: bool,
    /// Rows per step: `1,8,64,512`, `8-512*8`, `8-64+8`
    #[arg(help_heading = heading::SHAPES, long, value_name = "LIST", default_value = "1,8,64,512", value_parser = parse_buckets)]
    pub buckets: Buckets,
    /// Positions per sequence [default: the model's maximum, at most 4096]
    #[arg(help_heading = heading::SHAPES, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx_size: Option<u32>,
    /// Sequence slots; of an encoder texts side by side in a step [default: 1, of an encoder 16]
    #[arg(help_heading = heading::SHAPES, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub parallel: Option<u32>,
    /// What the executable does
    #[arg(help_heading = heading::SHAPES, long, value_enum, default_value_t = TaskChoice::Auto)]
    pub task: TaskChoice,
    /// Read neither tokenizer nor chat template: the executable takes token ids only
    #[arg(help_heading = heading::SHAPES, long)]
    pub no_tokenizer: bool,

    /// Type of the stored weights (auto: as in the checkpoint)
    #[arg(help_heading = heading::TYPES, long, value_enum, default_value_t = WeightType::Auto)]
    pub dtype: WeightType,
    /// Type that matmul inputs are rounded to
    #[arg(help_heading = heading::TYPES, long, value_enum, default_value_t = ComputeType::Auto)]
    pub compute: ComputeType,
    /// Type of the KV cache
    #[arg(help_heading = heading::TYPES, long, value_enum, default_value_t = ComputeType::Auto)]
    pub kv_dtype: ComputeType,

    /// Codes in place of weights.
    #[command(flatten)]
    pub quantize: Quantize,

    /// Target triple [default: this machine's]
    #[arg(help_heading = heading::TARGET, long, value_name = "TRIPLE", default_value = rcompile_codegen::isa::HOST_TRIPLE, hide_default_value = true)]
    pub target: String,
    /// CPU to compile for; see `rcompile targets` [default: native, and one that runs everywhere for another architecture]
    #[arg(help_heading = heading::TARGET, long, default_value = "native", default_value_if("target", FOREIGN.0, FOREIGN.1), hide_default_value = true)]
    pub cpu: String,
    /// CPU features to add or to leave out
    #[arg(help_heading = heading::TARGET, long, value_name = "+A,-B", value_delimiter = ',', allow_hyphen_values = true, value_parser = parse_edit)]
    pub cpu_features: Vec<Edit>,
    /// Cores that prompts' attention is cut for; any number of threads runs it [default: this machine's, of a named CPU those of a
    /// socket of its largest machine]
    #[arg(help_heading = heading::TARGET, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub cores: Option<u32>,

    /// Optimisation level 0 to 3
    #[arg(help_heading = heading::SPEED, short = 'O', value_name = "LEVEL", default_value_t = 3, value_parser = parse_level)]
    pub opt_level: u8,
    /// Passes to add or to leave out
    #[arg(help_heading = heading::SPEED, long, value_name = "+A,-B", value_delimiter = ',', allow_hyphen_values = true, value_parser = parse_edit)]
    pub passes: Vec<Edit>,

    /// Measure a few tiles on this machine and keep the best
    #[arg(help_heading = heading::SPEED, long, value_enum, default_value_t = Autotune::Off)]
    pub autotune: Autotune,
    /// Tiles measured earlier; with --autotune fast this file is written
    #[arg(help_heading = heading::SPEED, long, value_name = "FILE")]
    pub tuning: Option<PathBuf>,

    /// What to write: exe, graph, program, llvm-ir, asm, obj; `=PATH` for a file or directory of its own
    #[arg(help_heading = heading::STAGES, long, value_name = "KIND[=PATH]", value_delimiter = ',', default_value = "exe", value_parser = parse_emit)]
    pub emit: Vec<Emit>,
    /// Stop after open, trace, passes, plan or codegen, or after a pass (`--timings` names them)
    #[arg(help_heading = heading::STAGES, long, value_name = "STAGE|PASS")]
    pub stop_after: Option<String>,
    /// Write the graph after each pass that changed it, and the programs, into this directory
    #[arg(help_heading = heading::STAGES, long, value_name = "DIR")]
    pub dump_dir: Option<PathBuf>,
    /// Also check that a pass which reports no change made none (after a reported change the graph is always verified)
    #[arg(help_heading = heading::STAGES, long)]
    pub verify_each: bool,
    /// Print why passes did or did not apply
    #[arg(help_heading = heading::STAGES, long)]
    pub explain: bool,
    /// Also print the time of every pass, and what came from the cache
    #[arg(help_heading = heading::STAGES, long)]
    pub timings: bool,
    /// Keep objects, entry stub and the command line of the linker in `OUT.temps`
    #[arg(help_heading = heading::STAGES, long)]
    pub save_temps: bool,

    /// Weights inside the executable, or beside it in `OUT.weights`
    #[arg(help_heading = heading::PLACE, long, value_enum, default_value_t = WeightsPlace::Embed)]
    pub weights: WeightsPlace,
    /// Link mode
    #[arg(help_heading = heading::PLACE, long, value_enum, default_value_t = LinkMode::Static)]
    pub link: LinkMode,
    /// Where objects of earlier builds are.
    #[command(flatten)]
    pub cache: CacheOptions,
    /// Check and plan everything, write nothing
    #[arg(help_heading = heading::STAGES, long)]
    pub dry_run: bool,
    /// Refuse tensors that the model does not use, instead of a warning
    #[arg(help_heading = heading::CHECKS, long)]
    pub strict: bool,
    /// Accept NaN and infinity in weights
    #[arg(help_heading = heading::CHECKS, long)]
    pub allow_nonfinite: bool,
}

/// How weights become codes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Quantised weights")]
pub struct Quantize {
    /// Weights of linear layers as codes: int8 with a scale per output, int4 with a scale per group
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = CodeType::None)]
    pub quantize: CodeType,
    /// Elements that share a scale of --quantize int4 [default: 32]
    #[arg(long, value_name = "32|64|128", value_parser = parse_group)]
    pub group_size: Option<Group>,
    /// The head's weights, and a tied embedding's [default: int8 with --quantize, else none]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub quantize_head: Option<CodeType>,
    /// Keep tensors of the checkpoint out: a name, `*` and `?` allowed, and the type to store them in (`auto`, f32, f16, bf16)
    #[arg(long, value_name = "PATTERN=TYPE", value_parser = parse_keep)]
    pub keep: Vec<Keep>,
    /// Choose the codes by what the model computes on this text (GPTQ), not by rounding to nearest
    #[arg(long, value_name = "FILE")]
    pub calibrate: Option<PathBuf>,
    /// With --calibrate: choose the codes of columns with the largest inputs first
    #[arg(long)]
    pub act_order: bool,
}

/// `--quantize`, `--quantize-head`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum CodeType {
    None,
    Int8,
    Int4,
}

impl Quantize {
    fn check(&self) -> Result<(), Error> {
        let plan = self.plan();
        let usage = |what: &str, help: &str| Err(Error::Usage { what: what.into(), help: Some(help.into()) });
        let is_four = |dtype: Option<DType>| matches!(dtype, Some(DType::Q4(_)));
        if self.group_size.is_some() && !is_four(plan.body) && !is_four(plan.head) {
            let found = if plan.is_any() { "int8 alone" } else { "none" };
            let what = format!("--group-size without int4 weights, expected --quantize int4, found {found}");
            return usage(&what, "int8 has one scale per output");
        }
        if !self.keep.is_empty() && !plan.is_any() {
            return usage("--keep without quantised weights, expected --quantize, found none", "without it all weights are kept");
        }
        if self.calibrate.is_some() && plan.body.is_none() {
            return usage("--calibrate without quantised layers, expected --quantize, found none", "--quantize int4 --calibrate FILE");
        }
        if self.act_order && self.calibrate.is_none() {
            return usage("--act-order without a text, expected --calibrate FILE, found none", "codes are rounded to nearest without it");
        }
        Ok(())
    }

    /// For the pass; which tensors `--keep` names, the model says.
    pub fn plan(&self) -> Quantisation {
        let dtype = |code| match code {
            CodeType::None => None,
            CodeType::Int8 => Some(DType::Q8(Group::Row)),
            CodeType::Int4 => Some(DType::Q4(self.group_size.unwrap_or(Group::G32))),
        };
        let body = dtype(self.quantize);
        let head = self.quantize_head.unwrap_or(if body.is_some() { CodeType::Int8 } else { CodeType::None });
        let choice = if self.calibrate.is_some() { Choice::Calibrated } else { Choice::RoundToNearest };
        Quantisation { body, head: dtype(head), kept: BTreeMap::new(), choice }
    }
}

/// One `--keep PATTERN=TYPE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keep {
    /// Name of a tensor in the checkpoint; `*` stands for any characters, `?` for one.
    pub pattern: String,
    /// Type to store it in, `None` for the checkpoint's.
    pub dtype: Option<DType>,
}

impl Keep {
    /// Does the pattern stand for all of `name`?
    pub fn names(&self, name: &str) -> bool {
        let (p, n): (Vec<char>, Vec<char>) = (self.pattern.chars().collect(), name.chars().collect());
        // One row of the table of prefixes, so that no pattern takes exponential time.
        let mut row: Vec<bool> = vec![false; n.len() + 1];
        row[0] = true;
        for c in p {
            let mut next = vec![false; n.len() + 1];
            for i in 0..=n.len() {
                next[i] = match c {
                    '*' => row[i] || i > 0 && next[i - 1],
                    '?' => i > 0 && row[i - 1],
                    c => i > 0 && row[i - 1] && n[i - 1] == c,
                };
            }
            row = next;
        }
        row[n.len()]
    }
}

fn parse_group(text: &str) -> Result<Group, String> {
    text.parse().ok().and_then(Group::of).ok_or_else(|| "expected 32, 64 or 128".to_string())
}

fn parse_keep(text: &str) -> Result<Keep, String> {
    let (pattern, dtype) = text.rsplit_once('=').ok_or("expected PATTERN=TYPE, such as '*.down_proj.*=bf16'")?;
    let stored = WeightType::from_str(dtype, false).map_err(|_| format!("type: expected auto, f32, f16 or bf16, found '{dtype}'"))?;
    Ok(Keep { pattern: pattern.into(), dtype: stored.of_graph() })
}

/// Rows per step, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets(pub Vec<u32>);

/// `+name` or `-name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// True for `+`.
    pub add: bool,
    /// The name.
    pub name: String,
}

impl std::fmt::Display for Edit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", if self.add { '+' } else { '-' }, self.name)
    }
}

/// `--task`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum TaskChoice {
    Auto,
    Generate,
    Embed,
    #[value(hide = true)]
    Classify,
    #[value(hide = true)]
    Tag,
    #[value(hide = true)]
    FillMask,
    #[value(hide = true)]
    Answer,
    #[value(hide = true)]
    Rerank,
}

/// `--dtype`, and the types of `--keep`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum WeightType {
    Auto,
    F32,
    Bf16,
    F16,
}

impl WeightType {
    /// In the graph; `None`: the checkpoint's.
    pub fn of_graph(self) -> Option<DType> {
        match self {
            WeightType::Auto => None,
            WeightType::F32 => Some(DType::F32),
            WeightType::F16 => Some(DType::F16),
            WeightType::Bf16 => Some(DType::BF16),
        }
    }
}

/// `--compute`, `--kv-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum ComputeType {
    Auto,
    F32,
    Bf16,
    Int8,
}

/// `--weights`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum WeightsPlace {
    Embed,
    Split,
}

/// `--autotune`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum Autotune {
    Off,
    Fast,
}

/// `--link`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum LinkMode {
    Static,
    #[value(hide = true)]
    Dynamic,
}

/// One thing to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Emit {
    /// What.
    pub kind: EmitKind,
    /// Where, when it was said.
    pub path: Option<PathBuf>,
}

impl Emit {
    /// Whether it goes to stdout by name.
    pub fn to_stdout(&self) -> bool {
        self.path.as_deref().is_some_and(|path| path == Path::new("-") || path == Path::new("/dev/stdout"))
    }
}

/// Kinds of `--emit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum EmitKind {
    Exe,
    Graph,
    Program,
    LlvmIr,
    Asm,
    Obj,
}

impl EmitKind {
    /// As it is written.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl Build {
    /// Refuses what is known but not supported yet, and contradictions.
    pub fn check(&self) -> Result<(), Error> {
        if !matches!(self.task, TaskChoice::Auto | TaskChoice::Generate | TaskChoice::Embed) {
            let name = self.task.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
            return Err(not_yet(&format!("--task {name}"), "use --task auto, generate or embed"));
        }
        if self.link == LinkMode::Dynamic {
            return Err(not_yet("--link dynamic", "use --link static"));
        }
        self.quantize.check()?;
        let without = [
            (self.no_tokenizer, "--no-tokenizer", "leave --no-tokenizer out"),
            (self.allow_nonfinite, "--allow-nonfinite", "leave one of them out"),
        ];
        if let Some((_, flag, help)) = without.into_iter().find(|w| w.0 && self.quantize.calibrate.is_some()) {
            return Err(Error::Usage {
                what: format!("--calibrate runs the model over a text, which {flag} rules out"),
                help: Some(help.into()),
            });
        }
        if self.autotune == Autotune::Fast && !self.writes_exe() {
            return Err(Error::usage("build", "--autotune fast measures executables, expected -o OUT without --dry-run and --stop-after"));
        }
        let of_executables = [
            (self.save_temps, "--save-temps keeps what is linked"),
            (self.cache.cache_weights, "--cache-weights keeps what is packed"),
            (self.weights == WeightsPlace::Split, "--weights split writes weights beside an executable"),
        ];
        if let Some((_, what)) = of_executables.into_iter().find(|(given, _)| *given && !self.wants_exe()) {
            return Err(Error::usage("build", format!("{what}, expected an executable among what is written, found none")));
        }
        let exe = self.emit.iter().find(|e| e.kind == EmitKind::Exe);
        if exe.is_some_and(|e| e.path.is_some()) && self.output.is_some() {
            return Err(Error::usage("build", "-o and --emit exe=PATH name the executable twice"));
        }
        if exe.is_some_and(|e| e.path.is_some()) && self.stop_after.is_some() {
            return Err(Error::usage("build", "--emit exe=PATH writes an executable, which --stop-after rules out"));
        }
        if self.dry_run && self.dump_dir.is_some() {
            return Err(Error::usage("build", "--dump-dir writes files, which --dry-run rules out"));
        }
        for (i, emit) in self.emit.iter().enumerate() {
            if self.emit[..i].iter().any(|e| e.kind == emit.kind) {
                let name = emit.kind.name();
                return Err(Error::usage("build", format!("--emit names {name} twice, expected one of each kind")));
            }
        }
        if self.output.as_deref() == Some(Path::new("-")) {
            return Err(Error::usage("build", "-o: an executable is no text for stdout, expected a path, found -"));
        }
        let to_stdout = |kind| self.emits(kind).is_some_and(Emit::to_stdout);
        if to_stdout(EmitKind::Exe) || to_stdout(EmitKind::Obj) {
            return Err(Error::usage("build", "--emit exe and obj are no text for stdout, expected a path"));
        }
        if self.emits(EmitKind::Obj).is_some_and(|e| e.path.is_none()) && self.exe_path().is_none() {
            return Err(Error::usage("build", "--emit obj needs a directory, expected obj=DIR or -o OUT"));
        }
        if self.writes_exe() && self.exe_path().is_none() {
            return Err(Error::Usage {
                what: "no output, expected -o OUT, found none".into(),
                help: Some("rcompile build --model DIR -o OUT, or --dry-run, or --stop-after STAGE".into()),
            });
        }
        Ok(())
    }

    /// Will an executable be written?
    pub fn writes_exe(&self) -> bool {
        !self.dry_run && self.wants_exe()
    }

    /// The same, or would it be but for `--dry-run`?
    pub fn wants_exe(&self) -> bool {
        self.stop_after.is_none() && self.emits(EmitKind::Exe).is_some()
    }

    /// Where to.
    pub fn exe_path(&self) -> Option<&PathBuf> {
        self.emits(EmitKind::Exe).and_then(|e| e.path.as_ref()).or(self.output.as_ref())
    }

    /// The request for this kind.
    pub fn emits(&self, kind: EmitKind) -> Option<&Emit> {
        self.emit.iter().find(|e| e.kind == kind)
    }
}

/// The error for features of the contract that are still to come.
fn not_yet(place: &str, help: &str) -> Error {
    Error::Unsupported { place: place.into(), what: "is not supported yet".into(), help: Some(help.into()) }
}

/// What a command line asks for.
#[derive(Debug)]
pub enum Parsed {
    /// A verb.
    Run(Command),
    /// Text for stdout (`--help`, `--version`).
    Print(String),
}

/// Parses the arguments of the process. Errors: a wrong command line (2).
pub fn parse(args: impl IntoIterator<Item = std::ffi::OsString>) -> Result<Parsed, Error> {
    use clap::CommandFactory;
    use clap::error::ErrorKind;
    let args: Vec<_> = args.into_iter().collect();
    let verb = args.get(1).and_then(|verb| verb.to_str()).filter(|verb| Cli::command().find_subcommand(verb).is_some());
    match Cli::try_parse_from(&args) {
        Ok(cli) => Ok(Parsed::Run(cli.command)),
        Err(e) => match e.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Parsed::Print(e.to_string())),
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Err(Error::Usage {
                what: "no verb, expected build, inspect, compare, cache, targets or doctor".into(),
                help: Some("rcompile --help".into()),
            }),
            _ => {
                // clap's first paragraph is the message (sometimes with a list of missing arguments), the rest is advice.
                let text = e.to_string();
                let message = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
                let what = message.split_whitespace().collect::<Vec<_>>().join(" ");
                // Of clap's tips, the one that names a similar flag; else the help of the verb.
                let tip = text.lines().find_map(|l| l.trim().strip_prefix("tip: ").filter(|tip| tip.contains("similar")));
                let help = || match verb {
                    Some(verb) => format!("rcompile {verb} --help"),
                    None => "rcompile --help".into(),
                };
                Err(Error::Usage { what, help: Some(tip.map_or_else(help, str::to_string)) })
            }
        },
    }
}

fn parse_bandwidth(text: &str) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|x| x.is_finite() && *x > 0.0).ok_or_else(|| "expected a positive number".into())
}

fn parse_level(text: &str) -> Result<u8, String> {
    text.parse().ok().filter(|level| *level <= 3).ok_or_else(|| "expected 0, 1, 2 or 3".into())
}

fn parse_edit(text: &str) -> Result<Edit, String> {
    let (add, name) = match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(name), _) => (true, name),
        (_, Some(name)) => (false, name),
        _ => return Err("expected +NAME or -NAME".into()),
    };
    let ok = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if ok { Ok(Edit { add, name: name.into() }) } else { Err("expected +NAME or -NAME".into()) }
}

fn parse_emit(text: &str) -> Result<Emit, String> {
    let (kind, path) = match text.split_once('=') {
        Some((_, "")) => return Err("expected a path after '='".into()),
        Some((kind, path)) => (kind, Some(PathBuf::from(path))),
        None => (text, None),
    };
    let kind = EmitKind::from_str(kind, false).map_err(|_| "expected exe, graph, program, llvm-ir, asm or obj".to_string())?;
    Ok(Emit { kind, path })
}

/// `1,8,64`, `FIRST-LAST*FACTOR`, `FIRST-LAST+STEP`, and any mix with commas; the last value of a range is included.
fn parse_buckets(text: &str) -> Result<Buckets, String> {
    let number = |s: &str| match s.parse::<u32>() {
        Ok(n) if (1..=MAX_BUCKET).contains(&n) => Ok(n),
        _ => Err(format!("expected a number of rows from 1 to {MAX_BUCKET}, found '{s}'")),
    };
    let mut rows = Vec::new();
    for item in text.split(',') {
        let Some((first, rest)) = item.split_once('-') else {
            rows.push(number(item)?);
            continue;
        };
        let at = rest.find(['*', '+']).ok_or("expected FIRST-LAST*FACTOR or FIRST-LAST+STEP")?;
        let (first, last, step) = (number(first)?, number(&rest[..at])?, number(&rest[at + 1..])?);
        let times = rest.as_bytes()[at] == b'*';
        if first > last || (times && step < 2) {
            return Err(format!("'{item}' is no ascending range"));
        }
        // A range that is cut here has too many by itself.
        let (mut row, before) = (first, rows.len());
        while row < last && rows.len() - before <= MAX_BUCKETS {
            rows.push(row);
            row = if times { row.saturating_mul(step) } else { row.saturating_add(step) };
        }
        rows.push(last);
    }
    rows.sort_unstable();
    rows.dedup();
    if rows.len() > MAX_BUCKETS { Err(format!("more than {MAX_BUCKETS} buckets")) } else { Ok(Buckets(rows)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, name, want) in [
            ("lm_head.weight", "lm_head.weight", true),
            ("*.down_proj.*", "model.layers.3.mlp.down_proj.weight", true),
            ("model.layers.?.mlp*", "model.layers.3.mlp.up_proj.weight", true),
            ("model.layers.?.mlp*", "model.layers.13.mlp.up_proj.weight", false),
            ("*a*a*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", false),
            ("", "x", false),
            ("*", "", true),
        ] {
            assert_eq!(Keep { pattern: pattern.into(), dtype: None }.names(name), want, "{pattern} {name}");
        }
    }

    fn build(args: &str) -> Result<Build, Error> {
        let args = format!("rcompile build {args}");
        match parse(args.split_whitespace().map(Into::into))? {
            Parsed::Run(Command::Build(b)) => b.check().map(|()| *b),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn contract() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
        let b = build("--model m -o out --passes +a,-b-c --cpu-features -avx512bf16 -O2 --emit exe,asm=/x/y,graph").unwrap();
        assert_eq!(b.buckets.0, [1, 8, 64, 512]);
        assert_eq!(b.passes, [Edit { add: true, name: "a".into() }, Edit { add: false, name: "b-c".into() }]);
        assert_eq!(b.cpu_features[0].to_string(), "-avx512bf16");
        assert_eq!((b.opt_level, b.emit.len()), (2, 3));
        assert_eq!(b.emits(EmitKind::Asm).unwrap().path, Some("/x/y".into()));
    }

    #[test]
    fn cpu_by_default() {
        let cpu = |args: &str| build(&format!("--model m -o out {args}")).unwrap().cpu;
        let (target, portable) = FOREIGN;
        assert_eq!(cpu(""), "native");
        assert_eq!(cpu(&format!("--target {}", rcompile_codegen::isa::HOST_TRIPLE)), "native");
        assert_eq!(cpu(&format!("--target {target}")), portable);
        assert_eq!(cpu(&format!("--target {target} --cpu native")), "native");
    }

    #[test]
    fn buckets() {
        let p = |s: &str| parse_buckets(s).map(|b| b.0);
        assert_eq!(p("64,1,8,8").unwrap(), [1, 8, 64]);
        assert_eq!(p("1,8-512*8").unwrap(), [1, 8, 64, 512]);
        assert_eq!(p("8-32+8").unwrap(), [8, 16, 24, 32]);
        assert_eq!(p("8-100*8").unwrap(), [8, 64, 100]);
        assert_eq!(p("8-30+8").unwrap(), [8, 16, 24, 30]);
        assert_eq!(p("1-40+1,1-60+1").unwrap(), (1..=60).collect::<Vec<_>>());
        for bad in ["", "0", "-1", "1-", "8-4+1", "1-8*1", "1-8*0", "1-8+0", "4294967296", "65537", "1-65536+1", "a", "1,,2", "1-8"] {
            assert!(p(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn refusals() {
        let code = |args: &str| build(&format!("--model m -o out {args}")).map(|_| 0).unwrap_or_else(|e| e.exit_code());
        assert_eq!(code("--link dynamic"), 6);
        for wrong in [
            "--buckets 0",
            "--nope",
            "-O4",
            "--emit foo",
            "--passes a",
            "--emit exe=x",
            "--ctx-size 0",
            "--dtype f64",
            "--no-cache --cache-dir d",
            "--autotune fast --dry-run",
            "--keep a=f32",
            "--group-size 32",
            "--quantize int8 --group-size 32",
            "--quantize int4 --group-size 48",
            "--quantize int4 --keep a",
            "--calibrate f",
            "--quantize-head int8 --calibrate f",
            "--quantize int4 --act-order",
            "--quantize int4 --calibrate f --no-tokenizer",
            "--quantize int4 --calibrate f --allow-nonfinite",
            "--quantize int4 --keep a=int8",
            "--save-temps --stop-after plan",
            "--cache-weights --stop-after codegen",
            "--weights split --emit obj=d",
            "--save-temps --emit asm",
        ] {
            assert_eq!(code(wrong), 2, "{wrong}");
        }
        for fine in [
            "--target aarch64-unknown-linux-gnu",
            "--quantize none",
            "--quantize int8 --compute int8",
            "--quantize int8 --calibrate f",
            "--quantize int4 --calibrate f --act-order",
            "--quantize int4 --group-size 128 --quantize-head none --keep *.down_proj.*=bf16 --keep a=auto",
            "--quantize-head int4 --group-size 64",
            "--autotune off",
            "--autotune fast --tuning f",
            "--no-cache",
            "--cache-dir d --cache-weights",
            "--weights split",
            "--weights split --save-temps --cache-weights --dry-run",
        ] {
            assert_eq!(code(fine), 0, "{fine}");
        }
        assert_eq!(build("--model m").unwrap_err().exit_code(), 2);
        assert_eq!(build("--model m --emit exe=x --stop-after trace").unwrap_err().exit_code(), 2);
        assert!(build("--model m --emit exe=x").is_ok());
        assert!(build("--model m --dry-run").is_ok() && build("--model m --stop-after trace").is_ok());
    }
}
