//! Programs as the planner makes them: text tests of small modules (`tests/program`), and what must hold for every golden model at
//! every bucket.

use rcompile::passes::Pass;
use rcompile::pipeline::PASSES;
use rcompile::plan::{PackJob, Planned, WeightTable};
use rcompile_codegen::isa::{Isa, X86_64_TRIPLE};
use rcompile_codegen::program::{Area, BufferId, Extent, Item, Kernel, Layout, LoopNest, Operand, Place, Program, Region, RegionId};
use rcompile_codegen::{Options, compile_units};
use rcompile_graph::{DType, Module};
use rcompile_models::arch::Task;
use rcompile_models::trace::{TraceOptions, trace};
use rcompile_models::{Model, OpenOptions, TokenizerUse};
use rcompile_runtime::cost::{Arithmetic, Load, RegionInfo, RegionKind, Work};
use rcompile_tests::golden;
use rcompile_tests::text::{check, plan_buckets_for, plan_for, run_passes};
use std::collections::BTreeSet;
use std::path::Path;

const BUCKETS: [u64; 4] = [1, 8, 64, 512];
const CTX_SIZE: u64 = 640;

fn models() -> Vec<String> {
    let dirs = std::fs::read_dir(golden("")).expect("tests/golden").map(|e| e.expect("entry").path());
    let mut names: Vec<String> =
        dirs.filter(|d| d.join("config.json").exists()).map(|d| d.file_name().unwrap_or_default().to_string_lossy().into_owned()).collect();
    names.sort();
    assert!(names.len() >= 16, "{names:?}");
    names
}

fn open(name: &str) -> Model {
    let options = OpenOptions { tokenizer: TokenizerUse::Optional, ..OpenOptions::default() };
    rcompile_models::open(&golden(name), &options).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The module of a golden model after all passes.
fn module(model: &Model, bucket: u64, compute: DType) -> Module {
    module_by(model, bucket, compute, PASSES)
}

/// The same after some.
fn module_by(model: &Model, bucket: u64, compute: DType, passes: &[Pass]) -> Module {
    let slots = if model.arch.task == Task::Embed { 16 } else { 1 };
    let ctx_size = CTX_SIZE.min(model.facts().max_positions as u64);
    let (logit_rows, runs) = (bucket.min(64), bucket.min(slots));
    let options = TraceOptions { bucket, logit_rows, runs, ctx_size, kv_dtype: compute, weight_dtype: None, as_stored: vec![] };
    let mut module = trace(&*model.net, model.arch.task, &model.weights, &options).unwrap_or_else(|e| panic!("{}: {e}", model.name));
    run_passes(&mut module, passes, compute).unwrap_or_else(|e| panic!("{} bucket {bucket}: {e}", model.name));
    module
}

/// A program per bucket and the weights that they share.
fn plans(name: &str, cpu: &str, compute: DType) -> (Vec<Planned>, WeightTable) {
    let model = open(name);
    let slots = if model.arch.task == Task::Embed { 16 } else { 1 };
    let ctx_size = CTX_SIZE.min(model.facts().max_positions as u64) as u32;
    let modules = BUCKETS.map(|bucket| module(&model, bucket, compute));
    let plans = plan_buckets_for(&modules, cpu, slots, ctx_size).unwrap_or_else(|e| panic!("{name}: {e}"));
    (plans.buckets, plans.weights)
}

#[test]
fn every_file_holds() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("program");
    let mut files: Vec<_> = std::fs::read_dir(dir).expect("tests/program").map(|e| e.expect("entry").path()).collect();
    files.sort();
    assert!(files.len() >= 5, "{files:?}");
    let errors: Vec<String> = files.iter().filter_map(|f| check(f).err()).collect();
    assert!(errors.is_empty(), "{}", errors.join("\n"));
}

