//! The lanes of the live view: what each rank does, and which ranks it waits for.

use std::ops::Range;
use std::time::Duration;

use strum::{EnumIter, IntoStaticStr};

use super::snapshot::{HEARTBEAT, RankSnapshot, RunSnapshot, Source};
use crate::operation::Operation;
use crate::runtime::OpEntry;
use crate::telemetry::arrivals::Arrivals;

/// What a rank does, as a lane shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(super) enum Phase {
    /// It is not known: there is no heartbeat yet, or no newer one.
    #[default]
    Unknown,
    /// It starts, or connects.
    Start,
    /// The start of a step, before it requests data.
    Step,
    Data,
    Forward,
    Backward,
    Optimizer,
    /// A collective or a message.
    Communication,
    /// A collective that another rank has not entered.
    Waiting,
    Validation,
    Checkpoint,
    /// Other work, outside of steps.
    Other,
    Ended,
    Failed,
}

impl Phase {
    /// Returns the phase's letter.
    pub(super) fn letter(self) -> char {
        match self {
            Self::Unknown => '?',
            Self::Start => '.',
            Self::Step => 'S',
            Self::Data => 'D',
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::Optimizer => 'O',
            Self::Communication => 'A',
            Self::Waiting => 'W',
            Self::Validation => 'V',
            Self::Checkpoint => 'C',
            Self::Other => '-',
            Self::Ended => 'E',
            Self::Failed => 'X',
        }
    }

    fn of(operation: Operation) -> Self {
        match operation {
            Operation::Start | Operation::Rendezvous | Operation::Init => Self::Start,
            Operation::Step => Self::Step,
            Operation::Data => Self::Data,
            Operation::Forward => Self::Forward,
            Operation::Backward | Operation::Gradient => Self::Backward,
            Operation::Optimizer => Self::Optimizer,
            Operation::Validation => Self::Validation,
            Operation::Save => Self::Checkpoint,
            Operation::UserCode | Operation::Compare => Self::Other,
            Operation::ShutDown | Operation::Done => Self::Ended,
            _ => Self::Communication,
        }
    }
}

/// One rank at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Lane {
    pub phase: Phase,
    /// The operation, as text; empty if none is known.
    pub doing: String,
    /// The start of the operation; `None` if it is unknown.
    pub since: Option<Duration>,
    /// The age of the rank's last heartbeat; `None` for a rank whose operations are known at once.
    pub heartbeat_age: Option<Duration>,
    /// The ranks that have not entered the collective that this rank waits in.
    pub waits_for: Vec<usize>,
    /// The phases of the rank's newest operations, in the order in which they are drawn: a later one lies on top.
    pub spans: Vec<(Range<Duration>, Phase)>,
}

/// Returns a lane for each rank of `snapshot`.
pub(super) fn lanes(snapshot: &RunSnapshot, arrivals: &Arrivals) -> Vec<Lane> {
    let with_age = |(rank, mine): (usize, &RankSnapshot)| {
        let heartbeat_age = match mine.source {
            Source::Heartbeat(age) => Some(age),
            Source::Direct | Source::Unknown(_) => None,
        };
        Lane { heartbeat_age, ..lane(snapshot, arrivals, rank) }
    };
    snapshot.ranks.iter().enumerate().map(with_age).collect()
}

fn lane(snapshot: &RunSnapshot, arrivals: &Arrivals, rank: usize) -> Lane {
    let mine = &snapshot.ranks[rank];
    let spans = spans(snapshot, arrivals, rank);
    let phase = Phase::of(mine.at.operation);
    let doing = mine.at.to_string();
    if snapshot.failed == Some(rank) {
        return Lane { phase: Phase::Failed, doing, spans, ..Lane::default() };
    }
    if phase == Phase::Ended {
        return Lane { phase, doing, spans, ..Lane::default() };
    }
    let is_open = |op: &&OpEntry| op.is_open();
    let own = || mine.ops.iter().rev().filter(|op| !op.on_comm_thread);
    let Some(op) = own().find(is_open) else {
        let Some(last) = own().next() else {
            let doing = match mine.source {
                Source::Unknown(reason) => reason.into(),
                Source::Direct | Source::Heartbeat(_) => doing,
            };
            return Lane { phase: known(mine, phase), doing, spans, ..Lane::default() };
        };
        let (phase, doing) = (known(mine, Phase::Other), format!("after {last}"));
        return Lane { phase, doing, since: last.finished_at, spans, ..Lane::default() };
    };
    // A rank that waits for its communication thread waits in that thread's oldest collective.
    let on_thread = mine.ops.iter().filter(|op| op.on_comm_thread).find(is_open);
    let on_thread = on_thread.filter(|_| op.at.operation == Operation::Synchronize);
    let waits_for = snapshot.missing(arrivals, on_thread.unwrap_or(op));
    let phase = if waits_for.is_empty() { Phase::of(op.at.operation) } else { Phase::Waiting };
    let within = own().filter(is_open).find(|op| op.at.operation.is_compute());
    let within = within.filter(|within| within.at != op.at);
    let shown = on_thread.unwrap_or(op);
    let doing =
        within.map_or_else(|| shown.to_string(), |phase| format!("{shown} of {}", phase.at));
    let (phase, since) = (known(mine, phase), Some(op.started_at));
    Lane { phase, doing, since, waits_for, spans, ..Lane::default() }
}

/// Returns `phase`, or [`Phase::Unknown`] if the rank's last heartbeat is too old to tell.
fn known(rank: &RankSnapshot, phase: Phase) -> Phase {
    match rank.source {
        Source::Heartbeat(age) if age > 6 * HEARTBEAT => Phase::Unknown,
        Source::Unknown(_) => Phase::Unknown,
        Source::Direct | Source::Heartbeat(_) => phase,
    }
}

/// Returns the spans of a rank's own operations: phases first, then what lies within them.
fn spans(
    snapshot: &RunSnapshot,
    arrivals: &Arrivals,
    rank: usize,
) -> Vec<(Range<Duration>, Phase)> {
    let own = || snapshot.ranks[rank].ops.iter().filter(|op| !op.on_comm_thread);
    let span = |op: &OpEntry| (op.started_at..op.end(snapshot.now), Phase::of(op.at.operation));
    let mut spans: Vec<_> = own().filter(|op| op.group.is_none()).map(span).collect();
    for op in own().filter(|op| op.group.is_some()) {
        spans.push(span(op));
        if let Some(last) = snapshot.last_arrival(arrivals, op) {
            spans.push((op.started_at..last.min(op.end(snapshot.now)), Phase::Waiting));
        }
    }
    spans
}
