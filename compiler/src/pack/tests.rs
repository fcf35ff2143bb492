use super::*;
use rcompile_codegen::program::{DType as P, Panels};
use rcompile_graph::{Group, Recipe};
use std::os::unix::fs::FileExt;

/// Tensors in memory.
struct Memory(Vec<(&'static str, DType, Vec<u64>, Vec<u8>)>);

impl Tensors for Memory {
    fn info(&self, tensor: &str) -> Option<(DType, Vec<u64>)> {
        self.0.iter().find(|t| t.0 == tensor).map(|t| (t.1, t.2.clone()))
    }
    fn read_into(&self, tensor: &str, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let t = self.0.iter().find(|t| t.0 == tensor).unwrap();
        into.copy_from_slice(&t.3[offset as usize..][..into.len()]);
        Ok(())
    }
    fn place_of<'a>(&'a self, tensor: &'a str) -> (&'a str, &'a str) {
        ("m.safetensors", tensor)
    }
}

fn values(n: u64, seed: u32) -> Vec<f32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed) >> 8) as f32 / 65536.0 - 128.0).collect()
}

fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
    }
}

fn model() -> Memory {
    let tensor = |name, dtype, shape: &[u64], seed| (name, dtype, shape.to_vec(), bytes(dtype, &values(shape.iter().product(), seed)));
    Memory(vec![
        tensor("a", DType::BF16, &[70, 37], 1),
        tensor("b", DType::BF16, &[13, 37], 2),
        tensor("conv1d", DType::F16, &[37, 70], 3),
        tensor("v", DType::F32, &[41], 4),
    ])
}

fn source(name: &str) -> Recipe {
    Recipe::Source { tensor: name.into() }
}

fn run(table: &WeightTable, tensors: &dyn Tensors, threads: usize, allow: bool) -> Result<(Vec<u8>, Packed), Error> {
    let file = tempfile::tempfile().unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let sink = Sink { file: &file, path: Path::new("test"), base: 100 };
    let packed = pool.install(|| pack(table, tensors, sink, allow, &|_| {}))?;
    file.set_len(100 + table.len).unwrap();
    let mut all = vec![0; table.len as usize];
    file.read_exact_at(&mut all, 100).unwrap();
    assert_eq!(packed.hash, *blake3::hash(&all).as_bytes());
    Ok((all, packed))
}

/// The definition of the layout, element by element.
fn panel_reference(p: &Panels, dtype: P, matrix: &[u8]) -> Vec<u8> {
    let element = dtype.size() as usize;
    let mut out = vec![0; p.bytes(dtype) as usize];
    for way in 0..p.ways {
        for group in 0..p.groups {
            for col in 0..p.group_cols {
                for k in 0..p.k {
                    let row = (way * p.groups + group) * p.group_cols + col;
                    let panel = (group * p.panels_per_group() + col / p.nr) * p.ways + way;
                    let within = ((k / p.k_pack * p.nr + col % p.nr) * p.k_pack + k % p.k_pack) as usize;
                    let to = panel as usize * p.panel_bytes(dtype) as usize + within * element;
                    let from = (row * p.k + k) as usize * element;
                    out[to..to + element].copy_from_slice(&matrix[from..from + element]);
                }
            }
        }
    }
    out
}

