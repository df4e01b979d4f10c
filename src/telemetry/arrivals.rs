//! Which ranks have entered each collective, and which of them came last: for traces, pages and the live view.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::operation::Operation;
use crate::runtime::OpEntry;

/// A collective: its group, and its number among the collectives of the group.
type Key = (u32, u64);

fn key(op: &OpEntry) -> Option<Key> {
    op.group.filter(|_| op.is_collective()).map(|group| (group, op.at.sequence))
}

/// A collective that ranks have entered, as far as their times are known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entered {
    pub operation: Operation,
    /// The number of ranks that have entered it.
    ranks: usize,
    /// When the first rank entered it.
    pub first: Duration,
    /// When the last rank entered it.
    pub last: Duration,
    /// The rank that came last.
    pub last_rank: usize,
}

/// The arrivals of ranks at collectives.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// The ranks of each group. Group 0 has all ranks.
    groups: BTreeMap<u32, Arc<[usize]>>,
    entered: HashMap<Key, Entered>,
    /// The number of the newest collective that a rank has entered in a group.
    newest: HashMap<(usize, u32), u64>,
}

impl Arrivals {
    /// Returns no arrivals yet, of `world_size` ranks with these groups besides that of all ranks.
    pub(super) fn new(world_size: usize, groups: &BTreeMap<u32, Arc<[usize]>>) -> Self {
        let mut groups = groups.clone();
        groups.insert(0, (0..world_size).collect());
        Self { groups, entered: HashMap::new(), newest: HashMap::new() }
    }

    /// Adds the operations of `rank`. `is_timed`: whether their times are on the clock of all others.
    pub(super) fn add(&mut self, rank: usize, ops: &[OpEntry], is_timed: bool) {
        for (op, key) in ops.iter().filter_map(|op| Some((op, key(op)?))) {
            let newest = self.newest.entry((rank, key.0)).or_insert(key.1);
            *newest = key.1.max(*newest);
            if !is_timed {
                continue;
            }
            let at = op.started_at;
            let entered = self.entered.entry(key).or_insert(Entered {
                operation: op.at.operation,
                ranks: 0,
                first: at,
                last: at,
                last_rank: rank,
            });
            entered.ranks += 1;
            entered.first = entered.first.min(at);
            if (at, rank) > (entered.last, entered.last_rank) {
                entered.last = at;
                entered.last_rank = rank;
            }
        }
    }

    /// Returns the collective `op` if all ranks of its group are known to have entered it. A process does not know that
    /// of a collective with ranks of other processes.
    pub(super) fn complete(&self, op: &OpEntry) -> Option<&Entered> {
        let key = key(op)?;
        self.entered.get(&key).filter(|entered| self.is_complete(key, entered))
    }

    fn is_complete(&self, (group, _): Key, entered: &Entered) -> bool {
        self.groups.get(&group).is_some_and(|members| members.len() == entered.ranks)
    }

    /// Returns the collectives of several ranks that all of them have entered, oldest first: the group and the number
    /// of each.
    pub(super) fn all_complete(&self) -> Vec<(Key, Entered)> {
        let complete = self.entered.iter().map(|(key, entered)| (*key, *entered));
        let complete =
            complete.filter(|(key, entered)| entered.ranks > 1 && self.is_complete(*key, entered));
        let mut complete: Vec<(Key, Entered)> = complete.collect();
        complete.sort_by_key(|(_, entered)| (entered.last, entered.last_rank));
        complete
    }

    /// Returns the ranks that are not known to have entered the collective `op`.
    pub(super) fn missing(&self, op: &OpEntry) -> impl Iterator<Item = usize> {
        let key = key(op);
        let members = key.and_then(|(group, _)| self.groups.get(&group));
        members.into_iter().flat_map(|members| members.iter().copied()).filter(move |rank| {
            key.is_some_and(|(group, sequence)| {
                self.newest.get(&(*rank, group)).is_none_or(|newest| *newest < sequence)
            })
        })
    }
}
