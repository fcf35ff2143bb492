//! Cost model: what each region of a program moves and computes, as linear forms in what a step holds.
//!
//! In: a finished program (layouts, extents, barriers). Out: one [`RegionInfo`] per region, which the manifest carries; `bench`, `profile`
//! and `inspect --scaling` evaluate them. Nothing else counts work.
//!
//! Bytes are distinct bytes: what an index reaches while its loop variables run, each once, as if caches were perfect. Weights are
//! therefore counted once per step however many rows there are, the KV cache once per run of rows, values between regions once per
//! region that reads or writes them. Operations are those of matrix products and attention; elementwise work is bytes. Padding columns
//! are counted in bytes (they are read) and not in operations (they are not wanted).

use rcompile_codegen::expr::{below, variables};
use rcompile_codegen::program::{
    Attention, DType, Expr, ExprId, Exprs, Extent, FewRows, Item, Kernel, LoopNest, Matmul, Operand, OperandId, Place, Program, RegionId,
    StageKind, VarId,
};
use rcompile_runtime::cost::{Arithmetic, Linear, RegionInfo, RegionKind};
use std::collections::{BTreeMap, BTreeSet};

/// All regions in order of the program's list.
pub fn regions(program: &Program) -> Vec<RegionInfo> {
    let mut places = BTreeMap::new();
    place(&program.body, None, &mut places);
    let infos = program.regions.iter().enumerate().map(|(i, region)| {
        let (layers, barrier) = places.get(&RegionId(i as u32)).copied().unwrap_or_default();
        let (kind, arithmetic) = match &region.kernel {
            Kernel::Matmul(m) => {
                let blocks_hold = m.compute.tiles().filter(|_| program.capacity(m.rows) > m.tile.mr);
                let arithmetic = match m.compute.few_rows() {
                    // The values of codes, by tiles of bf16.
                    FewRows::Int8Dot | FewRows::Int8Mmla if blocks_hold == Some(DType::Bf16) => Arithmetic::Bf16Dot,
                    FewRows::Int8Dot | FewRows::Int8Mmla => Arithmetic::Int8Dot,
                    FewRows::Bf16Dot | FewRows::Bf16Mmla | FewRows::Bf16Halves => Arithmetic::Bf16Dot,
                    FewRows::F32 => Arithmetic::F32,
                };
                (RegionKind::Matmul, arithmetic)
            }
            Kernel::Quantise(_) => (RegionKind::Loops, Arithmetic::F32),
            Kernel::Attention(a) if a.compute.takes_bf16() => (RegionKind::Attention, Arithmetic::Bf16Dot),
            Kernel::Attention(_) => (RegionKind::Attention, Arithmetic::F32),
            Kernel::Loops(_) => (RegionKind::Loops, Arithmetic::F32),
        };
        let mut info = RegionInfo {
            name: region.name.clone(),
            kind,
            arithmetic,
            layers,
            window: None,
            barrier,
            units: Linear::default(),
            passes: None,
            weight_bytes: Linear::default(),
            kv_bytes: Linear::default(),
            activation_bytes: Linear::default(),
            private_bytes: Linear::default(),
            flop: Linear::default(),
        };
        match &region.kernel {
            Kernel::Matmul(m) => matmul(program, m, &mut info),
            Kernel::Attention(a) => attention(a, &mut info),
            Kernel::Quantise(q) => {
                let rows = Amount::ONE.times(q.rows);
                info.units = rows.form(q.k.div_ceil(q.group).into());
                info.activation_bytes = rows.form(u64::from(q.k) * q.x.dtype.size() + u64::from(q.row_bytes()));
            }
            Kernel::Loops(n) => {
                let outer = n.outer.iter().fold(Amount::ONE, |total, (_, extent)| total.times(*extent));
                info.units = outer.form(1);
                bytes_of_nest(program, n).add_to(&mut info);
            }
        }
        info
    });
    infos.collect()
}

/// Layers and following barrier of each region.
fn place(items: &[Item], layers: Option<u32>, places: &mut BTreeMap<RegionId, (Option<u32>, bool)>) {
    for (i, item) in items.iter().enumerate() {
        match item {
            Item::Region(id) => _ = places.insert(*id, (layers, items.get(i + 1) == Some(&Item::Barrier))),
            Item::Layers { count, body } => place(body, Some(*count), places),
            Item::Barrier => {}
        }
    }
}

