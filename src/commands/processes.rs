//! `--spawn=processes`: what the process does that starts the ranks, and what theirs leave for it.

use std::fmt;

use anyhow::Context;

use super::cores;
use super::train::failure;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::launch::{
    Ended, Launch, LaunchKind, Master, Placement, Report, SpawnChoice, SpawnError, SpawnProcesses,
    StopReason, place,
};
use crate::observe::{Event, LogFormat, Printer};
use crate::torch::cuda::Cuda;

/// Whether this process is to start others.
pub(super) fn starts_processes(config: &Config, launch: &Launch) -> bool {
    config.spawn == SpawnChoice::Processes && launch.kind != LaunchKind::Spawned
}

/// Where the ranks run that are processes each.
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
    placement.in_processes(count, config.backend)
}

/// Runs this very command in a process for each rank. `stops`: whether it stops at a signal, and saves.
pub(super) fn run_processes(
    config: &Config,
    launch: &Launch,
    cuda: &Cuda,
    printer: &Printer,
    stops: bool,
) -> anyhow::Result<Option<StopReason>> {
    let placement = place_processes(config, launch, cuda)?;
    if let Some(note) = &placement.note {
        printer.note(note);
    }
    let Config { timeout, grace_period, .. } = *config;
    let spawn = SpawnProcesses { placement: &placement, timeout, grace_period, stops };
    let Report { text, wrong_input, failure } = match spawn.run()? {
        Ended::Well(reason) => return Ok(reason),
        Ended::Badly(report) => report,
    };
    if let Some(failure) = failure
        && stops
        && printer.format() == LogFormat::Json
    {
        printer.event(&Event::Failure(failure)).context("writing to stdout")?;
    }
    Err(if wrong_input { Error::Input(text).into() } else { anyhow::Error::msg(text) })
}

/// Says of an error that the user is told already, or will be by somebody else.
#[derive(Debug)]
pub struct Told;

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("told by the process that has started this one")
    }
}

/// Leaves `error` with the process that has started this one, if that is so; otherwise it is for the user.
pub(super) fn leave_error(
    parent: Option<&Master>,
    rank: usize,
    error: anyhow::Error,
) -> anyhow::Error {
    let Some(parent) = parent else { return error };
    let failed = error.downcast_ref::<Box<SpawnError>>();
    let report = Report {
        text: format!("{error:#}"),
        wrong_input: matches!(error.downcast_ref(), Some(Error::Input(_))),
        failure: failed.map(|error| failure(error)),
    };
    match report.leave(parent, rank) {
        Ok(()) => error.context(Told),
        Err(_) => error,
    }
}
