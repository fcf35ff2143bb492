//! `rcompile compare A B -f TEXT`: what B makes of a text that A, the reference, has read too.
//!
//! ```text
//! A perplexity -f TEXT -c WINDOW --logits pipe --\
//!                                                 > row by row: divergence, best token, likelihood -> table or JSON
//! B perplexity -f TEXT -c WINDOW --logits pipe --/
//! ```
//! Both executables run at once, each as a child process. Of what they write, a row of each is held at a time, and one number per
//! position for the percentile. The pipe is the child's stdin, turned round: `/dev/fd/0` names it for the child, no other process can
//! inherit it, and it ends when the child does. Embedding models write their vectors to stdout, and cosines are taken instead.
//!
//! A child that fails ends the comparison with its own message and exit code.

use crate::error::Error;
use crate::input::{missing, refused};
use crate::link::guard::{self, Running};
use crate::link::payload;
use crate::options::Compare;
use crate::report::{self, Progress};
use crate::threads;
use rcompile_message::escape;
use rcompile_runtime::abi::{Manifest, Task};
use rcompile_runtime::logits::{Header, LogitsError, LogitsReader, WINDOW};
use serde::Serialize;
use std::ffi::OsString;
use std::fmt::{self, Display};
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, PipeReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::JoinHandle;

/// Bytes of a child's messages that are kept.
const MESSAGES_MAX: u64 = 1 << 16;

/// What came out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Comparison {
    /// Of two language models.
    NextTokens(NextTokens),
    /// Of two sentence encoders.
    Embeddings(Embeddings),
}

/// Distributions of the next token, over all scored positions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct NextTokens {
    /// Scored positions.
    pub positions: u64,
    /// Mean of `KL(A||B) = sum p_a (ln p_a - ln p_b)`, in nats.
    pub kld_mean: f64,
    /// Its 99th percentile over the positions, interpolated.
    pub kld_p99: f64,
    /// The largest.
    pub kld_max: f64,
    /// Share of the positions at which both hold the same token for the most probable.
    pub same_top1: f64,
    /// Perplexity of A: exp of its mean negative log-likelihood.
    pub ppl_a: f64,
    /// Perplexity of B.
    pub ppl_b: f64,
}

/// Vectors of the same texts, one per line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Embeddings {
    /// Lines.
    pub texts: u64,
    /// Mean cosine of the two vectors of a text.
    pub cosine_mean: f64,
    /// The smallest.
    pub cosine_min: f64,
}

impl Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Comparison::NextTokens(n) => {
                writeln!(f, "positions              {}", n.positions)?;
                writeln!(f, "perplexity of A        {:.5}", n.ppl_a)?;
                writeln!(f, "perplexity of B        {:.5} ({:+.2} %)", n.ppl_b, (n.ppl_b / n.ppl_a - 1.0) * 100.0)?;
                writeln!(f, "KL(A||B) mean          {:.3e} nats", n.kld_mean)?;
                writeln!(f, "  99th percentile      {:.3e}", n.kld_p99)?;
                writeln!(f, "  largest              {:.3e}", n.kld_max)?;
                writeln!(f, "same most probable     {:.3} %", n.same_top1 * 100.0)
            }
            Comparison::Embeddings(e) => {
                writeln!(f, "texts                  {}", e.texts)?;
                writeln!(f, "cosine mean            {:.8}", e.cosine_mean)?;
                writeln!(f, "  smallest             {:.8}", e.cosine_min)
            }
        }
    }
}

/// The verb.
pub fn run(options: &Compare) -> Result<(), Error> {
    let comparison = compare(options)?;
    if options.json { report::print_json(&comparison) } else { report::print(&comparison.to_string()) }
}

