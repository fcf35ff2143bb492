//! Shared by the kernel tests: memory that looks like a running executable's, conversions, random numbers.
//!
//! In: a [`Program`] with one region. Out: its kernel as a loaded function, or for Arm as a program for qemu, run once per thread over a
//! [`Step`].
#![allow(dead_code, reason = "each test file uses its part")]

#[cfg(target_arch = "x86_64")]
#[path = "../amx/mod.rs"]
mod amx;

use rcompile_codegen::Error;
use rcompile_codegen::isa::{AARCH64_TRIPLE, HOST_TRIPLE, Isa, LEVELS};
use rcompile_codegen::llvm::builder::ModuleBuilder;
use rcompile_codegen::llvm::module::{self, Emit};
use rcompile_graph::{DType, Group};
use rcompile_runtime::abi::{CLAIMS_STRIDE, CpuKind, StepCtx, Tile, field};
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// xorshift64*: the same numbers in every run.
pub struct Rng(u64);

impl Rng {
    /// Any seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }
    /// Next 32 bits.
    pub fn bits(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }
    /// -1 .. 1.
    pub fn signed(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 31) as f32 - 1.0
    }
}

/// The graph's type of a row's codes with a scale per `group`.
pub fn row_type(group: u32) -> DType {
    DType::Q8(Group::of(group).unwrap_or(Group::G256))
}

/// Round to nearest even; finite input.
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}
/// Widened.
pub fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}
/// Normal range of f16 only; round to nearest even.
pub fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude < 0x3880_0000 {
        return sign; // subnormal halves are flushed: tests do not need them
    }
    let rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    sign | ((rounded - 0x3800_0000) >> 13) as u16
}
/// Widened; normal range and zero only.
pub fn from_f16(x: u16) -> f32 {
    let sign = u32::from(x & 0x8000) << 16;
    let magnitude = u32::from(x & 0x7fff);
    if magnitude == 0 { f32::from_bits(sign) } else { f32::from_bits(sign | ((magnitude << 13) + 0x3800_0000)) }
}

/// Zeroed bytes on a 4096-byte boundary.
pub struct Area {
    pages: Vec<Page>,
}

#[repr(C, align(4096))]
#[derive(Clone, Copy)]
struct Page([u8; 4096]);

impl Area {
    /// At least `len` bytes.
    pub fn new(len: usize) -> Area {
        Area { pages: vec![Page([0; 4096]); len.div_ceil(4096).max(1)] }
    }
    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: pages are plain bytes, contiguous.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().cast(), self.pages.len() * 4096) }
    }
    /// All bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().cast(), self.pages.len() * 4096) }
    }
    /// Writes an element of `size` 2 or 4 bytes.
    pub fn put(&mut self, offset: usize, raw: &[u8]) {
        self.bytes_mut()[offset..offset + raw.len()].copy_from_slice(raw);
    }
    /// Reads an f32.
    pub fn f32(&self, offset: usize) -> f32 {
        f32::from_le_bytes(self.bytes()[offset..offset + 4].try_into().unwrap())
    }
    /// Reads 16 bits.
    pub fn u16(&self, offset: usize) -> u16 {
        u16::from_le_bytes(self.bytes()[offset..offset + 2].try_into().unwrap())
    }
    /// Address.
    pub fn ptr(&mut self) -> *mut u8 {
        self.pages.as_mut_ptr().cast()
    }
}

/// Memory and tables of one step.
pub struct Step {
    /// Packed weights.
    pub weights: Area,
    /// KV cache.
    pub state: Area,
    /// Temporaries.
    pub arena: Area,
    /// Scratch of all threads.
    pub private: Area,
    /// Scratch per thread.
    pub private_stride: u64,
    /// Rows.
    pub rows: u32,
    /// Rows with logits.
    pub logit_rows: u32,
    /// Row tables.
    pub slot: Vec<i32>,
    /// Row tables.
    pub kv_index: Vec<i32>,
    /// Attention tiles.
    pub tiles: Vec<Tile>,
    /// `slots * pages_per_slot`.
    pub page_table: Vec<i32>,
    /// Pages per slot.
    pub pages_per_slot: u32,
    /// The CPU that it is told to be.
    pub cpu: CpuKind,
    /// Pieces that are left of each thread's share, first of each line; below 0 where the thread has not begun.
    pub claims: [[i64; CLAIMS_STRIDE as usize / 8]; 16],
}

impl Step {
    /// Areas of these sizes, no rows yet.
    pub fn new(weights: usize, state: usize, arena: usize, private_stride: u64) -> Step {
        Step {
            weights: Area::new(weights),
            state: Area::new(state),
            arena: Area::new(arena),
            private: Area::new(4 * private_stride as usize),
            private_stride,
            rows: 0,
            logit_rows: 0,
            slot: Vec::new(),
            kv_index: Vec::new(),
            tiles: Vec::new(),
            page_table: Vec::new(),
            pages_per_slot: 0,
            cpu: CpuKind::Other,
            claims: [[-1; CLAIMS_STRIDE as usize / 8]; 16],
        }
    }

