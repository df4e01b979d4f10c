//! The views of a run: what its options ask to see.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::report_facts::report_facts;
use crate::config::{CommHookKind, Config, Data};
use engine::error::{Error, Result, Shown, counted};
use engine::events::Observers;
use engine::files::{Place, WholeFile, process_path};
use engine::launch::{JoinedLaunch, StopRequest};
use engine::os::limits::output_refused;
use engine::trainer::KeepTensors;
use views::{
    Explain, Live, Metrics, Outcome, Printer, Prometheus, Record, Report, RunFacts, RunInfo,
    RunState, TensorBoard, Trace, View,
};

/// The run in this process, of which views are opened.
pub(super) struct Opening<'a> {
    pub config: &'a Config,
    pub joined_launch: &'a JoinedLaunch,
    pub data: &'a Data,
    /// The backend, with what is simulated, for the user.
    pub backend: &'a str,
    pub stop: &'a Arc<StopRequest>,
    pub printer: &'a Arc<Printer>,
}

/// The open views of this process. Those that are written at the end are finished in this order.
pub(crate) struct Views(Vec<Arc<dyn View>>);

impl Views {
    /// Opens all views that the options ask for. What is the same for all ranks is in the process of rank 0 alone. Calls
    /// `open_folder` when all files have been checked: no file and no folder is left if one is refused.
    ///
    /// # Errors
    /// [`Error::Input`] if a file cannot be written, and those of `open_folder`.
    pub(super) fn open(
        run: &Opening<'_>,
        open_folder: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let output = &run.config.output;
        let of_rank_0 = [&output.report, &output.metrics, &output.tensorboard, &output.prometheus];
        let of_rank_0 = of_rank_0.into_iter().filter(|_| run.joined_launch.is_first());
        let paths = [&output.record, &output.trace].into_iter().chain(of_rank_0);
        let missing: Vec<PathBuf> =
            paths.flatten().flat_map(|path| Place::missing_folders(path)).collect();
        let views = Self::open_all(run, open_folder);
        if views.is_err() {
            missing.iter().for_each(|folder| drop(fs::remove_dir(folder))); // those that are empty
        }
        views
    }

    /// Does what [`Self::open`] does, but leaves the folders that it has created if a file is refused.
    fn open_all(run: &Opening<'_>, open_folder: impl FnOnce() -> Result<()>) -> Result<Self> {
        let (output, process) = (&run.config.output, run.joined_launch.process());
        let is_first = run.joined_launch.is_first();
        let here = |path: &Option<PathBuf>| path.clone().filter(|_| is_first);
        let (continues, printer) = (continues(run.config, run.joined_launch), run.printer);
        let each = |path: &Option<PathBuf>| path.as_ref().map(|path| process_path(path, process));
        let record = each(&output.record);
        let (metrics, tensorboard) = (here(&output.metrics), here(&output.tensorboard));
        checked("--record", &record, |path| Record::check(path, continues))?;
        checked("--metrics", &metrics, Metrics::check)?;
        checked("--tensorboard", &tensorboard, TensorBoard::check)?;
        let trace = opened("--trace", each(&output.trace), |path| {
            let path = output.trace.as_deref().unwrap_or(path);
            Ok(Trace::open(path, process)?.note_to(run.printer_of_rank_0()))
        })?;
        let report = opened("--report", here(&output.report), |path| {
            let facts = report_facts(run).map_err(io::Error::other)?;
            Report::open(path, facts, printer.clone())
        })?;
        let prometheus = opened("--prometheus", here(&output.prometheus), |path| {
            Prometheus::new(path, run.facts())
        })?;
        open_folder()?;
        let record = opened("--record", record, |path| {
            let note = run.record_note(output.record.as_deref().unwrap_or(path));
            Ok(Record::open(path, continues)?.note_to(run.printer_of_rank_0(), note))
        })?;
        let metrics = opened("--metrics", metrics, Metrics::open)?;
        let tensorboard =
            opened("--tensorboard", tensorboard, |path| TensorBoard::create(path, continues))?;
        let explain = shown(output.explain && is_first, || run.explanation());
        let live = shown(printer.shows_live && is_first, || run.live());
        let views = [record, trace, report, metrics, tensorboard, prometheus, explain, live];
        Ok(Self(views.into_iter().flatten().collect()))
    }

    /// Returns the observers of the run: `printer`, and these views.
    pub(super) fn observers(&self, printer: &Arc<Printer>) -> Observers {
        let mut observers = Observers::default();
        observers.add(printer.clone());
        self.0.iter().for_each(|view| observers.add(view.clone()));
        observers
    }

    /// Finishes the views of a run that has ended with `outcome`. If one cannot be written, the others still are, and the run
    /// has failed for those after it.
    ///
    /// # Errors
    /// [`Error::Write`], the first one.
    pub(super) fn finish(&self, mut outcome: Outcome) -> Result<()> {
        let mut finished = Ok(());
        for view in &self.0 {
            let done = view.finish(&outcome);
            if let Err(error) = &done {
                outcome = Outcome { kind: RunState::Failed, text: error.to_string() };
            }
            finished = finished.and(done);
        }
        finished
    }
}

/// Opens the view of the file at `path` that `flag` names, if there is one.
fn opened<V: View + 'static>(
    flag: &str,
    path: Option<PathBuf>,
    open: impl FnOnce(&Path) -> io::Result<V>,
) -> Result<Option<Arc<dyn View>>> {
    let Some(path) = path else { return Ok(None) };
    let view = open(&path).map_err(|error| refused(flag, &path, &error))?;
    Ok(Some(Arc::new(view)))
}

