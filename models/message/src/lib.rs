//! What messages say, of the compiler and of executables: text from strangers (file, field and tensor names, texts of users), and sizes.
//!
//! In: any text. Out: text of one line in which nothing can move the cursor, hide or reverse the reading order, not longer than asked.

/// No line of a message is longer than this, in bytes.
pub const LINE_MAX: usize = 500;

/// `text` with every character escaped that could move the cursor, start a new line, hide or reverse the reading order.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() || is_hidden(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

/// Whether a character that is no control shows nothing, or changes how others show: separators of lines and paragraphs, marks of
/// annotations, and Unicode's `Default_Ignorable_Code_Point`, with all of `Bidi_Control`, joiners, selectors of variants, fillers and tags.
fn is_hidden(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
        | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// Bytes as people read them: `1.23 GB`, decimal units.
pub fn size(bytes: u64) -> String {
    let b = bytes as f64;
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", b / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", b / 1e6),
        _ => format!("{:.2} GB", b / 1e9),
    }
}

/// [`escape`]d and at most `max` bytes long; what was cut shows as `...`.
pub fn cut(text: &str, max: usize) -> String {
    // Escaping makes text longer, so no more than `max` bytes of the original can matter.
    let head = &text[..text.floor_char_boundary(max + 4)];
    let escaped = escape(head);
    if escaped.len() <= max && head.len() == text.len() {
        return escaped;
    }
    let end = escaped.floor_char_boundary(max.saturating_sub(3));
    format!("{}...", &escaped[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!([0, 999, 1_000, 1_771_200, 2_470_000_000].map(size), ["0 B", "999 B", "1.0 kB", "1.8 MB", "2.47 GB"]);
    }

    #[test]
    fn what_moves_hides_or_reverses_is_escaped() {
        assert_eq!(escape("a\r\n\tb\u{1b}[2J\u{9b}"), r"a\r\n\tb\u{1b}[2J\u{9b}");
        assert_eq!(escape("x\u{200b}y\u{200f}\u{202e}\u{2066}\u{feff}"), r"x\u{200b}y\u{200f}\u{202e}\u{2066}\u{feff}");
        assert_eq!(escape("\u{61c}\u{2060}\u{e0041}"), r"\u{61c}\u{2060}\u{e0041}");
        let first_and_last = "\u{ad} \u{34f} \u{115f}\u{1160} \u{17b4}\u{17b5} \u{180b}\u{180e}\u{180f} \u{2028}\u{2029} \u{2064}\u{2065}\u{206f} \
            \u{3164} \u{fe00}\u{fe0f} \u{ffa0} \u{fff0}\u{fff9}\u{fffb} \u{1bca0}\u{1bca3} \u{1d173}\u{1d17a} \u{e0000}\u{e0fff}";
        let expected: String = first_and_last.chars().map(|c| if c == ' ' { " ".into() } else { c.escape_unicode().to_string() }).collect();
        assert_eq!(escape(first_and_last), expected);
        let next_to_them =
            "\u{ac}\u{ae}\u{61b}\u{61d}\u{180a}\u{1810}\u{200a}\u{2010}\u{2027}\u{202f}\u{205f}\u{2070}\u{fdff}\u{fe10}\u{ffef}\u{fffc}";
        assert_eq!(escape(next_to_them), next_to_them);
        assert_eq!(escape("Ω \\ \"é\" 日本"), "Ω \\ \"é\" 日本");
    }

    #[test]
    fn cut_keeps_what_fits() {
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abcd", 3), "...");
        assert_eq!(cut("äöüäöü", 7), "äö...");
    }
}