#[test]
fn every_layout_equals_its_definition() {
    let m = model();
    let both = Recipe::Concat(vec![source("a"), source("b")]);
    let matrix: Vec<u8> = [&m.0[0].3[..], &m.0[1].3].concat();
    let mut table = WeightTable::default();
    let mut expected = Vec::new();
    // One group of 83; grouped heads of 35 in two; ways of 35; each with both packings.
    for k_pack in [1, 2] {
        let p = Panels { nr: 32, k_pack, k: 37, groups: 1, group_cols: 83, ways: 1, coding: Coding::Elements };
        table.place("both", &both, (DType::BF16, P::Bf16), &[83, 37], Layout::Panels(p));
        expected.push(panel_reference(&p, P::Bf16, &matrix));
        for (groups, group_cols, ways) in [(2, 35, 1), (1, 35, 2), (5, 7, 2), (70, 1, 1)] {
            let p = Panels { nr: 16, k_pack, k: 37, groups, group_cols, ways, coding: Coding::Elements };
            table.place("a", &source("a"), (DType::BF16, P::Bf16), &[70, 37], Layout::Panels(p));
            expected.push(panel_reference(&p, P::Bf16, &m.0[0].3));
        }
    }
    // Transposed and converted: f16 [37, 70] -> f32 [70, 37].
    let wide: Vec<f32> = m.0[2].3.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect();
    let turned: Vec<f32> = (0..70).flat_map(|c| (0..37).map(move |r| (r, c))).map(|(r, c)| wide[r * 70 + c]).collect();
    let recipe = Recipe::Convert { of: Box::new(Recipe::Transpose(Box::new(source("conv1d")))), dtype: DType::F32 };
    let p = Panels { nr: 32, k_pack: 1, k: 37, groups: 1, group_cols: 70, ways: 1, coding: Coding::Elements };
    table.place("c", &recipe, (DType::F32, P::F32), &[70, 37], Layout::Panels(p));
    expected.push(panel_reference(&p, P::F32, &bytes(DType::F32, &turned)));
    // Plain: a slice across the border of a concat, a vector rounded to bf16.
    let slice = Recipe::Slice { of: Box::new(both), start: 60, end: 75 };
    table.place("s", &slice, (DType::BF16, P::Bf16), &[15, 37], Layout::Plain);
    expected.push(matrix[60 * 37 * 2..75 * 37 * 2].to_vec());
    let rounded = Recipe::Convert { of: Box::new(source("v")), dtype: DType::BF16 };
    table.place("v", &rounded, (DType::BF16, P::Bf16), &[41], Layout::Plain);
    expected.push(bytes(DType::BF16, &values(41, 4)));

    let (all, packed) = run(&table, &m, 2, false).unwrap();
    for (job, expected) in table.jobs.iter().zip(&expected) {
        assert!(all[job.offset as usize..][..job.bytes as usize] == expected[..], "{job:?}");
    }
    assert_eq!(packed.nonfinite, None);
    assert_eq!(run(&table, &m, 1, false).unwrap(), (all, packed));
}

#[test]
fn items_join_without_seams() {
    // 24 MB of panels, with gaps between them, and of rows: several items each.
    let (n, k) = (6000, 1024);
    let data = bytes(DType::F32, &values(n * k, 9));
    let m = Memory(vec![("big", DType::F32, vec![n, k], data.clone())]);
    let mut table = WeightTable::default();
    let p = Panels { nr: 32, k_pack: 1, k: k as u32, groups: 1, group_cols: n as u32, ways: 1, coding: Coding::Elements };
    assert!(p.panel_bytes(P::F32) > p.filled_bytes(P::F32));
    table.place("p", &source("big"), (DType::F32, P::F32), &[n, k], Layout::Panels(p));
    table.place("q", &source("big"), (DType::F32, P::F32), &[n, k], Layout::Plain);
    let turned = Recipe::Transpose(Box::new(Recipe::Transpose(Box::new(source("big")))));
    table.place("t", &turned, (DType::F32, P::F32), &[n, k], Layout::Plain);
    let views: Vec<View> = table.jobs.iter().map(|job| check_job(job, &m).unwrap()).collect();
    let items = items(&table, &views).unwrap();
    assert!((0..3).all(|job| items.iter().filter(|item| item.job == job).count() >= 3));
    let (all, _) = run(&table, &m, 2, false).unwrap();
    let at = |i: usize| &all[table.jobs[i].offset as usize..][..table.jobs[i].bytes as usize];
    assert!(at(0) == panel_reference(&p, P::F32, &data) && at(1) == data && at(2) == data);
}

/// No batch takes more than its share of memory, unless a single item does.
#[test]
fn batches_are_bounded() {
    let item = |mb: u64| Item { job: 0, units: 0..1, offset: 0, bytes: 1, memory: mb << 20 };
    let lengths = |mb: &[u64], most: usize| -> Vec<usize> {
        let items: Vec<Item> = mb.iter().map(|mb| item(*mb)).collect();
        batches(&items, most).map(<[Item]>::len).collect()
    };
    assert_eq!(lengths(&[], 8), [0; 0]);
    assert_eq!(lengths(&[8; 20], 8), [8, 8, 4]);
    assert_eq!(lengths(&[8; 60], 384), [24, 24, 12]);
    assert_eq!(lengths(&[190, 100, 1000, 36, 156], 8), [1, 1, 1, 2]);
}

