//! Structurally equal layers become one function, so that compile time and code size do not grow with depth.
//!
//! ```text
//! (nodes of layers.0) (nodes of layers.1) ...   ->   %x1 = call @layer0(%x0, ..) params(@layers.0...); %x2 = call @layer0(%x1, ..) params(@layers.1...)
//! ```
//! A layer is the run of nodes whose origin names `layers.N`. Constants and parameters are leaves: they are copied into the function; the
//! parameters and states that a body names are listed in order of use and replaced by each call. Two layers are one function if their
//! bodies are equal after renumbering. A layer with other than one live result stays inline. Run last: later passes see the body once.

use super::{Broken, PassCx};
use rcompile_graph::{DType, FuncId, Function, Module, Node, Op, ParamId, StateId, Type, ValueId, layer_of};
use std::collections::HashMap;

/// Runs the pass.
pub fn run(module: &mut Module, cx: &mut PassCx) -> Result<bool, Broken> {
    let f = module.main().clone();
    let segments = segments(&f);
    if segments.is_empty() {
        return Ok(false);
    }
    let users = f.users();
    let mut starts = segments.into_iter().peekable();
    let mut known: HashMap<String, FuncId> = HashMap::new();
    let mut nodes: Vec<Node> = Vec::new();
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    let mut next = 0;
    let mut outlined = 0;
    while next < f.nodes.len() {
        if let Some(segment) = starts.next_if(|s| s.start == next) {
            match extract(module, &f, &users, segment.clone()) {
                Ok(body) => {
                    let func = match known.get(&body.key) {
                        Some(func) => *func,
                        None => {
                            let func = FuncId(module.functions.len() as u32);
                            let mut function = body.function;
                            function.name = format!("layer{}", known.len());
                            module.functions.push(function);
                            known.insert(body.key, func);
                            func
                        }
                    };
                    // Leaves of this segment may be used by later nodes outside of it.
                    for i in segment.clone().filter(|i| is_leaf(&f.nodes[*i])) {
                        map.insert(ValueId(i as u32), ValueId(nodes.len() as u32));
                        nodes.push(f.nodes[i].clone());
                    }
                    let inputs = body.live_in.iter().map(|v| map[v]).collect();
                    let ty = f.ty(body.live_out).clone();
                    let origin = f.node(body.live_out).origin.split('.').take(2).collect::<Vec<_>>().join(".");
                    let op = Op::Call { func, params: body.params, states: body.states };
                    map.insert(body.live_out, ValueId(nodes.len() as u32));
                    nodes.push(Node { op, inputs, ty, origin });
                    outlined += 1;
                    next = segment.end;
                    continue;
                }
                Err(reason) => cx.note(&f.nodes[next].origin, reason),
            }
        }
        let mut node = f.nodes[next].clone();
        for v in &mut node.inputs {
            let Some(new) = map.get(v) else {
                return Err(Broken(format!("{}: operand %{} vanished", node.origin, v.0)));
            };
            *v = *new;
        }
        map.insert(ValueId(next as u32), ValueId(nodes.len() as u32));
        nodes.push(node);
        next += 1;
    }
    let main = module.main_mut();
    main.nodes = nodes;
    main.inputs = f.inputs.iter().map(|v| map[v]).collect();
    main.outputs = f.outputs.iter().map(|v| map[v]).collect();
    cx.note(&module.main().name, format_args!("{outlined} layers in {} functions", known.len()));
    let swept = super::dce::run(module, cx)?;
    Ok(outlined > 0 || swept)
}

/// Ranges of node indices, one per layer.
fn segments(f: &Function) -> Vec<std::ops::Range<usize>> {
    let mut segments: Vec<(u64, std::ops::Range<usize>)> = Vec::new();
    for (i, node) in f.nodes.iter().enumerate() {
        let Some(layer) = layer_of(&node.origin) else { continue };
        match segments.last_mut() {
            Some((number, range)) if *number == layer && range.end == i => range.end = i + 1,
            _ => segments.push((layer, i..i + 1)),
        }
    }
    segments.into_iter().map(|s| s.1).collect()
}

