//! Validation: loss and accuracy on samples that the model is not trained on.

use tch::nn::ModuleT;
use tch::{Kind, Tensor};

use super::{Loss, Trainer};
use crate::data::{Batch, DataLoader};
use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::process_group::ReduceOp;
use crate::records::ValidationMetrics;
use crate::telemetry::Sample;

/// The validation data of a trainer, and how often it is used.
#[derive(Debug)]
pub(super) struct Validation {
    loader: DataLoader,
    /// Epochs between validations.
    every: u64,
}

/// The result of a validation.
#[derive(Debug)]
pub(super) struct Validated {
    pub metrics: ValidationMetrics,
    /// Some of this rank's samples, the same each time. Empty unless they are pictures and the logger shows samples.
    pub samples: Vec<Sample>,
}

/// Maximum number of samples shown.
const MAX_SAMPLES: i64 = 8;

/// Minimum side of a picture, in pixels. Smaller squares are more likely the columns of a table.
const MIN_SIDE: i64 = 8;

impl<M: ModuleT> Trainer<M> {
    /// Validates on the batches of `loader` after every `every` epochs (at least 1), and after the last. Its sampler
    /// should be [`uneven`](crate::DistributedSampler::uneven), so that no sample is counted twice.
    #[must_use]
    pub fn validation(self, loader: DataLoader, every: u64) -> Self {
        Self { validation: Some(Validation { loader, every: every.max(1) }), ..self }
    }

    /// Stops training after `patience` validations in a row (at least 1) without a smaller loss than the best before
    /// them. `None` never stops. Follows `EarlyStopping` of PyTorch Lightning.
    #[must_use]
    pub fn patience(self, patience: Option<u64>) -> Self {
        Self { patience: patience.map(|it| it.max(1)), ..self }
    }

    /// Validates if due after the epoch that has just ended, or if that is the last of `max_epochs`. A collective.
    /// Returns `None` if not due.
    ///
    /// # Errors
    /// [`Error::NonFinite`] when the loss is not finite. The rank that has the samples names them.
    pub(super) fn validate_if_due(&mut self, max_epochs: u64) -> Result<Option<Validated>> {
        let Some(Validation { loader, every }) = &self.validation else { return Ok(None) };
        if !self.state.epoch.is_multiple_of(*every) && self.state.epoch < max_epochs {
            return Ok(None);
        }
        let epoch = self.state.epoch - 1; // the epoch that has just ended
        self.ddp.group().enter_phase(Operation::Validation, epoch);
        self.ddp.replicate()?;
        let device = self.ddp.group().device();
        // The sum of the losses, the number of correct predictions, and the number of samples.
        let mut totals = Tensor::f_zeros([3], (Kind::Double, device)).map_err(wrong())?;
        let mut samples = Vec::new();
        for batch in loader.epoch(0)? {
            let batch = batch?;
            let _autocast = self.amp.autocast(device)?;
            let of_batch = tch::no_grad(|| -> Result<Tensor> {
                let output = self.ddp.forward_t(&batch.inputs, false);
                let loss = self.loss.of(&output, &batch.targets)?;
                let more = MAX_SAMPLES - samples.len() as i64;
                if more > 0 && self.loss == Loss::CrossEntropy && self.shows_samples() {
                    samples.extend(pictures(&batch, &output, more).map_err(wrong())?);
                }
                let len = batch.len() as f64;
                let sums = || {
                    let right = match self.loss {
                        Loss::Mse => Tensor::f_zeros_like(&loss)?,
                        Loss::CrossEntropy => output
                            .f_argmax(-1, false)?
                            .f_eq_tensor(&batch.targets)?
                            .f_sum(Kind::Double)?,
                    };
                    let loss = loss.f_to_kind(Kind::Double)?.f_mul_scalar(len)?;
                    let count = loss.f_full_like(len)?;
                    Tensor::f_stack(&[loss, right.f_to_kind(Kind::Double)?, count], 0)
                };
                sums().map_err(wrong())
            })?;
            let _ = totals.f_add_(&of_batch).map_err(wrong())?;
        }
        let group = self.ddp.group();
        group.all_reduce(&mut totals, ReduceOp::Sum)?;
        group.synchronize()?;
        let totals = Vec::<f64>::try_from(totals).map_err(wrong())?;
        let loss = totals[0] / totals[2];
        if !loss.is_finite() {
            return Err(self.wrong_validation(loader, loss)?);
        }
        let best = self.state.best.as_ref().is_none_or(|best| loss < best.loss);
        let metrics = ValidationMetrics {
            step: self.state.step,
            epoch: self.state.epoch - 1,
            loss,
            accuracy: (self.loss == Loss::CrossEntropy).then(|| totals[1] / totals[2]),
            best,
        };
        self.state.validations_since_best += 1;
        if best {
            (self.state.best, self.state.validations_since_best) = (Some(metrics.clone()), 0);
        }
        self.ddp.group().end_phase();
        Ok(Some(Validated { metrics, samples }))
    }

    /// Returns whether the validation after the last step was the best so far.
    pub(super) fn is_best(&self) -> bool {
        self.state.best.as_ref().is_some_and(|best| best.step == self.state.step)
    }
}

/// Returns the first samples of `batch`, at most `max`, if they are square pictures of one class each; otherwise none.
fn pictures(batch: &Batch, output: &Tensor, max: i64) -> Result<Vec<Sample>, tch::TchError> {
    let inputs = batch.inputs.f_flatten(1, -1)?;
    let features = inputs.size()[1];
    let side = features.isqrt();
    if side < MIN_SIDE || side * side != features || batch.targets.dim() != 1 {
        return Ok(Vec::new());
    }
    let max = max.min(inputs.size()[0]);
    let pixels = inputs.f_narrow(0, 0, max)?.f_to_kind(Kind::Float)?;
    let classes = batch.targets.f_narrow(0, 0, max)?;
    let predictions = output.f_narrow(0, 0, max)?.f_argmax(-1, false)?;
    let pixels = Vec::<Vec<f32>>::try_from(pixels)?;
    let classes = Vec::<i64>::try_from(classes)?;
    let predictions = Vec::<i64>::try_from(predictions)?;
    let all = pixels.into_iter().zip(classes).zip(predictions);
    Ok(all.map(|((pixels, class), prediction)| Sample { pixels, class, prediction }).collect())
}

fn wrong() -> impl FnOnce(tch::TchError) -> Error {
    Error::torch("validation")
}
