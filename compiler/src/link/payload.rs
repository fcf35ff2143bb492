//! The payload behind the code: header page, manifest, blobs, weights; written, sealed, re-read and published.
//!
//! ```text
//! 0       header (one page)
//! 4096    manifest (JSON)
//! ...     blobs (tokenizer, templates), 64-byte aligned
//! n * 2M  weights, up to the end of the file (with `--weights split`: in OUT.weights instead, and behind them their hash)
//! ```

use super::guard::WorkDir;
use super::{Linked, elf};
use crate::error::Error;
use crate::pack::Sink;
use rcompile_models::Kind;
use rcompile_runtime::abi::{ABI_VERSION, Manifest, PAYLOAD_MAGIC, PayloadHeader, Span, WEIGHTS_ALIGN, WEIGHTS_HASH_BYTES, weights_path};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use twox_hash::XxHash64;

/// Room for the header.
const HEADER_PAGE: u64 = 4096;
const HEADER_BYTES: usize = size_of::<PayloadHeader>();

/// Pieces of data that the manifest names.
#[derive(Clone, Debug, Default)]
pub struct Blobs {
    bytes: Vec<u8>,
}

impl Blobs {
    /// Adds a piece, 64-byte aligned.
    pub fn add(&mut self, piece: &[u8]) -> Span {
        self.bytes.resize(self.bytes.len().next_multiple_of(64), 0);
        let span = Span { offset: self.bytes.len() as u64, len: piece.len() as u64 };
        self.bytes.extend_from_slice(piece);
        span
    }
}

/// What is appended, except for the bytes of the weights.
#[derive(Clone, Copy, Debug)]
pub struct Content<'a> {
    /// The manifest as JSON.
    pub manifest: &'a [u8],
    /// Blobs.
    pub blobs: &'a Blobs,
    /// Length of the weights area.
    pub weights_len: u64,
    /// In the executable (else beside it).
    pub embedded: bool,
}

/// An executable with its payload in place but for weights and header.
#[derive(Debug)]
pub struct Unsealed {
    path: PathBuf,
    file: File,
    /// The weights file of `--weights split`.
    split: Option<(PathBuf, File)>,
    /// Without its hash.
    header: PayloadHeader,
    image: elf::Image,
    triple: String,
}

/// Appends the payload to a linked executable.
pub fn append(work: &WorkDir, linked: Linked, content: Content<'_>) -> Result<Unsealed, Error> {
    let Linked { path, triple, image, len } = linked;
    check_space(work.path(), HEADER_PAGE + (content.manifest.len() + content.blobs.bytes.len()) as u64 + content.weights_len)?;
    let failed = |doing: &'static str| {
        let path = path.clone();
        move |e: std::io::Error| Error::output(&path, doing, &e)
    };
    let file = OpenOptions::new().read(true).write(true).open(&path).map_err(failed("opening"))?;
    let manifest = Span { offset: HEADER_PAGE, len: content.manifest.len() as u64 };
    let blobs = Span { offset: (manifest.offset + manifest.len).next_multiple_of(64), len: content.blobs.bytes.len() as u64 };
    let end = blobs.offset + blobs.len;
    let (weights, payload_len, split) = if content.embedded {
        let offset = end.next_multiple_of(WEIGHTS_ALIGN);
        (Span { offset, len: content.weights_len }, offset + content.weights_len, None)
    } else {
        let path = work.path().join("weights");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(failed("creating the weights file"))?;
        file.set_len(content.weights_len + WEIGHTS_HASH_BYTES).map_err(failed("sizing the weights file"))?;
        (Span { offset: 0, len: content.weights_len }, end, Some((path, file)))
    };
    let payload_offset = len.next_multiple_of(WEIGHTS_ALIGN);
    let file_len = payload_offset + payload_len;
    file.set_len(file_len).map_err(failed("sizing"))?;
    for (offset, bytes) in elf::move_payload(&image, payload_offset, payload_len) {
        file.write_all_at(&bytes, offset).map_err(failed("writing"))?;
    }
    file.write_all_at(content.manifest, payload_offset + manifest.offset).map_err(failed("writing"))?;
    file.write_all_at(&content.blobs.bytes, payload_offset + blobs.offset).map_err(failed("writing"))?;
    let image_checksum = checksum(&file, &image).map_err(failed("reading"))?;
    let header = PayloadHeader {
        magic: PAYLOAD_MAGIC,
        abi_version: ABI_VERSION,
        weights_embedded: content.embedded.into(),
        file_len,
        payload_offset,
        payload_len,
        manifest_offset: manifest.offset,
        manifest_len: manifest.len,
        blobs_offset: blobs.offset,
        blobs_len: blobs.len,
        weights_offset: weights.offset,
        weights_len: weights.len,
        image_checksum,
        manifest_hash: *blake3::hash(content.manifest).as_bytes(),
        blobs_hash: *blake3::hash(&content.blobs.bytes).as_bytes(),
        weights_hash: [0; 32],
        code_begin: image.code.start,
        code_end: image.code.end,
        header_hash: [0; 32],
    };
    Ok(Unsealed { path, file, split, header, image, triple })
}

