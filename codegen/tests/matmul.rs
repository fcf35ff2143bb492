//! Matmul kernels against plain Rust, and the promise that bits do not depend on rows, threads, blocks or walks.

mod asm_check;
mod kernel_harness;

use asm_check::{HotLoop, group_loops, hot_loops};
use kernel_harness::{Area, Loaded, Rng, Step, arm_isas, from_bf16, from_f16, isas, row_type, to_bf16, to_f16};
use rcompile_codegen::isa::{Distances, Isa, Near, PANEL_VECTORS, X86_64_TRIPLE};
use rcompile_codegen::kernels::matmul;
use rcompile_codegen::kernels::part::Part;
use rcompile_codegen::kernels::rows::{RowFunction, RowWork};
use rcompile_codegen::llvm::module::{self, Emit};
use rcompile_codegen::program::*;
use rcompile_graph::quant::quantise_group;
use rcompile_runtime::abi::{CpuKind, field};
use std::collections::BTreeSet;

/// Epilogues under test.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Epilogue {
    /// `out = acc`
    Plain,
    /// `out = acc + bias[col] + residual[row, col]`
    BiasResidual,
    /// `out = silu(acc0) * acc1`
    SiluGate,
}

/// A matmul with everything around it.
#[derive(Clone, Debug)]
struct Case {
    /// Of the weights; `u8` where they are coded.
    dtype: DType,
    coding: Coding,
    compute: Compute,
    nr: u32,
    k: u32,
    groups: u32,
    group_cols: u32,
    epilogue: Epilogue,
    out: DType,
    tile: MatmulTile,
    /// See [`Matmul::fetch_by_cpu`].
    fetch_by_cpu: Vec<(CpuKind, Fetch)>,
    /// Fewest rows.
    least_rows: u32,
    /// `a` is private scratch that a prologue fills with twice the buffer.
    prologue: bool,
    /// Groups from 1 on are negated in place by a group nest.
    group_nest: bool,
}

const CAPACITY: u32 = 40;
const LAYERS: usize = 2;

impl Case {
    fn new(isa: &Isa, dtype: DType) -> Case {
        Case {
            dtype,
            coding: Coding::Elements,
            compute: Compute::F32,
            nr: isa.panel_nr(),
            k: 64,
            groups: 1,
            group_cols: 250,
            epilogue: Epilogue::Plain,
            out: DType::F32,
            tile: MatmulTile {
                mr: isa.tile_rows,
                block_mr: isa.tile_rows,
                k_block: 0,
                m_block: 27,
                n_block: 3,
                widen: false,
                fetch: Fetch {
                    streams: isa.streams.rows.side_by_side,
                    ahead: Distances { l2: 4096, l1: 512 },
                    past_l2: isa.streams.lone_past_l2,
                    busy: Some(BusyRows { rows: 3, l1: 1024 }),
                    near: Some(Near { streams: 2, ahead: Distances { l2: 2048, l1: 256 } }),
                },
            },
            fetch_by_cpu: vec![],
            least_rows: 1,
            prologue: false,
            group_nest: false,
        }
    }
    fn ways(&self) -> u32 {
        if self.epilogue == Epilogue::SiluGate { 2 } else { 1 }
    }
    fn panels(&self) -> Panels {
        let k_pack = self.compute.k_pack(self.dtype, self.coding);
        let (groups, group_cols) = (self.groups, self.group_cols);
        Panels { nr: self.nr, k_pack, k: self.k, groups, group_cols, ways: self.ways(), coding: self.coding }
    }
    /// Rows up to which panels are claimed: a single block of tiles, three blocks of vectors where tiles would scale the sums of short
    /// groups of nibbles, two where more would widen the weights.
    fn streamed_rows(&self) -> u32 {
        const TILE_ROWS: u32 = 32;
        let takes_apart = match self.compute {
            Compute::F32 => self.dtype != DType::F32,
            compute => compute.takes_codes() && self.coding.has_nibbles(),
        };
        let mr = self.tile.mr;
        match (self.compute, self.coding.group()) {
            (Compute::Int8Tiles, Some(32)) if takes_apart => TILE_ROWS.max(3 * mr),
            (compute, _) if compute.by_tiles() => TILE_ROWS.max(mr),
            _ if self.tile.widen && takes_apart && CAPACITY > 2 * mr => 2 * mr,
            _ => mr,
        }
    }
    /// What an input is multiplied with. By 32, whose scales are powers of two that sums are counted in: a row of small ones, one of large
    /// ones, one with a group of zeros, and one with what is no number.
    fn factor(&self, row: usize, k: usize) -> f32 {
        match (self.record_group(), &self.epilogue, row) {
            (Some(SHORT_GROUP), Epilogue::Plain, 1) => 2f32.powi(-80),
            (Some(SHORT_GROUP), Epilogue::Plain, 2) => 2f32.powi(100),
            (Some(SHORT_GROUP), Epilogue::Plain, 4) if k == 0 && self.k > 1 => f32::NAN,
            (Some(SHORT_GROUP), Epilogue::Plain, 3) if (k as u32) < SHORT_GROUP && self.k > SHORT_GROUP => 0.0,
            _ => 1.0,
        }
    }
    /// k per record of the left operand.
    fn record_group(&self) -> Option<u32> {
        self.coding.group().filter(|_| self.compute.takes_codes())
    }
    /// Records of the matmul's rows, in scratch behind the floats of a prologue.
    fn records(&self) -> (Operand, u32) {
        let bytes = self.record_group().map_or(0, |group| self.compute.row_bytes(self.k, group));
        (Operand { place: Place::Private(64 + u64::from(CAPACITY * (self.k + 32)) * 4), dtype: DType::U8 }, bytes)
    }
    fn a_dtype(&self) -> DType {
        if self.compute == Compute::F32 { DType::F32 } else { DType::Bf16 }
    }

    /// Buffers: 0 `a`, 1 `residual`, 2 `out`. Weights: 0 panels, 1 bias.
    fn program(&self, isa: &Isa) -> (Program, Matmul) {
        let panels = self.panels();
        let a_stride = (self.k + 1).next_multiple_of(32);
        let columns = panels.padded_cols();
        let mut offset = 0;
        let mut buffer = |name: &str, dtype: DType, stride: u32| {
            let b = Buffer { name: name.into(), dtype, rows: CAPACITY, stride, offset };
            offset += u64::from(CAPACITY * stride) * 4;
            b
        };
        let buffers =
            vec![buffer("a", self.a_dtype(), a_stride), buffer("residual", DType::F32, columns), buffer("out", self.out, columns)];
        let arena_bytes = offset;
        let panel_bytes = panels.bytes(self.dtype).next_multiple_of(64);
        let bias_bytes = u64::from(columns) * 4;
        let weight = |name: &str, dtype: DType, layout: Layout, first: u64, bytes: u64| Weight {
            name: name.into(),
            dtype,
            layout,
            offsets: (0..LAYERS as u64).map(|l| first + l * bytes).collect(),
        };
        let weights = vec![
            weight("w", self.dtype, Layout::Panels(panels), 0, panel_bytes),
            weight("bias", DType::F32, Layout::Plain, panel_bytes * LAYERS as u64, bias_bytes),
        ];

        let mut e = Exprs::default();
        let (row, col) = (VarId(0), VarId(1));
        let [r, c] = [row, col].map(|v| e.add(Expr::Var(v)));
        let stride = e.int(columns.into());
        let at = e.binary(BinaryOp::Mul, r, stride);
        let at = e.binary(BinaryOp::Add, at, c);
        let acc = e.add(Expr::Acc(0));
        let value = match self.epilogue {
            Epilogue::Plain => acc,
            Epilogue::BiasResidual => {
                let bias = e.add(Expr::Load(OperandId(2), c));
                let residual = e.add(Expr::Load(OperandId(1), at));
                let sum = e.binary(BinaryOp::Add, acc, bias);
                e.binary(BinaryOp::Add, sum, residual)
            }
            Epilogue::SiluGate => {
                let up = e.add(Expr::Acc(1));
                let sigmoid = e.add(Expr::Unary(UnaryOp::Sigmoid, acc));
                let silu = e.binary(BinaryOp::Mul, acc, sigmoid);
                e.binary(BinaryOp::Mul, silu, up)
            }
        };
        let operand = |place: Place, dtype: DType| Operand { place, dtype };
        let a = if self.prologue { Place::Private(64) } else { Place::Buffer(BufferId(0)) };
        let x = operand(a, self.a_dtype());
        let (records, record_stride) = self.records();
        let quantise = self.record_group().map(|group| Quantise {
            rows: Extent::Rows,
            x: x.clone(),
            x_stride: a_stride,
            out: records.clone(),
            out_stride: record_stride,
            k: self.k,
            group,
            compute: self.compute,
            bias_factor: self.coding.bias_factor(self.dtype),
        });
        let (a, a_stride_read) = if quantise.is_some() { (records, record_stride) } else { (x, a_stride) };
        let matmul = Matmul {
            rows: Extent::Rows,
            a,
            a_stride: a_stride_read,
            prologue: self.prologue.then(|| self.prologue_nest(a_stride)),
            quantise,
            weight: WeightId(0),
            panels,
            compute: self.compute,
            tile: self.tile,
            fetch_by_cpu: self.fetch_by_cpu.clone(),
            row,
            col,
            operands: vec![
                operand(Place::Buffer(BufferId(2)), self.out),
                operand(Place::Buffer(BufferId(1)), DType::F32),
                operand(Place::Weight(WeightId(1)), DType::F32),
            ],
            exprs: e,
            stores: vec![Store { operand: OperandId(0), index: at, value }],
            group_nests: if self.group_nest { vec![self.negate_nest(columns)] } else { vec![] },
        };
        let region = Region { name: "test".into(), kernel: Kernel::Matmul(Box::new(matmul.clone())) };
        let mut program = Program {
            entry: "step".into(),
            bucket: CAPACITY,
            least_rows: self.least_rows,
            max_logit_rows: CAPACITY,
            max_runs: 1,
            tile_rows: 1,
            buffers,
            weights,
            regions: vec![region],
            body: vec![Item::Layers { count: LAYERS as u32, body: vec![Item::Region(RegionId(0))] }],
            arena_bytes,
            private_bytes: self.private_bytes(),
        };
        program.private_bytes += matmul::Schedule::new(isa, &program, &matmul).private_bytes();
        (program, matmul)
    }
    /// Of the prologue; kernels have their own scratch behind it.
    fn private_bytes(&self) -> u64 {
        (64 + u64::from(CAPACITY * (self.k + 32)) * 4 + u64::from(CAPACITY * self.records().1)).next_multiple_of(128)
    }
    /// `private[row, i] = 2 * a[row, i]`.
    fn prologue_nest(&self, a_stride: u32) -> LoopNest {
        let mut e = Exprs::default();
        let [r, i] = [0, 1].map(|v| e.add(Expr::Var(VarId(v))));
        let stride = e.int(a_stride.into());
        let at = e.binary(BinaryOp::Mul, r, stride);
        let at = e.binary(BinaryOp::Add, at, i);
        let x = e.add(Expr::Load(OperandId(0), at));
        let value = e.binary(BinaryOp::Add, x, x);
        let dtype = self.a_dtype();
        LoopNest {
            outer: vec![(VarId(0), Extent::Rows)],
            operands: vec![Operand { place: Place::Buffer(BufferId(0)), dtype }, Operand { place: Place::Private(64), dtype }],
            exprs: e,
            stages: vec![Stage {
                var: VarId(1),
                range: 0..self.k,
                kind: StageKind::Store(vec![Store { operand: OperandId(1), index: at, value }]),
            }],
        }
    }
    /// The first group that a nest is for.
    fn first_nested(&self) -> u32 {
        (self.groups / 2).max(1)
    }
    /// `out[row, (first_nested + g) * padded_group + i] *= -1`.
    fn negate_nest(&self, columns: u32) -> GroupNest {
        let mut e = Exprs::default();
        let [r, g, i] = [0, 1, 2].map(|v| e.add(Expr::Var(VarId(v))));
        let stride = e.int(columns.into());
        let padded = e.int(self.panels().padded_group().into());
        let first = e.int(self.first_nested().into());
        let at = e.binary(BinaryOp::Mul, r, stride);
        let group = e.binary(BinaryOp::Add, g, first);
        let group = e.binary(BinaryOp::Mul, group, padded);
        let at = e.binary(BinaryOp::Add, at, group);
        let at = e.binary(BinaryOp::Add, at, i);
        let x = e.add(Expr::Load(OperandId(0), at));
        let value = e.add(Expr::Unary(UnaryOp::Neg, x));
        let nest = LoopNest {
            outer: vec![(VarId(0), Extent::Rows), (VarId(1), Extent::Const(self.groups - self.first_nested()))],
            operands: vec![Operand { place: Place::Buffer(BufferId(2)), dtype: self.out }],
            exprs: e,
            stages: vec![Stage {
                var: VarId(2),
                range: 0..self.group_cols,
                kind: StageKind::Store(vec![Store { operand: OperandId(0), index: at, value }]),
            }],
        };
        GroupNest { groups: self.first_nested()..self.groups, nest }
    }

