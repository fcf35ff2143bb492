//! How the command line fails: one line on stderr, help lines, an exit code.
//!
//! ```text
//! error[E7-context]: the sequence needs 5000 positions, the executable was built for 4096
//! help: build with a larger --ctx-size
//! ```

use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::area::{MemoryUse, ResourceError};
use crate::decode::DecodeError;
use crate::encode::EncodeError;
use crate::kv::ContextFull;
use crate::payload::PayloadError;
use crate::step::StepError;
use crate::text::TextError;
use rcompile_message::{LINE_MAX, cut};

/// Why a verb ended early.
#[derive(Debug)]
pub struct Failure {
    /// Exit code of the process.
    pub exit: i32,
    topic: &'static str,
    what: String,
    help: Vec<String>,
}

impl Failure {
    /// A failure that prints `error[E<exit>-<topic>]: <what>`.
    pub fn new(exit: i32, topic: &'static str, what: impl fmt::Display) -> Self {
        Self { exit, topic, what: what.to_string(), help: Vec::new() }
    }

    /// Adds a help line.
    pub fn help(mut self, help: impl fmt::Display) -> Self {
        self.help.push(help.to_string());
        self
    }

    /// The command line is wrong.
    pub fn usage(what: impl fmt::Display) -> Self {
        Self::new(2, "usage", what)
    }

    /// A mistake of ours.
    pub fn bug(what: impl fmt::Display) -> Self {
        Self::new(70, "internal", what).help("this is a bug of rcompile: please report the command line")
    }

    /// Nobody reads the output any more: a quiet end.
    fn closed() -> Self {
        Self::new(0, "closed", "")
    }

    /// The lines for stderr; none for a quiet end.
    pub fn lines(&self) -> Vec<String> {
        if self.exit == 0 {
            return Vec::new();
        }
        let mut lines = vec![cut(&format!("error[E{}-{}]: {}", self.exit, self.topic, self.what), LINE_MAX)];
        lines.extend(self.help.iter().map(|h| cut(&format!("help: {h}"), LINE_MAX)));
        lines
    }
}

/// Tells the user what went wrong.
pub fn say(failure: &Failure) {
    for line in failure.lines() {
        // Without stderr there is nobody to tell.
        let _ = writeln!(io::stderr(), "{line}");
    }
}

/// Prints a remark that stops nothing.
pub fn warn(topic: &str, what: impl fmt::Display) {
    let line = cut(&format!("warning[W-{topic}]: {what}"), LINE_MAX);
    // Without stderr there is nobody to tell.
    let _ = writeln!(io::stderr(), "{line}");
}

/// Says once, for what the model has computed, that it is NaN or infinite.
pub fn warn_unless_finite(computed: &[f32]) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !computed.iter().all(|x| x.is_finite()) && !SAID.swap(true, Ordering::Relaxed) {
        warn("nonfinite", "the model computed NaN or infinity: a weight is not finite, or a number grew beyond its type");
    }
}

/// Failure of a write to stdout.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::closed(),
            _ => Self::new(8, "output", format!("stdout: cannot be written: {error}")),
        }
    }
}

impl From<StepError> for Failure {
    fn from(error: StepError) -> Self {
        match error {
            StepError::Token { .. } => Self::usage(error),
            StepError::Resource(error) => error.into(),
            // No command line leads there.
            StepError::Empty | StepError::TooLarge { .. } | StepError::Bound { .. } | StepError::Order { .. } => Self::bug(error),
            StepError::Broken(_) => Self::new(9, "executable", error),
        }
    }
}

impl From<ResourceError> for Failure {
    fn from(error: ResourceError) -> Self {
        match error {
            ResourceError::Memory { what, .. } => Self::new(7, "memory", error).help(match what {
                MemoryUse::WeightsCopy => "run without --copy-weights",
                MemoryUse::Scratch | MemoryUse::ThreadAreas => "use fewer threads: -t 1",
                MemoryUse::Template => "use a shorter text",
                MemoryUse::KvCache | MemoryUse::Arena | MemoryUse::Output | MemoryUse::Step => {
                    "build with a smaller --ctx-size, --parallel or largest bucket"
                }
            }),
            ResourceError::Room { what, .. } => Self::new(7, "memory", error).help(match what {
                MemoryUse::WeightsCopy => "run without --copy-weights",
                MemoryUse::KvCache
                | MemoryUse::Arena
                | MemoryUse::Scratch
                | MemoryUse::Output
                | MemoryUse::Step
                | MemoryUse::Template
                | MemoryUse::ThreadAreas => "raise the limit of the container, or use shorter or fewer texts at once, or fewer threads",
            }),
            ResourceError::Threads(_) => {
                Self::new(7, "threads", error).help("raise the limit of processes and threads (ulimit -u), or use fewer: -t 1")
            }
        }
    }
}

impl From<ContextFull> for Failure {
    fn from(error: ContextFull) -> Self {
        Self::new(7, "context", error).help("build with a larger --ctx-size")
    }
}

