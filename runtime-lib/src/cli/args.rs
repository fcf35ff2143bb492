//! The flags of every verb, as in the command line's contract. Every long flag is also read from the environment.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::builder::{BoolishValueParser, OsStr, OsStringValueParser, TypedValueParser};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, ValueEnum};

use super::error::Failure;
use crate::abi::{Pooling, Task};

/// How the variables of flags begin.
pub const VARIABLE: &str = "RCOMPILE_ARG_";
/// Most threads that one may ask for.
const MAX_THREADS: usize = 4096;

/// Threads and memory of a verb.
#[derive(Args, Debug, Clone, Default)]
pub struct MachineArgs {
    /// Threads [default: physical cores of the affinity mask, capped by the CPU quota]
    #[arg(short = 't', long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    #[command(flatten)]
    pub place: PlaceArgs,
}

/// Where threads run and weights lie.
#[derive(Args, Debug, Clone, Default)]
pub struct PlaceArgs {
    /// Bind each thread to one CPU, to those of different cores first
    #[arg(long)]
    pub pin: bool,
    /// Copy the weights into large pages of memory first: a later start, but tokens as fast as memory allows where the file's
    /// pages are slow to read, as on some virtual machines
    #[arg(long)]
    pub copy_weights: bool,
}

/// Where a text comes from; exactly one of them.
#[derive(Args, Debug, Clone, Default)]
pub struct TextArgs {
    /// Input text
    #[arg(short = 'p', long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// Read the input from a file, `-` is stdin
    #[arg(short = 'f', long, value_name = "FILE")]
    pub file: Option<PathBuf>,
}

/// Where the input comes from; exactly one of them.
#[derive(Args, Debug, Clone, Default)]
pub struct InputArgs {
    #[command(flatten)]
    pub text: TextArgs,
    /// Input as token ids
    #[arg(long, value_name = "1,2,3", allow_hyphen_values = true)]
    pub tokens: Option<String>,
}

/// How tokens are chosen.
#[derive(Args, Debug, Clone, Default)]
pub struct SamplingArgs {
    /// Temperature; 0 takes the most probable token [default: the model's if it samples or the next three cut something off, else 0]
    #[arg(long, value_name = "F", value_parser = temperature)]
    pub temp: Option<f32>,
    /// Choose among the N most probable tokens; 0 is all [default: the model's]
    #[arg(long, value_name = "N", value_parser = count)]
    pub top_k: Option<usize>,
    /// Choose among the most probable tokens that together reach F [default: the model's]
    #[arg(long, value_name = "F", value_parser = probability)]
    pub top_p: Option<f32>,
    /// Drop tokens less probable than F times the most probable one [default: the model's]
    #[arg(long, value_name = "F", value_parser = probability)]
    pub min_p: Option<f32>,
    /// Make tokens that occurred less probable; 1 changes nothing [default: the model's]
    #[arg(long, value_name = "F", value_parser = penalty)]
    pub repeat_penalty: Option<f32>,
    /// Start of the random sequence; the same seed gives the same text
    #[arg(short = 's', long, value_name = "SEED", value_parser = seed, default_value_t = 0)]
    pub seed: u64,
}

/// `generate`
#[derive(Args, Debug)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub input: InputArgs,
    /// Most tokens to generate
    #[arg(short = 'n', long, value_name = "N", value_parser = n_predict, default_value_t = 256)]
    pub n_predict: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "STR", value_parser = stop, action = ArgAction::Append, allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Put the input into the model's chat template as one user message
    #[arg(long)]
    pub chat: bool,
    /// System message for --chat
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Print the text when it is complete
    #[arg(long)]
    pub no_stream: bool,
    /// Go on after the token that ends a text
    #[arg(long)]
    pub ignore_eos: bool,
}

/// `chat`
#[derive(Args, Debug)]
pub struct ChatArgs {
    /// System message
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Most tokens of one answer
    #[arg(short = 'n', long, value_name = "N", value_parser = n_predict, default_value_t = 1024)]
    pub n_predict: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "STR", value_parser = stop, action = ArgAction::Append, allow_hyphen_values = true)]
    pub stop: Vec<String>,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `logits`
#[derive(Args, Debug)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub input: InputArgs,
    /// How many of the highest logits
    #[arg(long, value_name = "K", value_parser = positive, default_value_t = 20)]
    pub top: usize,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `perplexity`
