//! A tensor that several threads may read at once.

use tch::Tensor;

/// A read-only tensor shared between ranks, such as a data set that exists once.
///
/// `tch::Tensor` is `Send` but not `Sync`, because it can be changed in place through a shared
/// reference. Here every reader gets its own handle to the same memory, and must only read through it
/// (which is as far as `tch`'s own handles can be trusted: `shallow_clone` is sent between threads, too).
#[derive(Debug)]
pub struct SharedTensor(Tensor);

// SAFETY: the only access through a shared reference is `get`, which makes another handle: the
// reference count in the C++ tensor is atomic. What is done with a handle is as safe, or not, as with one
// that `tch` lets a thread send to another. Reading from several threads is safe in libtorch, and a tensor
// that takes no part in autograd has no state that reading changes.
unsafe impl Sync for SharedTensor {}

impl SharedTensor {
    /// Takes over `tensor`, and detaches it from any autograd graph.
    pub fn new(tensor: Tensor) -> Self {
        Self(tensor.detach())
    }

    /// Another handle to the same memory. Copy it before you change anything in it.
    pub fn get(&self) -> Tensor {
        self.0.shallow_clone()
    }
}
