//! What the control group of this process, or one above it, limits: CPU time and memory, as containers set them. Version 1 and 2.
//!
//! In: `/proc/self/cgroup`, which names the groups, and their files under `/sys/fs/cgroup`. Out: whole CPUs, bytes. What cannot be read
//! does not limit.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Whole CPUs of the tightest quota, at least 1.
pub fn cpus() -> Option<usize> {
    Groups::of_process()?.cpus()
}

/// The tightest limit of memory, in bytes, as it was when this was first asked.
pub fn memory_limit() -> Option<u64> {
    static LIMIT: OnceLock<Option<u64>> = OnceLock::new();
    *LIMIT.get_or_init(|| Groups::of_process()?.memory().into_iter().map(|m| m.limit).min())
}

/// The tightest limit that ends a process, in bytes, as it was when this was first asked: what exceeds another is swapped out.
pub fn deadly_limit() -> Option<u64> {
    static LIMIT: OnceLock<Option<u64>> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        memory_limit()?;
        Groups::of_process()?.deadly(machine_swaps()).map(|m| m.limit).min()
    })
}

/// What is to be left of [`memory_room`] for memory beside what is counted: tables of pages, texts, stacks, the rest of large pages.
pub const MARGIN: u64 = 8 << 20;

/// Bytes that are left below every limit that ends a process, if the group lets go of the files that it has read. Where there was no limit
/// when [`memory_limit`] was first asked, none is looked for again.
pub fn memory_room() -> Option<u64> {
    memory_limit()?;
    Groups::of_process()?.deadly(machine_swaps()).map(|m| m.limit.saturating_sub(m.held)).min()
}

/// Whether the machine has anything to swap to.
fn machine_swaps() -> bool {
    read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1)
}

/// Memory of one group.
struct Memory {
    limit: u64,
    /// What it takes now and cannot give back.
    held: u64,
    /// Whether the group may swap where the machine can.
    swaps: bool,
}

/// The groups that a process is in.
struct Groups {
    /// Lines `number:controllers:path`; version 2 has no controllers in its one line.
    membership: String,
    root: PathBuf,
}

/// Which files a group's directory has.
#[derive(Clone, Copy)]
enum Version {
    V1,
    V2,
}

impl Groups {
    fn of_process() -> Option<Groups> {
        Groups::of(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"))
    }

    fn of(membership: &Path, root: &Path) -> Option<Groups> {
        Some(Groups { membership: read_to_string(membership).ok()?, root: root.to_owned() })
    }

    /// Directories of the process's group and of those above it where `controller` is at work. A container sees its own group as the
    /// root, under whatever name the line has.
    fn directories(&self, controller: &str) -> Vec<(Version, PathBuf)> {
        let mut found = Vec::new();
        for line in self.membership.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
                continue;
            };
            let (version, mounts) = match controllers {
                "" => (Version::V2, vec![self.root.clone()]),
                _ if controllers == controller => (Version::V1, vec![self.root.join(controller)]),
                // Mounted by the name of both, most often with a link for each.
                _ if controllers.split(',').any(|c| c == controller) => {
                    (Version::V1, vec![self.root.join(controller), self.root.join(controllers)])
                }
                _ => continue,
            };
            let own = Path::new(path.trim_start_matches('/'));
            found.extend(mounts.iter().flat_map(|mount| own.ancestors().map(move |group| (version, mount.join(group)))));
        }
        found
    }

    fn cpus(&self) -> Option<usize> {
        let quota = |(version, group): (Version, PathBuf)| match version {
            Version::V1 => {
                let quota = number(&group.join("cpu.cfs_quota_us")).filter(|q| *q > 0.0)?;
                Some(quota / number(&group.join("cpu.cfs_period_us")).filter(|p| *p > 0.0)?)
            }
            Version::V2 => {
                let text = read_to_string(group.join("cpu.max")).ok()?;
                let (quota, period) = text.trim().split_once(' ')?;
                Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok().filter(|p| *p > 0.0)?)
            }
        };
        let tightest = self.directories("cpu").into_iter().filter_map(quota).min_by(f64::total_cmp)?;
        Some((tightest as usize).max(1))
    }

    /// Those whose limit ends a process: where the machine swaps, a group that may not.
    fn deadly(&self, machine_swaps: bool) -> impl Iterator<Item = Memory> {
        self.memory().into_iter().filter(move |m| !(machine_swaps && m.swaps))
    }

    fn memory(&self) -> Vec<Memory> {
        // From the outermost in: what one forbids holds for all within it.
        let mut swaps = true;
        let directories = self.directories("memory").into_iter().rev();
        let found = directories.filter_map(|(version, group)| {
            swaps &= may_swap(version, &group);
            Memory::of(version, &group, swaps)
        });
        let mut found: Vec<Memory> = found.collect();
        found.reverse();
        found
    }
}

impl Memory {
    fn of(version: Version, group: &Path, swaps: bool) -> Option<Memory> {
        let (limit, usage, prefix) = match version {
            Version::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
            Version::V2 => ("memory.max", "memory.current", ""),
        };
        let limit = bytes(&group.join(limit))?;
        let stat = read_to_string(group.join("memory.stat")).unwrap_or_default();
        let given_back = |line: &str| {
            let (name, bytes) = line.split_once(' ')?;
            let name = name.strip_prefix(prefix)?;
            matches!(name, "active_file" | "inactive_file" | "slab_reclaimable").then(|| bytes.parse::<u64>().ok())?
        };
        let given_back: u64 = stat.lines().filter_map(given_back).sum();
        Some(Memory { limit, held: bytes(&group.join(usage))?.saturating_sub(given_back), swaps })
    }
}

