//! Attention kernels against plain Rust, and the promise that a row's bits do not depend on its tile, thread or company.

mod asm_check;
mod kernel_harness;

use asm_check::hot_loops;
use kernel_harness::{Loaded, Rng, Step, arm_isas, from_bf16, from_f16, isas, to_bf16, to_f16};
use rcompile_codegen::isa::{Isa, X86_64_TRIPLE};
use rcompile_codegen::kernels::attention;
use rcompile_codegen::program::*;
use rcompile_runtime::abi::Tile;
use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mask {
    Causal,
    /// Causal, and at most this many keys back.
    Window(i64),
    /// Causal, without the key so far back.
    Except(i64),
    /// Bidirectional: all keys of the slot.
    Full,
}

#[derive(Clone, Debug)]
struct Case {
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    kv: DType,
    compute: Compute,
    q: DType,
    out: DType,
    mask: Mask,
    /// Of the scores.
    scale: f32,
    /// `10 tanh(s / 10)` after the scale.
    soft_cap: bool,
    tile_rows: u32,
}

/// Lengths of the slots.
const LENGTHS: [i64; 8] = [1, 15, 16, 17, 255, 256, 257, 600];
const PAGES_PER_SLOT: u32 = 3;
const LAYERS: u64 = 2;
const CAPACITY: u32 = 64;
/// Bytes between pages, to see that offsets are obeyed.
const GAP: u64 = 64;

impl Case {
    fn new() -> Case {
        Case {
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            kv: DType::F32,
            compute: Compute::F32,
            q: DType::F32,
            out: DType::F32,
            mask: Mask::Causal,
            scale: 0.25,
            soft_cap: false,
            tile_rows: 16,
        }
    }
    /// A bf16 cache, with dots where the CPU has them, and with tiles where it has these and they fit.
    fn in_bf16(self, isa: &Isa) -> impl Iterator<Item = Case> {
        let dots = if isa.bf16_dot && self.head_dim.is_multiple_of(2) { Compute::Bf16Dot } else { Compute::F32 };
        let tiles = (isa.bf16_tiles && self.head_dim.is_multiple_of(32)).then_some(Compute::Bf16Tiles);
        [dots].into_iter().chain(tiles).map(move |compute| Case { kv: DType::Bf16, compute, ..self.clone() })
    }
    fn q_head_stride(&self) -> u32 {
        self.head_dim.next_multiple_of(32)
    }
    fn q_stride(&self) -> u32 {
        self.heads * self.q_head_stride()
    }
    fn out_stride(&self) -> u32 {
        (self.heads * self.head_dim).next_multiple_of(32)
    }
    fn kv_page(&self) -> KvPage {
        KvPage { dtype: self.kv, head_dim: self.head_dim }
    }
    fn page_bytes(&self) -> u64 {
        u64::from(self.kv_heads) * self.kv_page().bytes() + GAP
    }
    fn layer_bytes(&self) -> u64 {
        self.page_bytes() * u64::from(PAGES_PER_SLOT) * LENGTHS.len() as u64
    }

