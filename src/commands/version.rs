//! The versions of the program and of the libraries that it uses: for `--version` and `ddp-mp env`.

use std::fmt;

use serde::Serialize;

use crate::config::Program;
use crate::ffi;
use crate::process_group::nccl_version;

/// The versions of the program and of its libraries.
#[derive(Debug, Clone, Serialize)]
pub struct Versions {
    /// The program, if it is not ddp-mp itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<ProgramVersion>,
    /// The version of ddp-mp.
    version: &'static str,
    /// The commit that the program was built from. `None` without a git repository.
    commit: Option<&'static str>,
    pub(super) libtorch: String,
    /// `None` if NCCL was not found.
    pub(super) nccl: Option<String>,
}

/// The name and the version of a program.
#[derive(Debug, Clone, Serialize)]
struct ProgramVersion {
    name: &'static str,
    version: &'static str,
}

impl Versions {
    /// Finds the versions of `program` on this machine. It was built from `commit`, which is empty if not known.
    pub(crate) fn find(program: &Program, commit: &'static str) -> Self {
        Self {
            program: program
                .is_own()
                .then_some(ProgramVersion { name: program.name, version: program.version }),
            version: env!("CARGO_PKG_VERSION"),
            commit: Some(commit).filter(|commit| !commit.is_empty()),
            libtorch: ffi::version(),
            nccl: nccl_version(),
        }
    }

    /// Returns the version, that of the program, and the commit if it is known.
    pub(super) fn program(&self) -> String {
        let commit = self.commit.map_or(String::new(), |commit| format!(", commit {commit}"));
        match &self.program {
            Some(ProgramVersion { name, version }) => {
                format!("{}, in {name} {version}{commit}", self.version)
            }
            None => format!("{}{commit}", self.version),
        }
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { program, version, commit, libtorch, nccl } = self;
        if let Some(ProgramVersion { name, version }) = program {
            writeln!(f, "{name:<9} {version}")?;
        }
        writeln!(f, "ddp-mp    {version}")?;
        writeln!(f, "commit    {}", commit.unwrap_or("unknown"))?;
        writeln!(f, "libtorch  {libtorch}")?;
        writeln!(f, "NCCL      {}", nccl.as_deref().unwrap_or("none"))
    }
}
