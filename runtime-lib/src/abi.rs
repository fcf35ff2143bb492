//! The contract between generated code, the linker stage and the runtime: `repr(C)` types, symbol names, the payload
//! header and the manifest. What else of this crate is not private to executables is listed in `lib.rs`.
//!
//! In: nothing. Out: types whose sizes and offsets are asserted below, so that generated code, which addresses fields by
//! [`field`] offsets, cannot drift from what the runtime writes.

use crate::cost::RegionInfo;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// Changes with every incompatible change of this file; checked by the runtime at start, and by `rcompile inspect` and `compare`.
pub const ABI_VERSION: u32 = 7;

/// Bytes between two threads' counters in [`StepCtx::claims`]: neighbouring lines are fetched in pairs.
pub const CLAIMS_STRIDE: u64 = 128;

/// One attention tile: consecutive rows of one run (same slot) that share reads of K and V.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tile {
    /// First row of the tile.
    pub row_begin: i32,
    /// Number of rows, 1 ..= the entry's `tile_rows`.
    pub row_count: i32,
    /// KV slot of all its rows.
    pub slot: i32,
    /// Keys `0 .. key_end` of the slot exist, at least all that its rows see; masks decide which a row sees.
    pub key_end: i32,
}

/// CPUs that code for a level (`x86-64-v3`) tells apart when it runs, because they want weights read in another way.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuKind {
    /// All others.
    #[default]
    Other = 0,
    /// AMD's family 1Ah: Zen 5, and what is newer of the family.
    Zen5 = 1,
}

/// Everything one step sees. The runtime fills it in, generated code reads it; it is shared by all threads of a step.
///
/// Table lengths: `token`, `slot`, `position`, `kv_index`, `segment`: `rows`; `logit_row`: `logit_rows`; `run_begin`: `runs + 1`; `tile`:
/// `tiles`; `page_table`: slots times `pages_per_slot`; `claims`: a counter per thread. `output` has a row of the entry's `output_stride`
/// elements per row of logits, or [`POOLED_VECTORS`] of them per run.
#[repr(C)]
#[derive(Debug)]
pub struct StepCtx {
    /// Rows of this step, `1 ..= bucket`.
    pub rows: u32,
    /// Rows that want logits (0 is allowed).
    pub logit_rows: u32,
    /// Runs: maximal groups of consecutive rows with the same slot (the texts of an encoder step).
    pub runs: u32,
    /// Attention tiles.
    pub tiles: u32,
    /// `page_table` entries per slot.
    pub pages_per_slot: u32,
    /// The CPU that this runs on.
    pub cpu: CpuKind,
    /// Start of the packed weights (2 MB aligned).
    pub weights: *const u8,
    /// Start of the state area (KV cache).
    pub state: *mut u8,
    /// Start of the arena shared by all threads (64-byte aligned).
    pub arena: *mut u8,
    /// Scratch of thread 0; thread `i` owns `private + i * private_stride`.
    pub private: *mut u8,
    /// Bytes of scratch per thread, a multiple of 128.
    pub private_stride: u64,
    /// Entry output: `f32[logit_rows, output_stride]` ([`EntryInfo`]), pooled `f32[runs, POOLED_VECTORS, output_stride]`.
    pub output: *mut f32,
    /// Token id of each row.
    pub token: *const i32,
    /// KV slot of each row.
    pub slot: *const i32,
    /// Position of each row for RoPE and learned positions.
    pub position: *const i32,
    /// Where each row's K and V are written in its slot; also its place for the mask.
    pub kv_index: *const i32,
    /// Segment (token type) of each row, 0 where the model has none.
    pub segment: *const i32,
    /// Row of each wanted logits row.
    pub logit_row: *const i32,
    /// First row of each run, and `rows` at the end.
    pub run_begin: *const i32,
    /// Attention tiles.
    pub tile: *const Tile,
    /// Physical page of 256 positions: `page_table[slot * pages_per_slot + kv_index / 256]`.
    pub page_table: *const i32,
    /// Barrier state owned by the runtime.
    pub barrier: *mut core::ffi::c_void,
    /// For each thread, [`CLAIMS_STRIDE`] bytes apart, how many pieces of its share of a region are left for whoever is free (i64; at most
    /// 0 between regions). Only kernels change it. Null: every thread has a fixed share.
    pub claims: *mut i64,
    /// Null, or the runtime's region clocks: generated code only compares it with null (see [`PROFILE_SYMBOL`]).
    pub profile: *mut core::ffi::c_void,
}

