//! What generators know about a CPU: a table per name, resolved once from `--target`, `--cpu` and feature edits.
//!
//! A new CPU is a new row in its architecture's file. Generated functions use exactly the listed features: LLVM gets the
//! architecture's baseline as `target-cpu`, the features explicitly and the real name as `tune-cpu`, so that the list in the executable,
//! which its CPU check reads, is complete.

pub mod aarch64;
mod family;
mod streams;
pub mod x86_64;

pub use self::streams::{Busy, Distances, Near, Stream, Streams};

use crate::error::Error;
use crate::program::{Coding, Compute, DType, FewRows, SHORT_GROUP};
use rcompile_runtime::abi::CpuKind;
use std::collections::BTreeSet;

/// Architecture, for the few places that choose an intrinsic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// x86-64 with at least AVX2 and FMA.
    X86_64,
    /// 64-bit Arm with NEON.
    Aarch64,
}

/// Vectors of columns of a weight panel, and of the largest matmul tile: pieces of wider panels would use every second line only, and
/// half of L1's sets.
pub const PANEL_VECTORS: u32 = 2;
/// Columns of the widest panels.
pub const WIDEST_PANEL: u32 = PANEL_VECTORS * 16;
/// Rows of the largest tile of 2 x 2 blocks with [`PANEL_VECTORS`] vectors of columns: 24 accumulators.
const MMLA_ROWS: u32 = 12;
/// k of a tile of bf16.
pub const BF16_TILE_K: u32 = 32;
/// Most rows that are left to FMA where there are tiles of bf16; it adds in their order, two sums for each result. With four rows it takes
/// as long over a line of weights as the line takes to come from memory, at least beside another thread of the core; with three, tiles gain
/// already (docs/machines/sapphire-rapids.md).
const BF16_TILE_ROWS: u32 = 2;

/// A resolved target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Isa {
    /// Architecture.
    pub arch: Arch,
    /// Target triple.
    pub triple: String,
    /// Name as given to `--cpu`, `native` resolved.
    pub name: String,
    /// CPU name for LLVM's `target-cpu`: the architecture's baseline.
    pub llvm_cpu: String,
    /// CPU name for LLVM's `tune-cpu`.
    pub tune_cpu: String,
    /// Features that generated code may use, LLVM's spelling, sorted.
    pub features: BTreeSet<String>,
    /// f32 lanes of a vector register: 4, 8 or 16.
    pub lanes: u32,
    /// Vector registers.
    pub registers: u32,
    /// Rows of the largest matmul tile.
    pub tile_rows: u32,
    /// The same where both operands are codes: a result has an integer and an f32 sum.
    pub code_rows: u32,
    /// Bytes of a core's second cache, which blocks are made for.
    pub l2_bytes: u64,
    /// How weights are read from memory.
    pub streams: Streams,
    /// The same where code for a level runs on one of these CPUs.
    pub streams_by_cpu: &'static [(CpuKind, Streams)],
    /// FMA takes a factor from a lane of a vector: `lanes` consecutive k of a row wait in one register, where other CPUs load one
    /// broadcast per k (which on these costs a vector instruction).
    pub lane_fma: bool,
    /// Has a bf16 pair dot instruction on full vectors.
    pub bf16_dot: bool,
    /// It beats f32 FMA (Zen 4 and 5; on Sapphire Rapids and relatives it runs at half of FMA).
    pub bf16_dot_fast: bool,
    /// Has BFMMLA (four times the rate of FMA on Neoverse V1 and V2).
    pub bf16_mmla: bool,
    /// Has SMMLA (twice the rate of SDOT there).
    pub int8_mmla: bool,
    /// Has TDPBSUD on tiles of 16 rows, 16 columns and 64 k (AMX; eight times the rate of VPDPBUSD). Blocks of rows want it.
    pub int8_tiles: bool,
    /// Has TDPBF16PS on tiles of 16 rows, 16 columns and 32 k (AMX; sixteen times the rate of FMA).
    pub bf16_tiles: bool,
    /// FMA may overwrite a factor: an addend that is used again needs no copy (FMLA of NEON overwrites the addend).
    pub fma_into_factor: bool,
    /// What takes nibbles apart has pipes beside those of the integer dots: every block of rows does it for itself, and weights pass
    /// through caches as they are stored.
    pub nibbles_beside_dots: bool,
}

/// How four products of bytes are added to an i32 lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int8Dot {
    /// By one instruction.
    Instruction(&'static str),
    /// By three, and one for signs: products of unsigned and signed bytes, added in pairs to 16 bits (saturated), those in pairs to 32, and
    /// the addition. Two products fit 16 bits if the unsigned factors are at most 128: nibbles, or magnitudes of signed bytes, whose signs
    /// the others then take. Sums of nibbles' products may stay in words for a while, see `int_dot`.
    Pairs {
        /// Intrinsic of the pairs of bytes.
        bytes: &'static str,
        /// Intrinsic of the pairs of words.
        words: &'static str,
        /// Intrinsic that gives bytes the signs of others, where there is one.
        sign: Option<&'static str>,
    },
}

