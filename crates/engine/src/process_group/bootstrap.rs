//! The data that ranks need to join a group. One rank of each process makes it for all ranks of the process.

use std::sync::Arc;

use super::backend::{Join, SequencedBackend};
use super::local::{OncePerProcess, Shared};
use super::network::Network;
use super::{Backend, ProcessGroup, RankIdentity};
use crate::error::Result;
use crate::runtime::RunContext;

/// The data to join a group, for the ranks of this process.
#[derive(Clone)]
pub(crate) struct Bootstrap {
    pub(crate) backend: Backend,
    pub(super) shared: Arc<Shared>,
    /// The network to the other processes. `None` for a group within this process.
    pub(super) network: Option<Arc<Network>>,
    /// The bootstraps of this group's sub-groups, by the sequence numbers of their `new_group`.
    pub(super) sub_groups: Arc<OncePerProcess<u64, Bootstrap>>,
    join: Join,
}

impl Bootstrap {
    /// Creates the bootstrap of a group of the ranks `members` of `run`, all in this process.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if `backend` is for several processes only, or needs a library
    /// that is missing.
    pub(crate) fn within_process(
        backend: Backend,
        run: &Arc<RunContext>,
        members: Arc<[usize]>,
    ) -> Result<Self> {
        backend.check_within_process()?;
        let here = 0..members.len();
        Self::new(backend, Shared::new(run.clone(), members, here), None)
    }

    /// Creates the bootstrap of a group of the ranks `members` of `run`, in several processes. `connect` connects this
    /// process to the others.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if `backend` is for one process only, or needs a library that is
    /// missing; the errors of `connect` and of the store.
    pub(crate) fn between_processes(
        backend: Backend,
        run: &Arc<RunContext>,
        members: Arc<[usize]>,
        connect: impl FnOnce(Arc<[usize]>) -> Result<Network>,
    ) -> Result<Self> {
        backend.check_between_processes()?;
        let network = connect(members.clone())?;
        let shared = Shared::new(run.clone(), members, network.processes.here());
        let network = if backend.entry().is_stream_ordered {
            network.without_messages()
        } else {
            network.with_messages_to(&shared.mail)?
        };
        Self::new(backend, shared, Some(Arc::new(network)))
    }

    fn new(backend: Backend, shared: Shared, network: Option<Arc<Network>>) -> Result<Self> {
        let shared = Arc::new(shared);
        let join = (backend.entry().prepare)(&shared, network.as_ref())?;
        Ok(Self { backend, shared, network, sub_groups: Arc::default(), join })
    }

    /// Joins the group as `rank`. Returns once all members have joined.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) if the backend does not support the device, the errors of the
    /// barrier, and NCCL's own.
    pub(crate) fn join(self, rank: RankIdentity) -> Result<ProcessGroup> {
        let rank_backend = (self.join)(rank.rank, rank.device)?;
        let group = ProcessGroup::new(rank, self);
        group.attach(SequencedBackend { sequence: 0, backend: rank_backend });
        group.start_gpu_clock()?;
        Ok(group)
    }
}
