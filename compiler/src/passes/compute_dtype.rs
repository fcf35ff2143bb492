//! Makes the rounding of matmul inputs visible (`--compute`).
//!
//! ```text
//! compute = bf16:   %y = mm %x, @w      ->  %xb = convert %x : bf16;  %y = mm %xb, @w     (and @w converted in its recipe where it is wider)
//! compute = int8:   %y = mm %x, @w     ->  %xq = convert %x : q8g32;  %y = mm %xq, @w     where @w is quantised (q8g32: its groups)
//!                                          %xb = convert %x : bf16;   %y = mm %xb, @w     where @w is bf16, if the CPU wants it
//! compute = f32:    nothing: weights are widened exactly inside the kernel
//! ```
//! Accumulation is f32 in all (of exact sums over groups in int8). Quantised weights stay what they are. Run before merge-matmuls, cse
//! after it makes one conversion per value.

use super::rewrite::rewrite_all;
use super::{Broken, MatmulInputs, PassCx, quantise};
use rcompile_graph::quant::row_type;
use rcompile_graph::{DType, Module, Op, Type};

/// Runs the pass.
pub fn run(module: &mut Module, cx: &mut PassCx) -> Result<bool, Broken> {
    match cx.inputs {
        MatmulInputs::F32 => Ok(false),
        MatmulInputs::Bf16 => bf16(module),
        MatmulInputs::Int8 { bf16_rows } => int8(module, bf16_rows),
    }
}

/// Rows and weights become bf16.
fn bf16(module: &mut Module) -> Result<bool, Broken> {
    let mut narrowed: Vec<Option<rcompile_graph::ParamId>> = vec![None; module.params.len()];
    let replaced = rewrite_all(module, |rw, f, id| {
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
                        rw.module.params.push(quantise::converted(&rw.module.params[p.index()], DType::BF16));
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

/// Rows become codes where they meet codes; where they meet weights of bf16 they become bf16 if that is faster.
fn int8(module: &mut Module, bf16_rows: bool) -> Result<bool, Broken> {
    let replaced = rewrite_all(module, |rw, f, id| {
        let node = f.node(id);
        let Op::Mm { rhs_t: true } = node.op else { return Ok(None) };
        let (x, w) = (rw.map(node.inputs[0]), rw.map(node.inputs[1]));
        let ty = rw.node(x).ty.clone();
        let Some(k) = ty.shape.last().and_then(|d| d.constant()).filter(|_| ty.dtype.is_float()) else { return Ok(None) };
        let weight = rw.node(w);
        let is_bf16 = weight.ty.dtype == DType::BF16 && matches!(weight.op, Op::Param(_));
        let dtype = match row_type(weight.ty.dtype, k) {
            Some(codes) => codes,
            None if bf16_rows && is_bf16 && ty.dtype != DType::BF16 => DType::BF16,
            None => return Ok(None),
        };
        let x = rw.add(Op::Convert, &[x], Some(Type::new(dtype, ty.shape.iter().copied())))?;
        Ok(Some(rw.add(Op::Mm { rhs_t: true }, &[x, w], None)?))
    })?;
    Ok(replaced > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRAPH: &str = "module {
  symbol T<=4
  param @embed : f32[96, 64] = source \"embed\"
  param @codes : q4g32[64, 64] = convert(source \"codes\", q4g32)
  param @half : bf16[64, 64] = source \"half\"
  param @whole : f32[64, 64] = source \"whole\"
  param @rounded : f16[64, 64] = convert(source \"rounded\", f16)
  func @step(%token: i32[T]) {
    %token = input
    %e = param @embed : f32[96, 64]
    %x = embedding %e, %token : f32[T, 64]
    %c = param @codes : q4g32[64, 64]
    %a = mm %x, %c {rhs_t} : f32[T, 64]
    %h = param @half : bf16[64, 64]
    %b = mm %a, %h {rhs_t} : f32[T, 64]
    %w = param @whole : f32[64, 64]
    %d = mm %b, %w {rhs_t} : f32[T, 64]
    %r = param @rounded : f16[64, 64]
    %f = mm %d, %r {rhs_t} : f32[T, 64]
    return %f
  }
  main @step
}
";

    /// Types of the operands of each product, in order.
    fn products(inputs: MatmulInputs) -> (Vec<[String; 2]>, String) {
        let mut module = rcompile_graph::parse(GRAPH).unwrap_or_else(|e| panic!("{e}"));
        run(&mut module, &mut PassCx { inputs, ..PassCx::default() }).unwrap();
        rcompile_graph::verify(&module).unwrap();
        let f = module.main();
        let mms = f.ids().filter(|id| matches!(f.node(*id).op, Op::Mm { .. }));
        let types = mms.map(|id| [0, 1].map(|i| f.ty(f.node(id).inputs[i]).dtype.to_string())).collect();
        (types, rcompile_graph::print(&module))
    }

    #[test]
    fn rows_meet_weights_of_bf16_as_the_cpu_wants_it() {
        for (bf16_rows, rows) in [(true, "bf16"), (false, "f32")] {
            let (types, text) = products(MatmulInputs::Int8 { bf16_rows });
            assert_eq!(types, [["q8g32", "q4g32"], [rows, "bf16"], ["f32", "f32"], ["f32", "f16"]], "{text}");
        }
    }

    #[test]
    fn weights_become_bf16_once() {
        let (types, text) = products(MatmulInputs::Bf16);
        assert_eq!(types, [["bf16", "q4g32"], ["bf16", "bf16"], ["bf16", "bf16"], ["bf16", "bf16"]], "{text}");
        assert!(text.contains("convert(source \"rounded\", bf16)"), "{text}");
    }
}
