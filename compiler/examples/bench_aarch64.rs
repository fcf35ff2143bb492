//! `./x bench-aarch64`: what the generated code would do on Graviton, PREDICTED from its assembly. No Arm machine takes part.
//!
//! In: graphs of one matmul, which go through all passes and the planner as a model does. For each CPU, type of weights and number of rows
//! the innermost loop goes through llvm-mca with LLVM's scheduling model of that CPU (data in L1, perfect prediction), alone and with all
//! that is around it: of codes the loop over groups, and packing and widening where there are any. Cycles become shares of the peak; those
//! of all, with cores, clock and memory bandwidth of an instance, tokens per second: the slower of arithmetic and weights read once. Not in
//! it: attention, norms, rounding of rows to codes, barriers, caches, clock changes. So it is an upper bound, and its use is that a
//! regression shows.

#[path = "../../codegen/tests/asm_check/mod.rs"]
mod asm_check;

use asm_check::{HotLoop, group_loops, hot_loops, packing_loops};
use rayon::prelude::*;
use rcompile::passes::quantise::Quantisation;
use rcompile::passes::{MatmulInputs, PassCx};
use rcompile::pipeline::PASSES;
use rcompile::plan::{PlanCx, WeightTable, plan};
use rcompile_codegen::isa::Isa;
use rcompile_codegen::kernels::matmul;
use rcompile_codegen::llvm::module::{self, Emit};
use rcompile_codegen::program::{Coding, Compute, Kernel, Matmul, Program};
use rcompile_graph::{Binary, Builder, DType, Group, Module, Type, Unary};
use std::collections::HashMap;
use std::error::Error;
use std::io::Write;
use std::process::{Command, ExitCode, Stdio};

const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// An instance type: CPU, cores and clock of the largest one socket, bandwidth (published).
struct Instance {
    name: &'static str,
    cpu: &'static str,
    cores: f64,
    ghz: f64,
    gb_per_s: f64,
}

const INSTANCES: [Instance; 3] = [
    Instance { name: "c6g.16xlarge", cpu: "neoverse-n1", cores: 64.0, ghz: 2.5, gb_per_s: 205.0 },
    Instance { name: "c7g.16xlarge", cpu: "neoverse-v1", cores: 64.0, ghz: 2.6, gb_per_s: 307.0 },
    Instance { name: "c8g.24xlarge", cpu: "neoverse-v2", cores: 96.0, ghz: 2.8, gb_per_s: 538.0 },
];

/// A model's matmuls.
struct Model {
    name: &'static str,
    layers: u32,
    /// name, n (of each way), k, ways
    matmuls: [(&'static str, u32, u32, u32); 4],
    head: (u32, u32),
}

/// Llama-3.2-1B and Llama-3.1-8B.
const MODELS: [Model; 2] = [
    Model {
        name: "1B",
        layers: 16,
        matmuls: [("qkv", 3072, 2048, 1), ("o", 2048, 2048, 1), ("gate+up", 8192, 2048, 2), ("down", 2048, 8192, 1)],
        head: (128_256, 2048),
    },
    Model {
        name: "8B",
        layers: 32,
        matmuls: [("qkv", 6144, 4096, 1), ("o", 4096, 4096, 1), ("gate+up", 14_336, 4096, 2), ("down", 4096, 14_336, 1)],
        head: (128_256, 4096),
    },
];

/// Shape of the matmuls whose loops are looked at: they do not depend on it beyond blocks of k.
const SHAPE: (usize, usize) = (4096, 4096);

const ROWS: [u32; 4] = [1, 4, 32, 512];

/// Types of weights, as `--quantize` makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Weights {
    Bf16,
    Int8,
    Int4(Group),
}

impl Weights {
    const ALL: [Weights; 4] = [Weights::Bf16, Weights::Int8, Weights::Int4(Group::G32), Weights::Int4(Group::G128)];

    fn name(self) -> &'static str {
        match self {
            Weights::Bf16 => "bf16",
            Weights::Int8 => "int8",
            Weights::Int4(Group::G32) => "int4 by 32",
            Weights::Int4(_) => "int4 by 128",
        }
    }
    fn dtype(self) -> Option<DType> {
        match self {
            Weights::Bf16 => None,
            Weights::Int8 => Some(DType::Q8(Group::Row)),
            Weights::Int4(group) => Some(DType::Q4(group)),
        }
    }
    /// Of the head, where nothing else is asked for.
    fn of_head(self) -> Weights {
        if self == Weights::Bf16 { self } else { Weights::Int8 }
    }
    /// Per element, scales of groups included.
    fn bytes(self) -> f64 {
        match self {
            Weights::Bf16 => 2.0,
            Weights::Int8 => 1.0,
            Weights::Int4(group) => 0.5 + 2.0 / group.len(0) as f64,
        }
    }
}

