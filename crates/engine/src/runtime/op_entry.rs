//! [`OpEntry`]: what the flight recorder knows of an operation. Observers, heartbeats and failure reports
//! are made of it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_with::SerializeDisplay;

use super::flight_recorder::{CallSite, FlightRecorder};
use crate::operation::{OpId, Operation};

/// One operation of a rank. Times are since the start of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpEntry {
    pub at: OpId,
    /// The group of ranks, for a collective; the same number on all of them.
    pub group: Option<u32>,
    /// The bucket of gradients.
    pub bucket: Option<u16>,
    /// Size on this rank: bytes that are moved, or samples of a forward pass.
    pub amount: u64,
    pub source_line: SourceLine,
    /// Whether a communication thread runs the operation.
    pub on_comm_thread: bool,
    pub started_at: Duration,
    /// `None` while the operation runs, or if it failed.
    pub finished_at: Option<Duration>,
    /// Times at which the rank's GPU started and finished the work that the operation launched. `None` on a CPU, and
    /// until the times are known.
    pub on_gpu: Option<[Duration; 2]>,
}

/// The source line that called the library.
#[derive(Debug, Clone, PartialEq, Eq, SerializeDisplay, Deserialize)]
#[serde(from = "String")]
pub enum SourceLine {
    Unknown,
    /// A line of this process's program.
    Here(CallSite),
    /// A line as another process sent it: `src/main.rs:40`.
    Text(Arc<str>),
}

impl SourceLine {
    /// Returns the line for a message, as ` at src/main.rs:40`; empty if it is unknown.
    pub(crate) fn in_message(&self) -> String {
        match self {
            Self::Unknown => String::new(),
            _ => format!(" at {self}"),
        }
    }
}

impl fmt::Display for SourceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => Ok(()),
            Self::Here(call_site) => write!(f, "{}:{}", call_site.file(), call_site.line()),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl From<String> for SourceLine {
    fn from(text: String) -> Self {
        if text.is_empty() { Self::Unknown } else { Self::Text(text.into()) }
    }
}

impl fmt::Display for OpEntry {
    /// Writes `all_reduce #118 (bucket 3)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bucket {
            Some(bucket) => write!(f, "{} (bucket {bucket})", self.at),
            None => write!(f, "{}", self.at),
        }
    }
}

impl OpEntry {
    /// Returns the entry of an operation of which no more is known than that it began at `started_at`.
    pub fn new(at: OpId, started_at: Duration) -> Self {
        Self {
            at,
            group: None,
            bucket: None,
            amount: 0,
            source_line: SourceLine::Unknown,
            on_comm_thread: false,
            started_at,
            finished_at: None,
            on_gpu: None,
        }
    }

    /// Returns whether the operation runs, or failed.
    pub fn is_open(&self) -> bool {
        self.finished_at.is_none()
    }

    /// Returns whether the operation is a collective in which ranks wait for others.
    pub fn is_collective(&self) -> bool {
        self.group.is_some() && self.at.operation != Operation::Synchronize
    }

    /// Returns whether the operation is a phase of a training step.
    pub fn is_step_phase(&self) -> bool {
        use Operation::{Backward, Data, Forward, Optimizer, Step};
        matches!(self.at.operation, Step | Data | Forward | Backward | Optimizer)
    }

    /// Returns whether this is an unfinished operation of the rank itself and not a collective, such as a phase of a
    /// step.
    pub(crate) fn is_open_phase(&self) -> bool {
        self.group.is_none() && self.is_open() && !self.on_comm_thread
    }

    /// Returns the number of the training step whose unfinished phase this is; else `None`.
    pub(crate) fn step(&self) -> Option<u64> {
        (self.is_step_phase() && self.is_open_phase()).then_some(self.at.sequence)
    }

    /// Returns the end of the operation, or `now` while it runs.
    pub fn end(&self, now: Duration) -> Duration {
        self.finished_at.unwrap_or(now).max(self.started_at)
    }

