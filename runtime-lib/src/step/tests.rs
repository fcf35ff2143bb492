use super::*;
use crate::abi::{GenerationInfo, StateInfo, Task};
use crate::cost::{Arithmetic, Linear, RegionInfo, RegionKind};
use crate::decode::{DecodeError, Decoder};
use crate::encode::{EncodeError, Encoder};
use crate::profile::{Doing, rc_profile};
use crate::threads::rc_barrier;

pub(crate) const VOCAB: u32 = 11;
const HIDDEN: usize = 3;
const CTX: u32 = 600;

/// A model that one can check by hand: `state[slot][kv_index] = token + 1`, and the logits of a row are, per vocabulary id,
/// how often it occurs in the positions that the row sees, plus 1000 x bucket in element 0.
///
/// Work is shared as generated code does it: all threads write, meet, and then take every `threads`-th tile.
unsafe fn fake_decoder(ctx: *const StepCtx, thread: u32, threads: u32, bucket: u32) {
    // SAFETY: the session passes a context with the tables and areas that `StepCtx` states.
    unsafe {
        let c = &*ctx;
        assert_eq!(c.cpu, crate::cpu::kind());
        let (t, n) = (thread as usize, threads as usize);
        let state = c.state.cast::<i32>();
        let stride = c.pages_per_slot as usize * 256;
        for row in (t..c.rows as usize).step_by(n) {
            let (slot, at) = (*c.slot.add(row) as usize, *c.kv_index.add(row) as usize);
            let page = *c.page_table.add(slot * c.pages_per_slot as usize + at / 256) as usize;
            assert_eq!(page, slot * c.pages_per_slot as usize + at / 256);
            *state.add(slot * stride + at) = *c.token.add(row) + 1;
        }
        rc_profile(ctx, thread, 0);
        rc_barrier(ctx, thread, threads);
        // Thread-private scratch holds the counts of the row at hand.
        let counts = c.private.add(t * c.private_stride as usize).cast::<i32>();
        for tile in (t..c.tiles as usize).step_by(n) {
            let tile = *c.tile.add(tile);
            for row in tile.row_begin..tile.row_begin + tile.row_count {
                assert_eq!(*c.slot.add(row as usize), tile.slot);
                let wanted = (0..c.logit_rows as usize).find(|&i| *c.logit_row.add(i) == row);
                let seen = *c.kv_index.add(row as usize) + 1;
                assert!(seen <= tile.key_end);
                for id in 0..VOCAB as usize {
                    *counts.add(id) = 0;
                }
                for at in 0..seen as usize {
                    let token = *state.add(tile.slot as usize * stride + at) - 1;
                    *counts.add(token as usize) += 1;
                }
                if let Some(index) = wanted {
                    let out = c.output.add(index * 16);
                    for id in 0..VOCAB as usize {
                        *out.add(id) = *counts.add(id) as f32;
                    }
                    *out += (bucket * 1000) as f32;
                }
            }
        }
    }
}

/// Pooled vector `v` of a run: (run, tokens summed, key_end of its tiles) * (v + 1).
unsafe fn fake_encoder(ctx: *const StepCtx, thread: u32, threads: u32) {
    // SAFETY: as above.
    unsafe {
        let c = &*ctx;
        for run in (thread as usize..c.runs as usize).step_by(threads as usize) {
            let rows = *c.run_begin.add(run)..*c.run_begin.add(run + 1);
            let sum: i32 = rows.clone().map(|r| *c.token.add(r as usize)).sum();
            let tiles = (0..c.tiles as usize).map(|t| *c.tile.add(t));
            let key_ends: Vec<i32> = tiles.filter(|t| rows.contains(&t.row_begin)).map(|t| t.key_end).collect();
            assert!(key_ends.iter().all(|&k| k == rows.len() as i32));
            for vector in 0..POOLED_VECTORS {
                let out = c.output.add((run * POOLED_VECTORS + vector) * 16);
                let scale = (vector + 1) as f32;
                *out = *c.slot.add(rows.start as usize) as f32 * scale;
                *out.add(1) = sum as f32 * scale;
                *out.add(2) = rows.len() as f32 * scale;
            }
        }
        rc_barrier(ctx, thread, threads);
    }
}

