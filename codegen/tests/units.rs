//! Units of a program: every known CPU, symbols, determinism, what an object carries.

mod support;

use rcompile_codegen::isa::{HOST_TRIPLE, Isa};
use rcompile_codegen::program::*;
use rcompile_codegen::{Emit, Options, compile, compile_units};
use support::program::*;

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
        layer_ints: vec![],
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
    for cpu in Isa::known_cpus(HOST_TRIPLE) {
        let isa = Isa::lookup(HOST_TRIPLE, cpu, &[]).unwrap();
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
            for line in asm.lines().filter(|l| l.trim().starts_with("call")) {
                assert!(["rc_barrier", "rc_profile", "rc_loops"].iter().any(|s| line.contains(s)), "{cpu}: {line}");
            }
            if unit.symbol.starts_with("rc_loops") {
                assert_eq!(asm.contains("zmm"), isa.lanes == 16, "{cpu}");
                assert_eq!(asm.contains("vcvtneps2bf16"), isa.has("avx512bf16"), "{cpu}");
            }
        }
        assert!(units[0].symbol.starts_with("rc_loops_f32_layers_soft_max_") && units[0].symbol.ends_with(&cpu.replace('-', "_")));
        assert_eq!(units[1].symbol, "rc_step_step_8");
    }
}

#[test]
fn buckets_share_equal_kernels() {
    let isa = Isa::lookup(HOST_TRIPLE, "x86-64-v3", &[]).unwrap();
    let (small, mut large) = (softmax(), softmax());
    large.bucket = 64;
    let symbols = |p: &Program| compile_units(p, &isa, Options::default()).into_iter().map(|u| (u.symbol, u.key)).collect::<Vec<_>>();
    assert_eq!(symbols(&small)[0], symbols(&large)[0]);
    large.buffers[1].offset += 64;
    assert_ne!(symbols(&small)[0].0, symbols(&large)[0].0);
    assert_eq!(symbols(&large)[1].0, "rc_step_step_64");
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
    assert!(message(HOST_TRIPLE, "pentium", &[]).contains("x86-64-v3"));
    assert!(message(HOST_TRIPLE, "znver4", &["+nosuch"]).contains("nosuch"));
    assert!(message(HOST_TRIPLE, "znver4", &["-fma"]).contains("lacks fma"));
    let narrow = Isa::lookup(HOST_TRIPLE, "znver4", &["-avx512vl".into()]).unwrap();
    assert_eq!((narrow.lanes, narrow.bf16_dot), (8, false));
    let isa = Isa::lookup(HOST_TRIPLE, "x86-64-v4", &["+avx512bf16".into()]).unwrap();
    assert!(isa.bf16_dot && !isa.bf16_dot_fast);
    assert!(isa.runtime_features().contains(&"bmi1".to_string()));
}
