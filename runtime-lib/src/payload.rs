//! What lies behind the code in the executable: header, manifest, blobs, weights. Found, checked, and given out as slices.
//!
//! That the file is whole, and that code, constants and variables are as they were built, was checked before the first line of this
//! crate ran (`templates/start.c`). What is checked here at the start: the header and its hash, then manifest and blobs against their
//! hashes. The weights, by far the largest part, are hashed by `verify` only; they are mapped and read when used. A weights file of its
//! own ends with the hash it had at its build, so that one of another build is refused at once.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::abi::{
    ABI_VERSION, Manifest, PAYLOAD_MAGIC, PAYLOAD_VADDR, PayloadHeader, Span, WEIGHTS_ALIGN, WEIGHTS_HASH_BYTES, weights_path,
};

/// The file that this process runs, where `/proc` is mounted.
const EXE: &str = "/proc/self/exe";

/// What is wrong with the executable. All of it is exit 9, except `Missing` and `Unreadable` (3) and `Memory` (7).
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The file is shorter than it was built.
    #[error("{name}: truncated, expected {expected} bytes, found {found}")]
    Truncated {
        /// File.
        name: String,
        /// Length at build.
        expected: u64,
        /// Length now.
        found: u64,
    },
    /// A part of the file differs from what was built.
    #[error("{name}: {part}: {what}")]
    Damaged {
        /// File.
        name: String,
        /// Which part.
        part: &'static str,
        /// What is wrong.
        what: String,
    },
    /// The executable's file, or that of its weights, cannot be read.
    #[error("{name}: cannot be read: {error}")]
    Unreadable {
        /// File.
        name: String,
        /// Reason.
        error: io::Error,
    },
    /// The weights file of `--weights split` is not there.
    #[error("{name}: {what}")]
    Missing {
        /// File.
        name: String,
        /// Reason.
        what: String,
    },
    /// The process has no room to map a file.
    #[error("memory: {name}: needs {} MiB of addresses", bytes.div_ceil(1 << 20))]
    Memory {
        /// File.
        name: String,
        /// Its size.
        bytes: u64,
    },
}

impl PayloadError {
    /// Exit code as in the table of the command line.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Missing { .. } | Self::Unreadable { .. } => 3,
            Self::Memory { .. } => 7,
            _ => 9,
        }
    }
}

/// The checked payload of this executable.
pub struct Payload {
    header: PayloadHeader,
    /// The payload segment, weights included when embedded.
    bytes: &'static [u8],
    manifest: Manifest,
    name: String,
    /// The file beside, once it is mapped.
    beside: OnceLock<&'static [u8]>,
}

impl Payload {
    /// Checks header, manifest and blobs of the running executable.
    ///
    /// # Safety
    /// `header` is the address at which the payload segment of this executable is mapped, the segment is inside the file (`start.c`
    /// compared their lengths), and it is never unmapped or written.
    pub unsafe fn open(header: *const u8) -> Result<Self, PayloadError> {
        let Some(segment) = payload_segment() else {
            return Err(PayloadError::Damaged {
                name: executable_name(),
                part: "program headers",
                what: "there is no payload segment".into(),
            });
        };
        let len = segment.p_filesz;
        // SAFETY: by contract the segment starts here, and `len` bytes of it are mapped and inside the file.
        let bytes: &'static [u8] = unsafe { std::slice::from_raw_parts(header, len as usize) };
        Self::from_segment(bytes, executable_name())
    }

    /// Checks header, manifest and blobs of a payload segment. `name` is the executable's, for messages.
    pub fn from_segment(bytes: &'static [u8], name: String) -> Result<Self, PayloadError> {
        let truncated = |expected: u64| PayloadError::Truncated { name: name.clone(), expected, found: bytes.len() as u64 };
        let header = bytes.first_chunk().map(PayloadHeader::from_bytes).ok_or_else(|| truncated(size_of::<PayloadHeader>() as u64))?;
        check_header(&header, &name)?;
        if (bytes.len() as u64) < header.payload_len {
            return Err(truncated(header.payload_len));
        }
        let part = |part, offset, len| slice(bytes, offset, len, part, &name);
        let manifest = part("manifest", header.manifest_offset, header.manifest_len)?;
        check_hash(&blake3::hash(manifest), &header.manifest_hash, "manifest", &name)?;
        let blobs = part("blobs", header.blobs_offset, header.blobs_len)?;
        check_hash(&blake3::hash(blobs), &header.blobs_hash, "blobs", &name)?;
        let damaged = |what: String| PayloadError::Damaged { name: name.clone(), part: "manifest", what };
        let manifest: Manifest = serde_json::from_slice(manifest).map_err(|e| damaged(e.to_string()))?;
        if !manifest.is_possible() {
            return Err(damaged("no build has written it".into()));
        }
        Ok(Self { header, bytes, manifest, name, beside: OnceLock::new() })
    }

    /// What the executable knows about itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The header.
    pub fn header(&self) -> &PayloadHeader {
        &self.header
    }

