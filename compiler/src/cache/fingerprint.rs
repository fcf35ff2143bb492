//! What an entry depends on beside its own inputs: the compiler.

use object::Object;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Of generated objects: the sources of the code generator ([`rcompile_codegen::fingerprint`]) and the build of LLVM.
pub(super) fn objects() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let llvm = llvm_build().unwrap_or_else(|| format!("inside {}", program()));
        format!("rcompile {} {} {llvm}", env!("CARGO_PKG_VERSION"), rcompile_codegen::fingerprint::text())
    })
}

/// Of packed weights: this program.
pub(super) fn weights() -> String {
    format!("rcompile {} {}", env!("CARGO_PKG_VERSION"), program())
}

/// BLAKE3 of this program's file.
fn program() -> &'static str {
    static HASH: OnceLock<String> = OnceLock::new();
    HASH.get_or_init(|| hash(std::env::current_exe().and_then(File::open)))
}

/// BLAKE3 of a file. Where it cannot be read, nothing is found again.
fn hash(file: io::Result<File>) -> String {
    let mut hasher = blake3::Hasher::new();
    match file.and_then(|f| hasher.update_reader(f).map(|_| ())) {
        Ok(()) => hasher.finalize().to_hex().to_string(),
        Err(_) => format!("process {} at {:?}", std::process::id(), std::time::SystemTime::now()),
    }
}

/// The LLVM that was loaded as a shared library: its build id, or what is in its file where it has none; None where there is no such library.
fn llvm_build() -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|l| l.find('/').map(|at| &l[at..]));
    let path = paths.filter(|p| p.rsplit('/').next().is_some_and(|name| name.starts_with("libLLVM"))).map(PathBuf::from).next()?;
    Some(match build_id(&path) {
        Some(id) => format!("build {}", id.iter().map(|b| format!("{b:02x}")).collect::<String>()),
        None => format!("file {}", hash(File::open(&path))),
    })
}

fn build_id(library: &Path) -> Option<Vec<u8>> {
    let cache = object::ReadCache::new(File::open(library).ok()?);
    let file = object::File::parse(&cache).ok()?;
    Some(file.build_id().ok()??.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_this_program_and_its_llvm() {
        let text = objects();
        assert!(
            text.contains("codegen ")
                && text.contains("LLVM 19.")
                && [" build ", " file ", " inside "].iter().any(|llvm| text.contains(llvm)),
            "{text}"
        );
        assert_eq!(program().len(), 64);
        // A library that a newer one has replaced on the disk is "PATH (deleted)": it is not taken for the new one.
        let gone = || hash(File::open("/usr/lib/libLLVM.so (deleted)"));
        assert!(gone().starts_with("process") && gone() != gone());
    }
}
