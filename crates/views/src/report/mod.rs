//! `--report`: one HTML page that shows a run.

mod advice;
mod page;
mod samples;
mod tracks;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use strum::IntoEnumIterator;

use super::whole_file::Output;
use super::{Outcome, Printer, RunState, View};
use advice::{Conditions, advice, outside_collectives};
use engine::error::{Result, Shown};
use engine::events::{
    End, Event, FlightRecorderDump, Observer, RankEnd, TrainingStart, Wants, find_straggler,
};
use engine::ffi;
use engine::operation::Operation;
use engine::runtime::OpEntry;
use page::{Curves, Page};
use tracks::Tracks;

pub use samples::Dealing;

/// What a report shows of a run that its events do not tell.
#[derive(Debug)]
pub struct ReportFacts {
    /// The program and its version.
    pub program: String,
    /// The command line, as a shell reads it.
    pub command: String,
    /// The date at which the run began.
    pub began: String,
    /// All options and their values. Those that differ from their default come first.
    pub options: Vec<(String, String)>,
    /// Number of machines.
    pub nnodes: usize,
    /// The communication backend, with what is simulated.
    pub backend: String,
    /// The model's name.
    pub model: &'static str,
    /// How the samples are dealt.
    pub dealing: Dealing,
    /// Whether the ranks reduce gradients, which may run beside backward.
    pub overlaps: bool,
    /// Steps between comparisons of the replicas; `None` if they are compared at the end only.
    pub checked_every: Option<u64>,
    /// Number of workers that load data for each rank.
    pub num_workers: usize,
    /// The first learning rate.
    pub lr: f64,
}

/// The report of a run, in the process of rank 0.
#[derive(Debug)]
pub struct Report {
    output: Output,
    /// The path for the user.
    path: PathBuf,
    facts: ReportFacts,
    printer: Arc<Printer>,
    told: Mutex<Told>,
}

/// What the report has been told.
#[derive(Debug, Default)]
struct Told {
    /// How training began, and the buckets, which are rebuilt after that.
    first: TrainingStart,
    curves: Curves,
    /// How the run went. `None` until it is over, and if it failed.
    end: Option<End>,
    operations: Option<Arc<FlightRecorderDump>>,
}

impl Report {
    /// Checks that a page can be written at `path`, and creates its folder if needed.
    ///
    /// # Errors
    /// When it cannot.
    pub fn open(path: &Path, facts: ReportFacts, printer: Arc<Printer>) -> io::Result<Self> {
        let output = Page::output(path)?;
        Ok(Self { output, path: path.into(), facts, printer, told: Mutex::default() })
    }

    /// Returns the data of the page of a run that has ended with `outcome`. A value that the run did not reach is null, or
    /// an empty list.
    fn page<'a>(
        &self,
        told: &'a Told,
        outcome: &Outcome,
        dump: &'a FlightRecorderDump,
    ) -> Result<Page<'a>> {
        let (facts, Told { first, curves, end, .. }) = (&self.facts, told);
        let end = end.as_ref();
        let steps = steps_of(dump).saturating_sub(first.step);
        let bytes = |bytes: fn(&RankEnd) -> u64| -> Vec<u64> {
            end.into_iter().flat_map(|end| &end.ranks).map(bytes).collect()
        };
        let data = json!({
            "version": 1,
            "program": facts.program,
            "command": facts.command,
            "began": facts.began,
            "libtorch": ffi::version(),
            "outcome": outcome,
            "seconds": end.map(|end| end.seconds),
            "steps": end.map(|end| end.steps_now),
            "us_per_step": end.map(|end| end.us_per_step),
            "loss": end.map(|end| end.loss),
            "parameters_hash": end.map(|end| &end.parameters_hash),
            "options": facts.options,
            "world": {
                "size": dump.world_size,
                "nnodes": facts.nnodes,
                "backend": facts.backend,
                // Those of this process.
                "devices": dump.ranks.iter().map(|rank| &rank.device).collect::<Vec<_>>(),
            },
            "model": {
                "name": facts.model,
                "parameters": end.map_or(&first.parameters, |end| &end.parameters),
                "buckets": end.map_or(&first.bucket_bytes, |end| &end.statistics.bucket_bytes),
            },
            "samples": facts.dealing.deal(first.epoch, first.samples_seen, steps)?,
            "traffic": {
                "sent": bytes(|rank| rank.bytes_sent),
                "received": bytes(|rank| rank.bytes_received),
                "collectives": collectives(dump),
            },
            "replicas": end.map(|end| replicas(end, facts)),
            "verdict": verdict(end, outcome, curves, facts),
        });
        Ok(Page { data, curves, timeline: Tracks::new(dump) })
    }
}

