//! Dropout with the rank's own random number generator.

use std::sync::Arc;

use tch::Tensor;
use tch::nn::ModuleT;

use super::or_throw;
use crate::ffi::Generator;

/// Zeros each number with probability `p` in training, and scales the others so that the mean stays.
///
/// Follows `torch.nn.Dropout`. It draws from a [`Generator`] of the rank, so the numbers are the same in every run.
/// With [`Tensor::dropout`], CPU ranks would draw from one shared generator in random order.
#[derive(Debug, Clone)]
pub struct Dropout {
    p: f64,
    generator: Arc<Generator>,
}

impl Dropout {
    /// Creates a layer that zeros with probability `p`, from 0 to 1.
    pub fn new(p: f64, generator: &Arc<Generator>) -> Self {
        Self { p, generator: generator.clone() }
    }

    /// Draws from `generator` from now on.
    pub(super) fn set_generator(&mut self, generator: &Arc<Generator>) {
        self.generator = generator.clone();
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
