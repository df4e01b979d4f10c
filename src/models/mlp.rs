//! A multilayer perceptron.

use std::sync::Arc;

use tch::nn::{Linear, Module, ModuleT, Path};
use tch::{TchError, Tensor};

use super::layers::linear;
use super::{Activation, Dropout};
use crate::ffi::Generator;

/// Dense layers with an activation, and optionally dropout, between them. A single layer is a linear model.
#[derive(Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
    activation: Activation,
    dropout: Option<Dropout>,
}

impl Mlp {
    /// Creates the equivalent of `nn.Sequential(nn.Linear, nn.ReLU, nn.Linear, ...)`, with `activation`. With a
    /// `dropout`, an `nn.Dropout` follows each activation. `widths` go from the inputs to the outputs. Two widths make
    /// a single `nn.Linear`.
    pub(super) fn new(
        root: &Path,
        widths: &[i64],
        activation: Activation,
        dropout: Option<Dropout>,
    ) -> Result<Self, TchError> {
        let modules_a_layer = if dropout.is_some() { 3 } else { 2 };
        let layers = widths.windows(2).enumerate().map(|(i, width)| {
            let path = if widths.len() == 2 { root.clone() } else { root / (modules_a_layer * i) };
            linear(&path, width[0], width[1])
        });
        Ok(Self { layers: layers.collect::<Result<_, _>>()?, activation, dropout })
    }

    /// Returns the same model, with dropout from another generator.
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
            current = self.activation.forward(&layer.forward(&current));
            if let Some(dropout) = &self.dropout {
                current = dropout.forward_t(&current, train);
            }
        }
        last.forward(&current)
    }
}
