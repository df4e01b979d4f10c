//! Which ranks have entered each collective, and which of them came last: for traces and pages.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::runtime::OpEntry;

/// A collective: its group, and its number among the collectives of the group.
type Key = (u32, u64);

fn key(op: &OpEntry) -> Option<Key> {
    op.group.filter(|_| op.is_collective()).map(|group| (group, op.at.sequence))
}

/// A collective that ranks have entered, as far as their times are known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entered {
    /// The number of ranks that have entered it.
    ranks: usize,
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

    /// Adds the operations of `rank`.
    pub(super) fn add(&mut self, rank: usize, ops: &[OpEntry]) {
        for (op, key) in ops.iter().filter_map(|op| Some((op, key(op)?))) {
            let newest = self.newest.entry((rank, key.0)).or_insert(key.1);
            *newest = key.1.max(*newest);
            let at = op.started_at;
            let first = Entered { ranks: 0, last: at, last_rank: rank };
            let entered = self.entered.entry(key).or_insert(first);
            entered.ranks += 1;
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
        let members = self.groups.get(&key.0)?;
        self.entered.get(&key).filter(|entered| members.len() == entered.ranks)
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
