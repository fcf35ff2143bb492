//! exp, tanh, erf, gelu and sigmoid against libm in f64, densely and at the special points, as vectors and as scalars; integer dots at
//! their extremes.

mod support;

use rcompile_codegen::llvm::builder::{Codes, Elem, Fb, Ty, Value, Visibility};
use rcompile_codegen::llvm::module::{Emit, build};
use rcompile_codegen::math;
use rcompile_codegen::program::DType;

type Kernel = extern "C" fn(*const f32, *mut f32, i64);

/// `y[i] = f(x[i])`, first vectors of all lanes, then single elements: both must give the same bits.
fn kernel(isa: &rcompile_codegen::isa::Isa, f: for<'c> fn(&Fb<'_, 'c>, Value<'c>) -> Value<'c>) -> support::Loaded {
    let unit = build("t", isa, 3, Emit::default(), |mb| {
        for (name, wide) in [("vector", true), ("scalar", false)] {
            mb.define(name, &[Ty::PTR, Ty::PTR, Ty::I64], None, Visibility::Export, |fb, args| {
                let lanes = if wide { fb.lanes() } else { 1 };
                fb.for_(fb.int(0), args[2], lanes.into(), |i| {
                    let x = fb.load_f32(DType::F32, lanes, fb.index(args[0], i, 4), 4);
                    fb.store_f32(DType::F32, f(fb, x), fb.index(args[1], i, 4), 4);
                });
            });
        }
        Ok(())
    })
    .expect("compile");
    support::load(&[&unit])
}

/// Greatest relative and absolute error over all f32 with a stride of bit patterns, and special points.
fn errors(
    f: for<'c> fn(&Fb<'_, 'c>, Value<'c>) -> Value<'c>,
    reference: impl Fn(f64) -> f64,
    keep: impl Fn(f32) -> bool,
    special: &[(f32, f32)],
) -> (f64, f64) {
    let mut x: Vec<f32> = (0..=u32::MAX / 3001).map(|i| f32::from_bits(i * 3001)).filter(|x| keep(*x)).collect();
    // Densely where the functions bend.
    x.extend((-400_000..400_000).map(|i| i as f32 * 3e-5).filter(|x| keep(*x)));
    x.resize(x.len().div_ceil(16) * 16, x[0]);
    let mut worst = (0f64, 0f64);
    for isa in support::isas() {
        let lib = kernel(&isa, f);
        let mut y = vec![0f32; x.len()];
        lib.get::<Kernel>("vector")(x.as_ptr(), y.as_mut_ptr(), x.len() as i64);
        for (x, y) in x.iter().zip(&y) {
            let want = reference((*x).into());
            assert!(!y.is_nan(), "{} at {x:e} is no number", isa.name);
            let error = (f64::from(*y) - want).abs();
            if (want as f32).is_infinite() {
                assert_eq!(*y, want as f32, "{} at {x:e}", isa.name);
                continue;
            }
            if want.abs() >= f64::from(f32::MIN_POSITIVE) && error / want.abs() > worst.0 {
                worst.0 = error / want.abs();
                println!("{} rel {:e} at {x:e}: {y:e} for {want:e}", isa.name, worst.0);
            }
            worst.1 = worst.1.max(error);
        }
        let mut again = vec![0f32; x.len()];
        lib.get::<Kernel>("scalar")(x.as_ptr(), again.as_mut_ptr(), x.len() as i64);
        assert!(y.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()), "{}: scalar and vector differ", isa.name);
        for (x, want) in special {
            let mut y = 7f32;
            lib.get::<Kernel>("scalar")(x, &mut y, 1);
            assert!(y.to_bits() == want.to_bits() || (y.is_nan() && want.is_nan()), "{} f({x:e}) = {y:e}, not {want:e}", isa.name);
        }
    }
    println!("relative {:e} absolute {:e}", worst.0, worst.1);
    worst
}

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

#[test]
fn exp() {
    let special = [(NAN, NAN), (INF, INF), (-INF, 0.0), (0.0, 1.0), (-0.0, 1.0), (-104.0, 0.0), (-1e30, 0.0), (88.74, INF), (1e30, INF)];
    let (relative, _) = errors(math::exp, f64::exp, |x| (-110.0..90.0).contains(&x), &special);
    assert!(relative < 2e-7, "{relative:e}");
}

