//! The loss of a batch, which is the number that training minimizes, and the sum over an epoch.

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};
use tch::{Device, Kind, Reduction, TchError, Tensor};

use crate::error::{Error, Result};
use crate::ffi::{TorchResult, add_scaled};
use crate::process_group::{ProcessGroup, ReduceOp};

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
    /// [`Error::Input`] or [`Error::Torch`] when the shapes don't fit.
    pub fn of(self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let reduction = if targets.numel() == 0 { Reduction::Sum } else { Reduction::Mean };
        match self {
            // Libtorch would repeat the smaller tensor, which PyTorch warns of.
            Loss::Mse if output.size() != targets.size() => Err(Error::mismatch(format!(
                "the model returns the shape {:?}, and the targets of the mean squared error have {:?}; they must be equal",
                output.size(),
                targets.size()
            ))),
            Loss::Mse => output.f_mse_loss(targets, reduction).doing("the loss"),
            Loss::CrossEntropy => cross_entropy(output, targets, reduction),
        }
    }
}

/// Returns the cross-entropy of logits against class numbers. The classes of sequences are in the last dimension of
/// `output`, and `targets` has its other dimensions; for other shapes PyTorch's rules hold. Refuses a single class.
fn cross_entropy(output: &Tensor, targets: &Tensor, reduction: Reduction) -> Result<Tensor> {
    let of_rows = |output: &Tensor, targets: &Tensor| {
        output.f_cross_entropy_loss(targets, None::<&Tensor>, reduction, -100, 0.0)
    };
    let of_sequences = |classes: i64| -> Result<Tensor, TchError> {
        of_rows(&output.f_reshape([-1, classes])?, &targets.f_reshape([-1])?)
    };
    let size = output.size();
    let loss = match size[..] {
        [.., classes] if is_sequence(output, targets) => of_sequences(classes),
        [_, 1, ..] => {
            return Err(Error::usage(format!(
                "cross-entropy over one class is always 0, and the model returns the shape {size:?}; the model must \
                 return one number for each class"
            )));
        }
        _ => of_rows(output, targets),
    };
    loss.doing("the loss")
}

/// Returns whether each sample is a sequence with a class for each of its elements.
fn is_sequence(output: &Tensor, targets: &Tensor) -> bool {
    let dims = targets.dim();
    dims > 1
        && targets.kind() == Kind::Int64
        && output.dim() == dims + 1
        && output.size()[..dims] == targets.size()
}

/// The sum of the losses of an epoch's samples, kept on the device: reading it at every step would make the host wait
/// for the GPU.
#[derive(Debug)]
pub(super) struct LossSum {
    /// The sum and the number of samples; allocated once.
    totals: Tensor,
    /// Views of `totals`: the sum and the number of samples.
    sum: Tensor,
    count: Tensor,
}

impl LossSum {
    pub(super) fn new(device: Device) -> Result<Self> {
        let allocate = || {
            let totals = Tensor::f_zeros([2], (Kind::Double, device))?;
            let (sum, count) = (totals.f_select(0, 0)?, totals.f_select(0, 1)?);
            Ok(Self { totals, sum, count })
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
        self.value()
    }

    /// Returns this rank's sum, which must be on the CPU or complete.
    pub(super) fn value(&self) -> Result<f64> {
        self.sum.f_double_value(&[]).doing("reading the loss")
    }

    /// Continues from a `sum` that [`sum`](Self::sum) returned.
    pub(super) fn set_sum(&mut self, sum: f64) -> Result<()> {
        let _ = self.totals.f_zero_().doing("zero_")?;
        self.sum.f_fill_(sum).map(drop).doing("fill_")
    }

    /// Counts `samples` samples: this rank's, or those of all ranks if only one rank counts.
    pub(super) fn count(&mut self, samples: usize) -> Result<()> {
        self.count.f_add_scalar_(samples as f64).map(drop).doing("add_")
    }

    /// Returns the mean loss over the samples of all ranks, and resets the totals.
    pub(super) fn take_mean(&mut self, group: &ProcessGroup) -> Result<f64> {
        group.all_reduce(&mut self.totals, ReduceOp::Sum)?;
        group.synchronize()?;
        let value = |tensor: &Tensor| tensor.f_double_value(&[]).doing("reading the mean loss");
        let mean = value(&self.sum)? / value(&self.count)?;
        let _ = self.totals.f_zero_().doing("zero_")?;
        Ok(mean)
    }
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
        let one_class =
            Loss::CrossEntropy.of(&logits.view([24, 1]), &targets.repeat([4, 1]).view(24));
        let error = one_class.unwrap_err().to_string();
        assert!(error.contains("cross-entropy over one class is always 0"), "{error}");
        // Images with the classes second, and probabilities as targets.
        assert!((of(&logits.transpose(1, 2), &targets) - last).abs() < 1e-6);
        let (rows, classes) = (logits.view([6, 4]), targets.view(6));
        let probabilities = classes.one_hot(4).to_kind(Kind::Float);
        assert!((of(&rows, &probabilities) - last).abs() < 1e-6);
    }
}
