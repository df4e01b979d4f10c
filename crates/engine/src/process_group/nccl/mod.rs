//! The `nccl` backend: ranks on GPUs, NCCL between them, loaded at run time through `cudarc`. A rank has a GPU of its own,
//! or shares it where [`library::check_shared_gpu`] allows that.
//!
//! NCCL with ranks as threads of one process needs more care than with a process for each rank. These rules follow from it:
//!
//! * Every launch stands between two barriers of the local ranks. Otherwise one rank's kernel may already wait while
//!   another rank is in a driver call that waits for all GPUs to become idle.
//! * The communicator is non-blocking: every call may return "in progress" and is then polled, which makes it
//!   cancellable and gives it a deadline.
//! * Each rank ends its own communicator ([`communicator`]). NCCL frees them when the last rank has.
//! * The host waits for the GPU only by polling an event ([`RankBackend::synchronize`]): a kernel whose peer has failed
//!   never ends by itself. Where a rank's thread blocks in libtorch all the same, the watchdog polls, and after a
//!   failure it aborts the communicator, which frees the thread ([`launched`]).
//!
//! The members of a sub-group, and the two ranks of a message, have barriers of their own, so the first rule holds for
//! them only. During their calls no other rank of the process may allocate or free GPU memory. A lock of the process would
//! not help: two processes that launch in two groups could each hold their own and wait for the other's. All ranks wait
//! while a sub-group connects, which allocates most ([`new_group`](super::ProcessGroup::new_group)).
//!
//! Collectives go to the current stream of the rank, so nothing else orders them. Ranks that share a GPU have streams of
//! their own: on a common one, a rank's kernel would wait for another that is behind it.

mod communicator;
mod launch;
mod launched;
mod library;

use std::collections::BTreeMap;
use std::sync::Arc;

use cudarc::nccl::sys::ncclResult_t;
use tch::{Device, Kind, Tensor};

use super::backend::{BackendType, Devices, Join, RankBackend, Reach};
use super::call::Call;
use super::local::{CallSlot, OncePerProcess, Shared};
use super::network::Network;
use super::{P2POp, Traffic};
use crate::error::{Error, Result};
use crate::ffi::{TorchResult, cuda};
use crate::operation::Operation;
use crate::os::limits::not_started;
use communicator::{Communicator, UniqueId, end_all};
use launched::LaunchedOps;
use library::check;
pub use library::{NcclLibrary, find, host_id};

pub(super) const BACKEND: BackendType = BackendType {
    name: "nccl",
    devices: Devices::OwnGpu,
    reach: Reach::Both,
    is_stream_ordered: true,
    check_library: library::check_library,
    check_shared_gpu: library::check_shared_gpu,
    reduces_in_place: false,
    check_reduction: |operation, op, kind| launch::reduction(operation, op, kind).map(drop),
    prepare,
};

/// The ids of communicators of two ranks of this process, by their group ranks, with the state that the two share.
type Pairs = OncePerProcess<(usize, usize), (UniqueId, Arc<Shared>)>;

/// Makes the id of the group's communicator. With several processes, the first makes it, and the others get it from the
/// store.
fn prepare(shared: &Arc<Shared>, network: Option<&Arc<Network>>) -> Result<Join> {
    let id = match network {
        Some(network) => {
            let (run, members) = (&shared.run, &shared.members);
            let makes_it = network.map.mine == 0;
            let late = || run.timeout_error(members[shared.here.start], vec![members[0]]);
            UniqueId::through(&network.store, "nccl", makes_it, run.timeout, late)?
        }
        None => UniqueId::new()?,
    };
    let (shared, network, pairs) = (shared.clone(), network.cloned(), Arc::<Pairs>::default());
    Ok(Arc::new(move |rank, device| match device {
        Device::Cuda(gpu) => {
            let (shared, network, pairs) = (shared.clone(), network.clone(), pairs.clone());
            Ok(Box::new(NcclBackend::join(shared, network, pairs, rank, gpu, id)?))
        }
        _ => Err(Error::unsupported(
            "backend nccl needs a GPU for each rank; use threaded for ranks on the CPU".into(),
        )),
    }))
}

