//! The table of all backends, and the choice of a backend for the ranks of a group. A new backend needs a folder, a
//! `mod` line, a variant of `Backend` and a line in `Backend::entry`.

use std::str::FromStr;

use strum::{EnumIter, IntoEnumIterator};
use tch::{Device, Kind};

use super::backend::{BackendType, Devices, Reach};
use super::reduce_op::ReduceOp;
use crate::error::{Error, Result};
use crate::operation::Operation;

/// The communication backend of a process group. The default is the first variant that supports the ranks' devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter)]
pub enum Backend {
    /// NCCL: each rank on a GPU of its own.
    Nccl,
    /// Shared memory: ranks on the CPU, or on one GPU together.
    Threaded,
    /// Gloo: ranks on the CPU in several processes. Ranks of one process share memory.
    Gloo,
}

impl Backend {
    /// Returns the backend's description, which is in its folder.
    pub(super) fn entry(self) -> &'static BackendType {
        match self {
            Self::Nccl => &super::nccl::BACKEND,
            Self::Threaded => &super::threaded::BACKEND,
            Self::Gloo => &super::gloo::BACKEND,
        }
    }

    /// Returns the backend's name on the command line and in reports.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// Returns all backends.
    #[doc(hidden)]
    pub fn all() -> impl Iterator<Item = Self> {
        Self::iter()
    }

    /// Returns the default backend for ranks on these devices in one process.
    pub(crate) fn for_threads(devices: &[Device]) -> Self {
        let suits =
            |backend: &Self| backend.works_within_process() && backend.devices().include(devices);
        Self::iter().find(suits).unwrap_or(Self::Threaded)
    }

    /// Returns the default backend for ranks on these devices in several processes; `None` if none serves them.
    pub(crate) fn for_processes(devices: &[Device]) -> Option<Self> {
        let suits = |backend: &Self| {
            backend.works_between_processes() && backend.devices().include(devices)
        };
        Self::iter().find(suits)
    }

    /// Returns the devices whose ranks the backend serves.
    #[doc(hidden)]
    pub fn devices(self) -> Devices {
        self.entry().devices
    }

    /// Returns whether the backend serves ranks that are all in one process.
    pub(crate) fn works_within_process(self) -> bool {
        self.entry().reach != Reach::BetweenProcesses
    }

    /// Returns whether the backend connects the ranks of several processes.
    pub(crate) fn works_between_processes(self) -> bool {
        self.entry().reach != Reach::WithinProcess
    }

    /// Checks that the backend serves a group within one process.
    ///
    /// # Errors
    /// [`Error::Input`] that names the backend to use instead.
    pub(super) fn check_within_process(self) -> Result<()> {
        if self.works_within_process() {
            return Ok(());
        }
        let instead = Self::for_threads(&[Device::Cpu]).name();
        Err(Error::unsupported(format!(
            "backend {} is for several processes; use {instead} for the ranks of one",
            self.name()
        )))
    }

    /// Checks that the backend serves a group of several processes.
    ///
    /// # Errors
    /// [`Error::Input`] that names the backends to use instead.
    pub(super) fn check_between_processes(self) -> Result<()> {
        if self.works_between_processes() {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "backend {} is for the ranks of one process; use {} for several",
            self.name(),
            Self::names_between_processes()
        )))
    }

    /// Returns the names of the backends that connect processes, for a message: `nccl or gloo`.
    pub(crate) fn names_between_processes() -> String {
        let all = Self::iter().filter(|backend| backend.works_between_processes());
        all.map(Self::name).collect::<Vec<_>>().join(" or ")
    }

    /// Checks that the backend's library is installed, if it needs one.
    ///
    /// # Errors
    /// [`Error::Input`] that says how to install it.
    #[doc(hidden)]
    pub fn check_library(self) -> Result<()> {
        (self.entry().check_library)()
    }

    /// Checks that several ranks may have one GPU: of one process, or `between_processes`, whose ranks then compare which
    /// they have.
    ///
    /// # Errors
    /// [`Error::Input`] that says why not, and what to do.
    pub(crate) fn check_shared_gpu(self, between_processes: bool) -> Result<()> {
        (self.entry().check_shared_gpu)(between_processes)
    }

    /// Checks that the backend supports `operation` with `op` on tensors of `kind`.
    #[doc(hidden)]
    pub fn check_reduction(self, operation: Operation, op: ReduceOp, kind: Kind) -> Result<()> {
        op.check_kind(operation, kind)?;
        (self.entry().check_reduction)(operation, op, kind)
    }
}

impl FromStr for Backend {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::iter().find(|backend| backend.name() == name);
        found.ok_or_else(|| Error::unsupported(format!("there is no backend {name}")))
    }
}
