//! The loss of an epoch in progress.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::{TorchResult, add_scaled};
use crate::process_group::{ProcessGroup, ReduceOp};

/// The sum of the losses of an epoch's samples, kept on the device: reading it at every step would make the host wait
/// for the GPU.
#[derive(Debug)]
pub(super) struct LossSum {
    /// The sum and the number of samples; allocated once.
    totals: Tensor,
    /// Views of `totals`: the sum and the number of samples.
    sum: Tensor,
    count: Tensor,
    one: Tensor,
}

impl LossSum {
    pub(super) fn new(device: Device) -> Result<Self> {
        let allocate = || {
            let totals = Tensor::f_zeros([2], (Kind::Double, device))?;
            let (sum, count) = (totals.f_narrow(0, 0, 1)?, totals.f_narrow(0, 1, 1)?);
            Ok(Self { totals, sum, count, one: Tensor::f_ones([1], (Kind::Double, device))? })
        };
        allocate().doing("allocating the loss")
    }

    /// Adds the mean loss of `samples` samples.
    pub(super) fn add(&mut self, mean: &Tensor, samples: usize) -> Result<()> {
        add_scaled(&self.sum, mean, samples as f64)
    }

    /// Returns this rank's sum; waits for the device.
    pub(super) fn sum(&self, group: &ProcessGroup) -> Result<f64> {
        group.synchronize()?;
        self.sum.f_double_value(&[0]).doing("reading the loss")
    }

    /// Continues from a `sum` that [`sum`](Self::sum) returned.
    pub(super) fn set_sum(&mut self, sum: f64) -> Result<()> {
        let _ = self.totals.f_zero_().doing("zero_")?;
        add_scaled(&self.sum, &self.one, sum)
    }

    /// Counts `samples` samples: this rank's, or those of all ranks if only one rank counts.
    pub(super) fn count(&mut self, samples: usize) -> Result<()> {
        add_scaled(&self.count, &self.one, samples as f64)
    }

    /// Returns the mean loss over the samples of all ranks, and resets the totals.
    pub(super) fn take_mean(&mut self, group: &ProcessGroup) -> Result<f64> {
        group.all_reduce(&mut self.totals, ReduceOp::Sum)?;
        group.synchronize()?;
        let value = |tensor: &Tensor| tensor.f_double_value(&[0]).doing("reading the mean loss");
        let mean = value(&self.sum)? / value(&self.count)?;
        let _ = self.totals.f_zero_().doing("zero_")?;
        Ok(mean)
    }
}
