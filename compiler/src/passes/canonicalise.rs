//! One spelling for each thing, so that later passes match one pattern.
//!
//! ```text
//! %b = reshape %a : (same shape)          ->  %a            (likewise convert, expand, full slice, identity permute, cat of one)
//! %c = reshape (reshape %a)               ->  reshape %a
//! %d = mul 2.0, %x                        ->  mul %x, 2.0   (constants right; also for params beside values)
//! %e = mul (sigmoid %x), %x               ->  silu %x
//! ```
//! Needs nothing; promises the above to the fusion passes.

use super::rewrite::rewrite_all;
use super::{Broken, PassCx};
use rcompile_graph::{Binary, Function, Module, Op, Unary, ValueId};

/// Runs the pass.
pub fn run(module: &mut Module, _cx: &mut PassCx) -> Result<bool, Broken> {
    let replaced = rewrite_all(module, |rw, f, id| {
        let node = f.node(id);
        let input = |i: usize| node.inputs[i];
        match &node.op {
            Op::Reshape | Op::Convert | Op::Expand if f.ty(input(0)) == &node.ty => Ok(Some(rw.map(input(0)))),
            Op::Slice { .. } if f.ty(input(0)) == &node.ty => Ok(Some(rw.map(input(0)))),
            Op::Permute { perm } if perm.iter().enumerate().all(|(i, p)| i == *p as usize) => Ok(Some(rw.map(input(0)))),
            Op::Cat { .. } if node.inputs.len() == 1 => Ok(Some(rw.map(input(0)))),
            Op::Reshape if matches!(f.node(input(0)).op, Op::Reshape) => {
                let inner = rw.map(f.node(input(0)).inputs[0]);
                if rw.node(inner).ty == node.ty {
                    return Ok(Some(inner));
                }
                Ok(Some(rw.add(Op::Reshape, &[inner], Some(node.ty.clone()))?))
            }
            Op::Binary(op @ (Binary::Add | Binary::Mul)) if rank(f, input(0)) > rank(f, input(1)) => {
                Ok(Some(rw.add(Op::Binary(*op), &[rw.map(input(1)), rw.map(input(0))], None)?))
            }
            Op::Binary(Binary::Mul) => {
                let silu = |a: ValueId, b: ValueId| matches!(f.node(a).op, Op::Unary(Unary::Sigmoid)) && f.node(a).inputs[0] == b;
                let x = if silu(input(0), input(1)) {
                    input(1)
                } else if silu(input(1), input(0)) {
                    input(0)
                } else {
                    return Ok(None);
                };
                Ok(Some(rw.add(Op::Unary(Unary::Silu), &[rw.map(x)], None)?))
            }
            _ => Ok(None),
        }
    })?;
    Ok(replaced > 0)
}

/// Operands of commutative ops are ordered: values, then params, then constants.
fn rank(f: &Function, id: ValueId) -> u8 {
    match f.node(id).op {
        Op::Const(_) => 2,
        Op::Param(_) => 1,
        _ => 0,
    }
}
