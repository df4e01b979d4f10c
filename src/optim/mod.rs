//! Optimizers that step the flat buffers of a model's buckets.

mod sgd;

pub use sgd::Sgd;

use tch::Tensor;

/// Parameters and their gradients as an optimizer sees them: two one-dimensional tensors of the same
/// length and kind, handles to the memory that the model uses.
#[derive(Debug)]
pub struct FlatBuffer {
    /// The parameters' values, one parameter after the other.
    pub parameters: Tensor,
    /// Their gradients, likewise. Gaps between parameters are zero.
    pub gradients: Tensor,
}
