//! Weights: which parameters a program reads in which layout, and where they lie in the file, in execution order.

use super::{PlanError, panels};
use rcompile_codegen::isa::{Isa, WIDEST_PANEL};
use rcompile_codegen::program::{DType, Layout, Panels, Weight, WeightId};
use rcompile_graph::{self as g, Dim, Module, Op, ParamId, Recipe, ValueId};
use std::collections::HashMap;

/// A plain weight begins at a multiple of so many bytes: a cache line.
const PLAIN_ALIGN: u64 = 64;
/// Panels begin with a page: few rows ask for lines of several pages at once, and pairs of lines come together. (Sapphire Rapids, 1B shape,
/// bf16, four sequences: 1.07 times as fast as from any line on.)
const PANELS_ALIGN: u64 = 4096;

/// One tensor to pack: evaluate `recipe`, lay it out, write it at `offset` of the weights area.
#[derive(Clone, Debug, PartialEq)]
pub struct PackJob {
    /// For messages and `inspect`.
    pub name: String,
    /// Where the elements come from; a matrix `[ways * groups * group_cols, k]` (way-major) for panels.
    pub recipe: Recipe,
    /// Element type after the recipe.
    pub source: g::DType,
    /// Element type in the file.
    pub dtype: DType,
    /// Shape after the recipe.
    pub shape: Vec<u64>,
    /// Layout in the file.
    pub layout: Layout,
    /// Byte offset in the weights area: of panels a multiple of a page, else of a cache line.
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
    pub fn place(&mut self, name: &str, recipe: &Recipe, (source, dtype): (g::DType, DType), shape: &[u64], layout: Layout) -> u64 {
        if let Some(job) = self.jobs.iter().find(|j| j.layout == layout && j.dtype == dtype && j.recipe == *recipe) {
            return job.offset;
        }
        let bytes = match layout {
            Layout::Plain => shape.iter().product::<u64>() * dtype.size(),
            Layout::Panels(p) => p.bytes(dtype),
        };
        let offset = self.len.next_multiple_of(if layout == Layout::Plain { PLAIN_ALIGN } else { PANELS_ALIGN });
        // Epilogues read vectors by whole panels: room for the padding, so that the last tensor's does not leave the mapping.
        let room = if shape.len() == 1 { u64::from(WIDEST_PANEL) * dtype.size() } else { 0 };
        self.len = offset + bytes + room;
        self.jobs.push(PackJob { name: name.into(), recipe: recipe.clone(), source, dtype, shape: shape.to_vec(), layout, offset, bytes });
        offset
    }
}

/// Weights of a program under construction.
pub(super) struct Weights<'a> {
    isa: &'a Isa,
    planned: Vec<PlannedWeight>,
    /// Parameters that lookups and a matmul read: stored once, as panels.
    lookups: HashMap<ParamId, Panels>,
    /// Number of the layer loop, from 1, that weights of several layers are planned for.
    layer_loop: u32,
}

/// One weight.
struct PlannedWeight {
    /// One, or one per layer.
    params: Vec<ParamId>,
    layout: Layout,
    /// Number of the layer loop that it belongs to; 0 outside of them.
    layer_loop: u32,
}

impl<'a> Weights<'a> {
    pub(super) fn new(module: &Module, isa: &'a Isa) -> Self {
        Weights { isa, planned: vec![], lookups: lookup_panels(module, isa), layer_loop: 0 }
    }
    /// From here on weights of several layers are the next loop's, whose number this gives.
    pub(super) fn enter_layers(&mut self) -> u32 {
        self.layer_loop += 1;
        self.layer_loop
    }
    /// The weight for these parameters (one per layer) in this layout.
    pub(super) fn get(&mut self, params: &[ParamId], layout: Layout) -> WeightId {
        let known = self.planned.iter().position(|p| p.params == params && p.layout == layout);
        let index = known.unwrap_or_else(|| {
            let layer_loop = if params.len() > 1 { self.layer_loop } else { 0 };
            self.planned.push(PlannedWeight { params: params.to_vec(), layout, layer_loop });
            self.planned.len() - 1
        });
        WeightId(index as u32)
    }
    /// Number of weights, for [`Weights::truncate`].
    pub(super) fn len(&self) -> usize {
        self.planned.len()
    }
    /// Forgets what was planned since there were `len`.
    pub(super) fn truncate(&mut self, len: usize) {
        self.planned.truncate(len);
    }
    /// Layout in which lookups read a parameter.
    pub(super) fn lookup_layout(&self, param: ParamId) -> Layout {
        self.lookups.get(&param).map_or(Layout::Plain, |p| Layout::Panels(*p))
    }
    /// Storage type of a weight of a graph type, see [`panels::weight_storage`].
    pub(super) fn storage(&self, dtype: g::DType) -> Result<DType, PlanError> {
        panels::weight_storage(self.isa, dtype).ok_or_else(|| PlanError::Unsupported(format!("weights of type {dtype}")))
    }

