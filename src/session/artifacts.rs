//! The files that a run writes until its end: `--trace`, `--report` and `--prometheus`.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use parking_lot::Mutex;

use super::Session;
use super::end_messages::Outcome;
use super::page::page;
use crate::checkpoint::TrainerState;
use crate::config::Config;
use crate::ddp::DistributedDataParallel;
use crate::error::{Error, Result, Shown};
use crate::files::WholeFile;
use crate::launch::JoinedLaunch;
use crate::models::Model;
use crate::os::limits::output_refused;
use crate::records::Parameter;
use crate::runtime::FlightRecorderDump;
use crate::telemetry::report::{Curves, Page};
use crate::telemetry::{
    End, Output, PrometheusFile, RecordFile, RunFacts, RunState, process_path, trace_output,
    write_trace,
};

/// The files of this process, and the data for them.
#[derive(Debug)]
pub(crate) struct RunArtifacts {
    /// The trace file of this process. `None` without `--trace`.
    trace: Option<Output>,
    /// The report file. `None` without `--report`, and in processes without rank 0.
    report: Option<Output>,
    /// The record of this process's ranks. `None` without `--record`.
    pub record_file: Option<Arc<RecordFile>>,
    /// The metrics for Prometheus. `None` without `--prometheus`, and in processes without rank 0.
    pub prometheus: Option<Arc<PrometheusFile>>,
    /// When this process prepared its files.
    pub began: SystemTime,
    dump: Arc<OnceLock<FlightRecorderDump>>,
    facts: Mutex<ReportFacts>,
    curves: Arc<Mutex<Curves>>,
}

/// What rank 0 keeps of a run for its report.
#[derive(Debug, Default)]
pub(super) struct ReportFacts {
    /// The state of training at the start.
    pub first: TrainerState,
    /// The parameters of the model, as they are in buckets.
    pub parameters: Vec<Parameter>,
    /// Bytes of each bucket.
    pub buckets: Vec<usize>,
    /// How the run went. `None` until it is over, and if it failed.
    pub end: Option<End>,
}

impl RunArtifacts {
    /// Prepares the files that `config` names, for this process of `joined_launch`.
    ///
    /// # Errors
    /// [`Error::Input`] if a file cannot be written.
    pub(crate) fn new(config: &Config, joined_launch: &JoinedLaunch) -> Result<Self> {
        let process = joined_launch.process();
        config.validate_files(process[1])?;
        let (output, is_first) = (&config.output, joined_launch.is_first());
        let trace = opened("--trace", output.trace.as_deref(), |path| trace_output(path, process))?;
        let report =
            opened("--report", output.report.as_deref().filter(|_| is_first), Page::output)?;
        let continues = continues(config, joined_launch);
        let record_file = opened("--record", output.record.as_deref(), |path| {
            RecordFile::open(&process_path(path, process), continues)
        })?;
        if let Some(keep) = config.keep() {
            let ranks = joined_launch.world_size();
            if keep.rank >= ranks {
                return Err(Error::usage(format!(
                    "--keep-rank {}: this run has ranks 0 to {}",
                    keep.rank,
                    ranks - 1
                )));
            }
            if joined_launch.ranks_here().contains(&keep.rank) {
                if joined_launch.launch.restart_count > 0 {
                    let _ = fs::remove_file(&keep.file); // an earlier start of this run has written it
                }
                opened("--keep", Some(&*keep.file), |file| {
                    if file.exists() {
                        return Err(io::Error::other(
                            "this file exists; remove it, or use another name",
                        ));
                    }
                    WholeFile::begin(file).map(drop)
                })?;
            }
        }
        let facts = RunFacts {
            model: config.model_name(),
            backend: joined_launch.placement.backend.name(),
            world_size: joined_launch.world_size(),
            restarts: joined_launch.launch.restart_count,
        };
        let prometheus = output.prometheus.as_deref().filter(|_| is_first);
        let prometheus =
            opened("--prometheus", prometheus, |path| PrometheusFile::new(path, facts))?;
        Ok(Self {
            trace,
            report,
            record_file: record_file.map(Arc::new),
            prometheus: prometheus.map(Arc::new),
            began: SystemTime::now(),
            dump: Arc::default(),
            facts: Mutex::default(),
            curves: Arc::default(),
        })
    }

