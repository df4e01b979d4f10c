//! A small convolutional network for square images.

use std::rc::Rc;

use send_wrapper::SendWrapper;
use tch::nn::{ModuleT, Path};
use tch::{TchError, Tensor};

use super::layer_output;
use super::layers::Parameters;
use super::{Activation, Architecture, BatchNorm, Layers, Model, ModelConfig, or_throw};
use crate::process_group::ProcessGroup;

/// A convolutional network for square images.
pub(super) const CNN: Architecture = Architecture {
    keys: &["channels", "activation", "sync_batch_norm"],
    check: |config| check(config.in_features, &config.hidden),
    num_parameters: |config| {
        let (mut parameters, mut channels_in) = (0.0, 1.0);
        for &channels in &config.hidden {
            // 3 x 3 weights and a bias; a batch norm's weight and bias.
            parameters += (channels_in * 9.0 + 3.0) * channels as f64;
            channels_in = channels as f64;
        }
        let side = config.in_features.max(0).isqrt() >> config.hidden.len().min(63);
        let pixels = (side as f64).powi(2);
        parameters + (channels_in * pixels + 1.0) * config.out_features as f64
    },
    build: |root, config, _| Cnn::new(root, config).map(Model::new),
};

/// The stages and the head of [`ModelKind::Cnn`](super::ModelKind::Cnn).
#[derive(Debug)]
struct Cnn {
    side: i64,
    /// The convolution of each stage, with a kernel of 3 x 3 and padding that keeps the size, and its batch norm.
    stages: Vec<(Parameters, BatchNorm)>,
    activation: Activation,
    head: Parameters,
    /// The ranks over whose samples the batch norms normalize; `None` for those of this rank.
    group: Option<SendWrapper<Rc<ProcessGroup>>>,
}

impl Cnn {
    fn new(root: &Path, config: &ModelConfig) -> Result<Self, TchError> {
        let ModelConfig { in_features, out_features, hidden: ref channels, activation, .. } =
            *config;
        let side = in_features.isqrt();
        let mut channels_in = 1;
        let mut stages = Vec::with_capacity(channels.len());
        for (i, &channels) in channels.iter().enumerate() {
            stages.push((
                Parameters::drawn(&(root / (1 + 4 * i)), &[channels, channels_in, 3, 3])?,
                BatchNorm::make(&(root / (2 + 4 * i)), channels, BatchNorm::DEFAULT)?,
            ));
            channels_in = channels;
        }
        let pixels = (side >> channels.len()).pow(2);
        let head = root / (2 + 4 * channels.len());
        let head = Parameters::drawn(&head, &[out_features, channels_in * pixels])?;
        Ok(Self { side, stages, activation, head, group: None })
    }
}

impl Layers for Cnn {
    fn convert_sync_batchnorm(&mut self, group: &Rc<ProcessGroup>) {
        self.group = Some(SendWrapper::new(group.clone()));
    }
}

fn check(in_features: i64, channels: &[i64]) -> Result<(), (&'static str, String)> {
    let (side, stages) = (in_features.max(0).isqrt(), channels.len());
    if side < 2 || side * side != in_features {
        let problem = format!(
            "{in_features} is not a square number of 4 or more, and a cnn takes square images; use for example 784 (28 x 28)"
        );
        return Err(("in_features", problem));
    }
    let most = side.ilog2(); // each stage halves the side
    let problem = if stages == 0 {
        "a cnn needs at least one stage; use for example 16,32".into()
    } else if let Some(channels) = channels.iter().find(|&&channels| channels < 1) {
        format!("{channels} is too small; use 1 or more")
    } else if stages as u32 > most {
        format!(
            "{stages} stages leave nothing of images of {side} x {side} pixels; use {most} or fewer, or larger images"
        )
    } else {
        return Ok(());
    };
    Err(("channels", problem))
}

impl ModuleT for Cnn {
    fn forward_t(&self, inputs: &Tensor, train: bool) -> Tensor {
        let mut current = inputs.view([-1, 1, self.side, self.side]);
        // The names that the modules of PyTorch's `nn.Sequential` have.
        let mut module = 0;
        let mut done = |output: &Tensor| {
            layer_output(module, output);
            module += 1;
        };
        done(&current);
        for (conv, norm) in &self.stages {
            let convolved = current.conv2d(&conv.weight, conv.bias.as_ref(), 1, 1, 1, 1);
            done(&convolved);
            let normal = or_throw(match &self.group {
                None => norm.f_forward_t(&convolved, train),
                Some(group) => norm.f_forward_over(group, &convolved, train),
            });
            done(&normal);
            let active = self.activation.forward(&normal);
            done(&active);
            current = active.max_pool2d(2, 2, 0, 1, false);
            done(&current);
        }
        let flat = current.flatten(1, -1);
        done(&flat);
        let output = flat.linear(&self.head.weight, self.head.bias.as_ref());
        done(&output);
        output
    }
}
