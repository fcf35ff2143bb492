//! Plan: module + bucket + target -> program. Decisions only (regions, fusion, layouts, offsets, tiles, barriers), stored as data.
//!
//! In: an optimised [`rcompile_graph::Module`] and a [`PlanCx`]. Out: a [`rcompile_codegen::program::Program`]; packed weights are
//! collected in [`WeightTable`], which all buckets share. Steps, one file each:
//!
//! ```text
//! regions   which values are stored, what is fused: matmul, attention, layers (frame: where values lie; lower: values ->
//!           scalar expressions; kernel: expressions with ranges; tiling: tiles)
//! weights   layouts (panels) and offsets, in execution order
//! memory    buffers -> arena offsets by liveness, from the largest bucket down: a smaller one may lie as the next larger
//! barriers  where threads meet
//! cost      what each region moves and computes
//! ```

mod attention;
mod barriers;
pub mod cost;
mod frame;
mod kernel;
mod layers;
mod lower;
mod matmul;
mod memory;
mod panels;
mod regions;
mod tiling;

use crate::tuning::Tuning;
use frame::{Frame, Home};
use lower::WeightSource;
use rcompile_codegen::isa::Isa;
use rcompile_codegen::program::{DType, Item, Kernel, Layout, Panels, Program, Table, Weight, WeightId};
use rcompile_graph::{Dim, Module, Op, ParamId, Recipe, ValueId};
use rcompile_runtime::abi::PAGE_POSITIONS;
use rcompile_runtime::cost::RegionInfo;
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
    /// Element type after the recipe (and in the file).
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

/// The largest state area: the address space of a process.
const STATE_BYTES_MAX: u128 = 1 << 47;

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
        let bytes = match layout {
            Layout::Plain => shape.iter().product::<u64>() * dtype.size(),
            Layout::Panels(p) => p.bytes(dtype),
        };
        let offset = self.len.next_multiple_of(if layout == Layout::Plain { PLAIN_ALIGN } else { PANELS_ALIGN });
        // Epilogues read vectors by whole panels: room for the padding, so that the last tensor's does not leave the mapping.
        let room = if shape.len() == 1 { 32 * dtype.size() } else { 0 };
        self.len = offset + bytes + room;
        self.jobs.push(PackJob { name: name.into(), recipe: recipe.clone(), dtype, shape: shape.to_vec(), layout, offset, bytes });
        offset
    }
}

/// What plans depend on beside the module.
#[derive(Clone, Copy, Debug)]
pub struct PlanCx<'a> {
    /// Target CPU.
    pub isa: &'a Isa,
    /// Sequence slots.
    pub slots: u32,
    /// Positions per sequence.
    pub ctx_size: u32,
    /// Fewest rows of the bucket: fewer take a smaller one.
    pub least_rows: u32,
    /// Cores that there should be work for.
    pub cores: u32,
    /// Tiles that were measured.
    pub tuning: Option<&'a Tuning>,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The graph holds something that has no kernel.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// The KV cache takes this many bytes, more than any process can address.
    #[error("the KV cache takes {0} bytes")]
    StateTooLarge(u128),
    /// A mistake of ours.
    #[error("planner: {0}")]
    Internal(String),
}

/// The state area: layout of the KV cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatePlan {
    /// Bytes in all.
    pub bytes: u64,
    /// Bytes per position of one sequence over all layers.
    pub bytes_per_token: u64,
    /// Pages per slot.
    pub pages_per_slot: u32,
    /// False where nothing survives a step.
    pub persistent: bool,
}

/// Where the states lie. What survives a step: all layers of a page of positions behind each other, so that few positions touch little
/// memory, which the operating system clears in large pages. What does not: all layers in the same place.
struct StateLayout {
    /// Bytes from a page to the next.
    page_bytes: u64,
    /// Of each state in the first page.
    offsets: Vec<u64>,
}

