//! Order: what threads must not do before others have done something else, within a region and between two.

use super::Verifier;
use crate::program::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

impl Verifier<'_> {
    pub(super) fn body(&mut self) {
        let p = self.program;
        let mut executed = BTreeSet::new();
        let mut open = vec![];
        for item in &p.body {
            match item {
                Item::Layers { count, body } => {
                    self.check(*count > 0 && !body.is_empty(), || "empty layer loop".into());
                    // Twice: the end of one layer meets the beginning of the next.
                    for _ in 0..2 {
                        for item in body {
                            self.check(!matches!(item, Item::Layers { .. }), || "nested layer loops".into());
                            self.item(item, &mut executed, &mut open);
                        }
                    }
                }
                item => self.item(item, &mut executed, &mut open),
            }
        }
        for (i, region) in p.regions.iter().enumerate() {
            self.check(executed.contains(&(i as u32)), || format!("r{i} {} is never executed", region.name));
        }
        for region in &p.regions {
            self.own_reads(region);
        }
        self.errors.dedup();
    }

    /// `open`: regions since the last barrier.
    fn item(&mut self, item: &Item, executed: &mut BTreeSet<u32>, open: &mut Vec<u32>) {
        match item {
            Item::Barrier => open.clear(),
            Item::Layers { .. } => {}
            Item::Region(id) => {
                let Some(region) = self.program.regions.get(id.index()) else {
                    return self.fail(format!("r{} does not exist", id.0));
                };
                executed.insert(id.0);
                for earlier in open.clone() {
                    let other = &self.program.regions[earlier as usize];
                    if let Some(what) = self.conflict(other, region, earlier == id.0) {
                        let message = format!("no barrier between r{earlier} {} and r{} {}: {what}", other.name, id.0, region.name);
                        if !self.errors.iter().any(|e| e.ends_with(&message)) {
                            self.fail(message);
                        }
                    }
                }
                open.push(id.0);
            }
        }
    }

    /// What `b` must not do before all threads have done `a`. A region that runs again (`same`, for the next layer) has the same shares, so
    /// that what a thread writes, no other has written, unless work is shared out.
    fn conflict(&self, a: &Region, b: &Region, same: bool) -> Option<String> {
        if a.kernel.shares_out() && b.kernel.shares_out() {
            return Some("both share out work by the same counters".into());
        }
        let (a, b) = (self.touched(&a.kernel.accesses()), self.touched(&b.kernel.accesses()));
        for (name, memory) in &a.writes {
            for (other, overlapped) in b.reads.iter().chain(b.writes.iter().filter(|(n, _)| !(same && *n == name))) {
                if overlap(memory, overlapped) {
                    return Some(format!("{name} is written, then {other} used"));
                }
            }
        }
        for (name, memory) in &a.reads {
            if let Some((other, _)) = b.writes.iter().find(|(_, w)| overlap(memory, w)) {
                return Some(format!("{name} is read, then {other} written"));
            }
        }
        None
    }

    /// What a region overwrites it may read only where its thread is about to write: the shares of threads have no order.
    fn own_reads(&mut self, region: &Region) {
        let (writes, reads): (Vec<Access>, Vec<Access>) = region.kernel.accesses().into_iter().partition(|access| access.writes);
        for read in &reads {
            let Some((name, memory)) = self.stretch(read.area) else { continue };
            for write in &writes {
                let Some((other, overwritten)) = self.stretch(write.area) else { continue };
                let ordered = read.area == write.area && self.ordered(&region.kernel, read.at, write.at);
                if overlap(&memory, &overwritten) && !ordered {
                    self.fail(format!("{} reads {name} elsewhere than it writes {other}", region.name));
                }
            }
        }
    }

    /// Of two accesses to one buffer: does a thread read only what it alone writes, at a time that does not depend on the order of elements?
    fn ordered(&self, kernel: &Kernel, read: At, write: At) -> bool {
        match (read, write) {
            (At::Unit, _) => true,
            (At::Index(read), At::Index(write)) => {
                read == write || matches!(kernel, Kernel::Loops(nest) if self.same_iteration(nest, read, write).is_some())
            }
            _ => false,
        }
    }

    /// Are two elements of one buffer touched together only by one iteration of the outer loops, and there in stages of their own or in
    /// columns of their own? Iterations are apart where the outer variables step over more than what the inner ones span.
    fn same_iteration(&self, nest: &LoopNest, read: ExprId, write: ExprId) -> Option<()> {
        let (read, write) = (affine(&nest.exprs, read)?, affine(&nest.exprs, write)?);
        let mut outer: Vec<(i64, i64)> = Vec::new();
        for (var, extent) in &nest.outer {
            let step = read.step(*var);
            (step == write.step(*var)).then_some(())?;
            outer.push((step, self.extent(*extent) - 1));
        }
        let (from, to) = (columns(nest, &read)?, columns(nest, &write)?);
        let apart = from.range.end <= to.range.start || to.range.end <= from.range.start;
        let in_own_stages = matches!((from.stage, to.stage), (Some(a), Some(b)) if a != b);
        (apart || in_own_stages).then_some(())?;
        outer.retain(|(_, last)| *last > 0);
        outer.sort_unstable();
        let mut span = from.range.end.max(to.range.end) - from.range.start.min(to.range.start);
        for (step, last) in outer {
            (step >= span).then_some(())?;
            span += step * last;
        }
        Some(())
    }

    fn touched<'k>(&self, accesses: impl IntoIterator<Item = &'k Access>) -> Touched {
        let mut touched = Touched::default();
        for access in accesses {
            if let Some((name, stretch)) = self.stretch(access.area) {
                if access.writes { &mut touched.writes } else { &mut touched.reads }.insert(name, stretch);
            }
        }
        touched
    }

    /// Memory that threads share and that is written, with its name.
    fn stretch(&self, area: Area) -> Option<(String, Stretch)> {
        match area {
            Area::Buffer(id) => {
                let b = self.program.buffers.get(id.index())?;
                Some((format!("b{} {}", id.0, b.name), Stretch::Arena(b.offset..b.offset + b.bytes())))
            }
            Area::State => Some(("state".to_string(), Stretch::State)),
            Area::Output => Some(("output".to_string(), Stretch::Output)),
            Area::Weight(_) | Area::Table | Area::Private => None,
        }
    }
}

