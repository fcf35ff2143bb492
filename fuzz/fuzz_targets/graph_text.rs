//! Fed: the text form of a graph. Oracle: no panic; a module that the verifier accepts prints, parses back to itself, and prints the same again;
//! what it refuses is shown.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rcompile_fuzz::{repository, start};
use rcompile_graph::parse::parse_bytes;
use rcompile_graph::{parse, print, verify};

fuzz_target!(init: start(seeds()), |data: &[u8]| {
    let module = match parse_bytes(data) {
        Ok(module) => module,
        Err(e) => {
            assert!(e.line >= 1 && e.column >= 1, "{e}");
            assert!(!e.to_string().chars().any(char::is_control), "{e}");
            return;
        }
    };
    let text = print(&module);
    if let Err(e) = verify(&module) {
        assert!(!e.errors.is_empty() && !e.to_string().is_empty());
        return;
    }
    let again = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    assert_eq!(print(&again), text);
    // A NaN is no other's equal.
    assert!(again == module || text.to_lowercase().contains("nan"), "{text}");
});

/// The modules of the tests of passes, without their lines for the harness.
fn seeds() -> Vec<Vec<u8>> {
    let mut files: Vec<_> = std::fs::read_dir(repository("tests/graph")).unwrap().flatten().map(|e| e.path()).collect();
    files.sort();
    let text = |path| std::fs::read_to_string(path).unwrap();
    let modules = |text: String| -> Vec<Vec<u8>> {
        text.split("\n---").map(|part| part.lines().filter(|l| !l.starts_with("//")).collect::<Vec<_>>().join("\n").into_bytes()).collect()
    };
    files.into_iter().flat_map(|path| modules(text(path))).collect()
}