/// Runs both executables.
pub fn compare(options: &Compare) -> Result<Comparison, Error> {
    let mut progress = Progress::new(options.quiet);
    if options.text == Path::new("-") {
        let what = "-f -: both executables read the text, expected a file".into();
        return Err(Error::Usage { what, help: Some("for a file of this name: -f ./-".into()) });
    }
    let text = regular_file(&options.text, "input")?;
    let exes = [Executable::open(&options.a)?, Executable::open(&options.b)?];
    for (name, exe) in ["A", "B"].into_iter().zip(&exes) {
        progress.line(&format!("{name:<8} {}", exe.description()));
    }
    same(&exes[1], "task", exes[0].manifest.task, exes[1].manifest.task)?;
    match exes[0].manifest.task {
        Task::Generate => next_tokens(&exes, &text, options, &mut progress).map(Comparison::NextTokens),
        Task::Embed => embeddings(&exes, &text, options, &mut progress).map(Comparison::Embeddings),
    }
}

fn next_tokens(exes: &[Executable; 2], text: &Path, options: &Compare, progress: &mut Progress) -> Result<NextTokens, Error> {
    let [a, b] = exes.each_ref().map(|exe| &exe.manifest);
    same(&exes[1], "vocabulary", a.vocab_size, b.vocab_size)?;
    let window = options.window.unwrap_or(WINDOW.min(a.ctx_size).min(b.ctx_size));
    let mut args: Vec<OsString> =
        vec!["perplexity".into(), "--quiet".into(), "-f".into(), text.into(), "-c".into(), window.to_string().into()];
    args.extend(flag("--chunks", options.chunks).chain(flag("-t", options.threads)));
    both(exes, &args, Channel::Logits, progress, score)
}

fn embeddings(exes: &[Executable; 2], text: &Path, options: &Compare, progress: &mut Progress) -> Result<Embeddings, Error> {
    same(&exes[1], "vocabulary", exes[0].manifest.vocab_size, exes[1].manifest.vocab_size)?;
    if options.window.is_some() || options.chunks.is_some() {
        return Err(Error::usage("compare", "-c and --chunks are for language models, these executables embed lines"));
    }
    let lines = File::open(text).and_then(|file| BufReader::new(file).split(b'\n').try_fold(0, |n, line| line.map(|_| n + 1)));
    let lines: u64 = lines.map_err(|e| missing(text, "input", &e))?;
    if lines == 0 {
        return Err(refused(4, "input", text, "expected a text on each line, found none"));
    }
    let mut args: Vec<OsString> = vec!["embed".into(), "--quiet".into(), "-f".into(), text.into()];
    args.extend(flag("-t", options.threads));
    both(exes, &args, Channel::Stdout, progress, |pipes, progress| cosines(pipes, lines, progress))
}

fn flag(name: &str, value: Option<u32>) -> impl Iterator<Item = OsString> {
    value.into_iter().flat_map(move |v| [name.into(), v.to_string().into()])
}

/// The path of a file itself: children, whose working directory and stdin are others, get it as an argument or are started by it.
fn regular_file(path: &Path, topic: &str) -> Result<PathBuf, Error> {
    let meta = std::fs::metadata(path).map_err(|e| missing(path, topic, &e))?;
    if !meta.is_file() {
        return Err(refused(3, topic, path, "is not a regular file"));
    }
    std::fs::canonicalize(path).map_err(|e| missing(path, topic, &e))
}

/// Both have to say the same about themselves.
fn same<T: Display + PartialEq>(b: &Executable, field: &str, of_a: T, of_b: T) -> Result<(), Error> {
    let what = || format!("{field}, expected {of_a} as in the reference, found {of_b}");
    if of_a == of_b { Ok(()) } else { Err(refused(5, "executable", &b.path, what())) }
}

/// An executable of ours, not started.
struct Executable {
    path: PathBuf,
    manifest: Manifest,
}

/// Where a child's data comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Channel {
    /// Its stdout.
    Stdout,
    /// What `--logits` writes.
    Logits,
}

