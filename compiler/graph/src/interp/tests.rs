//! Tests of the interpreter, op by op.

use super::*;
use crate::parse::parse;

/// Runs `body` (nodes and a return) with inputs of their types; `decls` are further declarations.
fn try_run(decls: &str, body: &str, inputs: &[(&str, Tensor)]) -> Result<Vec<Tensor>, InterpError> {
    let module = graph(decls, body, inputs);
    Interp::from_checkpoint(&module, checkpoint).run(inputs)
}
fn graph(decls: &str, body: &str, inputs: &[(&str, Tensor)]) -> Module {
    let types: Vec<String> = inputs.iter().map(|(n, t)| format!("%{n}: {}{:?}", t.dtype, t.shape)).collect();
    let text = format!("module {{ symbol S<=8 {decls} func @f({}) {{ {body} }} }}", types.join(", "));
    parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}
fn checkpoint(name: &str) -> Result<Tensor, String> {
    match name {
        "w" => Ok(f32(&[2], [2.0, 3.0])),
        "v" => Ok(f32(&[2], [10.0, 100.0])),
        _ => Err("no such tensor".into()),
    }
}
fn f32(shape: &[usize], data: impl IntoIterator<Item = f64>) -> Tensor {
    Tensor::new(DType::F32, shape, data)
}
fn i32(data: &[i32]) -> Tensor {
    Tensor::i32(&[data.len()], data)
}
fn run(body: &str, inputs: &[(&str, Tensor)]) -> Tensor {
    try_run("", body, inputs).unwrap_or_else(|e| panic!("{e}")).swap_remove(0)
}
#[track_caller]
fn near(found: &[f64], want: &[f64]) {
    assert_eq!(found.len(), want.len(), "{found:?}");
    for (f, w) in found.iter().zip(want) {
        assert!((f - w).abs() <= 1e-6 * w.abs().max(1.0) || f == w || (f.is_nan() && w.is_nan()), "{found:?} is not {want:?}");
    }
}

#[test]
fn unary_ops() {
    let cases: [(&str, f64, f64); 20] = [
        ("neg", 1.5, -1.5),
        ("abs", -1.5, 1.5),
        ("exp", 1.0, std::f64::consts::E),
        ("log", 2.0, std::f64::consts::LN_2),
        ("log", 0.0, f64::NEG_INFINITY),
        ("sqrt", 2.25, 1.5),
        ("sqrt", -1.0, f64::NAN),
        ("rsqrt", 4.0, 0.5),
        ("tanh", 1.0, 0.761_594_155_955_764_9),
        ("erf", 1.0, 0.842_700_792_949_714_9),
        ("sigmoid", 0.0, 0.5),
        ("sigmoid", -100.0, 3.720_075_976e-44),
        ("silu", 1.0, 0.731_058_578_630_004_9),
        ("relu", -3.0, 0.0),
        ("relu", f64::NAN, f64::NAN),
        ("gelu", 1.0, 0.841_344_746_068_542_9),
        ("gelu", -1.0, -0.158_655_253_931_457_1),
        ("gelu_tanh", 1.0, 0.841_191_990_608_276_8),
        ("gelu_tanh", -1.0, -0.158_808_009_391_723_2),
        ("exp", 100.0, f64::INFINITY),
    ];
    for (op, x, want) in cases {
        near(&run(&format!("%y = {op} %x return %y"), &[("x", f32(&[1], [x]))]).data, &[want]);
    }
    let not = run("%y = not %x return %y", &[("x", Tensor::new(DType::Bool, &[2], [0.0, 1.0]))]);
    assert_eq!(not.data, [1.0, 0.0]);
}

#[test]
fn results_are_rounded_once_to_their_type() {
    // 1 + 2^-8 is a tie in bf16; the sum in f32 would lose the last bit that decides it.
    let x = Tensor::new(DType::BF16, &[1], [1.0]);
    let y = Tensor::new(DType::BF16, &[1], [2f64.powi(-8)]);
    assert_eq!(run("%z = add %x, %y return %z", &[("x", x.clone()), ("y", y)]).data, [1.0]);
    assert_eq!(run("%z = const 0.1 : bf16 return %z", &[("x", x)]).data, [0.10009765625]);
    let x = f32(&[2], [1e-30, 3.0]);
    assert_eq!(run("%z = convert %x : f16[2] return %z", &[("x", x.clone())]).data, [0.0, 3.0]);
    assert_eq!(run("%y = neg %x %z = convert %y : u8[2] return %z", &[("x", x)]).data, [0.0, 0.0]);
}