/// All golden models at all buckets: the verifier of codegen accepts the program (`plan_buckets_for` asks it), and what follows.
#[test]
fn programs_of_all_golden_models_are_sound() {
    for name in models() {
        for (cpu, compute) in [("x86-64-v4", DType::F32), ("znver4", DType::BF16)] {
            let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).expect(cpu);
            let (plans, weights) = plans(&name, cpu, compute);
            check_weights(&name, &weights);
            for planned in &plans {
                let what = format!("{name} {cpu} bucket {}", planned.program.bucket);
                check_accesses(&what, &planned.program);
                check_memory(&what, &planned.program);
                check_weight_offsets(&what, &planned.program, &weights);
                check_private_area(&what, &isa, &planned.program);
            }
            // The text form names everything, so that equal texts are equal programs.
            assert_ne!(plans[0].program.to_string(), plans[3].program.to_string(), "{name}");
        }
    }
}

/// Later buckets read the weights where the first one has them.
#[test]
fn all_buckets_share_the_weights() {
    for name in models() {
        let model = open(&name);
        let mut weights = WeightTable::default();
        let mut sizes = Vec::new();
        for bucket in BUCKETS {
            let module = module(&model, bucket, DType::F32);
            plan_for(&module, "x86-64-v4", 16, 256, &mut weights).unwrap_or_else(|e| panic!("{name}: {e}"));
            sizes.push(weights.len);
        }
        assert_eq!(sizes, [sizes[0]; 4], "{name}");
    }
}

fn total(regions: &[RegionInfo], load: &Load) -> Work {
    let mut sum = Work::default();
    regions.iter().for_each(|r| sum += r.work(load));
    sum
}

/// The cost model against what was packed: a step reads every panel once, multiplies by every real element of it once per row, writes
/// one position of the cache per row and reads as many as are seen.
#[test]
fn costs_agree_with_weights_and_cache() {
    for name in models() {
        for (cpu, compute) in [("x86-64-v4", DType::F32), ("znver4", DType::BF16)] {
            let (plans, weights) = plans(&name, cpu, compute);
            let panels = |j: &&PackJob| matches!(j.layout, Layout::Panels(_));
            let without_gaps = |j: &PackJob| match j.layout {
                Layout::Panels(p) => p.bytes_read(j.dtype),
                Layout::Plain => 0,
            };
            let panel_bytes: u64 = weights.jobs.iter().map(without_gaps).sum();
            let all_bytes: u64 = weights.jobs.iter().map(|j| j.bytes).sum();
            let elements: u64 = weights.jobs.iter().filter(panels).map(|j| j.shape.iter().product::<u64>()).sum();
            for planned in &plans {
                let what = format!("{name} {cpu} bucket {}", planned.program.bucket);
                let regions = &planned.regions;
                let names: Vec<&String> = planned.program.regions.iter().map(|r| &r.name).collect();
                assert_eq!(regions.iter().map(|r| &r.name).collect::<Vec<_>>(), names, "{what}");

                let weights_read = total(regions, &Load { steps: 1, logit_steps: 1, ..Load::default() }).weight_bytes;
                assert!(weights_read >= panel_bytes && weights_read <= all_bytes, "{what}: {panel_bytes} <= {weights_read} <= {all_bytes}");
                let row = total(regions, &Load { rows: 1, logit_rows: 1, ..Load::default() });
                assert_eq!(row.flop, 2 * elements, "{what}");
                // A row looks up one row of each table.
                assert!(row.weight_bytes > 0 && row.weight_bytes < 64 << 10, "{what}: {}", row.weight_bytes);

                let one_kind_of_layer = planned.state.persistent;
                let position = total(regions, &Load { run_positions: 1, row_positions: 1, ..Load::default() });
                let layers: u64 = regions.iter().filter(|r| r.kind == RegionKind::Attention).map(RegionInfo::calls).sum();
                let kv = if one_kind_of_layer { planned.state.bytes_per_token } else { planned.state.bytes_per_token * layers };
                assert_eq!(position.kv_bytes, kv, "{what}: reads");
                assert_eq!(row.kv_bytes, kv, "{what}: writes");
                let model = open(&name);
                let heads = model.facts().heads as u64 * model.facts().head_dim as u64;
                assert_eq!(position.flop, 4 * heads * layers, "{what}: scores and values");

                // Layers of two kinds are two loops, and a last layer that ends on fewer rows one of its own.
                let layer = planned.program.body.iter().find_map(|i| if let Item::Layers { body, .. } = i { Some(body) } else { None });
                let in_layer = |i: &Item| if let Item::Region(r) = i { regions[r.index()].barrier } else { false };
                let barriers = layer.unwrap().iter().filter(|i| in_layer(i)).count() as u32;
                assert!(barriers > 0 && barriers.is_multiple_of(planned.barriers_per_layer), "{what}: {barriers}");
                let dot = |r: &&RegionInfo| r.arithmetic == Arithmetic::Bf16Dot;
                assert_eq!(
                    regions.iter().any(|r| dot(&r)),
                    compute == DType::BF16 && weights.jobs.iter().any(|j| j.dtype.name() == "bf16"),
                    "{what}"
                );
                assert!(regions.iter().all(|r| r.units.at(&Load {
                    steps: 1,
                    logit_steps: 1,
                    rows: 1,
                    logit_rows: 1,
                    runs: 1,
                    tiles: 1,
                    ..Load::default()
                }) > 0));
            }
        }
    }
}

