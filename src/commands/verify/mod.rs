//! `ddp-mp verify`: compares N ranks with one rank of the N-fold batch, on the same samples.

mod comparison;

use std::rc::Rc;
use std::sync::Arc;

use serde::Serialize;

use crate::config::{CommHookKind, Config, OptimizerKind, StrategyKind};
use crate::data::{Dataset, Subset};
use crate::error::{Error, Result};
use crate::ffi::cuda::Cuda;
use crate::launch::{BackendChoice, BindChoice, Launch, LaunchKind, Nproc, Placement, Rank, Spawn};
use crate::models::ModelKind;
use crate::process_group::{Backend, Devices, ProcessGroup};
use crate::runtime::FaultKind;
use crate::session::{
    self, ChildProcesses, StartPoint, Training, check_shared_model, configure, leave_error,
    open_data, place_ranks,
};
use crate::telemetry::{LogFormat, Printer};
use crate::trainer::Amp;
use comparison::{Bound, Comparison, RunResult, values, write_head};

/// A way of training. All ways must give the same result.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Variant {
    strategy: StrategyKind,
    world_size: usize,
    batch_size: usize,
    grad_accum_steps: usize,
}

/// Trains `steps` steps on N ranks in every way that this machine supports, and on one rank with the N-fold batch.
/// Prints how far the parameters differ; with `per_parameter`, for each parameter. With `--spawn=processes` the N ranks
/// are processes.
///
/// # Errors
/// [`Error::Input`] for options that cannot be compared, [`SpawnError`](crate::SpawnError) when a rank failed,
/// and an error for a difference beyond what rounding explains.
pub fn verify(
    config: Config,
    steps: u64,
    per_parameter: bool,
    cuda: &Cuda,
    printer: &Arc<Printer>,
) -> anyhow::Result<()> {
    check_options(&config, steps)?;
    let launch = Launch::from_env(&config.launch_options(), cuda)?;
    if let Some(children) = ChildProcesses::wanted(&config, &launch, false)? {
        return children.run(&config, &launch, cuda, printer).map(drop);
    }
    let nproc = config.launch.nproc_per_node;
    let prepare = |ranks| Verification::new(config, ranks, steps, per_parameter, printer);
    if launch.kind == LaunchKind::Spawned {
        let join = || -> anyhow::Result<()> {
            let (verification, notes) = prepare(launch.processes.count)?;
            let (command, config) = (format!("verify --steps={steps}"), &verification.config);
            let joined = session::join_launch(config, &command, launch.clone(), cuda, printer)?;
            if joined.is_first() {
                joined.notes().iter().chain(&notes).for_each(|note| printer.info(note));
            }
            let spawn = session::configured_spawn(&joined, config, printer);
            let rows = verification.compare(spawn, joined.placement.clone(), true, true, None)?;
            verification.conclude(&rows)
        };
        return leave_error(&launch, join(), printer);
    }
    let ranks = match nproc {
        Nproc::Count(ranks) => ranks,
        other => place_ranks(other, BackendChoice::Auto, BindChoice::Auto, cuda)?.devices.len(),
    };
    let (verification, notes) = prepare(ranks)?;
    let (placements, left_out) = placements(&verification.config, ranks, cuda)?;
    left_out.iter().chain(&notes).for_each(|note| printer.info(note));
    let (mut rows, mut device) = (Vec::new(), None);
    for placement in placements {
        // One rank that accumulates does not communicate: it is compared once per device.
        let alone = device.replace(placement.devices[0]) != Some(placement.devices[0]);
        let on_one_rank = verification.train_on_one_rank(&placement, alone)?;
        let spawn = configure(Spawn::at(&placement), &verification.config, printer);
        let is_first = rows.is_empty();
        rows.extend(verification.compare(spawn, placement, is_first, alone, Some(on_one_rank))?);
    }
    verification.conclude(&rows)
}

