//! Scores and masks of attention: expressions over score, head, query and key, with limits on nesting.

use super::tokens::{Lexer, Tok};
use super::{ATTN_DEPTH_MAX, Parsed, fail, number};
use crate::ops::{AttnExpr, AttnVar, Binary, Compare, Unary};

/// An expression and its depth.
type Expr = (AttnExpr, usize);

struct AttnParser<'a> {
    lexer: Lexer<'a>,
    depth: usize,
}

pub(super) fn parse(text: &str) -> Parsed<AttnExpr> {
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
