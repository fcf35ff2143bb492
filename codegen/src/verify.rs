//! Verifier of programs: what holds whatever the CPU. Kernel generators rely on it, and look only at what they have code for on theirs
//! (`kernels/rows/check.rs`, `check` of `kernels/attention.rs`).
//!
//! Memory
//! - Buffers start at multiples of 64 bytes, have rows of a multiple of 32 elements and lie inside `arena_bytes`.
//! - `private_bytes` is a multiple of 128; offsets of private operands are multiples of 64 and lie inside.
//! - Operands name buffers and weights that exist, with their element type; tables are i32; `output` is f32; weights start at
//!   multiples of 64 bytes.
//! - Per-layer tables (weights, state) have one entry, or one for every layer of the loop around their region.
//!
//! Expressions
//! - Well typed ([`crate::expr::types`]); used variables are bound (outer, inner, fold), scalars are results of earlier reductions, `acc`
//!   is used in matmul epilogues only, `score` in attention only; constant divisors of integers are positive, and nothing is divided
//!   that follows to be negative (division is of unsigned numbers).
//! - Stored types are f32, bf16, f16 or i8 (the KV cache); indices are integers, stored values f32. Tables, weights and tokens are never
//!   stored to.
//! - An index whose extremes follow from constants, extents and the bounds of row tables lies inside its buffer, panels or scratch.
//!
//! Kernels
//! - A bucket has rows, at least as many as the smallest step that takes it.
//! - Records are made for arithmetic that takes codes, in groups of 32, 64, 128 or 256; their rows begin at multiples of 8 bytes, for tiles
//!   of 64.
//! - Stage ranges are not empty; the prologue of a matmul has one outer variable, group nests have two and name existing groups.
//! - Rows of what a matmul, an attention or a quantisation reads and writes begin where those of the buffer do.
//! - A matmul's panels are its weight's; rows of `a` hold the padded k; the bf16 dot wants bf16 `a` and pairs of k;
//!   integer arithmetic wants records and codes in packs that its instruction takes. Each of its ways of reading has a stream, and is for
//!   a CPU of its own.
//! - An attention's query heads are a multiple of its KV heads, its tiles those of the program, its rows inside their buffers, its cache
//!   bf16 where its products are dots of bf16; pages, and each layer's first, are multiples of 64 bytes.
//!
//! Order
//! - Each region is executed; layer loops are not nested or empty.
//! - Between two regions of which one writes memory (arena bytes, state, output) that the other reads or writes, there is a barrier, also
//!   around the layer loop; a region may write the same buffer again in the next layer.
//! - What a region overwrites it reads at the same index, or in an earlier or later stage of the same iteration of a nest, or (group nests
//!   of a matmul) in the same unit; never elsewhere, as what a matmul reads through `a` or its prologue and an attention as `q`.

mod order;

use crate::error::Error;
use crate::expr::{Type, children, types, variables};
use crate::isa::BF16_TILE_K;
use crate::program::*;
use std::collections::{BTreeSet, HashMap, HashSet};

/// All violations, each with the region it is in.
pub fn verify(program: &Program) -> Result<(), Error> {
    let mut v = Verifier { program, errors: vec![], at: String::new() };
    v.memory();
    for (i, region) in program.regions.iter().enumerate() {
        v.at = format!("region r{i} {}", region.name);
        v.region(region, layers_of(program, i as u32));
    }
    v.at = "body".into();
    v.body();
    if v.errors.is_empty() { Ok(()) } else { Err(Error::Program(v.errors)) }
}

/// Trip count of the layer loop around a region (1: none).
fn layers_of(program: &Program, region: u32) -> usize {
    let has = |items: &[Item]| items.contains(&Item::Region(RegionId(region)));
    let counts = program.body.iter().map(|item| match item {
        Item::Layers { count, body } if has(body) => *count as usize,
        _ => 1,
    });
    counts.max().unwrap_or(1)
}

struct Verifier<'a> {
    program: &'a Program,
    errors: Vec<String>,
    at: String,
}

