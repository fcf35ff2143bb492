//! What must not depend on luck: bits of logits on buckets, chunks, threads and company; bytes of executables on directory, jobs
//! and time; code size on depth. And what an executable needs: nothing.

use object::elf::{DT_NEEDED, FileHeader64, PF_R, PT_DYNAMIC, PT_INTERP, PT_LOAD};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};
use object::{LittleEndian, Object, ObjectSection};
use rcompile_graph::DType;
use rcompile_runtime::abi::{PAYLOAD_SECTION, PAYLOAD_VADDR, WEIGHTS_ALIGN};
use rcompile_runtime::decode::Decoder;
use rcompile_runtime::step::{Row, RowTable, Session};
use rcompile_tests::steps::Steps;
use rcompile_tests::toy::Toy;
use rcompile_tests::{Exe, Reference, argmax, assets, build, float_control, golden, ids, joined, rcompile, reference_json, tol};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const BUCKETS: &str = "--buckets 1,8,64";
/// Beyond 8 threads a barrier has clusters; most of 17 threads have empty shares of small regions. No test of bits needs a CPU for each.
const THREADS: [usize; 6] = [1, 2, 3, 5, 9, 17];

/// The bundled model: four layers, 512 positions, which are two pages of the cache.
fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model")
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}

/// 70 tokens of a text.
fn story(dir: &Path) -> Vec<u32> {
    let reference = reference_json(dir);
    let cases = reference["cases"].as_array().unwrap();
    let mut tokens: Vec<u32> = cases.iter().flat_map(|c| [ids(&c["input_ids"]), ids(&c["greedy_ids"])].concat()).collect();
    tokens.truncate(70);
    assert_eq!(tokens.len(), 70);
    tokens
}

#[test]
fn prompts_of_every_length() {
    let Some(dir) = assets("models/stories260k-llama") else { return };
    let tokens = story(&dir);
    let wide = build(&dir, BUCKETS);
    let one = build(&dir, "--buckets 1");
    let reference = Reference::open(&dir, DType::F32);
    let mut runner = reference.runner();
    for len in 1..=tokens.len() {
        let prompt = &tokens[..len];
        let expected = runner.feed(&prompt[len - 1..]).remove(0);
        let (greedy, margin) = runner.greedy(&expected, 8);
        // True of this text: every token wins clearly, so that any two correct programs agree.
        assert!(margin > tol::GREEDY_MARGIN, "{len} tokens: margin {margin}");
        assert_eq!(wide.greedy(prompt, 8, &["-t", "2"]), greedy, "{len} tokens, buckets 1,8,64 and interpreter");
        assert_eq!(one.greedy(prompt, 8, &["-t", "1"]), greedy, "{len} tokens, bucket 1 and interpreter");
        let logits = wide.logits(prompt, &["-t", "1"]);
        let wide_numbers: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
        assert_eq!(argmax(&wide_numbers), greedy[0]);
        assert_eq!(
            bits(&wide.logits(prompt, &["-t", "2", "--copy-weights"])),
            bits(&logits),
            "{len} tokens, 1 and 2 threads, copied weights"
        );
        assert_eq!(bits(&one.logits(prompt, &["-t", "2"])), bits(&logits), "{len} tokens, buckets 1,8,64 and 1");
    }
}

#[test]
fn chunks_and_threads_of_a_text() {
    chunks_and_threads(&demo(), &demo().with_file_name("held_out.txt"), 300);
}

#[test]
fn chunks_and_threads_of_a_story() {
    let Some(dir) = assets("models/stories260k-llama") else { return };
    chunks_and_threads(&dir, &assets("texts").unwrap().join("tinystories-a.txt"), 400);
}

/// Two windows of a text.
fn chunks_and_threads(model: &Path, text: &Path, window: u32) {
    // The default buckets, whose largest takes a window in one step; two pages of the cache; attention cut for one core and for many.
    let options = ["", BUCKETS, "--buckets 1", "--buckets 3,13", "--buckets 1,512 --cores 1", "--buckets 1,512 --cores 64"];
    let exes = options.map(|options| build(model, options));
    let run = |exe: &Exe, threads: usize| {
        let (size, threads) = (window.to_string(), threads.to_string());
        let report = exe.json(["perplexity", "-f", text.to_str().unwrap(), "-c", &size, "--chunks", "2", "-t", &threads]);
        assert_eq!(report["tokens"], 2 * (window - 1));
        report["nll"].as_f64().unwrap().to_bits()
    };
    // The sum over all logits of all positions: one bit anywhere would show.
    let expected = run(&exes[0], 1);
    for (exe, options) in exes.iter().zip(options) {
        for threads in THREADS {
            assert_eq!(run(exe, threads), expected, "{options:?}, {threads} threads");
        }
    }
}

