//! What the ranks of one run know of each other: who does what, and whether to go on.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::utils::CachePadded;

use super::{CancelToken, Fault, Stage};
use crate::error::{LateRank, Result};

/// What a rank can be seen doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)] // the names are the documentation
pub enum Operation {
    Start,
    Rendezvous,
    Init,
    AllReduce,
    Broadcast,
    Barrier,
    Synchronize,
    Step,
    Done,
}

impl Operation {
    const ALL: [Operation; 9] = [
        Operation::Start,
        Operation::Rendezvous,
        Operation::Init,
        Operation::AllReduce,
        Operation::Broadcast,
        Operation::Barrier,
        Operation::Synchronize,
        Operation::Step,
        Operation::Done,
    ];
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Operation::Start => "start",
            Operation::Rendezvous => "rendezvous",
            Operation::Init => "init",
            Operation::AllReduce => "all_reduce",
            Operation::Broadcast => "broadcast",
            Operation::Barrier => "barrier",
            Operation::Synchronize => "synchronize",
            Operation::Step => "step",
            Operation::Done => "done",
        })
    }
}

/// An operation, and which one of its sort: `all_reduce #3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// What.
    pub operation: Operation,
    /// For a collective its number in the order of the rank's collectives, for a step that of the step;
    /// both from 0.
    pub sequence: u64,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let At { operation, sequence } = self;
        match operation {
            // These happen once, so they have no number.
            Operation::Start | Operation::Rendezvous | Operation::Init | Operation::Done => {
                write!(f, "{operation}")
            }
            _ => write!(f, "{operation} #{sequence}"),
        }
    }
}

/// What one rank does now, written by that rank alone and readable by all without a lock.
#[derive(Debug, Default)]
pub struct Activity(AtomicU64);

impl Activity {
    const SEQUENCE_BITS: u32 = 56;

    /// Notes that this rank now does `operation`, the `sequence`-th of its sort; returns what it
    /// did before, for [`Activity::restore`].
    pub fn enter(&self, operation: Operation, sequence: u64) -> At {
        let before = self.now();
        self.restore(At { operation, sequence });
        before
    }

    /// Goes back to what [`Activity::enter`] returned. Not called when the operation failed, so
    /// that the failure is reported with the operation it happened in.
    pub fn restore(&self, At { operation, sequence }: At) {
        let sequence = sequence & ((1 << Self::SEQUENCE_BITS) - 1);
        self.0.store((operation as u64) << Self::SEQUENCE_BITS | sequence, Ordering::Release);
    }

    /// What the rank does, as far as it has said.
    pub fn now(&self) -> At {
        let packed = self.0.load(Ordering::Acquire);
        let operation = Operation::ALL[(packed >> Self::SEQUENCE_BITS) as usize];
        At { operation, sequence: packed & ((1 << Self::SEQUENCE_BITS) - 1) }
    }
}

/// Shared by all ranks of one run.
#[derive(Debug)]
pub struct Run {
    /// Tripped by the first rank that fails.
    pub cancel: CancelToken,
    /// One entry per rank.
    pub activity: Box<[CachePadded<Activity>]>,
    /// How long a rank waits for the others before it gives up.
    pub timeout: Duration,
    /// A rank that is to fail.
    pub fault: Option<Fault>,
}

impl Run {
    /// A run of `world_size` ranks, none of which does anything yet.
    pub fn new(world_size: usize, timeout: Duration, fault: Option<Fault>) -> Self {
        Self {
            cancel: CancelToken::default(),
            activity: (0..world_size).map(|_| CachePadded::default()).collect(),
            timeout,
            fault,
        }
    }

    /// Fails here if `rank` is to fail at this place.
    pub(crate) fn fault_point(&self, rank: usize, at: Stage, step: u64) -> Result<()> {
        self.fault.map_or(Ok(()), |fault| fault.strike(rank, at, step))
    }

    /// Notes that `rank` has ended its function, and lets those who wait for it see that.
    pub(crate) fn finish(&self, rank: usize) {
        self.activity[rank].enter(Operation::Done, 0);
        self.cancel.wake_all();
    }

    /// Whether `rank` has ended its function.
    pub(crate) fn is_done(&self, rank: usize) -> bool {
        self.activity[rank].now().operation == Operation::Done
    }

    /// Names `rank` with what it was last seen doing.
    pub(crate) fn late(&self, rank: usize) -> LateRank {
        LateRank { rank, last_seen: self.activity[rank].now() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_activity_survives_its_packing() {
        let activity = Activity::default();
        assert_eq!(activity.now(), At { operation: Operation::Start, sequence: 0 });
        for operation in Operation::ALL {
            activity.enter(operation, (1 << 56) - 1);
            assert_eq!(activity.now(), At { operation, sequence: (1 << 56) - 1 });
        }
        activity.enter(Operation::Step, 7);
        let before = activity.enter(Operation::AllReduce, 3);
        assert_eq!(activity.now().to_string(), "all_reduce #3");
        activity.restore(before);
        assert_eq!(activity.now().to_string(), "step #7");
    }
}