impl Isa {
    /// Columns of a weight panel.
    pub fn panel_nr(&self) -> u32 {
        PANEL_VECTORS * self.lanes
    }
    /// Table row of `cpu` for `triple` with feature edits (`+avx512bf16`, `-avx512fp16`). `cpu` may be `native` when `triple` is the
    /// host's.
    pub fn lookup(triple: &str, cpu: &str, feature_edits: &[String]) -> Result<Isa, Error> {
        let isa = match arch_of(triple) {
            Some(Arch::X86_64) => x86_64::lookup(triple, cpu, feature_edits),
            Some(Arch::Aarch64) => aarch64::lookup(triple, cpu, feature_edits),
            None => Err(Error::Target(format!("target '{triple}' is not supported; supported: {}", TRIPLES.map(|t| t.0).join(", ")))),
        };
        let has_cpu = |triple: &str| Isa::known_cpus(triple).contains(&cpu);
        let other = || TRIPLES.iter().map(|t| t.0).find(|other| has_cpu(other) && arch_of(triple).is_some() && !has_cpu(triple));
        isa.map_err(|error| match (error, other()) {
            (Error::Target(what), Some(other)) => Error::Target(format!("{what}; --target {other} has it")),
            (error, _) => error,
        })
    }

    /// The machine this runs on, resolved to a name and explicit features.
    pub fn native() -> Result<Isa, Error> {
        Isa::lookup(HOST_TRIPLE, "native", &[])
    }

    /// Is it a level that CPUs of several makers have, and not one CPU?
    pub fn is_level(&self) -> bool {
        is_level(&self.name)
    }

