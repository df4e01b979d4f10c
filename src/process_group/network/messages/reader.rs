//! The two threads that serve a connection: one reads the frames of the other process and acts on them, the other
//! writes frames and the bytes of tensors, without a copy.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Receiver;
use tch::{Device, Tensor};

use super::context::Serving;
use super::frame::{EAGER_MAX_BYTES, Frame, foreign};
use super::link::{Expected, Link};
use crate::error::{Error, first_line};
use crate::ffi::TorchResult;
use crate::process_group::contiguous::is_plain_contiguous;
use crate::process_group::dtype::num_bytes;
use crate::process_group::local::MessageEnd;
use crate::runtime::Instant;

/// Reads and writes `stream`, the connection of `link`, until it ends.
pub(super) fn run(link: &Arc<Link>, stream: &Arc<TcpStream>, serving: &Serving) {
    let ended = match begin(link, stream) {
        Ok(()) => serve(link, stream, serving),
        Err(error) => Err(error),
    };
    link.lose(&match ended {
        Ok(()) => "it has left".into(),
        Err(error) => error.to_string(),
    });
}

fn begin(link: &Arc<Link>, stream: &Arc<TcpStream>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(STOP_POLL_INTERVAL))?;
    let Some(queue) = link.take_queue() else { return Ok(()) };
    let (written, to) = (link.clone(), stream.clone());
    let writing = link.context.writing.lock().clone();
    let write = move |_: &Serving| {
        write_frames(&written, &to, &queue);
        drop(writing);
    };
    link.context.thread(write).map_err(io::Error::other)
}

fn serve(link: &Arc<Link>, stream: &TcpStream, serving: &Serving) -> io::Result<()> {
    let context = &link.context;
    let mut from = StoppableReader::until_read(stream, link);
    let wrong = |why: String| foreign(&why);
    while let Some(frame) = Frame::read(&mut from)? {
        match frame {
            Frame::Offer(offer) => {
                let (kind, size) =
                    offer.check(&context.process_map, link.process).map_err(wrong)?;
                serving.set((context.members[offer.destination], None));
                let mut inline = None;
                if size <= EAGER_MAX_BYTES {
                    let tensor = Tensor::f_empty(&offer.shape, (kind, Device::Cpu));
                    let mut tensor = tensor.map_err(io::Error::other)?;
                    read_tensor(&mut from, &mut tensor)?;
                    inline = Some(tensor);
                }
                link.offered(offer, kind, inline);
            }
            Frame::Ready { id } => link.ready(id).map_err(wrong)?,
            Frame::Data { id } => {
                let expected = link.take_expected(id).map_err(wrong)?;
                serving.set((expected.rank, None));
                receive(link, &mut from, expected)?;
            }
            Frame::Taken { id } => link.taken(id).map_err(wrong)?,
            Frame::Refused { id, expected } => {
                let expected = first_line(&expected).chars().filter(|c| !c.is_control()).collect();
                link.refused(id, expected).map_err(wrong)?;
            }
            Frame::Hello { .. } | Frame::Welcome | Frame::Busy => {
                return Err(wrong("a greeting came between messages".into()));
            }
        }
    }
    Ok(())
}

/// Receives the bytes of a tensor that a rank of this process has asked for.
fn receive(link: &Link, from: &mut impl Read, expected: Expected) -> io::Result<()> {
    let Expected { mut into, source, rank, delivery } = expected;
    let mut read = || -> Result<io::Result<()>, Error> {
        if is_plain_contiguous(&into)? {
            return Ok(read_tensor(from, &mut into));
        }
        let (shape, kind) = (into.size(), into.kind());
        let contiguous = Tensor::f_empty(&shape, (kind, Device::Cpu));
        let mut contiguous = contiguous.doing("making room for a message")?;
        let read = read_tensor(from, &mut contiguous);
        if read.is_ok() {
            tch::no_grad(|| into.f_copy_(&contiguous).map(drop)).doing("copy_")?;
        }
        Ok(read)
    };
    match read() {
        Ok(Ok(())) => {
            delivery.complete(MessageEnd::From(source));
            Ok(())
        }
        Ok(Err(error)) => {
            delivery.complete(link.lost(&error.to_string()));
            Err(error)
        }
        Err(error) => {
            link.context.run.report(rank, Some(&error), error.to_string());
            delivery.complete(MessageEnd::Reported);
            Err(io::Error::other(error.to_string()))
        }
    }
}

/// Writes the queued frames in order, until no more can come.
fn write_frames(link: &Link, stream: &TcpStream, queue: &Receiver<Outgoing>) {
    for Outgoing { frame, bytes } in queue {
        let write = || {
            frame.write(&mut &*stream)?;
            let Some(mut writing) = bytes.and_then(|id| link.begin_writing(id)) else {
                return Ok(());
            };
            write_tensor(&mut &*stream, &writing.tensor)?;
            writing.is_written = true;
            Ok(())
        };
        if let Err(error) = write() {
            return link.lose(&io::Error::to_string(&error));
        }
    }
    let _ = stream.shutdown(Shutdown::Write); // fails if the peer is gone already
}

/// Interval at which a thread that waits for the other process checks whether to stop.
pub(super) const STOP_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Longest wait, when connections end, for queued data to be written and for the other process to read it.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A stream that checks, while no data arrives, whether data still can.
pub(super) struct StoppableReader<'a> {
    stream: &'a TcpStream,
    link: &'a Link,
    /// Time to continue after this process starts closing: the other process may not have read everything.
    grace: Duration,
    /// Time at which this reader first saw that this process is closing.
    closing: Option<Instant>,
}

impl<'a> StoppableReader<'a> {
    /// Returns a reader of all frames of the connection: it goes on for [`CLOSE_TIMEOUT`] after this process starts
    /// closing.
    pub(super) fn until_read(stream: &'a TcpStream, link: &'a Link) -> Self {
        Self { stream, link, grace: CLOSE_TIMEOUT, closing: None }
    }

    /// Returns a reader that stops as soon as this process is closing.
    pub(super) fn until_closing(stream: &'a TcpStream, link: &'a Link) -> Self {
        Self { stream, link, grace: Duration::ZERO, closing: None }
    }
}

impl Read for StoppableReader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.stream.read(bytes) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    let is_over = self.link.context.is_closing()
                        && self.closing.get_or_insert_with(Instant::now).elapsed() >= self.grace;
                    if is_over || self.link.is_closed() {
                        return Ok(0);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }
}

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
fn write_tensor(to: &mut impl Write, tensor: &Tensor) -> io::Result<()> {
    let (start, len) = memory(tensor)?;
    // SAFETY: these bytes are the tensor's. The handle keeps them alive. The rank does not change them before its send
    // completes, which waits for this write.
    to.write_all(unsafe { std::slice::from_raw_parts(start, len) })
}

/// Fills `tensor`, which must be contiguous, on the CPU and used nowhere else.
fn read_tensor(from: &mut impl Read, tensor: &mut Tensor) -> io::Result<()> {
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
