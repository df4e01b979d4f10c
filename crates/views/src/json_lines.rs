//! A file of lines of JSON that a flag names: that of `--metrics`, and that of `--record`. A run that starts again appends
//! to it.

use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use engine::error::Result;
use engine::files::{Appender, LinesBefore, Place, lines_before};
use engine::os::limits::output_failed;

/// The open file.
#[derive(Debug)]
pub(super) struct JsonLines {
    out: Appender,
    /// The flag and the path, for messages.
    name: String,
}

impl JsonLines {
    /// Opens the file at `path` for appending, and creates its folder if needed. `check` gets the lines that it has, and
    /// what it returns is returned, too.
    ///
    /// # Errors
    /// That of `check`, or if the file cannot be opened.
    pub(super) fn open<T>(
        name: String,
        path: &Path,
        check: impl FnOnce(Option<&LinesBefore>) -> io::Result<T>,
    ) -> io::Result<(Self, T)> {
        let before = lines_before(path)?;
        let checked = check(before.as_ref())?;
        Place::create_folder_of(path)?;
        Ok((Self { out: Appender::open(path)?.after(before.as_ref()), name }, checked))
    }

    /// Writes a line as a whole.
    ///
    /// # Errors
    /// [`Error::Write`](engine::Error::Write).
    pub(super) fn line(&mut self, line: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(line).map_err(io::Error::from);
        let written = line.and_then(|line| writeln!(self.out, "{line}"));
        written.and_then(|()| self.out.flush()).map_err(|error| output_failed(&self.name, &error))
    }
}