    /// Runs the kernel for every thread, one after the other (kernels hold no barrier). Returns whether threads let others do the rest of
    /// their shares (each has done all of its own when the next one begins).
    pub fn run(&mut self, kernel: &Loaded, threads: u32, layer: u32) -> bool {
        self.claims.iter_mut().for_each(|line| line[0] = -1);
        self.run_some(kernel, 0..threads, threads, layer);
        let lines = &self.claims[..threads as usize];
        assert!(lines.iter().all(|line| line[0] == lines[0][0]), "some threads share out work, others do not: {lines:?}");
        lines[0][0] == 0
    }

    /// The same for some of the threads.
    pub fn run_some(&mut self, kernel: &Loaded, some: Range<u32>, threads: u32, layer: u32) {
        let nothing = [0i32; 4];
        let ctx = StepCtx {
            rows: self.rows,
            logit_rows: self.logit_rows,
            runs: 1,
            tiles: self.tiles.len() as u32,
            pages_per_slot: self.pages_per_slot,
            cpu: self.cpu,
            weights: self.weights.ptr(),
            state: self.state.ptr(),
            arena: self.arena.ptr(),
            private: self.private.ptr(),
            private_stride: self.private_stride,
            output: std::ptr::null_mut(),
            token: nothing.as_ptr(),
            slot: self.slot.as_ptr(),
            position: self.kv_index.as_ptr(),
            kv_index: self.kv_index.as_ptr(),
            segment: nothing.as_ptr(),
            logit_row: nothing.as_ptr(),
            run_begin: nothing.as_ptr(),
            tile: self.tiles.as_ptr(),
            page_table: self.page_table.as_ptr(),
            barrier: std::ptr::null_mut(),
            claims: self.claims.as_mut_ptr().cast(),
            profile: std::ptr::null_mut(),
        };
        match kernel {
            Loaded::Here(function) => some.for_each(|thread| {
                // SAFETY: the kernel was compiled for this program; areas and tables are as large as it assumes.
                unsafe { function(&ctx, thread, threads, layer) }
            }),
            Loaded::Emulated { program, .. } => self.emulate(program, &ctx, some, threads, layer),
        }
    }

    /// The same under qemu: `run.c` finds everything in a file, and leaves it there.
    fn emulate(&mut self, program: &Path, ctx: &StepCtx, some: Range<u32>, threads: u32, layer: u32) {
        fn bytes<T>(values: &[T]) -> &[u8] {
            // SAFETY: plain numbers without padding.
            unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
        }
        const CTX_AT: usize = 2048;
        let areas: [(u64, Vec<u8>); 11] = [
            (field::TOKEN, vec![0; 16]),
            (field::SLOT, bytes(&self.slot).to_vec()),
            (field::POSITION, bytes(&self.kv_index).to_vec()),
            (field::KV_INDEX, bytes(&self.kv_index).to_vec()),
            (field::TILE, bytes(&self.tiles).to_vec()),
            (field::PAGE_TABLE, bytes(&self.page_table).to_vec()),
            (field::WEIGHTS, self.weights.bytes().to_vec()),
            (field::STATE, self.state.bytes().to_vec()),
            (field::ARENA, self.arena.bytes().to_vec()),
            (field::PRIVATE, self.private.bytes().to_vec()),
            (field::CLAIMS, bytes(&self.claims).to_vec()),
        ];
        let mut file = vec![0u8; 4096];
        let mut words = vec![areas.len() as u64, some.start.into(), some.end.into(), threads.into(), layer.into(), CTX_AT as u64];
        let mut places = BTreeMap::new();
        file[CTX_AT..][..size_of::<StepCtx>()].copy_from_slice(bytes(std::slice::from_ref(ctx)));
        for (field, area) in &areas {
            words.extend([*field, file.len() as u64]);
            places.insert(*field, file.len());
            file.extend(area);
            file.resize(file.len().next_multiple_of(4096), 0);
        }
        assert!(words.len() * 8 <= CTX_AT);
        file[..words.len() * 8].copy_from_slice(bytes(&words));
        let path = program.with_file_name(format!("{:?}", std::thread::current().id()));
        std::fs::write(&path, &file).unwrap();
        let status = Command::new(QEMU).args(["-cpu", "max"]).args([program, &path]).status().unwrap();
        assert!(status.success(), "qemu: {status}");
        let file = std::fs::read(&path).unwrap();
        let back = |field: u64, len: usize| &file[places[&field]..][..len];
        for (field, area) in [(field::STATE, &mut self.state), (field::ARENA, &mut self.arena), (field::PRIVATE, &mut self.private)] {
            let len = area.bytes().len();
            area.bytes_mut().copy_from_slice(back(field, len));
        }
        let claims = back(field::CLAIMS, size_of_val(&self.claims));
        for (to, from) in self.claims.as_flattened_mut().iter_mut().zip(claims.chunks(8)) {
            *to = i64::from_le_bytes(from.try_into().unwrap());
        }
    }
}

