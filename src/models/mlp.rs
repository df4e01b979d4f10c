//! A multilayer perceptron, and a linear model, which is one without hidden layers.

use tch::nn::{Linear, Module, ModuleT, Path};
use tch::{TchError, Tensor};

use super::layers::linear;
use super::{Activation, Architecture, Dropout, Layers, Model, ModelConfig};

/// One dense layer.
pub(super) const LINEAR: Architecture = Architecture {
    keys: &[],
    check: |_| Ok(()),
    num_parameters: |config| num_parameters(&widths(config, &[])),
    build: |root, config, _| {
        Mlp::new(root, &widths(config, &[]), config.activation, None).map(Model::new)
    },
};

/// Dense layers with an activation between them.
pub(super) const MLP: Architecture = Architecture {
    keys: &["hidden", "activation", "dropout"],
    check: |_| Ok(()),
    num_parameters: |config| num_parameters(&widths(config, &config.hidden)),
    build: |root, config, dropout| {
        let widths = widths(config, &config.hidden);
        Mlp::new(root, &widths, config.activation, dropout).map(Model::new)
    },
};

/// Returns the widths from the inputs to the outputs.
fn widths(config: &ModelConfig, hidden: &[i64]) -> Vec<i64> {
    [&[config.in_features][..], hidden, &[config.out_features]].concat()
}

/// Returns the number of weights and biases of dense layers.
fn num_parameters(widths: &[i64]) -> f64 {
    widths.windows(2).map(|width| (width[0] as f64 + 1.0) * width[1] as f64).sum()
}

/// Dense layers with an activation, and optionally dropout, between them.
#[derive(Debug)]
struct Mlp {
    layers: Vec<Linear>,
    activation: Activation,
    dropout: Option<Dropout>,
}

impl Mlp {
    /// Creates the equivalent of `nn.Sequential(nn.Linear, nn.ReLU, nn.Linear, ...)`, with `activation`. With a
    /// `dropout`, an `nn.Dropout` follows each activation. `widths` go from the inputs to the outputs. Two widths make
    /// a single `nn.Linear`.
    fn new(
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
}

impl Layers for Mlp {
    fn dropout(&mut self) -> Option<&mut Dropout> {
        self.dropout.as_mut()
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