impl Executable {
    fn open(path: &Path) -> Result<Executable, Error> {
        let absolute = regular_file(path, "executable")?;
        let Some(read) = payload::identity(path).map_err(|e| missing(path, "executable", &e))? else {
            return Err(refused(4, "executable", path, "is no executable of rcompile, or a damaged one"));
        };
        match read.manifest() {
            Ok(manifest) => Ok(Executable { path: absolute, manifest }),
            Err((kind, what)) => Err(refused(kind.exit_code(), "executable", path, what)),
        }
    }

    fn description(&self) -> String {
        let m = &self.manifest;
        let quantised = if m.quantization == "none" { String::new() } else { format!(" ({})", m.quantization) };
        let path = self.path.display().to_string();
        format!(
            "{}: {}, stored {}{quantised}, matmul inputs {}, KV cache {}",
            escape(&path),
            escape(&m.name),
            m.dtype,
            m.compute,
            m.kv_dtype
        )
    }

    /// Starts a verb; its data arrives at the reader.
    fn start(&self, args: &[OsString], channel: Channel) -> Result<(Child<'_>, PipeReader), Error> {
        let failed = |what: String| Error::Toolchain { program: self.path.display().to_string(), what, help: None };
        let (reader, writer) = io::pipe().map_err(|e| failed(format!("no pipe to it: {e}")))?;
        let mut command = Command::new(&self.path);
        command.args(args).stderr(Stdio::piped());
        match channel {
            Channel::Stdout => command.stdin(Stdio::null()).stdout(writer),
            Channel::Logits => command.args(["--logits", "/dev/fd/0"]).stdin(writer).stdout(Stdio::null()),
        };
        // Flags that the user set for other runs would change what is compared.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RCOMPILE_ARG_")) {
            command.env_remove(name);
        }
        let mut running = guard::start(&mut command).map_err(|e| match e.kind() {
            ErrorKind::PermissionDenied | ErrorKind::NotFound => {
                refused(3, "executable", &self.path, format_args!("cannot be started: {e}"))
            }
            _ if e.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) => {
                refused(6, "executable", &self.path, format_args!("was built for {}, which this machine cannot run", self.manifest.target))
            }
            _ => failed(format!("cannot be started: {e}")),
        })?;
        let stderr = running.take_stderr();
        let messages = threads::spawn(move || {
            let mut text = Vec::new();
            if let Some(mut stderr) = stderr {
                // What does not fit, or cannot be read, is no reason to fail: it is only messages.
                let _ = stderr.by_ref().take(MESSAGES_MAX).read_to_end(&mut text);
                let _ = io::copy(&mut stderr, &mut io::sink());
            }
            String::from_utf8_lossy(&text).into_owned()
        })?;
        Ok((Child { exe: self, running, messages }, reader))
    }
}

/// An executable that runs. Dropping it ends it.
struct Child<'e> {
    exe: &'e Executable,
    running: Running,
    messages: JoinHandle<String>,
}

impl Child<'_> {
    /// Waits for its end, which has to be a good one; returns its remarks.
    fn finish(self) -> Result<String, Error> {
        let path = &self.exe.path;
        let status = self.running.wait();
        let messages = self.messages.join().unwrap_or_default();
        match status {
            Ok(status) if status.success() => Ok(messages),
            Ok(status) => Err(failure(path, status, &messages)),
            Err(e) => Err(Error::Toolchain { program: path.display().to_string(), what: format!("cannot be waited for: {e}"), help: None }),
        }
    }
}

/// The error of an executable that failed: its own line, its code, and its path.
fn failure(path: &Path, status: ExitStatus, messages: &str) -> Error {
    let error = messages.lines().find_map(|l| l.strip_prefix("error[E")?.split_once("]: "));
    let (Some(code), Some((mark, what))) = (status.code(), error) else {
        let last = messages.lines().last().map_or(String::new(), |l| format!(": {l}"));
        return Error::Toolchain { program: path.display().to_string(), what: format!("ended with {status}{last}"), help: None };
    };
    let topic = mark.split_once('-').map_or(mark, |(_, topic)| topic).to_string();
    let help = messages.lines().find_map(|l| l.strip_prefix("help: ")).map(str::to_string);
    Error::Run { code, topic, path: path.display().to_string(), what: what.into(), help }
}

