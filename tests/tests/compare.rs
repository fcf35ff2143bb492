//! `rcompile compare` and what it reads, `OUT perplexity --logits`: numbers against ones that are computed here from single prompts, and
//! every way in which two executables and a text do not go together.

use rcompile::Error;
use rcompile::compare::{Comparison, Embeddings, NextTokens, compare};
use rcompile::options::{Command as Verb, Parsed, parse};
use rcompile_runtime::logits::{Header, LogitsReader};
use rcompile_tests::toy::Toy;
use rcompile_tests::{Exe, argmax, assets, build, difference, golden, ids, model_dir, numbers, read_json};
use serde_json::json;
use std::ffi::OsString;
use std::fs::File;
use std::io::BufReader;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

const F32: &str = "--buckets 1,8,64 --compute f32";
const BF16: &str = "--buckets 1,8,64 --compute bf16";

/// An executable that has run: no other process that was started meanwhile still holds it open for writing.
fn ready(model: &Path, options: &str) -> Exe {
    let exe = build(model, options);
    exe.text(["info"]);
    exe
}

fn stories() -> Option<PathBuf> {
    assets("models/stories260k-llama")
}

/// The beginning of a text, in a file.
fn text(dir: &tempfile::TempDir) -> PathBuf {
    let all = std::fs::read_to_string(assets("texts").expect("texts").join("tinystories-a.txt")).expect("text");
    file(dir, "text", &all[..all.floor_char_boundary(1500)])
}

fn file(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, text).expect("text");
    path
}

fn temp() -> tempfile::TempDir {
    tempfile::tempdir().expect("temporary directory")
}

fn compared(a: &Path, b: &Path, text: &Path, options: &[&str]) -> Result<Comparison, Error> {
    let mut args: Vec<OsString> = ["rcompile", "compare", "--quiet"].map(Into::into).to_vec();
    args.extend([a.into(), b.into(), "-f".into(), text.into()]);
    args.extend(options.iter().map(Into::into));
    match parse(args)? {
        Parsed::Run(Verb::Compare(options)) => compare(&options),
        other => panic!("not a comparison: {other:?}"),
    }
}

fn next_tokens(a: &Exe, b: &Exe, text: &Path, options: &[&str]) -> NextTokens {
    match compared(a.path(), b.path(), text, options).unwrap_or_else(|e| panic!("{e}")) {
        Comparison::NextTokens(found) => found,
        other => panic!("{other:?}"),
    }
}

fn embeddings(a: &Exe, b: &Exe, text: &Path) -> Embeddings {
    match compared(a.path(), b.path(), text, &[]).unwrap_or_else(|e| panic!("{e}")) {
        Comparison::Embeddings(found) => found,
        other => panic!("{other:?}"),
    }
}

