//! The files that a run writes for people to look at: `--trace` and `--report`.

use std::borrow::Cow;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::checkpoint::TrainerState;
use crate::config::{Config, Data};
use crate::data::{DistributedSampler, batches_of_all};
use crate::ddp::Strategy;
use crate::error::{Error, Result};
use crate::ffi;
use crate::launch::Launched;
use crate::models::Model;
use crate::operation::Operation;
use crate::os::limits::explain;
use crate::runtime::{Entry, History, RankHistory};
use crate::telemetry::report::{
    Called, Curves, Moved, OfEpoch, Outcome, Parameters, Ranks, Replicas, Report, Samples, Tracks,
    Verdict,
};
use crate::telemetry::{End, Output, Printer, trace_output, write_trace};

/// The trace and the report of this process, and the data for them.
#[derive(Debug)]
pub(super) struct RunArtifacts {
    /// The trace file of this process. `None` without `--trace`.
    trace: Option<Output>,
    /// The report file. `None` without `--report`, and in processes without rank 0.
    report: Option<Output>,
    history: Arc<OnceLock<History>>,
    draft: Mutex<ReportData>,
    curves: Arc<Mutex<Curves>>,
    began: SystemTime,
}

/// The data that rank 0 collects for the report.
#[derive(Debug, Default)]
pub(super) struct ReportData {
    pub model: Parameters,
    /// The state of training at the start.
    pub first: TrainerState,
    pub moved: Moved,
    pub replicas: Option<Replicas>,
    pub verdict: Verdict,
    pub end: Option<End>,
}

impl RunArtifacts {
    /// Prepares the files that `config` names, for this process of `launched`.
    ///
    /// # Errors
    /// [`Error::Input`] if a file cannot be written.
    pub(super) fn new(config: &Config, launched: &Launched) -> Result<Self> {
        let process = launched.process();
        config.validate_files(process[1])?;
        let input = |flag: &str, path: &Path, error: io::Error| {
            Error::Input(format!("{flag} {}: {}", path.display(), explain(&error)))
        };
        let trace = config
            .trace
            .as_deref()
            .map(|path| trace_output(path, process).map_err(|error| input("--trace", path, error)));
        let report = config
            .report
            .as_deref()
            .filter(|_| launched.is_first())
            .map(|path| Report::output(path).map_err(|error| input("--report", path, error)));
        let (trace, report) = (trace.transpose()?, report.transpose()?);
        Ok(Self {
            trace,
            report,
            history: Arc::default(),
            draft: Mutex::default(),
            curves: Arc::default(),
            began: SystemTime::now(),
        })
    }

    /// Returns where to leave the ranks' history. `None` without a trace or a report.
    pub(super) fn history(&self) -> Option<Arc<OnceLock<History>>> {
        (self.trace.is_some() || self.report.is_some()).then(|| self.history.clone())
    }

    /// Returns where to leave the curves of training. `None` without a report.
    pub(super) fn curves(&self) -> Option<Arc<Mutex<Curves>>> {
        self.report.is_some().then(|| self.curves.clone())
    }

    /// Returns the mean loss of the first quarter of the run, and of the last. `None` without a report.
    pub(super) fn losses(&self) -> Option<[f64; 2]> {
        self.curves.lock().unwrap_or_else(PoisonError::into_inner).losses()
    }

