//! Regular expressions, and the texts that they, and whole tokenizers, are tried with.

use std::collections::BTreeSet;
use std::time::Duration;

use fancy_regex::Expr;
use serde_json::Value;

use super::{FILE, PROBE_TIME_MAX, malformed, oniguruma};
use crate::error::{Error, Kind, cut};
use crate::guard;
use crate::json;

/// Longest regular expression in bytes.
const PATTERN_BYTES_MAX: usize = 1 << 16;

/// The patterns of a file, which share one time limit; equal ones are tried once.
pub(super) struct Patterns {
    tried: BTreeSet<String>,
    /// What those that were not tried yet may take.
    pub(super) time_left: Duration,
}

impl Patterns {
    /// None yet.
    pub(super) fn new(time_max: Duration) -> Patterns {
        Patterns { tried: BTreeSet::new(), time_left: time_max }
    }

    /// A pattern compiles and does not ask for exponential time.
    pub(super) fn check(&mut self, place: &str, pattern: Option<&Value>) -> Result<(), Error> {
        let Some(regex) = pattern.and_then(|p| p.get("Regex")) else { return Ok(()) };
        if regex.as_str().is_some_and(|regex| !self.tried.insert(regex.to_string())) {
            return Ok(());
        }
        let start = computed();
        let checked = check_regex(place, regex, self.time_left);
        self.time_left = self.time_left.saturating_sub(computed() - start);
        checked
    }
}

/// Whether a pattern may match where there is no text. A look around may do so though it does not match the empty text.
pub(super) fn can_be_empty(pattern: Option<&Value>) -> bool {
    let Some(regex) = pattern.and_then(|p| p.get("Regex")).and_then(Value::as_str) else {
        return pattern.and_then(|p| p.get("String")).and_then(Value::as_str) == Some("");
    };
    let looks = ["(?=", "(?!", "(?<=", "(?<!", "^", "$", "\\b", "\\B", "\\A", "\\z", "\\Z", "\\G", "\\K", "\\<", "\\>"];
    let positive = regex.replace("[^", "[");
    looks.iter().any(|look| positive.contains(look)) || fancy_regex::Regex::new(regex).is_ok_and(|r| r.is_match("").unwrap_or(true))
}

fn check_regex(place: &str, regex: &Value, time_max: Duration) -> Result<(), Error> {
    let start = computed();
    let Some(regex) = regex.as_str() else {
        return Err(malformed(place, "has the wrong type", "a regular expression", json::show(regex)));
    };
    let shown = format!("`{}`", cut(regex, 90));
    if regex.len() > PATTERN_BYTES_MAX {
        let expected = format!("at most {PATTERN_BYTES_MAX} bytes");
        return Err(Error::new(Kind::Limit, FILE, place, "is too long", expected, format!("{} bytes", regex.len())));
    }
    let translated = oniguruma::translate(regex).map_err(|construct| {
        let expected = format!("a pattern without {construct}");
        Error::new(Kind::Unsupported, FILE, place, "is not supported", expected, shown.clone())
    })?;
    let invalid = || malformed(place, "is no valid regular expression", "a pattern that compiles", shown.clone());
    let Ok(Some(nests)) = guard::catch(|| Expr::parse_tree(&translated).ok().map(|tree| nests_repetitions(&tree.expr))) else {
        return Err(invalid());
    };
    if nests {
        let what = "may take exponential time";
        return Err(Error::new(Kind::Limit, FILE, place, what, "no repetition of a repetition", shown));
    }
    // The engine of executables, too, which refuse a text where it gives up a search.
    let Ok(Some(compiled)) = guard::catch(|| fancy_regex::Regex::new(&translated).ok()) else { return Err(invalid()) };
    let in_time = || if computed() - start > time_max { Err("takes too long") } else { Ok(()) };
    for (what, text) in probe_texts(usize::MAX) {
        let searched = guard::catch(|| {
            // To look at the time takes as long as to find a word.
            let now_and_then = |count: usize| if count.is_multiple_of(16) { in_time() } else { Ok(()) };
            let mut found = compiled.find_iter(&text).enumerate();
            found.try_for_each(|(count, found)| found.map_or(Err("takes too many steps"), |_| now_and_then(count)))?;
            in_time()
        });
        if let Err(why) = searched.unwrap_or(Err("panics")) {
            let expected = format!("searches that end soon, all patterns within {} s", PROBE_TIME_MAX.as_secs());
            return Err(Error::new(Kind::Limit, FILE, place, format!("{why} for {what}"), expected, shown));
        }
    }
    Ok(())
}

