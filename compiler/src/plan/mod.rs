//! Plan: module + bucket + target -> program. Decisions only (regions, fusion, layouts, offsets, tiles, barriers), stored as data.
//!
//! In: an optimised [`rcompile_graph::Module`] and a [`PlanCx`]. Out: a [`rcompile_codegen::program::Program`]; packed weights are
//! collected in [`WeightTable`], which all buckets share. Steps, one file each:
//!
//! ```text
//! regions   which values are stored, what is fused: matmul, attention, layers (frame: where values lie; lower: values ->
//!           scalar expressions; kernel: expressions with ranges; tiling: tiles)
//! weights   layouts (panels) and offsets, in execution order
//! state     where keys and values lie
//! memory    buffers -> arena offsets by liveness. From the largest bucket down: a smaller bucket takes over the next larger one's
//!           offsets where the two can then share code.
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
mod state;
mod tiling;
mod weights;

use crate::error::Error;
use crate::tuning::Tuning;
use frame::{Frame, Home};
pub use state::StatePlan;
pub use weights::{PackJob, WeightTable};

use rcompile_codegen::isa::Isa;
use rcompile_codegen::program::{Item, Kernel, Program, Table};
use rcompile_graph::{Dim, Module, Op, ValueId};
use rcompile_runtime::cost::RegionInfo;
use state::StateLayout;
use std::collections::HashMap;
use weights::Weights;

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
    /// The layers come in more runs of equal ones than this, each of which would have code of its own.
    #[error("layers come in more than {0} runs of equal ones")]
    TooVaried(usize),
    /// A mistake of ours.
    #[error("planner: {0}")]
    Internal(String),
}

impl From<PlanError> for Error {
    fn from(error: PlanError) -> Error {
        match error {
            PlanError::StateTooLarge(_) => {
                Error::Limit { place: "--ctx-size, --parallel".into(), what: format!("too large for this model: {error}") }
            }
            PlanError::TooVaried(_) => Error::Limit { place: "layers".into(), what: error.to_string() },
            PlanError::Unsupported(what) => {
                Error::Unsupported { place: "graph".into(), what: format!("{what} is not supported"), help: None }
            }
            PlanError::Internal(_) => Error::bug("plan", error),
        }
    }
}

/// A planned bucket.
#[derive(Clone, Debug)]
pub struct Planned {
    /// For codegen.
    pub program: Program,
    /// KV cache.
    pub state: StatePlan,
    /// f32 elements from one output vector to the next (a row of logits, or one pooled vector, with padding).
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

/// A plan under construction.
struct Plan<'a> {
    cx: PlanCx<'a>,
    program: Program,
    body: Vec<Item>,
    in_layers: bool,
    /// Layers in one iteration of the first layer loop.
    period: u32,
    /// Values whose place is given (entry outputs, a layer's result).
    forced: HashMap<ValueId, Home>,
    state_layout: StateLayout,
    weights: Weights<'a>,
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
    let (state, state_layout) = state::plan(module, cx)?;
    let bucket = module.bound("T").ok_or_else(|| PlanError::Unsupported("a graph without rows (symbol T)".into()))?;
    let (heads_per_kv, kv_heads) = heads(module);
    let program = Program {
        entry: module.main().name.clone(),
        bucket: bucket as u32,
        least_rows: cx.least_rows,
        max_logit_rows: module.bound("L").unwrap_or(1) as u32,
        max_runs: module.bound("S").unwrap_or(1) as u32,
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
        in_layers: false,
        period: 1,
        forced: HashMap::new(),
        state_layout,
        weights: Weights::new(module, cx.isa),
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
    let width = |v: &ValueId| plan.row_width(&frame, *v);
    let output_stride = outputs.iter().map(width).max().unwrap_or(1).next_multiple_of(cx.isa.panel_nr());
    let place = |i: usize| Home::Output { stride: output_stride * outputs.len() as u32, offset: i as u32 * output_stride };
    for (i, v) in outputs.iter().enumerate() {
        plan.forced.entry(*v).or_insert(place(i));
    }
    plan.function(&mut frame)?;
    for (i, v) in outputs.iter().enumerate() {
        // A value that is an output twice is copied to its second place.
        if plan.forced[v] != place(i) {
            plan.copy(&mut frame, *v, &place(i))?;
        }
    }
    plan.program.body = std::mem::take(&mut plan.body);
    let (mut program, period) = (plan.program, plan.period);
    program.weights = plan.weights.place(module, weights);
    let scratch = program.regions.iter().map(|r| match &r.kernel {
        Kernel::Attention(a) => rcompile_codegen::kernels::attention::private_bytes(a),
        Kernel::Matmul(m) => rcompile_codegen::kernels::matmul::Schedule::new(cx.isa, &program, m).private_bytes(),
        Kernel::Loops(_) | Kernel::Quantise(_) => 0,
    });
    // Kernels take their scratch from the end of the private area.
    program.private_bytes = (program.private_bytes + scratch.max().unwrap_or(0)).next_multiple_of(128);
    Ok(Draft { state, output_stride, outputs: outputs.len() as u32, period, program })
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

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_codegen::isa::X86_64_TRIPLE;
    use rcompile_codegen::program::DType;

    pub(super) fn plan_text(text: &str) -> Result<Planned, PlanError> {
        let module = rcompile_graph::parse(text).unwrap_or_else(|e| panic!("{e}"));
        let isa = Isa::lookup(X86_64_TRIPLE, "x86-64-v3", &[]).unwrap();
        let cx = PlanCx { isa: &isa, slots: 1, ctx_size: 64, least_rows: 1, cores: 1, tuning: None };
        plan(&module, &cx, &mut WeightTable::default())
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
        let division = "module {
            symbol T<=8
            param @table : f32[19, 24] = source \"table\"
            func @step(%token: i32[T]) {
                %one = const 1 : i32
                %m = sub %token, %one
                %two = const 2 : i32
                %h = div %m, %two
                %x = embedding @table, %h
                %y = neg %x
                return %y
            }
        }";
        let calls = "module {
            symbol T<=8
            param @table : f32[19, 24] = source \"table\"
            func @inner(%x: f32[T, 24]) {
                %y = neg %x
                return %y
            }
            func @layer(%x: f32[T, 24]) {
                %y = call @inner(%x) : f32[T, 24]
                return %y
            }
            func @step(%token: i32[T]) {
                %x = embedding @table, %token
                %y = call @layer(%x) : f32[T, 24]
                return %y
            }
            main @step
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
            (other_symbol, "a graph without rows (symbol T) is not supported"),
            (&other_symbol.replace("symbol Q<=8", "symbol T<=8 symbol Q<=8"), "symbol Q is not supported"),
            (columns, "a symbolic dimension behind the first is not supported"),
            (division, "division of integers that may be negative or zero is not supported"),
            (calls, "a call in a function that is called is not supported"),
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
