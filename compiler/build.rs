//! Builds the runtime archive that `rcompile` carries inside and links into every executable.
//!
//! In: the crate `runtime-lib` (as a static library, profile `runtime`). Out: `$OUT_DIR/runtime-<triple>.a`, embedded by `src/targets.rs`.
//! `RCOMPILE_RUNTIME_ARCHIVE=FILE` takes a prebuilt one instead.
//!
//! The archive has its own target directory, `runtime-archive` inside the one of this build, so that the two cargos do not
//! wait for each other's lock and debug, release and test builds share one archive.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runtimes for: one archive each. `x86-64-v2` runs everywhere up to the CPU check of the executable.
const TARGETS: [(&str, &str); 1] = [("x86_64-unknown-linux-gnu", "x86-64-v2")];

fn main() {
    let root = PathBuf::from(var("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_path_buf();
    let out_dir = PathBuf::from(var("OUT_DIR"));
    for path in ["runtime-lib/src", "runtime-lib/Cargo.toml", "models/src/template.rs", "Cargo.lock", "Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=RCOMPILE_RUNTIME_ARCHIVE");
    println!("cargo::rustc-env=RCOMPILE_PROFILE={}", var("PROFILE"));
    for (triple, cpu) in TARGETS {
        let archive = match env::var_os("RCOMPILE_RUNTIME_ARCHIVE") {
            Some(path) => PathBuf::from(path),
            None => build(&root, &target_dir(&out_dir), triple, cpu),
        };
        let to = out_dir.join(format!("runtime-{triple}.a"));
        // A file of its own: what is there may be a link that another build shares.
        let _ = std::fs::remove_file(&to);
        if let Err(e) = std::fs::copy(&archive, &to) {
            fail(&format!("copying {} to {}: {e}", archive.display(), to.display()));
        }
    }
}

/// `<target>/runtime-archive` for an `OUT_DIR` of `<target>/[triple/]<profile>/build/<package>/out`.
fn target_dir(out_dir: &Path) -> PathBuf {
    let build = out_dir.ancestors().find(|dir| dir.file_name().is_some_and(|name| name == "build"));
    build.and_then(|dir| dir.parent()?.parent()).unwrap_or(out_dir).join("runtime-archive")
}

fn build(root: &Path, target_dir: &Path, triple: &str, cpu: &str) -> PathBuf {
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
    let mut flags = vec!["-Crelocation-model=pic".to_string(), format!("-Ctarget-cpu={cpu}"), "-Cpanic=unwind".into()];
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
