//! Text for the terminal that is kept while the live view is shown, and printed afterwards.

use std::io::{self, Write};

/// The stream that a text is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// Text for both streams, in its order.
#[derive(Debug, Default)]
pub(crate) struct HeldOutput(Vec<(Stream, Vec<u8>)>);

impl HeldOutput {
    /// Adds text for a stream.
    pub(crate) fn add(&mut self, stream: Stream, text: &[u8]) {
        self.0.push((stream, text.into()));
    }

    /// Prints the text, and forgets it.
    pub(crate) fn print(&mut self) {
        for (stream, text) in self.0.drain(..) {
            // Errors are ignored: a terminal that is gone shows nothing.
            let _ = match stream {
                Stream::Stdout => io::stdout().lock().write_all(&text),
                Stream::Stderr => io::stderr().lock().write_all(&text),
            };
        }
        let _ = io::stdout().flush();
    }
}
