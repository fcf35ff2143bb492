//! Small programs for tests: builders, memory, running a step function in this process.
#![allow(dead_code)] // each test binary uses a part

use super::{Loaded, load};
use rcompile_codegen::isa::Isa;
use rcompile_codegen::program::*;
use rcompile_codegen::{Options, compile, compile_units, step_symbol};
use rcompile_runtime::abi::{CpuKind, StepCtx};

/// Expression builder with short names.
#[derive(Default)]
pub struct E(pub Exprs);

impl E {
    pub fn int(&mut self, v: i64) -> ExprId {
        self.0.int(v)
    }
    pub fn float(&mut self, v: f32) -> ExprId {
        self.0.float(v)
    }
    pub fn var(&mut self, v: u32) -> ExprId {
        self.0.add(Expr::Var(VarId(v)))
    }
    pub fn scalar(&mut self, v: u32) -> ExprId {
        self.0.add(Expr::Scalar(ScalarId(v)))
    }
    pub fn load(&mut self, operand: u32, index: ExprId) -> ExprId {
        self.0.add(Expr::Load(OperandId(operand), index))
    }
    pub fn bin(&mut self, op: BinaryOp, a: ExprId, b: ExprId) -> ExprId {
        self.0.binary(op, a, b)
    }
    pub fn add(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.bin(BinaryOp::Add, a, b)
    }
    pub fn sub(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.bin(BinaryOp::Sub, a, b)
    }
    pub fn mul(&mut self, a: ExprId, b: ExprId) -> ExprId {
        self.bin(BinaryOp::Mul, a, b)
    }
    pub fn mul_int(&mut self, a: ExprId, b: i64) -> ExprId {
        let b = self.int(b);
        self.mul(a, b)
    }
    pub fn div_int(&mut self, a: ExprId, b: i64) -> ExprId {
        let b = self.int(b);
        self.bin(BinaryOp::Div, a, b)
    }
    pub fn rem_int(&mut self, a: ExprId, b: i64) -> ExprId {
        let b = self.int(b);
        self.bin(BinaryOp::Rem, a, b)
    }
    pub fn un(&mut self, op: UnaryOp, a: ExprId) -> ExprId {
        self.0.add(Expr::Unary(op, a))
    }
    pub fn cmp(&mut self, op: CmpOp, a: ExprId, b: ExprId) -> ExprId {
        self.0.add(Expr::Cmp(op, a, b))
    }
    pub fn select(&mut self, c: ExprId, a: ExprId, b: ExprId) -> ExprId {
        self.0.add(Expr::Select(c, a, b))
    }
    /// `outer * stride + inner`.
    pub fn at(&mut self, outer: ExprId, stride: i64, inner: ExprId) -> ExprId {
        let base = self.mul_int(outer, stride);
        self.add(base, inner)
    }
}

pub fn reduce(var: u32, n: u32, op: ReduceOp, value: ExprId, into: u32) -> Stage {
    Stage { var: VarId(var), range: 0..n, kind: StageKind::Reduce { op, value, into: ScalarId(into) } }
}
pub fn store(operand: u32, index: ExprId, value: ExprId) -> Store {
    Store { operand: OperandId(operand), index, value }
}
pub fn stores(var: u32, n: u32, list: Vec<Store>) -> Stage {
    Stage { var: VarId(var), range: 0..n, kind: StageKind::Store(list) }
}
pub fn operand(place: Place, dtype: DType) -> Operand {
    Operand { place, dtype }
}

/// A program of one region per nest, with a barrier after each.
pub fn program(buffers: Vec<Buffer>, weights: Vec<Weight>, nests: Vec<LoopNest>) -> Program {
    let arena_bytes = buffers.iter().map(|b| b.offset + u64::from(b.rows * b.stride) * b.dtype.size()).max().unwrap_or(0);
    let ids = (0..nests.len() as u32).map(RegionId);
    Program {
        entry: "step".into(),
        bucket: 8,
        least_rows: 1,
        max_logit_rows: 8,
        max_runs: 8,
        tile_rows: 8,
        buffers,
        weights,
        body: ids.flat_map(|id| [Item::Region(id), Item::Barrier]).collect(),
        regions: nests.into_iter().enumerate().map(|(i, nest)| Region { name: format!("nest.{i}"), kernel: Kernel::Loops(nest) }).collect(),
        arena_bytes,
        private_bytes: 0,
    }
}

/// Buffers one after the other.
pub fn buffers(list: &[(&str, DType, u32, u32)]) -> Vec<Buffer> {
    let mut offset = 0;
    let mut all = vec![];
    for &(name, dtype, rows, stride) in list {
        all.push(Buffer { name: name.into(), dtype, rows, stride, offset });
        offset += (u64::from(rows) * u64::from(stride) * dtype.size()).next_multiple_of(64);
    }
    all
}

/// Memory of a step; all areas are 8-byte words so that they are aligned.
#[derive(Clone, Default)]
pub struct Memory {
    pub rows: u32,
    pub logit_rows: u32,
    pub runs: u32,
    pub pages_per_slot: u32,
    pub weights: Vec<u64>,
    pub state: Vec<u64>,
    pub arena: Vec<u64>,
    pub output: Vec<f32>,
    pub token: Vec<i32>,
    pub slot: Vec<i32>,
    pub position: Vec<i32>,
    pub kv_index: Vec<i32>,
    pub logit_row: Vec<i32>,
    pub run_begin: Vec<i32>,
    pub page_table: Vec<i32>,
    pub profile: Vec<u64>,
}

