//! `--spawn=processes` and `--max-restarts`: the parent process that starts the ranks, and the errors that its child
//! processes leave for it.

use std::fmt::{self, Write};
use std::io;

use tempfile::TempDir;

use super::checked_placement::{place_processes, starts_processes};
use crate::config::Config;
use engine::checkpoint::{CheckpointDir, TrainerState};
use engine::error::{Error, Result, Shown};
use engine::events::Event;
use engine::ffi::cuda::Cuda;
use engine::launch::{
    ChildError, Children, ErrorKind, Launch, LaunchKind, ProcessesEnd, Restarts, SpawnChoice,
    SpawnError, SpawnProcesses, StopReason,
};
use views::{LogFormat, Printer};

/// Runs a command by `here`, on ranks of this process. If `config` asks for child processes, one for each rank or one for all
/// ranks, they run it in the place of this process, and are restarted after a failure: a process whose ranks have all ended
/// calls `here` again. `stops`: whether the command stops at a signal and saves. Returns why the run has stopped early, if it
/// has.
///
/// # Errors
/// Those of `here`, which are also left where the launcher and the parent process look for them, and of the child processes;
/// and [`Error::Input`] for restarts where a launcher has started this process: the launcher restarts it.
pub(crate) fn run_command(
    config: Config,
    launch: &Launch,
    stops: bool,
    cuda: &Cuda,
    printer: &Printer,
    mut here: impl FnMut(Config, &Launch) -> anyhow::Result<Option<StopReason>>,
) -> anyhow::Result<Option<StopReason>> {
    // For other commands, a file may have `max_restarts` for training.
    let max_restarts = if stops { max_restarts(&config, launch)? } else { 0 };
    if max_restarts == 0 && !starts_processes(&config, launch) {
        let mut launch = launch.clone();
        loop {
            let error = match here(config.clone(), &launch) {
                Ok(reason) => return Ok(reason),
                Err(error) => leave_error(&launch, error, printer),
            };
            if !may_stay(&error, &launch, cuda) || !Restarts::ask_to_stay(&launch).unwrap_or(false)
            {
                return Err(error);
            }
            launch.restart_count += 1;
        }
    }
    match run_processes(&config, launch, stops, max_restarts, cuda, printer)? {
        ProcessesEnd::Well(reason) => Ok(reason),
        ProcessesEnd::Badly(error, restarts) => {
            if stops && printer.format() == LogFormat::Json {
                print_failure(&error, &restarts, printer)?;
            }
            Err(with_restarts(*error, &restarts))
        }
    }
}

/// Runs the child processes, and reports each restart.
fn run_processes(
    config: &Config,
    launch: &Launch,
    stops: bool,
    max_restarts: usize,
    cuda: &Cuda,
    printer: &Printer,
) -> Result<ProcessesEnd> {
    let placement = match config.launch.spawn {
        SpawnChoice::Processes => Some(place_processes(config, launch, cuda)?),
        SpawnChoice::Threads => None, // the child process places its threads
    };
    if let Some(note) = placement.as_ref().and_then(|placement| placement.note.as_ref()) {
        printer.info(note);
    }
    let (timeout, grace_period) = (config.launch.timeout, config.launch.grace_period);
    let children = placement.as_ref().map_or(Children::Threads, Children::Ranks);
    let state = state_in_memory(config, max_restarts);
    let spawn = SpawnProcesses {
        children,
        timeout,
        grace_period,
        stops,
        max_restarts,
        state_dir: state.as_ref().map(TempDir::path),
        lends_terminal: printer.shows_live,
    };
    spawn.run(|number, error| {
        printer.report(&error.text);
        let again = error.again().map_or(String::new(), |again| {
            format!("; {again}: without a change this start will probably also fail there")
        });
        let from = restarts_from(config, state.as_ref());
        printer.report(&format!("restart {number} of {max_restarts}, {from}{again}"));
    })
}

/// Returns a folder in memory for the state of a rank that survives a failure. `None` for a run that is not restarted or
/// that saves checkpoints, and if no such folder can be made.
fn state_in_memory(config: &Config, max_restarts: usize) -> Option<TempDir> {
    let is_wanted = max_restarts > 0 && config.checkpoints.checkpoint_dir.is_none();
    let folder = || tempfile::Builder::new().prefix("ddp-mp-").tempdir_in("/dev/shm").ok();
    is_wanted.then(folder).flatten()
}

