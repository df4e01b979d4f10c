//! What commands share: joining the launch, the data, where a run starts, its views, and its summary.
//!
//! [`Session`] is a run of training in one process, from joining the launch to the end of its views.

mod checked_placement;
mod configured_launch;
mod data;
mod data_parallel;
mod end_messages;
mod processes;
mod report_facts;
mod resume_checks;
mod run_views;
mod start_point;
mod summary;
mod training;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use crossbeam::channel::Receiver;
use tch::Device;

use crate::config::{Config, Data};
use end_messages::outcome;
use engine::error::{Error, Result};
use engine::events::{Event, Observers, Start};
use engine::ffi::cuda::Cuda;
use engine::launch::{
    FaultKind, JoinedLaunch, Launch, LaunchKind, Restarts, Spawn, SpawnError, StopReason,
    StopRequest, await_termination, end_at_signals_in, status_signal, stop_on_signals,
};
use engine::os::terminal::screen_problem;
use run_views::{Opening, Views, check_kept};
use views::Printer;

pub(crate) use checked_placement::{check_shared_model, place_all, place_ranks, refuse_launcher};
pub(crate) use configured_launch::{configure, configured_spawn, join_launch};
pub(crate) use data::open_data;
pub use processes::AlreadyReported;
pub(crate) use processes::run_command;
pub(crate) use report_facts::path_in_shell;
pub(crate) use run_views::remove_kept;
pub(crate) use start_point::{StartPoint, after_restart};
pub(crate) use summary::{refuse_different_replicas, show_end};
pub(crate) use training::Training;

/// How long to wait for torchrun's agent to stop us after a membership change. If we exit first, the agent counts it
/// as a failure and uses up a restart. Agents poll as rarely as every 5 s.
const AGENT_POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The requests to a run in this process. All its starts here share them, because signals are handled once.
pub(crate) struct Requests {
    /// The request to stop: by a signal, or at the end of the time.
    pub stop: Arc<StopRequest>,
    /// The requests to print what the ranks are doing.
    status: Receiver<()>,
}

/// Handles the signals to a run of `config`. Its earlier starts have used a part of its time.
pub(crate) fn handle_signals(
    config: &Config,
    launch: &Launch,
    restarts: &Restarts,
    printer: &Arc<Printer>,
) -> anyhow::Result<Requests> {
    let printer = printer.clone();
    let time = config.training.max_seconds.map(|time| time.saturating_sub(restarts.elapsed));
    let grace_period = config.launch.grace_period;
    let is_first_here = launch.processes.local_index == 0;
    let stop = StopRequest::new(time).on_stop(move |reason| match reason {
        _ if reason.is_signal() && is_first_here => printer.info(&format!(
            "{}: stopping after this step; a second signal ends the process at once; if no rank makes progress for \
             {grace_period:?} (--grace-period), the run ends",
            reason.name()
        )),
        StopReason::Key => printer.info("stopping after this step"),
        _ => {}
    });
    let stop = Arc::new(stop);
    let watching = "watching for signals";
    stop_on_signals(&stop).context(watching)?;
    Ok(Requests { stop, status: status_signal().context(watching)? })
}

/// A run of training in this process: the state that its ranks share.
pub(crate) struct Session {
    pub config: Config,
    pub joined_launch: JoinedLaunch,
    pub data: Data,
    /// Where the run starts. Empty in a process without rank 0.
    pub start_point: StartPoint,
    views: Views,
    /// The printer and the views.
    pub observers: Observers,
    pub stop: Arc<StopRequest>,
    /// The earlier starts of this run.
    pub restarts: Restarts,
    pub printer: Arc<Printer>,
    /// The requests to print what the ranks are doing.
    status_requests: Receiver<()>,
    /// The reason why the run ended before its last epoch, if it did.
    stopped: OnceLock<StopReason>,
}

