//! Tests of the parser: what is printed is read again, and wrong text has a place.

use super::*;
use crate::ops::{AttnVar, Binary, Compare, Unary};
use crate::print::print;
use crate::random::{self, Options, Rng};
use crate::types::{Dim, FuncId, SymbolId};
use crate::verify::verify;
use proptest::prelude::*;

const EXAMPLE: &str = r#"module {
  symbol T<=64
  symbol "odd name"<=3
  param @layers.0.norm.weight : f32[8] = source "model.layers.0.norm.weight"
  param @"say \"hi\"\n" : bf16[16, 8] = concat(source "a", slice(transpose(convert(source "b", bf16)), 0, 8))
  param @cos : f32[4, 2] = rope_cos {positions=4, scale=1.0, inv_freq=[1.0, 0.1]}
  state @layers.0.kv {kv_heads=1, head_dim=4, dtype=bf16, persistent}
  state @scratch {kv_heads=1, head_dim=4, dtype=f32}
  func @layer(%x: f32[T, 8]) params(@layers.0.norm.weight) {
    %1 = param @layers.0.norm.weight : f32[8]
    %2 = rms_norm %x, %1 {eps=1e-5} : f32[T, 8]   // layers.0.norm
    return %2
  }
  func @step(%x: f32[T, 8], %"5": i32[T], %kv_index: i32[T]) {
    %kv_index = input   // embed
    %3 = const 0.1 : f32
    %4 = mul %x, %3 : f32[T, 8]   // "two\nlines"
    %5 = call @layer(%4) params(@layers.0.norm.weight) : f32[T, 8]
    %6 = reshape %5 : f32[T, 2, 4]
    %7 = slice %6 {axis=1, start=0, end=1} : f32[T, 1, 4]
    %8 = kv_append %7, %7, %"5", %kv_index {state=@layers.0.kv} : state
    %9 = sdpa %6, %8, %"5", %kv_index {state=@layers.0.kv, score="score * 0.125", mask="key <= query & key > query - 4096"} : f32[T, 2, 4]
    %10 = permute %9 {perm=[0, 2, 1]} : f32[T, 4, 2]
    return %10, %9
  }
  main @step
}
"#;

#[test]
fn the_text_form_is_stable() {
    let module = parse(EXAMPLE).unwrap();
    verify(&module).unwrap();
    assert_eq!(print(&module), EXAMPLE);
    assert_eq!(module.params[1].name, "say \"hi\"\n");
    assert_eq!(module.main().nodes[4].origin, "two\nlines");
    assert_eq!(module.main().nodes[2].origin, "embed");
    assert_eq!(module.main().input_names[1], "5");
}

#[test]
fn handwritten_text_may_be_short() {
    let module = parse(
        r#"
            // An MLP.
            module {
              symbol T<=4
              param @up : bf16[6, 3] = source "up"   // not an origin
              func @f(%x: f32[T, 3]) {
                // comment
                %h = mm %x, @up {rhs_t}   // mlp.up
                %y = silu
                     %h
                return %y
              }
            }"#,
    )
    .unwrap();
    verify(&module).unwrap();
    assert_eq!(module.main().nodes.len(), 4);
    assert_eq!(module.main().nodes[2].origin, "mlp.up");
    assert_eq!(module.main().nodes[3].ty.shape, [Dim::Sym(SymbolId(0)), Dim::Const(6)]);
    assert_eq!(parse(&print(&module)).unwrap(), module);
}

#[test]
fn callees_may_come_later() {
    let text = "module { func @a(%x: f32[2]) { %y = call @b(%x) : f32[2] return %y }
                func @b(%x: f32[2]) { %y = neg %x return %y } main @a }";
    let module = parse(text).unwrap();
    assert_eq!(module.main().nodes[1].op.callee(), Some(FuncId(1)));
    let error = parse(&text.replace("@b(%x) : f32[2]", "@b(%x)")).unwrap_err();
    assert!(error.what.contains("type cannot be inferred"), "{error}");
    assert_eq!(parse(&text.replace("@b(%x) :", "@c(%x) :")).unwrap_err().to_string(), "1:42: no function @c");
}

