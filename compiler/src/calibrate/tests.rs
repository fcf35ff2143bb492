//! The arithmetic against its definitions in f64; the cuts against the whole graph.

use super::blocks::{Product, side_of};
use super::gptq::Gptq;
use super::hessian::{DAMP, Hessian};
use super::host::HostCompiler;
use super::{Cx, Forward, Planning, Wanted, cuts, planning, traced};
use crate::cache::Cache;
use crate::calibrate::Codes;
use crate::link::guard::WorkDir;
use crate::pack::{self, Tensors};
use crate::passes::quantise::Quantisation;
use crate::pipeline::PASSES;
use rcompile_graph::quant::{CodedRows, Step};
use rcompile_graph::{DType, Group, Interp, Node, Op, Recipe, Tensor};
use std::path::Path;

fn with_product<T>(side: usize, run: impl FnOnce(&Product) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    let work = WorkDir::create(&dir.path().join("out")).unwrap();
    let cache = Cache::none();
    let mut host = HostCompiler::new(&cache, &work).unwrap();
    run(&Product::new(&mut host, side).unwrap())
}

/// Numbers between -1 and 1.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Rows whose columns depend on each other, as activations do.
fn inputs(rows: usize, k: usize, seed: u64) -> Vec<f32> {
    let noise = numbers(rows * k, seed);
    let common = numbers(rows * 8, seed + 1);
    let mix = numbers(8 * k, seed + 2);
    let value = |at: usize| {
        let (row, c) = (at / k, at % k);
        let shared: f32 = (0..8).map(|i| common[row * 8 + i] * mix[i * k + c]).sum();
        0.3 * noise[at] + shared
    };
    (0..rows * k).map(value).collect()
}

/// `X^T X` plus one part in a hundred of its mean diagonal.
fn damped(x: &[f32], k: usize) -> Vec<f64> {
    let mut h = vec![0.0; k * k];
    for row in x.chunks(k) {
        for i in 0..k {
            (0..k).for_each(|j| h[i * k + j] += f64::from(row[i]) * f64::from(row[j]));
        }
    }
    let mean = (0..k).map(|i| h[i * (k + 1)]).sum::<f64>() / k as f64;
    (0..k).for_each(|i| h[i * (k + 1)] += 0.01 * mean);
    h
}

/// `L` with `L L^T = a`.
fn cholesky(a: &[f64], k: usize) -> Vec<f64> {
    let mut l = vec![0.0; k * k];
    for i in 0..k {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|m| l[i * k + m] * l[j * k + m]).sum();
            let rest = a[i * k + j] - sum;
            l[i * k + j] = if i == j { rest.sqrt() } else { rest / l[j * k + j] };
        }
    }
    l
}

fn inverse(a: &[f64], k: usize) -> Vec<f64> {
    let l = cholesky(a, k);
    let mut out = vec![0.0; k * k];
    for c in 0..k {
        let mut x = vec![0.0; k];
        for i in 0..k {
            let sum: f64 = (0..i).map(|m| l[i * k + m] * x[m]).sum();
            x[i] = (f64::from(u8::from(i == c)) - sum) / l[i * k + i];
        }
        for i in (0..k).rev() {
            let sum: f64 = (i + 1..k).map(|m| l[m * k + i] * x[m]).sum();
            x[i] = (x[i] - sum) / l[i * k + i];
        }
        (0..k).for_each(|i| out[i * k + c] = x[i]);
    }
    out
}

