//! A module: declarations, functions, nodes with their attributes. Names are looked up as they come, callees when all functions are known.

use super::attention;
use super::tokens::{Lexer, Tok};
use super::{At, Fail, Parsed, fail, number};
use crate::infer::infer;
use crate::ops::{AttnExpr, Binary, Compare, Op, Pool, Reduce, Unary};
use crate::types::{DType, Dim, FuncId, Function, Module, Node, Param, ParamId, Recipe, State, StateId, Symbol, SymbolId, Type, ValueId};
use std::collections::HashMap;
use std::str::FromStr;

/// An attribute's value.
#[derive(Clone, Debug)]
enum Attr {
    Flag,
    Number(String),
    Word(String),
    Text(String),
    At(String),
    List(Vec<String>),
}

/// Attributes in braces; every one must be taken.
struct Attrs(Vec<(At, String, Attr)>, At);

impl Attrs {
    fn take(&mut self, key: &str) -> Option<(At, Attr)> {
        let i = self.0.iter().position(|(_, k, _)| k == key)?;
        let (at, _, value) = self.0.remove(i);
        Some((at, value))
    }
    fn need(&mut self, key: &str) -> Parsed<(At, Attr)> {
        let at = self.1;
        self.take(key).ok_or_else(|| (at, format!("attribute {key} is missing")))
    }
    fn number<T: FromStr>(&mut self, key: &str) -> Parsed<T> {
        match self.need(key)? {
            (at, Attr::Number(n)) => number(at, &n),
            (at, Attr::Word(w)) => number(at, &w),
            (at, _) => fail(at, format!("{key} must be a number")),
        }
    }
    fn list<T: FromStr>(&mut self, key: &str) -> Parsed<Vec<T>> {
        match self.need(key)? {
            (at, Attr::List(items)) => items.iter().map(|n| number(at, n)).collect(),
            (at, _) => fail(at, format!("{key} must be a list of numbers")),
        }
    }
    fn flag(&mut self, key: &str) -> Parsed<bool> {
        match self.take(key) {
            None => Ok(false),
            Some((_, Attr::Flag)) => Ok(true),
            Some((at, _)) => fail(at, format!("{key} takes no value")),
        }
    }
    fn attention(&mut self, key: &str) -> Parsed<AttnExpr> {
        match self.need(key)? {
            (at, Attr::Text(text)) => attention::parse(&text).map_err(|(_, what)| (at, format!("{key}: {what}"))),
            (at, _) => fail(at, format!("{key} must be a string")),
        }
    }
    fn done(self) -> Parsed<()> {
        match self.0.into_iter().next() {
            None => Ok(()),
            Some((at, key, _)) => fail(at, format!("unknown attribute {key}")),
        }
    }
}

/// A call whose callee is looked up when all functions are known.
struct PendingCall {
    function: usize,
    node: usize,
    name: String,
    at: At,
}

struct Parser<'a> {
    lexer: Lexer<'a>,
    module: Module,
    symbols: HashMap<String, SymbolId>,
    params: HashMap<String, ParamId>,
    states: HashMap<String, StateId>,
    functions: HashMap<String, FuncId>,
    calls: Vec<PendingCall>,
}

pub(super) fn parse(text: &str) -> Parsed<Module> {
    let mut p = Parser {
        lexer: Lexer { text, at: 0, line_started: false },
        module: Module::default(),
        symbols: HashMap::new(),
        params: HashMap::new(),
        states: HashMap::new(),
        functions: HashMap::new(),
        calls: Vec::new(),
    };
    p.word("module")?;
    p.sign("{")?;
    let mut main = None;
    loop {
        let (at, tok) = p.next()?;
        match &tok {
            Tok::Sign("}") => break,
            Tok::Word(w) if w == "symbol" => p.symbol()?,
            Tok::Word(w) if w == "param" => p.param()?,
            Tok::Word(w) if w == "state" => p.state()?,
            Tok::Word(w) if w == "func" => p.function()?,
            Tok::Word(w) if w == "main" => {
                if main.is_some() {
                    return fail(at, "main is given twice");
                }
                main = Some(p.at_name()?);
            }
            other => return fail(at, format!("expected symbol, param, state, func, main or '}}', found {}", other.describe())),
        }
    }
    let (at, tok) = p.next()?;
    if tok != Tok::End {
        return fail(at, format!("expected the end of the text, found {}", tok.describe()));
    }
    for call in std::mem::take(&mut p.calls) {
        let Some(callee) = p.functions.get(&call.name) else { return fail(call.at, format!("no function @{}", call.name.escape_debug())) };
        if let Op::Call { func, .. } = &mut p.module.functions[call.function].nodes[call.node].op {
            *func = *callee;
        }
    }
    p.module.main = match main {
        Some((at, name)) => *p.functions.get(&name).ok_or_else(|| (at, format!("no function @{}", name.escape_debug())))?,
        None if p.module.functions.len() == 1 => FuncId(0),
        None => return fail(at, "main is missing"),
    };
    Ok(p.module)
}

