//! A file that a verb writes: never in the place of what the process reads, and whole or not at all.
//!
//! A regular file is written under another name beside its own, which it gets at the end; any failure and any signal that ends the process
//! (but for those that [`set_signals`](crate::process::set_signals) can do nothing about, such as SIGKILL) removes it. What is there and is
//! no regular file (a pipe, `/dev/null`), or is open already (`/dev/fd/3`), is written to.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::error::Failure;
use crate::destination::{Destination, destination};
use crate::process::remove_at_signal;

/// A file that is being written.
#[derive(Debug)]
pub(super) struct OutputFile {
    file: File,
    draft: Option<Draft>,
}

impl OutputFile {
    /// Begins to write `path`, which must be none of `inputs` and not where stdin comes from or stdout goes to.
    pub(super) fn create(path: &Path, inputs: &[PathBuf]) -> Result<Self, Failure> {
        let found = identity(fs::metadata(path));
        if found.is_some() {
            let refuse = |what: &str| Err(failed(path, what).help("choose another name"));
            let open = |fd: BorrowedFd<'_>| identity(fd.try_clone_to_owned().and_then(|fd| File::from(fd).metadata()));
            if inputs.iter().any(|input| identity(fs::metadata(input)) == found) || open(io::stdin().as_fd()) == found {
                return refuse("is an input of this run, expected another file");
            }
            for (fd, name) in [(io::stdout().as_fd(), "stdout"), (io::stderr().as_fd(), "stderr")] {
                if open(fd) == found {
                    return refuse(&format!("is where {name} goes, expected another file"));
                }
            }
        }
        let begun = destination(path).and_then(|destination| match destination {
            Destination::File(target) => Draft::create(target).map(|(file, draft)| (file, Some(draft))),
            Destination::Present => File::options().append(true).open(path).map(|file| (file, None)),
        });
        let (file, draft) = begun.map_err(|e| failed(path, e))?;
        Ok(Self { file, draft })
    }

    /// The file is whole: it gets its name.
    pub(super) fn finish(self) -> io::Result<()> {
        self.draft.map_or(Ok(()), |draft| draft.publish(&self.file))
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The failure of an operation on an output.
pub(super) fn failed(path: &Path, what: impl std::fmt::Display) -> Failure {
    Failure::new(8, "output", format!("{}: {what}", path.display()))
}

/// Device and number of a regular file.
fn identity(meta: io::Result<fs::Metadata>) -> Option<(u64, u64)> {
    meta.ok().filter(fs::Metadata::is_file).map(|meta| (meta.dev(), meta.ino()))
}

/// A file under the name that it has until it is whole. Dropped before that, it is removed.
#[derive(Debug)]
struct Draft {
    path: PathBuf,
    target: PathBuf,
}

impl Draft {
    fn create(target: PathBuf) -> io::Result<(File, Draft)> {
        // The time tells it from what a process of the same number left that was killed.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_nanos());
        let path = target.with_file_name(format!(".rcompile-{}-{now:x}.tmp", std::process::id()));
        // Before it exists, so that there is no moment in which a signal leaves it.
        remove_at_signal(Some(CString::new(path.as_os_str().as_bytes())?));
        let file = File::create_new(&path).inspect_err(|_| remove_at_signal(None))?;
        Ok((file, Draft { path, target }))
    }

    fn publish(self, file: &File) -> io::Result<()> {
        if let Ok(meta) = fs::metadata(&self.target) {
            file.set_permissions(meta.permissions())?;
        }
        file.sync_all()?;
        fs::rename(&self.path, &self.target)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After `publish` nothing exists under the draft's name.
        let _ = fs::remove_file(&self.path);
        remove_at_signal(None);
    }
}
