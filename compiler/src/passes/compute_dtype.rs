//! Makes the rounding of matmul inputs visible (`--compute`).
//!
//! ```text
//! compute = bf16:   %y = mm %x, @w      ->  %xb = convert %x : bf16;  %y = mm %xb, @w     (and @w converted in its recipe where it is wider)
//! compute = int8:   %y = mm %x, @w     ->  %xq = convert %x : q8g32;  %y = mm %xq, @w     where @w is quantised (q8g32: its groups)
//! compute = f32:    nothing: weights are widened exactly inside the kernel
//! ```
//! Accumulation is f32 in all (of exact sums over groups in int8). Quantised weights stay what they are. Run before merge-matmuls, cse
//! after it makes one conversion per value.

use super::rewrite::rewrite_all;
use super::{PassCx, PassError, quantise};
use rcompile_graph::{DType, Module, Op, Recipe, Type};

/// Runs the pass.
pub fn run(module: &mut Module, cx: &mut PassCx) -> Result<bool, PassError> {
    match cx.compute {
        Some(DType::BF16) => {}
        Some(DType::I8) => return int8(module),
        _ => return Ok(false),
    }
    let mut narrowed: Vec<Option<rcompile_graph::ParamId>> = vec![None; module.params.len()];
    let replaced = rewrite_all(module, "compute-dtype", |rw, f, id| {
        let node = f.node(id);
        let Op::Mm { rhs_t } = node.op else { return Ok(None) };
        let mut operands = Vec::new();
        for input in &node.inputs {
            let new = rw.map(*input);
            let ty = rw.node(new).ty.clone();
            operands.push(match rw.node(new).op {
                _ if ty.dtype == DType::BF16 || ty.dtype.is_quantised() => new,
                Op::Param(p) => {
                    let bf16 = Type::new(DType::BF16, ty.shape.iter().copied());
                    let known = narrowed.get(p.index()).copied().flatten();
                    let q = known.unwrap_or_else(|| {
                        let mut param = rw.module.params[p.index()].clone();
                        param.name.push_str(".bf16");
                        param.ty = bf16.clone();
                        param.recipe = Recipe::Convert { of: Box::new(param.recipe), dtype: DType::BF16 };
                        rw.module.params.push(param);
                        rcompile_graph::ParamId(rw.module.params.len() as u32 - 1)
                    });
                    if let Some(slot) = narrowed.get_mut(p.index()) {
                        *slot = Some(q);
                    }
                    rw.add(Op::Param(q), &[], Some(bf16))?
                }
                _ => {
                    let bf16 = Type::new(DType::BF16, ty.shape.iter().copied());
                    rw.add(Op::Convert, &[new], Some(bf16))?
                }
            });
        }
        if node.inputs.iter().zip(&operands).all(|(a, b)| rw.map(*a) == *b) {
            return Ok(None);
        }
        Ok(Some(rw.add(Op::Mm { rhs_t }, &operands, None)?))
    })?;
    Ok(replaced > 0)
}

/// Rows become codes where they meet codes.
fn int8(module: &mut Module) -> Result<bool, PassError> {
    let replaced = rewrite_all(module, "compute-dtype", |rw, f, id| {
        let node = f.node(id);
        let Op::Mm { rhs_t: true } = node.op else { return Ok(None) };
        let (x, w) = (rw.map(node.inputs[0]), rw.map(node.inputs[1]));
        let ty = rw.node(x).ty.clone();
        let Some(k) = ty.shape.last().and_then(|d| d.constant()).filter(|_| ty.dtype.is_float()) else { return Ok(None) };
        let Some(dtype) = quantise::row_type(rw.node(w).ty.dtype, k) else { return Ok(None) };
        let x = rw.add(Op::Convert, &[x], Some(Type::new(dtype, ty.shape.iter().copied())))?;
        Ok(Some(rw.add(Op::Mm { rhs_t: true }, &[x, w], None)?))
    })?;
    Ok(replaced > 0)
}
