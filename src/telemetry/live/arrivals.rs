//! Which rank came last in each collective, and which ranks a collective still waits for.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::look::{Look, Op, Source};
use crate::operation::{OpId, Operation};

/// The interval between heartbeats: a status from one may be this old when it is read.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(500);

/// Returns whether an operation is a collective in which ranks wait for others.
pub(super) fn is_collective(op: &Op) -> bool {
    op.group.is_some() && op.at.operation != Operation::Synchronize
}

/// A collective: its group, and its number among the collectives of the group.
type Key = (u32, u64);

fn key(op: &Op) -> Option<Key> {
    op.group.filter(|_| is_collective(op)).map(|group| (group, op.at.sequence))
}

/// The ranks that have entered a collective, as far as a look shows.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    ranks: usize,
    first: Duration,
    last: (Duration, usize),
    operation: Operation,
}

/// The arrivals at the collectives of one look.
#[derive(Debug)]
pub(super) struct Arrivals<'a> {
    look: &'a Look,
    known: HashMap<Key, Arrival>,
    /// For each rank, the number of its newest collective in each group; ranks known from heartbeats included.
    newest: Vec<HashMap<u32, u64>>,
    /// The ranks of group 0.
    all: Arc<[usize]>,
}

impl<'a> Arrivals<'a> {
    pub(super) fn new(look: &'a Look) -> Self {
        let mut known: HashMap<Key, Arrival> = HashMap::new();
        let mut newest = vec![HashMap::new(); look.ranks.len()];
        for (rank, ops) in look.ranks.iter().enumerate() {
            for (op, key) in ops.ops.iter().filter_map(|op| Some((op, key(op)?))) {
                let sequence = newest[rank].entry(key.0).or_insert(key.1);
                *sequence = key.1.max(*sequence);
                if ops.source != Source::Direct {
                    continue; // the clock is that of another process
                }
                let mine = (op.started_at, rank);
                let arrival = known.entry(key).or_insert(Arrival {
                    ranks: 0,
                    first: mine.0,
                    last: mine,
                    operation: op.at.operation,
                });
                arrival.ranks += 1;
                arrival.first = arrival.first.min(mine.0);
                arrival.last = arrival.last.max(mine);
            }
        }
        let all = (0..look.ranks.len()).collect();
        Self { look, known, newest, all }
    }

    /// Returns the ranks of a group; `None` if it is unknown.
    fn members(&self, group: u32) -> Option<&Arc<[usize]>> {
        if group == 0 { Some(&self.all) } else { self.look.groups.get(&group) }
    }

    /// Returns the ranks that have not entered the collective `op`, as far as is known.
    pub(super) fn missing(&self, op: &Op) -> Vec<usize> {
        let Some((group, sequence)) = key(op) else { return Vec::new() };
        let Some(members) = self.members(group) else { return Vec::new() };
        let has_entered = |rank: usize| {
            let may_have = match self.look.ranks[rank].source {
                Source::Direct => false,
                // A heartbeat from before the wait says nothing about it.
                Source::Heartbeat(age) => {
                    self.look.now.saturating_sub(age.saturating_add(HEARTBEAT)) < op.started_at
                }
                Source::Unknown(_) => true,
            };
            may_have || self.newest[rank].get(&group).is_some_and(|newest| *newest >= sequence)
        };
        let here = members.iter().copied().filter(|&rank| rank < self.newest.len());
        here.filter(|&rank| !has_entered(rank)).collect()
    }

    /// Returns when the last rank entered the collective `op`, or now if one has not. `None` if that is unknown.
    pub(super) fn last(&self, op: &Op) -> Option<Duration> {
        let key = key(op)?;
        let members = self.members(key.0)?;
        let arrival = self.known.get(&key)?;
        if arrival.ranks == members.len() {
            return Some(arrival.last.0);
        }
        (op.is_open() && !self.missing(op).is_empty()).then_some(self.look.now)
    }

