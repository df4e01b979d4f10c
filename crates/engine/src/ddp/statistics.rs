//! Durations of backward passes, and the statistics computed from them.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::process_group::ProcessGroup;

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

/// The times of a rank's backward passes, and of the one that is under way.
#[derive(Debug)]
pub(super) struct BackwardClock {
    pub totals: BackwardTimings,
    /// When the backward began.
    began: Instant,
    /// `totals.communication` at that time.
    communication_before: Duration,
    /// The time of the group's communication thread at that time.
    async_before: Duration,
    /// Time from the start of backward to the completion of each bucket, without reductions. `None` if incomplete.
    pub bucket_times: Vec<Option<Duration>>,
}

impl BackwardClock {
    /// Returns the clock before the first backward.
    pub(super) fn new() -> Self {
        Self {
            totals: BackwardTimings::default(),
            began: Instant::now(),
            communication_before: Duration::ZERO,
            async_before: Duration::ZERO,
            bucket_times: Vec::new(),
        }
    }

    /// Begins a backward with this many buckets.
    pub(super) fn begin(&mut self, group: &ProcessGroup, buckets: usize) {
        self.began = Instant::now();
        self.communication_before = self.totals.communication;
        self.async_before = group.async_time();
        self.bucket_times.clear();
        self.bucket_times.resize(buckets, None);
    }

    /// Notes that all gradients of a bucket are complete.
    pub(super) fn bucket_is_complete(&mut self, bucket: usize) {
        self.bucket_times[bucket] = Some(self.began.elapsed().saturating_sub(self.communication()));
    }

    /// Notes the end of autograd: what has been reduced so far was beside it.
    pub(super) fn end_of_autograd(&mut self, group: &ProcessGroup) {
        self.totals.hidden += group.async_time().saturating_sub(self.async_before);
        self.totals.overlapped += self.communication();
    }

    /// Ends a backward that has averaged.
    pub(super) fn end(&mut self) {
        self.totals.total += self.began.elapsed();
        self.totals.count += 1;
    }

    /// Returns the time for which this rank has reduced in this backward.
    fn communication(&self) -> Duration {
        self.totals.communication - self.communication_before
    }
}

/// Statistics of the backward passes that averaged on one rank; times are means per backward. Follows
/// `_get_ddp_logging_data`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
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
    /// is 0 where the rank itself reduces during backward. Not a part of the event `end`.
    #[serde(skip)]
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
