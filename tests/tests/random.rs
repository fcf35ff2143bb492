//! Random modules: all executors agree.
//!
//! - `passes_keep_the_meaning`: modules of `rcompile_graph::random`, interpreter before == after each pass.
//! - `compiled_programs_agree_with_the_interpreter`: entries over rows of tokens (the generator below), through passes, planner, codegen
//!   and `pack`, loaded into this process and run for several steps against the interpreter; and the same bits with several
//!   threads, which do parts of each other's shares, and row by row in a program for one row.
//! - `compiled_codes_agree_with_the_interpreter`: the same with weights as int8 and int4 codes, whose interpreter has the same codes.
//!
//! `RCOMPILE_RANDOM_PRINT=1` prints modules that the planner refuses. `RCOMPILE_RANDOM_COUNT=N` runs N modules, `RCOMPILE_RANDOM_SEED=S`
//! starts at another seed (a failure prints the seed and the module), `RCOMPILE_RANDOM_REDUCE=1` makes the first failing module small
//! before it is printed, `RCOMPILE_RANDOM_GRAPH=FILE` runs one module from its text.

use rcompile::error::Error;
use rcompile::pack::{Sink, Tensors, pack};
use rcompile::passes::PassCx;
use rcompile::passes::quantise::Quantisation;
use rcompile::pipeline::PASSES;
use rcompile::plan::{PlanCx, PlanError, Planned, WeightTable, plan};
use rcompile_codegen::isa::Isa;
use rcompile_codegen::{Compiled, Options, compile, compile_units, step_symbol};
use rcompile_graph::interp::Interp;
use rcompile_graph::random::{self, Rng};
use rcompile_graph::{
    AttnExpr, AttnVar, Binary, Builder, Compare, DType, Dim, Group, Module, Op, Pool, Recipe, Reduce, State, Tensor, Type, Unary, ValueId,
};
use rcompile_runtime::abi::{CLAIMS_STRIDE, CpuKind, StepCtx, Tile};
use rcompile_tests::float_control;
use rcompile_tests::reference::inputs_of;
use rcompile_tests::text::{Checkpoint, difference, run_passes, run_passes_in};
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Difference of an output row relative to its largest element: sums in another order, exp and tanh to 3e-7.
const TOLERANCE_F32: f64 = 2e-4;
/// Where activations are rounded to bf16, f16 or int8 codes, an f32 that lies near a tie goes the other way: 2^-8 per element (2^-7 of a
/// group's largest), averaged by sums. Up to three layers; twice as much for more. Where only the rows of matmuls become codes, ties are
/// rare: half of a module's rows keep to [`TOLERANCE_F32`]. (One flip in a cache of bf16 reaches all rows behind it.)
const TOLERANCE_ROUNDED: f64 = 6e-2;

fn tolerance(module: &Module, rounds: bool) -> f64 {
    let is_deep = module.params.iter().any(|p| p.name.starts_with("layers.3."));
    match (rounds, is_deep) {
        (false, _) => TOLERANCE_F32,
        (true, false) => TOLERANCE_ROUNDED,
        (true, true) => 2.0 * TOLERANCE_ROUNDED,
    }
}

const SLOTS: u32 = 2;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v} is no number")))
}

#[test]
fn passes_keep_the_meaning() {
    let first = number("RCOMPILE_RANDOM_SEED", 0);
    let count = number("RCOMPILE_RANDOM_COUNT", 30) * 4;
    let mut failed = Vec::new();
    for seed in first..first + count {
        let rng = &mut Rng::new(seed);
        let options = random::Options { nodes: 40, attention: seed % 2 == 0, calls: seed % 3 == 0, odd_names: seed % 5 == 0 };
        let mut module = random::module(rng, &options);
        // Values come by name, so that they survive merging and renumbering.
        let mut tensors = BTreeMap::new();
        for i in 0..module.params.len() {
            let value = random::param(seed, &module, rcompile_graph::ParamId(i as u32));
            let param = &mut module.params[i];
            if !matches!(param.recipe, Recipe::Rope { .. }) {
                param.recipe = Recipe::Source { tensor: param.name.clone() };
                tensors.insert(param.name.clone(), value);
            }
        }
        let checkpoint = Checkpoint { tensors };
        let inputs = random::inputs(rng, &module, 3);
        if let Err(e) = each_pass(&module, &checkpoint, &inputs) {
            eprintln!("seed {seed}: {e}\n{module}");
            failed.push(seed);
        }
    }
    assert!(failed.is_empty(), "seeds {failed:?}");
}

fn each_pass(module: &Module, checkpoint: &Checkpoint, inputs: &[(String, Tensor)]) -> Result<(), String> {
    let inputs: Vec<(&str, Tensor)> = inputs.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    let run = |module: &Module| Interp::from_checkpoint(module, |name| checkpoint.get(name)).run(&inputs).map_err(|e| e.to_string());
    let expected = run(module)?;
    let mut module = module.clone();
    // Fused norms round once where 16-bit values were rounded after each step.
    let tolerance = tolerance(&module, has_rounding(&module));
    for pass in PASSES {
        let before = rcompile_graph::print(&module);
        run_passes(&mut module, &[*pass], DType::F32)?;
        let found = run(&module).map_err(|e| format!("{}: {e}\nbefore:\n{before}\nafter:\n{module}", pass.name))?;
        assert_eq!(expected.len(), found.len(), "{}: outputs", pass.name);
        for (i, (a, b)) in expected.iter().zip(&found).enumerate() {
            let d = difference(a, b);
            if d > tolerance {
                return Err(format!("{}: output {i} differs by {d:e}\nbefore:\n{before}\nafter:\n{module}", pass.name));
            }
        }
    }
    Ok(())
}

#[test]
fn compiled_programs_agree_with_the_interpreter() {
    seeds_agree(30, Scene::new);
}

#[test]
fn compiled_codes_agree_with_the_interpreter() {
    seeds_agree(20, Scene::with_codes);
}

