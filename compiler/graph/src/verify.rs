//! The verifier. The rules below are the specification of the IR: a module that keeps them prints, parses back to itself, and the
//! interpreter and all passes accept it.
//!
//! Module
//! - `main` is one of the functions. Names of symbols, parameters, states and functions are unique among their kind and not empty.
//! - A symbol's bound is at least 1.
//! - A parameter has a constant shape and is no state. Its recipe is nested at most [`crate::recipe::DEPTH_MAX`] deep, is possible
//!   ([`crate::recipe::known_type`]), and does not contradict the declared type where it can be told without the checkpoint.
//! - A state has at least one head of width at least 1, and a float type or q8.
//!
//! Function
//! - Every input has a name, unique in the function; `inputs[i]` is the node `input {index=i}`, and there is no other input node.
//! - There is at least one output; outputs are nodes and no states. The entry takes no states as inputs.
//! - `params` and `states` name existing ones, each once. A function other than `main` lists those that it reads and writes itself.
//!
//! Node
//! - Operands are earlier nodes of the same function. Parameters, states, functions and symbols named exist.
//! - The type is what [`crate::infer::infer`] gives. At the symbols' bounds a value has less than 2^48 elements.
//! - A `reshape` has at most one symbolic dimension. An integer or bool `const` is a value of its type. `eps` is finite and at least 0.
//! - Quantised values are operands of `mm`, `embedding` (the first) and `call` only.
//! - State tokens are operands of `sdpa` (the second), `kv_append` (after the fourth) and `call` only.
//! - The token of an `sdpa` comes from a `kv_append` to the same state (so that reads follow writes), or is an input of a function
//!   whose callers pass such a token. A token among the order operands of a `kv_append` is of the same state too.
//! - In attention expressions `score` gives a number and `mask` a bool; `mask` does not use `score`; only `neg`, `abs`, `exp`, `tanh`,
//!   `not` are used as functions; nested at most [`crate::parse::ATTN_DEPTH_MAX`] deep.
//!
//! Calls
//! - No function calls itself, directly or through others. A call replaces all `params` by ones of the same type and all `states` by ones
//!   of the same heads, width, type and persistence, and the callee has one output.

use crate::infer::infer;
use crate::ops::{AttnExpr, AttnVar, Binary, Op, Unary};
use crate::parse::ATTN_DEPTH_MAX;
use crate::print::{self, Place};
use crate::quant::Group;
use crate::types::{DType, Dim, Function, Module, StateId, Type, ValueId};
use std::collections::{HashMap, HashSet};
use std::fmt;

/// Elements of a value stay below this.
pub const ELEMENTS_MAX: u64 = 1 << 48;

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyError {
    /// Where.
    pub place: Place,
    /// What is wrong.
    pub what: String,
}

/// All broken rules of a module. Displays the module's text with a line `^ error: ...` under each guilty line; of a long module only the
/// lines around errors are shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyErrors {
    /// In order of the text.
    pub errors: Vec<VerifyError>,
    text: String,
}

impl std::error::Error for VerifyErrors {}

impl fmt::Display for VerifyErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.errors.len();
        writeln!(f, "the graph breaks {count} rule{} of the IR (this is a bug of rcompile):", if count == 1 { "" } else { "s" })?;
        f.write_str(&self.text)
    }
}

/// Modules of at most this many lines are shown whole.
const WHOLE_LINES_MAX: usize = 100;
/// Lines shown before and after a guilty one.
const CONTEXT_LINES: usize = 3;

fn annotate(module: &Module, errors: &[VerifyError]) -> String {
    let lines = print::lines(module);
    let mut notes: HashMap<Place, Vec<&str>> = HashMap::new();
    for e in errors {
        notes.entry(e.place).or_default().push(&e.what);
    }
    // The first line of a place takes its notes.
    let guilty: Vec<Option<Vec<&str>>> = lines.iter().map(|l| notes.remove(&l.place)).collect();
    let whole = lines.len() <= WHOLE_LINES_MAX;
    let mut shown = vec![whole; lines.len()];
    for (i, line) in lines.iter().enumerate() {
        if guilty[i].is_some() {
            shown[i.saturating_sub(CONTEXT_LINES)..(i + CONTEXT_LINES + 1).min(lines.len())].fill(true);
        }
        if matches!(line.place, Place::Header(f) if errors.iter().any(|e| matches!(e.place, Place::Node(g, _) | Place::Return(g) if f == g)))
        {
            shown[i] = true;
        }
    }
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        if !shown[i] {
            if i == 0 || shown[i - 1] {
                out.push_str("  ...\n");
            }
            continue;
        }
        out.push_str(&line.text);
        out.push('\n');
        let indent = line.text.len() - line.text.trim_start().len();
        for note in guilty[i].iter().flatten() {
            out.push_str(&format!("{:indent$}^ error: {note}\n", ""));
        }
    }
    // A node that has no line of its own (an input in the header).
    for (place, whats) in notes {
        for what in whats {
            out.push_str(&format!("^ error at {place:?}: {what}\n"));
        }
    }
    out
}

