//! Values that are infinite or NaN: how they are found, and the rank, the step and the samples they come from.

use tch::{Device, Kind, Tensor};

use super::TrainContext;
use crate::data::{Batch, DataLoader};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::models::Forward;
use crate::optim::{FlatBuffer, GradState, average_gradients};
use crate::process_group::ProcessGroup;

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
        let what =
            "the sum of the losses is not finite, in this step or since one before it".into();
        Err(self.not_finite_since(what))
    }

    /// Refuses parameters that are not finite after the steps so far: no run could continue from them.
    pub(super) fn check_parameters(&self) -> Result<()> {
        // All ranks hold the same parameters; an error on rank 0 is enough to end the run.
        if self.group().rank() > 0 {
            return Ok(());
        }
        self.group().synchronize()?;
        let buffers = self.ddp.flat_buffers();
        for buffer in &buffers {
            if !all_finite(&buffer.parameters)?
                && let Some(name) = first_nonfinite(&buffers, |buffer| &buffer.parameters)?
            {
                let what = format!(
                    "the parameter `{name}` is not finite, after this step or since one before it"
                );
                return Err(self.not_finite_since(what));
            }
        }
        Ok(())
    }

    /// Returns, as the end of a sentence, the parameter that is the cause; `None` if all parameters are finite.
    fn nonfinite_parameter(&self) -> Result<Option<String>> {
        let buffers = self.ddp.flat_buffers();
        let name = first_nonfinite(&buffers, |buffer| &buffer.parameters)?;
        let why =
            |name| format!(", because the parameter `{name}` is not finite after the steps before");
        Ok(name.map(why))
    }

    /// Returns the error that `what` is not finite in this step. `batches` has the first of its batches and their
    /// number.
    fn not_finite(&self, what: String, batches: Option<(usize, usize)>) -> Error {
        let samples = batches.and_then(|(first, count)| self.samples(first, count).ok());
        self.not_finite_for(what, samples.map_or(String::new(), |samples| list(&samples)))
    }

    /// Returns the error of a closure with the samples of batch `number` of this step, if they are known.
    pub(super) fn with_samples(&self, error: Error, number: Option<usize>) -> Error {
        let samples = number.and_then(|number| self.samples(number, 1).ok()).unwrap_or_default();
        closure_error(error, &samples)
    }

    /// Returns the error that `what` was found not to be finite after the last step.
    fn not_finite_since(&self, what: String) -> Error {
        let (rank, step) = (self.group().rank(), self.state.step.saturating_sub(1));
        Error::NonFinite { what, in_training: true, rank, step, samples: String::new() }
    }

    /// Returns the error that `what` is not finite in this step for these samples, the end of the sentence.
    fn not_finite_for(&self, what: String, samples: String) -> Error {
        let (rank, step) = (self.group().rank(), self.state.step);
        Error::NonFinite { what, in_training: true, rank, step, samples }
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
        for (number, batch) in batches.iter().enumerate() {
            let own_step = self.own_step.clone();
            self.share.is_empty = batch.is_empty();
            let loss = match &own_step {
                Some(own) => own.run(self, batch, number)?, // with its backward
                None => self.loss_of(batch, Some(number))?,
            };
            self.group().synchronize()?;
            if !is_finite(&loss)? {
                return Ok(self.nonfinite_loss(&loss, number, batch)?);
            }
            if own_step.is_none() {
                self.ddp.backward(&loss)?;
            }
        }
        drop(no_sync);
        self.group().synchronize()?;
        if let Some(name) = first_nonfinite(buffers, |buffer| &buffer.gradients)? {
            return Ok(self.not_finite(
                format!("the gradient of `{name}` is not finite"),
                Some((0, batches.len())),
            ));
        }
        // Another rank has the cause and reports it. If no rank has, all ranks reach this barrier.
        self.group().barrier()?;
        Ok(self.not_finite("the mean of all ranks' gradients is not finite".into(), None))
    }

    /// Refuses a loss that is not finite, on the CPU: on a GPU each check would wait for the device, so the sum of the
    /// losses is checked instead.
    pub(super) fn check_loss(&self, loss: &Tensor, number: usize, batch: &Batch) -> Result<()> {
        let is_checked = loss.device() == Device::Cpu && !self.scaler.is_enabled();
        if self.checks_gradients() || !is_checked || is_finite(loss)? {
            return Ok(());
        }
        Err(self.nonfinite_loss(loss, number, batch)?)
    }

    /// Returns the error for a batch's loss that is not finite, with the samples that cause it if they are known.
    /// `number` is the batch's number in the step.
    fn nonfinite_loss(&self, loss: &Tensor, number: usize, batch: &Batch) -> Result<Error> {
        let value = loss.f_double_value(&[]).doing("reading the loss")?;
        let what = format!("the loss is {value}");
        if let Some(why) = self.nonfinite_parameter()? {
            return Ok(self.not_finite(what + &why, None));
        }
        let Ok(samples) = self.samples(number, 1) else { return Ok(self.not_finite(what, None)) };
        let NonFiniteRows { rows, why } = self.nonfinite_rows(batch, self.own_step.is_none())?;
        let found: Vec<usize> = rows.iter().filter_map(|&i| samples.get(i).copied()).collect();
        // The losses of all samples may overflow together where no single one does.
        let named = list(if found.is_empty() { &samples } else { &found });
        Ok(self.not_finite_for(what, named + why))
    }

    /// Returns the error for a validation `loss` on the batches of `loader` that is not finite. Each rank evaluates its
    /// own samples once more. A collective: the rank that finds the cause in its own samples returns first.
    pub(super) fn nonfinite_validation(&self, loader: &DataLoader, loss: f64) -> Result<Error> {
        let (rank, step) = (self.group().rank(), self.state.step.saturating_sub(1));
        let error = |why: &str, samples: String| {
            let epoch = self.state.epoch.saturating_sub(1);
            let what = format!("the validation loss after epoch {epoch} is {loss}{why}");
            Error::NonFinite { what, in_training: false, rank, step, samples }
        };
        if let Some(why) = self.nonfinite_parameter()? {
            return Ok(error(&why, String::new()));
        }
        let (mut found, mut in_data) = (Vec::new(), true);
        for (number, batch) in loader.epoch(0)?.enumerate() {
            let NonFiniteRows { rows, why } = self.nonfinite_rows(&batch?, true)?;
            let samples = loader.samples(0, 0, number, 1)?;
            found.extend(rows.iter().filter_map(|&i| samples.get(i).copied()));
            in_data &= rows.is_empty() || why == NON_FINITE_DATA;
        }
        if !found.is_empty() {
            found.sort_unstable();
            return Ok(error("", list(&found) + if in_data { NON_FINITE_DATA } else { "" }));
        }
        // Another rank has the cause and reports it. If no rank has, all ranks reach this barrier.
        self.group().barrier()?;
        Ok(error(", though each sample's loss is finite: their sum is too large", String::new()))
    }

    /// Returns the samples of `batch` whose data are not finite; if there are none, those whose losses are not, if
    /// `has_losses`: the program's own step computes none for a sample.
    fn nonfinite_rows(&self, batch: &Batch, has_losses: bool) -> Result<NonFiniteRows> {
        let mut rows = rows_not_finite(&batch.inputs)?;
        for tensor in batch.more_inputs.iter().chain([&batch.targets]) {
            rows.extend(rows_not_finite(tensor)?);
        }
        let why = if rows.is_empty() { "" } else { NON_FINITE_DATA };
        if rows.is_empty() && has_losses {
            // Evaluation mode: in training, batch norms would mix the samples, also of other ranks.
            let losses = tch::no_grad(|| {
                let _autocast = self.autocast()?;
                self.criterion.per_sample(&self.forward(batch, false), &batch.targets)
            })?;
            rows = rows_not_finite(&losses)?;
        }
        rows.sort_unstable();
        rows.dedup();
        Ok(NonFiniteRows { rows, why })
    }
}