/// Two kinds of layers in turn are one loop over pairs.
#[test]
fn barriers_are_counted_per_layer() {
    let layer = |i: usize| {
        let last = if i.is_multiple_of(2) { format!("add %x{i}, %m{i}") } else { format!("tanh %m{i}") };
        let lines = [
            format!("%g{i} = param @g{i}"),
            format!("%w{i} = param @w{i}"),
            format!("%n{i} = rms_norm %x{i}, %g{i} {{eps=1e-5}}"),
            format!("%m{i} = mm %n{i}, %w{i} {{rhs_t}}"),
            format!("%x{} = {last}", i + 1),
        ];
        lines.map(|line| format!("{line}   // layers.{i}\n")).concat()
    };
    let param = |i: usize| format!("param @g{i} : f32[24] = source \"g{i}\"\nparam @w{i} : f32[24, 24] = source \"w{i}\"\n");
    let (params, layers) = ((0..4).map(param).collect::<String>(), (0..4).map(layer).collect::<String>());
    let text = format!(
        "module {{\nsymbol T<=8\nsymbol L<=8\nparam @table : f32[37, 24] = source \"table\"\n{params}\
         func @step(%token: i32[T], %logit_row: i32[L]) {{\n%x0 = embedding @table, %token\n{layers}\
         %s = softmax %x4\n%l = embedding %s, %logit_row\nreturn %l\n}}\n}}\n"
    );
    let mut module = rcompile_graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    run_passes(&mut module, PASSES, DType::F32).unwrap();
    let planned = plan_for(&module, "x86-64-v3", 1, 64, &mut WeightTable::default()).unwrap();
    let loops = planned.program.body.iter().filter_map(|i| if let Item::Layers { count, body } = i { Some((count, body)) } else { None });
    let [(2, body)] = loops.collect::<Vec<_>>()[..] else { panic!("{}", planned.program) };
    let barriers = body.iter().filter(|i| **i == Item::Barrier).count() as u32;
    assert!(barriers >= 2, "{}", planned.program);
    assert_eq!(planned.barriers_per_layer, barriers.div_ceil(2), "{}", planned.program);
}

#[test]
fn a_sliding_window_bounds_what_a_row_sees() {
    let (plans, _) = plans("mistral-window", "x86-64-v4", DType::F32);
    let windows = |regions: &[RegionInfo]| -> Vec<Option<u32>> {
        regions.iter().filter(|r| r.kind == RegionKind::Attention).map(|r| r.window).collect()
    };
    assert_eq!(windows(&plans[0].regions), [Some(8)]);
    let (plans, _) = self::plans("llama-yarn", "x86-64-v4", DType::F32);
    assert_eq!(windows(&plans[0].regions), [None]);
}

#[test]
fn a_tied_embedding_is_stored_once() {
    for (name, table) in [("llama-gqa-tied", "model.embed_tokens.weight"), ("gpt2-gelu", "transformer.wte.weight")] {
        let (plans, weights) = plans(name, "x86-64-v4", DType::F32);
        let jobs: Vec<_> = weights.jobs.iter().filter(|j| j.name.contains(table)).collect();
        assert_eq!(jobs.len(), 1, "{name}: {jobs:?}");
        assert!(matches!(jobs[0].layout, Layout::Panels(_)), "{name}");
        for planned in &plans {
            let users = planned.program.weights.iter().filter(|w| w.offsets.contains(&jobs[0].offset));
            assert_eq!(users.count(), 1, "{name}");
        }
    }
    // Untied: two tables.
    let (_, weights) = plans("llama-dynamic", "x86-64-v4", DType::F32);
    let tables = weights.jobs.iter().filter(|j| j.name.contains("embed_tokens") || j.name.contains("lm_head"));
    assert_eq!(tables.count(), 2);
}

