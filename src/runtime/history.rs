//! What the ranks of a process have done, once they are through: for traces and reports.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Entry, RunContext};
use crate::operation::Operation;

/// The records of a process's ranks, as far as they are kept.
#[derive(Debug)]
pub(crate) struct History {
    /// This process's number among those of the run, and how many there are.
    pub process: [usize; 2],
    /// How the clock of the process of rank 0 compares, where there are several.
    pub clock: Option<Clock>,
    /// When the clock of the records began.
    pub began: Instant,
    /// When the records were looked at, by that clock.
    pub taken: Duration,
    /// How many ranks all processes have.
    pub world_size: usize,
    /// In the order of their numbers.
    pub ranks: Vec<RankHistory>,
    /// The ranks of each group that has been made; the group of all is not here.
    pub groups: BTreeMap<u32, Arc<[usize]>>,
}

/// The records of one rank.
#[derive(Debug)]
pub(crate) struct RankHistory {
    pub rank: usize,
    pub device: String,
    /// The oldest first.
    pub records: Vec<Entry>,
    /// How many older ones are not kept any more.
    pub lost: u64,
    /// By how much the times on its GPU may be wrong; `None` without one.
    pub gpu_error: Option<Duration>,
    /// Of each collective, and of messages, how often it was called and with how many bytes in all.
    pub totals: Vec<(Operation, [u64; 2])>,
}

/// What the time was on the clock of the process of rank 0, when it was `at` on this one's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    /// By this process's clock.
    pub at: Instant,
    /// How much time had passed there since that process measured its own.
    pub there: Duration,
    /// By how much that may be wrong.
    pub error: Duration,
}

impl History {
    /// What `run` knows of its ranks `here`, each with its device.
    pub(crate) fn of(
        run: &RunContext,
        here: Range<usize>,
        device: impl Fn(usize) -> String,
        process: [usize; 2],
        clock: Option<Clock>,
    ) -> Self {
        let timeline = &run.flight_recorder;
        let of_rank = |rank| {
            let count = timeline.count(rank);
            let mut records: Vec<Entry> = timeline.records(rank, 0).collect();
            if (records.len() as u64) < count {
                // From the first step on that is all there.
                let is_step = |it: &Entry| it.begin.at.operation == Operation::Step;
                records.drain(..records.iter().position(is_step).unwrap_or(0));
            }
            let totals = Operation::ALL.into_iter().map(|it| (it, timeline.total(rank, it)));
            RankHistory {
                rank,
                device: device(rank),
                lost: count.saturating_sub(records.len() as u64),
                gpu_error: timeline.gpu_clock_error(rank),
                records,
                totals: totals.filter(|(_, [calls, _])| *calls > 0).collect(),
            }
        };
        Self {
            process,
            clock,
            began: timeline.began(),
            taken: timeline.now(),
            world_size: run.activity.len(),
            ranks: here.map(of_rank).collect(),
            groups: run.known_groups(),
        }
    }

    /// The ranks of a group; number 0 has all.
    pub(crate) fn members(&self, group: u32) -> Option<Arc<[usize]>> {
        match group {
            0 => Some((0..self.world_size).collect()),
            _ => self.groups.get(&group).cloned(),
        }
    }

    /// The point on the clock of the process of rank 0 at which the clock of these records began, in seconds from when
    /// that process measured its own.
    pub(crate) fn start(&self) -> f64 {
        self.clock.map_or(0.0, |Clock { at, there, .. }| {
            let later = self.began.saturating_duration_since(at).as_secs_f64();
            let earlier = at.saturating_duration_since(self.began).as_secs_f64();
            there.as_secs_f64() + later - earlier
        })
    }
}
