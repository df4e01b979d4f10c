//! The bytes of tensors on a connection, without a copy.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};

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

/// Checks that the bytes of `tensor` are its elements.
fn check(tensor: &Tensor) -> io::Result<()> {
    if tensor.device() == Device::Cpu && is_dense(tensor).map_err(io::Error::other)? {
        return Ok(());
    }
    Err(io::Error::other("the tensor of a message must be in one piece on the CPU"))
}

fn write_tensor(to: &mut impl Write, tensor: &Tensor) -> io::Result<()> {
    check(tensor)?;
    let len = size(tensor);
    if len == 0 {
        return Ok(());
    }
    // SAFETY: in one piece on the CPU, with so many bytes; the handle keeps them, and the rank leaves them alone until the
    // message has been received.
    let bytes = unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), len) };
    to.write_all(bytes)
}

/// Fills `tensor`, which is in one piece on the CPU and used by nobody else.
pub(super) fn read_tensor(from: &mut impl Read, tensor: &mut Tensor) -> io::Result<()> {
    check(tensor)?;
    let len = size(tensor);
    if len == 0 {
        return Ok(());
    }
    // SAFETY: in one piece on the CPU, with so many bytes; the handle keeps them, and the rank leaves them alone until the
    // message has been received.
    let bytes = unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<u8>(), len) };
    from.read_exact(bytes)
}
