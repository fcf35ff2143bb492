//! A Unigram model that is searched where its tables lie.
//!
//! In: the tables behind the JSON of the compact form (see [`super::compact()`]). Out: the tokens of a piece of text
//! ([`FlatUnigram::tokens`]), exactly those of the `tokenizers` crate: the way of pieces with the best sum of scores (Viterbi; Kudo, 2018).

use serde::Deserialize;

use super::vocabulary::{Rest, Table};

/// What an unknown character has less than the worst piece.
const UNKNOWN_PENALTY: f64 = 10.0;

/// The settings of a Unigram model, as in `tokenizer.json`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct UnigramSettings {
    pub(super) unk_id: Option<usize>,
    byte_fallback: bool,
}

/// A Unigram model that is searched where it lies.
pub(super) struct FlatUnigram<'a> {
    settings: UnigramSettings,
    /// Of an unknown character.
    unknown_score: f64,
    /// Little-endian f64 of each piece.
    score: &'a [u8],
    text_end: Table<'a>,
    /// Ids in order of their texts' bytes; of one text the last id.
    sorted: Table<'a>,
    text: &'a [u8],
    /// Ids of `<0x00>` to `<0xFF>` for byte fallback; none where one is missing.
    byte_tokens: Vec<Option<u32>>,
}

/// The best way to a place in the text.
#[derive(Clone, Copy, Default)]
struct Best {
    /// Its last piece.
    id: u32,
    score: f64,
    /// Where that begins.
    from: Option<usize>,
}

/// Places in the table of sorted pieces.
#[derive(Clone, Copy)]
struct Span {
    begin: usize,
    end: usize,
}

impl<'a> FlatUnigram<'a> {
    pub(super) fn load(rest: &mut Rest<'a>, settings: UnigramSettings) -> Option<Self> {
        let [pieces, sorted, text_len] = [rest.number()?, rest.number()?, rest.number()?];
        let worst = f64::from_le_bytes(rest.take(8)?.try_into().ok()?);
        let mut model = Self {
            settings,
            unknown_score: worst - UNKNOWN_PENALTY,
            score: rest.take(pieces.checked_mul(8)?)?,
            text_end: rest.table(pieces)?,
            sorted: rest.table(sorted)?,
            text: rest.take(text_len)?,
            byte_tokens: Vec::new(),
        };
        if model.settings.byte_fallback {
            model.byte_tokens = (0..=255u8).map(|b| model.id(&format!("<0x{b:02X}>"))).collect();
        }
        Some(model)
    }

    /// Pieces.
    pub(super) fn count(&self) -> usize {
        self.text_end.len()
    }

    fn bytes_of(&self, id: u32) -> Option<&'a [u8]> {
        let end = self.text_end.get(id as usize)?;
        let begin = (id as usize).checked_sub(1).map_or(Some(0), |before| self.text_end.get(before))?;
        self.text.get(begin as usize..end as usize)
    }

    /// The text of a piece.
    pub(super) fn piece(&self, id: u32) -> Option<&'a str> {
        std::str::from_utf8(self.bytes_of(id)?).ok()
    }

    fn score(&self, id: u32) -> f64 {
        let bytes = self.score.get(id as usize * 8..id as usize * 8 + 8);
        bytes.and_then(|bytes| bytes.try_into().ok()).map_or(f64::NEG_INFINITY, f64::from_le_bytes)
    }

    /// The piece at a place among the sorted ones.
    fn sorted_at(&self, place: usize) -> (u32, &'a [u8]) {
        let id = self.sorted.get(place).unwrap_or(u32::MAX);
        (id, self.bytes_of(id).unwrap_or_default())
    }

    /// All pieces.
    fn all(&self) -> Span {
        Span { begin: 0, end: self.sorted.len() }
    }

    /// The first place of the span whose piece is not `before`, which holds for a part of the span from its begin on.
    fn partition(&self, span: Span, before: impl Fn(&[u8]) -> bool) -> usize {
        let Span { mut begin, mut end } = span;
        while begin < end {
            let middle = begin.midpoint(end);
            if before(self.sorted_at(middle).1) { begin = middle + 1 } else { end = middle }
        }
        begin
    }

    /// The id of a text.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        let place = self.partition(self.all(), |piece| piece < text.as_bytes());
        let (id, piece) = self.sorted_at(place);
        (place < self.all().end && piece == text.as_bytes()).then_some(id)
    }

    /// All pieces that `text` begins with, the shortest first: `found(id, length)`.
    fn prefixes(&self, text: &[u8], mut found: impl FnMut(u32, usize)) {
        let mut span = self.all();
        for (at, byte) in text.iter().enumerate() {
            // Those of the span have the bytes before `at` in common; what ends there is the first of them.
            let begin = self.partition(span, |piece| piece.get(at).is_none_or(|b| b < byte));
            span = Span { begin, end: self.partition(Span { begin, ..span }, |piece| piece.get(at).is_some_and(|b| b <= byte)) };
            if span.begin == span.end {
                return;
            }
            let (id, piece) = self.sorted_at(span.begin);
            if piece.len() == at + 1 {
                found(id, at + 1);
            }
        }
    }

    /// Tokens of `text`: id and length, those of one unknown run or of its bytes as one length and, behind the first, none.
    pub(super) fn tokens(&self, text: &str) -> tokenizers::Result<Vec<(u32, usize)>> {
        let unknown = || self.settings.unk_id.map(|id| id as u32).ok_or("the text has an unknown character, and the model no unk_id");
        let mut best = vec![Best::default(); text.len() + 1];
        for (from, c) in text.char_indices() {
            let here = best[from].score;
            let mut offer = |id: u32, len: usize, score: f64| {
                let to = &mut best[from + len];
                let is_better = to.from.is_none() || score > to.score;
                if is_better {
                    *to = Best { id, score, from: Some(from) };
                }
                is_better
            };
            let mut has_char = false;
            self.prefixes(&text.as_bytes()[from..], |id, len| {
                offer(id, len, self.score(id) + here);
                has_char |= len == c.len_utf8();
            });
            if !has_char && offer(u32::MAX, c.len_utf8(), self.unknown_score + here) {
                best[from + c.len_utf8()].id = unknown()?;
            }
        }
        // From the end: places where pieces begin, runs of unknown ones as one.
        let mut pieces: Vec<(usize, usize)> = Vec::new();
        let (mut end, mut was_unknown) = (text.len(), false);
        while let Some(from) = best[end].from {
            let is_unknown = Some(best[end].id as usize) == self.settings.unk_id;
            match pieces.last_mut() {
                Some(last) if is_unknown && was_unknown => last.0 = from,
                _ => pieces.push((from, end)),
            }
            (end, was_unknown) = (from, is_unknown);
        }
        let mut tokens = Vec::with_capacity(pieces.len());
        for (from, end) in pieces.into_iter().rev() {
            let piece = &text[from..end];
            let of_byte = |b: u8| self.byte_tokens.get(usize::from(b)).copied().flatten();
            match self.id(piece) {
                Some(id) => tokens.push((id, piece.len())),
                None if self.settings.byte_fallback && piece.bytes().all(|b| of_byte(b).is_some()) => {
                    let lengths = std::iter::once(piece.len()).chain(std::iter::repeat(0));
                    tokens.extend(piece.bytes().filter_map(of_byte).zip(lengths));
                }
                None => tokens.push((unknown()?, piece.len())),
            }
        }
        Ok(tokens)
    }
}
