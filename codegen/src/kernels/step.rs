//! The step function of a program: `void rc_step_<entry>_<bucket>(ptr ctx, i32 thread, i32 threads)`.
//!
//! Calls the regions' kernels one after the other, `rc_barrier` between them and, when `ctx.profile` is not null, `rc_profile` after
//! each region. The layer loop is a loop here; kernels get the layer as an argument.

use super::arguments::Arguments;
use super::{KernelArgs, StepArgs};
use crate::llvm::builder::{Elem, Fb, ModuleBuilder, Ty, Value, Visibility};
use crate::program::{Item, Program, RegionId};
use rcompile_runtime::abi::{BARRIER_SYMBOL, PROFILE_SYMBOL, field};

/// Defines the step function. `kernels`: symbol of each region.
pub fn define(mb: &ModuleBuilder<'_>, program: &Program, symbol: &str, kernels: &[String]) {
    mb.define(symbol, &StepArgs::types(), None, Visibility::Export, |fb, args| {
        let args = StepArgs::of(args);
        let profile = fb.load(Ty::PTR, fb.offset_const(args.ctx, field::PROFILE), 8);
        let step = Step { fb, args, kernels, profiled: fb.not(fb.is_null(profile)) };
        step.items(&program.body, fb.i32(0));
    });
}

struct Step<'a, 'm, 'c> {
    fb: &'a Fb<'m, 'c>,
    args: StepArgs<'c>,
    kernels: &'a [String],
    profiled: Value<'c>,
}

impl<'c> Step<'_, '_, 'c> {
    fn items(&self, items: &[Item], layer: Value<'c>) {
        for item in items {
            match item {
                Item::Region(id) => self.region(*id, layer),
                Item::Barrier => {
                    let barrier = self.fb.module().declare(BARRIER_SYMBOL, &StepArgs::types(), None);
                    self.args.call(self.fb, &barrier);
                }
                Item::Layers { count, body } => {
                    let fb = self.fb;
                    fb.for_(fb.int(0), fb.int((*count).into()), 1, |i| self.items(body, fb.trunc(i, Elem::I32)));
                }
            }
        }
    }

    fn region(&self, id: RegionId, layer: Value<'c>) {
        let fb = self.fb;
        let kernel = fb.module().declare(&self.kernels[id.index()], &KernelArgs::types(), None);
        self.args.in_layer(layer).call(fb, &kernel);
        fb.if_(self.profiled, || {
            let profile = fb.module().declare(PROFILE_SYMBOL, &[Ty::PTR, Ty::I32, Ty::I32], None);
            fb.call(&profile, &[self.args.ctx, self.args.thread, fb.i32(id.0 as i32)]);
        });
    }
}
