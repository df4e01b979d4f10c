//! `--spawn=processes` and `--max-restarts`: the parent process that starts the ranks, and the errors that its child
//! processes leave for it.

use std::fmt::{self, Write};

use anyhow::Context;
use tch::Device;

use super::cores;
use super::train::failure;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::ffi::cuda::Cuda;
use crate::launch::{
    Children, Ended, Launch, LaunchKind, Placement, Report, SpawnChoice, SpawnError,
    SpawnProcesses, StopReason, place,
};
use crate::telemetry::{Event, Failure, LogFormat, Printer};

/// Returns whether this process starts a process for each rank.
pub(super) fn starts_processes(config: &Config, launch: &Launch) -> bool {
    config.spawn == SpawnChoice::Processes && launch.kind != LaunchKind::Spawned
}

/// Returns where the ranks run when each is a process.
pub(super) fn place_processes(config: &Config, launch: &Launch, cuda: &Cuda) -> Result<Placement> {
    if launch.kind != LaunchKind::Local {
        return Err(Error::Input(format!(
            "--spawn=processes is for one machine without a launcher, and this is process {} of {} ({}: {}); leave it \
             out",
            launch.processes.index,
            launch.processes.count,
            launch.kind.name(),
            launch.reason
        )));
    }
    let placement = place(launch.nproc, config.backend, cuda, &launch.share(cores()))?;
    let count = placement.devices.len();
    if placement.devices[0] == Device::Cpu {
        config.check_memory_for(count, count)?;
    }
    placement.in_processes(count, config.backend)
}

/// Returns how often to restart the run of `config` after a failure. 0 in a process that another one has started.
///
/// # Errors
/// [`Error::Input`] where a launcher has started this process: the launcher restarts it.
pub(super) fn max_restarts(config: &Config, launch: &Launch) -> Result<usize> {
    if launch.parent.is_some() || config.max_restarts == 0 {
        return Ok(0);
    }
    if launch.kind == LaunchKind::Local {
        return Ok(config.max_restarts);
    }
    let (index, count, kind) = (launch.processes.index, launch.processes.count, launch.kind.name());
    Err(Error::Input(format!(
        "--max-restarts={restarts} is for one machine without a launcher, and this is process {index} of {count} ({kind}: \
         {}); leave it out, and let the launcher restart the run: torchrun --max-restarts={restarts}",
        launch.reason,
        restarts = config.max_restarts,
    )))
}

/// Runs this command in a child process per rank, or in one for all ranks. Restarts it up to `max_restarts` times.
/// `stops`: whether the command stops at a signal and saves.
pub(super) fn run_processes(
    config: &Config,
    launch: &Launch,
    cuda: &Cuda,
    printer: &Printer,
    stops: bool,
    max_restarts: usize,
) -> anyhow::Result<Option<StopReason>> {
    let placement = match config.spawn {
        SpawnChoice::Processes => Some(place_processes(config, launch, cuda)?),
        SpawnChoice::Threads => None, // the child process places its threads
    };
    if let Some(note) = placement.as_ref().and_then(|it| it.note.as_ref()) {
        printer.info(note);
    }
    let Config { timeout, grace_period, .. } = *config;
    let children = placement.as_ref().map_or(Children::Threads, Children::Ranks);
    let spawn = SpawnProcesses { children, timeout, grace_period, stops, max_restarts };
    let from = match &config.checkpoint_dir {
        Some(dir) => format!("from the newest checkpoint in {}", dir.display()),
        None => "from the beginning, because nothing is saved without --checkpoint-dir".into(),
    };
    let ended = spawn.run(|number, Report { text, failure, .. }| {
        printer.info(text);
        let again = failure.as_ref().and_then(Failure::again).map_or(String::new(), |again| {
            format!("; {again}: without a change this start will probably fail there, too")
        });
        printer.info(&format!("restart {number} of {max_restarts}, {from}{again}"));
    });
    let (Report { mut text, wrong_input, failure }, restarts) = match ended? {
        Ended::Well(reason) => return Ok(reason),
        Ended::Badly(report, restarts) => (*report, restarts),
    };
    if let Some(failure) = &failure
        && let (Some(again), Some(count)) = (failure.again(), failure.repeated)
    {
        let _ =
            write!(text, "\n  {again}: {count} failures in a row, with no progress between them");
    }
    for (number, reason) in (1..).zip(&restarts) {
        let _ = write!(text, "\n  restart {number} was needed: {reason}");
    }
    if let Some(failure) = failure
        && stops
        && printer.format() == LogFormat::Json
    {
        let failure = Failure { restarts, ..failure };
        printer.event(&Event::Failure(failure)).context("writing to stdout")?;
    }
    Err(if wrong_input { Error::Input(text).into() } else { anyhow::Error::msg(text) })
}

/// Marks an error that the user has seen, or that another process reports.
#[derive(Debug)]
pub struct AlreadyReported;

impl fmt::Display for AlreadyReported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("told by the process that has started this one")
    }
}

/// Leaves `error` with the parent process and marks it as [`AlreadyReported`]. Without a parent, returns it for the
/// user.
pub(super) fn leave_error(launch: &Launch, error: anyhow::Error) -> anyhow::Error {
    let Some(parent) = &launch.parent else { return error };
    let failed = error.downcast_ref::<Box<SpawnError>>();
    let report = Report {
        text: format!("{error:#}"),
        wrong_input: matches!(error.downcast_ref(), Some(Error::Input(_))),
        failure: failed.map(|error| failure(error)),
    };
    match report.leave(parent, launch.restart_count, launch.processes.index) {
        Ok(()) => error.context(AlreadyReported),
        Err(_) => error,
    }
}
