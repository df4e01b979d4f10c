//! [`PeerStatus`]: where the state of the ranks of other processes comes from.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{OpEntry, RunContext};
use crate::error::MissingRank;
use crate::operation::OpId;

/// The interval between heartbeats of a process: what one says may be this old when it is read.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

/// The source of the state of ranks in other processes.
pub(crate) trait PeerStatus: fmt::Debug + Send + Sync {
    /// Updates [`RunContext::activity`] and [`RunContext::remote_snapshots`] for the ranks of other processes, as far
    /// as possible. Returns the ranks that no longer answer. Blocks for a moment, unless the run is cancelled.
    fn refresh(&self, run: &RunContext) -> Vec<MissingRank>;

    /// Updates the same state once, even if the run is cancelled. Also reads whether another process has reported a failure.
    fn poll(&self, run: &RunContext);
}

/// The status of a rank: its current operation, and the last ones of its flight recorder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankStatus {
    /// What the rank is doing as a whole.
    pub at: OpId,
    /// The last operations of its flight recorder, the newest last, on the clock of its process.
    pub seen: Vec<OpEntry>,
}

/// What the newest heartbeat of another process says of one of its ranks.
#[derive(Debug, Clone)]
pub(crate) struct PeerHeartbeat {
    /// The time from the start of its process's run until the heartbeat was sent, on the clock of its process.
    pub sent: Duration,
    /// For how long that clock had stood still: the process was suspended.
    pub suspended: Duration,
    pub status: RankStatus,
}

impl PeerHeartbeat {
    /// Returns the time from the start of the process's run until the heartbeat was sent, with that of its suspensions.
    pub(super) fn sent_after(&self) -> Duration {
        self.sent.saturating_add(self.suspended)
    }
}
