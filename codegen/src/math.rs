//! f32 functions as polynomials, for scalars and vectors alike (the same operations, so the same bits in every lane and tail).
//!
//! Coefficients: minimax fits by Remez exchange in 40 digits (`gelu`: a linear program), rounded to f32; the schemes (range reduction by ln
//! 2 in two parts, odd polynomial near 0 for tanh and erf, `1 - exp(-p(|x|))` for large erf) are those of Cephes and of N. Juffa's `erff`.

use crate::llvm::builder::{Cmp, Elem, Fb, Value};

/// `c[0] + x * (c[1] + x * ...)`, one fma each.
fn poly<'c>(fb: &Fb<'_, 'c>, x: Value<'c>, coefficients: &[f32]) -> Value<'c> {
    let mut terms = coefficients.iter().rev().map(|&c| fb.f32s(c, x.lanes()));
    let first = terms.next().expect("coefficients");
    terms.fold(first, |sum, c| fb.fma(sum, x, c))
}

/// `e^x`, relative error below 2e-7 where the result is normal; 0 below -104 and for -inf, inf above 88.73, NaN stays NaN.
pub fn exp<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    let lanes = x.lanes();
    let k = |v: f32| fb.f32s(v, lanes);
    // The second operand of min and max is the result for NaN.
    let x = fb.min(k(89.0), fb.max(k(-104.0), x));
    let (p, n) = exp_parts(fb, x);
    // 2^n in two factors: n reaches from -150 to 128.
    let int = |v: i64| fb.splat(fb.int_of(Elem::I32, v), lanes);
    let magic = fb.bitcast(k(ROUND_MAGIC), n.ty().with(Elem::I32));
    let n = fb.sub(fb.bitcast(n, magic.ty()), magic);
    let half = fb.ashr(n, 1);
    let power = |n: Value<'c>| fb.bitcast(fb.shl(fb.add(n, int(127)), 23), x.ty());
    fb.mul(fb.mul(p, power(half)), power(fb.sub(n, half)))
}

/// The same between -87.3 and 88.3, with the same bits, for what is added to 1: below, down to -88, it ends at 0, and above, up to 89, at
/// inf. NaN stays NaN. Two thirds of the instructions.
pub fn exp_beside_one<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    let (p, n) = exp_parts(fb, x);
    fb.mul(p, power_of_2(fb, n, 1.0))
}

/// `e^x` from [`EXP_END`] (where it ends at 0) to 0 (where it is 1): relative error below `3e-7 + 3e-8 |x|`, for weights that are summed
/// beside a 1. NaN stays NaN. Three instructions less than [`exp_beside_one`], five where powers are looked up in registers.
pub fn exp_of_negative<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    let k = |v: f32| fb.f32s(v, x.lanes());
    if fb.isa().looks_up_in_registers() {
        // x = (32 n + j + r) ln 2 / 32.
        let steps = k(32.0 * std::f32::consts::LOG2_E);
        let whole = fb.fma(x, steps, k(ROUND_MAGIC));
        let r = fb.fma(x, steps, fb.sub(k(ROUND_MAGIC), whole));
        let whole = fb.bitcast(whole, x.ty().with(Elem::I32));
        // The shift leaves 32 n + j: n goes to the exponent, and j to the mantissa, where the table expects it.
        let power = fb.look_up(&std::array::from_fn(|j| power_of_step(j as u32)), whole);
        let power = fb.add(fb.shl(whole, 18), fb.bitcast(power, whole.ty()));
        return fb.mul(poly(fb, r, &SMALL_POWER), fb.bitcast(power, x.ty()));
    }
    let log2 = k(std::f32::consts::LOG2_E);
    let n = fb.fma(x, log2, k(ROUND_MAGIC));
    let r = fb.fma(x, log2, fb.sub(k(ROUND_MAGIC), n));
    fb.mul(poly(fb, r, &HALF_POWER), power_of_2(fb, n, 1.0))
}

/// `2^(j / 32)`, less what `j << 18` adds to its bits.
fn power_of_step(j: u32) -> f32 {
    let power = libm::exp2(f64::from(j) / 32.0) as f32;
    f32::from_bits(power.to_bits() - (j << 18))
}

/// `2^(x / 32)` from -1/2 to 1/2, relative error 6e-8; 1 at 0.
const SMALL_POWER: [f32; 3] = [1.0, 0.021_661_168, 0.000_234_596_2];

/// `-127 ln 2`, rounded away from 0.
pub const EXP_END: f32 = -88.03;

/// `2^x` from -1/2 to 1/2, relative error 1.1e-7; 1 at 0.
#[expect(clippy::approx_constant, reason = "a coefficient of a fit is near ln 2")]
const HALF_POWER: [f32; 6] = [1.0, 0.693_147, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_473_1];

