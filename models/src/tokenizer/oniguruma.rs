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
                    Some('b') if classes == 0 => out += &boundary(true),
                    Some('B') if classes == 0 => out += &boundary(false),
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

/// `\b`, where one of two neighbours is a word's character and the other is not (`differ`), or `\B`, where both are or neither.
fn boundary(differ: bool) -> String {
    let (behind_word, behind_other) = if differ { ("!", "=") } else { ("=", "!") };
    format!("(?:(?<=[{WORD}])(?{behind_word}[{WORD}])|(?<![{WORD}])(?{behind_other}[{WORD}]))")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text with a `#` in the place of what a pattern finds.
    fn replaced(regex: &str, text: &str) -> String {
        let regex = translate(regex).unwrap_or_else(|construct| panic!("{regex}: {construct}"));
        fancy_regex::Regex::new(&regex).unwrap_or_else(|e| panic!("{regex}: {e}")).replace_all(text, "#").into_owned()
    }

    /// What `normalizers.Replace(Regex(pattern), "#")` of the `tokenizers` library 0.23 for Python makes of texts.
    #[test]
    fn patterns_find_what_the_reference_finds() {
        for (regex, text, wanted) in [
            ("^", "a\nb", "#a\n#b"),
            ("^", "\n\n", "#\n#\n"),
            ("$", "a\r\nb\n", "a\r#\nb#\n#"),
            (r"\s+$", "a  \n\n b ", "a#\n b#"),
            (r"\w", "a\u{200d}b\u{200c}1_é²½①", "#\u{200d}#\u{200c}#####①"),
            (r"[^\W\d_]", "a\u{200d}1_é²", "#\u{200d}1_#²"),
            (r"[\w&&[^\d]]+", "½ ² ab1", "½ ² #1"),
            (r"\W+", "a\u{200d} b", "a#b"),
            (r"[[:alpha:]]+", "é1日本ⅷ_", "#1#_"),
            (r"[[:^alpha:]]+", "é1 日", "é#日"),
            (r"[[:punct:]]", "a+。$`_", "a#####"),
            (r"[[:digit:][:space:]]", "१\u{3000}x", "##x"),
            (r"[[:upper:]]|[[:lower:]]", "aÉ日", "##日"),
            (r"[[:alnum:]]+", "aé1 ²", "# ²"),
            (r"(?m:a.b)", "a\nb", "#"),
            (r"(?i:AB)c", "abc", "#"),
            (r"[]^$]", "a]^$", "a###"),
            (r"\^\$", "^$", "#"),
        ] {
            assert_eq!(replaced(regex, text), wanted, "{regex} in {text:?}");
        }
        assert_eq!(replaced(r"\b", "ab\u{200d} c"), "#ab#\u{200d} #c#");
        assert_eq!(replaced(r"\b", "a²b x"), "#a²b# #x#");
        assert_eq!(replaced(r"\B", "ab ."), "a#b #.#");
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
