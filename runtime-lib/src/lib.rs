//! The runtime that is linked into every executable, and its contract with generated code ([`abi`]).
//!
//! In: the payload and the generated steps that the link stage put into the executable. Out: the executable's command line.
//! From the inside out: [`threads`] runs a generated step on all cores, [`step`] is the safe door to it, [`profile`] measures it,
//! [`decode`] and
//! [`encode`] feed sequences and texts through that door, [`area`] is what it takes of memory, [`text`] and [`sample`] turn texts into
//! tokens and logits into tokens, [`payload`] and [`cpu`] check what the executable is made of and runs on, `cli` is what the user sees.
//!
//! There is no floating-point loop of a model in this crate: all of them are generated.
//!
//! With the feature `exe` off, only [`abi`], [`about`], [`cost`], [`cpu`], [`destination`] and [`logits`] exist: that is what codegen
//! (`abi`, and `cpu` for `--cpu native` and for steps in the compiler's own process) and the driver use. The driver also takes the feature
//! `text`, the compact tokenizer, which it writes and executables read, and `memory`, the allocator of both.

pub mod abi;
pub mod about;
pub mod cost;
pub mod cpu;
pub mod destination;
pub mod logits;
#[cfg(feature = "text")]
pub mod text;
mod tiles;

#[cfg(feature = "exe")]
pub mod area;
#[cfg(feature = "memory")]
pub mod cgroup;
#[cfg(feature = "exe")]
mod cli;
#[cfg(feature = "exe")]
mod copy;
#[cfg(feature = "exe")]
pub mod cpus;
#[cfg(feature = "exe")]
pub mod decode;
#[cfg(feature = "exe")]
pub mod encode;
#[cfg(feature = "exe")]
pub mod kv;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(feature = "exe")]
pub mod payload;
#[cfg(feature = "exe")]
mod process;
#[cfg(feature = "exe")]
pub mod profile;
#[cfg(feature = "exe")]
pub mod sample;
#[cfg(feature = "exe")]
pub mod step;
#[cfg(feature = "exe")]
pub mod threads;

#[cfg(feature = "exe")]
pub use entry::rc_main;

#[cfg(feature = "exe")]
mod entry {
    use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
    use std::os::unix::ffi::OsStrExt;

    use crate::abi::StepEntry;
    use crate::{cli, memory, payload};

    /// What the entry stub's `main` calls.
    ///
    /// # Safety
    /// `argv` has `argc` C strings. `payload` is the start of the payload segment, mapped for the life of the process. `steps`
    /// is a table ended by an entry without function, made for the manifest in that payload.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn rc_main(argc: c_int, argv: *const *const c_char, payload: *const c_void, steps: *const StepEntry) -> c_int {
        memory::leave_without_memory(crate::process::remove_draft);
        std::panic::set_hook(Box::new(|panic| cli::leave_at_panic(panic)));
        let args: Vec<OsString> = (0..usize::try_from(argc).unwrap_or(0))
            .map(|i| {
                // SAFETY: by contract of this function.
                let arg = unsafe { CStr::from_ptr(*argv.add(i)) };
                OsStr::from_bytes(arg.to_bytes()).to_owned()
            })
            .collect();
        let mut count = 0;
        // SAFETY: by contract the table is ended by an entry without function.
        while unsafe { (*steps.add(count)).run.is_some() } {
            count += 1;
        }
        // SAFETY: `count` entries were just seen; the table is part of the executable.
        let steps = unsafe { std::slice::from_raw_parts(steps, count) };
        // SAFETY: by contract of this function.
        cli::run(args, || unsafe { payload::Payload::open(payload.cast()) }, steps)
    }
}
