//! Stall reports: the ranks missing from a collective while others wait, and a status table of all ranks on
//! request.

use std::fmt::{self, Write};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::operation::{OpId, Operation};
use crate::runtime::{Entry, OpSnapshot, RemoteSnapshots, RunContext};

/// The callback that receives reports for the user.
#[derive(Clone)]
pub(super) struct Notifier(Arc<dyn Fn(&str) + Send + Sync>);

impl Notifier {
    pub(super) fn new(notify: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(notify))
    }

    pub(super) fn notify(&self, text: &str) {
        (self.0)(text);
    }
}

impl fmt::Debug for Notifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notifier")
    }
}

/// A collective in which ranks of this process have waited for others for longer than the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stall {
    group: u32,
    at: OpId,
}

/// Returns the collective that ranks of this process, `local_ranks`, have waited in the longest. `None` if no wait is
/// longer than `limit`.
pub(super) fn stalled(
    run: &RunContext,
    local_ranks: Range<usize>,
    limit: Duration,
) -> Option<Stall> {
    longest(run, local_ranks, limit).map(|(stall, _)| stall)
}

fn longest(run: &RunContext, local_ranks: Range<usize>, limit: Duration) -> Option<(Stall, Entry)> {
    let now = run.flight_recorder.now();
    let waits = |entry: &Entry| {
        entry.finished_at.is_none() && now.saturating_sub(entry.started_at) >= limit
    };
    // Leaves out phases, which have no group: the collective within a phase says more.
    let stalled =
        |entry: Entry| entry.begin.group.map(|group| (Stall { group, at: entry.begin.at }, entry));
    let waiting = local_ranks.flat_map(|rank| run.flight_recorder.records(rank, 0)).filter(waits);
    waiting.filter_map(stalled).min_by_key(|(_, entry)| entry.started_at)
}

impl Stall {
    /// Returns which ranks have arrived and which have not, in lines. If ranks of other processes take part, it
    /// asks them first, which takes a moment. `None` if the collective has ended meanwhile, or the run has failed.
    pub(super) fn text(
        self,
        run: &RunContext,
        local_ranks: Range<usize>,
        limit: Duration,
    ) -> Option<String> {
        let Self { group, at } = self;
        let members = run.members(group)?;
        let mut silent = Vec::new();
        if members.iter().any(|rank| !local_ranks.contains(rank)) {
            silent = run.refresh_peers();
        }
        if run.cancel.cancelled_by().is_some() {
            return None; // the failure says more
        }
        let (_, first) =
            longest(run, local_ranks.clone(), limit).filter(|(stall, _)| *stall == self)?;
        let first = OpSnapshot::new(&first, run.flight_recorder.now());
        let mut text = format!("{} has not ended for {}", what(&first), seconds(first.started_ago));
        let (mut arrived, mut missing, mut on_gpus) = (Vec::new(), String::new(), String::new());
        for &rank in members.iter() {
            let seen = seen(run, &local_ranks, &run.remote_snapshots, rank);
            if let Some(gpu) = on_gpu(&seen) {
                let _ = write!(on_gpus, "\n  rank {rank} {gpu}");
            }
            let same_group = || seen.iter().filter(|op| op.group == Some(group));
            let late = match same_group().find(|op| op.at.sequence == at.sequence) {
                // Only the first rank of a process exchanges stop requests, on behalf of the others.
                Some(op) if op.at == at || at.operation == Operation::Synchronize => {
                    arrived.push(format!("rank {rank} {} ago", seconds(op.started_ago)));
                    continue;
                }
                Some(op) => format!("is in {} instead", what(op)),
                // The rank is past this collective, which its records no longer hold.
                None if same_group().any(|op| op.at.sequence > at.sequence) => {
                    arrived.push(format!("rank {rank}"));
                    continue;
                }
                None => {
                    format!("has not entered {}; {}", name(&first), last_seen(run, rank, &seen))
                }
            };
            let is_silent = silent.iter().any(|missing| missing.rank == rank);
            let silent = if is_silent { "; its process does not answer" } else { "" };
            let _ = write!(missing, "\n  rank {rank} {late}{silent}");
        }
        let _ = write!(text, "\n  arrived: {}", arrived.join(", "));
        Some(text + &missing + &on_gpus)
    }
}

