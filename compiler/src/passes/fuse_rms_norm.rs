//! Recognises RMS norm in its raw form.
//!
//! ```text
//! %sq = mul %x, %x;  %m = mean %sq {axis=last};  %e = add %m, eps;  %r = rsqrt %e;  %n = mul %x, %r;  %y = mul %n, @w
//! ->  %y = rms_norm %x, @w {eps}
//! ```
//! The fused op rounds once where the raw form rounds after each step. Needs fold-const (eps a literal) and canonicalise (params right).

use super::rewrite::{binary, constant, is_eps, rewrite_all};
use super::{Broken, PassCx};
use rcompile_graph::{Binary, Function, Module, Op, Reduce, Unary, ValueId};

/// Runs the pass.
pub fn run(module: &mut Module, cx: &mut PassCx) -> Result<bool, Broken> {
    let replaced = rewrite_all(module, |rw, f, id| match matches(f, id) {
        Ok(Some((x, w, eps))) => Ok(Some(rw.add(Op::RmsNorm { eps }, &[rw.map(x), rw.map(w)], None)?)),
        Ok(None) => Ok(None),
        Err(reason) => {
            cx.note(&f.node(id).origin, reason);
            Ok(None)
        }
    })?;
    Ok(replaced > 0)
}

/// `(x, w, eps)` if the node ends the pattern; an error says why something close to it does not match.
fn matches(f: &Function, id: ValueId) -> Result<Option<(ValueId, ValueId, f64)>, &'static str> {
    let Some((normed, w)) = binary(f, id, Binary::Mul) else { return Ok(None) };
    let Some((x, r)) = binary(f, normed, Binary::Mul) else { return Ok(None) };
    let Some(e) = unary(f, r, Unary::Rsqrt) else { return Ok(None) };
    let Some((mean, eps)) = binary(f, e, Binary::Add) else { return Err("rsqrt of something that is not mean + eps") };
    let Op::Reduce { op: Reduce::Mean, axis } = f.node(mean).op else { return Err("no mean under the root") };
    if axis as usize + 1 != f.ty(x).rank() {
        return Err("mean is not over the last axis");
    }
    if binary(f, f.node(mean).inputs[0], Binary::Mul) != Some((x, x)) {
        return Err("mean is not of x * x");
    }
    let Some(eps) = constant(f, eps) else { return Err("eps is not a literal") };
    if !is_eps(eps) {
        return Err("eps is negative or not finite");
    }
    if f.ty(w).shape != f.ty(x).shape[axis as usize..] {
        return Err("weight does not span the last axis");
    }
    Ok(Some((x, w, eps)))
}

fn unary(f: &Function, id: ValueId, op: Unary) -> Option<ValueId> {
    let node = f.node(id);
    (node.op == Op::Unary(op)).then(|| node.inputs[0])
}
