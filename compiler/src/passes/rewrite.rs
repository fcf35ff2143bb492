//! Rebuilding a function node by node: the one way in which passes change graphs.
//!
//! In: a function and a rule. Out: the function with every node either copied (operands mapped) or replaced by what the rule built.
//! Types of new nodes are inferred and checked; nodes without users stay until `dce`.

use super::Broken;
use rcompile_graph::infer;
use rcompile_graph::{Binary, FuncId, Function, Module, Node, Op, Type, ValueId};

/// The function under construction.
pub struct Rewriter<'m> {
    /// The module without the function's body.
    pub module: &'m mut Module,
    nodes: Vec<Node>,
    map: Vec<ValueId>,
    origin: String,
}

impl Rewriter<'_> {
    /// New value of an old one that was visited already.
    pub fn map(&self, old: ValueId) -> ValueId {
        self.map[old.index()]
    }
    /// New node.
    pub fn node(&self, id: ValueId) -> &Node {
        &self.nodes[id.index()]
    }
    /// Adds a checked node with the origin of the node that is being rewritten.
    pub fn add(&mut self, op: Op, inputs: &[ValueId], declared: Option<Type>) -> Result<ValueId, Broken> {
        let types: Vec<&Type> = inputs.iter().map(|i| &self.nodes[i.index()].ty).collect();
        let ty = infer(self.module, &op, &types, declared.as_ref()).map_err(|e| Broken(format!("{}: {e}", self.origin)))?;
        self.nodes.push(Node { op, inputs: inputs.to_vec(), ty, origin: self.origin.clone() });
        Ok(ValueId(self.nodes.len() as u32 - 1))
    }
}

/// Applies `rule` to every node of a function in order. The rule sees the old node and returns the new value that stands for it, or
/// `None` to have it copied. Returns how many nodes the rule replaced.
pub fn rewrite(
    module: &mut Module,
    func: FuncId,
    mut rule: impl FnMut(&mut Rewriter<'_>, &Function, ValueId) -> Result<Option<ValueId>, Broken>,
) -> Result<usize, Broken> {
    let old = std::mem::take(&mut module.functions[func.index()]);
    let mut rw =
        Rewriter { module, nodes: Vec::with_capacity(old.nodes.len()), map: Vec::with_capacity(old.nodes.len()), origin: String::new() };
    let mut replaced = 0;
    for id in old.ids() {
        let node = old.node(id);
        rw.origin.clone_from(&node.origin);
        let new = match rule(&mut rw, &old, id)? {
            Some(new) => {
                replaced += 1;
                new
            }
            None => {
                let inputs: Vec<ValueId> = node.inputs.iter().map(|i| rw.map(*i)).collect();
                rw.nodes.push(Node { inputs, ..node.clone() });
                ValueId(rw.nodes.len() as u32 - 1)
            }
        };
        rw.map.push(new);
    }
    let Rewriter { module, nodes, map, .. } = rw;
    let mapped = |ids: &[ValueId]| ids.iter().map(|i| map[i.index()]).collect();
    let new = Function { inputs: mapped(&old.inputs), outputs: mapped(&old.outputs), nodes, ..old };
    module.functions[func.index()] = new;
    Ok(replaced)
}

/// `rewrite` on every function.
pub fn rewrite_all(
    module: &mut Module,
    mut rule: impl FnMut(&mut Rewriter<'_>, &Function, ValueId) -> Result<Option<ValueId>, Broken>,
) -> Result<usize, Broken> {
    let mut replaced = 0;
    for func in 0..module.functions.len() {
        replaced += rewrite(module, FuncId(func as u32), &mut rule)?;
    }
    Ok(replaced)
}

/// Operands of a node, if it is this binary op.
pub fn binary(f: &Function, id: ValueId, op: Binary) -> Option<(ValueId, ValueId)> {
    let node = f.node(id);
    (node.op == Op::Binary(op)).then(|| (node.inputs[0], node.inputs[1]))
}

/// The constant that a node is, if it is one.
pub fn constant(f: &Function, id: ValueId) -> Option<f64> {
    match f.node(id).op {
        Op::Const(value) => Some(value),
        _ => None,
    }
}

/// What a norm may add under its root.
pub fn is_eps(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}
