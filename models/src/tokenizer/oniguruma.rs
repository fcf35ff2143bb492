//! Regular expressions of a tokenizer as the reference's engine (Oniguruma, Ruby's syntax) reads them.
//!
//! In: `tokenizer.json`. Out: the same with patterns that the engine of executables (fancy-regex) reads so. What cannot be said to it is
//! refused by name, since a text would get other ids.
//!
//! Source: Oniguruma's doc/RE; which characters its classes hold was compared with the `tokenizers` library over all of Unicode.

use serde_json::{Map, Value};

/// `\w` within a class: letters, marks, digits and connectors as in the other engine, without what joins letters.
const WORD_IN_CLASS: &str = r"\w--[\x{200C}\x{200D}]";
/// `\w` alone, and what is a word to `\b`: with the numbers of Latin-1, too.
const WORD: &str = r"\w\x{B2}\x{B3}\x{B9}\x{BC}-\x{BE}--[\x{200C}\x{200D}]";
/// `^`: at the start of each line, but not behind a line break that ends the text.
const LINE_BEGIN: &str = r"(?:\A|(?m:^)(?!\z))";
/// `$`: at the end of each line.
const LINE_END: &str = "(?m:$)";
/// Classes that have names, and what they hold.
const NAMED: [(&str, &str); 8] = [
    ("alpha", r"\p{Alphabetic}"),
    ("digit", r"\p{Nd}"),
    ("alnum", r"\p{Alphabetic}\p{Nd}"),
    ("upper", r"\p{Uppercase}"),
    ("lower", r"\p{Lowercase}"),
    ("space", r"\s"),
    ("punct", r"\p{P}\p{S}"),
    ("word", WORD_IN_CLASS),
];

/// Rewrites the patterns of all stages, which were checked. Out: was there one to rewrite?
pub(super) fn translate_all(root: &mut Map<String, Value>) -> bool {
    let stages = root.iter_mut().filter(|(key, _)| ["normalizer", "pre_tokenizer", "decoder"].contains(&key.as_str()));
    stages.map(|(_, stage)| translate_in(stage)).sum::<usize>() > 0
}

/// How many were rewritten.
fn translate_in(value: &mut Value) -> usize {
    match value {
        Value::Array(list) => list.iter_mut().map(translate_in).sum(),
        Value::Object(map) => {
            map.iter_mut().map(|(key, value)| if key == "Regex" { translate_pattern(value) } else { translate_in(value) }).sum()
        }
        _ => 0,
    }
}

fn translate_pattern(value: &mut Value) -> usize {
    let translated = value.as_str().and_then(|regex| translate(regex).ok().filter(|translated| translated != regex));
    let count = usize::from(translated.is_some());
    *value = translated.map_or_else(|| value.take(), Value::from);
    count
}

/// The same pattern for fancy-regex; an error names what that reads otherwise.
pub(super) fn translate(regex: &str) -> Result<String, &'static str> {
    let mut out = String::with_capacity(regex.len());
    // How many classes (`[..]`) are open.
    let mut classes = 0usize;
    let mut rest = regex;
    while let Some(c) = rest.chars().next() {
        let mut used = c.len_utf8();
        match c {
            '\\' => {
                let escaped = rest[1..].chars().next();
                used += escaped.map_or(0, char::len_utf8);
                match escaped {
                    Some('w') => out += &format!("[{}]", if classes > 0 { WORD_IN_CLASS } else { WORD }),
                    Some('W') => out += &format!("[^{}]", if classes > 0 { WORD_IN_CLASS } else { WORD }),
                    Some('b') if classes == 0 => out += &boundary("!", ""),
                    Some('B') if classes == 0 => out += &boundary("", "!"),
                    Some('p' | 'P') => {
                        let name = rest[2..].strip_prefix('{').and_then(|name| name.split_once('}'));
                        match name.map(|(name, _)| name.contains(['=', ':'])) {
                            Some(false) => out += &rest[..2],
                            Some(true) => return Err(r"\p{name=value}"),
                            None => return Err(r"\p without braces"),
                        }
                    }
                    Some('G' | '<' | '>' | 'u') => return Err(r"\G, \<, \> and \u"),
                    _ => out += &rest[..used],
                }
            }
            '[' if classes > 0 && rest.starts_with("[:") && rest.contains(":]") => {
                let end = rest.find(":]").unwrap_or_default();
                let (name, negation) = rest[2..end].strip_prefix('^').map_or((&rest[2..end], ""), |name| (name, "^"));
                let Some((_, holds)) = NAMED.iter().find(|(known, _)| *known == name) else {
                    return Err("[[:cntrl:]] and other classes that are seldom named");
                };
                out += &format!("[{negation}{holds}]");
                used = end + 2;
            }
            '[' => {
                classes += 1;
                // A bracket that comes first is a character.
                used += usize::from(rest[used..].starts_with('^'));
                used += usize::from(rest[used..].starts_with(']'));
                out += &rest[..used];
            }
            ']' if classes > 0 => {
                classes -= 1;
                out.push(c);
            }
            '-' | '~' if classes > 0 && rest[1..].starts_with(c) => return Err("-- and ~~ in a class"),
            '^' if classes == 0 => out += LINE_BEGIN,
            '$' if classes == 0 => out += LINE_END,
            '(' if classes == 0 && rest.starts_with("(?") => {
                let flags: &str = rest[2..].split(|c: char| !c.is_ascii_alphabetic() && c != '-').next().unwrap_or_default();
                if flags.contains(|c| !"imx-".contains(c)) {
                    return Err("(?P<name>..) and flags other than i, m and x");
                }
                // Ruby's m lets a dot be a line break.
                out += &format!("(?{}", flags.replace('m', "s"));
                used += 1 + flags.len();
            }
            _ => out.push(c),
        }
        rest = &rest[used..];
    }
    Ok(out)
}

