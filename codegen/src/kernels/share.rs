//! How the threads of a step share the work of a region.
//!
//! In: `0..total` units of work (panels of weights, groups of them, rows times groups). Out: the ranges of units that the calling thread
//! does. Every thread has a contiguous share; where cores may not be equally fast ([`Call::share_out`]), what is left of a share at its end
//! can be done by others.

use super::Call;
use crate::llvm::builder::{Cmp, Value};
use rcompile_runtime::abi::{CLAIMS_STRIDE, field};

/// The last part, one of so many, of a thread's share can be done by others: cores that differ by an eighth still end together.
const OPEN_PART: i64 = 8;
/// Pieces of it, where they are not too small.
const PIECES: i64 = 8;
/// Of so many threads, itself included, a thread does pieces: each look at another one's line is an exchange between two cores, at the end
/// of every region.
const HELPED: i64 = 8;

/// The units of one thread.
struct Share<'c> {
    begin: Value<'c>,
    /// From here on others may do them.
    open: Value<'c>,
    end: Value<'c>,
}

impl<'c> Call<'_, '_, 'c> {
    /// This thread's piece of `0..total`: contiguous, sizes differ by at most one.
    pub fn share(&self, total: Value<'c>) -> (Value<'c>, Value<'c>) {
        self.share_of(self.thread, total)
    }

    fn share_of(&self, thread: Value<'c>, total: Value<'c>) -> (Value<'c>, Value<'c>) {
        let fb = self.fb;
        let cut = |thread| fb.div(fb.mul(total, thread), self.threads);
        (cut(thread), cut(fb.add_int(thread, 1)))
    }

    /// All of `0..total` in pieces: `work(begin, end)` first with most of this thread's share, then with pieces of its rest and of what the
    /// next threads have left of theirs, until nothing is left; sometimes with an empty range. Threads are not equally fast, and at the
    /// next barrier all wait for the slowest: two threads that read weights gain 1 %, and 4 % where another process uses one of the cores.
    /// `least`: a smaller piece would cost more than it balances. (Blocks of rows and panels lose: what one piece brings to L2 for the next
    /// is lost. BERT and GPT-2 with 128 rows and two threads on Zen 4 were 3 to 5 % slower so, medians of six.)
    ///
    /// Each thread counts the pieces that are left of its share on a line of its own ([`StepCtx::claims`](rcompile_runtime::abi::StepCtx)),
    /// which no other core touches before it has nothing left itself, and the pieces of a share follow each other in memory. (With one
    /// counter for all threads every piece cost an exchange of its line and a stream of weights that began anew.) A count is never above 0
    /// between regions, since its thread goes on until it is not; so no one takes pieces of a region that it has left, as long as a barrier
    /// lies between two regions that share out work so.
    pub fn share_out(&self, total: u32, least: u32, work: impl FnOnce(Value<'c>, Value<'c>)) {
        let fb = self.fb;
        let (total, least) = (i64::from(total), i64::from(least));
        // No two threads have two pieces each.
        if total < 2 * 2 * least * OPEN_PART {
            let (begin, end) = self.share(fb.int(total));
            return work(begin, end);
        }
        let lines = self.pointer_field(field::CLAIMS);
        let line = |thread| fb.index(lines, thread, CLAIMS_STRIDE);
        // Of the smallest share.
        let open_units = fb.div(fb.int(total / OPEN_PART), self.threads);
        let piece = fb.max(fb.int(least), fb.div(open_units, fb.int(PIECES)));
        let fits = fb.cmp(Cmp::Le, fb.mul_int(piece, 2), open_units);
        let several = fb.cmp(Cmp::Lt, fb.int(1), self.threads);
        let shared = fb.and(fb.and(fits, several), fb.not(fb.is_null(lines)));
        let share = |thread| {
            let (begin, end) = self.share_of(thread, fb.int(total));
            Share { begin, open: fb.select(shared, fb.sub(end, open_units), end), end }
        };
        let pieces = |share: &Share<'c>| fb.div(fb.add(fb.sub(share.end, share.open), fb.add_int(piece, -1)), piece);

        let own = share(self.thread);
        fb.if_(shared, || fb.store_shared(pieces(&own), line(self.thread)));
        let helped = fb.select(shared, fb.min(self.threads, fb.int(HELPED)), fb.int(0));
        // Whose pieces: this thread's, then those of the threads after it.
        fb.repeat(&[fb.int(0), own.begin, own.open], |state| {
            let [after, begin, end] = state else { unreachable!("as many as carried") };
            work(*begin, *end);
            let thread = fb.rem(fb.add(self.thread, *after), self.threads);
            let left = || fb.load_shared(line(thread));
            let some_left = fb.if_else(shared, || vec![fb.cmp(Cmp::Lt, fb.int(0), left())], || vec![fb.bool(false)]);
            let taken = fb.if_else(some_left[0], || vec![fb.fetch_add(line(thread), fb.int(-1))], || vec![fb.int(0)]);
            let theirs = share(thread);
            let begin = fb.add(theirs.open, fb.mul(piece, fb.sub(pieces(&theirs), taken[0])));
            let got = fb.cmp(Cmp::Lt, fb.int(0), taken[0]);
            let [begin, end] = [begin, fb.min(fb.add(begin, piece), theirs.end)].map(|unit| fb.select(got, unit, fb.int(0)));
            let after = fb.select(got, *after, fb.add_int(*after, 1));
            (fb.cmp(Cmp::Lt, after, helped), vec![after, begin, end])
        });
    }
}
