//! The thread pool and the barrier of a step.
//!
//! All threads enter a generated step together; thread 0 is the caller. Inside a step they meet at [`rc_barrier`], between
//! steps the workers wait for the next one. Both waits spin for at most 50 us: first with pauses, then giving the CPU to whoever wants
//! it; where there are more threads than CPUs, only the latter, because a thread that pauses would hold the CPU that another one
//! needs. Then they park on a futex; whoever releases them calls the kernel only if someone parked.
//!
//! `examples/barrier.rs` prints what a barrier costs on a machine. Why it waits as it does was measured with two threads of a small C
//! program (one counter, one generation; a virtual machine with two cores of an Emerald Rapids, three runs of 20000 barriers): on one core
//! a barrier takes 0.7 us with yields, 1.8 us when every wait parks, 300 us with pauses; on two cores 0.2 to 0.7 us with yields, 0.2 to 2
//! us with pauses, 2 to 29 us when every wait parks.

use std::io;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{futex, sched_yield};

use crate::abi::{CLAIMS_STRIDE, StepCtx, StepFn};
use crate::cpus::pin_to;
use crate::profile::{Clock, monotonic_ns};

/// Longest wait before parking.
const SPIN: Duration = Duration::from_micros(50);
/// Part of it that does not give the CPU away: most waits are shorter.
const PAUSE: Duration = Duration::from_micros(10);
/// Pauses between two looks at the clock.
const PAUSES: u32 = 32;

/// A value on cache lines of its own: 128 bytes, because neighbouring lines are fetched in pairs.
#[repr(align(128))]
#[derive(Default)]
struct Line<T>(T);

/// A place to wait for a counter to change.
#[derive(Default)]
struct Gate {
    generation: Line<AtomicU32>,
    parked: Line<AtomicU32>,
}

impl Gate {
    fn now(&self) -> u32 {
        self.generation.0.load(Ordering::Acquire)
    }

    fn open(&self) {
        // SeqCst on both sides: either the waiter's count is seen here, or the waiter sees the new generation.
        self.generation.0.fetch_add(1, Ordering::SeqCst);
        if self.parked.0.load(Ordering::SeqCst) > 0 {
            // Waking can fail only for a bad address.
            let _ = futex::wake(&self.generation.0, futex::Flags::PRIVATE, i32::MAX as u32);
        }
    }

