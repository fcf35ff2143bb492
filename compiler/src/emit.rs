//! What a build writes beside its executable: texts of stages (`--emit`, `--dump-dir`), objects, the linker's files (`--save-temps`).

use crate::error::Error;
use crate::link;
use crate::link::guard::{self, WorkDir};
use crate::options::{Build, Emit, EmitKind};
use crate::report::Report;
use rcompile_codegen::Compiled;
use rcompile_graph::Module;
use rcompile_runtime::destination::{Destination, destination};
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// What `--emit` writes beside the executable, and the extension where no path is given.
pub(crate) const EXTENSIONS: [(EmitKind, &str); 5] = [
    (EmitKind::Graph, "graph"),
    (EmitKind::Program, "program"),
    (EmitKind::LlvmIr, "ll"),
    (EmitKind::Asm, "s"),
    (EmitKind::Obj, "objects"),
];

/// `step.8`.
pub(crate) fn bucket_name(module: &Module) -> String {
    let rows = module.bound("T").map_or(String::new(), |rows| format!(".{rows}"));
    format!("{}{rows}", module.main().name)
}

/// `--dump-dir`: the text of one bucket after a stage or pass.
pub(crate) fn dump(dir: Option<&Path>, module: &Module, name: &str, text: &str) -> Result<(), Error> {
    let Some(dir) = dir else { return Ok(()) };
    let dir = dir.join(bucket_name(module));
    std::fs::create_dir_all(&dir).map_err(|e| Error::output(&dir, "creating", &e))?;
    write_whole(&dir.join(name), text.as_bytes())
}

/// Removes what an earlier build dumped of this bucket.
pub(crate) fn clear_dumps(dir: Option<&Path>, module: &Module) -> Result<(), Error> {
    let entries = dir.and_then(|dir| std::fs::read_dir(dir.join(bucket_name(module))).ok());
    for path in entries.into_iter().flatten().flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|e| e == "graph" || e == "program") {
            std::fs::remove_file(&path).map_err(|e| Error::output(&path, "removing", &e))?;
        }
    }
    Ok(())
}

/// Writes a file whole or not at all; to a device, a pipe or what is open already (`/dev/fd/3`) as it comes.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let written = destination(path).and_then(|destination| match destination {
        Destination::File(file) => guard::write_whole(&file, bytes),
        Destination::Present => OpenOptions::new().append(true).open(path)?.write_all(bytes),
    });
    written.map_err(|e| Error::output(path, "writing", &e))
}

/// Where something emitted goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EmitTo {
    Path(PathBuf),
    Stdout,
}

/// As given, else `OUT.<extension>`, else stdout.
pub(crate) fn emit_to(o: &Build, emit: &Emit, extension: &str) -> EmitTo {
    match &emit.path {
        Some(_) if emit.to_stdout() => EmitTo::Stdout,
        Some(path) => EmitTo::Path(path.clone()),
        None => o.exe_path().map_or(EmitTo::Stdout, |out| EmitTo::Path(suffixed(out, extension))),
    }
}

/// `OUT.<extension>`.
pub(crate) fn suffixed(path: &Path, extension: &str) -> PathBuf {
    let mut path = path.as_os_str().to_os_string();
    path.push(".");
    path.push(extension);
    path.into()
}

/// Where `--emit` of this kind goes, if it is asked for.
pub(crate) fn emitted(o: &Build, kind: EmitKind) -> Option<EmitTo> {
    let (_, extension) = EXTENSIONS.into_iter().find(|e| e.0 == kind)?;
    o.emits(kind).map(|emit| emit_to(o, emit, extension))
}

/// Writes a text where it was asked for; without a path it is part of what goes to stdout. A dry run writes no file. False: it went
/// nowhere.
pub(crate) fn text(o: &Build, kind: EmitKind, text: impl FnOnce() -> String, report: &mut Report) -> Result<bool, Error> {
    let Some(to) = emitted(o, kind) else { return Ok(false) };
    match to {
        EmitTo::Path(_) if o.dry_run => return Ok(false),
        EmitTo::Path(path) => write_whole(&path, text().as_bytes())?,
        EmitTo::Stdout => report.text += &text(),
    }
    Ok(true)
}

/// The same of the stage that made the text, which a build that stops after it prints in any case.
pub(crate) fn of_stage(o: &Build, kind: EmitKind, make: impl Fn() -> String, is_last: bool, report: &mut Report) -> Result<(), Error> {
    if !text(o, kind, &make, report)? && is_last && o.stop_after.is_some() {
        report.text += &make();
    }
    Ok(())
}

/// `--emit llvm-ir,asm,obj`: texts of all units in one file, objects in a directory.
pub(crate) fn code(o: &Build, symbols: &[String], objects: &[Compiled], report: &mut Report) -> Result<(), Error> {
    for (kind, comment) in [(EmitKind::LlvmIr, ';'), (EmitKind::Asm, '#')] {
        let all = || {
            let mut all = String::new();
            for (symbol, unit) in symbols.iter().zip(objects) {
                let body = if kind == EmitKind::Asm { &unit.asm } else { &unit.llvm_ir };
                let _ = writeln!(all, "{comment} unit {symbol}\n{}", body.as_deref().unwrap_or_default());
            }
            all
        };
        text(o, kind, all, report)?;
    }
    if let Some(to) = emitted(o, EmitKind::Obj) {
        let EmitTo::Path(dir) = to else { return Err(Error::bug("--emit obj", "no directory")) };
        std::fs::create_dir_all(&dir).map_err(|e| Error::output(&dir, "creating", &e))?;
        clear_objects(&dir, symbols)?;
        for (symbol, unit) in symbols.iter().zip(objects) {
            write_whole(&dir.join(format!("{symbol}.o")), &unit.object)?;
        }
    }
    Ok(())
}

/// Objects of another build in a directory of them, which would be linked with those of this one, go.
fn clear_objects(dir: &Path, symbols: &[String]) -> Result<(), Error> {
    for path in std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let symbol = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".o"));
        if symbol.is_some_and(|s| s.starts_with("rc_") && !symbols.iter().any(|of_this| of_this == s)) {
            std::fs::remove_file(&path).map_err(|e| Error::output(&path, "removing", &e))?;
        }
    }
    Ok(())
}

/// `--save-temps`: what the linker got, with readable names; `sh command` there links it again.
pub(crate) fn save_temps(work: &WorkDir, output: &Path, objects: &[(String, Vec<u8>)], archive: &[u8]) -> Result<(), Error> {
    let dir = suffixed(output, "temps");
    std::fs::create_dir_all(&dir).map_err(|e| Error::output(&dir, "creating", &e))?;
    write_whole(&dir.join("runtime.a"), archive)?;
    let list = link::list_of_objects(objects.iter().map(|(symbol, _)| format!("{symbol}.o")));
    write_whole(&dir.join("objects"), list.as_bytes())?;
    for name in ["start.c", "stub.c", "start.o", "stub.o", "payload.ld", "command", "log"] {
        if let Ok(bytes) = std::fs::read(work.path().join(name)) {
            write_whole(&dir.join(name), &bytes)?;
        }
    }
    objects.iter().try_for_each(|(symbol, object)| write_whole(&dir.join(format!("{symbol}.o")), object))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_another_build_go() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["rc_a.o", "rc_b.o", "mine.o", "rc_c.s"] {
            std::fs::write(dir.path().join(name), name).unwrap();
        }
        clear_objects(dir.path(), &["rc_a".into()]).unwrap();
        let mut left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["mine.o", "rc_a.o", "rc_c.s"]);
    }
}
