//! Checkpoints that are quantised already: what is read, and executables against the same numbers as floats.

use rcompile::passes::quantise::Quantisation;
use rcompile_graph::{DType, Op};
use rcompile_models::quantised::Method;
use rcompile_tests::checks::{bits, check};
use rcompile_tests::coded_toy::Layout;
use rcompile_tests::toy::{Toy, write_model};
use rcompile_tests::{Reference, build, difference, exe, has_int8_dot, model_dir, tol, wide};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Every group size fits its layers.
const TOY: Toy = Toy { vocab: 131, hidden: 128, heads: 4, kv_heads: 2, intermediate: 256, layers: 2 };
/// Heads that are no whole words of codes, rows that are no whole groups of the kernels'.
const UNEVEN: Toy = Toy { vocab: 67, hidden: 160, heads: 4, kv_heads: 2, intermediate: 96, layers: 1 };
/// Widths that end within a group of 96, 128 or 256, or have no more than one.
const SHORT: Toy = Toy { vocab: 72, hidden: 192, heads: 4, kv_heads: 2, intermediate: 320, layers: 1 };
const BASE: &str = "--no-tokenizer --kv-dtype f32";

fn tokens() -> Vec<u32> {
    (0..11).map(|i| 3 + i * 7 % 60).collect()
}

/// Directories of codes and of floats.
fn pair(toy: &Toy, layout: &Layout) -> [PathBuf; 2] {
    [false, true].map(|twin| {
        let name = format!("{}-{}{}", layout.name(), toy.hidden, if twin { "-floats" } else { "" });
        model_dir(&name, |dir| layout.write(toy, &[], dir, twin))
    })
}

fn layouts() -> Vec<Layout> {
    let mut list = vec![];
    for group_size in [Some(32), Some(64), Some(128), None] {
        list.extend([false, true].map(|symmetric| Layout { method: Method::Awq, group_size, symmetric, ..Layout::GPTQ }));
        for (bits, zeros_minus_one) in [(4, true), (4, false), (8, true), (8, false)] {
            for (symmetric, desc_act) in [(true, false), (true, true), (false, false), (false, true)] {
                // One group has no order.
                if !desc_act || group_size.is_some() {
                    let method = Method::Gptq { zeros_minus_one };
                    list.push(Layout { method, bits, group_size, symmetric, desc_act, ..Layout::GPTQ });
                }
            }
        }
    }
    list
}

/// The graph of each layout gives the logits of its floats. An order of inputs is one table for q, k and v.
#[test]
fn every_layout_is_read() {
    for layout in layouts() {
        let [codes, floats] = pair(&TOY, &layout);
        let (codes, floats) = (Reference::open(&codes, DType::F32), Reference::open(&floats, DType::F32));
        let (found, wanted) = (codes.runner().logits(&tokens()[..4]), floats.runner().logits(&tokens()[..4]));
        let d = difference(&found, &wanted);
        // f64 sums of the same products, in another order where there is one.
        assert!(d.max_rel <= if layout.desc_act { 1e-6 } else { 0.0 }, "{}: {d}", layout.name());
        let selects = codes.module().main().nodes.iter().filter(|n| n.op == Op::IndexSelect).count();
        let orders = codes.module().params.iter().filter(|p| p.ty.dtype == DType::I32).count();
        // q, k, v; o; gate, up; down.
        let expected = if layout.desc_act { (7 * TOY.layers, 4 * TOY.layers) } else { (0, 0) };
        let expected = if layout.desc_act && TOY.hidden == layout.group_size.unwrap_or(0) { (TOY.layers, TOY.layers) } else { expected };
        assert_eq!((selects, orders), expected, "{}", layout.name());
    }
}

