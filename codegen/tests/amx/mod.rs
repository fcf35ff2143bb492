//! Tiles (AMX) on CPUs that have none: a handler of SIGILL does what the instruction would have done and goes on behind it.
//!
//! In: kernels for [`emulated`], in this process. Out: what the matrix unit would have made of them; what it would refuse (registers
//! without a shape, shapes that do not fit each other) ends the process and says why. Each thread has its own registers.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS,
//! TDPBSUD; encoding of VEX prefixes, ModR/M and SIB).

use rcompile_codegen::isa::{HOST_TRIPLE, Isa};
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::Once;

/// The newest server with tiles, without what else this host lacks, where it has no tiles but what goes with them (AVX-512 VNNI); code for
/// it runs in this process from now on.
pub fn emulated() -> Option<Isa> {
    static ONCE: Once = Once::new();
    const CPU: &str = "graniterapids";
    let native = Isa::native().unwrap();
    let all = Isa::lookup(HOST_TRIPLE, CPU, &[]).ok()?;
    let (tiles, lost): (Vec<_>, Vec<_>) =
        all.features.difference(&native.features).cloned().partition(|feature| feature.starts_with("amx-"));
    let isa = Isa::lookup(HOST_TRIPLE, CPU, &Vec::from_iter(lost.iter().map(|feature| format!("-{feature}")))).unwrap();
    if tiles.is_empty() || !isa.bf16_tiles {
        return None;
    }
    ONCE.call_once(|| {
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_illegal_instruction;
        // SAFETY: the handler touches nothing but the context, what the instruction names, and registers of this thread that nobody else
        // borrows, as no instruction of theirs is illegal.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()), 0);
        }
    });
    Some(isa)
}

extern "C" fn on_illegal_instruction(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the system hands over the context of what was interrupted, whose RIP is at the instruction.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let mut code = Code { at: context.uc_mcontext.gregs[libc::REG_RIP as usize] as *const u8 };
    let instruction = code.instruction(&context.uc_mcontext.gregs).expect("an instruction of AMX that kernels have");
    UNIT.with(|unit| unit.borrow_mut().run(instruction));
    context.uc_mcontext.gregs[libc::REG_RIP as usize] = code.at as i64;
}

/// What an instruction does: addresses, and numbers of tile registers.
#[derive(Debug)]
enum Instruction {
    /// LDTILECFG.
    Configure { at: u64 },
    /// TILERELEASE.
    Release,
    /// TILEZERO.
    Zero(usize),
    /// TILELOADD and TILELOADDT1.
    Load { tile: usize, at: u64, stride: u64 },
    /// TILESTORED.
    Store { tile: usize, at: u64, stride: u64 },
    /// TDPBF16PS.
    DotBf16 { sums: usize, rows: usize, columns: usize },
    /// TDPBSUD.
    DotInt8 { sums: usize, rows: usize, columns: usize },
}

/// Code that is being read.
struct Code {
    at: *const u8,
}

/// Registers of the interrupted code, in the order of the C library.
type Registers = [i64; 23];