/// A planned bucket.
#[derive(Clone, Debug)]
pub struct Planned {
    /// For codegen.
    pub program: Program,
    /// KV cache.
    pub state: StatePlan,
    /// f32 elements from one output vector to the next (`logits_stride`, or of one pooled vector).
    pub output_stride: u32,
    /// Output vectors per output row (1 for logits, 8 for pooled).
    pub outputs: u32,
    /// Barriers per layer.
    pub barriers_per_layer: u32,
    /// Cost of each region.
    pub regions: Vec<RegionInfo>,
}

/// All buckets, planned. They share the weights, so they share the table.
#[derive(Clone, Debug)]
pub struct Plans {
    /// In the order of `--buckets`, ascending.
    pub buckets: Vec<Planned>,
    /// What is packed for them.
    pub weights: WeightTable,
}

/// Parameters (one per layer) by layout.
type WeightKey = (Vec<ParamId>, Layout);

/// A plan under construction.
struct Plan<'a> {
    cx: PlanCx<'a>,
    program: Program,
    body: Vec<Item>,
    before_layers: Vec<Item>,
    in_layers: bool,
    layers: u32,
    /// Layers in one iteration of the first layer loop.
    period: u32,
    /// Values whose place is given (entry outputs, a layer's result).
    forced: HashMap<ValueId, Home>,
    state_layout: StateLayout,
    weight_keys: Vec<(WeightKey, u32)>,
    panels_of: HashMap<ParamId, Panels>,
}

impl WeightSource for Plan<'_> {
    fn weight(&mut self, params: &[ParamId], layout: Layout) -> WeightId {
        let key = (params.to_vec(), layout);
        if let Some(i) = self.weight_keys.iter().position(|(k, _)| *k == key) {
            return WeightId(i as u32);
        }
        let group = if params.len() > 1 { self.layers } else { 0 };
        self.weight_keys.push((key, group));
        WeightId(self.weight_keys.len() as u32 - 1)
    }
    fn lookup_layout(&self, param: ParamId) -> Layout {
        self.panels_of.get(&param).map_or(Layout::Plain, |p| Layout::Panels(*p))
    }
    fn storage(&self, dtype: rcompile_graph::DType) -> Option<DType> {
        panels::weight_storage(self.cx.isa, dtype)
    }
}

/// Plans all buckets of a model, ascending; `cx.least_rows` is that of the first.
pub fn plan_buckets(modules: &[Module], cx: &PlanCx<'_>) -> Result<Plans, PlanError> {
    let mut weights = WeightTable::default();
    let mut cx = *cx;
    let mut drafts = Vec::with_capacity(modules.len());
    for module in modules {
        let drafted = draft(module, &cx, &mut weights)?;
        // A step takes the smallest bucket that holds it.
        cx.least_rows = drafted.program.bucket + 1;
        drafts.push(drafted);
    }
    let mut buckets: Vec<Planned> = Vec::with_capacity(drafts.len());
    for draft in drafts.into_iter().rev() {
        let larger = buckets.last().map(|planned| &planned.program);
        buckets.push(draft.place(larger));
    }
    buckets.reverse();
    Ok(Plans { buckets, weights })
}

/// Plans one bucket alone.
pub fn plan(module: &Module, cx: &PlanCx<'_>, weights: &mut WeightTable) -> Result<Planned, PlanError> {
    Ok(draft(module, cx, weights)?.place(None))
}

/// A bucket's plan without places in memory and barriers.
struct Draft {
    program: Program,
    state: StatePlan,
    output_stride: u32,
    outputs: u32,
    period: u32,
}

impl Draft {
    /// `larger`: the program of the next larger bucket.
    fn place(self, larger: Option<&Program>) -> Planned {
        let Draft { mut program, state, output_stride, outputs, period } = self;
        memory::assign(&mut program, larger);
        barriers::insert(&mut program);
        Planned {
            state,
            output_stride,
            outputs,
            barriers_per_layer: barriers::per_layer(&program, period),
            regions: cost::regions(&program),
            program,
        }
    }
}

