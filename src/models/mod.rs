//! The built-in models, with PyTorch's default initialisation, and batch norm.

mod activation;
mod batch_norm;
mod cnn;
mod dropout;
mod layers;
mod mlp;
mod sync_batch_norm;

use std::panic::resume_unwind;
use std::rc::Rc;
use std::sync::Arc;

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};
use tch::nn::{self, ModuleT, Path};
use tch::{Device, TchError, Tensor};

pub use activation::Activation;
pub use batch_norm::BatchNorm;
pub use cnn::Cnn;
pub use dropout::Dropout;
pub use mlp::Mlp;
pub use sync_batch_norm::SyncBatchNorm;

use crate::error::{Error, Result};
use crate::ffi::{Generator, TorchResult, fork_rng};
use crate::process_group::ProcessGroup;

/// The sort of model: `--model`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum ModelKind {
    /// One dense layer.
    Linear,
    /// Dense layers with an [`Activation`] between them.
    Mlp,
    /// A convolutional network for square images.
    Cnn,
}

impl ModelKind {
    /// Returns the name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            ModelKind::Linear => "linear",
            ModelKind::Mlp => "mlp",
            ModelKind::Cnn => "cnn",
        }
    }
}

/// The architecture of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The sort of model.
    pub kind: ModelKind,
    /// The number of inputs per sample. For a cnn: the pixels of a square image.
    pub in_features: i64,
    /// The number of outputs per sample.
    pub out_features: i64,
    /// The widths of an mlp's hidden layers, or the channels of a cnn's convolutions, first to last.
    pub hidden: Vec<i64>,
    /// The activation function between layers.
    pub activation: Activation,
    /// The probability that dropout zeros a number between an mlp's layers in training.
    pub dropout: f64,
}

impl Default for ModelConfig {
    /// Returns one dense layer from 20 inputs to one output.
    fn default() -> Self {
        Self {
            kind: ModelKind::Linear,
            in_features: 20,
            out_features: 1,
            hidden: Vec::new(),
            activation: Activation::Relu,
            dropout: 0.0,
        }
    }
}

/// A model built from a [`ModelConfig`].
#[derive(Debug)]
pub enum Model {
    /// Dense layers. A linear model is also of this variant.
    Mlp(Mlp),
    /// A convolutional network.
    Cnn(Cnn),
}

impl ModelConfig {
    /// Checks the configuration. An error is the wrong key for this sort of model, and the problem.
    pub(crate) fn check(&self) -> Result<(), (&'static str, String)> {
        match self.kind {
            ModelKind::Cnn => cnn::check(self.in_features, &self.hidden),
            ModelKind::Linear | ModelKind::Mlp => Ok(()),
        }
    }

    /// Returns the number of parameters. A float, because the product of large widths overflows integers.
    pub(crate) fn num_parameters(&self) -> f64 {
        let (inputs, outputs) = (self.in_features as f64, self.out_features as f64);
        let hidden = self.hidden.iter().map(|&width| width as f64);
        let (mut before, mut parameters) = (inputs, 0.0);
        match self.kind {
            ModelKind::Linear => {}
            ModelKind::Mlp => {
                for width in hidden {
                    parameters += (before + 1.0) * width;
                    before = width;
                }
            }
            ModelKind::Cnn => {
                let mut channels_in = 1.0;
                for channels in hidden {
                    // 3 x 3 weights and a bias; a batch norm's weight and bias.
                    parameters += (channels_in * 9.0 + 3.0) * channels;
                    channels_in = channels;
                }
                let side = self.in_features.max(0).isqrt() >> self.hidden.len().min(63);
                before = channels_in * (side as f64).powi(2);
            }
        }
        parameters + (before + 1.0) * outputs
    }

