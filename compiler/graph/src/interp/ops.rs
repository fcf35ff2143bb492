//! The formulas of ops: each of its operands' elements in f64.
//!
//! In: an op, operands and the shape of its value. Out: the value's elements, not yet rounded; or why there are none.

use super::Tensor;
use crate::ops::{Binary, Compare, Op, Pool, Reduce, Unary};
use crate::quant;
use crate::tensor::{convert, wrap};
use crate::types::DType;

/// Strides of `shape` walked along `out` (numpy broadcasting: 0 where it is stretched).
fn stretched(out: &[usize], shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; out.len()];
    let mut stride = 1;
    for (axis, extent) in shape.iter().enumerate().rev() {
        strides[axis + out.len() - shape.len()] = if *extent == 1 { 0 } else { stride };
        stride *= extent;
    }
    strides
}

/// Calls `visit` for every index of `shape` in row-major order with the offsets that the strides give.
fn walk<const N: usize>(shape: &[usize], strides: [&[usize]; N], mut visit: impl FnMut([usize; N])) {
    let mut index = vec![0; shape.len()];
    let mut offset = [0; N];
    for _ in 0..shape.iter().product::<usize>() {
        visit(offset);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            for (o, s) in offset.iter_mut().zip(strides) {
                *o += s[axis];
            }
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
            for (o, s) in offset.iter_mut().zip(strides) {
                *o -= s[axis] * shape[axis];
            }
        }
    }
}

fn elementwise(a: &Tensor, b: &Tensor, shape: &[usize], mut f: impl FnMut(f64, f64) -> f64) -> Vec<f64> {
    let mut out = Vec::with_capacity(shape.iter().product());
    let strides = [&stretched(shape, &a.shape)[..], &stretched(shape, &b.shape)[..]];
    walk(shape, strides, |[i, j]| out.push(f(a.data[i], b.data[j])));
    out
}

/// Everything but states: unrounded result of an op in row-major order.
pub(super) fn evaluate(op: &Op, dtype: DType, operands: &[&Tensor], shape: &[usize]) -> Result<Vec<f64>, String> {
    let first = operands.first().copied();
    let x = || first.expect("the op has an operand");
    Ok(match op {
        Op::Const(value) => vec![*value],
        Op::Unary(u) => x().data.iter().map(|v| unary(*u, *v)).collect(),
        Op::Binary(b) if dtype.is_int() => {
            let mut zero = false;
            let out = elementwise(x(), operands[1], shape, |p, q| {
                zero |= *b == Binary::Div && q == 0.0;
                wrap(dtype, binary_int(*b, p as i64, q as i64))
            });
            if zero { return Err("integer division by zero".into()) } else { out }
        }
        Op::Binary(b) => elementwise(x(), operands[1], shape, |p, q| binary(*b, p, q)),
        Op::Compare(c) => elementwise(x(), operands[1], shape, |p, q| f64::from(u8::from(compare(*c, p, q)))),
        Op::Where => {
            let (a, b) = (operands[1], operands[2]);
            let strides = [&stretched(shape, &x().shape)[..], &stretched(shape, &a.shape)[..], &stretched(shape, &b.shape)[..]];
            let mut out = Vec::with_capacity(shape.iter().product());
            walk(shape, strides, |[c, i, j]| out.push(if x().data[c] != 0.0 { a.data[i] } else { b.data[j] }));
            out
        }
        Op::Convert if dtype.is_quantised() => quant::quantise(dtype, x()),
        Op::Convert => x().data.iter().map(|v| convert(x().dtype, dtype, *v)).collect(),
        Op::Reshape => x().data.clone(),
        Op::Permute { perm } => {
            let natural = strides_of(&x().shape);
            let strides: Vec<usize> = perm.iter().map(|p| natural[*p as usize]).collect();
            gather(x(), shape, &strides, 0)
        }
        Op::Slice { axis, start, .. } => {
            let natural = strides_of(&x().shape);
            gather(x(), shape, &natural, *start as usize * natural[*axis as usize])
        }
        Op::Cat { axis } => {
            let axis = *axis as usize;
            let outer: usize = shape[..axis].iter().product();
            let mut out = Vec::with_capacity(shape.iter().product());
            for o in 0..outer {
                for t in operands {
                    let inner: usize = t.shape[axis..].iter().product();
                    out.extend_from_slice(&t.data[o * inner..(o + 1) * inner]);
                }
            }
            out
        }
        Op::Expand => gather(x(), shape, &stretched(shape, &x().shape), 0),
        Op::Embedding => {
            let rows = x().shape[0];
            let width: usize = x().shape[1..].iter().product();
            let mut out = Vec::with_capacity(shape.iter().product());
            for id in &operands[1].data {
                if *id < 0.0 || *id >= rows as f64 {
                    return Err(format!("id {id} is not in a table of {rows} rows"));
                }
                out.extend_from_slice(&x().data[*id as usize * width..][..width]);
            }
            out
        }
        Op::IndexSelect => {
            let (width, index) = (last(x()), &operands[1].data);
            if let Some(id) = index.iter().find(|i| **i < 0.0 || **i >= width as f64) {
                return Err(format!("index {id} is not in an axis of {width}"));
            }
            x().data.chunks(width).flat_map(|row| index.iter().map(|i| row[*i as usize])).collect()
        }
        Op::Mm { rhs_t } => mm(x(), operands[1], *rhs_t),
        Op::Reduce { op, axis } => reduce(*op, x(), *axis as usize),
        Op::Softmax => {
            let mut out = x().data.clone();
            out.chunks_mut(last(x())).for_each(softmax);
            out
        }
        Op::RmsNorm { eps } => {
            let (d, w) = (last(x()), &operands[1].data);
            let mut out = Vec::with_capacity(x().data.len());
            for row in x().data.chunks(d) {
                let mean = row.iter().map(|v| v * v).sum::<f64>() / d as f64;
                let factor = 1.0 / (mean + eps).sqrt();
                out.extend(row.iter().zip(w).map(|(v, w)| v * factor * w));
            }
            out
        }
        Op::LayerNorm { eps } => {
            let (d, w, b) = (last(x()), &operands[1].data, &operands[2].data);
            let mut out = Vec::with_capacity(x().data.len());
            for row in x().data.chunks(d) {
                let mean = row.iter().sum::<f64>() / d as f64;
                let variance = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / d as f64;
                let factor = 1.0 / (variance + eps).sqrt();
                out.extend(row.iter().zip(w).zip(b).map(|((v, w), b)| (v - mean) * factor * w + b));
            }
            out
        }
        Op::Rope => rope(x(), operands[1], operands[2]),
        Op::Pool(pool) => self::pool(*pool, x(), operands[1]),
        Op::Input { .. } | Op::Param(_) | Op::Call { .. } | Op::KvAppend { .. } | Op::Sdpa { .. } => {
            unreachable!("{} is evaluated by the caller", op.name())
        }
    })
}

