//! Generated steps inside this process: what the compiler itself computes with compiled code (calibration).
//!
//! In: a shared object that was linked from the units of one program ([`crate::compile_units`]) for this machine, its weights. Out: the
//! entry's output. A step runs on the calling thread alone, so that its barriers have nothing to do; several threads can run one
//! [`HostStep`], each with a [`Scratch`] of its own. Bits do not depend on the number of threads that do.

use crate::error::Error;
use crate::program::Program;
use crate::unit::step_symbol;
use libloading::Library;
use rcompile_runtime::abi::{PAGE_POSITIONS, StepCtx, StepFn, Tile};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::path::Path;

/// What the linked object has to define beside the units: the runtime's functions, for a single thread.
pub const SINGLE_THREAD_RUNTIME: &str = "void rc_barrier(const void *ctx, unsigned thread, unsigned threads) {}
void rc_profile(const void *ctx, unsigned thread, unsigned region) {}
";

/// Sizes that the planner decides and the program does not hold.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of the KV cache of one slot.
    pub state_bytes: u64,
    /// Its pages.
    pub pages: u32,
    /// f32 elements of the output per row of the step.
    pub output_width: usize,
    /// Bytes of the weights area.
    pub weights_bytes: u64,
    /// Rows of the table that `token` looks up.
    pub tokens: u32,
}

/// A loaded step.
#[derive(Debug)]
pub struct HostStep {
    run: StepFn,
    // Unloads the code when dropped.
    _library: Library,
    sizes: Sizes,
    bucket: usize,
    least_rows: usize,
    tile_rows: usize,
    arena_bytes: u64,
    private_bytes: u64,
}

/// Memory for weights that files are packed into and code reads.
#[derive(Debug)]
pub struct HostWeights {
    file: File,
    at: *mut u8,
    len: usize,
}

impl HostWeights {
    /// `bytes` of zeros, in memory only.
    pub fn new(bytes: u64) -> std::io::Result<HostWeights> {
        // Room for reads of whole panels behind the last tensor.
        let len = bytes + 4096;
        let file = File::from(rustix::fs::memfd_create("rcompile-weights", rustix::fs::MemfdFlags::CLOEXEC)?);
        file.set_len(len)?;
        let len = usize::try_from(len).map_err(std::io::Error::other)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory. No reference to it is ever made.
        let at = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0) }?;
        Ok(HostWeights { file, at: at.cast(), len })
    }
    /// For writing at the offsets of the weights area while no step runs.
    pub fn file(&mut self) -> &File {
        &self.file
    }
    /// Writes elements at a byte offset, a multiple of four.
    ///
    /// # Panics
    /// They do not fit.
    pub fn write(&mut self, offset: usize, values: &[f32]) {
        self.check(offset, values.len());
        // SAFETY: in bounds and aligned (just checked); no step runs while `self` is borrowed mutably.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.at.add(offset).cast(), values.len()) };
    }
    /// Reads elements from a byte offset, a multiple of four.
    ///
    /// # Panics
    /// There are not as many.
    pub fn read(&self, offset: usize, values: &mut [f32]) {
        self.check(offset, values.len());
        // SAFETY: in bounds and aligned (just checked); writers borrow `self` mutably.
        unsafe { std::ptr::copy_nonoverlapping(self.at.add(offset).cast(), values.as_mut_ptr(), values.len()) };
    }
    fn check(&self, offset: usize, count: usize) {
        let end = count.checked_mul(4).and_then(|bytes| offset.checked_add(bytes));
        assert!(offset.is_multiple_of(4) && end.is_some_and(|end| end <= self.len), "{count} elements at {offset} of {}", self.len);
    }
}

impl Drop for HostWeights {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no step runs while `self` is borrowed mutably. Unmapping a whole mapping cannot fail.
        let _ = unsafe { munmap(self.at.cast(), self.len) };
    }
}

// SAFETY: the mapping belongs to this value alone.
unsafe impl Send for HostWeights {}
// SAFETY: through `&self` it is only read.
unsafe impl Sync for HostWeights {}

/// What one thread's steps write to.
#[derive(Debug)]
pub struct Scratch {
    state: Area,
    arena: Area,
    private: Area,
    output: Area,
}

/// Zeroed memory on a 128-byte border.
#[derive(Debug)]
struct Area(Vec<Line>);

#[repr(C, align(128))]
#[derive(Clone, Copy, Debug)]
struct Line([f32; 32]);

impl Area {
    fn new(bytes: u64) -> Area {
        Area(vec![Line([0.0; 32]); (bytes as usize).div_ceil(128) + 1])
    }
}

