//! Texts on top of steps: a bidirectional entry fed with texts, each of which is a run of its own.
//!
//! In: texts as token ids. Out: what the caller reads of each text's output, in order of the texts. Two ways to run them:
//!
//! - **apart**: texts are grouped into parts of up to 128 rows (a longer text is a part of its own), and each thread runs whole parts
//!   alone, in a session of its own. Nobody waits at barriers, rows stay in the thread's own caches, and cores that are not equally fast
//!   balance out by claiming parts.
//! - **together**: all threads share steps of as many rows as the largest bucket holds. For what is too little to occupy every thread
//!   apart.
//!
//! Which way does not show in the output: a row's result does not depend on its company or on the number of threads.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::abi::Tile;
use crate::area::{MemoryUse, ResourceError, room_for};
use crate::profile::Profile;
use crate::step::{Row, RowTable, Session, StepError};

/// Rows of a part: as many as the matmuls need for their rate, and not so many that the rows leave a thread's second cache (BERT base in
/// bf16, one thread of a Zen 4 with 1 MB: 90.0 % of the peak with 128 rows, 88.3 % with 1024).
const PART_ROWS: usize = 128;
/// Texts run apart only as long as the last thread ends within so much of the time of equal shares: running together costs about as much
/// (BERT base, two threads: 3 to 4 %).
const SLACK: f64 = 1.03;

/// Why texts cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The step refused.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Longer than what one step holds; a bidirectional model cannot be split.
    #[error("text {}: {tokens} tokens, the executable holds {} in one step", index + 1, ctx_size.min(max_rows))]
    TooLong {
        /// Which text, counted from 0.
        index: usize,
        /// Its tokens.
        tokens: usize,
        /// Positions that the executable was built for.
        ctx_size: usize,
        /// Rows of the largest bucket.
        max_rows: usize,
    },
    /// Nothing to encode.
    #[error("text {}: no tokens", index + 1)]
    Empty {
        /// Which text, counted from 0.
        index: usize,
    },
}

/// Sessions that texts are given to.
pub struct Encoder<'a> {
    /// All threads.
    together: Lane<'a>,
    /// One thread each, with an arena of its own; made when they are first needed.
    apart: Vec<Mutex<Lane<'a>>>,
    /// Events that the running profile keeps, if there is one.
    profiled: Option<usize>,
}

/// A session and the rows of its next step.
struct Lane<'a> {
    session: Session<'a>,
    rows: RowTable,
}

impl<'a> Lane<'a> {
    fn new(session: Session<'a>) -> Self {
        Self { rows: RowTable::with_capacity(session.program().max_rows()), session }
    }

    /// One step of these texts.
    fn encode<T: AsRef<[u32]>, R>(&mut self, texts: &[T], read: impl Fn(&Session, usize) -> R) -> Result<Vec<R>, StepError> {
        self.rows.clear();
        for (run, text) in texts.iter().enumerate() {
            for (position, &token) in text.as_ref().iter().enumerate() {
                let position = position as u32;
                self.rows.push(Row { token, slot: run as u32, position, kv_index: position, segment: 0, wants_logits: false });
            }
        }
        self.session.step(&self.rows)?;
        Ok((0..texts.len()).map(|run| read(&self.session, run)).collect())
    }
}

impl<'a> Encoder<'a> {
    /// Wraps a session.
    pub fn new(session: Session<'a>) -> Self {
        Self { together: Lane::new(session), apart: Vec::new(), profiled: None }
    }

