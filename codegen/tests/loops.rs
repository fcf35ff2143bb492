//! Loop nests as the planner makes them, compiled for every level that the host has, against plain Rust in f64.

mod support;

use rcompile_codegen::program::*;
use support::program::*;

fn close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*g) - w).abs();
        assert!(error <= tolerance * (1.0 + w.abs()), "{what}: element {i} is {g}, not {w}");
    }
}

/// Type of the short output beside inputs of a type.
fn short(dtype: DType) -> DType {
    if dtype == DType::F32 { DType::Bf16 } else { dtype }
}

/// RMS norm, layer norm and softmax of every row of `x`, `n` columns.
fn norms(n: u32, stride: u32, dtype: DType) -> LoopNest {
    let mut e = E::default();
    let (row, d) = (e.var(0), e.var(1));
    let at = e.at(row, stride.into(), d);
    let x = e.load(0, at);
    let w = e.load(1, d);
    let inv_n = e.float(1.0 / n as f32);
    let eps = e.float(1e-5);
    let root = |e: &mut E, sum: ExprId| {
        let mean = e.mul(sum, inv_n);
        let shifted = e.add(mean, eps);
        e.un(UnaryOp::Rsqrt, shifted)
    };
    let xx = e.mul(x, x);
    let s0 = e.scalar(0);
    let r0 = root(&mut e, s0);
    let xr = e.mul(x, r0);
    let rms = e.mul(xr, w);
    let s1 = e.scalar(1);
    let mean = e.mul(s1, inv_n);
    let c = e.sub(x, mean);
    let cc = e.mul(c, c);
    let s2 = e.scalar(2);
    let r2 = root(&mut e, s2);
    let layer = e.mul(c, r2);
    let s3 = e.scalar(3);
    let below = e.sub(x, s3);
    let exp = e.un(UnaryOp::Exp, below);
    let s4 = e.scalar(4);
    let soft = e.bin(BinaryOp::Div, exp, s4);
    let buffer = |i, dtype| operand(Place::Buffer(BufferId(i)), dtype);
    LoopNest {
        outer: vec![(VarId(0), Extent::Rows)],
        operands: vec![
            buffer(0, dtype),
            operand(Place::Weight(WeightId(0)), DType::F32),
            buffer(1, DType::F32),
            buffer(2, short(dtype)),
            buffer(3, DType::F32),
        ],
        exprs: e.0,
        stages: vec![
            reduce(1, n, ReduceOp::Sum, xx, 0),
            stores(1, n, vec![store(2, at, rms)]),
            reduce(1, n, ReduceOp::Sum, x, 1),
            reduce(1, n, ReduceOp::Sum, cc, 2),
            stores(1, n, vec![store(3, at, layer)]),
            reduce(1, n, ReduceOp::Max, x, 3),
            reduce(1, n, ReduceOp::Sum, exp, 4),
            stores(1, n, vec![store(4, at, soft)]),
        ],
    }
}