#[derive(Args, Debug)]
pub struct PerplexityArgs {
    /// Text to score, `-` is stdin
    #[arg(short = 'f', long, value_name = "FILE", required = true)]
    pub file: PathBuf,
    /// Tokens per window, BOS included [default: the context, at most 512]
    #[arg(short = 'c', long, value_name = "WINDOW", value_parser = window)]
    pub window: Option<usize>,
    /// Most windows
    #[arg(long, value_name = "N", value_parser = positive)]
    pub chunks: Option<usize>,
    /// Write the logits of every scored position: "RCLOGIT1", vocabulary u32, window u32, positions u64, then per position its token
    /// u32, the next token u32 and a logit f32 per token of the vocabulary; little-endian
    #[arg(long, value_name = "FILE", value_parser = OsStringValueParser::new().try_map(data_file))]
    pub logits: Option<PathBuf>,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// No progress on stderr
    #[arg(long)]
    pub quiet: bool,
}

/// `embed`
#[derive(Args, Debug)]
pub struct EmbedArgs {
    #[command(flatten)]
    pub input: InputArgs,
    /// How the vectors of a text become one [default: the model's]
    #[arg(long, value_enum)]
    pub pooling: Option<Pooling>,
    /// Scale to length 1 [default: the model's]
    #[arg(long, value_name = "true|false")]
    pub normalize: Option<bool>,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// No progress on stderr
    #[arg(long)]
    pub quiet: bool,
}

/// Form of a table.
#[derive(Clone, Copy, Debug, ValueEnum, PartialEq, Eq)]
pub enum TableForm {
    Md,
    Json,
    Jsonl,
    Csv,
}

/// `bench`
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// Prompt lengths (encoders: tokens per text); 0 skips [default: 512, at most what fits]
    #[arg(short = 'p', long, value_name = "N,..", value_delimiter = ',', value_parser = count)]
    pub n_prompt: Vec<usize>,
    /// Numbers of tokens to generate; 0 skips [default: 128, at most what fits]
    #[arg(short = 'n', long, value_name = "N,..", value_delimiter = ',', value_parser = count)]
    pub n_gen: Vec<usize>,
    /// Positions already filled before a test
    #[arg(short = 'd', long, value_name = "N,..", value_delimiter = ',', value_parser = count, default_values_t = [0])]
    pub depth: Vec<usize>,
    /// Sequences side by side; their prompts run one after the other (encoders: texts)
    #[arg(short = 'b', long, value_name = "N,..", value_delimiter = ',', value_parser = batch, default_values_t = [1])]
    pub batch: Vec<usize>,
    /// Repetitions of each test
    #[arg(short = 'r', long, value_name = "N", value_parser = positive, default_value_t = 5)]
    pub repetitions: usize,
    /// Numbers of threads [default: as for the other verbs]
    #[arg(short = 't', long, value_name = "N,..", value_delimiter = ',', value_parser = threads)]
    pub threads: Vec<usize>,
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Form of the result
    #[arg(short = 'o', long, value_enum, default_value_t = TableForm::Md)]
    pub output: TableForm,
}

