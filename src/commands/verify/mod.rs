//! `ddp-mp verify`: compares N ranks with one rank of the N-fold batch, on the same samples.

mod comparable;
mod difference;

use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, bail};
use tch::{Device, Kind, Tensor};

use crate::config::{CommHookKind, Config, StrategyKind};
use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::ffi::cuda::Cuda;
use crate::launch::{BackendChoice, BindChoice, Launch, LaunchKind, Nproc, Placement, Rank, Spawn};
use crate::process_group::{Backend, Devices, ProcessGroup};
use crate::session::{
    self, ChildProcesses, StartPoint, Training, check_shared_model, configure, leave_error,
    open_data, place_ranks,
};
use crate::telemetry::{LogFormat, Printer};
use comparable::{
    batch_norm_note, check_comparable, check_fault, exact_mean_note, own_model_note,
    unequal_batches, whole_steps,
};
use difference::{Bound, Comparison, write_head};

/// A way of training. All ways must give the same result.
#[derive(Debug, Clone, Copy)]
struct Variant {
    strategy: StrategyKind,
    ranks: usize,
    batch_size: usize,
    grad_accum_steps: usize,
}

/// The values of one tensor.
#[derive(Debug)]
struct ParamValues {
    name: String,
    values: Vec<f32>,
    /// The number of inputs of each number that a layer computes with this tensor.
    width: usize,
}

/// The tensors before and after training.
#[derive(Debug)]
struct RunResult {
    before: Vec<ParamValues>,
    after: Vec<ParamValues>,
    replicas_equal: bool,
}

/// Trains `steps` steps on N ranks in every way that this machine supports, and on one rank with the N-fold batch.
/// Prints how far the parameters differ; with `per_parameter`, for each parameter. With `--spawn=processes` the N ranks
/// are processes.
///
/// # Errors
/// [`Error::InvalidInput`] for options that cannot be compared, [`SpawnError`](crate::SpawnError) when a rank failed,
/// and an error for a difference beyond what rounding explains.
pub fn verify(
    config: Config,
    steps: u64,
    per_parameter: bool,
    cuda: &Cuda,
    printer: &Arc<Printer>,
) -> anyhow::Result<()> {
    check_comparable(&config)?;
    let launch = Launch::from_env(&config.launch_options(), cuda)?;
    if let Some(children) = ChildProcesses::wanted(&config, &launch, false)? {
        return children.run(&config, &launch, cuda, printer).map(drop);
    }
    if launch.kind == LaunchKind::Spawned {
        let ranks = launch.processes.count;
        let join = || -> anyhow::Result<()> {
            let (verification, notes) =
                Verification::new(config, ranks, steps, per_parameter, printer)?;
            verification.between_processes(notes, launch.clone(), cuda)
        };
        return leave_error(&launch, join(), printer);
    }
    let ranks = match config.launch.nproc_per_node {
        Nproc::Count(ranks) => ranks,
        other => place_ranks(other, BackendChoice::Auto, BindChoice::Auto, cuda)?.devices.len(),
    };
    let (verification, notes) = Verification::new(config, ranks, steps, per_parameter, printer)?;
    let (placements, left_out) = placements(&verification.config, ranks, cuda)?;
    left_out.iter().chain(&notes).for_each(|note| printer.info(note));
    match verification.compare(&placements, &Ranks::Threads)? {
        Some(problem) => bail!(problem),
        None => Ok(()),
    }
}

/// The comparison of one run of the command.
#[derive(Clone)]
struct Verification {
    config: Arc<Config>,
    dataset: Arc<dyn Dataset>,
    ranks: usize,
    steps: u64,
    /// Numbers in the sum of a step: samples, or tokens.
    step_terms: usize,
    with_dp: bool,
    per_parameter: bool,
    printer: Arc<Printer>,
}

/// The ranks that train.
enum Ranks<'a> {
    /// Threads, which each training starts.
    Threads,
    /// This rank, one of several processes, and its group.
    Processes(&'a Rank, Rc<ProcessGroup>),
}

