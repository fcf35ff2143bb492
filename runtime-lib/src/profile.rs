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

use crate::abi::{BucketInfo, StepCtx};
use crate::cost::{Load, RegionInfo, Work};

/// Words at the start of a thread's part: number of regions, capacity for events, events so far (those that found no room included),
/// the last mark on the clock, the last region.
const HEAD: usize = 5;
const REGIONS: usize = 0;
const CAPACITY: usize = 1;
const EVENTS: usize = 2;
const MARK: usize = 3;
const LAST: usize = 4;
/// Words per event: slot, begin, duration.
const EVENT: usize = 3;

/// Called by generated code after each region, when `ctx.profile` is not null.
///
/// # Safety
/// `ctx` is the context of the running step, and `ctx.profile` is null or of `Profile::begin_step` for its bucket and threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rc_profile(ctx: *const StepCtx, thread: u32, region: u32) {
    // SAFETY: by contract of this function.
    if let Some(mut clock) = unsafe { Clock::of(ctx, thread) } {
        clock.region(region as usize, monotonic_ns());
    }
}

/// One thread's part of a profile: head, then for each region the nanoseconds of its work and of the waits behind it, then the same for
/// the time before the first region, then events.
pub(crate) struct Clock<'p>(&'p mut [u64]);

impl Clock<'_> {
    /// The running thread's clock, if the step is measured.
    ///
    /// # Safety
    /// As for [`rc_profile`].
    pub(crate) unsafe fn of<'p>(ctx: *const StepCtx, thread: u32) -> Option<Clock<'p>> {
        // SAFETY: the context is live; each thread takes only its own part, and only for the length of one call.
        unsafe {
            let ctx = &*ctx;
            let stride = ctx.profile_stride as usize;
            (!ctx.profile.is_null()).then(|| Clock(std::slice::from_raw_parts_mut(ctx.profile.add(thread as usize * stride), stride)))
        }
    }

    fn begin(&mut self, now: u64) {
        self.0[MARK] = now;
        self.0[LAST] = self.0[REGIONS];
    }

    /// A region has ended.
    fn region(&mut self, region: usize, now: u64) {
        if (region as u64) < self.0[REGIONS] {
            self.lap(2 * region, now);
            self.0[LAST] = region as u64;
        }
    }

    /// A wait has ended, behind the last region or before the first.
    pub(crate) fn wait(&mut self, now: u64) {
        self.lap(2 * self.0[LAST] as usize + 1, now);
    }

    fn lap(&mut self, slot: usize, now: u64) {
        let begin = std::mem::replace(&mut self.0[MARK], now);
        let took = now - begin;
        self.0[HEAD + slot] += took;
        if self.0[EVENTS] < self.0[CAPACITY] {
            let at = first_event(self.0[REGIONS] as usize) + self.0[EVENTS] as usize * EVENT;
            self.0[at..at + EVENT].copy_from_slice(&[slot as u64, begin, took]);
        }
        self.0[EVENTS] += 1;
    }
}

