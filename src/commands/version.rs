//! The versions of the program and of the libraries that it uses: for `--version` and `ddp-mp env`.

use std::fmt;

use serde::Serialize;

use crate::ffi;
use crate::process_group::nccl_version;

/// The versions of the program and of its libraries.
#[derive(Debug, Clone, Serialize)]
pub struct Versions {
    version: &'static str,
    /// The commit that the program was built from. `None` without a git repository.
    commit: Option<&'static str>,
    pub(super) libtorch: String,
    /// `None` if NCCL was not found.
    pub(super) nccl: Option<String>,
}

impl Versions {
    /// Finds the versions on this machine. The program was built from `commit`, which is empty if not known.
    pub fn find(commit: &'static str) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: Some(commit).filter(|commit| !commit.is_empty()),
            libtorch: ffi::version(),
            nccl: nccl_version(),
        }
    }

    /// Returns the version, with the commit if it is known.
    pub(super) fn program(&self) -> String {
        let commit = self.commit.map_or(String::new(), |commit| format!(", commit {commit}"));
        format!("{}{commit}", self.version)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, commit, libtorch, nccl } = self;
        writeln!(f, "ddp-mp    {version}")?;
        writeln!(f, "commit    {}", commit.unwrap_or("unknown"))?;
        writeln!(f, "libtorch  {libtorch}")?;
        writeln!(f, "NCCL      {}", nccl.as_deref().unwrap_or("none"))
    }
}
