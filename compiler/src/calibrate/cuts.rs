//! A traced model cut into the programs that calibration runs, layer by layer.
//!
//! ```text
//! %x = (embedding of %token)                 first cut: what enters the layers
//! layer: %n = norm %x; %q = mm %n, @q ...    per input of linear layers whose codes are wanted: a cut that computes it from %x
//!        %y                                  a cut that computes what leaves the layer, all of its weights being codes by then
//! head:  %n = norm %x; %l = mm %n, @head     as in a layer, where codes of the head are wanted
//! ```
//! In the cuts of a layer and of the head, %x is `embedding @calibration.hidden, %token`: a table of all hidden states, looked up by row.
//! A cut names only weights whose codes are known when it runs.

use crate::error::Error;
use crate::passes::outline_layers::is_leaf;
use rcompile_graph::{Binary, DType, Dim, Function, Module, Node, Op, Param, ParamId, Recipe, StateId, Type, ValueId, layer_of};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Name of the table of hidden states.
pub const HIDDEN: &str = "calibration.hidden";

/// One program.
#[derive(Clone, Debug)]
pub struct Cut {
    /// Its entry has one output, f32.
    pub module: Module,
    /// Tensors of codes that are made from this output; none: it becomes the hidden states.
    pub tensors: Vec<String>,
}

/// The cuts of a model in order: the hidden states that enter layer 0, then layer by layer, then the head. `rows` is the number of hidden
/// states. Errors: layers that are not chained one to the next by a single value (6).
pub fn cuts(module: &Module, rows: u64) -> Result<Vec<Cut>, Error> {
    let whole = Whole::new(module, rows);
    let layers: Vec<u64> = whole.values.keys().filter_map(|layer| *layer).collect();
    let Some(first) = layers.first() else { return Err(unsupported("the model has no layers")) };
    let mut enters = whole.entering(*first)?;
    let mut cuts = vec![Cut { module: whole.cut(enters, None)?, tensors: vec![] }];
    let head = whole.inputs(None);
    for layer in &layers {
        for (x, tensors) in whole.inputs(Some(*layer)) {
            cuts.push(Cut { module: whole.cut(x, Some(enters))?, tensors });
        }
        // Nobody asks for what leaves the last layer where no codes of a head are wanted.
        if Some(layer) != layers.last() || !head.is_empty() {
            let leaves = whole.leaving(*layer)?;
            cuts.push(Cut { module: whole.cut(leaves, Some(enters))?, tensors: vec![] });
            enters = leaves;
        }
    }
    for (x, tensors) in head {
        cuts.push(Cut { module: whole.cut(x, Some(enters))?, tensors });
    }
    Ok(cuts)
}

/// The model, and what cuts ask of it again and again.
struct Whole<'m> {
    module: &'m Module,
    f: &'m Function,
    rows: u64,
    users: Vec<Vec<ValueId>>,
    /// Number of each value's layer.
    layers: Vec<Option<u64>>,
    /// Values that are no leaves, in order, by layer (`None`: those outside).
    values: BTreeMap<Option<u64>, Vec<ValueId>>,
}