#[test]
fn buckets_differ_in_tiles_prologues_and_barriers() {
    let (plans, _) = plans("llama-gqa-tied", "x86-64-v4", DType::F32);
    let matmuls = |i: usize| plans[i].program.regions.iter().filter_map(|r| if let Kernel::Matmul(m) = &r.kernel { Some(m) } else { None });
    assert!(matmuls(0).all(|m| m.tile.mr == 1) && matmuls(3).all(|m| m.tile.mr > 4), "a matrix-vector program and a blocked one");
    assert!(plans[3].program.tile_rows > plans[0].program.tile_rows);
    // At few rows every thread computes the norm for itself; at many it is a region of its own.
    assert!(matmuls(0).any(|m| m.prologue.is_some()) && matmuls(1).any(|m| m.prologue.is_some()));
    assert!(matmuls(2).all(|m| m.prologue.is_none()) && matmuls(3).all(|m| m.prologue.is_none()));
    let norms = |i: usize| plans[i].program.regions.iter().filter(|r| r.name.contains("rms_norm")).count();
    assert!(norms(0) == 0 && norms(2) >= 3, "{} and {}", norms(0), norms(2));
    assert!((1..=5).contains(&plans[0].barriers_per_layer), "{}", plans[0].barriers_per_layer);
    // Everything that projections can take along is taken along: five regions per layer.
    let layer = plans[0].program.body.iter().find_map(|i| if let Item::Layers { body, .. } = i { Some(body) } else { None });
    let regions = layer.expect("layers").iter().filter(|i| matches!(i, Item::Region(_))).count();
    assert_eq!(regions, 5, "{}", plans[0].program);
}

/// Behind the last layer's attention only rows go on whose logits are wanted; few rows keep one kind of layer.
#[test]
fn last_layers_of_large_buckets_end_on_the_rows_that_are_wanted() {
    for name in ["llama-gqa-tied", "gpt2-gelu", "phi3-partial"] {
        let (plans, _) = plans(name, "x86-64-v4", DType::F32);
        for planned in &plans {
            let few = planned.program.bucket <= 8;
            let on_wanted = |r: &&Region| matches!(&r.kernel, Kernel::Matmul(m) if m.rows == Extent::LogitRows);
            let names: Vec<&str> = planned.program.regions.iter().filter(on_wanted).map(|r| r.name.as_str()).collect();
            // Output of attention, both matmuls of the MLP, and the head.
            assert_eq!(names.len(), if few { 1 } else { 4 }, "{name} bucket {}: {names:?}", planned.program.bucket);
            assert_eq!(names.last(), Some(&"lm_head"), "{name}");
        }
    }
}

/// The head is called so, whatever else computes rows of logits alone, and whatever its weight is called.
#[test]
fn the_head_has_its_name() {
    let isa = Isa::lookup(X86_64_TRIPLE, "x86-64-v4", &[]).unwrap();
    // (Without layers taken together, the last one's matmuls stand beside the head.)
    let passes: Vec<_> = PASSES.iter().filter(|pass| pass.name != "outline-layers").copied().collect();
    for name in ["llama-gqa-tied", "qwen2", "gpt2-gelu"] {
        let model = open(name);
        let traced = |passes: &[Pass]| {
            let module = module_by(&model, 64, DType::F32, passes);
            let planned = plan_buckets_for(&[module], isa.name.as_str(), 1, 64).unwrap_or_else(|e| panic!("{name}: {e}"));
            let regions = planned.buckets[0].program.regions.clone();
            regions.into_iter().filter(|r| matches!(&r.kernel, Kernel::Matmul(m) if m.rows == Extent::LogitRows)).map(|r| r.name)
        };
        for passes in [PASSES, &passes] {
            let names: Vec<String> = traced(passes).collect();
            assert_eq!(names.iter().filter(|n| *n == "lm_head").count(), 1, "{name}: {names:?}");
        }
    }
}