impl Verification {
    /// Prepares the data and the options. Also returns notes for the user.
    fn new(
        config: Config,
        ranks: usize,
        steps: u64,
        per_parameter: bool,
        printer: &Arc<Printer>,
    ) -> anyhow::Result<(Self, Vec<String>)> {
        if ranks < 2 {
            let problem =
                "--nproc-per-node: one rank has nothing to be compared with; use 2 or more";
            return Err(Error::InvalidInput(problem.into()).into());
        }
        let mut config = config.without_validation();
        // A file may have them for training.
        config.ddp.grad_accum_steps = 1;
        config.launch.bind = BindChoice::Auto;
        let (mut config, data) = open_data(config)?;
        let step_samples = ranks.saturating_mul(config.training.batch_size);
        let (dataset, note) = if config.ddp.exact_mean {
            unequal_batches(data.training, ranks, config.training.batch_size)?
        } else {
            whole_steps(data.training, ranks, config.training.batch_size)?
        };
        let step_terms = step_samples.saturating_mul(config.tokens_per_sample());
        let with_dp = !config.ddp.exact_mean;
        // One rank uses the same learning rate as N ranks.
        (config.optimization.lr, config.optimization.scale_lr) = (config.lr_for(ranks).0, false);
        config.data.num_samples = Some(dataset.len() as i64);
        let epoch_steps = config.steps_per_epoch(ranks);
        if config.ddp.exact_mean && steps < epoch_steps {
            return Err(Error::InvalidInput(format!(
                "--steps: {steps} are too few for --exact-mean: the ranks have batches of different size in the last \
                 step of an epoch, which is step {}; use {epoch_steps} or more",
                epoch_steps - 1
            ))
            .into());
        }
        config.training.max_epochs = steps.div_ceil(epoch_steps);
        config.validate_for(ranks)?;
        check_fault(&config, steps)?;
        let notes = note
            .into_iter()
            .chain(batch_norm_note(&config))
            .chain(exact_mean_note(&config))
            .chain(own_model_note(&config));
        let notes = notes.collect();
        let (config, printer) = (Arc::new(config), printer.clone());
        let verification =
            Self { config, dataset, ranks, steps, step_terms, with_dp, per_parameter, printer };
        Ok((verification, notes))
    }

    /// Joins the other processes, and compares with them.
    fn between_processes(
        self,
        notes: Vec<String>,
        launch: Launch,
        cuda: &Cuda,
    ) -> anyhow::Result<()> {
        let command = format!("verify --steps={}", self.steps);
        let joined = session::join_launch(&self.config, &command, launch, cuda, &self.printer)?;
        if joined.is_first() {
            let notes = joined.notes().into_iter().chain(notes);
            notes.for_each(|note| self.printer.info(&note));
        }
        let placement = joined.placement.clone();
        let spawn = session::configured_spawn(&joined, &self.config, &self.printer);
        let problems = spawn.run(move |rank| {
            let group = rank.init_process_group(placement.backend)?;
            self.compare(std::slice::from_ref(&placement), &Ranks::Processes(rank, group))
        })?;
        match problems.into_iter().flatten().next() {
            Some(problem) => bail!(problem),
            None => Ok(()),
        }
    }

    /// Compares all ways to train on these placements, and prints the results. Returns what is wrong, if anything is.
    /// All processes must call it, and the process of rank 0 gets the results.
    fn compare(&self, placements: &[Placement], on: &Ranks) -> anyhow::Result<Option<String>> {
        let Self { config, ranks, steps, printer, .. } = self;
        let whole = Variant {
            strategy: StrategyKind::Ddp,
            ranks: 1,
            batch_size: ranks.saturating_mul(config.training.batch_size),
            grad_accum_steps: 1,
        };
        let (mut head, mut device, mut compared, mut broken) = (None, None, 0, Vec::new());
        for placement in placements {
            let reference = self.train(placement, whole, *steps, on)?;
            if let (Some(reference), None) = (&reference, head) {
                let bound = Bound::of(reference, *steps, self.step_terms)?;
                if printer.format() == LogFormat::Text {
                    printer.lines(|out| write_head(config, *ranks, &bound, out))?;
                }
                head = Some(bound);
            }
            // One rank that accumulates does not communicate: it is compared once per device.
            let alone = device.replace(placement.devices[0]) != Some(placement.devices[0]);
            for variant in variants(config, *ranks, alone, self.with_dp) {
                let trained = self.train(placement, variant, *steps, on)?;
                let mut comparison = match (&reference, &trained, head) {
                    (Some(reference), Some(trained), Some(bound)) => {
                        Some(Comparison::new(placement, variant, reference, trained, bound))
                    }
                    _ => None, // rank 0 has them
                };
                compared += 1;
                if !on.agree(comparison.as_ref().map(|comparison| comparison.ok))? {
                    let step = bisect_divergence(*steps, |steps| {
                        let reference = self.train(placement, whole, steps, on)?;
                        let trained = self.train(placement, variant, steps, on)?;
                        let mut ok = None;
                        if let (Some(reference), Some(trained)) = (reference, trained) {
                            let bound = Bound::of(&reference, steps, self.step_terms)?;
                            ok = Some(
                                Comparison::new(placement, variant, &reference, &trained, bound).ok,
                            );
                        }
                        on.agree(ok)
                    })?;
                    if let Some(comparison) = &mut comparison {
                        comparison.first_step = Some(step);
                        broken.push((step, comparison.replicas_equal));
                    }
                }
                if let Some(comparison) = comparison {
                    printer.result(&comparison, |out| comparison.write(self.per_parameter, out))?;
                }
            }
        }
        if head.is_none() {
            return Ok(None); // rank 0 has the results
        }
        if let Some((step, _)) = broken.iter().min() {
            let count = broken.len();
            let why = match config.comm_hook() {
                Some(_) => "--comm-hook sends compressed gradients, so their mean is not exact".into(),
                None if broken.iter().all(|(_, replicas_equal)| *replicas_equal) => format!(
                    "all ranks have the same parameters, so the gradients that they average are wrong: check the \
                     samples of step {step} (sampler, loader), the divisor of the loss{}",
                    match config.program.model {
                        Some(_) => {
                            let name = config.program.name;
                            format!(", and the model of {name} for dropout and batch norm")
                        }
                        None => String::new(),
                    }
                ),
                None => "the ranks have different parameters: train with --check-replicas-every 1, which names the \
                         rank"
                    .into(),
            };
            return Ok(Some(format!(
                "{count} of {compared} comparisons differ by more than rounding explains, from step {step} on; {why}"
            )));
        }
        if printer.format() == LogFormat::Text {
            printer
                .info("all are within the bound; bits differ where sums are made in another order");
        }
        Ok(None)
    }

