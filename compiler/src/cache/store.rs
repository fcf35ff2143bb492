//! The directory: `DIR/<kind>/<2 digits>/<key>`, one immutable file per [`entry`](super::entry).
//!
//! Files appear by rename and are never changed afterwards, so that any number of builds can use one directory without locks; a file that
//! is removed while another build reads it stays readable there. The time of change of a file is that of its last use.

use super::entry::{Description, Header, Key, PAYLOAD_AT};
use crate::link::guard::Draft;
use crate::pack::Sink;
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// What kinds of entries there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Object of a unit.
    Object,
    /// Weights area of an executable.
    Weights,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 2] = [Kind::Object, Kind::Weights];

    /// Folder.
    pub fn folder(self) -> &'static str {
        match self {
            Kind::Object => "objects",
            Kind::Weights => "weights",
        }
    }
}

const TEMPORARY: &str = ".new-";
/// A file in the making that is older than this was left by a build that was killed.
const STALE_AFTER: Duration = Duration::from_secs(3600);
/// Eviction goes down to this share of the limit, so that it does not run at every build.
const KEEP_TENTHS: u64 = 9;

/// Bytes that eviction leaves of `limit`.
pub fn kept(limit: u64) -> u64 {
    limit / 10 * KEEP_TENTHS
}

/// Pieces of a copy.
pub(super) const PIECE: u64 = 32 << 20;
/// <https://bford.info/cachedir/>: backups leave such a directory out.
const TAG: &str = "Signature: 8a477f597d28d172789f06886806bc55\n# Cache of rcompile; `rcompile cache clean` empties it.\n";

/// What was found under a key.
#[derive(Debug)]
pub enum Found<T> {
    /// It is there and whole.
    Hit(T),
    /// There is none.
    Miss,
    /// There was one, it was damaged, and is removed.
    Damaged,
}

/// A file of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Kind.
    pub kind: Kind,
    /// The file.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// Last use.
    pub used: SystemTime,
}

/// An open cache directory.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
}

impl Store {
    /// A directory that may not exist, for looking.
    pub fn at(dir: &Path) -> Store {
        Store { dir: dir.to_path_buf() }
    }

