//! `ddp-mp bench step`: the time of a training step, and of its parts.

use std::cell::RefCell;
use std::io::{self, Write};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tch::Device;

use super::forecast;
use super::note_if_busy;
use super::sorted::Sorted;
use crate::config::{CommHookKind, Config, StrategyKind};
use crate::session::{self, StartPoint, Training, open_data, run_command};
use engine::data::Dataset;
use engine::error::{Error, counted};
use engine::ffi::cuda::Cuda;
use engine::launch::{Launch, Nproc, Rank};
use engine::operation::Operation;
use engine::process_group::{Backend, ProcessGroup};
use engine::records::PhaseSeconds;
use engine::trainer::{Amp, Callback, Step, TrainContext};
use views::Printer;

/// The times of rank 0, in microseconds: medians over the steps. The parts are the phases that `--report` shows. With a
/// GPU they are the GPU's, and the extra time of the host is in no part.
#[derive(Debug, Serialize)]
pub(super) struct StepTimes {
    pub(super) model: &'static str,
    pub(super) strategy: StrategyKind,
    pub(super) amp: Amp,
    /// Samples per batch on each rank.
    pub(super) batch_size: usize,
    pub(super) world_size: usize,
    pub(super) us_per_step: f64,
    pub(super) us_min: f64,
    pub(super) us_max: f64,
    /// Zeroing the gradients, the model and the loss. With `--strategy dp`, also getting the batch from rank 0.
    pub(super) forward_us: f64,
    /// Autograd alone.
    pub(super) backward_us: f64,
    /// All collectives, which average the gradients, and waiting for the other ranks.
    pub(super) communication_us: f64,
    pub(super) optimizer_us: f64,
    /// The bytes of each bucket of gradients.
    pub(super) bucket_bytes: Vec<usize>,
    /// The time in backward when each bucket is complete.
    pub(super) bucket_complete_us: Vec<f64>,
    /// Whether buckets are reduced during backward.
    #[serde(skip)]
    pub(super) overlaps: bool,
}

impl StepTimes {
    /// Returns the medians of `steps`, which were made as `config` says.
    fn of(
        steps: &[TimedStep],
        config: &Config,
        world_size: usize,
        bucket_bytes: Vec<usize>,
    ) -> Self {
        let totals = Sorted::new(steps.iter().map(|step| step.total * 1e6));
        let us = |seconds: fn(&PhaseSeconds) -> f64| {
            let parts = steps.iter().map(|TimedStep { phases: [earlier, later], .. }| {
                (seconds(later) - seconds(earlier)) * 1e6
            });
            Sorted::new(parts).median()
        };
        let forward: fn(&PhaseSeconds) -> f64 = if config.is_data_parallel() {
            |phases| phases.step + phases.data + phases.forward
        } else {
            |phases| phases.step + phases.forward
        };
        let backward_us = us(|phases| phases.backward);
        let shares = |bucket: usize| Sorted::new(steps.iter().map(|step| step.complete[bucket]));
        let bucket_complete_us = |bucket| shares(bucket).median().min(1.0) * backward_us;
        let after = config.ddp.find_unused_parameters || config.ddp.static_graph;
        Self {
            model: config.model_name(),
            strategy: config.ddp.strategy,
            amp: config.training.amp,
            batch_size: config.training.batch_size,
            world_size,
            us_min: totals.smallest(),
            us_max: totals.largest(),
            us_per_step: totals.median(),
            forward_us: us(forward),
            backward_us,
            communication_us: us(|phases| phases.collectives),
            optimizer_us: us(|phases| phases.optimizer),
            bucket_bytes,
            bucket_complete_us: (0..steps[0].complete.len()).map(bucket_complete_us).collect(),
            overlaps: !(config.ddp.no_overlap || after),
        }
    }

    /// Returns the bytes of each bucket, and the time in backward when it is complete, in microseconds.
    pub(super) fn buckets(&self) -> impl Iterator<Item = (f64, f64)> {
        let bytes = self.bucket_bytes.iter().map(|&bytes| bytes as f64);
        bytes.zip(self.bucket_complete_us.iter().copied())
    }

    /// Writes the times for people: the medians of `steps` steps.
    fn write(&self, steps: usize, on_cpu: bool, out: &mut dyn Write) -> io::Result<()> {
        let Self { model, batch_size: batch, world_size, .. } = self;
        let (ranks, on) = (counted(world_size, "rank"), if on_cpu { "" } else { " on GPUs" });
        writeln!(out, "# {model}, batch {batch}, {ranks}{on}: medians of {steps} steps, in us")?;
        if !on_cpu {
            writeln!(out, "# the parts are the GPU's times; the rest of a step is the host's")?;
        }
        let lines = [
            ("step", self.us_per_step),
            ("  forward", self.forward_us),
            ("  backward", self.backward_us),
            ("  communication", self.communication_us),
            ("  optimizer", self.optimizer_us),
            ("fastest", self.us_min),
            ("slowest", self.us_max),
        ];
        lines.iter().try_for_each(|(name, us)| writeln!(out, "{name:<16}{us:>10.1}"))
    }
}

/// The number of warm-up steps, which are not measured.
const WARM_UP: usize = 20;

