//! The file of `--record`: lines of JSON with hashes of what each rank had in each step. A run that starts again appends
//! to it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::json_lines::JsonLines;
use super::{Outcome, Printer, View};
use engine::error::{Result, Shown};
use engine::events::{Event, Fingerprint, Observer};
use engine::files::{LinesBefore, lines_before};

/// The first bytes of a record of any version.
const BEGINS: &[u8] = b"{\"event\":\"header\",\"format\":";

/// The file of a process, whose ranks write to it.
#[derive(Debug)]
pub struct Record {
    lines: Mutex<JsonLines>,
    /// Whether a rank of this process has written what all hashes are of.
    has_header: AtomicBool,
    /// Where to say where the record is, and the text; `None` if this process does not say so.
    note: Option<(Arc<Printer>, String)>,
}

impl Record {
    /// Refuses a file at `path` that a run cannot append to: only one that `continues` an earlier run appends to its record.
    /// Changes nothing.
    ///
    /// # Errors
    /// If the file cannot be read, is not a record, or exists without an earlier run to continue.
    pub fn check(path: &Path, continues: bool) -> io::Result<()> {
        lines_before(path).and_then(|before| check(before.as_ref(), continues))
    }

    /// Opens the file at `path`, and creates its folder if needed.
    ///
    /// # Errors
    /// If the file cannot be opened; also the errors of [`check`](Self::check).
    pub fn open(path: &Path, continues: bool) -> io::Result<Self> {
        let check = |before: Option<&LinesBefore>| check(before, continues);
        let (lines, ()) = JsonLines::open(format!("--record {}", path.shown()), path, check)?;
        Ok(Self { lines: Mutex::new(lines), has_header: AtomicBool::default(), note: None })
    }

    /// Prints `text` with `printer` at the end, if there is one.
    pub fn note_to(self, printer: Option<Arc<Printer>>, text: String) -> Self {
        Self { note: printer.map(|printer| (printer, text)), ..self }
    }
}

/// Refuses lines that are not a record, and a record that this run does not continue.
fn check(before: Option<&LinesBefore>, continues: bool) -> io::Result<()> {
    match before {
        Some(before) if !before.first.starts_with(BEGINS) => {
            Err(io::Error::other("this file exists and is not a record; use another name"))
        }
        Some(_) if !continues => Err(io::Error::other(
            "this record exists; remove it, or use another name (only a run with --resume appends to a record)",
        )),
        _ => Ok(()),
    }
}

impl Observer for Record {
    fn event(&self, event: &Event) -> anyhow::Result<()> {
        let Event::Fingerprint { fingerprint } = event else { return Ok(()) };
        let mut lines = self.lines.lock();
        if matches!(fingerprint, Fingerprint::Header(_))
            && self.has_header.swap(true, Ordering::Relaxed)
        {
            return Ok(());
        }
        Ok(lines.line(fingerprint)?)
    }
}

impl View for Record {
    fn finish(&self, _: &Outcome) -> Result<()> {
        if let Some((printer, text)) = &self.note
            && self.has_header.load(Ordering::Relaxed)
        {
            printer.info(text);
        }
        Ok(())
    }
}
