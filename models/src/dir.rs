//! Opening files of a model directory safely.
//!
//! In: a path from the command line and relative names from this crate or from an untrusted index. Out: regular files
//! inside that directory, and nothing else. Symbolic links are followed by hand: inside the directory freely (a cycle
//! ends with ELOOP), out of it only in the form of the Hugging Face cache, where `snapshots/<revision>/<file>` points to
//! `../../blobs/<hash>` of the same repository. FIFOs, sockets, devices and directories are refused before they are
//! opened; `O_NONBLOCK` and a second look at the open file close the gap between the two.
//!
//! Files are read with `pread` and compared at the end with what they were at the beginning ([`File::check_unchanged`]),
//! so that a file that is truncated or replaced under us is an error and never a signal.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::error::{DIRECTORY, Error, Kind, escape};

/// Symbolic links followed on the way to one file; the kernel's own number.
const LINKS_MAX: usize = 40;

/// An open model directory.
#[derive(Clone, Debug)]
pub struct ModelDir {
    root: Arc<Root>,
}

#[derive(Debug)]
struct Root {
    path: PathBuf,
    fd: OwnedFd,
    /// What was read as a whole so far.
    inputs: Mutex<Vec<InputFile>>,
}

/// A file that went into an executable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InputFile {
    /// Name relative to the model directory.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256 of the content in hexadecimal digits.
    pub sha256: String,
}

/// What must stay the same while a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, u64),
    /// Of contents, name or rights: unlike `modified` nobody can set it back.
    changed: (i64, u64),
}

/// An open regular file of a model directory.
#[derive(Debug)]
pub struct File {
    name: String,
    root: Arc<Root>,
    file: std::fs::File,
    identity: Identity,
}

impl ModelDir {
    /// Opens the directory at `path`. The path itself may be a link; it is the user's own word.
    pub fn open(path: &Path) -> Result<ModelDir, Error> {
        let shown = || path.display().to_string();
        let missing = |what, found: String| Error::new(Kind::Missing, shown(), DIRECTORY, what, "a model directory", found);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| match e {
            Errno::NOTDIR => missing("not a directory", "a file".to_string()),
            Errno::NOENT => {
                let e = missing("cannot be opened", errno(Errno::NOENT));
                e.help("nothing is downloaded: give a local directory, such as `hf download ORG/NAME --local-dir DIR` makes")
            }
            e => missing("cannot be opened", errno(e)),
        })?;
        Ok(ModelDir { root: Arc::new(Root { path: path.to_path_buf(), fd, inputs: Mutex::default() }) })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.root.path
    }

    /// The directory's own name, for `info` and messages.
    pub fn name(&self) -> String {
        let full = std::fs::canonicalize(self.path()).unwrap_or_else(|_| self.path().to_path_buf());
        escape(&full.file_name().map_or("model".into(), |n| n.to_string_lossy()))
    }

    /// The files that were read as a whole so far, each with its hash, by name.
    pub fn inputs(&self) -> Vec<InputFile> {
        let mut inputs = self.root.inputs.lock().unwrap_or_else(|e| e.into_inner()).clone();
        inputs.sort();
        inputs
    }

    /// Opens `name`, a path with `/` relative to the directory; an absent file is an error.
    pub fn open_file(&self, name: &str) -> Result<File, Error> {
        let found = self.open_if_present(name)?;
        found.ok_or_else(|| {
            let expected = format!("a file in {}", self.path().display());
            Error::new(Kind::Missing, name, "file", "is missing", expected, "no such file")
        })
    }

    /// Opens `name`; `None` where it does not exist (a dangling link is an error).
    pub fn open_if_present(&self, name: &str) -> Result<Option<File>, Error> {
        self.root
            .open(name)
            .map(|opened| opened.map(|(file, identity)| File { name: name.to_string(), root: self.root.clone(), file, identity }))
    }

    /// Reads all of `name` with its hash; `None` where it does not exist. More than `cap` bytes are refused unread.
    pub fn read_if_present(&self, name: &str, cap: u64) -> Result<Option<Vec<u8>>, Error> {
        match self.open_if_present(name)? {
            Some(file) => file.read_all(cap).map(Some),
            None => Ok(None),
        }
    }
}

