//! The safe door to the generated functions: rows in, logits or pooled vectors out.
//!
//! A [`Program`] is one entry of the executable: its generated steps and its weights. A [`Session`] adds everything a step
//! writes to: state (KV cache), arena, scratch, output, the thread pool. [`Session::step`] takes a [`RowTable`], picks the
//! smallest bucket that holds it, groups its rows into runs and attention tiles, and runs the bucket's function on all
//! threads. After [`Session::new`] steps allocate nothing but to see whether a control group has room for them, and what a profile with
//! events keeps of each.

mod growth;

use std::ptr;

use crate::abi::{
    BucketInfo, CpuKind, EntryInfo, Manifest, OutputKind, POOLED_VECTORS, PROBE_ENTRY, PROBE_READ_BYTES, Probe, StepCtx, StepEntry, StepFn,
    Tile,
};
use crate::area::{Area, MemoryUse, ResourceError};
use crate::cost::Load;
use crate::cpu;
use crate::profile::Profile;
use crate::threads::Pool;
use growth::Growth;

/// Segments of a row. A table of segments has one row at least, BERT's two; the manifest does not say how many.
const SEGMENTS: u32 = 1;

/// Why a step cannot run.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Executable and runtime do not fit together.
    #[error("executable: {0}")]
    Broken(String),
    /// No memory, or no threads.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// A token id that the model does not have.
    #[error("token id {id}: expected an id below {vocab}")]
    Token {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab: u32,
    },
    /// No rows.
    #[error("a step without rows")]
    Empty,
    /// A row beyond the slots or positions that the executable has.
    #[error("{what} {found}: expected a value below {bound}")]
    Bound {
        /// Which value of the row.
        what: &'static str,
        /// What it is.
        found: u32,
        /// What it must stay below.
        bound: u32,
    },
    /// Rows that would meet in one slot: threads write and read them at once, in any order.
    #[error("KV index {kv_index} of slot {slot}: the rows of a slot must go up, and a text has a slot of its own")]
    Order {
        /// The slot.
        slot: u32,
        /// The row that does not follow those before it.
        kv_index: u32,
    },
    /// More rows, or more rows that want logits, than the largest bucket holds.
    #[error("a step of {rows} rows with {outputs} outputs: the largest bucket holds {max_rows} rows with {max_outputs} outputs")]
    TooLarge {
        /// Rows of the step.
        rows: usize,
        /// Rows that want logits, or runs.
        outputs: usize,
        /// Rows of the largest bucket.
        max_rows: usize,
        /// Outputs of the largest bucket.
        max_outputs: usize,
    },
}

/// One row of a step.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Token id.
    pub token: u32,
    /// KV slot.
    pub slot: u32,
    /// Position for RoPE and learned positions.
    pub position: u32,
    /// Where K and V of this row are written, behind those of the rows before it in the same slot.
    pub kv_index: u32,
    /// Segment (token type): 0.
    pub segment: u32,
    /// Whether this row's logits are wanted.
    pub wants_logits: bool,
}

/// The rows of a step, as columns. Clearing keeps the memory.
#[derive(Clone, Debug, Default)]
pub struct RowTable {
    token: Vec<i32>,
    slot: Vec<i32>,
    position: Vec<i32>,
    kv_index: Vec<i32>,
    segment: Vec<i32>,
    logit_row: Vec<i32>,
}

impl RowTable {
    /// An empty table with room for `rows` rows.
    pub fn with_capacity(rows: usize) -> Self {
        let column = || Vec::with_capacity(rows);
        Self { token: column(), slot: column(), position: column(), kv_index: column(), segment: column(), logit_row: column() }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.token.len()
    }

    /// True without rows.
    pub fn is_empty(&self) -> bool {
        self.token.is_empty()
    }

    /// Number of rows that want logits.
    pub fn logit_rows(&self) -> usize {
        self.logit_row.len()
    }

    /// Removes all rows.
    pub fn clear(&mut self) {
        self.token.clear();
        self.slot.clear();
        self.position.clear();
        self.kv_index.clear();
        self.segment.clear();
        self.logit_row.clear();
    }

    /// Adds a row.
    pub fn push(&mut self, row: Row) {
        if row.wants_logits {
            self.logit_row.push(self.len() as i32);
        }
        self.token.push(row.token as i32);
        self.slot.push(row.slot as i32);
        self.position.push(row.position as i32);
        self.kv_index.push(row.kv_index as i32);
        self.segment.push(row.segment as i32);
    }
}

