//! The thread that reads the frames of another process, and acts on them.

use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::Arc;

use tch::{Device, Tensor};

use super::frame::{EAGER_MAX_BYTES, Frame, foreign};
use super::guard::Serving;
use super::link::{Expected, Link};
use super::stoppable_reader::{STOP_POLL_INTERVAL, StoppableReader};
use super::{transfer, writer};
use crate::error::{Error, first_line};
use crate::ffi::TorchResult;
use crate::process_group::contiguous::is_plain_contiguous;
use crate::process_group::local::Outcome;

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
    let writing = link.context.writing();
    let write = move |_: &Serving| {
        writer::run(&written, &to, &queue);
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
        if is_plain_contiguous(&into)? {
            return Ok(transfer::read_tensor(from, &mut into));
        }
        let (shape, kind) = (into.size(), into.kind());
        let contiguous = Tensor::f_empty(&shape, (kind, Device::Cpu));
        let mut contiguous = contiguous.doing("making room for a message")?;
        let read = transfer::read_tensor(from, &mut contiguous);
        if read.is_ok() {
            tch::no_grad(|| into.f_copy_(&contiguous).map(drop)).doing("copy_")?;
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
            link.context.run.report(rank, Some(&error), error.to_string());
            delivery.complete(Outcome::Reported);
            Err(io::Error::other(error.to_string()))
        }
    }
}
