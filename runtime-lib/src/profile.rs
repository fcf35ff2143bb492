//! The region clock: how long each region took on each thread, how long threads waited behind it, what that work was, and every
//! single event for a trace.
//!
//! In: a session that was told to measure puts a pointer into `StepCtx::profile`; generated code calls [`rc_profile`] after each
//! region, and the barrier marks its end. Out: [`Profile`]. Without the pointer a step tests it once per region and does nothing
//! else; kernels know nothing of it.
//!
//! A thread's time in a step is cut into laps without gaps: from the step's begin (the caller's clock) to its own start, each region,
//! the wait behind it, and at the end the wait for the last thread. So the laps of every thread add up to the time of the step. A wait is
//! booked on the region before it: it is that region's imbalance, and the barrier's own cost.

use std::collections::BTreeSet;
use std::ffi::c_void;

use crate::abi::{BucketInfo, StepCtx};
use crate::cost::{Load, RegionInfo, Work};

/// Called by generated code after each region, when `ctx.profile` is not null.
///
/// # Safety
/// `ctx` is the context of the running step, and `ctx.profile` is null or of `Profile::begin_step` for its bucket and threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rc_profile(ctx: *const StepCtx, thread: u32, region: u32) {
    // SAFETY: by contract of this function.
    if let Some(clock) = unsafe { Clock::of(ctx, thread) } {
        clock.region(region as usize, monotonic_ns());
    }
}

/// What one thread did in the steps of one bucket. `StepCtx::profile` points to those of all threads, each on cache lines of its own.
#[repr(align(128))]
pub(crate) struct Clock {
    /// The last mark.
    mark_ns: u64,
    /// The last region of this step.
    last: Option<usize>,
    /// Before the first region.
    start_ns: u64,
    regions: Box<[Times]>,
    /// Kept laps, whose memory is there before the first step.
    laps: Vec<Event>,
    laps_max: usize,
    /// Laps that found no room.
    dropped: u64,
}

/// Nanoseconds of a region's work, and of the waits behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Times {
    work: u64,
    wait: u64,
}

impl Clock {
    fn new(regions: usize, laps_max: usize) -> Self {
        let (regions, laps) = (vec![Times::default(); regions].into(), Vec::with_capacity(laps_max));
        Self { mark_ns: 0, last: None, start_ns: 0, regions, laps, laps_max, dropped: 0 }
    }

    /// The running thread's clock, if the step is measured.
    ///
    /// # Safety
    /// As for [`rc_profile`].
    pub(crate) unsafe fn of<'p>(ctx: *const StepCtx, thread: u32) -> Option<&'p mut Clock> {
        // SAFETY: the context is live; each thread takes only its own clock, and only for the length of one call.
        unsafe {
            let clocks = (*ctx).profile.cast::<Clock>();
            (!clocks.is_null()).then(|| &mut *clocks.add(thread as usize))
        }
    }

    fn begin(&mut self, now: u64) {
        (self.mark_ns, self.last) = (now, None);
    }

    /// A region has ended.
    fn region(&mut self, region: usize, now: u64) {
        if region < self.regions.len() {
            self.lap(Doing::Region(region), now);
            self.last = Some(region);
        }
    }

    /// A wait has ended, behind the last region or before the first.
    pub(crate) fn wait(&mut self, now: u64) {
        self.lap(self.last.map_or(Doing::Start, Doing::Wait), now);
    }

    fn lap(&mut self, doing: Doing, now: u64) {
        let begin_ns = std::mem::replace(&mut self.mark_ns, now);
        let took_ns = now - begin_ns;
        match doing {
            Doing::Region(region) => self.regions[region].work += took_ns,
            Doing::Wait(region) => self.regions[region].wait += took_ns,
            Doing::Start => self.start_ns += took_ns,
        }
        self.keep(Event { doing, begin_ns, took_ns });
    }

    fn keep(&mut self, lap: Event) {
        if self.laps.len() < self.laps_max {
            self.laps.push(lap);
        } else {
            self.dropped += 1;
        }
    }

    /// Adds what another clock of the same bucket has measured.
    fn add(&mut self, other: &Clock) {
        self.start_ns += other.start_ns;
        for (sum, times) in self.regions.iter_mut().zip(&other.regions) {
            sum.work += times.work;
            sum.wait += times.wait;
        }
        other.laps.iter().for_each(|lap| self.keep(*lap));
        self.laps.sort_by_key(|lap| lap.begin_ns);
        self.dropped += other.dropped;
    }
}

/// Nanoseconds of the monotonic clock.
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is valid for writing; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// What was measured since [`crate::step::Session::start_profile`].
pub struct Profile {
    buckets: Vec<Bucket>,
    threads: usize,
    spans: Option<Vec<Span>>,
}

