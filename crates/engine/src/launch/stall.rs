//! Stall reports: the ranks missing from a collective while others wait, and a status table of all ranks on
//! request.

use std::fmt::Write;
use std::time::Duration;

use super::heartbeat_monitor::HEARTBEAT_TIMEOUT;
use crate::operation::{OpId, Operation};
use crate::runtime::{OpEntry, RunContext};

/// A collective in which ranks of this process have waited for others for longer than the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stall {
    group: u32,
    at: OpId,
}

/// Returns the collective that ranks of this process have waited in the longest, and the first one's entry. `None` if no
/// wait is longer than `limit`.
pub(super) fn stalled(run: &RunContext, limit: Duration) -> Option<(Stall, OpEntry)> {
    let now = run.flight_recorder.now();
    let waits = |op: &OpEntry| op.is_open() && now.saturating_sub(op.started_at) >= limit;
    // Leaves out phases, which have no group: the collective within a phase says more.
    let stall_of = |op: OpEntry| op.group.map(|group| (Stall { group, at: op.at }, op));
    let entries = |rank: usize| run.flight_recorder.entries(rank, 0);
    let waiting = run.local_ranks.clone().flat_map(entries).filter(waits);
    waiting.filter_map(stall_of).min_by_key(|(_, op)| op.started_at)
}

impl Stall {
    /// Returns which ranks have arrived and which have not, in lines. If ranks of other processes take part, it
    /// asks them first, which takes a moment. `None` if the collective has ended meanwhile, or the run has failed.
    pub(super) fn text(self, run: &RunContext, limit: Duration) -> Option<String> {
        let Self { group, at } = self;
        let members = run.members(group)?;
        let mut silent = Vec::new();
        if members.iter().any(|rank| !run.local_ranks.contains(rank)) {
            silent = run.refresh_peers();
        }
        if run.cancel.cancelled_by().is_some() {
            return None; // the failure says more
        }
        let (_, first) = stalled(run, limit).filter(|(stall, _)| *stall == self)?;
        let now = run.flight_recorder.now();
        let waited = seconds_since(first.started_at, now);
        let mut text = format!("{} has not ended for {waited}", what(&first));
        let (mut arrived, mut missing, mut on_gpus) = (Vec::new(), String::new(), String::new());
        for &rank in members.iter() {
            let seen = seen(run, rank, now);
            let heard = run.remote_snapshots.heartbeat(rank, now);
            let silence = heard.map(|(_, age)| age).filter(|age| *age >= HEARTBEAT_TIMEOUT);
            if let Some(gpu) = on_gpu(&seen) {
                let _ = write!(on_gpus, "\n  rank {rank} {gpu}");
            }
            let same_group = || seen.iter().filter(|op| op.group == Some(group));
            let late = match same_group().find(|op| op.at.sequence == at.sequence) {
                // Only the first rank of a process exchanges stop requests, on behalf of the others.
                Some(op) if op.at == at || at.operation == Operation::Synchronize => {
                    arrived.push(format!("rank {rank} {} ago", seconds_since(op.started_at, now)));
                    continue;
                }
                Some(op) => format!("is in {} instead", what(op)),
                // The rank is past this collective, which its entries no longer hold.
                None if same_group().any(|op| op.at.sequence > at.sequence) => {
                    arrived.push(format!("rank {rank}"));
                    continue;
                }
                // It may have entered since.
                None if silence.is_some() => last_seen(run, rank, &seen, now),
                None => {
                    format!("has not entered {first}; {}", last_seen(run, rank, &seen, now))
                }
            };
            let is_silent = silent.iter().any(|missing| missing.rank == rank);
            let silent = match silence {
                Some(age) => format!("; nothing heard for {:.1} s", age.as_secs_f64()),
                None if is_silent => "; its process does not answer".into(),
                None => String::new(),
            };
            let _ = write!(missing, "\n  rank {rank} {late}{silent}");
        }
        let _ = write!(text, "\n  arrived: {}", arrived.join(", "));
        Some(text + &missing + &on_gpus)
    }
}

/// Returns what each rank of this process does and since when, one line for each. Includes those ranks of other processes
/// whose status is known.
pub(super) fn status_table(run: &RunContext) -> String {
    let now = run.flight_recorder.now();
    let mut lines = Vec::new();
    for rank in 0..run.activity.len() {
        let seen = seen(run, rank, now);
        if !run.local_ranks.contains(&rank) && seen.is_empty() {
            continue;
        }
        let mut line = format!("  rank {rank} {}", last_seen(run, rank, &seen, now));
        line += &on_gpu(&seen).map_or(String::new(), |gpu| format!("; {gpu}"));
        for op in seen.iter().filter(|op| op.on_comm_thread && op.is_open()) {
            let _ = write!(
                line,
                "; its communication thread has been in {} for {}",
                what(op),
                seconds_since(op.started_at, now)
            );
        }
        lines.push(line);
    }
    lines.join("\n")
}

