//! Horizontal fusion: matmuls of the same input with different weights become one.
//!
//! ```text
//! %q = mm %x, @q {rhs_t}; %k = mm %x, @k {rhs_t}; %v = mm %x, @v {rhs_t}
//! ->  %qkv = mm %x, @q+k+v {rhs_t}; %q = slice %qkv {axis=1, ..}; ...
//! ```
//! The weight's recipe is the concatenation, so nothing is copied at run time. The sums are the same bits. Needs cse (one name per input).

use super::rewrite::rewrite;
use super::{Broken, PassCx};
use rcompile_graph::{DType, Dim, FuncId, Function, Module, Op, Param, ParamId, Recipe, Type, ValueId};
use std::collections::HashMap;

/// Runs the pass.
pub fn run(module: &mut Module, cx: &mut PassCx) -> Result<bool, Broken> {
    let mut changed = 0;
    for func in 0..module.functions.len() {
        let groups = groups(module, &module.functions[func]);
        let group_of: HashMap<ValueId, usize> = groups.iter().zip(0..).flat_map(|(g, n)| g.iter().map(move |id| (*id, n))).collect();
        let mut merged: HashMap<usize, ValueId> = HashMap::new();
        changed += rewrite(module, FuncId(func as u32), |rw, f, id| {
            let Some(&number) = group_of.get(&id) else { return Ok(None) };
            let group = &groups[number];
            let rows_of = |id: ValueId| rows(f.ty(f.node(id).inputs[1]));
            let whole = match merged.get(&number) {
                Some(whole) => *whole,
                None => {
                    let weight = |m: &ValueId| param(f, f.node(*m).inputs[1]).expect("a group's matmuls have a parameter on the right");
                    let parts: Vec<ParamId> = group.iter().map(weight).collect();
                    let weight = concat(rw.module, &parts);
                    let ty = rw.module.params[weight.index()].ty.clone();
                    let weight = rw.add(Op::Param(weight), &[], Some(ty))?;
                    let x = rw.map(f.node(id).inputs[0]);
                    let whole = rw.add(Op::Mm { rhs_t: true }, &[x, weight], None)?;
                    cx.note(&f.node(id).origin, format_args!("{} matmuls in one", group.len()));
                    merged.insert(number, whole);
                    whole
                }
            };
            let start: u64 = group.iter().take_while(|m| **m != id).map(|m| rows_of(*m)).sum();
            Ok(Some(rw.add(Op::Slice { axis: 1, start, end: start + rows_of(id) }, &[whole], None)?))
        })?;
    }
    Ok(changed > 0)
}

/// Matmuls with a parameter on the right, by input; only groups of two and more with one weight type from one source.
fn groups(module: &Module, f: &Function) -> Vec<Vec<ValueId>> {
    let mut groups: Vec<Vec<ValueId>> = Vec::new();
    // Looked up, never gone through: groups are in the order of their first members.
    let mut number_of: HashMap<(ValueId, DType, bool), usize> = HashMap::new();
    for id in f.ids() {
        let node = f.node(id);
        let Op::Mm { rhs_t: true } = node.op else { continue };
        let Some(w) = param(f, node.inputs[1]) else { continue };
        let weight = &module.params[w.index()];
        let key = (node.inputs[0], weight.ty.dtype, codes_made_here(weight));
        let number = *number_of.entry(key).or_insert(groups.len());
        if number == groups.len() {
            groups.push(Vec::new());
        }
        groups[number].push(id);
    }
    groups.into_iter().filter(|g| g.len() > 1).collect()
}

/// Codes that `pack` makes from floats; those of the checkpoint lie in other tensors, so that the two do not concatenate.
fn codes_made_here(weight: &Param) -> bool {
    weight.ty.dtype.is_quantised() && matches!(weight.recipe, Recipe::Convert { .. })
}

fn param(f: &Function, id: ValueId) -> Option<ParamId> {
    match f.node(id).op {
        Op::Param(p) => Some(p),
        _ => None,
    }
}

/// Rows of a parameter: the verifier lets none have a symbol for a dimension.
fn rows(ty: &Type) -> u64 {
    ty.shape[0].constant().expect("dimensions of a parameter are constants")
}

/// Parts one below the other; a conversion that all have in common comes last (rows keep their scales).
fn concat_recipe(parts: Vec<Recipe>) -> Recipe {
    let common = |dtype| parts.iter().all(|p| matches!(p, Recipe::Convert { dtype: d, .. } if *d == dtype));
    match parts.first() {
        Some(Recipe::Convert { dtype, .. }) if common(*dtype) => {
            let dtype = *dtype;
            let inner = parts.into_iter().map(|p| if let Recipe::Convert { of, .. } = p { *of } else { p }).collect();
            Recipe::Convert { of: Box::new(Recipe::Concat(inner)), dtype }
        }
        _ => Recipe::Concat(parts),
    }
}

fn concat(module: &mut Module, parts: &[ParamId]) -> ParamId {
    let of = |p: &ParamId| &module.params[p.index()];
    let mut ty = of(&parts[0]).ty.clone();
    ty.shape[0] = Dim::Const(parts.iter().map(|p| rows(&of(p).ty)).sum());
    let name = parts.iter().map(|p| of(p).name.as_str()).collect::<Vec<_>>().join("+");
    let recipe = concat_recipe(parts.iter().map(|p| of(p).recipe.clone()).collect());
    // The same weights may have been merged before, for other rows.
    if let Some(known) = module.params.iter().position(|p| p.recipe == recipe && p.ty == ty) {
        return ParamId(known as u32);
    }
    module.params.push(Param { name, ty, recipe });
    ParamId(module.params.len() as u32 - 1)
}
