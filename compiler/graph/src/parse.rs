//! Parser of the text form ([`mod@crate::print`] has the description). Text is untrusted: any bytes give a module or an error with a place,
//! never a panic, with limits on size and nesting. A parsed module may still be wrong: [`crate::verify::verify`] judges that.
//!
//! Besides what is printed, text written by hand may: give values any names (`%h`); leave out the type of a node where it can be inferred;
//! use a parameter as an operand (`mm %x, @fc1.weight`), which makes a `param` node before the user; have comments on lines of their
//! own; leave out `main` where there is one function.

use crate::build::infer;
use crate::ops::{AttnExpr, AttnVar, Binary, Compare, Op, Pool, Reduce, Unary};
use crate::types::{DType, Dim, FuncId, Function, Module, Node, Param, ParamId, Recipe, State, StateId, Symbol, SymbolId, Type, ValueId};
use std::collections::HashMap;
use std::str::FromStr;

/// Longest text.
pub const BYTES_MAX: usize = 64 << 20;
/// Deepest nesting of an attention expression.
pub const ATTN_DEPTH_MAX: usize = 100;

/// Text that is not a module.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {what}")]
pub struct ParseError {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// What is wrong.
    pub what: String,
}

/// A place in the text, in bytes; becomes line and column in the end.
type At = usize;
type Fail = (At, String);
type Parsed<T> = Result<T, Fail>;

fn fail<T>(at: At, what: impl Into<String>) -> Parsed<T> {
    Err((at, what.into()))
}

fn locate(text: &str, (at, what): Fail) -> ParseError {
    let before = &text.as_bytes()[..at.min(text.len())];
    let start = before.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
    let line = 1 + before.iter().filter(|b| **b == b'\n').count();
    ParseError { line, column: 1 + String::from_utf8_lossy(&before[start..]).chars().count(), what }
}

/// Reads a module.
pub fn parse(text: &str) -> Result<Module, ParseError> {
    if text.len() > BYTES_MAX {
        return Err(ParseError { line: 1, column: 1, what: format!("text is longer than {BYTES_MAX} bytes") });
    }
    parse_module(text).map_err(|e| locate(text, e))
}

/// Reads a module from bytes that may not even be text.
pub fn parse_bytes(bytes: &[u8]) -> Result<Module, ParseError> {
    match std::str::from_utf8(bytes) {
        Ok(text) => parse(text),
        Err(e) => {
            let valid = std::str::from_utf8(&bytes[..e.valid_up_to()]).unwrap_or_default();
            Err(locate(valid, (e.valid_up_to(), "not UTF-8".into())))
        }
    }
}

impl FromStr for Module {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<Module, ParseError> {
        parse(text)
    }
}

impl FromStr for AttnExpr {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<AttnExpr, ParseError> {
        parse_attention(text).map_err(|e| locate(text, e))
    }
}

// ---- tokens