/// One compiled bucket.
#[derive(Clone)]
struct Bucket {
    info: BucketInfo,
    run: StepFn,
}

/// One entry of the executable: what it is, its functions and its weights.
#[derive(Clone)]
pub struct Program<'a> {
    buckets: Vec<Bucket>,
    /// Number of the [`Probe`], function.
    probes: Vec<(u32, StepFn)>,
    weights: &'a [u8],
    output_stride: usize,
    /// Pooled output: rows of a run see each other in both directions.
    bidirectional: bool,
    vocab_size: u32,
    hidden_size: usize,
    slots: u32,
    ctx_size: u32,
    pages_per_slot: u32,
    state_bytes: u64,
}

impl<'a> Program<'a> {
    /// Puts entry `index` of the manifest together with its functions from the table of steps.
    ///
    /// # Safety
    /// The manifest [is possible](Manifest::is_possible). Each `run` in `steps` is a function of this ABI that, given a context as
    /// [`Session::step`] builds it from this manifest, reads `weights` within bounds and writes only state, arena, scratch and output of
    /// the sizes in the manifest. Probes obey [`Probe`].
    pub unsafe fn new(manifest: &Manifest, index: usize, steps: &[StepEntry], weights: &'a [u8]) -> Result<Self, StepError> {
        let broken = |what: String| StepError::Broken(what);
        let entry: &EntryInfo = manifest.entries.get(index).ok_or_else(|| broken(format!("no entry {index}")))?;
        let mut buckets = Vec::new();
        for info in &entry.buckets {
            let run = steps
                .iter()
                .find(|s| s.entry as usize == index && s.bucket == info.rows)
                .and_then(|s| s.run)
                .ok_or_else(|| broken(format!("{}: no function for bucket {}", entry.name, info.rows)))?;
            buckets.push(Bucket { info: info.clone(), run });
        }
        if (weights.len() as u64) < manifest.weight_bytes {
            return Err(broken("weights are shorter than the manifest says".into()));
        }
        let probes = steps.iter().filter(|s| s.entry == PROBE_ENTRY).filter_map(|s| Some((s.bucket, s.run?))).collect();
        Ok(Self {
            buckets,
            probes,
            weights,
            output_stride: entry.output_stride as usize,
            bidirectional: entry.output == OutputKind::Pooled,
            vocab_size: manifest.vocab_size,
            hidden_size: manifest.hidden_size as usize,
            slots: manifest.slots,
            ctx_size: manifest.ctx_size,
            pages_per_slot: manifest.state.pages_per_slot,
            state_bytes: manifest.state.bytes,
        })
    }

    /// Rows of the largest bucket.
    pub fn max_rows(&self) -> usize {
        self.last().rows as usize
    }

    /// Rows that may want logits (or runs of a pooled entry) in one step of the largest bucket.
    pub fn max_outputs(&self) -> usize {
        self.last().logit_rows as usize
    }

    /// Bytes of weights.
    pub fn weight_bytes(&self) -> usize {
        self.weights.len()
    }

    /// Most rows of a step in which every row wants logits.
    pub fn max_scored_rows(&self) -> usize {
        self.buckets.iter().map(|b| b.info.rows.min(b.info.logit_rows)).max().unwrap_or(0) as usize
    }

    /// Slots of the executable.
    pub fn slots(&self) -> usize {
        self.slots as usize
    }

    /// Positions per slot.
    pub fn ctx_size(&self) -> usize {
        self.ctx_size as usize
    }

    /// Ids are below this.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Compiled buckets, ascending.
    pub fn buckets(&self) -> impl Iterator<Item = &BucketInfo> {
        self.buckets.iter().map(|b| &b.info)
    }

    /// Bytes of a page of keys and values.
    fn page_bytes(&self) -> u64 {
        self.state_bytes / (u64::from(self.slots) * u64::from(self.pages_per_slot))
    }

    /// The most of the arena that steps of up to so many rows use.
    fn arena_bytes(&self, rows: usize) -> u64 {
        let last = self.bucket_for(rows, 0).unwrap_or(self.buckets.len() - 1);
        self.buckets[..=last].iter().map(|b| b.info.arena_bytes).max().unwrap_or(0)
    }

    /// Of a session whose first step writes to all of some areas of so many bytes.
    fn growth(&self, always: u64) -> Growth {
        Growth::new(always, self.state_bytes, self.page_bytes(), self.pages_per_slot.into())
    }

