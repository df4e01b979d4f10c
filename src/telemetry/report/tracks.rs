//! The timeline of a report: the records of the trace in a compact form.

use std::collections::HashMap;

use serde::Serialize;
use strum::IntoEnumIterator;

use crate::operation::Operation;
use crate::runtime::{CallSite, FlightRecorderDump, RankRecords};
use crate::telemetry::slices::{Slice, gpu_slices, micros, slices};

/// Maximum number of records on a page: a phone can still draw it.
const MAX_RECORDS: usize = 120_000;

#[derive(Debug, Serialize)]
pub(crate) struct Tracks {
    /// End of the timeline, in microseconds. Records that have not ended extend to it.
    end: f64,
    /// Number of records left out of a rank, the maximum over all ranks.
    lost: u64,
    /// Names of operations, by their number in records.
    operations: Vec<String>,
    /// Call sites, by their number in records.
    places: Vec<String>,
    ranks: Vec<Track>,
}

#[derive(Debug, Serialize)]
struct Track {
    rank: usize,
    device: String,
    /// `true` if track 1 is the rank's GPU. The tracks of communication threads then begin at 2.
    on_gpu: bool,
    records: Vec<Short>,
}

/// A record as a list: operation, begin, duration (null if it had not ended), sequence, step, bucket, bytes, track (0
/// is the rank's own), time waited, rank waited for, call site. Times are in microseconds; -1 means none.
#[derive(Debug, Serialize)]
struct Short(usize, f64, Option<f64>, u64, i64, i64, u64, u8, f64, i64, i64);

impl Tracks {
    /// Collects the newest records of each rank of `dump`.
    pub(crate) fn new(dump: &FlightRecorderDump) -> Self {
        let most = MAX_RECORDS / dump.ranks.len().max(1);
        let mut places = Places::default();
        let mut lost = 0;
        let track = |((rank, mut slices), gpu): ((&RankRecords, Vec<Slice>), Vec<Slice>)| {
            let on_gpu = !gpu.is_empty();
            if on_gpu {
                slices
                    .iter_mut()
                    .filter(|slice| slice.track > 0)
                    .for_each(|slice| slice.track += 1);
                slices.extend(gpu);
                slices.sort_by_key(|slice| slice.started_at);
            }
            let mut too_many = slices.len().saturating_sub(most);
            if too_many > 0 {
                let is_step = |slice: &Slice| slice.begin.at.operation == Operation::Step;
                too_many += slices[too_many..].iter().position(is_step).unwrap_or(0);
            }
            lost = lost.max(rank.lost + too_many as u64);
            Track {
                rank: rank.rank,
                device: rank.device.clone(),
                on_gpu,
                records: slices[too_many..].iter().map(|slice| short(slice, &mut places)).collect(),
            }
        };
        let slices = dump.ranks.iter().zip(slices(dump)).zip(gpu_slices(dump, 1));
        let ranks = slices.map(track).collect();
        let operations = Operation::iter().map(|operation| operation.to_string()).collect();
        Self { end: micros(dump.taken), lost, operations, places: places.names, ranks }
    }
}

fn short(slice: &Slice, places: &mut Places) -> Short {
    let Slice { begin, started_at, finished_at, unfinished, step, waited, .. } = *slice;
    let duration = micros(finished_at.saturating_sub(started_at));
    let number = |number: Option<u64>| number.map_or(-1, |number| number as i64);
    let (waited, waited_for) = waited.map_or((0.0, -1), |(time, by)| (micros(time), by as i64));
    Short(
        begin.at.operation as usize,
        micros(started_at),
        (!unfinished).then_some(duration),
        begin.at.sequence,
        number(step),
        number(begin.bucket.map(u64::from)),
        begin.amount,
        slice.track as u8,
        waited,
        waited_for,
        begin.call_site.map_or(-1, |call_site| places.number(call_site)),
    )
}

/// Call sites, each listed once.
#[derive(Debug, Default)]
struct Places {
    names: Vec<String>,
    known: HashMap<(&'static str, u32), i64>,
}

impl Places {
    fn number(&mut self, call_site: CallSite) -> i64 {
        let (file, line) = (call_site.file(), call_site.line());
        *self.known.entry((file, line)).or_insert_with(|| {
            self.names.push(format!("{file}:{line}"));
            self.names.len() as i64 - 1
        })
    }
}
