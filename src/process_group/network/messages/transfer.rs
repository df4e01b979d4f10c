//! Reads and writes of tensors' bytes on a connection, without a copy.

use std::io::{self, Read, Write};
use std::ptr::NonNull;

use tch::{Device, Tensor};

use super::frame::Frame;
use crate::process_group::contiguous::is_plain_contiguous;
use crate::process_group::dtype::num_bytes;

/// A frame to write. `bytes` is the offer whose tensor follows.
pub(super) struct Outgoing {
    pub frame: Frame,
    pub bytes: Option<u64>,
}

/// Returns the size of a tensor in bytes.
pub(super) fn size(tensor: &Tensor) -> usize {
    num_bytes(tensor.kind(), tensor.numel())
}

/// Writes the bytes of `tensor`, which must be contiguous and on the CPU.
pub(super) fn write_tensor(to: &mut impl Write, tensor: &Tensor) -> io::Result<()> {
    let (start, len) = memory(tensor)?;
    // SAFETY: these bytes are the tensor's. The handle keeps them alive. The rank does not change them before its send
    // completes, which waits for this write.
    to.write_all(unsafe { std::slice::from_raw_parts(start, len) })
}

/// Fills `tensor`, which must be contiguous, on the CPU and used nowhere else.
pub(super) fn read_tensor(from: &mut impl Read, tensor: &mut Tensor) -> io::Result<()> {
    let (start, len) = memory(tensor)?;
    // SAFETY: as in `write_tensor`. The receive completes after this read.
    from.read_exact(unsafe { std::slice::from_raw_parts_mut(start, len) })
}

/// Returns the address of a tensor's bytes, and their number.
///
/// # Errors
/// If the tensor is not contiguous, or not on the CPU.
fn memory(tensor: &Tensor) -> io::Result<(*mut u8, usize)> {
    if tensor.device() != Device::Cpu || !is_plain_contiguous(tensor).map_err(io::Error::other)? {
        return Err(io::Error::other(
            "a message takes tensors in one piece on the CPU; pass tensor.contiguous()",
        ));
    }
    Ok(match size(tensor) {
        0 => (NonNull::dangling().as_ptr(), 0), // libtorch gives an empty tensor no address
        len => (tensor.data_ptr().cast(), len),
    })
}
