//! The elements of small tensors, which travel with a rank's announcement.

use super::conflict::TensorMemory;

/// The largest size of a call's inputs, in bytes, with which they travel with the announcement. Every rank then reads all
/// inputs, and not only a slice of each.
pub(super) const MAX_BYTES: usize = 512;

/// Copies of a call's inputs, one after the other.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct InputCopies([u8; MAX_BYTES]);

impl InputCopies {
    pub(super) fn nothing() -> Self {
        Self([0; MAX_BYTES])
    }

    /// Copies `tensors`, whose elements have `size` bytes.
    ///
    /// # Safety
    /// The tensors are in the memory of the CPU, and no other thread writes to them.
    pub(super) unsafe fn copy(&mut self, tensors: &[TensorMemory], size: usize) {
        let mut free = &mut self.0[..];
        for tensor in tensors {
            let (copy, rest) = free.split_at_mut(tensor.numel * size);
            // SAFETY: as the caller promises; nothing overlaps this memory of ours.
            unsafe { std::ptr::copy_nonoverlapping(tensor.data, copy.as_mut_ptr(), copy.len()) };
            free = rest;
        }
    }

    /// Returns the address of the byte `offset`, to read from.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.0[offset..].as_ptr().cast_mut()
    }
}