/// What was measured of one bucket.
struct Bucket {
    rows: u32,
    regions: Vec<RegionInfo>,
    /// Loads so far by window: a window bounds the positions that a row sees.
    loads: Vec<(Option<u32>, Load)>,
    begin_ns: u64,
    step_ns: u64,
    /// Of each thread.
    clocks: Vec<Clock>,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The thread that ran it alone; none: all threads.
    pub thread: Option<usize>,
    /// Index of its bucket.
    pub bucket: usize,
    /// Rows that it had.
    pub rows: u64,
    /// Begin on the monotonic clock.
    pub begin_ns: u64,
    /// Duration.
    pub took_ns: u64,
}

/// What a thread did for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// The region with this index.
    Region(usize),
    /// Waiting behind the region with this index.
    Wait(usize),
    /// Waking up at the begin of the step.
    Start,
}

/// One lap of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What it was.
    pub doing: Doing,
    /// Begin on the monotonic clock.
    pub begin_ns: u64,
    /// Duration.
    pub took_ns: u64,
}

/// Time and work of one region in one bucket, over all steps.
#[derive(Clone, Debug)]
pub struct RegionTime<'p> {
    /// Which region.
    pub info: &'p RegionInfo,
    /// Calls.
    pub calls: u64,
    /// Nanoseconds of work, by thread.
    pub work_ns: Vec<u64>,
    /// Nanoseconds of waiting behind it, by thread.
    pub wait_ns: Vec<u64>,
    /// What it moved and computed.
    pub work: Work,
}