/// Extent of the last axis, at least 1 so that an empty tensor has no rows.
fn last(x: &Tensor) -> usize {
    x.shape.last().copied().unwrap_or(1).max(1)
}

fn strides_of(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

fn gather(x: &Tensor, shape: &[usize], strides: &[usize], start: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(shape.iter().product());
    walk(shape, [strides], |[i]| out.push(x.data[start + i]));
    out
}

pub(super) fn unary(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Exp => libm::exp(x),
        Unary::Log => libm::log(x),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Tanh => libm::tanh(x),
        Unary::Erf => libm::erf(x),
        Unary::Sigmoid => sigmoid(x),
        Unary::Silu => x * sigmoid(x),
        Unary::Relu => binary(Binary::Maximum, x, 0.0),
        Unary::Gelu => x * 0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Unary::GeluTanh => 0.5 * x * (1.0 + libm::tanh((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x))),
        Unary::Not => f64::from(u8::from(x == 0.0)),
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

pub(super) fn binary(op: Binary, a: f64, b: f64) -> f64 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Minimum | Binary::Maximum if a.is_nan() || b.is_nan() => f64::NAN,
        Binary::Minimum => a.min(b),
        Binary::Maximum => a.max(b),
        Binary::And => f64::from(u8::from(a != 0.0 && b != 0.0)),
        Binary::Or => f64::from(u8::from(a != 0.0 || b != 0.0)),
    }
}

fn binary_int(op: Binary, a: i64, b: i64) -> i64 {
    match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::Div => a.wrapping_div(if b == 0 { 1 } else { b }),
        Binary::Minimum => a.min(b),
        Binary::Maximum => a.max(b),
        Binary::And => a & b,
        Binary::Or => a | b,
    }
}

pub(super) fn compare(op: Compare, a: f64, b: f64) -> bool {
    match op {
        Compare::Lt => a < b,
        Compare::Le => a <= b,
        Compare::Gt => a > b,
        Compare::Ge => a >= b,
        Compare::Eq => a == b,
        Compare::Ne => a != b,
    }
}

