//! Dense layers.

use tch::nn::{Linear, Module, Path};
use tch::{TchError, Tensor};

use super::layers::linear;

/// Dense layers with ReLU between them; one layer is a linear model.
#[derive(Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    /// `nn.Sequential(nn.Linear, nn.ReLU, nn.Linear, ...)`, or a single `nn.Linear`.
    pub(super) fn new(
        root: &Path,
        in_features: i64,
        hidden: &[i64],
        out_features: i64,
    ) -> Result<Self, TchError> {
        let widths = [&[in_features][..], hidden, &[out_features]].concat();
        let layers = widths.windows(2).enumerate().map(|(i, width)| {
            let path = if hidden.is_empty() { root.clone() } else { root / (2 * i) };
            linear(&path, width[0], width[1])
        });
        Ok(Self { layers: layers.collect::<Result<_, _>>()? })
    }
}

impl Module for Mlp {
    fn forward(&self, inputs: &Tensor) -> Tensor {
        let (last, hidden) = self.layers.split_last().expect("a model has at least one layer");
        let mut current = inputs.shallow_clone();
        for layer in hidden {
            current = layer.forward(&current).relu();
        }
        last.forward(&current)
    }
}
