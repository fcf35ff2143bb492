//! The table of contents of a build: every stage and every pass, in order, with the reason for its place.
//!
//! ```text
//! open     model directory -> checked Model                       (models)
//! trace    per bucket: forward code -> graph                      (models)
//! passes   per bucket: graph -> fused graph, layers outlined      (PASSES below)
//! autotune with `--autotune fast`: tiles measured on this machine  (autotune)
//! plan     per bucket: graph -> program; one weight table for all (plan)
//! calibrate with `--calibrate`: codes of weights from what the model computes on a text (calibrate)
//! codegen  all buckets' distinct units -> objects, in parallel    (codegen); meanwhile the input files are hashed
//! link     objects + runtime archive -> executable without weights (link)
//! pack     weights into their final place                         (pack)
//! finish   header, sync, re-read and check, rename                (link)
//! ```
//! What each stage does is in `stages.rs`. `--stop-after` takes open, trace, passes, plan and codegen, and the names of passes.

use crate::cache::{self, Cache};
use crate::emit::{self, EmitTo};
use crate::error::Error;
use crate::manifest::Contents;
use crate::options::{Autotune, Build, EmitKind};
use crate::outputs;
use crate::passes::*;
use crate::report::Report;
use crate::stages::{Background, Building};
use crate::threads::STACK_BYTES;
use rcompile_graph::Module;

/// Stages that a build can end with, in order; what comes between codegen and finish makes no sense alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Open,
    Trace,
    Passes,
    Plan,
    Codegen,
    Finish,
}

impl Stage {
    /// Those that `--stop-after` knows beside the passes, by name.
    const STOPS: [(&str, Stage); 5] =
        [("open", Stage::Open), ("trace", Stage::Trace), ("passes", Stage::Passes), ("plan", Stage::Plan), ("codegen", Stage::Codegen)];

    /// The stage that makes what `--emit` asks for.
    fn of(kind: EmitKind) -> Stage {
        match kind {
            EmitKind::Graph => Stage::Passes,
            EmitKind::Program => Stage::Plan,
            EmitKind::LlvmIr | EmitKind::Asm | EmitKind::Obj => Stage::Codegen,
            EmitKind::Exe => Stage::Finish,
        }
    }

    fn name(self) -> &'static str {
        Stage::STOPS.iter().find(|s| s.1 == self).map_or("finish", |s| s.0)
    }
}

/// All graph passes in order, each with the lowest `-O` at which it runs.
#[rustfmt::skip]
pub const PASSES: &[Pass] = &[
    Pass::new("canonicalise", canonicalise::run, 0),                            // one spelling, for the patterns below
    Pass::new("fold-const", fold_const::run, 0),                                // literals, for norms (eps) and scales
    Pass::new("cse", cse::run, 1),                                              // one name per value, which patterns compare
    Pass::new("dce", dce::run, 0),                                              // unused parameters are neither packed nor counted
    Pass::new("fuse-layer-norm", fuse_layer_norm::run, 1),                      // after fold-const: eps must be a literal
    Pass::new("fuse-rms-norm", fuse_rms_norm::run, 1),                          // after fuse-layer-norm, which holds an RMS norm of x - mean
    Pass::new("fuse-rope", fuse_rope::run, 1),                                  // after cse: cos and sin have one name
    Pass::new("dead-logit-rows", dead_logit_rows::run, 1).of_steps(),           // after the norms: a row-wise op is easy to cross
    Pass::new("quantise", quantise::run, 0).decides("--quantize none"),         // meaning too; before compute-dtype, which looks at weights
    Pass::new("compute-dtype", compute_dtype::run, 0).decides("--compute f32"), // meaning, not speed; before merge-matmuls, so that
    Pass::new("cse-2", cse::run, 1),                                            //   merged weights have their final type; one conversion
    Pass::new("merge-matmuls", merge_matmuls::run, 1),                          //   per value, so that their inputs have one name
    Pass::new("dce-2", dce::run, 0),                                            // what fusion left behind
    Pass::new("outline-layers", outline_layers::run, 1).of_steps(),             // last: all others see plain layers
];

/// `rcompile build`.
pub fn run(options: &Build) -> Result<Report, Error> {
    options.check()?;
    let passes = chosen_passes(options)?;
    let last = last_stage(options, &passes)?;
    outputs::check(options)?;
    cache::check(&options.cache)?;
    let mut pool = rayon::ThreadPoolBuilder::new().stack_size(STACK_BYTES);
    if let Some(jobs) = options.jobs {
        pool = pool.num_threads(jobs as usize);
    }
    let pool = pool.build().map_err(|e| Error::threads(format_args!("{e}: use a smaller --jobs")))?;
    pool.install(|| build(options, &passes, last))
}

