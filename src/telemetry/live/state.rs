//! The state of the view: what it draws, as plain data, and how snapshots and keys change it.

use std::collections::VecDeque;
use std::time::Duration;

use super::lanes::{Lane, Phase, lanes};
use super::snapshot::RunSnapshot;
use super::waited_for::{LastRanks, Presence};
use crate::operation::Operation;
use crate::records::TrainMetrics;
use crate::runtime::OpEntry;
use crate::telemetry::metrics_logger::drop_every_second;

/// The number of events that are kept.
const EVENTS: usize = 200;

/// The number of points of the loss curve; of more, every second one is dropped.
const POINTS: usize = 1000;

/// The window of the lanes of ranks that are known from heartbeats only.
const HEARTBEAT_WINDOW: Duration = Duration::from_secs(10);

/// All that the view draws.
#[derive(Debug, Default)]
pub(super) struct LiveState {
    /// The run in a few words.
    pub title: String,
    /// A label for each rank, such as `CPU:0`.
    pub labels: Vec<String>,
    pub snapshot: RunSnapshot,
    pub lanes: Vec<Lane>,
    /// The time that the lanes show, up to now.
    pub window: Duration,
    pub last_ranks: LastRanks,
    pub presence: Presence,
    /// The newest metrics.
    pub metrics: Option<TrainMetrics>,
    /// The step and the loss of the curve.
    pub curve: Vec<(f64, f64)>,
    /// The steps of the run, and those made before it was resumed; `None` if they are not known.
    pub steps: Option<[u64; 2]>,
    /// The memory of the process and the memory that it may use, in bytes.
    pub memory: [Option<u64>; 2],
    /// The newest events, newest last, each with its time.
    pub events: VecDeque<(Duration, String)>,
    pub selected: usize,
    pub frozen: bool,
    pub shows_help: bool,
    /// Whether the ranks have ended.
    pub has_ended: bool,
    /// The step that rank 0 was in at the first snapshot, and its time.
    first_step: Option<(u64, Duration)>,
    /// The phases of all ranks at earlier snapshots, for ranks that are known from heartbeats only.
    history: VecDeque<(Duration, Vec<Phase>)>,
}

impl LiveState {
    /// Returns the state before the first snapshot, for ranks with these labels.
    pub(super) fn new(title: String, labels: Vec<String>) -> Self {
        Self { title, labels, ..Self::default() }
    }

    /// Shows another snapshot of the ranks.
    pub(super) fn update(&mut self, snapshot: RunSnapshot) {
        let arrivals = snapshot.arrivals();
        self.lanes = lanes(&snapshot, &arrivals);
        if snapshot.has_heartbeats {
            self.sample(&snapshot);
        } else {
            self.last_ranks.count(&arrivals);
            self.window = window(&snapshot);
        }
        self.snapshot = snapshot;
        self.selected = self.selected.min(self.lanes.len().saturating_sub(1));
        if let (None, Some(step)) = (self.first_step, self.step()) {
            self.first_step = Some((step, self.snapshot.now));
        }
    }

    /// Makes lanes of the phases at the snapshots so far: heartbeats do not tell more.
    fn sample(&mut self, snapshot: &RunSnapshot) {
        let phases: Vec<Phase> = self.lanes.iter().map(|lane| lane.phase).collect();
        let is_there = |phase: &Phase| matches!(phase, Phase::Communication | Phase::Waiting);
        self.presence.count(phases.iter().map(is_there).collect());
        self.history.push_back((snapshot.now, phases));
        let start = snapshot.now.saturating_sub(HEARTBEAT_WINDOW);
        while self.history.front().is_some_and(|(at, _)| *at < start) {
            self.history.pop_front();
        }
        self.window = HEARTBEAT_WINDOW;
        for (rank, lane) in self.lanes.iter_mut().enumerate() {
            let mut before = start;
            lane.spans.clear();
            for (at, phases) in &self.history {
                lane.spans.push((before..*at, phases.get(rank).copied().unwrap_or_default()));
                before = *at;
            }
        }
    }

    /// Adds metrics of training.
    pub(super) fn add_points(&mut self, points: Vec<TrainMetrics>) {
        for point in points {
            self.curve.push((point.step as f64, point.loss));
            if self.curve.len() > POINTS {
                drop_every_second(&mut self.curve);
            }
            self.metrics = Some(point);
        }
    }

    /// Adds events of the time `now`.
    pub(super) fn add_events(&mut self, now: Duration, lines: Vec<String>) {
        self.events.extend(lines.into_iter().map(|line| (now, line)));
        self.events.drain(..self.events.len().saturating_sub(EVENTS));
    }

    /// Selects the rank `by` places further down.
    pub(super) fn select(&mut self, by: isize) {
        let last = self.lanes.len().saturating_sub(1);
        self.selected = self.selected.saturating_add_signed(by).min(last);
    }

    /// Returns the newest step that any rank is known to be in; `None` before the first step.
    pub(super) fn step(&self) -> Option<u64> {
        let ops = self.snapshot.ranks.iter().flat_map(|rank| &rank.ops);
        ops.filter(|op| op.is_step_phase()).map(|op| op.at.sequence).max()
    }

    /// Returns the steps per second since the first snapshot; `None` until two steps have begun.
    pub(super) fn steps_per_second(&self) -> Option<f64> {
        let (first, at) = self.first_step?;
        let steps = self.step()?.checked_sub(first).filter(|steps| *steps > 0)?;
        let time = self.snapshot.now.checked_sub(at)?.as_secs_f64();
        (time > 0.0).then(|| steps as f64 / time)
    }

    /// Returns the time that the run still needs at its present rate; `None` while that is unknown.
    pub(super) fn time_left(&self) -> Option<Duration> {
        let [steps, _] = self.steps?;
        let left = steps.saturating_sub(self.step()?) as f64 / self.steps_per_second()?;
        Duration::try_from_secs_f64(left).ok()
    }

    /// Returns the share of collectives in which `rank` came last, or of snapshots in which it was in one, from 0 to 1.
    pub(super) fn share(&self, rank: usize) -> Option<f64> {
        if self.snapshot.has_heartbeats {
            self.presence.share(rank)
        } else {
            self.last_ranks.share(rank)
        }
    }

    /// Returns a sentence on the rank that the others wait for.
    pub(super) fn straggler(&self) -> Option<String> {
        if self.snapshot.has_heartbeats {
            self.presence.straggler()
        } else {
            self.last_ranks.straggler()
        }
    }
}

/// Returns a window of about two steps of the first rank that makes any.
fn window(snapshot: &RunSnapshot) -> Duration {
    const SHORTEST: Duration = Duration::from_micros(100);
    let steps = |ops: &[OpEntry]| -> Vec<Duration> {
        let steps = ops.iter().filter(|op| op.at.operation == Operation::Step);
        steps.map(|op| op.started_at).collect()
    };
    let starts =
        snapshot.ranks.iter().map(|rank| steps(&rank.ops)).find(|starts| !starts.is_empty());
    let Some(starts) = starts else { return Duration::from_secs(1) };
    let mut each: Vec<Duration> =
        starts.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
    each.sort_unstable();
    let median = each.get(each.len() / 2).copied();
    median.map_or(snapshot.now.saturating_sub(starts[0]), |median| 2 * median).max(SHORTEST)
}
