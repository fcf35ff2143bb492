//! The linked file as ELF: what must hold of it, where the code is, and moving the payload segment to the end of the file.
//!
//! ```text
//! linked:   headers | start | read-only | code | data | .rc_payload (1 byte at PAYLOAD_VADDR) | symbols | section headers
//! final:    the same ...                                                | 0 .. 2 MB | payload: header manifest blobs weights
//! ```
//! The program header and the section header of the payload are changed in place, and LLD's padding of constants, which nobody reads, is
//! left out of its segment; nothing else moves.

use crate::error::Error;
use crate::targets::platform;
use object::LittleEndian;
use object::elf::{
    DT_FLAGS, DT_FLAGS_1, DT_NEEDED, DT_RPATH, DT_RUNPATH, DT_TEXTREL, ET_DYN, FileHeader64, PF_W, PF_X, PT_DYNAMIC, PT_GNU_RELRO,
    PT_GNU_STACK, PT_INTERP, PT_LOAD, ProgramFlags, ProgramHeader64,
};
use object::read::elf::{Dyn, FileHeader, ProgramHeader, SectionHeader};
use rcompile_runtime::abi::{PAYLOAD_SECTION, PAYLOAD_VADDR, WEIGHTS_ALIGN};
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

type Header = FileHeader64<LittleEndian>;
type Segment = ProgramHeader64<LittleEndian>;

const PROGRAM_HEADER_BYTES: u64 = 56;
const SECTION_HEADER_BYTES: u64 = 64;
/// `p_memsz` in a program header.
const MEMORY_LENGTH: u64 = 40;
/// LLD's section between constants that are relocated and the end of their page.
const RELRO_PADDING: &[u8] = b".relro_padding";
const DF_TEXTREL: u64 = 4;
const DF_BIND_NOW: u64 = 8;
const DF_1_NOW: u64 = 1;

/// What the next steps need to know about a linked executable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Image {
    /// File offset of the payload's program header.
    segment_at: u64,
    /// File offset of the payload's section header.
    section_at: u64,
    /// Offset, length of the payload in the file as the program header says.
    pub payload: Range<u64>,
    /// Virtual addresses of the code, but for what checks the file.
    pub code: Range<u64>,
    /// File offsets of everything else that is loaded, but for the headers, in the order of the program headers: what
    /// [`PayloadHeader::image_checksum`](rcompile_runtime::abi::PayloadHeader::image_checksum) is the checksum of.
    pub loaded: Vec<Range<u64>>,
    /// File offset of a length in memory that padding makes greater than that in the file, and what it should be.
    padded: Option<(u64, u64)>,
}

/// Parses the headers of an executable and checks everything that we promise about it.
///
/// `bytes` is the file up to the payload, or more.
pub(super) fn check(bytes: &[u8], triple: &str, path: &Path) -> Result<Image, Error> {
    image(bytes, triple).map_err(|what| Error::Output {
        path: path.display().to_string(),
        what: format!("the linked file is not as expected: {what}"),
        help: Some("another linker may help: apt-get install lld-19, or gcc and binutils of the distribution".into()),
    })
}

/// What is not as expected.
type Broken = Cow<'static, str>;

fn unreadable(e: object::read::Error) -> Broken {
    e.to_string().into()
}

fn image(bytes: &[u8], triple: &str) -> Result<Image, Broken> {
    let header = Header::parse(bytes).map_err(unreadable)?;
    let e = header.endian().map_err(unreadable)?;
    let machine = platform(triple).machine;
    if header.e_machine(e) != machine {
        return Err(format!("machine, expected {machine:?}, found {:?}", header.e_machine(e)).into());
    }
    if header.e_type(e) != ET_DYN {
        return Err("not position independent".into());
    }
    let segments = header.program_headers(e, bytes).map_err(unreadable)?;
    hardened(segments, e, bytes)?;
    let program_header = |index: usize| header.e_phoff(e) + index as u64 * PROGRAM_HEADER_BYTES;
    let LoadedSegments { payload, code, others } = loaded(segments, e, program_header(segments.len()))?;
    let Some((segment, payload)) = payload else { return Err("no payload segment".into()) };
    // What checks the file runs first, and lies behind the headers, whose own segment is the first.
    let [(1, start), (_, code)] = &code[..] else { return Err(format!("{} code segments", code.len()).into()) };
    if !start.contains(&header.e_entry(e)) {
        return Err("it is not checked before it runs".into());
    }
    let sections = header.sections(e, bytes).map_err(unreadable)?;
    let Some((section, s)) = sections.section_by_name(e, PAYLOAD_SECTION.as_bytes()) else { return Err("no payload section".into()) };
    if s.sh_addr(e) != PAYLOAD_VADDR || s.sh_offset(e) != payload.start || s.sh_size(e) != payload.end - payload.start {
        return Err("payload section and segment differ".into());
    }
    // Zeros up to a page, for which the kernel would write to the last page of the file's constants: by a signal where that is cut off.
    let padding = sections.section_by_name(e, RELRO_PADDING).map(|(_, s)| s.sh_addr(e));
    let padded = segments.iter().position(|s| s.p_type(e) == PT_LOAD && Some(s.p_vaddr(e) + s.p_filesz(e)) == padding);
    let padded = padded.map(|index| (program_header(index) + MEMORY_LENGTH, segments[index].p_filesz(e)));
    Ok(Image {
        segment_at: program_header(segment),
        section_at: header.e_shoff(e) + section.0 as u64 * SECTION_HEADER_BYTES,
        payload,
        code: code.clone(),
        loaded: others,
        padded,
    })
}