/// Groups that the graph has not, last ones that are short, a head of codes, scales in BF16.
fn unusual() -> Vec<Layout> {
    let mut list = vec![];
    for group_size in [Some(96), Some(128), Some(256)] {
        for desc_act in [false, true] {
            list.push(Layout { group_size, desc_act, head: true, ..Layout::GPTQ });
            list.push(Layout { group_size, desc_act, bits: 8, symmetric: false, bf16_scales: true, ..Layout::GPTQ });
        }
    }
    list
}

#[test]
fn unusual_layouts_are_read() {
    for layout in unusual() {
        let [codes, floats] = pair(&SHORT, &layout).map(|dir| Reference::open(&dir, DType::F32));
        let d = difference(&codes.runner().logits(&tokens()[..4]), &floats.runner().logits(&tokens()[..4]));
        assert!(d.max_rel <= if layout.desc_act { 1e-6 } else { 0.0 }, "{}: {d}", layout.name());
    }
}

#[test]
fn short_groups_and_heads() {
    for layout in unusual().into_iter().filter(|layout| layout.group_size != Some(256)) {
        agrees(&SHORT, &layout, "--compute f32", DType::F32);
        if has_int8_dot() {
            agrees(&SHORT, &layout, "--compute int8", DType::I8);
        }
    }
}

/// An executable of codes gives the logits of the floats (of the same codes of rows, for integer dots), in the same bits for all buckets
/// and threads.
fn agrees(toy: &Toy, layout: &Layout, options: &str, compute: DType) {
    let what = format!("{} of {}, {options}", layout.name(), toy.hidden);
    let [codes, floats] = pair(toy, layout);
    let exe = build(&codes, &format!("{BASE} --buckets 1,8 {options}"));
    let (gate, reference) = match compute {
        DType::I8 => (tol::INT8, Reference::quantised(&codes, DType::I8, DType::F32, &Quantisation::default())),
        _ => (tol::F32, Reference::open(&floats, DType::F32)),
    };
    let found = exe.logits(&tokens(), &["-t", "1"]);
    let d = check(&what, gate, &wide(&found), &reference.runner().logits(&tokens()));
    println!("{what}: {d}");
    assert_eq!(bits(&exe.logits(&tokens(), &["-t", "2"])), bits(&found), "{what}: two threads");
    let one = build(&codes, &format!("{BASE} --buckets 1 {options}"));
    assert_eq!(bits(&one.logits(&tokens(), &[])), bits(&found), "{what}: bucket 1");
}

const V2: Method = Method::Gptq { zeros_minus_one: false };

#[test]
fn four_bits() {
    for layout in [Layout::GPTQ, Layout { group_size: Some(32), symmetric: false, method: V2, ..Layout::GPTQ }] {
        agrees(&TOY, &layout, "--compute f32", DType::F32);
        if has_int8_dot() {
            agrees(&TOY, &layout, "", DType::I8);
        }
    }
    agrees(&TOY, &Layout { group_size: None, symmetric: false, ..Layout::GPTQ }, "--compute f32", DType::F32);
}

#[test]
fn eight_bits() {
    let layout = Layout { bits: 8, ..Layout::GPTQ };
    for layout in [layout, Layout { group_size: Some(32), symmetric: false, method: V2, ..layout }] {
        agrees(&TOY, &layout, "--compute f32", DType::F32);
        if has_int8_dot() {
            agrees(&TOY, &layout, "--compute int8", DType::I8);
        }
    }
    agrees(&TOY, &Layout { group_size: None, ..layout }, "--compute f32", DType::F32);
}

#[test]
fn orders_of_inputs() {
    let layout = Layout { group_size: Some(32), desc_act: true, ..Layout::GPTQ };
    for layout in [layout, Layout { bits: 8, group_size: Some(64), symmetric: false, ..layout }] {
        agrees(&TOY, &layout, "--compute f32", DType::F32);
        if has_int8_dot() {
            agrees(&TOY, &layout, "", DType::I8);
        }
    }
}