/// Items count what they are made of.
#[test]
fn conversions_and_transposed_matrices_count() {
    let m = Memory(vec![("x", DType::F32, vec![4096, 1024], vec![]), ("h", DType::F16, vec![4096, 1024], vec![])]);
    let to = |of: Recipe, dtype| Recipe::Convert { of: Box::new(of), dtype };
    let turned = |of: Recipe| Recipe::Transpose(Box::new(of));
    for (recipe, scratch) in [
        (source("x"), 0),
        (to(source("x"), DType::F32), 0),
        (to(source("x"), DType::BF16), 4),
        (to(to(source("h"), DType::F32), DType::BF16), 6),
        (turned(source("h")), 2),
        (to(turned(source("x")), DType::BF16), 6),
        (Recipe::Concat(vec![source("x"), to(source("h"), DType::F32)]), 2),
        (Recipe::Slice { of: Box::new(to(source("x"), DType::F16)), start: 1, end: 2 }, 4),
    ] {
        assert_eq!(View::new(&recipe, &m).unwrap().scratch(), scratch, "{recipe:?}");
    }
    let memory = |recipe: &Recipe| {
        let mut table = WeightTable::default();
        table.place("p", recipe, (DType::F32, P::F32), &[4096, 1024], Layout::Plain);
        let items = items(&table, &[View::new(recipe, &m).unwrap()]).unwrap();
        assert_eq!(items.iter().map(|item| item.bytes).sum::<u64>(), 16 << 20);
        items[0].memory as f64 / items[0].bytes as f64
    };
    assert_eq!((memory(&source("x")), memory(&to(source("h"), DType::F32))), (1.0, 1.5));
}

#[test]
fn rope_table() {
    let inv_freq = vec![1.0, 0.25, 1e-4];
    let mut table = WeightTable::default();
    for sin in [false, true] {
        let recipe = Recipe::Rope { sin, inv_freq: inv_freq.clone(), scale: 1.5, positions: 10 };
        table.place("rope", &recipe, (DType::F32, P::F32), &[10, 3], Layout::Plain);
    }
    let (all, _) = run(&table, &Memory(vec![]), 1, false).unwrap();
    let value = |job: usize, position: usize, i: usize| {
        f32::from_le_bytes(all[table.jobs[job].offset as usize + (position * 3 + i) * 4..][..4].try_into().unwrap())
    };
    assert_eq!(value(0, 0, 2), 1.5);
    assert_eq!(value(1, 8, 1), (2f64.sin() * 1.5) as f32);
    assert_eq!(value(0, 9, 0), (9f64.cos() * 1.5) as f32);
}