#[test]
fn norms_and_softmax_with_every_tail() {
    let stride = 320;
    let lengths: Vec<u32> = (1..=40).chain([47, 64, 96, 129, 300]).collect();
    let rows = 3;
    for isa in support::isas() {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let lengths: Vec<u32> = if dtype == DType::F32 { lengths.clone() } else { vec![1, 7, 16, 23, 40, 300] };
            let list = buffers(&[
                ("x", dtype, rows, stride),
                ("rms", DType::F32, rows, stride),
                ("layer", short(dtype), rows, stride),
                ("soft", DType::F32, rows, stride),
            ]);
            let weight = Weight { name: "w".into(), dtype: DType::F32, layout: Layout::Plain, offsets: vec![64] };
            let p = program(list.clone(), vec![weight], lengths.iter().map(|&n| norms(n, stride, dtype)).collect());
            let compiled = build(&p, &isa);
            for (unit, &n) in lengths.iter().enumerate() {
                let mut memory = Memory {
                    rows,
                    weights: vec![0; 8 + stride as usize / 2],
                    arena: vec![0x4040_4040_4040_4040; p.arena_bytes as usize / 8],
                    ..Default::default()
                };
                let x: Vec<f32> = (0..(rows * stride) as usize).map(noise).collect();
                let w: Vec<f32> = (0..stride as usize).map(|i| noise(i + 5000)).collect();
                Memory::put_floats(&mut memory.weights, 64, DType::F32, &w);
                Memory::put_floats(&mut memory.arena, 0, dtype, &x);
                let mut other = memory.clone();
                let untouched = memory.clone();
                compiled.kernel(unit, &mut memory, 1, 0);
                compiled.kernel(unit, &mut other, 5, 0);
                assert!(memory.arena == other.arena, "thread counts differ");
                for row in 0..rows as usize {
                    let (begin, n) = (row * stride as usize, n as usize);
                    let x: Vec<f64> = x[begin..begin + n].iter().map(|v| f64::from(*v)).collect();
                    let mean = x.iter().sum::<f64>() / n as f64;
                    let square = x.iter().map(|v| v * v).sum::<f64>() / n as f64;
                    let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
                    let most = x.iter().copied().fold(f64::MIN, f64::max);
                    let total = x.iter().map(|v| (v - most).exp()).sum::<f64>();
                    let rms: Vec<f64> = x.iter().zip(&w).map(|(v, w)| v / (square + 1e-5).sqrt() * f64::from(*w)).collect();
                    let layer: Vec<f64> = x.iter().map(|v| (v - mean) / (variance + 1e-5).sqrt()).collect();
                    let soft: Vec<f64> = x.iter().map(|v| (v - most).exp() / total).collect();
                    let what = format!("{} {dtype} n {n} row {row}", isa.name);
                    for (b, want, tolerance) in [(1, rms, 1e-6), (2, layer, 0.004), (3, soft, 1e-6)] {
                        let buffer = &list[b];
                        let size = buffer.dtype.size();
                        let at = buffer.offset + begin as u64 * size;
                        let got = Memory::get_floats(&memory.arena, at, buffer.dtype, n);
                        close(&got, &want, tolerance, &format!("{what} {}", buffer.name));
                        // The rest of the row is as it was.
                        let rest = stride as usize - n;
                        let after = |m: &Memory| Memory::get_floats(&m.arena, at + n as u64 * size, buffer.dtype, rest);
                        assert_eq!(after(&memory), after(&untouched), "{what} {}", buffer.name);
                    }
                }
            }
        }
    }
}

/// Each of the two has its own table where bf16 is stored, and is exact where f32 is.
#[test]
fn both_kinds_of_gelu() {
    let (rows, stride) = (2u32, 320u32);
    let normal = |x: f64| x * 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
    let by_tanh = |x: f64| x / (1.0 + (-1.595_769_121_605_730_7 * (x + 0.044_715 * x.powi(3))).exp());
    let list = buffers(&[
        ("x", DType::F32, rows, stride),
        ("normal", DType::Bf16, rows, stride),
        ("tanh", DType::Bf16, rows, stride),
        ("normal f32", DType::F32, rows, stride),
        ("tanh f32", DType::F32, rows, stride),
    ]);
    let lengths = [1u32, 7, 16, 23, 300];
    let nests = lengths.iter().map(|&n| {
        let mut e = E::default();
        let (row, d) = (e.var(0), e.var(1));
        let at = e.at(row, stride.into(), d);
        let x = e.load(0, at);
        let [normal, tanh] = [UnaryOp::Gelu, UnaryOp::GeluTanh].map(|op| e.un(op, x));
        let rounded = e.0.add(Expr::Round(DType::Bf16, tanh));
        let operands = (0..5u32).zip(&list).map(|(i, b)| operand(Place::Buffer(BufferId(i)), b.dtype)).collect();
        let stored =
            vec![store(1, at, e.0.add(Expr::Round(DType::Bf16, normal))), store(2, at, rounded), store(3, at, normal), store(4, at, tanh)];
        LoopNest { outer: vec![(VarId(0), Extent::Rows)], operands, exprs: e.0, stages: vec![stores(1, n, stored)] }
    });
    let p = program(list.clone(), vec![], nests.collect());
    let x: Vec<f32> = (0..rows * stride).map(|i| i as f32 / 53.0 - 6.0).collect();
    for isa in support::isas() {
        let compiled = build(&p, &isa);
        for (unit, &n) in lengths.iter().enumerate() {
            let mut memory = Memory { rows, arena: vec![0; p.arena_bytes as usize / 8], ..Default::default() };
            Memory::put_floats(&mut memory.arena, 0, DType::F32, &x);
            compiled.kernel(unit, &mut memory, 1, 0);
            for (b, f, relative, absolute) in [
                // Half a unit in the last place, where that is largest.
                (1, &normal as &dyn Fn(f64) -> f64, 1.001 / 256.0, 7e-6),
                (2, &by_tanh, 1.001 / 256.0, 7e-6),
                (3, &normal, 3e-7, 7e-8),
                (4, &by_tanh, 1e-6, 2e-7),
            ] {
                for row in 0..rows {
                    let begin = u64::from(row * stride);
                    let got = Memory::get_floats(&memory.arena, list[b].offset + begin * list[b].dtype.size(), list[b].dtype, n as usize);
                    for (x, got) in x[begin as usize..].iter().zip(&got) {
                        let want = f(f64::from(*x));
                        let error = (f64::from(*got) - want).abs();
                        assert!(
                            error <= relative * want.abs() + absolute,
                            "{} {} n {n}: {got:e} at {x}, not {want:e}",
                            isa.name,
                            list[b].name
                        );
                    }
                }
            }
        }
    }
}

