//! Packed matmul: `out[row, col] = epilogue(sum_k a[row, k] * w[col, k])`, from one row (a matrix-vector product) to a full bucket.
//!
//! In: [`Matmul`] (all blocking decisions). Out: one function per kernel and, private to the module, one function per row count of a
//! tile and one epilogue.
//!
//! ```text
//! kernel:   prologue for all rows;  for block of panels in the thread's share { for block of m rows { rows.m; group nests } }
//! rows.m:   for p panels side by side { tile = microkernel over all k, in registers;  epilogue(tile) }
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
//! Weights are prefetched `tile.prefetch` bytes ahead. From a page on (weights that stream from memory), instances with fewer than four
//! streams spread the prefetch over the four pages of the next 16 KB.
//!
//! Sources: Goto & van de Geijn 2008 and BLIS (Van Zee & van de Geijn 2015) for the loop structure; tile shapes and prefetch
//! distances were measured with `examples/kernel_speed.rs`.

use super::{Call, KERNEL_PARAMS, define_kernel, loops};
use crate::error::Error;
use crate::expr::{Eval, Point};
use crate::isa::Isa;
use crate::llvm::builder::{Cmp, Elem, Fb, Function, ModuleBuilder, Ty, Value, Visibility};
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

/// Do `m` rows times `vectors` of accumulators, `held` weights, a broadcast and a mask fit the register file? Beyond this bound LLVM
/// spills inside the loop.
pub(super) fn tile_fits(isa: &Isa, m: u32, vectors: u32, held: u32) -> bool {
    m * vectors + held + 2 <= isa.registers
}

/// Bytes of a page of memory: hardware prefetchers follow a stream inside one.
const PAGE: u32 = 4096;
/// Pages of a prefetch window, see [`window_line`].
const WINDOW_PAGES: u32 = 4;

/// Byte offset of the `line`-th line to prefetch of a stream that is walked alone: the pages of a window (of the next one, for the
/// caller) in turns. A single linear stream is limited by the few requests of the L1 or by one page of hardware prefetch; four pages at
/// once keep as many requests under way as four streams do (on Sapphire Rapids 8 rows stream at 1.1 times a plain read instead of 0.7).
fn window_line<'c>(fb: &Fb<'_, 'c>, line: Value<'c>) -> Value<'c> {
    let pages = i64::from(WINDOW_PAGES);
    let lines = i64::from(PAGE) / 64;
    let page = fb.and(line, fb.int(pages - 1));
    let inside = fb.and(fb.lshr(line, WINDOW_PAGES.trailing_zeros()), fb.int(lines - 1));
    let window = fb.and(line, fb.int(-(pages * lines)));
    fb.add(fb.mul_int(window, 64), fb.add(fb.mul_int(page, i64::from(PAGE)), fb.mul_int(inside, 64)))
}

/// How one instance walks panels: `panels` side by side, `vectors` of each (from the panel's column `piece * vectors * lanes` on).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Walk {
    /// Rows.
    m: u32,
    /// Panels side by side.
    panels: u32,
    /// Vectors of each panel (of each way).
    vectors: u32,
    /// Passes over the panels to cover all their vectors.
    pieces: u32,
}

impl Walk {
    /// The walk of `m` rows with up to `most` panels side by side.
    fn choose(isa: &Isa, kernel: &Matmul, m: u32, most: u32) -> Walk {
        let per_panel = kernel.panels.nr / isa.lanes;
        let ways = kernel.panels.ways;
        // Weights of a single row are memory operands, unless they have to be widened.
        let widens = kernel.panels.k_pack == 2 && kernel.compute == Compute::F32;
        let fits = |vectors: u32| tile_fits(isa, m, vectors, if widens { vectors } else { vectors.min(m) });
        let mut vectors = per_panel;
        while vectors > 1 && !fits(vectors * ways) {
            vectors /= 2;
        }
        let mut panels = 1;
        if vectors == per_panel {
            let side_by_side = |p: u32| p * m * vectors * ways <= kernel.tile.accumulators && fits(p * vectors * ways);
            while panels < most && side_by_side(panels + 1) {
                panels += 1;
            }
        }
        Walk { m, panels, vectors, pieces: per_panel / vectors }
    }
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
                        self.microkernel(fb, walk, a, w, tile);
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

