//! The part of this process in a run: joining it, and starting its ranks.

use std::sync::Arc;

use super::place_launched;
use super::processes::{leave_error, max_restarts, run_processes, starts_processes};
use crate::config::Config;
use crate::error::Result;
use crate::ffi::cuda::Cuda;
use crate::launch::{Joining, Launch, Launched, Spawn, StopReason};
use crate::telemetry::Printer;

/// Joins the launch, with a rendezvous if there are other processes. All must run the same `command`.
pub(super) fn join(
    config: &Config,
    command: &str,
    launch: Launch,
    cuda: &Cuda,
    printer: &Printer,
) -> Result<Launched> {
    // Before the rendezvous: other processes need not wait for one whose input does not fit this machine.
    place_launched(config, &launch, cuda)?;
    let mut shared_options = vec![("the command".into(), command.into())];
    shared_options.extend(config.shared_options()?);
    let joining = Joining {
        backend: config.backend,
        timeout: config.timeout,
        grace_period: config.grace_period,
        shared_options,
        compare_clocks: config.trace.is_some() || config.report.is_some(),
        note: &|text| printer.info(text),
    };
    let launched = launch.join(cuda, joining)?;
    // Ends with the process: stopping the store's server would take half a second.
    std::mem::forget(launched.world.clone());
    Ok(launched)
}

/// Returns how to start the ranks of this process.
pub(super) fn spawn(launched: &Launched, config: &Config, printer: &Arc<Printer>) -> Spawn {
    let printer = printer.clone();
    // A fault is injected once, not again after a restart.
    let fault = config.inject_fault.filter(|_| launched.launch.restart_count == 0);
    launched
        .spawn()
        .timeout(config.timeout)
        .stall_warning(config.stall_warning, move |text| printer.info(text))
        .check_collectives(config.check_collectives)
        .fault(fault)
}

/// Runs `work` in this process of a launch, or in processes that it starts. Leaves an error where the launcher looks
/// for it. `stops`: whether `work` stops at a signal and saves.
pub(super) fn run_launched(
    config: &Config,
    cuda: &Cuda,
    printer: &Printer,
    stops: bool,
    work: impl FnOnce(Launch) -> anyhow::Result<Option<StopReason>>,
) -> anyhow::Result<Option<StopReason>> {
    let launch = Launch::from_env(&config.launch_options(), cuda)?;
    // For other commands, a file may have `max_restarts` for training.
    let restarts = if stops { max_restarts(config, &launch)? } else { 0 };
    if restarts > 0 || starts_processes(config, &launch) {
        return run_processes(config, &launch, cuda, printer, stops, restarts);
    }
    let result = work(launch.clone());
    if let Err(error) = &result
        && let Err(unwritable) = launch.report_failure(&format!("{error:#}"))
    {
        printer.info(&unwritable);
    }
    result.map_err(|error| leave_error(&launch, error))
}