fn matmul(program: &Program, m: &Matmul, info: &mut RegionInfo) {
    let panels = &m.panels;
    let weight = &program.weights[m.weight.index()];
    // Where no row wants logits, none of their weights are read.
    let in_each = |amount: u64| match m.rows {
        Extent::LogitRows => Linear { per_logit_step: amount, ..Linear::default() },
        _ => Linear::per_step(amount),
    };
    info.units = in_each(m.units().0.into());
    info.passes = Some(m.passes());
    info.weight_bytes = in_each(panels.bytes_read(weight.dtype));
    let columns = u64::from(panels.groups) * u64::from(panels.group_cols) * u64::from(panels.ways);
    let rows = Amount::ONE.times(m.rows);
    info.flop = rows.form(2 * u64::from(panels.k) * columns);
    if !matches!(m.a.place, Place::Private(_)) {
        info.activation_bytes += rows.form(u64::from(panels.k) * m.a.dtype.size());
    }
    let extents = BTreeMap::from([(m.row, m.rows), (m.col, Extent::Const(panels.padded_cols()))]);
    let mut reach = Reach::new(program, &m.operands, &m.exprs);
    for store in &m.stores {
        reach.store(store.operand, store.index, &extents);
        reach.loads(&[store.index, store.value], &extents);
    }
    reach.bytes().add_to(info);
    for group in &m.group_nests {
        bytes_of_nest(program, &group.nest).add_to(info);
    }
    if let Some(q) = &m.quantise {
        let mut bytes = rows.form(u64::from(q.k) * q.x.dtype.size());
        if matches!(q.x.place, Place::Private(_)) {
            bytes = Linear::default();
        }
        info.activation_bytes += bytes;
        info.private_bytes += bytes;
    }
    if let Some(prologue) = &m.prologue {
        let bytes = bytes_of_nest(program, prologue);
        bytes.add_to(info);
        // Every thread runs it for all rows.
        info.private_bytes += bytes.weight;
        info.private_bytes += bytes.activation;
    }
}

fn attention(a: &Attention, info: &mut RegionInfo) {
    let pairs = u64::from(a.heads) * u64::from(a.kv.head_dim);
    info.window = a.key_upper.zip(a.key_lower).and_then(|(upper, lower)| u32::try_from(upper - lower).ok());
    info.units = Linear { per_tile: a.kv_heads.into(), ..Linear::default() };
    info.kv_bytes = Linear { per_run_position: u64::from(a.kv_heads) * a.kv.bytes_per_position(), ..Linear::default() };
    info.activation_bytes = Linear { per_row: pairs * (a.q.dtype.size() + a.out.dtype.size()), ..Linear::default() };
    // Scores and weighted values: two multiply-adds per position and column.
    info.flop = Linear { per_row_position: 4 * pairs, ..Linear::default() };
}

/// Bytes by where they lie.
#[derive(Default)]
struct Bytes {
    weight: Linear,
    kv: Linear,
    activation: Linear,
}

impl Bytes {
    fn add_to(&self, info: &mut RegionInfo) {
        info.weight_bytes += self.weight;
        info.kv_bytes += self.kv;
        info.activation_bytes += self.activation;
    }
}

fn bytes_of_nest(program: &Program, n: &LoopNest) -> Bytes {
    let mut reach = Reach::new(program, &n.operands, &n.exprs);
    for stage in &n.stages {
        let mut extents: BTreeMap<VarId, Extent> = n.outer.iter().copied().collect();
        extents.insert(stage.var, Extent::Const(stage.range.len() as u32));
        match &stage.kind {
            StageKind::Reduce { value, .. } => reach.loads(&[*value], &extents),
            StageKind::Store(stores) => {
                for store in stores {
                    reach.store(store.operand, store.index, &extents);
                    reach.loads(&[store.index, store.value], &extents);
                }
            }
        }
    }
    reach.bytes()
}

/// A product of extents: a constant and at most one that the step decides. All rows of all runs are the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Amount {
    constant: u64,
    of: Extent,
}

impl Amount {
    const ONE: Amount = Amount { constant: 1, of: Extent::Const(1) };

    fn times(self, extent: Extent) -> Amount {
        match extent {
            Extent::Const(n) => Amount { constant: self.constant * u64::from(n), ..self },
            _ if self.of == Extent::Rows => self,
            of => Amount { of, ..self },
        }
    }

    fn form(self, size: u64) -> Linear {
        let n = self.constant * size;
        match self.of {
            Extent::Const(m) => Linear::per_step(n * u64::from(m)),
            Extent::Rows => Linear { per_row: n, ..Linear::default() },
            Extent::LogitRows => Linear { per_logit_row: n, ..Linear::default() },
            Extent::Runs => Linear { per_run: n, ..Linear::default() },
        }
    }
}