macro_rules! decoder_bucket {
    ($name:ident, $rows:literal) => {
        unsafe extern "C" fn $name(ctx: *const StepCtx, thread: u32, threads: u32) {
            // SAFETY: passed on.
            unsafe { fake_decoder(ctx, thread, threads, $rows) }
        }
    };
}
decoder_bucket!(decoder_1, 1);
decoder_bucket!(decoder_8, 8);
decoder_bucket!(decoder_64, 64);
unsafe extern "C" fn encoder_step(ctx: *const StepCtx, thread: u32, threads: u32) {
    // SAFETY: passed on.
    unsafe { fake_encoder(ctx, thread, threads) }
}

pub(crate) fn bucket(rows: u32, logit_rows: u32) -> BucketInfo {
    let region = RegionInfo {
        name: "write".into(),
        kind: RegionKind::Attention,
        arithmetic: Arithmetic::F32,
        layers: None,
        window: None,
        barrier: true,
        units: Linear::per_step(1),
        passes: None,
        weight_bytes: Linear::per_step(100),
        kv_bytes: Linear { per_run_position: 10, ..Linear::default() },
        activation_bytes: Linear::default(),
        private_bytes: Linear::default(),
        flop: Linear { per_row_position: 7, ..Linear::default() },
    };
    BucketInfo { rows, logit_rows, tile_rows: 4, arena_bytes: 64, private_bytes: 128, regions: vec![region], barriers_per_layer: 1 }
}

pub(crate) fn manifest(entries: Vec<EntryInfo>, slots: u32) -> Manifest {
    let pages_per_slot = CTX.div_ceil(256);
    Manifest {
        rcompile_version: "0".into(),
        name: "fake".into(),
        architecture: "Fake".into(),
        task: Task::Generate,
        target: String::new(),
        cpu: String::new(),
        features: Vec::new(),
        cores: 1,
        ctx_size: CTX,
        slots,
        dtype: "f32".into(),
        compute: "f32".into(),
        kv_dtype: "f32".into(),
        quantization: "none".into(),
        vocab_size: VOCAB,
        hidden_size: HIDDEN as u32,
        parameters: 0,
        entries,
        state: StateInfo { bytes: u64::from(slots * pages_per_slot * 256 * 4), bytes_per_token: 4, pages_per_slot, persistent: true },
        weight_bytes: 0,
        inputs: Vec::new(),
        text: None,
        generation: GenerationInfo::default(),
        pooling: None,
        notes: Vec::new(),
    }
}

pub(crate) fn entry(name: &str, output: OutputKind, buckets: Vec<BucketInfo>) -> EntryInfo {
    EntryInfo { name: name.into(), buckets, output_stride: 16, output }
}

const STEPS: [StepEntry; 3] = [
    StepEntry { bucket: 1, entry: 0, run: Some(decoder_1) },
    StepEntry { bucket: 8, entry: 0, run: Some(decoder_8) },
    StepEntry { bucket: 64, entry: 0, run: Some(decoder_64) },
];

pub(crate) fn decoder_session(buckets: &[u32], slots: u32, threads: usize) -> Session<'static> {
    let buckets = buckets.iter().map(|&rows| bucket(rows, rows.min(16))).collect();
    let manifest = manifest(vec![entry("step", OutputKind::Logits, buckets)], slots);
    // SAFETY: the fakes obey the ABI within these sizes.
    let program = unsafe { Program::new(&manifest, 0, &STEPS, &[]) }.unwrap();
    Session::new(program, Pool::new(threads, 2, None).unwrap()).unwrap()
}

pub(crate) fn encoder(slots: u32, threads: usize, state_bytes: u64) -> Encoder<'static> {
    encoder_of(vec![bucket(16, 4)], slots, threads, state_bytes)
}

