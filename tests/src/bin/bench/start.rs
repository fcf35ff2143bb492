//! Topic `start`: time from before the process starts to its first token, and resident memory. Peers are started as often.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::measure::{Bench, Outcome, float};
use crate::peers;
use crate::process::args;
use crate::stats::{Goal, Section};

/// A text of as many tokens as the short list of ids at most (seven), so that both take bucket 8.
const TEXT: &str = "Once upon a";
/// Numbers of token ids: 1, 2, 3, ..
const LENGTHS: [usize; 2] = [8, 128];

fn ids(count: usize) -> String {
    (1..=count).map(|id| id.to_string()).collect::<Vec<_>>().join(",")
}

pub fn measure(bench: &mut Bench) -> Outcome<()> {
    let out = bench.executable("llama-1b")?;
    let info = bench.info(&out)?;
    bench.start(&out, &args(["generate", "--tokens", &ids(8), "-n", "1"]))?; // reads the whole file into the page cache
    for key in ["file_bytes", "kv_bytes", "arena_bytes"] {
        bench.record.push(format!("start {key}"), float(&info[key]));
    }
    let mut answers: BTreeMap<String, String> = BTreeMap::new();
    for _ in 0..3 {
        let info = bench.start(&out, &args(["info"]))?;
        bench.record.push("start info", info.wall_ms);
        let mut same = |bench: &mut Bench, input: &str, answer: String| {
            let first = answers.entry(input.into()).or_insert_with(|| answer.clone());
            if *first != answer {
                bench.problem(format!("greedy output for {input:?} changed from {first:?} to {answer:?}"));
            }
        };
        for length in LENGTHS {
            let run = bench.start(&out, &args(["generate", "--tokens", &ids(length), "-n", "1"]))?;
            bench.record.push(format!("start {length} | rcompile"), run.first_output_ms);
            bench.record.push(format!("start {length} end"), run.wall_ms);
            bench.record.push(format!("start {length} rss | rcompile"), run.rss_bytes_max as f64);
            same(bench, &ids(length), run.stdout);
        }
        let text = bench.start(&out, &args(["generate", "-p", TEXT, "-n", "1"]))?;
        bench.record.push("start text", text.first_output_ms);
        same(bench, TEXT, text.stdout);
    }
    threads_agree(bench, &out)?;

    let threads = bench.most_threads();
    for engine in peers::engines(bench, "llama-1b-bf16") {
        // The first one fills the page cache.
        for (run, length) in [LENGTHS[0]].into_iter().chain(LENGTHS).enumerate() {
            let words = engine.words(&["--first-token", &length.to_string(), "-t", &threads.to_string()]);
            match bench.start(&engine.program, &words) {
                Ok(_) if run == 0 => (),
                Ok(run) => {
                    bench.record.push(format!("start {length} | {}", engine.name), run.first_output_ms);
                    bench.record.push(format!("start {length} rss | {}", engine.name), run.rss_bytes_max as f64);
                }
                Err(error) => bench.problem(format!("{}: {error}", engine.name)),
            }
        }
    }
    Ok(())
}

/// The tokens must be the same with every number of threads.
fn threads_agree(bench: &mut Bench, out: &Path) -> Outcome<()> {
    let mut of_first = None;
    for threads in bench.threads.clone() {
        let words = args(["generate", "--tokens", &ids(8), "-n", "8", "--json", "-t", &threads.to_string()]);
        let answer: Value = serde_json::from_str(&bench.start(out, &words)?.stdout)?;
        let tokens = answer["tokens"].clone();
        match &of_first {
            None => of_first = Some(tokens),
            Some(first) if *first != tokens => {
                bench.problem(format!("{threads} threads give the tokens {tokens}, one gives {first}"));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

pub fn sections(bench: &Bench) -> Vec<Section> {
    let record = &bench.record;
    let note = format!(
        "From outside, with a warm page cache: from before the start of the process to its end (`info`) or to the first byte of \
         output (token ids; the text {TEXT:?}). Peers print their first token from token ids, too; they are Python programs, and \
         the start of Python is part of the time."
    );
    let mut start = Section::new("Start of llama-1b", note);
    start.add_goal("info", "ms", record.get("start info"), Goal::AtMost(20.0));
    for (length, goal) in LENGTHS.into_iter().zip([150.0, 380.0]) {
        let key = format!("start {length} | rcompile");
        start.add_goal(format!("first token, {length} token ids"), "ms", record.get(&key), Goal::AtMost(goal));
        start.add(format!("first token, {length} token ids, to the end of the process"), "ms", record.get(&format!("start {length} end")));
        for (engine, key) in peers::of(record, &format!("start {length}")) {
            start.add(format!("first token, {length} token ids, {engine}"), "ms", record.get(&key));
        }
    }
    start.add("first token, text", "ms", record.get("start text"));
    let more = record.each(["start text", "start 8 | rcompile"], |[text, ids]| text - ids);
    start.add_goal("first token, text more than 8 ids", "ms", more, Goal::AtMost(60.0));

    let note = "Peak resident memory of whole processes as the kernel counts it; pages of the file that were touched count.";
    let mut memory = Section::new("Memory of llama-1b", note);
    for (name, key) in [("file", "file_bytes"), ("KV cache", "kv_bytes"), ("arena", "arena_bytes")] {
        memory.add(name, "MB", record.get(&format!("start {key}")).map(|bytes| bytes / 1e6));
    }
    for length in LENGTHS {
        let key = format!("start {length} rss | rcompile");
        memory.add(format!("resident, {length} token ids"), "MB", record.get(&key).map(|bytes| bytes / 1e6));
        let parts = [&*key, "start file_bytes", "start kv_bytes", "start arena_bytes"];
        let share = record.each(parts, |[rss, file, kv, arena]| rss / (file + kv + arena));
        memory.add_goal(format!("resident / (file + KV + arena), {length} token ids"), "-", share, Goal::AtMost(1.02));
        for (engine, key) in peers::of(record, &format!("start {length} rss")) {
            memory.add(format!("resident, {length} token ids, {engine}"), "MB", record.get(&key).map(|bytes| bytes / 1e6));
        }
    }
    vec![start, memory]
}
