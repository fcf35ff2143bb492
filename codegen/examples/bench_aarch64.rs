//! `./x bench-aarch64`: what the generated code would do on Graviton, PREDICTED from its assembly. No Arm machine takes part.
//!
//! In: the kernels of a model's matmuls, with the tiles that `rcompile` chooses for them. For each CPU and number of rows the innermost loop goes through
//! llvm-mca with LLVM's scheduling model of that CPU (data in L1, perfect prediction); cycles per iteration become a share of the peak,
//! and with cores, clock and memory bandwidth of an instance tokens per second: the slower of arithmetic and weights read once.
//! Not in it: attention, norms, barriers, caches, clock changes. So it is an upper bound, and its use is that a regression shows.

#[path = "../tests/asm_check/mod.rs"]
mod asm_check;

use asm_check::{HotLoop, hot_loops, packing_loops};
use rcompile_codegen::isa::Isa;
use rcompile_codegen::kernels::matmul;
use rcompile_codegen::llvm::module::{self, Emit};
use rcompile_codegen::program::{
    BinaryOp, Buffer, BufferId, Coding, Compute, DType, Expr, Exprs, Extent, Layout, Matmul, MatmulTile, Operand, OperandId, Panels, Place,
    Program, Store, VarId, Weight, WeightId,
};
use std::collections::HashMap;
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

/// A model's matmuls in bf16.
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

const ROWS: [u32; 4] = [1, 4, 32, 512];

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench-aarch64: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    println!("PREDICTION from assembly and LLVM's scheduling models; nothing was run on Arm hardware.\n");
    println!("| CPU | arithmetic | matmul | rows | tile | cycles per k | share of peak | weights, bytes per cycle and core |");
    println!("|---|---|---|---:|---|---:|---:|---:|");
    let mut rates = HashMap::new();
    for instance in &INSTANCES {
        let isa = Isa::lookup(AARCH64, instance.cpu, &[]).map_err(|e| e.to_string())?;
        for ways in [1, 2] {
            for rows in ROWS {
                let rate = rate(&isa, rows, ways)?;
                println!(
                    "| {} | {} | {} | {rows} | {}x{} | {:.2} | {:.0} % | {:.1} |",
                    instance.cpu,
                    rate.arithmetic,
                    if ways == 2 { "gate+up" } else { "others" },
                    rate.m,
                    rate.columns,
                    rate.cycles,
                    100.0 * rate.flop_per_cycle / rate.peak,
                    rate.bytes_per_cycle,
                );
                rates.insert((instance.cpu, ways, rows), rate);
            }
        }
    }
    sve(&rates[&("neoverse-v1", 1, 512)])?;
    println!("\n| instance | cores, GHz, GB/s | model, bf16 weights | rows | arithmetic, ms | weights, ms | tokens/s | bound |");
    println!("|---|---|---|---:|---:|---:|---:|---|");
    for instance in &INSTANCES {
        for model in &MODELS {
            for rows in ROWS {
                let Instance { name, cores, ghz, gb_per_s, cpu } = *instance;
                let time = |n: u32, k: u32, ways: u32, rows: u32| {
                    let flop = 2.0 * f64::from(n) * f64::from(k) * f64::from(ways) * f64::from(rows);
                    flop / rates[&(cpu, ways, rows)].flop_per_cycle / (ghz * 1e9) / cores
                };
                let layers = f64::from(model.layers) * model.matmuls.iter().map(|m| time(m.1, m.2, m.3, rows)).sum::<f64>();
                // A prompt wants the logits of its last row; decoding those of every row.
                let head_rows = if rows > 32 { 1 } else { rows };
                let arithmetic = layers + time(model.head.0, model.head.1, 1, head_rows);
                let elements = u64::from(model.layers)
                    * model.matmuls.iter().map(|m| u64::from(m.1) * u64::from(m.2) * u64::from(m.3)).sum::<u64>()
                    + u64::from(model.head.0) * u64::from(model.head.1);
                let stream = 2.0 * elements as f64 / (gb_per_s * 1e9);
                println!(
                    "| {name} | {cores}, {ghz}, {gb_per_s} | {} | {rows} | {:.2} | {:.2} | {:.0} | {} |",
                    model.name,
                    arithmetic * 1e3,
                    stream * 1e3,
                    f64::from(rows) / arithmetic.max(stream),
                    if arithmetic > stream { "arithmetic" } else { "memory" },
                );
            }
        }
    }
    Ok(())
}