/// Plans all but places in the arena and barriers, which [`Draft::place`] adds: what a bucket alone and the smaller ones' weights decide.
fn draft(module: &Module, cx: &PlanCx<'_>, weights: &mut WeightTable) -> Result<Draft, PlanError> {
    check_shapes(module)?;
    let bound = |name: &str| module.symbol(name).map_or(1, |s| module.symbols[s.index()].bound);
    let (state, state_layout) = plan_state(module, cx)?;
    let bucket = bound("T");
    let (heads_per_kv, kv_heads) = heads(module);
    let program = Program {
        entry: module.main().name.clone(),
        bucket: bucket as u32,
        least_rows: cx.least_rows,
        max_logit_rows: bound("L") as u32,
        max_runs: bound("S") as u32,
        tile_rows: tiling::attention_rows(bucket, heads_per_kv, kv_heads, cx.cores),
        buffers: vec![],
        weights: vec![],
        regions: vec![],
        body: vec![],
        arena_bytes: 0,
        private_bytes: 0,
    };
    let mut plan = Plan {
        cx: *cx,
        program,
        body: vec![],
        before_layers: vec![],
        in_layers: false,
        layers: 0,
        period: 1,
        forced: HashMap::new(),
        state_layout,
        weight_keys: vec![],
        panels_of: lookup_panels(module, cx),
    };
    let mut frame = Frame::entry(module);
    for (v, name) in frame.func.inputs.iter().zip(&frame.func.input_names) {
        let table = match name.as_str() {
            "token" => Table::Token,
            "slot" => Table::Slot,
            "position" => Table::Position,
            "kv_index" => Table::KvIndex,
            "segment" => Table::Segment,
            "logit_row" => Table::LogitRow,
            other => return Err(PlanError::Unsupported(format!("input {other}"))),
        };
        frame.homes.insert(*v, Home::Table(table));
    }
    let outputs = frame.func.outputs.clone();
    let width = |v: &ValueId| frame.func.ty(*v).shape.last().and_then(|d| d.constant()).unwrap_or(1) as u32;
    let output_stride = outputs.iter().map(width).max().unwrap_or(1).next_multiple_of(cx.isa.panel_nr);
    let place = |i: usize| Home::Output { stride: output_stride * outputs.len() as u32, offset: i as u32 * output_stride };
    for (i, v) in outputs.iter().enumerate() {
        plan.forced.entry(*v).or_insert(place(i));
    }
    plan.function(&mut frame)?;
    for (i, v) in outputs.iter().enumerate() {
        // A value that is an output twice is copied to its second place.
        if plan.forced[v] != place(i) {
            let nest = plan.retry(&mut frame, |plan, frame| plan.value_nest(frame, *v, &place(i)))?;
            plan.region("copy", Kernel::Loops(nest));
        }
    }
    plan.program.body = std::mem::take(&mut plan.body);
    plan.place_weights(module, weights);
    let (mut program, period) = (plan.program, plan.period);
    let scratch = program.regions.iter().map(|r| match &r.kernel {
        Kernel::Attention(a) => rcompile_codegen::kernels::attention::private_bytes(a),
        Kernel::Matmul(m) => rcompile_codegen::kernels::matmul::private_bytes(cx.isa, &program, m),
        Kernel::Loops(_) | Kernel::Quantise(_) => 0,
    });
    // Kernels take their scratch from the end of the private area.
    program.private_bytes = (program.private_bytes + scratch.max().unwrap_or(0)).next_multiple_of(128);
    Ok(Draft { state, output_stride, outputs: outputs.len() as u32, period, program })
}

