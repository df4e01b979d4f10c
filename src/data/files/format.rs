//! [`Format`]: all that the program knows about a data format.

use std::fmt;
use std::path::PathBuf;

use super::TargetKind;
use super::array::Array;
use crate::error::Result;

/// A data format: how `--dataset` names it, and how its files are read.
///
/// `location` is the text after the colon in `--dataset`. It is empty for data without files.
pub(super) trait Format: fmt::Debug + Sync {
    /// Returns the form of `--dataset`, such as `csv:FILE`.
    fn usage(&self) -> &'static str;

    /// Returns the name before the colon.
    fn name(&self) -> &'static str {
        self.usage().split_once(':').map_or(self.usage(), |(name, _)| name)
    }

    /// Returns a few words about the format for the help; empty for none.
    fn remark(&self) -> &'static str {
        ""
    }

    /// Returns whether there are files, so that a location follows the name.
    fn has_files(&self) -> bool {
        self.usage().contains(':')
    }

    /// Checks the text of a location, not its files.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) with the right form.
    fn check(&self, location: &str) -> Result<()> {
        let _ = location;
        Ok(())
    }

    /// Returns the endings of file names by which a user's path without a format is recognized.
    fn endings(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns the location that the user probably meant by `path`, written after the unknown format `prefix` or alone
    /// (`prefix` is empty). `None` if it does not look like this format.
    fn guess(&self, prefix: &str, path: &str) -> Option<String> {
        let _ = prefix;
        let is_named = |ending: &&str| path.len() > ending.len() && lower_ends_with(path, ending);
        self.endings().iter().any(is_named).then(|| path.into())
    }

    /// Returns the paths in `location`, between which there are commas.
    fn paths<'a>(&self, location: &'a str) -> Vec<&'a str> {
        if self.has_files() { vec![location] } else { Vec::new() }
    }

    /// Returns the files that may be read.
    fn files(&self, location: &str) -> Vec<PathBuf> {
        self.paths(location).into_iter().map(PathBuf::from).collect()
    }

    /// Returns whether the targets are known to be classes.
    fn has_classes(&self) -> bool {
        false
    }

    /// Reads the inputs and targets.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) that names the file, the problem, and the remedy.
    fn read(&self, location: &str, kind: TargetKind) -> Result<(Array, Array)>;

    /// Returns the name of the validation samples in files of their own; `None` if the format has none.
    fn validation_name(&self) -> Option<&'static str> {
        None
    }

    /// Reads these validation samples. `None` if the files do not exist.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_validation(&self, location: &str) -> Result<Option<(Array, Array)>> {
        let _ = location;
        Ok(None)
    }
}

impl PartialEq for dyn Format {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for dyn Format {}

fn lower_ends_with(path: &str, ending: &str) -> bool {
    path.to_lowercase().ends_with(ending)
}