    fn last(&self) -> &BucketInfo {
        &self.buckets[self.buckets.len() - 1].info
    }

    /// The smallest bucket with room for `rows` rows, if it has room for `outputs` outputs. A larger one will not do: it has code only for
    /// more rows than this one holds.
    fn bucket_for(&self, rows: usize, outputs: usize) -> Option<usize> {
        let bucket = self.buckets.iter().position(|b| rows <= b.info.rows as usize)?;
        (outputs <= self.buckets[bucket].info.logit_rows as usize).then_some(bucket)
    }
}

/// Everything that steps of one entry write to.
pub struct Session<'a> {
    program: Program<'a>,
    pool: Pool,
    state: Area,
    arena: Area,
    private: Area,
    private_stride: usize,
    cpu: CpuKind,
    output: Area,
    page_table: Vec<i32>,
    run_begin: Vec<i32>,
    /// Per slot the end of the step's rows in it, as far as they were looked at.
    slot_end: Vec<i32>,
    tiles: Vec<Tile>,
    outputs: usize,
    growth: Growth,
    profile: Option<Profile>,
}

impl<'a> Session<'a> {
    /// Maps state, arena, scratch and output for `program` and runs its steps on `pool`.
    pub fn new(program: Program<'a>, pool: Pool) -> Result<Self, StepError> {
        let most = |of: fn(&BucketInfo) -> u64| program.buckets().map(of).max().unwrap_or(0);
        let private_stride = most(|b| b.private_bytes).max(128);
        let vectors = if program.bidirectional { POOLED_VECTORS } else { 1 };
        let output_bytes = most(|b| b.logit_rows.into()) * (program.output_stride * vectors * 4) as u64;
        let rows = program.max_rows();
        let pages = program.slots as usize * program.pages_per_slot as usize;
        let private_bytes = private_stride * u64::from(pool.threads());
        let growth = program.growth(private_bytes + output_bytes);
        Ok(Self {
            state: Area::new(MemoryUse::KvCache, program.state_bytes)?.with_small_pages(program.page_bytes()),
            arena: Area::new(MemoryUse::Arena, most(|b| b.arena_bytes))?,
            private: Area::new(MemoryUse::Scratch, private_bytes)?,
            private_stride: private_stride as usize,
            cpu: cpu::kind(),
            output: Area::new(MemoryUse::Output, output_bytes)?,
            page_table: (0..pages as i32).collect(),
            run_begin: Vec::with_capacity(rows + 1),
            slot_end: vec![0; program.slots as usize],
            tiles: Vec::with_capacity(rows),
            outputs: 0,
            growth,
            profile: None,
            program,
            pool,
        })
    }

    /// Bytes that steps of up to so many rows, whose keys end where these tiles' do, would be the first to write to.
    pub(crate) fn asked(&self, rows: usize, tiles: &[Tile]) -> u64 {
        self.growth.asked(self.program.arena_bytes(rows), tiles)
    }

    /// The same of a new session of one thread.
    pub(crate) fn single_asked(&self, rows: usize, tiles: &[Tile]) -> u64 {
        self.program.growth((self.private_stride + self.output.len) as u64).asked(self.program.arena_bytes(rows), tiles)
    }

