//! Weights of matmuls as int8 or int4 codes (`--quantize`, `--quantize-head`, `--keep`).
//!
//! ```text
//! %y = mm %x, @w {rhs_t}               ->  %y = mm %x, @w' {rhs_t},  @w' : q4g32 = convert(recipe of @w, q4g32)
//! embedding of the head's table (tied) ->  embedding of @w', as f32
//! calibrated, in a layer or a head:    ->  @w' : q4g32 = source "w.q4g32"
//! ```
//! Rounding to a quantised type is a conversion like that to bf16: visible in the graph, evaluated by the pack stage, judged by the
//! interpreter. Codes that are given are a tensor of that type. Norms, biases, tables of positions and embeddings that no matmul reads keep
//! their type. What the rows are converted to is a matter of `compute-dtype`, which runs next.
//!
//! Weights that the checkpoint has as codes stay what they are.
//!
//! `--keep PATTERN=TYPE` names tensors of the checkpoint; a matmul that reads one of them keeps (or gets) that type.

use super::rewrite::rewrite_all;
use super::{Broken, PassCx};
use rcompile_graph::{DType, Function, Module, Op, OpClass, Param, ParamId, Recipe, Type, ValueId, layer_of};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What `--quantize` and its companions say.
#[derive(Clone, Debug, Default)]
pub struct Quantisation {
    /// Type of linear layers.
    pub body: Option<DType>,
    /// Type of the head (and, where it is tied, of the embedding).
    pub head: Option<DType>,
    /// Tensors that are left out, by the graph's names: the type to store each in, `None` for the checkpoint's.
    pub kept: BTreeMap<String, Option<DType>>,
    /// Where the codes of layers and head come from.
    pub choice: Choice,
}

/// Where codes come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// From the weights, each rounded to nearest.
    #[default]
    RoundToNearest,
    /// They are being chosen by a text: tensors with the parameter's name and type. Those of a table that is the head are known last, so
    /// lookups read it as it is in the checkpoint.
    Calibrating,
    /// They are chosen: the same tensors, for lookups too.
    Calibrated,
}

impl Quantisation {
    /// Does it change anything?
    pub fn is_any(&self) -> bool {
        self.body.is_some() || self.head.is_some()
    }

    /// What was made of these products: types that nothing got are none, and a head that there is not, or that the checkpoint has as codes,
    /// is like the layers.
    pub fn made(&self, products: &Products) -> Quantisation {
        let body = self.body.filter(|_| products.layers.made > 0);
        let Count { all, coded, made } = products.heads;
        let head = if all == 0 || coded > made { body } else { self.head.filter(|_| made > 0) };
        Quantisation { body, head, ..self.clone() }
    }

    /// As `info` names it: `int4 by 32, head int8, calibrated`.
    pub fn name(&self) -> String {
        let one = |dtype: Option<DType>| match dtype {
            Some(DType::Q4(group)) => format!("int4 by {}", group.len(0)),
            Some(_) => "int8".to_string(),
            None => "none".to_string(),
        };
        let (body, head) = (one(self.body), one(self.head));
        let calibrated = if self.choice == Choice::RoundToNearest { "" } else { ", calibrated" };
        if body == head { format!("{body}{calibrated}") } else { format!("{body}, head {head}{calibrated}") }
    }

    /// The type for a weight that is made of these tensors; `None`: as it is.
    fn wanted(&self, tensors: &[String], is_head: bool) -> Option<DType> {
        match tensors.iter().find_map(|tensor| self.kept.get(tensor)) {
            Some(dtype) => *dtype,
            None if is_head => self.head,
            None => self.body,
        }
    }
}

/// Matrix products, and what their weights have become.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Products {
    /// Of layers.
    pub layers: Count,
    /// Of heads.
    pub heads: Count,
    /// Names of the tensors that they read.
    pub tensors: BTreeSet<String>,
}

/// Numbers of matmuls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// In all.
    pub all: usize,
    /// By codes, the checkpoint's or made here.
    pub coded: usize,
    /// By codes that were made here.
    pub made: usize,
}