/// Memory that a region uses, by name.
#[derive(Default)]
struct Touched {
    reads: BTreeMap<String, Stretch>,
    writes: BTreeMap<String, Stretch>,
}

#[derive(Clone, PartialEq)]
enum Stretch {
    Arena(Range<u64>),
    State,
    Output,
}

fn overlap(a: &Stretch, b: &Stretch) -> bool {
    match (a, b) {
        (Stretch::Arena(x), Stretch::Arena(y)) => x.start < y.end && y.start < x.end,
        _ => a == b,
    }
}

/// What an index spans within one iteration of the outer loops, and the variable of its stage.
struct Columns {
    range: Range<i64>,
    stage: Option<VarId>,
}

/// The columns of an index with at most one variable that is none of the outer ones: that of a stage. (That of a fold runs again for each
/// element of a stage.)
fn columns(nest: &LoopNest, index: &Affine) -> Option<Columns> {
    let is_outer = |var: &VarId| nest.outer.iter().any(|(outer, _)| outer == var);
    let mut inner = index.steps.iter().filter(|(var, _)| !is_outer(var));
    let Some((var, step)) = inner.next() else {
        return Some(Columns { range: index.constant..index.constant + 1, stage: None });
    };
    let stage = nest.stages.iter().find(|stage| stage.var == *var)?;
    let ends = [i64::from(stage.range.start), i64::from(stage.range.end) - 1].map(|end| index.constant + end * step);
    let range = ends[0].min(ends[1])..ends[0].max(ends[1]) + 1;
    inner.next().is_none().then_some(Columns { range, stage: Some(*var) })
}

/// `constant` and so many elements further for each step of a variable.
struct Affine {
    constant: i64,
    steps: BTreeMap<VarId, i64>,
}

impl Affine {
    fn step(&self, var: VarId) -> i64 {
        self.steps.get(&var).copied().unwrap_or(0)
    }

    /// `self + factor * other`.
    fn plus(mut self, factor: i64, other: &Affine) -> Option<Self> {
        self.constant = self.constant.checked_add(factor.checked_mul(other.constant)?)?;
        for (var, step) in &other.steps {
            let sum = self.step(*var).checked_add(factor.checked_mul(*step)?)?;
            self.steps.insert(*var, sum);
        }
        Some(self)
    }
}

/// An index that is a sum of variables times constants.
fn affine(exprs: &Exprs, index: ExprId) -> Option<Affine> {
    let zero = || Affine { constant: 0, steps: BTreeMap::new() };
    match exprs.get(index) {
        Expr::Int(constant) => Some(Affine { constant, ..zero() }),
        Expr::Var(var) => Some(Affine { steps: BTreeMap::from([(var, 1)]), ..zero() }),
        Expr::Binary(BinaryOp::Add, a, b) => affine(exprs, a)?.plus(1, &affine(exprs, b)?),
        Expr::Binary(BinaryOp::Sub, a, b) => affine(exprs, a)?.plus(-1, &affine(exprs, b)?),
        Expr::Binary(BinaryOp::Mul, a, b) => match (affine(exprs, a)?, affine(exprs, b)?) {
            (factor, sum) | (sum, factor) if factor.steps.is_empty() => zero().plus(factor.constant, &sum),
            _ => None,
        },
        _ => None,
    }
}
