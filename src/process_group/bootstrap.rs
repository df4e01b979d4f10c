//! The data that ranks need to join a group. One member makes it for all.

use std::sync::Arc;

use tch::Device;

use super::gloo::{Hierarchical, Network};
use super::nccl::{Nccl, UniqueId};
use super::threaded::{Shared, Threaded};
use super::{Backend, ProcessGroup};
use crate::error::{Error, Result};
use crate::runtime::RunContext;

/// The data to join a group, for the ranks of this process.
#[derive(Debug, Clone)]
pub(crate) enum Bootstrap {
    /// The memory that the ranks share.
    Threaded(Arc<Shared>),
    /// NCCL's id of the communicator, the memory that the ranks of this process share, and the network between
    /// processes, if any.
    Nccl(UniqueId, Arc<Shared>, Option<Arc<Network>>),
    /// The memory that the ranks of this process share, and the network to the other processes.
    Gloo(Arc<Shared>, Arc<Network>),
}

impl Bootstrap {
    /// Returns the bootstrap of a `threaded` group of the ranks `members` of `run`.
    pub(crate) fn threaded(run: &Arc<RunContext>, members: Arc<[usize]>) -> Self {
        let here = 0..members.len();
        Bootstrap::Threaded(Arc::new(Shared::new(run.clone(), members, here)))
    }

    /// Returns the bootstrap of an `nccl` group of the ranks `members` of `run`, all in this process.
    ///
    /// # Errors
    /// [`Error::Input`] without NCCL.
    pub(crate) fn nccl(run: &Arc<RunContext>, members: Arc<[usize]>) -> Result<Self> {
        let here = 0..members.len();
        let shared = Arc::new(Shared::new(run.clone(), members, here));
        Ok(Bootstrap::Nccl(UniqueId::new()?, shared, None))
    }

    /// Returns the bootstrap of a group of the ranks `members` of `run` in several processes. The group uses Gloo
    /// over `network`, or NCCL with `through_nccl`. The first process makes NCCL's id, and the others get it from
    /// the store.
    ///
    /// # Errors
    /// The errors of the store, and [`Error::Input`] without NCCL.
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

    /// Returns the name of the group's backend.
    pub(crate) fn backend(&self) -> &'static str {
        match self {
            Bootstrap::Threaded(_) => "threaded",
            Bootstrap::Nccl(..) => "nccl",
            Bootstrap::Gloo(..) => "gloo",
        }
    }

    /// Joins the group as rank `rank`. Returns once all members have joined.
    ///
    /// # Errors
    /// [`Error::Input`] if the backend does not support `device`, the errors of the barrier, and NCCL's own.
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
