//! Constant folding on scalars, with the rounding that the op would have had.
//!
//! ```text
//! %a = const 3.0; %b = const 4.0; %c = mul %a, %b   ->  %c = const 12.0
//! %d = mul %x, 1.0                                  ->  %x
//! ```
//! `x + 0` stays: it turns -0 into +0. Needs canonicalise (constants right).

use super::rewrite::{constant, rewrite_all};
use super::{Broken, PassCx};
use rcompile_graph::tensor::round;
use rcompile_graph::{Binary, DType, Module, Op, Unary};

/// Runs the pass.
pub fn run(module: &mut Module, _cx: &mut PassCx) -> Result<bool, Broken> {
    let replaced = rewrite_all(module, |rw, f, id| {
        let node = f.node(id);
        let operands: Vec<Option<f64>> = node.inputs.iter().map(|i| constant(f, *i).map(|value| round(f.ty(*i).dtype, value))).collect();
        let value = match (&node.op, &operands[..]) {
            (Op::Binary(Binary::Mul | Binary::Div), [None, Some(1.0)]) if f.ty(node.inputs[0]) == &node.ty => {
                return Ok(Some(rw.map(node.inputs[0])));
            }
            (Op::Binary(op), [Some(a), Some(b)]) => match op {
                Binary::Add => a + b,
                Binary::Sub => a - b,
                Binary::Mul => a * b,
                Binary::Div => a / b,
                Binary::Minimum | Binary::Maximum if a.is_nan() || b.is_nan() => f64::NAN,
                Binary::Minimum => a.min(*b),
                Binary::Maximum => a.max(*b),
                Binary::And | Binary::Or => return Ok(None),
            },
            (Op::Unary(op), [Some(a)]) => match op {
                Unary::Neg => -a,
                Unary::Abs => a.abs(),
                Unary::Sqrt => a.sqrt(),
                Unary::Rsqrt => 1.0 / a.sqrt(),
                _ => return Ok(None),
            },
            _ => return Ok(None),
        };
        if node.ty.dtype != DType::F32 || node.ty.rank() != 0 {
            return Ok(None);
        }
        Ok(Some(rw.add(Op::Const(round(DType::F32, value)), &[], Some(node.ty.clone()))?))
    })?;
    Ok(replaced > 0)
}
