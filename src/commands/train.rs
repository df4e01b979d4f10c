//! `ddp-mp train`: starts the ranks, and trains on each.

mod summary;

use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::Context;
use tch::Device;

use super::checkpoints::{self, StartPoint};
use super::explain::narrator;
use super::run_artifacts::RunArtifacts;
use super::session::{self, run_launched};
use crate::checkpoint::Checkpoint;
use crate::config::{Config, Data, StrategyKind};
use crate::data::{DataLoader, Dataset, DistributedSampler, Loader, ScatterLoader};
use crate::ddp::{DataParallel, DistributedDataParallel, Strategy, parameters_hash};
use crate::error::{Error, Result};
use crate::ffi::Generator;
use crate::ffi::cuda::Cuda;
use crate::launch::{
    Launch, LaunchKind, Launched, Rank, Restarts, SpawnError, Stop, StopReason, await_termination,
    end_at_signals_in, status_signal, stop_on_signals,
};
use crate::models::Model;
use crate::optim::{Optimizer, Schedule};
use crate::process_group::ProcessGroup;
use crate::telemetry::report::Outcome;
use crate::telemetry::{End, Event, Failure, LogFormat, MetricsLogger, Printer, Start};
use crate::trainer::Trainer;

/// How long to wait for torchrun's agent to stop us after a membership change. If we exit first, the agent counts it
/// as a failure and uses up a restart. Agents poll as rarely as every 5 s.
const AGENT_POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The state that all ranks of this process share.
struct Job {
    config: Config,
    launched: Launched,
    data: Data,
    /// The metrics logger, which rank 0 takes. `None` in a process without rank 0.
    recorder: Mutex<Option<MetricsLogger>>,
    records: bool,
    printer: Arc<Printer>,
    origin: StartPoint,
    stop: Arc<Stop>,
    /// The reason why the run ended before its last epoch, if it did.
    stopped: OnceLock<StopReason>,
    /// The earlier starts of this run.
    restarts: Restarts,
    seen: RunArtifacts,
}

/// Trains as `config` says, until all ranks finish. Returns `Some(reason)` if training stopped early.
///
/// # Errors
/// [`Error::Input`](crate::Error::Input) when `config` can't run here, and [`SpawnError`] when a rank failed.
pub fn train(
    config: Config,
    cuda: &Cuda,
    printer: &Arc<Printer>,
) -> anyhow::Result<Option<StopReason>> {
    let work = |launch| train_in(config.clone(), launch, cuda, printer);
    run_launched(&config, cuda, printer, true, work)
}