/// Large buckets lay out their buffers alike, so that they share the code for the rows that are wanted, which are as many in all of them;
/// smaller ones, with fewer, keep their values together.
#[test]
fn large_buckets_share_the_code_for_the_rows_that_are_wanted() {
    let isa = Isa::lookup(X86_64_TRIPLE, "x86-64-v4", &[]).unwrap();
    for name in ["llama-gqa-tied", "gpt2-gelu", "phi3-partial"] {
        let (plans, _) = plans(name, "x86-64-v4", DType::F32);
        let symbols = |i: usize| compile_units(&plans[i].program, &isa, Options::default()).into_iter().map(|unit| unit.symbol);
        let of_64: Vec<String> = symbols(2).collect();
        let shared: Vec<String> = symbols(3).filter(|symbol| of_64.contains(symbol) && symbol.starts_with("rc_matmul")).collect();
        assert_eq!(shared.len(), 4, "{name}: {shared:?}");
        let offsets = |i: usize| plans[i].program.buffers.iter().map(|b| b.offset).collect::<Vec<_>>();
        assert_eq!(offsets(2), offsets(3), "{name}");
        let model = open(name);
        for i in [0, 1, 3] {
            let alone = plan_for(&module(&model, BUCKETS[i], DType::F32), "x86-64-v4", 1, CTX_SIZE as u32, &mut WeightTable::default());
            assert_eq!(alone.unwrap().program.buffers, plans[i].program.buffers, "{name} bucket {}", BUCKETS[i]);
        }
    }
}

/// What attention computes with is made once: all buckets of more rows than a few call the same functions of pairs, and with fewer rows
/// some of them.
#[test]
fn buckets_share_the_functions_of_attention() {
    for (cpu, compute) in [("x86-64-v3", DType::F32), ("znver4", DType::BF16), ("sapphirerapids", DType::BF16)] {
        let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).unwrap();
        let (plans, _) = plans("llama-gqa-tied", cpu, compute);
        let of_bucket = |i: usize| -> BTreeSet<String> {
            let units = compile_units(&plans[i].program, &isa, Options::default()).into_iter();
            units.map(|unit| unit.symbol).filter(|symbol| symbol.starts_with("rc_pairs")).collect()
        };
        let all: Vec<_> = (0..plans.len()).map(of_bucket).collect();
        assert!(all[0].len() >= 2 && all[3].len() >= 3, "{cpu}: {all:?}");
        assert_eq!(all[2], all[3], "{cpu}");
        let once: BTreeSet<&String> = all.iter().flatten().collect();
        assert!(once.len() <= all[3].len() + 2, "{cpu}: {all:?}");
        assert!(all[0].iter().filter(|symbol| symbol.contains("softmax")).all(|symbol| all[3].contains(symbol)), "{cpu}: {all:?}");
    }
}

/// Every Llama-like decoder of the list keeps the bound, not only the simplest.
#[test]
fn decoders_keep_at_most_five_barriers_per_layer_at_bucket_1() {
    for name in models() {
        let model = open(&name);
        if model.arch.task == Task::Generate {
            let (plans, _) = plans(&name, "x86-64-v4", DType::F32);
            assert!(plans[0].barriers_per_layer <= 5, "{name}: {}\n{}", plans[0].barriers_per_layer, plans[0].program);
        }
    }
}

/// The same where matmul inputs are rounded to bf16.
#[test]
fn decoders_with_bf16_inputs_keep_the_barriers_too() {
    for name in models() {
        if open(&name).arch.task == Task::Generate {
            let (plans, _) = plans(&name, "znver4", DType::BF16);
            assert!(plans[0].barriers_per_layer <= 5, "{name}: {}\n{}", plans[0].barriers_per_layer, plans[0].program);
        }
    }
}

/// Tensors lie one after the other without overlap, on 64-byte boundaries.
fn check_weights(what: &str, weights: &WeightTable) {
    let mut spans: Vec<(u64, u64)> = weights.jobs.iter().map(|j| (j.offset, j.offset + j.bytes)).collect();
    spans.sort_unstable();
    assert!(spans.iter().all(|s| s.0 % 64 == 0 && s.1 <= weights.len), "{what}");
    assert!(spans.windows(2).all(|w| w[0].1 <= w[1].0), "{what}: tensors overlap");
}

