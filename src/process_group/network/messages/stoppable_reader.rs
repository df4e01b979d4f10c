//! Reads that wait for the other process, but not for longer than it can still send.

use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::link::Link;

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