/// Trains the ranks of this process.
fn train_in(
    config: Config,
    launch: Launch,
    cuda: &Cuda,
    printer: &Arc<Printer>,
) -> anyhow::Result<Option<StopReason>> {
    let to_tell = printer.clone();
    let restarts = Restarts::before(&launch)?;
    let config = checkpoints::after_restart(config, &restarts, printer)?;
    let time = config.max_seconds.map(|time| time.saturating_sub(restarts.elapsed));
    let stop = Stop::new(time).on_stop(move |reason| {
        if reason == StopReason::Interrupt {
            to_tell.info("stopping after this step; Ctrl-C again ends the process at once");
        }
    });
    let stop = Arc::new(stop);
    stop_on_signals(&stop).context("watching for signals")?;
    let asks = status_signal().context("watching for signals")?;
    let (config, data) = with_data(config)?;
    // The processes of `--spawn=processes` start together, so none waits long for another.
    let may_wait = launch.master.is_some() && launch.kind != LaunchKind::Spawned;
    let meet = || session::join(&config, "train", launch, cuda, printer);
    let launched =
        if may_wait { end_at_signals_in(&stop, meet)?.transpose()? } else { Some(meet()?) };
    let Some(launched) = launched else { return Ok(stop.asked_for()) };
    let world_size = launched.world_size();
    launched.before_ranks(|| config.validate_for(world_size))?;
    let seen = launched.before_ranks(|| RunArtifacts::new(&config, &launched))?;
    let (mut recorder, mut origin) = (None, StartPoint::default());
    if launched.is_first() {
        for note in launched.notes().iter().chain(&data.notes) {
            printer.info(note);
        }
        if let (_, Some(note)) = config.lr_for(world_size) {
            printer.info(&note);
        }
        if let Some(note) = config.no_effect_warning(config.steps(world_size)) {
            printer.info(&note);
        }
        let (tensorboard, metrics) = (config.tensorboard.as_deref(), config.metrics.as_deref());
        (recorder, origin) = launched.before_ranks(|| {
            MetricsLogger::check(metrics)?; // before any file is created
            let origin = StartPoint::of(&config, world_size, printer)?;
            let recorder = MetricsLogger::new(printer, tensorboard, metrics)?.curves(seen.curves());
            if origin.checkpoint_dir.is_some() {
                Restarts::note_saving(&launched.launch)?;
            }
            origin.make_room(printer)?;
            Ok((Some(recorder), origin))
        })?;
    }
    let records = recorder.as_ref().is_some_and(MetricsLogger::is_wanted);
    let recorder = Mutex::new(recorder);
    let spawn =
        session::spawn(&launched, &config, printer).dump_status_on(asks).history(seen.history());
    let spawn = spawn.stop(stop.clone());
    let (printer, stopped) = (printer.clone(), OnceLock::new());
    let job = Arc::new(Job {
        config,
        launched,
        data,
        recorder,
        records,
        printer,
        origin,
        stop,
        stopped,
        restarts,
        seen,
    });

    let of_ranks = job.clone();
    let result = spawn.run(move |rank| train_on(rank, &of_ranks));
    let printer = &job.printer;
    printer.end_progress();
    if let Err(error) = &result {
        let told = printer.flush_epochs().and_then(|()| match job.launched.launch.parent {
            Some(_) => Ok(()), // the parent process prints it
            None => printer.event(&Event::Failure(failure(error))),
        });
        if let Err(unwritable) = told {
            printer.info(&format!("writing to stdout: {unwritable}"));
        }
    }
    let Job { seen, config, launched, data, .. } = &*job;
    let outcome = outcome(&result, job.stopped.get().copied(), &job.restarts.reasons);
    let written = seen.write(config, launched, data, outcome, printer);
    if let (Err(unwritable), true) = (&written, result.is_err()) {
        printer.info(&unwritable.to_string());
    }
    result?;
    written?;
    let stopped = job.stopped.get().copied();
    if stopped == Some(StopReason::Terminate) && job.launched.launch.has_agent {
        let grace_period = job.config.grace_period.min(AGENT_POLL_INTERVAL);
        await_termination(&job.stop, grace_period).context("watching for signals")?;
    }
    Ok(stopped)
}

/// Trains on one rank.
fn train_on(rank: &Rank, job: &Job) -> anyhow::Result<()> {
    let config = &job.config;
    let group = rank.init_process_group(job.launched.placement.backend)?;
    let start_from = StartFrom::agreed(job, &group)?;

    let Training { ddp, optimizer, schedule, generator, loader, built } =
        Training::new(rank, &group, config, &job.data.training, &job.origin)?;
    if rank.rank() == 0 {
        tell_start(job, ddp.num_parameters())?;
    }
    let mut trainer = Trainer::new(ddp, optimizer, schedule, loader, config.loss)?
        .generator(generator)
        .max_grad_norm(config.max_grad_norm)
        .accumulate(config.grad_accum_steps as usize)
        .exact_mean(config.exact_mean)?
        .amp(config.amp)?
        .skip_nonfinite(config.skip_nonfinite)?
        .check_replicas(config.check_replicas_every)?
        .max_steps(config.max_steps)
        .patience(config.patience)
        .stop(job.stop.clone());
    if start_from.records {
        let mut recorder = job.recorder.lock().unwrap_or_else(PoisonError::into_inner);
        let recorder = if rank.rank() == 0 { recorder.take() } else { None };
        trainer = trainer.record(config.log_every(), recorder);
    }
    if let Some(built) = built {
        let Job { launched, data, printer, .. } = job;
        let parameters = trainer.ddp().num_parameters();
        let narrator = || narrator(config, launched, data.training.len(), parameters, printer);
        trainer = trainer.explain(built, (rank.rank() == 0).then(narrator))?;
    }
    if let Some(validation) = &job.data.validation {
        let sampler = DistributedSampler::new(validation.len(), rank.world_size(), rank.rank())?;
        let (batch_size, device) = (config.batch_size, rank.device());
        let loader = DataLoader::new(validation.clone(), sampler.uneven(), batch_size, device)?;
        trainer = trainer.validation(loader.pin_memory(&group)?, config.val_every);
    }
    if config.checkpoint_dir.is_some() {
        let dir = job.origin.checkpoint_dir.clone();
        trainer = trainer.checkpoints(dir, config.save_every(), config.options()?);
    }
    if let Some(checkpoint) = &start_from.checkpoint {
        trainer.resume(checkpoint)?;
    }
    if rank.rank() == 0 {
        job.seen.model(config, trainer.ddp(), trainer.state());
    }
    let summary = trainer.train(config.max_epochs, |epoch| {
        job.printer.epoch(epoch, group.local_world_size()).context("writing to stdout")
    })?;

    group.barrier()?;
    let (end, replicas_equal) = summary::end(&trainer, &summary, job, &group)?;
    if let Some(end) = end {
        // A run that fails prints only its numbers.
        let text = job.printer.format() == LogFormat::Text && replicas_equal;
        if config.strategy == StrategyKind::Dp
            && text
            && let Some(lesson) = through_rank_0(&end)
        {
            job.printer.info(&lesson);
        }
        job.printer.event(&Event::End(Box::new(end))).context("writing to stdout")?;
        let dir = job.origin.checkpoint_dir.as_ref();
        if let Some(best) = &trainer.state().best
            && text
        {
            job.printer.info(&checkpoints::best(best, dir));
        }
        if let Some(reason) = summary.stopped
            && replicas_equal
        {
            job.printer.info(&checkpoints::stopped(reason, trainer.state(), dir));
        }
    }
    if let Some(reason) = summary.stopped {
        job.stopped.get_or_init(|| reason);
    }
    if replicas_equal { Ok(()) } else { Ok(summary::refuse_different_replicas(&trainer, job)?) }
}