/// Where expressions stand: what they may use.
#[derive(Clone, Default)]
struct Context<'a> {
    operands: Vec<&'a Operand>,
    /// Bounds of variables, inclusive.
    vars: HashMap<VarId, (i64, i64)>,
    scalars: HashSet<ScalarId>,
    ways: u32,
    score: bool,
}

impl<'a> Verifier<'a> {
    fn fail(&mut self, message: impl Into<String>) {
        self.errors.push(format!("{}: {}", self.at, message.into()));
    }
    fn check(&mut self, good: bool, message: impl FnOnce() -> String) {
        if !good {
            self.fail(message());
        }
    }

    fn memory(&mut self) {
        let p = self.program;
        for (i, b) in p.buffers.iter().enumerate() {
            self.at = format!("buffer b{i} {}", b.name);
            let end = b.offset + b.bytes();
            self.check(b.offset.is_multiple_of(64), || format!("offset {} is not a multiple of 64", b.offset));
            self.check(b.stride.is_multiple_of(32), || format!("stride {} is not a multiple of 32", b.stride));
            self.check(end <= p.arena_bytes, || format!("ends at {end}, the arena at {}", p.arena_bytes));
        }
        for (i, w) in p.weights.iter().enumerate() {
            self.at = format!("weight w{i} {}", w.name);
            self.check(!w.offsets.is_empty(), || "has no offsets".into());
            self.check(w.offsets.iter().all(|o| o.is_multiple_of(64)), || "an offset is not a multiple of 64".into());
            if let Layout::Panels(panels) = &w.layout {
                self.check(panels.nr > 0 && panels.k_pack > 0 && (1..=2).contains(&panels.ways) && !panels.is_empty(), || {
                    format!("bad panels {panels}")
                });
            }
        }
        self.at = "program".into();
        self.check((1..=p.bucket).contains(&p.least_rows), || format!("{} to {} rows", p.least_rows, p.bucket));
        self.check(p.private_bytes.is_multiple_of(128), || format!("private_bytes {} is not a multiple of 128", p.private_bytes));
    }

    fn region(&mut self, region: &'a Region, layers: usize) {
        match &region.kernel {
            Kernel::Loops(nest) => self.nest(nest, None, layers),
            Kernel::Matmul(m) => self.matmul(m, layers),
            Kernel::Attention(a) => self.attention(a, layers),
            Kernel::Quantise(q) => self.quantise(q, None, layers),
        }
    }

    fn table(&mut self, what: &str, len: usize, layers: usize) {
        self.check(len == 1 || len >= layers && len > 0, || format!("{what} has {len} entries for {layers} layers"));
    }

    fn operand(&mut self, name: &str, o: &Operand, layers: usize) {
        let p = self.program;
        let expect = |v: &mut Self, dtype: DType| {
            v.check(o.dtype == dtype, || format!("{name} is read as {}, its place holds {dtype}", o.dtype));
        };
        match &o.place {
            Place::Weight(id) => match p.weights.get(id.index()) {
                Some(w) => {
                    // Lookups read codes and scales of coded panels.
                    let coded = matches!(w.layout, Layout::Panels(p) if p.coding != Coding::Elements);
                    if !coded {
                        expect(self, w.dtype);
                    }
                    self.table(&format!("{name} (w{})", id.0), w.offsets.len(), layers);
                }
                None => self.fail(format!("{name}: weight w{} does not exist", id.0)),
            },
            Place::Buffer(id) => match p.buffers.get(id.index()) {
                Some(b) => expect(self, b.dtype),
                None => self.fail(format!("{name}: buffer b{} does not exist", id.0)),
            },
            Place::Private(offset) => {
                self.check(*offset < p.private_bytes, || format!("{name} starts at {offset} of {} private bytes", p.private_bytes));
                self.check(offset.is_multiple_of(64), || format!("{name} starts at {offset}, which is not a multiple of 64"));
            }
            Place::State(offsets) => self.table(name, offsets.len(), layers),
            Place::Output => expect(self, DType::F32),
            Place::Table(_) => expect(self, DType::I32),
        }
    }

    fn operands(&mut self, operands: &[Operand], layers: usize) {
        for (i, o) in operands.iter().enumerate() {
            self.operand(&format!("o{i}"), o, layers);
        }
    }