    /// Returns the collectives that all ranks of their group have entered, oldest first.
    fn complete(&self) -> Vec<(Key, Arrival)> {
        let is_complete = |(key, arrival): &(&Key, &Arrival)| {
            arrival.ranks > 1
                && self.members(key.0).is_some_and(|members| members.len() == arrival.ranks)
        };
        let complete = self.known.iter().filter(is_complete);
        let mut complete: Vec<_> = complete.map(|(key, arrival)| (*key, *arrival)).collect();
        complete.sort_by_key(|(_, arrival)| arrival.last);
        complete
    }
}

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
    /// Counts the collectives of a look that have not been counted yet.
    pub(super) fn count(&mut self, arrivals: &Arrivals<'_>) {
        for ((group, sequence), arrival) in arrivals.complete() {
            let is_new = self.counted.get(&group).is_none_or(|counted| *counted < sequence);
            if !is_new {
                continue;
            }
            self.counted.insert(group, sequence);
            let (when, rank) = arrival.last;
            let waited = when.saturating_sub(arrival.first);
            let at = OpId { operation: arrival.operation, sequence };
            self.newest.push_back(Last { rank, at, waited, when });
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

/// The share of looks in which each rank was in a collective: what is known of the ranks of other processes. The rank
/// that the others wait for is hardly ever there.
#[derive(Debug, Clone, Default)]
pub(super) struct Presence {
    /// For each rank of the newest looks: whether it was in a collective.
    looks: VecDeque<Vec<bool>>,
}

impl Presence {
    /// Counts a look; `is_there` says of each rank whether it was in a collective.
    pub(super) fn count(&mut self, is_there: Vec<bool>) {
        self.looks.push_back(is_there);
        self.looks.drain(..self.looks.len().saturating_sub(KEPT));
    }

    /// Returns the share of looks in which `rank` was in a collective, from 0 to 1; `None` without any.
    pub(super) fn share(&self, rank: usize) -> Option<f64> {
        let times = self.looks.iter().filter(|look| look.get(rank) == Some(&true)).count();
        (!self.looks.is_empty()).then(|| times as f64 / self.looks.len() as f64)
    }

    /// Returns a sentence on the rank that the others wait for; `None` if no rank stands out.
    pub(super) fn straggler(&self) -> Option<String> {
        let ranks = self.looks.back()?.len();
        let mut shares: Vec<(f64, usize)> =
            (0..ranks).filter_map(|rank| Some((self.share(rank)?, rank))).collect();
        shares.sort_by(|a, b| a.0.total_cmp(&b.0));
        let [(least, rank), (next, _), ..] = shares[..] else { return None };
        let stands_out = self.looks.len() >= 10 && next - least > 0.3;
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
    use crate::telemetry::live::look::{RankLook, Site};

    fn all_reduce(sequence: u64, from: u64, to: Option<u64>) -> Op {
        Op {
            at: OpId { operation: Operation::AllReduce, sequence },
            group: Some(0),
            bucket: None,
            on_comm_thread: false,
            started_at: Duration::from_millis(from),
            finished_at: to.map(Duration::from_millis),
            site: Site::Unknown,
        }
    }

    fn look(now: u64, ranks: Vec<Vec<Op>>) -> Look {
        let at = OpId { operation: Operation::UserCode, sequence: 0 };
        let rank = |ops| RankLook { at, ops, source: Source::Direct };
        let ranks = ranks.into_iter().map(rank).collect();
        Look { now: Duration::from_millis(now), ranks, ..Look::default() }
    }

    #[test]
    fn last_rank_is_counted_once_for_each_collective() {
        let mut last = LastRanks::default();
        let (mut quick, mut slow) = (Vec::new(), Vec::new());
        for number in 0..6 {
            let start = 100 * number;
            quick.push(all_reduce(number, start, Some(start + 51)));
            slow.push(all_reduce(number, start + 50, Some(start + 51)));
            last.count(&Arrivals::new(&look(start + 60, vec![quick.clone(), slow.clone()])));
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
        last.count(&Arrivals::new(&look(1000, vec![quick, slow])));
        assert_eq!((last.share(0), last.share(1)), (Some(8.0 / 12.0), Some(4.0 / 12.0)));
        assert!(last.straggler().unwrap().starts_with("rank 1 came last in 4 of 12 all_reduces"));
    }

    #[test]
    fn rank_that_has_not_entered_is_missing() {
        let waiting = || vec![all_reduce(7, 10, None)];
        let look = look(30, vec![waiting(), vec![all_reduce(6, 1, Some(2))], waiting()]);
        let arrivals = Arrivals::new(&look);
        assert_eq!(arrivals.missing(&look.ranks[0].ops[0]), [1]);
        assert_eq!(arrivals.last(&look.ranks[0].ops[0]), Some(look.now));
    }

    #[test]
    fn heartbeat_from_before_a_wait_does_not_name_a_rank() {
        let mut look =
            look(1000, vec![vec![all_reduce(7, 800, None)], vec![all_reduce(3, 1, None)]]);
        look.ranks[1].source = Source::Heartbeat(Duration::from_millis(100));
        assert!(Arrivals::new(&look).missing(&look.ranks[0].ops[0]).is_empty());
        look.now = Duration::from_millis(2000);
        assert_eq!(Arrivals::new(&look).missing(&look.ranks[0].ops[0]), [1]);
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