/// One rank's side of the backend.
struct NcclBackend {
    launched: Arc<LaunchedOps>,
    rank: usize,
    gpu: usize,
    shared: Arc<Shared>,
    /// The connection to other processes, if there are any.
    network: Option<Arc<Network>>,
    /// The slot in the exchange of this process's ranks around every launch.
    slot: CallSlot,
    /// `true` if the ranks compare their calls (`--check-collectives`).
    check: bool,
    done: cuda::CudaEvent,
    /// The tensor that `barrier` reduces. Allocated once: allocating may stop all GPUs.
    token: Tensor,
    /// Communicators of two ranks, for messages: a launch in the group's communicator needs all its ranks.
    pairs: BTreeMap<usize, NcclBackend>,
    /// The ids of those communicators whose two ranks are in this process.
    local_pairs: Arc<Pairs>,
}

/// Returns the store key that a rank sets when it joins.
fn joins(rank: usize) -> String {
    format!("nccl/joins/{rank}")
}

impl NcclBackend {
    /// Joins the communicator `id` as group rank `rank`. Returns once all ranks have joined.
    ///
    /// The calling thread's current device must be `gpu`.
    fn join(
        shared: Arc<Shared>,
        network: Option<Arc<Network>>,
        local_pairs: Arc<Pairs>,
        rank: usize,
        gpu: usize,
        id: UniqueId,
    ) -> Result<Self> {
        let token = Tensor::f_zeros([1], (Kind::Float, Device::Cuda(gpu)))
            .doing("allocating on the GPU")?;
        let communicator = Communicator::new(shared.run.clone());
        let members = &shared.members;
        let launched = LaunchedOps::new(members[rank], gpu, members.clone(), communicator);
        let mut nccl = Self {
            launched: Arc::new(launched),
            rank,
            gpu,
            slot: shared.slot(rank),
            check: shared.run.check_collectives,
            shared,
            network,
            done: cuda::CudaEvent::new()?,
            token,
            pairs: BTreeMap::new(),
            local_pairs,
        };
        if let Some(network) = &nccl.network {
            network.store.set(&joins(rank), b"")?;
        }
        let size = nccl.shared.members.len();
        nccl.with_launch_barrier(&Call::bare(Operation::Init), "ncclCommInitRankConfig", |comm| {
            comm.join(id, size, rank)
        })?;
        if size > 1 {
            let run = &nccl.shared.run;
            let started = run.watch(&nccl.launched);
            started.map_err(|error| {
                Error::unsupported(not_started("the watchdog, a thread,", &error))
            })?;
        }
        Ok(nccl)
    }

    /// Runs one NCCL call between two barriers of the local ranks, and polls until the call is done.
    fn with_launch_barrier(
        &mut self,
        call: &Call,
        name: &'static str,
        launch: impl FnOnce(&mut Communicator) -> ncclResult_t,
    ) -> Result<()> {
        self.exchange_local(call)?;
        let result = {
            let mut launched = self.launched.state.lock();
            self.slot.check()?; // the watchdog may have taken the communicator
            launch(&mut launched.communicator)
        };
        let launched = self.poll_until_ready(name, result);
        self.slot.report_failure(launched)?;
        self.slot.barrier().wait(self.slot.rank(), call.at())?;
        let waits_for_others = call.operation != Operation::Init && self.shared.members.len() > 1;
        if waits_for_others {
            self.slot.report_failure(self.launched.note(call.at()))
        } else {
            Ok(())
        }
    }

    /// Leaves the communicators, those for messages first.
    fn leave(&mut self) {
        self.pairs.clear();
        let none = Communicator::new(self.shared.run.clone());
        self.launched.take(none).leave();
    }

