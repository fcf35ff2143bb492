//! The only place that names inkwell (and so LLVM).
//!
//! [`builder`]: typed function builder. [`module`]: one unit from builder to object. [`optimise`]: the pass pipeline. [`object`]: target
//! machine, object bytes, assembly.

pub mod builder;
pub mod module;
pub mod object;
pub mod optimise;