/// In place; `-inf` everywhere gives NaN.
fn softmax(row: &mut [f64]) {
    let sum = exponentials(row);
    row.iter_mut().for_each(|v| *v /= sum);
}

/// `exp(x - max)` of each; returns their sum.
pub(super) fn exponentials(row: &mut [f64]) -> f64 {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter_mut().for_each(|v| *v = libm::exp(*v - max));
    row.iter().sum()
}

/// Each element is one sum in order of k; four columns side by side only hide the latency of the adds.
fn mm(a: &Tensor, b: &Tensor, rhs_t: bool) -> Vec<f64> {
    let (m, k) = (a.shape[0], a.shape[1]);
    let n = if rhs_t { b.shape[0] } else { b.shape[1] };
    let mut out = vec![0.0; m * n];
    if k == 0 || n == 0 {
        return out;
    }
    if !rhs_t {
        for (row, out_row) in a.data.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
            for (x, b_row) in row.iter().zip(b.data.chunks_exact(n)) {
                for (o, y) in out_row.iter_mut().zip(b_row) {
                    *o += x * y;
                }
            }
        }
        return out;
    }
    let mut j = 0;
    while j + 4 <= n {
        let w = |c: usize| &b.data[(j + c) * k..(j + c + 1) * k];
        let (w0, w1, w2, w3) = (w(0), w(1), w(2), w(3));
        for (i, row) in a.data.chunks_exact(k).enumerate() {
            let mut sum = [0.0f64; 4];
            for ((((x, y0), y1), y2), y3) in row.iter().zip(w0).zip(w1).zip(w2).zip(w3) {
                sum[0] += x * y0;
                sum[1] += x * y1;
                sum[2] += x * y2;
                sum[3] += x * y3;
            }
            out[i * n + j..][..4].copy_from_slice(&sum);
        }
        j += 4;
    }
    for c in j..n {
        for (i, row) in a.data.chunks_exact(k).enumerate() {
            out[i * n + c] = dot(row, &b.data[c * k..(c + 1) * k]);
        }
    }
    out
}

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sum = 0.0;
    for (x, y) in a.iter().zip(b) {
        sum += x * y;
    }
    sum
}

fn reduce(op: Reduce, x: &Tensor, axis: usize) -> Vec<f64> {
    let outer: usize = x.shape[..axis].iter().product();
    let count = x.shape[axis];
    let inner: usize = x.shape[axis + 1..].iter().product();
    let start = if op == Reduce::Amax { f64::NEG_INFINITY } else { 0.0 };
    let mut out = vec![start; outer * inner];
    for o in 0..outer {
        let into = &mut out[o * inner..(o + 1) * inner];
        for c in 0..count {
            for (acc, v) in into.iter_mut().zip(&x.data[(o * count + c) * inner..]) {
                *acc = binary(if op == Reduce::Amax { Binary::Maximum } else { Binary::Add }, *acc, *v);
            }
        }
        if op == Reduce::Mean {
            into.iter_mut().for_each(|v| *v /= count as f64);
        }
    }
    out
}

fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Vec<f64> {
    let (heads, d, half) = (x.shape[1], x.shape[2], cos.shape[1]);
    let mut out = x.data.clone();
    for t in 0..x.shape[0] {
        let (c, s) = (&cos.data[t * half..][..half], &sin.data[t * half..][..half]);
        for h in 0..heads {
            let head = &mut out[(t * heads + h) * d..][..d];
            for i in 0..half {
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * c[i] - b * s[i];
                head[i + half] = b * c[i] + a * s[i];
            }
        }
    }
    out
}

/// Maximal groups of consecutive rows with one slot.
pub(super) fn runs(slots: &[f64]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (row, slot) in slots.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if slots[run.start] == *slot => run.end = row + 1,
            _ => runs.push(row..row + 1),
        }
    }
    runs
}

fn pool(op: Pool, x: &Tensor, slot: &Tensor) -> Vec<f64> {
    let d = x.shape[1];
    let mut out = Vec::new();
    for run in runs(&slot.data) {
        let rows = &x.data[run.start * d..run.end * d];
        match op {
            Pool::Cls => out.extend_from_slice(&rows[..d]),
            Pool::Last => out.extend_from_slice(&rows[rows.len() - d..]),
            Pool::Mean | Pool::Max => {
                let part = Tensor { dtype: x.dtype, shape: vec![run.len(), d], data: rows.to_vec() };
                out.extend(reduce(if op == Pool::Mean { Reduce::Mean } else { Reduce::Amax }, &part, 0));
            }
        }
    }
    out
}
