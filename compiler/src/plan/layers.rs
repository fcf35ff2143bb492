//! Planning layers: calls of outlined functions become loops over layers, each distinct function planned once.
//!
//! A chain of calls that feed one another is cut into runs with the smallest period (all layers equal: period 1; windowed and full
//! layers in turn: period 2). The value that goes through is overwritten in place where nothing needs it any more; everything else that
//! calls share is stored before.

use super::frame::{Cols, Frame, Home};
use super::{Plan, PlanError};
use rcompile_codegen::program::{Access, Area, At, BufferId, Item, Kernel};
use rcompile_graph as g;
use rcompile_graph::{Op, ParamId, StateId, ValueId};
use std::collections::{HashMap, HashSet};

impl Plan<'_> {
    /// Calls of outlined layers, from `first` on: loops over runs of equal (or periodic) callees.
    pub(super) fn calls(&mut self, frame: &mut Frame<'_>, first: ValueId, done: &mut HashSet<ValueId>) -> Result<(), PlanError> {
        let chain = call_chain(frame, first);
        if chain.len() == 1 {
            return self.single_call(frame, first);
        }
        let (x_in, x_place) = carried_operand(frame, &chain);
        self.store(frame, x_in)?;
        let x_home = match frame.homes.get(&x_in) {
            Some(home @ Home::Buffer { cols: Cols::Plain, .. })
                if frame.users[x_in.index()].len() == 1 && !frame.func.outputs.contains(&x_in) =>
            {
                home.clone()
            }
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
            if self.weights.enter_layers() == 1 {
                self.period = period as u32;
            }
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
                let mut homes = Vec::new();
                for (place, v) in node.inputs.iter().enumerate() {
                    homes.push(if place == x_place {
                        x_home.clone()
                    } else {
                        // Operands of all calls are the same (see `call_chain`); stored before the loop.
                        let inner_body = std::mem::take(&mut self.body);
                        self.in_layers = false;
                        self.store(frame, *v)?;
                        self.in_layers = true;
                        self.before_layers.append(&mut std::mem::replace(&mut self.body, inner_body));
                        frame.homes[v].clone()
                    });
                }
                let callee = || {
                    let mut callee = Frame::callee(module, func, &lists);
                    callee.homes.extend(func.inputs.iter().copied().zip(homes.iter().cloned()));
                    callee
                };
                self.layer(&callee, func.outputs[0], &x_home)?;
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

    /// A call that feeds no other (the last layer may end early, where only some rows are wanted): its result has a place of its own.
    fn single_call(&mut self, frame: &mut Frame<'_>, id: ValueId) -> Result<(), PlanError> {
        let node = frame.func.node(id).clone();
        let Op::Call { func, ref params, ref states } = node.op else { return Err(PlanError::Internal("call of nothing".into())) };
        let module = frame.module;
        let func = &module.functions[func.index()];
        let mut callee = Frame::callee(module, func, &[(params, states)]);
        for (place, v) in node.inputs.iter().enumerate() {
            self.store(frame, *v)?;
            callee.homes.insert(func.inputs[place], frame.homes[v].clone());
        }
        let home = self.buffer(frame, id, "layer", self.row_width(frame, id), Cols::Plain)?;
        let outer_body = std::mem::take(&mut self.body);
        let saved = std::mem::replace(&mut self.forced, HashMap::from([(func.outputs[0], home.clone())]));
        self.in_layers = true;
        self.weights.enter_layers();
        self.function(&mut callee)?;
        self.in_layers = false;
        self.forced = saved;
        let body = std::mem::replace(&mut self.body, outer_body);
        self.body.push(Item::Layers { count: 1, body });
        frame.homes.insert(id, home);
        Ok(())
    }

    /// Plans one layer. Its result overwrites its input, unless something still needs the input then.
    fn layer<'m>(&mut self, callee: &dyn Fn() -> Frame<'m>, result: ValueId, x_home: &Home) -> Result<(), PlanError> {
        let Home::Buffer { id: x, .. } = *x_home else { return Err(PlanError::Internal("what goes through layers has no buffer".into())) };
        let (regions, buffers, body) = (self.program.regions.len(), self.program.buffers.len(), self.body.len());
        let (weights, private_bytes) = (self.weights.len(), self.program.private_bytes);
        let saved = std::mem::replace(&mut self.forced, HashMap::from([(result, x_home.clone())]));
        self.function(&mut callee())?;
        if overwrites_too_early(self.program.regions[regions..].iter().map(|r| &r.kernel), x) {
            self.program.regions.truncate(regions);
            self.program.buffers.truncate(buffers);
            self.program.private_bytes = private_bytes;
            self.body.truncate(body);
            self.weights.truncate(weights);
            let mut frame = callee();
            let home = self.new_buffer(&frame, result, "result", self.row_width(&frame, result), Cols::Plain)?;
            self.forced = HashMap::from([(result, home)]);
            self.function(&mut frame)?;
            let nest = self.retry(&mut frame, |plan, frame| plan.value_nest(frame, result, x_home))?;
            self.region("copy", Kernel::Loops(nest));
        }
        self.forced = saved;
        Ok(())
    }
}

/// Does a kernel of a layer read `x` after it was overwritten, or elsewhere than where it writes while it overwrites it?
fn overwrites_too_early<'k>(kernels: impl Iterator<Item = &'k Kernel>, x: BufferId) -> bool {
    let mut overwritten = false;
    for kernel in kernels {
        let (stores, loads): (Vec<Access>, Vec<Access>) =
            kernel.accesses().into_iter().filter(|access| access.area == Area::Buffer(x)).partition(|access| access.writes);
        // What it loads at an index it may overwrite there.
        let elsewhere = |load: &Access| !matches!(load.at, At::Index(_)) || stores.iter().all(|store| store.at != load.at);
        if (overwritten && !loads.is_empty()) || (!stores.is_empty() && loads.iter().any(elsewhere)) {
            return true;
        }
        overwritten |= !stores.is_empty();
    }
    false
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
        let same_type = place.is_some_and(|p| frame.func.ty(a.inputs[p]) == &a.ty) && a.ty == b.ty;
        let carried = chain.len() == 1 || carried_operand(frame, &chain).1 == place.unwrap_or(usize::MAX);
        if !same || !same_type || !carried {
            return chain;
        }
        chain.push(user);
    }
}

/// The operand that the next call replaces, and its place.
fn carried_operand(frame: &Frame<'_>, chain: &[ValueId]) -> (ValueId, usize) {
    let first = frame.func.node(chain[0]);
    let place = chain.get(1).and_then(|second| frame.func.node(*second).inputs.iter().position(|v| *v == chain[0])).unwrap_or(0);
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