/// Rotate-half RoPE of q and k heads and the append to a paged cache `[256 / 16][head_dim][16]`, as a group nest would do it.
#[test]
fn rope_and_append() {
    for (heads, hd) in [(2u32, 64u32), (3, 24)] {
        let half = i64::from(hd) / 2;
        let stride = 256;
        let page_elements = i64::from(heads) * 256 * i64::from(hd);
        let mut e = E::default();
        let (row, head, d) = (e.var(0), e.var(1), e.var(2));
        let position = e.load(2, row);
        let base = e.mul_int(head, hd.into());
        let (own, turned) = {
            let own = e.add(base, d);
            let h = e.int(half);
            let shifted = e.add(d, h);
            let other = e.rem_int(shifted, hd.into());
            (own, e.add(base, other))
        };
        let own_at = e.at(row, stride, own);
        let turned_at = e.at(row, stride, turned);
        let (x, y) = (e.load(0, own_at), e.load(0, turned_at));
        let minus = e.un(UnaryOp::Neg, y);
        let h = e.int(half);
        let first = e.cmp(CmpOp::Lt, d, h);
        let y = e.select(first, minus, y);
        let angle = e.rem_int(d, half);
        let angle = e.at(position, half, angle);
        let (cos, sin) = (e.load(3, angle), e.load(4, angle));
        let (a, b) = (e.mul(x, cos), e.mul(y, sin));
        let value = e.add(a, b);
        // page_table[slot * pages + kv / 256] * page + head * 256 * hd + (kv % 256 / 16 * hd + d) * 16 + kv % 16
        let slot = e.load(5, row);
        let kv = e.load(6, row);
        let pages = e.0.add(Expr::PagesPerSlot);
        let entry = e.mul(slot, pages);
        let page = e.div_int(kv, 256);
        let entry = e.add(entry, page);
        let page = e.load(7, entry);
        let in_page = e.rem_int(kv, 256);
        let block = e.div_int(in_page, 16);
        let block = e.at(block, hd.into(), d);
        let lane = e.rem_int(in_page, 16);
        let inner = e.at(block, 16, lane);
        let index = e.mul_int(page, page_elements);
        let of_head = e.mul_int(head, 256 * i64::from(hd));
        let index = e.add(index, of_head);
        let index = e.add(index, inner);
        let nest = LoopNest {
            outer: vec![(VarId(0), Extent::Rows), (VarId(1), Extent::Const(heads))],
            operands: vec![
                operand(Place::Buffer(BufferId(0)), DType::F32),
                operand(Place::State(vec![0, 64, 4096]), DType::Bf16),
                operand(Place::Table(Table::Position), DType::I32),
                operand(Place::Weight(WeightId(0)), DType::F32),
                operand(Place::Weight(WeightId(1)), DType::F32),
                operand(Place::Table(Table::Slot), DType::I32),
                operand(Place::Table(Table::KvIndex), DType::I32),
                operand(Place::Table(Table::PageTable), DType::I32),
                operand(Place::Buffer(BufferId(1)), DType::F32),
            ],
            exprs: e.0,
            stages: vec![stores(2, hd, vec![store(1, index, value), store(8, own_at, value)])],
        };
        let (rows, positions) = (5usize, 300usize);
        let table = |name: &str, offset| Weight { name: name.into(), dtype: DType::F32, layout: Layout::Plain, offsets: vec![offset] };
        let table_bytes = (positions * half as usize * 4) as u64;
        let list = buffers(&[("x", DType::F32, 8, stride as u32), ("y", DType::F32, 8, stride as u32)]);
        let p = program(list.clone(), vec![table("cos", 0), table("sin", table_bytes)], vec![nest]);
        let mut memory = Memory {
            rows: rows as u32,
            pages_per_slot: 2,
            weights: vec![0; table_bytes as usize / 4],
            state: vec![0; (4 * page_elements * 2 + 8192) as usize / 8],
            arena: vec![0; p.arena_bytes as usize / 8],
            slot: vec![0, 0, 1, 1, 0],
            position: vec![3, 4, 0, 255, 256],
            kv_index: vec![3, 4, 0, 255, 271],
            page_table: vec![2, 0, 3, 1],
            ..Default::default()
        };
        let x: Vec<f32> = (0..rows * stride as usize).map(noise).collect();
        let angle = |p: usize, i: usize| p as f64 / 100f64.powf(i as f64 / half as f64);
        let values = |f: fn(f64) -> f64| -> Vec<f32> {
            (0..positions * half as usize).map(|i| f(angle(i / half as usize, i % half as usize)) as f32).collect()
        };
        Memory::put_floats(&mut memory.weights, 0, DType::F32, &values(f64::cos));
        Memory::put_floats(&mut memory.weights, table_bytes, DType::F32, &values(f64::sin));
        Memory::put_floats(&mut memory.arena, 0, DType::F32, &x);
        for isa in support::isas() {
            let compiled = build(&p, &isa);
            for (layer, bytes) in [(0, 0u64), (1, 64), (2, 4096)] {
                let mut memory = memory.clone();
                compiled.kernel(0, &mut memory, 3, layer);
                for row in 0..rows {
                    for head in 0..heads as usize {
                        let at = row * stride as usize + head * hd as usize;
                        let x = |d: usize| f64::from(x[at + d]);
                        let half = half as usize;
                        let want: Vec<f64> = (0..hd as usize)
                            .map(|d| {
                                let a = angle(memory.position[row] as usize, d % half);
                                let y = if d < half { -x(d + half) } else { x(d - half) };
                                x(d) * a.cos() + y * a.sin()
                            })
                            .collect();
                        let what = format!("{} layer {layer} row {row} head {head}", isa.name);
                        let got = Memory::get_floats(&memory.arena, list[1].offset + at as u64 * 4, DType::F32, hd as usize);
                        close(&got, &want, 1e-6, &what);
                        let kv = memory.kv_index[row] as usize;
                        let page = memory.page_table[memory.slot[row] as usize * 2 + kv / 256] as usize;
                        let cached: Vec<f32> = (0..hd as usize)
                            .map(|d| {
                                let inner = (kv % 256 / 16 * hd as usize + d) * 16 + kv % 16;
                                let index = page * page_elements as usize + head * 256 * hd as usize + inner;
                                Memory::get_floats(&memory.state, bytes + 2 * index as u64, DType::Bf16, 1)[0]
                            })
                            .collect();
                        close(&cached, &want, 0.004, &format!("{what} cache"));
                    }
                }
            }
        }
    }
}

