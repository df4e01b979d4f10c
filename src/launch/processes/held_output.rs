//! The output of the processes besides rank 0's, while that one shows the live view on the terminal of all.

use std::io::{self, ErrorKind, IsTerminal, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::ioctl_fionbio;

use crate::telemetry::{HeldOutput, Stream};

/// The most bytes that are read at once. A longer line is kept in parts.
const MAX_LINE_BYTES: usize = 64 << 10;

/// The most bytes that a pipe holds. What the processes have started may keep it after their end, and write on and on.
const PIPE_BYTES: usize = 1 << 20;

/// What the processes of one start have written to the terminal.
#[derive(Debug, Default)]
pub(super) struct OutputOfProcesses {
    held: Arc<Mutex<HeldOutput>>,
    readers: Vec<Reader>,
}

/// A thread that reads a pipe. It ends with the pipe, or when `stop` is dropped and what the pipe holds has been read.
#[derive(Debug)]
struct Reader {
    stop: UnixStream,
    thread: JoinHandle<()>,
}

impl OutputOfProcesses {
    /// Makes the process of `command` write to pipes instead of the terminal.
    pub(super) fn capture(command: &mut Command) {
        if io::stdout().is_terminal() {
            command.stdout(Stdio::piped());
        }
        if io::stderr().is_terminal() {
            command.stderr(Stdio::piped());
        }
    }

    /// Starts to read what `child` writes to pipes.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub(super) fn read(&mut self, child: &mut Child) -> io::Result<()> {
        if let Some(pipe) = child.stdout.take() {
            self.start(Stream::Stdout, pipe)?;
        }
        match child.stderr.take() {
            Some(pipe) => self.start(Stream::Stderr, pipe),
            None => Ok(()),
        }
    }

    fn start(&mut self, stream: Stream, pipe: impl Read + AsFd + Send + 'static) -> io::Result<()> {
        let held = self.held.clone();
        let (stop, stopped) = UnixStream::pair()?;
        ioctl_fionbio(&pipe, true)?;
        let read = move || {
            let (mut pipe, mut chunk, mut lines) = (pipe, vec![0; MAX_LINE_BYTES], Vec::new());
            let mut left = None;
            while left != Some(0) {
                let ready = [pipe.as_fd(), stopped.as_fd()];
                let mut ready = ready.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN));
                let _ = poll(&mut ready, None);
                if !ready[1].revents().is_empty() {
                    left.get_or_insert(PIPE_BYTES);
                }
                let most = left.map_or(chunk.len(), |left| left.min(chunk.len()));
                match pipe.read(&mut chunk[..most]) {
                    Ok(0) => break,
                    Ok(count) => {
                        left = left.map(|left| left - count);
                        lines.extend_from_slice(&chunk[..count]);
                        let last = lines.iter().rposition(|byte| *byte == b'\n');
                        let is_long = lines.len() >= MAX_LINE_BYTES;
                        let end = last.map_or(if is_long { lines.len() } else { 0 }, |at| at + 1);
                        if end > 0 {
                            held.lock().add(stream, &lines.drain(..end).collect::<Vec<u8>>());
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock && left.is_none() => {}
                    Err(_) => break,
                }
            }
            held.lock().add(stream, &lines);
        };
        let thread = thread::Builder::new().name("output".into());
        self.readers.push(Reader { stop, thread: thread.spawn(read)? });
        Ok(())
    }

    /// Prints all that was read. Call this when the processes have ended.
    pub(super) fn print(mut self) {
        self.end_readers();
        self.held.lock().print();
    }

    fn end_readers(&mut self) {
        for Reader { stop, thread } in self.readers.drain(..) {
            drop(stop);
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use crossbeam::channel::bounded;

    use super::*;

    /// What the processes have started may outlive them, with their end of the pipe.
    #[test]
    fn reading_ends_with_the_processes_though_others_keep_the_pipe() {
        let (silent, _kept) = io::pipe().unwrap();
        let (busy, mut writes) = io::pipe().unwrap();
        let mut output = OutputOfProcesses::default();
        output.start(Stream::Stderr, silent).unwrap();
        output.start(Stream::Stderr, busy).unwrap();
        let write = move || while writes.write_all(&[b'\n'; 1000]).is_ok() {};
        let writer = thread::Builder::new().spawn(write).unwrap();
        let (ended_tx, ended_rx) = bounded(1);
        let end = move || {
            output.end_readers();
            ended_tx.send(())
        };
        thread::Builder::new().spawn(end).unwrap();
        ended_rx.recv_timeout(Duration::from_secs(60)).unwrap();
        writer.join().unwrap(); // nobody reads any more
    }
}