/// Refuses options with which N ranks do not equal one rank.
fn check_options(config: &Config, steps: u64) -> Result<()> {
    let Config { model, data, training, .. } = config;
    let kind = model.kind;
    let dropped = if data.drop_last { "--drop-last" } else { "--drop-last-batch" };
    let with_adamw = config.optimization.optimizer == OptimizerKind::AdamW;
    let refused = [
        (
            model.dropout > 0.0,
            "--dropout: each rank draws its own mask, so verify cannot compare N ranks with one; remove it".into(),
        ),
        (
            kind.uses("sync_batch_norm") && !model.sync_batch_norm,
            format!(
                "--model {kind}: each rank normalizes its own batch, so verify cannot compare N ranks with one; use \
                 --sync-batch-norm"
            ),
        ),
        (
            kind == ModelKind::Gpt && with_adamw,
            "--optimizer adamw: with it rounding changes a gpt's parameters by more than verify's bound, because it \
             divides each gradient by its size; use --optimizer sgd"
                .into(),
        ),
        (
            config.ddp.exact_mean && (data.drop_last || data.drop_last_batch),
            format!(
                "{dropped}: with --exact-mean verify needs the samples that it drops, because they make batches of \
                 different size; remove it"
            ),
        ),
        (
            training.amp != Amp::Off,
            "--amp: verify's bound holds for float32, and --amp rounds more; remove it".into(),
        ),
    ];
    let problem = refused.into_iter().find_map(|(is_refused, text)| is_refused.then_some(text));
    let fault = config.launch.inject_fault.as_ref().and_then(|fault| match fault.kind {
        // Ranks and samples are checked later.
        FaultKind::SkipSample => fault.check(usize::MAX, steps, u64::MAX).err(),
        _ => Some(format!("verify injects skip-sample only, not {fault}; remove it")),
    });
    match problem.or(fault.map(|problem| format!("--inject-fault: {problem}"))) {
        Some(problem) => Err(Error::usage(problem)),
        None => Ok(()),
    }
}

/// Returns as many samples as fill whole steps of all ranks, so that padding and a smaller last batch have no effect; and
/// a note if samples are left out. With `--exact-mean`, two whole steps and a smaller one, in which some ranks have one
/// sample more than others.
fn comparable_samples(
    config: &Config,
    dataset: Arc<dyn Dataset>,
    ranks: usize,
) -> Result<(Arc<dyn Dataset>, Option<String>)> {
    let (len, batch_size) = (dataset.len(), config.training.batch_size);
    let step = ranks.saturating_mul(batch_size);
    let is_exact = config.ddp.exact_mean;
    let most = len.min(step.saturating_mul(2).saturating_add(step / 2));
    let (count, what) = if is_exact {
        let count = if most.is_multiple_of(ranks) { most - 1 } else { most };
        (count, ": in the last step of an epoch the ranks have batches of different size")
    } else {
        (len - len % step, ", which make whole steps")
    };
    if count < ranks {
        return Err(Error::usage(if is_exact {
            format!(
                "--exact-mean: {len} samples are too few for batches of different size on {ranks} ranks; use {} or \
                 more",
                ranks + 1
            )
        } else {
            format!(
                "{len} samples are less than a step of {ranks} ranks with batch {batch_size}; use more samples, or a \
                 smaller --batch-size"
            )
        }));
    }
    let note = format!("the first {count} of {len} samples{what}");
    let dataset = Arc::new(Subset::new(dataset, (0..count).collect()));
    Ok((dataset, (is_exact || count < len).then_some(note)))
}

/// What one rank got by itself, in each way that needs no other.
type OnOneRank = Vec<(Variant, Arc<RunResult>)>;

/// The comparison of one run of the command.
#[derive(Clone)]
struct Verification {
    config: Arc<Config>,
    dataset: Arc<dyn Dataset>,
    ranks: usize,
    steps: u64,
    per_parameter: bool,
    printer: Arc<Printer>,
}