/// Why the two streams cannot be compared.
#[derive(Debug)]
enum Trouble {
    /// The stream of one side (0: A, 1: B) ends early or cannot be read: perhaps its process has failed.
    Ended(usize, String),
    /// The stream of one side is not what the executable should write.
    Malformed(usize, String),
    /// Both are fine, but they do not belong together.
    Disagree(String),
}

impl Trouble {
    fn stream(side: usize, error: LogitsError) -> Trouble {
        let what = format!("its stream of logits {error}");
        match error {
            LogitsError::Ended(_) | LogitsError::Io(_) => Trouble::Ended(side, what),
            LogitsError::Malformed(_) => Trouble::Malformed(side, what),
        }
    }
}

/// Runs both with the same arguments and compares what they write.
fn both<T>(
    exes: &[Executable; 2],
    args: &[OsString],
    channel: Channel,
    progress: &mut Progress,
    work: impl FnOnce([PipeReader; 2], &mut Progress) -> Result<T, Trouble>,
) -> Result<T, Error> {
    let (child_a, pipe_a) = exes[0].start(args, channel)?;
    let (child_b, pipe_b) = exes[1].start(args, channel)?;
    let children = [child_a, child_b];
    // The pipes are closed when this returns, so that no child waits for its reader.
    match work([pipe_a, pipe_b], progress) {
        Ok(result) => {
            for (name, child) in ["A", "B"].into_iter().zip(children) {
                child.finish()?.lines().for_each(|line| progress.line(&format!("{name:<8} {}", escape(line))));
            }
            Ok(result)
        }
        Err(Trouble::Ended(side, what)) => {
            let [a, b] = children;
            let child = if side == 0 { a } else { b };
            let exe = child.exe;
            child.finish()?;
            Err(refused(4, "logits", &exe.path, what))
        }
        Err(Trouble::Malformed(side, what)) => Err(refused(4, "logits", &exes[side].path, what)),
        Err(Trouble::Disagree(what)) => Err(refused(5, "tokens", &exes[1].path, what)),
    }
}

/// Compares two streams of logits, A's and B's.
fn score<R: Read>(inputs: [R; 2], progress: &mut Progress) -> Result<NextTokens, Trouble> {
    let [a, b] = inputs;
    let mut a = LogitsReader::new(a).map_err(|e| Trouble::stream(0, e))?;
    let mut b = LogitsReader::new(b).map_err(|e| Trouble::stream(1, e))?;
    let Header { positions, .. } = a.header();
    if a.header() != b.header() {
        let text = |h: Header| format!("{} positions in windows of {} with {} logits", h.positions, h.window, h.vocab_size);
        let (a, b) = (text(a.header()), text(b.header()));
        return Err(Trouble::Disagree(format!("the text has other tokens, expected {a} as in the reference, found {b}")));
    }
    let stage = progress.stage("compare", positions, false);
    let mut divergences: Vec<f64> = Vec::new();
    let (mut equal, mut nll_a, mut nll_b) = (0u64, 0.0, 0.0);
    loop {
        let at = divergences.len();
        let row_a = a.row().map_err(|e| Trouble::stream(0, e))?;
        let row_b = b.row().map_err(|e| Trouble::stream(1, e))?;
        let (Some(row_a), Some(row_b)) = (row_a, row_b) else { break };
        if (row_a.token, row_a.next) != (row_b.token, row_b.next) {
            let (a, b) = (format!("{} {}", row_a.token, row_a.next), format!("{} {}", row_b.token, row_b.next));
            return Err(Trouble::Disagree(format!(
                "position {at}: the text has other tokens, expected {a} as in the reference, found {b}"
            )));
        }
        let (p, q) = (LogSoftmax::new(row_a.logits), LogSoftmax::new(row_b.logits));
        let next = row_a.next as usize;
        let (likelihood_a, likelihood_b, kld) = (p.of(next), q.of(next), divergence(&p, &q));
        if !likelihood_a.is_finite() {
            return Err(Trouble::Malformed(0, format!("position {at}: its logits are not finite")));
        }
        if !likelihood_b.is_finite() || !kld.is_finite() {
            return Err(Trouble::Malformed(1, format!("position {at}: its logits are not finite")));
        }
        nll_a -= likelihood_a;
        nll_b -= likelihood_b;
        equal += u64::from(p.best == q.best);
        divergences.push(kld);
        stage.advance(1);
    }
    stage.finish(&format!("{positions} positions"));
    let count = divergences.len() as f64;
    let kld_mean = divergences.iter().sum::<f64>() / count;
    divergences.sort_unstable_by(f64::total_cmp);
    Ok(NextTokens {
        positions,
        kld_mean,
        kld_p99: percentile(&divergences, 0.99),
        kld_max: divergences.last().copied().unwrap_or(0.0),
        same_top1: equal as f64 / count,
        ppl_a: (nll_a / count).exp(),
        ppl_b: (nll_b / count).exp(),
    })
}

