//! How many bytes a rank sends and receives.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// Bytes of tensors that crossed between one rank and the others.
///
/// With `threaded` exactly what it read from their memory and they from its; with `nccl` what NCCL's ring
/// algorithm sends, whatever algorithm it chose.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// From this rank to others.
    pub sent: u64,
    /// From others to this rank.
    pub received: u64,
}

/// The sum of what one rank has sent and received. Written by one thread at a time.
#[derive(Debug, Default)]
pub(super) struct TrafficCounter {
    sent: AtomicU64,
    received: AtomicU64,
}

impl TrafficCounter {
    pub(super) fn add(&self, Traffic { sent, received }: Traffic) {
        self.sent.fetch_add(sent, Ordering::Relaxed);
        self.received.fetch_add(received, Ordering::Relaxed);
    }

    pub(super) fn total(&self) -> Traffic {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic { sent: read(&self.sent), received: read(&self.received) }
    }
}
