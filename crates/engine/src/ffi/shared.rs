//! [`SharedTensor`]: a tensor that several threads may read at once.

use tch::Tensor;

/// A read-only tensor shared between ranks, such as a data set.
///
/// `tch::Tensor` is `Send` but not `Sync`, because it can be changed in place through a shared reference. Here every
/// reader gets its own handle to the same memory, and must only read through it. (`tch` relies on the same: a
/// `shallow_clone` can be sent to another thread, too.)
#[derive(Debug)]
pub struct SharedTensor(Tensor);

// SAFETY: the only access through a shared reference is `get`, which makes another handle. The reference count in the
// C++ tensor is atomic. A handle is exactly as safe as one that `tch` lets a thread send to another. Reading from
// several threads is safe in libtorch, and a tensor outside of autograd has no state that reading changes.
unsafe impl Sync for SharedTensor {}

impl SharedTensor {
    /// Takes over `tensor`, and detaches it from any autograd graph.
    pub fn new(tensor: Tensor) -> Self {
        Self(tensor.detach())
    }

    /// Returns another handle to the same memory. Copy the tensor before you change it.
    pub fn get(&self) -> Tensor {
        self.0.shallow_clone()
    }
}
