//! Attention over the paged KV cache with online softmax.
//!
//! In: [`Attention`]. Out: one function per kernel and, private to the module, `unit` (one tile of rows and one KV head) and `maxima`; and
//! which functions of (row, head) pairs it calls ([`parts`]), which are units of compilation of their own ([`pairs`]): a `block`
//! function per number of pairs in a register tile, `softmax`, and what many pairs want.
//!
//! ```text
//! kernel: for unit in the thread's share, and in pieces of others' at its end: unit
//! unit:   widen q of all pairs (row, query head of the group) into scratch
//!         for block of 256 keys that some row sees { for up to 6 pairs: block };  out = acc * (1 / sum)
//! block:  s = q K^T in register tiles of pairs x keys;  softmax(s) of all pairs;  acc = acc * alpha + p V in tiles of pairs x columns
//! ```
//!
//! Rows of a group's heads are pairs alike, so that all of them share the reads of K and V. Scores of a block stay in L1.
//! Rows and keys that nobody sees cost nothing.
//!
//! A single row reads its cache from memory, at the speed of which the products of a block are too short to wait for: while a block is
//! computed, the same places of the thread's next block are asked for, of the next unit where this one ends.
//!
//! Bits: a score is one `fma` chain over d; the running sum is one chain per lane (key modulo lanes) over all keys; an output element
//! is one chain over keys, rescaled at block borders (multiples of 256 from key 0). Keys that a row does not see add an exact zero,
//! blocks that it does not see multiply by an exact one. So a row has the same bits alone, in a tile of any shape, on any thread.
//! V rows at or beyond the last key that the tile sees are never read: memory there may hold anything.
//!
//! With [`Compute::Bf16Dot`] queries and weights are rounded to bf16 and both products take two d, or two keys, a step: chains of the
//! dot instruction, over pairs that begin at even d and even keys. What lies in the cache is paired in registers, a shuffle per vector.
//!
//! With [`Compute::Bf16Tiles`] both are rounded as well, many pairs take tiles, and few follow their order of additions, see
//! `attention/tiles.rs`.
//!
//! A cache of int8 codes is read like one of floats: the codes go through the same chains, the scale of a key multiplies its score, the
//! scale of a value the key's weight (after the weight went into the sum).
//!
//! Here: the loops over units, blocks and chunks of pairs, and where pairs begin and end. `pairs`: functions of pairs; `scratch`: what they
//! share; `products`: the two products of few pairs; `softmax`: what lies between them; `tiles`: many pairs by tiles.
//!
//! Sources: Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022 (blocks).

pub mod pairs;
mod products;
mod scratch;
mod softmax;
mod tiles;

use self::pairs::{BlockArgs, BlockCaller, CopyArgs, MaximaArgs, PairFunction, PairWork, Pairs, SoftmaxArgs, TilesArgs};
use self::products::Chunk;
use self::scratch::{Scratch, cache_and_bytes, widened};
use super::arguments::{Arguments, arguments};
use super::microkernel::{L2, tile_fits};
use super::part::Part;
use super::share::in_equal_parts;
use super::tiles::{ROW, Shapes};
use super::{Call, KernelArgs, define_kernel};
use crate::error::Error;
use crate::expr::{Eval, Point};
use crate::isa::{BF16_TILE_K, Isa};
use crate::llvm::builder::{Cmp, Elem, Fb, Function, ModuleBuilder, Ty, Value};
use crate::math;
use crate::program::{Attention, Compute, DType, Expr, KEY_GROUP, KvPage, Place, Program, Table};
use rcompile_runtime::abi::{PAGE_POSITIONS, field};
use std::collections::BTreeSet;

/// Adds the kernel `name(ptr ctx, i32 thread, i32 threads, i32 layer)` to the module; it calls its parts by `symbol`.
pub fn define<'c>(
    mb: &ModuleBuilder<'c>,
    program: &Program,
    name: &str,
    kernel: &Attention,
    symbol: impl Fn(&Part) -> String,
) -> Result<Function<'c>, Error> {
    check(mb.isa(), name, program, kernel)?;
    let pairs = Pairs::new(kernel);
    let functions = functions(kernel, &pairs, |part| part.declare(mb, &symbol(&part)));
    let generator = Generator { mb, program, kernel, name, pairs, group: (kernel.heads / kernel.kv_heads).into() };
    let unit = generator.unit(&functions);
    Ok(generator.kernel(&unit))
}

