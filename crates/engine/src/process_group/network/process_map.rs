//! The map of a group: the ranks of each process.

use std::ops::Range;

/// The processes of a group: the group ranks of each, and the index of this process. A map of hosts is one too: each host
/// whose processes share memory counts as one process there.
#[derive(Debug, Clone)]
pub(crate) struct ProcessMap {
    pub processes: Vec<Range<usize>>,
    pub mine: usize,
}

impl ProcessMap {
    /// Returns the map in which neighbours of the same host count as one process. `host_of` returns the host of a group
    /// rank.
    pub(crate) fn by_host(&self, host_of: impl Fn(usize) -> usize) -> Self {
        let same = |a: &Range<usize>, b: &Range<usize>| host_of(a.start) == host_of(b.start);
        let ranks = |all: &[Range<usize>]| all[0].start..all[all.len() - 1].end;
        let hosts: Vec<Range<usize>> = self.processes.chunk_by(same).map(ranks).collect();
        let group_rank = self.here().start;
        let mine = hosts.iter().position(|ranks| ranks.contains(&group_rank)).unwrap_or(0);
        Self { processes: hosts, mine }
    }

    /// Returns the number of processes.
    pub(crate) fn len(&self) -> usize {
        self.processes.len()
    }

    /// Returns the group ranks of this process.
    pub(crate) fn here(&self) -> Range<usize> {
        self.processes[self.mine].clone()
    }

    /// Returns the index of the process that has the group rank `group_rank`.
    pub(crate) fn process_of(&self, group_rank: usize) -> usize {
        self.processes.iter().position(|ranks| ranks.contains(&group_rank)).unwrap_or(0)
    }
}
