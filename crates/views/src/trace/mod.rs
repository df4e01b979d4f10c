//! `--trace`: the timeline of a run, for Perfetto and chrome://tracing.
//!
//! The format is Chromium's "Trace Event Format": a JSON object whose `traceEvents` are slices (`X`), names of tracks
//! (`M`), arrows (`s`, `f`) and counters (`C`). Times are in microseconds.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::slices::{MAX_TRACKS, Slice, gpu_slices, micros, slices};
use super::whole_file::{Marks, Output};
use super::{Outcome, Printer, View};
use engine::error::{Result, Shown};
use engine::events::{Event, FlightRecorderDump, Observer, RankEntries, Wants};
use engine::files::process_path;
use engine::operation::Operation;

/// The trace file of a process. The ranks of a run are told to it by [`Spawn::observe`](engine::Spawn::observe).
#[derive(Debug)]
pub struct Trace {
    output: Output,
    /// What the ranks did, when they have ended.
    operations: OnceLock<Arc<FlightRecorderDump>>,
    /// The path for the user.
    path: PathBuf,
    /// Where to say where the trace is; `None` if this process does not say so.
    printer: Option<Arc<Printer>>,
}

impl Trace {
    /// Checks that a file can be written at `path`, and creates its folder if needed. `process` is the index of this process
    /// and the number of processes of the run: if there are several, each writes a file of its own, with its index in its
    /// name.
    ///
    /// # Errors
    /// When it cannot.
    pub fn open(path: &Path, process: [usize; 2]) -> io::Result<Self> {
        let output = Output::new(&process_path(path, process), MARKS)?;
        Ok(Self { output, operations: OnceLock::new(), path: path.into(), printer: None })
    }

    /// Prints with `printer`, if there is one, at the end where the trace is.
    pub fn note_to(self, printer: Option<Arc<Printer>>) -> Self {
        Self { printer, ..self }
    }

    /// Writes the trace of the ranks that have ended: of the first run, if there were several. Writes nothing before.
    ///
    /// # Errors
    /// [`Error::Write`](engine::Error::Write).
    pub fn write(&self) -> Result<()> {
        let Some(dump) = self.operations.get() else { return Ok(()) };
        self.output.write_for("--trace", |out| {
            TraceWriter { dump, start: dump.start * 1e6, out, first: true, arrows: 0 }.write()
        })?;
        let (Some(printer), path) = (&self.printer, self.path.shown()) else { return Ok(()) };
        printer.info(&match dump.process {
            [_, 1] => format!("the trace is in {path}: open it in ui.perfetto.dev"),
            [_, count] => format!(
                "the traces of {count} processes are beside {path}, each with its index in its name: open them in \
                 ui.perfetto.dev"
            ),
        });
        Ok(())
    }
}

impl Observer for Trace {
    fn wants(&self) -> Wants {
        Wants { operations: true, ..Wants::default() }
    }

    fn event(&self, event: &Event) -> anyhow::Result<()> {
        if let Event::Ended { operations: Some(operations) } = event {
            let _ = self.operations.set(operations.clone()); // of a second run none are kept
        }
        Ok(())
    }
}

impl View for Trace {
    fn finish(&self, _: &Outcome) -> Result<()> {
        self.write()
    }
}

const MARKS: Marks = Marks { begins: "{\"traceEvents\":[", before: ",\"xxh3\":\"", after: "\"}\n" };

/// A trace that is being written.
struct TraceWriter<'a> {
    dump: &'a FlightRecorderDump,
    /// Start of the dump's clock, in microseconds on the clock of process 0.
    start: f64,
    out: &'a mut dyn Write,
    first: bool,
    /// Number of arrows written.
    arrows: u64,
}