/// Returns from where a restart continues the run, for the user.
fn restarts_from(config: &Config, state: Option<&TempDir>) -> String {
    let checkpoint_dir = config.checkpoints.checkpoint_dir.as_deref();
    let dir = checkpoint_dir.or(state.map(TempDir::path));
    let newest = dir.map_or(Ok(None), CheckpointDir::newest_in);
    if let Ok(Some(newest)) = &newest
        && let Ok(TrainerState { step, after_failure: Some(rank), .. }) = TrainerState::read(newest)
    {
        return format!("at step #{step}, from the state that rank {rank} has saved");
    }
    if let Some(dir) = checkpoint_dir
        && !matches!(newest, Ok(None))
    {
        return format!("from the newest checkpoint in {}", dir.shown());
    }
    match (config.resume_path(), checkpoint_dir) {
        (Some(path), _) => format!("from {}, where the run began", path.shown()),
        (None, Some(dir)) => {
            format!("from the start of the run, because {} has no checkpoint", dir.shown())
        }
        (None, None) => {
            "from the beginning: no rank could save the state, and without --checkpoint-dir the run has no checkpoints"
                .into()
        }
    }
}

/// Prints the event of a failure of ranks or processes. Other errors are no event.
fn print_failure(error: &ChildError, restarts: &[String], printer: &Printer) -> io::Result<()> {
    if matches!(error.kind, ErrorKind::WrongInput | ErrorKind::Other) {
        return Ok(());
    }
    let failure = error.failure().cloned();
    let text = failure.as_ref().map_or(&error.text, |failure| &failure.error).clone();
    printer.print(&Event::Failure {
        failure,
        error: text,
        repeated: error.repeated,
        restarts: restarts.to_vec(),
    })
}

/// Returns `error` for the user, with the reasons of the restarts before it.
fn with_restarts(error: ChildError, restarts: &[String]) -> anyhow::Error {
    let again = error.again();
    let ChildError { mut text, kind, repeated } = error;
    if let (Some(again), Some(count)) = (again, repeated) {
        let _ =
            write!(text, "\n  {again}: {count} failures in a row, with no progress between them");
    }
    for (number, reason) in (1..).zip(restarts) {
        let _ = write!(text, "\n  restart {number} was needed: {reason}");
    }
    match kind {
        ErrorKind::WrongInput => Error::usage(text).into(),
        _ => anyhow::Error::msg(text),
    }
}

/// Returns how often to restart the run of `config` after a failure. 0 in a process that another one has started.
///
/// # Errors
/// [`Error::Input`] where a launcher has started this process: the launcher restarts it.
fn max_restarts(config: &Config, launch: &Launch) -> Result<usize> {
    if launch.parent.is_some() || config.launch.max_restarts == 0 {
        return Ok(0);
    }
    if launch.kind == LaunchKind::Local {
        return Ok(config.launch.max_restarts);
    }
    Err(Error::usage(format!(
        "--max-restarts={restarts} is for one machine without a launcher, and this is {}; leave it out, and let the \
         launcher restart the run: torchrun --max-restarts={restarts}",
        launch.this_process(),
        restarts = config.launch.max_restarts,
    )))
}

/// Returns whether the ranks can start again in this process after `error`, the end of the start that `launch` describes. A
/// GPU may be unusable in a process after an error, and a thread that has not come back still uses what it shares.
fn may_stay(error: &anyhow::Error, launch: &Launch, cuda: &Cuda) -> bool {
    let failed = error.downcast_ref::<Box<SpawnError>>();
    let all_ended =
        failed.is_some_and(|failed| failed.stuck.is_empty() && failed.stopped.is_none());
    let is_known = error.is::<AlreadyReported>();
    let is_restarted = launch.parent.is_some() && launch.restart_count < launch.max_restarts;
    all_ended && is_known && is_restarted && launch.kind == LaunchKind::Local && cuda.usable() == 0
}

/// Marks an error that the user has seen, or that another process reports.
#[derive(Debug)]
pub struct AlreadyReported;

impl fmt::Display for AlreadyReported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("reported by the parent process")
    }
}

/// Leaves the error of a command where the launcher and the parent process look for it. Returns it, marked as
/// [`AlreadyReported`] if the parent process reports it.
fn leave_error(launch: &Launch, error: anyhow::Error, printer: &Printer) -> anyhow::Error {
    if let Err(unwritable) = launch.report_failure(&format!("{error:#}")) {
        printer.report(&unwritable);
    }
    let Some(parent) = &launch.parent else { return error };
    let failed = error.downcast_ref::<Box<SpawnError>>();
    if failed.is_some_and(|failed| failed.stopped.is_some()) {
        // For the parent process the run has stopped, and not failed. The process of rank 0 reports how.
        return if launch.processes.index == 0 { error } else { error.context(AlreadyReported) };
    }
    let kind = match (failed, error.downcast_ref()) {
        (Some(failed), _) => ErrorKind::Ranks(failed.failure.clone()),
        (None, Some(Error::Input { .. })) => ErrorKind::WrongInput,
        (None, _) => ErrorKind::Other,
    };
    let left = ChildError::new(format!("{error:#}"), kind);
    match left.leave(parent, launch.restart_count, launch.processes.index) {
        Ok(()) => error.context(AlreadyReported),
        Err(_) => error,
    }
}