/// How long this thread has computed: what is refused does not depend on what else runs.
pub(super) fn computed() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// What tends to break tokenizers, in growing lengths up to `length_max` bytes, so that even exponential time is noticed before it matters.
pub(super) fn probe_texts(length_max: usize) -> impl Iterator<Item = (&'static str, String)> {
    let units: [(&str, &str); 7] = [
        ("letters", "a"),
        ("spaces", " "),
        ("digits", "1"),
        ("line breaks", "\n"),
        ("marks", "!'"),
        ("words", "don't stop \u{e4}\u{f6} \u{4f60}\u{597d} \u{1f600}\u{200d} "),
        ("spaces before a letter", "  \t a"),
    ];
    let lengths = [16usize, 256, 2048, 16_384].map(|length| length.min(length_max));
    units.into_iter().flat_map(move |(what, unit)| lengths.map(|length| (what, unit.repeat(length.div_ceil(unit.len())))))
}

/// Whether something that is repeated without bound may be nothing but a repetition without bound itself, as in `(a+)+` or `(a+|b)+`: then
/// one text can be split in exponentially many ways.
fn nests_repetitions(expr: &Expr) -> bool {
    let of_parts = parts(expr).into_iter().any(nests_repetitions);
    of_parts || matches!(expr, Expr::Repeat { child, hi: usize::MAX, .. } if is_repetition(child))
}

/// Whether `expr` may be a repetition without bound, and nothing else but what may be left out.
fn is_repetition(expr: &Expr) -> bool {
    match expr {
        Expr::Repeat { child, hi, .. } => *hi == usize::MAX || is_repetition(child),
        Expr::Concat(parts) => {
            let may_be_left_out = |part: &Expr| matches!(part, Expr::Empty | Expr::Repeat { lo: 0, .. });
            parts.iter().any(is_repetition) && parts.iter().all(|part| is_repetition(part) || may_be_left_out(part))
        }
        _ => parts(expr).into_iter().any(is_repetition),
    }
}

/// The expressions that make up `expr`.
fn parts(expr: &Expr) -> Vec<&Expr> {
    match expr {
        Expr::Concat(parts) | Expr::Alt(parts) => parts.iter().collect(),
        Expr::Group(part) | Expr::AtomicGroup(part) | Expr::LookAround(part, _) | Expr::Repeat { child: part, .. } => vec![part],
        Expr::Conditional { condition, true_branch, false_branch } => vec![condition, true_branch, false_branch],
        Expr::Empty
        | Expr::Any { .. }
        | Expr::Assertion(_)
        | Expr::Literal { .. }
        | Expr::Delegate { .. }
        | Expr::Backref(_)
        | Expr::KeepOut
        | Expr::ContinueFromPreviousMatchEnd
        | Expr::BackrefExistsCondition(_) => vec![],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_share_their_time() {
        let pattern = |regex: &str| serde_json::json!({ "Regex": regex });
        let mut patterns = Patterns::new(PROBE_TIME_MAX);
        let check = |patterns: &mut Patterns, regex: &str| patterns.check("pattern", Some(&pattern(regex)));
        check(&mut patterns, "a+").unwrap();
        assert!(patterns.time_left < PROBE_TIME_MAX);
        patterns.time_left = Duration::ZERO;
        // It was tried already.
        check(&mut patterns, "a+").unwrap();
        let e = check(&mut patterns, "b+").unwrap_err();
        assert_eq!(e.exit_code(), 7, "{e}");
        assert!(e.to_string().contains("takes too long"), "{e}");
    }

    #[test]
    fn matches_of_nothing() {
        let empty = |key: &str, pattern: &str| can_be_empty(Some(&serde_json::json!({ key: pattern })));
        for regex in ["a*", "a?", "(?=b)", "(?<!x)", r"\bx*", "^", "x|$", "()", "a{0,2}", r"\B", ""] {
            assert!(empty("Regex", regex), "{regex}");
        }
        for regex in ["a", " {2,}", r"\s+", "[^a]", "a|b", "``"] {
            assert!(!empty("Regex", regex), "{regex}");
        }
        assert!(empty("String", "") && !empty("String", "^"));
    }

    #[test]
    fn repetitions_of_repetitions() {
        let nests = |regex: &str| nests_repetitions(&Expr::parse_tree(regex).unwrap().expr);
        for bad in ["(a+)+$", "(?:a*)*", "((a+))+", "(a+|b)+", "(a?b*)+", "x(?:\\s+)*y", "([ab]+){2,}", "(?i:a+)+", "((a+)?)+"] {
            assert!(nests(bad), "{bad}");
        }
        for good in [
            "a+",
            "(ab)+",
            "(?:\\d{3})+",
            "(?:a+b)+",
            "[(+)]+",
            "\\(a+\\)+",
            "(a+)?",
            "(a?b?)+",
            "(a+){1,3}",
            "(a+|b)",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ] {
            assert!(!nests(good), "{good}");
        }
    }
}