/// GPTQ as the paper has it: the upper Cholesky factor of the inverse, columns left to right, later weights moved by each error. In another
/// order of columns groups keep the scales of the weights as they are.
fn paper(dtype: DType, weights: &[f32], k: usize, h: &[f64], order: Option<&[usize]>) -> CodedRows {
    let place = |c: usize| order.map_or(c, |o| o[c]);
    let h: Vec<f64> = (0..k * k).map(|e| h[place(e / k) * k + place(e % k)]).collect();
    let l = cholesky(&inverse(&h, k), k);
    let u = |i: usize, j: usize| l[j * k + i];
    let mut coded = CodedRows { dtype, width: k, codes: vec![0; weights.len()], scales: vec![], zeros: vec![] };
    let group = coded.group();
    for (n, row) in weights.chunks(k).enumerate() {
        let mut w: Vec<f64> = (0..k).map(|c| f64::from(row[place(c)])).collect();
        let mut steps: Vec<Step> = row.chunks(group).map(|x| Step::of(dtype, x)).collect();
        for c in 0..k {
            if c % group == 0 && group < k && order.is_none() {
                let now: Vec<f32> = w[c..k.min(c + group)].iter().map(|x| *x as f32).collect();
                steps[c / group] = Step::of(dtype, &now);
            }
            let step = &steps[place(c) / group];
            let code = step.code(w[c] as f32);
            coded.codes[n * k + place(c)] = code;
            let error = (w[c] - f64::from(code) * f64::from(step.scale)) / u(c, c);
            (c..k).for_each(|j| w[j] -= error * u(c, j));
        }
        coded.scales.extend(steps.iter().map(|s| s.scale));
    }
    coded
}

/// What rounding costs: the trace of `D H D^T`.
fn cost(coded: &CodedRows, weights: &[f32], k: usize, h: &[f64]) -> f64 {
    let errors: Vec<f64> = coded.values().iter().zip(weights).map(|(q, w)| f64::from(*w) - q).collect();
    let of_row = |d: &[f64]| (0..k).map(|i| d[i] * (0..k).map(|j| h[i * k + j] * d[j]).sum::<f64>()).sum::<f64>();
    errors.chunks(k).map(of_row).sum()
}

#[test]
fn products() {
    with_product(64, |product| {
        let (a, b) = (numbers(48 * 64, 1), numbers(64 * 64, 2));
        let panels = product.panels(|n, k| b[n * 64 + k]);
        product
            .run(&a, &panels, |c| {
                assert_eq!(c.len(), 48 * 64);
                for (at, found) in c.iter().enumerate() {
                    let (i, j) = (at / 64, at % 64);
                    let wanted: f64 = (0..64).map(|k| f64::from(a[i * 64 + k]) * f64::from(b[j * 64 + k])).sum();
                    assert!((f64::from(*found) - wanted).abs() < 1e-5, "[{i}, {j}] is {found}, not {wanted}");
                }
            })
            .unwrap();
    });
}

/// One block with a rest, and several with a rest.
#[test]
fn factors() {
    for (k, side) in [(70, 128), (200, 64)] {
        with_product(side, |product| {
            let x = inputs(333, k, 3);
            let mut hessian = Hessian::new(product, k);
            hessian.add(&[x[..100 * k].to_vec(), x[100 * k..].to_vec()]).unwrap();
            let factor = hessian.factor(DAMP).unwrap().unwrap();
            let r = |i: usize, j: usize| {
                if i / side > j / side { 0.0 } else { f64::from(factor.block(i / side, j / side)[i % side * side + j % side]) }
            };
            let h = damped(&x, k);
            let largest = h.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            for i in 0..k {
                for j in 0..k {
                    let found: f64 = (0..k).map(|m| r(i, m) * r(j, m)).sum();
                    assert!((found - h[i * k + j]).abs() < 1e-5 * largest, "[{i}, {j}] is {found}, not {}", h[i * k + j]);
                    assert!(i <= j || r(i, j) == 0.0);
                }
            }
        });
    }
}

