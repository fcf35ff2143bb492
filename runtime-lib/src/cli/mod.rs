//! The command line of an executable: verbs, flags, output, exit codes. The only module that prints, exits and looks at the
//! environment, but for `start.c` and what ends a process at a signal or without memory (`process`, `memory`).
//!
//! In: arguments, the payload's address, the table of steps. Out: data on stdout, one line per error on stderr, an exit code.
//! Order of the checks: level of the CPU (10, by `start.c`), integrity of the file (exit 9, part of it by `start.c`), stack (7), CPU (exit
//! 10, all verbs but `info` and `verify`), command line (2).

mod answer;
mod args;
mod bench;
mod chat;
mod embed;
mod error;
mod generate;
mod info;
mod input;
mod output;
mod profile;
mod progress;
mod score;
mod streams;
mod template;
mod text;

use std::cell::OnceCell;
use std::ffi::OsString;
use std::panic::{Location, PanicHookInfo, resume_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches};
use rcompile_message::escape;

use crate::abi::{Manifest, StepEntry};
use crate::area::ResourceError;
use crate::cgroup;
use crate::copy;
use crate::cpu;
use crate::cpus::{Cpus, pin_to};
use crate::payload::Payload;
use crate::process::Started;
use crate::step::{Program, Session};
use crate::text::Text;
use crate::threads::{Pool, STACK_BYTES, builder};
use args::MachineArgs;
use error::Failure;
use streams::print;

/// What every verb works with.
pub(crate) struct Cx {
    payload: Payload,
    steps: &'static [StepEntry],
    started: Started,
    /// The weights, if they were copied.
    copied: OnceCell<&'static [u8]>,
}

/// Runs the command line and returns the exit code.
pub(crate) fn run(
    args: Vec<OsString>,
    payload: impl FnOnce() -> Result<Payload, crate::payload::PayloadError>,
    steps: &'static [StepEntry],
) -> i32 {
    crate::process::open_standard();
    let started = Started::now();
    crate::process::set_signals();
    let done = payload().map_err(Failure::from).and_then(|payload| {
        enlarge_stack()?;
        let cx = Cx { payload, steps, started, copied: OnceCell::new() };
        cx.dispatch(args)
    });
    match done {
        Ok(()) => 0,
        Err(failure) => {
            error::say(&failure);
            failure.exit
        }
    }
}

/// Gives this thread, which runs steps as the pool's threads do, a stack as large as theirs.
fn enlarge_stack() -> Result<(), Failure> {
    crate::process::enlarge_stack(STACK_BYTES as u64).map_err(|found| {
        let expected = STACK_BYTES >> 10;
        let what = format!("stack: expected {expected} KiB, found {} KiB", found >> 10);
        Failure::new(7, "stack", what).help(format!("raise its limit: ulimit -s {expected}"))
    })
}

/// Ends the process at a panic, on whatever thread: one line as of other errors, no part of a file left. Nothing is unwound: what called
/// this may be generated code, through which nothing unwinds, and other threads would wait for this one.
pub(crate) fn leave_at_panic(panic: &PanicHookInfo) -> ! {
    static LEAVING: AtomicBool = AtomicBool::new(false);
    while LEAVING.swap(true, Ordering::Relaxed) {
        // Another thread ends the process.
        std::thread::park();
    }
    let failure = panicked(panic.payload_as_str(), panic.location());
    error::say(&failure);
    crate::process::leave_with(failure.exit)
}

fn panicked(what: Option<&str>, place: Option<&Location>) -> Failure {
    let place = place.map_or(String::new(), |l| format!("{l}: "));
    Failure::bug(format!("{place}{}", what.unwrap_or("unknown")))
}

impl Cx {
    fn manifest(&self) -> &Manifest {
        self.payload.manifest()
    }