/// `count` seeds, or what the environment asks for, agree; the planner refuses few of them.
fn seeds_agree(count: u64, scene_of: fn(u64, bool) -> Scene) {
    if let Ok(file) = std::env::var("RCOMPILE_RANDOM_GRAPH") {
        let text = std::fs::read_to_string(&file).expect("RCOMPILE_RANDOM_GRAPH");
        let module = rcompile_graph::parse(&text).unwrap_or_else(|e| panic!("{file}: {e}"));
        let scene = scene_of(number("RCOMPILE_RANDOM_SEED", 0), is_encoder(&module));
        return agree(&module, &scene).map(|_| ()).unwrap_or_else(|e| panic!("{e}"));
    }
    let first = number("RCOMPILE_RANDOM_SEED", 1000);
    let count = number("RCOMPILE_RANDOM_COUNT", count);
    let next = AtomicUsize::new(0);
    let results = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                loop {
                    let seed = first + next.fetch_add(1, Ordering::Relaxed) as u64;
                    if seed >= first + count {
                        return;
                    }
                    let result = one_seed(generated(seed, scene_of));
                    results.lock().expect("results").push((seed, result));
                }
            });
        }
    });
    let mut results = results.into_inner().expect("results");
    results.sort_by_key(|r| r.0);
    let refused: Vec<String> = results.iter().filter_map(|(s, r)| r.as_ref().ok()?.as_ref().map(|w| format!("{s}: {w}"))).collect();
    let failed: Vec<u64> = results.iter().filter(|r| r.1.is_err()).map(|r| r.0).collect();
    for (seed, result) in &results {
        if let Err(e) = result {
            eprintln!("seed {seed}: {e}");
        }
    }
    println!("{count} modules from seed {first}; refused by the planner: {refused:#?}");
    assert!(failed.is_empty(), "seeds {failed:?}");
    assert!(refused.len() * 5 <= results.len(), "the planner refuses too much");
}

/// The comparison can fail: one element of one tensor is another in the compiled program, in each tensor of a module in turn.
#[test]
fn one_wrong_element_is_noticed() {
    // Layers in f32, where tolerances are small.
    let exact = |(scene, module): &(Scene, Module)| scene.compute == DType::F32 && has_layers(module) && !has_rounding(module);
    wrong_elements_are_noticed((1003..).map(|seed| generated(seed, Scene::new)).find(exact).expect("a module in f32"), 4.0);
}

/// The same with codes and integer dots, by as little as a step or two of the codes.
#[test]
fn one_wrong_code_is_noticed() {
    let is_small = |module: &Module| has_layers(module) && !module.params.iter().any(|p| p.name.starts_with("layers.2."));
    let coded = |(scene, module): &(Scene, Module)| {
        scene.compute == DType::I8 && scene.cpu == "native" && is_small(module) && !has_rounding(module)
    };
    wrong_elements_are_noticed((1003..).map(|seed| generated(seed, Scene::with_codes)).find(coded).expect("a module with codes"), 0.1);
}

fn has_layers(module: &Module) -> bool {
    module.params.iter().any(|p| p.name.starts_with("layers.1."))
}

fn wrong_elements_are_noticed((scene, module): (Scene, Module), by: f64) {
    let right = Checkpoint::random(&module, 7);
    assert_eq!(agree_with(&module, &scene, &right), Ok(None));
    // A bias of keys changes nothing (all scores of a query by one amount), and tables may have rows that no token looks up.
    let matters = |n: &&String| !["embed", "positions", "segments"].iter().any(|t| n.starts_with(t)) && !n.contains("bias");
    let names: Vec<&String> = right.tensors.keys().filter(matters).step_by(2).collect();
    assert!(names.len() >= 4, "{names:?}");
    let mut unseen = Vec::new();
    for name in &names {
        let mut wrong = right.clone();
        let tensor = wrong.tensors.get_mut(*name).expect("tensor");
        let last = tensor.data.len() - 1;
        tensor.data[last] += by;
        match agree_with(&module, &scene, &wrong) {
            Ok(_) => unseen.push(name),
            Err(error) => assert!(error.contains(" from the interpreter by "), "{name}: {error}"),
        }
    }
    // Comparisons and saturated functions hide some.
    assert!(unseen.len() * 4 <= names.len(), "not noticed: {unseen:?} of {names:?}");
}

fn generated(seed: u64, scene_of: fn(u64, bool) -> Scene) -> (Scene, Module) {
    let rng = &mut Rng::new(seed);
    let encoder = rng.one_in(4);
    let scene = scene_of(seed, encoder);
    let module = Generator::new(rng, &scene, encoder).module();
    (scene, module)
}

/// `Ok(Some(reason))`: the planner has no kernel for it.
fn one_seed((scene, module): (Scene, Module)) -> Result<Option<String>, String> {
    rcompile_graph::verify(&module).map_err(|e| format!("the generator is wrong: {e}"))?;
    let result = agree(&module, &scene);
    if let Err(e) = result {
        let small = if std::env::var_os("RCOMPILE_RANDOM_REDUCE").is_some() { reduce(&module, &scene, &kind(&e)) } else { module };
        return Err(format!("{e}\n{small}"));
    }
    result
}

/// What kind of failure it is: the first line without numbers.
fn kind(error: &str) -> String {
    error.lines().take(2).flat_map(str::chars).filter(|c| c.is_alphabetic()).take(60).collect()
}

/// Replaces values by operands of the same type and drops outputs as long as the module still fails in the same way.
fn reduce(module: &Module, scene: &Scene, like: &str) -> Module {
    let fails = |m: &Module| rcompile_graph::verify(m).is_ok() && agree(m, scene).is_err_and(|e| kind(&e) == like);
    let mut best = module.clone();
    loop {
        let size = best.main().nodes.len();
        for i in (0..best.main().outputs.len()).rev().take_while(|_| best.main().outputs.len() > 1) {
            let mut smaller = best.clone();
            smaller.main_mut().outputs.remove(i);
            if fails(&smaller) {
                best = smaller;
                break;
            }
        }
        for id in best.main().ids().rev() {
            if id.index() >= best.main().nodes.len() {
                continue;
            }
            let node = best.main().node(id).clone();
            for input in node.inputs.iter().filter(|v| best.main().ty(**v) == &node.ty) {
                let mut smaller = best.clone();
                let main = smaller.main_mut();
                let uses = main.nodes.iter_mut().flat_map(|n| &mut n.inputs).chain(&mut main.outputs);
                uses.filter(|v| **v == id).for_each(|v| *v = *input);
                let dce = rcompile_tests::text::pass("dce").expect("dce");
                if run_passes(&mut smaller, &[dce], DType::F32).is_ok() && smaller.main().nodes.len() < size && fails(&smaller) {
                    best = smaller;
                    break;
                }
            }
        }
        if best.main().nodes.len() >= size {
            return best;
        }
    }
}

fn is_encoder(module: &Module) -> bool {
    module.main().name == "encode"
}

/// What is run: bucket, threads, context, types and the rows of each step.
struct Scene {
    bucket: u64,
    threads: u32,
    ctx_size: u32,
    compute: DType,
    quantisation: Quantisation,
    cpu: &'static str,
    /// Are keys and values codes?
    kv_codes: bool,
    /// Has the head [`WIDE`] columns, where it has a matrix of its own?
    wide: bool,
    steps: Vec<Vec<Row>>,
}

#[derive(Clone, Copy)]
struct Row {
    token: i32,
    slot: i32,
    place: i32,
    wants_logits: bool,
}

const VOCAB: usize = 37;
/// Columns of a matmul of which several threads have enough to share.
const WIDE: usize = 4096;

