//! What the ranks of other processes do, from the heartbeats in the store.

use crossbeam::channel::{RecvTimeoutError, never};

use super::{HEARTBEAT_TIMEOUT, Heartbeats};
use crate::error::MissingRank;
use crate::runtime::{Deadline, PeerStatus, RunContext};

impl PeerStatus for Heartbeats {
    /// Reads the heartbeats twice: a process without a new one in between is silent. If the store does not answer,
    /// the process that serves it is the silent one.
    fn refresh(&self, run: &RunContext) -> Vec<MissingRank> {
        let cancelled = run.cancel.tripped();
        let store = self.with_short_timeout(cancelled.clone());
        let twice = self.heartbeats_of_others(&store, run).and_then(|before| {
            // Only time shows that no heartbeat arrives.
            match Deadline::after(HEARTBEAT_TIMEOUT).recv(cancelled) {
                Err(RecvTimeoutError::Timeout) => {
                    Ok((before, self.heartbeats_of_others(&store, run)?))
                }
                _ => Ok((before, Vec::new())),
            }
        });
        // If another process has timed out first, it has ended its ranks: they are not stragglers.
        if twice.is_ok() && run.cancel.cancelled_by().is_none() {
            let _ = self.read_failure(&store, run); // the heartbeat thread reports a store that is gone
        }
        let silent: Vec<usize> = match twice {
            _ if run.cancel.cancelled_by().is_some() => Vec::new(),
            Ok((before, now)) => {
                let both = before.iter().zip(&now);
                let same = self.others().zip(both).filter(|(_, (before, now))| before == now);
                same.map(|(process, _)| process).collect()
            }
            Err(_) => self.others().filter(|process| self.serves(*process)).collect(),
        };
        let ranks = silent.into_iter().flat_map(|process| self.map.processes[process].clone());
        let seen =
            |rank: usize| MissingRank { rank, last_seen: run.activity[rank].now(), silent: true };
        ranks.map(seen).collect()
    }

    fn poll(&self, run: &RunContext) {
        // A status that cannot be read stays as it was.
        let store = self.with_short_timeout(never());
        let _ = self.heartbeats_of_others(&store, run);
        if run.cancel.cancelled_by().is_none() {
            let _ = self.read_failure(&store, run);
        }
    }
}
