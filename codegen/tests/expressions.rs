//! Random integer expressions of an inner variable, as indices, numbers and conditions, against plain evaluation: whatever form they take
//! in vectors (one base and offsets, the same in all lanes, each lane apart), every element is the same, to the bit.

mod support;

use rcompile_codegen::isa::Isa;
use rcompile_codegen::program::*;
use rcompile_codegen::verify::verify;
use rcompile_codegen::{Emit, Options, compile, compile_units};
use std::collections::BTreeMap;
use support::program::*;

/// Rows that there are, and that there may be.
const ROWS: u32 = 3;
const BUCKET: u32 = 8;
/// Elements of a row that is written.
const STRIDE: u32 = 128;
/// Elements that are read.
const LENGTH: i64 = (BUCKET * STRIDE) as i64;
/// Numbers are less: f32 holds them.
const MOST: i64 = 1 << 20;
/// Inner variables: ranges with tails, from 0 and from elsewhere.
const RANGES: [std::ops::Range<u32>; 8] = [0..7, 0..69, 0..128, 3..50, 16..96, 8..125, 30..127, 0..67];

/// A table that expressions may use: a number by row.
fn position(row: i64) -> i64 {
    37 * row + 5
}

/// An integer expression that is not negative, as what is divided must be, and at most `high`.
#[derive(Clone, Copy)]
struct Int {
    id: ExprId,
    high: i64,
}

/// Random expressions.
struct Maker {
    seed: u64,
    e: E,
    ints: Vec<Int>,
}