impl Plan<'_> {
    /// Gives every weight its offsets: tensors of a layer lie together, layers in order.
    fn place_weights(&mut self, module: &Module, table: &mut WeightTable) {
        let mut offsets: Vec<Vec<u64>> = self.weight_keys.iter().map(|((params, _), _)| vec![0; params.len()]).collect();
        let isa = self.cx.isa;
        let place = |table: &mut WeightTable, param: ParamId, layout: Layout| {
            let p = &module.params[param.index()];
            let shape: Vec<u64> = p.ty.shape.iter().filter_map(|d| d.constant()).collect();
            table.place(&p.name, &p.recipe, panels::weight_storage(isa, p.ty.dtype).unwrap_or(DType::F32), &shape, layout)
        };
        let mut done = 0;
        for (i, ((params, layout), group)) in self.weight_keys.iter().enumerate() {
            if *group == 0 {
                for (layer, param) in params.iter().enumerate() {
                    offsets[i][layer] = place(table, *param, *layout);
                }
            } else if *group > done {
                done = *group;
                let members: Vec<usize> = (0..self.weight_keys.len()).filter(|j| self.weight_keys[*j].1 == *group).collect();
                let layers = members.iter().map(|j| self.weight_keys[*j].0.0.len()).max().unwrap_or(0);
                for layer in 0..layers {
                    for j in &members {
                        let (params, layout) = &self.weight_keys[*j].0;
                        offsets[*j][layer] = place(table, params[layer], *layout);
                    }
                }
            }
        }
        for (((params, layout), _), offsets) in self.weight_keys.iter().zip(offsets) {
            let p = &module.params[params[0].index()];
            let name = if params.len() > 1 { p.name.replacen(".0.", ".*.", usize::MAX) } else { p.name.clone() };
            let dtype = panels::weight_storage(isa, p.ty.dtype).unwrap_or(DType::F32);
            self.program.weights.push(Weight { name, dtype, layout: *layout, offsets });
        }
    }
}

/// Rows come first: addresses are linear in the other dimensions, which are constants.
fn check_shapes(module: &Module) -> Result<(), PlanError> {
    for node in module.functions.iter().flat_map(|f| &f.nodes) {
        if node.ty.shape.iter().skip(1).any(|d| matches!(d, Dim::Sym(_))) {
            return Err(PlanError::Unsupported(format!("{}: a symbolic dimension behind the first", node.origin)));
        }
    }
    Ok(())
}

/// Bytes and places of the states: of one kind only; encoders' layers share one place.
fn plan_state(module: &Module, cx: &PlanCx<'_>) -> Result<(StatePlan, StateLayout), PlanError> {
    // The whole sum first, and in 128 bits: heads, layers and positions are each bounded, their product is not.
    let per_position: u128 = module.states.iter().map(|s| u128::from(s.kv_heads) * u128::from(attention::bytes_per_position(s))).sum();
    let positions = u128::from(cx.ctx_size.next_multiple_of(PAGE_POSITIONS as u32)) * u128::from(cx.slots);
    if per_position * positions > STATE_BYTES_MAX {
        return Err(PlanError::StateTooLarge(per_position * positions));
    }
    let pages_per_slot = cx.ctx_size.div_ceil(PAGE_POSITIONS as u32);
    let mut plan = StatePlan { pages_per_slot, persistent: module.states.iter().any(|s| s.persistent), ..StatePlan::default() };
    let mut offsets = Vec::new();
    for s in &module.states {
        let per_token = s.kv_heads * attention::bytes_per_position(s);
        if plan.persistent {
            offsets.push(plan.bytes_per_token * PAGE_POSITIONS as u64);
            plan.bytes_per_token += per_token;
        } else {
            offsets.push(0);
            plan.bytes_per_token = plan.bytes_per_token.max(per_token);
        }
    }
    let page_bytes = plan.bytes_per_token * PAGE_POSITIONS as u64;
    plan.bytes = page_bytes * u64::from(pages_per_slot) * u64::from(cx.slots);
    Ok((plan, StateLayout { page_bytes, offsets }))
}

/// Largest number of query heads per KV head, and least number of KV heads.
fn heads(module: &Module) -> (u64, u64) {
    let mut heads = vec![];
    for f in &module.functions {
        for node in &f.nodes {
            if let (Op::Sdpa { state, .. }, Some(Dim::Const(heads_of_queries))) = (&node.op, node.ty.shape.get(1)) {
                let kv_heads = module.states[state.index()].kv_heads.max(1);
                heads.push((heads_of_queries / kv_heads, kv_heads));
            }
        }
    }
    (heads.iter().map(|h| h.0).fold(1, u64::max), heads.iter().map(|h| h.1).min().unwrap_or(1))
}

