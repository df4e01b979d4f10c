//! The interface of a backend: how a rank joins it, and its collectives.

use std::sync::Arc;

use tch::{Device, Kind};

use super::call::Call;
use super::local::Shared;
use super::network::Network;
use super::point_to_point::P2POp;
use super::reduce_op::ReduceOp;
use super::traffic::Traffic;
use crate::error::{Error, Result};
use crate::operation::Operation;

/// The description of a backend: the `BACKEND` of its folder. `backends.rs` lists all of them.
pub(super) struct BackendType {
    /// The name, as in messages and on the command line.
    pub name: &'static str,
    /// The devices whose ranks it serves.
    pub devices: Devices,
    /// The processes that it connects. With [`Reach::BetweenProcesses`], a group whose ranks are all in one process
    /// uses the default backend for one process instead.
    pub reach: Reach,
    /// Whether a call launches work on a device and returns before the work is done. Such a backend launches messages,
    /// too.
    pub is_stream_ordered: bool,
    /// Checks that its library is installed, if it needs one.
    pub check_library: fn() -> Result<()>,
    /// Checks that several ranks may have one GPU: of one process, or `between_processes`.
    pub check_shared_gpu: fn(between_processes: bool) -> Result<()>,
    /// Whether ranks read each other's tensors in memory, so that a reduction can take a list of tensors without
    /// copies.
    pub reduces_in_place: bool,
    /// Checks that the backend can reduce tensors of this dtype in this way.
    pub check_reduction: fn(Operation, ReduceOp, Kind) -> Result<()>,
    /// Prepares a group for the ranks of this process. The network is `None` for a group within one process.
    pub prepare: fn(&Arc<Shared>, Option<&Arc<Network>>) -> Result<Join>,
}

/// The devices whose ranks a backend serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub enum Devices {
    /// The CPU.
    Cpu,
    /// The CPU, or one GPU for all ranks of the process.
    CpuOrSharedGpu,
    /// A GPU for each rank. Ranks may share one, if `BackendType::check_shared_gpu` says so.
    OwnGpu,
}

impl Devices {
    /// Returns whether ranks of one process can have these devices.
    pub(crate) fn include(self, devices: &[Device]) -> bool {
        match self {
            Self::Cpu => devices.iter().all(|device| *device == Device::Cpu),
            Self::CpuOrSharedGpu => true,
            Self::OwnGpu => {
                !devices.is_empty()
                    && devices.iter().all(|device| matches!(device, Device::Cuda(_)))
                    && (1..devices.len()).all(|i| !devices[..i].contains(&devices[i]))
            }
        }
    }
}

/// The processes that a backend connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// The ranks of one process.
    WithinProcess,
    /// The ranks of several processes only.
    BetweenProcesses,
    /// The ranks of one process, or of several.
    Both,
}

/// Joins a group as a group rank with this device. Returns once all members have joined. [`Error::Input`] if the
/// backend does not support the device.
pub(super) type Join = Arc<dyn Fn(usize, Device) -> Result<Box<dyn RankBackend>> + Send + Sync>;

/// One rank's side of a backend: moves its tensors to and from the other ranks.
///
/// The calls of all ranks with the same sequence number are one collective.
pub(super) trait RankBackend: Send {
    /// Runs this rank's part of a collective.
    fn run(&mut self, call: &Call) -> Result<()>;

    /// Launches a batch of messages, each with a contiguous tensor. Only a stream-ordered backend supports this; with
    /// others, messages go through the mailboxes, which do not wait for the rank's collectives.
    fn point_to_point(&mut self, _: &[P2POp]) -> Result<()> {
        Err(Error::unsupported("this backend launches no messages".into()))
    }

    /// Returns the bytes that this rank sends and receives in a collective.
    fn traffic(&self, call: &Call) -> Traffic;

    /// Waits until no operation that this rank has launched waits for another rank. Calls `meanwhile` repeatedly.
    fn synchronize(&mut self, meanwhile: &dyn Fn()) -> Result<()>;

    /// Closes this rank's side of the backend: together with the other ranks, or at once if the run was cancelled.
    fn shut_down(&mut self) {}
}

/// A rank's side of a group: the state that its collectives use one at a time, in call order.
pub(super) struct SequencedBackend {
    /// The number of collectives that this rank has called.
    pub sequence: u64,
    pub backend: Box<dyn RankBackend>,
}
