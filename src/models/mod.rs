//! The models that can be had by name, with PyTorch's default initialisation; batch norm.

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

use serde::{Deserialize, Serialize};
use tch::nn::{self, ModuleT, Path};
use tch::{Device, TchError, Tensor};

pub use activation::Activation;
pub use batch_norm::BatchNorm;
pub use cnn::Cnn;
pub use dropout::Dropout;
pub use mlp::Mlp;
pub use sync_batch_norm::SyncBatchNorm;

use crate::error::{Error, Result};
use crate::ffi::{Generator, fork_rng};
use crate::process_group::ProcessGroup;

/// Which model: `--model`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// One dense layer.
    Linear,
    /// Dense layers with an [`Activation`] between them.
    Mlp,
    /// Convolutions of square images.
    Cnn,
}

impl ModelKind {
    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            ModelKind::Linear => "linear",
            ModelKind::Mlp => "mlp",
            ModelKind::Cnn => "cnn",
        }
    }
}

/// What a model looks like.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Which model.
    pub kind: ModelKind,
    /// How many numbers go in, a sample; the pixels of a square image for a cnn.
    pub in_features: i64,
    /// How many come out.
    pub out_features: i64,
    /// What is between, first to last: the widths of an mlp's hidden layers, or the channels of a cnn's
    /// convolutions.
    pub hidden: Vec<i64>,
    /// The function between layers.
    pub activation: Activation,
    /// With which probability a number between an mlp's layers is zeroed in training.
    pub dropout: f64,
}

impl Default for ModelConfig {
    /// One dense layer from 20 numbers to one.
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

/// A model that was built by name.
#[derive(Debug)]
pub enum Model {
    /// A linear model is one, too.
    Mlp(Mlp),
    /// Convolutions.
    Cnn(Cnn),
}

impl ModelConfig {
    /// Which key of the configuration makes no sense for this kind of model, and why.
    pub(crate) fn check(&self) -> Result<(), (&'static str, String)> {
        match self.kind {
            ModelKind::Cnn => cnn::check(self.in_features, &self.hidden),
            ModelKind::Linear | ModelKind::Mlp => Ok(()),
        }
    }

    /// Returns how many parameters the model has. A float, because widths may be so large that nothing else holds it.
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
    /// The parameters are those of PyTorch's `nn.Linear` (or an `nn.Sequential` of them with an
    /// activation between, or that of [`Cnn`]) after `torch.manual_seed(seed)`, bit for bit; on a GPU as well, because
    /// they are drawn on the CPU. Their names are `nn.Sequential`'s too: `weight` and `bias` of a single
    /// layer, or `0.weight`, `0.bias`, `2.weight`, ...
    ///
    /// Dropout draws the same on every rank, until [`Model::with_generator`] gives it the rank's own generator.
    ///
    /// # Errors
    /// [`Error::Input`] when a cnn's images are not square or too small, and [`Error::Torch`] when libtorch
    /// refuses, as it does without the memory.
    pub fn build(&self, device: Device, seed: u64) -> Result<(nn::VarStore, Model)> {
        self.check().map_err(|(key, problem)| Error::Input(format!("{key}: {problem}")))?;
        let making = || Error::torch("making the model");
        let vs = nn::VarStore::new(Device::Cpu);
        let dropout = if self.dropout > 0.0 {
            Some(Dropout::new(self.dropout, &Arc::new(Generator::new(device, seed, 0)?)))
        } else {
            None
        };
        let model = fork_rng(seed, || self.layers(&vs.root(), dropout))?.map_err(making())?;
        // The tensors stay the same objects, here, in the layers and in the VarStore.
        #[allow(clippy::disallowed_methods)] // in whatever order
        for mut tensor in vs.variables().into_values() {
            let moved = tch::no_grad(|| tensor.f_to_device(device)).map_err(making())?;
            tensor.f_set_data(&moved).map_err(making())?;
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
    /// The same model, with the same parameters and buffers, in which every batch norm is a
    /// [`SyncBatchNorm`] over the ranks of `group`.
    ///
    /// Follows `torch.nn.SyncBatchNorm.convert_sync_batchnorm`.
    pub fn convert_sync_batchnorm(self, group: &Rc<ProcessGroup>) -> Self {
        match self {
            Model::Cnn(cnn) => Model::Cnn(cnn.convert_sync_batchnorm(group)),
            Model::Mlp(mlp) => Model::Mlp(mlp),
        }
    }

    /// The same model, whose dropout, if it has any, draws from `generator`: the rank's own.
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

/// tch's `forward_t` has no way to return an error: `spawn` catches what is thrown here.
fn or_throw(result: Result<Tensor>) -> Tensor {
    result.unwrap_or_else(|error| resume_unwind(Box::new(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_parameters_is_that_of_the_model() {
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