pub(crate) fn encoder_of(buckets: Vec<BucketInfo>, slots: u32, threads: usize, state_bytes: u64) -> Encoder<'static> {
    let steps: Vec<_> = buckets.iter().map(|b| StepEntry { bucket: b.rows, entry: 0, run: Some(encoder_step) }).collect();
    let mut manifest = manifest(vec![entry("encode", OutputKind::Pooled, buckets)], slots);
    manifest.state.bytes = state_bytes;
    // SAFETY: the fakes obey the ABI within these sizes.
    let program = unsafe { Program::new(&manifest, 0, &steps, &[]) }.unwrap();
    Encoder::new(Session::new(program, Pool::new(threads, 2, None).unwrap()).unwrap())
}

pub(crate) fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 7 + 3) % VOCAB).collect()
}

fn counts(tokens: &[u32]) -> Vec<f32> {
    let mut counts = vec![0.0; VOCAB as usize];
    for &t in tokens {
        counts[t as usize] += 1.0;
    }
    counts
}

fn without_bucket(logits: &[f32]) -> Vec<f32> {
    let mut logits = logits.to_vec();
    logits[0] %= 1000.0;
    logits
}

#[test]
fn every_length_bucket_set_and_thread_count_gives_the_same() {
    for threads in 1..=3 {
        for buckets in [&[1][..], &[1, 8, 64], &[8], &[64]] {
            for length in [1, 2, 7, 8, 9, 63, 64, 65, 130, 300] {
                let mut decoder = Decoder::new(decoder_session(buckets, 2, threads));
                let tokens = tokens(length);
                decoder.feed(1, &tokens).unwrap();
                assert_eq!(without_bucket(decoder.logits(0)), counts(&tokens));
                assert_eq!(decoder.slots().len(1), length);
            }
        }
    }
}

#[test]
fn the_smallest_bucket_that_holds_the_step_runs() {
    let mut decoder = Decoder::new(decoder_session(&[1, 8, 64], 1, 2));
    for (length, bucket) in [(1, 1.0), (2, 8.0), (8, 8.0), (9, 64.0), (65, 1.0)] {
        decoder.truncate(0, 0);
        decoder.feed(0, &tokens(length)).unwrap();
        assert_eq!((decoder.logits(0)[0] / 1000.0).floor(), bucket, "{length}");
    }
}

#[test]
fn rows_that_want_logits_are_bounded_per_step() {
    // Bucket 64 allows 16 rows with logits: scoring goes in steps of 16, which still use bucket 64.
    let mut decoder = Decoder::new(decoder_session(&[1, 8, 64], 1, 2));
    let tokens = tokens(40);
    let mut seen = 0;
    decoder
        .score(0, &tokens, |i, logits| {
            assert_eq!(without_bucket(logits), counts(&tokens[..=i]));
            seen += 1;
        })
        .unwrap();
    assert_eq!(seen, 40);
    let mut rows = RowTable::default();
    for position in 0..17 {
        rows.push(Row { token: 0, slot: 0, position, kv_index: position, segment: 0, wants_logits: true });
    }
    let error = decoder.session().step(&rows).unwrap_err();
    assert!(matches!(error, StepError::TooLarge { outputs: 17, max_outputs: 16, .. }));
}

#[test]
fn sequences_side_by_side_do_not_meet() {
    let mut decoder = Decoder::new(decoder_session(&[1, 8, 64], 20, 2));
    for slot in 0..20 {
        decoder.feed(slot, &tokens(slot + 1)).unwrap();
    }
    // More than 16 at once are split into two steps.
    let next: Vec<_> = (0..20).rev().map(|slot| (slot, 5)).collect();
    let mut seen = 0;
    decoder
        .advance(&next, |i, logits| {
            let slot = next[i].0;
            let mut expected = counts(&tokens(slot + 1));
            expected[5] += 1.0;
            assert_eq!(without_bucket(logits), expected);
            seen += 1;
        })
        .unwrap();
    assert_eq!(seen, 20);
}