    /// Name of the executable, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The files that the payload is read from, under all names that they have for this process.
    pub fn files(&self) -> Vec<PathBuf> {
        let beside = (self.header.weights_embedded == 0).then(split_path);
        [PathBuf::from(EXE), started_as()].into_iter().chain(beside).collect()
    }

    /// A piece of the blobs area.
    pub fn blob(&self, span: Span, part: &'static str) -> Result<&'static [u8], PayloadError> {
        let blobs = slice(self.bytes, self.header.blobs_offset, self.header.blobs_len, "blobs", &self.name)?;
        slice(blobs, span.offset, span.len, part, &self.name)
    }

    /// The packed weights: part of this file, or `<executable>.weights` of the same build, mapped and not yet read.
    pub fn weights(&self) -> Result<&'static [u8], PayloadError> {
        if let Some(weights) = self.beside.get() {
            return Ok(weights);
        }
        if self.header.weights_embedded == 0 {
            let path = split_path();
            let file = map_file(&path, self.header.weights_len + WEIGHTS_HASH_BYTES)?;
            let (weights, hash) = file.split_at(self.header.weights_len as usize);
            if hash != self.header.weights_hash {
                return Err(PayloadError::Damaged {
                    name: path.display().to_string(),
                    part: "hash",
                    what: "of another build, or damaged".into(),
                });
            }
            return Ok(self.beside.get_or_init(|| weights));
        }
        let weights = slice(self.bytes, self.header.weights_offset, self.header.weights_len, "weights", &self.name)?;
        advise_huge(weights);
        Ok(weights)
    }

    /// Hashes the weights. Returns their length.
    pub fn verify_weights(&self) -> Result<u64, PayloadError> {
        let weights = self.weights()?;
        let beside = split_path().display().to_string();
        let name = if self.header.weights_embedded == 0 { &beside } else { &self.name };
        check_hash(&blake3::hash(weights), &self.header.weights_hash, "weights", name)?;
        Ok(weights.len() as u64)
    }
}

/// Checks magic, version and hash.
fn check_header(header: &PayloadHeader, name: &str) -> Result<(), PayloadError> {
    let damaged = |what: String| PayloadError::Damaged { name: name.into(), part: "header", what };
    if header.magic != PAYLOAD_MAGIC {
        return Err(damaged("no payload header".into()));
    }
    if header.header_hash != header_hash(header) {
        return Err(damaged("hash differs".into()));
    }
    if header.abi_version != ABI_VERSION {
        return Err(damaged(format!("expected ABI version {ABI_VERSION}, found {}", header.abi_version)));
    }
    Ok(())
}

/// What the header's `header_hash` should be.
fn header_hash(header: &PayloadHeader) -> [u8; 32] {
    *blake3::hash(header.without_hash().as_bytes()).as_bytes()
}

fn check_hash(found: &blake3::Hash, expected: &[u8; 32], part: &'static str, name: &str) -> Result<(), PayloadError> {
    if found.as_bytes() == expected {
        return Ok(());
    }
    Err(PayloadError::Damaged { name: name.into(), part, what: "hash differs".into() })
}

fn slice<'b>(bytes: &'b [u8], offset: u64, len: u64, part: &'static str, name: &str) -> Result<&'b [u8], PayloadError> {
    usize::try_from(offset).ok().zip(usize::try_from(len).ok()).and_then(|(offset, len)| bytes.get(offset..)?.get(..len)).ok_or_else(|| {
        PayloadError::Damaged { name: name.into(), part, what: format!("{offset} + {len} is outside of {} bytes", bytes.len()) }
    })
}

/// The program headers as the kernel mapped them; they lie in the first page, which every running executable has.
fn program_headers() -> &'static [libc::Elf64_Phdr] {
    // SAFETY: no preconditions.
    let (at, count, size) = unsafe {
        (
            libc::getauxval(libc::AT_PHDR) as *const libc::Elf64_Phdr,
            libc::getauxval(libc::AT_PHNUM) as usize,
            libc::getauxval(libc::AT_PHENT) as usize,
        )
    };
    if at.is_null() || size != size_of::<libc::Elf64_Phdr>() {
        return &[];
    }
    // SAFETY: the kernel passes the address and number of the program headers it loaded this process from.
    unsafe { std::slice::from_raw_parts(at, count) }
}

/// The segment of the payload.
fn payload_segment() -> Option<&'static libc::Elf64_Phdr> {
    program_headers().iter().find(|p| p.p_type == libc::PT_LOAD && p.p_vaddr == PAYLOAD_VADDR)
}

/// The path that this executable was started with.
fn started_as() -> PathBuf {
    PathBuf::from(std::ffi::OsStr::from_bytes(rustix::param::linux_execfn().to_bytes()))
}

fn executable_path() -> PathBuf {
    std::fs::read_link(EXE).unwrap_or_else(|_| started_as())
}

fn executable_name() -> String {
    started_as().file_name().map_or_else(|| "executable".into(), |n| n.to_string_lossy().into_owned())
}

fn split_path() -> PathBuf {
    weights_path(&executable_path())
}