    /// The program's weights with their offsets: tensors of a layer lie together, layers in order.
    pub(super) fn place(&self, module: &Module, table: &mut WeightTable) -> Vec<Weight> {
        let stored = |param: ParamId| {
            let p = &module.params[param.index()];
            (p, self.storage(p.ty.dtype).expect("known since it was planned"))
        };
        let mut place = |param: ParamId, layout: Layout| {
            let (p, dtype) = stored(param);
            let shape: Vec<u64> = p.ty.shape.iter().filter_map(|d| d.constant()).collect();
            table.place(&p.name, &p.recipe, (p.ty.dtype, dtype), &shape, layout)
        };
        let mut offsets: Vec<Vec<u64>> = vec![vec![]; self.planned.len()];
        let mut placed_loops = 0;
        for (i, weight) in self.planned.iter().enumerate() {
            if weight.layer_loop == 0 {
                offsets[i] = weight.params.iter().map(|param| place(*param, weight.layout)).collect();
            } else if weight.layer_loop > placed_loops {
                placed_loops = weight.layer_loop;
                let members: Vec<usize> = (0..self.planned.len()).filter(|j| self.planned[*j].layer_loop == placed_loops).collect();
                for layer in 0..weight.params.len() {
                    for &j in &members {
                        offsets[j].push(place(self.planned[j].params[layer], self.planned[j].layout));
                    }
                }
            }
        }
        let weights = self.planned.iter().zip(offsets).map(|(weight, offsets)| {
            let (p, dtype) = stored(weight.params[0]);
            let name = if weight.params.len() > 1 { p.name.replacen(".0.", ".*.", usize::MAX) } else { p.name.clone() };
            Weight { name, dtype, layout: weight.layout, offsets }
        });
        weights.collect()
    }
}

/// Tables of lookups that a matmul of the entry reads too (tied head): stored once, as panels.
fn lookup_panels(module: &Module, isa: &Isa) -> HashMap<ParamId, Panels> {
    let f = module.main();
    let param = |v: ValueId| if let Op::Param(p) = f.node(v).op { Some(p) } else { None };
    let looked_up: Vec<ParamId> = f.nodes.iter().filter(|n| n.op == Op::Embedding).filter_map(|n| param(n.inputs[0])).collect();
    let mut panels = HashMap::new();
    for node in &f.nodes {
        let Op::Mm { rhs_t: true } = node.op else { continue };
        let Some(p) = param(node.inputs[1]).filter(|p| looked_up.contains(p)) else { continue };
        let ty = &module.params[p.index()].ty;
        if let [Dim::Const(n), Dim::Const(k)] = ty.shape[..] {
            let Ok((_, layout)) = panels::panels(isa, (f.ty(node.inputs[0]).dtype, ty.dtype), k as u32, (1, n as u32, 1)) else { continue };
            panels.insert(p, layout);
        }
    }
    panels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan_text;

    /// Panels begin with a page, whatever lies before them; a plain weight with a cache line.
    #[test]
    fn weights_are_aligned() {
        let planned = plan_text(
            "module {
            symbol T<=8
            param @table : f32[19, 24] = source \"table\"
            param @norm : f32[24] = source \"norm\"
            param @a : f32[24, 24] = source \"a\"
            param @b : f32[24, 24] = source \"b\"
            func @step(%token: i32[T]) {
                %x = embedding @table, %token
                %n = rms_norm %x, @norm {eps=1e-5}
                %y = mm %n, @a {rhs_t}
                %m = rms_norm %y, @norm {eps=1e-5}
                %z = mm %m, @b {rhs_t}
                return %z
            }
        }",
        )
        .unwrap();
        let found: Vec<(bool, u64)> = planned.program.weights.iter().map(|w| (w.layout == Layout::Plain, w.offsets[0])).collect();
        assert_eq!(found.iter().filter(|w| !w.0).count(), 2, "{found:?}");
        for (is_plain, offset) in &found {
            assert!(offset.is_multiple_of(if *is_plain { 64 } else { 4096 }), "{found:?}");
        }
    }
}
