//! [`PeerStatus`]: where the state of the ranks of other processes comes from.

use std::convert::Infallible;
use std::fmt;
use std::time::Duration;

use crossbeam::channel::Receiver;

use super::{OpEntry, RunContext};
use crate::error::MissingRank;
use crate::operation::OpId;

/// The source of the state of ranks in other processes.
pub(crate) trait PeerStatus: fmt::Debug + Send + Sync {
    /// Updates [`RunContext::activity`] and [`RunContext::remote_snapshots`] for the ranks of other processes, as far
    /// as possible. Returns the ranks that no longer answer. Blocks for a moment, unless the run is cancelled.
    fn refresh(&self, run: &RunContext) -> Vec<MissingRank>;

    /// Updates the same state once, even if the run is cancelled. Also reads whether another process has reported a failure.
    fn poll(&self, run: &RunContext);

    /// Returns what the newest heartbeats say of the ranks of other processes, and updates nothing. May block for a
    /// moment, until `cancelled` closes.
    fn heartbeats(&self, cancelled: Receiver<Infallible>) -> Vec<PeerHeartbeat>;
}

/// What the newest heartbeat of another process says of one of its ranks.
#[derive(Debug, Clone)]
pub(crate) struct PeerHeartbeat {
    pub rank: usize,
    /// The time from the start of its process's run until the heartbeat was sent, on the clock of its process.
    pub sent: Duration,
    /// For how long that clock had stood still: the process was suspended.
    pub suspended: Duration,
    pub at: OpId,
    /// The rank's last operations, the newest last, on the clock of its process.
    pub seen: Vec<OpEntry>,
}

impl PeerHeartbeat {
    /// Returns the time from the start of the process's run until the heartbeat was sent, with that of its suspensions.
    pub(super) fn sent_after(&self) -> Duration {
        self.sent.saturating_add(self.suspended)
    }
}