    /// Trains in one way. Returns the result of rank 0; `None` on other ranks that are processes.
    fn train(
        &self,
        placement: &Placement,
        variant: Variant,
        steps: u64,
        on: &Ranks,
    ) -> anyhow::Result<Option<RunResult>> {
        let Variant { strategy, ranks, batch_size, grad_accum_steps } = variant;
        let mut config = Config::clone(&self.config);
        (config.ddp.strategy, config.training.batch_size) = (strategy, batch_size);
        config.ddp.grad_accum_steps = grad_accum_steps as u64;
        if ranks == 1 || strategy == StrategyKind::Dp {
            config.ddp.comm_hook = CommHookKind::None; // only ranks that average gradients with `ddp` compress
        }
        if ranks == 1 {
            config.launch.inject_fault = None; // one rank with the whole batch is the reference
        }
        let mut placement = placement.clone();
        match on {
            Ranks::Processes(rank, group) if ranks > 1 => {
                return train_on(rank, group, &config, &self.dataset, steps);
            }
            Ranks::Processes(..) if placement.devices[0] == Device::Cpu => {
                placement.backend = Backend::Threaded;
            }
            _ => {}
        }
        placement.devices.truncate(ranks);
        let backend = placement.backend;
        let spawn = configure(Spawn::at(&placement), &config, &self.printer);
        let dataset = self.dataset.clone();
        let results = spawn.run(move |rank| {
            train_on(rank, &rank.init_process_group(backend)?, &config, &dataset, steps)
        })?;
        let result =
            results.into_iter().next().flatten().context("rank 0 has ended without a result")?;
        // Every process has trained the reference, so that none waits for another meanwhile.
        Ok(on.has_results().then_some(result))
    }
}

impl Ranks<'_> {
    fn has_results(&self) -> bool {
        match self {
            Self::Threads => true,
            Self::Processes(rank, _) => rank.rank() == 0,
        }
    }

    /// Returns on all ranks what rank 0 has found; the others have `None`.
    fn agree(&self, ok: Option<bool>) -> anyhow::Result<bool> {
        let ok = ok.unwrap_or(true);
        let Self::Processes(_, group) = self else { return Ok(ok) };
        let mut ok = vec![ok];
        group.broadcast_object_list(&mut ok, 0)?;
        Ok(ok == [true])
    }
}

/// Returns the first step, from 0, after which two ways of training differ. They must differ after `steps` steps.
/// Bisects, to train rarely. `is_ok` trains the given number of steps, and returns whether the ways agree.
fn bisect_divergence(
    steps: u64,
    is_ok: impl Fn(u64) -> anyhow::Result<bool>,
) -> anyhow::Result<u64> {
    // The ways agree after `lo` steps, and differ after `hi` steps.
    let (mut lo, mut hi) = (0, steps);
    while hi - lo > 1 {
        let middle = lo.midpoint(hi);
        if is_ok(middle)? {
            lo = middle;
        } else {
            hi = middle;
        }
    }
    Ok(hi - 1)
}

