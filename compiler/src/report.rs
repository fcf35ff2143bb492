//! What the user sees of a build: progress on stderr while it runs, the closing report, `--json`.

use crate::error::Error;
use indicatif::{ProgressBar, ProgressStyle};
use rcompile_message::size;
use rcompile_runtime::cost::RegionInfo;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Plain progress says something at most this often.
const PLAIN_EVERY: Duration = Duration::from_secs(5);

/// One stage's or pass's time.
#[derive(Clone, Debug, Serialize)]
pub struct Timing {
    /// `open`, `pack`, ... or `step.8 fuse-rope`.
    pub name: String,
    /// Milliseconds.
    pub ms: f64,
}

/// One compiled bucket.
#[derive(Clone, Debug, Serialize)]
pub struct BucketReport {
    /// Entry.
    pub entry: String,
    /// Capacity in rows.
    pub rows: u32,
    /// Rows of an attention tile.
    pub tile_rows: u32,
    /// Regions of the program.
    pub regions: usize,
    /// Their cost, for `inspect --scaling`.
    #[serde(skip)]
    pub costs: Vec<RegionInfo>,
    /// Barriers per decoder layer.
    pub barriers_per_layer: u32,
    /// Arena bytes.
    pub arena_bytes: u64,
    /// Scratch bytes per thread.
    pub private_bytes: u64,
}

/// What the cache did.
#[derive(Clone, Debug, Serialize)]
pub struct CacheReport {
    /// Its directory; none with `--no-cache` or where there is no place for it.
    pub dir: Option<String>,
    /// Entries used, objects and packed weights.
    pub hits: u64,
    /// Entries looked for and not found.
    pub misses: u64,
    /// Units that LLVM compiled.
    pub llvm_compilations: u64,
    /// Packed weights: `hit`, `miss`, or `off` without `--cache-weights`.
    pub weights: String,
}

/// Of a build that does not come to it.
impl Default for CacheReport {
    fn default() -> Self {
        CacheReport { dir: None, hits: 0, misses: 0, llvm_compilations: 0, weights: "off".into() }
    }
}

/// What `--autotune` measured.
#[derive(Clone, Debug, Serialize)]
pub struct AutotuneReport {
    /// Time of all trials.
    pub seconds: f64,
    /// Trial executables.
    pub variants: usize,
    /// Rounds in which each ran.
    pub rounds: usize,
    /// The best variant of each bucket.
    pub buckets: Vec<TunedBucket>,
    /// All choices, as `--tuning FILE` takes them.
    pub tuning: serde_json::Value,
}

/// One tuned bucket.
#[derive(Clone, Debug, Serialize)]
pub struct TunedBucket {
    /// Capacity in rows.
    pub rows: u32,
    /// Number of the variant, 0: the heuristic's.
    pub variant: usize,
    /// Its speed over the heuristic's, median of the rounds.
    pub gain: f64,
    /// By how much the heuristic differs from itself within a round, as a part, median of the rounds: gains below twice that are none.
    pub noise: f64,
}

impl TunedBucket {
    /// Beyond such noise nothing is chosen.
    pub const NOISE_MAX: f64 = 0.1;

    /// Whether noise was too large to choose by.
    pub fn is_undecided(&self) -> bool {
        self.noise > TunedBucket::NOISE_MAX
    }
}

