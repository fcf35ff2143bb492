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
//! `--stop-after` takes the names of stages up to codegen and of passes.

use crate::cache::{self, Cache};
use crate::calibrate::{self, CalibrationText};
use crate::emit::{self, Dump, bucket_name};
use crate::error::Error;
use crate::link::guard::WorkDir;
use crate::link::payload::{self, Blobs, Content, Unsealed};
use crate::link::{self, Inputs, Step, tools};
use crate::manifest::{manifest, weights_type};
use crate::options::{Autotune, Build, Command, EmitKind, Task as TaskOption, WeightsPlace};
use crate::pack::Tensors;
use crate::passes::*;
use crate::plan::{self, PlanCx, Planned, WeightTable};
use crate::report::{self, BucketReport, Progress, Report, Timing, millis};
use crate::settings::Settings;
use crate::tuning::Tuning;
use crate::{autotune, compare, doctor, inspect, pack, targets};
use rayon::prelude::*;
use rcompile_codegen::isa::Isa;
use rcompile_codegen::{Compiled, Emit, Options as CodegenOptions, Unit, compile_units, probe_units, step_symbol, verify};
use rcompile_graph::Module;
use rcompile_models::arch::Task;
use rcompile_models::dir::InputFile;
use rcompile_models::trace::{TraceOptions, trace};
use rcompile_models::{Kind, Model, OpenOptions, TokenizerUse};
use rcompile_runtime::abi::PROBE_ENTRY;
use rcompile_runtime::text::TextError;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// Stages that `--stop-after` knows beside the passes.
const STAGES: [&str; 5] = ["open", "trace", "passes", "plan", "codegen"];

/// Rows that may want logits in one step: full f32 logits are written for each.
const MAX_LOGIT_ROWS: u32 = 64;
/// About the size of an executable without its weights, for the check of the disk's space.
const LINKED_BYTES: u64 = 24 << 20;

/// All graph passes in order. `level` is the lowest `-O` at which a pass runs.
#[rustfmt::skip]
pub const PASSES: &[Pass] = &[
    Pass { name: "canonicalise", run: canonicalise::run, level: 0 },         // one spelling, for the patterns below
    Pass { name: "fold-const", run: fold_const::run, level: 0 },             // literals, for norms (eps) and scales
    Pass { name: "cse", run: cse::run, level: 1 },                           // one name per value, which patterns compare
    Pass { name: "dce", run: dce::run, level: 0 },                           // unused parameters are neither packed nor counted
    Pass { name: "fuse-layer-norm", run: fuse_layer_norm::run, level: 1 },   // after fold-const: eps must be a literal
    Pass { name: "fuse-rms-norm", run: fuse_rms_norm::run, level: 1 },       // after fuse-layer-norm, which holds an RMS norm of x - mean
    Pass { name: "fuse-rope", run: fuse_rope::run, level: 1 },               // after cse: cos and sin have one name
    Pass { name: "dead-logit-rows", run: dead_logit_rows::run, level: 1 },   // after the norms: a row-wise op is easy to cross
    Pass { name: "quantise", run: quantise::run, level: 0 },                 // meaning too; before compute-dtype, which looks at weights
    Pass { name: "compute-dtype", run: compute_dtype::run, level: 0 },       // meaning, not speed; before merge-matmuls, so that
    Pass { name: "cse-2", run: cse::run, level: 1 },                         //   merged weights have their final type; one conversion
    Pass { name: "merge-matmuls", run: merge_matmuls::run, level: 1 },       //   per value, so that their inputs have one name
    Pass { name: "dce-2", run: dce::run, level: 0 },                         // what fusion left behind
    Pass { name: "outline-layers", run: outline_layers::run, level: 1 },     // last: all others see plain layers
];

