//! Program in, object file out. Knows no models and no tensor names.

pub mod error;
pub mod expr;
pub mod isa;
pub mod kernels;
pub mod llvm;
pub mod math;
pub mod program;

pub use error::Error;