    /// All `k` of one register tile: reads `walk.m` rows at `a` and the panels at `w`, writes the accumulators to
    /// `tile: f32[way][m][panels * nr]`. `w` and `tile` point at the piece.
    fn microkernel(&self, fb: &Fb<'_, 'c>, walk: Walk, a: Value<'c>, w: Value<'c>, tile: Value<'c>) {
        let kernel = self.kernel;
        let lanes = fb.lanes();
        let panels = &kernel.panels;
        let a_size = kernel.a.dtype.size();
        let size = self.dtype.size();
        let pack = u64::from(panels.k_pack);
        let vector_bytes = u64::from(lanes) * pack * size;
        let step_bytes = u64::from(panels.nr) * pack * size;
        let panel_bytes = panels.panel_len() * size;
        // One stream per panel and way; vectors within it.
        let streams: Vec<u64> = (0..u64::from(walk.panels * panels.ways)).map(|s| s * panel_bytes).collect();
        let vectors: Vec<u64> = streams.iter().flat_map(|s| (0..u64::from(walk.vectors)).map(move |v| s + v * vector_bytes)).collect();
        let lines = (u64::from(walk.vectors) * vector_bytes).div_ceil(64);

        let step = |a: Value<'c>, w: Value<'c>, acc: &[Value<'c>], half: bool| -> Vec<Value<'c>> {
            let mut acc = acc.to_vec();
            let row = |r: u32, k: u64| fb.offset_const(a, (u64::from(r) * u64::from(kernel.a_stride) + k) * a_size);
            let align = vector_bytes.min(64) as u32;
            let columns: Vec<_> = vectors.iter().map(|&v| fb.offset_const(w, v)).collect();
            let n = columns.len();
            if kernel.compute == Compute::Bf16Dot {
                let words: Vec<_> = columns.iter().map(|&p| fb.load(Ty::vec(Elem::I32, lanes), p, align)).collect();
                for r in 0..walk.m {
                    // The last k of an odd K: `a` ends there, and the weight's partner is zero padding.
                    let pair = if half {
                        fb.zext(fb.load(Ty::scalar(Elem::I16), row(r, 0), 2), Elem::I32)
                    } else {
                        fb.load(Ty::I32, row(r, 0), 2)
                    };
                    let pair = fb.splat(pair, lanes);
                    for (c, &words) in words.iter().enumerate() {
                        let i = r as usize * n + c;
                        acc[i] = fb.dot_bf16(acc[i], pair, words);
                    }
                }
                return acc;
            }
            let words = |k: u32, p: Value<'c>| {
                let ty = Ty::vec(Elem::I32, lanes);
                // The odd halves' words are read again where they would not find registers beside the even halves.
                let again = k == 1 && !tile_fits(fb.isa(), walk.m, n as u32, 2 * n as u32);
                if again { fb.load_again(ty, p, align) } else { fb.load(ty, p, align) }
            };
            let half_of = |k: u32, p: Value<'c>| {
                let (even, odd) = fb.split_bf16_pair(words(k, p));
                if k == 0 { even } else { odd }
            };
            for k in 0..if half { 1 } else { pack } {
                let columns: Vec<_> = columns
                    .iter()
                    .map(|&p| if pack == 2 { half_of(k as u32, p) } else { fb.load_f32(self.dtype, lanes, p, align) })
                    .collect();
                for r in 0..walk.m {
                    let x = fb.load_broadcast(kernel.a.dtype, lanes, row(r, k));
                    for (c, &weight) in columns.iter().enumerate() {
                        let i = r as usize * n + c;
                        acc[i] = fb.fma(x, weight, acc[i]);
                    }
                }
            }
            acc
        };

        let steps = u64::from(panels.k) / pack;
        let zero = fb.zero(Ty::vec(Elem::F32, lanes));
        let zeros = vec![zero; vectors.len() * walk.m as usize];
        let panel = w;
        let few_streams = (streams.len() as u32) < WINDOW_PAGES && kernel.tile.prefetch >= PAGE;
        let mut acc = fb.loop_(fb.int(0), fb.int(steps as i64), 1, &zeros, |i, acc| {
            let a = fb.index(a, i, a_size * pack);
            let w = fb.index(w, i, step_bytes);
            if few_streams {
                for line in 0..step_bytes / 64 {
                    let at = window_line(fb, fb.add_int(fb.mul_int(i, step_bytes as i64 / 64), line as i64));
                    for stream in &streams {
                        fb.prefetch(fb.offset_const(fb.offset(panel, at), stream + u64::from(WINDOW_PAGES * PAGE)), 2);
                    }
                }
            } else if kernel.tile.prefetch > 0 {
                for stream in &streams {
                    for line in 0..lines {
                        fb.prefetch(fb.offset_const(w, stream + line * 64 + u64::from(kernel.tile.prefetch)), 3);
                    }
                }
            }
            step(a, w, acc, false)
        });
        if !u64::from(panels.k).is_multiple_of(pack) {
            acc = step(fb.offset_const(a, steps * pack * a_size), fb.offset_const(w, steps * step_bytes), &acc, true);
        }

        let width = u64::from(walk.panels * panels.nr);
        for r in 0..u64::from(walk.m) {
            for way in 0..u64::from(panels.ways) {
                for p in 0..u64::from(walk.panels) {
                    for v in 0..u64::from(walk.vectors) {
                        let column = p * u64::from(panels.nr) + v * u64::from(lanes);
                        let stream = p * u64::from(panels.ways) + way;
                        let i = r * vectors.len() as u64 + stream * u64::from(walk.vectors) + v;
                        let at = ((way * u64::from(walk.m) + r) * width + column) * 4;
                        fb.store(acc[i as usize], fb.offset_const(tile, at), lanes * 4);
                    }
                }
            }
        }
    }
}
