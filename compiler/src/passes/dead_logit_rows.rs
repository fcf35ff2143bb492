//! Computes only the rows that are asked for: a gather of rows moves up through row-wise ops, to where rows are needed for something else.
//!
//! ```text
//! %r = add %x, %o; %n = rms_norm %r, @w; %d = mm %n, @down {rhs_t}; %s = add %r, %d; %l = mm %s, @head {rhs_t}; %y = embedding %l, %logit_row
//! ->  %a = embedding %x, %logit_row; %b = embedding %o, %logit_row; %r = add %a, %b; ..; %y = mm %s, @head {rhs_t}
//! ```
//! Same bits per row. A value moves if all that reads it moves, otherwise it is computed for all rows anyway. So a prompt runs its last
//! layer's attention on all rows, and what comes behind on those whose logits are wanted. Steps of few rows keep their last layer like the
//! others: their time goes into reading weights, all of which one row needs as well.

use super::rewrite::rewrite;
use super::{Broken, PassCx};
use rcompile_graph::{Dim, Function, Module, Op, OpClass, Type, ValueId, layer_of};
use std::collections::{HashMap, HashSet};

/// Rows of a step up to which no gather moves into a layer.
const FEW_ROWS: u64 = 8;

/// Runs the pass.
pub fn run(module: &mut Module, cx: &mut PassCx) -> Result<bool, Broken> {
    let swept = super::dce::run(module, cx)?; // what fusion left behind reads values, too
    let main = module.main;
    let f = module.main();
    // Values that move, each with the gather that moves across it.
    let mut moved: HashMap<ValueId, ValueId> = HashMap::new();
    for gather in f.ids() {
        moved.extend(moving(module, f, gather).into_iter().map(|value| (value, gather)));
    }
    if moved.is_empty() {
        return Ok(swept);
    }
    let mut gathered: HashMap<(ValueId, ValueId), ValueId> = HashMap::new();
    rewrite(module, main, |rw, f, id| {
        let node = f.node(id);
        let Some(gather) = moved.get(&id) else {
            let [source, _] = node.inputs[..] else { return Ok(None) };
            return Ok((moved.get(&source) == Some(&id)).then(|| rw.map(source)));
        };
        let index = f.node(*gather).inputs[1];
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for input in &node.inputs {
            inputs.push(match gathered.get(&(*input, index)) {
                Some(rows) => *rows,
                None if !moved.contains_key(input) && has_rows(f, *input, node.ty.shape[0]) => {
                    let rows = rw.add(Op::Embedding, &[rw.map(*input), rw.map(index)], None)?;
                    gathered.insert((*input, index), rows);
                    rows
                }
                None => rw.map(*input),
            });
        }
        let mut ty = node.ty.clone();
        ty.shape[0] = f.ty(index).shape[0];
        Ok(Some(rw.add(node.op.clone(), &inputs, Some(ty))?))
    })?;
    Ok(true)
}

/// The values that a gather of rows moves across: row-wise, read only by it and by each other, and computed when the choice is known.
fn moving(module: &Module, f: &Function, gather: ValueId) -> HashSet<ValueId> {
    let mut moving = HashSet::new();
    let node = f.node(gather);
    let (Op::Embedding, [source, index]) = (&node.op, &node.inputs[..]) else { return moving };
    let few_rows = matches!(f.ty(*source).shape.first(), Some(Dim::Sym(rows)) if module.symbols[rows.index()].bound <= FEW_ROWS);
    let users = f.users();
    let stays = |id: ValueId| !row_wise(f, id) || f.outputs.contains(&id) || (few_rows && layer_of(&f.node(id).origin).is_some());
    for id in f.ids().filter(|id| id > index && *id < gather).collect::<Vec<_>>().into_iter().rev() {
        let readers = &users[id.index()];
        let only_moving = !readers.is_empty() && readers.iter().all(|u| *u == gather || moving.contains(u));
        if only_moving && !stays(id) && (id == *source || moving.contains(source)) {
            moving.insert(id);
        }
    }
    moving
}

fn has_rows(f: &Function, id: ValueId, rows: Dim) -> bool {
    matches!(rows, Dim::Sym(_)) && f.ty(id).shape.first() == Some(&rows)
}

/// Row i of the result depends only on row i of the operands that have rows (and on parameters). No where the result has as many columns as
/// rows: an operand of that length may run along the columns.
fn row_wise(f: &Function, id: ValueId) -> bool {
    let Type { shape, .. } = f.ty(id);
    let [Dim::Sym(_), columns @ ..] = &shape[..] else { return false };
    if columns.iter().any(|d| matches!(d, Dim::Sym(_))) {
        return false;
    }
    match &f.node(id).op {
        op if op.class() == OpClass::Elementwise => true,
        // A slice is of columns: rows, which have no constant number, cannot be cut.
        Op::Slice { .. } | Op::RmsNorm { .. } | Op::LayerNorm { .. } => true,
        Op::Mm { .. } | Op::IndexSelect => !matches!(f.ty(f.node(id).inputs[1]).shape[..], [Dim::Sym(_), ..] | [_, Dim::Sym(_)]),
        _ => false,
    }
}