/// The starting point, which rank 0's process reads and all ranks need.
struct StartFrom {
    checkpoint: Option<Arc<Checkpoint>>,
    /// Whether the run records metrics, which all ranks reduce.
    records: bool,
}

impl StartFrom {
    /// Returns the starting point on every rank. With several processes, rank 0 broadcasts it: a collective.
    fn agreed(job: &Job, group: &ProcessGroup) -> Result<Self> {
        let mut start = Self { checkpoint: job.origin.checkpoint.clone(), records: job.records };
        if group.spans_processes() {
            let mut records = vec![start.records];
            group.broadcast_object_list(&mut records, 0)?;
            start.records = records == [true];
            let received = Checkpoint::broadcast(start.checkpoint.as_deref(), group)?;
            // Ranks in rank 0's process share its copy.
            start.checkpoint = start.checkpoint.or(received.map(Arc::new));
        }
        Ok(start)
    }
}

/// The objects that one rank trains with.
pub(super) struct Training {
    pub ddp: Strategy<Model>,
    /// `None` on a rank that makes no step.
    pub optimizer: Option<Box<dyn Optimizer>>,
    pub schedule: Schedule,
    /// The random generator of the model.
    pub generator: Arc<Generator>,
    pub loader: Loader,
    /// A 64-bit hash of this rank's parameters before it got rank 0's. `None` without `--explain`.
    pub built: Option<u64>,
}

impl Training {
    /// Builds these objects on this rank, as `config` says. A collective.
    pub(super) fn new(
        rank: &Rank,
        group: &Rc<ProcessGroup>,
        config: &Config,
        dataset: &Arc<dyn Dataset>,
        origin: &StartPoint,
    ) -> anyhow::Result<Self> {
        let loader = |of_rank| -> Result<DataLoader> {
            let sampler = config.sampler(dataset.len(), rank.world_size(), of_rank)?;
            let loader =
                DataLoader::new(dataset.clone(), sampler, config.batch_size, rank.device())?;
            loader
                .drop_last(config.drop_last_batch)
                .in_step(config.exact_mean)
                .num_workers(config.num_workers, config.prefetch_factor, group)
                .pin_memory(group)
        };
        let (vs, mut model) = config.model_config().build(rank.device(), config.seed)?;
        if rank.rank() == 0 {
            origin.load_model(&vs)?;
        }
        let built = config.explain.then(|| parameters_hash(&vs)).transpose()?;
        let generator = Arc::new(Generator::new(rank.device(), config.seed, rank.rank())?);
        model = model.with_generator(&generator);
        if config.sync_batch_norm {
            model = model.convert_sync_batchnorm(group);
        }
        let (ddp, loader): (Strategy<Model>, Loader) = match config.strategy {
            StrategyKind::Ddp => {
                let options = config.ddp_options();
                let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
                if let Some(hook) = config.comm_hook() {
                    ddp.register_comm_hook(hook)?;
                }
                (ddp.into(), loader(rank.rank())?.into())
            }
            StrategyKind::Dp => {
                let dp = DataParallel::new(model, &vs, group.clone())?;
                let of_ranks = if rank.rank() == 0 { 0..rank.world_size() } else { 0..0 };
                let loaders = of_ranks.map(loader).collect::<Result<_>>()?;
                (dp.into(), ScatterLoader::new(loaders, group.clone())?.into())
            }
        };
        let build = |buffers| config.optimizer_config().build(buffers);
        let optimizer = ddp.flat_buffers().map(build).transpose()?;
        let schedule = config.schedule_for(rank.world_size());
        Ok(Self { ddp, optimizer, schedule, generator, loader, built })
    }
}