/// Trains as `config` says for `steps` steps, and prints the time of one. Also prints its forecast on the
/// cluster of `--simulate-cluster`, if `config` has one. One rank is then measured, unless `config` has a number of ranks.
///
/// # Errors
/// As [`train`](super::super::train), and [`Error::Input`] for options that the cluster does not model.
pub fn bench_step(
    config: Config,
    steps: usize,
    cuda: &Cuda,
    printer: &Arc<Printer>,
) -> anyhow::Result<()> {
    let mut config = config.without_validation();
    let forecasts = config.ddp.simulate_cluster.is_some();
    let refuse = |problem: &str| Err(Error::usage(problem.into()).into());
    if config.ddp.grad_accum_steps > 1 {
        return refuse(
            "--grad-accum-steps: bench step measures steps of one batch; leave it out of the command line and of the \
             file",
        );
    }
    if forecasts && config.ddp.comm_hook != CommHookKind::None {
        return refuse(
            "--comm-hook: bench step forecasts uncompressed gradients; leave it out, or leave out --simulate-cluster",
        );
    }
    if forecasts && config.launch.nproc_per_node == Nproc::Auto {
        config.launch.nproc_per_node = Nproc::Count(1);
    }
    let launch = Launch::from_env(&config.launch_options(), cuda)?;
    let ended = run_command(config, &launch, false, cuda, printer, |config, launch| {
        let (config, data) = open_data(config)?;
        let command = format!("bench step --steps={steps}");
        let joined_launch = session::join_launch(&config, &command, launch.clone(), cuda, printer)?;
        joined_launch.before_ranks(|| config.validate_for(joined_launch.world_size()))?;
        if joined_launch.is_first() {
            joined_launch.notes().iter().for_each(|note| printer.info(note));
        }
        let spawn = session::configured_spawn(&joined_launch, &config, printer);
        let (backend, printer) = (joined_launch.placement.backend, printer.clone());
        spawn.run(move |rank| {
            let times = step_on(rank, backend, &config, &data.training, steps.max(1))?;
            let Some(times) = times else { return Ok(()) };
            let on_cpu = rank.device() == Device::Cpu;
            printer.result(&times, |out| times.write(steps, on_cpu, out))?;
            note_if_busy("the median step took", times.us_per_step / times.us_min, &printer);
            if let Some(cluster) = &config.ddp.simulate_cluster {
                forecast::print(&times, cluster, &printer)?;
            }
            Ok(())
        })?;
        Ok(None)
    });
    ended.map(drop)
}

/// Measures `steps` steps of a trainer on one rank. Returns the times on rank 0, `None` on the others.
pub(super) fn step_on(
    rank: &Rank,
    backend: Backend,
    config: &Config,
    dataset: &Arc<dyn Dataset>,
    steps: usize,
) -> anyhow::Result<Option<StepTimes>> {
    let group = rank.init_process_group(backend)?;
    let training = Training::new(rank, &group, config, dataset, &StartPoint::default())?;
    let times = Rc::new(RefCell::new(Vec::with_capacity(WARM_UP + steps)));
    let timer = StepTimer {
        is_scattered: config.is_data_parallel(),
        began: Instant::now(),
        on_host: PhaseSeconds::default(),
        on_gpu: None,
        times: times.clone(),
    };
    let options = config.trainer_options().for_steps((WARM_UP + steps) as u64);
    let mut trainer = training.trainer(config, options)?.callback(timer);
    trainer.train(u64::MAX)?;
    group.barrier()?;
    if rank.rank() != 0 {
        return Ok(None);
    }
    let times = &times.borrow()[WARM_UP..];
    let bucket_bytes = trainer.ddp().statistics().bucket_bytes;
    Ok(Some(StepTimes::of(times, config, rank.world_size(), bucket_bytes)))
}

/// The times of one step, in seconds.
struct TimedStep {
    total: f64,
    /// The rank's time in each phase before the step, and after it.
    phases: [PhaseSeconds; 2],
    /// When each bucket is complete, as a share of backward.
    complete: Vec<f64>,
}

/// Takes the times of a trainer's steps.
struct StepTimer {
    /// Whether rank 0 sends the batches: then they are part of the step. A rank's own batch is only two views of existing
    /// tensors.
    is_scattered: bool,
    began: Instant,
    /// The rank's time in each phase before the step.
    on_host: PhaseSeconds,
    /// Likewise on its GPU, if it has one.
    on_gpu: Option<PhaseSeconds>,
    times: Rc<RefCell<Vec<TimedStep>>>,
}

impl StepTimer {
    fn begin(&mut self, group: &ProcessGroup) {
        self.on_host = group.host_phase_seconds();
        self.on_gpu = group.gpu_seconds().map(|gpu| gpu.phases);
        self.began = Instant::now();
    }
}

impl<M> Callback<M> for StepTimer {
    fn on_epoch_start(&mut self, context: &mut TrainContext<M>) -> anyhow::Result<()> {
        self.begin(context.group());
        Ok(())
    }

    fn on_step_start(
        &mut self,
        context: &mut TrainContext<M>,
        step: &mut Step,
    ) -> anyhow::Result<()> {
        if !self.is_scattered {
            let group = context.group();
            group.enter_phase(Operation::Step, step.index); // ends the phase of the data
            self.begin(group);
        }
        Ok(())
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, _: &Step) -> anyhow::Result<()> {
        let group = context.group();
        group.synchronize()?;
        group.wait_for_gpu()?;
        let total = self.began.elapsed().as_secs_f64();
        let on_host = group.host_phase_seconds();
        let backward = on_host.backward - self.on_host.backward;
        let share = |time: Option<Duration>| time.map_or(1.0, |time| time.as_secs_f64() / backward);
        let complete = context.ddp().bucket_times().into_iter().map(share).collect();
        let phases = match (self.on_gpu, group.gpu_seconds()) {
            (Some(earlier), Some(later)) => [earlier, later.phases],
            _ => [self.on_host, on_host],
        };
        self.times.borrow_mut().push(TimedStep { total, phases, complete });
        self.begin(group);
        Ok(())
    }
}
