//! Batch normalization over the samples of one rank.

use tch::nn::{BatchNormConfig, ModuleT, Path};
use tch::{Kind, TchError, Tensor};

use crate::error::Result;
use crate::ffi::TorchResult;

/// Batch normalization of inputs of shape (N, C, ...). Follows `torch.nn.BatchNorm2d` (and `1d`, `3d`), with the names
/// of its `state_dict`.
///
/// Like tch's `nn::batch_norm2d`, but also with the buffer `num_batches_tracked`.
#[derive(Debug)]
pub struct BatchNorm {
    /// The factor of each normalized channel. `None` without `affine`.
    pub weight: Option<Tensor>,
    /// The offset that is then added to each channel. `None` without `affine`.
    pub bias: Option<Tensor>,
    /// The running mean of each channel, for evaluation.
    pub running_mean: Tensor,
    /// The running unbiased variance of each channel, for evaluation.
    pub running_var: Tensor,
    /// The number of batches in the running statistics.
    pub num_batches_tracked: Tensor,
    pub(super) config: BatchNormConfig,
}

impl BatchNorm {
    /// PyTorch's defaults. Those of tch differ only in the initial weight, which tch draws at random.
    pub const DEFAULT: BatchNormConfig = BatchNormConfig {
        cudnn_enabled: true,
        eps: 1e-5,
        momentum: 0.1,
        affine: true,
        ws_init: tch::nn::Init::Const(1.),
        bs_init: tch::nn::Init::Const(0.),
    };

    /// Creates a layer for `features` channels, with its parameters and buffers at `path`.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) if libtorch fails, for example without enough memory.
    pub fn new(path: &Path, features: i64, config: BatchNormConfig) -> Result<Self> {
        Self::make(path, features, config).doing("making a batch norm")
    }

    pub(super) fn make(
        path: &Path,
        features: i64,
        config: BatchNormConfig,
    ) -> Result<Self, TchError> {
        let shape = [features];
        let parameter =
            |name, init| config.affine.then(|| path.f_var(name, &shape, init)).transpose();
        let count = Tensor::f_zeros([0; 0], (Kind::Int64, path.device()))?;
        Ok(Self {
            weight: parameter("weight", config.ws_init)?,
            bias: parameter("bias", config.bs_init)?,
            running_mean: path.f_zeros_no_train("running_mean", &shape)?,
            running_var: path.f_ones_no_train("running_var", &shape)?,
            num_batches_tracked: path.add("num_batches_tracked", count, false),
            config,
        })
    }

    /// Normalizes `inputs`. In training it uses and records their own statistics, in evaluation the running
    /// statistics.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) when the shape doesn't fit.
    pub fn f_forward_t(&self, inputs: &Tensor, train: bool) -> Result<Tensor> {
        if train {
            self.count_batch()?;
        }
        inputs
            .f_batch_norm(
                self.weight.as_ref(),
                self.bias.as_ref(),
                Some(&self.running_mean),
                Some(&self.running_var),
                train,
                self.config.momentum,
                self.config.eps,
                self.config.cudnn_enabled,
            )
            .doing("batch_norm")
    }

    pub(super) fn count_batch(&self) -> Result<()> {
        let mut count = self.num_batches_tracked.shallow_clone();
        tch::no_grad(|| count.f_add_scalar_(1)).map(drop).doing("add_")
    }
}

impl ModuleT for BatchNorm {
    /// Calls [`BatchNorm::f_forward_t`]; unwinds with its error.
    fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        super::or_throw(self.f_forward_t(inputs, train))
    }
}
