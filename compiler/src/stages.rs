//! The stages of a build, one method each; `pipeline.rs` calls them in this order.
//!
//! In: the options of the build and what the stages before made. Out: what the next stages read; on the way lines of progress, and figures
//! for the report.

use crate::autotune;
use crate::cache::entry::Key;
use crate::cache::{Cache, WeightsHit};
use crate::calibrate::{self, Calibration, CalibrationText};
use crate::emit::{self, bucket_name};
use crate::error::{Error, warning};
use crate::link::guard::WorkDir;
use crate::link::payload::{self, Blobs, Content, Unsealed};
use crate::link::{self, Inputs, Linked, Step, tools};
use crate::manifest::{Contents, weights_type};
use crate::options::{Autotune, Build, EmitKind, Keep, WeightsPlace};
use crate::outputs;
use crate::pack::{self, Packed, Tensors};
use crate::passes::quantise::{Products, Quantisation};
use crate::passes::{self, ChosenPass, Pass, PassCx};
use crate::plan::{self, PlanCx, Planned, Plans};
use crate::report::{self, BucketReport, Progress, Report, Timing, millis};
use crate::settings::Settings;
use crate::source::{self, Source};
use crate::targets;
use crate::threads::Worker;
use crate::tokenizer;
use crate::tuning::Tuning;
use rayon::prelude::*;
use rcompile_codegen::isa::Isa;
use rcompile_codegen::{Emit, Options as CodegenOptions, Unit, compile_units, probe_units, step_symbol, verify};
use rcompile_graph::Module;
use rcompile_message::size;
use rcompile_models::Model;
use rcompile_models::dir::InputFile;
use rcompile_models::trace::{TraceOptions, trace};
use rcompile_runtime::abi::PROBE_ENTRY;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Rows that may want logits in one step: full f32 logits are written for each.
const MAX_LOGIT_ROWS: u32 = 64;
/// About the size of an executable without its weights, for the check of the disk's space.
const LINKED_BYTES: u64 = 24 << 20;

/// A build under way.
pub(crate) struct Building<'o> {
    /// What was asked for.
    o: &'o Build,
    /// What the user sees meanwhile.
    progress: Progress,
    /// What the user is told at the end.
    pub report: Report,
}

/// Where the executable is made, and with what.
pub(crate) struct BuildSite<'o> {
    output: &'o Path,
    work: WorkDir,
    tools: tools::Tools,
    archive: &'static [u8],
}

/// What the linker takes of the generated code.
pub(crate) struct Code {
    /// Symbols and bytes.
    objects: Vec<(String, Vec<u8>)>,
    steps: Vec<Step>,
}

/// What is worked on while code is generated.
pub(crate) struct Background {
    /// Hashes of all files that the executable depends on.
    pub inputs: Worker<Vec<InputFile>>,
    /// The compact tokenizer, where the model has one.
    pub tokenizer: Worker<Option<Vec<u8>>>,
}

/// The weights of an executable in their place.
pub(crate) struct PackedWeights {
    packed: Packed,
    /// Where they came from, if from the cache.
    loaded: Option<WeightsHit>,
    /// Their name in the cache, if it keeps weights.
    key: Option<Key>,
}