#[derive(Clone, Debug, PartialEq)]
enum Tok {
    Word(String),
    /// A number as written, with sign.
    Number(String),
    Text(String),
    /// `@name`
    At(String),
    /// `%name`; the flag says that it was quoted, so that an input "5" is not value 5.
    Value(String, bool),
    Sign(&'static str),
    /// Comment after something on its line.
    Trailing(String),
    End,
}

impl Tok {
    fn describe(&self) -> String {
        match self {
            Tok::Word(w) | Tok::Number(w) => format!("{w:?}"),
            Tok::Text(_) => "a string".into(),
            Tok::At(n) => format!("@{}", n.escape_debug()),
            Tok::Value(n, _) => format!("%{}", n.escape_debug()),
            Tok::Sign(s) => format!("'{s}'"),
            Tok::Trailing(_) => "a comment".into(),
            Tok::End => "the end of the text".into(),
        }
    }
}

const SIGNS: [&str; 22] =
    ["<=", ">=", "==", "!=", "{", "}", "(", ")", "[", "]", ",", ":", "=", "<", ">", "&", "|", "+", "-", "*", "/", "!"];

struct Lexer<'a> {
    text: &'a str,
    at: At,
    /// Something stands before on this line.
    line_started: bool,
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }
    fn take_while(&mut self, keep: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !keep(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }
    /// The next token and where it starts. `signed` says that `-` may begin a number here.
    fn next(&mut self, signed: bool) -> Parsed<(At, Tok)> {
        loop {
            let space = self.take_while(char::is_whitespace);
            if space.contains('\n') {
                self.line_started = false;
            }
            if !self.rest().starts_with("//") {
                break;
            }
            let started = self.line_started;
            let at = self.at;
            let comment = self.take_while(|c| c != '\n');
            if started {
                self.line_started = false;
                return Ok((at, Tok::Trailing(comment[2..].trim().to_string())));
            }
        }
        self.line_started = true;
        let at = self.at;
        let rest = self.rest();
        let Some(first) = rest.chars().next() else { return Ok((at, Tok::End)) };
        if first == '"' {
            return Ok((at, Tok::Text(self.string()?)));
        }
        if first == '@' || first == '%' {
            self.at += 1;
            let is_quoted = self.rest().starts_with('"');
            let name = if is_quoted { self.string()? } else { self.name() };
            if name.is_empty() && !is_quoted {
                return fail(at, format!("'{first}' needs a name"));
            }
            return Ok((at, if first == '@' { Tok::At(name) } else { Tok::Value(name, is_quoted) }));
        }
        let digits = rest.strip_prefix('-').filter(|_| signed).unwrap_or(rest);
        if digits.starts_with(|c: char| c.is_ascii_digit()) || (signed && rest.starts_with("-inf")) {
            return Ok((at, Tok::Number(self.number())));
        }
        if first.is_ascii_alphabetic() || first == '_' {
            let word = self.take_while(|c| c.is_ascii_alphanumeric() || c == '_');
            return Ok((at, Tok::Word(word.to_string())));
        }
        match SIGNS.iter().find(|s| rest.starts_with(**s)) {
            Some(sign) => {
                self.at += sign.len();
                Ok((at, Tok::Sign(sign)))
            }
            None => fail(at, format!("unexpected character {first:?}")),
        }
    }
    /// A bare name; `//` begins a comment.
    fn name(&mut self) -> String {
        let rest = self.rest();
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '/'))).unwrap_or(rest.len());
        let end = rest[..end].find("//").unwrap_or(end);
        self.at += end;
        rest[..end].to_string()
    }
    /// `-12`, `1e-5`, `0.5`, `-inf`.
    fn number(&mut self) -> String {
        let start = self.at;
        if self.rest().starts_with('-') {
            self.at += 1;
        }
        if self.rest().starts_with("inf") {
            self.at += 3;
        } else {
            self.take_while(|c| c.is_ascii_digit() || c == '.');
            if self.rest().starts_with(['e', 'E']) {
                self.at += 1;
                if self.rest().starts_with(['-', '+']) {
                    self.at += 1;
                }
                self.take_while(|c| c.is_ascii_digit());
            }
        }
        self.text[start..self.at].to_string()
    }
    /// A string literal with Rust's escapes.
    fn string(&mut self) -> Parsed<String> {
        let start = self.at;
        let mut out = String::new();
        let mut chars = self.rest().char_indices().skip(1);
        while let Some((offset, c)) = chars.next() {
            match c {
                '"' => {
                    self.at = start + offset + 1;
                    return Ok(out);
                }
                '\n' => break,
                '\\' => {
                    let bad = || (start + offset, "unknown escape".to_string());
                    match chars.next().ok_or_else(bad)?.1 {
                        'n' => out.push('\n'),
                        'r' => out.push('\r'),
                        't' => out.push('\t'),
                        '0' => out.push('\0'),
                        c @ ('\\' | '"' | '\'') => out.push(c),
                        'u' => {
                            if chars.next().map(|c| c.1) != Some('{') {
                                return Err(bad());
                            }
                            let mut code = 0u32;
                            loop {
                                match chars.next().map(|c| c.1) {
                                    Some('}') => break,
                                    Some(c) => code = code * 16 + c.to_digit(16).ok_or_else(bad)?,
                                    None => return Err(bad()),
                                }
                                if code > 0x10_ffff {
                                    return Err(bad());
                                }
                            }
                            out.push(char::from_u32(code).ok_or_else(bad)?);
                        }
                        _ => return Err(bad()),
                    }
                }
                c => out.push(c),
            }
        }
        fail(start, "string without end")
    }
}

// ---- module

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
            (at, Attr::Text(text)) => parse_attention(&text).map_err(|(_, what)| (at, format!("{key}: {what}"))),
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