#[test]
fn not_finite_and_overflow() {
    let with = |at: usize, value: f32| {
        let mut v = values(6000, 5);
        v[at] = value;
        Memory(vec![("x", DType::F32, vec![100, 60], bytes(DType::F32, &v))])
    };
    let mut plain = WeightTable::default();
    let turned = Recipe::Transpose(Box::new(Recipe::Slice { of: Box::new(source("x")), start: 10, end: 100 }));
    plain.place("x", &turned, (DType::F32, P::F32), &[60, 90], Layout::Plain);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let e = run(&plain, &with(5000, bad), 2, false).unwrap_err();
        assert_eq!(e.exit_code(), 4);
        assert!(e.to_string().contains("m.safetensors: x[5000]: is not finite"), "{e}");
        let (_, packed) = run(&plain, &with(5000, bad), 2, true).unwrap();
        assert_eq!(packed.nonfinite, Some(("x".into(), 5000)));
    }
    let mut half = WeightTable::default();
    half.place("x", &Recipe::Convert { of: Box::new(source("x")), dtype: DType::F16 }, (DType::F16, P::F16), &[100, 60], Layout::Plain);
    assert!(run(&half, &with(0, 65504.0), 2, false).is_ok());
    let e = run(&half, &with(7, 1e10), 2, false).unwrap_err();
    assert_eq!(e.exit_code(), 5);
    assert!(e.to_string().contains("x: overflows, expected values that fit f16, found 1 elements"), "{e}");
    // Scales of int4 are f16: an eighth of the largest element.
    let mut codes = WeightTable::default();
    let coding = Coding::Int4 { group: 32, zeros: false };
    let p = Panels { nr: 32, k_pack: 8, k: 60, groups: 1, group_cols: 100, ways: 1, coding };
    let q4 = Recipe::Convert { of: Box::new(source("x")), dtype: DType::Q4(Group::G32) };
    codes.place("x", &q4, (DType::Q4(Group::G32), P::U8), &[100, 60], Layout::Panels(p));
    assert!(run(&codes, &with(7, 5e5), 2, false).is_ok());
    let e = run(&codes, &with(7, 1e6), 2, false).unwrap_err();
    assert_eq!(e.exit_code(), 5);
    assert!(e.to_string().contains("x: overflows, expected values that fit int4, "), "{e}");
    // Of weights that are one matmul the one whose elements do not fit is named.
    let small = bytes(DType::F32, &values(6000, 6));
    let Memory(mut both) = with(7, 1e6);
    both.insert(0, ("first", DType::F32, vec![100, 60], small));
    let merged = Recipe::Concat(vec![source("first"), source("x")]);
    let mut codes = WeightTable::default();
    let q4 = Recipe::Convert { of: Box::new(merged), dtype: DType::Q4(Group::G32) };
    codes.place("merged", &q4, (DType::Q4(Group::G32), P::U8), &[200, 60], Layout::Panels(Panels { group_cols: 200, ..p }));
    let e = run(&codes, &Memory(both), 2, false).unwrap_err();
    assert!(e.to_string().contains("x: overflows"), "{e}");
}

#[test]
fn our_own_mistakes_are_bugs() {
    let m = model();
    let place = |recipe: &Recipe, types, shape: &[u64]| {
        let mut table = WeightTable::default();
        table.place("x", recipe, types, shape, Layout::Plain);
        run(&table, &m, 1, false).unwrap_err().exit_code()
    };
    assert_eq!(place(&source("nope"), (DType::F32, P::F32), &[1]), 70);
    assert_eq!(place(&source("a"), (DType::F32, P::F32), &[70, 37]), 70);
    assert_eq!(place(&source("a"), (DType::BF16, P::Bf16), &[37, 70]), 70);
    assert_eq!(place(&Recipe::Transpose(Box::new(source("v"))), (DType::F32, P::F32), &[41]), 70);
    assert_eq!(place(&Recipe::Slice { of: Box::new(source("v")), start: 5, end: 42 }, (DType::F32, P::F32), &[37]), 70);
}

/// The recipe evaluated whole by the graph crate, as bytes.
fn reference(recipe: &Recipe, m: &Memory) -> rcompile_graph::Tensor {
    let source = |name: &str| {
        let t = m.0.iter().find(|t| t.0 == name).ok_or("missing")?;
        let data = match t.1 {
            DType::F32 => t.3.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
            DType::F16 => t.3.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f64()).collect(),
            _ => t.3.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f64()).collect(),
        };
        Ok(rcompile_graph::Tensor { dtype: t.1, shape: t.2.iter().map(|&n| n as usize).collect(), data })
    };
    rcompile_graph::recipe::evaluate(recipe, &source).unwrap()
}

#[test]
fn random_recipes_equal_the_reference() {
    let m = model();
    let mut state = 1u64;
    let mut random = move |n: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % n
    };
    for case in 0..200 {
        let mut recipe = source(["a", "b", "conv1d", "v"][random(4) as usize]);
        for _ in 0..random(5) {
            let value = reference(&recipe, &m);
            let rows = value.shape[0] as u64;
            let of = Box::new(recipe.clone());
            recipe = match random(4) {
                0 if value.shape.len() == 2 => Recipe::Transpose(of),
                1 => Recipe::Concat(vec![recipe.clone(), Recipe::Slice { of, start: 0, end: rows.div_ceil(2) }]),
                2 if rows > 1 => Recipe::Slice { of, start: random(rows), end: rows },
                _ => Recipe::Convert { of, dtype: [DType::F32, DType::F16, DType::BF16][random(3) as usize] },
            };
        }
        let value = reference(&recipe, &m);
        let dtype = match value.dtype {
            DType::F32 => P::F32,
            DType::F16 => P::F16,
            _ => P::Bf16,
        };
        let shape: Vec<u64> = value.shape.iter().map(|&n| n as u64).collect();
        let mut table = WeightTable::default();
        table.place("x", &recipe, (value.dtype, dtype), &shape, Layout::Plain);
        let (all, _) = run(&table, &m, 2, false).unwrap();
        let expected = bytes(value.dtype, &value.data.iter().map(|&x| x as f32).collect::<Vec<_>>());
        // Vectors have room behind them.
        assert!(all[..expected.len()] == expected[..], "case {case}: {recipe:?}");
    }
}

