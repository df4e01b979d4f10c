//! [`DatasetSpec`]: the value of `--dataset`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::Error;

/// The source of the samples: `--dataset`.
///
/// ```
/// use ddp_mp::DatasetSpec;
///
/// let spec: DatasetSpec = "npy:x.npy,y.npy".parse()?;
/// assert_eq!(spec, DatasetSpec::Npy { inputs: "x.npy".into(), targets: "y.npy".into() });
/// assert_eq!(spec.to_string(), "npy:x.npy,y.npy");
/// # Ok::<(), ddp_mp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DatasetSpec {
    /// Random numbers: [`TensorDataset::random`](crate::TensorDataset::random).
    Random,
    /// 1797 handwritten digits of 8 x 8 pixels, built into the program.
    Digits,
    /// A `.safetensors` file with the tensors `inputs` and `targets`.
    Safetensors(PathBuf),
    /// Two `.npy` files.
    Npy {
        /// The file with the inputs.
        inputs: PathBuf,
        /// The file with the targets.
        targets: PathBuf,
    },
    /// A folder with files in MNIST's format.
    Idx(PathBuf),
    /// A CSV file.
    Csv(PathBuf),
}

impl DatasetSpec {
    /// Returns whether the targets are known to be classes.
    pub(crate) fn has_classes(&self) -> bool {
        matches!(self, Self::Digits | Self::Idx(_))
    }
}

impl FromStr for DatasetSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            let meant =
                meant(text).map_or(String::new(), |meant| format!("; did you mean {meant}?"));
            Error::Input(format!(
                "{text:?} is not a data set; use random, digits, safetensors:FILE, npy:INPUTS,TARGETS, idx:FOLDER or \
                 csv:FILE{meant}"
            ))
        };
        match text.split_once(':') {
            None if text == "random" => Ok(Self::Random),
            None if text == "digits" => Ok(Self::Digits),
            None | Some((_, "")) => Err(wrong()),
            Some(("safetensors", file)) => Ok(Self::Safetensors(file.into())),
            Some(("idx", folder)) => Ok(Self::Idx(folder.into())),
            Some(("csv", file)) => Ok(Self::Csv(file.into())),
            Some(("npy", files)) => match files.split(',').collect::<Vec<_>>()[..] {
                [inputs, targets] if !inputs.is_empty() && !targets.is_empty() => {
                    Ok(Self::Npy { inputs: inputs.into(), targets: targets.into() })
                }
                _ => Err(Error::Input(format!(
                    "npy takes two files, one with the inputs and one with the targets, and got {files:?}; \
                     use for example npy:x.npy,y.npy"
                ))),
            },
            Some(_) => Err(wrong()),
        }
    }
}

/// Returns the spec that the user probably meant by a name without a known format, derived from the file's name.
fn meant(text: &str) -> Option<String> {
    let (format, name) = text.split_once(':').unwrap_or(("", text));
    let ends = |ending: &str| name.to_lowercase().ends_with(ending) && name.len() > ending.len();
    match format.to_lowercase().as_str() {
        "mnist" if !name.is_empty() => Some(format!("idx:{name}")),
        _ if ends(".csv") || ends(".csv.gz") => Some(format!("csv:{name}")),
        _ if ends(".safetensors") => Some(format!("safetensors:{name}")),
        _ if ends(".npy") => Some(match name.split_once(',') {
            Some(_) => format!("npy:{name}"),
            None => format!("npy:{name},TARGETS.npy"),
        }),
        "" if !name.is_empty() && Path::new(name).is_dir() => Some(format!("idx:{name}")),
        _ => None,
    }
}

impl fmt::Display for DatasetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Random => f.write_str("random"),
            Self::Digits => f.write_str("digits"),
            Self::Safetensors(file) => write!(f, "safetensors:{}", file.display()),
            Self::Npy { inputs, targets } => {
                write!(f, "npy:{},{}", inputs.display(), targets.display())
            }
            Self::Idx(folder) => write!(f, "idx:{}", folder.display()),
            Self::Csv(file) => write!(f, "csv:{}", file.display()),
        }
    }
}

impl Serialize for DatasetSpec {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DatasetSpec {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_its_format_is_told_with_it() {
        for (text, meant) in [
            ("pets.csv", Some("csv:pets.csv")),
            ("CSV:pets.csv", Some("csv:pets.csv")),
            ("data/pets.csv.gz", Some("csv:data/pets.csv.gz")),
            ("pets.safetensors", Some("safetensors:pets.safetensors")),
            ("x.npy", Some("npy:x.npy,TARGETS.npy")),
            ("x.npy,y.npy", Some("npy:x.npy,y.npy")),
            ("src", Some("idx:src")),
            ("mnist:folder", Some("idx:folder")),
            (".csv", None),
            ("pets", None),
            ("", None),
        ] {
            let error = text.parse::<DatasetSpec>().unwrap_err().to_string();
            let end =
                meant.map_or("or csv:FILE".into(), |meant| format!("; did you mean {meant}?"));
            assert!(error.ends_with(&end), "{error}");
        }
    }
}
