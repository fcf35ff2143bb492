//! `rcompile doctor`: is everything here that a build needs, and how to get what is not.

use crate::error::Error;
use crate::link::guard::WorkDir;
use crate::link::{self, Inputs, tools};
use crate::{report, targets};
use rcompile_codegen::isa::{HOST_TRIPLE, Isa};
use rcompile_message::size;
use serde::Serialize;
use std::path::Path;

/// One check.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    ok: bool,
    /// A build for this machine works without it.
    optional: bool,
    found: String,
    help: Option<String>,
    /// What a build would end with.
    #[serde(skip)]
    error: Option<Error>,
}

/// Runs all checks; exit code 8 when one that a build needs fails.
pub fn run(json: bool) -> Result<(), Error> {
    let checks = vec![cpu(), driver(), lld(), linking(), runtime(), disk(), cross(), qemu()];
    if json {
        report::print_json(&checks)?;
    } else {
        let mut out = String::new();
        for c in &checks {
            let state = match (c.ok, c.optional) {
                (true, _) => "ok",
                (false, true) => "-",
                (false, false) => "MISSING",
            };
            out += &format!("{state:<8} {:<10} {}\n", c.name, c.found);
            if let Some(help) = c.help.as_ref().filter(|_| !c.ok) {
                out += &format!("{:<8} {:<10} -> {help}\n", "", "");
            }
        }
        report::print(&out)?;
    }
    match checks.into_iter().find(|c| !c.ok && !c.optional) {
        Some(c) => Err(c.error.unwrap_or_else(|| Error::Toolchain { program: c.name.into(), what: c.found, help: c.help })),
        None => Ok(()),
    }
}

fn cpu() -> Check {
    let (ok, found) = match Isa::native() {
        Ok(isa) => (true, format!("LLVM 19, this CPU is {} ({} lanes of f32)", isa.name, isa.lanes)),
        Err(e) => (false, e.to_string()),
    };
    Check { name: "llvm, cpu", ok, optional: false, found, help: Some("--cpu NAME compiles for another machine".into()), error: None }
}

fn driver() -> Check {
    let found = tools::find(HOST_TRIPLE).map(|t| t.driver.display().to_string());
    needed("compiler", found)
}

fn lld() -> Check {
    let lld = tools::find(HOST_TRIPLE).ok().and_then(|t| t.lld);
    let found = lld.as_ref().map_or("not found, GNU ld is used".into(), |d| d.join("ld.lld").display().to_string());
    Check { name: "lld", ok: lld.is_some(), optional: true, found, help: Some("apt-get install lld-19 (links faster)".into()), error: None }
}

/// A check that fails as a build would.
fn needed(name: &'static str, found: Result<String, Error>) -> Check {
    match found {
        Ok(found) => Check { name, ok: true, optional: false, found, help: None, error: None },
        Err(e) => Check { name, ok: false, optional: false, found: e.to_string(), help: e.help().map(str::to_owned), error: Some(e) },
    }
}

/// Links an executable that does nothing: in a temporary directory, else in this one.
fn linking() -> Check {
    let try_it = || {
        let name = Path::new("rcompile-doctor");
        let work = WorkDir::create(&std::env::temp_dir().join(name)).or_else(|e| WorkDir::create(name).map_err(|_| e))?;
        let tools = tools::find(HOST_TRIPLE)?;
        work.write(
            "main.c",
            b"int rc_main(int c, char **v, const void *p, const void *s) { (void)c; (void)v; (void)p; (void)s; return 0; }\n",
        )?;
        let args = ["-fPIE", "-c", "main.c", "-o", "main.o"].map(String::from);
        tools.run(&args, work.path(), "compiling")?;
        let object = work.path().join("main.o");
        let object = std::fs::read(&object).map_err(|e| Error::output(&object, "compiling", &e))?;
        // An empty archive: the object brings rc_main.
        let objects = [("main".to_string(), object)];
        link::link(&work, &tools, Inputs { steps: &[], objects: &objects, archive: b"!<arch>\n" })
    };
    needed("linking", try_it().map(|linked| format!("a static-pie of {}", size(linked.len_bytes()))))
}

fn runtime() -> Check {
    let bytes = targets::runtime(HOST_TRIPLE);
    let found = bytes.map_or(format!("none for {HOST_TRIPLE}"), |b| format!("{HOST_TRIPLE}, {}", size(b.len() as u64)));
    Check {
        name: "runtime",
        ok: bytes.is_some(),
        optional: false,
        found,
        help: Some("build rcompile on a supported machine".into()),
        error: None,
    }
}

fn disk() -> Check {
    let (ok, found) = match rustix::fs::statvfs(".") {
        Ok(fs) => {
            let free = fs.f_bavail.saturating_mul(fs.f_frsize);
            (free > 1 << 30, format!("{} free in this directory", size(free)))
        }
        Err(e) => (true, format!("unknown: {e}")),
    };
    Check { name: "disk", ok, optional: true, found, help: Some("an executable needs as much as its model".into()), error: None }
}

/// The other architecture's runtime and linker.
fn cross() -> Check {
    let missing = targets::list().into_iter().filter(|t| !t.host).find_map(|t| t.missing.map(|help| (t.triple, help)));
    let (ok, found, help) = match missing {
        None => (true, "runtimes and linkers of all targets".to_string(), None),
        Some((triple, help)) => (false, format!("cannot link for {triple}"), Some(help)),
    };
    Check { name: "cross", ok, optional: true, found, help, error: None }
}

fn qemu() -> Check {
    let name = targets::foreign().emulator;
    let found = [name.to_string(), format!("{name}-static")].iter().find_map(|n| tools::in_path(n.as_ref()));
    let help = Some("apt-get install qemu-user (runs executables of the other architecture here)".into());
    Check { name: "qemu", ok: found.is_some(), optional: true, found: show(found), help, error: None }
}

fn show(path: Option<std::path::PathBuf>) -> String {
    path.map_or("not found".into(), |p| p.display().to_string())
}