fn first_event(regions: usize) -> usize {
    HEAD + 2 * (regions + 1)
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
    words: Vec<u64>,
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
            let regions = info.regions.len();
            let stride = first_event(regions) + events * EVENT;
            let mut words = vec![0; stride * threads as usize];
            for part in words.chunks_mut(stride) {
                (part[REGIONS], part[CAPACITY]) = (regions as u64, events as u64);
            }
            let mut windows = vec![None];
            windows.extend(info.regions.iter().filter(|r| r.window.is_some()).map(|r| r.window));
            windows.dedup();
            let loads = windows.into_iter().map(|w| (w, Load::default())).collect();
            Bucket { rows: info.rows, regions: info.regions.clone(), loads, begin_ns: 0, step_ns: 0, words }
        };
        Self { buckets: buckets.map(bucket).collect(), threads: threads as usize, spans: (events > 0).then(Vec::new) }
    }

    /// A step begins: what it holds under each window. Returns the context's `profile` and `profile_stride`.
    pub(crate) fn begin_step(&mut self, bucket: usize, load: impl Fn(Option<u32>) -> Load) -> (*mut u64, u64) {
        let stride = self.stride(bucket);
        let bucket = &mut self.buckets[bucket];
        for (window, sum) in &mut bucket.loads {
            *sum += load(*window);
        }
        bucket.begin_ns = monotonic_ns();
        bucket.words.chunks_mut(stride).for_each(|part| Clock(part).begin(bucket.begin_ns));
        (bucket.words.as_mut_ptr(), stride as u64)
    }

    /// The step has ended on all threads.
    pub(crate) fn end_step(&mut self, bucket_index: usize, rows: u64) {
        let now = monotonic_ns();
        let stride = self.stride(bucket_index);
        let bucket = &mut self.buckets[bucket_index];
        let took_ns = now - bucket.begin_ns;
        bucket.step_ns += took_ns;
        bucket.words.chunks_mut(stride).for_each(|part| Clock(part).wait(now));
        if let Some(spans) = &mut self.spans {
            spans.push(Span { thread: None, bucket: bucket_index, rows, begin_ns: bucket.begin_ns, took_ns });
        }
    }

    /// Adds steps that `thread` ran alone, in a session of its own, while the other threads did the same.
    ///
    /// A step's time counts as that part of all threads' time that this thread has.
    pub(crate) fn add_thread(&mut self, thread: usize, single: &Profile) {
        for (index, of) in single.buckets.iter().enumerate() {
            let stride = self.stride(index);
            let bucket = &mut self.buckets[index];
            bucket.step_ns += of.step_ns / self.threads as u64;
            for (sum, load) in bucket.loads.iter_mut().zip(&of.loads) {
                sum.1 += load.1;
            }
            let part = &mut bucket.words[thread * stride..(thread + 1) * stride];
            let events = first_event(bucket.regions.len());
            for (sum, ns) in part[HEAD..events].iter_mut().zip(&of.words[HEAD..events]) {
                *sum += ns;
            }
            let kept = |part: &[u64]| part[EVENTS].min(part[CAPACITY]) as usize;
            let room = part[CAPACITY] as usize - kept(part);
            let (to, count) = (events + kept(part) * EVENT, kept(&of.words).min(room));
            part[to..to + count * EVENT].copy_from_slice(&of.words[events..events + count * EVENT]);
            part[EVENTS] += of.words[EVENTS];
            let end = events + kept(part) * EVENT;
            let mut laps: Vec<[u64; EVENT]> = part[events..end].as_chunks().0.to_vec();
            laps.sort_by_key(|lap| lap[1]);
            part[events..end].copy_from_slice(laps.as_flattened());
        }
        if let Some(spans) = &mut self.spans {
            spans.extend(single.spans().iter().map(|span| Span { thread: Some(thread), ..*span }));
            spans.sort_by_key(|span| span.begin_ns);
        }
    }

    fn stride(&self, bucket: usize) -> usize {
        self.buckets[bucket].words.len() / self.threads
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
                work_ns: self.slot(bucket, 2 * region),
                wait_ns: self.slot(bucket, 2 * region + 1),
                work: info.work(load),
            }
        })
    }

    /// Nanoseconds before the first region, by thread.
    pub fn start_ns(&self, bucket: usize) -> Vec<u64> {
        self.slot(bucket, 2 * self.buckets[bucket].regions.len() + 1)
    }

    fn slot(&self, bucket: usize, slot: usize) -> Vec<u64> {
        self.buckets[bucket].words.chunks(self.stride(bucket)).map(|part| part[HEAD + slot]).collect()
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
        let stride = self.stride(bucket);
        let regions = self.buckets[bucket].regions.len();
        let part = &self.buckets[bucket].words[thread * stride..(thread + 1) * stride];
        let count = part[EVENTS].min(part[CAPACITY]) as usize;
        part[first_event(regions)..].chunks_exact(EVENT).take(count).map(move |e| {
            let (region, wait) = (e[0] as usize / 2, e[0] % 2 == 1);
            let doing = match wait {
                true if region == regions => Doing::Start,
                true => Doing::Wait(region),
                false => Doing::Region(region),
            };
            Event { doing, begin_ns: e[1], took_ns: e[2] }
        })
    }

    /// Laps that found no room.
    pub fn dropped(&self) -> u64 {
        let parts = (0..self.buckets.len()).flat_map(|b| self.buckets[b].words.chunks(self.stride(b)));
        parts.map(|part| part[EVENTS].saturating_sub(part[CAPACITY])).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::tests::bucket;

    #[test]
    fn laps_add_up_and_are_kept_as_long_as_there_is_room() {
        let (regions, events) = (2, 3);
        let mut part = vec![0; first_event(regions) + events * EVENT];
        (part[REGIONS], part[CAPACITY]) = (regions as u64, events as u64);
        let mut clock = Clock(&mut part);
        clock.begin(10);
        clock.wait(12);
        clock.region(1, 15);
        clock.wait(19);
        clock.region(0, 22);
        clock.region(7, 99); // no region of this program
        clock.wait(30);
        assert_eq!(part[HEAD..first_event(regions)], [3, 8, 3, 4, 0, 2]);
        assert_eq!(part[HEAD..first_event(regions)].iter().sum::<u64>(), 30 - 10);
        assert_eq!(part[first_event(regions)..], [5, 10, 2, 2, 12, 3, 3, 15, 4]);
        assert_eq!(part[EVENTS], 5);
    }

    #[test]
    fn a_region_has_its_own_times_and_the_load_of_its_window() {
        let mut info = bucket(8, 8);
        info.regions.push(RegionInfo { window: Some(3), layers: Some(2), ..info.regions[0].clone() });
        let mut profile = Profile::new([&info].into_iter(), 2, 0);
        let (_, stride) =
            profile.begin_step(0, |window| Load { steps: 1, row_positions: window.map_or(100, u64::from), ..Load::default() });
        for (part, thread) in profile.buckets[0].words.chunks_mut(stride as usize).zip(0..) {
            let mut clock = Clock(part);
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