impl Profile {
    /// Nothing yet; with `events` per thread and bucket that are kept one by one.
    pub(crate) fn new<'b>(buckets: impl Iterator<Item = &'b BucketInfo>, threads: u32, events: usize) -> Self {
        let bucket = |info: &BucketInfo| {
            // The first load is of all positions.
            let windows: BTreeSet<_> = std::iter::once(None).chain(info.regions.iter().map(|r| r.window)).collect();
            let loads = windows.into_iter().map(|w| (w, Load::default())).collect();
            let clocks = (0..threads).map(|_| Clock::new(info.regions.len(), events)).collect();
            Bucket { rows: info.rows, regions: info.regions.clone(), loads, begin_ns: 0, step_ns: 0, clocks }
        };
        Self { buckets: buckets.map(bucket).collect(), threads: threads as usize, spans: (events > 0).then(Vec::new) }
    }

    /// A step begins: what it holds under each window. Returns the context's `profile`.
    pub(crate) fn begin_step(&mut self, bucket: usize, load: impl Fn(Option<u32>) -> Load) -> *mut c_void {
        let bucket = &mut self.buckets[bucket];
        for (window, sum) in &mut bucket.loads {
            *sum += load(*window);
        }
        bucket.begin_ns = monotonic_ns();
        bucket.clocks.iter_mut().for_each(|clock| clock.begin(bucket.begin_ns));
        bucket.clocks.as_mut_ptr().cast()
    }

    /// The step has ended on all threads.
    pub(crate) fn end_step(&mut self, bucket_index: usize, rows: u64) {
        let now = monotonic_ns();
        let bucket = &mut self.buckets[bucket_index];
        let took_ns = now - bucket.begin_ns;
        bucket.step_ns += took_ns;
        bucket.clocks.iter_mut().for_each(|clock| clock.wait(now));
        if let Some(spans) = &mut self.spans {
            spans.push(Span { thread: None, bucket: bucket_index, rows, begin_ns: bucket.begin_ns, took_ns });
        }
    }

    /// Adds steps that `thread` ran alone, in a session of its own, while the other threads did the same.
    ///
    /// A step's time counts as that part of all threads' time that this thread has.
    pub(crate) fn add_thread(&mut self, thread: usize, single: &Profile) {
        for (bucket, of) in self.buckets.iter_mut().zip(&single.buckets) {
            bucket.step_ns += of.step_ns / self.threads as u64;
            for (sum, load) in bucket.loads.iter_mut().zip(&of.loads) {
                sum.1 += load.1;
            }
            of.clocks.iter().for_each(|clock| bucket.clocks[thread].add(clock));
        }
        if let Some(spans) = &mut self.spans {
            spans.extend(single.spans().iter().map(|span| Span { thread: Some(thread), ..*span }));
            spans.sort_by_key(|span| span.begin_ns);
        }
    }

    /// Capacity in rows of each bucket; buckets are counted in this order.
    pub fn buckets(&self) -> impl Iterator<Item = u32> {
        self.buckets.iter().map(|b| b.rows)
    }

    /// What the steps of a bucket held.
    pub fn load(&self, bucket: usize) -> &Load {
        &self.buckets[bucket].loads[0].1
    }

    /// Nanoseconds of all steps of a bucket.
    pub fn step_ns(&self, bucket: usize) -> u64 {
        self.buckets[bucket].step_ns
    }

    /// The regions of a bucket in program order.
    pub fn regions(&self, bucket: usize) -> impl Iterator<Item = RegionTime<'_>> {
        let b = &self.buckets[bucket];
        b.regions.iter().enumerate().map(move |(region, info)| {
            let load = b.loads.iter().find(|l| l.0 == info.window).map_or(&b.loads[0].1, |l| &l.1);
            RegionTime {
                info,
                calls: info.calls() * load.steps,
                work_ns: b.clocks.iter().map(|clock| clock.regions[region].work).collect(),
                wait_ns: b.clocks.iter().map(|clock| clock.regions[region].wait).collect(),
                work: info.work(load),
            }
        })
    }

    /// Nanoseconds before the first region, by thread.
    pub fn start_ns(&self, bucket: usize) -> Vec<u64> {
        self.buckets[bucket].clocks.iter().map(|clock| clock.start_ns).collect()
    }

    /// All work of all steps.
    pub fn work(&self) -> Work {
        let mut total = Work::default();
        (0..self.buckets.len()).flat_map(|b| self.regions(b)).for_each(|r| total += r.work);
        total
    }

    /// Number of steps.
    pub fn steps(&self) -> u64 {
        self.buckets.iter().map(|b| b.loads[0].1.steps).sum()
    }

    /// Threads that were measured.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// All steps in order, if events are kept.
    pub fn spans(&self) -> &[Span] {
        self.spans.as_deref().unwrap_or_default()
    }

    /// Kept laps of one thread in one bucket, in order.
    pub fn events(&self, bucket: usize, thread: usize) -> impl Iterator<Item = Event> + '_ {
        self.buckets[bucket].clocks[thread].laps.iter().copied()
    }

    /// Laps that found no room.
    pub fn dropped(&self) -> u64 {
        self.buckets.iter().flat_map(|b| &b.clocks).map(|clock| clock.dropped).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::tests::bucket;

    #[test]
    fn laps_add_up_and_are_kept_as_long_as_there_is_room() {
        let mut clock = Clock::new(2, 3);
        clock.begin(10);
        clock.wait(12);
        clock.region(1, 15);
        clock.wait(19);
        clock.region(0, 22);
        clock.region(7, 99); // no region of this program
        clock.wait(30);
        assert_eq!((clock.start_ns, &*clock.regions), (2, &[Times { work: 3, wait: 8 }, Times { work: 3, wait: 4 }][..]));
        let lap = |doing, begin_ns, took_ns| Event { doing, begin_ns, took_ns };
        assert_eq!(clock.laps, [lap(Doing::Start, 10, 2), lap(Doing::Region(1), 12, 3), lap(Doing::Wait(1), 15, 4)]);
        assert_eq!(clock.dropped, 2);
    }

    #[test]
    fn laps_of_two_clocks_are_kept_in_order() {
        let [mut one, mut other] = [10, 14].map(|begin| {
            let mut clock = Clock::new(1, 3);
            clock.begin(begin);
            clock.wait(begin + 1);
            clock.region(0, begin + 8);
            clock
        });
        other.wait(30);
        other.wait(31);
        one.add(&other);
        assert_eq!((one.start_ns, &*one.regions), (2, &[Times { work: 14, wait: 9 }][..]));
        assert_eq!(one.laps.iter().map(|lap| lap.begin_ns).collect::<Vec<_>>(), [10, 11, 14]);
        // Two of the three that the other kept, and the one that it did not.
        assert_eq!(one.dropped, 3);
    }

    #[test]
    fn a_region_has_its_own_times_and_the_load_of_its_window() {
        let mut info = bucket(8, 8);
        info.regions.push(RegionInfo { window: Some(3), layers: Some(2), ..info.regions[0].clone() });
        let mut profile = Profile::new([&info].into_iter(), 2, 0);
        profile.begin_step(0, |window| Load { steps: 1, row_positions: window.map_or(100, u64::from), ..Load::default() });
        for (clock, thread) in profile.buckets[0].clocks.iter_mut().zip(0..) {
            clock.begin(10);
            clock.region(0, 11 + thread);
            clock.wait(20);
            clock.region(1, 24 + thread);
            clock.wait(40);
        }
        let regions: Vec<_> = profile.regions(0).map(|r| (r.work_ns, r.wait_ns, r.calls, r.work.flop)).collect();
        assert_eq!(regions, [(vec![1, 2], vec![9, 8], 1, 700), (vec![4, 5], vec![16, 15], 2, 2 * 3 * 7)]);
    }
}
