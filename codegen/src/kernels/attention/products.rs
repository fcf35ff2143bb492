//! The two products of few (row, head) pairs of attention: scores `q K^T` and values `p V`, in register tiles of pairs x keys and of pairs
//! x columns, by FMA, dots of bf16, or FMA in the order of tiles.
//!
//! In: as [`super`], queries and weights in scratch, a block of keys of the cache (or widened). Out: loops in the `block` functions.

use super::*;

/// Some pairs and a block of keys, which both products are of.
#[derive(Clone, Copy)]
pub(super) struct Chunk<'c> {
    /// Pairs.
    pub pairs: u32,
    /// First of them.
    pub first: Value<'c>,
    /// The thread's scratch.
    pub scratch: Value<'c>,
    /// What the block looks like.
    pub cache: KvPage,
    /// The block.
    pub keys: Value<'c>,
    /// The one that the thread reads next, where it is asked for meanwhile.
    pub next: Option<Value<'c>>,
}

/// Some columns of the values.
struct Columns<'c> {
    /// First one.
    begin: Value<'c>,
    /// Vectors of them.
    vectors: u32,
    /// Mask of the last vector, where it is not full.
    tail: Option<Value<'c>>,
}

impl Pairs {
    /// Type of what the products of few pairs take: queries and weights in scratch. Few pairs in the order of tiles take rounded ones as
    /// f32.
    pub(super) fn factor(&self) -> DType {
        match self.compute {
            Compute::Bf16Dot => DType::Bf16,
            _ => DType::F32,
        }
    }

