//! Text for the terminal that is kept while something is drawn on it, and printed afterwards.

use std::collections::VecDeque;
use std::io::{self, Write};

/// The stream that a text is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// The most bytes that are kept.
const MAX_BYTES: usize = 1 << 20;

/// The newest text for both streams, in its order.
#[derive(Debug, Default)]
#[doc(hidden)]
pub struct HeldOutput {
    texts: VecDeque<(Stream, Vec<u8>)>,
    bytes: usize,
    /// How many older texts were left out.
    left_out: usize,
}

impl HeldOutput {
    /// Adds text for a stream. Leaves out the oldest beyond `MAX_BYTES`.
    #[doc(hidden)]
    pub fn add(&mut self, stream: Stream, text: &[u8]) {
        self.bytes += text.len();
        self.texts.push_back((stream, text.into()));
        while self.bytes > MAX_BYTES
            && let Some((_, oldest)) = self.texts.pop_front()
        {
            self.bytes -= oldest.len();
            self.left_out += 1;
        }
    }

    /// Prints the text, and forgets it.
    #[doc(hidden)]
    pub fn print(&mut self) {
        self.print_to(&mut io::stdout().lock(), &mut io::stderr().lock());
    }

    fn print_to(&mut self, stdout: &mut impl Write, stderr: &mut impl Write) {
        let Self { texts, left_out, .. } = std::mem::take(self);
        // Errors are ignored: a terminal that is gone shows nothing.
        if left_out > 0 {
            let _ = writeln!(
                stderr,
                "ddp-mp: older output was dropped here ({left_out} writes): only the newest 1 MiB is kept"
            );
        }
        for (stream, text) in texts {
            let _ = match stream {
                Stream::Stdout => stdout.write_all(&text),
                Stream::Stderr => stderr.write_all(&text),
            };
        }
        let _ = stdout.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_run_keeps_its_newest_output() {
        let mut held = HeldOutput::default();
        for number in 0..3000 {
            let stream = if number % 2 == 0 { Stream::Stdout } else { Stream::Stderr };
            held.add(stream, format!("{number:>1023}\n").as_bytes());
            assert!(held.texts.iter().map(|(_, text)| text.len()).sum::<usize>() <= MAX_BYTES);
        }
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        held.print_to(&mut stdout, &mut stderr);
        let [stdout, stderr] = [stdout, stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(stdout.ends_with("2998\n") && stderr.ends_with("2999\n"));
        let first =
            "ddp-mp: older output was dropped here (1976 writes): only the newest 1 MiB is kept\n";
        assert!(stderr.starts_with(first), "{stderr}");
        assert_eq!(stdout.lines().count() + stderr.lines().count(), 1024 + 1);
        held.add(Stream::Stdout, &vec![b'x'; 2 * MAX_BYTES]);
        assert_eq!((held.texts.len(), held.bytes, held.left_out), (0, 0, 1));
    }
}