/// Returns what each rank of this process, `local_ranks`, does and since when, one line for each. Includes those ranks
/// of other processes whose status is in `remote`.
pub(super) fn status_table(
    run: &RunContext,
    local_ranks: Range<usize>,
    remote: &RemoteSnapshots,
) -> String {
    let mut lines = Vec::new();
    for rank in 0..run.activity.len() {
        let seen = seen(run, &local_ranks, remote, rank);
        if !local_ranks.contains(&rank) && seen.is_empty() {
            continue;
        }
        let mut line = format!("  rank {rank} {}", last_seen(run, rank, &seen));
        line += &on_gpu(&seen).map_or(String::new(), |gpu| format!("; {gpu}"));
        for op in seen.iter().filter(|op| op.on_comm_thread && op.finished_ago.is_none()) {
            let _ = write!(
                line,
                "; its communication thread has been in {} for {}",
                what(op),
                seconds(op.started_ago)
            );
        }
        lines.push(line);
    }
    lines.join("\n")
}

/// Returns the progress of a rank's GPU; `None` for a rank without a GPU:
/// `launched up to all_reduce #120; its GPU had completed all_reduce #117 when it last looked`.
fn on_gpu(seen: &[OpSnapshot]) -> Option<String> {
    let mut newest = seen.iter().rev().filter(|op| op.group.is_some() && !op.on_comm_thread);
    let done = newest.clone().find(|op| op.on_gpu.is_some())?;
    let launched = name(newest.find(|op| op.finished_ago.is_some() && op.group == done.group)?);
    let done = name(done);
    Some(format!("launched up to {launched}; its GPU had completed {done} when it last looked"))
}

/// Returns the known operations of `rank`, the newest last.
fn seen(
    run: &RunContext,
    local_ranks: &Range<usize>,
    remote: &RemoteSnapshots,
    rank: usize,
) -> Vec<OpSnapshot> {
    if local_ranks.contains(&rank) { run.flight_recorder.seen(rank) } else { remote.of(rank) }
}

/// Returns what `rank` does now, or did last, as text.
fn last_seen(run: &RunContext, rank: usize, seen: &[OpSnapshot]) -> String {
    let Some(newest) = seen.iter().rev().find(|op| !op.on_comm_thread) else {
        return format!("last seen in {}", run.activity[rank].now());
    };
    match newest.finished_ago {
        None => {
            let entered = seconds(newest.started_ago);
            format!("last seen in {}, entered {entered} ago", within(newest, seen))
        }
        Some(finished_ago) => {
            format!("last seen leaving {}, {} ago", what(newest), seconds(finished_ago))
        }
    }
}

/// Returns a collective that a rank waits in, with the phase of the step that calls it:
/// `all_reduce #118 (bucket 3) of backward #40 at src/main.rs:40`.
pub(super) fn within(op: &OpSnapshot, seen: &[OpSnapshot]) -> String {
    let phase = seen.iter().rev().find(|phase| op.group.is_some() && phase.is_open_phase());
    let phase = phase.map_or(String::new(), |phase| format!(" of {}", phase.at));
    name(op) + &phase + &op.call_site
}

/// Returns an operation with its call site: `all_reduce #118 (bucket 3) at src/main.rs:40`.
fn what(op: &OpSnapshot) -> String {
    name(op) + &op.call_site
}

/// Returns the name of an operation: `all_reduce #118 (bucket 3)`.
fn name(op: &OpSnapshot) -> String {
    let bucket = op.bucket.map_or(String::new(), |bucket| format!(" (bucket {bucket})"));
    format!("{}{bucket}", op.at)
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
