//! Barriers: threads meet only where one needs what another has written (or would overwrite what another still reads).
//!
//! In: a program with addresses and no barriers. Out: the same with the fewest barriers that a walk in order gives. Resources are byte
//! ranges of the arena, the state, the output, and the counters of claims (one kernel at a time uses them). Inside a region threads write
//! disjoint parts; two regions split their work differently, so any conflict between them since the last barrier needs one. A loop body is
//! checked against its own next iteration.

use rcompile_codegen::program::{Exprs, Item, Kernel, LoopNest, Operand, Place, Program, StageKind, Store};

#[derive(Clone, Copy, PartialEq)]
enum Resource {
    Arena(u64, u64),
    State,
    Output,
    /// The counters of what kernels share out while they work.
    Claims,
}

#[derive(Clone, Default)]
struct Access {
    reads: Vec<Resource>,
    writes: Vec<Resource>,
}

impl Access {
    fn conflicts(&self, later: &Access) -> bool {
        let hit = |a: &[Resource], b: &[Resource]| a.iter().any(|x| b.iter().any(|y| overlap(*x, *y)));
        hit(&self.writes, &later.reads) || hit(&self.writes, &later.writes) || hit(&self.reads, &later.writes)
    }
    fn extend(&mut self, other: &Access) {
        self.reads.extend(&other.reads);
        self.writes.extend(&other.writes);
    }
}

fn overlap(a: Resource, b: Resource) -> bool {
    match (a, b) {
        (Resource::Arena(s, e), Resource::Arena(t, f)) => s < f && t < e,
        _ => a == b,
    }
}

fn resource(program: &Program, operand: &Operand) -> Option<Resource> {
    match &operand.place {
        Place::Buffer(b) => {
            let b = &program.buffers[b.index()];
            Some(Resource::Arena(b.offset, b.offset + u64::from(b.rows) * u64::from(b.stride) * b.dtype.size()))
        }
        Place::State(_) => Some(Resource::State),
        Place::Output => Some(Resource::Output),
        Place::Weight(_) | Place::Private(_) | Place::Table(_) => None,
    }
}

fn expressions(program: &Program, operands: &[Operand], exprs: &Exprs, stores: &[Store], access: &mut Access) {
    for expr in exprs.nodes() {
        if let rcompile_codegen::program::Expr::Load(o, _) = expr {
            access.reads.extend(resource(program, &operands[o.index()]));
        }
    }
    for store in stores {
        access.writes.extend(resource(program, &operands[store.operand.index()]));
    }
}

fn nest(program: &Program, n: &LoopNest, access: &mut Access) {
    let stores: Vec<Store> = n.stages.iter().flat_map(|s| if let StageKind::Store(v) = &s.kind { v.clone() } else { vec![] }).collect();
    expressions(program, &n.operands, &n.exprs, &stores, access);
}

fn access(program: &Program, kernel: &Kernel) -> Access {
    let mut access = Access::default();
    if kernel.shares_out() {
        access.writes.push(Resource::Claims);
    }
    match kernel {
        Kernel::Loops(n) => nest(program, n, &mut access),
        Kernel::Matmul(m) => {
            access.reads.extend(resource(program, &m.a));
            access.reads.extend(m.quantise.iter().flat_map(|q| resource(program, &q.x)));
            expressions(program, &m.operands, &m.exprs, &m.stores, &mut access);
            m.nests().for_each(|n| nest(program, n, &mut access));
        }
        Kernel::Quantise(q) => {
            access.reads.extend(resource(program, &q.x));
            access.writes.extend(resource(program, &q.out));
        }
        Kernel::Attention(a) => {
            access.reads.extend(resource(program, &a.q));
            access.reads.push(Resource::State);
            access.writes.extend(resource(program, &a.out));
        }
    }
    access
}

/// Inserts barriers.
pub fn insert(program: &mut Program) {
    let body = std::mem::take(&mut program.body);
    let mut open = Access::default();
    program.body = walk(program, body, &mut open);
}

/// Adds barriers to a list; `open` is what happened since the last barrier before it, and after it.
fn walk(program: &Program, items: Vec<Item>, open: &mut Access) -> Vec<Item> {
    let mut out = Vec::new();
    for item in items {
        match item {
            Item::Region(r) => {
                let next = access(program, &program.regions[r.index()].kernel);
                if open.conflicts(&next) {
                    out.push(Item::Barrier);
                    *open = Access::default();
                }
                open.extend(&next);
                out.push(Item::Region(r));
            }
            Item::Layers { count, body } => {
                // Enter with nothing open, so that the first iteration is like the others.
                let mut inside = Access::default();
                let mut body = walk(program, body, &mut inside);
                let head = head(program, &body);
                if inside.conflicts(&head) {
                    body.push(Item::Barrier);
                    inside = Access::default();
                }
                if open.conflicts(&head) {
                    out.push(Item::Barrier);
                    *open = Access::default();
                }
                if body.contains(&Item::Barrier) {
                    *open = inside;
                } else {
                    open.extend(&inside);
                }
                out.push(Item::Layers { count, body });
            }
            Item::Barrier => {}
        }
    }
    out
}

/// What a body does before its first barrier.
fn head(program: &Program, body: &[Item]) -> Access {
    let mut access = Access::default();
    for item in body {
        match item {
            Item::Region(r) => access.extend(&self::access(program, &program.regions[r.index()].kernel)),
            _ => break,
        }
    }
    access
}

/// Barriers in one iteration of the first layer loop, divided by the `period` layers that it holds; rounded up.
pub fn per_layer(program: &Program, period: u32) -> u32 {
    let count = |body: &[Item]| body.iter().filter(|i| **i == Item::Barrier).count() as u32;
    let barriers = program.body.iter().find_map(|i| if let Item::Layers { body, .. } = i { Some(count(body)) } else { None });
    barriers.map_or(0, |n| n.div_ceil(period))
}
