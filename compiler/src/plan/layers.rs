//! Planning layers: calls of outlined functions become loops over layers, each distinct function planned once.
//!
//! A chain of calls that feed one another is cut into runs with the smallest period (all layers equal: period 1; windowed and full
//! layers in turn: period 2). The value that goes through is overwritten in place; everything else that calls share is stored before.

use super::lower::{Cols, Frame, Home};
use super::{Plan, PlanError};
use rcompile_codegen::program::{Item, Kernel};
use rcompile_graph as g;
use rcompile_graph::{Op, ParamId, StateId, ValueId};
use std::collections::HashSet;

impl Plan<'_> {
    /// Calls of outlined layers, from `first` on: loops over runs of equal (or periodic) callees.
    pub(super) fn calls(&mut self, frame: &mut Frame<'_>, first: ValueId, done: &mut HashSet<ValueId>) -> Result<(), PlanError> {
        let chain = call_chain(frame, first);
        let (x_in, x_place) = carried_operand(frame, &chain);
        self.store(frame, x_in)?;
        let x_home = match frame.homes.get(&x_in) {
            Some(home @ Home::Buffer { cols: Cols::Plain, .. }) if frame.users[x_in.index()].len() == 1 => home.clone(),
            _ => {
                // The loop overwrites its input: a copy of its own.
                let home = self.new_buffer(frame, x_in, "x", self.row_width(frame, x_in), Cols::Plain)?;
                let nest = self.retry(frame, |plan, frame| plan.value_nest(frame, x_in, &home))?;
                self.region("copy", Kernel::Loops(nest));
                home
            }
        };
        let module = frame.module;
        let mut at = 0;
        while at < chain.len() {
            let callees: Vec<_> = chain[at..].iter().map(|c| g::build::callee(&frame.func.node(*c).op)).collect();
            let (period, count) = period(&callees);
            let outer_body = std::mem::take(&mut self.body);
            self.in_layers = true;
            self.layers += 1;
            for j in 0..period {
                let calls: Vec<ValueId> = (0..count).map(|layer| chain[at + layer * period + j]).collect();
                let node = frame.func.node(calls[0]).clone();
                let Some(func) = g::build::callee(&node.op).map(|f| &module.functions[f.index()]) else {
                    return Err(PlanError::Internal("call of nothing".into()));
                };
                let lists: Vec<(&[ParamId], &[StateId])> = calls
                    .iter()
                    .map(|c| match &frame.func.node(*c).op {
                        Op::Call { params, states, .. } => (&params[..], &states[..]),
                        _ => (&[][..], &[][..]),
                    })
                    .collect();
                let mut callee = Frame::callee(module, func, &lists);
                for (place, v) in node.inputs.iter().enumerate() {
                    let home = if place == x_place {
                        x_home.clone()
                    } else {
                        // Operands of all calls are the same (see `call_chain`); stored before the loop.
                        let inner_body = std::mem::take(&mut self.body);
                        self.in_layers = false;
                        self.store(frame, *v)?;
                        self.in_layers = true;
                        self.before_layers.append(&mut std::mem::replace(&mut self.body, inner_body));
                        frame.homes[v].clone()
                    };
                    callee.homes.insert(func.inputs[place], home);
                }
                let saved = std::mem::take(&mut self.forced);
                self.forced.insert(func.outputs[0], x_home.clone());
                self.function(&mut callee)?;
                self.forced = saved;
            }
            self.in_layers = false;
            let layers = std::mem::replace(&mut self.body, outer_body);
            let mut before = std::mem::take(&mut self.before_layers);
            self.body.append(&mut before);
            self.body.push(Item::Layers { count: count as u32, body: layers });
            at += period * count;
        }
        for call in &chain {
            done.insert(*call);
        }
        frame.homes.insert(chain[chain.len() - 1], x_home);
        Ok(())
    }
}

/// Calls that feed one another and share all other operands.
fn call_chain(frame: &Frame<'_>, first: ValueId) -> Vec<ValueId> {
    let mut chain = vec![first];
    loop {
        let last = chain[chain.len() - 1];
        let [user] = frame.users[last.index()][..] else { return chain };
        let (a, b) = (frame.func.node(last), frame.func.node(user));
        if !matches!(b.op, Op::Call { .. }) || frame.func.outputs.contains(&last) || a.inputs.len() != b.inputs.len() {
            return chain;
        }
        let place = b.inputs.iter().position(|v| *v == last);
        let same = a.inputs.iter().zip(&b.inputs).enumerate().all(|(i, (x, y))| Some(i) == place || x == y);
        let carried = chain.len() == 1 || carried_operand(frame, &chain).1 == place.unwrap_or(usize::MAX);
        if !same || !carried {
            return chain;
        }
        chain.push(user);
    }
}

/// The operand that the next call replaces, and its place; for a single call, the first of the result's type.
fn carried_operand(frame: &Frame<'_>, chain: &[ValueId]) -> (ValueId, usize) {
    let first = frame.func.node(chain[0]);
    let place = match chain.get(1) {
        Some(second) => frame.func.node(*second).inputs.iter().position(|v| *v == chain[0]),
        None => first.inputs.iter().position(|v| frame.func.ty(*v) == &first.ty),
    }
    .unwrap_or(0);
    (first.inputs[place], place)
}

/// Smallest period (at most 8) that repeats most at the start, and how often.
fn period<T: PartialEq>(list: &[T]) -> (usize, usize) {
    let mut best = (1, 1);
    for p in 1..=8.min(list.len()) {
        let mut count = 1;
        while (count + 1) * p <= list.len() && list[count * p..(count + 1) * p] == list[..p] {
            count += 1;
        }
        if (count > 1 || p == 1) && p * count > best.0 * best.1 {
            best = (p, count);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::period;

    #[test]
    fn periods() {
        assert_eq!(period(&[1, 1, 1, 1]), (1, 4));
        assert_eq!(period(&[1, 2, 1, 2, 1]), (2, 2));
        assert_eq!(period(&[1, 2, 3]), (1, 1));
        assert_eq!(period(&[1, 1, 2, 2]), (1, 2));
    }
}
