//! Packed matmul: `out[row, col] = epilogue(sum_k a[row, k] * w[col, k])`, from one row (a matrix-vector product) to a full bucket.
//!
//! In: [`Matmul`] (all blocking decisions). Out: one function per kernel and, private to the module, one function per row count of a
//! tile and one epilogue.
//!
//! ```text
//! kernel:   prologue for all rows;  for block of panels in the thread's share { for block of m rows { rows.m; group nests } }
//! rows.m:   for p panels side by side { tile = microkernel (all k, in registers);  epilogue(tile) }
//! epilogue: for row, for vector of columns { evaluate expressions, store }
//! ```
//!
//! Every output element is one chain of `fma` (or of the bf16 dot) over k in storage order, in every row count, walk and thread
//! count: results have the same bits everywhere. Few rows get their independent chains from panels side by side, never from k; so a
//! cut of k (`tile.k_block`) could not change results either, and none is made: a panel of 8192 k in f32 is 1 MB.
//! Row blocks are balanced (33 rows at `mr` 12: 11, 11, 11), and an exact instance exists for each row count: no padding rows.
//!
//! The accumulators go through a small tile in L1 to the epilogue, so that the epilogue is generated once per kernel and not once
//! per row count: a register tile of 24 vectors costs some 30 cycles there, against `12 k` in the loop.
//!
//! Sources: Goto & van de Geijn 2008 and BLIS (Van Zee & van de Geijn 2015) for the loop structure; tile shapes and prefetch
//! distances were measured with `examples/kernel_speed.rs`.

use super::microkernel::{Microkernel, Walk};
use super::{Call, KERNEL_PARAMS, define_kernel, loops};
use crate::error::Error;
use crate::expr::{Eval, Point};
use crate::isa::Isa;
use crate::llvm::builder::{Cmp, Elem, Function, ModuleBuilder, Ty, Value, Visibility};
use crate::program::{Compute, DType, Extent, Matmul, Place, Program};

/// Adds the kernel `name(ptr ctx, i32 thread, i32 threads, i32 layer)` to the module.
pub fn define<'c>(mb: &ModuleBuilder<'c>, program: &Program, name: &str, kernel: &Matmul) -> Result<Function<'c>, Error> {
    check(mb.isa(), program, name, kernel)?;
    let generator = Generator { mb, program, kernel, name, dtype: program.weights[kernel.weight.index()].dtype };
    let epilogue = generator.epilogue();
    let capacity = match kernel.rows {
        Extent::Const(n) => n,
        Extent::Rows => program.bucket,
        Extent::LogitRows => program.max_logit_rows,
        Extent::Runs => program.max_runs,
    };
    let mr = kernel.tile.mr.min(capacity).max(1);
    let rows: Vec<_> = (1..=mr).map(|m| generator.rows(m, &epilogue)).collect();
    Ok(generator.kernel(&rows))
}

/// Combinations that the planner must not ask for.
fn check(isa: &Isa, program: &Program, name: &str, kernel: &Matmul) -> Result<(), Error> {
    let dtype = program.weights[kernel.weight.index()].dtype;
    let panels = &kernel.panels;
    let mut problems = vec![];
    let wanted_pack = match dtype {
        DType::F32 | DType::F16 => 1,
        DType::Bf16 => 2,
        _ => {
            problems.push(format!("{name}: weights of type {dtype}"));
            panels.k_pack
        }
    };
    if panels.k_pack != wanted_pack {
        problems.push(format!("{name}: {dtype} weights with k_pack {}", panels.k_pack));
    }
    if !panels.nr.is_multiple_of(isa.lanes) || !(panels.nr / isa.lanes).is_power_of_two() || !(1..=2).contains(&panels.ways) {
        problems.push(format!("{name}: panels of {} columns, {} ways on vectors of {}", panels.nr, panels.ways, isa.lanes));
    }
    if kernel.compute == Compute::Bf16Dot && (!isa.bf16_dot || dtype != DType::Bf16 || kernel.a.dtype != DType::Bf16) {
        problems.push(format!("{name}: bf16 dot of {} and {dtype} on {}", kernel.a.dtype, isa.name));
    }
    if problems.is_empty() { Ok(()) } else { Err(Error::Program(problems)) }
}

