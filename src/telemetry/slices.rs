//! Slices of a timeline: each record with the step it belongs to, and the time that a rank waited in it.

use std::collections::HashMap;
use std::time::Duration;

use crate::operation::Operation;
use crate::runtime::{Entry, FlightRecorderDump, OpStart, RankRecords};

/// A record, with values derived from the other records.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slice {
    pub begin: OpStart,
    pub started_at: Duration,
    /// End of the operation. For one that never finished: the end of its enclosing phase, or of the run.
    pub finished_at: Duration,
    pub unfinished: bool,
    /// 0 is the rank's own track. Simultaneous operations of communication threads have different tracks.
    pub track: usize,
    /// The training step; `None` outside of steps.
    pub step: Option<u64>,
    /// Time that the rank waited for the last rank to arrive, and that rank. `None` if it did not wait.
    pub waited: Option<(Duration, usize)>,
}

/// The arrivals of ranks at collectives, by the group's number and the call's sequence number.
type Arrivals = HashMap<(u32, u64), Arrival>;

#[derive(Debug)]
struct Arrival {
    ranks: usize,
    last: (Duration, usize),
}

/// Returns the slices of each rank of `dump`, in the order in which they began.
pub(super) fn slices(dump: &FlightRecorderDump) -> Vec<Vec<Slice>> {
    let mut arrivals = Arrivals::new();
    for RankRecords { rank, records, .. } in &dump.ranks {
        for Entry { begin, started_at, .. } in records {
            let Some(key) = collective_key(begin) else { continue };
            let mine = (*started_at, *rank);
            let arrival = arrivals.entry(key).or_insert(Arrival { ranks: 0, last: mine });
            arrival.ranks += 1;
            arrival.last = arrival.last.max(mine);
        }
    }
    // Drops collectives that span processes: this process cannot tell which rank arrived last.
    let mut members: HashMap<u32, usize> = HashMap::new();
    arrivals.retain(|(group, _), arrival| {
        let group_size = || dump.members(*group).map_or(0, |members| members.len());
        arrival.ranks == *members.entry(*group).or_insert_with(group_size)
    });
    dump.ranks.iter().map(|rank| slices_of_rank(rank, &arrivals, dump)).collect()
}

/// Returns the slices of the GPU work that each rank of `dump` launched, in the order in which they began, all on
/// track `track`. Empty for a rank without a GPU, or whose GPU times are not known.
///
/// A rank waits on its GPU, for the rank whose GPU arrives last at a collective. Times are on the clock of the host.
pub(super) fn gpu_slices(dump: &FlightRecorderDump, track: usize) -> Vec<Vec<Slice>> {
    let on_gpu = |rank: &RankRecords| {
        let done = |entry: &Entry| {
            let [started_at, finished_at] = entry.on_gpu?;
            Some(Entry { started_at, finished_at: Some(finished_at), on_gpu: None, ..*entry })
        };
        RankRecords {
            rank: rank.rank,
            device: rank.device.clone(),
            records: rank.records.iter().filter_map(done).collect(),
            lost: rank.lost,
            gpu_error: rank.gpu_error,
            totals: Vec::new(),
        }
    };
    let ranks = dump.ranks.iter().map(on_gpu).collect();
    let mut slices = slices(&FlightRecorderDump { ranks, groups: dump.groups.clone(), ..*dump });
    slices.iter_mut().flatten().for_each(|slice| slice.track = track);
    slices
}

/// Returns a rank of this process that has not arrived at that collective; `None` if there is none.
fn missing(dump: &FlightRecorderDump, (group, sequence): (u32, u64)) -> Option<usize> {
    let members = dump.members(group)?;
    let here = dump.ranks.iter().filter(|rank| members.contains(&rank.rank));
    let has_arrived = |rank: &RankRecords| {
        rank.records.iter().any(|record| collective_key(&record.begin) == Some((group, sequence)))
    };
    here.filter(|rank| !has_arrived(rank)).map(|rank| rank.rank).next()
}

fn slices_of_rank(
    rank: &RankRecords,
    arrivals: &Arrivals,
    dump: &FlightRecorderDump,
) -> Vec<Slice> {
    let (mut step, mut phase_ends) = (None, None);
    let mut slices = Vec::with_capacity(rank.records.len());
    let mut track_ends: Vec<Duration> = Vec::new(); // the end of the last slice of each
    for Entry { begin, started_at, finished_at, .. } in &rank.records {
        let at = begin.at;
        match at.operation {
            Operation::Step
            | Operation::Data
            | Operation::Forward
            | Operation::Backward
            | Operation::Optimizer => (step, phase_ends) = (Some(at.sequence), *finished_at),
            Operation::Validation | Operation::Save => (step, phase_ends) = (None, *finished_at),
            // An operation after a step's last phase is not part of the step.
            _ if !begin.on_comm_thread
                && phase_ends.is_some_and(|phase_end| phase_end < *started_at) =>
            {
                step = None
            }
            _ => {}
        }
        let own_end = phase_ends.filter(|phase_end| phase_end >= started_at).unwrap_or(dump.taken);
        let end = finished_at.unwrap_or(own_end).max(*started_at);
        let waited = collective_key(begin).and_then(|key| {
            let (last, by) = match arrivals.get(&key) {
                Some(arrival) => arrival.last,
                None if finished_at.is_none() => (end, missing(dump, key)?),
                None => return None,
            };
            let waited = last.min(end).saturating_sub(*started_at);
            (by != rank.rank && !waited.is_zero()).then_some((waited, by))
        });
        let track =
            if begin.on_comm_thread { 1 + free(&mut track_ends, *started_at, end) } else { 0 };
        slices.push(Slice {
            begin: *begin,
            started_at: *started_at,
            finished_at: end,
            unfinished: finished_at.is_none(),
            track,
            step,
            waited,
        });
    }
    slices
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

/// Returns the group and sequence number of a collective; `None` for an operation in which ranks do not wait for
/// others.
fn collective_key(begin: &OpStart) -> Option<(u32, u64)> {
    let waits = begin.at.operation != Operation::Synchronize;
    begin.group.filter(|_| waits).map(|group| (group, begin.at.sequence))
}

/// Returns `time` in microseconds.
pub(super) fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
