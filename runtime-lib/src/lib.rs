//! The runtime that is linked into every executable, and its contract with generated code ([`abi`]).
//!
//! With the feature `exe` off, only [`abi`] exists: that is what codegen and the driver use. The feature `text` adds the
//! compact tokenizer, which the driver writes and executables read.

pub mod abi;
#[cfg(feature = "exe")]
pub mod cpu;
#[cfg(feature = "exe")]
pub mod decode;
#[cfg(feature = "exe")]
pub mod encode;
#[cfg(feature = "exe")]
pub mod kv;
#[cfg(feature = "exe")]
pub mod payload;
#[cfg(feature = "exe")]
pub mod sample;
#[cfg(feature = "exe")]
pub mod step;
#[cfg(feature = "text")]
pub mod text;
#[cfg(feature = "exe")]
pub mod threads;
