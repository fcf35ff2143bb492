//! How packed tensors lie in the weights area: plain, or in panels of elements or of codes.
//!
//! Written by `compiler/src/pack`, read by the generators of [`Matmul`](super::Matmul).

use super::DType;

/// Bytes between panels that would begin whole pages apart. A few rows walk several panels side by side, which would all use the same set
/// of the first cache. (docs/machines/zen3.md, docs/machines/sapphire-rapids.md) Panels of nibbles have none: a row that walks one stream of
/// them is interrupted by gaps (Zen 5: decode 4 to 5 % slower; docs/machines/zen5.md).
const GAP: u64 = 512;
/// Shorter panels have none: it would be more than 3 % of the file.
const GAP_FROM: u64 = 16 << 10;
/// Narrower panels, those of Arm, have none: whether it gains there was not measured, and addresses of whole pages take fewer instructions
/// (neoverse-v1, one row: 2.9 % more with gaps).
const GAP_COLUMNS: u32 = 16;
const PAGE: u64 = 4096;

/// How a tensor lies in the weights area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Row-major, no padding.
    Plain,
    /// Blocked for matmul, see [`Panels`].
    Panels(Panels),
}

/// How the elements of panels are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Coding {
    /// In the weight's type.
    Elements,
    /// `P[panel]{ [k / k_pack][nr][k_pack] codes, [nr] f32 scales }`, K padded to whole groups. The weight's type is `i8` (the codes
    /// themselves) or `u8` (codes + 128), as the CPU's dot product wants them.
    Int8 {
        /// k per scale of the quantised left operand: 32, 64, 128 or 256.
        group: u32,
    },
    /// `P[panel][k / group]{ [group / 4][nr][4] codes, [nr] f16 scales, zeros }`, codes in the types of `Int8`. Zeros, where there are any,
    /// are `[nr]` f16 zero points (as the codes are stored): an element is `(code - zero) * scale`. Not for matrix instructions, see
    /// [`Coding::fits_mmla`].
    Int8Groups {
        /// k per scale, of weights and of the quantised left operand: 32, 64 or 128.
        group: u32,
        /// Are there zero points?
        zeros: bool,
    },
    /// `P[panel][k / group]{ [group / k_pack][nr][k_pack / 2 bytes] codes, [nr] f16 scales, zeros }`: byte i of a column holds k = i in its
    /// low and k = k_pack / 2 + i in its high half. Codes + 8, or codes 0 to 15 with zero points as above. The weight's type is `u8`.
    /// Scales by 32 without zero points have five significant bits (see `quant` of the graph crate).
    Int4 {
        /// k per scale, of weights and of the quantised left operand: 32, 64 or 128.
        group: u32,
        /// Are there zero points?
        zeros: bool,
    },
}

