//! What the integration tests of this crate share.

use std::path::PathBuf;

/// A folder of the shared assets; `None` with a message where it is missing, which on CI is a failure.
#[allow(dead_code, reason = "not every test file needs it")]
pub fn assets(folder: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/assets").join(folder);
    if path.is_dir() {
        return Some(path);
    }
    assert!(std::env::var_os("CI").is_none(), "{} is missing, and on CI nothing is skipped", path.display());
    eprintln!("skipped: {} is missing", path.display());
    None
}