/// Checks every rule; errors hold all broken ones.
pub fn verify(module: &Module) -> Result<(), VerifyErrors> {
    let mut v = Verifier { module, errors: Vec::new() };
    v.module();
    for f in 0..module.functions.len() {
        v.function(f);
    }
    v.recursion();
    if v.errors.is_empty() {
        return Ok(());
    }
    let mut errors = v.errors;
    for e in &mut errors {
        // Inputs that only the header shows.
        if let Place::Node(f, n) = e.place
            && print::implied_input(&module.functions[f], ValueId(n as u32))
        {
            e.place = Place::Header(f);
        }
    }
    errors.sort_by_key(|e| e.place);
    let text = annotate(module, &errors);
    Err(VerifyErrors { errors, text })
}

struct Verifier<'m> {
    module: &'m Module,
    errors: Vec<VerifyError>,
}

impl<'m> Verifier<'m> {
    fn error(&mut self, place: Place, what: impl Into<String>) {
        self.errors.push(VerifyError { place, what: what.into() });
    }
    fn unique<'n>(&mut self, names: impl Iterator<Item = &'n str>, place: impl Fn(usize) -> Place, kind: &str) {
        let mut seen = HashSet::new();
        for (i, name) in names.enumerate() {
            if name.is_empty() {
                self.error(place(i), format!("{kind} has no name"));
            }
            if !seen.insert(name) {
                self.error(place(i), format!("another {kind} has this name"));
            }
        }
    }

    fn module(&mut self) {
        let m = self.module;
        self.unique(m.symbols.iter().map(|s| s.name.as_str()), Place::Symbol, "symbol");
        self.unique(m.params.iter().map(|p| p.name.as_str()), Place::Param, "parameter");
        self.unique(m.states.iter().map(|s| s.name.as_str()), Place::State, "state");
        self.unique(m.functions.iter().map(|f| f.name.as_str()), Place::Header, "function");
        if m.main.index() >= m.functions.len() {
            self.error(Place::Main, "main is no function");
        }
        for (i, s) in m.symbols.iter().enumerate() {
            if s.bound < 1 {
                self.error(Place::Symbol(i), "bound must be at least 1");
            }
        }
        for (i, p) in m.params.iter().enumerate() {
            let place = Place::Param(i);
            self.ty(place, &p.ty);
            if p.ty.dtype == DType::State || p.ty.shape.iter().any(|d| d.constant().is_none()) {
                self.error(place, "a parameter has a constant shape and an element type");
            }
            match crate::recipe::known_type(&p.recipe) {
                Err(what) => self.error(place, what),
                Ok(known) if !known.allows(&p.ty) => {
                    let dims: Vec<String> = known.dims.iter().map(|d| d.map_or("?".into(), |n| n.to_string())).collect();
                    let dtype = known.dtype.map_or("?", DType::name);
                    let more = if known.rank.is_none() { ", .." } else { "" };
                    self.error(place, format!("the recipe gives {dtype}[{}{more}]", dims.join(", ")));
                }
                Ok(_) => {}
            }
        }
        for (i, s) in m.states.iter().enumerate() {
            if s.kv_heads < 1 || s.head_dim < 1 || !(s.dtype.is_float() || s.dtype == DType::Q8(Group::Row)) {
                self.error(Place::State(i), "a state has at least one head of width at least 1 and a float type or q8");
            }
        }
    }

    /// Symbols exist, size is bounded.
    fn ty(&mut self, place: Place, ty: &Type) {
        let mut elements = 1u64;
        for dim in &ty.shape {
            let extent = match dim {
                Dim::Const(n) => *n,
                Dim::Sym(s) => match self.module.symbols.get(s.index()) {
                    Some(symbol) => symbol.bound,
                    None => return self.error(place, format!("no symbol ?{}", s.0)),
                },
            };
            elements = elements.saturating_mul(extent.max(1));
        }
        if elements >= ELEMENTS_MAX {
            self.error(place, "a value has less than 2^48 elements");
        }
    }

    fn function(&mut self, index: usize) {
        let m = self.module;
        let f = &m.functions[index];
        let header = Place::Header(index);
        self.unique(f.input_names.iter().map(String::as_str), |_| header, "input");
        if f.input_names.len() != f.inputs.len() {
            self.error(header, format!("{} inputs have {} names", f.inputs.len(), f.input_names.len()));
        }
        for (i, id) in f.inputs.iter().enumerate() {
            if f.nodes.get(id.index()).map(|n| &n.op) != Some(&Op::Input { index: i as u32 }) {
                self.error(header, format!("input {i} is no node input {{index={i}}}"));
            }
        }
        if f.params.iter().any(|p| p.index() >= m.params.len()) || f.params.iter().collect::<HashSet<_>>().len() != f.params.len() {
            self.error(header, "params must exist, each once");
        }
        if f.states.iter().any(|s| s.index() >= m.states.len()) || f.states.iter().collect::<HashSet<_>>().len() != f.states.len() {
            self.error(header, "states must exist, each once");
        }
        for id in f.ids() {
            self.node(index, f, id);
        }
        if f.outputs.is_empty() {
            self.error(Place::Return(index), "a function has an output");
        }
        for o in &f.outputs {
            match f.nodes.get(o.index()) {
                None => self.error(Place::Return(index), format!("no value %?{}", o.0)),
                Some(n) if n.ty.dtype == DType::State => self.error(Place::Return(index), "a state cannot be returned"),
                Some(_) => {}
            }
        }
    }

    fn node(&mut self, index: usize, f: &'m Function, id: ValueId) {
        let m = self.module;
        let node = f.node(id);
        let place = Place::Node(index, id.index());
        self.ty(place, &node.ty);
        if let Some(late) = node.inputs.iter().find(|i| i.index() >= id.index()) {
            // Their types mean nothing here.
            return self.error(place, format!("operand %{} is no earlier node", late.0));
        }
        let types: Vec<&Type> = node.inputs.iter().map(|i| f.ty(*i)).collect();
        match infer(m, &node.op, &types, Some(&node.ty)) {
            Err(e) => return self.error(place, e.to_string()),
            Ok(ty) if ty != node.ty => self.error(place, format!("the op gives {}", print::TypeText(m, &ty))),
            Ok(_) => {}
        }
        for (i, ty) in types.iter().enumerate() {
            let allowed = match node.op {
                Op::Sdpa { .. } => i == 1,
                Op::KvAppend { .. } => i >= 4,
                Op::Call { .. } => true,
                _ => false,
            };
            if ty.dtype == DType::State && !allowed {
                self.error(place, "a state token is no operand here");
            }
            let allowed = match node.op {
                Op::Mm { .. } | Op::Call { .. } => true,
                Op::Embedding => i == 0,
                _ => false,
            };
            if ty.dtype.is_quantised() && !allowed {
                self.error(place, "a quantised value is an operand of mm, embedding (the first) and call only");
            }
        }
        let is_called = m.main.index() < m.functions.len() && m.main.index() != index;
        let listed = match &node.op {
            Op::Param(p) => f.params.contains(p),
            Op::Sdpa { state, .. } | Op::KvAppend { state } => f.states.contains(state),
            _ => true,
        };
        if is_called && !listed {
            self.error(place, "uses a parameter or state that the function does not list");
        }
        match &node.op {
            Op::Input { index: i } => {
                if f.inputs.get(*i as usize) != Some(&id) {
                    self.error(place, "input is not in the function's list");
                }
                if node.ty.dtype == DType::State && m.main.index() == index {
                    self.error(place, "the entry takes no states as inputs");
                }
            }
            Op::Reshape if node.ty.shape.iter().filter(|d| d.constant().is_none()).count() > 1 => {
                self.error(place, "a reshape has at most one symbolic dimension");
            }
            Op::Const(c) if !node.ty.dtype.is_float() && crate::tensor::round(node.ty.dtype, *c) != *c => {
                self.error(place, format!("{c} is no value of {}", node.ty.dtype));
            }
            Op::RmsNorm { eps } | Op::LayerNorm { eps } if !eps.is_finite() || *eps < 0.0 => {
                self.error(place, "eps must be finite and at least 0");
            }
            Op::KvAppend { state } => {
                for token in &node.inputs[4..] {
                    self.token(place, f, *token, *state);
                }
            }
            Op::Sdpa { state, score, mask } => {
                self.token(place, f, node.inputs[1], *state);
                self.attention(place, "score", score, Kind::Number);
                self.attention(place, "mask", mask, Kind::Bool);
            }
            Op::Call { .. } => self.call(place, f, id),
            _ => {}
        }
    }

    /// `token` must come from a write to `state`; callers are asked for the ones of inputs.
    fn token(&mut self, place: Place, f: &Function, token: ValueId, state: StateId) {
        match &f.node(token).op {
            Op::KvAppend { state: written } if *written == state => {}
            Op::Input { .. } => {}
            _ => self.error(place, format!("%{} is no write to the state that is used here", token.0)),
        }
    }

    fn call(&mut self, place: Place, f: &Function, id: ValueId) {
        let m = self.module;
        let node = f.node(id);
        let Op::Call { func, states, .. } = &node.op else { return };
        let called = &m.functions[func.index()];
        let shape = |s: &StateId| m.states.get(s.index()).map(|s| (s.kv_heads, s.head_dim, s.dtype, s.persistent));
        for (formal, actual) in called.states.iter().zip(states) {
            if shape(formal).is_none() || shape(formal) != shape(actual) {
                self.error(place, "the states have another shape than the callee's");
            }
        }
        // Tokens that the callee takes as inputs.
        for user in &called.nodes {
            let (used, tokens) = match &user.op {
                Op::Sdpa { state, .. } => (*state, user.inputs.get(1..2).unwrap_or(&[])),
                Op::KvAppend { state } => (*state, user.inputs.get(4..).unwrap_or(&[])),
                _ => continue,
            };
            let actual = called.states.iter().position(|s| *s == used).and_then(|i| states.get(i)).copied().unwrap_or(used);
            for token in tokens {
                if let Some(Op::Input { index }) = called.nodes.get(token.index()).map(|n| &n.op)
                    && let Some(passed) = node.inputs.get(*index as usize)
                {
                    self.token(place, f, *passed, actual);
                }
            }
        }
    }

    fn recursion(&mut self) {
        let m = self.module;
        let count = m.functions.len();
        let callees: Vec<HashSet<usize>> = m
            .functions
            .iter()
            .map(|f| f.nodes.iter().filter_map(|n| n.op.callee()).map(|c| c.index()).filter(|c| *c < count).collect())
            .collect();
        let reached: Vec<Vec<bool>> = (0..count)
            .map(|start| {
                let mut reached = vec![false; count];
                let mut open = vec![start];
                while let Some(f) = open.pop() {
                    if !std::mem::replace(&mut reached[f], true) {
                        open.extend(&callees[f]);
                    }
                }
                reached
            })
            .collect();
        for (i, f) in m.functions.iter().enumerate() {
            for (n, node) in f.nodes.iter().enumerate() {
                if node.op.callee().and_then(|c| reached.get(c.index())).is_some_and(|r| r[i]) {
                    self.error(Place::Node(i, n), "calls may not be recursive");
                }
            }
        }
    }

    fn attention(&mut self, place: Place, what: &str, expr: &AttnExpr, want: Kind) {
        match kind(expr, what == "score", 1) {
            Err(e) => self.error(place, format!("{what}: {e}")),
            Ok(found) if found != want => self.error(place, format!("{what} must be a {want}, it is a {found}")),
            Ok(_) => {}
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Number,
    Bool,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Kind::Number { "number" } else { "bool" })
    }
}