impl Session {
    /// Opens the data, joins the launch, and prepares what the ranks need. `None` if a signal has ended the wait for
    /// the other processes.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) when `config` can't run here.
    pub(crate) fn join(
        config: Config,
        launch: Launch,
        restarts: Restarts,
        requests: &Requests,
        cuda: &Cuda,
        printer: &Arc<Printer>,
    ) -> anyhow::Result<Option<Self>> {
        let Requests { stop, status } = requests;
        let (config, data) = open_data(config)?;
        let joined_launch = join_unless_stopped(&config, launch, stop, cuda, printer)?;
        let Some(joined_launch) = joined_launch else { return Ok(None) };
        joined_launch.before_ranks(|| config.validate_for(joined_launch.world_size()))?;
        joined_launch.before_ranks(|| check_simulated_network(&config, &joined_launch))?;
        // Before any file is made: a checkpoint may be refused.
        let mut start_point = if joined_launch.is_first() {
            joined_launch
                .before_ranks(|| StartPoint::read(&config, joined_launch.world_size(), printer))?
        } else {
            StartPoint::default()
        };
        let views = joined_launch.before_ranks(|| {
            open_views(&config, &joined_launch, &data, &mut start_point, stop, printer)
        })?;
        let session = Self {
            observers: views.observers(printer),
            views,
            config,
            joined_launch,
            data,
            start_point,
            stop: stop.clone(),
            restarts,
            printer: printer.clone(),
            status_requests: status.clone(),
            stopped: OnceLock::new(),
        };
        if session.joined_launch.is_first() {
            session.print_notes();
            session.joined_launch.before_ranks(|| session.claim_folder())?;
        }
        Ok(Some(session))
    }

    fn print_notes(&self) {
        let Self { config, joined_launch, data, printer, .. } = self;
        let world_size = joined_launch.world_size();
        let (_, lr_note) = config.lr_for(world_size);
        let notes = joined_launch.notes().into_iter().chain(data.notes.iter().cloned());
        let schedule_note = config.schedule_note(world_size);
        let ranks_here = joined_launch.placement.devices.len();
        if let Some(fault) = &config.launch.inject_fault
            && fault.kind == FaultKind::Kill
            && ranks_here > 1
            && joined_launch.launch.restart_count == 0
        {
            printer.info(&format!(
                "--inject-fault {fault} ends all {ranks_here} ranks of the process of rank {} without a report, because \
                 they are its threads; with --spawn=processes it ends one rank, and the others report it",
                fault.rank
            ));
        }
        let live_note = screen_problem().filter(|_| config.output.live);
        if let Some(problem) = live_note {
            printer.report(&format!("--live: {problem}, so there is no live view"));
        }
        let cluster = config.ddp.simulate_cluster.as_ref();
        let simulated = cluster.and_then(|cluster| cluster.note_for(world_size).ok());
        let notes = notes.chain(lr_note).chain(simulated).chain(schedule_note);
        notes.for_each(|note| printer.info(&note));
    }

    /// Renames newer checkpoints in the folder to save in, if there is one. Nothing can be refused any more.
    fn claim_folder(&self) -> Result<()> {
        if self.start_point.checkpoint_dir.is_some() {
            Restarts::note(&self.joined_launch.launch, Restarts::SAVES)?;
        }
        self.start_point.make_room(&self.printer)
    }

    /// Returns how to start the ranks of this process.
    pub(crate) fn spawn(&self) -> Spawn {
        let spawn = configured_spawn(&self.joined_launch, &self.config, &self.printer);
        let spawn = match &self.config.ddp.simulate_cluster {
            Some(cluster) => spawn.simulate_cluster(cluster.clone()),
            None => spawn,
        };
        spawn
            .dump_status_on(self.status_requests.clone())
            .stop_request(self.stop.clone())
            .observers(self.observers.clone())
    }

    /// Tells that the run has started.
    pub(crate) fn tell_start(&self, parameters: usize) -> anyhow::Result<()> {
        let JoinedLaunch { placement, launch, .. } = &self.joined_launch;
        let on_gpus = matches!(placement.devices[0], Device::Cuda(_));
        let start = Start {
            world_size: self.joined_launch.world_size(),
            nnodes: self.joined_launch.nnodes(),
            backend: placement.backend.name(),
            device: if on_gpus { "GPU" } else { "CPU" },
            model: self.config.model_name(),
            parameters,
            restart: launch.restart_count,
            gpu_count: placement.gpu_count,
            is_known: self.restarts.started,
        };
        self.observers.tell(&Event::Start(start))?;
        Ok(Restarts::note(launch, Restarts::STARTED)?)
    }