#[test]
fn inputs_without_a_meaning() {
    with_product(64, |product| {
        let w = numbers(3 * 64, 9);
        let q4 = DType::Q4(Group::G32);
        let mut zero = Hessian::new(product, 64);
        zero.add(&[vec![0.0; 64 * 10]]).unwrap();
        let factor = zero.factor(DAMP).unwrap().unwrap();
        assert_eq!(Gptq::new(&factor, None).round(q4, &w, 64).unwrap(), CodedRows::quantise(q4, &w, 64));
        for bad in [f32::NAN, f32::INFINITY] {
            let mut hessian = Hessian::new(product, 64);
            hessian.add(&[[&[bad][..], &[1.0; 63]].concat()]).unwrap();
            assert!(hessian.factor(DAMP).unwrap().is_none());
        }
    });
}

/// Equal codes but for values that rounding puts on the other side of a border, and the cost of the paper's.
#[test]
fn codes_are_those_of_the_paper() {
    let cases = [
        (200, 64, DType::Q4(Group::G32)),
        (200, 64, DType::Q4(Group::G64)),
        (96, 128, DType::Q4(Group::G128)),
        (300, 128, DType::Q4(Group::G128)),
        (200, 64, DType::Q8(Group::Row)),
    ];
    for ((k, side, dtype), act_order) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        with_product(side, |product| {
            let (x, w) = (inputs(500, k, 5), numbers(40 * k, 6));
            let h = damped(&x, k);
            let mut hessian = Hessian::new(product, k);
            hessian.add(std::slice::from_ref(&x)).unwrap();
            let order = act_order.then(|| hessian.by_size());
            if let Some(order) = &order {
                assert!(order.windows(2).all(|pair| h[pair[0] * (k + 1)] > h[pair[1] * (k + 1)] * 0.9999));
                hessian = hessian.ordered(order);
            }
            let factor = hessian.factor(DAMP).unwrap().unwrap();
            let found = Gptq::new(&factor, order.as_deref()).round(dtype, &w, k).unwrap();
            let wanted = paper(dtype, &w, k, &h, order.as_deref());
            let other = found.codes.iter().zip(&wanted.codes).filter(|(a, b)| a != b).count();
            let costs = [&found, &wanted, &CodedRows::quantise(dtype, &w, k)].map(|coded| cost(coded, &w, k, &h));
            println!("{dtype}, {act_order}: {other} of {} codes differ; cost {costs:?}", found.codes.len());
            assert!(other * 50 < found.codes.len(), "{dtype}, {act_order}: {other} codes differ");
            assert!((costs[0] / costs[1] - 1.0).abs() < 0.01 && costs[0] < 0.6 * costs[2], "{dtype}, {act_order}: {costs:?}");
        });
    }
}

