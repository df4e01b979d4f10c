//! [`RemoteSnapshots`]: what the ranks of other processes were last known to do.

use std::collections::BTreeMap;
use std::time::Instant;

use super::op_snapshots::OpSnapshot;
use super::primitives::{Mutex, MutexGuard};
use crate::operation::Operation;

/// The latest snapshots received from other processes, with the time of receipt.
#[derive(Debug, Default)]
pub(crate) struct RemoteSnapshots(Mutex<BTreeMap<usize, (Instant, Vec<OpSnapshot>)>>);

impl RemoteSnapshots {
    /// Stores the snapshots of `rank`, newest last.
    pub(crate) fn note(&self, rank: usize, seen: &[OpSnapshot]) {
        self.all().insert(rank, (Instant::now(), seen.into()));
    }

    /// Returns the snapshots of `rank`, aged to now; empty if none was received.
    pub(crate) fn of(&self, rank: usize) -> Vec<OpSnapshot> {
        let Some((when, seen)) = self.all().get(&rank).cloned() else { return Vec::new() };
        let since = when.elapsed();
        seen.into_iter().map(|snapshot| snapshot.later(since)).collect()
    }

    /// Returns whether `rank` has not yet entered the last collective of all ranks in `seen`, as far as its snapshots
    /// show. While `rank` is entering a collective, [`RunContext::activity`](super::RunContext::activity) already shows
    /// it.
    pub(crate) fn is_behind(&self, rank: usize, seen: &[OpSnapshot]) -> bool {
        let is_global = |op: &&OpSnapshot| op.group == Some(0);
        let Some(last) = seen.iter().rev().find(is_global) else { return false };
        let theirs = self.of(rank).iter().filter(is_global).map(|op| op.at.sequence).max();
        theirs.is_none_or(|sequence| sequence < last.at.sequence)
    }

    /// Returns the number of the last collective of `group` that `rank` has entered; `None` if its snapshots have none.
    pub(crate) fn last_entered(&self, rank: usize, group: u32) -> Option<u64> {
        let entered = |op: &OpSnapshot| match op.at.operation {
            Operation::Synchronize => op.at.sequence.checked_sub(1), // it has the number of the next collective
            _ => Some(op.at.sequence),
        };
        let all = self.of(rank);
        all.iter().filter(|op| op.group == Some(group)).filter_map(entered).max()
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<usize, (Instant, Vec<OpSnapshot>)>> {
        self.0.lock()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::operation::OpId;
    use crate::runtime::OpStart;
    use crate::runtime::flight_recorder::{FlightRecorder, RECORDS};

    #[test]
    fn snapshots_of_another_process_age_and_show_who_is_behind() {
        let begin_on = |recorder: &FlightRecorder, operation, sequence, group| {
            let at = OpId { operation, sequence };
            recorder.begin(0, OpStart { group, ..OpStart::alone(at, Location::caller()) })
        };
        let theirs = FlightRecorder::new(1, RECORDS);
        let barrier = begin_on(&theirs, Operation::Barrier, 4, Some(9));
        theirs.end(0, barrier);
        begin_on(&theirs, Operation::Backward, 50, None);
        begin_on(&theirs, Operation::AllReduce, 51, Some(0));
        let snapshots = RemoteSnapshots::default();
        assert!(snapshots.of(3).is_empty());
        snapshots.note(3, &theirs.recent_ops(0, 8));
        let [barrier, backward, _] = &snapshots.of(3)[..] else { panic!("three") };
        assert!(
            barrier.finished_ago.is_some() && barrier.finished_ago <= Some(barrier.started_ago)
        );
        assert!(backward.is_open_phase() && backward.call_site.contains("remote_snapshots.rs:"));
        // The rank has entered the same collectives as `mine`, but not the next one.
        let mine = FlightRecorder::new(1, RECORDS);
        begin_on(&mine, Operation::AllReduce, 51, Some(0));
        assert!(!snapshots.is_behind(3, &mine.seen(0)));
        begin_on(&mine, Operation::AllReduce, 52, Some(0));
        assert!(snapshots.is_behind(3, &mine.seen(0)) && !snapshots.is_behind(3, &[]));
        assert_eq!(
            [0, 9, 5].map(|group| snapshots.last_entered(3, group)),
            [Some(51), Some(4), None]
        );
        // A rank that exchanges a stop request before collective 52 has not entered it.
        begin_on(&theirs, Operation::Synchronize, 52, Some(0));
        snapshots.note(3, &theirs.recent_ops(0, 8));
        assert_eq!(snapshots.last_entered(3, 0), Some(51));
    }
}