fn number<T: FromStr>(at: At, text: &str) -> Parsed<T> {
    text.parse().map_err(|_| (at, format!("{} does not fit here", text.escape_debug())))
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

fn parse_module(text: &str) -> Parsed<Module> {
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

// ---- attention expressions

/// An expression and its depth.
type Expr = (AttnExpr, usize);

struct AttnParser<'a> {
    lexer: Lexer<'a>,
    depth: usize,
}

fn parse_attention(text: &str) -> Parsed<AttnExpr> {
    let mut p = AttnParser { lexer: Lexer { text, at: 0, line_started: false }, depth: 0 };
    let expr = p.binary(1)?.0;
    match p.lexer.next(false)? {
        (_, Tok::End) => Ok(expr),
        (at, tok) => fail(at, format!("expected an operator, found {}", tok.describe())),
    }
}

impl AttnParser<'_> {
    fn sign(&mut self, sign: &str) -> Parsed<()> {
        match self.lexer.next(false)? {
            (_, Tok::Sign(s)) if s == sign => Ok(()),
            (at, tok) => fail(at, format!("expected '{sign}', found {}", tok.describe())),
        }
    }
    fn made(&self, expr: AttnExpr, depth: usize) -> Parsed<Expr> {
        if depth > ATTN_DEPTH_MAX { fail(self.lexer.at, "expression is nested too deep") } else { Ok((expr, depth)) }
    }
    /// Operators that bind at least as strongly as `least` (the numbers of `print::strength`).
    fn binary(&mut self, least: u8) -> Parsed<Expr> {
        let (mut left, mut depth) = self.unary()?;
        let mut compared = false;
        loop {
            let before = self.lexer.at;
            let (at, tok) = self.lexer.next(false)?;
            let Tok::Sign(sign) = tok else {
                self.lexer.at = before;
                return Ok((left, depth));
            };
            enum Kind {
                Two(Binary),
                Comparison(Compare),
            }
            let (kind, strength) = match sign {
                "|" => (Kind::Two(Binary::Or), 1),
                "&" => (Kind::Two(Binary::And), 2),
                "<" => (Kind::Comparison(Compare::Lt), 3),
                "<=" => (Kind::Comparison(Compare::Le), 3),
                ">" => (Kind::Comparison(Compare::Gt), 3),
                ">=" => (Kind::Comparison(Compare::Ge), 3),
                "==" => (Kind::Comparison(Compare::Eq), 3),
                "!=" => (Kind::Comparison(Compare::Ne), 3),
                "+" => (Kind::Two(Binary::Add), 4),
                "-" => (Kind::Two(Binary::Sub), 4),
                "*" => (Kind::Two(Binary::Mul), 5),
                "/" => (Kind::Two(Binary::Div), 5),
                _ => (Kind::Two(Binary::Or), 0),
            };
            if strength < least {
                self.lexer.at = before;
                return Ok((left, depth));
            }
            if strength == 3 && compared {
                return fail(at, "comparisons do not chain");
            }
            compared = strength == 3;
            let (right, right_depth) = self.binary(strength + 1)?;
            let (a, b) = (Box::new(left), Box::new(right));
            let joined = match kind {
                Kind::Two(op) => AttnExpr::Binary(op, a, b),
                Kind::Comparison(op) => AttnExpr::Compare(op, a, b),
            };
            (left, depth) = self.made(joined, 1 + depth.max(right_depth))?;
        }
    }
    fn unary(&mut self) -> Parsed<Expr> {
        self.depth += 1;
        // A printed level may take a sign and a parenthesis.
        if self.depth > 2 * ATTN_DEPTH_MAX {
            return fail(self.lexer.at, "expression is nested too deep");
        }
        let (at, tok) = self.lexer.next(true)?;
        let expr = match tok {
            Tok::Number(n) => (AttnExpr::Const(number(at, &n)?), 1),
            Tok::Sign("(") => {
                let inner = self.binary(1)?;
                self.sign(")")?;
                inner
            }
            Tok::Sign(sign @ ("-" | "!")) => {
                let (x, depth) = self.unary()?;
                let op = if sign == "-" { Unary::Neg } else { Unary::Not };
                self.made(AttnExpr::Unary(op, Box::new(x)), depth + 1)?
            }
            Tok::Word(word) => match word.as_str() {
                "score" => (AttnExpr::Var(AttnVar::Score), 1),
                "head" => (AttnExpr::Var(AttnVar::Head), 1),
                "query" => (AttnExpr::Var(AttnVar::Query), 1),
                "key" => (AttnExpr::Var(AttnVar::Key), 1),
                "true" => (AttnExpr::True, 1),
                "inf" => (AttnExpr::Const(f64::INFINITY), 1),
                "NaN" => (AttnExpr::Const(f64::NAN), 1),
                _ => {
                    let two = [Binary::Minimum, Binary::Maximum].into_iter().find(|b| b.name() == word);
                    let one = Unary::ALL.into_iter().find(|u| u.name() == word);
                    if one.is_none() && two.is_none() {
                        return fail(at, format!("unknown name {word}"));
                    }
                    self.sign("(")?;
                    let (a, depth) = self.binary(1)?;
                    let made = if let Some(op) = two {
                        self.sign(",")?;
                        let (b, b_depth) = self.binary(1)?;
                        self.made(AttnExpr::Binary(op, Box::new(a), Box::new(b)), 1 + depth.max(b_depth))?
                    } else {
                        self.made(AttnExpr::Unary(one.unwrap_or(Unary::Neg), Box::new(a)), depth + 1)?
                    };
                    self.sign(")")?;
                    made
                }
            },
            tok => return fail(at, format!("expected an expression, found {}", tok.describe())),
        };
        self.depth -= 1;
        Ok(expr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::print::print;
    use crate::random::{self, Options, Rng};
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
        assert_eq!(crate::build::callee(&module.main().nodes[1].op), Some(FuncId(1)));
        let error = parse(&text.replace("@b(%x) : f32[2]", "@b(%x)")).unwrap_err();
        assert!(error.what.contains("type cannot be inferred"), "{error}");
        assert_eq!(parse(&text.replace("@b(%x) :", "@c(%x) :")).unwrap_err().to_string(), "1:42: no function @c");
    }

    #[test]
    fn errors_have_a_place() {
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
            ("module { func @f(%x: f32) { return %x } main @g }", "1:46: no function @g"),
            ("module { }", "1:11: main is missing"),
            ("module { func @f(%x: f32) { return %x } } x", "1:43: expected the end of the text, found \"x\""),
        ];
        for (text, want) in cases {
            assert_eq!(parse(text).unwrap_err().to_string(), want, "{text}");
        }
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
}