    /// A session of the same program for one thread: whoever calls [`Session::step`].
    pub fn single(&self) -> Result<Session<'a>, StepError> {
        Session::new(self.program.clone(), Pool::new(1, 1, None).map_err(ResourceError::Threads)?)
    }

    /// Runs `work(thread)` on every thread and returns when all are done.
    pub fn on_each_thread(&mut self, work: &(dyn Fn(usize) + Sync)) {
        self.pool.on_each(work);
    }

    /// What this session runs.
    pub fn program(&self) -> &Program<'a> {
        &self.program
    }

    /// Threads that run its steps.
    pub fn threads(&self) -> u32 {
        self.pool.threads()
    }

    /// Runs the rows. Afterwards [`Session::logits`] or [`Session::pooled`] has the output.
    pub fn step(&mut self, rows: &RowTable) -> Result<(), StepError> {
        self.check(rows)?;
        let runs = self.group_runs(rows)?;
        let outputs = if self.program.bidirectional { runs } else { rows.logit_rows() };
        let bucket_index = self.program.bucket_for(rows.len(), outputs).ok_or_else(|| StepError::TooLarge {
            rows: rows.len(),
            outputs,
            max_rows: self.program.max_rows(),
            max_outputs: self.program.max_outputs(),
        })?;
        let bucket = &self.program.buckets[bucket_index];
        cut_tiles(&mut self.tiles, &self.run_begin, rows, bucket.info.tile_rows as usize, self.program.bidirectional);
        self.growth.admit(bucket.info.arena_bytes, &self.tiles)?;
        let profile = match &mut self.profile {
            Some(profile) => {
                profile.begin_step(bucket_index, |window| load(rows, &self.run_begin, &self.tiles, window, self.program.bidirectional))
            }
            None => ptr::null_mut(),
        };
        let ctx = StepCtx {
            rows: rows.len() as u32,
            logit_rows: rows.logit_rows() as u32,
            runs: runs as u32,
            tiles: self.tiles.len() as u32,
            token: rows.token.as_ptr(),
            slot: rows.slot.as_ptr(),
            position: rows.position.as_ptr(),
            kv_index: rows.kv_index.as_ptr(),
            segment: rows.segment.as_ptr(),
            logit_row: rows.logit_row.as_ptr(),
            run_begin: self.run_begin.as_ptr(),
            tile: self.tiles.as_ptr(),
            profile,
            ..self.empty_step()
        };
        // SAFETY: `Program::new` promised a function of this ABI. Tables have the lengths that `StepCtx` states, ids, slots and
        // positions were checked above, as was that no two rows have one place in the state, areas have the sizes of the manifest,
        // scratch is sized for the pool's threads, and `&mut self` keeps everything else away until all threads are done.
        unsafe { self.pool.run(bucket.run, &ctx) };
        if let Some(profile) = &mut self.profile {
            profile.end_step(bucket_index, rows.len() as u64);
        }
        self.outputs = outputs;
        Ok(())
    }

    /// A step without rows: areas, weights, barrier.
    fn empty_step(&self) -> StepCtx {
        StepCtx {
            pages_per_slot: self.program.pages_per_slot,
            cpu: self.cpu,
            weights: self.program.weights.as_ptr(),
            state: self.state.at,
            arena: self.arena.at,
            private: self.private.at,
            private_stride: self.private_stride as u64,
            output: self.output.at.cast(),
            page_table: self.page_table.as_ptr(),
            barrier: self.pool.barrier(),
            claims: self.pool.claims(),
            ..StepCtx::empty()
        }
    }

    /// Runs a probe on all threads, as often as `rows` says; false where the executable has none of this kind or not as many
    /// bytes of weights as it would read.
    pub fn probe(&mut self, probe: Probe, rows: u32) -> bool {
        let Some(run) = self.program.probes.iter().find(|p| p.0 == probe as u32).map(|p| p.1) else {
            return false;
        };
        let reads = matches!(probe, Probe::Read1 | Probe::Read4);
        if reads && u64::from(rows) * PROBE_READ_BYTES > self.program.weights.len() as u64 {
            return false;
        }
        let ctx = StepCtx { rows, ..self.empty_step() };
        // SAFETY: `Program::new` promised a function of this ABI; a probe reads the weights within the bound checked above and
        // writes at most 128 bytes of its thread's scratch.
        unsafe { self.pool.run(run, &ctx) };
        true
    }

    /// Logits of the `index`-th row that wanted them in the last step.
    pub fn logits(&self, index: usize) -> &[f32] {
        assert!(!self.program.bidirectional && index < self.outputs);
        self.output_at(index * self.program.output_stride, self.program.vocab_size as usize)
    }

    /// Pooled vector of the `run`-th run of the last step: `vector` counts mean, cls, max, last, then the normalised four.
    pub fn pooled(&self, run: usize, vector: usize) -> &[f32] {
        assert!(self.program.bidirectional && run < self.outputs && vector < POOLED_VECTORS);
        self.output_at((run * POOLED_VECTORS + vector) * self.program.output_stride, self.program.hidden_size)
    }

    fn output_at(&self, begin: usize, len: usize) -> &[f32] {
        assert!((begin + len) * 4 <= self.output.len);
        // SAFETY: in bounds by the assertion, initialised (mappings start as zeros), and no step runs while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.output.at.cast::<f32>().add(begin), len) }
    }

    /// Starts to measure regions; `events` per thread and bucket are kept one by one.
    pub fn start_profile(&mut self, events: usize) {
        self.profile = Some(Profile::new(self.program.buckets(), self.pool.threads(), events));
    }

    /// Stops measuring and returns what was measured.
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.profile.take()
    }

    /// Ids, slots and positions become addresses in generated code, so nothing out of range may reach it.
    fn check(&self, rows: &RowTable) -> Result<(), StepError> {
        let below = |what, column: &[i32], bound: u32| match column.iter().find(|&&v| v < 0 || v as u32 >= bound) {
            Some(&found) => Err(StepError::Bound { what, found: found as u32, bound }),
            None => Ok(()),
        };
        if rows.is_empty() {
            return Err(StepError::Empty);
        }
        let vocab = self.program.vocab_size;
        if let Some(&id) = rows.token.iter().find(|&&id| id < 0 || id as u32 >= vocab) {
            return Err(StepError::Token { id: id as u32, vocab });
        }
        below("slot", &rows.slot, self.program.slots)?;
        below("position", &rows.position, self.program.ctx_size)?;
        below("KV index", &rows.kv_index, self.program.ctx_size)?;
        below("segment", &rows.segment, SEGMENTS)
    }

    /// Fills `run_begin` and returns the number of runs. No two rows meet in a slot, nor two runs of a bidirectional step.
    fn group_runs(&mut self, rows: &RowTable) -> Result<usize, StepError> {
        self.run_begin.clear();
        if rows.len() > self.program.max_rows() {
            return Err(StepError::TooLarge {
                rows: rows.len(),
                outputs: rows.logit_rows(),
                max_rows: self.program.max_rows(),
                max_outputs: self.program.max_outputs(),
            });
        }
        self.slot_end.fill(0);
        for (row, (&slot, &kv_index)) in rows.slot.iter().zip(&rows.kv_index).enumerate() {
            let end = &mut self.slot_end[slot as usize];
            let begins = row == 0 || rows.slot[row - 1] != slot;
            if kv_index < *end || begins && *end > 0 && self.program.bidirectional {
                return Err(StepError::Order { slot: slot as u32, kv_index: kv_index as u32 });
            }
            *end = kv_index + 1;
            if begins {
                self.run_begin.push(row as i32);
            }
        }
        let runs = self.run_begin.len();
        self.run_begin.push(rows.len() as i32);
        Ok(runs)
    }
}

