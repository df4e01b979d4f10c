//! A small convolutional network for square images.

use std::rc::Rc;

use tch::nn::{Linear, Module, ModuleT, Path};
use tch::{TchError, Tensor};

use super::layers::{Conv3x3, linear};
use super::{Activation, BatchNorm, SyncBatchNorm};
use crate::process_group::ProcessGroup;

/// A network with stages of convolution, batch norm, activation and pooling, and a linear head.
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
#[derive(Debug)]
pub struct Cnn {
    side: i64,
    stages: Vec<Stage>,
    activation: Activation,
    head: Linear,
}

#[derive(Debug)]
struct Stage {
    conv: Conv3x3,
    norm: Norm,
}

#[derive(Debug)]
enum Norm {
    Own(BatchNorm),
    Sync(SyncBatchNorm),
}

impl Cnn {
    /// Creates the network, for arguments that passed [`check`].
    pub(super) fn new(
        root: &Path,
        in_features: i64,
        channels: &[i64],
        out_features: i64,
        activation: Activation,
    ) -> Result<Self, TchError> {
        let side = in_features.isqrt();
        let mut channels_in = 1;
        let mut stages = Vec::with_capacity(channels.len());
        for (i, &channels) in channels.iter().enumerate() {
            stages.push(Stage {
                conv: Conv3x3::new(&(root / (1 + 4 * i)), channels_in, channels)?,
                norm: Norm::Own(BatchNorm::make(
                    &(root / (2 + 4 * i)),
                    channels,
                    BatchNorm::DEFAULT,
                )?),
            });
            channels_in = channels;
        }
        let pixels = (side >> channels.len()).pow(2);
        let head = linear(&(root / (2 + 4 * channels.len())), channels_in * pixels, out_features)?;
        Ok(Self { side, stages, activation, head })
    }

    /// Returns the same network with every batch norm over the ranks of `group`.
    pub(super) fn convert_sync_batchnorm(mut self, group: &Rc<ProcessGroup>) -> Self {
        let convert = |stage: Stage| Stage {
            norm: match stage.norm {
                Norm::Own(norm) => Norm::Sync(SyncBatchNorm::convert(norm, group)),
                sync => sync,
            },
            ..stage
        };
        self.stages = self.stages.into_iter().map(convert).collect();
        self
    }
}

/// Checks the arguments of the network. An error is the wrong key of the configuration, and the problem.
pub(super) fn check(in_features: i64, channels: &[i64]) -> Result<(), (&'static str, String)> {
    let side = in_features.max(0).isqrt();
    if side < 1 || side * side != in_features {
        let problem = format!(
            "{in_features} is not a square number, and a cnn takes square images; use for example 784 (28 x 28)"
        );
        return Err(("in_features", problem));
    }
    let stages = channels.len();
    if stages == 0 {
        let problem = "a cnn needs at least one stage; use for example 16,32".into();
        return Err(("channels", problem));
    }
    if let Some(channels) = channels.iter().find(|&&channels| channels < 1) {
        return Err(("channels", format!("{channels} is too small; use 1 or more")));
    }
    // Each stage halves the side.
    if stages as u32 > side.ilog2() {
        let problem = format!(
            "{stages} stages leave nothing of images of {side} x {side} pixels; use {} or fewer, or larger \
             images",
            side.ilog2()
        );
        return Err(("channels", problem));
    }
    Ok(())
}

impl ModuleT for Cnn {
    fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        let mut current = inputs.view([-1, 1, self.side, self.side]);
        for Stage { conv, norm } in &self.stages {
            let normal = match norm {
                Norm::Own(norm) => norm.forward_t(&conv.forward(&current), train),
                Norm::Sync(norm) => norm.forward_t(&conv.forward(&current), train),
            };
            current = self.activation.forward(&normal).max_pool2d(2, 2, 0, 1, false);
        }
        self.head.forward(&current.flatten(1, -1))
    }
}
