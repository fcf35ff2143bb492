//! Panels of weights: the layout that a matmul wants, and where an element lies in it for lookups, which read the same bytes.

use super::PlanError;
use super::frame::storage;
use super::kernel::KernelBuilder;
use rcompile_codegen::isa::Isa;
use rcompile_codegen::program::{BinaryOp, CmpOp, Coding, Compute, DType, Expr, ExprId, Panels, Place, UnaryOp, WeightId};
use rcompile_graph as g;
use rcompile_graph::quant::{group_of, row_type};

/// Storage type of a weight: of codes what the CPU multiplies, of four bits a byte of two.
pub fn weight_storage(isa: &Isa, dtype: g::DType) -> Option<DType> {
    match dtype {
        g::DType::Q8(_) | g::DType::Z8(_) => Some(isa.code_type()),
        g::DType::Q4(_) | g::DType::Z4(_) => Some(DType::U8),
        _ => storage(dtype),
    }
}

/// Arithmetic of a matmul of values of type `x` and a weight of type `weight`, and the weight's panels for it: `groups` of `group_cols`
/// columns, `ways` of them alternating, `k` deep. Errors: types that are never stored.
pub fn panels(
    isa: &Isa,
    (x, weight): (g::DType, g::DType),
    k: u32,
    (groups, group_cols, ways): (u32, u32, u32),
) -> Result<(Compute, Panels), PlanError> {
    // Rows that meet a weight with one scale per row are converted in groups of their own.
    let group = row_type(weight, k.into()).and_then(group_of).map_or(0, |g| g.len(0) as u32);
    let zeros = weight.has_zeros();
    let coding = match weight {
        g::DType::Q8(g::Group::Row) => Coding::Int8 { group },
        g::DType::Q8(_) | g::DType::Z8(_) => Coding::Int8Groups { group, zeros },
        g::DType::Q4(_) | g::DType::Z4(_) => Coding::Int4 { group, zeros },
        _ => Coding::Elements,
    };
    let stored = |stored: Option<DType>, dtype| stored.ok_or_else(|| PlanError::Unsupported(format!("a matmul of type {dtype}")));
    let weight_stored = stored(weight_storage(isa, weight), weight)?;
    let compute = match (x.is_quantised(), weight.is_quantised()) {
        (false, false) => isa.matmul(stored(storage(x), x)?, weight_stored, k),
        // Codes of rows meet codes of weights.
        (true, _) => isa.matmul_of_codes(coding),
        (false, true) => Compute::F32,
    };
    let k_pack = compute.k_pack(weight_stored, coding);
    Ok((compute, Panels { nr: isa.panel_nr(), k_pack, k, groups, group_cols, ways, coding }))
}

/// Panel and column within it of a row of a weight (an output column).
fn panel_of(k: &mut KernelBuilder, p: &Panels, row: ExprId) -> (ExprId, ExprId) {
    let (group, within) = k.div_rem(row, i64::from(p.group_cols));
    let (panel, lane) = k.div_rem(within, i64::from(p.nr));
    let base = k.mul_int(group, i64::from(p.panels_per_group()));
    (k.add(base, panel), lane)
}

