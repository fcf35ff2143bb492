//! Recognises layer norm in its raw form.
//!
//! ```text
//! %m = mean %x; %c = sub %x, %m; %v = mean (mul %c, %c); %r = rsqrt (add %v, eps); %y = add (mul (mul %c, %r), @w), @b
//! ->  %y = layer_norm %x, @w, @b {eps}
//! ```
//! The fused op rounds once. Needs fold-const and canonicalise.

use super::rewrite::{binary, constant, is_eps, rewrite_all};
use super::{PassCx, PassError};
use rcompile_graph::{Binary, Function, Module, Op, Reduce, Unary, ValueId};

/// Runs the pass.
pub fn run(module: &mut Module, _cx: &mut PassCx) -> Result<bool, PassError> {
    let replaced = rewrite_all(module, "fuse-layer-norm", |rw, f, id| match matches(f, id) {
        Some((x, w, b, eps)) => Ok(Some(rw.add(Op::LayerNorm { eps }, &[rw.map(x), rw.map(w), rw.map(b)], None)?)),
        None => Ok(None),
    })?;
    Ok(replaced > 0)
}

fn matches(f: &Function, id: ValueId) -> Option<(ValueId, ValueId, ValueId, f64)> {
    let mean = |id: ValueId| match f.node(id).op {
        Op::Reduce { op: Reduce::Mean, axis } if axis as usize + 1 == f.ty(id).rank() => Some(f.node(id).inputs[0]),
        _ => None,
    };
    let (scaled, b) = binary(f, id, Binary::Add)?;
    let (normed, w) = binary(f, scaled, Binary::Mul)?;
    let (c, r) = binary(f, normed, Binary::Mul)?;
    if f.node(r).op != Op::Unary(Unary::Rsqrt) {
        return None;
    }
    let (v, eps) = binary(f, f.node(r).inputs[0], Binary::Add)?;
    let eps = constant(f, eps).filter(|eps| is_eps(*eps))?;
    if binary(f, mean(v)?, Binary::Mul)? != (c, c) {
        return None;
    }
    let (x, m) = binary(f, c, Binary::Sub)?;
    let last = f.ty(x).shape.last()?;
    let spans = |p: ValueId| f.ty(p).shape == [*last];
    (mean(m)? == x && spans(w) && spans(b)).then_some((x, w, b, eps))
}
