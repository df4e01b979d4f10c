//! The ranks that others wait for, as the errors of waits that last too long name them. The barrier and the
//! network find them.

use super::RunContext;
use crate::error::{Error, MissingRank};

impl RunContext {
    /// Returns the timeout error of rank `waiting`, which waited for no other ranks than `missing`, of other processes.
    /// Refreshes the state of these ranks first.
    pub(crate) fn timeout_error(&self, waiting: usize, missing: Vec<usize>) -> Error {
        let silent = self.refresh_peers();
        let mut missing = self.last_seen(missing);
        for missing in &mut missing {
            missing.silent = silent.iter().any(|other| other.rank == missing.rank);
        }
        let at = self.activity[waiting].now();
        Error::Timeout { at, waiting, waited: self.timeout, missing }
    }

    /// Returns the ranks of other processes that have not reached the operation of `waiting`, those that wait for no
    /// rank first. Refreshes their state, which takes a moment.
    pub(super) fn missing_in_others(&self, waiting: usize) -> Vec<MissingRank> {
        let silent = self.refresh_peers();
        if !silent.is_empty() {
            return silent;
        }
        let at = self.activity[waiting].now();
        let is_of_another_process = |rank: &usize| self.is_elsewhere(*rank);
        let all = || (0..self.activity.len()).filter(is_of_another_process);
        let mine = self.flight_recorder.seen(waiting);
        let mut missing: Vec<usize> =
            all().filter(|rank| self.remote_snapshots.is_behind(*rank, &mine)).collect();
        if missing.is_empty() {
            missing = all().filter(|rank| self.activity[*rank].now() != at).collect();
        }
        if self.peer_status.is_none() || missing.is_empty() {
            return Vec::new();
        }
        let mut missing = self.missing_ranks(missing);
        missing.sort_by_key(|rank| rank.last_seen.operation.may_wait());
        missing
    }

    /// Returns those of the ranks `members`, in other processes, that have not entered the collective `sequence` of
    /// their group, the furthest behind first; all in other processes if there is no number. Refreshes their state, which
    /// takes a moment.
    pub(crate) fn behind_in_others(
        &self,
        members: &[usize],
        sequence: Option<u64>,
    ) -> Vec<MissingRank> {
        let mut silent = self.refresh_peers();
        silent.retain(|missing| members.contains(&missing.rank));
        if !silent.is_empty() {
            return silent;
        }
        let elsewhere = members.iter().copied().filter(|rank| self.is_elsewhere(*rank));
        let mut behind: Vec<usize> = elsewhere.collect();
        if let Some(sequence) = sequence {
            let is_group = |group: &u32| self.members(*group).is_some_and(|of| *of == *members);
            let Some(group) = self.known_groups().into_keys().find(is_group) else {
                return Vec::new();
            };
            let entered = |rank: &usize| self.remote_snapshots.last_entered(*rank, group);
            behind.retain(|rank| entered(rank).is_none_or(|last| last < sequence));
            behind.sort_by_key(entered);
        }
        self.last_seen(behind)
    }

    /// Returns the ranks `missing` of any process like [`missing_ranks`](Self::missing_ranks). If some are of processes that
    /// do not respond, returns those alone, which takes a moment to find out.
    pub(crate) fn missing_or_silent(&self, missing: Vec<usize>) -> Vec<MissingRank> {
        let is_elsewhere = |rank: &usize| self.is_elsewhere(*rank);
        if missing.iter().any(is_elsewhere) {
            let mut silent = self.refresh_peers();
            silent.retain(|other| missing.contains(&other.rank));
            if !silent.is_empty() {
                return silent;
            }
        }
        self.missing_ranks(missing)
    }

    /// Returns `missing`, the ranks that are waited for, with their last known operations.
    ///
    /// If all of them wait in collectives or messages, another rank delays them. Computing ranks then come first.
    pub(crate) fn missing_ranks(&self, missing: Vec<usize>) -> Vec<MissingRank> {
        let mut missing = self.last_seen(missing);
        if missing.iter().all(|missing| missing.last_seen.operation.may_wait()) {
            let mut computing = self.last_seen(0..self.activity.len());
            computing.retain(|rank| rank.last_seen.operation.is_compute());
            missing.splice(0..0, computing);
        }
        missing
    }

    /// Returns `ranks` with their last known operations.
    pub(crate) fn last_seen(&self, ranks: impl IntoIterator<Item = usize>) -> Vec<MissingRank> {
        let seen = |rank| MissingRank { rank, last_seen: self.activity[rank].now(), silent: false };
        ranks.into_iter().map(seen).collect()
    }
}
