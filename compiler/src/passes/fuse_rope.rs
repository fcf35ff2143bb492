//! Recognises rotary embeddings in the form that architecture code writes.
//!
//! ```text
//! %a = slice %x {axis=2, 0..h};  %b = slice %x {axis=2, h..2h};  (%rest = slice %x {axis=2, 2h..d})
//! %p = sub (mul %a, %c), (mul %b, %s);  %q = add (mul %b, %c), (mul %a, %s);  %y = cat %p, %q (, %rest) {axis=2}
//! ->  %y = rope %x, %cos, %sin          where %c = reshape %cos : [T, 1, h], %s = reshape %sin
//! ```
//! Needs cse (one name per value); the planner then rotates head-wise inside the projection's kernel.

use super::rewrite::{binary, rewrite_all};
use super::{Broken, PassCx};
use rcompile_graph::{Binary, DType, Dim, Function, Module, Op, ValueId};

/// Runs the pass.
pub fn run(module: &mut Module, cx: &mut PassCx) -> Result<bool, Broken> {
    let replaced = rewrite_all(module, |rw, f, id| match matches(f, id) {
        Ok(Some((x, cos, sin))) => Ok(Some(rw.add(Op::Rope, &[rw.map(x), rw.map(cos), rw.map(sin)], None)?)),
        Ok(None) => Ok(None),
        Err(reason) => {
            cx.note(&f.node(id).origin, reason);
            Ok(None)
        }
    })?;
    Ok(replaced > 0)
}

fn matches(f: &Function, id: ValueId) -> Result<Option<(ValueId, ValueId, ValueId)>, &'static str> {
    let node = f.node(id);
    if node.op != (Op::Cat { axis: 2 }) || !(2..=3).contains(&node.inputs.len()) || node.ty.rank() != 3 {
        return Ok(None);
    }
    let Some((ac, bs)) = binary(f, node.inputs[0], Binary::Sub) else { return Ok(None) };
    let Some((bc, a_s)) = binary(f, node.inputs[1], Binary::Add) else { return Ok(None) };
    let products = (binary(f, ac, Binary::Mul), binary(f, bs, Binary::Mul), binary(f, bc, Binary::Mul), binary(f, a_s, Binary::Mul));
    let (Some((a, c)), Some((b, s)), Some((b2, c2)), Some((a2, s2))) = products else { return Err("halves are not products") };
    if (a, b, c, s) != (a2, b2, c2, s2) {
        return Err("the two halves use different values");
    }
    let (x, half) = match (slice(f, a), slice(f, b)) {
        (Some((x, 0, h)), Some((y, start, end))) if x == y && start == h && end == 2 * h => (x, h),
        _ => return Err("halves are not neighbours of one value"),
    };
    let full = f.ty(x).shape[2];
    match node.inputs.get(2) {
        Some(rest) if slice(f, *rest).map(|(y, s, e)| (y, s, Dim::Const(e))) != Some((x, 2 * half, full)) => {
            return Err("third part is not the rest of the head");
        }
        None if full != Dim::Const(2 * half) => return Err("rest of the head is dropped"),
        _ => {}
    }
    let (Op::Reshape, Op::Reshape) = (&f.node(c).op, &f.node(s).op) else { return Err("tables are not reshaped rows") };
    let (cos, sin) = (f.node(c).inputs[0], f.node(s).inputs[0]);
    let rows = f.ty(x).shape[0];
    let half = Dim::Const(half);
    // A table of one row for all would broadcast; the op wants a row for each.
    let shapes = f.ty(cos).shape == [rows, half] && f.ty(c).shape == [rows, Dim::Const(1), half];
    if !shapes || f.ty(cos) != f.ty(sin) || f.ty(c) != f.ty(s) {
        return Err("tables are not [T, 1, half]");
    }
    if f.ty(cos).dtype != DType::F32 {
        return Err("tables are not f32");
    }
    Ok(Some((x, cos, sin)))
}

fn slice(f: &Function, id: ValueId) -> Option<(ValueId, u64, u64)> {
    match f.node(id).op {
        Op::Slice { axis: 2, start, end } => Some((f.node(id).inputs[0], start, end)),
        _ => None,
    }
}
