//! Values that are infinite or NaN: how they are found, and the rank, the step and the samples they come from.

use std::collections::BTreeSet;

use tch::{Device, Kind, Tensor};

use super::TrainContext;
use crate::data::{Batch, list_samples};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::models::Forward;
use crate::optim::FlatBuffer;

impl<M> TrainContext<M> {
    /// Returns whether gradients are checked before each step. A gradient scaler has a rule of its own.
    pub(super) fn checks_gradients(&self) -> bool {
        self.options.skip_nonfinite.is_some() && !self.scaler.is_enabled()
    }

    /// Returns whether steps may be skipped because they are not finite.
    pub(super) fn counts_skipped_steps(&self) -> bool {
        self.options.skip_nonfinite.is_some() || self.scaler.is_enabled()
    }

    /// Refuses a sum of losses that is not finite.
    pub(super) fn check_loss_sum(&self, sum: f64) -> Result<()> {
        if sum.is_finite() || self.scaler.is_enabled() {
            return Ok(());
        }
        let what = "the sum of the losses is not finite, in this step or since one before it";
        Err(self.not_finite_after_step(what.into(), true))
    }

    /// Refuses parameters that are not finite after the steps so far: no run could continue from them.
    pub(super) fn check_parameters(&self) -> Result<()> {
        // All ranks hold the same parameters; an error on rank 0 is enough to end the run.
        if self.group().rank() > 0 {
            return Ok(());
        }
        self.group().synchronize()?;
        let buffers = self.ddp.flat_buffers();
        let Some(name) = first_nonfinite(&buffers, |buffer| &buffer.parameters)? else {
            return Ok(());
        };
        let when = "after this step or since one before it";
        let what = format!("the parameter `{name}` is not finite, {when}");
        Err(self.not_finite_after_step(what, true))
    }

    /// Returns, as the end of a sentence, the parameter that is the cause; `None` if all parameters are finite.
    fn nonfinite_parameter(&self) -> Result<Option<String>> {
        let name = first_nonfinite(&self.ddp.flat_buffers(), |buffer| &buffer.parameters)?;
        let why =
            |name| format!(", because the parameter `{name}` is not finite after the steps before");
        Ok(name.map(why))
    }

    /// Returns the error of a closure with the samples of the batch `index` of this step, if they are known.
    pub(super) fn with_samples(&self, error: Error, index: Option<usize>) -> Error {
        let samples = index.and_then(|index| self.samples(index, 1).ok()).unwrap_or_default();
        closure_error(error, &samples)
    }

    /// Returns the error that `what` was found not to be finite after the last step.
    fn not_finite_after_step(&self, what: String, in_training: bool) -> Error {
        let (rank, step) = (self.group().rank(), self.state.step.saturating_sub(1));
        Error::NonFinite { what, in_training, rank, step, samples: String::new() }
    }

    /// Returns the error that `what` is not finite in this step for these samples, the end of the sentence.
    fn not_finite(&self, what: String, samples: String) -> Error {
        let (rank, step) = (self.group().rank(), self.state.step);
        Error::NonFinite { what, in_training: true, rank, step, samples }
    }

    /// Refuses a loss that is not finite, on the CPU: on a GPU each check would wait for the device, so the sum of the
    /// losses is checked instead. If the step may be skipped, [`backward`](Self::backward) makes the gradients of such a
    /// loss not finite either. `index` is the batch's index in the step.
    pub(super) fn check_loss(&self, loss: &Tensor, index: usize, batch: &Batch) -> Result<()> {
        let is_checked = loss.device() == Device::Cpu && !self.scaler.is_enabled();
        if self.checks_gradients() || !is_checked || is_finite(loss)? {
            return Ok(());
        }
        Err(self.nonfinite_loss(loss, index, batch)?)
    }

    /// Returns the error for a batch's loss that is not finite, with the samples whose data cause it, or else all of the
    /// batch.
    fn nonfinite_loss(&self, loss: &Tensor, index: usize, batch: &Batch) -> Result<Error> {
        let value = loss.f_double_value(&[]).doing("reading the loss")?;
        let what = format!("the loss is {value}");
        if let Some(why) = self.nonfinite_parameter()? {
            return Ok(self.not_finite(what + &why, String::new()));
        }
        let samples = self.samples(index, 1).unwrap_or_default();
        let found = samples_not_finite(batch, &samples)?;
        let samples = match &found[..] {
            [] => list(&samples),
            found => list(found) + ", whose data is not finite",
        };
        Ok(self.not_finite(what, samples))
    }