    /// Returns when the generation is no longer `seen`; `own_cpu`: no thread that it waits for needs this CPU.
    fn wait(&self, seen: u32, own_cpu: bool) {
        let mut pause = own_cpu;
        // The clock is read late: most waits end within the first pauses.
        let mut begin = None;
        loop {
            for _ in 0..if pause { PAUSES } else { 1 } {
                if self.now() != seen {
                    return;
                }
                if pause { std::hint::spin_loop() } else { sched_yield() }
            }
            let waited = begin.get_or_insert_with(Instant::now).elapsed();
            if waited >= SPIN {
                break;
            }
            pause = own_cpu && waited < PAUSE;
        }
        self.parked.0.fetch_add(1, Ordering::SeqCst);
        while self.generation.0.load(Ordering::SeqCst) == seen {
            // Returns at once when the generation moved, and on signals; the loop looks again in every case.
            let _ = futex::wait(&self.generation.0, futex::Flags::PRIVATE, seen, None);
        }
        self.parked.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Threads that share a counter and a generation. Eight cores of one chiplet or mesh corner exchange lines fast; one line that 96 threads
/// count on takes as many exchanges one after the other.
const CLUSTER: u32 = 8;

/// Threads that count their arrivals on one line and wait for one generation.
#[derive(Default)]
struct Cluster {
    arrived: Line<AtomicU32>,
    gate: Gate,
}

/// The barrier behind `StepCtx::barrier`, in two levels: threads arrive at their cluster, the last of a cluster at the root, and the last
/// of all opens every cluster's gate. The change of the gate's generation is the sense reversal.
pub struct Barrier {
    clusters: Box<[Cluster]>,
    root: Line<AtomicU32>,
    threads: u32,
    own_cpus: bool,
}

impl Barrier {
    /// A barrier for these threads, which have a CPU each or not.
    pub fn new(threads: u32, own_cpus: bool) -> Self {
        let threads = threads.max(1);
        let clusters = (0..threads.div_ceil(CLUSTER)).map(|_| Cluster::default()).collect();
        Self { clusters, root: Line::default(), threads, own_cpus }
    }

    /// Returns when all threads have called it, each with its own number.
    #[inline]
    pub fn wait(&self, thread: u32) {
        if self.threads <= 1 {
            return;
        }
        let index = thread / CLUSTER;
        let cluster = &self.clusters[index as usize];
        let members = CLUSTER.min(self.threads - index * CLUSTER);
        let seen = cluster.gate.now();
        let last_of = |counter: &AtomicU32, count: u32| {
            let last = counter.fetch_add(1, Ordering::AcqRel) + 1 == count;
            if last {
                // For the next round, which begins when the gates open.
                counter.store(0, Ordering::Relaxed);
            }
            last
        };
        let clusters = self.clusters.len() as u32;
        if last_of(&cluster.arrived.0, members) && (clusters == 1 || last_of(&self.root.0, clusters)) {
            self.clusters.iter().for_each(|c| c.gate.open());
        } else {
            cluster.gate.wait(seen, self.own_cpus);
        }
    }
}

/// Meeting point of all threads of a step; generated code calls it between regions.
///
/// # Safety
/// `ctx` is the context of the running step, `ctx.barrier` points to a [`Barrier`], and all `threads` threads call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rc_barrier(ctx: *const StepCtx, thread: u32, threads: u32) {
    if threads > 1 {
        // SAFETY: by contract of this function; the barrier outlives the step.
        unsafe { (*(*ctx).barrier.cast::<Barrier>()).wait(thread) }
        // SAFETY: by contract of this function.
        if let Some(clock) = unsafe { Clock::of(ctx, thread) } {
            clock.wait(monotonic_ns());
        }
    }
}

/// Enters a step as one of its threads.
///
/// # Safety
/// As for [`Pool::run`].
unsafe fn enter(run: StepFn, ctx: *const StepCtx, thread: u32, threads: u32) {
    // SAFETY: by contract of this function.
    unsafe {
        if let Some(clock) = Clock::of(ctx, thread) {
            clock.wait(monotonic_ns());
        }
        run(ctx, thread, threads);
    }
}

/// What the workers share with the caller.
struct Shared {
    start: Gate,
    barrier: Barrier,
    /// See [`StepCtx::claims`].
    claims: Box<[Line<AtomicI64>]>,
    run: Line<AtomicPtr<()>>,
    ctx: AtomicPtr<StepCtx>,
    stop: AtomicBool,
    own_cpus: bool,
    threads: u32,
}

/// Persistent threads that run generated steps.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

/// Bytes of a thread's stack: kernels keep scratch of a few hundred KB there.
pub(crate) const STACK_BYTES: usize = 2 << 20;

/// A thread whose stack no variable (`RUST_MIN_STACK`) makes smaller than its work needs.
pub(crate) fn builder(name: &str) -> std::thread::Builder {
    std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES)
}

