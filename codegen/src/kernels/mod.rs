//! Kernel generators: one file per kind of kernel, and for the functions that several kernels call (`part`, `rows`), all written with the
//! vector builder.
//!
//! Every kernel is `void NAME(ptr ctx, i32 thread, i32 threads, i32 layer)`: all threads of a step call it, each does its share. Here is
//! what the generators have in common: the call's arguments ([`Call`]), operand addresses, extents, shares.

mod arguments;
pub mod attention;
mod groups;
mod int_dot;
mod int_mmla;
mod int_tiles;
pub mod loops;
pub mod matmul;
mod microkernel;
mod mmla;
pub mod part;
pub mod probe;
pub mod product;
pub mod quantise;
pub mod rows;
mod share;
pub mod step;
mod tiles;
mod widening;

use self::arguments::{Arguments, arguments};
use crate::expr::Scope;
use crate::llvm::builder::{Cmp, Elem, Fb, Function, ModuleBuilder, Ty, Value, Visibility};
use crate::program::{Exprs, Extent, Operand, Place, Program, Table};
use rcompile_runtime::abi::{CpuKind, field};
use std::cell::Cell;

arguments! {
    /// Arguments of a step function, and of a barrier.
    pub struct StepArgs {
        /// Address of the `StepCtx`.
        ctx: PTR,
        /// This thread.
        thread: I32,
        /// Number of threads.
        threads: I32,
    }

    /// Arguments of a kernel.
    pub struct KernelArgs {
        /// Address of the `StepCtx`.
        ctx: PTR,
        /// This thread.
        thread: I32,
        /// Number of threads.
        threads: I32,
        /// Layer.
        layer: I32,
    }
}

impl<'c> StepArgs<'c> {
    /// Those of a kernel that the step calls.
    fn in_layer(self, layer: Value<'c>) -> KernelArgs<'c> {
        let StepArgs { ctx, thread, threads } = self;
        KernelArgs { ctx, thread, threads, layer }
    }
}

/// A call of a kernel, at the entry of one of its functions: its arguments and what is read from its context.
pub struct Call<'s, 'm, 'c> {
    /// The builder.
    pub fb: &'s Fb<'m, 'c>,
    /// The program that the kernel belongs to.
    pub program: &'s Program,
    /// As they were given.
    pub args: KernelArgs<'c>,
    /// Address of the `StepCtx`.
    pub ctx: Value<'c>,
    /// This thread (i64).
    pub thread: Value<'c>,
    /// Number of threads (i64).
    pub threads: Value<'c>,
    /// Layer (i64).
    pub layer: Value<'c>,
    tables: Cell<u32>,
}