/// From the model directory to the executable, or to the last stage.
fn build(o: &Build, passes: &[ChosenPass], last: Stage) -> Result<Report, Error> {
    let mut b = Building::new(o);
    let mut source = b.open()?;
    if last == Stage::Open {
        b.report.text = format!("{:#?}\n", source.model.facts());
        return Ok(b.into_report());
    }
    let site = b.site(&source)?;

    let mut modules = b.trace(&source)?;
    if last == Stage::Trace {
        emit::of_stage(o, EmitKind::Graph, || print_all(&modules), true, &mut b.report)?;
        return Ok(b.into_report());
    }
    b.passes(passes, &mut source, &mut modules)?;
    emit::of_stage(o, EmitKind::Graph, || print_all(&modules), last == Stage::Passes, &mut b.report)?;
    if last == Stage::Passes {
        return Ok(b.into_report());
    }

    let mut cache = if last == Stage::Plan { Cache::none() } else { b.cache()? };
    if let (Autotune::Fast, Some(site)) = (o.autotune, &site) {
        b.autotune(&mut source, &modules, site, &cache)?;
    }
    let plans = b.plan(&source, &modules)?;
    drop(modules);
    let programs = || plans.buckets.iter().map(|p| p.program.to_string()).collect::<Vec<_>>().join("\n");
    emit::of_stage(o, EmitKind::Program, programs, last == Stage::Plan, &mut b.report)?;
    if last == Stage::Plan {
        return Ok(b.into_report());
    }

    let Some(site) = site else {
        b.codegen(&source, &plans, &cache)?;
        b.commit(cache);
        return Ok(b.into_report());
    };
    b.check_space(&source, &plans, &site)?;
    let calibration = b.calibrate(PASSES, &source, &site, &cache)?;
    let background = Background::start(&source.model)?;
    let code = b.codegen(&source, &plans, &cache)?;
    let (linked, tokenizer) = b.link(&site, code, background.tokenizer)?;
    let contents = Contents { source: &source, plans: &plans, calibration: calibration.as_ref(), tokenizer };
    let packed = b.pack(&site, linked, &contents, &mut cache)?;
    b.finish(&site, packed, &contents, background.inputs, &mut cache)?;
    b.commit(cache);
    Ok(b.into_report())
}

/// The passes of this optimisation level with `--passes` applied.
fn chosen_passes(o: &Build) -> Result<Vec<ChosenPass>, Error> {
    let names = || PASSES.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
    if let Some(edit) = o.passes.iter().find(|e| PASSES.iter().all(|p| p.name != e.name)) {
        let what = format!("--passes {edit}: no such pass, expected one of {}", names());
        return Err(Error::Usage { what, help: None });
    }
    let left_out = |p: &&Pass| p.instead.is_some() && o.passes.iter().any(|e| e.name == p.name && !e.add);
    if let Some(pass) = PASSES.iter().find(left_out) {
        let what = format!("--passes -{}: it decides what is computed, not how fast", pass.name);
        return Err(Error::Usage { what, help: pass.instead.map(|option| format!("use {option}")) });
    }
    let is_chosen = |p: &Pass| match o.passes.iter().rev().find(|e| e.name == p.name) {
        Some(edit) => edit.add,
        None => p.level <= o.opt_level,
    };
    let all = (1..).zip(PASSES).map(|(number, pass)| ChosenPass { pass: *pass, number });
    Ok(all.filter(|chosen| is_chosen(&chosen.pass)).collect())
}

/// Where a build ends: with what `--emit` asks for; with the plan where nothing is to be written; or where `--stop-after` says, which names
/// a stage, or a pass that this build runs, and comes after the texts that `--emit` asks for.
fn last_stage(o: &Build, passes: &[ChosenPass]) -> Result<Stage, Error> {
    let asked = o.emit.iter().map(|emit| Stage::of(emit.kind));
    let Some(at) = o.stop_after.as_deref() else {
        let last = asked.max().unwrap_or(Stage::Finish);
        let prints = |kind: EmitKind| Stage::of(kind) == Stage::Codegen && emit::emitted(o, kind) == Some(EmitTo::Stdout);
        if let Some(emit) = o.emit.iter().find(|emit| o.dry_run && prints(emit.kind)) {
            let what = format!("--emit {}: a --dry-run ends with the plan", emit.kind.name());
            return Err(Error::Usage { what, help: Some("leave one of them out".into()) });
        }
        return Ok(if o.dry_run { last.min(Stage::Plan) } else { last });
    };
    let stage = if passes.iter().any(|p| p.pass.name == at) { "passes" } else { at };
    let Some((_, stop)) = Stage::STOPS.into_iter().find(|s| s.0 == stage) else {
        let known = Stage::STOPS.iter().map(|s| s.0).chain(passes.iter().map(|p| p.pass.name)).collect::<Vec<_>>().join(", ");
        let exists = PASSES.iter().any(|p| p.name == at);
        let what = if exists { "this build does not run that pass" } else { "no such stage or pass to stop after" };
        return Err(Error::Usage { what: format!("--stop-after {at}: {what}, expected one of {known}"), help: None });
    };
    if o.dry_run && stop > Stage::Plan {
        let what = format!("--stop-after {at}: a --dry-run ends with the plan");
        return Err(Error::Usage { what, help: Some("leave one of them out".into()) });
    }
    // An executable is what a build that stops early does not make; there is a graph from the trace on.
    let there = |stage: &Stage| *stage == Stage::Finish || (*stage, stop) == (Stage::Passes, Stage::Trace);
    match asked.filter(|stage| !there(stage)).max() {
        Some(last) if last > stop => {
            let what = format!("--stop-after {at}: what --emit asks for is made by the stage {}", last.name());
            Err(Error::Usage { what, help: Some(format!("--stop-after {}, or leave one of them out", last.name())) })
        }
        _ => Ok(stop),
    }
}

fn print_all(modules: &[Module]) -> String {
    modules.iter().map(rcompile_graph::print).collect::<Vec<_>>().join("\n")
}
