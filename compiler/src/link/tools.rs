//! The C compiler driver that compiles the entry stub and links, and LLD where it is installed.

use super::guard::{self, Finished};
use crate::error::Error;
use crate::targets::platform;
use rcompile_codegen::isa::HOST_TRIPLE;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// No step of the toolchain takes longer, except when it hangs.
const TIMEOUT: Duration = Duration::from_secs(120);
/// A disk with less is full.
const FULL_BYTES: u64 = 1 << 20;

/// Variables of compilers and linkers that would change what is linked, and with it the bytes of the executable.
const CHANGING: [&str; 11] = [
    "LDFLAGS",
    "CFLAGS",
    "CPATH",
    "C_INCLUDE_PATH",
    "LIBRARY_PATH",
    "LD_RUN_PATH",
    "GCC_EXEC_PREFIX",
    "COMPILER_PATH",
    "CCC_OVERRIDE_OPTIONS",
    "QA_OVERRIDE_GCC3_OPTIONS",
    "LLD_VERSION",
];

/// What the user installs when something is missing.
pub fn install_cc(triple: &str) -> String {
    match triple == HOST_TRIPLE {
        true => "apt-get install gcc libc6-dev (Debian, Ubuntu), or set CC to a C compiler that links static-pie".into(),
        false => format!(
            "apt-get install {} (Debian, Ubuntu), or set {} to a C compiler that links static-pie for {triple}",
            platform(triple).cross_packages,
            cross_variable(triple)
        ),
    }
}

/// The variable that names a C compiler for another architecture, as cargo's build scripts know it.
fn cross_variable(triple: &str) -> String {
    format!("CC_{}", triple.replace('-', "_"))
}

/// Programs found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tools {
    /// Target triple.
    pub triple: String,
    /// `cc`, `clang-19`, `aarch64-linux-gnu-gcc`, ...
    pub driver: PathBuf,
    /// Its first arguments: `--target` for a clang that compiles for another architecture.
    pub driver_args: Vec<String>,
    /// Directory of a program named `ld.lld`.
    pub lld: Option<PathBuf>,
}

/// Looks for a C compiler for `triple` and for LLD in the search path: for this machine `$CC`, then cc, clang-19, clang, gcc; for another
/// architecture `$CC_<triple>` (with `_` for `-`; a clang gets `--target`), then its gcc.
pub fn find(triple: &str) -> Result<Tools, Error> {
    let host = triple == HOST_TRIPLE;
    let gnu = triple.replace("-unknown", "");
    let variable = if host { "CC".to_string() } else { cross_variable(triple) };
    let wanted = std::env::var_os(&variable).filter(|cc| !cc.is_empty());
    let cross_gcc = format!("{gnu}-gcc");
    let names: Vec<&str> = match &wanted {
        Some(_) => vec![],
        None if host => vec!["cc", "clang-19", "clang", "gcc"],
        None => vec![&cross_gcc],
    };
    let found = match &wanted {
        Some(cc) => in_path(cc.as_ref()),
        None => names.iter().find_map(|name| in_path(name.as_ref())),
    };
    let Some(driver) = found else {
        return Err(match wanted {
            Some(cc) => Error::Toolchain {
                program: cc.to_string_lossy().into_owned(),
                what: format!("is no program, expected the name or path of one in {variable}, without arguments, found none"),
                help: Some(install_cc(triple)),
            },
            None => Error::Toolchain {
                program: names.first().map_or("cc", |n| n).to_string(),
                what: "not found, expected a C compiler to link with, found none in PATH".into(),
                help: Some(install_cc(triple)),
            },
        });
    };
    let clang = driver.file_name().is_some_and(|name| name.to_string_lossy().starts_with("clang"));
    let driver_args = if clang && !host { vec![format!("--target={gnu}")] } else { vec![] };
    Ok(Tools { triple: triple.into(), driver, driver_args, lld: find_lld() })
}