impl HostStep {
    /// Loads the step of a program from a shared object.
    ///
    /// # Safety
    /// Nothing can check here that
    /// - the object is what the units of this very program were compiled to, with [`SINGLE_THREAD_RUNTIME`] and nothing else,
    /// - for a CPU that this machine is,
    /// - and `sizes` are what the program's plan says.
    pub unsafe fn load(object: &Path, program: &Program, sizes: Sizes) -> Result<HostStep, Error> {
        // SAFETY: our own object has no initialisers, and the caller answers for its being ours.
        let library = unsafe { Library::new(object) }.map_err(|e| Error::Load(e.to_string()))?;
        // SAFETY: generated steps have this type; `run` is not used after `library` is gone.
        let run = unsafe { library.get::<StepFn>(step_symbol(program).as_bytes()) };
        let run = *run.map_err(|e| Error::internal("loading compiled code", e.to_string()))?;
        Ok(HostStep {
            run,
            _library: library,
            sizes,
            bucket: program.bucket as usize,
            least_rows: program.least_rows as usize,
            tile_rows: program.tile_rows.max(1) as usize,
            arena_bytes: program.arena_bytes,
            private_bytes: program.private_bytes,
        })
    }

    /// Memory for one thread.
    pub fn scratch(&self) -> Scratch {
        Scratch {
            state: Area::new(self.sizes.state_bytes),
            arena: Area::new(self.arena_bytes),
            private: Area::new(self.private_bytes),
            output: Area::new((self.bucket * self.sizes.output_width * 4) as u64),
        }
    }

    /// Elements from one row of the output to the next.
    pub fn output_width(&self) -> usize {
        self.sizes.output_width
    }

    /// Runs one sequence from position 0: a row per token, each of which sees what the program's masks let it see of all. Returns
    /// [`Sizes::output_width`] elements per row.
    ///
    /// # Panics
    /// Tokens, rows or weights beyond the sizes of the plan; fewer rows than the program's.
    pub fn run<'s>(&self, weights: &HostWeights, scratch: &'s mut Scratch, tokens: &[u32]) -> &'s [f32] {
        let rows = tokens.len();
        assert!((self.least_rows..=self.bucket).contains(&rows) && rows <= self.sizes.pages as usize * PAGE_POSITIONS, "{rows} rows");
        assert!(tokens.iter().all(|t| *t < self.sizes.tokens), "token out of range");
        assert!(weights.len as u64 >= self.sizes.weights_bytes, "weights are too short");
        let fits = |area: &Area, bytes: u64| assert!(area.0.len() as u64 * 128 >= bytes, "another step's scratch");
        fits(&scratch.state, self.sizes.state_bytes);
        fits(&scratch.arena, self.arena_bytes);
        fits(&scratch.private, self.private_bytes);
        fits(&scratch.output, (self.bucket * self.sizes.output_width * 4) as u64);
        let column = |value: &dyn Fn(usize) -> i32| (0..rows).map(value).collect::<Vec<i32>>();
        let (token, place, zero) = (column(&|i| tokens[i] as i32), column(&|i| i as i32), vec![0; rows]);
        let tiles = tiles(rows, self.tile_rows);
        let pages: Vec<i32> = (0..self.sizes.pages as i32).collect();
        let run_begin = [0, rows as i32];
        let ctx = StepCtx {
            rows: rows as u32,
            runs: 1,
            tiles: tiles.len() as u32,
            pages_per_slot: self.sizes.pages,
            weights: weights.at,
            state: scratch.state.0.as_mut_ptr().cast(),
            arena: scratch.arena.0.as_mut_ptr().cast(),
            private: scratch.private.0.as_mut_ptr().cast(),
            private_stride: self.private_bytes,
            output: scratch.output.0.as_mut_ptr().cast(),
            token: token.as_ptr(),
            slot: zero.as_ptr(),
            position: place.as_ptr(),
            kv_index: place.as_ptr(),
            segment: zero.as_ptr(),
            logit_row: zero.as_ptr(),
            run_begin: run_begin.as_ptr(),
            tile: tiles.as_ptr(),
            page_table: pages.as_ptr(),
            ..StepCtx::empty()
        };
        // SAFETY: `load` was given the code of this ABI for these sizes. Tables have the lengths that `ctx` states, rows, tokens and
        // positions were checked, every area is at least as large as planned, and nothing else writes to them: scratch is borrowed mutably,
        // and weights are written through their file only between steps.
        unsafe { (self.run)(&raw const ctx, 0, 1) };
        // SAFETY: in bounds (checked above) and initialised; borrowed like `scratch`.
        unsafe { std::slice::from_raw_parts(scratch.output.0.as_ptr().cast(), rows * self.sizes.output_width) }
    }
}

/// The tiles of one sequence. What a causal row may not see, the program's masks say.
fn tiles(rows: usize, tile_rows: usize) -> Vec<Tile> {
    let tile =
        |begin: usize| Tile { row_begin: begin as i32, row_count: tile_rows.min(rows - begin) as i32, slot: 0, key_end: rows as i32 };
    (0..rows).step_by(tile_rows).map(tile).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_lies_in_one_tile_and_may_see_all() {
        let found: Vec<(i32, i32, i32)> = tiles(70, 32).iter().map(|t| (t.row_begin, t.row_count, t.key_end)).collect();
        assert_eq!(found, [(0, 32, 70), (32, 32, 70), (64, 6, 70)]);
    }
}
