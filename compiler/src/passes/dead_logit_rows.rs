//! Computes only the rows that are asked for: a gather of rows moves up through row-wise ops.
//!
//! ```text
//! %n = rms_norm %x, @w; %l = mm %n, @head {rhs_t}; %y = embedding %l, %logit_row
//! ->  %g = embedding %x, %logit_row; %n = rms_norm %g, @w; %y = mm %n, @head {rhs_t}
//! ```
//! Same bits per row. Only values whose rows have no other user move (otherwise they are computed for all rows anyway).

use super::rewrite::rewrite;
use super::{PassCx, PassError};
use rcompile_graph::{Dim, Function, Module, Op, Type, ValueId};
use std::collections::HashMap;

/// Runs the pass.
pub fn run(module: &mut Module, _cx: &mut PassCx) -> Result<bool, PassError> {
    let main = module.main;
    let mut wanted: HashMap<ValueId, ValueId> = HashMap::new();
    let f = module.main();
    let users = f.users();
    for id in f.ids() {
        let node = f.node(id);
        let moves = node.op == Op::Embedding && row_wise(f, node.inputs[0]) && users[node.inputs[0].index()].len() == 1;
        if moves && !f.outputs.contains(&node.inputs[0]) {
            wanted.insert(id, node.inputs[0]);
        }
    }
    if wanted.is_empty() {
        return Ok(false);
    }
    rewrite(module, main, "dead-logit-rows", |rw, f, id| {
        let Some(source) = wanted.get(&id) else { return Ok(None) };
        let index = f.node(id).inputs[1];
        let mut done: HashMap<ValueId, ValueId> = HashMap::new();
        // Walk down to the values that have rows and are not row-wise (or are shared), then rebuild upwards on the chosen rows.
        let mut order = Vec::new();
        collect(f, *source, &users, true, &mut order);
        for (value, is_leaf) in order {
            let node = f.node(value);
            let new = if !has_rows(f, value, f.ty(*source).shape[0]) {
                rw.map(value)
            } else if is_leaf {
                rw.add(Op::Embedding, &[rw.map(value), rw.map(index)], None)?
            } else {
                let inputs: Vec<ValueId> = node.inputs.iter().map(|i| done.get(i).copied().unwrap_or_else(|| rw.map(*i))).collect();
                let mut ty = node.ty.clone();
                ty.shape[0] = f.ty(index).shape[0];
                rw.add(node.op.clone(), &inputs, Some(ty))?
            };
            done.insert(value, new);
        }
        Ok(Some(done[source]))
    })?;
    Ok(true)
}

/// Post-order of the row-wise tree under `id`; `true` marks leaves.
fn collect(f: &Function, id: ValueId, users: &[Vec<ValueId>], root: bool, order: &mut Vec<(ValueId, bool)>) {
    if order.iter().any(|(v, _)| *v == id) {
        return;
    }
    let inner = row_wise(f, id) && (root || users[id.index()].len() == 1);
    if inner {
        for input in &f.node(id).inputs {
            collect(f, *input, users, false, order);
        }
    }
    order.push((id, !inner));
}

fn has_rows(f: &Function, id: ValueId, rows: Dim) -> bool {
    matches!(rows, Dim::Sym(_)) && f.ty(id).shape.first() == Some(&rows)
}

/// Row i of the result depends only on row i of the operands that have rows (and on parameters).
fn row_wise(f: &Function, id: ValueId) -> bool {
    let Type { shape, .. } = f.ty(id);
    let Some(Dim::Sym(_)) = shape.first() else { return false };
    match f.node(id).op {
        Op::Unary(_) | Op::Binary(_) | Op::Convert | Op::RmsNorm { .. } | Op::LayerNorm { .. } => true,
        Op::Mm { .. } | Op::IndexSelect => !matches!(f.ty(f.node(id).inputs[1]).shape[..], [Dim::Sym(_), ..] | [_, Dim::Sym(_)]),
        _ => false,
    }
}
