//! The verifier. The rules below are the specification of the IR: a module that keeps them prints, parses back to itself, and the
//! interpreter and all passes accept it.
//!
//! Module
//! - `main` is one of the functions. Names of symbols, parameters, states and functions are unique among their kind and not empty.
//! - A symbol's bound is at least 1.
//! - A parameter has a constant shape and is no state. Its recipe is nested at most [`crate::recipe::DEPTH_MAX`] deep, is possible
//!   ([`crate::recipe::known_type`]), and does not contradict the declared type where it can be told without the checkpoint.
//! - A state has at least one head of width at least 1 and a float type.
//!
//! Function
//! - Every input has a name, unique in the function; `inputs[i]` is the node `input {index=i}`, and there is no other input node.
//! - There is at least one output; outputs are nodes and no states. The entry takes no states as inputs.
//! - `params` and `states` name existing ones, each once.
//!
//! Node
//! - Operands are earlier nodes of the same function. Parameters, states, functions and symbols named exist.
//! - The type is what [`crate::build::infer`] gives. At the symbols' bounds a value has less than 2^48 elements.
//! - A `reshape` has at most one symbolic dimension. An integer or bool `const` is a value of its type. `eps` is finite and at least 0.
//! - State tokens are operands of `sdpa` (the second), `kv_append` (after the fourth) and `call` only.
//! - The token of an `sdpa` comes from a `kv_append` to the same state (so that reads follow writes), or is an input of a function
//!   whose callers pass such a token. A token among the order operands of a `kv_append` is of the same state too.
//! - In attention expressions `score` gives a number and `mask` a bool; `mask` does not use `score`; only `neg`, `abs`, `exp`, `tanh`,
//!   `not` are used as functions; nested at most [`crate::parse::ATTN_DEPTH_MAX`] deep.
//!
//! Calls
//! - No function calls itself, directly or through others. A call replaces all `params` by ones of the same type and all `states` by ones of
//!   the same heads, width, type and persistence, and the callee has one output.

use crate::build::{callee, infer};
use crate::ops::{AttnExpr, AttnVar, Binary, Op, Unary};
use crate::parse::ATTN_DEPTH_MAX;
use crate::print::{self, Place};
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
            if s.kv_heads < 1 || s.head_dim < 1 || !s.dtype.is_float() {
                self.error(Place::State(i), "a state has at least one head of width at least 1 and a float type");
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
            Op::Const(c) if !node.ty.dtype.is_float() && (!c.is_finite() || crate::tensor::round(node.ty.dtype, *c) != *c) => {
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
        let Op::Call { func, params, states } = &node.op else { return };
        let called = &m.functions[func.index()];
        if params.iter().any(|p| p.index() >= m.params.len()) {
            return self.error(place, "no such parameter");
        }
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
        // Functions are done when all that they call are done; what is left over is on or above a cycle.
        let callees: Vec<HashSet<usize>> = m
            .functions
            .iter()
            .map(|f| f.nodes.iter().filter_map(|n| callee(&n.op)).map(|c| c.index()).filter(|c| *c < count).collect())
            .collect();
        let mut done = vec![false; count];
        while let Some(next) = (0..count).find(|i| !done[*i] && callees[*i].iter().all(|c| done[*c])) {
            done[next] = true;
        }
        for (i, f) in m.functions.iter().enumerate() {
            for (n, node) in f.nodes.iter().enumerate() {
                if let Some(c) = callee(&node.op)
                    && !done[i]
                    && done.get(c.index()) == Some(&false)
                {
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