#[test]
fn errors_have_a_place() {
    let many = format!("module {{ func @f(%x: f32[2]) {{ %y = sum %x {{{}", ('a'..='q').map(|c| format!("{c}, ")).collect::<String>());
    let long = " ".repeat(BYTES_MAX + 1);
    let cases = [
        ("", "1:1: expected \"module\", found the end of the text"),
        ("module {\n  é", "2:3: unexpected character 'é'"),
        ("module {\n  symbol T<=x", "2:13: x does not fit here"),
        ("module { func @f(%x: f32[T]) {", "1:26: no symbol T"),
        ("module { func @f(%x: f99) {", "1:22: no element type f99"),
        ("module { func @f(%x: f32) {\n %y = neg %z", "2:11: no value %z before this use"),
        ("module { func @f(%x: f32) {\n %y = frob %x", "2:7: unknown op frob"),
        ("module { func @f(%x: f32) {\n %x = neg %x", "2:2: %x is defined twice"),
        ("module { func @f(%x: f32[2]) {\n %y = sum %x", "2:13: attribute axis is missing"),
        ("module { func @f(%x: f32[2]) {\n %y = sum %x {axis=0, b=1}", "2:25: unknown attribute b"),
        ("module { func @f(%x: f32[2]) {\n %y = sum %x {axis=-1}", "2:20: -1 does not fit here"),
        (
            "module { func @f(%x: f32[2]) {\n %y = mm %x, %x",
            "2:7: type cannot be inferred: mm: operands f32[2] and f32[2] must be matrices",
        ),
        ("module { func @f(%x: f32) {\n %y = param @w", "2:13: no parameter @w"),
        ("module { param @a : f32[1] = source \"a\n\"", "1:37: string without end"),
        ("module { param @a : f32[1] = source \"a\\q\"", "1:39: unknown escape"),
        ("module { param @a : f32[1] = source \"a\\u{110000}\"", "1:39: unknown escape"),
        ("module { symbol T<=1 symbol T<=1", "1:29: symbol is declared twice"),
        ("module { param @a : f32 = source \"a\"\nparam @a : f32 = source \"b\"", "2:7: parameter is declared twice"),
        (
            "module { state @a {kv_heads=1, head_dim=1, dtype=f32}\nstate @a {kv_heads=1, head_dim=1, dtype=f32}",
            "2:7: state is declared twice",
        ),
        ("module { state @a {kv_heads=1, head_dim=1, dtype=f32, size=1}", "1:60: unknown attribute size"),
        ("module { func @f(%x: f32) { return %x }\nfunc @f(%x: f32) { return %x }", "2:6: function is declared twice"),
        ("module { func @f(%x: f32, %x: f32) {", "1:27: input is declared twice"),
        ("module { func @f(%x: f32[2]) {\n %y = sum %x {axis=0, axis=0}", "2:23: attribute axis is given twice, or there are too many"),
        (many.as_str(), "1:93: attribute q is given twice, or there are too many"),
        ("module { param @a : f32 = source \"a\" func @f(%x: f32) params(@a @a) {", "1:65: expected ',', found @a"),
        ("module { func @f(%x: f32) { return %x } main @f\nmain @f }", "2:1: main is given twice"),
        ("module { func @f(%x: f32) { return %x } main @g }", "1:46: no function @g"),
        ("module { }", "1:11: main is missing"),
        ("module { func @f(%x: f32) { return %x } } x", "1:43: expected the end of the text, found \"x\""),
    ];
    for (text, want) in cases {
        assert_eq!(parse(text).unwrap_err().to_string(), want, "{text}");
    }
    assert_eq!(parse(&long).unwrap_err().to_string(), "1:1: text is longer than 67108864 bytes");
    assert_eq!(parse_bytes(b"module {\n \xff").unwrap_err().to_string(), "2:2: not UTF-8");
}

#[test]
fn nesting_is_limited() {
    let deep = |n: usize| format!("module {{ param @a : f32[1] = {}source \"a\"", "transpose(".repeat(n));
    assert!(parse(&deep(100_000)).unwrap_err().what.contains("nested too deep"));
    for text in ["(".repeat(100_000), "-".repeat(100_000), "exp(".repeat(100_000), "score + ".repeat(100_000) + "1"] {
        assert!(text.parse::<AttnExpr>().unwrap_err().what.contains("nested too deep"));
    }
}