#[test]
fn weights_beside_the_executable() {
    let dir = golden("llama-gqa-tied");
    let [inside, beside] = ["", " --weights split"].map(|place| build(&dir, &format!("--no-tokenizer {BUCKETS}{place}")));
    assert_eq!(beside.json(["info"])["weights_embedded"], false);
    let prompt: Vec<u32> = (5..40).collect();
    assert_eq!(bits(&beside.logits(&prompt, &[])), bits(&inside.logits(&prompt, &[])));
    assert_eq!(beside.greedy(&prompt, 8, &["--copy-weights"]), inside.greedy(&prompt, 8, &[]));
}

/// Rows of several sequences in one step, mixed at random: each sequence's logits are the bits of the sequence alone.
fn company(model: &Path, options: &str) {
    company_of(model, &format!("{options} --parallel 4"), [37, 5, 21, 1], &[(1, 6), (2, 6), (3, 6), (5, 2), (9, 2), (17, 2)]);
}

/// The same for sequences of these lengths. `rounds`: threads, and how often the sequences are mixed anew.
fn company_of<const N: usize>(model: &Path, options: &str, lengths: [usize; N], rounds: &[(usize, u32)]) {
    let steps = Steps::load(model, &format!("--no-tokenizer {BUCKETS} {options}"));
    let ids = steps.session(1).program().vocab_size() - 4;
    let mut seed = 7;
    let sequences: Vec<Vec<u32>> = lengths.map(|len| (0..len).map(|_| 4 + random(&mut seed) % ids).collect()).to_vec();
    // Alone, token by token, in slot 0 of a new session with one thread.
    let alone: Vec<Vec<Vec<u32>>> = sequences
        .iter()
        .map(|tokens| {
            let mut decoder = Decoder::new(steps.session(1));
            let one = |t: &u32| {
                decoder.feed(0, &[*t]).unwrap();
                bits(decoder.logits(0))
            };
            tokens.iter().map(one).collect()
        })
        .collect();
    // The executable of the same build says the same.
    let last = bits(&steps.exe.logits(&sequences[0], &[]));
    assert_eq!(&last, alone[0].last().unwrap(), "executable and step interface");
    for &(threads, count) in rounds {
        for round in 0..count {
            let mut session = steps.session(threads);
            let mut done = vec![0; N];
            let mut step = 0;
            while done.iter().zip(&sequences).any(|(d, s)| *d < s.len()) {
                let what = format!("{options}, {threads} threads, round {round}, step {step}");
                together(&mut session, &sequences, &alone, &mut done, &mut seed, &what);
                astray(&mut session, &sequences, &mut done, &mut seed);
                step += 1;
            }
        }
    }
}

/// Now and then a sequence goes on with other tokens, is cut off some tokens before that, and will be fed from there again.
fn astray(session: &mut Session, sequences: &[Vec<u32>], done: &mut [usize], seed: &mut u32) {
    let sequence = random(seed) as usize % sequences.len();
    let (tokens, at) = (&sequences[sequence], &mut done[sequence]);
    if !random(seed).is_multiple_of(3) {
        return;
    }
    *at -= random(seed) as usize % (*at + 1).min(6);
    let mut rows = RowTable::with_capacity(8);
    for place in *at..(*at + 1 + random(seed) as usize % 8).min(tokens.len()) {
        let (token, place) = (tokens[tokens.len() - 1 - place], place as u32);
        rows.push(Row { token, slot: sequence as u32, position: place, kv_index: place, segment: 0, wants_logits: false });
    }
    if !rows.is_empty() {
        session.step(&rows).unwrap();
    }
}

