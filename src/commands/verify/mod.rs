//! `ddp-mp verify`: compares N ranks with one rank of the N-fold batch, on the same samples.

mod difference;

use std::rc::Rc;
use std::sync::Arc;

use anyhow::Context;
use tch::{Device, Kind, Tensor};

use crate::config::{CommHookKind, Config, OptimizerKind, StrategyKind};
use crate::data::{Dataset, Subset};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::ffi::cuda::Cuda;
use crate::launch::{BackendChoice, BindChoice, Nproc, Placement, Rank, Spawn};
use crate::models::ModelKind;
use crate::process_group::{Backend, Devices, ProcessGroup};
use crate::runtime::FaultKind;
use crate::session::{StartPoint, Training, check_shared_model, configure, open_data, place_ranks};
use crate::telemetry::{LogFormat, Printer};
use crate::trainer::Amp;
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
/// Prints how far the parameters differ; with `per_parameter`, for each parameter.
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
    let ranks = match config.launch.nproc_per_node {
        Nproc::Count(ranks) => ranks,
        other => place_ranks(other, BackendChoice::Auto, BindChoice::Auto, cuda)?.devices.len(),
    };
    if ranks < 2 {
        let problem = "--nproc-per-node: one rank has nothing to be compared with; use 2 or more";
        return Err(Error::InvalidInput(problem.into()).into());
    }
    let mut config = config.without_validation();
    // A file may have them for training.
    config.ddp.grad_accum_steps = 1;
    config.launch.bind = BindChoice::Auto;
    let (mut config, data) = open_data(config)?;
    let step_samples = ranks.saturating_mul(config.training.batch_size);
    let (dataset, note) = match config.ddp.exact_mean {
        true => unequal_batches(data.training, ranks, config.training.batch_size)?,
        false => whole_steps(data.training, ranks, config.training.batch_size)?,
    };
    let step_terms = step_samples.saturating_mul(config.tokens_per_sample());
    let more_inputs = dataset.more_inputs(&[0]).map_err(Error::data(&[0]))?;
    let with_dp = !config.ddp.exact_mean && more_inputs.is_empty();
    // One rank uses the same learning rate as N ranks.
    (config.optimization.lr, config.optimization.scale_lr) = (config.lr_for(ranks).0, false);
    config.data.num_samples = Some(dataset.len() as i64);
    let epoch_steps = config.steps_per_epoch(ranks);
    if config.ddp.exact_mean && steps < epoch_steps {
        return Err(Error::InvalidInput(format!(
            "--steps: {steps} are too few for --exact-mean: the ranks have batches of different size in the last step \
             of an epoch, which is step {}; use {epoch_steps} or more",
            epoch_steps - 1
        ))
        .into());
    }
    config.training.max_epochs = steps.div_ceil(epoch_steps);
    config.validate_for(ranks)?;
    check_fault(&config, steps)?;
    let config = Arc::new(config);
    let (placements, left_out) = placements(&config, ranks, cuda)?;
    let notes = note
        .into_iter()
        .chain(left_out)
        .chain(batch_norm_note(&config))
        .chain(exact_mean_note(&config))
        .chain(own_model_note(&config))
        .chain(more_inputs_note(&config, with_dp))
        .chain(config.idle_hook_warning(steps));
    notes.for_each(|note| printer.info(&note));

    let train = |placement: &Placement, variant, steps| {
        trained(placement, variant, &config, &dataset, steps, printer)
    };
    let (mut bound, mut device, mut compared, mut broken) = (None, None, 0, Vec::new());
    for placement in &placements {
        let whole = Variant {
            strategy: StrategyKind::Ddp,
            ranks: 1,
            batch_size: step_samples,
            grad_accum_steps: 1,
        };
        let reference = train(placement, whole, steps)?;
        let bound = *match &mut bound {
            Some(bound) => bound,
            none => {
                let bound = none.insert(Bound::of(&reference, steps, step_terms)?);
                if printer.format() == LogFormat::Text {
                    printer.lines(|out| write_head(&config, ranks, bound, out))?;
                }
                bound
            }
        };
        // One rank that accumulates does not communicate: it is compared once per device.
        let alone = device.replace(placement.devices[0]) != Some(placement.devices[0]);
        for variant in variants(&config, ranks, alone, with_dp) {
            let trained = train(placement, variant, steps)?;
            let mut comparison = Comparison::new(placement, variant, &reference, &trained, bound);
            compared += 1;
            if !comparison.ok {
                let step = bisect_divergence(steps, |steps| {
                    let reference = train(placement, whole, steps)?;
                    let trained = train(placement, variant, steps)?;
                    let bound = Bound::of(&reference, steps, step_terms)?;
                    Ok(Comparison::new(placement, variant, &reference, &trained, bound).ok)
                })?;
                comparison.first_step = Some(step);
                broken.push((step, comparison.replicas_equal));
            }
            printer.result(&comparison, |out| comparison.write(per_parameter, out))?;
        }
    }
    if let Some((step, _)) = broken.iter().min() {
        let count = broken.len();
        let why = match config.comm_hook() {
            Some(_) => "--comm-hook sends compressed gradients, so their mean is not exact".into(),
            None if broken.iter().all(|(_, replicas_equal)| *replicas_equal) => format!(
                "all ranks have the same parameters, so the gradients that they average are wrong: check the samples \
                 of step {step} (sampler, loader), the divisor of the loss{}",
                match config.program.model {
                    Some(_) => format!(", and the model of {} for dropout and batch norm", config.program.name),
                    None => String::new(),
                }
            ),
            None => "the ranks have different parameters: train with --check-replicas-every 1, which names the rank".into(),
        };
        anyhow::bail!(
            "{count} of {compared} comparisons are beyond what rounding explains, from step {step} on; {why}"
        );
    }
    if printer.format() == LogFormat::Text {
        printer.info("all are within the bound; bits differ where sums are made in another order");
    }
    Ok(())
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