    fn program(&self) -> (Program, Attention) {
        let q_bytes = u64::from(CAPACITY * self.q_stride()) * self.q.size();
        let out_bytes = u64::from(CAPACITY * self.out_stride()) * self.out.size();
        let buffer =
            |name: &str, dtype: DType, stride: u32, offset: u64| Buffer { name: name.into(), dtype, rows: CAPACITY, stride, offset };
        let buffers =
            vec![buffer("q", self.q, self.q_stride(), 0), buffer("out", self.out, self.out_stride(), q_bytes.next_multiple_of(64))];
        let mut e = Exprs::default();
        let (head_var, query_var, key_var) = (VarId(0), VarId(1), VarId(2));
        let [query, key] = [query_var, key_var].map(|v| e.add(Expr::Var(v)));
        let raw = e.add(Expr::Score);
        let scale = e.float(self.scale);
        let mut score = e.binary(BinaryOp::Mul, raw, scale);
        if self.soft_cap {
            let (cap, inverse) = (e.float(10.0), e.float(0.1));
            let x = e.binary(BinaryOp::Mul, score, inverse);
            let t = e.add(Expr::Unary(UnaryOp::Tanh, x));
            score = e.binary(BinaryOp::Mul, t, cap);
        }
        let (key_lower, key_upper) = match self.mask {
            Mask::Causal | Mask::Except(_) => (None, Some(1)),
            Mask::Window(window) => (Some(1 - window), Some(1)),
            Mask::Full => (None, None),
        };
        let mask = match self.mask {
            Mask::Except(back) => {
                let back = e.int(back);
                let at = e.binary(BinaryOp::Sub, query, back);
                Some(e.add(Expr::Cmp(CmpOp::Ne, key, at)))
            }
            _ => None,
        };
        let kernel = Attention {
            q: Operand { place: Place::Buffer(BufferId(0)), dtype: self.q },
            q_stride: self.q_stride(),
            q_head_stride: self.q_head_stride(),
            out: Operand { place: Place::Buffer(BufferId(1)), dtype: self.out },
            out_stride: self.out_stride(),
            heads: self.heads,
            kv_heads: self.kv_heads,
            kv: self.kv_page(),
            compute: self.compute,
            state_offsets: (0..LAYERS).map(|l| l * self.layer_bytes()).collect(),
            page_bytes: self.page_bytes(),
            tile_rows: self.tile_rows,
            exprs: e,
            head_var,
            query_var,
            key_var,
            score,
            key_lower,
            key_upper,
            mask,
        };
        let program = Program {
            entry: "step".into(),
            bucket: CAPACITY,
            least_rows: 1,
            max_logit_rows: 1,
            max_runs: 1,
            tile_rows: self.tile_rows,
            arena_bytes: buffers[1].offset + out_bytes,
            buffers,
            weights: vec![],
            regions: vec![Region { name: "attention".into(), kernel: Kernel::Attention(kernel.clone()) }],
            body: vec![Item::Layers { count: LAYERS as u32, body: vec![Item::Region(RegionId(0))] }],
            private_bytes: 256 + attention::private_bytes(&kernel),
        };
        (program, kernel)
    }

    fn build(&self, isa: &Isa) -> Model {
        let (program, kernel) = self.program();
        let loaded = Loaded::build(isa, |mb, name| attention::define_whole(mb, &program, name, &kernel).map(|_| ()));
        let state = (LAYERS * self.layer_bytes()) as usize;
        let mut step = Step::new(0, state, program.arena_bytes as usize, program.private_bytes);
        step.pages_per_slot = PAGES_PER_SLOT;
        let pages = LENGTHS.len() as i32 * PAGES_PER_SLOT as i32;
        step.page_table = (0..pages).map(|p| pages - 1 - p).collect();
        // Memory that nothing was written to may hold anything, but only where no key is.
        step.state.bytes_mut().fill(0xff);
        let mut model = Model { case: self.clone(), program, loaded, step, k: vec![], v: vec![], isa: isa.name.clone() };
        model.fill();
        model
    }

    /// All checks on one target.
    fn check(&self, isa: &Isa) {
        let mut model = self.build(isa);
        // The last row of every slot, alone: decode.
        let last: Vec<_> = LENGTHS.iter().enumerate().map(|(slot, &l)| (slot, l - 1)).collect();
        let decode = model.run(&last, 1, 1);
        model.compare(&last, &decode);
        // Prompts: the first rows of one slot and the last of another, in tiles of several shapes, on several threads.
        let rows: Vec<_> = (0..20).map(|i| (7, 580 + i)).chain((0..17).map(|i| (3, i))).collect();
        let alone = model.run(&rows, 1, 1);
        model.compare(&rows, &alone);
        for (tile, threads) in [(self.tile_rows, 1), (self.tile_rows, 2), (5, 3), (2, 2)] {
            let together = model.run(&rows, tile.min(self.tile_rows), threads);
            assert!(alone == together, "{self:?} on {}: bits differ in tiles of {tile}, {threads} threads", isa.name);
        }
    }
}