fn find_lld() -> Option<PathBuf> {
    if let Some(lld) = in_path("ld.lld".as_ref()) {
        return lld.parent().map(Path::to_path_buf);
    }
    // Debian's lld-19 puts only `ld.lld-19` into the search path; the directory that it links to has the plain name.
    let real = std::fs::canonicalize(in_path("ld.lld-19".as_ref())?).ok()?;
    let dir = real.parent()?;
    is_program(&dir.join("ld.lld")).then(|| dir.to_path_buf())
}

/// A program by name (searched in `PATH`) or path.
pub fn in_path(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return std::path::absolute(name).ok().filter(|p| is_program(p));
    }
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(name)).find(|p| p.is_absolute() && is_program(p))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// The line that says why a compiler or linker failed: the last error that is not the driver's own about it.
fn cause(text: &str) -> &str {
    const OF_DRIVER: [&str; 5] =
        ["ld returned", "linker command failed", "compilation terminated", "generated.", "too many errors emitted"];
    let says = |words: &'static [&str]| {
        text.lines().rev().find(|l| words.iter().any(|w| l.contains(w)) && !OF_DRIVER.iter().any(|w| l.contains(w)))
    };
    let said = says(&["rror: ", "cannot find"]).or_else(|| says(&["rror"])).or_else(|| text.lines().last());
    said.unwrap_or("no message").trim()
}

/// What a compiler says that lacks its linker, its C library or its headers, or is one for another machine.
const OF_MISSING_PARTS: [&str; 9] = [
    "cannot find",
    "unable to find",
    "No such file",
    "needs glibc",
    "unrecognized command-line option",
    "unrecognized argument",
    "unknown argument",
    "unsupported option",
    "is incompatible with",
];

/// What a step of the toolchain did not have.
#[derive(Debug, PartialEq, Eq)]
enum Lack {
    Space,
    Memory,
    Parts,
}

/// What it seems to lack by what it says, and by the signal that ended it or one of its programs. (A linker that writes to a mapped file on
/// a full disk gets SIGBUS, 7.)
fn lack(text: &str, signal: Option<i32>) -> Option<Lack> {
    let says = |words: &[&str]| words.iter().any(|words| text.contains(words));
    if signal == Some(7) || says(&["No space left", "with signal 7"]) {
        Some(Lack::Space)
    } else if matches!(signal, Some(6 | 9)) || says(&["with signal 6", "with signal 9", "Killed signal"]) {
        Some(Lack::Memory)
    } else {
        says(&OF_MISSING_PARTS).then_some(Lack::Parts)
    }
}

/// Whether a disk has so little left that a step of the toolchain may have failed for it.
fn is_full(dir: &Path) -> bool {
    rustix::fs::statvfs(dir).is_ok_and(|fs| fs.f_bavail.saturating_mul(fs.f_frsize) < FULL_BYTES)
}

fn no_space(dir: &Path) -> String {
    format!("no space left on the disk of {}", guard::parent(dir).display())
}

