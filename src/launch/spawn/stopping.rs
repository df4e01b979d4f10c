//! What the supervisor does once a signal asks the run to stop: it says so, and ends a run whose ranks hang.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::operation::{OpId, Operation};
use crate::runtime::{ReportedFailure, RunContext, StopReason, StopRequest};

/// How long after the note on a signal another SIGTERM counts as the same request. A launcher and its agent may both
/// send one.
const SAME_REQUEST: Duration = Duration::from_millis(500);

/// A request to stop by SIGINT or SIGTERM that has not ended the run yet.
pub(super) struct Stopping<'a> {
    stop: &'a StopRequest,
    reason: StopReason,
    noted: Instant,
    /// What the ranks of this process do, and since when none of them does anything else.
    doing: Vec<OpId>,
    since: Instant,
}

impl<'a> Stopping<'a> {
    /// Returns the request, and notes it for the user. `None` if no signal has asked the run to stop.
    pub(super) fn begin(stop: &'a StopRequest) -> Option<Self> {
        let is_signal =
            |reason: &StopReason| matches!(reason, StopReason::Interrupt | StopReason::Terminate);
        let reason = stop.request_reason().filter(is_signal)?;
        stop.notify(reason);
        let now = Instant::now();
        Some(Self { stop, reason, noted: now, doing: Vec::new(), since: now })
    }

    /// Returns the failure of a run in which no rank of this process, `here`, has gone on for `grace_period`. `None`
    /// while one goes on, saves or validates.
    pub(super) fn hang(
        &mut self,
        run: &RunContext,
        here: Range<usize>,
        grace_period: Duration,
    ) -> Option<ReportedFailure> {
        if self.noted.elapsed() >= SAME_REQUEST {
            self.stop.next_signal_ends().store(true, Ordering::SeqCst);
        }
        let now = |rank: usize| run.activity[rank].now();
        let doing: Vec<OpId> = here.map(now).collect();
        let is_long = |at: &OpId| matches!(at.operation, Operation::Save | Operation::Validation);
        if doing != self.doing || doing.iter().any(is_long) {
            self.doing = doing;
            self.since = Instant::now();
        }
        if self.since.elapsed() < grace_period {
            return None;
        }
        run.poll_peers();
        // A rank that waits for no other one is more likely to be at fault.
        let hangs = |rank: &usize| !now(*rank).operation.may_wait() && !run.is_done(*rank);
        let rank = (0..run.activity.len()).find(hangs).unwrap_or_default();
        let error = format!(
            "{} asked the run to stop, and no rank has gone on for {grace_period:?} (--grace-period); nothing more is saved",
            self.reason.name()
        );
        let stopped = Some(self.reason);
        Some(ReportedFailure {
            rank,
            tied: Vec::new(),
            at: now(rank),
            error,
            waited: true,
            stopped,
        })
    }
}
