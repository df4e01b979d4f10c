//! Losses and gradients that are infinite or NaN: finds the rank, the step and the samples.

use tch::nn::ModuleT;
use tch::{Device, Kind, Tensor};

use super::Trainer;
use crate::data::{Batch, DataLoader};
use crate::ddp::Strategy;
use crate::error::{Error, Result};
use crate::optim::{FlatBuffer, GradState};

impl<M: ModuleT> Trainer<M> {
    /// Checks the gradients before each step, and skips up to `steps` steps of the whole run whose losses or gradients
    /// are not finite. The next such step ends the run. With `None` only losses are checked, and the first that is not
    /// finite ends the run. With a [`GradScaler`](crate::GradScaler) nothing is checked here: it skips steps by its own
    /// rule.
    ///
    /// The averaged gradients are the same on all ranks, so all ranks decide alike without communication.
    ///
    /// # Errors
    /// [`Error::Input`] with [`DataParallel`](crate::DataParallel), where rank 0 alone has the gradients.
    pub fn skip_nonfinite(self, steps: Option<u64>) -> Result<Self> {
        if steps.is_some() && matches!(self.ddp, Strategy::Dp(_)) {
            return Err(Error::Input(
                "steps can be skipped with DistributedDataParallel only: with DataParallel rank 0 alone would know \
                 which"
                    .into(),
            ));
        }
        Ok(Self { skip_nonfinite: steps, ..self })
    }

    /// Returns whether gradients are checked before each step.
    pub(super) fn checks_gradients(&self) -> bool {
        self.skip_nonfinite.is_some() && !self.scaler.is_enabled()
    }

    /// Returns whether steps may be skipped.
    pub(crate) fn counts_skipped_steps(&self) -> bool {
        self.skip_nonfinite.is_some() || self.scaler.is_enabled()
    }

    /// Refuses the loss of the step's batch `number` if it is not finite. Checks on the CPU only: on a GPU each check
    /// would wait for the device, so the sum of the losses is checked instead.
    pub(super) fn check_loss(&self, loss: &Tensor, number: usize, batch: &Batch) -> Result<()> {
        let seen = loss.device() == Device::Cpu;
        if !seen || self.checks_gradients() || self.scaler.is_enabled() || is_finite(loss)? {
            return Ok(());
        }
        Err(self.nonfinite_loss(loss, number, batch)?)
    }

    /// Returns the loss from which to run backward. If gradients are checked and `loss` is not finite, the gradients
    /// are not finite either. Without this they might be finite: the square of a number may overflow where its double
    /// does not. Then one rank alone would detect the loss.
    pub(super) fn poison_if_nonfinite(&self, loss: &Tensor) -> Result<Tensor> {
        if !self.checks_gradients() {
            return Ok(loss.shallow_clone());
        }
        // Multiplies by 1, or by NaN. Reads nothing, so the host does not wait for a GPU.
        let pass_on = || {
            let value = loss.f_detach()?;
            loss.f_mul(&value.f_sub(&value)?.f_add_scalar(1.0)?)
        };
        pass_on().map_err(Error::torch("looking for what is not finite"))
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
        if self.ddp.group().rank() > 0 {
            return Ok(());
        }
        self.ddp.group().synchronize()?;
        let buffers = self.ddp.flat_buffers().unwrap_or_default();
        for buffer in &buffers {
            if !all_finite(&buffer.parameters)?
                && let Some(name) = first_nonfinite(&buffers, |it| &it.parameters)?
            {
                let what = format!(
                    "the parameter `{name}` is not finite, after this step or since one before it"
                );
                return Err(self.not_finite_since(what));
            }
        }
        Ok(())
    }

    /// Returns whether to skip this step, after backward; the same on all ranks.
    ///
    /// # Errors
    /// [`Error::NonFinite`] when the allowed number of steps was skipped already.
    pub(super) fn should_skip_step(&mut self, batches: &[Batch]) -> Result<bool> {
        if !self.checks_gradients() {
            return Ok(false);
        }
        let buffers = self.ddp.flat_buffers().unwrap_or_default();
        self.ddp.group().synchronize()?; // this wait ends if another rank fails; so do those below
        if are_finite(&buffers)? {
            return Ok(false);
        }
        if self.state.skipped_steps >= self.skip_nonfinite.unwrap_or(0) {
            return Err(self.find_cause(batches, &buffers)?);
        }
        self.state.skipped_steps += 1;
        self.state.skipped_samples += self.samples_of_all(batches);
        Ok(true)
    }