/// Defines a kernel function; `body` emits its code.
pub fn define_kernel<'c>(mb: &ModuleBuilder<'c>, program: &Program, symbol: &str, body: impl FnOnce(&Call<'_, '_, 'c>)) -> Function<'c> {
    let params = KernelArgs::types();
    mb.define(symbol, &params, None, Visibility::Export, |fb, args| body(&Call::new(fb, program, KernelArgs::of(args))))
}

impl<'s, 'm, 'c> Call<'s, 'm, 'c> {
    /// From the arguments of a kernel function.
    pub fn new(fb: &'s Fb<'m, 'c>, program: &'s Program, args: KernelArgs<'c>) -> Self {
        let [thread, threads, layer] = [args.thread, args.threads, args.layer].map(|v| fb.zext(v, Elem::I64));
        Call { fb, program, args, ctx: args.ctx, thread, threads, layer, tables: Cell::new(0) }
    }

    /// Pointer field of the context.
    pub fn pointer_field(&self, offset: u64) -> Value<'c> {
        self.fb.load(Ty::PTR, self.fb.offset_const(self.ctx, offset), 8)
    }
    /// u64 field of the context.
    pub fn u64_field(&self, offset: u64) -> Value<'c> {
        self.fb.load(Ty::I64, self.fb.offset_const(self.ctx, offset), 8)
    }
    /// u32 field of the context, as i64.
    pub fn u32_field(&self, offset: u64) -> Value<'c> {
        self.fb.zext(self.fb.load(Ty::I32, self.fb.offset_const(self.ctx, offset), 4), Elem::I64)
    }

    /// Chooses when the step runs: `body` of what `by_cpu` has for its CPU, else of `other`. Out: the values of that.
    pub fn dispatch_by_cpu<T>(&self, other: &T, by_cpu: &[(CpuKind, T)], body: &dyn Fn(&T) -> Vec<Value<'c>>) -> Vec<Value<'c>> {
        let Some(((kind, one), more)) = by_cpu.split_first() else {
            return body(other);
        };
        let is_this = self.fb.cmp(Cmp::Eq, self.u32_field(field::CPU), self.fb.int(*kind as i64));
        self.fb.if_else(is_this, || body(one), || self.dispatch_by_cpu(other, more, body))
    }

    /// `values[layer]`: a constant or a product where the table allows, otherwise a lookup. One entry is valid for all layers.
    pub fn per_layer(&self, values: &[i64]) -> Value<'c> {
        let fb = self.fb;
        let first = *values.first().expect("a per-layer table has an entry");
        let step = values.get(1).map_or(0, |second| second.wrapping_sub(first));
        let affine = values.windows(2).all(|w| w[1].wrapping_sub(w[0]) == step);
        if affine {
            return if step == 0 { fb.int(first) } else { fb.add_int(fb.mul_int(self.layer, step), first) };
        }
        let name = format!("table.{}", self.tables.replace(self.tables.get() + 1));
        let table = fb.module().const_table(&name, values);
        fb.load(Ty::I64, fb.index(table, self.layer, 8), 8)
    }

    /// This thread's scratch.
    pub fn private(&self) -> Value<'c> {
        let offset = self.fb.mul(self.thread, self.u64_field(field::PRIVATE_STRIDE));
        self.fb.offset(self.pointer_field(field::PRIVATE), offset)
    }

    /// Base address of an operand.
    pub fn base(&self, place: &Place) -> Value<'c> {
        let fb = self.fb;
        let at = |base: Value<'c>, offsets: &[u64]| {
            let offsets: Vec<i64> = offsets.iter().map(|&o| o as i64).collect();
            fb.offset(base, self.per_layer(&offsets))
        };
        match place {
            Place::Weight(id) => at(self.pointer_field(field::WEIGHTS), &self.program.weights[id.index()].offsets),
            Place::Buffer(id) => fb.offset_const(self.pointer_field(field::ARENA), self.program.buffers[id.index()].offset),
            Place::Private(offset) => fb.offset_const(self.private(), *offset),
            Place::State(offsets) => at(self.pointer_field(field::STATE), offsets),
            Place::Output => self.pointer_field(field::OUTPUT),
            Place::Table(table) => self.pointer_field(match table {
                Table::Token => field::TOKEN,
                Table::Slot => field::SLOT,
                Table::Position => field::POSITION,
                Table::KvIndex => field::KV_INDEX,
                Table::Segment => field::SEGMENT,
                Table::LogitRow => field::LOGIT_ROW,
                Table::RunBegin => field::RUN_BEGIN,
                Table::PageTable => field::PAGE_TABLE,
            }),
        }
    }

    /// Resolves what expressions need, at the builder's position (best in the kernel's entry). Variables are set by the caller.
    pub fn scope<'a>(&self, operands: &'a [Operand], exprs: &'a Exprs) -> Scope<'a, 'c> {
        Scope {
            exprs,
            operands,
            bases: operands.iter().map(|o| self.base(&o.place)).collect(),
            pages_per_slot: self.u32_field(field::PAGES_PER_SLOT),
            vars: Default::default(),
            scalars: Default::default(),
        }
    }

    /// Extent of an outer loop (i64).
    pub fn extent(&self, extent: Extent) -> Value<'c> {
        match extent {
            Extent::Const(n) => self.fb.int(n.into()),
            Extent::Rows => self.u32_field(field::ROWS),
            Extent::LogitRows => self.u32_field(field::LOGIT_ROWS),
            Extent::Runs => self.u32_field(field::RUNS),
        }
    }
}
