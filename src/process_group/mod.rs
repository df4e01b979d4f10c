//! The process group: what the ranks say to each other, whatever carries it.
//!
//! "Process group" is c10d's word; here the members are threads. A rank gets its group from
//! [`Rank::init_process_group`](crate::launch::Rank::init_process_group).

mod call;
mod element;
mod nccl;
mod threaded;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

pub use call::ReduceOp;
pub(crate) use call::{Call, kind_name};
pub(crate) use nccl::{Nccl, UniqueId, version as nccl_version};
pub(crate) use threaded::{Shared, Threaded};

use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::sync::{Run, Stage};

/// What carries the tensors from rank to rank.
///
/// One implementation a file: [`threaded`] and [`nccl`]. Every rank holds its own; the calls of all
/// ranks at one sequence number belong together.
pub(crate) trait Backend {
    /// Its name in messages and on the command line.
    fn name(&self) -> &'static str;

    /// Combines `tensor` over all ranks, in place on each.
    fn all_reduce(&mut self, call: &Call, tensor: &Tensor, op: ReduceOp) -> Result<()>;

    /// Copies `tensor` of rank `src` over that of every other rank.
    fn broadcast(&mut self, call: &Call, tensor: &Tensor, src: usize) -> Result<()>;

    /// Returns once every rank has called it.
    fn barrier(&mut self, call: &Call) -> Result<()>;

    /// Returns once nothing that this rank has launched waits for another rank any more.
    fn synchronize(&mut self) -> Result<()>;

    /// Parts from the other ranks: together if all is well, at once if the run was cancelled.
    fn shut_down(&mut self);
}

/// One rank's membership in a group of ranks.
///
/// Bound to its rank's thread. Every method is a *collective* unless it says otherwise: all ranks must
/// call it, in the same order, with tensors of the same kind and shape. With the `threaded` backend a
/// difference is an error on every rank that says who called what.
///
/// Follows `torch.distributed`'s default group; there is no global one here, you pass it on.
pub struct ProcessGroup {
    rank: usize,
    local_rank: usize,
    device: Device,
    run: Arc<Run>,
    /// How many collectives this rank has called.
    sequence: Cell<u64>,
    backend: RefCell<Box<dyn Backend>>,
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size())
            .field("device", &self.device)
            .field("backend", &self.backend())
            .finish_non_exhaustive()
    }
}

impl ProcessGroup {
    pub(crate) fn new(
        rank: usize,
        local_rank: usize,
        device: Device,
        run: Arc<Run>,
        backend: Box<dyn Backend>,
    ) -> Self {
        let backend = RefCell::new(backend);
        Self { rank, local_rank, device, run, sequence: Cell::new(0), backend }
    }

    /// This rank's number in the group, from 0. Not a collective.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// This rank's number on its machine, from 0. Not a collective.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// How many ranks there are. Not a collective.
    pub fn world_size(&self) -> usize {
        self.run.activity.len()
    }