impl StepCtx {
    /// A step without rows, areas and tables.
    pub fn empty() -> Self {
        use core::ptr::{null, null_mut};
        Self {
            rows: 0,
            logit_rows: 0,
            runs: 0,
            tiles: 0,
            pages_per_slot: 0,
            cpu: CpuKind::Other,
            weights: null(),
            state: null_mut(),
            arena: null_mut(),
            private: null_mut(),
            private_stride: 0,
            output: null_mut(),
            token: null(),
            slot: null(),
            position: null(),
            kv_index: null(),
            segment: null(),
            logit_row: null(),
            run_begin: null(),
            tile: null(),
            page_table: null(),
            barrier: null_mut(),
            claims: null_mut(),
            profile: null_mut(),
        }
    }
}

/// Byte offsets of [`StepCtx`] fields, for generated code.
pub mod field {
    use super::StepCtx;
    use core::mem::offset_of;
    macro_rules! fields { ($($name:ident = $field:ident),* $(,)?) => { $(
        #[doc = concat!("Offset of `", stringify!($field), "`.")]
        pub const $name: u64 = offset_of!(StepCtx, $field) as u64; )* } }
    fields! { ROWS = rows, LOGIT_ROWS = logit_rows, RUNS = runs, TILES = tiles, PAGES_PER_SLOT = pages_per_slot, CPU = cpu,
    WEIGHTS = weights, STATE = state, ARENA = arena, PRIVATE = private, PRIVATE_STRIDE = private_stride, OUTPUT = output,
    TOKEN = token, SLOT = slot, POSITION = position, KV_INDEX = kv_index, SEGMENT = segment, LOGIT_ROW = logit_row,
    RUN_BEGIN = run_begin, TILE = tile, PAGE_TABLE = page_table, CLAIMS = claims, PROFILE = profile }
}

const _: () = {
    assert!(core::mem::size_of::<Tile>() == 16);
    assert!(core::mem::size_of::<StepCtx>() == 24 + 8 * 18);
    assert!(field::WEIGHTS == 24);
};

/// Positions per KV page, the attention's key block.
pub const PAGE_POSITIONS: usize = 256;

/// Signature of a generated step: all threads of the pool enter with their own `thread`, `0 <= thread < threads`.
///
/// Symbol: `rc_step_<entry>_<bucket>`.
pub type StepFn = unsafe extern "C" fn(ctx: *const StepCtx, thread: u32, threads: u32);

/// Runtime symbol that generated code calls between regions: `extern "C" fn rc_barrier(ctx: *const StepCtx, thread: u32, threads: u32)`.
pub const BARRIER_SYMBOL: &str = "rc_barrier";
/// Runtime symbol called after each region, before the barrier that may follow, when `ctx.profile` is not null:
/// `extern "C" fn rc_profile(ctx: *const StepCtx, thread: u32, region: u32)` (region = index in the program's region list).
pub const PROFILE_SYMBOL: &str = "rc_profile";

/// Row of the table of steps in the entry stub (`templates/stub.c`): symbol `rc_steps`, ended by a null `run`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StepEntry {
    /// Bucket capacity in rows; of a probe its [`Probe`].
    pub bucket: u32,
    /// Index into the manifest's `entries`, or [`PROBE_ENTRY`].
    pub entry: u32,
    /// The generated function.
    pub run: Option<StepFn>,
}

/// `StepEntry::entry` of probes.
pub const PROBE_ENTRY: u32 = u32::MAX;

/// Generated functions that measure what this CPU can do with the instructions that the kernels use. Called like steps:
/// `ctx.rows` says how much, scratch gets what keeps the loops alive, and a probe of reading reads `ctx.weights`.
///
/// Symbol: `rc_probe_<name>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Probe {
    /// Reads `rows` blocks of [`PROBE_READ_BYTES`] in all, each thread its share, in one stream with prefetch over four pages.
    Read1 = 1,
    /// The same in four streams side by side with prefetch.
    Read4 = 2,
    /// Fused multiply-adds of f32 in registers: [`PROBE_MULTIPLY_ADDS`] per thread and row.
    F32 = 3,
    /// Dot or matrix products of bf16 in registers, likewise.
    Bf16Dot = 4,
    /// Dot products of four int8 codes in registers, likewise.
    Int8Dot = 5,
}

impl Probe {
    /// All of them.
    pub const ALL: [Probe; 5] = [Probe::Read1, Probe::Read4, Probe::F32, Probe::Bf16Dot, Probe::Int8Dot];

