//! Tokens of the text form. In: text, and a place in it. Out: one token after the other, each with its place.

use super::{At, Parsed, fail};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Tok {
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
    pub(super) fn describe(&self) -> String {
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

pub(super) struct Lexer<'a> {
    pub(super) text: &'a str,
    pub(super) at: At,
    /// Something stands before on this line.
    pub(super) line_started: bool,
}

impl<'a> Lexer<'a> {
    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }
    fn take_while(&mut self, keep: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !keep(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }
    /// The next token and where it starts. `signed` says that `-` may begin a number here.
    pub(super) fn next(&mut self, signed: bool) -> Parsed<(At, Tok)> {
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
    pub(super) fn string(&mut self) -> Parsed<String> {
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
