//! The launch of a configuration: how this process joins it, and how it starts its ranks.

use std::sync::Arc;

use super::checked_placement::place_threads;
use crate::config::Config;
use engine::error::Result;
use engine::ffi::cuda::Cuda;
use engine::launch::{JoinLaunchOptions, JoinedLaunch, Launch, Spawn};
use views::Printer;

/// Joins the launch, with a rendezvous if there are other processes. All must run the same `command`.
pub(crate) fn join_launch(
    config: &Config,
    command: &str,
    launch: Launch,
    cuda: &Cuda,
    printer: &Printer,
) -> Result<JoinedLaunch> {
    // Before the rendezvous: other processes need not wait for one whose input does not fit this machine.
    place_threads(config, &launch, cuda)?;
    let mut shared_options = vec![("the command".into(), command.into())];
    shared_options.extend(config.shared_options()?);
    let options = JoinLaunchOptions {
        backend: config.launch.backend,
        timeout: config.launch.timeout,
        grace_period: config.launch.grace_period,
        shared_options,
        compare_clocks: config.output.trace.is_some() || config.output.report.is_some(),
    };
    launch.warning().iter().for_each(|text| printer.info(text));
    let joined_launch = launch.join(cuda, options)?;
    joined_launch.stay_connected();
    Ok(joined_launch)
}

/// Returns how to start the ranks of this process.
pub(crate) fn configured_spawn(
    joined_launch: &JoinedLaunch,
    config: &Config,
    printer: &Arc<Printer>,
) -> Spawn {
    // A fault is injected once, not again after a restart.
    let fault = config.launch.inject_fault.clone();
    let fault = fault.filter(|_| joined_launch.launch.restart_count == 0);
    configure(joined_launch.spawn(), config, printer).fault(fault)
}

/// Sets all that `config` says about how ranks run.
pub(crate) fn configure(spawn: Spawn, config: &Config, printer: &Arc<Printer>) -> Spawn {
    spawn
        .bind(config.launch.bind)
        .timeout(config.launch.timeout)
        .grace_period(config.launch.grace_period)
        .stall_warning(config.launch.stall_warning)
        .observe(printer.clone())
        .check_collectives(config.ddp.check_collectives)
        .fault(config.launch.inject_fault.clone())
}