#[test]
fn tanh() {
    let special = [(NAN, NAN), (INF, 1.0), (-INF, -1.0), (0.0, 0.0), (-0.0, -0.0), (20.0, 1.0), (-20.0, -1.0), (1e-30, 1e-30)];
    let (relative, _) = errors(math::tanh, f64::tanh, |x| x.is_finite(), &special);
    assert!(relative < 3e-7, "{relative:e}");
}

#[test]
fn erf() {
    let special = [(NAN, NAN), (INF, 1.0), (-INF, -1.0), (0.0, 0.0), (-0.0, -0.0), (5.0, 1.0), (-5.0, -1.0)];
    let (relative, absolute) = errors(math::erf, libm::erf, |x| x.is_finite(), &special);
    assert!(relative < 3e-7 && absolute < 1.5e-7, "{relative:e} {absolute:e}");
}

#[test]
fn exp_beside_one() {
    let special = [(NAN, NAN), (0.0, 1.0), (-88.0, 0.0), (89.0, INF)];
    let (relative, _) = errors(math::exp_beside_one, f64::exp, |x| (-87.3..88.3).contains(&x), &special);
    assert!(relative < 2e-7, "{relative:e}");
    let (_, difference) =
        errors(|fb, x| fb.sub(math::exp(fb, x), math::exp_beside_one(fb, x)), |_| 0.0, |x| (-87.3..88.3).contains(&x), &[]);
    assert_eq!(difference, 0.0);
    // Below, nothing but 0 comes where the exponent is used up.
    let below = |x: f64| if x < -87.68 { 0.0 } else { x.exp() };
    let (_, absolute) = errors(math::exp_beside_one, below, |x| (-88.0..-87.3).contains(&x), &[]);
    assert!(absolute < 2e-38, "{absolute:e}");
}

#[test]
fn exp_of_negative() {
    let special = [(NAN, NAN), (0.0, 1.0), (-0.0, 1.0), (math::EXP_END, 0.0)];
    let (relative, _) = errors(math::exp_of_negative, f64::exp, |x| (-1.0..=0.0).contains(&x), &special);
    assert!(relative < 3e-7, "{relative:e}");
    let (relative, _) = errors(math::exp_of_negative, f64::exp, |x| (-87.3..=0.0).contains(&x), &[]);
    assert!(relative < 2e-6, "{relative:e}");
    let (_, absolute) = errors(math::exp_of_negative, f64::exp, |x| (math::EXP_END..=0.0).contains(&x), &[]);
    assert!(absolute < 2e-7, "{absolute:e}");
}

#[test]
fn gelu() {
    let special = [(NAN, NAN), (INF, INF), (0.0, 0.0), (-0.0, -0.0), (20.0, 20.0), (3e38, 3e38), (1e-30, 5e-31)];
    let reference = |x: f64| x * 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
    let (relative, _) = errors(math::gelu, reference, |x| x > -1.0, &special);
    assert!(relative < 3e-7, "{relative:e}");
    let (_, absolute) = errors(math::gelu, reference, |x| x < 0.0, &[]);
    assert!(absolute < 7e-8, "{absolute:e}");
    let (_, absolute) = errors(math::gelu, |_| 0.0, |x| x < -30.0, &[]);
    assert!(absolute < 1e-33, "{absolute:e}");
}

#[test]
fn gelu_tanh() {
    let special = [(NAN, NAN), (INF, INF), (0.0, 0.0), (-0.0, -0.0), (20.0, 20.0), (3e38, 3e38), (1e-30, 5e-31)];
    let (relative, _) = errors(math::gelu_tanh, gelu_tanh_reference, |x| x > -1.0, &special);
    assert!(relative < 1e-6, "{relative:e}");
    let (_, absolute) = errors(math::gelu_tanh, gelu_tanh_reference, |x| x < 0.0, &[]);
    assert!(absolute < 2e-7, "{absolute:e}");
}

fn gelu_tanh_reference(x: f64) -> f64 {
    // 1 + tanh(u) of a large negative u as a quotient.
    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    x / (1.0 + (-2.0 * u).exp())
}

