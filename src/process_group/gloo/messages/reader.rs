//! The thread that reads the frames of another process, and acts on them.

use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tch::{Device, Tensor};

use super::super::super::arguments::is_dense;
use super::super::super::threaded::Outcome;
use super::frame::{Frame, MAX_INLINE, foreign};
use super::guard::Serving;
use super::link::{Expected, Link};
use super::{GRACE, transfer};
use crate::error::{Error, first_line};

/// Interval at which a thread that waits for the other process checks whether to stop.
pub(super) const TICK: Duration = Duration::from_millis(500);

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
    stream.set_read_timeout(Some(TICK))?;
    let Some(queue) = link.take_queue() else { return Ok(()) };
    let (writer, to) = (link.clone(), stream.clone());
    let writing = link.post.writing();
    let write = move |_: &Serving| {
        transfer::write(&writer, &to, &queue);
        drop(writing);
    };
    link.post.thread(write).map_err(io::Error::other)
}

fn serve(link: &Arc<Link>, stream: &TcpStream, serving: &Serving) -> io::Result<()> {
    let post = &link.post;
    let mut from = Patient { stream, link, grace: GRACE, closing: None };
    let wrong = |why: String| foreign(&why);
    while let Some(frame) = Frame::read(&mut from)? {
        match frame {
            Frame::Offer(offer) => {
                let (kind, size) = offer.check(&post.layout, link.process).map_err(wrong)?;
                serving.set((post.members[offer.destination], None));
                let mut inline = None;
                if size <= MAX_INLINE {
                    let tensor = Tensor::f_empty(&offer.shape, (kind, Device::Cpu));
                    let mut tensor = tensor.map_err(io::Error::other)?;
                    transfer::read_tensor(&mut from, &mut tensor)?;
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
        if is_dense(&into)? {
            return Ok(transfer::read_tensor(from, &mut into));
        }
        let (shape, kind) = (into.size(), into.kind());
        let dense = Tensor::f_empty(&shape, (kind, Device::Cpu));
        let mut dense = dense.map_err(Error::torch("making room for a message"))?;
        let read = transfer::read_tensor(from, &mut dense);
        if read.is_ok() {
            tch::no_grad(|| into.f_copy_(&dense).map(drop)).map_err(Error::torch("copy_"))?;
        }
        Ok(read)
    };
    match read() {
        Ok(Ok(())) => {
            delivery.complete(Outcome::From(source));
            Ok(())
        }
        Ok(Err(error)) => {
            delivery.complete(link.lost(&error.to_string()));
            Err(error)
        }
        Err(error) => {
            link.post.run.report(rank, Some(&error), error.to_string());
            delivery.complete(Outcome::Reported);
            Err(io::Error::other(error.to_string()))
        }
    }
}

/// A stream that checks, while no data arrives, whether data still can.
pub(super) struct Patient<'a> {
    stream: &'a TcpStream,
    link: &'a Link,
    /// Time to continue after this process starts closing: the other process may not have read everything.
    grace: Duration,
    /// Time at which this reader first saw that this process is closing.
    closing: Option<Instant>,
}

impl<'a> Patient<'a> {
    /// Returns one that stops as soon as this process is closing.
    pub(super) fn until_closing(stream: &'a TcpStream, link: &'a Link) -> Self {
        Self { stream, link, grace: Duration::ZERO, closing: None }
    }
}

impl Read for Patient<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.stream.read(bytes) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    let is_over = self.link.post.is_closing()
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
