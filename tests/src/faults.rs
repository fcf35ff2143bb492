//! Planted faults: wrong graphs that a test must notice.
//!
//! In: a traced module. Out: modules with one mistake each, as an architecture's forward code could make it: RoPE dropped or
//! paired with the wrong neighbour, a window off by one, a norm omitted, kv heads swapped, a bias ignored, and some more. A fault
//! that a model has no place for (no window, one kv head) is not made.

use rcompile_graph::infer;
use rcompile_graph::{AttnExpr, Binary, Dim, Function, Module, Node, Op, Reduce, Type, Unary, ValueId};

/// A wrong module.
pub struct Fault {
    /// What is wrong.
    pub name: String,
    /// The module.
    pub module: Module,
}

/// All faults that fit a traced module of one function.
pub fn faults(module: &Module) -> Vec<Fault> {
    let mut list = Vec::new();
    let mut plant = |name: String, change: &dyn Fn(&mut Editor) -> bool| {
        let mut editor = Editor { module: module.clone() };
        if change(&mut editor) {
            list.push(Fault { name, module: editor.module });
        }
    };
    plant("rope dropped".into(), &drop_rope);
    plant("rope dropped from keys".into(), &drop_rope_of_keys);
    plant("rope pairs neighbours".into(), &pair_neighbours);
    plant("rope turns the other way".into(), &turn_back);
    plant("window one longer".into(), &|e| e.each_window(1.0));
    plant("window one shorter".into(), &|e| e.each_window(-1.0));
    plant("future not masked".into(), &unmask);
    plant("kv heads swapped".into(), &swap_kv_heads);
    plant("positions all 0".into(), &|e| e.replace_input("position", "segment"));
    plant("segments ignored".into(), &ignore_segments);
    plant("another activation".into(), &swap_activation);
    let f = module.main();
    for id in f.ids() {
        if let Some(y) = bias_at(module, id) {
            let name = parameter(module, f.node(id).inputs[1]).unwrap_or_default();
            // Softmax over the keys removes what is the same for all of them, where no rotation comes between.
            if !name.ends_with(".key.bias") {
                plant(format!("{name} ignored"), &|e| e.replace_uses(id, y));
            }
        }
        if let Some(norm) = norm_at(module, id) {
            plant(format!("{} ignored", norm.weight), &|e| e.replace_uses(id, norm.normed));
            plant(format!("{} omitted", norm.weight), &|e| e.replace_uses(norm.end, norm.x));
        }
    }
    list
}

struct Editor {
    module: Module,
}

impl Editor {
    fn f(&mut self) -> &mut Function {
        self.module.main_mut()
    }

    /// Every use of `old` becomes one of `new`, an earlier value of the same type.
    fn replace_uses(&mut self, old: ValueId, new: ValueId) -> bool {
        let f = self.f();
        assert!(new < old && f.ty(new) == f.ty(old), "{new:?} cannot stand for {old:?}");
        let uses = f.nodes.iter_mut().flat_map(|n| &mut n.inputs).chain(&mut f.outputs);
        uses.filter(|u| **u == old).for_each(|u| *u = new);
        true
    }

    fn replace_input(&mut self, old: &str, new: &str) -> bool {
        let f = self.f();
        let (Some(old), Some(new)) = (f.input(old), f.input(new)) else { return false };
        // kv_append and sdpa have no position; only embeddings of positions use it.
        let uses = f.nodes.iter_mut().flat_map(|n| &mut n.inputs).filter(|u| **u == old);
        uses.map(|u| *u = new).count() > 0
    }

    /// A new node in front of node `at`, whose id becomes one larger.
    fn insert(&mut self, at: &mut ValueId, op: Op, inputs: &[ValueId], declared: Option<Type>) -> ValueId {
        let f = self.module.main();
        let types: Vec<&Type> = inputs.iter().map(|i| f.ty(*i)).collect();
        let ty = infer(&self.module, &op, &types, declared.as_ref()).unwrap_or_else(|e| panic!("{e}"));
        let origin = f.node(*at).origin.clone();
        let new = *at;
        let f = self.f();
        let shift = |id: &mut ValueId| {
            if *id >= new {
                id.0 += 1;
            }
        };
        f.nodes.iter_mut().flat_map(|n| &mut n.inputs).chain(&mut f.outputs).chain(&mut f.inputs).for_each(shift);
        f.nodes.insert(new.index(), Node { op, inputs: inputs.to_vec(), ty, origin });
        at.0 += 1;
        new
    }

    fn slice(&mut self, at: &mut ValueId, x: ValueId, axis: u32, start: u64, end: u64) -> ValueId {
        self.insert(at, Op::Slice { axis, start, end }, &[x], None)
    }