/// Inputs of the last layer, or of the head, computed cut by cut by compiled code with codes of all weights before it, are those of the
/// whole graph in the interpreter.
#[test]
fn cuts_are_the_model() {
    // More than a tile of attention has where heads share keys.
    const ROWS: usize = 40;
    // No group of 32 divides the encoder's widths.
    let four = DType::Q4(Group::G32);
    for (name, dtype, last) in
        [("bert", DType::Q8(Group::Row), "output.dense"), ("gpt2-gelu", four, "wte"), ("qwen2-window", four, "lm_head")]
    {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
        let options = rcompile_models::OpenOptions { tokenizer: rcompile_models::TokenizerUse::Unread, ..Default::default() };
        let model = rcompile_models::open(&dir, &options).unwrap();
        let temp = tempfile::tempdir().unwrap();
        let work = WorkDir::create(&temp.path().join("out")).unwrap();
        let cache = Cache::none();
        let quantisation = Quantisation { body: Some(dtype), head: Some(dtype), ..Quantisation::default() };
        let cx = Cx { model: &model, passes: PASSES, quantisation: &quantisation, act_order: false, cache: &cache, work: &work };
        let chunks: Vec<Vec<u32>> = (0..3).map(|c| (0..ROWS as u32).map(|i| (c * 31 + i * 7) % 90).collect()).collect();

        let mut host = HostCompiler::new(&cache, &work).unwrap();
        let (module, wanted) = traced(&cx, ROWS).unwrap();
        let cuts = cuts::cuts(&module, 3 * ROWS as u64).unwrap();
        let plannings: Vec<Planning> = cuts.into_iter().map(|cut| planning(&host, cut, ROWS, 3 * ROWS, &wanted).unwrap()).collect();
        let mut forward = Forward::new(&chunks, &plannings).unwrap();
        let mut codes = Codes::create(work.path()).unwrap();
        let mut found: Vec<Vec<f32>> = Vec::new();
        for planning in &plannings {
            let step = forward.prepare(&mut host, planning, &codes.over(&model.weights)).unwrap();
            let Some(first) = planning.cut.tensors.first() else {
                forward.advance(&step).unwrap();
                continue;
            };
            found.clear();
            let collect = |inputs: &[Vec<f32>]| {
                found.extend_from_slice(inputs);
                Ok(())
            };
            forward.inputs(&step, wanted[first].width, collect).unwrap();
            for name in &planning.cut.tensors {
                let Wanted { dtype, floats, rows, width, .. } = &wanted[name];
                codes.add(name, *dtype, *rows, *width);
                let floats = pack::floats(floats, 0..*rows, &model.weights).unwrap();
                codes.write(name, 0, &CodedRows::quantise(*dtype, &floats, *width)).unwrap();
            }
        }
        assert_eq!(found.len(), 3);

        // An encoder has no head; GPT-2's is its table, Qwen's is not.
        let tensor = plannings.last().and_then(|p| p.cut.tensors.first()).unwrap();
        assert!(tensor.contains(last), "{name}: {tensor}");
        assert_eq!(wanted[tensor].is_table, last == "wte", "{name}");
        let mut whole = module.clone();
        let f = module.main();
        let reads =
            |n: &Node| matches!(f.node(n.inputs[1]).op, Op::Param(p) if format!("{:?}", module.params[p.index()].recipe).contains(tensor));
        let last = f.nodes.iter().rfind(|n| matches!(n.op, Op::Mm { .. }) && reads(n)).unwrap();
        whole.main_mut().outputs = vec![last.inputs[0]];
        let read = |tensor: &str| {
            let tensors = codes.over(&model.weights);
            let (dtype, shape) = tensors.info(tensor).ok_or("no tensor")?;
            let data: Vec<f64> = if dtype.is_quantised() {
                tensors.codes(tensor, 0..shape[0]).unwrap().values()
            } else {
                let values = pack::floats(&Recipe::Source { tensor: tensor.into() }, 0..shape[0], &tensors).unwrap();
                values.into_iter().map(f64::from).collect()
            };
            Ok(Tensor { dtype, shape: shape.iter().map(|n| *n as usize).collect(), data })
        };
        for (chunk, found) in chunks.iter().zip(&found) {
            let column = |value: &dyn Fn(usize) -> i32| Tensor::i32(&[ROWS], &(0..ROWS).map(value).collect::<Vec<_>>());
            let inputs = [
                ("token", column(&|i| chunk[i] as i32)),
                ("slot", column(&|_| 0)),
                ("position", column(&|i| i as i32)),
                ("kv_index", column(&|i| i as i32)),
                ("segment", column(&|_| 0)),
                ("logit_row", Tensor::i32(&[1], &[0])),
            ];
            let outputs = Interp::from_checkpoint(&whole, read).run(&inputs).unwrap();
            let largest = outputs[0].data.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            assert_eq!(outputs[0].data.len(), found.len());
            for (at, (found, wanted)) in found.iter().zip(&outputs[0].data).enumerate() {
                assert!((f64::from(*found) - wanted).abs() < 2e-5 * largest, "{name} [{at}]: {found}, not {wanted}");
            }
        }
    }
}

#[test]
fn sides() {
    assert_eq!([1, 64, 65, 192, 512, 8192].map(side_of), [64, 64, 128, 256, 512, 512]);
}
