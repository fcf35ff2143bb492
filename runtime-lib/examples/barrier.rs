//! What a barrier costs: nanoseconds per barrier for some numbers of threads, with a CPU each and as if they had to share.
//!
//! ```text
//! cargo run --release -p rcompile-runtime --example barrier [THREADS,..]      default 1,2 and twice the CPUs
//! taskset -c 0 cargo run ..                                                   on one core
//! ```
//! Threads run a step that is nothing but barriers, as generated code calls them. Rounds of all variants are interleaved, since virtual
//! machines drift; the median and the range are printed.

use rcompile_runtime::abi::StepCtx;
use rcompile_runtime::cpus::Cpus;
use rcompile_runtime::threads::{Pool, rc_barrier};
use std::time::Instant;

const BARRIERS: u32 = 10_000;
const ROUNDS: usize = 15;

unsafe extern "C" fn barriers(ctx: *const StepCtx, thread: u32, threads: u32) {
    // SAFETY: the context is the one below.
    let rows = unsafe { (*ctx).rows };
    for _ in 0..rows {
        // SAFETY: all threads call it, with a context whose barrier is the pool's.
        unsafe { rc_barrier(ctx, thread, threads) };
    }
}

fn main() {
    let available = Cpus::of_process().available;
    let counts: Vec<usize> = match std::env::args().nth(1) {
        Some(list) => list.split(',').map(|n| n.parse().expect("numbers of threads")).collect(),
        None => vec![1, 2, 2 * available],
    };
    let mut variants = Vec::new();
    for &threads in &counts {
        for own_cpus in [true, false] {
            if !(own_cpus && threads > available) && (threads > 1 || own_cpus) {
                let pool = Pool::new(threads, if own_cpus { threads } else { 0 }, None).expect("threads");
                variants.push((threads, own_cpus, pool, Vec::new()));
            }
        }
    }
    for _ in 0..ROUNDS {
        for (_, _, pool, ns) in &mut variants {
            let mut ctx = StepCtx::empty();
            ctx.barrier = pool.barrier();
            ctx.rows = BARRIERS;
            let begin = Instant::now();
            // SAFETY: the step reads nothing but `rows` and the barrier.
            unsafe { pool.run(barriers, &ctx) };
            ns.push(begin.elapsed().as_nanos() as f64 / f64::from(BARRIERS));
        }
    }
    for (threads, own_cpus, _, ns) in &mut variants {
        ns.sort_by(f64::total_cmp);
        let how = if *own_cpus { "a CPU each" } else { "sharing CPUs" };
        println!(
            "{threads:>3} threads on {available} CPUs, {how:<12}: {:.0} ns ({:.0} to {:.0})",
            ns[ns.len() / 2],
            ns[0],
            ns[ns.len() - 1]
        );
    }
}
