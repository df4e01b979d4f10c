//! What the ranks of one run know of each other: who does what, who failed first, and whether to go on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam::utils::CachePadded;

use super::{CancelToken, Fault, Stage};
use crate::error::{Error, LateRank, Result};
use crate::operation::{At, Operation};

/// What one rank does now, written by that rank alone and readable by all without a lock.
#[derive(Debug, Default)]
pub(crate) struct Activity(AtomicU64);

impl Activity {
    const SEQUENCE_BITS: u32 = 56;

    /// Notes that this rank now does `operation`, the `sequence`-th of its sort; returns what it
    /// did before, for [`Activity::restore`].
    pub(crate) fn enter(&self, operation: Operation, sequence: u64) -> At {
        let before = self.now();
        self.restore(At { operation, sequence });
        before
    }

    /// Goes back to what [`Activity::enter`] returned. Not called when the operation failed, so
    /// that the failure is reported with the operation it happened in.
    pub(crate) fn restore(&self, At { operation, sequence }: At) {
        let sequence = sequence & ((1 << Self::SEQUENCE_BITS) - 1);
        self.0.store((operation as u64) << Self::SEQUENCE_BITS | sequence, Ordering::Release);
    }

    /// What the rank does, as far as it has said.
    pub(crate) fn now(&self) -> At {
        let packed = self.0.load(Ordering::Acquire);
        let operation = Operation::ALL[(packed >> Self::SEQUENCE_BITS) as usize];
        At { operation, sequence: packed & ((1 << Self::SEQUENCE_BITS) - 1) }
    }
}

/// A failure of a rank, as it was reported.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The rank to blame: the one that reported, or one that it waited for in vain.
    pub rank: usize,
    /// What that rank was doing.
    pub at: At,
    /// Why.
    pub error: String,
}

/// Shared by all ranks of one run.
#[derive(Debug)]
pub(crate) struct Run {
    /// Tripped with the first failure, and never without one.
    pub cancel: CancelToken,
    /// One entry per rank.
    pub activity: Box<[CachePadded<Activity>]>,
    /// How long a rank waits for the others before it gives up.
    pub timeout: Duration,
    /// A rank that is to fail.
    pub fault: Option<Fault>,
    /// In the order of time.
    failures: Mutex<Vec<Failure>>,
    /// The ranks that were told to stop: whatever they report from then on follows from that.
    told: Box<[AtomicBool]>,
}

impl Run {
    /// A run of `world_size` ranks, none of which does anything yet.
    pub(crate) fn new(world_size: usize, timeout: Duration, fault: Option<Fault>) -> Self {
        Self {
            cancel: CancelToken::default(),
            activity: (0..world_size).map(|_| CachePadded::default()).collect(),
            timeout,
            fault,
            failures: Mutex::default(),
            told: (0..world_size).map(|_| AtomicBool::default()).collect(),
        }
    }

    /// Fails here if `rank` is to fail at this place.
    pub(crate) fn fault_point(&self, rank: usize, at: Stage, step: u64) -> Result<()> {
        self.fault.map_or(Ok(()), |fault| fault.strike(rank, at, step))
    }

    /// Tells `rank` to stop, if another rank has failed.
    ///
    /// # Errors
    /// [`Error::Cancelled`] with the rank that failed first.
    pub(crate) fn check(&self, rank: usize) -> Result<()> {
        let Some(by) = self.cancel.cancelled_by() else { return Ok(()) };
        self.told[rank].store(true, Ordering::Relaxed);
        Err(Error::Cancelled { by })
    }

    /// Notes that `reporter` failed, unless that is an echo of another failure, and has everybody stop.
    ///
    /// `cause` is this crate's error behind it, if it is one; `text` is what to show.
    pub(crate) fn report(&self, reporter: usize, cause: Option<&Error>, text: String) {
        let mut failures = self.failures();
        let echo = self.told[reporter].load(Ordering::Relaxed)
            || matches!(cause, Some(Error::Cancelled { .. }));
        if !echo || failures.is_empty() {
            let blamed = cause.and_then(Error::blames);
            let (rank, at) = blamed.unwrap_or((reporter, None));
            let at = at.unwrap_or_else(|| self.activity[rank].now());
            // Ranks that wait in vain for the same one tell the same story, each in its words.
            let known = |f: &Failure| f.error == text || (blamed.is_some() && f.rank == rank);
            if !failures.iter().any(known) {
                failures.push(Failure { rank, at, error: text });
            }
        }
        // What the reporter says next, this same error in other words for one, follows from this.
        self.told[reporter].store(true, Ordering::Relaxed);
        let by = failures[0].rank;
        drop(failures);
        self.cancel.cancel(by);
    }

    /// All failures so far, the earliest first.
    pub(crate) fn failures(&self) -> MutexGuard<'_, Vec<Failure>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that `rank` has ended its function, and lets those who wait for it see that.
    pub(crate) fn finish(&self, rank: usize) {
        self.activity[rank].enter(Operation::ShutDown, 0);
        self.cancel.wake_all();
    }

    /// Whether `rank` has ended its function.
    pub(crate) fn is_done(&self, rank: usize) -> bool {
        matches!(self.activity[rank].now().operation, Operation::ShutDown | Operation::Done)
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
        assert_eq!(activity.now(), At { operation: Operation::Function, sequence: 0 });
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

    #[test]
    fn what_a_rank_says_after_it_was_told_to_stop_is_an_echo() {
        let run = Run::new(3, Duration::from_secs(1), None);
        run.check(0).unwrap();
        run.report(1, None, "the cause".into());
        assert!(matches!(run.check(0), Err(Error::Cancelled { by: 1 })));
        run.report(0, None, "an echo in words of its own".into());
        run.report(2, None, "independent".into());
        run.report(2, None, "the same with more words: independent".into());
        let told: Vec<String> = run.failures().iter().map(|f| f.error.clone()).collect();
        assert_eq!(told, ["the cause", "independent"]);
    }
}