    /// In symbols.
    pub fn name(self) -> &'static str {
        match self {
            Probe::Read1 => "read1",
            Probe::Read4 => "read4",
            Probe::F32 => "f32",
            Probe::Bf16Dot => "bf16_dot",
            Probe::Int8Dot => "int8_dot",
        }
    }
}

/// Bytes of a block of [`Probe::Read1`] and [`Probe::Read4`].
pub const PROBE_READ_BYTES: u64 = 64 << 10;
/// Multiply-adds of a row of a compute probe, on each thread.
pub const PROBE_MULTIPLY_ADDS: u64 = 3 << 18;

/// Virtual address at which the payload segment is linked (relative to the load base of a static-pie).
pub const PAYLOAD_VADDR: u64 = 0x0800_0000;
/// Section (and PT_LOAD) that holds header, manifest, tokenizer, templates and, with `--weights embed`, the weights.
pub const PAYLOAD_SECTION: &str = ".rc_payload";
/// `PayloadHeader::magic`.
pub const PAYLOAD_MAGIC: [u8; 8] = *b"RCPAYLD\x01";
/// Alignment of weights in file and memory.
pub const WEIGHTS_ALIGN: u64 = 2 << 20;
/// Bytes behind the weights in a file of their own: their hash.
pub const WEIGHTS_HASH_BYTES: u64 = 32;

/// First bytes of the payload segment. Offsets count from the start of the payload; hashes are BLAKE3.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PayloadHeader {
    /// [`PAYLOAD_MAGIC`].
    pub magic: [u8; 8],
    /// [`ABI_VERSION`].
    pub abi_version: u32,
    /// 1 when the weights are in this segment, 0 when in `<executable>.weights`.
    pub weights_embedded: u32,
    /// Length of the executable file in bytes.
    pub file_len: u64,
    /// File offset of this header.
    pub payload_offset: u64,
    /// Length of the payload segment in bytes (header included, weights included when embedded).
    pub payload_len: u64,
    /// Manifest (JSON, [`Manifest`]).
    pub manifest_offset: u64,
    /// Its length.
    pub manifest_len: u64,
    /// Blobs area (tokenizer, chat template, ...): the manifest names pieces of it.
    pub blobs_offset: u64,
    /// Its length.
    pub blobs_len: u64,
    /// Weights: offset in this payload when embedded, otherwise 0.
    pub weights_offset: u64,
    /// Length of the weights.
    pub weights_len: u64,
    /// Checksum of all other segments, which `templates/start.c` compares with what is loaded before anything else runs: XXH64 of each
    /// segment's bytes in the file but for the file's headers, in the order of the program headers, seeded with that of the one before.
    pub image_checksum: u64,
    /// Hash of the manifest bytes.
    pub manifest_hash: [u8; 32],
    /// Hash of the blobs.
    pub blobs_hash: [u8; 32],
    /// Hash of the weights (checked by `verify` only).
    pub weights_hash: [u8; 32],
    /// Link-time virtual address of the code.
    pub code_begin: u64,
    /// End of the code.
    pub code_end: u64,
    /// Hash of this header with this field zeroed.
    pub header_hash: [u8; 32],
}

/// Nothing lies between its fields.
const _: () = assert!(size_of::<PayloadHeader>() == 8 + 8 + 10 * 8 + 3 * 32 + 16 + 32);

impl PayloadHeader {
    /// Its bytes, as a file has them.
    pub fn as_bytes(&self) -> &[u8; size_of::<Self>()] {
        // SAFETY: `repr(C)` and, as asserted above, without padding, so that every byte is initialised.
        unsafe { &*std::ptr::from_ref(self).cast() }
    }
    /// The header that has these bytes, whatever they say.
    pub fn from_bytes(bytes: &[u8; size_of::<Self>()]) -> Self {
        // SAFETY: as many bytes as it has; integers and bytes have no invalid values.
        unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() }
    }
    /// Bytes of code.
    pub fn code_bytes(&self) -> u64 {
        self.code_end.saturating_sub(self.code_begin)
    }
    /// What [`PayloadHeader::header_hash`] is the hash of.
    pub fn without_hash(&self) -> Self {
        PayloadHeader { header_hash: [0; 32], ..*self }
    }
}