    fn extent(&self, extent: Extent) -> i64 {
        self.program.capacity(extent).into()
    }

    /// `outer`: bounds of the outer variables where a matmul sets them.
    fn nest(&mut self, nest: &'a LoopNest, outer: Option<&[i64]>, layers: usize) {
        self.operands(&nest.operands, layers);
        if let Some(outer) = outer {
            self.check(outer.len() == nest.outer.len(), || {
                format!("a nest of a matmul has {} outer variables, not {}", nest.outer.len(), outer.len())
            });
        }
        let mut place = Context { operands: nest.operands.iter().collect(), ..Default::default() };
        for (i, (var, extent)) in nest.outer.iter().enumerate() {
            let n = outer.and_then(|o| o.get(i).copied()).unwrap_or_else(|| self.extent(*extent));
            self.check(!place.vars.contains_key(var), || format!("v{} is bound twice", var.0));
            place.vars.insert(*var, (0, n - 1));
        }
        let Some(types) = self.types(&nest.exprs, &place) else { return };
        for stage in &nest.stages {
            self.check(!stage.range.is_empty(), || format!("the range of v{} is empty", stage.var.0));
            self.check(!place.vars.contains_key(&stage.var), || format!("v{} is bound twice", stage.var.0));
            let mut here = place.clone();
            here.vars.insert(stage.var, (stage.range.start.into(), i64::from(stage.range.end) - 1));
            match &stage.kind {
                StageKind::Reduce { value, into, .. } => {
                    self.root(&nest.exprs, &types, &here, *value, Type::Float);
                    self.check(place.scalars.insert(*into), || format!("s{} is set twice", into.0));
                }
                StageKind::Store(stores) => stores.iter().for_each(|s| self.store(&nest.exprs, &types, &here, s)),
            }
        }
    }

    fn types(&mut self, exprs: &Exprs, place: &Context<'a>) -> Option<Vec<Type>> {
        let dtypes: Vec<DType> = place.operands.iter().map(|o| o.dtype).collect();
        match types(exprs, &dtypes) {
            Ok(list) => Some(list),
            Err((id, message)) => {
                self.fail(format!("e{}: {message}", id.0));
                None
            }
        }
    }

    fn store(&mut self, exprs: &Exprs, types: &[Type], place: &Context<'a>, s: &Store) {
        self.root(exprs, types, place, s.index, Type::Int);
        self.root(exprs, types, place, s.value, Type::Float);
        let Some(o) = place.operands.get(s.operand.index()) else {
            return self.fail(format!("store to o{}, which does not exist", s.operand.0));
        };
        let stored = matches!(o.dtype, DType::F32 | DType::F16 | DType::Bf16 | DType::I8);
        self.check(stored, || format!("store to o{} as {}", s.operand.0, o.dtype));
        self.check(!matches!(o.place, Place::Weight(_) | Place::Table(_)), || format!("store to o{}, which is read-only", s.operand.0));
        if let Some(index) = exprs.nodes().get(s.index.index()).and_then(|_| self.bounds(exprs, place, s.index)) {
            self.inside(o, index, &format!("store to o{}", s.operand.0));
        }
    }

    /// One expression used by a kernel, and all below it.
    fn root(&mut self, exprs: &Exprs, types: &[Type], place: &Context<'a>, id: ExprId, ty: Type) {
        match types.get(id.index()) {
            None => return self.fail(format!("e{} does not exist", id.0)),
            Some(t) => self.check(*t == ty, || format!("e{} is {t:?}, not {ty:?}", id.0)),
        }
        let mut seen = BTreeSet::new();
        self.uses(exprs, place, id, &mut seen);
    }