/// A tensor of codes: the first rows of what `quantised` gives, each code one less.
struct Given(Memory);

fn less_one(dtype: DType, x: &[f32], width: usize) -> CodedRows {
    let mut coded = CodedRows::quantise(dtype, x, width);
    coded.codes.iter_mut().for_each(|c| *c = (*c - 1).max(-8));
    coded
}

impl Tensors for Given {
    fn info(&self, tensor: &str) -> Option<(DType, Vec<u64>)> {
        match tensor.split_once('.') {
            Some((of, "q4g32")) => Some((DType::Q4(Group::G32), self.0.info(of)?.1)),
            _ => self.0.info(tensor),
        }
    }
    fn read_into(&self, tensor: &str, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.0.read_into(tensor, offset, into)
    }
    fn codes(&self, tensor: &str, rows: Range<u64>) -> Result<CodedRows, Error> {
        let (of, _) = tensor.split_once('.').unwrap();
        let (stored, shape) = self.0.info(of).unwrap();
        let width = shape[1];
        let mut bytes = vec![0; ((rows.end - rows.start) * width * stored.size()) as usize];
        self.0.read_into(of, rows.start * width * stored.size(), &mut bytes)?;
        Ok(less_one(DType::Q4(Group::G32), &convert::to_f32(stored, &bytes), width as usize))
    }
    fn place_of<'a>(&'a self, tensor: &'a str) -> (&'a str, &'a str) {
        self.0.place_of(tensor)
    }
}

/// Given codes arrive unchanged, through slices and concatenations, in several items.
#[test]
fn given_codes_are_packed_as_they_are() {
    let q4 = DType::Q4(Group::G32);
    let (rows, k) = (9000, 70);
    let m = Given(Memory(vec![("big", DType::F32, vec![rows, k], bytes(DType::F32, &values(rows * k, 3)))]));
    let cut = |start, end| Recipe::Slice { of: Box::new(source("big.q4g32")), start, end };
    let whole = Recipe::Concat(vec![cut(0, 4001), cut(4001, rows)]);
    let p = Panels {
        nr: 32,
        k_pack: 8,
        k: k as u32,
        groups: 1,
        group_cols: rows as u32,
        ways: 1,
        coding: Coding::Int4 { group: 32, zeros: false },
    };
    let mut table = WeightTable::default();
    table.place("given", &whole, (q4, P::U8), &[rows, k], Layout::Panels(p));
    let rounded = Recipe::Convert { of: Box::new(source("big")), dtype: q4 };
    table.place("rounded", &rounded, (q4, P::U8), &[rows, k], Layout::Panels(p));
    let (all, _) = run(&table, &m, 2, false).unwrap();
    let part = |job: usize| &all[table.jobs[job].offset as usize..][..table.jobs[job].bytes as usize];
    let floats = values(rows * k, 3);
    for (job, coded) in [(0, less_one(q4, &floats, k as usize)), (1, CodedRows::quantise(q4, &floats, k as usize))] {
        let mut expected = vec![0; p.bytes(P::U8) as usize];
        codes::fill(&p, P::U8, 0, &(0..u64::from(p.panels())), &coded, &mut expected);
        assert!(part(job) == expected, "job {job}");
    }
    assert!(part(0) != part(1));
    // A planned type that the tensor has not.
    let mut table = WeightTable::default();
    let p = Panels { coding: Coding::Int4 { group: 64, zeros: false }, ..p };
    table.place("other", &source("big.q4g32"), (DType::Q4(Group::G64), P::U8), &[rows, k], Layout::Panels(p));
    assert_eq!(run(&table, &m, 1, false).unwrap_err().exit_code(), 70);
}
