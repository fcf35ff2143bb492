//! The source of a template as the engine takes it.

use crate::bounds::KEPT;
use crate::error::{TemplateError, TemplateErrorKind};
use std::borrow::Cow;
use std::ops::Range;

/// Turns `{% generation %}` blocks into plain scopes, has what is put into namespaces looked at ([`crate::bounds::KEPT`]), spells texts as
/// the engine reads them, and refuses what no chat template may use: other files and names with two leading underscores. Line numbers and
/// whitespace control stay as they are.
pub(crate) fn prepare(source: &str) -> Result<String, TemplateError> {
    let source = &with_line_feeds(source);
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_ref();
    let refuse_as = |here: &str, message: String| TemplateError {
        kind: TemplateErrorKind::Syntax,
        line: 1 + source[..source.len() - here.len()].matches('\n').count(),
        message,
    };
    let refuse = |here: &str, name: &str| refuse_as(here, format!("undefined name `{name}`"));
    while let Some(start) = rest.find('{') {
        let (text, tag) = rest.split_at(start);
        let here = tag;
        out.push_str(text);
        let close = match tag.as_bytes().get(1) {
            Some(b'{') => "}}",
            Some(b'%') => "%}",
            Some(b'#') => "#}",
            _ => {
                out.push('{');
                rest = &tag[1..];
                continue;
            }
        };
        let end = tag_end(tag, close);
        let (tag, after) = tag.split_at(end);
        let tag = match close {
            "#}" => Cow::Borrowed(tag),
            _ => respell(tag).map_err(|escape| refuse_as(here, format!("escape `{escape}` is not supported")))?,
        };
        let tag = tag.as_ref();
        if close != "#}"
            && let Some(name) = dunder(tag)
        {
            return Err(refuse(here, name));
        }
        match (close, statement(tag)) {
            ("%}", Some(word @ ("include" | "import" | "from" | "extends"))) => return Err(refuse(here, word)),
            ("%}", Some("generation")) => out.push_str(&tag.replacen("generation", "with", 1)),
            ("%}", Some("endgeneration")) => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            ("%}", Some("set")) => match namespace_value(tag) {
                Some(Kept::Value(Range { start, end })) => {
                    out.extend([&tag[..start], "(", &tag[start..end], ")|", KEPT, " ", &tag[end..]]);
                }
                Some(Kept::Filtered(end)) => out.extend([&tag[..end], "|", KEPT, " ", &tag[end..]]),
                None => out.push_str(tag),
            },
            ("%}", Some("raw")) if is_plain(tag, "raw") => {
                let (raw, behind) = after.split_at(end_of_raw(after));
                out.extend([tag, raw]);
                rest = behind;
                continue;
            }
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

/// Jinja ends every line with a line feed before it looks at anything else.
fn with_line_feeds(source: &str) -> Cow<'_, str> {
    match source.contains('\r') {
        true => source.replace("\r\n", "\n").replace('\r', "\n").into(),
        false => source.into(),
    }
}

/// Texts in quotes as the engine has to be given them where it reads an escape otherwise than Python: a backslash before the end of a line,
/// which joins the lines (the line feed moves to the tag's end, for line numbers), before a slash, which stays, and `\a`, `\v`, `\U`. `Err`
/// with what only Python can spell: characters by their names.
fn respell(tag: &str) -> Result<Cow<'_, str>, &str> {
    if !tag.contains('\\') {
        return Ok(tag.into());
    }
    let (mut out, mut quote, mut joined) = (String::with_capacity(tag.len()), None, 0);
    let mut chars = tag.char_indices();
    while let Some((at, c)) = chars.next() {
        match (quote, c) {
            (Some(_), '\\') => match chars.next().map(|(_, escaped)| escaped) {
                Some('\n') => joined += 1,
                Some('/') => out.push_str("\\\\/"),
                Some('a') => out.push_str("\\x07"),
                Some('v') => out.push_str("\\x0b"),
                Some('N') => return Err(tag.get(at..at + 3).unwrap_or("\\N")),
                Some('U') => {
                    let digits = chars.as_str().get(..8).unwrap_or_default();
                    let plain = digits.chars().all(|c| c.is_ascii_hexdigit());
                    match u32::from_str_radix(digits, 16).ok().and_then(char::from_u32).filter(|_| plain) {
                        Some(character) if character.is_ascii() => out.push_str(&format!("\\x{:02x}", character as u32)),
                        Some(character) => out.push(character),
                        None => return Err(tag.get(at..at + 2).unwrap_or("\\U")),
                    }
                    chars.nth(7);
                }
                Some(other) => out.extend(['\\', other]),
                None => out.push('\\'),
            },
            _ => {
                quote = match (quote, c) {
                    (Some(q), c) if c == q => None,
                    (None, '"' | '\'') => Some(c),
                    (quote, _) => quote,
                };
                out.push(c);
            }
        }
    }
    // Within the tag, where spaces do not count.
    let end = out.len() - if out.ends_with("}}") || out.ends_with("%}") { 2 } else { 0 };
    let end = end - usize::from(out[..end].ends_with(['-', '+']));
    out.insert_str(end, &"\n".repeat(joined));
    Ok(out.into())
}

/// Length of the tag that `tag` starts with, up to and with `close`. As in the engine, closing marks do not count within quotes and within
/// brackets; comments have neither.
fn tag_end(tag: &str, close: &str) -> usize {
    if close == "#}" {
        return tag[2..].find(close).map_or(tag.len(), |at| 2 + at + close.len());
    }
    let bytes = tag.as_bytes();
    let (mut depth, mut quote) = (0i64, None);
    let mut i = 2;
    while i < bytes.len() {
        match (quote, bytes[i]) {
            (Some(_), b'\\') => i += 1,
            (Some(q), b) if b == q => quote = None,
            (Some(_), _) => {}
            (None, b @ (b'"' | b'\'')) => quote = Some(b),
            (None, _) if depth == 0 && bytes[i..].starts_with(close.as_bytes()) => return i + 2,
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b')' | b']' | b'}') => depth -= 1,
            _ => {}
        }
        i += 1;
    }
    tag.len()
}

