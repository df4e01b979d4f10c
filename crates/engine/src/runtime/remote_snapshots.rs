//! [`RemoteSnapshots`]: what the ranks of other processes were last known to do.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::primitives::Mutex;
use super::{OpEntry, PeerHeartbeat, RankStatus};
use crate::operation::Operation;

/// The latest heartbeats received from other processes.
#[derive(Debug, Default)]
pub(crate) struct RemoteSnapshots(Mutex<BTreeMap<usize, Received>>);

/// The latest heartbeat of one rank.
#[derive(Debug, Clone)]
struct Received {
    /// An upper bound of the sender's start time, on this process's clock. The message read soonest after it was sent
    /// gives the tightest bound.
    start: Instant,
    heartbeat: PeerHeartbeat,
}

impl RemoteSnapshots {
    /// Stores the heartbeat of `rank`.
    pub(crate) fn note(&self, rank: usize, heartbeat: PeerHeartbeat) {
        self.note_at(Instant::now(), rank, heartbeat);
    }

    /// Stores a heartbeat that is read at the time `read_at`.
    fn note_at(&self, read_at: Instant, rank: usize, heartbeat: PeerHeartbeat) {
        let mut all = self.0.lock();
        let start = read_at.checked_sub(heartbeat.sent_after()).unwrap_or(read_at);
        let start = all.get(&rank).map_or(start, |known| known.start.min(start));
        all.insert(rank, Received { start, heartbeat });
    }

    /// Returns the status of `rank` and its age, with the times of operations on a clock that shows `now`. `None` if
    /// none was received.
    pub(crate) fn heartbeat(&self, rank: usize, now: Duration) -> Option<(RankStatus, Duration)> {
        self.heartbeat_at(Instant::now(), rank, now)
    }

    fn heartbeat_at(
        &self,
        read_at: Instant,
        rank: usize,
        now: Duration,
    ) -> Option<(RankStatus, Duration)> {
        let Received { start, heartbeat } = self.0.lock().get(&rank).cloned()?;
        let since_start = read_at.saturating_duration_since(start);
        let age = since_start.saturating_sub(heartbeat.sent_after());
        let sender_now = since_start.saturating_sub(heartbeat.suspended);
        let convert = |time: Duration| now.saturating_sub(sender_now.saturating_sub(time));
        let RankStatus { at, seen } = heartbeat.status;
        let seen = seen.into_iter().map(|op| op.convert_times(convert)).collect();
        Some((RankStatus { at, seen }, age))
    }

    /// Returns the operations of `rank`, with times on a clock that shows `now`; empty if none was received.
    pub(crate) fn of(&self, rank: usize, now: Duration) -> Vec<OpEntry> {
        self.heartbeat(rank, now).map_or(Vec::new(), |(status, _)| status.seen)
    }

    /// Returns whether `rank` has not yet entered the last collective of all ranks in `seen`, as far as its snapshots
    /// show. While `rank` is entering a collective, [`RunContext::activity`](super::RunContext::activity) already shows
    /// it.
    pub(crate) fn is_behind(&self, rank: usize, seen: &[OpEntry]) -> bool {
        let is_global = |op: &&OpEntry| op.group == Some(0);
        let Some(last) = seen.iter().rev().find(is_global) else { return false };
        let all = self.0.lock();
        let theirs =
            all.get(&rank).into_iter().flat_map(|received| &received.heartbeat.status.seen);
        let theirs = theirs.filter(is_global).map(|op| op.at.sequence).max();
        theirs.is_none_or(|sequence| sequence < last.at.sequence)
    }

    /// Returns the number of the last collective of `group` that `rank` has entered; `None` if its snapshots have none.
    pub(crate) fn last_entered(&self, rank: usize, group: u32) -> Option<u64> {
        let entered = |op: &OpEntry| match op.at.operation {
            Operation::Synchronize => op.at.sequence.checked_sub(1), // it has the number of the next collective
            _ => Some(op.at.sequence),
        };
        let all = self.0.lock();
        let theirs =
            all.get(&rank).into_iter().flat_map(|received| &received.heartbeat.status.seen);
        theirs.filter(|op| op.group == Some(group)).filter_map(entered).max()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::operation::OpId;
    use crate::runtime::OpStart;
    use crate::runtime::flight_recorder::{ENTRIES, FlightRecorder};

    fn heartbeat(sent: Duration, seen: Vec<OpEntry>) -> PeerHeartbeat {
        let at = OpId { operation: Operation::Backward, sequence: 50 };
        PeerHeartbeat { sent, suspended: Duration::ZERO, status: RankStatus { at, seen } }
    }

    #[test]
    fn snapshots_of_another_process_age_and_show_who_is_behind() {
        let begin_on = |recorder: &FlightRecorder, operation, sequence, group| {
            let at = OpId { operation, sequence };
            recorder.begin(0, OpStart { group, ..OpStart::alone(at, Location::caller()) })
        };
        let theirs = FlightRecorder::new(1, ENTRIES);
        let barrier = begin_on(&theirs, Operation::Barrier, 4, Some(9));
        theirs.end(0, barrier);
        begin_on(&theirs, Operation::Backward, 50, None);
        begin_on(&theirs, Operation::AllReduce, 51, Some(0));
        let snapshots = RemoteSnapshots::default();
        assert!(snapshots.of(3, Duration::ZERO).is_empty());
        snapshots.note(3, heartbeat(theirs.now(), theirs.recent_ops(0, 8)));
        let [barrier, backward, _] = &snapshots.of(3, Duration::from_secs(60))[..] else {
            panic!("three")
        };
        assert!(barrier.finished_at >= Some(barrier.started_at));
        let line = backward.source_line.to_string();
        assert!(backward.is_open_phase() && line.contains("remote_snapshots.rs:"), "{line}");
        // The rank has entered the same collectives as `mine`, but not the next one.
        let mine = FlightRecorder::new(1, ENTRIES);
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
        snapshots.note(3, heartbeat(theirs.now(), theirs.recent_ops(0, 8)));
        assert_eq!(snapshots.last_entered(3, 0), Some(51));
    }
    /// A process that was killed has sent its last heartbeat long before another process reads it.
    #[test]
    fn age_counts_from_when_the_snapshots_were_sent() {
        let recorder = FlightRecorder::new(1, ENTRIES);
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
        let now = 100 * second;
        // The time on the sender's clock, and the age of its heartbeat.
        let read = |read_at: Instant| {
            let (status, age) = snapshots.heartbeat_at(read_at, 3, now).unwrap();
            (now - status.seen[0].started_at + seen[0].started_at, age)
        };
        // Read as soon as it was sent, which tells when the sender's run began.
        snapshots.note_at(start + 10 * second, 3, heartbeat(10 * second, seen.clone()));
        assert_eq!(read(start + 12 * second), (12 * second, 2 * second));
        for seconds in [27, 29] {
            snapshots.note_at(start + seconds * second, 3, heartbeat(20 * second, seen.clone()));
            assert_eq!(read(start + 30 * second), (30 * second, 10 * second));
        }
    }
}