/// Their places in the order of their numbers.
const NUMBERED: [c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

impl Code {
    fn byte(&mut self) -> u8 {
        // SAFETY: bytes of an instruction that was about to run, up to its end.
        unsafe {
            let byte = *self.at;
            self.at = self.at.add(1);
            byte
        }
    }

    /// The instruction, if it is one of AMX (a VEX prefix of three bytes, map 0F38, W and L 0), and moves behind it.
    fn instruction(&mut self, registers: &Registers) -> Option<Instruction> {
        let [prefix, extensions, more] = [self.byte(), self.byte(), self.byte()];
        if (prefix, extensions & 31, more & 0x84) != (0xc4, 2, 0) {
            return None;
        }
        let [opcode, modrm] = [self.byte(), self.byte()];
        // (VEX has the bits that extend numbers inverted.)
        let [base_bit, index_bit, reg_bit] = [5, 6, 7].map(|bit| usize::from(!extensions >> bit & 1) << 3);
        let register = usize::from(modrm >> 3 & 7) | reg_bit;
        let vvvv = usize::from(!more >> 3 & 15);
        let (rm, is_register) = (usize::from(modrm & 7) | base_bit, modrm >> 6 == 3);
        const NONE: u8 = 0;
        const P66: u8 = 1;
        const PF3: u8 = 2;
        const PF2: u8 = 3;
        Some(match (opcode, more & 3, is_register) {
            (0x49, NONE, true) if modrm == 0xc0 => Instruction::Release,
            (0x49, PF2, true) => Instruction::Zero(register),
            (0x5c, PF3, true) => Instruction::DotBf16 { sums: register, rows: rm, columns: vvvv },
            (0x5e, PF3, true) => Instruction::DotInt8 { sums: register, rows: rm, columns: vvvv },
            (0x49, NONE, false) => {
                let (at, index) = self.memory(modrm, (base_bit, index_bit), registers);
                Instruction::Configure { at: at.wrapping_add(index) }
            }
            (0x4b, PF2 | P66, false) => {
                let (at, stride) = self.memory(modrm, (base_bit, index_bit), registers);
                Instruction::Load { tile: register, at, stride }
            }
            (0x4b, PF3, false) => {
                let (at, stride) = self.memory(modrm, (base_bit, index_bit), registers);
                Instruction::Store { tile: register, at, stride }
            }
            _ => return None,
        })
    }

    /// Base and displacement of what ModR/M names, and the scaled index.
    fn memory(&mut self, modrm: u8, (base_bit, index_bit): (usize, usize), registers: &Registers) -> (u64, u64) {
        let of = |number: usize| registers[NUMBERED[number] as usize] as u64;
        let (mode, rm) = (modrm >> 6, usize::from(modrm & 7));
        let (base, index) = if rm == 4 {
            let sib = self.byte();
            let (base, index) = (usize::from(sib & 7), usize::from(sib >> 3 & 7) | index_bit);
            let base = (base != 5 || mode != 0).then_some(base | base_bit);
            (base.map(of), if index == 4 { 0 } else { of(index) << (sib >> 6) })
        } else {
            assert!(rm != 5 || mode != 0, "an address behind the instruction");
            (Some(of(rm | base_bit)), 0)
        };
        let displacement = match (mode, base) {
            (1, _) => i64::from(self.byte() as i8),
            (2, _) | (0, None) => i64::from(i32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])),
            _ => 0,
        };
        (base.unwrap_or(0).wrapping_add_signed(displacement), index)
    }
}

/// A register: its shape, both 0 without one, and its bytes.
#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    row_bytes: usize,
    bytes: [[u8; 64]; 16],
}

const NO_TILE: Tile = Tile { rows: 0, row_bytes: 0, bytes: [[0; 64]; 16] };

struct Unit {
    tiles: [Tile; 8],
}

thread_local! {
    static UNIT: RefCell<Unit> = const { RefCell::new(Unit { tiles: [NO_TILE; 8] }) };
}

impl Unit {
    fn run(&mut self, instruction: Instruction) {
        match instruction {
            Instruction::Configure { at } => {
                // SAFETY: the code was about to read as many bytes there.
                self.configure(unsafe { (at as *const [u8; 64]).read_unaligned() });
            }
            Instruction::Release => self.tiles = [NO_TILE; 8],
            Instruction::Zero(tile) => self.shaped(tile).bytes = NO_TILE.bytes,
            Instruction::Load { tile, at, stride } => {
                let tile = self.shaped(tile);
                tile.bytes = NO_TILE.bytes;
                for row in 0..tile.rows {
                    let from = at.wrapping_add(stride.wrapping_mul(row as u64)) as *const u8;
                    // SAFETY: as above; a row has at most 64 bytes (`configure`).
                    unsafe { from.copy_to_nonoverlapping(tile.bytes[row].as_mut_ptr(), tile.row_bytes) }
                }
            }
            Instruction::Store { tile, at, stride } => {
                let tile = self.shaped(tile);
                for row in 0..tile.rows {
                    let to = at.wrapping_add(stride.wrapping_mul(row as u64)) as *mut u8;
                    // SAFETY: the code was about to write there.
                    unsafe { to.copy_from_nonoverlapping(tile.bytes[row].as_ptr(), tile.row_bytes) }
                }
            }
            Instruction::DotBf16 { sums, rows, columns } => self.dot(sums, rows, columns, dot_bf16),
            Instruction::DotInt8 { sums, rows, columns } => self.dot(sums, rows, columns, dot_int8),
        }
    }

