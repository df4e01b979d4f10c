//! [`RemoteSnapshots`]: what the ranks of other processes were last known to do.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::op_snapshots::OpSnapshot;
use super::primitives::{Mutex, MutexGuard};
use crate::operation::Operation;

/// The latest snapshots received from other processes.
#[derive(Debug, Default)]
pub(crate) struct RemoteSnapshots(Mutex<BTreeMap<usize, Received>>);

/// The latest snapshots of one rank.
#[derive(Debug, Clone)]
struct Received {
    /// An upper bound of the sender's start time, on this process's clock. The message read soonest after it was sent
    /// gives the tightest bound.
    start: Instant,
    /// The time from the start of the sender's run until it sent the snapshots.
    sent: Duration,
    seen: Vec<OpSnapshot>,
}

impl RemoteSnapshots {
    /// Stores the snapshots of `rank`, newest last. Its process sent them when its run had lasted for `sent`.
    pub(crate) fn note(&self, rank: usize, sent: Duration, seen: &[OpSnapshot]) {
        self.note_at(Instant::now(), rank, sent, seen);
    }

    /// Stores snapshots that are read at the time `now`.
    fn note_at(&self, now: Instant, rank: usize, sent: Duration, seen: &[OpSnapshot]) {
        let mut all = self.all();
        let start = now.checked_sub(sent).unwrap_or(now);
        let start = all.get(&rank).map_or(start, |known| known.start.min(start));
        all.insert(rank, Received { start, sent, seen: seen.into() });
    }

    /// Returns the snapshots of `rank`, aged to now; empty if none was received.
    pub(crate) fn of(&self, rank: usize) -> Vec<OpSnapshot> {
        self.of_at(Instant::now(), rank)
    }

    fn of_at(&self, now: Instant, rank: usize) -> Vec<OpSnapshot> {
        let Some(Received { start, sent, seen }) = self.all().get(&rank).cloned() else {
            return Vec::new();
        };
        let since = now.saturating_duration_since(start).saturating_sub(sent);
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

    fn all(&self) -> MutexGuard<'_, BTreeMap<usize, Received>> {
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
        snapshots.note(3, theirs.now(), &theirs.recent_ops(0, 8));
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
        snapshots.note(3, theirs.now(), &theirs.recent_ops(0, 8));
        assert_eq!(snapshots.last_entered(3, 0), Some(51));
    }
    /// A process that was killed has sent its last heartbeat long before another process reads it.
    #[test]
    fn age_counts_from_when_the_snapshots_were_sent() {
        let recorder = FlightRecorder::new(1, RECORDS);
        recorder.begin(
            0,
            OpStart::alone(
                OpId { operation: Operation::Backward, sequence: 1 },
                Location::caller(),
            ),
        );
        let seen = recorder.recent_ops(0, 8);
        let (snapshots, start, second) =
            (RemoteSnapshots::default(), Instant::now(), Duration::from_secs(1));
        let age = |now: Instant| snapshots.of_at(now, 3)[0].started_ago - seen[0].started_ago;
        // Read as soon as it was sent, which tells when the sender's run began.
        snapshots.note_at(start + 10 * second, 3, 10 * second, &seen);
        assert_eq!(age(start + 12 * second), 2 * second);
        for read in [27, 29] {
            snapshots.note_at(start + read * second, 3, 20 * second, &seen);
            assert_eq!(age(start + 30 * second), 10 * second);
        }
    }
}
