//! Layers with PyTorch's initialisation: the same distributions, drawn in the same order. (tch's defaults differ.)

use std::sync::Arc;

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};
use tch::nn::{Init, ModuleT, Path};
use tch::{TchError, Tensor};

use super::or_throw;
use crate::ffi::Generator;

/// The weight and, if wanted, the bias of a layer: of `torch.nn.Linear`, `Conv2d` or `LayerNorm`.
#[derive(Debug)]
pub(super) struct Parameters {
    pub weight: Tensor,
    pub bias: Option<Tensor>,
}

impl Parameters {
    /// Creates a weight of shape `shape` and a bias, initialised as by PyTorch's `reset_parameters`. The first dimension
    /// is the layer's outputs.
    pub(super) fn drawn(path: &Path, shape: &[i64]) -> Result<Self, TchError> {
        let (weight_bound, bias_bound) = default_bounds(shape[1..].iter().product());
        let uniform = |bound: f64| Init::Uniform { lo: -bound, up: bound };
        let weight = path.f_var("weight", shape, uniform(weight_bound))?;
        let bias = path.f_var("bias", &shape[..1], uniform(bias_bound))?;
        Ok(Self { weight, bias: Some(bias) })
    }
}

/// Returns the bounds of the uniform distributions from which PyTorch draws the weights and biases of a layer. `fan_in`
/// is the number of inputs of each output.
pub(super) fn default_bounds(fan_in: i64) -> (f64, f64) {
    let fan_in = fan_in as f64;
    // kaiming_uniform_ with a = sqrt(5), computed in PyTorch's steps for bit-identical results.
    let gain = (2.0 / (1.0 + 5f64.sqrt().powi(2))).sqrt();
    (3f64.sqrt() * (gain / fan_in.sqrt()), 1.0 / fan_in.sqrt())
}

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

/// Zeros each number with probability `p` in training, and scales the others so that the mean stays.
///
/// Follows `torch.nn.Dropout`. It draws from a [`Generator`] of the rank, so the numbers are the same in every run.
/// With [`Tensor::dropout`], CPU ranks would draw from one shared generator in random order.
#[derive(Debug, Clone)]
pub struct Dropout {
    p: f64,
    pub(super) generator: Arc<Generator>,
}

impl Dropout {
    /// Creates a layer that zeros with probability `p`, from 0 to 1.
    ///
    /// # Panics
    /// Panics for another `p`.
    #[track_caller]
    pub fn new(p: f64, generator: &Arc<Generator>) -> Self {
        assert!(
            (0.0..=1.0).contains(&p),
            "the dropout probability is {p}; give a number from 0 to 1"
        );
        Self { p, generator: generator.clone() }
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        if train && self.p > 0.0 {
            or_throw(self.generator.dropout(inputs, self.p))
        } else {
            inputs.shallow_clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use tch::Device;

    use super::*;

    #[test]
    fn dropout_refuses_what_is_no_probability() {
        let generator = Arc::new(Generator::new(Device::Cpu, 0, 0).unwrap());
        for (p, text) in
            [(1.5, "is 1.5; give"), (-0.1, "is -0.1; give"), (f64::NAN, "is NaN; give")]
        {
            let result = catch_unwind(AssertUnwindSafe(|| Dropout::new(p, &generator)));
            let message = *result.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains(text), "{message}");
        }
        for p in [0.0, 1.0] {
            let _ = Dropout::new(p, &generator);
        }
    }

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
