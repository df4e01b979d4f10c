//! The lanes of the live view: what each rank does, and which ranks it waits for.

use std::time::Duration;

use ratatui::style::Color;
use strum::{EnumIter, IntoStaticStr};

use engine::events::{RankSnapshot, RunSnapshot, Source};
use engine::operation::Operation;
use engine::runtime::{HEARTBEAT_INTERVAL, OpEntry};

/// What a rank does, as a lane shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(super) enum Phase {
    /// The start of a step, before it requests data.
    Step,
    Data,
    Forward,
    Backward,
    Optimizer,
    /// A collective or a message.
    Collective,
    /// A collective that another rank has not entered.
    Waiting,
    Validation,
    Checkpoint,
    /// It starts, or connects.
    Start,
    /// Other work, outside of steps.
    Other,
    Ended,
    Failed,
    /// It is not known: there is no heartbeat yet, or no newer one.
    #[default]
    Unknown,
}

impl Phase {
    /// Returns the phase's letter, and the colour below it, if it has one.
    pub(crate) fn look(self) -> (char, Option<Color>) {
        match self {
            Self::Step => ('S', Some(Color::LightYellow)),
            Self::Data => ('D', Some(Color::Cyan)),
            Self::Forward => ('F', Some(Color::Green)),
            Self::Backward => ('B', Some(Color::Blue)),
            Self::Optimizer => ('O', Some(Color::Yellow)),
            Self::Collective => ('A', Some(Color::Magenta)),
            Self::Waiting => ('W', Some(Color::DarkGray)),
            Self::Validation => ('V', Some(Color::LightGreen)),
            Self::Checkpoint => ('C', Some(Color::LightMagenta)),
            Self::Start => ('.', None),
            Self::Other => ('-', None),
            Self::Ended => ('E', None),
            Self::Failed => ('X', Some(Color::Red)),
            Self::Unknown => ('?', None),
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
            _ => Self::Collective,
        }
    }
}

/// One rank at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lane {
    pub phase: Phase,
    /// What the rank does: `waits for rank 2 0.1 s: all_reduce #118`.
    pub text: String,
}

/// The shortest duration that is shown for an operation. For one known from a heartbeat it is longer than the time
/// between two heartbeats.
const LASTING: Duration = Duration::from_millis(100);
const LASTING_ELSEWHERE: Duration = Duration::from_secs(2);

/// Returns the lane of `rank`.
pub(crate) fn lane(snapshot: &RunSnapshot, rank: usize) -> Lane {
    let RankSnapshot { at, ops, source } = &snapshot.ranks[rank];
    let has_failed = snapshot.failed == Some(rank);
    let mut phase = if has_failed { Phase::Failed } else { Phase::of(at.operation) };
    if matches!(phase, Phase::Failed | Phase::Ended) {
        return Lane { phase, text: at.to_string() };
    }
    let mut doing = at.to_string();
    let mut since = None;
    let mut waits_for = Vec::new();
    let is_open = |op: &&OpEntry| op.is_open();
    let own = || ops.iter().rev().filter(|op| !op.on_comm_thread);
    if let Some(op) = own().find(is_open) {
        // A rank that waits for its communication thread waits in that thread's oldest collective.
        let on_thread = ops.iter().filter(|op| op.on_comm_thread).find(is_open);
        let on_thread = on_thread.filter(|_| op.at.operation == Operation::Synchronize);
        let shown = on_thread.unwrap_or(op);
        waits_for = snapshot.missing(shown);
        phase = if waits_for.is_empty() { Phase::of(op.at.operation) } else { Phase::Waiting };
        let within = own().filter(is_open).find(|op| op.at.operation.is_compute());
        let within = within.filter(|within| within.at != op.at);
        doing = within.map_or(shown.to_string(), |within| format!("{shown} of {}", within.at));
        since = Some(op.started_at);
    } else if let Some(last) = own().next() {
        phase = Phase::Other;
        doing = format!("after {last}");
        since = last.finished_at;
    }
    let (age, lasting) = match *source {
        Source::Direct => (None, LASTING),
        Source::Heartbeat(age) => (Some(age), LASTING_ELSEWHERE),
        Source::Unknown => return Lane { phase: Phase::Unknown, text: "no heartbeat yet".into() },
    };
    if age.is_some_and(|age| age > 6 * HEARTBEAT_INTERVAL) {
        phase = Phase::Unknown;
    }
    let since = since.map(|since| snapshot.now.saturating_sub(since));
    let since = since.filter(|since| *since >= lasting);
    let age = age.filter(|age| since.is_none() || *age >= lasting);
    let age = age.map_or(String::new(), |age| format!("{:.1} s ago: ", age.as_secs_f64()));
    let since = since.map_or(String::new(), |since| format!(" {:.1} s", since.as_secs_f64()));
    let text = match &waits_for[..] {
        [] => format!("{age}{doing}{since}"),
        [rank] => format!("{age}waits for rank {rank}{since}: {doing}"),
        [first, rest @ ..] => {
            format!("{age}waits for ranks {first} and {} more{since}: {doing}", rest.len())
        }
    };
    Lane { phase, text }
}
