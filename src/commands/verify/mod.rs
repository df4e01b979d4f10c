//! `ddp-mp verify`: compares N ranks with one rank of the N-fold batch, on the same samples.

mod comparison;

use std::rc::Rc;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

use crate::config::{CommHookKind, Config, OptimizerKind, StrategyKind};
use crate::session::{self, StartPoint, Training, open_data, refuse_launcher, run_command};
use comparison::{Bound, Comparison, RunResult, values};
use engine::data::{Dataset, Subset};
use engine::error::{Error, Result};
use engine::ffi::cuda::Cuda;
use engine::launch::{BindChoice, FaultKind, Launch, LaunchKind, Placement, Rank};
use engine::models::ModelKind;
use engine::process_group::ProcessGroup;
use engine::trainer::Amp;
use views::{LogFormat, Printer};

/// A way of training. All ways must give the same result.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Variant {
    strategy: StrategyKind,
    world_size: usize,
    batch_size: usize,
    grad_accum_steps: usize,
}

/// Trains `steps` steps in every way on the ranks of `config`, and on one rank with the N-fold batch. Prints how far the
/// parameters differ; with `per_parameter`, for each parameter.
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
    let mut config = config.without_validation();
    // A file may have them for training.
    (config.ddp.grad_accum_steps, config.launch.bind) = (1, BindChoice::Auto);
    let launch = Launch::from_env(&config.launch_options(), cuda)?;
    if launch.kind != LaunchKind::Spawned {
        refuse_launcher(&launch)?;
    }
    let ended = run_command(config, &launch, false, cuda, printer, |config, launch| {
        let (config, data) = open_data(config)?;
        let command = format!("verify --steps={steps}");
        let joined = session::join_launch(&config, &command, launch.clone(), cuda, printer)?;
        let (config, dataset, notes) =
            joined.before_ranks(|| prepare(config, data.training, joined.world_size(), steps))?;
        if joined.is_first() {
            joined.notes().iter().chain(&notes).for_each(|note| printer.info(note));
        }
        let spawn = session::configured_spawn(&joined, &config, printer);
        let (placement, printer) = (joined.placement.clone(), printer.clone());
        let on_one_rank = Mutex::default();
        let verification =
            Verification { config, dataset, placement, steps, per_parameter, printer, on_one_rank };
        let verification = Arc::new(verification);
        let of_ranks = verification.clone();
        let rows = spawn.run(move |rank| of_ranks.compare(rank))?;
        verification.conclude(&rows.into_iter().flatten().collect::<Vec<_>>())?;
        Ok(None)
    });
    ended.map(drop)
}

/// Refuses options with which N ranks do not equal one rank.
fn check_options(config: &Config, steps: u64) -> Result<()> {
    let Config { model, data, .. } = config;
    let with_adamw = config.optimization.optimizer == OptimizerKind::AdamW;
    let problem = match (model.kind, &config.launch.inject_fault) {
        _ if model.dropout > 0.0 => {
            "--dropout: each rank draws its own mask, so verify cannot compare N ranks with one; remove it".into()
        }
        (kind, _) if kind.uses("sync_batch_norm") && !model.sync_batch_norm => format!(
            "--model {kind}: each rank normalizes its own batch, so verify cannot compare N ranks with one; use \
             --sync-batch-norm"
        ),
        (ModelKind::Gpt, _) if with_adamw => {
            "--optimizer adamw: with it rounding changes a gpt's parameters by more than verify's bound, because it \
             divides each gradient by its size; use --optimizer sgd"
                .into()
        }
        _ if config.ddp.exact_mean && (data.drop_last || data.drop_last_batch) => format!(
            "--{}: with --exact-mean verify needs the samples that it drops, because they make batches of different \
             size; remove it",
            if data.drop_last { "drop-last" } else { "drop-last-batch" }
        ),
        _ if config.training.amp != Amp::Off => {
            "--amp: verify's bound holds for float32, and --amp rounds more; remove it".into()
        }
        (_, Some(fault)) if fault.kind != FaultKind::SkipSample => {
            format!("--inject-fault: verify injects skip-sample only, not {fault}; remove it")
        }
        // Ranks and samples are checked later.
        (_, Some(fault)) => match fault.check(usize::MAX, steps, u64::MAX) {
            Ok(()) => return Ok(()),
            Err(problem) => format!("--inject-fault: {problem}"),
        },
        _ => return Ok(()),
    };
    Err(Error::usage(problem))
}

