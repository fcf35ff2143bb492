//! Plan: module + bucket + target -> program. Decisions only (regions, fusion, layouts, offsets, tiles, barriers), stored as data.
//!
//! In: an optimised [`rcompile_graph::Module`] and a [`PlanCx`]. Out: a [`rcompile_codegen::program::Program`]; packed weights are collected in
//! [`WeightTable`], which all buckets share.

use rcompile_codegen::program::{DType, Layout};
use rcompile_graph::Recipe;

/// One tensor to pack: evaluate `recipe`, lay it out, write it at `offset` of the weights area.
#[derive(Clone, Debug, PartialEq)]
pub struct PackJob {
    /// For messages and `inspect`.
    pub name: String,
    /// Where the elements come from; a matrix `[ways * groups * group_cols, k]` (way-major) for panels.
    pub recipe: Recipe,
    /// Element type after the recipe (and in the file).
    pub dtype: DType,
    /// Shape after the recipe.
    pub shape: Vec<u64>,
    /// Layout in the file.
    pub layout: Layout,
    /// Byte offset in the weights area (64-byte aligned).
    pub offset: u64,
    /// Bytes in the file.
    pub bytes: u64,
}

/// All packed tensors of an executable, in execution order of the first bucket that needs them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WeightTable {
    /// Jobs in file order.
    pub jobs: Vec<PackJob>,
    /// Length of the weights area.
    pub len: u64,
}

impl WeightTable {
    /// Offset of a tensor with this recipe and layout; planned at the end when it is new.
    pub fn place(&mut self, name: &str, recipe: &Recipe, dtype: DType, shape: &[u64], layout: Layout) -> u64 {
        if let Some(job) = self.jobs.iter().find(|j| j.layout == layout && j.dtype == dtype && j.recipe == *recipe) {
            return job.offset;
        }
        let elements = match layout {
            Layout::Plain => shape.iter().product(),
            Layout::Panels(p) => p.len(),
        };
        let bytes = elements * dtype.size();
        let offset = self.len.next_multiple_of(64);
        self.len = offset + bytes;
        self.jobs.push(PackJob { name: name.into(), recipe: recipe.clone(), dtype, shape: shape.to_vec(), layout, offset, bytes });
        offset
    }
}
