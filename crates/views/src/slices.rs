//! Slices of a timeline: each entry with the step it belongs to, and the time that a rank waited in it.

use std::collections::HashMap;
use std::time::Duration;

use engine::events::{Collective, FlightRecorderDump, collective, has_entered};
use engine::operation::Operation;
use engine::runtime::OpEntry;

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

/// Returns the slices of the `entries` of each rank of `dump`.
fn slices_of<'a>(dump: &FlightRecorderDump, entries: Vec<&'a [OpEntry]>) -> Vec<Vec<Slice<'a>>> {
    let mut arrivals = HashMap::new();
    for (rank, entries) in dump.ranks.iter().zip(&entries) {
        for (op, collective) in entries.iter().filter_map(|op| Some((op, collective(op)?))) {
            let arrival = (op.started_at, rank.rank);
            let (count, last) = arrivals.entry(collective).or_insert((0, arrival));
            *count += 1;
            *last = arrival.max(*last);
        }
    }
    let entered = Entered { dump, entries: &entries, arrivals };
    let ranks = dump.ranks.iter().zip(&entries);
    ranks.map(|(rank, mine)| slices_of_rank(rank.rank, mine, &entered)).collect()
}

/// Which ranks have entered each collective, as far as their entries show.
struct Entered<'a> {
    dump: &'a FlightRecorderDump,
    /// The entries of each rank of `dump`.
    entries: &'a [&'a [OpEntry]],
    /// For each collective the number of ranks that have entered it, and when the last one did.
    arrivals: HashMap<Collective, (usize, (Duration, usize))>,
}

fn slices_of_rank<'a>(
    rank: usize,
    entries: &'a [OpEntry],
    entered: &Entered<'_>,
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
        let end = op.end(own_end.unwrap_or(entered.dump.taken));
        let track = if op.on_comm_thread { 1 + free(&mut track_ends, started_at, end) } else { 0 };
        let waited = entered.waited(rank, op, end);
        slices.push(Slice { op, end, track, step, waited });
    }
    slices
}

impl Entered<'_> {
    /// Returns how long `rank` waited in `op`, which ended at `end`, and for which rank. `None` if it did not wait. A
    /// process does not know that of a collective with ranks of other processes.
    fn waited(&self, rank: usize, op: &OpEntry, end: Duration) -> Option<(Duration, usize)> {
        let (group, number) = collective(op)?;
        let members = self.dump.groups.get(&group)?;
        let &(count, (last, last_rank)) = self.arrivals.get(&(group, number))?;
        let (until, by) = if count == members.len() {
            (last.min(end), last_rank)
        } else if op.is_open() {
            let mut ranks = self.dump.ranks.iter().map(|rank| rank.rank).zip(self.entries);
            let missing = ranks
                .find(|(rank, ops)| members.contains(rank) && !has_entered(ops, (group, number)));
            (end, missing?.0)
        } else {
            return None;
        };
        let waited = until.saturating_sub(op.started_at);
        (by != rank && !waited.is_zero()).then_some((waited, by))
    }
}

/// Maximum number of tracks of a rank besides its own.
pub(super) const MAX_TRACKS: usize = 62;

/// Returns the first track that is free at `from`, the last one if none is, and occupies it until `to`.
fn free(track_ends: &mut Vec<Duration>, from: Duration, to: Duration) -> usize {
    let free = track_ends.iter().position(|end| *end <= from);
    let track = free.unwrap_or(track_ends.len()).min(MAX_TRACKS - 1);
    track_ends.resize(track_ends.len().max(track + 1), to);
    track_ends[track] = to;
    track
}

/// Returns `time` in microseconds.
pub(super) fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
