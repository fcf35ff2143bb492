//! The CPUs that this process may use: cores, and threads of one core, of its affinity mask, and how many of them its control group grants.
//!
//! In: the mask, `/sys/devices/system/cpu`, [`cgroup`]. Out: lists of CPUs, the number of threads that is best by default.

use std::io;
use std::path::Path;
use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cgroup;

/// The CPUs that this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus {
    /// One CPU of each distinct physical core in the affinity mask.
    pub cores: Vec<usize>,
    /// The whole mask, in the order in which threads are pinned: `cores`, then the CPUs that share a core with one of them.
    pub spread: Vec<usize>,
    /// CPUs that can run at the same time: the mask's size. A quota takes time from all of them alike, so that threads within the mask
    /// still have a CPU each while they run.
    pub available: usize,
    /// Threads to use by default: physical cores, capped by the CPU quota, at least 1.
    pub default_threads: usize,
}

impl Cpus {
    /// The CPUs as the first call found them: pinning the caller narrows its own mask, not what the process has.
    pub fn of_process() -> &'static Self {
        static FOUND: OnceLock<Cpus> = OnceLock::new();
        FOUND.get_or_init(Self::detect)
    }

    /// Looks at the affinity mask, `/sys` and the control group; what is missing does not limit.
    pub fn detect() -> Self {
        let mask: Vec<usize> = match sched_getaffinity(None) {
            Ok(set) => (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect(),
            Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
        };
        Self::of(&mask, Path::new("/sys/devices/system/cpu"), cgroup::cpus())
    }

    fn of(mask: &[usize], topology: &Path, quota: Option<usize>) -> Self {
        let (mut cores, mut shared) = (Vec::new(), Vec::new());
        let mut taken = Vec::new();
        for &cpu in mask {
            let file = |name: &str| std::fs::read_to_string(topology.join(format!("cpu{cpu}/topology/{name}"))).ok();
            let siblings = file("core_cpus_list").or_else(|| file("thread_siblings_list"));
            match siblings {
                Some(list) if taken.contains(&list) => {
                    shared.push(cpu);
                    continue;
                }
                Some(list) => taken.push(list),
                None => {}
            }
            cores.push(cpu);
        }
        let cap = quota.unwrap_or(usize::MAX);
        let spread = [&cores[..], &shared].concat();
        Self { available: mask.len().max(1), default_threads: cores.len().min(cap).max(1), cores, spread }
    }
}

/// Binds the calling thread to one CPU.
pub fn pin_to(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_count_once_and_quota_caps() {
        let root = std::env::temp_dir().join(format!("rc-topology-{}", std::process::id()));
        for cpu in 0..4 {
            let folder = root.join(format!("cpu{cpu}/topology"));
            std::fs::create_dir_all(&folder).unwrap();
            let pair = if cpu % 2 == 0 { "0,2" } else { "1,3" };
            std::fs::write(folder.join("core_cpus_list"), pair).unwrap();
        }
        let cpus = Cpus::of(&[0, 1, 2, 3], &root, None);
        assert_eq!((cpus.cores, cpus.spread, cpus.available, cpus.default_threads), (vec![0, 1], vec![0, 1, 2, 3], 4, 2));
        assert_eq!(Cpus::of(&[0, 2, 3], &root, None).spread, [0, 3, 2]);
        assert_eq!(Cpus::of(&[2], &root, None).cores, [2]);
        let capped = Cpus::of(&[0, 1, 2, 3], &root, Some(1));
        assert_eq!((capped.available, capped.default_threads), (4, 1));
        // Without topology every CPU counts.
        assert_eq!(Cpus::of(&[5, 9], Path::new("/nowhere"), None).cores, [5, 9]);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn pinning_does_not_change_what_there_is() {
        // Masks belong to threads: the other tests keep theirs.
        let pinned = std::thread::spawn(|| {
            let before = Cpus::of_process();
            pin_to(before.cores[0]).unwrap();
            (before.clone(), Cpus::of_process().clone())
        });
        let (before, after) = pinned.join().unwrap();
        assert_eq!(before, after);
    }
}