impl TraceWriter<'_> {
    fn write(&mut self) -> io::Result<()> {
        let [process, processes] = self.dump.process;
        writeln!(self.out, "{}", MARKS.begins)?;
        let network = if self.dump.simulates_network { ", simulated network" } else { "" };
        let name = format!("process {process} of {processes}, {}{network}", std::process::id());
        self.event("M", "process_name", 0, 0.0, json!({ "args": { "name": name } }))?;
        let rank_slices = slices(self.dump);
        for (rank, slices) in self.dump.ranks.iter().zip(&rank_slices) {
            let last_track = slices.iter().map(|slice| slice.track).max().unwrap_or(0);
            for track in 0..=last_track {
                let name = match track {
                    0 => format!("rank {} ({})", rank.rank, rank.device),
                    1 => format!("rank {} communication{network}", rank.rank),
                    _ => format!("rank {} communication {track}", rank.rank),
                };
                self.name(track_id(rank.rank, track), &name)?;
            }
            self.rank(rank.rank, slices)?;
        }
        for (rank, slices) in self.dump.ranks.iter().zip(&gpu_slices(self.dump, GPU)) {
            if !slices.is_empty() {
                let name = format!("rank {} on {}", rank.rank, rank.device);
                self.name(track_id(rank.rank, GPU), &name)?;
            }
            slices.iter().try_for_each(|slice| self.slice(rank.rank, slice))?;
        }
        let of_ranks = |value: fn(&RankEntries) -> Option<Value>| -> Value {
            let ranks = self.dump.ranks.iter();
            let known = ranks.filter_map(|it| Some((format!("rank {}", it.rank), value(it)?)));
            known.collect::<Map<_, _>>().into()
        };
        let clock = self.dump.clock_error.map(micros);
        let other = json!({
            "program": format!("ddp-mp {}", env!("CARGO_PKG_VERSION")),
            "process": process,
            "processes": processes,
            "world_size": self.dump.world_size,
            "clock": if clock.is_some() { "that of process 0" } else { "its own" },
            "clock_error_at_start_us": clock,
            "gpu_clock_error_us": of_ranks(|rank| Some(micros(rank.gpu_error?).into())),
            "entries_not_kept": of_ranks(|rank| Some(rank.lost.into())),
        });
        // `Output` closes the object, with the fingerprint.
        write!(self.out, "\n],\"displayTimeUnit\":\"ns\",\"otherData\":{other}")
    }

    /// Writes one rank's slices, and the arrows between them.
    fn rank(&mut self, rank: usize, slices: &[Slice<'_>]) -> io::Result<()> {
        self.steps(rank, slices)?;
        // Slices from which the next arrows start: gradients to their buckets, buckets to the optimizer.
        let (mut gradients, mut buckets): (Vec<&Slice<'_>>, Vec<&Slice<'_>>) =
            (Vec::new(), Vec::new());
        for slice in slices {
            let operation = slice.op.at.operation;
            if operation == Operation::Step {
                // Slices that an earlier step left over get no arrow.
                gradients.clear();
                buckets.clear();
                continue; // `steps` writes the slice of the whole step
            }
            self.slice(rank, slice)?;
            match (operation, slice.op.bucket) {
                (Operation::Gradient, _) => gradients.push(slice),
                (Operation::Optimizer, _) => {
                    for bucket in buckets.drain(..) {
                        self.arrow(rank, "update", bucket, slice)?;
                    }
                }
                (_, Some(bucket)) => {
                    let is_in = |it: &mut &Slice<'_>| it.op.bucket == Some(bucket);
                    for gradient in gradients.extract_if(.., is_in) {
                        self.arrow(rank, "gradient", gradient, slice)?;
                    }
                    buckets.push(slice);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes a slice around each training step, and counters of its samples and bytes.
    fn steps(&mut self, rank: usize, slices: &[Slice<'_>]) -> io::Result<()> {
        for step_slices in slices.chunk_by(|a, b| a.step == b.step) {
            let first = &step_slices[0];
            let own = step_slices.iter().filter(|slice| !slice.op.on_comm_thread);
            let (Some(step), Some(end)) = (first.step, own.map(|slice| slice.end).max()) else {
                continue;
            };
            let time = end.saturating_sub(first.op.started_at);
            let (ts, tid) = (self.time(first.op.started_at), track_id(rank, 0));
            let amount = |of: fn(Operation) -> bool| -> u64 {
                let those = step_slices.iter().filter(|slice| of(slice.op.at.operation));
                those.map(|slice| slice.op.amount).sum()
            };
            let samples = amount(|operation| operation == Operation::Forward);
            let name = format!("step {step}");
            let args = json!({ "samples": samples });
            let more = json!({ "cat": "step", "dur": micros(time), "args": args });
            self.event("X", &name, tid, ts, more)?;
            let counters = [
                ("samples per second", samples as f64 / time.as_secs_f64().max(1e-9)),
                ("bytes in collectives", amount(Operation::may_wait) as f64),
            ];
            for (what, value) in counters {
                let name = format!("rank {rank}: {what}");
                self.event("C", &name, tid, ts, json!({ "args": { what: value } }))?;
            }
        }
        Ok(())
    }

    /// Writes a slice, and the time that the rank waited in it.
    fn slice(&mut self, rank: usize, slice: &Slice<'_>) -> io::Result<()> {
        let op = slice.op;
        let (operation, tid) = (op.at.operation, track_id(rank, slice.track));
        let cat = match op.group {
            Some(_) => "collective",
            None if operation == Operation::Gradient => "gradient",
            None if operation.is_compute() => "phase",
            None => "message",
        };
        let name = match op.bucket {
            Some(bucket) => format!("{operation} (bucket {bucket})"),
            None => operation.to_string(),
        };
        let line = Some(op.source_line.to_string()).filter(|line| !line.is_empty());
        let (waited, waited_for) = slice.waited.unzip();
        let all = [
            ("sequence", Some(op.at.sequence.into())),
            ("step", slice.step.map(Value::from)),
            ("bytes", (!operation.is_compute()).then(|| op.amount.into())),
            ("group", op.group.map(Value::from)),
            ("waited_us", waited.map(|waited| micros(waited).into())),
            ("waited_for_rank", waited_for.map(Value::from)),
            ("at", line.map(Value::from)),
            ("unfinished", op.is_open().then(|| true.into())),
        ];
        let args = all.into_iter().filter_map(|(key, value)| Some((key.into(), value?)));
        let args = args.collect::<Map<_, _>>();
        let more = json!({ "cat": cat, "dur": micros(slice.duration()), "args": args });
        self.event("X", &name, tid, self.time(op.started_at), more)?;
        let Some((waited, by)) = slice.waited else { return Ok(()) };
        let dur = micros(waited.saturating_sub(BEFORE_WAITING));
        let (name, more) = (format!("waiting for rank {by}"), json!({ "cat": "wait", "dur": dur }));
        self.event("X", &name, tid, self.time(op.started_at + BEFORE_WAITING), more)
    }

    /// Writes an arrow from one slice to another.
    fn arrow(
        &mut self,
        rank: usize,
        name: &str,
        from: &Slice<'_>,
        to: &Slice<'_>,
    ) -> io::Result<()> {
        self.arrows += 1;
        // Unique among the processes of a run.
        let id = ((self.dump.process[0] as u64) << 40) + self.arrows;
        let more = json!({ "cat": "gradients", "id": id });
        self.event("s", name, track_id(rank, from.track), self.time(inside(from)), more)?;
        // Drawn forwards even if the optimizer began while a bucket was still in flight.
        let ts = self.time(inside(to).max(inside(from)));
        // Its binding point is the slice around it.
        let more = json!({ "cat": "gradients", "id": id, "bp": "e" });
        self.event("f", name, track_id(rank, to.track), ts, more)
    }

    /// Names the track `tid`, and gives it its place.
    fn name(&mut self, tid: usize, name: &str) -> io::Result<()> {
        self.event("M", "thread_name", tid, 0.0, json!({ "args": { "name": name } }))?;
        self.event("M", "thread_sort_index", tid, 0.0, json!({ "args": { "sort_index": tid } }))
    }

    /// Writes an event of the kind `ph` on track `tid`, which starts at `ts`, in microseconds. `more` has the fields that only
    /// some kinds have. The fields' names are those of the format.
    fn event(&mut self, ph: &str, name: &str, tid: usize, ts: f64, more: Value) -> io::Result<()> {
        if !std::mem::replace(&mut self.first, false) {
            self.out.write_all(b",\n")?;
        }
        let mut event = more;
        event["name"] = name.into();
        event["ph"] = ph.into();
        event["pid"] = self.dump.process[0].into();
        event["tid"] = tid.into();
        event["ts"] = ts.into();
        serde_json::to_writer(&mut *self.out, &event).map_err(io::Error::from)
    }

    /// Converts `time` to microseconds on the clock of process 0.
    fn time(&self, time: Duration) -> f64 {
        self.start + micros(time)
    }
}

/// Delay of the slice of waiting after its collective began. In between, an arrow can bind to the collective.
const BEFORE_WAITING: Duration = Duration::from_nanos(2);

/// Returns a time in `slice` before any slice within it begins: an arrow binds to the innermost slice.
fn inside(slice: &Slice<'_>) -> Duration {
    let free = if slice.waited.is_some() { BEFORE_WAITING } else { slice.duration() };
    slice.op.started_at + free / 2
}

/// The number of the track of a rank's GPU.
const GPU: usize = MAX_TRACKS + 1;

/// Returns the `tid` of a rank's track `number`; 0 is the rank's own.
fn track_id(rank: usize, track: usize) -> usize {
    rank * (MAX_TRACKS + 2) + track
}