/// What a rate belongs to: CPU, weights, ways, rows.
type Key = (&'static str, Weights, u32, u32);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench-aarch64: {e}");
            ExitCode::FAILURE
        }
    }
}

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn run() -> Outcome<()> {
    println!("PREDICTION from assembly and LLVM's scheduling models; nothing was run on Arm hardware.");
    let mut keys: Vec<Key> = vec![];
    for instance in &INSTANCES {
        for weights in Weights::ALL {
            keys.extend([1, 2].into_iter().flat_map(|ways| ROWS.map(|rows| (instance.cpu, weights, ways, rows))));
        }
    }
    let rates: HashMap<Key, Rate> = keys.par_iter().map(|key| Ok((*key, rate(key)?))).collect::<Outcome<_>>()?;
    for ways in [1, 2] {
        let matmuls = if ways == 2 { "gate+up" } else { "others" };
        println!("\n{matmuls}: tile, share of peak of the innermost loop and of all, bytes of weights per cycle and core\n");
        println!("| CPU | weights | arithmetic | peak, operations per cycle | {} |", ROWS.map(|r| plural(r, "row")).join(" | "));
        println!("|---|---|---|---:|{}", "---|".repeat(ROWS.len()));
        for instance in &INSTANCES {
            for weights in Weights::ALL {
                let row = ROWS.map(|rows| &rates[&(instance.cpu, weights, ways, rows)]);
                let cells = row.map(|r| {
                    let [inner, all] = [r.innermost, r.operations_per_cycle].map(|rate| 100.0 * rate / r.peak);
                    format!("{}x{}, {inner:.0} / {all:.0} %, {:.1}", r.m, r.columns, r.bytes_per_cycle)
                });
                println!("| {} | {} | {} | {:.0} | {} |", instance.cpu, weights.name(), row[0].arithmetic, row[0].peak, cells.join(" | "));
            }
        }
    }
    sve(&rates)?;
    predictions(&rates);
    Ok(())
}

fn plural(n: u32, word: &str) -> String {
    format!("{n} {word}{}", if n == 1 { "" } else { "s" })
}

/// Tokens per second of the models.
fn predictions(rates: &HashMap<Key, Rate>) {
    println!(
        "\nTokens per second; m: bound by memory, a: by arithmetic. In brackets milliseconds of arithmetic and of reading the weights.\n"
    );
    println!("| instance | cores, GHz, GB/s | model | rows | {} |", Weights::ALL.map(|w| w.name()).join(" | "));
    println!("|---|---|---|---:|{}", "---|".repeat(Weights::ALL.len()));
    for Instance { name, cores, ghz, gb_per_s, cpu } in INSTANCES {
        for (model, rows) in MODELS.iter().flat_map(|m| ROWS.map(|rows| (m, rows))) {
            let cell = |weights: Weights| {
                let time = |weights: Weights, n: u32, k: u32, ways: u32, rows: u32| {
                    let operations = 2.0 * f64::from(n) * f64::from(k) * f64::from(ways) * f64::from(rows);
                    operations / rates[&(cpu, weights, ways, rows)].operations_per_cycle / (ghz * 1e9) / cores
                };
                let layers = f64::from(model.layers) * model.matmuls.iter().map(|m| time(weights, m.1, m.2, m.3, rows)).sum::<f64>();
                // A prompt wants the logits of its last row; decoding those of every row.
                let head_rows = if rows > 32 { 1 } else { rows };
                let arithmetic = layers + time(weights.of_head(), model.head.0, model.head.1, 1, head_rows);
                let elements = |n: u32, k: u32, ways: u32| f64::from(n) * f64::from(k) * f64::from(ways);
                let body = f64::from(model.layers) * model.matmuls.iter().map(|m| elements(m.1, m.2, m.3)).sum::<f64>();
                let head = elements(model.head.0, model.head.1, 1);
                let stream = (weights.bytes() * body + weights.of_head().bytes() * head) / (gb_per_s * 1e9);
                let bound = if arithmetic > stream { "a" } else { "m" };
                format!("{:.0} {bound} ({:.2}, {:.2})", f64::from(rows) / arithmetic.max(stream), arithmetic * 1e3, stream * 1e3)
            };
            println!("| {name} | {cores}, {ghz}, {gb_per_s} | {} | {rows} | {} |", model.name, Weights::ALL.map(cell).join(" | "));
        }
    }
}

