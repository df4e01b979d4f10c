//! Durations of the parts of backward passes.

use std::time::Duration;

/// Total durations of the parts of backward passes on this rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct BackwardTimings {
    /// The number of backward passes.
    pub count: u32,
    /// Time from the start of backward to the end of the last bucket.
    pub total: Duration,
    /// Time in which this rank reduced or waited for reductions.
    pub communication: Duration,
    /// The part of `communication` before autograd ended.
    pub overlapped: Duration,
    /// Time in which other threads reduced while this rank was still in autograd.
    pub beside: Duration,
}
