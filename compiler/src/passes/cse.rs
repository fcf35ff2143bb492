//! Common subexpressions: two pure nodes with equal op, operands and type become one.
//!
//! Needs nothing; promises that equal values have one name (fusion passes compare names). Writes of state and calls are left alone,
//! and two readings of state are equal only if neither stands between them.

use super::rewrite::rewrite;
use super::{Broken, PassCx};
use rcompile_graph::{FuncId, Module, Op, ValueId};
use std::collections::HashMap;

/// Runs the pass.
pub fn run(module: &mut Module, _cx: &mut PassCx) -> Result<bool, Broken> {
    let mut duplicates = 0;
    for func in 0..module.functions.len() {
        // Keyed by text: ops hold floats, and order of insertion decides, never order of the map.
        let mut seen: HashMap<String, ValueId> = HashMap::new();
        let mut writes = 0;
        rewrite(module, FuncId(func as u32), |rw, f, id| {
            let node = f.node(id);
            if !node.op.is_pure() {
                writes += usize::from(!matches!(node.op, Op::Input { .. }));
                return Ok(None);
            }
            let read = if matches!(node.op, Op::Sdpa { .. }) { writes } else { 0 };
            let inputs: Vec<ValueId> = node.inputs.iter().map(|i| rw.map(*i)).collect();
            let key = format!("{:?} {:?} {:?} {read}", node.op, inputs, node.ty);
            if let Some(first) = seen.get(&key) {
                duplicates += 1;
                return Ok(Some(*first));
            }
            let new = rw.add(node.op.clone(), &inputs, Some(node.ty.clone()))?;
            seen.insert(key, new);
            // A copy, not a change.
            Ok(Some(new))
        })?;
    }
    Ok(duplicates > 0)
}
