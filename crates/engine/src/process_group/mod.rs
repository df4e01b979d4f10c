//! The process group: communication between ranks, over one of several backends.
//!
//! "Process group" is c10d's term; here the members are threads, of one process or several. A rank gets its group
//! from [`Rank::init_process_group`](crate::launch::Rank::init_process_group).

mod arguments;
mod asynchronous;
mod backend;
mod backends;
mod bootstrap;
pub mod c10d;
mod call;
mod collectives;
mod comm_thread;
mod contiguous;
mod dispatch;
mod dtype;
pub mod functional;
mod gloo;
mod gpu_clock;
mod group;
mod in_place;
mod instrumentation;
mod local;
mod nccl;
mod network;
mod objects;
mod point_to_point;
mod reduce_op;
mod simulated_network;
mod threaded;
mod traffic;
mod work;

use std::cell::{Cell, OnceCell, RefCell, RefMut};
use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use crossbeam::channel::{Receiver, select_biased};
use tch::{Device, Kind, Tensor};

pub use backend::Devices;
use backend::SequencedBackend;
pub use backends::Backend;
pub(crate) use bootstrap::Bootstrap;
use comm_thread::CommunicationThread;
pub(crate) use dtype::SAFETENSORS_DTYPES;
pub use dtype::num_bytes;
pub use dtype::{DTYPES, dtype_name, parse_dtype};
use gpu_clock::GpuClock;
pub use gpu_clock::GpuSeconds;
pub(crate) use in_place::join_shapes;
pub(crate) use instrumentation::CallContext;
use instrumentation::PhaseTracker;
pub(crate) use local::{Host, InMemory, OncePerProcess};
pub use nccl::NcclLibrary;
pub use nccl::{find as find_nccl, host_id as nccl_host_id};
pub(crate) use network::{Network, ProcessMap};
pub use point_to_point::P2POp;
pub use reduce_op::ReduceOp;
pub use traffic::Traffic;
use traffic::TrafficCounter;
pub use work::Work;

use crate::error::{Error, Result};
use crate::ffi::{TorchResult, cuda};
use crate::operation::Operation;
pub use crate::runtime::SimulatedCluster;
use crate::runtime::{Activity, LossRecord, RunContext, StopRequest};

/// One rank's membership in a group of ranks.
///
/// Bound to its rank's thread. Every method is a *collective* unless it says otherwise: all ranks of the group must
/// call it, in the same order, with tensors of the same dtype and shape. With `threaded` and `gloo`, a difference is an
/// error on every rank; the error lists each rank's call.
///
/// Follows `torch.distributed`: its functions are methods here. There is no default group; pass the group on.
/// [`ProcessGroup::async_op`] replaces `async_op=True`.
///
/// Start with [`all_reduce`](Self::all_reduce), [`all_gather_object`](Self::all_gather_object),
/// [`send`](Self::send) and [`new_group`](Self::new_group). A group stays on its rank's thread, and so does every
/// [`Work`]:
///
/// ```compile_fail
/// # use ddp_mp_engine as ddp_mp;
/// fn goes_elsewhere(_: impl Send) {}
/// fn try_it(group: ddp_mp::ProcessGroup) {
///     goes_elsewhere(group); // only the rank's own thread is woken when another rank fails
/// }
/// ```
pub struct ProcessGroup {
    identity: RankIdentity,
    /// What the ranks of this process have in common.
    common: Bootstrap,
    /// This rank's side. `None` while the communication thread has it.
    sequenced: RefCell<Option<SequencedBackend>>,
    communication: OnceCell<CommunicationThread>,
    /// The activity of a communication thread. `None` on the rank's own thread: its activity is in the run.
    own_activity: Option<Activity>,
    phase_tracker: PhaseTracker,
    /// `None` if the rank has no GPU.
    gpu_clock: RefCell<Option<GpuClock>>,
    /// The number of messages that this rank has started to send or receive.
    messages: Cell<u64>,
    traffic: Arc<TrafficCounter>,
    _not_send: PhantomData<Rc<()>>,
}

/// Which rank this is, and where it runs.
#[derive(Debug, Clone)]
pub(crate) struct RankIdentity {
    /// The rank's number in the group.
    pub rank: usize,
    /// The rank's number on its machine.
    pub local_rank: usize,
    pub device: Device,
    /// The label of its device, for the user, such as `GPU:1`.
    pub label: Arc<str>,
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("device", &self.device())
            .field("backend", &self.common.backend.name())
            .finish_non_exhaustive()
    }
}

