//! General loop nests: everything that is neither a matmul nor an attention, and the prologues and group nests of matmuls.
//!
//! ```text
//! for outer in share(product of extents) {          // contiguous per thread
//!   for stage { for var in range step lanes { reduce or store } }
//! }
//! ```
//! Reductions have up to four accumulators: vector number i of the range goes to accumulator i % 4; they are combined as
//! (a0 + a1) + (a2 + a3), then halves of the vector against each other. The order depends on range and vector width only.

use super::{Call, define_kernel};
use crate::expr::{Eval, Point, Scope, combine, gcd, identity};
use crate::llvm::builder::{Fb, Function, ModuleBuilder, Value};
use crate::program::{ExprId, LoopNest, Program, Stage, StageKind};

/// Vectors of a stage that are written out one after the other instead of as a loop.
const STRAIGHT_VECTORS: u32 = 4;
/// Accumulators of a reduction.
const ACCUMULATORS: u32 = 4;

/// The kernel of a loop nest.
pub fn define<'c>(mb: &ModuleBuilder<'c>, program: &Program, symbol: &str, nest: &LoopNest) -> Function<'c> {
    define_kernel(mb, program, symbol, |call| {
        let fb = call.fb;
        let mut scope = bind(call, nest);
        let extents: Vec<Value> = nest.outer.iter().map(|(_, extent)| call.extent(*extent)).collect();
        let total = extents.iter().fold(fb.int(1), |product, e| fb.mul(product, *e));
        let (begin, end) = call.share(total);
        fb.for_(begin, end, 1, |i| {
            let mut rest = i;
            let mut values = vec![fb.int(0); extents.len()];
            for (n, extent) in extents.iter().enumerate().skip(1).rev() {
                values[n] = fb.rem(rest, *extent);
                rest = fb.div(rest, *extent);
            }
            if let Some(outermost) = values.first_mut() {
                *outermost = rest;
            }
            body(fb, nest, &mut scope, &values);
        });
    })
}

/// Resolves a nest's operands at the builder's position.
pub fn bind<'a, 'c>(call: &Call<'_, '_, 'c>, nest: &'a LoopNest) -> Scope<'a, 'c> {
    call.scope(&nest.operands, &nest.exprs)
}

/// All stages for given values of the outer variables (i64).
pub fn body<'c>(fb: &Fb<'_, 'c>, nest: &LoopNest, scope: &mut Scope<'_, 'c>, outer: &[Value<'c>]) {
    assert_eq!(nest.outer.len(), outer.len(), "outer variables");
    for ((var, _), value) in nest.outer.iter().zip(outer) {
        scope.set(*var, *value);
    }
    for stage in &nest.stages {
        match &stage.kind {
            StageKind::Reduce { op, value, into } => {
                let accumulators = (stage.range.len() as u32).div_ceil(fb.lanes()).clamp(1, ACCUMULATORS);
                let first = vec![fb.f32s(identity(*op), fb.lanes()); accumulators as usize];
                let mut sums = walk(fb, scope, stage, &[*value], accumulators, &first, |eval, active, n, sums| {
                    let v = eval.float(*value);
                    let v = if active < fb.lanes() { fb.select(eval.prefix(), v, fb.f32s(identity(*op), fb.lanes())) } else { v };
                    let n = (n % accumulators) as usize;
                    sums[n] = combine(fb, *op, sums[n], v);
                });
                while sums.len() > 1 {
                    sums = sums.chunks(2).map(|pair| if let [a, b] = *pair { combine(fb, *op, a, b) } else { pair[0] }).collect();
                }
                let total = fb.reduce(sums[0], |a, b| combine(fb, *op, a, b));
                scope.scalars.insert(*into, total);
            }
            StageKind::Store(stores) => {
                let roots: Vec<ExprId> = stores.iter().flat_map(|s| [s.index, s.value]).collect();
                walk(fb, scope, stage, &roots, 1, &[], |eval, _, _, _| eval.store(stores));
            }
        }
    }
}

/// Walks a stage's range in vectors: `step(eval at the vector, active lanes, number of the vector modulo unroll, carried)`.
fn walk<'s, 'm, 'c>(
    fb: &'s Fb<'m, 'c>,
    scope: &'s Scope<'s, 'c>,
    stage: &Stage,
    roots: &[ExprId],
    unroll: u32,
    carried: &[Value<'c>],
    mut step: impl FnMut(&Eval<'s, 'm, 'c>, u32, u32, &mut Vec<Value<'c>>),
) -> Vec<Value<'c>> {
    let lanes = fb.lanes();
    let (begin, length) = (stage.range.start, stage.range.len() as u32);
    let (vectors, tail) = (length / lanes, length % lanes);
    let point = |first: Value<'c>, divisor: u64, active: u32| Point {
        var: Some(stage.var),
        first,
        divisor,
        lanes,
        active,
        acc: vec![],
        score: None,
    };
    let at = |n: u32| u64::from(begin) + u64::from(n) * u64::from(lanes);
    let constant = |n: u32, active: u32| point(fb.int(at(n) as i64), at(n), active);
    let mut carried = carried.to_vec();
    if length == 0 {
        return carried;
    }
    let outside = Eval::new(fb, scope, constant(0, lanes));
    outside.hoist(roots);
    let looped = if vectors <= STRAIGHT_VECTORS.max(unroll) { 0 } else { vectors / unroll * unroll };
    if looped > 0 {
        let (from, to) = (fb.int(at(0) as i64), fb.int(at(looped) as i64));
        carried = fb.loop_(from, to, (unroll * lanes).into(), &carried, |i, inside| {
            let mut inside = inside.to_vec();
            for n in 0..unroll {
                let first = if n == 0 { i } else { fb.add_int(i, (n * lanes).into()) };
                // The vector's first element is begin plus a multiple of lanes.
                let divisor = gcd(begin.into(), lanes.into());
                step(&outside.at(point(first, divisor, lanes)), lanes, n, &mut inside);
            }
            inside
        });
    }
    for n in looped..vectors {
        step(&outside.at(constant(n, lanes)), lanes, n - looped, &mut carried);
    }
    if tail > 0 {
        step(&outside.at(constant(vectors, tail)), tail, vectors - looped, &mut carried);
    }
    carried
}