/// The kernel and its functions of pairs, `<name>.block4` and the like, in one module: for measurements, and tests of one kernel.
pub fn define_whole<'c>(mb: &ModuleBuilder<'c>, program: &Program, name: &str, kernel: &Attention) -> Result<Function<'c>, Error> {
    let symbol = |part: &Part| format!("{name}.{}", part.name());
    for part in parts(kernel) {
        part.define(mb, &symbol(&part))?;
    }
    define(mb, program, name, kernel, symbol)
}

/// The functions of pairs that a kernel calls.
pub fn parts(kernel: &Attention) -> Vec<Part> {
    let mut all = vec![];
    functions(kernel, &Pairs::new(kernel), |part| all.push(part));
    all
}

/// Combinations that the planner must not ask for.
fn check(isa: &Isa, name: &str, program: &Program, kernel: &Attention) -> Result<(), Error> {
    let mut problems = vec![];
    let float = |d: DType| matches!(d, DType::F32 | DType::F16 | DType::Bf16);
    if !float(kernel.q.dtype) || !float(kernel.out.dtype) {
        problems.push(format!("{name}: q {}, out {}", kernel.q.dtype, kernel.out.dtype));
    }
    problems.extend(Pairs::new(kernel).problems(isa, name));
    if kernel.exprs.nodes().iter().any(|e| matches!(e, Expr::Load(..))) {
        problems.push(format!("{name}: score and mask have no operands to load from"));
    }
    if problems.is_empty() && program.private_bytes < private_bytes(kernel) {
        problems.push(format!("{name}: needs {} bytes of private scratch, has {}", private_bytes(kernel), program.private_bytes));
    }
    if problems.is_empty() { Ok(()) } else { Err(Error::Program(problems)) }
}

/// Most (row, head) pairs in a register tile: with 4 vectors of keys or columns 24 accumulators of 32 registers, with 2 vectors 12 of 16.
const MAX_PAIRS: u32 = 6;
/// Up to so many pairs, mostly those of a single row, a block comes from memory: each of its loops asks for the lines that the same loop of
/// the thread's next block will read. Five and six are more often a chunk of a prompt, whose chunks read a block again and again from a
/// cache.
const STREAMED_PAIRS: u32 = 4;
/// Columns in a step of [`Pairs::scores`], keys in one of [`Pairs::values`] (of both pairs with dots): instructions beside the
/// multiply-adds count, as in matmuls (`microkernel::BLOCK_STEP`).
const STEPS: i64 = 4;
/// Keys per block.
const BLOCK: i64 = PAGE_POSITIONS as i64;
/// Bytes of a cache line.
const LINE: u64 = 64;
/// Scratch up to this size is on the stack; more is at the end of the thread's private area, see [`private_bytes`].
const STACK_BYTES: u64 = 192 << 10;
/// What a unit costs per row beside its keys, in keys: shares of threads are weighted with it.
const UNIT_KEYS: i64 = 32;
/// The last one of so many parts of a share can be done by others.
const OPEN_PART: i64 = 4;
/// `size_of::<abi::Tile>()`.
const TILE_BYTES: u64 = 16;
/// First running maximum: finite, so that a block in which a row sees nothing changes nothing (`exp(m - m)` is 1), and no finite score is
/// below.
const LOWEST: f32 = f32::MIN;

/// Bytes that the kernel uses at the END of each thread's private area (`ctx.private_stride` minus this): the planner adds the largest
/// of all kernels to what it places there itself. 0 when the scratch fits the stack.
pub fn private_bytes(kernel: &Attention) -> u64 {
    let bytes = cache_and_bytes(kernel, &Pairs::new(kernel)).1;
    if bytes > STACK_BYTES { bytes } else { 0 }
}

/// Functions of pairs of a kernel.
struct Functions<F> {
    /// For few pairs, and many that are widened, where there are any.
    softmax: Option<F>,
    stored: Blocks<F>,
    many: Option<Many<F>>,
}

/// Functions of a block for chunks of so many pairs.
type Blocks<F> = Vec<(u32, F)>;

