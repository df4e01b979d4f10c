//! The loss of a batch: the number that training minimizes.

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};
use tch::{Kind, Reduction, TchError, Tensor};

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
    /// The cross-entropy of logits against class numbers: one for each sample, or one for each token of a sequence.
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
            Loss::CrossEntropy => cross_entropy(output, targets, reduction),
        }
        .doing("the loss")
    }

    /// Returns the loss of each sample of a batch, without reduction.
    pub(super) fn per_sample(self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        match self {
            Loss::Mse => output.f_mse_loss(targets, Reduction::None),
            Loss::CrossEntropy => {
                let loss = cross_entropy(output, targets, Reduction::None);
                let of_sample = |loss: Tensor| {
                    loss.f_view_as(targets)?.f_flatten(1, -1)?.f_mean_dim(1, false, None)
                };
                if is_sequence(output, targets) { loss.and_then(of_sample) } else { loss }
            }
        }
        .doing("the loss of each sample")
    }
}

/// Returns the cross-entropy of logits against class numbers. The classes of sequences are in the last dimension of
/// `output`, and `targets` has its other dimensions; for other shapes PyTorch's rules hold.
fn cross_entropy(
    output: &Tensor,
    targets: &Tensor,
    reduction: Reduction,
) -> Result<Tensor, TchError> {
    let of_rows = |output: &Tensor, targets: &Tensor| {
        output.f_cross_entropy_loss(targets, None::<&Tensor>, reduction, -100, 0.0)
    };
    match output.size()[..] {
        [.., classes] if is_sequence(output, targets) => {
            of_rows(&output.f_reshape([-1, classes])?, &targets.f_reshape([-1])?)
        }
        _ => of_rows(output, targets),
    }
}

/// Returns whether each sample is a sequence with a class for each of its elements.
fn is_sequence(output: &Tensor, targets: &Tensor) -> bool {
    let dims = targets.dim();
    dims > 1
        && targets.kind() == Kind::Int64
        && output.dim() == dims + 1
        && output.size()[..dims] == targets.size()
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn sequences_have_their_classes_last_and_other_shapes_follow_pytorch() {
        let logits = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([2, 3, 4]).sin();
        let targets = Tensor::from_slice(&[0i64, 1, 2, 3, 2, 1]).view([2, 3]);
        let value = |loss: Result<Tensor>| Vec::<f32>::try_from(loss.unwrap().view(-1)).unwrap();
        let of =
            |logits: &Tensor, targets: &Tensor| value(Loss::CrossEntropy.of(logits, targets))[0];
        let last = of(&logits, &targets);
        // PyTorch has the classes in the second dimension.
        let second = logits.transpose(1, 2).cross_entropy_loss(
            &targets,
            None::<&Tensor>,
            Reduction::Mean,
            -100,
            0.0,
        );
        assert!((f64::from(last) - second.double_value(&[])).abs() < 1e-6);
        let of_samples = value(Loss::CrossEntropy.per_sample(&logits, &targets));
        assert_eq!(of_samples.len(), 2);
        assert!(((of_samples[0] + of_samples[1]) / 2.0 - last).abs() < 1e-6);
        // Images with the classes second, and probabilities as targets.
        assert!((of(&logits.transpose(1, 2), &targets) - last).abs() < 1e-6);
        let (rows, classes) = (logits.view([6, 4]), targets.view(6));
        let probabilities = classes.one_hot(4).to_kind(Kind::Float);
        assert!((of(&rows, &probabilities) - last).abs() < 1e-6);
    }
}