impl Scene {
    fn new(seed: u64, encoder: bool) -> Scene {
        let rng = &mut Rng::new(seed ^ 0x5eed);
        let bucket = rng.pick(&[1u64, 4, 8, 8, 21, 64]);
        // Now and then beyond a page of the cache.
        let long = bucket == 64 && !encoder && rng.one_in(2);
        let ctx_size = if long { 300 } else { rng.pick(&[40, 256, 257]) };
        let mut lengths = [0i32; SLOTS as usize];
        let mut steps = Vec::new();
        for number in 0..if long { 6 } else { 4 } {
            let mut room = if long && number < 5 { bucket as usize } else { 1 + rng.below(bucket as usize) };
            let mut rows = Vec::new();
            for (slot, length) in lengths.iter_mut().enumerate() {
                let most = room.min((ctx_size as i32 - *length) as usize);
                let n = match slot {
                    1 => rng.below(most + 1),
                    _ if long => most,
                    _ => most.min(1 + rng.below(room.max(1))),
                };
                for _ in 0..n {
                    rows.push(Row { token: rng.below(VOCAB) as i32, slot: slot as i32, place: *length, wants_logits: rng.one_in(3) });
                    *length += 1;
                }
                room -= n;
            }
            if encoder {
                lengths = [0; SLOTS as usize];
            }
            if let Some(last) = rows.last_mut() {
                last.wants_logits = true;
                steps.push(rows);
            }
        }
        let cpus = ["x86-64-v3", "x86-64-v4", "native", "native"];
        let compute = rng.pick(&[DType::F32, DType::F32, DType::BF16]);
        let (cpu, threads) = (rng.pick(&cpus), rng.pick(&[2, 3, 3, 5, 9]));
        let (kv_codes, wide) = (rng.one_in(4), rng.one_in(4));
        Scene { bucket, threads, ctx_size, compute, quantisation: Quantisation::default(), cpu, kv_codes, wide, steps }
    }

    /// The same with codes for weights.
    fn with_codes(seed: u64, encoder: bool) -> Scene {
        let rng = &mut Rng::new(seed ^ 0xc0de);
        let codes = [DType::Q8(Group::Row), DType::Q4(Group::G32), DType::Q4(Group::G64), DType::Q4(Group::G128)];
        let (body, head) = (Some(rng.pick(&codes)), rng.one_in(2).then(|| rng.pick(&codes)));
        let compute = rng.pick(&[DType::F32, DType::BF16, DType::I8, DType::I8, DType::I8]);
        let cpu = rng.pick(&["x86-64-v3", "x86-64-v4", "alderlake", "icelake-server", "znver4", "native", "native"]);
        Scene { compute, quantisation: Quantisation { body, head, ..Quantisation::default() }, cpu, ..Scene::new(seed, encoder) }
    }
}

fn with_bounds(module: &Module, bucket: u64) -> Module {
    let mut module = module.clone();
    for symbol in &mut module.symbols {
        symbol.bound = if symbol.name == "S" { bucket.min(SLOTS.into()) } else { bucket };
    }
    module
}

/// The whole comparison of one module.
fn agree(module: &Module, scene: &Scene) -> Result<Option<String>, String> {
    agree_with(module, scene, &Checkpoint::random(module, 7))
}

/// [`agree`] with the checkpoint that is packed; the interpreter always has the right one.
fn agree_with(module: &Module, scene: &Scene, to_pack: &Checkpoint) -> Result<Option<String>, String> {
    let checkpoint = Checkpoint::random(module, 7);
    let native = Isa::native().map_err(|e| e.to_string())?;
    let isa = match scene.cpu {
        "native" => native,
        cpu => match Isa::lookup(&native.triple, cpu, &[]) {
            Ok(isa) if isa.runs_on(&native) => isa,
            _ => native,
        },
    };
    let mut weights = WeightTable::default();
    let mut buckets = vec![scene.bucket];
    // One row at a time is possible where every row sees only earlier ones.
    if !is_encoder(module) && scene.bucket > 1 {
        buckets.push(1);
    }
    let mut modules = Vec::new();
    let mut plans: Vec<Planned> = Vec::new();
    for bucket in buckets {
        let mut module = with_bounds(module, bucket);
        let inputs = inputs_of(scene.compute);
        run_passes_in(&mut module, PASSES, PassCx { inputs, quantisation: scene.quantisation.clone(), ..PassCx::default() })?;
        let cx = PlanCx { isa: &isa, slots: SLOTS, ctx_size: scene.ctx_size, least_rows: 1, cores: 1, tuning: None };
        let planned = catch_unwind(AssertUnwindSafe(|| plan(&module, &cx, &mut weights)))
            .map_err(|_| format!("the planner panics at bucket {bucket}\n{module}"))?;
        let planned = match planned {
            Ok(planned) => planned,
            Err(PlanError::Unsupported(what)) => {
                if std::env::var_os("RCOMPILE_RANDOM_PRINT").is_some() {
                    println!("{what}\n{module}");
                }
                return Ok(Some(what));
            }
            Err(e) => return Err(format!("bucket {bucket}: {e}\n{module}")),
        };
        rcompile_codegen::verify::verify(&planned.program).map_err(|e| format!("bucket {bucket}: {e}\n{module}"))?;
        modules.push(module);
        plans.push(planned);
    }
    let packed = packed(&weights, to_pack)?;
    let loaded = plans.iter().map(|p| Loaded::new(p, &isa)).collect::<Result<Vec<Loaded>, String>>()?;
    let memory = |i: usize, threads| Memory::new(&plans[i], threads);
    let (mut one, mut several, mut single) = (memory(0, 1), memory(0, scene.threads), memory(plans.len() - 1, 2));
    let raw = with_bounds(module, scene.bucket);
    let mut reference = Interp::from_checkpoint(&modules[0], |name| checkpoint.get(name));
    let mut original = Interp::from_checkpoint(&raw, |name| checkpoint.get(name));
    let tolerance = tolerance(module, scene.compute != DType::F32 || has_rounding(module));
    let mut differences = Vec::new();
    for (number, rows) in scene.steps.iter().enumerate() {
        let types = format!("{:?}, codes {}", scene.compute, scene.quantisation.name());
        let place = format!("step {number} of {} rows, bucket {}, {} {types}", rows.len(), scene.bucket, isa.name);
        let inputs = table(&raw, rows);
        let inputs: Vec<(&str, Tensor)> = inputs.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
        let expected = reference.run(&inputs).map_err(|e| format!("{place}: {e}"))?;
        // Codes are not what was meant.
        if !scene.quantisation.is_any() {
            let meant = original.run(&inputs).map_err(|e| format!("{place}: {e}"))?;
            assert_eq!(meant.len(), expected.len(), "{place}: outputs");
            for (i, (a, b)) in meant.iter().zip(&expected).enumerate() {
                let d = difference(a, b);
                if d > tolerance {
                    return Err(format!("{place}: the passes change output {i} by {d:e}:\n{}", modules[0]));
                }
            }
        }
        let found = loaded[0].step(&plans[0], &mut one, &packed, rows);
        for (i, (want, got)) in expected.iter().zip(outputs(&plans[0], &expected, &found)).enumerate() {
            let d = difference(want, &got);
            differences.extend(differences_of_rows(want, &got));
            if d > tolerance {
                let at = want
                    .data
                    .iter()
                    .zip(&got.data)
                    .position(|(a, b)| b.is_nan() || (a - b).abs() > tolerance * a.abs().max(1.0))
                    .unwrap_or(0);
                return Err(format!(
                    "{place}: output {i} differs from the interpreter by {d:e}; first element {at} of {:?}: {} and not {}\n{}\n{}",
                    want.shape, got.data[at], want.data[at], modules[0], plans[0].program
                ));
            }
        }
        let again = loaded[0].step(&plans[0], &mut several, &packed, rows);
        if !same_bits(&found, &again) {
            return Err(format!("{place}: other bits with {} threads\n{}\n{}", scene.threads, modules[0], plans[0].program));
        }
        if plans.len() > 1 {
            let stride = (plans[0].output_stride * plans[0].outputs) as usize;
            let mut wanted = found.chunks(stride);
            for row in rows {
                let alone = loaded[1].step(&plans[1], &mut single, &packed, &[*row]);
                if row.wants_logits {
                    let together = wanted.next().unwrap_or_default();
                    let (a, b) = (outputs(&plans[1], &expected, &alone), outputs(&plans[0], &expected, together));
                    if a.iter().zip(&b).any(|(a, b)| a.data.iter().zip(&b.data).any(|(x, y)| x.to_bits() != y.to_bits())) {
                        let d = a.iter().zip(&b).map(|(a, b)| difference(a, b)).fold(0.0, f64::max);
                        return Err(format!(
                            "{place}: row at {} of slot {} has other bits alone (by {d:e})\n{}\n{}\n{}",
                            row.place, row.slot, modules[1], plans[0].program, plans[1].program
                        ));
                    }
                }
            }
        }
    }
    if scene.compute == DType::BF16 || has_rounding(module) {
        return Ok(None);
    }
    differences.sort_by(f64::total_cmp);
    match differences.get(differences.len().saturating_sub(1) / 2) {
        Some(d) if *d > TOLERANCE_F32 => {
            Err(format!("half of the rows differ from the interpreter by {d:e} or more\n{}\n{}", modules[0], plans[0].program))
        }
        _ => Ok(None),
    }
}