/// Calls `check` with the path that `flag` names, if there is one.
fn checked(
    flag: &str,
    path: &Option<PathBuf>,
    check: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    check(path).map_err(|error| refused(flag, path, &error))
}

/// Returns the error of a file at `path` that `flag` names.
fn refused(flag: &str, path: &Path, error: &io::Error) -> Error {
    output_refused(&format!("{flag} {}", path.shown()), error)
}

/// Returns a view of the terminal, if it is `wanted`.
fn shown<V: View + 'static>(wanted: bool, view: impl FnOnce() -> V) -> Option<Arc<dyn View>> {
    wanted.then(|| Arc::new(view()) as Arc<dyn View>)
}

impl Opening<'_> {
    /// Returns where views of each process say where their files are: `None` in processes without rank 0.
    fn printer_of_rank_0(&self) -> Option<Arc<Printer>> {
        self.joined_launch.is_first().then(|| self.printer.clone())
    }

    fn record_note(&self, path: &Path) -> String {
        let (path, program) = (path.shown(), self.config.program.name);
        match self.joined_launch.process() {
            [_, 1] => format!("the record is in {path}: compare it with {program} diff"),
            [_, count] => format!(
                "the records of {count} processes are beside {path}, each with its index in its name: compare them with \
                 {program} diff"
            ),
        }
    }

    fn facts(&self) -> RunFacts {
        RunFacts {
            model: self.config.model_name(),
            backend: self.joined_launch.placement.backend.name(),
            world_size: self.joined_launch.world_size(),
            restarts: self.joined_launch.launch.restart_count,
        }
    }

    fn live(&self) -> Live {
        let Self { config, joined_launch, backend, stop, printer, .. } = self;
        let ranks = counted(joined_launch.world_size(), "rank");
        let title = format!("{} on {ranks} ({backend})", config.model_name());
        let is_of_user = joined_launch.launch.parent.is_none() && !joined_launch.launch.has_agent;
        Live::new((*printer).clone(), title, (*stop).clone(), is_of_user)
    }

    fn explanation(&self) -> Explain {
        let Self { config, joined_launch, data, printer, .. } = self;
        let run_info = RunInfo {
            world_size: joined_launch.world_size(),
            processes: joined_launch.process()[1],
            backend: joined_launch.placement.backend.name(),
            model: config.model_name(),
            seed: config.training.seed,
            starts_from_file: config.checkpoints.init_from.is_some(),
            samples: data.training.len(),
            shuffles: !config.data.no_shuffle,
            drops_last: config.data.drop_last,
            accumulate: config.ddp.grad_accum_steps,
            exact_mean: config.ddp.exact_mean,
            optimizer_layout: config.optimizer_layout(),
            steps_per_epoch: config.steps_per_epoch(joined_launch.world_size()),
            compression: match config.ddp.comm_hook {
                CommHookKind::None => None,
                CommHookKind::Fp16 => Some("float16"),
                CommHookKind::Bf16 => Some("bfloat16"),
            },
            optimizer: config.optimization.optimizer.to_string(),
            is_plain: config.optimizer_options().is_plain(),
            max_grad_norm: config.optimization.max_grad_norm,
        };
        Explain::new(config.output.language, run_info, (*printer).clone())
    }
}

/// Returns whether the run goes on where an earlier one, or an earlier start of it, was.
fn continues(config: &Config, joined_launch: &JoinedLaunch) -> bool {
    config.checkpoints.resume.is_some() || joined_launch.launch.restart_count > 0
}

/// Checks that the run has the rank of `--keep-rank`, and that its file can be written.
///
/// # Errors
/// [`Error::Input`] if it has not, or the file exists.
pub(super) fn check_kept(config: &Config, joined_launch: &JoinedLaunch) -> Result<()> {
    let Some(keep) = config.keep() else { return Ok(()) };
    let ranks = joined_launch.world_size();
    if keep.rank >= ranks {
        return Err(Error::usage(format!(
            "--keep-rank {}: this run has ranks 0 to {}",
            keep.rank,
            ranks - 1
        )));
    }
    if !joined_launch.ranks_here().contains(&keep.rank) {
        return Ok(());
    }
    let begun = match fs::metadata(&keep.file) {
        Ok(_) if is_of_earlier_start(&keep, joined_launch) => Ok(()),
        Ok(_) => Err(io::Error::other("this file exists; remove it, or use another name")),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Err(_) => WholeFile::begin(&keep.file).map(drop),
    };
    begun.map_err(|error| refused("--keep", &keep.file, &error))
}

/// Returns whether an earlier start of this run may have written the file of `keep`.
fn is_of_earlier_start(keep: &KeepTensors, joined_launch: &JoinedLaunch) -> bool {
    joined_launch.launch.restart_count > 0 && keep.is_written()
}

/// Removes the tensors that an earlier start of this run has kept on `rank`, if this one, which goes on with step `from`, keeps
/// them again.
pub(crate) fn remove_kept(config: &Config, joined_launch: &JoinedLaunch, rank: usize, from: u64) {
    let keep = config.keep().filter(|keep| keep.rank == rank && keep.step >= from);
    if let Some(keep) = keep.filter(|keep| is_of_earlier_start(keep, joined_launch)) {
        let _ = fs::remove_file(&keep.file); // the run says so if it cannot write
    }
}
