//! Recorded traces of a run, read from the files of `--trace`: the ranks at any time of the run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::snapshot::{RankSnapshot, RunSnapshot, Source};
use crate::error::{Error, Result, Shown};
use crate::files::{mistaken, read_regular};
use crate::operation::{OpId, Operation};
use crate::os::limits::explain;
use crate::runtime::OpEntry;
use crate::telemetry::slices::MAX_TRACKS;
use crate::telemetry::trace::TraceEvent;

/// The largest trace that is read, in bytes.
const MOST_BYTES: u64 = 1 << 31;

/// The most ranks of a trace.
const MOST_RANKS: usize = 1 << 16;

/// The newest operations of a rank that a snapshot has.
const OPS: usize = 256;

/// The operations of all ranks over a whole run.
#[derive(Debug)]
pub(super) struct Recording {
    pub labels: Vec<String>,
    /// The operations of each rank, oldest first.
    ops: Vec<Vec<OpEntry>>,
    groups: BTreeMap<u32, Arc<[usize]>>,
    /// The time from the first operation to the end of the last.
    pub length: Duration,
}

/// A trace file, as far as it is read.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TraceFile {
    trace_events: Vec<TraceEvent<'static>>,
    other_data: About,
}

/// What a trace says of itself.
#[derive(Deserialize)]
struct About {
    program: String,
    process: usize,
    processes: usize,
    world_size: usize,
}

/// An operation before the start of the first one is known. Its times in microseconds may lie before the start of
/// process 0; those in the record are not set.
struct UntimedOp {
    rank: usize,
    from: f64,
    to: f64,
    is_unfinished: bool,
    op: OpEntry,
}

/// What the traces have in common, while they are read.
#[derive(Default)]
struct Reader {
    /// The file of each process.
    processes: BTreeMap<usize, PathBuf>,
    about: Option<[usize; 2]>,
    labels: BTreeMap<usize, String>,
    ops: Vec<UntimedOp>,
}

impl Recording {
    /// Reads the traces of one run: a file for each of its processes.
    ///
    /// # Errors
    /// [`Error::InvalidInput`], which names the file and the problem.
    pub(super) fn read(paths: &[PathBuf]) -> Result<Self> {
        let mut reader = Reader::default();
        for path in paths {
            reader
                .file(path)
                .map_err(|problem| Error::InvalidInput(format!("{}: {problem}", path.shown())))?;
        }
        reader.recording().map_err(Error::InvalidInput)
    }

    /// Returns the ranks at a time of the run.
    pub(super) fn snapshot_at(&self, now: Duration) -> RunSnapshot {
        let of_rank = |ops: &Vec<OpEntry>| {
            let begun = ops.partition_point(|op| op.started_at <= now);
            let newest = ops[..begun].iter().rev().take(OPS).rev();
            let is_over = now >= self.length && !ops.iter().any(|op| op.is_open());
            let at = match begun {
                0 => Operation::Start,
                _ if is_over => Operation::Done,
                _ => Operation::UserCode,
            };
            let at = OpId { operation: at, sequence: 0 };
            let source = if ops.is_empty() {
                Source::Unknown("not in these traces")
            } else {
                Source::Direct
            };
            RankSnapshot {
                at,
                ops: newest.filter_map(|op| op.clone().seen_at(now)).collect(),
                source,
            }
        };
        let ranks = self.ops.iter().map(of_rank).collect();
        RunSnapshot { now, ranks, groups: self.groups.clone(), ..RunSnapshot::default() }
    }

    /// Returns the last start of a step of any rank before `now`, or the first one after it.
    pub(super) fn step_beside(&self, now: Duration, after: bool) -> Option<Duration> {
        let ops = self.ops.iter().flatten();
        let starts = ops.filter(|op| op.at.operation == Operation::Step).map(|op| op.started_at);
        if after {
            starts.filter(|at| *at > now).min()
        } else {
            starts.filter(|at| *at < now).max()
        }
    }
}

