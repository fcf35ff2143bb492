//! Forming regions: which values are stored, and which kernel computes each.
//!
//! In: a [`Frame`]. Out: items (regions in order, layer loops) appended to the plan; barriers come later (`barriers.rs`), addresses too
//! (`memory.rs`). Anchors are matmuls, attentions and cache appends; everything else is computed where it is used unless several
//! regions need it. A matmul takes along:
//! - the elementwise chain that ends in its only user (bias, activation, gate * up, residual, conversion): computed in registers,
//! - at few rows, the norm before it: every thread computes it for itself instead of meeting at a barrier,
//! - head-wise work on its groups of columns (norm of heads, RoPE, cache append): done by the task that has just stored the head.

use super::kernel::{KernelBuilder, evaluate};
use super::lower::{Cols, Frame, Home, Stop, WeightSource, compare, in_pieces, storage};
use super::{Plan, PlanError};
use rcompile_codegen::program as p;
use rcompile_codegen::program::{
    Attention, Buffer, BufferId, Compute, DType, Expr, ExprId, Extent, GroupNest, Item, Kernel, Layout, LoopNest, Matmul, Operand, Panels,
    Place, Region, RegionId, Stage, StageKind, Store, Table,
};
use rcompile_graph as g;
use rcompile_graph::{AttnExpr, AttnVar, Binary, Compare, Dim, Op, ParamId, StateId, Unary, ValueId};
use std::collections::HashSet;

/// Rows up to which a norm is computed by every thread for itself.
const PRIVATE_ROWS: u64 = 8;

