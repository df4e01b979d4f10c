//! The ranks of a run, for the live view: those of this process from the flight recorder, others from heartbeats.

use std::any::Any;
use std::sync::Arc;

use parking_lot::Mutex;

use super::RunView;
use crate::operation::{OpId, Operation};
use crate::runtime::{RankStatus, RunContext, StopRequest};
use crate::telemetry::{LiveView, Printer, RankSnapshot, RunSnapshot, Source};

/// The number of newest entries that a snapshot reads: of all ranks together, and the limits for each.
const ENTRIES: usize = 4096;
const ENTRIES_PER_RANK: [usize; 2] = [16, 256];

/// The live view that a run is to show.
#[derive(Debug, Clone)]
pub(crate) struct Live {
    pub printer: Arc<Printer>,
    /// The run in a few words.
    pub title: String,
    pub shown: ShownView,
}

/// The view, while it is shown.
pub(crate) type ShownView = Arc<Mutex<Option<LiveView>>>;

/// A guard that tells the view how the ranks have ended, when it is dropped.
struct EndRanks(ShownView, Arc<RunContext>);

impl Drop for EndRanks {
    fn drop(&mut self) {
        if let Some(view) = &*self.0.lock() {
            view.end_ranks(snapshot(&self.1));
        }
    }
}

impl RunView for Live {
    fn start(
        &self,
        run: &Arc<RunContext>,
        labels: Vec<String>,
        stop: Option<Arc<StopRequest>>,
    ) -> Option<Box<dyn Any>> {
        let (run, title) = (run.clone(), self.title.clone());
        let ended = EndRanks(self.shown.clone(), run.clone());
        let source = Box::new(move || snapshot(&run));
        let view = LiveView::start(&self.printer, title, labels, stop, source);
        let view = view.map_err(|error| {
            self.printer.report(&format!("--live: {error}"));
        });
        *self.shown.lock() = Some(view.ok()?);
        Some(Box::new(ended))
    }
}

/// Returns what the ranks do now.
fn snapshot(run: &RunContext) -> RunSnapshot {
    let [least, most] = ENTRIES_PER_RANK;
    let entries = (ENTRIES / run.local_ranks.len().max(1)).clamp(least, most) as u64;
    let recorder = &run.flight_recorder;
    let now = recorder.now();
    let of_rank = |rank: usize| {
        if !run.local_ranks.contains(&rank) {
            let Some((status, age)) = run.remote_snapshots.heartbeat(rank, now) else {
                let at = OpId { operation: Operation::Start, sequence: 0 };
                return RankSnapshot { at, ops: Vec::new(), source: Source::Unknown };
            };
            let RankStatus { at, seen: ops } = status;
            return RankSnapshot { at, ops, source: Source::Heartbeat(age) };
        }
        let newest = recorder.entries(rank, recorder.count(rank).saturating_sub(entries));
        let lasting = newest.filter(|op| op.at.operation != Operation::Gradient);
        let at = run.activity[rank].now();
        // As of `now`: the ranks are read one after the other.
        let ops = lasting.filter_map(|op| op.seen_at(now)).collect();
        RankSnapshot { at, ops, source: Source::Direct }
    };
    RunSnapshot {
        now,
        ranks: (0..run.activity.len()).map(of_rank).collect(),
        groups: run.known_groups(),
        failed: run.cancel.cancelled_by(),
    }
}