    fn dispatch(&self, args: Vec<OsString>) -> Result<(), Failure> {
        let verb = args.get(1).and_then(|a| a.to_str()).unwrap_or("");
        if !matches!(verb, "info" | "verify") {
            let needed = &self.manifest().features;
            let missing = cpu::missing(needed);
            if !missing.is_empty() {
                return Err(Failure::new(10, "cpu", cpu::describe(needed, &missing)).help(cpu::help(&missing)));
            }
        }
        let matches = match self.command().try_get_matches_from(&args) {
            Ok(matches) => matches,
            Err(error) => return usage_error(&error, &format!("{} {verb}", self.payload.name())),
        };
        let Some((verb, flags)) = matches.subcommand() else {
            return Err(Failure::usage("no verb given"));
        };
        for name in args::unknown_variables() {
            error::warn("variable", format!("{}: no verb has such a flag", escape(&name)));
        }
        match verb {
            "generate" => generate::generate(self, &parsed(flags)?, flags),
            "chat" => chat::chat(self, &parsed(flags)?),
            "logits" => score::logits(self, &parsed(flags)?, flags),
            "perplexity" => score::perplexity(self, &parsed(flags)?),
            "embed" => embed::embed(self, &parsed(flags)?, flags),
            "bench" => bench::bench(self, &parsed(flags)?, flags),
            "profile" => profile::profile(self, &parsed(flags)?, flags),
            "tokenize" => text::tokenize(self, &parsed(flags)?, flags),
            "detokenize" => text::detokenize(self, &parsed(flags)?),
            "info" => info::info(self, &parsed(flags)?),
            "verify" => info::verify(self, &parsed(flags)?),
            other => Err(Failure::usage(format!("unknown verb {other:?}"))),
        }
    }

    /// The verbs of this executable's task.
    fn command(&self) -> Command {
        let manifest = self.manifest();
        // Lives as long as the process, like the names of the variables.
        let file: &'static str = Box::leak(escape(self.payload.name()).into_boxed_str());
        let name = escape(&manifest.name);
        let version: &'static str = Box::leak(format!("{name} (rcompile {})", manifest.rcompile_version).into_boxed_str());
        let command = Command::new(file)
            .bin_name(file)
            .about(format!("{name} ({}), compiled by rcompile for {} ({})", manifest.architecture, manifest.target, manifest.cpu))
            .version(version)
            .after_help(
                "Every flag of a verb is also read from the environment, the command line wins:\n\
                 RCOMPILE_ARG_N_PREDICT=16 is --n-predict 16, RCOMPILE_ARG_N=16 is -n 16.",
            )
            .disable_help_subcommand(true)
            .subcommand_required(true);
        let own = args::verbs().into_iter().filter(|(task, _)| task.is_none_or(|task| task == manifest.task));
        command.subcommands(own.map(|(_, verb)| args::with_environment(verb)))
    }

    /// Starts to load the tokenizer on a thread of its own.
    fn load_text(&self) -> Result<LoadingText, Failure> {
        let Some(info) = &self.manifest().text else {
            return Err(Failure::new(6, "tokenizer", "this executable has no tokenizer")
                .help("build from a model directory with tokenizer.json, or give generate, logits or embed token ids: --tokens 1,2,3"));
        };
        let bytes = self.payload.blob(info.tokenizer, "tokenizer")?;
        let thread = builder("tokenizer").spawn(move || Text::load(bytes)).map_err(ResourceError::Threads)?;
        Ok(LoadingText { thread })
    }

    /// A pool as the flags ask for.
    fn pool(&self, threads: Option<usize>, pin: bool) -> Result<Pool, Failure> {
        let cpus = Cpus::of_process();
        let threads = threads.unwrap_or(cpus.default_threads);
        let pinned = pin.then_some(&cpus.spread[..]);
        let pool = Pool::new(threads, cpus.available, pinned).map_err(ResourceError::Threads)?;
        if let Some(&first) = pinned.and_then(|cpus| cpus.first()) {
            // Without the right to pin, threads run unpinned.
            let _ = pin_to(first);
        }
        Ok(pool)
    }

    /// Says once that mapped weights exceed what the control group allows.
    fn warn_of_weights(&self, bytes: u64) {
        static SAID: Once = Once::new();
        if let Some(limit) = cgroup::memory_limit().filter(|limit| *limit < bytes) {
            let (weights, limit) = (bytes.div_ceil(1 << 20), limit >> 20);
            let what = format!("{weights} MiB of weights, the control group allows {limit} MiB: they are read from disk again and again");
            SAID.call_once(|| error::warn("memory", what));
        }
    }

