//! Planning matmuls: what a matmul takes along so that its output never makes another trip through memory.
//!
//! - The elementwise chain that ends in its only user (bias, activation, gate * up, residual, conversion) is computed in registers.
//! - At few rows, the norm before it: every thread computes it for itself instead of meeting at a barrier.
//! - Head-wise work on its groups of columns (norm of heads, RoPE, cache append) is done by the task that has just stored the head.

use super::attention::KvPart;
use super::frame::{Cols, Frame, Home, Rows, storage};
use super::kernel::{KernelBuilder, evaluate};
use super::lower::{Lowering, Stop};
use super::panels::panels;
use super::tiling::MatmulWork;
use super::{Plan, PlanError};
use rcompile_codegen::expr::below;
use rcompile_codegen::program as p;
use rcompile_codegen::program::{
    Buffer, BufferId, Compute, DType, Expr, ExprId, Extent, GroupNest, Kernel, Layout, LoopNest, Matmul, Operand, Panels, Place, Quantise,
    StageKind, Store,
};
use rcompile_graph::{Dim, Op, OpClass, ValueId};
use std::collections::BTreeSet;

/// Rows up to which a norm is computed by every thread for itself.
const PRIVATE_ROWS: u64 = 8;

impl Plan<'_> {
    /// A matmul with everything that it takes along.
    pub(super) fn matmul(&mut self, frame: &mut Frame<'_>, id: ValueId) -> Result<(), PlanError> {
        let node = frame.func.node(id).clone();
        let weight = match frame.func.node(node.inputs[1]).op {
            Op::Param(p) if node.op == (Op::Mm { rhs_t: true }) => p,
            _ => return Err(PlanError::Unsupported(format!("{}: matmul of two computed values", node.origin))),
        };
        let weight_ty = &frame.module.params[weight.index()].ty;
        let (n, depth) = (self.bound(frame, weight_ty.shape[0]) as u32, self.bound(frame, weight_ty.shape[1]) as u32);
        let dtype = self.weights.storage(weight_ty.dtype)?;
        let (chain, group_cols) = self.chain_and_groups(frame, id, n);
        let columns = (n / chain.ways / group_cols, group_cols, chain.ways);
        let (compute, panels) = panels(self.cx.isa, (frame.func.ty(node.inputs[0]).dtype, weight_ty.dtype), depth, columns)?;
        let row_dim = node.ty.shape[0];
        let times = Times { rows: row_dim, panels: &panels, weight_dtype: dtype, compute };
        let left = self.left(frame, node.inputs[0], &times)?;
        // Epilogue.
        let cols = if panels.groups > 1 { Cols::Grouped { cols: group_cols, padded: panels.padded_group() } } else { Cols::Plain };
        // A tied head's weight has the embedding's name.
        let name = match frame.func.outputs.contains(&chain.end) && !self.in_layers {
            true => "lm_head".to_string(),
            false => weight_label(&frame.module.params[weight.index()].name),
        };
        let home = self.buffer(frame, chain.end, &name, panels.padded_cols().max(self.row_width(frame, chain.end)), cols)?;
        let epilogue = self.retry(frame, |plan, frame| plan.epilogue(frame, &chain, &home, &panels))?;
        let weight_id = self.weights.get(&frame.params[&weight].clone(), Layout::Panels(panels));
        frame.homes.insert(chain.end, home);
        frame.done.extend(chain.inner);
        let group_nests = if panels.groups > 1 { self.group_nests(frame, chain.end, row_dim, &panels)? } else { vec![] };
        let work = MatmulWork { isa: self.cx.isa, rows: self.bound(frame, row_dim), panels: &panels, dtype, compute };
        let (tile, fetch_by_cpu) = work.tile(self.cx.tuning);
        let matmul = Matmul {
            rows: self.extent(frame, row_dim)?,
            a: left.rows.operand,
            a_stride: left.rows.stride,
            prologue: left.prologue,
            quantise: left.quantise,
            weight: weight_id,
            panels,
            compute,
            tile,
            fetch_by_cpu,
            row: epilogue.row,
            col: epilogue.col,
            operands: epilogue.operands,
            exprs: epilogue.exprs,
            stores: epilogue.stores,
            group_nests,
        };
        self.region(&name, Kernel::Matmul(Box::new(matmul)));
        Ok(())
    }

    /// The elementwise chain above a matmul with `n` columns, and the columns of a group of its output: of a head, or all of a way.
    fn chain_and_groups(&self, frame: &Frame<'_>, id: ValueId, n: u32) -> (Chain, u32) {
        let groups = |chain: &Chain| if chain.ways == 1 { self.head_groups(frame, chain.end, n) } else { None };
        let mut chain = self.epilogue_chain(frame, id);
        if chain.end != id && groups(&chain).is_some_and(|cols| !cols.is_multiple_of(self.cx.isa.panel_nr())) {
            // Padded heads: vectors by real column do not line up with the registers' columns.
            chain = Chain { end: id, ways: 1, accumulators: vec![id], inner: vec![] };
        }
        let cols = groups(&chain).unwrap_or(n / chain.ways);
        (chain, cols)
    }

    /// The left operand: the rows `input`, or records of them where it is codes. Codes are made from floats: by each thread for itself where
    /// rows are few, else in a region of their own.
    fn left(&mut self, frame: &mut Frame<'_>, input: ValueId, times: &Times<'_>) -> Result<Left, PlanError> {
        let coded = Some(input).filter(|v| frame.func.ty(*v).dtype.is_quantised());
        if let Some(codes) = coded
            && let Some(rows) = frame.records.get(&times.records_of(codes))
        {
            return Ok(Left { rows: rows.clone(), prologue: None, quantise: None });
        }
        let x = coded.map_or(input, |codes| frame.func.node(codes).inputs[0]);
        let has_one_user = |v: ValueId| frame.users[v.index()].len() == 1;
        // Records that another matmul reads, too, are stored.
        let by_each_thread = self.bound(frame, times.rows) <= PRIVATE_ROWS && coded.is_none_or(has_one_user);
        let is_private = by_each_thread && !frame.homes.contains_key(&x) && has_one_user(x) && self.is_computed(frame, x);
        let (floats, prologue) = if is_private {
            let (rows, nest) = self.private_rows(frame, x, (times.rows, times.panels.k))?;
            (rows, Some(nest))
        } else {
            (self.stored_rows(frame, x, times.panels.k)?, None)
        };
        let (rows, quantise) = match coded {
            Some(codes) => self.codes(frame, codes, floats, times, by_each_thread)?,
            None => (floats, None),
        };
        Ok(Left { rows, prologue, quantise })
    }

    /// A value of `k` columns that every thread computes for itself, at the start of its private area.
    fn private_rows(&mut self, frame: &mut Frame<'_>, x: ValueId, (row_dim, k): (Dim, u32)) -> Result<(Rows, LoopNest), PlanError> {
        let (dtype, stride) = (self.stored_type(frame.func.ty(x).dtype)?, k.next_multiple_of(32));
        let home = Home::Private { offset: 0, dtype, stride };
        let nest = self.retry(frame, |plan, frame| plan.value_nest(frame, x, &home))?;
        self.reserve_private(self.bound(frame, row_dim) * u64::from(stride) * dtype.size());
        Ok((Rows { operand: Operand { place: Place::Private(0), dtype }, stride }, nest))
    }

    /// A value of `k` columns in a buffer whose columns are its own.
    fn stored_rows(&mut self, frame: &mut Frame<'_>, x: ValueId, k: u32) -> Result<Rows, PlanError> {
        let home = match self.home(frame, x)? {
            home @ Home::Buffer { cols: Cols::Plain, .. } => home,
            // Padded columns, or the entry's output: a plain copy first.
            _ => {
                let home = self.new_buffer(frame, x, "copy", k, Cols::Plain)?;
                self.copy(frame, x, &home)?;
                home
            }
        };
        let Home::Buffer { id, dtype, stride, .. } = home else {
            return Err(PlanError::Internal("matmul input has no buffer".into()));
        };
        Ok(Rows { operand: Operand { place: Place::Buffer(id), dtype }, stride })
    }

    /// Each thread's private area holds at least `end` bytes.
    fn reserve_private(&mut self, end: u64) {
        self.program.private_bytes = self.program.private_bytes.max(end.next_multiple_of(128));
    }

    /// Records of the codes of `floats`: made by each thread for itself, or stored by a region of their own.
    fn codes(
        &mut self,
        frame: &mut Frame<'_>,
        codes: ValueId,
        floats: Rows,
        times: &Times<'_>,
        by_each_thread: bool,
    ) -> Result<(Rows, Option<Quantise>), PlanError> {
        let &Times { rows: row_dim, panels, weight_dtype, compute } = times;
        let group = panels.coding.group().ok_or_else(|| PlanError::Internal("codes of rows for a weight without codes".into()))?;
        let stride = compute.record_stride(panels.k, group);
        let bound = self.bound(frame, row_dim);
        let bias_factor = panels.coding.bias_factor(weight_dtype);
        let place = if by_each_thread {
            // Behind the rows of the prologue.
            let offset = match floats.operand.place {
                Place::Private(offset) => (offset + bound * u64::from(floats.stride) * floats.operand.dtype.size()).next_multiple_of(128),
                _ => 0,
            };
            self.reserve_private(offset + bound * u64::from(stride));
            Place::Private(offset)
        } else {
            let id = BufferId(self.program.buffers.len() as u32);
            self.program.buffers.push(Buffer { name: format!("codes.{}", id.0), dtype: DType::U8, rows: bound as u32, stride, offset: 0 });
            Place::Buffer(id)
        };
        let rows = Rows { operand: Operand { place, dtype: DType::U8 }, stride };
        let kernel = Quantise {
            rows: self.extent(frame, row_dim)?,
            x: floats.operand,
            x_stride: floats.stride,
            out: rows.operand.clone(),
            out_stride: stride,
            k: panels.k,
            group,
            compute,
            bias_factor,
        };
        if by_each_thread {
            return Ok((rows, Some(kernel)));
        }
        self.region("quantise", Kernel::Quantise(kernel));
        frame.records.insert(times.records_of(codes), rows.clone());
        Ok((rows, None))
    }

    /// A value that is worth a prologue: something with arithmetic and rows, or another order of columns.
    fn is_computed(&self, frame: &Frame<'_>, v: ValueId) -> bool {
        match frame.func.node(v).op {
            Op::RmsNorm { .. } | Op::LayerNorm { .. } | Op::IndexSelect => true,
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
        let value = Lowering { frame, k: &mut k, weights: &mut self.weights }.at(chain.end, &[row_e, col_e])?;
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
        let fits = node.op.class() == OpClass::Elementwise && node.ty.shape == frame.func.ty(v).shape;
        let others = node.inputs.iter().filter(|i| **i != v).all(|i| self.at_hand(frame, *i, id, frame.func.ty(v).shape.len()));
        (fits && others && storage(node.ty.dtype).is_some()).then_some(user)
    }

    /// Can be read in an epilogue: stored already, or chosen rows of what is, or a vector of parameters or a constant.
    fn at_hand(&self, frame: &Frame<'_>, v: ValueId, id: ValueId, rank: usize) -> bool {
        let node = frame.func.node(v);
        if v.0 > id.0 && !matches!(node.op, Op::Param(_) | Op::Const(_) | Op::Convert | Op::Embedding) {
            return false;
        }
        match node.op {
            Op::Const(_) => true,
            Op::Param(_) => node.ty.rank() < rank,
            Op::Convert => self.at_hand(frame, node.inputs[0], id, rank),
            Op::Embedding if !frame.homes.contains_key(&v) => {
                matches!(frame.func.node(node.inputs[1]).op, Op::Input { .. }) && self.at_hand(frame, node.inputs[0], id, rank)
            }
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
                if node.op.class() != OpClass::Elementwise || node.ty.shape != frame.func.ty(start).shape {
                    break;
                }
                path.push(user);
            }
            path
        };
        let (p, q) = (path(first), path(second));
        let meet = *p.iter().find(|v| q.contains(v))?;
        let inner: Vec<ValueId> = p.iter().chain(&q).copied().filter(|v| *v < meet).collect();
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
    fn group_nests(&mut self, frame: &mut Frame<'_>, end: ValueId, row: Dim, panels: &Panels) -> Result<Vec<GroupNest>, PlanError> {
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
                        Err(Stop::Failed(e)) => return Err(e),
                        Err(_) => self.drop_buffer(&home),
                    }
                }
                Op::KvAppend { .. } => {
                    if frame.done.contains(&id) || !depends_on(frame, node.inputs[0], end) || !depends_on(frame, node.inputs[1], end) {
                        continue;
                    }
                    let (keys, values) =
                        match (self.append_nest(frame, id, KvPart::Keys, row), self.append_nest(frame, id, KvPart::Values, row)) {
                            (Ok(keys), Ok(values)) => (keys, values),
                            (Err(Stop::Failed(e)), _) | (_, Err(Stop::Failed(e))) => return Err(e),
                            _ => continue,
                        };
                    let groups = (groups_of(&keys, buffer, stride, panels), groups_of(&values, buffer, stride, panels));
                    if let (Some(k), Some(v)) = groups {
                        nests.push(GroupNest { groups: k, nest: keys });
                        nests.push(GroupNest { groups: v, nest: values });
                        frame.done.insert(id);
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
}

/// What rows are multiplied with, and how.
struct Times<'p> {
    rows: Dim,
    panels: &'p Panels,
    weight_dtype: DType,
    compute: Compute,
}

