//! Recognises layer norm in its raw form.
//!
//! ```text
//! %m = mean %x; %c = sub %x, %m; %v = mean (mul %c, %c); %r = rsqrt (add %v, eps); %y = add (mul (mul %c, %r), @w), @b
//! ->  %y = layer_norm %x, @w, @b {eps}
//! ```
//! The fused op rounds once. Needs fold-const and canonicalise.

use super::rewrite::{binary, constant, is_eps, rewrite_all};
use super::{Broken, PassCx};
use rcompile_graph::{Binary, Function, Module, Op, Reduce, Unary, ValueId};

/// Runs the pass.
pub fn run(module: &mut Module, cx: &mut PassCx) -> Result<bool, Broken> {
    let replaced = rewrite_all(module, |rw, f, id| match matches(f, id) {
        Ok(Some((x, w, b, eps))) => Ok(Some(rw.add(Op::LayerNorm { eps }, &[rw.map(x), rw.map(w), rw.map(b)], None)?)),
        Ok(None) => Ok(None),
        Err(reason) => {
            cx.note(&f.node(id).origin, reason);
            Ok(None)
        }
    })?;
    Ok(replaced > 0)
}

/// `(x, w, b, eps)` if the node ends the pattern; an error says why something close to it, a centred value with scale and bias, does not
/// match.
fn matches(f: &Function, id: ValueId) -> Result<Option<(ValueId, ValueId, ValueId, f64)>, &'static str> {
    let Some((scaled, b)) = binary(f, id, Binary::Add) else { return Ok(None) };
    let Some((normed, w)) = binary(f, scaled, Binary::Mul) else { return Ok(None) };
    let Some((c, r)) = binary(f, normed, Binary::Mul) else { return Ok(None) };
    let Some((x, m)) = binary(f, c, Binary::Sub) else { return Ok(None) };
    if f.node(r).op != Op::Unary(Unary::Rsqrt) {
        return Ok(None);
    }
    let mean_of_last = |id: ValueId| match f.node(id).op {
        Op::Reduce { op: Reduce::Mean, axis } if axis as usize + 1 == f.ty(id).rank() => Some(f.node(id).inputs[0]),
        _ => None,
    };
    let Some((v, eps)) = binary(f, f.node(r).inputs[0], Binary::Add) else { return Err("rsqrt of something that is not variance + eps") };
    let Some(square) = mean_of_last(v) else { return Err("no mean of the last axis under the root") };
    if binary(f, square, Binary::Mul) != Some((c, c)) {
        return Err("the variance is of another value than what is scaled");
    }
    if mean_of_last(m) != Some(x) {
        return Err("centred by something else than its mean over the last axis");
    }
    let Some(eps) = constant(f, eps) else { return Err("eps is not a literal") };
    if !is_eps(eps) {
        return Err("eps is negative or not finite");
    }
    let last = &f.ty(x).shape[f.ty(x).rank() - 1..];
    if f.ty(w).shape != *last || f.ty(b).shape != *last {
        return Err("weight or bias does not span the last axis");
    }
    Ok(Some((x, w, b, eps)))
}
