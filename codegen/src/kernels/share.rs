//! How the threads of a step share the work of a region.
//!
//! In: `0..total` units of work (panels of weights, groups of them, rows times groups, rows times keys). Out: the ranges of units that the
//! calling thread does. Every thread has a contiguous share; where cores may not be equally fast ([`Call::offer`]), what is left of a share
//! at its end can be done by others: at the next barrier all wait for the slowest. What a thread then does in parts of equal size is counted
//! by [`in_equal_parts`].

use super::Call;
use crate::llvm::builder::{Cmp, Elem, Fb, Value};
use rcompile_runtime::abi::{CLAIMS_STRIDE, field};

/// The last part, one of so many, of a thread's share of few rows can be done by others: cores that differ by an eighth still end together.
const OPEN_PART: i64 = 8;
/// About so many pieces of it, where they are not too small.
const PIECES: i64 = 8;
/// Of so many threads, itself included, a thread does pieces: each look at another one's line is an exchange between two cores, at the end
/// of every region.
const HELPED: i64 = 8;

/// Can two threads have two pieces each of `total` units?
pub fn two_have_two_pieces(total: u32, least: u32) -> bool {
    total >= 2 * 2 * least
}

/// `total` units in `number` parts whose sizes differ by at most one, so that no small part is left over: `each(part, first, count)`.
pub fn in_equal_parts<'c>(fb: &Fb<'_, 'c>, total: Value<'c>, number: Value<'c>, each: impl Fn(Value<'c>, Value<'c>, Value<'c>)) {
    let (least, more) = (fb.div(total, number), fb.rem(total, number));
    fb.for_(fb.int(0), number, 1, |part| {
        let first = fb.add(fb.mul(part, least), fb.min(part, more));
        each(part, first, fb.add(least, fb.zext(fb.cmp(Cmp::Lt, part, more), Elem::I64)));
    });
}

/// The units of one thread.
struct Share<'c> {
    begin: Value<'c>,
    /// From here on others may do them.
    open: Value<'c>,
    end: Value<'c>,
}

impl<'c> Call<'_, '_, 'c> {
    /// This thread's share of `0..total`: contiguous, sizes differ by at most one.
    pub fn share(&self, total: Value<'c>) -> (Value<'c>, Value<'c>) {
        self.share_of(self.thread, total)
    }

    fn share_of(&self, thread: Value<'c>, total: Value<'c>) -> (Value<'c>, Value<'c>) {
        let fb = self.fb;
        let cut = |thread| fb.div(fb.mul(total, thread), self.threads);
        (cut(thread), cut(fb.add_int(thread, 1)))
    }

    /// All of `0..total` in pieces: `work(begin, end)` first with most of this thread's share, then with pieces of its rest and of what the
    /// next threads have left of theirs, until nothing is left; sometimes with an empty range. `least`: a smaller piece would cost more
    /// than it balances. Two threads that read weights gain 1 %, and 4 % where another process uses one of the cores.
    pub fn share_out(&self, total: u32, least: u32, work: impl FnOnce(Value<'c>, Value<'c>)) {
        let fb = self.fb;
        let units = fb.int(total.into());
        if two_have_two_pieces(total, least * OPEN_PART as u32) {
            return self.offer(units, fb.int(least.into()), (fb.int(1), OPEN_PART)).work(self, work);
        }
        let (begin, end) = self.share(units);
        work(begin, end);
    }