impl Times<'_> {
    /// The key of [`Frame::records`].
    fn records_of(&self, codes: ValueId) -> (ValueId, i32, Compute) {
        (codes, self.panels.coding.bias_factor(self.weight_dtype), self.compute)
    }
}

/// What a matmul reads of its left operand, and what each thread does for itself before.
struct Left {
    rows: Rows,
    prologue: Option<LoopNest>,
    quantise: Option<Quantise>,
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

/// The only user of a value (it may use it twice).
fn single_user(frame: &Frame<'_>, v: ValueId) -> Option<ValueId> {
    let users = &frame.users[v.index()];
    let first = *users.first()?;
    users.iter().all(|u| *u == first).then_some(first)
}

/// Is `v` computed from `source` by nothing but values that have no home and need none?
fn depends_on(frame: &Frame<'_>, v: ValueId, source: ValueId) -> bool {
    let node = frame.func.node(v);
    let stored = frame.homes.contains_key(&v) || node.op.class() == OpClass::Anchor;
    v == source || v > source && !stored && node.inputs.iter().any(|i| depends_on(frame, *i, source))
}

/// Groups that a nest over (row, head) reads from `buffer`, if each head reads its own group only.
fn groups_of(nest: &LoopNest, buffer: BufferId, stride: u32, panels: &Panels) -> Option<std::ops::Range<u32>> {
    let [(row, _), (head, Extent::Const(heads))] = nest.outer[..] else { return None };
    let padded = i64::from(panels.padded_group());
    let mut first = None;
    for stage in &nest.stages {
        let values = match &stage.kind {
            StageKind::Reduce { value, .. } => vec![*value],
            StageKind::Store(stores) => stores.iter().map(|s| s.value).collect(),
        };
        let loads: BTreeSet<ExprId> = values.into_iter().flat_map(|value| element_indices(nest, value, buffer)).collect();
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
fn element_indices(nest: &LoopNest, root: ExprId, buffer: BufferId) -> BTreeSet<ExprId> {
    let index = |id| match nest.exprs.get(id) {
        Expr::Load(operand, index) => (nest.operands[operand.index()].place == Place::Buffer(buffer)).then_some(index),
        _ => None,
    };
    below(&nest.exprs, &[root]).into_iter().filter_map(index).collect()
}

/// A parameter's name without the type that a pass converted it to.
pub(super) fn without_type(name: &str) -> &str {
    let types = [rcompile_graph::DType::BF16].into_iter().chain(rcompile_graph::DType::QUANTISED);
    types.fold(name, |name, t| name.strip_suffix(t.name()).and_then(|n| n.strip_suffix('.')).unwrap_or(name))
}

/// `model.layers.0.self_attn.q_proj.weight+model.layers.0.self_attn.k_proj.weight` -> `q_proj+k_proj`
fn weight_label(name: &str) -> String {
    let part = |p: &str| {
        let p = without_type(p).trim_end_matches(".t").trim_end_matches(".weight");
        p.rsplit('.').next().unwrap_or(p).to_string()
    };
    name.split('+').map(part).collect::<Vec<_>>().join("+")
}
