//! Planning attention: cache appends, cache addresses, score and mask expressions.
//!
//! A cache append is a loop nest whose index expressions are the cache's layout ([`Attention`]); the attention itself is one region per
//! layer.

use super::frame::{Cols, Frame, Home, storage};
use super::kernel::KernelBuilder;
use super::lower::{Lowering, Stop, binary, compare};
use super::{Plan, PlanError};
use rcompile_codegen::program as p;
use rcompile_codegen::program::{
    Attention, DType, Expr, ExprId, Extent, KEY_GROUP, Kernel, KvPage, LoopNest, Operand, Place, ReduceOp, Store, Table,
};
use rcompile_graph::{AttnExpr, AttnVar, Binary, Compare, Dim, Op, State, StateId, Unary, ValueId};

/// What a cache holds of a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KvPart {
    Keys,
    Values,
}

/// Variables of an attention as expressions.
struct AttentionVars {
    head: ExprId,
    query: ExprId,
    key: ExprId,
}

impl Plan<'_> {
    /// Loop nest that writes keys or values of a cache append: outer (row, head), inner the head's elements.
    pub(super) fn append_nest(&mut self, frame: &Frame<'_>, id: ValueId, part: KvPart, row: Dim) -> Result<LoopNest, Stop> {
        let node = frame.func.node(id);
        let Op::KvAppend { state } = node.op else { return Err(PlanError::Internal("not an append".into()).into()) };
        let layout = self.kv_layout(frame, state);
        let [keys, values, slots, kv_indices] = node.inputs[..] else {
            return Err(PlanError::Internal("operands of an append".into()).into());
        };
        let source = match part {
            KvPart::Keys => keys,
            KvPart::Values => values,
        };
        let mut k = KernelBuilder::with_reductions();
        let extent = self.extent(frame, row)?;
        let t = k.outer_var((0, self.bound(frame, row) as i64 - 1));
        let h = k.outer_var((0, i64::from(layout.kv_heads) - 1));
        let idx = [k.var_expr(t), k.var_expr(h)];
        let outer = vec![(t, extent), (h, Extent::Const(layout.kv_heads))];
        // Of codes: the largest magnitude first, as `rcompile_graph::quant` says.
        let mut factors = None;
        if layout.kv.scales().is_some() {
            let mut lowering = Lowering { frame, k: &mut k, weights: &mut self.weights };
            let largest = lowering.row_reduce((id, part as u32), ReduceOp::Max, layout.kv.head_dim.into(), &idx, |l, at| {
                let x = l.at(source, at)?;
                Ok(l.k.exprs.add(Expr::Unary(p::UnaryOp::Abs, x)))
            })?;
            let (zero, tiny, most) = (k.exprs.float(0.0), k.exprs.float(rcompile_graph::quant::TINY), k.exprs.float(127.0));
            let nothing = k.exprs.add(Expr::Cmp(p::CmpOp::Lt, largest, tiny));
            let mut quotient = |a, b| {
                let q = k.exprs.add(Expr::Binary(p::BinaryOp::Div, a, b));
                k.exprs.add(Expr::Select(nothing, zero, q))
            };
            factors = Some((quotient(most, largest), quotient(largest, most)));
        }
        self.inner_stores(&mut k, layout.kv.head_dim, true, &idx, |plan, k, idx| {
            let mut lowering = Lowering { frame, k, weights: &mut plan.weights };
            let mut x = lowering.at(source, idx)?;
            if let Some((inverse, _)) = factors {
                x = lowering.k.exprs.add(Expr::Binary(p::BinaryOp::Mul, x, inverse));
            }
            let (slot, kv_index) = (lowering.at(slots, &idx[..1])?, lowering.at(kv_indices, &idx[..1])?);
            let index = layout.element(k, part, (slot, kv_index), idx[1], idx[2]);
            let operand = k.operand(Operand { place: Place::State(layout.offsets.clone()), dtype: layout.kv.dtype });
            Ok(vec![Store { operand, index, value: x }])
        })?;
        if let (Some(scales), Some((_, scale))) = (layout.kv.scales(), factors) {
            self.inner_stores(&mut k, 1, false, &idx, |plan, k, idx| {
                let mut lowering = Lowering { frame, k, weights: &mut plan.weights };
                let (slot, kv_index) = (lowering.at(slots, &idx[..1])?, lowering.at(kv_indices, &idx[..1])?);
                let index = layout.scale(k, scales, part, (slot, kv_index), idx[1]);
                let operand = k.operand(Operand { place: Place::State(layout.offsets.clone()), dtype: DType::F32 });
                Ok(vec![Store { operand, index, value: scale }])
            })?;
        }
        Ok(LoopNest { outer, operands: k.operands, exprs: k.exprs, stages: k.stages })
    }

    pub(super) fn kv_layout(&self, frame: &Frame<'_>, state: StateId) -> KvLayout {
        let s = &frame.module.states[state.index()];
        let offsets = frame.states[&state].iter().map(|s| self.state_layout.offsets[s.index()]).collect();
        KvLayout { kv: kv_page(s), kv_heads: s.kv_heads as u32, offsets, page_bytes: self.state_layout.page_bytes }
    }

    /// Attention: queries are stored (by a group nest of the projection where possible), the output takes along reshapes and conversions.
    pub(super) fn attention(&mut self, frame: &mut Frame<'_>, id: ValueId) -> Result<(), PlanError> {
        let node = frame.func.node(id).clone();
        let Op::Sdpa { state, ref score, ref mask } = node.op else { return Err(PlanError::Internal("not attention".into())) };
        let q = node.inputs[0];
        if !matches!(frame.homes.get(&q), Some(Home::Buffer { .. })) {
            self.store(frame, q)?;
        }
        let Some(Home::Buffer { id: q_buffer, dtype: q_dtype, stride: q_stride, cols }) = frame.homes.get(&q).cloned() else {
            return Err(PlanError::Internal("queries have no buffer".into()));
        };
        let (mut end, mut converted) = (id, false);
        while let [user] = frame.users[end.index()][..] {
            let view = matches!(frame.func.node(user).op, Op::Reshape) && frame.func.ty(user).shape.first() == node.ty.shape.first();
            // The kernel rounds once, by storing.
            let rounds = !converted && frame.func.node(user).op == Op::Convert && storage(frame.func.ty(user).dtype).is_some();
            if !(view || rounds) || frame.func.outputs.contains(&end) {
                break;
            }
            (end, converted) = (user, converted || rounds);
        }
        let mut out = self.buffer(frame, end, "attention", self.row_width(frame, id), Cols::Plain)?;
        // A bf16 output is bf16 in memory also where the CPU has no bf16 dot instruction.
        if let (rcompile_graph::DType::BF16, Home::Buffer { id, dtype, .. }) = (frame.func.ty(end).dtype, &mut out) {
            *dtype = DType::Bf16;
            self.program.buffers[id.index()].dtype = DType::Bf16;
        }
        let Home::Buffer { id: out_buffer, dtype: out_dtype, stride: out_stride, .. } = out else {
            return Err(PlanError::Unsupported("attention as an output".into()));
        };
        let layout = self.kv_layout(frame, state);
        let heads = self.bound(frame, node.ty.shape[1]) as u32;
        let mut k = KernelBuilder::default();
        let positions = i64::from(self.cx.ctx_size) - 1;
        let head_var = k.var((0, i64::from(heads) - 1));
        let query_var = k.var((0, positions));
        let key_var = k.var((0, positions));
        let vars = AttentionVars { head: k.var_expr(head_var), query: k.var_expr(query_var), key: k.var_expr(key_var) };
        let score = attn_float(&mut k, score, &vars).map_err(|w| PlanError::Unsupported(format!("attention score: {w}")))?;
        let visible = VisibleKeys::new(&mut k, mask, &vars).map_err(|w| PlanError::Unsupported(format!("attention mask: {w}")))?;
        let head_pitch = match cols {
            Cols::Grouped { padded, .. } => padded,
            Cols::Plain => layout.kv.head_dim,
        };
        let kernel = Attention {
            q: Operand { place: Place::Buffer(q_buffer), dtype: q_dtype },
            q_stride,
            q_head_stride: head_pitch,
            out: Operand { place: Place::Buffer(out_buffer), dtype: out_dtype },
            out_stride,
            heads,
            kv_heads: layout.kv_heads,
            kv: layout.kv,
            compute: self.cx.isa.attention(layout.kv.dtype, layout.kv.head_dim),
            state_offsets: layout.offsets,
            page_bytes: layout.page_bytes,
            tile_rows: self.program.tile_rows,
            exprs: k.exprs,
            head_var,
            query_var,
            key_var,
            score,
            key_lower: visible.lower,
            key_upper: visible.upper,
            mask: visible.mask,
        };
        self.region("attention", Kernel::Attention(kernel));
        // Only the end of the chain has the buffer's type; views between share it.
        let mut v = end;
        loop {
            frame.homes.insert(v, Home::Buffer { id: out_buffer, dtype: out_dtype, stride: out_stride, cols: Cols::Plain });
            if v == id || frame.func.node(v).op == Op::Convert {
                break;
            }
            v = frame.func.node(v).inputs[0];
        }
        frame.homes.entry(id).or_insert(Home::Buffer { id: out_buffer, dtype: out_dtype, stride: out_stride, cols: Cols::Plain });
        Ok(())
    }
}