impl Plan<'_> {
    /// Plans a function; regions go to the current body.
    pub(super) fn function(&mut self, frame: &mut Frame<'_>) -> Result<(), PlanError> {
        let mut done: HashSet<ValueId> = HashSet::new();
        for id in frame.func.ids() {
            if done.contains(&id) || frame.homes.contains_key(&id) {
                continue;
            }
            match &frame.func.node(id).op {
                Op::Mm { .. } => self.matmul(frame, id, &mut done)?,
                Op::Sdpa { .. } => self.attention(frame, id)?,
                Op::KvAppend { .. } => {
                    let row = frame.func.ty(frame.func.node(id).inputs[0]).shape[0];
                    for value in [true, false] {
                        let nest = self.retry(frame, |plan, frame| plan.append_nest(frame, id, value, row))?;
                        self.region("kv_append", Kernel::Loops(nest));
                    }
                }
                Op::Call { .. } => self.calls(frame, id, &mut done)?,
                _ => {
                    if self.is_shared(frame, id) && is_needed(frame, id, &done) {
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
    fn retry<T>(&mut self, frame: &mut Frame<'_>, make: impl Fn(&mut Self, &Frame<'_>) -> Result<T, Stop>) -> Result<T, PlanError> {
        for _ in 0..64 {
            match make(self, frame) {
                Ok(value) => return Ok(value),
                Err(Stop::Store(v)) if !frame.homes.contains_key(&v) => self.store(frame, v)?,
                Err(Stop::Store(v)) => return Err(PlanError::Internal(format!("%{} is stored and asked for again", v.0))),
                Err(Stop::Split(at)) => return Err(PlanError::Internal(format!("no inner range to split at {at}"))),
                Err(Stop::Unsupported(what)) => return Err(PlanError::Unsupported(what)),
            }
        }
        Err(PlanError::Internal("values keep being asked for".into()))
    }

    /// Stored once because several users would compute it again.
    fn is_shared(&self, frame: &Frame<'_>, v: ValueId) -> bool {
        let node = frame.func.node(v);
        let computes = matches!(
            node.op,
            Op::Unary(_)
                | Op::Binary(_)
                | Op::Where
                | Op::Embedding
                | Op::Reduce { .. }
                | Op::Softmax
                | Op::RmsNorm { .. }
                | Op::LayerNorm { .. }
                | Op::Rope
                | Op::Pool(_)
        );
        let has_rows = matches!(node.ty.shape.first(), Some(Dim::Sym(_)));
        let mut users = frame.users[v.index()].clone();
        users.dedup();
        computes && has_rows && storage(node.ty.dtype).is_some() && (users.len() > 1 || frame.func.outputs.contains(&v))
    }

    fn extent(&self, frame: &Frame<'_>, d: Dim) -> Result<Extent, PlanError> {
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

    fn bound(&self, frame: &Frame<'_>, d: Dim) -> u64 {
        match d {
            Dim::Const(n) => n,
            Dim::Sym(s) => frame.module.symbols[s.index()].bound,
        }
    }

    /// Type in which a value lies in memory: bf16 values stay (rounded) f32 where the CPU has no bf16 dot instruction.
    fn stored_type(&self, dtype: g::DType) -> Result<DType, PlanError> {
        match storage(dtype) {
            Some(DType::Bf16) if !self.cx.isa.bf16_dot => Ok(DType::F32),
            Some(d) => Ok(d),
            None => Err(PlanError::Unsupported(format!("storing {dtype}"))),
        }
    }

    fn buffer(&mut self, frame: &Frame<'_>, v: ValueId, name: &str, width: u32, cols: Cols) -> Result<Home, PlanError> {
        if let Some(home) = self.forced.get(&v) {
            return Ok(home.clone());
        }
        let ty = frame.func.ty(v);
        let dtype = self.stored_type(ty.dtype)?;
        let rows = ty.shape.first().map_or(1, |d| self.bound(frame, *d)) as u32;
        let stride = width.next_multiple_of(32);
        let id = BufferId(self.program.buffers.len() as u32);
        self.program.buffers.push(Buffer { name: format!("{name}.{}", id.0), dtype, rows, stride, offset: 0 });
        Ok(Home::Buffer { id, dtype, stride, cols })
    }

    fn row_width(&self, frame: &Frame<'_>, v: ValueId) -> u32 {
        frame.func.ty(v).shape.iter().skip(1).map(|d| self.bound(frame, *d)).product::<u64>() as u32
    }

    fn region(&mut self, name: &str, kernel: Kernel) {
        let prefix = if self.in_layers { "layers." } else { "" };
        let id = RegionId(self.program.regions.len() as u32);
        self.program.regions.push(Region { name: format!("{prefix}{name}"), kernel });
        self.body.push(Item::Region(id));
    }

    /// A region of its own for a value; views share the home of what they view.
    pub(super) fn store(&mut self, frame: &mut Frame<'_>, v: ValueId) -> Result<(), PlanError> {
        if frame.homes.contains_key(&v) && !self.forced.contains_key(&v) {
            return Ok(());
        }
        let node = frame.func.node(v).clone();
        match node.op {
            Op::Mm { .. } => return self.matmul(frame, v, &mut HashSet::new()),
            Op::Sdpa { .. } => return self.attention(frame, v),
            Op::Reshape if !self.forced.contains_key(&v) && frame.func.ty(node.inputs[0]).shape.first() == node.ty.shape.first() => {
                self.store(frame, node.inputs[0])?;
                let home = frame.homes[&node.inputs[0]].clone();
                frame.homes.insert(v, home);
                return Ok(());
            }
            _ => {}
        }
        let home = self.buffer(frame, v, g::build::op_name(&node.op), self.row_width(frame, v), Cols::Plain)?;
        let nest = self.retry(frame, |plan, frame| plan.value_nest(frame, v, &home))?;
        self.region(region_name(frame, v), Kernel::Loops(nest));
        frame.homes.insert(v, home);
        Ok(())
    }

    /// Loop nest that stores a value into `home`: outer loops over all but the last dimension.
    fn value_nest(&mut self, frame: &Frame<'_>, v: ValueId, home: &Home) -> Result<LoopNest, Stop> {
        let shape = frame.func.ty(v).shape.clone();
        let mut k = KernelBuilder::with_reductions();
        let mut outer = Vec::new();
        let mut idx = Vec::new();
        let leading = if shape.len() > 1 { &shape[..shape.len() - 1] } else { &shape[..] };
        for d in leading {
            let extent = self.extent(frame, *d).map_err(|e| Stop::Unsupported(e.to_string()))?;
            let var = k.outer_var((0, self.bound(frame, *d) as i64 - 1));
            outer.push((var, extent));
            idx.push(k.var_expr(var));
        }
        let n = if shape.len() > 1 { self.bound(frame, shape[shape.len() - 1]) as u32 } else { 1 };
        self.inner_stores(&mut k, n, shape.len() > 1, &idx, |plan, k, idx| {
            // The home is not yet known to the frame, so that the value is computed and not loaded.
            let (operand, index) = frame.address(k, home, v, idx);
            let value = frame.at(k, plan, v, idx)?;
            Ok(vec![Store { operand: k.operand(operand), index, value }])
        })?;
        Ok(LoopNest { outer, operands: k.operands, exprs: k.exprs, layer_ints: vec![], stages: k.stages })
    }

    /// Adds store stages over `0..n`, cut where a formula changes. With `has_inner` false the index is not extended (rank 1).
    fn inner_stores(
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

    /// Loop nest that writes keys (or values) of a cache append: outer (row, head), inner the head's elements.
    fn append_nest(&mut self, frame: &Frame<'_>, id: ValueId, value: bool, row: Dim) -> Result<LoopNest, Stop> {
        let node = frame.func.node(id);
        let Op::KvAppend { state } = node.op else { return Err(Stop::Unsupported("not an append".into())) };
        let layout = self.kv_layout(frame, state);
        let source = node.inputs[usize::from(value)];
        let mut k = KernelBuilder::with_reductions();
        let extent = self.extent(frame, row).map_err(|e| Stop::Unsupported(e.to_string()))?;
        let t = k.outer_var((0, self.bound(frame, row) as i64 - 1));
        let h = k.outer_var((0, i64::from(layout.kv_heads) - 1));
        let idx = [k.var_expr(t), k.var_expr(h)];
        let outer = vec![(t, extent), (h, Extent::Const(layout.kv_heads))];
        self.inner_stores(&mut k, layout.head_dim, true, &idx, |plan, k, idx| {
            let x = frame.at(k, plan, source, idx)?;
            let slot = frame.at(k, plan, node.inputs[2], &idx[..1])?;
            let place = frame.at(k, plan, node.inputs[3], &idx[..1])?;
            let index = kv_index(k, &layout, value, slot, place, idx[1], idx[2]);
            let operand = k.operand(Operand { place: Place::State(layout.offsets.clone()), dtype: layout.dtype });
            Ok(vec![Store { operand, index, value: x }])
        })?;
        Ok(LoopNest { outer, operands: k.operands, exprs: k.exprs, layer_ints: vec![], stages: k.stages })
    }

    fn kv_layout(&self, frame: &Frame<'_>, state: StateId) -> KvLayout {
        let s = &frame.module.states[state.index()];
        let dtype = storage(s.dtype).unwrap_or(DType::F32);
        let (kv_heads, head_dim) = (s.kv_heads as u32, s.head_dim as u32);
        let half = rcompile_runtime::abi::PAGE_POSITIONS as u64 * s.head_dim * dtype.size();
        let page_bytes = 2 * half * s.kv_heads;
        let offsets = frame.states[&state].iter().map(|s| self.state_offsets[s.index()]).collect();
        KvLayout { dtype, kv_heads, head_dim, offsets, page_bytes, head_bytes: 2 * half, v_offset: half }
    }

    /// Attention: queries are stored (by a group nest of the projection where possible), the output takes along reshapes and conversions.
    fn attention(&mut self, frame: &mut Frame<'_>, id: ValueId) -> Result<(), PlanError> {
        let node = frame.func.node(id).clone();
        let Op::Sdpa { state, ref score, ref mask } = node.op else { return Err(PlanError::Internal("not attention".into())) };
        let q = node.inputs[0];
        if !matches!(frame.homes.get(&q), Some(Home::Buffer { .. })) {
            self.store(frame, q)?;
        }
        let Some(Home::Buffer { id: q_buffer, dtype: q_dtype, stride: q_stride, cols }) = frame.homes.get(&q).cloned() else {
            return Err(PlanError::Internal("queries have no buffer".into()));
        };
        let mut end = id;
        while let [user] = frame.users[end.index()][..] {
            let view = matches!(frame.func.node(user).op, Op::Reshape) && frame.func.ty(user).shape.first() == node.ty.shape.first();
            if !(view || matches!(frame.func.node(user).op, Op::Convert)) || frame.func.outputs.contains(&end) {
                break;
            }
            end = user;
        }
        let out = self.buffer(frame, end, "attention", self.row_width(frame, id), Cols::Plain)?;
        let Home::Buffer { id: out_buffer, dtype: out_dtype, stride: out_stride, .. } = out else {
            return Err(PlanError::Unsupported("attention as an output".into()));
        };
        let layout = self.kv_layout(frame, state);
        let heads = self.bound(frame, node.ty.shape[1]) as u32;
        let mut k = KernelBuilder::default();
        let positions = i64::from(self.cx.ctx_size) - 1;
        let head_var = k.var((0, i64::from(heads) - 1));
        let query_var = k.var((0, positions));
        let key_var = k.var((0, positions));
        let vars = [head_var, query_var, key_var].map(|v| k.var_expr(v));
        let score = attn_float(&mut k, score, &vars).map_err(|w| PlanError::Unsupported(format!("attention score: {w}")))?;
        let (lower, upper) = mask_bounds(&mut k, mask, vars[1]);
        let mask = attn_bool(&mut k, mask, &vars).map_err(|w| PlanError::Unsupported(format!("attention mask: {w}")))?;
        let head_pitch = match cols {
            Cols::Grouped { padded, .. } => padded,
            Cols::Plain => layout.head_dim,
        };
        let kernel = Attention {
            q: Operand { place: Place::Buffer(q_buffer), dtype: q_dtype },
            q_stride,
            q_head_stride: head_pitch,
            out: Operand { place: Place::Buffer(out_buffer), dtype: out_dtype },
            out_stride,
            heads,
            kv_heads: layout.kv_heads,
            head_dim: layout.head_dim,
            kv_dtype: layout.dtype,
            state_offsets: layout.offsets,
            page_bytes: layout.page_bytes,
            head_bytes: layout.head_bytes,
            v_offset: layout.v_offset,
            tile_rows: self.program.tile_rows,
            exprs: k.exprs,
            layer_ints: vec![],
            head_var,
            query_var,
            key_var,
            score,
            mask,
            key_lower: lower,
            key_upper: upper,
        };
        self.region("attention", Kernel::Attention(kernel));
        // Only the end of the chain has the buffer's type; views between share it.
        let mut v = end;
        loop {
            frame.homes.insert(v, Home::Buffer { id: out_buffer, dtype: out_dtype, stride: out_stride, cols: Cols::Plain });
            if v == id || frame.func.node(v).op == Op::Convert {
                break;
            }
            v = frame.func.node(v).inputs[0];
        }
        frame.homes.entry(id).or_insert(Home::Buffer { id: out_buffer, dtype: out_dtype, stride: out_stride, cols: Cols::Plain });
        Ok(())
    }

    /// A matmul with everything that it takes along.
    fn matmul(&mut self, frame: &mut Frame<'_>, id: ValueId, done: &mut HashSet<ValueId>) -> Result<(), PlanError> {
        let node = frame.func.node(id).clone();
        let weight = match frame.func.node(node.inputs[1]).op {
            Op::Param(p) if node.op == (Op::Mm { rhs_t: true }) => p,
            _ => return Err(PlanError::Unsupported(format!("{}: matmul of two computed values", node.origin))),
        };
        let weight_ty = frame.module.params[weight.index()].ty.clone();
        let (n, depth) = (self.bound(frame, weight_ty.shape[0]) as u32, self.bound(frame, weight_ty.shape[1]) as u32);
        let mut chain = self.epilogue_chain(frame, id);
        let pads = |d: u32| !d.is_multiple_of(self.cx.isa.panel_nr);
        if chain.ways == 1 && chain.end != id && self.head_groups(frame, chain.end, n).is_some_and(pads) {
            // Padded heads: vectors by real column do not line up with the registers' columns.
            chain = Chain { end: id, ways: 1, accumulators: vec![id], inner: vec![] };
        }
        let out_cols = self.row_width(frame, chain.end);
        let head_dim = if chain.ways == 1 { self.head_groups(frame, chain.end, n) } else { None };
        let group_cols = head_dim.unwrap_or(n / chain.ways);
        let dtype = storage(weight_ty.dtype).ok_or_else(|| PlanError::Unsupported(format!("weights of type {}", weight_ty.dtype)))?;
        let panels = Panels {
            nr: self.cx.isa.panel_nr,
            k_pack: if dtype == DType::Bf16 { 2 } else { 1 },
            k: depth,
            groups: n / chain.ways / group_cols,
            group_cols,
            ways: chain.ways,
        };
        // Left operand: private norm at few rows, else a buffer.
        let x = node.inputs[0];
        let row_dim = node.ty.shape[0];
        let row_bound = self.bound(frame, row_dim);
        let private =
            row_bound <= PRIVATE_ROWS && !frame.homes.contains_key(&x) && frame.users[x.index()].len() == 1 && self.is_computed(frame, x);
        let (a_home, prologue) = if private {
            let home = Home::Private { offset: 0, dtype: self.stored_type(frame.func.ty(x).dtype)?, stride: depth.next_multiple_of(32) };
            let nest = self.retry(frame, |plan, frame| plan.value_nest(frame, x, &home))?;
            (home, Some(nest))
        } else {
            self.store(frame, x)?;
            (frame.homes[&x].clone(), None)
        };
        let (a, a_stride) = match &a_home {
            Home::Buffer { id, dtype, stride, cols: Cols::Plain } => (Operand { place: Place::Buffer(*id), dtype: *dtype }, *stride),
            Home::Private { offset, dtype, stride } => {
                let bytes = row_bound * u64::from(*stride) * dtype.size();
                self.program.private_bytes = self.program.private_bytes.max((offset + bytes).next_multiple_of(128));
                (Operand { place: Place::Private(*offset), dtype: *dtype }, *stride)
            }
            _ => {
                // Padded columns: a plain copy first.
                let home = self.buffer(frame, x, "copy", depth, Cols::Plain)?;
                let Home::Buffer { id: copy, dtype, stride, .. } = home.clone() else {
                    return Err(PlanError::Internal("matmul input has no buffer".into()));
                };
                let nest = self.retry(frame, |plan, frame| plan.value_nest(frame, x, &home))?;
                self.region("copy", Kernel::Loops(nest));
                (Operand { place: Place::Buffer(copy), dtype }, stride)
            }
        };
        let compute = if a.dtype == DType::Bf16 && dtype == DType::Bf16 && self.cx.isa.bf16_dot { Compute::Bf16Dot } else { Compute::F32 };
        // Epilogue.
        let cols = if panels.groups > 1 { Cols::Grouped { cols: group_cols, padded: panels.padded_group() } } else { Cols::Plain };
        let name = weight_label(&frame.module.params[weight.index()].name);
        let home = self.buffer(frame, chain.end, &name, panels.padded_cols().max(out_cols), cols)?;
        let epilogue = self.retry(frame, |plan, frame| plan.epilogue(frame, &chain, &home, &panels))?;
        let weight_id = self.weight(&frame.params[&weight].clone(), Layout::Panels(panels));
        frame.homes.insert(chain.end, home);
        for inner in chain.inner {
            done.insert(inner);
        }
        let mut matmul = Matmul {
            rows: self.extent(frame, row_dim)?,
            a,
            a_stride,
            prologue,
            weight: weight_id,
            panels,
            compute,
            tile: super::tiling::matmul_tile(self.cx.isa, row_bound, &panels, dtype),
            row: epilogue.row,
            col: epilogue.col,
            operands: epilogue.operands,
            exprs: epilogue.exprs,
            stores: epilogue.stores,
            group_nests: vec![],
        };
        if panels.groups > 1 {
            matmul.group_nests = self.group_nests(frame, chain.end, row_dim, &panels, done)?;
        }
        self.region(&name, Kernel::Matmul(matmul));
        Ok(())
    }

    /// A value that is worth a prologue: something with arithmetic and rows.
    fn is_computed(&self, frame: &Frame<'_>, v: ValueId) -> bool {
        match frame.func.node(v).op {
            Op::RmsNorm { .. } | Op::LayerNorm { .. } => true,
            Op::Convert => self.is_computed(frame, frame.func.node(v).inputs[0]),
            _ => false,
        }
    }

    fn epilogue(&mut self, frame: &Frame<'_>, chain: &Chain, home: &Home, panels: &Panels) -> Result<Epilogue, Stop> {
        let mut k = KernelBuilder::default();
        let shape = &frame.func.ty(chain.end).shape;
        let row = k.outer_var((0, self.bound(frame, shape[0]) as i64 - 1));
        let col = k.var((0, i64::from(panels.padded_cols()) - 1));
        k.inner = Some(col);
        for (way, v) in chain.accumulators.iter().enumerate() {
            k.acc.insert(*v, way as u32);
        }
        let (row_e, col_e) = (k.var_expr(row), k.var_expr(col));
        let value = frame.at(&mut k, self, chain.end, &[row_e, col_e])?;
        // Columns of the epilogue are padded columns: the home is addressed without its column map.
        let padded = match home {
            Home::Buffer { id, dtype, stride, .. } => Home::Buffer { id: *id, dtype: *dtype, stride: *stride, cols: Cols::Plain },
            other => other.clone(),
        };
        let (operand, index) = frame.address(&mut k, &padded, chain.end, &[row_e, col_e]);
        let operand = k.operand(operand);
        Ok(Epilogue { row, col, operands: k.operands, exprs: k.exprs, stores: vec![Store { operand, index, value }] })
    }

    /// The elementwise chain above a matmul.
    fn epilogue_chain(&self, frame: &Frame<'_>, id: ValueId) -> Chain {
        let mut chain = Chain { end: id, ways: 1, accumulators: vec![id], inner: vec![] };
        if let Some(gated) = self.gated(frame, id) {
            chain = gated;
        }
        while let Some(next) = self.next_in_chain(frame, chain.end, id) {
            chain.inner.push(chain.end);
            chain.end = next;
        }
        chain
    }

    /// The only user of `v`, if it is elementwise of the same shape and its other operands are at hand before the matmul `id`.
    fn next_in_chain(&self, frame: &Frame<'_>, v: ValueId, id: ValueId) -> Option<ValueId> {
        if frame.func.outputs.contains(&v) || self.forced.contains_key(&v) {
            return None;
        }
        let user = single_user(frame, v)?;
        let node = frame.func.node(user);
        let fits = matches!(node.op, Op::Unary(_) | Op::Binary(_) | Op::Convert) && node.ty.shape == frame.func.ty(v).shape;
        let others = node.inputs.iter().filter(|i| **i != v).all(|i| self.at_hand(frame, *i, id, frame.func.ty(v).shape.len()));
        (fits && others && storage(node.ty.dtype).is_some()).then_some(user)
    }

    /// Can be read in an epilogue: stored already, or a vector of parameters or a constant.
    fn at_hand(&self, frame: &Frame<'_>, v: ValueId, id: ValueId, rank: usize) -> bool {
        let node = frame.func.node(v);
        if v.0 > id.0 && !matches!(node.op, Op::Param(_) | Op::Const(_) | Op::Convert) {
            return false;
        }
        match node.op {
            Op::Const(_) => true,
            Op::Param(_) => node.ty.rank() < rank,
            Op::Convert => self.at_hand(frame, node.inputs[0], id, rank),
            // Padded columns of grouped outputs would not line up.
            _ => matches!(frame.homes.get(&v), Some(Home::Buffer { cols: Cols::Plain, .. })),
        }
    }

    /// `mm` whose two halves of columns meet in one elementwise expression: gate and up.
    fn gated(&self, frame: &Frame<'_>, id: ValueId) -> Option<Chain> {
        let n = frame.func.ty(id).shape[1].constant()?;
        let [a, b] = frame.users[id.index()][..] else { return None };
        let half = |v: ValueId| match frame.func.node(v).op {
            Op::Slice { axis: 1, start: 0, end } if end * 2 == n => Some(0),
            Op::Slice { axis: 1, start, end } if start * 2 == n && end == n => Some(1),
            _ => None,
        };
        let (first, second) = match (half(a)?, half(b)?) {
            (0, 1) => (a, b),
            (1, 0) => (b, a),
            _ => return None,
        };
        // Walk up from each half through single elementwise users until the paths meet.
        let path = |start: ValueId| {
            let mut path = vec![start];
            while let Some(user) = single_user(frame, path[path.len() - 1]) {
                let node = frame.func.node(user);
                if !matches!(node.op, Op::Unary(_) | Op::Binary(_) | Op::Convert) || node.ty.shape != frame.func.ty(start).shape {
                    break;
                }
                path.push(user);
            }
            path
        };
        let (p, q) = (path(first), path(second));
        let meet = *p.iter().find(|v| q.contains(v))?;
        let inner: Vec<ValueId> = p.iter().chain(&q).copied().filter(|v| *v < meet && *v != meet).collect();
        let known = |v: &ValueId| inner.contains(v) || self.at_hand(frame, *v, id, 2);
        let computed = inner.iter().filter(|v| **v != first && **v != second).chain([&meet]);
        for v in computed {
            if !frame.func.node(*v).inputs.iter().all(known) {
                return None;
            }
        }
        let mut inner = inner;
        inner.push(id);
        Some(Chain { end: meet, ways: 2, accumulators: vec![first, second], inner })
    }

    /// Head width, if the columns of `v` are used as heads: reshapes `[T, n, d]` of slices at multiples of d.
    fn head_groups(&self, frame: &Frame<'_>, v: ValueId, n: u32) -> Option<u32> {
        let mut widths = Vec::new();
        let mut work = vec![(v, 0u64)];
        let mut starts = Vec::new();
        while let Some((v, start)) = work.pop() {
            for user in &frame.users[v.index()] {
                let node = frame.func.node(*user);
                match node.op {
                    Op::Slice { axis: 1, start: s, .. } => {
                        starts.push(start + s);
                        work.push((*user, start + s));
                    }
                    Op::Reshape if node.ty.rank() == 3 => widths.push(node.ty.shape[2].constant()?),
                    Op::Binary(_) | Op::Unary(_) if node.ty.rank() == 2 && node.ty.shape == frame.func.ty(v).shape => {
                        work.push((*user, start))
                    }
                    _ => return None,
                }
            }
        }
        let d = *widths.first()?;
        let fits = widths.iter().all(|w| *w == d) && starts.iter().all(|s| s % d == 0) && u64::from(n) % d == 0 && u64::from(n) > d;
        fits.then_some(d as u32)
    }

    /// Head-wise work on the columns of `end`: queries of attentions and cache appends that need nothing else.
    fn group_nests(
        &mut self,
        frame: &mut Frame<'_>,
        end: ValueId,
        row: Dim,
        panels: &Panels,
        done: &mut HashSet<ValueId>,
    ) -> Result<Vec<GroupNest>, PlanError> {
        let mut nests = Vec::new();
        let Some(Home::Buffer { id: buffer, stride, .. }) = frame.homes.get(&end).cloned() else { return Ok(nests) };
        let ids: Vec<ValueId> = frame.func.ids().filter(|v| *v > end).collect();
        for id in ids {
            let node = frame.func.node(id).clone();
            match node.op {
                Op::Sdpa { .. } => {
                    let q = node.inputs[0];
                    if frame.homes.contains_key(&q) || !depends_on(frame, q, end) {
                        continue;
                    }
                    let home = self.buffer(frame, q, "q", self.row_width(frame, q), Cols::Plain)?;
                    match self.value_nest(frame, q, &home) {
                        Ok(nest) => match groups_of(&nest, buffer, stride, panels) {
                            Some(groups) => {
                                nests.push(GroupNest { groups, nest });
                                frame.homes.insert(q, home);
                            }
                            None => self.drop_buffer(&home),
                        },
                        Err(_) => self.drop_buffer(&home),
                    }
                }
                Op::KvAppend { .. } => {
                    if done.contains(&id) || !depends_on(frame, node.inputs[0], end) || !depends_on(frame, node.inputs[1], end) {
                        continue;
                    }
                    let (Ok(keys), Ok(values)) = (self.append_nest(frame, id, false, row), self.append_nest(frame, id, true, row)) else {
                        continue;
                    };
                    let groups = (groups_of(&keys, buffer, stride, panels), groups_of(&values, buffer, stride, panels));
                    if let (Some(k), Some(v)) = groups {
                        nests.push(GroupNest { groups: k, nest: keys });
                        nests.push(GroupNest { groups: v, nest: values });
                        done.insert(id);
                    }
                }
                _ => {}
            }
        }
        Ok(nests)
    }

    fn drop_buffer(&mut self, home: &Home) {
        if let Home::Buffer { id, .. } = home
            && id.index() + 1 == self.program.buffers.len()
        {
            self.program.buffers.pop();
        }
    }

    /// Calls of outlined layers, from `first` on: loops over runs of equal (or periodic) callees.
    fn calls(&mut self, frame: &mut Frame<'_>, first: ValueId, done: &mut HashSet<ValueId>) -> Result<(), PlanError> {
        let chain = call_chain(frame, first);
        let (x_in, x_place) = carried_operand(frame, &chain);
        self.store(frame, x_in)?;
        let x_home = match frame.homes.get(&x_in) {
            Some(home @ Home::Buffer { cols: Cols::Plain, .. }) if frame.users[x_in.index()].len() == 1 => home.clone(),
            _ => {
                // The loop overwrites its input: a copy of its own.
                let home = self.buffer(frame, x_in, "x", self.row_width(frame, x_in), Cols::Plain)?;
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

/// Elementwise work of a matmul.
struct Chain {
    end: ValueId,
    ways: u32,
    accumulators: Vec<ValueId>,
    inner: Vec<ValueId>,
}

struct Epilogue {
    row: p::VarId,
    col: p::VarId,
    operands: Vec<Operand>,
    exprs: p::Exprs,
    stores: Vec<Store>,
}

/// Addresses of a KV cache.
pub(super) struct KvLayout {
    dtype: DType,
    kv_heads: u32,
    head_dim: u32,
    offsets: Vec<u64>,
    page_bytes: u64,
    head_bytes: u64,
    v_offset: u64,
}

/// Element index (from the layer's start) of element `d` of a key or value, see [`Attention`].
fn kv_index(k: &mut KernelBuilder, l: &KvLayout, value: bool, slot: ExprId, place: ExprId, head: ExprId, d: ExprId) -> ExprId {
    let size = l.dtype.size();
    let page_positions = rcompile_runtime::abi::PAGE_POSITIONS as i64;
    let pages = k.exprs.add(Expr::PagesPerSlot);
    let first = k.exprs.add(Expr::Binary(p::BinaryOp::Mul, slot, pages));
    let (block, within) = k.div_rem(place, page_positions);
    let entry = k.add(first, block);
    let page = k.load(Place::Table(Table::PageTable), DType::I32, entry);
    let base = k.mul_int(page, (l.page_bytes / size) as i64);
    let head = k.mul_int(head, (l.head_bytes / size) as i64);
    let base = k.add(base, head);
    let hd = i64::from(l.head_dim);
    let at = if value {
        let row = k.mul_int(within, hd);
        let v = k.int((l.v_offset / size) as i64);
        let row = k.add(row, v);
        k.add(row, d)
    } else {
        let (group, lane) = k.div_rem(within, 16);
        let group = k.mul_int(group, 16 * hd);
        let column = k.mul_int(d, 16);
        let at = k.add(group, column);
        k.add(at, lane)
    };
    k.add(base, at)
}

/// The only user of a value (it may use it twice).
fn single_user(frame: &Frame<'_>, v: ValueId) -> Option<ValueId> {
    let users = &frame.users[v.index()];
    let first = *users.first()?;
    users.iter().all(|u| *u == first).then_some(first)
}

/// Will a later region read `v`? Users may have been computed already, head-wise, in the region of their projection.
fn is_needed(frame: &Frame<'_>, v: ValueId, done: &HashSet<ValueId>) -> bool {
    let anchor = |u: ValueId| matches!(frame.func.node(u).op, Op::Mm { .. } | Op::Sdpa { .. } | Op::KvAppend { .. } | Op::Call { .. });
    let by = |u: &ValueId| !done.contains(u) && !frame.homes.contains_key(u) && (anchor(*u) || is_needed(frame, *u, done));
    frame.func.outputs.contains(&v) || frame.users[v.index()].iter().any(by)
}

/// Is `v` computed from `source` by nothing but values that have no home and need none?
fn depends_on(frame: &Frame<'_>, v: ValueId, source: ValueId) -> bool {
    let node = frame.func.node(v);
    let stored = frame.homes.contains_key(&v) || matches!(node.op, Op::Mm { .. } | Op::Sdpa { .. } | Op::KvAppend { .. } | Op::Call { .. });
    v == source || v > source && !stored && node.inputs.iter().any(|i| depends_on(frame, *i, source))
}

/// Groups that a nest over (row, head) reads from `buffer`, if each head reads its own group only.
fn groups_of(nest: &LoopNest, buffer: BufferId, stride: u32, panels: &Panels) -> Option<std::ops::Range<u32>> {
    let [(row, _), (head, Extent::Const(heads))] = nest.outer[..] else { return None };
    let padded = i64::from(panels.padded_group());
    let mut first = None;
    for stage in &nest.stages {
        let mut loads = Vec::new();
        match &stage.kind {
            StageKind::Reduce { value, .. } => element_indices(nest, *value, buffer, &mut loads),
            StageKind::Store(stores) => stores.iter().for_each(|s| element_indices(nest, s.value, buffer, &mut loads)),
        }
        let corners =
            [0, i64::from(heads) - 1].into_iter().flat_map(|h| [stage.range.start, stage.range.end - 1].map(|i| (h, i64::from(i))));
        for (h, inner) in corners {
            for index in &loads {
                let at = |r: i64| {
                    evaluate(&nest.exprs, *index, &|v| {
                        if v == row {
                            r
                        } else if v == head {
                            h
                        } else {
                            inner
                        }
                    })
                };
                let column = at(0)?;
                let group = column.div_euclid(padded) - h;
                if at(1)? - column != i64::from(stride) || *first.get_or_insert(group) != group {
                    return None;
                }
            }
        }
    }
    let first = u32::try_from(first?).ok()?;
    (first + heads <= panels.groups).then_some(first..first + heads)
}

/// Indices of the loads from `buffer` in an expression.
fn element_indices(nest: &LoopNest, e: ExprId, buffer: BufferId, found: &mut Vec<ExprId>) {
    let mut visit = |e: ExprId| element_indices(nest, e, buffer, found);
    match nest.exprs.get(e) {
        Expr::Load(operand, index) => {
            visit(index);
            if nest.operands[operand.index()].place == Place::Buffer(buffer) && !found.contains(&index) {
                found.push(index);
            }
        }
        Expr::Unary(_, a) | Expr::Round(_, a) => visit(a),
        Expr::Binary(_, a, b) | Expr::Cmp(_, a, b) => [a, b].into_iter().for_each(visit),
        Expr::Select(a, b, c) => [a, b, c].into_iter().for_each(visit),
        Expr::Fold { begin, end, body, .. } => [begin, end, body].into_iter().for_each(visit),
        _ => {}
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

fn attn_var(v: AttnVar, vars: &[ExprId; 3]) -> Option<ExprId> {
    match v {
        AttnVar::Score => None,
        AttnVar::Head => Some(vars[0]),
        AttnVar::Query => Some(vars[1]),
        AttnVar::Key => Some(vars[2]),
    }
}

fn binary_op(op: Binary) -> p::BinaryOp {
    match op {
        Binary::Add => p::BinaryOp::Add,
        Binary::Sub => p::BinaryOp::Sub,
        Binary::Mul => p::BinaryOp::Mul,
        Binary::Div => p::BinaryOp::Div,
        Binary::Minimum => p::BinaryOp::Min,
        Binary::Maximum => p::BinaryOp::Max,
        Binary::And => p::BinaryOp::And,
        Binary::Or => p::BinaryOp::Or,
    }
}

/// Score expressions are f32.
fn attn_float(k: &mut KernelBuilder, e: &AttnExpr, vars: &[ExprId; 3]) -> Result<ExprId, String> {
    match e {
        AttnExpr::Var(AttnVar::Score) => Ok(k.exprs.add(Expr::Score)),
        AttnExpr::Var(v) => match attn_var(*v, vars) {
            Some(x) => Ok(k.exprs.add(Expr::Unary(p::UnaryOp::IntToFloat, x))),
            None => Err("no such variable".into()),
        },
        AttnExpr::Const(c) => Ok(k.exprs.float(*c as f32)),
        AttnExpr::Unary(op, a) => {
            let a = attn_float(k, a, vars)?;
            let op = match op {
                Unary::Neg => p::UnaryOp::Neg,
                Unary::Abs => p::UnaryOp::Abs,
                Unary::Exp => p::UnaryOp::Exp,
                Unary::Tanh => p::UnaryOp::Tanh,
                other => return Err(format!("{} is not supported", other.name())),
            };
            Ok(k.exprs.add(Expr::Unary(op, a)))
        }
        AttnExpr::Binary(op, a, b) if !matches!(op, Binary::And | Binary::Or) => {
            let (a, b) = (attn_float(k, a, vars)?, attn_float(k, b, vars)?);
            Ok(k.exprs.add(Expr::Binary(binary_op(*op), a, b)))
        }
        _ => Err("a number is needed".into()),
    }
}

/// Integer parts of masks.
fn attn_int(k: &mut KernelBuilder, e: &AttnExpr, vars: &[ExprId; 3]) -> Result<ExprId, String> {
    match e {
        AttnExpr::Var(v) => attn_var(*v, vars).ok_or_else(|| "score in a mask".to_string()),
        AttnExpr::Const(c) if c.fract() == 0.0 => Ok(k.int(*c as i64)),
        AttnExpr::Binary(op, a, b) if !matches!(op, Binary::And | Binary::Or) => {
            let (a, b) = (attn_int(k, a, vars)?, attn_int(k, b, vars)?);
            Ok(k.binary(binary_op(*op), a, b))
        }
        _ => Err("an integer is needed".into()),
    }
}

fn attn_bool(k: &mut KernelBuilder, e: &AttnExpr, vars: &[ExprId; 3]) -> Result<ExprId, String> {
    match e {
        AttnExpr::True => {
            let zero = k.int(0);
            Ok(k.exprs.add(Expr::Cmp(p::CmpOp::Ge, vars[2], zero)))
        }
        AttnExpr::Compare(op, a, b) => {
            let (a, b) = (attn_int(k, a, vars)?, attn_int(k, b, vars)?);
            Ok(k.exprs.add(Expr::Cmp(compare(*op), a, b)))
        }
        AttnExpr::Binary(op @ (Binary::And | Binary::Or), a, b) => {
            let (a, b) = (attn_bool(k, a, vars)?, attn_bool(k, b, vars)?);
            Ok(k.exprs.add(Expr::Binary(binary_op(*op), a, b)))
        }
        AttnExpr::Unary(Unary::Not, a) => {
            let a = attn_bool(k, a, vars)?;
            Ok(k.exprs.add(Expr::Unary(p::UnaryOp::Not, a)))
        }
        _ => Err("a condition is needed".into()),
    }
}

/// Bounds of the keys that a query may see, from the terms of a conjunction: `key <= query + c`, `key > query - c`.
fn mask_bounds(k: &mut KernelBuilder, mask: &AttnExpr, query: ExprId) -> (Option<ExprId>, Option<ExprId>) {
    let mut bounds = (None, None);
    let mut terms = vec![mask];
    while let Some(term) = terms.pop() {
        match term {
            AttnExpr::Binary(Binary::And, a, b) => terms.extend([&**a, &**b]),
            AttnExpr::Compare(op, key, limit) if **key == AttnExpr::Var(AttnVar::Key) => {
                let Some(offset) = query_offset(limit) else { continue };
                let extra = match op {
                    Compare::Le | Compare::Gt => 1,
                    Compare::Lt | Compare::Ge => 0,
                    _ => continue,
                };
                let c = k.int(offset + extra);
                let limit = k.add(query, c);
                match op {
                    Compare::Le | Compare::Lt => bounds.1 = bounds.1.or(Some(limit)),
                    _ => bounds.0 = bounds.0.or(Some(limit)),
                }
            }
            _ => {}
        }
    }
    bounds
}

/// `c` if the expression is `query + c` or `query - c`.
fn query_offset(e: &AttnExpr) -> Option<i64> {
    match e {
        AttnExpr::Var(AttnVar::Query) => Some(0),
        AttnExpr::Binary(op @ (Binary::Add | Binary::Sub), a, b) => match (&**a, &**b) {
            (AttnExpr::Var(AttnVar::Query), AttnExpr::Const(c)) => Some(if *op == Binary::Add { *c as i64 } else { -(*c as i64) }),
            _ => None,
        },
        _ => None,
    }
}

fn region_name<'a>(frame: &Frame<'a>, v: ValueId) -> &'static str {
    let mut node = frame.func.node(v);
    while matches!(node.op, Op::Convert | Op::Reshape) {
        node = frame.func.node(node.inputs[0]);
    }
    g::build::op_name(&node.op)
}

/// `model.layers.0.self_attn.q_proj.weight+model.layers.0.self_attn.k_proj.weight` -> `q_proj+k_proj`
fn weight_label(name: &str) -> String {
    let part = |p: &str| {
        let p = p.trim_end_matches(".bf16").trim_end_matches(".t").trim_end_matches(".weight");
        p.rsplit('.').next().unwrap_or(p).to_string()
    };
    name.split('+').map(part).collect::<Vec<_>>().join("+")
}

/// Parameters by layout, see [`WeightSource`].
pub(super) type WeightKey = (Vec<ParamId>, Layout);

/// For tests of the period search.
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