    /// Finds the rank whose loss or gradients made the mean non-finite. Each rank repeats its part of the step without
    /// the others. A collective: the rank that finds the cause in its own part returns first.
    fn find_cause(&mut self, batches: &[Batch], buffers: &[FlatBuffer]) -> Result<Error> {
        self.ddp.begin_step()?;
        if let Some(generator) = &self.generator {
            generator.begin_step(self.state.step)?; // the same dropout as before
        }
        let no_sync = self.ddp.no_sync();
        for (number, batch) in batches.iter().enumerate() {
            let loss = self.loss_of(batch)?;
            self.ddp.group().synchronize()?;
            if !is_finite(&loss)? {
                return self.nonfinite_loss(&loss, number, batch);
            }
            self.ddp.backward(&loss)?;
        }
        drop(no_sync);
        self.ddp.group().synchronize()?;
        if let Some(name) = first_nonfinite(buffers, |it| &it.gradients)? {
            return Ok(self.not_finite(
                format!("the gradient of `{name}` is not finite"),
                Some((0, batches.len())),
            ));
        }
        // Another rank has the cause and reports it. If no rank has, all ranks reach this barrier.
        self.ddp.group().barrier()?;
        Ok(self.not_finite("the mean of all ranks' gradients is not finite".into(), None))
    }

    /// Returns the error for a batch's loss that is not finite, with the samples that cause it if they are known.
    fn nonfinite_loss(&self, loss: &Tensor, number: usize, batch: &Batch) -> Result<Error> {
        let what = format!("the loss is {}", value(loss)?);
        if let Some(why) = self.wrong_parameter()? {
            return Ok(self.not_finite(what + &why, None));
        }
        let Ok(samples) = self.samples(number, 1) else { return Ok(self.not_finite(what, None)) };
        let NonFiniteRows { rows, why } = self.nonfinite_samples(batch)?;
        let wrong: Vec<usize> = rows.iter().filter_map(|&i| samples.get(i).copied()).collect();
        // The losses of all samples may overflow together where no single one does.
        let named = list(if wrong.is_empty() { &samples } else { &wrong });
        Ok(self.not_finite_of(what, &(named + why)))
    }

    /// Returns the error for a validation `loss` on the batches of `loader` that is not finite. Each rank evaluates its
    /// own samples once more. A collective: the rank that finds the cause in its own samples returns first.
    pub(super) fn wrong_validation(&self, loader: &DataLoader, loss: f64) -> Result<Error> {
        let (rank, step) = (self.ddp.group().rank(), self.state.step.saturating_sub(1));
        let error = |why: &str, samples: String| {
            let epoch = self.state.epoch.saturating_sub(1);
            let what = format!("the validation loss after epoch {epoch} is {loss}{why}");
            Error::NonFinite { what, in_training: false, rank, step, samples }
        };
        if let Some(why) = self.wrong_parameter()? {
            return Ok(error(&why, String::new()));
        }
        let (mut wrong, mut in_data) = (Vec::new(), true);
        for (number, batch) in loader.epoch(0)?.enumerate() {
            let NonFiniteRows { rows, why } = self.nonfinite_samples(&batch?)?;
            let samples = loader.samples(0, 0, number, 1)?;
            wrong.extend(rows.iter().filter_map(|&i| samples.get(i).copied()));
            in_data &= rows.is_empty() || why == IN_DATA;
        }
        if !wrong.is_empty() {
            wrong.sort_unstable();
            return Ok(error("", list(&wrong) + if in_data { IN_DATA } else { "" }));
        }
        // Another rank has the cause and reports it. If no rank has, all ranks reach this barrier.
        self.ddp.group().barrier()?;
        Ok(error(", though no sample's is: they are too large together", String::new()))
    }

    /// Returns, as the end of a sentence, the parameter that is the cause; `None` if all parameters are finite.
    fn wrong_parameter(&self) -> Result<Option<String>> {
        let wrong =
            first_nonfinite(&self.ddp.flat_buffers().unwrap_or_default(), |it| &it.parameters)?;
        let why =
            |name| format!(", because the parameter `{name}` is not finite after the steps before");
        Ok(wrong.map(why))
    }