    /// Lets others do the last part, `part.0 / part.1`, of this thread's share of `0..total` where it is slower than they are, in pieces of
    /// `least` units or a multiple of them.
    ///
    /// Each thread counts the pieces that are left of its share on a line of its own ([`StepCtx::claims`](rcompile_runtime::abi::StepCtx)),
    /// which no other core touches before it has nothing left itself, and the pieces of a share follow each other in memory. (With one
    /// counter for all threads every piece cost an exchange of its line and a stream of weights that began anew.) A count is never above 0
    /// between regions, since its thread goes on until it is not; so no one takes pieces of a region that it has left, as long as a barrier
    /// lies between two regions that share out work so. What is offered must be done with `Offer::work`.
    pub fn offer(&self, total: Value<'c>, least: Value<'c>, part: (Value<'c>, i64)) -> Offer<'c> {
        let fb = self.fb;
        let lines = self.pointer_field(field::CLAIMS);
        // Of the smallest share.
        let open = fb.div(fb.mul(fb.div(total, self.threads), part.0), fb.int(part.1));
        let open = fb.mul(fb.div(open, least), least);
        let piece = fb.max(least, fb.mul(fb.div(open, fb.mul_int(least, PIECES)), least));
        let several = fb.and(fb.cmp(Cmp::Lt, fb.int(1), self.threads), fb.not(fb.is_null(lines)));
        let is_shared = fb.and(fb.cmp(Cmp::Le, fb.mul_int(piece, 2), open), several);
        let open = fb.select(is_shared, open, fb.int(0));
        let offer = Offer { total, open, piece, is_shared, lines };
        let own = offer.share(self, self.thread);
        fb.if_(is_shared, || fb.store_shared(offer.pieces(self, &own), offer.line(self, self.thread)));
        offer
    }
}

/// Work of which every thread lets others do the last part of its share.
#[derive(Clone, Copy)]
pub struct Offer<'c> {
    /// Units.
    total: Value<'c>,
    /// Units of a share that others may do; 0 where nothing is shared.
    open: Value<'c>,
    /// Units of a piece.
    piece: Value<'c>,
    /// Is anything shared?
    pub is_shared: Value<'c>,
    /// Of all threads.
    lines: Value<'c>,
}

impl<'c> Offer<'c> {
    fn share(&self, call: &Call<'_, '_, 'c>, thread: Value<'c>) -> Share<'c> {
        let (begin, end) = call.share_of(thread, self.total);
        Share { begin, open: call.fb.sub(end, self.open), end }
    }

    /// Pieces of a share.
    fn pieces(&self, call: &Call<'_, '_, 'c>, share: &Share<'c>) -> Value<'c> {
        let fb = call.fb;
        fb.div(fb.add(fb.sub(share.end, share.open), fb.add_int(self.piece, -1)), self.piece)
    }

    fn line(&self, call: &Call<'_, '_, 'c>, thread: Value<'c>) -> Value<'c> {
        call.fb.index(self.lines, thread, CLAIMS_STRIDE)
    }

    /// `work(begin, end)` first with the part of this thread's share that is its own, then with pieces, until nothing is left.
    pub fn work(&self, call: &Call<'_, '_, 'c>, work: impl FnOnce(Value<'c>, Value<'c>)) {
        let fb = call.fb;
        let own = self.share(call, call.thread);
        let helped = fb.select(self.is_shared, fb.min(call.threads, fb.int(HELPED)), fb.int(0));
        // Whose pieces: this thread's, then those of the threads after it.
        fb.repeat(&[fb.int(0), own.begin, own.open], |state| {
            let [after, begin, end] = state else { unreachable!("as many as carried") };
            work(*begin, *end);
            let thread = fb.rem(fb.add(call.thread, *after), call.threads);
            let line = || self.line(call, thread);
            let some_left =
                fb.if_else(self.is_shared, || vec![fb.cmp(Cmp::Lt, fb.int(0), fb.load_shared(line()))], || vec![fb.bool(false)]);
            let taken = fb.if_else(some_left[0], || vec![fb.fetch_add(line(), fb.int(-1))], || vec![fb.int(0)]);
            let theirs = self.share(call, thread);
            let begin = fb.add(theirs.open, fb.mul(self.piece, fb.sub(self.pieces(call, &theirs), taken[0])));
            let got = fb.cmp(Cmp::Lt, fb.int(0), taken[0]);
            let [begin, end] = [begin, fb.min(fb.add(begin, self.piece), theirs.end)].map(|unit| fb.select(got, unit, fb.int(0)));
            let after = fb.select(got, *after, fb.add_int(*after, 1));
            (fb.cmp(Cmp::Lt, after, helped), vec![after, begin, end])
        });
    }
}