/// Rows of a table by token id: row-major, and from the bf16 panels of a tied head; scaled and with a position table added.
#[test]
fn embedding_from_plain_and_panels() {
    let (vocab, dim, stride) = (70usize, 37u32, 64i64);
    let panels = Panels { nr: 32, k_pack: 2, k: dim, groups: 1, group_cols: vocab as u32, ways: 1, coding: Coding::Elements };
    let gather = |panelled: bool| {
        let mut e = E::default();
        let (row, k) = (e.var(0), e.var(1));
        let token = e.load(0, row);
        let index = if panelled {
            // P[token / 32][k / 2][32][2]
            let panel = e.div_int(token, 32);
            let column = e.rem_int(token, 32);
            let pair = e.div_int(k, 2);
            let odd = e.rem_int(k, 2);
            let a = e.mul_int(panel, i64::from(panels.padded_k() * panels.nr));
            let b = e.mul_int(pair, 64);
            let c = e.at(column, 2, odd);
            let ab = e.add(a, b);
            e.add(ab, c)
        } else {
            e.at(token, dim.into(), k)
        };
        let value = e.load(1, index);
        let two = e.float(2.0);
        let value = e.mul(value, two);
        let position = e.load(2, row);
        let as_float = e.un(UnaryOp::IntToFloat, position);
        let k_float = e.un(UnaryOp::IntToFloat, k);
        let sum = e.add(as_float, k_float);
        let value = e.add(value, sum);
        let at = e.at(row, stride, k);
        LoopNest {
            outer: vec![(VarId(0), Extent::Rows)],
            operands: vec![
                operand(Place::Table(Table::Token), DType::I32),
                operand(Place::Weight(WeightId(panelled.into())), DType::Bf16),
                operand(Place::Table(Table::Position), DType::I32),
                operand(Place::Buffer(BufferId(panelled.into())), DType::F32),
            ],
            exprs: e.0,
            stages: vec![stores(1, dim, vec![store(3, at, value)])],
        }
    };
    let plain_bytes = (vocab as u64 * u64::from(dim) * 2).next_multiple_of(64);
    let weights = vec![
        Weight { name: "plain".into(), dtype: DType::Bf16, layout: Layout::Plain, offsets: vec![0] },
        Weight { name: "head".into(), dtype: DType::Bf16, layout: Layout::Panels(panels), offsets: vec![plain_bytes] },
    ];
    let list = buffers(&[("a", DType::F32, 8, 64), ("b", DType::F32, 8, 64)]);
    let p = program(list.clone(), weights, vec![gather(false), gather(true)]);
    let table: Vec<f32> = (0..vocab * dim as usize).map(noise).collect();
    let mut packed = vec![0f32; panels.bytes(DType::I8) as usize];
    for (i, v) in table.iter().enumerate() {
        let (token, k) = (i / dim as usize, i % dim as usize);
        packed[token / 32 * (panels.padded_k() * panels.nr) as usize + k / 2 * 64 + token % 32 * 2 + k % 2] = *v;
    }
    let mut memory = Memory {
        rows: 4,
        weights: vec![0; (plain_bytes + panels.bytes(DType::Bf16)) as usize / 8 + 1],
        arena: vec![0; p.arena_bytes as usize / 8],
        token: vec![0, 69, 31, 32],
        position: vec![0, 7, 100, 2047],
        profile: vec![0; 2],
        ..Default::default()
    };
    Memory::put_floats(&mut memory.weights, 0, DType::Bf16, &table);
    Memory::put_floats(&mut memory.weights, plain_bytes, DType::Bf16, &packed);
    for isa in support::isas() {
        let compiled = build(&p, &isa);
        let mut memory = memory.clone();
        assert_eq!(compiled.step(&mut memory), 2, "barriers");
        assert_eq!(memory.profile, [1, 1]);
        for row in 0..4 {
            let (token, position) = (memory.token[row] as usize, f64::from(memory.position[row]));
            let want: Vec<f64> =
                (0..dim as usize).map(|k| f64::from(table[token * dim as usize + k]) * 2.0 + position + k as f64).collect();
            for buffer in &list {
                let got = Memory::get_floats(&memory.arena, buffer.offset + row as u64 * 256, DType::F32, dim as usize);
                close(&got, &want, 0.0, &format!("{} {} row {row}", isa.name, buffer.name));
            }
        }
    }
}