    fn uses(&mut self, exprs: &Exprs, place: &Context<'a>, id: ExprId, seen: &mut BTreeSet<ExprId>) {
        if !seen.insert(id) {
            return;
        }
        let node = exprs.get(id);
        match node {
            Expr::Var(v) => self.check(place.vars.contains_key(&v), || format!("v{} is not bound here", v.0)),
            Expr::Scalar(s) => self.check(place.scalars.contains(&s), || format!("s{} is used before its reduction", s.0)),
            Expr::Acc(way) => self.check(way < place.ways, || format!("acc{way} does not exist here")),
            Expr::Score => self.check(place.score, || "score outside attention".into()),
            Expr::Binary(BinaryOp::Div | BinaryOp::Rem, a, b) => {
                if let Expr::Int(c) = exprs.get(b) {
                    self.check(c > 0, || format!("e{} divides by {c}", id.0));
                }
                if let Some((low, _)) = self.bounds(exprs, place, a) {
                    self.check(low >= 0, || format!("e{} divides {low}, which is negative", id.0));
                }
            }
            Expr::Load(o, index) => {
                if let (Some(operand), Some(bounds)) = (place.operands.get(o.index()), self.bounds(exprs, place, index)) {
                    let operand = *operand;
                    self.inside(operand, bounds, &format!("load from o{}", o.0));
                }
            }
            Expr::Fold { var, begin, end, body, .. } => {
                self.uses(exprs, place, begin, seen);
                self.uses(exprs, place, end, seen);
                self.check(!place.vars.contains_key(&var), || format!("v{} is bound twice", var.0));
                let (low, high) = (self.bounds(exprs, place, begin), self.bounds(exprs, place, end));
                let mut inner = place.clone();
                // Unknown ends: nothing is known of the variable.
                let low = low.map_or(i64::MIN, |b| b.0);
                let high = high.map_or(i64::MAX, |b| b.1 - 1);
                inner.vars.insert(var, (low, high));
                // The body may share nodes with what was seen outside; its own nodes use the inner variable.
                self.uses(exprs, &inner, body, &mut BTreeSet::new());
                return;
            }
            _ => {}
        }
        for child in children(&node) {
            self.uses(exprs, place, child, seen);
        }
    }

    /// Least and greatest value of an integer expression, where both are known to occur.
    fn bounds(&self, exprs: &Exprs, place: &Context<'a>, id: ExprId) -> Option<(i64, i64)> {
        self.values(exprs, place, id).map(|v| (v.low, v.high))
    }

    fn values(&self, exprs: &Exprs, place: &Context<'a>, id: ExprId) -> Option<Values> {
        let dense = |low, high| Some(Values { low, high, dense: true });
        match exprs.get(id) {
            Expr::Int(v) => dense(v, v),
            Expr::Var(v) => {
                let (low, high) = *place.vars.get(&v)?;
                if low == i64::MIN || high == i64::MAX { None } else { dense(low, high) }
            }
            Expr::Load(o, _) => {
                let rows = i64::from(self.program.bucket);
                match place.operands.get(o.index())?.place {
                    Place::Table(Table::LogitRow) => dense(0, rows - 1),
                    Place::Table(Table::RunBegin) => dense(0, rows),
                    _ => None,
                }
            }
            Expr::Binary(op, a, b) => {
                let (x, y) = (self.values(exprs, place, a)?, self.values(exprs, place, b)?);
                let constant = (y.low == y.high).then_some(y.low);
                match op {
                    BinaryOp::Div => {
                        let c = constant.filter(|c| *c > 0 && x.low >= 0)?;
                        Some(Values { low: x.low / c, high: x.high / c, dense: x.dense })
                    }
                    BinaryOp::Rem => {
                        let c = constant.filter(|c| *c > 0 && x.low >= 0)?;
                        if x.low / c == x.high / c {
                            Some(Values { low: x.low % c, high: x.high % c, dense: x.dense })
                        } else {
                            // Every remainder occurs between two multiples of c.
                            let all = x.dense && x.high - x.low + 1 >= c;
                            if all { dense(0, c - 1) } else { None }
                        }
                    }
                    _ => {
                        // Extremes of both sides meet only when the sides do not depend on the same variables.
                        if !variables(exprs, a).is_disjoint(&variables(exprs, b)) {
                            return None;
                        }
                        let one = x.low == x.high || y.low == y.high;
                        let (low, high, dense) = match op {
                            BinaryOp::Add => (x.low.checked_add(y.low)?, x.high.checked_add(y.high)?, one && x.dense && y.dense),
                            BinaryOp::Sub => (x.low.checked_sub(y.high)?, x.high.checked_sub(y.low)?, one && x.dense && y.dense),
                            BinaryOp::Mul => {
                                let (l, h) = ([x.low, x.high], [y.low, y.high]);
                                let mut all = vec![];
                                for a in l {
                                    for b in h {
                                        all.push(a.checked_mul(b)?);
                                    }
                                }
                                (*all.iter().min()?, *all.iter().max()?, constant == Some(1))
                            }
                            BinaryOp::Min => (x.low.min(y.low), x.high.min(y.high), false),
                            BinaryOp::Max => (x.low.max(y.low), x.high.max(y.high), false),
                            _ => return None,
                        };
                        Some(Values { low, high, dense })
                    }
                }
            }
            _ => None,
        }
    }