impl<'o> Building<'o> {
    /// Nothing is done yet.
    pub fn new(o: &'o Build) -> Building<'o> {
        Building { o, progress: Progress::new(o.quiet), report: Report { show_passes: o.timings, ..Report::default() } }
    }

    /// A warning for the user and the report.
    fn warn(&mut self, text: Option<String>) {
        if let Some(text) = text {
            self.progress.line(&text);
            self.report.warnings.push(text);
        }
    }

    /// The report of a build that is done.
    pub fn into_report(mut self) -> Report {
        (self.report.stages, self.report.total_ms) = self.progress.timings();
        for note in &self.report.notes {
            report::say(note);
        }
        self.report
    }

    /// open: everything that can be wrong with the directory is found here, before any work.
    pub fn open(&mut self) -> Result<Source, Error> {
        let o = self.o;
        let edits: Vec<String> = o.cpu_features.iter().map(|e| e.to_string()).collect();
        let isa = Isa::lookup(&o.target, &o.cpu, &edits)?;
        let tuning = match (&o.tuning, o.autotune) {
            (_, Autotune::Fast) => autotune::check(&isa).map(|()| None)?,
            (Some(path), Autotune::Off) => Some(Tuning::read(path, &isa)?),
            (None, Autotune::Off) => None,
        };
        let stage = self.progress.stage("open", 0, false);
        let model = Arc::new(source::open(o)?);
        let text = match &o.quantize.calibrate {
            Some(path) => calibrate::check(&model).and_then(|()| CalibrationText::read(path, &model)).map(Some)?,
            None => None,
        };
        stage.finish(&format!("{}: {}, {} parameters", model.name, model.arch.class_names[0], model.parameters()));
        for warning in &model.warnings {
            self.warn(Some(warning.to_string()));
        }
        let settings = Settings::new(o, &model, &isa)?;
        let source = Source { model, isa, settings, text, tuning };
        for remark in source.remarks() {
            self.warn(Some(remark));
        }
        let Source { model, isa, settings, .. } = &source;
        let report = &mut self.report;
        report.model = model.name.clone();
        report.architecture = model.arch.class_names[0].into();
        report.target = isa.triple.clone();
        report.cpu = isa.name.clone();
        report.features = isa.features.iter().cloned().collect();
        report.slots = settings.slots;
        report.compute = settings.inputs.name().into();
        report.quantisation = settings.quantisation_name.clone();
        report.kv_dtype = settings.kv_name().into();
        report.ctx_size = settings.ctx_size;
        Ok(source)
    }

    /// Whatever may be wrong with inputs in the place of outputs, and with tools, is said now and not after minutes of work.
    pub fn site(&self, source: &Source) -> Result<Option<BuildSite<'o>>, Error> {
        let o = self.o;
        outputs::check_inputs(o, &source.model)?;
        let Some(output) = o.exe_path().filter(|_| o.writes_exe()) else { return Ok(None) };
        let triple = &source.isa.triple;
        let archive = targets::require_runtime(triple)?;
        Ok(Some(BuildSite { output, work: WorkDir::create(output)?, tools: tools::find(triple)?, archive }))
    }

    /// trace: the architecture's forward code, run with symbolic rows, once per bucket.
    pub fn trace(&mut self, source: &Source) -> Result<Vec<Module>, Error> {
        let buckets = &self.o.buckets.0;
        let stage = self.progress.stage("trace", buckets.len() as u64, false);
        let mut modules = Vec::new();
        for &rows in buckets {
            let module = trace_bucket(&source.model, &source.settings, rows)?;
            passes::verify("trace", &module)?;
            modules.push(module);
            stage.advance(1);
        }
        stage.finish(&format!("{} buckets", modules.len()));
        for module in &modules {
            emit::clear_dumps(self.o.dump_dir.as_deref(), module)?;
            self.dump(module, "00-trace.graph", &rcompile_graph::print(module))?;
        }
        Ok(modules)
    }

    fn dump(&self, module: &Module, name: &str, text: &str) -> Result<(), Error> {
        emit::dump(self.o.dump_dir.as_deref(), module, name, text)
    }

    /// passes: the same list for every bucket; a bucket's graph changes nothing but its bounds.
    pub fn passes(&mut self, passes: &[ChosenPass], source: &mut Source, modules: &mut [Module]) -> Result<(), Error> {
        let stage = self.progress.stage("passes", modules.len() as u64, false);
        let mut unread: Option<Vec<String>> = None;
        for module in modules {
            stage.message(bucket_name(module));
            // A build that stops early has not come to that pass.
            if let Some(products) = run_passes(self.o, passes, module, &source.settings, &mut self.report)? {
                check_made(&source.settings.quantisation, &products)?;
                unread.get_or_insert_with(|| unread_patterns(&self.o.quantize.keep, &source.model, &products));
                source.settings.name_quantisation(&source.model, &products);
            }
            stage.advance(1);
        }
        self.report.quantisation = source.settings.quantisation_name.clone();
        let last = passes.iter().position(|p| self.o.stop_after.as_deref() == Some(p.pass.name));
        stage.finish(&format!("{} passes", last.map_or(passes.len(), |last| last + 1)));
        for pattern in unread.unwrap_or_default() {
            self.warn(Some(warning("keep", &format!("--keep {pattern}"), "has no effect, no matrix product reads what it names")));
        }
        Ok(())
    }

