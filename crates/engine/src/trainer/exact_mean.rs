//! The exact mean: every sample of a step counts alike, whichever rank has it, so that N ranks are one on all their samples.
//!
//! DDP averages over the ranks. So each rank multiplies its mean loss by `n * R / N` before backward: its own `n` samples,
//! the `R` ranks, and the `N` samples of all ranks. With equal batches the factor is 1.

use tch::{Kind, Tensor};

use super::{Step, TrainContext};
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::process_group::{ReduceOp, Work};

/// What all ranks' batches of a step count as together.
#[derive(Debug)]
pub(super) enum StepCount {
    /// The number of samples, which a loader knows that is in step with those of the other ranks.
    Samples(usize),
    /// The sum of the ranks' counts, on the device, and the all_reduce that computes it.
    Counted { sum: Tensor, all_reduce: Option<Work> },
}

impl StepCount {
    /// Divides the mean `loss` of a batch that counts as `count`, so that the mean over `ranks` ranks becomes the mean over
    /// the step. A batch that counts as 0 adds zeros.
    pub(super) fn divide(&mut self, loss: &Tensor, count: usize, ranks: usize) -> Result<Tensor> {
        let part = (count * ranks) as f64;
        let divided = match self {
            Self::Samples(all) if *all == count * ranks => Ok(loss.shallow_clone()),
            Self::Samples(all) => loss.f_div_scalar(*all as f64 / part),
            Self::Counted { sum, all_reduce } => {
                if let Some(work) = all_reduce.take() {
                    work.wait()?;
                }
                let is_half = matches!(loss.kind(), Kind::Half | Kind::BFloat16);
                let kind = if is_half { Kind::Float } else { loss.kind() };
                // On the device: the host does not wait for the sum.
                let divisor = sum.f_div_scalar(part).and_then(|divisor| divisor.f_to_kind(kind));
                divisor.and_then(|divisor| loss.f_div(&divisor))
            }
        };
        divided.doing("dividing the loss")
    }
}

impl<M> TrainContext<M> {
    /// Finds what all ranks' batches of `step` count as, if samples are to count alike. If the criterion counts, or the
    /// loader does not know the other ranks' samples, this starts an all_reduce of 8 bytes, for which backward waits. A
    /// collective.
    pub(super) fn count_step_of_all_ranks(&mut self, step: &Step) -> Result<()> {
        self.step_count = None;
        if !self.options.exact_mean {
            return Ok(());
        }
        let dealt = self.loader.dealt_in(self.state.samples_seen, step.batches.len());
        self.step_count =
            Some(if let Some(samples) = dealt.filter(|_| !self.criterion.has_count()) {
                StepCount::Samples(samples)
            } else {
                let here =
                    Tensor::f_full([], step.count() as f64, (Kind::Double, self.group().device()));
                let sum = here.doing("full")?;
                let all_reduce = Some(self.group().all_reduce_async(&sum, ReduceOp::Sum)?);
                StepCount::Counted { sum, all_reduce }
            });
        Ok(())
    }
}