#[test]
fn binary_ops_and_comparisons() {
    let pair = |a: f64, b: f64| [("x", f32(&[1], [a])), ("y", f32(&[1], [b]))];
    let cases = [("add", 3.5), ("sub", 0.5), ("mul", 3.0), ("div", 4.0 / 3.0), ("minimum", 1.5), ("maximum", 2.0)];
    for (op, want) in cases {
        near(&run(&format!("%z = {op} %x, %y return %z"), &pair(2.0, 1.5)).data, &[want]);
    }
    assert!(run("%z = maximum %x, %y return %z", &pair(1.0, f64::NAN)).data[0].is_nan());
    let bits = |a: [f64; 4]| Tensor::new(DType::Bool, &[4], a);
    let both = [("x", bits([0.0, 0.0, 1.0, 1.0])), ("y", bits([0.0, 1.0, 0.0, 1.0]))];
    assert_eq!(run("%z = and %x, %y return %z", &both).data, [0.0, 0.0, 0.0, 1.0]);
    assert_eq!(run("%z = or %x, %y return %z", &both).data, [0.0, 1.0, 1.0, 1.0]);
    for (op, want) in [
        ("lt", [1.0, 0.0, 0.0]),
        ("le", [1.0, 1.0, 0.0]),
        ("gt", [0.0, 0.0, 1.0]),
        ("ge", [0.0, 1.0, 1.0]),
        ("eq", [0.0, 1.0, 0.0]),
        ("ne", [1.0, 0.0, 1.0]),
    ] {
        let z = run(&format!("%z = {op} %x, %y return %z"), &[("x", i32(&[1, 2, 3])), ("y", i32(&[2]))]);
        assert_eq!((z.dtype, &z.data[..]), (DType::Bool, &want[..]), "{op}");
    }
}

#[test]
fn integers_wrap_divide_toward_zero_and_compare() {
    let pair = |a: i32, b: i32| [("x", i32(&[a])), ("y", i32(&[b]))];
    assert_eq!(run("%z = add %x, %y return %z", &pair(i32::MAX, 1)).data, [f64::from(i32::MIN)]);
    assert_eq!(run("%z = mul %x, %y return %z", &pair(i32::MAX, i32::MAX)).data, [1.0]);
    assert_eq!(run("%z = div %x, %y return %z", &pair(-7, 2)).data, [-3.0]);
    assert_eq!(run("%z = minimum %x, %y return %z", &pair(2, -3)).data, [-3.0]);
    assert_eq!(run("%z = maximum %x, %y return %z", &pair(2, -3)).data, [2.0]);
    assert!(try_run("", "%z = div %x, %y return %z", &pair(1, 0)).unwrap_err().to_string().contains("division by zero"));
}

