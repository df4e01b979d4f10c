//! What a run leaves for people to look at: `--trace` and `--report`.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use serde_json::Value;

use super::launched::Launched;
use crate::config::{Config, Data};
use crate::data::DistributedSampler;
use crate::ddp::Strategy;
use crate::error::{Error, Result};
use crate::models::Model;
use crate::observe::report::{
    Called, Curves, Lanes, Moved, OfEpoch, Outcome, Parameters, Ranks, Replicas, Report, Samples,
    Verdict,
};
use crate::observe::{End, Printer, trace_file, write_trace};
use crate::operation::Operation;
use crate::sync::{History, OfRank, Record};
use crate::torch;

/// Who wants to see what the ranks of this process did.
#[derive(Debug)]
pub(super) struct Seen {
    /// The file of this process.
    trace: Option<PathBuf>,
    /// In the process of rank 0.
    report: Option<PathBuf>,
    history: Arc<OnceLock<History>>,
    draft: Mutex<Draft>,
    curves: Arc<Mutex<Curves>>,
    began: SystemTime,
}

/// What rank 0 knows of a run for its report.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub model: Parameters,
    /// How many steps had been made before.
    pub first_step: u64,
    pub moved: Moved,
    pub replicas: Option<Replicas>,
    pub verdict: Verdict,
    pub end: Option<End>,
}

impl Seen {
    /// As `config` says, for this process of those that `launched` knows.
    ///
    /// # Errors
    /// [`Error::Input`] if a file cannot be written.
    pub(super) fn new(config: &Config, launched: &Launched) -> Result<Self> {
        let process = launched.process();
        let trace = config.trace.as_deref().map(|path| trace_file(path, process));
        let report = config.report.clone().filter(|_| launched.is_first());
        for (flag, path) in [("--trace", &trace), ("--report", &report)] {
            path.as_deref().map_or(Ok(()), |path| check_writable(flag, path))?;
        }
        Ok(Self {
            trace,
            report,
            history: Arc::default(),
            draft: Mutex::default(),
            curves: Arc::default(),
            began: SystemTime::now(),
        })
    }

    /// Where to leave what the ranks did, if anybody wants it.
    pub(super) fn history(&self) -> Option<Arc<OnceLock<History>>> {
        (self.trace.is_some() || self.report.is_some()).then(|| self.history.clone())
    }

    /// Where to leave how training goes, if anybody wants that.
    pub(super) fn curves(&self) -> Option<Arc<Mutex<Curves>>> {
        self.report.is_some().then(|| self.curves.clone())
    }

    /// Takes down what rank 0 knows.
    pub(super) fn draft(&self, write: impl FnOnce(&mut Draft)) {
        write(&mut self.draft.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The model that rank 0 begins to train.
    pub(super) fn model(&self, config: &Config, ddp: &Strategy<Model>, first_step: u64) {
        self.draft(|draft| {
            draft.first_step = first_step;
            draft.model = Parameters {
                name: config.model.name().into(),
                parameters: ddp.parameter_places(),
                buckets: ddp.statistics().bucket_bytes,
            };
        });
    }

    /// Has seen where the parameters are in the end.
    pub(super) fn moved(&self, ddp: &Strategy<Model>) {
        self.draft(|draft| draft.model.parameters = ddp.parameter_places());
    }

    /// The ranks have ended.
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
        let unwritable = |flag: &str, path: &Path, error: std::io::Error| Error::Write {
            what: format!("{flag} {}", path.display()),
            reason: error.to_string(),
        };
        if let Some(path) = &self.trace {
            write_trace(history, path).map_err(|error| unwritable("--trace", path, error))?;
            if launched.is_first() {
                let path = path.display();
                printer.note(&format!("the trace is in {path}: open it in ui.perfetto.dev"));
            }
        }
        if let Some(path) = &self.report {
            let report = self.page(config, launched, data, outcome, history)?;
            report.write(path).map_err(|error| unwritable("--report", path, error))?;
            printer.note(&format!("the report is in {}: open it in a browser", path.display()));
        }
        Ok(())
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
        let steps = steps_of(history, draft.first_step);
        let Draft { model, moved, replicas, verdict, end, .. } = draft;
        let end = end.as_ref();
        Ok(Report {
            version: 1,
            program: format!("ddp-mp {}", env!("CARGO_PKG_VERSION")),
            command: command(),
            began: humantime::format_rfc3339_seconds(self.began).to_string(),
            libtorch: torch::version(),
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
            samples: samples(config, data.training.len(), launched.world_size(), steps)?,
            timeline: Lanes::new(history),
            traffic: Moved { collectives: collectives(history), ..moved },
            replicas,
            verdict,
        })
    }
}

/// As it was typed, more or less: what a shell would make the same of.
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

/// Nothing that is in the file is touched.
fn check_writable(flag: &str, path: &Path) -> Result<()> {
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    let open = |()| OpenOptions::new().write(true).create(true).truncate(false).open(path);
    let refuse = |error| Error::Input(format!("{flag} {}: {error}", path.display()));
    folder.and_then(open).map(drop).map_err(refuse)
}

/// All options as text, those first that are not what they are by default.
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

/// The steps that rank 0 has come through, of the whole run's.
fn steps_of(history: &History, first: u64) -> Range<u64> {
    let records = history.ranks.first().into_iter().flat_map(|rank| &rank.records);
    let stepped =
        |it: &&Record| it.begin.at.operation == Operation::Optimizer && it.ended.is_some();
    let last = records.filter(stepped).map(|it| it.begin.at.sequence).max();
    first..last.map_or(first, |last| last + 1)
}

/// So many samples a report lists at most.
const LISTED: usize = 200_000;

/// Which samples each rank had in these `steps` of the run.
fn samples(
    config: &Config,
    dataset: usize,
    world_size: usize,
    steps: Range<u64>,
) -> Result<Samples> {
    let batch = config.batch_size;
    let of_rank = |rank| config.sampler(dataset, world_size, rank);
    let samplers = (0..world_size).map(of_rank).collect::<Result<Vec<DistributedSampler>>>()?;
    let (per_epoch, a_step) =
        (config.steps_per_epoch(world_size), batch * config.accumulate as usize);
    let mut listed = Samples { dataset, batch_size: batch, complete: true, epochs: Vec::new() };
    let mut count = 0;
    let mut step = steps.start;
    while step < steps.end && per_epoch > 0 {
        let epoch = step / per_epoch;
        let ends = ((epoch + 1) * per_epoch).min(steps.end);
        let [from, to] = [step, ends].map(|step| (step - epoch * per_epoch) as usize * a_step);
        let of_rank = |sampler: &DistributedSampler| -> Result<Vec<usize>> {
            let indices = sampler.indices(epoch)?;
            let len = match config.drop_last_batch {
                true => indices.len() - indices.len() % batch.max(1),
                false => indices.len(),
            };
            Ok(indices[from.min(len)..to.min(len)].to_vec())
        };
        let ranks = samplers.iter().map(of_rank).collect::<Result<Vec<_>>>()?;
        count += ranks.iter().map(Vec::len).sum::<usize>();
        if count > LISTED {
            listed.complete = false;
            break;
        }
        listed.epochs.push(OfEpoch { epoch, ranks });
        step = ends;
    }
    Ok(listed)
}

/// What the ranks of this process have called.
fn collectives(history: &History) -> Vec<Called> {
    let called = |operation: Operation| {
        let of_rank = |rank: &OfRank| {
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
