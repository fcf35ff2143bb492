//! What an entry depends on beside its own inputs: the compiler.

use object::Object;
use std::fs::{self, File};
use std::path::PathBuf;
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

/// BLAKE3 of this program's file. Where it cannot be read, nothing is found again.
fn program() -> &'static str {
    static HASH: OnceLock<String> = OnceLock::new();
    HASH.get_or_init(|| {
        let mut hasher = blake3::Hasher::new();
        let hashed = std::env::current_exe().and_then(File::open).and_then(|f| hasher.update_reader(f).map(|_| ()));
        match hashed {
            Ok(()) => hasher.finalize().to_hex().to_string(),
            Err(_) => format!("process {} at {:?}", std::process::id(), std::time::SystemTime::now()),
        }
    })
}

/// Build id of the LLVM that was loaded as a shared library; None where there is none.
fn llvm_build() -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|l| l.find('/').map(|at| &l[at..]));
    let path = paths.filter(|p| p.rsplit('/').next().is_some_and(|name| name.starts_with("libLLVM"))).map(PathBuf::from).next()?;
    let cache = object::ReadCache::new(File::open(path).ok()?);
    let file = object::File::parse(&cache).ok()?;
    let id = file.build_id().ok()??;
    Some(format!("build {}", id.iter().map(|b| format!("{b:02x}")).collect::<String>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_this_program_and_its_llvm() {
        let text = objects();
        assert!(
            text.contains("codegen ") && text.contains("LLVM 19.") && (text.contains(" build ") || text.contains(" inside ")),
            "{text}"
        );
        assert_eq!(program().len(), 64);
    }
}