/// What works on blocks of keys that many pairs read.
enum Many<F> {
    /// Where several chunks of pairs read a block of keys, it is widened for all of them once.
    Widened { widen: F, blocks: Blocks<F> },
    /// Or packed.
    Tiles { pack: F, softmax: F, tiles: F },
}

/// What `each` makes of the functions of a kernel.
fn functions<F>(kernel: &Attention, pairs: &Pairs, mut each: impl FnMut(Part) -> F) -> Functions<F> {
    let mut each = |work| each(Part::Pairs(PairFunction { pairs: *pairs, work }));
    // A tile has up to `tile_rows` rows, with `group` pairs each.
    let counts = (1..=kernel.tile_rows).map(|rows| rows * (kernel.heads / kernel.kv_heads));
    let (few, several): (Vec<u32>, Vec<u32>) = counts.partition(|pairs| !is_many(kernel, *pairs));
    let blocks = |pairs: &[u32], cache: KvPage, each: &mut dyn FnMut(PairWork) -> F| -> Blocks<F> {
        chunk_sizes(pairs).into_iter().map(|count| (count, each(PairWork::Block { count, cache }))).collect()
    };
    Functions {
        softmax: (kernel.compute != Compute::Bf16Tiles || !few.is_empty()).then(|| each(PairWork::Softmax { factor: pairs.factor() })),
        stored: blocks(&few, pairs.stored, &mut each),
        many: (!several.is_empty()).then(|| match kernel.compute {
            Compute::Bf16Tiles => Many::Tiles {
                pack: each(PairWork::Pack),
                softmax: each(PairWork::Softmax { factor: DType::Bf16 }),
                tiles: each(PairWork::Tiles),
            },
            _ => Many::Widened { widen: each(PairWork::Widen), blocks: blocks(&several, widened(kernel.kv.head_dim), &mut each) },
        }),
    }
}

/// Chunks of pairs from which on it pays to widen a block of keys first.
const WIDEN_CHUNKS: u32 = 4;

/// From so many pairs of a tile on a block of keys is made ready for all of them once, if ever.
fn many_pairs(kernel: &Attention) -> Option<u32> {
    match kernel.compute {
        Compute::Bf16Tiles => Some(tiles::LEAST_PAIRS),
        // The cache does not hold what the products take.
        Compute::F32 if kernel.kv.dtype != DType::F32 => Some(MAX_PAIRS * (WIDEN_CHUNKS - 1) + 1),
        _ => None,
    }
}

/// Are so many?
fn is_many(kernel: &Attention, pairs: u32) -> bool {
    many_pairs(kernel).is_some_and(|many| pairs >= many)
}

/// Is a tile of most rows?
fn has_many(kernel: &Attention) -> bool {
    is_many(kernel, kernel.tile_rows * (kernel.heads / kernel.kv_heads))
}

/// Sizes of balanced chunks of at most [`MAX_PAIRS`] of each of these numbers of pairs.
fn chunk_sizes(pairs: &[u32]) -> BTreeSet<u32> {
    let sizes = |pairs: &u32| {
        let chunks = pairs.div_ceil(MAX_PAIRS);
        [pairs / chunks, pairs.div_ceil(chunks)]
    };
    pairs.iter().flat_map(sizes).collect()
}

arguments! {
    /// Arguments of a unit: a tile of rows and a KV head, and where the thread goes on.
    struct UnitArgs {
        call: [KernelArgs],
        tile: PTR,
        kv_head: I64,
        next_tile: PTR,
        next_kv_head: I64,
        scratch: PTR,
    }
}

/// One kernel's generator.
struct Generator<'a, 'c> {
    mb: &'a ModuleBuilder<'c>,
    program: &'a Program,
    kernel: &'a Attention,
    name: &'a str,
    pairs: Pairs,
    /// Query heads per KV head.
    group: i64,
}