    /// Returns the samples of `batch` whose data are not finite; if there are none, those whose losses are not.
    fn nonfinite_samples(&self, batch: &Batch) -> Result<NonFiniteRows> {
        let mut rows = not_finite_rows(&batch.inputs)?;
        rows.extend(not_finite_rows(&batch.targets)?);
        let why = if rows.is_empty() { "" } else { IN_DATA };
        if rows.is_empty() {
            // Evaluation mode: in training, batch norms would mix the samples, and those of other ranks.
            let losses = tch::no_grad(|| {
                let _autocast = self.amp.autocast(self.ddp.group().device())?;
                self.loss.of_each(&self.ddp.forward_t(&batch.inputs, false), &batch.targets)
            })?;
            rows = not_finite_rows(&losses)?;
        }
        rows.sort_unstable();
        rows.dedup();
        Ok(NonFiniteRows { rows, why })
    }

    /// Returns the error that `what` is not finite in this step. `batches` has the first of its batches and their
    /// number.
    fn not_finite(&self, what: String, batches: Option<(usize, usize)>) -> Error {
        let samples = batches.and_then(|(first, count)| self.samples(first, count).ok());
        self.not_finite_of(what, &samples.map_or(String::new(), |samples| list(&samples)))
    }

    /// Returns the error that `what` was found not to be finite after the last step.
    fn not_finite_since(&self, what: String) -> Error {
        let (rank, step) = (self.ddp.group().rank(), self.state.step.saturating_sub(1));
        Error::NonFinite { what, in_training: true, rank, step, samples: String::new() }
    }

    fn not_finite_of(&self, what: String, samples: &str) -> Error {
        let (rank, step) = (self.ddp.group().rank(), self.state.step);
        Error::NonFinite { what, in_training: true, rank, step, samples: samples.into() }
    }

    /// Returns this rank's samples in `count` batches of this step from batch `first`, by their indices in the data.
    pub(super) fn samples(&self, first: usize, count: usize) -> Result<Vec<usize>> {
        self.loader.samples(self.state.epoch, self.state.samples_seen, first, count)
    }
}

/// The samples of a batch that are not finite, in their data or their losses.
struct NonFiniteRows {
    /// Their indices in the batch, in order.
    rows: Vec<usize>,
    /// [`IN_DATA`], or empty.
    why: &'static str,
}

const IN_DATA: &str = ", in whose data there is something that is not finite";

/// Returns the indices in the first dimension of `tensor` where a value is not finite.
fn not_finite_rows(tensor: &Tensor) -> Result<Vec<usize>> {
    let rows = || {
        let len = tensor.size().first().copied().unwrap_or(1);
        let wrong = tensor.f_isfinite()?.f_logical_not()?.f_reshape([len, -1])?;
        let wrong = wrong.f_any_dim(1, false)?.f_nonzero()?.f_view(-1)?;
        Vec::<i64>::try_from(wrong)
    };
    let rows = rows().map_err(Error::torch("looking for what is not finite"))?;
    Ok(rows.into_iter().map(|row| row as usize).collect())
}

/// Lists the first few of `samples`, as the end of a sentence.
fn list(samples: &[usize]) -> String {
    const MAX_LISTED_ROWS: usize = 8;
    let shown: Vec<String> = samples.iter().take(MAX_LISTED_ROWS).map(usize::to_string).collect();
    let more = samples.len().saturating_sub(MAX_LISTED_ROWS);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let samples = if samples.len() == 1 { "sample" } else { "samples" };
    format!(" for {samples} {}{more}", shown.join(", "))
}

fn value(loss: &Tensor) -> Result<f64> {
    loss.f_double_value(&[]).map_err(Error::torch("reading the loss"))
}

/// Returns whether all of `tensor` is finite. Reads one number from the device.
fn is_finite(tensor: &Tensor) -> Result<bool> {
    // A sum of finite values may still overflow, but hardly in float64.
    let sum = || tensor.f_sum(Kind::Double)?.f_double_value(&[]);
    sum().map(f64::is_finite).map_err(Error::torch("looking for what is not finite"))
}

/// Returns whether all of a large `tensor` is finite.
fn all_finite(tensor: &Tensor) -> Result<bool> {
    // One pass with the kernel that sums float32 fastest. Only a sum that is not finite is checked again, in float64.
    let sum = || tensor.f_sum(tensor.kind())?.f_double_value(&[]);
    let sum = sum().map_err(Error::torch("looking for what is not finite"))?;
    Ok(sum.is_finite() || is_finite(tensor)?)
}

/// Returns whether the gradients of all parameters are finite.
fn are_finite(buffers: &[FlatBuffer]) -> Result<bool> {
    for buffer in buffers.iter().filter(|it| it.places.gradients() != GradState::Cleared) {
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
