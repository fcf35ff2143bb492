//! The kernel that quantises rows against the definition of the quantised types: codes, scales and starts to the bit.

mod kernel_harness;

use kernel_harness::{Area, Loaded, Rng, Step, arm_isas, isas, row_type};
use rcompile_codegen::kernels::quantise;
use rcompile_codegen::llvm::builder::ModuleBuilder;
use rcompile_codegen::program::*;
use rcompile_graph::quant::quantise_group;

const ROWS: u32 = 8;
/// What one thread may not touch.
const UNTOUCHED: u8 = 0x5a;

/// Rows of `k`: random ones, and groups that are zero, all but zero, as small as the definition counts as zero, of one value, with halves
/// of a step, with what is no number, as large as a power of two as scale may be, and larger.
fn rows(k: u32, group: u32) -> Vec<Vec<f32>> {
    let mut rng = Rng::new(3);
    let mut rows: Vec<Vec<f32>> = (0..ROWS).map(|_| (0..k).map(|_| rng.signed() * 3.0).collect()).collect();
    let first = group.min(k) as usize;
    rows[0][..first].fill(0.0);
    rows[1][..first].fill(-9e-31);
    rows[2][..first].fill(1.1e-30);
    rows[3][..first].fill(-0.75);
    rows[5][0] = f32::NAN;
    rows[5][k as usize - 1] = f32::INFINITY;
    rows[6][..first].fill(127.0 * 2f32.powi(104));
    rows[7][..first].fill(-127.0 * 2f32.powi(105));
    rows[4][..first].iter_mut().enumerate().for_each(|(i, v)| *v = if i == 0 { 127.0 } else { i as f32 - 0.5 });
    rows
}

fn check(k: u32, group: u32, dtype: DType, bias_factor: i32) {
    let values = (group == SHORT_GROUP).then_some(Compute::CodesInBf16Tiles);
    for compute in [Compute::Int8Dot, Compute::Int8Tiles].into_iter().chain(values) {
        check_for(compute, k, group, dtype, bias_factor);
    }
}

/// Records for matmuls of this kind.
fn check_for(compute: Compute, k: u32, group: u32, dtype: DType, bias_factor: i32) {
    let rows = rows(k, group);
    let record_bytes = compute.record(group);
    let (x_stride, out_stride) = (k.next_multiple_of(32) + 32, compute.record_stride(k, group));
    let buffer = |name: &str, dtype: DType, stride: u32, offset: u64| Buffer { name: name.into(), dtype, rows: ROWS, stride, offset };
    let out_at = u64::from(ROWS * x_stride) * 4;
    let operand = |b: u32, dtype: DType| Operand { place: Place::Buffer(BufferId(b)), dtype };
    let kernel = Quantise {
        rows: Extent::Rows,
        x: operand(0, dtype),
        x_stride,
        out: operand(1, DType::U8),
        out_stride,
        k,
        group,
        compute,
        bias_factor,
    };
    let program = Program {
        entry: "step".into(),
        bucket: ROWS,
        least_rows: 1,
        max_logit_rows: 1,
        max_runs: 1,
        tile_rows: 1,
        buffers: vec![buffer("x", dtype, x_stride, 0), buffer("codes", DType::U8, out_stride, out_at)],
        weights: vec![],
        regions: vec![Region { name: "quantise".into(), kernel: Kernel::Quantise(kernel.clone()) }],
        body: vec![Item::Region(RegionId(0))],
        arena_bytes: out_at + u64::from(ROWS * out_stride),
        private_bytes: 128,
    };
    rcompile_codegen::verify::verify(&program).unwrap();
    for isa in isas().into_iter().chain(arm_isas()) {
        let fill = |mb: &ModuleBuilder<'_>, name: &str| {
            quantise::define(mb, &program, name, &kernel);
            Ok(())
        };
        let (loaded, asm) = (Loaded::build(&isa, fill), Loaded::assembly(&isa, fill));
        // Each line of a group is asked for once.
        let asked = asm.lines().filter(|l| ["prefetch", "prfm"].iter().any(|word| l.trim_start().starts_with(word))).count();
        assert_eq!(asked as u64, (u64::from(group) * dtype.size()).div_ceil(64), "{}: lines of a group of {group} {dtype}", isa.name);
        for threads in [1, 3] {
            let mut step = Step::new(0, 0, program.arena_bytes as usize, program.private_bytes);
            step.rows = ROWS;
            step.arena.bytes_mut().fill(UNTOUCHED);
            let mut seen = rows.clone();
            for (r, row) in seen.iter_mut().enumerate() {
                for c in 0..x_stride as usize {
                    let at = r * x_stride as usize + c;
                    // Nothing beyond k counts.
                    let value = row.get(c).copied().unwrap_or(f32::NAN);
                    match dtype {
                        DType::F32 => step.arena.put(at * 4, &value.to_le_bytes()),
                        _ => step.arena.put(at * 2, &half::bf16::from_f32(value).to_le_bytes()),
                    }
                    if let Some(v) = row.get_mut(c).filter(|_| dtype == DType::Bf16) {
                        *v = half::bf16::from_f32(*v).to_f32();
                    }
                }
            }
            step.run(&loaded, threads, 0);
            for (r, row) in seen.iter().enumerate() {
                let row_at = out_at as usize + r * out_stride as usize;
                for (g, x) in row.chunks(group as usize).enumerate() {
                    let at = row_at + g * record_bytes as usize;
                    let what = format!("k {k}, groups of {group} of {dtype} on {}, {threads} threads, [{r}, group {g}]", isa.name);
                    record(&step.arena, at, x, group, bias_factor, &what);
                    if let Some(values) = kernel.values_at() {
                        values_of_codes(&step.arena, row_at + values as usize + g * group as usize * 2, x, &what);
                    }
                    let padding = &step.arena.bytes()[at + group as usize + 8..at + record_bytes as usize];
                    assert!(padding.iter().all(|b| *b == UNTOUCHED), "{what}: written behind the record");
                }
                let end = row_at + compute.row_bytes(k, group) as usize..row_at + out_stride as usize;
                assert!(step.arena.bytes()[end].iter().all(|b| *b == UNTOUCHED), "k {k}: written beyond the records");
            }
        }
    }
}

