//! What the flags of commands have in common that start ranks and have no configuration: `comm` and `bench`.

use std::time::Duration;

use clap::Args;

use crate::config::{backend_in_one_process, name, positive_duration};
use crate::error::Result;
use crate::ffi::cuda::Cuda;
use crate::launch::{BackendChoice, BindChoice, Nproc, Placement, Spawn};
use crate::session::place_ranks;

/// The ranks to start.
#[derive(Debug, Clone, Args)]
pub struct RanksFlags {
    /// Ranks to start: auto, gpu, cpu or N
    ///
    /// auto: one per visible GPU, else one per CPU core
    #[arg(long, value_name = "auto|gpu|cpu|N", default_value = "auto")]
    pub nproc_per_node: Nproc,
    /// Communication backend
    ///
    /// auto: nccl on GPUs, else threaded
    #[arg(long, value_name = "NAME", value_parser = backend_in_one_process(), default_value = "auto")]
    pub backend: BackendChoice,
    /// CPUs of each rank
    ///
    /// auto: core if every thread of every rank gets a CPU; else none
    #[arg(long, value_name = "NAME", value_parser = name::<BindChoice>(), default_value_t)]
    pub bind: BindChoice,
    /// Longest wait for other ranks, as 500ms, 30s, 10m
    ///
    /// A plain number is seconds
    #[arg(long, value_name = "TIME", value_parser = positive_duration, default_value = "10m")]
    pub timeout: Duration,
}

impl RanksFlags {
    /// Returns where the ranks run.
    ///
    /// # Errors
    /// [`Error::InvalidInput`](crate::Error::InvalidInput) when they cannot run here.
    pub(super) fn place(&self, cuda: &Cuda) -> Result<Placement> {
        place_ranks(self.nproc_per_node, self.backend, self.bind, cuda)
    }

    /// Returns how to start the ranks of `placement`.
    pub(super) fn spawn(&self, placement: &Placement) -> Spawn {
        Spawn::at(placement).bind(self.bind).timeout(self.timeout)
    }
}