#[test]
fn a_rolled_back_slot_continues_elsewhere() {
    let mut decoder = Decoder::new(decoder_session(&[1, 8], 1, 1));
    decoder.feed(0, &[1, 2, 3, 4]).unwrap();
    decoder.truncate(0, 2);
    decoder.feed(0, &[9]).unwrap();
    assert_eq!(without_bucket(decoder.logits(0)), counts(&[1, 2, 9]));
}

#[test]
fn what_is_out_of_range_never_reaches_generated_code() {
    let mut decoder = Decoder::new(decoder_session(&[1, 8], 1, 1));
    let error = decoder.feed(0, &[VOCAB]).unwrap_err();
    assert!(matches!(error, DecodeError::Step(StepError::Token { id: 11, vocab: 11 })));
    assert_eq!(decoder.slots().len(0), 0);
    assert!(decoder.feed(0, &[u32::MAX]).is_err());
    let error = decoder.feed(0, &vec![0; CTX as usize + 1]).unwrap_err();
    assert!(error.to_string().contains("601") && error.to_string().contains("600"));
    decoder.feed(0, &vec![0; CTX as usize]).unwrap();
    assert!(matches!(decoder.feed(0, &[0]), Err(DecodeError::Full(_))));
    let mut rows = RowTable::default();
    assert!(decoder.session().step(&rows).is_err());
    rows.push(Row { token: 0, slot: 1, position: 0, kv_index: 0, segment: 0, wants_logits: false });
    assert!(decoder.session().step(&rows).is_err());
    for (position, kv_index, name) in [(CTX, 0, "position"), (0, CTX, "KV index")] {
        rows.clear();
        rows.push(Row { token: 0, slot: 0, position, kv_index, segment: 0, wants_logits: false });
        let error = decoder.session().step(&rows).unwrap_err();
        assert!(matches!(error, StepError::Bound { what, found: CTX, bound: CTX } if what == name), "{error}");
    }
}

/// Two threads would write to one place, or read what another writes.
#[test]
fn rows_of_a_step_never_meet() {
    let mut decoder = decoder_session(&[1, 8], 3, 2);
    let mut encoder = encoder(3, 2, 4096);
    let step = |session: &mut Session, places: &[(u32, u32)]| {
        let mut rows = RowTable::default();
        for &(slot, kv_index) in places {
            rows.push(Row { token: 0, slot, position: kv_index, kv_index, segment: 0, wants_logits: false });
        }
        session.step(&rows)
    };
    let at = |session: &mut Session, places: &[(u32, u32)]| match step(session, places) {
        Err(StepError::Order { slot, kv_index }) => Some((slot, kv_index)),
        done => {
            done.unwrap();
            None
        }
    };
    assert_eq!(at(&mut decoder, &[(0, 0), (0, 0)]), Some((0, 0)));
    assert_eq!(at(&mut decoder, &[(2, 7), (1, 7), (0, 7), (1, 7)]), Some((1, 7)));
    assert_eq!(at(&mut decoder, &[(1, 4), (1, 5), (0, 0), (1, 4)]), Some((1, 4)));
    assert_eq!(at(&mut decoder, &[(0, 1), (0, 0)]), Some((0, 0)));
    // A slot may go on behind others, and each step may go back.
    for _ in 0..2 {
        assert_eq!(at(&mut decoder, &[(1, 0), (2, 0), (0, 599), (1, 1)]), None);
    }
    // Texts see each other's rows in one slot.
    assert_eq!(at(encoder.session(), &[(0, 0), (1, 0), (0, 1)]), Some((0, 1)));
    assert_eq!(at(encoder.session(), &[(0, 0), (0, 1), (1, 0), (0, 0)]), Some((0, 0)));
    assert_eq!(at(encoder.session(), &[(1, 0), (1, 1), (0, 0)]), None);
}