    /// Returns the communicator for messages with `peer`. The two ranks make it together, at the first message.
    fn pair(&mut self, peer: usize) -> Result<&mut NcclBackend> {
        if !self.pairs.contains_key(&peer) {
            let (low, high) = (self.rank.min(peer), self.rank.max(peer));
            let (index, run) = (usize::from(self.rank == high), &self.shared.run);
            let members = [low, high].map(|rank| self.shared.members[rank]);
            let share = |here| Arc::new(Shared::new(run.clone(), Arc::new(members), here));
            let elsewhere = self.network.as_ref().filter(|_| !self.shared.here.contains(&peer));
            let (id, shared) = match elsewhere {
                Some(network) => {
                    let key = format!("nccl/{low}-{high}");
                    let late = || run.timeout_error(members[1], vec![members[0]]);
                    let (store, makes_it) = (&network.store, index == 0);
                    let id = UniqueId::through(store, &key, makes_it, run.timeout, late)?;
                    (id, share(index..index + 1))
                }
                None => {
                    let make = || Ok((UniqueId::new()?, share(0..2)));
                    self.local_pairs.fetch((low, high), 2, run, members[index], make)?
                }
            };
            let pair = NcclBackend::join(shared, None, Arc::default(), index, self.gpu, id)?;
            self.pairs.insert(peer, pair);
        }
        self.pairs.get_mut(&peer).ok_or_else(|| {
            Error::unsupported(format!("ranks {} and {peer} have no communicator", self.rank))
        })
    }

    /// Polls until a call that returned "in progress" is done.
    fn poll_until_ready(&self, call: &'static str, result: ncclResult_t) -> Result<()> {
        check(call, result)?;
        self.poll(|| match self.launched.state.lock().communicator.state() {
            ncclResult_t::ncclInProgress => Ok(false),
            state => check(call, state).map(|()| true),
        })
    }

    fn poll(&self, is_done: impl Fn() -> Result<bool>) -> Result<()> {
        let (run, rank) = (&self.shared.run, self.slot.global_rank());
        run.poll(rank, is_done).map_err(|error| {
            let is_late = matches!(error, Error::Timeout { .. });
            let missing = if is_late { self.not_joined() } else { Vec::new() };
            if missing.is_empty() { error } else { run.timeout_error(rank, missing) }
        })
    }

    /// Returns the ranks of other processes that have not joined this group. The other ranks wait for them inside NCCL,
    /// which does not name them.
    fn not_joined(&self) -> Vec<usize> {
        let Some(network) = &self.network else { return Vec::new() };
        let has_come = |rank: &usize| network.store.check(&joins(*rank)).unwrap_or(true);
        let members = &self.shared.members;
        let missing = (0..members.len()).filter(|rank| !has_come(rank));
        missing.map(|rank| members[rank]).collect()
    }
}

impl RankBackend for NcclBackend {
    fn run(&mut self, call: &Call) -> Result<()> {
        self.launch(call)
    }

    fn point_to_point(&mut self, ops: &[P2POp]) -> Result<()> {
        // Peer by peer, in rank order. All ranks do so, so no ring of ranks can form in which each waits for the next.
        let mut peers: Vec<usize> = ops.iter().filter_map(|op| op.peer).collect();
        peers.sort_unstable();
        peers.dedup();
        for peer in peers {
            let messages: Vec<&P2POp> = ops.iter().filter(|op| op.peer == Some(peer)).collect();
            self.pair(peer)?.exchange(&messages)?;
        }
        Ok(())
    }

    fn traffic(&self, call: &Call) -> Traffic {
        launch::traffic(call, self.rank, self.shared.members.len())
    }

    fn synchronize(&mut self, meanwhile: &dyn Fn()) -> Result<()> {
        let waited = self.done.record(self.gpu).and_then(|()| {
            self.poll(|| {
                meanwhile();
                for nccl in std::iter::once(self as &Self).chain(self.pairs.values()) {
                    nccl.launched.state.lock().communicator.check("a collective")?;
                }
                self.done.is_done()
            })
        });
        self.slot.report_failure(waited)
    }

    fn shut_down(&mut self) {
        self.leave();
        end_all(&self.shared.run, self.slot.global_rank());
    }
}

impl Drop for NcclBackend {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_id_must_have_128_bytes() {
        UniqueId::from_bytes("some/key", &[0xff; 128]).unwrap();
        let refused = UniqueId::from_bytes("some/key", &[0; 127]).unwrap_err();
        assert!(
            refused
                .starts_with("store key \"some/key\" holds 127 bytes instead of the 128 of an id"),
            "{refused}"
        );
    }

    #[test]
    fn missing_libnccl_is_an_error_and_no_panic() {
        match UniqueId::new() {
            Ok(_) => println!("NCCL is installed here: nothing to see"),
            Err(error) => assert!(error.to_string().contains("libnccl was not found"), "{error}"),
        }
    }
}
