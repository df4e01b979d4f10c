//! The ranks that the others wait for: which rank came last in the newest collectives, and which is hardly ever in one.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::operation::{OpId, Operation};
use crate::telemetry::arrivals::Arrivals;

/// How many of the newest collectives count.
const KEPT: usize = 100;

/// Which rank came last in the newest collectives.
#[derive(Debug, Clone, Default)]
pub(super) struct LastRanks {
    /// The newest collective of each group that has been counted.
    counted: HashMap<u32, u64>,
    /// The newest collectives, newest last, at most [`KEPT`].
    newest: VecDeque<Last>,
}

/// The rank that came last in a collective.
#[derive(Debug, Clone, Copy)]
struct Last {
    rank: usize,
    at: OpId,
    /// The time from the first arrival to the last.
    waited: Duration,
    when: Duration,
}

impl LastRanks {
    /// Counts the collectives of a snapshot that have not been counted yet.
    pub(super) fn count(&mut self, arrivals: &Arrivals) {
        for ((group, sequence), entered) in arrivals.all_complete() {
            let is_new = self.counted.get(&group).is_none_or(|counted| *counted < sequence);
            if !is_new {
                continue;
            }
            self.counted.insert(group, sequence);
            self.newest.push_back(Last {
                rank: entered.last_rank,
                at: OpId { operation: entered.operation, sequence },
                waited: entered.last.saturating_sub(entered.first),
                when: entered.last,
            });
        }
        self.newest.drain(..self.newest.len().saturating_sub(KEPT));
    }

    /// Returns the share of the newest collectives in which `rank` came last, from 0 to 1; `None` without any.
    pub(super) fn share(&self, rank: usize) -> Option<f64> {
        let times = self.newest.iter().filter(|last| last.rank == rank).count();
        (!self.newest.is_empty()).then(|| times as f64 / self.newest.len() as f64)
    }

    /// Returns the ranks that came last in the newest collectives, the newest first.
    pub(super) fn ranks(&self) -> impl Iterator<Item = usize> {
        self.newest.iter().rev().map(|last| last.rank)
    }

    /// Returns a line for each of the newest collectives, the newest first: `all_reduce #7: rank 1, 49.5 ms after the
    /// first`.
    pub(super) fn lines(&self) -> impl Iterator<Item = String> {
        self.newest.iter().rev().map(|Last { rank, at, waited, .. }| {
            let waited = waited.as_secs_f64() * 1e3;
            format!("{at}: rank {rank}, {waited:.3} ms after the first")
        })
    }

    /// Returns a sentence on the rank that the others wait for most of the time; `None` if no rank stands out.
    pub(super) fn straggler(&self) -> Option<String> {
        let count = self.newest.len();
        let times = |rank| self.newest.iter().filter(move |last| last.rank == rank);
        let waited_for = |rank| times(rank).map(|last| last.waited).sum::<Duration>();
        // Of many buckets only the first has to wait for a rank that is slow: the time says more than the number.
        let rank = self.ranks().max_by_key(|rank| waited_for(*rank))?;
        let (mine, waited) = (times(rank).count(), waited_for(rank));
        let all_waited: Duration = self.newest.iter().map(|last| last.waited).sum();
        let time = self.newest.back()?.when.saturating_sub(self.newest.front()?.when);
        // Below these shares it is chance, or does not matter.
        let counts = count >= 4 && 2 * waited > all_waited && 10 * waited > time;
        let all = |operation| self.newest.iter().all(|last| last.at.operation == operation);
        let what = if all(Operation::AllReduce) { "all_reduces" } else { "collectives" };
        let each = waited.as_secs_f64() * 1e3 / mine.max(1) as f64;
        counts.then(|| {
            format!(
                "rank {rank} came last in {mine} of {count} {what}; the others waited {each:.1} ms"
            )
        })
    }
}

/// The share of snapshots in which each rank was in a collective: what is known of the ranks of other processes. The rank
/// that the others wait for is hardly ever there.
#[derive(Debug, Clone, Default)]
pub(super) struct Presence {
    /// For each rank of the newest snapshots: whether it was in a collective.
    snapshots: VecDeque<Vec<bool>>,
}

impl Presence {
    /// Counts a snapshot; `is_there` says of each rank whether it was in a collective.
    pub(super) fn count(&mut self, is_there: Vec<bool>) {
        self.snapshots.push_back(is_there);
        self.snapshots.drain(..self.snapshots.len().saturating_sub(KEPT));
    }

    /// Returns the share of snapshots in which `rank` was in a collective, from 0 to 1; `None` without any.
    pub(super) fn share(&self, rank: usize) -> Option<f64> {
        let times =
            self.snapshots.iter().filter(|snapshot| snapshot.get(rank) == Some(&true)).count();
        (!self.snapshots.is_empty()).then(|| times as f64 / self.snapshots.len() as f64)
    }

