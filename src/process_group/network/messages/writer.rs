//! The thread that writes the frames to another process.

use std::io;
use std::net::{Shutdown, TcpStream};

use crossbeam::channel::Receiver;

use super::link::Link;
use super::transfer::{Outgoing, write_tensor};

/// Writes the queued frames in order, until no more can come.
pub(super) fn run(link: &Link, stream: &TcpStream, queue: &Receiver<Outgoing>) {
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