/// Refuses an injected fault that verify does not inject or reach.
fn check_fault(config: &Config, steps: u64) -> Result<()> {
    let Some(fault) = config.launch.inject_fault else { return Ok(()) };
    let problem = match fault.kind {
        FaultKind::SkipSample if fault.step < steps => return Ok(()),
        FaultKind::SkipSample => {
            format!("there is no step {}; verify makes steps 0 to {}", fault.step, steps - 1)
        }
        _ => format!(
            "verify injects skip-sample only, and this is {fault}; leave it out of the command line and of the file"
        ),
    };
    Err(Error::InvalidInput(format!("--inject-fault: {problem}")))
}

/// Refuses options with which N ranks do not equal one rank.
fn check_comparable(config: &Config) -> Result<()> {
    let refuse = |problem: &str| Err(Error::InvalidInput(problem.into()));
    if config.model.dropout > 0.0 {
        return refuse(
            "--dropout: each rank draws its own, so N ranks are not one rank with the N-fold batch; leave it out of \
             the command line and of the file",
        );
    }
    if config.model.kind.uses("sync_batch_norm") && !config.model.sync_batch_norm {
        return refuse(&format!(
            "--model {}: each rank normalizes its own batch, so N ranks are not one rank with the N-fold batch; use \
             --sync-batch-norm",
            config.model.kind
        ));
    }
    if config.model.kind == ModelKind::Gpt && config.optimization.optimizer == OptimizerKind::AdamW
    {
        return refuse(
            "--optimizer adamw: it divides each gradient by its size, and some of a gpt's have the size of their \
             rounding, so rounding changes the result by more than the bound; use --optimizer sgd",
        );
    }
    let drops = [
        ("--drop-last", config.data.drop_last),
        ("--drop-last-batch", config.data.drop_last_batch),
    ];
    if config.ddp.exact_mean
        && let Some((flag, _)) = drops.iter().find(|(_, is_set)| *is_set)
    {
        return refuse(&format!(
            "{flag}: with --exact-mean verify needs the samples that it drops, because they make batches of different \
             size; leave it out of the command line and of the file"
        ));
    }
    if config.training.amp != Amp::Off {
        return refuse(
            "--amp: verify's bound holds for float32, and --amp rounds more; leave it out of the command line and of \
             the file",
        );
    }
    Ok(())
}