/// Maps a whole file read-only at a 2 MB boundary, for the life of the process.
pub(crate) fn map_file(path: &Path, len: u64) -> Result<&'static [u8], PayloadError> {
    use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
    let name = path.display().to_string();
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => PayloadError::Missing { name: name.clone(), what: error.to_string() },
        io::ErrorKind::OutOfMemory => PayloadError::Memory { name: name.clone(), bytes: len },
        _ => PayloadError::Unreadable { name: name.clone(), error },
    };
    // A pipe does not wait for somebody who writes.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() {
        return Err(PayloadError::Missing { name, what: "not a regular file".into() });
    }
    let found = meta.len();
    if found < len {
        return Err(PayloadError::Truncated { name, expected: len, found });
    }
    if found > len {
        return Err(PayloadError::Damaged { name, part: "length", what: format!("expected {len} bytes, found {found}") });
    }
    if len == 0 {
        return Ok(&[]);
    }
    let align = WEIGHTS_ALIGN as usize;
    let room = len as usize + align;
    // SAFETY: reserves address space at an address of the kernel's choice.
    let reserved = unsafe { mmap_anonymous(std::ptr::null_mut(), room, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE) }
        .map_err(|e| failed(e.into()))?;
    let at = (reserved as usize).next_multiple_of(align);
    // SAFETY: `at .. at + len` lies inside the reservation, which nothing else uses. The file was just opened; a file that is
    // truncated while the process runs is the owner's decision, as with the executable itself.
    let mapped = unsafe { mmap(at as *mut _, len as usize, ProtFlags::READ, MapFlags::PRIVATE | MapFlags::FIXED, &file, 0) }
        .map_err(|e| failed(e.into()))?;
    // SAFETY: just mapped, readable, and never unmapped.
    let weights = unsafe { std::slice::from_raw_parts(mapped.cast::<u8>(), len as usize) };
    advise_huge(weights);
    Ok(weights)
}

/// Asks for huge pages; kernels that have none for files refuse, which does no harm.
fn advise_huge(bytes: &'static [u8]) {
    const PAGE: usize = 4096;
    let begin = (bytes.as_ptr() as usize).next_multiple_of(PAGE);
    let end = bytes.as_ptr() as usize + bytes.len();
    if end > begin {
        // SAFETY: a range inside a mapping of ours; the advice changes no contents.
        let _ = unsafe { rustix::mm::madvise(begin as *mut _, end - begin, rustix::mm::Advice::LinuxHugepage) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> PayloadHeader {
        let mut header = PayloadHeader {
            magic: PAYLOAD_MAGIC,
            abi_version: ABI_VERSION,
            weights_embedded: 1,
            file_len: 10,
            payload_offset: 0,
            payload_len: 10,
            manifest_offset: 0,
            manifest_len: 0,
            blobs_offset: 0,
            blobs_len: 0,
            weights_offset: 0,
            weights_len: 0,
            image_checksum: 0,
            manifest_hash: [0; 32],
            blobs_hash: [0; 32],
            weights_hash: [0; 32],
            code_begin: 0,
            code_end: 0,
            header_hash: [0; 32],
        };
        header.header_hash = header_hash(&header);
        header
    }

    #[test]
    fn a_header_is_checked_field_by_field() {
        let good = header();
        check_header(&good, "x").unwrap();
        let refused = |change: fn(&mut PayloadHeader), rehash: bool| {
            let mut header = header();
            change(&mut header);
            if rehash {
                header.header_hash = header_hash(&header);
            }
            let error = check_header(&header, "x").unwrap_err();
            assert_eq!(error.exit_code(), 9);
            error.to_string()
        };
        assert!(refused(|h| h.weights_len ^= 1, false).contains("hash"));
        assert!(refused(|h| h.header_hash[31] ^= 1, false).contains("hash"));
        assert!(refused(|h| h.magic[0] = 0, true).contains("no payload"));
        assert!(refused(|h| h.abi_version += 1, true).contains("version"));
    }

    #[test]
    fn slices_outside_are_refused() {
        let bytes = [0u8; 8];
        assert_eq!(slice(&bytes, 2, 6, "p", "x").unwrap().len(), 6);
        for (offset, len) in [(2, 7), (9, 0), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(slice(&bytes, offset, len, "p", "x").is_err());
        }
    }

    #[test]
    fn files_are_mapped_whole_or_not_at_all() {
        let file = std::env::temp_dir().join(format!("rc-mapped-{}", std::process::id()));
        std::fs::write(&file, [7u8; 4096]).unwrap();
        let mapped = map_file(&file, 4096).unwrap();
        assert_eq!(mapped.as_ptr() as u64 % WEIGHTS_ALIGN, 0);
        assert_eq!(mapped[4095], 7);
        File::options().write(true).open(&file).unwrap().set_len(0).unwrap();
        assert!(matches!(map_file(&file, 4096), Err(PayloadError::Truncated { found: 0, .. })));
        std::fs::remove_file(&file).unwrap();
        assert!(matches!(map_file(&file, 4096), Err(PayloadError::Missing { .. })));
        // There, but not to be opened.
        std::os::unix::fs::symlink(&file, &file).unwrap();
        assert!(matches!(map_file(&file, 4096), Err(PayloadError::Unreadable { .. })));
        std::fs::remove_file(&file).unwrap();
    }
}