/// Addresses of a KV cache.
pub(super) struct KvLayout {
    kv: KvPage,
    kv_heads: u32,
    offsets: Vec<u64>,
    page_bytes: u64,
}

/// Positions of a page.
const PAGE: u64 = rcompile_runtime::abi::PAGE_POSITIONS as u64;

/// A page of one head.
pub(super) fn kv_page(s: &State) -> KvPage {
    let dtype = if s.dtype.is_quantised() { DType::I8 } else { storage(s.dtype).expect("a cache of floats or codes") };
    KvPage { dtype, head_dim: s.head_dim as u32 }
}

impl KvLayout {
    /// `(index of the head's page, position within the page)`, the index in elements of `size` bytes from the layer's start.
    fn page(&self, k: &mut KernelBuilder, size: u64, (slot, kv_index): (ExprId, ExprId), head: ExprId) -> (ExprId, ExprId) {
        let pages = k.exprs.add(Expr::PagesPerSlot);
        let first = k.exprs.add(Expr::Binary(p::BinaryOp::Mul, slot, pages));
        let (block, within) = k.div_rem(kv_index, PAGE as i64);
        let entry = k.add(first, block);
        let page = k.load(Place::Table(Table::PageTable), DType::I32, entry);
        let base = k.mul_int(page, (self.page_bytes / size) as i64);
        let head = k.mul_int(head, (self.kv.bytes() / size) as i64);
        (k.add(base, head), within)
    }