impl Pool {
    /// A pool of `threads` threads, the caller's included, on `available` CPUs.
    ///
    /// With `pin`, a list of distinct CPUs, worker `i` is bound to CPU `pin[i]`, and round again behind the list's end. The caller binds
    /// itself if it wants to, and afterwards: workers start with the caller's mask.
    pub fn new(threads: usize, available: usize, pin: Option<&[usize]>) -> io::Result<Self> {
        let own_cpus = threads <= pin.map_or(available, <[usize]>::len);
        let shared = Arc::new(Shared {
            start: Gate::default(),
            barrier: Barrier::new(threads.max(1) as u32, own_cpus),
            claims: (0..threads.max(1)).map(|_| Line::default()).collect(),
            run: Line::default(),
            ctx: AtomicPtr::default(),
            stop: AtomicBool::new(false),
            own_cpus,
            threads: threads.max(1) as u32,
        });
        let mut pool = Self { shared, workers: Vec::with_capacity(threads.saturating_sub(1)) };
        for thread in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let cpu = pin.and_then(|cpus| cpus.iter().cycle().nth(thread)).copied();
            let worker = builder(&format!("step-{thread}")).spawn(move || {
                if let Some(cpu) = cpu {
                    // Without the right to pin, the thread runs unpinned.
                    let _ = pin_to(cpu);
                }
                work(&shared, thread as u32);
            })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Number of threads, the caller's included.
    pub fn threads(&self) -> u32 {
        self.shared.threads
    }

    /// The barrier for `StepCtx::barrier`.
    pub fn barrier(&self) -> *mut std::ffi::c_void {
        ptr::from_ref(&self.shared.barrier).cast_mut().cast()
    }

    /// The counters for `StepCtx::claims`.
    pub fn claims(&self) -> *mut i64 {
        const { assert!(size_of::<Line<AtomicI64>>() == CLAIMS_STRIDE as usize) };
        self.shared.claims.as_ptr().cast_mut().cast()
    }

    /// Runs one step on all threads and returns when all are done.
    ///
    /// # Safety
    /// `run` is a generated step (or obeys the same rules), all pointers of `ctx` are valid for it and for this number of
    /// threads, and `ctx.barrier` and `ctx.claims` are this pool's.
    pub unsafe fn run(&mut self, run: StepFn, ctx: &StepCtx) {
        let threads = self.shared.threads;
        let at = ptr::from_ref(ctx);
        if threads > 1 {
            self.shared.run.0.store(run as *const () as *mut (), Ordering::Relaxed);
            self.shared.ctx.store(at.cast_mut(), Ordering::Relaxed);
            self.shared.start.open();
        }
        // SAFETY: by contract of this function.
        unsafe { enter(run, at, 0, threads) };
        self.shared.barrier.wait(0);
    }

    /// Runs `work(thread)` on every thread and returns when all are done. A panic in `work` ends the process: the others would wait for its
    /// thread.
    pub fn on_each(&mut self, work: &(dyn Fn(usize) + Sync)) {
        let mut ctx = StepCtx::empty();
        ctx.state = ptr::from_ref(&work).cast_mut().cast();
        // SAFETY: `run` looks at `profile`, which is null, and `each` needs nothing of a context but `state`, a reference that lives until
        // `run` returns, to what threads may share.
        unsafe { self.run(each, &ctx) };
    }
}

/// `work(thread)` of [`Pool::on_each`], as a step whose context carries it.
unsafe extern "C" fn each(ctx: *const StepCtx, thread: u32, _: u32) {
    // SAFETY: `Pool::on_each` set `state` to a live reference of this type.
    let work = unsafe { &*(*ctx).state.cast::<&(dyn Fn(usize) + Sync)>() };
    work(thread as usize);
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.start.open();
        for worker in self.workers.drain(..) {
            // A worker that panicked has nothing left to clean up.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, thread: u32) {
    let mut seen = 0;
    loop {
        if shared.start.now() == seen {
            shared.start.wait(seen, shared.own_cpus);
        }
        seen = seen.wrapping_add(1);
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        let run = shared.run.0.load(Ordering::Relaxed);
        let ctx = shared.ctx.load(Ordering::Relaxed);
        // SAFETY: `Pool::run` stored a `StepFn` and a live context before it opened the gate, and it waits for the barrier
        // below before it returns, so both stay valid here.
        unsafe {
            let run = std::mem::transmute::<*mut (), StepFn>(run);
            enter(run, ctx, thread, shared.threads);
        }
        shared.barrier.wait(thread);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    /// Counts arrivals per round; a thread that leaves a barrier early finds a wrong count.
    struct Rounds {
        counts: Vec<AtomicU64>,
        wrong: AtomicU64,
        pause: bool,
    }

    unsafe extern "C" fn rounds(ctx: *const StepCtx, thread: u32, threads: u32) {
        // SAFETY: the test passes a live context whose state is a live `Rounds`.
        let (barrier, rounds) = unsafe { (&*(*ctx).barrier.cast::<Barrier>(), &*(*ctx).state.cast::<Rounds>()) };
        for (round, count) in rounds.counts.iter().enumerate() {
            if rounds.pause && round % threads as usize == thread as usize {
                std::thread::sleep(Duration::from_micros(200));
            }
            count.fetch_add(1, Ordering::Relaxed);
            barrier.wait(thread);
            if count.load(Ordering::Relaxed) % u64::from(threads) != 0 {
                rounds.wrong.fetch_add(1, Ordering::Relaxed);
            }
            barrier.wait(thread);
        }
    }

    fn ctx_with(pool: &Pool, state: &Rounds) -> StepCtx {
        let mut ctx = StepCtx::empty();
        ctx.barrier = pool.barrier();
        ctx.state = ptr::from_ref(state).cast_mut().cast();
        ctx
    }

    #[test]
    fn no_thread_leaves_a_barrier_early() {
        // Up to one cluster, a second one with one thread, three clusters.
        for threads in [1, 2, 3, CLUSTER as usize, CLUSTER as usize + 1, 20] {
            // Yielding, pausing, and waiting longer than either.
            for (available, pause, count) in [(0, false, 300), (64, false, 500), (64, true, 40), (0, true, 40)] {
                let count = if threads > 3 { count / 10 } else { count };
                let state = Rounds { counts: (0..count).map(|_| AtomicU64::new(0)).collect(), wrong: AtomicU64::new(0), pause };
                let mut pool = Pool::new(threads, available, None).unwrap();
                for step in 1..=5 {
                    let ctx = ctx_with(&pool, &state);
                    // SAFETY: `rounds` reads only what `ctx_with` set.
                    unsafe { pool.run(rounds, &ctx) };
                    let expected = step * threads as u64;
                    assert!(state.counts.iter().all(|c| c.load(Ordering::Relaxed) == expected));
                    if step == 3 {
                        std::thread::sleep(Duration::from_millis(1)); // workers park between steps
                    }
                }
                assert_eq!(state.wrong.load(Ordering::Relaxed), 0);
            }
        }
    }

    /// Whoever waits long gives the CPU back, whether it has one of its own or not.
    #[test]
    fn a_long_wait_takes_no_cpu() {
        let cpu = || {
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: writes the time there.
            assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        };
        for own_cpu in [false, true] {
            let gate = Gate::default();
            let seen = gate.now();
            let used = std::thread::scope(|scope| {
                let waiter = scope.spawn(|| {
                    let before = cpu();
                    gate.wait(seen, own_cpu);
                    cpu() - before
                });
                std::thread::sleep(Duration::from_millis(200));
                gate.open();
                waiter.join().unwrap()
            });
            assert!(used < Duration::from_millis(20), "{used:?}");
        }
    }

    #[test]
    fn work_runs_once_on_every_thread() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads, 2, None).unwrap();
            let counts: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(0)).collect();
            for _ in 0..3 {
                pool.on_each(&|thread| _ = counts[thread].fetch_add(1, Ordering::Relaxed));
            }
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 3), "{counts:?}");
        }
    }

    #[test]
    fn a_pool_that_never_ran_stops() {
        drop(Pool::new(4, 4, None).unwrap());
    }

    #[test]
    fn pinned_threads_have_a_cpu_each_where_the_list_has_enough() {
        let own_cpus = |threads, pin: &[usize]| Pool::new(threads, 64, Some(pin)).unwrap().shared.own_cpus;
        assert_eq!([own_cpus(2, &[0]), own_cpus(2, &[0, 1]), own_cpus(1, &[0])], [false, true, true]);
    }
}
