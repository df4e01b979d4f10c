//! What a rank was seen doing, as other processes can be told it too.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::flight_recorder::{Entry, FlightRecorder, format_call_site};
use super::primitives::{Mutex, MutexGuard};
use crate::operation::{OpId, Operation};

/// A record, as who looks at it sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OpSnapshot {
    #[serde(with = "packed")]
    pub at: OpId,
    pub group: Option<u32>,
    pub bucket: Option<u16>,
    /// ` at src/main.rs:40`; empty if that is not known.
    pub place: String,
    pub on_comm_thread: bool,
    /// How long ago it began.
    pub began: Duration,
    /// And ended, if it has.
    pub ended: Option<Duration>,
    /// And when the rank's GPU was through with what was launched in it, if it has one, and that is known.
    pub on_gpu: Option<Duration>,
}

impl OpSnapshot {
    /// At the time `now` of the run.
    pub(crate) fn new(record: &Entry, now: Duration) -> Self {
        let Entry { begin, started_at: arrived, finished_at: ended, on_gpu } = record;
        let ago = |time: Duration| now.saturating_sub(time);
        Self {
            at: begin.at,
            group: begin.group,
            bucket: begin.bucket,
            place: format_call_site(begin.place),
            on_comm_thread: begin.on_comm_thread,
            began: ago(*arrived),
            ended: ended.map(ago),
            on_gpu: on_gpu.map(|[_, ended]| ago(ended)),
        }
    }

    /// The same, when some time has passed.
    fn later(self, time: Duration) -> Self {
        let later = |it: Duration| it.saturating_add(time);
        let (ended, on_gpu) = (self.ended.map(later), self.on_gpu.map(later));
        Self { began: later(self.began), ended, on_gpu, ..self }
    }

    /// Whether a rank that is seen so is in a phase of a step, and in nothing else that is known.
    pub(crate) fn is_open_phase(&self) -> bool {
        self.group.is_none() && self.ended.is_none() && !self.on_comm_thread
    }

    /// The step of training that it is a phase of, if it goes on.
    pub(crate) fn step(&self) -> Option<u64> {
        use Operation::{Backward, Data, Forward, Optimizer, Step};
        let is_phase = matches!(self.at.operation, Step | Data | Forward | Backward | Optimizer);
        (is_phase && self.is_open_phase()).then_some(self.at.sequence)
    }

    /// Whether it waits in a collective.
    pub(crate) fn is_open_collective(&self) -> bool {
        self.group.is_some() && self.ended.is_none()
    }
}

/// `At` as one number.
mod packed {
    use serde::de::{Deserialize, Deserializer, Error, Unexpected};
    use serde::ser::Serializer;

    use crate::operation::OpId;

    pub(super) fn serialize<S: Serializer>(at: &OpId, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(at.packed())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<OpId, D::Error> {
        let number = u64::deserialize(from)?;
        OpId::unpacked(number).ok_or_else(|| {
            D::Error::invalid_value(Unexpected::Unsigned(number), &"what a rank does")
        })
    }
}

impl FlightRecorder {
    /// All that is kept of `rank`, the oldest first.
    pub(crate) fn seen(&self, rank: usize) -> Vec<OpSnapshot> {
        let now = self.now();
        self.lasting(rank).map(|record| OpSnapshot::new(&record, now)).collect()
    }

    /// What `rank` does and has done, but for moments within.
    fn lasting(&self, rank: usize) -> impl DoubleEndedIterator<Item = Entry> {
        self.records(rank, 0).filter(|it| it.begin.at.operation != Operation::Gradient)
    }

    /// The step of training that `rank` is in, if it is in one.
    pub(crate) fn step_of(&self, rank: usize) -> Option<u64> {
        self.seen(rank).iter().rev().find_map(OpSnapshot::step)
    }

