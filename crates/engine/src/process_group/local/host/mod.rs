//! Ranks of several processes of one host, which share memory as threads do.
//!
//! Each process has one memory, which the others map ([`Host`]). A group has a block there for each of its ranks
//! ([`HostGroup`]): the rank's part of the barrier, its announcements, and room for tensors. Tensors in the memory of the
//! host stay where they are; others are copied into that room. Then the ranks work on each other's tensors as threads do
//! ([`HostCalls`]). A group on several hosts has one [`HostGroup`] on each, whose first rank uses the network for all.

mod calls;
mod group;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Device, Kind, Tensor};

pub(crate) use calls::{HostCalls, invalid_data};
pub(crate) use group::{HostGroup, HostNumbers};

use crate::error::{Error, Result, opaque_debug};
use crate::ffi::{TorchResult, memory_tensor};
use crate::os::shared_memory::SharedRegion;
use crate::process_group::dtype::num_bytes;

/// Allocations are multiples of pages, which go back to the system alone.
pub(crate) const PAGE: usize = 4096;

/// The memories of the processes of one host.
pub(crate) struct Host {
    /// The memory of each process.
    regions: Box<[SharedRegion]>,
    /// The ranks of each process.
    ranks: Box<[Range<usize>]>,
    /// This process.
    mine: usize,
    /// The number of CPUs that the processes may use together.
    cores: usize,
    /// The ranks of each host of the run, in ascending order.
    hosts: Box<[Range<usize>]>,
    /// The first byte of this process's memory that was never allocated. Addresses are not used again, so that new
    /// memory is zero, and no late reader sees other data than it expects.
    next: AtomicUsize,
}

/// A range of this process's memory. Its pages go back to the system with it, but for the first ones that stay.
#[derive(Debug)]
struct Allocation {
    host: Arc<Host>,
    range: Range<usize>,
    stays: usize,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let freed = self.range.start + self.stays..self.range.end;
        self.host.regions[self.host.mine].free(freed.start, freed.len());
    }
}

opaque_debug!(Host);

impl Host {
    /// Returns the host of processes with these memories and ranks. Process `mine` is this one. Together they may use
    /// `cores` CPUs. `hosts` has the ranks of each host of the run, in ascending order.
    pub(crate) fn new(
        regions: Box<[SharedRegion]>,
        ranks: &[Range<usize>],
        mine: usize,
        cores: usize,
        hosts: Box<[Range<usize>]>,
    ) -> Self {
        Self { regions, ranks: ranks.into(), mine, cores, hosts, next: AtomicUsize::new(PAGE) }
    }

    /// Returns the index of the host that has `rank`, in the order of their ranks.
    pub(crate) fn host_of(&self, rank: usize) -> usize {
        self.hosts.partition_point(|ranks| ranks.end <= rank)
    }

    /// Returns zeros for the ranks of the host.
    ///
    /// # Errors
    /// [`Error::Input`] if the memory is used up.
    pub(crate) fn buffer(self: &Arc<Self>, bytes: usize) -> Result<Tensor> {
        self.shared_zeros(bytes, Kind::Uint8)?.ok_or_else(used_up)
    }

    /// Returns the process that has `rank`; `None` if it is of another host.
    fn process_of(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|ranks| ranks.contains(&rank))
    }

    /// Allocates zeros. The first `stays` bytes, whole pages, are never given back. Returns `None` if the memory is used up.
    fn allocate(self: &Arc<Self>, bytes: usize, stays: usize) -> Option<Allocation> {
        let len = bytes.next_multiple_of(PAGE);
        let fits = |start: usize| self.regions[self.mine].at(start, len).map(|_| start + len);
        let relaxed = Ordering::Relaxed;
        let start = self.next.fetch_update(relaxed, relaxed, fits).ok()?;
        Some(Allocation { host: self.clone(), range: start..start + len, stays })
    }

    /// Returns zeros that the other processes of the host can read and write in collectives without a copy. Private
    /// memory if the host's is used up.
    pub(crate) fn zeros(self: &Arc<Self>, numel: usize, kind: Kind) -> Result<Tensor> {
        match self.shared_zeros(numel, kind)? {
            Some(zeros) => Ok(zeros),
            None => Tensor::f_zeros([numel as i64], (kind, Device::Cpu)).doing("zeros"),
        }
    }

    /// Returns zeros in the memory of this process; `None` if it is used up, or for no elements.
    fn shared_zeros(self: &Arc<Self>, numel: usize, kind: Kind) -> Result<Option<Tensor>> {
        let len = num_bytes(kind, numel);
        let Some(allocation) = self.allocate(len, 0).filter(|_| len > 0) else { return Ok(None) };
        let region = &self.regions[self.mine];
        let Some(start) = region.at(allocation.range.start, len) else {
            return Err(Error::Internal("an allocation is not in its memory".into()));
        };
        // SAFETY: the allocation has these bytes, which belong to it alone, and goes with the tensor.
        let bytes = unsafe { memory_tensor(start, len, Arc::new(allocation)) }?;
        bytes.f_view_dtype(kind).map(Some).doing("a view of the host's memory")
    }
}

/// Returns the error of a process whose memory is used up.
fn used_up() -> Error {
    Error::unsupported(
        "the memory that this process shares with others of its host is used up; use --shared-memory=off".into(),
    )
}
