//! The runtime that is linked into every executable, and its contract with generated code ([`abi`]).
//!
//! With the feature `exe` off, only [`abi`] exists: that is what codegen and the driver use.

pub mod abi;