    /// The cache of objects and weights, where this build makes any.
    pub fn cache(&mut self) -> Result<Cache, Error> {
        let (cache, warning) = Cache::open(&self.o.cache)?;
        self.warn(warning);
        Ok(cache)
    }

    /// autotune: plans with other tiles, run on this machine.
    pub fn autotune(&mut self, source: &mut Source, modules: &[Module], site: &BuildSite<'_>, cache: &Cache) -> Result<(), Error> {
        // The weights that all trials share are looked at when they are written.
        payload::check_space(site.work.path(), site.archive.len() as u64 + autotune::TRIALS_MAX * LINKED_BYTES)?;
        let opt_level = self.o.opt_level;
        let link_trial = |work: &WorkDir, plans: &Plans| {
            let (units, steps) = code(&plans.buckets, &source.isa, opt_level, Emit::default());
            let compile_one = |unit: &Unit<'_>| Ok((unit.symbol.clone(), cache.compile(unit)?.object));
            let objects = units.par_iter().map(compile_one).collect::<Result<Vec<_>, Error>>()?;
            let linked = link::link(work, &site.tools, Inputs { steps: &steps, objects: &objects, archive: site.archive })?;
            let mut blobs = Blobs::default();
            let manifest = Contents { source, plans, calibration: None, tokenizer: None }.manifest(Vec::new(), &mut blobs)?;
            let content = Content { manifest: &manifest, blobs: &blobs, weights_len: plans.weights.len, embedded: false };
            payload::append(work, linked, content)
        };
        let plan = |tuning: Option<&Tuning>| plan_all(modules, source, tuning);
        let (isa, ctx_size) = (&source.isa, source.settings.ctx_size);
        let cx = autotune::Cx { isa, ctx_size, plan: &plan, link: &link_trial, work: &site.work };
        let (best, measured) = autotune::run(&cx, &mut self.progress)?;
        let noisy = measured.buckets.iter().filter(|bucket| bucket.is_undecided());
        let noisy: Vec<String> = noisy.map(|bucket| format!("{} rows ({:.0} %)", bucket.rows, bucket.noise * 100.0)).collect();
        if !noisy.is_empty() {
            let what = format!(
                "the same code differed too much from run to run to choose tiles for {}; the planner's are kept, try again when the machine is \
                 idle",
                noisy.join(", ")
            );
            self.warn(Some(warning("autotune", "--autotune", &what)));
        }
        let input = best.write(self.o.tuning.as_deref(), isa)?;
        self.report.autotune = Some(measured);
        source.tuning = Some((best, input));
        Ok(())
    }

    /// plan: kernels, buffers, packed weights, barriers.
    pub fn plan(&mut self, source: &Source, modules: &[Module]) -> Result<Plans, Error> {
        let stage = self.progress.stage("plan", 0, false);
        let tuning = source.tuning.as_ref().map(|t| &t.0);
        let plans = plan_all(modules, source, tuning)?;
        let regions = plans.buckets.iter().map(|p| p.program.regions.len()).sum::<usize>();
        stage.finish(&format!("{regions} regions, weights {}", size(plans.weights.len)));
        for (planned, module) in plans.buckets.iter().zip(modules) {
            self.dump(module, "99-plan.program", &planned.program.to_string())?;
        }
        self.warn(tuning.and_then(|tuning| tuning.unused(plans.buckets.iter().map(|p| &p.program))));
        fill_plan_report(&mut self.report, &plans);
        Ok(plans)
    }

    /// Is there room for the executable, and for the calibrated codes, which lie beside it until they are packed?
    pub fn check_space(&self, source: &Source, plans: &Plans, site: &BuildSite<'_>) -> Result<(), Error> {
        // A byte each, and at most four for a scale of 32.
        let codes = source.text.as_ref().map_or(0, |_| source.model.parameters().div_ceil(8) * 9);
        payload::check_space(site.work.path(), plans.weights.len + site.archive.len() as u64 + LINKED_BYTES + codes)
    }

    /// calibrate: before the executable's own code is made, because whatever is wrong with the text or what the model makes of it shows
    /// here. `passes` are all that there are, whatever the build leaves out: it chooses no codes.
    pub fn calibrate(
        &mut self,
        passes: &[Pass],
        source: &Source,
        site: &BuildSite<'_>,
        cache: &Cache,
    ) -> Result<Option<Calibration>, Error> {
        let Some(text) = &source.text else { return Ok(None) };
        let (quantisation, act_order) = (&source.settings.quantisation, self.o.quantize.act_order);
        let cx = calibrate::Cx { model: &source.model, passes, quantisation, act_order, cache, work: &site.work };
        calibrate::run(&cx, text, &mut self.progress).map(Some)
    }

