//! A control group's limit of memory: executables say what does not fit instead of being killed.

use rcompile_tests::build;
use rcompile_tests::control_group::ControlGroup;
use std::path::Path;
use std::process::{Output, Stdio};

const LIMIT: &str = "memory.limit_in_bytes";

#[test]
fn what_exceeds_the_groups_memory_is_refused() {
    // Sixty-four sequences of the bundled model take 32 MiB for the first page of each.
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model");
    let exe = build(&model, "--buckets 1,64 --parallel 64");
    let Some(group) = ControlGroup::new(&["memory"], &[(LIMIT, 24 << 20)]) else {
        return;
    };
    let run = |args: &str| -> Output {
        let mut command = group.command(exe.path());
        command.args(args.split(' ')).stdin(Stdio::null()).output().expect("the executable")
    };
    let stderr = |out: &Output| String::from_utf8_lossy(&out.stderr).into_owned();

    let few = run("bench -p 0 -n 2 -b 4 -r 1");
    assert_eq!((few.status.code(), stderr(&few).as_str()), (Some(0), ""));

    let many = run("bench -p 0 -n 2 -b 64 -r 1");
    let lines = stderr(&many);
    assert_eq!(many.status.code(), Some(7), "{lines}");
    assert!(lines.starts_with("error[E7-memory]: memory: the step: needs 3") && lines.contains("the control group has"), "{lines}");
    assert!(lines.contains("help: raise the limit of the container"), "{lines}");

    // The weights are 3.5 MB.
    assert!(group.set(LIMIT, 5 << 20));
    let copied = run("bench -p 0 -n 2 -r 1 --copy-weights");
    let lines = stderr(&copied);
    assert_eq!(copied.status.code(), Some(7), "{lines}");
    assert!(lines.contains("copy of the weights: needs 6 MiB more") && lines.contains("run without --copy-weights"), "{lines}");

    assert!(group.set(LIMIT, 3 << 20));
    let lines = stderr(&run("bench -p 0 -n 2 -r 1"));
    assert!(lines.contains("warning[W-memory]: 3 MiB of weights, the control group allows 3 MiB"), "{lines}");
}
