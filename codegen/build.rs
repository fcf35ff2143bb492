//! Lists the sources that generated code depends on, for `src/fingerprint.rs`.
//!
//! In: `src`, the ABI of the runtime, `Cargo.lock`. Out: `$OUT_DIR/sources.rs`, a list of `include_bytes!` (so that the bytes hashed are
//! those that the compiler reads and not those of an earlier moment), and the versions of the tools.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    let here = PathBuf::from(var("CARGO_MANIFEST_DIR"));
    let root = here.parent().expect("the workspace");
    let mut files = vec![root.join("runtime-lib/src/abi.rs"), root.join("Cargo.lock")];
    for path in ["src".into(), files[0].clone(), files[1].clone()] {
        println!("cargo::rerun-if-changed={}", here.join(path).display());
    }
    collect(&here.join("src"), &mut files);
    files.sort();
    let list: String = files.iter().map(|f| format!("    include_bytes!({:?}),\n", f.display().to_string())).collect();
    let out = PathBuf::from(var("OUT_DIR")).join("sources.rs");
    fs::write(&out, format!("&[\n{list}]\n")).unwrap_or_else(|e| panic!("{}: {e}", out.display()));

    let rustc = Command::new(var("RUSTC")).arg("-V").output().expect("rustc runs");
    println!("cargo::rustc-env=RCOMPILE_RUSTC={} {}", String::from_utf8_lossy(&rustc.stdout).trim(), var("PROFILE"));
}

/// All files below `dir`.
fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())).flatten() {
        match entry.file_type() {
            Ok(t) if t.is_dir() => collect(&entry.path(), files),
            _ => files.push(entry.path()),
        }
    }
}

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
