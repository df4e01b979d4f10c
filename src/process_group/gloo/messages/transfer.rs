//! The bytes of tensors on a connection, without a copy.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ptr::NonNull;

use crossbeam::channel::Receiver;
use tch::{Device, Tensor};

use super::super::super::arguments::is_dense;
use super::super::super::num_bytes;
use super::frame::Frame;
use super::link::Link;

/// A frame to write, and the bytes of the tensor of this number that follow it.
pub(super) struct Outgoing {
    pub frame: Frame,
    pub bytes: Option<(u64, Tensor)>,
}

/// How many bytes a tensor has.
pub(super) fn size(tensor: &Tensor) -> usize {
    num_bytes(tensor.kind(), tensor.numel())
}

/// Writes what is queued, in that order, until nothing more can come.
pub(super) fn write(link: &Link, stream: &TcpStream, queue: &Receiver<Outgoing>) {
    for Outgoing { frame, bytes } in queue {
        let write = || {
            frame.write(&mut &*stream)?;
            bytes.as_ref().map_or(Ok(()), |(_, tensor)| write_tensor(&mut &*stream, tensor))
        };
        match write() {
            Ok(()) => bytes.iter().for_each(|(id, _)| link.written(*id)),
            Err(error) => return link.lose(&error.to_string()),
        }
    }
    let _ = stream.shutdown(Shutdown::Write); // if it is gone, that is so already
}

fn write_tensor(to: &mut impl Write, tensor: &Tensor) -> io::Result<()> {
    let (start, len) = memory(tensor)?;
    // SAFETY: these bytes are the tensor's; the handle keeps them, and the rank leaves them alone until the message has been
    // received.
    to.write_all(unsafe { std::slice::from_raw_parts(start, len) })
}

/// Fills `tensor`, which is in one piece on the CPU and used by nobody else.
pub(super) fn read_tensor(from: &mut impl Read, tensor: &mut Tensor) -> io::Result<()> {
    let (start, len) = memory(tensor)?;
    // SAFETY: as in `write_tensor`.
    from.read_exact(unsafe { std::slice::from_raw_parts_mut(start, len) })
}

/// Returns where the bytes of a tensor are, and how many.
///
/// # Errors
/// When it is not in one piece on the CPU.
fn memory(tensor: &Tensor) -> io::Result<(*mut u8, usize)> {
    if tensor.device() != Device::Cpu || !is_dense(tensor).map_err(io::Error::other)? {
        return Err(io::Error::other(
            "a message takes tensors in one piece on the CPU; pass tensor.contiguous()",
        ));
    }
    Ok(match size(tensor) {
        0 => (NonNull::dangling().as_ptr(), 0), // libtorch has no address for these
        len => (tensor.data_ptr().cast(), len),
    })
}
