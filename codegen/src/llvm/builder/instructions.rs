//! Instructions of targets: dots and matrix products of bf16 and of codes, tiles.

use super::{Cmp, Elem, Fb, Ty, Value, mangle, ok};
use crate::isa::{Arch, Int8Dot};
use inkwell::attributes::AttributeLoc;

/// What the weights of an int8 dot are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Bytes as `Isa::code_type` says.
    Bytes,
    /// 0 to 15, one to a byte.
    Nibbles,
}

impl<'c> Fb<'_, 'c> {
    /// bf16 dot: `acc[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1]` per f32 lane, `a` and `b` as words of two bf16 (`<lanes x i32>`), by
    /// the target's instruction (which flushes denormals). Panics where the target has none, see `Isa::bf16_dot`.
    pub fn dot_bf16(&self, acc: Value<'c>, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        let lanes = acc.ty.lanes;
        let name = self.isa().bf16_dot_intrinsic(lanes).expect("no bf16 dot on this target");
        let pairs = Ty::vec(Elem::Bf16, 2 * lanes);
        self.intrinsic(name, acc.ty, &[acc, self.bitcast(a, pairs), self.bitcast(b, pairs)])
    }
    /// int8 dot: `acc[i] + sum of weights[4i + j] * rows[4i + j]` per i32 lane, exact, both as words of four codes. Rows are signed (-127
    /// to 127), weights nibbles (one to a byte) or bytes as `Isa::code_type` says. Panics where the target has no `Isa::int8_dot`.
    pub fn dot_int8(&self, acc: Value<'c>, weights: Value<'c>, rows: Value<'c>, weights_are: Codes) -> Value<'c> {
        let lanes = acc.ty.lanes;
        let codes = |words: Value<'c>| self.bitcast(words, Ty::vec(Elem::I8, 4 * lanes));
        match self.isa().int8_dot(lanes).expect("no int8 dot on this target") {
            Int8Dot::Instruction(name) => match self.isa().arch {
                Arch::X86_64 => self.intrinsic(name, acc.ty, &[acc, weights, rows]),
                Arch::Aarch64 => self.intrinsic(name, acc.ty, &[acc, codes(weights), codes(rows)]),
            },
            Int8Dot::Pairs { bytes, words, sign } => {
                let (weights, rows) = (codes(weights), codes(rows));
                let (unsigned, signed) = match weights_are {
                    Codes::Nibbles => (weights, rows),
                    Codes::Bytes => (self.magnitude(weights), self.with_sign_of(rows, weights, sign)),
                };
                let products = self.intrinsic(bytes, Ty::vec(Elem::I16, 2 * lanes), &[unsigned, signed]);
                self.add_words_by(acc, products, words)
            }
        }
    }
    /// The first of the three instructions ([`Int8Dot::Pairs`]) alone: to sums in words, two for each i32 lane of `weights` (nibbles) and
    /// `rows` (signed bytes), which must not overflow.
    pub fn dot_nibbles(&self, sums: Value<'c>, weights: Value<'c>, rows: Value<'c>) -> Value<'c> {
        let Some(Int8Dot::Pairs { bytes, .. }) = self.isa().int8_dot(weights.ty.lanes) else { unreachable!("dots in pairs") };
        let [weights, rows] = [weights, rows].map(|words| self.bitcast(words, Ty::vec(Elem::I8, 4 * words.ty.lanes)));
        self.add(sums, self.intrinsic(bytes, sums.ty, &[weights, rows]))
    }
    /// The other two: both words of a lane to its sum.
    pub fn add_words(&self, sums: Value<'c>, words: Value<'c>) -> Value<'c> {
        let Some(Int8Dot::Pairs { words: name, .. }) = self.isa().int8_dot(sums.ty.lanes) else { unreachable!("dots in pairs") };
        self.add_words_by(sums, words, name)
    }
    fn add_words_by(&self, sums: Value<'c>, words: Value<'c>, intrinsic: &str) -> Value<'c> {
        let ones = self.splat(self.int_of(Elem::I16, 1), words.ty.lanes);
        self.add(sums, self.intrinsic(intrinsic, sums.ty, &[words, ones]))
    }
    /// `|a|` of signed bytes, as unsigned ones.
    fn magnitude(&self, a: Value<'c>) -> Value<'c> {
        let minimum_is_poison = self.value(self.mb.context.bool_type().const_zero().into(), Ty::I1);
        self.intrinsic(&format!("llvm.abs.{}", mangle(a.ty)), a.ty, &[a, minimum_is_poison])
    }
    /// Signed bytes `a`, negated where `b` is negative (and anything where it is zero).
    fn with_sign_of(&self, a: Value<'c>, b: Value<'c>, intrinsic: Option<&str>) -> Value<'c> {
        match intrinsic {
            Some(name) => self.intrinsic(name, a.ty, &[a, b]),
            None => {
                let zero = self.zero(a.ty);
                self.select(self.cmp(Cmp::Lt, b, zero), self.sub(zero, a), a)
            }
        }
    }
    /// `table[index % 32]` of i32 indices. Panics where the target has no such instruction, see `Isa::looks_up_in_registers`.
    pub fn look_up(&self, table: &[f32; 32], index: Value<'c>) -> Value<'c> {
        assert!(self.isa().looks_up_in_registers(), "no look-up on this target");
        let (lanes, all) = (index.ty.lanes, 16);
        if lanes < all {
            let wide =
                if lanes == 1 { self.splat(index, all) } else { self.shuffle(index, index, &Vec::from_iter((0..all).map(|l| l % lanes))) };
            let found = self.look_up(table, wide);
            return if lanes == 1 { self.extract(found, 0) } else { self.shuffle(found, found, &Vec::from_iter(0..lanes)) };
        }
        let half = |part: &[f32]| {
            let bits = self.int_vec(Elem::I32, &Vec::from_iter(part.iter().map(|x| i64::from(x.to_bits()))));
            self.bitcast(bits, bits.ty.with(Elem::F32))
        };
        let (low, high) = table.split_at(16);
        self.intrinsic("llvm.x86.avx512.vpermi2var.ps.512", index.ty.with(Elem::F32), &[half(low), index, half(high)])
    }
    /// int8 matrix product of signed codes: `acc: i32[2 rows][2 columns]` plus `a: [2 rows][8 k]` times `b: [2 columns][8 k]` (Arm only).
    pub fn smmla(&self, acc: Value<'c>, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.intrinsic("llvm.aarch64.neon.smmla.v4i32.v16i8", acc.ty, &[acc, a, b])
    }
    /// bf16 matrix product: `acc: [2 rows][2 columns]` plus `a: [2 rows][4 k]` times `b: [2 columns][4 k]` (Arm only).
    pub fn bfmmla(&self, acc: Value<'c>, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        self.intrinsic("llvm.aarch64.neon.bfmmla", acc.ty, &[acc, a, b])
    }
    /// Gives the tile registers the shapes of the 64 bytes at `config`, and zeros (AMX only, like all `tile_` functions; registers are
    /// numbers up to 7).
    pub fn tile_config(&self, config: Value<'c>) {
        self.intrinsic_void("llvm.x86.ldtilecfg", &[config]);
    }
    /// Gives them up, so that the system need not save them.
    pub fn tile_release(&self) {
        self.intrinsic_void("llvm.x86.tilerelease", &[]);
    }
    /// Zeros.
    pub fn tile_zero(&self, tile: u32) {
        self.intrinsic_void("llvm.x86.tilezero", &[self.tile(tile)]);
    }
    /// Loads a tile, a row each `stride` bytes.
    pub fn tile_load(&self, tile: u32, at: Value<'c>, stride: u32) {
        self.intrinsic_void("llvm.x86.tileloadd64", &[self.tile(tile), at, self.int(stride.into())]);
    }
    /// The same of lines that are not used again soon.
    pub fn tile_load_once(&self, tile: u32, at: Value<'c>, stride: u32) {
        self.intrinsic_void("llvm.x86.tileloaddt164", &[self.tile(tile), at, self.int(stride.into())]);
    }
    /// Stores one.
    pub fn tile_store(&self, tile: u32, at: Value<'c>, stride: u32) {
        self.intrinsic_void("llvm.x86.tilestored64", &[self.tile(tile), at, self.int(stride.into())]);
    }
    /// `sums[row][column] += sum of rows[row][k] * weights[k / 4][column][k % 4]`: exact sums of products of signed and unsigned bytes.
    pub fn tile_dot_int8(&self, sums: u32, rows: u32, weights: u32) {
        self.intrinsic_void("llvm.x86.tdpbsud", &[self.tile(sums), self.tile(rows), self.tile(weights)]);
    }
    /// `sums[row][column] += ` products of bf16 `rows[row][k]` and `weights[k / 2][column][k % 2]`: those of even k and of odd ones, each a
    /// chain of FMA from zero, together.
    pub fn tile_dot_bf16(&self, sums: u32, rows: u32, weights: u32) {
        self.intrinsic_void("llvm.x86.tdpbf16ps", &[self.tile(sums), self.tile(rows), self.tile(weights)]);
    }
    /// `count` instructions that do nothing, here.
    pub fn nops(&self, count: u32) {
        let ty = self.mb.function_type(&[], None);
        let code = vec!["nop"; count as usize].join("; ");
        let nops = self.mb.context.create_inline_asm(ty, code, String::new(), true, false, None, false);
        let site = ok(self.builder.build_indirect_call(ty, nops, &[], ""));
        site.add_attribute(AttributeLoc::Function, self.mb.enum_attribute("nounwind"));
    }
    fn tile(&self, number: u32) -> Value<'c> {
        assert!(number < 8, "tile register {number}");
        self.int_of(Elem::I8, number.into())
    }
}
