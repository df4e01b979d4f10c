//! The number of bytes that a rank sends and receives.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use tch::Tensor;

use super::call::Call;
use super::dtype::num_bytes;
use crate::operation::Operation;

/// Bytes of tensors that were transferred between one rank and the others.
///
/// With `threaded`, exactly the bytes that this rank read from the other ranks' memory, and they from its memory.
/// With `nccl`, the bytes of NCCL's ring algorithm, whichever algorithm NCCL chose.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Bytes from this rank to others.
    pub sent: u64,
    /// Bytes from others to this rank.
    pub received: u64,
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.sent += other.sent;
        self.received += other.received;
    }
}

/// Returns the size of the first of `tensors` in bytes; 0 if there is none.
pub(super) fn first_bytes(call: &Call, tensors: &[Tensor]) -> u64 {
    tensors.first().map_or(0, |tensor| num_bytes(call.kind, tensor.numel()) as u64)
}

/// Returns the traffic of operations in which each part goes straight to its destination, on every backend; 0 for
/// other operations.
pub(super) fn split_traffic(call: &Call, rank: usize, world_size: usize) -> Traffic {
    let others = world_size as u64 - 1;
    let first = |tensors| first_bytes(call, tensors);
    let foreign = |tensors: &[Tensor]| {
        let theirs = tensors.iter().enumerate().filter(|(other, _)| *other != rank);
        theirs.map(|(_, tensor)| num_bytes(call.kind, tensor.numel()) as u64).sum()
    };
    let (inputs, outputs) = (call.inputs, call.outputs);
    let is_root = rank == call.root();
    let (sent, received) = match call.operation {
        Operation::Scatter => (foreign(inputs), if is_root { 0 } else { first(outputs) }),
        Operation::Gather => (if is_root { 0 } else { first(inputs) }, foreign(outputs)),
        Operation::AllGather => (first(inputs) * others, foreign(outputs)),
        Operation::ReduceScatter => (foreign(inputs), first(outputs) * others),
        Operation::AllToAll => (foreign(inputs), foreign(outputs)),
        _ => (0, 0),
    };
    Traffic { sent, received }
}

/// The total traffic of one rank.
#[derive(Debug, Default)]
pub(super) struct TrafficCounter {
    sent: AtomicU64,
    received: AtomicU64,
}

impl TrafficCounter {
    pub(super) fn add(&self, Traffic { sent, received }: Traffic) {
        // The rank's thread counts messages while its communication thread counts collectives.
        self.sent.fetch_add(sent, Ordering::Relaxed);
        self.received.fetch_add(received, Ordering::Relaxed);
    }

    pub(super) fn total(&self) -> Traffic {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic { sent: read(&self.sent), received: read(&self.received) }
    }
}