/// The samples of a batch that are not finite, in their data or their losses.
struct NonFiniteRows {
    /// Their indices in the batch, in order.
    rows: Vec<usize>,
    /// [`NON_FINITE_DATA`], or empty.
    why: &'static str,
}

const NON_FINITE_DATA: &str = ", whose data is not finite";

/// Returns the indices in the first dimension of `tensor` where a value is not finite.
fn rows_not_finite(tensor: &Tensor) -> Result<Vec<usize>> {
    let rows = || {
        let len = tensor.size().first().copied().unwrap_or(1);
        let wrong = tensor.f_isfinite()?.f_logical_not()?.f_reshape([len, -1])?;
        let wrong = wrong.f_any_dim(1, false)?.f_nonzero()?.f_view(-1)?;
        Vec::<i64>::try_from(wrong)
    };
    let rows = rows().doing("looking for values that are not finite")?;
    Ok(rows.into_iter().map(|row| row as usize).collect())
}

/// Adds `samples` to the error of a closure of the user. Other errors stay as they are.
pub(super) fn closure_error(error: Error, samples: &[usize]) -> Error {
    match error {
        Error::InvalidInput(problem) if !samples.is_empty() => {
            Error::InvalidInput(format!("{problem}; this happened{}", list(samples)))
        }
        other => other,
    }
}

