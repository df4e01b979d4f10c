//! One training step, as callbacks see it.

use tch::Tensor;

use crate::data::Batch;

/// One training step of one rank.
#[derive(Debug)]
pub struct Step {
    /// The index of the step in the whole run, from 0.
    pub index: u64,
    /// The learning rate.
    pub lr: f64,
    /// This rank's batches. Gradients of more than one are accumulated; the last step of an epoch may have fewer.
    pub batches: Vec<Batch>,
    /// The mean loss of each batch that has had its forward pass, without dimensions, on the rank's device.
    pub losses: Vec<Tensor>,
    /// The norm of all gradients before they were clipped; `None` if they were not.
    pub grad_norm: Option<Tensor>,
    /// Whether this is the last step of its epoch.
    pub ends_epoch: bool,
    /// What each batch counts as, where that is not its number of samples.
    pub(super) counts: Vec<usize>,
    is_skipped: bool,
}

impl Step {
    pub(super) fn new(index: u64, lr: f64, batches: Vec<Batch>, ends_epoch: bool) -> Self {
        Self {
            index,
            lr,
            losses: Vec::with_capacity(batches.len()),
            batches,
            grad_norm: None,
            ends_epoch,
            counts: Vec::new(),
            is_skipped: false,
        }
    }

    /// Returns the number of this rank's samples.
    pub fn num_samples(&self) -> usize {
        self.batches.iter().map(Batch::len).sum()
    }

    /// Returns what the batch `batch` counts as: its samples, unless the criterion says otherwise.
    pub(super) fn count_of(&self, batch: usize) -> usize {
        self.counts.get(batch).copied().unwrap_or_else(|| self.batches[batch].len())
    }

    /// Returns what this rank's batches together count as.
    pub(super) fn count(&self) -> usize {
        (0..self.batches.len()).map(|batch| self.count_of(batch)).sum()
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
}