/// [`difference`] of each row.
fn differences_of_rows(want: &Tensor, got: &Tensor) -> Vec<f64> {
    let width = want.shape[1];
    let row = |data: &[f64]| Tensor { dtype: DType::F32, shape: vec![1, width], data: data.to_vec() };
    want.data.chunks(width).zip(got.data.chunks(width)).map(|(a, b)| difference(&row(a), &row(b))).collect()
}

/// Equal where written; padding keeps the pattern that it was filled with.
fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits())
}

/// Are activations rounded to 16 bits, or the cache to 16 bits or codes?
fn has_rounding(module: &Module) -> bool {
    let of_ops = |n: &rcompile_graph::Node| !matches!(n.op, Op::Param(_)) && matches!(n.ty.dtype, DType::BF16 | DType::F16);
    module.states.iter().any(|s| s.dtype != DType::F32) || module.functions.iter().flat_map(|f| &f.nodes).any(of_ops)
}

/// Inputs for the interpreter.
fn table(module: &Module, rows: &[Row]) -> Vec<(String, Tensor)> {
    let column = |of: &dyn Fn(&Row) -> i32| rows.iter().map(of).collect::<Vec<i32>>();
    let wanted: Vec<i32> = (0..rows.len() as i32).filter(|i| rows[*i as usize].wants_logits).collect();
    let value = |name: &str| match name {
        "token" => column(&|r| r.token),
        "slot" => column(&|r| r.slot),
        "position" | "kv_index" => column(&|r| r.place),
        "segment" => column(&|r| r.token % 2),
        _ => wanted.clone(),
    };
    let names = module.main().input_names.iter();
    names.map(|n| (n.clone(), value(n))).map(|(n, v)| (n, Tensor::i32(&[v.len()], &v))).collect()
}

/// Cuts a step's output area into tensors shaped like the interpreter's (as many rows as it has).
fn outputs(plan: &Planned, like: &[Tensor], area: &[f32]) -> Vec<Tensor> {
    let stride = (plan.output_stride * plan.outputs) as usize;
    let cut = |(i, t): (usize, &Tensor)| {
        let width = t.shape[1];
        let rows = t.shape[0].min(area.len() / stride);
        let row = |r: usize| &area[r * stride + i * plan.output_stride as usize..][..width];
        Tensor { dtype: DType::F32, shape: vec![rows, width], data: (0..rows).flat_map(row).map(|x| f64::from(*x)).collect() }
    };
    like.iter().enumerate().map(cut).collect()
}

/// The checkpoint as `pack` reads it.
struct Source<'a>(&'a Checkpoint);

impl Tensors for Source<'_> {
    fn info(&self, tensor: &str) -> Option<(DType, Vec<u64>)> {
        let t = self.0.tensors.get(tensor)?;
        Some((t.dtype, t.shape.iter().map(|n| *n as u64).collect()))
    }
    fn read_into(&self, tensor: &str, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let t = self.0.tensors.get(tensor).ok_or_else(|| Error::bug("test", tensor))?;
        let bytes: Vec<u8> = match t.dtype {
            DType::F32 => t.data.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
            DType::F16 => t.data.iter().flat_map(|x| half::f16::from_f32(*x as f32).to_le_bytes()).collect(),
            _ => t.data.iter().flat_map(|x| half::bf16::from_f32(*x as f32).to_le_bytes()).collect(),
        };
        into.copy_from_slice(&bytes[offset as usize..][..into.len()]);
        Ok(())
    }
    fn place_of<'a>(&'a self, tensor: &'a str) -> (&'a str, &'a str) {
        ("checkpoint", tensor)
    }
}

/// The weights area, on a 64-byte boundary.
fn packed(table: &WeightTable, checkpoint: &Checkpoint) -> Result<Area, String> {
    let mut area = Area::new(table.len as usize, 0);
    let file = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
    let sink = Sink { file: file.as_file(), path: file.path(), base: 0 };
    pack(table, &Source(checkpoint), sink, false, &|_| {}).map_err(|e| format!("pack: {e}"))?;
    let bytes = std::fs::read(file.path()).map_err(|e| e.to_string())?;
    area.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
    Ok(area)
}

