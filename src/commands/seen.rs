//! What `--trace` leaves behind.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::launched::Launched;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::observe::{Printer, trace_file, write_trace};
use crate::sync::History;

/// Who wants to see what the ranks of this process did.
#[derive(Debug)]
pub(super) struct Seen {
    /// The file of this process.
    trace: Option<PathBuf>,
    history: Arc<OnceLock<History>>,
}

impl Seen {
    /// As `config` says, for this process of those that `launched` knows.
    ///
    /// # Errors
    /// [`Error::Input`] if a file cannot be written.
    pub(super) fn new(config: &Config, launched: &Launched) -> Result<Self> {
        let process = launched.process();
        let trace = config.trace.as_deref().map(|path| trace_file(path, process));
        if let Some(path) = &trace {
            check_writable("--trace", path)?;
        }
        Ok(Self { trace, history: Arc::default() })
    }

    /// Where to leave it, if anybody wants it.
    pub(super) fn history(&self) -> Option<Arc<OnceLock<History>>> {
        self.trace.is_some().then(|| self.history.clone())
    }

    /// The ranks have ended.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub(super) fn write(&self, printer: &Printer) -> Result<()> {
        let (Some(path), Some(history)) = (&self.trace, self.history.get()) else { return Ok(()) };
        write_trace(history, path).map_err(|error| Error::Write {
            what: format!("--trace {}", path.display()),
            reason: error.to_string(),
        })?;
        if history.process[0] == 0 {
            let lost = history.ranks.iter().map(|rank| rank.lost).max().unwrap_or(0);
            let lost = match lost {
                0 => String::new(),
                _ => " has the end of the run; it".into(),
            };
            let path = path.display();
            printer.note(&format!("the trace {path}{lost} can be looked at in ui.perfetto.dev"));
        }
        Ok(())
    }
}

/// Nothing that is in the file is touched.
fn check_writable(flag: &str, path: &Path) -> Result<()> {
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    let open = |()| OpenOptions::new().write(true).create(true).truncate(false).open(path);
    let refuse = |error| Error::Input(format!("{flag} {}: {error}", path.display()));
    folder.and_then(open).map(drop).map_err(refuse)
}
