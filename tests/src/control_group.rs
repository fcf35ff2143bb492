//! Control groups of version 1, as the tests of limits make them.
//!
//! In: a controller and what is written to its group's files. Out: commands that run within the group, which goes with its value.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A control group of this process's making.
pub struct ControlGroup(PathBuf);

impl ControlGroup {
    /// A group below one of the controller's mounts, with these files set in order. `None` with a message where no group can be made.
    pub fn new(mounts: &[&str], files: &[(&str, u64)]) -> Option<ControlGroup> {
        let made = mounts.iter().find_map(|mount| {
            let root = Path::new("/sys/fs/cgroup").join(mount);
            let group = root.join(format!("rcompile-test-{}", std::process::id()));
            // Without the first file it is a directory like others.
            (root.join(files.first()?.0).exists() && std::fs::create_dir(&group).is_ok()).then_some(ControlGroup(group))
        });
        let made = made.filter(|group| files.iter().all(|(name, value)| group.set(name, *value)));
        if made.is_none() {
            eprintln!("skipped: no control group of version 1 can be made here");
        }
        made
    }

    /// Writes a file of the group; false where it takes no such value.
    pub fn set(&self, file: &str, value: u64) -> bool {
        std::fs::write(self.0.join(file), value.to_string()).is_ok()
    }

    /// A command that runs `program` within the group.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let enter = format!("echo $$ > '{}' && exec \"$0\" \"$@\"", self.0.join("cgroup.procs").display());
        let mut command = Command::new("sh");
        command.args(["-c", &enter]).arg(program);
        command
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}
