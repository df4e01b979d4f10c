//! What the supervisor does once a signal asks the run to stop: it says so, and ends a run whose ranks hang.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::super::signals::SAME_REQUEST;
use crate::operation::{OpId, Operation};
use crate::runtime::{Failure, Instant, RunContext, StopReason, StopRequest};

/// A request to stop by a signal that has not ended the run yet.
pub(super) struct Stopping<'a> {
    stop: &'a StopRequest,
    reason: StopReason,
    noted: Instant,
    /// What all ranks do, as far as this process knows, and since when none of them does anything else.
    doing: Vec<OpId>,
    since: Instant,
}

impl<'a> Stopping<'a> {
    /// Returns the request, and notes it for the user. `None` if no signal has asked the run to stop.
    pub(super) fn begin(stop: &'a StopRequest) -> Option<Self> {
        let reason = stop.request_reason().filter(|reason| reason.is_signal())?;
        stop.notify(reason);
        let now = Instant::now();
        Some(Self { stop, reason, noted: now, doing: Vec::new(), since: now })
    }

    /// Returns the failure of a run in which no rank has made progress for `grace_period`. `None` while one does, saves
    /// or validates.
    pub(super) fn hang(&mut self, run: &RunContext, grace_period: Duration) -> Option<Failure> {
        if self.noted.elapsed() >= SAME_REQUEST {
            self.stop.next_signal_ends.store(true, Ordering::SeqCst);
        }
        let now = |rank: usize| run.activity[rank].now();
        if self.goes_on(run) || self.since.elapsed() < grace_period {
            return None;
        }
        // The ranks of other processes may do something else by now.
        run.poll_peers();
        if self.goes_on(run) {
            return None;
        }
        // A rank that waits for no other one is more likely to be at fault.
        let hangs = |rank: &usize| !now(*rank).operation.may_wait() && !run.is_done(*rank);
        let rank = (0..run.activity.len()).find(hangs).unwrap_or_default();
        let error = format!(
            "{} requested a stop, but no rank made progress for {grace_period:?} (--grace-period), so the run ends in \
             the middle of a step; find out what delays this rank, or raise --grace-period",
            self.reason.name()
        );
        let stopped = Some(self.reason);
        Some(Failure { waited: true, stopped, ..Failure::new(rank, now(rank), error) })
    }

    /// Returns whether a rank has made progress since the last call, or saves or validates, which may take longer.
    fn goes_on(&mut self, run: &RunContext) -> bool {
        let doing: Vec<OpId> =
            (0..run.activity.len()).map(|rank| run.activity[rank].now()).collect();
        let is_long = |at: &OpId| matches!(at.operation, Operation::Save | Operation::Validation);
        let goes_on = doing != self.doing || doing.iter().any(is_long);
        if goes_on {
            self.doing = doing;
            self.since = Instant::now();
        }
        goes_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One rank may be of another process: its others wait until it has saved.
    #[test]
    fn run_in_which_a_rank_saves_does_not_hang() {
        let (run, stop) =
            (RunContext::new(2, Duration::from_secs(60), None), StopRequest::new(None));
        stop.ask(StopReason::Terminate);
        let mut stopping = Stopping::begin(&stop).unwrap();
        run.activity[0].enter(Operation::AllReduce, 7);
        run.activity[1].enter(Operation::Save, 3);
        for _ in 0..3 {
            assert!(stopping.hang(&run, Duration::ZERO).is_none());
        }
        run.activity[1].enter(Operation::Step, 4);
        assert!(stopping.hang(&run, Duration::ZERO).is_none(), "it goes on");
        let hang = stopping.hang(&run, Duration::ZERO).unwrap();
        assert_eq!((hang.rank, hang.stopped), (1, Some(StopReason::Terminate)));
    }
}
