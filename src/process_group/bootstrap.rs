//! The data that ranks need to join a group. One rank of each process makes it for all ranks of the process.

use std::fmt;
use std::sync::Arc;

use tch::Device;

use super::ProcessGroup;
use super::backend::{BackendType, Join, SequencedBackend};
use super::backends::backend_named;
use super::local::{OncePerProcess, Shared};
use super::network::Network;
use crate::error::{Error, Result};
use crate::runtime::RunContext;

/// The data to join a group, for the ranks of this process.
#[derive(Clone)]
pub(crate) struct Bootstrap {
    pub(super) backend: &'static BackendType,
    pub(super) shared: Arc<Shared>,
    /// The network to the other processes. `None` for a group within this process.
    pub(super) network: Option<Arc<Network>>,
    /// The bootstraps of this group's sub-groups, by the sequence numbers of their `new_group`.
    pub(super) sub_groups: Arc<OncePerProcess<u64, Bootstrap>>,
    join: Join,
}

impl Bootstrap {
    /// Returns the bootstrap of a group of the ranks `members` of `run`. Without a `network`, all of them are in this
    /// process.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if `backend` needs a library that is missing, [`Error::Unsupported`] if it cannot
    /// connect processes, and the errors of the store.
    pub(crate) fn new(
        backend: &str,
        run: &Arc<RunContext>,
        members: Arc<[usize]>,
        network: Option<Network>,
    ) -> Result<Self> {
        let backend = backend_named(backend, network.is_none())?;
        if network.is_some() && !backend.needs_network && !backend.is_stream_ordered {
            return Err(Error::Unsupported(format!(
                "backend {} is for the ranks of one process; use gloo for several",
                backend.name
            )));
        }
        let here = network.as_ref().map_or(0..members.len(), |network| network.layout().here());
        let shared = Arc::new(Shared::new(run.clone(), members, here));
        let network = match network {
            Some(network) if backend.is_stream_ordered => Some(network.without_messages()),
            Some(network) => Some(network.with_messages_to(shared.mail())?),
            None => None,
        };
        let network = network.map(Arc::new);
        let join = (backend.prepare)(&shared, network.as_ref())?;
        Ok(Self { backend, shared, network, sub_groups: Arc::default(), join })
    }

    /// Returns the name of the group's backend.
    pub(crate) fn backend(&self) -> &'static str {
        self.backend.name
    }

    /// Joins the group as rank `rank`. Returns once all members have joined.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the backend does not support `device`, the errors of the barrier, and
    /// NCCL's own.
    pub(crate) fn join(
        self,
        rank: usize,
        local_rank: usize,
        device: Device,
    ) -> Result<ProcessGroup> {
        let backend = (self.join)(rank, device)?;
        let Self { backend: backend_type, shared, network, sub_groups, .. } = self;
        let place = (rank, local_rank, device);
        let group = ProcessGroup::new(place, backend_type, shared, network, sub_groups);
        group.attach(SequencedBackend { sequence: 0, backend });
        group.start_gpu_clock()?;
        Ok(group)
    }
}

impl fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bootstrap")
            .field("backend", &self.backend.name)
            .field("members", self.shared.members())
            .finish_non_exhaustive()
    }
}
