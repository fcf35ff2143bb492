//! What kernels read and write. From this one list come barriers, the lives of buffers, what the code of a kernel depends on, and the
//! verifier's rules about them.

use super::{BufferId, Expr, ExprId, Exprs, Kernel, LoopNest, Operand, Place, Store, WeightId};

/// Memory that a kernel touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// A packed tensor.
    Weight(WeightId),
    /// A temporary.
    Buffer(BufferId),
    /// Keys and values of all slots.
    State,
    /// The step's results.
    Output,
    /// A row table, which nobody writes.
    Table,
    /// Scratch of the thread, which nobody else sees.
    Private,
}

/// Which elements of it a thread touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// That of the index, for each element that is the thread's to compute.
    Index(ExprId),
    /// Any of the units (rows of a group of columns) that are the thread's.
    Unit,
    /// Any, also what is other threads' to compute.
    All,
}

/// One access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Of what.
    pub area: Area,
    /// Written, or read.
    pub writes: bool,
    /// Which elements.
    pub at: At,
}

impl Kernel {
    /// Everything that the kernel reads and writes. Operands that are not there, which the verifier refuses, are left out.
    pub fn accesses(&self) -> Vec<Access> {
        let mut list = List(Vec::new());
        match self {
            Kernel::Loops(nest) => list.nest(nest, None),
            Kernel::Matmul(m) => {
                list.0.push(Access { area: Area::Weight(m.weight), writes: false, at: At::All });
                list.operand(&m.a, false, At::All);
                if let Some(q) = &m.quantise {
                    list.operand(&q.x, false, At::All);
                    list.operand(&q.out, true, At::All);
                }
                if let Some(nest) = &m.prologue {
                    list.nest(nest, Some(At::All));
                }
                list.expressions(&m.operands, &m.exprs, m.stores.iter(), None);
                m.group_nests.iter().for_each(|group| list.nest(&group.nest, Some(At::Unit)));
            }
            Kernel::Quantise(q) => {
                list.operand(&q.x, false, At::All);
                list.operand(&q.out, true, At::Unit);
            }
            Kernel::Attention(a) => {
                list.operand(&a.q, false, At::All);
                list.0.push(Access { area: Area::State, writes: false, at: At::All });
                list.operand(&a.out, true, At::Unit);
            }
        }
        list.0
    }
}

struct List(Vec<Access>);

impl List {
    fn operand(&mut self, operand: &Operand, writes: bool, at: At) {
        let area = match operand.place {
            Place::Weight(id) => Area::Weight(id),
            Place::Buffer(id) => Area::Buffer(id),
            Place::State(_) => Area::State,
            Place::Output => Area::Output,
            Place::Table(_) => Area::Table,
            Place::Private(_) => Area::Private,
        };
        self.0.push(Access { area, writes, at });
    }

    fn nest(&mut self, nest: &LoopNest, at: Option<At>) {
        self.expressions(&nest.operands, &nest.exprs, nest.stores(), at);
    }

    /// Loads and stores, each at its index unless `at` says otherwise.
    fn expressions<'s>(&mut self, operands: &[Operand], exprs: &Exprs, stores: impl Iterator<Item = &'s Store>, at: Option<At>) {
        let loads = exprs.nodes().iter().filter_map(|node| if let Expr::Load(o, index) = node { Some((*o, *index, false)) } else { None });
        for (operand, index, writes) in loads.chain(stores.map(|store| (store.operand, store.index, true))) {
            if let Some(operand) = operands.get(operand.index()) {
                self.operand(operand, writes, at.unwrap_or(At::Index(index)));
            }
        }
    }
}