    /// Keeps the reason why training stopped early, if it did. All ranks have the same.
    pub(crate) fn note_stop(&self, reason: Option<StopReason>) {
        if let Some(reason) = reason {
            self.stopped.get_or_init(|| reason);
        }
    }

    /// Reports how the ranks ended, and finishes the views. Returns `Some(reason)` if training stopped
    /// early.
    ///
    /// # Errors
    /// The error of the ranks, and an error for a file that cannot be written.
    pub(crate) fn end<T>(
        &self,
        result: Result<T, Box<SpawnError>>,
    ) -> anyhow::Result<Option<StopReason>> {
        let Self { joined_launch, printer, .. } = self;
        printer.end_progress();
        if let Err(error) = &result {
            let printed = printer.flush_epochs().and_then(|()| match joined_launch.launch.parent {
                // The parent process prints it, unless the run was asked to stop.
                Some(_) if error.stopped.is_none() || !joined_launch.is_first() => Ok(()),
                _ => printer.print(&Event::failure(&error.failure)),
            });
            if let Err(unwritable) = printed {
                printer.report(&unwritable.to_string());
            }
        }
        let stopped = self.stopped.get().copied();
        let outcome = outcome(&result, stopped, &self.restarts.reasons);
        let finished = self.views.finish(outcome);
        if let (Err(unwritable), true) = (&finished, result.is_err()) {
            printer.report(&unwritable.to_string());
        }
        result?;
        finished?;
        if stopped == Some(StopReason::Terminate) && joined_launch.launch.has_agent {
            let grace_period = self.config.launch.grace_period.min(AGENT_POLL_INTERVAL);
            await_termination(&self.stop, grace_period).context("watching for signals")?;
        }
        Ok(stopped)
    }
}

/// Joins the launch. Returns `None` if a signal has ended the wait for the other processes.
fn join_unless_stopped(
    config: &Config,
    launch: Launch,
    stop: &StopRequest,
    cuda: &Cuda,
    printer: &Printer,
) -> anyhow::Result<Option<JoinedLaunch>> {
    // The processes of `--spawn=processes` start together, so none waits long for another.
    let may_wait = launch.master.is_some() && launch.kind != LaunchKind::Spawned;
    let join = || join_launch(config, "train", launch, cuda, printer);
    Ok(if may_wait { end_at_signals_in(stop, join)?.transpose()? } else { Some(join()?) })
}

/// Checks the files of the run, and opens the views and the folder to save in.
fn open_views(
    config: &Config,
    joined_launch: &JoinedLaunch,
    data: &Data,
    start_point: &mut StartPoint,
    stop: &Arc<StopRequest>,
    printer: &Arc<Printer>,
) -> Result<Views> {
    config.check_files(None, joined_launch.process()[1])?;
    check_kept(config, joined_launch)?;
    let is_first = joined_launch.is_first();
    let backend = &backend(config, joined_launch);
    let opening = Opening { config, joined_launch, data, backend, stop, printer };
    let launch = &joined_launch.launch;
    let open_folder = || if is_first { start_point.open_folder(config, launch) } else { Ok(()) };
    Views::open(&opening, open_folder)
}

/// Returns the name of the backend, whether the network is simulated and whether steps are recorded, for the user.
fn backend(config: &Config, joined_launch: &JoinedLaunch) -> String {
    let simulated = if config.ddp.simulate_cluster.is_some() { ", simulated network" } else { "" };
    let recorded = if config.output.record.is_some() { ", steps recorded" } else { "" };
    format!("{}{simulated}{recorded}", joined_launch.placement.backend.name())
}

/// Checks that the cluster of `--simulate-cluster` has the ranks of this run, and that they are on CPUs.
fn check_simulated_network(config: &Config, joined_launch: &JoinedLaunch) -> Result<()> {
    let Some(cluster) = &config.ddp.simulate_cluster else { return Ok(()) };
    if joined_launch.placement.devices[0] != Device::Cpu {
        let problem = "--simulate-cluster: training simulates a network for CPU ranks only; use --nproc-per-node=cpu";
        return Err(Error::usage(problem.into()));
    }
    cluster.note_for(joined_launch.world_size()).map(drop)
}