impl From<DecodeError> for Failure {
    fn from(error: DecodeError) -> Self {
        match error {
            DecodeError::Step(error) => error.into(),
            DecodeError::Full(error) => error.into(),
        }
    }
}

impl From<EncodeError> for Failure {
    fn from(error: EncodeError) -> Self {
        match error {
            EncodeError::Step(error) => error.into(),
            EncodeError::TooLong { tokens, ctx_size, max_rows, .. } => {
                let limits = [
                    (ctx_size, "build with a larger --ctx-size, as far as the model has positions"),
                    (max_rows, "build with a larger last bucket in --buckets"),
                ];
                let exceeded = limits.into_iter().filter(|(limit, _)| tokens > *limit);
                exceeded.fold(Self::new(7, "length", &error), |failure, (_, help)| failure.help(help))
            }
            EncodeError::Empty { .. } => Self::usage(error),
        }
    }
}

impl From<TextError> for Failure {
    fn from(error: TextError) -> Self {
        Self::new(error.exit_code(), "tokenizer", error)
    }
}

impl From<PayloadError> for Failure {
    fn from(error: PayloadError) -> Self {
        let topic = if matches!(error, PayloadError::Memory { .. }) { "memory" } else { "executable" };
        let failure = Self::new(error.exit_code(), topic, &error);
        match error {
            PayloadError::Memory { .. } => failure.help("raise the limit of addresses: ulimit -v"),
            PayloadError::Unreadable { error, .. } => failure.help(match error.raw_os_error() {
                Some(libc::EACCES | libc::EPERM) => "allow it to be read: chmod +r, and +x for its folders",
                Some(libc::EMFILE | libc::ENFILE) => "raise the limit of open files: ulimit -n",
                _ => "check the disk that it lies on, or copy it again",
            }),
            PayloadError::Missing { .. } => failure.help("the weights file lies beside the executable: copy both"),
            _ => failure.help("the file was changed after it was built: copy or build it again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_whatever_the_text() {
        let failure = Failure::usage(format!("bad\n\u{1b}[31m{}", "é".repeat(600))).help("a\nb");
        let lines = failure.lines();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with("error[E2-usage]: bad\\n\\u{1b}[31m"));
        assert!(lines.iter().all(|l| l.len() <= LINE_MAX && !l.contains('\n')));
    }

    #[test]
    fn a_closed_pipe_is_quiet_and_a_full_disk_is_not() {
        let closed = Failure::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!((closed.exit, closed.lines().len()), (0, 0));
        let full = Failure::from(io::Error::from(io::ErrorKind::StorageFull));
        assert_eq!((full.exit, full.lines().len()), (8, 1));
    }

    #[test]
    fn limits_name_both_numbers() {
        let full = ContextFull { needed: 9, ctx_size: 8 };
        let failure = Failure::from(DecodeError::Full(full));
        assert_eq!(failure.exit, 7);
        assert!(failure.lines()[0].contains('9') && failure.lines()[0].contains('8'));
    }

    #[test]
    fn help_names_what_takes_the_memory() {
        let uses = [MemoryUse::WeightsCopy, MemoryUse::Scratch, MemoryUse::KvCache];
        for (what, help) in uses.into_iter().zip(["--copy-weights", "-t 1", "--ctx-size"]) {
            let failure = Failure::from(ResourceError::Memory { what, bytes: 1 << 40 });
            assert_eq!(failure.exit, 7);
            assert!(failure.lines()[0].contains(&what.to_string()) && failure.lines()[1].contains(help), "{:?}", failure.lines());
        }
    }

    #[test]
    fn help_names_each_limit_that_a_text_exceeds() {
        let help = |ctx_size, max_rows| {
            let failure = Failure::from(EncodeError::TooLong { index: 0, tokens: 600, ctx_size, max_rows });
            let lines = failure.lines();
            assert_eq!(lines[0], "error[E7-length]: text 1: 600 tokens, the executable holds 512 in one step");
            lines[1..].iter().flat_map(|line| line.split(' ').filter(|word| word.starts_with("--"))).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(help(512, 512), "--ctx-size, --buckets");
        assert_eq!(help(512, 550), "--ctx-size, --buckets");
        assert_eq!(help(512, 600), "--ctx-size,");
        assert_eq!(help(1024, 512), "--buckets");
    }

    #[test]
    fn what_no_command_line_leads_to_is_our_bug() {
        let bound = StepError::Bound { what: "slot", found: 9, bound: 2 };
        for error in [StepError::Empty, bound, StepError::Order { slot: 1, kv_index: 2 }] {
            assert_eq!(Failure::from(error).exit, 70);
        }
        let too_large = StepError::TooLarge { rows: 9, outputs: 1, max_rows: 8, max_outputs: 8 };
        assert_eq!(Failure::from(too_large).exit, 70);
    }

    #[test]
    fn what_hides_in_a_text_is_seen() {
        let lines = Failure::new(4, "text", "a\u{200b}b\u{202e}c\u{1b}[2J").help("d\u{200f}").lines();
        assert_eq!(lines, [r"error[E4-text]: a\u{200b}b\u{202e}c\u{1b}[2J", r"help: d\u{200f}"]);
    }
}