/// Returns the configuration and the samples for which N ranks equal one, and notes for the user. The samples fill whole
/// steps of all ranks, so that padding and a smaller last batch have no effect. With `--exact-mean` an epoch ends with a
/// smaller step instead, within `steps` steps, in which some ranks have one sample more than others.
fn prepare(
    mut config: Config,
    dataset: Arc<dyn Dataset>,
    ranks: usize,
    steps: u64,
) -> Result<(Config, Arc<dyn Dataset>, Vec<String>)> {
    let (len, batch_size) = (dataset.len(), config.training.batch_size);
    let (is_exact, has_sync) = (config.ddp.exact_mean, config.model.sync_batch_norm);
    let step = ranks.saturating_mul(batch_size);
    let (count, what) = if is_exact {
        let whole = step.saturating_mul(steps.clamp(1, 3) as usize - 1);
        let most = len.min(whole.saturating_add(step / 2).max(ranks + 1));
        let count = if most.is_multiple_of(ranks) { most.saturating_sub(1) } else { most };
        (count, ": in the last step of an epoch the ranks have batches of different size")
    } else {
        (len - len % step, ", which make whole steps")
    };
    if ranks < 2 {
        let problem = "--nproc-per-node: one rank has nothing to be compared with; use 2 or more";
        return Err(Error::usage(problem.into()));
    }
    if count < ranks {
        return Err(Error::usage(format!(
            "{len} samples are less than a step of {ranks} ranks with batch {batch_size}; use more samples, or a smaller \
             --batch-size"
        )));
    }
    // One rank uses the same learning rate as N ranks.
    (config.optimization.lr, config.optimization.scale_lr) = (config.lr_for(ranks).0, false);
    config.data.num_samples = Some(count as i64);
    config.training.max_epochs = steps.div_ceil(config.steps_per_epoch(ranks));
    config.validate_for(ranks)?;
    let notes = [
        (is_exact || count < len).then(|| format!("the first {count} of {len} samples{what}")),
        has_sync.then(|| {
            "without dp, which has no --sync-batch-norm, and accumulation, where each smaller batch is normalized by \
             itself"
                .into()
        }),
        (is_exact && !has_sync)
            .then(|| "without dp, whose ranks have batches of the same size".into()),
        config.program.model.is_some().then(|| {
            format!(
                "the model of {} must have neither dropout nor batch norm here: with them N ranks differ from one",
                config.program.name
            )
        }),
    ];
    let dataset = Arc::new(Subset::new(dataset, (0..count).collect()));
    Ok((config, dataset, notes.into_iter().flatten().collect()))
}

/// The comparison of one run of the command, which the ranks of this process make.
struct Verification {
    config: Config,
    dataset: Arc<dyn Dataset>,
    placement: Placement,
    steps: u64,
    per_parameter: bool,
    printer: Arc<Printer>,
    /// What one rank gets by itself, in a way and in so many steps.
    on_one_rank: Mutex<Vec<(Variant, u64, Arc<RunResult>)>>,
}

impl Verification {
    /// Compares on one rank, and prints the results on rank 0, which also gets them. All ranks train alike.
    fn compare(&self, rank: &Rank) -> anyhow::Result<Vec<Comparison>> {
        let Self { config, printer, .. } = self;
        let group = rank.init_process_group(self.placement.backend)?;
        let only_this = Rc::new(group.new_subgroups(1)?);
        let ranks = group.world_size();
        let batch_size = ranks.saturating_mul(config.training.batch_size);
        let terms = batch_size.saturating_mul(config.tokens_per_sample());
        let strategy = StrategyKind::Ddp;
        let whole = Variant { strategy, world_size: 1, batch_size, grad_accum_steps: 1 };
        let train = |variant: Variant, steps: u64| -> anyhow::Result<Arc<RunResult>> {
            if variant.world_size == 1 {
                return self.train_alone(rank, &only_this, variant, steps);
            }
            Ok(Arc::new(self.train(rank, &group, variant, steps)?))
        };
        let compare = |variant, steps| -> anyhow::Result<(Bound, Comparison)> {
            let (reference, trained) = (train(whole, steps)?, train(variant, steps)?);
            let bound = Bound::of(&reference, steps, terms)?;
            let mut row = Comparison::new(&self.placement, variant, &reference, &trained, bound);
            let mut ok = vec![row.ok];
            group.broadcast_object_list(&mut ok, 0)?;
            row.ok = ok == [true];
            Ok((bound, row))
        };
        let mut rows = Vec::new();
        for variant in variants(config, ranks) {
            let (bound, mut row) = compare(variant, self.steps)?;
            if !row.ok {
                let is_ok = |steps| compare(variant, steps).map(|(_, row)| row.ok);
                row.first_step = Some(first_wrong_step(self.steps, is_ok)?);
            }
            if group.rank() > 0 {
                continue;
            }
            if rows.is_empty() && printer.format() == LogFormat::Text {
                printer.line(&bound.head(config, ranks))?;
            }
            printer.result(&row, |out| row.write(self.per_parameter, out))?;
            rows.push(row);
        }
        Ok(rows)
    }