/// The error's lines hold the words, and the code is this one.
#[track_caller]
fn refused(code: i32, words: &[&str], found: Result<Comparison, Error>) {
    let error = found.expect_err("an error");
    let text = error.lines().join("\n");
    assert_eq!(error.exit_code(), code, "{text}");
    assert!(text.starts_with(&format!("error[E{code}-")), "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "'{word}' is not in {text}"));
}

/// Windows of the text, each with BOS in front, as `OUT perplexity` makes them.
fn windows(exe: &Exe, text: &Path, window: usize, count: usize) -> Vec<Vec<u32>> {
    let all = ids(&exe.json(["tokenize", "--no-special", "-f", text.to_str().unwrap()])["tokens"]);
    let bos = ids(&exe.json(["tokenize", "-p", ""])["tokens"])[0];
    let windows: Vec<Vec<u32>> = all.chunks_exact(window - 1).take(count).map(|part| [&[bos], part].concat()).collect();
    assert_eq!(windows.len(), count, "the text is long enough");
    windows
}

/// Logits behind each token but the last, from prompts of their own.
fn logits(exe: &Exe, window: &[u32]) -> Vec<Vec<f64>> {
    let row = |i| exe.logits(&window[..=i], &[]).into_iter().map(f64::from).collect();
    (0..window.len() - 1).map(row).collect()
}

#[track_caller]
fn close(what: &str, found: f64, expected: f64, relative: f64) {
    assert!((found / expected - 1.0).abs() <= relative, "{what}: {found}, expected {expected}");
}

#[test]
fn a_model_does_not_differ_from_itself() {
    let Some(dir) = stories() else { return };
    let (exe, temp) = (ready(&dir, F32), temp());
    let text = text(&temp);
    let found = next_tokens(&exe, &exe, &text, &["-c", "32", "--chunks", "4"]);
    let expected = exe.json(["perplexity", "-f", text.to_str().unwrap(), "-c", "32", "--chunks", "4"]);
    assert_eq!((found.kld_mean, found.kld_p99, found.kld_max, found.same_top1), (0.0, 0.0, 0.0, 1.0));
    assert_eq!((found.positions, json!(found.positions)), (4 * 31, expected["tokens"].clone()));
    assert_eq!(found.ppl_a, found.ppl_b);
    // The executable subtracts the largest logit in f32.
    close("perplexity", found.ppl_a, expected["ppl"].as_f64().unwrap(), 1e-6);
    // Without -c and --chunks: as the executable does it alone, here with the whole context of 512.
    let all = next_tokens(&exe, &exe, &text, &[]);
    let expected = exe.json(["perplexity", "-f", text.to_str().unwrap()]);
    assert_eq!(json!(all.positions), expected["tokens"]);
    close("perplexity", all.ppl_b, expected["ppl"].as_f64().unwrap(), 1e-6);
    // Threads change no bit.
    assert_eq!(next_tokens(&exe, &exe, &text, &["-c", "32", "--chunks", "4", "-t", "2"]), found);
}

#[test]
fn divergence_is_that_of_the_logits() {
    let Some(dir) = stories() else { return };
    let ([a, b], temp) = ([ready(&dir, F32), ready(&dir, BF16)], temp());
    let text = text(&temp);
    let found = next_tokens(&a, &b, &text, &["-c", "16", "--chunks", "3"]);
    println!("{found:?}");
    let (mut divergences, mut same, mut nll) = (Vec::new(), 0.0, [0.0; 2]);
    for window in windows(&a, &text, 16, 3) {
        for (i, (p, q)) in logits(&a, &window).iter().zip(&logits(&b, &window)).enumerate() {
            divergences.push(difference(q, p).kld);
            same += f64::from(u8::from(argmax(p) == argmax(q)));
            for (nll, row) in nll.iter_mut().zip([p, q]) {
                *nll += row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[window[i + 1] as usize];
            }
        }
    }
    let n = divergences.len() as f64;
    divergences.sort_by(f64::total_cmp);
    assert_eq!(found.positions, 45);
    assert!(found.kld_mean > 1e-9, "{found:?}");
    close("mean", found.kld_mean, divergences.iter().sum::<f64>() / n, 1e-6);
    close("largest", found.kld_max, divergences[44], 1e-6);
    // 0.99 of the way from the first to the last of 45: 43.56.
    close("99th percentile", found.kld_p99, 0.44 * divergences[43] + 0.56 * divergences[44], 1e-6);
    close("same best token", found.same_top1, same / n, 1e-12);
    close("perplexity of A", found.ppl_a, (nll[0] / n).exp(), 1e-6);
    close("perplexity of B", found.ppl_b, (nll[1] / n).exp(), 1e-6);
    assert_ne!(found.ppl_a, found.ppl_b);
    // The other way round the divergence is another one.
    let back = next_tokens(&b, &a, &text, &["-c", "16", "--chunks", "3"]);
    assert_eq!((back.ppl_a, back.ppl_b), (found.ppl_b, found.ppl_a));
    assert_ne!(back.kld_mean, found.kld_mean);
    // What scripts read.
    let keys = serde_json::to_value(Comparison::NextTokens(found)).unwrap();
    let keys: Vec<&String> = keys.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["positions", "kld_mean", "kld_p99", "kld_max", "same_top1", "ppl_a", "ppl_b"]);
}