    /// Returns the operation as it was at the time `now`; `None` if it had not begun.
    pub fn seen_at(self, now: Duration) -> Option<Self> {
        let finished_at = self.finished_at.filter(|end| *end <= now);
        (self.started_at <= now).then_some(Self { finished_at, ..self })
    }

    /// Returns the entry with each of its times converted by `convert`, from one clock to another.
    pub(super) fn convert_times(self, convert: impl Fn(Duration) -> Duration) -> Self {
        Self {
            started_at: convert(self.started_at),
            finished_at: self.finished_at.map(&convert),
            on_gpu: self.on_gpu.map(|times| times.map(&convert)),
            ..self
        }
    }

    /// Returns the entry of what the rank's GPU did; `None` if that is not known.
    pub(crate) fn of_gpu(&self) -> Option<Self> {
        let [started_at, finished_at] = self.on_gpu?;
        Some(Self { started_at, finished_at: Some(finished_at), on_gpu: None, ..self.clone() })
    }
}

impl FlightRecorder {
    /// Returns all kept entries of `rank` but those of gradients, which are moments, oldest first.
    pub(crate) fn seen(&self, rank: usize) -> Vec<OpEntry> {
        self.lasting(rank).collect()
    }

    fn lasting(&self, rank: usize) -> impl DoubleEndedIterator<Item = OpEntry> {
        self.entries(rank, 0).filter(|op| op.at.operation != Operation::Gradient)
    }

    /// Returns the training step that `rank` is in; `None` outside of a step.
    pub(crate) fn step_of(&self, rank: usize) -> Option<u64> {
        self.lasting(rank).rev().find_map(|op| op.step())
    }

    /// Returns the entries that other processes need, at most `most`, oldest first. These are the newest one of the
    /// rank's own thread, all unfinished ones, the last finished one of each group, and the last collective that the
    /// GPU has finished.
    pub(crate) fn recent_ops(&self, rank: usize, most: usize) -> Vec<OpEntry> {
        let mut kept: Vec<OpEntry> = Vec::new();
        for op in self.lasting(rank).rev() {
            let has_newest = kept.iter().any(|kept| !kept.on_comm_thread);
            let has_group = kept.iter().any(|kept| kept.group == op.group && !kept.is_open());
            let is_news = op.group.is_some() && !has_group;
            let has_done = kept.iter().any(|kept| kept.on_gpu.is_some());
            let is_done = op.on_gpu.is_some() && op.group.is_some() && !has_done;
            if op.is_open() || is_news || is_done || !(op.on_comm_thread || has_newest) {
                kept.push(op);
            }
            if kept.len() == most {
                break;
            }
        }
        kept.reverse();
        kept
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::runtime::OpStart;
    use crate::runtime::flight_recorder::ENTRIES;

    #[test]
    fn recent_ops_hold_open_ops_and_the_newest_of_each_group() {
        let recorder = FlightRecorder::new(1, ENTRIES);
        let begin = |operation, sequence, group: Option<u32>, on_comm_thread| {
            let at = OpId { operation, sequence };
            let begin = OpStart::alone(at, Location::caller());
            recorder.begin(0, OpStart { group, on_comm_thread, ..begin })
        };
        let end = |span| {
            recorder.end(0, span);
        };
        end(begin(Operation::Barrier, 4, Some(9), false));
        for step in 0..50 {
            end(begin(Operation::Data, step, None, false));
            end(begin(Operation::AllReduce, step, Some(0), true));
        }
        begin(Operation::Backward, 50, None, false);
        begin(Operation::AllReduce, 50, Some(0), true);
        begin(Operation::AllReduce, 51, Some(0), true);
        let told = |most| -> Vec<String> {
            recorder.recent_ops(0, most).iter().map(|op| op.at.to_string()).collect()
        };
        assert_eq!(
            told(8),
            ["barrier #4", "all_reduce #49", "backward #50", "all_reduce #50", "all_reduce #51"]
        );
        assert_eq!(told(2), ["all_reduce #50", "all_reduce #51"]);
        assert_eq!((recorder.seen(0).len(), recorder.step_of(0)), (104, Some(50)));
    }
}
