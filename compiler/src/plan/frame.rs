//! Where the values of a function lie while it is planned.
//!
//! In: a function of the graph, alone or with the layers that call it. Out: a [`Frame`], which knows the home of each value that is stored,
//! and the operand and index of its elements.

use super::kernel::KernelBuilder;
use rcompile_codegen::program::{BufferId, Compute, DType, ExprId, Operand, Place, Table};
use rcompile_graph as g;
use rcompile_graph::{Dim, Function, Module, ParamId, StateId, ValueId};
use std::collections::{HashMap, HashSet};

/// Where a stored value lies. Elements of a row are linear in the trailing dimensions, mapped by `cols`.
#[derive(Clone, Debug, PartialEq)]
pub enum Home {
    /// Row table of the step context.
    Table(Table),
    /// Arena buffer.
    Buffer {
        /// Which.
        id: BufferId,
        /// Stored type.
        dtype: DType,
        /// Elements per row.
        stride: u32,
        /// Column map.
        cols: Cols,
    },
    /// Entry output, f32: element `row * stride + offset + col`.
    Output {
        /// Elements per row.
        stride: u32,
        /// First column.
        offset: u32,
    },
    /// This thread's scratch: element `row * stride + col` at a byte offset.
    Private {
        /// Byte offset.
        offset: u64,
        /// Stored type.
        dtype: DType,
        /// Elements per row.
        stride: u32,
    },
}

/// Column of the element with linear index `c` within its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cols {
    /// `c`
    Plain,
    /// `c / cols * padded + c % cols`: groups are padded to whole panels.
    Grouped {
        /// Real columns of a group.
        cols: u32,
        /// With padding.
        padded: u32,
    },
}

/// Rows in memory, as kernels take them.
#[derive(Clone, Debug)]
pub struct Rows {
    /// The first one.
    pub operand: Operand,
    /// Elements from row to row.
    pub stride: u32,
}

/// A function being planned: once for all the layers that call it.
#[derive(Clone)]
pub struct Frame<'m> {
    /// The module.
    pub module: &'m Module,
    /// The function.
    pub func: &'m Function,
    /// Users of each value.
    pub users: Vec<Vec<ValueId>>,
    /// Stored values.
    pub homes: HashMap<ValueId, Home>,
    /// Values that a region computes on the way to another one, cache appends and calls that regions do.
    pub done: HashSet<ValueId>,
    /// Stored records of rows that are codes, by what they are made for: bias factor and arithmetic.
    pub records: HashMap<(ValueId, i32, Compute), Rows>,
    /// Parameter -> the one of each layer.
    pub params: HashMap<ParamId, Vec<ParamId>>,
    /// State -> the one of each layer.
    pub states: HashMap<StateId, Vec<StateId>>,
}

impl<'m> Frame<'m> {
    /// Frame of the entry: every parameter stands for itself.
    pub fn entry(module: &'m Module) -> Frame<'m> {
        let func = module.main();
        let params = (0..module.params.len() as u32).map(|i| (ParamId(i), vec![ParamId(i)])).collect();
        let states = (0..module.states.len() as u32).map(|i| (StateId(i), vec![StateId(i)])).collect();
        Frame { module, func, users: func.users(), homes: HashMap::new(), done: HashSet::new(), records: HashMap::new(), params, states }
    }

    /// Frame of a function for a list of calls.
    pub fn callee(module: &'m Module, func: &'m Function, calls: &[(&[ParamId], &[StateId])]) -> Frame<'m> {
        let params = func.params.iter().enumerate().map(|(i, p)| (*p, calls.iter().map(|c| c.0[i]).collect())).collect();
        let states = func.states.iter().enumerate().map(|(i, s)| (*s, calls.iter().map(|c| c.1[i]).collect())).collect();
        Frame { module, func, users: func.users(), homes: HashMap::new(), done: HashSet::new(), records: HashMap::new(), params, states }
    }

    /// The operand and element index of a stored value.
    pub fn address(&self, k: &mut KernelBuilder, home: &Home, v: ValueId, idx: &[ExprId]) -> (Operand, ExprId) {
        let shape = &self.func.ty(v).shape;
        let row = idx.first().copied().unwrap_or_else(|| k.int(0));
        let col = linear(k, &shape[1.min(shape.len())..], &idx[1.min(idx.len())..]);
        let at = |k: &mut KernelBuilder, stride: u32, col: ExprId| {
            let base = k.mul_int(row, i64::from(stride));
            k.add(base, col)
        };
        match home {
            Home::Table(t) => (Operand { place: Place::Table(*t), dtype: DType::I32 }, row),
            Home::Buffer { id, dtype, stride, cols } => {
                let col = match cols {
                    Cols::Plain => col,
                    Cols::Grouped { cols, padded } if cols == padded => col,
                    Cols::Grouped { cols, padded } => {
                        let (group, within) = k.div_rem(col, i64::from(*cols));
                        let base = k.mul_int(group, i64::from(*padded));
                        k.add(base, within)
                    }
                };
                (Operand { place: Place::Buffer(*id), dtype: *dtype }, at(k, *stride, col))
            }
            Home::Output { stride, offset } => {
                let offset = k.int(i64::from(*offset));
                let col = k.add(col, offset);
                (Operand { place: Place::Output, dtype: DType::F32 }, at(k, *stride, col))
            }
            Home::Private { offset, dtype, stride } => (Operand { place: Place::Private(*offset), dtype: *dtype }, at(k, *stride, col)),
        }
    }
}

/// Storage type of a graph type; `None` for types that are never stored.
pub fn storage(dtype: g::DType) -> Option<DType> {
    Some(match dtype {
        g::DType::F32 => DType::F32,
        g::DType::F16 => DType::F16,
        g::DType::BF16 => DType::Bf16,
        g::DType::I32 => DType::I32,
        g::DType::I8 => DType::I8,
        g::DType::U8 => DType::U8,
        g::DType::I64 | g::DType::Bool | g::DType::State => return None,
        g::DType::Q8(_) | g::DType::Q4(_) | g::DType::Z8(_) | g::DType::Z4(_) => return None,
    })
}

/// Elements of a dimension behind the first one, which alone may be a symbol.
pub fn fixed(dim: Dim) -> i64 {
    dim.constant().expect("only the first dimension is a symbol") as i64
}

/// Row-major linear index; symbolic dimensions may only come first.
pub fn linear(k: &mut KernelBuilder, shape: &[Dim], idx: &[ExprId]) -> ExprId {
    let mut stride = 1;
    let mut sum = k.int(0);
    for axis in (0..shape.len()).rev() {
        let term = k.mul_int(idx[axis], stride);
        sum = k.add(term, sum);
        if axis > 0 {
            stride *= fixed(shape[axis]);
        }
    }
    sum
}
