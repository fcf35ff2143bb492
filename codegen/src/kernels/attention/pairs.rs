//! Functions of (row, head) pairs of attention: where it spends its time.
//!
//! In: [`Pairs`] (what queries, cache and scratch look like) and the [`PairWork`] of a function. Out: one function, a unit of compilation
//! of its own ([`Part`]). It works on a thread's scratch and a block of keys and is given the addresses of `maxima`, which holds the
//! kernel's expressions, and `softmax`, so that it depends neither on where operands lie nor on the rows of a tile: all attention of a
//! model shares it, in every bucket.

use super::*;

/// What functions of pairs depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pairs {
    /// Width of a head.
    pub head_dim: u32,
    /// The cache as it is stored.
    pub stored: KvPage,
    /// Does it have scales?
    pub has_scales: bool,
    /// Arithmetic.
    pub compute: Compute,
}

/// One function of pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairFunction {
    /// Queries, cache and scratch.
    pub pairs: Pairs,
    /// What it does.
    pub work: PairWork,
}

/// What a function of pairs does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairWork {
    /// So many pairs and 256 keys.
    Block {
        /// Pairs.
        count: u32,
        /// The block.
        cache: KvPage,
    },
    /// Scores of the block's rows become `exp(score - max)`, times the scales of the values; updates sums.
    Softmax {
        /// Type of the weights.
        factor: DType,
    },
    /// The first keys of a block as f32, see [`KvPage`].
    Widen,
    /// The first keys of a block, and their values, as tiles want them, with zeros to the end of the last step.
    Pack,
    /// A packed block of keys for some pairs, for which tile registers have their shapes.
    Tiles,
}

arguments! {
    /// What functions of a block are given first: the kernel's arguments, for `maxima`, and the addresses of this and of `softmax`.
    pub(super) struct BlockCaller {
        call: [KernelArgs],
        /// Address of `maxima` ([`MaximaArgs`]).
        maxima: PTR,
        /// Address of [`PairWork::Softmax`].
        softmax: PTR,
    }

    /// Own arguments of [`PairWork::Block`].
    pub(super) struct BlockArgs {
        scratch: PTR,
        /// The block.
        keys: PTR,
        /// The block that the thread reads after this one.
        next: PTR,
        /// The block's scales.
        scales: PTR,
        /// Its first key.
        key_begin: I64,
        kv_head: I64,
        /// First pair.
        first: I64,
    }

    /// Own arguments of [`PairWork::Tiles`].
    pub(super) struct TilesArgs {
        scratch: PTR,
        /// The packed block.
        block: PTR,
        /// Its scales.
        scales: PTR,
        /// Its first key.
        key_begin: I64,
        kv_head: I64,
        /// First pair.
        first: I64,
        /// Pairs.
        pairs: I64,
    }

    /// Arguments of `maxima`.
    pub(super) struct MaximaArgs {
        call: [KernelArgs],
        scratch: PTR,
        /// The block's scales.
        scales: PTR,
        /// Its first key.
        key_begin: I64,
        kv_head: I64,
        /// First pair.
        first: I64,
        /// Pairs.
        pairs: I64,
        /// First score.
        begin: I64,
        /// Behind the last one.
        end: I64,
    }

    /// Arguments of [`PairWork::Softmax`].
    pub(super) struct SoftmaxArgs {
        scratch: PTR,
        /// The block's scales.
        scales: PTR,
        /// First pair.
        first: I64,
        /// Pairs.
        pairs: I64,
        /// First score.
        begin: I64,
        /// Behind the last one.
        end: I64,
    }

    /// Arguments of [`PairWork::Widen`] and [`PairWork::Pack`].
    pub(super) struct CopyArgs {
        to: PTR,
        /// Keys of a block, as stored.
        from: PTR,
        /// Keys.
        count: I64,
    }
}

impl<'c> BlockCaller<'c> {
    /// Weights of the scores `begin .. end` of `pairs` pairs.
    pub fn weights(
        &self,
        fb: &Fb<'_, 'c>,
        [scratch, scales, key_begin, kv_head, first]: [Value<'c>; 5],
        pairs: Value<'c>,
        (begin, end): (Value<'c>, Value<'c>),
    ) {
        MaximaArgs { call: self.call, scratch, scales, key_begin, kv_head, first, pairs, begin, end }.call_at(fb, self.maxima);
        SoftmaxArgs { scratch, scales, first, pairs, begin, end }.call_at(fb, self.softmax);
    }
}

impl PairFunction {
    /// What it is called in a kernel: `block4`.
    pub fn name(&self) -> String {
        match self.work {
            PairWork::Block { count, cache } => format!("{}{count}", if cache == self.pairs.stored { "block" } else { "wide" }),
            PairWork::Softmax { factor } => format!("softmax_{factor}"),
            PairWork::Widen => "widen".into(),
            PairWork::Pack => "pack".into(),
            PairWork::Tiles => "tiles".into(),
        }
    }

    pub(in crate::kernels) fn params(&self) -> Vec<Ty> {
        match self.work {
            PairWork::Block { .. } => <(BlockCaller, BlockArgs)>::types(),
            PairWork::Tiles => <(BlockCaller, TilesArgs)>::types(),
            PairWork::Softmax { .. } => SoftmaxArgs::types(),
            PairWork::Widen | PairWork::Pack => CopyArgs::types(),
        }
    }

