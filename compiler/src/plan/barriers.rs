//! Barriers: threads meet only where one needs what another has written (or would overwrite what another still reads).
//!
//! In: a program with addresses and no barriers. Out: the same with the fewest barriers that a walk in order gives. Resources are byte
//! ranges of the arena, the state, the output, and the counters of claims (one kernel at a time uses them). Inside a region threads write
//! disjoint parts; two regions split their work differently, so any conflict between them since the last barrier needs one. A loop body is
//! checked against its own next iteration.

use rcompile_codegen::program::{Area, Item, Kernel, Program};

#[derive(Clone, Copy, PartialEq)]
enum Resource {
    Arena(u64, u64),
    State,
    Output,
    /// The counters of what kernels share out while they work.
    Claims,
}

/// What regions have touched.
#[derive(Clone, Default)]
struct Touched {
    reads: Vec<Resource>,
    writes: Vec<Resource>,
}

impl Touched {
    fn by(program: &Program, kernel: &Kernel) -> Touched {
        let mut touched = Touched::default();
        if kernel.shares_out() {
            touched.writes.push(Resource::Claims);
        }
        for access in kernel.accesses() {
            let resource = match access.area {
                Area::Buffer(id) => {
                    let buffer = &program.buffers[id.index()];
                    Resource::Arena(buffer.offset, buffer.offset + buffer.bytes())
                }
                Area::State => Resource::State,
                Area::Output => Resource::Output,
                Area::Weight(_) | Area::Table | Area::Private => continue,
            };
            if access.writes { &mut touched.writes } else { &mut touched.reads }.push(resource);
        }
        touched
    }
    fn conflicts(&self, later: &Touched) -> bool {
        let hit = |a: &[Resource], b: &[Resource]| a.iter().any(|x| b.iter().any(|y| overlap(*x, *y)));
        hit(&self.writes, &later.reads) || hit(&self.writes, &later.writes) || hit(&self.reads, &later.writes)
    }
    fn extend(&mut self, other: &Touched) {
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

/// Inserts barriers.
pub fn insert(program: &mut Program) {
    let body = std::mem::take(&mut program.body);
    let mut open = Touched::default();
    program.body = walk(program, body, &mut open);
}

/// Adds barriers to a list; `open` is what happened since the last barrier before it, and after it.
fn walk(program: &Program, items: Vec<Item>, open: &mut Touched) -> Vec<Item> {
    let mut out = Vec::new();
    for item in items {
        match item {
            Item::Region(r) => {
                let next = Touched::by(program, &program.regions[r.index()].kernel);
                if open.conflicts(&next) {
                    out.push(Item::Barrier);
                    *open = Touched::default();
                }
                open.extend(&next);
                out.push(Item::Region(r));
            }
            Item::Layers { count, body } => {
                // Enter with nothing open, so that the first iteration is like the others.
                let mut inside = Touched::default();
                let mut body = walk(program, body, &mut inside);
                let head = head(program, &body);
                if inside.conflicts(&head) {
                    body.push(Item::Barrier);
                    inside = Touched::default();
                }
                if open.conflicts(&head) {
                    out.push(Item::Barrier);
                    *open = Touched::default();
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
fn head(program: &Program, body: &[Item]) -> Touched {
    let mut touched = Touched::default();
    for item in body {
        match item {
            Item::Region(r) => touched.extend(&Touched::by(program, &program.regions[r.index()].kernel)),
            _ => break,
        }
    }
    touched
}

/// Barriers in one iteration of the first layer loop, divided by the `period` layers that it holds; rounded up.
pub fn per_layer(program: &Program, period: u32) -> u32 {
    let count = |body: &[Item]| body.iter().filter(|i| **i == Item::Barrier).count() as u32;
    let barriers = program.body.iter().find_map(|i| if let Item::Layers { body, .. } = i { Some(count(body)) } else { None });
    barriers.map_or(0, |n| n.div_ceil(period))
}
