//! A multilayer perceptron, and a linear model, which is one without hidden layers.

use tch::nn::{ModuleT, Path};
use tch::{TchError, Tensor};

use super::layer_output;
use super::layers::Parameters;
use super::{Activation, Architecture, Dropout, Layers, Model, ModelConfig, ModelKind};

/// One dense layer.
pub(super) const LINEAR: Architecture = Architecture { keys: &[], ..MLP };

/// Dense layers with an activation between them.
pub(super) const MLP: Architecture = Architecture {
    keys: &["hidden", "activation", "dropout"],
    check: |_| Ok(()),
    num_parameters: |config| {
        let weights_and_biases = |width: &[i64]| (width[0] as f64 + 1.0) * width[1] as f64;
        widths(config).windows(2).map(weights_and_biases).sum()
    },
    build: |root, config, dropout| {
        Mlp::new(root, &widths(config), config.activation, dropout).map(Model::new)
    },
};

/// Returns the widths from the inputs to the outputs. A linear model has no hidden layers.
fn widths(config: &ModelConfig) -> Vec<i64> {
    let hidden: &[i64] = if config.kind == ModelKind::Linear { &[] } else { &config.hidden };
    [&[config.in_features][..], hidden, &[config.out_features]].concat()
}

/// Dense layers with an activation, and optionally dropout, between them.
#[derive(Debug)]
struct Mlp {
    layers: Vec<Parameters>,
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
            Parameters::drawn(&path, &[width[1], width[0]])
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
        let linear = |layer: &Parameters, x: &Tensor| x.linear(&layer.weight, layer.bias.as_ref());
        let mut current = inputs.shallow_clone();
        // The names that the modules of PyTorch's `nn.Sequential` have.
        let mut module = 0;
        let mut done = |output: &Tensor| {
            layer_output(module, output);
            module += 1;
        };
        for layer in hidden {
            current = linear(layer, &current);
            done(&current);
            current = self.activation.forward(&current);
            done(&current);
            if let Some(dropout) = &self.dropout {
                current = dropout.forward_t(&current, train);
                done(&current);
            }
        }
        let output = linear(last, &current);
        if hidden.is_empty() {
            layer_output("", &output); // it is the whole model
        } else {
            done(&output);
        }
        output
    }
}