impl Root {
    /// Walks `name` component by component, never following a link that was not looked at.
    fn open(&self, name: &str) -> Result<Option<(std::fs::File, Identity)>, Error> {
        let fail = |what: &str, expected: &str, found: String| Error::new(Kind::Missing, name, "file", what, expected, found);
        let os = |e: Errno| fail("cannot be opened", "a readable file", errno(e));
        let outside = |target: &[u8]| {
            let found = format!("a link to {}", String::from_utf8_lossy(target));
            fail("points outside", "a file inside the model directory", found)
                .help("copy the file into the model directory; only links of the Hugging Face cache layout are followed")
        };
        if name.is_empty() || name.contains('\0') || name.starts_with('/') {
            return Err(fail("is no file name", "a relative path", format!("`{name}`")));
        }
        let mut todo: VecDeque<Vec<u8>> = split(name.as_bytes());
        if todo.iter().any(|part| part == b"..") {
            return Err(fail("points outside", "a file inside the model directory", format!("`{name}`")));
        }
        // Directories from the root down; `None` stands for the root itself.
        let mut stack: Vec<OwnedFd> = Vec::new();
        let mut links = 0;
        while let Some(part) = todo.pop_front() {
            let at = stack.last().unwrap_or(&self.fd);
            if part == b".." {
                // Only links bring `..`; at the root it would leave the directory.
                if stack.pop().is_none() {
                    return Err(outside(b".."));
                }
                continue;
            }
            let stat = match rustix::fs::statat(at, part.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) if links == 0 => return Ok(None),
                Err(e) => return Err(os(e)),
            };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Symlink => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(os(Errno::LOOP));
                    }
                    let target = rustix::fs::readlinkat(at, part.as_slice(), Vec::new()).map_err(os)?.into_bytes();
                    if target.starts_with(b"/") {
                        return Err(outside(&target));
                    }
                    let parts = split(&target);
                    let up = parts.iter().take_while(|p| *p == b"..").count();
                    if up > stack.len() {
                        return match (up - stack.len(), todo.is_empty(), parts.len() - up) {
                            (2, true, 2) if parts[up] == b"blobs" => {
                                self.open_blob(&parts[up + 1]).map_err(os)?.map(Some).ok_or_else(|| outside(&target))
                            }
                            _ => Err(outside(&target)),
                        };
                    }
                    for part in parts.into_iter().rev() {
                        todo.push_front(part);
                    }
                }
                FileType::Directory if !todo.is_empty() => {
                    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    let next = rustix::fs::openat(at, part.as_slice(), flags, Mode::empty()).map_err(os)?;
                    stack.push(next);
                }
                FileType::RegularFile if todo.is_empty() => {
                    return open_regular(at, &part).map_err(os)?.map(Some).ok_or_else(|| not_regular(name, "another file"));
                }
                other => return Err(not_regular(name, kind_in_words(other))),
            }
        }
        Err(not_regular(name, "a directory"))
    }

    /// `../../blobs/<hash>`, if this directory is a snapshot in a Hugging Face cache repository.
    fn open_blob(&self, hash: &[u8]) -> Result<Option<(std::fs::File, Identity)>, Errno> {
        let plain = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        if hash.is_empty() || hash.len() > 128 || !hash.iter().all(plain) {
            return Ok(None);
        }
        // The layout is proven by the directory, not by names in a path: our parent is the repository's `snapshots`.
        let (Ok(parent), Ok(snapshots)) = (
            rustix::fs::statat(&self.fd, "..", AtFlags::SYMLINK_NOFOLLOW),
            rustix::fs::statat(&self.fd, "../../snapshots", AtFlags::SYMLINK_NOFOLLOW),
        ) else {
            return Ok(None);
        };
        if (parent.st_dev, parent.st_ino) != (snapshots.st_dev, snapshots.st_ino) {
            return Ok(None);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let blobs = rustix::fs::openat(&self.fd, "../../blobs", flags, Mode::empty())?;
        let stat = rustix::fs::statat(&blobs, hash, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => open_regular(&blobs, hash),
            _ => Ok(None),
        }
    }
}

/// Opens `name` in `at`, which looked like a regular file a moment ago; `None` if it is none any more.
fn open_regular(at: &OwnedFd, name: &[u8]) -> Result<Option<(std::fs::File, Identity)>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::openat(at, name, flags, Mode::empty())?);
    let stat = rustix::fs::fstat(&file)?;
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    Ok(regular.then(|| (file, identity_of(&stat))))
}

fn identity_of(stat: &rustix::fs::Stat) -> Identity {
    let (modified, changed) = ((stat.st_mtime, stat.st_mtime_nsec), (stat.st_ctime, stat.st_ctime_nsec));
    Identity { device: stat.st_dev, inode: stat.st_ino, size: stat.st_size.max(0) as u64, modified, changed }
}

