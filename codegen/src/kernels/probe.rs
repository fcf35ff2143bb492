//! Probes: functions that do nothing but read, multiply-add or take dot products, so that an executable can say what share of its CPU
//! it uses. Each uses the instructions, and the vector width, of the kernels of the same build.
//!
//! In: a [`Probe`]. Out: `void rc_probe_<name>(ptr ctx, i32 thread, i32 threads)`; see the ABI for the amounts.

use super::arguments::Arguments;
use super::microkernel::{L1, L2, PAGE, WINDOW_BYTES, WINDOW_PAGES};
use super::{Call, StepArgs, tiles};
use crate::isa::{BF16_TILE_K, Isa, Stream};
use crate::llvm::builder::{Codes, Elem, Fb, ModuleBuilder, Ty, Value, Visibility};
use crate::program::Program;
use rcompile_runtime::abi::{PROBE_MULTIPLY_ADDS, PROBE_READ_BYTES, Probe, field};

/// Bytes that a stream reads per iteration.
const CHUNK: u64 = 256;

/// The function's symbol.
pub fn symbol(probe: Probe) -> String {
    format!("rc_probe_{}", probe.name())
}

/// Probes that make sense for a target.
pub fn probes(isa: &Isa) -> impl Iterator<Item = Probe> {
    let has = |probe: &Probe| match probe {
        Probe::Bf16Dot => isa.bf16_inputs(),
        Probe::Int8Dot => isa.int8_dot(isa.lanes).is_some(),
        _ => true,
    };
    Probe::ALL.into_iter().filter(has)
}

/// Defines the probe's function.
pub fn define(mb: &ModuleBuilder<'_>, program: &Program, probe: Probe) {
    mb.define(&symbol(probe), &StepArgs::types(), None, Visibility::Export, |fb, args| {
        // Probes have no layers.
        let call = Call::new(fb, program, StepArgs::of(args).in_layer(fb.i32(0)));
        let rows = || call.u32_field(field::ROWS);
        let products = |k: u32| u64::from(tiles::SIDE * tiles::SIDE * k);
        let (sum, result) = match probe {
            Probe::Int8Dot if fb.isa().int8_tiles => {
                return tiles::probe(fb, rows(), products(tiles::ROW), |s, r, c| fb.tile_dot_int8(s, r, c));
            }
            Probe::Bf16Dot if fb.isa().bf16_tiles => {
                return tiles::probe(fb, rows(), products(BF16_TILE_K), |s, r, c| fb.tile_dot_bf16(s, r, c));
            }
            Probe::Read1 => read(&call, 1),
            Probe::Read4 => read(&call, 4),
            Probe::F32 => multiply(&call, 1, |fb, a, b, sum| fb.fma(a, b, sum)),
            Probe::Int8Dot if fb.isa().int8_mmla => {
                let (codes, ints) = (Ty::vec(Elem::I8, 16), Ty::vec(Elem::I32, 4));
                multiply(&call, 8, |fb, a, b, sum| {
                    let ints = fb.smmla(fb.bitcast(sum, ints), fb.bitcast(a, codes), fb.bitcast(b, codes));
                    fb.bitcast(ints, sum.ty())
                })
            }
            // The fewest instructions: nibbles, whose sums stay words (signed bytes take twice as many).
            Probe::Int8Dot if fb.isa().dots_in_pairs() => {
                let (ints, words) = (Ty::vec(Elem::I32, fb.lanes()), Ty::vec(Elem::I16, 2 * fb.lanes()));
                // LLVM would take products of what does not change out of the loop.
                multiply(&call, 4, |fb, a, _, sum| {
                    let words = fb.dot_nibbles(fb.bitcast(sum, words), fb.bitcast(a, ints), fb.bitcast(sum, ints));
                    fb.bitcast(words, sum.ty())
                })
            }
            Probe::Int8Dot => {
                let ints = Ty::vec(Elem::I32, fb.lanes());
                multiply(&call, 4, |fb, a, b, sum| {
                    let [a, b, sums] = [a, b, sum].map(|v| fb.bitcast(v, ints));
                    fb.bitcast(fb.dot_int8(sums, a, b, Codes::Nibbles), sum.ty())
                })
            }
            Probe::Bf16Dot if fb.isa().bf16_mmla => {
                let eight = Ty::vec(Elem::Bf16, 8);
                multiply(&call, 4, |fb, a, b, sum| fb.bfmmla(sum, fb.bitcast(a, eight), fb.bitcast(b, eight)))
            }
            Probe::Bf16Dot => {
                let words = Ty::vec(Elem::I32, fb.lanes());
                multiply(&call, 2, |fb, a, b, sum| fb.dot_bf16(sum, fb.bitcast(a, words), fb.bitcast(b, words)))
            }
        };
        // Scratch keeps what nobody wants, so that LLVM keeps the loop.
        let total = result.into_iter().reduce(sum).expect("accumulators");
        fb.store(total, call.private(), 4 * fb.lanes());
    });
}