/// A kernel with a filled cache.
struct Model {
    case: Case,
    program: Program,
    loaded: Loaded,
    step: Step,
    /// `[slot][kv_head][position][d]` as seen after rounding.
    k: Vec<f32>,
    v: Vec<f32>,
    isa: String,
}

fn index(case: &Case, slot: usize, head: u32, position: i64, d: u32) -> usize {
    let at = (slot * case.kv_heads as usize + head as usize) * 768 + position as usize;
    at * case.head_dim as usize + d as usize
}

fn put(area: &mut kernel_harness::Area, dtype: DType, at: usize, x: f32) -> f32 {
    match dtype {
        DType::F32 => {
            area.put(at, &x.to_le_bytes());
            x
        }
        DType::F16 => {
            area.put(at, &to_f16(x).to_le_bytes());
            from_f16(to_f16(x))
        }
        DType::I8 => {
            area.put(at, &[x as i8 as u8]);
            x
        }
        _ => {
            area.put(at, &to_bf16(x).to_le_bytes());
            from_bf16(to_bf16(x))
        }
    }
}

impl Model {
    fn fill(&mut self) {
        let c = &self.case;
        let mut rng = Rng::new(11);
        let len = index(c, LENGTHS.len(), 0, 0, 0);
        (self.k, self.v) = (vec![0.0; len], vec![0.0; len]);
        let size = c.kv.size();
        for (slot, &length) in LENGTHS.iter().enumerate() {
            for head in 0..c.kv_heads {
                for position in 0..length {
                    let page = self.step.page_table[slot * PAGES_PER_SLOT as usize + position as usize / 256] as u64;
                    let base = c.layer_bytes() + page * c.page_bytes() + u64::from(head) * c.kv_page().bytes();
                    let inside = position as u64 % 256;
                    // Codes with scales, or numbers.
                    let mut scales = [1.0; 2];
                    if let Some(at) = c.kv_page().scales() {
                        for (part, scale) in scales.iter_mut().enumerate() {
                            let at = base + at + (part as u64 * 256 + inside) * 4;
                            *scale = put(&mut self.step.state, DType::F32, at as usize, 0.01 * (1.5 + rng.signed()));
                        }
                    }
                    let codes = c.kv == DType::I8;
                    let mut number = |most: f32| if codes { (127.0 * rng.signed()).round() } else { most * rng.signed() };
                    for d in 0..c.head_dim {
                        let hd = u64::from(c.head_dim);
                        let k_at = base + (inside / 16 * hd * 16 + u64::from(d) * 16 + inside % 16) * size;
                        let v_at = base + c.kv_page().v_offset() + (inside * hd + u64::from(d)) * size;
                        let i = index(c, slot, head, position, d);
                        self.k[i] = scales[0] * put(&mut self.step.state, c.kv, k_at as usize, number(2.0));
                        self.v[i] = scales[1] * put(&mut self.step.state, c.kv, v_at as usize, number(1.0));
                    }
                }
            }
        }
    }

    fn query(&self, slot: usize, position: i64, head: u32, d: u32) -> f32 {
        let seed = ((slot as u64 * 1000 + position as u64) * 64 + u64::from(head)) * 512 + u64::from(d) + 1;
        let mut rng = Rng::new(seed);
        rng.bits();
        let x = rng.signed();
        if self.case.q == DType::F32 { x } else { from_bf16(to_bf16(x)) }
    }

    /// Runs rows (slot, position), neighbours of the same slot together in tiles of at most `tile_rows`; bits of the outputs.
    fn run(&mut self, rows: &[(usize, i64)], tile_rows: u32, threads: u32) -> Vec<Vec<u32>> {
        self.prepare(rows, tile_rows);
        self.step.run(&self.loaded, threads, 1);
        self.outputs(rows.len())
    }

