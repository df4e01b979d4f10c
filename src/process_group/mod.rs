//! The process group: communication between ranks, over one of several backends.
//!
//! "Process group" is c10d's term; here the members are threads, of one process or several. A rank gets its group
//! from [`Rank::init_process_group`](crate::launch::Rank::init_process_group).

mod arguments;
mod barriers;
mod bootstrap;
pub mod c10d;
mod call;
mod coalesced;
mod collectives;
mod comm_thread;
pub mod functional;
mod gloo;
mod gpu_clock;
mod group;
mod instrumentation;
mod mismatch;
mod nccl;
mod objects;
mod point_to_point;
mod threaded;
mod traffic;
mod weights;
mod work;

use std::cell::{Cell, OnceCell, RefCell, RefMut};
use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use crossbeam::channel::{Receiver, select_biased};
use tch::{Device, Kind};

pub(crate) use bootstrap::Bootstrap;
pub(crate) use call::Call;
use call::plain_kind;
pub use call::{DTYPES, ReduceOp, dtype_name, parse_dtype};
use comm_thread::CommunicationThread;
use gloo::InFlight;
pub(crate) use gloo::{Network, ProcessMap};
use gpu_clock::GpuClock;
pub(crate) use instrumentation::CallContext;
use instrumentation::PhaseTracker;
pub(crate) use nccl::{require_library as require_nccl, version as nccl_version};
pub use point_to_point::P2POp;
use threaded::Shared;
pub use traffic::Traffic;
use traffic::TrafficCounter;
pub(crate) use weights::check_weight;
use work::State;
pub use work::Work;

use crate::error::{Error, Result};
use crate::ffi::cuda;
use crate::operation::Operation;
use crate::runtime::{Activity, RunContext, Stop};

/// A communication backend: moves the tensors between ranks.
///
/// Each implementation has its own file: [`threaded`], [`gloo`] and [`nccl`]. Every rank has its own instance. The
/// calls of all ranks with the same sequence number are one collective.
pub(crate) trait Backend: Send {
    /// Returns the backend's name, as in messages and on the command line.
    fn name(&self) -> &'static str;

    /// Returns whether a call launches work on a device and returns before the work is done.
    fn is_stream_ordered(&self) -> bool;

    /// Runs this rank's part of a collective.
    fn run(&mut self, call: &Call) -> Result<()>;

    /// Starts this rank's part of a collective. Returns the operation if it continues in the background.
    fn start(&mut self, call: &Call) -> Result<Option<InFlight>> {
        self.run(call).map(|()| None)
    }

    /// Launches a batch of messages, each with a contiguous tensor. Only `nccl` supports this.
    fn point_to_point(&mut self, ops: &[P2POp]) -> Result<()>;

    /// Returns the bytes that this rank sends and receives in a collective.
    fn traffic(&self, call: &Call) -> Traffic;

    /// Returns the mean weight of all ranks in the last call, which must have had weights.
    fn mean_weight(&self) -> f64;

    /// Waits until no operation that this rank has launched waits for another rank. Calls `meanwhile` repeatedly.
    fn synchronize(&mut self, meanwhile: &dyn Fn()) -> Result<()>;

    /// Closes this rank's side of the backend: together with the other ranks, or at once if the run was cancelled.
    fn shut_down(&mut self);
}

/// A rank's side of a group: the state that its collectives use one at a time, in call order.
struct SequencedBackend {
    /// The number of collectives that this rank has called.
    sequence: u64,
    backend: Box<dyn Backend>,
}

/// One rank's membership in a group of ranks.
///
/// Bound to its rank's thread. Every method is a *collective* unless it says otherwise: all ranks of the group must
/// call it, in the same order, with tensors of the same dtype and shape. With the `threaded` backend, a difference
/// is an error on every rank; the error lists each rank's call.
///
/// Follows `torch.distributed`: its functions are methods here. There is no default group; pass the group on.
/// [`ProcessGroup::async_op`] replaces `async_op=True`.
///
/// Start with [`all_reduce`](Self::all_reduce), [`all_gather_object`](Self::all_gather_object),
/// [`send`](Self::send) and [`new_group`](Self::new_group). A group stays on its rank's thread, and so does every
/// [`Work`]:
///
/// ```compile_fail
/// fn goes_elsewhere(_: impl Send) {}
/// fn try_it(group: ddp_mp::ProcessGroup) {
///     goes_elsewhere(group); // only the rank's own thread is woken when another rank fails
/// }
/// ```
pub struct ProcessGroup {
    rank: usize,
    local_rank: usize,
    device: Device,
    backend: &'static str,
    is_stream_ordered: bool,
    shared: Arc<Shared>,
    /// The network between the processes. `None` if the group does not use one.
    network: Option<Arc<Network>>,
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
    /// This rank's weight in the current backward. `None` if the ranks are not weighted by their samples. Shared by
    /// all groups of the rank, because one loss may use several groups.
    weight: Rc<Cell<Option<f64>>>,
    stays_here: PhantomData<Rc<()>>,
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks())
            .field("device", &self.device)
            .field("backend", &self.backend)
            .finish_non_exhaustive()
    }
}

