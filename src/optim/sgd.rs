//! Stochastic gradient descent.

use super::FlatBuffer;
use crate::error::Result;
use crate::torch::add_scaled;

/// Plain stochastic gradient descent: `parameter -= lr * gradient`.
///
/// Follows `torch.optim.SGD` without momentum, to the bit. One libtorch call steps a whole buffer.
#[derive(Debug)]
pub struct Sgd {
    lr: f64,
    buffers: Vec<FlatBuffer>,
}

impl Sgd {
    /// Steps the parameters in `buffers`, which a
    /// [`DistributedDataParallel`](crate::DistributedDataParallel::flat_buffers) gives, with learning
    /// rate `lr`.
    pub fn new(buffers: Vec<FlatBuffer>, lr: f64) -> Self {
        Self { lr, buffers }
    }

    /// Steps once, with the gradients that are there.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch).
    pub fn step(&mut self) -> Result<()> {
        for FlatBuffer { parameters, gradients } in &self.buffers {
            add_scaled(parameters, gradients, -self.lr)?;
        }
        Ok(())
    }
}