    /// Returns a sentence on the rank that the others wait for; `None` if no rank stands out.
    pub(super) fn straggler(&self) -> Option<String> {
        let ranks = self.snapshots.back()?.len();
        let mut shares: Vec<(f64, usize)> =
            (0..ranks).filter_map(|rank| Some((self.share(rank)?, rank))).collect();
        shares.sort_by(|a, b| a.0.total_cmp(&b.0));
        let [(least, rank), (next, _), ..] = shares[..] else { return None };
        let stands_out = self.snapshots.len() >= 10 && next - least > 0.3;
        let percent = |share: f64| 100.0 * share;
        stands_out.then(|| {
            format!(
                "the others wait for rank {rank}: in collectives {:.0} % of the time, they {:.0} %",
                percent(least),
                percent(next)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::OpEntry;
    use crate::telemetry::live::snapshot::{RankSnapshot, RunSnapshot, Source};

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
        let ranks = ranks.into_iter().map(rank).collect();
        RunSnapshot { now: Duration::from_millis(now), ranks, ..RunSnapshot::default() }
    }

    #[test]
    fn last_rank_is_counted_once_for_each_collective() {
        let mut last = LastRanks::default();
        let (mut quick, mut slow) = (Vec::new(), Vec::new());
        for number in 0..6 {
            let start = 100 * number;
            quick.push(all_reduce(number, start, Some(start + 51)));
            slow.push(all_reduce(number, start + 50, Some(start + 51)));
            last.count(&snapshot(start + 60, vec![quick.clone(), slow.clone()]).arrivals());
        }
        assert_eq!((last.share(0), last.share(1)), (Some(0.0), Some(1.0)));
        let line = last.lines().next().unwrap();
        assert_eq!(line, "all_reduce #5: rank 1, 50.000 ms after the first");
        let told = last.straggler().unwrap();
        assert_eq!(told, "rank 1 came last in 6 of 6 all_reduces; the others waited 50.0 ms");
    }

    /// Of three buckets the first waits for rank 1; at the others rank 0 happens to be last.
    #[test]
    fn straggler_is_the_rank_that_the_others_wait_for_longest() {
        let (mut quick, mut slow) = (Vec::new(), Vec::new());
        for number in 0..12 {
            let start = 100 * (number / 3) + 60 + number % 3;
            let [first, second] =
                if number % 3 == 0 { [start - 50, start] } else { [start + 1, start] };
            quick.push(all_reduce(number, first, Some(start + 1)));
            slow.push(all_reduce(number, second, Some(start + 1)));
        }
        let mut last = LastRanks::default();
        last.count(&snapshot(1000, vec![quick, slow]).arrivals());
        assert_eq!((last.share(0), last.share(1)), (Some(8.0 / 12.0), Some(4.0 / 12.0)));
        assert!(last.straggler().unwrap().starts_with("rank 1 came last in 4 of 12 all_reduces"));
    }

    #[test]
    fn rank_that_has_not_entered_is_missing() {
        let waiting = || vec![all_reduce(7, 10, None)];
        let snapshot = snapshot(30, vec![waiting(), vec![all_reduce(6, 1, Some(2))], waiting()]);
        let (arrivals, op) = (snapshot.arrivals(), &snapshot.ranks[0].ops[0]);
        assert_eq!(snapshot.missing(&arrivals, op), [1]);
        assert_eq!(snapshot.last_arrival(&arrivals, op), Some(snapshot.now));
    }

    #[test]
    fn heartbeat_from_before_a_wait_does_not_name_a_rank() {
        let mut snapshot =
            snapshot(1000, vec![vec![all_reduce(7, 800, None)], vec![all_reduce(3, 1, None)]]);
        snapshot.ranks[1].source = Source::Heartbeat(Duration::from_millis(100));
        assert!(snapshot.missing(&snapshot.arrivals(), &snapshot.ranks[0].ops[0]).is_empty());
        snapshot.now = Duration::from_millis(2000);
        assert_eq!(snapshot.missing(&snapshot.arrivals(), &snapshot.ranks[0].ops[0]), [1]);
    }

    #[test]
    fn rank_that_is_hardly_ever_in_collectives_is_the_straggler() {
        let mut presence = Presence::default();
        for number in 0..20 {
            assert_eq!(presence.straggler().is_some(), number >= 10, "{number}");
            presence.count(vec![true, false, true]);
        }
        assert!(presence.straggler().unwrap().contains("wait for rank 1: in collectives 0 %"));
    }
}