/// The name of an order is made up: a tensor of the checkpoint that has it by chance is not read in its place.
#[test]
fn orders_hide_tensors_of_their_name() {
    let layout = Layout { group_size: Some(32), desc_act: true, ..Layout::GPTQ };
    let [codes, _] = pair(&TOY, &layout);
    let name = "model.layers.0.self_attn.k_proj.order";
    let other = model_dir("order-by-chance", |dir| {
        let bytes = std::fs::read(codes.join("model.safetensors")).unwrap();
        let stored = SafeTensors::deserialize(&bytes).unwrap().tensors();
        let mut tensors: Vec<_> = stored.into_iter().map(|(name, t)| (name, t.dtype(), t.shape().to_vec(), t.data().to_vec())).collect();
        let reversed = (0..TOY.hidden as i32).rev().flat_map(i32::to_le_bytes).collect();
        tensors.push((name.into(), Dtype::I32, vec![TOY.hidden], reversed));
        write_model(dir, &serde_json::from_str(&std::fs::read_to_string(codes.join("config.json")).unwrap()).unwrap(), &tensors);
    });
    let module = Reference::open(&codes, DType::F32);
    assert!(module.module().params.iter().any(|p| p.name == name), "which name is made up");
    let logits = |dir: &Path| bits(&build(dir, &format!("{BASE} --buckets 8 --compute f32")).logits(&tokens(), &[]));
    assert_eq!(logits(&other), logits(&codes));
}

#[test]
fn awq() {
    let layout = Layout { method: Method::Awq, symmetric: false, ..Layout::GPTQ };
    agrees(&TOY, &layout, "--compute f32", DType::F32);
    let uneven = Layout { group_size: Some(32), ..layout };
    agrees(&UNEVEN, &uneven, "--compute f32", DType::F32);
    if has_int8_dot() {
        agrees(&TOY, &Layout { group_size: Some(64), ..layout }, "", DType::I8);
        agrees(&UNEVEN, &uneven, "", DType::I8);
    }
}

#[test]
fn avx2() {
    for layout in [
        Layout { group_size: Some(32), symmetric: false, desc_act: true, ..Layout::GPTQ },
        Layout { bits: 8, group_size: Some(64), symmetric: false, ..Layout::GPTQ },
    ] {
        agrees(&TOY, &layout, "--cpu x86-64-v3 --compute f32", DType::F32);
        agrees(&TOY, &layout, "--cpu x86-64-v3", DType::I8);
    }
}

/// Layers without codes stay floats; `--quantize` rounds them and the head, and says that the others stay.
#[test]
fn some_layers_are_floats() {
    let layout = Layout { group_size: Some(64), symmetric: false, ..Layout::GPTQ };
    let skipped = ["k_proj", "down_proj"];
    let [codes, floats] =
        [false, true].map(|twin| model_dir(&format!("some-floats-{twin}"), |dir| layout.write(&TOY, &skipped, dir, twin)));
    let exe = build(&codes, &format!("{BASE} --buckets 8 --compute f32"));
    let wanted = Reference::open(&floats, DType::F32).runner().logits(&tokens());
    check("some floats", tol::F32, &wide(&exe.logits(&tokens(), &[])), &wanted);
    assert_eq!(exe.json(["info"])["quantization"], Value::from("gptq int4 by 64 with zeros"));

    let out = codes.with_file_name("some-floats.exe");
    let args =
        format!("--no-tokenizer --buckets 8 --compute f32 --quantize int8 --dry-run --model {} -o {}", codes.display(), out.display());
    let report = exe::rcompile(args.split(' ')).unwrap();
    assert!(report.warnings.iter().any(|w| w.contains("10 matrices of the checkpoint are codes already")), "{:?}", report.warnings);
    assert_eq!(report.quantisation, "gptq int4 by 64 with zeros, others int8");
    // Codes of the checkpoint and codes that are made here, of one type: they come from different tensors and stay apart.
    let layout = Layout { group_size: Some(64), symmetric: true, ..Layout::GPTQ };
    let codes = model_dir("some-floats-same", |dir| layout.write(&TOY, &skipped, dir, false));
    let exe = build(&codes, &format!("{BASE} --buckets 8 --compute f32 --quantize int4 --group-size 64 --quantize-head none"));
    let both = Quantisation { body: Some(DType::Q4(rcompile_graph::Group::G64)), ..Quantisation::default() };
    let wanted = Reference::quantised(&codes, DType::F32, DType::F32, &both).runner().logits(&tokens());
    check("codes of one kind", tol::F32, &wide(&exe.logits(&tokens(), &[])), &wanted);
    if has_int8_dot() {
        // k's and v's codes of a group differ in kind: their rows' records do too.
        let both = Quantisation { body: Some(DType::Q8(rcompile_graph::Group::Row)), ..Quantisation::default() };
        let layout = Layout { group_size: Some(128), symmetric: false, ..Layout::GPTQ };
        let codes = model_dir("some-floats-128", |dir| layout.write(&TOY, &skipped, dir, false));
        let exe = build(&codes, &format!("{BASE} --buckets 8 --quantize int8 --quantize-head none"));
        let wanted = Reference::quantised(&codes, DType::I8, DType::F32, &both).runner().logits(&tokens());
        check("codes of two kinds", tol::INT8, &wide(&exe.logits(&tokens(), &[])), &wanted);
    }
}

