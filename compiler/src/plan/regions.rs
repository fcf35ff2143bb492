//! Forming regions: which values are stored, and which kernel computes each.
//!
//! In: a [`Frame`]. Out: items (regions in order, layer loops) appended to the plan; barriers come later (`barriers.rs`), addresses too
//! (`memory.rs`). Anchors are matmuls (`matmul.rs`), attentions and cache appends (`attention.rs`) and calls of layers (`layers.rs`);
//! everything else is computed where it is used unless several regions need it.

use super::attention::KvPart;
use super::frame::{Cols, Frame, Home, storage};
use super::kernel::KernelBuilder;
use super::lower::{Lowering, Stop, in_pieces};
use super::tiling;
use super::{Plan, PlanError};
use rcompile_codegen::program::{
    Buffer, BufferId, DType, ExprId, Extent, Item, Kernel, LoopNest, Region, RegionId, Stage, StageKind, Store,
};
use rcompile_graph as g;
use rcompile_graph::{Dim, Op, OpClass, ValueId};

/// Most values that one kernel may ask to be stored before it.
const STORED_MAX: usize = 64;

impl Plan<'_> {
    /// Plans a function; regions go to the current body.
    pub(super) fn function(&mut self, frame: &mut Frame<'_>) -> Result<(), PlanError> {
        for id in frame.func.ids() {
            if frame.done.contains(&id) || frame.homes.contains_key(&id) {
                continue;
            }
            match &frame.func.node(id).op {
                Op::Mm { .. } => self.matmul(frame, id)?,
                Op::Sdpa { .. } => self.attention(frame, id)?,
                Op::KvAppend { .. } => {
                    let row = frame.func.ty(frame.func.node(id).inputs[0]).shape[0];
                    for part in [KvPart::Values, KvPart::Keys] {
                        let nest = self.retry(frame, |plan, frame| plan.append_nest(frame, id, part, row))?;
                        self.region("kv_append", Kernel::Loops(nest));
                    }
                }
                Op::Call { .. } => self.calls(frame, id)?,
                _ => {
                    if self.is_shared(frame, id) && is_needed(frame, id) {
                        self.store(frame, id)?;
                    }
                }
            }
        }
        let outputs = frame.func.outputs.clone();
        for v in outputs {
            if !frame.homes.contains_key(&v) || self.forced.contains_key(&v) && frame.homes[&v] != self.forced[&v] {
                self.store(frame, v)?;
            }
        }
        Ok(())
    }

    /// Runs `make`; values that it asks for are stored first.
    pub(super) fn retry<T>(
        &mut self,
        frame: &mut Frame<'_>,
        make: impl Fn(&mut Self, &Frame<'_>) -> Result<T, Stop>,
    ) -> Result<T, PlanError> {
        for _ in 0..STORED_MAX {
            match make(self, frame) {
                Ok(value) => return Ok(value),
                Err(Stop::Store(v)) if !frame.homes.contains_key(&v) => self.store(frame, v)?,
                Err(Stop::Store(v)) => return Err(PlanError::Internal(format!("%{} is stored and asked for again", v.0))),
                Err(Stop::Split(at)) => return Err(PlanError::Internal(format!("no inner range to split at {at}"))),
                Err(Stop::Failed(error)) => return Err(error),
            }
        }
        Err(PlanError::Internal(format!("a kernel asks for more than {STORED_MAX} values to be stored")))
    }

    /// Stored once because several users would compute it again.
    pub(super) fn is_shared(&self, frame: &Frame<'_>, v: ValueId) -> bool {
        let node = frame.func.node(v);
        let computes = match node.op.class() {
            // A conversion is done again as fast as its result is read.
            OpClass::Elementwise => node.op != Op::Convert,
            OpClass::Choice => node.op == Op::Where,
            class => matches!(class, OpClass::Gather | OpClass::Reduction),
        };
        let has_rows = matches!(node.ty.shape.first(), Some(Dim::Sym(_)));
        let mut users = frame.users[v.index()].clone();
        users.dedup();
        computes && has_rows && storage(node.ty.dtype).is_some() && (users.len() > 1 || frame.func.outputs.contains(&v))
    }

    pub(super) fn extent(&self, frame: &Frame<'_>, d: Dim) -> Result<Extent, PlanError> {
        match d {
            Dim::Const(n) => Ok(Extent::Const(n as u32)),
            Dim::Sym(s) => match frame.module.symbols[s.index()].name.as_str() {
                "T" => Ok(Extent::Rows),
                "L" => Ok(Extent::LogitRows),
                "S" => Ok(Extent::Runs),
                other => Err(PlanError::Unsupported(format!("symbol {other}"))),
            },
        }
    }

    pub(super) fn bound(&self, frame: &Frame<'_>, d: Dim) -> u64 {
        match d {
            Dim::Const(n) => n,
            Dim::Sym(s) => frame.module.symbols[s.index()].bound,
        }
    }

    /// Type in which a value lies in memory: bf16 values stay (rounded) f32 where the CPU has no instruction on bf16 inputs.
    pub(super) fn stored_type(&self, dtype: g::DType) -> Result<DType, PlanError> {
        match storage(dtype) {
            Some(DType::Bf16) if !self.cx.isa.bf16_inputs() => Ok(DType::F32),
            Some(d) => Ok(d),
            None => Err(PlanError::Unsupported(format!("storing {dtype}"))),
        }
    }

    pub(super) fn buffer(&mut self, frame: &Frame<'_>, v: ValueId, name: &str, width: u32, cols: Cols) -> Result<Home, PlanError> {
        if let Some(home) = self.forced.get(&v) {
            return Ok(home.clone());
        }
        self.new_buffer(frame, v, name, width, cols)
    }

    /// A buffer even for a value whose place is given: a copy of it.
    pub(super) fn new_buffer(&mut self, frame: &Frame<'_>, v: ValueId, name: &str, width: u32, cols: Cols) -> Result<Home, PlanError> {
        let ty = frame.func.ty(v);
        let dtype = self.stored_type(ty.dtype)?;
        let rows = ty.shape.first().map_or(1, |d| self.bound(frame, *d)) as u32;
        let stride = tiling::row_stride(width, dtype);
        let id = BufferId(self.program.buffers.len() as u32);
        self.program.buffers.push(Buffer { name: format!("{name}.{}", id.0), dtype, rows, stride, offset: 0 });
        Ok(Home::Buffer { id, dtype, stride, cols })
    }

    pub(super) fn row_width(&self, frame: &Frame<'_>, v: ValueId) -> u32 {
        frame.func.ty(v).shape.iter().skip(1).map(|d| self.bound(frame, *d)).product::<u64>() as u32
    }

    pub(super) fn region(&mut self, name: &str, kernel: Kernel) {
        let prefix = if self.in_layers { "layers." } else { "" };
        let id = RegionId(self.program.regions.len() as u32);
        self.program.regions.push(Region { name: format!("{prefix}{name}"), kernel });
        self.body.push(Item::Region(id));
    }

    /// Where a value lies, which is stored if it is not.
    pub(super) fn home(&mut self, frame: &mut Frame<'_>, v: ValueId) -> Result<Home, PlanError> {
        self.store(frame, v)?;
        Ok(frame.homes[&v].clone())
    }

    /// A region that computes a value at `home`, wherever else it may lie.
    pub(super) fn copy(&mut self, frame: &mut Frame<'_>, v: ValueId, home: &Home) -> Result<(), PlanError> {
        let nest = self.retry(frame, |plan, frame| plan.value_nest(frame, v, home))?;
        self.region("copy", Kernel::Loops(nest));
        Ok(())
    }

    /// A region of its own for a value; views share the home of what they view.
    pub(super) fn store(&mut self, frame: &mut Frame<'_>, v: ValueId) -> Result<(), PlanError> {
        if frame.homes.contains_key(&v) && !self.forced.contains_key(&v) {
            return Ok(());
        }
        let node = frame.func.node(v).clone();
        match node.op {
            Op::Mm { .. } => return self.matmul(frame, v),
            Op::Sdpa { .. } => return self.attention(frame, v),
            Op::Reshape if !self.forced.contains_key(&v) && frame.func.ty(node.inputs[0]).shape.first() == node.ty.shape.first() => {
                self.store(frame, node.inputs[0])?;
                let home = frame.homes[&node.inputs[0]].clone();
                frame.homes.insert(v, home);
                return Ok(());
            }
            _ => {}
        }
        let home = self.buffer(frame, v, node.op.name(), self.row_width(frame, v), Cols::Plain)?;
        let nest = self.retry(frame, |plan, frame| plan.value_nest(frame, v, &home))?;
        self.region(&region_name(frame, v), Kernel::Loops(nest));
        frame.homes.insert(v, home);
        Ok(())
    }

    /// Loop nest that stores a value into `home`: outer loops over all but the last dimension.
    pub(super) fn value_nest(&mut self, frame: &Frame<'_>, v: ValueId, home: &Home) -> Result<LoopNest, Stop> {
        let shape = frame.func.ty(v).shape.clone();
        let mut k = KernelBuilder::with_reductions();
        let mut outer = Vec::new();
        let mut idx = Vec::new();
        let leading = if shape.len() > 1 { &shape[..shape.len() - 1] } else { &shape[..] };
        for d in leading {
            let extent = self.extent(frame, *d)?;
            let var = k.outer_var((0, self.bound(frame, *d) as i64 - 1));
            outer.push((var, extent));
            idx.push(k.var_expr(var));
        }
        let n = if shape.len() > 1 { self.bound(frame, shape[shape.len() - 1]) as u32 } else { 1 };
        self.inner_stores(&mut k, n, shape.len() > 1, &idx, |plan, k, idx| {
            // The home is not yet known to the frame, so that the value is computed and not loaded.
            let (operand, index) = frame.address(k, home, v, idx);
            let value = Lowering { frame, k, weights: &mut plan.weights }.at(v, idx)?;
            Ok(vec![Store { operand: k.operand(operand), index, value }])
        })?;
        Ok(LoopNest { outer, operands: k.operands, exprs: k.exprs, stages: k.stages })
    }

    /// Adds store stages over `0..n`, cut where a formula changes. With `has_inner` false the index is not extended (rank 1).
    pub(super) fn inner_stores(
        &mut self,
        k: &mut KernelBuilder,
        n: u32,
        has_inner: bool,
        idx: &[ExprId],
        make: impl Fn(&mut Self, &mut KernelBuilder, &[ExprId]) -> Result<Vec<Store>, Stop>,
    ) -> Result<(), Stop> {
        let var = k.var((0, i64::from(n) - 1));
        let mut at = idx.to_vec();
        if has_inner {
            at.push(k.var_expr(var));
        }
        in_pieces(n, |range| {
            k.set_inner(var, &range);
            let stores = make(self, k, &at)?;
            k.stages.push(Stage { var, range, kind: StageKind::Store(stores) });
            Ok(())
        })
    }
}