/// Lists the first few of `samples`, as the end of a sentence.
fn list(samples: &[usize]) -> String {
    const MAX_LISTED_SAMPLES: usize = 8;
    let listed: Vec<String> =
        samples.iter().take(MAX_LISTED_SAMPLES).map(usize::to_string).collect();
    let more = samples.len().saturating_sub(MAX_LISTED_SAMPLES);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let samples = if samples.len() == 1 { "sample" } else { "samples" };
    format!(" for {samples} {}{more}", listed.join(", "))
}

/// Returns whether all of `tensor` is finite. Reads one number from the device.
pub(super) fn is_finite(tensor: &Tensor) -> Result<bool> {
    // A sum of finite values may still overflow, but hardly in float64.
    let sum = || tensor.f_sum(Kind::Double)?.f_double_value(&[]);
    sum().map(f64::is_finite).doing("looking for values that are not finite")
}

/// Returns whether all of a large `tensor` is finite.
fn all_finite(tensor: &Tensor) -> Result<bool> {
    // One pass with the kernel that sums float32 fastest. Only a sum that is not finite is checked again, in float64.
    let sum = || tensor.f_sum(tensor.kind())?.f_double_value(&[]);
    let sum = sum().doing("looking for values that are not finite")?;
    Ok(sum.is_finite() || is_finite(tensor)?)
}

/// Returns whether the averaged gradients of all parameters are finite. A collective if the ranks share the
/// model or partition the optimizer.
pub(super) fn gradients_finite(buffers: &[FlatBuffer], group: &ProcessGroup) -> Result<bool> {
    average_gradients(buffers)?;
    group.synchronize()?; // this wait ends if another rank fails; so do those below
    for buffer in buffers.iter().filter(|buffer| buffer.places.gradients() != GradState::Cleared) {
        if !all_finite(&buffer.gradients)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the first parameter with a value that is not finite in the chosen tensor of its buffer; `None` if there is
/// none.
fn first_nonfinite(
    buffers: &[FlatBuffer],
    tensor: impl Fn(&FlatBuffer) -> &Tensor,
) -> Result<Option<String>> {
    for buffer in buffers {
        for place in &*buffer.places.get() {
            if !is_finite(&place.of(tensor(buffer))?)? {
                return Ok(Some(place.name.clone()));
            }
        }
    }
    Ok(None)
}
