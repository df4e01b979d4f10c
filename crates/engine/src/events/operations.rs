//! The dump of the flight recorder at the end of the run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::operation::Operation;
use crate::runtime::{OpEntry, OpTotals, RunContext};

/// The flight recorder's entries of the ranks of one process, at the end of the run.
#[derive(Debug, Serialize)]
pub struct FlightRecorderDump {
    /// This process's number, and the number of processes of the run.
    pub process: [usize; 2],
    /// The start of the clock of all times here, by the clock of rank 0's process, in seconds since that process started to
    /// measure.
    pub start: f64,
    /// Largest error of `start` at that time; `None` with a single process.
    pub clock_error: Option<Duration>,
    /// The time at which the entries were read.
    pub taken: Duration,
    /// The number of ranks of all processes.
    pub world_size: usize,
    /// Whether all_reduces have taken as long as on a simulated network.
    pub simulates_network: bool,
    /// The ranks of this process, in order of rank.
    pub ranks: Vec<RankEntries>,
    /// The ranks of each group that this process has joined. Group 0 has all ranks.
    pub groups: BTreeMap<u32, Arc<[usize]>>,
}

/// The entries of one rank.
#[derive(Debug, Serialize)]
pub struct RankEntries {
    /// The rank.
    pub rank: usize,
    /// Its device, as `CPU:0`.
    pub device: String,
    /// The kept entries, oldest first.
    pub entries: Vec<OpEntry>,
    /// Records of the work that the rank's GPU did, on the clock of the host. Empty without a GPU, and if the times are
    /// not known.
    pub gpu_entries: Vec<OpEntry>,
    /// The number of older entries that were discarded.
    pub lost: u64,
    /// Largest error of the GPU times; `None` without a GPU.
    pub gpu_error: Option<Duration>,
    /// For each operation, by its index; 0 for all but collectives and messages.
    pub totals: Vec<OpTotals>,
}

/// A point in time on two clocks: this process's, and that of rank 0's process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    /// The time by this process's clock.
    pub at: Instant,
    /// The time by the clock of rank 0's process, since that process started to measure.
    pub on_rank_0: Duration,
    /// Largest error of `on_rank_0`.
    pub error: Duration,
}

impl FlightRecorderDump {
    /// Returns the entries of the ranks of this process; `device` gives each one's device.
    pub(crate) fn of(
        run: &RunContext,
        device: impl Fn(usize) -> String,
        process: [usize; 2],
        clock: Option<Clock>,
    ) -> Self {
        let recorder = &run.flight_recorder;
        let rank_entries = |rank| {
            let count = recorder.count(rank);
            let mut entries: Vec<OpEntry> = recorder.entries(rank, 0).collect();
            if (entries.len() as u64) < count {
                // Starts at the first step of which all entries are kept.
                let is_step = |op: &OpEntry| op.at.operation == Operation::Step;
                entries.drain(..entries.iter().position(is_step).unwrap_or(0));
            }
            RankEntries {
                rank,
                device: device(rank),
                lost: count.saturating_sub(entries.len() as u64),
                gpu_entries: entries.iter().filter_map(OpEntry::of_gpu).collect(),
                gpu_error: recorder.gpu_clock_error(rank),
                entries,
                totals: recorder.totals(rank),
            }
        };
        Self {
            process,
            start: clock.map_or(0.0, |clock| clock.on_rank_0(recorder.began)),
            clock_error: clock.map(|clock| clock.error),
            taken: recorder.now(),
            world_size: run.activity.len(),
            simulates_network: run.simulated_cluster.is_some(),
            ranks: run.local_ranks.clone().map(rank_entries).collect(),
            groups: run.known_groups(),
        }
    }
}

impl Clock {
    /// Returns the time `then` by the clock of rank 0's process, in seconds since that process started to measure.
    fn on_rank_0(&self, then: Instant) -> f64 {
        let later = then.saturating_duration_since(self.at).as_secs_f64();
        let earlier = self.at.saturating_duration_since(then).as_secs_f64();
        self.on_rank_0.as_secs_f64() + later - earlier
    }
}

/// A collective: its group, and its number among the collectives of the group.
pub type Collective = (u32, u64);

/// Returns the collective that `op` is, if it is one.
pub fn collective(op: &OpEntry) -> Option<Collective> {
    op.group.filter(|_| op.is_collective()).map(|group| (group, op.at.sequence))
}

/// Returns whether a rank with these operations has entered a collective, or a later one of its group.
pub fn has_entered(ops: &[OpEntry], (group, number): Collective) -> bool {
    let is_there = |theirs: Collective| theirs.0 == group && theirs.1 >= number;
    ops.iter().rev().any(|op| collective(op).is_some_and(is_there))
}