    /// Index of element `d` of the key or value at `(slot, kv_index)`, see [`Attention`].
    fn element(&self, k: &mut KernelBuilder, part: KvPart, at: (ExprId, ExprId), head: ExprId, d: ExprId) -> ExprId {
        let size = self.kv.dtype.size();
        let (base, within) = self.page(k, size, at, head);
        let hd = i64::from(self.kv.head_dim);
        let element = match part {
            KvPart::Values => {
                let row = k.mul_int(within, hd);
                let v = k.int((self.kv.v_offset() / size) as i64);
                let row = k.add(row, v);
                k.add(row, d)
            }
            KvPart::Keys => {
                let keys = i64::from(KEY_GROUP);
                let (group, lane) = k.div_rem(within, keys);
                let group = k.mul_int(group, keys * hd);
                let column = k.mul_int(d, keys);
                let element = k.add(group, column);
                k.add(element, lane)
            }
        };
        k.add(base, element)
    }

    /// Index of the scale of the key or value at `(slot, kv_index)`; the scales lie `scales` bytes into the head.
    fn scale(&self, k: &mut KernelBuilder, scales: u64, part: KvPart, at: (ExprId, ExprId), head: ExprId) -> ExprId {
        let size = DType::F32.size();
        let (base, within) = self.page(k, size, at, head);
        let of_part = match part {
            KvPart::Keys => 0,
            KvPart::Values => PAGE,
        };
        let first = k.int((scales / size + of_part) as i64);
        let first = k.add(base, first);
        k.add(first, within)
    }
}

fn attn_var(v: AttnVar, vars: &AttentionVars) -> Option<ExprId> {
    match v {
        AttnVar::Score => None,
        AttnVar::Head => Some(vars.head),
        AttnVar::Query => Some(vars.query),
        AttnVar::Key => Some(vars.key),
    }
}