impl Parser<'_> {
    /// Next token that is not a comment.
    fn next(&mut self) -> Parsed<(At, Tok)> {
        loop {
            let (at, tok) = self.lexer.next(true)?;
            if !matches!(tok, Tok::Trailing(_)) {
                return Ok((at, tok));
            }
        }
    }
    /// Looks ahead without taking; comments are passed over.
    fn peek(&mut self) -> Parsed<Tok> {
        let (at, started) = (self.lexer.at, self.lexer.line_started);
        let tok = self.next()?.1;
        (self.lexer.at, self.lexer.line_started) = (at, started);
        Ok(tok)
    }
    fn try_sign(&mut self, sign: &str) -> Parsed<bool> {
        let found = matches!(self.peek()?, Tok::Sign(s) if s == sign);
        if found {
            self.next()?;
        }
        Ok(found)
    }
    fn try_word(&mut self, word: &str) -> Parsed<bool> {
        let found = matches!(self.peek()?, Tok::Word(w) if w == word);
        if found {
            self.next()?;
        }
        Ok(found)
    }
    fn sign(&mut self, sign: &str) -> Parsed<()> {
        match self.next()? {
            (_, Tok::Sign(s)) if s == sign => Ok(()),
            (at, tok) => fail(at, format!("expected '{sign}', found {}", tok.describe())),
        }
    }
    fn word(&mut self, word: &str) -> Parsed<()> {
        match self.next()? {
            (_, Tok::Word(w)) if w == word => Ok(()),
            (at, tok) => fail(at, format!("expected {word:?}, found {}", tok.describe())),
        }
    }
    fn at_name(&mut self) -> Parsed<(At, String)> {
        match self.next()? {
            (at, Tok::At(name)) => Ok((at, name)),
            (at, tok) => fail(at, format!("expected @name, found {}", tok.describe())),
        }
    }
    fn number<T: FromStr>(&mut self) -> Parsed<T> {
        match self.next()? {
            (at, Tok::Number(n) | Tok::Word(n)) => number(at, &n),
            (at, tok) => fail(at, format!("expected a number, found {}", tok.describe())),
        }
    }
    fn dtype(&mut self) -> Parsed<DType> {
        match self.next()? {
            (at, Tok::Word(w)) => dtype(at, &w),
            (at, tok) => fail(at, format!("expected an element type, found {}", tok.describe())),
        }
    }
    fn ty(&mut self) -> Parsed<Type> {
        let dtype = self.dtype()?;
        let mut shape = Vec::new();
        if self.try_sign("[")? {
            while !self.try_sign("]")? {
                if !shape.is_empty() {
                    self.sign(",")?;
                }
                let dim = match self.next()? {
                    (at, Tok::Number(n)) => Dim::Const(number(at, &n)?),
                    (at, Tok::Word(w) | Tok::Text(w)) => {
                        let symbol = self.symbols.get(&w);
                        Dim::Sym(*symbol.ok_or_else(|| (at, format!("no symbol {}", w.escape_debug())))?)
                    }
                    (at, tok) => return fail(at, format!("expected a dimension, found {}", tok.describe())),
                };
                shape.push(dim);
            }
        }
        Ok(Type { dtype, shape })
    }
    fn symbol(&mut self) -> Parsed<()> {
        let (at, name) = match self.next()? {
            (at, Tok::Word(w) | Tok::Text(w)) => (at, w),
            (at, tok) => return fail(at, format!("expected a name, found {}", tok.describe())),
        };
        self.sign("<=")?;
        let bound = self.number()?;
        if self.symbols.insert(name.clone(), SymbolId(self.module.symbols.len() as u32)).is_some() {
            return fail(at, "symbol is declared twice");
        }
        self.module.symbols.push(Symbol { name, bound });
        Ok(())
    }
    fn param(&mut self) -> Parsed<()> {
        let (at, name) = self.at_name()?;
        self.sign(":")?;
        let ty = self.ty()?;
        self.sign("=")?;
        let recipe = self.recipe(0)?;
        if self.params.insert(name.clone(), ParamId(self.module.params.len() as u32)).is_some() {
            return fail(at, "parameter is declared twice");
        }
        self.module.params.push(Param { name, ty, recipe });
        Ok(())
    }
    fn recipe(&mut self, depth: usize) -> Parsed<Recipe> {
        let (at, tok) = self.next()?;
        if depth >= crate::recipe::DEPTH_MAX {
            return fail(at, "recipe is nested too deep");
        }
        let Tok::Word(kind) = tok else { return fail(at, format!("expected a recipe, found {}", tok.describe())) };
        match kind.as_str() {
            "source" => match self.next()? {
                (_, Tok::Text(tensor)) => Ok(Recipe::Source { tensor }),
                (at, tok) => fail(at, format!("expected a string, found {}", tok.describe())),
            },
            "rope_cos" | "rope_sin" => {
                let mut attrs = self.attrs()?;
                let (positions, scale, inv_freq) = (attrs.number("positions")?, attrs.number("scale")?, attrs.list("inv_freq")?);
                attrs.done()?;
                Ok(Recipe::Rope { sin: kind == "rope_sin", inv_freq, scale, positions })
            }
            "concat" => {
                self.sign("(")?;
                let mut parts = Vec::new();
                while !self.try_sign(")")? {
                    if !parts.is_empty() {
                        self.sign(",")?;
                    }
                    parts.push(self.recipe(depth + 1)?);
                }
                Ok(Recipe::Concat(parts))
            }
            "transpose" | "slice" | "convert" => {
                self.sign("(")?;
                let of = Box::new(self.recipe(depth + 1)?);
                let made = match kind.as_str() {
                    "transpose" => Recipe::Transpose(of),
                    "slice" => {
                        self.sign(",")?;
                        let start = self.number()?;
                        self.sign(",")?;
                        Recipe::Slice { of, start, end: self.number()? }
                    }
                    _ => {
                        self.sign(",")?;
                        Recipe::Convert { of, dtype: self.dtype()? }
                    }
                };
                self.sign(")")?;
                Ok(made)
            }
            _ => fail(at, format!("unknown recipe {kind}")),
        }
    }
    fn state(&mut self) -> Parsed<()> {
        let (at, name) = self.at_name()?;
        let mut attrs = self.attrs()?;
        let (kv_heads, head_dim, persistent) = (attrs.number("kv_heads")?, attrs.number("head_dim")?, attrs.flag("persistent")?);
        let dtype = match attrs.need("dtype")? {
            (at, Attr::Word(w)) => dtype(at, &w)?,
            (at, _) => return fail(at, "dtype must be an element type"),
        };
        attrs.done()?;
        if self.states.insert(name.clone(), StateId(self.module.states.len() as u32)).is_some() {
            return fail(at, "state is declared twice");
        }
        self.module.states.push(State { name, kv_heads, head_dim, dtype, persistent });
        Ok(())
    }
    /// `{a=1, flag}`, or nothing.
    fn attrs(&mut self) -> Parsed<Attrs> {
        let mut attrs = Attrs(Vec::new(), self.lexer.at);
        if !self.try_sign("{")? {
            return Ok(attrs);
        }
        while !self.try_sign("}")? {
            if !attrs.0.is_empty() {
                self.sign(",")?;
            }
            let (at, key) = match self.next()? {
                (at, Tok::Word(w)) => (at, w),
                (at, tok) => return fail(at, format!("expected an attribute, found {}", tok.describe())),
            };
            if attrs.0.len() >= 16 || attrs.0.iter().any(|(_, k, _)| *k == key) {
                return fail(at, format!("attribute {key} is given twice, or there are too many"));
            }
            let mut value_at = at;
            let value = if self.try_sign("=")? {
                let (at, tok) = self.next()?;
                value_at = at;
                match tok {
                    Tok::Number(n) => Attr::Number(n),
                    Tok::Word(w) => Attr::Word(w),
                    Tok::Text(t) => Attr::Text(t),
                    Tok::At(n) => Attr::At(n),
                    Tok::Sign("[") => {
                        let mut items = Vec::new();
                        while !self.try_sign("]")? {
                            if !items.is_empty() {
                                self.sign(",")?;
                            }
                            match self.next()? {
                                (_, Tok::Number(n) | Tok::Word(n)) => items.push(n),
                                (at, tok) => return fail(at, format!("expected a number, found {}", tok.describe())),
                            }
                        }
                        Attr::List(items)
                    }
                    tok => return fail(at, format!("expected a value, found {}", tok.describe())),
                }
            } else {
                Attr::Flag
            };
            attrs.0.push((value_at, key, value));
        }
        Ok(attrs)
    }
    /// `keyword(@a, @b)`, or nothing.
    fn names(&mut self, keyword: &str) -> Parsed<Vec<(At, String)>> {
        let mut names = Vec::new();
        if self.try_word(keyword)? {
            self.sign("(")?;
            while !self.try_sign(")")? {
                if !names.is_empty() {
                    self.sign(",")?;
                }
                names.push(self.at_name()?);
            }
        }
        Ok(names)
    }
    fn param_id(&self, at: At, name: &str) -> Parsed<ParamId> {
        self.params.get(name).copied().ok_or_else(|| (at, format!("no parameter @{}", name.escape_debug())))
    }
    fn state_id(&self, at: At, name: &str) -> Parsed<StateId> {
        self.states.get(name).copied().ok_or_else(|| (at, format!("no state @{}", name.escape_debug())))
    }
    fn param_list(&mut self) -> Parsed<Vec<ParamId>> {
        let names = self.names("params")?;
        names.iter().map(|(at, n)| self.param_id(*at, n)).collect()
    }
    fn state_list(&mut self) -> Parsed<Vec<StateId>> {
        let names = self.names("states")?;
        names.iter().map(|(at, n)| self.state_id(*at, n)).collect()
    }

    fn function(&mut self) -> Parsed<()> {
        let (at, name) = self.at_name()?;
        let mut body = FunctionText::default();
        self.sign("(")?;
        while !self.try_sign(")")? {
            if !body.input_types.is_empty() {
                self.sign(",")?;
            }
            let (at, key) = self.value_name()?;
            self.sign(":")?;
            let ty = self.ty()?;
            if body.input_types.iter().any(|(k, _)| *k == key) {
                return fail(at, "input is declared twice");
            }
            body.f.input_names.push(key.0.clone());
            body.input_types.push((key, ty));
        }
        body.f.params = self.param_list()?;
        body.f.states = self.state_list()?;
        self.sign("{")?;
        // Inputs that have a line of their own are placed there, the others come first.
        body.f.inputs = vec![ValueId(u32::MAX); body.input_types.len()];
        let own_line = self.input_lines()?;
        for i in 0..body.input_types.len() {
            if !own_line.contains(&body.input_types[i].0) {
                body.place_input(i);
            }
        }
        loop {
            match self.next()? {
                (at, Tok::Value(name, quoted)) => self.node(&mut body, at, (name, quoted))?,
                (_, Tok::Word(w)) if w == "return" => break,
                (at, tok) => return fail(at, format!("expected %name or return, found {}", tok.describe())),
            }
        }
        while matches!(self.peek()?, Tok::Value(..)) {
            let (at, key) = self.value_name()?;
            let id = body.values.get(&key).ok_or_else(|| (at, format!("no value %{}", key.0.escape_debug())))?;
            body.f.outputs.push(*id);
            if !self.try_sign(",")? {
                break;
            }
        }
        self.sign("}")?;
        body.f.name = name.clone();
        if self.functions.insert(name, FuncId(self.module.functions.len() as u32)).is_some() {
            return fail(at, "function is declared twice");
        }
        self.module.functions.push(body.f);
        Ok(())
    }
    fn value_name(&mut self) -> Parsed<(At, Key)> {
        match self.next()? {
            (at, Tok::Value(name, quoted)) => Ok((at, (name.clone(), quoted && is_digits(&name)))),
            (at, tok) => fail(at, format!("expected %name, found {}", tok.describe())),
        }
    }
    /// Names of the inputs that have a line `%x = input` in the function that begins here. Nothing is taken.
    fn input_lines(&mut self) -> Parsed<Vec<Key>> {
        let (at, started) = (self.lexer.at, self.lexer.line_started);
        let mut found = Vec::new();
        let mut depth = 0usize;
        let mut last = Vec::new();
        // A character that is no token ends the search; it is reported when it is reached.
        while let Ok((_, tok)) = self.next() {
            match &tok {
                Tok::Sign("{") => depth += 1,
                Tok::Sign("}") if depth == 0 => break,
                Tok::Sign("}") => depth -= 1,
                Tok::End => break,
                Tok::Word(w) if w == "input" => {
                    if let [Tok::Value(name, quoted), Tok::Sign("=")] = &last[..] {
                        found.push((name.clone(), *quoted && is_digits(name)));
                    }
                }
                _ => {}
            }
            last.push(tok);
            if last.len() > 2 {
                last.remove(0);
            }
        }
        (self.lexer.at, self.lexer.line_started) = (at, started);
        Ok(found)
    }

    /// The rest of `%name = ...`.
    fn node(&mut self, body: &mut FunctionText, at: At, name: Key) -> Parsed<()> {
        let key = (name.0.clone(), name.1 && is_digits(&name.0));
        if body.values.contains_key(&key) {
            return fail(at, format!("%{} is defined twice", key.0.escape_debug()));
        }
        self.sign("=")?;
        let (op_at, op_word) = match self.next()? {
            (at, Tok::Word(w)) => (at, w),
            (at, tok) => return fail(at, format!("expected an op, found {}", tok.describe())),
        };
        if op_word == "input" {
            let Some(i) = body.input_types.iter().position(|(k, _)| *k == key) else { return fail(op_at, "input is not in the header") };
            body.place_input(i);
            let id = body.f.inputs[i];
            body.f.nodes[id.index()].origin = self.origin()?;
            return Ok(());
        }
        let mut inputs = Vec::new();
        let op = match op_word.as_str() {
            "param" => {
                let (at, name) = self.at_name()?;
                Op::Param(self.param_id(at, &name)?)
            }
            "const" => Op::Const(self.number()?),
            "call" => {
                let (callee_at, callee) = self.at_name()?;
                self.sign("(")?;
                self.operands(body, &mut inputs)?;
                self.sign(")")?;
                let (params, states) = (self.param_list()?, self.state_list()?);
                // A callee that comes later is put in at the end.
                let func = self.functions.get(&callee).copied().unwrap_or(FuncId(u32::MAX));
                let function = self.module.functions.len();
                self.calls.push(PendingCall { function, node: body.f.nodes.len(), name: callee, at: callee_at });
                Op::Call { func, params, states }
            }
            word => {
                self.operands(body, &mut inputs)?;
                let mut attrs = self.attrs()?;
                let op = self.op(word, op_at, &mut attrs)?;
                attrs.done()?;
                op
            }
        };
        let ty = if self.try_sign(":")? {
            self.ty()?
        } else {
            let types: Vec<&Type> = inputs.iter().map(|i: &ValueId| body.f.ty(*i)).collect();
            infer(&self.module, &op, &types, None).map_err(|e| (op_at, format!("type cannot be inferred: {e}")))?
        };
        let origin = self.origin()?;
        body.define(key, Node { op, inputs, ty, origin });
        Ok(())
    }
    /// The comment at the end of the line.
    fn origin(&mut self) -> Parsed<String> {
        let (at, started) = (self.lexer.at, self.lexer.line_started);
        let (comment_at, tok) = self.lexer.next(true)?;
        let Tok::Trailing(comment) = tok else {
            (self.lexer.at, self.lexer.line_started) = (at, started);
            return Ok(String::new());
        };
        if !comment.starts_with('"') {
            return Ok(comment);
        }
        let mut inner = Lexer { text: &comment, at: 0, line_started: true };
        match inner.string() {
            Ok(origin) if inner.rest().is_empty() => Ok(origin),
            _ => fail(comment_at, "malformed quoted origin"),
        }
    }
    fn operands(&mut self, body: &mut FunctionText, inputs: &mut Vec<ValueId>) -> Parsed<()> {
        if !matches!(self.peek()?, Tok::Value(..) | Tok::At(_)) {
            return Ok(());
        }
        loop {
            match self.next()? {
                (at, Tok::Value(name, quoted)) => {
                    let key = (name.clone(), quoted && is_digits(&name));
                    let id = body.values.get(&key).ok_or_else(|| (at, format!("no value %{} before this use", name.escape_debug())))?;
                    inputs.push(*id);
                }
                (at, Tok::At(name)) => {
                    let id = self.param_id(at, &name)?;
                    let ty = self.module.params[id.index()].ty.clone();
                    body.f.nodes.push(Node { op: Op::Param(id), inputs: vec![], ty, origin: String::new() });
                    inputs.push(ValueId(body.f.nodes.len() as u32 - 1));
                }
                (at, tok) => return fail(at, format!("expected an operand, found {}", tok.describe())),
            }
            if !self.try_sign(",")? {
                return Ok(());
            }
        }
    }
    fn op(&self, word: &str, at: At, attrs: &mut Attrs) -> Parsed<Op> {
        let state = |attrs: &mut Attrs| match attrs.need("state")? {
            (at, Attr::At(name)) => self.state_id(at, &name),
            (at, _) => fail(at, "state must be @name"),
        };
        let reduce = |op, attrs: &mut Attrs| Ok::<Op, Fail>(Op::Reduce { op, axis: attrs.number("axis")? });
        Ok(match word {
            "where" => Op::Where,
            "convert" => Op::Convert,
            "reshape" => Op::Reshape,
            "permute" => Op::Permute { perm: attrs.list("perm")? },
            "slice" => Op::Slice { axis: attrs.number("axis")?, start: attrs.number("start")?, end: attrs.number("end")? },
            "cat" => Op::Cat { axis: attrs.number("axis")? },
            "expand" => Op::Expand,
            "embedding" => Op::Embedding,
            "index_select" => Op::IndexSelect,
            "mm" => Op::Mm { rhs_t: attrs.flag("rhs_t")? },
            "sum" => reduce(Reduce::Sum, attrs)?,
            "mean" => reduce(Reduce::Mean, attrs)?,
            "amax" => reduce(Reduce::Amax, attrs)?,
            "softmax" => Op::Softmax,
            "rms_norm" => Op::RmsNorm { eps: attrs.number("eps")? },
            "layer_norm" => Op::LayerNorm { eps: attrs.number("eps")? },
            "rope" => Op::Rope,
            "kv_append" => Op::KvAppend { state: state(attrs)? },
            "sdpa" => Op::Sdpa { state: state(attrs)?, score: attrs.attention("score")?, mask: attrs.attention("mask")? },
            "pool_mean" => Op::Pool(Pool::Mean),
            "pool_cls" => Op::Pool(Pool::Cls),
            "pool_max" => Op::Pool(Pool::Max),
            "pool_last" => Op::Pool(Pool::Last),
            _ => {
                if let Some(u) = Unary::ALL.iter().find(|u| u.name() == word) {
                    Op::Unary(*u)
                } else if let Some(b) = Binary::ALL.iter().find(|b| b.name() == word) {
                    Op::Binary(*b)
                } else if let Some(c) = Compare::ALL.iter().find(|c| c.name() == word) {
                    Op::Compare(*c)
                } else {
                    return fail(at, format!("unknown op {word}"));
                }
            }
        })
    }
}

fn dtype(at: At, word: &str) -> Parsed<DType> {
    let mut all = DType::ALL.into_iter().chain(DType::QUANTISED).chain(DType::WITH_ZEROS);
    all.find(|d| d.name() == word).ok_or_else(|| (at, format!("no element type {word}")))
}

fn is_digits(name: &str) -> bool {
    name.bytes().all(|b| b.is_ascii_digit())
}

/// Name of a value; the flag marks quoted digits, which are no number.
type Key = (String, bool);

/// A function while it is read.
#[derive(Default)]
struct FunctionText {
    f: Function,
    values: HashMap<Key, ValueId>,
    input_types: Vec<(Key, Type)>,
}

impl FunctionText {
    fn define(&mut self, key: Key, node: Node) -> ValueId {
        let id = ValueId(self.f.nodes.len() as u32);
        self.f.nodes.push(node);
        self.values.insert(key, id);
        id
    }
    fn place_input(&mut self, i: usize) {
        let (key, ty) = self.input_types[i].clone();
        let node = Node { op: Op::Input { index: i as u32 }, inputs: vec![], ty, origin: String::new() };
        self.f.inputs[i] = self.define(key, node);
    }
}
