//! The text form: complete (`parse(print(m)) == m` for every module that verifies) and meant to be read.
//!
//! ```text
//! module {
//!   symbol T<=64
//!   param @layers.0.norm.weight : f32[768] = source "model.layers.0.norm.weight"
//!   state @layers.0.kv {kv_heads=8, head_dim=64, dtype=bf16, persistent}
//!   func @step(%x: f32[T, 768]) {
//!     %1 = param @layers.0.norm.weight : f32[768]
//!     %2 = rms_norm %x, %1 {eps=1e-5} : f32[T, 768]   // layers.0.norm
//!     return %2
//!   }
//!   main @step
//! }
//! ```
//!
//! - Values are numbered by their place in the arena; inputs go by their names. Inputs that do not come first in the arena, or
//!   have an origin, have a line of their own (`%x = input   // embed`) besides the place in the header.
//! - A comment at the end of a node's line is its origin. Names with other characters than letters, digits, `_`, `.` (and `-`, `/`
//!   after `@` and `%`) are quoted with Rust's escapes, so a checkpoint's tensor names cannot break out of the text.
//! - Ids out of range print as `?7`, so that the verifier can show a broken module; such text does not parse.

use crate::ops::{AttnExpr, AttnVar, Binary, Compare, Op, Unary};
use crate::types::{Dim, FuncId, Function, Module, Node, ParamId, Recipe, StateId, Type, ValueId};
use std::fmt::{self, Display, Write};

/// A place in the text to which a note can be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The whole module.
    Module,
    /// A symbol.
    Symbol(usize),
    /// A parameter.
    Param(usize),
    /// A state.
    State(usize),
    /// The header of a function.
    Header(usize),
    /// A node of a function.
    Node(usize, usize),
    /// The `return` of a function.
    Return(usize),
    /// The `main` line.
    Main,
}

/// Text form of a module.
pub fn print(module: &Module) -> String {
    let mut text = String::new();
    for line in lines(module) {
        text.push_str(&line.text);
        text.push('\n');
    }
    text
}

impl Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print(self))
    }
}

/// One line of the text form.
#[derive(Clone, Debug)]
pub struct Line {
    /// What it shows.
    pub place: Place,
    /// The text, indented.
    pub text: String,
}

/// The text form line by line.
pub fn lines(module: &Module) -> Vec<Line> {
    let mut out = Vec::new();
    let mut line = |place, text: String| out.push(Line { place, text });
    line(Place::Module, "module {".into());
    for (i, s) in module.symbols.iter().enumerate() {
        line(Place::Symbol(i), format!("  symbol {}<={}", Word(&s.name), s.bound));
    }
    for (i, p) in module.params.iter().enumerate() {
        let text = format!("  param @{} : {} = {}", Name(&p.name), TypeText(module, &p.ty), RecipeText(&p.recipe));
        line(Place::Param(i), text);
    }
    for (i, s) in module.states.iter().enumerate() {
        let persistent = if s.persistent { ", persistent" } else { "" };
        let (name, heads, width) = (Name(&s.name), s.kv_heads, s.head_dim);
        let text = format!("  state @{name} {{kv_heads={heads}, head_dim={width}, dtype={}{persistent}}}", s.dtype);
        line(Place::State(i), text);
    }
    for (i, f) in module.functions.iter().enumerate() {
        line(Place::Header(i), header(module, f));
        for id in f.ids() {
            if implied_input(f, id) {
                continue;
            }
            line(Place::Node(i, id.index()), node_line(module, f, id));
        }
        line(Place::Return(i), format!("    return {}", list(&f.outputs, |v| ValueText(f, *v).to_string())));
        line(Place::Return(i), "  }".into());
    }
    line(Place::Main, format!("  main {}", FuncText(module, module.main)));
    line(Place::Main, "}".into());
    out
}

