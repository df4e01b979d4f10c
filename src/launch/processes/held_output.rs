//! The output of the processes besides rank 0's, while that one shows the live view on the terminal of all.

use std::io::{self, BufRead, BufReader, IsTerminal, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use crate::telemetry::{HeldOutput, Stream};

/// The most bytes of a line that are read at once.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// What the processes of one start have written to the terminal.
#[derive(Debug, Default)]
pub(super) struct OutputOfProcesses {
    held: Arc<Mutex<HeldOutput>>,
    readers: Vec<JoinHandle<()>>,
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
        child.stderr.take().map_or(Ok(()), |pipe| self.start(Stream::Stderr, pipe))
    }

    fn start(&mut self, stream: Stream, pipe: impl Read + Send + 'static) -> io::Result<()> {
        let held = self.held.clone();
        let read = move || {
            let (mut pipe, mut line) = (BufReader::new(pipe), Vec::new());
            let most = MAX_LINE_BYTES;
            while pipe.by_ref().take(most).read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0)
            {
                held.lock().add(stream, &line);
                line.clear();
            }
        };
        let thread = thread::Builder::new().name("output".into());
        self.readers.push(thread.spawn(read)?);
        Ok(())
    }

    /// Prints all that was read. Call this when the processes have ended.
    pub(super) fn print(self) {
        for reader in self.readers {
            let _ = reader.join(); // ends with its pipe
        }
        self.held.lock().print();
    }
}
