//! One training step, as callbacks see it.

use tch::Tensor;

use crate::data::Batch;
use crate::error::Result;
use crate::ffi::TorchResult;

/// One training step of one rank.
#[derive(Debug)]
pub struct Step {
    /// The number of the step in the whole run, from 0.
    pub number: u64,
    /// The learning rate.
    pub lr: f64,
    /// This rank's batches. Gradients of more than one are accumulated; the last step of an epoch may have fewer.
    pub batches: Vec<Batch>,
    /// The mean loss of each batch that has had its backward, without dimensions, on the rank's device.
    pub losses: Vec<Tensor>,
    /// The norm of all gradients before they were clipped; `None` if they were not.
    pub grad_norm: Option<Tensor>,
    /// Whether this is the last step of its epoch.
    pub ends_epoch: bool,
    is_skipped: bool,
}

impl Step {
    pub(super) fn new(number: u64, lr: f64, batches: Vec<Batch>, ends_epoch: bool) -> Self {
        let losses = Vec::with_capacity(batches.len());
        Self { number, lr, batches, losses, grad_norm: None, ends_epoch, is_skipped: false }
    }

    /// Returns the number of this rank's samples.
    pub fn num_samples(&self) -> usize {
        self.batches.iter().map(Batch::len).sum()
    }

    /// Leaves out the optimizer in this step, which counts as skipped; its losses do not count. Buffers that the forward
    /// pass has changed stay changed. For [`Callback::on_after_backward`](super::Callback::on_after_backward); all ranks
    /// must call this alike.
    pub fn skip(&mut self) {
        self.is_skipped = true;
    }

    /// Returns whether a callback has skipped the step.
    pub fn is_skipped(&self) -> bool {
        self.is_skipped
    }

    /// Returns the share of batch number `batch` in the mean over the step: `loss`, the batch's mean, divided by the
    /// number of batches. With `exact_mean` each sample has the same share, also where batches have different sizes.
    pub(super) fn share_of_mean(
        &self,
        loss: Tensor,
        batch: usize,
        exact_mean: bool,
    ) -> Result<Tensor> {
        let divisor = match (exact_mean, self.batches.len(), self.num_samples()) {
            (_, 1, _) | (true, _, 0) => return Ok(loss),
            (false, batches, _) => batches as f64,
            (true, _, samples) => samples as f64 / self.batches[batch].len() as f64, // infinite for an empty batch
        };
        if divisor == 1.0 {
            return Ok(loss);
        }
        loss.f_div_scalar(divisor).doing("div")
    }
}
