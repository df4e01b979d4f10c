//! Errors of a rank that waits in vain for ranks of other processes. They name the rank at fault where possible.

use std::time::Duration;

use crossbeam::channel::select_biased;

use crate::error::{Error, MissingRank, Result};
use crate::operation::{OpId, Operation};
use crate::runtime::{OpEntry, RunContext};

/// Longest wait for the cause of a failure, which another process may be about to report.
pub(super) const FAILURE_CAUSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Returns the timeout error of `waiting`, a rank of `run` that has `waited` in `at` for `ranks` of other processes.
pub(super) fn timed_out(
    run: &RunContext,
    at: OpId,
    waiting: usize,
    ranks: Vec<usize>,
    waited: Duration,
) -> Error {
    let silent = match silent(run, waiting, &ranks, true) {
        Ok(silent) => silent,
        Err(cancelled) => return cancelled,
    };
    // Only an open entry proves that a rank has entered the call: `RunContext::activity` names the call before the
    // rank enters it. `synchronize` is no call, and has no entry.
    let is_open = |entry: &OpEntry| entry.at == at && entry.is_open();
    let has_entered = |rank: &usize| match at.operation {
        Operation::Synchronize => run.activity[*rank].now() == at,
        _ => run.remote_snapshots.of(*rank, run.flight_recorder.now()).iter().any(is_open),
    };
    let missing: Vec<usize> = ranks.iter().copied().filter(|rank| !has_entered(rank)).collect();
    let missing = match (silent.is_empty(), missing.is_empty()) {
        (false, _) => silent,
        (true, false) => run.missing_ranks(missing),
        (true, true) => run.missing_ranks(ranks),
    };
    Error::Timeout { at, waiting, waited, missing }
}

/// Returns the error of `waiting`, a rank of `run`, when the connection to `ranks` of another process is lost in `at`
/// for this `reason`.
pub(crate) fn connection_lost(
    run: &RunContext,
    at: OpId,
    waiting: usize,
    ranks: Vec<usize>,
    reason: String,
) -> Error {
    // Another process may have failed first, and be about to report it.
    await_reason(run);
    match silent(run, waiting, &ranks, false) {
        Ok(silent) => {
            // Blames the ranks at the other end, even if they respond: no other process can have closed the connection.
            let lost = if silent.is_empty() { run.last_seen(ranks) } else { silent };
            Error::ConnectionLost { at, step: run.flight_recorder.step_of(waiting), lost, reason }
        }
        Err(cancelled) => cancelled,
    }
}

/// Requests heartbeats, which takes a moment. Returns those of `ranks` whose process does not respond.
///
/// # Errors
/// [`Error::Cancelled`] if the run has failed for another reason meanwhile.
fn silent(
    run: &RunContext,
    waiting: usize,
    ranks: &[usize],
    has_waited: bool,
) -> Result<Vec<MissingRank>> {
    run.check(waiting)?;
    let mut silent = run.refresh_peers();
    // A process that has timed out at the same time may be about to report why.
    if has_waited && ranks.iter().any(|rank| run.is_done(*rank)) {
        await_reason(run);
    }
    run.check(waiting)?;
    silent.retain(|missing| ranks.contains(&missing.rank));
    Ok(silent)
}

/// Waits for another process to report its failure, for at most [`FAILURE_CAUSE_TIMEOUT`].
fn await_reason(run: &RunContext) {
    select_biased! {
        recv(run.cancel.tripped()) -> _ => {}
        default(FAILURE_CAUSE_TIMEOUT) => {}
    }
}