    /// Compiles, runs all row counts with 1 to 3 threads (in turns), compares numbers with f64 and bits with each other.
    fn check(&self, isa: &Isa) {
        let (program, kernel) = self.program(isa);
        let loaded = Loaded::build(isa, |mb, name| matmul::define_whole(mb, &program, name, &kernel).map(|_| ()));
        let mr = self.tile.mr;
        let some = (1..=mr + 1).chain([2 * mr, 2 * mr + 1, 33]);
        let row_counts: Vec<u32> = match self.least_rows {
            1 => some.filter(|r| *r < CAPACITY).chain([CAPACITY]).collect(),
            least => (least..=CAPACITY).collect(),
        };
        let mut first: Option<Vec<Vec<u32>>> = None;
        for &rows in row_counts.iter().rev() {
            let all_threads = rows == 1 || rows == 33;
            for threads in (1..=3).filter(|t| all_threads || *t == 1 + rows % 3) {
                let bits = self.run(isa, &program, &kernel, &loaded, rows, threads, first.is_none());
                match &first {
                    None => first = Some(bits),
                    Some(first) => assert!(
                        first[..rows as usize] == bits[..],
                        "{self:?} on {}: bits differ with {rows} rows, {threads} threads",
                        isa.name
                    ),
                }
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one test body")]
    fn run(&self, isa: &Isa, program: &Program, kernel: &Matmul, loaded: &Loaded, rows: u32, threads: u32, compare: bool) -> Vec<Vec<u32>> {
        let layer = 1;
        let p = self.panels();
        let weight_bytes = (program.weights[1].offsets[1] + u64::from(p.padded_cols()) * 4) as usize;
        let mut step = Step::new(weight_bytes, 0, program.arena_bytes as usize, program.private_bytes);
        step.rows = rows;
        step.cpu = if threads == 2 { CpuKind::Zen5 } else { CpuKind::Other };
        let mut rng = Rng::new(7);
        let size = self.dtype.size() as usize;
        let [filled, whole] = [p.filled_bytes(self.dtype), p.panel_bytes(self.dtype)].map(|bytes| bytes as usize);
        for panel in 0..(p.panels() * p.ways) as usize {
            let end = program.weights[0].offsets[layer] as usize + panel * whole + filled;
            step.weights.put(end, &vec![0xff; whole - filled]);
        }
        // w[way][column][k], real columns only.
        let real = (p.groups * p.group_cols) as usize;
        let mut w = vec![vec![vec![0f32; p.k as usize]; real]; p.ways as usize];
        let ppg = p.panels_per_group() as usize;
        for (way, matrix) in w.iter_mut().enumerate() {
            for (column, ks) in matrix.iter_mut().enumerate() {
                let (group, inside) = (column / p.group_cols as usize, column % p.group_cols as usize);
                let panel = (group * ppg + inside / p.nr as usize) * p.ways as usize + way;
                let panel = program.weights[0].offsets[layer] as usize + panel * p.panel_bytes(self.dtype) as usize;
                if p.coding != Coding::Elements {
                    put_codes(&p, self.dtype, &mut step, &mut rng, panel, inside % p.nr as usize, ks);
                    continue;
                }
                for (k, value) in ks.iter_mut().enumerate() {
                    let (pack, nr) = (p.k_pack as usize, p.nr as usize);
                    let at = panel + (k / pack * nr * pack + inside % nr * pack + k % pack) * size;
                    let x = rng.signed();
                    *value = match self.dtype {
                        DType::F32 => {
                            step.weights.put(at, &x.to_le_bytes());
                            x
                        }
                        DType::F16 => {
                            step.weights.put(at, &to_f16(x).to_le_bytes());
                            from_f16(to_f16(x))
                        }
                        _ => {
                            step.weights.put(at, &to_bf16(x).to_le_bytes());
                            from_bf16(to_bf16(x))
                        }
                    };
                }
            }
        }
        let padded = |column: usize| column / p.group_cols as usize * p.padded_group() as usize + column % p.group_cols as usize;
        let mut bias = vec![0f32; real];
        for (column, value) in bias.iter_mut().enumerate() {
            *value = rng.signed();
            step.weights.put(program.weights[1].offsets[layer] as usize + padded(column) * 4, &value.to_le_bytes());
        }
        let (buffers, columns) = (&program.buffers, p.padded_cols() as usize);
        let mut a = vec![vec![0f32; p.k as usize]; rows as usize];
        let mut residual = vec![vec![0f32; real]; rows as usize];
        for row in 0..rows as usize {
            let stride = kernel.quantise.as_ref().map_or(kernel.a_stride, |q| q.x_stride) as usize;
            for k in 0..stride {
                // Nothing beyond k may be read.
                let x = if k < p.k as usize { rng.signed() * self.factor(row, k) } else { f32::NAN };
                let at = buffers[0].offset as usize + (row * stride + k) * self.a_dtype().size() as usize;
                let seen = if self.a_dtype() == DType::F32 {
                    step.arena.put(at, &x.to_le_bytes());
                    x
                } else {
                    let bits = if x.is_nan() { 0x7fff } else { to_bf16(x) };
                    step.arena.put(at, &bits.to_le_bytes());
                    from_bf16(bits)
                };
                if let Some(value) = a[row].get_mut(k) {
                    *value = if self.prologue { 2.0 * seen } else { seen };
                }
            }
            if let Some(group) = self.record_group() {
                a[row].chunks_mut(group as usize).for_each(|x| to_codes(x, group));
            }
            for (column, value) in residual[row].iter_mut().enumerate() {
                let x = rng.signed();
                *value = x;
                step.arena.put(buffers[1].offset as usize + (row * columns + padded(column)) * 4, &x.to_le_bytes());
            }
        }
        let shared_out = step.run(loaded, threads, layer as u32);
        let (units, unit_panels) = kernel.units();
        let few = rows <= self.streamed_rows();
        // Units that others may do, and fewest of a piece: of few rows an eighth of a share, by a quarter of the streams or more; of more a
        // quarter of a share of all passes.
        let (open, least) = match (few, self.compute.by_tiles()) {
            (true, _) => (units / threads / 8, 1),
            (false, by_tiles) => {
                let panels = if by_tiles { 1 } else { (self.tile.n_block / unit_panels).max(1) };
                (kernel.passes().number(rows, units, threads) * units / threads / 4, panels)
            }
        };
        if !few || self.tile.fetch.streams <= 4 {
            let are_enough = threads > 1 && open >= 2 * least;
            assert_eq!(shared_out, are_enough, "{self:?} on {}: {rows} rows, {threads} threads", isa.name);
        }

        let mut bits = vec![vec![0u32; real]; rows as usize];
        let (mut error, mut signal) = (0.0, 0.0);
        for row in 0..rows as usize {
            for column in 0..real {
                let at = buffers[2].offset as usize + (row * columns + padded(column)) * self.out.size() as usize;
                let got = if self.out == DType::F32 { step.arena.f32(at) } else { from_bf16(step.arena.u16(at)) };
                // What is no number has no bits that must be the same.
                bits[row][column] = if got.is_nan() { f32::NAN } else { got }.to_bits();
                if !compare {
                    continue;
                }
                let dot = |way: usize| -> f64 { a[row].iter().zip(&w[way][column]).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum() };
                let want = match self.epilogue {
                    Epilogue::Plain => dot(0),
                    Epilogue::BiasResidual => dot(0) + f64::from(bias[column]) + f64::from(residual[row][column]),
                    Epilogue::SiluGate => dot(0) / (1.0 + (-dot(0)).exp()) * dot(1),
                };
                let negated = self.group_nest && column >= (self.first_nested() * p.group_cols) as usize;
                let want = if negated { -want } else { want };
                let relative = if self.out == DType::F32 { 2e-5 } else { 5e-3 };
                if want.is_nan() {
                    assert!(got.is_nan(), "{self:?} on {}: [{row}, {column}] = {got}, not a number got lost", isa.name);
                    continue;
                }
                let factor = f64::from(self.factor(row, p.k as usize - 1));
                let (got, want) = (f64::from(got) / factor, want / factor);
                let tolerance = relative * (f64::from(p.k).sqrt() + want.abs());
                error += (got - want).powi(2);
                signal += want.powi(2);
                assert!((got - want).abs() <= tolerance, "{self:?} on {}: [{row}, {column}] = {got}, expected {want}", isa.name);
            }
        }
        // One wrong code would show: integer parts are exact.
        let exact = !compare || self.coding == Coding::Elements || self.out != DType::F32 || error <= 1e-8 * signal;
        assert!(exact, "{self:?} on {}: normalised squared error {:e}", isa.name, error / signal);
        bits
    }
}

/// Random codes and scales of column `c` of the panel at `panel`, in the file as `Coding` says, and their values.
fn put_codes(p: &Panels, dtype: DType, step: &mut Step, rng: &mut Rng, panel: usize, c: usize, values: &mut [f32]) {
    let (group, nr, pack) = (p.coding.group().unwrap() as usize, p.nr as usize, p.k_pack as usize);
    let (offset, nibbles) = (p.coding.offset(dtype), p.coding.has_nibbles());
    let (mut scale, mut zero) = (0.0, 0);
    let mut bytes = vec![0u8; group / 2];
    let draw = |rng: &mut Rng| {
        let code = (rng.signed() * if nibbles { 8.0 } else { 127.0 }).floor() as i32;
        if nibbles && p.coding.has_zeros() { code + 8 } else { code }
    };
    for (k, value) in values.iter_mut().enumerate() {
        let (mut at, mut inside) = (panel, k);
        if p.coding.has_group_scales() {
            (at, inside) = (panel + k / group * p.group_bytes() as usize, k % group);
        }
        if inside == 0 && p.coding.has_group_scales() {
            scale = from_f16(to_f16(rng.signed() * if nibbles { 0.125 } else { 0.008 }));
            if p.coding == (Coding::Int4 { group: SHORT_GROUP, zeros: false }) {
                // Five bits of its eleven.
                scale = from_f16(to_f16(scale) & !0x3f);
            }
            let behind = at + p.scales_at() as usize + c * 2;
            step.weights.put(behind, &to_f16(scale).to_le_bytes());
            if p.coding.has_zeros() {
                zero = draw(rng);
                step.weights.put(behind + nr * 2, &to_f16((zero + offset) as f32).to_le_bytes());
            }
            bytes.fill(0x88);
        } else if inside == 0 {
            scale = 0.001 + rng.signed().abs() * 0.01;
            step.weights.put(panel + p.padded_k() as usize * nr + c * 4, &scale.to_le_bytes());
        }
        let code = draw(rng);
        if nibbles {
            let half = pack / 2;
            let (byte, shift) = (inside / pack * half + inside % half, inside % pack / half * 4);
            bytes[byte] = bytes[byte] & !(0xf << shift) | ((code + offset) as u8) << shift;
            for (i, bytes) in bytes.chunks(half).enumerate() {
                step.weights.put(at + (i * nr + c) * half, bytes);
            }
        } else {
            step.weights.put(at + (inside / pack * nr + c) * pack + inside % pack, &[(code + offset) as u8]);
        }
        *value = (code - zero) as f32 * scale;
    }
}

/// What the codes of a group stand for, in groups of `of`.
fn to_codes(group: &mut [f32], of: u32) {
    let mut codes = vec![0; group.len()];
    let scale = quantise_group(row_type(of), group, &mut codes);
    group.iter_mut().zip(codes).for_each(|(v, code)| *v = f32::from(code) * scale);
}

/// As what codes are stored.
fn code_type(isa: &Isa, coding: Coding) -> DType {
    if coding.has_bytes() { isa.code_type() } else { DType::U8 }
}

/// Codes with each arithmetic that the CPU has, and in f32 from either form.
fn coded(isa: &Isa, codings: &[Coding]) -> Vec<Case> {
    let mut list = vec![];
    for &coding in codings {
        let case = Case { coding, ..Case::new(isa, code_type(isa, coding)) };
        if isa.int8_dot(isa.lanes).is_some() {
            list.push(Case { compute: isa.matmul_of_codes(coding), ..case.clone() });
        }
        if isa.code_type() == DType::U8 && coding.has_bytes() {
            list.push(Case { dtype: DType::I8, ..case.clone() });
        }
        list.push(case);
    }
    list
}

#[test]
fn codes_and_scales() {
    for isa in isas() {
        let int4 = [64, 32].map(|group| Coding::Int4 { group, zeros: false });
        let given =
            [(128, true), (32, false)].map(|(group, zeros)| [Coding::Int8Groups { group, zeros }, Coding::Int4 { group, zeros: true }]);
        let codings =
            [&[Coding::Int8 { group: 256 }, Coding::Int8 { group: 128 }, Coding::Int8 { group: 32 }], &int4[..], given.as_flattened()]
                .concat();
        for (i, case) in coded(&isa, &codings).into_iter().enumerate() {
            Case { k: [67, 1, 256][i % 3], group_cols: 100, ..case }.check(&isa);
        }
    }
}

#[test]
fn codes_in_blocks_with_epilogues() {
    for isa in isas() {
        let zeros = true;
        let given = [(32, zeros), (64, false)]
            .map(|(group, zeros)| Coding::Int8Groups { group, zeros })
            .into_iter()
            .chain([64, 32].map(|group| Coding::Int4 { group, zeros }));
        let made = [Coding::Int8 { group: 256 }, Coding::Int8 { group: 64 }, Coding::Int4 { group: 32, zeros: false }];
        for case in coded(&isa, &made.into_iter().chain(given).collect::<Vec<_>>()) {
            let group = case.coding.group().unwrap();
            let blocked = |k: u32, blocks: u32, widen: bool| {
                // Where each block of rows reads weights as they are stored, it has fewer rows than a single one may have.
                let block_mr = if widen { case.tile.mr } else { case.tile.mr * 3 / 4 };
                let tile = MatmulTile { k_block: k / blocks, widen, block_mr, ..case.tile };
                Case { tile, k, ..case.clone() }
            };
            // Two groups per block, where that is not too deep for the tolerance of f32.
            let k = if group < 256 { 4 * group } else { 2 * group };
            let gated = Case { groups: 2, group_cols: 40, epilogue: Epilogue::SiluGate, prologue: true, ..blocked(k, 2, true) };
            if case.coding == made[2] {
                Case { tile: MatmulTile { fetch: Fetch { streams: 1, ..gated.tile.fetch }, ..gated.tile }, ..gated.clone() }.check(&isa);
            }
            gated.check(&isa);
            Case { groups: 3, group_cols: 40, group_nest: true, ..blocked(3 * group, 3, false) }.check(&isa);
        }
    }
}

fn dots(isa: &Isa) -> Vec<(DType, Compute)> {
    let mut list = vec![(DType::F32, Compute::F32), (DType::F16, Compute::F32), (DType::Bf16, Compute::F32)];
    if isa.bf16_dot {
        list.push((DType::Bf16, Compute::Bf16Dot));
    }
    if isa.bf16_mmla {
        list.push((DType::Bf16, Compute::Bf16Mmla));
    }
    list
}

/// Targets with AMX: this CPU where it has it, or where tiles can be emulated on it. Whoever reads the tests' output learns of others.
fn with_tiles() -> Vec<Isa> {
    let tiles: Vec<Isa> = isas().into_iter().filter(|isa| isa.bf16_tiles && isa.int8_tiles).collect();
    if tiles.is_empty() {
        eprintln!("skipped: this CPU has neither tiles (AMX) nor the dots that go with them (AVX-512 VNNI)");
    }
    tiles
}

/// bf16 by tiles: rows in one tile and in two, panels of each number of vectors, blocks of k and of panels, both ways, and few rows by FMA:
/// all the same bits.
#[test]
fn tiles_of_bf16() {
    for isa in with_tiles() {
        let case = Case { compute: Compute::Bf16Tiles, ..Case::new(&isa, DType::Bf16) };
        for (k, k_block, mr) in [(32, 0, 4), (96, 32, 2), (160, 64, 6)] {
            let tile = MatmulTile { k_block, mr, block_mr: mr, ..case.tile };
            let case = Case { k, tile, ..case.clone() };
            case.check(&isa);
            Case { nr: 16, group_cols: 130, epilogue: Epilogue::BiasResidual, ..case.clone() }.check(&isa);
            Case { groups: 2, group_cols: 40, epilogue: Epilogue::SiluGate, prologue: true, ..case.clone() }.check(&isa);
            Case { groups: 3, group_cols: 40, group_nest: true, out: DType::Bf16, ..case }.check(&isa);
        }
    }
}

/// Several blocks of rows go through blocks of k, of a group or two, of a few panels, in one turn or, where rows of all k do not fit L2, in
/// several with the sums of all panels kept; a single block goes through all groups at once: the bits of few rows.
#[test]
fn tiles_in_turns() {
    for isa in with_tiles() {
        let bf16 = Case { compute: Compute::Bf16Tiles, k: 128, ..Case::new(&isa, DType::Bf16) };
        let nibbles = [(32, false), (64, false), (128, false), (128, true)].map(|(group, zeros)| Coding::Int4 { group, zeros });
        let codings = [&[Coding::Int8 { group: 64 }, Coding::Int8 { group: 256 }][..], &nibbles].concat();
        let codes = coded(&isa, &codings).into_iter().filter(|case| case.compute.by_tiles());
        let cases: Vec<_> = codes.map(|case| Case { k: 4 * case.coding.group().unwrap(), ..case }).chain([bf16]).collect();
        assert_eq!(cases.len(), 7);
        for (case, count) in cases.into_iter().zip([4, 2].into_iter().cycle()) {
            let tile = MatmulTile { mr: 4, block_mr: 4, k_block: case.k / count, m_block: 0, n_block: 4, ..case.tile };
            let small = Isa { l2_bytes: 4 << 10, ..isa.clone() };
            let case = Case { group_cols: 300, tile, ..case };
            let bytes = |isa: &Isa| {
                let (program, kernel) = case.program(isa);
                matmul::Schedule::new(isa, &program, &kernel).private_bytes()
            };
            assert!(bytes(&small) > bytes(&isa), "{case:?}: sums of more panels wait between turns");
            for isa in [&isa, &small] {
                case.check(isa);
                Case { group_cols: 130, epilogue: Epilogue::BiasResidual, ..case.clone() }.check(isa);
                Case { groups: 2, group_cols: 70, epilogue: Epilogue::SiluGate, prologue: true, ..case.clone() }.check(isa);
                Case { groups: 5, group_cols: 40, group_nest: true, ..case.clone() }.check(isa);
            }
        }
    }
}

#[test]
fn every_type_and_row_count() {
    for isa in isas() {
        for (dtype, compute) in dots(&isa) {
            Case { compute, ..Case::new(&isa, dtype) }.check(&isa);
        }
    }
}

/// Kernels of at least so many rows have all functions that any number of rows takes.
#[test]
fn rows_of_large_buckets() {
    for isa in isas() {
        let nibbles = [(32, false), (64, false), (32, true)].map(|(group, zeros)| Coding::Int4 { group, zeros });
        let mut cases: Vec<_> = dots(&isa).into_iter().map(|(dtype, compute)| Case { compute, ..Case::new(&isa, dtype) }).collect();
        cases.extend(coded(&isa, &[&[Coding::Int8 { group: 64 }][..], &nibbles].concat()));
        if isa.bf16_tiles {
            cases.push(Case { compute: Compute::Bf16Tiles, ..Case::new(&isa, DType::Bf16) });
        }
        for (i, case) in cases.into_iter().enumerate() {
            for least_rows in [case.tile.mr + 1, 2 * case.tile.mr + 1, 33] {
                let tile = MatmulTile { m_block: [0, 15, 27][i % 3], block_mr: case.tile.mr - i as u32 % 2, widen: true, ..case.tile };
                Case { least_rows: least_rows.min(CAPACITY), group_cols: 40, tile, ..case.clone() }.check(&isa);
            }
        }
    }
}

/// What the default buckets need of 12 rows a tile: no small blocks, which 512 rows do not have.
#[test]
fn functions_of_large_buckets() {
    let isa = Isa::lookup(X86_64_TRIPLE, "znver5", &[]).unwrap();
    let tiles = Isa::lookup(X86_64_TRIPLE, "sapphirerapids", &[]).unwrap();
    let counts = |isa: &Isa, case: &Case, (least_rows, bucket): (u32, u32)| {
        let (mut program, kernel) = case.program(isa);
        (program.least_rows, program.bucket) = (least_rows, bucket);
        let counts = matmul::Schedule::new(isa, &program, &kernel).row_counts;
        [counts.stream, counts.block, counts.first, counts.alone, counts.several].map(|rows| (!rows.is_empty()).then(|| rows.into_inner()))
    };
    let tile = |mr: u32, widen: bool| MatmulTile { mr, block_mr: mr, m_block: 256, widen, ..Case::new(&isa, DType::F32).tile };
    let bf16 = Case { compute: Compute::Bf16Dot, tile: tile(12, false), ..Case::new(&isa, DType::Bf16) };
    assert_eq!(counts(&isa, &bf16, (1, 1)), [Some((1, 1)), None, None, None, None]);
    assert_eq!(counts(&isa, &bf16, (2, 8)), [Some((2, 8)), None, None, None, None]);
    assert_eq!(counts(&isa, &bf16, (9, 64)), [Some((9, 12)), Some((6, 12)), Some((7, 12)), None, None]);
    assert_eq!(counts(&isa, &bf16, (65, 512)), [None, Some((8, 12)), Some((9, 12)), None, None]);
    // Two blocks read weights as they are stored.
    let widened = Case { tile: tile(12, true), ..Case::new(&isa, DType::Bf16) };
    assert_eq!(counts(&isa, &widened, (9, 64)), [Some((6, 12)), Some((8, 12)), Some((9, 12)), None, None]);
    let by_tiles = Case { compute: Compute::Bf16Tiles, tile: tile(4, false), ..Case::new(&tiles, DType::Bf16) };
    assert_eq!(counts(&tiles, &by_tiles, (1, 64)), [Some((1, 4)), None, None, Some((1, 2)), Some((1, 2))]);
    assert_eq!(counts(&tiles, &by_tiles, (9, 64)), [None, None, None, Some((1, 2)), Some((1, 2))]);
    assert_eq!(counts(&tiles, &by_tiles, (65, 512)), [None, None, None, None, Some((2, 2))]);
}

#[test]
fn odd_k_and_k_1() {
    for isa in isas() {
        for (dtype, compute) in dots(&isa) {
            for k in [1, 67] {
                Case { compute, k, group_cols: 40, ..Case::new(&isa, dtype) }.check(&isa);
            }
        }
    }
}

/// Panels so long that there are gaps between them, which nobody reads ([`Case::run`] fills them with what is no number): alone, side by
/// side, two ways, in blocks of k.
#[test]
fn gaps_between_panels() {
    for isa in isas() {
        let cases = dots(&isa).into_iter().map(|(dtype, compute)| Case { compute, ..Case::new(&isa, dtype) });
        let codings = [Coding::Int8Groups { group: 32, zeros: true }];
        for case in cases.chain(coded(&isa, &codings)) {
            let has_gap = |k: &u32| {
                let panels = Case { k: *k, ..case.clone() }.panels();
                panels.panel_bytes(case.dtype) > panels.filled_bytes(case.dtype)
            };
            let Some(k) = (256..=8192).step_by(256).find(has_gap) else {
                assert!(case.nr < 16, "{case:?}: panels of whole pages have gaps");
                continue;
            };
            let tile = MatmulTile { k_block: k / 2, widen: true, ..case.tile };
            Case { k, group_cols: 5 * case.nr, ..case.clone() }.check(&isa);
            Case { k, group_cols: 3 * case.nr, epilogue: Epilogue::SiluGate, tile, ..case.clone() }.check(&isa);
        }
    }
}

/// Blocks of k, widened weights or not, in and out of step with k: the same bits as the whole chain, which few rows compute.
#[test]
fn blocks() {
    for isa in isas() {
        for (dtype, compute) in dots(&isa) {
            for (k, k_block, widen) in [(64, 16, true), (70, 24, false), (67, 24, true)] {
                let case = Case { compute, k, ..Case::new(&isa, dtype) };
                let tile = MatmulTile { k_block, widen, ..case.tile };
                let case = Case { tile, ..case };
                match k {
                    64 => Case { group_cols: 130, epilogue: Epilogue::BiasResidual, ..case }.check(&isa),
                    70 => Case { groups: 2, group_cols: 40, epilogue: Epilogue::SiluGate, ..case }.check(&isa),
                    _ => Case { groups: 3, group_cols: 40, group_nest: true, ..case }.check(&isa),
                };
            }
        }
    }
}

/// Blocks of one and two rows, whose registers hold the rows instead of the weights, widen weights for the blocks behind them like any
/// other.
#[test]
fn blocks_of_few_rows() {
    for isa in isas() {
        let codings = [Coding::Int8Groups { group: 32, zeros: false }, Coding::Int4 { group: 64, zeros: false }];
        let elements = [DType::F16, DType::Bf16].map(|dtype| Case::new(&isa, dtype));
        let codes = coded(&isa, &codings).into_iter().filter(|case| case.compute == Compute::F32);
        for case in codes.chain(elements) {
            for (mr, block_mr) in [(1, 1), (2, 2), (case.tile.mr, 1)] {
                let tile = MatmulTile { mr, block_mr, widen: true, ..case.tile };
                Case { k: 64, epilogue: Epilogue::SiluGate, tile, ..case.clone() }.check(&isa);
            }
        }
    }
}

#[test]
fn groups_and_nests() {
    for isa in isas() {
        for group_cols in [8, 40, 64, 80] {
            Case { groups: 3, group_cols, group_nest: true, ..Case::new(&isa, DType::F32) }.check(&isa);
        }
    }
}

/// Of many panels threads do some in pieces, which others may take: all are computed, and panels or groups are what is taken. So do two
/// blocks of rows where more would widen the weights.
#[test]
fn shares_in_pieces() {
    for isa in isas() {
        for (dtype, widen) in [(DType::F32, false), (DType::Bf16, true)] {
            let case = Case { k: 16, ..Case::new(&isa, dtype) };
            for streams in [1, 4] {
                let tile = MatmulTile { fetch: Fetch { streams, ..case.tile.fetch }, widen, ..case.tile };
                for (groups, group_cols) in [(1, 51 * case.nr - 7), (52, case.nr + 8), (20, case.nr)] {
                    Case { groups, group_cols, group_nest: groups > 1, tile, ..case.clone() }.check(&isa);
                }
            }
        }
        if isa.int8_tiles {
            let nibbles = [(32, false), (32, true), (128, false)].map(|(group, zeros)| (DType::U8, Coding::Int4 { group, zeros }));
            let by_tiles = nibbles.into_iter().chain([(isa.code_type(), Coding::Int8 { group: 128 }), (DType::Bf16, Coding::Elements)]);
            for (dtype, coding) in by_tiles {
                let compute = if coding == Coding::Elements { Compute::Bf16Tiles } else { isa.matmul_of_codes(coding) };
                let case = Case { compute, coding, ..Case::new(&isa, dtype) };
                let tile = MatmulTile { fetch: Fetch { streams: 1, ..case.tile.fetch }, ..case.tile };
                let case = Case { k: 128, tile, ..case };
                Case { group_cols: 51 * case.nr - 7, ..case.clone() }.check(&isa);
                Case { group_cols: 51 * case.nr - 7, epilogue: Epilogue::SiluGate, ..case.clone() }.check(&isa);
                Case { groups: 52, group_cols: case.nr + 8, group_nest: true, ..case }.check(&isa);
            }
        }
    }
}

/// A thread that is ready does what others have left of the ends of their shares, up to seven threads after it, and nothing that they have
/// begun or done.
#[test]
fn pieces_of_others() {
    for isa in isas() {
        let new = Case::new(&isa, DType::F32);
        let case =
            Case { k: 16, group_cols: 160 * new.nr, tile: MatmulTile { fetch: Fetch { streams: 1, ..new.tile.fetch }, ..new.tile }, ..new };
        let (program, kernel) = case.program(&isa);
        let loaded = Loaded::build(&isa, |mb, name| matmul::define_whole(mb, &program, name, &kernel).map(|_| ()));
        let out = &program.buffers[2];
        let done = |thread: u32, left: &[i64]| -> Vec<u32> {
            let threads = left.len() as u32;
            let mut step = Step::new(program.weights[1].offsets[1] as usize + 4096, 0, program.arena_bytes as usize, program.private_bytes);
            step.private = Area::new(left.len() * program.private_bytes as usize);
            step.rows = 1;
            step.arena.put(out.offset as usize, &vec![0xff; out.stride as usize * 4]);
            step.claims.iter_mut().zip(left).for_each(|(line, left)| line[0] = *left);
            step.run_some(&loaded, thread..thread + 1, threads, 0);
            assert_eq!(step.claims[thread as usize][0], 0, "its own pieces");
            let is_written = |panel: &u32| !step.arena.f32(out.offset as usize + (panel * case.nr) as usize * 4).is_nan();
            (0..160).filter(is_written).collect()
        };
        let ranges = |ranges: &[(u32, u32)]| -> Vec<u32> { ranges.iter().flat_map(|&(begin, end)| begin..end).collect() };
        // Half of the panels each, of which the last ten are open, in pieces of one.
        assert_eq!(done(0, &[-1, -1]), ranges(&[(0, 80)]), "{}: the other has not begun", isa.name);
        assert_eq!(done(0, &[-1, 3]), ranges(&[(0, 80), (157, 160)]), "{}", isa.name);
        assert_eq!(done(1, &[10, -1]), ranges(&[(70, 160)]), "{}", isa.name);
        // Sixteen panels each, of which the last two are open.
        assert_eq!(
            done(8, &[2; 10]),
            ranges(&[(14, 16), (30, 32), (46, 48), (62, 64), (78, 80), (94, 96), (128, 144), (158, 160)]),
            "{}",
            isa.name
        );
    }
}

/// So it is with passes of many rows, whose units are shared out pass by pass, whoever does them with the same bits.
#[test]
fn pieces_of_passes() {
    const PANELS: u32 = 32;
    for isa in isas() {
        let new = Case { k: 64, ..Case::new(&isa, DType::F32) };
        let tile = |m_block, k_block, widen| MatmulTile { n_block: 2, m_block, k_block, widen, ..new.tile };
        // With the passes, and the panels of a piece.
        let cases = [
            (Case { tile: tile(0, 0, false), ..new.clone() }, 1, 2),
            (Case { tile: tile(27, 0, false), ..new.clone() }, 2, 2),
            (Case { tile: tile(9, 16, false), ..new.clone() }, 5, 2),
            (Case { tile: tile(27, 32, true), prologue: true, ..Case::new(&isa, DType::Bf16) }, 2, 2),
        ];
        let mut cases: Vec<_> = cases.into_iter().map(|(case, passes, piece)| (isa.clone(), case, passes, piece)).collect();
        if isa.bf16_tiles {
            // Of several blocks of k, all in one turn, and in a turn of each.
            let case = Case { tile: tile(27, 32, false), compute: Compute::Bf16Tiles, ..Case::new(&isa, DType::Bf16) };
            cases.extend([(isa.clone(), case.clone(), 2, 1), (Isa { l2_bytes: 4 << 10, ..isa.clone() }, case, 2, 4)]);
        }
        for (isa, case, passes, piece) in cases {
            let case = Case { group_cols: PANELS * case.nr, ..case };
            let (program, kernel) = case.program(&isa);
            let loaded = Loaded::build(&isa, |mb, name| matmul::define_whole(mb, &program, name, &kernel).map(|_| ()));
            let out = &program.buffers[2];
            let weights = program.weights[1].offsets[1] as usize + 4096;
            let mut step = Step::new(weights, 0, program.arena_bytes as usize, program.private_bytes);
            step.private = Area::new(2 * program.private_bytes as usize);
            step.rows = CAPACITY;
            // Numbers near 1 in every type.
            let mut rng = Rng::new(5);
            for area in [&mut step.weights, &mut step.arena] {
                area.bytes_mut()
                    .chunks_exact_mut(4)
                    .for_each(|c| c.copy_from_slice(&(0x3f80_3f80 ^ (rng.bits() & 0x007f_007f)).to_le_bytes()));
            }
            let bits = |step: &Step, row: u32, panel: u32| -> Vec<u32> {
                let at = |column: u32| out.offset as usize + (row * out.stride + panel * case.nr + column) as usize * 4;
                (0..case.nr).map(|column| step.arena.f32(at(column)).to_bits()).collect()
            };
            step.run(&loaded, 1, 0);
            let expected: Vec<Vec<Vec<u32>>> =
                (0..CAPACITY).map(|row| (0..PANELS).map(|panel| bits(&step, row, panel)).collect()).collect();
            // (row, panel) that a thread of two computes where so many pieces are left of both.
            let mut done = |thread: u32, left: [i64; 2]| -> BTreeSet<(u32, u32)> {
                step.arena.put(out.offset as usize, &vec![0xff; (CAPACITY * out.stride) as usize * 4]);
                step.claims.iter_mut().zip(left).for_each(|(line, left)| line[0] = left);
                step.run_some(&loaded, thread..thread + 1, 2, 0);
                assert_eq!(step.claims[thread as usize][0], 0, "its own pieces");
                let all = (0..CAPACITY).flat_map(|row| (0..PANELS).map(move |panel| (row, panel)));
                let written: BTreeSet<_> =
                    all.filter(|(row, panel)| bits(&step, *row, *panel) != vec![u32::MAX; case.nr as usize]).collect();
                for &(row, panel) in &written {
                    let same = bits(&step, row, panel) == expected[row as usize][panel as usize];
                    assert!(same, "{case:?}: bits of row {row}, panel {panel}");
                }
                written
            };
            // Rows and panels of these units of all passes.
            let units = |ranges: &[(u32, u32)]| -> BTreeSet<(u32, u32)> {
                let rows = |pass: u32| CAPACITY * pass / passes..CAPACITY * (pass + 1) / passes;
                let units = ranges.iter().flat_map(|(begin, end)| *begin..*end);
                units.flat_map(|unit| rows(unit / PANELS).map(move |row| (row, unit % PANELS))).collect()
            };
            let name = format!("{} {:?}", isa.name, case.tile);
            // A half each, of which a quarter is open.
            let (half, all) = (passes * PANELS / 2, passes * PANELS);
            let open = half / 4 / piece * piece;
            let left = if open == piece { 1 } else { 2 };
            assert_eq!(done(0, [-1, -1]), units(&[(0, half)]), "{name}: the other has not begun");
            assert_eq!(done(0, [-1, left.into()]), units(&[(0, half), (all - left * piece, all)]), "{name}");
            assert_eq!(done(1, [(open / piece).into(), -1]), units(&[(half - open, half), (half, all)]), "{name}");
        }
    }
}

/// Where there are more threads than units, or shares of them would differ much, rows come in more passes, so that no thread has much more
/// to do than others: each does its share of what [`Passes::number`](rcompile_runtime::cost::Passes::number) says.
#[test]
fn passes_for_many_threads() {
    for isa in isas() {
        let new = Case { k: 16, ..Case::new(&isa, DType::F32) };
        let block = MatmulTile { mr: 4, block_mr: 4, m_block: 0, n_block: 64, ..new.tile };
        let with = |panels: u32, tile: MatmulTile| (Case { group_cols: panels * new.nr, tile, ..new.clone() }, panels);
        // With the passes for so many threads.
        let cases = [
            (with(3, block), vec![(1, 1), (2, 2), (3, 1), (4, 4), (8, 2), (16, 4)]),
            (with(3, MatmulTile { m_block: 9, ..block }), vec![(1, 5), (2, 5), (3, 5), (4, 5), (8, 5), (16, 5)]),
            (with(3, MatmulTile { m_block: 15, block_mr: 3, ..block }), vec![(1, 3), (2, 6), (3, 3), (4, 6), (8, 6), (16, 3)]),
            // Shares of nine panels of all rows, or 17 of half of them: too little is gained; of seven and 13: enough.
            (with(17, block), vec![(2, 1)]),
            (with(13, block), vec![(2, 2)]),
        ];
        for ((case, panels), threads) in cases {
            let (program, kernel) = case.program(&isa);
            let loaded = Loaded::build(&isa, |mb, name| matmul::define_whole(mb, &program, name, &kernel).map(|_| ()));
            let out = &program.buffers[2];
            for (threads, expected) in threads {
                let passes = kernel.passes().number(CAPACITY, panels, threads);
                let name = format!("{}: {threads} threads, {panels} panels, {:?}", isa.name, case.tile);
                assert_eq!(passes, expected, "{name}");
                for thread in 0..threads {
                    let weights = program.weights[1].offsets[1] as usize + 4096;
                    let mut step = Step::new(weights, 0, program.arena_bytes as usize, program.private_bytes);
                    step.private = Area::new(threads as usize * program.private_bytes as usize);
                    step.rows = CAPACITY;
                    step.arena.put(out.offset as usize, &vec![0xff; (CAPACITY * out.stride) as usize * 4]);
                    step.run_some(&loaded, thread..thread + 1, threads, 0);
                    let at = |row: u32, panel: u32| out.offset as usize + (row * out.stride + panel * case.nr) as usize * 4;
                    let share = |thread: u32| passes * panels * thread / threads;
                    for (row, panel) in (0..CAPACITY).flat_map(|row| (0..panels).map(move |panel| (row, panel))) {
                        let pass = (0..passes).rfind(|pass| CAPACITY * pass / passes <= row).unwrap();
                        let is_own = (share(thread)..share(thread + 1)).contains(&(pass * panels + panel));
                        assert_eq!(!step.arena.f32(at(row, panel)).is_nan(), is_own, "{name}: thread {thread}, row {row}, panel {panel}");
                    }
                }
            }
        }
    }
}

/// Where many rows have too few groups to offer some, every thread has its share of the groups without a nest and of those with one, which
/// take longer; more threads than there are of these share groups alone, of all passes.
#[test]
fn shares_of_groups_with_nests() {
    for isa in isas() {
        let new = Case::new(&isa, DType::F32);
        let tile = MatmulTile { m_block: 0, ..new.tile };
        let case = Case { k: 16, groups: 8, group_cols: new.nr, group_nest: true, tile, ..new };
        let (program, kernel) = case.program(&isa);
        let loaded = Loaded::build(&isa, |mb, name| matmul::define_whole(mb, &program, name, &kernel).map(|_| ()));
        let out = &program.buffers[2];
        let groups_of = |thread: u32, threads: u32| -> Vec<u32> {
            let mut step = Step::new(program.weights[1].offsets[1] as usize + 4096, 0, program.arena_bytes as usize, program.private_bytes);
            step.rows = CAPACITY;
            let untouched = vec![0xff; (CAPACITY * out.stride) as usize * 4];
            step.arena.put(out.offset as usize, &untouched);
            step.run_some(&loaded, thread..thread + 1, threads, 0);
            let is_written = |group: &u32| !step.arena.f32(out.offset as usize + (group * case.nr) as usize * 4).is_nan();
            (0..8).filter(is_written).collect()
        };
        assert_eq!([0, 1].map(|thread| groups_of(thread, 2)), [[0, 1, 4, 5], [2, 3, 6, 7]], "{}", isa.name);
        assert_eq!([0, 3].map(|thread| groups_of(thread, 4)), [[0, 4], [3, 7]], "{}", isa.name);
        assert_eq!([0, 4].map(|thread| groups_of(thread, 5)), [vec![0], vec![6, 7]], "{}", isa.name);
    }
}

#[test]
fn epilogues() {
    for isa in isas() {
        for (dtype, compute) in dots(&isa) {
            let case = Case { compute, ..Case::new(&isa, dtype) };
            Case { epilogue: Epilogue::BiasResidual, out: DType::Bf16, ..case.clone() }.check(&isa);
            Case { epilogue: Epilogue::SiluGate, ..case.clone() }.check(&isa);
            // With a single stream a row walks one way after the other.
            let tile = MatmulTile { fetch: Fetch { streams: 1, ..case.tile.fetch }, ..case.tile };
            Case { epilogue: Epilogue::SiluGate, tile, ..case }.check(&isa);
        }
        let grouped = Case { groups: 2, group_cols: 40, ..Case::new(&isa, DType::F32) };
        Case { epilogue: Epilogue::SiluGate, ..grouped }.check(&isa);
    }
}

/// Arm's kernels under qemu: every type and coding over odd K and several blocks of k, and rows of two numbers of functions.
#[test]
fn on_arm() {
    for isa in arm_isas() {
        let codings = [
            Coding::Int8 { group: 256 },
            Coding::Int8Groups { group: 32, zeros: true },
            Coding::Int4 { group: 32, zeros: false },
            Coding::Int4 { group: 128, zeros: true },
        ];
        let elements = dots(&isa).into_iter().map(|(dtype, compute)| Case { compute, ..Case::new(&isa, dtype) });
        for case in elements.chain(coded(&isa, &codings)) {
            let depth = case.coding.group().map_or(16, |group| 2 * group);
            let tile = MatmulTile { k_block: depth / 2, widen: true, ..case.tile };
            Case { k: 67, group_cols: 20, ..case.clone() }.check(&isa);
            Case { k: depth, groups: 2, group_cols: 12, epilogue: Epilogue::SiluGate, prologue: true, tile, ..case }.check(&isa);
        }
    }
}

#[test]
fn private_prologue() {
    for isa in isas() {
        for (dtype, compute) in dots(&isa) {
            Case { compute, prologue: true, ..Case::new(&isa, dtype) }.check(&isa);
        }
    }
}

const ARM: &str = "aarch64-unknown-linux-gnu";
/// On Arm nothing stands beside the multiply-adds of a tile that is limited by them: no broadcasts, no moves.
const BESIDE: [&str; 5] = ["mov\tv", "dup", "ld1r", "zip", "ext\tv"];

/// Every register tile, from one row to the largest: nothing goes to the stack, every accumulator is updated once per k of a step, and
/// the largest tile has all the registers that it is meant to have.
#[test]
fn hot_loop_asm() {
    let mut failures: Vec<String> = vec![];
    for (triple, cpu, dtype, compute, rows, instruction) in [
        (X86_64_TRIPLE, "x86-64-v3", DType::F32, Compute::F32, 6u32, "vfmadd"),
        (X86_64_TRIPLE, "x86-64-v3", DType::F16, Compute::F32, 6, "vfmadd"),
        (X86_64_TRIPLE, "x86-64-v3", DType::Bf16, Compute::F32, 6, "vfmadd"),
        (X86_64_TRIPLE, "x86-64-v4", DType::F32, Compute::F32, 12, "vfmadd"),
        (X86_64_TRIPLE, "x86-64-v4", DType::F16, Compute::F32, 12, "vfmadd"),
        (X86_64_TRIPLE, "x86-64-v4", DType::Bf16, Compute::F32, 12, "vfmadd"),
        (X86_64_TRIPLE, "sapphirerapids", DType::Bf16, Compute::F32, 12, "vfmadd"),
        (X86_64_TRIPLE, "sapphirerapids", DType::Bf16, Compute::Bf16Dot, 12, "vdpbf16ps"),
        (X86_64_TRIPLE, "znver4", DType::Bf16, Compute::Bf16Dot, 12, "vdpbf16ps"),
        (X86_64_TRIPLE, "znver5", DType::Bf16, Compute::Bf16Dot, 12, "vdpbf16ps"),
        (ARM, "generic", DType::F32, Compute::F32, 8, "fmla"),
        (ARM, "neoverse-n1", DType::F16, Compute::F32, 8, "fmla"),
        (ARM, "neoverse-n1", DType::Bf16, Compute::F32, 8, "fmla"),
        (ARM, "neoverse-v1", DType::F32, Compute::F32, 8, "fmla"),
        (ARM, "neoverse-v1", DType::Bf16, Compute::Bf16Mmla, 12, "bfmmla"),
        (ARM, "neoverse-v2", DType::Bf16, Compute::Bf16Mmla, 12, "bfmmla"),
        (ARM, "ampere1", DType::Bf16, Compute::Bf16Mmla, 12, "bfmmla"),
    ] {
        let isa = Isa::lookup(triple, cpu, &[]).unwrap();
        for ways in [1, 2] {
            let epilogue = if ways == 2 { Epilogue::SiluGate } else { Epilogue::Plain };
            let case = Case { compute, epilogue, k: 2048, ..Case::new(&isa, dtype) };
            let case = Case { tile: MatmulTile { mr: rows, block_mr: rows, k_block: 1024, widen: true, ..case.tile }, ..case };
            let (program, kernel) = case.program(&isa);
            let asm = assembly(&isa, &program, &kernel);
            let widens = compute == Compute::F32 && dtype != DType::F32;
            for (m, name) in functions(&isa, &program, &kernel, widens) {
                let hot = hot_loops(&asm, triple, &format!("kernel.{name}{m}"));
                let mut fail =
                    |what: String, text: String| failures.push(format!("{cpu} {dtype} {ways} ways, {name} of {m} rows: {what}\n{text}"));
                // k per step of the loop: both halves of a bf16 word, where they are not one instruction or widened before.
                let pack = match instruction {
                    "fmla" if m > 2 => 4,
                    "vfmadd" if name != "stream" => 4,
                    _ if dtype == DType::Bf16 && widens && name != "block" => 2,
                    _ => 1,
                };
                // Matrix instructions work on pairs of rows.
                let tile_m = if compute == Compute::Bf16Mmla { m.next_multiple_of(2) } else { m };
                if hot.is_empty() {
                    fail("no hot loop".into(), String::new());
                }
                for l in &hot {
                    l.problems(tile_m).into_iter().for_each(|p| fail(p, l.text()));
                    // Another hardware thread of a core leaves half of what it takes in a cycle.
                    if m == rows && name == "block" && triple == X86_64_TRIPLE && l.lines.len() > 2 * l.multiply_adds() {
                        fail(format!("{} instructions for {} {instruction}", l.lines.len(), l.multiply_adds()), l.text());
                    }
                    let per_step = pack * l.accumulators();
                    if l.count(instruction) != l.multiply_adds() || !l.multiply_adds().is_multiple_of(per_step) {
                        fail(format!("{} {instruction} for {per_step} a step", l.count(instruction)), l.text());
                    }
                    if let Some(word) = BESIDE.iter().find(|word| triple == ARM && m > 2 && l.count(word) > 0) {
                        fail(format!("{word} in the loop"), l.text());
                    }
                }
                let most = hot.iter().map(|l| l.accumulators()).max().unwrap_or(0);
                if m == rows && most != (rows * PANEL_VECTORS) as usize {
                    fail(format!("{most} accumulators"), String::new());
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// Integer dots: nothing on the stack, every sum is updated once per four codes of a step, and the largest tile has all its sums.
#[test]
fn hot_loop_asm_of_codes() {
    let mut failures: Vec<String> = vec![];
    for (triple, cpu, dot) in [
        (X86_64_TRIPLE, "alderlake", "vpdpbusd"),
        (X86_64_TRIPLE, "icelake-server", "vpdpbusd"),
        (X86_64_TRIPLE, "sapphirerapids", "vpdpbusd"),
        (X86_64_TRIPLE, "znver5", "vpdpbusd"),
        (ARM, "neoverse-n1", "sdot"),
        (ARM, "apple-m1", "sdot"),
        (ARM, "neoverse-v1", "smmla"),
        (ARM, "neoverse-v2", "smmla"),
        (ARM, "apple-m2", "smmla"),
    ] {
        // Of blocks of rows without tiles; few rows are the same with them.
        let edits = if cpu == "sapphirerapids" { vec!["-amx-tile".to_string()] } else { vec![] };
        let isa = Isa::lookup(triple, cpu, &edits).unwrap();
        let compute = isa.matmul_of_codes(Coding::Int8 { group: 256 });
        assert_eq!(compute == Compute::Int8Mmla, dot == "smmla", "{cpu}");
        let int4 = |group| Coding::Int4 { group, zeros: false };
        let zeros = [Coding::Int4 { group: 128, zeros: true }, Coding::Int8Groups { group: 32, zeros: true }];
        let zeros = zeros.into_iter().filter(|_| compute == Compute::Int8Dot);
        for coding in [Coding::Int8 { group: 256 }, int4(32), int4(128)].into_iter().chain(zeros) {
            let case = Case { compute, coding, k: 2048, ..Case::new(&isa, code_type(&isa, coding)) };
            let four = coding.has_nibbles();
            let rows = isa.rows(compute);
            // Blocks of six rows that take nibbles apart themselves keep both sums in registers.
            let (widen, beside) = (!isa.nibbles_beside_dots, isa.nibbles_beside_dots && coding == int4(32));
            let block_mr = if beside { 6 } else { rows };
            let case = Case { tile: MatmulTile { mr: rows, block_mr, k_block: 1024, widen, ..case.tile }, ..case };
            let (program, kernel) = case.program(&isa);
            let asm = assembly(&isa, &program, &kernel);
            for (m, name) in functions(&isa, &program, &kernel, four && widen) {
                let hot = hot_loops(&asm, triple, &format!("kernel.{name}{m}"));
                let mut fail = |what: String, text: String| failures.push(format!("{cpu} {coding:?}, {name} of {m} rows: {what}\n{text}"));
                // Nibbles, where they were not taken apart before, are two dots a step.
                let halves = if four && (name != "block" || !widen) { 2 } else { 1 };
                // Sixteen codes of a row in a register, where dots take four of them from a lane.
                let per_step = if dot == "sdot" && m > 2 { 4 } else { halves };
                // Matrix instructions work on pairs of rows.
                let tile_m = if dot == "smmla" { m.next_multiple_of(2) } else { m };
                let loops: Vec<_> = hot.iter().filter(|l| l.count(dot) > 0).collect();
                if loops.is_empty() {
                    fail("no hot loop".into(), String::new());
                }
                for l in &loops {
                    l.problems(tile_m).into_iter().for_each(|p| fail(p, l.text()));
                    if let Some(word) = BESIDE.iter().find(|word| triple == ARM && m > 2 && l.count(word) > 0) {
                        fail(format!("{word} in the loop"), l.text());
                    }
                    if l.count(dot) != l.multiply_adds() || !l.multiply_adds().is_multiple_of(per_step * l.accumulators()) {
                        fail(format!("{} {dot} for {} sums", l.count(dot), l.accumulators()), l.text());
                    }
                }
                let most = loops.iter().map(|l| l.accumulators()).max().unwrap_or(0);
                if m == block_mr && name == "block" && most != (block_mr * PANEL_VECTORS) as usize {
                    fail(format!("{most} accumulators"), String::new());
                }
                if beside && name == "block" {
                    let around = group_loops(&asm, triple, &format!("kernel.{name}{m}"));
                    let lines = || around.iter().flat_map(|l| l.before.iter().chain(&l.after));
                    // One subtraction and one FMA per sum.
                    let counts = ["vsubps", "vfmadd"].map(|word| lines().filter(|l| l.starts_with(word)).count());
                    if counts != [(m * PANEL_VECTORS) as usize; 2] {
                        fail(format!("{counts:?} subtractions and FMAs"), String::new());
                    }
                    if lines().count() == 0 || lines().any(|l| l.contains("zmm") && l.contains("(%rsp")) {
                        fail("sums on the stack".into(), lines().copied().collect::<Vec<_>>().join("\n"));
                    }
                }
                // Two blocks of rows ask for all that comes next, each for half of the lines that a step reads (of nibbles that are not
                // taken apart).
                for l in loops.iter().filter(|_| name != "stream" && dot != "smmla") {
                    let bytes = l.count(dot) / m as usize * (isa.lanes * 4) as usize / if four { 2 } else { 1 };
                    let lines = l.count("prefetch") + l.count("prfm");
                    if lines * 128 < bytes {
                        fail(format!("{lines} lines asked for, {bytes} bytes read"), l.text());
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// Fewest instructions between one of these and the next one on tiles.
fn fewest_behind(body: &str, is_one: impl Fn(&str) -> bool) -> usize {
    let lines = body.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with(['.', '#']) && !l.ends_with(':'));
    let instructions: Vec<_> = lines.flat_map(|l| l.split(';').map(str::trim)).collect();
    let on_tiles = |i: &&str| ["tdp", "tileload", "tilestored"].iter().any(|word| i.starts_with(word));
    let behind = |(at, _)| instructions[at + 1..].iter().position(on_tiles);
    instructions.iter().enumerate().filter(|(_, i)| is_one(i)).filter_map(behind).min().expect("instructions on tiles")
}

/// Tiles: each that is loaded is used twice, something else lies between products, and behind loads, registers have their shapes and are
/// given up; few rows have a sum of even and one of odd k for every vector, in registers.
#[test]
fn tiles_asm() {
    let isa = Isa::lookup(X86_64_TRIPLE, "sapphirerapids", &[]).unwrap();
    let body = |asm: &str, name: &str| -> String {
        asm.split_once(&format!("\n{name}:")).unwrap_or_else(|| panic!("no {name}")).1.split_once(".Lfunc_end").unwrap().0.to_string()
    };
    let count = |body: &str, word: &str| body.lines().filter(|l| l.trim_start().starts_with(word)).count();
    let int4 = |group| Coding::Int4 { group, zeros: false };
    let codes = [("tdpbsud", Coding::Int8 { group: 256 }), ("tdpbsud", int4(64)), ("tdpbf16ps", int4(32))];
    let codings = [("tdpbf16ps", Coding::Elements)].into_iter().chain(codes);
    // Few rows, and many, for which K has several turns.
    for ((dot, coding), rows) in codings.flat_map(|coding| [CAPACITY, 256].map(|rows| (coding, rows))) {
        let (compute, dtype) = match coding {
            Coding::Elements => (Compute::Bf16Tiles, DType::Bf16),
            _ => (isa.matmul_of_codes(coding), DType::U8),
        };
        let case = Case { compute, coding, k: 2048, ..Case::new(&isa, dtype) };
        let mr = isa.rows(compute);
        let tile = MatmulTile { mr, block_mr: mr, k_block: 512, m_block: rows * 2 / 3, ..case.tile };
        let (mut program, kernel) = Case { tile, ..case }.program(&isa);
        program.bucket = rows;
        program.private_bytes *= 8;
        let asm = assembly(&isa, &program, &kernel);
        // What they ask for, into L1 and L2: a single block of rows weights that it wants next, several those that they want much later,
        // and the sums of bf16 that wait between turns for the next of them.
        let (weights, sums) = ((true, false), (dot == "tdpbf16ps" && rows > CAPACITY, true));
        let functions =
            [("kernel.tiles1", 2, sums), ("kernel.tiles2", 4, sums), ("kernel.alone1", 2, weights), ("kernel.alone2", 4, weights)];
        for (name, dots, asks) in functions {
            let body = body(&asm, name);
            let [l1, l2] = ["prefetcht0", "prefetcht1"].map(|ask| count(&body, ask));
            assert_eq!((l1 > 0, l2 > 0), asks, "{coding:?} {name}: {body}");
            if asks == weights {
                // A line of each page of a window, of which the first has an address and the others lie a page behind the one before.
                let ask = |l: &str| l.trim().strip_prefix("prefetcht0").map(|at| at.split('(').next().unwrap().trim().parse().unwrap_or(0));
                let lines: Vec<i64> = body.lines().filter_map(ask).collect();
                let pages = lines.chunks(4).all(|lines| lines.len() == 4 && lines.windows(2).all(|pair| pair[1] - pair[0] == 4096));
                assert!(pages, "{coding:?} {name}: {lines:?} {body}");
            }
            let steps = count(&body, dot) / dots;
            // Of columns two, and one for each tile of rows.
            let loads = steps * (2 + dots / 2);
            // (Of rows and columns; sums, in the first four registers, are loaded at the start of a block of k.)
            let is_load = |i: &str| i.starts_with("tileload") && (4..8).any(|register| i.ends_with(&format!("%tmm{register}")));
            let loaded = body.lines().filter(|l| is_load(l.trim())).count();
            assert_eq!((count(&body, dot), loaded), (steps * dots, loads), "{coding:?} {name}: {body}");
            // Beside another thread of the core they are slow one right behind the other.
            assert!(fewest_behind(&body, |i| i.starts_with("tdp")) >= 8, "{coding:?} {name}: {body}");
            assert!(fewest_behind(&body, is_load) >= 4, "{coding:?} {name}: {body}");
            // Rows pass by.
            assert_eq!(count(&body, "tileloaddt1"), steps * dots / 2, "{coding:?} {name}: {body}");
            assert!(steps > 0 && count(&body, "tilezero") >= dots && count(&body, "tilestored") >= dots, "{coding:?} {name}: {body}");
            assert_eq!((count(&body, "ldtilecfg"), count(&body, "tilerelease")), (0, 0), "{coding:?} {name}: {body}");
        }
        let whole = body(&asm, "kernel");
        assert!(count(&whole, "ldtilecfg") > 0 && count(&whole, "tilerelease") == 1, "{coding:?}: {whole}");
        for m in (1..=isa.rows(compute)).filter(|_| compute == Compute::Bf16Tiles) {
            let hot = hot_loops(&asm, X86_64_TRIPLE, &format!("kernel.stream{m}"));
            assert!(!hot.is_empty());
            for l in hot {
                assert!(l.stack_accesses().is_empty(), "{m} rows: {}", l.text());
                let (dots, sums) = (l.multiply_adds(), l.accumulators());
                assert!(dots.is_multiple_of(sums) && sums.is_multiple_of(2 * m as usize), "{m} rows: {}", l.text());
            }
        }
    }
}

/// Dots by pairs of products: nothing on the stack, per dot of bytes both multiplications and one change of sign; magnitudes are shared by
/// the rows. Sums of nibbles stay words: one multiplication and one addition.
#[test]
fn hot_loop_asm_of_dots_in_pairs() {
    let mut failures: Vec<String> = vec![];
    for (cpu, signs) in [("x86-64-v3", &["vpsignb"][..]), ("znver3", &["vpsignb"]), ("skylake-avx512", &["vpblendmb", "vmovdqu8"])] {
        let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).unwrap();
        let int4 = |group| Coding::Int4 { group, zeros: false };
        for coding in [Coding::Int8 { group: 256 }, int4(32), int4(128)] {
            let case = Case { compute: Compute::Int8Dot, coding, k: 2048, ..Case::new(&isa, code_type(&isa, coding)) };
            let rows = isa.rows(case.compute);
            let case = Case { tile: MatmulTile { mr: rows, block_mr: rows, k_block: 1024, widen: true, ..case.tile }, ..case };
            let (program, kernel) = case.program(&isa);
            let asm = assembly(&isa, &program, &kernel);
            let bytes = coding.has_bytes();
            for (m, name) in functions(&isa, &program, &kernel, !bytes) {
                let hot = hot_loops(&asm, X86_64_TRIPLE, &format!("kernel.{name}{m}"));
                let loops: Vec<_> = hot.iter().filter(|l| l.count("vpmaddubsw") > 0).collect();
                let mut fail = |what: String, text: String| failures.push(format!("{cpu} {coding:?}, {name} of {m} rows: {what}\n{text}"));
                if loops.is_empty() {
                    fail("no hot loop".into(), String::new());
                }
                for l in loops {
                    let [dots, words, sums, magnitudes] = ["vpmaddubsw", "vpmaddwd", "vpaddw", "vpabsb"].map(|word| l.count(word));
                    let signs: usize = signs.iter().map(|word| l.count(word)).sum();
                    let stack = l.stack_accesses();
                    if !stack.is_empty() {
                        fail(format!("{} stack accesses, the first: {}", stack.len(), stack[0]), l.text());
                    }
                    let wanted = if bytes { (dots, 0, dots, dots / m as usize) } else { (0, dots, 0, 0) };
                    if (words, sums, signs, magnitudes) != wanted || !dots.is_multiple_of(m as usize) {
                        let text = format!(
                            "{dots} products of bytes, {words} of words, {sums} sums of words, {signs} signs, {magnitudes} magnitudes"
                        );
                        fail(text, l.text());
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// Codes in f32 on Arm: widened once, they meet their rows by lane as elements do.
#[test]
fn widened_codes_meet_rows_by_lane() {
    let isa = Isa::lookup(ARM, "generic", &[]).unwrap();
    for coding in [Coding::Int8 { group: 256 }, Coding::Int4 { group: 32, zeros: false }] {
        let case = Case { coding, k: 2048, ..Case::new(&isa, code_type(&isa, coding)) };
        let tile = MatmulTile { k_block: 1024, widen: true, ..case.tile };
        let (program, kernel) = Case { tile, ..case }.program(&isa);
        let asm = assembly(&isa, &program, &kernel);
        let hot = hot_loops(&asm, ARM, &format!("kernel.block{}", isa.tile_rows));
        assert!(!hot.is_empty());
        for l in hot {
            assert!(l.count("fmla") > 0 && BESIDE.iter().all(|word| l.count(word) == 0), "{coding:?}: {}", l.text());
        }
    }
}

/// Rows that are busy have lines brought to L1 alone; two ways whose sums do not fit registers together are walked one after the other.
#[test]
fn prefetches_and_ways_by_the_number_of_rows() {
    let isa = Isa::lookup(X86_64_TRIPLE, "znver4", &[]).unwrap();
    let k = 2048;
    let case = Case { compute: Compute::Bf16Dot, epilogue: Epilogue::SiluGate, k, ..Case::new(&isa, DType::Bf16) };
    let fetch = Fetch { ahead: Distances { l2: 1024, l1: 0 }, busy: Some(BusyRows { rows: 7, l1: 3072 }), near: None, ..case.tile.fetch };
    let tile = MatmulTile { mr: 12, block_mr: 12, fetch, ..case.tile };
    let (program, kernel) = Case { tile, ..case }.program(&isa);
    let asm = assembly(&isa, &program, &kernel);
    // The second way's panel lies behind the first.
    let second_way = format!("{}(", kernel.panels.panel_bytes(DType::Bf16));
    let reads_both = |l: &HotLoop| l.lines.iter().any(|line| line.starts_with("vmov") && line.contains(&second_way));
    for (m, caches, ways) in [
        (4, ["prefetcht1", "prefetcht0"], 2),
        (6, ["prefetcht1", "prefetcht0"], 2),
        (7, ["prefetcht0", "prefetcht1"], 1),
        (8, ["prefetcht0", "prefetcht1"], 1),
    ] {
        let hot = hot_loops(&asm, X86_64_TRIPLE, &format!("kernel.stream{m}"));
        assert!(!hot.is_empty());
        for l in hot {
            assert!(l.count(caches[0]) > 0 && l.count(caches[1]) == 0, "{m} rows: {}", l.text());
            assert_eq!(reads_both(&l), ways == 2, "{m} rows: {}", l.text());
        }
    }
    // Blocks of rows go on through a panel as it lies, too: a piece of each way would be every second line.
    for (m, ways) in [(6, 2), (7, 1), (12, 1)] {
        let hot = hot_loops(&asm, X86_64_TRIPLE, &format!("kernel.block{m}"));
        assert!(!hot.is_empty());
        hot.iter().for_each(|l| assert_eq!(reads_both(l), ways == 2, "block of {m} rows: {}", l.text()));
    }
}

/// Several streams side by side have lines brought nearer: of bf16 two rows walk three panels, four rows one.
#[test]
fn distances_by_the_number_of_streams() {
    let isa = Isa::lookup(X86_64_TRIPLE, "sapphirerapids", &[]).unwrap();
    let case = Case { compute: Compute::Bf16Tiles, k: 2048, group_cols: 256, ..Case::new(&isa, DType::Bf16) };
    // Nearer: into L2 instead of L1.
    let far = Fetch { streams: 6, ahead: Distances { l2: 0, l1: 512 }, busy: None, near: None, ..case.tile.fetch };
    for fetch in [Fetch { near: Some(Near { streams: 3, ahead: Distances { l2: 1024, l1: 0 } }), ..far }, far] {
        let tile = MatmulTile { mr: 4, block_mr: 4, fetch, ..case.tile };
        let (program, kernel) = Case { tile, ..case.clone() }.program(&isa);
        let asm = assembly(&isa, &program, &kernel);
        for (m, is_near) in [(2, fetch.near.is_some()), (4, false)] {
            let body = asm.split_once(&format!("\nkernel.stream{m}:")).unwrap().1.split_once(".Lfunc_end").unwrap().0;
            assert_eq!(body.contains("prefetcht1"), is_near, "{m} rows: {body}");
            assert!(body.contains("prefetcht0"), "{m} rows, fewer streams at the end: {body}");
        }
    }
}

/// Where the CPU wants it, lines that a single stream asks for pass L2 by: not those of several streams, and on no other CPU.
#[test]
fn lines_of_a_single_stream_pass_l2_by() {
    for (cpu, lone) in [("znver5", "prefetchnta"), ("x86-64-v4", "prefetcht0")] {
        let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).unwrap();
        let case = Case { k: 2048, group_cols: 256, ..Case::new(&isa, DType::F32) };
        let far = Fetch { ahead: Distances { l2: 0, l1: 4096 }, busy: None, near: None, ..case.tile.fetch };
        for (streams, wanted) in [(1, lone), (3, "prefetcht0")] {
            let tile = MatmulTile { mr: 4, block_mr: 4, fetch: Fetch { streams, ..far }, ..case.tile };
            let (program, kernel) = Case { tile, ..case.clone() }.program(&isa);
            let asm = assembly(&isa, &program, &kernel);
            let hot = hot_loops(&asm, X86_64_TRIPLE, "kernel.stream1");
            // The first: behind several streams a single one takes the panels that are left.
            let first = hot.first().expect("a loop over the panels");
            assert!(
                first.count(wanted) > 0 && first.count(wanted) == first.count("prefetch"),
                "{cpu}, {streams} streams: {}",
                first.text()
            );
        }
    }
}

/// Behind several panels that a single row walks side by side lies what it has read: their lines go on in the next walk's panels. Those of
/// one stream run on into the next panel anyway.
#[test]
fn lines_of_a_single_row_go_on_in_the_next_walk() {
    let isa = Isa::lookup(X86_64_TRIPLE, "znver5", &[]).unwrap();
    let case = Case { k: 2048, group_cols: 256, ..Case::new(&isa, DType::F32) };
    let near = Fetch { ahead: Distances { l2: 0, l1: 1024 }, busy: None, near: None, ..case.tile.fetch };
    let coding = Coding::Int8 { group: 256 };
    let int8 = Case { compute: Compute::Int8Dot, coding, k: 2048, ..Case::new(&isa, code_type(&isa, coding)) };
    for (case, streams, rows, go_on) in [(&case, 4, 1, true), (&case, 4, 2, false), (&case, 1, 1, false), (&int8, 4, 1, false)] {
        let tile = MatmulTile { mr: 2, block_mr: 2, fetch: Fetch { streams, ..near }, ..case.tile };
        let (program, kernel) = Case { tile, ..case.clone() }.program(&isa);
        let asm = assembly(&isa, &program, &kernel);
        let hot = hot_loops(&asm, X86_64_TRIPLE, &format!("kernel.stream{rows}"));
        let first = hot.iter().find(|l| l.count("prefetch") > 0).expect("a loop over the panels");
        assert_eq!(first.count("cmov") > 0, go_on, "{rows} rows, {streams} streams: {}", first.text());
    }
}

/// Rows are read as their CPU wants them: by a function of its own, where it wants them otherwise, with the same bits.
#[test]
fn each_cpu_has_its_streams() {
    let isa = Isa::native().unwrap();
    let case = Case { k: 2048, group_cols: 256, ..Case::new(&isa, DType::F32) };
    let other = Fetch { streams: 4, ahead: Distances { l2: 1024, l1: 0 }, busy: None, near: None, ..case.tile.fetch };
    let zen5 = Fetch { streams: 1, ahead: Distances { l2: 0, l1: 8192 }, past_l2: true, ..other };
    // Other streams side by side, of two ways.
    let tile = MatmulTile { fetch: other, ..case.tile };
    Case { tile, fetch_by_cpu: vec![(CpuKind::Zen5, zen5)], epilogue: Epilogue::SiluGate, k: 64, ..case.clone() }.check(&isa);
    // From two rows on both are the same.
    let busy = |fetch| Fetch { streams: 1, busy: Some(BusyRows { rows: 2, l1: 4096 }), past_l2: true, ..fetch };
    let tile = MatmulTile { fetch: busy(other), ..case.tile };
    let case = Case { tile, fetch_by_cpu: vec![(CpuKind::Zen5, busy(zen5))], ..case };
    let (_, kernel) = case.program(&isa);
    assert_eq!([CpuKind::Other, CpuKind::Zen5].map(|cpu| kernel.fetch(cpu)), [busy(other), busy(zen5)]);
    case.check(&isa);

    // In the functions' place: which of them was called, in the arena's first word.
    let (program, kernel) = case.program(&isa);
    let symbol = |part: &Part| match part {
        Part::Rows(RowFunction { work: RowWork::Stream { reading, .. }, .. }) if reading.ahead == zen5.ahead => "zen5".to_string(),
        part => part.name(),
    };
    let names: BTreeSet<String> = matmul::Schedule::new(&isa, &program, &kernel).parts().iter().map(symbol).collect();
    let mark = |name: &String| {
        let mark = ["stream1", "zen5", "stream2"].iter().position(|known| name == known).map_or(0, |at| at + 1);
        format!("void {name}(const char *ctx) {{ **(int **)(ctx + {}) = {mark}; }}\n", field::ARENA)
    };
    let functions: String = names.iter().map(mark).collect();
    let loaded = Loaded::link(&isa, &functions, |mb, name| matmul::define(mb, &program, name, &kernel, symbol).map(|_| ()));
    for (cpu, rows, called) in [(CpuKind::Other, 1, 1), (CpuKind::Zen5, 1, 2), (CpuKind::Other, 2, 3), (CpuKind::Zen5, 2, 3)] {
        let mut step = Step::new(4096, 0, program.arena_bytes as usize, program.private_bytes);
        (step.rows, step.cpu) = (rows, cpu);
        step.run(&loaded, 1, 0);
        assert_eq!(step.arena.bytes()[0], called, "{cpu:?}, {rows} rows");
    }
}

/// The floats of few rows, of which other threads wrote some, are asked for while a thread makes codes of those before them: each line of a
/// group once.
#[test]
fn codes_of_few_rows_ask_for_their_floats() {
    let isa = Isa::lookup(X86_64_TRIPLE, "znver5", &[]).unwrap();
    for coding in [Coding::Int8 { group: 256 }, Coding::Int4 { group: 32, zeros: false }] {
        let case = Case { compute: Compute::Int8Dot, coding, k: 2048, ..Case::new(&isa, code_type(&isa, coding)) };
        let (program, kernel) = case.program(&isa);
        let x = &kernel.quantise.as_ref().unwrap().x;
        let asm = assembly(&isa, &program, &kernel);
        let body = asm.split_once("\nkernel:").unwrap().1.split_once(".Lfunc_end").unwrap().0;
        let lines = u64::from(coding.group().unwrap()) * x.dtype.size() / 64;
        assert_eq!(body.matches("prefetcht0").count() as u64, lines, "{coding:?}: {body}");
    }
}

/// Blocks of rows ask for the lines of a residual before their arithmetic; where the epilogue reads nothing by row and column, there is
/// nothing to ask for.
#[test]
fn residuals_are_asked_for() {
    for (triple, cpu, prefetch) in
        [(X86_64_TRIPLE, "znver4", "prefetcht1"), (X86_64_TRIPLE, "x86-64-v3", "prefetcht1"), (ARM, "neoverse-v1", "prfm")]
    {
        let isa = Isa::lookup(triple, cpu, &[]).unwrap();
        for epilogue in [Epilogue::Plain, Epilogue::BiasResidual, Epilogue::SiluGate] {
            let (program, kernel) = Case { epilogue, ..Case::new(&isa, DType::F32) }.program(&isa);
            let asm = assembly(&isa, &program, &kernel);
            let body = |name: String| asm.split_once(&format!("\n{name}:")).map(|(_, rest)| rest.split_once(".Lfunc_end").unwrap().0);
            let block = body(format!("kernel.block{}", isa.tile_rows)).unwrap();
            // By its address and the epilogue's.
            let calls = block.lines().map(str::trim_start).filter(|l| l.starts_with("callq\t*") || l.starts_with("blr")).count();
            let (function, gives) = (body("kernel.ahead".into()), body("kernel".into()).unwrap().contains("kernel.ahead"));
            let what = format!("{cpu}, {epilogue:?}: {calls} calls, is given: {gives}\n{}", function.unwrap_or("nothing"));
            assert_eq!(calls, 2, "{what}");
            if epilogue == Epilogue::BiasResidual {
                let lines = function.expect(&what).matches(prefetch).count();
                assert!(gives && lines > 0 && lines.is_multiple_of(isa.panel_nr().div_ceil(16) as usize), "{what}");
            } else {
                assert!(function.is_none() && !gives, "{what}");
            }
        }
    }
}

/// Numbers of rows of a kernel's functions, and what these are called: of all few rows, and of blocks of up to `block_mr`.
fn functions(isa: &Isa, program: &Program, kernel: &Matmul, widens: bool) -> Vec<(u32, &'static str)> {
    let counts = matmul::Schedule::new(isa, program, kernel).row_counts;
    assert_eq!((counts.stream.clone(), *counts.block.end()), (1..=kernel.tile.mr, kernel.tile.block_mr));
    let first = counts.first.filter(|_| widens).map(|m| (m, "widen"));
    counts.stream.map(|m| (m, "stream")).chain(counts.block.map(|m| (m, "block"))).chain(first).collect()
}

/// A thread's scratch begins behind the rows that it makes for itself.
#[test]
fn scratch_lies_behind_rows() {
    let isa = Isa::lookup(X86_64_TRIPLE, "znver4", &[]).unwrap();
    let coding = Coding::Int8 { group: 256 };
    let case = Case { compute: isa.matmul_of_codes(coding), coding, k: 512, ..Case::new(&isa, DType::U8) };
    let (mut program, kernel) = case.program(&isa);
    let define = |program: &Program| {
        let built =
            module::build("kernel", &isa, 0, Emit::default(), |mb| matmul::define_whole(mb, program, "kernel", &kernel).map(|_| ()));
        built.map(drop).map_err(|e| e.to_string())
    };
    define(&program).unwrap();
    program.private_bytes -= 128;
    let e = define(&program).unwrap_err();
    assert!(e.contains("bytes of private scratch behind"), "{e}");
}

fn assembly(isa: &Isa, program: &Program, kernel: &Matmul) -> String {
    Loaded::assembly(isa, |mb, name| matmul::define_whole(mb, program, name, kernel).map(|_| ()))
}