/// Whether a group may swap, as far as it is up to itself.
fn may_swap(version: Version, group: &Path) -> bool {
    match version {
        Version::V1 => match (bytes(&group.join("memory.limit_in_bytes")), bytes(&group.join("memory.memsw.limit_in_bytes"))) {
            (Some(limit), Some(both)) => both > limit,
            _ => true,
        },
        Version::V2 => bytes(&group.join("memory.swap.max")) != Some(0),
    }
}

/// What a file of a group limits or counts; none without a limit.
fn bytes(path: &Path) -> Option<u64> {
    /// What version 1 says where there is no limit: the largest number of pages.
    const NONE: u64 = i64::MAX as u64 & !0xffff;
    read_to_string(path).ok()?.trim().parse().ok().filter(|bytes| *bytes < NONE)
}

fn number(path: &Path) -> Option<f64> {
    read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, remove_dir_all, write};

    /// A tree of groups that is removed.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Tree {
            let root = std::env::temp_dir().join(format!("rc-cgroup-{name}-{}", std::process::id()));
            create_dir_all(&root).unwrap();
            Tree(root)
        }
        fn set(&self, path: &str, text: &str) {
            let file = self.0.join(path);
            create_dir_all(file.parent().unwrap()).unwrap();
            write(file, text).unwrap();
        }
        fn groups(&self) -> Groups {
            Groups::of(&self.0.join("membership"), &self.0).unwrap()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_tightest_quota_counts() {
        let tree = Tree::new("cpu");
        tree.set("membership", "0::/a/b\n");
        assert_eq!(tree.groups().cpus(), None);
        tree.set("a/b/cpu.max", "max 100000\n");
        assert_eq!(tree.groups().cpus(), None);
        tree.set("a/cpu.max", "250000 100000\n");
        assert_eq!(tree.groups().cpus(), Some(2));
        tree.set("a/b/cpu.max", "50000 100000\n");
        assert_eq!(tree.groups().cpus(), Some(1));
        tree.set("membership", "3:cpu,cpuacct:/x\n");
        tree.set("cpu/x/cpu.cfs_quota_us", "-1\n");
        tree.set("cpu/x/cpu.cfs_period_us", "100000\n");
        assert_eq!(tree.groups().cpus(), None);
        tree.set("cpu/x/cpu.cfs_quota_us", "350000\n");
        assert_eq!(tree.groups().cpus(), Some(3));
        tree.set("membership", "5:net_cls,net_prio:/x\n");
        assert_eq!(tree.groups().cpus(), None);
        // Without a link `cpu`, the mount has the names of both.
        tree.set("membership", "3:cpu,cpuacct:/y\n");
        tree.set("cpu,cpuacct/cpu.cfs_quota_us", "200000\n");
        tree.set("cpu,cpuacct/cpu.cfs_period_us", "100000\n");
        assert_eq!(tree.groups().cpus(), Some(2));
    }

    #[test]
    fn files_that_were_read_leave_room() {
        let tree = Tree::new("memory");
        let limits = || -> Vec<_> { tree.groups().memory().iter().map(|m| (m.limit, m.held)).collect() };
        tree.set("membership", "0::/a/b\n");
        tree.set("a/b/memory.max", "max\n");
        tree.set("a/b/memory.current", "100\n");
        assert_eq!(limits(), []);
        tree.set("a/memory.max", "1000\n");
        tree.set("a/memory.current", "700\n");
        tree.set("a/memory.stat", "anon 100\nfile 620\ninactive_file 200\nactive_file 350\nslab_reclaimable 50\n");
        assert_eq!(limits(), [(1000, 100)]);
        tree.set("a/b/memory.max", "500\n");
        assert_eq!(limits(), [(500, 100), (1000, 100)]);
        tree.set("a/b/memory.swap.max", "0\n");
        tree.set("a/memory.swap.max", "max\n");
        assert_eq!(tree.groups().memory().iter().map(|m| m.swaps).collect::<Vec<_>>(), [false, true]);
        for (machine_swaps, deadly) in [(false, vec![500, 1000]), (true, vec![500])] {
            assert_eq!(tree.groups().deadly(machine_swaps).map(|m| m.limit).collect::<Vec<_>>(), deadly);
        }
        tree.set("a/memory.swap.max", "0\n");
        tree.set("a/b/memory.swap.max", "max\n");
        assert_eq!(tree.groups().memory().iter().map(|m| m.swaps).collect::<Vec<_>>(), [false, false]);
        // Both are read one after the other, and may not fit together.
        tree.set("a/memory.current", "500\n");
        assert_eq!(limits(), [(500, 100), (1000, 0)]);

        tree.set("membership", "4:memory:/x\n");
        tree.set("memory/x/memory.limit_in_bytes", "9223372036854771712\n");
        tree.set("memory/x/memory.usage_in_bytes", "700\n");
        assert_eq!(limits(), []);
        tree.set("memory/x/memory.limit_in_bytes", "1000\n");
        let swaps = || tree.groups().memory()[0].swaps;
        assert!(swaps());
        tree.set("memory/x/memory.memsw.limit_in_bytes", "1000\n");
        assert!(!swaps());
        // The group's own files are in the total of its tree.
        tree.set("memory/x/memory.stat", "inactive_file 5\ntotal_inactive_file 200\ntotal_active_file 50\ntotal_rss 300\n");
        assert_eq!(limits(), [(1000, 450)]);
    }
}