fn list<T>(items: &[T], text: impl Fn(&T) -> String) -> String {
    items.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// True for inputs that the header alone shows: the first nodes of the arena in order, without origin.
pub(crate) fn implied_input(f: &Function, id: ValueId) -> bool {
    let implied = |i: usize| {
        f.inputs.get(i) == Some(&ValueId(i as u32))
            && f.input_names.len() > i
            && f.nodes.get(i).is_some_and(|n| n.op == Op::Input { index: i as u32 } && n.inputs.is_empty() && n.origin.is_empty())
    };
    (0..=id.index()).all(implied)
}

fn header(module: &Module, f: &Function) -> String {
    let inputs: Vec<String> = f
        .input_names
        .iter()
        .enumerate()
        .map(|(i, name)| match f.inputs.get(i).and_then(|v| f.nodes.get(v.index())) {
            Some(node) => format!("%{}: {}", InputName(name), TypeText(module, &node.ty)),
            None => format!("%{}: ?", InputName(name)),
        })
        .collect();
    let mut text = format!("  func @{}({})", Name(&f.name), inputs.join(", "));
    if !f.params.is_empty() {
        let _ = write!(text, " params({})", list(&f.params, |p| ParamText(module, *p).to_string()));
    }
    if !f.states.is_empty() {
        let _ = write!(text, " states({})", list(&f.states, |s| StateText(module, *s).to_string()));
    }
    text + " {"
}

fn node_line(module: &Module, f: &Function, id: ValueId) -> String {
    let node = f.node(id);
    let listed =
        matches!(node.op, Op::Input { index } if f.inputs.get(index as usize) == Some(&id) && f.input_names.len() > index as usize);
    let mut text = format!("    {} = {}", ValueText(f, id), node.op.name());
    match &node.op {
        // The header has the type.
        Op::Input { .. } if listed => {}
        Op::Input { index } => {
            let _ = write!(text, " {{index={index}}} : {}", TypeText(module, &node.ty));
        }
        _ => {
            let _ = write!(text, "{} : {}", Body(module, f, node), TypeText(module, &node.ty));
        }
    }
    if !node.origin.is_empty() {
        let _ = write!(text, "   // {}", Origin(&node.origin));
    }
    text
}

/// Operands and attributes of a node.
struct Body<'a>(&'a Module, &'a Function, &'a Node);
impl Display for Body<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Body(module, f, node) = *self;
        let operands = list(&node.inputs, |v| ValueText(f, *v).to_string());
        if let Op::Call { func, params, states } = &node.op {
            write!(out, " {}({operands})", FuncText(module, *func))?;
            if !params.is_empty() {
                write!(out, " params({})", list(params, |p| ParamText(module, *p).to_string()))?;
            }
            if !states.is_empty() {
                write!(out, " states({})", list(states, |s| StateText(module, *s).to_string()))?;
            }
            return Ok(());
        }
        if !operands.is_empty() {
            write!(out, " {operands}")?;
        }
        match &node.op {
            Op::Param(p) => write!(out, " {}", ParamText(module, *p)),
            Op::Const(c) => write!(out, " {}", Float(*c)),
            Op::Permute { perm } => write!(out, " {{perm=[{}]}}", list(perm, u32::to_string)),
            Op::Slice { axis, start, end } => write!(out, " {{axis={axis}, start={start}, end={end}}}"),
            Op::Cat { axis } | Op::Reduce { axis, .. } => write!(out, " {{axis={axis}}}"),
            Op::Mm { rhs_t: true } => write!(out, " {{rhs_t}}"),
            Op::RmsNorm { eps } | Op::LayerNorm { eps } => write!(out, " {{eps={}}}", Float(*eps)),
            Op::KvAppend { state } => write!(out, " {{state={}}}", StateText(module, *state)),
            Op::Sdpa { state, score, mask } => {
                write!(out, " {{state={}, score=\"{score}\", mask=\"{mask}\"}}", StateText(module, *state))
            }
            _ => Ok(()),
        }
    }
}

/// Shortest text that reads back as the same f64.
pub struct Float(pub f64);
impl Display for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let x = self.0;
        if x.fract() == 0.0 && x.abs() < 1e15 { write!(f, "{x}") } else { write!(f, "{x:?}") }
    }
}

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '/')) && !text.contains("//")
}

fn quoted(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    write!(f, "\"{}\"", text.escape_debug())
}

/// A name after `@`: bare where it can be.
struct Name<'a>(&'a str);
impl Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_name(self.0) { f.write_str(self.0) } else { quoted(f, self.0) }
    }
}

/// The name of a symbol.
struct Word<'a>(&'a str);
impl Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_word(self.0) { f.write_str(self.0) } else { quoted(f, self.0) }
    }
}

/// The name of an input: never mistaken for the number of a value.
struct InputName<'a>(&'a str);
impl Display for InputName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_name(self.0) && !self.0.bytes().all(|b| b.is_ascii_digit()) { f.write_str(self.0) } else { quoted(f, self.0) }
    }
}

/// A string literal.
struct Quoted<'a>(&'a str);
impl Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        quoted(f, self.0)
    }
}

/// An origin in a comment: bare unless it could be read as something else.
struct Origin<'a>(&'a str);
impl Display for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = self.0.bytes().all(|b| b.is_ascii_graphic() || b == b' ') && !self.0.starts_with([' ', '"']) && !self.0.ends_with(' ');
        if plain { f.write_str(self.0) } else { quoted(f, self.0) }
    }
}

struct ValueText<'a>(&'a Function, ValueId);
impl Display for ValueText<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ValueText(f, id) = *self;
        match f.nodes.get(id.index()).map(|n| &n.op) {
            None => write!(out, "%?{}", id.0),
            Some(Op::Input { index }) if f.inputs.get(*index as usize) == Some(&id) && f.input_names.len() > *index as usize => {
                write!(out, "%{}", InputName(&f.input_names[*index as usize]))
            }
            Some(_) => write!(out, "%{}", id.0),
        }
    }
}