/// A node that stands for itself, of no layer.
pub fn is_leaf(node: &Node) -> bool {
    matches!(node.op, Op::Const(_) | Op::Param(_))
}

struct Body {
    function: Function,
    key: String,
    live_in: Vec<ValueId>,
    live_out: ValueId,
    params: Vec<ParamId>,
    states: Vec<StateId>,
}

fn extract(module: &Module, f: &Function, users: &[Vec<ValueId>], range: std::ops::Range<usize>) -> Result<Body, &'static str> {
    let inside = |v: ValueId| range.contains(&v.index()) && !is_leaf(f.node(v));
    let escapes = |v: &ValueId| inside(*v) && (f.outputs.contains(v) || users[v.index()].iter().any(|u| !range.contains(&u.index())));
    let live_out: Vec<ValueId> = range.clone().map(|i| ValueId(i as u32)).filter(escapes).collect();
    let [live_out] = live_out[..] else { return Err("more than one value leaves the layer") };
    let live_in: Vec<ValueId> = {
        let mut seen = Vec::new();
        for i in range.clone() {
            for v in &f.nodes[i].inputs {
                if !inside(*v) && !is_leaf(f.node(*v)) && !seen.contains(v) {
                    seen.push(*v);
                }
            }
        }
        seen
    };
    if live_in.iter().any(|v| f.ty(*v).dtype == DType::State) {
        return Err("a state token enters the layer");
    }
    let mut function = Function::default();
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    let mut key = String::new();
    for (index, v) in live_in.iter().enumerate() {
        let id = ValueId(function.nodes.len() as u32);
        let name = format!("in{index}");
        function.nodes.push(Node { op: Op::Input { index: index as u32 }, inputs: vec![], ty: f.ty(*v).clone(), origin: String::new() });
        function.inputs.push(id);
        function.input_names.push(name);
        map.insert(*v, id);
        key.push_str(&format!("in {:?}\n", f.ty(*v)));
    }
    let (mut params, mut states): (Vec<ParamId>, Vec<StateId>) = (Vec::new(), Vec::new());
    for i in range {
        if is_leaf(&f.nodes[i]) {
            continue;
        }
        let mut node = f.nodes[i].clone();
        for v in &mut node.inputs {
            if !map.contains_key(v) && is_leaf(f.node(*v)) {
                let leaf = f.node(*v).clone();
                key.push_str(&leaf_key(module, &leaf, &mut params));
                map.insert(*v, ValueId(function.nodes.len() as u32));
                function.nodes.push(leaf);
            }
            *v = map[v];
        }
        key.push_str(&format!("{} {:?} {:?}\n", op_key(module, &node.op, &mut states), node.inputs, node.ty));
        map.insert(ValueId(i as u32), ValueId(function.nodes.len() as u32));
        function.nodes.push(node);
    }
    function.outputs = vec![map[&live_out]];
    function.params.clone_from(&params);
    function.states.clone_from(&states);
    Ok(Body { function, key, live_in, live_out, params, states })
}

fn leaf_key(module: &Module, leaf: &Node, params: &mut Vec<ParamId>) -> String {
    match leaf.op {
        Op::Param(p) => {
            let place = params.iter().position(|q| *q == p).unwrap_or_else(|| {
                params.push(p);
                params.len() - 1
            });
            let Type { dtype, shape } = &module.params[p.index()].ty;
            format!("param {place} {dtype} {shape:?}\n")
        }
        ref op => format!("{op:?} {:?}\n", leaf.ty),
    }
}

/// The op with its state replaced by the state's place in the list and its kind.
fn op_key(module: &Module, op: &Op, states: &mut Vec<StateId>) -> String {
    let mut op = op.clone();
    let mut kind = String::new();
    if let Op::KvAppend { state } | Op::Sdpa { state, .. } = &mut op {
        let place = states.iter().position(|s| s == state).unwrap_or_else(|| {
            states.push(*state);
            states.len() - 1
        });
        let s = &module.states[state.index()];
        kind = format!("{}x{} {} {}", s.kv_heads, s.head_dim, s.dtype, s.persistent);
        *state = StateId(place as u32);
    }
    format!("{op:?} {kind}")
}