    /// The session of all threads. (A profile that it takes does not see texts apart: [`Encoder::start_profile`].)
    pub fn session(&mut self) -> &mut Session<'a> {
        &mut self.together.session
    }

    /// Most tokens of one text.
    pub fn text_limit(&self) -> usize {
        let program = self.together.session.program();
        program.max_rows().min(program.ctx_size())
    }

    /// Refuses texts that are empty, or longer than what one step holds.
    pub fn check_lengths(&self, lengths: impl IntoIterator<Item = usize>) -> Result<(), EncodeError> {
        let program = self.together.session.program();
        let (ctx_size, max_rows) = (program.ctx_size(), program.max_rows());
        for (index, tokens) in lengths.into_iter().enumerate() {
            if tokens > ctx_size || tokens > max_rows {
                return Err(EncodeError::TooLong { index, tokens, ctx_size, max_rows });
            }
            if tokens == 0 {
                return Err(EncodeError::Empty { index });
            }
        }
        Ok(())
    }

    /// Encodes all texts: `read(session, run)` of every text, in order, taken while its step's output is there, on any of the threads
    /// (where a panic ends the process).
    pub fn encode<T, R>(&mut self, texts: &[T], read: impl Fn(&Session, usize) -> R + Sync) -> Result<Vec<R>, EncodeError>
    where
        T: AsRef<[u32]> + Sync,
        R: Send,
    {
        let lengths: Vec<usize> = texts.iter().map(|text| text.as_ref().len()).collect();
        self.check_lengths(lengths.iter().copied())?;
        let session = &self.together.session;
        let (program, threads) = (session.program(), session.threads() as usize);
        let (max_rows, max_runs) = (program.max_rows(), program.slots().min(program.max_outputs()));
        let mut parts = fill(&lengths, PART_ROWS.min(max_rows), max_runs);
        parts.truncate(balanced(&lengths, &parts, threads));
        let mut results = Vec::with_capacity(texts.len());
        if threads == 1 {
            for part in parts {
                results.extend(self.together.encode(&texts[part], &read)?);
            }
        } else if !parts.is_empty() && self.has_lanes(&lengths, &parts)? {
            results.extend(self.encode_apart(texts, &parts, &read)?);
        }
        let first = results.len();
        for part in fill(&lengths[first..], max_rows, max_runs) {
            results.extend(self.together.encode(&texts[first + part.start..first + part.end], &read)?);
        }
        Ok(results)
    }

    /// Makes a lane for each thread. False: there is no memory for them and these parts, and texts run together.
    fn has_lanes(&mut self, lengths: &[usize], parts: &[Range<usize>]) -> Result<bool, StepError> {
        let asked = self.asked_apart(lengths, parts);
        if asked > 0 && room_for(MemoryUse::ThreadAreas, asked).is_err() {
            return Ok(false);
        }
        let session = &self.together.session;
        while self.apart.len() < session.threads() as usize {
            let mut single = match session.single() {
                Err(StepError::Resource(ResourceError::Memory { .. })) => return Ok(false),
                single => single?,
            };
            if let Some(events) = self.profiled {
                single.start_profile(events);
            }
            self.apart.push(Mutex::new(Lane::new(single)));
        }
        Ok(true)
    }

    /// Bytes that lanes would be the first to write to. Any of them may come to run any part, and all write at once: what each sees left
    /// before its step is not there for all.
    fn asked_apart(&mut self, lengths: &[usize], parts: &[Range<usize>]) -> u64 {
        let (mut rows, mut keys): (usize, Vec<Tile>) = (0, Vec::new());
        for part in parts {
            rows = rows.max(lengths[part.clone()].iter().sum());
            for (slot, &length) in lengths[part.clone()].iter().enumerate() {
                match keys.get_mut(slot) {
                    Some(longest) => longest.key_end = longest.key_end.max(length as i32),
                    None => keys.push(Tile { row_begin: 0, row_count: 0, slot: slot as i32, key_end: length as i32 }),
                }
            }
        }
        let session = &self.together.session;
        let missing = session.threads() as u64 - self.apart.len() as u64;
        let there = self.apart.iter_mut().map(|lane| lane.get_mut().unwrap_or_else(PoisonError::into_inner).session.asked(rows, &keys));
        there.sum::<u64>() + missing * session.single_asked(rows, &keys)
    }

    /// All parts, each on one thread, which has a lane.
    fn encode_apart<T: AsRef<[u32]> + Sync, R: Send>(
        &mut self,
        texts: &[T],
        parts: &[Range<usize>],
        read: &(impl Fn(&Session, usize) -> R + Sync),
    ) -> Result<Vec<R>, EncodeError> {
        let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(parts.len())));
        let lanes = &self.apart;
        self.together.session.on_each_thread(&|thread| {
            let mut lane = lanes[thread].lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(part) = parts.get(index) else { return };
                let result = lane.encode(&texts[part.clone()], read);
                if result.is_err() {
                    // No new parts; those before this one were claimed before it and will be there.
                    next.store(parts.len(), Ordering::Relaxed);
                }
                done.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
            }
        });
        let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.sort_by_key(|part| part.0);
        let mut results = Vec::with_capacity(texts.len());
        for (_, part) in done {
            results.extend(part?);
        }
        Ok(results)
    }

    /// Starts to measure regions; `events` per thread and bucket are kept one by one.
    pub fn start_profile(&mut self, events: usize) {
        self.profiled = Some(events);
        self.together.session.start_profile(events);
        for lane in &mut self.apart {
            lane.get_mut().unwrap_or_else(PoisonError::into_inner).session.start_profile(events);
        }
    }

    /// Stops measuring and returns what was measured, of all threads.
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.profiled = None;
        let mut profile = self.together.session.take_profile()?;
        for (thread, lane) in self.apart.iter_mut().enumerate() {
            if let Some(single) = lane.get_mut().unwrap_or_else(PoisonError::into_inner).session.take_profile() {
                profile.add_thread(thread, &single);
            }
        }
        Some(profile)
    }
}

