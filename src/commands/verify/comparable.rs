//! The checks of the options and the samples, and the notes on ways that are left out.

use std::sync::Arc;

use crate::config::{Config, OptimizerKind};
use crate::data::{Dataset, Subset};
use crate::error::{Error, Result};
use crate::models::ModelKind;
use crate::runtime::FaultKind;
use crate::trainer::Amp;

/// Refuses an injected fault that verify does not inject or reach.
pub(super) fn check_fault(config: &Config, steps: u64) -> Result<()> {
    let Some(fault) = config.launch.inject_fault else { return Ok(()) };
    let problem = match fault.kind {
        FaultKind::SkipSample if fault.step < steps => return Ok(()),
        FaultKind::SkipSample => {
            format!("there is no step {}; verify makes steps 0 to {}", fault.step, steps - 1)
        }
        _ => format!("verify injects skip-sample only, not {fault}; remove it"),
    };
    Err(Error::InvalidInput(format!("--inject-fault: {problem}")))
}

/// Refuses options with which N ranks do not equal one rank.
pub(super) fn check_comparable(config: &Config) -> Result<()> {
    let refuse = |problem: &str| Err(Error::InvalidInput(problem.into()));
    if config.model.dropout > 0.0 {
        return refuse(
            "--dropout: each rank draws its own mask, so verify cannot compare N ranks with one; remove it",
        );
    }
    if config.model.kind.uses("sync_batch_norm") && !config.model.sync_batch_norm {
        return refuse(&format!(
            "--model {}: each rank normalizes its own batch, so verify cannot compare N ranks with one; use \
             --sync-batch-norm",
            config.model.kind
        ));
    }
    if config.model.kind == ModelKind::Gpt && config.optimization.optimizer == OptimizerKind::AdamW
    {
        return refuse(
            "--optimizer adamw: with it rounding changes a gpt's parameters by more than verify's bound, because it \
             divides each gradient by its size; use --optimizer sgd",
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
             size; remove it"
        ));
    }
    if config.training.amp != Amp::Off {
        return refuse("--amp: verify's bound holds for float32, and --amp rounds more; remove it");
    }
    Ok(())
}

/// Returns as many samples as fill whole steps of all ranks, and a note if samples are left out. Padding and a
/// smaller last batch then have no effect.
pub(super) fn whole_steps(
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
pub(super) fn unequal_batches(
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

/// Returns a note on the ways that cannot be compared with batch norm. `None` without batch norm.
pub(super) fn batch_norm_note(config: &Config) -> Option<String> {
    config.model.sync_batch_norm.then(|| {
        "without dp, which has no --sync-batch-norm, and accumulation, where each smaller batch is normalized by \
         itself"
            .into()
    })
}

/// Returns a note on why `dp` is not compared. `None` if it is, or if [`batch_norm_note`] says so.
pub(super) fn exact_mean_note(config: &Config) -> Option<String> {
    let why = "without dp, whose ranks have batches of the same size";
    (config.ddp.exact_mean && !config.model.sync_batch_norm).then(|| why.into())
}

/// Returns a note on what would make a program's own model differ. `None` for a built-in model, which is checked.
pub(super) fn own_model_note(config: &Config) -> Option<String> {
    let name = config.program.name;
    config.program.model.is_some().then(|| {
        format!(
            "the model of {name} must have neither dropout nor batch norm here: with them N ranks differ from one"
        )
    })
}
