//! How well a model does on samples that it is not trained on.

use tch::nn::ModuleT;
use tch::{Kind, Tensor};

use super::{Loss, Trainer};
use crate::data::DataLoader;
use crate::error::{Error, Result};
use crate::observe::ValidationMetrics;
use crate::process_group::ReduceOp;

/// What a trainer validates on, and when.
#[derive(Debug)]
pub(super) struct Validation {
    loader: DataLoader,
    /// After each so many epochs.
    every: u64,
}

impl<M: ModuleT> Trainer<M> {
    /// Validates on the batches of `loader` after each `every` epochs, at least one. For no sample to be counted
    /// twice its sampler is [`uneven`](crate::DistributedSampler::uneven).
    #[must_use]
    pub fn validation(self, loader: DataLoader, every: u64) -> Self {
        Self { validation: Some(Validation { loader, every: every.max(1) }), ..self }
    }

    /// Validates, if it is time to after the epoch that has just ended. A collective.
    pub(super) fn validate_if_due(&self) -> Result<Option<ValidationMetrics>> {
        let Some(Validation { loader, every }) = &self.validation else { return Ok(None) };
        if !self.state.epoch.is_multiple_of(*every) {
            return Ok(None);
        }
        self.ddp.replicate()?;
        let device = self.ddp.group().device();
        // The sum of the losses, how many are right, and how many there are.
        let mut totals = Tensor::f_zeros([3], (Kind::Double, device)).map_err(wrong())?;
        for batch in loader.epoch(0)? {
            let batch = batch?;
            let _autocast = self.amp.autocast(device)?;
            let of_batch = tch::no_grad(|| -> Result<Tensor> {
                let output = self.ddp.forward_t(&batch.inputs, false);
                let loss = self.loss.of(&output, &batch.targets)?;
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
        Ok(Some(ValidationMetrics {
            step: self.state.step,
            epoch: self.state.epoch - 1,
            loss: totals[0] / totals[2],
            accuracy: (self.loss == Loss::CrossEntropy).then(|| totals[1] / totals[2]),
        }))
    }
}

fn wrong() -> impl FnOnce(tch::TchError) -> Error {
    Error::torch("validation")
}