    fn inside(&mut self, o: &Operand, index: (i64, i64), what: &str) {
        let p = self.program;
        let len = match &o.place {
            Place::Buffer(id) => p.buffers.get(id.index()).map(|b| i64::from(b.rows) * i64::from(b.stride)),
            Place::Weight(id) => p.weights.get(id.index()).and_then(|w| match w.layout {
                Layout::Panels(panels) => Some((panels.bytes(w.dtype) / o.dtype.size()) as i64),
                Layout::Plain => None,
            }),
            Place::Private(offset) => Some((p.private_bytes.saturating_sub(*offset) / o.dtype.size()) as i64),
            _ => None,
        };
        if let Some(len) = len {
            self.check(index.0 >= 0 && index.1 < len, || format!("{what}: elements {}..={} of {len}", index.0, index.1));
        }
    }

    /// A kernel and the buffer that its rows lie in agree about where each begins.
    fn rows_of(&mut self, name: &str, o: &Operand, stride: u32) {
        if let Place::Buffer(id) = o.place
            && let Some(b) = self.program.buffers.get(id.index())
        {
            self.check(b.stride == stride, || format!("{name} has rows of {stride}, b{} {} of {}", id.0, b.name, b.stride));
        }
    }

    fn matmul(&mut self, m: &'a Matmul, layers: usize) {
        let p = self.program;
        self.operand("a", &m.a, layers);
        self.rows_of("a", &m.a, m.a_stride);
        match p.weights.get(m.weight.index()) {
            None => self.fail(format!("weight w{} does not exist", m.weight.0)),
            Some(w) => {
                self.check(w.layout == Layout::Panels(m.panels), || format!("panels differ from those of w{}", m.weight.0));
                self.table(&format!("w{}", m.weight.0), w.offsets.len(), layers);
                if m.compute.takes_codes() {
                    let coded = m.panels.coding != Coding::Elements;
                    self.check(coded && m.a.dtype == DType::U8, || "integer arithmetic wants records and codes".into());
                }
                if m.compute == Compute::CodesInBf16Tiles {
                    let short = m.panels.coding == Coding::Int4 { group: SHORT_GROUP, zeros: false };
                    self.check(short, || format!("tiles of bf16 do not hold {:?}", m.panels.coding));
                }
                let pack = m.compute.k_pack(w.dtype, m.panels.coding);
                self.check(m.panels.k_pack == pack, || format!("panels in packs of {} k, not {pack}", m.panels.k_pack));
                if m.compute.takes_bf16() {
                    let good = w.dtype == DType::Bf16 && m.a.dtype == DType::Bf16;
                    self.check(good, || "bf16 arithmetic wants bf16 inputs and weights".into());
                }
            }
        }
        self.check(matches!(m.rows, Extent::Rows | Extent::LogitRows), || format!("rows are {}", m.rows));
        // Elements of a row that are read: floats by k, or records.
        let width = match m.panels.coding.group() {
            Some(group) if m.compute.takes_codes() => m.compute.row_bytes(m.panels.k, group),
            Some(_) => m.panels.k,
            None => m.panels.padded_k(),
        };
        self.check(m.a_stride >= width, || format!("rows of a have {} of {width} k", m.a_stride));
        let walks = |fetch: &Fetch| fetch.streams > 0 && fetch.busy.is_none_or(|b| b.rows > 0) && fetch.near.is_none_or(|n| n.streams > 0);
        self.check(m.tile.mr > 0 && walks(&m.tile.fetch) && m.tile.n_block > 0, || "empty tile".into());
        for (i, (kind, fetch)) in m.fetch_by_cpu.iter().enumerate() {
            self.check(walks(fetch), || format!("no streams on {kind:?}"));
            self.check(m.fetch_by_cpu[..i].iter().all(|(other, _)| other != kind), || format!("streams on {kind:?} twice"));
        }
        let blocks = (1..=m.tile.mr).contains(&m.tile.block_mr);
        self.check(blocks, || format!("blocks of {} rows in tiles of {}", m.tile.block_mr, m.tile.mr));
        // Each pass has several blocks of rows.
        let passes = m.tile.m_block == 0 || m.tile.m_block > 2 * m.tile.mr;
        self.check(passes, || format!("passes of {} rows in tiles of {}", m.tile.m_block, m.tile.mr));
        self.check(m.tile.k_block.is_multiple_of(2), || format!("k_block {} is odd", m.tile.k_block));
        let rows = self.extent(m.rows);
        if width <= m.a_stride {
            self.inside(&m.a, (0, (rows - 1) * i64::from(m.a_stride) + i64::from(width) - 1), "a");
        }
        // Every thread makes these for itself.
        let private = |o: &Operand| matches!(o.place, Place::Private(_));
        if let Some(q) = &m.quantise {
            self.check(private(&q.out), || "records of a matmul's own are not private".into());
            self.quantise(q, Some(m), layers);
        }
        if let Some(nest) = &m.prologue {
            let mut stored = nest.stores().filter_map(|s| nest.operands.get(s.operand.index()));
            self.check(stored.all(private), || "a prologue stores what is not private".into());
            self.nest(nest, Some(&[rows]), layers);
        }
        for g in &m.group_nests {
            let good = g.groups.start < g.groups.end && g.groups.end <= m.panels.groups;
            self.check(good, || format!("groups {}..{} of {}", g.groups.start, g.groups.end, m.panels.groups));
            self.nest(&g.nest, Some(&[rows, i64::from(g.groups.end.saturating_sub(g.groups.start))]), layers);
        }
        self.operands(&m.operands, layers);
        let mut place = Context { operands: m.operands.iter().collect(), ways: m.panels.ways, ..Default::default() };
        place.vars.insert(m.row, (0, rows - 1));
        place.vars.insert(m.col, (0, i64::from(m.panels.padded_cols()) - 1));
        if let Some(types) = self.types(&m.exprs, &place) {
            m.stores.iter().for_each(|s| self.store(&m.exprs, &types, &place, s));
        }
    }