/// Cuts each run into tiles of at most `tile_rows` rows.
///
/// A causal tile sees the positions up to its own last one, a bidirectional tile all of its run.
fn cut_tiles(tiles: &mut Vec<Tile>, run_begin: &[i32], rows: &RowTable, tile_rows: usize, bidirectional: bool) {
    tiles.clear();
    let key_end = |of: &[i32]| of.iter().max().map_or(0, |&last| last + 1);
    for run in run_begin.windows(2) {
        let (begin, end) = (run[0] as usize, run[1] as usize);
        let run_end = key_end(&rows.kv_index[begin..end]);
        for row in (begin..end).step_by(tile_rows) {
            let count = tile_rows.min(end - row);
            tiles.push(Tile {
                row_begin: row as i32,
                row_count: count as i32,
                slot: rows.slot[row],
                key_end: if bidirectional { run_end } else { key_end(&rows.kv_index[row..row + count]) },
            });
        }
    }
}

/// What a step holds, if rows see at most `window` positions.
fn load(rows: &RowTable, run_begin: &[i32], tiles: &[Tile], window: Option<u32>, bidirectional: bool) -> Load {
    let window = window.map_or(u64::MAX, u64::from);
    let mut load = Load {
        steps: 1,
        logit_steps: u64::from(rows.logit_rows() > 0),
        rows: rows.len() as u64,
        logit_rows: rows.logit_rows() as u64,
        runs: run_begin.len().saturating_sub(1) as u64,
        tiles: tiles.len() as u64,
        ..Load::default()
    };
    for tile in tiles {
        let tile_rows = tile.row_begin as usize..(tile.row_begin + tile.row_count) as usize;
        let seen = |row: usize| if bidirectional { tile.key_end } else { rows.kv_index[row] + 1 };
        load.row_positions += tile_rows.map(|row| (seen(row) as u64).min(window)).sum::<u64>();
    }
    for run in run_begin.windows(2) {
        let end = tiles.iter().filter(|t| (run[0]..run[1]).contains(&t.row_begin)).map(|t| t.key_end as u64).max().unwrap_or(0);
        load.run_positions += end.min(window.saturating_add((run[1] - run[0]) as u64 - 1));
    }
    load
}

#[cfg(test)]
pub(crate) mod tests;