/// Will a later region read `v`? Users may have been computed already, head-wise, in the region of their projection.
fn is_needed(frame: &Frame<'_>, v: ValueId) -> bool {
    let anchor = |u: ValueId| frame.func.node(u).op.class() == OpClass::Anchor;
    let by = |u: &ValueId| !frame.done.contains(u) && !frame.homes.contains_key(u) && (anchor(*u) || is_needed(frame, *u));
    frame.func.outputs.contains(&v) || frame.users[v.index()].iter().any(by)
}

/// `embed_tokens` for a lookup in `model.embed_tokens.weight`, otherwise the operation's name.
fn region_name(frame: &Frame<'_>, v: ValueId) -> String {
    let mut node = frame.func.node(v);
    while matches!(node.op, Op::Convert | Op::Reshape) {
        node = frame.func.node(node.inputs[0]);
    }
    let table = (node.op == Op::Embedding).then(|| &frame.func.node(node.inputs[0]).op);
    if let Some(Op::Param(p)) = table {
        let name = &frame.module.params[frame.params.get(p).map_or(*p, |layers| layers[0]).index()].name;
        return match super::matmul::without_type(name).strip_suffix(".weight") {
            Some(path) => path.rsplit('.').next().unwrap_or(path).to_string(),
            None => name.clone(),
        };
    }
    node.op.name().to_string()
}