/// Adding it rounds to the nearest integer, in the low bits of the mantissa: 1.5 * 2^23.
const ROUND_MAGIC: f32 = 12_582_912.0;

/// `scale 2^n` of `n + ROUND_MAGIC` for a scale that is a power of two; 0 and inf where the exponent of that is one too small or too large.
fn power_of_2<'c>(fb: &Fb<'_, 'c>, n: Value<'c>, scale: f32) -> Value<'c> {
    let n = fb.bitcast(n, n.ty().with(Elem::I32));
    // The shift leaves n, which is added to the exponent of the scale.
    let scale = fb.splat(fb.int_of(Elem::I32, scale.to_bits().into()), n.lanes());
    fb.bitcast(fb.add(fb.shl(n, 23), scale), n.ty().with(Elem::F32))
}

/// `(p, n + ROUND_MAGIC)` with `exp(x) = p 2^n`. No float-to-int conversion: NaN may come.
fn exp_parts<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> (Value<'c>, Value<'c>) {
    let k = |v: f32| fb.f32s(v, x.lanes());
    let shifted = fb.fma(x, k(std::f32::consts::LOG2_E), k(ROUND_MAGIC));
    let n = fb.sub(shifted, k(ROUND_MAGIC));
    let r = fb.fma(n, k(-0.693_359_4), x);
    let r = fb.fma(n, k(2.121_944_4e-4), r);
    let q = poly(fb, r, &[0.499_999_94, 0.166_665_15, 0.041_668_456, 0.008_369_419, 0.001_381_314_5]);
    (fb.add(fb.fma(fb.mul(r, r), q, r), k(1.0)), shifted)
}

/// `1 / (1 + e^-x)`, relative error below 3e-7 where the result is normal.
pub fn sigmoid<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    let k = |v: f32| fb.f32s(v, x.lanes());
    let e = exp_beside_one(fb, fb.max(k(-88.0), fb.min(k(89.0), fb.neg(x))));
    fb.div(k(1.0), fb.add(k(1.0), e))
}

/// `x (1 + erf(x / sqrt 2)) / 2`: absolute error below 7e-8 for `x < 0`, relative error below 3e-7 from -1 on; below -10 less than 1e-33 is
/// left.
pub fn gelu<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    let k = |v: f32| fb.f32s(v, x.lanes());
    // The normal distribution below -a is 2^(a q(a)) / 2; weighted by its 0.85th power the error of a q(a) is below 3e-8 up to 9.
    let a = fb.min(k(GELU_END), fb.abs(x));
    let q = [
        -1.151_106_1,
        -0.459_197_85,
        -0.052_535_143,
        0.007_129_849_4,
        -0.000_194_982_29,
        -0.000_159_388_42,
        3.320_155_5e-5,
        -2.277_910_2e-6,
    ];
    let log2 = fb.mul(a, poly(fb, a, &q));
    let n = fb.add(log2, k(ROUND_MAGIC));
    let r = fb.sub(log2, fb.sub(n, k(ROUND_MAGIC)));
    let below = fb.mul(poly(fb, r, &HALF_POWER), power_of_2(fb, n, 0.5));
    // x - x below for x > 0, x below for the others.
    fb.fma(fb.neg(a), below, fb.max(k(0.0), x))
}

/// `|x|` beyond which the smaller side of [`gelu`] counts as nothing: it is 2^-114 there.
const GELU_END: f32 = 10.0;

/// `x (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, as `x sigmoid(2 u)`: without a difference of nearly equal numbers.
/// Relative error below 1e-6 from -1 on, absolute error below 2e-7 for `x < 0`.
pub fn gelu_tanh<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    let [first, third] = [GELU_TANH_SLOPE, GELU_TANH_SLOPE * GELU_TANH_THIRD].map(|c| fb.f32s(c as f32, x.lanes()));
    let slope = fb.add(first, fb.mul(third, fb.mul(x, x)));
    fb.mul(x, sigmoid(fb, fb.mul(x, slope)))
}

/// `2 sqrt(2 / pi)`.
const GELU_TANH_SLOPE: f64 = 1.595_769_121_605_730_7;
const GELU_TANH_THIRD: f64 = 0.044_715;

/// [`gelu`] of which a bf16 is wanted: error below `2^-15 |gelu|` from -1 on, below 7e-6 everywhere; below -4.77 it is 0.
pub fn gelu_for_bf16<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    by_parabolas(fb, x, |a| 0.5 * libm::erfc(a * std::f64::consts::FRAC_1_SQRT_2)).unwrap_or_else(|| gelu(fb, x))
}