#[test]
fn attention_expressions_print_with_few_parentheses() {
    for text in [
        "score * 0.125",
        "key <= query & key > query - 4096",
        "tanh(score / 50) * 50",
        "score - (query - key) * exp(-(head + 1))",
        "a",
        "(true | !(key == 3)) & true",
        "1 - (2 - 3) - -4",
        "minimum(-key, maximum(neg(1), -inf))",
        "--key",
        "(1 < 2) < 3",
    ] {
        if text == "a" {
            assert_eq!(text.parse::<AttnExpr>().unwrap_err().to_string(), "1:1: unknown name a");
        } else {
            assert_eq!(text.parse::<AttnExpr>().unwrap().to_string(), text);
        }
    }
    assert_eq!("1 < 2 < 3".parse::<AttnExpr>().unwrap_err().to_string(), "1:7: comparisons do not chain");
    assert_eq!("query -1".parse::<AttnExpr>().unwrap().to_string(), "query - 1");
    assert_eq!("1 2".parse::<AttnExpr>().unwrap_err().to_string(), "1:3: expected an operator, found \"2\"");
}

fn attention(rng: &mut Rng, depth: usize) -> AttnExpr {
    let vars = [AttnVar::Score, AttnVar::Head, AttnVar::Query, AttnVar::Key];
    let consts = [0.0, -0.0, 1.0, -1.0, 0.1, 1e300, 1e-300, 4096.0, f64::INFINITY, f64::NEG_INFINITY, 1e15, -2.5e-8];
    let sub = |rng: &mut Rng| Box::new(attention(rng, depth - 1));
    match rng.below(if depth == 0 { 3 } else { 7 }) {
        0 => AttnExpr::Var(vars[rng.below(4)]),
        1 => AttnExpr::Const(consts[rng.below(consts.len())]),
        2 => AttnExpr::True,
        3 => AttnExpr::Unary(Unary::ALL[rng.below(Unary::ALL.len())], sub(rng)),
        4 => AttnExpr::Unary([Unary::Neg, Unary::Not][rng.below(2)], sub(rng)),
        5 => AttnExpr::Compare(Compare::ALL[rng.below(6)], sub(rng), sub(rng)),
        _ => AttnExpr::Binary(Binary::ALL[rng.below(8)], sub(rng), sub(rng)),
    }
}

proptest! {
    #[test]
    fn attention_expressions_round_trip(seed in any::<u64>()) {
        let expr = attention(&mut Rng::new(seed), 6);
        let text = expr.to_string();
        prop_assert_eq!(text.parse::<AttnExpr>().unwrap(), expr, "{}", text);
    }

    #[test]
    fn random_modules_round_trip(seed in any::<u64>(), nodes in 0usize..60) {
        let options = Options { nodes, attention: true, calls: true, odd_names: true };
        let module = random::module(&mut Rng::new(seed), &options);
        verify(&module).unwrap();
        let text = print(&module);
        let back = parse(&text).map_err(|e| format!("{e}\n{text}")).unwrap();
        prop_assert_eq!(back, module, "{}", text);
    }

    #[test]
    fn mutated_text_never_panics(seed in any::<u64>(), mutations in 1usize..12) {
        let rng = &mut Rng::new(seed);
        let options = Options { nodes: 12, attention: true, calls: true, odd_names: true };
        let mut bytes = print(&random::module(rng, &options)).into_bytes();
        for _ in 0..mutations {
            let at = rng.below(bytes.len());
            let end = (at + rng.below(8)).min(bytes.len());
            match rng.below(5) {
                0 => bytes[at] = rng.below(256) as u8,
                1 => drop(bytes.drain(at..end)),
                2 => bytes.insert(at, b"{}()[]\"\\%@,:=<>-/ \n0159e."[rng.below(25)]),
                3 => {
                    let part = bytes[at..end].to_vec();
                    let to = rng.below(bytes.len());
                    bytes.splice(to..to, part);
                }
                // Numbers become other numbers: out of range ids, axes, dimensions.
                _ => bytes.iter_mut().skip(at).filter(|b| b.is_ascii_digit()).take(1).for_each(|b| *b = b'0' + rng.below(10) as u8),
            }
        }
        if let Ok(module) = parse_bytes(&bytes)
            && verify(&module).is_ok()
        {
            prop_assert_eq!(parse(&print(&module)).unwrap(), module);
        }
    }

    #[test]
    fn any_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_bytes(&bytes);
        let _ = parse_bytes(&[b"module { ", &bytes[..]].concat());
    }
}
