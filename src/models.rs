//! The models that can be had by name, with PyTorch's default initialisation.

use serde::{Deserialize, Serialize};
use tch::nn::{self, Init, Linear, Module, Path};
use tch::{Device, TchError, Tensor};

use crate::error::{Error, Result};
use crate::torch::fork_rng;

/// Which model: `--model`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// One dense layer.
    Linear,
    /// Dense layers with ReLU between them.
    Mlp,
}

impl ModelKind {
    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            ModelKind::Linear => "linear",
            ModelKind::Mlp => "mlp",
        }
    }
}

/// What a model looks like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelConfig {
    /// Which model.
    pub kind: ModelKind,
    /// How many numbers go in, a sample.
    pub in_features: i64,
    /// How many come out.
    pub out_features: i64,
    /// The widths of the hidden layers of an mlp, first to last.
    pub hidden: Vec<i64>,
}

/// Dense layers with ReLU between them; one layer is a linear model.
#[derive(Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
}

impl ModelConfig {
    /// Builds the model in a `VarStore` of its own, on `device`.
    ///
    /// The parameters are those of PyTorch's `nn.Linear` (or an `nn.Sequential` of them, with `nn.ReLU`
    /// between) after `torch.manual_seed(seed)`, bit for bit; on a GPU as well, because they are drawn
    /// on the CPU. Their names are `nn.Sequential`'s too: `weight` and `bias` of a single layer, or
    /// `0.weight`, `0.bias`, `2.weight`, ...
    ///
    /// # Errors
    /// [`Error::Torch`] when libtorch refuses, as it does without the memory.
    pub fn build(&self, device: Device, seed: u64) -> Result<(nn::VarStore, Mlp)> {
        let making = || Error::torch("making the model");
        let vs = nn::VarStore::new(Device::Cpu);
        let mlp = fork_rng(seed, || self.layers(&vs.root()))?.map_err(making())?;
        // The tensors stay the same objects, here, in the layers and in the VarStore.
        for mut parameter in vs.trainable_variables() {
            let moved = tch::no_grad(|| parameter.f_to_device(device)).map_err(making())?;
            parameter.f_set_data(&moved).map_err(making())?;
        }
        Ok((vs, mlp))
    }

    fn layers(&self, root: &Path) -> Result<Mlp, TchError> {
        let hidden = if self.kind == ModelKind::Linear { &[][..] } else { &self.hidden };
        let mut widths = vec![self.in_features];
        widths.extend(hidden);
        widths.push(self.out_features);
        let layers = widths.windows(2).enumerate().map(|(i, width)| {
            let path = if hidden.is_empty() { root.clone() } else { root / (2 * i) };
            linear(&path, width[0], width[1])
        });
        Ok(Mlp { layers: layers.collect::<Result<_, _>>()? })
    }
}

/// `torch.nn.Linear`: the same distribution, drawn in the same order. (tch's own default differs.)
fn linear(path: &Path, in_features: i64, out_features: i64) -> Result<Linear, TchError> {
    let fan_in = in_features as f64;
    // kaiming_uniform_ with a = sqrt(5), computed in the same steps to get the same last bit.
    let gain = (2.0 / (1.0 + 5f64.sqrt().powi(2))).sqrt();
    let weight_bound = 3f64.sqrt() * (gain / fan_in.sqrt());
    let bias_bound = 1.0 / fan_in.sqrt();
    let uniform = |bound: f64| Init::Uniform { lo: -bound, up: bound };
    Ok(Linear {
        ws: path.f_var("weight", &[out_features, in_features], uniform(weight_bound))?,
        bs: Some(path.f_var("bias", &[out_features], uniform(bias_bound))?),
    })
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