    /// Names for `--cpu` of an architecture's triple.
    pub fn known_cpus(triple: &str) -> Vec<&'static str> {
        match arch_of(triple) {
            Some(Arch::X86_64) => x86_64::FAMILY.names(),
            Some(Arch::Aarch64) => aarch64::FAMILY.names(),
            None => vec![],
        }
    }

    /// Has it the feature (LLVM's spelling)?
    pub fn has(&self, feature: &str) -> bool {
        self.features.contains(feature)
    }

    /// How a matmul of values and weights of these stored types and `k` k is computed.
    pub fn matmul(&self, a: DType, weight: DType, k: u32) -> Compute {
        match (a, weight) {
            (DType::Bf16, DType::Bf16) if self.bf16_tiles && k.is_multiple_of(BF16_TILE_K) => Compute::Bf16Tiles,
            (DType::Bf16, DType::Bf16) if self.bf16_mmla => Compute::Bf16Mmla,
            (DType::Bf16, DType::Bf16) if self.bf16_dot => Compute::Bf16Dot,
            _ => Compute::F32,
        }
    }

    /// How a matmul of codes of both operands is computed.
    pub fn matmul_of_codes(&self, coding: Coding) -> Compute {
        let short = coding == Coding::Int4 { group: SHORT_GROUP, zeros: false };
        match (self.int8_mmla && coding.fits_mmla(), self.int8_tiles) {
            (true, _) => Compute::Int8Mmla,
            (_, true) if short && self.bf16_tiles => Compute::CodesInBf16Tiles,
            (_, true) => Compute::Int8Tiles,
            _ => Compute::Int8Dot,
        }
    }

    /// How attention over a cache of this type and width is computed.
    pub fn attention(&self, cache: DType, head_dim: u32) -> Compute {
        match cache {
            DType::Bf16 if self.bf16_tiles && self.lanes == 16 && head_dim.is_multiple_of(BF16_TILE_K) => Compute::Bf16Tiles,
            DType::Bf16 if self.bf16_dot && self.bf16_dot_fast && head_dim.is_multiple_of(2) => Compute::Bf16Dot,
            _ => Compute::F32,
        }
    }

    /// Rows of the largest tile.
    pub fn rows(&self, compute: Compute) -> u32 {
        match compute.few_rows() {
            FewRows::Bf16Mmla | FewRows::Int8Mmla => MMLA_ROWS,
            FewRows::Int8Dot => self.code_rows,
            FewRows::Bf16Halves => BF16_TILE_ROWS,
            FewRows::F32 | FewRows::Bf16Dot => self.tile_rows,
        }
    }

    /// Has it an instruction on bf16 inputs?
    pub fn bf16_inputs(&self) -> bool {
        self.bf16_dot || self.bf16_mmla || self.bf16_tiles
    }

    /// Is that faster than f32 FMA?
    pub fn bf16_inputs_fast(&self) -> bool {
        self.bf16_dot && self.bf16_dot_fast || self.bf16_mmla || self.bf16_tiles
    }

    /// `+a,+b,...` for LLVM.
    pub fn feature_string(&self) -> String {
        let mut all: Vec<_> = self.features.iter().map(|f| format!("+{f}")).collect();
        all.extend(match self.arch {
            Arch::X86_64 if self.has("avx512f") => vec!["+evex512".to_string()],
            _ => vec![],
        });
        all.join(",")
    }

    /// Does `machine`, of the same architecture, run code for this one?
    pub fn runs_on(&self, machine: &Isa) -> bool {
        self.arch == machine.arch && self.features.is_subset(&machine.features)
    }

    /// String attributes of generated functions.
    pub fn function_attributes(&self) -> Vec<(&'static str, String)> {
        let mut list =
            vec![("target-cpu", self.llvm_cpu.clone()), ("tune-cpu", self.tune_cpu.clone()), ("target-features", self.feature_string())];
        // Frames of more than a page touch each of their pages, so that they do not step over the page that guards a thread's stack.
        list.push(("probe-stack", "inline-asm".into()));
        if self.arch == Arch::X86_64 {
            list.push(("prefer-vector-width", (self.lanes * 32).to_string()));
        }
        list
    }

    /// Intrinsic `<n x float> -> <n x bfloat>` with rounding to nearest even, if the target has one for this width.
    pub fn bf16_round_intrinsic(&self, lanes: u32) -> Option<&'static str> {
        match self.arch {
            Arch::X86_64 => x86_64::bf16_round_intrinsic(self, lanes),
            Arch::Aarch64 => None,
        }
    }

    /// Is there an instruction that looks up 32-bit elements in tables of 32?
    pub fn looks_up_in_registers(&self) -> bool {
        self.arch == Arch::X86_64 && self.lanes == 16
    }

    /// Does LLVM's truncation of f32 to bf16 become one instruction (and not a library call)?
    pub fn bf16_rounds_by_truncation(&self) -> bool {
        self.arch == Arch::Aarch64 && self.has("bf16")
    }

    /// Type of the weight bytes that [`Isa::int8_dot`] multiplies with signed ones: what `VPDPBUSD` wants, else signed.
    pub fn code_type(&self) -> DType {
        match self.arch {
            Arch::X86_64 if !self.dots_in_pairs() => DType::U8,
            _ => DType::I8,
        }
    }

    /// Do int8 dots of full vectors take three instructions ([`Int8Dot::Pairs`])?
    pub fn dots_in_pairs(&self) -> bool {
        matches!(self.int8_dot(self.lanes), Some(Int8Dot::Pairs { .. }))
    }

    /// Exact sum of four products of weight bytes ([`Isa::code_type`]) or nibbles and signed bytes in each i32 lane; see `Fb::dot_int8`.
    pub fn int8_dot(&self, lanes: u32) -> Option<Int8Dot> {
        match self.arch {
            Arch::X86_64 => x86_64::int8_dot(self, lanes),
            Arch::Aarch64 => aarch64::int8_dot(self, lanes),
        }
    }

    /// Intrinsic `(<n x float>, <2n x bfloat>, <2n x bfloat>) -> <n x float>`.
    pub fn bf16_dot_intrinsic(&self, lanes: u32) -> Option<&'static str> {
        match self.arch {
            Arch::X86_64 => x86_64::bf16_dot_intrinsic(self, lanes),
            Arch::Aarch64 => None,
        }
    }
}

/// Names of what CPUs of several makers have, of each architecture the best first.
pub const LEVELS: [&str; 3] = ["x86-64-v4", "x86-64-v3", "generic"];

/// Is it one of these?
fn is_level(name: &str) -> bool {
    LEVELS.contains(&name)
}

/// The triple of x86-64.
pub const X86_64_TRIPLE: &str = "x86_64-unknown-linux-gnu";
/// The triple of 64-bit Arm.
pub const AARCH64_TRIPLE: &str = "aarch64-unknown-linux-gnu";

/// Triples that can be compiled for.
const TRIPLES: [(&str, Arch); 2] = [(X86_64_TRIPLE, Arch::X86_64), (AARCH64_TRIPLE, Arch::Aarch64)];

/// Triple of the machine that runs rcompile.
pub const HOST_TRIPLE: &str = if cfg!(target_arch = "aarch64") { AARCH64_TRIPLE } else { X86_64_TRIPLE };

/// The other architecture's triple, and its CPU whose code runs everywhere.
pub const FOREIGN: (&str, &str) = if cfg!(target_arch = "aarch64") { (X86_64_TRIPLE, "x86-64-v3") } else { (AARCH64_TRIPLE, "generic") };

/// Architecture of a triple.
pub(crate) fn arch_of(triple: &str) -> Option<Arch> {
    TRIPLES.iter().find(|t| t.0 == triple).map(|t| t.1)
}

/// The first edit whose feature is not among those that are left.
fn lost_edit<'e>(features: &BTreeSet<String>, edits: &'e [String]) -> Option<&'e String> {
    edits.iter().find(|edit| edit.strip_prefix('+').is_some_and(|f| !features.contains(f)))
}
