//! Activation functions.

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};
use tch::Tensor;

/// The activation function between layers: `--activation`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum Activation {
    /// `torch.nn.ReLU`.
    Relu,
    /// `torch.nn.Tanh`.
    Tanh,
    /// `torch.nn.GELU`, exact, without the tanh approximation.
    Gelu,
    /// `torch.nn.Sigmoid`.
    Sigmoid,
}

impl Activation {
    /// Applies the function to each element.
    pub(super) fn forward(self, inputs: &Tensor) -> Tensor {
        match self {
            Activation::Relu => inputs.relu(),
            Activation::Tanh => inputs.tanh(),
            Activation::Gelu => inputs.gelu("none"),
            Activation::Sigmoid => inputs.sigmoid(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the definitions in torch.nn's documentation.
    #[test]
    fn activations_match_their_definitions() {
        let x = Tensor::from_slice(&[-1.0f64, 0.0, 0.5, 2.0]);
        for (activation, expected) in [
            (Activation::Relu, [0.0, 0.0, 0.5, 2.0]),
            (Activation::Tanh, [-0.761594155956, 0.0, 0.462117157260, 0.964027580076]),
            (Activation::Gelu, [-0.158655253931, 0.0, 0.345731230637, 1.954499736104]),
            (Activation::Sigmoid, [0.268941421370, 0.5, 0.622459331202, 0.880797077978]),
        ] {
            let found = activation.forward(&x);
            assert!(found.allclose(&Tensor::from_slice(&expected), 0.0, 1e-11, false), "{found}");
        }
    }
}