macro_rules! named { ($($text:ident, $id:ty, $list:ident);*) => { $(
    struct $text<'a>(&'a Module, $id);
    impl Display for $text<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            match self.0.$list.get(self.1.index()) {
                Some(x) => write!(f, "@{}", Name(&x.name)),
                None => write!(f, "@?{}", self.1.0),
            }
        }
    } )* } }
named!(ParamText, ParamId, params; StateText, StateId, states; FuncText, FuncId, functions);

/// A type in the text form.
pub struct TypeText<'a>(pub &'a Module, pub &'a Type);
impl Display for TypeText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TypeText(module, ty) = *self;
        write!(f, "{}", ty.dtype)?;
        if ty.shape.is_empty() {
            return Ok(());
        }
        let dim = |d: &Dim| match d {
            Dim::Const(n) => n.to_string(),
            Dim::Sym(s) => module.symbols.get(s.index()).map_or_else(|| format!("?{}", s.0), |s| Word(&s.name).to_string()),
        };
        write!(f, "[{}]", list(&ty.shape, dim))
    }
}

/// A recipe in the text form.
pub struct RecipeText<'a>(pub &'a Recipe);
impl Display for RecipeText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Recipe::Source { tensor } => write!(f, "source {}", Quoted(tensor)),
            Recipe::Transpose(of) => write!(f, "transpose({})", RecipeText(of)),
            Recipe::Concat(parts) => write!(f, "concat({})", list(parts, |p| RecipeText(p).to_string())),
            Recipe::Slice { of, start, end } => write!(f, "slice({}, {start}, {end})", RecipeText(of)),
            Recipe::Convert { of, dtype } => write!(f, "convert({}, {dtype})", RecipeText(of)),
            Recipe::Rope { sin, inv_freq, scale, positions } => {
                let name = if *sin { "rope_sin" } else { "rope_cos" };
                let freqs = list(inv_freq, |x| format!("{x:?}"));
                write!(f, "{name} {{positions={positions}, scale={scale:?}, inv_freq=[{freqs}]}}")
            }
        }
    }
}

/// Binding strength of an expression's outermost operator.
fn strength(expr: &AttnExpr) -> u8 {
    match expr {
        AttnExpr::Binary(Binary::Or, ..) => 1,
        AttnExpr::Binary(Binary::And, ..) => 2,
        AttnExpr::Compare(..) => 3,
        AttnExpr::Binary(Binary::Add | Binary::Sub, ..) => 4,
        AttnExpr::Binary(Binary::Mul | Binary::Div, ..) => 5,
        _ => 6,
    }
}

/// `key <= query & key > query - 4096`: as in C, but `&` and `|` are logical and bind weaker than comparisons.
impl Display for AttnExpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let child = |f: &mut fmt::Formatter<'_>, x: &AttnExpr, least: u8| {
            if strength(x) < least { write!(f, "({x})") } else { write!(f, "{x}") }
        };
        match self {
            AttnExpr::Var(AttnVar::Score) => f.write_str("score"),
            AttnExpr::Var(AttnVar::Head) => f.write_str("head"),
            AttnExpr::Var(AttnVar::Query) => f.write_str("query"),
            AttnExpr::Var(AttnVar::Key) => f.write_str("key"),
            AttnExpr::True => f.write_str("true"),
            AttnExpr::Const(c) => write!(f, "{}", Float(*c)),
            // `-1` is a constant, so the negation of a constant is spelled out.
            AttnExpr::Unary(op @ (Unary::Neg | Unary::Not), x) if !matches!(**x, AttnExpr::Const(_)) => {
                f.write_str(if *op == Unary::Neg { "-" } else { "!" })?;
                child(f, x, 6)
            }
            AttnExpr::Unary(op, x) => write!(f, "{}({x})", op.name()),
            AttnExpr::Binary(op @ (Binary::Minimum | Binary::Maximum), a, b) => write!(f, "{}({a}, {b})", op.name()),
            AttnExpr::Binary(op, a, b) => {
                let own = strength(self);
                child(f, a, own)?;
                let sign = match op {
                    Binary::Add => "+",
                    Binary::Sub => "-",
                    Binary::Mul => "*",
                    Binary::Div => "/",
                    Binary::And => "&",
                    _ => "|",
                };
                write!(f, " {sign} ")?;
                child(f, b, own + 1)
            }
            AttnExpr::Compare(op, a, b) => {
                child(f, a, 4)?;
                let sign = match op {
                    Compare::Lt => "<",
                    Compare::Le => "<=",
                    Compare::Gt => ">",
                    Compare::Ge => ">=",
                    Compare::Eq => "==",
                    Compare::Ne => "!=",
                };
                write!(f, " {sign} ")?;
                child(f, b, 4)
            }
        }
    }
}