/// Between two characters: the second is a word's character where the first is not one (`!`, ``), or where it is one, too (``, `!`).
fn boundary(behind_word: &str, behind_other: &str) -> String {
    let ahead = |negation: &str| format!("(?{}[{WORD}])", if negation.is_empty() { "=" } else { negation });
    format!("(?:(?<=[{WORD}]){}|(?<![{WORD}]){})", ahead(behind_word), ahead(behind_other))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text with an `X` in the place of what a pattern finds.
    fn replaced(regex: &str, text: &str) -> String {
        let regex = translate(regex).unwrap_or_else(|construct| panic!("{regex}: {construct}"));
        fancy_regex::Regex::new(&regex).unwrap_or_else(|e| panic!("{regex}: {e}")).replace_all(text, "X").into_owned()
    }

    /// What `normalizers.Replace(Regex(pattern), "X")` of the `tokenizers` library 0.23 for Python makes of texts.
    #[test]
    fn patterns_find_what_the_reference_finds() {
        for (regex, text, wanted) in [
            ("^", "a\nb", "Xa\nXb"),
            ("^", "\n\n", "X\nX\n"),
            ("$", "a\r\nb\n", "a\rX\nbX\nX"),
            (r"\s+$", "a  \n\n b ", "aX\n bX"),
            (r"\w", "a\u{200d}b\u{200c}1_é²½①", "X\u{200d}X\u{200c}XXXXX①"),
            (r"[^\W\d_]", "a\u{200d}1_é²", "X\u{200d}1_X²"),
            (r"[\w&&[^\d]]+", "½ ² ab1", "½ ² X1"),
            (r"\W+", "a\u{200d} b", "aXb"),
            (r"[[:alpha:]]+", "é1日本ⅷ_", "X1X_"),
            (r"[[:^alpha:]]+", "é1 日", "éX日"),
            (r"[[:punct:]]", "a+。$`_", "aXXXXX"),
            (r"[[:digit:][:space:]]", "१\u{3000}x", "XXx"),
            (r"[[:upper:]]|[[:lower:]]", "aÉ日", "XX日"),
            (r"[[:alnum:]]+", "aé1 ²", "X ²"),
            (r"(?m:a.b)", "a\nb", "X"),
            (r"(?i:AB)c", "abc", "X"),
            (r"[]^$]", "a]^$", "aXXX"),
            (r"\^\$", "^$", "X"),
        ] {
            assert_eq!(replaced(regex, text), wanted, "{regex} in {text:?}");
        }
        assert_eq!(replaced(r"\b", "ab\u{200d} c"), "XabX\u{200d} XcX");
        assert_eq!(replaced(r"\b", "a²b x"), "Xa²bX XxX");
        assert_eq!(replaced(r"\B", "ab ."), "aXb X.X");
    }

    #[test]
    fn patterns_of_known_models_stay_as_they_are() {
        for regex in [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r" ?[^(\s|[.,!?…。,、।۔،])]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}",
            "[一-龥ࠀ-一가-퟿]+",
            r"(?<=a)b(?<!c)(?>d)(?<name>e)(?:f)",
        ] {
            assert_eq!(translate(regex).as_deref(), Ok(regex));
        }
    }

    #[test]
    fn what_means_something_else_is_refused() {
        for regex in [r"\pL", r"\p{Script=Han}", r"\G", r"\<a\>", r"\u{e9}", "[a--b]", "[a~~b]", "(?s)a", "(?P<n>a)", "[[:cntrl:]]"] {
            assert!(translate(regex).is_err(), "{regex}");
        }
    }
}
