//! Snapshots of a rank's operations, which processes can send to each other, and how the flight recorder takes them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::flight_recorder::{Entry, FlightRecorder, format_call_site};
use crate::operation::{OpId, Operation};

/// A record at the time at which it is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OpSnapshot {
    #[serde(with = "packed")]
    pub at: OpId,
    pub group: Option<u32>,
    pub bucket: Option<u16>,
    /// The call site, as ` at src/main.rs:40`; empty if it is unknown.
    pub call_site: String,
    pub on_comm_thread: bool,
    /// Time since the operation began.
    pub started_ago: Duration,
    /// Time since the operation ended; `None` while it runs, or if it failed.
    pub finished_ago: Option<Duration>,
    /// Time since the rank's GPU finished the work that the operation launched. `None` without a GPU, and if it is
    /// unknown.
    pub on_gpu: Option<Duration>,
}

impl OpSnapshot {
    /// Returns the snapshot of `record` at the time `now` of the run.
    pub(crate) fn new(record: &Entry, now: Duration) -> Self {
        let Entry { begin, started_at, finished_at, on_gpu } = record;
        let ago = |time: Duration| now.saturating_sub(time);
        Self {
            at: begin.at,
            group: begin.group,
            bucket: begin.bucket,
            call_site: format_call_site(begin.call_site),
            on_comm_thread: begin.on_comm_thread,
            started_ago: ago(*started_at),
            finished_ago: finished_at.map(ago),
            on_gpu: on_gpu.map(|[_, finished_at]| ago(finished_at)),
        }
    }

    /// Returns the snapshot after another `time` has passed.
    pub(super) fn later(self, time: Duration) -> Self {
        let later = |duration: Duration| duration.saturating_add(time);
        let (finished_ago, on_gpu) = (self.finished_ago.map(later), self.on_gpu.map(later));
        Self { started_ago: later(self.started_ago), finished_ago, on_gpu, ..self }
    }

    /// Returns whether this is an unfinished operation of the rank itself and not a collective, such as a phase of a
    /// step.
    pub(crate) fn is_open_phase(&self) -> bool {
        self.group.is_none() && self.finished_ago.is_none() && !self.on_comm_thread
    }

    /// Returns the number of the training step whose unfinished phase this is; else `None`.
    pub(crate) fn step(&self) -> Option<u64> {
        use Operation::{Backward, Data, Forward, Optimizer, Step};
        let is_phase = matches!(self.at.operation, Step | Data | Forward | Backward | Optimizer);
        (is_phase && self.is_open_phase()).then_some(self.at.sequence)
    }

    /// Returns whether this is an unfinished collective.
    pub(crate) fn is_open_collective(&self) -> bool {
        self.group.is_some() && self.finished_ago.is_none()
    }
}

/// Serializes an [`OpId`] as one number.
pub(crate) mod packed {
    use serde::de::{Deserialize, Deserializer, Error, Unexpected};
    use serde::ser::Serializer;

    use crate::operation::OpId;

    pub(crate) fn serialize<S: Serializer>(at: &OpId, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(at.packed())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<OpId, D::Error> {
        let number = u64::deserialize(from)?;
        OpId::unpacked(number).ok_or_else(|| {
            D::Error::invalid_value(Unexpected::Unsigned(number), &"what a rank does")
        })
    }
}

impl FlightRecorder {
    /// Returns snapshots of all kept records of `rank` but those of gradients, oldest first.
    pub(crate) fn seen(&self, rank: usize) -> Vec<OpSnapshot> {
        let now = self.now();
        self.lasting(rank).map(|record| OpSnapshot::new(&record, now)).collect()
    }

    /// Returns the kept records of operations with a duration. A gradient is only a moment.
    fn lasting(&self, rank: usize) -> impl DoubleEndedIterator<Item = Entry> {
        self.records(rank, 0).filter(|entry| entry.begin.at.operation != Operation::Gradient)
    }

    /// Returns the training step that `rank` is in; `None` outside of a step.
    pub(crate) fn step_of(&self, rank: usize) -> Option<u64> {
        self.seen(rank).iter().rev().find_map(OpSnapshot::step)
    }

    /// Returns the records that other processes need, at most `most`, oldest first. These are the newest one of the
    /// rank's own thread, all unfinished ones, the last finished one of each group, and the last collective that the
    /// GPU has finished.
    pub(crate) fn recent_ops(&self, rank: usize, most: usize) -> Vec<OpSnapshot> {
        let now = self.now();
        let mut kept: Vec<Entry> = Vec::new();
        for record in self.lasting(rank).rev() {
            let begin = &record.begin;
            let has_newest = kept.iter().any(|entry| !entry.begin.on_comm_thread);
            let has_group = kept
                .iter()
                .any(|entry| entry.begin.group == begin.group && entry.finished_at.is_some());
            let is_news = begin.group.is_some() && !has_group;
            let has_done = kept.iter().any(|entry| entry.on_gpu.is_some());
            let is_done = record.on_gpu.is_some() && begin.group.is_some() && !has_done;
            if record.finished_at.is_none()
                || is_news
                || is_done
                || !(begin.on_comm_thread || has_newest)
            {
                kept.push(record);
            }
            if kept.len() == most {
                break;
            }
        }
        kept.iter().rev().map(|record| OpSnapshot::new(record, now)).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::runtime::OpStart;
    use crate::runtime::flight_recorder::RECORDS;

    #[test]
    fn recent_ops_hold_open_ops_and_the_newest_of_each_group() {
        let recorder = FlightRecorder::new(1, RECORDS);
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
