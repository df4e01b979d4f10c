//! The state of the view: what it draws, as plain data, and how snapshots change it.

use std::collections::VecDeque;
use std::time::Duration;

use super::lanes::{Lane, Phase, lane};
use crate::curve::Curve;
use engine::events::RunSnapshot;
use engine::records::TrainMetrics;

/// The number of events that are kept.
const EVENTS: usize = 200;

/// The most points of the loss curve.
const POINTS: usize = 1000;

/// The number of earlier snapshots that are kept: more than a terminal has columns.
const MOMENTS: usize = 500;

/// The number of newest snapshots that count for a rank's share.
const COUNTED: usize = 100;

/// All that the view draws.
#[derive(Debug, Default)]
pub(crate) struct LiveState {
    /// The run in a few words.
    pub title: String,
    /// A label for each rank, such as `CPU:0`.
    pub labels: Vec<String>,
    pub now: Duration,
    pub failed: Option<usize>,
    /// The newest step that any rank is known to be in; `None` before the first step.
    pub step: Option<u64>,
    pub lanes: Vec<Lane>,
    /// The phases of all ranks at the newest snapshots, newest last.
    pub history: VecDeque<Vec<Phase>>,
    /// The newest metrics.
    pub metrics: Option<TrainMetrics>,
    /// The step and the loss of the curve.
    pub curve: Curve<(f64, f64), POINTS>,
    /// The steps of the run; `None` if they are not known.
    pub steps: Option<u64>,
    /// The newest events, newest last, each with its time.
    pub events: VecDeque<(Duration, String)>,
    /// The rank of the first lane that is shown, if not all have room.
    pub first_lane: usize,
    /// Whether the ranks have ended.
    pub has_ended: bool,
    /// The step of the first snapshot that had one, and its time.
    pub first_step: Option<(u64, Duration)>,
}

impl LiveState {
    /// Shows another snapshot of the ranks.
    pub(crate) fn update(&mut self, snapshot: &RunSnapshot) {
        self.now = snapshot.now;
        self.failed = snapshot.failed;
        let ops = snapshot.ranks.iter().flat_map(|rank| &rank.ops);
        self.step = ops.filter(|op| op.is_step_phase()).map(|op| op.at.sequence).max();
        self.first_step = self.first_step.or(self.step.map(|step| (step, self.now)));
        self.lanes = (0..snapshot.ranks.len()).map(|rank| lane(snapshot, rank)).collect();
        self.history.push_back(self.lanes.iter().map(|lane| lane.phase).collect());
        self.history.drain(..self.history.len().saturating_sub(MOMENTS));
    }

    /// Adds metrics of training.
    pub(crate) fn add_points(&mut self, points: Vec<TrainMetrics>) {
        for point in points {
            self.curve.add((point.step as f64, point.loss));
            self.metrics = Some(point);
        }
    }

    /// Adds events of the time `now`.
    pub(crate) fn add_events(&mut self, now: Duration, lines: Vec<String>) {
        self.events.extend(lines.into_iter().map(|line| (now, line)));
        self.events.drain(..self.events.len().saturating_sub(EVENTS));
    }

    /// Begins with the lane `by` places further down.
    pub(crate) fn scroll(&mut self, by: isize) {
        let last = self.lanes.len().saturating_sub(1);
        self.first_lane = self.first_lane.saturating_add_signed(by).min(last);
    }

    /// Returns the steps per second since the first snapshot; `None` until two steps have begun.
    pub(crate) fn steps_per_second(&self) -> Option<f64> {
        let (first, at) = self.first_step?;
        let steps = self.step?.checked_sub(first).filter(|steps| *steps > 0)?;
        let time = self.now.checked_sub(at)?.as_secs_f64();
        (time > 0.0).then(|| steps as f64 / time)
    }

    /// Returns the time that the run still needs at its present rate; `None` while that is unknown.
    pub(crate) fn time_left(&self) -> Option<Duration> {
        let left = self.steps?.saturating_sub(self.step?) as f64 / self.steps_per_second()?;
        Duration::try_from_secs_f64(left).ok()
    }

    /// Returns the share of the newest snapshots in which `rank` was in a collective, from 0 to 1; `None` without any.
    pub(crate) fn share(&self, rank: usize) -> Option<f64> {
        let is_there = |phases: &&Vec<Phase>| {
            matches!(phases.get(rank), Some(Phase::Collective | Phase::Waiting))
        };
        let count = self.history.len().min(COUNTED);
        let times = self.history.iter().rev().take(COUNTED).filter(is_there).count();
        (count > 0).then(|| times as f64 / count as f64)
    }

    /// Returns a sentence on the rank that the others wait for: it is hardly ever in a collective itself. `None` if no rank
    /// stands out.
    pub(crate) fn straggler(&self) -> Option<String> {
        let share = |rank| Some((self.share(rank)?, rank));
        let mut shares: Vec<(f64, usize)> = (0..self.lanes.len()).filter_map(share).collect();
        shares.sort_by(|a, b| a.0.total_cmp(&b.0));
        let [(least, rank), (next, _), ..] = shares[..] else { return None };
        let stands_out = self.history.len() >= 10 && next - least > 0.3;
        let [least, next] = [least, next].map(|share| 100.0 * share);
        stands_out.then(|| {
            format!("the others wait for rank {rank}: in collectives {least:.0} % of the time, they {next:.0} %")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_that_is_hardly_ever_in_collectives_is_the_straggler() {
        let mut state = LiveState { lanes: vec![Lane::default(); 3], ..LiveState::default() };
        for number in 0..20 {
            assert_eq!(state.straggler().is_some(), number >= 10, "{number}");
            state.history.push_back(vec![Phase::Waiting, Phase::Step, Phase::Collective]);
        }
        assert!(state.straggler().unwrap().contains("wait for rank 1: in collectives 0 %"));
    }
}