    /// codegen: every distinct unit of all buckets once; equal kernels of several buckets are one unit. Units of earlier builds are cached.
    pub fn codegen(&mut self, source: &Source, plans: &Plans, cache: &Cache) -> Result<Code, Error> {
        let emits = |kind| self.o.emits(kind).is_some();
        let emit = Emit { llvm_ir: emits(EmitKind::LlvmIr), asm: emits(EmitKind::Asm) };
        let (units, steps) = code(&plans.buckets, &source.isa, self.o.opt_level, emit);
        let stage = self.progress.stage("codegen", units.len() as u64, false);
        let hits_before = cache.report().hits;
        let compile_one = |unit: &_| {
            let compiled = cache.compile(unit);
            stage.advance(1);
            compiled
        };
        let objects = units.par_iter().map(compile_one).collect::<Vec<_>>().into_iter().collect::<Result<Vec<_>, _>>()?;
        let report = &mut self.report;
        report.units = units.len();
        report.code_bytes = objects.iter().map(|c| code_bytes(&c.object)).sum::<Result<u64, Error>>()?;
        report.cache = cache.report();
        // Autotuning and calibration compile too.
        let cached = match report.cache.hits - hits_before {
            0 => String::new(),
            n => format!(", {n} from the cache"),
        };
        stage.finish(&format!("{} units{cached}, code {}", units.len(), size(report.code_bytes)));
        let symbols: Vec<String> = units.into_iter().map(|u| u.symbol).collect();
        emit::code(self.o, &symbols, &objects, report)?;
        Ok(Code { objects: symbols.into_iter().zip(objects.into_iter().map(|c| c.object)).collect(), steps })
    }

    /// link: a C compiler driver, the runtime archive that rcompile carries, and the objects. The tokenizer is ready by then.
    pub fn link(
        &mut self,
        site: &BuildSite<'_>,
        code: Code,
        tokenizer: Worker<Option<Vec<u8>>>,
    ) -> Result<(Linked, Option<Vec<u8>>), Error> {
        let stage = self.progress.stage("link", 0, false);
        let Code { objects, steps } = code;
        let linked = link::link(&site.work, &site.tools, Inputs { steps: &steps, objects: &objects, archive: site.archive });
        if self.o.save_temps {
            let saved = emit::save_temps(&site.work, site.output, &objects, site.archive);
            // What the linker says counts for more.
            if linked.is_ok() {
                saved?;
            }
        }
        let (linked, tokenizer) = (linked?, tokenizer.join()?);
        stage.finish(&format!("{} without weights", size(linked.len_bytes())));
        Ok((linked, tokenizer))
    }

    /// pack: manifest and tokenizer go behind the linked file, the weights straight to their final place there; where an earlier build has
    /// packed them, as a copy.
    pub fn pack(
        &mut self,
        site: &BuildSite<'_>,
        linked: Linked,
        contents: &Contents<'_>,
        cache: &mut Cache,
    ) -> Result<(Unsealed, PackedWeights), Error> {
        let (o, weights, model) = (self.o, &contents.plans.weights, &contents.source.model);
        let stage = self.progress.stage("pack", weights.len, true);
        let mut blobs = Blobs::default();
        // Hashes of the weight files may take longer than all that is to do: they are filled in at the end.
        let manifest = contents.manifest(model.list_inputs(), &mut blobs)?;
        let embedded = o.weights == WeightsPlace::Embed;
        let exe = payload::append(&site.work, linked, Content { manifest: &manifest, blobs: &blobs, weights_len: weights.len, embedded })?;
        let key = match cache.has_weights() {
            true => {
                let codes = contents.calibration.map(|c| c.codes.hash()).transpose()?;
                let given = format!("{:?} {codes:?}", model.scheme);
                Some(cache.weights_key(weights, model.weights.files(), o.allow_nonfinite, &given))
            }
            false => None,
        };
        let advance = |bytes| stage.advance(bytes);
        let loaded = key.and_then(|key| cache.load_weights(&key, weights.len, exe.sink(), &advance));
        let packed = match &loaded {
            Some(loaded) => loaded.packed.clone(),
            None => pack_all(contents, &exe, o.allow_nonfinite, &advance)?,
        };
        model.weights.check_unchanged()?;
        stage.finish(&format!("{}{}", size(weights.len), if loaded.is_some() { " from the cache" } else { "" }));
        Ok((exe, PackedWeights { packed, loaded, key }))
    }