/// One step with a random piece of each sequence, in random order of slots.
fn together(session: &mut Session, sequences: &[Vec<u32>], alone: &[Vec<Vec<u32>>], done: &mut [usize], seed: &mut u32, what: &str) {
    let mut rows = RowTable::with_capacity(64);
    let mut wanted = Vec::new();
    let first = random(seed) as usize;
    for i in 0..sequences.len() {
        let sequence = (first + i) % sequences.len();
        let left = sequences[sequence].len() - done[sequence];
        let piece = (random(seed) as usize % 24).min(left).min(64 - rows.len());
        for (at, &token) in sequences[sequence].iter().enumerate().skip(done[sequence]).take(piece) {
            let wants_logits = !random(seed).is_multiple_of(3);
            if wants_logits {
                wanted.push((sequence, at));
            }
            let place = at as u32;
            rows.push(Row { token, slot: sequence as u32, position: place, kv_index: place, segment: 0, wants_logits });
        }
        done[sequence] += piece;
    }
    if rows.is_empty() {
        return;
    }
    session.step(&rows).unwrap();
    for (index, (sequence, at)) in wanted.into_iter().enumerate() {
        let found = bits(session.logits(index));
        assert!(found == alone[sequence][at], "{what}: sequence {sequence}, position {at}: not the bits of the sequence alone");
    }
}

fn random(seed: &mut u32) -> u32 {
    *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    *seed >> 8
}

#[test]
fn company_of_a_windowed_decoder() {
    company(&golden("mistral-window"), "--compute f32");
}

#[test]
fn company_of_a_decoder_in_bf16() {
    company(&golden("llama-gqa-tied"), "--compute bf16");
}

#[test]
fn company_of_a_decoder_with_learned_positions() {
    company(&golden("gpt2-gelu"), "--compute f32");
}

#[test]
fn company_of_a_decoder_of_codes() {
    for options in ["--kv-dtype int8", "--quantize int8", "--quantize int4", "--quantize int4 --kv-dtype int8"] {
        company(&golden("llama-gqa-tied"), options);
    }
}

/// Two pages of the cache for each of two sequences.
#[test]
fn company_over_pages() {
    for options in ["", "--quantize int8 --kv-dtype int8"] {
        company_of(&demo(), &format!("{options} --parallel 3"), [300, 260, 40], &[(1, 1), (3, 2)]);
    }
}

/// Texts side by side: each vector has the bits of the text alone.
#[test]
fn company_of_an_encoder() {
    for options in ["--compute f32", "--compute bf16", "--quantize int8", "--quantize int4"] {
        company_of_texts(options);
    }
}

fn company_of_texts(options: &str) {
    use rcompile_runtime::encode::Encoder;
    let steps = Steps::load(&golden("bert"), &format!("--no-tokenizer {options} --buckets 8,64"));
    let mut seed = 3;
    let texts: Vec<Vec<u32>> =
        [60, 1, 3, 64, 13, 37, 8, 6, 64, 20].map(|len| (0..len).map(|_| 4 + random(&mut seed) % 127).collect()).to_vec();
    let vectors = |session: &Session, run: usize| -> Vec<u32> { (0..8).flat_map(|v| bits(session.pooled(run, v))).collect() };
    let encode_on = |texts: &[Vec<u32>], threads: usize| {
        Encoder::new(steps.session(threads)).encode(texts, |session, run| (vectors(session, run), session.threads())).unwrap()
    };
    let encode =
        |texts: &[Vec<u32>], threads: usize| -> Vec<Vec<u32>> { encode_on(texts, threads).into_iter().map(|text| text.0).collect() };
    let alone: Vec<Vec<u32>> = texts.iter().map(|t| encode(std::slice::from_ref(t), 1).remove(0)).collect();
    for threads in THREADS {
        let (found, by): (Vec<_>, Vec<_>) = encode_on(&texts, threads).into_iter().unzip();
        assert!(found == alone, "{options}, {threads} threads");
        // The first ones on one thread each, if there are some for each thread, the last on all.
        let all = threads as u32;
        assert_eq!((by[0], by[9]), (if all <= 3 { 1 } else { all }, all), "{options}");
        let backwards: Vec<Vec<u32>> = texts.iter().rev().cloned().collect();
        assert!(encode(&backwards, threads).iter().rev().eq(&alone), "{options}, {threads} threads, backwards");
    }
    let one = steps.exe.json(["embed", "--tokens", &joined(&texts[2]), "--pooling", "max", "--normalize", "false"]);
    let found: Vec<u32> = rcompile_tests::numbers(&one["embeddings"][0]).iter().map(|x| (*x as f32).to_bits()).collect();
    assert_eq!(found, alone[2][2 * 60..3 * 60], "{options}, executable and step interface");
}