    /// Trains on one rank by itself, once for all ranks of this process.
    fn train_alone(
        &self,
        rank: &Rank,
        only_this: &Rc<ProcessGroup>,
        variant: Variant,
        steps: u64,
    ) -> anyhow::Result<Arc<RunResult>> {
        // The first rank of this process to come trains by itself. The others wait for its result here, and not in a
        // collective, where they would report it as late.
        let mut known = self.on_one_rank.lock();
        if let Some((.., result)) = known.iter().find(|it| (it.0, it.1) == (variant, steps)) {
            return Ok(result.clone());
        }
        let result = Arc::new(self.train(rank, only_this, variant, steps)?);
        known.push((variant, steps, result.clone()));
        Ok(result)
    }

    /// Trains on one rank in one way.
    fn train(
        &self,
        rank: &Rank,
        group: &Rc<ProcessGroup>,
        variant: Variant,
        steps: u64,
    ) -> anyhow::Result<RunResult> {
        let mut config = self.config.clone();
        (config.ddp.strategy, config.training.batch_size) = (variant.strategy, variant.batch_size);
        config.ddp.grad_accum_steps = variant.grad_accum_steps as u64;
        if variant.world_size == 1 || variant.strategy == StrategyKind::Dp {
            config.ddp.comm_hook = CommHookKind::None; // only ranks that average gradients with `ddp` compress
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
                self.printer.info(
                    "all are within the bound; bits differ where sums are made in another order",
                );
            }
            return Ok(());
        };
        let why = if self.config.comm_hook().is_some() {
            "--comm-hook sends compressed gradients, so their mean is not exact".into()
        } else if broken.iter().all(|row| row.replicas_equal) {
            format!(
                "all ranks have the same parameters, so the gradients that they average are wrong: check the samples \
                 of step {step} (sampler, loader), the divisor of the loss"
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

/// Returns the first step, from 0, after which the ways differ. They differ after `steps` steps. `is_ok` returns whether they
/// agree after fewer.
fn first_wrong_step(
    steps: u64,
    is_ok: impl Fn(u64) -> anyhow::Result<bool>,
) -> anyhow::Result<u64> {
    // The ways agree after `agree` steps, and differ after `differ` steps.
    let (mut agree, mut differ) = (0, steps);
    while differ - agree > 1 {
        let middle = agree.midpoint(differ);
        *(if is_ok(middle)? { &mut agree } else { &mut differ }) = middle;
    }
    Ok(differ - 1)
}

/// Returns the ways that must give the same result: strategy, ranks, samples of a batch, and batches of a step.
fn variants(config: &Config, ranks: usize) -> Vec<Variant> {
    let (ddp, dp) = (StrategyKind::Ddp, StrategyKind::Dp);
    let batch_size = config.training.batch_size;
    let accumulates = !config.model.sync_batch_norm;
    let halves = accumulates && batch_size.is_multiple_of(2);
    let has_dp = accumulates && !config.ddp.exact_mean;
    let way = |is_there: bool, strategy, world_size, batch_size, grad_accum_steps| {
        is_there.then_some(Variant { strategy, world_size, batch_size, grad_accum_steps })
    };
    let ways = [
        way(accumulates, ddp, 1, batch_size, ranks),
        way(true, ddp, ranks, batch_size, 1),
        way(has_dp, dp, ranks, batch_size, 1),
        way(halves, ddp, ranks, batch_size / 2, 2),
        way(has_dp && halves, dp, ranks, batch_size / 2, 2),
    ];
    ways.into_iter().flatten().collect()
}