/// Tables of lookups that a matmul of the entry reads too (tied head): stored once, as panels.
fn lookup_panels(module: &Module, cx: &PlanCx<'_>) -> HashMap<ParamId, Panels> {
    let f = module.main();
    let param = |v: ValueId| if let Op::Param(p) = f.node(v).op { Some(p) } else { None };
    let looked_up: Vec<ParamId> = f.nodes.iter().filter(|n| n.op == Op::Embedding).filter_map(|n| param(n.inputs[0])).collect();
    let mut panels = HashMap::new();
    for node in &f.nodes {
        let Op::Mm { rhs_t: true } = node.op else { continue };
        let Some(p) = param(node.inputs[1]).filter(|p| looked_up.contains(p)) else { continue };
        let ty = &module.params[p.index()].ty;
        if let [Dim::Const(n), Dim::Const(k)] = ty.shape[..] {
            let (_, layout) = panels::panels(cx.isa, (f.ty(node.inputs[0]).dtype, ty.dtype), k as u32, (1, n as u32, 1));
            panels.insert(p, layout);
        }
    }
    panels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use rcompile_codegen::isa::HOST_TRIPLE;

    pub(super) fn plan_text(text: &str) -> Result<Planned, PlanError> {
        let module = rcompile_graph::parse(text).unwrap_or_else(|e| panic!("{e}"));
        let cpu = if HOST_TRIPLE.starts_with("x86_64") { "x86-64-v3" } else { "neoverse-n1" };
        let isa = Isa::lookup(HOST_TRIPLE, cpu, &[]).unwrap();
        let cx = PlanCx { isa: &isa, slots: 1, ctx_size: 64, least_rows: 1, cores: 1, tuning: None };
        plan(&module, &cx, &mut WeightTable::default())
    }

    /// All layers of a page lie together; states that do not survive a step share one place.
    #[test]
    fn states_lie_page_by_page() {
        let isa = Isa::lookup(HOST_TRIPLE, if HOST_TRIPLE.starts_with("x86_64") { "x86-64-v3" } else { "neoverse-n1" }, &[]).unwrap();
        let cx = PlanCx { isa: &isa, slots: 3, ctx_size: 300, least_rows: 1, cores: 1, tuning: None };
        let layout = |persistent: &str| {
            let text = format!(
                "module {{
                symbol T<=8
                state @a {{kv_heads=2, head_dim=8, dtype=bf16{persistent}}}
                state @b {{kv_heads=1, head_dim=24, dtype=f32{persistent}}}
                param @table : f32[19, 24] = source \"table\"
                func @step(%token: i32[T]) {{
                    %y = embedding @table, %token
                    return %y
                }}
            }}"
            );
            let (plan, layout) = plan_state(&rcompile_graph::parse(&text).unwrap_or_else(|e| panic!("{e}")), &cx).unwrap();
            (plan.pages_per_slot, plan.bytes_per_token, plan.bytes, layout.page_bytes, layout.offsets)
        };
        let (a, b) = (2 * 2 * 8 * 2, 2 * 24 * 4);
        assert_eq!(layout(", persistent"), (2, a + b, 3 * 2 * 256 * (a + b), 256 * (a + b), vec![0, 256 * a]));
        assert_eq!(layout(""), (2, b, 3 * 2 * 256 * b, 256 * b, vec![0, 0]));
    }

    /// The address space of a process holds the states of as many positions as are asked for, or the plan is refused.
    #[test]
    fn states_have_a_limit() {
        let text = "module {
            symbol T<=8
            state @kv {kv_heads=64, head_dim=128, dtype=f32, persistent}
            param @table : f32[19, 24] = source \"table\"
            func @step(%token: i32[T]) {
                %y = embedding @table, %token
                return %y
            }
        }";
        let module = rcompile_graph::parse(text).unwrap_or_else(|e| panic!("{e}"));
        let isa = Isa::lookup("x86_64-unknown-linux-gnu", "x86-64-v3", &[]).unwrap();
        let cx = |ctx_size| PlanCx { isa: &isa, slots: 512, ctx_size, least_rows: 1, cores: 1, tuning: None };
        // 64 KiB for each of 2^31 positions.
        assert_eq!(plan_state(&module, &cx(1 << 22)).unwrap().0.bytes, 1 << 47);
        let e = Error::from(plan_state(&module, &cx((1 << 22) + 1)).map(|_| ()).unwrap_err());
        assert!(e.exit_code() == 7 && e.to_string().contains("140746078289920 bytes"), "{e}");
    }

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

    /// What has no kernel is said once, in one line.
    #[test]
    fn refusals() {
        let other_symbol = "module {
            symbol Q<=8
            param @table : f32[19, 24] = source \"table\"
            func @step(%token: i32[Q]) {
                %x = embedding @table, %token
                %y = neg %x
                return %y
            }
        }";
        let columns = "module {
            symbol T<=8
            param @table : f32[19, 24] = source \"table\"
            func @step(%token: i32[T]) {
                %x = embedding @table, %token
                %y = permute %x {perm=[1, 0]}
                return %y
            }
        }";
        let score = |text: &str| {
            format!(
                "module {{
                symbol T<=8
                param @table : f32[37, 16] = source \"table\"
                state @kv {{kv_heads=2, head_dim=8, dtype=f32}}
                func @encode(%token: i32[T], %slot: i32[T], %kv_index: i32[T]) {{
                    %x = embedding @table, %token
                    %q = reshape %x : f32[T, 2, 8]
                    %t = kv_append %q, %q, %slot, %kv_index {{state=@kv}}
                    %a = sdpa %q, %t, %slot, %kv_index {{state=@kv, score=\"{text}\", mask=\"true\"}}
                    %y = reshape %a : f32[T, 16]
                    %z = neg %y
                    return %z
                }}
            }}"
            )
        };
        for (text, what) in [
            (other_symbol, "symbol Q is not supported"),
            (columns, "a symbolic dimension behind the first is not supported"),
            (&score("sqrt(score)"), "attention score: sqrt is not supported"),
        ] {
            let line = Error::from(plan_text(text).map(|_| ()).unwrap_err()).to_string();
            assert!(line.starts_with("error[E6-unsupported]: graph: ") && line.ends_with(what), "{line}");
            assert_eq!(line.matches("is not supported").count(), 1, "{line}");
        }
    }

    /// Attention rounds once: what is rounded to bf16 and widened again is no f32 that was never rounded.
    #[test]
    fn attention_rounds_once() {
        let planned = plan_text(
            "module {
            symbol T<=8
            param @table : f32[37, 16] = source \"table\"
            param @o : f32[16, 16] = source \"o\"
            state @kv {kv_heads=2, head_dim=8, dtype=f32}
            func @encode(%token: i32[T], %slot: i32[T], %kv_index: i32[T]) {
                %x = embedding @table, %token
                %q = reshape %x : f32[T, 2, 8]
                %t = kv_append %q, %q, %slot, %kv_index {state=@kv}
                %a = sdpa %q, %t, %slot, %kv_index {state=@kv, score=\"score\", mask=\"true\"}
                %b = convert %a : bf16[T, 2, 8]
                %c = convert %b : f32[T, 2, 8]
                %d = reshape %c : f32[T, 16]
                %y = mm %d, @o {rhs_t}
                return %y
            }
        }",
        )
        .unwrap();
        let out = planned.program.regions.iter().find_map(|r| match &r.kernel {
            Kernel::Attention(a) => Some(a.out.dtype),
            _ => None,
        });
        assert_eq!(out, Some(DType::Bf16), "{}", planned.program);
    }
}
