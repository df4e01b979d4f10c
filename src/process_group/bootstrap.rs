//! What a rank needs to join a group, made by one of its members for all.

use std::sync::Arc;

use tch::Device;

use super::gloo::{Hierarchical, Network};
use super::nccl::{Nccl, UniqueId};
use super::threaded::{Shared, Threaded};
use super::{Backend, ProcessGroup};
use crate::error::{Error, Result};
use crate::runtime::RunContext;

/// An invitation to a group, for the ranks of this process.
#[derive(Debug, Clone)]
pub(crate) enum Bootstrap {
    /// The memory through which the ranks talk.
    Threaded(Arc<Shared>),
    /// NCCL's id of the communicator to join, and where its ranks in this process meet.
    Nccl(UniqueId, Arc<Shared>, Option<Arc<Network>>),
    /// The memory of this process, and the way to the others.
    Gloo(Arc<Shared>, Arc<Network>),
}

impl Bootstrap {
    /// To the ranks `members` of `run`, talking through shared memory.
    pub(crate) fn threaded(run: &Arc<RunContext>, members: Arc<[usize]>) -> Self {
        let here = 0..members.len();
        Bootstrap::Threaded(Arc::new(Shared::new(run.clone(), members, here)))
    }

    /// To the ranks `members` of `run`, all of this process, talking through NCCL.
    ///
    /// # Errors
    /// [`Error::Input`] without NCCL.
    pub(crate) fn nccl(run: &Arc<RunContext>, members: Arc<[usize]>) -> Result<Self> {
        let here = 0..members.len();
        let shared = Arc::new(Shared::new(run.clone(), members, here));
        Ok(Bootstrap::Nccl(UniqueId::new()?, shared, None))
    }

    /// To the ranks `members` of `run`, which are in several processes: over `network`, or through NCCL, the id for
    /// which the first process makes and the others get from the store.
    ///
    /// # Errors
    /// Those of the store, and [`Error::Input`] without NCCL.
    pub(crate) fn across(
        run: &Arc<RunContext>,
        members: Arc<[usize]>,
        network: Network,
        through_nccl: bool,
    ) -> Result<Self> {
        let shared = Arc::new(Shared::new(run.clone(), members, network.layout().here()));
        if !through_nccl {
            let network = network.with_messages_to(shared.mail())?;
            return Ok(Bootstrap::Gloo(shared, Arc::new(network)));
        }
        let network = Arc::new(network.without_messages());
        let makes_it = network.layout().mine == 0;
        let late =
            || run.not_come(shared.members()[shared.here().start], vec![shared.members()[0]]);
        let id = UniqueId::through(network.store(), "nccl", makes_it, run.timeout, late)?;
        Ok(Bootstrap::Nccl(id, shared, Some(network)))
    }

    /// The name of what carries the tensors of those who accept.
    pub(crate) fn backend(&self) -> &'static str {
        match self {
            Bootstrap::Threaded(_) => "threaded",
            Bootstrap::Nccl(..) => "nccl",
            Bootstrap::Gloo(..) => "gloo",
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
        let (shared, network, backend): (_, _, Box<dyn Backend>) = match (self, device) {
            (Bootstrap::Threaded(shared), _) => {
                let backend = Threaded::join(shared.seat(rank))?;
                (shared, None, Box::new(backend))
            }
            (Bootstrap::Nccl(id, shared, network), Device::Cuda(gpu)) => {
                let backend = Nccl::join(shared.clone(), network.clone(), rank, gpu, id)?;
                (shared, network, Box::new(backend))
            }
            (Bootstrap::Gloo(shared, network), Device::Cpu) => {
                let backend = Hierarchical::join(&shared, network.clone(), rank)?;
                (shared, Some(network), Box::new(backend))
            }
            (Bootstrap::Gloo(..), _) => {
                return Err(Error::Input(
                    "backend gloo is for ranks on the CPU; use nccl for GPUs of several processes"
                        .into(),
                ));
            }
            (Bootstrap::Nccl(..), _) => {
                return Err(Error::Input(
                    "backend nccl needs a GPU for each rank; use threaded for ranks on the CPU"
                        .into(),
                ));
            }
        };
        let group = ProcessGroup::new(rank, local_rank, device, shared, network, backend);
        group.start_gpu_clock()?;
        Ok(group)
    }
}