impl Reader {
    fn file(&mut self, path: &Path) -> Result<(), String> {
        let bytes = read_regular(path, MOST_BYTES).map_err(|error| explain(&error))?;
        if bytes.is_empty() {
            return Err("the file is empty; use a file that --trace has written".into());
        }
        let instead = "use a file that --trace has written";
        let file: TraceFile = serde_json::from_slice(&bytes).map_err(|error| {
            let unknown = || format!("this is not a trace of ddp-mp ({error}); {instead}");
            mistaken(&bytes, "a trace", instead).unwrap_or_else(unknown)
        })?;
        let About { program, process, processes, world_size } = file.other_data;
        if !program.starts_with("ddp-mp ") {
            return Err(format!(
                "this is a trace of {program:?}; use a file that --trace has written"
            ));
        }
        if process >= processes || processes > world_size || world_size > MOST_RANKS {
            return Err(format!(
                "this trace says that it is of process {process} of {processes} with {world_size} ranks, which cannot be"
            ));
        }
        if self.about.is_some_and(|about| about != [processes, world_size]) {
            return Err("this trace is of another run; give the traces of one run".into());
        }
        self.about = Some([processes, world_size]);
        if let Some(other) = self.processes.insert(process, path.into()) {
            let other = other.shown();
            return Err(format!(
                "this trace and {other} are both of process {process}; give each file once"
            ));
        }
        for event in file.trace_events {
            let (rank, track) = (event.tid / (MAX_TRACKS + 2), event.tid % (MAX_TRACKS + 2));
            if rank >= world_size {
                return Err(format!(
                    "an event is of rank {rank}, and the run has {world_size} ranks"
                ));
            }
            // The rank's own track is 0; that of its GPU is the last one, and repeats what the rank launched.
            match (&*event.ph, &*event.cat) {
                ("M", _) if event.name == "thread_name" && track == 0 => {
                    let name = event.args.get("name").and_then(Value::as_str).unwrap_or_default();
                    let label = name.split_once('(').map_or(name, |(_, label)| label);
                    self.labels.insert(rank, label.trim_end_matches(')').into());
                }
                ("X", "phase" | "collective" | "message" | "step") if track <= MAX_TRACKS => {
                    self.ops.push(operation(&event, rank, track)?);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn recording(mut self) -> Result<Recording, String> {
        let [_, world_size] =
            self.about.ok_or("there is no trace; give a file that --trace has written")?;
        let start = self.ops.iter().map(|op| op.from).fold(f64::INFINITY, f64::min);
        if !start.is_finite() {
            return Err(
                "these traces have no operations; give traces of a run that has made steps".into(),
            );
        }
        // Longer than any run, and short enough for all arithmetic.
        let time = |micros: f64| {
            let seconds = (micros - start) / 1e6;
            let is_sane = seconds < 1e9;
            let problem = || {
                format!(
                    "an operation ends {seconds:.0} s after the first one begins, which cannot be"
                )
            };
            is_sane.then(|| Duration::from_secs_f64(seconds.max(0.0))).ok_or_else(problem)
        };
        let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        let mut ops: Vec<Vec<OpEntry>> = vec![Vec::new(); world_size];
        let mut length = Duration::ZERO;
        for UntimedOp { rank, from, to, is_unfinished, op } in self.ops {
            if let Some(group @ 1..) = op.group {
                groups.entry(group).or_default().push(rank);
            }
            let (started_at, end) = (time(from)?, time(to)?);
            length = length.max(end);
            let finished_at = (!is_unfinished).then_some(end);
            ops[rank].push(OpEntry { started_at, finished_at, ..op });
        }
        for ops in &mut ops {
            // A step begins at once with its first phase, and lies around it.
            ops.sort_by_key(|op| (op.started_at, op.at.operation != Operation::Step));
        }
        let members = |mut ranks: Vec<usize>| {
            ranks.sort_unstable();
            ranks.dedup();
            Arc::from(ranks)
        };
        let groups = groups.into_iter().map(|(group, ranks)| (group, members(ranks))).collect();
        let labels = (0..world_size).map(|rank| self.labels.remove(&rank).unwrap_or_default());
        Ok(Recording { labels: labels.collect(), ops, groups, length })
    }
}

/// Returns the operation of a slice.
fn operation(event: &TraceEvent<'_>, rank: usize, track: usize) -> Result<UntimedOp, String> {
    let TraceEvent { name, cat, ts, args, .. } = event;
    let dur = event.dur.unwrap_or(0.0);
    let number = |key: &str| args.get(key).and_then(Value::as_u64);
    let (name, bucket) = match name.split_once(" (bucket ") {
        Some((name, bucket)) => (name, bucket.trim_end_matches(')').parse().ok()),
        None => (&**name, None),
    };
    let at = match name.strip_prefix("step ").filter(|_| cat == "step") {
        Some(step) => {
            let sequence = step.parse().map_err(|_| format!("{name:?} has no number"))?;
            OpId { operation: Operation::Step, sequence }
        }
        None => {
            let operation = Operation::from_str(name).map_err(|_| {
                format!("the operation {name:?} is unknown; the trace may be of a newer version")
            })?;
            OpId { operation, sequence: number("sequence").unwrap_or(0) }
        }
    };
    let group = number("group").map(u32::try_from).transpose();
    let group = group.map_err(|_| format!("{at} has a group that cannot be"))?;
    if !(ts.is_finite() && dur.is_finite() && dur >= 0.0) {
        return Err(format!("{at} has times that cannot be"));
    }
    let op = OpEntry {
        group,
        bucket,
        amount: number("bytes").unwrap_or(0),
        source_line: args.get("at").and_then(Value::as_str).unwrap_or_default().into(),
        on_comm_thread: track > 0,
        ..OpEntry::new(at, Duration::ZERO)
    };
    let is_unfinished = args.get("unfinished").and_then(Value::as_bool).unwrap_or(false);
    Ok(UntimedOp { rank, from: *ts, to: ts + dur, is_unfinished, op })
}