/// [`gelu_tanh`] of which a bf16 is wanted, with the same errors.
pub fn gelu_tanh_for_bf16<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    let below = |a: f64| 1.0 / (1.0 + libm::exp(GELU_TANH_SLOPE * (a + GELU_TANH_THIRD * a * a * a)));
    by_parabolas(fb, x, below).unwrap_or_else(|| gelu_tanh(fb, x))
}

/// `x gate(x)`, where `gate(-a) = below(a)` and `gate(a) = 1 - below(a)`, by a parabola for each of [`PIECES`] pieces of `|x|`: 13
/// instructions instead of 23, of which 4 instead of 15 multiply. None where the target looks nothing up in registers.
fn by_parabolas<'c>(fb: &Fb<'_, 'c>, x: Value<'c>, below: impl Fn(f64) -> f64) -> Option<Value<'c>> {
    if !fb.isa().looks_up_in_registers() {
        return None;
    }
    let k = |v: f32| fb.f32s(v, x.lanes());
    // One more piece would begin at the end.
    let a = fb.min(k(PIECES as f32 / PIECES_OF_ONE * 0.999_99), fb.abs(x));
    let at = fb.fma(a, k(PIECES_OF_ONE), k(-0.5));
    let shifted = fb.add(at, k(ROUND_MAGIC));
    let from_middle = fb.sub(at, fb.sub(shifted, k(ROUND_MAGIC)));
    let piece = fb.bitcast(shifted, x.ty().with(Elem::I32));
    let [c0, c1, c2] = parabolas(below).map(|table| fb.look_up(&table, piece));
    let below = fb.fma(fb.fma(c2, from_middle, c1), from_middle, c0);
    // x - x below for x > 0, x below for the others.
    Some(fb.fma(fb.neg(a), below, fb.max(k(0.0), x)))
}

const PIECES: usize = 32;
/// From a number to the next.
const PIECES_OF_ONE: f32 = 6.5;

/// Coefficients by piece of the parabola through three points of `f`, Chebyshev's, in pieces from the middle; those of the last are 0.
fn parabolas(f: impl Fn(f64) -> f64) -> [[f32; PIECES]; 3] {
    let mut tables = [[0.0; PIECES]; 3];
    for piece in 0..PIECES - 1 {
        let value = |from_middle: f64| f((piece as f64 + 0.5 + from_middle) / f64::from(PIECES_OF_ONE));
        let d = 3f64.sqrt() / 4.0;
        let [low, middle, high] = [value(-d), value(0.0), value(d)];
        let coefficients = [middle, (high - low) / (2.0 * d), (high - 2.0 * middle + low) / (2.0 * d * d)];
        tables.iter_mut().zip(coefficients).for_each(|(table, c)| table[piece] = c as f32);
    }
    tables
}

/// Hyperbolic tangent, relative error below 3e-7.
pub fn tanh<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    let k = |v: f32| fb.f32s(v, x.lanes());
    let t = fb.mul(x, x);
    let p = poly(fb, t, &[-0.333_331_76, 0.133_288_03, -0.053_537_44, 0.020_034_248, -0.005_085_66]);
    let small = fb.fma(fb.mul(x, t), p, x);
    let a = fb.abs(x);
    let e = exp_beside_one(fb, fb.min(k(89.0), fb.add(a, a)));
    let large = fb.sub(k(1.0), fb.div(k(2.0), fb.add(e, k(1.0))));
    // Also of the small side: -0 stays -0.
    fb.copysign(fb.select(fb.cmp(Cmp::Lt, a, k(0.625)), small, large), x)
}

/// Error function, relative error below 3e-7 for |x| < 1, absolute error below 1.5e-7 everywhere.
pub fn erf<'c>(fb: &Fb<'_, 'c>, x: Value<'c>) -> Value<'c> {
    let k = |v: f32| fb.f32s(v, x.lanes());
    let t = fb.mul(x, x);
    // 2/sqrt(pi) - 1 as the first coefficient and `x +` outside: one rounding less.
    let p = poly(fb, t, &[0.128_379_17, -0.376_126_26, 0.112_835_854, -0.026_853_81, 0.005_188_327_7, -0.000_801_019_4, 7.853_861e-5]);
    let small = fb.fma(x, p, x);
    // 4: the next f32 is 1.
    let a = fb.abs(x);
    let a = fb.min(k(4.0), a);
    let q = poly(fb, a, &[0.000_353_748_06, 1.127_039_9, 0.638_225_9, 0.103_037_18, -0.021_805_223, 0.002_939_582, -0.000_185_571_32]);
    let large = fb.sub(k(1.0), exp_beside_one(fb, fb.neg(q)));
    fb.select(fb.cmp(Cmp::Lt, a, k(1.0)), small, fb.copysign(large, x))
}
