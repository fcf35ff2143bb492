//! Text form and verifier of programs, on one small program with every kind of kernel.

mod support;

use expect_test::expect;
use rcompile_codegen::isa::{Distances, Isa, Near, X86_64_TRIPLE};
use rcompile_codegen::program::*;
use rcompile_codegen::verify::verify;
use rcompile_codegen::{Error, Options, compile, compile_units};
use rcompile_runtime::abi::CpuKind;
use support::program::*;

/// norm (loops) -> barrier -> qkv (matmul with bias and a group nest) -> barrier -> attention -> barrier -> o (matmul with prologue).
fn sample() -> Program {
    let mut list =
        buffers(&[("x", DType::F32, 8, 64), ("h", DType::Bf16, 8, 64), ("qkv", DType::F32, 8, 192), ("att", DType::Bf16, 8, 64)]);
    list[1].name = "normed".into();
    let qkv_panels = Panels { nr: 32, k_pack: 2, k: 64, groups: 6, group_cols: 32, ways: 1, coding: Coding::Elements };
    let o_panels = Panels { nr: 32, k_pack: 2, k: 64, groups: 1, group_cols: 64, ways: 1, coding: Coding::Elements };
    let weight = |name: &str, dtype, layout, at: &[u64]| Weight { name: name.into(), dtype, layout, offsets: at.to_vec() };
    let weights = vec![
        weight("layers.*.norm.weight", DType::F32, Layout::Plain, &[0, 256]),
        weight("layers.*.qkv.weight", DType::Bf16, Layout::Panels(qkv_panels), &[1024, 32768]),
        weight("layers.*.o.weight", DType::Bf16, Layout::Panels(o_panels), &[65536, 131072]),
        weight("layers.*.qkv.bias", DType::F32, Layout::Plain, &[262144, 270336]),
    ];
    let norm = {
        let mut e = E::default();
        let (row, d) = (e.var(0), e.var(1));
        let at = e.at(row, 64, d);
        let x = e.load(0, at);
        let xx = e.mul(x, x);
        let s = e.scalar(0);
        let scale = e.float(1.0 / 64.0);
        let mean = e.mul(s, scale);
        let eps = e.float(1e-5);
        let mean = e.add(mean, eps);
        let r = e.un(UnaryOp::Rsqrt, mean);
        let xr = e.mul(x, r);
        let w = e.load(2, d);
        let y = e.mul(xr, w);
        LoopNest {
            outer: vec![(VarId(0), Extent::Rows)],
            operands: vec![
                operand(Place::Buffer(BufferId(0)), DType::F32),
                operand(Place::Buffer(BufferId(1)), DType::Bf16),
                operand(Place::Weight(WeightId(0)), DType::F32),
            ],
            exprs: e.0,
            stages: vec![reduce(1, 64, ReduceOp::Sum, xx, 0), stores(1, 64, vec![store(1, at, y)])],
        }
    };
    let tile = MatmulTile {
        mr: 12,
        block_mr: 12,
        k_block: 512,
        m_block: 0,
        n_block: 8,
        widen: false,
        fetch: Fetch {
            streams: 6,
            ahead: Distances { l2: 4096, l1: 512 },
            past_l2: false,
            busy: Some(BusyRows { rows: 7, l1: 1024 }),
            near: Some(Near { streams: 3, ahead: Distances { l2: 1024, l1: 256 } }),
        },
    };
    let append = {
        let mut e = E::default();
        let (row, head, d) = (e.var(0), e.var(1), e.var(2));
        let base = e.mul_int(row, 192);
        let from = e.mul_int(head, 32);
        let from = e.add(from, d);
        let offset = e.int(64);
        let from = e.add(from, offset);
        let from = e.add(base, from);
        let value = e.load(0, from);
        let place = e.load(1, row);
        let block = e.div_int(place, 16);
        let lane = e.rem_int(place, 16);
        let index = e.at(block, 32, d);
        let index = e.at(index, 16, lane);
        LoopNest {
            outer: vec![(VarId(0), Extent::Rows), (VarId(1), Extent::Const(2))],
            operands: vec![
                operand(Place::Buffer(BufferId(2)), DType::F32),
                operand(Place::Table(Table::KvIndex), DType::I32),
                operand(Place::State(vec![0, 65536]), DType::F32),
            ],
            exprs: e.0,
            stages: vec![stores(2, 32, vec![store(2, index, value)])],
        }
    };
    let matmul = |a: Operand, prologue, weight, panels: Panels, bias: Option<u32>, out: u32, group_nests| {
        let mut e = E::default();
        let (row, col) = (e.var(0), e.var(1));
        let at = e.at(row, panels.padded_cols().into(), col);
        let acc = e.0.add(Expr::Acc(0));
        let mut operands = vec![operand(Place::Buffer(BufferId(out)), DType::F32)];
        let value = match bias {
            Some(w) => {
                operands.push(operand(Place::Weight(WeightId(w)), DType::F32));
                let bias = e.load(1, col);
                e.add(acc, bias)
            }
            None => {
                let old = e.load(0, at);
                e.add(old, acc)
            }
        };
        Kernel::Matmul(Box::new(Matmul {
            rows: Extent::Rows,
            a,
            a_stride: 64,
            prologue,
            quantise: None,
            weight: WeightId(weight),
            panels,
            compute: Compute::Bf16Dot,
            tile,
            fetch_by_cpu: vec![],
            row: VarId(0),
            col: VarId(1),
            operands,
            exprs: e.0,
            stores: vec![store(0, at, value)],
            group_nests,
        }))
    };
    let attention = {
        let mut e = E::default();
        let score = e.0.add(Expr::Score);
        let scale = e.float(0.125);
        let score = e.mul(score, scale);
        Attention {
            q: operand(Place::Buffer(BufferId(2)), DType::F32),
            q_stride: 192,
            q_head_stride: 32,
            out: operand(Place::Buffer(BufferId(3)), DType::Bf16),
            out_stride: 64,
            heads: 2,
            kv_heads: 2,
            kv: KvPage { dtype: DType::F32, head_dim: 32 },
            compute: Compute::F32,
            state_offsets: vec![0, 65536 * 2],
            page_bytes: 131072,
            tile_rows: 8,
            exprs: e.0,
            head_var: VarId(0),
            query_var: VarId(1),
            key_var: VarId(2),
            score,
            key_lower: None,
            key_upper: Some(1),
            mask: None,
        }
    };
    let b = |i, dtype| operand(Place::Buffer(BufferId(i)), dtype);
    let mut p = program(list, weights, vec![norm]);
    p.regions[0].name = "layers.norm".into();
    let group = GroupNest { groups: 2..4, nest: append };
    for (name, kernel) in [
        ("layers.qkv", matmul(b(1, DType::Bf16), None, 1, qkv_panels, Some(3), 2, vec![group])),
        ("layers.attention", Kernel::Attention(attention)),
        ("layers.o", matmul(b(3, DType::Bf16), None, 2, o_panels, None, 0, vec![])),
    ] {
        p.regions.push(Region { name: name.into(), kernel });
    }
    let body = (0..4).flat_map(|i| [Item::Region(RegionId(i)), Item::Barrier]).collect();
    p.body = vec![Item::Layers { count: 2, body }];
    p
}

