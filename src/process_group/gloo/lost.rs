//! Errors of a rank that waits in vain for ranks of other processes: finds the rank at fault, as far as possible.

use std::time::Duration;

use crossbeam::channel::select_biased;

use crate::error::{Error, LateRank};
use crate::operation::{At, Operation};
use crate::sync::{Run, Seen};

/// How long to wait for the reason of a failure, which another process may be about to tell.
pub(super) const REASON: Duration = Duration::from_secs(3);

/// The error of `waiting`, a rank of `run`, that waits at `at` for `ranks` of other processes: after it has `waited` for
/// too long, or because the connection to them is lost for this `reason`.
pub(super) fn error(
    run: &Run,
    at: At,
    waiting: usize,
    ranks: Vec<usize>,
    waited: Option<Duration>,
    reason: String,
) -> Error {
    // Another process may have failed first, and be telling so.
    let await_reason = || {
        select_biased! {
            recv(run.cancel.tripped()) -> _ => {}
            default(REASON) => {}
        }
    };
    if waited.is_none() {
        await_reason();
    }
    if let Err(cancelled) = run.check(waiting) {
        return cancelled;
    }
    let silent = run.look();
    // So may one that has given up waiting at the same time.
    if waited.is_some() && ranks.iter().any(|rank| run.is_done(*rank)) {
        await_reason();
    }
    if let Err(cancelled) = run.check(waiting) {
        return cancelled;
    }
    let silent: Vec<LateRank> =
        silent.into_iter().filter(|late| ranks.contains(&late.rank)).collect();
    let Some(waited) = waited else {
        let lost = if silent.is_empty() { run.late(ranks) } else { silent };
        return Error::Peer { at, step: run.timeline.step_of(waiting), lost, reason };
    };
    // Only an open record says that a rank has entered the call: `Run::activity` has the call already on the way into it.
    // To synchronize is no call, and has no record.
    let is_open = |it: &Seen| it.at == at && it.ended.is_none();
    let has_entered = |rank: &usize| match at.operation {
        Operation::Synchronize => run.activity[*rank].now() == at,
        _ => run.sightings.of(*rank).iter().any(is_open),
    };
    let missing: Vec<usize> = ranks.iter().copied().filter(|rank| !has_entered(rank)).collect();
    let late = match (silent.is_empty(), missing.is_empty()) {
        (false, _) => silent,
        (true, false) => run.late(missing),
        (true, true) => run.late(ranks),
    };
    Error::Timeout { at, waiting, waited, late }
}