/// Every weight of a program is a tensor of the table, in its type and layout.
fn check_weight_offsets(what: &str, program: &Program, weights: &WeightTable) {
    for w in &program.weights {
        for offset in &w.offsets {
            let job = weights.jobs.iter().find(|j| j.offset == *offset).unwrap_or_else(|| panic!("{what}: {} at {offset}", w.name));
            assert_eq!((job.dtype, job.layout), (w.dtype, w.layout), "{what}: {}", w.name);
        }
    }
}

/// A kernel's own scratch, which is taken from the end of a thread's area, lies behind what the program keeps there.
fn check_private_area(what: &str, isa: &Isa, program: &Program) {
    for region in &program.regions {
        let Kernel::Matmul(m) = &region.kernel else { continue };
        let Place::Private(offset) = m.a.place else { continue };
        let rows = u64::from(program.capacity(m.rows)) * u64::from(m.a_stride) * m.a.dtype.size();
        let scratch = rcompile_codegen::kernels::matmul::Schedule::new(isa, program, m).private_bytes();
        let all = program.private_bytes;
        assert!(offset + rows + scratch <= all, "{what}: {}: {offset} + {rows} + {scratch} of {all}", region.name);
    }
}

/// Execution order with the loop over layers written out twice: what lives from one iteration to the next is seen.
fn order(program: &Program) -> Vec<RegionId> {
    let mut order = Vec::new();
    for item in &program.body {
        match item {
            Item::Region(r) => order.push(*r),
            Item::Layers { body, .. } => {
                for _ in 0..2 {
                    order.extend(body.iter().filter_map(|i| if let Item::Region(r) = i { Some(*r) } else { None }));
                }
            }
            Item::Barrier => {}
        }
    }
    order
}

/// All memory that a kernel names, apart from keys and values that it attends to.
fn operands(kernel: &Kernel) -> Vec<&Operand> {
    match kernel {
        Kernel::Loops(nest) => nest.operands.iter().collect(),
        Kernel::Matmul(m) => {
            let nests = m.nests().flat_map(|n| &n.operands);
            let records = m.quantise.iter().flat_map(|q| [&q.x, &q.out]);
            [&m.a].into_iter().chain(&m.operands).chain(nests).chain(records).collect()
        }
        Kernel::Attention(a) => vec![&a.q, &a.out],
        Kernel::Quantise(q) => vec![&q.x, &q.out],
    }
}

/// The memory that a kernel writes.
fn stored(kernel: &Kernel) -> Vec<&Operand> {
    let of_nest = |n| LoopNest::stores(n).map(|s| &n.operands[s.operand.index()]);
    match kernel {
        Kernel::Loops(n) => of_nest(n).collect(),
        Kernel::Matmul(m) => {
            let own = m.stores.iter().map(|s| &m.operands[s.operand.index()]);
            own.chain(m.nests().flat_map(of_nest)).chain(m.quantise.iter().map(|q| &q.out)).collect()
        }
        Kernel::Attention(a) => vec![&a.out],
        Kernel::Quantise(q) => vec![&q.out],
    }
}

/// (buffers read, buffers written) of a kernel. Whatever it names may be read.
fn uses(kernel: &Kernel) -> (Vec<usize>, Vec<usize>) {
    let buffer = |o: &Operand| if let Place::Buffer(b) = o.place { Some(b.index()) } else { None };
    let buffers = |list: Vec<&Operand>| list.into_iter().filter_map(buffer).collect();
    (buffers(operands(kernel)), buffers(stored(kernel)))
}

