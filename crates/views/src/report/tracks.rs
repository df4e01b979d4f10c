//! The timeline of a report: the entries of the trace in a compact form.

use serde::Serialize;
use strum::IntoEnumIterator;

use crate::slices::{Slice, gpu_slices, micros, slices};
use engine::events::FlightRecorderDump;
use engine::operation::Operation;
use engine::runtime::SourceLine;

/// Maximum number of entries on a page: a phone can still draw it.
const MAX_RECORDS: usize = 120_000;

#[derive(Debug, Serialize)]
pub(crate) struct Tracks<'a> {
    /// End of the timeline, in microseconds. Entries that have not ended extend to it.
    end: f64,
    /// Number of entries left out of a rank, the maximum over all ranks.
    lost: u64,
    /// Names of operations, by their index in entries.
    operations: Vec<String>,
    /// For each operation: whether the rank may wait for others in it.
    may_wait: Vec<bool>,
    /// Call sites, by their index in entries.
    places: Vec<String>,
    ranks: Vec<Track<'a>>,
}

#[derive(Debug, Serialize)]
struct Track<'a> {
    rank: usize,
    device: &'a str,
    /// `true` if track 1 is the rank's GPU. The tracks of communication threads then begin at 2.
    on_gpu: bool,
    entries: Vec<PageEntry>,
}

/// An entry, as the page has it: operation, begin, duration (null if it had not ended), sequence, step, bucket, bytes, track (0
/// is the rank's own), time waited, rank waited for, call site. Times are in microseconds; -1 means none.
type PageEntry = (usize, f64, Option<f64>, u64, i64, i64, u64, usize, f64, i64, i64);

impl<'a> Tracks<'a> {
    /// Collects the newest entries of each rank of `dump`, and of its GPU.
    pub(crate) fn new(dump: &'a FlightRecorderDump) -> Self {
        let most = MAX_RECORDS / dump.ranks.len().max(1);
        let mut places = Vec::new();
        let mut lost = 0;
        let mut ranks = Vec::new();
        let slices = dump.ranks.iter().zip(slices(dump)).zip(gpu_slices(dump, 1));
        for ((rank, mut slices), gpu) in slices {
            let on_gpu = !gpu.is_empty();
            if on_gpu {
                let on_threads = slices.iter_mut().filter(|slice| slice.track > 0);
                on_threads.for_each(|slice| slice.track += 1);
                slices.extend(gpu);
                slices.sort_by_key(|slice| slice.op.started_at);
            }
            let mut too_many = slices.len().saturating_sub(most);
            if too_many > 0 {
                let is_step = |slice: &Slice<'_>| slice.op.at.operation == Operation::Step;
                too_many += slices[too_many..].iter().position(is_step).unwrap_or(0);
            }
            lost = lost.max(rank.lost + too_many as u64);
            let entry = |slice: Slice<'_>| {
                let Slice { op, step, track, waited, .. } = slice;
                let (waited, by) = waited.map_or((0.0, -1), |(time, by)| (micros(time), by as i64));
                (
                    op.at.operation as usize,
                    micros(op.started_at),
                    (!op.is_open()).then_some(micros(slice.duration())),
                    op.at.sequence,
                    step.map_or(-1, |step| step as i64),
                    op.bucket.map_or(-1, i64::from),
                    op.amount,
                    track,
                    waited,
                    by,
                    place(&mut places, &op.source_line),
                )
            };
            let entries = slices.drain(too_many..).map(entry).collect();
            ranks.push(Track { rank: rank.rank, device: &rank.device, on_gpu, entries });
        }
        let operations = Operation::iter().map(|operation| operation.to_string()).collect();
        let may_wait = Operation::iter().map(Operation::may_wait).collect();
        Self { end: micros(dump.taken), lost, operations, may_wait, places, ranks }
    }
}

/// Returns the index of a call site in `places`, which lists each once; -1 if it is unknown.
fn place(places: &mut Vec<String>, line: &SourceLine) -> i64 {
    let SourceLine::Here(_) = line else { return -1 };
    let name = line.to_string();
    let index = places.iter().position(|place| *place == name).unwrap_or_else(|| {
        places.push(name);
        places.len() - 1
    });
    index as i64
}