/// No loader, no executable stack, constants read-only once relocated, everything bound at start, nothing shared.
fn hardened(segments: &[Segment], e: LittleEndian, bytes: &[u8]) -> Result<(), Broken> {
    let (mut stack, mut relro, mut now) = (false, false, false);
    for s in segments {
        match s.p_type(e) {
            PT_INTERP => return Err("it asks for a dynamic loader".into()),
            PT_GNU_STACK if has(s, e, PF_X) => return Err("executable stack".into()),
            PT_GNU_STACK => stack = true,
            PT_GNU_RELRO => relro = true,
            PT_LOAD if has(s, e, PF_W) && has(s, e, PF_X) => return Err("a segment is writable and executable".into()),
            PT_DYNAMIC => {
                for entry in s.dynamic(e, bytes).map_err(unreadable)?.unwrap_or_default() {
                    let value = entry.d_val(e);
                    match entry.d_tag(e) {
                        DT_NEEDED => return Err("it needs a shared library".into()),
                        DT_RPATH | DT_RUNPATH => return Err("it has a library search path".into()),
                        DT_TEXTREL => return Err("text relocations".into()),
                        DT_FLAGS if value & DF_TEXTREL != 0 => return Err("text relocations".into()),
                        DT_FLAGS => now |= value & DF_BIND_NOW != 0,
                        DT_FLAGS_1 => now |= value & DF_1_NOW != 0,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if stack && relro && now { Ok(()) } else { Err(format!("hardening: stack header {stack}, relro {relro}, bind now {now}").into()) }
}

/// What the kernel loads.
#[derive(Default)]
struct LoadedSegments {
    /// Number of its program header, file offsets.
    payload: Option<(usize, Range<u64>)>,
    /// Numbers among `others`, virtual addresses.
    code: Vec<(usize, Range<u64>)>,
    /// File offsets of everything but the payload and the headers, which end at `headers_end`.
    others: Vec<Range<u64>>,
}

fn loaded(segments: &[Segment], e: LittleEndian, headers_end: u64) -> Result<LoadedSegments, Broken> {
    let mut loaded = LoadedSegments::default();
    for (index, s) in segments.iter().enumerate().filter(|(_, s)| s.p_type(e) == PT_LOAD) {
        let (vaddr, offset) = (s.p_vaddr(e), s.p_offset(e));
        let end = offset.saturating_add(s.p_filesz(e));
        if vaddr == PAYLOAD_VADDR {
            if has(s, e, PF_W) || has(s, e, PF_X) {
                return Err("the payload segment is not read-only".into());
            }
            loaded.payload = Some((index, offset..end));
            continue;
        }
        if vaddr.saturating_add(s.p_memsz(e)) > PAYLOAD_VADDR {
            return Err("a segment lies at or behind the payload".into());
        }
        if has(s, e, PF_X) {
            loaded.code.push((loaded.others.len(), vaddr..vaddr.saturating_add(s.p_filesz(e))));
        }
        loaded.others.push(offset.max(headers_end).min(end)..end);
    }
    Ok(loaded)
}

fn has(segment: &Segment, e: LittleEndian, flag: ProgramFlags) -> bool {
    segment.p_flags(e) & flag != ProgramFlags(0)
}

/// Bytes to write at file offsets so that the payload is `len` bytes at `offset`, and padding has none in memory.
pub(super) fn move_payload(image: &Image, offset: u64, len: u64) -> Vec<(u64, Vec<u8>)> {
    debug_assert_eq!(offset % WEIGHTS_ALIGN, 0);
    let words = |list: &[u64]| list.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    let mut patches = vec![
        // p_offset; p_filesz, p_memsz, p_align; sh_offset, sh_size
        (image.segment_at + 8, words(&[offset])),
        (image.segment_at + 32, words(&[len, len, WEIGHTS_ALIGN])),
        (image.section_at + 24, words(&[offset, len])),
    ];
    patches.extend(image.padded.map(|(at, len)| (at, words(&[len]))));
    patches
}

/// File offset of the payload, from the first page of an executable.
pub(super) fn find_payload(start: &[u8]) -> Option<u64> {
    let header = FileHeader64::<LittleEndian>::parse(start).ok()?;
    let e = header.endian().ok()?;
    let segments = header.program_headers(e, start).ok()?;
    segments.iter().find(|s| s.p_type(e) == PT_LOAD && s.p_vaddr(e) == PAYLOAD_VADDR).map(|s| s.p_offset(e))
}
