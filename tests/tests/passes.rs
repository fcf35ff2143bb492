//! Text tests of passes: every section of every file in `tests/graph`, see `rcompile_tests::text`.

use rcompile::pipeline::PASSES;
use rcompile_tests::text::check;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn files() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("graph");
    let mut files: Vec<PathBuf> = std::fs::read_dir(&dir).expect("tests/graph").map(|e| e.expect("entry").path()).collect();
    files.sort();
    files
}

#[test]
fn every_file_holds() {
    let errors: Vec<String> = files().iter().filter_map(|f| check(f).err()).collect();
    assert!(errors.is_empty(), "{} files fail:\n{}", errors.len(), errors.join("\n"));
}

/// A pass is in the list by the name of its file; `cse-2` is the second run of `cse`.
#[test]
fn every_pass_has_a_file_with_a_positive_and_a_refusing_case() {
    let names: BTreeSet<String> = files().iter().map(|f| f.file_stem().unwrap_or_default().to_string_lossy().into_owned()).collect();
    for pass in PASSES {
        let name = pass.name.strip_suffix("-2").unwrap_or(pass.name);
        assert!(names.contains(name), "no tests/graph/{name}.graph");
        let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("graph/{name}.graph"))).expect(name);
        assert!(text.contains("// changed: yes") && text.contains("// changed: no") && text.contains("// run:"), "{name}");
    }
    for name in names {
        assert!(PASSES.iter().any(|p| p.name == name), "tests/graph/{name}.graph is of no pass");
    }
}