    /// `of`: the matmul that it belongs to.
    fn quantise(&mut self, q: &'a Quantise, of: Option<&Matmul>, layers: usize) {
        self.operand("x", &q.x, layers);
        self.operand("out", &q.out, layers);
        self.rows_of("x", &q.x, q.x_stride);
        self.rows_of("out", &q.out, q.out_stride);
        let width = q.row_bytes();
        self.check(matches!(q.group, 32 | 64 | 128 | 256), || format!("groups of {}", q.group));
        self.check(matches!(q.x.dtype, DType::F32 | DType::F16 | DType::Bf16), || format!("codes of {}", q.x.dtype));
        self.check(q.out.dtype == DType::U8, || format!("records of type {}", q.out.dtype));
        self.check(q.compute.takes_codes(), || format!("records for {:?}", q.compute));
        self.check(q.values_at().is_none() || Quantise::has_powers_of_two(q.group), || format!("values of groups of {}", q.group));
        self.check(q.x_stride >= q.k, || format!("rows of x have {} of {} elements", q.x_stride, q.k));
        self.check(q.out_stride >= width, || format!("rows of out have {} bytes for {width}", q.out_stride));
        let unit = if q.compute.by_tiles() { 64 } else { 8 };
        self.check(q.out_stride.is_multiple_of(unit), || format!("rows of out have {} bytes, no multiple of {unit}", q.out_stride));
        let rows = self.extent(q.rows);
        self.inside(&q.x, (0, (rows - 1) * i64::from(q.x_stride) + i64::from(q.k) - 1), "x");
        self.inside(&q.out, (0, (rows - 1) * i64::from(q.out_stride) + i64::from(width) - 1), "out");
        let own = (q.x.private_rows(q.x_stride, rows as u32), q.out.private_rows(q.out_stride, rows as u32));
        if let (Some(x), Some(out)) = own {
            self.check(x.end <= out.start || out.end <= x.start, || "records lie in the rows that they are made of".into());
        }
        if let Some(m) = of {
            let same = q.out == m.a && q.out_stride == m.a_stride && q.rows == m.rows && q.k == m.panels.k;
            let coding = Some(q.group) == m.panels.coding.group()
                && q.compute == m.compute
                && self.program.weights.get(m.weight.index()).is_none_or(|w| q.bias_factor == m.panels.coding.bias_factor(w.dtype));
            self.check(same && coding, || "the records are not those that the matmul reads".into());
        }
    }

