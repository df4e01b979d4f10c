//! [`DatasetSpec`]: the value of `--dataset`.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Serialize, Serializer};
use xxhash_rust::xxh3::xxh3_64;

use super::array::Array;
use super::built_in::{DIGITS, RANDOM};
use super::format::Format;
use super::{FORMATS, TEXT, TargetKind};
use crate::error::{Error, Result, Shown, escaped_line};
use crate::ffi::MappedFile;
use crate::records::DataFile;

/// The source of the samples: `--dataset`.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// use ddp_mp::DatasetSpec;
///
/// let spec: DatasetSpec = "npy:x.npy,y.npy".parse()?;
/// assert_eq!(spec.to_string(), "npy:x.npy,y.npy");
/// assert_eq!("digits".parse::<DatasetSpec>()?, DatasetSpec::DIGITS);
/// # Ok::<(), ddp_mp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetSpec {
    format: &'static Format,
    /// The text after the colon.
    location: String,
}

impl DatasetSpec {
    /// Random numbers: [`TensorDataset::random`](crate::TensorDataset::random).
    pub const RANDOM: Self = Self { format: &RANDOM, location: String::new() };

    /// 1797 handwritten digits of 8 x 8 pixels, built into the program.
    pub const DIGITS: Self = Self { format: &DIGITS, location: String::new() };

    /// Returns the forms of all specs, for the help.
    pub fn forms() -> String {
        let form = |format: &&Format| match format.remark {
            "" => format.usage.into(),
            remark => format!("{} ({remark})", format.usage),
        };
        let forms = |have_files: bool, separator: &str| {
            let formats = FORMATS.iter().filter(|format| format.has_files() == have_files);
            formats.map(form).collect::<Vec<String>>().join(separator)
        };
        format!("{}; or your own file: {}", forms(false, "; "), forms(true, ", "))
    }

    /// Returns whether the targets are known to be classes.
    #[doc(hidden)]
    pub fn has_classes(&self) -> bool {
        self.format.has_classes
    }

    /// Returns the file of a text; `None` for other formats.
    #[doc(hidden)]
    pub fn text_file(&self) -> Option<&Path> {
        (*self.format == TEXT).then(|| Path::new(&self.location))
    }

    /// Returns the files that may be read.
    #[doc(hidden)]
    pub fn files(&self) -> Vec<PathBuf> {
        self.format.files(&self.location)
    }

    /// Returns this data set with `change` applied to each of its paths.
    #[doc(hidden)]
    pub fn with_paths<E>(&self, change: impl Fn(&str) -> Result<String, E>) -> Result<Self, E> {
        let paths = self.format.paths(&self.location).into_iter().map(change);
        Ok(Self { location: paths.collect::<Result<Vec<_>, E>>()?.join(","), ..*self })
    }

    /// Returns the format, and the names of the files without their folders.
    #[doc(hidden)]
    pub fn names(&self) -> String {
        let name = |path: &str| {
            let name = Path::new(path).file_name().unwrap_or(path.as_ref());
            Ok::<_, Infallible>(name.to_string_lossy().into_owned())
        };
        let Ok(names) = self.with_paths(name);
        names.to_string()
    }

    /// Returns each file that may be read and is not empty, with the hash of its contents. Reads all of them.
    ///
    /// # Errors
    /// [`Error::Input`] that names the file that cannot be read.
    #[doc(hidden)]
    pub fn data_files(&self) -> Result<Vec<DataFile>> {
        let files = self.files().into_iter();
        let files = files.filter(|file| file.metadata().is_ok_and(|file| file.len() > 0));
        let hashed = |file: PathBuf| -> Result<DataFile> {
            let path = file.to_string_lossy().into_owned();
            Ok(DataFile { path, xxh3: format!("{:016x}", xxh3_64(&MappedFile::open(&file)?)) })
        };
        files.map(hashed).collect()
    }

    /// Returns whether there may be validation samples in files of their own.
    #[doc(hidden)]
    pub fn may_have_validation(&self) -> bool {
        self.format.folder.is_some()
    }

    /// Reads the inputs and targets.
    pub(super) fn read(&self, kind: TargetKind) -> Result<(Array, Array)> {
        (self.format.read)(&self.location, kind)
    }

    /// Reads the validation samples in files of their own, and returns their name; `None` if there are none.
    pub(super) fn read_validation(&self) -> Result<Option<(&'static str, (Array, Array))>> {
        let Some(folder) = &self.format.folder else { return Ok(None) };
        let arrays = (folder.read_validation)(&self.location)?;
        Ok(arrays.map(|arrays| (folder.validation, arrays)))
    }
}

impl FromStr for DatasetSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (name, location) = text.split_once(':').unwrap_or((text, ""));
        let is_this = |format: &&&Format| {
            format.name() == name
                && format.has_files() != location.is_empty()
                && format.has_files() == text.contains(':')
        };
        let Some(&format) = FORMATS.iter().find(is_this) else { return Err(unknown(text)) };
        format.check(location)?;
        Ok(Self { format, location: location.into() })
    }
}

/// Returns the error for a text that is no data set, with the data set that the user probably meant.
fn unknown(text: &str) -> Error {
    let (_, path) = text.split_once(':').unwrap_or(("", text));
    let lower = path.to_lowercase();
    let is_this = |format: &&&Format| format.endings.iter().any(|ending| lower.ends_with(ending));
    let meant = FORMATS.iter().find(is_this).map(|format| {
        format!("; did you mean {}?", format.usage.replace("FILE", &escaped_line(path)))
    });
    let [others @ .., last] = &FORMATS.map(|format| format.usage);
    Error::usage(format!(
        "{text:?} is not a data set; use {} or {last}{}",
        others.join(", "),
        meant.unwrap_or_default()
    ))
}

impl fmt::Display for DatasetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, location } = self;
        f.write_str(format.name())?;
        if format.has_files() { write!(f, ":{location}") } else { Ok(()) }
    }
}

impl Shown for DatasetSpec {
    fn shown(&self) -> Cow<'_, str> {
        Cow::Owned(escaped_line(&self.to_string()).into_owned())
    }
}

impl Serialize for DatasetSpec {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dataset_without_format_error_suggests_the_format() {
        for (text, meant) in [
            ("pets.csv", Some("csv:pets.csv")),
            ("CSV:pets.csv", Some("csv:pets.csv")),
            ("data/pets.csv.gz", Some("csv:data/pets.csv.gz")),
            ("pets.safetensors", Some("safetensors:pets.safetensors")),
            ("x.npy", Some("npy:INPUTS,TARGETS")),
            ("mnist", None),
            ("poem.txt", Some("text:poem.txt")),
            ("pets", None),
            ("", None),
        ] {
            let error = text.parse::<DatasetSpec>().unwrap_err().to_string();
            let end =
                meant.map_or("or text:FILE".into(), |meant| format!("; did you mean {meant}?"));
            assert!(error.ends_with(&end), "{error}");
        }
    }
}