/// Score expressions are f32.
fn attn_float(k: &mut KernelBuilder, e: &AttnExpr, vars: &AttentionVars) -> Result<ExprId, String> {
    match e {
        AttnExpr::Var(AttnVar::Score) => Ok(k.exprs.add(Expr::Score)),
        AttnExpr::Var(v) => match attn_var(*v, vars) {
            Some(x) => Ok(k.exprs.add(Expr::Unary(p::UnaryOp::IntToFloat, x))),
            None => Err("an unknown variable".into()),
        },
        AttnExpr::Const(c) => Ok(k.exprs.float(*c as f32)),
        AttnExpr::Unary(op, a) => {
            let a = attn_float(k, a, vars)?;
            let op = match op {
                Unary::Neg => p::UnaryOp::Neg,
                Unary::Abs => p::UnaryOp::Abs,
                Unary::Exp => p::UnaryOp::Exp,
                Unary::Tanh => p::UnaryOp::Tanh,
                other => return Err(other.name().to_string()),
            };
            Ok(k.exprs.add(Expr::Unary(op, a)))
        }
        AttnExpr::Binary(op, a, b) if !matches!(op, Binary::And | Binary::Or) => {
            let (a, b) = (attn_float(k, a, vars)?, attn_float(k, b, vars)?);
            Ok(k.exprs.add(Expr::Binary(binary(*op), a, b)))
        }
        _ => Err("what is no number".into()),
    }
}

/// Integer parts of masks.
fn attn_int(k: &mut KernelBuilder, e: &AttnExpr, vars: &AttentionVars) -> Result<ExprId, String> {
    match e {
        AttnExpr::Var(v) => attn_var(*v, vars).ok_or_else(|| "score in a mask".to_string()),
        AttnExpr::Const(c) if c.fract() == 0.0 => Ok(k.int(*c as i64)),
        // Masks are written in numbers, where 7 / 2 is 3.5.
        AttnExpr::Binary(op, a, b) if !matches!(op, Binary::And | Binary::Or | Binary::Div) => {
            let (a, b) = (attn_int(k, a, vars)?, attn_int(k, b, vars)?);
            Ok(k.binary(binary(*op), a, b))
        }
        _ => Err("what is no integer".into()),
    }
}

fn attn_bool(k: &mut KernelBuilder, e: &AttnExpr, vars: &AttentionVars) -> Result<ExprId, String> {
    match e {
        AttnExpr::True => {
            let zero = k.int(0);
            Ok(k.exprs.add(Expr::Cmp(p::CmpOp::Ge, vars.key, zero)))
        }
        AttnExpr::Compare(op, a, b) => {
            let (a, b) = (attn_int(k, a, vars)?, attn_int(k, b, vars)?);
            Ok(k.exprs.add(Expr::Cmp(compare(*op), a, b)))
        }
        AttnExpr::Binary(op @ (Binary::And | Binary::Or), a, b) => {
            let (a, b) = (attn_bool(k, a, vars)?, attn_bool(k, b, vars)?);
            Ok(k.exprs.add(Expr::Binary(binary(*op), a, b)))
        }
        AttnExpr::Unary(Unary::Not, a) => {
            let a = attn_bool(k, a, vars)?;
            Ok(k.exprs.add(Expr::Unary(p::UnaryOp::Not, a)))
        }
        _ => Err("what is no condition".into()),
    }
}

/// Which keys a query sees: `lower <= key - query < upper`, and of them those of the mask.
#[derive(Default)]
struct VisibleKeys {
    lower: Option<i64>,
    upper: Option<i64>,
    mask: Option<ExprId>,
}