impl Verification {
    /// Prepares the data and the options. Also returns notes for the user.
    fn new(
        config: Config,
        ranks: usize,
        steps: u64,
        per_parameter: bool,
        printer: &Arc<Printer>,
    ) -> Result<(Self, Vec<String>)> {
        if ranks < 2 {
            let problem =
                "--nproc-per-node: one rank has nothing to be compared with; use 2 or more";
            return Err(Error::usage(problem.into()));
        }
        let mut config = config.without_validation();
        // A file may have them for training.
        config.ddp.grad_accum_steps = 1;
        config.launch.bind = BindChoice::Auto;
        let (mut config, data) = open_data(config)?;
        let (dataset, note) = comparable_samples(&config, data.training, ranks)?;
        // One rank uses the same learning rate as N ranks.
        (config.optimization.lr, config.optimization.scale_lr) = (config.lr_for(ranks).0, false);
        config.data.num_samples = Some(dataset.len() as i64);
        let epoch_steps = config.steps_per_epoch(ranks);
        if config.ddp.exact_mean && steps < epoch_steps {
            return Err(Error::usage(format!(
                "--steps: {steps} are too few for --exact-mean: the ranks have batches of different size in the last \
                 step of an epoch, which is step {}; use {epoch_steps} or more",
                epoch_steps - 1
            )));
        }
        config.training.max_epochs = steps.div_ceil(epoch_steps);
        config.validate_for(ranks)?;
        let left_out = if config.model.sync_batch_norm {
            Some(
                "without dp, which has no --sync-batch-norm, and accumulation, where each smaller batch is normalized \
                 by itself"
                    .into(),
            )
        } else {
            let why = "without dp, whose ranks have batches of the same size";
            config.ddp.exact_mean.then(|| why.into())
        };
        let of_own_model = config.program.model.is_some().then(|| {
            format!(
                "the model of {} must have neither dropout nor batch norm here: with them N ranks differ from one",
                config.program.name
            )
        });
        let notes = [note, left_out, of_own_model].into_iter().flatten().collect();
        let (config, printer) = (Arc::new(config), printer.clone());
        Ok((Self { config, dataset, ranks, steps, per_parameter, printer }, notes))
    }

    /// Returns the way that the others are compared with: one rank with the batches of all.
    fn reference(&self) -> Variant {
        let batch_size = self.ranks.saturating_mul(self.config.training.batch_size);
        Variant { strategy: StrategyKind::Ddp, world_size: 1, batch_size, grad_accum_steps: 1 }
    }

    /// Trains on the first rank of `placement` in each way that needs no other.
    fn train_on_one_rank(&self, placement: &Placement, alone: bool) -> anyhow::Result<OnOneRank> {
        let (this, mut placement) = (self.clone(), placement.clone());
        placement.devices.truncate(1);
        let backend = placement.backend;
        let spawn = configure(Spawn::at(&placement), &self.config, &self.printer);
        let of_ranks = spawn.run(move |rank| {
            this.train_by_itself(rank, &rank.init_process_group(backend)?, alone)
        })?;
        Ok(of_ranks.into_iter().flatten().collect())
    }

    /// Trains in each way that needs no other rank. `group` has only this one.
    fn train_by_itself(
        &self,
        rank: &Rank,
        group: &Rc<ProcessGroup>,
        alone: bool,
    ) -> anyhow::Result<OnOneRank> {
        let all = variants(&self.config, self.ranks, alone).into_iter();
        let by_itself = all.filter(|variant| variant.world_size == 1).chain([self.reference()]);
        let train =
            |variant| Ok((variant, Arc::new(self.train(rank, group, variant, self.steps)?)));
        by_itself.map(train).collect()
    }

    /// Compares all ways to train on the ranks of `spawn`, and prints the results; `is_first` with a head. Returns those of
    /// rank 0, if it is in this process. `alone`: also one rank that accumulates. If it is not known what one rank gets by
    /// itself, each rank finds out, so that none waits for another meanwhile.
    fn compare(
        &self,
        spawn: Spawn,
        placement: Placement,
        is_first: bool,
        alone: bool,
        on_one_rank: Option<OnOneRank>,
    ) -> anyhow::Result<Vec<Comparison>> {
        let this = self.clone();
        let rows = spawn.run(move |rank| {
            let group = rank.init_process_group(placement.backend)?;
            let only_this = Rc::new(group.new_subgroups(1)?);
            let on_one_rank = match &on_one_rank {
                Some(known) => known.clone(),
                None => this.train_by_itself(rank, &only_this, alone)?,
            };
            let train = |variant: Variant, steps| {
                let known = on_one_rank.iter().find(|(one, _)| *one == variant);
                match known.filter(|_| steps == this.steps) {
                    Some((_, result)) => Ok(result.clone()),
                    None => {
                        let group = if variant.world_size == 1 { &only_this } else { &group };
                        this.train(rank, group, variant, steps).map(Arc::new)
                    }
                }
            };
            this.compare_on(&group, &placement, is_first, alone, train)
        })?;
        Ok(rows.into_iter().flatten().collect())
    }