    /// Makes the directory where there is none, and finds out whether it can be written.
    pub fn open(dir: &Path) -> io::Result<Store> {
        make_dir(dir)?;
        let store = Store::at(dir);
        let tag = dir.join("CACHEDIR.TAG");
        // Also one that a full disk had cut; another tool's stays.
        let found = match fs::metadata(&tag) {
            Ok(meta) if meta.is_file() => fs::read(&tag)?,
            // A pipe, say, would be waited for.
            Ok(_) => return Err(io::Error::new(ErrorKind::InvalidInput, "CACHEDIR.TAG is no regular file")),
            Err(_) => vec![],
        };
        if found.len() < TAG.len() && TAG.as_bytes().starts_with(&found) {
            fs::write(&tag, TAG)?;
        }
        for kind in Kind::ALL {
            make_dir(&dir.join(kind.folder()))?;
            store.draft(kind)?;
        }
        Ok(store)
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn path(&self, kind: Kind, key: &Key) -> PathBuf {
        let name = key.name();
        self.dir.join(kind.folder()).join(&name[..2]).join(name)
    }

    fn draft(&self, kind: Kind) -> io::Result<Draft> {
        Draft::create(&self.dir.join(kind.folder()), TEMPORARY, 0o600)
    }

    /// An entry's payload, checked.
    pub fn get(&self, kind: Kind, key: &Key) -> Found<Vec<u8>> {
        self.find(kind, key, |header, file| {
            let mut payload = vec![0; usize::try_from(header.len).ok()?];
            file.read_exact_at(&mut payload, PAYLOAD_AT).ok()?;
            (*blake3::hash(&payload).as_bytes() == header.hash).then_some(payload)
        })
    }

    /// Copies an entry's payload of `len` bytes to its place. What arrives there is still to be compared with the header's hash.
    pub fn copy_to(&self, kind: Kind, key: &Key, len: u64, to: Sink<'_>, progress: &(dyn Fn(u64) + Sync)) -> Found<Header> {
        let found = self.find(kind, key, |header, file| {
            (header.len == len).then(|| (header.clone(), copy(file, PAYLOAD_AT, to.file, to.base, len, progress).is_ok()))
        });
        match found {
            Found::Hit((header, true)) => Found::Hit(header),
            // A full disk, say: nothing is wrong with the entry.
            Found::Hit((_, false)) | Found::Miss => Found::Miss,
            Found::Damaged => Found::Damaged,
        }
    }

    /// Removes an entry.
    pub fn remove(&self, kind: Kind, key: &Key) {
        let _ = fs::remove_file(self.path(kind, key));
    }

    fn find<T>(&self, kind: Kind, key: &Key, read: impl FnOnce(&Header, &File) -> Option<T>) -> Found<T> {
        let path = self.path(kind, key);
        let file = match open_entry(&path) {
            Ok(Some(file)) => file,
            Ok(None) => return self.damaged(&path),
            Err(_) => return Found::Miss,
        };
        let found = (|| {
            let header = read_header(&file)?;
            let whole = header.key == *key && Some(file.metadata().ok()?.len()) == PAYLOAD_AT.checked_add(header.len);
            if whole { read(&header, &file) } else { None }
        })();
        match found {
            Some(found) => {
                let _ = file.set_modified(SystemTime::now());
                Found::Hit(found)
            }
            None => self.damaged(&path),
        }
    }

    fn damaged<T>(&self, path: &Path) -> Found<T> {
        let _ = remove(path);
        Found::Damaged
    }

    /// Writes an entry. Another build may have been faster: then its file, which is the same, is replaced.
    pub fn put(&self, kind: Kind, key: &Key, description: Description, payload: &[u8]) -> io::Result<()> {
        let header = Header { key: *key, len: payload.len() as u64, hash: *blake3::hash(payload).as_bytes(), description };
        self.write(kind, &header, |file| file.write_all(payload))
    }

    /// Writes an entry whose payload lies at `offset` of `from`.
    pub fn put_from(&self, kind: Kind, header: &Header, from: &File, offset: u64) -> io::Result<()> {
        self.write(kind, header, |file| copy(from, offset, file, PAYLOAD_AT, header.len, &|_| {}))
    }

    fn write(&self, kind: Kind, header: &Header, payload: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
        let path = self.path(kind, &header.key);
        let start = header.encode().ok_or(ErrorKind::InvalidInput)?;
        if let Some(parent) = path.parent() {
            make_dir(parent)?;
        }
        let mut draft = self.draft(kind)?;
        draft.file().write_all(&start)?;
        payload(draft.file())?;
        draft.publish(&path)
    }

    /// All entries, and files that killed builds left (with `stale`).
    pub fn list(&self, stale: bool) -> io::Result<Vec<Listed>> {
        let mut list = Vec::new();
        let mut add = |kind, entry: &fs::DirEntry| {
            // What another build removes meanwhile is not there.
            let Ok(meta) = entry.metadata() else { return };
            let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            list.push(Listed { kind, path: entry.path(), bytes: meta.len(), used });
        };
        for kind in Kind::ALL {
            for entry in read_dir(&self.dir.join(kind.folder()))? {
                let name = entry.file_name().to_string_lossy().into_owned();
                let is_dir = entry.file_type().is_ok_and(|t| t.is_dir());
                if name.starts_with(TEMPORARY) && !is_dir && stale {
                    add(kind, &entry);
                } else if is_hex(&name, 2) && is_dir {
                    let entries = read_dir(&entry.path())?;
                    entries.iter().filter(|e| is_hex(&e.file_name().to_string_lossy(), 64)).for_each(|e| add(kind, e));
                }
            }
        }
        list.sort_by(|a, b| (b.used, &a.path).cmp(&(a.used, &b.path)));
        Ok(list)
    }

    /// Removes the least recently used entries while all together are larger than `limit` bytes. Returns bytes freed.
    pub fn evict(&self, limit: u64) -> io::Result<u64> {
        let list = self.list(true)?;
        let now = SystemTime::now();
        let temporary = |l: &Listed| l.path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(TEMPORARY));
        let (unfinished, entries): (Vec<&Listed>, Vec<&Listed>) = list.iter().partition(|l| temporary(l));
        let mut freed = 0;
        for file in unfinished.into_iter().filter(|l| now.duration_since(l.used).is_ok_and(|age| age > STALE_AFTER)) {
            freed += remove(&file.path).map_or(0, |()| file.bytes);
        }
        let mut total: u64 = entries.iter().map(|l| l.bytes).sum();
        if total > limit {
            for oldest in entries.into_iter().rev() {
                if total <= kept(limit) {
                    break;
                }
                match remove(&oldest.path) {
                    Ok(()) => freed += oldest.bytes,
                    // Another build makes room too.
                    Err(e) if e.kind() == ErrorKind::NotFound => {}
                    Err(_) => continue,
                }
                total -= oldest.bytes;
            }
        }
        Ok(freed)
    }

