//! The vector builder on the host: loops, masks, rounding, on every level the host has.

mod support;

use rcompile_codegen::llvm::builder::{Cmp, Elem, Ty, Visibility};
use rcompile_codegen::llvm::module::{Emit, build};
use rcompile_codegen::program::DType;

/// `y[i] = round_bf16(x[i]) * 2 + 1` over any length, with a masked tail, and the sum of all `y`.
#[test]
fn loop_with_masked_tail() {
    for isa in support::isas() {
        let unit = build("t", &isa, 3, Emit { llvm_ir: true, asm: true }, |mb| {
            mb.define("axpb", &[Ty::PTR, Ty::PTR, Ty::I64], Some(Ty::F32), Visibility::Export, |fb, args| {
                let lanes = fb.lanes();
                let (x, y, n) = (args[0], args[1], args[2]);
                let zero = fb.f32s(0.0, lanes);
                let out = fb.loop_(fb.int(0), n, lanes.into(), &[zero], |i, sum| {
                    let left = fb.trunc(fb.sub(n, i), Elem::I32);
                    let mask = fb.cmp(Cmp::Lt, fb.iota(Elem::I32, lanes), fb.splat(left, lanes));
                    let v = fb.load_f32_masked(DType::F32, fb.index(x, i, 4), mask, 4);
                    let v = fb.round(DType::Bf16, v);
                    let r = fb.fma(v, fb.f32s(2.0, lanes), fb.f32s(1.0, lanes));
                    fb.store_f32_masked(DType::F32, r, fb.index(y, i, 4), mask, 4);
                    vec![fb.add(sum[0], fb.select(mask, r, zero))]
                });
                fb.ret(Some(fb.reduce(out[0], |a, b| fb.add(a, b))));
            });
            Ok(())
        })
        .expect("compile");
        assert!(unit.asm.as_ref().unwrap().contains(if isa.lanes == 16 { "zmm" } else { "ymm" }));
        let lib = support::load(&[&unit]);
        let f = lib.get::<extern "C" fn(*const f32, *mut f32, i64) -> f32>("axpb");
        for n in 0..=40 {
            let x: Vec<f32> = (0..n).map(|i| i as f32 * 1.001 - 7.3).collect();
            let mut y = vec![-1.0; n + 4];
            let sum = f(x.as_ptr(), y.as_mut_ptr(), n as i64);
            let round = |v: f32| f32::from_bits((v.to_bits() + 0x7fff + (v.to_bits() >> 16 & 1)) & 0xffff_0000);
            let want: Vec<f32> = x.iter().map(|v| round(*v) * 2.0 + 1.0).collect();
            assert_eq!(&y[..n], &want, "{} n={n}", isa.name);
            assert!(y[n..].iter().all(|v| *v == -1.0));
            assert!((sum - want.iter().sum::<f32>()).abs() < 1e-2);
        }
    }
}
