//! Rows of floats to int8 codes with a scale per group; see [`Quantise`] for the records and `quant` of the graph crate for the arithmetic,
//! which this follows operation by operation, so that the codes are the same integers.
//!
//! In: [`Quantise`]. Out: a kernel that shares groups out to threads, or, inside a matmul, code that does all rows for one thread.

use super::microkernel::L1;
use super::{Call, define_kernel};
use crate::llvm::builder::{Cmp, Elem, Fb, Function, ModuleBuilder, Ty, Value};
use crate::program::{DType, Program, Quantise};

/// Bytes from the floats of a group to those that are asked for meanwhile: others wrote half of them, and many rows are in no cache of this
/// core. (Emerald Rapids, 512 rows of 8192, two threads: 0.66 of the time; 0.72 with 2 KB, 0.65 with 8 KB. Zen 5, decode of four sequences
/// with int4 by 32: 1.04 times the tokens/s where each thread makes all codes, 1.05 with 1 KB.)
const AHEAD: u64 = 4096;

/// Magnitude below which a group is zero.
const TINY: f32 = 1e-30;

/// Adds the kernel `name(ptr ctx, i32 thread, i32 threads, i32 layer)` to the module.
pub fn define<'c>(mb: &ModuleBuilder<'c>, program: &Program, name: &str, kernel: &Quantise) -> Function<'c> {
    define_kernel(mb, program, name, |call| {
        let groups = call.fb.int(kernel.k.div_ceil(kernel.group).into());
        let (begin, end) = call.share(call.fb.mul(call.extent(kernel.rows), groups));
        units(call, kernel, (begin, end));
    })
}

/// All rows, by this thread alone.
pub(super) fn all_rows<'c>(call: &Call<'_, '_, 'c>, kernel: &Quantise) {
    let groups = call.fb.int(kernel.k.div_ceil(kernel.group).into());
    units(call, kernel, (call.fb.int(0), call.fb.mul(call.extent(kernel.rows), groups)));
}

/// Groups `begin .. end`, counted row by row.
fn units<'c>(call: &Call<'_, '_, 'c>, kernel: &Quantise, (begin, end): (Value<'c>, Value<'c>)) {
    let fb = call.fb;
    let (x, out) = (call.base(&kernel.x.place), call.base(&kernel.out.place));
    let (groups, rest) = (kernel.k.div_ceil(kernel.group), kernel.k % kernel.group);
    fb.for_(begin, end, 1, |unit| {
        let (row, group) = (fb.div(unit, fb.int(groups.into())), fb.rem(unit, fb.int(groups.into())));
        let element = fb.add(fb.mul_int(row, kernel.x_stride.into()), fb.mul_int(group, kernel.group.into()));
        let x = fb.index(x, element, kernel.x.dtype.size());
        let lines = (0..u64::from(kernel.group) * kernel.x.dtype.size()).step_by(64);
        lines.for_each(|line| fb.prefetch(fb.offset_const(x, AHEAD + line), L1));
        let out = fb.index(out, row, kernel.out_stride.into());
        let values = kernel.values_at().map(|at| {
            let group_bytes = u64::from(kernel.group) * DType::Bf16.size();
            fb.index(fb.offset_const(out, at.into()), group, group_bytes)
        });
        let out = (fb.index(out, group, kernel.record().into()), values);
        let whole = || one_group(fb, kernel, x, out, kernel.group);
        if rest == 0 {
            return whole();
        }
        let last = fb.cmp(Cmp::Eq, group, fb.int(i64::from(groups) - 1));
        fb.either(last, || one_group(fb, kernel, x, out, rest), whole);
    });
}

/// The record of the `elements` floats at `x`, and the values of the codes where these are wanted.
fn one_group<'c>(fb: &Fb<'_, 'c>, kernel: &Quantise, x: Value<'c>, (out, out_values): (Value<'c>, Option<Value<'c>>), elements: u32) {
    let (lanes, dtype) = (fb.lanes(), kernel.x.dtype);
    let ints = Ty::vec(Elem::I32, lanes);
    let all = |v: i64| fb.splat(fb.int_of(Elem::I32, v), lanes);
    let values: Vec<Value<'c>> = (0..kernel.group / lanes)
        .map(|v| {
            let at = fb.offset_const(x, u64::from(v * lanes) * dtype.size());
            match elements.saturating_sub(v * lanes) {
                0 => fb.zero(Ty::vec(Elem::F32, lanes)),
                n if n >= lanes => fb.load_f32(dtype, lanes, at, dtype.size() as u32),
                n => {
                    let mask: Vec<i64> = (0..lanes).map(|lane| i64::from(lane < n)).collect();
                    fb.load_f32_masked(dtype, at, fb.int_vec(Elem::I1, &mask), dtype.size() as u32)
                }
            }
        })
        .collect();
    // Magnitudes order like their bits, and a NaN is above them all.
    let magnitudes = values.iter().map(|v| fb.and(fb.bitcast(*v, ints), all(0x7fff_ffff)));
    let largest = magnitudes.reduce(|a, b| fb.max(a, b)).expect("a group has elements");
    let largest = fb.bitcast(fb.reduce(largest, |a, b| fb.max(a, b)), Ty::F32);
    let tiny = fb.cmp(Cmp::Lt, largest, fb.f32(TINY));
    let or_zero = |v: Value<'c>| fb.select(tiny, fb.f32(0.0), v);
    let scale = fb.div(largest, fb.f32(127.0));
    let integers = fb.f32(Quantise::INTEGERS);
    let powers_of_two = Quantise::has_powers_of_two(kernel.group);
    let (scale, inverse) = match powers_of_two {
        true => {
            // The mantissa that is not zero makes the exponent one more; what is no number, or too large to count sums in, makes it none.
            let exponent = fb.and(fb.add(fb.bitcast(scale, Ty::I32), fb.i32(0x007f_ffff)), fb.i32(0x7f80_0000));
            let power = fb.bitcast(exponent, Ty::F32);
            let scale = fb.add(power, fb.mul(fb.add(scale, fb.mul(power, integers)), fb.f32(0.0)));
            (scale, fb.div(fb.f32(1.0), scale))
        }
        false => (scale, fb.div(fb.f32(127.0), largest)),
    };
    let [scale, inverse] = [scale, inverse].map(or_zero);
    let [scales, inverses] = [scale, inverse].map(|v| fb.splat(v, lanes));
    let mut sum = fb.zero(ints);
    for (v, value) in (0..).zip(&values) {
        let rounded = fb.round_even(fb.mul(*value, inverses));
        let code = fb.float_to_i32(rounded);
        sum = fb.add(sum, code);
        fb.store(fb.trunc(code, Elem::I8), fb.offset_const(out, u64::from(v * lanes)), lanes.min(8));
        if let Some(out) = out_values {
            let size = DType::Bf16.size();
            let at = fb.offset_const(out, u64::from(v * lanes) * size);
            fb.store_f32(DType::Bf16, fb.mul(rounded, scales), at, lanes * size as u32);
        }
    }
    let sum = fb.reduce(sum, |a, b| fb.add(a, b));
    let origin = if powers_of_two { fb.mul(scale, integers) } else { integers };
    fb.store(if powers_of_two { origin } else { scale }, fb.offset_const(out, Quantise::scale_at(kernel.group).into()), 4);
    let start = fb.add(fb.mul(sum, fb.i32(-kernel.bias_factor)), fb.bitcast(origin, Ty::I32));
    fb.store(start, fb.offset_const(out, Quantise::start_at(kernel.group).into()), 4);
}