/// Hand-written SVE loops of the same kinds of tile on Neoverse V1 (256 bits), beside what was generated for NEON.
fn sve(neon: &Rate) -> Result<(), String> {
    let isa = Isa::lookup(AARCH64, "neoverse-v1", &[]).map_err(|e| e.to_string())?;
    let end = ["prfm pldl2keep, [x3]", "add x1, x1, x8", "subs x2, x2, #1", "b.ne loop"];
    let mut bf16 = vec!["loop:".to_string()];
    bf16.extend((0..4).map(|c| format!("ld1h {{z{}.h}}, p0/z, [x1, #{c}, mul vl]", 24 + c)));
    for pair in 0..6 {
        bf16.push(format!("ld1rqh {{z{}.h}}, p0/z, [x0, #{}]", 28 + pair % 4, 16 * pair));
        bf16.extend((0..4).map(|c| format!("bfmmla z{}.s, z{}.h, z{}.h", 4 * pair + c, 28 + pair % 4, 24 + c)));
    }
    let mut f32 = vec!["loop:".to_string()];
    f32.extend((0..8).map(|row| format!("ld1rqw {{z{row}.s}}, p0/z, [x{}]", 10 + row)));
    for k in 0..4 {
        let weights = 8 + k % 2 * 2;
        f32.extend((0..2).map(|v| format!("ld1w {{z{}.s}}, p0/z, [x1, #{}, mul vl]", weights + v, (2 * k + v).min(7))));
        let multiply = |row: u32, v: u32| format!("fmla z{}.s, z{}.s, z{row}.s[{k}]", 16 + 2 * row + v, weights + v);
        f32.extend((0..8).flat_map(|row| [multiply(row, 0), multiply(row, 1)]));
    }
    println!("\nneoverse-v1, SVE of 256 bits, hand-written loops (nothing of it is generated):");
    println!("\n| arithmetic | tile | flop per cycle, SVE | generated, NEON | peak |");
    println!("|---|---|---:|---:|---:|");
    for (name, tile, mut lines, flop) in [("bf16", "12x16", bf16, 12 * 16 * 4), ("f32", "8x16", f32, 8 * 16 * 4)] {
        lines.extend(end.iter().map(|l| l.to_string()));
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let rate = 2.0 * f64::from(flop) / cycles(&isa, &lines)?;
        let f32 = Plain { rows: 512, n: 4096, k: 4096, a: DType::F32, ways: 1 };
        let neon = if name == "bf16" { neon.flop_per_cycle } else { rate_of(&isa, f32)?.flop_per_cycle };
        println!("| {name} | {tile} | {rate:.1} | {neon:.1} | {} |", if name == "bf16" { 128 } else { 32 });
    }
    Ok(())
}

/// Inner dimension of a block and panels per block, as the planner chooses them for these shapes.
const K_BLOCK: u32 = 1024;
const L2_BLOCK_BYTES: u32 = 512 << 10;

/// A matmul of bf16 weights without anything around it: `out: f32[rows, n] = a[rows, k] * w[n, k]`, of two ways their product.
#[derive(Clone, Copy, Debug)]
struct Plain {
    rows: u32,
    n: u32,
    k: u32,
    a: DType,
    ways: u32,
}

impl Plain {
    fn program(&self, isa: &Isa) -> (Program, Matmul) {
        let (compute, k_pack) = isa.matmul(self.a, DType::Bf16);
        let panels =
            Panels { nr: isa.panel_nr, k_pack, k: self.k, groups: 1, group_cols: self.n, ways: self.ways, coding: Coding::Elements };
        let (a_stride, columns) = (self.k + 32, panels.padded_cols());
        let a_bytes = u64::from(self.rows * a_stride) * 4;
        let mut e = Exprs::default();
        let [row, col] = [0, 1].map(|v| e.add(Expr::Var(VarId(v))));
        let stride = e.int(columns.into());
        let at = e.binary(BinaryOp::Mul, row, stride);
        let index = e.binary(BinaryOp::Add, at, col);
        let mut value = e.add(Expr::Acc(0));
        if self.ways == 2 {
            let second = e.add(Expr::Acc(1));
            value = e.binary(BinaryOp::Mul, value, second);
        }
        let widen = compute == Compute::F32;
        let panel_bytes = K_BLOCK * panels.nr * self.ways * if widen { 4 } else { 2 };
        let tile = MatmulTile {
            mr: isa.rows(compute),
            streams: isa.streams,
            k_block: K_BLOCK,
            n_block: (L2_BLOCK_BYTES / panel_bytes).clamp(1, 64),
            widen,
            prefetch: 8192,
            prefetch_l1: 1024,
        };
        let kernel = Matmul {
            rows: Extent::Rows,
            a: Operand { place: Place::Buffer(BufferId(0)), dtype: self.a },
            a_stride,
            prologue: None,
            quantise: None,
            weight: WeightId(0),
            panels,
            compute,
            tile,
            row: VarId(0),
            col: VarId(1),
            operands: vec![Operand { place: Place::Buffer(BufferId(1)), dtype: DType::F32 }],
            exprs: e,
            stores: vec![Store { operand: OperandId(0), index, value }],
            group_nests: vec![],
        };
        let buffer = |name: &str, dtype, stride, offset| Buffer { name: name.into(), dtype, rows: self.rows, stride, offset };
        let mut program = Program {
            entry: "step".into(),
            bucket: self.rows,
            max_logit_rows: 1,
            max_runs: 1,
            tile_rows: 1,
            buffers: vec![buffer("a", self.a, a_stride, 0), buffer("out", DType::F32, columns, a_bytes)],
            weights: vec![Weight { name: "w".into(), dtype: DType::Bf16, layout: Layout::Panels(panels), offsets: vec![0] }],
            regions: vec![],
            body: vec![],
            arena_bytes: a_bytes + u64::from(self.rows * columns) * 4,
            private_bytes: 0,
        };
        program.private_bytes = matmul::private_bytes(isa, &program, &kernel);
        (program, kernel)
    }
}

