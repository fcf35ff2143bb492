//! Builds the runtime archives that `rcompile` carries inside and links into every executable, one per target.
//!
//! In: the crate `runtime-lib` (as a static library, profile `runtime`). Out: `$OUT_DIR/runtime-<triple>.a`, embedded by `src/targets.rs`.
//! The archive of this machine's architecture is a must; another one is built where a Rust compiler has its standard library and a C
//! compiler for it is there, and is an empty file elsewhere (`rcompile targets` then says what to install).
//! `RCOMPILE_RUNTIME_ARCHIVE=FILE` takes a prebuilt one for this machine, `RCOMPILE_RUNTIME_ARCHIVE_AARCH64=FILE` (`_X86_64`) for a named
//! architecture.
//!
//! The archives have their own target directory, `runtime-archive` inside the one of this build, so that the two cargos do not
//! wait for each other's lock and debug, release and test builds share them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runtimes for: one archive each. `x86-64-v2` and `generic` (armv8-a) run everywhere up to the CPU check of the executable.
const TARGETS: [(&str, &str); 2] = [("x86_64-unknown-linux-gnu", "x86-64-v2"), ("aarch64-unknown-linux-gnu", "generic")];

/// Debian's Rust compiler: the standard library of another architecture is a package for it, and not for rustup's.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
/// `rust-version` of the workspace: 1.95.
const RUST_MINOR: u32 = 95;

