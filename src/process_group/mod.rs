//! The process group: what the ranks say to each other, whatever carries it.
//!
//! "Process group" is c10d's word; here the members are threads. A rank gets its group from
//! [`Rank::init_process_group`](crate::launch::Rank::init_process_group).

mod arguments;
mod call;
mod collectives;
mod nccl;
mod threaded;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::Arc;

use tch::{Device, Kind};

pub use call::ReduceOp;
pub(crate) use call::{Call, kind_name};
pub(crate) use nccl::{Nccl, UniqueId, version as nccl_version};
pub(crate) use threaded::{Shared, Threaded};

#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::operation::Operation;
use crate::sync::{Run, Stage};

/// What carries the tensors from rank to rank.
///
/// One implementation a file: [`threaded`] and [`nccl`]. Every rank holds its own; the calls of all
/// ranks at one sequence number belong together.
pub(crate) trait Backend {
    /// Its name in messages and on the command line.
    fn name(&self) -> &'static str;

    /// Does this rank's part of a collective.
    fn run(&mut self, call: &Call) -> Result<()>;

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