/// How many rows a table of segments has is not known here, but that it has one.
#[test]
fn there_is_one_segment() {
    let step = |session: &mut Session, segment: u32| {
        let mut rows = RowTable::default();
        rows.push(Row { token: 0, slot: 0, position: 0, kv_index: 0, segment, wants_logits: false });
        session.step(&rows)
    };
    let mut decoder = decoder_session(&[1], 1, 1);
    let mut encoder = encoder(1, 1, 4096);
    for session in [&mut decoder, encoder.session()] {
        step(session, 0).unwrap();
        for segment in [1, 2, 70_000, u32::MAX] {
            let error = step(session, segment).err();
            assert!(matches!(error, Some(StepError::Bound { what: "segment", bound: 1, .. })), "{segment}: {error:?}");
        }
    }
}

#[test]
fn a_refused_advance_takes_no_position() {
    let mut decoder = Decoder::new(decoder_session(&[1, 8], 3, 1));
    decoder.feed(0, &tokens(4)).unwrap();
    decoder.feed(1, &vec![0; CTX as usize]).unwrap();
    let lengths = |decoder: &Decoder| [0, 1, 2].map(|slot| decoder.slots().len(slot));
    let before = lengths(&decoder);
    // A token that does not exist, in a slot that occurs twice; then a slot that is full.
    let error = decoder.advance(&[(2, 1), (0, 1), (2, VOCAB)], |_, _| panic!()).unwrap_err();
    assert!(matches!(error, DecodeError::Step(StepError::Token { .. })));
    assert_eq!(lengths(&decoder), before);
    let error = decoder.advance(&[(0, 1), (1, 1), (2, 1)], |_, _| panic!()).unwrap_err();
    assert!(matches!(error, DecodeError::Full(_)));
    assert_eq!(lengths(&decoder), before);
    decoder.advance(&[(0, 9)], |_, logits| assert_eq!(logits[9], counts(&tokens(4))[9] + 1.0)).unwrap();
}

#[test]
fn tiles_stay_inside_runs_and_end_at_their_last_key() {
    let mut rows = RowTable::default();
    for (slot, range) in [(2, 10..16), (0, 0..1), (1, 300..303)] {
        for position in range {
            rows.push(Row { token: 0, slot, position, kv_index: position, segment: 0, wants_logits: false });
        }
    }
    let mut tiles = Vec::new();
    let tile = |row_begin, row_count, slot, key_end| Tile { row_begin, row_count, slot, key_end };
    cut_tiles(&mut tiles, &[0, 6, 7, 10], &rows, 4, false);
    assert_eq!(tiles, [tile(0, 4, 2, 14), tile(4, 2, 2, 16), tile(6, 1, 0, 1), tile(7, 3, 1, 303)]);
    cut_tiles(&mut tiles, &[0, 6, 7, 10], &rows, 4, true);
    assert_eq!(tiles[0], tile(0, 4, 2, 16));
}

#[test]
fn texts_are_put_together_and_shared_out_to_threads() {
    for (slots, threads) in [(1, 1), (3, 2), (8, 2)] {
        let mut encoder = encoder(slots, threads, 4096);
        assert_eq!(encoder.text_limit(), 16);
        let texts: Vec<Vec<u32>> = [3, 1, 16, 5, 6, 5, 1, 1, 1, 1, 1, 16].map(tokens).to_vec();
        let found =
            encoder.encode(&texts, |session, run| (run, [0, 7].map(|v| session.pooled(run, v).to_vec()), session.threads())).unwrap();
        assert_eq!(found.len(), texts.len());
        for (text, (run, [mean, last], _)) in texts.iter().zip(&found) {
            let sum = text.iter().sum::<u32>() as f32;
            assert_eq!(*mean, [*run as f32, sum, text.len() as f32]);
            assert_eq!(last[1], sum * 8.0);
        }
        // Two threads run all but the last text apart, for which one of them would have to wait.
        let by: Vec<u32> = found.iter().map(|text| text.2).collect();
        assert_eq!(by, [&[1; 11][..], &[threads as u32]].concat());
        let long = encoder.encode(&[tokens(2), tokens(17)], |_, _| panic!()).unwrap_err();
        assert!(matches!(long, EncodeError::TooLong { index: 1, tokens: 17, max_rows: 16, .. }));
        assert!(encoder.encode(&[tokens(0)], |_, _| ()).is_err());
        // A part that is refused ends the work; afterwards there is more.
        let wrong = [tokens(16), vec![VOCAB; 16], tokens(16), tokens(16)];
        let error = encoder.encode(&wrong, |_, _| ()).unwrap_err();
        assert!(matches!(error, EncodeError::Step(StepError::Token { id: VOCAB, .. })), "{error}");
        assert_eq!(encoder.encode(&[tokens(16), tokens(16)], |_, run| run).unwrap(), [0, 0]);
    }
    // Two run apart, two steps of one text together.
    let texts = [16, 16, 15, 2].map(tokens);
    let found = encoder(3, 2, 4096).encode(&texts, |session, run| session.pooled(run, 0)[1..].to_vec()).unwrap();
    assert_eq!(found, texts.map(|text| vec![text.iter().sum::<u32>() as f32, text.len() as f32]));
}

