//! The files that a run writes until its end: `--trace`, `--report`, `--flight-recorder` and `--prometheus`.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use parking_lot::Mutex;

use super::dealt_samples::dealt_samples;
use super::report_facts::{collectives, command, date, options, path_in_shell, steps_of};
use crate::checkpoint::TrainerState;
use crate::config::{Config, Data};
use crate::ddp::Strategy;
use crate::error::{Error, Result, Shown};
use crate::ffi;
use crate::launch::JoinedLaunch;
use crate::models::Model;
use crate::os::limits::explain;
use crate::runtime::FlightRecorderDump;
use crate::telemetry::report::{
    Curves, Moved, Outcome, Parameters, Ranks, Replicas, Report, Tracks, Verdict,
};
use crate::telemetry::{
    End, Output, Printer, PrometheusFile, RunFacts, RunState, flight_recorder_output,
    remove_further_ranks, trace_output, write_flight_recorder, write_trace,
};

/// The trace, the report and the flight recorder's files of this process, and the data for them.
#[derive(Debug)]
pub(crate) struct RunArtifacts {
    /// The trace file of this process. `None` without `--trace`.
    trace: Option<Output>,
    /// The report file. `None` without `--report`, and in processes without rank 0.
    report: Option<Output>,
    /// The flight recorder's file of each rank of this process, in order of rank. Empty without `--flight-recorder`.
    flight_recorder: Vec<Output>,
    /// The metrics for Prometheus. `None` without `--prometheus`, and in processes without rank 0.
    prometheus: Option<Arc<PrometheusFile>>,
    dump: Arc<OnceLock<FlightRecorderDump>>,
    report_data: Mutex<ReportData>,
    curves: Arc<Mutex<Curves>>,
    began: SystemTime,
}

/// The data that rank 0 collects for the report.
#[derive(Debug, Default)]
pub(crate) struct ReportData {
    pub model: Parameters,
    /// The state of training at the start.
    pub first: TrainerState,
    pub moved: Moved,
    pub replicas: Option<Replicas>,
    pub verdict: Verdict,
    pub end: Option<End>,
}

impl RunArtifacts {
    /// Prepares the files that `config` names, for this process of `joined_launch`.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if a file cannot be written.
    pub(crate) fn new(config: &Config, joined_launch: &JoinedLaunch) -> Result<Self> {
        let process = joined_launch.process();
        config.validate_files(process[1])?;
        let opened = |flag: &str, path: &Path, output: io::Result<Output>| {
            output.map_err(|error| {
                Error::InvalidInput(format!("{flag} {}: {}", path.shown(), explain(&error)))
            })
        };
        let (trace, report) = (config.output.trace.as_deref(), config.output.report.as_deref());
        let trace = trace.map(|path| opened("--trace", path, trace_output(path, process)));
        let report = report.filter(|_| joined_launch.is_first());
        let report = report.map(|path| opened("--report", path, Report::output(path)));
        let flight_recorder = match &config.output.flight_recorder {
            None => Vec::new(),
            Some(folder) => {
                let refused = |error: io::Error| {
                    let (folder, reason) = (folder.shown(), explain(&error));
                    Error::InvalidInput(format!("--flight-recorder {folder}: {reason}"))
                };
                let output = |rank| flight_recorder_output(folder, rank);
                let outputs = joined_launch.ranks_here().map(output).collect::<io::Result<_>>();
                let outputs = outputs.map_err(refused)?;
                if joined_launch.is_first() {
                    remove_further_ranks(folder, joined_launch.world_size()).map_err(refused)?;
                }
                outputs
            }
        };
        let prometheus = config.output.prometheus.as_deref().filter(|_| joined_launch.is_first());
        let facts = RunFacts {
            model: config.model.kind.name(),
            backend: joined_launch.placement.backend.name(),
            world_size: joined_launch.world_size(),
            restarts: joined_launch.launch.restart_count,
        };
        let prometheus = prometheus.map(|path| PrometheusFile::new(path, facts));
        Ok(Self {
            trace: trace.transpose()?,
            report: report.transpose()?,
            flight_recorder,
            prometheus: prometheus.transpose()?.map(Arc::new),
            dump: Arc::default(),
            report_data: Mutex::default(),
            curves: Arc::default(),
            began: SystemTime::now(),
        })
    }

    /// Returns where to leave the flight recorder's dump. `None` without a file that needs it.
    pub(crate) fn dump(&self) -> Option<Arc<OnceLock<FlightRecorderDump>>> {
        let is_needed =
            self.trace.is_some() || self.report.is_some() || !self.flight_recorder.is_empty();
        is_needed.then(|| self.dump.clone())
    }

    /// Returns where to leave the curves of training. `None` without a report.
    pub(crate) fn curves(&self) -> Option<Arc<Mutex<Curves>>> {
        self.report.is_some().then(|| self.curves.clone())
    }

    /// Returns the file for Prometheus, if there is one.
    pub(crate) fn prometheus(&self) -> Option<Arc<PrometheusFile>> {
        self.prometheus.clone()
    }

    /// Returns the mean loss of the first quarter of the run, and of the last. `None` without a report.
    pub(crate) fn losses(&self) -> Option<[f64; 2]> {
        self.curves.lock().losses()
    }