/// `profile`
#[derive(Args, Debug)]
pub struct ProfileArgs {
    /// Prompt tokens (encoders: tokens of one text) [default: 512, at most what fits]
    #[arg(short = 'p', long, value_name = "N", value_parser = count)]
    pub n_prompt: Option<usize>,
    /// Tokens to generate after the prompt [default: 32, at most what fits]
    #[arg(short = 'n', long, value_name = "N", value_parser = count)]
    pub n_gen: Option<usize>,
    /// Sequences, each with a prompt of its own: prompts one after the other, then a token of each per
    /// step (encoders: texts)
    #[arg(short = 'b', long, value_name = "N", value_parser = batch, default_value_t = 1)]
    pub batch: usize,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Write every region that ran as a Chrome trace
    #[arg(long, value_name = "FILE", value_parser = OsStringValueParser::new().try_map(data_file))]
    pub trace: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `tokenize`
#[derive(Args, Debug)]
pub struct TokenizeArgs {
    #[command(flatten)]
    pub input: TextArgs,
    /// Without the tokens that the tokenizer puts around a text
    #[arg(long)]
    pub no_special: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `detokenize`
#[derive(Args, Debug)]
pub struct DetokenizeArgs {
    /// Token ids
    #[arg(long, value_name = "1,2,3", required = true, allow_hyphen_values = true)]
    pub tokens: String,
    /// Leave special tokens out
    #[arg(long)]
    pub skip_special: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `info` and `verify`
#[derive(Args, Debug)]
pub struct InfoArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// A number that lies in a range; who gave another one reads which bound it misses.
fn number<T: std::str::FromStr + PartialOrd + std::fmt::Display>(text: &str, range: RangeInclusive<T>, kind: &str) -> Result<T, String> {
    let parsed = text.parse::<T>().ok().filter(|v| range.contains(v));
    parsed.ok_or_else(|| format!("expected {kind} from {} to {}", range.start(), range.end()))
}

/// Whole numbers from `min` on. The upper bound interests only those who miss it.
fn whole<T: std::str::FromStr + PartialOrd + std::fmt::Display>(text: &str, min: T, max: T) -> Result<T, String> {
    let too_large = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) && text.parse::<T>().is_err();
    match text.parse::<T>() {
        Ok(value) if value >= min => Ok(value),
        _ if too_large => Err(format!("expected at most {max}")),
        _ => Err(format!("expected a whole number of {min} or more")),
    }
}

fn count(text: &str) -> Result<usize, String> {
    whole(text, 0, usize::MAX)
}

/// Elsewhere -1 means no limit.
fn n_predict(text: &str) -> Result<usize, String> {
    let help = if text == "-1" { ": a large one, for as many as the context holds" } else { "" };
    count(text).map_err(|expected| expected + help)
}

fn positive(text: &str) -> Result<usize, String> {
    whole(text, 1, usize::MAX)
}

/// Most sequences or texts of a measurement.
const BATCH_MAX: usize = 1 << 16;

fn batch(text: &str) -> Result<usize, String> {
    number(text, 1..=BATCH_MAX, "a whole number")
}

fn window(text: &str) -> Result<usize, String> {
    whole(text, 2, usize::MAX)
}

fn seed(text: &str) -> Result<u64, String> {
    whole(text, 0, u64::MAX)
}

fn stop(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("expected a text that is not empty".into()) } else { Ok(text.to_owned()) }
}

fn data_file(path: OsString) -> Result<PathBuf, &'static str> {
    if path.is_empty() || path == "-" { Err("expected a file: stdout carries the result") } else { Ok(path.into()) }
}

fn threads(text: &str) -> Result<usize, String> {
    number(text, 1..=MAX_THREADS, "a number of threads")
}

fn temperature(text: &str) -> Result<f32, String> {
    number(text, 0.0..=1e6, "a temperature")
}

fn probability(text: &str) -> Result<f32, String> {
    number(text, 0.0..=1.0, "a number")
}

fn penalty(text: &str) -> Result<f32, String> {
    number(text, 1e-3..=1e3, "a number")
}

/// Every verb, with the task that executables which have it are for; none: all have it.
pub fn verbs() -> [(Option<Task>, Command); 11] {
    fn verb<A: Args>(name: &'static str, about: &'static str) -> Command {
        // The flags bring a description of their own.
        A::augment_args(Command::new(name)).about(about)
    }
    let of_generate = |verb| (Some(Task::Generate), verb);
    let lines = |file: Arg| file.value_name("LINES").help("Read one text per line, `-` is stdin");
    [
        (Some(Task::Embed), verb::<EmbedArgs>("embed", "Embed texts as vectors").mut_arg("file", lines)),
        of_generate(verb::<GenerateArgs>("generate", "Continue a text")),
        of_generate(verb::<ChatArgs>("chat", "Talk, line by line").after_help("/exit or the end of the input (Ctrl-D) ends it.")),
        of_generate(verb::<LogitsArgs>("logits", "Highest logits after the input")),
        of_generate(verb::<PerplexityArgs>("perplexity", "How well the model predicts a text")),
        (None, verb::<BenchArgs>("bench", "Measure speed")),
        (None, verb::<ProfileArgs>("profile", "Where the time goes, region by region")),
        (None, verb::<TokenizeArgs>("tokenize", "Token ids of a text")),
        (None, verb::<DetokenizeArgs>("detokenize", "Text of token ids")),
        (None, verb::<InfoArgs>("info", "What this executable was built from and for")),
        (None, verb::<InfoArgs>("verify", "Check everything that is loaded against the hashes of the build")),
    ]
}

/// Variables of a flag, by its long and by its short name; none of `--help` and `--version`.
fn variables(arg: &Arg) -> Option<(String, Option<String>)> {
    let long = arg.get_long().filter(|_| !matches!(arg.get_action(), ArgAction::Help | ArgAction::Version))?;
    let short = arg.get_short().map(|s| format!("{VARIABLE}{}", s.to_uppercase()));
    Some((format!("{VARIABLE}{}", long.replace('-', "_").to_uppercase()), short))
}

