//! Dropout from random numbers of the rank's own.

use std::sync::Arc;

use tch::Tensor;
use tch::nn::ModuleT;

use super::or_throw;
use crate::ffi::Generator;

/// Zeros, in training, each number with a probability of its own, and scales the others so that the mean stays.
///
/// Follows `torch.nn.Dropout`. What is drawn comes from a [`Generator`] of the rank, and so is the same in every
/// run; with [`Tensor::dropout`] CPU ranks would draw from one generator in whatever order they come.
#[derive(Debug, Clone)]
pub struct Dropout {
    p: f64,
    generator: Arc<Generator>,
}

impl Dropout {
    /// Zeros with probability `p`, from 0 to 1.
    pub fn new(p: f64, generator: &Arc<Generator>) -> Self {
        Self { p, generator: generator.clone() }
    }

    /// With random numbers from another generator.
    pub(super) fn with_generator(self, generator: &Arc<Generator>) -> Self {
        Self::new(self.p, generator)
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