/// What the accesses of one kernel reach.
struct Reach<'a> {
    program: &'a Program,
    operands: &'a [Operand],
    exprs: &'a Exprs,
    /// Elements by operand, whether they are written, and the extent that the step decides.
    elements: BTreeMap<(OperandId, bool, u8), Amount>,
    /// Loads that were counted, with the length of their ranges.
    seen: BTreeSet<(OperandId, ExprId, u64)>,
}

impl<'a> Reach<'a> {
    fn new(program: &'a Program, operands: &'a [Operand], exprs: &'a Exprs) -> Self {
        Reach { program, operands, exprs, elements: BTreeMap::new(), seen: BTreeSet::new() }
    }

    fn store(&mut self, operand: OperandId, index: ExprId, extents: &BTreeMap<VarId, Extent>) {
        self.access(operand, index, true, extents);
    }

    /// All loads that the expressions need.
    fn loads(&mut self, roots: &[ExprId], extents: &BTreeMap<VarId, Extent>) {
        let mut extents = extents.clone();
        let nodes = below(self.exprs, roots);
        for id in &nodes {
            if let Expr::Fold { var, begin, end, .. } = self.exprs.get(*id) {
                // A fold whose ends the step decides walks the rows of a run.
                let length = match (self.exprs.get(begin), self.exprs.get(end)) {
                    (Expr::Int(b), Expr::Int(e)) => Extent::Const((e - b).max(0) as u32),
                    _ => Extent::Rows,
                };
                extents.insert(var, length);
            }
        }
        for id in nodes {
            if let Expr::Load(operand, index) = self.exprs.get(id) {
                self.access(operand, index, false, &extents);
            }
        }
    }

    fn access(&mut self, operand: OperandId, index: ExprId, written: bool, extents: &BTreeMap<VarId, Extent>) {
        let of =
            variables(self.exprs, index).iter().filter_map(|v| extents.get(v)).fold(Amount::ONE, |amount, extent| amount.times(*extent));
        if !written && !self.seen.insert((operand, index, of.constant)) {
            return;
        }
        let kind = match of.of {
            Extent::Const(_) => 0,
            Extent::Rows => 1,
            Extent::LogitRows => 2,
            Extent::Runs => 3,
        };
        let sum = self.elements.entry((operand, written, kind)).or_insert(Amount { constant: 0, of: of.of });
        sum.constant += of.constant;
    }

    fn bytes(self) -> Bytes {
        let mut all = Bytes::default();
        for ((id, ..), mut amount) in self.elements {
            let operand = &self.operands[id.index()];
            if let (Place::Buffer(b), Extent::Rows | Extent::LogitRows | Extent::Runs) = (&operand.place, amount.of) {
                // Read by several expressions, a row is still one row.
                amount.constant = amount.constant.min(self.program.buffers[b.index()].stride.into());
            }
            let bytes = amount.form(operand.dtype.size());
            match operand.place {
                Place::Weight(_) => all.weight += bytes,
                Place::State(_) => all.kv += bytes,
                Place::Buffer(_) | Place::Output | Place::Table(_) => all.activation += bytes,
                Place::Private(_) => {}
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{PlanCx, WeightTable, plan};
    use rcompile_codegen::isa::Isa;

    /// Which peak bounds a matmul by codes: blocks of rows take tiles, few rows integer dots.
    #[test]
    fn codes_by_tiles_of_bf16_meet_the_peak_of_bf16() {
        let isa = Isa::lookup("x86_64-unknown-linux-gnu", "sapphirerapids", &[]).unwrap();
        let arithmetic = |rows: u32, group: &str| {
            let text = format!(
                "module {{
                symbol T<={rows}
                param @table : f32[19, 128] = source \"table\"
                param @w : q4{group}[64, 128] = convert(source \"w\", q4{group})
                func @step(%token: i32[T]) {{
                    %x = embedding @table, %token
                    %q = convert %x : q8{group}[T, 128]
                    %y = mm %q, @w {{rhs_t}}
                    return %y
                }}
            }}"
            );
            let module = rcompile_graph::parse(&text).unwrap_or_else(|e| panic!("{e}"));
            let cx = PlanCx { isa: &isa, slots: 1, ctx_size: 64, least_rows: 1, cores: 1, tuning: None };
            let planned = plan(&module, &cx, &mut WeightTable::default()).unwrap();
            let matmul = planned.regions.iter().find(|r| r.kind == RegionKind::Matmul).unwrap();
            matmul.arithmetic
        };
        let by_32 = [1, 8, 9, 64].map(|rows| arithmetic(rows, "g32"));
        assert_eq!(by_32, [Arithmetic::Int8Dot, Arithmetic::Int8Dot, Arithmetic::Bf16Dot, Arithmetic::Bf16Dot]);
        assert_eq!(arithmetic(64, "g64"), Arithmetic::Int8Dot);
    }
}
