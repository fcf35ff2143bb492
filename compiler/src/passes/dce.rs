//! Dead code: nodes that reach neither an output nor a write of state are dropped, then parameters that no node names.
//!
//! Needs nothing; promises that every node and parameter is used (inputs stay: they are the entry's contract).

use super::{Broken, PassCx};
use rcompile_graph::{Function, Module, Op, ParamId, ValueId};

/// Runs the pass.
pub fn run(module: &mut Module, _cx: &mut PassCx) -> Result<bool, Broken> {
    let mut changed = false;
    let writers = writers(module);
    for func in &mut module.functions {
        changed |= sweep(func, &writers);
    }
    changed |= drop_params(module);
    Ok(changed)
}

/// For each function, whether it writes a state, itself or in a call.
fn writers(module: &Module) -> Vec<bool> {
    let mut writers = vec![false; module.functions.len()];
    // Callees come in any order: until nothing is added.
    loop {
        let mut added = false;
        for (index, func) in module.functions.iter().enumerate() {
            if !writers[index] && func.nodes.iter().any(|node| is_write(&node.op, &writers)) {
                writers[index] = true;
                added = true;
            }
        }
        if !added {
            return writers;
        }
    }
}

fn is_write(op: &Op, writers: &[bool]) -> bool {
    match op {
        Op::KvAppend { .. } => true,
        Op::Call { func, .. } => writers[func.index()],
        _ => false,
    }
}

fn sweep(func: &mut Function, writers: &[bool]) -> bool {
    let mut live = vec![false; func.nodes.len()];
    let mut work: Vec<ValueId> = func.outputs.clone();
    let is_root = |op: &Op| matches!(op, Op::Input { .. }) || is_write(op, writers);
    work.extend(func.ids().filter(|id| is_root(&func.node(*id).op)));
    while let Some(id) = work.pop() {
        if !std::mem::replace(&mut live[id.index()], true) {
            work.extend(&func.node(id).inputs);
        }
    }
    if live.iter().all(|l| *l) {
        return false;
    }
    let mut map = vec![ValueId(u32::MAX); func.nodes.len()];
    let mut nodes = Vec::new();
    for (i, mut node) in std::mem::take(&mut func.nodes).into_iter().enumerate() {
        if live[i] {
            node.inputs.iter_mut().for_each(|v| *v = map[v.index()]);
            map[i] = ValueId(nodes.len() as u32);
            nodes.push(node);
        }
    }
    func.nodes = nodes;
    for v in func.inputs.iter_mut().chain(&mut func.outputs) {
        *v = map[v.index()];
    }
    true
}

fn drop_params(module: &mut Module) -> bool {
    let mut used = vec![false; module.params.len()];
    for func in &module.functions {
        func.params.iter().for_each(|p| used[p.index()] = true);
        for node in &func.nodes {
            match &node.op {
                Op::Param(p) => used[p.index()] = true,
                Op::Call { params, .. } => params.iter().for_each(|p| used[p.index()] = true),
                _ => {}
            }
        }
    }
    if used.iter().all(|u| *u) {
        return false;
    }
    let mut map = vec![ParamId(u32::MAX); used.len()];
    let mut params = Vec::new();
    for (i, param) in std::mem::take(&mut module.params).into_iter().enumerate() {
        if used[i] {
            map[i] = ParamId(params.len() as u32);
            params.push(param);
        }
    }
    module.params = params;
    for func in &mut module.functions {
        func.params.iter_mut().for_each(|p| *p = map[p.index()]);
        for node in &mut func.nodes {
            match &mut node.op {
                Op::Param(p) => *p = map[p.index()],
                Op::Call { params, .. } => params.iter_mut().for_each(|p| *p = map[p.index()]),
                _ => {}
            }
        }
    }
    true
}