/// The closing report.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The executable, when one was written.
    pub output: Option<String>,
    /// Name of the model.
    pub model: String,
    /// Architecture class.
    pub architecture: String,
    /// Target triple.
    pub target: String,
    /// CPU, `native` resolved.
    pub cpu: String,
    /// Its features, for `inspect --scaling`.
    #[serde(skip)]
    pub features: Vec<String>,
    /// Stored type of most weights.
    pub dtype: String,
    /// Type that matmul inputs are rounded to.
    pub compute: String,
    /// Codes of weights, `none` without; spelled as the executable's `info` has it.
    #[serde(rename = "quantization")]
    pub quantisation: String,
    /// Type of the KV cache.
    pub kv_dtype: String,
    /// Positions per sequence.
    pub ctx_size: u32,
    /// Buckets.
    pub buckets: Vec<BucketReport>,
    /// Distinct units of code.
    pub units: usize,
    /// Cache.
    pub cache: CacheReport,
    /// Tiles that were measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autotune: Option<AutotuneReport>,
    /// Bytes of generated machine code.
    pub code_bytes: u64,
    /// Bytes of packed weights.
    pub weight_bytes: u64,
    /// Largest arena of all buckets.
    pub arena_bytes: u64,
    /// KV cache per position of one sequence.
    pub kv_bytes_per_token: u64,
    /// KV cache in all: whole pages of every slot.
    pub kv_bytes: u64,
    /// Sequence slots.
    pub slots: u32,
    /// Length of the executable.
    pub file_bytes: u64,
    /// Stages in order.
    pub stages: Vec<Timing>,
    /// Passes of all buckets in order.
    pub passes: Vec<Timing>,
    /// The whole build in milliseconds.
    pub total_ms: f64,
    /// Warnings.
    pub warnings: Vec<String>,
    /// What passes did and refused, for `--explain`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Text for stdout: what `--stop-after` and `--emit` ask for; with `--json` a field of the report.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// Passes and cache are among the lines for people: `--timings`.
    #[serde(skip)]
    pub show_passes: bool,
}

impl Report {
    /// How long stages took, and with `--timings` what the cache did and how long passes took.
    pub fn timings(&self) -> String {
        let mut out = String::new();
        let width = self.stages.iter().map(|t| t.name.len()).max().unwrap_or(0).max(6);
        for stage in &self.stages {
            let _ = writeln!(out, "  {:<width$} {:>9}", stage.name, seconds(stage.ms));
        }
        let _ = writeln!(out, "  {:<width$} {:>9}", "total", seconds(self.total_ms));
        if self.show_passes {
            let c = &self.cache;
            let dir = c.dir.as_deref().map_or("none".into(), rcompile_message::escape);
            let _ = writeln!(
                out,
                "cache {dir}: {} hits, {} misses, weights {}; LLVM compiled {} units",
                c.hits, c.misses, c.weights, c.llvm_compilations
            );
            out += "passes:\n";
            let width = self.passes.iter().map(|t| t.name.len()).max().unwrap_or(0);
            self.passes.iter().for_each(|t| _ = writeln!(out, "  {:<width$} {:>7.2} ms", t.name, t.ms));
        }
        out
    }
    /// Lines for people.
    pub fn lines(&self) -> String {
        let mut out = self.timings();
        if !self.buckets.is_empty() {
            let rows = self.buckets.iter().map(|b| b.rows.to_string()).collect::<Vec<_>>().join(",");
            let _ = writeln!(out, "{} for {} ({}), buckets {rows}", self.architecture, self.cpu, self.target);
            let types = format!("stored {}, matmul inputs {}, KV cache {}", self.dtype, self.compute, self.kv_dtype);
            let _ = writeln!(out, "  {types}");
            if self.quantisation != "none" {
                let _ = writeln!(out, "  quantisation {}", self.quantisation);
            }
            let code = if self.units > 0 { format!("code {} in {} units, ", size(self.code_bytes), self.units) } else { String::new() };
            let _ = writeln!(out, "  {code}weights {}", size(self.weight_bytes));
            let _ = writeln!(out, "  arena {}, KV cache {} per token", size(self.arena_bytes), size(self.kv_bytes_per_token));
        }
        if let Some(output) = &self.output {
            let _ = writeln!(out, "{} {}", rcompile_message::escape(output), size(self.file_bytes));
        }
        out
    }
}

/// `1.23 s` or `12 ms`.
fn seconds(ms: f64) -> String {
    if ms >= 1000.0 { format!("{:.2} s", ms / 1000.0) } else { format!("{ms:.0} ms") }
}

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    Quiet,
    Plain,
    Bar,
}

/// Progress of a build: what is done, how far it is, how long it will take. Stages do not overlap.
#[derive(Debug)]
pub struct Progress {
    style: Style,
    stages: Vec<Timing>,
    start: Instant,
}

/// A running stage. `advance` may be called from any thread.
#[derive(Debug)]
pub struct StageBar<'a> {
    progress: &'a mut Progress,
    name: &'static str,
    start: Instant,
    total: u64,
    done: AtomicU64,
    bytes: bool,
    bar: Option<ProgressBar>,
    said: Mutex<Instant>,
}