    /// Compares on one rank, which `train` trains in a way for so many steps. All ranks train alike.
    fn compare_on(
        &self,
        group: &ProcessGroup,
        placement: &Placement,
        is_first: bool,
        alone: bool,
        train: impl Fn(Variant, u64) -> anyhow::Result<Arc<RunResult>>,
    ) -> anyhow::Result<Vec<Comparison>> {
        let Self { config, ranks, printer, .. } = self;
        let samples = self.reference();
        let terms = samples.batch_size.saturating_mul(config.tokens_per_sample());
        let compare = |variant, steps| -> anyhow::Result<(Bound, Comparison)> {
            let reference = train(samples, steps)?;
            let trained = train(variant, steps)?;
            let bound = Bound::of(&reference, steps, terms)?;
            let mut comparison = Comparison::new(placement, variant, &reference, &trained, bound);
            let mut ok = vec![comparison.ok];
            group.broadcast_object_list(&mut ok, 0)?;
            comparison.ok = ok == [true];
            Ok((bound, comparison))
        };
        let mut rows = Vec::new();
        for variant in variants(config, *ranks, alone) {
            let (bound, mut comparison) = compare(variant, self.steps)?;
            if !comparison.ok {
                // The ways agree after `agree` steps, and differ after `differ` steps.
                let (mut agree, mut differ) = (0, self.steps);
                while differ - agree > 1 {
                    let middle = agree.midpoint(differ);
                    let is_ok = compare(variant, middle)?.1.ok;
                    *(if is_ok { &mut agree } else { &mut differ }) = middle;
                }
                comparison.first_step = Some(differ - 1);
            }
            if group.rank() > 0 {
                continue;
            }
            if is_first && rows.is_empty() && printer.format() == LogFormat::Text {
                printer.lines(|out| write_head(config, *ranks, &bound, out))?;
            }
            printer.result(&comparison, |out| comparison.write(self.per_parameter, out))?;
            rows.push(comparison);
        }
        Ok(rows)
    }

    /// Trains on one rank in one way.
    fn train(
        &self,
        rank: &Rank,
        group: &Rc<ProcessGroup>,
        variant: Variant,
        steps: u64,
    ) -> anyhow::Result<RunResult> {
        let Variant { strategy, world_size, batch_size, grad_accum_steps } = variant;
        let mut config = Config::clone(&self.config);
        (config.ddp.strategy, config.training.batch_size) = (strategy, batch_size);
        config.ddp.grad_accum_steps = grad_accum_steps as u64;
        if world_size == 1 || strategy == StrategyKind::Dp {
            config.ddp.comm_hook = CommHookKind::None; // only ranks that average gradients with `ddp` compress
        }
        if world_size == 1 {
            config.launch.inject_fault = None; // one rank with the whole batch is the reference
        }
        let training = Training::new(rank, group, &config, &self.dataset, &StartPoint::default())?;
        let before = values(&training.ddp.state_dict())?;
        let options = config.trainer_options().for_steps(steps);
        let mut trainer = training.trainer(&config, options)?;
        trainer.train(config.training.max_epochs)?;
        let ddp = trainer.ddp();
        group.synchronize()?;
        let hashes = group.all_gather_object(&ddp.parameters_hash()?)?;
        let replicas_equal = hashes.iter().all(|hash| *hash == hashes[0]);
        Ok(RunResult { before, after: values(&ddp.state_dict())?, replicas_equal })
    }

