//! Sequences on top of steps: a causal entry fed with prompts and tokens, whatever the buckets are.

use crate::kv::{ContextFull, Slots};
use crate::step::{Row, RowTable, Session, StepError};

/// Why tokens cannot be fed.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The step refused.
    #[error(transparent)]
    Step(#[from] StepError),
    /// No positions left.
    #[error(transparent)]
    Full(#[from] ContextFull),
}

/// A session with the lengths of its slots.
pub struct Decoder<'a> {
    session: Session<'a>,
    slots: Slots,
    rows: RowTable,
}

impl<'a> Decoder<'a> {
    /// All slots empty.
    pub fn new(session: Session<'a>) -> Self {
        let program = session.program();
        Self { slots: Slots::new(program.slots(), program.ctx_size()), rows: RowTable::with_capacity(program.max_rows()), session }
    }

    /// The session.
    pub fn session(&mut self) -> &mut Session<'a> {
        &mut self.session
    }

    /// Refuses more positions than a sequence can have.
    pub fn check_room(&self, needed: usize) -> Result<(), DecodeError> {
        let ctx_size = self.session.program().ctx_size();
        if needed > ctx_size { Err(ContextFull { needed, ctx_size }.into()) } else { Ok(()) }
    }

    /// Lengths of the slots.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Forgets a slot's positions from `len` on.
    pub fn truncate(&mut self, slot: usize, len: usize) {
        self.slots.truncate(slot, len);
    }

    /// Logits of the `index`-th row that wanted them in the last step.
    pub fn logits(&self, index: usize) -> &[f32] {
        self.session.logits(index)
    }

    /// Appends `tokens` to a slot in steps of the largest bucket; afterwards `logits(0)` belongs to the last token.
    pub fn feed(&mut self, slot: usize, tokens: &[u32]) -> Result<(), DecodeError> {
        let chunk = self.session.program().max_rows();
        let begin = self.slots.extend(slot, tokens.len())?;
        for (at, part) in tokens.chunks(chunk).enumerate() {
            self.rows.clear();
            let first = begin + at * chunk;
            let last = at * chunk + part.len() == tokens.len();
            for (i, &token) in part.iter().enumerate() {
                let position = (first + i) as u32;
                self.rows.push(row(token, slot, position, last && i + 1 == part.len()));
            }
            self.run_or_forget(slot, first)?;
        }
        Ok(())
    }

    /// Appends one token to each of several slots; `logits(i)` belongs to `next[i]`. Splits by what a step holds:
    /// `each(i, logits)` sees every row's logits. A step that is refused takes no position.
    pub fn advance(&mut self, next: &[(usize, u32)], mut each: impl FnMut(usize, &[f32])) -> Result<(), DecodeError> {
        let chunk = self.session.program().max_scored_rows();
        for (at, part) in next.chunks(chunk).enumerate() {
            if let Err(error) = self.advance_once(part) {
                // As many positions were taken as there are rows.
                for &(slot, _) in &part[..self.rows.len()] {
                    self.slots.truncate(slot, self.slots.len(slot) - 1);
                }
                return Err(error);
            }
            for i in 0..part.len() {
                each(at * chunk + i, self.session.logits(i));
            }
        }
        Ok(())
    }

    fn advance_once(&mut self, next: &[(usize, u32)]) -> Result<(), DecodeError> {
        self.rows.clear();
        for &(slot, token) in next {
            let position = self.slots.extend(slot, 1)? as u32;
            self.rows.push(row(token, slot, position, true));
        }
        Ok(self.session.step(&self.rows)?)
    }

    /// Appends `tokens` to a slot and shows the logits behind every token: `each(i, logits)` after `tokens[i]`.
    pub fn score(&mut self, slot: usize, tokens: &[u32], mut each: impl FnMut(usize, &[f32])) -> Result<(), DecodeError> {
        let chunk = self.session.program().max_scored_rows();
        let begin = self.slots.extend(slot, tokens.len())?;
        for (at, part) in tokens.chunks(chunk).enumerate() {
            self.rows.clear();
            let first = begin + at * chunk;
            for (i, &token) in part.iter().enumerate() {
                self.rows.push(row(token, slot, (first + i) as u32, true));
            }
            self.run_or_forget(slot, first)?;
            for i in 0..part.len() {
                each(at * chunk + i, self.session.logits(i));
            }
        }
        Ok(())
    }

    /// Runs the rows of one slot; if the step refuses, the slot ends where the step would have begun.
    fn run_or_forget(&mut self, slot: usize, begin: usize) -> Result<(), DecodeError> {
        let done = self.session.step(&self.rows);
        if done.is_err() {
            self.slots.truncate(slot, begin);
        }
        Ok(done?)
    }
}

fn row(token: u32, slot: usize, position: u32, wants_logits: bool) -> Row {
    Row { token, slot: slot as u32, position, kv_index: position, segment: 0, wants_logits }
}