/// Returns where `ranks` ranks can run here, and notes on what is left out and why.
fn placements(
    config: &Config,
    ranks: usize,
    cuda: &Cuda,
) -> anyhow::Result<(Vec<Placement>, Vec<String>)> {
    let (mut placements, mut left_out) = (Vec::new(), Vec::new());
    let nproc = config.launch.nproc_per_node;
    let on_gpus = cuda.usable() > 0 && nproc != Nproc::Cpu;
    let no_gpu_because = match (&cuda.problem, nproc) {
        (_, Nproc::Cpu) => "ranks on the CPU were asked for",
        (Some(problem), _) => problem,
        _ => "no GPU is visible",
    };
    for backend in Backend::all() {
        let name = backend.name();
        let (all, choice) = (Nproc::Count(ranks), BackendChoice::Given(backend));
        let place = |cuda: &Cuda| {
            let placement = place_ranks(all, choice, BindChoice::Auto, cuda)?;
            check_shared_model(config, &placement).map(|()| placement)
        };
        match backend.devices() {
            _ if !backend.works_within_process() => {
                left_out.push(format!("without {name}: it needs processes; add --spawn=processes"))
            }
            Devices::OwnGpu if !on_gpus => {
                left_out.push(format!("without {name}: {no_gpu_because}"));
            }
            Devices::OwnGpu => match place(cuda) {
                Ok(placement) => placements.push(placement),
                Err(error) => left_out.push(format!("without {name}: {error}")),
            },
            Devices::CpuOrSharedGpu if on_gpus => {
                placements.extend([place(cuda)?, place(&Cuda::default())?]);
            }
            _ => placements.push(place(&Cuda::default())?),
        }
    }
    Ok((placements, left_out))
}

/// Returns the ways that must give the same result. `alone`: also one rank that accumulates `ranks` batches. `with_dp`: also
/// `dp`.
fn variants(config: &Config, ranks: usize, alone: bool, with_dp: bool) -> Vec<Variant> {
    let batch_size = config.training.batch_size;
    let variant = |strategy, ranks, batch_size, grad_accum_steps| Variant {
        strategy,
        ranks,
        batch_size,
        grad_accum_steps,
    };
    let (ddp, dp) = (StrategyKind::Ddp, StrategyKind::Dp);
    let mut variants = vec![variant(ddp, ranks, batch_size, 1)];
    if !config.model.sync_batch_norm {
        if alone {
            variants.insert(0, variant(ddp, 1, batch_size, ranks));
        }
        variants.push(variant(dp, ranks, batch_size, 1));
        if batch_size.is_multiple_of(2) {
            variants.push(variant(ddp, ranks, batch_size / 2, 2));
            variants.push(variant(dp, ranks, batch_size / 2, 2));
        }
    }
    variants.retain(|variant| variant.strategy == ddp || with_dp);
    variants
}

/// Trains on one rank. Returns the result on rank 0, `None` on the others.
fn train_on(
    rank: &Rank,
    group: &Rc<ProcessGroup>,
    config: &Config,
    dataset: &Arc<dyn Dataset>,
    steps: u64,
) -> anyhow::Result<Option<RunResult>> {
    let training = Training::new(rank, group, config, dataset, &StartPoint::default())?;
    let before = values(&training.ddp.state_dict())?;
    let options = config.trainer_options().for_steps(steps);
    let mut trainer = training.trainer(config, options)?;
    trainer.train(config.training.max_epochs)?;
    let ddp = trainer.ddp();
    group.synchronize()?;
    let Some(hashes) = group.gather_object(&ddp.parameters_hash()?, 0)? else { return Ok(None) };
    let replicas_equal = hashes.iter().all(|hash| *hash == hashes[0]);
    Ok(Some(RunResult { before, after: values(&ddp.state_dict())?, replicas_equal }))
}

/// Returns copies of all float32 tensors. Counters are left out.
fn values(tensors: &[(String, Tensor)]) -> Result<Vec<ParamValues>> {
    let copy = |(name, tensor): &(String, Tensor)| {
        let flat = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_flatten(0, -1)?;
        let shape = tensor.size();
        let width = if shape.len() > 1 { shape[1..].iter().product::<i64>() as usize } else { 1 };
        Ok(ParamValues { name: name.clone(), values: Vec::<f32>::try_from(flat)?, width })
    };
    let floats = tensors.iter().filter(|(_, tensor)| tensor.kind() == Kind::Float);
    floats.map(copy).collect::<Result<_, _>>().doing("reading the parameters")
}