/// A piece of the blobs area.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Span {
    /// Offset from the start of the blobs area.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// What an executable knows about itself; stored as JSON in the payload and printed by `info --json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of rcompile that built it.
    pub rcompile_version: String,
    /// Name of the model (last part of the model directory's path).
    pub name: String,
    /// Hugging Face architecture class.
    pub architecture: String,
    /// What it does: its verbs.
    pub task: Task,
    /// Target triple.
    pub target: String,
    /// CPU name as given to `--cpu` (after `native` was resolved).
    pub cpu: String,
    /// CPU features that compiled kernels use, in the spelling of LLVM (`avx512bf16`).
    pub features: Vec<String>,
    /// Core count that fixed the split of the work.
    pub cores: u32,
    /// Positions per sequence.
    pub ctx_size: u32,
    /// Sequence slots.
    pub slots: u32,
    /// Stored type of most weights.
    pub dtype: String,
    /// Type that matmul inputs are rounded to.
    pub compute: String,
    /// KV cache type.
    pub kv_dtype: String,
    /// `none` or the quantisation.
    pub quantization: String,
    /// Vocabulary size: every token id is below it (rows of the embedding that may be looked up), and rows have that many
    /// logits. Encoders have it too; the runtime refuses every id that is not below it.
    pub vocab_size: u32,
    /// Width of the hidden state.
    pub hidden_size: u32,
    /// Number of parameters in the checkpoint.
    pub parameters: u64,
    /// Entries with their buckets.
    pub entries: Vec<EntryInfo>,
    /// State area.
    pub state: StateInfo,
    /// Weight bytes (packed).
    pub weight_bytes: u64,
    /// sha256 of every input file, in name order.
    pub inputs: Vec<InputFile>,
    /// Text side; absent when the model has no tokenizer.
    pub text: Option<TextInfo>,
    /// Generation defaults.
    pub generation: GenerationInfo,
    /// Pooling defaults of an embedding model.
    pub pooling: Option<PoolingInfo>,
    /// Exceptions to bit-reproducibility and other remarks for `info`.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl Manifest {
    /// Can a build have written it? False for a zero where there is at least one of something, and for buckets out of order: hashes say
    /// nothing about that, they have no key.
    pub fn is_possible(&self) -> bool {
        let entry = |e: &EntryInfo| !e.buckets.is_empty() && e.buckets.is_sorted_by_key(|b| b.rows);
        let bucket = |b: &BucketInfo| {
            [b.rows, b.logit_rows, b.tile_rows].iter().all(|n| *n > 0)
                && b.private_bytes.is_multiple_of(128)
                && b.regions.iter().all(|r| r.layers != Some(0))
        };
        [self.ctx_size, self.slots, self.vocab_size, self.state.pages_per_slot].iter().all(|n| *n > 0)
            && self.entries.iter().all(entry)
            && self.entries.iter().flat_map(|e| &e.buckets).all(bucket)
    }
}

/// What an executable does: it decides the verbs. (Architectures have a type of their own, `rcompile_models::arch::Task`: this one is part
/// of the manifest's format, and the crate that reads models does not know it.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// Continues texts.
    Generate,
    /// Maps texts to vectors.
    Embed,
}

impl Task {
    /// Name of its entry.
    pub fn entry(self) -> &'static str {
        match self {
            Task::Generate => "step",
            Task::Embed => "encode",
        }
    }
}

/// Where `--weights split` has the weights of an executable: `OUT.weights`.
pub fn weights_path(exe: &Path) -> PathBuf {
    let mut path = exe.as_os_str().to_os_string();
    path.push(".weights");
    path.into()
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Task::Generate => "generate",
            Task::Embed => "embed",
        })
    }
}

/// One entry (`step`, `encode`).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EntryInfo {
    /// `step` for a decoder, `encode` for an encoder.
    pub name: String,
    /// Buckets in ascending order.
    pub buckets: Vec<BucketInfo>,
    /// f32 elements per output row (a row of logits, or one pooled vector, with padding).
    pub output_stride: u64,
    /// What the output rows are.
    pub output: OutputKind,
}

/// Rows of an entry's output, each `output_stride` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OutputKind {
    /// One per logit row.
    Logits,
    /// [`POOLED_VECTORS`] per run, see [`Pooling::vector`].
    Pooled,
}

/// Pooled vectors per run that an encoder writes: each pooling, then the same L2-normalised.
pub const POOLED_VECTORS: usize = 2 * 4;

/// How the vectors of a text become one, in the order in which an entry writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "exe", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first token's.
    Cls,
    /// The largest element of each column.
    Max,
    /// The last token's.
    Last,
}

impl Pooling {
    /// Which of a run's vectors it is.
    pub fn vector(self, normalised: bool) -> usize {
        self as usize + if normalised { POOLED_VECTORS / 2 } else { 0 }
    }
}

