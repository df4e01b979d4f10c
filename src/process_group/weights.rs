//! Weighted reductions: a rank counts by its own weight relative to the mean weight of all ranks.

use tch::{Kind, Tensor};

use super::ProcessGroup;
use super::call::Options;
use super::dtype::dtype_name;
use super::reduce_op::ReduceOp;
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::operation::Operation;

/// Checks what a rank can check alone. Returns the weight.
pub(super) fn check(op: ReduceOp, kind: Kind, weight: f64, rank: usize) -> Result<f64> {
    let weight = check_weight(weight, rank)?;
    let sums = matches!(op, ReduceOp::Sum | ReduceOp::PremulSum(_));
    if sums && matches!(kind, Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16) {
        return Ok(weight);
    }
    Err(Error::Unsupported(format!(
        "all_reduce({op}) of {} tensors takes no weights: only sums of float tensors do",
        dtype_name(kind)
    )))
}

/// Returns the weight of `rank`, with 0 for -0.
///
/// # Errors
/// [`Error::InvalidInput`] if the weight is negative or not finite.
pub(crate) fn check_weight(weight: f64, rank: usize) -> Result<f64> {
    if weight >= 0.0 && weight.is_finite() {
        return Ok(weight + 0.0); // -0 is not below 0, but has a sign
    }
    Err(Error::InvalidInput(format!(
        "rank {rank} has the weight {weight}; use a finite number from 0, such as the number of samples"
    )))
}

/// Returns the mean weight of the ranks in `parts`. Each part is the mean weight and the number of its ranks. If
/// all weights are equal, the mean is that weight bit for bit, so that a weight divided by the mean is 1.
pub(super) fn mean(parts: impl Iterator<Item = (f64, usize)> + Clone) -> f64 {
    let first = parts.clone().next().map_or(0.0, |(weight, _)| weight);
    if parts.clone().all(|(weight, _)| weight == first) {
        return first;
    }
    let total: f64 = parts.clone().map(|(weight, ranks)| weight * ranks as f64).sum();
    total / parts.map(|(_, ranks)| ranks).sum::<usize>() as f64
}

/// Returns the [`mean`] weight of all ranks of the group.
///
/// # Errors
/// [`Error::InvalidInput`] on all ranks if the mean is 0 or not finite: nothing can be divided by it.
pub(super) fn mean_of_all(parts: impl Iterator<Item = (f64, usize)> + Clone) -> Result<f64> {
    let mean = mean(parts.clone());
    let ranks = || (0..parts.clone().map(|(_, ranks)| ranks).sum()).collect::<Vec<_>>();
    if mean == 0.0 { Err(refuse(mean, &ranks())) } else { check_mean(mean, ranks) }
}

/// Checks and returns `mean`, the mean weight of `ranks`.
///
/// # Errors
/// [`Error::InvalidInput`] if the sum of the weights is too large for a number.
pub(super) fn check_mean(mean: f64, ranks: impl FnOnce() -> Vec<usize>) -> Result<f64> {
    if mean.is_finite() { Ok(mean) } else { Err(refuse(mean, &ranks())) }
}

fn refuse(mean: f64, ranks: &[usize]) -> Error {
    let why = if mean == 0.0 { "each has the weight 0" } else { "they are too large" };
    Error::InvalidInput(format!(
        "the weights of the ranks {} add up to {}: {why}; give at least one rank a weight above 0, such as its \
         number of samples",
        crate::error::runs(ranks),
        mean * ranks.len() as f64
    ))
}

/// Returns the factor of the operation, without weights.
pub(super) fn factor(op: ReduceOp) -> f64 {
    match op {
        ReduceOp::PremulSum(factor) => factor,
        _ => 1.0,
    }
}

/// Multiplies the elements of `tensor` in place, without autograd.
pub(super) fn multiply(tensor: &Tensor, factor: f64) -> Result<()> {
    let multiply = || tensor.shallow_clone().f_mul_scalar_(factor).map(drop);
    tch::no_grad(multiply).doing("mul_")
}

/// Fills `factors` with the factor of each rank's tensor. Leaves it empty if all weights are `mean`: the operation
/// is then as without weights.
pub(super) fn fill_factors(
    op: ReduceOp,
    mean: f64,
    weights: impl Iterator<Item = f64> + Clone,
    factors: &mut Vec<f64>,
) {
    factors.clear();
    if !weights.clone().all(|weight| weight == mean) {
        // In this order, a rank with the mean weight gets exactly the operation's factor.
        factors.extend(weights.map(|weight| factor(op) * (weight / mean)));
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_weights_leave_the_reduction_unweighted() {
        for weight in [0.1, 1.0 / 3.0, 7.0, 1e300] {
            for ranks in 1..9 {
                let weights = || (0..ranks).map(|_| weight);
                let mean = mean_of_all(weights().map(|weight| (weight, 1))).unwrap();
                assert_eq!(mean, weight);
                let mut factors = vec![5.0];
                fill_factors(ReduceOp::PremulSum(0.5), mean, weights(), &mut factors);
                assert!(factors.is_empty());
            }
        }
    }

    #[test]
    fn weight_factors_are_shares_of_the_total() {
        let weights = [3.0, 0.0, 1.0];
        let mean = mean_of_all(weights.iter().map(|&weight| (weight, 1))).unwrap();
        // Two processes, the first with two ranks, give the same mean.
        assert_eq!(mean_of_all([(1.5, 2), (1.0, 1)].into_iter()).unwrap(), mean);
        let mut factors = Vec::new();
        fill_factors(ReduceOp::PremulSum(1.0 / 3.0), mean, weights.into_iter(), &mut factors);
        let expected = [0.75, 0.0, 0.25];
        assert!(factors.iter().zip(expected).all(|(a, b): (&f64, f64)| (a - b).abs() < 1e-15));
    }

    #[test]
    fn invalid_weights_are_refused() {
        for weight in [-1.0, f64::NAN, f64::INFINITY] {
            let error = check_weight(weight, 3).unwrap_err().to_string();
            assert!(error.starts_with(&format!("rank 3 has the weight {weight}; ")), "{error}");
        }
        let error = mean_of_all([(0.0, 2), (0.0, 1)].into_iter()).unwrap_err().to_string();
        assert!(error.starts_with("the weights of the ranks 0-2 add up to 0: each"), "{error}");
        let error = mean_of_all([(f64::MAX, 1), (1e308, 1)].into_iter()).unwrap_err().to_string();
        assert!(error.contains("add up to inf: they are too large"), "{error}");
        for (op, kind) in [(ReduceOp::Max, Kind::Float), (ReduceOp::Sum, Kind::Int64)] {
            let error = check(op, kind, 1.0, 0).unwrap_err().to_string();
            assert!(error.contains("takes no weights"), "{error}");
        }
    }
}