    /// Palette 1: eight registers of at most 16 rows of 64 bytes.
    fn configure(&mut self, bytes: [u8; 64]) {
        assert_eq!((bytes[0], bytes[1]), (1, 0), "palette and first row");
        assert!([&bytes[2..16], &bytes[32..48], &bytes[56..]].iter().all(|reserved| reserved.iter().all(|byte| *byte == 0)), "{bytes:?}");
        for (i, tile) in self.tiles.iter_mut().enumerate() {
            let (rows, row_bytes) = (usize::from(bytes[48 + i]), usize::from(u16::from_le_bytes([bytes[16 + 2 * i], bytes[17 + 2 * i]])));
            assert!(rows <= 16 && row_bytes <= 64 && (rows == 0) == (row_bytes == 0), "register {i}: {rows} rows of {row_bytes} bytes");
            *tile = Tile { rows, row_bytes, ..NO_TILE };
        }
    }

    fn shaped(&mut self, tile: usize) -> &mut Tile {
        assert!(self.tiles[tile].rows > 0, "register {tile} has no shape");
        &mut self.tiles[tile]
    }

    /// `add(sums, row, columns)` for each row. (Behind its bytes each row of a register has zeros, which add nothing.)
    fn dot(&mut self, sums: usize, rows: usize, columns: usize, add: unsafe fn(&mut [u8; 64], &[u8], &[[u8; 64]])) {
        assert!(sums != rows && sums != columns && rows != columns, "registers {sums}, {rows}, {columns}");
        let [a, b] = [rows, columns].map(|tile| *self.shaped(tile));
        let sums = self.shaped(sums);
        assert_eq!((sums.rows, sums.row_bytes, a.row_bytes), (a.rows, b.row_bytes, 4 * b.rows), "shapes of sums, rows and columns");
        for (sums, a) in sums.bytes.iter_mut().zip(&a.bytes[..a.rows]) {
            // SAFETY: a CPU whose tiles are emulated has the vectors that these functions take.
            unsafe { add(sums, &a[..4 * b.rows], &b.bytes[..b.rows]) }
        }
    }
}

/// Products of even k, and of odd ones, each in a chain of FMA from zero, then their sum, added to `sums`; numbers below 2^-126 are zero.
#[target_feature(enable = "avx512f,avx512dq")]
fn dot_bf16(sums: &mut [u8; 64], row: &[u8], columns: &[[u8; 64]]) {
    let normal = |x| _mm512_mask_and_ps(x, _mm512_fpclass_ps_mask::<0x20>(x), x, _mm512_set1_ps(-0.0));
    let halves = |pairs| {
        let [even, odd] = [_mm512_slli_epi32::<16>(pairs), _mm512_and_si512(pairs, _mm512_set1_epi32(!0xffff))];
        [even, odd].map(|half| normal(_mm512_castsi512_ps(half)))
    };
    let mut dots = [_mm512_setzero_ps(); 2];
    for (pair, columns) in row.chunks(4).zip(columns) {
        let [a, b] = [halves(_mm512_set1_epi32(four(pair))), halves(load(columns))];
        for (i, dot) in dots.iter_mut().enumerate() {
            *dot = normal(_mm512_fmadd_ps(a[i], b[i], *dot));
        }
    }
    let sum = normal(_mm512_castsi512_ps(load(sums)));
    store(sums, _mm512_castps_si512(normal(_mm512_add_ps(sum, normal(_mm512_add_ps(dots[0], dots[1]))))));
}

/// Products of signed bytes of the row and unsigned ones of columns.
#[target_feature(enable = "avx512f,avx512vnni")]
fn dot_int8(sums: &mut [u8; 64], row: &[u8], columns: &[[u8; 64]]) {
    let mut sum = load(sums);
    for (codes, columns) in row.chunks(4).zip(columns) {
        sum = _mm512_dpbusd_epi32(sum, load(columns), _mm512_set1_epi32(four(codes)));
    }
    store(sums, sum);
}

fn four(bytes: &[u8]) -> i32 {
    i32::from_le_bytes(bytes.try_into().unwrap())
}

#[target_feature(enable = "avx512f")]
fn load(from: &[u8; 64]) -> __m512i {
    // SAFETY: there are as many bytes.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
fn store(to: &mut [u8; 64], bytes: __m512i) {
    // SAFETY: there are as many bytes.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), bytes) }
}
