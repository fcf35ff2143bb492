//! The linked file as ELF: what must hold of it, where the code is, and moving the payload segment to the end of the file.
//!
//! ```text
//! linked:   headers | read-only | code | data | .rc_payload (1 byte at PAYLOAD_VADDR) | symbols | section headers
//! final:    the same ...                                        | 0 .. 2 MB | payload: header manifest blobs weights
//! ```
//! The program header and the section header of the payload are changed in place; nothing else moves.

use crate::error::Error;
use object::LittleEndian;
use object::elf::{
    DT_FLAGS, DT_FLAGS_1, DT_NEEDED, DT_RPATH, DT_RUNPATH, DT_TEXTREL, EM_AARCH64, EM_X86_64, ET_DYN, FileHeader64, PF_W, PF_X, PT_DYNAMIC,
    PT_GNU_RELRO, PT_GNU_STACK, PT_INTERP, PT_LOAD, ProgramFlags,
};
use object::read::elf::{Dyn, FileHeader, ProgramHeader, SectionHeader};
use rcompile_runtime::abi::{PAYLOAD_SECTION, PAYLOAD_VADDR, Part, Segment, WEIGHTS_ALIGN};
use std::ops::Range;
use std::path::Path;

const PROGRAM_HEADER_BYTES: u64 = 56;
const SECTION_HEADER_BYTES: u64 = 64;
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
    /// Virtual addresses of the code.
    pub code: Range<u64>,
    /// Everything that is loaded.
    segments: Vec<Segment>,
    /// File offset behind the ELF header and the program headers.
    headers_end: u64,
}

impl Image {
    /// File offsets of what is hashed of a part, in the order of the program headers.
    pub fn hashed(&self, part: Part) -> impl Iterator<Item = Range<u64>> {
        self.segments.iter().filter(move |s| s.part() == part).map(|s| s.hashed(self.headers_end))
    }
}

/// Parses the headers of an executable and checks everything that we promise about it.
///
/// `bytes` is the file up to the payload, or more.
pub(super) fn check(bytes: &[u8], triple: &str, path: &Path) -> Result<Image, Error> {
    let broken = |what: String| Error::Output {
        path: path.display().to_string(),
        what: format!("the linked file is not as expected: {what}"),
        help: Some("another linker may help: apt-get install lld-19, or gcc and binutils of the distribution".into()),
    };
    let parse = |e: object::read::Error| broken(e.to_string());
    let header = FileHeader64::<LittleEndian>::parse(bytes).map_err(parse)?;
    let e = header.endian().map_err(parse)?;
    let machine = if triple.starts_with("aarch64") { EM_AARCH64 } else { EM_X86_64 };
    if header.e_machine(e) != machine {
        return Err(broken(format!("machine, expected {machine:?}, found {:?}", header.e_machine(e))));
    }
    if header.e_type(e) != ET_DYN {
        return Err(broken("not position independent".into()));
    }
    let segments = header.program_headers(e, bytes).map_err(parse)?;
    let mut payload = None;
    let mut code = Vec::new();
    let mut loaded = Vec::new();
    let mut stack = false;
    let mut relro = false;
    let mut now = false;
    for (index, s) in segments.iter().enumerate() {
        let vaddr = s.p_vaddr(e);
        let has = |flag| s.p_flags(e) & flag != ProgramFlags(0);
        match s.p_type(e) {
            PT_INTERP => return Err(broken("it asks for a dynamic loader".into())),
            PT_GNU_STACK if has(PF_X) => return Err(broken("executable stack".into())),
            PT_GNU_STACK => stack = true,
            PT_GNU_RELRO => relro = true,
            PT_LOAD => {
                if has(PF_W) && has(PF_X) {
                    return Err(broken("a segment is writable and executable".into()));
                }
                if vaddr == PAYLOAD_VADDR {
                    if has(PF_W) || has(PF_X) {
                        return Err(broken("the payload segment is not read-only".into()));
                    }
                    payload = Some((index, s.p_offset(e)..s.p_offset(e).saturating_add(s.p_filesz(e))));
                } else if vaddr.saturating_add(s.p_memsz(e)) > PAYLOAD_VADDR {
                    return Err(broken("a segment lies at or behind the payload".into()));
                }
                if has(PF_X) {
                    code.push(vaddr..vaddr.saturating_add(s.p_filesz(e)));
                }
                loaded.push(Segment { offset: s.p_offset(e), vaddr, file_len: s.p_filesz(e), flags: s.p_flags(e).0 });
            }
            PT_DYNAMIC => {
                for entry in s.dynamic(e, bytes).map_err(parse)?.unwrap_or_default() {
                    let value = entry.d_val(e);
                    match entry.d_tag(e) {
                        DT_NEEDED => return Err(broken("it needs a shared library".into())),
                        DT_RPATH | DT_RUNPATH => return Err(broken("it has a library search path".into())),
                        DT_TEXTREL => return Err(broken("text relocations".into())),
                        DT_FLAGS if value & DF_TEXTREL != 0 => return Err(broken("text relocations".into())),
                        DT_FLAGS => now |= value & DF_BIND_NOW != 0,
                        DT_FLAGS_1 => now |= value & DF_1_NOW != 0,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if !stack || !relro || !now {
        return Err(broken(format!("hardening: stack header {stack}, relro {relro}, bind now {now}")));
    }
    let Some((segment, payload)) = payload else { return Err(broken("no payload segment".into())) };
    let [code] = &code[..] else { return Err(broken(format!("{} code segments", code.len()))) };
    let sections = header.sections(e, bytes).map_err(parse)?;
    let Some((section, s)) = sections.section_by_name(e, PAYLOAD_SECTION.as_bytes()) else {
        return Err(broken("no payload section".into()));
    };
    if s.sh_addr(e) != PAYLOAD_VADDR || s.sh_offset(e) != payload.start || s.sh_size(e) != payload.end - payload.start {
        return Err(broken("payload section and segment differ".into()));
    }
    Ok(Image {
        segment_at: header.e_phoff(e) + segment as u64 * PROGRAM_HEADER_BYTES,
        section_at: header.e_shoff(e) + section.0 as u64 * SECTION_HEADER_BYTES,
        payload,
        code: code.clone(),
        segments: loaded,
        headers_end: header.e_phoff(e) + segments.len() as u64 * PROGRAM_HEADER_BYTES,
    })
}

/// Bytes to write at file offsets so that the payload is `len` bytes at `offset`.
pub(super) fn move_payload(image: &Image, offset: u64, len: u64) -> [(u64, Vec<u8>); 3] {
    debug_assert_eq!(offset % WEIGHTS_ALIGN, 0);
    let words = |list: &[u64]| list.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    [
        // p_offset; p_filesz, p_memsz, p_align; sh_offset, sh_size
        (image.segment_at + 8, words(&[offset])),
        (image.segment_at + 32, words(&[len, len, WEIGHTS_ALIGN])),
        (image.section_at + 24, words(&[offset, len])),
    ]
}

/// File offset of the payload, from the first page of an executable.
pub(super) fn find_payload(start: &[u8]) -> Option<u64> {
    let header = FileHeader64::<LittleEndian>::parse(start).ok()?;
    let e = header.endian().ok()?;
    let segments = header.program_headers(e, start).ok()?;
    segments.iter().find(|s| s.p_type(e) == PT_LOAD && s.p_vaddr(e) == PAYLOAD_VADDR).map(|s| s.p_offset(e))
}
