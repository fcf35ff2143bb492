//! The state area: where the KV cache's pages lie, and in them what each layer keeps.

use super::{PlanCx, PlanError, attention};
use rcompile_graph::Module;
use rcompile_runtime::abi::PAGE_POSITIONS;

/// The largest state area: the address space of a process.
const STATE_BYTES_MAX: u128 = 1 << 47;

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
pub(super) struct StateLayout {
    /// Bytes from a page to the next.
    pub(super) page_bytes: u64,
    /// Of each state in the first page.
    pub(super) offsets: Vec<u64>,
}

/// Bytes and places of the states. Where one of them survives a step, all get places of their own; where none does, as in encoders, all
/// layers share one place.
pub(super) fn plan(module: &Module, cx: &PlanCx<'_>) -> Result<(StatePlan, StateLayout), PlanError> {
    // The whole sum first, and in 128 bits: heads, layers and positions are each bounded, their product is not.
    let per_position: u128 =
        module.states.iter().map(|s| u128::from(s.kv_heads) * u128::from(attention::kv_page(s).bytes_per_position())).sum();
    let positions = u128::from(cx.ctx_size.next_multiple_of(PAGE_POSITIONS as u32)) * u128::from(cx.slots);
    if per_position * positions > STATE_BYTES_MAX {
        return Err(PlanError::StateTooLarge(per_position * positions));
    }
    let pages_per_slot = cx.ctx_size.div_ceil(PAGE_POSITIONS as u32);
    let mut plan = StatePlan { pages_per_slot, persistent: module.states.iter().any(|s| s.persistent), ..StatePlan::default() };
    let mut offsets = Vec::new();
    for s in &module.states {
        let per_token = s.kv_heads * attention::kv_page(s).bytes_per_position();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use rcompile_codegen::isa::{Isa, X86_64_TRIPLE};

    /// All layers of a page lie together; states that do not survive a step share one place.
    #[test]
    fn states_lie_page_by_page() {
        let isa = Isa::lookup(X86_64_TRIPLE, "x86-64-v3", &[]).unwrap();
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
            let (plan, layout) = super::plan(&rcompile_graph::parse(&text).unwrap_or_else(|e| panic!("{e}")), &cx).unwrap();
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
        assert_eq!(super::plan(&module, &cx(1 << 22)).unwrap().0.bytes, 1 << 47);
        let e = Error::from(super::plan(&module, &cx((1 << 22) + 1)).map(|_| ()).unwrap_err());
        assert!(e.exit_code() == 7 && e.to_string().contains("140746078289920 bytes"), "{e}");
    }
}
