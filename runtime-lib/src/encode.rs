//! Texts on top of steps: a bidirectional entry fed with several texts side by side.

use crate::step::{Row, RowTable, Session, StepError};

/// Why texts cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The step refused.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Longer than what one step holds; a bidirectional model cannot be split.
    #[error("text {index} has {tokens} tokens, the executable holds {limit} in one step")]
    TooLong {
        /// Which text, counted from 0.
        index: usize,
        /// Its tokens.
        tokens: usize,
        /// The limit.
        limit: usize,
    },
    /// Nothing to encode.
    #[error("text {index} has no tokens")]
    Empty {
        /// Which text, counted from 0.
        index: usize,
    },
}

/// A session that packs texts into steps.
pub struct Encoder<'a> {
    session: Session<'a>,
    rows: RowTable,
}

impl<'a> Encoder<'a> {
    /// Wraps a session.
    pub fn new(session: Session<'a>) -> Self {
        Self { rows: RowTable::with_capacity(session.program().max_rows()), session }
    }

    /// The session.
    pub fn session(&mut self) -> &mut Session<'a> {
        &mut self.session
    }

    /// Most tokens of one text.
    pub fn text_limit(&self) -> usize {
        let program = self.session.program();
        program.max_rows().min(program.ctx_size())
    }

    /// Encodes all texts, in order; `each(text, session, run)` sees every text once, while its step's output is there.
    pub fn encode<T: AsRef<[u32]>>(&mut self, texts: &[T], mut each: impl FnMut(usize, &Session, usize)) -> Result<(), EncodeError> {
        let limit = self.text_limit();
        for (index, text) in texts.iter().enumerate() {
            let tokens = text.as_ref().len();
            if tokens > limit {
                return Err(EncodeError::TooLong { index, tokens, limit });
            }
            if tokens == 0 {
                return Err(EncodeError::Empty { index });
            }
        }
        let program = self.session.program();
        let max_rows = program.max_rows();
        let max_runs = program.slots().min(program.max_outputs()).max(1);
        let mut first = 0;
        while first < texts.len() {
            self.rows.clear();
            let mut runs = 0;
            for text in &texts[first..] {
                let text = text.as_ref();
                if runs == max_runs || self.rows.len() + text.len() > max_rows {
                    break;
                }
                for (position, &token) in text.iter().enumerate() {
                    self.rows.push(Row {
                        token,
                        slot: runs as u32,
                        position: position as u32,
                        kv_index: position as u32,
                        segment: 0,
                        wants_logits: false,
                    });
                }
                runs += 1;
            }
            self.session.step(&self.rows)?;
            for run in 0..runs {
                each(first + run, &self.session, run);
            }
            first += runs;
        }
        Ok(())
    }
}
