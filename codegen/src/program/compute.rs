//! Arithmetics of a matmul, and what each wants of its operands.

use super::{Coding, DType, Quantise};

/// Arithmetic of a matmul; accumulation is f32, of codes exact within a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// Weights widened to f32, one FMA chain over k per output element.
    F32,
    /// bf16 pairs: one chain of VDPBF16PS over k / 2 per output element.
    Bf16Dot,
    /// bf16 in blocks of 4 k: one chain of BFMMLA over k / 4 per output element.
    Bf16Mmla,
    /// int8 codes of both operands: exact i32 sums over groups of k, scaled and added in f32, one chain over groups per output element. The
    /// left operand is the records of [`Quantise`].
    Int8Dot,
    /// The same values, with matrix instructions: codes in blocks of 8 k of two rows and two columns (SMMLA).
    Int8Mmla,
    /// The same values, of more than a few rows by tiles of 16 rows, 16 columns and 64 k (AMX); panels are those of [`Compute::Int8Dot`].
    Int8Tiles,
    /// The same values of int4 codes by 32, of more than a few rows by tiles of bf16, which hold code times scale of both operands exactly,
    /// and so are sums over a group: no group is scaled. Panels are those of [`Compute::Int8Dot`].
    CodesInBf16Tiles,
    /// bf16 by tiles of 16 rows, 16 columns and 32 k (AMX): one chain over k / 32 per output element, of what TDPBF16PS makes of 32 k.
    /// Panels are those of [`Compute::Bf16Dot`].
    Bf16Tiles,
}

/// What few rows multiply over registers; blocks of rows, too, where [`Compute::tiles`] has nothing else for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FewRows {
    /// f32 with f32, or with a weight that is widened.
    F32,
    /// Pairs of bf16 in one instruction.
    Bf16Dot,
    /// Blocks of 4 k of bf16, of two rows and two columns.
    Bf16Mmla,
    /// bf16 widened, in the order of additions of tiles.
    Bf16Halves,
    /// Four codes in one instruction, or in what stands for it ([`Isa::int8_dot`](crate::isa::Isa::int8_dot)).
    Int8Dot,
    /// Blocks of 8 codes, of two rows and two columns.
    Int8Mmla,
}

/// k of the groups whose values, and sums of products, floats hold exactly (see `quant` of the graph crate).
pub const SHORT_GROUP: u32 = 32;

impl Compute {
    /// All of them.
    pub const ALL: [Compute; 8] = [
        Compute::F32,
        Compute::Bf16Dot,
        Compute::Bf16Mmla,
        Compute::Int8Dot,
        Compute::Int8Mmla,
        Compute::Int8Tiles,
        Compute::CodesInBf16Tiles,
        Compute::Bf16Tiles,
    ];

    /// Name in text forms, symbols and tuning files.
    pub fn name(self) -> &'static str {
        match self {
            Compute::F32 => "f32",
            Compute::Bf16Dot => "bf16_dot",
            Compute::Bf16Mmla => "bf16_mmla",
            Compute::Int8Dot => "int8_dot",
            Compute::Int8Mmla => "int8_mmla",
            Compute::Int8Tiles => "int8_tiles",
            Compute::CodesInBf16Tiles => "codes_in_bf16_tiles",
            Compute::Bf16Tiles => "bf16_tiles",
        }
    }
    /// How few rows go over registers.
    pub fn few_rows(self) -> FewRows {
        match self {
            Compute::F32 => FewRows::F32,
            Compute::Bf16Dot => FewRows::Bf16Dot,
            Compute::Bf16Mmla => FewRows::Bf16Mmla,
            Compute::Bf16Tiles => FewRows::Bf16Halves,
            Compute::Int8Dot | Compute::Int8Tiles | Compute::CodesInBf16Tiles => FewRows::Int8Dot,
            Compute::Int8Mmla => FewRows::Int8Mmla,
        }
    }
    /// What tiles (AMX) hold, which blocks of rows take.
    pub fn tiles(self) -> Option<DType> {
        match self {
            Compute::Bf16Tiles | Compute::CodesInBf16Tiles => Some(DType::Bf16),
            Compute::Int8Tiles => Some(DType::I8),
            Compute::F32 | Compute::Bf16Dot | Compute::Bf16Mmla | Compute::Int8Dot | Compute::Int8Mmla => None,
        }
    }
    /// Do blocks of rows take tiles?
    pub fn by_tiles(self) -> bool {
        self.tiles().is_some()
    }
    /// Are both operands codes, the left one in records?
    pub fn takes_codes(self) -> bool {
        matches!(self.few_rows(), FewRows::Int8Dot | FewRows::Int8Mmla)
    }
    /// Do few rows take integer dots for it?
    pub fn dots_codes(self) -> bool {
        self.few_rows() == FewRows::Int8Dot
    }
    /// Are both operands bf16?
    pub fn takes_bf16(self) -> bool {
        matches!(self.few_rows(), FewRows::Bf16Dot | FewRows::Bf16Mmla | FewRows::Bf16Halves)
    }
    /// Consecutive k of one column that lie together in panels of a weight of type `weight`: pairs of bf16, or blocks of four for matrix
    /// instructions; four bytes of codes, or eight.
    pub fn k_pack(self, weight: DType, coding: Coding) -> u32 {
        let bytes = if self.few_rows() == FewRows::Int8Mmla { 8 } else { 4 };
        match coding {
            Coding::Elements if self.few_rows() == FewRows::Bf16Mmla => 4,
            Coding::Elements if weight == DType::Bf16 => 2,
            Coding::Elements => 1,
            Coding::Int8 { .. } | Coding::Int8Groups { .. } => bytes,
            Coding::Int4 { .. } => 2 * bytes,
        }
    }
    /// Bytes of a record (see [`Quantise`]) for it: tiles want rows that begin with a cache line (they read others at a
    /// quarter of the rate).
    pub fn record(self, group: u32) -> u32 {
        let bytes = Quantise::start_at(group) + DType::F32.size() as u32;
        match self {
            _ if self.by_tiles() => bytes.next_multiple_of(64),
            _ => bytes,
        }
    }
    /// Bytes of a row before the values of its codes, behind all records; `None`: it does not want any.
    pub fn values_at(self, k: u32, group: u32) -> Option<u32> {
        (self == Compute::CodesInBf16Tiles).then(|| k.div_ceil(group) * self.record(group))
    }
    /// Bytes of the records of a row of `k` codes, and of the values.
    pub fn row_bytes(self, k: u32, group: u32) -> u32 {
        let groups = k.div_ceil(group);
        self.values_at(k, group).map_or(groups * self.record(group), |at| at + groups * group * DType::Bf16.size() as u32)
    }
    /// Elements from row to row of records: whole cache lines; for tiles, whose rows are read at once, an odd number of them, so that they
    /// lie in different sets of L1.
    pub fn record_stride(self, k: u32, group: u32) -> u32 {
        let lines = self.row_bytes(k, group).div_ceil(64);
        64 * if self.by_tiles() { lines | 1 } else { lines }
    }
}