/// Runs the pass.
pub fn run(module: &mut Module, cx: &mut PassCx) -> Result<bool, Broken> {
    let quantisation = cx.quantisation.clone();
    if !quantisation.is_any() {
        return Ok(false);
    }
    let heads: Vec<ParamId> = module.functions.iter().flat_map(heads).collect();
    let mut made: HashMap<ParamId, ParamId> = HashMap::new();
    let mut products = Products::default();
    // Matmuls first: tables are looked up before the head is seen.
    for f in &module.functions.clone() {
        for node in &f.nodes {
            let Some(p) = weight_of(f, node) else { continue };
            let param = &module.params[p.index()];
            let is_head = heads.contains(&p);
            let mut tensors = Vec::new();
            sources(&param.recipe, &mut tensors);
            let wanted = quantisation.wanted(&tensors, is_head);
            products.tensors.extend(tensors);
            let (was_coded, becomes_coded) = (param.ty.dtype.is_quantised(), wanted.is_some_and(DType::is_quantised));
            let count = if is_head { &mut products.heads } else { &mut products.layers };
            count.all += 1;
            count.coded += usize::from(was_coded || becomes_coded);
            count.made += usize::from(!was_coded && becomes_coded);
            let Some(dtype) = wanted.filter(|d| *d != param.ty.dtype) else { continue };
            if param.ty.dtype.is_quantised() {
                cx.note(&param.name, format_args!("is {} already", param.ty.dtype));
                continue;
            }
            if made.contains_key(&p) {
                continue;
            }
            cx.note(&param.name, dtype);
            let of_model = layer_of(&node.origin).is_some() || is_head;
            let by_text = quantisation.choice != Choice::RoundToNearest && of_model && dtype.is_quantised();
            let new = if by_text { coded(param, dtype) } else { converted(param, dtype) };
            made.insert(p, ParamId(module.params.len() as u32));
            module.params.push(new);
        }
    }
    cx.products = Some(products);
    let replaced = rewrite_all(module, |rw, f, id| {
        let node = f.node(id);
        let table = |id: ValueId| match (&f.node(id).op, &f.node(f.node(id).inputs[0]).op) {
            (Op::Embedding, Op::Param(p)) if quantisation.choice != Choice::Calibrating => made.get(p).copied(),
            _ => None,
        };
        let load = |rw: &mut super::rewrite::Rewriter<'_>, p: ParamId| {
            let ty = rw.module.params[p.index()].ty.clone();
            rw.add(Op::Param(p), &[], Some(ty))
        };
        match &node.op {
            Op::Mm { rhs_t: true } => {
                let Some(p) = weight_of(f, node).and_then(|p| made.get(&p).copied()) else { return Ok(None) };
                let x = rw.map(node.inputs[0]);
                let w = load(rw, p)?;
                Ok(Some(rw.add(Op::Mm { rhs_t: true }, &[x, w], None)?))
            }
            Op::Embedding => {
                let Some(p) = table(id) else { return Ok(None) };
                let ids = rw.map(node.inputs[1]);
                let w = load(rw, p)?;
                let x = rw.add(Op::Embedding, &[w, ids], None)?;
                let same = rw.node(x).ty == node.ty;
                Ok(Some(if same { x } else { rw.add(Op::Convert, &[x], Some(node.ty.clone()))? }))
            }
            // The lookup gives f32 as it is, without a way through the table's old type.
            Op::Convert if node.ty.dtype == DType::F32 && f.node(node.inputs[0]).op == Op::Embedding => {
                let lookup = rw.map(node.inputs[0]);
                match (table(node.inputs[0]), &rw.node(lookup).op) {
                    (Some(_), Op::Convert) => Ok(Some(rw.node(lookup).inputs[0])),
                    _ => Ok(None),
                }
            }
            _ => Ok(None),
        }
    })?;
    Ok(replaced > 0)
}

/// The weight of a matmul.
fn weight_of(f: &Function, node: &rcompile_graph::Node) -> Option<ParamId> {
    match (&node.op, &f.node(*node.inputs.get(1)?).op) {
        (Op::Mm { rhs_t: true }, Op::Param(p)) => Some(*p),
        _ => None,
    }
}

/// The parameter in another type, made of what the checkpoint has: not of what `--dtype` would round it to.
pub(super) fn converted(param: &Param, dtype: DType) -> Param {
    let ty = Type::new(dtype, param.ty.shape.iter().copied());
    let of = match &param.recipe {
        Recipe::Convert { of, .. } => of.clone(),
        recipe => Box::new(recipe.clone()),
    };
    Param { name: format!("{}.{dtype}", param.name), ty, recipe: Recipe::Convert { of, dtype } }
}

/// The parameter whose codes are given.
fn coded(param: &Param, dtype: DType) -> Param {
    let param = converted(param, dtype);
    Param { recipe: Recipe::Source { tensor: param.name.clone() }, ..param }
}