    fn reshape(&mut self, at: &mut ValueId, x: ValueId, shape: &[Dim]) -> ValueId {
        let ty = Type::new(self.f().ty(x).dtype, shape.iter().copied());
        self.insert(at, Op::Reshape, &[x], Some(ty))
    }

    fn binary(&mut self, at: &mut ValueId, op: Binary, a: ValueId, b: ValueId) -> ValueId {
        self.insert(at, Op::Binary(op), &[a, b], None)
    }

    /// Adds to the size of every window.
    fn each_window(&mut self, more: f64) -> bool {
        let mut found = false;
        for node in &mut self.f().nodes {
            if let Op::Sdpa { mask: AttnExpr::Binary(Binary::And, _, above), .. } = &mut node.op
                && let AttnExpr::Compare(_, _, lower) = &mut **above
                && let AttnExpr::Binary(Binary::Sub, _, window) = &mut **lower
                && let AttnExpr::Const(window) = &mut **window
            {
                *window += more;
                found = true;
            }
        }
        found
    }
}

/// The parts of a rotation: `cat(x1 c - x2 s, x2 c + x1 s, rest)` with `x1`, `x2` slices of `x`.
struct Rotation {
    end: ValueId,
    x: ValueId,
    x1: ValueId,
    x2: ValueId,
    cos: ValueId,
    sin: ValueId,
    half: u64,
    rest: Option<ValueId>,
}

fn rotations(f: &Function) -> Vec<Rotation> {
    let rotation = |end: ValueId| {
        let (Op::Cat { axis: 2 }, [difference, _, rest @ ..]) = (&f.node(end).op, &f.node(end).inputs[..]) else { return None };
        let Op::Binary(Binary::Sub) = f.node(*difference).op else { return None };
        let [left, right] = f.node(*difference).inputs[..] else { return None };
        let ([x1, cos], [x2, sin]) = (&f.node(left).inputs[..], &f.node(right).inputs[..]) else { return None };
        let Op::Slice { start: 0, end: half, .. } = f.node(*x1).op else { return None };
        let x = f.node(*x1).inputs[0];
        Some(Rotation { end, x, x1: *x1, x2: *x2, cos: *cos, sin: *sin, half, rest: rest.first().copied() })
    };
    f.ids().filter_map(rotation).collect()
}

fn drop_rope(e: &mut Editor) -> bool {
    let all = rotations(e.f());
    all.iter().for_each(|r| _ = e.replace_uses(r.end, r.x));
    !all.is_empty()
}

fn drop_rope_of_keys(e: &mut Editor) -> bool {
    let keys: Vec<ValueId> = e.f().nodes.iter().filter(|n| matches!(n.op, Op::KvAppend { .. })).map(|n| n.inputs[0]).collect();
    let all = rotations(e.f());
    let of_keys = all.iter().filter(|r| keys.contains(&r.end));
    of_keys.map(|r| e.replace_uses(r.end, r.x)).count() > 0
}

/// Elements `2i` and `2i + 1` are turned together instead of `i` and `i + half`.
fn pair_neighbours(e: &mut Editor) -> bool {
    let mut found = false;
    // From the end, so that insertions do not move what is still to come.
    for r in rotations(e.f()).into_iter().rev() {
        found = true;
        let [t, heads, _] = e.f().ty(r.x).shape[..] else { panic!("x has three axes") };
        let mut at = r.end;
        let turned = e.slice(&mut at, r.x, 2, 0, 2 * r.half);
        let pairs = e.reshape(&mut at, turned, &[t, heads, Dim::Const(r.half), Dim::Const(2)]);
        let mut halves = [0, 1].map(|i| {
            let column = e.slice(&mut at, pairs, 3, i, i + 1);
            e.reshape(&mut at, column, &[t, heads, Dim::Const(r.half)])
        });
        let [a, b] = halves;
        let (ac, bs) = (e.binary(&mut at, Binary::Mul, a, r.cos), e.binary(&mut at, Binary::Mul, b, r.sin));
        let (bc, as_) = (e.binary(&mut at, Binary::Mul, b, r.cos), e.binary(&mut at, Binary::Mul, a, r.sin));
        halves = [e.binary(&mut at, Binary::Sub, ac, bs), e.binary(&mut at, Binary::Add, bc, as_)];
        let columns = halves.map(|h| e.reshape(&mut at, h, &[t, heads, Dim::Const(r.half), Dim::Const(1)]));
        let pairs = e.insert(&mut at, Op::Cat { axis: 3 }, &columns, None);
        let mut whole = e.reshape(&mut at, pairs, &[t, heads, Dim::Const(2 * r.half)]);
        if let Some(rest) = r.rest {
            whole = e.insert(&mut at, Op::Cat { axis: 2 }, &[whole, rest], None);
        }
        e.replace_uses(at, whole);
    }
    found
}