    /// What of it others should know, at most `most`, the oldest first: the newest that `rank` does itself, what goes on,
    /// of each group what has ended last, and how far the GPU has come.
    pub(crate) fn recent_ops(&self, rank: usize, most: usize) -> Vec<OpSnapshot> {
        let now = self.now();
        let mut kept: Vec<Entry> = Vec::new();
        for record in self.lasting(rank).rev() {
            let begin = &record.begin;
            let has_newest = kept.iter().any(|it| !it.begin.on_comm_thread);
            let has_group =
                kept.iter().any(|it| it.begin.group == begin.group && it.finished_at.is_some());
            let is_news = begin.group.is_some() && !has_group;
            let has_done = kept.iter().any(|it| it.on_gpu.is_some());
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

/// What other processes have told of their ranks, and when that came.
#[derive(Debug, Default)]
pub(crate) struct RemoteSnapshots(Mutex<BTreeMap<usize, (Instant, Vec<OpSnapshot>)>>);

impl RemoteSnapshots {
    /// Notes what `rank` was seen doing, the newest last.
    pub(crate) fn note(&self, rank: usize, seen: &[OpSnapshot]) {
        self.all().insert(rank, (Instant::now(), seen.into()));
    }

    /// What `rank` was seen doing; nothing, if nothing has been told.
    pub(crate) fn of(&self, rank: usize) -> Vec<OpSnapshot> {
        let Some((when, seen)) = self.all().get(&rank).cloned() else { return Vec::new() };
        let since = when.elapsed();
        seen.into_iter().map(|it| it.later(since)).collect()
    }

    /// Whether `rank`, as far as it has told, has not come to the last collective of all ranks in `seen`. (On its way into
    /// one, [`RunContext::activity`](super::RunContext::activity) has it already.)
    pub(crate) fn is_behind(&self, rank: usize, seen: &[OpSnapshot]) -> bool {
        let of_all = |it: &&OpSnapshot| it.group == Some(0);
        let Some(last) = seen.iter().rev().find(of_all) else { return false };
        let theirs = self.of(rank).iter().filter(of_all).map(|it| it.at.sequence).max();
        theirs.is_none_or(|it| it < last.at.sequence)
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<usize, (Instant, Vec<OpSnapshot>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::runtime::OpStart;
    use crate::runtime::flight_recorder::RECORDS;

    #[test]
    fn a_digest_has_what_goes_on_and_how_far_each_group_is() {
        let timeline = FlightRecorder::new(1, RECORDS);
        let begin = |operation, sequence, group: Option<u32>, beside| {
            let at = OpId { operation, sequence };
            let begin = OpStart::alone(at, Location::caller());
            timeline.begin(0, OpStart { group, on_comm_thread: beside, ..begin })
        };
        let end = |mark| {
            timeline.end(0, mark);
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
            timeline.recent_ops(0, most).iter().map(|it| it.at.to_string()).collect()
        };
        assert_eq!(
            told(8),
            ["barrier #4", "all_reduce #49", "backward #50", "all_reduce #50", "all_reduce #51"]
        );
        assert_eq!(told(2), ["all_reduce #50", "all_reduce #51"]);
        assert_eq!((timeline.seen(0).len(), timeline.step_of(0)), (104, Some(50)));
        let sightings = RemoteSnapshots::default();
        assert!(sightings.of(3).is_empty());
        sightings.note(3, &timeline.recent_ops(0, 8));
        let [barrier, _, backward, ..] = &sightings.of(3)[..] else { panic!("five") };
        assert!(barrier.ended.is_some() && barrier.ended <= Some(barrier.began));
        assert!(backward.is_open_phase() && backward.place.contains("seen.rs:"));
        // It has come as far as a rank with the same collectives, and not to the one after them.
        let mine = FlightRecorder::new(1, RECORDS);
        let begin = |sequence| {
            let at = OpId { operation: Operation::AllReduce, sequence };
            mine.begin(0, OpStart { group: Some(0), ..OpStart::alone(at, Location::caller()) });
        };
        begin(51);
        assert!(!sightings.is_behind(3, &mine.seen(0)));
        begin(52);
        assert!(sightings.is_behind(3, &mine.seen(0)) && !sightings.is_behind(3, &[]));
    }
}