/// Hand-written SVE loops of the same kinds of tile on Neoverse V1 (256 bits), beside what was generated for NEON.
fn sve(rates: &HashMap<Key, Rate>) -> Outcome<()> {
    let isa = Isa::lookup(AARCH64, "neoverse-v1", &[])?;
    let end = ["prfm pldl2keep, [x3]", "add x1, x1, x8", "subs x2, x2, #1", "b.ne loop"];
    // Blocks of 2 x 2, four registers of four columns each: BFMMLA and SMMLA differ in the type alone.
    let blocks = |instruction: &str, part: char, load: &str, spread: &str| {
        let mut lines = vec!["loop:".to_string()];
        lines.extend((0..4).map(|c| format!("{load} {{z{}.{part}}}, p0/z, [x1, #{c}, mul vl]", 24 + c)));
        for pair in 0..6 {
            lines.push(format!("{spread} {{z{}.{part}}}, p0/z, [x0, #{}]", 28 + pair % 4, 16 * pair));
            lines.extend((0..4).map(|c| format!("{instruction} z{}.s, z{}.{part}, z{}.{part}", 4 * pair + c, 28 + pair % 4, 24 + c)));
        }
        lines
    };
    let mut f32 = vec!["loop:".to_string()];
    f32.extend((0..8).map(|row| format!("ld1rqw {{z{row}.s}}, p0/z, [x{}]", 10 + row)));
    for k in 0..4 {
        let weights = 8 + k % 2 * 2;
        f32.extend((0..2).map(|v| format!("ld1w {{z{}.s}}, p0/z, [x1, #{}, mul vl]", weights + v, (2 * k + v).min(7))));
        let multiply = |row: u32, v: u32| format!("fmla z{}.s, z{}.s, z{row}.s[{k}]", 16 + 2 * row + v, weights + v);
        f32.extend((0..8).flat_map(|row| [multiply(row, 0), multiply(row, 1)]));
    }
    println!("\nneoverse-v1, SVE of 256 bits, hand-written loops (nothing of it is generated); int8 without the scaling of groups:");
    println!("\n| arithmetic | tile | operations per cycle, SVE | generated, NEON | peak |");
    println!("|---|---|---:|---:|---:|");
    let bf16 = blocks("bfmmla", 'h', "ld1h", "ld1rqh");
    let int8 = blocks("smmla", 'b', "ld1b", "ld1rqb");
    for (name, tile, mut lines, products, peak) in
        [("bf16", "12x16", bf16, 12 * 16 * 4, 128), ("int8", "12x16", int8, 12 * 16 * 8, 256), ("f32", "8x16", f32, 8 * 16 * 4, 32)]
    {
        lines.extend(end.iter().map(|l| l.to_string()));
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let found = 2.0 * f64::from(products) / cycles(&isa, &lines)?;
        let neon = match name {
            "bf16" => rates[&("neoverse-v1", Weights::Bf16, 1, 512)].operations_per_cycle,
            "int8" => rates[&("neoverse-v1", Weights::Int8, 1, 512)].innermost,
            _ => rate_of(&isa, Weights::Bf16, MatmulInputs::F32, 1, 512)?.operations_per_cycle,
        };
        println!("| {name} | {tile} | {found:.1} | {neon:.1} | {peak} |");
    }
    Ok(())
}

/// The planned matmul of `SHAPE`: `rows` rows of f32 that were looked up, times weights, of two ways with SiLU between.
fn kernel(isa: &Isa, weights: Weights, inputs: MatmulInputs, ways: u32, rows: u32) -> Outcome<(Program, Matmul)> {
    let (n, k) = SHAPE;
    let mut module = graph(n, k, ways, rows)?;
    // The only matmul is the head.
    let quantisation = Quantisation { body: weights.dtype(), head: weights.dtype(), ..Quantisation::default() };
    let mut cx = PassCx { inputs, quantisation, ..PassCx::default() };
    for pass in PASSES {
        pass.run(&mut module, &mut cx)?;
    }
    let planned =
        plan(&module, &PlanCx { isa, slots: 1, ctx_size: 4096, least_rows: 1, cores: 64, tuning: None }, &mut WeightTable::default())?;
    let found = planned.program.regions.iter().find_map(|region| match &region.kernel {
        Kernel::Matmul(matmul) if matmul.panels.group_cols as usize == n && matmul.panels.ways == ways => Some((**matmul).clone()),
        _ => None,
    });
    let found = found.ok_or_else(|| format!("no matmul of {ways} ways in:\n{}", planned.program))?;
    Ok((planned.program, found))
}

