//! The only place that names inkwell (and so LLVM).
//!
//! [`builder`]: typed function builder. [`module`]: one unit from builder to object. [`optimise`]: the pass pipeline. [`object`]: target
//! machine, object bytes, assembly. [`memory`]: what happens without.

pub mod builder;
pub mod memory;
pub mod module;
pub mod object;
pub mod optimise;
