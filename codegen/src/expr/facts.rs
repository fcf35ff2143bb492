//! What can be said of expressions without evaluating them: types, operands, variables.

use crate::program::{BinaryOp, DType, Expr, ExprId, Exprs, OperandId, UnaryOp, VarId};
use std::collections::BTreeSet;

/// Type of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// i64.
    Int,
    /// f32.
    Float,
    /// Condition.
    Bool,
}

/// Types of all nodes, or the first error as `(node, message)`. `operands`: element types.
pub fn types(exprs: &Exprs, operands: &[DType]) -> Result<Vec<Type>, (ExprId, String)> {
    let mut list: Vec<Type> = Vec::with_capacity(exprs.nodes().len());
    for (i, node) in exprs.nodes().iter().enumerate() {
        let id = ExprId(i as u32);
        let fail = |message: String| Err((id, message));
        let get = |e: ExprId| {
            let ty = list.get(e.index()).copied();
            ty.ok_or_else(|| (id, format!("uses e{} before it is defined", e.0)))
        };
        let ty = match *node {
            Expr::Int(_) | Expr::Var(_) | Expr::PagesPerSlot => Type::Int,
            Expr::Float(_) | Expr::Scalar(_) | Expr::Acc(_) | Expr::Score => Type::Float,
            Expr::Load(operand, index) => {
                if get(index)? != Type::Int {
                    return fail("index is not an integer".into());
                }
                match operands.get(operand.index()) {
                    Some(DType::F32 | DType::F16 | DType::Bf16) => Type::Float,
                    Some(_) => Type::Int,
                    None => return fail(format!("operand {} does not exist", operand.0)),
                }
            }
            Expr::Unary(op, a) => {
                let (wants, gives) = match op {
                    UnaryOp::IntToFloat => (Type::Int, Type::Float),
                    UnaryOp::Not => (Type::Bool, Type::Bool),
                    _ => (Type::Float, Type::Float),
                };
                if get(a)? != wants {
                    return fail(format!("{op:?} of {:?}", get(a)?));
                }
                gives
            }
            Expr::Binary(op, a, b) => {
                let (a, b) = (get(a)?, get(b)?);
                let bools = matches!(op, BinaryOp::And | BinaryOp::Or);
                if a != b || bools != (a == Type::Bool) || (op == BinaryOp::Rem && a == Type::Float) {
                    return fail(format!("{op:?} of {a:?} and {b:?}"));
                }
                a
            }
            Expr::Cmp(op, a, b) => {
                let (a, b) = (get(a)?, get(b)?);
                if a != b || a == Type::Bool {
                    return fail(format!("{op:?} of {a:?} and {b:?}"));
                }
                Type::Bool
            }
            Expr::Select(c, a, b) => {
                let (c, a, b) = (get(c)?, get(a)?, get(b)?);
                if c != Type::Bool || a != b {
                    return fail(format!("select({c:?}, {a:?}, {b:?})"));
                }
                a
            }
            Expr::Round(dtype, a) => {
                if get(a)? != Type::Float || !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16) {
                    return fail(format!("round of {:?} to {dtype}", get(a)?));
                }
                Type::Float
            }
            Expr::Fold { begin, end, body, .. } => {
                if get(begin)? != Type::Int || get(end)? != Type::Int || get(body)? != Type::Float {
                    return fail("fold wants integer bounds and a float body".into());
                }
                Type::Float
            }
        };
        list.push(ty);
    }
    Ok(list)
}

/// Operands of a node.
pub fn children(expr: &Expr) -> Vec<ExprId> {
    match *expr {
        Expr::Load(_, a) | Expr::Unary(_, a) | Expr::Round(_, a) => vec![a],
        Expr::Binary(_, a, b) | Expr::Cmp(_, a, b) => vec![a, b],
        Expr::Select(a, b, c) => vec![a, b, c],
        Expr::Fold { begin, end, body, .. } => vec![begin, end, body],
        _ => vec![],
    }
}

/// The nodes at and below `roots`, each once.
pub fn below(exprs: &Exprs, roots: &[ExprId]) -> BTreeSet<ExprId> {
    let (mut open, mut found) = (roots.to_vec(), BTreeSet::new());
    while let Some(id) = open.pop() {
        if found.insert(id) {
            open.extend(children(&exprs.get(id)));
        }
    }
    found
}

/// The variables that a node uses, with those of folds below it.
pub fn variables(exprs: &Exprs, root: ExprId) -> BTreeSet<VarId> {
    let variable = |id| match exprs.get(id) {
        Expr::Var(v) => Some(v),
        _ => None,
    };
    below(exprs, &[root]).into_iter().filter_map(variable).collect()
}

/// For each node: the variables that it uses and does not bind itself, and whether it uses an accumulator or score.
pub(super) fn free_vars(exprs: &Exprs) -> Vec<(Vec<VarId>, bool)> {
    let mut list: Vec<(Vec<VarId>, bool)> = Vec::with_capacity(exprs.nodes().len());
    for node in exprs.nodes() {
        let mut vars = vec![];
        let mut input = matches!(node, Expr::Acc(_) | Expr::Score);
        if let Expr::Var(v) = node {
            vars.push(*v);
        }
        for (i, child) in children(node).iter().enumerate() {
            let (free, inputs) = &list[child.index()];
            let own = match node {
                Expr::Fold { var, .. } if i == 2 => Some(*var),
                _ => None,
            };
            vars.extend(free.iter().filter(|v| Some(**v) != own));
            input |= inputs;
        }
        vars.sort();
        vars.dedup();
        list.push((vars, input));
    }
    list
}

/// Loads below `roots` that read other elements for every `row` and `col`, as operand and index. Those with an index from memory, and
/// within folds, are left out.
pub fn loads_by_row_and_col(exprs: &Exprs, roots: &[ExprId], (row, col): (VarId, VarId)) -> Vec<(OperandId, ExprId)> {
    let (nodes, free) = (exprs.nodes(), free_vars(exprs));
    // Nodes follow their operands.
    let mut used = vec![false; nodes.len()];
    roots.iter().for_each(|root| used[root.index()] = true);
    for (i, node) in nodes.iter().enumerate().rev() {
        if used[i] && !matches!(node, Expr::Fold { .. }) {
            children(node).iter().for_each(|child| used[child.index()] = true);
        }
    }
    let mut reads = vec![false; nodes.len()];
    let mut found = vec![];
    for (i, node) in nodes.iter().enumerate() {
        reads[i] = matches!(node, Expr::Load(..)) || children(node).iter().any(|child| reads[child.index()]);
        if let Expr::Load(operand, index) = *node
            && used[i]
            && !reads[index.index()]
            && [row, col].iter().all(|v| free[index.index()].0.contains(v))
        {
            found.push((operand, index));
        }
    }
    found
}