/// One compiled bucket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BucketInfo {
    /// Capacity in rows.
    pub rows: u32,
    /// Most rows that may want logits in one step (most runs for `pooled`).
    pub logit_rows: u32,
    /// Rows per attention tile.
    pub tile_rows: u32,
    /// Arena bytes.
    pub arena_bytes: u64,
    /// Scratch bytes per thread (multiple of 128).
    pub private_bytes: u64,
    /// The regions in program order, with their cost.
    pub regions: Vec<RegionInfo>,
    /// Barriers per decoder layer.
    pub barriers_per_layer: u32,
}

/// Layout of the KV cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StateInfo {
    /// Bytes in all, of all layers.
    pub bytes: u64,
    /// Bytes per position of one sequence over all layers.
    pub bytes_per_token: u64,
    /// Pages of 256 positions per slot; page `slot * pages_per_slot + i` is the identity mapping.
    pub pages_per_slot: u32,
    /// False where nothing survives a step (encoders share one layer's cache among all layers).
    pub persistent: bool,
}

/// An input file of the build.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct InputFile {
    /// Path relative to the model directory.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// sha256, lower-case hex.
    pub sha256: String,
}

/// Tokenizer and templates.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TextInfo {
    /// Tokenizer in the compact form of `runtime-lib/src/text.rs`.
    pub tokenizer: Span,
    /// Chat template (Jinja), if any.
    pub chat_template: Option<Span>,
    /// Special tokens as the template sees them, name -> text (`bos_token`, `eos_token`, ...).
    pub special_tokens: std::collections::BTreeMap<String, String>,
    /// Most tokens of a text that an encoder embeds, special ones included; longer texts are cut. From `sentence_bert_config.json`, else
    /// from `tokenizer_config.json`.
    pub max_length: Option<u32>,
}

/// Defaults from `generation_config.json` and `config.json`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct GenerationInfo {
    /// First token of a sequence, where the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Sampling defaults; `temperature` 0 or `do_sample` false mean greedy.
    pub do_sample: bool,
    /// Temperature.
    pub temperature: Option<f32>,
    /// Top-k.
    pub top_k: Option<u32>,
    /// Top-p.
    pub top_p: Option<f32>,
    /// Min-p.
    pub min_p: Option<f32>,
    /// Repetition penalty.
    pub repetition_penalty: Option<f32>,
}

/// Pooling of an embedding model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PoolingInfo {
    /// Which.
    pub mode: Pooling,
    /// L2-normalise by default.
    pub normalize: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "exe")]
    #[test]
    fn a_manifest_has_at_least_one_of_everything_and_buckets_in_order() {
        use crate::step::tests::{bucket, entry, manifest};
        let with = |buckets| manifest(vec![entry("step", OutputKind::Logits, buckets)], 1);
        let whole = || with(vec![bucket(1, 1), bucket(8, 8)]);
        assert!(whole().is_possible());
        let no_layers = || vec![RegionInfo { layers: Some(0), ..bucket(1, 1).regions[0].clone() }];
        for malformed in [
            bucket(0, 1),
            bucket(1, 0),
            BucketInfo { tile_rows: 0, ..bucket(1, 1) },
            BucketInfo { private_bytes: 100, ..bucket(1, 1) },
            BucketInfo { regions: no_layers(), ..bucket(1, 1) },
        ] {
            assert!(!with(vec![malformed.clone()]).is_possible(), "{malformed:?}");
        }
        assert!(!with(vec![]).is_possible() && !with(vec![bucket(8, 8), bucket(1, 1)]).is_possible());
        let zeros: [fn(&mut Manifest); 4] = [|m| m.ctx_size = 0, |m| m.slots = 0, |m| m.vocab_size = 0, |m| m.state.pages_per_slot = 0];
        for zero in zeros {
            let mut manifest = whole();
            zero(&mut manifest);
            assert!(!manifest.is_possible());
        }
    }

    #[test]
    fn a_header_may_say_anything_of_its_code() {
        let header = |code_begin, code_end| PayloadHeader { code_begin, code_end, ..PayloadHeader::from_bytes(&[0; _]) };
        assert_eq!([header(100, 350).code_bytes(), header(350, 100).code_bytes()], [250, 0]);
    }

    #[test]
    fn vectors_lie_where_the_entry_writes_them() {
        assert_eq!(Pooling::Mean.vector(false), 0);
        assert_eq!(Pooling::Last.vector(false), 3);
        assert_eq!(Pooling::Mean.vector(true), 4);
        assert_eq!(Pooling::Max.vector(true), 6);
    }
}