/// Memory on a 64-byte boundary.
struct Area(Vec<Line>);

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

impl Area {
    /// At least `len` bytes, and a line more, of one value.
    fn new(len: usize, fill: u8) -> Area {
        Area(vec![Line([fill; 64]); len.div_ceil(64) + 1])
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_flattened_bytes()
    }
}

/// What a thread has left of its share, see [`StepCtx::claims`].
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Claim(i64);

const _: () = assert!(size_of::<Claim>() == CLAIMS_STRIDE as usize);

/// The lines of an [`Area`] as bytes.
trait Flattened {
    fn as_flattened_bytes(&mut self) -> &mut [u8];
}

impl Flattened for Vec<Line> {
    fn as_flattened_bytes(&mut self) -> &mut [u8] {
        // SAFETY: lines are plain bytes without padding, contiguous, and the slice borrows them.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), self.len() * 64) }
    }
}

/// What a step writes to. The arena starts as NaN: nothing may be read before it is written. The cache starts as large finite numbers in
/// every type: what earlier sequences left there must not be seen.
struct Memory {
    state: Area,
    arena: Area,
    private: Area,
    output: Area,
    claims: Vec<Claim>,
    threads: u32,
}

impl Memory {
    fn new(plan: &Planned, threads: u32) -> Memory {
        let p = &plan.program;
        let rows = p.max_logit_rows.max(p.max_runs).max(p.bucket);
        Memory {
            state: Area::new(plan.state.bytes as usize, 0x44),
            arena: Area::new(p.arena_bytes as usize, 0xff),
            private: Area::new((p.private_bytes.max(128) * u64::from(threads)) as usize, 0xff),
            output: Area::new((rows * plan.output_stride * plan.outputs * 4) as usize, 0xff),
            claims: vec![Claim(0); threads as usize],
            threads,
        }
    }
}

/// A program's objects, linked and loaded.
struct Loaded {
    library: libloading::Library,
    symbol: String,
    _dir: tempfile::TempDir,
}

/// What a step function calls. The barrier's state is two counters behind `ctx.barrier`.
const STUB: &str = r"
#include <sched.h>
#include <stdatomic.h>
struct barrier { atomic_uint count, phase; };
void rc_barrier(const void *ctx, unsigned thread, unsigned threads) {
  struct barrier *b = *(struct barrier **)((char *)ctx + BARRIER);
  unsigned phase = atomic_load(&b->phase);
  if (atomic_fetch_add(&b->count, 1) + 1 == threads) {
    atomic_store(&b->count, 0);
    atomic_fetch_add(&b->phase, 1);
  } else {
    while (atomic_load(&b->phase) == phase) sched_yield();
  }
}
void rc_profile(const void *ctx, unsigned thread, unsigned region) {}
";

impl Loaded {
    fn new(plan: &Planned, isa: &Isa) -> Result<Loaded, String> {
        let options = Options { opt_level: 1, ..Options::default() };
        let objects: Vec<Compiled> = compile_units(&plan.program, isa, options)
            .iter()
            .map(|u| {
                catch_unwind(AssertUnwindSafe(|| compile(u)))
                    .map_err(|_| format!("{}: codegen panics", u.symbol))?
                    .map_err(|e| format!("{}: {e}", u.symbol))
            })
            .collect::<Result<_, String>>()
            .map_err(|e| format!("{e}\n{}", plan.program))?;
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        std::fs::write(dir.path().join("stub.c"), STUB).map_err(|e| e.to_string())?;
        let mut cc = Command::new("cc");
        cc.arg(format!("-DBARRIER={}", offset_of!(StepCtx, barrier))).arg(dir.path().join("stub.c"));
        cc.args(["-O1", "-shared", "-fPIC", "-o"]).arg(dir.path().join("step.so"));
        for (i, unit) in objects.iter().enumerate() {
            let path = dir.path().join(format!("{i}.o"));
            std::fs::write(&path, &unit.object).map_err(|e| e.to_string())?;
            cc.arg(path);
        }
        if !cc.status().map_err(|e| e.to_string())?.success() {
            return Err("cc fails".into());
        }
        // SAFETY: the object was just generated by us and has no initialisers.
        let library = unsafe { libloading::Library::new(dir.path().join("step.so")) }.map_err(|e| e.to_string())?;
        Ok(Loaded { library, symbol: step_symbol(&plan.program), _dir: dir })
    }

    /// Runs a step on as many threads as the memory is for; returns the written part of the output.
    fn step(&self, plan: &Planned, memory: &mut Memory, weights: &Area, rows: &[Row]) -> Vec<f32> {
        let threads = memory.threads;
        let column = |of: &dyn Fn(&Row) -> i32| rows.iter().map(of).collect::<Vec<i32>>();
        let (token, slot, place) = (column(&|r| r.token), column(&|r| r.slot), column(&|r| r.place));
        let segment = column(&|r| r.token % 2);
        let logit_row: Vec<i32> = (0..rows.len() as i32).filter(|i| rows[*i as usize].wants_logits).collect();
        let mut run_begin: Vec<i32> = (0..rows.len()).filter(|i| *i == 0 || slot[*i] != slot[i - 1]).map(|i| i as i32).collect();
        let runs = run_begin.len();
        run_begin.push(rows.len() as i32);
        let encoder = plan.program.entry == "encode";
        let mut tiles = Vec::new();
        for run in run_begin.windows(2) {
            let (begin, end) = (run[0] as usize, run[1] as usize);
            for row in (begin..end).step_by(plan.program.tile_rows as usize) {
                let count = (plan.program.tile_rows as usize).min(end - row);
                let last = if encoder { end - 1 } else { row + count - 1 };
                tiles.push(Tile { row_begin: row as i32, row_count: count as i32, slot: slot[row], key_end: place[last] + 1 });
            }
        }
        let pages: Vec<i32> = (0..(SLOTS * plan.state.pages_per_slot) as i32).collect();
        let barrier = [const { AtomicUsize::new(0) }; 2];
        let private_stride = memory.private.0.len() as u64 * 64 / u64::from(threads) / 128 * 128;
        let ctx = StepCtx {
            rows: rows.len() as u32,
            logit_rows: logit_row.len() as u32,
            runs: runs as u32,
            tiles: tiles.len() as u32,
            pages_per_slot: plan.state.pages_per_slot,
            cpu: [CpuKind::Other, CpuKind::Zen5][threads as usize % 2],
            weights: weights.0.as_ptr().cast(),
            state: memory.state.0.as_mut_ptr().cast(),
            arena: memory.arena.0.as_mut_ptr().cast(),
            private: memory.private.0.as_mut_ptr().cast(),
            private_stride,
            output: memory.output.0.as_mut_ptr().cast(),
            token: token.as_ptr(),
            slot: slot.as_ptr(),
            position: place.as_ptr(),
            kv_index: place.as_ptr(),
            segment: segment.as_ptr(),
            logit_row: logit_row.as_ptr(),
            run_begin: run_begin.as_ptr(),
            tile: tiles.as_ptr(),
            page_table: pages.as_ptr(),
            barrier: barrier.as_ptr().cast_mut().cast(),
            claims: memory.claims.as_mut_ptr().cast(),
            profile: std::ptr::null_mut(),
        };
        // SAFETY: the symbol is the generated step function, which has this signature.
        let step = unsafe { *self.library.get::<extern "C" fn(usize, u32, u32)>(self.symbol.as_bytes()).expect("step symbol") };
        let run = |at, thread, threads| {
            let before = float_control();
            step(at, thread, threads);
            assert_eq!(float_control(), before, "how floats are computed after the step");
        };
        let at = &raw const ctx as usize;
        std::thread::scope(|scope| {
            for thread in 1..threads {
                scope.spawn(move || run(at, thread, threads));
            }
            run(at, 0, threads);
        });
        assert!(memory.claims.iter().all(|left| left.0 <= 0), "pieces that no thread has done");
        let rows_out = if encoder { runs } else { logit_row.len() };
        let len = rows_out * (plan.output_stride * plan.outputs) as usize;
        let words = memory.output.bytes_mut().chunks_exact(4).take(len);
        words.map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect()
    }
}