/// The components of a path, without empty ones and `.`.
fn split(path: &[u8]) -> VecDeque<Vec<u8>> {
    path.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".").map(<[u8]>::to_vec).collect()
}

fn not_regular(name: &str, found: &str) -> Error {
    Error::new(Kind::Missing, name, "file", "not a regular file", "a regular file", found)
}

fn kind_in_words(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "a directory",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::RegularFile => "a file used as a directory",
        _ => "something else",
    }
}

/// Name and text of an operating system error.
fn errno(e: Errno) -> String {
    let name = match e {
        Errno::NOENT => "ENOENT: ",
        Errno::ACCESS => "EACCES: ",
        Errno::PERM => "EPERM: ",
        Errno::LOOP => "ELOOP: ",
        Errno::MFILE => "EMFILE: ",
        Errno::IO => "EIO: ",
        Errno::NAMETOOLONG => "ENAMETOOLONG: ",
        _ => "",
    };
    format!("{name}{e}")
}

impl File {
    /// The name relative to the model directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size in bytes when it was opened.
    pub fn size(&self) -> u64 {
        self.identity.size
    }

    /// Time of the last change when it was opened: seconds and nanoseconds since 1970.
    pub fn modified(&self) -> (i64, u64) {
        self.identity.modified
    }

    /// Fills `buffer` from `offset`; usable from several threads at once. A short file means that it changed.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), Error> {
        self.file.read_exact_at(buffer, offset).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => self.changed("a shorter file"),
            _ => Error::new(Kind::Missing, &self.name, "file", "cannot be read", "a readable file", e),
        })
    }

    /// All bytes; more than `cap` are refused before anything is read.
    pub fn read_all(&self, cap: u64) -> Result<Vec<u8>, Error> {
        if self.size() > cap {
            let expected = format!("at most {cap} bytes");
            let found = format!("{} bytes", self.size());
            return Err(Error::new(Kind::Limit, &self.name, "file", "is too large", expected, found));
        }
        let mut bytes = vec![0; self.size() as usize];
        self.read_at(&mut bytes, 0)?;
        self.check_unchanged()?;
        let input = InputFile { name: self.name.clone(), bytes: self.size(), sha256: sha256_hex(&bytes) };
        let mut inputs = self.root.inputs.lock().unwrap_or_else(|e| e.into_inner());
        if !inputs.contains(&input) {
            inputs.push(input);
        }
        Ok(bytes)
    }

    /// SHA-256 of the content as 64 hexadecimal digits, read in a stream.
    pub fn sha256(&self) -> Result<String, Error> {
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut offset = 0;
        while offset < self.size() {
            let count = buffer.len().min((self.size() - offset) as usize);
            self.read_at(&mut buffer[..count], offset)?;
            hasher.update(&buffer[..count]);
            offset += count as u64;
        }
        self.check_unchanged()?;
        Ok(hex(&hasher.finalize()))
    }

    /// Fails if size, time, inode or device differ from those at opening, for the open file or for its name.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        let stat = rustix::fs::fstat(&self.file).map_err(|e| self.changed(&errno(e)))?;
        if identity_of(&stat) != self.identity {
            return Err(self.changed("another size or time"));
        }
        match self.root.open(&self.name) {
            Ok(Some((_, now))) if now == self.identity => Ok(()),
            Ok(Some(_)) => Err(self.changed("another file under this name")),
            Ok(None) => Err(self.changed("no file under this name")),
            Err(e) => Err(e),
        }
    }

    fn changed(&self, found: &str) -> Error {
        let expected = format!("the same {} bytes as at the beginning", self.size());
        Error::new(Kind::Missing, &self.name, "file", "changed while reading", expected, found)
    }
}