impl Memory {
    pub fn put(area: &mut [u64], offset: u64, bytes: &[u8]) {
        for (i, b) in bytes.iter().enumerate() {
            let at = offset as usize + i;
            let mut word = area[at / 8].to_le_bytes();
            word[at % 8] = *b;
            area[at / 8] = u64::from_le_bytes(word);
        }
    }
    pub fn put_floats(area: &mut [u64], offset: u64, dtype: DType, values: &[f32]) {
        for (i, v) in values.iter().enumerate() {
            let bits = v.to_bits();
            match dtype {
                DType::F32 => Self::put(area, offset + 4 * i as u64, &bits.to_le_bytes()),
                // Test values are exact in bf16.
                DType::Bf16 => Self::put(area, offset + 2 * i as u64, &((bits >> 16) as u16).to_le_bytes()),
                DType::F16 => Self::put(area, offset + 2 * i as u64, &half::f16::from_f32(*v).to_le_bytes()),
                _ => unimplemented!(),
            }
        }
    }
    pub fn bytes<const N: usize>(area: &[u64], offset: u64) -> [u8; N] {
        std::array::from_fn(|i| area[(offset as usize + i) / 8].to_le_bytes()[(offset as usize + i) % 8])
    }
    pub fn get_floats(area: &[u64], offset: u64, dtype: DType, n: usize) -> Vec<f32> {
        (0..n as u64)
            .map(|i| match dtype {
                DType::F32 => f32::from_le_bytes(Self::bytes(area, offset + 4 * i)),
                DType::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes(Self::bytes(area, offset + 2 * i))) << 16),
                DType::F16 => half::f16::from_le_bytes(Self::bytes(area, offset + 2 * i)).to_f32(),
                _ => unimplemented!(),
            })
            .collect()
    }
}

/// A program compiled for a target, in this process.
pub struct Compiled {
    loaded: Loaded,
    step: String,
    kernels: Vec<String>,
}

/// Compiles all units of a program.
pub fn build(program: &Program, isa: &Isa) -> Compiled {
    build_with(program, isa, Options::default())
}

/// As [`build`], with options.
pub fn build_with(program: &Program, isa: &Isa, options: Options) -> Compiled {
    let units = compile_units(program, isa, options);
    let objects: Vec<_> = units.iter().map(|u| compile(u).expect(&u.symbol)).collect();
    Compiled {
        loaded: load(&objects.iter().collect::<Vec<_>>()),
        step: step_symbol(program),
        kernels: units.iter().map(|u| u.symbol.clone()).collect(),
    }
}

impl Compiled {
    fn context(memory: &mut Memory) -> StepCtx {
        StepCtx {
            rows: memory.rows,
            logit_rows: memory.logit_rows,
            runs: memory.runs,
            tiles: 0,
            pages_per_slot: memory.pages_per_slot,
            cpu: CpuKind::Other,
            weights: memory.weights.as_ptr().cast(),
            state: memory.state.as_mut_ptr().cast(),
            arena: memory.arena.as_mut_ptr().cast(),
            private: std::ptr::null_mut(),
            private_stride: 0,
            output: memory.output.as_mut_ptr(),
            token: memory.token.as_ptr(),
            slot: memory.slot.as_ptr(),
            position: memory.position.as_ptr(),
            kv_index: memory.kv_index.as_ptr(),
            segment: std::ptr::null(),
            logit_row: memory.logit_row.as_ptr(),
            run_begin: memory.run_begin.as_ptr(),
            tile: std::ptr::null(),
            page_table: memory.page_table.as_ptr(),
            barrier: std::ptr::null_mut(),
            claims: std::ptr::null_mut(),
            profile: if memory.profile.is_empty() { std::ptr::null_mut() } else { memory.profile.as_mut_ptr().cast() },
        }
    }
    /// The step function as thread 0 of 1; returns how often it met `rc_barrier`.
    pub fn step(&self, memory: &mut Memory) -> i32 {
        let ctx = Self::context(memory);
        let run = self.loaded.get::<extern "C" fn(*const StepCtx, u32, u32)>(&self.step);
        let count = self.loaded.get::<extern "C" fn() -> i32>("test_barriers");
        let before = count();
        run(&ctx, 0, 1);
        count() - before
    }
    /// Kernel number `unit`, by all threads one after the other.
    pub fn kernel(&self, unit: usize, memory: &mut Memory, threads: u32, layer: u32) {
        let ctx = Self::context(memory);
        let run = self.loaded.get::<extern "C" fn(*const StepCtx, u32, u32, u32)>(&self.kernels[unit]);
        for thread in 0..threads {
            run(&ctx, thread, threads, layer);
        }
    }
}

/// Exact in bf16, -2 .. 2.
pub fn noise(seed: usize) -> f32 {
    let h = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (h % 512) as f32 / 128.0 - 2.0 + if h % 512 == 256 { 0.25 } else { 0.0 }
}
