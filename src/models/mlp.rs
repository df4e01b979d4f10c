//! Dense layers.

use std::sync::Arc;

use tch::nn::{Linear, Module, ModuleT, Path};
use tch::{TchError, Tensor};

use super::Dropout;
use super::layers::linear;
use crate::torch::Generator;

/// Dense layers with ReLU, and dropout if wanted, between them; one layer is a linear model.
#[derive(Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
    dropout: Option<Dropout>,
}

impl Mlp {
    /// `nn.Sequential(nn.Linear, nn.ReLU, nn.Linear, ...)`, with an `nn.Dropout` after each `nn.ReLU` if there is
    /// one; or a single `nn.Linear`.
    pub(super) fn new(
        root: &Path,
        in_features: i64,
        hidden: &[i64],
        out_features: i64,
        dropout: Option<Dropout>,
    ) -> Result<Self, TchError> {
        let widths = [&[in_features][..], hidden, &[out_features]].concat();
        let modules_a_layer = if dropout.is_some() { 3 } else { 2 };
        let layers = widths.windows(2).enumerate().map(|(i, width)| {
            let path = if hidden.is_empty() { root.clone() } else { root / (modules_a_layer * i) };
            linear(&path, width[0], width[1])
        });
        Ok(Self { layers: layers.collect::<Result<_, _>>()?, dropout })
    }

    /// The same, with dropout from another generator.
    pub(super) fn with_generator(self, generator: &Arc<Generator>) -> Self {
        let dropout = self.dropout.map(|dropout| dropout.with_generator(generator));
        Self { dropout, ..self }
    }
}

impl ModuleT for Mlp {
    fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        let (last, hidden) = self.layers.split_last().expect("a model has at least one layer");
        let mut current = inputs.shallow_clone();
        for layer in hidden {
            current = layer.forward(&current).relu();
            if let Some(dropout) = &self.dropout {
                current = dropout.forward_t(&current, train);
            }
        }
        last.forward(&current)
    }
}