impl VisibleKeys {
    /// Terms of a conjunction like `key <= query + c` become bounds, the first of each side; all others stay in the mask.
    fn new(k: &mut KernelBuilder, mask: &AttnExpr, vars: &AttentionVars) -> Result<VisibleKeys, String> {
        let mut visible = VisibleKeys::default();
        let mut terms = vec![mask];
        while let Some(term) = terms.pop() {
            if let AttnExpr::Binary(Binary::And, a, b) = term {
                terms.extend([&**b, &**a]);
                continue;
            }
            if *term == AttnExpr::True {
                continue;
            }
            if let Some((side, offset)) = bound(term) {
                let place = match side {
                    Side::Lower => &mut visible.lower,
                    Side::Upper => &mut visible.upper,
                };
                if place.is_none() {
                    *place = Some(offset);
                    continue;
                }
            }
            let term = attn_bool(k, term, vars)?;
            visible.mask = Some(visible.mask.map_or(term, |others| k.binary(p::BinaryOp::And, others, term)));
        }
        Ok(visible)
    }
}

enum Side {
    Lower,
    Upper,
}

/// `key >= query + c` or `key < query + c` with its `c`, of the four comparisons that are one of them.
fn bound(term: &AttnExpr) -> Option<(Side, i64)> {
    let AttnExpr::Compare(op, key, limit) = term else { return None };
    let offset = query_offset(limit).filter(|_| **key == AttnExpr::Var(AttnVar::Key))?;
    match op {
        Compare::Ge => Some((Side::Lower, offset)),
        Compare::Gt => Some((Side::Lower, offset + 1)),
        Compare::Lt => Some((Side::Upper, offset)),
        Compare::Le => Some((Side::Upper, offset + 1)),
        Compare::Eq | Compare::Ne => None,
    }
}

/// `c` if the expression is `query + c` or `query - c` with a whole number that no sum of places overflows with.
fn query_offset(e: &AttnExpr) -> Option<i64> {
    match e {
        AttnExpr::Var(AttnVar::Query) => Some(0),
        AttnExpr::Binary(op @ (Binary::Add | Binary::Sub), a, b) => match (&**a, &**b) {
            (AttnExpr::Var(AttnVar::Query), AttnExpr::Const(c)) if c.fract() == 0.0 && c.abs() < f64::from(i32::MAX) => {
                Some(if *op == Binary::Add { *c as i64 } else { -(*c as i64) })
            }
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bounds as offsets from the query, and whether there is a mask.
    fn seen(mask: &AttnExpr) -> (Option<i64>, Option<i64>, bool) {
        let mut k = KernelBuilder::default();
        let [head, query, key] = [0, 1, 2].map(|_| {
            let v = k.var((0, 99));
            k.var_expr(v)
        });
        let vars = AttentionVars { head, query, key };
        let visible = VisibleKeys::new(&mut k, mask, &vars).unwrap();
        (visible.lower, visible.upper, visible.mask.is_some())
    }

    #[test]
    fn masks_are_bounds_and_what_they_do_not_say() {
        let var = |v| Box::new(AttnExpr::Var(v));
        let key = |op, c: f64| {
            let limit = AttnExpr::Binary(Binary::Add, var(AttnVar::Query), Box::new(AttnExpr::Const(c)));
            AttnExpr::Compare(op, var(AttnVar::Key), Box::new(limit))
        };
        let and = |a, b| AttnExpr::Binary(Binary::And, Box::new(a), Box::new(b));
        assert_eq!(seen(&AttnExpr::True), (None, None, false));
        assert_eq!(seen(&AttnExpr::causal()), (None, Some(1), false));
        assert_eq!(seen(&AttnExpr::causal_window(5)), (Some(-4), Some(1), false));
        assert_eq!(seen(&and(key(Compare::Ge, -5.0), key(Compare::Lt, 6.0))), (Some(-5), Some(6), false));
        // A second bound of a side, an alternative, a comparison for equality: masks.
        assert_eq!(seen(&and(AttnExpr::causal(), key(Compare::Le, 3.0))), (None, Some(1), true));
        assert_eq!(seen(&and(AttnExpr::causal(), key(Compare::Ne, -3.0))), (None, Some(1), true));
        assert_eq!(seen(&and(AttnExpr::causal(), key(Compare::Ge, -1e300))), (None, Some(1), true));
        let either = AttnExpr::Binary(Binary::Or, Box::new(AttnExpr::causal()), Box::new(key(Compare::Ge, 9.0)));
        assert_eq!(seen(&either), (None, None, true));
        assert_eq!(seen(&and(either, key(Compare::Gt, -9.0))), (Some(-8), None, true));
    }
}