    /// Says what the comparisons show.
    ///
    /// # Errors
    /// What is wrong, and since which step.
    fn conclude(&self, rows: &[Comparison]) -> anyhow::Result<()> {
        let broken: Vec<&Comparison> = rows.iter().filter(|row| !row.ok).collect();
        let Some(step) = broken.iter().filter_map(|row| row.first_step).min() else {
            if !rows.is_empty() && self.printer.format() == LogFormat::Text {
                let why =
                    "all are within the bound; bits differ where sums are made in another order";
                self.printer.info(why);
            }
            return Ok(());
        };
        let why = if self.config.comm_hook().is_some() {
            "--comm-hook sends compressed gradients, so their mean is not exact".into()
        } else if broken.iter().all(|row| row.replicas_equal) {
            let program = &self.config.program;
            let own = program.model.as_ref().map_or(String::new(), |_| {
                format!(", and the model of {} for dropout and batch norm", program.name)
            });
            format!(
                "all ranks have the same parameters, so the gradients that they average are wrong: check the samples \
                 of step {step} (sampler, loader), the divisor of the loss{own}"
            )
        } else {
            "the ranks have different parameters: train with --check-replicas-every 1, which names the rank".into()
        };
        anyhow::bail!(
            "{} of {} comparisons differ by more than rounding explains, from step {step} on; {why}",
            broken.len(),
            rows.len()
        )
    }
}

/// Returns where `ranks` ranks can run here, and notes on what is left out and why.
fn placements(config: &Config, ranks: usize, cuda: &Cuda) -> Result<(Vec<Placement>, Vec<String>)> {
    let (mut placements, mut left_out) = (Vec::new(), Vec::new());
    let on_cpu = config.launch.nproc_per_node == Nproc::Cpu;
    let on_gpus = cuda.usable() > 0 && !on_cpu;
    let no_gpu_because = match &cuda.problem {
        _ if on_cpu => "ranks on the CPU were asked for",
        Some(problem) => problem,
        None => "no GPU is visible",
    };
    let place = |backend, cuda: &Cuda| {
        let (all, choice) = (Nproc::Count(ranks), BackendChoice::Given(backend));
        let placement = place_ranks(all, choice, BindChoice::Auto, cuda)?;
        check_shared_model(config, &placement).map(|()| placement)
    };
    for backend in Backend::all() {
        let why = match backend.devices() {
            _ if !backend.works_within_process() => {
                "it needs processes; add --spawn=processes".into()
            }
            Devices::OwnGpu if !on_gpus => no_gpu_because.to_owned(),
            Devices::OwnGpu => match place(backend, cuda) {
                Ok(placement) => {
                    placements.push(placement);
                    continue;
                }
                Err(error) => error.to_string(),
            },
            devices => {
                if devices == Devices::CpuOrSharedGpu && on_gpus {
                    placements.push(place(backend, cuda)?);
                }
                placements.push(place(backend, &Cuda::default())?);
                continue;
            }
        };
        left_out.push(format!("without {}: {why}", backend.name()));
    }
    Ok((placements, left_out))
}

/// Returns the ways that must give the same result. `alone`: also one rank that accumulates `ranks` batches.
fn variants(config: &Config, ranks: usize, alone: bool) -> Vec<Variant> {
    let (ddp, dp) = (StrategyKind::Ddp, StrategyKind::Dp);
    let batch_size = config.training.batch_size;
    let is_plain = !config.model.sync_batch_norm;
    let (with_dp, halves) = (is_plain && !config.ddp.exact_mean, batch_size.is_multiple_of(2));
    let ways = [
        (is_plain && alone, ddp, 1, batch_size, ranks),
        (true, ddp, ranks, batch_size, 1),
        (with_dp, dp, ranks, batch_size, 1),
        (is_plain && halves, ddp, ranks, batch_size / 2, 2),
        (with_dp && halves, dp, ranks, batch_size / 2, 2),
    ];
    let variant = |(is_there, strategy, world_size, batch_size, grad_accum_steps)| {
        let variant = Variant { strategy, world_size, batch_size, grad_accum_steps };
        bool::then_some(is_there, variant)
    };
    ways.into_iter().filter_map(variant).collect()
}