/// Codes that contradict the config, or options that contradict codes: an error, and no file.
#[test]
fn wrong_codes_are_refused() {
    // The zero points of a checkpoint without `sym`, read with it.
    let layout = Layout { group_size: Some(64), symmetric: false, ..Layout::GPTQ };
    let dir = model_dir("not-symmetric", |dir| {
        layout.write(&TOY, &[], dir, false);
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("\"sym\":false"));
        std::fs::write(&path, text.replace("\"sym\":false", "\"sym\":true")).unwrap();
    });
    let out = dir.with_file_name("not-symmetric.exe");
    let refused = |dir: &Path, options: &str| {
        let args = format!("--no-tokenizer --buckets 1 {options} --model {} -o {}", dir.display(), out.display());
        let e = exe::rcompile(args.split_whitespace()).unwrap_err();
        assert!(!out.exists());
        (e.exit_code(), e.to_string())
    };
    for options in ["", "--dry-run"] {
        let (code, line) = refused(&dir, options);
        assert!(code == 5 && line.contains("proj.qzeros"), "{code}: {line}");
        assert!(line.contains("contradicts sym") && line.contains("expected 8"), "{line}");
    }
    let [codes, _] = pair(&TOY, &layout);
    let (code, line) = refused(&codes, "--quantize int8 --keep *.q_proj.*=f32");
    assert!(code == 2 && line.contains("are codes and stay as they are"), "{code}: {line}");
    // A head that the checkpoint has as codes is not rounded here.
    let layout = Layout { head: true, ..Layout::GPTQ };
    let [codes, _] = pair(&SHORT, &layout);
    let (code, line) = refused(&codes, "--quantize-head int8");
    assert!(code == 2 && line.contains("--quantize-head") && line.contains("the checkpoint has codes of it already"), "{code}: {line}");
    // Beside it, layers that are floats are.
    let codes = model_dir("head-and-floats", |dir| layout.write(&SHORT, &["down_proj"], dir, false));
    let args = format!("--no-tokenizer --dry-run --quantize int8 --model {} -o {}", codes.display(), out.display());
    assert_eq!(exe::rcompile(args.split_whitespace()).unwrap().quantisation, "gptq int4 by 128, others int8");
    // Integer dots want codes.
    let dir = model_dir("floats", |dir| TOY.write(dir));
    let args = format!("--no-tokenizer --compute int8 --dry-run --model {} -o {}", dir.display(), out.display());
    let e = exe::rcompile(args.split_whitespace()).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("--compute int8 without quantised weights"), "{e}");
}