/// Returns as many samples as fill whole steps of all ranks, and a note if samples are left out. Padding and a
/// smaller last batch then have no effect.
fn whole_steps(
    dataset: Arc<dyn Dataset>,
    ranks: usize,
    batch_size: usize,
) -> Result<(Arc<dyn Dataset>, Option<String>)> {
    let (len, step_samples) = (dataset.len(), ranks.saturating_mul(batch_size));
    match len - len % step_samples {
        0 => Err(Error::InvalidInput(format!(
            "{len} samples are less than a step of {ranks} ranks with batch {batch_size}; use more samples, or a \
             smaller --batch-size"
        ))),
        whole if whole == len => Ok((dataset, None)),
        whole => {
            let note = format!("the first {whole} of {len} samples, which make whole steps");
            Ok((Arc::new(Subset::new(dataset, (0..whole).collect())), Some(note)))
        }
    }
}

/// Returns as many samples as fill two whole steps of all ranks and a smaller one, and a note. In the smaller step
/// some ranks have one sample more than others.
fn unequal_batches(
    dataset: Arc<dyn Dataset>,
    ranks: usize,
    batch_size: usize,
) -> Result<(Arc<dyn Dataset>, Option<String>)> {
    let (len, step_samples) = (dataset.len(), ranks.saturating_mul(batch_size));
    let most = len.min(step_samples.saturating_mul(2).saturating_add(step_samples / 2));
    let count = if most.is_multiple_of(ranks) { most - 1 } else { most };
    if count < ranks {
        return Err(Error::InvalidInput(format!(
            "--exact-mean: {len} samples are too few for batches of different size on {ranks} ranks; use {} or more",
            ranks + 1
        )));
    }
    let note = format!(
        "the first {count} of {len} samples: in the last step of an epoch the ranks have batches of different size"
    );
    Ok((Arc::new(Subset::new(dataset, (0..count).collect())), Some(note)))
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
            _ if !backend.works_within_process() => left_out
                .push(format!("without {name}: it is for several processes, and this is one")),
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

/// Returns a note on the ways that cannot be compared with batch norm. `None` without batch norm.
fn batch_norm_note(config: &Config) -> Option<String> {
    config.model.sync_batch_norm.then(|| {
        "without dp, which has no --sync-batch-norm, and accumulation, where each smaller batch is normalized by \
         itself"
            .into()
    })
}

/// Returns a note on why `dp` is not compared. `None` if it is, or if [`batch_norm_note`] says so.
fn exact_mean_note(config: &Config) -> Option<String> {
    let why = "without dp, whose ranks have batches of the same size";
    (config.ddp.exact_mean && !config.model.sync_batch_norm).then(|| why.into())
}

/// Returns a note on why `dp` is not compared with samples of several inputs. `None` if it is, or for another reason.
fn more_inputs_note(config: &Config, with_dp: bool) -> Option<String> {
    let why = "without dp, which sends one input to each rank";
    (!with_dp && !config.ddp.exact_mean).then(|| why.into())
}

/// Returns a note on what would make a program's own model differ. `None` for a built-in model, which is checked.
fn own_model_note(config: &Config) -> Option<String> {
    let name = config.program.name;
    config.program.model.is_some().then(|| {
        format!(
            "the model of {name} must have neither dropout nor batch norm here: with them N ranks differ from one"
        )
    })
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

/// Trains in one way. Returns the result of rank 0.
fn trained(
    placement: &Placement,
    variant: Variant,
    config: &Arc<Config>,
    dataset: &Arc<dyn Dataset>,
    steps: u64,
    printer: &Arc<Printer>,
) -> anyhow::Result<RunResult> {
    let mut placement = placement.clone();
    placement.devices.truncate(variant.ranks);
    let backend = placement.backend;
    let Variant { strategy, batch_size, grad_accum_steps, .. } = variant;
    let mut config = Config::clone(config);
    (config.ddp.strategy, config.training.batch_size) = (strategy, batch_size);
    config.ddp.grad_accum_steps = grad_accum_steps as u64;
    if variant.ranks == 1 || strategy == StrategyKind::Dp {
        config.ddp.comm_hook = CommHookKind::None; // only ranks that average gradients with `ddp` compress
    }
    if variant.ranks == 1 {
        config.launch.inject_fault = None; // one rank with the whole batch is the reference
    }
    let spawn = configure(Spawn::at(&placement), &config, printer);
    let dataset = dataset.clone();
    let results = spawn.run(move |rank| {
        train_on(rank, &rank.init_process_group(backend)?, &config, &dataset, steps)
    })?;
    results.into_iter().next().flatten().context("rank 0 has ended without a result")
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
    ddp.replicate()?;
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