impl Maker {
    fn any(&mut self, most: usize) -> usize {
        self.seed += 1;
        (self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as usize % most
    }
    /// Any, the last one more often.
    fn some(&mut self) -> Int {
        let last = self.ints.len() - 1;
        let number = if self.any(4) == 0 { last } else { self.any(last + 1) };
        self.ints[number]
    }
    /// What lengths, strides and widths of vectors are made of.
    fn constant(&mut self) -> i64 {
        [1, 2, 3, 4, 5, 8, 12, 16, 32, 64, 66, 68, 96][self.any(13)]
    }
    fn condition(&mut self) -> ExprId {
        let op = [CmpOp::Lt, CmpOp::Le, CmpOp::Gt, CmpOp::Ge, CmpOp::Eq, CmpOp::Ne][self.any(6)];
        let a = self.some().id;
        let constant = self.constant();
        let b = if self.any(2) == 0 { self.e.int(constant) } else { self.some().id };
        self.e.cmp(op, a, b)
    }
    /// One more.
    fn int(&mut self) -> Int {
        let (a, c) = (self.some(), self.constant());
        let constant = self.e.int(c);
        let made = match self.any(10) {
            0 => Int { id: self.e.add(a.id, constant), high: a.high + c },
            1 => {
                let b = self.some();
                Int { id: self.e.add(a.id, b.id), high: a.high + b.high }
            }
            2 => Int { id: self.e.mul(a.id, constant), high: a.high * c },
            3 | 4 => Int { id: self.e.div_int(a.id, c), high: a.high / c },
            5 | 6 => Int { id: self.e.rem_int(a.id, c), high: a.high.min(c - 1) },
            7 => {
                let most = self.e.int(a.high);
                Int { id: self.e.sub(most, a.id), high: a.high }
            }
            8 => {
                let (b, op) = (self.some(), [BinaryOp::Min, BinaryOp::Max][self.any(2)]);
                Int { id: self.e.bin(op, a.id, b.id), high: a.high.max(b.high) }
            }
            _ => {
                let (condition, b) = (self.condition(), self.some());
                Int { id: self.e.select(condition, a.id, b.id), high: a.high.max(b.high) }
            }
        };
        if made.high < MOST { made } else { Int { id: self.e.rem_int(made.id, LENGTH), high: LENGTH - 1 } }
    }
}

/// `y[row, d] = x[i] + j` or, on a condition, `x[k]`.
fn nest(seed: u64, range: std::ops::Range<u32>) -> LoopNest {
    let mut e = E::default();
    let (row, d) = (e.var(0), e.var(1));
    let table = e.load(2, row);
    let int = |id, high| Int { id, high };
    let ints = vec![int(table, position(BUCKET.into())), int(row, BUCKET.into()), int(d, range.end.into())];
    let mut maker = Maker { seed: seed << 32, e, ints };
    // Strides of rows, of which parts are taken.
    let stride = 16 * maker.constant();
    let begin = maker.e.mul_int(row, stride);
    maker.ints.insert(0, int(begin, i64::from(BUCKET) * stride));
    for _ in 0..1 + seed % 5 {
        let made = maker.int();
        maker.ints.push(made);
    }
    let indices = [0; 2].map(|_| {
        let index = maker.some();
        maker.e.rem_int(index.id, LENGTH)
    });
    let [i, k] = indices.map(|index| maker.e.load(0, index));
    let (number, condition) = (maker.some().id, maker.condition());
    let mut e = maker.e;
    let number = e.un(UnaryOp::IntToFloat, number);
    let sum = e.add(i, number);
    let value = e.select(condition, k, sum);
    let at = e.at(row, STRIDE.into(), d);
    LoopNest {
        outer: vec![(VarId(0), Extent::Rows)],
        operands: vec![
            operand(Place::Buffer(BufferId(0)), DType::F32),
            operand(Place::Buffer(BufferId(1)), DType::F32),
            operand(Place::Table(Table::Position), DType::I32),
        ],
        exprs: e.0,
        stages: vec![Stage { var: VarId(1), range, kind: StageKind::Store(vec![store(1, at, value)]) }],
    }
}

#[derive(Clone, Copy, Debug)]
enum Val {
    Int(i64),
    Float(f32),
    Bool(bool),
}

impl Val {
    fn int(self) -> i64 {
        let Val::Int(v) = self else { panic!("{self:?}") };
        v
    }
    fn float(self) -> f32 {
        let Val::Float(v) = self else { panic!("{self:?}") };
        v
    }
}

/// An expression of the nest at `row` and `d`.
fn evaluate(e: &Exprs, id: ExprId, at @ (row, d): (i64, i64), x: &[f32]) -> Val {
    let value = |id| evaluate(e, id, at, x);
    match e.get(id) {
        Expr::Int(v) => Val::Int(v),
        Expr::Var(VarId(v)) => Val::Int([row, d][v as usize]),
        Expr::Load(OperandId(0), index) => Val::Float(x[value(index).int() as usize]),
        Expr::Load(_, index) => Val::Int(position(value(index).int())),
        Expr::Unary(UnaryOp::IntToFloat, a) => Val::Float(value(a).int() as f32),
        Expr::Binary(op, a, b) => match (value(a), value(b)) {
            (Val::Float(a), Val::Float(b)) => Val::Float(a + b),
            (a, b) => {
                let (a, b) = (a.int(), b.int());
                Val::Int(match op {
                    BinaryOp::Add => a + b,
                    BinaryOp::Sub => a - b,
                    BinaryOp::Mul => a * b,
                    BinaryOp::Div => a / b,
                    BinaryOp::Rem => a % b,
                    BinaryOp::Min => a.min(b),
                    BinaryOp::Max => a.max(b),
                    _ => panic!("{op:?}"),
                })
            }
        },
        Expr::Cmp(op, a, b) => {
            let (a, b) = (value(a).int(), value(b).int());
            Val::Bool(match op {
                CmpOp::Lt => a < b,
                CmpOp::Le => a <= b,
                CmpOp::Gt => a > b,
                CmpOp::Ge => a >= b,
                CmpOp::Eq => a == b,
                CmpOp::Ne => a != b,
            })
        }
        Expr::Select(condition, a, b) => {
            let Val::Bool(condition) = value(condition) else { panic!("condition") };
            if condition { value(a) } else { value(b) }
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn indices_numbers_and_conditions() {
    const NESTS: usize = 400;
    let ranges = RANGES.into_iter().cycle();
    let nests: Vec<LoopNest> = (0..NESTS as u64).zip(ranges).map(|(seed, range)| nest(seed, range)).collect();
    let list = buffers(&[("x", DType::F32, BUCKET, STRIDE), ("y", DType::F32, BUCKET, STRIDE)]);
    let p = program(list.clone(), vec![], nests.clone());
    verify(&p).unwrap();
    let x: Vec<f32> = (0..LENGTH as usize).map(noise).collect();
    const UNTOUCHED: u64 = 0x4040_4040_4040_4040;
    let mut memory = Memory {
        rows: ROWS,
        arena: vec![UNTOUCHED; p.arena_bytes as usize / 8],
        position: (0..i64::from(ROWS)).map(|row| position(row) as i32).collect(),
        ..Default::default()
    };
    Memory::put_floats(&mut memory.arena, 0, DType::F32, &x);
    // One for each width of vectors.
    let by_lanes: BTreeMap<u32, Isa> = support::isas().into_iter().map(|isa| (isa.lanes, isa)).collect();
    for isa in by_lanes.values() {
        let compiled = build(&p, isa);
        for (unit, nest) in nests.iter().enumerate() {
            let mut memory = memory.clone();
            compiled.kernel(unit, &mut memory, 2, 0);
            let got = Memory::get_floats(&memory.arena, list[1].offset, DType::F32, LENGTH as usize);
            let stage = &nest.stages[0];
            let value = nest.stores().next().expect("a store").value;
            for (i, got) in got.into_iter().enumerate() {
                let (row, d) = (i as u32 / STRIDE, i as u32 % STRIDE);
                let written = row < ROWS && stage.range.contains(&d);
                let untouched = f32::from_bits(UNTOUCHED as u32);
                let want = if written { evaluate(&nest.exprs, value, (row.into(), d.into()), &x).float() } else { untouched };
                assert_eq!(got.to_bits(), want.to_bits(), "{} nest {unit} [{row}, {d}]: {got}, not {want}", isa.name);
            }
        }
    }
}

/// Lanes that all read one element, whose index is the sum of one that falls and one that rises, read no other: those before it lie outside
/// of the buffer.
#[test]
fn one_element_from_opposite_indices() {
    const AT: i64 = 5;
    let mut e = E::default();
    let (row, d) = (e.var(0), e.var(1));
    let at = e.int(AT);
    let falls = e.sub(at, d);
    let index = e.add(falls, d);
    let x = e.load(0, index);
    let to = e.at(row, STRIDE.into(), d);
    let nest = LoopNest {
        outer: vec![(VarId(0), Extent::Rows)],
        operands: [0, 1].map(|b| operand(Place::Buffer(BufferId(b)), DType::F32)).into(),
        exprs: e.0,
        stages: vec![stores(1, 16, vec![store(1, to, x)])],
    };
    let list = buffers(&[("x", DType::F32, 1, STRIDE), ("y", DType::F32, BUCKET, STRIDE)]);
    let p = program(list.clone(), vec![], vec![nest]);
    for isa in support::isas() {
        let units = compile_units(&p, &isa, Options { opt_level: 3, emit: Emit { llvm_ir: true, asm: false } });
        let ir = compile(&units[0]).unwrap().llvm_ir.unwrap();
        // Addresses of elements before the first one.
        let before = ir.lines().filter(|l| l.contains("getelementptr") && l.contains("i64 -"));
        assert_eq!(before.count(), 0, "{}\n{ir}", isa.name);
        let mut memory = Memory { rows: 1, arena: vec![0; p.arena_bytes as usize / 8], ..Default::default() };
        Memory::put_floats(&mut memory.arena, AT as u64 * 4, DType::F32, &[3.0]);
        build(&p, &isa).kernel(0, &mut memory, 1, 0);
        assert_eq!(Memory::get_floats(&memory.arena, list[1].offset, DType::F32, 16), [3.0; 16], "{}", isa.name);
    }
}