impl Coding {
    /// What weights of this coding are called in reports and files: the elements' type, else bits and group, `z` for zero points. One scale
    /// per column has no group (that of the left operand follows from K).
    pub fn name(self, dtype: DType) -> String {
        let zeros = if self.has_zeros() { "z" } else { "" };
        match self {
            Coding::Elements => dtype.name().into(),
            Coding::Int8 { .. } => "int8".into(),
            Coding::Int8Groups { group, .. } => format!("int8g{group}{zeros}"),
            Coding::Int4 { group, .. } => format!("int4g{group}{zeros}"),
        }
    }
    /// k per group, if coded.
    pub fn group(self) -> Option<u32> {
        match self {
            Coding::Elements => None,
            Coding::Int8 { group } | Coding::Int8Groups { group, .. } | Coding::Int4 { group, .. } => Some(group),
        }
    }
    /// Do scales lie behind the codes of each group (else behind those of a panel)?
    pub fn has_group_scales(self) -> bool {
        matches!(self, Coding::Int8Groups { .. } | Coding::Int4 { .. })
    }
    /// Do zero points lie behind the scales?
    pub fn has_zeros(self) -> bool {
        matches!(self, Coding::Int8Groups { zeros: true, .. } | Coding::Int4 { zeros: true, .. })
    }
    /// What is added to a code before it is stored in a weight of type `dtype`.
    pub fn offset(self, dtype: DType) -> i32 {
        match self {
            Coding::Elements => 0,
            Coding::Int8 { .. } | Coding::Int8Groups { .. } if dtype == DType::I8 => 0,
            Coding::Int8 { .. } | Coding::Int8Groups { .. } => 128,
            Coding::Int4 { zeros: true, .. } => 0,
            Coding::Int4 { .. } => 8,
        }
    }
    /// Factor of the sum of a record's codes that its start word subtracts: the offset of every stored code, or 1 where columns have zero
    /// points of their own, by which the kernel multiplies that sum.
    pub fn bias_factor(self, dtype: DType) -> i32 {
        if self.has_zeros() { 1 } else { self.offset(dtype) }
    }
    /// Type of a column's scales and zero points.
    pub fn scale_type(self) -> DType {
        if self.has_group_scales() { DType::F16 } else { DType::F32 }
    }
    /// Is a code a byte?
    pub fn has_bytes(self) -> bool {
        matches!(self, Coding::Int8 { .. } | Coding::Int8Groups { .. })
    }
    /// Is it half of one?
    pub fn has_nibbles(self) -> bool {
        matches!(self, Coding::Int4 { .. })
    }
    /// Are there kernels with matrix instructions ([`Compute::Int8Mmla`](super::Compute::Int8Mmla))?
    pub fn fits_mmla(self) -> bool {
        matches!(self, Coding::Int8 { .. } | Coding::Int4 { zeros: false, .. })
    }
}

/// Panels of `nr` output columns: `P[panel][k / k_pack][nr][k_pack]`, K padded with zeros to a multiple of `k_pack`; or codes and scales,
/// see [`Coding`]. One begins [`Panels::panel_bytes`] behind the other, which may leave a gap.
///
/// Columns come in `groups` of `group_cols`; each group is padded with zero columns to a multiple of `nr`, so that a head
/// never straddles panels (ungrouped: one group of all columns). With `ways == 2` two matrices of the same shape alternate panel
/// by panel (gate panel, up panel, ...).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Panels {
    /// Columns per panel.
    pub nr: u32,
    /// Consecutive k of one column that lie together, see [`Compute::k_pack`](super::Compute::k_pack).
    pub k_pack: u32,
    /// Inner dimension.
    pub k: u32,
    /// Number of groups.
    pub groups: u32,
    /// Real columns per group.
    pub group_cols: u32,
    /// 1 or 2 interleaved matrices.
    pub ways: u32,
    /// Elements, or codes and scales.
    pub coding: Coding,
}

