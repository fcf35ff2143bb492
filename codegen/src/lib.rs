//! Program in, object file out. Knows no models and no tensor names.

pub mod error;
pub mod expr;
pub mod fingerprint;
pub mod host;
pub mod isa;
pub mod kernels;
pub mod llvm;
pub mod math;
pub mod print;
pub mod program;
pub mod unit;
pub mod verify;

pub use error::Error;
pub use llvm::module::{Compiled, Emit};
pub use unit::{Options, Unit, compile, compile_units, probe_units, step_symbol};