    /// Returns the error for a validation `loss` that is not finite. It is the same on all ranks, and rank 0 reports it.
    pub(super) fn nonfinite_validation(&self, loss: f64) -> Result<Error> {
        if self.group().rank() > 0 {
            self.group().barrier()?; // ends because rank 0 fails
        }
        let epoch = self.state.epoch.saturating_sub(1);
        let why = self.nonfinite_parameter()?.unwrap_or_default();
        let what = format!("the validation loss after epoch {epoch} is {loss}{why}");
        Ok(self.not_finite_after_step(what, false))
    }
}

impl<M: Forward> TrainContext<M> {
    /// Finds the rank whose loss or gradients made the mean non-finite. Each rank repeats its part of the step without
    /// the others. A collective: the rank that finds the cause in its own part returns first.
    pub(super) fn find_cause(
        &mut self,
        batches: &[Batch],
        buffers: &[FlatBuffer],
    ) -> anyhow::Result<Error> {
        self.ddp.zero_grad()?;
        if let Some(generator) = &self.generator {
            generator.begin_step(self.state.step)?; // the same dropout as before
        }
        let no_sync = self.ddp.no_sync();
        for (index, batch) in batches.iter().enumerate() {
            let own_step = self.own_step.clone();
            self.share.is_empty = batch.is_empty();
            let loss = match &own_step {
                Some(own) => own.run(self, batch, index)?, // with its backward
                None => self.loss_of(batch, Some(index))?,
            };
            self.group().synchronize()?;
            if !is_finite(&loss)? {
                return Ok(self.nonfinite_loss(&loss, index, batch)?);
            }
            if own_step.is_none() {
                self.ddp.backward(&loss)?;
            }
        }
        drop(no_sync);
        self.group().synchronize()?;
        if let Some(name) = first_nonfinite(buffers, |buffer| &buffer.gradients)? {
            let samples = self.samples(0, batches.len()).unwrap_or_default();
            let what = format!("the gradient of `{name}` is not finite");
            return Ok(self.not_finite(what, list(&samples)));
        }
        // Another rank has the cause and reports it. If no rank has, all ranks reach this barrier.
        self.group().barrier()?;
        let what = "the mean of all ranks' gradients is not finite";
        Ok(self.not_finite(what.into(), String::new()))
    }
}

/// Returns those of `samples`, the indices of the samples of `batch`, whose data are not finite.
fn samples_not_finite(batch: &Batch, samples: &[usize]) -> Result<Vec<usize>> {
    let mut rows = BTreeSet::new();
    if batch.is_empty() {
        return Ok(Vec::new());
    }
    for tensor in batch.more_inputs.iter().chain([&batch.inputs, &batch.targets]) {
        let found = || {
            let len = tensor.size().first().copied().unwrap_or(1);
            let wrong = tensor.f_isfinite()?.f_logical_not()?.f_reshape([len, -1])?;
            Vec::<i64>::try_from(wrong.f_any_dim(1, false)?.f_nonzero()?.f_view(-1)?)
        };
        rows.extend(found().doing(LOOKING)?);
    }
    Ok(rows.into_iter().filter_map(|row| samples.get(row as usize).copied()).collect())
}

const LOOKING: &str = "looking for values that are not finite";

/// Adds `samples` to the error of a closure of the user. Other errors stay as they are.
pub(super) fn closure_error(error: Error, samples: &[usize]) -> Error {
    match error {
        Error::Input { kind, problem } if !samples.is_empty() => {
            Error::Input { kind, problem: format!("{problem}; this happened{}", list(samples)) }
        }
        other => other,
    }
}

/// Lists the first few of `samples`, as the end of a sentence. Empty without samples.
fn list(samples: &[usize]) -> String {
    const MAX_LISTED_SAMPLES: usize = 8;
    match samples {
        [] => String::new(),
        some => format!(" for {}", list_samples(some, MAX_LISTED_SAMPLES)),
    }
}

/// Returns whether all of `tensor` is finite. Reads one number from the device.
pub(super) fn is_finite(tensor: &Tensor) -> Result<bool> {
    // A sum of finite values may still overflow, but hardly in float64.
    let sum = || tensor.f_sum(Kind::Double)?.f_double_value(&[]);
    sum().map(f64::is_finite).doing(LOOKING)
}

/// Returns the first parameter with a value that is not finite in the chosen tensor of its buffer; `None` if there is
/// none.
pub(super) fn first_nonfinite(
    buffers: &[FlatBuffer],
    tensor: impl Fn(&FlatBuffer) -> &Tensor,
) -> Result<Option<String>> {
    for buffer in buffers {
        let flat = tensor(buffer);
        // One pass with the kernel that sums float32 fastest. Only a sum that is not finite is looked at again.
        let sum = || flat.f_sum(flat.kind())?.f_double_value(&[]);
        if sum().doing(LOOKING)?.is_finite() {
            continue;
        }
        for span in &*buffer.layout.get() {
            if !is_finite(&span.of(flat)?)? {
                return Ok(Some(span.name.clone()));
            }
        }
    }
    Ok(None)
}
