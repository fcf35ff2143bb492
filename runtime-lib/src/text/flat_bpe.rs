//! A BPE model that is searched where its tables lie.
//!
//! In: the tables behind the JSON of the compact form (see [`super::compact()`]). Out: the tokens of a word ([`FlatBpe::tokens`]), exactly
//! those of the `tokenizers` crate.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::Deserialize;

use super::vocabulary::{Rest, Table, Vocabulary};

/// The settings of a BPE model, as in `tokenizer.json`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct BpeSettings {
    pub(super) dropout: Option<f32>,
    unk_token: Option<String>,
    pub(super) continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(deserialize_with = "null_is_false")]
    fuse_unk: bool,
    #[serde(deserialize_with = "null_is_false")]
    byte_fallback: bool,
    #[serde(deserialize_with = "null_is_false")]
    pub(super) ignore_merges: bool,
}

fn null_is_false<'de, D: serde::Deserializer<'de>>(d: D) -> Result<bool, D::Error> {
    Ok(Option::<bool>::deserialize(d)?.unwrap_or(false))
}

/// A BPE model that is searched where it lies.
///
/// Gives exactly the tokens of the crate's `BPE` without dropout: merges are applied in the order of (rank, position).
pub(super) struct FlatBpe<'a> {
    pub(super) settings: BpeSettings,
    pub(super) vocabulary: Vocabulary<'a>,
    merge_slots: usize,
    merge: Table<'a>,
    merge_slot: Table<'a>,
    /// Ids of `<0x00>` to `<0xFF>` for byte fallback.
    byte_tokens: Vec<Option<u32>>,
}

#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    len: usize,
    prev: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

impl<'a> FlatBpe<'a> {
    pub(super) fn load(rest: &mut Rest<'a>, settings: BpeSettings) -> Option<Self> {
        let vocabulary = Vocabulary::load(rest)?;
        let [merges, merge_slots] = [rest.number()?, rest.number()?];
        if !merge_slots.is_power_of_two() {
            return None;
        }
        let (merge, merge_slot) = (rest.table(merges.checked_mul(3)?)?, rest.table(merge_slots)?);
        let byte_tokens = match settings.byte_fallback {
            true => (0..=255u8).map(|b| vocabulary.id(&format!("<{b:#04X}>"))).collect(),
            false => vec![],
        };
        Some(Self { settings, vocabulary, merge_slots, merge, merge_slot, byte_tokens })
    }

    /// (rank, new id) of a pair.
    fn merge_of(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        let mask = self.merge_slots - 1;
        let mut slot = hash_pair(left, right) as usize & mask;
        for _ in 0..self.merge_slots {
            let rank = self.merge_slot.get(slot)?.checked_sub(1)?;
            let at = rank as usize * 3;
            if self.merge.get(at)? == left && self.merge.get(at + 1)? == right {
                return Some((rank, self.merge.get(at + 2)?));
            }
            slot = (slot + 1) & mask;
        }
        None
    }

    /// Tokens of `word`: id and length.
    pub(super) fn tokens(&self, word: &str) -> tokenizers::Result<Vec<(u32, usize)>> {
        if word.is_empty() {
            return Ok(vec![]);
        }
        if self.settings.ignore_merges
            && let Some(id) = self.vocabulary.id(word)
        {
            return Ok(vec![(id, word.len())]);
        }
        let mut symbols = self.symbols(word)?;
        self.merge_all(&mut symbols);
        Ok(symbols.iter().map(|symbol| (symbol.id, symbol.len)).collect())
    }

    /// One symbol per character, before any merge.
    fn symbols(&self, word: &str) -> tokenizers::Result<Vec<Symbol>> {
        let settings = &self.settings;
        let mut symbols: Vec<Symbol> = Vec::with_capacity(word.len());
        let push = |symbols: &mut Vec<Symbol>, id, len| {
            let at = symbols.len();
            if let Some(last) = symbols.last_mut() {
                last.next = at;
            }
            let prev = at.checked_sub(1).unwrap_or(NONE);
            symbols.push(Symbol { id, len, prev, next: NONE });
        };
        let mut unknown: Option<(u32, usize)> = None;
        let mut decorated = String::new();
        let mut chars = word.char_indices().peekable();
        while let Some((begin, c)) = chars.next() {
            let len = c.len_utf8();
            let mut piece = &word[begin..begin + len];
            let prefix = settings.continuing_subword_prefix.as_deref().filter(|_| begin > 0);
            let suffix = settings.end_of_word_suffix.as_deref().filter(|_| chars.peek().is_none());
            if prefix.is_some() || suffix.is_some() {
                decorated.clear();
                decorated.push_str(prefix.unwrap_or(""));
                decorated.push_str(piece);
                decorated.push_str(suffix.unwrap_or(""));
                piece = &decorated;
            }
            if let Some(id) = self.vocabulary.id(piece) {
                if let Some((id, len)) = unknown.take() {
                    push(&mut symbols, id, len);
                }
                push(&mut symbols, id, len);
                continue;
            }
            let of_byte = |b: u8| self.byte_tokens.get(b as usize).copied().flatten();
            if settings.byte_fallback && piece.bytes().all(|b| of_byte(b).is_some()) {
                for id in piece.bytes().filter_map(of_byte) {
                    push(&mut symbols, id, 1);
                }
                continue;
            }
            if let Some(token) = &settings.unk_token {
                unknown = Some(match unknown {
                    Some((id, before)) if settings.fuse_unk => (id, before + len),
                    other => {
                        if let Some((id, len)) = other {
                            push(&mut symbols, id, len);
                        }
                        let id = self.vocabulary.id(token).ok_or_else(|| format!("unknown token {token:?} has no id"))?;
                        (id, len)
                    }
                });
            }
        }
        if let Some((id, len)) = unknown {
            push(&mut symbols, id, len);
        }
        Ok(symbols)
    }

    fn merge_all(&self, symbols: &mut Vec<Symbol>) {
        let mut queue = BinaryHeap::with_capacity(symbols.len());
        for (at, pair) in symbols.windows(2).enumerate() {
            if let Some((rank, new)) = self.merge_of(pair[0].id, pair[1].id) {
                queue.push(Reverse((rank, at, new)));
            }
        }
        while let Some(Reverse((_, at, new))) = queue.pop() {
            let left = symbols[at];
            if left.len == 0 || left.next == NONE {
                continue;
            }
            let right = symbols[left.next];
            // An entry is stale when one of its symbols has been merged since.
            if self.merge_of(left.id, right.id).is_none_or(|(_, id)| id != new) {
                continue;
            }
            symbols[left.next].len = 0;
            symbols[at] = Symbol { id: new, len: left.len + right.len, prev: left.prev, next: right.next };
            if right.next != NONE {
                symbols[right.next].prev = at;
                if let Some((rank, id)) = self.merge_of(new, symbols[right.next].id) {
                    queue.push(Reverse((rank, at, id)));
                }
            }
            if left.prev != NONE
                && let Some((rank, id)) = self.merge_of(symbols[left.prev].id, new)
            {
                queue.push(Reverse((rank, left.prev, id)));
            }
        }
        symbols.retain(|s| s.len != 0);
    }
}

pub(super) fn hash_pair(left: u32, right: u32) -> u64 {
    let hash = (u64::from(left) << 32 | u64::from(right)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ (hash >> 32)
}