type Reduce<'s, 'c> = Box<dyn Fn(Value<'c>, Value<'c>) -> Value<'c> + 's>;

/// The thread's share of the blocks, in `streams` streams.
fn read<'s, 'c>(call: &Call<'s, '_, 'c>, streams: u64) -> (Reduce<'s, 'c>, Vec<Value<'c>>) {
    let fb = call.fb;
    let (begin, end) = call.share(call.u32_field(field::ROWS));
    let vector = Ty::vec(Elem::I32, fb.lanes());
    let vector_bytes = u64::from(fb.lanes()) * 4;
    let start = fb.index(call.pointer_field(field::WEIGHTS), begin, PROBE_READ_BYTES);
    let stream_bytes = fb.mul_int(fb.sub(end, begin), (PROBE_READ_BYTES / streams) as i64);
    let zeros = vec![fb.zero(vector); 8];
    let sums_as = |reading: &Stream| {
        fb.loop_(fb.int(0), stream_bytes, CHUNK as i64, &zeros, |offset, sums| {
            let mut sums = sums.to_vec();
            for stream in 0..streams {
                let stream_start = fb.offset(start, fb.mul_int(stream_bytes, stream as i64));
                let at = fb.offset(stream_start, offset);
                if streams == 1 {
                    // The lines of a chunk come from all pages of the next window in turns, as in matmuls that ask for them 4 KB ahead and
                    // more.
                    let window = fb.and(offset, fb.int(-(WINDOW_BYTES as i64)));
                    let line = fb.lshr(fb.sub(offset, window), WINDOW_PAGES.trailing_zeros());
                    let next = fb.offset(stream_start, fb.add(window, line));
                    (0..WINDOW_PAGES).for_each(|page| fb.prefetch(fb.offset_const(next, WINDOW_BYTES + u64::from(page * PAGE)), L2));
                } else {
                    // As far ahead as a matmul of a single row asks for them.
                    for (ahead, cache) in [(reading.ahead.l2, L2), (reading.ahead.l1, L1)].into_iter().filter(|(ahead, _)| *ahead > 0) {
                        (0..CHUNK / 64).for_each(|line| fb.prefetch(fb.offset_const(at, u64::from(ahead) + line * 64), cache));
                    }
                }
                for part in 0..CHUNK / vector_bytes {
                    let words = fb.load(vector, fb.offset_const(at, part * vector_bytes), 64.min(vector_bytes as u32));
                    let sum = &mut sums[((stream * 4 + part) % 8) as usize];
                    *sum = fb.xor(*sum, words);
                }
            }
            sums
        })
    };
    let isa = fb.isa();
    // A single stream is read alike on all of them.
    let by_cpu: Vec<_> = isa.streams_by_cpu.iter().filter(|_| streams > 1).map(|(kind, streams)| (*kind, streams.row)).collect();
    let sums = call.dispatch_by_cpu(&isa.streams.row, &by_cpu, &sums_as);
    (Box::new(|a, b| fb.xor(a, b)), sums)
}

/// Independent chains of one instruction that does `per_lane` multiply-adds in every lane.
fn multiply<'s, 'm, 'c>(
    call: &Call<'s, 'm, 'c>,
    per_lane: u64,
    step: impl Fn(&Fb<'m, 'c>, Value<'c>, Value<'c>, Value<'c>) -> Value<'c>,
) -> (Reduce<'s, 'c>, Vec<Value<'c>>) {
    let fb = call.fb;
    let lanes = u64::from(fb.lanes());
    // Enough to hide the latency (4 to 6 cycles, 2 to 4 instructions per cycle), few enough for the registers.
    let chains = if fb.isa().registers >= 32 { 24 } else { 12 };
    let count = PROBE_MULTIPLY_ADDS / (chains * lanes * per_lane);
    assert_eq!(count * chains * lanes * per_lane, PROBE_MULTIPLY_ADDS, "a whole number of iterations");
    // An operand that LLVM does not know: from scratch, made a little more than 1 as f32 and as two bf16 (odd values may be slow).
    let words = fb.load(Ty::vec(Elem::I32, lanes as u32), call.private(), 4);
    let splat = |bits: i64| fb.splat(fb.int_of(Elem::I32, bits), lanes as u32);
    let a = fb.bitcast(fb.or(fb.and(words, splat(0x003f_003f)), splat(0x3f80_3f80)), Ty::vec(Elem::F32, lanes as u32));
    let zeros = vec![fb.zero(Ty::vec(Elem::F32, lanes as u32)); chains as usize];
    let total = fb.mul_int(call.u32_field(field::ROWS), count as i64);
    let sums = fb.loop_(fb.int(0), total, 1, &zeros, |_, sums| sums.iter().map(|&sum| step(fb, a, a, sum)).collect());
    (Box::new(|a, b| fb.add(a, b)), sums)
}