    /// Inputs and tables of these rows; outputs that nobody wrote are NaN.
    fn prepare(&mut self, rows: &[(usize, i64)], tile_rows: u32) {
        let c = self.case.clone();
        self.step.rows = rows.len() as u32;
        self.step.kv_index = rows.iter().map(|r| r.1 as i32).collect();
        self.step.slot = rows.iter().map(|r| r.0 as i32).collect();
        self.step.tiles.clear();
        for (row, &(slot, position)) in rows.iter().enumerate() {
            let key_end = if c.mask == Mask::Full { LENGTHS[slot] } else { position + 1 } as i32;
            match self.step.tiles.last_mut() {
                Some(t) if t.slot == slot as i32 && t.row_count < tile_rows as i32 => {
                    t.row_count += 1;
                    t.key_end = key_end;
                }
                _ => self.step.tiles.push(Tile { row_begin: row as i32, row_count: 1, slot: slot as i32, key_end }),
            }
            for head in 0..c.heads {
                for d in 0..c.q_head_stride() {
                    let x = if d < c.head_dim { self.query(slot, position, head, d) } else { f32::NAN };
                    let at = (row as u32 * c.q_stride() + head * c.q_head_stride() + d) as usize * c.q.size() as usize;
                    if x.is_nan() {
                        self.step.arena.put(at, &vec![0xff; c.q.size() as usize]);
                    } else {
                        put(&mut self.step.arena, c.q, at, x);
                    }
                }
            }
        }
        let out = self.program.buffers[1].offset as usize;
        self.step.arena.bytes_mut()[out..].fill(0xff);
    }

    /// Bits of the outputs of the first rows.
    fn outputs(&self, rows: usize) -> Vec<Vec<u32>> {
        let c = &self.case;
        let out = self.program.buffers[1].offset as usize;
        let columns = (c.heads * c.head_dim) as usize;
        (0..rows)
            .map(|row| {
                let at = |i: usize| out + (row * c.out_stride() as usize + i) * c.out.size() as usize;
                let value = |i: usize| match c.out {
                    DType::F32 => self.step.arena.f32(at(i)).to_bits(),
                    _ => from_bf16(self.step.arena.u16(at(i))).to_bits(),
                };
                (0..columns).map(value).collect()
            })
            .collect()
    }

    fn compare(&self, rows: &[(usize, i64)], bits: &[Vec<u32>]) {
        let c = &self.case;
        /// Of what is rounded to the eight bits of bf16, at most.
        const ROUNDING: f64 = 1.0 / 256.0;
        // Weights, too, are rounded then.
        let dots = c.compute != Compute::F32;
        for (row, &(slot, position)) in rows.iter().enumerate() {
            for head in 0..c.heads {
                let kv_head = head / (c.heads / c.kv_heads);
                let keys: Vec<i64> = match c.mask {
                    Mask::Causal => (0..position + 1).collect(),
                    Mask::Window(w) => ((position + 1 - w).max(0)..position + 1).collect(),
                    Mask::Except(back) => (0..position + 1).filter(|key| *key != position - back).collect(),
                    Mask::Full => (0..LENGTHS[slot]).collect(),
                };
                let score = |key: i64| {
                    let dot: f64 = (0..c.head_dim)
                        .map(|d| {
                            let q = self.query(slot, position, head, d);
                            let q = f64::from(if dots { from_bf16(to_bf16(q)) } else { q });
                            q * f64::from(self.k[index(c, slot, kv_head, key, d)])
                        })
                        .sum();
                    let s = dot * f64::from(c.scale);
                    if c.soft_cap { 10.0 * (s / 10.0).tanh() } else { s }
                };
                let scores: Vec<f64> = keys.iter().copied().map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..c.head_dim {
                    let terms = keys.iter().zip(&weights).map(|(&key, w)| w * f64::from(self.v[index(c, slot, kv_head, key, d)]) / sum);
                    let (want, size) = terms.fold((0.0, 0.0), |(want, size), term| (want + term, size + term.abs()));
                    let of_weights = if dots { ROUNDING * size } else { 0.0 };
                    let of_output = if c.out == DType::F32 { 0.0 } else { ROUNDING * want.abs() };
                    let tolerance = 3e-5 + of_weights + of_output;
                    let got = f32::from_bits(bits[row][(head * c.head_dim + d) as usize]);
                    assert!(
                        (f64::from(got) - want).abs() <= tolerance,
                        "{c:?} on {}: slot {slot} position {position} head {head} d {d}: {got}, expected {want}",
                        self.isa
                    );
                }
            }
        }
    }
}

