//! Threads of a build.
//!
//! In: work. Out: a thread that does it meanwhile, or the error that there is none to have (7).

use crate::error::Error;
use std::thread::{Builder, JoinHandle};

/// Bytes of the stack of a thread that compiles, whatever `RUST_MIN_STACK` says. (Control groups count them.)
pub const STACK_BYTES: usize = 2 << 20;

/// A thread that is to be joined.
pub fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>, Error> {
    Builder::new().stack_size(STACK_BYTES).spawn(work).map_err(Error::threads)
}

/// Work on a thread of its own, of which one result is wanted.
pub struct Worker<T>(JoinHandle<Result<T, Error>>);

impl<T: Send + 'static> Worker<T> {
    /// Starts it.
    pub fn start(work: impl FnOnce() -> Result<T, Error> + Send + 'static) -> Result<Worker<T>, Error> {
        spawn(work).map(Worker)
    }

    /// What came out; a panic of the thread is ours.
    pub fn join(self) -> Result<T, Error> {
        self.0.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
