//! Units of a program: every known CPU, symbols, determinism, what an object carries.

mod support;

use rcompile_codegen::isa::{Arch, Distances, Isa, X86_64_TRIPLE};
use rcompile_codegen::kernels::matmul;
use rcompile_codegen::program::*;
use rcompile_codegen::{Emit, Error, Options, compile, compile_units, probe_units};
use rcompile_runtime::abi::{Probe, field};
use support::program::*;

const TRIPLES: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

fn softmax() -> Program {
    let mut e = E::default();
    let (row, d) = (e.var(0), e.var(1));
    let at = e.at(row, 96, d);
    let x = e.load(0, at);
    let most = e.scalar(0);
    let below = e.sub(x, most);
    let exp = e.un(UnaryOp::Exp, below);
    let sum = e.scalar(1);
    let value = e.bin(BinaryOp::Div, exp, sum);
    let nest = LoopNest {
        outer: vec![(VarId(0), Extent::Rows)],
        operands: vec![operand(Place::Buffer(BufferId(0)), DType::F32), operand(Place::Buffer(BufferId(1)), DType::Bf16)],
        exprs: e.0,
        stages: vec![reduce(1, 90, ReduceOp::Max, x, 0), reduce(1, 90, ReduceOp::Sum, exp, 1), stores(1, 90, vec![store(1, at, value)])],
    };
    let mut p = program(buffers(&[("x", DType::F32, 8, 96), ("y", DType::Bf16, 8, 96)]), vec![], vec![nest.clone(), nest]);
    for region in &mut p.regions {
        region.name = "layers.soft-max".into();
    }
    p
}

