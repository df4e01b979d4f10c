//! The loss of a batch: the number that training minimizes.

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};
use tch::{Reduction, Tensor};

use crate::error::Result;
use crate::ffi::TorchResult;

/// The loss function: `--loss`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Loss {
    /// The mean squared error.
    Mse,
    /// The cross-entropy of logits against class numbers.
    CrossEntropy,
}

impl Loss {
    /// Returns the mean loss over the samples of a batch as a tensor without dimensions; 0 for an empty batch.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) when the shapes don't fit.
    pub fn of(self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let reduction = if targets.numel() == 0 { Reduction::Sum } else { Reduction::Mean };
        match self {
            Loss::Mse => output.f_mse_loss(targets, reduction),
            Loss::CrossEntropy => {
                output.f_cross_entropy_loss(targets, None::<&Tensor>, reduction, -100, 0.0)
            }
        }
        .doing("the loss")
    }

    /// Returns the loss of each sample of a batch, without reduction.
    pub(super) fn per_sample(self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        match self {
            Loss::Mse => output.f_mse_loss(targets, Reduction::None),
            Loss::CrossEntropy => {
                output.f_cross_entropy_loss(targets, None::<&Tensor>, Reduction::None, -100, 0.0)
            }
        }
        .doing("the loss of each sample")
    }
}
