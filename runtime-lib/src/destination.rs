//! Where something that is written under a name goes: the same rule for what the compiler writes and for what executables write.
//!
//! In: a path. Out: the file that is replaced when a new one is whole, or that what is there is written to as it is.

use std::io::{Error, ErrorKind, Result};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Most links that a name leads through.
const LINKS_MAX: usize = 40;

/// Where something that is written under a name goes.
#[derive(Debug, PartialEq, Eq)]
pub enum Destination {
    /// A regular file, there or not, links followed: it gets its name when it is whole.
    File(PathBuf),
    /// A device, a pipe, or a file that is open already (`/dev/fd/3`): it is written to. Or a directory.
    Present,
}

/// Follows a name. Errors: it lies in no directory, or the links have no end.
pub fn destination(path: &Path) -> Result<Destination> {
    let mut path = path.to_path_buf();
    for _ in 0..LINKS_MAX {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let parent = std::fs::canonicalize(parent)?;
        if !parent.is_dir() {
            return Err(ErrorKind::NotADirectory.into());
        }
        // Links there lead to what is open, whatever name that has or had.
        if parent.starts_with("/proc") || path.as_os_str().as_bytes().ends_with(b"/") {
            return Ok(Destination::Present);
        }
        match (std::fs::read_link(&path), path.file_name()) {
            (Ok(to), _) => path = parent.join(to),
            (Err(_), Some(name)) if std::fs::metadata(&path).map_or(true, |m| m.is_file()) => {
                return Ok(Destination::File(parent.join(name)));
            }
            (Err(_), _) => return Ok(Destination::Present),
        }
    }
    Err(Error::other("too many links"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_followed() {
        let dir = std::env::temp_dir().join(format!("rcompile-destination-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let at = |name: &str| dir.canonicalize().unwrap().join(name);
        std::fs::write(at("file"), "").unwrap();
        for (link, to) in [("link", "file"), ("second", "link"), ("dangling", "new"), ("cycle", "cycle"), ("nowhere", "no/where")] {
            std::os::unix::fs::symlink(to, at(link)).unwrap();
        }
        for (name, file) in [("file", "file"), ("link", "file"), ("second", "file"), ("dangling", "new"), ("new", "new")] {
            assert_eq!(destination(&at(name)).unwrap(), Destination::File(at(file)), "{name}");
        }
        for name in ["cycle", "nowhere", "no/where", "file/x"] {
            assert!(destination(&at(name)).is_err(), "{name}");
        }
        for name in ["/dev/null", "/dev/stdout", "/dev/fd/0", "/proc/self/fd/2", "/tmp", "/"] {
            assert_eq!(destination(Path::new(name)).unwrap(), Destination::Present, "{name}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