#[test]
fn a_profile_counts_steps_and_time_per_thread() {
    let mut decoder = Decoder::new(decoder_session(&[1, 8], 1, 2));
    decoder.session().start_profile(4);
    decoder.feed(0, &tokens(33)).unwrap(); // four steps of 8, one of 1
    let profile = decoder.session().take_profile().unwrap();
    assert_eq!((profile.load(0).steps, profile.load(1).steps, profile.steps()), (1, 4, 5));
    for bucket in 0..2 {
        let region = profile.regions(bucket).next().unwrap();
        for ((work, wait), start) in region.work_ns.iter().zip(&region.wait_ns).zip(profile.start_ns(bucket)) {
            // A thread's laps are the step: nothing is lost, nothing counts twice.
            assert_eq!(work + wait + start, profile.step_ns(bucket));
        }
    }
    for thread in 0..2 {
        let doing = |bucket| profile.events(bucket, thread).map(|e| e.doing).collect::<Vec<_>>();
        let step = [Doing::Start, Doing::Region(0), Doing::Wait(0), Doing::Wait(0)];
        assert_eq!(doing(0), step);
        assert_eq!(doing(1), step, "capacity");
    }
    assert_eq!(profile.dropped(), 3 * 4 * 2);
    assert!(decoder.session().take_profile().is_none());
}

#[test]
fn a_profile_has_the_steps_that_threads_run_alone() {
    let mut encoder = encoder(3, 2, 4096);
    let texts: Vec<Vec<u32>> = [16, 16, 10, 6, 16, 16].map(tokens).to_vec();
    encoder.encode(&texts[..2], |_, _| ()).unwrap();
    // Four parts apart, one together.
    encoder.start_profile(100);
    encoder.encode(&texts, |_, _| ()).unwrap();
    let profile = encoder.take_profile().unwrap();
    assert_eq!((profile.steps(), profile.load(0).rows, profile.load(0).runs), (5, 80, 6));
    let time = |of: &dyn Fn(Option<usize>) -> bool| profile.spans().iter().filter(|s| of(s.thread)).map(|s| s.took_ns).sum::<u64>();
    assert_eq!(profile.spans().iter().filter(|s| s.thread.is_some()).count(), 4);
    assert!(profile.spans().is_sorted_by_key(|s| s.begin_ns));
    let region = profile.regions(0).next().unwrap();
    for thread in 0..2 {
        let laps = region.work_ns[thread] + region.wait_ns[thread] + profile.start_ns(0)[thread];
        assert_eq!(laps, time(&|of| of.is_none_or(|t| t == thread)));
        assert!(profile.events(0, thread).is_sorted_by_key(|e| e.begin_ns));
        assert_eq!(profile.events(0, thread).map(|e| e.took_ns).sum::<u64>(), laps);
    }
    // Half of what one of two threads does alone is time of both.
    assert!(profile.step_ns(0).abs_diff(time(&|of| of.is_none()) + time(&|of| of.is_some()) / 2) <= 2);
    assert!(encoder.take_profile().is_none());
    // Threads that have run nothing before are measured too.
    let mut encoder = self::encoder(3, 2, 4096);
    encoder.start_profile(0);
    encoder.encode(&texts[..2], |_, _| ()).unwrap();
    assert_eq!(encoder.take_profile().unwrap().steps(), 2);
}