    /// A session for the entry of the executable's task.
    fn session(&self, machine: &MachineArgs) -> Result<Session<'static>, Failure> {
        let entry = self.manifest().task.entry();
        let entries = &self.manifest().entries;
        let index =
            entries.iter().position(|e| e.name == entry).ok_or_else(|| Failure::new(9, "executable", format!("no entry {entry:?}")))?;
        // Before the pool, which may pin this thread to a core, and with it the threads that copy.
        let weights = match (machine.place.copy_weights, self.copied.get()) {
            (false, _) => {
                let weights = self.payload.weights()?;
                self.warn_of_weights(weights.len() as u64);
                weights
            }
            (true, Some(weights)) => weights,
            (true, None) => {
                let threads = machine.threads.unwrap_or_else(|| Cpus::of_process().default_threads);
                // SAFETY: the payload's weights are mapped from the executable or the file beside it, read-only.
                let weights = unsafe { copy::copied(self.payload.weights()?, threads) }?;
                self.copied.get_or_init(|| weights)
            }
        };
        let pool = self.pool(machine.threads, machine.place.pin)?;
        // SAFETY: manifest, functions and weights come from one build: the code and manifest hashes were checked at start.
        let program = unsafe { Program::new(self.manifest(), index, self.steps, weights) }?;
        Ok(Session::new(program, pool)?)
    }
}

/// A tokenizer that is being loaded.
pub(crate) struct LoadingText {
    thread: JoinHandle<Result<Text<'static>, crate::text::TextError>>,
}

impl LoadingText {
    fn wait(self) -> Result<Text<'static>, Failure> {
        Ok(self.thread.join().unwrap_or_else(|panic| resume_unwind(panic))?)
    }
}

fn parsed<A: FromArgMatches>(flags: &ArgMatches) -> Result<A, Failure> {
    A::from_arg_matches(flags).map_err(|e| Failure::usage(e.kind()))
}

/// What clap says of a verb's command line, as one error line; help and version are data.
fn usage_error(error: &clap::Error, verb: &str) -> Result<(), Failure> {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return print(&error.render().to_string());
    }
    let text = error.render().to_string();
    let mut lines = text.lines();
    let mut what: Vec<&str> = lines.by_ref().take_while(|l| !l.trim().is_empty()).map(str::trim).collect();
    if let Some(first) = what.first_mut() {
        *first = first.strip_prefix("error: ").unwrap_or(first);
    }
    let usage = lines.filter_map(|l| l.trim().strip_prefix("Usage: ")).next_back().map(str::to_owned);
    let failure = Failure::usage(what.join(" ")).help(usage.unwrap_or_else(|| format!("{} --help", verb.trim_end())));
    // A value may come from there without the user's knowing.
    let set = args::set_variables();
    Err(if set.is_empty() { failure } else { failure.help(format!("set in the environment: {}", set.join(", "))) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its line was said where it panicked.
    #[test]
    fn a_panic_of_the_loading_thread_is_no_second_error() {
        let thread = builder("tokenizer").spawn(|| panic!("while loading")).unwrap();
        let waited = std::thread::spawn(|| LoadingText { thread }.wait().map(|_| ())).join();
        assert_eq!(waited.unwrap_err().downcast_ref(), Some(&"while loading"));
    }

    #[test]
    fn a_panic_is_one_line_like_other_errors() {
        let failure = panicked(Some(&format!("no token \u{1b}[31m\n{}", "x".repeat(1000))), Some(Location::caller()));
        let lines = failure.lines();
        assert_eq!((failure.exit, lines.len()), (70, 2));
        assert!(
            lines[0].starts_with("error[E70-internal]: runtime-lib/src/cli/mod.rs:") && lines[0].contains("no token \\u{1b}[31m\\nx"),
            "{lines:?}"
        );
        assert!(lines[0].len() <= 500 && lines[1].contains("please report"), "{lines:?}");
    }
}