/// Texts in order, as many to a part as have `max_rows` rows and `max_runs` texts; a longer one is a part of its own.
fn fill(lengths: &[usize], max_rows: usize, max_runs: usize) -> Vec<Range<usize>> {
    let mut parts: Vec<Range<usize>> = Vec::new();
    let mut rows = 0;
    for (index, &length) in lengths.iter().enumerate() {
        match parts.last_mut().filter(|part| rows + length <= max_rows && part.len() < max_runs) {
            Some(part) => part.end += 1,
            None => {
                parts.push(index..index + 1);
                rows = 0;
            }
        }
        rows += length;
    }
    parts
}

/// The most parts from the first on that threads which claim them in order finish in [`SLACK`] times the time of equal shares.
fn balanced(lengths: &[usize], parts: &[Range<usize>], threads: usize) -> usize {
    let (mut busy, mut sum, mut balanced) = (vec![0; threads], 0, 0);
    for (index, part) in parts.iter().enumerate() {
        let rows: usize = lengths[part.clone()].iter().sum();
        sum += rows;
        if let Some(first_free) = busy.iter_mut().min() {
            *first_free += rows;
        }
        let last = busy.iter().copied().max().unwrap_or(0);
        if (last * threads) as f64 <= SLACK * sum as f64 {
            balanced = index + 1;
        }
    }
    balanced
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::tests::{bucket, encoder, encoder_of, tokens};

    #[test]
    fn parts_are_filled_in_order() {
        assert_eq!(fill(&[60, 60, 60, 200, 8, 128, 1], 128, 16), [0..2, 2..3, 3..4, 4..5, 5..6, 6..7]);
        assert_eq!(fill(&[1; 7], 128, 3), [0..3, 3..6, 6..7]);
        assert!(fill(&[], 128, 3).is_empty());
    }

    #[test]
    fn threads_work_apart_where_they_end_together() {
        let balanced = |lengths: &[usize], threads| balanced(lengths, &fill(lengths, 128, 16), threads);
        assert_eq!(balanced(&[128; 8], 2), 8);
        assert_eq!(balanced(&[128; 3], 2), 2);
        assert_eq!(balanced(&[128; 15], 16), 0);
        assert_eq!(balanced(&[128; 31], 16), 16);
        // One long text would be waited for.
        assert_eq!(balanced(&[512, 100], 2), 0);
        assert_eq!(balanced(&[128, 124, 512], 2), 2);
        // Many texts: what is left at the end does not matter.
        assert_eq!(balanced(&[128; 101], 2), 101);
        assert_eq!(balanced(&[300, 7, 128], 1), 3);
    }

    /// What each lane sees left in the control group is there only once.
    #[test]
    fn lanes_ask_for_all_that_they_write_to_at_once() {
        const PAGE: u64 = 2 << 20;
        let mut encoder = encoder(3, 2, 3 * 3 * PAGE);
        let texts = [16, 10, 6].map(tokens);
        let (lengths, parts) = ([16, 10, 6], [0..1, 1..3]);
        // Scratch, output, arena, and the keys of two texts side by side.
        let each = 128 + 4 * 16 * 8 * 4 + 64 + 2 * PAGE;
        assert_eq!(encoder.asked_apart(&lengths, &parts), 2 * each);
        assert!(encoder.has_lanes(&lengths, &parts).unwrap());
        assert_eq!(encoder.asked_apart(&lengths, &parts), 2 * each);
        let mut run = |lane: usize, part: Range<usize>| {
            encoder.apart[lane].get_mut().unwrap().encode(&texts[part], |_, _| ()).unwrap();
            encoder.asked_apart(&lengths, &parts)
        };
        assert_eq!(run(0, 0..1), each + PAGE);
        assert_eq!(run(1, 1..3), PAGE);
        assert_eq!(run(0, 1..3), 0);
        assert_eq!(encoder.asked_apart(&[300], &parts[..1]), 2 * PAGE);
    }

    #[test]
    fn lanes_ask_for_the_largest_part_and_the_longest_texts() {
        const PAGE: u64 = 2 << 20;
        let mut large = bucket(16, 4);
        large.arena_bytes = 1000;
        let mut encoder = encoder_of(vec![bucket(4, 4), large], 1, 2, 3 * PAGE);
        let each = 128 + 4 * 16 * 8 * 4;
        for (lengths, arena, pages) in [([3, 4], 64, 1), ([3, 16], 1000, 1), ([16, 3], 1000, 1), ([3, 300], 1000, 2), ([300, 3], 1000, 2)] {
            assert_eq!(encoder.asked_apart(&lengths, &[0..1, 1..2]), 2 * (each + arena + pages * PAGE), "{lengths:?}");
        }
    }
}