/// A kernel asks for no part that it does not call: where one row has many pairs, tiles take them all.
#[test]
fn parts_are_those_that_are_called() {
    for (heads, tile_rows, wanted) in [
        (16, 4, &["pack", "softmax_bf16", "tiles"][..]),
        (4, 1, &["softmax_f32", "block4"]),
        (4, 4, &["softmax_f32", "block4", "block6", "pack", "softmax_bf16", "tiles"]),
    ] {
        let case = Case { heads, kv_heads: 1, head_dim: 64, kv: DType::Bf16, compute: Compute::Bf16Tiles, tile_rows, ..Case::new() };
        let names: Vec<String> = attention::parts(&case.program().1).iter().map(|part| part.name()).collect();
        assert_eq!(names, wanted, "{heads} heads, {tile_rows} rows");
    }
}

/// Tile registers are those that instructions name, also with the schedules of CPUs that have none.
#[test]
fn tile_registers_keep_their_numbers() {
    let edits = ["+avx512vnni", "+avx512bf16", "+amx-tile", "+amx-bf16"].map(String::from);
    for cpu in ["x86-64-v4", "znver4", "znver5", "graniterapids"] {
        let isa = Isa::lookup(X86_64_TRIPLE, cpu, &edits).unwrap();
        let case = Case { heads: 32, kv_heads: 1, head_dim: 64, kv: DType::Bf16, compute: Compute::Bf16Tiles, ..Case::new() };
        let (program, kernel) = case.program();
        let asm = Loaded::assembly(&isa, |mb, name| attention::define_whole(mb, &program, name, &kernel).map(|_| ()));
        // Columns, rows, sums.
        let dots = asm.lines().filter_map(|line| line.trim().strip_prefix("tdpbf16ps"));
        let dots: BTreeSet<&str> = dots.map(str::trim).collect();
        let wanted = ["%tmm6, %tmm4, %tmm0", "%tmm6, %tmm5, %tmm2", "%tmm7, %tmm4, %tmm1", "%tmm7, %tmm5, %tmm3"];
        assert_eq!(Vec::from_iter(dots), wanted, "{cpu}");
    }
}

#[test]
fn head_dims() {
    for isa in isas() {
        for head_dim in [8, 20, 64, 80, 128] {
            Case { head_dim, ..Case::new() }.check(&isa);
            Case { head_dim, ..Case::new() }.in_bf16(&isa).for_each(|case| case.check(&isa));
        }
    }
}

#[test]
fn groups() {
    for isa in isas() {
        for (heads, kv_heads) in [(3, 3), (3, 1), (8, 2), (7, 1)] {
            Case { heads, kv_heads, ..Case::new() }.check(&isa);
            Case { heads, kv_heads, ..Case::new() }.in_bf16(&isa).for_each(|case| case.check(&isa));
        }
    }
}

#[test]
fn masks_and_scores() {
    for isa in isas() {
        for mask in [Mask::Causal, Mask::Window(7), Mask::Window(300), Mask::Except(2), Mask::Except(100), Mask::Full] {
            let soft_cap = mask == Mask::Window(300);
            Case { mask, soft_cap, ..Case::new() }.check(&isa);
            Case { mask, soft_cap, ..Case::new() }.in_bf16(&isa).for_each(|case| case.check(&isa));
        }
    }
}

