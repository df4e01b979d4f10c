//! The number of bytes that a rank sends and receives, as counters. Each backend says how many a call moves.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use tch::Tensor;

use super::call::Call;
use super::dtype::num_bytes;
use crate::operation::{CollectiveType, Holders, Operand};

/// Bytes of tensors that were transferred between one rank and the others.
///
/// With `threaded`, exactly the bytes that this rank read from the other ranks' memory, and they from its memory.
/// With `nccl`, an all_reduce moves the bytes of NCCL's ring algorithm, whichever algorithm NCCL chose. In other collectives
/// each part goes straight to its destination.
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

/// Returns the traffic of a collective in which each part goes straight to its destination, on every backend; 0 for
/// operations without tensors.
pub(super) fn split_traffic(call: &Call, rank: usize, world_size: usize) -> Traffic {
    let Some(collective) = call.operation.collective() else { return Traffic::default() };
    let is_root = rank == call.root();
    // The number of other ranks that have tensors on the far side.
    let others = |far: Operand| match far.holders {
        Holders::Root => u64::from(!is_root),
        Holders::All | Holders::OthersThanRoot => world_size as u64 - 1,
    };
    // The bytes between this rank's tensors, on the near side, and those of the others.
    let crosses = |tensors: &[Tensor], near: Operand, far: Operand| {
        if near.is_list() {
            let theirs = tensors.iter().enumerate().filter(|(other, _)| *other != rank);
            theirs.map(|(_, tensor)| num_bytes(call.kind, tensor.numel()) as u64).sum()
        } else {
            first_bytes(call, tensors) * others(far)
        }
    };
    let CollectiveType { inputs, outputs, .. } = collective;
    Traffic {
        sent: crosses(call.inputs, inputs, outputs),
        received: crosses(call.outputs, outputs, inputs),
    }
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
