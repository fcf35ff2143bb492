//! Topic `rows`: rows within a bucket cost what they are, and a large bucket beats many small steps.

use crate::measure::{Bench, Outcome, of_threads, rates};
use crate::process::args;
use crate::stats::{Goal, Section};

pub fn measure(bench: &mut Bench) -> Outcome<()> {
    for threads in bench.threads.clone() {
        run(bench, "l3", "l3", "33,64", "9", threads)?;
        run(bench, "llama-1b", "1b-rows", "33,64", "3", threads)?;
    }
    // At bucket 1 a prompt of 512 is 512 steps: once is enough, the ratio is far from its goal.
    if bench.record.keys("1b-bucket-512 ").next().is_none() {
        let threads = bench.most_threads();
        let prompt = if bench.options.quick { "64" } else { "512" };
        run(bench, "llama-1b-bucket-1", "1b-bucket-1", prompt, "1", threads)?;
        run(bench, "llama-1b", "1b-bucket-512", "512", "1", threads)?;
    }
    Ok(())
}

fn run(bench: &mut Bench, executable: &str, key: &str, prompts: &str, repetitions: &str, threads: usize) -> Outcome<()> {
    let out = bench.executable(executable)?;
    let words = ["bench", "-p", prompts, "-n", "0", "-r", repetitions, "-t", &threads.to_string(), "-o", "jsonl"];
    for rate in rates(&bench.start(&out, &args(words))?)? {
        let key = format!("{key} {} {threads}", rate.test);
        eprintln!("bench: {key}: {:.1} tokens/s", rate.tokens_per_s);
        bench.record.push(key, rate.tokens_per_s);
    }
    Ok(())
}

pub fn section(bench: &Bench) -> Section {
    let record = &bench.record;
    let note = "33 rows against 64 rows in a bucket of 64: ratio of times, each the median of the repetitions of one process. \
                `l3` has weights of 20 MB. A prompt of 512 with `--buckets 1` against the default buckets: ratio of the rates.";
    let mut section = Section::new("Rows cost what they are: buckets", note);
    for &threads in &bench.threads {
        for (key, shape, goal) in [("l3", "l3", 0.60), ("1b-rows", "llama-1b", 0.70)] {
            let rates = (format!("{key} pp64 {threads}"), format!("{key} pp33 {threads}"));
            // time = rows / rate
            let ratio = record.ratio(&rates.0, &rates.1).map(|rate| rate * 33.0 / 64.0);
            let name = format!("time of 33 rows / time of 64 rows, {shape}, {}", of_threads(threads));
            section.add_goal(name, "-", ratio, Goal::AtMost(goal));
        }
    }
    let threads = bench.most_threads();
    let of = of_threads(threads);
    let large = format!("1b-bucket-512 pp512 {threads}");
    section.add(format!("prefill 512, default buckets, {of}"), "tokens/s", record.get(&large));
    for prompt in [512, 64] {
        let small = format!("1b-bucket-1 pp{prompt} {threads}");
        if record.has(&small) {
            section.add(format!("prefill {prompt}, --buckets 1, {of}"), "tokens/s", record.get(&small));
            section.add_goal("prefill, default buckets / --buckets 1", "-", record.ratio(&large, &small), Goal::AtLeast(4.0));
        }
    }
    section
}
