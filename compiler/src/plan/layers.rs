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
use std::collections::HashMap;

/// Most loops over layers. Each has kernels of its own: real models have one or two, or one for each layer where a scale depends on it.
const LOOPS_MAX: usize = 128;

impl Plan<'_> {
    /// Calls of outlined layers, from `first` on: loops over runs of equal (or periodic) callees.
    pub(super) fn calls(&mut self, frame: &mut Frame<'_>, first: ValueId) -> Result<(), PlanError> {
        let chain = call_chain(frame, first);
        if chain.len() == 1 {
            return self.single_call(frame, first);
        }
        let (x_in, x_place) = carried_operand(frame, &chain);
        let x_home = self.overwritable(frame, x_in)?;
        // The other operands of all calls are the same, see `call_chain`.
        let mut operands = Vec::new();
        for (place, v) in frame.func.node(first).inputs.iter().enumerate() {
            operands.push(if place == x_place { x_home.clone() } else { self.home(frame, *v)? });
        }
        let mut at = 0;
        while at < chain.len() {
            let callees: Vec<_> = chain[at..].iter().map(|c| frame.func.node(*c).op.callee()).collect();
            let (period, count) = period(&callees);
            self.layer_loop(period, count, |plan| {
                for j in 0..period {
                    let calls: Vec<&Op> = (0..count).map(|layer| &frame.func.node(chain[at + layer * period + j]).op).collect();
                    plan.layer(&callee_frame(frame.module, &calls, &operands)?, &x_home)?;
                }
                Ok(())
            })?;
            at += period * count;
        }
        frame.done.extend(&chain);
        frame.homes.insert(chain[chain.len() - 1], x_home);
        Ok(())
    }

    /// A call that feeds no other (the last layer may end early, where only some rows are wanted): its result has a place of its own.
    fn single_call(&mut self, frame: &mut Frame<'_>, id: ValueId) -> Result<(), PlanError> {
        let node = frame.func.node(id);
        let mut operands = Vec::new();
        for v in &node.inputs {
            operands.push(self.home(frame, *v)?);
        }
        let mut callee = callee_frame(frame.module, &[&node.op], &operands)?;
        let home = self.buffer(frame, id, "layer", self.row_width(frame, id), Cols::Plain)?;
        self.layer_loop(1, 1, |plan| plan.function_into(&mut callee, &home))?;
        frame.homes.insert(id, home);
        Ok(())
    }

    /// A loop of `count` iterations of `period` layers; its body is what `plan` plans.
    fn layer_loop(&mut self, period: usize, count: usize, plan: impl FnOnce(&mut Self) -> Result<(), PlanError>) -> Result<(), PlanError> {
        if self.body.iter().filter(|item| matches!(item, Item::Layers { .. })).count() == LOOPS_MAX {
            return Err(PlanError::TooVaried(LOOPS_MAX));
        }
        let outer_body = std::mem::take(&mut self.body);
        self.in_layers = true;
        if self.weights.enter_layers() == 1 {
            self.period = period as u32;
        }
        plan(self)?;
        self.in_layers = false;
        let body = std::mem::replace(&mut self.body, outer_body);
        self.body.push(Item::Layers { count: count as u32, body });
        Ok(())
    }

    /// Plans one layer. Its result overwrites its input, unless something still needs the input then.
    fn layer(&mut self, callee: &Frame<'_>, x_home: &Home) -> Result<(), PlanError> {
        let Home::Buffer { id: x, .. } = *x_home else { return Err(PlanError::Internal("what goes through layers has no buffer".into())) };
        let before = self.mark();
        self.function_into(&mut callee.clone(), x_home)?;
        if overwrites_too_early(self.program.regions[before.regions..].iter().map(|r| &r.kernel), x) {
            self.rewind(&before);
            let (mut frame, result) = (callee.clone(), callee.func.outputs[0]);
            let home = self.new_buffer(&frame, result, "result", self.row_width(&frame, result), Cols::Plain)?;
            self.function_into(&mut frame, &home)?;
            self.copy(&mut frame, result, x_home)?;
        }
        Ok(())
    }

    /// Plans a function whose result is to lie in `home`.
    fn function_into(&mut self, frame: &mut Frame<'_>, home: &Home) -> Result<(), PlanError> {
        let outer = std::mem::replace(&mut self.forced, HashMap::from([(frame.func.outputs[0], home.clone())]));
        self.function(frame)?;
        self.forced = outer;
        Ok(())
    }

    /// Where a value lies that is to be overwritten: a copy, where somebody else needs it.
    fn overwritable(&mut self, frame: &mut Frame<'_>, v: ValueId) -> Result<Home, PlanError> {
        let home = self.home(frame, v)?;
        let is_last_use = frame.users[v.index()].len() == 1 && !frame.func.outputs.contains(&v);
        if is_last_use && matches!(home, Home::Buffer { cols: Cols::Plain, .. }) {
            return Ok(home);
        }
        let home = self.new_buffer(frame, v, "x", self.row_width(frame, v), Cols::Plain)?;
        self.copy(frame, v, &home)?;
        Ok(home)
    }

    fn mark(&self) -> Mark {
        Mark {
            regions: self.program.regions.len(),
            buffers: self.program.buffers.len(),
            private_bytes: self.program.private_bytes,
            body: self.body.len(),
            weights: self.weights.len(),
        }
    }

    /// Forgets what was planned since.
    fn rewind(&mut self, mark: &Mark) {
        self.program.regions.truncate(mark.regions);
        self.program.buffers.truncate(mark.buffers);
        self.program.private_bytes = mark.private_bytes;
        self.body.truncate(mark.body);
        self.weights.truncate(mark.weights);
    }
}

/// How far a plan was.
struct Mark {
    regions: usize,
    buffers: usize,
    private_bytes: u64,
    body: usize,
    weights: usize,
}

/// The function that `calls` of several layers call, with each layer's parameters, and its operands' places.
fn callee_frame<'m>(module: &'m g::Module, calls: &[&Op], operands: &[Home]) -> Result<Frame<'m>, PlanError> {
    let mut function = None;
    let mut lists: Vec<(&[ParamId], &[StateId])> = Vec::new();
    for call in calls {
        let Op::Call { func, params, states } = call else { return Err(PlanError::Internal("call of nothing".into())) };
        function = function.or(Some(&module.functions[func.index()]));
        lists.push((params, states));
    }
    let function = function.ok_or_else(|| PlanError::Internal("a layer that nothing calls".into()))?;
    // Its parameters would be the formal ones of this function, and not those of each of its calls.
    if function.nodes.iter().any(|node| matches!(node.op, Op::Call { .. })) {
        return Err(PlanError::Unsupported("a call in a function that is called".into()));
    }
    let mut frame = Frame::callee(module, function, &lists);
    debug_assert_eq!(function.inputs.len(), operands.len(), "operands of a call");
    frame.homes.extend(function.inputs.iter().copied().zip(operands.iter().cloned()));
    Ok(frame)
}

/// Does a kernel of a layer read `x` after an earlier one has overwritten it, or read other elements of it than it overwrites itself?
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
