//! [`Utf8Stream`]: text that arrives byte by byte, written as soon as characters are complete.

use std::io;

use super::Printer;

/// A writer of text to stdout. A character is written when its last byte has arrived. Bytes that are no UTF-8 are
/// replaced by U+FFFD.
#[derive(Debug)]
pub struct Utf8Stream<'a> {
    printer: &'a Printer,
    /// The beginning of a character.
    incomplete: Vec<u8>,
    ends_line: bool,
}

impl<'a> Utf8Stream<'a> {
    /// Creates a writer to the stdout of `printer`.
    pub fn new(printer: &'a Printer) -> Self {
        Self { printer, incomplete: Vec::new(), ends_line: true }
    }

    /// Writes `bytes`, except for an incomplete character at their end. Returns `false` if the reader has closed the pipe.
    ///
    /// # Errors
    /// When stdout cannot be written.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<bool> {
        self.incomplete.extend_from_slice(bytes);
        let complete = complete_len(&self.incomplete);
        let text: Vec<u8> = self.incomplete.drain(..complete).collect();
        if let Some(last) = text.last() {
            self.ends_line = *last == b'\n';
        }
        self.printer.text(&String::from_utf8_lossy(&text))
    }

    /// Writes what is left, and a line break if the last line has none.
    ///
    /// # Errors
    /// When stdout cannot be written.
    pub fn end(self) -> io::Result<()> {
        let rest = String::from_utf8_lossy(&self.incomplete);
        let line_break = if self.ends_line && rest.is_empty() { "" } else { "\n" };
        self.printer.text(&format!("{rest}{line_break}")).map(drop)
    }
}

/// Returns the number of bytes before an incomplete character at the end of `bytes`.
fn complete_len(bytes: &[u8]) -> usize {
    let rest = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    let is_incomplete = str::from_utf8(rest).is_err_and(|error| error.error_len().is_none());
    bytes.len() - if is_incomplete { rest.len() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn character_is_complete_with_its_last_byte() {
        let text = "aé\u{1f600}".as_bytes();
        let complete: Vec<usize> = (0..=text.len()).map(|len| complete_len(&text[..len])).collect();
        assert_eq!(complete, [0, 1, 1, 3, 3, 3, 3, 7]);
        // What can never become a character does not wait.
        assert_eq!(complete_len(b"\xff\xc3"), 1);
        assert_eq!(complete_len(b"\xc3a"), 2);
    }
}