    /// Removes everything. Returns how many files and bytes that were, or what could not be removed while all the others were.
    pub fn clean(&self) -> Result<(usize, u64), (PathBuf, io::Error)> {
        let (mut removed, mut failed) = (Vec::new(), None);
        for listed in self.list(true).map_err(|e| (self.dir.clone(), e))? {
            match remove(&listed.path) {
                Ok(()) => removed.push(listed.bytes),
                // Another build makes room too.
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => failed = failed.or(Some((listed.path, e))),
            }
        }
        if let Some(failed) = failed {
            return Err(failed);
        }
        for kind in Kind::ALL {
            let folder = self.dir.join(kind.folder());
            // Only what is empty goes: nothing that is not ours.
            for entry in read_dir(&folder).unwrap_or_default() {
                let _ = fs::remove_dir(entry.path());
            }
            let _ = fs::remove_dir(folder);
        }
        Ok((removed.len(), removed.iter().sum()))
    }
}

/// Opens the file of an entry; None where something else is in its place, which may be a pipe that would be waited for.
pub fn open_entry(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    Ok(file.metadata()?.is_file().then_some(file))
}

/// The header of a file, where it is whole.
pub fn read_header(file: &File) -> Option<Header> {
    let mut start = vec![0; PAYLOAD_AT as usize];
    file.read_exact_at(&mut start, 0).ok()?;
    Header::decode(&start)
}

/// Removes an entry, or the directory that somebody has put in its place.
fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    }
}

fn make_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Entries of a directory; none where there is no such directory.
fn read_dir(dir: &Path) -> io::Result<Vec<fs::DirEntry>> {
    match fs::read_dir(dir) {
        Ok(entries) => entries.collect(),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

fn is_hex(name: &str, len: usize) -> bool {
    name.len() == len && name.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Copies a range of one file into another inside the kernel, which shares blocks where the file system can.
fn copy(from: &File, from_at: u64, to: &File, to_at: u64, len: u64, progress: &(dyn Fn(u64) + Sync)) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let (mut a, mut b) = (from_at + done, to_at + done);
        let piece = PIECE.min(len - done);
        let copied = match rustix::fs::copy_file_range(from, Some(&mut a), to, Some(&mut b), piece as usize) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => n as u64,
            Err(e) if e == rustix::io::Errno::INTR => 0,
            Err(e) if e == rustix::io::Errno::NOSPC => return Err(e.into()),
            // Another file system, or a kernel that cannot.
            Err(_) => {
                let mut bytes = vec![0; piece as usize];
                from.read_exact_at(&mut bytes, from_at + done)?;
                to.write_all_at(&bytes, to_at + done)?;
                piece
            }
        };
        done += copied;
        progress(copied);
    }
    Ok(())
}
