//! The process group: what the ranks say to each other, whatever carries it.
//!
//! "Process group" is c10d's word; here the members are threads. A rank gets its group from
//! [`Rank::init_process_group`](crate::launch::Rank::init_process_group).

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

/// What carries the tensors from rank to rank.
///
/// One implementation a file: [`threaded`], [`gloo`] and [`nccl`]. Every rank holds its own; the calls of all
/// ranks at one sequence number belong together.
pub(crate) trait Backend: Send {
    /// Its name in messages and on the command line.
    fn name(&self) -> &'static str;

    /// Whether a call launches work on a device and returns, instead of doing it.
    fn is_stream_ordered(&self) -> bool;

    /// Does this rank's part of a collective.
    fn run(&mut self, call: &Call) -> Result<()>;

    /// As [`Backend::run`], but leaves what can go on by itself, if there is such a thing.
    fn start(&mut self, call: &Call) -> Result<Option<InFlight>> {
        self.run(call).map(|()| None)
    }

    /// Does or launches messages that belong together, each in one piece of memory.
    fn point_to_point(&mut self, ops: &[P2POp]) -> Result<()>;

    /// What crosses between this rank and the others in a collective.
    fn traffic(&self, call: &Call) -> Traffic;

    /// The mean weight of all ranks in the last call, which had weights.
    fn mean_weight(&self) -> f64;

    /// Does `meanwhile` again and again until nothing that this rank has launched waits for another rank any more.
    fn synchronize(&mut self, meanwhile: &dyn Fn()) -> Result<()>;

    /// Parts from the other ranks: together if all is well, at once if the run was cancelled.
    fn shut_down(&mut self);
}

/// A rank's side of a group: what its calls need one at a time, in their order.
struct SequencedBackend {
    /// How many collectives this rank has called.
    sequence: u64,
    backend: Box<dyn Backend>,
}

