//! Program in, object file out. Knows no model and no tensor name.

pub mod program;