/// What the model of a CPU says of the loop for some rows.
struct Rate {
    arithmetic: &'static str,
    /// Rows and columns of the tile.
    m: u32,
    columns: u32,
    /// Per k.
    cycles: f64,
    /// Useful work, packing included.
    flop_per_cycle: f64,
    peak: f64,
    bytes_per_cycle: f64,
}

fn rate(isa: &Isa, rows: u32, ways: u32) -> Result<Rate, String> {
    let a = if isa.bf16_inputs_fast() { DType::Bf16 } else { DType::F32 };
    rate_of(isa, Plain { rows, n: 4096, k: 4096, a, ways })
}

fn rate_of(isa: &Isa, plain: Plain) -> Result<Rate, String> {
    let Plain { rows, ways, .. } = plain;
    let (program, kernel) = plain.program(isa);
    let emit = Emit { llvm_ir: false, asm: true };
    let compiled = module::build("kernel", isa, 3, emit, |mb| matmul::define(mb, &program, "kernel", &kernel).map(|_| ()));
    let asm = compiled.map_err(|e| e.to_string())?.asm.expect("assembly");
    // As the kernel splits them: balanced blocks, the larger size.
    let blocks = rows.div_ceil(kernel.tile.mr);
    let m = rows.div_ceil(blocks);
    let (instruction, flop, arithmetic) = match kernel.compute {
        Compute::F32 => ("fmla", 8.0, "f32"),
        _ => ("bfmmla", 32.0, "bf16"),
    };
    let loop_of = |kind: &str| -> Result<(f64, HotLoop<'_>), String> {
        let loops = hot_loops(&asm, &isa.triple, &format!("kernel.{kind}{m}"));
        let hot = loops.into_iter().max_by_key(|l| l.multiply_adds()).ok_or_else(|| format!("{}: no hot loop in {kind}{m}", isa.name))?;
        Ok((cycles(isa, &hot.lines)?, hot))
    };
    let (mut step, hot) = loop_of(if blocks == 1 { "stream" } else { "block" })?;
    let work = hot.count(instruction) as f64;
    let tile_rows = if kernel.compute == Compute::F32 { m } else { m.next_multiple_of(2) };
    let columns = (hot.accumulators() as f64 * 4.0 / f64::from(tile_rows)).round();
    // A multiply-add is 4 products, a matrix product 16: k per iteration.
    let products = if kernel.compute == Compute::F32 { 4.0 } else { 16.0 };
    let k = work * products / f64::from(tile_rows) / columns;
    if blocks > 1 && kernel.tile.widen {
        // The first block of rows widens the weights for the others.
        let (widening, first) = loop_of("widen")?;
        let per_k = widening / (first.multiply_adds() / first.accumulators()) as f64;
        step = (per_k * k + step * f64::from(blocks - 1)) / f64::from(blocks);
    }
    // Eight k per iteration, once for the panels of a block.
    let kind = if blocks == 1 { "stream" } else { "block" };
    let packing = match packing_loops(&asm, &isa.triple, &format!("kernel.{kind}{m}")).first() {
        Some(lines) => cycles(isa, lines)? / 8.0 * k * columns / f64::from(kernel.tile.n_block * kernel.panels.nr * ways),
        None => 0.0,
    };
    let pipes = if isa.name == "neoverse-n1" { 2.0 } else { 4.0 };
    Ok(Rate {
        arithmetic,
        m,
        columns: columns as u32,
        cycles: step / k,
        flop_per_cycle: 2.0 * f64::from(m) * columns * k / (step + packing),
        peak: pipes * flop,
        bytes_per_cycle: columns * k * 2.0 / step,
    })
}

/// Cycles per iteration by llvm-mca.
fn cycles(isa: &Isa, body: &[&str]) -> Result<f64, String> {
    const ITERATIONS: u32 = 200;
    let prefix = std::env::var("LLVM_SYS_191_PREFIX").unwrap_or("/usr/lib/llvm-19".into());
    let program = format!("{prefix}/bin/llvm-mca");
    let mut command = Command::new(&program);
    command.args(["-mtriple=aarch64-linux-gnu", &format!("-mcpu={}", isa.name), &format!("-iterations={ITERATIONS}")]);
    command.args(["-instruction-info=0", "-resource-pressure=0"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("{program}: {e}; apt-get install llvm-19"))?;
    // The branch back needs its label, which is the first line.
    child.stdin.take().expect("piped").write_all((body.join("\n") + "\n").as_bytes()).map_err(|e| e.to_string())?;
    let out = child.wait_with_output().map_err(|e| e.to_string())?;
    let report = String::from_utf8_lossy(&out.stdout);
    let total = report.lines().find_map(|l| l.strip_prefix("Total Cycles:")?.trim().parse::<f64>().ok());
    total.map(|t| t / f64::from(ITERATIONS)).ok_or_else(|| format!("{program}: {}", String::from_utf8_lossy(&out.stderr)))
}