fn main() {
    let root = PathBuf::from(var("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_path_buf();
    let out_dir = PathBuf::from(var("OUT_DIR"));
    for path in ["runtime-lib/src", "runtime-lib/Cargo.toml", "models/message", "models/template", "Cargo.lock", "Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=RCOMPILE_RUNTIME_ARCHIVE");
    println!("cargo::rerun-if-env-changed=PATH");
    println!("cargo::rustc-env=RCOMPILE_PROFILE={}", var("PROFILE"));
    for (triple, cpu) in TARGETS {
        let arch = triple.split('-').next().expect("an architecture");
        let host = arch == env::consts::ARCH;
        let named = format!("RCOMPILE_RUNTIME_ARCHIVE_{}", arch.to_uppercase());
        println!("cargo::rerun-if-env-changed={named}");
        let prebuilt = env::var_os(named).or(env::var_os("RCOMPILE_RUNTIME_ARCHIVE").filter(|_| host));
        let archive = match prebuilt {
            Some(path) => Some(PathBuf::from(path)),
            None if host => Some(build(&root, &target_dir(&out_dir), triple, cpu, None)),
            None => cross_rustc(triple).map(|rustc| build(&root, &target_dir(&out_dir), triple, cpu, Some(&rustc))),
        };
        let to = out_dir.join(format!("runtime-{triple}.a"));
        // A file of its own: what is there may be a link that another build shares.
        let _ = std::fs::remove_file(&to);
        let done = match &archive {
            Some(archive) => std::fs::copy(archive, &to).map(|_| ()),
            None => std::fs::write(&to, []),
        };
        if let Err(e) = done {
            fail(&format!("writing {}: {e}", to.display()));
        }
    }
}

/// A Rust compiler with the standard library of `triple`, if a C compiler for it is there too (a dependency has C files). While one of
/// them is missing, the places where it would appear are watched.
fn cross_rustc(triple: &str) -> Option<PathBuf> {
    let gcc = format!("{}-gcc", triple.replace("-unknown", ""));
    let has_cc = env::var_os(format!("CC_{}", triple.replace('-', "_"))).is_some()
        || env::split_paths(&env::var_os("PATH").unwrap_or_default()).any(|dir| dir.join(&gcc).is_file());
    let rustc = [PathBuf::from(var("RUSTC")), DEBIAN_RUSTC.into()].into_iter().find(|rustc| has_target(rustc, triple));
    match rustc {
        Some(rustc) if has_cc => {
            println!("cargo::rerun-if-changed={}", rustc.display());
            Some(rustc)
        }
        _ => {
            for place in ["/var/lib/dpkg/status", "/usr/lib/rustlib"] {
                if Path::new(place).exists() {
                    println!("cargo::rerun-if-changed={place}");
                }
            }
            if let Some(sysroot) = print(Path::new(&var("RUSTC")), &["--print", "sysroot"]) {
                println!("cargo::rerun-if-changed={sysroot}/lib/rustlib");
            }
            None
        }
    }
}

/// Is it recent enough, and has it a standard library for the target?
fn has_target(rustc: &Path, triple: &str) -> bool {
    let minor = print(rustc, &["--version"]).and_then(|text| text.strip_prefix("rustc 1.")?.split('.').next()?.parse::<u32>().ok());
    let libraries = print(rustc, &["--print", "target-libdir", "--target", triple]);
    let std_library = |dir: String| {
        let files = std::fs::read_dir(dir).ok()?;
        files
            .flatten()
            .find(|f| f.file_name().to_string_lossy().starts_with("libstd-") && f.path().extension().is_some_and(|e| e == "rlib"))
    };
    minor.is_some_and(|minor| minor >= RUST_MINOR) && libraries.and_then(std_library).is_some()
}

fn print(program: &Path, args: &[&str]) -> Option<String> {
    let out = Command::new(program).args(args).output().ok().filter(|out| out.status.success())?;
    Some(String::from_utf8(out.stdout).ok()?.trim().to_string())
}

/// `<target>/runtime-archive` for an `OUT_DIR` of `<target>/[triple/]<profile>/build/<package>/out`.
fn target_dir(out_dir: &Path) -> PathBuf {
    let build = out_dir.ancestors().find(|dir| dir.file_name().is_some_and(|name| name == "build"));
    build.and_then(|dir| dir.parent()?.parent()).unwrap_or(out_dir).join("runtime-archive")
}

/// `rustc`: another one than that of this build.
fn build(root: &Path, target_dir: &Path, triple: &str, cpu: &str, rustc: Option<&Path>) -> PathBuf {
    let mut command = Command::new(var("CARGO"));
    command.current_dir(root).args(["rustc", "--locked", "--quiet", "--package", "rcompile-runtime", "--lib", "--crate-type", "staticlib"]);
    // An explicit target keeps the flags below away from build scripts and procedural macros.
    command.args(["--profile", "runtime", "--target", triple, "--target-dir"]).arg(target_dir);
    // What the outer cargo, clippy or the user have set is for the outer build.
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        let outer = name.starts_with("CARGO_PROFILE_")
            || name.starts_with("CARGO_FEATURE_")
            || name.starts_with("CARGO_CFG_")
            || (name.starts_with("CARGO_TARGET_") && name.ends_with("_RUSTFLAGS"))
            || name.starts_with("CARGO_BUILD_")
            || matches!(&*name, "RUSTFLAGS" | "CARGO_ENCODED_RUSTFLAGS" | "RUSTDOCFLAGS" | "CARGO_TARGET_DIR" | "CARGO_BUILD_TARGET")
            || matches!(
                &*name,
                "RUSTC_WRAPPER" | "RUSTC_WORKSPACE_WRAPPER" | "CLIPPY_ARGS" | "TARGET" | "HOST" | "OPT_LEVEL" | "DEBUG" | "PROFILE"
            );
        if outer {
            command.env_remove(&*name);
        }
    }
    if let Some(rustc) = rustc {
        command.env("RUSTC", rustc);
    }
    let mut flags = vec!["-Crelocation-model=pic".to_string(), format!("-Ctarget-cpu={cpu}"), "-Cpanic=unwind".into()];
    // In a static executable the crate finds no `getrandom` of libc by name, and would open /dev/urandom, which need not be there.
    flags.push("--cfg=getrandom_backend=\"linux_getrandom\"".into());
    // Paths of this machine would make executables differ between checkouts.
    let home = env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| env::var_os("HOME").map(|h| Path::new(&h).join(".cargo")));
    let homes = home.map(|home| (home, "/cargo"));
    for (from, to) in homes.into_iter().chain([(root.to_path_buf(), "/rcompile"), (target_dir.to_path_buf(), "/target")]) {
        flags.push(format!("--remap-path-prefix={}={to}", from.display()));
    }
    command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    match command.status() {
        Ok(status) if status.success() => target_dir.join(triple).join("runtime/librcompile_runtime.a"),
        Ok(status) => fail(&format!("building the runtime archive failed ({status}), see above")),
        Err(e) => fail(&format!("building the runtime archive: {e}")),
    }
}

fn fail(what: &str) -> ! {
    println!("cargo::error={what}");
    std::process::exit(1)
}

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