/// Makes entries as models have them, with odd sizes and odd combinations.
struct Generator<'r> {
    rng: &'r mut Rng,
    b: Builder,
    t: Dim,
    encoder: bool,
    weight_type: DType,
    kv_type: DType,
    wide: bool,
    ctx_size: u64,
    names: usize,
    prefix: String,
}

impl<'r> Generator<'r> {
    fn new(rng: &'r mut Rng, scene: &Scene, encoder: bool) -> Generator<'r> {
        let mut b = Builder::new(if encoder { "encode" } else { "step" });
        let t = b.symbol("T", scene.bucket);
        let weight_type = rng.pick(&[DType::F32, DType::BF16, DType::F16, DType::BF16]);
        let kv_type = if scene.compute == DType::BF16 { DType::BF16 } else { rng.pick(&[DType::F32, DType::F32, DType::BF16]) };
        let kv_type = if scene.kv_codes { DType::Q8(Group::Row) } else { kv_type };
        Generator {
            rng,
            b,
            t,
            encoder,
            weight_type,
            kv_type,
            wide: scene.wide,
            ctx_size: scene.ctx_size.into(),
            names: 0,
            prefix: String::new(),
        }
    }

    fn module(mut self) -> Module {
        let bound = self.b.module().symbols[0].bound;
        let l = self.b.symbol("L", bound);
        self.b.symbol("S", bound.min(SLOTS.into()));
        for name in ["token", "slot", "position", "kv_index", "segment", "logit_row"] {
            let rows = if name == "logit_row" { l } else { self.t };
            self.b.input(name, Type::new(DType::I32, [rows]));
        }
        let d = self.width();
        let table = self.weight("embed", self.weight_type, &[VOCAB, d]);
        let mut x = self.lookup(table, "token");
        if self.rng.one_in(3) {
            let table = self.weight("positions", self.weight_type, &[self.ctx_size as usize, d]);
            let p = self.lookup(table, "position");
            x = self.b.add(x, p).expect("add");
        }
        if self.rng.one_in(6) {
            let table = self.weight("segments", DType::F32, &[2, d]);
            let s = self.lookup(table, "segment");
            x = self.b.add(x, s).expect("add");
        }
        if self.rng.one_in(4) {
            x = self.norm(x, d);
        }
        let layers = self.rng.pick(&[0usize, 1, 2, 3, 5]);
        let (seed, other) = (self.rng.bits(), self.rng.bits());
        let alternate = self.rng.one_in(4);
        for layer in 0..layers {
            // The same choices in every layer, or two kinds in turn.
            let saved = std::mem::replace(self.rng, Rng::new(if alternate && layer % 2 == 1 { other } else { seed }));
            self.prefix = format!("layers.{layer}.");
            self.names = 0;
            self.b.layer_begin(layer);
            x = self.layer(x, d);
            self.b.scope_end();
            *self.rng = saved;
        }
        self.prefix = "final.".into();
        self.names = 0;
        if layers == 0 || self.rng.one_in(3) {
            x = self.soup(x, d);
        }
        if self.rng.one_in(2) {
            x = self.norm(x, d);
        }
        let mut outputs = Vec::new();
        if self.encoder {
            for _ in 0..1 + self.rng.below(4) {
                let pool = self.rng.pick(&[Pool::Mean, Pool::Cls, Pool::Max, Pool::Last]);
                let slot = self.input("slot");
                let v = self.b.pool(pool, x, slot).expect("pool");
                outputs.push(v);
                if self.rng.one_in(2) {
                    let square = self.b.mul(v, v).expect("mul");
                    let sum = self.b.reduce(Reduce::Sum, square, 1).expect("sum");
                    let norm = self.b.unary(Unary::Sqrt, sum).expect("sqrt");
                    let tiny = self.b.constant(1e-12);
                    let norm = self.b.binary(Binary::Maximum, norm, tiny).expect("max");
                    outputs.push(self.b.binary(Binary::Div, v, norm).expect("div"));
                }
            }
        } else {
            let rows = self.input("logit_row");
            let mut y = if self.rng.one_in(3) {
                self.b.linear(x, table).expect("tied head")
            } else {
                let n = self.rng.pick(&[7usize, 32, 65, 131]);
                self.linear(x, d, if self.wide { WIDE } else { n })
            };
            if self.rng.one_in(4) {
                y = self.b.scale(y, 0.25).expect("scale");
            }
            outputs.push(self.b.embedding(y, rows).expect("rows"));
            if self.rng.one_in(4) {
                outputs.push(self.b.embedding(x, rows).expect("rows"));
            }
        }
        self.b.finish(outputs)
    }

    fn input(&self, name: &str) -> ValueId {
        self.b.module().main().input(name).expect(name)
    }
    fn width(&mut self) -> usize {
        self.rng.pick(&[3, 8, 16, 20, 24, 31, 33, 40, 64, 70])
    }
    fn weight(&mut self, what: &str, dtype: DType, shape: &[usize]) -> ValueId {
        self.names += 1;
        let name = format!("{}{what}.{}", self.prefix, self.names);
        let source = Recipe::Source { tensor: name.clone() };
        self.b.param(&name, Type::new(dtype, shape.iter().map(|n| Dim::from(*n))), source)
    }
    fn vector(&mut self, what: &str, n: usize) -> ValueId {
        let dtype = if self.rng.one_in(3) { self.weight_type } else { DType::F32 };
        let w = self.weight(what, dtype, &[n]);
        self.b.convert(w, DType::F32).expect("widen")
    }
    fn lookup(&mut self, table: ValueId, ids: &str) -> ValueId {
        let ids = self.input(ids);
        let x = self.b.embedding(table, ids).expect("lookup");
        self.b.convert(x, DType::F32).expect("widen")
    }
    fn linear(&mut self, x: ValueId, k: usize, n: usize) -> ValueId {
        let w = self.weight("w", self.weight_type, &[n, k]);
        let y = self.b.linear(x, w).expect("linear");
        if self.rng.one_in(3) {
            let bias = self.vector("bias", n);
            return self.b.add(y, bias).expect("bias");
        }
        y
    }
    fn activation(&mut self, x: ValueId) -> ValueId {
        let op =
            self.rng.pick(&[Unary::Silu, Unary::Gelu, Unary::GeluTanh, Unary::Tanh, Unary::Sigmoid, Unary::Relu, Unary::Erf, Unary::Abs]);
        if op == Unary::Silu && self.rng.one_in(2) {
            let s = self.b.unary(Unary::Sigmoid, x).expect("sigmoid");
            return self.b.mul(s, x).expect("silu");
        }
        self.b.unary(op, x).expect("unary")
    }

    /// Over the last axis of extent `n`; raw or fused.
    fn norm(&mut self, x: ValueId, n: usize) -> ValueId {
        let layer = self.rng.one_in(2);
        let raw = self.rng.one_in(2);
        let axis = self.b.ty(x).rank() as u32 - 1;
        let w = self.vector("norm", n);
        if !raw {
            if layer {
                let bias = self.vector("bias", n);
                return self.b.op(Op::LayerNorm { eps: 1e-3 }, &[x, w, bias], None).expect("layer norm");
            }
            return self.b.op(Op::RmsNorm { eps: 1e-3 }, &[x, w], None).expect("rms norm");
        }
        let b = &mut self.b;
        let centred = if layer {
            let mean = b.reduce(Reduce::Mean, x, axis).expect("mean");
            b.sub(x, mean).expect("sub")
        } else {
            x
        };
        let square = b.mul(centred, centred).expect("square");
        let mean = b.reduce(Reduce::Mean, square, axis).expect("mean");
        let eps = b.constant(1e-3);
        let sum = b.add(mean, eps).expect("eps");
        let root = b.unary(Unary::Rsqrt, sum).expect("root");
        let normed = b.mul(centred, root).expect("mul");
        let scaled = b.mul(normed, w).expect("scale");
        if layer {
            let bias = self.vector("bias", n);
            return self.b.add(scaled, bias).expect("bias");
        }
        scaled
    }

    fn layer(&mut self, mut x: ValueId, d: usize) -> ValueId {
        for _ in 0..1 + self.rng.below(3) {
            let h = if self.rng.one_in(3) { x } else { self.norm(x, d) };
            let y = match self.rng.below(6) {
                0 | 1 => self.attention(h, d),
                2 => {
                    let n = self.width();
                    let y = self.linear(h, d, n);
                    let y = self.activation(y);
                    self.linear(y, n, d)
                }
                3 => {
                    let n = self.width();
                    let (gate, up) = if self.rng.one_in(3) {
                        let both = self.linear(h, d, 2 * n);
                        (self.b.slice(both, 1, 0, n).expect("gate"), self.b.slice(both, 1, n, 2 * n).expect("up"))
                    } else {
                        (self.linear(h, d, n), self.linear(h, d, n))
                    };
                    let gate = self.activation(gate);
                    let y = self.b.mul(gate, up).expect("gated");
                    self.linear(y, n, d)
                }
                4 => self.soup(h, d),
                _ => self.linear(h, d, d),
            };
            x = match self.rng.below(5) {
                0 => self.norm(y, d),
                1 => {
                    let y = self.b.scale(y, 0.22).expect("multiplier");
                    self.b.add(x, y).expect("residual")
                }
                2 => self.b.add(y, x).expect("residual"),
                _ => self.b.add(x, y).expect("residual"),
            };
        }
        x
    }

    fn attention(&mut self, x: ValueId, width: usize) -> ValueId {
        let (kv_heads, group) = (1 + self.rng.below(3), self.rng.pick(&[1usize, 1, 2, 3]));
        let d = self.rng.pick(&[2usize, 4, 8, 16, 20, 32, 34]);
        let heads = kv_heads * group;
        let (nq, nk) = (heads * d, kv_heads * d);
        let [q, k, v] = if self.rng.one_in(3) {
            let all = self.linear(x, width, nq + 2 * nk);
            [(0, nq), (nq, nq + nk), (nq + nk, nq + 2 * nk)].map(|(s, e)| self.b.slice(all, 1, s, e).expect("part"))
        } else {
            [nq, nk, nk].map(|n| self.linear(x, width, n))
        };
        let split = |g: &mut Self, v: ValueId, h: usize| g.b.reshape(v, &[g.t, h.into(), d.into()]).expect("heads");
        let (mut q, mut k, mut v) = (split(self, q, heads), split(self, k, kv_heads), split(self, v, kv_heads));
        if self.rng.one_in(4) {
            (q, k) = (self.norm(q, d), self.norm(k, d));
        }
        if self.rng.one_in(8) {
            v = self.norm(v, d);
        }
        if self.rng.one_in(3) {
            let half = 1 + self.rng.below(d / 2);
            let mut tables = Vec::new();
            for sin in [false, true] {
                let inv_freq = (0..half).map(|i| 0.7f32.powi(i as i32)).collect();
                let recipe = Recipe::Rope { sin, inv_freq, scale: 1.0, positions: self.ctx_size };
                let name = format!("{}rope.{half}.{sin}", self.prefix);
                let ty = Type::new(DType::F32, [Dim::Const(self.ctx_size), half.into()]);
                let table = self.b.param(&name, ty, recipe);
                tables.push(self.lookup(table, "position"));
            }
            let raw = self.rng.one_in(2);
            (q, k) = (self.rope(q, &tables, half, d, raw), self.rope(k, &tables, half, d, raw));
        }
        let state = self.b.state(State {
            name: format!("{}kv.{}", self.prefix, self.names),
            kv_heads: kv_heads as u64,
            head_dim: d as u64,
            dtype: self.kv_type,
            persistent: !self.encoder,
        });
        let (slot, place) = (self.input("slot"), self.input("kv_index"));
        let token = self.b.kv_append(state, k, v, slot, place).expect("append");
        let window = self.rng.pick(&[1u64, 2, 5, 17, 290]);
        let var = |v| Box::new(AttnExpr::Var(v));
        let edge = |op| Box::new(AttnExpr::Binary(op, var(AttnVar::Query), Box::new(AttnExpr::Const(window as f64))));
        let side = |c, op| AttnExpr::Compare(c, var(AttnVar::Key), edge(op));
        let and = |a, b| AttnExpr::Binary(Binary::And, Box::new(a), Box::new(b));
        let mut mask = match (self.encoder, self.rng.one_in(2)) {
            (true, true) => AttnExpr::True,
            (false, true) => AttnExpr::causal(),
            (false, false) => AttnExpr::causal_window(window),
            (true, false) => and(side(Compare::Le, Binary::Add), side(Compare::Ge, Binary::Sub)),
        };
        // What no bound says.
        if self.rng.one_in(4) {
            mask = and(mask, side(Compare::Ne, Binary::Sub));
        }
        let scaled = AttnExpr::scaled((d as f64).powf(-0.5));
        let apply = |op, a, c: f64| AttnExpr::Binary(op, Box::new(a), Box::new(AttnExpr::Const(c)));
        let score = match self.rng.below(6) {
            0 => {
                let inner = AttnExpr::Unary(Unary::Tanh, Box::new(apply(Binary::Div, scaled, 5.0)));
                apply(Binary::Mul, inner, 5.0)
            }
            1 => {
                let (query, key) = (AttnExpr::Var(AttnVar::Query), AttnExpr::Var(AttnVar::Key));
                let distance = AttnExpr::Binary(Binary::Sub, Box::new(key), Box::new(query));
                let slope = apply(Binary::Add, apply(Binary::Mul, AttnExpr::Var(AttnVar::Head), 0.03), 0.01);
                let bias = AttnExpr::Binary(Binary::Mul, Box::new(distance), Box::new(slope));
                AttnExpr::Binary(Binary::Add, Box::new(scaled), Box::new(bias))
            }
            _ => scaled,
        };
        let y = self.b.sdpa(state, q, token, slot, place, score, mask).expect("sdpa");
        let y = self.b.reshape(y, &[self.t, nq.into()]).expect("join");
        self.linear(y, nq, width)
    }

    fn rope(&mut self, x: ValueId, tables: &[ValueId], half: usize, d: usize, raw: bool) -> ValueId {
        if !raw {
            return self.b.op(Op::Rope, &[x, tables[0], tables[1]], None).expect("rope");
        }
        let row = [self.t, 1.into(), half.into()];
        let b = &mut self.b;
        let (c, s) = (b.reshape(tables[0], &row).expect("cos"), b.reshape(tables[1], &row).expect("sin"));
        let (x1, x2) = (b.slice(x, 2, 0, half).expect("x1"), b.slice(x, 2, half, 2 * half).expect("x2"));
        let (x1c, x2s) = (b.mul(x1, c).expect("mul"), b.mul(x2, s).expect("mul"));
        let (x2c, x1s) = (b.mul(x2, c).expect("mul"), b.mul(x1, s).expect("mul"));
        let mut parts = vec![b.sub(x1c, x2s).expect("sub"), b.add(x2c, x1s).expect("add")];
        if 2 * half < d {
            parts.push(b.slice(x, 2, 2 * half, d).expect("rest"));
        }
        b.cat(&parts, 2).expect("rope")
    }

    /// Some elementwise and row-wise work on `[T, n]`.
    fn soup(&mut self, x: ValueId, n: usize) -> ValueId {
        let mut values = vec![x];
        for _ in 0..1 + self.rng.below(5) {
            let x = self.rng.pick(&values);
            let y = self.rng.pick(&values);
            let made = match self.rng.below(13) {
                0 => self.activation(x),
                1 => {
                    let op = self.rng.pick(&[Binary::Add, Binary::Sub, Binary::Minimum, Binary::Maximum]);
                    self.b.binary(op, x, y).expect("binary")
                }
                2 => {
                    let w = self.vector("scale", n);
                    let op = self.rng.pick(&[Binary::Mul, Binary::Add]);
                    let (a, c) = if self.rng.one_in(2) { (x, w) } else { (w, x) };
                    self.b.binary(op, a, c).expect("binary")
                }
                3 => {
                    let y = self.b.unary(Unary::Tanh, y).expect("tanh");
                    self.b.mul(x, y).expect("mul")
                }
                4 => {
                    let y = self.b.unary(Unary::Abs, y).expect("abs");
                    let one = self.b.constant(1.0);
                    let y = self.b.add(y, one).expect("add");
                    self.b.binary(Binary::Div, x, y).expect("div")
                }
                5 => {
                    let c = self.b.constant(0.1);
                    let op = self.rng.pick(&Compare::ALL);
                    let cond = self.b.compare(op, y, c).expect("compare");
                    self.b.op(Op::Where, &[cond, x, c], None).expect("where")
                }
                6 => {
                    let narrow = self.rng.pick(&[DType::BF16, DType::F16]);
                    let x = self.b.convert(x, narrow).expect("narrow");
                    self.b.convert(x, DType::F32).expect("widen")
                }
                7 => self.b.op(Op::Softmax, &[x], None).expect("softmax"),
                8 => {
                    let op = self.rng.pick(&[Reduce::Mean, Reduce::Amax, Reduce::Sum]);
                    let r = self.b.reduce(op, x, 1).expect("reduce");
                    let r = self.b.scale(r, 0.3).expect("scale");
                    self.b.sub(x, r).expect("sub")
                }
                9 if n > 1 => {
                    // The two parts change places.
                    let at = 1 + self.rng.below(n - 1);
                    let (a, c) = (self.b.slice(x, 1, 0, at).expect("slice"), self.b.slice(y, 1, at, n).expect("slice"));
                    self.b.cat(&[c, a], 1).expect("cat")
                }
                10 => {
                    let heads = (1..=n.min(6)).filter(|h| n.is_multiple_of(*h)).max().unwrap_or(1);
                    let shape = [self.t, heads.into(), (n / heads).into()];
                    let h = self.b.reshape(x, &shape).expect("heads");
                    let h = match self.rng.below(3) {
                        0 => self.norm(h, n / heads),
                        1 => self.b.op(Op::Softmax, &[h], None).expect("softmax"),
                        _ => self.b.op(Op::Permute { perm: vec![0, 2, 1] }, &[h], None).expect("permute"),
                    };
                    self.b.reshape(h, &[self.t, n.into()]).expect("join")
                }
                11 => self.norm(x, n),
                _ => {
                    let w = self.linear(x, n, n);
                    self.b.unary(Unary::Tanh, w).expect("tanh")
                }
            };
            values.push(made);
        }
        // Nothing is left over.
        let users = self.b.module().main().users();
        let last = values[values.len() - 1];
        let unused: Vec<ValueId> = values.into_iter().filter(|v| *v != last && users[v.index()].is_empty()).collect();
        unused.into_iter().fold(last, |sum, v| self.b.add(sum, v).expect("sum"))
    }
}
