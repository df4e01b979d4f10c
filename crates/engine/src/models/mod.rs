//! The built-in models, with PyTorch's default initialisation, and batch norm; the tensors of any model by name.

mod batch_norm;
mod cnn;
mod generate;
mod gpt;
mod layer_outputs;
mod layers;
mod mlp;
mod named_tensors;
mod sync_batch_norm;

use std::any::Any;
use std::fmt;
use std::panic::resume_unwind;
use std::rc::Rc;
use std::slice;
use std::sync::Arc;

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};
use tch::nn::{self, ModuleT, Path};
use tch::{Device, TchError, Tensor};

pub use batch_norm::BatchNorm;
pub use generate::{Generate, GenerateOptions};
pub use layer_outputs::layer_output;
pub(crate) use layer_outputs::{stop_watching_outputs, watch_outputs};
pub use layers::{Activation, Dropout};
pub use named_tensors::bytes_of;
pub(crate) use named_tensors::{NamedTensor, by_name, hash, tensor_fingerprint, tensor_hash};
pub use named_tensors::{parameters_hash, state_dict};
pub use sync_batch_norm::SyncBatchNorm;

use crate::error::{Error, Result};
use crate::ffi::{Generator, TorchResult, fork_rng};
use crate::process_group::ProcessGroup;

/// The sort of model: `--model`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "kebab-case")]
pub enum ModelKind {
    /// One dense layer.
    Linear,
    /// Dense layers with an [`Activation`] between them.
    Mlp,
    /// A convolutional network for square images. It has stages of convolution, batch norm, activation and pooling,
    /// and a linear head.
    ///
    /// In PyTorch, for images of `side` x `side` pixels, two stages and ReLU:
    ///
    /// ```python
    /// nn.Sequential(
    ///     nn.Unflatten(1, (1, side, side)),
    ///     nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    ///     nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    ///     nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, out_features),
    /// )
    /// ```
    Cnn,
    /// A decoder-only transformer over tokens, with the shape and the parameter names of nanoGPT's `GPT`. The output
    /// layer has the weight of the token embedding.
    ///
    /// Its parameters are those of nanoGPT after `torch.manual_seed(seed)`, to the bit. Attention is
    /// `torch.nn.functional.scaled_dot_product_attention`; with dropout, in training, it is computed step by step.
    Gpt,
}

impl ModelKind {
    fn architecture(self) -> &'static Architecture {
        match self {
            ModelKind::Linear => &mlp::LINEAR,
            ModelKind::Mlp => &mlp::MLP,
            ModelKind::Cnn => &cnn::CNN,
            ModelKind::Gpt => &gpt::GPT,
        }
    }

    /// Returns the name on the command line and in reports.
    pub fn name(self) -> &'static str {
        Self::VARIANTS[self as usize]
    }

    /// Returns whether the option `key` has an effect on this sort of model.
    #[doc(hidden)]
    pub fn uses(self, key: &str) -> bool {
        self.architecture().keys.contains(&key)
    }
}

/// What a sort of model declares, each in its own file.
struct Architecture {
    /// The keys of the options that have an effect, besides the numbers of inputs and outputs.
    keys: &'static [&'static str],
    /// Checks the configuration. An error is the wrong key, and the problem.
    check: fn(&ModelConfig) -> Result<(), (&'static str, String)>,
    /// Returns the number of parameters. A float, because the product of large widths overflows integers.
    num_parameters: fn(&ModelConfig) -> f64,
    /// Creates the model's layers below the path, for a configuration that passed `check`.
    build: fn(&Path, &ModelConfig, Option<Dropout>) -> Result<Model, TchError>,
}

/// A model that computes its output from the inputs of a batch.
///
/// Every [`ModuleT`] of tch is one, for batches of one tensor of inputs. A model of several inputs implements it itself:
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// use ddp_mp::models::Forward;
/// use tch::nn::{Linear, Module};
/// use tch::{Kind, Tensor};
///
/// /// Scores pairs of a user and an item.
/// #[derive(Debug)]
/// struct Pairs {
///     users: Linear,
///     items: Linear,
/// }
///
/// impl Forward for Pairs {
///     fn forward_inputs(&self, inputs: &[Tensor], _train: bool) -> Tensor {
///         let product = self.users.forward(&inputs[0]) * self.items.forward(&inputs[1]);
///         product.sum_dim_intlist(1, false, Kind::Float)
///     }
/// }
/// ```
pub trait Forward: fmt::Debug + Send {
    /// Computes the output, in training or evaluation mode. `inputs` are the `inputs` of the batch, and
    /// then its `more_inputs`.
    fn forward_inputs(&self, inputs: &[Tensor], train: bool) -> Tensor;
}