#[test]
fn every_known_cpu_compiles_the_same_bytes_twice() {
    let p = softmax();
    for (triple, cpu) in TRIPLES.iter().flat_map(|t| Isa::known_cpus(t).into_iter().map(move |cpu| (t, cpu))) {
        let isa = Isa::lookup(triple, cpu, &[]).unwrap();
        let options = Options { opt_level: 3, emit: Emit { llvm_ir: true, asm: true } };
        let units = compile_units(&p, &isa, options);
        assert_eq!(units.len(), 2, "equal kernels are one unit");
        for unit in &units {
            let (one, two) = (compile(unit).unwrap(), compile(unit).unwrap());
            assert!(one == two, "{cpu} {}", unit.symbol);
            assert!(unit.symbol.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'));
            let asm = one.asm.unwrap();
            assert!(asm.contains(".note.GNU-stack"));
            // Everything is generated: no call but those of the runtime.
            for line in asm.lines().filter(|l| l.trim().starts_with("call") || l.trim().starts_with("bl\t")) {
                assert!(["rc_barrier", "rc_profile", "rc_loops"].iter().any(|s| line.contains(s)), "{cpu}: {line}");
            }
            if unit.symbol.starts_with("rc_loops") {
                assert_eq!(asm.contains("zmm"), isa.lanes == 16, "{cpu}");
                assert_eq!(asm.contains("vcvtneps2bf16") || asm.contains("bfcvtn"), isa.bf16_inputs(), "{cpu}");
            }
        }
        assert!(units[0].symbol.starts_with("rc_loops_f32_layers_soft_max_") && units[0].symbol.ends_with(&cpu.replace('-', "_")));
        assert_eq!(units[1].symbol, "rc_step_step_8");
    }
}

/// Probes are loops of the one instruction that they measure, on registers, at the kernels' width.
#[test]
fn probes_measure_what_they_say() {
    let p = softmax();
    for (triple, cpu) in TRIPLES.iter().flat_map(|t| Isa::known_cpus(t).into_iter().map(move |cpu| (t, cpu))) {
        let isa = Isa::lookup(triple, cpu, &[]).unwrap();
        let units = probe_units(&p, &isa, Options { opt_level: 3, emit: Emit { llvm_ir: false, asm: true } });
        assert_eq!(units.iter().any(|u| u.0 == Probe::Bf16Dot), isa.bf16_inputs(), "{cpu}");
        assert!(units.len() >= 3);
        for (probe, unit) in units {
            let asm = compile(&unit).unwrap().asm.unwrap();
            let count = |word: &str| asm.lines().filter(|l| l.trim().trim_start_matches("{vex}").trim_start().starts_with(word)).count();
            let chains = if isa.registers == 32 { 24 } else { 12 };
            let x86 = isa.arch == Arch::X86_64;
            let int8 = if isa.int8_mmla { "smmla" } else { "sdot" };
            let x86_int8 = if isa.dots_in_pairs() { "vpmaddubsw" } else { "vpdpbusd" };
            // Four tiles of sums, which are no vectors.
            let is_tile = probe == Probe::Bf16Dot && isa.bf16_tiles || probe == Probe::Int8Dot && isa.int8_tiles;
            if is_tile {
                let dots = if probe == Probe::Bf16Dot { count("tdpbf16ps") } else { count("tdpbsud") };
                assert!(dots >= 4 && dots.is_multiple_of(4) && count("tilerelease") == 1, "{cpu}: {asm}");
                continue;
            }
            let [fma, bf16, int8] = if x86 { ["vfmadd", "vdpbf16ps", x86_int8] } else { ["fmla", "bfmmla", int8] };
            match probe {
                Probe::F32 => assert!(count(fma) >= chains && count(fma) % chains == 0, "{cpu}: {asm}"),
                Probe::Bf16Dot => assert!(count(bf16) >= chains && count(bf16) % chains == 0, "{cpu}: {asm}"),
                Probe::Int8Dot => {
                    assert!(count(int8) >= chains && count(int8) % chains == 0, "{cpu}: {asm}");
                    // Without a dot: sums of words, no 32 bits.
                    let words = if isa.dots_in_pairs() { count(int8) } else { 0 };
                    assert_eq!((count("vpaddw"), count("vpmaddwd")), (words, 0), "{cpu}: {asm}");
                }
                Probe::Read1 | Probe::Read4 if x86 => {
                    assert!(count("prefetch") >= 4 && count("vxorps") + count("vpxor") >= 4, "{cpu}: {asm}")
                }
                Probe::Read1 | Probe::Read4 => assert!(count("prfm") >= 4 && count("eor\tv") >= 4, "{cpu}: {asm}"),
            }
            let spills = |l: &str| l.contains("(%rsp)") || (l.contains("\tq") && l.contains("[sp"));
            assert!(!asm.lines().any(spills), "{cpu} {}: spills\n{asm}", unit.symbol);
            assert_eq!(asm.contains("zmm"), isa.lanes == 16, "{cpu}");
            assert!(count("call") + count("bl\t") == 0, "{cpu}: {asm}");
        }
    }
}

/// What the profile costs a step that is not measured: the pointer is loaded once, and nothing of it is in the kernels.
#[test]
fn a_step_looks_at_the_profile_once() {
    let p = softmax();
    let isa = Isa::lookup(X86_64_TRIPLE, "x86-64-v4", &[]).unwrap();
    for unit in compile_units(&p, &isa, Options { opt_level: 3, emit: Emit { llvm_ir: false, asm: true } }) {
        let asm = compile(&unit).unwrap().asm.unwrap();
        let looks = asm.matches(&format!("{}(%rdi)", field::PROFILE)).count();
        let calls = asm.lines().filter(|l| l.contains("rc_profile")).count();
        if unit.symbol.starts_with("rc_step") {
            assert!(looks == 1 && calls >= 1, "{asm}");
        } else {
            assert_eq!((looks, calls), (0, 0), "{asm}");
        }
    }
}

#[test]
fn buckets_share_equal_kernels() {
    let isa = Isa::lookup(X86_64_TRIPLE, "x86-64-v3", &[]).unwrap();
    let (small, mut large) = (softmax(), softmax());
    large.bucket = 64;
    let symbols = |p: &Program| compile_units(p, &isa, Options::default()).into_iter().map(|u| (u.symbol, u.key)).collect::<Vec<_>>();
    assert_eq!(symbols(&small)[0], symbols(&large)[0]);
    large.buffers[1].offset += 64;
    assert_ne!(symbols(&small)[0].0, symbols(&large)[0].0);
    assert_eq!(symbols(&large)[1].0, "rc_step_step_64");
}

/// A program of one matmul, `a[64, 2048]` times 64 columns of bf16, with wanted or all rows and so many at least.
fn head(isa: &Isa, max_logit_rows: u32, rows: Extent, least_rows: u32) -> Program {
    let panels = Panels { nr: 16, k_pack: 2, k: 2048, groups: 1, group_cols: 64, ways: 1, coding: Coding::Elements };
    let tile = MatmulTile {
        mr: 6,
        block_mr: 6,
        k_block: 512,
        m_block: 24,
        n_block: 4,
        widen: true,
        fetch: Fetch { streams: 4, ahead: Distances { l2: 0, l1: 0 }, past_l2: false, busy: None, near: None },
    };
    let mut e = E::default();
    let (row, col) = (e.var(0), e.var(1));
    let at = e.at(row, 64, col);
    let value = e.0.add(Expr::Acc(0));
    let head = Matmul {
        rows,
        compute: Compute::F32,
        a: operand(Place::Buffer(BufferId(0)), DType::F32),
        a_stride: 2048,
        weight: WeightId(0),
        panels,
        prologue: None,
        quantise: None,
        tile,
        fetch_by_cpu: vec![],
        row: VarId(0),
        col: VarId(1),
        operands: vec![operand(Place::Output, DType::F32)],
        exprs: e.0,
        stores: vec![store(0, at, value)],
        group_nests: vec![],
    };
    let weight = Weight { name: "head".into(), dtype: DType::Bf16, layout: Layout::Panels(panels), offsets: vec![0] };
    let mut p = program(buffers(&[("a", DType::F32, 64, 2048)]), vec![weight], vec![]);
    (p.bucket, p.least_rows, p.max_logit_rows) = (64, least_rows, max_logit_rows);
    p.private_bytes = matmul::Schedule::new(isa, &p, &head).private_bytes();
    p.regions = vec![Region { name: "head".into(), kernel: Kernel::Matmul(Box::new(head)) }];
    p
}

/// Scratch of blocks of rows is laid out for the most rows, so that a kernel for 16 rows must not serve a program with 32; and one for at
/// least 33 rows has no functions for fewer.
#[test]
fn matmuls_for_more_rows_are_other_kernels() {
    let isa = Isa::lookup(X86_64_TRIPLE, "x86-64-v3", &[]).unwrap();
    let with = |max_logit_rows, rows, least_rows| head(&isa, max_logit_rows, rows, least_rows);
    // Another number of most rows, and of fewest.
    let logits = [16, 32].map(|most| with(most, Extent::LogitRows, 1));
    let rows = [1, 33].map(|least| with(16, Extent::Rows, least));
    for programs in [logits, rows] {
        let kernel = |p| compile_units(p, &isa, Options::default()).into_iter().find(|unit| unit.symbol.starts_with("rc_matmul"));
        let [few, more] = programs.each_ref().map(|p| kernel(p).unwrap());
        assert_ne!((&few.key, &few.symbol), (&more.key, &more.symbol));
        assert!(compile(&few).unwrap() != compile(&more).unwrap(), "the same code would do, and this test shows nothing");
    }
}

/// Parts depend neither on where the rows lie nor on what becomes of the sums, but on how far the rows lie apart.
#[test]
fn parts_know_no_places() {
    let isa = Isa::lookup(X86_64_TRIPLE, "x86-64-v3", &[]).unwrap();
    let [as_is, moved, apart] = [
        |_: &mut Program| (),
        |p: &mut Program| p.buffers[0].offset += 4096,
        |p: &mut Program| {
            let Kernel::Matmul(head) = &mut p.regions[0].kernel else { unreachable!() };
            head.a_stride += 64;
        },
    ]
    .map(|edit: fn(&mut Program)| {
        let mut p = head(&isa, 16, Extent::Rows, 1);
        edit(&mut p);
        let symbols = compile_units(&p, &isa, Options::default()).into_iter().map(|unit| unit.symbol);
        let (functions, others): (Vec<_>, Vec<_>) = symbols.partition(|symbol| symbol.starts_with("rc_rows"));
        (functions, others.into_iter().find(|symbol| symbol.starts_with("rc_matmul")).unwrap())
    });
    assert!(as_is.0.len() > 6 && as_is.0 == moved.0 && as_is.1 != moved.1, "{as_is:?} {moved:?}");
    assert!(apart.0.iter().all(|symbol| !as_is.0.contains(symbol)), "{as_is:?} {apart:?}");
}

/// What the planner must not ask for is said, whichever unit is compiled first.
#[test]
fn parts_that_cannot_be_are_refused() {
    let isa = Isa::lookup(X86_64_TRIPLE, "x86-64-v3", &[]).unwrap();
    let mut p = head(&isa, 16, Extent::Rows, 1);
    let Kernel::Matmul(head) = &mut p.regions[0].kernel else { unreachable!() };
    head.compute = Compute::Bf16Dot;
    let units = compile_units(&p, &isa, Options::default());
    for unit in units.iter().filter(|unit| !unit.symbol.starts_with("rc_step")) {
        let Err(Error::Program(problems)) = compile(unit) else { panic!("{}: compiled", unit.symbol) };
        assert!(problems[0].contains("bf16 dot of f32 and bf16 on x86-64-v3"), "{problems:?}");
    }
    assert!(units.len() > 6);
}

#[test]
fn optimisation_levels_agree() {
    let p = softmax();
    let mut memory = Memory { rows: 8, arena: vec![0; p.arena_bytes as usize / 8], ..Default::default() };
    Memory::put_floats(&mut memory.arena, 0, DType::F32, &(0..8 * 96).map(noise).collect::<Vec<_>>());
    for isa in support::isas() {
        let mut results = vec![];
        for opt_level in 0..=3 {
            let compiled = build_with(&p, &isa, Options { opt_level, ..Default::default() });
            let mut memory = memory.clone();
            compiled.step(&mut memory);
            results.push(memory.arena);
        }
        assert!(results.windows(2).all(|w| w[0] == w[1]), "{}", isa.name);
    }
}

#[test]
fn unknown_targets_are_refused_by_name() {
    let message = |triple, cpu, edits: &[&str]| {
        let edits: Vec<String> = edits.iter().map(|e| e.to_string()).collect();
        Isa::lookup(triple, cpu, &edits).unwrap_err().to_string()
    };
    assert!(message("riscv64-unknown-linux-gnu", "native", &[]).contains("riscv64"));
    assert!(message(X86_64_TRIPLE, "pentium", &[]).contains("x86-64-v3"));
    assert!(message(X86_64_TRIPLE, "znver4", &["+nosuch"]).contains("nosuch"));
    assert!(message(X86_64_TRIPLE, "znver4", &["-fma"]).contains("lacks fma"));
    let narrow = Isa::lookup(X86_64_TRIPLE, "znver4", &["-avx512vl".into()]).unwrap();
    assert_eq!((narrow.lanes, narrow.bf16_dot), (8, false));
    let isa = Isa::lookup(X86_64_TRIPLE, "x86-64-v4", &["+avx512bf16".into()]).unwrap();
    assert!(isa.bf16_dot && !isa.bf16_dot_fast);
    let arm = "aarch64-unknown-linux-gnu";
    assert!(message(arm, "znver5", &[]).contains("neoverse-v1"));
    assert!(message(arm, "znver5", &[]).ends_with(&format!("; --target {X86_64_TRIPLE} has it")));
    assert!(message(X86_64_TRIPLE, "neoverse-v1", &[]).ends_with(&format!("; --target {arm} has it")));
    assert!(!message(arm, "neoverse-v1", &["-neon"]).contains("--target") && !message(arm, "z80", &[]).contains("--target"));
    assert!(message(arm, "neoverse-v1", &["-neon"]).contains("lacks neon"));
    let isa = Isa::lookup(arm, "neoverse-n1", &["+bf16".into()]).unwrap();
    assert!(isa.bf16_mmla && !isa.bf16_dot);
    for (cpu, edits, int8_mmla) in
        [("neoverse-n1", &[][..], false), ("neoverse-v1", &[], true), ("neoverse-v2", &[], true), ("neoverse-v1", &["-i8mm"], false)]
    {
        let edits: Vec<String> = edits.iter().map(|e| e.to_string()).collect();
        assert_eq!(Isa::lookup(arm, cpu, &edits).unwrap().int8_mmla, int8_mmla, "{cpu} {edits:?}");
    }
}

/// Rotations, blocks and strides of an index become vector accesses, not one access per lane.
#[test]
fn indices_become_vector_accesses() {
    // y[row, head * 64 + d] = x[row, head * 64 + (d + 32) % 64] * (d < 32 ? -1 : 1) + t[position[row] * 32 + d % 32] + z[d / 2 * 2 + 1 - d
    // % 2]
    let mut e = E::default();
    let (row, head, d) = (e.var(0), e.var(1), e.var(2));
    let half = e.int(32);
    let turned = e.add(d, half);
    let turned = e.rem_int(turned, 64);
    let of_head = e.mul_int(head, 64);
    let turned = e.add(of_head, turned);
    let from = e.at(row, 256, turned);
    let x = e.load(0, from);
    let low = e.cmp(CmpOp::Lt, d, half);
    let minus = e.un(UnaryOp::Neg, x);
    let x = e.select(low, minus, x);
    let position = e.load(2, row);
    let angle = e.rem_int(d, 32);
    let angle = e.at(position, 32, angle);
    let t = e.load(3, angle);
    // Swapped neighbours: one load and a shuffle.
    let pair = e.div_int(d, 2);
    let pair = e.mul_int(pair, 2);
    let odd = e.rem_int(d, 2);
    let one = e.int(1);
    let even = e.sub(one, odd);
    let swapped = e.add(pair, even);
    let z = e.load(4, swapped);
    let sum = e.add(x, t);
    let sum = e.add(sum, z);
    let own = e.add(of_head, d);
    let to = e.at(row, 256, own);
    let weight = |i| operand(Place::Weight(WeightId(i)), DType::F32);
    let nest = LoopNest {
        outer: vec![(VarId(0), Extent::Rows), (VarId(1), Extent::Const(4))],
        operands: vec![
            operand(Place::Buffer(BufferId(0)), DType::F32),
            operand(Place::Buffer(BufferId(1)), DType::F32),
            operand(Place::Table(Table::Position), DType::I32),
            weight(0),
            weight(1),
        ],
        exprs: e.0,
        stages: vec![stores(2, 64, vec![store(1, to, sum)])],
    };
    let table = |name: &str, at| Weight { name: name.into(), dtype: DType::F32, layout: Layout::Plain, offsets: vec![at] };
    let p = program(buffers(&[("x", DType::F32, 8, 256), ("y", DType::F32, 8, 256)]), vec![table("t", 0), table("z", 1024)], vec![nest]);
    for cpu in ["x86-64-v3", "znver5"] {
        let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).unwrap();
        let units = compile_units(&p, &isa, Options { opt_level: 3, emit: Emit { llvm_ir: true, asm: true } });
        let asm = compile(&units[0]).unwrap().asm.unwrap();
        let scalar = asm.lines().filter(|l| l.contains("vinsertps") || l.contains("vmovss") || l.contains("vgather"));
        assert_eq!(scalar.count(), 0, "{cpu}\n{asm}");
        let stored = asm.lines().filter(|l| l.contains("vmovups") && l.trim().ends_with(')')).count();
        // LLVM may have unrolled the loop over rows and heads.
        assert!(stored > 0 && (stored as u32).is_multiple_of(64 / isa.lanes), "{cpu}\n{asm}");
    }
    let mut memory = Memory {
        rows: 8,
        weights: vec![0; 256],
        arena: vec![0; p.arena_bytes as usize / 8],
        position: (0..8).map(|i| i % 7).collect(),
        ..Default::default()
    };
    let x: Vec<f32> = (0..8 * 256).map(noise).collect();
    let t: Vec<f32> = (0..256).map(|i| noise(i + 9000)).collect();
    let z: Vec<f32> = (0..64).map(|i| noise(i + 9900)).collect();
    Memory::put_floats(&mut memory.arena, 0, DType::F32, &x);
    Memory::put_floats(&mut memory.weights, 0, DType::F32, &t);
    Memory::put_floats(&mut memory.weights, 1024, DType::F32, &z);
    for isa in support::isas() {
        let mut memory = memory.clone();
        build(&p, &isa).step(&mut memory);
        let got = Memory::get_floats(&memory.arena, p.buffers[1].offset, DType::F32, 8 * 256);
        for (i, got) in got.iter().enumerate() {
            let (row, head, d) = (i / 256, i / 64 % 4, i % 64);
            let sign = if d < 32 { -1.0 } else { 1.0 };
            let want = sign * x[row * 256 + head * 64 + (d + 32) % 64] + t[row % 7 * 32 + d % 32] + z[d ^ 1];
            assert_eq!(*got, want, "{} element {i}", isa.name);
        }
    }
}
