//! Nibbles by 32 become bf16: what tiles (AMX) multiply where `code * scale` is exact in it ([`Compute::CodesInBf16Tiles`]).
//!
//! In: a group of a panel of nibbles with its scales, as [`super::int_dot`] has them. Out: pairs of bf16, `[k / 2][nr][2]`, as
//! [`super::tiles`] wants columns. A group is made in pieces, which those who multiply at the same time put between their products.
//!
//! A nibble whose bits are taken for the last but `at` of 2^23's is `2^23 + nibble * 2^at`, which an FMA makes `(nibble - 8) * scale`:
//! exactly, and the lower half of that f32 is zero.
//!
//! [`Compute::CodesInBf16Tiles`]: crate::program::Compute::CodesInBf16Tiles

use super::microkernel::Microkernel;
use crate::isa::BF16_TILE_K;
use crate::llvm::builder::{Elem, Fb, Ty, Value};

/// Bits below a nibble where it is taken: not 0, where 2^23 + 8 times a scale of five bits is no f32.
const AT: [u32; 4] = [4, 8, 12, 16];
const TWO_23: f32 = 8_388_608.0;

/// A group of nibbles that becomes bf16.
pub(super) struct Widening<'c> {
    /// Its codes.
    w: Value<'c>,
    /// Where the pairs go.
    to: Value<'c>,
    /// Columns of the panel.
    nr: u64,
    /// Words of four bytes, eight nibbles, of a column.
    packs: u32,
    /// For each vector of columns: what makes a nibble at each of [`AT`] a value, as factor and summand of an FMA.
    factors: Vec<[(Value<'c>, Value<'c>); AT.len()]>,
}

impl<'c> Widening<'c> {
    /// The group at `w` of a panel of `nibbles`, into `to`.
    pub fn new(fb: &Fb<'_, 'c>, nibbles: &Microkernel, w: Value<'c>, to: Value<'c>) -> Self {
        let lanes = fb.lanes();
        let factors_of = |scale: Value<'c>| {
            AT.map(|at| {
                let unit = (1u32 << at) as f32;
                (fb.mul(scale, fb.f32s(1.0 / unit, lanes)), fb.mul(scale, fb.f32s(-(TWO_23 + 8.0 * unit) / unit, lanes)))
            })
        };
        let scales = nibbles.scales(fb, nibbles.all_columns(lanes), fb.offset_const(w, nibbles.codes_bytes()));
        let (nr, packs) = (nibbles.product.panels.nr.into(), BF16_TILE_K / nibbles.k_pack);
        Widening { w, to, nr, packs, factors: scales.into_iter().map(factors_of).collect() }
    }

    /// Pieces that it is made in.
    pub fn pieces(&self) -> u32 {
        self.factors.len() as u32 * self.packs
    }

    /// Makes piece `number` of them.
    pub fn piece(&self, fb: &Fb<'_, 'c>, number: u32) {
        self.pack(fb, (number / self.packs) as usize, fb.int((number % self.packs).into()));
    }

    /// Makes all of them.
    pub fn all(&self, fb: &Fb<'_, 'c>) {
        (0..self.factors.len()).for_each(|vector| fb.for_(fb.int(0), fb.int(self.packs.into()), 1, |pack| self.pack(fb, vector, pack)));
    }

    /// Word `pack` of each column of a vector: four vectors of pairs.
    fn pack(&self, fb: &Fb<'_, 'c>, vector: usize, pack: Value<'c>) {
        let (nr, lanes) = (self.nr, fb.lanes());
        let (factors, offset) = (&self.factors[vector], vector as u64 * u64::from(lanes) * 4);
        let all = |bits: u32| fb.splat(fb.int_of(Elem::I32, bits.into()), lanes);
        let words = Ty::vec(Elem::I32, lanes);
        let [w, to] = [(self.w, nr * 4), (self.to, nr * 16)].map(|(at, bytes)| fb.offset_const(fb.index(at, pack, bytes), offset));
        let word = fb.load(words, w, lanes * 4);
        let turned = fb.or(fb.shl(word, 16), fb.lshr(word, 16));
        // Nibbles 1 to 4 of the word, and 5, 6, 7 and 0 of the turned one, are where they are taken.
        let value = |nibble: usize| {
            let place = (nibble + 7) % 8;
            let (word, n) = (if place < 4 { word } else { turned }, place % 4);
            let bits = fb.or(fb.and(word, all(0xf << AT[n])), all(TWO_23.to_bits()));
            fb.bitcast(fb.fma(fb.bitcast(bits, words.with(Elem::F32)), factors[n].0, factors[n].1), words)
        };
        // Nibbles 0 to 7 are k 0, 4, 1, 5, 2, 6, 3 and 7: pairs of k 0 and 1, 2 and 3, 4 and 5, 6 and 7.
        for (row, (even, odd)) in [(0, 2), (4, 6), (1, 3), (5, 7)].into_iter().enumerate() {
            // (A shuffle of halves takes three instructions.)
            let both = fb.or(value(odd), fb.lshr(value(even), 16));
            fb.store(both, fb.offset_const(to, row as u64 * nr * 4), lanes * 4);
        }
    }
}