/// One kernel's generator.
struct Generator<'a, 'c> {
    mb: &'a ModuleBuilder<'c>,
    program: &'a Program,
    kernel: &'a Matmul,
    name: &'a str,
    /// Weights as stored.
    dtype: DType,
}

impl<'c> Generator<'_, 'c> {
    /// `kernel(ctx, thread, threads, layer)`: the thread's share in blocks of panels, all rows over each block.
    fn kernel(&self, rows: &[Function<'c>]) -> Function<'c> {
        define_kernel(self.mb, self.program, self.name, |call| {
            let fb = call.fb;
            let kernel = self.kernel;
            let panels = &kernel.panels;
            let row_count = call.extent(kernel.rows);
            if let Some(nest) = &kernel.prologue {
                let scope = loops::bind(call, nest);
                fb.for_(fb.int(0), row_count, 1, |row| loops::body(fb, nest, &mut scope.clone(), &[row]));
            }
            let narrow = |v| fb.trunc(v, Elem::I32);
            let call_args = [call.ctx, narrow(call.thread), narrow(call.threads), narrow(call.layer)];
            let a = call.base(&kernel.a.place);
            let w = call.base(&Place::Weight(kernel.weight));

            let scopes: Vec<_> = kernel.group_nests.iter().map(|nest| loops::bind(call, &nest.nest)).collect();

            // Units: groups, or panels when there is one group.
            let (units, unit_panels) = match panels.groups {
                1 if kernel.group_nests.is_empty() => (panels.panels_per_group(), 1),
                groups => (groups, panels.panels_per_group()),
            };
            let (begin, end) = call.share(fb.int(units.into()));

            // Balanced row blocks: no small one is left over.
            let mr = fb.int(rows.len() as i64);
            let row_blocks = fb.div(fb.add_int(row_count, rows.len() as i64 - 1), mr);
            let some = fb.max(row_blocks, fb.int(1));
            let (each, more) = (fb.div(row_count, some), fb.rem(row_count, some));

            // With one row block nothing is used twice: the share is one block. Panels are counted per way, as everywhere.
            let block = match kernel.tile.n_block {
                0 => units,
                n => (n / unit_panels).clamp(1, units),
            };
            let one = fb.cmp(Cmp::Le, row_count, mr);
            let block = fb.select(one, fb.int(units.into()), fb.int(block.into()));
            let blocks = fb.div(fb.sub(fb.add(fb.sub(end, begin), block), fb.int(1)), block);
            fb.for_(fb.int(0), blocks, 1, |i| {
                let first = fb.add(begin, fb.mul(i, block));
                let last = fb.min(fb.add(first, block), end);
                let unit_panels = i64::from(unit_panels);
                let (first_panel, last_panel) = (fb.mul_int(first, unit_panels), fb.mul_int(last, unit_panels));
                fb.for_(fb.int(0), row_blocks, 1, |j| {
                    let row = fb.add(fb.mul(j, each), fb.min(j, more));
                    let count = fb.add(each, fb.zext(fb.cmp(Cmp::Lt, j, more), Elem::I64));
                    let a = fb.index(a, fb.mul_int(row, kernel.a_stride.into()), kernel.a.dtype.size());
                    for (m, function) in rows.iter().enumerate() {
                        fb.if_(fb.cmp(Cmp::Eq, count, fb.int(m as i64 + 1)), || {
                            let args = [&call_args[..], &[a, w, row, first_panel, last_panel]].concat();
                            fb.call(function, &args);
                        });
                    }
                    for (nest, scope) in kernel.group_nests.iter().zip(&scopes) {
                        let first = fb.max(first, fb.int(nest.groups.start.into()));
                        let last = fb.min(last, fb.int(nest.groups.end.into()));
                        fb.for_(row, fb.add(row, count), 1, |row| {
                            fb.for_(first, last, 1, |group| {
                                let group = fb.sub(group, fb.int(nest.groups.start.into()));
                                loops::body(fb, &nest.nest, &mut scope.clone(), &[row, group]);
                            });
                        });
                    }
                });
            });
        })
    }

    /// `rows.m(.., a, w, row, first_panel, last_panel)`: `m` rows at `a` times these panels, with epilogue.
    fn rows(&self, m: u32, epilogue: &Function<'c>) -> Function<'c> {
        let params = [&KERNEL_PARAMS[..], &[Ty::PTR, Ty::PTR, Ty::I64, Ty::I64, Ty::I64]].concat();
        let name = format!("{}.rows{m}", self.name);
        self.mb.define(&name, &params, None, Visibility::InternalNoInline, |fb, args| {
            let (call, rest) = args.split_at(KERNEL_PARAMS.len());
            let [a, w, row, first, last] = *rest else { unreachable!() };
            let panels = &self.kernel.panels;
            let wide = Walk::choose(fb.isa(), self.kernel, m, panels.panels());
            let narrow = Walk::choose(fb.isa(), self.kernel, m, 1);
            let tile = fb.stack(u64::from(m * wide.panels * panels.nr * panels.ways) * 4, 64);
            let vector_bytes = u64::from(fb.lanes() * panels.k_pack) * self.dtype.size();
            let walk = |first: Value<'c>, last: Value<'c>, walk: Walk| {
                fb.for_(first, last, walk.panels.into(), |panel| {
                    let panel_bytes = panels.panel_len() * u64::from(panels.ways) * self.dtype.size();
                    let w = fb.offset(w, fb.mul_int(panel, panel_bytes as i64));
                    fb.for_(fb.int(0), fb.int(walk.pieces.into()), 1, |piece| {
                        let vector = fb.mul_int(piece, walk.vectors.into());
                        let w = fb.offset(w, fb.mul_int(vector, vector_bytes as i64));
                        let tile = fb.offset(tile, fb.mul_int(vector, i64::from(fb.lanes()) * 4));
                        Microkernel { kernel: self.kernel, dtype: self.dtype }.emit(fb, walk, a, w, tile);
                    });
                    let column = fb.mul_int(panel, panels.nr.into());
                    let columns = fb.int((walk.panels * panels.nr).into());
                    fb.call(epilogue, &[call, &[tile, row, fb.int(m.into()), column, columns]].concat());
                });
            };
            let count = fb.sub(last, first);
            let rest = if wide == narrow { first } else { fb.sub(last, fb.rem(count, fb.int(wide.panels.into()))) };
            if wide != narrow {
                walk(first, rest, wide);
            }
            walk(rest, last, narrow);
        })
    }

    /// `epilogue(.., tile, row, rows, column, columns)` over `tile: f32[way][rows][columns]`.
    fn epilogue(&self) -> Function<'c> {
        let params = [&KERNEL_PARAMS[..], &[Ty::PTR, Ty::I64, Ty::I64, Ty::I64, Ty::I64]].concat();
        let name = format!("{}.epilogue", self.name);
        self.mb.define(&name, &params, None, Visibility::InternalNoInline, |fb, args| {
            let (call, rest) = args.split_at(KERNEL_PARAMS.len());
            let [tile, row, rows, column, columns] = *rest else { unreachable!() };
            let kernel = self.kernel;
            let scope = Call::new(fb, self.program, call).scope(&kernel.operands, &kernel.exprs, &[]);
            let lanes = fb.lanes();
            let roots: Vec<_> = kernel.stores.iter().flat_map(|s| [s.index, s.value]).collect();
            fb.for_(fb.int(0), rows, 1, |r| {
                let mut scope = scope.clone();
                scope.set(kernel.row, fb.add(row, r));
                let at = |c: Value<'c>, acc: Vec<Value<'c>>| Point {
                    var: Some(kernel.col),
                    first: fb.add(column, c),
                    divisor: lanes.into(),
                    lanes,
                    active: lanes,
                    acc,
                    score: None,
                };
                let zero = fb.zero(Ty::vec(Elem::F32, lanes));
                let outside = Eval::new(fb, &scope, at(fb.int(0), vec![zero; kernel.panels.ways as usize]));
                outside.hoist(&roots);
                fb.for_(fb.int(0), columns, lanes.into(), |c| {
                    let acc = (0..kernel.panels.ways)
                        .map(|way| {
                            let r = fb.add(r, fb.mul_int(rows, way.into()));
                            let at = fb.index(tile, fb.add(fb.mul(r, columns), c), 4);
                            fb.load(Ty::vec(Elem::F32, lanes), at, lanes * 4)
                        })
                        .collect();
                    let eval = outside.at(at(c, acc));
                    eval.store(&kernel.stores);
                });
            });
        })
    }
}