/// `w[row, col]` of coded panels: `(code - offset) * scale`, or a zero point in the place of the offset.
pub fn coded(k: &mut KernelBuilder, (weight, dtype): (WeightId, DType), p: &Panels, row: ExprId, col: ExprId) -> ExprId {
    let (panel, lane) = panel_of(k, p, row);
    let panel = k.mul_int(panel, p.panel_bytes(dtype) as i64);
    let sum = |k: &mut KernelBuilder, terms: &[(ExprId, i64)]| {
        terms.iter().fold(panel, |sum, (e, factor)| {
            let term = k.mul_int(*e, *factor);
            k.add(sum, term)
        })
    };
    let nr = i64::from(p.nr);
    let one = k.int(1);
    // Bytes before the group, and the column inside it.
    let (group_number, inside) = match p.coding.group() {
        Some(group) if p.coding.has_group_scales() => k.div_rem(col, group.into()),
        _ => (k.int(0), col),
    };
    let group = (group_number, p.group_bytes() as i64);
    // Bytes of a column that lie together.
    let pack = i64::from(p.column_code_bytes());
    let code = if !p.coding.has_bytes() {
        let (word, nibble) = k.div_rem(inside, 2 * pack);
        let (high, byte) = k.div_rem(nibble, pack);
        let at = sum(k, &[group, (word, nr * pack), (lane, pack), (byte, 1)]);
        let both = k.load(Place::Weight(weight), dtype, at);
        let (upper, lower) = k.div_rem(both, 16);
        let zero = k.int(0);
        let is_high = k.exprs.add(Expr::Cmp(CmpOp::Gt, high, zero));
        k.exprs.add(Expr::Select(is_high, upper, lower))
    } else {
        let (word, byte) = k.div_rem(inside, pack);
        let at = sum(k, &[group, (word, nr * pack), (lane, pack), (byte, 1)]);
        k.load(Place::Weight(weight), dtype, at)
    };
    // Scales or zero points, which begin at a byte of the group.
    let factor = |k: &mut KernelBuilder, begin: u64| {
        let stored = p.coding.scale_type();
        let size = stored.size() as i64;
        let at = sum(k, &[group, (one, begin as i64), (lane, size)]);
        let (at, _) = k.div_rem(at, size);
        k.load(Place::Weight(weight), stored, at)
    };
    let scale = factor(k, p.scales_at());
    let offset = if p.coding.has_zeros() { factor(k, p.zeros_at()) } else { k.exprs.float(p.coding.offset(dtype) as f32) };
    let code = k.exprs.add(Expr::Unary(UnaryOp::IntToFloat, code));
    let code = k.exprs.add(Expr::Binary(BinaryOp::Sub, code, offset));
    k.exprs.add(Expr::Binary(BinaryOp::Mul, code, scale))
}

/// Element index of `w[row, col]` in panels of `dtype` (rows of the weight are output columns).
pub fn panel_index(k: &mut KernelBuilder, p: &Panels, dtype: DType, row: ExprId, col: ExprId) -> ExprId {
    let (panel, lane) = panel_of(k, p, row);
    let (pair, odd) = k.div_rem(col, i64::from(p.k_pack));
    let terms = [
        k.mul_int(panel, (p.panel_bytes(dtype) / dtype.size()) as i64),
        k.mul_int(pair, i64::from(p.nr * p.k_pack)),
        k.mul_int(lane, i64::from(p.k_pack)),
        odd,
    ];
    let zero = k.int(0);
    terms.into_iter().fold(zero, |s, t| k.add(s, t))
}

#[cfg(test)]
mod tests {
    use super::super::kernel::evaluate;
    use super::*;

    /// Lookups know of the gaps between panels.
    #[test]
    fn an_element_lies_in_its_panel() {
        let p = Panels { nr: 16, k_pack: 2, k: 2048, groups: 2, group_cols: 40, ways: 1, coding: Coding::Elements };
        let mut k = KernelBuilder::default();
        let (row, col) = (k.outer_var((0, 79)), k.outer_var((0, 2047)));
        let (r, c) = (k.var_expr(row), k.var_expr(col));
        let index = panel_index(&mut k, &p, DType::Bf16, r, c);
        // Row 57 is column 17 of group 1, which begins with panel 3.
        let at = |r, c| evaluate(&k.exprs, index, &|v| if v == row { r } else { c });
        let panel = p.panel_bytes(DType::Bf16) as i64 / 2;
        assert!(panel > 16 * 2048);
        assert_eq!([at(0, 0), at(17, 0), at(57, 5)], [Some(0), Some(panel + 2), Some(4 * panel + 2 * 16 * 2 + 2 + 1)]);
    }
}
