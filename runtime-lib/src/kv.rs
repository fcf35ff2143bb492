//! How far each KV slot is filled. The program keeps no counters: whoever runs steps decides here where rows go.

/// More positions than a sequence has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the sequence needs {needed} positions, the executable was built for {ctx_size}")]
pub struct ContextFull {
    /// Positions that the sequence would need.
    pub needed: usize,
    /// Positions that a slot has.
    pub ctx_size: usize,
}

/// Lengths of all slots.
#[derive(Clone, Debug)]
pub struct Slots {
    len: Vec<usize>,
    ctx_size: usize,
}

impl Slots {
    /// `slots` empty slots of `ctx_size` positions.
    pub fn new(slots: usize, ctx_size: usize) -> Self {
        Self { len: vec![0; slots], ctx_size }
    }

    /// Number of slots.
    pub fn count(&self) -> usize {
        self.len.len()
    }

    /// Positions of a slot that are in use.
    pub fn len(&self, slot: usize) -> usize {
        self.len[slot]
    }

    /// Positions left in a slot.
    pub fn room(&self, slot: usize) -> usize {
        self.ctx_size - self.len[slot]
    }

    /// Takes the next `count` positions of a slot and returns the first.
    pub fn extend(&mut self, slot: usize, count: usize) -> Result<usize, ContextFull> {
        let begin = self.len[slot];
        if count > self.ctx_size - begin {
            return Err(ContextFull { needed: begin + count, ctx_size: self.ctx_size });
        }
        self.len[slot] = begin + count;
        Ok(begin)
    }

    /// Forgets everything from position `len` on: a rejected draft, another continuation, the next sequence.
    pub fn truncate(&mut self, slot: usize, len: usize) {
        self.len[slot] = self.len[slot].min(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_fill_refuse_and_roll_back() {
        let mut slots = Slots::new(2, 4);
        assert_eq!(slots.extend(0, 3), Ok(0));
        let full = ContextFull { needed: 5, ctx_size: 4 };
        assert_eq!(slots.extend(0, 2), Err(full));
        assert!(full.to_string().contains('5') && full.to_string().contains('4'));
        assert_eq!((slots.len(0), slots.len(1), slots.room(0)), (3, 0, 1));
        slots.truncate(0, 1);
        assert_eq!(slots.extend(0, 3), Ok(1));
        assert_eq!(slots.extend(1, 4), Ok(0));
        assert_eq!(slots.room(1), 0);
    }
}