impl<M: ModuleT> Forward for M {
    fn forward_inputs(&self, inputs: &[Tensor], train: bool) -> Tensor {
        match inputs {
            [inputs] => self.forward_t(inputs, train),
            _ => {
                let problem = format!(
                    "the model takes one tensor of inputs, and the batch has {}; implement Forward for the model in place \
                     of ModuleT or Module",
                    inputs.len()
                );
                or_throw(Err(Error::usage(problem)))
            }
        }
    }
}

/// The layers of a model.
trait Layers: Forward + Any {
    /// Replaces every batch norm by a [`SyncBatchNorm`] over the ranks of `group`.
    fn convert_sync_batchnorm(&mut self, _group: &Rc<ProcessGroup>) {}

    /// Returns the dropout that all layers share. `None` without.
    fn dropout(&mut self) -> Option<&mut Dropout> {
        None
    }
}

/// The architecture of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The sort of model.
    pub kind: ModelKind,
    /// The number of inputs per sample. For a cnn: the pixels of a square image. For a gpt: the most positions of its
    /// context, nanoGPT's `block_size`.
    pub in_features: i64,
    /// The number of outputs per sample. For a gpt: the number of different tokens, nanoGPT's `vocab_size`.
    pub out_features: i64,
    /// The widths of an mlp's hidden layers, or the channels of a cnn's convolutions, first to last.
    pub hidden: Vec<i64>,
    /// The activation function between layers.
    pub activation: Activation,
    /// The probability that dropout zeros a number in training: between an mlp's layers, or in a gpt's embedding,
    /// attention and blocks.
    pub dropout: f64,
    /// The number of a gpt's blocks.
    pub n_layer: i64,
    /// The number of attention heads in each block of a gpt.
    pub n_head: i64,
    /// The width of a gpt: the numbers that it has for each position. A multiple of `n_head`.
    pub n_embd: i64,
    /// Whether the dense layers and norms of a gpt have biases.
    pub bias: bool,
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
            n_layer: 4,
            n_head: 4,
            n_embd: 128,
            bias: true,
        }
    }
}

/// A model built from a [`ModelConfig`], or one of your own.
#[derive(Debug)]
pub struct Model(Box<dyn Layers>);

impl ModelConfig {
    /// Checks the configuration. An error is the wrong key for this sort of model, and the problem.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        (self.kind.architecture().check)(self)
    }

    /// Returns the number of parameters. A float, because the product of large widths overflows integers.
    #[doc(hidden)]
    pub fn num_parameters(&self) -> f64 {
        (self.kind.architecture().num_parameters)(self)
    }

    /// Builds the model in a `VarStore` of its own, on `device`.
    ///
    /// The parameters are bit for bit those of PyTorch after `torch.manual_seed(seed)`, for an `nn.Linear`, an
    /// `nn.Sequential` with activations, or that of [`ModelKind::Cnn`]. This holds on a GPU too, because they are
    /// drawn on the CPU. Their names are those of `nn.Sequential`: `weight` and `bias` for a single layer, or
    /// `0.weight`, `0.bias`, `2.weight`, ... A gpt has the parameters and the names of nanoGPT.
    ///
    /// Dropout draws the same numbers on every rank, until [`Model::with_generator`] sets the rank's own generator.
    ///
    /// # Errors
    /// [`Error::Input`] if a cnn's images are not square or too small; [`Error::Torch`] if libtorch fails, for
    /// example without enough memory.
    pub fn build(&self, device: Device, seed: u64) -> Result<(nn::VarStore, Model)> {
        self.check().map_err(|(key, problem)| Error::usage(format!("{key}: {problem}")))?;
        let dropout = if self.dropout > 0.0 {
            Some(Dropout::new(self.dropout, &Arc::new(Generator::new(device, seed, 0)?)))
        } else {
            None
        };
        let build = self.kind.architecture().build;
        build_on(device, seed, |path| build(path, self, dropout))
    }
}