/// Returns the progress of a rank's GPU; `None` for a rank without a GPU:
/// `launched up to all_reduce #120; its GPU had completed all_reduce #117 when it last looked`.
fn on_gpu(seen: &[OpEntry]) -> Option<String> {
    let mut newest = seen.iter().rev().filter(|op| op.group.is_some() && !op.on_comm_thread);
    let done = newest.clone().find(|op| op.on_gpu.is_some())?;
    let launched = newest.find(|op| !op.is_open() && op.group == done.group)?;
    Some(format!("launched up to {launched}; its GPU had completed {done} when it last looked"))
}

/// Returns the known operations of `rank`, the newest last, on the clock of this process, which shows `now`.
fn seen(run: &RunContext, rank: usize, now: Duration) -> Vec<OpEntry> {
    if run.local_ranks.contains(&rank) {
        run.flight_recorder.seen(rank)
    } else {
        run.remote_snapshots.of(rank, now)
    }
}

/// Returns what `rank` does now, or did last, as text.
fn last_seen(run: &RunContext, rank: usize, seen: &[OpEntry], now: Duration) -> String {
    let Some(newest) = seen.iter().rev().find(|op| !op.on_comm_thread) else {
        return format!("last seen in {}", run.activity[rank].now());
    };
    match newest.finished_at {
        None => {
            let entered = seconds_since(newest.started_at, now);
            format!("last seen in {}, entered {entered} ago", within(newest, seen))
        }
        Some(finished_at) => {
            format!("last seen leaving {}, {} ago", what(newest), seconds_since(finished_at, now))
        }
    }
}

/// Returns a collective that a rank waits in, with the phase of the step that calls it:
/// `all_reduce #118 (bucket 3) of backward #40 at src/main.rs:40`.
pub(super) fn within(op: &OpEntry, seen: &[OpEntry]) -> String {
    // A rank may begin to save while the collective is still recorded as open.
    let calls = |phase: &&OpEntry| phase.is_open_phase() && phase.started_at <= op.started_at;
    let phase = seen.iter().rev().find(|phase| op.group.is_some() && calls(phase));
    let phase = phase.map_or(String::new(), |phase| format!(" of {}", phase.at));
    format!("{op}{phase}{}", op.source_line.in_message())
}

/// Returns an operation with its call site: `all_reduce #118 (bucket 3) at src/main.rs:40`.
fn what(op: &OpEntry) -> String {
    format!("{op}{}", op.source_line.in_message())
}

/// Returns the time from `start` to `now` as text.
fn seconds_since(start: Duration, now: Duration) -> String {
    format!("{:.1} s", now.saturating_sub(start).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::runtime::{OpStart, PeerHeartbeat, RankStatus};

    fn waiting_run() -> RunContext {
        let mut run = RunContext::new(2, Duration::from_secs(60), None);
        run.local_ranks = 0..1;
        let at = OpId { operation: Operation::AllReduce, sequence: 17 };
        run.flight_recorder
            .begin(0, OpStart { group: Some(0), ..OpStart::alone(at, Location::caller()) });
        run
    }

    /// The rank's backward has ended with an error, and it saves its state.
    #[test]
    fn phase_after_a_collective_is_not_the_one_that_calls_it() {
        let entry = |operation, sequence, from| {
            OpEntry::new(OpId { operation, sequence }, Duration::from_millis(from))
        };
        let waits = OpEntry { group: Some(0), ..entry(Operation::AllReduce, 8, 5) };
        let backward = entry(Operation::Backward, 3, 4);
        let save = entry(Operation::Save, 3, 6);
        let text = within(&waits, &[backward.clone(), waits.clone()]);
        assert!(text.starts_with("all_reduce #8 of backward #3"), "{text}");
        let text = within(&waits, &[waits.clone(), save]);
        assert!(text.starts_with("all_reduce #8") && !text.contains("save"), "{text}");
    }

    /// Rank 1 may wait in the same collective: its heartbeats do not arrive.
    #[test]
    fn rank_that_is_not_heard_of_is_not_said_to_be_late() {
        for (sent, expected) in [(9, "has not entered all_reduce #17; "), (2, "last seen in ")] {
            let run = waiting_run();
            for sent in [10, sent] {
                let at = OpId { operation: Operation::Forward, sequence: 3 };
                let sent = Duration::from_secs(sent);
                let status = RankStatus { at, seen: Vec::new() };
                let heartbeat = PeerHeartbeat { sent, suspended: Duration::ZERO, status };
                run.remote_snapshots.note(1, heartbeat);
            }
            let (stall, _) = stalled(&run, Duration::ZERO).unwrap();
            let text = stall.text(&run, Duration::ZERO).unwrap();
            let (_, late) = text.split_once("\n  rank 1 ").unwrap();
            assert!(late.starts_with(expected), "{text}");
            let unheard = late.ends_with("; nothing heard for 8.0 s");
            assert_eq!(unheard, sent == 2, "{text}");
        }
    }
}
