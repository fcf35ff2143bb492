//! A vocabulary that is searched where it lies: ids of tokens by their texts, and back.
//!
//! In: the tables of the compact form (see [`super::compact()`]). Out: [`Vocabulary::id`] and [`Vocabulary::token`].

/// Set in the end of a text where no token has its id.
pub(super) const HOLE: u32 = 1 << 31;

/// Little-endian u32 table inside the compact form.
#[derive(Clone, Copy)]
pub(super) struct Table<'a>(pub(super) &'a [u8]);

impl Table<'_> {
    pub(super) fn get(&self, index: usize) -> Option<u32> {
        let bytes = self.0.get(index * 4..index * 4 + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    }
    /// Entries.
    pub(super) fn len(&self) -> usize {
        self.0.len() / 4
    }
}

/// What is left of the compact form, from which tables are taken one by one.
pub(super) struct Rest<'a>(pub(super) &'a [u8]);

impl<'a> Rest<'a> {
    pub(super) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }
    pub(super) fn table(&mut self, entries: usize) -> Option<Table<'a>> {
        Some(Table(self.take(entries.checked_mul(4)?)?))
    }
    pub(super) fn number(&mut self) -> Option<usize> {
        self.table(1)?.get(0).map(|number| number as usize)
    }
}

/// Tokens with ids and a hash table of their texts.
pub(super) struct Vocabulary<'a> {
    /// Ids that have a token.
    pub(super) count: usize,
    slots: usize,
    text_end: Table<'a>,
    slot: Table<'a>,
    text: &'a [u8],
}

impl<'a> Vocabulary<'a> {
    pub(super) fn load(rest: &mut Rest<'a>) -> Option<Self> {
        let [ids, count, text_len, slots] = [rest.number()?, rest.number()?, rest.number()?, rest.number()?];
        if !slots.is_power_of_two() {
            return None;
        }
        Some(Vocabulary { count, slots, text_end: rest.table(ids)?, slot: rest.table(slots)?, text: rest.take(text_len)? })
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
        let mask = self.slots - 1;
        let mut slot = hash_text(token) as usize & mask;
        for _ in 0..self.slots {
            let id = self.slot.get(slot)?.checked_sub(1)?;
            if self.token(id) == Some(token) {
                return Some(id);
            }
            slot = (slot + 1) & mask;
        }
        None
    }

    /// All ids that have a token, with it.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (&'a str, u32)> {
        (0..self.text_end.len() as u32).filter_map(|id| Some((self.token(id)?, id)))
    }
}

/// A power of two with at most half of the slots in use.
pub(super) fn slots_for(entries: usize) -> usize {
    (entries * 2).max(2).next_power_of_two()
}

/// The place of a text in its table, modulo the slots.
pub(super) fn hash_text(text: &str) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for &byte in text.as_bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    hash ^ (hash >> 29)
}
