//! Which machine this is: what goes beside every figure.

use std::collections::BTreeSet;
use std::fs;
use std::mem::size_of;
use std::path::Path;
use std::process::Command;

/// Lines of machine data: a name and a value.
pub fn facts() -> Vec<(String, String)> {
    let cpuinfo = read("/proc/cpuinfo");
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|l| l.split(':').next().is_some_and(|n| n.trim() == name));
        line.and_then(|l| l.split_once(':')).map_or("unknown".into(), |(_, v)| v.trim().to_owned())
    };
    let model = ["cpu family", "model", "stepping"].map(|name| field(&cpuinfo, name)).join("/");
    let cpus = cpuinfo.lines().filter(|l| l.starts_with("processor")).count();
    let memory_kb: f64 = field(&read("/proc/meminfo"), "MemTotal").trim_end_matches(" kB").parse().unwrap_or(f64::NAN);
    let facts = [
        ("CPU", format!("{} (family/model/stepping {model})", field(&cpuinfo, "model name"))),
        ("cores", format!("{} physical of {cpus} CPUs", physical_cores().len())),
        ("caches", caches()),
        ("memory", format!("{:.1} GiB", memory_kb / f64::from(1 << 20))),
        ("kernel", format!("{}, large pages {}", read("/proc/sys/kernel/osrelease").trim(), large_pages())),
    ];
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Day and time, UTC.
pub fn date() -> String {
    output("date", &["-u", "+%Y-%m-%d %H:%M UTC"])
}

/// Processor time of a process that runs, in seconds; none of one that is not there.
pub fn seconds_of(process: u32) -> f64 {
    // Behind the name, which may hold anything: the state, then numbers, of which the 11th and 12th are user and system time.
    let stat = read(&format!("/proc/{process}/stat"));
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    fields.skip(11).take(2).filter_map(|t| t.parse::<f64>().ok()).sum::<f64>() / TICKS
}

/// Per second, on all Linux systems on x86-64 and AArch64.
const TICKS: f64 = 100.0;

/// Processor time since some moment of all processes of the machine, and of this one with the children that it waited for, in seconds.
pub fn processor_seconds() -> (f64, f64) {
    // user, nice, system, idle, iowait, irq, softirq; in ticks.
    let stat = read("/proc/stat");
    let ticks: Vec<f64> = stat.lines().next().unwrap_or_default().split_whitespace().skip(1).filter_map(|t| t.parse().ok()).collect();
    let busy = [0, 1, 2, 5, 6].iter().filter_map(|&i| ticks.get(i)).sum::<f64>() / TICKS;
    let own = [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN].map(|who| {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the pointer is to memory of the right type that lives through the call; all zero is a valid value of it.
        let usage = unsafe {
            libc::getrusage(who, usage.as_mut_ptr());
            usage.assume_init()
        };
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
        seconds(usage.ru_utime) + seconds(usage.ru_stime)
    });
    (busy, own.iter().sum())
}

/// One CPU of each physical core among those that this process may use.
pub fn physical_cores() -> Vec<usize> {
    let mut seen = BTreeSet::new();
    let core_of = |cpu: usize| {
        let topology = |what: &str| read(&format!("/sys/devices/system/cpu/cpu{cpu}/topology/{what}"));
        (topology("physical_package_id"), topology("core_id"))
    };
    let mut cores = allowed_cpus();
    cores.retain(|&cpu| {
        let (package, core) = core_of(cpu);
        // Where the system does not say, every CPU is a core.
        core.is_empty() || seen.insert((package, core))
    });
    cores
}

fn allowed_cpus() -> Vec<usize> {
    let mut set = empty_set();
    // SAFETY: the set has the size that is passed and lives through the call; 0 is the calling thread.
    let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0;
    if failed {
        return vec![0];
    }
    // SAFETY: the indices are below the size of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

/// Binds the calling thread to one CPU; a refusal only makes figures less steady.
pub fn pin_to(cpu: usize) {
    let mut set = empty_set();
    // SAFETY: `cpu` came from `allowed_cpus`, below the size of the set.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the set has the size that is passed; 0 is the calling thread.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
}

fn empty_set() -> libc::cpu_set_t {
    // SAFETY: a set of bits; all zero is the empty set.
    unsafe { std::mem::zeroed() }
}

fn caches() -> String {
    let mut found = Vec::new();
    for index in 0.. {
        let dir = format!("/sys/devices/system/cpu/cpu0/cache/index{index}");
        if !Path::new(&dir).exists() {
            break;
        }
        let of = |what: &str| read(&format!("{dir}/{what}")).trim().to_owned();
        let kind = match of("type").as_str() {
            "Data" => "d",
            "Instruction" => "i",
            _ => "",
        };
        found.push(format!("L{}{kind} {}", of("level"), of("size")));
    }
    found.join(", ")
}

fn large_pages() -> String {
    let modes = read("/sys/kernel/mm/transparent_hugepage/enabled");
    let chosen = modes.split(['[', ']']).nth(1);
    chosen.unwrap_or("unknown").to_owned()
}

/// The commit of the directory that this is called in.
pub fn commit() -> String {
    let hash = output("git", &["rev-parse", "--short", "HEAD"]);
    let dirty = !output("git", &["status", "--porcelain", "--untracked-files=no"]).is_empty();
    if hash.is_empty() {
        return "unknown".into();
    }
    if dirty { format!("{hash} with changes") } else { hash }
}

fn output(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output();
    out.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned()).unwrap_or_default()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_of_a_process() {
        let (process, begin) = (std::process::id(), std::time::Instant::now());
        let before = seconds_of(process);
        while begin.elapsed().as_millis() < 300 {
            std::hint::black_box(before);
        }
        let spent = seconds_of(process) - before;
        // Other tests of this process work beside this one.
        assert!(spent >= 0.1, "{spent}");
        assert_eq!(seconds_of(u32::MAX), 0.0);
    }
}