impl<'m> Whole<'m> {
    fn new(module: &'m Module, rows: u64) -> Whole<'m> {
        let f = module.main();
        let layers: Vec<Option<u64>> = f.nodes.iter().map(|node| layer_of(&node.origin)).collect();
        let mut values: BTreeMap<Option<u64>, Vec<ValueId>> = BTreeMap::new();
        for id in f.ids().filter(|id| !is_leaf(f.node(*id))) {
            values.entry(layers[id.index()]).or_default().push(id);
        }
        Whole { module, f, rows, users: f.users(), layers, values }
    }

    fn of_layer(&self, layer: Option<u64>) -> impl Iterator<Item = ValueId> {
        self.values.get(&layer).into_iter().flatten().copied()
    }

    /// What the linear layers of a layer (`None`: those outside) read whose codes are wanted, in order, each with the tensors of codes.
    fn inputs(&self, layer: Option<u64>) -> Vec<(ValueId, Vec<String>)> {
        let mut inputs: Vec<(ValueId, Vec<String>)> = Vec::new();
        for id in self.of_layer(layer) {
            let node = self.f.node(id);
            let (Op::Mm { rhs_t: true }, [x, w]) = (&node.op, &node.inputs[..]) else { continue };
            let Op::Param(p) = self.f.node(*w).op else { continue };
            let mut tensors = Vec::new();
            given(&self.module.params[p.index()], &mut tensors);
            if tensors.is_empty() {
                continue;
            }
            match inputs.iter_mut().find(|(known, _)| known == x) {
                Some((_, list)) => list.extend(tensors),
                None => inputs.push((*x, tensors)),
            }
        }
        inputs
    }

    /// The value that a layer hands on.
    fn leaving(&self, layer: u64) -> Result<ValueId, Error> {
        let outside = |id: &ValueId| self.layers[id.index()] != Some(layer);
        let leaves = |id: &ValueId| self.users[id.index()].iter().any(outside) || self.f.outputs.contains(id);
        let leaving: Vec<ValueId> = self.of_layer(Some(layer)).filter(leaves).collect();
        match leaving[..] {
            [one] => Ok(one),
            _ => Err(unsupported(&format!("{} values leave layer {layer}, expected one", leaving.len()))),
        }
    }

    /// The value from outside of all layers that the first one reads and that depends on the tokens.
    fn entering(&self, first: u64) -> Result<ValueId, Error> {
        let f = self.f;
        let mut depends = vec![false; f.nodes.len()];
        for id in f.ids() {
            let node = f.node(id);
            let is_token =
                |n: &Node| matches!(n.op, Op::Input { index } if f.input_names.get(index as usize).is_some_and(|n| n == "token"));
            depends[id.index()] = is_token(node) || node.inputs.iter().any(|v| depends[v.index()]);
        }
        let mut found: Vec<ValueId> = self.of_layer(Some(first)).flat_map(|id| f.node(id).inputs.iter().copied()).collect();
        found.retain(|v| depends[v.index()] && self.layers[v.index()] != Some(first));
        found.sort();
        found.dedup();
        match found[..] {
            [one] => Ok(one),
            _ => Err(unsupported(&format!("{} values enter the layers, expected one", found.len()))),
        }
    }

    /// The program that computes `output` from the row tables and, if `hidden` is given, from its table.
    fn cut(&self, output: ValueId, hidden: Option<ValueId>) -> Result<Module, Error> {
        let &Whole { module, f, rows, .. } = self;
        let mut wanted = BTreeSet::new();
        let mut work = vec![output];
        while let Some(id) = work.pop() {
            if wanted.insert(id) && Some(id) != hidden {
                work.extend(&f.node(id).inputs);
            }
        }
        let mut new = Module { symbols: module.symbols.clone(), ..Module::default() };
        let mut function = Function { name: f.name.clone(), ..Function::default() };
        let mut map: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        let (mut params, mut states): (HashMap<ParamId, ParamId>, HashMap<StateId, StateId>) = Default::default();
        let add = |function: &mut Function, node: Node| {
            function.nodes.push(node);
            ValueId(function.nodes.len() as u32 - 1)
        };
        // Inputs stay: they are the entry's contract.
        for (v, name) in f.inputs.iter().zip(&f.input_names) {
            if hidden.is_some() && name == "token" && wanted.contains(v) {
                return Err(unsupported("a layer reads the tokens"));
            }
            let id = add(&mut function, f.node(*v).clone());
            function.inputs.push(id);
            function.input_names.push(name.clone());
            map.insert(*v, id);
        }
        if let Some(x) = hidden {
            let ty = f.ty(x).clone();
            let width = ty.shape.last().copied().filter(|d| ty.rank() == 2 && ty.dtype == DType::F32 && d.constant().is_some());
            let Some(width) = width else { return Err(unsupported("what enters a layer is no matrix of f32")) };
            let table = Type::new(DType::F32, [Dim::Const(rows), width]);
            new.params.push(Param { name: HIDDEN.into(), ty: table.clone(), recipe: Recipe::Source { tensor: HIDDEN.into() } });
            let node = |op, inputs, ty| Node { op, inputs, ty, origin: String::new() };
            let table = add(&mut function, node(Op::Param(ParamId(0)), vec![], table));
            let token = f.input_names.iter().position(|n| n == "token").map(|i| function.inputs[i]);
            let Some(token) = token else { return Err(unsupported("the model has no tokens")) };
            map.insert(x, add(&mut function, node(Op::Embedding, vec![table, token], ty)));
        }
        for id in wanted {
            if map.contains_key(&id) {
                continue;
            }
            let mut node = f.node(id).clone();
            node.inputs.iter_mut().for_each(|v| *v = map[v]);
            match &mut node.op {
                Op::Param(p) => {
                    *p = *params.entry(*p).or_insert_with(|| {
                        new.params.push(module.params[p.index()].clone());
                        ParamId(new.params.len() as u32 - 1)
                    });
                }
                Op::KvAppend { state } | Op::Sdpa { state, .. } => {
                    *state = *states.entry(*state).or_insert_with(|| {
                        new.states.push(module.states[state.index()].clone());
                        StateId(new.states.len() as u32 - 1)
                    });
                }
                _ => {}
            }
            map.insert(id, add(&mut function, node));
        }
        // Times one: programs write no output straight from attention.
        let ty = f.ty(output).clone();
        let one = Node { op: Op::Const(1.0), inputs: vec![], ty: Type::new(DType::F32, []), origin: String::new() };
        let one = add(&mut function, one);
        let product = Node { op: Op::Binary(Binary::Mul), inputs: vec![map[&output], one], ty, origin: String::new() };
        function.outputs = vec![add(&mut function, product)];
        new.functions = vec![function];
        new.main = rcompile_graph::FuncId(0);
        rcompile_graph::verify(&new).map_err(|e| Error::bug("calibrate cut", e))?;
        Ok(new)
    }
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported { place: "--calibrate".into(), what: what.into(), help: Some("leave it out: codes are rounded to nearest".into()) }
}

/// Tensors of codes in a weight's recipe.
fn given(param: &Param, into: &mut Vec<String>) {
    match &param.recipe {
        _ if !param.ty.dtype.is_quantised() => {}
        Recipe::Source { tensor } => into.push(tensor.clone()),
        Recipe::Concat(parts) => into.extend(parts.iter().filter_map(|p| match p {
            Recipe::Source { tensor } => Some(tensor.clone()),
            _ => None,
        })),
        _ => {}
    }
}