#[test]
fn text_form() {
    expect![[r#"
        program @step.8 {rows 1 to 8, logit_rows 8, runs 8, tile_rows 8, arena 10240, private 0} {
          buffer b0 x: f32[8 x 64] at 0 (2048 bytes)
          buffer b1 normed: bf16[8 x 64] at 2048 (1024 bytes)
          buffer b2 qkv: f32[8 x 192] at 3072 (6144 bytes)
          buffer b3 att: bf16[8 x 64] at 9216 (1024 bytes)
          weight w0 layers.*.norm.weight: f32 plain at [0, 256]
          weight w1 layers.*.qkv.weight: bf16 panels {k 64, nr 32, k_pack 2, groups 6 x 32 columns} at [1024, 32768]
          weight w2 layers.*.o.weight: bf16 panels {k 64, nr 32, k_pack 2, groups 1 x 64 columns} at [65536, 131072]
          weight w3 layers.*.qkv.bias: f32 plain at [262144, 270336]
          region r0 layers.norm = loops for (v0 < rows) {
            o0 = b0: f32
            o1 = b1: bf16
            o2 = w0: f32
            e4 = v0 * 64 + v1
            e5 = o0[e4]
            reduce v1 in 0..64: s0 = sum(e5 * e5)
            store v1 in 0..64: o1[e4] = e5 * rsqrt(s0 * 0.015625 + 1e-5) * o2[v1]
          }
          region r1 layers.qkv = matmul bf16_dot (v0 < rows, v1) {
            a = b1: bf16 stride 64
            w = w1: panels {k 64, nr 32, k_pack 2, groups 6 x 32 columns}
            tile {mr 12 12, k_block 512, m_block 0, n_block 8, widen false}
            fetch {streams 6, ahead l2 4096 l1 512, from 7 rows on l1 1024, from 3 streams on l2 1024 l1 256}
            o0 = b2: f32
            o1 = w3: f32
            o0[v0 * 192 + v1] = acc0 + o1[v1]
            groups 2..4 for (v0 < rows, v1 < 2) {
              o0 = b2: f32
              o1 = table.kv_index: i32
              o2 = state + [0, 65536]: f32
              e12 = o1[v0]
              store v2 in 0..32: o2[(e12 / 16 * 32 + v2) * 16 + e12 % 16] = o0[v0 * 192 + (v1 * 32 + v2 + 64)]
            }
          }
          region r2 layers.attention = attention f32 {heads 2, kv_heads 2, head_dim 32, tile_rows 8} {
            q = b2: f32 stride 192 head_stride 32
            out = b3: bf16 stride 64
            cache f32 {page 131072, head 65536} at [0, 131072]
            head v0, query v1, key v2
            score = score * 0.125
            key_upper = v1 + 1
          }
          region r3 layers.o = matmul bf16_dot (v0 < rows, v1) {
            a = b3: bf16 stride 64
            w = w2: panels {k 64, nr 32, k_pack 2, groups 1 x 64 columns}
            tile {mr 12 12, k_block 512, m_block 0, n_block 8, widen false}
            fetch {streams 6, ahead l2 4096 l1 512, from 7 rows on l1 1024, from 3 streams on l2 1024 l1 256}
            o0 = b0: f32
            e4 = v0 * 64 + v1
            o0[e4] = o0[e4] + acc0
          }
          body {
            layers 2 {
              r0 layers.norm
              barrier
              r1 layers.qkv
              barrier
              r2 layers.attention
              barrier
              r3 layers.o
              barrier
            }
          }
        }
    "#]]
    .assert_eq(&sample().to_string());
}

#[test]
fn sample_is_valid() {
    verify(&sample()).unwrap();
}

/// All kinds of kernels through the unit interface, for every table row (bf16 dot where the CPU has it).
#[test]
fn sample_compiles() {
    for cpu in Isa::known_cpus(X86_64_TRIPLE) {
        let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).unwrap();
        let mut p = sample();
        for region in &mut p.regions {
            if let Kernel::Matmul(m) = &mut region.kernel {
                (m.tile.mr, m.tile.block_mr) = (isa.tile_rows, isa.tile_rows);
                if !isa.bf16_dot {
                    m.compute = Compute::F32;
                }
            }
        }
        verify(&p).unwrap();
        let options = Options { opt_level: 1, ..Default::default() };
        for unit in compile_units(&p, &isa, options) {
            compile(&unit).unwrap();
        }
    }
}

/// Each change breaks one rule; the message names it.
#[test]
fn every_rule_reports() {
    type Change = fn(&mut Program);
    fn nest(p: &mut Program) -> &mut LoopNest {
        let Kernel::Loops(nest) = &mut p.regions[0].kernel else { panic!() };
        nest
    }
    fn qkv(p: &mut Program) -> &mut Matmul {
        let Kernel::Matmul(m) = &mut p.regions[1].kernel else { panic!() };
        m
    }
    fn att(p: &mut Program) -> &mut Attention {
        let Kernel::Attention(a) = &mut p.regions[2].kernel else { panic!() };
        a
    }
    fn layers(p: &mut Program) -> &mut Vec<Item> {
        let Item::Layers { body, .. } = &mut p.body[0] else { panic!() };
        body
    }
    fn table() -> Operand {
        Operand { place: Place::Table(Table::Slot), dtype: DType::I32 }
    }
    fn records() -> Quantise {
        let [x, out] = [(0, DType::F32), (1, DType::Bf16)].map(|(b, dtype)| operand(Place::Buffer(BufferId(b)), dtype));
        let (rows, compute) = (Extent::Rows, Compute::Int8Dot);
        Quantise { rows, x, x_stride: 64, out, out_stride: 72, k: 64, group: 64, compute, bias_factor: 0 }
    }
    fn replace_value(nest: &mut LoopNest, make: impl FnOnce(&mut Exprs, ExprId) -> ExprId) {
        let StageKind::Store(s) = &mut nest.stages[1].kind else { panic!() };
        s[0].value = make(&mut nest.exprs, s[0].value);
    }
    /// `make(expressions, index, zero)`.
    fn replace_index(nest: &mut LoopNest, make: impl FnOnce(&mut Exprs, ExprId, ExprId) -> ExprId) {
        let StageKind::Store(s) = &mut nest.stages[1].kind else { panic!() };
        let zero = nest.exprs.int(0);
        s[0].index = make(&mut nest.exprs, s[0].index, zero);
    }
    let cases: Vec<(&str, Change)> = vec![
        ("not a multiple of 64", |p| p.buffers[1].offset += 4),
        ("the arena at", |p| p.arena_bytes = 64),
        ("not a multiple of 32", |p| p.buffers[0].stride = 63),
        ("has no offsets", |p| p.weights[0].offsets.clear()),
        ("not a multiple of 128", |p| p.private_bytes = 100),
        ("an offset is not a multiple of 64", |p| p.weights[0].offsets[0] = 32),
        ("bad panels", |p| p.weights[1].layout = Layout::Panels(Panels { ways: 3, ..qkv(p).panels })),
        ("bad panels", |p| p.weights[1].layout = Layout::Panels(Panels { groups: 0, ..qkv(p).panels })),
        ("9 to 8 rows", |p| p.least_rows = 9),
        ("0 to 8 rows", |p| p.least_rows = 0),
        ("o0: weight w9 does not exist", |p| nest(p).operands[0].place = Place::Weight(WeightId(9))),
        ("qkv: weight w9 does not exist", |p| qkv(p).weight = WeightId(9)),
        ("o0 is read as f32, its place holds i32", |p| nest(p).operands[0].place = Place::Table(Table::Slot)),
        ("o1 is read as bf16, its place holds f32", |p| nest(p).operands[1].place = Place::Output),
        ("starts at 32, which is not a multiple of 64", |p| {
            p.private_bytes = 1 << 20;
            nest(p).operands[0].place = Place::Private(32);
        }),
        ("buffer b9 does not exist", |p| nest(p).operands[0].place = Place::Buffer(BufferId(9))),
        ("o0 is read as bf16, its place holds f32", |p| nest(p).operands[0].dtype = DType::Bf16),
        ("starts at 0 of 0 private bytes", |p| nest(p).operands[0].place = Place::Private(0)),
        ("(w0) has 3 entries for 4 layers", |p| {
            p.weights[0].offsets.push(512);
            let Item::Layers { count, .. } = &mut p.body[0] else { panic!() };
            *count = 4;
        }),
        ("a prologue stores what is not private", |p| qkv(p).prologue = Some(nest(p).clone())),
        ("records of a matmul's own are not private", |p| qkv(p).quantise = Some(records())),
        ("records lie in the rows that they are made of", |p| {
            p.private_bytes = 1 << 20;
            let [x, out] = [(0, DType::F32), (128, DType::U8)].map(|(at, dtype)| Operand { place: Place::Private(at), dtype });
            qkv(p).quantise = Some(Quantise { x, out, ..records() });
        }),
        ("the records are not those that the matmul reads", |p| qkv(p).quantise = Some(records())),
        ("groups of 48", |p| qkv(p).quantise = Some(Quantise { group: 48, ..records() })),
        ("codes of i32", |p| qkv(p).quantise = Some(Quantise { x: table(), ..records() })),
        ("records of type i32", |p| qkv(p).quantise = Some(Quantise { out: table(), ..records() })),
        ("records for F32", |p| qkv(p).quantise = Some(Quantise { compute: Compute::F32, ..records() })),
        ("values of groups of 64", |p| qkv(p).quantise = Some(Quantise { compute: Compute::CodesInBf16Tiles, ..records() })),
        ("rows of x have 63 of 64 elements", |p| qkv(p).quantise = Some(Quantise { x_stride: 63, ..records() })),
        ("rows of out have 64 bytes for 72", |p| qkv(p).quantise = Some(Quantise { out_stride: 64, ..records() })),
        ("rows of out have 76 bytes, no multiple of 8", |p| qkv(p).quantise = Some(Quantise { out_stride: 76, ..records() })),
        ("rows of out have 136 bytes, no multiple of 64", |p| {
            qkv(p).quantise = Some(Quantise { out_stride: 136, compute: Compute::Int8Tiles, ..records() });
        }),
        ("a has rows of 96, b1 normed of 64", |p| qkv(p).a_stride = 96),
        ("x has rows of 96, b0 x of 64", |p| qkv(p).quantise = Some(Quantise { x_stride: 96, ..records() })),
        ("out has rows of 72, b1 normed of 64", |p| qkv(p).quantise = Some(records())),
        ("q has rows of 224, b2 qkv of 192", |p| att(p).q_stride = 224),
        ("out has rows of 96, b3 att of 64", |p| att(p).out_stride = 96),
        ("range of v1 is empty", |p| nest(p).stages[0].range = 3..3),
        ("elements 0..=519 of 512", |p| nest(p).stages[1].range = 0..72),
        ("s0 is used before its reduction", |p| drop(nest(p).stages.remove(0))),
        ("s0 is set twice", |p| {
            let again = nest(p).stages[0].clone();
            nest(p).stages.push(again);
        }),
        ("v1 is not bound here", |p| nest(p).stages[0].var = VarId(7)),
        ("v0 is bound twice", |p| nest(p).stages[0].var = VarId(0)),
        ("v0 is bound twice", |p| {
            let again = nest(p).outer[0];
            nest(p).outer.push(again);
        }),
        ("v1 is bound twice", |p| {
            replace_value(nest(p), |e, value| {
                let (begin, end) = (e.int(0), e.int(4));
                e.add(Expr::Fold { op: ReduceOp::Sum, var: VarId(1), begin, end, body: value })
            });
        }),
        ("divides by 0", |p| replace_index(nest(p), |e, index, zero| e.add(Expr::Binary(BinaryOp::Rem, index, zero)))),
        ("divides -511, which is negative", |p| {
            replace_index(nest(p), |e, index, zero| {
                let (below, two) = (e.binary(BinaryOp::Sub, zero, index), e.int(2));
                e.binary(BinaryOp::Div, below, two)
            });
        }),
        ("score outside attention", |p| replace_value(nest(p), |e, _| e.add(Expr::Score))),
        ("store to o1 as i32", |p| {
            nest(p).operands.push(Operand { place: Place::State(vec![0]), dtype: DType::I32 });
            nest(p).operands.swap(1, 3);
            let StageKind::Store(s) = &mut nest(p).stages[1].kind else { panic!() };
            s.push(Store { operand: OperandId(1), ..s[0] });
        }),
        ("store to o9, which does not exist", |p| {
            let StageKind::Store(s) = &mut nest(p).stages[1].kind else { panic!() };
            s[0].operand = OperandId(9);
        }),
        ("read-only", |p| nest(p).operands[1] = nest(p).operands[2].clone()),
        ("is Float, not Int", |p| {
            let StageKind::Store(s) = &mut nest(p).stages[1].kind else { panic!() };
            s[0].index = s[0].value;
        }),
        ("Add of Int and Float", |p| {
            let e = &mut nest(p).exprs;
            let (a, b) = (e.int(1), e.float(1.0));
            e.add(Expr::Binary(BinaryOp::Add, a, b));
        }),
        ("panels differ from those of w1", |p| qkv(p).panels.k = 62),
        ("rows of a have 32 of 64 k", |p| qkv(p).a_stride = 32),
        ("rows are runs", |p| qkv(p).rows = Extent::Runs),
        ("empty tile", |p| qkv(p).tile.mr = 0),
        ("empty tile", |p| qkv(p).tile.n_block = 0),
        ("passes of 24 rows in tiles of 12", |p| qkv(p).tile.m_block = 24),
        ("k_block 33 is odd", |p| qkv(p).tile.k_block = 33),
        ("blocks of 13 rows in tiles of 12", |p| qkv(p).tile.block_mr = 13),
        ("blocks of 0 rows in tiles of 12", |p| qkv(p).tile.block_mr = 0),
        ("empty tile", |p| qkv(p).tile.fetch.streams = 0),
        ("empty tile", |p| qkv(p).tile.fetch.busy = Some(BusyRows { rows: 0, l1: 64 })),
        ("empty tile", |p| qkv(p).tile.fetch.near = Some(Near { streams: 0, ahead: Distances { l2: 0, l1: 64 } })),
        ("no streams on Zen5", |p| qkv(p).fetch_by_cpu = vec![(CpuKind::Zen5, Fetch { streams: 0, ..qkv(p).tile.fetch })]),
        ("streams on Zen5 twice", |p| {
            let other = qkv(p).tile.fetch;
            qkv(p).fetch_by_cpu = [4, 1].map(|streams| (CpuKind::Zen5, Fetch { streams, ..other })).into();
        }),
        ("bf16 arithmetic wants", |p| p.weights[1].dtype = DType::F32),
        ("integer arithmetic wants records", |p| qkv(p).compute = Compute::Int8Mmla),
        ("tiles of bf16 do not hold Elements", |p| qkv(p).compute = Compute::CodesInBf16Tiles),
        ("panels in packs of 4 k, not 8", |p| {
            let panels = Panels { k_pack: 4, coding: Coding::Int8 { group: 64 }, ..qkv(p).panels };
            (p.weights[1].dtype, p.weights[1].layout) = (DType::I8, Layout::Panels(panels));
            (qkv(p).panels, qkv(p).compute) = (panels, Compute::Int8Mmla);
        }),
        ("groups 2..9 of 6", |p| qkv(p).group_nests[0].groups = 2..9),
        ("outer variables, not 2", |p| _ = qkv(p).group_nests[0].nest.outer.pop()),
        ("acc0 does not exist here", |p| {
            let e = &mut nest(p).exprs;
            let acc = e.add(Expr::Acc(0));
            let StageKind::Store(s) = &mut nest(p).stages[1].kind else { panic!() };
            s[0].value = acc;
        }),
        ("3 heads, 2 KV heads", |p| att(p).heads = 3),
        ("Bf16Tiles over a cache of", |p| (att(p).compute, att(p).kv.dtype) = (Compute::Bf16Tiles, DType::F16)),
        ("q: elements 0..=1855 of 1536", |p| att(p).q_head_stride = 480),
        ("out: elements 0..=735 of 512", |p| att(p).out_stride = 96),
        ("tiles of 16 rows, those of the program have 8", |p| att(p).tile_rows = 16),
        ("a page of 131071 bytes for 2 heads of 65536", |p| att(p).page_bytes -= 1),
        ("pages of 131104 bytes from [0, 131072] on", |p| att(p).page_bytes += 32),
        ("pages of 131072 bytes from [32, 131072] on", |p| att(p).state_offsets[0] = 32),
        ("keys from Some(4294967296) to Some(1) of the query", |p| att(p).key_lower = Some(1 << 32)),
        ("r3 layers.o is never executed", |p| drop(layers(p).remove(6))),
        ("no barrier between r0 layers.norm and r1 layers.qkv: b1 normed is written", |p| drop(layers(p).remove(1))),
        ("no barrier between r3 layers.o and r0 layers.norm: b0 x is written", |p| drop(layers(p).pop())),
        ("no barrier between r1 layers.qkv and r2 layers.attention", |p| drop(layers(p).remove(3))),
        ("no barrier between r2 layers.attention and r4 layers.beside: both share out work", |p| {
            p.regions.push(Region { name: "layers.beside".into(), ..p.regions[2].clone() });
            layers(p).insert(5, Item::Region(RegionId(4)));
        }),
        ("no barrier between r1 layers.qkv and r3 layers.o: both share out work", |p| {
            layers(p).remove(3);
            layers(p).swap(3, 5);
        }),
        ("no barrier between r0 layers.norm and r4 layers.again: b1 normed is written", |p| {
            let mut again = p.regions[0].clone();
            again.name = "layers.again".into();
            let Kernel::Loops(nest) = &mut again.kernel else { panic!() };
            nest.operands[0] = Operand { place: Place::Buffer(BufferId(1)), dtype: p.buffers[1].dtype };
            p.regions.push(again);
            layers(p).insert(1, Item::Region(RegionId(4)));
        }),
        ("no barrier between r0 layers.norm and r4 layers.same: b1 normed is written, then b1 normed used", |p| {
            p.regions.push(Region { name: "layers.same".into(), ..p.regions[0].clone() });
            layers(p).insert(1, Item::Region(RegionId(4)));
        }),
        ("reads b0 x elsewhere than it writes b0 x", |p| {
            let Kernel::Matmul(m) = &mut p.regions[3].kernel else { panic!() };
            m.a.place = Place::Buffer(BufferId(0));
        }),
        ("norm reads b0 x elsewhere than it writes b1 normed", |p| p.buffers[1].offset = p.buffers[0].offset),
        ("empty layer loop", |p| layers(p).clear()),
        ("r9 does not exist", |p| layers(p).push(Item::Region(RegionId(9)))),
        ("nested", |p| layers(p).push(Item::Layers { count: 1, body: vec![] })),
    ];
    for (message, change) in cases {
        let mut p = sample();
        change(&mut p);
        let Err(Error::Program(errors)) = verify(&p) else { panic!("accepted: {message}") };
        assert!(errors.iter().any(|e| e.contains(message)), "{message}: {errors:#?}");
    }
}

/// `for row { s = sum of x[read(row, v1)]; x[write(row, v2)] = x[load(row, v2)] * s }`, where `x` has rows of 64 elements.
struct Overwriting {
    read: fn(&mut E, ExprId, ExprId) -> ExprId,
    load: fn(&mut E, ExprId, ExprId) -> ExprId,
    write: fn(&mut E, ExprId, ExprId) -> ExprId,
    cols: u32,
}

impl Overwriting {
    fn verify(&self) -> Result<(), Error> {
        let mut e = E::default();
        let (row, summed, stored) = (e.var(0), e.var(1), e.var(2));
        let [read, load, write] =
            [(self.read, summed), (self.load, stored), (self.write, stored)].map(|(index, col)| index(&mut e, row, col));
        let (term, old, sum) = (e.load(0, read), e.load(0, load), e.scalar(0));
        let value = e.mul(old, sum);
        let nest = LoopNest {
            outer: vec![(VarId(0), Extent::Const(4))],
            operands: vec![operand(Place::Buffer(BufferId(0)), DType::F32)],
            exprs: e.0,
            stages: vec![reduce(1, self.cols, ReduceOp::Sum, term, 0), stores(2, self.cols, vec![store(0, write, value)])],
        };
        verify(&program(buffers(&[("x", DType::F32, 8, 64)]), vec![], vec![nest]))
    }
}

/// `x[row][col + by]`, in rows of 64.
fn shifted<const BY: i64>(e: &mut E, row: ExprId, col: ExprId) -> ExprId {
    let at = e.at(row, 64, col);
    let by = e.int(BY);
    e.add(at, by)
}

#[test]
fn a_nest_reads_what_it_overwrites_in_the_same_row_and_order() {
    let same = |e: &mut E, row, col| e.at(row, 64, col);
    let backwards = |e: &mut E, row, col| {
        let (base, last) = (e.mul_int(row, 64), e.int(31));
        let at = e.sub(last, col);
        e.add(base, at)
    };
    let accepted = [
        ("a row that was summed, in its place", Overwriting { read: same, load: same, write: same, cols: 64 }),
        ("its end beside what is stored", Overwriting { read: shifted::<32>, load: same, write: same, cols: 32 }),
        ("columns behind those that are read", Overwriting { read: same, load: same, write: shifted::<32>, cols: 32 }),
        ("the same columns, backwards, that were summed", Overwriting { read: backwards, load: same, write: same, cols: 32 }),
    ];
    for (what, nest) in accepted {
        nest.verify().unwrap_or_else(|e| panic!("{what}: {e}"));
    }
    let refused = [
        ("the next column in the same stage", Overwriting { read: same, load: same, write: shifted::<1>, cols: 63 }),
        ("columns of which one is read", Overwriting { read: same, load: same, write: shifted::<31>, cols: 32 }),
        ("backwards in the same stage", Overwriting { read: same, load: same, write: backwards, cols: 32 }),
        ("the next row's beginning", Overwriting { read: shifted::<1>, load: same, write: same, cols: 64 }),
        ("the next row", Overwriting { read: shifted::<64>, load: same, write: same, cols: 32 }),
        ("half a row on", Overwriting { read: |e, row, col| e.at(row, 32, col), load: same, write: same, cols: 32 }),
        ("a row that does not depend on the iteration", Overwriting { read: |_, _, col| col, load: same, write: same, cols: 32 }),
        (
            "an index that is no sum of variables",
            Overwriting {
                read: |e, row, col| {
                    let half = e.div_int(col, 2);
                    e.at(row, 64, half)
                },
                load: same,
                write: same,
                cols: 32,
            },
        ),
    ];
    for (what, nest) in refused {
        let Err(Error::Program(errors)) = nest.verify() else { panic!("accepted: {what}") };
        assert!(errors.iter().all(|e| e.contains("nest.0 reads b0 x elsewhere than it writes b0 x")), "{what}: {errors:#?}");
    }
}

/// `for row { x[row][v1 + 32] = sum of x[row][v1 + v2] for v2 in 0..2 }`: what a fold reads depends on two variables.
#[test]
fn a_fold_reads_nothing_that_its_nest_overwrites() {
    let mut e = E::default();
    let (row, stored, folded) = (e.var(0), e.var(1), e.var(2));
    let read = e.at(row, 64, stored);
    let read = e.add(read, folded);
    let (begin, end, body) = (e.int(0), e.int(2), e.load(0, read));
    let value = e.0.add(Expr::Fold { op: ReduceOp::Sum, var: VarId(2), begin, end, body });
    let write = shifted::<32>(&mut e, row, stored);
    let nest = LoopNest {
        outer: vec![(VarId(0), Extent::Const(4))],
        operands: vec![operand(Place::Buffer(BufferId(0)), DType::F32)],
        exprs: e.0,
        stages: vec![stores(1, 32, vec![store(0, write, value)])],
    };
    let Err(Error::Program(errors)) = verify(&program(buffers(&[("x", DType::F32, 8, 64)]), vec![], vec![nest])) else {
        panic!("accepted")
    };
    assert!(errors.iter().all(|e| e.contains("reads b0 x elsewhere than it writes b0 x")), "{errors:#?}");
}