/// Refuses at once what cannot fit into a work directory.
pub fn check_space(work: &Path, needed: u64) -> Result<(), Error> {
    if let Ok(fs) = rustix::fs::statvfs(work) {
        let free = fs.f_bavail.saturating_mul(fs.f_frsize);
        if free < needed {
            return Err(Error::Output {
                path: work.parent().unwrap_or(work).display().to_string(),
                what: format!("no space, need {needed} bytes, found {free}"),
                help: Some("free space on that file system, or choose another place with -o".into()),
            });
        }
    }
    Ok(())
}

impl Unsealed {
    /// Where the weights are packed to.
    pub fn sink(&self) -> Sink<'_> {
        match &self.split {
            Some((path, file)) => Sink { file, path, base: 0 },
            None => Sink { file: &self.file, path: &self.path, base: self.header.payload_offset + self.header.weights_offset },
        }
    }

    /// Length of the executable.
    pub fn file_len(&self) -> u64 {
        self.header.file_len
    }

    /// Replaces the manifest by another of the same length.
    pub fn set_manifest(&mut self, manifest: &[u8]) -> Result<(), Error> {
        if manifest.len() as u64 != self.header.manifest_len {
            return Err(Error::bug("manifest", format_args!("{} bytes, planned {}", manifest.len(), self.header.manifest_len)));
        }
        let at = self.header.payload_offset + self.header.manifest_offset;
        self.file.write_all_at(manifest, at).map_err(|e| Error::output(&self.path, "writing", &e))?;
        self.header.manifest_hash = *blake3::hash(manifest).as_bytes();
        Ok(())
    }

    /// Makes all weights zero again.
    pub fn clear_weights(&self) -> Result<(), Error> {
        let Sink { file, path, base } = self.sink();
        let len = file.metadata().map_err(|e| Error::output(path, "measuring", &e))?.len();
        let cleared = file.set_len(base).and_then(|()| file.set_len(len));
        cleared.map_err(|e| Error::output(path, "clearing", &e))
    }

    /// Writes the header, syncs, re-reads and checks everything. False: the weights are not those of this hash, all else holds.
    pub fn seal(&mut self, weights_hash: [u8; 32]) -> Result<bool, Error> {
        self.header.weights_hash = weights_hash;
        let failed = |path: &Path, doing: &'static str| {
            let path = path.to_path_buf();
            move |e: std::io::Error| Error::output(&path, doing, &e)
        };
        if let Some((path, file)) = &self.split {
            file.write_all_at(&weights_hash, self.header.weights_len).map_err(failed(path, "writing the hash"))?;
            file.sync_all().map_err(failed(path, "syncing"))?;
        }
        self.file.sync_data().map_err(failed(&self.path, "syncing"))?;
        let header = self.hashed_header();
        self.file.write_all_at(header.as_bytes(), self.header.payload_offset).map_err(failed(&self.path, "writing the header"))?;
        self.file.sync_all().map_err(failed(&self.path, "syncing"))?;
        self.check(header.as_bytes())
    }

    fn hashed_header(&self) -> PayloadHeader {
        PayloadHeader { header_hash: *blake3::hash(self.header.as_bytes()).as_bytes(), ..self.header }
    }

    /// Gives a sealed executable its name; also gives what has to be warned of, see [`WorkDir::publish`].
    pub fn publish(self, work: &WorkDir, output: &Path) -> Result<Option<String>, Error> {
        let beside = weights_path(output);
        match &self.split {
            Some((weights, _)) => work.publish(&[(weights, &beside), (&self.path, output)]),
            None => work.publish(&[(&self.path, output)]),
        }
    }

    /// Gives an executable that is only run by its own build its name, without syncing and checking; its weights file too, where it has one
    /// to keep.
    pub fn publish_trial(self, output: &Path, weights: Option<&Path>) -> Result<(), Error> {
        let failed = |e: std::io::Error| Error::output(output, "writing", &e);
        self.file.write_all_at(self.hashed_header().as_bytes(), self.header.payload_offset).map_err(failed)?;
        std::fs::rename(&self.path, output).map_err(failed)?;
        match (&self.split, weights) {
            (Some((from, _)), Some(to)) => std::fs::rename(from, to).map_err(failed),
            _ => Ok(()),
        }
    }

    /// The error for a part that is not what was written.
    pub fn differs(&self, part: &str) -> Error {
        Error::Output {
            path: self.path.display().to_string(),
            what: format!("{part} re-read from disk differ from what was written"),
            help: Some("the disk or its file system may be faulty: try another place with -o".into()),
        }
    }

    /// Re-reads the file through a new descriptor and compares it with what was meant; see [`Unsealed::seal`].
    fn check(&self, header: &[u8]) -> Result<bool, Error> {
        let h = &self.header;
        let differs = |part: &str| self.differs(part);
        let read = |e: std::io::Error| Error::output(&self.path, "re-reading", &e);
        let file = File::open(&self.path).map_err(read)?;
        if file.metadata().map_err(read)?.len() != h.file_len {
            return Err(differs("its length"));
        }
        let at = |offset: u64, len: u64| {
            let mut bytes = vec![0; len as usize];
            file.read_exact_at(&mut bytes, offset).map(|()| bytes).map_err(read)
        };
        let image = elf::check(&at(0, h.payload_offset)?, &self.triple, &self.path)?;
        if image.payload != (h.payload_offset..h.file_len) || image.loaded != self.image.loaded {
            return Err(differs("its headers"));
        }
        if at(h.payload_offset, header.len() as u64)? != header {
            return Err(differs("its payload header"));
        }
        let manifest = at(h.payload_offset + h.manifest_offset, h.manifest_len)?;
        let blobs = at(h.payload_offset + h.blobs_offset, h.blobs_len)?;
        if checksum(&file, &image).map_err(read)? != h.image_checksum {
            return Err(differs("code, constants or variables"));
        }
        for (part, bytes, hash) in [("manifest", manifest, h.manifest_hash), ("blobs", blobs, h.blobs_hash)] {
            if blake3::hash(&bytes) != hash {
                return Err(differs(part));
            }
        }
        let sink = self.sink();
        let file = File::open(sink.path).map_err(read)?;
        if self.split.is_some() {
            let mut hash = [0; WEIGHTS_HASH_BYTES as usize];
            file.read_exact_at(&mut hash, h.weights_len).map_err(read)?;
            if hash != h.weights_hash {
                return Err(differs("hashes of weights"));
            }
        }
        Ok(hash_range(&file, sink.base, h.weights_len).map_err(read)? == h.weights_hash)
    }
}