/// Opens the data of `config`. Returns it, and the configuration with its sizes.
pub(super) fn with_data(config: Config) -> Result<(Config, Data)> {
    // Threads that libtorch starts here would be idle later: the ranks have their own.
    tch::set_num_threads(1);
    let seed = data_seed(config.seed);
    let (config, data) = config.open_data(seed)?;
    if config.patience.is_some() && data.validation.is_none() {
        return Err(Error::Input(
            "--patience: there are no validation samples; hold some back with --val-fraction"
                .into(),
        ));
    }
    Ok((config, data))
}

/// Returns the seed of the data. It differs from the model's seed, so that both do not get the same numbers.
fn data_seed(seed: u64) -> u64 {
    seed.wrapping_add(1)
}

/// Returns a note on the bytes that went through rank 0 with `--strategy dp`. `None` if there are no other ranks.
fn through_rank_0(end: &End) -> Option<String> {
    let [sent, others_sent @ ..] = &end.bytes_sent_by_rank[..] else { return None };
    let [received, others_received @ ..] = &end.bytes_received_by_rank[..] else { return None };
    let kb = |bytes: &u64| (bytes + 500) / 1000;
    Some(format!(
        "all went through rank 0, which sent {} kB and received {} kB; any other rank {} and {}",
        kb(sent),
        kb(received),
        others_sent.iter().max().map(kb)?,
        others_received.iter().max().map(kb)?
    ))
}

/// Returns how the run ended, for its report.
fn outcome<T>(
    result: &Result<T, Box<SpawnError>>,
    stopped: Option<StopReason>,
    restarts: &[String],
) -> Outcome {
    let (kind, mut text) = match (result, stopped) {
        (Err(error), _) => ("failed", error.to_string()),
        (Ok(_), Some(reason)) => ("stopped", format!("stopped by {}", reason.name())),
        (Ok(_), None) => ("done", "done".into()),
    };
    for (number, reason) in (1..).zip(restarts) {
        text += &format!("; restart {number} was needed: {reason}");
    }
    Outcome { kind, text }
}

/// Prints that the run has started: as text once, as JSON also after each restart.
fn tell_start(job: &Job, parameters: usize) -> anyhow::Result<()> {
    if job.printer.format() == LogFormat::Json || !job.restarts.started {
        let start = start(job, parameters);
        job.printer.event(&Event::Start(start)).context("writing to stdout")?;
        Restarts::note_started(&job.launched.launch)?;
    }
    Ok(())
}

fn start(job: &Job, parameters: usize) -> Start {
    let placement = &job.launched.placement;
    let on_gpus = matches!(placement.devices[0], Device::Cuda(_));
    Start {
        world_size: job.launched.world_size(),
        nnodes: job.launched.nnodes(),
        backend: placement.backend.name(),
        device: if on_gpus { "GPU" } else { "CPU" },
        model: job.config.model.name(),
        parameters,
        restart: job.launched.launch.restart_count,
        gpu_count: placement.gpu_count,
    }
}

pub(super) fn failure(error: &SpawnError) -> Failure {
    let failure = &error.failure;
    Failure {
        rank: failure.tied.is_empty().then_some(failure.rank),
        ranks: failure.tied.iter().map(|(rank, _)| *rank).collect(),
        device: Some(match &failure.tied[..] {
            [] => failure.device.clone(),
            tied => tied.iter().map(|(_, device)| &device[..]).collect::<Vec<_>>().join(", "),
        }),
        operation: Some(failure.at.operation.to_string()),
        sequence: Some(failure.at.sequence),
        error: failure.error.clone(),
        ..Failure::default()
    }
}