/// Rows whose scores are all far below zero see keys all the same.
#[test]
fn scores_of_any_size() {
    for isa in isas() {
        for scale in [1e31, -1e36] {
            Case { scale, ..Case::new() }.check(&isa);
            Case { scale, ..Case::new() }.in_bf16(&isa).for_each(|case| case.check(&isa));
        }
    }
}

#[test]
fn types() {
    for isa in isas() {
        for (kv, q, out) in [
            (DType::F16, DType::F32, DType::F32),
            (DType::Bf16, DType::F32, DType::F32),
            (DType::Bf16, DType::Bf16, DType::Bf16),
            (DType::I8, DType::F32, DType::F32),
        ] {
            for head_dim in [36, 64] {
                Case { kv, q, out, head_dim, ..Case::new() }.check(&isa);
                if kv == DType::Bf16 {
                    Case { q, out, head_dim, ..Case::new() }.in_bf16(&isa).for_each(|case| case.check(&isa));
                }
            }
        }
    }
}

/// A thread that is ready does what the other one has left of the end of its share, and nothing that it has begun or done.
#[test]
fn pieces_of_others() {
    for isa in isas() {
        let mut model = Case { mask: Mask::Full, ..Case::new() }.build(&isa);
        // Of two heads, which see as many keys: half of them for each thread.
        let rows: Vec<_> = (0..i64::from(CAPACITY)).map(|i| (5, i)).collect();
        let mut done = |thread: u32, left: &[i64]| -> [Vec<usize>; 2] {
            model.prepare(&rows, 1);
            model.step.claims.iter_mut().zip(left).for_each(|(line, left)| line[0] = *left);
            model.step.run_some(&model.loaded, thread..thread + 1, left.len() as u32, 1);
            assert_eq!(model.step.claims[thread as usize][0], 0, "its own pieces");
            let outputs = model.outputs(rows.len());
            let width = outputs[0].len() / 2;
            let is_written = |row: usize, head: usize| outputs[row][head * width..][..width].iter().all(|&x| !f32::from_bits(x).is_nan());
            [0, 1].map(|head| (0..rows.len()).filter(|&row| is_written(row, head)).collect())
        };
        let some = |ranges: [(usize, usize); 2]| ranges.map(|(begin, end)| (begin..end).collect::<Vec<_>>());
        // A quarter of each share is open, in pieces of two rows.
        assert_eq!(done(0, &[-1, -1]), some([(0, 64), (0, 0)]), "{}: the other has not begun", isa.name);
        assert_eq!(done(0, &[-1, 3]), some([(0, 64), (58, 64)]), "{}", isa.name);
        assert_eq!(done(1, &[8, -1]), some([(48, 64), (0, 64)]), "{}", isa.name);
    }
}

/// Arm's kernels under qemu: every cache, heads that end inside a vector, few pairs and a block that is widened for many.
#[test]
fn on_arm() {
    for isa in arm_isas() {
        for (kv, head_dim, tile_rows) in [(DType::F32, 20, 16), (DType::Bf16, 64, 64), (DType::F16, 36, 16), (DType::I8, 36, 64)] {
            Case { kv, head_dim, tile_rows, mask: Mask::Window(300), ..Case::new() }.check(&isa);
        }
    }
}

/// More scratch than fits the stack.
#[test]
fn private_scratch() {
    for isa in isas() {
        let case = Case { heads: 8, head_dim: 120, tile_rows: 64, ..Case::new() };
        assert!(attention::private_bytes(&case.program().1) > 0);
        case.check(&isa);
    }
}

