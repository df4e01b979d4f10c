//! The argument of a rank function: the rank's number, its device, and access to the process group.

use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use tch::Device;

use super::JoinedLaunch;
use crate::error::{Error, Result};
use crate::events::Observers;
use crate::operation::Operation;
use crate::process_group::{Backend, Bootstrap, OncePerProcess, ProcessGroup, RankIdentity};
use crate::runtime::RunContext;

/// What the ranks of a process need to join the group of all ranks: the first to ask for it makes it for all. With the rank
/// that has made it.
pub(super) type SharedBootstrap = OncePerProcess<(), (usize, Bootstrap)>;

/// One rank, as its function sees it: its index, its device, and access to the process group.
///
/// [`spawn`](super::spawn) passes it to the function by reference. It stays on the rank's thread.
///
/// | torchrun sets | here |
/// |---|---|
/// | `RANK`, `WORLD_SIZE` | [`rank`](Self::rank), [`world_size`](Self::world_size) |
/// | `LOCAL_RANK` | [`local_rank`](Self::local_rank); [`device`](Self::device) is chosen already |
/// | `GROUP_RANK`, `GROUP_WORLD_SIZE` | [`node_rank`](Self::node_rank), [`nnodes`](Self::nnodes) |
pub struct Rank {
    identity: RankIdentity,
    joined_launch: Arc<JoinedLaunch>,
    run: Arc<RunContext>,
    observers: Observers,
    /// Taken by the first `init_process_group`.
    bootstrap: RefCell<Option<Arc<SharedBootstrap>>>,
    /// Kept here too, so that the group outlives the rank function: a rank that fails must first report the failure
    /// and then shut the group down.
    group: OnceCell<Rc<ProcessGroup>>,
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rank")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("device", &self.device())
            .finish_non_exhaustive()
    }
}

impl Rank {
    /// Creates the rank with this index among those of its process.
    pub(super) fn new(
        index: usize,
        joined_launch: Arc<JoinedLaunch>,
        run: Arc<RunContext>,
        observers: Observers,
        bootstrap: Arc<SharedBootstrap>,
    ) -> Self {
        let identity = joined_launch.identity(index);
        let bootstrap = RefCell::new(Some(bootstrap));
        Self { identity, joined_launch, run, observers, bootstrap, group: OnceCell::new() }
    }

    /// Returns who is told what happens in the run: the observers of [`Spawn::observe`](super::Spawn::observe).
    pub fn observers(&self) -> &Observers {
        &self.observers
    }

    /// Returns this rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.identity.rank
    }

    /// Returns this rank's number on its machine, from 0.
    pub fn local_rank(&self) -> usize {
        self.identity.local_rank
    }

    /// Returns how many ranks there are, in all processes.
    pub fn world_size(&self) -> usize {
        self.run.activity.len()
    }

    /// Returns the index of this rank's machine, from 0: torchrun's `GROUP_RANK`.
    pub fn node_rank(&self) -> usize {
        self.joined_launch.node_rank()
    }

    /// Returns how many machines there are.
    pub fn nnodes(&self) -> usize {
        self.joined_launch.nnodes()
    }

    /// Returns whether this is rank 0, which prints and writes files for all.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Returns this rank's device. If it is a GPU, it is the thread's current device already.
    pub fn device(&self) -> Device {
        self.identity.device
    }

    /// Returns the backend that suits the ranks. `nccl` if each has a GPU of its own, `gloo` for CPU ranks in
    /// several processes. `threaded` for CPU ranks of one process and for ranks that share a GPU.
    pub fn backend(&self) -> Backend {
        self.joined_launch.placement.backend
    }

    /// Joins the other ranks in a process group. Every rank must call it, once. Use [`Rank::backend`] unless you
    /// want another one.
    ///
    /// Follows `torch.distributed.init_process_group`, without an address: the first rank of a process that comes makes
    /// what all need. Several processes have already connected through a store.
    ///
    /// # Errors
    /// [`Error::Input`] when called twice, with a backend that the device does not allow, or when NCCL is
    /// missing; [`Error::Timeout`], [`Error::PeerExited`] and [`Error::Cancelled`] when other ranks do not arrive.
    pub fn init_process_group(&self, backend: Backend) -> Result<Rc<ProcessGroup>> {
        let Some(shared) = self.bootstrap.take() else {
            return Err(Error::usage(
                "init_process_group was called twice on this rank; keep the group it returned"
                    .into(),
            ));
        };
        let (run, rank) = (&self.run, self.rank());
        let activity = &run.activity[rank];
        let before = activity.enter(Operation::Rendezvous, 0);
        run.fault_point(rank, Operation::Rendezvous, 0)?;
        let ranks_here = self.joined_launch.ranks_here().len();
        let (maker, bootstrap) = shared.fetch((), ranks_here, run, rank, || {
            let bootstrap = self.joined_launch.bootstrap(run, backend);
            // A store request that was cancelled because the run failed is not a failure of its own.
            let bootstrap = bootstrap.or_else(|error| run.check(rank).and(Err(error)));
            bootstrap.map(|bootstrap| (rank, bootstrap))
        })?;
        if bootstrap.backend != backend {
            return Err(Error::mismatch(format!(
                "init_process_group: rank {maker} asks for backend {}, rank {rank} for {}; ask for the same",
                bootstrap.backend.name(),
                backend.name()
            )));
        }

        activity.enter(Operation::Init, 0);
        run.fault_point(rank, Operation::Init, 0)?;
        let group = bootstrap.join(self.identity.clone())?;
        activity.restore(before);
        Ok(self.group.get_or_init(|| Rc::new(group)).clone())
    }

    /// Shuts down the process group, after this rank's end has been reported to all.
    pub(super) fn shut_down(&self) {
        if let Some(group) = self.group.get() {
            group.shut_down();
        }
    }
}