/// Rows that are looked up, and one matmul of all of them.
fn graph(n: usize, k: usize, ways: u32, rows: u32) -> Outcome<Module> {
    let mut b = Builder::new("step");
    let t = b.symbol("T", rows.into());
    let token = b.input("token", Type::new(DType::I32, [t]));
    let table = b.weight("embed", DType::BF16, &[256, k]);
    let x = b.embedding(table, token)?;
    let x = b.convert(x, DType::F32)?;
    let w = b.weight("w", DType::BF16, &[n * ways as usize, k]);
    let mut y = b.linear(x, w)?;
    if ways == 2 {
        let (gate, up) = (b.slice(y, 1, 0, n)?, b.slice(y, 1, n, 2 * n)?);
        let gate = b.unary(Unary::Silu, gate)?;
        y = b.binary(Binary::Mul, gate, up)?;
    }
    Ok(b.finish(vec![y]))
}

/// What the model of a CPU says of the loop for some rows.
struct Rate {
    arithmetic: &'static str,
    /// Rows and columns of the tile.
    m: u32,
    columns: u32,
    /// Useful ones, of the innermost loop alone.
    innermost: f64,
    /// The same with all around it: scaling of groups, packing of rows, widening.
    operations_per_cycle: f64,
    peak: f64,
    bytes_per_cycle: f64,
}

fn rate(&(cpu, weights, ways, rows): &Key) -> Outcome<Rate> {
    let isa = Isa::lookup(AARCH64, cpu, &[])?;
    let inputs = match weights {
        Weights::Bf16 if isa.bf16_inputs_fast() => MatmulInputs::Bf16,
        Weights::Bf16 => MatmulInputs::F32,
        _ => MatmulInputs::Int8 { bf16_rows: false },
    };
    rate_of(&isa, weights, inputs, ways, rows)
}

fn assembly(isa: &Isa, program: &Program, kernel: &Matmul) -> Outcome<String> {
    let emit = Emit { llvm_ir: false, asm: true };
    let compiled = module::build("kernel", isa, 3, emit, |mb| matmul::define_whole(mb, program, "kernel", kernel).map(|_| ()))?;
    Ok(compiled.asm.ok_or("no assembly")?)
}