/// The record at `at` is that of the group `x`.
fn record(arena: &Area, at: usize, x: &[f32], group: u32, bias_factor: i32, what: &str) {
    let mut codes = vec![0i8; group as usize];
    let scale = quantise_group(row_type(group), x, &mut codes[..x.len()]);
    let powers_of_two = Quantise::has_powers_of_two(group);
    let origin = if powers_of_two { scale * Quantise::INTEGERS } else { Quantise::INTEGERS };
    let first = if powers_of_two { origin } else { scale };
    let (behind, start) = (at + group as usize, at + group as usize + 4);
    if !scale.is_finite() {
        // The whole group is lost, whatever its codes.
        let lost = match powers_of_two {
            true => arena.f32(behind).is_nan() && arena.f32(start).is_nan(),
            false => !arena.f32(behind).is_finite(),
        };
        return assert!(lost, "{what}: not a number got lost");
    }
    let found: Vec<i8> = arena.bytes()[at..behind].iter().map(|b| *b as i8).collect();
    assert_eq!(found, codes, "{what}: codes");
    assert_eq!(arena.f32(behind).to_bits(), first.to_bits(), "{what}: scale, or origin");
    let sum: i32 = codes.iter().map(|c| i32::from(*c)).sum();
    assert_eq!(arena.f32(start).to_bits(), origin.to_bits().wrapping_add_signed(-bias_factor * sum), "{what}: start");
}

/// Behind the record at `at` of the group `x` lie the values of its codes.
fn values_of_codes(arena: &Area, at: usize, x: &[f32], what: &str) {
    let mut codes = vec![0i8; SHORT_GROUP as usize];
    let scale = quantise_group(row_type(SHORT_GROUP), x, &mut codes[..x.len()]);
    for (i, code) in codes.into_iter().enumerate() {
        let value = half::bf16::from_bits(arena.u16(at + i * 2)).to_f32();
        let wanted = f32::from(code) * scale;
        assert!(value == wanted || !wanted.is_finite() && !value.is_finite(), "{what}: value {i} is {value}, not {wanted}");
    }
}

#[test]
fn records_are_the_definition() {
    for (k, group, offset) in [(256, 128, 128), (67, 32, 8), (1, 64, 128), (200, 64, 0), (512, 256, 128), (300, 256, 0)] {
        check(k, group, DType::F32, offset);
    }
    check(96, 32, DType::Bf16, 8);
}