/// Mean, maximum and a masked first element of each run, by folds over its rows, in a layer loop that scales by a per-layer integer.
#[test]
fn pooling_by_folds_in_a_layer_loop() {
    let (n, stride) = (45u32, 64i64);
    let mut e = E::default();
    let (run, d, row) = (e.var(0), e.var(1), e.var(2));
    let begin = e.load(0, run);
    let one = e.int(1);
    let next = e.add(run, one);
    let end = e.load(0, next);
    let at = e.at(row, stride, d);
    let x = e.load(1, at);
    let fold = |e: &mut E, op, body| e.0.add(Expr::Fold { op, var: VarId(2), begin, end, body });
    let sum = fold(&mut e, ReduceOp::Sum, x);
    let most = fold(&mut e, ReduceOp::Max, x);
    let count = e.sub(end, begin);
    let count = e.un(UnaryOp::IntToFloat, count);
    let mean = e.bin(BinaryOp::Div, sum, count);
    // 2 where d is odd and not below 20, else the maximum: an integer predicate that differs by lane.
    let odd = e.rem_int(d, 2);
    let is_odd = e.cmp(CmpOp::Eq, odd, one);
    let twenty = e.int(20);
    let late = e.cmp(CmpOp::Le, twenty, d);
    let both = e.bin(BinaryOp::And, is_odd, late);
    let two = e.float(2.0);
    let chosen = e.select(both, two, most);
    // Output rows: mean, then the other; accumulated over layers.
    let first = e.at(run, 2 * stride, d);
    let width = e.int(stride);
    let second = e.add(first, width);
    let old = e.load(2, first);
    let mean = e.add(mean, old);
    // Reversed: index n - 1 - d.
    let last = e.int(i64::from(n) - 1);
    let reversed = e.sub(last, d);
    let run_at = e.mul_int(run, stride);
    let reversed = e.add(run_at, reversed);
    let nest = LoopNest {
        outer: vec![(VarId(0), Extent::Runs)],
        operands: vec![
            operand(Place::Table(Table::RunBegin), DType::I32),
            operand(Place::Buffer(BufferId(0)), DType::F32),
            operand(Place::Output, DType::F32),
            operand(Place::Buffer(BufferId(1)), DType::F32),
        ],
        exprs: e.0,
        stages: vec![stores(1, n, vec![store(2, first, mean), store(2, second, chosen), store(3, reversed, chosen)])],
    };
    let list = buffers(&[("x", DType::F32, 8, 64), ("reversed", DType::F32, 8, 64)]);
    let mut p = program(list.clone(), vec![], vec![nest]);
    p.body = vec![Item::Layers { count: 3, body: vec![Item::Region(RegionId(0)), Item::Barrier] }];
    let mut memory = Memory {
        rows: 8,
        runs: 3,
        arena: vec![0; p.arena_bytes as usize / 8],
        output: vec![0.0; 3 * 2 * 64],
        run_begin: vec![0, 1, 4, 8],
        ..Default::default()
    };
    let x: Vec<f32> = (0..8 * 64).map(noise).collect();
    Memory::put_floats(&mut memory.arena, 0, DType::F32, &x);
    for isa in support::isas() {
        let compiled = build(&p, &isa);
        let mut memory = memory.clone();
        assert_eq!(compiled.step(&mut memory), 3);
        for run in 0..3usize {
            let rows = memory.run_begin[run] as usize..memory.run_begin[run + 1] as usize;
            let column = |d: usize| rows.clone().map(move |r| r * 64 + d);
            let mean: Vec<f64> = (0..45).map(|d| 3.0 * column(d).map(|i| f64::from(x[i])).sum::<f64>() / rows.len() as f64).collect();
            let chosen: Vec<f64> = (0..45)
                .map(|d| if d % 2 == 1 && d >= 20 { 2.0 } else { column(d).map(|i| f64::from(x[i])).fold(f64::MIN, f64::max) })
                .collect();
            let what = format!("{} run {run}", isa.name);
            close(&memory.output[run * 128..run * 128 + 45], &mean, 1e-6, &what);
            close(&memory.output[run * 128 + 64..run * 128 + 109], &chosen, 0.0, &what);
            let back = Memory::get_floats(&memory.arena, list[1].offset + run as u64 * 256, DType::F32, 45);
            let mut want = chosen.clone();
            want.reverse();
            close(&back, &want, 0.0, &what);
        }
    }
}
