//! Durations of backward passes, and the statistics computed from them.

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
    /// Time in which another thread reduced while this rank was still in autograd.
    pub hidden: Duration,
}

/// Statistics of the backward passes that averaged on one rank; times are means per backward. Follows
/// `_get_ddp_logging_data`.
#[derive(Debug, Clone, PartialEq)]
pub struct DdpStatistics {
    /// Size of each bucket, in bytes.
    pub bucket_bytes: Vec<usize>,
    /// Duration of backward with its reductions, in microseconds. On a GPU, the time to launch them.
    pub backward_us: f64,
    /// Time that the rank, its communication thread or its GPU spent reducing or waiting for others, in microseconds.
    pub communication_us: f64,
    /// Fraction of `communication_us` that had passed when autograd ended, from 0 to 1.
    pub overlapped: f64,
    /// Fraction of `communication_us` that ran beside autograd on the communication thread or the GPU, from 0 to 1. It
    /// is 0 where the rank itself reduces during backward.
    pub hidden: f64,
}

impl DdpStatistics {
    pub(super) fn new(times: BackwardTimings, bucket_bytes: Vec<usize>) -> Self {
        let mean = |time: Duration| time.as_secs_f64() / f64::from(times.count.max(1));
        let communication = mean(times.communication + times.hidden);
        let share = |part: f64| if communication == 0.0 { 0.0 } else { part / communication };
        Self {
            bucket_bytes,
            backward_us: mean(times.total) * 1e6,
            communication_us: communication * 1e6,
            overlapped: share(mean(times.overlapped + times.hidden)),
            hidden: share(mean(times.hidden)),
        }
    }
}