/// Generated code and the pool leave how floats are computed as it was, on every thread: no CPU flushes what is near zero afterwards.
#[test]
fn float_control_is_left_alone() {
    for options in ["--compute f32", "--compute bf16", "--quantize int8 --kv-dtype int8"] {
        let steps = Steps::load(&golden("llama-gqa-tied"), &format!("--no-tokenizer {BUCKETS} {options}"));
        for threads in [1, 3, 17] {
            let mut session = steps.session(threads);
            let controls = |session: &mut Session| {
                let found: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(u64::MAX)).collect();
                session.on_each_thread(&|thread| found[thread].store(float_control(), Ordering::Relaxed));
                found.into_iter().map(AtomicU64::into_inner).collect::<Vec<u64>>()
            };
            let before = vec![float_control(); threads];
            assert_eq!(controls(&mut session), before, "{options}, new threads");
            let mut decoder = Decoder::new(session);
            for tokens in [&[5; 40][..], &[6], &[7; 5]] {
                decoder.feed(0, tokens).unwrap();
                assert_eq!(float_control(), before[0], "{options}, {threads} threads, a step of {} rows", tokens.len());
                assert_eq!(controls(decoder.session()), before, "{options}, {threads} threads, a step of {} rows", tokens.len());
            }
        }
    }
}

