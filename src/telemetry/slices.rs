//! Slices of a timeline: each entry with the step it belongs to, and the time that a rank waited in it.

use std::time::Duration;

use super::arrivals::Arrivals;
use crate::operation::Operation;
use crate::runtime::{FlightRecorderDump, OpEntry};

/// An entry, with values derived from the other entries.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slice<'a> {
    pub op: &'a OpEntry,
    /// End of the operation. For one that never finished: the end of its enclosing phase, or of the run.
    pub end: Duration,
    /// 0 is the rank's own track. Simultaneous operations of communication threads have different tracks.
    pub track: usize,
    /// The training step; `None` outside of steps.
    pub step: Option<u64>,
    /// Time that the rank waited for the last rank to arrive, and that rank. `None` if it did not wait.
    pub waited: Option<(Duration, usize)>,
}

impl Slice<'_> {
    /// Returns the duration of the operation.
    pub(super) fn duration(&self) -> Duration {
        self.end.saturating_sub(self.op.started_at)
    }
}

/// Returns the slices of each rank of `dump`, in the order in which they began.
pub(super) fn slices(dump: &FlightRecorderDump) -> Vec<Vec<Slice<'_>>> {
    slices_of(dump, dump.ranks.iter().map(|rank| &rank.entries[..]).collect())
}

/// Returns the slices of the work of each rank's GPU, all on track `track`, in the order in which they began. A rank
/// waits on its GPU, for the rank whose GPU arrives last at a collective.
pub(super) fn gpu_slices(dump: &FlightRecorderDump, track: usize) -> Vec<Vec<Slice<'_>>> {
    let mut slices = slices_of(dump, dump.ranks.iter().map(|rank| &rank.gpu_entries[..]).collect());
    slices.iter_mut().flatten().for_each(|slice| slice.track = track);
    slices
}

/// Returns the slices of the `records` of each rank of `dump`.
fn slices_of<'a>(dump: &FlightRecorderDump, entries: Vec<&'a [OpEntry]>) -> Vec<Vec<Slice<'a>>> {
    let mut arrivals = Arrivals::new(dump.world_size, &dump.groups);
    for (rank, entries) in dump.ranks.iter().zip(&entries) {
        arrivals.add(rank.rank, entries);
    }
    let ranks = dump.ranks.iter().zip(entries);
    ranks.map(|(rank, entries)| slices_of_rank(rank.rank, entries, &arrivals, dump)).collect()
}

fn slices_of_rank<'a>(
    rank: usize,
    entries: &'a [OpEntry],
    arrivals: &Arrivals,
    dump: &FlightRecorderDump,
) -> Vec<Slice<'a>> {
    let mut step = None;
    let mut phase_end = None;
    let mut slices = Vec::with_capacity(entries.len());
    let mut track_ends: Vec<Duration> = Vec::new(); // the end of the last slice of each
    for op in entries {
        let started_at = op.started_at;
        if op.is_step_phase() {
            step = Some(op.at.sequence);
            phase_end = op.finished_at;
        } else if matches!(op.at.operation, Operation::Validation | Operation::Save) {
            step = None;
            phase_end = op.finished_at;
        } else if !op.on_comm_thread && phase_end.is_some_and(|phase_end| phase_end < started_at) {
            step = None; // an operation after a step's last phase is not part of the step
        }
        let own_end = phase_end.filter(|phase_end| *phase_end >= started_at);
        let end = op.end(own_end.unwrap_or(dump.taken));
        let track = if op.on_comm_thread { 1 + free(&mut track_ends, started_at, end) } else { 0 };
        let waited = waited(rank, op, end, arrivals, dump);
        slices.push(Slice { op, end, track, step, waited });
    }
    slices
}

/// Returns how long `rank` waited in `op`, which ended at `end`, and for which rank. `None` if it did not wait.
fn waited(
    rank: usize,
    op: &OpEntry,
    end: Duration,
    arrivals: &Arrivals,
    dump: &FlightRecorderDump,
) -> Option<(Duration, usize)> {
    let (until, by) = match arrivals.complete(op) {
        Some(entered) => (entered.last.min(end), entered.last_rank),
        None if op.is_open() => {
            let is_here = |rank: &usize| dump.ranks.iter().any(|here| here.rank == *rank);
            (end, arrivals.missing(op).find(is_here)?)
        }
        None => return None,
    };
    let waited = until.saturating_sub(op.started_at);
    (by != rank && !waited.is_zero()).then_some((waited, by))
}

/// Maximum number of tracks of a rank besides its own.
pub(super) const MAX_TRACKS: usize = 62;

/// Returns the first track that is free at `from`, the last one if none is, and occupies it until `to`.
fn free(track_ends: &mut Vec<Duration>, from: Duration, to: Duration) -> usize {
    let track = track_ends
        .iter()
        .position(|end| *end <= from)
        .unwrap_or(track_ends.len())
        .min(MAX_TRACKS - 1);
    track_ends.resize(track_ends.len().max(track + 1), to);
    track_ends[track] = to;
    track
}

/// Returns `time` in microseconds.
pub(super) fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