impl Progress {
    /// Progress on stderr: a bar on a terminal, plain lines otherwise.
    pub fn new(quiet: bool) -> Progress {
        let style = match quiet {
            true => Style::Quiet,
            false if std::io::stderr().is_terminal() => Style::Bar,
            false => Style::Plain,
        };
        Progress { style, stages: Vec::new(), start: Instant::now() }
    }

    /// Begins a stage of `total` steps (0: unknown), or of bytes.
    pub fn stage(&mut self, name: &'static str, total: u64, bytes: bool) -> StageBar<'_> {
        let bar = (self.style == Style::Bar).then(|| {
            let bar = if total > 0 { ProgressBar::new(total) } else { ProgressBar::new_spinner() };
            let template = match (total > 0, bytes) {
                (true, true) => "{prefix:<8} [{bar:30}] {decimal_bytes}/{decimal_total_bytes} {elapsed} (left {eta}) {msg}",
                (true, false) => "{prefix:<8} [{bar:30}] {pos}/{len} {elapsed} (left {eta}) {msg}",
                _ => "{prefix:<8} {spinner} {elapsed} {msg}",
            };
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(name);
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        let now = Instant::now();
        StageBar { progress: self, name, start: now, total, done: AtomicU64::new(0), bytes, bar, said: Mutex::new(now) }
    }

    /// A line for the user between two stages, so that it breaks no bar.
    pub fn line(&self, text: &str) {
        if self.style != Style::Quiet {
            say(text);
        }
    }

    /// Stages so far, and the time since the start in milliseconds.
    pub fn timings(&self) -> (Vec<Timing>, f64) {
        (self.stages.clone(), millis(self.start))
    }
}

impl StageBar<'_> {
    /// `count` more steps or bytes are done.
    pub fn advance(&self, count: u64) {
        let done = self.done.fetch_add(count, Ordering::Relaxed) + count;
        if let Some(bar) = &self.bar {
            bar.inc(count);
        } else if self.progress.style == Style::Plain
            && let Ok(mut said) = self.said.try_lock()
            && said.elapsed() >= PLAIN_EVERY
        {
            *said = Instant::now();
            let left = self.start.elapsed().as_secs_f64() / done as f64 * self.total.saturating_sub(done) as f64;
            let (done_text, total_text) =
                if self.bytes { (size(done), size(self.total)) } else { (done.to_string(), self.total.to_string()) };
            say(&format!("{:<8} {done_text} of {total_text}, {left:.0} s left", self.name));
        }
    }

    /// What it works on now.
    pub fn message(&self, text: String) {
        if let Some(bar) = &self.bar {
            bar.set_message(text);
        }
    }

    /// Ends the stage; `summary` is what came out.
    pub fn finish(self, summary: &str) {
        let ms = millis(self.start);
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.progress.line(&format!("{:<8} {summary} ({})", self.name, seconds(ms)));
        self.progress.stages.push(Timing { name: self.name.into(), ms });
    }
}

impl Drop for StageBar<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Milliseconds since `start`.
pub fn millis(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Writes a line to stderr; nobody listening is fine.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Writes data to stdout. A closed pipe is fine (`| head`), a full device is an error.
pub fn print(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::output("stdout".as_ref(), "writing", &e)),
        _ => Ok(()),
    }
}

/// Lines that quote a file: what would move a terminal's cursor is spelled out.
pub fn quoted(text: &str) -> String {
    text.lines().map(|line| rcompile_message::escape(line) + "\n").collect()
}

/// Writes a value as JSON to stdout.
pub fn print_json(value: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::bug("report", e))?;
    print(&(text + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!([seconds(12.3), seconds(1234.0)], ["12 ms", "1.23 s"]);
    }

    #[test]
    fn what_a_file_says_moves_no_cursor() {
        assert_eq!(quoted("a \u{1b}[2Jb\n  c\rd\n"), "a \\u{1b}[2Jb\n  c\\rd\n");
    }

    #[test]
    fn stages_are_timed_in_order() {
        let mut p = Progress::new(true);
        p.stage("open", 0, false).finish("");
        let s = p.stage("pack", 10, true);
        s.advance(10);
        s.finish("");
        assert_eq!(p.timings().0.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["open", "pack"]);
    }
}