impl Observer for Report {
    fn wants(&self) -> Wants {
        Wants { metrics: true, operations: true, ..Wants::default() }
    }

    fn event(&self, event: &Event) -> anyhow::Result<()> {
        let told = || self.told.lock();
        match event {
            Event::Training(training) => {
                let mut told = told();
                if training.step > 0 {
                    told.curves = Curves::of_earlier(&self.output, training.step);
                }
                told.first = training.clone();
            }
            Event::Metrics(metrics) => told().curves.train.add(metrics.clone()),
            Event::Validation(metrics) => told().curves.validation.push(metrics.clone()),
            Event::End(end) => told().end = Some((**end).clone()),
            Event::Ended { operations } => told().operations.clone_from(operations),
            _ => {}
        }
        Ok(())
    }
}

impl View for Report {
    fn finish(&self, outcome: &Outcome) -> Result<()> {
        let told = self.told.lock();
        let Some(dump) = &told.operations else { return Ok(()) };
        let page = self.page(&told, outcome, dump)?;
        self.output.write_for("--report", |file| page.write(file))?;
        let path = self.path.shown();
        self.printer.info(&format!("the report is in {path}: open it in a browser"));
        Ok(())
    }
}

/// Returns the hash of each rank's parameters.
fn replicas(end: &End, facts: &ReportFacts) -> Value {
    let hash = |rank: &RankEnd| format!("{:016x}", rank.replica_hash);
    json!({
        "hashes": end.ranks.iter().map(hash).collect::<Vec<_>>(),
        "equal": end.replicas_equal,
        "checked_every": facts.checked_every,
    })
}

/// The least time, in seconds, that other ranks waited for a straggler to name it in the report.
const MIN_STRAGGLER_SECONDS: f64 = 0.05;

/// Returns the conclusions from the times of a run. There are none without an `end`, and of a run that has failed for
/// another reason than its replicas.
fn verdict(end: Option<&End>, outcome: &Outcome, curves: &Curves, facts: &ReportFacts) -> Value {
    let is_conclusive = |end: &&End| outcome.kind != RunState::Failed || !end.replicas_equal;
    let Some(end) = end.filter(is_conclusive) else {
        return json!({
            "outside_collectives": null,
            "overlapped": null,
            "phases": [],
            "straggler": null,
            "advice": [],
        });
    };
    let phases = end.phases();
    let straggler = find_straggler(&phases, end.seconds, MIN_STRAGGLER_SECONDS);
    let conditions = Conditions {
        straggler: straggler.as_ref(),
        overlapped: facts.overlaps.then_some(end.statistics.hidden),
        batch_size: facts.dealing.batch_size,
        num_workers: facts.num_workers,
        losses: curves.losses(),
        lr: facts.lr,
    };
    let advice = if end.replicas_equal {
        advice(end, conditions)
    } else {
        vec![
            "First of all find out why the ranks do not hold the same parameters: --check-replicas-every 1 names the \
             step, the rank and the parameter."
                .into(),
        ]
    };
    json!({
        "outside_collectives": outside_collectives(&phases),
        "overlapped": conditions.overlapped,
        "phases": phases,
        "straggler": straggler,
        "advice": advice,
    })
}

/// Returns the number of steps of the whole run that rank 0 has finished.
fn steps_of(dump: &FlightRecorderDump) -> u64 {
    let entries = dump.ranks.first().into_iter().flat_map(|rank| &rank.entries);
    let stepped = |op: &&OpEntry| op.at.operation == Operation::Optimizer && !op.is_open();
    entries.filter(stepped).map(|op| op.at.sequence + 1).max().unwrap_or(0)
}

/// Returns the collectives that the ranks of this process have called.
fn collectives(dump: &FlightRecorderDump) -> Vec<Value> {
    let called = |operation: Operation| {
        let totals = || dump.ranks.iter().map(|rank| rank.totals[operation as usize]);
        totals().any(|totals| totals.calls > 0).then(|| {
            json!({
                "operation": operation.to_string(),
                "calls": totals().map(|totals| totals.calls).collect::<Vec<u64>>(),
                "bytes": totals().map(|totals| totals.bytes).collect::<Vec<u64>>(),
            })
        })
    };
    Operation::iter().filter_map(called).collect()
}