#[test]
fn logits_of_every_scored_position_in_a_file() {
    let Some(dir) = stories() else { return };
    let (exe, temp) = (ready(&dir, F32), temp());
    let text = text(&temp);
    let path = temp.path().join("logits");
    let args = |to: &str| ["perplexity", "-f", text.to_str().unwrap(), "-c", "12", "--chunks", "2", "--logits", to].map(str::to_string);
    let report = exe.json(args(path.to_str().unwrap()));
    let alone = exe.json(["perplexity", "-f", text.to_str().unwrap(), "-c", "12", "--chunks", "2"]);
    assert_eq!(report, alone, "the result is the same");
    let mut reader = LogitsReader::new(BufReader::new(File::open(&path).unwrap())).unwrap();
    assert_eq!(reader.header(), Header { vocab_size: 512, window: 12, positions: 22 });
    for window in windows(&exe, &text, 12, 2) {
        for i in 0..11 {
            let row = reader.row().unwrap().expect("a row");
            assert_eq!((row.token, row.next), (window[i], window[i + 1]));
            assert_eq!(row.logits, exe.logits(&window[..=i], &[]), "position {i}: the same bits");
        }
    }
    assert!(reader.row().unwrap().is_none());

    for (to, code, word) in
        [("-", 2, "stdout carries the result"), ("/dev/full", 8, "/dev/full: No space"), ("/no/such/file", 8, "/no/such/file")]
    {
        let ran = exe.run(args(to));
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(code), ""), "{to}: {}", ran.stderr);
        assert!(ran.stderr.contains(word), "{}", ran.stderr);
    }
}

#[test]
fn embeddings_of_each_line() {
    let Some(dir) = assets("models/all-MiniLM-L6-v2-fp16") else { return };
    let [a, b] = ["f32", "bf16"].map(|compute| ready(&dir, &format!("--buckets 16,64 --compute {compute}")));
    let temp = temp();
    let text = file(&temp, "lines", "A cat sat on the mat.\n\nStocks fell sharply on Monday\nWo ist der Bahnhof?");
    let itself = embeddings(&a, &a, &text);
    assert!((itself.cosine_min - 1.0).abs() < 1e-12 && (itself.cosine_mean - 1.0).abs() < 1e-12, "{itself:?}");

    let found = embeddings(&a, &b, &text);
    println!("{found:?}");
    let vectors = [&a, &b].map(|exe| exe.json(["embed", "-f", text.to_str().unwrap()])["embeddings"].take());
    let cosines: Vec<f64> = (0..4).map(|i| difference(&numbers(&vectors[0][i]), &numbers(&vectors[1][i])).cosine).collect();
    assert_eq!(found.texts, 4);
    close("mean", found.cosine_mean, cosines.iter().sum::<f64>() / 4.0, 1e-12);
    close("smallest", found.cosine_min, cosines.iter().copied().fold(1.0, f64::min), 1e-12);
    assert!(found.cosine_min < 1.0 - 1e-9 && found.cosine_min < found.cosine_mean);

    refused(2, &["-c and --chunks"], compared(a.path(), b.path(), &text, &["-c", "16"]));
    refused(4, &["found none"], compared(a.path(), b.path(), &file(&temp, "empty", ""), &[]));
    let Some(stories) = stories() else { return };
    refused(5, &["task, expected embed as in the reference, found generate"], compared(a.path(), ready(&stories, F32).path(), &text, &[]));
}