#[test]
fn a_load_counts_what_rows_and_runs_see() {
    let mut rows = RowTable::default();
    for (slot, range) in [(2, 10..16), (0, 0..1), (1, 20..22)] {
        for position in range {
            rows.push(Row { token: 0, slot, position, kv_index: position, segment: 0, wants_logits: position == 15 });
        }
    }
    let (mut tiles, runs) = (Vec::new(), [0, 6, 7, 9]);
    cut_tiles(&mut tiles, &runs, &rows, 4, false);
    let all = load(&rows, &runs, &tiles, None, false);
    let row_positions = (11 + 12 + 13 + 14 + 15 + 16) + 1 + (21 + 22);
    assert_eq!(
        all,
        Load { steps: 1, logit_steps: 1, rows: 9, logit_rows: 1, runs: 3, tiles: 4, row_positions, run_positions: 16 + 1 + 22 }
    );
    // Six rows that see three positions each see eight in all, two see four.
    let windowed = load(&rows, &runs, &tiles, Some(3), false);
    assert_eq!((windowed.row_positions, windowed.run_positions), (6 * 3 + 1 + 2 * 3, 8 + 1 + 4));
    cut_tiles(&mut tiles, &runs, &rows, 4, true);
    let both_ways = load(&rows, &runs, &tiles, None, true);
    assert_eq!((both_ways.row_positions, both_ways.run_positions), (6 * 16 + 1 + 2 * 22, 16 + 1 + 22));
}

#[test]
fn without_probes_there_is_nothing_to_measure() {
    let mut session = decoder_session(&[1], 1, 1);
    assert!(Probe::ALL.iter().all(|&probe| !session.probe(probe, 0)));
}

#[test]
fn a_probe_reads_no_more_than_there_is() {
    unsafe extern "C" fn nothing(_: *const StepCtx, _: u32, _: u32) {}
    let probes = [Probe::Read1, Probe::Read4, Probe::F32].map(|probe| (probe as u32, PROBE_ENTRY, nothing as StepFn));
    let steps =
        [(1, 0, decoder_1 as StepFn)].into_iter().chain(probes).map(|(bucket, entry, run)| StepEntry { bucket, entry, run: Some(run) });
    let manifest = manifest(vec![entry("step", OutputKind::Logits, vec![bucket(1, 1)])], 1);
    let weights = vec![0; 2 * PROBE_READ_BYTES as usize];
    // SAFETY: the fakes obey the ABI within these sizes.
    let program = unsafe { Program::new(&manifest, 0, &steps.collect::<Vec<_>>(), &weights) }.unwrap();
    let mut session = Session::new(program, Pool::new(2, 2, None).unwrap()).unwrap();
    for (probe, rows, runs) in
        [(Probe::Read1, 2, true), (Probe::Read1, 3, false), (Probe::Read4, 3, false), (Probe::F32, 3, true), (Probe::Int8Dot, 1, false)]
    {
        assert_eq!(session.probe(probe, rows), runs, "{probe:?} {rows}");
    }
}

#[test]
fn a_table_without_the_function_is_refused() {
    let manifest = manifest(vec![entry("step", OutputKind::Logits, vec![bucket(32, 32)])], 1);
    // SAFETY: nothing runs.
    let error = unsafe { Program::new(&manifest, 0, &STEPS, &[]) }.err().unwrap();
    assert!(error.to_string().contains("bucket 32"), "{error}");
}

#[test]
fn weights_that_are_too_short_are_refused() {
    let mut manifest = manifest(vec![entry("step", OutputKind::Logits, vec![bucket(1, 1)])], 1);
    let mut error = |weight_bytes| {
        manifest.weight_bytes = weight_bytes;
        // SAFETY: nothing runs.
        unsafe { Program::new(&manifest, 0, &STEPS, &[]) }.err().map_or(String::new(), |error| error.to_string())
    };
    assert_eq!(error(0), "");
    assert!(error(1).contains("weights are shorter"));
}