    /// The function's code.
    pub(in crate::kernels) fn emit<'c>(&self, fb: &Fb<'_, 'c>, args: &[Value<'c>]) {
        let pairs = &self.pairs;
        match self.work {
            PairWork::Block { count, cache } => pairs.block(fb, Arguments::of(args), count, cache),
            PairWork::Tiles => pairs.tiles(fb, Arguments::of(args)),
            PairWork::Softmax { factor } => pairs.softmax(fb, Arguments::of(args), factor),
            PairWork::Widen => pairs.widen(fb, Arguments::of(args)),
            PairWork::Pack => pairs.pack(fb, Arguments::of(args)),
        }
    }
}

impl Pairs {
    /// Those of a kernel.
    pub(super) fn new(kernel: &Attention) -> Pairs {
        Pairs { head_dim: kernel.kv.head_dim, stored: kernel.kv, has_scales: kernel.kv.scales().is_some(), compute: kernel.compute }
    }
    /// What there is about this that the planner must not ask for on this target; `name`: of whom.
    pub(in crate::kernels) fn problems(&self, isa: &Isa, name: &str) -> Vec<String> {
        let Pairs { head_dim, stored: KvPage { dtype, .. }, compute, .. } = *self;
        let dots = isa.bf16_dot && isa.lanes == KEY_GROUP && dtype == DType::Bf16 && head_dim.is_multiple_of(2);
        let by_tiles = isa.bf16_tiles && isa.lanes == KEY_GROUP && dtype == DType::Bf16 && head_dim.is_multiple_of(BF16_TILE_K);
        let has = match compute {
            Compute::F32 => true,
            Compute::Bf16Dot => dots,
            Compute::Bf16Tiles => by_tiles,
            _ => false,
        };
        let mut problems = vec![];
        if !has {
            problems.push(format!("{name}: {compute:?} of a {dtype} cache, {head_dim} columns, on {}", isa.name));
        }
        if head_dim == 0 || !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16 | DType::I8) {
            problems.push(format!("{name}: {head_dim} columns, a {dtype} cache"));
        }
        problems
    }
    /// Places in scratch.
    pub(super) fn at(&self) -> Scratch {
        Scratch::new(self)
    }
    /// Address of what there is of a pair in one of the places of [`Scratch`].
    pub(super) fn of_pair<'c>(&self, fb: &Fb<'_, 'c>, scratch: Value<'c>, place: u64, pair: Value<'c>) -> Value<'c> {
        fb.offset(fb.offset_const(scratch, place), fb.mul_int(pair, self.at().pair_bytes as i64))
    }

    /// [`PairWork::Block`].
    fn block<'c>(&self, fb: &Fb<'_, 'c>, (caller, own): (BlockCaller<'c>, BlockArgs<'c>), pairs: u32, cache: KvPage) {
        let BlockArgs { scratch, keys, next, scales, key_begin, kv_head, first } = own;
        // What was widened is in a cache.
        let next = (pairs <= STREAMED_PAIRS && cache == self.stored).then_some(next);
        let bounds = self.of_pair(fb, scratch, self.at().bounds, first);
        let bound = |pair: u32, i: u64| fb.load(Ty::I64, fb.offset_const(bounds, u64::from(pair) * self.at().pair_bytes + i * 8), 8);
        let lower = (1..pairs).fold(bound(0, 0), |a, pair| fb.min(a, bound(pair, 0)));
        let upper = (1..pairs).fold(bound(0, 1), |a, pair| fb.max(a, bound(pair, 1)));
        let begin = fb.max(fb.sub(lower, key_begin), fb.int(0));
        let end = fb.min(fb.sub(upper, key_begin), fb.int(BLOCK));
        fb.if_(fb.cmp(Cmp::Lt, begin, end), || {
            let chunk = Chunk { pairs, first, scratch, cache, keys, next };
            let columns = self.all_scores(fb, chunk, (begin, end));
            caller.weights(fb, [scratch, scales, key_begin, kv_head, first], fb.int(pairs.into()), columns);
            self.values(fb, chunk, (begin, end));
        });
    }

    /// [`PairWork::Widen`].
    fn widen<'c>(&self, fb: &Fb<'_, 'c>, CopyArgs { to, from, count }: CopyArgs<'c>) {
        let lanes = fb.lanes();
        // Whole groups of keys; V rows between `count` and their end are copied, but never used.
        let groups = fb.lshr(fb.add_int(count, i64::from(KEY_GROUP) - 1), KEY_GROUP.trailing_zeros());
        let elements = fb.mul_int(groups, i64::from(KEY_GROUP * self.head_dim));
        for (from_offset, to_offset) in [(0, 0), (self.stored.v_offset(), widened(self.head_dim).v_offset())] {
            let (from, to) = (fb.offset_const(from, from_offset), fb.offset_const(to, to_offset));
            fb.for_(fb.int(0), elements, lanes.into(), |i| {
                let size = self.stored.dtype.size();
                let x = fb.load_f32(self.stored.dtype, lanes, fb.index(from, i, size), (u64::from(lanes) * size) as u32);
                fb.store(x, fb.index(to, i, 4), lanes * 4);
            });
        }
    }
}