impl ProcessGroup {
    fn new(
        rank: usize,
        local_rank: usize,
        device: Device,
        shared: Arc<Shared>,
        network: Option<Arc<Network>>,
        backend: Box<dyn Backend>,
    ) -> Self {
        Self {
            rank,
            local_rank,
            device,
            backend: backend.name(),
            is_stream_ordered: backend.is_stream_ordered(),
            shared,
            network,
            sequenced: RefCell::new(Some(SequencedBackend { sequence: 0, backend })),
            communication: OnceCell::new(),
            own_activity: None,
            phase_tracker: PhaseTracker::default(),
            gpu_clock: RefCell::default(),
            messages: Cell::new(0),
            traffic: Arc::default(),
            weight: Rc::default(),
            stays_here: PhantomData,
        }
    }

    /// Returns this rank's number in the group, from 0. Not a collective.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns this rank's number on its machine, from 0. Not a collective.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Returns the number of ranks in the group. Not a collective.
    pub fn world_size(&self) -> usize {
        self.shared.members().len()
    }

    /// Returns the device of this rank's tensors. Not a collective.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the backend's name, such as `threaded`. Not a collective.
    pub fn backend(&self) -> &'static str {
        self.backend
    }

    /// Returns whether collectives run on a GPU stream, in its order, and not while the rank waits.
    pub(crate) fn is_stream_ordered(&self) -> bool {
        self.is_stream_ordered
    }

    /// Returns the number of bytes that this rank has sent and received in this group so far. Not a collective.
    ///
    /// Asynchronous operations count when they are over, messages when they are started.
    pub fn traffic(&self) -> Traffic {
        self.traffic.total()
    }

    /// Starts `operation`, any collectives of this group, and returns without waiting for the other ranks.
    ///
    /// Replaces PyTorch's `async_op=True`. Operations run one after the other in the order in which the rank calls
    /// them, asynchronous or not. Other ranks need not call them in the same way. With `threaded` and `gloo`, a
    /// separate thread runs the operation. With `nccl`, this call launches it, and it runs on the GPU like every
    /// operation there.
    ///
    /// Leave the tensors alone until [`Work::wait`] has returned: they hold old values, new values, or a mix.
    /// `operation` and everything that it captures move to the other thread, so give it handles of its own
    /// (`shallow_clone`).
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the run has already failed. [`Work::wait`] returns the errors of `operation`; with
    /// `nccl`, this call returns them.
    ///
    /// ```
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let tensor = Tensor::from_slice(&[rank.rank() as f32 + 1.0]);
    ///     let mut same = tensor.shallow_clone(); // another handle to the same memory
    ///     let work = group.async_op(move |group| group.all_reduce(&mut same, ReduceOp::Sum))?;
    ///     // ... something else ...
    ///     work.wait()?;
    ///     assert_eq!(tensor.double_value(&[0]), 3.0);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn async_op(
        &self,
        operation: impl FnOnce(&ProcessGroup) -> Result<()> + Send + 'static,
    ) -> Result<Work> {
        self.run().check(self.global_rank())?;
        if self.is_stream_ordered {
            operation(self)?;
            return self.launched();
        }
        if self.own_activity.is_some() {
            // This is the communication thread.
            operation(self)?;
            return Ok(Work::new(State::Done, self.run().clone(), self.global_rank()));
        }
        self.queue(Box::new(|group| {
            group.set_context(CallContext::default()); // errors then show the call site inside `operation`
            operation(group).map(|()| None)
        }))
    }

    /// Queues `operation` on the communication thread, behind earlier ones. Starts the thread if there is none.
    fn queue(&self, operation: comm_thread::Operation) -> Result<Work> {
        let thread = match self.communication.get() {
            Some(thread) => thread,
            None => {
                let thread = CommunicationThread::start(self)?;
                self.communication.get_or_init(|| thread)
            }
        };
        if let Some(side) = self.detach() {
            thread.take(side);
        }
        let result = thread.run(self, operation);
        Ok(Work::new(State::Queued(result), self.run().clone(), self.global_rank()))
    }

    /// Waits until no operation that this rank has launched on its device waits for another rank. Not a collective.
    ///
    /// With `nccl`, everything launched is done then; `threaded` launches nothing that waits. Call this before you
    /// read a result on the host (`double_value`, a copy to the CPU). If another rank has failed, libtorch would
    /// block there forever, but this wait can be cancelled.
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

    /// Returns whether the group has ranks in other processes. Not a collective.
    pub fn spans_processes(&self) -> bool {
        self.shared.here().len() < self.world_size()
    }

    /// Returns the number of the group's ranks in this process. Not a collective.
    pub fn local_world_size(&self) -> usize {
        self.shared.here().len()
    }

    /// Makes all processes stop after the same step: from now on, their exchanges include rank 0's decision to
    /// stop. All ranks must call this.
    pub(crate) fn share_stop(&self, stop: &Arc<Stop>) {
        if let Some(network) = &self.network {
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
                run.check(self.ranks()[self.rank])?;
                Ok(None)
            }
        }
    }

    /// Waits until the device has passed `mark`. [`Error::Cancelled`] and [`Error::Timeout`] end the wait early.
    pub(crate) fn wait_for_device(&self, mark: &cuda::Event) -> Result<()> {
        self.run().poll(self.global_rank(), || mark.is_done())
    }

    fn run(&self) -> &Arc<RunContext> {
        self.shared.run()
    }

    /// Returns this rank's number in the run.
    fn global_rank(&self) -> usize {
        self.shared.members()[self.rank]
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
            Error::Unsupported("the group is gone with its communication thread".into())
        })
    }

    fn take(&self, side: SequencedBackend) {
        *self.sequenced.borrow_mut() = Some(side);
    }

    fn detach(&self) -> Option<SequencedBackend> {
        self.sequenced.borrow_mut().take()
    }

    /// Returns a function that recreates this membership on the communication thread, without its side.
    fn on_another_thread(&self) -> impl FnOnce() -> ProcessGroup + Send + 'static {
        let Self { rank, local_rank, device, backend, is_stream_ordered: launches, .. } = *self;
        let (shared, traffic) = (self.shared.clone(), self.traffic.clone());
        let (network, recorded) = (self.network.clone(), self.phase_tracker.beside());
        move || ProcessGroup {
            rank,
            local_rank,
            device,
            backend,
            is_stream_ordered: launches,
            shared,
            network,
            sequenced: RefCell::new(None),
            communication: OnceCell::new(),
            own_activity: Some(Activity::default()),
            phase_tracker: recorded,
            gpu_clock: RefCell::default(),
            messages: Cell::new(0),
            traffic,
            weight: Rc::default(),
            stays_here: PhantomData,
        }
    }

    /// Returns the handle of everything launched on this rank's stream so far.
    fn launched(&self) -> Result<Work> {
        let mark = cuda::Event::new()?;
        if let Device::Cuda(gpu) = self.device {
            mark.record(gpu)?;
        }
        Ok(Work::new(State::Launched(mark), self.run().clone(), self.global_rank()))
    }
}

/// Checks that the backend of this name supports `operation` with `op` on tensors of `kind`.
pub(crate) fn check_reduction(
    backend: &str,
    operation: Operation,
    op: ReduceOp,
    kind: Kind,
) -> Result<()> {
    op.check_kind(operation, kind)?;
    if backend == "nccl" { nccl::reduction(operation, op, kind).map(drop) } else { Ok(()) }
}

/// Returns a device as this program prints it: `CPU`, `GPU:0`.
pub(crate) fn device_name(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("GPU:{index}"),
        Device::Cpu => "CPU".into(),
        other => format!("{other:?}"),
    }
}

/// Returns a rank's label: its device type and its number on its machine, such as `CPU:1` or `GPU:0`.
pub(crate) fn rank_label(device: Device, local_rank: usize) -> String {
    let kind = if matches!(device, Device::Cuda(_)) { "GPU" } else { "CPU" };
    format!("{kind}:{local_rank}")
}

/// Returns the size of `numel` elements of `kind`, in bytes.
pub(crate) fn num_bytes(kind: Kind, numel: usize) -> usize {
    kind.elt_size_in_bytes() * numel
}