impl Panels {
    /// Columns of a group with padding.
    pub fn padded_group(&self) -> u32 {
        self.group_cols.div_ceil(self.nr) * self.nr
    }
    /// Panels of one group and one way.
    pub fn panels_per_group(&self) -> u32 {
        self.group_cols.div_ceil(self.nr)
    }
    /// Panels of one way.
    pub fn panels(&self) -> u32 {
        self.groups * self.panels_per_group()
    }
    /// Columns with padding of one way: width of the output.
    pub fn padded_cols(&self) -> u32 {
        self.groups * self.padded_group()
    }
    /// K with padding.
    pub fn padded_k(&self) -> u32 {
        self.k.next_multiple_of(self.coding.group().unwrap_or(self.k_pack))
    }
    /// Bytes of a panel before `k`, which is a multiple of the group (of `k_pack` for elements); `dtype` is the weight's.
    pub fn bytes_before(&self, k: u32, dtype: DType) -> u64 {
        match self.coding {
            Coding::Elements => u64::from(k) * u64::from(self.nr) * dtype.size(),
            Coding::Int8 { .. } => u64::from(k) * u64::from(self.nr),
            Coding::Int8Groups { group, .. } | Coding::Int4 { group, .. } => u64::from(k / group) * self.group_bytes(),
        }
    }
    /// Bytes of a column's codes that lie together: a byte each, or half of one.
    pub fn column_code_bytes(&self) -> u32 {
        if self.coding.has_nibbles() { self.k_pack / 2 } else { self.k_pack }
    }
    /// Byte where the scales of all columns begin, behind their codes: of a group, or, with one scale for all k, of a panel. (Elements
    /// have none.)
    pub fn scales_at(&self) -> u64 {
        let k = match self.coding {
            Coding::Int8Groups { group, .. } | Coding::Int4 { group, .. } => group,
            Coding::Int8 { .. } | Coding::Elements => self.padded_k(),
        };
        let codes = u64::from(k) * u64::from(self.nr);
        if self.coding.has_nibbles() { codes / 2 } else { codes }
    }
    /// Where the zero points are, behind the scales, one of each column, of [`Coding::scale_type`] like them.
    pub fn zeros_at(&self) -> u64 {
        self.scales_at() + u64::from(self.nr) * self.coding.scale_type().size()
    }
    /// Bytes of a group with its scales and zero points, where each has them.
    pub fn group_bytes(&self) -> u64 {
        let factors = if self.coding.has_zeros() { 2 } else { 1 };
        self.scales_at() + u64::from(self.nr) * factors * self.coding.scale_type().size()
    }
    /// Bytes of one panel of one way, without the gap behind it.
    pub fn filled_bytes(&self, dtype: DType) -> u64 {
        let scales = if matches!(self.coding, Coding::Int8 { .. }) { u64::from(self.nr) * self.coding.scale_type().size() } else { 0 };
        self.bytes_before(self.padded_k(), dtype) + scales
    }
    /// Bytes from the beginning of one panel of one way to that of the next: between long ones that would lie whole pages apart there is a
    /// gap of zeros, which nobody reads, but for nibbles.
    pub fn panel_bytes(&self, dtype: DType) -> u64 {
        let filled = self.filled_bytes(dtype);
        let has_gap = self.nr >= GAP_COLUMNS && filled >= GAP_FROM && !self.coding.has_nibbles();
        if has_gap && filled.is_multiple_of(PAGE) { filled + GAP } else { filled }
    }
    /// Bytes of all panels, without gaps: what reading them once takes.
    pub fn bytes_read(&self, dtype: DType) -> u64 {
        self.filled_bytes(dtype) * u64::from(self.panels()) * u64::from(self.ways)
    }
    /// Bytes in all, with gaps.
    pub fn bytes(&self, dtype: DType) -> u64 {
        self.panel_bytes(dtype) * u64::from(self.panels()) * u64::from(self.ways)
    }
    /// True when there is nothing.
    pub fn is_empty(&self) -> bool {
        u64::from(self.padded_k()) * u64::from(self.nr) * u64::from(self.panels()) * u64::from(self.ways) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_panels_do_not_lie_whole_pages_apart() {
        let panel = |nr, k, dtype, coding| {
            let panels = Panels { nr, k_pack: 1, k, groups: 1, group_cols: 4 * nr, ways: 2, coding };
            assert_eq!(panels.bytes(dtype), 8 * panels.panel_bytes(dtype));
            assert_eq!(panels.bytes_read(dtype), 8 * panels.filled_bytes(dtype));
            (panels.filled_bytes(dtype), panels.panel_bytes(dtype))
        };
        assert_eq!(panel(16, 2048, DType::Bf16, Coding::Elements), (65536, 66048));
        assert_eq!(panel(8, 4096, DType::Bf16, Coding::Elements), (65536, 65536));
        // Scales move a panel.
        assert_eq!(panel(16, 2048, DType::U8, Coding::Int8 { group: 256 }), (32832, 32832));
        assert_eq!(panel(16, 2048, DType::U8, Coding::Int4 { group: 32, zeros: false }), (18432, 18432));
        assert_eq!(panel(16, 256, DType::Bf16, Coding::Elements), (8192, 8192));
        // Nibbles are walked in one stream.
        assert_eq!(panel(32, 2048, DType::U8, Coding::Int4 { group: 32, zeros: false }), (36864, 36864));
        for k in 1..3000 {
            let (filled, whole) = panel(32, k, DType::F32, Coding::Elements);
            let gap = if filled >= 16384 && filled % 4096 == 0 { 512 } else { 0 };
            assert_eq!(whole, filled + gap, "k {k}");
        }
    }
}
