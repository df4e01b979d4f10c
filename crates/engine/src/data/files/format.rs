//! [`Format`]: all that the program knows about a data format.

use std::path::PathBuf;

use super::TargetKind;
use super::array::Array;
use crate::error::{Error, Result};

/// The inputs and the targets of a file.
pub(super) type InputsAndTargets = (Array, Array);

/// A data format: how `--dataset` names it, and how its files are read.
///
/// A location is the text after the colon in `--dataset`. It is empty for data without files.
#[derive(Debug)]
pub(super) struct Format {
    /// The form of `--dataset`, such as `csv:FILE`. Between two files there is a comma.
    pub usage: &'static str,
    /// A few words about the format for the help; empty for none.
    pub remark: &'static str,
    /// The endings of file names by which a user's path without a format is recognized.
    pub endings: &'static [&'static str],
    /// Whether the targets are known to be classes.
    pub has_classes: bool,
    /// Reads the inputs and targets at a location. Its error names the file, the problem, and the remedy.
    pub read: Read,
    /// What a format has whose location is a folder.
    pub folder: Option<Folder>,
}

type Read = fn(&str, TargetKind) -> Result<InputsAndTargets>;

/// What a format has whose location is a folder: several files, and validation samples in files of their own.
#[derive(Debug)]
pub(super) struct Folder {
    /// Returns the files that may be read.
    pub files: fn(&str) -> Vec<PathBuf>,
    /// The name of the validation samples.
    pub validation: &'static str,
    /// Reads these samples. `None` if the files do not exist.
    pub read_validation: fn(&str) -> Result<Option<InputsAndTargets>>,
}

impl Format {
    /// Returns a format of the form `usage` that `read` reads, and no more.
    pub(super) const fn new(usage: &'static str, read: Read) -> Self {
        Self { usage, remark: "", endings: &[], has_classes: false, read, folder: None }
    }

    /// Returns the name before the colon.
    pub(super) fn name(&self) -> &'static str {
        self.usage.split_once(':').map_or(self.usage, |(name, _)| name)
    }

    /// Returns whether there are files, so that a location follows the name.
    pub(super) fn has_files(&self) -> bool {
        self.usage.contains(':')
    }

    /// Returns whether the inputs are in one file and the targets in another.
    fn is_pair(&self) -> bool {
        self.usage.contains(',')
    }

    /// Checks the text of a location, not its files.
    ///
    /// # Errors
    /// [`Error::Input`] with the right form.
    pub(super) fn check(&self, location: &str) -> Result<()> {
        let paths = self.paths(location);
        if self.is_pair() && (paths.len() != 2 || paths.contains(&"")) {
            let name = self.name();
            return Err(Error::data(format!(
                "{name} takes two files, one with the inputs and one with the targets, and got {location:?}; use for \
                 example {name}:x.{name},y.{name}"
            )));
        }
        Ok(())
    }

    /// Returns the paths in `location`, between which there are commas.
    pub(super) fn paths<'a>(&self, location: &'a str) -> Vec<&'a str> {
        if self.is_pair() {
            return location.split(',').collect();
        }
        if self.has_files() { vec![location] } else { Vec::new() }
    }

    /// Returns the files that may be read.
    pub(crate) fn files(&self, location: &str) -> Vec<PathBuf> {
        match &self.folder {
            Some(folder) => (folder.files)(location),
            None => self.paths(location).into_iter().map(PathBuf::from).collect(),
        }
    }
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        self.usage == other.usage
    }
}

impl Eq for Format {}