    fn attention(&mut self, a: &'a Attention, layers: usize) {
        self.operand("q", &a.q, layers);
        self.operand("out", &a.out, layers);
        self.rows_of("q", &a.q, a.q_stride);
        self.rows_of("out", &a.out, a.out_stride);
        self.table("state_offsets", a.state_offsets.len(), layers);
        let heads = a.kv_heads > 0 && a.heads.is_multiple_of(a.kv_heads) && a.heads > 0 && a.kv.head_dim > 0 && a.tile_rows > 0;
        self.check(heads, || format!("{} heads, {} KV heads of {}", a.heads, a.kv_heads, a.kv.head_dim));
        let last = |row: u32, head: u32| {
            let [rows, heads] = [self.program.bucket, a.heads].map(|n| i64::from(n) - 1);
            rows * i64::from(row) + heads * i64::from(head) + i64::from(a.kv.head_dim) - 1
        };
        let (q, out) = (last(a.q_stride, a.q_head_stride), last(a.out_stride, a.kv.head_dim));
        self.inside(&a.q, (0, q), "q");
        self.inside(&a.out, (0, out), "out");
        let tile_rows = self.program.tile_rows;
        self.check(a.tile_rows == tile_rows, || format!("tiles of {} rows, those of the program have {tile_rows}", a.tile_rows));
        let compute = match a.compute {
            Compute::F32 => true,
            Compute::Bf16Dot => a.kv.dtype == DType::Bf16,
            Compute::Bf16Tiles => a.kv.dtype == DType::Bf16 && a.kv.head_dim.is_multiple_of(BF16_TILE_K),
            _ => false,
        };
        self.check(compute, || format!("{:?} over a cache of {}", a.compute, a.kv.dtype));
        let pages = a.page_bytes >= u64::from(a.kv_heads) * a.kv.bytes();
        self.check(pages, || format!("a page of {} bytes for {} heads of {}", a.page_bytes, a.kv_heads, a.kv.bytes()));
        let aligned = a.page_bytes.is_multiple_of(64) && a.state_offsets.iter().all(|offset| offset.is_multiple_of(64));
        self.check(aligned, || format!("pages of {} bytes from {:?} on are no multiples of 64", a.page_bytes, a.state_offsets));
        let mut place = Context { score: true, ..Default::default() };
        let unknown = (i64::MIN, i64::MAX);
        place.vars.extend([(a.head_var, unknown), (a.query_var, unknown), (a.key_var, unknown)]);
        let Some(types) = self.types(&a.exprs, &place) else { return };
        self.root(&a.exprs, &types, &place, a.score, Type::Float);
        place.score = false;
        if let Some(mask) = a.mask {
            self.root(&a.exprs, &types, &place, mask, Type::Bool);
        }
        let bounds = [a.key_lower, a.key_upper];
        let near = |offset: &i64| i32::try_from(*offset).is_ok();
        self.check(bounds.iter().flatten().all(near), || format!("keys from {:?} to {:?} of the query", a.key_lower, a.key_upper));
    }
}

/// Values of an integer expression: the extremes occur; `dense`: so does everything between.
struct Values {
    low: i64,
    high: i64,
    dense: bool,
}
