//! This process's part in a run: its ranks, and the other processes.

use std::env::var_os;
use std::sync::Arc;

use super::{launch, place_launched};
use crate::config::Config;
use crate::error::Result;
use crate::launch::{Launch, Placement, Spawn, World, write_error_file};
use crate::observe::Printer;
use crate::torch::cuda::Cuda;

/// How this process was started, where its ranks run, and who else is there.
#[derive(Debug)]
pub(super) struct Launched {
    pub launch: Launch,
    pub placement: Placement,
    pub world: Option<Arc<World>>,
}

impl Launched {
    /// Meets the other processes of the run, if there are any.
    pub(super) fn meet(config: &Config, launch: Launch, cuda: &Cuda) -> Result<Self> {
        let placement = place_launched(config, &launch, cuda)?;
        let interfaces = var_os("GLOO_SOCKET_IFNAME").map(|it| it.to_string_lossy().into_owned());
        let world = World::meet(&launch, &placement, config.timeout, interfaces)?.map(Arc::new);
        // Goes with the process: to stop the server would take half a second.
        std::mem::forget(world.clone());
        Ok(Self { launch, placement, world })
    }

    /// How many ranks there are in all processes.
    pub(super) fn world_size(&self) -> usize {
        self.world.as_ref().map_or(self.placement.devices.len(), |world| world.world_size())
    }

    /// On how many machines.
    pub(super) fn nnodes(&self) -> usize {
        self.world.as_ref().map_or(1, |world| world.nnodes())
    }

    /// Whether this is the process of rank 0, which speaks for all.
    pub(super) fn is_first(&self) -> bool {
        self.world.as_ref().is_none_or(|world| world.is_first())
    }

    /// The ranks of this process, as `config` says.
    pub(super) fn spawn(&self, config: &Config) -> Spawn {
        // What fails once is to go well after a restart.
        let fault = config.fault.filter(|_| self.launch.restart_count == 0);
        Spawn::at(&self.placement)
            .world(self.world.clone())
            .timeout(config.timeout)
            .grace_period(config.grace_period)
            .check_collectives(config.check_collectives)
            .fault(fault)
    }
}

/// Runs `work` in this process of a launch; its error is left where the launcher looks for it.
pub(super) fn run_launched<T>(
    config: &Config,
    cuda: &Cuda,
    printer: &Printer,
    work: impl FnOnce(Launch) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let launch = launch(&config.launch_options(), cuda)?;
    let error_file = launch.error_file.clone();
    let result = work(launch);
    if let (Err(error), Some(file)) = (&result, error_file)
        && let Err(unwritable) = write_error_file(&file, &format!("{error:#}"))
    {
        printer.note(&format!("{} cannot be written: {unwritable}", file.display()));
    }
    result
}