/// `-O0` runs no pass of LLVM and the fewest of ours: the same model in other code.
#[test]
fn levels_of_optimisation() {
    for (model, prompt) in [("qwen3", "5,9,33,7,61,2,2,90,14"), ("granite", "3,17,40,8")] {
        let prompt: Vec<u32> = prompt.split(',').map(|id| id.parse().unwrap()).collect();
        let [plain, fast] = ["-O0", "-O3"].map(|level| build(&golden(model), &format!("--no-tokenizer --buckets 1,8 {level}")));
        let (plain_logits, fast_logits) = (plain.logits(&prompt, &[]), fast.logits(&prompt, &[]));
        assert_eq!(plain_logits.len(), fast_logits.len());
        let distance = plain_logits.iter().zip(&fast_logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(distance <= 1e-4, "{model}: logits differ by {distance}");
        let greedy = |exe: &Exe| exe.greedy(&prompt, 12, &[]);
        assert_eq!(greedy(&plain), greedy(&fast), "{model}");
    }
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

const CHILD: &str = "RCOMPILE_TESTS_CHILD";

/// Not a test of its own: [`builds_are_reproducible`] runs this test in a process with another directory and environment.
#[test]
fn child() {
    if let Ok(args) = std::env::var(CHILD) {
        rcompile(args.split(' ')).unwrap();
    }
}

#[test]
fn builds_are_reproducible() {
    let source = golden("llama-llama3-bias");
    let temp = tempfile::tempdir().unwrap();
    let here = temp.path().join("here").join("model");
    let there = temp.path().join("far/away/from here").join("model");
    copy_dir(&source, &here);
    // Another time, another order of the directory's entries.
    std::thread::sleep(Duration::from_millis(20));
    copy_dir(&source, &there);
    let first = temp.path().join("first");
    let options = ["--no-tokenizer", "--buckets", "1,8,64", "--cpu", "x86-64-v3", "--no-cache"];
    let place = |dir: &Path, out: &Path| ["--model".into(), dir.display().to_string(), "-o".into(), out.display().to_string()];
    rcompile(options.iter().map(|s| s.to_string()).chain(place(&here, &first)).chain(["--jobs".into(), "1".into()])).unwrap();
    let expected = std::fs::read(&first).unwrap();
    assert!(!contains(&expected, temp.path().to_str().unwrap().as_bytes()), "the executable names the directory of its build");

    for (jobs, zone) in [("2", "Asia/Tokyo"), ("3", "UTC")] {
        // Relative paths in the directory of the model, one core, another time zone, locale and home.
        let cwd = there.parent().unwrap();
        let args = format!("{} --model model -o out-{jobs} --jobs {jobs}", options.join(" "));
        let mut child = Command::new("taskset");
        child
            .args(["-c", "0"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--test-threads", "1"])
            .current_dir(cwd)
            .env(CHILD, args);
        child.env("TZ", zone).env("LANG", "tr_TR.UTF-8").env("HOME", "/nowhere").env("TMPDIR", temp.path());
        // What LLD writes into its files, if it is let.
        child.env("LLD_VERSION", zone);
        let output = child.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let found = std::fs::read(cwd.join(format!("out-{jobs}"))).unwrap();
        let at = found.iter().zip(&expected).position(|(a, b)| a != b);
        assert!(found == expected, "lengths {} and {}, first difference at {at:?}", found.len(), expected.len());
    }
    // Nothing but model and outputs is left.
    let mut left: Vec<_> = std::fs::read_dir(there.parent().unwrap()).unwrap().map(|f| f.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["model", "out-2", "out-3"]);
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|w| w == part)
}

/// What the program headers say: no loader, no library, weights in a read-only segment at a 2 MB border.
fn check_static(file: &Path) {
    let bytes = std::fs::read(file).unwrap();
    let header = FileHeader64::<LittleEndian>::parse(&*bytes).unwrap();
    let e = header.endian().unwrap();
    let mut payload = false;
    for s in header.program_headers(e, &*bytes).unwrap() {
        assert_ne!(s.p_type(e), PT_INTERP, "no dynamic loader");
        if s.p_type(e) == PT_DYNAMIC {
            let entries = s.dynamic(e, &*bytes).unwrap().unwrap_or_default();
            assert!(entries.iter().all(|d| d.d_tag(e) != DT_NEEDED), "no shared library");
        }
        if s.p_type(e) == PT_LOAD && s.p_vaddr(e) == PAYLOAD_VADDR {
            payload = true;
            assert_eq!(s.p_flags(e), PF_R, "weights are read-only");
            assert_eq!((s.p_offset(e) % WEIGHTS_ALIGN, s.p_align(e)), (0, WEIGHTS_ALIGN));
            assert_eq!(s.p_filesz(e), s.p_memsz(e));
        }
    }
    assert!(payload, "a segment with the weights");
    let object = object::File::parse(&*bytes).unwrap();
    let section = object.section_by_name(PAYLOAD_SECTION).expect("the payload's section");
    assert_eq!(section.address(), PAYLOAD_VADDR);
}

#[test]
fn executables_need_nothing() {
    let source = golden("qwen3");
    let built = build(&source, "--no-tokenizer --compute f32 --buckets 1,8");
    check_static(built.path());
    let temp = tempfile::tempdir().unwrap();
    let case = &reference_json(&source)["cases"][1];
    let (tokens, greedy) = (ids(&case["input_ids"]), ids(&case["greedy_ids"]));
    // The harness runs everything with an empty environment in `/`. First alone in another directory, then without symbols.
    let alone = temp.path().join("only this file");
    std::fs::copy(built.path(), &alone).unwrap();
    assert_eq!(Exe::at(alone.clone()).greedy(&tokens, 24, &[]), greedy);
    let stripped = temp.path().join("stripped");
    strip(&alone, &stripped);
    assert!(std::fs::metadata(&stripped).unwrap().len() < std::fs::metadata(&alone).unwrap().len());
    std::fs::remove_file(&alone).unwrap();
    check_static(&stripped);
    let exe = Exe::at(stripped);
    assert_eq!(exe.greedy(&tokens, 24, &[]), greedy);
    assert_eq!(exe.run(["verify"]).code, Some(0));
}

/// Removes symbols; binutils come with the linker that every build needs.
fn strip(from: &PathBuf, to: &PathBuf) {
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(to).arg(from);
    let output = strip.output().unwrap_or_else(|e| panic!("strip: {e}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Layers are outlined: depth costs weights, not code.
#[test]
fn depth_is_free() {
    let temp = tempfile::tempdir().unwrap();
    let sizes = [4, 16, 64].map(|layers| {
        let dir = temp.path().join(layers.to_string());
        Toy { layers, ..Toy::SMALL }.write(&dir);
        let model = dir.display().to_string();
        let options = ["--model", &model, "--no-tokenizer", "--buckets", "1,8,64", "--stop-after", "codegen"];
        let report = rcompile(options).unwrap();
        println!("{layers} layers: {} bytes of code in {} units", report.code_bytes, report.units);
        assert!(report.code_bytes > 0);
        (report.units, report.code_bytes)
    });
    for (units, bytes) in sizes {
        assert_eq!(units, sizes[0].0, "{sizes:?}");
        assert!((bytes as f64 / sizes[0].1 as f64 - 1.0).abs() <= 0.05, "{sizes:?}");
    }
}