impl ProcessGroup {
    /// Creates the membership, without the rank's side of the backend.
    fn new(identity: RankIdentity, common: Bootstrap) -> Self {
        Self {
            identity,
            common,
            sequenced: RefCell::new(None),
            communication: OnceCell::new(),
            own_activity: None,
            phase_tracker: PhaseTracker::default(),
            gpu_clock: RefCell::default(),
            messages: Cell::new(0),
            traffic: Arc::default(),
            _not_send: PhantomData,
        }
    }

    /// Returns this rank's number in the group, from 0. Not a collective.
    pub fn rank(&self) -> usize {
        self.identity.rank
    }

    /// Returns this rank's number on its machine, from 0. Not a collective.
    pub fn local_rank(&self) -> usize {
        self.identity.local_rank
    }

    /// Returns the number of ranks in the group. Not a collective.
    pub fn world_size(&self) -> usize {
        self.ranks().len()
    }

    /// Returns the device of this rank's tensors. Not a collective.
    pub fn device(&self) -> Device {
        self.identity.device
    }

    /// Returns the label of this rank's device, for the user, such as `GPU:1`. Not a collective.
    pub(crate) fn label(&self) -> &str {
        &self.identity.label
    }

    /// Returns the backend's name, such as `threaded`. Not a collective.
    pub fn backend(&self) -> &'static str {
        self.common.backend.name()
    }

    /// Returns whether collectives run on a GPU stream, in its order, and not while the rank waits.
    #[doc(hidden)]
    pub fn is_stream_ordered(&self) -> bool {
        self.common.backend.entry().is_stream_ordered
    }

    /// Returns the number of bytes that this rank has sent and received in this group so far. Not a collective.
    ///
    /// Asynchronous operations count when they are over, messages when they are started.
    pub fn traffic(&self) -> Traffic {
        self.traffic.total()
    }

    /// Waits until no operation that this rank has launched on its device waits for another rank. Not a collective.
    ///
    /// With `nccl`, everything launched is done then; `threaded` launches nothing that waits. Call this before you
    /// read a result on the host (`double_value`, a copy to the CPU) or copy something to the GPU. If another rank fails,
    /// this returns an error at once, but a copy that blocks in libtorch does not see it. A watchdog then reports the
    /// collective that failed or exceeded the timeout, and a second later aborts what the blocked rank waits for. A rank
    /// that has still not come back after the grace period is left behind.
    ///
    /// # Errors
    /// [`Error::Cancelled`], [`Error::Timeout`], and the backend's own errors.
    pub fn synchronize(&self) -> Result<()> {
        let mut side = self.side()?;
        let before = self.activity().enter(Operation::Synchronize, side.sequence);
        side.backend.synchronize(&|| self.note_gpu())?;
        self.activity().restore(before);
        Ok(())
    }

    /// Copies `tensor` to this rank's device, once all launched work is done. The copy blocks in libtorch until all that
    /// was launched before it has ended, and no failure of another rank would end that wait.
    #[doc(hidden)]
    pub fn to_device(&self, tensor: &Tensor) -> Result<Tensor> {
        self.await_launched()?;
        tensor.f_to_device(self.device()).doing("copying to the device")
    }

    /// Copies `tensor` to the host, once all launched work is done.
    #[doc(hidden)]
    pub fn to_host(&self, tensor: &Tensor) -> Result<Tensor> {
        self.await_launched()?;
        tensor.f_to_device(Device::Cpu).doing("copying to the host")
    }

    /// With `nccl`, waits for the launched work. With other backends, a call that has returned is done, and queued
    /// operations need no wait.
    #[doc(hidden)]
    pub fn await_launched(&self) -> Result<()> {
        if self.is_stream_ordered() { self.synchronize() } else { Ok(()) }
    }

    /// Returns whether the group has ranks in other processes. Not a collective.
    pub fn spans_processes(&self) -> bool {
        self.common.shared.here.len() < self.world_size()
    }

    /// Returns how the processes of a CPU group exchange tensors: shared memory, TCP, or both. `None` for other groups.
    #[doc(hidden)]
    pub fn transport(&self) -> Option<&'static str> {
        let network = self.common.network.as_ref().filter(|_| !self.is_stream_ordered())?;
        Some(match (network.on_host(), network.map.len()) {
            (Some(_), 1) => "shared memory",
            (Some(_), _) => "shared memory and TCP",
            (None, _) => "TCP",
        })
    }

    /// Returns whether tensors cross a network, or a simulated one, and not only memory that the ranks share.
    #[doc(hidden)]
    pub fn uses_network(&self) -> bool {
        let network = self.common.network.as_ref();
        network.is_some_and(|network| network.map.len() > 1) || self.simulated_cluster().is_some()
    }

    /// Returns the host of this rank, if it shares its memory with ranks of other processes.
    fn host(&self) -> Option<&Arc<Host>> {
        let network = self.common.network.as_ref()?;
        network.on_host().map(|group| group.host())
    }

    /// Returns zeros on the rank's device, in memory from which collectives copy nothing.
    pub(crate) fn zeros_for_collectives(&self, numel: usize, kind: Kind) -> Result<Tensor> {
        match self.host() {
            Some(host) => host.zeros(numel, kind),
            None => Tensor::f_zeros([numel as i64], (kind, self.device())).doing("zeros"),
        }
    }

    /// Returns where the losses of `rank` are recorded: by itself if it shares memory with this rank, and otherwise by this
    /// process, if it receives what that rank sends.
    ///
    /// # Errors
    /// [`Error::Input`] if a process of the host has written invalid offsets.
    pub(crate) fn loss_record(&self, rank: usize) -> Result<InMemory<LossRecord>> {
        match &self.common.network {
            Some(network) => network.loss_record(rank),
            None => Ok(InMemory::of(self.run().loss_records[self.ranks()[rank]].clone())),
        }
    }

    /// Returns the number of the group's ranks in this process. Not a collective.
    pub fn local_world_size(&self) -> usize {
        self.common.shared.here.len()
    }

    /// Makes all processes stop after the same step: from now on, their exchanges include rank 0's decision to
    /// stop. All ranks must call this.
    pub(crate) fn share_stop(&self, stop: &Arc<StopRequest>) {
        if let Some(network) = &self.common.network {
            network.share_stop(stop);
        }
    }

    pub(crate) fn shut_down(&self) {
        if let Some(side) = &mut *self.sequenced.borrow_mut() {
            side.backend.shut_down();
        }
    }

    /// Waits for a value on `channel`. `None` if all senders are gone.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if another rank fails during the wait.
    pub(crate) fn receive<T>(&self, channel: &Receiver<T>) -> Result<Option<T>> {
        let run = self.run();
        select_biased! {
            recv(channel) -> received => Ok(received.ok()),
            recv(run.cancel.tripped()) -> _ => {
                run.check(self.global_rank())?;
                Ok(None)
            }
        }
    }

    /// Waits until the device has passed `mark`. [`Error::Cancelled`] and [`Error::Timeout`] end the wait early.
    pub(crate) fn wait_for_device(&self, mark: &cuda::CudaEvent) -> Result<()> {
        self.run().poll(self.global_rank(), || mark.is_done())
    }

    /// Returns the run that this rank belongs to.
    pub(crate) fn run(&self) -> &Arc<RunContext> {
        &self.common.shared.run
    }

    /// Returns this rank's number in the run.
    pub(crate) fn global_rank(&self) -> usize {
        self.ranks()[self.rank()]
    }

    fn activity(&self) -> &Activity {
        self.own_activity.as_ref().unwrap_or(&self.run().activity[self.global_rank()])
    }

    /// Returns the number of collectives that this rank has called.
    fn sequence(&self) -> Result<u64> {
        Ok(self.side()?.sequence)
    }

    /// Returns this rank's side of the group. If the communication thread has it, waits until that thread is done.
    fn side(&self) -> Result<RefMut<'_, SequencedBackend>> {
        let mut side = self.sequenced.borrow_mut();
        if side.is_none() {
            *side = self.communication.get().and_then(CommunicationThread::give_back);
        }
        RefMut::filter_map(side, Option::as_mut).map_err(|_| {
            Error::unsupported("the group is gone with its communication thread".into())
        })
    }

    fn attach(&self, side: SequencedBackend) {
        *self.sequenced.borrow_mut() = Some(side);
    }

    fn detach(&self) -> Option<SequencedBackend> {
        self.sequenced.borrow_mut().take()
    }
}

/// Returns a device as this program prints it: `CPU`, `GPU:0`.
pub(crate) fn device_name(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("GPU:{index}"),
        Device::Cpu => "CPU".into(),
        other => format!("{other:?}"),
    }
}
