//! Rows of floats to records of codes, the left operand of matmuls over codes.

use super::{Compute, DType, Extent, Operand, SHORT_GROUP};

/// Rows of floats to int8 codes with a scale per group of k: `q8g32` .. `q8g256` of the graph (whose scales by 32 are powers of two).
///
/// A row of `out` is one record per group, each `group` codes (i8), then `scale` (f32), then `start` (f32) = [`Quantise::INTEGERS`] minus
/// `bias_factor` times the sum of the codes: what makes up for the offset, or for a zero point of one, of the weights' codes. The bits of
/// `start` are where integer sums start. Where scales are powers of two both are multiplied with the scale, and `INTEGERS * scale` takes
/// the place of `scale`: bits count its multiples from there on, so that sums which start there are scaled already. Bytes after that are
/// not written. Behind all records of a row are the values of its codes (`code * scale`, bf16) where there are any
/// ([`Compute::values_at`]). The last group is padded with zero codes.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantise {
    /// `Rows` or `LogitRows`.
    pub rows: Extent,
    /// Rows of floats: element `row * x_stride + k`.
    pub x: Operand,
    /// Elements per row of `x`.
    pub x_stride: u32,
    /// Records, of type `u8`.
    pub out: Operand,
    /// Bytes per row of `out`, a multiple of 8, for tiles of 64.
    pub out_stride: u32,
    /// Elements of a row.
    pub k: u32,
    /// Elements per group.
    pub group: u32,
    /// Arithmetic of the matmuls that read it, which says what a record holds.
    pub compute: Compute,
    /// Of the weights that the records are multiplied with, see [`Coding::bias_factor`](super::Coding::bias_factor).
    pub bias_factor: i32,
}

impl Quantise {
    /// 3 * 2^22: f32 less than 2^22 away from it are all integers, and their bits count them. A sum whose bits start here becomes f32 by a
    /// subtraction.
    pub const INTEGERS: f32 = 12_582_912.0;

    /// Byte of a record of `group` codes where `scale` is.
    pub fn scale_at(group: u32) -> u32 {
        group
    }
    /// Byte of a record of `group` codes where `start` is, the last thing in it.
    pub fn start_at(group: u32) -> u32 {
        Self::scale_at(group) + DType::F32.size() as u32
    }
    /// Bytes of a record.
    pub fn record(&self) -> u32 {
        self.compute.record(self.group)
    }
    /// Are scales of rows' groups of so many k powers of two?
    pub fn has_powers_of_two(group: u32) -> bool {
        group == SHORT_GROUP
    }
    /// Bytes of a row before the values of its codes, where there are any.
    pub fn values_at(&self) -> Option<u32> {
        self.compute.values_at(self.k, self.group)
    }
    /// Bytes of a row's records, and of the values.
    pub fn row_bytes(&self) -> u32 {
        self.compute.row_bytes(self.k, self.group)
    }
}
