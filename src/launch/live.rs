//! The ranks of a run, for the live view: those of this process from the flight recorder, others from heartbeats.

use std::any::Any;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;

use super::RunView;
use crate::operation::{OpId, Operation};
use crate::runtime::{PeerStatus, RemoteSnapshots, RunContext, StopRequest};
use crate::telemetry::{LiveView, Printer, RankSnapshot, RunSnapshot, Source};

/// The number of newest entries that a snapshot reads: of all ranks together, and the limits for each.
const ENTRIES: usize = 4096;
const ENTRIES_PER_RANK: [usize; 2] = [16, 256];

/// The time between two readings of heartbeats.
const HEARTBEATS: Duration = Duration::from_millis(500);

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

/// Stops the view's reads of the ranks' state when it is dropped, after the ranks have ended.
struct EndRanks(ShownView);

impl Drop for EndRanks {
    fn drop(&mut self) {
        if let Some(view) = &*self.0.lock() {
            view.end_ranks();
        }
    }
}

impl RunView for Live {
    fn start(
        &self,
        run: &Arc<RunContext>,
        local_ranks: Range<usize>,
        labels: Vec<String>,
        stop: Option<Arc<StopRequest>>,
    ) -> Option<Box<dyn Any>> {
        let (run, title) = (run.clone(), self.title.clone());
        let peers = run.peer_status.clone().map(PeerHeartbeats::start);
        let ranks = Ranks { run, local_ranks, peers };
        let source = Box::new(move || ranks.snapshot());
        *self.shown.lock() = Some(LiveView::start(&self.printer, title, labels, stop, source)?);
        Some(Box::new(EndRanks(self.shown.clone())))
    }
}

/// The ranks of a run.
struct Ranks {
    run: Arc<RunContext>,
    /// The ranks of this process.
    local_ranks: Range<usize>,
    /// The ranks of other processes; `None` without any.
    peers: Option<PeerHeartbeats>,
}

impl Ranks {
    fn snapshot(&self) -> RunSnapshot {
        let [least, most] = ENTRIES_PER_RANK;
        let entries = (ENTRIES / self.local_ranks.len().max(1)).clamp(least, most) as u64;
        let recorder = &self.run.flight_recorder;
        let now = recorder.now();
        let of_rank = |rank: usize| {
            if !self.local_ranks.contains(&rank) {
                return self.peers.as_ref().map_or_else(unknown, |peers| peers.snapshot(rank, now));
            }
            let newest = recorder.entries(rank, recorder.count(rank).saturating_sub(entries));
            let lasting = newest.filter(|op| op.at.operation != Operation::Gradient);
            let at = self.run.activity[rank].now();
            // As of `now`: the ranks are read one after the other.
            let ops = lasting.filter_map(|op| op.seen_at(now)).collect();
            RankSnapshot { at, ops, source: Source::Direct }
        };
        RunSnapshot {
            now,
            ranks: (0..self.run.activity.len()).map(of_rank).collect(),
            groups: self.run.known_groups(),
            failed: self.run.cancel.cancelled_by(),
        }
    }
}

fn unknown() -> RankSnapshot {
    let at = OpId { operation: Operation::Start, sequence: 0 };
    RankSnapshot { at, ops: Vec::new(), source: Source::Unknown }
}

/// The ranks of other processes: a thread reads their heartbeats, since that may take a moment.
///
/// It keeps them for itself: what a failure report says does not depend on the view.
struct PeerHeartbeats {
    snapshots: Arc<RemoteSnapshots>,
    /// `None` if it could not be started; nothing is known of these ranks then.
    thread: Option<JoinHandle<()>>,
    /// Its drop ends the thread.
    stop_tx: Option<Sender<Infallible>>,
}

impl PeerHeartbeats {
    fn start(source: Arc<dyn PeerStatus>) -> Self {
        let snapshots = Arc::<RemoteSnapshots>::default();
        let (stop_tx, stop_rx) = bounded(0);
        let for_thread = snapshots.clone();
        let thread = thread::Builder::new().name("live peers".into());
        let thread = thread.spawn(move || read(&for_thread, &*source, &stop_rx)).ok();
        Self { snapshots, thread, stop_tx: Some(stop_tx) }
    }

    fn snapshot(&self, rank: usize, now: Duration) -> RankSnapshot {
        let Some((heartbeat, age)) = self.snapshots.heartbeat(rank, now) else { return unknown() };
        let mut ops = heartbeat.seen;
        ops.retain(|op| op.at.operation != Operation::Gradient);
        RankSnapshot { at: heartbeat.at, ops, source: Source::Heartbeat(age) }
    }
}

/// Reads heartbeats until the sender of `stop_rx` is dropped.
fn read(snapshots: &RemoteSnapshots, source: &dyn PeerStatus, stop_rx: &Receiver<Infallible>) {
    loop {
        let began = Instant::now();
        for heartbeat in source.heartbeats(stop_rx.clone()) {
            snapshots.note(heartbeat);
        }
        // Many processes are asked less often.
        let next = HEARTBEATS.max(20 * began.elapsed());
        if stop_rx.recv_timeout(next) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

impl Drop for PeerHeartbeats {
    fn drop(&mut self) {
        drop(self.stop_tx.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
