//! Threads that have fewer CPUs than they were made for: two take at most 1.3 times as long as one.
//!
//! A file of its own, and one test at a time: cargo runs test programs one after the other, so that nothing of this project runs beside.

use rcompile_tests::control_group::ControlGroup;
use rcompile_tests::{Exe, build};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The bundled model: four layers, 3.5 MB of bf16 weights.
fn demo() -> Exe {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model");
    build(&model, "--buckets 1,8,64")
}

/// Steps of a millisecond or two with some twenty barriers: for several periods of a quota, and longer than the tenth of a second for
/// which a system may leave both threads on the CPU where they began.
const BENCH: [&str; 9] = ["bench", "-p", "64", "-n", "0", "-r", "200", "-o", "jsonl"];

/// The bench's row of results.
fn row(command: &mut Command) -> Value {
    let out = command.args(BENCH).stdin(Stdio::null()).output().expect("bench");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("JSON")
}

/// Time of all steps together: a quota lets a step run fast and stops a later one.
fn time(row: &Value) -> f64 {
    let samples = row["samples_ts"].as_array().expect("samples");
    samples.iter().map(|t| 1.0 / t.as_f64().expect("tokens per second")).sum()
}

/// Held by the test that builds or measures.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Time with `-t 2` over that with `-t 1`. The machine may be busy with other things: tries for half a minute to find it at most 1.3.
fn slowdown(mut command: impl FnMut() -> Command) -> f64 {
    let (begin, mut best) = (Instant::now(), f64::INFINITY);
    while best > 1.3 && begin.elapsed() < Duration::from_secs(30) {
        let [one, two] = ["1", "2"].map(|threads| {
            let row = row(command().env("RCOMPILE_ARG_THREADS", threads));
            assert_eq!(row["threads"].to_string(), threads);
            time(&row)
        });
        best = best.min(two / one);
    }
    best
}

#[test]
fn two_threads_on_one_core_do_not_collapse() {
    let _alone = alone();
    let exe = demo();
    let ratio = slowdown(|| {
        let mut command = Command::new("taskset");
        command.args(["-c", "0"]).arg(exe.path());
        command
    });
    assert!(ratio <= 1.3, "{ratio}");
}

#[test]
fn two_threads_with_a_quota_of_one_and_a_half_cpus_do_not_collapse() {
    let quota = [("cpu.cfs_period_us", 100_000), ("cpu.cfs_quota_us", 150_000)];
    let Some(group) = ControlGroup::new(&["cpu,cpuacct", "cpu"], &quota) else {
        return;
    };
    let _alone = alone();
    let exe = demo();
    let command = || group.command(exe.path());
    let ratio = slowdown(command);
    assert!(ratio <= 1.3, "{ratio}");
    // Without -t there is one thread: whole CPUs of the quota.
    assert_eq!(row(&mut command())["threads"], 1);
}
