//! A snapshot of the ranks: their newest operations at one moment of a run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::operation::OpId;
use crate::runtime::OpEntry;
use crate::telemetry::arrivals::Arrivals;

/// The ranks of a run, of which snapshots are taken.
pub(crate) trait RankSource: Send {
    /// Returns a label for each rank, such as `CPU:0`, in the order of ranks.
    fn labels(&self) -> Vec<String>;

    /// Looks at all ranks. Takes no lock that a rank needs.
    fn snapshot(&mut self) -> RunSnapshot;

    /// Returns a table of what each rank does, a line each.
    fn status_table(&self) -> String;
}

/// The newest operations of all ranks at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunSnapshot {
    /// The moment, on the clock of all times below.
    pub now: Duration,
    /// In the order of ranks.
    pub ranks: Vec<RankSnapshot>,
    /// The ranks of each group. The group of all ranks, 0, is left out.
    pub groups: BTreeMap<u32, Arc<[usize]>>,
    /// The rank that failed first; `None` if none has.
    pub failed: Option<usize>,
    /// Whether some ranks are known from heartbeats only, so that their clocks and most of their operations are not.
    pub has_heartbeats: bool,
}

/// The newest operations of one rank.
#[derive(Debug, Clone)]
pub(crate) struct RankSnapshot {
    /// The operation that the rank recorded last.
    pub at: OpId,
    /// Oldest first.
    pub ops: Vec<OpEntry>,
    pub source: Source,
}

/// How the operations of a rank are known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Source {
    /// At once.
    Direct,
    /// From a heartbeat of this age.
    Heartbeat(Duration),
    /// Not at all, for this reason.
    Unknown(&'static str),
}

/// The interval between heartbeats: a status from one may be this old when it is read.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(500);

impl RunSnapshot {
    /// Returns the arrivals of the ranks at their newest collectives.
    pub(super) fn arrivals(&self) -> Arrivals {
        let mut arrivals = Arrivals::new(self.ranks.len(), &self.groups);
        for (rank, RankSnapshot { ops, source, .. }) in self.ranks.iter().enumerate() {
            arrivals.add(rank, ops, *source == Source::Direct);
        }
        arrivals
    }

    /// Returns the ranks that have not entered the collective `op`, as far as is known.
    pub(super) fn missing(&self, arrivals: &Arrivals, op: &OpEntry) -> Vec<usize> {
        let is_missing = |rank: &usize| match self.ranks.get(*rank).map(|rank| rank.source) {
            Some(Source::Direct) => true,
            // A heartbeat from before the wait says nothing about it.
            Some(Source::Heartbeat(age)) => {
                self.now.saturating_sub(age.saturating_add(HEARTBEAT)) >= op.started_at
            }
            Some(Source::Unknown(_)) | None => false,
        };
        arrivals.missing(op).filter(is_missing).collect()
    }

    /// Returns when the last rank entered the collective `op`, or now if one has not. `None` if that is unknown.
    pub(super) fn last_arrival(&self, arrivals: &Arrivals, op: &OpEntry) -> Option<Duration> {
        match arrivals.complete(op) {
            Some(entered) => Some(entered.last),
            None => (op.is_open() && !self.missing(arrivals, op).is_empty()).then_some(self.now),
        }
    }
}
