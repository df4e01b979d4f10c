//! What a collective needs to know about a tensor, in one call: tch makes several, and allocates in `size` and `numel`.

use std::ffi::c_char;
use std::ptr;

use smallvec::SmallVec;
use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::shim::{check, raw};
use crate::error::Result;

/// A tensor's memory and shape. The pointers are valid until the tensor changes.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct TensorFacts {
    /// Address of the first element; null for a tensor without memory, such as a sparse one.
    pub data: *mut u8,
    /// Number of elements.
    pub numel: usize,
    sizes: *const i64,
    dim: usize,
    /// Whether the memory holds the elements one after the other, with their values. (Lazily conjugated and negated
    /// tensors differ from their memory by a flag bit.)
    pub is_plain: bool,
}

unsafe extern "C" {
    fn ddp_tensor_facts(tensor: *mut C_tensor, facts: *mut TensorFacts) -> *mut c_char;
}

impl TensorFacts {
    /// Looks at `tensor`, in one call of libtorch. An undefined tensor has no elements and no memory.
    pub(crate) fn of(tensor: &Tensor) -> Result<Self> {
        let (data, sizes) = (ptr::null_mut(), ptr::null());
        let mut facts = Self { data, numel: 0, sizes, dim: 0, is_plain: false };
        // SAFETY: points to a live tensor; writes one plain struct.
        check("looking at a tensor", unsafe { ddp_tensor_facts(raw(tensor), &mut facts) })?;
        Ok(facts)
    }
}

/// Calls `read` with the bytes of `tensor`, if they lie in the host's memory one after the other; else returns `None`. No
/// other thread may write to the tensor meanwhile.
pub(crate) fn with_bytes<T>(tensor: &Tensor, read: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
    let facts = TensorFacts::of(tensor)?;
    let is_readable = facts.is_plain && !facts.data.is_null() && tensor.device() == Device::Cpu;
    let len = facts.numel * tensor.kind().elt_size_in_bytes();
    // SAFETY: a live tensor's memory, which lies in sequence. Its owner reads it between two operations on it.
    Ok(is_readable.then(|| read(unsafe { std::slice::from_raw_parts(facts.data, len) })))
}

/// A tensor's shape, in place for up to four dimensions.
pub(crate) type Shape = SmallVec<[i64; 4]>;

/// Returns the shape of `tensor`; of an undefined one, that of a single number.
pub(crate) fn shape(tensor: &Tensor) -> Result<Shape> {
    let facts = TensorFacts::of(tensor)?;
    if facts.dim == 0 {
        return Ok(Shape::new());
    }
    // SAFETY: the sizes of a live tensor, which this thread does not change meanwhile.
    Ok(Shape::from_slice(unsafe { std::slice::from_raw_parts(facts.sizes, facts.dim) }))
}
