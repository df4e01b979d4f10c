//! Batch normalization, over the samples of this rank.

use tch::nn::{BatchNormConfig, ModuleT, Path};
use tch::{Kind, TchError, Tensor};

use crate::error::{Error, Result};

/// Follows `torch.nn.BatchNorm2d` (and `1d`, `3d`: any input of shape (N, C, ...) will do), with the names
/// of its `state_dict`.
///
/// As tch's `nn::batch_norm2d`, with `num_batches_tracked` beside it.
#[derive(Debug)]
pub struct BatchNorm {
    /// What the normalized channels are multiplied by, with `affine`.
    pub weight: Option<Tensor>,
    /// What is added to them then.
    pub bias: Option<Tensor>,
    /// The mean of each channel, as an average over the last steps: what evaluation uses.
    pub running_mean: Tensor,
    /// The unbiased variance, likewise.
    pub running_var: Tensor,
    /// How many batches the two come from.
    pub num_batches_tracked: Tensor,
    pub(super) config: BatchNormConfig,
}

impl BatchNorm {
    /// PyTorch's defaults; those of tch are the same but for the weight, which it draws at random.
    pub const DEFAULT: BatchNormConfig = BatchNormConfig {
        cudnn_enabled: true,
        eps: 1e-5,
        momentum: 0.1,
        affine: true,
        ws_init: tch::nn::Init::Const(1.),
        bs_init: tch::nn::Init::Const(0.),
    };

    /// A layer for `features` channels, whose parameters and buffers are at `path`.
    ///
    /// # Errors
    /// [`Error::Torch`] when libtorch refuses, as it does without the memory.
    pub fn new(path: &Path, features: i64, config: BatchNormConfig) -> Result<Self> {
        Self::make(path, features, config).map_err(Error::torch("making a batch norm"))
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

    /// Normalizes `inputs`: in training with their own statistics, which go into the running ones, and in
    /// evaluation with those.
    ///
    /// # Errors
    /// [`Error::Torch`] when the shape doesn't fit.
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
            .map_err(Error::torch("batch_norm"))
    }

    pub(super) fn count_batch(&self) -> Result<()> {
        let mut count = self.num_batches_tracked.shallow_clone();
        tch::no_grad(|| count.f_add_scalar_(1)).map(drop).map_err(Error::torch("add_"))
    }
}

impl ModuleT for BatchNorm {
    /// As [`BatchNorm::f_forward_t`]; unwinds with its error.
    fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        super::or_throw(self.f_forward_t(inputs, train))
    }
}