    /// Updates the data of the report, if there is one.
    pub(crate) fn update(&self, write: impl FnOnce(&mut ReportData)) {
        if self.report.is_some() {
            write(&mut self.report_data.lock());
        }
    }

    /// Records the model that rank 0 begins to train.
    pub(crate) fn record_model(
        &self,
        config: &Config,
        ddp: &Strategy<Model>,
        first: &TrainerState,
    ) {
        self.update(|report_data| {
            report_data.first = first.clone();
            report_data.model = Parameters {
                name: config.model.kind.name().into(),
                parameters: ddp.parameter_places(),
                buckets: ddp.statistics().bucket_bytes,
            };
        });
    }

    /// Writes the files after the ranks have ended.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub(crate) fn write(
        &self,
        config: &Config,
        joined_launch: &JoinedLaunch,
        data: &Data,
        outcome: Outcome,
        printer: &Printer,
    ) -> Result<()> {
        let state = RunState::named(outcome.kind);
        let written = self.write_dump(config, joined_launch, data, outcome, printer);
        let state = if written.is_ok() { state } else { RunState::Failed };
        let prometheus = self.prometheus.as_ref().map_or(Ok(()), |file| file.finish(state));
        written.and(prometheus)
    }

    /// Writes the files that the flight recorder's dump is for. If one cannot be written, the others still are.
    fn write_dump(
        &self,
        config: &Config,
        joined_launch: &JoinedLaunch,
        data: &Data,
        outcome: Outcome,
        printer: &Printer,
    ) -> Result<()> {
        let Some(dump) = self.dump.get() else { return Ok(()) };
        let unwritable = |flag: &str, output: &Output| {
            let what = format!("{flag} {}", output.path().shown());
            |error: io::Error| Error::Write { what, reason: explain(&error) }
        };
        let trace = self.trace.as_ref().map_or(Ok(()), |output| {
            output.write(|file| write_trace(dump, file)).map_err(unwritable("--trace", output))?;
            if let (true, Some(path)) = (joined_launch.is_first(), &config.output.trace) {
                let path = path.shown();
                printer.info(&match dump.process {
                    [_, 1] => format!("the trace is in {path}: open it in ui.perfetto.dev"),
                    [_, count] => format!(
                        "the traces of {count} processes are beside {path}, each with its number in its name: open them \
                         in ui.perfetto.dev"
                    ),
                });
            }
            Ok(())
        });
        let report = self.report.as_ref().map_or(Ok(()), |output| {
            let report = self.page(config, joined_launch, data, outcome, dump)?;
            output.write(|file| report.write(file)).map_err(unwritable("--report", output))?;
            let path = config.output.report.as_deref().unwrap_or(output.path()).shown();
            printer.info(&format!("the report is in {path}: open it in a browser"));
            Ok(())
        });
        let files = self.flight_recorder.iter().zip(&dump.ranks);
        let written: Vec<Result<()>> = files
            .map(|(output, rank)| {
                let written = output.write(|file| write_flight_recorder(dump, rank, file));
                written.map_err(unwritable("--flight-recorder", output))
            })
            .collect();
        let flight_recorder: Result<()> = written.into_iter().collect();
        if let (Ok(()), true, Some(folder)) =
            (&flight_recorder, joined_launch.is_first(), &config.output.flight_recorder)
        {
            let (shown, in_shell) = (folder.shown(), path_in_shell(folder));
            printer
                .info(&format!("the flight recorder is in {shown}: run torchfrtrace {in_shell}"));
        }
        trace.and(report).and(flight_recorder)
    }

    fn page(
        &self,
        config: &Config,
        joined_launch: &JoinedLaunch,
        data: &Data,
        outcome: Outcome,
        dump: &FlightRecorderDump,
    ) -> Result<Report> {
        let report_data = std::mem::take(&mut *self.report_data.lock());
        let curves = self.curves.lock().clone();
        let steps = steps_of(dump).saturating_sub(report_data.first.step);
        let ReportData { first, model, moved, replicas, verdict, end, .. } = report_data;
        let (end, world_size) = (end.as_ref(), joined_launch.world_size());
        Ok(Report {
            version: 1,
            program: format!("ddp-mp {}", env!("CARGO_PKG_VERSION")),
            command: command(),
            began: date(self.began),
            libtorch: ffi::version(),
            outcome,
            seconds: end.map(|end| end.seconds),
            steps: end.map(|end| end.steps_now),
            us_per_step: end.map(|end| end.us_per_step),
            loss: end.map(|end| end.loss),
            parameters_hash: end.map(|end| end.parameters_hash.clone()),
            options: options(config)?,
            world: Ranks {
                size: world_size,
                nnodes: joined_launch.nnodes(),
                backend: joined_launch.placement.backend.name(),
                devices: dump.ranks.iter().map(|rank| rank.device.clone()).collect(),
            },
            model,
            curves,
            samples: dealt_samples(config, data.training.len(), world_size, &first, steps)?,
            timeline: Tracks::new(dump),
            traffic: Moved { collectives: collectives(dump), ..moved },
            replicas,
            verdict,
        })
    }
}