    /// finish: only a complete and checked file gets the name.
    pub fn finish(
        &mut self,
        site: &BuildSite<'_>,
        (mut exe, weights_in_place): (Unsealed, PackedWeights),
        contents: &Contents<'_>,
        inputs: Worker<Vec<InputFile>>,
        cache: &mut Cache,
    ) -> Result<(), Error> {
        let PackedWeights { mut packed, mut loaded, key } = weights_in_place;
        let (o, weights, model) = (self.o, &contents.plans.weights, &contents.source.model);
        let stage = self.progress.stage("finish", 0, false);
        self.report.file_bytes = exe.file_len();
        let inputs = inputs.join()?;
        exe.set_manifest(&contents.manifest(inputs.clone(), &mut Blobs::default())?)?;
        let of_weights = |input: &InputFile| model.weights.files().iter().any(|file| file.name() == input.name);
        let weight_files: Vec<InputFile> = inputs.into_iter().filter(of_weights).collect();
        let source_holds = loaded.as_ref().is_none_or(|loaded| cache.weights_hold(loaded, &weight_files));
        let mut sealed = source_holds && exe.seal(packed.hash)?;
        if let (false, Some(_), Some(key)) = (sealed, &loaded, &key) {
            cache.discard_weights(key, source_holds);
            loaded = None;
            exe.clear_weights()?;
            packed = pack_all(contents, &exe, o.allow_nonfinite, &|_| {})?;
            model.weights.check_unchanged()?;
            sealed = exe.seal(packed.hash)?;
        }
        if !sealed {
            return Err(exe.differs("weights"));
        }
        if let (None, Some(key)) = (&loaded, key) {
            cache.keep_weights(key, weights.len, &packed, exe.sink(), &weight_files, &model.name);
        }
        let unsynced = exe.publish(&site.work, site.output)?;
        stage.finish("written, re-read and checked");
        self.warn(unsynced);
        self.report.output = Some(site.output.display().to_string());
        if let Some((tensor, index)) = &packed.nonfinite {
            self.warn(Some(warning("safetensors", &format!("{tensor}[{index}]"), "is not finite, compiled as it is")));
        }
        Ok(())
    }

    /// What a build leaves in the cache.
    pub fn commit(&mut self, mut cache: Cache) {
        self.report.cache = cache.report();
        self.warn(cache.warning());
        let warning = cache.commit();
        self.warn(warning);
    }
}

impl Background {
    /// Hashes the input files and makes the tokenizer compact.
    pub fn start(model: &Arc<Model>) -> Result<Background, Error> {
        let (hashed, read) = (model.clone(), model.clone());
        let inputs = Worker::start(move || Ok(hashed.hash_inputs()?))?;
        Ok(Background { inputs, tokenizer: Worker::start(move || tokenizer::compact(&read))? })
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
        as_stored: settings.quantisation.kept.iter().filter(|(_, dtype)| dtype.is_none()).map(|(tensor, _)| tensor.clone()).collect(),
    };
    trace(&*model.net, model.arch.task, &model.weights, &options).map_err(|e| Error::bug("trace", e))
}

fn run_passes(
    o: &Build,
    passes: &[ChosenPass],
    module: &mut Module,
    settings: &Settings,
    report: &mut Report,
) -> Result<Option<Products>, Error> {
    let mut cx = PassCx { inputs: settings.inputs, quantisation: settings.quantisation.clone(), ..PassCx::default() };
    let bucket = bucket_name(module);
    for ChosenPass { pass, number } in passes {
        let before = (o.verify_each || cfg!(debug_assertions)).then(|| rcompile_graph::print(module));
        let start = Instant::now();
        let changed = pass.run(module, &mut cx)?;
        report.passes.push(Timing { name: format!("{bucket} {}", pass.name), ms: millis(start) });
        if !changed && before.is_some_and(|before| before != rcompile_graph::print(module)) {
            return Err(Error::bug(format_args!("graph after {}", pass.name), "is another one, of which the pass says nothing"));
        }
        if changed {
            passes::verify(pass.name, module)?;
            let name = format!("{number:02}-{}.graph", pass.name);
            emit::dump(o.dump_dir.as_deref(), module, &name, &rcompile_graph::print(module))?;
        }
        if o.stop_after.as_deref() == Some(pass.name) {
            break;
        }
    }
    passes::verify("passes", module)?;
    if o.explain {
        let notes = cx.notes.into_iter().map(|n| format!("{bucket} {n}"));
        report.notes.extend(notes);
    }
    Ok(cx.products)
}

