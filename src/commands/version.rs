//! The versions of the program and of the libraries that it uses: for `--version` and `ddp-mp env`.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::config::Program;
use engine::error::Shown;
use engine::ffi::{self, cuda::Cuda};
use engine::process_group::{NcclLibrary, find_nccl};

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
    /// `None` if NCCL was not found, cannot be used, or there is no GPU.
    pub(super) nccl: Option<String>,
    nccl_file: Option<PathBuf>,
    /// Why NCCL cannot be used. `None` if it can, or was not found.
    nccl_problem: Option<String>,
}

/// The name and the version of a program.
#[derive(Debug, Clone, Serialize)]
struct ProgramVersion {
    name: &'static str,
    version: &'static str,
}

impl Versions {
    /// Finds the versions of `program` on this machine. CUDA has been loaded: libtorch_cuda decides which NCCL the process
    /// has.
    pub(crate) fn find(program: &Program, cuda: &Cuda) -> Self {
        let found = if cuda.usable() > 0 { find_nccl() } else { Ok(None) };
        let nccl_problem = found.as_ref().err().map(ToString::to_string);
        let nccl = found.ok().flatten().map(|NcclLibrary { version, file }| (version, file));
        let (nccl, nccl_file) = nccl.unzip();
        Self {
            program: program
                .is_own()
                .then_some(ProgramVersion { name: program.name, version: program.version }),
            version: env!("CARGO_PKG_VERSION"),
            commit: Some(program.commit).filter(|commit| !commit.is_empty()),
            libtorch: ffi::version(),
            nccl,
            nccl_file: nccl_file.flatten(),
            nccl_problem,
        }
    }

    /// Returns the version of NCCL and its file, or why there is none.
    pub(super) fn nccl(&self) -> String {
        match (&self.nccl, &self.nccl_file, &self.nccl_problem) {
            (Some(version), Some(file), _) => format!("{version} ({})", file.shown()),
            (Some(version), None, _) => version.clone(),
            (None, _, Some(problem)) => format!("unusable: {problem}"),
            (None, _, None) => "none".into(),
        }
    }

    /// Returns the version, that of the program, and the commit if it is known.
    pub(super) fn program(&self) -> String {
        let commit = self.commit.map_or(String::new(), |commit| format!(", commit {commit}"));
        let named = |own: &ProgramVersion| format!(", in {} {}", own.name, own.version);
        let own = self.program.as_ref().map_or(String::new(), named);
        format!("{}{own}{commit}", self.version)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { program, version, commit, libtorch, .. } = self;
        if let Some(ProgramVersion { name, version }) = program {
            writeln!(f, "{name:<9} {version}")?;
        }
        writeln!(f, "ddp-mp    {version}")?;
        writeln!(f, "commit    {}", commit.unwrap_or("unknown"))?;
        writeln!(f, "libtorch  {libtorch}")?;
        writeln!(f, "NCCL      {}", self.nccl())
    }
}