/// Runs a verb.
pub fn dispatch(command: Command) -> Result<(), Error> {
    match command {
        Command::Build(options) => {
            let report = run(&options)?;
            if options.json {
                return report::print_json(&report);
            }
            report::print(&report.text)?;
            if !options.quiet {
                report::say(report.lines().trim_end());
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

/// `rcompile build`.
pub fn run(options: &Build) -> Result<Report, Error> {
    options.check()?;
    let passes = chosen_passes(options)?;
    check_stop(options, &passes)?;
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(jobs) = options.jobs {
        pool = pool.num_threads(jobs as usize);
    }
    let pool = pool.build().map_err(|e| Error::threads(format_args!("{e}: use a smaller --jobs")))?;
    pool.install(|| build(options, &passes))
}

/// The stages.
fn build(o: &Build, passes: &[Pass]) -> Result<Report, Error> {
    let mut progress = Progress::new(o.quiet);
    let mut report = Report { show_passes: o.timings, ..Report::default() };
    let stop = |at: &str| o.stop_after.as_deref() == Some(at);

    // open: everything that can be wrong with the directory is found here, before any work.
    let isa = isa(o)?;
    let (mut tuning, mut tuning_input) = (None, None);
    match (&o.tuning, o.autotune) {
        (_, Autotune::Fast) => autotune::check(&isa)?,
        (Some(path), Autotune::Off) => (tuning, tuning_input) = Tuning::read(path, &isa).map(|(t, input)| (Some(t), Some(input)))?,
        (None, Autotune::Off) => {}
    }
    let stage = progress.stage("open", 0, false);
    let model = Arc::new(open(o)?);
    let text = match &o.quantize.calibrate {
        Some(path) => calibrate::check(&model).and_then(|()| CalibrationText::read(path, &model)).map(Some)?,
        None => None,
    };
    let facts = model.facts();
    stage.finish(&format!("{}: {}, {} parameters", model.name, model.arch.class_names[0], model.weights.parameters()));
    for warning in &model.warnings {
        warn(Some(warning.to_string()), &progress, &mut report);
    }
    let settings = Settings::new(o, &model, &isa)?;
    if settings.ctx_size as usize > facts.max_positions {
        let text = format!(
            "warning[W-context]: --ctx-size: {} positions are beyond what the model was trained for, {}; later positions may be nonsense",
            settings.ctx_size, facts.max_positions
        );
        warn(Some(text), &progress, &mut report);
    }
    if let (Some(_), Some(_)) = (model.scheme, settings.quantisation.body) {
        let count = model.weights.coded_count();
        let text = format!("warning[W-quantize]: --quantize: {count} matrices of the checkpoint are codes already and stay as they are");
        warn(Some(text), &progress, &mut report);
    }
    report.model = model.name.clone();
    report.architecture = model.arch.class_names[0].into();
    report.target = isa.triple.clone();
    report.cpu = isa.name.clone();
    report.compute = settings.compute_name().into();
    report.quantisation = settings.quantisation_name.clone();
    report.kv_dtype = settings.kv_name().into();
    report.ctx_size = settings.ctx_size;
    if stop("open") {
        report.text = format!("{facts:#?}\n");
        return Ok(finished(report, &progress));
    }

    // Whatever may be wrong with outputs and tools is said now and not after minutes of work.
    emit::check_outputs(o, &model)?;
    let place = match o.exe_path().filter(|_| o.writes_exe()) {
        Some(output) => {
            let archive = targets::require_runtime(&isa.triple)?;
            Some((output, WorkDir::create(output)?, tools::find(&isa.triple)?, archive))
        }
        None => None,
    };

    // trace: the architecture's forward code, run with symbolic rows, once per bucket.
    let stage = progress.stage("trace", o.buckets.0.len() as u64, false);
    let mut modules = Vec::new();
    for &rows in &o.buckets.0 {
        let module = trace_bucket(&model, &settings, rows)?;
        verify_graph("trace", &module)?;
        modules.push(module);
        stage.advance(1);
    }
    stage.finish(&format!("{} buckets", modules.len()));
    let dump = Dump { dir: o.dump_dir.as_deref() };
    for module in &modules {
        dump.write(module, "00-trace.graph", &rcompile_graph::print(module))?;
    }
    if stop("trace") {
        report.text = print_all(&modules);
        return Ok(finished(report, &progress));
    }

    // passes: the same list for every bucket; a bucket's graph changes nothing but its bounds.
    let stage = progress.stage("passes", modules.len() as u64, false);
    for module in &mut modules {
        stage.message(bucket_name(module));
        run_passes(o, passes, module, &settings, &dump, &mut report)?;
        stage.advance(1);
    }
    stage.finish(&format!("{} passes", passes.len()));
    let emitted = emit::text(o, emit::GRAPH, || print_all(&modules), &mut report)?;
    let only_graph = o.emit.iter().all(|e| e.kind == EmitKind::Graph);
    if only_graph || o.stop_after.as_ref().is_some_and(|at| at == "passes" || passes.iter().any(|p| p.name == at)) {
        if o.stop_after.is_some() && !emitted {
            report.text += &print_all(&modules);
        }
        return Ok(finished(report, &progress));
    }

    let needs_code = o.emit.iter().any(|e| !matches!(e.kind, EmitKind::Graph | EmitKind::Program));
    let only_plan = stop("plan") || o.dry_run || !needs_code;
    let (mut cache, warning) = if only_plan { (Cache::none(), None) } else { Cache::open(&o.cache)? };
    warn(warning, &progress, &mut report);
    let plan_all = |tuning: Option<&Tuning>| {
        // All buckets share the weights, so they share the table.
        let mut weights = WeightTable::default();
        let cx = PlanCx { isa: &isa, slots: settings.slots, ctx_size: settings.ctx_size, tuning };
        let plan_one = |module: &Module| {
            let planned = plan::plan(module, &cx, &mut weights)?;
            verify::verify(&planned.program)?;
            Ok::<_, Error>(planned)
        };
        let plans = modules.iter().map(plan_one).collect::<Result<Vec<Planned>, Error>>()?;
        Ok((plans, weights))
    };

    // autotune: plans with other tiles, run on this machine.
    if let (Autotune::Fast, Some((_, work, tools, archive))) = (o.autotune, &place) {
        let link_trial = |work: &WorkDir, plans: &[Planned], weights: &WeightTable| {
            let options = CodegenOptions { opt_level: o.opt_level, emit: Emit::default() };
            let compile_one = |unit: &Unit<'_>| Ok((unit.symbol.clone(), cache.compile(unit)?.object));
            let (units, steps) = code(plans, &isa, options);
            let objects = units.par_iter().map(compile_one).collect::<Result<Vec<_>, Error>>()?;
            let linked = link::link(work, tools, Inputs { steps: &steps, objects: &objects, archive })?;
            let mut blobs = Blobs::default();
            let manifest = manifest(&model, &isa, &settings, plans, weights, (Vec::new(), None, Vec::new()), &mut blobs)?;
            payload::append(work, linked, Content { manifest: &manifest, blobs: &blobs, weights_len: weights.len, embedded: false })
        };
        let cx = autotune::Cx { isa: &isa, ctx_size: settings.ctx_size, plan: &plan_all, link: &link_trial, work };
        let (best, measured) = autotune::run(&cx, &mut progress)?;
        tuning_input = Some(best.write(o.tuning.as_deref(), &isa)?);
        tuning = Some(best);
        report.autotune = Some(measured);
    }

    // plan: kernels, buffers, packed weights, barriers.
    let stage = progress.stage("plan", 0, false);
    let (plans, weights) = plan_all(tuning.as_ref())?;
    for (planned, module) in plans.iter().zip(&modules) {
        dump.write(module, "99-plan.program", &planned.program.to_string())?;
    }
    drop(modules);
    let unused = tuning.as_ref().and_then(|tuning| tuning.unused(plans.iter().map(|p| &p.program)));
    stage.finish(&format!(
        "{} regions, weights {}",
        plans.iter().map(|p| p.program.regions.len()).sum::<usize>(),
        report::size(weights.len)
    ));
    warn(unused, &progress, &mut report);
    fill_plan_report(&mut report, &plans, &weights);
    let programs = || plans.iter().map(|p| p.program.to_string()).collect::<Vec<_>>().join("\n");
    let emitted = emit::text(o, emit::PROGRAM, programs, &mut report)?;
    if only_plan {
        if stop("plan") && !emitted {
            report.text += &programs();
        }
        return Ok(finished(report, &progress));
    }

    if let Some((_, work, _, archive)) = &place {
        // Calibrated codes lie beside the executable until they are packed.
        let codes = if text.is_some() { model.weights.parameters() } else { 0 };
        payload::check_space(work.path(), weights.len + archive.len() as u64 + LINKED_BYTES + codes)?;
    }

    // calibrate: before the executable's own code is made, because whatever is wrong with the text or what the model makes of it shows here.
    let calibration = match (&text, &place) {
        (Some(text), Some((_, work, _, _))) => {
            let (quantisation, act_order) = (&settings.quantisation, o.quantize.act_order);
            let cx = calibrate::Cx { model: &model, quantisation, act_order, passes: PASSES, cache: &cache, work };
            Some(calibrate::run(&cx, text, &mut progress)?)
        }
        _ => None,
    };

    // codegen: every distinct unit of all buckets once; equal kernels of several buckets are one unit. Units of earlier builds are cached.
    let codegen_options = CodegenOptions {
        opt_level: o.opt_level,
        emit: Emit { llvm_ir: o.emits(EmitKind::LlvmIr).is_some(), asm: o.emits(EmitKind::Asm).is_some() },
    };
    let (units, steps) = code(&plans, &isa, codegen_options);
    let stage = progress.stage("codegen", units.len() as u64, false);
    // Meanwhile, on threads of their own, the input files are hashed and the tokenizer is made compact.
    let background = if o.writes_exe() {
        let (hashed, read) = (model.clone(), model.clone());
        Some((spawn(move || hashed.hash_inputs())?, spawn(move || compact_tokenizer(&read))?))
    } else {
        None
    };
    let compile_one = |unit: &_| {
        let compiled = cache.compile(unit);
        stage.advance(1);
        compiled
    };
    let objects = units.par_iter().map(compile_one).collect::<Vec<_>>().into_iter().collect::<Result<Vec<Compiled>, _>>()?;
    report.units = units.len();
    report.code_bytes = objects.iter().map(|c| code_bytes(&c.object)).sum();
    report.cache = cache.report();
    let cached = match report.cache.hits {
        0 => String::new(),
        n => format!(", {n} from the cache"),
    };
    stage.finish(&format!("{} units{cached}, code {}", units.len(), report::size(report.code_bytes)));
    let symbols: Vec<String> = units.into_iter().map(|u| u.symbol).collect();
    emit::code(o, &symbols, &objects, &mut report)?;
    let (Some((output, work, tools, archive)), Some((hashing, compact))) = (place, background) else {
        warn(cache.warning(), &progress, &mut report);
        warn(cache.commit(), &progress, &mut report);
        return Ok(finished(report, &progress));
    };

    // link: a C compiler driver, the runtime archive that rcompile carries, and the objects.
    let stage = progress.stage("link", 0, false);
    let objects: Vec<(String, Vec<u8>)> = symbols.into_iter().zip(objects.into_iter().map(|c| c.object)).collect();
    let linked = link::link(&work, &tools, Inputs { steps: &steps, objects: &objects, archive });
    if o.save_temps {
        emit::save_temps(&work, output, &objects, archive)?;
    }
    let linked = linked?;
    drop(objects);
    let tokenizer = joined(compact)?;
    let manifest = |mut inputs: Vec<InputFile>, blobs: &mut Blobs| {
        inputs.extend(tuning_input.clone());
        inputs.extend(text.as_ref().map(|t| t.input.clone()));
        let notes = calibration.iter().map(|c| c.note.clone()).collect();
        manifest(&model, &isa, &settings, &plans, &weights, (inputs, tokenizer.clone(), notes), blobs)
    };
    let mut blobs = Blobs::default();
    // Hashes of the weight files may take longer than all that is to do: they are filled in at the end.
    let first = manifest(model.list_inputs(), &mut blobs)?;
    let content = Content { manifest: &first, blobs: &blobs, weights_len: weights.len, embedded: o.weights == WeightsPlace::Embed };
    let linked_bytes = linked.len_bytes();
    let mut exe = payload::append(&work, linked, content)?;
    stage.finish(&format!("{} without weights", report::size(linked_bytes)));

    // pack: the weights go straight to their final place in the file, where an earlier build has packed them as a copy.
    let stage = progress.stage("pack", weights.len, true);
    let advance = |bytes| stage.advance(bytes);
    let with_codes = calibration.as_ref().map(|c| c.codes.over(&model.weights));
    let tensors: &dyn Tensors = with_codes.as_ref().map_or(&model.weights, |t| t);
    let pack_all = |exe: &Unsealed, advance: &(dyn Fn(u64) + Sync)| pack::pack(&weights, tensors, exe.sink(), o.allow_nonfinite, advance);
    let weights_key = match cache.has_weights() {
        true => {
            let codes = calibration.as_ref().map(|c| c.codes.hash()).transpose()?;
            let given = format!("{:?} {codes:?}", model.scheme);
            Some(cache.weights_key(&weights, model.weights.files(), o.allow_nonfinite, &given))
        }
        false => None,
    };
    let mut loaded = weights_key.and_then(|key| cache.load_weights(&key, weights.len, exe.sink(), &advance));
    let mut packed = match &loaded {
        Some(loaded) => loaded.packed.clone(),
        None => pack_all(&exe, &advance)?,
    };
    model.weights.check_unchanged()?;
    stage.finish(&format!("{}{}", report::size(weights.len), if loaded.is_some() { " from the cache" } else { "" }));

    // finish: only a complete and checked file gets the name.
    let stage = progress.stage("finish", 0, false);
    report.file_bytes = exe.file_len();
    let inputs = joined(hashing)?;
    exe.set_manifest(&manifest(inputs.clone(), &mut Blobs::default())?)?;
    let of_weights = |input: &&InputFile| model.weights.files().iter().any(|file| file.name() == input.name);
    let weight_files: Vec<InputFile> = inputs.iter().filter(of_weights).cloned().collect();
    let source_holds = loaded.as_ref().is_none_or(|loaded| cache.weights_hold(loaded, &weight_files));
    let mut sealed = source_holds && exe.seal(packed.hash)?;
    if let (false, Some(_), Some(key)) = (sealed, &loaded, &weights_key) {
        cache.discard_weights(key, source_holds);
        loaded = None;
        exe.clear_weights()?;
        packed = pack_all(&exe, &|_| {})?;
        sealed = exe.seal(packed.hash)?;
    }
    if !sealed {
        return Err(exe.differs("weights"));
    }
    if let (None, Some(key)) = (&loaded, weights_key) {
        cache.keep_weights(key, weights.len, &packed, exe.sink(), &weight_files, &model.name);
    }
    exe.publish(&work, output)?;
    stage.finish("written, re-read and checked");
    report.cache = cache.report();
    warn(cache.warning(), &progress, &mut report);
    warn(cache.commit(), &progress, &mut report);
    if let Some((tensor, index)) = &packed.nonfinite {
        let text = format!("warning[W-safetensors]: {}[{index}]: is not finite, compiled as it is", rcompile_models::error::escape(tensor));
        warn(Some(text), &progress, &mut report);
    }

    report.output = Some(output.display().to_string());
    Ok(finished(report, &progress))
}

fn isa(o: &Build) -> Result<Isa, Error> {
    let edits: Vec<String> = o.cpu_features.iter().map(|e| e.to_string()).collect();
    Ok(Isa::lookup(&o.target, &o.cpu, &edits)?)
}

fn open(o: &Build) -> Result<Model, Error> {
    let tokenizer = if o.no_tokenizer { TokenizerUse::Unread } else { TokenizerUse::Required };
    let options = OpenOptions { ctx_size: o.ctx_size.map(|n| n as usize), strict: o.strict, tokenizer };
    let model = rcompile_models::open(&o.model, &options)?;
    let wanted = match o.task {
        TaskOption::Generate => Task::Generate,
        TaskOption::Embed => Task::Embed,
        _ => model.arch.task,
    };
    if wanted != model.arch.task {
        return Err(Error::Unsupported {
            place: "--task".into(),
            what: format!(
                "does not fit {}, expected {}, found {}",
                model.arch.class_names[0],
                task_name(model.arch.task),
                task_name(wanted)
            ),
            help: Some("leave --task out".into()),
        });
    }
    Ok(model)
}

fn task_name(task: Task) -> &'static str {
    match task {
        Task::Generate => "generate",
        Task::Embed => "embed",
    }
}

fn trace_bucket(model: &Model, settings: &Settings, rows: u32) -> Result<Module, Error> {
    let options = TraceOptions {
        bucket: rows.into(),
        logit_rows: rows.min(MAX_LOGIT_ROWS).into(),
        runs: rows.min(settings.slots).into(),
        ctx_size: settings.ctx_size.into(),
        kv_dtype: settings.kv_dtype,
        weight_dtype: settings.weight_dtype,
    };
    trace(&*model.net, model.arch.task, &model.weights, &options).map_err(|e| Error::bug("trace", e))
}

fn verify_graph(after: &str, module: &Module) -> Result<(), Error> {
    rcompile_graph::verify(module).map_err(|e| {
        // The IR at the guilty line is for us; the one-line error says where to look.
        report::say(&e.to_string());
        Error::bug(format_args!("graph after {after}"), "breaks a rule of the IR, see above")
    })
}

fn run_passes(
    o: &Build,
    passes: &[Pass],
    module: &mut Module,
    settings: &Settings,
    dump: &Dump<'_>,
    report: &mut Report,
) -> Result<(), Error> {
    let mut cx = PassCx { compute: Some(settings.compute), quantisation: settings.quantisation.clone(), ..PassCx::default() };
    let bucket = bucket_name(module);
    for (index, pass) in passes.iter().enumerate() {
        let start = Instant::now();
        let changed = (pass.run)(module, &mut cx)?;
        report.passes.push(Timing { name: format!("{bucket} {}", pass.name), ms: millis(start) });
        if changed && (o.verify_each || cfg!(debug_assertions)) {
            verify_graph(pass.name, module)?;
        }
        if changed {
            dump.write(module, &format!("{:02}-{}.graph", index + 1, pass.name), &rcompile_graph::print(module))?;
        }
        if o.stop_after.as_deref() == Some(pass.name) {
            break;
        }
    }
    verify_graph("passes", module)?;
    if o.explain {
        let notes = cx.notes.into_iter().map(|n| format!("{bucket} {n}"));
        report.notes.extend(notes);
    }
    Ok(())
}

/// The passes of this optimisation level with `--passes` applied.
fn chosen_passes(o: &Build) -> Result<Vec<Pass>, Error> {
    let names = || PASSES.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
    if let Some(edit) = o.passes.iter().find(|e| PASSES.iter().all(|p| p.name != e.name)) {
        let what = format!("--passes {edit}: no such pass, expected one of {}", names());
        return Err(Error::Usage { what, help: None });
    }
    // These two decide what is computed, which the executable says of itself.
    for (pass, help) in [("quantise", "use --quantize none"), ("compute-dtype", "use --compute f32")] {
        if o.passes.iter().any(|e| e.name == pass && !e.add) {
            let what = format!("--passes -{pass}: it decides what is computed, not how fast");
            return Err(Error::Usage { what, help: Some(help.into()) });
        }
    }
    let chosen = |p: &&Pass| match o.passes.iter().rev().find(|e| e.name == p.name) {
        Some(edit) => edit.add,
        None => p.level <= o.opt_level,
    };
    Ok(PASSES.iter().filter(chosen).copied().collect())
}

/// `--stop-after` names a stage, or a pass that this build runs, and comes after what `--emit` asks for.
fn check_stop(o: &Build, passes: &[Pass]) -> Result<(), Error> {
    let Some(at) = o.stop_after.as_deref() else { return Ok(()) };
    let place = |stage: &str| STAGES.iter().position(|s| *s == stage);
    let stage = if passes.iter().any(|p| p.name == at) { "passes" } else { at };
    let Some(stop) = place(stage) else {
        let known = STAGES.iter().copied().chain(passes.iter().map(|p| p.name)).collect::<Vec<_>>().join(", ");
        let exists = PASSES.iter().any(|p| p.name == at);
        let what = if exists { "this build does not run that pass" } else { "no such stage or pass" };
        return Err(Error::Usage { what: format!("--stop-after {at}: {what}, expected one of {known}"), help: None });
    };
    match o.emit.iter().filter_map(|emit| place(made_by(emit.kind)?)).max() {
        Some(last) if last > stop => {
            let what = format!("--stop-after {at}: what --emit asks for is made by the stage {}", STAGES[last]);
            Err(Error::Usage { what, help: Some(format!("--stop-after {}, or leave one of them out", STAGES[last])) })
        }
        _ => Ok(()),
    }
}

/// The stage that makes what `--emit` asks for; none for an executable, which a build that stops early does not make.
fn made_by(kind: EmitKind) -> Option<&'static str> {
    match kind {
        EmitKind::Graph => Some("passes"),
        EmitKind::Program => Some("plan"),
        EmitKind::LlvmIr | EmitKind::Asm | EmitKind::Obj => Some("codegen"),
        EmitKind::Exe => None,
    }
}

fn print_all(modules: &[Module]) -> String {
    modules.iter().map(rcompile_graph::print).collect::<Vec<_>>().join("\n")
}

/// Bytes of executable sections of an object.
fn code_bytes(object: &[u8]) -> u64 {
    use object::{Object, ObjectSection, SectionKind};
    let file = object::File::parse(object);
    file.map_or(0, |f| f.sections().filter(|s| s.kind() == SectionKind::Text).map(|s| s.size()).sum())
}

fn fill_plan_report(report: &mut Report, plans: &[Planned], weights: &WeightTable) {
    report.dtype = weights_type(weights);
    report.weight_bytes = weights.len;
    report.kv_bytes_per_token = plans.first().map_or(0, |p| p.state.bytes_per_token);
    report.arena_bytes = plans.iter().map(|p| p.program.arena_bytes).max().unwrap_or(0);
    report.buckets = plans
        .iter()
        .map(|p| BucketReport {
            entry: p.program.entry.clone(),
            rows: p.program.bucket,
            tile_rows: p.program.tile_rows,
            regions: p.program.regions.len(),
            costs: p.regions.clone(),
            barriers_per_layer: p.barriers_per_layer,
            arena_bytes: p.program.arena_bytes,
            private_bytes: p.program.private_bytes,
        })
        .collect();
}

/// A warning for the user and the report.
fn warn(text: Option<String>, progress: &Progress, report: &mut Report) {
    if let Some(text) = text {
        progress.line(&text);
        report.warnings.push(text);
    }
}

fn finished(mut report: Report, progress: &Progress) -> Report {
    (report.stages, report.total_ms) = progress.timings();
    for note in &report.notes {
        report::say(note);
    }
    report
}

/// The compact tokenizer, where the model has one.
pub(crate) fn compact_tokenizer(model: &Model) -> Result<Option<Vec<u8>>, Error> {
    let compact = model.tokenizer.as_ref().map(|t| {
        rcompile_runtime::text::compact(&t.json)
            .map_err(|e| rcompile_models::Error::new(kind(&e), "tokenizer.json", "file", "cannot be made compact", "a tokenizer", e))
    });
    Ok(compact.transpose()?)
}

/// What is wrong with a tokenizer or its text, as one of the model directory's errors.
pub(crate) fn kind(error: &TextError) -> Kind {
    match error {
        TextError::Malformed(_) => Kind::Malformed,
        TextError::Disagree(_) => Kind::Disagree,
        TextError::Unsupported(_) => Kind::Unsupported,
        TextError::Failed(_) => Kind::Limit,
    }
}

/// Starts a thread.
fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<std::thread::JoinHandle<T>, Error> {
    std::thread::Builder::new().spawn(work).map_err(Error::threads)
}

/// What a thread came to; its panic is ours.
fn joined<T>(thread: std::thread::JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Units of all buckets, those that several buckets share once, and the table of entries among them.
fn code<'a>(plans: &'a [Planned], isa: &'a Isa, options: CodegenOptions) -> (Vec<Unit<'a>>, Vec<Step>) {
    let mut keys = BTreeSet::new();
    let mut units: Vec<_> = plans.iter().flat_map(|p| compile_units(&p.program, isa, options)).collect();
    units.retain(|u| keys.insert(u.key.clone()));
    let mut steps: Vec<Step> = plans.iter().map(|p| Step { bucket: p.program.bucket, entry: 0, symbol: step_symbol(&p.program) }).collect();
    // `OUT profile` measures this CPU's limits with the instructions of the kernels.
    for (probe, unit) in plans.first().map(|p| probe_units(&p.program, isa, options)).unwrap_or_default() {
        steps.push(Step { bucket: probe as u32, entry: PROBE_ENTRY, symbol: unit.symbol.clone() });
        units.push(unit);
    }
    (units, steps)
}