    /// Stores factors as type `factor`.
    pub(super) fn store_factors<'c>(&self, fb: &Fb<'_, 'c>, factor: DType, x: Value<'c>, at: Value<'c>) {
        let x = match (self.compute, factor) {
            (Compute::Bf16Tiles, DType::F32) => fb.widen(DType::Bf16, fb.narrow(DType::Bf16, x)),
            _ => x,
        };
        fb.store_f32(factor, x, at, factor.size() as u32 * x.lanes());
    }

    /// Elements of a chain that a step takes.
    fn step(&self) -> i64 {
        i64::from(self.compute == Compute::Bf16Dot) + 1
    }

    /// What a step takes of a query or of weights, in all lanes.
    fn factors<'c>(&self, fb: &Fb<'_, 'c>, at: Value<'c>) -> Value<'c> {
        match self.compute {
            Compute::Bf16Dot => fb.splat(fb.load(Ty::I32, at, 4), fb.lanes()),
            _ => fb.load_broadcast(DType::F32, fb.lanes(), at),
        }
    }

    /// `acc + x y`: of factors and of vectors of the cache.
    fn product<'c>(&self, fb: &Fb<'_, 'c>, x: Value<'c>, y: Value<'c>, acc: Value<'c>) -> Value<'c> {
        match self.compute {
            Compute::Bf16Dot => fb.dot_bf16(acc, x, y),
            _ => fb.fma(x, y, acc),
        }
    }

    /// The chains of elements `begin .. end` on `before`, by `step(i, sums)`.
    fn chains<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        (begin, end): (Value<'c>, Value<'c>),
        before: &[Value<'c>],
        step: impl Fn(Value<'c>, &[Value<'c>]) -> Vec<Value<'c>>,
    ) -> Vec<Value<'c>> {
        match self.compute {
            Compute::Bf16Tiles => self.in_order_of_tiles(fb, (begin, end), before, step),
            _ => fb.loop_unrolled(begin, end, self.step(), STEPS, before, step),
        }
    }

    /// Vectors of a group of keys: tiles of scores begin and end at groups.
    pub(super) fn vectors_of_group(&self, lanes: u32) -> i64 {
        KEY_GROUP.div_ceil(lanes).into()
    }

    /// Vectors side by side with `pairs` pairs in a register tile.
    fn vectors(&self, isa: &Isa, pairs: u32, most: u32) -> u32 {
        let mut vectors = most;
        while vectors > 1 && !tile_fits(isa, pairs, vectors, vectors.min(pairs)) {
            vectors /= 2;
        }
        vectors
    }

    /// Scores of the keys `seen.0 .. seen.1`, and of what their tiles hold beside them: returns which in all. Causal rows see to the middle
    /// of a tile: there half a tile is enough, if it is no less than a group of keys.
    pub(super) fn all_scores<'c>(&self, fb: &Fb<'_, 'c>, chunk: Chunk<'c>, seen: (Value<'c>, Value<'c>)) -> (Value<'c>, Value<'c>) {
        let vectors = self.vectors(fb.isa(), chunk.pairs, 4);
        let tile_keys = i64::from(vectors * fb.lanes());
        let half = (tile_keys / 2 >= KEY_GROUP.into()).then_some(tile_keys / 2);
        let smallest = half.unwrap_or(tile_keys);
        let begin = fb.div(seen.0, fb.int(tile_keys));
        let end = fb.mul_int(fb.div(fb.add_int(seen.1, smallest - 1), fb.int(smallest)), smallest);
        let whole = fb.div(end, fb.int(tile_keys));
        self.scores(fb, chunk, vectors, (begin, whole));
        if let Some(half) = half {
            let halves = fb.div(end, fb.int(half));
            self.scores(fb, chunk, vectors / 2, (fb.mul_int(whole, 2), halves));
        }
        (fb.mul_int(begin, tile_keys), end)
    }

    /// `scores[pair][key] = q[pair] . k[key]` for tiles `tiles.0 .. tiles.1` of so many vectors of keys; asks for the same tiles of the
    /// next block.
    fn scores<'c>(&self, fb: &Fb<'_, 'c>, chunk: Chunk<'c>, vectors: u32, tiles: (Value<'c>, Value<'c>)) {
        let Chunk { pairs, first, scratch, cache, keys, next } = chunk;
        let size = cache.dtype.size();
        let group_bytes = u64::from(self.head_dim) * u64::from(KEY_GROUP) * size;
        let tile_keys = u64::from(vectors * fb.lanes());
        let q = self.of_pair(fb, scratch, self.at().q, first);
        fb.for_(tiles.0, tiles.1, 1, |tile| {
            let begin = fb.mul_int(tile, tile_keys as i64);
            let offset = match tile_keys.is_multiple_of(u64::from(KEY_GROUP)) {
                true => fb.mul_int(tile, (tile_keys / u64::from(KEY_GROUP) * group_bytes) as i64),
                false => {
                    let group = fb.lshr(begin, KEY_GROUP.trailing_zeros());
                    let inside = fb.and(begin, fb.int(i64::from(KEY_GROUP) - 1));
                    fb.add(fb.mul_int(group, group_bytes as i64), fb.mul_int(inside, size as i64))
                }
            };
            let k_tile = fb.offset(keys, offset);
            // Groups of keys lie behind each other: lines in their order, so many for each d.
            let next_tile = next.map(|next| fb.offset(next, offset));
            let step_bytes = tile_keys.max(u64::from(KEY_GROUP)) * size * self.step() as u64;
            let zeros = vec![fb.zero(Ty::vec(Elem::F32, fb.lanes())); (pairs * vectors) as usize];
            let scores = self.chains(fb, (fb.int(0), fb.int(self.head_dim.into())), &zeros, |d, acc| {
                if let Some(next_tile) = next_tile {
                    let at = fb.offset(next_tile, fb.mul_int(d, step_bytes as i64 / self.step()));
                    (0..step_bytes).step_by(LINE as usize).for_each(|line| fb.prefetch(fb.offset_const(at, line), L2));
                }
                let q = fb.index(q, d, self.factor().size());
                let k_row = fb.offset(k_tile, fb.mul_int(d, (u64::from(KEY_GROUP) * size) as i64));
                let k_vectors: Vec<_> = (0..vectors)
                    .map(|v| {
                        let key = v * fb.lanes();
                        let at = fb.offset_const(k_row, u64::from(key / KEY_GROUP) * group_bytes + u64::from(key % KEY_GROUP) * size);
                        let align = (u64::from(fb.lanes()) * size) as u32;
                        match self.compute {
                            Compute::Bf16Dot => pairs_of_halves(fb, fb.load(Ty::vec(Elem::Bf16, 2 * fb.lanes()), at, align)),
                            _ => fb.load_f32(cache.dtype, fb.lanes(), at, align),
                        }
                    })
                    .collect();
                let mut next = vec![];
                for pair in 0..pairs {
                    let x = self.factors(fb, fb.offset_const(q, u64::from(pair) * self.at().pair_bytes));
                    next.extend(
                        k_vectors.iter().enumerate().map(|(v, &y)| self.product(fb, x, y, acc[pair as usize * vectors as usize + v])),
                    );
                }
                next
            });
            let target = fb.index(fb.offset_const(scratch, self.at().scores), begin, 4);
            for (i, &s) in scores.iter().enumerate() {
                let (pair, v) = (i as u64 / u64::from(vectors), i as u64 % u64::from(vectors));
                fb.store(s, fb.offset_const(target, pair * BLOCK as u64 * 4 + v * u64::from(fb.lanes()) * 4), fb.lanes() * 4);
            }
        });
    }

    /// `acc[pair] = acc[pair] * alpha[pair] + sum_key p[pair][key] v[key]` over keys `seen.0 .. seen.1` of the block; asks for the same
    /// ones of the next.
    pub(super) fn values<'c>(&self, fb: &Fb<'_, 'c>, chunk: Chunk<'c>, seen: (Value<'c>, Value<'c>)) {
        let head_dim = self.head_dim;
        let all = head_dim.div_ceil(fb.lanes());
        let mut most = 1;
        // Dots: a row that waits to be paired, and in which order.
        let waits = if self.compute == Compute::Bf16Dot { 2 } else { 0 };
        while most < all && tile_fits(fb.isa(), chunk.pairs, most + 1, most + 1 + waits) {
            most += 1;
        }
        // Equal pieces in a loop; one that is smaller, or ends inside a vector, after it.
        let each = all.div_ceil(all.div_ceil(most));
        let equal = head_dim / (each * fb.lanes());
        fb.for_(fb.int(0), fb.int(equal.into()), 1, |piece| {
            let begin = fb.mul_int(piece, (each * fb.lanes()).into());
            self.values_of_columns(fb, chunk, seen, Columns { begin, vectors: each, tail: None });
        });
        if equal * each < all {
            let tail = (!head_dim.is_multiple_of(fb.lanes())).then(|| lane_mask(fb, head_dim % fb.lanes(), fb.lanes()));
            let begin = fb.int((equal * each * fb.lanes()).into());
            self.values_of_columns(fb, chunk, seen, Columns { begin, vectors: all - equal * each, tail });
        }
    }

    /// [`Pairs::values`] of some columns.
    fn values_of_columns<'c>(&self, fb: &Fb<'_, 'c>, chunk: Chunk<'c>, seen: (Value<'c>, Value<'c>), columns: Columns<'c>) {
        let Chunk { pairs, first, scratch, cache, keys, next } = chunk;
        let Columns { begin, vectors, tail } = columns;
        let size = cache.dtype.size();
        let vector = Ty::vec(Elem::F32, fb.lanes());
        let acc_at = fb.index(self.of_pair(fb, scratch, self.at().acc, first), begin, 4);
        let acc_at = |i: u32| {
            let (pair, v) = (u64::from(i / vectors), u64::from(i % vectors));
            fb.offset_const(acc_at, pair * self.at().pair_bytes + v * u64::from(fb.lanes()) * 4)
        };
        let alpha = |pair: u32| fb.load_broadcast(DType::F32, fb.lanes(), fb.offset_const(scratch, self.at().alpha + u64::from(pair) * 4));
        let before: Vec<_> = (0..pairs * vectors).map(|i| fb.mul(fb.load(vector, acc_at(i), fb.lanes() * 4), alpha(i / vectors))).collect();
        let values_of = |block: Value<'c>| fb.index(fb.offset_const(block, cache.v_offset()), begin, size);
        let (values, next) = (values_of(keys), next.map(values_of));
        let row_bytes = u64::from(self.head_dim) * size;
        let p = fb.offset_const(scratch, self.at().scores);
        // `last`: the key after it is not there.
        let step = |key: Value<'c>, acc: &[Value<'c>], last: bool| {
            let p = fb.index(p, key, self.factor().size());
            let offset = fb.mul_int(key, row_bytes as i64);
            let row = fb.offset(values, offset);
            if let Some(next) = next {
                let next = fb.offset(next, offset);
                for row in 0..self.step() as u64 {
                    let lines = (0..u64::from(vectors * fb.lanes()) * size).step_by(LINE as usize);
                    lines.for_each(|line| fb.prefetch(fb.offset_const(next, row * row_bytes + line), L2));
                }
            }
            let columns = match self.compute {
                Compute::Bf16Dot => {
                    let next = (!last).then(|| fb.offset_const(row, row_bytes));
                    self.pairs_of_rows(fb, row, next, vectors, tail)
                }
                _ => (0..vectors)
                    .map(|v| {
                        let at = fb.offset_const(row, u64::from(v * fb.lanes()) * size);
                        match tail {
                            Some(mask) if v + 1 == vectors => fb.load_f32_masked(cache.dtype, at, mask, size as u32),
                            _ => fb.load_f32(cache.dtype, fb.lanes(), at, size as u32),
                        }
                    })
                    .collect(),
            };
            let mut next = vec![];
            for pair in 0..pairs {
                let x = self.factors(fb, fb.offset_const(p, u64::from(pair) * BLOCK as u64 * 4));
                next.extend(columns.iter().enumerate().map(|(v, &y)| self.product(fb, x, y, acc[pair as usize * vectors as usize + v])));
            }
            next
        };
        let after = match self.compute {
            Compute::Bf16Dot => {
                // A key that begins or ends inside a pair has a neighbour of weight zero, as masks make it.
                let even = |key: Value<'c>| fb.and(key, fb.int(!1));
                let whole = even(seen.1);
                let after = fb.loop_unrolled(even(seen.0), whole, 2, STEPS, &before, |key, acc| step(key, acc, false));
                fb.if_else(fb.cmp(Cmp::Lt, whole, seen.1), || step(whole, &after, true), || after.clone())
            }
            _ => self.chains(fb, seen, &before, |key, acc| step(key, acc, false)),
        };
        for (i, &value) in after.iter().enumerate() {
            fb.store(value, acc_at(i as u32), fb.lanes() * 4);
        }
    }

    /// bf16 columns of two rows, or of one and zeros, as vectors of pairs; `tail` masks the last one.
    fn pairs_of_rows<'c>(
        &self,
        fb: &Fb<'_, 'c>,
        row: Value<'c>,
        next: Option<Value<'c>>,
        vectors: u32,
        tail: Option<Value<'c>>,
    ) -> Vec<Value<'c>> {
        let lanes = fb.lanes();
        let whole = vectors - u32::from(tail.is_some());
        let row_of = |row: Option<Value<'c>>, v: u32, lanes: u32| match row {
            Some(row) => fb.load(Ty::vec(Elem::Bf16, lanes), fb.offset_const(row, u64::from(v * fb.lanes()) * 2), 2),
            None => fb.zero(Ty::vec(Elem::Bf16, lanes)),
        };
        let pairs = |a: Value<'c>, b: Value<'c>, first: u32| {
            let order: Vec<u32> = (first..first + lanes).flat_map(|i| [i, a.lanes() + i]).collect();
            fb.bitcast(fb.shuffle(a, b, &order), Ty::vec(Elem::I32, lanes))
        };
        let mut columns = vec![];
        // Registers full of columns where there are two vectors of them.
        for v in (0..whole).step_by(2) {
            let count = (whole - v).min(2);
            let (a, b) = (row_of(Some(row), v, count * lanes), row_of(next, v, count * lanes));
            columns.extend((0..count).map(|i| pairs(a, b, i * lanes)));
        }
        if let Some(mask) = tail {
            let ty = Ty::vec(Elem::Bf16, lanes);
            let at = |row| fb.load_masked(ty, fb.offset_const(row, u64::from(whole * lanes) * 2), mask, 2);
            columns.push(pairs(at(row), next.map_or(fb.zero(ty), at), 0));
        }
        columns
    }
}

/// `[2][n]` bf16 as `[n][2]`: words of two.
pub(super) fn pairs_of_halves<'c>(fb: &Fb<'_, 'c>, halves: Value<'c>) -> Value<'c> {
    let n = halves.lanes() / 2;
    let order: Vec<u32> = (0..n).flat_map(|i| [i, n + i]).collect();
    fb.bitcast(fb.shuffle(halves, halves, &order), Ty::vec(Elem::I32, n))
}