/// Calls `build` with the root of a new `VarStore`, and moves its tensors to `device`. `build` draws from libtorch's
/// generator on the CPU, which has `seed` meanwhile: the parameters are the same on every device.
///
/// # Errors
/// [`Error::Torch`] if libtorch fails, for example without enough memory.
#[doc(hidden)]
pub fn build_on(
    device: Device,
    seed: u64,
    build: impl FnOnce(&Path) -> Result<Model, TchError>,
) -> Result<(nn::VarStore, Model)> {
    let doing = "making the model";
    let vs = nn::VarStore::new(Device::Cpu);
    let model = fork_rng(seed, || build(&vs.root()))?.doing(doing)?;
    // The layers and the VarStore keep the same tensor objects.
    #[allow(clippy::disallowed_methods)] // the order does not matter
    for mut tensor in vs.variables().into_values() {
        let moved = tch::no_grad(|| tensor.f_to_device(device)).doing(doing)?;
        tensor.f_set_data(&moved).doing(doing)?;
    }
    Ok((vs, model))
}

impl Model {
    /// Returns `model` as the type that the program trains. Its batch norms and its dropout stay as they are.
    pub fn of(model: impl Forward + 'static) -> Self {
        Self::new(Own(model))
    }

    /// Returns the model that [`of`](Self::of) has taken, for a [`step`](crate::trainer::Trainer::step) of your own.
    /// `None` for a model of another type.
    pub fn downcast_ref<M: 'static>(&self) -> Option<&M> {
        let layers: &dyn Any = &*self.0;
        layers.downcast_ref::<Own<M>>().map(|Own(model)| model)
    }

    fn new(layers: impl Layers + 'static) -> Self {
        Self(Box::new(layers))
    }

    /// Returns the same model, with the same parameters and buffers, but with every batch norm replaced by a
    /// [`SyncBatchNorm`] over the ranks of `group`.
    ///
    /// Follows `torch.nn.SyncBatchNorm.convert_sync_batchnorm`.
    pub fn convert_sync_batchnorm(mut self, group: &Rc<ProcessGroup>) -> Self {
        self.0.convert_sync_batchnorm(group);
        self
    }

    /// Runs the forward pass on one tensor of inputs, in training or evaluation mode.
    pub fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        self.forward_inputs(slice::from_ref(inputs), train)
    }

    /// Returns the same model with dropout, if any, from `generator`, the rank's own.
    pub fn with_generator(mut self, generator: &Arc<Generator>) -> Self {
        if let Some(dropout) = self.0.dropout() {
            dropout.generator = generator.clone();
        }
        self
    }
}

impl Forward for Model {
    fn forward_inputs(&self, inputs: &[Tensor], train: bool) -> Tensor {
        self.0.forward_inputs(inputs, train)
    }
}

/// A user's own model.
#[derive(Debug)]
struct Own<M>(M);

impl<M: Forward> Forward for Own<M> {
    fn forward_inputs(&self, inputs: &[Tensor], train: bool) -> Tensor {
        self.0.forward_inputs(inputs, train)
    }
}

impl<M: Forward + 'static> Layers for Own<M> {}

/// Returns the tensor, or unwinds with the error. tch's `forward_t` cannot return an error. `spawn` catches it.
fn or_throw(result: Result<Tensor>) -> Tensor {
    result.unwrap_or_else(|error| resume_unwind(Box::new(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_count_matches_the_built_model() {
        for name in ModelKind::VARIANTS {
            let kind = name.parse().unwrap();
            let (in_features, hidden) = (81, vec![3, 5]);
            for bias in [true, false] {
                let hidden = hidden.clone();
                let sizes =
                    ModelConfig { kind, in_features, out_features: 4, ..Default::default() };
                let config = ModelConfig { hidden, bias, ..sizes };
                let (vs, _) = config.build(Device::Cpu, 0).unwrap();
                let built: usize = vs.trainable_variables().iter().map(Tensor::numel).sum();
                assert_eq!(config.num_parameters(), built as f64, "{name}");
            }
        }
    }
}