#[test]
fn broadcasting() {
    let (x, y) = (f32(&[2, 1, 2], [1.0, 2.0, 3.0, 4.0]), f32(&[3, 1], [10.0, 20.0, 30.0]));
    let z = run("%z = add %x, %y return %z", &[("x", x), ("y", y)]);
    assert_eq!(z.shape, [2, 3, 2]);
    assert_eq!(z.data, [11.0, 12.0, 21.0, 22.0, 31.0, 32.0, 13.0, 14.0, 23.0, 24.0, 33.0, 34.0]);
    let cond = Tensor::new(DType::Bool, &[2, 1], [1.0, 0.0]);
    let z = run("%z = where %c, %x, %y return %z", &[("c", cond), ("x", f32(&[2], [1.0, 2.0])), ("y", f32(&[], [9.0]))]);
    assert_eq!((&z.shape[..], &z.data[..]), (&[2, 2][..], &[1.0, 2.0, 9.0, 9.0][..]));
    let z = run("%z = expand %x : f32[2, 2, 3] return %z", &[("x", f32(&[2, 1], [1.0, 2.0]))]);
    assert_eq!(z.data, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    let large = try_run("", "%z = expand %x : f32[46341, 46341] return %z", &[("x", f32(&[1, 1], [1.0]))]);
    assert!(large.unwrap_err().to_string().contains("value is too large to interpret"));
}

#[test]
fn movement() {
    let x = || [("x", f32(&[2, 3], (0..6).map(f64::from)))];
    assert_eq!(run("%y = reshape %x : f32[3, 2] return %y", &x()).data, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(run("%y = permute %x {perm=[1, 0]} return %y", &x()).data, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    assert_eq!(run("%y = slice %x {axis=1, start=1, end=3} return %y", &x()).data, [1.0, 2.0, 4.0, 5.0]);
    assert_eq!(run("%y = slice %x {axis=0, start=1, end=2} return %y", &x()).data, [3.0, 4.0, 5.0]);
    let body = "%s = slice %x {axis=1, start=0, end=1} %y = cat %x, %s, %s {axis=1} return %y";
    assert_eq!(run(body, &x()).data, [0.0, 1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 5.0, 3.0, 3.0]);
    let y = run("%y = cat %x, %x {axis=0} return %y", &x());
    assert_eq!((y.shape[0], y.data[6]), (4, 0.0));
    let three = run("%a = reshape %x : f32[1, 2, 3] %y = permute %a {perm=[2, 0, 1]} return %y", &x());
    assert_eq!((&three.shape[..], &three.data[..]), (&[3, 1, 2][..], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0][..]));
}

#[test]
fn embedding_reads_rows_and_checks_ids() {
    let table = || f32(&[3, 2], (0..6).map(f64::from));
    let run_ids = |ids: &[i32]| try_run("", "%y = embedding %t, %i return %y", &[("t", table()), ("i", i32(ids))]);
    assert_eq!(run_ids(&[2, 0, 2]).unwrap()[0].data, [4.0, 5.0, 0.0, 1.0, 4.0, 5.0]);
    assert!(run_ids(&[3]).unwrap_err().to_string().contains("id 3 is not in a table of 3 rows"));
    assert!(run_ids(&[-1]).is_err());
}

#[test]
fn mm_both_ways_and_odd_shapes() {
    // 5 columns: four side by side and a rest.
    let a = f32(&[2, 3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let b: Vec<f64> = (0..15).map(f64::from).collect();
    let bt: Vec<f64> = (0..5).flat_map(|n| (0..3).map(move |k| f64::from(k * 5 + n))).collect();
    let want = [40.0, 46.0, 52.0, 58.0, 64.0, 85.0, 100.0, 115.0, 130.0, 145.0];
    let plain = run("%y = mm %a, %b return %y", &[("a", a.clone()), ("b", f32(&[3, 5], b))]);
    let transposed = run("%y = mm %a, %b {rhs_t} return %y", &[("a", a.clone()), ("b", Tensor::new(DType::BF16, &[5, 3], bt))]);
    assert_eq!((plain.dtype, &plain.data[..]), (DType::F32, &want[..]));
    assert_eq!(transposed.data, want);
    // The sum is exact enough to keep what f32 would lose.
    let x = f32(&[1, 3], [1e8, 1.0, -1e8]);
    assert_eq!(run("%y = mm %a, %b return %y", &[("a", x), ("b", f32(&[3, 1], [1.0; 3]))]).data, [1.0]);
}

#[test]
fn reductions_and_softmax() {
    let x = || [("x", f32(&[2, 3], [1.0, 5.0, 3.0, -1.0, -2.0, -6.0]))];
    assert_eq!(run("%y = sum %x {axis=1} return %y", &x()).data, [9.0, -9.0]);
    assert_eq!(run("%y = mean %x {axis=1} return %y", &x()).data, [3.0, -3.0]);
    assert_eq!(run("%y = amax %x {axis=1} return %y", &x()).data, [5.0, -1.0]);
    let y = run("%y = sum %x {axis=0} return %y", &x());
    assert_eq!((&y.shape[..], &y.data[..]), (&[1, 3][..], &[0.0, 3.0, -3.0][..]));
    let ln2 = std::f64::consts::LN_2;
    let soft = run("%y = softmax %x return %y", &[("x", f32(&[2, 2], [0.0, ln2, 1000.0, f64::NEG_INFINITY]))]);
    near(&soft.data, &[1.0 / 3.0, 2.0 / 3.0, 1.0, 0.0]);
    assert!(run("%y = softmax %x return %y", &[("x", f32(&[1], [f64::NEG_INFINITY]))]).data[0].is_nan());
}

#[test]
fn norms() {
    let x = || f32(&[1, 2], [3.0, 4.0]);
    let inputs = [("x", x()), ("w", f32(&[2], [1.0, 2.0])), ("b", f32(&[2], [0.5, 0.25]))];
    // mean of squares 12.5; with eps 12.5 the root is 5
    near(&run("%y = rms_norm %x, %w {eps=12.5} return %y", &inputs).data, &[0.6, 1.6]);
    // mean 3.5, variance 0.25; with eps 0.75 the root is 1
    near(&run("%y = layer_norm %x, %w, %b {eps=0.75} return %y", &inputs).data, &[0.0, 1.25]);
}

#[test]
fn rope_turns_pairs_and_copies_the_rest() {
    // A quarter turn of the first four of six elements in row 0, none in row 1; two heads.
    let x = f32(&[2, 2, 6], (0..24).map(f64::from));
    let cos = f32(&[2, 2], [0.0, 0.0, 1.0, 1.0]);
    let sin = f32(&[2, 2], [1.0, 1.0, 0.0, 0.0]);
    let y = run("%y = rope %x, %c, %s return %y", &[("x", x.clone()), ("c", cos), ("s", sin)]);
    assert_eq!(y.data[..12], [-2.0, -3.0, 0.0, 1.0, 4.0, 5.0, -8.0, -9.0, 6.0, 7.0, 10.0, 11.0]);
    assert_eq!(y.data[12..], x.data[12..]);
}

#[test]
fn pooling_binds_the_number_of_runs() {
    let inputs = [("x", f32(&[4, 1], [1.0, 5.0, 3.0, 7.0])), ("s", i32(&[0, 0, 2, 0]))];
    for (op, want) in [("mean", [3.0, 3.0, 7.0]), ("cls", [1.0, 3.0, 7.0]), ("max", [5.0, 3.0, 7.0]), ("last", [5.0, 3.0, 7.0])] {
        let y = run(&format!("%y = pool_{op} %x, %s return %y"), &inputs);
        assert_eq!((&y.shape[..], &y.data[..]), (&[3, 1][..], &want[..]), "{op}");
    }
}

const ATTENTION: &str =
    "%kv = kv_append %k, %v, %s, %i {state=@kv} %y = sdpa %q, %kv, %s, %i {state=@kv, score=SCORE, mask=MASK} return %y";
fn attend(score: &str, mask: &str) -> String {
    ATTENTION.replace("SCORE", &format!("{score:?}")).replace("MASK", &format!("{mask:?}"))
}

#[test]
fn index_select_reorders_the_last_axis() {
    let x = f32(&[2, 3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let y = run("%y = index_select %x, %i : f32[2, 4] return %y", &[("x", x.clone()), ("i", i32(&[2, 0, 1, 2]))]);
    assert_eq!(y.data, [3.0, 1.0, 2.0, 3.0, 6.0, 4.0, 5.0, 6.0]);
    assert!(try_run("", "%y = index_select %x, %i : f32[2, 1] return %y", &[("x", x), ("i", i32(&[3]))]).is_err());
}

#[test]
fn sdpa_with_window_and_grouped_heads() {
    // 3 rows, 4 query heads over 2 kv heads of width 1; zero queries weigh all visible keys alike.
    let decl = "state @kv {kv_heads=2, head_dim=1, dtype=f32}";
    let inputs = [
        ("q", f32(&[3, 4, 1], [0.0; 12])),
        ("k", f32(&[3, 2, 1], [1.0; 6])),
        ("v", f32(&[3, 2, 1], [1.0, 10.0, 2.0, 20.0, 4.0, 40.0])),
        ("s", i32(&[0, 0, 0])),
        ("i", i32(&[0, 1, 2])),
    ];
    let y = |mask: &str| try_run(decl, &attend("score", mask), &inputs).unwrap().swap_remove(0).data;
    near(&y("key <= query & key > query - 2"), &[1.0, 1.0, 10.0, 10.0, 1.5, 1.5, 15.0, 15.0, 3.0, 3.0, 30.0, 30.0]);
    let all = 7.0 / 3.0;
    near(&y("true"), &[all, all, 10.0 * all, 10.0 * all].repeat(3));
    // Head h sees key h only; head 3 sees none and gives 0.
    near(&y("key == head"), &[1.0, 2.0, 40.0, 0.0].repeat(3));
}

#[test]
fn sdpa_heads_read_their_queries_keys_and_values() {
    // Two query heads share a kv head. The two keys of each are the unit vectors, and a query is one of them: it gets the value beside it.
    let decl = "state @kv {kv_heads=2, head_dim=2, dtype=f32}";
    let inputs = [
        ("q", f32(&[2, 4, 2], [1., 0., 0., 1., 1., 0., 0., 1., 0., 1., 1., 0., 0., 1., 1., 0.])),
        ("k", f32(&[2, 2, 2], [1., 0., 0., 1., 0., 1., 1., 0.])),
        ("v", f32(&[2, 2, 2], (1..9).map(f64::from))),
        ("s", i32(&[0, 0])),
        ("i", i32(&[0, 1])),
    ];
    let y = try_run(decl, &attend("score * 1e9", "true"), &inputs).unwrap();
    near(&y[0].data, &[1., 2., 5., 6., 7., 8., 3., 4., 5., 6., 1., 2., 3., 4., 7., 8.]);
}

#[test]
fn sdpa_scores() {
    let decl = "state @kv {kv_heads=1, head_dim=2, dtype=f32}";
    let ln2 = std::f64::consts::LN_2;
    let inputs = [
        ("q", f32(&[2, 1, 2], [9.0, 9.0, 2.0 * ln2, 1.0])),
        ("k", f32(&[2, 1, 2], [0.0, 0.0, 1.0, 0.0])),
        ("v", f32(&[2, 1, 2], [3.0, 0.0, 0.0, 3.0])),
        ("s", i32(&[1, 1])),
        ("i", i32(&[0, 1])),
    ];
    let y = |score: &str| try_run(decl, &attend(score, "key <= query"), &inputs).unwrap().swap_remove(0).data;
    // Row 1 scores 0 and 2 ln 2; halved the weights are 1/3 and 2/3.
    near(&y("score * 0.5"), &[3.0, 0.0, 1.0, 2.0]);
    near(&y("minimum(score, 0)"), &[3.0, 0.0, 1.5, 1.5]);
    near(&y("score - 1e9 * key"), &[3.0, 0.0, 3.0, 0.0]);
    let e = libm::exp(libm::tanh(f64::from((2.0 * ln2) as f32) / 3.0) * 3.0);
    near(&y("tanh(score / 3) * 3"), &[3.0, 0.0, 3.0 / (1.0 + e), 3.0 * e / (1.0 + e)]);
}

#[test]
fn sdpa_that_rounds_its_factors() {
    let text = attend("score", "true");
    let one = |dtype: &str, rounds: bool| {
        let inputs = [
            ("q", f32(&[2, 1, 1], [1.003; 2])),
            ("k", f32(&[2, 1, 1], [0.0, -1.0])),
            ("v", f32(&[2, 1, 1], [0.0, 1.0])),
            ("s", i32(&[0, 0])),
            ("i", i32(&[0, 1])),
        ];
        let module = graph(&format!("state @kv {{kv_heads=1, head_dim=1, dtype={dtype}}}"), &text, &inputs);
        Interp::from_checkpoint(&module, checkpoint).rounding_attention(rounds).run(&inputs).unwrap().swap_remove(0).data
    };
    // 1.003 becomes 1, exp(-1) 188 / 512; their sum is not rounded.
    let (query, e) = (f64::from(1.003_f32), libm::exp(-1.0));
    let exact = libm::exp(-query) / (1.0 + libm::exp(-query));
    near(&one("bf16", true), &[188.0 / 512.0 / (1.0 + e); 2]);
    near(&one("bf16", false), &[exact; 2]);
    near(&one("f32", true), &[exact; 2]);
}

#[test]
fn slots_are_apart_and_keys_reach_to_the_largest_index_of_the_step() {
    let decl = "state @kv {kv_heads=1, head_dim=1, dtype=f32}";
    let inputs = [
        ("q", f32(&[4, 1, 1], [0.0; 4])),
        ("k", f32(&[4, 1, 1], [0.0; 4])),
        ("v", f32(&[4, 1, 1], [1.0, 2.0, 30.0, 50.0])),
        ("s", i32(&[0, 0, 7, 7])),
        ("i", i32(&[0, 1, 0, 1])),
    ];
    let y = try_run(decl, &attend("score", "true"), &inputs).unwrap();
    near(&y[0].data, &[1.5, 1.5, 40.0, 40.0]);
}

fn step(v: f64, slot: i32, index: i32) -> [(&'static str, Tensor); 5] {
    let one = |x: f64| f32(&[1, 1, 1], [x]);
    [("q", one(0.0)), ("k", one(0.0)), ("v", one(v)), ("s", i32(&[slot])), ("i", i32(&[index]))]
}

#[test]
fn persistent_states_live_on_and_round() {
    let module = graph("state @kv {kv_heads=1, head_dim=1, dtype=bf16, persistent}", &attend("score", "true"), &step(0.0, 0, 0));
    let mut interp = Interp::from_checkpoint(&module, checkpoint);
    let mut run = |v, slot, index| interp.run(&step(v, slot, index)).map(|y| y[0].data[0]);
    // 1 + 2^-8 + 2^-20 rounds up in bf16.
    near(&[run(1.0 + 2f64.powi(-8) + 2f64.powi(-20), 0, 0).unwrap()], &[1.0078125]);
    // A tie goes to even: 3.
    near(&[run(2.9921875, 0, 1).unwrap()], &[2.00390625]);
    // Another slot; a rewind and overwrite; only keys below the step's largest index count.
    near(&[run(9.0, 1, 0).unwrap()], &[9.0]);
    near(&[run(5.0, 0, 0).unwrap()], &[5.0]);
    near(&[run(4.0, 0, 2).unwrap()], &[4.0]);
    let gap = run(4.0, 0, 4).unwrap_err().to_string();
    assert!(gap.contains("kv_index 3 of slot 0 was never written"), "{gap}");
    interp.reset_state();
    assert!(interp.run(&step(1.0, 0, 1)).unwrap_err().to_string().contains("kv_index 0 of slot 0"));
}

#[test]
fn other_states_are_cleared_and_bad_places_refused() {
    let module = graph("state @kv {kv_heads=1, head_dim=1, dtype=f32}", &attend("score", "true"), &step(0.0, 0, 0));
    let mut interp = Interp::from_checkpoint(&module, checkpoint);
    interp.run(&step(1.0, 0, 0)).unwrap();
    assert!(interp.run(&step(1.0, 0, 1)).is_err());
    assert!(interp.run(&step(1.0, -1, 0)).unwrap_err().to_string().contains("slot -1"));
    let decl = "state @kv {kv_heads=1, head_dim=1, dtype=f32}";
    let mut twice = step(0.0, 0, 0);
    for (name, t) in &mut twice {
        *t = if matches!(*name, "s" | "i") { i32(&[0, 0]) } else { f32(&[2, 1, 1], [0.0, 0.0]) };
    }
    assert!(try_run(decl, &attend("score", "true"), &twice).unwrap_err().to_string().contains("two rows write"));
    let body = attend("score", "true").replace("sdpa %q, %kv, %s,", "sdpa %q, %kv, %other,");
    let inputs: Vec<_> = step(1.0, 0, 0).into_iter().chain([("other", i32(&[1]))]).collect();
    let other = try_run(decl, &body, &inputs).unwrap_err().to_string();
    assert!(other.contains("kv_index 0 of slot 1 was never written"), "{other}");
}

const CALLS: &str = r#"module {
      symbol T<=2
      param @w : f32[2] = source "w"
      param @v : f32[2] = source "v"
      state @a {kv_heads=1, head_dim=2, dtype=f32, persistent}
      state @b {kv_heads=1, head_dim=2, dtype=f32, persistent}
      func @scale(%x: f32[T, 2]) params(@w) { %1 = mul %x, @w return %1 }
      func @layer(%x: f32[T, 2], %i: i32[T]) params(@w) states(@a) {
        %2 = call @scale(%x) params(@w) : f32[T, 2]
        %3 = reshape %2 : f32[T, 1, 2]
        %z = sub %i, %i
        %4 = kv_append %3, %3, %z, %i {state=@a}
        %5 = sdpa %3, %4, %z, %i {state=@a, score="0", mask="key <= query"}
        %6 = reshape %5 : f32[T, 2]
        return %6
      }
      func @main(%x: f32[T, 2], %i: i32[T]) {
        %2 = call @layer(%x, %i) params(@w) states(@a) : f32[T, 2]   // layers.0
        %3 = call @layer(%2, %i) params(@v) states(@b) : f32[T, 2]   // layers.1
        return %2, %3
      }
      main @main
    }"#;

#[test]
fn calls_replace_weights_and_states_through_several_levels() {
    let module = parse(CALLS).unwrap();
    let mut interp = Interp::from_checkpoint(&module, checkpoint);
    let mut seen = Vec::new();
    let mut observer = |f: &Function, v: ValueId, _: &Tensor| seen.push(format!("{}.{}", f.name, v.0));
    let y = interp.run_observed(&[("i", i32(&[0])), ("x", f32(&[1, 2], [1.0, 1.0]))], &mut observer).unwrap();
    assert_eq!((&y[0].data[..], &y[1].data[..]), (&[2.0, 3.0][..], &[20.0, 300.0][..]));
    assert_eq!(seen[..6], ["main.0", "main.1", "layer.0", "layer.1", "scale.0", "scale.1"]);
    assert_eq!(seen.iter().filter(|s| *s == "scale.2").count(), 2);
    // Both layers kept their own keys.
    let y = interp.run(&[("i", i32(&[1])), ("x", f32(&[1, 2], [3.0, 3.0]))]).unwrap();
    assert_eq!((&y[0].data[..], &y[1].data[..]), (&[4.0, 6.0][..], &[30.0, 450.0][..]));
}

#[test]
fn inputs_are_checked() {
    let module = parse(CALLS).unwrap();
    let run = |inputs: &[(&str, Tensor)]| Interp::from_checkpoint(&module, checkpoint).run(inputs).unwrap_err().to_string();
    let (x, i) = (|n: usize| ("x", f32(&[n, 2], vec![1.0; 2 * n])), |n: usize| ("i", Tensor::i32(&[n], &vec![0; n])));
    assert_eq!(run(&[x(1)]), r#"input "i": missing"#);
    assert_eq!(run(&[x(1), i(1), x(1)]), r#"input "x": unknown or given twice"#);
    assert_eq!(run(&[x(1), i(1), ("z", f32(&[], [0.0]))]), r#"input "z": unknown or given twice"#);
    assert_eq!(run(&[x(3), i(3)]), r#"input "x": T = 3 is not in 1..=2"#);
    assert_eq!(run(&[x(0), i(0)]), r#"input "x": T = 0 is not in 1..=2"#);
    assert_eq!(run(&[x(1), i(2)]), r#"input "i": T is 1 elsewhere and 2 here"#);
    assert_eq!(run(&[x(1), ("i", f32(&[1], [0.0]))]), r#"input "i": is f32[1], declared i32[T]"#);
}

#[test]
fn parameters_are_checked_and_read_once() {
    let module = parse(CALLS).unwrap();
    let inputs = [("x", f32(&[1, 2], [1.0, 1.0])), ("i", i32(&[0]))];
    let error = Interp::from_checkpoint(&module, |_| Ok(f32(&[3], [0.0; 3]))).run(&inputs).unwrap_err().to_string();
    assert_eq!(error, r#"parameter "w": is f32[3], declared f32[2]"#);
    let reads = std::cell::Cell::new(0);
    let mut interp = Interp::new(
        &module,
        Box::new(|id| {
            reads.set(reads.get() + 1);
            checkpoint(&module.params[id.index()].name)
        }),
    );
    interp.run(&inputs).unwrap();
    interp.run(&inputs).unwrap();
    assert_eq!(reads.get(), 2);
}

#[test]
fn broken_modules_and_nodes_are_named() {
    let module = graph("", "%y = neg %x : f32[3] return %y", &[("x", f32(&[2], [0.0; 2]))]);
    let error = Interp::from_checkpoint(&module, checkpoint).run(&[]).unwrap_err();
    assert!(matches!(error, InterpError::Module(_)) && error.to_string().contains("^ error: the op gives f32[2]"), "{error}");
    let error = try_run("", "%y = embedding %t, %i   // embed_tokens\n return %y", &[("t", f32(&[1], [0.0])), ("i", i32(&[4]))]);
    assert_eq!(error.unwrap_err().to_string(), r#"@f %2 = embedding (from "embed_tokens"): id 4 is not in a table of 1 rows"#);
}
