//! All that a build writes, as one list, checked before any work: that it can be written, that no two outputs are one file, and that none
//! takes the place of what the build reads.
//!
//! In: the options. Out: nothing, or the error that names the file. How a name is followed to the place that is written ([`destination`])
//! is the same here and in `emit.rs`, which writes.

use crate::cache;
use crate::emit::{EXTENSIONS, EmitTo, emit_to, suffixed};
use crate::error::Error;
use crate::link::guard;
use crate::link::payload;
use crate::options::{Autotune, Build, EmitKind, WeightsPlace};
use rcompile_models::Model;
use rcompile_runtime::abi::weights_path;
use rcompile_runtime::destination::{Destination, destination};
use rustix::fs::Access;
use std::collections::HashSet;
use std::io::{Error as IoError, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Longest name of a file on Linux.
const NAME_MAX: usize = 255;

/// Something that a build writes.
#[derive(Debug)]
struct Output {
    /// The flag that asks for it.
    flag: String,
    /// Its name.
    path: PathBuf,
    /// What kind of file it is.
    shape: Shape,
    /// Its name is the executable's, or that with an extension.
    of_exe: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// A file that is made in a directory beside it: never a device or pipe.
    Executable,
    /// A text, written whole.
    Text,
    /// Made where it is missing, with its parents.
    Directory,
    /// The same of the compile cache, without which a build goes on where it cannot be made.
    Cache,
}

/// The list. What goes to stdout is not on it.
fn outputs(o: &Build) -> Vec<Output> {
    let mut list = Vec::new();
    let mut add = |flag: &str, path: PathBuf, shape, of_exe| list.push(Output { flag: flag.into(), path, shape, of_exe });
    if let Some(exe) = o.exe_path().filter(|_| o.wants_exe()) {
        add(if o.output.is_some() { "-o OUT" } else { "--emit exe=PATH" }, exe.clone(), Shape::Executable, true);
        if o.weights == WeightsPlace::Split {
            add("--weights split", weights_path(exe), Shape::Executable, true);
        }
        if o.save_temps {
            add("--save-temps", suffixed(exe, "temps"), Shape::Directory, true);
        }
    }
    for (kind, extension) in EXTENSIONS {
        let Some(emit) = o.emits(kind) else { continue };
        let EmitTo::Path(path) = emit_to(o, emit, extension) else { continue };
        let name = kind.name();
        let shape = if kind == EmitKind::Obj { Shape::Directory } else { Shape::Text };
        add(&format!("--emit {name}=PATH"), path, shape, emit.path.is_none());
    }
    if let Some(dir) = &o.dump_dir {
        add("--dump-dir DIR", dir.clone(), Shape::Directory, false);
    }
    if let Some(path) = o.tuning.as_ref().filter(|_| o.autotune != Autotune::Off) {
        add("--tuning FILE", path.clone(), Shape::Text, false);
    }
    if let Some(dir) = cache::directory(&o.cache) {
        add(if o.cache.cache_dir.is_some() { "--cache-dir D" } else { "the compile cache" }, dir, Shape::Cache, false);
    }
    list
}

/// Refuses, before any work, what cannot be written, and two outputs in one file.
pub(crate) fn check(o: &Build) -> Result<(), Error> {
    let mut files: Vec<(PathBuf, Output)> = Vec::new();
    for output in outputs(o) {
        let Some(file) = output.check()? else { continue };
        // Only in a directory can anything lie.
        let is_file = |shape: Shape| !matches!(shape, Shape::Directory | Shape::Cache);
        let is_within = |inner: &Path, outer: &Path, shape: Shape| is_file(shape) && inner.starts_with(outer);
        let collides = |(known, other): &&(PathBuf, Output)| is_within(&file, known, other.shape) || is_within(known, &file, output.shape);
        if let Some((known, other)) = files.iter().find(collides) {
            let (flags, path) = (format!("{} and {}", other.flag, output.flag), output.path.display());
            let what = match *known == file {
                true => format!("{flags} write to one place, {path}"),
                false => format!("{flags}: what is a file for one is a directory for the other, {} and {path}", other.path.display()),
            };
            return Err(Error::Usage { what, help: Some("give each a name of its own".into()) });
        }
        files.push((file, output));
    }
    Ok(())
}

/// Refuses outputs in the place of an input, and of what else lies in the model directory but an executable of ours and what came with it.
pub(crate) fn check_inputs(o: &Build, model: &Model) -> Result<(), Error> {
    let identity = |path: &Path| std::fs::metadata(path).ok().filter(|m| m.is_file()).map(|m| (m.dev(), m.ino()));
    let outputs = outputs(o);
    let read = model.list_inputs().into_iter().map(|input| o.model.join(input.name));
    let others = o.quantize.calibrate.iter().chain(o.tuning.iter().filter(|_| o.autotune == Autotune::Off)).cloned();
    let inputs: HashSet<(u64, u64)> = read.chain(others).filter_map(|path| identity(&path)).collect();
    let beside = std::fs::read_dir(&o.model).into_iter().flatten().flatten().map(|entry| entry.path());
    let beside: HashSet<(u64, u64)> = beside.filter_map(|path| identity(&path)).collect();
    // Nothing but a file is opened: a pipe would be waited for.
    let is_rebuild = o.exe_path().is_some_and(|exe| exe.is_file() && matches!(payload::identity(exe), Ok(Some(_))));
    // What is in the cache's place is left alone, with a warning.
    for output in outputs.iter().filter(|output| output.shape != Shape::Cache) {
        let Some(id) = identity(&output.path) else { continue };
        if inputs.contains(&id) {
            return Err(output.refuse("is an input of this build, expected another file"));
        }
        if beside.contains(&id) && !(is_rebuild && output.of_exe) {
            return Err(output.refuse("is a file of the model directory, expected a name that is free"));
        }
    }
    Ok(())
}

impl Output {
    /// The file or directory that is made or replaced, links followed; None where something is written to that is no file.
    fn check(&self) -> Result<Option<PathBuf>, Error> {
        match self.shape {
            Shape::Directory => return self.check_directory().map(Some),
            Shape::Cache => return Ok(self.place()),
            Shape::Executable | Shape::Text => {}
        }
        if self.path.as_os_str().as_bytes().ends_with(b"/") {
            return Err(self.refuse("is the name of a directory, expected a file name"));
        }
        match std::fs::metadata(&self.path) {
            Ok(m) if m.is_dir() => return Err(self.refuse("is a directory, expected a file name, found a directory")),
            Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Err(self.failed(&e)),
            _ => {}
        }
        let destination = destination(&self.path).map_err(|e| match e.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => self.refuse("lies in no directory, expected one that exists, found none"),
            _ => self.failed(&e),
        })?;
        match destination {
            Destination::Present if self.shape == Shape::Executable => {
                Err(self.refuse("is no regular file, expected a file name, found a device, a pipe or an open file"))
            }
            Destination::Present => Ok(None),
            Destination::File(file) => {
                // An executable takes the place of a link.
                let file = match (self.shape, self.path.file_name()) {
                    (Shape::Executable, Some(name)) => {
                        std::fs::canonicalize(guard::parent(&self.path)).map_err(|e| self.failed(&e))?.join(name)
                    }
                    _ => file,
                };
                rustix::fs::access(guard::parent(&file), Access::WRITE_OK).map_err(|e| self.failed(&e.into()))?;
                Ok(Some(file))
            }
        }
    }

    /// A directory that is there, or can be made in one that is.
    fn check_directory(&self) -> Result<PathBuf, Error> {
        let long = |c: &std::path::Component<'_>| c.as_os_str().len() > NAME_MAX;
        if self.path.components().any(|c| long(&c)) {
            return Err(self.refuse("has too long a name"));
        }
        let there = self.path.ancestors().find(|a| a.as_os_str().is_empty() || a.symlink_metadata().is_ok()).unwrap_or(Path::new("."));
        let there = if there.as_os_str().is_empty() { Path::new(".") } else { there };
        if !there.is_dir() {
            return Err(self.refuse("cannot be a directory, expected a name that is free or a directory's, found another file"));
        }
        rustix::fs::access(there, Access::WRITE_OK).map_err(|e| self.failed(&e.into()))?;
        let missing = self.path.strip_prefix(there).unwrap_or(&self.path);
        if missing.components().any(|c| c == std::path::Component::ParentDir) {
            return Err(self.refuse("goes through .. of a directory that is not there"));
        }
        Ok(std::fs::canonicalize(there).map_err(|e| self.failed(&e))?.join(missing))
    }

    /// Where a directory is or would be, whether it can be made or not.
    fn place(&self) -> Option<PathBuf> {
        let there = self.path.ancestors().find(|a| a.as_os_str().is_empty() || a.is_dir())?;
        let rest = self.path.strip_prefix(there).ok()?;
        let there = if there.as_os_str().is_empty() { Path::new(".") } else { there };
        Some(std::fs::canonicalize(there).ok()?.join(rest))
    }

    fn refuse(&self, what: &str) -> Error {
        let help = Some(format!("choose another name: {}", self.flag));
        Error::Output { path: self.path.display().to_string(), what: what.into(), help }
    }

    fn failed(&self, error: &IoError) -> Error {
        self.refuse(&format!("cannot be written: {error}"))
    }
}
