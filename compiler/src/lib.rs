//! The driver and middle end of rcompile.

pub mod error;
pub mod link;
pub mod options;
pub mod pack;
pub mod passes;
pub mod plan;

pub use error::Error;