#[test]
fn models_that_cannot_be_compared() {
    let Some(dir) = stories() else { return };
    let Some(other) = assets("models/slm4096-gpt2") else { return };
    let (exe, temp) = (ready(&dir, F32), temp());
    let text = text(&temp);
    let wide = ready(&other, "--buckets 8");
    refused(5, &["vocabulary, expected 512 as in the reference, found 54", "slm4096"], compared(exe.path(), wide.path(), &text, &[]));

    // As many tokens, but two of them have changed places.
    let changed = with_tokenizer(&dir, "other-ids", |tokenizer| {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let (a, e) = (vocab["a"].clone(), vocab["e"].clone());
        (vocab["a"], vocab["e"]) = (e, a);
    });
    let changed = ready(&changed, F32);
    refused(5, &["position ", "other tokens"], compared(exe.path(), changed.path(), &text, &["-c", "32"]));
    // No token in front: more text fits into a window, so fewer windows are filled.
    let bare = with_tokenizer(&dir, "no-bos", |tokenizer| tokenizer["post_processor"] = json!(null));
    let bare = ready(&bare, F32);
    refused(5, &["other tokens"], compared(exe.path(), bare.path(), &text, &["-c", "3"]));

    let without = model_dir("toy", |dir| Toy::SMALL.write(dir));
    let without = ready(&without, "--no-tokenizer --buckets 8");
    refused(6, &["no tokenizer"], compared(without.path(), without.path(), &text, &[]));
    let encoder = ready(&golden("bert"), "--no-tokenizer --buckets 8");
    refused(5, &["task, expected generate"], compared(exe.path(), encoder.path(), &text, &[]));
    let Some(embeds) = assets("models/all-MiniLM-L6-v2-fp16") else { return };
    let embeds = ready(&embeds, "--buckets 16,64 --compute f32");
    refused(5, &["vocabulary, expected 30522 as in the reference"], compared(embeds.path(), encoder.path(), &text, &[]));
}

/// The model with another tokenizer.
fn with_tokenizer(source: &Path, name: &str, change: impl FnOnce(&mut serde_json::Value)) -> PathBuf {
    model_dir(name, |dir| {
        for entry in std::fs::read_dir(source).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
        }
        let mut tokenizer = read_json(&source.join("tokenizer.json"));
        change(&mut tokenizer);
        std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    })
}

#[test]
fn files_that_are_missing_or_wrong() {
    let Some(dir) = stories() else { return };
    let (exe, temp) = (ready(&dir, F32), temp());
    let (text, exe, nothing) = (text(&temp), exe.path(), temp.path().join("nothing"));
    refused(3, &["nothing: cannot be read"], compared(&nothing, exe, &text, &[]));
    refused(3, &["nothing: cannot be read"], compared(exe, &nothing, &text, &[]));
    refused(3, &["nothing: cannot be read", "E3-input"], compared(exe, exe, &nothing, &[]));
    refused(3, &["not a regular file"], compared(exe, exe, temp.path(), &[]));
    // A descriptor of this process, as `/dev/stdin` is: for the two that read it, it is another file or none.
    let open = std::fs::File::open(&text).expect("text");
    let through = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
    compared(exe, exe, &through, &["-c", "32", "--chunks", "1"]).unwrap_or_else(|e| panic!("{e}"));
    refused(3, &["not a regular file"], compared(exe, temp.path(), &text, &[]));
    refused(4, &["text: is no executable of rcompile"], compared(&text, exe, &text, &[]));
    refused(4, &["true: is no executable of rcompile"], compared(exe, "/bin/true".as_ref(), &text, &[]));
    // Copied by another process: this one never has the file open for writing while others are started.
    let copy = |name: &str, script: &str| {
        let path = temp.path().join(name);
        let ran = Command::new("sh").args(["-c", script]).env("FROM", exe).env("TO", &path).status();
        assert!(ran.expect("sh").success());
        path
    };
    let not_executable = copy("plain", "cp \"$FROM\" \"$TO\" && chmod 644 \"$TO\"");
    refused(3, &["plain: cannot be started"], compared(exe, &not_executable, &text, &[]));
    // From here on it is the executable that fails: its message, its code.
    let cut = copy("cut", "head -c -1 \"$FROM\" > \"$TO\" && chmod 755 \"$TO\"");
    refused(9, &["cut: "], compared(exe, &cut, &text, &[]));
    refused(9, &["cut: "], compared(&cut, exe, &text, &[]));
    refused(7, &["a window of 9999 tokens", "help: use a smaller -c"], compared(exe, exe, &text, &["-c", "9999"]));
    refused(2, &["do not fill a window"], compared(exe, exe, &file(&temp, "short", "Once"), &[]));
}
