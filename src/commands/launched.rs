//! This process's part in a run: its ranks, and the other processes.

use std::convert::Infallible;
use std::env::var_os;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam::channel::{RecvTimeoutError, bounded};

use super::processes::{leave_error, run_processes, starts_processes};
use super::{launch, place_launched};
use crate::config::Config;
use crate::error::Result;
use crate::launch::{Launch, LaunchKind, Placement, Spawn, StopReason, World, write_error_file};
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
    /// Meets the other processes of the run, if there are any. They must be at the same `command`.
    pub(super) fn meet(
        config: &Config,
        command: &str,
        launch: Launch,
        cuda: &Cuda,
        printer: &Printer,
    ) -> Result<Self> {
        let mut placement = place_launched(config, &launch, cuda)?;
        if launch.kind == LaunchKind::Spawned {
            placement.note = None; // who has started it has said so of all ranks
        }
        if let Some(warning) = World::warning(&launch) {
            printer.note(&warning);
        }
        let interfaces = var_os("GLOO_SOCKET_IFNAME").map(|it| it.to_string_lossy().into_owned());
        let mut options = vec![("the command".into(), command.into())];
        options.extend(config.shared_options()?);
        let traces = config.trace.is_some() || config.report.is_some();
        let meet = || match World::meet(&launch, &placement, config.timeout, interfaces, options)? {
            Some(world) if traces => world.compare_clocks(config.timeout).map(Some),
            world => Ok(world),
        };
        let world = telling_of_a_wait(&launch, printer, meet)?.map(Arc::new);
        // Goes with the process: to stop the server would take half a second.
        std::mem::forget(world.clone());
        let launched = Self { launch, placement, world };
        let check = || launched.world.as_ref().map_or(Ok(()), |world| world.check_interfaces());
        launched.before_ranks(config, check)?;
        Ok(launched)
    }

    /// This process's number, and how many there are.
    pub(super) fn process(&self) -> [usize; 2] {
        self.world.as_ref().map_or([0, 1], |world| [world.process(), world.num_processes()])
    }

    /// How many ranks there are in all processes.
    pub(super) fn world_size(&self) -> usize {
        self.world.as_ref().map_or(self.placement.devices.len(), |world| world.world_size())
    }

    /// How many ranks and processes there are, if this is one of several that were started one by one.
    pub(super) fn note(&self) -> Option<String> {
        let world = self.world.as_ref().filter(|_| !self.is_spawned())?;
        let (ranks, processes) = (world.world_size(), world.num_processes());
        Some(format!("{ranks} ranks in {processes} processes"))
    }

    /// On how many machines.
    pub(super) fn nnodes(&self) -> usize {
        self.world.as_ref().map_or(1, |world| world.nnodes())
    }

    /// Whether `--spawn=processes` has started it.
    pub(super) fn is_spawned(&self) -> bool {
        self.launch.kind == LaunchKind::Spawned
    }

    /// Whether this is the process of rank 0, which speaks for all.
    pub(super) fn is_first(&self) -> bool {
        self.world.as_ref().is_none_or(|world| world.is_first())
    }

    /// What this process does before its ranks begin; if it fails, the others are told. Not of a process that
    /// `--spawn=processes` has started: who has started it tells them that it has ended.
    pub(super) fn before_ranks<T>(
        &self,
        config: &Config,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        match self.world.as_ref().filter(|_| !self.is_spawned()) {
            Some(world) => world.before_ranks(config.grace_period, work),
            None => work(),
        }
    }

    /// The ranks of this process, as `config` says.
    pub(super) fn spawn(&self, config: &Config, printer: &Arc<Printer>) -> Spawn {
        let printer = printer.clone();
        // What fails once is to go well after a restart.
        let fault = config.fault.filter(|_| self.launch.restart_count == 0);
        Spawn::at(&self.placement)
            .world(self.world.clone())
            .timeout(config.timeout)
            .grace_period(config.grace_period)
            .stall_warning(config.stall_warning, move |text| printer.note(text))
            .check_collectives(config.check_collectives)
            .fault(fault)
    }
}

/// Does `meet`, and tells if it takes long whom it waits for.
fn telling_of_a_wait<T>(launch: &Launch, printer: &Printer, meet: impl FnOnce() -> T) -> T {
    let Some(master) = &launch.master else { return meet() };
    let (met, meeting) = bounded::<Infallible>(0);
    let wait = || {
        if meeting.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            let (processes, addr, port) = (&launch.processes, &master.addr, master.port);
            printer.note(&format!(
                "process {} of {} (from 0) still waits for the others to come to {addr}:{port}; Ctrl-C gives up",
                processes.index, processes.count
            ));
        }
    };
    thread::scope(|scope| {
        scope.spawn(wait);
        let result = meet();
        drop(met);
        result
    })
}

/// How long others may take to come before somebody wonders.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs `work` in this process of a launch, or in processes that it starts; its error is left where the launcher looks for
/// it. `stops`: whether `work` stops at a signal, and saves.
pub(super) fn run_launched(
    config: &Config,
    cuda: &Cuda,
    printer: &Printer,
    stops: bool,
    work: impl FnOnce(Launch) -> anyhow::Result<Option<StopReason>>,
) -> anyhow::Result<Option<StopReason>> {
    let launch = launch(&config.launch_options(), cuda)?;
    if starts_processes(config, &launch) {
        return run_processes(config, &launch, cuda, printer, stops);
    }
    let Launch { error_file, parent, processes, .. } = launch.clone();
    let result = work(launch);
    if let (Err(error), Some(file)) = (&result, error_file)
        && let Err(unwritable) = write_error_file(&file, &format!("{error:#}"))
    {
        printer.note(&format!("{} cannot be written: {unwritable}", file.display()));
    }
    result.map_err(|error| leave_error(parent.as_ref(), processes.index, error))
}