/// Blocks of keys that are widened once for many pairs: the same bits as in the tiles of few rows, which read the cache itself.
#[test]
fn widened_blocks() {
    for isa in isas() {
        for (kv, head_dim) in [(DType::Bf16, 64), (DType::F16, 36), (DType::I8, 64), (DType::I8, 36)] {
            Case { kv, head_dim, tile_rows: 64, ..Case::new() }.check(&isa);
        }
        for head_dim in [36, 64, 96] {
            Case { head_dim, tile_rows: 64, ..Case::new() }.in_bf16(&isa).for_each(|case| case.check(&isa));
        }
    }
}

/// The two hot loops of every register tile: nothing goes to the stack, and every accumulator is updated once per key or column.
#[test]
fn hot_loop_asm() {
    let mut failures = vec![];
    for cpu in ["x86-64-v3", "x86-64-v4", "znver4", "sapphirerapids"] {
        let isa = Isa::lookup(X86_64_TRIPLE, cpu, &[]).unwrap();
        let dots = isa.bf16_dot.then_some((DType::Bf16, Compute::Bf16Dot));
        let tiles = isa.bf16_tiles.then_some((DType::Bf16, Compute::Bf16Tiles));
        for (kv, compute) in [(DType::F32, Compute::F32), (DType::Bf16, Compute::F32)].into_iter().chain(dots).chain(tiles) {
            for head_dim in [64, 80, 128].into_iter().filter(|head_dim| compute != Compute::Bf16Tiles || head_dim % 32 == 0) {
                let case = Case { heads: 2, kv_heads: 2, tile_rows: 32, kv, compute, head_dim, ..Case::new() };
                let (program, kernel) = case.program();
                let asm = Loaded::assembly(&isa, |mb, name| attention::define_whole(mb, &program, name, &kernel).map(|_| ()));
                for pairs in 1..=6 {
                    let hot = hot_loops(&asm, X86_64_TRIPLE, &format!("kernel.block{pairs}"));
                    let mut fail = |what: String, text: String| {
                        failures.push(format!("{cpu} {kv} {compute:?} {head_dim}, {pairs} pairs: {what}\n{text}"))
                    };
                    if hot.len() < 2 {
                        fail("no hot loops".into(), asm.clone());
                    }
                    // Few pairs, mostly a single row, ask for the next block's lines in both loops: as many as a step reads, here four of
                    // 64 keys, of 32 where a row sees no more of a tile, and four rows of 64 columns.
                    let asked = hot.iter().map(|l| l.count("prefetcht1")).collect::<Vec<_>>();
                    let counted = cpu == "sapphirerapids" && (kv, compute) == (DType::Bf16, Compute::F32) && head_dim == 64 && pairs <= 4;
                    if asked.iter().any(|&n| (n > 0) != (pairs <= 4)) || counted && !asked.starts_with(&[8, 4, 8]) {
                        fail(format!("asks for lines in its loops: {asked:?}"), String::new());
                    }
                    // Widened blocks are in a cache; four chunks and more have no fewer pairs.
                    if (kv, compute) == (DType::Bf16, Compute::F32) && pairs >= 4 {
                        let wide = hot_loops(&asm, X86_64_TRIPLE, &format!("kernel.wide{pairs}"));
                        if wide.len() < 2 || wide.iter().any(|l| l.count("prefetch") > 0) {
                            fail(format!("{} loops over widened blocks, or they ask for lines", wide.len()), String::new());
                        }
                    }
                    for l in &hot {
                        l.problems(pairs).into_iter().for_each(|p| fail(p, l.text()));
                    }
                    // Steps of several columns and keys: beside 24 multiply-adds no more than 12 factors, 4 vectors and 3 that count.
                    if cpu == "x86-64-v3" && kv == DType::F32 && pairs == 6 && head_dim != 80 {
                        let sizes: Vec<_> = hot.iter().map(|l| (l.text().lines().count(), l.count("vfmadd"))).collect();
                        if sizes.iter().filter(|(lines, products)| 24 * lines <= 43 * products).count() != 2 {
                            fail(format!("instructions, multiply-adds: {sizes:?}"), asm.clone());
                        }
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}