/// [`PayloadHeader::image_checksum`] of a file.
fn checksum(file: &File, image: &elf::Image) -> std::io::Result<u64> {
    image.loaded.iter().try_fold(0, |seed, range| {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_exact_at(&mut bytes, range.start)?;
        Ok(XxHash64::oneshot(seed, &bytes))
    })
}

/// BLAKE3 of a part of a file: its tree is cut into pieces that are read and hashed by all threads, each while it is in a near cache.
pub(crate) fn hash_range(file: &File, base: u64, len: u64) -> std::io::Result<[u8; 32]> {
    use blake3::hazmat::{ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root};
    const PIECE: u64 = 512 << 10;
    let read = |at: u64, len: u64| {
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, base + at).map(|()| bytes)
    };
    fn subtree(read: &(impl Fn(u64, u64) -> std::io::Result<Vec<u8>> + Sync), at: u64, len: u64) -> std::io::Result<ChainingValue> {
        if len <= PIECE {
            let bytes = read(at, len)?;
            return Ok(blake3::Hasher::new().set_input_offset(at).update(&bytes).finalize_non_root());
        }
        let left = left_subtree_len(len);
        let (a, b) = rayon::join(|| subtree(read, at, left), || subtree(read, at + left, len - left));
        Ok(merge_subtrees_non_root(&a?, &b?, Mode::Hash))
    }
    if len <= PIECE {
        return Ok(*blake3::hash(&read(0, len)?).as_bytes());
    }
    let left = left_subtree_len(len);
    let (a, b) = rayon::join(|| subtree(&read, 0, left), || subtree(&read, left, len - left));
    Ok(*merge_subtrees_root(&a?, &b?, Mode::Hash).as_bytes())
}