fn rate_of(isa: &Isa, weights: Weights, inputs: MatmulInputs, ways: u32, rows: u32) -> Outcome<Rate> {
    let (program, kernel) = kernel(isa, weights, inputs, ways, rows)?;
    let asm = assembly(isa, &program, &kernel)?;
    // As the kernel splits them: balanced blocks, the larger size.
    let blocks = if rows > kernel.tile.mr { rows.div_ceil(kernel.tile.block_mr) } else { 1 };
    let m = rows.div_ceil(blocks);
    // Name, products of one instruction.
    let (arithmetic, instruction, products) = match kernel.compute {
        Compute::F32 => ("FMLA", "fmla", 4),
        Compute::Bf16Mmla => ("BFMMLA", "bfmmla", 16),
        Compute::Int8Dot => ("SDOT", "sdot", 16),
        Compute::Int8Mmla => ("SMMLA", "smmla", 32),
        Compute::Bf16Dot | Compute::Int8Tiles | Compute::CodesInBf16Tiles | Compute::Bf16Tiles => {
            return Err("neither bf16 dots nor tiles on Arm".into());
        }
    };
    let packs = matches!(kernel.compute, Compute::Bf16Mmla | Compute::Int8Mmla);
    let tile_rows = if packs { m.next_multiple_of(2) } else { m };
    let columns = |hot: &HotLoop<'_>| (hot.accumulators() as f64 * 4.0 / f64::from(tile_rows)).round();
    // k of one iteration.
    let depth = |hot: &HotLoop<'_>| hot.count(instruction) as f64 * f64::from(products) / f64::from(tile_rows) / columns(hot);
    // Cycles per k of the innermost loop and with what is around it in a group, columns.
    let per_k = |kind: &str| -> Outcome<(f64, f64, f64)> {
        let name = format!("kernel.{kind}{m}");
        let missing = || format!("{}: no hot loop in {kind}{m}", isa.name);
        match kernel.panels.coding {
            Coding::Elements => {
                let hot = hot_loops(&asm, &isa.triple, &name).into_iter().max_by_key(|l| l.multiply_adds()).ok_or_else(missing)?;
                let step = cycles(isa, &hot.lines)? / depth(&hot);
                Ok((step, step, columns(&hot)))
            }
            Coding::Int8 { group } | Coding::Int8Groups { group, .. } | Coding::Int4 { group, .. } => {
                let loops = group_loops(&asm, &isa.triple, &name).into_iter().filter(|l| l.inner.count(instruction) > 0);
                let around = loops.max_by_key(|l| l.inner.multiply_adds()).ok_or_else(missing)?;
                let innermost = cycles(isa, &around.inner.lines)? / depth(&around.inner);
                let steps = (f64::from(group) / depth(&around.inner)).round() as usize;
                let lines = [&around.before[..], &around.inner.lines.repeat(steps), &around.after].concat();
                let lines: Vec<&str> = lines.into_iter().filter(|l| !l.ends_with(':') && !l.starts_with('.')).collect();
                Ok((innermost, cycles(isa, &lines)? / f64::from(group), columns(&around.inner)))
            }
        }
    };
    let kind = if blocks == 1 { "stream" } else { "block" };
    let (innermost, mut step, columns) = per_k(kind)?;
    let takes_apart = kernel.tile.widen && !kernel.panels.coding.has_bytes();
    if blocks > 1 && takes_apart {
        // The first block of rows widens the weights for the others.
        let (_, widening, _) = per_k("widen")?;
        // By the first block of each pass.
        let pass = if kernel.tile.m_block > 0 { rows.min(kernel.tile.m_block) } else { rows }.div_ceil(kernel.tile.block_mr);
        step = (widening + step * f64::from(pass - 1)) / f64::from(pass);
    }
    // Once for the panels of a block. A register of a pair of rows has four k, or eight codes; a single row is doubled.
    let packing = match packing_loops(&asm, &isa.triple, &format!("kernel.{kind}{m}")).first().filter(|_| packs) {
        Some(lines) => {
            let made = lines.iter().filter(|l| l.starts_with(if m == 1 { "dup" } else { "zip" })).count() / (m as usize / 2).max(1);
            let packed = made as f64 * f64::from(products) / 4.0;
            cycles(isa, lines)? / packed * columns / f64::from(kernel.tile.n_block * kernel.panels.nr * ways)
        }
        None => 0.0,
    };
    let pipes = if isa.name == "neoverse-n1" { 2.0 } else { 4.0 };
    Ok(Rate {
        arithmetic,
        m,
        columns: columns as u32,
        innermost: 2.0 * f64::from(m) * columns / innermost,
        operations_per_cycle: 2.0 * f64::from(m) * columns / (step + packing),
        peak: pipes * 2.0 * f64::from(products),
        bytes_per_cycle: columns * weights.bytes() / step,
    })
}

/// Cycles per iteration by llvm-mca.
fn cycles(isa: &Isa, body: &[&str]) -> Outcome<f64> {
    const ITERATIONS: u32 = 200;
    let prefix = std::env::var("LLVM_SYS_191_PREFIX").unwrap_or("/usr/lib/llvm-19".into());
    let program = format!("{prefix}/bin/llvm-mca");
    let mut command = Command::new(&program);
    command.args(["-mtriple=aarch64-linux-gnu", &format!("-mcpu={}", isa.name), &format!("-iterations={ITERATIONS}")]);
    command.args(["-instruction-info=0", "-resource-pressure=0"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("{program}: {e}; apt-get install llvm-19"))?;
    // The branch back needs its label, which is the first line.
    child.stdin.take().ok_or("no pipe")?.write_all((body.join("\n") + "\n").as_bytes())?;
    let out = child.wait_with_output()?;
    let report = String::from_utf8_lossy(&out.stdout);
    let total = report.lines().find_map(|l| l.strip_prefix("Total Cycles:")?.trim().parse::<f64>().ok());
    Ok(total.map(|t| t / f64::from(ITERATIONS)).ok_or_else(|| format!("{program}: {}", String::from_utf8_lossy(&out.stderr)))?)
}