impl Tools {
    /// Runs the driver with `args` in `dir`. Errors name the program and its last line.
    pub(crate) fn run(&self, args: &[String], dir: &Path, doing: &str) -> Result<(), Error> {
        let program = self.driver.display().to_string();
        let failed = |what: String, help: Option<String>| Err(Error::Toolchain { program: program.clone(), what, help });
        let mut command = Command::new(&self.driver);
        for name in CHANGING {
            command.env_remove(name);
        }
        command.args(&self.driver_args).args(args).env("SOURCE_DATE_EPOCH", "0").env("TMPDIR", dir);
        match guard::run(&mut command, dir, TIMEOUT) {
            Err(e) if e.kind() == std::io::ErrorKind::StorageFull => failed(format!("{doing} failed: {e}"), Some(no_space(dir))),
            Err(e) => {
                let missing = matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::PermissionDenied);
                failed(format!("{doing} failed: {e}"), missing.then(|| install_cc(&self.triple)))
            }
            Ok(Finished { status: None, .. }) => failed(format!("{doing} took longer than {} s", TIMEOUT.as_secs()), None),
            Ok(Finished { status: Some(status), .. }) if status.success() => {
                let output = args.iter().skip_while(|arg| *arg != "-o").nth(1);
                match output.is_none_or(|path| dir.join(path).is_file()) {
                    true => Ok(()),
                    false => failed(format!("{doing} failed: it ended well and wrote nothing"), Some(install_cc(&self.triple))),
                }
            }
            Ok(Finished { status: Some(status), text }) => {
                let help = match lack(&text, status.signal()) {
                    _ if is_full(dir) => Some(no_space(dir)),
                    Some(Lack::Space) => Some(no_space(dir)),
                    Some(Lack::Memory) => Some("it may have had too little memory: raise the limit of memory, or build elsewhere".into()),
                    Some(Lack::Parts) => Some(install_cc(&self.triple)),
                    None => None,
                };
                failed(format!("{doing} failed ({status}): {}", cause(&text)), help)
            }
        }
    }

    /// Arguments that choose LLD, if there is one.
    pub(super) fn linker_args(&self) -> Vec<String> {
        match &self.lld {
            Some(dir) => vec!["-fuse-ld=lld".into(), format!("-B{}", dir.display())],
            None => vec![],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_linker_speaks_for_itself() {
        let of_gcc = "ld.lld: error: undefined symbol: f\n>>> referenced by stub.o\ncollect2: error: ld returned 1 exit status\n";
        assert_eq!(cause(of_gcc), "ld.lld: error: undefined symbol: f");
        let of_clang =
            "ld.lld: error: undefined symbol: f\nclang: error: linker command failed with exit code 1 (use -v to see invocation)\n";
        assert_eq!(cause(of_clang), "ld.lld: error: undefined symbol: f");
        let killed = "collect2: fatal error: ld terminated with signal 6 [Aborted]\ncompilation terminated.\n";
        assert_eq!(cause(killed), "collect2: fatal error: ld terminated with signal 6 [Aborted]");
        let many = "ld.lld: error: x.o is incompatible with elf64-x86-64\nld.lld: error: too many errors emitted, stopping now (use --error-limit=0 to see all errors)\n";
        assert_eq!(cause(many), "ld.lld: error: x.o is incompatible with elf64-x86-64");
        let silent = "collect2: error: ld returned 1 exit status\n";
        assert_eq!(cause(silent), silent.trim());
        let stub = "stub.c:15:2: error: #error \"too old\"\n   15 | #error \"too old\"\n      |  ^~~~~\n";
        assert_eq!(cause(stub), "stub.c:15:2: error: #error \"too old\"");
        let of_clang = "stub.c:15:2: error: \"too old\"\n   15 | #error \"too old\"\n      |  ^\n1 error generated.\n";
        assert_eq!(cause(of_clang), "stub.c:15:2: error: \"too old\"");
        assert_eq!((cause("words\n"), cause("")), ("words", "no message"));
    }

    #[test]
    fn what_a_step_lacks() {
        for (text, signal, lacks) in [
            ("ld: final link failed: No space left on device", None, Some(Lack::Space)),
            ("collect2: fatal error: ld terminated with signal 7 [Bus error], core dumped", None, Some(Lack::Space)),
            ("collect2: fatal error: ld terminated with signal 6 [Aborted]", None, Some(Lack::Memory)),
            ("gcc: fatal error: Killed signal terminated program cc1", None, Some(Lack::Memory)),
            ("", Some(9), Some(Lack::Memory)),
            ("", Some(7), Some(Lack::Space)),
            ("/usr/bin/ld: cannot find -lm: No such file or directory", None, Some(Lack::Parts)),
            ("ld.lld: error: undefined symbol: f", None, None),
            ("", Some(15), None),
        ] {
            assert_eq!(lack(text, signal), lacks, "{text}");
        }
    }
}
