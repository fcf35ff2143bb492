//! Rows times panels of one weight, as functions of rows and the loops inside them see them.
//!
//! In: a [`Matmul`]. Out: [`Product`]: what rows and panels look like, without what becomes of the sums and where anything lies.

use crate::program::{Compute, DType, Matmul, Panels, Program};

/// Rows times panels, without what becomes of it and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Type of the rows' elements.
    pub a: DType,
    /// Elements from row to row.
    pub a_stride: u32,
    /// Type of the weight.
    pub weight: DType,
    /// One of its panels.
    pub panels: Panels,
    /// Arithmetic.
    pub compute: Compute,
}

impl Product {
    /// That of a matmul.
    pub fn new(program: &Program, kernel: &Matmul) -> Product {
        let panels = Panels { groups: 1, group_cols: kernel.panels.nr, ..kernel.panels };
        let weight = program.weights[kernel.weight.index()].dtype;
        Product { a: kernel.a.dtype, a_stride: kernel.a_stride, weight, panels, compute: kernel.compute }
    }
    /// k that the loops go through: records are padded to whole groups.
    pub fn depth(&self) -> u32 {
        if self.compute.takes_codes() { self.panels.padded_k() } else { self.panels.k }
    }
    /// Bytes of a row of codes before their values, where tiles take these.
    pub fn values_at(&self) -> Option<u32> {
        self.compute.values_at(self.panels.k, self.panels.coding.group()?)
    }
    /// Bytes of a panel with all its ways.
    pub fn panel_bytes(&self) -> i64 {
        (self.panels.panel_bytes(self.weight) * u64::from(self.panels.ways)) as i64
    }
    /// Are codes two to a byte?
    pub fn has_nibbles(&self) -> bool {
        self.panels.coding.has_nibbles()
    }
}