/// A distribution: `ln p[i] = logits[i] - log_sum`.
struct LogSoftmax<'r> {
    logits: &'r [f32],
    /// NaN where a logit is NaN or infinity, or all are minus infinity.
    log_sum: f64,
    /// The most probable token, the first of several.
    best: usize,
}

impl<'r> LogSoftmax<'r> {
    fn new(logits: &'r [f32]) -> LogSoftmax<'r> {
        let (best, max) = logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best });
        let max = f64::from(max);
        let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
        LogSoftmax { logits, log_sum: max + sum.ln(), best }
    }

    fn of(&self, token: usize) -> f64 {
        f64::from(self.logits[token]) - self.log_sum
    }
}

/// `KL(P||Q) = sum p (ln p - ln q)` in nats: 0 for equal logits, infinite where Q rules out what P does not.
fn divergence(p: &LogSoftmax<'_>, q: &LogSoftmax<'_>) -> f64 {
    let mut sum = 0.0;
    for token in 0..p.logits.len() {
        let (log_p, log_q) = (p.of(token), q.of(token));
        let weight = log_p.exp();
        // A probability of 0 weighs nothing, whatever the other one is. NaN goes through.
        if weight != 0.0 {
            sum += weight * (log_p - log_q);
        }
    }
    // Rounding can make a divergence of 0 slightly negative.
    if sum < 0.0 { 0.0 } else { sum }
}

/// The value below which this share of the ascending values lies, interpolated between neighbours (as llama.cpp's `perplexity` does).
fn percentile(ascending: &[f64], share: f64) -> f64 {
    let Some(last) = ascending.len().checked_sub(1) else { return 0.0 };
    let place = share * last as f64;
    let below = place.floor() as usize;
    let part = place - below as f64;
    ascending[below] * (1.0 - part) + ascending[last.min(below + 1)] * part
}