/// Weights of matmuls whose result reaches an output elementwise or by rows: heads.
fn heads(f: &Function) -> Vec<ParamId> {
    let mut reaches = vec![false; f.nodes.len()];
    f.outputs.iter().for_each(|v| reaches[v.index()] = true);
    let mut found = Vec::new();
    for id in f.ids().rev().filter(|id| f.ty(*id).rank() == 2) {
        if !reaches[id.index()] {
            continue;
        }
        let node = f.node(id);
        match node.op {
            _ if node.op.class() == OpClass::Elementwise => node.inputs.iter().for_each(|v| reaches[v.index()] = true),
            Op::Embedding | Op::Slice { .. } => reaches[node.inputs[0].index()] = true,
            Op::Mm { .. } => found.extend(weight_of(f, node)),
            _ => {}
        }
    }
    found
}

fn sources(recipe: &Recipe, into: &mut Vec<String>) {
    match recipe {
        Recipe::Source { tensor } => into.push(tensor.clone()),
        Recipe::Transpose(of) | Recipe::Slice { of, .. } | Recipe::Convert { of, .. } => sources(of, into),
        Recipe::Concat(parts) => parts.iter().for_each(|p| sources(p, into)),
        Recipe::Rope { .. } => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_graph::Group;

    const GRAPH: &str = "module {
  symbol T<=8
  param @embed : bf16[96, 64] = source \"embed\"
  param @up : bf16[64, 64] = source \"up\"
  param @down : bf16[64, 64] = source \"down\"
  func @step(%token: i32[T]) {
    %token = input
    %e = param @embed : bf16[96, 64]
    %x = embedding %e, %token : bf16[T, 64]
    %y = convert %x : f32[T, 64]
    %u = param @up : bf16[64, 64]
    %a = mm %y, %u {rhs_t} : f32[T, 64]
    %d = param @down : bf16[64, 64]
    %b = mm %a, %d {rhs_t} : f32[T, 64]
    %l = mm %b, %e {rhs_t} : f32[T, 96]
    return %l
  }
  main @step
}
";

    fn quantised(quantisation: Quantisation) -> String {
        quantised_graph(GRAPH, quantisation)
    }

    fn quantised_graph(graph: &str, quantisation: Quantisation) -> String {
        let mut module = rcompile_graph::parse(graph).unwrap_or_else(|e| panic!("{e}"));
        run(&mut module, &mut PassCx { quantisation, ..PassCx::default() }).unwrap();
        super::super::dce::run(&mut module, &mut PassCx::default()).unwrap();
        rcompile_graph::verify(&module).unwrap();
        rcompile_graph::print(&module)
    }

    #[test]
    fn layers_head_and_kept_tensors_get_their_types() {
        let kept = [("down".to_string(), None)].into();
        let text = quantised(Quantisation {
            body: Some(DType::Q4(Group::G32)),
            head: Some(DType::Q8(Group::Row)),
            kept,
            ..Quantisation::default()
        });
        assert!(text.contains("@up.q4g32 : q4g32[64, 64] = convert(source \"up\", q4g32)"), "{text}");
        assert!(text.contains("bf16[64, 64] = source \"down\""), "{text}");
        // The tied table is there once, and looked up as f32.
        assert!(text.contains("q8[96, 64] = convert(source \"embed\", q8)") && !text.contains("bf16[96, 64]"), "{text}");
        assert!(!text.contains("= convert %"), "{text}");
    }

    #[test]
    fn codes_of_layers_and_head_are_given() {
        let graph = GRAPH.replace("%b = mm %a, %d {rhs_t} : f32[T, 64]", "%b = mm %a, %d {rhs_t} : f32[T, 64]  // layers.3.down");
        assert_ne!(graph, GRAPH);
        let q8 = Some(DType::Q8(Group::Row));
        let with = |choice| quantised_graph(&graph, Quantisation { body: q8, head: q8, choice, ..Quantisation::default() });
        for choice in [Choice::Calibrating, Choice::Calibrated] {
            let text = with(choice);
            assert!(text.contains("@down.q8 : q8[64, 64] = source \"down.q8\""), "{text}");
            // What lies before the layers is rounded to nearest.
            assert!(
                text.contains("= convert(source \"up\", q8)") && text.contains("@embed.q8 : q8[96, 64] = source \"embed.q8\""),
                "{text}"
            );
            // Nobody knows the table's codes before the layers have theirs.
            assert_eq!(text.contains("bf16[96, 64] = source \"embed\""), choice == Choice::Calibrating, "{text}");
        }
        assert!(with(Choice::RoundToNearest).contains("= convert(source \"embed\", q8)"));
    }

    #[test]
    fn the_head_alone() {
        let text = quantised(Quantisation { head: Some(DType::Q8(Group::Row)), ..Quantisation::default() });
        assert!(text.contains("bf16[64, 64] = source \"up\"") && text.contains("q8[96, 64]"), "{text}");
    }
}