fn kind(expr: &AttnExpr, scored: bool, depth: usize) -> Result<Kind, String> {
    if depth > ATTN_DEPTH_MAX {
        return Err(format!("nested deeper than {ATTN_DEPTH_MAX}"));
    }
    let need = |x: &AttnExpr, want: Kind| match kind(x, scored, depth + 1)? {
        found if found == want => Ok(want),
        found => Err(format!("{expr} needs a {want}, {x} is a {found}")),
    };
    match expr {
        AttnExpr::Var(AttnVar::Score) if !scored => Err("score is not known here".into()),
        AttnExpr::Var(_) | AttnExpr::Const(_) => Ok(Kind::Number),
        AttnExpr::True => Ok(Kind::Bool),
        AttnExpr::Unary(Unary::Not, x) => need(x, Kind::Bool),
        AttnExpr::Unary(Unary::Neg | Unary::Abs | Unary::Exp | Unary::Tanh, x) => need(x, Kind::Number),
        AttnExpr::Unary(other, _) => Err(format!("{} is no function of attention expressions", other.name())),
        AttnExpr::Binary(op, a, b) => {
            let want = if matches!(op, Binary::And | Binary::Or) { Kind::Bool } else { Kind::Number };
            need(a, want)?;
            need(b, want)
        }
        AttnExpr::Compare(_, a, b) => {
            need(a, Kind::Number)?;
            need(b, Kind::Number)?;
            Ok(Kind::Bool)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Compare;
    use crate::parse::parse;
    use crate::random::{self, Options, Rng};
    use crate::types::{FuncId, Node, Param, ParamId, Recipe, SymbolId};
    use proptest::prelude::*;

    const GOOD: &str = r#"module {
  symbol T<=4
  param @w : f32[4] = source "w"
  param @v : f32[4] = source "v"
  state @a {kv_heads=1, head_dim=4, dtype=f32}
  state @b {kv_heads=1, head_dim=4, dtype=f32}
  func @f(%x: f32[T, 4]) params(@w) {
    %1 = param @w : f32[4]
    %2 = rms_norm %x, %1 {eps=0.5} : f32[T, 4]   // norm
    return %2
  }
  func @reader(%q: f32[T, 1, 4], %kv: state, %i: i32[T]) states(@a) {
    %3 = sdpa %q, %kv, %i, %i {state=@a, score="score", mask="key <= query"} : f32[T, 1, 4]
    return %3
  }
  func @main(%x: f32[T, 4], %i: i32[T]) {
    %2 = call @f(%x) params(@v) : f32[T, 4]
    %3 = reshape %2 : f32[T, 1, 4]
    %4 = kv_append %3, %3, %i, %i {state=@b} : state
    %5 = call @reader(%3, %4, %i) states(@b) : f32[T, 1, 4]
    %6 = const 3 : i32
    return %5
  }
  main @main
}
"#;

    fn good() -> Module {
        parse(GOOD).unwrap()
    }
    /// What is wrong after the change, all errors as `line text: what`.
    fn broken(change: impl FnOnce(&mut Module)) -> Vec<String> {
        let mut module = good();
        change(&mut module);
        let errors = verify(&module).unwrap_err();
        let text = errors.to_string();
        for e in &errors.errors {
            assert!(text.contains(&format!("^ error: {}", e.what)), "{text}");
        }
        errors.errors.into_iter().map(|e| e.what).collect()
    }
    fn replaced(from: &str, to: &str) -> Vec<String> {
        assert_eq!(GOOD.matches(from).count(), 1, "{from}");
        let module = parse(&GOOD.replace(from, to)).unwrap();
        verify(&module).unwrap_err().errors.into_iter().map(|e| e.what).collect()
    }

    #[test]
    fn errors_stand_in_the_text_under_the_guilty_line() {
        let text = GOOD.replace("{eps=0.5} : f32[T, 4]", "{eps=-0.5} : f32[T, 4]").replace("T<=4", "T<=0");
        let errors = verify(&parse(&text).unwrap()).unwrap_err().to_string();
        assert!(errors.starts_with("the graph breaks 2 rules of the IR"), "{errors}");
        assert!(errors.contains("  symbol T<=0\n  ^ error: bound must be at least 1\n"), "{errors}");
        let want =
            "    %2 = rms_norm %x, %1 {eps=-0.5} : f32[T, 4]   // norm\n    ^ error: eps must be finite and at least 0\n    return %2\n";
        assert!(errors.contains(want), "{errors}");
    }

    #[test]
    fn of_a_long_module_only_the_surroundings_are_shown() {
        let mut module = good();
        let main = module.main_mut();
        for _ in 0..500 {
            let node = main.nodes[6].clone();
            main.nodes.push(node);
        }
        main.nodes[300].op = Op::Const(0.5);
        let errors = verify(&module).unwrap_err().to_string();
        assert!(errors.lines().count() < 20 && errors.contains("...\n"), "{errors}");
        assert!(
            errors.contains("func @main(") && errors.contains("%300 = const 0.5 : i32\n    ^ error: 0.5 is no value of i32"),
            "{errors}"
        );
    }

    #[test]
    fn the_good_module_is_good() {
        verify(&good()).unwrap();
        assert_eq!(good().to_string(), GOOD);
    }

    #[test]
    fn rules_of_modules() {
        assert_eq!(broken(|m| m.main = FuncId(3)), ["main is no function"]);
        assert_eq!(broken(|m| m.symbols.push(m.symbols[0].clone())), ["another symbol has this name"]);
        assert_eq!(broken(|m| m.params[1].name = "w".into()), ["another parameter has this name"]);
        assert_eq!(broken(|m| m.states[1].name = "a".into()), ["another state has this name"]);
        assert_eq!(broken(|m| m.functions[1].name = String::new()), ["function has no name"]);
        assert_eq!(broken(|m| m.symbols[0].bound = 0), ["bound must be at least 1"]);
        assert!(broken(|m| m.params[1].ty.shape[0] = Dim::Sym(SymbolId(0)))[0].contains("constant shape"));
        assert!(broken(|m| m.params[1].ty.shape.push(Dim::Sym(SymbolId(0))))[0].contains("constant shape"));
        assert!(broken(|m| m.params[1].ty = Type::new(DType::State, []))[0].contains("element type"));
        assert!(broken(|m| m.params[1].ty.shape = vec![Dim::Const(1 << 40); 2])[0].contains("2^48"));
        assert!(broken(|m| m.params[1].ty.shape[0] = Dim::Sym(SymbolId(7)))[0].contains("no symbol ?7"));
        assert!(replaced("source \"v\"", "convert(source \"v\", bf16)")[0].contains("the recipe gives bf16[, ..]"));
        assert_eq!(replaced("source \"v\"", "slice(source \"v\", 0, 3)"), ["the recipe gives ?[3, ..]"]);
        assert!(replaced("source \"v\"", "concat()")[0].contains("concat of nothing"));
        let deep = (0..40).fold(Recipe::Source { tensor: "v".into() }, |r, _| Recipe::Transpose(Box::new(r)));
        assert!(broken(|m| m.params[1].recipe = deep)[0].contains("deeper"));
        assert!(broken(|m| m.states[0].kv_heads = 0).iter().any(|e| e.contains("at least one head")));
        assert!(broken(|m| m.states[0].head_dim = 0).iter().any(|e| e.contains("at least one head")));
        assert!(broken(|m| m.states[0].dtype = DType::I8).iter().any(|e| e.contains("float type")));
        verify(&parse(&GOOD.replace("dtype=f32", "dtype=q8").replace("T<=4", "T<=1")).unwrap()).unwrap();
        let large = |rows| {
            move |m: &mut Module| {
                let ty = Type::new(DType::F32, [Dim::Const(rows), Dim::Const(1 << 24)]);
                m.params.push(Param { name: "large".into(), ty, recipe: Recipe::Source { tensor: "large".into() } });
            }
        };
        assert_eq!(broken(large(1 << 24)), ["a value has less than 2^48 elements"]);
        let mut module = good();
        large((1 << 24) - 1)(&mut module);
        verify(&module).unwrap();
    }

    #[test]
    fn rules_of_functions() {
        assert_eq!(broken(|m| m.functions[1].input_names[1] = "q".into()), ["another input has this name"]);
        assert_eq!(broken(|m| m.functions[0].input_names.push("y".into())), ["1 inputs have 2 names"]);
        assert!(broken(|m| m.functions[0].inputs[0] = ValueId(1)).contains(&"input 0 is no node input {index=0}".into()));
        assert!(broken(|m| m.functions[0].inputs[0] = ValueId(99)).contains(&"input 0 is no node input {index=0}".into()));
        let second = |m: &mut Module| {
            let node = Node { op: Op::Input { index: 0 }, ..m.functions[0].nodes[0].clone() };
            m.functions[0].nodes.push(node);
        };
        assert_eq!(broken(second), ["input is not in the function's list"]);
        assert_eq!(broken(|m| m.main_mut().outputs.clear()), ["a function has an output"]);
        assert_eq!(broken(|m| m.main_mut().outputs[0] = ValueId(99)), ["no value %?99"]);
        assert_eq!(broken(|m| m.main_mut().outputs[0] = ValueId(4)), ["a state cannot be returned"]);
        assert!(broken(|m| m.main = FuncId(1)).contains(&"the entry takes no states as inputs".into()));
        let unlisted = "uses a parameter or state that the function does not list";
        assert_eq!(broken(|m| m.functions[0].nodes[1].op = Op::Param(ParamId(1))), [unlisted]);
        assert!(broken(|m| m.functions[1].states.clear()).contains(&unlisted.into()));
        assert!(broken(|m| m.functions[0].params = vec![ParamId(0), ParamId(0)]).contains(&"params must exist, each once".into()));
        assert!(broken(|m| m.functions[0].params = vec![ParamId(2)]).contains(&"params must exist, each once".into()));
        assert!(broken(|m| m.functions[1].states = vec![StateId(2)]).contains(&"states must exist, each once".into()));
        assert!(broken(|m| m.functions[1].states = vec![StateId(0); 2]).contains(&"states must exist, each once".into()));
    }

    #[test]
    fn rules_of_nodes() {
        assert_eq!(broken(|m| m.main_mut().nodes[3].inputs[0] = ValueId(5)), ["operand %5 is no earlier node"]);
        assert_eq!(broken(|m| m.main_mut().nodes[3].inputs[0] = ValueId(3)), ["operand %3 is no earlier node"]);
        assert_eq!(broken(|m| m.main_mut().nodes[3].inputs[0] = ValueId(99)), ["operand %99 is no earlier node"]);
        assert!(broken(|m| m.functions[0].nodes[1].op = Op::Param(ParamId(9)))[0].contains("no such parameter"));
        assert_eq!(broken(|m| m.functions[0].nodes[2].ty.dtype = DType::F16)[0], "the op gives f32[T, 4]");
        assert_eq!(replaced("eps=0.5", "eps=inf"), ["eps must be finite and at least 0"]);
        verify(&parse(&GOOD.replace("eps=0.5", "eps=0")).unwrap()).unwrap();
        assert_eq!(replaced("const 3 : i32", "const 3.5 : i32"), ["3.5 is no value of i32"]);
        assert_eq!(replaced("const 3 : i32", "const inf : i32"), ["inf is no value of i32"]);
        assert_eq!(replaced("const 3 : i32", "const 2 : bool"), ["2 is no value of bool"]);
        let expand = "%7 = expand %x : f32[T, T, 4]\n %6 = reshape %7 : f32[T, T, 2, 2]";
        assert!(replaced("%6 = const 3 : i32", expand).iter().any(|e| e.contains("at most one symbolic")));
        assert_eq!(replaced("%6 = const 3 : i32", "%6 = reshape %4 : state"), ["a state token is no operand here"]);
        let big = "%6 = const 3 : i32 %7 = expand %6 : i32[T, 1000000000, 1000000000]";
        assert_eq!(replaced("%6 = const 3 : i32", big), ["a value has less than 2^48 elements"]);
    }

    #[test]
    fn rules_of_quantised_values() {
        let check = |line: &str| {
            let text = GOOD.replace("%6 = const 3 : i32", &format!("%7 = convert %x : q8[T, 4] {line}"));
            let multiply = "func @g(%q: q8[T, 4]) { %1 = mm %q, %q {rhs_t} return %1 }";
            verify(&parse(&text.replace("  main @", &format!("{multiply} main @"))).unwrap())
        };
        for line in ["%6 = mm %x, %7 {rhs_t}", "%6 = embedding %7, %i", "%6 = call @g(%7) : f32[T, T]"] {
            check(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
        for line in ["%6 = reshape %7 : q8[T, 2, 2]", "%6 = convert %7 : f32[T, 4]", "%6 = index_select %7, %8"] {
            let errors = check(&format!("%9 = const 0 : i32 %8 = expand %9 : i32[4] {line}")).unwrap_err().errors;
            let whats: Vec<&str> = errors.iter().map(|e| e.what.as_str()).collect();
            assert_eq!(whats, ["a quantised value is an operand of mm, embedding (the first) and call only"], "{line}");
        }
    }

    #[test]
    fn rules_of_tokens() {
        let other = "%6 = kv_append %3, %3, %i, %i, %4 {state=@a} : state";
        assert_eq!(replaced("%6 = const 3 : i32", other), ["%4 is no write to the state that is used here"]);
        verify(&parse(&GOOD.replace("%6 = const 3 : i32", &other.replace("@a", "@b"))).unwrap()).unwrap();
        let read = r#"%6 = sdpa %3, %4, %i, %i {state=@a, score="score", mask="true"} : f32[T, 1, 4]"#;
        assert_eq!(replaced("%6 = const 3 : i32", read), ["%4 is no write to the state that is used here"]);
        // The callee reads @a here, but the caller's token is of @b.
        assert_eq!(replaced(" states(@b)", " states(@a)"), ["%4 is no write to the state that is used here"]);
        // This one writes after the write that the token stands for.
        let writer = "func @writer(%k: f32[T, 1, 4], %kv: state, %i: i32[T]) states(@a) {
            %1 = kv_append %k, %k, %i, %i, %kv {state=@a}
            %2 = sdpa %k, %1, %i, %i {state=@a, score=\"score\", mask=\"true\"}
            return %2 } main @main";
        let call = |state: &str| {
            let call = format!("%6 = call @writer(%3, %4, %i) states({state}) : f32[T, 1, 4]");
            verify(&parse(&GOOD.replace("%6 = const 3 : i32", &call).replace("main @main", writer)).unwrap())
        };
        call("@b").unwrap();
        assert_eq!(call("@a").unwrap_err().errors[0].what, "%4 is no write to the state that is used here");
    }

    #[test]
    fn rules_of_attention_expressions() {
        let score = |text: &str| replaced("score=\"score\"", &format!("score=\"{text}\"")).concat();
        let mask = |text: &str| replaced("mask=\"key <= query\"", &format!("mask=\"{text}\"")).concat();
        assert_eq!(score("key < 3"), "score: score must be a number, it is a bool".replace("score: ", ""));
        assert_eq!(mask("key"), "mask must be a bool, it is a number");
        assert_eq!(mask("score > 1"), "mask: score is not known here");
        assert_eq!(score("erf(score)"), "score: erf is no function of attention expressions");
        assert_eq!(score("score + true"), "score: score + true needs a number, true is a bool");
        assert_eq!(mask("key & true"), "mask: key & true needs a bool, key is a number");
        assert_eq!(mask("!key"), "mask: !key needs a bool, key is a number");
        assert_eq!(mask("(key < 1) < 2"), "mask: (key < 1) < 2 needs a number, key < 1 is a bool");
        assert_eq!(mask("1 < true"), "mask: 1 < true needs a number, true is a bool");
        let deep = |functions| {
            move |m: &mut Module| {
                if let Op::Sdpa { score, .. } = &mut m.functions[1].nodes[3].op {
                    *score = (0..functions).fold(AttnExpr::score(), |e, _| AttnExpr::Unary(Unary::Abs, Box::new(e)));
                }
            }
        };
        assert!(broken(deep(ATTN_DEPTH_MAX))[0].contains("nested deeper"));
        // What the verifier accepts, the parser does.
        let mut module = good();
        deep(ATTN_DEPTH_MAX - 1)(&mut module);
        verify(&module).unwrap();
        assert_eq!(parse(&module.to_string()).unwrap(), module);
    }

    #[test]
    fn rules_of_calls() {
        let text = GOOD.replace("%2 = rms_norm %x, %1 {eps=0.5}", "%2 = call @f(%x) params(@w)");
        let errors = verify(&parse(&text).unwrap()).unwrap_err();
        assert_eq!(errors.errors.iter().map(|e| e.what.as_str()).collect::<Vec<_>>(), ["calls may not be recursive"]);
        let text = GOOD.replace("%2 = rms_norm %x, %1 {eps=0.5}", "%2 = call @g(%x) params(@w)");
        let text =
            text.replace("  main", "func @g(%x: f32[T, 4]) params(@w) { %1 = call @f(%x) params(@w) : f32[T, 4] return %1 }\n  main");
        let errors = verify(&parse(&text).unwrap()).unwrap_err();
        assert_eq!(errors.errors.iter().filter(|e| e.what == "calls may not be recursive").count(), 2, "{errors}");
        assert!(replaced(" params(@v)", "")[0].contains("takes other operands"));
        assert!(replaced("call @f(%x)", "call @f(%x, %x)")[0].contains("takes other operands"));
        assert!(replaced(" states(@b)", "")[0].contains("takes other operands"));
        assert_eq!(replaced("call @f(%x)", "call @f(%i)"), ["call: operand 0 of @f is f32[T, 4], found i32[T]"]);
        assert!(broken(|m| m.params[1].ty.shape[0] = Dim::Const(5))[0].contains("other types"));
        let nothing = |m: &mut Module| {
            m.functions[0].params = vec![ParamId(2)];
            if let Op::Call { params, .. } = &mut m.main_mut().nodes[2].op {
                *params = vec![ParamId(2)];
            }
        };
        assert!(broken(nothing).contains(&"call: parameters of @f have other types".into()));
        assert!(broken(|m| m.states[0].persistent = true)[0].contains("another shape than the callee's"));
        assert!(broken(|m| m.functions[0].outputs.push(ValueId(2)))[0].contains("takes other operands"));
        let target = |m: &mut Module| {
            if let Op::Call { func, .. } = &mut m.main_mut().nodes[2].op {
                *func = FuncId(77);
            }
        };
        assert!(broken(target)[0].contains("no such function"));
    }

    proptest! {
        /// Whatever a broken pass leaves behind, the verifier finds it or accepts what round-trips; it never panics.
        #[test]
        fn broken_modules_never_panic(seed in any::<u64>(), mutations in 1usize..6) {
            let rng = &mut Rng::new(seed);
            let mut module = random::module(rng, &Options { nodes: 25, attention: true, calls: true, odd_names: true });
            for _ in 0..mutations {
                let f = rng.below(module.functions.len());
                let n = rng.below(module.functions[f].nodes.len());
                let id = rng.below(30) as u32;
                let function = &mut module.functions[f];
                let node = &mut function.nodes[n];
                match rng.below(12) {
                    0 => node.inputs.push(ValueId(id)),
                    1 => drop(node.inputs.pop()),
                    2 if !node.inputs.is_empty() => node.inputs[0] = ValueId(id),
                    3 => node.op = Op::Param(ParamId(id)),
                    4 => node.ty.shape.push(Dim::Sym(SymbolId(id % 4))),
                    5 => node.ty.dtype = DType::ALL[rng.below(9)],
                    6 => drop(node.ty.shape.pop()),
                    7 => node.op = Op::Compare(Compare::Lt),
                    8 => node.op = Op::Cat { axis: id % 3 },
                    9 => node.op = Op::Input { index: id % 5 },
                    10 => function.outputs.push(ValueId(id)),
                    _ => {
                        function.nodes.remove(n);
                    }
                }
            }
            match verify(&module) {
                Ok(()) => prop_assert_eq!(parse(&module.to_string()).unwrap(), module),
                Err(e) => prop_assert!(e.to_string().contains("^ error")),
            }
        }
    }
}