    /// Where this rank's tensors live. Not a collective.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The name of the backend, such as `threaded`. Not a collective.
    pub fn backend(&self) -> &'static str {
        self.backend.borrow().name()
    }

    /// Combines `tensor` over all ranks and leaves the result in every rank's `tensor`.
    ///
    /// Follows `torch.distributed.all_reduce`. Any shape, also empty; the same on every rank. Kinds:
    /// float64, float32, float16, bfloat16 (the last two are summed in float32), and with
    /// [`ReduceOp::Sum`] also int64, int32, int16, int8 and uint8, which wrap on overflow. The sum runs
    /// in the order of the ranks (`threaded`), so it has the same bits on every rank and in every run.
    ///
    /// On a GPU this launches and returns, as every operation there does.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when ranks differ, [`Error::Unsupported`] for other kinds,
    /// [`Error::Timeout`], [`Error::Left`] and [`Error::Cancelled`] when others don't come, and the
    /// backend's own errors. After an error the content of `tensor` is unspecified.
    ///
    /// ```
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(3, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mut tensor = Tensor::from_slice(&[rank.rank() as f32, 1.0]);
    ///     group.all_reduce(&mut tensor, ReduceOp::Sum)?;
    ///     assert_eq!(Vec::<f32>::try_from(&tensor)?, [0.0 + 1.0 + 2.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        op.check_kind(defined_kind("all_reduce", tensor)?)?;
        self.collective(Operation::AllReduce, tensor, |backend, call, tensor| {
            backend.all_reduce(call, tensor, op)
        })
    }

    /// Copies `tensor` of rank `src` into every other rank's `tensor`.
    ///
    /// Follows `torch.distributed.broadcast`. Any kind and shape, the same on every rank.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`]; [`Error::Input`] when there is no rank `src`.
    ///
    /// ```
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let mut tensor = Tensor::from_slice(&[rank.rank() as i64; 4]);
    ///     group.broadcast(&mut tensor, 1)?;
    ///     assert_eq!(Vec::<i64>::try_from(&tensor)?, [1, 1, 1, 1]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn broadcast(&self, tensor: &mut Tensor, src: usize) -> Result<()> {
        if src >= self.world_size() {
            return Err(Error::Input(format!(
                "broadcast: src is rank {src}, but the group has ranks 0 to {}",
                self.world_size() - 1
            )));
        }
        defined_kind("broadcast", tensor)?;
        self.collective(Operation::Broadcast, tensor, |backend, call, tensor| {
            backend.broadcast(call, tensor, src)
        })
    }

    /// Returns once every rank has called it.
    ///
    /// Follows `torch.distributed.barrier`.
    ///
    /// # Errors
    /// As [`ProcessGroup::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        self.enter(Operation::Barrier, |backend, call| backend.barrier(call))
    }

    /// Returns once nothing that this rank has launched on its device waits for another rank any more. Not a
    /// collective.
    ///
    /// With `nccl` everything launched is done then; `threaded` launches nothing that waits. Call it before you read a result on the host (`double_value`, a copy to the CPU): libtorch would
    /// wait there for ever if another rank has failed, while this wait can be cancelled.
    ///
    /// # Errors
    /// [`Error::Cancelled`], [`Error::Timeout`], and the backend's own errors.
    pub fn synchronize(&self) -> Result<()> {
        let activity = &self.run.activity[self.rank];
        let before = activity.enter(Operation::Synchronize, self.sequence.get());
        self.backend.borrow_mut().synchronize()?;
        activity.restore(before);
        Ok(())
    }

    /// Notes that this rank begins training step `step`, for failure reports. Not a collective.
    ///
    /// # Errors
    /// [`Error::Fault`], when the run was started with a fault that strikes here.
    pub fn enter_step(&self, step: u64) -> Result<()> {
        self.run.activity[self.rank].enter(Operation::Step, step);
        self.run.fault_point(self.rank, Stage::Step, step)
    }

    pub(crate) fn shut_down(&self) {
        self.backend.borrow_mut().shut_down();
    }

    /// A collective on a tensor, which backends get in one piece.
    fn collective(
        &self,
        operation: Operation,
        tensor: &mut Tensor,
        f: impl FnOnce(&mut dyn Backend, &Call, &Tensor) -> Result<()>,
    ) -> Result<()> {
        if tensor.device() != self.device {
            return Err(Error::Input(format!(
                "{operation}: the tensor is on {}, but rank {} works on {}; move it there first",
                device_name(tensor.device()),
                self.rank,
                device_name(self.device)
            )));
        }
        let torch = || Error::torch("contiguous");
        // Lazily conjugated and negated tensors are told apart from their memory by a bit.
        let as_it_is = tensor.is_contiguous()
            && !tensor.f_is_conj().map_err(torch())?
            && !tensor.f_is_neg().map_err(torch())?;
        if as_it_is {
            return self.enter(operation, |backend, call| f(backend, call, tensor));
        }
        let dense = || tensor.f_resolve_conj()?.f_resolve_neg()?.f_contiguous();
        let dense = dense().map_err(torch())?;
        self.enter(operation, |backend, call| f(backend, call, &dense))?;
        tch::no_grad(|| tensor.f_copy_(&dense)).map_err(Error::torch("copy_"))
    }

    /// Numbers the call and notes what this rank does, for the others to see.
    fn enter(
        &self,
        operation: Operation,
        f: impl FnOnce(&mut dyn Backend, &Call) -> Result<()>,
    ) -> Result<()> {
        let sequence = self.sequence.get();
        let activity = &self.run.activity[self.rank];
        let before = activity.enter(operation, sequence);
        match operation {
            Operation::Broadcast => self.run.fault_point(self.rank, Stage::Broadcast, 0)?,
            Operation::Barrier => self.run.fault_point(self.rank, Stage::Barrier, 0)?,
            _ => {}
        }
        self.sequence.set(sequence + 1);
        f(&mut **self.backend.borrow_mut(), &Call { operation, sequence })?;
        activity.restore(before);
        Ok(())
    }
}

/// The kind of a tensor that there is.
fn defined_kind(operation: &str, tensor: &Tensor) -> Result<Kind> {
    if !tensor.defined() {
        return Err(Error::Input(format!("{operation}: the tensor is undefined; make one first")));
    }
    tensor.f_kind().map_err(Error::torch("kind"))
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
