//! The driver and middle end of rcompile. Start reading in [`pipeline`].

pub mod autotune;
pub mod cache;
pub mod calibrate;
pub mod compare;
pub mod doctor;
mod emit;
pub mod error;
mod input;
pub mod inspect;
pub mod link;
mod manifest;
pub mod options;
mod outputs;
pub mod pack;
pub mod passes;
pub mod pipeline;
pub mod plan;
pub mod report;
pub mod scaling;
mod settings;
mod source;
mod stages;
pub mod targets;
mod threads;
mod tokenizer;
pub mod tuning;
pub mod verbs;

pub use error::Error;