/// SHA-256 of `bytes` as 64 hexadecimal digits.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Whether `name`, from an untrusted index, is a plain file name in the directory itself.
pub fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !matches!(name, "." | "..")
        && !name.contains(['/', '\\'])
        && !name.chars().any(char::is_control)
        && Path::new(name).file_name().is_some_and(|f| f.as_bytes() == name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn line(dir: &Path, name: &str) -> String {
        let e = ModelDir::open(dir).unwrap().open_file(name).unwrap_err();
        assert_eq!(e.exit_code(), 3, "{e}");
        e.to_string()
    }

    #[test]
    fn only_regular_files_inside() {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("model");
        fs::create_dir_all(dir.join("sub")).unwrap();
        fs::write(outer.path().join("secret"), "s").unwrap();
        fs::write(dir.join("plain"), "p").unwrap();
        symlink("plain", dir.join("link")).unwrap();
        symlink("../plain", dir.join("sub/up")).unwrap();
        symlink("../secret", dir.join("escape")).unwrap();
        symlink("../../secret", dir.join("sub/escape")).unwrap();
        symlink("sub/../../secret", dir.join("winding")).unwrap();
        symlink("/etc/passwd", dir.join("absolute")).unwrap();
        symlink("b", dir.join("a")).unwrap();
        symlink("a", dir.join("b")).unwrap();
        symlink("nowhere", dir.join("dangling")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, dir.join("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        let model = ModelDir::open(&dir).unwrap();
        for name in ["plain", "link", "sub/up", "./plain"] {
            assert_eq!(model.open_file(name).unwrap().read_all(9).unwrap(), b"p", "{name}");
        }
        for name in ["escape", "sub/escape", "winding", "absolute", "../secret"] {
            assert!(line(&dir, name).contains("points outside"), "{name}: {}", line(&dir, name));
        }
        for name in ["sub", "fifo", "plain/x"] {
            assert!(line(&dir, name).contains("not a regular file"), "{name}: {}", line(&dir, name));
        }
        assert!(line(&dir, "a").contains("ELOOP"));
        assert!(line(&dir, "dangling").contains("ENOENT"));
        assert!(line(&dir, "absent").contains("is missing"));
        assert!(model.open_if_present("absent").unwrap().is_none());
        assert_eq!(model.open_file("plain").unwrap().read_all(0).unwrap_err().exit_code(), 7);
    }

    #[test]
    fn cache_links_of_the_same_repository_only() {
        let cache = tempfile::tempdir().unwrap();
        let repo = cache.path().join("models--a--b");
        let dir = repo.join("snapshots/1234");
        fs::create_dir_all(dir.join("1_Pooling")).unwrap();
        fs::create_dir_all(repo.join("blobs")).unwrap();
        fs::create_dir_all(cache.path().join("blobs")).unwrap();
        fs::write(repo.join("blobs/abc123"), "x").unwrap();
        fs::write(cache.path().join("blobs/abc123"), "other").unwrap();
        symlink("../../blobs/abc123", dir.join("config.json")).unwrap();
        symlink("../../../blobs/abc123", dir.join("1_Pooling/config.json")).unwrap();
        symlink("../../../blobs/abc123", dir.join("wrong")).unwrap();
        symlink("../../blobs/../../blobs", dir.join("winding")).unwrap();
        let model = ModelDir::open(&dir).unwrap();
        for name in ["config.json", "1_Pooling/config.json"] {
            assert_eq!(model.open_file(name).unwrap().read_all(9).unwrap(), b"x");
        }
        for name in ["wrong", "winding"] {
            assert!(line(&dir, name).contains("points outside"));
        }
        // The same link in a directory that is not a snapshot leads outside.
        let fake = cache.path().join("x/y");
        fs::create_dir_all(&fake).unwrap();
        symlink("../../blobs/abc123", fake.join("config.json")).unwrap();
        assert!(line(&fake, "config.json").contains("points outside"));
    }

    #[test]
    fn change_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for change in ["truncate", "set back", "replace", "remove"] {
            fs::write(&path, "12345678").unwrap();
            let file = ModelDir::open(dir.path()).unwrap().open_file("f").unwrap();
            file.check_unchanged().unwrap();
            match change {
                "truncate" => fs::write(&path, "1234").unwrap(),
                "set back" => {
                    let written = fs::metadata(&path).unwrap().modified().unwrap();
                    // The clock of a file system goes in steps of some milliseconds.
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    fs::write(&path, "87654321").unwrap();
                    fs::File::options().write(true).open(&path).unwrap().set_modified(written).unwrap();
                }
                "replace" => {
                    fs::write(dir.path().join("g"), "12345678").unwrap();
                    fs::rename(dir.path().join("g"), &path).unwrap();
                }
                _ => fs::remove_file(&path).unwrap(),
            }
            let e = file.check_unchanged().unwrap_err();
            assert!(e.exit_code() == 3 && e.to_string().contains("changed while reading"), "{change}: {e}");
            if change == "truncate" {
                assert!(file.read_at(&mut [0; 8], 0).is_err());
            }
        }
    }

    #[test]
    fn names_of_strangers() {
        for bad in ["", ".", "..", "a/b", "/etc/passwd", "../x", "a\0b", "a\nb", &"x".repeat(256)] {
            assert!(!is_plain_name(bad), "{bad:?}");
        }
        assert!(is_plain_name("model-00001-of-00002.safetensors"));
        assert_eq!(sha256_hex(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