/// Where there is nothing to look up with they are the exact ones.
#[test]
fn gelu_for_bf16() {
    let special = [(NAN, NAN), (INF, INF), (0.0, 0.0), (-0.0, -0.0), (20.0, 20.0), (3e38, 3e38)];
    let normal = |x: f64| x * 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
    for (f, reference) in [
        (math::gelu_for_bf16 as for<'c> fn(&Fb<'_, 'c>, Value<'c>) -> Value<'c>, normal as fn(f64) -> f64),
        (math::gelu_tanh_for_bf16, gelu_tanh_reference),
    ] {
        let (relative, _) = errors(f, reference, |x| x > -1.0, &special);
        assert!(relative < 3e-5, "{relative:e}");
        let (_, absolute) = errors(f, reference, |x| x < 0.0, &[]);
        assert!(absolute < 7e-6, "{absolute:e}");
    }
}

#[test]
fn sigmoid() {
    let special = [(NAN, NAN), (INF, 1.0), (-INF, 0.0), (0.0, 0.5), (-88.5, 0.0), (-1e30, 0.0), (1e30, 1.0)];
    let (relative, _) = errors(math::sigmoid, |x| 1.0 / (1.0 + (-x).exp()), |x| (-85.0..1e9).contains(&x), &special);
    assert!(relative < 3e-7, "{relative:e}");
}

/// `sum[i] = dot_int8(1000, weights[i], rows[i])` of words of four codes.
fn dots(isa: &rcompile_codegen::isa::Isa, codes: Codes) -> support::Loaded {
    let unit = build("t", isa, 3, Emit::default(), |mb| {
        mb.define("dots", &[Ty::PTR, Ty::PTR, Ty::PTR, Ty::I64], None, Visibility::Export, |fb, args| {
            let words = Ty::vec(Elem::I32, fb.lanes());
            let start = fb.splat(fb.i32(1000), fb.lanes());
            fb.for_(fb.int(0), args[3], fb.lanes().into(), |i| {
                let [weights, rows] = [0, 1].map(|n| fb.load(words, fb.index(args[n], i, 4), 4));
                fb.store(fb.dot_int8(start, weights, rows, codes), fb.index(args[2], i, 4), 4);
            });
        });
        Ok(())
    })
    .expect("compile");
    support::load(&[&unit])
}

/// Nothing saturates: the least, largest and middle codes in all places.
#[test]
fn integer_dots_are_exact() {
    type Dots = extern "C" fn(*const [u8; 4], *const [u8; 4], *mut i32, i64);
    let four = |codes: [u8; 3]| (0..81).map(move |n: usize| [1, 3, 9, 27].map(|place| codes[n / place % 3]));
    for isa in support::isas().iter().filter(|isa| isa.int8_dot(isa.lanes).is_some()) {
        let signed = isa.code_type() == DType::I8;
        let bytes = if signed { [-128i8, -1, 127].map(|code| code as u8) } else { [0, 128, 255] };
        for (codes, weights) in [(Codes::Bytes, bytes), (Codes::Nibbles, [0, 8, 15])] {
            let all = four(weights).flat_map(|w| four([-127i8, 1, 127].map(|code| code as u8)).map(move |x| (w, x)));
            let (mut w, mut x): (Vec<_>, Vec<_>) = all.unzip();
            let padded = w.len().next_multiple_of(16);
            w.resize(padded, [0; 4]);
            x.resize(padded, [0; 4]);
            let mut sums = vec![0; padded];
            dots(isa, codes).get::<Dots>("dots")(w.as_ptr(), x.as_ptr(), sums.as_mut_ptr(), padded as i64);
            for ((w, x), sum) in w.iter().zip(&x).zip(sums) {
                let code = |w: u8| if signed && codes == Codes::Bytes { i32::from(w as i8) } else { w.into() };
                let products = w.iter().zip(x).map(|(w, x)| code(*w) * i32::from(*x as i8));
                assert_eq!(sum, 1000 + products.sum::<i32>(), "{} {codes:?} {w:?} {x:?}", isa.name);
            }
        }
    }
}
