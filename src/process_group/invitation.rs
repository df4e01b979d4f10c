//! What a rank needs to join a group, made by one of its members for all.

use std::sync::Arc;

use tch::Device;

use super::nccl::{Nccl, UniqueId};
use super::threaded::{Shared, Threaded};
use super::{Backend, ProcessGroup};
use crate::error::{Error, Result};
use crate::sync::Run;

/// An invitation to a group of ranks of this process.
#[derive(Debug, Clone)]
pub(crate) enum Invitation {
    /// The memory through which the ranks talk.
    Threaded(Arc<Shared>),
    /// NCCL's id of the communicator to join, and where its ranks in this process meet.
    Nccl(UniqueId, Arc<Shared>),
}

impl Invitation {
    /// To the ranks `members` of `run`, talking through shared memory.
    pub(crate) fn threaded(run: &Arc<Run>, members: Arc<[usize]>) -> Self {
        Invitation::Threaded(Arc::new(Shared::new(run.clone(), members)))
    }

    /// To the ranks `members` of `run`, talking through NCCL.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without NCCL.
    pub(crate) fn nccl(run: &Arc<Run>, members: Arc<[usize]>) -> Result<Self> {
        Ok(Invitation::Nccl(UniqueId::new()?, Arc::new(Shared::new(run.clone(), members))))
    }

    /// The name of what carries the tensors of those who accept.
    pub(crate) fn backend(&self) -> &'static str {
        match self {
            Invitation::Threaded(_) => "threaded",
            Invitation::Nccl(..) => "nccl",
        }
    }

    /// Joins the group as its rank `rank`; returns once all members have.
    ///
    /// # Errors
    /// [`Error::Input`] for NCCL without a GPU, as the barrier, and NCCL's own.
    pub(crate) fn accept(
        self,
        rank: usize,
        local_rank: usize,
        device: Device,
    ) -> Result<ProcessGroup> {
        let (shared, backend): (_, Box<dyn Backend>) = match (self, device) {
            (Invitation::Threaded(shared), _) => {
                let backend = Threaded::join(shared.seat(rank))?;
                (shared, Box::new(backend))
            }
            (Invitation::Nccl(id, shared), Device::Cuda(gpu)) => {
                let backend = Nccl::join(shared.clone(), rank, gpu, id)?;
                (shared, Box::new(backend))
            }
            (Invitation::Nccl(..), _) => {
                return Err(Error::Input(
                    "backend nccl needs a GPU for each rank; use threaded for ranks on the CPU"
                        .into(),
                ));
            }
        };
        Ok(ProcessGroup::new(rank, local_rank, device, shared, backend))
    }
}
