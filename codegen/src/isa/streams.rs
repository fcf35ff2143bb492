//! How a CPU likes to read weights that stream from memory: how many streams side by side, and how far ahead lines are asked for.
//!
//! A row of an architecture's table names its [`Streams`]; the planner makes of them what a matmul's rows do ([`Fetch`]).
//!
//! [`Fetch`]: crate::program::Fetch

use crate::program::Coding;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How many bytes ahead of what is read lines are asked into the caches; 0: not at all. A name in tuning files, as its fields are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distances {
    /// Into L2.
    pub l2: u32,
    /// Into L1.
    pub l1: u32,
}

impl fmt::Display for Distances {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "l2 {} l1 {}", self.l2, self.l1)
    }
}

/// A way to read weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Most panels side by side (each has its own address registers).
    pub side_by_side: u32,
    /// Prefetch distances of each.
    pub ahead: Distances,
}

/// Ways for one row and for several, which take longer over a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams {
    /// By a single row.
    pub row: Stream,
    /// By a single row whose weights are codes of a byte, where another way is better.
    pub bytes: Option<Stream>,
    /// The same for nibbles.
    pub nibbles: Option<Stream>,
    /// By several rows.
    pub rows: Stream,
    /// By so many rows that computing with a line takes longer than reading it, where another way is better then.
    pub busy: Option<Busy>,
    /// By several rows that walk several streams side by side, where they want lines nearer than those that walk one.
    pub near: Option<Near>,
    /// Do lines that walks of a single stream ask into L1 pass L2 by? What few rows have used once need not push rows out of it, and
    /// need not go from there to a last cache that takes what L2 drops.
    pub lone_past_l2: bool,
}

/// How weights are prefetched by walks of several streams. A name in tuning files, as its fields are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Near {
    /// Least streams.
    pub streams: u32,
    /// Prefetch distances of each.
    pub ahead: Distances,
}

/// How weights are prefetched when computing with a line takes longer than reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// Vector instructions per cache line that make it so.
    pub instructions: u32,
    /// Bytes ahead that lines are asked into L1, and into no other cache.
    pub l1: u32,
}

impl Streams {
    /// What holds for a matmul of so many rows by weights of this coding.
    pub fn of(self, rows: u64, coding: Coding) -> Stream {
        match coding {
            _ if rows > 1 => self.rows,
            Coding::Elements => self.row,
            Coding::Int8 { .. } | Coding::Int8Groups { .. } => self.bytes.unwrap_or(self.row),
            Coding::Int4 { .. } => self.nibbles.unwrap_or(self.row),
        }
    }
}
