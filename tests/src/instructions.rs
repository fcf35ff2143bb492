//! Instructions that an executable for aarch64 runs in its kernels, counted by a plugin of qemu (`count_instructions.c`): exact numbers,
//! the same on every host, so that slower code shows without an Arm machine.

use crate::Machine;
use crate::exe::{Exe, Ran};
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use tempfile::TempDir;

/// Instructions of a run by kind of kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// In matmuls with their prologues and epilogues.
    pub matmul: u64,
    /// In attention.
    pub attention: u64,
    /// In everything else.
    pub loops: u64,
}

/// Runs a verb on `machine`, which must be an emulated one, on one thread.
pub fn count(machine: &Machine, exe: &Exe, args: &[String]) -> (Counts, Ran) {
    static PLUGIN: LazyLock<(TempDir, PathBuf)> = LazyLock::new(compile);
    let ran = exe.clone().on(&machine.clone().with_plugin(&PLUGIN.1)).run(args.iter().map(String::as_str).chain(["-t", "1"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let of = |kind: &str| {
        let line = ran.stderr.lines().find_map(|l| l.strip_prefix(&format!("count {kind} ")));
        line.and_then(|n| n.trim().parse().ok()).unwrap_or_else(|| panic!("no count of {kind}: {}", ran.stderr))
    };
    (Counts { matmul: of("matmul"), attention: of("attention"), loops: of("loops") }, ran)
}

fn compile() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let library = dir.path().join("count_instructions.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/count_instructions.c");
    let cc = Command::new("cc").args(["-shared", "-fPIC", "-O2", "-fvisibility=hidden", "-o"]).arg(&library).arg(source).status();
    assert!(cc.expect("cc").success(), "{source}");
    (dir, library)
}