/// Patterns that give a type to tensors of which no product reads any. (Other tensors have the checkpoint's type, or `--dtype`'s.)
fn unread_patterns(asked: &[Keep], model: &Model, products: &Products) -> Vec<String> {
    let is_read = |keep: &&Keep| {
        let mut named = model.weights.iter().filter(|t| keep.names(&t.stored_name));
        named.any(|t| products.tensors.contains(model.facts().read_for(&t.name)))
    };
    let unread = asked.iter().filter(|keep| keep.dtype.is_some() && !is_read(keep));
    unread.map(|keep| keep.pattern.clone()).collect()
}

/// What is asked for is made, or the executable would say of itself what it is not.
fn check_made(asked: &Quantisation, Products { layers, heads, .. }: &Products) -> Result<(), Error> {
    let (flag, of, count) = match (asked.body, asked.head) {
        (Some(_), _) if layers.coded == 0 => ("--quantize", "layers", layers),
        (None, Some(_)) if heads.made == 0 => ("--quantize-head", "a head", heads),
        _ => return Ok(()),
    };
    let found = match count {
        _ if count.coded > 0 => "found that the checkpoint has codes of it already",
        _ if count.all == 0 || asked.kept.is_empty() => "found none",
        _ => "found that --keep keeps them all",
    };
    Err(Error::Usage {
        what: format!("{flag}: expected weights of {of} to make codes of, {found}"),
        help: Some(format!("leave {flag} out")),
    })
}

/// Plans all buckets, with these tiles where some were measured.
fn plan_all(modules: &[Module], source: &Source, tuning: Option<&Tuning>) -> Result<Plans, Error> {
    let Settings { slots, ctx_size, cores, .. } = source.settings;
    let cx = PlanCx { isa: &source.isa, slots, ctx_size, least_rows: 1, cores, tuning };
    let plans = plan::plan_buckets(modules, &cx)?;
    for planned in &plans.buckets {
        verify::verify(&planned.program)?;
    }
    Ok(plans)
}

/// Bytes of executable sections of an object.
fn code_bytes(object: &[u8]) -> Result<u64, Error> {
    use object::{Object, ObjectSection, SectionKind};
    let file = object::File::parse(object).map_err(|e| Error::bug("codegen", e))?;
    Ok(file.sections().filter(|s| s.kind() == SectionKind::Text).map(|s| s.size()).sum())
}

fn fill_plan_report(report: &mut Report, plans: &Plans) {
    let Plans { buckets: plans, weights } = plans;
    report.dtype = weights_type(weights);
    report.weight_bytes = weights.len;
    let state = plans.first().map(|p| &p.state);
    report.kv_bytes_per_token = state.map_or(0, |s| s.bytes_per_token);
    report.kv_bytes = state.map_or(0, |s| s.bytes);
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

/// Units of all buckets, those that several buckets share once, and the table of entries among them.
fn code<'a>(plans: &'a [Planned], isa: &'a Isa, opt_level: u8, emit: Emit) -> (Vec<Unit<'a>>, Vec<Step>) {
    let options = CodegenOptions { opt_level, emit };
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

/// Writes the weights into the executable, those that calibration chose as codes.
fn pack_all(contents: &Contents<'_>, exe: &Unsealed, allow_nonfinite: bool, advance: &(dyn Fn(u64) + Sync)) -> Result<Packed, Error> {
    let model = &contents.source.model;
    let with_codes = contents.calibration.map(|c| c.codes.over(&model.weights));
    let tensors: &dyn Tensors = with_codes.as_ref().map_or(&model.weights, |t| t);
    pack::pack(&contents.plans.weights, tensors, exe.sink(), allow_nonfinite, advance)
}
