//! Weighted sums: each rank's tensor counts by the rank's weight.

use tch::Tensor;

use super::call::Options;
use super::{ProcessGroup, ReduceOp};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::operation::Operation;

impl ProcessGroup {
    /// Sums `tensor` over all ranks, weighted by each rank's `weight`, and leaves the result in every rank's
    /// `tensor`. Each rank's tensor is multiplied by its weight and divided by the mean of all weights.
    ///
    /// With equal weights, the result is that of [`all_reduce`](Self::all_reduce), bit for bit. With
    /// [`ReduceOp::PremulSum`] of `1 / world_size`, it is the weighted mean; the weights could be numbers of
    /// samples. If `weight` is `None` on all ranks, this is `all_reduce`. PyTorch has no such function.
    ///
    /// The weights need no collective of their own. `threaded` and `gloo` send them with the data that the ranks
    /// compare before each collective. With `nccl`, the ranks of one process compare as well. Between processes,
    /// the weights cost one TCP message to each other process, and the host waits for it.
    ///
    /// # Errors
    /// The errors of [`all_reduce`](Self::all_reduce). [`Error::InvalidInput`] for a weight that is negative or not
    /// finite, and on all ranks if the weights add up to 0. [`Error::Unsupported`] for ops other than `Sum` and
    /// `PremulSum`, and for dtypes that are not float.
    ///
    /// ```
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     // Rank 0 has the mean 1 of 3 samples, rank 1 the mean 5 of 1 sample: the mean of all 4 is 2.
    ///     let (mean, samples) = if rank.rank() == 0 { (1f32, 3.0) } else { (5.0, 1.0) };
    ///     let mut tensor = Tensor::from_slice(&[mean]);
    ///     group.all_reduce_weighted(&mut tensor, ReduceOp::PremulSum(0.5), Some(samples))?;
    ///     assert_eq!(tensor.double_value(&[0]), 2.0);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_reduce_weighted(
        &self,
        tensor: &mut Tensor,
        op: ReduceOp,
        weight: Option<f64>,
    ) -> Result<()> {
        let options = Options { reduce_op: Some(op), weight, ..Options::default() };
        let tensors = std::slice::from_ref(&*tensor);
        self.collective(Operation::AllReduce, options, &tensor.size(), tensors, tensors)
    }

    /// Sets this rank's weight in the backward that it begins; `None` when the backward is over. Not a collective.
    pub(crate) fn set_weight(&self, weight: Option<f64>) {
        self.weight.set(weight);
    }

    /// Sums the gradient `tensor` over all ranks. In a weighted backward, each rank's tensor is a gradient of its
    /// own loss, which counts by the rank's weight. The sum will later be multiplied by this rank's weight, so it
    /// is divided by that here.
    pub(super) fn all_reduce_in_autograd(&self, tensor: &mut Tensor) -> Result<()> {
        let Some(weight) = self.weight.get() else {
            return self.all_reduce(tensor, ReduceOp::Sum);
        };
        if weight == 0.0 {
            // With weight 0, the tensor counts for nothing, even if it is not finite.
            let zeroed = tch::no_grad(|| tensor.f_zero_().map(drop));
            zeroed.doing("weighting a gradient")?;
        }
        self.all_reduce_weighted(tensor, ReduceOp::Sum, Some(weight))?;
        let mean = self.side()?.backend.mean_weight();
        let divide = || match weight / mean {
            1.0 => Ok(()),
            0.0 => tensor.f_zero_().map(drop), // nothing depends on the result
            share => tensor.f_div_scalar_(share).map(drop),
        };
        tch::no_grad(divide).doing("weighting a gradient")
    }

    /// Refuses a weighted backward: only `functional::all_reduce` weights its gradients.
    pub(super) fn refuse_weights_in_autograd(&self) -> Result<()> {
        if self.weight.get().is_none() {
            return Ok(());
        }
        Err(Error::Unsupported(format!(
            "rank {}: backward_weighted goes through functional::all_reduce only, and this loss depends on another \
             functional collective; use backward, or all_reduce",
            self.rank()
        )))
    }
}