/// What a file says that is an executable of ours.
pub(crate) struct Identity {
    /// Its manifest, JSON.
    pub manifest: Vec<u8>,
    /// The header of its payload.
    pub header: PayloadHeader,
    /// Length of the file.
    pub len: u64,
    /// What it has to have at least.
    pub needed: u64,
}

impl Identity {
    /// The manifest, if it is one of this version that a build can have written; else the kind of the error, and what the file is.
    pub fn manifest(&self) -> Result<Manifest, (Kind, &'static str)> {
        let same = self.header.abi_version == ABI_VERSION;
        let read = same.then(|| serde_json::from_slice::<Manifest>(&self.manifest).ok()).flatten();
        let manifest = read.ok_or((Kind::Unsupported, "is an executable of another version of rcompile"))?;
        if manifest.is_possible() { Ok(manifest) } else { Err((Kind::Malformed, "is an executable whose manifest is damaged")) }
    }
    /// Is the header as it was written?
    pub fn is_intact(&self) -> bool {
        *blake3::hash(self.header.without_hash().as_bytes()).as_bytes() == self.header.header_hash
    }
}

/// Who an executable is, by its manifest, whose hash is checked. None when the file is no executable of ours.
pub(crate) fn identity(path: &Path) -> std::io::Result<Option<Identity>> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut start = vec![0; 4096.min(len as usize)];
    file.read_exact_at(&mut start, 0)?;
    let Some(payload) = elf::find_payload(&start) else { return Ok(None) };
    let mut header = [0; HEADER_BYTES];
    if file.read_exact_at(&mut header, payload).is_err() {
        return Ok(None);
    }
    let header = PayloadHeader::from_bytes(&header);
    let (offset, size) = (header.manifest_offset, header.manifest_len);
    if header.magic != PAYLOAD_MAGIC
        || size > 64 << 20
        || payload.checked_add(offset).and_then(|o| o.checked_add(size)).is_none_or(|end| end > len)
    {
        return Ok(None);
    }
    let mut manifest = vec![0; size as usize];
    file.read_exact_at(&mut manifest, payload + offset)?;
    let is_whole = *blake3::hash(&manifest).as_bytes() == header.manifest_hash;
    Ok(is_whole.then(|| Identity { manifest, header, len, needed: payload.saturating_add(header.payload_len) }))
}
