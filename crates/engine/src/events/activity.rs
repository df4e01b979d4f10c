//! What all ranks do: their newest operations at one moment of a run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::{collective, has_entered};
use crate::operation::{OpId, Operation};
use crate::runtime::{HEARTBEAT_INTERVAL, OpEntry, RankStatus, RunContext};

/// The number of newest entries that a snapshot reads: of all ranks together, and the limits for each.
const ENTRIES: usize = 4096;
const ENTRIES_PER_RANK: [usize; 2] = [16, 256];

/// The ranks of a run, to look at while they work. They do not notice it.
#[derive(Debug)]
pub struct RanksActivity {
    run: Arc<RunContext>,
    /// The device of each rank, as `CPU:0`.
    pub labels: Vec<String>,
}

impl RanksActivity {
    pub(crate) fn new(run: &Arc<RunContext>, labels: Vec<String>) -> Arc<Self> {
        Arc::new(Self { run: run.clone(), labels })
    }

    /// Returns what the ranks do now: those of this process from the flight recorder, others from heartbeats.
    pub fn snapshot(&self) -> RunSnapshot {
        let run = &self.run;
        let [least, most] = ENTRIES_PER_RANK;
        let entries = (ENTRIES / run.local_ranks.len().max(1)).clamp(least, most) as u64;
        let recorder = &run.flight_recorder;
        let now = recorder.now();
        let of_rank = |rank: usize| {
            if !run.local_ranks.contains(&rank) {
                let Some((status, age)) = run.remote_snapshots.heartbeat(rank, now) else {
                    let at = OpId { operation: Operation::Start, sequence: 0 };
                    return RankSnapshot { at, ops: Vec::new(), source: Source::Unknown };
                };
                let RankStatus { at, seen: ops } = status;
                return RankSnapshot { at, ops, source: Source::Heartbeat(age) };
            }
            let newest = recorder.entries(rank, recorder.count(rank).saturating_sub(entries));
            let lasting = newest.filter(|op| op.at.operation != Operation::Gradient);
            let at = run.activity[rank].now();
            // As of `now`: the ranks are read one after the other.
            let ops = lasting.filter_map(|op| op.seen_at(now)).collect();
            RankSnapshot { at, ops, source: Source::Direct }
        };
        RunSnapshot {
            now,
            ranks: (0..run.activity.len()).map(of_rank).collect(),
            groups: run.known_groups(),
            failed: run.cancel.cancelled_by(),
        }
    }
}

/// The newest operations of all ranks at one moment.
#[derive(Debug, Clone, Default)]
pub struct RunSnapshot {
    /// The moment, on the clock of all times below.
    pub now: Duration,
    /// In the order of ranks.
    pub ranks: Vec<RankSnapshot>,
    /// The ranks of each group. Group 0 has all ranks.
    pub groups: BTreeMap<u32, Arc<[usize]>>,
    /// The rank that failed first; `None` if none has.
    pub failed: Option<usize>,
}

/// The newest operations of one rank.
#[derive(Debug, Clone)]
pub struct RankSnapshot {
    /// The operation that the rank recorded last.
    pub at: OpId,
    /// Oldest first.
    pub ops: Vec<OpEntry>,
    /// How this is known.
    pub source: Source,
}

/// How the operations of a rank are known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// At once.
    Direct,
    /// From a heartbeat of this age.
    Heartbeat(Duration),
    /// Not at all: there is no heartbeat yet.
    Unknown,
}

impl RunSnapshot {
    /// Returns the ranks that have not entered the collective `op`, as far as is known.
    pub fn missing(&self, op: &OpEntry) -> Vec<usize> {
        let Some(collective) = collective(op) else { return Vec::new() };
        let is_missing = |rank: &usize| {
            let Some(RankSnapshot { ops, source, .. }) = self.ranks.get(*rank) else {
                return false;
            };
            let is_known = match source {
                Source::Direct => true,
                // A heartbeat from before the wait says nothing about it.
                Source::Heartbeat(age) => {
                    self.now.saturating_sub(age.saturating_add(HEARTBEAT_INTERVAL)) >= op.started_at
                }
                Source::Unknown => false,
            };
            is_known && !has_entered(ops, collective)
        };
        let members = self.groups.get(&collective.0).into_iter().flat_map(|members| members.iter());
        members.copied().filter(is_missing).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Operation;

    fn all_reduce(sequence: u64, from: u64, to: Option<u64>) -> OpEntry {
        let at = OpId { operation: Operation::AllReduce, sequence };
        OpEntry {
            group: Some(0),
            finished_at: to.map(Duration::from_millis),
            ..OpEntry::new(at, Duration::from_millis(from))
        }
    }

    fn snapshot(now: u64, ranks: Vec<Vec<OpEntry>>) -> RunSnapshot {
        let at = OpId { operation: Operation::UserCode, sequence: 0 };
        let rank = |ops| RankSnapshot { at, ops, source: Source::Direct };
        let groups = [(0, (0..ranks.len()).collect())].into();
        let ranks = ranks.into_iter().map(rank).collect();
        RunSnapshot { now: Duration::from_millis(now), ranks, groups, failed: None }
    }

    #[test]
    fn rank_that_has_not_entered_is_missing() {
        let waiting = || vec![all_reduce(7, 10, None)];
        let snapshot = snapshot(30, vec![waiting(), vec![all_reduce(6, 1, Some(2))], waiting()]);
        assert_eq!(snapshot.missing(&snapshot.ranks[0].ops[0]), [1]);
    }

    #[test]
    fn heartbeat_from_before_a_wait_does_not_name_a_rank() {
        let mut snapshot =
            snapshot(1000, vec![vec![all_reduce(7, 800, None)], vec![all_reduce(3, 1, None)]]);
        snapshot.ranks[1].source = Source::Heartbeat(Duration::from_millis(100));
        assert!(snapshot.missing(&snapshot.ranks[0].ops[0]).is_empty());
        snapshot.now = Duration::from_millis(2000);
        assert_eq!(snapshot.missing(&snapshot.ranks[0].ops[0]), [1]);
    }
}
