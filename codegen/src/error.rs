//! Errors of this crate.

/// What can go wrong here: an unknown target (the user's), a program that breaks the rules or LLVM refusing what we built (ours).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// `--target`, `--cpu` or a feature edit that is not known.
    #[error("{0}")]
    Target(String),
    /// The planner's program breaks rules of `verify`.
    #[error("invalid program (a bug in rcompile):\n{}", .0.join("\n"))]
    Program(Vec<String>),
    /// The system does not load compiled code.
    #[error("cannot be loaded: {0}")]
    Load(String),
    /// LLVM refused.
    #[error("{stage} failed (a bug in rcompile): {message}")]
    Internal {
        /// What ran.
        stage: String,
        /// What it said.
        message: String,
    },
}

impl Error {
    pub(crate) fn internal(stage: &str, message: String) -> Error {
        Error::Internal { stage: stage.to_string(), message }
    }
}
