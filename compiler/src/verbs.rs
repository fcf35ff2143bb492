//! The verbs of the command line, each with what runs it.

use crate::error::Error;
use crate::options::Command;
use crate::{cache, compare, doctor, inspect, pipeline, report, targets};

/// Runs a verb.
pub fn dispatch(command: Command) -> Result<(), Error> {
    match command {
        Command::Build(options) => {
            let report = pipeline::run(&options)?;
            if options.json {
                return report::print_json(&report);
            }
            report::print(&report.text)?;
            match (options.quiet, options.timings) {
                (false, _) => report::say(report.lines().trim_end()),
                (true, true) => report::say(report.timings().trim_end()),
                (true, false) => {}
            }
            Ok(())
        }
        Command::Inspect(options) => inspect::run(&options),
        Command::Targets(options) => targets::run(options.json),
        Command::Doctor(options) => doctor::run(options.json),
        Command::Compare(options) => compare::run(&options),
        Command::Cache(verb) => cache::verb::run(&verb),
    }
}