/// What follows the mark that opens a `{% ... %}` tag and the space there.
fn body(tag: &str) -> Option<&str> {
    let body = tag.strip_prefix("{%")?;
    Some(body.strip_prefix(['-', '+']).unwrap_or(body).trim_ascii_start())
}

/// First word of a `{% ... %}` tag.
fn statement(tag: &str) -> Option<&str> {
    let body = body(tag)?;
    let end = body.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(body.len());
    Some(&body[..end])
}

/// Whether `text` starts with a tag of nothing but `word`: only such a tag starts or ends raw text.
fn is_plain(text: &str, word: &str) -> bool {
    let rest = body(text).and_then(|body| body.strip_prefix(word)).map(str::trim_ascii_start);
    rest.is_some_and(|rest| rest.strip_prefix(['-', '+']).unwrap_or(rest).starts_with("%}"))
}

/// What a `{% set %}` tag puts into a namespace.
enum Kept {
    /// The value at this place, behind `ns.x =`, also among other targets.
    Value(Range<usize>),
    /// What filters make of the block's text; the last of them ends here.
    Filtered(usize),
}

/// What the `{% set %}` tag puts into a namespace, if anything.
fn namespace_value(tag: &str) -> Option<Kept> {
    let assign = tag.find(['=', '|'])?;
    if !tag[..assign].contains('.') {
        return None;
    }
    let end = tag.strip_suffix("%}")?;
    let end = end.strip_suffix(['-', '+']).unwrap_or(end).len();
    // Of no expression there is nothing to look at: the engine refuses it.
    tag.get(assign + 1..end).filter(|value| is_balanced(value)).map(|_| match tag[assign..].starts_with('|') {
        true => Kept::Filtered(end),
        false => Kept::Value(assign + 1..end),
    })
}

/// Something in which every bracket that closes has one that opens it; brackets within quotes do not count.
fn is_balanced(value: &str) -> bool {
    let (mut depth, mut quote, mut escaped) = (0i64, None, false);
    for c in value.chars() {
        match (quote, c) {
            _ if escaped => escaped = false,
            (Some(_), '\\') => escaped = true,
            (Some(q), c) if c == q => quote = None,
            (None, '"' | '\'') => quote = Some(c),
            (None, '(' | '[' | '{') => depth += 1,
            (None, ')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        if depth < 0 {
            return false;
        }
    }
    depth == 0 && !value.trim().is_empty()
}

/// Length of what `{% raw %}` keeps as it is.
fn end_of_raw(text: &str) -> usize {
    let mut from = 0;
    while let Some(at) = text[from..].find("{%").map(|at| from + at) {
        if is_plain(&text[at..], "endraw") {
            return at;
        }
        from = at + 2;
    }
    text.len()
}

/// A name in `tag` that starts with two underscores, be it in quotes: the way to an interpreter's insides.
fn dunder(tag: &str) -> Option<&str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut from = 0;
    while let Some(at) = tag[from..].find("__").map(|at| from + at) {
        let inside = tag[..at].chars().next_back().is_some_and(is_name);
        let length = tag[at..].find(|c| !is_name(c)).unwrap_or(tag.len() - at);
        let name = &tag[at..at + length];
        if !inside && name.trim_start_matches('_').starts_with(char::is_alphabetic) {
            return Some(name);
        }
        from = at + length;
    }
    None
}
