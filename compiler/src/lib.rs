//! The driver and middle end of rcompile.

pub mod passes;
pub mod plan;
