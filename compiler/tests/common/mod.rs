//! What tests of the driver share.

use std::process::{Command, Stdio};

/// Whether strace can be used; on CI it must.
pub fn strace() -> bool {
    let there = Command::new("strace").args(["-o", "/dev/null", "true"]).stderr(Stdio::null()).status().is_ok_and(|s| s.success());
    assert!(there || std::env::var_os("CI").is_none(), "strace is missing or may not trace, and on CI nothing is skipped");
    if !there {
        eprintln!("skipped, for lack of strace: which files are opened, written and renamed");
    }
    there
}