    /// Updates the data of the report, if there is one.
    pub(super) fn update(&self, write: impl FnOnce(&mut ReportData)) {
        if self.report.is_some() {
            write(&mut self.draft.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Records the model that rank 0 begins to train.
    pub(super) fn model(&self, config: &Config, ddp: &Strategy<Model>, first: &TrainerState) {
        self.update(|draft| {
            draft.first = first.clone();
            draft.model = Parameters {
                name: config.model.name().into(),
                parameters: ddp.parameter_places(),
                buckets: ddp.statistics().bucket_bytes,
            };
        });
    }

    /// Writes the files after the ranks have ended.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub(super) fn write(
        &self,
        config: &Config,
        launched: &Launched,
        data: &Data,
        outcome: Outcome,
        printer: &Printer,
    ) -> Result<()> {
        let Some(history) = self.history.get() else { return Ok(()) };
        let unwritable = |flag: &str, output: &Output, error: io::Error| Error::Write {
            what: format!("{flag} {}", output.path().display()),
            reason: explain(&error),
        };
        // If one file cannot be written, the other one still is.
        let trace = self.trace.as_ref().map_or(Ok(()), |output| {
            output
                .write(|file| write_trace(history, file))
                .map_err(|error| unwritable("--trace", output, error))?;
            if let (true, Some(path)) = (launched.is_first(), &config.trace) {
                let path = path.display();
                printer.info(&match history.process {
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
            let report = self.page(config, launched, data, outcome, history)?;
            output
                .write(|file| report.write(file))
                .map_err(|error| unwritable("--report", output, error))?;
            let path = config.report.as_deref().unwrap_or(output.path()).display();
            printer.info(&format!("the report is in {path}: open it in a browser"));
            Ok(())
        });
        trace.and(report)
    }

    fn page(
        &self,
        config: &Config,
        launched: &Launched,
        data: &Data,
        outcome: Outcome,
        history: &History,
    ) -> Result<Report> {
        let draft = std::mem::take(&mut *self.draft.lock().unwrap_or_else(PoisonError::into_inner));
        let curves = self.curves.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let steps = steps_of(history).saturating_sub(draft.first.step);
        let ReportData { first, model, moved, replicas, verdict, end, .. } = draft;
        let end = end.as_ref();
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
            options: options(config),
            world: Ranks {
                size: launched.world_size(),
                nnodes: launched.nnodes(),
                backend: launched.placement.backend.name(),
                devices: history.ranks.iter().map(|rank| rank.device.clone()).collect(),
            },
            model,
            curves,
            samples: samples(config, data.training.len(), launched.world_size(), &first, steps)?,
            timeline: Tracks::new(history),
            traffic: Moved { collectives: collectives(history), ..moved },
            replicas,
            verdict,
        })
    }
}

/// Returns `time` as a date, at the nearest end of the years 1970 to 9999 if a wrong clock is outside them.
fn date(time: SystemTime) -> String {
    let latest = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
    humantime::format_rfc3339_seconds(time.clamp(SystemTime::UNIX_EPOCH, latest)).to_string()
}

/// Returns the command line, quoted so that a shell reads the same arguments.
fn command() -> String {
    let quoted = |text: &str| shlex::try_quote(text).map_or_else(|_| text.into(), Cow::into_owned);
    let shown = |arg: OsString| {
        let arg = arg.to_string_lossy();
        match arg.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => format!("{flag}={}", quoted(value)),
            _ => quoted(&arg),
        }
    };
    let args = std::env::args_os().skip(1).map(shown);
    ["ddp-mp".to_owned()].into_iter().chain(args).collect::<Vec<_>>().join(" ")
}

/// Returns all options as text. Those that differ from their default come first.
fn options(config: &Config) -> Vec<(String, String)> {
    let values = |config: &Config| match serde_json::to_value(config) {
        Ok(Value::Object(values)) => values,
        _ => serde_json::Map::new(),
    };
    let default = values(&Config::default());
    let (given, rest): (Vec<_>, Vec<_>) =
        values(config).into_iter().partition(|(key, value)| default.get(key) != Some(value));
    let text = |(key, value): (String, Value)| match value {
        Value::String(text) => (key, text),
        value => (key, value.to_string()),
    };
    given.into_iter().chain(rest).map(text).collect()
}

/// Returns the number of steps of the whole run that rank 0 has finished.
fn steps_of(history: &History) -> u64 {
    let records = history.ranks.first().into_iter().flat_map(|rank| &rank.records);
    let stepped =
        |it: &&Entry| it.begin.at.operation == Operation::Optimizer && it.finished_at.is_some();
    records.filter(stepped).map(|it| it.begin.at.sequence + 1).max().unwrap_or(0)
}

/// The most samples that a report lists.
const MAX_LISTED_SAMPLES: usize = 200_000;

/// Returns the samples that the sampler dealt to each rank in `steps` steps, from the state `first` on.
fn samples(
    config: &Config,
    dataset: usize,
    world_size: usize,
    first: &TrainerState,
    mut steps: u64,
) -> Result<Samples> {
    let batch = config.batch_size;
    let of_rank = |rank| config.sampler(dataset, world_size, rank);
    let samplers = (0..world_size).map(of_rank).collect::<Result<Vec<DistributedSampler>>>()?;
    let mut listed = Samples { dataset, batch_size: batch, complete: true, epochs: Vec::new() };
    let (mut epoch, mut seen, mut room) =
        (first.epoch, first.samples_seen, MAX_LISTED_SAMPLES / world_size);
    while steps > 0 && listed.complete {
        let batches = batches_of_all(&samplers[0], seen, batch, config.drop_last_batch);
        let now = (batches as u64).div_ceil(config.grad_accum_steps).min(steps);
        if now == 0 && seen == 0 {
            break; // an epoch without steps
        }
        let most = (now * config.grad_accum_steps).min(batches as u64) as usize * batch;
        let of_rank = |sampler: &DistributedSampler| -> Result<Vec<usize>> {
            let mut indices = sampler.indices_from(epoch, seen)?;
            indices.truncate(most.min(room));
            Ok(indices)
        };
        if now > 0 {
            let ranks = samplers.iter().map(of_rank).collect::<Result<Vec<_>>>()?;
            let longest = most.min(samplers[0].num_samples_from(seen));
            listed.complete = longest <= room;
            room -= longest.min(room);
            listed.epochs.push(OfEpoch { epoch, ranks });
        }
        steps -= now;
        (epoch, seen) = (epoch + 1, 0);
    }
    Ok(listed)
}

/// Returns the collectives that the ranks of this process have called.
fn collectives(history: &History) -> Vec<Called> {
    let called = |operation: Operation| {
        let of_rank = |rank: &RankHistory| {
            let found = rank.totals.iter().find(|(it, _)| *it == operation);
            found.map_or([0, 0], |(_, totals)| *totals)
        };
        let totals: Vec<[u64; 2]> = history.ranks.iter().map(of_rank).collect();
        Called {
            operation: operation.to_string(),
            calls: totals.iter().map(|it| it[0]).collect(),
            bytes: totals.iter().map(|it| it[1]).collect(),
        }
    };
    let all = Operation::ALL.into_iter().map(called);
    all.filter(|it| it.calls.iter().any(|calls| *calls > 0)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::Device;

    use super::*;
    use crate::data::{DataLoader, Targets, TensorDataset};

    /// Returns the samples of all steps, by epoch and rank, as the loaders of a run deal them.
    fn trained(config: &Config, samples: usize, ranks: usize) -> Vec<Vec<Vec<usize>>> {
        let data =
            Arc::new(TensorDataset::random(samples as i64, 1, Targets::Values(1), 0).unwrap());
        let of_rank = |rank, epoch| {
            let sampler = config.sampler(samples, ranks, rank).unwrap();
            let loader = DataLoader::new(data.clone(), sampler, config.batch_size, Device::Cpu);
            let loader = loader.unwrap().drop_last(config.drop_last_batch);
            let loader = loader.in_step(config.exact_mean);
            let batches = loader.num_batches();
            let steps = batches.div_ceil(config.grad_accum_steps as usize) as u64;
            assert_eq!(steps, config.steps_per_epoch(ranks), "{samples} on {ranks}: {config}");
            loader.samples(epoch, 0, 0, batches).unwrap()
        };
        let of_epoch = |epoch| (0..ranks).map(|rank| of_rank(rank, epoch)).collect();
        (0..config.max_epochs).map(of_epoch).collect()
    }

    #[test]
    fn the_samples_that_are_listed_are_those_that_were_trained_on() {
        const FLAGS: [[bool; 3]; 6] = [
            [false, false, false],
            [true, false, false],
            [false, true, false],
            [false, false, true],
            [true, false, true],
            [false, true, true],
        ];
        for [drop_last, exact_mean, drop_last_batch] in FLAGS {
            for (samples, ranks, accumulate) in
                [(31, 2, 1), (32, 2, 1), (33, 2, 3), (31, 3, 2), (50, 3, 1), (16, 1, 1)]
            {
                let config = Config {
                    max_epochs: 2,
                    batch_size: 8,
                    num_samples: Some(samples as i64),
                    grad_accum_steps: accumulate,
                    drop_last,
                    exact_mean,
                    drop_last_batch,
                    ..Config::default()
                };
                let expected = trained(&config, samples, ranks);
                let steps = config.steps(ranks);
                let start = TrainerState::default();
                let listed = super::samples(&config, samples, ranks, &start, steps).unwrap();
                let listed: Vec<Vec<Vec<usize>>> =
                    listed.epochs.into_iter().map(|it| it.ranks).collect();
                assert_eq!(listed, expected, "{samples} on {ranks} ranks: {config}");
            }
        }
    }

    #[test]
    fn a_clock_that_is_wrong_has_a_date_too() {
        let day = Duration::from_secs(86400);
        for (time, text) in [
            (SystemTime::UNIX_EPOCH - day * 400, "1970-01-01T00:00:00Z"),
            (SystemTime::UNIX_EPOCH + day, "1970-01-02T00:00:00Z"),
            (SystemTime::UNIX_EPOCH + day * 366 * 9000, "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(date(time), text);
        }
    }
}