    /// Returns where to leave the flight recorder's dump. `None` without a file that needs it.
    pub(crate) fn dump(&self) -> Option<Arc<OnceLock<FlightRecorderDump>>> {
        let is_needed = self.trace.is_some() || self.report.is_some();
        is_needed.then(|| self.dump.clone())
    }

    /// Returns where to leave the curves of training. `None` without a report.
    pub(crate) fn curves(&self) -> Option<Arc<Mutex<Curves>>> {
        self.report.is_some().then(|| self.curves.clone())
    }

    /// Records the model that rank 0 begins to train, in the state `first`.
    pub(crate) fn record_start(&self, ddp: &DistributedDataParallel<Model>, first: &TrainerState) {
        let mut facts = self.facts.lock();
        facts.first = first.clone();
        facts.parameters = ddp.described_parameters();
        facts.buckets = ddp.statistics().bucket_bytes;
        if let Some(report) = self.report.as_ref().filter(|_| first.step > 0) {
            *self.curves.lock() = Curves::of_earlier(report, first.step);
        }
    }

    /// Records how the run went, and the buckets, which have been rebuilt since the start.
    pub(crate) fn record_end(&self, ddp: &DistributedDataParallel<Model>, end: &End) {
        let mut facts = self.facts.lock();
        facts.parameters = ddp.described_parameters();
        facts.buckets.clone_from(&end.statistics.bucket_bytes);
        facts.end = Some(end.clone());
    }

    /// Writes the files of `session` after its ranks have ended.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub(super) fn write(&self, session: &Session, outcome: &Outcome) -> Result<()> {
        let end = self.facts.lock().end.clone();
        let Session { config, joined_launch, printer, .. } = session;
        let record = config.output.record.as_deref();
        if let Some(path) = record.filter(|_| joined_launch.is_first()) {
            let (path, program) = (path.shown(), config.program.name);
            printer.info(&format!("the record is in {path}: compare it with {program} diff"));
        }
        let written = match self.dump.get() {
            // If one cannot be written, the others still are.
            Some(dump) => {
                let trace = self.write_trace(session, dump);
                let report = self.write_report(session, outcome, dump);
                trace.and(report)
            }
            None => Ok(()),
        };
        let state = if written.is_ok() { outcome.kind } else { RunState::Failed };
        let prometheus = match &self.prometheus {
            Some(file) => file.finish(state, end),
            None => Ok(()),
        };
        written.and(prometheus)
    }

    fn write_trace(&self, session: &Session, dump: &FlightRecorderDump) -> Result<()> {
        let Some(output) = &self.trace else { return Ok(()) };
        output.write_for("--trace", |file| write_trace(dump, file))?;
        let Session { config, joined_launch, printer, .. } = session;
        let trace = config.output.trace.as_deref();
        if let Some(path) = trace.filter(|_| joined_launch.is_first()) {
            let path = path.shown();
            printer.info(&match dump.process {
                [_, 1] => format!("the trace is in {path}: open it in ui.perfetto.dev"),
                [_, count] => format!(
                    "the traces of {count} processes are beside {path}, each with its index in its name: open them \
                     in ui.perfetto.dev"
                ),
            });
        }
        Ok(())
    }

    fn write_report(
        &self,
        session: &Session,
        outcome: &Outcome,
        dump: &FlightRecorderDump,
    ) -> Result<()> {
        let Some(output) = &self.report else { return Ok(()) };
        let curves = self.curves.lock().clone();
        let page = page(session, &self.facts.lock(), curves, outcome, dump)?;
        output.write_for("--report", |file| page.write(file))?;
        let path = session.config.output.report.as_deref().unwrap_or(output.path()).shown();
        session.printer.info(&format!("the report is in {path}: open it in a browser"));
        Ok(())
    }
}

/// Returns whether the run goes on where an earlier one, or an earlier start of it, was.
pub(super) fn continues(config: &Config, joined_launch: &JoinedLaunch) -> bool {
    config.checkpoints.resume.is_some() || joined_launch.launch.restart_count > 0
}

/// Opens the file at `path` that `flag` names, if there is one.
fn opened<T>(
    flag: &str,
    path: Option<&Path>,
    open: impl FnOnce(&Path) -> io::Result<T>,
) -> Result<Option<T>> {
    let Some(path) = path else { return Ok(None) };
    let refused = |error| output_refused(&format!("{flag} {}", path.shown()), &error);
    open(path).map(Some).map_err(refused)
}