/// One rank's membership in a group of ranks.
///
/// Bound to its rank's thread. Every method is a *collective* unless it says otherwise: all ranks of the group
/// must call it, in the same order, with tensors of the same kind and shape. With the `threaded` backend a
/// difference is an error on every rank that says who called what.
///
/// Follows `torch.distributed`: its functions are methods here, and there is no default group; you pass the
/// group on. What PyTorch does with `async_op=True` is [`ProcessGroup::async_op`].
///
/// Begin with [`all_reduce`](Self::all_reduce), [`all_gather_object`](Self::all_gather_object), [`send`](Self::send) and
/// [`new_group`](Self::new_group). A group stays on its rank's thread, and so does every [`Work`]:
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
    /// To the other processes, if there are any.
    network: Option<Arc<Network>>,
    /// Not there while the communication thread has it.
    sequenced: RefCell<Option<SequencedBackend>>,
    communication: OnceCell<CommunicationThread>,
    /// What a communication thread does; what the rank itself does stands in the run.
    own_activity: Option<Activity>,
    phase_tracker: PhaseTracker,
    /// `None` if the rank has no GPU.
    gpu_clock: RefCell<Option<GpuClock>>,
    /// How many messages this rank has sent and received.
    messages: Cell<u64>,
    traffic: Arc<TrafficCounter>,
    /// How much this rank counts in the backward that it is in, if ranks count by their samples.
    /// Shared by all groups of the rank: a loss may go through several.
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

    /// This rank's number in the group, from 0. Not a collective.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// This rank's number on its machine, from 0. Not a collective.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// How many ranks there are in the group. Not a collective.
    pub fn world_size(&self) -> usize {
        self.shared.members().len()
    }

    /// Where this rank's tensors live. Not a collective.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The name of the backend, such as `threaded`. Not a collective.
    pub fn backend(&self) -> &'static str {
        self.backend
    }

    /// How many bytes this rank has sent and received in this group so far: those of asynchronous operations
    /// once they are over, those of messages once they are started. Not a collective.
    pub fn traffic(&self) -> Traffic {
        self.traffic.total()
    }

    /// Starts `operation`, any collectives of this group, and goes on without waiting for the other ranks.
    ///
    /// What PyTorch does with `async_op=True`. Operations run one after the other in the order in which the
    /// rank calls them, whether this way or directly; other ranks need not call them in the same way. With
    /// `threaded` a thread of its own does it; with `nccl` it is launched here, and runs on the GPU as every
    /// operation there does.
    ///
    /// Leave the tensors alone until [`Work::wait`] has returned: they hold the old values or the new ones, or
    /// some of both. What `operation` uses goes with it to the other thread, so give it handles of its own
    /// (`shallow_clone`).
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the run has failed already; what `operation` returns comes from
    /// [`Work::wait`], or with `nccl` from here.
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
            group.set_context(CallContext::default()); // its own line is what counts
            operation(group).map(|()| None)
        }))
    }

    /// Has the communication thread do it, after what it has been told before.
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

    /// Returns once nothing that this rank has launched on its device waits for another rank any more. Not a
    /// collective.
    ///
    /// With `nccl` everything launched is done then; `threaded` launches nothing that waits. Call it before
    /// you read a result on the host (`double_value`, a copy to the CPU): libtorch would wait there for ever
    /// if another rank has failed, while this wait can be cancelled.
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

    /// Whether there are ranks in other processes. Not a collective.
    pub fn spans_processes(&self) -> bool {
        self.shared.here().len() < self.world_size()
    }

    /// How many of the group's ranks are in this process. Not a collective.
    pub fn local_world_size(&self) -> usize {
        self.shared.here().len()
    }

    /// Has all processes stop after the same step: from now on rank 0's decision goes along with whatever they
    /// exchange. On all ranks alike.
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

    /// Waits for what arrives on `channel`; `None` if nobody can send any more.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when another rank fails meanwhile.
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

    /// Waits until the device has passed `mark`, as [`Error::Cancelled`] and [`Error::Timeout`] end it otherwise.
    pub(crate) fn wait_for_device(&self, mark: &cuda::Event) -> Result<()> {
        self.run().poll(self.global_rank(), || mark.is_done())
    }

    fn run(&self) -> &Arc<RunContext> {
        self.shared.run()
    }

    /// This rank's number in the run.
    fn global_rank(&self) -> usize {
        self.shared.members()[self.rank]
    }

    fn activity(&self) -> &Activity {
        self.own_activity.as_ref().unwrap_or(&self.run().activity[self.global_rank()])
    }

    /// How many collectives this rank has called.
    fn sequence(&self) -> Result<u64> {
        Ok(self.side()?.sequence)
    }

    /// This rank's side of the group; if the communication thread has it, when that is done with it.
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

    /// What makes this membership on another thread, but for its side, which follows.
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

    /// The handle of what has been launched on this rank's stream so far.
    fn launched(&self) -> Result<Work> {
        let mark = cuda::Event::new()?;
        if let Device::Cuda(gpu) = self.device {
            mark.record(gpu)?;
        }
        Ok(Work::new(State::Launched(mark), self.run().clone(), self.global_rank()))
    }
}

/// Whether the backend of this name can do `operation` with `op` on tensors of `kind`.
pub(crate) fn check_reduction(
    backend: &str,
    operation: Operation,
    op: ReduceOp,
    kind: Kind,
) -> Result<()> {
    op.check_kind(operation, kind)?;
    if backend == "nccl" { nccl::reduction(operation, op, kind).map(drop) } else { Ok(()) }
}

/// A device as this program prints it: `CPU`, `GPU:0`.
pub(crate) fn device_name(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("GPU:{index}"),
        Device::Cpu => "CPU".into(),
        other => format!("{other:?}"),
    }
}

/// A rank's device with the rank's number on its machine, as this program prints it: `CPU:1`, `GPU:0`.
pub(crate) fn rank_label(device: Device, local_rank: usize) -> String {
    let kind = if matches!(device, Device::Cuda(_)) { "GPU" } else { "CPU" };
    format!("{kind}:{local_rank}")
}

/// How many bytes `numel` elements of `kind` take.
pub(crate) fn num_bytes(kind: Kind, numel: usize) -> usize {
    kind.elt_size_in_bytes() * numel
}