/// Compares two streams of vectors: a line of numbers per text.
fn cosines<R: Read>(inputs: [R; 2], texts: u64, progress: &mut Progress) -> Result<Embeddings, Trouble> {
    let [mut a, mut b] = inputs.map(|r| BufReader::new(r).lines());
    let stage = progress.stage("compare", texts, false);
    let mut next = |side: usize, at: u64| {
        let lines = if side == 0 { &mut a } else { &mut b };
        let line = lines.next().ok_or_else(|| Trouble::Ended(side, format!("writes vectors of {at} texts, expected {texts}")))?;
        let line = line.map_err(|e| Trouble::Ended(side, format!("its vectors cannot be read: {e}")))?;
        let vector = line.split(' ').map(str::parse::<f64>).collect::<Result<Vec<f64>, _>>();
        vector.map_err(|_| Trouble::Malformed(side, format!("text {at}: its vector is not one")))
    };
    let (mut sum, mut smallest) = (0.0, f64::INFINITY);
    for at in 0..texts {
        let (x, y) = (next(0, at)?, next(1, at)?);
        if x.len() != y.len() {
            return Err(Trouble::Disagree(format!("vectors, expected {} numbers as in the reference, found {}", x.len(), y.len())));
        }
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let cosine = dot(&x, &y) / (dot(&x, &x).sqrt() * dot(&y, &y).sqrt());
        if !cosine.is_finite() {
            let side = usize::from((dot(&x, &x)).is_normal());
            return Err(Trouble::Malformed(side, format!("text {at}: its vector is zero or not finite")));
        }
        // Rounding can take the cosine of equal vectors out of its range.
        let cosine = cosine.clamp(-1.0, 1.0);
        sum += cosine;
        smallest = smallest.min(cosine);
        stage.advance(1);
    }
    stage.finish(&format!("{texts} texts"));
    Ok(Embeddings { texts, cosine_mean: sum / texts as f64, cosine_min: smallest })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_runtime::logits::{LogitsWriter, Row};

    /// A stream of windows of two tokens: (token, next, logits) each.
    fn stream(rows: &[(u32, u32, &[f32])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let header = Header { vocab_size: rows[0].2.len() as u32, window: 2, positions: rows.len() as u64 };
        let mut writer = LogitsWriter::new(&mut bytes, header).unwrap();
        rows.iter().for_each(|&(token, next, logits)| writer.row(Row { token, next, logits }).unwrap());
        writer.finish().unwrap();
        bytes
    }

    fn scored(a: &[u8], b: &[u8]) -> Result<NextTokens, Trouble> {
        score([a, b], &mut Progress::new(true))
    }

    #[test]
    fn divergence_by_hand() {
        let a = stream(&[(0, 1, &[0.0, 0.0]), (1, 0, &[7.5, 7.5])]);
        let b = stream(&[(0, 1, &[3f32.ln(), 0.0]), (1, 0, &[-1.0, -1.0])]);
        let found = scored(&a, &b).unwrap();
        // p = (1/2, 1/2), q = (3/4, 1/4); then twice the same.
        let kld = 0.5 * (4f64 / 3.0).ln();
        let close = |x: f64, y: f64| assert!((x - y).abs() < 1e-7, "{x}, expected {y}");
        close(found.kld_max, kld);
        close(found.kld_mean, kld / 2.0);
        close(found.kld_p99, 0.99 * kld);
        close(found.ppl_a, 2.0);
        close(found.ppl_b, 8f64.sqrt());
        assert_eq!((found.positions, found.same_top1), (2, 1.0));
        // The other way round it is another number: A is the reference.
        close(scored(&b, &a).unwrap().kld_max, 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln());
    }

    #[test]
    fn best_tokens_are_counted() {
        let a = stream(&[(0, 0, &[1.0, 2.0, 3.0]), (0, 0, &[1.0, 1.0, 0.0]), (0, 0, &[3.0, 2.0, 1.0]), (0, 0, &[0.0, 1.0, 0.0])]);
        let b = stream(&[(0, 0, &[0.0, 0.0, 0.1]), (0, 0, &[5.0, 4.0, 4.0]), (0, 0, &[3.0, 4.0, 1.0]), (0, 0, &[0.0, 9.0, 0.0])]);
        assert_eq!(scored(&a, &b).unwrap().same_top1, 0.75);
    }

    #[test]
    fn what_is_ruled_out_weighs_nothing_or_everything() {
        let finite = stream(&[(0, 0, &[1.0, 1.0])]);
        let masked = stream(&[(0, 0, &[1.0, f32::NEG_INFINITY])]);
        assert_eq!(scored(&masked, &masked).unwrap().kld_mean, 0.0);
        assert!((scored(&masked, &finite).unwrap().kld_mean - 2f64.ln()).abs() < 1e-15);
        assert!(matches!(scored(&finite, &masked), Err(Trouble::Malformed(1, _))));
        for bad in [f32::NAN, f32::INFINITY] {
            let bad = stream(&[(0, 0, &[1.0, bad])]);
            assert!(matches!(scored(&bad, &finite), Err(Trouble::Malformed(0, what)) if what.contains("not finite")));
            assert!(matches!(scored(&finite, &bad), Err(Trouble::Malformed(1, what)) if what.contains("not finite")));
        }
    }

    #[test]
    fn streams_that_do_not_belong_together() {
        let a = stream(&[(0, 1, &[0.0, 0.0]), (1, 0, &[0.0, 0.0])]);
        for (other, what) in [
            (stream(&[(0, 1, &[0.0, 0.0])]), "expected 2 positions"),
            (stream(&[(0, 1, &[0.0; 3]), (1, 0, &[0.0; 3])]), "with 3 logits"),
            (stream(&[(0, 1, &[0.0, 0.0]), (1, 1, &[0.0, 0.0])]), "position 1: the text has other tokens, expected 1 0"),
        ] {
            let Err(Trouble::Disagree(text)) = scored(&a, &other) else { panic!("{what}") };
            assert!(text.contains(what), "{text}");
        }
        let cut = &a[..a.len() - 1];
        assert!(matches!(scored(cut, &a), Err(Trouble::Ended(0, what)) if what.contains("position 1 of 2")));
        assert!(matches!(scored(&a, cut), Err(Trouble::Ended(1, _))));
        assert!(matches!(scored(&a, &[&a[..], b"x"].concat()), Err(Trouble::Malformed(1, _))));
        assert!(matches!(scored(b"error: no such verb, but long", &a), Err(Trouble::Malformed(0, _))));
    }

    #[test]
    fn percentiles() {
        let list: Vec<f64> = (0..101).map(f64::from).collect();
        assert_eq!([percentile(&list, 0.0), percentile(&list, 0.99), percentile(&list, 1.0)], [0.0, 99.0, 100.0]);
        assert_eq!([percentile(&[3.0], 0.99), percentile(&[0.0, 1.0], 0.99)], [3.0, 0.99]);
    }

    #[test]
    fn vectors() {
        let found = |a: &str, b: &str, texts| cosines([a.as_bytes(), b.as_bytes()], texts, &mut Progress::new(true));
        let e = found("1 0\n0.5 -2e-1\n", "0 3\n1 -0.4\n", 2).unwrap();
        assert_eq!((e.texts, e.cosine_min), (2, 0.0));
        assert!((e.cosine_mean - 0.5).abs() < 1e-15);
        assert!(matches!(found("1 0\n", "1\n", 1), Err(Trouble::Disagree(_))));
        assert!(matches!(found("1 0\n", "", 1), Err(Trouble::Ended(1, _))));
        assert!(matches!(found("1 x\n", "1 0\n", 1), Err(Trouble::Malformed(0, _))));
        assert!(matches!(found("1 0\n", "0 0\n", 1), Err(Trouble::Malformed(1, _))));
        assert!(matches!(found("1 NaN\n", "1 0\n", 1), Err(Trouble::Malformed(0, _))));
    }

    #[test]
    fn a_failure_keeps_message_and_code() {
        use std::os::unix::process::ExitStatusExt;
        let messages = "warning[W-x]: y\nerror[E7-context]: a window of 9\nhelp: use a smaller -c\n";
        let e = failure("/x/A".as_ref(), ExitStatus::from_raw(7 << 8), messages);
        assert_eq!(e.lines(), ["error[E7-context]: /x/A: a window of 9", "help: use a smaller -c"]);
        assert_eq!(e.exit_code(), 7);
        let e = failure("/x/A".as_ref(), ExitStatus::from_raw(9), "");
        assert_eq!(e.exit_code(), 8);
        assert!(e.to_string().contains("signal: 9"), "{e}");
    }
}
