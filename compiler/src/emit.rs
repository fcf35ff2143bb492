//! What a build writes beside its executable: texts of stages (`--emit`, `--dump-dir`), objects, the linker's files (`--save-temps`). And the
//! check that nothing which a build writes takes the place of what it reads.

use crate::error::Error;
use crate::link::guard::{self, WorkDir};
use crate::link::payload;
use crate::options::{Autotune, Build, EmitKind};
use crate::report::Report;
use rcompile_codegen::Compiled;
use rcompile_graph::Module;
use rcompile_models::Model;
use std::collections::HashSet;
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Texts that `--emit` writes, each into one file; the second is the extension where no path is given.
pub(crate) const GRAPH: (EmitKind, &str) = (EmitKind::Graph, "graph");
pub(crate) const PROGRAM: (EmitKind, &str) = (EmitKind::Program, "program");
const LLVM_IR: (EmitKind, &str) = (EmitKind::LlvmIr, "ll");
const ASM: (EmitKind, &str) = (EmitKind::Asm, "s");
const TEXTS: [(EmitKind, &str); 4] = [GRAPH, PROGRAM, LLVM_IR, ASM];

/// `step.8`.
pub(crate) fn bucket_name(module: &Module) -> String {
    let rows = module.symbol("T").map_or(0, |s| module.symbols[s.index()].bound);
    format!("{}.{rows}", module.main().name)
}

/// `--dump-dir`.
pub(crate) struct Dump<'a> {
    pub(crate) dir: Option<&'a Path>,
}

impl Dump<'_> {
    /// The text of one bucket after a stage or pass.
    pub(crate) fn write(&self, module: &Module, name: &str, text: &str) -> Result<(), Error> {
        let Some(dir) = self.dir else { return Ok(()) };
        let dir = dir.join(bucket_name(module));
        std::fs::create_dir_all(&dir).map_err(|e| Error::output(&dir, "creating", &e))?;
        write_whole(&dir.join(name), text.as_bytes())
    }
}

/// Writes a file whole or not at all; what is there and is no file (`/dev/stderr`, a pipe) is written to.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let written =
        if std::fs::metadata(path).is_ok_and(|m| !m.is_file()) { std::fs::write(path, bytes) } else { guard::write_whole(path, bytes) };
    written.map_err(|e| Error::output(path, "writing", &e))
}

/// Path of something emitted: as given, else `OUT.<extension>`; None: stdout.
fn emit_path(o: &Build, path: Option<&Path>, extension: &str) -> Option<PathBuf> {
    match path {
        Some(path) => (path != Path::new("-")).then(|| path.to_path_buf()),
        None => o.exe_path().map(|out| suffixed(out, extension)),
    }
}

fn suffixed(path: &Path, extension: &str) -> PathBuf {
    let mut path = path.as_os_str().to_os_string();
    path.push(".");
    path.push(extension);
    path.into()
}

/// Writes a text where it was asked for; without a path it is part of what goes to stdout. A dry run writes no file. False: it went nowhere.
pub(crate) fn text(
    o: &Build,
    (kind, extension): (EmitKind, &str),
    text: impl FnOnce() -> String,
    report: &mut Report,
) -> Result<bool, Error> {
    let Some(emit) = o.emits(kind) else { return Ok(false) };
    match emit_path(o, emit.path.as_deref(), extension) {
        Some(_) if o.dry_run => return Ok(false),
        Some(path) => write_whole(&path, text().as_bytes())?,
        None => report.text += &text(),
    }
    Ok(true)
}

/// `--emit llvm-ir,asm,obj`: texts of all units in one file, objects in a directory.
pub(crate) fn code(o: &Build, symbols: &[String], objects: &[Compiled], report: &mut Report) -> Result<(), Error> {
    for (kind, comment) in [(LLVM_IR, ';'), (ASM, '#')] {
        let all = || {
            let mut all = String::new();
            for (symbol, unit) in symbols.iter().zip(objects) {
                let body = if kind == ASM { &unit.asm } else { &unit.llvm_ir };
                let _ = writeln!(all, "{comment} unit {symbol}\n{}", body.as_deref().unwrap_or_default());
            }
            all
        };
        text(o, kind, all, report)?;
    }
    if let Some(emit) = o.emits(EmitKind::Obj) {
        let Some(dir) = emit_path(o, emit.path.as_deref(), "objects") else {
            return Err(Error::bug("--emit obj", "no directory"));
        };
        std::fs::create_dir_all(&dir).map_err(|e| Error::output(&dir, "creating", &e))?;
        for (symbol, unit) in symbols.iter().zip(objects) {
            write_whole(&dir.join(format!("{symbol}.o")), &unit.object)?;
        }
    }
    Ok(())
}

/// `--save-temps`: what the linker got, with readable names.
pub(crate) fn save_temps(work: &WorkDir, output: &Path, objects: &[(String, Vec<u8>)], archive: &[u8]) -> Result<(), Error> {
    let dir = suffixed(output, "temps");
    std::fs::create_dir_all(&dir).map_err(|e| Error::output(&dir, "creating", &e))?;
    write_whole(&dir.join("runtime.a"), archive)?;
    for name in ["stub.c", "payload.ld", "command", "log"] {
        if let Ok(bytes) = std::fs::read(work.path().join(name)) {
            write_whole(&dir.join(name), &bytes)?;
        }
    }
    objects.iter().try_for_each(|(symbol, object)| write_whole(&dir.join(format!("{symbol}.o")), object))
}

/// Refuses outputs that would destroy something: an executable in the place of a directory or a device, anything in the place of an input of
/// this build or of a file beside the model's.
pub(crate) fn check_outputs(o: &Build, model: &Model) -> Result<(), Error> {
    let refuse = |path: &Path, what: &str| {
        let help = Some("choose another name".to_string());
        Err(Error::Output { path: path.display().to_string(), what: what.into(), help })
    };
    let mut outputs = Vec::new();
    if let Some(exe) = o.exe_path().filter(|_| o.wants_exe()) {
        if exe.parent().is_some_and(|dir| !dir.as_os_str().is_empty() && !dir.is_dir()) {
            return refuse(exe, "lies in no directory, expected one that exists, found none");
        }
        outputs.extend([exe.clone(), payload::weights_path(exe)]);
        for path in &outputs {
            match std::fs::metadata(path) {
                Ok(m) if m.is_dir() => return refuse(path, "is a directory, expected a file name, found a directory"),
                Ok(m) if !m.is_file() => return refuse(path, "is no regular file, expected a file name, found a device or pipe"),
                _ => {}
            }
        }
    }
    for (kind, extension) in TEXTS {
        outputs.extend(o.emits(kind).and_then(|emit| emit_path(o, emit.path.as_deref(), extension)));
    }
    let tunes = o.autotune != Autotune::Off;
    outputs.extend(o.tuning.clone().filter(|_| tunes));

    let beside = std::fs::read_dir(&o.model).into_iter().flatten().flatten().map(|entry| entry.path());
    let read = model.list_inputs().into_iter().map(|input| o.model.join(input.name));
    let others = o.quantize.calibrate.iter().chain(o.tuning.iter().filter(|_| !tunes)).cloned();
    let identity = |path: &Path| std::fs::metadata(path).ok().filter(|m| m.is_file()).map(|m| (m.dev(), m.ino()));
    let inputs: HashSet<(u64, u64)> = beside.chain(read).chain(others).filter_map(|path| identity(&path)).collect();
    match outputs.iter().find(|path| identity(path).is_some_and(|id| inputs.contains(&id))) {
        Some(path) => refuse(path, "is an input of this build, expected another file"),
        None => Ok(()),
    }
}