    /// Builds the model in a `VarStore` of its own, on `device`.
    ///
    /// The parameters are bit for bit those of PyTorch after `torch.manual_seed(seed)`, for an `nn.Linear`, an
    /// `nn.Sequential` with activations, or that of [`Cnn`]. This holds on a GPU too, because they are drawn on the
    /// CPU. Their names are those of `nn.Sequential`: `weight` and `bias` for a single layer, or `0.weight`, `0.bias`,
    /// `2.weight`, ...
    ///
    /// Dropout draws the same numbers on every rank, until [`Model::with_generator`] sets the rank's own generator.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if a cnn's images are not square or too small; [`Error::Torch`] if libtorch fails, for
    /// example without enough memory.
    pub fn build(&self, device: Device, seed: u64) -> Result<(nn::VarStore, Model)> {
        self.check().map_err(|(key, problem)| Error::InvalidInput(format!("{key}: {problem}")))?;
        let doing = "making the model";
        let vs = nn::VarStore::new(Device::Cpu);
        let dropout = if self.dropout > 0.0 {
            Some(Dropout::new(self.dropout, &Arc::new(Generator::new(device, seed, 0)?)))
        } else {
            None
        };
        let model = fork_rng(seed, || self.layers(&vs.root(), dropout))?.doing(doing)?;
        // The layers and the VarStore keep the same tensor objects.
        #[allow(clippy::disallowed_methods)] // the order does not matter
        for mut tensor in vs.variables().into_values() {
            let moved = tch::no_grad(|| tensor.f_to_device(device)).doing(doing)?;
            tensor.f_set_data(&moved).doing(doing)?;
        }
        Ok((vs, model))
    }

    fn layers(&self, root: &Path, dropout: Option<Dropout>) -> Result<Model, TchError> {
        let Self { kind, in_features, out_features, ref hidden, activation, .. } = *self;
        let mlp = |hidden: &[i64]| {
            let widths = [&[in_features][..], hidden, &[out_features]].concat();
            Mlp::new(root, &widths, activation, dropout).map(Model::Mlp)
        };
        match kind {
            ModelKind::Linear => mlp(&[]),
            ModelKind::Mlp => mlp(hidden),
            ModelKind::Cnn => {
                Cnn::new(root, in_features, hidden, out_features, activation).map(Model::Cnn)
            }
        }
    }
}

impl Model {
    /// Returns the same model, with the same parameters and buffers, but with every batch norm replaced by a
    /// [`SyncBatchNorm`] over the ranks of `group`.
    ///
    /// Follows `torch.nn.SyncBatchNorm.convert_sync_batchnorm`.
    pub fn convert_sync_batchnorm(self, group: &Rc<ProcessGroup>) -> Self {
        match self {
            Model::Cnn(cnn) => Model::Cnn(cnn.convert_sync_batchnorm(group)),
            Model::Mlp(mlp) => Model::Mlp(mlp),
        }
    }

    /// Returns the same model with dropout, if any, from `generator`, the rank's own.
    pub fn with_generator(self, generator: &Arc<Generator>) -> Self {
        match self {
            Model::Mlp(mlp) => Model::Mlp(mlp.with_generator(generator)),
            Model::Cnn(cnn) => Model::Cnn(cnn),
        }
    }
}

impl ModuleT for Model {
    fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        match self {
            Model::Mlp(mlp) => mlp.forward_t(inputs, train),
            Model::Cnn(cnn) => cnn.forward_t(inputs, train),
        }
    }
}

/// Returns the tensor, or unwinds with the error. tch's `forward_t` cannot return an error. `spawn` catches it.
fn or_throw(result: Result<Tensor>) -> Tensor {
    result.unwrap_or_else(|error| resume_unwind(Box::new(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_count_matches_the_built_model() {
        for (kind, in_features, hidden) in [
            (ModelKind::Linear, 20, vec![7]),
            (ModelKind::Mlp, 20, vec![7, 5]),
            (ModelKind::Cnn, 81, vec![3, 5]),
        ] {
            let config =
                ModelConfig { kind, in_features, out_features: 4, hidden, ..Default::default() };
            let (vs, _) = config.build(Device::Cpu, 0).unwrap();
            let built: usize = vs.trainable_variables().iter().map(Tensor::numel).sum();
            assert_eq!(config.num_parameters(), built as f64, "{kind:?}");
        }
    }
}
