//! The thread that writes the frames to another process.

use std::net::{Shutdown, TcpStream};

use crossbeam::channel::Receiver;

use super::link::Link;
use super::transfer::{Outgoing, write_tensor};

/// Writes the queued frames in order, until no more can come.
pub(super) fn run(link: &Link, stream: &TcpStream, queue: &Receiver<Outgoing>) {
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
    let _ = stream.shutdown(Shutdown::Write); // fails if the peer is gone already
}
