//! Model directories that are wrong in one way each, and sound ones that look odd: the acceptance list of the front end as data.
//!
//! In: a path. Out: a toy model written there, then changed by a case. Only tests use this crate: those of `models` open the
//! directories in their own process, those of `compiler` give them to `rcompile build` and look at it from outside, and the fuzz
//! targets start from the toy. The names are those of the acceptance list. Cases that need all weight bytes (NaN, overflow)
//! belong to packing (`compiler/tests/cli.rs`); those about change while reading are beside `dir.rs`.

mod accepted;
mod codes;
mod config;
mod files;
mod shards;
mod template;
mod tokenizer;
pub mod toy;
pub mod variants;
mod weights;

pub use accepted::ACCEPTED;
pub use codes::{CODES, CODES_ACCEPTED};
pub use config::{CONFIG, CONFIG_ACCEPTED};
pub use files::{CONFIG_BYTES, FILES};
pub use shards::{SHARDS, SHARDS_ACCEPTED};
pub use template::{TEMPLATE, TEMPLATE_MEMORY};
pub use tokenizer::TOKENIZER;
pub use toy::{Toy, ToyTensor};
pub use weights::{SAFETENSORS, TENSORS, cut};

/// Name, exit code, what the line must contain, and how the toy is broken.
pub type Case = (&'static str, i32, &'static [&'static str], fn(&Toy));

/// Name, what the only warning must contain (empty: no warning), and how the toy is changed.
pub type Accepted = (&'static str, &'static str, fn(&Toy));

/// Every directory that is refused when it is opened, by a process that holds itself to some memory.
pub fn refused() -> impl Iterator<Item = &'static Case> {
    [FILES, CONFIG_BYTES, CONFIG, CODES, SAFETENSORS, TENSORS, SHARDS, TOKENIZER, TEMPLATE, TEMPLATE_MEMORY].into_iter().flatten()
}

/// Every directory that is not.
pub fn accepted() -> impl Iterator<Item = &'static Accepted> {
    [ACCEPTED, CONFIG_ACCEPTED, CODES_ACCEPTED, SHARDS_ACCEPTED].into_iter().flatten()
}

/// Adds a tensor that no layer has.
pub fn extra_tensor(t: &Toy) {
    t.edit_weights(|w| w.push(ToyTensor::zeros("model.bogus.weight", "F32", 4, &[3])));
}