/// A second opinion on what kernels say of themselves, from which barriers, lives and the verifier's rules come.
fn check_accesses(what: &str, program: &Program) {
    for region in &program.regions {
        let accesses = region.kernel.accesses();
        let (_, written) = uses(&region.kernel);
        for (b, buffer) in program.buffers.iter().enumerate() {
            let listed = |writes: bool| accesses.iter().any(|a| a.area == Area::Buffer(BufferId(b as u32)) && a.writes == writes);
            assert!(listed(false) || !loads(&region.kernel, b), "{what}: {} reads {}\n{program}", region.name, buffer.name);
            assert_eq!(listed(true), written.contains(&b), "{what}: {} writes {}\n{program}", region.name, buffer.name);
        }
        let has = |area: Area, writes: bool| accesses.iter().any(|a| a.area == area && a.writes == writes);
        assert_eq!(has(Area::State, false), matches!(region.kernel, Kernel::Attention(_)), "{what}: {} reads keys and values", region.name);
        let stores = |is: fn(&Place) -> bool| stored(&region.kernel).iter().any(|o| is(&o.place));
        let (to_state, to_output) = (stores(|p| matches!(p, Place::State(_))), stores(|p| *p == Place::Output));
        assert_eq!(has(Area::State, true), to_state, "{what}: {} writes keys and values\n{program}", region.name);
        assert_eq!(has(Area::Output, true), to_output, "{what}: {} writes the output\n{program}", region.name);
    }
}

/// Two buffers share bytes only if one is dead before the other is first written, judged over the written-out order.
fn check_memory(what: &str, program: &Program) {
    let order = order(program);
    let mut life: Vec<Option<(usize, usize)>> = vec![None; program.buffers.len()];
    for (at, region) in order.iter().enumerate() {
        let (reads, writes) = uses(&program.regions[region.index()].kernel);
        for b in reads.into_iter().chain(writes) {
            let life = life[b].get_or_insert((at, at));
            life.1 = at;
        }
    }
    // A buffer that is written anew in each iteration before it is read has a life per iteration; one whole life is the safe bound, except
    // inside the loop, where the second iteration starts afresh. So lives are cut where the whole value is stored again.
    let mut lives: Vec<Vec<(usize, usize)>> = vec![Vec::new(); program.buffers.len()];
    for (b, life) in life.iter().enumerate() {
        let Some((first, last)) = *life else { continue };
        let mut start = first;
        let mut end = first;
        for (at, region) in order.iter().enumerate().take(last + 1).skip(first) {
            let kernel = &program.regions[region.index()].kernel;
            let (reads, writes) = uses(kernel);
            let fresh = writes.contains(&b) && !loads(kernel, b);
            if fresh && at > start {
                lives[b].push((start, end));
                start = at;
            }
            if reads.contains(&b) || writes.contains(&b) {
                end = at;
            }
        }
        lives[b].push((start, end));
    }
    let span = |i: usize| {
        let b = &program.buffers[i];
        (b.offset, b.offset + u64::from(b.rows) * u64::from(b.stride) * b.dtype.size())
    };
    for i in 0..program.buffers.len() {
        assert!(span(i).1 <= program.arena_bytes && span(i).0 % 64 == 0, "{what}: {} outside of the arena", program.buffers[i].name);
        for j in 0..i {
            let share = span(i).0 < span(j).1 && span(j).0 < span(i).1;
            let meet = lives[i].iter().any(|a| lives[j].iter().any(|b| a.0 <= b.1 && b.0 <= a.1));
            assert!(!(share && meet), "{what}: {} and {} share bytes\n{program}", program.buffers[i].name, program.buffers[j].name);
        }
    }
}

/// Does the kernel load from the buffer (and not only store to it)?
fn loads(kernel: &Kernel, b: usize) -> bool {
    use rcompile_codegen::program::{Expr, Exprs};
    let is = |o: &Operand| o.place == Place::Buffer(BufferId(b as u32));
    let in_exprs = |operands: &[Operand], exprs: &Exprs| {
        exprs.nodes().iter().any(|e| if let Expr::Load(o, _) = e { is(&operands[o.index()]) } else { false })
    };
    let in_nest = |n: &LoopNest| in_exprs(&n.operands, &n.exprs);
    match kernel {
        Kernel::Loops(n) => in_nest(n),
        // Group nests read what the matmul has just stored.
        Kernel::Matmul(m) => {
            is(&m.a) || in_exprs(&m.operands, &m.exprs) || m.prologue.iter().any(in_nest) || m.quantise.iter().any(|q| is(&q.x))
        }
        Kernel::Attention(a) => is(&a.q),
        Kernel::Quantise(q) => is(&q.x),
    }
}