impl<'a, 'c> Generator<'a, 'c> {
    /// `kernel(ctx, thread, threads, layer)`: the units of the thread's share.
    ///
    /// Units are ordered by KV head, then tile, and weighted by rows and keys, so that the long tiles of a causal prompt are shared out
    /// evenly. A unit belongs to the thread in whose share of the total weight it begins, or the piece of a share that is offered to whoever
    /// is free: each is done by one thread, whole.
    fn kernel(&self, unit: &Function<'c>) -> Function<'c> {
        define_kernel(self.mb, self.program, self.name, |call| {
            let fb = call.fb;
            let scratch = match private_bytes(self.kernel) {
                0 => fb.stack(cache_and_bytes(self.kernel, &self.pairs).1, 64),
                bytes => fb.offset(call.private(), fb.sub(call.u64_field(field::PRIVATE_STRIDE), fb.int(bytes as i64))),
            };
            let tiles = call.u32_field(field::TILES);
            let tile_table = call.pointer_field(field::TILE);
            let tile_at = |i: Value<'c>| fb.index(tile_table, i, TILE_BYTES);
            let weight = |tile: Value<'c>| fb.mul(tile_field(fb, tile, 1), fb.add_int(tile_field(fb, tile, 3), UNIT_KEYS));
            let sum = fb.loop_(fb.int(0), tiles, 1, &[fb.int(0)], |i, sum| vec![fb.add(sum[0], weight(tile_at(i)))]);
            let heads = i64::from(self.kernel.kv_heads);
            let (last_tile, last_head) = (fb.add_int(tiles, -1), fb.int(heads - 1));
            let total = fb.mul_int(sum[0], heads);
            let (_, share_end) = call.share(total);
            // Units that begin in this piece of the weight.
            let units = |begin: Value<'c>, end: Value<'c>| {
                let first_head = fb.div(begin, sum[0]);
                let end_head = fb.div(fb.add(end, fb.add_int(sum[0], -1)), sum[0]);
                fb.loop_(first_head, end_head, 1, &[fb.mul(first_head, sum[0])], |kv_head, sum| {
                    fb.loop_(fb.int(0), tiles, 1, sum, |i, sum| {
                        let tile = tile_at(i);
                        let after = fb.add(sum[0], weight(tile));
                        let mine = fb.and(fb.cmp(Cmp::Le, begin, sum[0]), fb.cmp(Cmp::Lt, sum[0], end));
                        fb.if_(mine, || {
                            // Where the thread goes on: with the next tile, or the next head's first; at its end with nothing new.
                            let is_last = fb.cmp(Cmp::Eq, i, last_tile);
                            let next_tile = tile_at(fb.select(is_last, fb.int(0), fb.add_int(i, 1)));
                            let next_head = fb.min(fb.add(kv_head, fb.zext(is_last, Elem::I64)), last_head);
                            let goes_on = fb.cmp(Cmp::Lt, after, share_end);
                            let next_tile = fb.select(goes_on, next_tile, tile);
                            let next_kv_head = fb.select(goes_on, next_head, kv_head);
                            UnitArgs { call: call.args, tile, kv_head, next_tile, next_kv_head, scratch }.call(fb, unit);
                        });
                        vec![after]
                    })
                });
            };
            // (A step has rows, and so a tile.)
            let mean = fb.div(sum[0], tiles);
            call.offer(total, mean, (fb.int(1), OPEN_PART)).work(call, units);
            if self.kernel.compute == Compute::Bf16Tiles && has_many(self.kernel) {
                fb.tile_release();
            }
        })
    }

    /// [`is_many`] of a tile.
    fn are_many(&self, fb: &Fb<'_, 'c>, pairs: Value<'c>) -> Value<'c> {
        many_pairs(self.kernel).map_or(fb.bool(false), |many| fb.cmp(Cmp::Ge, pairs, fb.int(many.into())))
    }

    /// The function with [`UnitArgs`]: a tile of rows over all its blocks of keys. What is next is asked for meanwhile.
    fn unit(&self, functions: &Functions<Function<'c>>) -> Function<'c> {
        let (group, maxima) = (self.group, self.maxima());
        UnitArgs::define(self.mb, &format!("{}.unit", self.name), |fb, args| {
            let UnitArgs { tile, kv_head, next_tile, next_kv_head, scratch, .. } = args;
            let call = Call::new(fb, self.program, args.call);
            let k = self.kernel;
            let [row_begin, row_count, slot, key_end] = [0, 1, 2, 3].map(|i| tile_field(fb, tile, i));
            let pairs = fb.mul_int(row_count, group);
            let caller =
                |softmax: &Function<'c>| BlockCaller { call: args.call, maxima: fb.address(&maxima), softmax: fb.address(softmax) };
            let seen = self.begin_pairs(&call, scratch, kv_head, row_begin, pairs, key_end);

            let pages = Pages::new(&call, k);
            let next_page = {
                let [row, slot, key_end] = [0, 2, 3].map(|i| tile_field(fb, next_tile, i));
                let (_, lower) = self.first_key(&call, row);
                let lower = fb.min(lower, fb.max(fb.add_int(key_end, -1), fb.int(0)));
                pages.of(fb, slot, fb.lshr(lower, BLOCK.trailing_zeros()), next_kv_head)
            };
            let number_of = |most: i64| fb.div(fb.add_int(pairs, most - 1), fb.int(most));
            let few = number_of(MAX_PAIRS.into());
            let shapes = matches!(functions.many, Some(Many::Tiles { .. })).then(|| Shapes::new(fb, ROW));
            let first = fb.lshr(seen.0, BLOCK.trailing_zeros());
            let end = fb.lshr(fb.add_int(seen.1, BLOCK - 1), BLOCK.trailing_zeros());
            fb.for_(first, end, 1, |block| {
                let keys = pages.of(fb, slot, block, kv_head);
                let is_last = fb.cmp(Cmp::Eq, fb.add_int(block, 1), end);
                let following = pages.of(fb, slot, fb.select(is_last, block, fb.add_int(block, 1)), kv_head);
                let next = fb.select(is_last, next_page, following);
                // Nobody reads them where there are none.
                let scales = fb.offset_const(keys, k.kv.scales().unwrap_or(0));
                let key_begin = fb.mul_int(block, BLOCK);
                let all = |keys: Value<'c>, blocks: &Blocks<Function<'c>>| {
                    in_equal_parts(fb, pairs, few, |_, first, count| {
                        for (size, function) in blocks {
                            fb.if_(fb.cmp(Cmp::Eq, count, fb.int((*size).into())), || {
                                let own = BlockArgs { scratch, keys, next, scales, key_begin, kv_head, first };
                                let softmax = functions.softmax.as_ref().expect("there are blocks");
                                (caller(softmax), own).call(fb, function);
                            });
                        }
                    });
                };
                let cache = fb.offset_const(scratch, cache_and_bytes(k, &self.pairs).0);
                let count = fb.min(fb.sub(seen.1, key_begin), fb.int(BLOCK));
                let stored = &functions.stored;
                match &functions.many {
                    None => all(keys, stored),
                    Some(Many::Widened { widen, blocks: wide }) => {
                        let by_widened = || {
                            CopyArgs { to: cache, from: keys, count }.call(fb, widen);
                            all(cache, wide)
                        };
                        fb.either(self.are_many(fb, pairs), by_widened, || all(keys, stored));
                    }
                    Some(Many::Tiles { pack, softmax, tiles }) => {
                        let by_tiles = || {
                            CopyArgs { to: cache, from: keys, count }.call(fb, pack);
                            in_equal_parts(fb, pairs, number_of(tiles::PAIRS.into()), |_, first, count| {
                                shapes.iter().for_each(|shapes| shapes.set(fb, count));
                                let own = TilesArgs { scratch, block: cache, scales, key_begin, kv_head, first, pairs: count };
                                (caller(softmax), own).call(fb, tiles);
                            });
                        };
                        fb.either(self.are_many(fb, pairs), by_tiles, || all(keys, stored));
                    }
                }
            });
            self.end_pairs(&call, scratch, kv_head, row_begin, pairs);
        })
    }

    /// Place of a row's query, and the first key that it sees.
    fn first_key(&self, call: &Call<'_, '_, 'c>, row: Value<'c>) -> (Value<'c>, Value<'c>) {
        let fb = call.fb;
        let kv_index = call.base(&Place::Table(Table::KvIndex));
        let query = fb.sext(fb.load(Ty::I32, fb.index(kv_index, row, 4), 4), Elem::I64);
        let lower = self.kernel.key_lower.map_or(fb.int(0), |offset| fb.max(fb.add_int(query, offset), fb.int(0)));
        (query, lower)
    }

    /// Fills scratch for each pair; returns the keys that some row sees, `begin .. end`.
    fn begin_pairs(
        &self,
        call: &Call<'_, '_, 'c>,
        scratch: Value<'c>,
        kv_head: Value<'c>,
        row_begin: Value<'c>,
        pairs: Value<'c>,
        key_end: Value<'c>,
    ) -> (Value<'c>, Value<'c>) {
        let fb = call.fb;
        let k = self.kernel;
        let (kernel_pairs, at) = (&self.pairs, self.pairs.at());
        let q = call.base(&k.q.place);
        let seen = fb.loop_(fb.int(0), pairs, 1, &[key_end, fb.int(0)], |pair, seen| {
            let (row, head) = self.row_and_head(fb, row_begin, kv_head, pair);
            let (query, lower) = self.first_key(call, row);
            let upper = k.key_upper.map_or(key_end, |offset| fb.min(fb.add_int(query, offset), key_end));
            let bounds = kernel_pairs.of_pair(fb, scratch, at.bounds, pair);
            for (i, value) in [lower, upper, query].into_iter().enumerate() {
                fb.store(value, fb.offset_const(bounds, i as u64 * 8), 8);
            }
            let source = fb.add(fb.mul_int(row, k.q_stride.into()), fb.mul_int(head, k.q_head_stride.into()));
            let source = fb.index(q, source, k.q.dtype.size());
            let target = kernel_pairs.of_pair(fb, scratch, at.q, pair);
            let acc = kernel_pairs.of_pair(fb, scratch, at.acc, pair);
            for (column, lanes, mask) in self.columns(fb) {
                let from = fb.offset_const(source, column * k.q.dtype.size());
                let align = k.q.dtype.size() as u32;
                let x = match mask {
                    Some(mask) => fb.load_f32_masked(k.q.dtype, from, mask, align),
                    None => fb.load_f32(k.q.dtype, lanes, from, align),
                };
                let store = |factor: DType| kernel_pairs.store_factors(fb, factor, x, fb.offset_const(target, column * factor.size()));
                match k.compute {
                    Compute::Bf16Tiles => fb.either(self.are_many(fb, pairs), || store(DType::Bf16), || store(kernel_pairs.factor())),
                    _ => store(kernel_pairs.factor()),
                }
                fb.store(fb.zero(x.ty()), fb.offset_const(acc, column * 4), 4 * lanes);
            }
            let sum = kernel_pairs.of_pair(fb, scratch, at.sum, pair);
            fb.store(fb.zero(Ty::vec(Elem::F32, fb.lanes())), sum, fb.lanes() * 4);
            fb.store(fb.f32(LOWEST), kernel_pairs.of_pair(fb, scratch, at.max, pair), 4);
            vec![fb.min(seen[0], lower), fb.max(seen[1], upper)]
        });
        (seen[0], seen[1])
    }

    /// `out = acc * (1 / sum)`.
    fn end_pairs(&self, call: &Call<'_, '_, 'c>, scratch: Value<'c>, kv_head: Value<'c>, row_begin: Value<'c>, pairs: Value<'c>) {
        let fb = call.fb;
        let k = self.kernel;
        let out = call.base(&k.out.place);
        let size = k.out.dtype.size();
        fb.for_(fb.int(0), pairs, 1, |pair| {
            let (row, head) = self.row_and_head(fb, row_begin, kv_head, pair);
            let sum = self.pairs.of_pair(fb, scratch, self.pairs.at().sum, pair);
            let sum = fb.reduce(fb.load(Ty::vec(Elem::F32, fb.lanes()), sum, fb.lanes() * 4), |a, b| fb.add(a, b));
            // A row that sees no key gives zeros, as ATen's safe softmax does.
            let sum = fb.select(fb.cmp(Cmp::Eq, sum, fb.f32(0.0)), fb.f32(1.0), sum);
            // A division of a vector takes as long as sixteen products.
            let inverse = fb.div(fb.f32(1.0), sum);
            let acc = self.pairs.of_pair(fb, scratch, self.pairs.at().acc, pair);
            let target = fb.add(fb.mul_int(row, k.out_stride.into()), fb.mul_int(head, k.kv.head_dim.into()));
            let target = fb.index(out, target, size);
            for (column, lanes, mask) in self.columns(fb) {
                let x = fb.load(Ty::vec(Elem::F32, lanes), fb.offset_const(acc, column * 4), 4 * lanes);
                let x = fb.mul(x, fb.splat(inverse, lanes));
                let to = fb.offset_const(target, column * size);
                match mask {
                    Some(mask) => fb.store_f32_masked(k.out.dtype, x, to, mask, size as u32),
                    None => fb.store_f32(k.out.dtype, x, to, size as u32),
                }
            }
        });
    }

    /// `(row, query head)` of a pair: the heads of a row's group are neighbours.
    fn row_and_head(&self, fb: &Fb<'_, 'c>, row_begin: Value<'c>, kv_head: Value<'c>, pair: Value<'c>) -> (Value<'c>, Value<'c>) {
        let group = fb.int(self.group);
        (fb.add(row_begin, fb.div(pair, group)), fb.add(fb.mul(kv_head, group), fb.rem(pair, group)))
    }

    /// Vectors that cover `head_dim` columns: first column, lanes, mask of the last one if it is not full.
    fn columns(&self, fb: &Fb<'_, 'c>) -> Vec<(u64, u32, Option<Value<'c>>)> {
        let (head_dim, lanes) = (self.kernel.kv.head_dim, fb.lanes());
        (0..head_dim.div_ceil(lanes))
            .map(|v| {
                let left = head_dim - v * lanes;
                (u64::from(v * lanes), lanes, (left < lanes).then(|| lane_mask(fb, left, lanes)))
            })
            .collect()
    }
}

/// Where the pages of the KV cache are.
struct Pages<'k, 'c> {
    kernel: &'k Attention,
    /// `i32[slots][per_slot]`: numbers of pages.
    tables: Value<'c>,
    per_slot: Value<'c>,
    /// The first page.
    state: Value<'c>,
}

impl<'k, 'c> Pages<'k, 'c> {
    fn new(call: &Call<'_, '_, 'c>, kernel: &'k Attention) -> Self {
        let (per_slot, tables) = (call.u32_field(field::PAGES_PER_SLOT), call.pointer_field(field::PAGE_TABLE));
        Pages { kernel, tables, per_slot, state: call.base(&Place::State(kernel.state_offsets.clone())) }
    }

    /// A head's part of the page that holds a block of keys of a slot.
    fn of(&self, fb: &Fb<'_, 'c>, slot: Value<'c>, block: Value<'c>, kv_head: Value<'c>) -> Value<'c> {
        let page = fb.index(self.tables, fb.add(fb.mul(slot, self.per_slot), block), 4);
        let page = fb.sext(fb.load(Ty::I32, page, 4), Elem::I64);
        let of_page = fb.mul_int(page, self.kernel.page_bytes as i64);
        fb.offset(self.state, fb.add(of_page, fb.mul_int(kv_head, self.kernel.kv.bytes() as i64)))
    }
}

/// Field `i` of an `abi::Tile`.
fn tile_field<'c>(fb: &Fb<'_, 'c>, tile: Value<'c>, i: u64) -> Value<'c> {
    fb.sext(fb.load(Ty::I32, fb.offset_const(tile, i * 4), 4), Elem::I64)
}

/// The first `count` of `lanes` lanes.
fn lane_mask<'c>(fb: &Fb<'_, 'c>, count: u32, lanes: u32) -> Value<'c> {
    fb.int_vec(Elem::I1, &(0..lanes).map(|i| i64::from(i < count)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever size the loop over chunks of a unit meets, there is a function for it, and no other.
    #[test]
    fn sizes_of_chunks() {
        for pairs in [vec![1], vec![4], (1..=5).map(|rows| rows * 8).collect::<Vec<_>>(), (1..=100).collect()] {
            let chunks = |pairs: u32| {
                let number = pairs.div_ceil(MAX_PAIRS);
                (0..number).map(move |chunk| pairs / number + u32::from(chunk < pairs % number))
            };
            assert_eq!(chunk_sizes(&pairs), pairs.iter().flat_map(|pairs| chunks(*pairs)).collect(), "{pairs:?}");
        }
    }
}