/// Names of the variables that are set. An empty one is as good as none, as a script's `VARIABLE= program` means it.
pub fn set_variables() -> Vec<String> {
    let set = std::env::vars_os().filter(|(_, value)| !value.is_empty()).filter_map(|(name, _)| name.into_string().ok());
    set.filter(|name| name.starts_with(VARIABLE)).collect()
}

/// Those of them that no verb has a flag for, whatever the executable's task is.
pub fn unknown_variables() -> Vec<String> {
    let mut set = set_variables();
    if !set.is_empty() {
        let known: Vec<_> = verbs().iter().flat_map(|(_, verb)| verb.get_arguments().filter_map(variables).collect::<Vec<_>>()).collect();
        set.retain(|name| known.iter().all(|(long, short)| name != long && Some(name) != short.as_ref()));
    }
    set
}

/// Gives every flag its variable `RCOMPILE_ARG_<FLAG>`, by its long name or, where only that is set, by its short one; the
/// command line wins. Numbers below 0 are values that the flags' own checks refuse, not flags.
pub fn with_environment(command: Command) -> Command {
    command.mut_args(|arg| {
        let Some((name, short)) = variables(&arg) else { return arg };
        let is_set = |name: &String| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let name = Some(name).filter(is_set).or(short.filter(is_set));
        let arg = match (arg.get_action(), arg.get_value_delimiter()) {
            (ArgAction::SetTrue, _) => arg.value_parser(BoolishValueParser::new()),
            (_, Some(_)) => arg.allow_hyphen_values(true),
            (_, None) => arg.allow_negative_numbers(true),
        };
        // The names live as long as the process: one small string per flag that is set.
        match name {
            Some(name) => arg.env(OsStr::from(&*Box::leak(name.into_boxed_str()))).hide_env(true),
            None => arg,
        }
    })
}

/// Whether a flag was given on the command line, and not by a variable.
pub fn on_command_line(matches: &ArgMatches, name: &str) -> bool {
    matches.value_source(name) == Some(ValueSource::CommandLine)
}

/// Which of several flags is meant: exactly one on the command line, otherwise exactly one in the environment.
pub fn only_one<'n>(matches: &ArgMatches, names: &[&'n str]) -> Result<Option<&'n str>, Failure> {
    for source in [ValueSource::CommandLine, ValueSource::EnvVariable] {
        let given: Vec<&str> = names.iter().copied().filter(|name| matches.value_source(name) == Some(source)).collect();
        match given[..] {
            [] => {}
            [one] => return Ok(Some(one)),
            _ => {
                let flags: Vec<String> = given.iter().map(|n| format!("--{n}")).collect();
                return Err(Failure::usage(format!("{} cannot be used together", flags.join(" and "))));
            }
        }
    }
    Ok(None)
}

/// Token ids from a list with commas.
pub fn token_list(text: &str) -> Result<Vec<u32>, Failure> {
    // `seq -s,` ends lists with a comma.
    let text = text.trim().strip_suffix(',').unwrap_or(text.trim());
    if text.is_empty() {
        return Ok(Vec::new());
    }
    text.split(',')
        .map(str::trim)
        .map(|t| t.parse().map_err(|_| Failure::usage(format!("--tokens: expected token ids, found {t:?}"))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(args: &[&str]) -> ArgMatches {
        with_environment(InputArgs::augment_args(Command::new("x").no_binary_name(true))).try_get_matches_from(args).unwrap()
    }

    #[test]
    fn inputs_exclude_each_other() {
        const NAMES: [&str; 3] = ["prompt", "file", "tokens"];
        assert_eq!(only_one(&matches(&["-p", "a"]), &NAMES).unwrap(), Some("prompt"));
        assert_eq!(only_one(&matches(&[]), &NAMES).unwrap(), None);
        let both = only_one(&matches(&["-p", "a", "--tokens", "1"]), &NAMES).unwrap_err();
        assert_eq!(both.exit, 2);
    }

    #[test]
    fn lists_of_ids() {
        assert_eq!(token_list("1, 2,3,").unwrap(), [1, 2, 3]);
        for bad in ["x", "-1", "1.5", "4294967296", "1,,2", ",1", "1,,"] {
            assert_eq!(token_list(bad).unwrap_err().exit, 2);
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert!(temperature("NaN").is_err() && temperature("-1").is_err() && temperature("0").is_ok());
        assert!(probability("1.01").is_err() && probability("1").is_ok());
        assert!(threads("0").is_err() && threads("99999").is_err() && threads("4").is_ok());
    }

    #[test]
    fn all_verbs_are_well_formed() {
        for (_, command) in verbs() {
            with_environment(command).debug_assert();
        }
    }
}