/// The two halves change places: angles count backwards.
fn turn_back(e: &mut Editor) -> bool {
    let all = rotations(e.f());
    for r in &all {
        let f = e.f();
        let (a, b) = (f.node(r.x1).op.clone(), f.node(r.x2).op.clone());
        (f.nodes[r.x1.index()].op, f.nodes[r.x2.index()].op) = (b, a);
    }
    !all.is_empty()
}

fn unmask(e: &mut Editor) -> bool {
    let mut found = false;
    for node in &mut e.f().nodes {
        if let Op::Sdpa { mask, .. } = &mut node.op
            && *mask != AttnExpr::True
        {
            *mask = AttnExpr::True;
            found = true;
        }
    }
    found
}

/// The first two heads of every key and value change places.
fn swap_kv_heads(e: &mut Editor) -> bool {
    let appends: Vec<ValueId> = e.f().ids().filter(|id| matches!(e.module.main().node(*id).op, Op::KvAppend { .. })).collect();
    let mut found = false;
    for append in appends.into_iter().rev() {
        let mut at = append;
        for operand in 0..2 {
            let x = e.f().node(at).inputs[operand];
            let heads = e.f().ty(x).shape[1].constant().expect("a number of heads");
            if heads < 2 {
                return false;
            }
            let mut parts = vec![e.slice(&mut at, x, 1, 1, 2), e.slice(&mut at, x, 1, 0, 1)];
            if heads > 2 {
                parts.push(e.slice(&mut at, x, 1, 2, heads));
            }
            let swapped = e.insert(&mut at, Op::Cat { axis: 1 }, &parts, None);
            e.f().nodes[at.index()].inputs[operand] = swapped;
            found = true;
        }
    }
    found
}

/// Every token is of segment 0.
fn ignore_segments(e: &mut Editor) -> bool {
    let Some(segment) = e.f().input("segment") else { return false };
    let Some(mut at) = e.f().ids().find(|id| e.module.main().node(*id).inputs.contains(&segment)) else { return false };
    let zero = e.binary(&mut at, Binary::Sub, segment, segment);
    let inputs = &mut e.f().nodes[at.index()].inputs;
    inputs.iter_mut().filter(|i| **i == segment).for_each(|i| *i = zero);
    true
}

fn swap_activation(e: &mut Editor) -> bool {
    let mut found = false;
    for node in &mut e.f().nodes {
        if let Op::Unary(u) = &mut node.op {
            let other = match *u {
                Unary::Gelu => Unary::GeluTanh,
                Unary::GeluTanh | Unary::Silu => Unary::Gelu,
                other => other,
            };
            found |= other != *u;
            *u = other;
        }
    }
    found
}

/// Name of the vector of the checkpoint that a value is, perhaps widened.
fn parameter(module: &Module, id: ValueId) -> Option<String> {
    let node = module.main().node(id);
    match node.op {
        Op::Param(p) if node.ty.rank() == 1 => Some(module.params[p.index()].name.clone()),
        Op::Convert => parameter(module, node.inputs[0]),
        _ => None,
    }
}

/// The value to which this node adds a bias.
fn bias_at(module: &Module, id: ValueId) -> Option<ValueId> {
    let node = module.main().node(id);
    let [y, bias] = node.inputs[..] else { return None };
    let is_bias = node.op == Op::Binary(Binary::Add) && parameter(module, bias)?.ends_with(".bias");
    is_bias.then_some(y)
}

struct Norm {
    weight: String,
    x: ValueId,
    normed: ValueId,
    end: ValueId,
}

/// The norm of which this node multiplies with the weight.
fn norm_at(module: &Module, id: ValueId) -> Option<Norm> {
    let f = module.main();
    let [normed, weight] = f.node(id).inputs[..] else { return None };
    let weight = parameter(module, weight).filter(|name| f.node(id).op == Op::Binary(Binary::Mul) && name.ends_with(".weight"))?;
    let mut x = *f.node(normed).inputs.first()?;
    let mut end = id;
    if f.node(x).op == Op::Binary(Binary::Sub) && matches!(f.node(f.node(x).inputs[1]).op, Op::Reduce { op: Reduce::Mean, .. }) {
        // Layer norm: the mean is taken off before, a bias is added behind.
        x = f.node(x).inputs[0];
        end = f.ids().find(|user| bias_at(module, *user) == Some(id))?;
    }
    Some(Norm { weight, x, normed, end })
}
