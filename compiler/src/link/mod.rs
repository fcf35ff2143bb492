//! Link: objects, runtime archive and payload become one executable, which is re-read and checked before it gets its name.
//!
//! ```text
//! start.c, stub.c (filled) --cc--> start.o, stub.o + unit objects + runtime archive
//!   --linker--> linked (static-pie, payload section of one byte)
//!   -> payload appended at a 2 MB border, its headers patched   -> weights packed in place by `pack`
//!   -> header last, fsync -> re-read: ELF, hashes -> renamed, directory synced
//! ```
//! All of it happens in a [`WorkDir`] beside the output. Only this module starts processes.

mod elf;
pub mod guard;
pub mod payload;
pub mod tools;

use crate::error::Error;
use crate::targets::platform;
use guard::WorkDir;
use rcompile_codegen::host::SINGLE_THREAD_RUNTIME;
use rcompile_runtime::abi::PayloadHeader;
use std::fmt::Write;
use std::mem::offset_of;
use std::path::PathBuf;
use tools::Tools;

const START: &str = include_str!("../../../templates/start.c");
const STUB: &str = include_str!("../../../templates/stub.c");
const SCRIPT: &str = include_str!("../../../templates/payload.ld");

/// One generated step function or probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Bucket capacity in rows, or the probe's number.
    pub bucket: u32,
    /// Index into the manifest's entries, or `PROBE_ENTRY`.
    pub entry: u32,
    /// Symbol of the function.
    pub symbol: String,
}

/// What is linked.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Rows of the table of steps.
    pub steps: &'a [Step],
    /// Names (for `--save-temps` and messages) and bytes of the objects.
    pub objects: &'a [(String, Vec<u8>)],
    /// The runtime archive.
    pub archive: &'a [u8],
}

/// The executable without its payload.
#[derive(Debug)]
pub struct Linked {
    path: PathBuf,
    triple: String,
    image: elf::Image,
    len: u64,
}

impl Linked {
    /// Length of the file without payload.
    pub fn len_bytes(&self) -> u64 {
        self.len
    }
}

/// The entry stub for these steps.
pub fn fill_stub(steps: &[Step]) -> String {
    let (mut declarations, mut table) = (String::new(), String::new());
    for step in steps {
        let _ = writeln!(declarations, "extern void {}(const void *, unsigned, unsigned);", step.symbol);
        let _ = writeln!(table, "    {{ {}, {}, {} }},", step.bucket, step.entry, step.symbol);
    }
    // The marks stand alone on their lines; the comment on top of the template names them too.
    STUB.replace("\n@DECLARATIONS@\n", &format!("\n{declarations}")).replace("\n@TABLE@\n", &format!("\n{table}"))
}

/// Compiles start and stub, and links.
pub fn link(work: &WorkDir, tools: &Tools, inputs: Inputs<'_>) -> Result<Linked, Error> {
    work.write("start.c", START.as_bytes())?;
    work.write("stub.c", fill_stub(inputs.steps).as_bytes())?;
    work.write("payload.ld", SCRIPT.as_bytes())?;
    work.write("runtime.a", inputs.archive)?;
    for (index, (_, bytes)) in inputs.objects.iter().enumerate() {
        work.write(&object_name(index), bytes)?;
    }
    work.write("objects", list_of_objects((0..inputs.objects.len()).map(object_name)).as_bytes())?;
    let args = |list: &[&str]| list.iter().map(|s| s.to_string()).collect::<Vec<_>>();
    let protection = platform(&tools.triple).protection;
    let mut compile = args(&["-O2", "-fPIE", "-ffreestanding", "-fno-stack-protector", protection]);
    compile.push(format!("-DCHECKSUM_AT={}", offset_of!(PayloadHeader, image_checksum)));
    compile.extend(args(&["-c", "start.c", "stub.c"]));
    tools.run(&compile, work.path(), "compiling the entry stub")?;
    // Everything is named relative to the work directory, so that its random name gets into no file.
    let mut link = args(&["-static-pie", "-o", "linked", "@objects", "runtime.a", "-pthread", "-lm", "-ldl"]);
    link.extend(tools.linker_args());
    link.extend(args(&[
        "-Wl,-T,payload.ld",
        "-Wl,-e,rc_start",
        "-Wl,--wrap=_end",
        "-Wl,--gc-sections",
        "-Wl,-O1",
        // Names of functions stay (for profilers), line tables of the runtime go.
        "-Wl,--strip-debug",
        // Some 24000 addresses of the runtime's tables in 8 KB instead of 570.
        "-Wl,-z,pack-relative-relocs",
        "-Wl,-z,relro",
        "-Wl,-z,now",
        "-Wl,-z,noexecstack",
        "-Wl,-z,separate-code",
        "-Wl,--build-id=none",
        "-Wl,--no-undefined",
    ]));
    let driver = tools.driver.to_string_lossy();
    let words: Vec<String> = [&*driver].into_iter().chain(tools.driver_args.iter().chain(&link).map(String::as_str)).map(quoted).collect();
    work.write("command", format!("{}\n", words.join(" ")).as_bytes())?;
    tools.run(&link, work.path(), "linking")?;
    // Tens of megabytes that the payload may need on a small disk.
    work.remove("runtime.a");
    let path = work.path().join("linked");
    let bytes = std::fs::read(&path).map_err(|e| Error::output(&path, "reading", &e))?;
    let image = elf::check(&bytes, &tools.triple, &path)?;
    Ok(Linked { path, triple: tools.triple.clone(), image, len: bytes.len() as u64 })
}

/// Links objects to a shared object for this process, on one thread. `tools` are this machine's.
pub fn link_host(work: &WorkDir, tools: &Tools, objects: &[Vec<u8>]) -> Result<PathBuf, Error> {
    work.write("host.c", SINGLE_THREAD_RUNTIME.as_bytes())?;
    let mut args: Vec<String> = ["-O2", "-shared", "-fPIC", "-nostdlib", "-o", "host.so", "host.c"].map(String::from).into();
    for (index, bytes) in objects.iter().enumerate() {
        let name = object_name(index);
        work.write(&name, bytes)?;
        args.push(name);
    }
    tools.run(&args, work.path(), "linking code for this machine")?;
    Ok(work.path().join("host.so"))
}

/// What the linker reads by one name: these objects, behind those of the entry.
pub fn list_of_objects(names: impl Iterator<Item = String>) -> String {
    ["start.o", "stub.o"].map(String::from).into_iter().chain(names).map(|name| name + "\n").collect()
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "@%+=:,./_-".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) { word.to_string() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

/// Name of an object in the work directory.
pub fn object_name(index: usize) -> String {
    format!("unit{index:04}.o")
}

#[cfg(test)]
mod tests;
