//! Layers with PyTorch's initialisation: the same distributions, drawn in the same order. (tch's defaults differ.)

use tch::nn::{Init, Linear, Path};
use tch::{TchError, Tensor};

/// `torch.nn.Linear`.
pub(super) fn linear(path: &Path, in_features: i64, out_features: i64) -> Result<Linear, TchError> {
    let (ws, bs) = weight_and_bias(path, &[out_features, in_features])?;
    Ok(Linear { ws, bs: Some(bs) })
}

/// `torch.nn.Conv2d` with a kernel of 3 x 3 and padding that keeps the size.
#[derive(Debug)]
pub(super) struct Conv3x3 {
    weight: Tensor,
    bias: Tensor,
}

impl Conv3x3 {
    pub(super) fn new(path: &Path, channels_in: i64, channels: i64) -> Result<Self, TchError> {
        let (weight, bias) = weight_and_bias(path, &[channels, channels_in, 3, 3])?;
        Ok(Self { weight, bias })
    }

    pub(super) fn forward(&self, inputs: &Tensor) -> Tensor {
        inputs.conv2d(&self.weight, Some(&self.bias), 1, 1, 1, 1)
    }
}

/// Creates a weight of shape `shape` and a bias, initialised as by PyTorch's `reset_parameters`. The first dimension
/// is the layer's outputs.
fn weight_and_bias(path: &Path, shape: &[i64]) -> Result<(Tensor, Tensor), TchError> {
    let (weight_bound, bias_bound) = default_bounds(shape[1..].iter().product());
    let uniform = |bound: f64| Init::Uniform { lo: -bound, up: bound };
    Ok((
        path.f_var("weight", shape, uniform(weight_bound))?,
        path.f_var("bias", &shape[..1], uniform(bias_bound))?,
    ))
}

/// Returns the bounds of the uniform distributions from which PyTorch draws the weights and biases of a layer. `fan_in`
/// is the number of inputs of each output.
pub(super) fn default_bounds(fan_in: i64) -> (f64, f64) {
    let fan_in = fan_in as f64;
    // kaiming_uniform_ with a = sqrt(5), computed in PyTorch's steps for bit-identical results.
    let gain = (2.0 / (1.0 + 5f64.sqrt().powi(2))).sqrt();
    (3f64.sqrt() * (gain / fan_in.sqrt()), 1.0 / fan_in.sqrt())
}
