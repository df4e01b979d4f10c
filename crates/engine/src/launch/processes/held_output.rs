//! The output of the processes besides rank 0's, while that one has the terminal of all.

use std::io::{self, BufRead, BufReader, IsTerminal, PipeReader, PipeWriter, Read, Write};
use std::process::Command;
use std::thread::{self, JoinHandle};

use crate::os::{HeldOutput, Stream};

/// The most bytes that are read at once. A longer line is kept in parts.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// The line that this process writes when the others have ended. What they have started may keep the pipe, and write on.
const END: &[u8] = b"\0ddp-mp: the processes have ended\0\n";

/// The pipe to which the processes of one start write instead of the terminal, and the thread that reads it.
#[derive(Debug)]
pub(crate) struct OutputOfProcesses {
    writer: PipeWriter,
    thread: JoinHandle<HeldOutput>,
}

impl OutputOfProcesses {
    /// Opens the pipe.
    ///
    /// # Errors
    /// When the system refuses it, or the thread.
    pub(crate) fn open() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let thread = thread::Builder::new().name("output".into());
        Ok(Self { writer, thread: thread.spawn(move || read(reader))? })
    }

    /// Makes the process of `command` write to the pipe instead of the terminal.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn capture(&self, command: &mut Command) -> io::Result<()> {
        if io::stdout().is_terminal() {
            command.stdout(self.writer.try_clone()?);
        }
        if io::stderr().is_terminal() {
            command.stderr(self.writer.try_clone()?);
        }
        Ok(())
    }

    /// Prints on stderr what was written. Call this when the processes have ended.
    pub(crate) fn print(self) {
        self.end().print();
    }

    fn end(mut self) -> HeldOutput {
        // One write, which others do not divide. The line before it may not be complete.
        let _ = self.writer.write_all(&[&b"\n"[..], END].concat());
        self.thread.join().unwrap_or_default()
    }
}

/// Reads lines up to [`END`].
fn read(pipe: PipeReader) -> HeldOutput {
    let (mut pipe, mut held) = (BufReader::new(pipe), HeldOutput::default());
    let mut before = Vec::new();
    loop {
        let mut line = Vec::new();
        match pipe.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(1..) if line != END => held.add(Stream::Stderr, &before),
            _ => break,
        }
        before = line;
    }
    if before != b"\n" {
        held.add(Stream::Stderr, &before);
    }
    held
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crossbeam::channel::bounded;

    use super::*;

    /// What the processes have started may outlive them, with their end of the pipe.
    #[test]
    fn reading_ends_with_the_processes_though_others_keep_the_pipe() {
        let output = OutputOfProcesses::open().unwrap();
        let _silent = output.writer.try_clone().unwrap();
        let mut writes = output.writer.try_clone().unwrap();
        let write = move || while writes.write_all(&[b'\n'; 1000]).is_ok() {};
        let writer = thread::Builder::new().spawn(write).unwrap();
        let (ended_tx, ended_rx) = bounded(1);
        let end = move || {
            output.end();
            ended_tx.send(())
        };
        thread::Builder::new().spawn(end).unwrap();
        ended_rx.recv_timeout(Duration::from_secs(60)).unwrap();
        writer.join().unwrap(); // nobody reads any more
    }
}
