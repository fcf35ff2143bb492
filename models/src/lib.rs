//! Opens a model directory: untrusted bytes in, a checked [`Model`] out.
//!
//! ```text
//! DIR -> dir (safe opening) -> json -> config -> arch (which model, which tensors)
//!                           -> weights (safetensors headers, never all bytes) -> tensors of arch present and right
//!                           -> tokenizer, template, generation
//! ```
//! Everything that can be wrong with a model directory is found here and told in one line ([`Error`]); later stages
//! rely on it. Nothing in the directory is executed, nothing outside it is read, sizes are compared with the files
//! before memory is asked for, and foreign parsers run under `catch_unwind`.
//!
//! Architectures ([`arch`]) describe models: a configuration, the tensors they need, and the forward computation.

pub mod arch;
pub mod config;
pub mod dir;
pub mod error;
pub mod json;
pub mod rope;
pub mod template;
pub mod trace;
pub mod weights;

pub use error::{Error, Kind, Warning};
