//! The error that the user sees when a run fails: the first failure, without its consequences on other ranks.

use std::fmt;
use std::time::Duration;

use crate::operation::OpId;
use crate::runtime::{RankFailure, StopReason};

/// A rank that did not come back after the run had failed.
#[derive(Debug)]
pub struct StuckRank {
    /// The rank.
    pub rank: usize,
    /// Its device, as `CPU:1` or `GPU:0`.
    pub device: String,
    /// The rank's last known operation.
    pub last_seen: OpId,
}

/// The error of [`spawn`](super::spawn).
#[derive(Debug)]
pub struct SpawnError {
    /// The earliest failure: the root cause.
    pub failure: RankFailure,
    /// Ranks that failed later and for reasons of their own, the earliest first.
    pub also_failed: Vec<RankFailure>,
    /// Ranks that had not come back when the grace period ended. Their threads still run, because a
    /// thread cannot be killed: the process should exit, without running destructors.
    pub stuck: Vec<StuckRank>,
    /// How long the other ranks had to come back.
    pub grace_period: Duration,
    /// The operation of each rank of this process when the run failed, one line for each. `None` unless the failure
    /// is that ranks waited for others.
    pub table: Option<String>,
    /// The signal that asked the run to stop, if the failure is that its ranks did not.
    pub stopped: Option<StopReason>,
}

impl fmt::Display for SpawnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.failure)?;
        for failure in &self.also_failed {
            write!(f, "\n  then {failure}")?;
        }
        if let Some(table) = &self.table {
            write!(f, "\n{table}")?;
        }
        for StuckRank { rank, device, last_seen } in &self.stuck {
            write!(
                f,
                "\n  rank {rank} ({device}) did not come back within {:?}; last seen: {last_seen}",
                self.grace_period
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for SpawnError {}