/// A compiled kernel.
pub enum Loaded {
    /// In this process.
    Here(KernelFn),
    /// A program for qemu.
    Emulated {
        /// The program.
        program: PathBuf,
        /// Where it is.
        _dir: TempDir,
    },
}

impl Loaded {
    /// Its entry in this process.
    pub fn function(&self) -> KernelFn {
        let Loaded::Here(function) = self else { panic!("a kernel for another CPU") };
        *function
    }
    /// Assembly of one kernel, for any target.
    pub fn assembly(isa: &Isa, fill: impl FnOnce(&ModuleBuilder<'_>, &str) -> Result<(), Error>) -> String {
        module::build("kernel", isa, 3, Emit { llvm_ir: false, asm: true }, |mb| fill(mb, "kernel")).unwrap().asm.unwrap()
    }
    /// Compiles one kernel as object, links it as a shared library and loads it.
    pub fn build(isa: &Isa, fill: impl FnOnce(&ModuleBuilder<'_>, &str) -> Result<(), Error>) -> Loaded {
        Loaded::link(isa, "", fill)
    }
    /// The same with functions in C that it calls.
    pub fn link(isa: &Isa, functions: &str, fill: impl FnOnce(&ModuleBuilder<'_>, &str) -> Result<(), Error>) -> Loaded {
        let compiled = module::build("kernel", isa, 3, Emit::default(), |mb| fill(mb, "kernel")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let [object, source, library] = ["kernel.o", "functions.c", "kernel.so"].map(|name| dir.path().join(name));
        std::fs::write(&object, &compiled.object).unwrap();
        std::fs::write(&source, functions).unwrap();
        if isa.triple != HOST_TRIPLE {
            let program = dir.path().join("kernel");
            let run = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kernel_harness/run.c");
            let status = Command::new(ARM_CC).args(["-static", "-o"]).args([&program, &object, &source]).arg(run).status().unwrap();
            assert!(status.success(), "{ARM_CC} -static");
            return Loaded::Emulated { program, _dir: dir };
        }
        let status = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &object, &source]).status().unwrap();
        assert!(status.success(), "cc -shared");
        let path = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: the library holds one kernel and no initialisers; it stays loaded for the life of the process.
        let function = unsafe {
            let handle = dlopen(path.as_ptr(), 2);
            assert!(!handle.is_null(), "dlopen");
            let symbol = dlsym(handle, c"kernel".as_ptr());
            assert!(!symbol.is_null(), "dlsym");
            std::mem::transmute::<*mut c_void, KernelFn>(symbol)
        };
        Loaded::Here(function)
    }
}

/// Signature of kernels.
pub type KernelFn = unsafe extern "C" fn(*const StepCtx, u32, u32, u32);

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Targets whose code this machine can run: levels, the least first, the host with the dot instruction where it has it, and the host with
/// emulated tiles.
pub fn isas() -> Vec<Isa> {
    let native = Isa::native().unwrap();
    let levels = LEVELS.iter().rev().filter_map(|level| Isa::lookup(HOST_TRIPLE, level, &[]).ok());
    let mut list: Vec<Isa> = levels.filter(|isa| isa.runs_on(&native)).collect();
    list.push(native);
    #[cfg(target_arch = "x86_64")]
    list.extend(amx::emulated());
    list
}

/// What kernels for Arm are linked and run with on another host.
const ARM_CC: &str = "aarch64-linux-gnu-gcc";
const QEMU: &str = "qemu-aarch64";

/// Arm CPUs under qemu: multiply-adds by lane alone, dots of codes, matrix instructions. Whoever reads the tests' output learns where they
/// did not run; on CI they do.
pub fn arm_isas() -> Vec<Isa> {
    if HOST_TRIPLE == AARCH64_TRIPLE {
        return vec![];
    }
    for tool in [ARM_CC, QEMU] {
        if Command::new(tool).arg("--version").output().is_err() {
            assert!(std::env::var_os("CI").is_none(), "no {tool}, and on CI nothing is skipped");
            eprintln!("skipped: no {tool}");
            return vec![];
        }
    }
    ["generic", "neoverse-n1", "neoverse-v1"].map(|cpu| Isa::lookup(AARCH64_TRIPLE, cpu, &[]).unwrap()).into()
}
