//! A control group's limit of memory: executables say what does not fit instead of being killed.

use rcompile_tests::build;
use rcompile_tests::control_group::ControlGroup;
use std::path::Path;
use std::process::{Output, Stdio};

const LIMIT: &str = "memory.limit_in_bytes";

#[test]
fn what_exceeds_the_groups_memory_is_refused() {
    // Sixty-four sequences of the bundled model take 32 MiB for the first page of each, in f32: where bf16 is fast they would take half.
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model");
    let exe = build(&model, "--buckets 1,64 --parallel 64 --cpu x86-64-v3");
    if std::fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1) {
        eprintln!("skipped: what exceeds the limit is swapped out here");
        return;
    }
    let Some(group) = ControlGroup::new(&["memory"], &[(LIMIT, 24 << 20)]) else {
        return;
    };
    let run = |args: &str| -> Output {
        let mut command = group.command(exe.path());
        command.args(args.split(' ')).stdin(Stdio::null()).output().expect("the executable")
    };
    let stderr = |out: &Output| String::from_utf8_lossy(&out.stderr).into_owned();

    for few in [1, 4, 8] {
        let out = run(&format!("bench -p 0 -n 2 -b {few} -r 1 -t 1"));
        assert_eq!((out.status.code(), stderr(&out).as_str()), (Some(0), ""), "{few} sequences");
    }
    // Also where all would just fit but for the rest of each large page.
    for many in [20, 30, 64] {
        let out = run(&format!("bench -p 0 -n 2 -b {many} -r 1 -t 1"));
        let lines = stderr(&out);
        assert_eq!(out.status.code(), Some(7), "{many} sequences: {lines}");
        assert!(lines.starts_with("error[E7-memory]: memory: the step: needs ") && lines.contains("the control group has"), "{lines}");
        assert!(lines.contains("help: raise the limit of the container"), "{lines}");
    }

    // The tokenizer takes tens of bytes for each of a text.
    let text = exe.path().with_file_name("text");
    std::fs::write(&text, "the cat sat on the mat. ".repeat(100_000)).unwrap();
    let long = run(&format!("perplexity -t 1 -c 10 --quiet -f {}", text.display()));
    let lines = stderr(&long);
    assert_eq!(long.status.code(), Some(7), "{lines}");
    assert!(lines.starts_with("error[E7-memory]: memory: the process: has none left"), "{lines}");

    // The weights are 3.5 MB.
    assert!(group.set(LIMIT, 5 << 20));
    let copied = run("bench -p 0 -n 2 -r 1 -t 1 --copy-weights");
    let lines = stderr(&copied);
    assert_eq!(copied.status.code(), Some(7), "{lines}");
    assert!(lines.contains("copy of the weights: needs 12 MiB more") && lines.contains("run without --copy-weights"), "{lines}");

    assert!(group.set(LIMIT, 3 << 20));
    let lines = stderr(&run("bench -p 0 -n 2 -r 1 -t 1"));
    assert!(lines.contains("warning[W-memory]: 4 MiB of weights, the control group allows 3 MiB"), "{lines}");
}
