//! A BPE model that is searched where its tables lie.
//!
//! In: the tables behind the JSON of the compact form (see [`super::compact()`]). Out: the tokens of a word ([`FlatBpe::symbols`], then
//! [`FlatBpe::merge_all`]), exactly those of the `tokenizers` crate.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::Deserialize;

/// Set in the end of a text where no token has its id.
pub(super) const HOLE: u32 = 1 << 31;

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

/// Little-endian u32 table inside the compact form.
#[derive(Clone, Copy)]
pub(super) struct Table<'a>(pub(super) &'a [u8]);

impl Table<'_> {
    pub(super) fn get(&self, index: usize) -> Option<u32> {
        let bytes = self.0.get(index * 4..index * 4 + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    }
}

/// A BPE model that is searched where it lies.
///
/// Gives exactly the tokens of the crate's `BPE` without dropout: merges are applied in the order of (rank, position).
pub(super) struct FlatBpe<'a> {
    pub(super) settings: BpeSettings,
    pub(super) token_count: usize,
    token_slots: usize,
    merge_slots: usize,
    pub(super) text_end: Table<'a>,
    token_slot: Table<'a>,
    merge: Table<'a>,
    merge_slot: Table<'a>,
    text: &'a [u8],
    /// Ids of `<0x00>` to `<0xFF>` for byte fallback.
    byte_tokens: Vec<Option<u32>>,
}

#[derive(Clone, Copy)]
pub(super) struct Symbol {
    pub(super) id: u32,
    pub(super) len: usize,
    prev: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

impl<'a> FlatBpe<'a> {
    pub(super) fn load(bytes: &'a [u8], settings: BpeSettings) -> Option<Self> {
        let head = Table(bytes.get(..24)?);
        let field = |i| head.get(i).map(|v| v as usize);
        let (tokens, token_count, text_len) = (field(0)?, field(1)?, field(2)?);
        let (token_slots, merges, merge_slots) = (field(3)?, field(4)?, field(5)?);
        if !token_slots.is_power_of_two() || !merge_slots.is_power_of_two() {
            return None;
        }
        let mut rest = bytes.get(24..)?;
        let mut take = |len: usize| {
            let (head, tail) = rest.split_at_checked(len)?;
            rest = tail;
            Some(head)
        };
        let mut model = Self {
            settings,
            token_count,
            token_slots,
            merge_slots,
            text_end: Table(take(tokens * 4)?),
            token_slot: Table(take(token_slots * 4)?),
            merge: Table(take(merges * 12)?),
            merge_slot: Table(take(merge_slots * 4)?),
            text: take(text_len)?,
            byte_tokens: Vec::new(),
        };
        if model.settings.byte_fallback {
            model.byte_tokens = (0..=255u8).map(|b| model.id(&format!("<{b:#04X}>"))).collect();
        }
        Some(model)
    }

    pub(super) fn token(&self, id: u32) -> Option<&'a str> {
        let end = self.text_end.get(id as usize)?;
        if end & HOLE != 0 {
            return None;
        }
        let begin = match id {
            0 => 0,
            _ => self.text_end.get(id as usize - 1)? & !HOLE,
        };
        std::str::from_utf8(self.text.get(begin as usize..end as usize)?).ok()
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        let mask = self.token_slots - 1;
        let mut slot = hash_text(token) as usize & mask;
        for _ in 0..self.token_slots {
            let id = self.token_slot.get(slot)?.checked_sub(1)?;
            if self.token(id) == Some(token) {
                return Some(id);
            }
            slot = (slot + 1) & mask;
        }
        None
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

    /// One symbol per character, before any merge.
    pub(super) fn symbols(&self, word: &str) -> tokenizers::Result<Vec<Symbol>> {
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
            if let Some(id) = self.id(piece) {
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
                        let id = self.id(token).ok_or_else(|| format!("unknown token {token:?} has no id"))?;
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

    pub(super) fn merge_all(&self, symbols: &mut Vec<Symbol>) {
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

/// A power of two with at most half of the slots in use.
pub(super) fn slots_for(entries: usize) -> usize {
    (entries * 2).max(2).next_power_of_two()
}

pub(super) fn hash_text(text: &str) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for &byte in text.as_bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    hash ^ (hash >> 29)
}

pub(super) fn hash_pair(left: u32, right: u32) -> u64 {
    let hash = (u64::from(left) << 32 | u64::from(right)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ (hash >> 32)
}
